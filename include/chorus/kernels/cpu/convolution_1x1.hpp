#pragma once
/// 1x1 convolutions with stride 1 and no padding: matrix products on the images in place.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/cpu/gemm.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/tile.hpp>

namespace chorus::kernels::detail {

/// Whether this is faster: the last panel of an image's pixels must be nearly full, or there is one image. The result
/// has the same bits as with rasters.
template <class T>
bool suits_1x1(const Conv2dShape& s) {
  constexpr Index w = tile_columns<T>;
  const Index plane = s.height * s.width, whole = round_up(plane, w);
  return s.kernel_h == 1 && s.kernel_w == 1 && s.stride_h == 1 && s.stride_w == 1 && s.padding_h == 0 &&
         s.padding_w == 0 && (s.batch == 1 || whole * 8 <= plane * 9);
}

/// to[image, i, q] = sum over p of a[i, p] * from[image, p, q] + bias[i], or +=, for `images` images of `plane` pixels
/// with strides `from_image` and `to_image`. a: [rows, depth], or with Trans::yes [depth, rows].
template <class T>
void multiply_images(Trans trans, Index images, Index rows, Index depth, Index plane, const T* a, const T* from,
                     Index from_image, const T* bias, T* to, Index to_image, bool accumulate, bool threads) {
  // Pieces of an image whose results fit into the second-level cache; rows are split, too, if threads lack work.
  constexpr Index columns_at_once = 16 * tile_columns<T>;
  const Index across = (plane + columns_at_once - 1) / columns_at_once, lda = trans == Trans::no ? depth : rows;
  const Index wanted = threads && num_threads() > 1 ? 2 * num_threads() : 1;
  const Index down = std::clamp<Index>((wanted + images * across - 1) / (images * across), 1, (rows + 47) / 48);
  const Index tall = round_up((rows + down - 1) / down, tile_rows);
  const Index pieces = (rows + tall - 1) / tall;
  const auto multiply = [&](Index task) {
    const Index image = task / (across * pieces), row = task / across % pieces * tall;
    const Index column = task % across * columns_at_once;
    const Index m = std::min(tall, rows - row), n = std::min(columns_at_once, plane - column);
    T* const c = to + image * to_image + row * plane + column;
    gemm_alone<T>(trans, Trans::no, m, n, depth, a + row * (trans == Trans::no ? lda : 1), lda,
                  from + image * from_image + column, plane, c, plane, accumulate, nullptr);
    if (bias == nullptr) return;
    for (Index i = 0; i < m; ++i) {
      const auto start = splat(bias[row + i]);
      for_packets<T>(n, [&](Index j, auto some) {
        store(c + i * plane + j, padd(load(c + i * plane + j, some), start), some);
      });
    }
  };
  parallel_for(images * across * pieces, multiply, threads);
}

}  // namespace chorus::kernels::detail
