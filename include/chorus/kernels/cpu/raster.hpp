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
  if (n < w) {
    for (Index j = 0; j < n; ++j) to[j] = from[j];
    return;
  }
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
  Index count() const { return images * rows * columns; }
  Index position(Index pixel) const {
    const Index row = pixel / columns;
    return row / rows * plane + row % rows * pitch + pixel % columns;
  }
};

/// The raster row segments that hold the pixels [first, first + count), at most 256.
class Segments {
 public:
  Segments(const Pixels& pixels, Index first, Index count) {
    for (Index done = 0; done < count; ++size_) {
      const Index length = std::min(pixels.columns - (first + done) % pixels.columns, count - done);
      all_[size_] = {pixels.position(first + done), done, done + length};
      done += length;
    }
  }

  /// to[0, count) = those pixels of `from`. Writes whole packets, so up to one packet beyond `to[count]`.
  template <class T>
  void gather(const T* from, T* to) const {
    for (Index i = 0; i < size_; ++i) {
      const T* source = from + all_[i].position - all_[i].begin;
      for (Index j = all_[i].begin; j < all_[i].end; j += lanes<T>)
        store(to + j, load(source + j, Whole<T>{}), Whole<T>{});
    }
  }

  /// to[p, j] = those pixels of from + offsets[p], for `depth` rows of `width` numbers, with an unrolled loop for
  /// common packet counts. Writes up to one packet more.
  template <class T>
  void gather_rows(Index depth, const T* from, const Index* offsets, Index width, T* to) const {
    Index packets = 0;
    for (Index i = 0; i < size_; ++i) packets += (all_[i].end - all_[i].begin + lanes<T> - 1) / lanes<T>;
    if (packets == 2) return gather_packets<2>(depth, from, offsets, width, to);
    if (packets == 3) return gather_packets<3>(depth, from, offsets, width, to);
    if (packets == 4) return gather_packets<4>(depth, from, offsets, width, to);
    for (Index p = 0; p < depth; ++p) gather(from + offsets[p], to + p * width);
  }

 private:
  struct Segment {
    Index position, begin, end;
  };

  template <int Count, class T>
  void gather_packets(Index depth, const T* from, const Index* offsets, Index width, T* to) const {
    Index source[Count], place[Count], packets = 0;
    for (Index i = 0; i < size_; ++i)
      for (Index j = all_[i].begin; j < all_[i].end; j += lanes<T>, ++packets) {
        source[packets] = all_[i].position + j - all_[i].begin;
        place[packets] = j;
      }
    for (Index p = 0; p < depth; ++p, to += width) {
      const T* row = from + offsets[p];
#pragma GCC unroll 4
      for (int i = 0; i < Count; ++i) store(to + place[i], load(row + source[i], Whole<T>{}), Whole<T>{});
    }
  }

  Segment all_[256];
  Index size_ = 0;
};

}  // namespace chorus::kernels::detail
