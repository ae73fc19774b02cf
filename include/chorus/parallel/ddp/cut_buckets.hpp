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

/// Cuts gradients into buckets by the rule `begins`, in the order of the flat buffers. `sends`, by entry: whether it is
/// sent.
template <Device D>
[[gnu::cold]] std::vector<Bucket> cut_into_buckets(const nn::FlatParameters<D>& flat, const CutBuckets& begins,
                                                   std::span<const char> sends) {
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
    const auto size = size_of(flat.groups()[entry.group].dtype);
    const bool full = begins({entry.named.name, i, entry.count * size, buckets.size(), bucket.count * size});
    const bool gap = bucket.begin + bucket.count != entry.begin;  // a parameter that isn't sent lies between
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
