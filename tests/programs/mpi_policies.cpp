// A rank of an MPI job that canonical_engines_test starts with mpirun: trains with canonical shares, first alone, and says
// whether both end with the same bits; then under FullyShardedDataParallel and as a pipeline, over MPI and over the
// automatic backend. Other programs may have other bits: their kernels are compiled otherwise.
#include <chorus/launch/world_from_environment.hpp>
#include <cstdio>

#if CHORUS_USE_MPI
#include <chorus/comm/mpi.hpp>

#include "../unit/fsdp/fsdp.hpp"
#include "../unit/parallel/canonical_programs.hpp"
#include "../unit/pipeline/models.hpp"

using namespace test::canonical;

// Losses and parameters of a few steps, the same over any engine with one order of additions.
std::string sharded(const chorus::comm::World& world) {
  test::FullySharded<test::Chain<2>, test::EachLayer> rank(world);
  chorus::optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1}};
  const auto text = test::losses<test::Chain<2>>(rank.net, optimizer, world, {.steps = 3});
  const auto whole = rank.net.gathered();
  return text + test::text_of(test::values(rank.net.module()));
}
std::string piped(const chorus::comm::World& world) {
  test::Piped<test::Chain<2>> rank(world, {.micro_batches = 3});
  return test::text_of(test::chain_losses(rank.net, true, 3)) + test::own_values(rank.net);
}

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
    auto over_mpi = world;
    over_mpi.backend = chorus::comm::Backend::mpi;
    // More ranks' sums are added up in another order there.
    if (world.size == 2 && sharded(over_mpi) != sharded(world)) text += " FullyShardedDataParallel has other numbers";
    if (piped(over_mpi) != piped(world)) text += " Pipeline has other numbers";
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
