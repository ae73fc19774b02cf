// Variables of launchers, a line NAME=VALUE each.
#include <chorus/launch/launch.hpp>
#include <chorus/launch/launch_impl.hpp>
#include <chorus/launch/job_file.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(environment) {
  using namespace chorus;
  static constexpr const char* known[] = {"RANK",
                                          "WORLD_SIZE",
                                          "LOCAL_RANK",
                                          "LOCAL_WORLD_SIZE",
                                          "MASTER_ADDR",
                                          "MASTER_PORT",
                                          "TORCHELASTIC_USE_AGENT_STORE",
                                          "OMPI_COMM_WORLD_RANK",
                                          "OMPI_COMM_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_LOCAL_RANK",
                                          "OMPI_COMM_WORLD_LOCAL_SIZE",
                                          "PMIX_NAMESPACE",
                                          "PMI_RANK",
                                          "PMI_SIZE",
                                          "MPI_LOCALRANKID",
                                          "MPI_LOCALNRANKS",
                                          "SLURM_JOB_ID",
                                          "SLURM_STEP_ID",
                                          "SLURM_STEP_NUM_TASKS",
                                          "SLURM_NTASKS",
                                          "SLURM_PROCID",
                                          "SLURM_LOCALID",
                                          "SLURM_STEP_NUM_NODES",
                                          "SLURM_NNODES",
                                          "CHORUS_TOKEN",
                                          "CHORUS_RENDEZVOUS_FD",
                                          "CHORUS_LAUNCH",
                                          "CHORUS_TIMEOUT",
                                          "CHORUS_BACKEND",
                                          "CHORUS_ALL_REDUCE",
                                          "CHORUS_COMPARE_CALLS"};
  for (const char* name : known) unsetenv(name);
  std::string text(fuzz::text_of(input));
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    const auto line = text.substr(at, end - at);
    at = end + 1;
    const auto equals = std::min(line.find('='), line.size());
    for (const char* name : known)
      if (line.substr(0, equals) == name) setenv(name, line.substr(std::min(equals + 1, line.size())).c_str(), 1);
  }
  const auto report = detail::RankReport::from(text);
  FUZZ_REQUIRE(report.message.size() <= text.size());
  try {
    if (const auto order = detail::LaunchOrder::take()) {
      FUZZ_REQUIRE(order->statuses.size() == static_cast<std::size_t>(order->call));
      setenv("CHORUS_LAUNCH", order->text().c_str(), 1);
      FUZZ_REQUIRE(detail::LaunchOrder::take()->text() == order->text());
    }
  } catch (const UsageError&) {
  }
  try {
    LaunchOptions options;
    options.complete();
    FUZZ_REQUIRE(options.timeout->count() > 0 && options.backend.has_value());
  } catch (const UsageError&) {
  }
  if (const auto world = world_from_environment()) {
    FUZZ_REQUIRE(world->rank >= 0 && world->rank < world->size);
    FUZZ_REQUIRE(world->local_rank >= 0 && world->local_size >= 1 && world->local_size <= world->size);
    FUZZ_REQUIRE(world->master_port > 0 && world->master_port < 65536);
  }
}
