#pragma once
/// A model that computes its batch share by share, forward and backward.

#include <chorus/core/batch_group.hpp>
#include <chorus/parallel/dp/input_roles.hpp>
#include <chorus/parallel/dp/pass.hpp>
#include <chorus/parallel/dp/recorded.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <chorus/same_bits/batch_cut.hpp>
#include <chorus/same_bits/device_shares.hpp>
#include <chorus/same_bits/earlier_gradients.hpp>
#include <chorus/same_bits/join_shares.hpp>
#include <chorus/same_bits/leaves.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// The functions of a policy of several processes.
struct Processes {
  /// Sums over all processes.
  std::function<void(std::span<double>)> sum;
  /// The whole batch's number of samples, in backward.
  std::function<Index()> batch;
};

/// The cut of one of its passes.
class CutOfProcesses final : public BatchCut {
 public:
  CutOfProcesses(std::size_t shares, ShareRange run, Index samples, std::shared_ptr<const Processes> processes)
      : BatchCut(shares, run, samples), processes_(std::move(processes)) {}
  void sum_over_processes(std::span<double> values) const override {
    if (processes_->sum) processes_->sum(values);
  }

 private:
  std::shared_ptr<const Processes> processes_;  // without functions once the policy is gone
};

/// A policy's part for the shares of one process.
template <class Model>
class ModelShares final : private dp::BackwardRunner {
 public:
  using D = typename nn::detail::DeviceOfModel<Model>::type;

  /// Process `rank` of `ranks` has its run of the `shares`. References must outlive this.
  ModelShares(Model& model, const nn::FlatParameters<D>& flat, const std::vector<nn::NamedBuffer<D>>& buffers,
              std::weak_ptr<void> alive, std::size_t shares, int rank, int ranks, Processes processes = {})
      : counted_(flat.parameters()),
        model_(model),
        flat_(flat),
        alive_(std::move(alive)),
        shares_(shares),
        processes_(std::make_shared<Processes>(std::move(processes))),
        device_(model, flat, buffers, shares,
                shares_of_device(shares, static_cast<std::size_t>(ranks), static_cast<std::size_t>(rank))) {}
  ~ModelShares() { *processes_ = {}; }
  ModelShares(const ModelShares&) = delete;
  ModelShares& operator=(const ModelShares&) = delete;

  std::size_t shares() const { return shares_; }
  /// The sums of this process's gradients.
  const GradientTree<D>& tree() const { return device_.tree(); }
  /// `arrived(leaf)` is called in the last share's backward pass when a parameter's sums are complete, `ended()` when
  /// all are. Processes add up their sums there, before the parameters' hooks run.
  void on_gradients(std::function<void(Node&)> arrived) { arrived_ = std::move(arrived); }
  void when_backward_ends(std::function<void()> ended) { ended_ = std::move(ended); }

  /// Returns the model's output for this process's samples. `random`: from its first sample on.
  template <class... Inputs>
  auto forward(RandomContext& random, const Inputs&... inputs) {
    // Shares without samples come last; for an empty batch one share is computed, to get the output's shape.
    const dp::Split split =
        roles_.split("canonical shares", static_cast<Index>(device_.run().count()), random.dim, inputs...);
    (detail::for_each_tensor(inputs, [&](const auto& x) { check_gradient_is_whole(x, split); }), ...);
    const auto cut = std::make_shared<const CutOfProcesses>(shares_, device_.run(), split.batch, processes_);
    const D device = flat_.groups().front().values.device();
    std::vector<dp::GradientReturns> returns(split.devices);
    using Output = decltype(dp::call(model_, dp::scatter(split, 0, device, returns[0], inputs...)));
    std::vector<std::optional<Output>> outputs(split.devices);
    if (grad_enabled()) group_ = batch_group();
    const bool drew = device_.forward(random, split, 0, split.devices, [&](std::size_t i) {
      outputs[i].emplace(dp::call(model_, dp::scatter(split, i, device, returns[i], inputs...)));
    });
    random.drew = random.drew || drew;
    const Ref<dp::BackwardNode> on_tape(new SharesNode(*this, alive_, std::move(returns), cut));
    return detail::map_tensors(detail::pointers_to(outputs), JoinShares<D>(split, device, on_tape, *cut));
  }

 private:
  // Inputs without samples are the same on all processes, and no single one would have their gradient.
  template <Operand X>
  void check_gradient_is_whole(const X& x, const dp::Split& split) const {
    if constexpr (AnyVariable<X>)
      check<UsageError>(device_.run().count() == shares_ || !grad_enabled() || !x.requires_grad() || split.cuts(x),
                        "canonical shares: an input without samples, of shape ", value_of(x).shape(),
                        ", requires a gradient, which each process has in part: make it a parameter of the model");
  }
  void backward(const dp::Roots& roots, bool keep) override {
    earlier_.take(flat_);
    const auto batch = processes_->batch ? static_cast<std::size_t>(processes_->batch()) : roots.size();
    device_.backward(roots, keep, std::min(batch, shares_), group_, [this](Node& leaf) {
      if (arrived_) arrived_(leaf);
    });
    if (const auto ended = std::exchange(ended_, nullptr)) ended();
    earlier_.give_back();
    for (const auto& entry : flat_.entries())
      if (entry.parameter().grad_arrived()) entry.named.handle.shared()->set_reached();
  }
  void backward_to_wanted(const dp::Roots&, bool) override {
    fail<UsageError>("canonical shares: grad() does not support a policy's forward pass: expected backward()");
  }
  void for_each_parameter(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& entry : flat_.entries())
      if (entry.parameter().wants_grad()) visit(*entry.named.handle.shared(), context);
  }

  CutsBatches counted_;
  Model& model_;
  const nn::FlatParameters<D>& flat_;
  std::weak_ptr<void> alive_;
  std::size_t shares_;
  std::shared_ptr<Processes> processes_;
  DeviceShares<D> device_;
  dp::InputRoles roles_;
  std::shared_ptr<BatchGroup> group_;  // the group of processes that layers see
  EarlierGradients<D> earlier_;
  std::function<void(Node&)> arrived_;
  std::function<void()> ended_;
};

/// `model.forward(inputs...)` in shares. Without recording, a model that returns scalars computes all samples at once.
/// Throws UsageError for inputs that can't be cut.
template <class Model, class... Inputs>
auto forward(ModelShares<Model>& shares, Model& model, RandomContext& random, const Inputs&... inputs) {
  using Output = decltype(model.forward(inputs...));
  if (detail::holds_scalars<Output> && !grad_enabled()) {
    const LeafScope leaves(shares.shares());
    return model.forward(inputs...);
  }
  if constexpr (dp::is_recorded<Inputs...>) {
    fail<UsageError>("canonical shares: GraphVariables, for gradients of gradients, are not cut into shares");
  } else if constexpr (std::is_same_v<decltype(shares.forward(random, inputs...)), Output>) {
    return shares.forward(random, inputs...);
  } else {
    fail<UsageError>("canonical shares: what the model returns can't be joined from shares: expected tensors or ",
                     "Variables with the samples along an axis, also within tuples, vectors, maps and structs");
  }
}

}  // namespace chorus::same_bits
