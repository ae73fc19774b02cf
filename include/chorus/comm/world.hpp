#pragma once
/// A process's rank among the processes of a job, from its launcher.

#include <chorus/core/error.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::comm {

/// The maximum number of ranks of a communicator; `trace` counts bytes for as many.
inline constexpr int max_ranks = 64;

/// The algorithm of a collective, one file each in algorithms/. `automatic`: the fastest for the ranks and the data. A
/// user can request any of them for an all-reduce except `bruck`, which is for short messages.
enum class Algorithm : std::uint8_t { automatic, ring, direct, in_place, hierarchical, bruck };

constexpr std::string_view name(Algorithm algorithm) {
  constexpr std::string_view names[] = {"auto", "ring", "direct", "in_place", "hierarchical", "bruck"};
  const auto i = static_cast<std::size_t>(algorithm);
  return i < std::size(names) ? names[i] : "unknown";
}
inline void append(std::string& out, Algorithm algorithm) { out += name(algorithm); }

/// The engine of collectives. `automatic`: shared memory if all ranks run on one machine, otherwise TCP. `thread`:
/// ranks are threads of one process. `hierarchical`: shared memory inside machines, TCP between them, and a two-level
/// all-reduce. `mpi`, `gloo` and `nccl` need their own headers; `simulated` is for ranks in virtual time.
enum class Backend : std::uint8_t { automatic, shm, tcp, thread, hierarchical, mpi, gloo, nccl, simulated };

constexpr std::string_view name(Backend backend) {
  constexpr std::string_view names[] = {"auto",         "shm", "tcp",  "thread",
                                        "hierarchical", "mpi", "gloo", "nccl", "simulated"};
  const auto i = static_cast<std::size_t>(backend);
  return i < std::size(names) ? names[i] : "unknown";
}
inline void append(std::string& out, Backend backend) { out += name(backend); }

struct World {
  int rank = 0, size = 1;                 ///< this process's number in [0, size), and the number of processes
  int local_rank = 0, local_size = 1;     ///< the same among the processes of this machine
  std::string master_addr = "127.0.0.1";  ///< where rank 0 listens; a name or an address of rank 0's machine
  int master_port = 0;
  /// A secret of the job, the same on all ranks, with at least 16 characters: ranks prove to each other that they know
  /// it. Required if master_addr is not on loopback.
  std::string token = {};
  int listen_fd = -1;  ///< rank 0: a socket that listens there already, which `connect` will own; or -1
  std::chrono::milliseconds timeout{60'000};  ///< the longest wait for another rank
  std::vector<int> members = {};              ///< for a group made by `split`: its ranks in the whole job; else empty
  std::string axis = {};  ///< for such a group: its axis of a mesh, for messages
  /// The purpose of the meeting, in up to 63 characters: a rank with another purpose is refused by name.
  std::string purpose = {};
  /// The algorithm of all_reduce, the same on all ranks; CHORUS_ALL_REDUCE and --all-reduce of programs. Only chorus'
  /// own engines accept one. If the algorithm can't work with a call's data, the ring runs instead: `in_place` needs
  /// memory of the communicator (see AnyCommunicator::allocate), unless ranks are threads.
  Algorithm all_reduce = Algorithm::automatic;
  /// The default backend of `connect`: groups of `split` use the job's.
  Backend backend = Backend::automatic;
  /// If set: asked every 50 ms while the ranks meet; once it is true, `connect` throws CommError.
  std::function<bool()> called_off = {};
};

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

/// Eleven days: adding several of these to the present time does not overflow.
inline constexpr std::chrono::milliseconds longest_timeout{1'000'000'000};

/// Throws UsageError, with the name `who`, for a timeout out of range.
[[gnu::cold]] inline void check_timeout(std::string_view who, std::chrono::milliseconds timeout) {
  check<UsageError>(timeout.count() > 0 && timeout <= longest_timeout, who, ": timeout is ", timeout.count(),
                    " ms, expected 1 to ", longest_timeout.count());
}

/// Throws UsageError, with the name `who`, for a rank or a size out of range.
[[gnu::cold]] inline void check_ranks(std::string_view who, int size, int rank) {
  check<UsageError>(size >= 1 && size <= max_ranks, who, ": world size is ", size, ", expected 1 to ", max_ranks);
  check<UsageError>(rank >= 0 && rank < size, who, ": rank ", rank, " is not in [0, ", size, ")");
}

}  // namespace chorus::comm
