// A rank of an MPI job that canonical_engines_test starts with mpirun: trains with canonical shares, first alone, and says
// whether both end with the same bits. Other programs may have others: their kernels are compiled otherwise.
#include <chorus/launch/world_from_environment.hpp>
#include <cstdio>

#if CHORUS_USE_MPI
#include <chorus/comm/mpi.hpp>

#include "../unit/parallel/canonical_programs.hpp"

using namespace test::canonical;

int main() {
  std::string text;
  try {
    const auto world = chorus::world_from_environment().value();
    const auto program = program_for_engines();
    const auto expected = result_of_rank(program, {}, world);
    text = difference(
        result_of_rank(program, {.who = Who::ddp, .devices = world.size, .backend = chorus::comm::Backend::mpi}, world),
        expected);
    if (expected.find('|') == expected.npos) text = expected;
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 1;
  }
  std::puts(text.empty() ? "same" : text.c_str());
  return 0;
}
#else
int main() {
  std::puts("this build is without MPI");
  return 77;
}
#endif
