#pragma once
/// The ranks that have other experts of a mixture of experts.

#include <chorus/core/tensor_group.hpp>
#include <cstddef>
#include <memory>
#include <span>

namespace chorus::nn {

/// A policy's collectives for experts that are split over ranks, on memory of the model's device. All members must make
/// the same calls in the same order. All calls throw CommError if a member is lost.
class ExpertGroup : public TensorGroup {
 public:
  /// in: `sends[r]` numbers for each member r -> out: `receives[r]` numbers from each: see comm::all_to_all_v.
  template <Real T>
  void all_to_all(std::span<const T> in, std::span<const std::size_t> sends, std::span<T> out,
                  std::span<const std::size_t> receives) {
    exchange(in.data(), sends, out.data(), receives, dtype<T>);
  }
  /// Sums over the ranks with the same experts, in place; all get the same bits.
  template <Real T>
  void sum_replicas(std::span<T> values) {
    if (has_replicas()) add_replicas(values.data(), values.size(), dtype<T>);
  }
  virtual bool has_replicas() const = 0;

 protected:
  virtual void exchange(const void* in, std::span<const std::size_t> sends, void* out,
                        std::span<const std::size_t> receives, DType type) = 0;
  virtual void add_replicas(void* values, std::size_t count, DType type) = 0;
};

/// Null: this process has all experts.
using ExpertGroupRef = std::shared_ptr<ExpertGroup>;

}  // namespace chorus::nn
