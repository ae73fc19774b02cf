#pragma once
/// Two-dimensional convolution (cross-correlation, as in PyTorch) on the CPU. x: [batch, in_channels, height, width], weight:
/// [out_channels, in_channels / groups, kernel_h, kernel_w], y: [batch, out_channels, out_height, out_width]. Results
/// overwrite; gradients overwrite or, with `accumulate`, add.

#include <functional>

#include <chorus/core/device.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/cpu/raster.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/tile.hpp>

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {

inline constexpr Index conv_depth = 512, conv_rows = 128;

/// Rasters of the images of a part of the batch. A plane of image n and plane number p starts at (p * images + n) * plane().
struct Rasters {
  Index rows, pitch, images;
  Index plane() const { return rows * pitch; }
  Index size(Index planes) const { return planes * images * plane(); }
};

/// As many images at a time as make rows of some hundred pixels, and at least one, but not much more than the second-level
/// cache holds.
inline Index images_at_once(Index batch, Index channels, Index plane) {
  constexpr Index pixels = 512, numbers = 65536;
  const Index most = std::max({Index{1}, (pixels + plane - 1) / plane, numbers / (channels * plane)});
  const Index parts = (batch + most - 1) / most;
  return (batch + parts - 1) / parts;
}

constexpr Index round_up(Index n, Index unit) { return (n + unit - 1) / unit * unit; }

/// What the forward and the weight's pass read: all phases of all channels of one group, with the taps' offsets.
template <class T>
struct InputRaster {
  const Conv2dShape& s;
  Index channels, phases, taps, reach;
  Rasters r;

  explicit InputRaster(const Conv2dShape& shape)
      : s(shape), channels(s.in_channels / s.groups), phases(s.stride_h * s.stride_w), taps(s.kernel_h * s.kernel_w) {
    const Index padded_h = s.height + 2 * s.padding_h, padded_w = s.width + 2 * s.padding_w;
    // Without stride a row's right padding is the next row's left padding, and so is an image's bottom padding.
    r.rows = s.stride_h == 1 ? std::max(s.height + s.padding_h, s.out_height()) : (padded_h + s.stride_h - 1) / s.stride_h;
    r.pitch = s.stride_w == 1 ? std::max(s.width + s.padding_w, s.out_width()) : (padded_w + s.stride_w - 1) / s.stride_w;
    r.images = images_at_once(s.batch, channels * phases + s.out_channels / s.groups, r.plane());
    reach = s.dilation_h * (s.kernel_h - 1) / s.stride_h * r.pitch + s.dilation_w * (s.kernel_w - 1) / s.stride_w;
  }

  /// Numbers in the raster, with the zeros behind it that the last tile may read.
  Index size() const { return r.size(channels * phases) + reach + tile_columns<T>; }

  void offsets(Index* to) const {
    for (Index c = 0; c < channels; ++c)
      for (Index kh = 0; kh < s.kernel_h; ++kh)
        for (Index kw = 0; kw < s.kernel_w; ++kw) {
          const Index h = kh * s.dilation_h, w = kw * s.dilation_w;
          const Index phase = h % s.stride_h * s.stride_w + w % s.stride_w;
          *to++ = (c * phases + phase) * r.images * r.plane() + h / s.stride_h * r.pitch + w / s.stride_w;
        }
  }

  /// x: the first of `count` images, at the group's first channel.
  void fill(const T* x, Index count, T* to) const {
    for (Index c = 0; c < channels; ++c)
      for (Index phase = 0; phase < phases; ++phase)
        for (Index n = 0; n < r.images; ++n, to += r.plane()) {
          if (n >= count)
            std::fill_n(to, r.plane(), T{0});
          else
            to_raster(x + (n * s.in_channels + c) * s.height * s.width,
                      Axis{s.height, s.stride_h, phase / s.stride_w - s.padding_h},
                      Axis{s.width, s.stride_w, phase % s.stride_w - s.padding_w}, r.rows, r.pitch, to);
        }
    std::fill_n(to, reach + tile_columns<T>, T{0});
  }

  /// Runs of positions that hold all output pixels of `count` images: one for all, or one for each where that is less work.
  Runs runs(Index count, Index unit) const {
    const Index span = (s.out_height() - 1) * r.pitch + s.out_width();
    const Index separate = round_up(span, unit);
    if (separate < r.plane()) return {count, separate, r.plane()};
    return {1, round_up((count - 1) * r.plane() + span, unit), 0};
  }
};

/// c[i, q] = sum over p of a[i, p] * b[offsets[p] + q] for the positions q of the runs, whose length is a multiple of
/// `tile_columns`.
template <class T>
void multiply_raster(Index m, Index k, Runs runs, Matrix<T> a, const T* b, const Index* offsets, T* c, Index c_row) {
  alignas(64) constexpr T zeros[tile_columns<T>] = {};
  const auto block = [&](Index p, Index depth) {
    for_pieces(m, conv_rows, [&](Index i0, Index rows) {
      for (Index run = 0; run < runs.count; ++run)
        for (Index q = run * runs.pitch; q < run * runs.pitch + runs.length; q += tile_columns<T>)
          for_pieces(rows, tile_rows, [&](Index i, Index count) {
            const Matrix<T> left{a.data + (i0 + i) * a.row + p * a.column, a.row, a.column};
            multiply_rows(count, depth, left, b + q, offsets + p, zeros, c + (i0 + i) * c_row + q, c_row, p > 0);
          });
    });
  };
  if (k == 0)
    block(0, 0);
  else
    for_pieces(k, conv_depth, block);
}

}  // namespace detail

