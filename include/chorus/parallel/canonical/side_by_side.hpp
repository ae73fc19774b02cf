#pragma once
/// Canonical shares under layers that look at the whole batch, such as SyncBatchNorm.

#include <algorithm>
#include <chorus/autograd/node.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/share_tree.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/canonical/share_buffers.hpp>
#include <chorus/parallel/canonical/share_turns.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::canonical {

/// Whether a layer of the model looks at the whole batch.
[[gnu::cold]] inline bool looks_at_whole_batch(nn::Module& model) {
  struct Look final : nn::detail::Walker {
    bool any = false;
    void enter(nn::Module& layer) override {
      const auto* const layer_that_may = dynamic_cast<const nn::Synchronisable*>(&layer);
      any = any || (layer_that_may != nullptr && layer_that_may->synchronised());
    }
  } look;
  look.walk(model);
  return look.any;
}

/// The shares of a device go through the model side by side, and meet where a layer asks for sums over the batch. Each
/// has leaves of its own in the parameters' places, so that gradients of several shares may be under way at once.
template <Device D>
class SideBySide {
 public:
  /// Of `run`, of so many shares in all. What is passed by reference has to outlive this.
  SideBySide(const nn::FlatParameters<D>& flat, ShareBuffers<D>& buffers, std::size_t shares, ShareRange run)
      : buffers_(buffers),
        shares_(shares),
        run_(run),
        turns_(run.count()),
        values_(run.count()),
        leaves_(run.count()) {
    for (const auto& entry : flat.entries()) {
      parameters_.push_back(&entry.parameter());
      nodes_.push_back(entry.named.handle.shared().get());
    }
    for (auto& leaves : leaves_)
      for (auto* const parameter : parameters_) {
        leaves.push_back(parameter->make_stand_in());
        number_of_.emplace(leaves.back().get(), leaves.size() - 1);
      }
    for (std::size_t i = 0; i < run.count(); ++i) groups_.push_back(std::make_shared<Group>(*this, i));
  }
  /// Nodes of the tape may outlive it.
  ~SideBySide() {
    for (const auto& group : groups_) group->shares = nullptr;
  }
  SideBySide(const SideBySide&) = delete;
  SideBySide& operator=(const SideBySide&) = delete;

  /// `task(i)` for the first shares of the run. `used`: as many as have samples. `devices`: of all that share the
  /// batch, null where there is one.
  void run(std::size_t count, std::size_t used, bool forward, std::shared_ptr<BatchGroup> devices,
           const std::function<void(std::size_t)>& task) {
    used_ = used;
    devices_ = std::move(devices);
    turns_.run(count, {.task = task,
                       .enter =
                           [this, forward](std::size_t i) {
                             if (forward) buffers_.enter(i);
                             stand_in(leaves_[i]);
                           },
                       .leave =
                           [this, forward](std::size_t i) {
                             stand_in({});
                             if (forward) buffers_.leave(i);
                           }});
  }
  std::shared_ptr<BatchGroup> group(std::size_t i) const { return groups_[i]; }

  /// Calls `f(parameter's leaf, its gradient)` for a share's leaf, of which the gradient is dropped then.
  template <class F>
  void with_gradient(Node& leaf, const F& f) const {
    const auto found = number_of_.find(&leaf);
    if (found == number_of_.end()) return;
    const auto* const parameter = parameters_[found->second];
    f(*nodes_[found->second], parameter->grad_data_of(leaf));
    parameter->drop_grad_of(leaf);
  }

 private:
  struct Group final : BatchGroup {
    Group(SideBySide& owner, std::size_t number) : shares(&owner), i(number) {}
    void sum(std::span<double> values) override {
      check<UsageError>(shares != nullptr, "SyncBatchNorm: the policy that ran the forward pass is gone");
      shares->sum(i, values);
    }
    double weight() override { return 1; }
    std::size_t member() const override { return i; }
    SideBySide* shares;
    std::size_t i;
  };

  void stand_in(std::span<const Ref<Node>> leaves) {
    for (std::size_t p = 0; p < parameters_.size(); ++p)
      parameters_[p]->set_origin(leaves.empty() ? Ref<Node>() : leaves[p]);
  }
  void sum(std::size_t i, std::span<double> values) {
    values_[i].assign(values.begin(), values.end());
    turns_.meet(i, [this] { add_up(); });
    check<UsageError>(total_.size() == values.size(), detail::different_layers);
    std::copy(total_.begin(), total_.end(), values.begin());
  }
  // Of all shares, each number by itself, in the order of the tree; shares without samples give 0.
  void add_up() {
    const std::size_t count = values_.front().size();
    std::vector<double> numbers(count * shares_);
    for (std::size_t i = 0; i < used_; ++i) {
      check<UsageError>(values_[i].size() == count, detail::different_layers);
      for (std::size_t n = 0; n < count; ++n) numbers[n * shares_ + run_.begin + i] = values_[i][n];
    }
    if (devices_) {
      const BatchGroupScope as_device(devices_);
      devices_->sum(numbers);
    }
    total_.resize(count);
    for (std::size_t n = 0; n < count; ++n)
      total_[n] = add_shares(std::span<const double>(numbers).subspan(n * shares_, shares_));
  }

  ShareBuffers<D>& buffers_;
  std::size_t shares_;
  ShareRange run_;
  std::shared_ptr<BatchGroup> devices_;
  ShareTurns turns_;
  std::size_t used_ = 0;
  std::vector<std::vector<double>> values_;  // by share of the run
  std::vector<double> total_;
  std::vector<ParameterOn<D>*> parameters_;
  std::vector<Node*> nodes_;                    // of these
  std::vector<std::vector<Ref<Node>>> leaves_;  // by share of the run
  std::unordered_map<const Node*, std::size_t> number_of_;
  std::vector<std::shared_ptr<Group>> groups_;
};

}  // namespace chorus::canonical
