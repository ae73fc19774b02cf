#include <algorithm>
#include <catch.hpp>
#include <chorus/kernels/cpu/optimizer.hpp>
#include <chorus/kernels/cpu/square_sum.hpp>
#include <cmath>
#include <vector>

#include "reference.hpp"

namespace optimizer_test {

using namespace chorus::kernels;
using chorus::Cpu;

constexpr Index count = 37;

// PyTorch 1.13's optimizers, in double, one parameter.
struct Reference {
  double p = 0, m = 0, v = 0, vmax = 0;

  void sgd(double g, const SgdScalars& s) {
    g += s.weight_decay * p;
    if (s.momentum != 0) {
      m = s.first_step ? g : s.momentum * m + (1 - s.dampening) * g;
      g = s.nesterov ? g + s.momentum * m : m;
    }
    p -= s.lr * g;
  }
  void adam(double g, const AdamScalars& s, bool amsgrad) {
    if (s.decoupled)
      p *= 1 - s.lr * s.weight_decay;
    else
      g += s.weight_decay * p;
    m = s.beta1 * m + (1 - s.beta1) * g;
    v = s.beta2 * v + (1 - s.beta2) * g * g;
    vmax = std::max(vmax, v);
    const double step = static_cast<double>(s.step);
    const double denominator = std::sqrt(amsgrad ? vmax : v) / std::sqrt(1 - std::pow(s.beta2, step)) + s.eps;
    p -= s.lr / (1 - std::pow(s.beta1, step)) * m / denominator;
  }
  void rms_prop(double g, const RmsPropScalars& s) {
    g += s.weight_decay * p;
    v = s.alpha * v + (1 - s.alpha) * g * g;
    const double step = g / (std::sqrt(v) + s.eps);
    m = s.momentum * m + step;
    p -= s.lr * (s.momentum > 0 ? m : step);
  }
  void adagrad(double g, const AdagradScalars& s) {
    g += s.weight_decay * p;
    v += g * g;
    p -= s.lr / (1 + static_cast<double>(s.step - 1) * s.lr_decay) * g / (std::sqrt(v) + s.eps);
  }
};

/// Five steps of both, with gradients that change sign and size.
template <class T, class Step, class ReferenceStep>
void compare(Step step, ReferenceStep reference_step) {
  std::vector<T> p = numbers<T>(count, 1), m(p.size()), v(p.size()), vmax(p.size());
  std::vector<Reference> reference(p.size());
  for (std::size_t i = 0; i < p.size(); ++i) reference[i].p = static_cast<double>(p[i]);
  for (Index t = 0; t < 5; ++t) {
    const auto g = numbers<T>(count, static_cast<std::uint64_t>(10 + t), -1, 2.0 - static_cast<double>(t) / 2);
    step(t, p.data(), g.data(), m.data(), v.data(), vmax.data());
    std::vector<double> expected;
    for (std::size_t i = 0; i < p.size(); ++i) {
      reference_step(t, reference[i], static_cast<double>(g[i]));
      expected.push_back(reference[i].p);
    }
    CHECK(error(p, expected) < tolerance<T>);
  }
}

TEMPLATE_TEST_CASE("sgd_step is PyTorch's SGD", "", float, double) {
  using T = TestType;
  for (SgdScalars s : {SgdScalars{.lr = 0.1}, SgdScalars{.lr = 0.1, .weight_decay = 0.01},
                       SgdScalars{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01},
                       SgdScalars{.lr = 0.1, .momentum = 0.9, .dampening = 0.3},
                       SgdScalars{.lr = 0.1, .momentum = 0.9, .nesterov = true}}) {
    compare<T>(
        [&](Index t, T* p, const T* g, T* m, T*, T*) {
          s.first_step = t == 0;
          sgd_step(Cpu{}, count, p, g, s.momentum == 0 ? nullptr : m, s);
        },
        [&](Index t, Reference& r, double g) {
          s.first_step = t == 0;
          r.sgd(g, s);
        });
  }
}

TEMPLATE_TEST_CASE("adam_step is PyTorch's Adam, AdamW and AMSGrad", "", float, double) {
  using T = TestType;
  for (const bool amsgrad : {false, true})
    for (AdamScalars s :
         {AdamScalars{.lr = 0.01}, AdamScalars{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.9, .weight_decay = 0.1},
          AdamScalars{.lr = 0.01, .eps = 1e-3, .weight_decay = 0.1, .decoupled = true}}) {
      compare<T>(
          [&](Index t, T* p, const T* g, T* m, T* v, T* vmax) {
            s.step = t + 1;
            adam_step(Cpu{}, count, p, g, m, v, amsgrad ? vmax : nullptr, s);
          },
          [&](Index t, Reference& r, double g) {
            s.step = t + 1;
            r.adam(g, s, amsgrad);
          });
    }
}

TEMPLATE_TEST_CASE("rms_prop_step and adagrad_step are PyTorch's", "", float, double) {
  using T = TestType;
  for (const double momentum : {0.0, 0.5}) {
    const RmsPropScalars s{.lr = 0.01, .alpha = 0.95, .weight_decay = 0.1, .momentum = momentum};
    compare<T>([&](Index, T* p, const T* g, T* m, T* v,
                   T*) { rms_prop_step(Cpu{}, count, p, g, v, momentum > 0 ? m : nullptr, s); },
               [&](Index, Reference& r, double g) { r.rms_prop(g, s); });
  }
  AdagradScalars s{.lr = 0.1, .lr_decay = 0.05, .weight_decay = 0.1};
  compare<T>(
      [&](Index t, T* p, const T* g, T*, T* v, T*) {
        s.step = t + 1;
        adagrad_step(Cpu{}, count, p, g, v, s);
      },
      [&](Index t, Reference& r, double g) {
        s.step = t + 1;
        r.adagrad(g, s);
      });
}

TEST_CASE("an overflown second moment stops a parameter but does not spoil it") {
  float p = 1, m = 0, v = 0;
  const float g = 1e30f;
  adam_step(Cpu{}, 1, &p, &g, &m, &v, static_cast<float*>(nullptr), AdamScalars{.lr = 0.1});
  CHECK(p == 1);
}

TEMPLATE_TEST_CASE("square_sum is accurate, repeatable, and 0 for nothing", "", float, double) {
  CHECK(square_sum(Cpu{}, 0, static_cast<const TestType*>(nullptr)) == 0);
  for (const Index n : {1, 17, 4096, 4097, 100003}) {
    const auto x = numbers<TestType>(n, 5);
    double expected = 0;
    for (const TestType value : x) expected += static_cast<double>(value) * static_cast<double>(value);
    CHECK(square_sum(Cpu{}, n, x.data()) == Approx(expected).epsilon(sizeof(TestType) == 4 ? 1e-6 : 1e-12));
    auto shifted = x;  // the same numbers at another alignment
    shifted.insert(shifted.begin(), TestType{9});
    CHECK(square_sum(Cpu{}, n, x.data()) == square_sum(Cpu{}, n, shifted.data() + 1));
  }
}

TEST_CASE("a step over nothing touches nothing") {
  sgd_step<float>(Cpu{}, 0, nullptr, nullptr, nullptr, {});
  adam_step<float>(Cpu{}, 0, nullptr, nullptr, nullptr, nullptr, nullptr, {});
}

}  // namespace optimizer_test
