#pragma once
/// Seeds draw sequences of communicator calls and each rank's numbers; the expected results are computed.

#include <chorus/comm/engine/engine.hpp>
#include <map>
#include <string>
#include <vector>

#include "../random_draw.hpp"

namespace test::calls {

namespace ch = chorus;
using ch::DType;
using ch::comm::Op;
using ch::comm::ReduceOp;

/// The transport. `machines`: several machines, simulated with CHORUS_HOST_ID. `nccl`: its stand-in.
enum class Carrier { shm, tcp, threads, machines, gloo, mpi, nccl };

struct Call {
  Op op = Op::barrier;
  DType dtype = DType::f32;
  ReduceOp how = ReduceOp::sum;
  std::size_t count = 0;
  int root = 0, to = 0;        ///< ranks in the group; a message's sender is `root`
  bool in_group = false;       ///< each group that `split` made makes the call
  bool in_place = false;       ///< `mine` is this rank's part of `all`
  bool later = false;          ///< asynchronous
  std::vector<double> scales;  ///< by rank of the job
  std::uint64_t key = 0;       ///< the seed of its numbers
};

/// Calls that run at the same time, each with its own buffers.
struct Batch {
  std::vector<Call> calls;
  std::vector<std::size_t> waits;  ///< the order in which the calls are waited for
};

enum class Fault {
  none,
  other_op,
  other_count,
  other_type,
  other_root,
  leaves_out,
  swaps,
  is_killed,
  aborts,
  aborts_meanwhile,
  throws,
  stops  // sleeps for two seconds
};

struct Program {
  std::uint64_t seed = 0;
  int ranks = 2;
  Carrier carrier = Carrier::shm;
  std::string machines;           ///< by rank, a letter
  bool special = false;           ///< with infinities, NaN, -0 and subnormal numbers
  std::vector<int> colors, keys;  ///< for `split`; empty: no call of it
  std::vector<Batch> batches;
  std::map<std::string, int> features;

  Fault fault = Fault::none;
  int faulty_rank = -1;
  std::size_t faulty_batch = 0, faulty_call = 0;

