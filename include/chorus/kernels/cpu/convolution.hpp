#pragma once
/// Two-dimensional convolution on the CPU. Each pass is a matrix product over rasters of some images
/// (raster_product.hpp), or uses Winograd's algorithm (winograd.hpp), or needs no matrix products (depthwise.hpp).

#include <chorus/core/threads.hpp>
#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/cpu/convolution_1x1.hpp>
#include <chorus/kernels/cpu/depthwise.hpp>
#include <chorus/kernels/cpu/direct_convolution.hpp>
#include <chorus/kernels/cpu/input_raster.hpp>
#include <chorus/kernels/cpu/raster.hpp>
#include <chorus/kernels/cpu/raster_product.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/cpu/winograd.hpp>
#include <chorus/kernels/exact_sums.hpp>
#include <functional>

namespace chorus::kernels {

namespace detail {

/// The channels of one group in x, and in y.
inline ImageChannels group_inputs(const Conv2dShape& s) {
  return {s.in_channels / s.groups, s.height, s.width, s.in_channels * s.height * s.width};
}
inline ImageChannels group_results(const Conv2dShape& s) {
  const Index h = s.out_height(), w = s.out_width();
  return {s.out_channels / s.groups, h, w, s.out_channels * h * w};
}

/// A convolution of dilation d as one without, of d * d times as many images, which have each d-th row and column:
/// Winograd's algorithm suits these.
template <class T>
struct DilatedParts {
  const Index d;
  Conv2dShape shape;  ///< of the parts
  const bool suit;    ///< whether this is faster

  explicit DilatedParts(const Conv2dShape& s) : d(s.dilation_h), shape(of(s)), suit(suits(s)) {}

  /// images: [batch, channels, height, width]; parts: [batch, d, d, channels, height / d, width / d], rounded up, with
  /// zeros beyond the images.
  void split(Index channels, Index height, Index width, const T* images, T* parts) const {
    each(channels, height, width, [=](Index image, Index part, Axis vertical, Axis horizontal, Index rows, Index w) {
      to_raster(images + image, vertical, horizontal, rows, w, parts + part);
    });
  }
  /// The inverse, or images +=.
  void merge(Index channels, Index height, Index width, const T* parts, T* images, bool accumulate) const {
    each(channels, height, width, [=](Index image, Index part, Axis vertical, Axis horizontal, Index rows, Index w) {
      from_raster(parts + part, vertical, horizontal, rows, w, T{0}, images + image, accumulate);
    });
  }

 private:
  static Conv2dShape of(Conv2dShape s) {
    const Index d = s.dilation_h;
    s.batch *= d * d;
    s.height = (s.height + d - 1) / d;
    s.width = (s.width + d - 1) / d;
    s.padding_h /= d;
    s.padding_w /= d;
    s.dilation_h = s.dilation_w = 1;
    return s;
  }
  bool suits(const Conv2dShape& s) const {
    return d > 1 && s.dilation_w == d && s.stride_h == 1 && s.padding_h % d == 0 && s.padding_w % d == 0 &&
           suits_winograd<T>(shape);
  }
  template <class F>
  void each(Index channels, Index height, Index width, const F& f) const {
    const Index rows = (height + d - 1) / d, columns = (width + d - 1) / d, plane = height * width;
    parallel_ranges(shape.batch / (d * d) * channels, 1, thread_elements / plane + 1, [&](Index first, Index count) {
      for (Index image = first; image < first + count; ++image)
        for (Index k = 0; k < d * d; ++k)
          f(image * plane, ((image / channels * d * d + k) * channels + image % channels) * rows * columns,
            Axis{height, d, k / d}, Axis{width, d, k % d}, rows, columns);
    });
  }
};

/// A 1x1 convolution with a stride as one without, of the pixels that it reads.
template <class T>
struct ReadPixels {
  Conv2dShape whole, shape;
  bool suit;

  explicit ReadPixels(const Conv2dShape& s) : whole(s), shape(s) {
    shape.height = s.out_height();
    shape.width = s.out_width();
    shape.stride_h = shape.stride_w = 1;
    suit = s.stride_h * s.stride_w > 1 && suits_1x1<T>(shape);
  }
  /// to = the pixels of x that are read.
  void take(const T* x, T* to) const {
    for_planes([&](Index in_x, Index in_read) {
      to_raster(x + in_x, vertical(), horizontal(), shape.height, shape.width, to + in_read);
    });
  }
  /// The inverse: those pixels of x = from, or +=.
  void put(const T* from, T* x, bool accumulate) const {
    for_planes([&](Index in_x, Index in_read) {
      from_raster(from + in_read, vertical(), horizontal(), shape.height, shape.width, T{0}, x + in_x, accumulate);
    });
  }

