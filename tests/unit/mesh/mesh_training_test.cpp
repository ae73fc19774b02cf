// Features of training loops besides steps: scaled losses, parameter averages, schedules, ranks with fewer batches.
#include <chorus/nn/placed_parameters.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/schedules.hpp>
#include <cstdio>
#include <cmath>
#include <limits>

#include "mesh.hpp"

namespace test {

// With a layer of its own, by placement types.
struct PlacedModel : ch::nn::Module {
  using Axis = ch::axis::Tensor;
  ch::nn::Linear<ch::Cpu, double> embed{5, 6}, head{6, 3};
  ch::nn::LayerNorm<ch::Cpu, double> norm{6};
  ch::nn::SplitParameter<Axis, 0, double, 2> up{ch::nn::init::default_uniform<double, ch::Cpu, 2>({12, 6}, 6)};
  ch::nn::SplitParameter<Axis, 0, double, 1> up_bias{ch::nn::init::default_uniform<double, ch::Cpu, 1>({12}, 6)};
  ch::nn::SplitParameter<Axis, 1, double, 2> down{ch::nn::init::default_uniform<double, ch::Cpu, 2>({6, 12}, 12)};
  ch::nn::Summed<Axis, double, 1> scale{ch::Tensor<double, 1>::ones({6})};
  CHORUS_MODULE(PlacedModel, embed, head, norm, up, up_bias, down, scale)
  auto forward(const auto& x) const {
    const auto h = norm(ch::copy<Axis>(embed(x))) * scale;  // by a whole layer: it sums its gradients
    const auto terms = ch::linear(ch::dropout(ch::gelu(ch::linear(h, up, up_bias)), 0.3, training()), down);
    return head(ch::all_reduce<Axis>(terms));
  }
  auto forward(const auto& x, const auto& y) const { return ch::cross_entropy(forward(x), y); }
};

}  // namespace test

namespace mesh_training_test {

using namespace test::names;
using test::MeshModel;
using mesh::Pipe, mesh::Data, mesh::Shard, mesh::Tensor;
using Model = MeshModel<8>;

/// Ten steps; in one of them only the ranks with the first share have a non-finite gradient. Returns the losses, and
/// whether each step was taken, then the averages.
template <class Net>
std::vector<double> run(Net& net) {
  const auto place = test::place_on_batch(net);
  optim::Sgd<Cpu> optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  optim::GradScaler<Cpu> scaler{net, {.init_scale = 1024}};
  optim::ParameterAverage<Cpu> average{net.parameters(), optim::exponential(0.8)};
  std::vector<double> out;
  for (std::uint32_t i = 0; i < 10; ++i) {
    optimizer.set_lr(optim::CosineAnnealing{.t_max = 10}(0.1, static_cast<int>(i)));
    optimizer.zero_grad();
    const auto y = test::share(labels(8, 3, i), place);
    const auto loss = net(test::share(numbers(8, 5, i), place), y);
    const bool breaks = i == 4 && place.rank == 0;
    scaler.scale(loss * (breaks ? std::numeric_limits<double>::infinity() : 1.0)).backward();
    out.push_back(scaler.step(optimizer) ? 1 : 0);
    out.push_back(net.mean(loss.item(), y.numel()));
    average.update();
  }
  average.swap();
  const NoGrad no_grad;
  net.eval();
  const auto y = test::share(labels(8, 3, 50), place);
  out.push_back(net.mean(net(test::share(numbers(8, 5, 50), place), y).item(), y.numel()));
  average.swap();
  return out;
}

TEST_CASE("mesh: GradScaler, averages of parameters and schedules are one device's") {
  SingleDevice<Model> single{make<Model>(), 3};
  const auto expected = run(single);
  CHECK(expected[2 * 4] == 0);
  const auto check = [&]<class... Axes>(Axes...) {
    const auto text = common_text(4, [](const World& world) {
      test::InMesh<Model, Axes...> rank(world);
      return test::text_of(run(rank.net));
    });
    const auto got = test::numbers_in(text);
    REQUIRE(got.size() == expected.size());
    CHECK(distance(got, expected) < 1e-9);
  };
  check(Data<2>(), Tensor<2>());
  check(Pipe<2>(), Data<2>());
  check(Shard<2>(), Tensor<2>());
}

/// The ranks with the second share run out of batches two steps before the others.
TEST_CASE("mesh: ranks that run out of batches, in groups that share layers") {
  const auto path = cat("mesh_training_", getpid(), ".safetensors");
  const auto text = common_text(4, [&](const World& world) {
    test::InMesh<Model, Data<2>, Tensor<2>> rank(world);
    auto& net = rank.net;
    const auto place = test::place_on_batch(net);
    optim::Sgd<Cpu> optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
    net.join(
        [&] {
          for (std::uint32_t i = 0; i < (place.rank == 0 ? 5u : 3u); ++i) {
            optimizer.zero_grad();
            cross_entropy(net(test::share(numbers(8, 5, i), place)), test::share(labels(8, 3, i), place)).backward();
            optimizer.step();
          }
        },
        {.step = [&] { optimizer.step(); }});
    io::save(net, path);
    return std::string("done");
  });
  REQUIRE(text == "done");
  // One device: the batch lacks the samples that ranks lack.
  SingleDevice<Model> single{make<Model>(), 3};
  optim::Sgd<Cpu> optimizer{single.parameters(), {.lr = 0.1, .momentum = 0.9}};
  for (std::uint32_t i = 0; i < 5; ++i) {
    optimizer.zero_grad();
    const Index rows = i < 3 ? 8 : 4;
    cross_entropy(single(numbers(8, 5, i).slice(0, 0, rows)), labels(8, 3, i).slice(0, 0, rows)).backward();
    optimizer.step();
  }
  Model whole;
  io::load(whole, path);
  std::remove(path.c_str());
  CHECK(distance(test::values(whole), test::values(single.module())) < 1e-9);
}

TEST_CASE("Mesh: layers of one's own, by placement types, beside shares of the batch", "[mesh]") {
  const test::MeshRun run{.clips = true};
  const auto expected = test::mesh_alone<test::PlacedModel>(run);
  CHECK(test::distance(test::in_mesh<test::PlacedModel, Data<2>, Tensor<2>>(4, run), expected) < 1e-9);
  CHECK(test::distance(test::in_mesh<test::PlacedModel, Shard<2>, Tensor<2>>(4, run), expected) < 1e-9);
}

}  // namespace mesh_training_test
