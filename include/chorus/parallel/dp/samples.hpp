#pragma once
/// The samples of a batch: how many there are, and how they are shared out.

#include <chorus/autograd/batch_axis.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/share_tree.hpp>
#include <chorus/parallel/dp/nested.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace chorus {

namespace detail {

/// Whether a Tensor or Variable has the axis along which it would be cut. One without goes to every device whole.
template <Operand X>
bool has_samples(const X& x, int dim) {
  return batch_axis_of<X>(dim) < static_cast<int>(value_of(x).shape().size());
}

/// The number of samples that all inputs with samples have; 1 where there are none. Throws ShapeError where they
/// differ.
template <class... Inputs>
Index batch_size(int dim, const Inputs&... inputs) {
  std::optional<Index> batch;
  [[maybe_unused]] const auto look = [&]<class X>(const X& x) {
    if (!has_samples(x, dim)) return;
    const int axis = batch_axis_of<X>(dim);
    const Index size = value_of(x).size(axis);
    check<ShapeError>(!batch || batch == size, "inputs have ", batch.value_or(size), " and ", size,
                      " samples along axis ", axis,
                      ": for an input that has them along another axis let it be batch_axis<1>(input)");
    batch = size;
  };
  (for_each_tensor(inputs, look), ...);
  return batch.value_or(1);
}

/// How many samples a rank's inputs have: the size of the first of them that has the axis. Others, of any size, belong
/// to the samples or to the batch as a whole: a rank's model takes all as they are.
template <class... Inputs>
Index samples_of(int dim, const Inputs&... inputs) {
  std::optional<Index> samples;
  [[maybe_unused]] const auto look = [&]<class X>(const X& x) {
    if (!samples && has_samples(x, dim)) samples = value_of(x).size(batch_axis_of<X>(dim));
  };
  (for_each_tensor(inputs, look), ...);
  return samples.value_or(1);
}

}  // namespace detail

namespace dp {

/// A batch that is split along `dim` into one share for each of the first `devices` devices.
struct Split {
  Index batch = 1;
  std::size_t devices = 1;
  int dim = 0;

  /// Of share `i`: its first sample, and how many samples it has.
  Index begin(std::size_t i) const { return share_begin(batch, devices, i); }
  Index size(std::size_t i) const { return begin(i + 1) - begin(i); }
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