 private:
  Axis vertical() const { return {whole.height, whole.stride_h, 0}; }
  Axis horizontal() const { return {whole.width, whole.stride_w, 0}; }
  template <class F>
  void for_planes(const F& f) const {
    parallel_for(
        whole.batch * whole.in_channels,
        [&](Index i) { f(i * whole.height * whole.width, i * shape.height * shape.width); }, worth_threads(whole));
  }
};

}  // namespace detail

template <std::floating_point T>
void conv2d_forward(Cpu device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, out_h = s.out_height(), out_w = s.out_width(), out = out_h * out_w;
  if (s.y_count() == 0) return;
  if (suits_depthwise(s)) return depthwise_forward(device, s, x, weight, bias, y);
  if (const DilatedParts<T> parts(s); parts.suit) {
    const Scratch<T> xs(device, parts.shape.x_count()), ys(device, parts.shape.y_count());
    parts.split(s.in_channels, s.height, s.width, x, xs.data());
    conv2d_forward(device, parts.shape, xs.data(), weight, bias, ys.data());
    return parts.merge(s.out_channels, out_h, out_w, ys.data(), y, false);
  }
  if (suits_winograd<T>(s) && !exact_sums) {
    const ImageChannels in = group_inputs(s), to = group_results(s);
    for (Index group = 0; group < s.groups; ++group) {
      const auto convolve = [&](auto way) {
        winograd_convolve<decltype(way)>(
            device, s.batch, in, to, s.padding_h, s.padding_w, false, x + group * in.channels * in.plane(),
            weight + group * filters * in.channels * 9, bias == nullptr ? nullptr : bias + group * filters,
            y + group * filters * out, false);
      };
      s.stride_h == 1 ? convolve(UnitStride<T>{}) : convolve(StrideTwo<T>{});
    }
    return;
  }
  if (suits_1x1<T>(s)) {
    const Index channels = s.in_channels / s.groups;
    for (Index group = 0; group < s.groups; ++group)
      multiply_images(Trans::no, s.batch, filters, channels, out, weight + group * filters * channels,
                      x + group * channels * out, s.in_channels * out, bias == nullptr ? bias : bias + group * filters,
                      y + group * filters * out, s.out_channels * out, false, worth_threads(s));
    return;
  }
  if (const ReadPixels<T> pixels(s); pixels.suit) {
    const Scratch<T> xs(device, pixels.shape.x_count());
    pixels.take(x, xs.data());
    return conv2d_forward(device, pixels.shape, xs.data(), weight, bias, y);
  }
  if (filters >= direct_columns) return direct_forward(device, s, x, weight, bias, y);
  const InputRaster<T> raster(s);
  const Index k = raster.channels * s.kernel_h * s.kernel_w, row = raster.images * raster.plane + tile_columns<T>;
  const Scratch<Index> offsets(device, k);
  raster.offsets(offsets.data());
  const ThreadScratch<T> xs(device, raster.size()), ys(device, filters * row);
  for_blocks(s, raster.images, s.groups, [&](Index group, Index first, Index count) {
    raster.fill(x + (first * s.in_channels + group * raster.channels) * s.height * s.width, count, xs.data());
    multiply_raster(filters, k, raster.pixels(count), Matrix<T>{weight + group * filters * k, k, 1}, xs.data(),
                    offsets.data(), ys.data(), row);
    for (Index n = 0; n < count; ++n)
      for (Index o = 0; o < filters; ++o) {
        const Index channel = group * filters + o;
        from_raster(ys.data() + o * row + n * raster.plane, Axis{out_h, 1, 0}, Axis{out_w, 1, 0}, out_h, raster.pitch,
                    bias != nullptr ? bias[channel] : T{0}, y + ((first + n) * s.out_channels + channel) * out, false);
      }
  });
}

template <std::floating_point T>
void conv2d_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight, bool accumulate) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, out_h = s.out_height(), out_w = s.out_width(), out = out_h * out_w;
  const Index k = s.in_channels / s.groups * s.kernel_h * s.kernel_w;
  const bool nothing = s.y_count() * k == 0;
  if (!nothing && suits_depthwise(s)) return depthwise_backward_weight(device, s, x, dy, dweight, accumulate);
  if (const DilatedParts<T> parts(s); !nothing && parts.suit) {
    const Scratch<T> xs(device, parts.shape.x_count()), ys(device, parts.shape.y_count());
    parts.split(s.in_channels, s.height, s.width, x, xs.data());
    parts.split(s.out_channels, out_h, out_w, dy, ys.data());
    return conv2d_backward_weight(device, parts.shape, xs.data(), ys.data(), dweight, accumulate);
  }
  if (!nothing && suits_winograd<T>(s)) {
    const ImageChannels in = group_inputs(s), to = group_results(s);
    for (Index group = 0; group < s.groups; ++group) {
      const auto add = [&](auto way) {
        winograd_backward_weight<decltype(way)>(device, s.batch, in, to, s.padding_h, s.padding_w,
                                                x + group * in.channels * in.plane(), dy + group * filters * out,
                                                dweight + group * filters * k, accumulate);
      };
      s.stride_h == 1 ? add(UnitStride<T>{}) : add(StrideTwo<T>{});
    }
    return;
  }
  if (!nothing && filters >= direct_columns) return direct_backward_weight(device, s, x, dy, dweight, accumulate);
  if (!accumulate) std::fill_n(dweight, s.weight_count(), T{0});
  if (nothing) return;
  const InputRaster<T> raster(s);
  const Index row = raster.images * raster.plane + tile_columns<T>;
  const Scratch<Index> offsets(device, k);
  raster.offsets(offsets.data());
  const ThreadScratch<T> xs(device, raster.size()), ys(device, filters * row);
  sum_slices(device, s, raster.images, s.weight_count(), dweight, [&](Index group, Index first, Index count, T* sums) {
    raster.fill(x + (first * s.in_channels + group * raster.channels) * s.height * s.width, count, xs.data());
    const Runs runs = runs_of(raster.pixels(count), lanes<T>);
    // dy in the layout of x's runs: without gaps if they are computed in one run, or in one run per image.
    const Index rows = runs.count > 1 ? out_h : raster.rows, plane = runs.count > 1 ? runs.length : raster.plane;
    for (Index o = 0; o < filters; ++o) {
      T* to = ys.data() + o * row;
      for (Index n = 0; n < count; ++n, to += plane) {
        to_raster(dy + ((first + n) * s.out_channels + group * filters + o) * out, Axis{out_h, 1, 0}, Axis{out_w, 1, 0},
                  rows, raster.pitch, to);
        if (rows * raster.pitch < plane) std::fill_n(to + rows * raster.pitch, plane - rows * raster.pitch, T{0});
      }
      std::fill_n(to, tile_columns<T>, T{0});
    }
    for_pieces(filters, dot_rows, [&](Index o, Index dots) {
      for (Index p = 0; p < k; p += dot_columns)
        dot_rows_tile(dots, std::min<Index>(dot_columns, k - p), runs, ys.data() + o * row, row, xs.data(),
                      offsets.data() + p, sums + (group * filters + o) * k + p, k);
    });
  });
}

