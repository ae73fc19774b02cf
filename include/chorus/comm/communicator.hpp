#pragma once
/// The interface of a communicator: collectives over a group of ranks, blocking and asynchronous.

#include <chorus/comm/work.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/trace.hpp>
#include <cstdint>
#include <span>
#include <string_view>

namespace chorus::comm {

/// How contributions are combined. On bool, sum and max are "or", min is "and". Sums of integers wrap around. In min
/// and max of floating-point numbers a NaN wins over any number (it may be any NaN), and -0 is less than 0, as in IEEE
/// 754-2019's minimum and maximum: the order of the ranks does not change the bits. All engines do the same except
/// NCCL, whose min and max ignore a NaN and may give either zero.
enum class ReduceOp : std::uint8_t { sum, min, max };

constexpr std::string_view name(ReduceOp op) {
  constexpr std::string_view names[] = {"sum", "min", "max"};
  return names[static_cast<std::size_t>(op)];
}
inline void append(std::string& out, ReduceOp op) { out += name(op); }

struct CollectiveOptions {
  /// Multiplies this rank's contribution before it is reduced (NCCL's PreMulSum), without a pass of its own over
  /// memory. Only for all_reduce and reduce_scatter of floating-point numbers.
  double scale = 1;
  trace::Traffic traffic = trace::Traffic::control;  ///< the kind under which the bytes are counted
  int bucket = -1;                                   ///< the number of a gradient bucket, for messages
  int unit = -1;                                     ///< the number of a unit of parameters, likewise
  const char* part_of = nullptr;                     ///< the name of a collective made of several calls, likewise
};

/// A group of ranks. Every rank calls the same collectives, in the same order, with the same counts and scalar types.
///
///   all_reduce(data, op, options)         data := the reduction of every rank's data; the same bits on every rank
///   broadcast(data, root, options)        data := root's data
///   all_gather(mine, all, options)        all := every rank's `mine`, in the order of ranks, size() * mine.size()
///   reduce_scatter(all, mine, op, options)  mine := this rank's chunk of the reduction of every rank's `all`
///   send(data, peer), recv(data, peer)    in the order of calls, without tags; send may return before the peer
///                                         receives
///   barrier()                             returns when every rank has called it
///   abort(why)                            gives the group up, from any thread: every call of this rank that is
///                                         waiting, and every later one, throws CommError with `why`; the other
///                                         ranks' calls throw it too, as soon as the engine can tell them
///
/// `X_async` starts X and returns a Work; asynchronous collectives run in the order of calls, and a blocking call
/// runs after those that were started before it. A failed communicator stays failed: every later call throws CommError.
template <class C>
concept Communicator = requires(C& c, std::span<float> out, std::span<const float> in, ReduceOp op,
                                CollectiveOptions options) {
  { c.rank() } -> std::convertible_to<int>;
  { c.size() } -> std::convertible_to<int>;
  c.all_reduce(out, op, options);
  c.broadcast(out, 0, options);
  c.all_gather(in, out, options);
  c.reduce_scatter(in, out, op, options);
  c.send(in, 0, options);
  c.recv(out, 0, options);
  c.barrier();
  c.abort(std::string_view());
  { c.all_reduce_async(out, op, options) } -> std::same_as<Work>;
  { c.broadcast_async(out, 0, options) } -> std::same_as<Work>;
  { c.all_gather_async(in, out, options) } -> std::same_as<Work>;
  { c.reduce_scatter_async(in, out, op, options) } -> std::same_as<Work>;
  { c.send_async(in, 0, options) } -> std::same_as<Work>;
  { c.recv_async(out, 0, options) } -> std::same_as<Work>;
  { c.barrier_async() } -> std::same_as<Work>;
};

}  // namespace chorus::comm
