#pragma once
/// Option `non_finite`: the reaction to gradients that are not finite.

#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace chorus::ddp {

/// Checks the averages: all ranks decide the same, and all throw or all drop the pass.
template <Device D, class Communicator>
class NonFiniteGradients final : public Extension<D> {
 public:
  /// `ranks_differ`: the hook may leave different averages on each rank.
  NonFiniteGradients(Core<D, Communicator>& core, bool ranks_differ) : core_(core), ranks_differ_(ranks_differ) {}

  std::int64_t skipped_steps() const { return skipped_; }

  void backward_begins() override { own_ = none; }
  // The rank that a bad average comes from can only be found before averaging.
  void bucket_is_full(const Bucket& bucket) override {
    if (core_.options.non_finite == NonFinite::throw_error && own_ == none && core_.weight != 0)
      own_ = first_in(bucket);
  }
  void averaged() override {
    std::uint64_t first = none;
    for (const Bucket& bucket : core_.buckets.all())
      if (first = first_in(bucket); first != none) break;
    if (ranks_differ_) core_.ranks.all_reduce(std::span(&first, 1), comm::ReduceOp::min, {});
    if (first == none) return;
    core_.in_backward = false;  // no bucket is being sent
    if (core_.options.non_finite == NonFinite::throw_error) raise(first);
    ++skipped_;
    for (std::size_t i = 0; i < core_.entries(); ++i) core_.parameter(i).set_grad_arrived(false);
  }

 private:
  static constexpr std::uint64_t none = std::numeric_limits<std::uint64_t>::max();

  // The first entry of the bucket whose gradient is not finite.
  [[gnu::cold]] std::uint64_t first_in(const Bucket& bucket) const {
    for (const std::size_t i : bucket.parameters) {
      const auto& p = core_.parameter(i);
      bool bad = false;
      with_type(p.dtype(), p.grad_place(),
                [&](const auto* grad) { bad = !std::isfinite(kernels::square_sum(p.where(), p.count(), grad)); });
      if (bad) return i;
    }
    return none;
  }
  [[noreturn, gnu::cold]] void raise(std::uint64_t averaged) {
    std::vector<std::uint64_t> bad(static_cast<std::size_t>(core_.ranks.size()));
    core_.ranks.all_gather(std::span<const std::uint64_t>(&own_, 1), std::span(bad), {});
    std::string from;
    for (std::size_t rank = 0; rank < bad.size(); ++rank)
      if (bad[rank] != none) from += cat(from.empty() ? "" : ", ", core_.name(bad[rank]), " on rank ", rank);
    fail<NonFiniteError>("DistributedDataParallel: the averaged gradient of ", core_.name(averaged),
                         " is not finite; its source: ", from.empty() ? "a sum that overflowed" : from);
  }

  Core<D, Communicator>& core_;
  const bool ranks_differ_;
  std::uint64_t own_ = none;  // the first non-finite entry of this rank
  std::int64_t skipped_ = 0;
};

}  // namespace chorus::ddp
