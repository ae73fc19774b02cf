#pragma once
/// Convolutions and matrix products of u8 with s8. A row of the product is an output pixel; its inputs lie in `runs` of
/// neighbouring bytes, one per row of the kernel (with groups, one per tap), so that nothing is copied into columns
/// first.

#include <algorithm>
#include <chorus/core/dtype.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/quantization/kernels/dot.hpp>
#include <chorus/quantization/kernels/image.hpp>
#include <chorus/quantization/kernels/requantize.hpp>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

// g++ 12 warns about undefined values in its own AVX-512 intrinsics.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace chorus::kernels::int8 {

/// Columns of a panel of packed weights.
inline constexpr Index panel = 64;

/// A 32-bit sum can hold this many products of 255 and -128.
inline constexpr Index most_terms = 65'793;

/// Weights in the kernels' order: [group][panel][run][4 terms of it][column][4].
struct PackedWeights {
  Index out_channels = 0, groups = 1, kernel_h = 1, kernel_w = 1, channels = 0;  // channels: of the input, in a group
  bool row_runs = true;   // a run is a whole row of the kernel, not one tap
  bool depthwise = false;  // then [tap][channel]
  std::vector<std::int8_t> numbers;
  std::vector<std::int32_t> sums;  // of each output's weights

  Index group_outputs() const { return out_channels / groups; }
  Index panels() const { return (group_outputs() + panel - 1) / panel; }
  Index runs() const { return row_runs ? kernel_h : kernel_h * kernel_w; }
  Index run_bytes() const { return row_runs ? kernel_w * channels : channels; }
  Index run_steps() const { return (run_bytes() + 3) / 4; }
  Index panel_bytes() const { return runs() * run_steps() * panel * 4; }
};

/// Packs weight: [out, in / groups, kernel_h, kernel_w], row-major, for convolutions of `shape`, apart from its batch,
/// height and width.
inline PackedWeights pack_weights(const Conv2dShape& shape, std::span<const std::int8_t> weight) {
  PackedWeights out;
  out.out_channels = shape.out_channels;
  out.groups = shape.groups;
  out.kernel_h = shape.kernel_h;
  out.kernel_w = shape.kernel_w;
  out.channels = shape.in_channels / shape.groups;
  out.row_runs = shape.groups == 1 && shape.dilation_w == 1;
  out.depthwise = shape.groups > 1 && out.channels == 1 && shape.out_channels == shape.groups;
  const Index taps = shape.kernel_h * shape.kernel_w, terms = out.channels * taps;
  out.sums.assign(static_cast<std::size_t>(shape.out_channels), 0);
  for (Index o = 0; o < shape.out_channels; ++o)
    for (Index k = 0; k < terms; ++k)
      out.sums[static_cast<std::size_t>(o)] += weight[static_cast<std::size_t>(o * terms + k)];

  if (out.depthwise) {
    out.numbers.resize(static_cast<std::size_t>(taps * shape.out_channels));
    for (Index o = 0; o < shape.out_channels; ++o)
      for (Index tap = 0; tap < taps; ++tap)
        out.numbers[static_cast<std::size_t>(tap * shape.out_channels + o)] =
            weight[static_cast<std::size_t>(o * taps + tap)];
    return out;
  }
  out.numbers.assign(static_cast<std::size_t>(out.groups * out.panels() * out.panel_bytes()), 0);
  for (Index o = 0; o < shape.out_channels; ++o) {
    const Index group = o / out.group_outputs(), column = o % out.group_outputs();
    std::int8_t* const to =
        out.numbers.data() + (group * out.panels() + column / panel) * out.panel_bytes() + column % panel * 4;
    for (Index c = 0; c < out.channels; ++c)
      for (Index tap = 0; tap < taps; ++tap) {
        const Index run = out.row_runs ? tap / shape.kernel_w : tap;
        const Index place = out.row_runs ? tap % shape.kernel_w * out.channels + c : c;
        to[(run * out.run_steps() + place / 4) * panel * 4 + place % 4] =
            weight[static_cast<std::size_t>((o * out.channels + c) * taps + tap)];
      }
  }
  return out;
}

