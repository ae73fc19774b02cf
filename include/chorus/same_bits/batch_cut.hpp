#pragma once
/// How one forward pass's batch is cut into canonical shares, and which of them this process has.

#include <atomic>
#include <chorus/autograd/node.hpp>
#include <chorus/core/config.hpp>
#include <chorus/ops/mean_of_parts.hpp>
#include <chorus/parallel/dp/backward.hpp>
#include <chorus/same_bits/grad_norm.hpp>
#include <chorus/same_bits/share_tree.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// Belongs to the output of a policy with canonical shares; losses of that output are the whole batch's.
class BatchCut : public BatchParts {
 public:
  /// This process has the shares `run` of `shares`, with `samples` samples in total.
  BatchCut(std::size_t shares, ShareRange run, std::int64_t samples) : shares_(shares), run_(run), samples_(samples) {}

  std::size_t shares() const { return shares_; }
  const ShareRange& run() const { return run_; }
  std::size_t parts() const override { return run_.count(); }
  std::int64_t samples() const override { return samples_; }
  std::int64_t begin(std::size_t i) const override { return share_begin(samples_, run_.count(), i); }
  std::int64_t size(std::size_t i) const { return begin(i + 1) - begin(i); }
  [[gnu::cold]] Mean add_up(std::span<const double> sums, std::span<const double> overs) const override;

 protected:
  /// Sums over all processes that share the batch, in place; all of them call it.
  virtual void sum_over_processes(std::span<double>) const {}

 private:
  std::size_t shares_;
  ShareRange run_;
  std::int64_t samples_;
};

/// A node of backward through such a policy.
class CutNode {
 public:
  explicit CutNode(std::shared_ptr<const BatchCut> batch_cut) : cut(std::move(batch_cut)) {}

  const std::shared_ptr<const BatchCut> cut;

 protected:
  virtual ~CutNode() = default;
};

/// That node, if the policy computes the shares one after the other.
class SharesNode final : public dp::BackwardNode, public CutNode {
 public:
  SharesNode(dp::BackwardRunner& runner, std::weak_ptr<void> alive, std::vector<dp::GradientReturns> returns,
             std::shared_ptr<const BatchCut> batch_cut)
      : BackwardNode(runner, std::move(alive), std::move(returns)), CutNode(std::move(batch_cut)) {}
};

/// The cut of the batch from which `node` was computed; null if no policy has cut it, within one share, and if nothing
/// is recorded. Throws UsageError if it depends on batches that are cut in different ways.
[[gnu::cold]] std::shared_ptr<const BatchCut> find_cut(Node* node);

/// `nodes`: of a backward run. Throws UsageError if a gradient of a net's output, of samples in shares, comes from
/// anything but means over the whole batch: it would be this process's only.
[[gnu::cold]] void check_means(std::span<const Ref<Node>> nodes);

/// A part of each policy that cuts batches. While one exists, losses look for cuts.
class CutsBatches {
 public:
  /// `parameters`: the whole model's.
  template <Device D>
  explicit CutsBatches(const std::vector<nn::NamedParameter<D>>& parameters) : norms_(parameters) {
    ++policies;
    detail::find_parts = [](Node* node) -> std::shared_ptr<const BatchParts> { return find_cut(node); };
  }
  ~CutsBatches() { --policies; }
  CutsBatches(const CutsBatches&) = delete;
  CutsBatches& operator=(const CutsBatches&) = delete;

  static inline std::atomic<int> policies{0};

 private:
  NormsInAnyOrder norms_;
};

}  // namespace chorus::same_bits

#if !CHORUS_COMPILED
#include <chorus/same_bits/batch_cut_impl.hpp>
#endif