/// y = conv(x, weight) + bias; `bias` may be null.
template <std::floating_point T>
void conv2d_forward(Cpu device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, out_h = s.out_height(), out_w = s.out_width();
  if (s.batch * s.out_channels * out_h * out_w == 0) return;
  const InputRaster<T> raster(s);
  const Index k = raster.channels * raster.taps, row = raster.r.images * raster.r.plane() + tile_columns<T>;
  const Scratch<T> xs(device, raster.size()), ys(device, filters * row);
  const Scratch<Index> offsets(device, k);
  raster.offsets(offsets.data());
  for (Index group = 0; group < s.groups; ++group)
    for (Index first = 0; first < s.batch; first += raster.r.images) {
      const Index count = std::min(raster.r.images, s.batch - first);
      raster.fill(x + (first * s.in_channels + group * raster.channels) * s.height * s.width, count, xs.data());
      multiply_raster(filters, k, raster.runs(count, tile_columns<T>), Matrix<T>{weight + group * filters * k, k, 1},
                      xs.data(), offsets.data(), ys.data(), row);
      for (Index n = 0; n < count; ++n)
        for (Index o = 0; o < filters; ++o) {
          const Index channel = group * filters + o;
          from_raster(ys.data() + o * row + n * raster.r.plane(), Axis{out_h, 1, 0}, Axis{out_w, 1, 0}, raster.r.rows,
                      raster.r.pitch, bias != nullptr ? bias[channel] : T{0},
                      y + ((first + n) * s.out_channels + channel) * out_h * out_w, false);
        }
    }
}

/// dweight = the gradient with respect to the weight.
template <std::floating_point T>
void conv2d_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight, bool accumulate) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, out_h = s.out_height(), out_w = s.out_width();
  const Index weights = s.out_channels * (s.in_channels / s.groups) * s.kernel_h * s.kernel_w;
  if (!accumulate) std::fill_n(dweight, weights, T{0});
  if (s.batch * weights * out_h * out_w == 0) return;
  const InputRaster<T> raster(s);
  const Index k = raster.channels * raster.taps, row = raster.r.images * raster.r.plane() + tile_columns<T>;
  const Scratch<T> xs(device, raster.size()), ys(device, filters * row);
  const Scratch<Index> offsets(device, k);
  raster.offsets(offsets.data());
  for (Index group = 0; group < s.groups; ++group)
    for (Index first = 0; first < s.batch; first += raster.r.images) {
      const Index count = std::min(raster.r.images, s.batch - first);
      raster.fill(x + (first * s.in_channels + group * raster.channels) * s.height * s.width, count, xs.data());
      for (Index o = 0; o < filters; ++o) {
        T* to = ys.data() + o * row;
        for (Index n = 0; n < count; ++n, to += raster.r.plane())
          to_raster(dy + ((first + n) * s.out_channels + group * filters + o) * out_h * out_w, Axis{out_h, 1, 0},
                    Axis{out_w, 1, 0}, raster.r.rows, raster.r.pitch, to);
        std::fill_n(to, tile_columns<T>, T{0});
      }
      const Runs runs = raster.runs(count, lanes<T>);
      T* dw = dweight + group * filters * k;
      for_pieces(filters, dot_rows, [&](Index o, Index rows) {
        for (Index p = 0; p < k; p += dot_columns)
          dot_rows_tile(rows, std::min<Index>(dot_columns, k - p), runs, ys.data() + o * row, row, xs.data(),
                        offsets.data() + p, dw + o * k + p, k);
      });
    }
}

