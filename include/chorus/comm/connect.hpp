#pragma once
/// `connect`: makes the communicator of the processes of a job.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/world.hpp>

namespace chorus::comm {

struct ConnectOptions {
  Backend backend = Backend::automatic;  ///< the same on all ranks; automatic: the world's
};

/// Meets the other ranks at world.master_addr:master_port and returns this rank's communicator. Blocks until all have
/// come. Throws UsageError for a World that makes no sense, for a backend that this program was built without, and for
/// an all-reduce algorithm that can't run there; CommError when the port is in use, a rank is refused, as one that has
/// chosen another backend or algorithm, or shared memory was asked for and cannot be had;
/// TimeoutError, naming the missing ranks, after world.timeout. Takes over world.listen_fd. A group of one needs no
/// address and opens no socket. Ranks that are threads (Backend::thread) meet within the process, those of one
/// master_port in one group.
AnyCommunicator connect(const World& world, const ConnectOptions& options = {});

/// `auto`, `shm`, `tcp`, `thread`, `hierarchical`, `mpi`, `gloo` or `nccl`. Throws UsageError for another name.
Backend backend_of(std::string_view name);

/// `auto`, `ring`, `direct`, `in_place` or `hierarchical`. Throws UsageError for another name.
Algorithm all_reduce_of(std::string_view name);

/// Makes the engine of one rank, where world.size is 2 or more.
using EngineMaker = std::shared_ptr<Engine> (*)(const World& world);

/// What `connect` calls for `backend`: how <chorus/comm/mpi.hpp> and its like, once included, make theirs known.
bool register_backend(Backend backend, EngineMaker maker);

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/connect_impl.hpp>
#endif
