// Numbers that are infinite, undefined, 0 or alone.
#include "policies.hpp"

#include <limits>

namespace cases {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
using Vector = ch::Variable<double, 1>;

Vector vector(std::initializer_list<double> numbers) {
  return Vector(ch::Tensor<double, 1>::from(numbers, {static_cast<ch::Index>(numbers.size())}), true);
}

// pytorch#102894, #49844: binary cross entropy of large and infinite logits.
const Add bce("bce_with_logits", R"(
30, 1: loss 9.35762e-14, gradient -9.34808e-14
-800, 1: loss 800, gradient -1
inf, 1: loss 0, gradient 0
inf, 0: loss inf, gradient 1
-inf, 0: loss 0, gradient 0
)",
              [](std::ostream& out) {
                for (const auto& [x, target] :
                     {std::pair{30.0, 1.0}, {-800.0, 1.0}, {infinity, 1.0}, {infinity, 0.0}, {-infinity, 0.0}}) {
                  const auto logit = vector({x});
                  const auto loss = ch::bce_with_logits(logit, ch::Tensor<double, 1>::full({1}, target));
                  loss.backward();
                  out << x << ", " << target << ": loss " << loss.item() << ", gradient " << logit.grad()(0) << "\n";
                }
              });

struct Two : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> a{2, 1}, b{2, 1};
  CHORUS_MODULE(Two, a, b)
  auto forward(const auto& x) const { return std::pair(a(x), b(x)); }
};

// pytorch#46849: clipping where a gradient is no number.
const Add clip("clip_grad_norm", R"(
nan: norm nan, finite gradients become nan
inf: norm inf, finite gradients become 0
with error_if_nonfinite: refused
)",
               [](std::ostream& out) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), infinity}) {
    ch::SingleDevice<Two> net{Two{}};
    const auto run = [&] {
      const auto [u, v] = net(ch::Tensor<double, 2>::full({1, 2}, 100));
      (ch::sum(u) * 1000 + ch::sum(v) * bad).backward();
    };
    run();
    const double norm = ch::optim::clip_grad_norm(net.parameters(), 1.0);
    out << bad << ": norm " << norm << ", finite gradients become " << net.module().a.weight.grad()(0, 0) << "\n";
    if (bad != infinity) continue;
    const auto text =
        refusal([&] { ch::optim::clip_grad_norm(net.parameters(), 1.0, {.error_if_nonfinite = true}); });
    out << "with error_if_nonfinite: " << (text == "no error" ? text : "refused") << "\n";
  }
});

// pytorch#2421, #4320: norm and standard deviation where they have no derivative.
const Add norms("norm_and_std", R"(
norm of zeros: 0, gradient 0 0
std of equal numbers: 0, gradient 0 0
std of one number: nan, gradient nan
)",
                [](std::ostream& out) {
  const auto show = [&](const char* what, const Vector& x, const auto& f) {
    const auto y = f(x);
    y.backward();
    out << what << ": " << std::abs(y.item()) << ", gradient";
    for (const double g : x.grad().to_vector()) out << " " << (std::isnan(g) ? std::abs(g) : g);
    out << "\n";
  };
  show("norm of zeros", vector({0, 0}), [](const auto& x) { return ch::norm(x); });
  show("std of equal numbers", vector({2, 2}), [](const auto& x) { return ch::std(x); });
  show("std of one number", vector({2}), [](const auto& x) { return ch::std(x); });
});

// pytorch#98828, apex#834: a loss scale that grows without end, or goes to 0.
const Add scales("loss_scale", R"(
tiny gradients: 300 of 300 steps taken, scale finite: yes
after 200 batches of NaN: 100 of 100 steps taken
)",
                 [](std::ostream& out) {
  const auto taken = [](int steps, int growth_interval, const auto& input, double factor, bool& finite) {
    ch::SingleDevice<Line<ch::Cpu>> net{filled<Line<ch::Cpu>>()};
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 1e-3}};
    ch::optim::GradScaler scaler{net.parameters(), {.growth_interval = growth_interval}};
    int count = 0;
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      scaler.scale(ch::mean(ch::square(net(ch::Tensor<double, 2>::full({1, 3}, input(step))) * factor))).backward();
      if (scaler.step(optimizer) && step >= steps - 300) ++count;
    }
    finite = std::isfinite(scaler.loss_scale()) && scaler.loss_scale() > 0;
    return count;
  };
  bool finite = false;
  const int tiny = taken(300, 1, [](int) { return 0.1; }, 1e-150, finite);
  out << "tiny gradients: " << tiny << " of 300 steps taken, scale finite: " << (finite ? "yes" : "no") << "\n";
  const int after = taken(300, 2000, [](int step) { return step < 200 ? NAN : 0.5; }, 1, finite);
  out << "after 200 batches of NaN: " << after << " of 100 steps taken\n";
});

