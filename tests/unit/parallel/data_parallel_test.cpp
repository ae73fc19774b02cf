// DataParallel against SingleDevice: inputs, outputs, devices, errors, flags, buffers, hooks and memory.
#include <catch.hpp>

#include <chorus/core/trace.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <stdexcept>
#include <tuple>

#include "policies.hpp"

using namespace chorus;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using test::distance;
using test::labels;
using test::message_of;
using test::numbers;

namespace {

constexpr double rounding = 1e-13;

template <class Model>
using Parallel = DataParallel<Model>;

/// An operation that throws in backward wherever a gradient is above 100.
auto mine(const Variable<double, 2>& x) {
  return record(
      "mine", x.value(),
      [](const auto& dy, auto dx) {
        check<UsageError>(dy.data()[0] < 100, "a mine went off");
        dx->add(dy);
      },
      x);
}

struct Knobs {
  mutable int seen = 0;
};

/// Does what its second argument says.
template <class D>
struct Puppet : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{4, 3};
  nn::Dropout dropout{0.5};
  nn::BatchNorm<D, double> norm{3};
  CHORUS_MODULE(Puppet, fc1, fc2, dropout, norm)

  /// Two inputs, which are cut up, and a number and a struct, which are not.
  auto forward(const auto& x, const auto& y, double factor, const std::vector<const Knobs*>& shared) const {
    (void)shared.at(0);
    return fc2(tanh(fc1(x)) * y) * factor;
  }
  /// A scalar, and a tensor.
  auto forward(const auto& x, const char*) const {
    const auto y = fc2(tanh(fc1(x)));
    return std::tuple(mean(y), y, x.numel() == 0 ? 0.0 * y : 2.0 * y);
  }
  /// Throws on the device that has the sample that starts with 7; what, the second argument says.
  auto forward(const auto& x, int what) const {
    for (Index i = 0; i < x.size(0); ++i) {
      if (x(i, 0) != 7) continue;
      if (what == 1) fail<ShapeError>("seven is no good shape");
      if (what == 2) throw std::out_of_range("seven is out of range");
      if (what == 3) fail<FileError>("no file number seven");
      if (what == 5) fail<CommError>("seven does not answer");
    }
    const auto y = mine(fc2(tanh(fc1(x))).as_variable());
    return y;
  }
  /// As many rows of width x's first element says, which differs between devices.
  auto forward(const auto& x, bool) const {
    return Tensor<double, 2, D>::zeros({x.size(0), static_cast<Index>(x(0, 0))}, x.device());
  }
  /// Which of its modules are in training.
  auto flags(const auto& x) const {
    auto out = Tensor<double, 2, D>::empty({x.size(0), 3}, x.device());
    for (Index i = 0; i < x.size(0); ++i) {
      out(i, 0) = training();
      out(i, 1) = dropout.training();
      out(i, 2) = norm.training();
    }
    return out;
  }
  auto forward(const auto& x, float) const { return flags(x); }
  /// Columns are samples.
  auto forward(const auto& x, long) const { return transpose(fc2(tanh(fc1(transpose(x, 0, 1)))), 0, 1); }
};

}  // namespace
