#pragma once
/// A process's place among the processes of a job, as a launcher tells it.

#include <chorus/core/error.hpp>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace chorus::inline CHORUS_ABI::comm {

/// The ranks that one communicator can join; `trace` counts bytes for as many.
inline constexpr int max_ranks = 64;

struct World {
  int rank = 0, size = 1;                 ///< this process's number in [0, size), and how many there are
  int local_rank = 0, local_size = 1;     ///< the same among the processes of this machine
  std::string master_addr = "127.0.0.1";  ///< where rank 0 listens; a name or an address of rank 0's machine
  int master_port = 0;
  int listen_fd = -1;  ///< rank 0: a socket that listens there already, which `connect` takes over; or -1
  std::chrono::milliseconds timeout{60'000};  ///< the longest that any wait for another rank lasts
};

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

/// What carries the bytes between ranks. `automatic`: shared memory when all ranks run on one machine, else TCP.
enum class TransportKind : std::uint8_t { automatic, shm, tcp };

constexpr std::string_view name(TransportKind kind) {
  constexpr std::string_view names[] = {"automatic", "shm", "tcp"};
  return names[static_cast<std::size_t>(kind)];
}
inline void append(std::string& out, TransportKind kind) { out += name(kind); }

}  // namespace chorus::inline CHORUS_ABI::comm
