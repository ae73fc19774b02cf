// Canonical shares over foreign backends give the bits of one device.
#include <unistd.h>

#include <catch.hpp>
#include <climits>
#include <cstdio>
#include <cstdlib>

#include "canonical_programs.hpp"

#if CHORUS_USE_GLOO
#include <chorus/comm/gloo.hpp>
#endif

namespace canonical_engines_test {

using namespace test::names;
using namespace test::canonical;

#if CHORUS_USE_GLOO
TEST_CASE("canonical shares: the same bits over gloo") {
  const auto program = program_for_engines();
  const auto expected = result(program, {});
  REQUIRE(expected.find('|') != expected.npos);
  for (const auto who : {Who::ddp, Who::server})
    CHECK(difference(result(program, {.who = who, .devices = 3, .backend = comm::Backend::gloo}), expected) == "");
}
#endif

#if CHORUS_USE_MPI
TEST_CASE("canonical shares: the same bits over MPI; FullyShardedDataParallel and Pipeline run over it") {
  std::string folder;
  if (const char* named = std::getenv("CHORUS_TEST_PROGRAMS")) {
    folder = named;
  } else {
    char path[PATH_MAX] = {};
    REQUIRE(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
    folder = std::string(path);
    folder = folder.substr(0, folder.rfind('/')) + "/programs";
  }
  for (const int ranks : {2, 3}) {
    const auto line = cat("timeout 60 mpirun --allow-run-as-root --oversubscribe -np ", ranks, " ", folder,
                          "/mpi_policies 2>/dev/null");
    std::FILE* const pipe = popen(line.c_str(), "r");
    REQUIRE(pipe != nullptr);
    std::string text, all;
    char part[4096];
    for (std::size_t n; (n = std::fread(part, 1, sizeof part, pipe)) > 0;) text.append(part, n);
    pclose(pipe);
    for (int rank = 0; rank < ranks; ++rank) all += "same\n";
    CHECK(text == all);
  }
}
#endif

}  // namespace canonical_engines_test
