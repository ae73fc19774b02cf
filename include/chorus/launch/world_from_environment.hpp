#pragma once
/// Which rank this process is, if a launcher has started it: torchrun, mpirun (Open MPI, MPICH) or srun.

#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <chorus/comm/transport/name_lookup.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/environment.hpp>
#include <chorus/launch/message.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace chorus {

namespace detail {

/// Parses all of `text` as a number in [low, high]; otherwise returns nothing.
inline std::optional<int> whole_number(std::string_view text, int low, int high) {
  int number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc{} || stop != end || number < low || number > high) return std::nullopt;
  return number;
}

/// The same from the environment; nothing if the variable is not set.
inline std::optional<int> env_number(const char* name, int low, int high) {
  const char* text = env(name);
  if (text == nullptr) return std::nullopt;
  const auto number = whole_number(text, low, high);
  if (!number)
    usage_error("environment variable %s must be a whole number from %d to %d, got '%s'", name, low, high,
                printable(text).c_str());
  return number;
}

/// A launcher's facts about this process, before an address is known.
struct Seat {
  int rank, size;
  std::optional<int> local_rank, local_size;
  const char* local_rank_name;
  std::string job = {};  ///< the same in all ranks of a job, different in other jobs
};

inline constexpr int most_ranks = 1 << 20;

/// Reads the variables of one launcher; nothing if neither rank nor size is set.
[[gnu::cold]] inline std::optional<Seat> read_seat(const char* rank_name, const char* size_name,
                                                   const char* local_rank_name, const char* local_size_name) {
  const auto rank = env_number(rank_name, 0, most_ranks), size = env_number(size_name, 1, most_ranks);
  if (!rank && !size) return std::nullopt;
  if (!rank || !size) {
    usage_error("environment variable %s is set but %s is not: a launcher sets both", rank ? rank_name : size_name,
                rank ? size_name : rank_name);
  }
  if (*rank >= *size) {
    usage_error("environment variable %s is %d, but %s is %d: ranks count from 0", rank_name, *rank, size_name, *size);
  }
  const auto local_size = env_number(local_size_name, 1, most_ranks);
  if (local_size && *local_size > *size) {
    usage_error("environment variable %s is %d, but %s is %d: expected no more on one machine than in the job",
                local_size_name, *local_size, size_name, *size);
  }
  return Seat{*rank, *size, env_number(local_rank_name, 0, most_ranks), local_size, local_rank_name};
}

