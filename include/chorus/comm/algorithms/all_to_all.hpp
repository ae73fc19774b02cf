#pragma once
/// All-to-all: every rank has numbers for every other rank (MPI_Alltoall, PyTorch's all_to_all_single).
///
/// The ranks meet in pairs. In round j of n, rank r and rank (j - r) mod n exchange their messages, the lower rank
/// first: no message waits for room, whatever an engine can keep of it. So it runs over every communicator, by send and
/// recv alone. A rank sends (n - 1)/n of its numbers, in n - 1 messages.

#include <chorus/comm/communicator.hpp>
#include <chorus/core/error.hpp>
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <type_traits>
#include <vector>

namespace chorus::comm {

namespace detail {
inline void check_parts(const char* what, std::span<const std::size_t> counts, std::size_t numbers, int ranks) {
  const auto sum = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  check<UsageError>(counts.size() == static_cast<std::size_t>(ranks) && sum == numbers, "all_to_all_v: expected ",
                    ranks, " counts of numbers to ", what, " that add up to ", numbers, ", got ", counts.size(),
                    " with the sum ", sum);
}
}  // namespace detail

/// in: `sends[r]` numbers for each rank r, one rank's after the other's -> out: `receives[r]` numbers from each rank r,
/// likewise (MPI_Alltoallv, all_to_all_single with split sizes). Counts may be 0. `in` and `out` may not overlap.
/// Throws UsageError, before data moves, unless there is a count for each rank and they add up to the spans' sizes;
/// CommError if a rank sends another count than this one expects.
template <Communicator C, Scalar T, std::size_t E>
void all_to_all_v(C& ranks, std::span<const std::type_identity_t<T>> in, std::span<const std::size_t> sends,
                  std::span<T, E> out, std::span<const std::size_t> receives, CollectiveOptions options = {}) {
  detail::check_parts("send", sends, in.size(), ranks.size());
  detail::check_parts("receive", receives, out.size(), ranks.size());
  options.part_of = "all_to_all";
  const auto n = sends.size(), me = static_cast<std::size_t>(ranks.rank());
  check<UsageError>(sends[me] == receives[me], "all_to_all_v: expected one count for what stays on this rank, got ",
                    sends[me], " numbers to send and ", receives[me], " to receive");
  const auto part = [](auto numbers, std::span<const std::size_t> counts, std::size_t rank) {
    return numbers.subspan(std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(rank),
                                           std::size_t{0}),
                           counts[rank]);
  };
  const std::span<T> all(out);
  const auto own = part(in, sends, me);
  std::copy(own.begin(), own.end(), part(all, receives, me).begin());
  for (std::size_t round = 0; round < n; ++round) {
    const auto peer = (round + n - me) % n;
    if (peer == me) continue;
    const auto send = [&] { ranks.send(part(in, sends, peer), static_cast<int>(peer), options); };
    if (me < peer) send();
    ranks.recv(part(all, receives, peer), static_cast<int>(peer), options);
    if (me > peer) send();
  }
}

/// The same with equal counts: in and out have size() parts each. Throws UsageError unless they have one size, which
/// the number of ranks divides.
template <Communicator C, Scalar T, std::size_t E>
void all_to_all(C& ranks, std::span<const std::type_identity_t<T>> in, std::span<T, E> out,
                const CollectiveOptions& options = {}) {
  const auto n = static_cast<std::size_t>(ranks.size());
  check<UsageError>(in.size() == out.size() && in.size() % n == 0, "all_to_all: expected two spans of one size, a ",
                    "multiple of ", n, " ranks, got ", in.size(), " and ", out.size(), " numbers");
  const std::vector<std::size_t> counts(n, in.size() / n);
  all_to_all_v(ranks, in, std::span(counts), out, std::span(counts), options);
}

}  // namespace chorus::comm
