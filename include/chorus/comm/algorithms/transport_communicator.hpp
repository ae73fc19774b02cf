#pragma once
/// `TransportCommunicator`: chorus' own collectives over a Transport.

#include <chorus/comm/algorithms/collective_runner.hpp>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/engine/queued_engine.hpp>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm {

/// A Communicator over shared memory, TCP or threads.
class TransportCommunicator : public AnyCommunicator {
 public:
  /// The rank that `link` stands for; `members`, `all_reduce`: see World. Throws UsageError, on all ranks, for an
  /// all-reduce that can't be done there.
  explicit TransportCommunicator(std::string_view name, std::unique_ptr<Transport> link,
                                 const std::vector<int>& members = {}, Algorithm all_reduce = Algorithm::automatic)
      : AnyCommunicator(engine(name, std::move(link), members, all_reduce)) {}

 private:
  static std::shared_ptr<Engine> engine(std::string_view name, std::unique_ptr<Transport> link,
                                        const std::vector<int>& members, Algorithm all_reduce) {
    check_all_reduce(all_reduce, *link, name);
    const int rank = link->rank, size = link->size;
    return std::make_shared<QueuedEngine<CollectiveRunner>>(rank, size, members, name, members, std::move(link),
                                                            all_reduce);
  }
};

static_assert(Communicator<TransportCommunicator>);

}  // namespace chorus::comm
