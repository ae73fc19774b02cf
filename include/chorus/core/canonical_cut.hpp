#pragma once
/// How one forward pass's batch is cut into canonical shares, and which of them this process has.

#include <atomic>
#include <chorus/core/share_tree.hpp>
#include <cstddef>
#include <cstdint>
#include <span>

namespace chorus {

/// Belongs to the output of a policy with canonical shares; losses taken of it are the whole batch's.
class CanonicalCut {
 public:
  /// Of `shares` this process has those in `run`, with `samples` samples together.
  CanonicalCut(std::size_t shares, ShareRange run, std::int64_t samples)
      : shares_(shares), run_(run), samples_(samples) {}
  virtual ~CanonicalCut() = default;

  std::size_t shares() const { return shares_; }
  const ShareRange& run() const { return run_; }
  std::int64_t samples() const { return samples_; }
  /// The first sample of the run's share number `i`, among those of this process.
  std::int64_t begin(std::size_t i) const { return share_begin(samples_, run_.count(), i); }
  std::int64_t size(std::size_t i) const { return begin(i + 1) - begin(i); }
  /// Sums over all processes that share the batch, in place; all of them call it.
  virtual void sum_over_processes(std::span<double>) const {}

 private:
  std::size_t shares_;
  ShareRange run_;
  std::int64_t samples_;
};

namespace detail {
/// How many policies have canonical shares: without one, no loss looks for them.
inline std::atomic<int>& canonical_policies() {
  static std::atomic<int> count{0};
  return count;
}
/// While it lives, there is one more.
class CountedCanonicalPolicy {
 public:
  CountedCanonicalPolicy() { ++canonical_policies(); }
  ~CountedCanonicalPolicy() { --canonical_policies(); }
  CountedCanonicalPolicy(const CountedCanonicalPolicy&) = delete;
  CountedCanonicalPolicy& operator=(const CountedCanonicalPolicy&) = delete;
};
/// Whether this thread is within one share: there, a mean is the share's.
inline bool& within_share() {
  thread_local bool within = false;
  return within;
}
}  // namespace detail

}  // namespace chorus
