#pragma once
/// One golden case as a test sees it: inputs as Variables, results compared with PyTorch's, and nothing left out.

#include <algorithm>
#include <array>
#include <chorus/autograd/variable.hpp>
#include <chorus/kernels/loss_options.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/size2d.hpp>
#include <cmath>
#include <cstddef>
#include <functional>
#include <golden_file.hpp>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace golden {

namespace ch = chorus;
using ch::Index;
using ch::Shape;

/// What the cases run on; build/tests/golden_cuda has a GPU instead.
#ifndef CHORUS_GOLDEN_DEVICE
#define CHORUS_GOLDEN_DEVICE ::chorus::Cpu
#define CHORUS_GOLDEN_ON_CPU 1
#endif
using Device = CHORUS_GOLDEN_DEVICE;

/// What they compute in: the files' floats are converted on their way in and out.
#ifndef CHORUS_GOLDEN_NUMBER
#define CHORUS_GOLDEN_NUMBER float
#endif
using Number = CHORUS_GOLDEN_NUMBER;
inline constexpr bool in_float = std::is_same_v<Number, float>;

template <int Rank>
using Tensor = ch::Tensor<float, Rank, Device>;
template <int Rank>
using Variable = ch::Variable<Number, Rank, Device>;
using Labels = ch::Tensor<std::int64_t, 1, Device>;

/// The largest difference, relative to the largest expected magnitude; infinite for a NaN or a different number of
/// elements.
inline double error(std::span<const float> actual, std::span<const float> expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double a = static_cast<double>(actual[i]), e = static_cast<double>(expected[i]);
    largest = std::max(largest, std::abs(e));
    worst = std::max(worst, a == e                 ? 0
                            : std::isfinite(a - e) ? std::abs(a - e)
                                                   : std::numeric_limits<double>::infinity());
  }
  return largest > 0 ? worst / largest : worst;
}

// Plain loops: g++ warns of the standard algorithms where a shape is empty.
inline bool same(std::span<const Index> a, std::span<const Index> b) {
  bool equal = a.size() == b.size();
  for (std::size_t i = 0; equal && i < a.size(); ++i) equal = a[i] == b[i];
  return equal;
}
/// A list of sizes or axes as an array. Throws ShapeError where it has not `Rank` entries.
template <int Rank>
Shape<Rank> as_shape(std::string_view what, std::span<const Index> from) {
  ch::check<ch::ShapeError>(from.size() == static_cast<std::size_t>(Rank), "expected ", what, " of rank ", Rank,
                            ", got ", from);
  Shape<Rank> out{};
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = from[i];
  return out;
}

struct LeftOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Case {
 public:
  Case(const chorus_test::GoldenCase& file, double tolerance) : file_(file), tolerance_(tolerance) {}

  const nlohmann::json& attrs() const { return file_.attrs; }
  template <class T>
  T attr(const char* name, T otherwise) const {
    const auto found = file_.attrs.find(name);
    return found == file_.attrs.end() || found->is_null() ? otherwise : found->template get<T>();
  }
  template <class T>
  T attr(const char* name) const {
    ch::check<ch::FileError>(file_.attrs.contains(name), "no attribute ", name);
    return file_.attrs[name].template get<T>();
  }
  bool has(std::string_view name) const { return file_.has(name); }
  /// The whole tensor, by its full name ("init.conv1.weight").
  const chorus_test::GoldenTensor& file(std::string_view name) const { return file_[name]; }
  int rank(std::string_view input) const { return static_cast<int>(shape(input).size()); }
  const std::vector<Index>& shape(std::string_view input) const { return file_[ch::cat("in.", input)].shape; }

  // Cases may have any rank, and not every operator is compiled for each: where its axes are alike, an input takes the
  // shape of another rank, and numbers alone are compared.

