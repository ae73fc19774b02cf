#pragma once
/// Resampling of images along both axes with given weights. Matrix products are not used: 0 times an infinity elsewhere
/// in the image would be NaN.

#include <chorus/autograd/variable.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/resample.hpp>
#include <cstdint>
#include <vector>

namespace chorus {

namespace detail {

/// For each entry of a resampled axis: the source entries of its weighted sum.
struct AxisWeights {
  struct Tap {
    Index index;
    double weight;
  };
  Index in;
  std::vector<std::vector<Tap>> entries;

  AxisWeights transposed() const {
    AxisWeights to{static_cast<Index>(entries.size()), std::vector<std::vector<Tap>>(static_cast<std::size_t>(in))};
    for (Index i = 0; i < to.in; ++i)
      for (const Tap& tap : entries[static_cast<std::size_t>(i)])
        to.entries[static_cast<std::size_t>(tap.index)].push_back({i, tap.weight});
    return to;
  }
};

/// The same on a device, in the kernels' layout.
template <Real T, Device D>
class AxisTaps {
 public:
  AxisTaps(const AxisWeights& weights, D device) : in_(weights.in), out_(static_cast<Index>(weights.entries.size())) {
    std::vector<std::int32_t> begin{0}, index;
    std::vector<compute_type<T>> weight;
    for (const auto& taps : weights.entries) {
      for (const auto& tap : taps) {
        index.push_back(static_cast<std::int32_t>(tap.index));
        weight.push_back(static_cast<compute_type<T>>(tap.weight));
      }
      begin.push_back(static_cast<std::int32_t>(index.size()));
    }
    begin.insert(begin.end(), index.begin(), index.end());
    places_ = decltype(places_)::from(begin, Shape<1>{static_cast<Index>(begin.size())}, device);
    weights_ = decltype(weights_)::from(weight, Shape<1>{static_cast<Index>(weight.size())}, device);
  }

  Index size() const { return out_; }
  kernels::AxisTaps<compute_type<T>> taps() const {
    return {in_, out_, places_.data(), places_.data() + out_ + 1, weights_.data()};
  }

 private:
  Index in_, out_;
  Tensor<std::int32_t, 1, D> places_;  // the begin of each entry's taps, then the source indices
  Tensor<compute_type<T>, 1, D> weights_;
};

template <Real T, Device D>
struct Resampling {
  AxisTaps<T, D> rows, columns;
  Resampling(const AxisWeights& r, const AxisWeights& c, D device) : rows(r, device), columns(c, device) {}
};

}  // namespace detail

namespace operations {
template <class T, class D>
struct Resample {
  static constexpr const char* name = "resample";
  static constexpr bool linear = true;
  detail::Resampling<T, D> there, back;
};
}  // namespace operations

namespace detail {

/// x: [batch, channels, height, width], resampled by `operation.there`; the gradient is resampled by `operation.back`.
template <Operand X, class T, class D>
auto resample(const X& x, const operations::Resample<T, D>& operation) {
  const auto input = contiguous(value_of(x));
  const auto& [n, c, h, w] = input.shape();
  const auto& there = operation.there;
  auto out = tensor_of<X>::empty({n, c, there.rows.size(), there.columns.size()}, input.device());
  kernels::resample(input.device(), n * c, there.rows.taps(), there.columns.taps(), input.data(), out.data(), false);
  return record(
      operation, std::move(out),
      [planes = n * c, back = operation.back](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::resample(dy.device(), planes, back.rows.taps(), back.columns.taps(), dy.data(), grad.data(),
                          accumulate);
      },
      x);
}

template <Operand X>
auto resample(const X& x, const AxisWeights& rows, const AxisWeights& columns) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto device = value_of(x).device();
  return resample(
      x, operations::Resample<T, D>{{rows, columns, device}, {rows.transposed(), columns.transposed(), device}});
}

}  // namespace detail

}  // namespace chorus
