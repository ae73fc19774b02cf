// How a checkpoint works: one file with the model's names, from which a run resumes as if it had never stopped.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace checkpoint_how_it_works_test {

using namespace test::names;
using chorus_test::TemporaryFolder;
using Model = test::Smooth<Cpu>;

/// Steps [begin, end) of a run that saves after two of them, and resumes from the file if `begin` is not 0.
template <class Net>
std::string run(Net& net, const World& world, std::uint32_t begin, std::uint32_t end, const std::string& path) {
  optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
  if (begin > 0) CHECK(io::load_checkpoint(net, optimizer, path).step == begin);
  for (std::uint32_t number = begin; number < end; ++number) {
    test::step(net, optimizer, number, 7, world);
    if (number + 1 == 2) io::save_checkpoint(net, optimizer, {.epoch = 0, .batch = 2, .step = 2}, path);
  }
  return test::text_of(test::values(net.module()));
}

TEST_CASE("how a checkpoint works: a run that stops and goes on has the bits of one that never stopped") {
  const TemporaryFolder folder;
  const auto path = folder / "run.safetensors";
  const auto ranks = [&](std::uint32_t begin, std::uint32_t end) {
    return common_text(2, [&](const World& world) {
      Distributed<Model> rank(world);
      return run(rank.net, world, begin, end, path);
    });
  };
  const auto undisturbed = ranks(0, 4);
  CHECK(!undisturbed.empty());
  CHECK(ranks(2, 4) == undisturbed);

  // The file is independent of the policy: two devices of one process resume the run of two processes.
  DataParallel<Model> net{make<Model>(), {.device_ids = {0, 1}}, 3};
  const auto under_dp = test::numbers_in(run(net, {}, 2, 4, path));
  CHECK(distance(under_dp, test::numbers_in(undisturbed)) < rounding);

  // Contents: the model under its own names, and the other state that a run needs to resume.
  const io::SafetensorsReader file(path);
  CHECK(file.find("fc1.weight") != nullptr);
  CHECK(file.metadata().at("training/step") == "2");
}

}  // namespace checkpoint_how_it_works_test
