#pragma once
/// Canonical shares for layers that need the whole batch, such as SyncBatchNorm.

#include <chorus/autograd/node.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/config.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/same_bits/share_buffers.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <chorus/same_bits/share_turns.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

namespace chorus::same_bits {

/// Whether a layer of the model needs the whole batch.
[[gnu::cold]] bool needs_whole_batch(nn::Module& model);

/// The shares of a device run through the model side by side, and meet where a layer asks for sums over the batch. Each
/// has its own leaves in place of the parameters, so that gradients of several shares can be incomplete at once.
template <Device D>
class SideBySide {
 public:
  /// For `run`, out of `shares` shares. References must outlive this.
  SideBySide(const nn::FlatParameters<D>& flat, ShareBuffers<D>& buffers, std::size_t shares, ShareRange run);
  /// Nodes of the tape may outlive it.
  ~SideBySide();
  SideBySide(const SideBySide&) = delete;
  SideBySide& operator=(const SideBySide&) = delete;

  /// Runs `task(i)` for the first `count` shares of the run. `used`: how many have samples. `devices`: the group of all
  /// devices that share the batch, null for a single one.
  void run(std::size_t count, std::size_t used, bool forward, std::shared_ptr<BatchGroup> devices,
           const std::function<void(std::size_t)>& task);
  std::shared_ptr<BatchGroup> group(std::size_t i) const { return groups_[i]; }

  /// Calls `f(parameter's leaf, its gradient)` for a share's leaf, and drops the gradient afterwards.
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
    void sum(std::span<double> values) override;
    double weight() override { return 1; }
    std::size_t member() const override { return i; }
    SideBySide* shares;
    std::size_t i;
  };

  void stand_in(std::span<const Ref<Node>> leaves);
  void sum(std::size_t i, std::span<double> values);
  // Adds up each value over all shares in the order of the tree; shares without samples give 0.
  void add_up();

  ShareBuffers<D>& buffers_;
  std::size_t shares_;
  ShareRange run_;
  std::shared_ptr<BatchGroup> devices_;
  ShareTurns turns_;
  std::size_t used_ = 0;
  std::vector<std::vector<double>> values_;  // by share of the run
  std::vector<double> total_;
  std::vector<ParameterOn<D>*> parameters_;
  std::vector<Node*> nodes_;                    // of the parameters
  std::vector<std::vector<Ref<Node>>> leaves_;  // by share of the run
  std::unordered_map<const Node*, std::size_t> number_of_;
  std::vector<std::shared_ptr<Group>> groups_;
};

}  // namespace chorus::same_bits

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/same_bits/side_by_side_impl.hpp>
#endif
