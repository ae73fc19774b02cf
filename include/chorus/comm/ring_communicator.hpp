#pragma once
/// `RingCommunicator`: the collectives of `ring.hpp` over a Transport.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/queued_engine.hpp>
#include <chorus/comm/ring_runner.hpp>

namespace chorus::inline CHORUS_ABI::comm {

/// A Communicator over shared memory, TCP or threads.
class RingCommunicator : public AnyCommunicator {
 public:
  /// The rank that `link` stands for.
  explicit RingCommunicator(std::string_view name, std::unique_ptr<Transport> link)
      : AnyCommunicator(engine(name, std::move(link))) {}

 private:
  static std::shared_ptr<Engine> engine(std::string_view name, std::unique_ptr<Transport> link) {
    const int rank = link->rank, size = link->size;
    return std::make_shared<QueuedEngine<RingRunner>>(rank, size, name, std::move(link));
  }
};

static_assert(Communicator<RingCommunicator>);

}  // namespace chorus::inline CHORUS_ABI::comm
