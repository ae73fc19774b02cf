#pragma once
/// Batch normalisation with statistics over several devices or ranks.

#include <any>
#include <array>
#include <chorus/autograd/saved.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/device_copy.hpp>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {
/// Sums per-channel sums, and further numbers after them, over the group. The per-channel sums return to the device.
template <class D>
void sum_over_group(BatchGroup& group, const Tensor<double, 1, D>& sums, std::vector<double>& numbers) {
  const auto count = static_cast<std::size_t>(sums.numel());
  copy_bytes(Cpu{}, numbers.data(), sums.device(), sums.data(), count * sizeof(double));
  group.sum(numbers);
  copy_bytes(sums.device(), sums.data(), Cpu{}, numbers.data(), count * sizeof(double));
}

/// The value that a member passed to `exchange`.
template <class T>
const T& given_by_member(const std::any& given) {
  const auto* value = std::any_cast<T>(&given);
  check<UsageError>(value != nullptr, different_layers);
  return *value;
}

/// If the pass is one recorded graph: the tape's node for the other members' inputs, which affect a member's output
/// through the statistics. Its gradient is that w.r.t. the statistics: the sums of `batch_norm_backward_sums`.
template <class T, int Rank, class D>
class OtherShares final : public GradNode<double, 1, D> {
 public:
  /// The share of one member.
  struct Share {
    Variable<T, Rank, D> x;
    Tensor<T, 1, D> weight, mean, invstd;
  };
  OtherShares(std::vector<Share> shares, double count, const PlaceInPass& place, D device)
      : GradNode<double, 1, D>("sync_batch_norm", {2 * shares.front().mean.numel()}, device),
        shares_(std::move(shares)),
        count_(count),
        place_(place) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    const auto grad = this->take_grad();
    for (const auto& [x, weight, mean, invstd] : shares_) {
      auto* node = unless_skipped(x.node().get());
      if (node == nullptr) continue;
      const auto sums = on_device(grad, x.device(), trace::Traffic::control);
      const auto zeros = Tensor<T, Rank, D>::zeros(x.shape(), x.device());
      const auto target = node->target();
      kernels::batch_norm_backward_input(x.device(), channel_view(x.shape()), x.value().data(), zeros.data(),
                                         weight.data(), mean.data(), invstd.data(), count_, sums.data(), target.data(),
                                         target.accumulate);
    }
    if (!keep) shares_.clear();
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    if (place_.is_here()) return;  // each member runs its own backward
    for (const Share& share : shares_)
      if (share.x.requires_grad()) visit(*share.x.node(), context);
  }

 private:
  std::vector<Share> shares_;
  double count_;
  PlaceInPass place_;
};

/// That node, as an input of `record`; empty if the pass is not one recorded graph, or if no gradient is wanted.
template <class T, int Rank, class D>
Variable<double, 1, D> other_shares(BatchGroup& group, const typename OtherShares<T, Rank, D>::Share& own, double count,
                                    const PlaceInPass& place) {
  using Share = typename OtherShares<T, Rank, D>::Share;
  if (!grad_enabled() || !group.recorded()) return {};
  const auto given = group.exchange(own);
  std::vector<Share> others;
  for (std::size_t i = 0; i < given.size(); ++i)
    if (i != group.member()) others.push_back(given_by_member<Share>(given[i]));
  if (!own.x.requires_grad()) return {};
  const auto device = own.x.device();
  Ref<GradNode<double, 1, D>> node(new OtherShares<T, Rank, D>(std::move(others), count, place, device));
  return {{}, std::move(node)};
}
}  // namespace detail

