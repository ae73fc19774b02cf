#pragma once
/// Joins a model's outputs for each canonical share to the output for one batch.

#include <chorus/parallel/dp/gather.hpp>
#include <chorus/same_bits/batch_cut.hpp>
#include <chorus/same_bits/share_losses.hpp>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// Tensors are joined along the samples; a loss becomes the whole batch's. Other values must be equal for all shares.
template <class D>
struct JoinShares : dp::JoinOutputs<D> {
  JoinShares(const dp::Split& how, D to, const Ref<dp::BackwardNode>& on_tape, const BatchCut& batch_cut)
      : dp::JoinOutputs<D>(how, to, on_tape), cut(batch_cut) {}
  const BatchCut& cut;

  template <class X>
  static constexpr bool adds_axis = false;

  template <class X>
  auto operator()(const std::vector<const X*>& outputs) const {
    if constexpr (Operand<X>) {
      if constexpr (tensor_of<X>::rank > 0) {
        return dp::JoinOutputs<D>::operator()(outputs);
      } else {
        return join_scalars(outputs);
      }
    } else {
      if constexpr (requires(const X& x) { x == x; })
        for (const X* output : outputs)
          check<UsageError>(*output == *outputs[0],
                            "canonical shares: an output that is not a tensor differs between shares");
      return *outputs[0];
    }
  }

 private:
  template <class X>
  X join_scalars(const std::vector<const X*>& outputs) const {
    if constexpr (detail::is_variable<X>) {
      const auto losses = dp::JoinOutputs<D>::operator()(outputs);
      if (losses.node()) return mean_of_share_losses(losses, cut);
    }
    check<UsageError>(outputs.size() == 1, scalar_of_share);
    return *outputs[0];
  }
};

}  // namespace chorus::same_bits
