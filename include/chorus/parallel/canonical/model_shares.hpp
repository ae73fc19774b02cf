#pragma once
/// A model that computes its batch one canonical share after the other, forward and backward.

#include <chorus/autograd/tape.hpp>
#include <chorus/core/canonical_cut.hpp>
#include <chorus/parallel/canonical/earlier_gradients.hpp>
#include <chorus/parallel/canonical/gradient_tree.hpp>
#include <chorus/parallel/canonical/join_shares.hpp>
#include <chorus/parallel/canonical/share_buffers.hpp>
#include <chorus/parallel/canonical/share_scope.hpp>
#include <chorus/parallel/canonical/side_by_side.hpp>
#include <chorus/parallel/dp/pass.hpp>
#include <chorus/parallel/dp/recorded.hpp>
#include <chorus/parallel/dp/scatter.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace chorus::canonical {

/// A policy's part for the shares of one process.
template <class Model>
class ModelShares final : private dp::BackwardRunner {
 public:
  using D = typename nn::detail::DeviceOfModel<Model>::type;

  /// What a policy of several processes adds.
  struct Processes {
    /// Sums over all of them.
    std::function<void(std::span<double>)> sum;
    /// The whole batch's number of samples, in backward.
    std::function<Index()> batch;
    /// Is called before layers have sums of their own.
    std::function<void()> layers_send;
  };

  /// `run` of the `shares` are this process's. All but `processes` has to outlive this.
  ModelShares(Model& model, const nn::FlatParameters<D>& flat, const std::vector<nn::NamedBuffer<D>>& buffers,
              std::weak_ptr<void> alive, std::size_t shares, ShareRange run, Processes processes = {})
      : model_(model),
        flat_(flat),
        buffers_(buffers),
        alive_(std::move(alive)),
        shares_(shares),
        run_(run),
        processes_(std::make_shared<Processes>(std::move(processes))),
        tree_(flat) {
    if (looks_at_whole_batch(model))
      side_by_side_.emplace(flat, buffers_, shares, run, [all = processes_](std::span<double> values) {
        if (all->layers_send) all->layers_send();
        if (all->sum) all->sum(values);
      });
    ++detail::canonical_policies();
  }
  ~ModelShares() {
    --detail::canonical_policies();
    *processes_ = {};
  }
  ModelShares(const ModelShares&) = delete;
  ModelShares& operator=(const ModelShares&) = delete;

  std::size_t shares() const { return shares_; }
  const ShareRange& run() const { return run_; }
  /// The sums of this process's gradients.
  const GradientTree<D>& tree() const { return tree_; }
  /// `arrived(leaf)` is called in the last share's backward pass whenever a parameter's sums are complete, `ended()`
  /// when all are, before the parameters' hooks run: there processes add up theirs.
  void on_gradients(std::function<void(Node&)> arrived) { arrived_ = std::move(arrived); }
  void when_backward_ends(std::function<void()> ended) { ended_ = std::move(ended); }

  /// The model's output for this process's samples. `random`: of the first of them.
  template <class... Inputs>
  auto forward(RandomContext& random, const Inputs&... inputs) {
    const Index samples = detail::batch_size(random.dim, inputs...);
    const auto cut = std::make_shared<const Cut>(shares_, run_, samples, processes_);
    const D device = flat_.groups().front().values.device();
    // Shares without samples come last; of a batch without any, one is computed, for the shape of what it gives.
    const dp::Split split{samples, std::clamp<std::size_t>(static_cast<std::size_t>(samples), 1, run_.count())};
    std::vector<dp::GradientReturns> returns(split.devices);
    using Output = decltype(dp::call(model_, dp::scatter(split, 0, device, returns[0], inputs...)));
    std::vector<std::optional<Output>> outputs(split.devices);
    buffers_.begin_pass(split.devices);
    in_turn(split.devices, static_cast<std::size_t>(samples), true, [&, grad = grad_enabled()](std::size_t i) {
      const GradMode mode(grad);
      const auto own = dp::scatter(split, i, device, returns[i], inputs...);
      const ShareScope scope(random, split, i, static_cast<int>(shares_),
                             side_by_side_ ? side_by_side_->group(i) : nullptr);
      outputs[i].emplace(dp::call(model_, own));
      random.drew = random.drew || scope.drew();
    });
    buffers_.end_pass();
    const Ref<dp::BackwardNode> on_tape(new dp::BackwardNode(*this, alive_, std::move(returns), cut));
    return detail::map_tensors(detail::pointers_to(outputs), JoinShares<D>(split, device, on_tape));
  }

