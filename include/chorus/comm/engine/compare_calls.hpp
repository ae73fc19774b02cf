#pragma once
/// Compares calls before any data moves, for engines that carry data without envelopes: MPI and gloo.

#include <chorus/comm/transport/envelope.hpp>
#include <chorus/core/environment.hpp>

namespace chorus::comm {

/// Whether MPI and gloo compare the ranks' calls, as chorus' own engines always do: unless CHORUS_COMPARE_CALLS is 0 on
/// all ranks.
inline bool compares_calls() { return chorus::detail::env_switch("CHORUS_COMPARE_CALLS", true); }

/// Sends this call's envelope over `link` and compares the received ones. When it returns, all ranks are in this call
/// (the dissemination barrier of Hensgen, Finkel and Manber, 1988: each rank sends one envelope in each of log2(ranks)
/// rounds). For a message the receiver compares; if a send waits for its receiver anyway, both ends compare. Throws
/// CommError with the other rank's call. `link` has
///   exchange(to, envelope, from) -> the envelope that came; sends_wait; where they don't also
///   send(to, envelope); receive(from) -> envelope
template <class Link>
void compare_calls(Link& link, const Call& call, const Envelope& mine, int rank, int size) {
  const auto compare = [&](int from, const Envelope& theirs) {
    check<CommError>(theirs == mine, "rank ", from, " is in a different call, ", theirs);
  };
  if (call.op == Op::message) {
    if constexpr (Link::sends_wait) return compare(call.peer, link.exchange(call.peer, mine, call.peer));
    else if (call.receives) return compare(call.peer, link.receive(call.peer));
    else return link.send(call.peer, mine);
  }
  for (int step = 1; step < size; step *= 2) {
    const int from = (rank - step + size) % size;
    compare(from, link.exchange((rank + step) % size, mine, from));
  }
}

}  // namespace chorus::comm
