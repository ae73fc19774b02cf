#pragma once
/// The devices or ranks that share the current batch, for operators with statistics of the whole batch (SyncBatchNorm)
/// or with ranges of it (QuantizationAware).

#include <any>
#include <chorus/core/error.hpp>
#include <chorus/core/replaced.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

/// A policy's service for the operators of a forward pass, and of the backward pass after it. All members make the same
/// calls in the same order.
class BatchGroup {
 public:
  virtual ~BatchGroup() = default;
  /// Sums over all members, in place; the same bits for each. Throws CommError if a member is lost.
  virtual void sum(std::span<double> values) = 0;
  /// The largest of all members' numbers, in place. Throws UsageError if no layer sees the whole batch.
  virtual void max(std::span<double>) {
    fail<UsageError>(
        "QuantizationAware: ranges need the whole batch at once, and Pipeline and SameBits compute parts: expected "
        "SingleDevice, DataParallel, DistributedDataParallel or FullyShardedDataParallel without SameBits");
  }
  /// The factor by which this member's gradients are multiplied before all are summed.
  virtual double weight() = 0;
  /// Whether the pass is recorded as one graph of all members' devices. Otherwise `sum` sums, forward and backward.
  virtual bool recorded() const { return false; }
  /// For one graph: each member's contribution, in their order.
  virtual std::vector<std::any> exchange(const std::any&) { return {}; }
  /// This member's number, and the number of its pass.
  virtual std::size_t member() const { return 0; }
  virtual std::size_t pass() const { return 0; }
  /// Whether this thread may take part now: asked if backward computes something again.
  virtual bool is_here() const { return true; }
};

/// The group of this thread's forward pass; null if the batch is whole.
inline std::shared_ptr<BatchGroup>& batch_group() {
  thread_local std::shared_ptr<BatchGroup> group;
  return group;
}

/// While it lives, operations of this thread belong to `group`.
struct BatchGroupScope : detail::Replaced<std::shared_ptr<BatchGroup>> {
  explicit BatchGroupScope(std::shared_ptr<BatchGroup> group) : Replaced(batch_group(), std::move(group)) {}
};

namespace detail {
/// Whether this thread computes one part of a batch that its policy has cut into parts, which are added up in a fixed
/// order: a mean is the part's, and no sum's order is a library's choice.
inline thread_local constinit bool computes_part = false;

inline constexpr const char* different_layers =
    "SyncBatchNorm: expected all devices in the same layer, got different layers";
}  // namespace detail

/// An operation's place in a pass that is recorded as one graph.
class PlaceInPass {
 public:
  PlaceInPass() = default;
  explicit PlaceInPass(std::shared_ptr<BatchGroup> group) : group_(std::move(group)), pass_(group_->pass()) {}

  /// Whether this thread is the member's and still in that pass. Then all members go back through the operation at the
  /// same time, each through its own part of the graph (`grad` in a model's forward function). Else one thread goes
  /// back through the whole graph.
  bool is_here() const { return group_ && batch_group() == group_ && group_->pass() == pass_; }

 private:
  std::shared_ptr<BatchGroup> group_;
  std::size_t pass_ = 0;
};

}  // namespace chorus