  /// Input NAME's shape as [outer, axis, inner], seen from an axis.
  Shape<3> around(std::string_view input, Index axis) const {
    const auto& from = shape(input);
    const auto at = ch::normalize_axis("golden", axis, std::max(rank(input), 1));
    Shape<3> out{1, 1, 1};
    for (std::size_t i = 0; i < from.size(); ++i) out[i < at ? 0 : i == at ? 1 : 2] *= from[i];
    return out;
  }
  /// With axes of size 1 in front, as they are where inputs broadcast.
  template <int Rank = 5>
  Shape<Rank> widened(std::string_view input) const {
    const auto& from = shape(input);
    check_rank(input, Rank);
    Shape<Rank> out{};
    out.fill(1);
    std::copy(from.begin(), from.end(), out.end() - static_cast<std::ptrdiff_t>(from.size()));
    return out;
  }
  /// With all axes in front of the last Rank - 1 joined to one, which there may be none of.
  template <int Rank>
  Shape<Rank> stacked(std::string_view input) const {
    const auto& from = shape(input);
    ch::check<ch::ShapeError>(from.size() + 1 >= Rank, "expected ", input, " of rank ", Rank - 1, " at least");
    Shape<Rank> out{};
    out.fill(1);
    const std::size_t joined = from.size() + 1 - Rank;
    for (std::size_t i = 0; i < from.size(); ++i) out[i < joined ? 0 : i + 1 - joined] *= from[i];
    return out;
  }
  std::map<std::string, const chorus_test::GoldenTensor*> group(std::string_view prefix) const {
    return file_.group(prefix);
  }

  /// Input NAME. Throws ShapeError where its rank is another.
  template <int Rank>
  Tensor<Rank> tensor(std::string_view name) const {
    return load<float, Rank>(ch::cat("in.", name));
  }
  template <int Rank>
  ch::Tensor<std::int64_t, Rank, Device> integers(std::string_view name) const {
    return load<std::int64_t, Rank>(ch::cat("in.", name));
  }
  template <int Rank>
  ch::Tensor<bool, Rank, Device> mask(std::string_view name) const {
    const auto& from = file_[ch::cat("in.", name)];
    auto out = ch::Tensor<bool, Rank>::empty(as_shape<Rank>(name, from.shape));
    for (std::size_t i = 0; i < from.u8().size(); ++i) out.data()[i] = from.u8()[i] != 0;
    return ch::to_device(out, Device{});
  }
  // The same in another shape of as many elements.
  template <std::size_t Size>
  Tensor<static_cast<int>(Size)> tensor(std::string_view name, const std::array<Index, Size>& as) const {
    return Tensor<static_cast<int>(Size)>::from(std::span<const float>(file_[ch::cat("in.", name)].f32()), as);
  }
  template <std::size_t Size>
  ch::Tensor<std::int64_t, static_cast<int>(Size), Device> integers(std::string_view name,
                                                                    const std::array<Index, Size>& as) const {
    return ch::Tensor<std::int64_t, static_cast<int>(Size), Device>::from(
        std::span<const std::int64_t>(file_[ch::cat("in.", name)].i64()), as);
  }
  template <std::size_t Size>
  ch::Tensor<bool, static_cast<int>(Size), Device> mask(std::string_view name,
                                                        const std::array<Index, Size>& as) const {
    auto out = ch::Tensor<bool, static_cast<int>(Size)>::empty(as);
    const auto& from = file_[ch::cat("in.", name)].u8();
    ch::check<ch::ShapeError>(static_cast<Index>(from.size()) == out.numel(), name, " does not fit shape ", as);
    for (std::size_t i = 0; i < from.size(); ++i) out.data()[i] = from[i] != 0;
    return ch::to_device(out, Device{});
  }
  /// Input NAME as a leaf; its gradient is compared at the end where the case has one.
  template <int Rank>
  Variable<Rank> in(std::string_view name) {
    return leaf(name, tensor<Rank>(name));
  }
  /// The same in another shape of as many elements.
  template <std::size_t Size>
  Variable<static_cast<int>(Size)> in(std::string_view name, const std::array<Index, Size>& as) {
    return leaf(name, tensor(name, as));
  }
  Index numel(std::string_view input) const { return ch::numel(file_[ch::cat("in.", input)].shape); }

