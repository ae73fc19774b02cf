#pragma once
/// 3 x 3 convolutions of stride 1 with a quarter of the multiplications: tiles of 4 x 4 results are computed from 6 x 6
/// pixels as 36 matrix products over the channels, one for each point of winograd_transforms.hpp. The error is some 5
/// times that of the direct form (3e-6 of the largest result for 512 channels), and a result that is not finite makes
/// its tile so.
///
/// In the middle everything has its channels last, so that a packet holds channels of one pixel: a tile's transform
/// needs no shuffles, images of any size fill the products, and a result doesn't depend on the other tiles.

#include <chorus/core/device.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/cpu/winograd_transforms.hpp>

namespace chorus::inline CHORUS_ABI::kernels::detail {

/// Whether this way is the faster one. Not a matter of the batch's size: a sample's result must not depend on it.
/// Double is for those who want digits.
template <class T>
bool suits_winograd(const Conv2dShape& s) {
  const Index h = s.out_height(), w = s.out_width(), tiles = ((h + 3) / 4) * ((w + 3) / 4);
  return sizeof(T) == 4 && lanes<T> >= 4 && s.kernel_h == 3 && s.kernel_w == 3 && s.stride_h == 1 && s.stride_w == 1 &&
         s.dilation_h == 1 && s.dilation_w == 1 && s.padding_h <= 2 && s.padding_w <= 2 &&
         std::min(s.in_channels, s.out_channels) >= 32 * s.groups && h * w >= 8 * tiles;
}

inline constexpr Index winograd_tiles = 64, winograd_depth = 256;

template <class T>
constexpr Index whole_panels(Index n) {
  return (n + tile_columns<T> - 1) / tile_columns<T> * tile_columns<T>;
}

// See pack.hpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/// Images of `channels` x `height` x `width`, cut into tiles of 4 x 4, with `halo` pixels around that they share.
struct TiledImages {
  Index channels, height, width, down, across, halo, padding_h, padding_w;

  Index per_image() const { return down * across; }
  Index rows() const { return down * winograd_out + halo; }
  Index columns() const { return across * winograd_out + halo; }

