#pragma once
/// The random numbers and batch group that a model uses for one canonical share.

#include <chorus/core/batch_group.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/random.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <chorus/same_bits/batch_cut.hpp>
#include <chorus/same_bits/leaves.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace chorus::same_bits {

/// Refuses layers that need the batch of all devices.
class NoBatchGroup final : public BatchGroup {
 public:
  void sum(std::span<double>) override {
    fail<UsageError>(
        "canonical shares: a layer needs the whole batch, and shares are computed one after the other: expected "
        "BatchNorm, which uses each share's statistics, or a SyncBatchNorm that the model had when the policy took it");
  }
  double weight() override { return 1; }
};

/// While it lives, this thread computes a share of so many: means are the share's, no library chooses the order of
/// sums, and layers that ranks could share add up in leaves.
class PartScope {
 public:
  explicit PartScope(std::size_t shares) : leaves_(shares) {}

 private:
  detail::Replaced<bool> part_{detail::computes_part, true};
  LeafScope leaves_;
};

/// The same for share `i` of a split batch: operations draw the random numbers of its samples.
class ShareScope {
 public:
  /// `random`: of all that is split. `group`: of the batch, if a layer needs all of it.
  ShareScope(const RandomContext& random, const dp::Split& split, std::size_t i, int shares,
             std::shared_ptr<BatchGroup> group)
      : context_(dp::random_of_share(random, split, i, shares)),
        group_(group ? std::move(group) : std::make_shared<NoBatchGroup>()),
        part_(static_cast<std::size_t>(shares)) {}
  /// Whether operations have drawn random numbers.
  bool drew() const { return context_.drew; }

 private:
  RandomContext context_;
  RandomScope random_{context_};
  BatchGroupScope group_;
  PartScope part_;
};

}  // namespace chorus::same_bits
