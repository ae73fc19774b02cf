#pragma once
/// Batch normalisation with the statistics of several devices or ranks, by operations that are recorded.

#include <algorithm>
#include <any>
#include <chorus/core/batch_group.hpp>
#include <chorus/ops/device_copy.hpp>
#include <chorus/ops/higher_order/normalization.hpp>
#include <chorus/ops/sync_batch_norm.hpp>
#include <memory>
#include <tuple>
#include <vector>

namespace chorus::inline CHORUS_ABI {

namespace operations {
struct GroupSum {
  static constexpr const char* name = "group_sum";
  std::shared_ptr<BatchGroup> group;
};
}  // namespace operations

namespace detail {

// The sum over members of weight * own, by this member's weight.
template <class T, class D>
Tensor<T, 1, D> sum_over_members(BatchGroup& group, const Tensor<T, 1, D>& own, double weight) {
  const auto values = own.to_vector();
  std::vector<double> numbers(values.begin(), values.end());
  for (double& number : numbers) number *= weight;
  group.sum(numbers);
  std::vector<T> out;
  for (const double number : numbers) out.push_back(static_cast<T>(weight == 0 ? 0 : number / weight));
  return Tensor<T, 1, D>::from(out, own.shape(), own.device());
}

/// x of all members of `group`, added up, for each of them. Where they make one graph, by copies between devices; else
/// each member goes back through its own part at the same time as the others, who all have the same operations: the
/// gradient by x is then the members' gradients, added up in turn.
template <class T, class D>
GraphVariable<T, 1, D> group_sum(const GraphVariable<T, 1, D>& x, const std::shared_ptr<BatchGroup>& group) {
  const auto parts = group->exchange(x);
  if (parts.empty())
    return record(
        operations::GroupSum{group}, sum_over_members(*group, x.value(), 1),
        [group](const auto& dy, auto dx) {
          const auto total = sum_over_members(*group, dy, group->weight());
          if (dx) dx->add(total);
        },
        x);
  GraphVariable<T, 1, D> total;
  for (const auto& part : parts) {
    const auto* own = std::any_cast<GraphVariable<T, 1, D>>(&part);
    check<UsageError>(own != nullptr && own->shape() == x.shape(),
                      "SyncBatchNorm: the devices' copies of the model have come to different layers");
    const auto near = copy_recorded(*own, x.device(), trace::Traffic::control);
    total = total.value().defined() ? total + near : near;
  }
  return total;
}

}  // namespace detail

template <class Dy, class Y, class X>
auto derivatives(const operations::GroupSum& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return detail::group_sum(dy, operation.group); }};
}

/// What `sync_batch_norm` makes of GraphVariables, `count` being the numbers a channel in the whole batch.
template <Operand X, Operand W, Operand B>
auto sync_batch_norm_graph(const X& x, const W& weight, const B& bias, double count,
                           const std::shared_ptr<BatchGroup>& group, double eps) {
  const auto column = [channels = x.size(1)](const auto& per_channel) {
    return reshape(per_channel, Shape<2>{channels, 1});
  };
  const auto mean = [&](const auto& rows) {
    return column(detail::group_sum(sum(rows, 1), group) / std::max(count, 1.0));
  };
  const auto rows = detail::channels_first(detail::as_graph(x));
  const auto centred = rows - mean(rows);
  auto y = centred * rsqrt(mean(square(centred)) + eps);
  if (value_of(weight).defined()) y = y * column(detail::as_graph(weight));
  if (value_of(bias).defined()) y = y + column(detail::as_graph(bias));
  return detail::batch_first(y, x.shape());
}

}  // namespace chorus::inline CHORUS_ABI
