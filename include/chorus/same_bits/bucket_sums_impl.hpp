#pragma once
/// How the ranks' sums are added up in the order of the tree.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/same_bits/bucket_sums.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/sums_of_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace chorus::same_bits {

template <Device D, class Communicator>
void BucketSums<D, Communicator>::start(ddp::Bucket& bucket) {
  if (core_.ranks.size() == 1) return;
  if (bucket.index == 0) share_out();
  if (gathered_.size() <= bucket.index) gathered_.resize(bucket.index + 1);
  const std::size_t bytes = core_.bytes(bucket), ranks = sums_.size();
  auto& [own, all] = gathered_[bucket.index];
  const D device = core_.parameter(bucket.parameters.front()).where();
  const MemoryScope scope(trace::Memory::buckets);
  if (all.bytes() != ranks * most_ * bytes) all = Storage<D>(device, ranks * most_ * bytes);
  const std::byte* mine = core_.gradients(bucket);
  if (most_ > 1 || tree_.sums().empty()) {
    if (own.bytes() != most_ * bytes) own = Storage<D>(device, most_ * bytes);
    auto* const to = static_cast<std::byte*>(own.data());
    for (std::size_t k = 0; k < tree_.sums().size(); ++k)
      copy_bytes(device, to + k * bytes, device, tree_.sum(k, bucket.group, bucket.begin), bytes);
    if (tree_.sums().size() < most_)  // sent but not read
      zero_bytes(device, to + tree_.sums().size() * bytes, (most_ - tree_.sums().size()) * bytes);
    mine = to;
  }
  const bool last = bucket.index + 1 == core_.buckets.all().size();
  const comm::CollectiveOptions options{.traffic = trace::Traffic::gradients, .bucket = static_cast<int>(bucket.index)};
  ddp::with_type(core_.dtype(bucket), all.data(), [&]<class T>(T* to) {
    const std::span<const T> from(reinterpret_cast<const T*>(mine), most_ * bucket.count);
    const std::span<T> everything(to, ranks * most_ * bucket.count);
    if (std::is_same_v<D, Cpu> && last)
      core_.ranks.all_gather(from, everything, options);
    else
      bucket.work = core_.ranks.all_gather_async(from, everything, options);
  });
}

template <Device D, class Communicator>
void BucketSums<D, Communicator>::finish(ddp::Bucket& bucket) {
  bucket.work.wait();
  if (core_.ranks.size() == 1) return;
  const std::size_t bytes = core_.bytes(bucket);
  const D device = core_.parameter(bucket.parameters.front()).where();
  auto* const all = static_cast<std::byte*>(gathered_[bucket.index].all.data());
  add_up(
      sums_, [&](std::size_t rank, std::size_t k) { return all + (rank * most_ + k) * bytes; }, device,
      core_.dtype(bucket), bucket.count, core_.gradients(bucket));
}

template <Device D, class Communicator>
void BucketSums<D, Communicator>::share_out() {
  sums_ = sums_of_ranks(shares_, static_cast<std::size_t>(core_.ranks.size()),
                        static_cast<std::size_t>(core_.shares.batch()));
  most_ = 1;
  for (const auto& of_rank : sums_) most_ = std::max(most_, of_rank.size());
}

}  // namespace chorus::same_bits
