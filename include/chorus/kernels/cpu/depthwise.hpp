#pragma once
/// Depthwise convolutions (one channel and one filter per group): too little work for matrix products. A row of the
/// result is computed packet by packet from a raster of its plane. Meanwhile the next plane's rows are fetched: rasters
/// read them in an order that processors don't foresee.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/addresses.hpp>
#include <chorus/kernels/cpu/depthwise_3x3.hpp>
#include <chorus/kernels/cpu/input_raster.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/raster.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <numeric>
#include <type_traits>
#include <vector>

namespace chorus::kernels::detail {

inline constexpr Index most_depthwise_taps = 64;

inline bool suits_depthwise(const Conv2dShape& s) {
  return s.in_channels == s.groups && s.out_channels == s.groups && s.kernel_h * s.kernel_w <= most_depthwise_taps &&
         s.stride_h * s.stride_w <= most_depthwise_taps;
}

/// The taps of a pixel: indices in the kernel, offsets in the raster from the pixel, and weights.
template <class T>
struct DepthwiseTaps {
  Index count = 0;
  Index which[most_depthwise_taps], offsets[most_depthwise_taps];
  T weights[most_depthwise_taps];

  void take_weights(const T* kernel) {
    for (Index t = 0; t < count; ++t) weights[t] = kernel[which[t]];
  }
};

/// Number of rows computed together, limited by the registers.
inline constexpr Index depthwise_block = 4;

/// Calls f(i, rows), with constant `rows`, for blocks of rows.
template <class F>
void for_row_blocks(Index rows, const F& f) {
  Index i = 0;
  for (; i + depthwise_block <= rows; i += depthwise_block) f(i, std::integral_constant<Index, depthwise_block>{});
  for (; i < rows; ++i) f(i, std::integral_constant<Index, 1>{});
}

/// to[r * to_pitch + j] = bias + sum over the taps t of weight[t] * raster[offset[t] + r * pitch + j], or += with
/// `accumulate`, for r < rows and j < columns.
template <class T, class Rows>
void depthwise_rows(Rows rows, Index columns, const DepthwiseTaps<T>& taps, const T* raster, Index pitch, T bias, T* to,
                    Index to_pitch, bool accumulate) {
  for_packets<T>(columns, [&](Index j, auto count) {
    Packet<T> sums[rows()];
    for (Index r = 0; r < rows; ++r) sums[r] = splat(bias);
    for (Index t = 0; t < taps.count; ++t) {
      const auto weight = splat(taps.weights[t]);
      const T* from = raster + taps.offsets[t] + j;
      for (Index r = 0; r < rows; ++r) sums[r] = pmadd(weight, load(from + r * pitch, Whole<T>{}), sums[r]);
    }
    for (Index r = 0; r < rows; ++r) store(to + r * to_pitch + j, sums[r], count, accumulate);
  });
}

/// A raster of x with a single plane.
template <class T>
InputRaster<T> plane_raster(const Conv2dShape& s) {
  InputRaster<T> raster(s);
  raster.channels = raster.images = 1;
  return raster;
}

template <class T>
void depthwise_forward(Cpu device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  const Index out_h = s.out_height(), out_w = s.out_width(), out = out_h * out_w, taps = s.kernel_h * s.kernel_w;
  if constexpr (LaneRange<T>::available)
    if (suits_depthwise_3x3(s)) return depthwise_3x3_forward(s, x, weight, bias, y);
  const InputRaster<T> raster = plane_raster<T>(s);
  const ThreadScratch<T> xs(device, raster.size());
  for_planes(s.batch * s.groups, out * taps, [&](Index first, Index count) {
    DepthwiseTaps<T> all;
    all.count = taps;
    std::iota(all.which, all.which + taps, Index{0});
    raster.offsets(all.offsets);
    for (Index plane = first; plane < first + count; ++plane) {
      const Index channel = plane % s.groups;
      all.take_weights(weight + channel * taps);
      raster.fill(x + plane * s.height * s.width, 1, xs.data());
      for_row_blocks(out_h, [&](Index i, auto rows) {
        fetch_ahead(x + ((plane + 1) * s.height + i * s.stride_h) * s.width, rows * s.stride_h * s.width);
        depthwise_rows(rows, out_w, all, xs.data() + i * raster.pitch, raster.pitch,
                       bias == nullptr ? T{0} : bias[channel], y + plane * out + i * out_w, out_w, false);
      });
    }
  });
}

/// sums[t] += sum over the pixels of dy * raster[offsets[t] + the pixel's position]. If `taps` is a constant, the sums
/// stay in registers. For each row `ahead` numbers from `next` are fetched.
template <class T, class Taps>
void depthwise_sums(Index rows, Index columns, Taps taps, const T* dy, const Index* offsets, const T* raster,
                    Index pitch, T* sums, const T* next, Index ahead) {
  constexpr bool constant = !std::is_same_v<Taps, Index>;
  Packet<T> all[most_depthwise_taps];
  for (Index t = 0; t < taps; ++t) all[t] = splat(T{0});
  const auto add_rows = [&](Index i, auto block) {
    fetch_ahead(next + i * ahead, block * ahead);
    for_packets<T>(columns, [&](Index j, auto count) {
      Packet<T> gradients[block()];
      for (Index r = 0; r < block; ++r) gradients[r] = load(dy + (i + r) * columns + j, count);
      for (Index t = 0; t < taps; ++t) {
        const T* from = raster + offsets[t] + i * pitch + j;
        for (Index r = 0; r < block; ++r) all[t] = pmadd(gradients[r], load(from + r * pitch, count), all[t]);
      }
    });
  };
  if constexpr (constant)
    for (Index i = 0; i < rows; ++i) add_rows(i, std::integral_constant<Index, 1>{});
  else
    for_row_blocks(rows, add_rows);
  for (Index t = 0; t < taps; ++t) sums[t] += Sum<T>::fold(all[t]);
}

template <class T>
void depthwise_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight, bool accumulate) {
  const Index out_h = s.out_height(), out_w = s.out_width(), out = out_h * out_w, taps = s.kernel_h * s.kernel_w;
  if constexpr (LaneRange<T>::available)
    if (suits_depthwise_3x3(s)) return depthwise_3x3_backward_weight(s, x, dy, dweight, accumulate);
  const InputRaster<T> raster = plane_raster<T>(s);
  Index offsets[most_depthwise_taps];
  raster.offsets(offsets);
  const ThreadScratch<T> xs(device, raster.size());
  if (!accumulate) std::fill_n(dweight, s.weight_count(), T{0});
  for_planes(s.groups, s.batch * out * taps, [&](Index first, Index count) {
    for (Index channel = first; channel < first + count; ++channel)
      for (Index n = 0; n < s.batch; ++n) {
        const Index plane = n * s.groups + channel;
        raster.fill(x + plane * s.height * s.width, 1, xs.data());
        const auto add = [&](auto k) {
          depthwise_sums(out_h, out_w, k, dy + plane * out, offsets, xs.data(), raster.pitch, dweight + channel * taps,
                         x + (plane + s.groups) * s.height * s.width, s.stride_h * s.width);
        };
        taps == 9 ? add(std::integral_constant<Index, 9>{}) : add(taps);
      }
  });
}

