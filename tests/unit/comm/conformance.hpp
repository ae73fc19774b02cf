#pragma once
/// What every Communicator has to do, as a function that each rank runs: returns "" or the first difference.

#include <chorus/comm/algorithms/all_to_all.hpp>
#include <chorus/comm/communicator.hpp>
#include <chorus/comm/objects.hpp>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace test {

namespace ch = chorus;

/// A small number that depends on the rank and the index, so that sums are exact in every scalar type.
template <class T>
T value(int rank, std::size_t i) {
  if constexpr (std::is_same_v<T, bool>) return (static_cast<std::size_t>(rank) + i) % 3 == 0;
  return static_cast<T>(static_cast<std::size_t>(rank * 3) + i % 7);
}

template <class T>
std::vector<std::conditional_t<std::is_same_v<T, bool>, char, T>> storage(std::size_t n) {
  return std::vector<std::conditional_t<std::is_same_v<T, bool>, char, T>>(n);
}
template <class T>
std::span<T> span_of(auto& stored) {
  return {reinterpret_cast<T*>(stored.data()), stored.size()};
}

template <class T>
std::string expect(std::span<const T> got, auto expected, const std::string& what) {
  for (std::size_t i = 0; i < got.size(); ++i)
    if (got[i] != expected(i))
      return ch::cat(what, " ", ch::dtype<T>, " x ", got.size(), ": at ", i, ": ", got[i], ", expected ", expected(i));
  return "";
}

template <class T>
std::string conforms(ch::comm::Communicator auto& c, std::size_t count) {
  using ch::comm::ReduceOp;
  const int n = c.size(), r = c.rank();
  const auto size = static_cast<std::size_t>(n);
  const auto reduced = [&](std::size_t i, ReduceOp op) {
    T all = value<T>(0, i);
    for (int rank = 1; rank < n; ++rank) {
      const T next = value<T>(rank, i);
      if constexpr (std::is_same_v<T, bool>) {
        all = op == ReduceOp::min ? all && next : all || next;
      } else {
        all = op == ReduceOp::sum   ? static_cast<T>(all + next)
              : op == ReduceOp::min ? std::min(all, next)
                                    : std::max(all, next);
      }
    }
    return all;
  };
  const auto first_of = [&](int rank) { return static_cast<std::size_t>(rank) * count; };
  const auto fill = [&](std::span<T> data) {
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = value<T>(r, i);
  };
  std::string wrong;
  const auto look = [&](std::string found) {
    if (wrong.empty()) wrong = std::move(found);
  };

  auto data = storage<T>(count), whole = storage<T>(count * size);
  const auto mine = span_of<T>(data), all = span_of<T>(whole);
  for (const auto op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) {
    fill(mine);
    c.all_reduce(mine, op);
    look(expect<T>(
        mine, [&](std::size_t i) { return reduced(i, op); }, ch::cat("all_reduce ", op)));

    fill(all);
    fill(mine);
    c.reduce_scatter(all, mine, op);
    const auto first = static_cast<std::size_t>(r) * count;
    look(expect<T>(
        mine, [&](std::size_t i) { return reduced(first + i, op); }, ch::cat("reduce_scatter ", op)));
  }
  for (int root = 0; root < n; ++root) {
    fill(mine);
    c.broadcast(mine, root);
    look(expect<T>(
        mine, [&](std::size_t i) { return value<T>(root, i); }, ch::cat("broadcast from ", root)));
  }
  fill(mine);
  c.all_gather(mine, all);
  const auto gathered = [&](std::size_t i) { return value<T>(static_cast<int>(i / count), i % count); };
  look(expect<T>(all, gathered, "all_gather"));
  for (auto& x : all) x = T();
  const auto own = all.subspan(static_cast<std::size_t>(r) * count, count);
  fill(own);
  c.all_gather(own, all);
  look(expect<T>(all, gathered, "all_gather in place"));

  if (n > 1) {  // around the ring, in descending order of ranks
    const int to = (r + n - 1) % n, from = (r + 1) % n;
    auto received = storage<T>(count);
    fill(mine);
    auto sending = r % 2 == 0 ? c.send_async(mine, to) : c.recv_async(span_of<T>(received), from);
    auto other = r % 2 == 0 ? c.recv_async(span_of<T>(received), from) : c.send_async(mine, to);
    sending.wait();
    other.wait();
    look(expect<T>(
        span_of<T>(received), [&](std::size_t i) { return value<T>(from, i); }, "send, recv"));
  }
  // Equal parts, then parts of different sizes, some of them empty.
  fill(all);
  auto arrived = storage<T>(count * size);
  ch::comm::all_to_all(c, std::span<const T>(all), span_of<T>(arrived));
  look(expect<T>(
      span_of<T>(arrived), [&](std::size_t i) { return value<T>(static_cast<int>(i / count), first_of(r) + i % count); },
      "all_to_all"));
  const auto part = [&](int from, int to) {
    const auto kind = static_cast<std::size_t>(from + 2 * to) % 3;
    return kind == 0 ? 0 : count / kind;
  };
  std::vector<std::size_t> sends, receives, from;
  for (int rank = 0; rank < n; ++rank) {
    sends.push_back(part(r, rank));
    receives.push_back(part(rank, r));
    from.insert(from.end(), receives.back(), static_cast<std::size_t>(rank));
  }
  std::size_t begin = 0;
  for (const auto sent : sends) begin += sent;
  arrived = storage<T>(from.size());
  const auto sent = all.first(begin);
  std::size_t at = 0;
  for (int rank = 0; rank < n; ++rank)
    for (std::size_t i = 0; i < part(r, rank); ++i) sent[at++] = value<T>(r + rank, i);
  ch::comm::all_to_all_v(c, std::span<const T>(sent), sends, span_of<T>(arrived), receives);
  const auto place = [&](std::size_t i) {  // in the part of its sender
    return i - static_cast<std::size_t>(std::find(from.begin(), from.end(), from[i]) - from.begin());
  };
  if (count <= 2000)
    look(expect<T>(
        span_of<T>(arrived), [&](std::size_t i) { return value<T>(static_cast<int>(from[i]) + r, place(i)); },
        "all_to_all_v"));
  c.barrier();
  return wrong;
}

