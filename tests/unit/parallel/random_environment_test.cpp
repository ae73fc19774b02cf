/// Launchers' environment variables with arbitrary values: a valid world, or an error that names a variable.
/// CHORUS_RANDOM_SEEDS=FIRST-LAST runs other seeds.
#include <catch.hpp>
#include <chorus/core/error.hpp>
#include <chorus/launch/world_from_environment.hpp>
#include <string>
#include <vector>

#include "../random_draw.hpp"

namespace random_environment_test {

using namespace chorus;
using Draw = test::DrawFrom<0x656e76>;

const std::vector<const char*> numbers = {"RANK",
                                          "WORLD_SIZE",
                                          "LOCAL_RANK",
                                          "LOCAL_WORLD_SIZE",
                                          "MASTER_PORT",
                                          "OMPI_COMM_WORLD_RANK",
                                          "OMPI_COMM_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_LOCAL_RANK",
                                          "OMPI_COMM_WORLD_LOCAL_SIZE",
                                          "PMI_RANK",
                                          "PMI_SIZE",
                                          "MPI_LOCALRANKID",
                                          "MPI_LOCALNRANKS",
                                          "SLURM_PROCID",
                                          "SLURM_NTASKS",
                                          "SLURM_STEP_NUM_TASKS",
                                          "SLURM_LOCALID",
                                          "SLURM_STEP_NUM_NODES",
                                          "SLURM_NNODES",
                                          "CHORUS_RENDEZVOUS_FD"};
const std::vector<const char*> texts = {
    "MASTER_ADDR", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "TORCHELASTIC_USE_AGENT_STORE", "CHORUS_TOKEN"};

std::string value(Draw& draw) {
  static const std::vector<std::string> odd = {"",
                                               " ",
                                               "-1",
                                               "+1",
                                               "01",
                                               "1 ",
                                               " 1",
                                               "1.0",
                                               "1e3",
                                               "0x1",
                                               "nan",
                                               "None",
                                               "null",
                                               "1,2",
                                               "2(x2)",
                                               "65535",
                                               "65536",
                                               "1048576",
                                               "1048577",
                                               "2147483647",
                                               "2147483648",
                                               "-2147483648",
                                               "4294967296",
                                               "18446744073709551616",
                                               "999999999999999999999999999",
                                               "\xff\xfe",
                                               "%s%n",
                                               "1\n",
                                               "True",
                                               "127.0.0.1",
                                               "::1",
                                               "localhost",
                                               "node[01-04]",
                                               std::string(100'000, '9')};
  if (draw.chance(8)) return draw.one_of(odd);
  return cat(draw.below(draw.chance(60) ? 3 : 9));
}

/// What is wrong with how these variables are read, or "". `used` counts the valid worlds.
std::string wrong(int& used) {
  try {
    const auto world = world_from_environment();
    if (!world) return "";
    ++used;
    if (world->size < 1 || world->rank < 0 || world->rank >= world->size) return "rank and size";
    if (world->local_size < 1 || world->local_size > world->size || world->local_rank < 0) return "local size";
    if (world->local_size > 1 && world->local_rank >= world->local_size) return "local rank";
    if (world->master_port < 1 || world->master_port > 65535 || world->master_addr.empty()) return "address";
    if (world->listen_fd >= 0) return "descriptor";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    if (text.find("set MASTER_ADDR (rank 0's host)") != std::string::npos) return "";
    for (const auto* name : numbers)
      if (text.find(name) != std::string::npos) return "";
    return cat("no variable is named: ", text);
  }
  return "";
}

TEST_CASE("variables of launchers: whatever they hold, a world that makes sense or an error that names one") {
  int used = 0;
  const auto clear = [] {
    for (const auto* name : numbers) unsetenv(name);
    for (const auto* name : texts) unsetenv(name);
  };
  const auto try_one = [&](std::uint64_t seed) {
    Draw draw(seed);
    clear();
    const auto present = 20 + draw.below(80);
    for (const auto* name : numbers)
      if (draw.chance(present)) setenv(name, value(draw).c_str(), 1);
    if (draw.chance(70)) unsetenv("RANK"), unsetenv("WORLD_SIZE");
    if (draw.chance(50)) unsetenv("OMPI_COMM_WORLD_RANK"), unsetenv("OMPI_COMM_WORLD_SIZE");
    if (draw.chance(50)) unsetenv("PMI_RANK"), unsetenv("PMI_SIZE");
    for (const auto* name : texts)
      if (draw.chance(40)) setenv(name, value(draw).c_str(), 1);
    if (draw.chance(50)) setenv("MASTER_ADDR", "127.0.0.1", 1);
    if (draw.chance(50)) setenv("MASTER_PORT", "29500", 1);
    if (const auto what = wrong(used); !what.empty()) FAIL_CHECK("seed " << seed << ": " << what);
  };
  test::for_seeds(20'000, try_one, [](std::uint64_t seed) { return cat("seed ", seed, "\n"); });
  clear();
  if (!std::getenv("CHORUS_RANDOM_SEEDS")) CHECK(used > 400);
}

}  // namespace random_environment_test
