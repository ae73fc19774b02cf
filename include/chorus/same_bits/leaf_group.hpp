#pragma once
/// The ranks that share layers and add up in the order of the tree.

#include <chorus/kernels/copy.hpp>
#include <chorus/parallel/tensor/group.hpp>
#include <chorus/same_bits/leaves.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace chorus::same_bits {

/// For layers that multiply in leaves: each rank has one node of the tree, and sums over ranks are its upper part.
template <class Communicator>
class LeafGroup final : public detail::CommunicatorGroup<Communicator> {
  using Base = detail::CommunicatorGroup<Communicator>;

 public:
  LeafGroup(Communicator& communicator, std::size_t shares)
      : Base(communicator, /*splits_sequences=*/false), sums_(shares, communicator.size()) {}
  const detail::LeafProducts* products() const override { return &sums_; }

 protected:
  void all_reduce(void* data, std::size_t count, DType type, bool largest) override {
    // A sum of two has one order.
    if (largest || this->size() == 2) return Base::all_reduce(data, count, type, largest);
    const auto ranks = static_cast<std::size_t>(this->size()), bytes = count * size_of(type);
    const Storage<Cpu> all(Cpu{}, ranks * bytes);
    this->all_gather(data, all.data(), count, type);
    Base::of_type(type, [&]<class T>(T) {
      const auto add = [&](T* left, const T* right) {
        kernels::axpy(Cpu{}, static_cast<Index>(count), T{1}, right, left);
      };
      TreeSum<T*> sum;
      for (std::size_t rank = 0; rank < ranks; ++rank)
        sum.push({rank, rank + 1}, static_cast<T*>(all.data()) + rank * count, add);
      copy_bytes(Cpu{}, data, Cpu{}, *sum.finish(add), bytes);
    });
  }
  void reduce_scatter(const void*, void*, std::size_t, DType) override {
    fail<UsageError>("TensorParallel: SameBits does not split sums over ranks along an axis: expected layers with "
                     "whole sums, and NoSequenceSplit");
  }

 private:
  LeafSums sums_;
};

/// The group that a model sees. Sums of other functions than the layers' would be rounded in an order that depends on
/// the number of ranks.
template <class Communicator>
class SharedInLeaves final : public detail::CommunicatorGroup<Communicator> {
  using Base = detail::CommunicatorGroup<Communicator>;

 public:
  SharedInLeaves(Communicator& communicator, std::size_t shares)
      : Base(communicator, /*splits_sequences=*/false),
        leaves_(std::make_shared<LeafGroup<Communicator>>(communicator, shares)) {}
  std::shared_ptr<TensorGroup> in_leaves() override { return leaves_; }
  void end() override {
    leaves_->end();
    Base::end();
  }

 protected:
  void all_reduce(void* data, std::size_t count, DType type, bool largest) override {
    if (!largest) refuse();
    Base::all_reduce(data, count, type, largest);
  }
  void reduce_scatter(const void*, void*, std::size_t, DType) override { refuse(); }

 private:
  [[noreturn, gnu::cold]] static void refuse() {
    fail<UsageError>(
        "TensorParallel: SameBits knows the order of sums over ranks in ColumnParallelLinear, RowParallelLinear, "
        "VocabularyParallelEmbedding, MultiheadAttention and layers made of them, not in LoRA, copy or all_reduce: "
        "expected a model of these layers");
  }

  std::shared_ptr<LeafGroup<Communicator>> leaves_;
};

}  // namespace chorus::same_bits
