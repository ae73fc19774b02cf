#pragma once
/// The memory layouts of x and dy for a convolution's passes.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/cpu/raster.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/tile.hpp>

namespace chorus::kernels::detail {

/// The number of images that together have about a thousand pixels.
inline Index images_per_block(Index batch, Index plane) {
  const Index most = (1023 + plane) / plane;
  const Index parts = (batch + most - 1) / most;
  return (batch + parts - 1) / parts;
}

/// Whether a pass is worth threads: a million multiplications take about 20 us.
inline bool worth_threads(const Conv2dShape& s) {
  return s.y_count() * (s.in_channels / s.groups) * s.kernel_h * s.kernel_w > 1'000'000;
}

/// Calls f(group, first, count) for blocks of `images` images of each of `groups` groups.
template <class F>
void for_blocks(const Conv2dShape& s, Index images, Index groups, const F& f) {
  const Index tasks = (s.batch + images - 1) / images * groups;
  parallel_ranges(
      tasks, 1, worth_threads(s) ? 1 : tasks,
      [&](Index task, Index count) {
        for (const Index end = task + count; task < end; ++task) {
          const Index first = task / groups * images;
          f(task % groups, first, std::min(images, s.batch - first));
        }
      },
      16);
}

/// Calls add(group, first, count, sums) for the same blocks, and adds all sums to `total`, which has `size` numbers.
/// The batch is split into slices with separate sums, which are added in pairs: shorter sums have smaller rounding
/// errors, and threads share the work. The number of slices depends only on the shape.
template <class T, class Add>
void sum_slices(Cpu device, const Conv2dShape& s, Index images, Index size, T* total, const Add& add) {
  const Index blocks = (s.batch + images - 1) / images;
  const Index slices = std::min<Index>(blocks, s.weight_count() <= (Index{1} << 16) ? 8 : 2);
  const Scratch<T> partial(device, (slices - 1) * size);
  const auto sums = [&](Index slice) { return slice == 0 ? total : partial.data() + (slice - 1) * size; };
  const auto sum_slice = [&](Index slice) {
    if (slice > 0) std::fill_n(sums(slice), size, T{0});
    for (Index group = 0; group < s.groups; ++group)
      for (Index b = slice * blocks / slices; b < (slice + 1) * blocks / slices; ++b)
        add(group, b * images, std::min(images, s.batch - b * images), sums(slice));
  };
  parallel_for(slices, sum_slice, worth_threads(s));
  for (Index step = 1; step < slices; step *= 2)
    for (Index slice = 0; slice + step < slices; slice += 2 * step)
      for (Index i = 0; i < size; ++i) sums(slice)[i] += sums(slice + step)[i];
}

/// Along an axis, tap t reads phase t * dilation % stride. A raster omits phases that no tap reads.
struct Phases {
  Index kernel, stride, dilation;
  bool used(Index phase) const {
    for (Index tap = 0; tap < std::min(kernel, stride); ++tap)
      if (tap * dilation % stride == phase) return true;
    return false;
  }
  /// The number of used phases before `phase`.
  Index rank(Index phase) const {
    Index below = 0;
    for (Index other = 0; other < phase; ++other) below += used(other) ? 1 : 0;
    return below;
  }
  Index count() const { return rank(stride); }
};

/// The rasters of one group's input channels (split into phases if there are strides), for forward and the weight
/// gradient. Image n of plane p starts at (p * images + n) * plane.
template <class T>
struct InputRaster {
  const Conv2dShape& s;
  Phases vertical, horizontal;
  Index channels, rows, pitch, plane, images, reach;

  explicit InputRaster(const Conv2dShape& shape)
      : s(shape),
        vertical{s.kernel_h, s.stride_h, s.dilation_h},
        horizontal{s.kernel_w, s.stride_w, s.dilation_w},
        channels(s.in_channels / s.groups) {
    // Without stride a row's right padding is the next row's left padding, and an image's bottom padding is the next
    // one's top padding.
    rows = s.stride_h == 1 ? std::max(s.height + s.padding_h, s.out_height())
                           : (s.height + 2 * s.padding_h + s.stride_h - 1) / s.stride_h;
    pitch = s.stride_w == 1 ? std::max(s.width + s.padding_w, s.out_width())
                            : (s.width + 2 * s.padding_w + s.stride_w - 1) / s.stride_w;
    plane = rows * pitch;
    images = images_per_block(s.batch, plane);
    reach = s.dilation_h * (s.kernel_h - 1) / s.stride_h * pitch + s.dilation_w * (s.kernel_w - 1) / s.stride_w;
  }