template <std::floating_point T>
void conv2d_backward_input(Cpu device, const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, channels = s.in_channels / s.groups, taps = s.kernel_h * s.kernel_w;
  const Index out_h = s.out_height(), out_w = s.out_width(), out = out_h * out_w, image = s.height * s.width;
  if (s.x_count() == 0) return;
  if (suits_depthwise(s)) return depthwise_backward_input(device, s, weight, dy, dx, accumulate);
  if (const DilatedParts<T> parts(s); parts.suit && s.y_count() > 0) {
    const Scratch<T> xs(device, parts.shape.x_count()), ys(device, parts.shape.y_count());
    parts.split(s.out_channels, out_h, out_w, dy, ys.data());
    conv2d_backward_input(device, parts.shape, weight, ys.data(), xs.data(), false);
    return parts.merge(s.in_channels, s.height, s.width, xs.data(), dx, accumulate);
  }
  // A convolution of dy with the flipped weight.
  Conv2dShape back = s;
  std::swap(back.in_channels, back.out_channels);
  back.height = out_h;
  back.width = out_w;
  back.padding_h = s.kernel_h - 1 - s.padding_h;
  back.padding_w = s.kernel_w - 1 - s.padding_w;
  const bool unit = s.stride_h == 1 && back.padding_h >= 0 && back.padding_w >= 0 && suits_winograd<T>(back);
  if (unit || (s.stride_h == 2 && suits_winograd<T>(s))) {
    const ImageChannels in = group_results(s), to = group_inputs(s);
    for (Index group = 0; group < s.groups; ++group) {
      const auto convolve = [&](auto way, Index padding_h, Index padding_w) {
        winograd_convolve<decltype(way), T>(device, s.batch, in, to, padding_h, padding_w, true,
                                            dy + group * filters * out, weight + group * filters * channels * taps,
                                            nullptr, dx + group * channels * image, accumulate);
      };
      unit ? convolve(UnitStride<T>{}, back.padding_h, back.padding_w) : convolve(StrideTwoInput<T>{}, 0, 0);
    }
    return;
  }

  // Longer sums are added to the old values at once, as below.
  if (suits_1x1<T>(s) && (!accumulate || filters <= gemm_depth)) {
    for (Index group = 0; group < s.groups; ++group)
      multiply_images<T>(Trans::yes, s.batch, channels, filters, image, weight + group * filters * channels,
                         dy + group * filters * image, s.out_channels * image, nullptr, dx + group * channels * image,
                         s.in_channels * image, accumulate, worth_threads(s));
    return;
  }

  const GradientRaster<T> raster(s);
  // Pixels of x that no tap reads: their gradient is 0.
  const bool holes = Phases{s.kernel_h, s.stride_h, s.dilation_h}.count() < s.stride_h ||
                     Phases{s.kernel_w, s.stride_w, s.dilation_w}.count() < s.stride_w;
  if (holes && !accumulate)
    parallel_ranges(s.x_count(), lanes<T>, thread_elements,
                    [&](Index first, Index count) { std::fill_n(dx + first, count, T{0}); });
  if (const ReadPixels<T> pixels(s); pixels.suit && s.y_count() > 0) {
    const Scratch<T> xs(device, pixels.shape.x_count());
    conv2d_backward_input(device, pixels.shape, weight, dy, xs.data(), false);
    return pixels.put(xs.data(), dx, accumulate);
  }
  const auto parts = equal_phases(device, s, raster);
  if (std::any_of(parts.begin(), parts.end(),
                  [&](const EqualPhases& part) { return part.columns(channels) >= direct_columns; }))
    return direct_backward_input(device, s, raster, parts, weight, dy, dx, accumulate);

  const Index plane = raster.rows * raster.pitch, images = images_per_block(s.batch, plane);
  const Index row = images * plane + tile_columns<T>;
  const ThreadScratch<T> ys(device, filters * images * plane + raster.slack), xs(device, channels * row);
  const Scratch<T> turned(device, filters * taps * channels);
  const Scratch<Index> offsets(device, filters * taps);
  for (Index group = 0; group < s.groups; ++group)
    for (Index phase = 0; phase < s.stride_h * s.stride_w; ++phase) {
      const Index phase_h = phase / s.stride_w, phase_w = phase % s.stride_w;
      Index k = 0;
      for (Index o = 0; o < filters; ++o)
        for (Index tap = 0; tap < taps; ++tap) {
          const Index h = tap / s.kernel_w * s.dilation_h, w = tap % s.kernel_w * s.dilation_w;
          if (h % s.stride_h != phase_h || w % s.stride_w != phase_w) continue;
          offsets.data()[k] = o * images * plane + raster.offset(s, h, w);
          const T* from = weight + (group * filters + o) * channels * taps + tap;
          for (Index c = 0; c < channels; ++c) turned.data()[k * channels + c] = from[c * taps];
          ++k;
        }
      if (k == 0 && holes) continue;

      for_blocks(s, images, 1, [&](Index, Index first, Index count) {
        T* to = ys.data();
        for (Index o = 0; o < filters; ++o) {
          for (Index n = 0; n < count; ++n, to += plane)
            raster.fill(s, dy + ((first + n) * s.out_channels + group * filters + o) * out, to);
          std::fill_n(to, (images - count) * plane, T{0});
          to += (images - count) * plane;
        }
        std::fill_n(to, raster.slack, T{0});

        const Pixels pixels{count, raster.phase_rows(), raster.phase_columns(), raster.pitch, plane};
        multiply_raster(channels, k, pixels, Matrix<T>{turned.data(), 1, channels}, ys.data(), offsets.data(),
                        xs.data(), row);
        for (Index n = 0; n < count; ++n)
          for (Index c = 0; c < channels; ++c)
            from_raster(xs.data() + c * row + n * plane, raster.vertical(s, phase_h), raster.horizontal(s, phase_w),
                        pixels.rows, raster.pitch, T{0},
                        dx + ((first + n) * s.in_channels + group * channels + c) * image, accumulate);
      });
    }
}

template <std::floating_point T>
void conv2d_backward_bias(Cpu device, const Conv2dShape& s, const T* dy, T* dbias, bool accumulate) {
  const Index pixels = s.out_height() * s.out_width(), planes = s.batch * s.out_channels;
  // Planes in memory order, so that each thread reads its own results.
  const Scratch<T> sums(device, planes);
  parallel_ranges(planes, 1, thread_elements / std::max<Index>(1, pixels) + 1, [&](Index first, Index count) {
    for (Index plane = first; plane < first + count; ++plane)
      sums.data()[plane] = Sum<T>::fold(reduce_packets<T>(
          0, pixels, splat(T{0}), Sum<T>{}, [&](Index i, auto n) { return load(dy + plane * pixels + i, n); }));
  });
  for (Index o = 0; o < s.out_channels; ++o) {
    const T total =
        reduce_rows(0, s.batch, T{0}, std::plus<T>{}, [&](Index n) { return sums.data()[n * s.out_channels + o]; });
    dbias[o] = (accumulate ? dbias[o] : T{0}) + total;
  }
}

}  // namespace chorus::kernels
