/// Whole models in files, whatever the number of ranks.

#include "models.hpp"

#include <catch.hpp>
#include <chorus/io/load_model.hpp>
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
    rank.net.save(path, {{"note", "by 3"}});
    auto whole = rank.net.gathered();
    return ch::io::parameters_sha256(whole);
  });
  REQUIRE(written.size() == 64);
  Tied<Cpu> one;
  ch::io::load(one, path);
  CHECK(ch::io::parameters_sha256(one) == written);
  CHECK(ch::io::SafetensorsReader(path).metadata().at("note") == "by 3");
  for (const int ranks : {1, 2})
    CHECK(common_text(ranks, [&](const World& world) {
            Shared<Tied<Cpu>> rank(world);
            rank.net.load(path);
            ch::optim::Sgd optimizer{rank.net.parameters()};
            test::step(rank.net, optimizer, 1, 0);  // and on it goes
            ch::TensorParallel<Tied<Cpu>> again{Tied<Cpu>{}, rank.communicator};
            again.load(path);
            auto whole = again.gathered();
            return ch::io::parameters_sha256(whole);
          }) == written);
  std::remove(path.c_str());
  const auto fails = [&](auto call) {
    return common_text(2, [&](const World& world) {
      Shared<Tied<Cpu>> rank(world);
      return message_of<FileError>([&] { call(rank.net); });
    });
  };
  CHECK_THAT(fails([&](auto& net) { net.load(path); }), Contains(path));
  CHECK_THAT(fails([&](auto& net) { net.save("no/such/folder/file"); }), Contains("no/such/folder"));
}

}  // namespace