namespace detail {

/// Rows of the product that are multiplied by a panel of weights at a time, some 16 to 128 KiB of x.
inline constexpr Index chunk_rows = 240;

/// The beginnings of a chunk's rows.
struct Rows {
  const std::uint8_t* x[chunk_rows];
  std::uint8_t* y[chunk_rows];
  Index count = 0;
};

/// A tile of sums: `Count` rows times `Vectors` vectors of columns.
template <class Way, int Count, int Vectors>
void multiply_tile(const std::uint8_t* const* x, std::span<const Index> runs, Index steps, const std::int8_t* w,
                   const Requantize& to, Index column, std::uint8_t* const* y, Index rows, Index columns) {
  typename Way::Sums sums[Count][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Count; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) sums[r][v] = Way::zero();

  const std::uint8_t* from[Count];
  for (const Index run : runs) {
#pragma GCC unroll 16
    for (int r = 0; r < Count; ++r) from[r] = x[r] + run;
    for (Index step = 0; step < steps; ++step, w += panel * 4) {
      typename Way::Right right[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) right[v] = Way::right(w + v * Way::lanes * 4);
#pragma GCC unroll 16
      for (int r = 0; r < Count; ++r) {
        const auto left = Way::left(from[r] + 4 * step);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sums[r][v] = Way::add(sums[r][v], left, right[v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Count; ++r) {
    if (r >= rows) break;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v)
      if (v * Way::lanes < columns)
        Way::store(sums[r][v], to, column + v * Way::lanes, y[r] + v * Way::lanes, columns - v * Way::lanes);
  }
}

/// Multiplies rows [first, first + rows) of a chunk, at most `Count`, by a panel's columns.
template <class Way, int Count>
void multiply_rows(const Rows& chunk, Index first, Index rows, std::span<const Index> runs, Index steps,
                   const std::int8_t* w, const Requantize& to, Index column, Index columns) {
  // Missing rows are computed as copies of the last one and not stored.
  const std::uint8_t* x[Count];
  std::uint8_t* y[Count];
  for (Index r = 0; r < Count; ++r) {
    x[r] = chunk.x[first + std::min(r, rows - 1)];
    y[r] = chunk.y[first + std::min(r, rows - 1)] + column;
  }
  constexpr Index wide = Way::vectors * Way::lanes;
  for (Index done = 0; done < columns; done += wide) {
    const Index left = columns - done;
    const auto tile = [&]<int Vectors>(std::integral_constant<int, Vectors>) {
      std::uint8_t* at[Count];
      for (int r = 0; r < Count; ++r) at[r] = y[r] + done;
      multiply_tile<Way, Count, Vectors>(x, runs, steps, w + done * 4, to, column + done, at, rows,
                                         std::min(left, wide));
    };
    if (Way::vectors > 1 && left <= Way::lanes)
      tile(std::integral_constant<int, 1>{});
    else if (Way::vectors > 2 && left <= 2 * Way::lanes)
      tile(std::integral_constant<int, 2>{});
    else
      tile(std::integral_constant<int, Way::vectors>{});
  }
}

/// Multiplies a chunk's rows by a panel.
template <class Way>
void multiply_chunk(const Rows& chunk, std::span<const Index> runs, Index steps, const std::int8_t* w,
                    const Requantize& to, Index column, Index columns) {
  constexpr int few = Way::rows / 2 > 0 ? Way::rows / 2 : 1;
  for (Index first = 0; first < chunk.count; first += Way::rows) {
    const Index rows = std::min<Index>(Way::rows, chunk.count - first);
    if (rows == 1)
      multiply_rows<Way, 1>(chunk, first, rows, runs, steps, w, to, column, columns);
    else if (rows <= few)
      multiply_rows<Way, few>(chunk, first, rows, runs, steps, w, to, column, columns);
    else
      multiply_rows<Way, Way::rows>(chunk, first, rows, runs, steps, w, to, column, columns);
  }
}

/// Depthwise convolution: each channel by itself.
inline void convolve_depthwise(const Conv2dShape& s, const Images& x, const PackedWeights& weights,
                               const Requantize& to, const Images& y) {
  constexpr Index block = 64;
  parallel_for(s.batch * s.out_height(), [&](Index line) {
    const Index image = line / s.out_height(), row = line % s.out_height();
    for (Index column = 0; column < s.out_width(); ++column)
      for (Index c = 0; c < s.in_channels; c += block) {
        const Index count = std::min(block, s.in_channels - c);
        std::int32_t sums[block] = {};
        for (Index tap = 0; tap < s.kernel_h * s.kernel_w; ++tap) {
          const std::uint8_t* from =
              x.at(image, row * s.stride_h - s.padding_h + tap / s.kernel_w * s.dilation_h,
                   column * s.stride_w - s.padding_w + tap % s.kernel_w * s.dilation_w) + c;
          const std::int8_t* w = weights.numbers.data() + tap * s.in_channels + c;
          for (Index i = 0; i < count; ++i) sums[i] += from[i] * w[i];
        }
        std::uint8_t* const out = y.at(image, row, column) + c;
        for (Index i = 0; i < count; ++i) out[i] = to(sums[i], c + i);
      }
  }, s.y_count() * s.kernel_h * s.kernel_w > 100'000);
}

}  // namespace detail

/// y = the convolution of x, whose border is at least the padding and holds x's zero point. `to` has a number for each
/// output channel; up to `panel` more may be read.
template <class Way = Best>
void convolution(const Conv2dShape& s, const Images& x, const PackedWeights& weights, const Requantize& to,
                 const Images& y) {
  if (weights.depthwise) return detail::convolve_depthwise(s, x, weights, to, y);
  std::vector<Index> runs;
  for (Index kh = 0; kh < s.kernel_h; ++kh)
    for (Index kw = 0; kw < (weights.row_runs ? 1 : s.kernel_w); ++kw)
      runs.push_back(kh * s.dilation_h * x.pitch() + kw * s.dilation_w * x.channels);

  const Index out_h = s.out_height(), out_w = s.out_width(), pixels = s.batch * out_h * out_w;
  const Index chunks = (pixels + detail::chunk_rows - 1) / detail::chunk_rows, outputs = weights.group_outputs();
  const Index tasks = chunks * weights.groups * weights.panels();
  const bool worth_it = pixels * weights.panel_bytes() * weights.panels() * weights.groups > 2'000'000;
  parallel_for(tasks, [&](Index task) {
    const Index at_panel = task % weights.panels(), group = task / weights.panels() % weights.groups;
    const Index first = task / weights.panels() / weights.groups * detail::chunk_rows;
    detail::Rows rows;
    rows.count = std::min(detail::chunk_rows, pixels - first);
    Index column = first % out_w, row = first / out_w % out_h, image = first / (out_w * out_h);
    for (Index i = 0; i < rows.count; ++i) {
      rows.x[i] = x.at(image, row * s.stride_h - s.padding_h, column * s.stride_w - s.padding_w) +
                  group * weights.channels;
      rows.y[i] = y.at(image, row, column);
      if (++column == out_w) {
        column = 0;
        if (++row == out_h) row = 0, ++image;
      }
    }
    const Index begin = at_panel * panel;
    detail::multiply_chunk<Way>(rows, runs, weights.run_steps(),
                                weights.numbers.data() + (group * weights.panels() + at_panel) * weights.panel_bytes(),
                                to, group * outputs + begin, std::min(panel, outputs - begin));
  }, worth_it);
}

}  // namespace chorus::kernels::int8

#pragma GCC diagnostic pop
