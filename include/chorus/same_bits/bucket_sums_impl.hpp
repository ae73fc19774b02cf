#pragma once
/// How the ranks' sums are added up in the order of the tree.

#include <chorus/comm/communicator.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/learned_order.hpp>
#include <chorus/same_bits/bucket_sums.hpp>
#include <chorus/same_bits/gradient_tree.hpp>
#include <chorus/same_bits/sums_of_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

namespace chorus::same_bits {

template <Device D, class Communicator>
void BucketSums<D, Communicator>::start(ddp::Bucket& bucket) {
  for (const std::size_t i : bucket.parameters)
    check<UsageError>(shards_ == nullptr || !core_.flat.entries()[i].named.handle.shared()->has_gradient_hooks(),
                      core_.where(), "SameBits: a hook on '", core_.name(i), "' needs the whole batch's gradient, and ",
                      "each rank gets a part: expected a policy whose ranks have whole gradients");
  if (core_.ranks.size() == 1) return;
  if (bucket.index == 0) share_out();
  if (exchanges_.size() <= bucket.index) exchanges_.resize(bucket.index + 1);
  if (copies_ > 1 && bucket.index > 0) add(core_.buckets.all()[bucket.index - 1]);
  ddp::with_type(core_.dtype(bucket), core_.gradients(bucket),
                 [&]<class T>(T*) { exchange<T>(bucket); });
}

template <Device D, class Communicator>
void BucketSums<D, Communicator>::finish(ddp::Bucket& bucket) {
  if (core_.ranks.size() == 1) return;
  add(bucket);
  for (comm::Work& work : exchanges_[bucket.index].work) work.wait();
  exchanges_[bucket.index] = {.added = true};
}

template <Device D, class Communicator>
template <class T>
void BucketSums<D, Communicator>::exchange(const ddp::Bucket& bucket) {
  Exchange& all = exchanges_[bucket.index];
  all.added = false;
  const std::size_t ranks = sums_.size(), me = rank(), mine = piece(bucket, me).count;
  std::size_t others = 0;
  for (std::size_t r = 0; r < ranks; ++r) others += r == me ? 0 : sums_[r].size();
  const MemoryScope scope(trace::Memory::buckets);
  all.received = Storage<D>(core_.parameter(bucket.parameters.front()).where(), others * mine * sizeof(T));
  auto* free = static_cast<T*>(all.received.data());
  const auto own = [&](std::size_t k, const Piece& of) {
    return reinterpret_cast<T*>(tree_.sum(k, bucket.group, bucket.begin)) + of.begin;
  };
  for (std::size_t k = 0; k < sums_[me].size(); ++k) all.sent.push_back(tree_.memory(k, bucket.group));
  all.sums.resize(ranks);
  for (std::size_t r = 0; r < ranks; ++r)
    for (std::size_t k = 0; k < sums_[r].size(); ++k) {
      all.sums[r].push_back(reinterpret_cast<std::byte*>(r == me ? own(k, piece(bucket, me)) : free));
      if (r != me) free += mine;
    }
  const bool now = is_last(bucket);
  for (std::size_t round = 0; round < ranks; ++round) {
    const std::size_t peer = (round + ranks - me) % ranks;
    if (peer == me) continue;
    const auto send = [&] {
      const Piece theirs = piece(bucket, peer);
      for (std::size_t k = 0; k < sums_[me].size() && theirs.count > 0; ++k) {
        const std::span<const T> numbers(own(k, theirs), theirs.count);
        if (now)
          core_.ranks.send(numbers, static_cast<int>(peer), options(bucket));
        else
          all.work.push_back(core_.ranks.send_async(numbers, static_cast<int>(peer), options(bucket)));
      }
    };
    if (me < peer) send();
    for (std::size_t k = 0; k < sums_[peer].size() && mine > 0; ++k) {
      const std::span<T> numbers(reinterpret_cast<T*>(all.sums[peer][k]), mine);
      if (now)
        core_.ranks.recv(numbers, static_cast<int>(peer), options(bucket));
      else
        all.work.push_back(core_.ranks.recv_async(numbers, static_cast<int>(peer), options(bucket)));
    }
    if (me > peer) send();
  }
}

template <Device D, class Communicator>
void BucketSums<D, Communicator>::add(ddp::Bucket& bucket) {
  Exchange& all = exchanges_[bucket.index];
  if (std::exchange(all.added, true)) return;
  for (comm::Work& work : all.work) work.wait();
  all.work.clear();
  const auto [begin, count] = piece(bucket, rank());
  add_up(
      sums_, [&](std::size_t r, std::size_t k) { return all.sums[r][k]; },
      core_.parameter(bucket.parameters.front()).where(), core_.dtype(bucket), count,
      core_.gradients(bucket) + begin * size_of(core_.dtype(bucket)));
  if (copies_ > 1)
    ddp::with_type(core_.dtype(bucket), core_.gradients(bucket),
                   [&]<class T>(T* gradients) { gather(bucket, gradients); });
}

template <Device D, class Communicator>
template <class T>
void BucketSums<D, Communicator>::gather(const ddp::Bucket& bucket, T* gradients) {
  auto& work = exchanges_[bucket.index].work;
  Communicator& replicas = parts_ == 1 ? core_.ranks : *replicas_;
  const auto [begin, count] = part(bucket, rank());
  const std::size_t each = count / copies_, rest = count % copies_;
  const auto own = std::span<const T>(gradients + begin + static_cast<std::size_t>(replicas.rank()) * each, each);
  const std::span<T> whole(gradients + begin, each * copies_), last(gradients + begin + each * copies_, rest);
  if (each > 0 && is_last(bucket))
    replicas.all_gather(own, whole, options(bucket));
  else if (each > 0)
    work.push_back(replicas.all_gather_async(own, whole, options(bucket)));
  if (rest > 0)
    work.push_back(replicas.broadcast_async(last, static_cast<int>(copies_) - 1, options(bucket)));
}

template <Device D, class Communicator>
void BucketSums<D, Communicator>::share_out() {
  const auto ranks = static_cast<std::size_t>(core_.ranks.size());
  sums_ = sums_of_ranks(shares_, ranks, static_cast<std::size_t>(core_.shares.batch()));
  // Until the order of the buckets is learned, all ranks get whole buckets: see GradientParts.
  const auto* const order = core_.template find<ddp::LearnedOrder<D, Communicator>>();
  const bool whole = shards_ == nullptr || (order != nullptr && !order->learned());
  parts_ = whole ? 1 : static_cast<std::size_t>(shards_->size());
  copies_ = ranks / parts_;
}

template <Device D, class Communicator>
auto BucketSums<D, Communicator>::part(const ddp::Bucket& bucket, std::size_t rank) const -> Piece {
  const auto [begin, end] = ddp::part_of(bucket.count, rank % parts_, parts_);
  return {begin, end - begin};
}

template <Device D, class Communicator>
auto BucketSums<D, Communicator>::piece(const ddp::Bucket& bucket, std::size_t rank) const -> Piece {
  const Piece whole = part(bucket, rank);
  const auto [begin, end] = ddp::part_of(whole.count, rank / parts_, copies_);
  return {whole.begin + begin, end - begin};
}

}  // namespace chorus::same_bits
