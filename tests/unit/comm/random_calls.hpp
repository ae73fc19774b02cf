#pragma once
/// Sequences of communicator calls that a seed draws, the numbers that each rank brings, and what the calls have to
/// make of them.

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

/// What carries the calls. `machines`: several of them, played by CHORUS_HOST_ID. `nccl`: its stand-in.
enum class Carrier { shm, tcp, threads, machines, gloo, mpi, nccl };

struct Call {
  Op op = Op::barrier;
  DType dtype = DType::f32;
  ReduceOp how = ReduceOp::sum;
  std::size_t count = 0;
  int root = 0, to = 0;        ///< places; a message's sender is `root`
  bool in_group = false;       ///< all groups that `split` made call it, each for itself
  bool in_place = false;       ///< `mine` is its own place in `all`
  bool later = false;          ///< asynchronous
  std::vector<double> scales;  ///< by rank of the job
  std::uint64_t key = 0;       ///< of its numbers
};

/// Calls whose buffers are there at once.
struct Batch {
  std::vector<Call> calls;
  std::vector<std::size_t> waits;  ///< the order in which they are waited for
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
  stops  // stands still for two seconds
};

struct Program {
  std::uint64_t seed = 0;
  int ranks = 2;
  Carrier carrier = Carrier::shm;
  std::string machines;           ///< by rank, a letter
  bool special = false;           ///< infinities, NaN, -0 and subnormal numbers, too
  std::vector<int> colors, keys;  ///< of `split`; empty: it is not called
  std::vector<Batch> batches;
  std::map<std::string, int> features;

  Fault fault = Fault::none;
  int faulty_rank = -1;
  std::size_t faulty_batch = 0, faulty_call = 0;

  /// Whether a call has such numbers; over others' engines sums of them depend on their order.
  bool special_in(const Call& call) const { return special && (carrier < Carrier::gloo || call.how != ReduceOp::sum); }
  std::string text() const;
};

using Draw = DrawFrom<5>;

/// How one rank treats one of its calls: drawn apart, since others need to know of the memory alone.
struct Habits {
  bool lent;         ///< the data lies in memory of the communicator; over NCCL: of the device
  std::size_t skip;  ///< numbers before it that are no part of it
  int pause;         ///< microseconds before the call
  bool scribbles;    ///< over what it was called with, at once
  int waits;         ///< how: wait(), done(), by the destructor
  bool fresh;        ///< the batch's memory is given back first, and new one made
};
inline Habits habits(const Program& p, const Call& call, int rank) {
  Draw d(call.key * 64 + static_cast<std::uint64_t>(rank));
  // In half of the programs all ranks do the same, so that they often work in place.
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

/// Numbers in [0, several MiB), most of them few: around the lengths at which an algorithm changes.
inline std::size_t draw_count(Draw& d, std::size_t element, std::size_t ranks, bool whole) {
  constexpr std::size_t KiB = 1024;
  const auto near = [&](std::size_t bytes) { return std::max<std::size_t>(bytes / element + d.below(7), 3) - 3; };
  const auto kind = d.below(100);
  const std::size_t parts = whole ? ranks : 1;  // of an all-gather all ranks' numbers count
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
  if (kind < 98) return near(512 * KiB / parts * (whole ? 1 : ranks));  // a segment of shared memory's ring
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
  if (p.carrier == Carrier::nccl && reduces) {  // what it does not reduce
    if (c.dtype == DType::i16 || c.dtype == DType::u16) c.dtype = DType::bfloat16;
    if (c.how != ReduceOp::sum) return c;
  }
  if (reduces && c.dtype >= DType::f16 && d.chance(40)) {
    const bool same = d.chance(50);
    for (auto& scale : c.scales) scale = same ? 1.0 / ranks : d.chance(30) ? 1.0 : (1.0 + d.below(1000)) / 999.0;
  }
  return c;
}

/// `ranks`: how many, where that is given.
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