/// to[j] = first[j / 2] for even j < n and second[j / 2] for odd j, or +=.
template <class T>
void put_by_turns(const T* first, const T* second, Index n, T* to, bool accumulate) {
  for (Index j = 0; j < n / 2; ++j) {
    to[2 * j] = first[j] + (accumulate ? to[2 * j] : T{0});
    to[2 * j + 1] = second[j] + (accumulate ? to[2 * j + 1] : T{0});
  }
  if (n % 2 == 1) to[n - 1] = first[n / 2] + (accumulate ? to[n - 1] : T{0});
}

/// Computes dx phase by phase: all pixels of a phase use the same taps, at the same offsets in dy's raster.
template <class T>
void depthwise_backward_input(Cpu device, const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate) {
  const Index out = s.out_height() * s.out_width(), taps = s.kernel_h * s.kernel_w;
  if constexpr (LaneRange<T>::available)
    if (suits_depthwise_3x3(s)) return depthwise_3x3_backward_input(s, weight, dy, dx, accumulate);
  const GradientRaster<T> raster(s);
  const Index columns = raster.phase_columns(), line = columns + lanes<T>;
  const ThreadScratch<T> ys(device, raster.rows * raster.pitch + raster.slack),
      lines(device, s.stride_w * depthwise_block * line);

  std::vector<DepthwiseTaps<T>> phases(static_cast<std::size_t>(s.stride_h * s.stride_w));
  for (Index tap = 0; tap < taps; ++tap) {
    const Index h = tap / s.kernel_w * s.dilation_h, w = tap % s.kernel_w * s.dilation_w;
    auto& met = phases[static_cast<std::size_t>(h % s.stride_h * s.stride_w + w % s.stride_w)];
    met.which[met.count] = tap;
    met.offsets[met.count++] = raster.offset(s, h, w);
  }
  const auto go_back = [&](Index plane, Index phase_h, const DepthwiseTaps<T>* met) {
    const Axis vertical = raster.vertical(s, phase_h);
    const Index begin = vertical.begin(raster.phase_rows()), end = vertical.end(raster.phase_rows());
    const auto row = [&](Index i) {
      return dx + (plane * s.height + (begin + i) * s.stride_h + vertical.origin) * s.width;
    };
    for_row_blocks(end - begin, [&](Index i, auto block) {
      const T* from = ys.data() + (begin + i) * raster.pitch;
      if (s.stride_w == 1)
        return depthwise_rows(block, s.width, *met, from, raster.pitch, T{0}, row(i), s.stride_h * s.width, accumulate);
      for (Index phase = 0; phase < s.stride_w; ++phase)
        depthwise_rows(block, columns, met[phase], from, raster.pitch, T{0},
                       lines.data() + phase * depthwise_block * line, line, false);
      for (Index r = 0; r < block; ++r) {
        const auto of_phase = [&](Index phase) { return lines.data() + (phase * depthwise_block + r) * line; };
        if (s.stride_w == 2) {
          const Index first = s.padding_w % 2;  // the phase of column 0
          fetch_ahead<true>(row(i + r) + block * s.stride_h * s.width, s.stride_h * s.width);
          put_by_turns(of_phase(first), of_phase(1 - first) + first, s.width, row(i + r), accumulate);
          continue;
        }
        for (Index phase = 0; phase < s.stride_w; ++phase) {
          const Axis axis = raster.horizontal(s, phase);
          const Index left_most = axis.begin(columns), n = axis.end(columns) - left_most;
          put_strided(of_phase(phase) + left_most, n, row(i + r) + left_most * s.stride_w + axis.origin, s.stride_w,
                      accumulate);
        }
      }
    });
  };
  for_planes(s.batch * s.groups, out * taps, [&](Index first, Index count) {
    auto own = phases;
    for (Index plane = first; plane < first + count; ++plane) {
      for (auto& met : own) met.take_weights(weight + plane % s.groups * taps);
      raster.fill(s, dy + plane * out, ys.data());
      std::fill_n(ys.data() + raster.rows * raster.pitch, raster.slack, T{0});
      for (Index phase = 0; phase < s.stride_h; ++phase) go_back(plane, phase, own.data() + phase * s.stride_w);
    }
  });
}

}  // namespace chorus::kernels::detail
