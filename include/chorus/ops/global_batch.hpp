#pragma once
/// Means and sums over the global batch, which is split over devices or ranks.

#include <chorus/autograd/loss_terms.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/ops/mean_of_parts.hpp>
#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {
/// What a value that all members computed together gets as its gradient: the sum of all members' gradients `dy`, each
/// weighted by its member, for this member's weight, by which the policy multiplies later. All members call it.
template <Real T, int Rank, Device D>
Tensor<T, Rank, D> sum_of_gradients(BatchGroup& group, const Tensor<T, Rank, D>& dy, double factor = 1) {
  const double weight = group.weight();
  const auto here = contiguous(to_device(dy, Cpu{}));
  std::vector<double> numbers(static_cast<std::size_t>(here.numel()));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = weight == 0 ? 0 : weight * static_cast<double>(here.data()[i]);
  group.sum(numbers);
  auto sums = Tensor<T, Rank, Cpu>::empty(here.shape());
  for (std::size_t i = 0; i < numbers.size(); ++i)
    sums.data()[i] = static_cast<T>(weight == 0 ? 0 : numbers[i] * factor / weight);
  return to_device(sums, dy.device());
}

/// Turns `value`, proportional to a mean or sum over this member's part, into that over the global batch.
template <class T, int Rank, class D>
Variable<T, Rank, D> sum_over_members(const Variable<T, Rank, D>& value, const LossTerms::Term& term,
                                      const std::shared_ptr<BatchGroup>& group) {
  check<UsageError>(!group->recorded(), "of_global_batch: GraphVariables under DataParallel are not supported");
  Node& origin = *term.origin;
  const bool is_mean = origin.is_mean();
  const double own = is_mean ? origin.mean_over() : 1;
  const auto near = contiguous(to_device(value.value(), Cpu{}));
  std::vector<double> numbers;
  for (Index i = 0; i < near.numel(); ++i) numbers.push_back(own == 0 ? 0 : own * static_cast<double>(near.data()[i]));
  numbers.push_back(own);
  group->sum(numbers);
  const double over = !is_mean || numbers.back() == 0 ? 1 : numbers.back();
  auto whole = Tensor<T, Rank, Cpu>::empty(value.shape());
  for (Index i = 0; i < whole.numel(); ++i)
    whole.data()[i] = static_cast<T>(numbers[static_cast<std::size_t>(i)] / over);
  return record(
      global_batch_name, to_device(whole, value.device()),
      [group, share = own / over](const auto& dy, auto dx) { dx->add(sum_of_gradients(*group, dy, share)); },
      value);
}
}  // namespace detail

/// For nonlinear functions of means and sums: turns `x`, a mean or sum over this device's or rank's part of the batch
/// (or a multiple of one), into that over the global batch: `ch::sqrt(ch::of_global_batch(ch::mean(ch::square(d))))`.
/// Its gradient flows to all parts. For use in a model's forward pass; outside of it see below. Returns `x` if the
/// batch is not split or nothing is recorded. Communicates in forward and backward. Throws UsageError if `x` is no mean
/// or sum, and if parts of the batch run one after the other (in a model under Pipeline or SameBits).
template <AnyVariable X>
auto of_global_batch(const X& x) {
  const auto& value = detail::variable_of(x);
  const auto group = batch_group();
  if (!group || !value.node() || !grad_enabled()) return value;
  detail::LossTerms terms;
  terms.find(*value.node());
  terms.check_linear("of_global_batch");
  if (terms.all().empty()) return value;
  const auto& term = terms.all().front();
  check<UsageError>(terms.is_one_term(*value.node()),
                    "of_global_batch: expected one mean or sum over the batch, times a number, got a sum of several, "
                    "or of one and a number: call of_global_batch for each");
  if (std::string_view(term.origin->operation()) == detail::mean_of_parts_name) return value;
  return detail::sum_over_members(value, term, group);
}
template <AnyTensor X>
X of_global_batch(const X& x) {
  return x;
}
/// The same outside of the model, for values computed from a net's outputs. The code is the same under every policy.
/// All ranks must call it.
template <class Net, Operand X>
auto of_global_batch(const Net& net, const X& x) {
  const BatchGroupScope scope(net.global_batch());
  return of_global_batch(x);
}

}  // namespace chorus
