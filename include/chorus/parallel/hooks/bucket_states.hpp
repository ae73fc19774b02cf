#pragma once
/// What a communication hook keeps of each bucket from step to step.

#include <chorus/kernels/copy.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace chorus::detail {

/// A hook doesn't know its model's scalar and device types; what it keeps does. A bucket's index has one type of state.
/// A copy is for another net, with other buckets: it has nothing yet.
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

/// `tensor` with `count` numbers; 0 where it is new.
template <Scalar T, Device D>
void grow(Tensor<T, 1, D>& tensor, std::size_t count, D device) {
  if (tensor.defined() && tensor.numel() == static_cast<Index>(count)) return;
  const MemoryScope scope(trace::Memory::buckets);
  tensor = Tensor<T, 1, D>::zeros({static_cast<Index>(count)}, device);
}

/// This rank's weight in units of that of an even share. What has not been sent waits in the unit of an even share,
/// since the next step may weigh this rank otherwise; without samples it waits on.
template <Scalar T>
T even_shares(double weight, int ranks) {
  return static_cast<T>(weight * ranks);
}

/// Adds to the gradients what has not been sent yet, of which nothing is left then: one rank alone sends nothing, and
/// may have it from a checkpoint of several.
template <Scalar T, Device D>
void add_rest(Tensor<T, 1, D>& rest, std::span<T> gradients, D device) {
  if (!rest.defined()) return;
  kernels::axpy(device, rest.numel(), T{1}, rest.data(), gradients.data());
  zero_bytes(device, rest.data(), gradients.size_bytes());
}

}  // namespace chorus::detail
