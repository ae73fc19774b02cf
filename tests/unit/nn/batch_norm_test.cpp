#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/reduction.hpp>
#include <cmath>
#include <optional>
#include <vector>

#include "../message_of.hpp"

namespace batch_norm_layer_test {

namespace ch = chorus;
namespace nn = ch::nn;
using ch::Cpu;
using Matrix = ch::Tensor<double, 2>;

Matrix batch(int number) {
  auto x = Matrix::empty({6, 3});
  for (ch::Index i = 0; i < x.numel(); ++i) x.data()[i] = std::sin(0.7 * static_cast<double>(i + 5 * number));
  return x;
}

enum class Way { plain, checkpointed, nested, beside };

struct Net : nn::Module {
  nn::Linear<Cpu, double> fc{3, 4};
  nn::BatchNorm<Cpu, double> norm{4};
  nn::BatchNormReLU<Cpu, double> fused{4, {.momentum = std::nullopt}};
  Way way = Way::plain;
  CHORUS_MODULE(Net, fc, norm, fused)

  auto forward(const auto& x) const {
    const auto part = [this](const auto& in) { return fused(norm(fc(in))); };
    const auto once = [part](const auto& in) { return ch::checkpoint(part, in); };
    if (way == Way::plain) return part(x);
    if (way == Way::checkpointed) return once(x);
    if (way == Way::nested) return ch::checkpoint([once](const auto& in) { return once(in); }, x);
    return ch::checkpoint([this, once](const auto& in) { return once(in) + norm(fc(in)) * 0.0; }, x);
  }
};

/// Statistics and gradients after three steps. `switches`: the net is in evaluation mode when backward begins.
std::vector<double> trained(Way way, bool switches = false) {
  ch::manual_seed(1);
  Net net;
  net.way = way;
  std::vector<double> out;
  for (int i = 0; i < 3; ++i) {
    const auto y = net(ch::Variable(batch(i), true));
    if (switches) net.eval();
    ch::mean(ch::square(y)).backward();
    net.train();
    for (const double g : net.fc.weight.grad().to_vector()) out.push_back(g);
  }
  for (const auto& stats : {net.norm.running_stats(), net.fused.running_stats()})
    out.insert(out.end(), stats.begin(), stats.end());
  return out;
}

void check_same(const std::vector<double>& got, const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(expected[i]).margin(1e-12));
}

TEST_CASE("batch norm inside of a checkpoint, or of two, counts its batch once") {
  const auto expected = trained(Way::plain);
  CHECK(expected[36] == 3);
  check_same(trained(Way::checkpointed), expected);
  check_same(trained(Way::nested), expected);
  CHECK(trained(Way::beside)[36] == 6);  // two calls of one layer count as two batches
}

TEST_CASE("what a checkpoint computes again is in training as it was the first time") {
  check_same(trained(Way::checkpointed, true), trained(Way::plain));
  check_same(trained(Way::nested, true), trained(Way::plain));
}

TEST_CASE("a part that switches its layers itself switches them again") {
  ch::manual_seed(1);
  nn::BatchNorm<Cpu, double> norm(3);
  const auto part = [&](const auto& x) {
    norm.train();
    const auto y = norm(x);
    norm.eval();
    return y + norm(x);
  };
  const ch::Variable<double, 2> x(batch(0), true), again(batch(0), true);
  ch::sum(ch::square(part(x))).backward();
  norm.reset_running_stats();
  ch::sum(ch::square(ch::checkpoint(part, again))).backward();
  check_same(again.grad().to_vector(), x.grad().to_vector());
  CHECK(norm.num_batches_tracked.value().item() == 1);
}

TEST_CASE("a layer of one's own knows when it is computed again") {
  int first = 0, again = 0;
  const ch::Variable<double, 2> x(batch(0), true);
  const auto part = [&](const auto& in) {
    ++(ch::is_recomputed() ? again : first);
    return ch::square(in);
  };
  ch::sum(ch::checkpoint(part, x)).backward();
  CHECK(first == 1);
  CHECK(again == 1);
  CHECK_FALSE(ch::is_recomputed());
}

TEST_CASE("batch norm's momentum can be set, and its statistics begin anew") {
  nn::BatchNorm<Cpu, double> norm(3);
  norm.set_momentum(std::nullopt);
  for (int i = 0; i < 4; ++i) norm(batch(i));
  const auto all = ch::mean(batch(0) + batch(1) + batch(2) + batch(3));
  CHECK(ch::mean(norm.running_mean.value()).item() == Approx(all.item() / 4));
  CHECK(norm.running_stats()[0] == 4);
  norm.reset_running_stats();
  CHECK(norm.running_stats() == std::vector<double>{0, 0, 0, 0, 1, 1, 1});
  norm.set_momentum(0.25);
  norm(batch(0));
  CHECK(norm.running_mean.value()(0) == Approx(ch::mean(batch(0), 0)(0) / 4));
  CHECK(message_of<ch::UsageError>([&] { norm.set_momentum(1.5); }) ==
        "BatchNorm: expected momentum in [0, 1], or std::nullopt for means over all batches, got 1.5");
  nn::BatchNorm<Cpu, double> bare(3, {.track_running_stats = false});
  CHECK_FALSE(bare.tracks_running_stats());
  bare.reset_running_stats();
}

}  // namespace batch_norm_layer_test
