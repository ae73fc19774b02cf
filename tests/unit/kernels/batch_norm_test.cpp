#include <array>
#include <string>

#include <catch.hpp>
#include <chorus/kernels/cpu/batch_norm.hpp>

#include "reference.hpp"

namespace batch_norm_test {

using namespace chorus::kernels;
using chorus::Cpu;

using Doubles = std::vector<double>;
constexpr double eps = 1e-5;

const std::vector<ChannelShape> shapes = {{8, 5, 1},  {40, 16, 1}, {100, 37, 1}, {4, 3, 30}, {3, 2, 16},
                                          {17, 3, 4}, {2, 3, 500}, {1, 2, 9000}, {2, 1, 1}};
const std::vector<ChannelShape> small_shapes = {{5, 3, 1}, {3, 20, 1}, {3, 2, 5}, {2, 2, 17}};

template <class F>
void each_element(ChannelShape shape, F f) {
  for (Index b = 0; b < shape.batch; ++b)
    for (Index c = 0; c < shape.channels; ++c)
      for (Index i = 0; i < shape.inner; ++i)
        f(static_cast<std::size_t>((b * shape.channels + c) * shape.inner + i), static_cast<std::size_t>(c));
}

struct Statistics {
  Doubles mean, variance;
};
template <class T>
Statistics statistics_of(ChannelShape shape, const std::vector<T>& x) {
  const auto channels = static_cast<std::size_t>(shape.channels);
  const auto n = static_cast<double>(shape.per_channel());
  Statistics out{Doubles(channels), Doubles(channels)};
  each_element(shape, [&](std::size_t i, std::size_t c) { out.mean[c] += static_cast<double>(x[i]) / n; });
  each_element(shape, [&](std::size_t i, std::size_t c) {
    const double d = static_cast<double>(x[i]) - out.mean[c];
    out.variance[c] += d * d / n;
  });
  return out;
}

Doubles normalised(ChannelShape shape, const Doubles& x, const Statistics& s, const Doubles& weight,
                   const Doubles& bias) {
  Doubles y(x.size());
  each_element(shape, [&](std::size_t i, std::size_t c) {
    y[i] = (x[i] - s.mean[c]) / std::sqrt(s.variance[c] + eps) * weight[c] + bias[c];
  });
  return y;
}

// Everything a double backward pass reads, with the forward pass run.
struct Case {
  ChannelShape shape;
  Doubles x, dy, weight, bias, running_mean, running_var, y, mean, invstd, dx, dweight, dbias;

