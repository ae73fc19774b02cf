#pragma once
/// `TracedCall`: the name and the fields of a collective call or a message in a trace.

#include <chorus/comm/engine/flight_recorder.hpp>
#include <chorus/comm/transport/envelope.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/core/trace_listener.hpp>
#include <cstddef>
#include <string>
#include <vector>

namespace chorus::comm {

struct TracedCall {
  std::string name, args;  ///< args: fields of a JSON object

  /// `members`, see World: set if the group is not the whole job.
  [[gnu::cold]] TracedCall(const NamedCall& call, trace::Traffic traffic, std::size_t bytes,
                           const std::vector<int>& members = {}) {
    const auto& envelope = call.envelope;
    const auto op = comm::name(envelope.op);
    const int peer = members.empty() ? call.peer : members[static_cast<std::size_t>(call.peer)];
    name = envelope.op == Op::message ? cat(op, call.receives ? " from " : " to ", peer)
           : call.bucket >= 0         ? cat(op, ", bucket ", call.bucket)
           : call.unit >= 0           ? cat(op, ", unit ", call.unit)
                                      : std::string(op);
    if (call.part_of != nullptr) name += cat(", ", call.part_of);
    chorus::detail::JsonObject fields;
    fields.field("op", op).field("sequence", envelope.sequence).field("traffic", trace::name(traffic));
    fields.field("bytes", bytes).field("count", envelope.count);
    if (call.bucket >= 0) fields.field("bucket", call.bucket);
    if (call.unit >= 0) fields.field("unit", call.unit);
    if (call.algorithm != Algorithm::automatic) fields.field("algorithm", comm::name(call.algorithm));
    if (envelope.op == Op::broadcast) fields.field("root", peer);
    if (!members.empty()) fields.field("group", members);
    args = fields.fields();
  }
};

}  // namespace chorus::comm