  /// Number of elements of the rasters, including trailing zeros that the last tile may read.
  Index size() const {
    return channels * vertical.count() * horizontal.count() * images * plane + reach + 2 * tile_columns<T>;
  }

  /// The offset of each tap of each channel from the output's position.
  void offsets(Index* to) const {
    const Index phases_w = horizontal.count(), phases = vertical.count() * phases_w;
    for (Index c = 0; c < channels; ++c)
      for (Index kh = 0; kh < s.kernel_h; ++kh)
        for (Index kw = 0; kw < s.kernel_w; ++kw) {
          const Index h = kh * s.dilation_h, w = kw * s.dilation_w;
          const Index phase = vertical.rank(h % s.stride_h) * phases_w + horizontal.rank(w % s.stride_w);
          *to++ = (c * phases + phase) * images * plane + h / s.stride_h * pitch + w / s.stride_w;
        }
  }

  /// x: the first of `count` images, at the group's first channel.
  void fill(const T* x, Index count, T* to) const {
    for (Index c = 0; c < channels; ++c)
      for (Index h = 0; h < s.stride_h; ++h)
        for (Index w = 0; w < s.stride_w; ++w) {
          if (!vertical.used(h) || !horizontal.used(w)) continue;
          for (Index n = 0; n < count; ++n, to += plane)
            to_raster(x + (n * s.in_channels + c) * s.height * s.width, Axis{s.height, s.stride_h, h - s.padding_h},
                      Axis{s.width, s.stride_w, w - s.padding_w}, rows, pitch, to);
          std::fill_n(to, (images - count) * plane, T{0});
          to += (images - count) * plane;
        }
    std::fill_n(to, reach + 2 * tile_columns<T>, T{0});
  }

  Pixels pixels(Index count) const { return {count, s.out_height(), s.out_width(), pitch, plane}; }
};

/// The raster of dy for the input gradient. dx's pixels along an axis are j * stride + phase - padding, for j from
/// first to last. Zeros above and left of dy serve taps that reach there.
template <class T>
struct GradientRaster {
  Index first_h, last_h, first_w, last_w, top, left, rows, pitch, slack;

  explicit GradientRaster(const Conv2dShape& s)
      : first_h(s.padding_h / s.stride_h),
        last_h((s.height - 1 + s.padding_h) / s.stride_h),
        first_w(s.padding_w / s.stride_w),
        last_w((s.width - 1 + s.padding_w) / s.stride_w),
        top(std::max<Index>(0, s.dilation_h * (s.kernel_h - 1) / s.stride_h - first_h)),
        left(std::max<Index>(0, s.dilation_w * (s.kernel_w - 1) / s.stride_w - first_w)),
        rows(std::max(s.out_height() + top, last_h + 1)),
        pitch(std::max(s.out_width() + left, last_w + 1)),
        slack((first_h + top) * pitch + first_w + left + 2 * tile_columns<T>) {}

  /// The number of pixels of a phase along each axis.
  Index phase_rows() const { return last_h - first_h + 1; }
  Index phase_columns() const { return last_w - first_w + 1; }

  /// The offset of dy from the pixel's position, for a tap at (h, w) of the kernel.
  Index offset(const Conv2dShape& s, Index h, Index w) const {
    return (first_h + top - h / s.stride_h) * pitch + first_w + left - w / s.stride_w;
  }
  /// The positions of a phase's pixels in dx.
  Axis vertical(const Conv2dShape& s, Index phase) const {
    return {s.height, s.stride_h, first_h * s.stride_h + phase - s.padding_h};
  }
  Axis horizontal(const Conv2dShape& s, Index phase) const {
    return {s.width, s.stride_w, first_w * s.stride_w + phase - s.padding_w};
  }

  /// One plane of dy.
  void fill(const Conv2dShape& s, const T* dy, T* to) const {
    to_raster(dy, Axis{s.out_height(), 1, -top}, Axis{s.out_width(), 1, -left}, rows, pitch, to);
  }
};

}  // namespace chorus::kernels::detail
