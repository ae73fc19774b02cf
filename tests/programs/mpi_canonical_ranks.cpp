// A rank of an MPI job that canonical_engines_test starts with mpirun: trains with canonical shares, and prints a hash of
// what it ends with.
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
    text = result_of_rank(program_for_engines(),
                          {.who = Who::ddp, .devices = world.size, .backend = chorus::comm::Backend::mpi}, world);
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 1;
  }
  std::puts(std::to_string(std::hash<std::string>()(text)).c_str());
  return 0;
}
#else
int main() {
  std::puts("this build is without MPI");
  return 77;
}
#endif