  explicit Case(ChannelShape s)
      : shape(s),
        x(numbers<double>(s.numel(), 31)),
        dy(numbers<double>(s.numel(), 32)),
        weight(numbers<double>(s.channels, 33)),
        bias(numbers<double>(s.channels, 34)),
        running_mean(numbers<double>(s.channels, 35)),
        running_var(numbers<double>(s.channels, 36, 0.5, 2)),
        y(x.size()),
        mean(weight.size()),
        invstd(weight.size()),
        dx(x.size(), 1.0),
        dweight(weight.size(), 1.0),
        dbias(weight.size(), 1.0) {
    auto rm = running_mean, rv = running_var;
    batch_norm_forward_train(Cpu{}, shape, x.data(), weight.data(), bias.data(), rm.data(), rv.data(), 0.1, eps,
                             y.data(), mean.data(), invstd.data());
  }
  void backward(bool training, std::array<bool, 3> accumulate) {
    if (training)
      batch_norm_backward_train(Cpu{}, shape, x.data(), dy.data(), weight.data(), bias.data(), mean.data(),
                                invstd.data(), dx.data(), dweight.data(), dbias.data(), accumulate);
    else
      batch_norm_backward_eval(Cpu{}, shape, x.data(), dy.data(), weight.data(), running_mean.data(),
                               running_var.data(), eps, dx.data(), dweight.data(), dbias.data(), accumulate);
  }
};

TEMPLATE_TEST_CASE("batch norm agrees with its definition", "", float, double) {
  using T = TestType;
  for (const auto shape : shapes) {
    CAPTURE(shape.batch, shape.channels, shape.inner);
    const auto x = numbers<T>(shape.numel(), 41), weight = numbers<T>(shape.channels, 42),
               bias = numbers<T>(shape.channels, 43);
    auto running_mean = numbers<T>(shape.channels, 44), running_var = numbers<T>(shape.channels, 45, 0.5, 2);
    const Doubles xd(x.begin(), x.end()), wd(weight.begin(), weight.end()), bd(bias.begin(), bias.end());
    const Statistics before{Doubles(running_mean.begin(), running_mean.end()),
                            Doubles(running_var.begin(), running_var.end())};
    std::vector<T> y(x.size()), mean(weight.size()), invstd(weight.size());

    batch_norm_forward_eval(Cpu{}, shape, x.data(), weight.data(), bias.data(), running_mean.data(), running_var.data(),
                            eps, y.data());
    CHECK(error(y, normalised(shape, xd, before, wd, bd)) < tolerance<T> * 10);

    batch_norm_forward_train(Cpu{}, shape, x.data(), weight.data(), bias.data(), running_mean.data(),
                             running_var.data(), 0.1, eps, y.data(), mean.data(), invstd.data());
    const auto now = statistics_of(shape, x);
    CHECK(error(y, normalised(shape, xd, now, wd, bd)) < tolerance<T> * 10);
    const auto n = static_cast<double>(shape.per_channel());
    Doubles expected_mean, expected_var, expected_invstd;
    for (std::size_t c = 0; c < wd.size(); ++c) {
      expected_mean.push_back(0.9 * before.mean[c] + 0.1 * now.mean[c]);
      expected_var.push_back(0.9 * before.variance[c] + 0.1 * now.variance[c] * n / (n - 1));
      expected_invstd.push_back(1 / std::sqrt(now.variance[c] + eps));
    }
    CHECK(error(running_mean, expected_mean) < tolerance<T>);
    CHECK(error(running_var, expected_var) < tolerance<T>);
    CHECK(error(mean, now.mean) < tolerance<T>);
    CHECK(error(invstd, expected_invstd) < tolerance<T> * 4);

    const T* none = nullptr;
    batch_norm_forward_train(Cpu{}, shape, x.data(), none, none, static_cast<T*>(nullptr), static_cast<T*>(nullptr),
                             0.1, eps, y.data(), mean.data(), invstd.data());
    CHECK(error(y, normalised(shape, xd, now, Doubles(wd.size(), 1.0), Doubles(wd.size(), 0.0))) < tolerance<T> * 10);
  }
}

TEST_CASE("gradients of batch norm agree with differences") {
  for (const bool training : {true, false})
    for (const auto shape : small_shapes) {
      CAPTURE(training, shape.batch, shape.channels, shape.inner);
      Case test(shape);
      const auto loss = [&](const Doubles& x, const Doubles& weight, const Doubles& bias) {
        const auto s = training ? statistics_of(shape, x) : Statistics{test.running_mean, test.running_var};
        return dot(normalised(shape, x, s, weight, bias), test.dy);
      };
      test.backward(training, {});
      CHECK(error(test.dx,
                  numeric_gradient(test.x, [&](const Doubles& x) { return loss(x, test.weight, test.bias); })) < 1e-8);
      CHECK(error(test.dweight,
                  numeric_gradient(test.weight, [&](const Doubles& w) { return loss(test.x, w, test.bias); })) < 1e-8);
      CHECK(error(test.dbias,
                  numeric_gradient(test.bias, [&](const Doubles& b) { return loss(test.x, test.weight, b); })) < 1e-8);
    }
}

TEST_CASE("each gradient of batch norm is overwritten or added to on its own") {
  for (const bool training : {true, false})
    for (std::size_t added = 0; added < 3; ++added) {
      Case plain({3, 2, 5}), mixed({3, 2, 5});
      std::array<bool, 3> accumulate{};
      accumulate[added] = true;
      plain.backward(training, {});
      mixed.backward(training, accumulate);
      for (double& value : added == 0 ? plain.dx : added == 1 ? plain.dweight : plain.dbias) value += 1;
      CHECK(error(mixed.dx, plain.dx) < 1e-14);
      CHECK(error(mixed.dweight, plain.dweight) < 1e-14);
      CHECK(error(mixed.dbias, plain.dbias) < 1e-14);
    }
  Case test({3, 2, 5});
  double* none = nullptr;
  batch_norm_backward_train(Cpu{}, test.shape, test.x.data(), test.dy.data(), test.weight.data(), test.bias.data(),
                            test.mean.data(), test.invstd.data(), none, none, none, {});
}

TEST_CASE("the gradient through a ReLU is the same whether or not it is kept, and where dy lies as elsewhere") {
  for (const auto shape : {ChannelShape{5, 3, 47}, {3, 2, 1100}, {70, 21, 1}}) {
    const auto x = numbers<float>(shape.numel(), 51), weight = numbers<float>(shape.channels, 53),
               bias = numbers<float>(shape.channels, 54);
    auto dy = numbers<float>(shape.numel(), 52);
    std::vector<float> y(x.size()), mean(weight.size()), invstd(weight.size()), masked(x.size());
    float* none = nullptr;
    batch_norm_forward_train(Cpu{}, shape, x.data(), weight.data(), bias.data(), none, none, 0.1, eps, y.data(),
                             mean.data(), invstd.data(), none, true);
    struct Gradients {
      std::vector<float> dx, dweight, dbias;
      bool operator==(const Gradients&) const = default;
    };
    const auto backward = [&](float* kept, bool in_place) {
      Gradients to{std::vector<float>(x.size()), std::vector<float>(weight.size()), std::vector<float>(weight.size())};
      batch_norm_backward_train(Cpu{}, shape, x.data(), dy.data(), weight.data(), bias.data(), mean.data(),
                                invstd.data(), in_place ? dy.data() : to.dx.data(), to.dweight.data(), to.dbias.data(),
                                {}, y.data(), kept);
      if (in_place) to.dx = dy;
      return to;
    };
    const Gradients expected = backward(masked.data(), false);
    for (std::size_t i = 0; i < y.size(); ++i) CHECK(masked[i] == (y[i] > 0 ? dy[i] : 0));
    CHECK(backward(nullptr, false) == expected);
    CHECK(backward(nullptr, true) == expected);
  }
}

TEST_CASE("batch norm keeps its digits where the mean is large against the deviation") {
  for (const auto shape : {ChannelShape{64, 2, 100}, ChannelShape{1000, 3, 1}}) {
    auto x = numbers<float>(shape.numel(), 46);
    for (float& value : x) value = 10000 + std::floor(value * 8) / 4;
    std::vector<float> y(x.size()), mean(static_cast<std::size_t>(shape.channels)), invstd(mean.size());
    float* none = nullptr;
    batch_norm_forward_train(Cpu{}, shape, x.data(), none, none, none, none, 0.1, eps, y.data(), mean.data(),
                             invstd.data());
    const auto expected = statistics_of(shape, x);
    for (std::size_t c = 0; c < mean.size(); ++c) {
      CHECK(std::abs(static_cast<double>(mean[c]) - expected.mean[c]) < 1e-3);
      CHECK(std::abs(static_cast<double>(invstd[c]) * std::sqrt(expected.variance[c] + eps) - 1) < 1e-5);
    }
  }
}

TEST_CASE("sums of shares of a batch add up to the statistics of the batch") {
  const ChannelShape whole{7, 3, 11}, first{3, 3, 11}, second{4, 3, 11};
  const auto x = numbers<float>(whole.numel(), 47);
  Doubles a(6), b(6);
  batch_norm_sums(Cpu{}, first, x.data(), a.data());
  batch_norm_sums(Cpu{}, second, x.data() + first.numel(), b.data());
  for (std::size_t i = 0; i < 6; ++i) a[i] += b[i];
  std::vector<float> mean(3), invstd(3);
  float* none = nullptr;
  batch_norm_statistics(Cpu{}, 3, 77, a.data(), 0.1, eps, none, none, mean.data(), invstd.data());
  const auto expected = statistics_of(whole, x);
  CHECK(error(mean, expected.mean) < 1e-6);
  for (std::size_t c = 0; c < 3; ++c)
    CHECK(static_cast<double>(invstd[c]) == Approx(1 / std::sqrt(expected.variance[c] + eps)).epsilon(1e-5));
}

TEST_CASE("batch norm refuses one value per channel, and leaves statistics alone where there is none") {
  std::vector<float> x(3, 1.0f), running_mean(3, 4.0f), running_var(3, 5.0f), y(3, 6.0f), mean(3), invstd(3);
  const auto train = [&](ChannelShape shape) {
    const float* none = nullptr;
    batch_norm_forward_train(Cpu{}, shape, x.data(), none, none, running_mean.data(), running_var.data(), 0.1, eps,
                             y.data(), mean.data(), invstd.data());
  };
  std::string message;
  try {
    train({1, 3, 1});
  } catch (const chorus::ShapeError& error) {
    message = error.what();
  }
  CHECK(message == "batch_norm: expected several values per channel, got [batch 1, channels 3, inner 1]");
  train({0, 3, 1});
  train({0, 3, 4});
  CHECK(running_mean == std::vector<float>(3, 4.0f));
  CHECK(running_var == std::vector<float>(3, 5.0f));
  CHECK(y == std::vector<float>(3, 6.0f));
  std::vector<float> dweight(3, 7.0f), dbias(3, 7.0f);
  batch_norm_backward_train<float>(Cpu{}, {0, 3, 4}, nullptr, nullptr, nullptr, nullptr, mean.data(), invstd.data(),
                                   y.data(), dweight.data(), dbias.data(), {});
  CHECK(dweight == std::vector<float>(3, 0.0f));
  CHECK(dbias == std::vector<float>(3, 0.0f));
}

}  // namespace batch_norm_test
