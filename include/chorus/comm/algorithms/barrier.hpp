#pragma once
/// Barriers: calls that return when every rank has called them.

#include <chorus/comm/algorithms/collective.hpp>
#include <chorus/comm/world.hpp>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

namespace chorus::comm {

/// Dissemination (Hensgen, Finkel and Manber, 1988): after k rounds each rank has heard from 2^k others.
inline void dissemination_barrier(const Collective& c) {
  for (int distance = 1; distance < c.size(); distance *= 2) {
    detail::relay(c, {.to = c.neighbour(distance)}, 0);
    detail::relay(c, {.from = c.neighbour(-distance)}, 0);
  }
}

/// All ranks report to rank 0, which answers each at once, and again when all have reported. At the deadline rank 0
/// knows the missing ranks. The others wait for its second answer as long again, since rank 0 may have been late.
[[gnu::cold]] inline void monitored_barrier(const Collective& c) {
  if (c.link.rank != 0) {
    detail::relay(c, {.to = 0}, 0);
    for (int answer = 0; answer < 2; ++answer) detail::relay(c, {.from = 0}, 0);
    return;
  }
  const auto deadline = Clock::now() + c.link.timeout * 9 / 10;  // before the others' own
  std::vector<int> missing(static_cast<std::size_t>(c.size() - 1));
  for (std::size_t i = 0; i < missing.size(); ++i) missing[i] = static_cast<int>(i) + 1;
  while (!missing.empty() && Clock::now() < deadline) {
    c.link.check_peers();
    const auto before = missing.size();
    std::erase_if(missing, [&](int peer) {
      const bool came = c.link.has_piece(peer);
      if (!came) return false;
      detail::relay(c, {.from = peer}, 0);
      detail::relay(c, {.to = peer}, 0);
      return true;
    });
    if (missing.size() == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::string names;
  for (const int peer : missing) names += cat(names.empty() ? "" : ", ", c.name(peer));
  if (!missing.empty())
    fail<LinkTimeout>(missing.size() == 1 ? "rank " : "ranks ", names, " of ", c.size(), " did not arrive within ",
                      c.link.timeout.count() * 9 / 10, " ms");
  for (int peer = 1; peer < c.size(); ++peer) detail::relay(c, {.to = peer}, 0);
}

}  // namespace chorus::comm