/// `batch_norm` in training over the shares of all members of `group`; a share may be empty. Forward sums 2 channels +
/// 1 numbers over the group, backward 2 channels. Gradients are those of the sum over members of weight * loss, which
/// the policy's step uses. `momentum_of(count)`, if given, replaces the momentum; `count` is the number of values per
/// channel in the global batch. For GraphVariables see <chorus/ops/higher_order/sync_batch_norm.hpp>. Throws ShapeError
/// on all members if a channel has one value in the global batch.
template <Operand X, Operand W, Operand B, class T, class D>
auto sync_batch_norm(const X& x, const W& weight, const B& bias, const Tensor<T, 1, D>& running_mean,
                     const Tensor<T, 1, D>& running_var, const std::shared_ptr<BatchGroup>& group,
                     const BatchNormOptions& options = {}, const std::function<double(double)>& momentum_of = {}) {
  if constexpr (NarrowOperand<X>) {
    return to<typename tensor_of<X>::value_type>(sync_batch_norm(
        to<float>(x), to<float>(weight), to<float>(bias), running_mean, running_var, group, options, momentum_of));
  } else {
    const auto input = contiguous(value_of(x));
    const auto w = contiguous(value_of(weight));
    const auto b = contiguous(value_of(bias));
    const auto view = detail::channel_view(input.shape());
    for (const auto& per_channel : {w, b, running_mean, running_var})
      check<ShapeError>(!per_channel.defined() || per_channel.numel() == view.channels,
                        "sync_batch_norm: an input of shape ", input.shape(), " does not fit ", per_channel.numel(),
                        " channels");
    const auto device = input.device();
    const auto sums = Tensor<double, 1, D>::empty({2 * view.channels}, device);
    std::vector<double> numbers(static_cast<std::size_t>(2 * view.channels + 1));
    kernels::batch_norm_sums(device, view, input.data(), sums.data());
    numbers.back() = static_cast<double>(view.per_channel());
    detail::sum_over_group(*group, sums, numbers);
    const double count = numbers.back();
    check<ShapeError>(count != 1, "sync_batch_norm: expected several values per channel, got one in the batches of ",
                      "all ranks, here of shape ", input.shape());
    const auto mean = Tensor<T, 1, D>::empty({view.channels}, device);
    const auto invstd = Tensor<T, 1, D>::empty({view.channels}, device);
    const double momentum = momentum_of ? momentum_of(count) : options.momentum;
    kernels::batch_norm_statistics(device, view.channels, count, sums.data(), momentum, options.eps,
                                   running_mean.data(), running_var.data(), mean.data(), invstd.data());
    detail::note_write(running_mean);
    detail::note_write(running_var);
    if constexpr (detail::is_graph_variable<X> || detail::is_graph_variable<W> || detail::is_graph_variable<B>) {
      return sync_batch_norm_graph(x, weight, bias, count, group, options.eps);
    } else {
      auto out = tensor_of<X>::empty(input.shape(), device);
      kernels::batch_norm_normalise(device, view, input.data(), w.data(), b.data(), mean.data(), invstd.data(),
                                    out.data());
      const PlaceInPass place(group);
      const auto others = [&] {
        if constexpr (AnyTensor<X> && AnyTensor<W> && AnyTensor<B>)
          return Tensor<double, 1, D>();
        else
          return detail::other_shares<T, tensor_of<X>::rank, D>(*group, {{input, node_of(x)}, w, mean, invstd}, count,
                                                                place);
      }();
      return record(
          "sync_batch_norm", std::move(out),
          [input = detail::Saved(input), w = detail::Saved(w), mean, invstd, view, group, count, place,
           recorded = group->recorded()](const auto& dy, auto dx, auto dw, auto db, auto dothers) {
            const T* const inputs = input.read("sync_batch_norm").data();
            const auto here = dy.device();
            const auto own = Tensor<double, 1, D>::empty({2 * view.channels}, here);
            kernels::batch_norm_backward_sums(here, view, inputs, dy.data(), mean.data(), own.data());
            const auto affine = [&](T* dweight, bool add_weight, T* dbias, bool add_bias) {
              kernels::batch_norm_backward_affine(here, view.channels, own.data(), invstd.data(), dweight, dbias,
                                                  add_weight, add_bias);
            };
            if (dw) {
              const auto target = dw->target();
              affine(target.data(), target.accumulate, nullptr, false);
            }
            if (db) {
              const auto target = db->target();
              affine(nullptr, false, target.data(), target.accumulate);
            }
            const auto input_gradient = [&](const auto& target) {
              kernels::batch_norm_backward_input(here, view, inputs, dy.data(), w.read("sync_batch_norm").data(),
                                                 mean.data(), invstd.data(), count, own.data(), target.data(),
                                                 target.accumulate);
            };
            if (recorded && !place.is_here()) {  // one thread runs backward for all members
              if (dx) input_gradient(dx->target());
              if (dothers) dothers->add(own);
              return;
            }
            // All members take part, even if this one's input wants no gradient. This dx is multiplied by its weight
            // later, so the sums of other members, with other weights, are scaled accordingly.
            std::vector<double> all(static_cast<std::size_t>(2 * view.channels));
            const double own_weight = group->weight();
            copy_bytes(Cpu{}, all.data(), here, own.data(), own.bytes());
            for (double& number : all) number *= own_weight;
            group->sum(all);
            if (!dx) return;
            const auto target = dx->target();
            if (own_weight == 0) {
              if (!target.accumulate) zero_bytes(here, target.data(), target.grad.bytes());
              return;
            }
            for (double& number : all) number /= own_weight;
            copy_bytes(here, own.data(), Cpu{}, all.data(), own.bytes());
            input_gradient(target);
          },
          x, weight, bias, others);
    }
  }
}

}  // namespace chorus
