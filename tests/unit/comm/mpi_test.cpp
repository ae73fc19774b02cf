// MPI behind the Communicator concept: real jobs under mpirun.
#include <unistd.h>

#include <catch.hpp>
#include <chorus/core/error.hpp>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace mpi_test {

using chorus::cat;
using Catch::Matchers::Contains;

#if CHORUS_USE_MPI
std::string folder_of_programs() {
  if (const char* folder = std::getenv("CHORUS_TEST_PROGRAMS")) return folder;
  char path[PATH_MAX] = {};
  REQUIRE(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
  const std::string self = path;
  return self.substr(0, self.rfind('/')) + "/programs";
}

/// What the ranks of a job print.
std::string job(int ranks, const std::string& what) {
  const auto line = cat("timeout 60 mpirun --allow-run-as-root --oversubscribe -np ", ranks, " ", folder_of_programs(),
                        "/mpi_ranks ", what, " 2>/dev/null");
  std::FILE* const pipe = popen(line.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::string text;
  char part[4096];
  for (std::size_t n; (n = std::fread(part, 1, sizeof part, pipe)) > 0;) text.append(part, n);
  pclose(pipe);
  return text;
}
#endif

#if CHORUS_USE_MPI
TEST_CASE("collectives over MPI", "[comm]") {
  std::string expected;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    expected += "ok\n";
    CHECK(job(ranks, "conforms") == expected);
  }
  CHECK(job(3, "typed") == "ok\nok\nok\n");
}

TEST_CASE("mpi: deadlines and aborts", "[comm]") {
  const auto aborted = job(3, "abort");
  CHECK_THAT(aborted, Contains("rank 1: all_reduce #1 (sum of 100000 F32): aborted: no flour left\n"));
  for (const int rank : {0, 2})
    CHECK_THAT(aborted, Contains(cat("rank ", rank, ": all_reduce #")));  // #1, or a slow one #0
  CHECK_THAT(aborted, Contains("gave up: ") && Contains("no flour left"));
  CHECK_THAT(job(2, "late"), Contains("late: rank 0: all_reduce #1 (sum of 100000 F32): mpi: waited 1000 ms"));
}
#else
TEST_CASE("collectives over MPI", "[comm]") { WARN("not checked: this build is without MPI"); }
#endif

}  // namespace mpi_test
