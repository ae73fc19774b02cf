#pragma once
/// The ranks of TensorParallel with SameBits, for decisions that depend on all parameters.

#include <chorus/comm/communicator.hpp>
#include <chorus/core/tensor_group.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/optim/clip_grad_norm.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// Computes the norm of gradients as one device does, from whole gradients. It is no PairedRanks, so that optimizers
/// which add up over ranks by themselves refuse it.
template <class Communicator>
class LeafRanks final : public ModelRanks, public optim::detail::NormAsWhole<Cpu> {
 public:
  LeafRanks(Communicator& ranks, std::weak_ptr<void> net) : ranks_(ranks), net_(std::move(net)) {}
  void sum(std::span<double>) override {
    fail<UsageError>(
        "clip_grad_norm: SameBits under TensorParallel adds up the squares of one net: expected its parameters, got "
        "those of several nets");
  }
  void max(std::span<double> numbers) override { living().all_reduce(numbers, comm::ReduceOp::max, {}); }

  double grad_norm(const std::vector<nn::NamedParameter<Cpu>>& parameters) override {
    double squares = 0;
    for_each_whole(parameters, [&](const auto* grad, Index count) {
      squares += kernels::square_sum(Cpu{}, count, grad);
    });
    if (!std::isinf(squares)) return std::sqrt(squares);
    double norm = 0;  // squares of doubles may overflow
    for_each_whole(parameters, [&](const auto* grad, Index count) {
      for (Index i = 0; i < count; ++i) norm = std::hypot(norm, static_cast<double>(grad[i]));
    });
    return norm;
  }

 private:
  Communicator& living() const {
    check<UsageError>(!net_.expired(), "parameter: its net was destroyed, which split it over the ranks");
    return ranks_;
  }
  // Calls `f(gradient, count)` with each whole gradient, in the order of parameters.
  template <class F>
  void for_each_whole(const std::vector<nn::NamedParameter<Cpu>>& parameters, const F& f) {
    optim::detail::for_each_grad(parameters, [&]<class T>(const auto& parameter, const T* grad) {
      const auto& part = parameter.part();
      if (part == nullptr) return f(grad, parameter.count());
      const auto ranks = static_cast<std::size_t>(living().size());
      const auto layout = part->layout();
      const auto of_rank = [&](std::size_t rank) {
        return axis_part(layout.width, part->split.unit, static_cast<int>(ranks), static_cast<int>(rank));
      };
      const auto most = static_cast<std::size_t>(layout.numbers(of_rank(0)));
      std::vector<T> mine(most), all(most * ranks), whole(static_cast<std::size_t>(numel(part->extents)));
      std::copy_n(grad, parameter.count(), mine.begin());
      living().all_gather(std::span<const T>(mine), std::span<T>(all), {.traffic = trace::Traffic::gradients});
      for (std::size_t rank = 0; rank < ranks; ++rank)
        layout.for_runs(of_rank(rank), [&](Index in_whole, Index in_part, Index count) {
          std::copy_n(all.data() + static_cast<Index>(rank * most) + in_part, count, whole.data() + in_whole);
        });
      f(static_cast<const T*>(whole.data()), static_cast<Index>(whole.size()));
    });
  }

  Communicator& ranks_;
  std::weak_ptr<void> net_;
};

}  // namespace chorus::same_bits
