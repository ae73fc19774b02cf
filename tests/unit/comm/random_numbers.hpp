#pragma once
/// The numbers of drawn calls, and the expected results: bit for bit over chorus' own transports, whose order of
/// additions is documented; within rounding errors over others.

#include <chorus/comm/transport/shm_transport.hpp>
#include <chorus/comm/transport/tcp_transport.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "random_calls.hpp"

namespace test::calls {

/// Calls f.operator()<T>() for the type of that dtype.
template <class F>
auto with_type(DType type, const F& f) {
  switch (type) {
    case DType::boolean:
      return f.template operator()<bool>();
    case DType::u8:
      return f.template operator()<std::uint8_t>();
    case DType::i8:
      return f.template operator()<std::int8_t>();
    case DType::i16:
      return f.template operator()<std::int16_t>();
    case DType::u16:
      return f.template operator()<std::uint16_t>();
    case DType::i32:
      return f.template operator()<std::int32_t>();
    case DType::u32:
      return f.template operator()<std::uint32_t>();
    case DType::i64:
      return f.template operator()<std::int64_t>();
    case DType::u64:
      return f.template operator()<std::uint64_t>();
    case DType::f16:
      return f.template operator()<ch::half>();
    case DType::bfloat16:
      return f.template operator()<ch::bf16>();
    case DType::f32:
      return f.template operator()<float>();
    default:
      return f.template operator()<double>();
  }
}

/// Like std::vector, but also for bool.
template <class T>
class Numbers {
 public:
  explicit Numbers(std::size_t count = 0) : bytes_(count * sizeof(T)) {}
  T* data() { return reinterpret_cast<T*>(bytes_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data()); }
  const std::byte* bytes() const { return bytes_.data(); }
  std::byte* bytes() { return bytes_.data(); }
  T& operator[](std::size_t i) { return data()[i]; }
  T operator[](std::size_t i) const { return data()[i]; }
  std::size_t size() const { return bytes_.size() / sizeof(T); }

 private:
  std::vector<std::byte> bytes_;
};

/// Element i of what rank `rank` passes to a call.
template <class T>
T number(std::uint64_t key, int rank, std::size_t i, bool special) {
  std::uint64_t h = (key * 64 + static_cast<std::uint64_t>(rank)) * 0x9E3779B97F4A7C15u + i * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 29)) * 0x94D049BB133111EBu;
  h ^= h >> 32;
  if constexpr (std::is_same_v<T, bool>) {
    return h % 3 == 0;
  } else if constexpr (std::is_integral_v<T>) {
    // Sums of signed numbers do not overflow.
    if constexpr (std::is_signed_v<T> && sizeof(T) >= 4) return static_cast<T>(static_cast<T>(h) / 16);
    return static_cast<T>(h);
  } else {
    if (special && h % 16 == 0) {
      constexpr float odd[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 3e-39f, -3e-6f, 6e4f};
      return static_cast<T>(odd[h >> 8 & 7]);
    }
    const double mantissa = static_cast<double>(static_cast<std::int64_t>(h)) * 0x1p-63;
    return static_cast<T>(static_cast<float>(mantissa * static_cast<double>(1u << (h & 7))));
  }
}

template <class T>
T combined(ReduceOp how, T a, T b) {
  if constexpr (std::is_same_v<T, bool>) {
    return how == ReduceOp::min ? a && b : a || b;
  } else if constexpr (ch::Real<T>) {
    using C = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const C x = a, y = b;
    if (how == ReduceOp::sum) return static_cast<T>(x + y);
    if (x != x || y != y) return x != x ? a : b;
    if (x == y) return std::signbit(x) == (how == ReduceOp::min) ? a : b;
    return (how == ReduceOp::min ? x < y : x > y) ? a : b;
  } else {
    if (how == ReduceOp::sum) return static_cast<T>(a + b);
    return how == ReduceOp::min ? std::min(a, b) : std::max(a, b);
  }
}

/// out[i] = all[order[0]][i] (+) all[order[1]][i] (+) ..., for i in [begin, end).
template <class T>
void add_up(Numbers<T>& out, const std::vector<Numbers<T>>& all, ReduceOp how, const std::vector<int>& order,
            std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    T sum = all[static_cast<std::size_t>(order[0])][i];
    for (std::size_t k = 1; k < order.size(); ++k) sum = combined(how, sum, all[static_cast<std::size_t>(order[k])][i]);
    out[i] = sum;
  }
}

