#pragma once
/// Images split into tiles, and conversion from and to a channels-last layout. There a packet holds one pixel of
/// several channels, so a tile's transform needs no shuffles, and a result does not depend on other tiles.

#include <algorithm>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/transpose.hpp>
#include <chorus/kernels/cpu/winograd_transforms.hpp>

namespace chorus::kernels::detail {

// See pack.hpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/// Some channels of each image of a batch; `image_size` is the stride between images.
struct ImageChannels {
  Index channels, height, width, image_size;
  Index plane() const { return height * width; }
};

/// The layout of an image's pixels with `w` channels last and rows of `columns` pixels. It is regular if each aligned
/// group of `w` pixels has the same layout.
template <Index w>
struct PixelPlaces {
  Index width, columns;
  bool regular;
  Index offset[w];

  PixelPlaces(Index image_width, Index all_columns)
      : width(image_width), columns(all_columns), regular(width % w == 0 || w % width == 0) {
    for (Index i = 0; i < w; ++i) offset[i] = at(i);
  }
  Index at(Index pixel) const { return (pixel / width * columns + pixel % width) * w; }
};

/// Some rows of tiles of one image.
struct TileRows {
  Index image, top, rows;
};

/// Tiles of `reach` x `reach` pixels, `step` pixels apart. Pixels outside of the image are 0.
struct TiledImages {
  ImageChannels image;
  Index down, across, step, reach, padding_h, padding_w, strip_rows;

  Index per_image() const { return down * across; }
  Index strips_per_image() const { return (down + strip_rows - 1) / strip_rows; }
  Index strip_tiles() const { return strip_rows * across; }
  /// The number of tiles before a strip.
  Index tiles_before(Index strip) const {
    return strip / strips_per_image() * per_image() + strip % strips_per_image() * strip_rows * across;
  }
  TileRows strip(Index number) const {
    const Index top = number % strips_per_image() * strip_rows;
    return {number / strips_per_image(), top, std::min(strip_rows, down - top)};
  }
  Index columns() const { return (across - 1) * step + reach; }
  Index rows(Index down_tiles) const { return (down_tiles - 1) * step + reach; }
  /// A strip's input for a packet of channels from `channel` on: the rows inside of the image.
  template <class T>
  Stretches<T> planes(const T* x, const TileRows& strip, Index channel) const {
    const Index top = strip.top * step - padding_h;
    const Index first = std::clamp<Index>(top, 0, image.height);
    const Index last = std::clamp<Index>(top + rows(strip.rows), 0, image.height);
    return {x + strip.image * image.image_size + channel * image.plane() + first * image.width,
            std::clamp<Index>(image.channels - channel, 0, lanes<T>), (last - first) * image.width, image.plane()};
  }

