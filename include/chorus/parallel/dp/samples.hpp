#pragma once
/// The samples of a batch: how many there are, and how they are divided.

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

/// Whether a Tensor or Variable has the axis along which inputs are cut. Otherwise every device gets all of it.
template <Operand X>
bool has_samples(const X& x, int dim) {
  return batch_axis_of<X>(dim) < static_cast<int>(value_of(x).shape().size());
}

/// The number of samples in a policy's inputs: from the inputs with a marked axis (BatchAxis), else from the first that
/// has the policy's axis; 1 if there is none. Throws ShapeError if two marked axes differ in size.
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
  std::vector<const void*> whole = {};  ///< inputs without samples that are as long as the batch

  /// The first sample and the number of samples of share `i`.
  Index begin(std::size_t i) const { return share_begin(batch, devices, i); }
  Index size(std::size_t i) const { return begin(i + 1) - begin(i); }
  /// Whether an input is cut: its length is the batch's. Every device gets all of other inputs.
  template <Operand X>
  bool cuts(const X& x) const {
    return detail::has_samples(x, dim) && value_of(x).size(detail::batch_axis_of<X>(dim)) == batch &&
           (whole.empty() || std::find(whole.begin(), whole.end(), &x) == whole.end());
  }
};

/// The random context of share `i`: the random numbers of its samples. `whole`: the context of the whole batch. Both
/// arguments must outlive the result. `devices`: how many share the batch.
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
