#pragma once
/// `direct_all_reduce`: the ring's traffic in two steps instead of 2 (n - 1), for a few ranks with links between all.
///
/// Data is cut into one chunk per rank. Every rank sends each chunk to its owner, the rank of that number. The owner
/// adds them in the order of ranks and sends the sum to all. A rank sends n - 1 chunks in each step, 2 (n - 1) / n of
/// the data, as in the ring. Two ranks send each other all their data, and both add: one step, the same bytes. A
/// number's sum is rounded in the order of ranks, independent of its place. The difference from the ring: there n links
/// are busy, here all n (n - 1), which costs queues and, in a network, contention.

#include <array>
#include <chorus/comm/algorithms/collective.hpp>

namespace chorus::comm {

/// The number of pieces that a queue has to hold.
inline constexpr std::size_t direct_queue_pieces = 7;

namespace detail {

/// rank 0's number is the left operand on both ranks, so that they get the same bits.
inline void exchange_all_reduce(const Collective& c, std::byte* data, std::size_t count) {
  const auto& reduction = c.reduction;
  const auto element = reduction.element, per_piece = c.longest_piece(count);
  const int peer = 1 - c.link.rank;
  const bool left = c.link.rank == 0;
  std::size_t sent = 0, done = 0;
  const auto send = [&] {
    const auto n = std::min(count - sent, per_piece), bytes = n * element;
    const auto mine = data + sent * element, slot = c.link.acquire(peer);
    // Both ranks round the product before they add: a fused multiply-add on one of them would give other bits.
    if (reduction.scale != 1) reduction.scaled(mine, mine, n, reduction.scale);
    c.link.fill(peer, slot, mine, bytes);
    c.link.publish(peer, c.call, bytes);
    c.sent(peer, bytes);
    sent += n;
  };
  send();
  do {  // one piece ahead, so that the peer never waits for this rank's additions
    if (sent < count) send();
    const auto n = std::min(count - done, per_piece);
    const auto mine = data + done * element;
    const auto* theirs = receive(c, peer, n * element).data;
    reduction.combine(mine, left ? mine : theirs, left ? theirs : mine, n);
    c.link.release(peer);
    done += n;
  } while (done < count);
}

/// One block of data, of which each rank owns at most one piece.
class DirectBlock {
 public:
  DirectBlock(const Collective& c, std::byte* data, std::size_t count)
      : c_(c), data_(data), count_(count), element_(c.reduction.element) {}

  /// Sends each owner its chunk.
  void contribute() const {
    for (int owner = 0; owner < size(); ++owner) {
      if (owner == rank()) continue;
      std::byte* const slot = c_.link.acquire(owner);
      c_.reduction.scaled(slot, at(owner), length(owner), c_.reduction.scale);
      send(owner, length(owner));
    }
  }

  /// Adds the contributions to this rank's own chunk and sends the sum to all. It is built in the first peer's slot.
  void reduce() const {
    const auto own = length(rank()), bytes = own * element_;
    const double scale = c_.reduction.scale;
    // The others have scaled their own chunks, too: the sum does not depend on the owner.
    if (scale != 1) c_.reduction.scaled(at(rank()), at(rank()), own, scale);
    const int first = rank() == 0 ? 1 : 0;
    std::byte* const sum = c_.link.acquire(first);
    const std::byte* left = nullptr;
    for (int from = 0; from < size(); ++from) {
      const bool mine = from == rank();
      const std::byte* right = mine ? at(rank()) : receive(c_, from, bytes).data;
      if (left != nullptr) {
        c_.reduction.combine(sum, left, right, own);
      } else if (mine) {
        copy_bytes(sum, right, bytes);
      }
      if (from == 1 && first == 0) c_.link.release(0);  // rank 0's piece was the left side so far
      if (!mine && from != 0) c_.link.release(from);
      left = left == nullptr && !mine ? right : sum;
    }
    copy_bytes(at(rank()), sum, bytes);
    for (int to = first + 1; to < size(); ++to)
      if (to != rank()) c_.link.fill(to, c_.link.acquire(to), sum, bytes);
    for (int to = 0; to < size(); ++to)
      if (to != rank()) send(to, own);
  }

  /// Receives the other owners' sums.
  void collect() const {
    for (int owner = 0; owner < size(); ++owner) {
      if (owner == rank()) continue;
      const auto bytes = length(owner) * element_;
      copy_bytes(at(owner), receive(c_, owner, bytes).data, bytes);
      c_.link.release(owner);
    }
  }

 private:
  int rank() const { return c_.link.rank; }
  int size() const { return c_.link.size; }
  std::size_t start(int owner) const {
    return count_ * static_cast<std::size_t>(owner) / static_cast<std::size_t>(size());
  }
  std::size_t length(int owner) const { return start(owner + 1) - start(owner); }
  std::byte* at(int owner) const { return data_ + start(owner) * element_; }
  void send(int to, std::size_t numbers) const {
    c_.link.publish(to, c_.call, numbers * element_);
    c_.sent(to, numbers * element_);
  }

  const Collective& c_;
  std::byte* data_;
  std::size_t count_, element_;
};

}  // namespace detail

/// data: count numbers, in place. Bytes sent: 2 (n - 1) / n of the data, to within n - 2 numbers.
inline void direct_all_reduce(const Collective& c, std::byte* data, std::size_t count) {
  if (c.link.size == 2) return detail::exchange_all_reduce(c, data, count);
  const auto element = c.reduction.element;
  const auto longest = static_cast<std::size_t>(c.link.size) * (c.link.piece_bytes / element);
  const auto blocks = std::max<std::size_t>(1, (count + longest - 1) / longest);
  const auto block = [&](std::size_t i) {
    return detail::DirectBlock(c, data + i * longest * element, std::min(longest, count - i * longest));
  };
  // Three blocks are under way at once. Up to 7 pieces wait in a queue: chunks and sums of blocks that a slower rank
  // has not read yet. With room for them no ring of ranks waits for room.
  check<LinkError>(c.link.queue_pieces >= direct_queue_pieces, "direct_all_reduce: queues of ", c.link.queue_pieces,
                   " pieces");
  for (std::size_t i = 0; i < blocks + 2; ++i) {
    if (i < blocks) block(i).contribute();
    if (i >= 1 && i - 1 < blocks) block(i - 1).reduce();
    if (i >= 2) block(i - 2).collect();
  }
}

}  // namespace chorus::comm