  /// to[i, j, lane] = x[channel + lane, i + top - padding_h, j - padding_w] of the strip's image, inside of it, for the
  /// strip's rows, which start at `top`. Lanes without a channel are 0.
  template <class T>
  void channels_last(const T* x, const TileRows& strip, Index channel, T* to) const {
    constexpr Index w = lanes<T>;
    const Stretches<T> from = planes(x, strip, channel);
    const Index above = std::max<Index>(padding_h - strip.top * step, 0), gap = (columns() - image.width) * w;
    to += (above * columns() + padding_w) * w;
    const PixelPlaces<w> places(image.width, columns());
    Square<T> square;
    Index column = 0;
    for (Index q = 0; q < from.length; q += w) {
      const Index pixels = std::min(w, from.length - q);
      const T* at = from.first + q;
      if (from.count == w && pixels == w) {
#pragma GCC unroll 16
        for (Index l = 0; l < w; ++l, at = opaque(at + from.apart)) square.packet[l] = load(at, Whole<T>{});
      } else {
        for (Index l = 0; l < w; ++l)
          square.packet[l] = l < from.count ? load(at + l * from.apart, pixels) : splat(T{0});
      }
      transpose<T>(square);
      if (places.regular && pixels == w) {
        T* row = to + places.at(q);
#pragma GCC unroll 16
        for (Index i = 0; i < w; ++i) store(row + places.offset[i], square.packet[i], Whole<T>{});
      } else if (places.regular) {
        for (Index i = 0; i < pixels; ++i) store(to + places.at(q + i), square.packet[i], Whole<T>{});
      } else {
        for (Index i = 0; i < pixels; ++i) {
          store(to, square.packet[i], Whole<T>{});
          to += w;
          if (++column == image.width) column = 0, to += gap;
        }
      }
    }
  }
};

/// The inverse: y[lane, i, j] = from[i, j, lane], or +=, for the first `count` lanes of `rows` rows of an image. A row
/// of `from` has `columns` pixels.
template <class T>
void channels_first(const T* from, Index columns, Index count, Index rows, const ImageChannels& image, T* y,
                    bool accumulate) {
  constexpr Index w = lanes<T>;
  const Index plane = image.plane(), end = rows * image.width, gap = (columns - image.width) * w;
  const PixelPlaces<w> places(image.width, columns);
  Square<T> square;
  Index column = 0;
  for (Index q = 0; q < end; q += w) {
    const Index pixels = std::min(w, end - q);
    if (places.regular && pixels == w) {
      const T* row = from + places.at(q);
#pragma GCC unroll 16
      for (Index i = 0; i < w; ++i) square.packet[i] = load(row + places.offset[i], Whole<T>{});
    } else {
      for (Index i = 0; i < w; ++i) {
        square.packet[i] = i < pixels ? load(places.regular ? from + places.at(q + i) : from, Whole<T>{}) : splat(T{0});
        if (places.regular) continue;
        from += w;
        if (++column == image.width) column = 0, from += gap;
      }
    }
    transpose<T>(square);
    if (count == w && pixels == w) {
      T* at = y + q;
#pragma GCC unroll 16
      for (Index l = 0; l < w; ++l, at = opaque(at + plane)) store(at, square.packet[l], Whole<T>{}, accumulate);
    } else {
      for (Index l = 0; l < count; ++l) store(y + l * plane + q, square.packet[l], pixels, accumulate);
    }
  }
}

/// The layout of tile data: [panel, tile, channel of the panel], with `width` channels per panel.
struct TilePanels {
  Index channels, width, tiles;
  Index at(Index tile, Index channel) const { return (channel / width * tiles + tile) * width + channel % width; }
};

/// Transforms the tiles of strips [first, first + count) of x along both axes. `to` is where the first strip's first
/// tile goes at the first point; points are `point_pitch` numbers apart. `panels.channels` and widths are whole
/// packets; channels that x lacks are 0. `rasters` has room for a strip's pixels.
template <int In, int Points, class T, class Transform>
void transform_tiles(const TiledImages& tiles, const T* x, Index first, Index count, const TilePanels& panels,
                     Index point_pitch, const Transform& transform, const ThreadScratch<T>& rasters, T* to) {
  constexpr Index w = lanes<T>;
  const Index columns = tiles.columns(), start = tiles.tiles_before(first);
  parallel_for(count, [&](Index s) {
    const TileRows strip = tiles.strip(first + s);
    const Index rows = tiles.rows(strip.rows);
    T* raster = rasters.data();
    std::fill_n(raster, rows * columns * w, T{0});  // the zeros are at the same positions for all channels
    for (Index c = 0; c < panels.channels; c += w) {
      tiles.channels_last(x, strip, c, raster);
      T* out = to + panels.at(tiles.tiles_before(first + s) - start, c);
      // Prefetches the next input while these tiles are transformed.
      const bool more = c + w < tiles.image.channels;
      const Stretches<T> next =
          tiles.planes(x, more ? strip : tiles.strip(first + std::min(s + 1, count - 1)), more ? c + w : 0);
      for (Index i = 0; i < strip.rows; ++i)
        for (Index j = 0; j < tiles.across; ++j, out += panels.width) {
          next.fetch(i * tiles.across + j, strip.rows * tiles.across);
          const T* corner = raster + (i * columns + j) * tiles.step * w;
          transform_both_axes<In, Points, T>(
              transform, [&](int v, int u) { return load(corner + (v * columns + u) * w, Whole<T>{}); },
              PointWriter<T>{out, point_pitch});
        }
    }
  });
}
#pragma GCC diagnostic pop

}  // namespace chorus::kernels::detail
