// MPI as a Communicator, in real jobs under mpirun.
#include <unistd.h>

#include <catch.hpp>
#include <chorus/core/error.hpp>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "astray.hpp"

namespace mpi_test {

using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using chorus::cat;

#if CHORUS_USE_MPI
std::string folder_of_programs() {
  if (const char* folder = std::getenv("CHORUS_TEST_PROGRAMS")) return folder;
  char path[PATH_MAX] = {};
  REQUIRE(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
  const std::string self = path;
  return self.substr(0, self.rfind('/')) + "/programs";
}

/// The output of the ranks of a job.
std::string job(int ranks, const std::string& what, const std::string& errors = "/dev/null") {
  const auto line = cat("timeout 60 mpirun --allow-run-as-root --oversubscribe -np ", ranks, " ", folder_of_programs(),
                        "/mpi_ranks ", what, " 2>", errors);
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

TEST_CASE("comm random: over MPI", "[comm]") {
  for (const int ranks : {2, 5}) {
    std::string expected;
    for (int i = 0; i < ranks; ++i) expected += "ok\n";
    CHECK(job(ranks, "random") == expected);
  }
}

TEST_CASE("split: groups over MPI", "[comm]") {
  const auto text = job(5, "split");
  std::map<std::string, int> said;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) ++said[line];
  CHECK(said == std::map<std::string, int>{{"[0, 2, 4] [0, 2, 4] mpi", 3}, {"[3, 1] [3, 1] mpi", 2}});
}

TEST_CASE("mpi: deadlines and aborts", "[comm]") {
  const auto aborted = job(3, "abort");
  CHECK_THAT(aborted, Contains("rank 1: all_reduce #1 (sum of 100000 F32): aborted: no flour left\n"));
  for (const int rank : {0, 2})
    CHECK_THAT(aborted, Contains(cat("rank ", rank, ": all_reduce #")));  // #1, or #0 if the rank was slow
  CHECK_THAT(aborted, Contains("gave up: ") && Contains("no flour left"));
  CHECK_THAT(job(2, "late"), Contains("late: rank 0: all_reduce #1 (sum of 100000 F32): mpi: waited 1000 ms"));
}

TEST_CASE("mpi: ranks that come too late, or never, are waited for until the deadline", "[comm]") {
  const auto first = job(3, "absent0");
  for (const int rank : {1, 2})
    CHECK_THAT(first, Contains(cat("late: rank ", rank, ": mpi: rank 0 of the job did not arrive within 1000 ms\n")));
  CHECK_THAT(first, Contains("late: rank 0: mpi: ranks [1, 2] of the job did not arrive within 1000 ms\n"));
  const auto other = job(3, "absent1");
  CHECK_THAT(other, Contains("late: rank 0: mpi: ranks [1] of the job did not arrive within 1000 ms\n"));
  for (const int rank : {1, 2})
    CHECK_THAT(other, Contains(cat("rank ", rank, ": mpi: rank 0 of the job gave up before all ranks had arrived\n")));
}

TEST_CASE("mpi: a rank that never starts MPI ends the job by the deadline, with a reason", "[comm]") {
  const auto start = std::chrono::steady_clock::now();
  CHECK_THAT(job(3, "unborn", "&1"),
             Contains("chorus: mpi: not all ranks of the job called MPI_Init within 1000 ms; this process exits\n"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(15));
}

TEST_CASE("mpi: a program that starts MPI for one thread is told", "[comm]") {
  CHECK_THAT(job(2, "single"), Contains("mpi: this program has started MPI without MPI_THREAD_MULTIPLE"));
}

TEST_CASE("mpi: ranks in different calls are both named, before any data moves", "[comm]") {
  const auto lines_of = [](const std::string& text, int rank) {
    std::vector<std::string> lines;
    std::istringstream all(text);
    for (std::string line; std::getline(all, line);)
      if (const auto begin = cat(rank, "> "); line.starts_with(begin)) lines.push_back(line.substr(begin.size()));
    return lines;
  };
  const auto text = job(2, "astray");
  const auto zero = lines_of(text, 0), one = lines_of(text, 1);
  const auto calls = test::calls_astray();
  INFO(text);
  REQUIRE(zero.size() == calls.size());
  REQUIRE(one.size() == calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    CHECK_THAT(zero[i], StartsWith("rank 0: ") && Contains("is in a different call"));
    CHECK_THAT(one[i], StartsWith("rank 1: all_reduce #1 (min of 100 I32): ") && Contains(calls[i].name) &&
                           Contains("is in a different call"));
  }
  const auto three = job(3, "third_astray");
  for (int rank = 0; rank < 3; ++rank) {
    const auto lines = lines_of(three, rank);
    REQUIRE(lines.size() == 1);
    CHECK_THAT(lines[0], StartsWith("rank ") && Contains("is in a different call") && Contains("of 999 F64"));
  }
}
#else
TEST_CASE("collectives over MPI", "[comm]") { WARN("not checked: this build is without MPI"); }
#endif

}  // namespace mpi_test
