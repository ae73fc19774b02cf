/// Whole models in files, for any number of ranks.

#include "models.hpp"

#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/optim/averaging.hpp>
#include <cstdio>
#include <string>

namespace {

namespace ch = chorus;
using namespace test::names;
using test::Shared, test::Tied;

TEST_CASE("TensorParallel: saved by 3 ranks, read by 1 and by 2", "[tensor_parallel]") {
  const std::string path = ch::cat("tensor_parallel_", getpid(), ".safetensors");
  const auto written = common_text(3, [&](const World& world) {
    Shared<Tied<Cpu>> rank(world);
    test::losses_of(rank.net, [] {});
    ch::io::save(rank.net, path, {{"note", "by 3"}});
    REQUIRE(ch::io::parameters_sha256(rank.net).size() == 64);
    std::string hash;
    rank.net.gathered([&](auto& whole) { hash = ch::io::parameters_sha256(whole); });
    return hash;
  });
  REQUIRE(written.size() == 64);
  Tied<Cpu> one;
  ch::io::load(one, path);
  CHECK(ch::io::parameters_sha256(one) == written);
  CHECK(ch::io::SafetensorsReader(path).metadata().at("note") == "by 3");
  for (const int ranks : {1, 2})
    CHECK(common_text(ranks, [&](const World& world) {
            Shared<Tied<Cpu>> rank(world);
            ch::io::load(rank.net, path);
            ch::optim::Sgd optimizer{rank.net.parameters()};
            test::step(rank.net, optimizer, 1, 0);  // training continues
            ch::TensorParallel<Tied<Cpu>> again{Tied<Cpu>{}, rank.communicator};
            ch::io::load(again, path);
            return ch::io::parameters_sha256(again);
          }) == written);
  std::remove(path.c_str());
  const auto fails = [&](auto call) {
    return common_text(2, [&](const World& world) {
      Shared<Tied<Cpu>> rank(world);
      const auto text = message_of<FileError>([&] { call(rank.net); });
      return ch::cat(text.find("no/such/folder/") != text.npos);
    });
  };
  CHECK(fails([&](auto& net) { ch::io::load(net, "no/such/folder/file"); }) == "true");
  CHECK(fails([&](auto& net) { ch::io::save(net, "no/such/folder/file"); }) == "true");
}

// Steps `from` to 20 of a run that is saved after step 8; `resumes`: from the file.
template <class Net>
std::string steps(Net& net, const std::string& path, bool resumes) {
  ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
  ch::optim::ParameterAverage average{net, {}};
  if (resumes) ch::io::load_checkpoint(net, optimizer, path, average);
  std::vector<double> losses;
  for (std::uint32_t i = resumes ? 8 : 0; i < 20; ++i) {
    losses.push_back(test::step(net, optimizer, i, 0));
    average.update();
    if (!resumes && i == 7) ch::io::save_checkpoint(net, optimizer, {.step = 8}, path, average);
  }
  average.swap();
  for (std::uint32_t i = 0; i < 2; ++i) losses.push_back(test::step(net, optimizer, i, 0));  // with the averages
  return test::text_of(losses);
}
TEST_CASE("TensorParallel: a checkpoint of any number of ranks goes on under any other", "[tensor_parallel]") {
  using Model = test::Tied<Cpu>;
  const std::string path = ch::cat("tensor_parallel_", getpid(), ".checkpoint");
  const auto of_ranks = [&](int ranks, bool resumes) {
    return test::numbers_in(common_text(ranks, [&](const World& world) {
      Shared<Model> rank(world);
      return steps(rank.net, path, resumes);
    }));
  };
  const auto of_one = [&](bool resumes) {
    ch::SingleDevice<Model> net{make<Model>(), 3};
    return test::numbers_in(steps(net, path, resumes));
  };
  const auto all = of_one(false);
  REQUIRE(all.size() == 22);
  const std::vector<double> rest(all.begin() + 8, all.end());
  CHECK(distance(of_ranks(2, true), rest) < 1e-9);  // one device's file
  CHECK(distance(of_ranks(3, false), all) < 1e-9);
  for (const int ranks : {1, 2, 3}) CHECK(distance(of_ranks(ranks, true), rest) < 1e-9);  // that of 3 ranks
  CHECK(distance(of_one(true), rest) < 1e-9);
  std::remove(path.c_str());
}

}  // namespace