  /// Whether a call has special numbers. Not for sums over foreign backends: their results depend on the order.
  bool special_in(const Call& call) const { return special && (carrier < Carrier::gloo || call.how != ReduceOp::sum); }
  std::string text() const;
};

using Draw = DrawFrom<5>;

/// How one rank makes a call. Drawn separately: other ranks need to know only `lent`.
struct Habits {
  bool lent;         ///< the data is in memory that the communicator allocated; over NCCL: on the device
  std::size_t skip;  ///< numbers before the data that are not part of it
  int pause;         ///< microseconds before the call
  bool scribbles;    ///< overwrites its inputs right after the call
  int waits;         ///< with wait(), done() or the destructor
  bool fresh;        ///< frees the batch's memory first, and allocates new memory
};
inline Habits habits(const Program& p, const Call& call, int rank) {
  Draw d(call.key * 64 + static_cast<std::uint64_t>(rank));
  // In half of the programs all ranks have the same habits, so that they often work in place.
  const bool together = p.seed % 2 == 0 || p.carrier == Carrier::nccl;
  Draw all(call.key * 64 + 63);
  Habits h{};
  h.lent = (together ? all : d).chance(together ? 70 : 85);
  h.skip = d.chance(50) ? 0 : d.below(70);
  h.pause = d.chance(80) ? 0 : static_cast<int>(d.below(3000));
  h.scribbles = d.chance(50);
  h.waits = static_cast<int>(d.below(4));
  h.fresh = d.chance(20);
  return h;
}

/// A count of up to several MiB, usually small, often near a size at which the algorithm changes.
inline std::size_t draw_count(Draw& d, std::size_t element, std::size_t ranks, bool whole) {
  constexpr std::size_t KiB = 1024;
  const auto near = [&](std::size_t bytes) { return std::max<std::size_t>(bytes / element + d.below(7), 3) - 3; };
  const auto kind = d.below(100);
  const std::size_t parts = whole ? ranks : 1;  // an all-gather's size is that of all ranks
  if (kind < 6) return 0;
  if (kind < 14) return 1;
  if (kind < 24) return d.below(static_cast<std::uint32_t>(3 * ranks));
  if (kind < 40) return d.below(1000);
  if (kind < 56) return near(4 * KiB);
  if (kind < 62) return near(32 * KiB);
  if (kind < 72) return near(64 * KiB / parts);
  if (kind < 80) return near(128 * KiB / parts);
  if (kind < 88) return near(256 * KiB / parts);
  if (kind < 94) return d.below(static_cast<std::uint32_t>(400 * KiB / element / parts));
  if (kind < 98) return near(512 * KiB / parts * (whole ? 1 : ranks));  // a segment of the shared-memory ring
  return near((600 * KiB + d.below(d.chance(20) ? 3000 : 300) * KiB) / parts);
}

inline Call draw_call(Draw& d, const Program& p, std::uint64_t key) {
  Call c;
  c.key = key;
  c.op =
      d.one_of<Op>({Op::all_reduce, Op::all_reduce, Op::all_reduce, Op::broadcast, Op::all_gather, Op::reduce_scatter,
                    Op::reduce_scatter, Op::message, Op::message, Op::barrier, Op::monitored_barrier});
  if (c.op == Op::monitored_barrier && d.chance(70)) c.op = Op::all_gather;
  c.dtype = static_cast<DType>(d.below(13));
  if (d.chance(30)) c.dtype = DType::f32;
  const auto ranks = static_cast<std::uint32_t>(p.ranks);
  const bool whole = c.op == Op::all_gather || c.op == Op::reduce_scatter;
  c.count = draw_count(d, ch::size_of(c.dtype), ranks, whole);
  c.how = d.chance(60) ? ReduceOp::sum : static_cast<ReduceOp>(d.below(3));
  c.root = static_cast<int>(d.below(ranks));
  c.to = static_cast<int>(d.below(ranks));
  c.in_group = !p.colors.empty() && d.chance(35);
  c.in_place = d.chance(40);
  c.later = d.chance(60) && c.op != Op::monitored_barrier;
  c.scales.assign(ranks, 1.0);
  const bool reduces = c.op == Op::all_reduce || c.op == Op::reduce_scatter;
  if (p.carrier == Carrier::nccl && reduces) {  // NCCL does not reduce these types
    if (c.dtype == DType::i16 || c.dtype == DType::u16) c.dtype = DType::bfloat16;
    if (c.how != ReduceOp::sum) return c;
  }
  if (reduces && c.dtype >= DType::f16 && d.chance(40)) {
    const bool same = d.chance(50);
    for (auto& scale : c.scales) scale = same ? 1.0 / ranks : d.chance(30) ? 1.0 : (1.0 + d.below(1000)) / 999.0;
  }
  return c;
}

/// `ranks`: the number of ranks; 0 draws it.
inline Program draw(std::uint64_t seed, const std::vector<Carrier>& carriers, int ranks = 0) {
  Draw d(seed);
  Program p;
  p.seed = seed;
  p.ranks = ranks > 0 ? ranks : static_cast<int>(2 + d.below(4));
  p.carrier = d.one_of(carriers);
  for (int rank = 0; rank < p.ranks; ++rank) p.machines += static_cast<char>('a' + d.below(3));
  p.special = d.chance(25);
  if (d.chance(40)) {
    const auto colors = 1 + d.below(2);
    for (int rank = 0; rank < p.ranks; ++rank) {
      p.colors.push_back(static_cast<int>(d.below(colors)));
      p.keys.push_back(d.chance(50) ? 0 : -rank);
    }
  }
  const auto wanted = 20 + d.below(40);
  for (std::uint32_t drawn = 0; drawn < wanted;) {
    Batch batch;
    const auto calls = d.chance(50) ? 1 : 2 + d.below(5);
    for (std::uint32_t i = 0; i < calls; ++i) {
      batch.calls.push_back(draw_call(d, p, seed * 1000 + drawn++));
      batch.waits.insert(batch.waits.begin() + d.below(i + 1), i);
    }
    p.batches.push_back(batch);
  }
  constexpr const char* names[] = {"shm", "tcp", "threads", "machines", "gloo", "mpi", "nccl"};
  ++p.features[ch::cat("over ", names[static_cast<int>(p.carrier)])];
  p.features["split"] = !p.colors.empty();
  p.features["special numbers"] = p.special;
  for (const auto& batch : p.batches)
    for (const auto& call : batch.calls) ++p.features[std::string(ch::comm::name(call.op))];
  return p;
}

inline std::string Program::text() const {
  std::string out = ch::cat("seed ", seed, ": ", ranks, " ranks, carrier ", static_cast<int>(carrier), ", machines ",
                            machines, special ? ", special" : "", "; split:");
  for (std::size_t i = 0; i < colors.size(); ++i) out += ch::cat(" ", colors[i], "/", keys[i]);
  if (fault != Fault::none)
    out +=
        ch::cat("; fault ", static_cast<int>(fault), " of rank ", faulty_rank, " in ", faulty_batch, ".", faulty_call);
  for (std::size_t i = 0; i < batches.size(); ++i)
    for (std::size_t j = 0; j < batches[i].calls.size(); ++j) {
      const auto& c = batches[i].calls[j];
      out += ch::cat("\n", i, ".", j, " ", ch::comm::name(c.op), " ", c.how, " ", c.dtype, " x ", c.count, " root ",
                     c.root, c.op == Op::message ? ch::cat(" to ", c.to) : "", c.in_group ? ", in group" : "",
                     c.in_place ? ", in place" : "", c.later ? ", later" : "", " scale ", c.scales[0]);
    }
  return out + "\n";
}

}  // namespace test::calls
