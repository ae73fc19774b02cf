#pragma once
/// The devices or ranks that share the current batch, for operators whose statistics are the whole batch's
/// (SyncBatchNorm).

#include <any>
#include <chorus/core/config.hpp>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI {

/// What a policy offers to the operators of a forward pass, and of the backward pass behind it. All members make the
/// same calls in the same order.
class BatchGroup {
 public:
  virtual ~BatchGroup() = default;
  /// Sums over all members, in place; the same bits for each. Throws CommError where a member is lost.
  virtual void sum(std::span<double> values) = 0;
  /// What this member's gradients will be multiplied by before all are added up.
  virtual double weight() = 0;
  /// Where the pass is recorded as one graph of all members' devices: what each of them has given, in their order. Else
  /// nothing: then `sum` adds up, forward and backward.
  virtual std::vector<std::any> exchange(const std::any&) { return {}; }
  /// Whether something has been exchanged: then the tape leads to other members' operations.
  virtual bool exchanged() const { return false; }
};

/// The group of this thread's forward pass; null where the batch is whole.
inline std::shared_ptr<BatchGroup>& batch_group() {
  thread_local std::shared_ptr<BatchGroup> group;
  return group;
}

/// While it lives, operations of this thread belong to `group`.
class BatchGroupScope {
 public:
  explicit BatchGroupScope(std::shared_ptr<BatchGroup> group)
      : before_(std::exchange(batch_group(), std::move(group))) {}
  ~BatchGroupScope() { batch_group() = std::move(before_); }
  BatchGroupScope(const BatchGroupScope&) = delete;
  BatchGroupScope& operator=(const BatchGroupScope&) = delete;

 private:
  std::shared_ptr<BatchGroup> before_;
};

}  // namespace chorus::inline CHORUS_ABI
