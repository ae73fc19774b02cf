#pragma once
/// The devices or ranks that share the current batch, for operators with global-batch statistics (SyncBatchNorm) or
/// ranges (QuantizationAware).

#include <any>
#include <chorus/core/error.hpp>
#include <chorus/core/replaced.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus {

/// A policy's service for operators in a forward pass and its backward pass. All members must make the same calls in
/// the same order.
class BatchGroup {
 public:
  virtual ~BatchGroup() = default;
  /// Sums over all members, in place; all get the same bits. Throws CommError if a member is lost.
  virtual void sum(std::span<double> values) = 0;
  /// The maximum over all members, in place. Throws UsageError if the parts of the batch are not computed concurrently.
  virtual void max(std::span<double>) {
    fail<UsageError>(
        "QuantizationAware: ranges need the whole batch at once, and Pipeline and SameBits compute parts: expected "
        "SingleDevice, DataParallel, DistributedDataParallel or FullyShardedDataParallel without SameBits");
  }
  /// The factor of this member's gradients before all members' are summed.
  virtual double weight() = 0;
  /// Whether the pass is one recorded graph over all members' devices. Otherwise `sum` is used in forward and backward.
  virtual bool recorded() const { return false; }
  /// For one graph: all members' contributions, in member order.
  virtual std::vector<std::any> exchange(const std::any&) { return {}; }
  /// This member's index, and the number of its pass.
  virtual std::size_t member() const { return 0; }
  virtual std::size_t pass() const { return 0; }
  /// Whether this thread may take part now; asked when backward recomputes something.
  virtual bool is_here() const { return true; }
};

/// The group of this thread's forward pass; null if the batch is not split.
inline std::shared_ptr<BatchGroup>& batch_group() {
  thread_local std::shared_ptr<BatchGroup> group;
  return group;
}

/// While it lives, this thread's operations belong to `group`.
struct BatchGroupScope : detail::Replaced<std::shared_ptr<BatchGroup>> {
  explicit BatchGroupScope(std::shared_ptr<BatchGroup> group) : Replaced(batch_group(), std::move(group)) {}
};

namespace detail {
/// Whether this thread computes one of several parts of a batch that are added in a fixed order. Means are then those
/// of the part, and libraries must not choose the order of sums.
inline thread_local constinit bool computes_part = false;

inline constexpr const char* different_layers =
    "SyncBatchNorm: expected all devices in the same layer, got different layers";
}  // namespace detail

/// An operation's position in a pass that is one recorded graph.
class PlaceInPass {
 public:
  PlaceInPass() = default;
  explicit PlaceInPass(std::shared_ptr<BatchGroup> group) : group_(std::move(group)), pass_(group_->pass()) {}

  /// Whether this is the member's thread, still in that pass. All members then run backward through the operation
  /// concurrently, each through its part of the graph (`grad` in a model's forward). Otherwise one thread runs backward
  /// through the whole graph.
  bool is_here() const { return group_ && batch_group() == group_ && group_->pass() == pass_; }

 private:
  std::shared_ptr<BatchGroup> group_;
  std::size_t pass_ = 0;
};

}  // namespace chorus