/// mpirun or srun: rank, size, and an id of the job.
[[gnu::cold]] inline std::optional<Seat> seat_of_mpi_or_slurm() {
  if (auto seat = read_seat("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                            "OMPI_COMM_WORLD_LOCAL_SIZE")) {
    const char* job = env("PMIX_NAMESPACE");
    seat->job = job != nullptr ? job : format("%d", getppid());
    return seat;
  }
  // srun sets PMI_*, too, even for a single interactive shell; only MPICH's mpirun also sets the local rank.
  auto seat = read_seat("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  if (seat && (seat->size > 1 || seat->local_size)) {
    seat->job = format("%d", getppid());
    return seat;
  }
  // A batch script or an salloc shell has SLURM_NTASKS, too; only processes that srun started have a step.
  const char* job = env("SLURM_JOB_ID");
  const char* step = env("SLURM_STEP_ID");
  const char* size_name = env("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  if (!env("SLURM_PROCID") || (job && !step && !env("SLURM_STEP_NUM_TASKS"))) return std::nullopt;
  seat = read_seat("SLURM_PROCID", size_name, "SLURM_LOCALID", "");
  if (seat->size == 1) return std::nullopt;
  const char* hosts_name = env("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES";
  if (env_number(hosts_name, 1, most_ranks).value_or(1) == 1) seat->local_size = seat->size;
  seat->job = format("%s.%s", job ? job : format("%d", getppid()).c_str(), step ? step : "0");
  return seat;
}

/// The socket that the launcher has opened for rank 0, or -1.
inline int listening_socket() {
  const char* name = "CHORUS_RENDEZVOUS_FD";
  const int fd = env_number(name, 3, most_ranks).value_or(-1);
  int listens = 0;
  socklen_t length = sizeof listens;
  if (fd >= 0 && (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0)) {
    usage_error(
        "environment variable %s must be a descriptor of a listening socket, got '%d' (a program between the launcher "
        "and the rank must leave descriptors open)",
        name, fd);
  }
  return fd;
}

/// A port in [20000, 32000), below the ephemeral ports, from an FNV-1a hash of the job's name.
inline int port_of_job(std::string_view job) {
  std::uint32_t hash = 2166136261u;
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return 20000 + static_cast<int>(hash % 12000u);
}

}  // namespace detail

/// The world in which a launcher has started this process, or nothing without a launcher.
///
/// - torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; also LOCAL_RANK and LOCAL_WORLD_SIZE. If torchrun itself
///   listens on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True), ranks meet at MASTER_PORT + 1.
/// - mpirun (Open MPI: OMPI_COMM_WORLD_*; MPICH: PMI_RANK, PMI_SIZE) and srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS; only
///   if srun started several tasks). MASTER_ADDR and MASTER_PORT apply here, too. Without them the ranks of one host
///   meet on loopback at a port made from the job's id (20000 to 31999); on several hosts they must be set.
/// CHORUS_TOKEN is the job's secret, required if MASTER_ADDR is not on loopback; there it is also the key of the ranks'
/// encryption, unless CHORUS_TLS=0.
/// CHORUS_RENDEZVOUS_FD, set by chorus' own launcher, is a socket that already listens there.
/// Throws UsageError for a variable that is missing or malformed.
[[gnu::cold]] inline std::optional<comm::World> world_from_environment() {
  using namespace detail;
  const bool torchrun = env("RANK") || env("WORLD_SIZE");
  const auto seat =
      torchrun ? read_seat("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") : seat_of_mpi_or_slurm();
  if (!seat) return std::nullopt;

  const char* address = env("MASTER_ADDR");
  const auto port = env_number("MASTER_PORT", 1, 65535);
  if ((!address || !port) && seat->size > 1) {
    if (torchrun) {
      usage_error("environment variables RANK and WORLD_SIZE are set but %s is not: set it, too, for ranks to meet",
                  address ? "MASTER_PORT" : "MASTER_ADDR");
    }
    if (seat->local_size != seat->size) {
      usage_error("launch: ranks run on several hosts: set MASTER_ADDR (rank 0's host) and MASTER_PORT");
    }
  }

  comm::World world;
  world.rank = seat->rank;
  world.size = seat->size;
  world.master_addr = comm::detail::without_brackets(address ? address : "127.0.0.1");
  world.master_port = port.value_or(port_of_job(seat->job));
  const auto numbers = comm::Address::in_numbers(world.master_addr);
  const bool loopback = numbers ? numbers->loopback() : world.master_addr == "localhost";
  world.local_rank = seat->local_rank.value_or(seat->rank % seat->local_size.value_or(seat->size));
  world.local_size = seat->local_size.value_or(loopback ? seat->size : 1);
  if (world.local_rank >= world.local_size && seat->local_rank && (seat->local_size || loopback)) {
    usage_error("environment variable %s is %d, but this machine has %d %s: they count from 0", seat->local_rank_name,
                world.local_rank, world.local_size, world.local_size == 1 ? "rank" : "ranks");
  }
  if (const char* token = env("CHORUS_TOKEN")) world.token = token;
  const char* agent_store = env("TORCHELASTIC_USE_AGENT_STORE");
  if (torchrun && port && agent_store && std::string_view(agent_store) == "True") {
    if (*port == 65535) usage_error("MASTER_PORT is 65535: expected less, because ranks meet at the next port");
    world.master_port = *port + 1;
  }
  if (world.rank == 0) world.listen_fd = listening_socket();
  return world;
}

}  // namespace chorus
