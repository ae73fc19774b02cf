#pragma once
/// A TensorGroup over a communicator.

#include <chorus/comm/communicator.hpp>
#include <chorus/core/narrow_float.hpp>
#include <chorus/core/tensor_group.hpp>
#include <cstddef>
#include <span>

namespace chorus::detail {

/// `Base`: TensorGroup, or an interface derived from it.
template <class Communicator, class Base = TensorGroup>
class CommunicatorGroup : public Base {
 public:
  CommunicatorGroup(Communicator& communicator, bool splits_sequences)
      : communicator_(&communicator),
        rank_(communicator.rank()),
        size_(communicator.size()),
        splits_sequences_(splits_sequences) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool splits_sequences() const override { return splits_sequences_; }
  /// Nodes of the tape may outlive the policy.
  virtual void end() { communicator_ = nullptr; }

 protected:
  void all_reduce(void* data, std::size_t count, DType type, bool largest) override {
    of_type(type, [&]<class T>(T) {
      living().all_reduce(std::span(static_cast<T*>(data), count),
                          largest ? comm::ReduceOp::max : comm::ReduceOp::sum, {.traffic = trace::Traffic::outputs});
    });
  }
  void all_gather(const void* mine, void* all, std::size_t count, DType type) override {
    of_type(type, [&]<class T>(T) {
      living().all_gather(std::span(static_cast<const T*>(mine), count),
                          std::span(static_cast<T*>(all), count * static_cast<std::size_t>(size_)),
                          {.traffic = trace::Traffic::outputs});
    });
  }
  void reduce_scatter(const void* all, void* mine, std::size_t count, DType type) override {
    of_type(type, [&]<class T>(T) {
      living().reduce_scatter(std::span(static_cast<const T*>(all), count * static_cast<std::size_t>(size_)),
                              std::span(static_cast<T*>(mine), count), comm::ReduceOp::sum,
                              {.traffic = trace::Traffic::outputs});
    });
  }

  template <class F>
  static void of_type(DType type, const F& f) {
    switch (type) {
      case DType::f32: return f(float{});
      case DType::f64: return f(double{});
      case DType::bfloat16: return f(bf16{});
      default: return f(half{});
    }
  }
  Communicator& living() const {
    check<UsageError>(communicator_ != nullptr, "TensorParallel: the policy that ran the forward pass was destroyed");
    return *communicator_;
  }

 private:
  Communicator* communicator_;
  int rank_, size_;
  bool splits_sequences_;
};

}  // namespace chorus::detail