// pytorch#47513: measures below 0.
const Add plateau("plateau_below_zero", R"(
-1, then -0.95: 0.010
-1 for 9 epochs: 0.001
)",
                  [](std::ostream& out) {
  struct Rate : ch::optim::HasLearningRate {
    Rate() : HasLearningRate(0.1) {}
  };
  Rate first, second;
  ch::optim::ReduceOnPlateau strict{first, {.factor = 0.1, .patience = 0, .threshold = 0.1}};
  strict.step(-1);
  strict.step(-0.95);
  out << "-1, then -0.95: " << rounded(first.lr()) << "\n";
  ch::optim::ReduceOnPlateau patient{second, {.factor = 0.1, .patience = 2}};
  for (int epoch = 0; epoch < 9; ++epoch) patient.step(-1);
  out << "-1 for 9 epochs: " << rounded(second.lr()) << "\n";
});

// pytorch#162359: a warm-up and a decay, both made before the loop.
const Add schedules("two_schedules", "0.001 0.034 0.067 0.100 0.090 0.065 0.035 0.010", [](std::ostream& out) {
  struct Rate : ch::optim::HasLearningRate {
    Rate() : HasLearningRate(0.1) {}
  } rate;
  ch::optim::Schedule warm{rate, ch::optim::LinearRamp{.start_factor = 0.01, .end_factor = 1, .total = 3}};
  ch::optim::Schedule decay{rate, ch::optim::CosineAnnealing{.t_max = 5}};
  for (int epoch = 0; epoch < 8; ++epoch) {
    if (epoch < 3)
      warm.set_epoch(epoch);
    else
      decay.set_epoch(epoch - 3);
    out << rounded(rate.lr()) << " ";
  }
  out << "\n";
});

// pytorch#45687, #19250: a normalisation of one number is 0 whatever it is.
const Add alone("norm_of_one_number", R"(
InstanceNorm2d of [4, 3, 1, 1]: refused
GroupNorm of [1, 3, 1, 1]: refused
BatchNorm2d of [1, 3, 1, 1]: refused
)",
                [](std::ostream& out) {
  const auto show = [&](const char* what, const auto& f) {
    const auto text = refusal(f);
    out << what << ": " << (text == "no error" ? text : "refused") << "\n";
  };
  using Image = ch::Tensor<float, 4>;
  show("InstanceNorm2d of [4, 3, 1, 1]", [] { ch::nn::InstanceNorm2d<ch::Cpu>{3}(Image::ones({4, 3, 1, 1})); });
  show("GroupNorm of [1, 3, 1, 1]", [] { ch::nn::GroupNorm<ch::Cpu>{3, 3}(Image::ones({1, 3, 1, 1})); });
  show("BatchNorm2d of [1, 3, 1, 1]", [] { ch::nn::BatchNorm2d<ch::Cpu>{3}(Image::ones({1, 3, 1, 1})); });
});

// pytorch#41508: a query that sees no key, and that the loss does not use.
const Add masked_row("attention_row_without_keys", "gradients finite: yes, of a used row as without the other one: yes",
                     [](std::ostream& out) {
  const auto gradients = [](ch::Index queries) {
    const ch::Variable<double, 3> q(rows(0, queries, 4).view(ch::Shape<3>{1, queries, 4}), true);
    const ch::Tensor<double, 3> kv = rows(7, 10, 4).view(ch::Shape<3>{1, 3, 4});
    auto seen = ch::Tensor<bool, 3>::full({1, queries, 3}, true);
    for (ch::Index key = 0; key < 3 && queries > 1; ++key) seen.data()[3 + key] = false;
    ch::sum(ch::square(ch::slice(ch::scaled_dot_product_attention(q, kv, kv, seen), 1, 0, 1))).backward();
    return q.grad().to_vector();
  };
  const auto with = gradients(2), without = gradients(1);
  bool finite = true, same = true;
  for (std::size_t i = 0; i < with.size(); ++i) {
    finite = finite && std::isfinite(with[i]);
    if (i < 4) same = same && std::abs(with[i] - without[i]) < 1e-12;
  }
  out << "gradients finite: " << (finite ? "yes" : "no")
      << ", of a used row as without the other one: " << (same ? "yes" : "no") << "\n";
});

}  // namespace
}  // namespace cases
