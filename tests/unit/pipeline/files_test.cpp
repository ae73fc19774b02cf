// The whole model in one file, written by the ranks of a pipeline, and read under any policy.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/optim/averaging.hpp>
#include <cstdio>

#include "models.hpp"

namespace pipeline_files_test {

using namespace test::names;
using test::Piped;

/// Two stages share a weight, and one has a buffer.
struct Model : test::Chain<4> {
  Model() { blocks[3].fc.weight = blocks[0].fc.weight; }
};

/// Steps `from` to 12 of a run that is saved after step 6, and its hash; `resumes`: from the file.
template <class Net>
std::string run(Net& net, const std::string& path, bool resumes) {
  optim::AdamW optimizer{net.parameters(), {.lr = 0.02}};
  if (resumes) CHECK(io::load_checkpoint(net, optimizer, path).step == 6);
  std::vector<double> losses;
  for (std::uint32_t i = resumes ? 6 : 0; i < 12; ++i) {
    losses.push_back(test::chain_step(net, optimizer, i, 7, i % 2 == 0));
    if (!resumes && i == 5) io::save_checkpoint(net, optimizer, {.step = 6}, path);
  }
  return test::text_of(losses);
}
TEST_CASE("pipeline: a checkpoint of 3 stages goes on in 2, in one, and theirs in 3") {
  const auto path = cat("pipeline_", getpid(), ".checkpoint");
  const auto of_ranks = [&](int ranks, bool resumes) {
    return test::numbers_in(common_text(ranks, [&](const World& world) {
      Piped<Model> rank(world, {.micro_batches = 3});
      return run(rank.net, path, resumes);
    }));
  };
  const auto of_one = [&](bool resumes) {
    SingleDevice<Model> net{make<Model>(), 3};
    return test::numbers_in(run(net, path, resumes));
  };
  const auto all = of_one(false);
  REQUIRE(all.size() == 12);
  const std::vector<double> rest(all.begin() + 6, all.end());
  CHECK(distance(of_ranks(2, true), rest) < 1e-9);  // one device's file
  CHECK(distance(of_ranks(3, false), all) < 1e-9);
  for (const int ranks : {1, 2, 3}) CHECK(distance(of_ranks(ranks, true), rest) < 1e-9);  // that of 3 ranks
  CHECK(distance(of_one(true), rest) < 1e-9);
  std::remove(path.c_str());
}

TEST_CASE("pipeline: io::save, io::load and parameters_sha256 take the net") {
  const auto path = cat("pipeline_", getpid(), ".safetensors"), again = path + ".again";
  auto other = test::make<Model>(7);
  io::save(other, path, {{"who", "a test"}});
  const auto hash = common_text(3, [&](const World& world) {
    Piped<Model> rank(world);
    io::load(rank.net, path);
    io::save(rank.net, again, {{"who", "a test"}});
    return io::parameters_sha256(rank.net);
  });
  CHECK(hash == io::parameters_sha256(other));
  const auto bytes = [](const std::string& file) {
    const io::SafetensorsReader reader(file);
    return std::pair(reader.metadata(), reader.entries().size());
  };
  CHECK(bytes(path) == bytes(again));
  Model read = test::make<Model>(1);
  io::load(read, again);
  CHECK(io::parameters_sha256(read) == hash);
  const auto told = common_text(2, [&](const World& world) {
    Piped<test::Chain<3>> rank(world);
    return message_of<FileError>([&] { io::load(rank.net, path); });
  });
  CHECK_THAT(told, Contains("the file doesn't fit the model") && Contains("blocks.3.fc.bias"));
  std::remove(path.c_str());
  std::remove(again.c_str());
}

}  // namespace pipeline_files_test