/// Each rank has the largest number of the type: sums wrap around.
template <class T>
std::string wraps(ch::comm::Communicator auto& c) {
  using U = std::make_unsigned_t<T>;
  std::vector<T> sums(1001, std::numeric_limits<T>::max());
  c.all_reduce(std::span(sums));
  constexpr auto largest = static_cast<std::uint64_t>(std::numeric_limits<T>::max());
  const auto sum = static_cast<T>(static_cast<U>(largest * static_cast<std::uint64_t>(c.size())));
  return expect<T>(
      sums, [&](std::size_t) { return sum; }, "a sum that wraps");
}

/// min and max of -0, +0 and NaN don't depend on which ranks they come from.
template <class T>
std::string extremes(ch::comm::Communicator auto& c) {
  using ch::comm::ReduceOp;
  constexpr float kinds[] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN};
  const auto n = static_cast<std::size_t>(c.size()), r = static_cast<std::size_t>(c.rank());
  const auto brought = [&](std::size_t rank, std::size_t i) {
    return kinds[(i / (rank % 2 == 0 ? 1 : 7) + rank / 2) % 7];
  };
  std::string wrong;
  for (const auto op : {ReduceOp::min, ReduceOp::max}) {
    const auto look = [&](std::span<const T> got, std::size_t first) {
      for (std::size_t i = 0; i < got.size() && wrong.empty(); ++i) {
        float expected = brought(0, first + i);
        for (std::size_t rank = 1; rank < n; ++rank) {
          const float next = brought(rank, first + i);
          const bool less = next < expected || (next == expected && std::signbit(next));
          if (next != next || (expected == expected && less == (op == ReduceOp::min))) expected = next;
        }
        const auto x = static_cast<float>(got[i]);
        if (expected != expected ? x != x : x == expected && std::signbit(x) == std::signbit(expected)) continue;
        wrong = ch::cat(op, " of ", ch::dtype<T>, ": at ", i, ": ", x, ", expected ", expected);
      }
    };
    std::vector<T> all(98 * n), mine(98);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<T>(brought(r, i));
    c.reduce_scatter(std::span<const T>(all), std::span<T>(mine), op);
    look(mine, 98 * r);
    c.all_reduce(std::span<T>(all), op);
    look(all, 0);
  }
  return wrong;
}

/// Texts of several lengths, and empty ones.
std::string objects(ch::comm::Communicator auto& c) {
  const auto text_of = [](int rank) {
    return std::string(static_cast<std::size_t>(7 * rank), 'a') + std::string(static_cast<std::size_t>(rank % 2), '\0');
  };
  const auto all = ch::comm::all_gather_object(c, text_of(c.rank()));
  if (static_cast<int>(all.size()) != c.size()) return ch::cat("all_gather_object: ", all.size(), " texts");
  for (int rank = 0; rank < c.size(); ++rank) {
    if (all[static_cast<std::size_t>(rank)] != text_of(rank)) return ch::cat("all_gather_object: of rank ", rank);
    if (ch::comm::broadcast_object(c, text_of(c.rank()), rank) != text_of(rank))
      return ch::cat("broadcast_object from ", rank);
  }
  return "";
}

/// Every operation with every scalar type; counts that are multiples of the number of ranks, and others.
inline std::string conforms(ch::comm::Communicator auto& c) {
  const auto n = static_cast<std::size_t>(c.size());
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, n - 1, n + 1, std::size_t{1001}, std::size_t{8192}})
    if (auto wrong = conforms<float>(c, count); !wrong.empty()) return wrong;
  for (const auto& wrong :
       {conforms<bool>(c, 101), conforms<std::uint8_t>(c, 101), conforms<std::int8_t>(c, 101),
        conforms<std::int16_t>(c, 101), conforms<std::uint16_t>(c, 101), conforms<std::int32_t>(c, 101),
        conforms<std::uint32_t>(c, 101), conforms<std::int64_t>(c, 101), conforms<std::uint64_t>(c, 101),
        conforms<double>(c, 101), conforms<ch::bf16>(c, 1001), conforms<ch::half>(c, 1001)})
    if (!wrong.empty()) return wrong;
  for (const auto& wrong : {extremes<float>(c), extremes<double>(c), extremes<ch::bf16>(c), extremes<ch::half>(c)})
    if (!wrong.empty()) return wrong;
  if (auto wrong = objects(c); !wrong.empty()) return wrong;
  if (auto wrong = wraps<std::int8_t>(c); !wrong.empty()) return wrong;
  if (auto wrong = wraps<std::int32_t>(c); !wrong.empty()) return wrong;
  if (auto wrong = conforms<double>(c, 200'003); !wrong.empty()) return wrong;  // several segments
  return conforms<std::int8_t>(c, 300'001);
}

}  // namespace test