  /// Compares output NAME, and where the case has a gradient for it sends that back.
  template <class T, int Rank>
  void out(std::string_view name, const ch::Variable<T, Rank, Device>& value) {
    compare(ch::cat("out.", name), ch::to<float>(value.value()));
    if (has(ch::cat("gout.", name))) back(name, value);
  }
  template <int Rank>
  void out(std::string_view name, const Tensor<Rank>& value) {
    compare(ch::cat("out.", name), value);
  }
  /// The same for what was computed in another shape.
  template <class T, int Rank>
  void out_numbers(std::string_view name, const ch::Variable<T, Rank, Device>& value) {
    compare_numbers(ch::cat("out.", name), value.value());
    if (has(ch::cat("gout.", name))) back(name, value);
  }
  template <class T, int Rank>
  void out_numbers(std::string_view name, const ch::Tensor<T, Rank, Device>& value) {
    compare_numbers(ch::cat("out.", name), value);
  }
  /// Sends the gradient of output NAME, which `value` is in whatever shape.
  template <class T, int Rank>
  void back(std::string_view name, const ch::Variable<T, Rank, Device>& value) {
    const auto seed = ch::cat("gout.", name);
    const auto gradient = Tensor<Rank>::from(std::span<const float>(file_[seed].f32()), value.shape());
    used_.insert(seed);
    value.backward(ch::to<T>(gradient), /*retain_graph=*/true);
  }

  /// Compares a tensor of the case, shape and numbers.
  template <int Rank>
  void compare(const std::string& name, const Tensor<Rank>& value) {
    const auto& expected = file_[name];
    used_.insert(name);
    if (!same(expected.shape, value.shape()))
      return report(name, ch::cat("shape ", value.shape(), ", expected ", std::span<const Index>(expected.shape)));
    compare_numbers(name, value);
  }
  /// Compares numbers alone, for values that were computed in another shape.
  template <class T, int Rank>
  void compare_numbers(const std::string& name, const ch::Tensor<T, Rank, Device>& value) {
    compare_numbers(name, ch::contiguous(ch::to<float>(value)).to_vector());
  }
  void compare_numbers(const std::string& name, std::span<const float> actual) {
    used_.insert(name);
    const double e = error(actual, file_[name].f32());
    if (!(e <= tolerance_)) report(name, ch::cat("error ", e));
  }
  void compare_integers(const std::string& name, std::span<const std::int64_t> actual) {
    used_.insert(name);
    const auto& expected = file_[name].i64();
    if (!std::equal(actual.begin(), actual.end(), expected.begin(), expected.end())) report(name, "differs");
  }
  /// `gradient()` is to be compared with GRAD at the end.
  void expect_gradient(const std::string& grad, std::function<std::vector<float>()> gradient) {
    gradients_.emplace_back(grad, std::move(gradient));
  }
  /// Counts a tensor of the case as used.
  void seen(const std::string& name) { used_.insert(name); }
  /// Ends a case that says nothing about this type of numbers, and why.
  [[noreturn]] void leave_out(const char* why) const { throw LeftOut(why); }
  void report(const std::string& tensor, const std::string& problem) { failures_.push_back(tensor + ": " + problem); }

  /// Compares the gradients; what the case has and nothing was compared with is a failure. Returns all failures.
  std::vector<std::string> finish() {
    for (const auto& [name, gradient] : gradients_) {
      const auto grad = gradient();
      if (grad.empty() && !file_[name].f32().empty())
        report(name, "no gradient arrived");
      else
        compare_numbers(name, grad);
    }
    for (const auto& [name, tensor] : file_.tensors)
      if ((name.starts_with("out.") || name.starts_with("grad.") || name.starts_with("gout.") ||
           name.starts_with("final.")) &&
          !used_.contains(name))
        report(name, "was not compared");
    return failures_;
  }

 private:
  template <class T, int Rank>
  ch::Tensor<T, Rank, Device> load(const std::string& name) const {
    const auto& from = file_[name];
    const auto& values = std::get<std::vector<T>>(from.values);
    return ch::Tensor<T, Rank, Device>::from(std::span<const T>(values), as_shape<Rank>(name, from.shape));
  }
  void check_rank(std::string_view input, int most) const {
    ch::check<ch::ShapeError>(rank(input) <= most, "expected ", input, " of rank ", most, " at most");
  }
  template <int Rank>
  Variable<Rank> leaf(std::string_view name, const Tensor<Rank>& value) {
    const auto grad = ch::cat("grad.", name);
    const Variable<Rank> out(ch::to<Number>(value), has(grad));
    if (has(grad))
      gradients_.emplace_back(grad, [out] {
        return out.grad().defined() ? ch::to<float>(out.grad()).to_vector() : std::vector<float>();
      });
    return out;
  }

