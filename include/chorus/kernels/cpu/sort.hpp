#pragma once
/// Sorting along an axis on the CPU: numbers become unsigned keys of the same order for a radix sort.

#include <algorithm>
#include <bit>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/sort.hpp>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

namespace chorus::kernels {

namespace detail {

template <class T>
using OrderKey = std::conditional_t<std::floating_point<T> && sizeof(T) == 4, std::uint32_t, std::uint64_t>;

/// An unsigned key for `value`. Equal numbers (0 and -0) have the same key, and all NaNs the largest.
template <class T>
OrderKey<T> order_key(T value) {
  using Key = OrderKey<T>;
  constexpr Key sign = Key{1} << (8 * sizeof(Key) - 1);
  if constexpr (std::floating_point<T>) {
    const Key bits = std::bit_cast<Key>(value == 0 ? T{0} : value);
    const Key negative = Key{0} - (bits >> (8 * sizeof(Key) - 1));  // all bits set, or none, without a branch
    return value != value ? ~Key{0} : bits ^ (negative | sign);
  } else if constexpr (std::unsigned_integral<T>) {
    return static_cast<Key>(value);
  } else {
    return static_cast<Key>(static_cast<std::int64_t>(value)) ^ sign;
  }
}

/// All entries of a line differ, so every sort is stable. As one little-endian number, the key is more significant than
/// the index.
template <class Key>
struct OrderEntry {
  Key index, key;
  bool operator<(const OrderEntry& other) const {
    if constexpr (sizeof(Key) == 4 && std::endian::native == std::endian::little)
      return std::bit_cast<std::uint64_t>(*this) < std::bit_cast<std::uint64_t>(other);
    else
      return key != other.key ? key < other.key : index < other.index;
  }
};

/// Radix sort by keys, least significant byte first, with `other` as temporary memory. Returns the sorted array.
template <class Key>
OrderEntry<Key>* radix_sort(OrderEntry<Key>* entries, OrderEntry<Key>* other, Index n) {
  constexpr int bytes = sizeof(Key), values = 256;
  const auto byte = [](Key key, int d) { return static_cast<std::uint8_t>(key >> (8 * d)); };
  Index places[bytes][values] = {};
  for (Index i = 0; i < n; ++i)
    for (int d = 0; d < bytes; ++d) ++places[d][byte(entries[i].key, d)];
  for (int d = 0; d < bytes; ++d) {
    Index* const place = places[d];
    if (place[byte(entries[0].key, d)] == n) continue;
    Index sum = 0;
    for (int v = 0; v < values; ++v) sum += std::exchange(place[v], sum);
    for (Index i = 0; i < n; ++i) other[place[byte(entries[i].key, d)]++] = entries[i];
    std::swap(entries, other);
  }
  return entries;
}

/// The `count` least of `n` entries, sorted, for contiguous numbers `x`. Most entries are not among them: comparing a
/// block with the current greatest one usually excludes the whole block.
template <class Key, class T>
void least_entries(Index n, Index count, Key flip, const T* x, OrderEntry<Key>* least) {
  constexpr Index block = 32;
  const auto number = [x](Index j) { return static_cast<compute_type<T>>(x[j]); };
  const auto entry = [&](Index j) { return OrderEntry<Key>{static_cast<Key>(j), order_key(number(j)) ^ flip}; };
  OrderEntry<Key>* const end = least + count;
  for (Index j = 0; j < count; ++j) least[j] = entry(j);
  std::make_heap(least, end);
  auto greatest = number(static_cast<Index>(least->index));
  // Equal numbers come too late, since their index is larger. For NaN the entries are compared.
  const auto may_be_among = [&](Index j) { return flip != 0 ? !(number(j) <= greatest) : !(number(j) >= greatest); };
  for (Index begin = count; begin < n; begin += block) {
    const Index size = std::min(block, n - begin);
    unsigned any = 0;
    for (Index j = 0; j < size; ++j) any |= static_cast<unsigned>(may_be_among(begin + j));
    if (any == 0) continue;
    for (Index j = begin; j < begin + size; ++j) {
      if (!may_be_among(j) || !(entry(j) < *least)) continue;
      std::pop_heap(least, end);
      end[-1] = entry(j);
      std::push_heap(least, end);
      greatest = number(static_cast<Index>(least->index));
    }
  }
  std::sort_heap(least, end);
}

template <class Key, class T>
void argsort_lines(AxisShape shape, Index count, bool descending, const T* x, std::int64_t* index) {
  using Entry = OrderEntry<Key>;
  const Index n = shape.axis, inner = shape.inner;
  const Key flip = descending ? ~Key{0} : Key{0};
  // Adjacent lines are sorted together, so that all of them use the fetched cache lines.
  const Index together = std::min<Index>(inner, 8), groups = (inner + together - 1) / together;
  const ThreadScratch<Entry> scratch(Cpu{}, (together + 1) * n);
  const Index least = thread_elements / (8 * together * n) + 1;
  parallel_ranges(shape.outer * groups, 1, least, [&](Index first, Index number) {
    Entry* const entries = scratch.data();
    for (Index group = first; group < first + number; ++group) {
      const Index o = group / groups, at = group % groups * together, lines = std::min(together, inner - at);
      if (inner == 1 && count < n / 8) {
        least_entries(n, count, flip, x + o * n, entries);
        for (Index j = 0; j < count; ++j) index[o * count + j] = static_cast<std::int64_t>(entries[j].index);
        continue;
      }
      for (Index j = 0; j < n; ++j)
        for (Index l = 0; l < lines; ++l) {
          const Key key = order_key(static_cast<compute_type<T>>(x[(o * n + j) * inner + at + l]));
          entries[l * n + j] = {static_cast<Key>(j), key ^ flip};
        }
      for (Index l = 0; l < lines; ++l) {
        Entry* line = entries + l * n;
        if (count < n / 8)
          std::partial_sort(line, line + count, line + n);
        else if (n < 128)
          std::sort(line, line + n);
        else
          line = radix_sort(line, entries + together * n, n);
        for (Index j = 0; j < count; ++j)
          index[(o * count + j) * inner + at + l] = static_cast<std::int64_t>(line[j].index);
      }
    }
  });
}

}  // namespace detail

template <Scalar T>
void argsort(Cpu, AxisShape shape, Index count, bool descending, const T* x, std::int64_t* index) {
  if (shape.numel() == 0 || count == 0) return;
  using Key = detail::OrderKey<compute_type<T>>;
  if constexpr (sizeof(Key) == 4)
    if (shape.axis <= Index{std::numeric_limits<Key>::max()})
      return detail::argsort_lines<Key>(shape, count, descending, x, index);
  detail::argsort_lines<std::uint64_t>(shape, count, descending, x, index);
}

}  // namespace chorus::kernels
