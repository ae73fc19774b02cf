#pragma once
/// Batch normalisation with statistics over several devices or ranks, as recorded operations.

#include <algorithm>
#include <any>
#include <chorus/core/batch_group.hpp>
#include <chorus/ops/device_copy.hpp>
#include <chorus/ops/higher_order/normalization.hpp>
#include <chorus/ops/sync_batch_norm.hpp>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {

// The sum of own * weight over members; `weight` is this member's.
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

template <class T, class D>
GraphVariable<T, 1, D> group_sum(const GraphVariable<T, 1, D>& own, const std::shared_ptr<BatchGroup>& group);

/// The node of `group_sum`. If all members run backward at the same time, each to its own part, the gradient is the sum
/// over members' gradients in member order. If one thread runs backward through the graph of all devices, each node
/// leads to all parts.
template <class T, class D>
class GroupSumNode final : public GradNode<T, 1, D>, public GraphNode {
 public:
  using Part = GraphVariable<T, 1, D>;

  /// `parts`: the parts of all members, if they share one graph.
  GroupSumNode(const Part& own, std::vector<Part> parts, const std::shared_ptr<BatchGroup>& group)
      : GradNode<T, 1, D>("group_sum", own.shape(), own.device()),
        own_(own),
        parts_(std::move(parts)),
        group_(group),
        place_(group) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check_kept();
    auto dy = this->take_grad();
    if (together()) dy = sum_over_members(*group_, dy, group_->weight());
    for_each_part([&](const Part& part) {
      if (auto* node = unless_skipped(part.node().get()))
        node->add(on_device(dy, part.device(), trace::Traffic::control));
    });
    if (keep) return;
    own_ = {};
    parts_.clear();
  }
  void graph_backward(GraphGradients& gradients) override {
    check_kept();
    auto dy = gradients.of(*this);
    if (!dy.value().defined()) return;
    if (together()) dy = group_sum(dy, group_);
    for_each_part([&](const Part& part) {
      if (gradients.wants(part.node().get()))
        gradients.add(*part.node(), copy_recorded(dy, part.device(), trace::Traffic::control));
    });
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    for_each_part([&](const Part& part) {
      if (part.requires_grad()) visit(*part.node(), context);
    });
  }

 private:
  bool together() const { return parts_.empty() || place_.is_here(); }
  template <class F>
  void for_each_part(const F& f) const {
    if (together())
      f(own_);
    else
      for (const Part& part : parts_) f(part);
  }
  void check_kept() const {
    check<UsageError>(own_.value().defined(),
                      "backward: the graph behind 'group_sum' was freed by an earlier backward; ",
                      "pass retain_graph = true to that one");
  }

  Part own_;
  std::vector<Part> parts_;
  std::shared_ptr<BatchGroup> group_;
  PlaceInPass place_;
};

/// A sequence number for each member's next operation. The numbers grow with the member index, whichever thread is
/// faster, so that a backward run through all members adds in a fixed order.
inline std::uint64_t sequence_in_order(BatchGroup& group) {
  std::vector<std::uint64_t> numbers;
  for (const auto& given : group.exchange(Node::next_sequence()))
    numbers.push_back(given_by_member<std::uint64_t>(given));
  std::sort(numbers.begin(), numbers.end());
  return numbers[group.member()];
}

/// The sum over all members of `group`, for each member.
template <class T, class D>
GraphVariable<T, 1, D> group_sum(const GraphVariable<T, 1, D>& own, const std::shared_ptr<BatchGroup>& group) {
  std::vector<GraphVariable<T, 1, D>> parts;
  Tensor<T, 1, D> total;
  const auto all = group->recorded() ? group->exchange(own) : std::vector<std::any>();
  for (const auto& given : all) {
    parts.push_back(given_by_member<GraphVariable<T, 1, D>>(given));
    check<UsageError>(parts.back().shape() == own.shape(), different_layers);
    const auto near = on_device(parts.back().value(), own.device(), trace::Traffic::control);
    total = total.defined() ? total + near : near;
  }
  const auto sequence = all.empty() ? 0 : sequence_in_order(*group);
  if (all.empty()) total = sum_over_members(*group, own.value(), 1);
  if (!own.requires_grad() || !grad_enabled()) return GraphVariable(std::move(total));
  if (detects_anomalies()) [[unlikely]]
    check_finite("group_sum", total);
  Ref<GradNode<T, 1, D>> node(new GroupSumNode<T, D>(own, std::move(parts), group));
  if (!all.empty()) node->set_sequence(sequence);
  return GraphVariable(std::move(total), std::move(node));
}

}  // namespace detail

/// `sync_batch_norm` for GraphVariables; `count` is the number of values per channel in the global batch.
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

}  // namespace chorus
