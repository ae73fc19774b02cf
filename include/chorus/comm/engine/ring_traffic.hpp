#pragma once
/// Counts the bytes of engines whose libraries choose their algorithms: MPI, gloo, NCCL.

#include <chorus/comm/engine/engine.hpp>
#include <chorus/core/trace.hpp>
#include <cstddef>
#include <vector>

namespace chorus::comm {

/// Counts this rank's bytes in a call around a ring, to the next rank. `members`: see World.
inline void count_ring_traffic(const Call& call, int rank, int size, const std::vector<int>& members) {
  const auto n = static_cast<std::size_t>(size), others = n - 1;
  std::size_t numbers = 0;
  if (call.op == Op::all_reduce) numbers = 2 * others * call.count / n;
  if (call.op == Op::all_gather || call.op == Op::reduce_scatter) numbers = others * call.count;
  if (call.op == Op::broadcast && (rank + 1) % size != call.peer) numbers = call.count;
  if (call.op == Op::message && !call.receives) numbers = call.count;
  const auto in_job = [&](int r) { return members.empty() ? r : members[static_cast<std::size_t>(r)]; };
  trace::sent(in_job(rank), in_job(call.op == Op::message ? call.peer : (rank + 1) % size), call.traffic,
              numbers * call.reduction.element);
}

}  // namespace chorus::comm
