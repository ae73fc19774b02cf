#pragma once
/// Collectives of a few ranks that read each other's memory where it lies, without a copy into a queue.
///
/// Every rank tells the others where its data is. Of an all-reduce it then adds up the chunk that it owns, reading that
/// chunk of all ranks' data, tells the others, and copies the chunks that they have added up. A rank reads 2 (n - 1) /
/// n of the data from others, the ring's traffic; but no number is written twice, nor read from a queue. A number's sum
/// is rounded once, in the order of ranks, wherever it lies.

#include <array>
#include <chorus/comm/ring.hpp>

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {

/// What a rank tells the others first.
struct Offer {
  Window window;
  double scale = 1;
  std::uint32_t fresh = 0;  ///< 1: nobody has mapped the window yet
  std::uint32_t far = 0;    ///< 1: another core's memory takes this rank long to read
};

/// The data of all ranks in one call.
class InPlace {
 public:
  static constexpr int most_ranks = 8;

  /// `or_sent`: sending gives the same numbers, so that how fast memory can be read may decide.
  InPlace(const Ring& ring, std::byte* data, std::size_t bytes, bool or_sent) : ring_(ring), link_(ring.link) {
    offers_[at(rank())] = {.window = link_.window(data, bytes), .scale = ring.reduction.scale};
    auto& own = offers_[at(rank())];
    own.fresh = own.window.key != 0 && link_.shows_first(own.window) ? 1 : 0;
    own.far = or_sent && link_.seems_far() ? 1 : 0;
    tell(reinterpret_cast<const std::byte*>(&own), sizeof own);
    for_others([&](int peer) {
      std::memcpy(&offers_[at(peer)], receive(ring_, peer, sizeof(Offer)).data, sizeof(Offer));
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
    if (!mapped) link_.reads_peers = false;
    agreed_ = mapped && all_near;
  }

  /// Whether the call goes on here. All ranks come to the same answer.
  bool agreed() const { return agreed_; }
  const std::byte* of(int peer) const { return data_[at(peer)]; }
  double scale_of(int peer) const { return offers_[at(peer)].scale; }

  /// One number to all others, and one from each: they are as far as this rank is.
  void tell(const std::byte* message = nullptr, std::size_t bytes = 0) const {
    for_others([&](int peer) {
      copy_bytes(link_.acquire(peer), message, bytes);
      link_.publish(peer, ring_.call, bytes);
    });
  }
  void hear() const {
    for_others([&](int peer) {
      receive(ring_, peer, 0);
      link_.release(peer);
    });
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

  [[gnu::cold]] bool all_agree(bool own) const {
    const auto vote = static_cast<std::byte>(own ? 1 : 0);
    tell(&vote, 1);
    bool all = own;
    for_others([&](int peer) {
      all = *receive(ring_, peer, 1).data == std::byte{1} && all;
      link_.release(peer);
    });
    return all;
  }

  const Ring& ring_;
  Transport& link_;
  std::array<Offer, most_ranks> offers_;
  std::array<const std::byte*, most_ranks> data_{};
  bool agreed_ = false;
};

/// out := scale_0 data_0 (+) scale_1 data_1 (+) ..., at `begin` of the data; out may be this rank's.
inline void reduce_in_place(const Ring& ring, const InPlace& all, std::byte* out, std::size_t begin,
                            std::size_t count) {
  const auto& reduction = ring.reduction;
  const auto element = reduction.element;
  alignas(64) std::array<std::byte, 4096> sum, product;
  while (count != 0) {
    const auto n = std::min(count, sum.size() / element);
    // Products are rounded before they are added, as where they are sent: the sum has the same bits either way.
    const auto part = [&](int peer, std::byte* scaled) -> const std::byte* {
      const auto* const numbers = all.of(peer) + begin * element;
      if (all.scale_of(peer) == 1) return numbers;
      reduction.scaled(scaled, numbers, n, all.scale_of(peer));
      return scaled;
    };
    const std::byte* left = part(0, sum.data());
    for (int peer = 1; peer < all.size(); ++peer) {
      std::byte* const to = peer + 1 == all.size() ? out : sum.data();
      reduction.combine(to, left, part(peer, product.data()), n);
      left = to;
    }
    out += n * element;
    begin += n;
    count -= n;
  }
}

/// Adds up how long a call reads from others, and tells the link.
class ReadingTime {
 public:
  explicit ReadingTime(Transport& link) : link_(link) {}
  ~ReadingTime() { link_.note_reading(bytes_, time_); }
  void start() { start_ = Clock::now(); }
  void stop(std::size_t bytes) {
    time_ += Clock::now() - start_;
    bytes_ += bytes;
  }

 private:
  Transport& link_;
  Clock::time_point start_;
  std::chrono::nanoseconds time_{0};
  std::size_t bytes_ = 0;
};

/// What is long enough that its way counts more than one message more.
inline bool may_read_in_place(const Transport& link, std::size_t bytes) {
  return link.reads_peers && link.size <= InPlace::most_ranks && bytes > std::size_t{64} << 10;
}

}  // namespace detail

/// data: count numbers, in place. Returns false where the ranks can't, or had better not, read each other's memory;
/// then nothing has changed.
inline bool in_place_all_reduce(const Ring& ring, std::byte* data, std::size_t count) {
  const auto element = ring.reduction.element;
  if (!detail::may_read_in_place(ring.link, count * element)) return false;
  // Two numbers have one sum; of more, the ring makes another in another order.
  const detail::InPlace all(ring, data, count * element, ring.link.size == 2);
  if (!all.agreed()) return false;
  const auto ranks = static_cast<std::size_t>(all.size());
  // A rank adds up one segment ahead of what it copies, so that it need not wait for the others. Segments are as long
  // as a second-level cache: what others read has left it, and comes faster from the cache that all cores share.
  const std::size_t longest = (std::size_t{1} << 20) / (ranks * element) * ranks;
  const std::size_t segments = (count + longest - 1) / longest;
  const auto length = [&](std::size_t s) { return std::min(longest, count - s * longest); };
  const auto start = [&](std::size_t s, int c) {
    return s * longest + length(s) * static_cast<std::size_t>(c) / ranks;
  };
  detail::ReadingTime time(ring.link);
  for (std::size_t s = 0; s < segments + 1; ++s) {
    if (s < segments) {
      const auto begin = start(s, all.rank()), end = start(s, all.rank() + 1);
      time.start();
      detail::reduce_in_place(ring, all, data + begin * element, begin, end - begin);
      time.stop((end - begin) * element);
      all.tell();
      trace::sent(all.rank(), ring.traffic, (length(s) + (end - begin) * (ranks - 2)) * element);
    }
    if (s == 0) continue;
    all.hear();
    all.for_others([&](int peer) {
      const auto begin = start(s - 1, peer), end = start(s - 1, peer + 1);
      time.start();
      detail::copy_bytes(data + begin * element, all.of(peer) + begin * element, (end - begin) * element);
      time.stop((end - begin) * element);
    });
  }
  all.tell();  // nobody reads this rank's data any more once all have said so
  all.hear();
  return true;
}

/// all: size * count numbers, of which each rank has brought its own part.
inline bool in_place_all_gather(const Ring& ring, const std::byte* mine, std::byte* whole, std::size_t count) {
  const auto bytes = count * ring.reduction.element;
  if (!detail::may_read_in_place(ring.link, bytes)) return false;
  const detail::InPlace all(ring, const_cast<std::byte*>(mine), bytes, true);
  if (!all.agreed()) return false;
  const auto place = [&](int peer) { return whole + static_cast<std::size_t>(peer) * bytes; };
  detail::ReadingTime time(ring.link);
  time.start();
  all.for_others([&](int peer) { detail::copy_bytes(place(peer), all.of(peer), bytes); });
  time.stop(bytes * static_cast<std::size_t>(all.size() - 1));
  if (mine != place(all.rank())) detail::copy_bytes(place(all.rank()), mine, bytes);
  trace::sent(all.rank(), ring.traffic, bytes * static_cast<std::size_t>(all.size() - 1));
  all.tell();
  all.hear();
  return true;
}

/// whole: size * count numbers; mine: this rank's part of their reduction, which may lie in its place in `whole`.
inline bool in_place_reduce_scatter(const Ring& ring, const std::byte* whole, std::byte* mine, std::size_t count) {
  const auto element = ring.reduction.element, bytes = count * element;
  if (!detail::may_read_in_place(ring.link, bytes)) return false;
  const auto ranks = static_cast<std::size_t>(ring.link.size);
  const detail::InPlace all(ring, const_cast<std::byte*>(whole), ranks * bytes, ring.link.size == 2);
  if (!all.agreed()) return false;
  detail::ReadingTime time(ring.link);
  time.start();
  detail::reduce_in_place(ring, all, mine, static_cast<std::size_t>(all.rank()) * count, count);
  time.stop(bytes);
  trace::sent(all.rank(), ring.traffic, bytes * (ranks - 1));
  all.tell();
  all.hear();
  return true;
}

}  // namespace chorus::inline CHORUS_ABI::comm
