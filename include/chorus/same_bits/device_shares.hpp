#pragma once
/// One device's canonical shares: its copy of the model computes them one after the other, forward and backward.

#include <algorithm>
#include <chorus/autograd/tape.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/random.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/share_buffers.hpp>
#include <chorus/same_bits/share_scope.hpp>
#include <chorus/same_bits/side_by_side.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace chorus::same_bits {

template <Device D>
class DeviceShares {
 public:
  /// `run`: the device's, out of `shares` shares. References must outlive this.
  DeviceShares(nn::Module& model, const nn::FlatParameters<D>& flat, const std::vector<nn::NamedBuffer<D>>& buffers,
               std::size_t shares, ShareRange run)
      : model_(model), flat_(flat), shares_(shares), run_(run), buffers_(buffers), tree_(flat) {
    if (needs_whole_batch(model)) side_by_side_.emplace(flat, buffers_, shares, run);
  }

  const ShareRange& run() const { return run_; }
  /// The sums of gradients of the last backward pass.
  const GradientTree<D>& tree() const { return tree_; }

  /// `task(i)` computes the device's i-th share; its shares are `count` parts of `split` from `first` on. Returns
  /// whether random numbers were drawn.
  template <class Task>
  bool forward(const RandomContext& random, const dp::Split& split, std::size_t first, std::size_t count,
               const Task& task) {
    bool drew = false;
    buffers_.begin_pass(count, nn::detail::any_training(model_));
    in_turn(count, split.batch == 0 ? 0 : count, true, batch_group(), [&, grad = grad_enabled()](std::size_t i) {
      const GradMode mode(grad);
      const ShareScope scope(random, split, first + i, static_cast<int>(shares_),
                             side_by_side_ ? side_by_side_->group(i) : nullptr);
      task(i);
      drew = drew || scope.drew();
    });
    buffers_.end_pass();
    return drew;
  }

  /// Backward from the shares' outputs; the first `used` of all shares have samples. There are no gradients before.
  /// `devices`: their BatchGroup, null for a single one. Calls `complete(leaf)` when a parameter's sums are complete.
  template <class Complete>
  void backward(std::span<const std::vector<Ref<Node>>> roots, bool keep, std::size_t used,
                std::shared_ptr<BatchGroup> devices, const Complete& complete) {
    const ShareRange run{std::min(run_.begin, used), std::min(run_.end, used)};
    tree_.begin(run, used);
    in_turn(roots.size(), run.count(), false, std::move(devices), [&](std::size_t i) {
      Observer<Complete> observer(*this, i, i + 1 == roots.size(), complete);
      run_backward(roots[i], {.retain_graph = keep, .leaves = &observer});
      if (run.count() == 0) return;
      tree_.end_share(i, [&](std::size_t p) { complete(*flat_.entries()[p].named.handle.shared()); });
    });
  }

 private:
  /// For share number `i`.
  template <class Complete>
  struct Observer final : LeafObserver {
    Observer(DeviceShares& device, std::size_t share, bool is_last, const Complete& f)
        : shares(device), i(share), last(is_last), complete(f) {}
    void gradient_is_final(Node& leaf) override {
      if (shares.side_by_side_)
        shares.side_by_side_->with_gradient(leaf, [&](Node& own, const void* gradient) { take(own, gradient); });
      else if (const auto* const entry = shares.tree_.entry_of(leaf))
        take(leaf, shares.flat_.entries()[*entry].parameter().grad_place());
    }
    // Takes the gradient of the parameter with that leaf.
    void take(Node& leaf, const void* gradient) {
      const bool counts = !shares.tree_.sums().empty();
      if (counts && gradient != nullptr) shares.tree_.gradient_arrived(*shares.tree_.entry_of(leaf), i, gradient);
      if (counts ? shares.tree_.is_last(i) : last) complete(leaf);
    }
    DeviceShares& shares;
    std::size_t i;
    bool last;
    const Complete& complete;
  };

  // `with_samples`: the number of shares that have samples.
  template <class Task>
  void in_turn(std::size_t count, std::size_t with_samples, bool forward, std::shared_ptr<BatchGroup> devices,
               const Task& task) {
    if (side_by_side_) return side_by_side_->run(count, with_samples, forward, std::move(devices), task);
    for (std::size_t i = 0; i < count; ++i) {
      if (forward) buffers_.enter(i);
      task(i);
      if (forward) buffers_.leave(i);
    }
  }

  nn::Module& model_;
  const nn::FlatParameters<D>& flat_;
  std::size_t shares_;
  ShareRange run_;
  ShareBuffers<D> buffers_;
  GradientTree<D> tree_;
  std::optional<SideBySide<D>> side_by_side_;  // if a layer needs the whole batch
};

}  // namespace chorus::same_bits
