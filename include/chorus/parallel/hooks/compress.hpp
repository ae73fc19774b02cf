#pragma once
/// Gradients that are sent in 2 bytes per number.

#include <array>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/hooks/bucket_states.hpp>
#include <chorus/parallel/hooks/not_sent.hpp>
#include <optional>

namespace chorus {

/// An all-reduce of numbers of type `Wire`. A rank's gradients are scaled in their own type and rounded once; partial
/// sums are computed in float and rounded again when they are sent. The rounding error is added to the next step's
/// gradient (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014), unless `error_feedback` is off. Each
/// of n ranks sends 2 (n - 1) / n of the bucket's numbers, 2 bytes each.
template <Narrow Wire>
struct Compress {
  bool error_feedback = true;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    auto& state = states.of<State<T, D>>(bucket.index);
    if (communicator.size() == 1) {
      detail::add_rest(state.rest, bucket.gradients, bucket.device);
      return {};
    }
    const auto count = static_cast<Index>(bucket.gradients.size());
    T* grad = bucket.gradients.data();
    detail::grow(state.wire, bucket.gradients.size(), bucket.device);
    // Scale before rounding: a weight such as 1/3 in bf16 is off by 0.2 %.
    if (bucket.weight != 1) kernels::scale(bucket.device, count, static_cast<T>(bucket.weight), grad);
    const bool remembers = error_feedback && bucket.weight > 0;
    const auto ranks = static_cast<T>(communicator.size());  // the residual is in units of an even share
    if (error_feedback) detail::grow(state.rest, bucket.gradients.size(), bucket.device);
    if (remembers) kernels::axpy(bucket.device, count, T{1} / ranks, state.rest.data(), grad);
    kernels::convert(bucket.device, count, grad, state.wire.data());
    if (remembers) {
      kernels::convert(bucket.device, count, state.wire.data(), state.rest.data());
      kernels::pointwise_forward(bucket.device, detail::NotSent{}, count,
                                 std::array<const T*, 2>{grad, state.rest.data()}, state.rest.data());
      kernels::scale(bucket.device, count, ranks, state.rest.data());
    }
    return communicator.all_reduce_async(std::span<Wire>(state.wire.data(), bucket.gradients.size()),
                                         comm::ReduceOp::sum, {.traffic = trace::Traffic::gradients});
  }

  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int) {
    if (communicator.size() > 1)
      kernels::convert(bucket.device, static_cast<Index>(bucket.gradients.size()),
                       states.of<State<T, D>>(bucket.index).wire.data(), bucket.gradients.data());
    return {};
  }

  void reset() { states.clear(); }
  template <class T, Device D, class Visit>
  void remembered(const GradBucket<T, D>& bucket, bool make, const Visit& visit) {
    auto& rest = states.of<State<T, D>>(bucket.index).rest;
    if (make && error_feedback) detail::grow(rest, bucket.gradients.size(), bucket.device);
    if (!rest.defined()) return;
    for (const auto& part : bucket.parts) visit("rest", part, part.shape, bucket.device, rest.data() + part.begin);
  }

  template <class T, class D>
  struct State {
    Tensor<Wire, 1, D> wire;
    Tensor<T, 1, D> rest;  // the residual
  };
  detail::BucketStates states = {};
};

/// 3 decimal digits and the exponents of float: any gradient fits.
using Bf16Compress = Compress<bf16>;
/// 3.3 decimal digits. Scaled gradients or sums above 65504 become infinite; values below 6e-8 are left for later
/// steps.
using Fp16Compress = Compress<half>;

}  // namespace chorus
