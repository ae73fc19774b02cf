#pragma once
/// A range of an axis on the CPU.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <chorus/kernels/axis_block.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/cpu/packet.hpp>

namespace chorus::kernels {

namespace detail {
/// Blocks of fewer bytes are copied or added in a loop: a call for each would take longer than the work.
inline constexpr Index short_block_bytes = 64;

/// For each of `outer` steps: copies or adds `count` numbers; `from_step` and `to_step` are the strides.
template <class T>
void move_blocks(Cpu device, Index outer, Index count, const T* from, Index from_step, T* to, Index to_step,
                 bool accumulate) {
  const auto copy = [=](auto bytes) {
    for (Index o = 0; o < outer; ++o)
      std::memcpy(to + o * to_step, from + o * from_step, static_cast<std::size_t>(bytes));
  };
  const Index bytes = count * static_cast<Index>(sizeof(T));
  if (!accumulate && bytes == 4) return copy(std::integral_constant<Index, 4>{});
  if (!accumulate && bytes == 8) return copy(std::integral_constant<Index, 8>{});
  if (!accumulate && bytes >= short_block_bytes) return copy(bytes);
  for (Index o = 0; o < outer; ++o, from += from_step, to += to_step) {
    if (!accumulate)
      for (Index i = 0; i < count; ++i) to[i] = from[i];
    else if constexpr (!Real<T>)
      fail<UsageError>("concat: cannot accumulate ", dtype<T>);
    else if (bytes < short_block_bytes)
      for (Index i = 0; i < count; ++i) to[i] = from[i] + to[i];
    else
      axpy(device, count, T{1}, from, to);
  }
}

/// The same on several threads, which share the steps, or the parts of each step if steps are few and long.
template <class T>
void move_blocks_together(Cpu device, Index outer, Index count, const T* from, Index from_step, T* to, Index to_step,
                          bool accumulate) {
  if (outer < 2 * num_threads() && count >= 2 * thread_elements) {
    for (Index o = 0; o < outer; ++o, from += from_step, to += to_step)
      parallel_ranges(count, 64, thread_elements, [=](Index first, Index n) {
        move_blocks(device, 1, n, from + first, 0, to + first, 0, accumulate);
      });
    return;
  }
  parallel_ranges(outer, 1, thread_elements / std::max(Index{1}, count) + 1, [=](Index first, Index n) {
    move_blocks(device, n, count, from + first * from_step, from_step, to + first * to_step, to_step, accumulate);
  });
}
}  // namespace detail

template <class T>
void take_block(Cpu device, AxisShape whole, Index start, Index count, const T* from, T* block, bool accumulate) {
  const Index row = count * whole.inner;
  detail::move_blocks_together(device, whole.outer, row, from + start * whole.inner, whole.axis * whole.inner, block,
                               row, accumulate);
}

template <class T>
void put_block(Cpu device, AxisShape whole, Index start, Index count, const T* block, T* to, bool accumulate) {
  const Index row = count * whole.inner;
  detail::move_blocks_together(device, whole.outer, row, block, row, to + start * whole.inner,
                               whole.axis * whole.inner, accumulate);
}

template <class T>
void pad_block(Cpu device, AxisShape whole, Index start, Index count, const T* block, T* to) {
  const Index step = whole.axis * whole.inner, row = count * whole.inner, before = start * whole.inner;
  if (step == 0) return;
  // Short steps are zeroed in groups that stay in the first-level cache until the block's numbers are written.
  const Index group = std::max(Index{1}, 4096 / step);
  parallel_ranges(whole.outer, group, thread_elements / step + 1, [&](Index first, Index outers) {
    for (Index o = first; o < first + outers; o += group) {
      const Index n = std::min(group, first + outers - o);
      T* at = to + o * step;
      if (n == 1) {
        std::fill_n(at, before, T{});
        std::fill_n(at + before + row, step - before - row, T{});
      } else {
        std::fill_n(at, n * step, T{});
      }
      detail::move_blocks(device, n, row, block + o * row, row, at + before, step, false);
    }
  });
}

}  // namespace chorus::kernels
