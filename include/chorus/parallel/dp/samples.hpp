#pragma once
/// The samples of a batch: how many there are, and how they are shared out.

#include <algorithm>
#include <chorus/autograd/batch_axis.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/shares.hpp>
#include <chorus/parallel/dp/nested.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace chorus {

namespace detail {

/// Whether a Tensor or Variable has the axis along which it would be cut. One without goes to every device whole.
template <Operand X>
bool has_samples(const X& x, int dim) {
  return batch_axis_of<X>(dim) < static_cast<int>(value_of(x).shape().size());
}

/// The number of samples in a policy's inputs: of the inputs that say their axis (BatchAxis), else of the first that
/// has the policy's axis; 1 where there are none. Throws ShapeError where two say axes of different sizes.
template <class... Inputs>
Index samples_of(int dim, const Inputs&... inputs) {
  std::optional<Index> said, first;
  [[maybe_unused]] const auto look = [&]<class X>(const X& x) {
    if (!has_samples(x, dim)) return;
    const Index size = value_of(x).size(batch_axis_of<X>(dim));
    auto& known = says_batch_axis<X> ? said : first;
    if (!known) known = size;
    if constexpr (says_batch_axis<X>)
      check<ShapeError>(known == size, "inputs with batch_axis have ", *known, " and ", size, " samples");
  };
  (for_each_tensor(inputs, look), ...);
  return said ? *said : first.value_or(1);
}

}  // namespace detail

namespace dp {

/// A batch that is split along `dim` into one share for each of the first `devices` devices.
struct Split {
  Index batch = 1;
  std::size_t devices = 1;
  int dim = 0;
  std::vector<const void*> whole = {};  ///< inputs that belong to no sample, though they are as long as the batch

  /// Of share `i`: its first sample, and how many samples it has.
  Index begin(std::size_t i) const { return share_begin(batch, devices, i); }
  Index size(std::size_t i) const { return begin(i + 1) - begin(i); }
  /// Whether an input is cut: where it has as many samples. Others go to every device whole.
  template <Operand X>
  bool cuts(const X& x) const {
    return detail::has_samples(x, dim) && value_of(x).size(detail::batch_axis_of<X>(dim)) == batch &&
           (whole.empty() || std::find(whole.begin(), whole.end(), &x) == whole.end());
  }
};

/// What the random operations of share `i` draw from: the numbers of its samples. `whole`: of the whole of what is
/// split. Both have to outlive the result. `devices`: as many as share the batch.
inline RandomContext random_of_share(const RandomContext& whole, const Split& split, std::size_t i, int devices) {
  RandomContext share = whole;
  share.first_sample = [&whole, begin = split.begin(i)] {
    return (whole.first_sample ? whole.first_sample() : 0) + begin;
  };
  share.samples = split.size(i);
  share.devices = devices;
  share.dim = split.dim;
  share.is_share = [&split](std::int64_t samples) {
    return samples == split.size(0) || samples == split.size(split.devices - 1);
  };
  return share;
}

}  // namespace dp
}  // namespace chorus
