#pragma once
/// `hierarchical_all_reduce`: within machines first, then once between them.
///
/// For D bytes on M machines: in each machine of R ranks a chain sums to the lowest rank, the leader (each of R - 1
/// links carries D). The leaders run a ring all-reduce (each sends 2 (M - 1) / M D), and the same chain carries the
/// sums back (D per link). Between machines 2 (M - 1) D are sent in total, for any R. A flat ring of n = M R ranks
/// sends 2 (n - 1) / n D on each of its M crossings, about M / (M - 1) times as much for many ranks. The gain is
/// latency: 2 (M - 1) + 1 slow steps instead of 2 (n - 1). The cost is D, not D / n, on each link inside a machine.

#include <chorus/comm/algorithms/ring.hpp>
#include <unordered_set>
#include <vector>

namespace chorus::comm {

/// data: count numbers, in place. Sums are the same bits on all ranks.
inline void hierarchical_all_reduce(const Collective& c, std::byte* data, std::size_t count) {
  const auto machines = c.link.machines();
  const int own_machine = machines[static_cast<std::size_t>(c.link.rank)];
  std::vector<int> local, leaders;
  {
    std::unordered_set<int> seen;
    for (int rank = 0; rank < c.link.size; ++rank) {
      const int machine = machines[static_cast<std::size_t>(rank)];
      if (machine == own_machine) local.push_back(rank);
      const bool as_before = rank > 0 && machine == machines[static_cast<std::size_t>(rank - 1)];
      if (!as_before && seen.insert(machine).second) leaders.push_back(rank);  // the first rank of its machine
    }
  }
  const bool leads = local.front() == c.link.rank, ends = local.back() == c.link.rank;
  auto plain = c.reduction;  // contributions are scaled once
  plain.scale = 1;
  const Collective inside{c.link, c.call, c.reduction, c.traffic, local};
  const Collective back{c.link, c.call, plain, c.traffic, local};
  const Collective across{c.link, c.call, plain, c.traffic, leaders};
  const int before = inside.neighbour(-1), after = inside.neighbour(1);
  const auto element = c.reduction.element;
  // The chains use other links than other collectives: so neighbours in the ring first compare their calls.
  detail::relay(c, {.to = c.neighbour(1)}, 0);
  detail::relay(c, {.from = c.neighbour(-1)}, 0);
  do {
    const auto segment = std::min(count, leaders.size() * c.longest_chunk());
    if (local.size() == 1) {
      c.reduction.scaled(data, data, segment, c.reduction.scale);
    } else if (leads) {
      detail::relay(inside, {.from = after, .mine = data, .store = data}, segment);
    } else {
      detail::relay(inside, {.from = ends ? detail::nobody : after, .to = before, .mine = data}, segment);
    }
    if (leads && leaders.size() > 1) ring_all_reduce(across, data, segment);
    c.link.flush();
    if (local.size() > 1) ring_broadcast(back, data, segment, local.front());
    data += segment * element;
    count -= segment;
  } while (count != 0);
}

}  // namespace chorus::comm
