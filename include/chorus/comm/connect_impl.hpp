#pragma once
/// How `connect` makes a communicator.

#include <array>
#include <chorus/comm/algorithms/transport_communicator.hpp>
#include <chorus/comm/connect.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/comm/transport/hybrid_transport.hpp>
#include <chorus/comm/transport/mesh.hpp>

namespace chorus::comm {

namespace detail {

inline EngineMaker& maker_of(Backend backend) {
  static std::array<EngineMaker, 9> makers{};
  return makers[static_cast<std::size_t>(backend) % makers.size()];
}

[[gnu::cold]] inline std::unique_ptr<Transport> meet(const World& world, Backend backend) {
  check<UsageError>((world.rank == 0 && world.listen_fd >= 0) || (world.master_port > 0 && world.master_port < 65536),
                    "connect: master_port is ", world.master_port, ", expected 1 to 65535");
  auto meeting = world.rank == 0 ? Host(world, backend).meet() : join(world, backend);
  if (meeting.kind == Backend::shm)
    return std::make_unique<ShmTransport>(std::make_shared<SharedRegion>(std::move(meeting.region)), world.rank,
                                          world.size, world.timeout);
  auto link = std::make_unique<TcpTransport>(world.rank, world.size, world.timeout);
  connect_all(world, meeting, link->peers());
  if (backend != Backend::hierarchical) return link;
  try {
    return std::make_unique<HybridTransport>(std::move(link));
  } catch (const LinkTimeout& error) {
    throw TimeoutError(cat("rank ", world.rank, ": connect: ", error.what()));
  } catch (const LinkError& error) {
    throw CommError(cat("rank ", world.rank, ": connect: ", error.what()));
  }
}

}  // namespace detail

CHORUS_INLINE AnyCommunicator connect(const World& world, const ConnectOptions& options) {
  auto listener = Socket::adopt(world.listen_fd);  // closed by any error here
  check_ranks("connect", world.size, world.rank);
  check_timeout("connect", world.timeout);
  const auto backend = options.backend == Backend::automatic ? world.backend : options.backend;
  const auto maker = detail::maker_of(backend);
  check<UsageError>(backend <= Backend::hierarchical || maker, "connect: this program was built without backend ",
                    backend, ": include <chorus/comm/", backend, ".hpp> and link its library");
  check<UsageError>(world.all_reduce == Algorithm::automatic || !maker, "rank ", world.rank, ": all-reduce ",
                    world.all_reduce, " is unknown to ", backend, ", expected auto");
  if (world.size == 1) return {};
  if (backend == Backend::thread) return join_thread_group(world);
  listener.release();
  if (maker) {
    World control = world;  // the engine's own, for its calls before the library's
    control.backend = Backend::automatic;
    return AnyCommunicator(maker(control));
  }
  auto link = detail::meet(world, backend);
  const auto carrier = dynamic_cast<const ShmTransport*>(link.get()) ? Backend::shm
                       : !link->machines().empty()                   ? Backend::hierarchical
                                                                     : Backend::tcp;
  return TransportCommunicator(name(carrier), std::move(link), world.members, world.all_reduce, world.axis);
}

CHORUS_INLINE Backend backend_of(std::string_view text) {
  for (int i = 0; i <= static_cast<int>(Backend::nccl); ++i)
    if (name(static_cast<Backend>(i)) == text) return static_cast<Backend>(i);
  fail<UsageError>("backend: expected auto, shm, tcp, thread, hierarchical, mpi, gloo or nccl, got '", printable(text),
                   "'");
}

CHORUS_INLINE Algorithm all_reduce_of(std::string_view text) {
  for (const auto& choice : detail::all_reduce_choices)
    if (name(choice.algorithm) == text) return choice.algorithm;
  fail<UsageError>("all-reduce: expected auto, ring, direct, in_place or hierarchical, got '", printable(text), "'");
}

CHORUS_INLINE bool register_backend(Backend backend, EngineMaker maker) {
  detail::maker_of(backend) = maker;
  return true;
}

}  // namespace chorus::comm
