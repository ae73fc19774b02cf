// Captured steps of DistributedDataParallel when a checkpoint is loaded between replays: parameters stay where they
// are, and what is laid out or made anew is captured anew.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <cmath>
#include <filesystem>

#include "../../unit/io/files.hpp"
#include "../sharded_training.hpp"
#include "../training_step.hpp"
#include "../two_layers.hpp"
#include "emulated_engine.hpp"

namespace graphed_places_test {

using namespace chorus;

using test::images, test::labels;
using Net = test::TwoLayers;

std::vector<std::string> order_of(const auto& net) {
  std::vector<std::string> names;
  for (const auto& entry : net.flat_parameters().entries()) names.push_back(entry.named.name);
  return names;
}

// Losses of 12 steps, and then the parameters. `between(net, optimizer)` comes after the sixth.
template <class Optimizer, class Between>
std::vector<double> train(int warm_up, const Between& between) {
  manual_seed(4);
  comm::AnyCommunicator alone(std::make_shared<test::EmulatedEngine>(comm::World{}));
  DistributedDataParallel<Net> net{Net{}, alone};
  std::unique_ptr<Optimizer> optimizer;
  if constexpr (std::is_constructible_v<Optimizer, decltype(net)&, const optim::AdamOptions&>)
    optimizer = std::make_unique<Optimizer>(net, optim::AdamOptions{.lr = 0.01});
  else
    optimizer = std::make_unique<Optimizer>(net.parameters(), optim::AdamOptions{.lr = 0.01});
  Graphed step(net, test::training_step(net, *optimizer), {.warm_up = warm_up});
  for (Index i = 0; i < 12; ++i) {
    step(images(i), labels());
    if (i == 5) {
      between(net, *optimizer);
      std::vector<Tensor<float, 1, Cuda>> taken;  // what was given up is somebody else's now
      for (const Index size : {64, 128, 256, 320, 384, 448, 512, 640, 1200})
        for (int twice = 0; twice < 2; ++twice) taken.push_back(Tensor<float, 1, Cuda>::full({size}, 1e30f));
    }
  }
  if (warm_up < 12) CHECK(step.captured());
  auto out = step.losses();
  for (const auto& named : net.parameters()) {
    std::vector<float> values(static_cast<std::size_t>(named.parameter->count()));
    copy_bytes(Cpu{}, values.data(), Cuda{}, named.parameter->value_data(), named.parameter->size_bytes());
    double sum = 0;
    for (const float value : values) sum += std::abs(static_cast<double>(value));
    out.push_back(sum);
  }
  return out;
}

using Plain = optim::Adam<Cuda>;
using Sharded = ShardedOptimizer<optim::Adam<Cuda>>;

TEST_CASE("graphed ddp: the order that parameters have already leaves them where they are", "[cuda]") {
  const auto same_order = [](auto& net, auto&) {
    const auto* const before = net.flat_parameters().groups()[0].value(0);
    detail::access_to(net).set_parameter_order(order_of(net));
    CHECK(net.flat_parameters().groups()[0].value(0) == before);
  };
  CHECK(train<Plain>(2, same_order) == train<Plain>(1000, same_order));
}

TEST_CASE("graphed ddp: parameters that are laid out anew are captured anew", "[cuda]") {
  const auto other_order = [](auto& net, auto&) {
    auto names = order_of(net);
    std::reverse(names.begin(), names.end());
    detail::access_to(net).set_parameter_order(names);
  };
  CHECK(train<Plain>(2, other_order) == train<Plain>(1000, other_order));
}

TEST_CASE("graphed ddp: a step that was captured goes on from a checkpoint, with state that was made anew", "[cuda]") {
  const auto path =
      (std::filesystem::temp_directory_path() / cat("chorus_graphed_", getpid(), ".safetensors")).string();
  const auto save_and_load = [&](auto& net, auto& optimizer) {
    io::save_checkpoint(net, optimizer, {}, path);
    io::load_checkpoint(net, optimizer, path);
  };
  const auto nothing = [](auto&, auto&) {};
  const auto expected = train<Plain>(1000, nothing);
  CHECK(train<Plain>(2, save_and_load) == expected);
  CHECK(train<Sharded>(2, save_and_load) == expected);
  std::filesystem::remove(path);
}

}  // namespace graphed_places_test
