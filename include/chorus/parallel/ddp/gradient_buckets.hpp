#pragma once
/// Gradient buckets: ranges of the flat gradient buffer that are reduced while backward still fills the next ones
/// (Li et al., "PyTorch Distributed", VLDB 2020).

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus {

struct BucketOptions {
  /// Largest size of the first bucket, in MiB. Small, so that communication starts early.
  double first_bucket_cap_mb = 1;
  /// Largest size of the others, in MiB. A parameter larger than that has a bucket of its own.
  double bucket_cap_mb = 25;
  /// The same one by one, in the order in which buckets leave; the last one holds for all that follow. Empty: as above.
  std::vector<double> bucket_cap_mb_list = {};

  double cap_mb(std::size_t bucket) const {
    if (!bucket_cap_mb_list.empty()) return bucket_cap_mb_list[std::min(bucket, bucket_cap_mb_list.size() - 1)];
    return bucket == 0 ? first_bucket_cap_mb : bucket_cap_mb;
  }
};

namespace detail {

/// Neighbouring gradients of one dtype that travel together.
struct GradientBucket {
  std::size_t group, begin, count;      // elements of the flat buffer
  std::vector<std::size_t> parameters;  // indices into the flat parameters' entries
  std::size_t missing = 0;              // gradients that this backward has yet to deliver
  comm::Work work;
};

/// Elements [begin, end).
struct Elements {
  std::size_t begin, end;
};
/// Rank `rank`'s part of a bucket of `count` elements: the n-th one of n equal parts, and what is left over is the last
/// rank's, too.
constexpr Elements part_of(std::size_t count, std::size_t rank, std::size_t ranks) {
  const std::size_t share = count / ranks;
  return {rank * share, rank + 1 == ranks ? count : (rank + 1) * share};
}

/// What becomes of a parameter's gradient.
enum class Sending : std::uint8_t { no, early, late };

/// Cuts the parts of the flat buffers that are sent into buckets, in the order of the layout; late ones apart.
template <Device D>
[[gnu::cold]] std::vector<GradientBucket> make_buckets(const nn::FlatParameters<D>& flat, const BucketOptions& options,
                                                       std::span<const Sending> sending) {
  constexpr double mib = 1024 * 1024;
  std::vector<GradientBucket> buckets;
  std::vector<GradientBucket> open(flat.groups().size());
  const auto bytes = [&](const GradientBucket& bucket, std::size_t more) {
    return static_cast<double>((bucket.count + more) * size_of(flat.groups()[bucket.group].dtype));
  };
  const auto close = [&](GradientBucket& bucket) {
    if (!bucket.parameters.empty()) buckets.push_back(std::move(bucket));
    bucket = {};
  };
  for (const auto when : {Sending::early, Sending::late}) {
    for (std::size_t i = 0; i < flat.entries().size(); ++i) {
      if (sending[i] != when) continue;
      const auto& entry = flat.entries()[i];
      auto& bucket = open[entry.group];
      const double cap = mib * options.cap_mb(buckets.size());
      const bool apart = bucket.begin + bucket.count != entry.begin;  // one that isn't sent lies between
      if (!bucket.parameters.empty() && (apart || bytes(bucket, entry.count) > cap)) close(bucket);
      if (bucket.parameters.empty()) {
        bucket.group = entry.group;
        bucket.begin = entry.begin;
        bucket.count = 0;
      }
      bucket.parameters.push_back(i);
      bucket.count += entry.count;
    }
    for (auto& bucket : open) close(bucket);
  }
  return buckets;
}

/// The same, with all gradients that are wanted.
template <Device D>
[[gnu::cold]] std::vector<GradientBucket> make_buckets(const nn::FlatParameters<D>& flat,
                                                       const BucketOptions& options) {
  std::vector<Sending> sending;
  for (const auto& entry : flat.entries())
    sending.push_back(entry.parameter().wants_grad() ? Sending::early : Sending::no);
  return make_buckets(flat, options, sending);
}

}  // namespace detail
}  // namespace chorus
