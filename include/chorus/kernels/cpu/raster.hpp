#pragma once
/// The image layout of convolutions. In a raster, rows have a fixed pitch with zero padding between them, so the input
/// pixels of a kernel tap are the output positions plus one offset. A convolution is then a matrix product whose
/// right-hand side needs no copy per tap. With stride s, every s-th row and column forms a plane of its own, which
/// works the same way. Positions between rows are computed, too, and ignored.

#include <algorithm>
#include <chorus/kernels/cpu/packet.hpp>

namespace chorus::kernels::detail {

/// One axis: raster position i is coordinate `step * i + origin` of the image.
struct Axis {
  Index extent, step, origin;

  // The first position at or after coordinate `at`.
  Index position(Index at) const { return std::max<Index>(0, (at - origin + step - 1) / step); }
  Index begin(Index positions) const { return std::min(position(0), positions); }
  Index end(Index positions) const { return std::clamp(position(extent), begin(positions), positions); }
};

/// to[0, n) = from[0, n)
template <class T>
void copy_row(const T* from, Index n, T* to) {
  constexpr Index w = lanes<T>;
  if (n < w) return store(to, load(from, n), n);
  for (Index j = 0; j < n - w; j += w) store(to + j, load(from + j, Whole<T>{}), Whole<T>{});
  store(to + n - w, load(from + n - w, Whole<T>{}), Whole<T>{});
}

/// to[j] = from[j * step] for j < n.
template <class T>
void take_strided(const T* from, Index n, Index step, T* to) {
  if (step == 2)
    for (Index j = 0; j < n; ++j) to[j] = from[2 * j];
  else
    for (Index j = 0; j < n; ++j) to[j] = from[j * step];
}

/// to[j * step] = from[j] for j < n, or += with `accumulate`.
template <class T>
void put_strided(const T* from, Index n, T* to, Index step, bool accumulate) {
  if (accumulate)
    for (Index j = 0; j < n; ++j) to[j * step] += from[j];
  else
    for (Index j = 0; j < n; ++j) to[j * step] = from[j];
}

/// Stores one image as `rows` rows of `pitch` numbers; positions outside of the image are 0.
template <class T>
void to_raster(const T* image, Axis vertical, Axis horizontal, Index rows, Index pitch, T* to) {
  const Index top = vertical.begin(rows), bottom = vertical.end(rows);
  const Index left = horizontal.begin(pitch), right = horizontal.end(pitch);
  std::fill_n(to, top * pitch, T{0});
  for (Index i = top; i < bottom; ++i) {
    const T* from = image + (i * vertical.step + vertical.origin) * horizontal.extent;
    T* row = to + i * pitch;
    for (Index j = 0; j < left; ++j) row[j] = T{0};
    if (horizontal.step == 1)
      copy_row(from + left + horizontal.origin, right - left, row + left);
    else
      take_strided(from + left * horizontal.step + horizontal.origin, right - left, horizontal.step, row + left);
    for (Index j = right; j < pitch; ++j) row[j] = T{0};
  }
  std::fill_n(to + bottom * pitch, (rows - bottom) * pitch, T{0});
}

/// The inverse, without the padding: image = raster + `bias`, or image += with `accumulate`. Positions outside of the
/// image are skipped; image pixels without a position don't change.
template <class T>
void from_raster(const T* raster, Axis vertical, Axis horizontal, Index rows, Index pitch, T bias, T* image,
                 bool accumulate) {
  const Index left = horizontal.begin(pitch), right = horizontal.end(pitch), n = right - left;
  for (Index i = vertical.begin(rows); i < vertical.end(rows); ++i) {
    const T* from = raster + i * pitch + left;
    T* to =
        image + (i * vertical.step + vertical.origin) * horizontal.extent + left * horizontal.step + horizontal.origin;
    if (horizontal.step == 1 && !accumulate && n >= lanes<T>) {
      constexpr Index w = lanes<T>;
      for (Index j = 0; j < n - w; j += w) store(to + j, padd(load(from + j, Whole<T>{}), splat(bias)), Whole<T>{});
      store(to + n - w, padd(load(from + n - w, Whole<T>{}), splat(bias)), Whole<T>{});
    } else {
      for (Index j = 0; j < n; ++j) {
        T& pixel = to[j * horizontal.step];
        pixel = (accumulate ? pixel : T{0}) + from[j] + bias;
      }
    }
  }
}

/// Where a result's pixels are in a raster: pixel (image, i, j) at image * plane + i * pitch + j.
struct Pixels {
  Index images, rows, columns, pitch, plane;
};

}  // namespace chorus::kernels::detail
