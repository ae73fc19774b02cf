#pragma once
/// 3 x 3 convolutions of stride 1 with a quarter of the multiplications: tiles of 4 x 4 results are computed from 6 x 6
/// pixels as 36 matrix products over the channels, one for each point of winograd_transforms.hpp. The error is some 5
/// times that of the direct form (3e-6 of the largest result for 512 channels), and a result that is not finite makes
/// its tile so.
///
/// In the middle everything has its channels last, so that a packet holds channels of one pixel: a tile's transform
/// needs no shuffles, images of any size fill the products, and a result doesn't depend on the other tiles.

#include <chorus/core/device.hpp>
#include <chorus/core/threads.hpp>
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

/// Images of `channels` x `height` x `width`, cut into tiles of 4 x 4, with `halo` pixels around that they share. Some
/// rows of tiles of one image make a strip.
struct TiledImages {
  Index images, image_size, channels, height, width, down, across, halo, padding_h, padding_w;

  Index per_image() const { return down * across; }
  Index strip_rows() const { return std::clamp<Index>(16 / across, 1, down); }
  Index strips_per_image() const { return (down + strip_rows() - 1) / strip_rows(); }
  Index columns() const { return across * winograd_out + halo; }
  /// Tiles in front of a strip.
  Index tiles_before(Index strip) const {
    return strip / strips_per_image() * per_image() + strip % strips_per_image() * strip_rows() * across;
  }
  Index strip_size() const { return (strip_rows() * winograd_out + halo) * columns(); }

  /// to[i, j, c] = image[c, i + top - padding_h, j - padding_w], zero outside, for `rows` rows; `pitch` is the
  /// channels' count there.
  template <class T>
  void channels_last(const T* image, Index top, Index rows, Index pitch, T* to) const {
    constexpr Index w = lanes<T>;
    std::fill_n(to, rows * columns() * pitch, T{0});
    const Index first = std::clamp<Index>(top - padding_h, 0, height);
    const Index last = std::clamp<Index>(top - padding_h + rows, 0, height);
    for (Index q = first * width; q < last * width; q += w) {
      const Index count = std::min(w, last * width - q);
      T* places[w];
      for (Index i = 0, h = q / width, x = q % width; i < count; ++i) {
        const Index column = x + padding_w;
        places[i] = column < columns() ? to + ((h + padding_h - top) * columns() + column) * pitch : nullptr;
        if (++x == width) ++h, x = 0;
      }
      for (Index c = 0; c < channels; c += w) {
        Eigen::internal::PacketBlock<Packet<T>, w> square;
        for (Index l = 0; l < w; ++l) {
          const T* from = image + (c + l) * height * width + q;
          square.packet[l] = c + l >= channels ? splat(T{0}) : count == w ? load(from, Whole<T>{}) : load(from, count);
        }
        Eigen::internal::ptranspose(square);
        for (Index i = 0; i < count; ++i)
          if (places[i] != nullptr) store(places[i] + c, square.packet[i], Whole<T>{});
      }
    }
  }
};

/// Transforms the tiles of strips [first, first + count) of x: to[point * point_pitch + tile * pitch + channel], where
/// `to` is the place of the first strip's first tile.
template <int In, class T, class Transform>
void transform_tiles(Cpu device, const TiledImages& tiles, const T* x, Index first, Index count, Index pitch,
                     Index point_pitch, const Transform& transform, T* to) {
  const Index columns = tiles.columns(), start = tiles.tiles_before(first);
  parallel_for(count, [&](Index s) {
    const Index n = (first + s) / tiles.strips_per_image();
    const Index top = (first + s) % tiles.strips_per_image() * tiles.strip_rows();
    const Index rows = std::min(tiles.strip_rows(), tiles.down - top);
    const Scratch<T> raster(device, tiles.strip_size() * pitch);
    tiles.channels_last(x + n * tiles.image_size, top * winograd_out, rows * winograd_out + tiles.halo, pitch,
                        raster.data());
    T* out = to + (tiles.tiles_before(first + s) - start) * pitch;
    for (Index t = 0; t < rows * tiles.across; ++t, out += pitch) {
      const T* corner = raster.data() + (t / tiles.across * columns + t % tiles.across) * winograd_out * pitch;
      for (Index c = 0; c < pitch; c += lanes<T>)
        transform_both_axes<In, 6, T>(
            transform, [&](int i, int j) { return load(corner + (i * columns + j) * pitch + c, Whole<T>{}); },
            [&](int i, int j, const Packet<T>& value) {
              store(out + (i * 6 + j) * point_pitch + c, value, Whole<T>{});
            });
    }
  });
}

