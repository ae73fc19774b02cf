#pragma once
/// Collectives of a few ranks that work directly in each other's memory, without a copy into a queue.
///
/// Every rank tells the others the address of its data. In an all-reduce each rank sums its own chunk, reading it from
/// all ranks' data, and writes the sum to all of them. A rank reads (n - 1) / n of the data from others and writes as
/// much to them: the ring's traffic, but without copies into queues and with a single wait at the end. A number's sum
/// has the same bits on whichever rank computes it: it is added in the order of ranks and rounded once. So with two
/// ranks, the one that arrived first, or whose program only waits for this call, may own both chunks. The other rank
/// loses no time, since it would have to wait for the sum anyway.

#include <array>
#include <chorus/comm/algorithms/collective.hpp>
#include <cmath>

namespace chorus::comm {

namespace detail {

/// A rank's first message to the others in a call.
struct Offer {
  Window window = {};
  double scale = 1;
  std::uint32_t fresh = 0;  ///< 1: the window is not mapped yet
  std::uint32_t far = 0;    ///< 1: this rank reads another core's memory slowly
  std::int64_t came = 0;    ///< arrival time of the rank, by the machine's clock, in ns
  std::uint64_t idle = 0;   ///< 1: its program only waits for this call
};

/// Of two ranks the one that owns both chunks; `nobody`: each owns its own. The owner is the rank whose program waits
/// while the other's computes. If both compute, it is the rank that arrived at least 20 us before the other.
inline int the_one_ahead(const Offer& zero, const Offer& one) {
  constexpr std::int64_t at_once = 20'000;  // ns
  if (zero.idle != one.idle) return zero.idle != 0 ? 0 : 1;
  if (zero.idle != 0 || std::abs(zero.came - one.came) < at_once) return nobody;
  return zero.came < one.came ? 0 : 1;
}

/// The data of all ranks in one call.
class InPlace {
 public:
  static constexpr int most_ranks = 8;

  /// `or_sent`: sending gives the same numbers, so the speed of memory reads may decide between the two.
  InPlace(const Collective& c, std::byte* data, std::size_t bytes, bool or_sent) : c_(c), link_(c.link) {
    if (!link_.reaches_peers) return;
    offers_[at(rank())] = {.window = link_.window(data, bytes), .scale = c.reduction.scale};
    auto& own = offers_[at(rank())];
    own.fresh = own.window.key != 0 && !link_.is_mapped(own.window) ? 1 : 0;
    own.far = or_sent && link_.seems_far() ? 1 : 0;
    own.came = std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
    own.idle = link_.may_spin && *link_.may_spin ? 1 : 0;
    tell(reinterpret_cast<const std::byte*>(&own), sizeof own);
    for_others([&](int peer) {
      std::memcpy(&offers_[at(peer)], receive(c_, peer, sizeof(Offer)).data, sizeof(Offer));
      link_.release(peer);
    });
    bool all_show = true, all_near = true, any_fresh = false;
    for (int peer = 0; peer < size(); ++peer) {
      const auto& offer = offers_[at(peer)];
      all_show = all_show && offer.window.key != 0;
      all_near = all_near && offer.far == 0;
      any_fresh = any_fresh || offer.fresh != 0;
    }
    if (!all_show || (!all_near && !any_fresh)) return;
    bool mapped = true;
    data_[at(rank())] = data;
    for_others([&](int peer) {
      data_[at(peer)] = link_.open(peer, offers_[at(peer)].window);
      mapped = mapped && data_[at(peer)] != nullptr;
    });
    if (any_fresh) mapped = all_agree(mapped);
    check<LinkError>(mapped || any_fresh, "a rank's memory, mapped before, is no longer there");
    if (!mapped) link_.reaches_peers = false;
    if (mapped && own.fresh != 0) link_.note_mapped(own.window);
    agreed_ = mapped && all_near;
  }

  /// Whether the call continues in place. All ranks reach the same answer.
  bool agreed() const { return agreed_; }
  std::byte* of(int peer) const { return data_[at(peer)]; }
  double scale_of(int peer) const { return offers_[at(peer)].scale; }

  /// The beginning of a rank's chunk among `count` numbers, the same on all ranks. With more than two ranks all chunks
  /// are equal, since each rank writes its chunk to several.
  std::size_t chunk_begin(int owner, std::size_t count) const {
    const int ahead = size() == 2 ? the_one_ahead(offers_[0], offers_[1]) : nobody;
    if (ahead != nobody) return owner > ahead ? count : 0;
    return count * static_cast<std::size_t>(owner) / static_cast<std::size_t>(size());
  }

  /// Returns when all ranks are here: all sums are ready, and no rank reads this rank's data any more. `sent(peer)`:
  /// the bytes of this rank's data that went to `peer`, whichever rank read or wrote them.
  template <class Sent>
  bool done(const Sent& sent) const {
    for_others([&](int peer) { c_.sent(peer, sent(peer)); });
    tell();
    for_others([&](int peer) {
      receive(c_, peer, 0);
      link_.release(peer);
    });
    return true;
  }

  int rank() const { return link_.rank; }
  int size() const { return link_.size; }
  template <class F>
  void for_others(const F& f) const {
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank()) f(peer);
  }

 private:
  static std::size_t at(int peer) { return static_cast<std::size_t>(peer); }

