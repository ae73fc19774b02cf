#pragma once
/// `RingCommunicator`: the collectives of `ring.hpp` over a Transport.

#include <chorus/comm/algorithms/ring_runner.hpp>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/engine/queued_engine.hpp>
#include <vector>

namespace chorus::comm {

/// A Communicator over shared memory, TCP or threads.
class RingCommunicator : public AnyCommunicator {
 public:
  /// The rank that `link` stands for; `members`: see World.
  explicit RingCommunicator(std::string_view name, std::unique_ptr<Transport> link,
                            const std::vector<int>& members = {})
      : AnyCommunicator(engine(name, std::move(link), members)) {}

 private:
  static std::shared_ptr<Engine> engine(std::string_view name, std::unique_ptr<Transport> link,
                                        const std::vector<int>& members) {
    const int rank = link->rank, size = link->size;
    return std::make_shared<QueuedEngine<RingRunner>>(rank, size, members, name, members, std::move(link));
  }
};

static_assert(Communicator<RingCommunicator>);

}  // namespace chorus::comm