  const chorus_test::GoldenCase& file_;
  double tolerance_;
  std::set<std::string> used_;
  std::vector<std::string> failures_;
  std::vector<std::pair<std::string, std::function<std::vector<float>()>>> gradients_;
};

/// Ranks that operators of any rank are compiled for. All take time to compile, nvcc's above all.
inline constexpr int least_rank = in_float && std::is_same_v<Device, ch::Cpu> ? 0 : 1;
inline constexpr int most_rank = in_float && std::is_same_v<Device, ch::Cpu> ? 5 : 4;

/// Calls `f` with the rank as a compile-time constant. Throws ShapeError outside of [Least, most_rank].
template <int Least = 0, class F>
void with_rank(int rank, const F& f) {
  constexpr int least = std::max(Least, least_rank);
  const auto call = [&]<int R>(std::integral_constant<int, R>) {
    if constexpr (R >= least && R <= most_rank)
      f(std::integral_constant<int, R>{});
    else
      ch::fail<ch::ShapeError>("rank ", rank, " is not in [", least, ", ", most_rank, "]");
  };
  switch (rank) {
    case 0:
      return call(std::integral_constant<int, 0>{});
    case 1:
      return call(std::integral_constant<int, 1>{});
    case 2:
      return call(std::integral_constant<int, 2>{});
    case 3:
      return call(std::integral_constant<int, 3>{});
    case 4:
      return call(std::integral_constant<int, 4>{});
    case 5:
      return call(std::integral_constant<int, 5>{});
    default:
      ch::fail<ch::ShapeError>("rank ", rank, " is not in [", least, ", ", most_rank, "]");
  }
}

/// Height and width: one number or a list of two.
inline ch::Size2d size2d(const Case& test, const char* name, Index otherwise) {
  const auto found = test.attrs().find(name);
  if (found == test.attrs().end() || found->is_null()) return otherwise;
  return found->is_array() ? ch::Size2d(found->at(0).get<Index>(), found->at(1).get<Index>())
                           : ch::Size2d(found->get<Index>());
}

/// An input that a case may lack; undefined there.
template <int Rank>
Variable<Rank> optional_in(Case& test, const char* name) {
  return test.has(ch::cat("in.", name)) ? test.in<Rank>(name) : Variable<Rank>();
}

/// How the case reduces a loss.
inline ch::Reduction reduction_of(const Case& test) {
  const auto name = test.attr<std::string>("reduction", "mean");
  ch::check<ch::UsageError>(name == "mean" || name == "sum" || name == "none", "unknown reduction ", name);
  return name == "mean" ? ch::Reduction::mean : name == "sum" ? ch::Reduction::sum : ch::Reduction::none;
}

/// An element-wise function of one input sees no axes: one instance serves all ranks.
template <class F>
void unary(Case& test, const F& f) {
  test.out_numbers("y", f(test.in<1>("x", {test.numel("x")})));
}

using Operation = void (*)(Case&);
/// Every operation that golden cases may name. The parts register theirs.
using Operations = std::map<std::string, Operation, std::less<>>;

void add_pointwise(Operations& operations);
void add_reductions(Operations& operations);
void add_shapes(Operations& operations);
void add_layers(Operations& operations);
void add_losses(Operations& operations);
void add_recurrent(Operations& operations);
void add_optimizers(Operations& operations);
void add_more(Operations& operations);
void add_transformer(Operations& operations);
void add_functions(Operations& operations);
void add_further(Operations& operations);
void add_training(Operations& operations);
void add_quantized(Operations& operations);
void add_quantization(Operations& operations);

/// The shape of an input, as one axis.
inline Shape<1> flat(const Case& test, const char* name) { return {test.numel(name)}; }

}  // namespace golden
