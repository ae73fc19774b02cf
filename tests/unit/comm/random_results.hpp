#pragma once
/// Makes drawn calls, and checks their results.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/transport/transport.hpp>

#include "random_numbers.hpp"

namespace test::calls {

/// Makes a call on these bytes; returns its handle if it is asynchronous.
template <class T>
ch::comm::Work make(ch::comm::AnyCommunicator& c, const Call& call, std::span<T> mine, std::span<T> whole,
                    double scale) {
  const ch::comm::CollectiveOptions options{.scale = scale};
  const auto either = [&](auto later, auto now) {
    if (call.later) return later();
    now();
    return ch::comm::Work();
  };
  switch (call.op) {
    case Op::all_reduce:
      return either([&] { return c.all_reduce_async(mine, call.how, options); },
                    [&] { c.all_reduce(mine, call.how, options); });
    case Op::reduce_scatter:
      return either([&] { return c.reduce_scatter_async(whole, mine, call.how, options); },
                    [&] { c.reduce_scatter(whole, mine, call.how, options); });
    case Op::broadcast:
      return either([&] { return c.broadcast_async(mine, call.root); }, [&] { c.broadcast(mine, call.root); });
    case Op::all_gather:
      return either([&] { return c.all_gather_async(mine, whole); }, [&] { c.all_gather(mine, whole); });
    case Op::message:
      if (c.rank() == call.root)
        return either([&] { return c.send_async(mine, call.to); }, [&] { c.send(mine, call.to); });
      return either([&] { return c.recv_async(mine, call.root); }, [&] { c.recv(mine, call.root); });
    case Op::barrier:
      return either([&] { return c.barrier_async(); }, [&] { c.barrier(); });
    case Op::monitored_barrier:
      c.monitored_barrier();
  }
  return {};
}

/// What is wrong with the result of rank `at` in a group of these ranks, or "".
template <class T>
std::string judge(const Program& p, const Call& call, const std::vector<int>& members, int at,
                  const std::vector<std::byte>& result) {
  const auto n = members.size(), count = call.count;
  const auto place = static_cast<std::size_t>(at);
  Numbers<T> got(result.size() / sizeof(T)), expected(got.size());
  chorus::comm::detail::copy_bytes(got.bytes(), result.data(), result.size());
  if (call.op == Op::broadcast || call.op == Op::message) {
    const int from = members[static_cast<std::size_t>(call.root)];
    for (std::size_t i = 0; i < count; ++i) expected[i] = number<T>(call.key, from, i, p.special_in(call));
    return difference(got, expected);
  }
  if (call.op == Op::all_gather) {
    for (std::size_t i = 0; i < n * count; ++i)
      expected[i] = number<T>(call.key, members[i / count], i % count, p.special_in(call));
    return difference(got, expected);
  }
  const bool scatters = call.op == Op::reduce_scatter;
  bool shown = true;
  std::vector<Numbers<T>> all;
  std::string machines;
  for (const int rank : members) {
    const double scale = call.scales[static_cast<std::size_t>(rank)];
    all.emplace_back(count);
    for (std::size_t i = 0; i < count; ++i)
      all.back()[i] = number<T>(call.key, rank, i + (scatters ? place * count : 0), p.special_in(call));
    if constexpr (ch::Real<T>) {
      if (scale != 1)
        for (std::size_t i = 0; i < count; ++i)
          all.back()[i] = static_cast<T>(static_cast<ch::compute_type<T>>(scale) * all.back()[i]);
    }
    shown = shown && (p.carrier == Carrier::threads || (p.carrier == Carrier::shm && habits(p, call, rank).lent));
    machines += p.machines[static_cast<std::size_t>(rank)];
  }
  expected = scatters ? reduce_scattered(p, call, all, shown, at) : all_reduced(p, call, all, shown, machines);
  const bool rounds = p.carrier >= Carrier::gloo && call.how == ReduceOp::sum;
  return difference(got, expected, all, rounds ? Same::but_rounding : Same::but_nan);
}

}  // namespace test::calls
