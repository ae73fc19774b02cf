#pragma once
/// Cuts gradients into buckets.

#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/buckets.hpp>
#include <chorus/parallel/ddp/ddp_options.hpp>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// Cuts gradients into buckets, in the order of the flat buffers. By entry: `sends`, whether it is sent; `begins`,
/// whether a bucket begins there. If `begins` is empty, sizes decide.
template <Device D>
[[gnu::cold]] std::vector<Bucket> cut_into_buckets(const nn::FlatParameters<D>& flat, const BucketOptions& options,
                                                   std::span<const char> sends, std::span<const char> begins = {}) {
  constexpr double mib = 1024 * 1024;
  std::vector<Bucket> buckets;
  std::vector<Bucket> open(flat.groups().size());  // one for each dtype
  const auto close = [&](Bucket& bucket) {
    if (!bucket.parameters.empty()) {
      bucket.index = buckets.size();
      buckets.push_back(std::move(bucket));
    }
    bucket = {};
  };
  for (std::size_t i = 0; i < flat.entries().size(); ++i) {
    if (!sends[i]) continue;
    const auto& entry = flat.entries()[i];
    auto& bucket = open[entry.group];
    const auto bytes = (bucket.count + entry.count) * size_of(flat.groups()[entry.group].dtype);
    const bool full =
        begins.empty() ? static_cast<double>(bytes) > mib * options.cap_mb(buckets.size()) : begins[i] != 0;
    const bool gap = bucket.begin + bucket.count != entry.begin;  // a parameter in between isn't sent
    if (full || gap) close(bucket);
    if (bucket.parameters.empty()) bucket.group = entry.group, bucket.begin = entry.begin;
    bucket.parameters.push_back(i);
    bucket.parts.push_back({entry.begin - bucket.begin, entry.parameter().extents_here(), entry.named.name});
    bucket.count += entry.count;
  }
  for (auto& bucket : open) close(bucket);
  return buckets;
}

}  // namespace chorus::ddp