  /// to[i, j, c] = image[c, i - padding_h, j - padding_w], zero outside; `pitch` is the channels' count there.
  template <class T>
  void channels_last(const T* image, Index pitch, T* to) const {
    constexpr Index w = lanes<T>;
    const Index pixels = height * width;
    std::fill_n(to, rows() * columns() * pitch, T{0});
    for (Index q = 0; q < pixels; q += w) {
      const Index count = std::min(w, pixels - q);
      T* places[w];
      for (Index i = 0; i < count; ++i) {
        const Index h = (q + i) / width + padding_h, x = (q + i) % width + padding_w;
        places[i] = h < rows() && x < columns() ? to + (h * columns() + x) * pitch : nullptr;
      }
      for (Index c = 0; c < channels; c += w) {
        Eigen::internal::PacketBlock<Packet<T>, w> square;
        for (Index l = 0; l < w; ++l) {
          const T* from = image + (c + l) * pixels + q;
          square.packet[l] = c + l >= channels ? splat(T{0}) : count == w ? load(from, Whole<T>{}) : load(from, count);
        }
        Eigen::internal::ptranspose(square);
        for (Index i = 0; i < count; ++i)
          if (places[i] != nullptr) store(places[i] + c, square.packet[i], Whole<T>{});
      }
    }
  }
};

/// Transforms tiles [first, first + count) of x: to[point * point_pitch + tile * pitch + channel]. `raster` has room
/// for one image; `image` says which one it holds. Images are `image_size` numbers apart.
template <int In, class T, class Transform>
void transform_tiles(const TiledImages& tiles, const T* x, Index image_size, Index first, Index count, Index pitch,
                     Index point_pitch, T* raster, Index& image, const Transform& transform, T* to) {
  const Index columns = tiles.columns();
  for (Index t = 0; t < count; ++t) {
    const Index n = (first + t) / tiles.per_image(), place = (first + t) % tiles.per_image();
    if (n != image) tiles.channels_last(x + n * image_size, pitch, raster);
    image = n;
    const T* corner = raster + (place / tiles.across * columns + place % tiles.across) * winograd_out * pitch;
    for (Index c = 0; c < pitch; c += lanes<T>)
      transform_both_axes<In, 6, T>(
          transform, [&](int i, int j) { return load(corner + (i * columns + j) * pitch + c, Whole<T>{}); },
          [&](int i, int j, const Packet<T>& value) {
            store(to + (i * 6 + j) * point_pitch + t * pitch + c, value, Whole<T>{});
          });
  }
}

/// The weights at all points, in panels of `tile_columns` results: to[panel, point, channel, result]. With `turned`,
/// for the gradient by the input: its results are the convolution's channels, and taps are in the reverse order.
/// weight: [filters, channels, 3, 3].
template <class T>
void transform_weights(bool turned, Index filters, Index channels, const T* weight, T* to) {
  constexpr Index w = tile_columns<T>, at_once = 16;
  const Index results = turned ? channels : filters, terms = turned ? filters : channels;
  alignas(64) T taps[at_once * 9 * w];
  for (Index r = 0; r < results; r += w)
    for (Index c = 0; c < terms; c += at_once) {
      const Index columns = std::min(w, results - r), count = std::min(at_once, terms - c);
      if (turned)
        for (Index i = 0; i < count; ++i)
          pack_columns(9, columns, weight + ((c + i) * channels + r) * 9, 9, taps + i * 9 * w);
      else
        pack_columns(count * 9, columns, weight + (r * channels + c) * 9, channels * 9, taps);
      for (Index i = 0; i < count; ++i)
        for (Index side = 0; side < w; side += lanes<T>) {
          const T* from = taps + i * 9 * w + side;
          T* panel = to + r * winograd_points * terms + (c + i) * w + side;
          transform_both_axes<3, 6, T>(
              WinogradTransforms<T>::weight,
              [&](int y, int x) { return load(from + (turned ? 8 - (y * 3 + x) : y * 3 + x) * w, Whole<T>{}); },
              [&](int y, int x, const Packet<T>& value) { store(panel + (y * 6 + x) * terms * w, value, Whole<T>{}); });
        }
    }
}

/// One tile's results for a panel of channels, to y (channels first) + bias. m: [point, channel], points `point_pitch`
/// apart; `rows` x `columns` pixels of the tile are inside of the image.
template <class T>
void store_tile(const T* m, Index point_pitch, Index channels, const T* bias, Index rows, Index columns, Index width,
                Index plane, T* y, bool accumulate) {
  constexpr Index w = lanes<T>, pixels = winograd_out * winograd_out;
  for (Index c = 0; c < channels; c += w) {
    alignas(64) T by_pixel[pixels * w], by_channel[w * pixels];
    const Index count = std::min(w, channels - c);
    const auto start = bias == nullptr ? splat(T{0}) : count == w ? load(bias + c, Whole<T>{}) : load(bias + c, count);
    transform_both_axes<6, 4, T>(
        WinogradTransforms<T>::output,
        [&](int i, int j) { return load(m + (i * 6 + j) * point_pitch + c, Whole<T>{}); },
        [&](int i, int j, const Packet<T>& value) {
          store(by_pixel + (i * 4 + j) * w, padd(value, start), Whole<T>{});
        });
    for (Index p = 0; p < pixels; p += w) {
      Eigen::internal::PacketBlock<Packet<T>, w> square;
      for (Index i = 0; i < w; ++i) square.packet[i] = load(by_pixel + (p + i) * w, Whole<T>{});
      Eigen::internal::ptranspose(square);
      for (Index i = 0; i < w; ++i) store(by_channel + i * pixels + p, square.packet[i], Whole<T>{});
    }
    for (Index l = 0; l < count; ++l)
      for (Index i = 0; i < rows; ++i) {
        T* to = y + (c + l) * plane + i * width;
        const T* from = by_channel + l * pixels + i * winograd_out;
        if (columns == winograd_out && !accumulate)
          for (Index j = 0; j < winograd_out; ++j) to[j] = from[j];
        else
          for (Index j = 0; j < columns; ++j) to[j] = (accumulate ? to[j] : T{0}) + from[j];
      }
  }
}
#pragma GCC diagnostic pop

/// y = conv(x, weight) + bias for one group of channels of the shape `s`, or y +=. With `turned`, the gradient by the
/// input: `s` is then that convolution's own shape, with the channels of dy as inputs. x and y start at the group.
template <class T>
void winograd_convolve(Cpu device, const Conv2dShape& s, bool turned, const T* x, const T* weight, const T* bias, T* y,
                       bool accumulate) {
  constexpr Index w = tile_columns<T>;
  const Index channels = s.in_channels / s.groups, filters = s.out_channels / s.groups,
              pitch = whole_panels<T>(channels);
  const Index out_h = s.out_height(), out_w = s.out_width();
  const TiledImages tiles{channels, s.height, s.width, (out_h + 3) / 4, (out_w + 3) / 4, 2, s.padding_h, s.padding_w};
  const Index total = s.batch * tiles.per_image(), most = std::min(total, winograd_tiles);
  const Index point_pitch = most * pitch + lanes<T>, result_pitch = most * w + lanes<T>;

  const Scratch<T> u(device, winograd_points * channels * whole_panels<T>(filters));
  const Scratch<T> v(device, winograd_points * point_pitch), m(device, winograd_points * result_pitch);
  const Scratch<T> raster(device, tiles.rows() * tiles.columns() * pitch);
  transform_weights(turned, turned ? channels : filters, turned ? filters : channels, weight, u.data());
  alignas(64) constexpr T zeros[w] = {};
  Index packed[winograd_depth];
  for (Index p = 0; p < winograd_depth; ++p) packed[p] = p * w;

  Index image = -1;
  for_pieces(total, winograd_tiles, [&](Index first, Index count) {
    transform_tiles<6>(tiles, x, s.in_channels * s.height * s.width, first, count, pitch, point_pitch, raster.data(),
                       image, WinogradTransforms<T>::input, v.data());
    for (Index o = 0; o < filters; o += w) {
      for (Index point = 0; point < winograd_points; ++point)
        for_pieces(channels, winograd_depth, [&](Index c, Index depth) {
          multiply_panel(count, w, depth, Matrix<T>{v.data() + point * point_pitch + c, pitch, 1},
                         u.data() + (o * winograd_points + point * w) * channels + c * w, packed, zeros,
                         m.data() + point * result_pitch, w, c > 0);
        });
      for (Index t = 0; t < count; ++t) {
        const Index n = (first + t) / tiles.per_image(), place = (first + t) % tiles.per_image();
        const Index i = place / tiles.across * winograd_out, j = place % tiles.across * winograd_out;
        store_tile(m.data() + t * w, result_pitch, std::min(w, filters - o), bias == nullptr ? nullptr : bias + o,
                   std::min(winograd_out, out_h - i), std::min(winograd_out, out_w - j), out_w, out_h * out_w,
                   y + ((n * s.out_channels + o) * out_h + i) * out_w + j, accumulate);
      }
    }
  });
}

/// dweight += its gradient, for one group.
template <class T>
void winograd_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight) {
  constexpr Index w = tile_columns<T>;
  const Index channels = s.in_channels / s.groups, filters = s.out_channels / s.groups;
  const Index pitch = whole_panels<T>(channels), filter_pitch = whole_panels<T>(filters);
  const Index out_h = s.out_height(), out_w = s.out_width();
  const TiledImages tiles{channels, s.height, s.width, (out_h + 3) / 4, (out_w + 3) / 4, 2, s.padding_h, s.padding_w};
  const TiledImages dy_tiles{filters, out_h, out_w, tiles.down, tiles.across, 0, 0, 0};
  const Index total = s.batch * tiles.per_image(), most = std::min(total, winograd_tiles);
  const Index point_pitch = most * pitch + lanes<T>, dy_pitch = most * filter_pitch + lanes<T>;

  const Scratch<T> v(device, winograd_points * point_pitch), m(device, winograd_points * dy_pitch);
  const Scratch<T> du(device, winograd_points * filters * pitch);
  const Scratch<T> raster(device, tiles.rows() * tiles.columns() * pitch);
  const Scratch<T> dy_raster(device, dy_tiles.rows() * dy_tiles.columns() * filter_pitch);
  alignas(64) constexpr T zeros[w] = {};
  Index offsets[winograd_tiles];
  for (Index p = 0; p < winograd_tiles; ++p) offsets[p] = p * pitch;

  Index image = -1, dy_image = -1;
  for_pieces(total, winograd_tiles, [&](Index first, Index count) {
    transform_tiles<6>(tiles, x, s.in_channels * s.height * s.width, first, count, pitch, point_pitch, raster.data(),
                       image, WinogradTransforms<T>::input, v.data());
    transform_tiles<4>(dy_tiles, dy, s.out_channels * out_h * out_w, first, count, filter_pitch, dy_pitch,
                       dy_raster.data(), dy_image, WinogradTransforms<T>::output_gradient, m.data());
    for (Index point = 0; point < winograd_points; ++point)
      for (Index c = 0; c < pitch; c += w)
        multiply_panel(filters, w, count, Matrix<T>{m.data() + point * dy_pitch, 1, filter_pitch},
                       v.data() + point * point_pitch + c, offsets, zeros, du.data() + point * filters * pitch + c,
                       pitch, first > 0);
  });

  for (Index o = 0; o < filters; ++o)
    for (Index c = 0; c < channels; c += lanes<T>) {
      alignas(64) T taps[9 * lanes<T>];
      const T* from = du.data() + o * pitch + c;
      transform_both_axes<6, 3, T>(
          WinogradTransforms<T>::weight_gradient,
          [&](int i, int j) { return load(from + (i * 6 + j) * filters * pitch, Whole<T>{}); },
          [&](int i, int j, const Packet<T>& value) { store(taps + (i * 3 + j) * lanes<T>, value, Whole<T>{}); });
      T* to = dweight + (o * channels + c) * 9;
      for (Index l = 0; l < std::min(lanes<T>, channels - c); ++l)
        for (Index tap = 0; tap < 9; ++tap) to[l * 9 + tap] += taps[tap * lanes<T> + l];
    }
}

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