/// dx = the gradient with respect to x. Along each axis dx[i] with i + padding = stride * j + phase is the sum of
/// weight[t] * dy[j - t * dilation / stride] over the taps t with t * dilation % stride = phase.
template <std::floating_point T>
void conv2d_backward_input(Cpu device, const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, channels = s.in_channels / s.groups, taps = s.kernel_h * s.kernel_w;
  const Index out_h = s.out_height(), out_w = s.out_width(), image = s.height * s.width;
  if (s.batch * s.in_channels * image == 0) return;

  // dy's raster starts `top` rows before dy; its row 0 and dx's have the same j.
  const Index first_h = s.padding_h / s.stride_h, first_w = s.padding_w / s.stride_w;
  const Index last_h = (s.height - 1 + s.padding_h) / s.stride_h, last_w = (s.width - 1 + s.padding_w) / s.stride_w;
  const Index top = std::max<Index>(0, s.dilation_h * (s.kernel_h - 1) / s.stride_h - first_h);
  const Index left = std::max<Index>(0, s.dilation_w * (s.kernel_w - 1) / s.stride_w - first_w);
  Rasters r{std::max(out_h + top, last_h + 1), std::max(out_w + left, last_w + 1), 1};
  r.images = images_at_once(s.batch, channels + filters, r.plane());
  const Index slack = (first_h + top) * r.pitch + first_w + left + tile_columns<T>;
  const Index row = r.images * r.plane() + tile_columns<T>, rows_used = last_h - first_h + 1;

  const Scratch<T> ys(device, r.size(filters) + slack), xs(device, channels * row), w(device, filters * taps * channels);
  const Scratch<Index> offsets(device, filters * taps);
  for (Index group = 0; group < s.groups; ++group)
    for (Index first = 0; first < s.batch; first += r.images) {
      const Index count = std::min(r.images, s.batch - first);
      T* to = ys.data();
      for (Index o = 0; o < filters; ++o)
        for (Index n = 0; n < r.images; ++n, to += r.plane()) {
          if (n < count)
            to_raster(dy + ((first + n) * s.out_channels + group * filters + o) * out_h * out_w, Axis{out_h, 1, -top},
                      Axis{out_w, 1, -left}, r.rows, r.pitch, to);
          else
            std::fill_n(to, r.plane(), T{0});
        }
      std::fill_n(to, slack, T{0});

      for (Index phase = 0; phase < s.stride_h * s.stride_w; ++phase) {
        const Index phase_h = phase / s.stride_w, phase_w = phase % s.stride_w;
        Index k = 0;
        for (Index o = 0; o < filters; ++o)
          for (Index tap = 0; tap < taps; ++tap) {
            const Index h = tap / s.kernel_w * s.dilation_h, v = tap % s.kernel_w * s.dilation_w;
            if (h % s.stride_h != phase_h || v % s.stride_w != phase_w) continue;
            offsets.data()[k] = o * r.images * r.plane() + (first_h + top - h / s.stride_h) * r.pitch + first_w + left -
                                v / s.stride_w;
            const T* from = weight + (group * filters + o) * channels * taps + tap;
            for (Index c = 0; c < channels; ++c) w.data()[k * channels + c] = from[c * taps];
            ++k;
          }
        const Index length = round_up((count - 1) * r.plane() + rows_used * r.pitch, tile_columns<T>);
        multiply_raster(channels, k, Runs{1, length, 0}, Matrix<T>{w.data(), 1, channels}, ys.data(), offsets.data(),
                        xs.data(), row);
        for (Index n = 0; n < count; ++n)
          for (Index c = 0; c < channels; ++c)
            from_raster(xs.data() + c * row + n * r.plane(),
                        Axis{s.height, s.stride_h, first_h * s.stride_h + phase_h - s.padding_h},
                        Axis{s.width, s.stride_w, first_w * s.stride_w + phase_w - s.padding_w}, r.rows, r.pitch, T{0},
                        dx + ((first + n) * s.in_channels + group * channels + c) * image, accumulate);
      }
    }
}

/// dbias = the sum of dy over batch and pixels.
template <std::floating_point T>
void conv2d_backward_bias(Cpu, const Conv2dShape& s, const T* dy, T* dbias, bool accumulate) {
  const Index pixels = s.out_height() * s.out_width();
  for (Index o = 0; o < s.out_channels; ++o) {
    const T total = reduce_rows(0, s.batch, T{0}, std::plus<T>{}, [&](Index n) {
      const T* plane = dy + (n * s.out_channels + o) * pixels;
      return Sum<T>::fold(reduce_packets<T>(0, pixels, splat(T{0}), Sum<T>{},
                                            [&](Index i, auto count) { return load(plane + i, count); }));
    });
    dbias[o] = (accumulate ? dbias[o] : T{0}) + total;
  }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