 private:
  /// Of one pass.
  class Cut final : public CanonicalCut {
   public:
    Cut(std::size_t shares, ShareRange run, Index samples, std::shared_ptr<const Processes> processes)
        : CanonicalCut(shares, run, samples), processes_(std::move(processes)) {}
    void sum_over_processes(std::span<double> values) const override {
      if (processes_->sum) processes_->sum(values);
    }

   private:
    std::shared_ptr<const Processes> processes_;  // empty once the policy is gone
  };

  void backward(const dp::Roots& roots, bool keep) override {
    earlier_.take(flat_);
    const auto batch = processes_->batch ? static_cast<std::size_t>(processes_->batch()) : roots.size();
    const std::size_t used = std::min(batch, shares_);  // those that have samples
    const ShareRange run{std::min(run_.begin, used), std::min(run_.end, used)};
    tree_.begin(run, used);
    in_turn(roots.size(), run.count(), false, [&](std::size_t i) {
      Observer observer(*this, i);
      run_backward(roots[i], {.retain_graph = keep, .leaves = &observer});
      const auto late = [this](std::size_t p) { tell(*flat_.entries()[p].named.handle.shared()); };
      if (run.count() > 0) tree_.end_share(i, late);
    });
    if (const auto ended = std::exchange(ended_, nullptr)) ended();
    earlier_.give_back();
    for (const auto& entry : flat_.entries())
      if (entry.parameter().grad_arrived()) entry.named.handle.shared()->set_reached();
  }
  void backward_to_wanted(const dp::Roots&, bool) override {
    fail<UsageError>("canonical shares: grad() does not go through a policy's forward pass: expected backward()");
  }
  void for_each_parameter(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& entry : flat_.entries())
      if (entry.parameter().wants_grad()) visit(*entry.named.handle.shared(), context);
  }
  /// Of the run's share number `share`.
  struct Observer final : LeafObserver {
    Observer(ModelShares& owner, std::size_t number) : shares(owner), share(number) {}
    void gradient_is_final(Node& leaf) override { shares.gradient_is_final(leaf, share); }
    ModelShares& shares;
    std::size_t share;
  };
  // Calls `task(i)` for shares of this process, of which so many have samples.
  template <class Task>
  void in_turn(std::size_t count, std::size_t used, bool forward, const Task& task) {
    if (side_by_side_) return side_by_side_->run(count, std::min(count, used), forward, task);
    for (std::size_t i = 0; i < count; ++i) {
      if (forward) buffers_.enter(i);
      task(i);
      if (forward) buffers_.leave(i);
    }
  }
  void gradient_is_final(Node& leaf, std::size_t share) {
    if (side_by_side_)
      side_by_side_->with_gradient(leaf, [&](Node& own, const void* gradient) { take(own, share, gradient); });
    else if (const auto* const entry = tree_.entry_of(leaf))
      take(leaf, share, flat_.entries()[*entry].parameter().grad_data());
  }
  // `gradient` of the parameter whose leaf that is.
  void take(Node& leaf, std::size_t share, const void* gradient) {
    const std::size_t i = *tree_.entry_of(leaf);
    if (gradient != nullptr && !tree_.sums().empty()) tree_.gradient_arrived(i, share, gradient);
    if (tree_.sums().empty() || tree_.is_last(share)) tell(leaf);
  }
  void tell(Node& leaf) const {
    if (arrived_) arrived_(leaf);
  }

  Model& model_;
  const nn::FlatParameters<D>& flat_;
  ShareBuffers<D> buffers_;
  std::weak_ptr<void> alive_;
  std::size_t shares_;
  ShareRange run_;
  std::shared_ptr<Processes> processes_;
  GradientTree<D> tree_;
  std::optional<SideBySide<D>> side_by_side_;  // where a layer looks at the whole batch
  EarlierGradients<D> earlier_;
  std::function<void(Node&)> arrived_;
  std::function<void()> ended_;
};

/// `model.forward(inputs...)`, in shares where there are such; where nothing is recorded, a model that returns numbers
/// without axes computes all samples at once. Throws UsageError for what can't be cut.
template <class Model, class... Inputs>
auto forward(ModelShares<Model>* shares, Model& model, RandomContext& random, const Inputs&... inputs) {
  using Output = decltype(model.forward(inputs...));
  if (shares == nullptr || (detail::holds_scalars<Output> && !grad_enabled())) return model.forward(inputs...);
  if constexpr (dp::is_recorded<Inputs...>) {
    fail<UsageError>("canonical shares: GraphVariables, for gradients of gradients, are not cut into shares");
  } else if constexpr (std::is_same_v<decltype(shares->forward(random, inputs...)), Output>) {
    return shares->forward(random, inputs...);
  } else {
    fail<UsageError>("canonical shares: what the model returns can't be joined from shares: expected tensors or ",
                     "Variables with the samples along an axis, also within tuples, vectors, maps and structs");
  }
}

}  // namespace chorus::canonical
