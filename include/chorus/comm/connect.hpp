#pragma once
/// `connect`: makes the communicator of a job's processes.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/world.hpp>

namespace chorus::comm {

struct ConnectOptions {
  Backend backend = Backend::automatic;  ///< the same on all ranks; automatic: the world's
};

/// Meets the other ranks at world.master_addr:master_port and returns this rank's communicator. Blocks until all have
/// arrived. Throws UsageError for an invalid World, for a backend that this program was built without, and for an
/// all-reduce algorithm that can't run there; CommError if the port is in use, if a rank is refused, for example
/// because it chose another backend or algorithm, or if requested shared memory is not available; TimeoutError with the
/// missing ranks after world.timeout. Takes over world.listen_fd. A group of one needs no address and opens no socket.
/// Ranks that are threads (Backend::thread) meet within the process; those with one master_port form a group.
[[gnu::cold]] AnyCommunicator connect(const World& world, const ConnectOptions& options = {});

/// `auto`, `shm`, `tcp`, `thread`, `hierarchical`, `mpi`, `gloo` or `nccl`. Throws UsageError for another name.
Backend backend_of(std::string_view name);

/// `auto`, `ring`, `direct`, `in_place` or `hierarchical`. Throws UsageError for another name.
Algorithm all_reduce_of(std::string_view name);

/// Makes the engine of one rank, if world.size is 2 or more.
using EngineMaker = std::shared_ptr<Engine> (*)(const World& world);

/// The functions that `connect` calls for `backend`; <chorus/comm/mpi.hpp> and similar headers register theirs.
bool register_backend(Backend backend, EngineMaker maker);

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/connect_impl.hpp>
#endif
