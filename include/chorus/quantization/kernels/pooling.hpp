#pragma once
/// Pooling of 8-bit images.

#include <algorithm>
#include <chorus/core/dtype.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/pooling.hpp>
#include <chorus/quantization/kernels/image.hpp>
#include <chorus/quantization/kernels/pointwise.hpp>
#include <cstdint>

namespace chorus::kernels::int8 {

namespace detail {
/// Calls f(image, row, column, top, left) for each window, which may extend beyond the image.
template <class F>
void for_windows(const Pool2dShape& s, const Images& x, const Images& y, const F& f) {
  parallel_for(y.batch * y.height, [&](Index line) {
    const Index image = line / y.height, row = line % y.height;
    const Index top = row * s.stride_h - s.padding_h;
    for (Index column = 0; column < y.width; ++column) f(image, row, column, top, column * s.stride_w - s.padding_w);
  }, x.bytes() > 100'000);
}
}  // namespace detail

/// y = the maximum of each window. Padding never counts. `s.planes` is ignored.
inline void max_pool2d(const Pool2dShape& s, const Images& x, const Images& y) {
  detail::for_windows(s, x, y, [&](Index image, Index row, Index column, Index top, Index left) {
    std::uint8_t* const to = y.at(image, row, column);
    std::fill_n(to, x.channels, std::uint8_t{0});
    for (Index kh = 0; kh < s.kernel_h; ++kh)
      for (Index kw = 0; kw < s.kernel_w; ++kw) {
        const Index i = top + kh * s.dilation_h, j = left + kw * s.dilation_w;
        if (i < 0 || i >= x.height || j < 0 || j >= x.width) continue;
        const std::uint8_t* const from = x.at(image, i, j);
        for (Index c = 0; c < x.channels; ++c) to[c] = std::max(to[c], from[c]);
      }
  });
}

/// The maximum size of a mean's window: with fake quantisation sums are in float, which is exact up to here.
inline constexpr Index most_pooled = 16'384;

/// How means become 8-bit numbers: the levels of float(sum of (x - zero_point)) * (scale / count), where `count` is the
/// number of elements in a window.
struct Mean {
  Levels x, y;
  bool count_include_pad = true;

  std::uint8_t operator()(std::int32_t sum, Index numbers, Index divisor) const {
    const auto centered = sum - static_cast<std::int32_t>(numbers) * x.zero_point;
    return level_of(y, quantized::mean_of_steps(centered, x.scale, divisor));
  }
};

/// y = the mean of each window.
inline void avg_pool2d(const Pool2dShape& s, const Images& x, const Images& y, const Mean& mean) {
  constexpr Index block = 128;
  detail::for_windows(s, x, y, [&](Index image, Index row, Index column, Index top, Index left) {
    for (Index c = 0; c < x.channels; c += block) {
      const Index count = std::min(block, x.channels - c);
      std::int32_t sums[block] = {};
      Index numbers = 0;
      for (Index i = std::max<Index>(top, 0); i < std::min(top + s.kernel_h, x.height); ++i)
        for (Index j = std::max<Index>(left, 0); j < std::min(left + s.kernel_w, x.width); ++j, ++numbers) {
          const std::uint8_t* const from = x.at(image, i, j) + c;
          for (Index l = 0; l < count; ++l) sums[l] += from[l];
        }
      // Numbers beyond the padding at the far side, with `ceil_mode`, never count.
      const Index whole = (std::min(top + s.kernel_h, x.height + s.padding_h) - top) *
                          (std::min(left + s.kernel_w, x.width + s.padding_w) - left);
      const Index divisor = std::max<Index>(1, mean.count_include_pad ? whole : numbers);
      std::uint8_t* const to = y.at(image, row, column) + c;
      for (Index l = 0; l < count; ++l) to[l] = mean(sums[l], numbers, divisor);
    }
  });
}

}  // namespace chorus::kernels::int8