/// The weights at all points, in panels of `tile_columns` results: to[panel, point, channel, result]. With `turned`,
/// for the gradient by the input: its results are the convolution's channels, and taps are in the reverse order.
/// weight: [filters, channels, 3, 3].
template <class T>
void transform_weights(bool turned, Index filters, Index channels, const T* weight, T* to) {
  constexpr Index w = tile_columns<T>, at_once = 16;
  const Index results = turned ? channels : filters, terms = turned ? filters : channels;
  parallel_for((results + w - 1) / w, [&](Index panel_number) {
    const Index r = panel_number * w;
    alignas(64) T taps[at_once * 9 * w];
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
  });
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

/// What one group's passes share: how its images are cut, how many strips make a block of some `winograd_tiles` tiles,
/// and how many are transformed before they are multiplied.
template <class T>
struct WinogradPlan {
  Index channels, filters, pitch, out_h, out_w;
  TiledImages tiles;
  Index strips, block, at_once, most;

  explicit WinogradPlan(const Conv2dShape& s)
      : channels(s.in_channels / s.groups),
        filters(s.out_channels / s.groups),
        pitch(whole_panels<T>(channels)),
        out_h(s.out_height()),
        out_w(s.out_width()),
        tiles{s.batch,         s.in_channels * s.height * s.width,
              channels,        s.height,
              s.width,         (out_h + 3) / 4,
              (out_w + 3) / 4, 2,
              s.padding_h,     s.padding_w},
        strips(s.batch * tiles.strips_per_image()),
        block(std::max<Index>(1, winograd_tiles / (tiles.strip_rows() * tiles.across))),
        at_once(block * num_threads()),
        most(std::min(at_once, strips) * tiles.strip_rows() * tiles.across) {}
  /// Points are apart by a little more than their tiles take, so that they don't share their places in the caches.
  Index point_pitch(Index numbers) const { return most * numbers + lanes<T>; }
};

/// y = conv(x, weight) + bias for one group of channels of the shape `s`, or y +=. With `turned`, the gradient by the
/// input: `s` is then that convolution's own shape, with the channels of dy as inputs. x and y start at the group.
template <class T>
void winograd_convolve(Cpu device, const Conv2dShape& s, bool turned, const T* x, const T* weight, const T* bias, T* y,
                       bool accumulate) {
  constexpr Index w = tile_columns<T>;
  const WinogradPlan<T> plan(s);
  const auto& tiles = plan.tiles;
  const Index channels = plan.channels, filters = plan.filters, out_h = plan.out_h, out_w = plan.out_w;
  const Index panels = (filters + w - 1) / w, point_pitch = plan.point_pitch(plan.pitch);
  const Scratch<T> u(device, winograd_points * channels * panels * w), v(device, winograd_points * point_pitch);
  transform_weights(turned, turned ? channels : filters, turned ? filters : channels, weight, u.data());
  alignas(64) constexpr T zeros[w] = {};
  Index packed[winograd_depth];
  for (Index p = 0; p < winograd_depth; ++p) packed[p] = p * w;

  for (Index strip = 0; strip < plan.strips; strip += plan.at_once) {
    const Index strips = std::min(plan.at_once, plan.strips - strip);
    const Index first = tiles.tiles_before(strip), total = tiles.tiles_before(strip + strips) - first;
    transform_tiles<6>(device, tiles, x, strip, strips, plan.pitch, point_pitch, WinogradTransforms<T>::input,
                       v.data());
    const Index blocks = (total + winograd_tiles - 1) / winograd_tiles;
    parallel_for(panels * blocks, [&](Index task) {
      const Index o = task / blocks * w, block = task % blocks * winograd_tiles;
      const Index count = std::min(winograd_tiles, total - block), result_pitch = winograd_tiles * w + lanes<T>;
      const Scratch<T> m(device, winograd_points * result_pitch);
      for (Index point = 0; point < winograd_points; ++point)
        for_pieces(channels, winograd_depth, [&](Index c, Index depth) {
          multiply_panel(count, w, depth,
                         Matrix<T>{v.data() + point * point_pitch + block * plan.pitch + c, plan.pitch, 1},
                         u.data() + (o * winograd_points + point * w) * channels + c * w, packed, zeros,
                         m.data() + point * result_pitch, w, c > 0);
        });
      for (Index t = 0; t < count; ++t) {
        const Index n = (first + block + t) / tiles.per_image(), place = (first + block + t) % tiles.per_image();
        const Index i = place / tiles.across * winograd_out, j = place % tiles.across * winograd_out;
        store_tile(m.data() + t * w, result_pitch, std::min(w, filters - o), bias == nullptr ? nullptr : bias + o,
                   std::min(winograd_out, out_h - i), std::min(winograd_out, out_w - j), out_w, out_h * out_w,
                   y + ((n * s.out_channels + o) * out_h + i) * out_w + j, accumulate);
      }
    });
  }
}

/// dweight += its gradient, for one group.
template <class T>
void winograd_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight) {
  constexpr Index w = tile_columns<T>;
  const WinogradPlan<T> plan(s);
  const Index channels = plan.channels, filters = plan.filters, pitch = plan.pitch;
  const Index filter_pitch = whole_panels<T>(filters);
  TiledImages dy_tiles = plan.tiles;
  dy_tiles.image_size = s.out_channels * plan.out_h * plan.out_w;
  dy_tiles.channels = filters;
  dy_tiles.height = plan.out_h;
  dy_tiles.width = plan.out_w;
  dy_tiles.halo = dy_tiles.padding_h = dy_tiles.padding_w = 0;
  const Index point_pitch = plan.point_pitch(pitch), dy_pitch = plan.point_pitch(filter_pitch);
  const Scratch<T> v(device, winograd_points * point_pitch), m(device, winograd_points * dy_pitch);
  const Scratch<T> du(device, winograd_points * filters * pitch);
  alignas(64) constexpr T zeros[w] = {};
  Index offsets[winograd_tiles];
  for (Index p = 0; p < winograd_tiles; ++p) offsets[p] = p * pitch;

  // Each block of strips is summed by itself, however many are taken at once.
  for (Index strip = 0; strip < plan.strips; strip += plan.at_once) {
    const Index strips = std::min(plan.at_once, plan.strips - strip), first = plan.tiles.tiles_before(strip);
    transform_tiles<6>(device, plan.tiles, x, strip, strips, pitch, point_pitch, WinogradTransforms<T>::input,
                       v.data());
    transform_tiles<4>(device, dy_tiles, dy, strip, strips, filter_pitch, dy_pitch,
                       WinogradTransforms<T>::output_gradient, m.data());
    parallel_for(winograd_points, [&](Index point) {
      for (Index block = strip; block < strip + strips; block += plan.block) {
        const Index begin = plan.tiles.tiles_before(block) - first;
        const Index end = plan.tiles.tiles_before(std::min(block + plan.block, strip + strips)) - first;
        for (Index c = 0; c < pitch; c += w)
          for_pieces(end - begin, winograd_tiles, [&](Index at, Index depth) {
            multiply_panel(filters, w, depth,
                           Matrix<T>{m.data() + point * dy_pitch + (begin + at) * filter_pitch, 1, filter_pitch},
                           v.data() + point * point_pitch + (begin + at) * pitch + c, offsets, zeros,
                           du.data() + point * filters * pitch + c, pitch, block + at > 0);
          });
      }
    });
  }

  parallel_for(filters, [&](Index o) {
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
  });
}

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