/// 0, 1, ..., n - 1, and the order in which a ring adds up the chunk of rank c.
inline std::vector<int> by_rank(int n) {
  std::vector<int> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  return order;
}
inline std::vector<int> around_to(int c, int n) {
  auto order = by_rank(n);
  std::rotate(order.begin(), order.begin() + (c + 1) % n, order.end());
  return order;
}

/// Half a queue: the elements of a chunk that a ring has in flight at once.
inline std::size_t longest_chunk(Carrier carrier, std::size_t element) {
  return 4 * ((carrier == Carrier::tcp ? ch::comm::TcpTransport::slot_bytes : ch::comm::ShmTransport::slot_bytes) /
              element);
}
template <class T>
void add_up_in_ring(Numbers<T>& out, const std::vector<Numbers<T>>& all, const Call& call, Carrier carrier) {
  const auto n = all.size(), longest = n * longest_chunk(carrier, sizeof(T));
  for (std::size_t first = 0; first < out.size(); first += longest) {
    const auto segment = std::min(out.size() - first, longest);
    for (std::size_t c = 0; c < n; ++c)
      add_up(out, all, call.how, around_to(static_cast<int>(c), static_cast<int>(n)), first + segment * c / n,
             first + segment * (c + 1) / n);
  }
}

/// `all`: the scaled contributions, by rank in the group. `shown`: the data is in memory that all ranks can map.
/// `machines`: by rank in the group.
template <class T>
Numbers<T> all_reduced(const Program& p, const Call& call, const std::vector<Numbers<T>>& all, bool shown,
                       const std::string& machines) {
  const int n = static_cast<int>(all.size());
  const auto count = all[0].size(), bytes = count * sizeof(T);
  Numbers<T> out(count);
  if (p.carrier == Carrier::machines && n > 1) {  // reduces each machine to its first rank, then in a ring of those
    std::vector<Numbers<T>> sums;
    for (int first = 0; first < n; ++first) {
      if (machines.find(machines[static_cast<std::size_t>(first)]) != static_cast<std::size_t>(first)) continue;
      std::vector<int> order;
      for (int r = n - 1; r >= first; --r)
        if (machines[static_cast<std::size_t>(r)] == machines[static_cast<std::size_t>(first)]) order.push_back(r);
      sums.emplace_back(count);
      add_up(sums.back(), all, call.how, order, 0, count);
    }
    // The segments depend on the number of leaders.
    add_up_in_ring(out, sums, call, p.carrier);
    return out;
  }
  const bool sent_around = n == 2 ? p.carrier == Carrier::tcp && bytes > (64u << 10)
                                  : bytes > (256u << 10) && !(shown && p.carrier != Carrier::tcp);
  if (sent_around) {
    add_up_in_ring(out, all, call, p.carrier);
  } else {
    add_up(out, all, call.how, by_rank(n), 0, count);
  }
  return out;
}

/// The part of rank `place` of n.
template <class T>
Numbers<T> reduce_scattered(const Program& p, const Call& call, const std::vector<Numbers<T>>& parts, bool shown,
                            int place) {
  const int n = static_cast<int>(parts.size());
  Numbers<T> out(parts[0].size());
  const bool in_place =
      shown && p.carrier != Carrier::tcp && p.carrier != Carrier::machines && out.size() * sizeof(T) > 4096;
  add_up(out, parts, call.how, in_place ? by_rank(n) : around_to(place, n), 0, out.size());
  return out;
}

/// Permitted differences: which NaN it is; rounding errors.
enum class Same { but_nan, but_rounding };

/// "" or the first difference. `all`: the contributions.
template <class T>
std::string difference(const Numbers<T>& got, const Numbers<T>& expected, const std::vector<Numbers<T>>& all = {},
                       Same same = Same::but_nan) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const T a = got[i], b = expected[i];
    if (std::memcmp(&a, &b, sizeof(T)) == 0) continue;
    if constexpr (ch::Real<T>) {
      const auto x = static_cast<double>(a), y = static_cast<double>(b);
      if (x != x && y != y) continue;
      double size = 0;
      for (const auto& one : all) size += std::abs(static_cast<double>(T(one[i])));
      const double eps = sizeof(T) == 8                ? 0x1p-52
                         : sizeof(T) == 4              ? 0x1p-23
                         : std::is_same_v<T, ch::half> ? 0x1p-10
                                                       : 0x1p-7;
      if (same == Same::but_rounding && std::abs(x - y) <= size * eps * static_cast<double>(all.size())) continue;
      return ch::cat("at ", i, " of ", got.size(), ": ", x, ", expected ", y);
    } else {
      return ch::cat("at ", i, " of ", got.size(), ": ", a, ", expected ", b);
    }
  }
  return "";
}

}  // namespace test::calls
