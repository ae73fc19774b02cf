#pragma once
/// Gradient buckets: ranges of the flat gradient buffer that are all-reduced while backward still fills the next ones
/// (Li et al., "PyTorch Distributed", VLDB 2020).

#include <cstddef>
#include <span>
#include <vector>

#include <chorus/comm/communicator.hpp>
#include <chorus/nn/flat_parameters.hpp>

namespace chorus::inline CHORUS_ABI {

struct BucketOptions {
  /// Largest size of the first bucket, in MiB. Small, so that communication starts early.
  double first_bucket_cap_mb = 1;
  /// Largest size of the others, in MiB. A parameter larger than that has a bucket of its own.
  double bucket_cap_mb = 25;
};

namespace detail {

/// Neighbouring gradients of one dtype that travel together.
struct GradientBucket {
  std::size_t group, begin, count;         // elements of the flat buffer
  std::vector<std::size_t> parameters;     // indices into the flat parameters' entries
  std::size_t missing = 0;                 // gradients that this backward has yet to deliver
  comm::Work work;
};

/// Cuts the trainable part of the flat buffers into buckets, in the order of the layout.
template <Device D>
std::vector<GradientBucket> make_buckets(const nn::FlatParameters<D>& flat, const BucketOptions& options) {
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
  for (std::size_t i = 0; i < flat.entries().size(); ++i) {
    const auto& entry = flat.entries()[i];
    if (!entry.parameter().wants_grad()) continue;
    auto& bucket = open[entry.group];
    const double cap = mib * (buckets.empty() ? options.first_bucket_cap_mb : options.bucket_cap_mb);
    const bool apart = bucket.begin + bucket.count != entry.begin;  // a frozen parameter lies between
    if (!bucket.parameters.empty() && (apart || bytes(bucket, entry.count) > cap)) close(bucket);
    if (bucket.parameters.empty()) bucket = {.group = entry.group, .begin = entry.begin, .count = 0, .parameters = {}, .missing = 0, .work = {}};
    bucket.parameters.push_back(i);
    bucket.count += entry.count;
  }
  for (auto& bucket : open) close(bucket);
  return buckets;
}

}  // namespace detail
}  // namespace chorus
