#pragma once
/// A communication hook's state per bucket.

#include <chorus/kernels/copy.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace chorus::detail {

/// Holds state whose types depend on the model's scalar and device types, which a hook doesn't know. A bucket's index
/// has one type of state. A copy of a hook is for another net with other buckets, so its state is empty.
class BucketStates {
 public:
  BucketStates() = default;
  BucketStates(const BucketStates&) {}
  BucketStates(BucketStates&&) = default;
  BucketStates& operator=(const BucketStates& other) {
    if (this != &other) clear();
    return *this;
  }
  BucketStates& operator=(BucketStates&&) = default;

  template <class State>
  State& of(std::size_t index) {
    if (states_.size() <= index) states_.resize(index + 1);
    if (!states_[index]) states_[index] = std::make_shared<State>();
    return *static_cast<State*>(states_[index].get());
  }
  void clear() { states_.clear(); }

 private:
  std::vector<std::shared_ptr<void>> states_;
};

/// Resizes `tensor` to `count` numbers; a new one is zero.
template <Scalar T, Device D>
void grow(Tensor<T, 1, D>& tensor, std::size_t count, D device) {
  if (tensor.defined() && tensor.numel() == static_cast<Index>(count)) return;
  const MemoryScope scope(trace::Memory::buckets);
  tensor = Tensor<T, 1, D>::zeros({static_cast<Index>(count)}, device);
}

/// This rank's weight relative to an even share. Residuals are kept in units of an even share, since the weight may
/// differ in the next step; on a rank without samples they are kept.
template <Scalar T>
T even_shares(double weight, int ranks) {
  return static_cast<T>(weight * ranks);
}

/// Adds the residual to the gradients and clears it. A single rank sends nothing, but may have a residual from a
/// checkpoint of several ranks.
template <Scalar T, Device D>
void add_rest(Tensor<T, 1, D>& rest, std::span<T> gradients, D device) {
  if (!rest.defined()) return;
  kernels::axpy(device, rest.numel(), T{1}, rest.data(), gradients.data());
  zero_bytes(device, rest.data(), gradients.size_bytes());
}

}  // namespace chorus::detail