  void tell(const std::byte* message = nullptr, std::size_t bytes = 0) const {
    for_others([&](int peer) {
      copy_bytes(link_.acquire(peer), message, bytes);
      link_.publish(peer, c_.call, bytes);
    });
  }
  [[gnu::cold]] bool all_agree(bool own) const {
    const auto vote = static_cast<std::byte>(own ? 1 : 0);
    tell(&vote, 1);
    bool all = own;
    for_others([&](int peer) {
      all = *receive(c_, peer, 1).data == std::byte{1} && all;
      link_.release(peer);
    });
    return all;
  }

  const Collective& c_;
  Transport& link_;
  std::array<Offer, most_ranks> offers_;
  std::array<std::byte*, most_ranks> data_{};
  bool agreed_ = false;
};

/// Other ranks' memory is processed in blocks that fit the first-level cache and that memcpy moves with vectors. The
/// group is checked before each block: a rank that has given up waits until the others no longer use its memory.
inline constexpr std::size_t block_bytes = 4096;

inline void copy_in_blocks(const Collective& c, std::byte* out, const std::byte* in, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += block_bytes) {
    c.link.check();
    copy_bytes(out + i, in + i, std::min(block_bytes, bytes - i));
  }
}

/// out := scale_0 data_0 (+) scale_1 data_1 (+) ..., at `begin` of the data; out may be this rank's data. `to_all`:
/// also writes the result at `begin` of every rank's data.
inline void reduce_in_place(const Collective& c, const InPlace& all, std::byte* out, std::size_t begin,
                            std::size_t count, bool to_all) {
  const auto& reduction = c.reduction;
  const auto element = reduction.element;
  alignas(64) std::array<std::byte, block_bytes> partial;
  while (count != 0) {
    c.link.check();
    const auto n = std::min(count, block_bytes / element);
    const auto numbers = [&](int peer) { return all.of(peer) + begin * element; };
    const std::byte* left = numbers(0);
    double scale = all.scale_of(0);
    for (int peer = 1; peer < all.size(); ++peer) {
      std::byte* const to = peer + 1 == all.size() ? out : partial.data();
      reduction.combine_products(to, left, scale, numbers(peer), all.scale_of(peer), n);
      left = to;
      scale = 1;
    }
    if (to_all) all.for_others([&](int peer) { copy_bytes(numbers(peer), out, n * element); });
    out += n * element;
    begin += n;
    count -= n;
  }
}

/// Marks a scope that reads and writes `bytes` of other ranks' memory, and measures its time.
class WorkInPlace {
 public:
  WorkInPlace(Transport& link, std::size_t bytes) : link_(link), bytes_(bytes) { link_.works_in_place(true); }
  ~WorkInPlace() {
    link_.works_in_place(false);
    link_.note_work_in_place(bytes_, Clock::now() - start_);
  }
  WorkInPlace(const WorkInPlace&) = delete;
  WorkInPlace& operator=(const WorkInPlace&) = delete;

 private:
  Transport& link_;
  std::size_t bytes_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace detail

/// data: count numbers, in place. Returns false if the ranks can't, or should not, work in each other's memory; then
/// nothing has changed.
inline bool in_place_all_reduce(const Collective& c, std::byte* data, std::size_t count) {
  const auto element = c.reduction.element;
  // Two numbers have only one sum; for more ranks, the ring adds in another order.
  const detail::InPlace all(c, data, count * element, c.link.size == 2 && !c.chosen);
  if (!all.agreed()) return false;
  const auto chunk = [&](int owner) { return all.chunk_begin(owner + 1, count) - all.chunk_begin(owner, count); };
  const auto begin = all.chunk_begin(all.rank(), count), own = chunk(all.rank());
  if (own != 0) {
    const detail::WorkInPlace work(c.link, 2 * own * element);
    detail::reduce_in_place(c, all, data + begin * element, begin, own, true);
  }
  return all.done([&](int peer) { return (own + chunk(peer)) * element; });
}

/// all: size * count numbers; each rank contributes its own chunk.
inline bool in_place_all_gather(const Collective& c, const std::byte* mine, std::byte* whole, std::size_t count) {
  const auto bytes = count * c.reduction.element;
  const detail::InPlace all(c, const_cast<std::byte*>(mine), bytes, true);
  if (!all.agreed()) return false;
  const auto place = [&](int peer) { return whole + static_cast<std::size_t>(peer) * bytes; };
  const auto from_others = bytes * static_cast<std::size_t>(all.size() - 1);
  {
    const detail::WorkInPlace work(c.link, from_others);
    all.for_others([&](int peer) { detail::copy_in_blocks(c, place(peer), all.of(peer), bytes); });
  }
  if (mine != place(all.rank())) detail::copy_bytes(place(all.rank()), mine, bytes);
  return all.done([&](int) { return bytes; });
}

/// whole: size * count numbers; mine: this rank's chunk of their reduction, possibly at its place in `whole`.
inline bool in_place_reduce_scatter(const Collective& c, const std::byte* whole, std::byte* mine, std::size_t count) {
  const auto element = c.reduction.element, bytes = count * element;
  const auto ranks = static_cast<std::size_t>(c.link.size);
  const detail::InPlace all(c, const_cast<std::byte*>(whole), ranks * bytes, c.link.size == 2);
  if (!all.agreed()) return false;
  {
    const detail::WorkInPlace work(c.link, bytes);
    detail::reduce_in_place(c, all, mine, static_cast<std::size_t>(all.rank()) * count, count, false);
  }
  return all.done([&](int) { return bytes; });
}

}  // namespace chorus::comm
