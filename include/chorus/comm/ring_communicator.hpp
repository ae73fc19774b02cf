#pragma once
/// `RingCommunicator`: the collectives of `ring.hpp` over a Transport.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/queued_engine.hpp>
#include <chorus/comm/ring_runner.hpp>
#include <vector>

namespace chorus::inline CHORUS_ABI::comm {

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

}  // namespace chorus::inline CHORUS_ABI::comm
