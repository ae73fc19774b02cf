#pragma once
/// `Envelope`: the call to which a piece of data belongs.

#include <chorus/comm/engine/engine.hpp>
#include <chorus/comm/transport/fixed_text.hpp>
#include <string>

namespace chorus::comm {

/// The call to which a piece of data belongs. Every piece carries one, and both ends compare them: ranks that call
/// different collectives get an error that names both, not a hang or wrong numbers.
struct Envelope {
  Op op = Op::barrier;
  DType dtype = DType::u8;
  std::uint8_t detail = 0;  ///< a ReduceOp, or the root's rank
  std::uint8_t reserved = 0;
  std::uint32_t sequence = 0;  ///< the number of this collective, or of this message between two ranks
  std::uint64_t count = 0;     ///< numbers of type `dtype` in this rank's call
  friend bool operator==(const Envelope&, const Envelope&) = default;
};
static_assert(is_message<Envelope, 16>);

/// `all_reduce #7 (sum of 1024 F32)`
[[gnu::cold]] inline void append(std::string& out, const Envelope& call) {
  const bool reduces = call.op == Op::all_reduce || call.op == Op::reduce_scatter;
  const bool known = call.dtype <= DType::f64 && (!reduces || call.detail <= static_cast<std::uint8_t>(ReduceOp::max));
  out += name(call.op);
  out += " #";
  chorus::append(out, call.sequence);
  if (call.op >= Op::barrier || !known) return;
  out += " (";
  if (reduces) out.append(name(static_cast<ReduceOp>(call.detail))).append(" of ");
  chorus::append(out, call.count);
  out.append(" ").append(name(call.dtype));
  if (call.op == Op::broadcast) chorus::append(out.append(" from rank "), call.detail);
  out += ')';
}

}  // namespace chorus::comm
