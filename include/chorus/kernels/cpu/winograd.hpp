#pragma once
/// Winograd's algorithm for 3 x 3 convolutions of stride 1 and 2, with a quarter, or half, of the multiplications:
/// tiles of 4 x 4 results are matrix products over the channels, one for each point of winograd_transforms.hpp. With
/// stride 1 the error is about 5 times that of the direct form (3e-6 of the largest result for 512 channels). One
/// non-finite result makes its whole tile non-finite.

#include <chorus/core/device.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/convolution_shape.hpp>
#include <chorus/kernels/cpu/tiled_images.hpp>
#include <chorus/kernels/cpu/winograd_weights.hpp>

namespace chorus::kernels::detail {

/// Whether this is faster. It must not depend on the batch size, since a sample's result must not. double skips
/// Winograd: it is chosen for accuracy.
template <class T>
bool suits_winograd(const Conv2dShape& s) {
  const Index h = s.out_height(), w = s.out_width(), tiles = ((h + 3) / 4) * ((w + 3) / 4);
  const bool unit = s.stride_h == 1 && s.stride_w == 1 && s.padding_h <= 2 && s.padding_w <= 2;
  const bool strided = s.stride_h == 2 && s.stride_w == 2 && s.padding_h == 1 && s.padding_w == 1;
  return sizeof(T) == 4 && lanes<T> >= 4 && s.kernel_h == 3 && s.kernel_w == 3 && (unit || strided) &&
         s.dilation_h == 1 && s.dilation_w == 1 && std::min(s.in_channels, s.out_channels) >= 32 * s.groups &&
         h * w >= 8 * tiles;
}

template <class T>
constexpr Index rounded_to_panels(Index n) {
  return round_up(n, tile_columns<T>);
}

// See pack.hpp.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/// Stores one strip's results for a panel of channels, from m[point, tile, channel], to y, with the bias.
template <class Way, class T>
void store_strip(const TiledImages& tiles, const TileRows& strip, const T* m, Index point_pitch, Index channels,
                 const T* bias, const ImageChannels& image, T* buffer, T* y, bool accumulate) {
  constexpr Index w = lanes<T>, out = Way::out, points = Way::points;
  const Index columns = tiles.across * out, top = strip.top * out;
  const Index rows = std::min(strip.rows * out, image.height - top);
  for (Index c = 0; c < channels; c += w) {
    const Index count = std::min(w, channels - c);
    const auto start = bias == nullptr ? splat(T{0}) : load(bias + c, count);
    const Stretches<T> planes{y + c * image.plane() + top * image.width, count, rows * image.width, image.plane()};
    const T* from = m + c;
    for (Index i = 0; i < strip.rows; ++i)
      for (Index j = 0; j < tiles.across; ++j, from += tile_columns<T>) {
        planes.fetch(i * tiles.across + j, strip.rows * tiles.across);
        T* to = buffer + (i * columns + j) * out * w;
        transform_both_axes<points, out, T>(Way::output, PointReader<points, T>{from, point_pitch},
                                            [&](int v, int u, const Packet<T>& value) {
                                              store(to + (v * columns + u) * w, padd(value, start), Whole<T>{});
                                            });
      }
    channels_first(buffer, columns, count, rows, image, y + c * image.plane() + top * image.width, accumulate);
  }
}
#pragma GCC diagnostic pop

/// The tiling of one pass, and the number of strips multiplied at a time.
template <class Way>
struct WinogradPlan {
  TiledImages tiles;
  Index strips, block, blocks;

  WinogradPlan(Index images, const ImageChannels& in, const ImageChannels& out, Index padding_h, Index padding_w)
      : tiles{in,
              (out.height + Way::out - 1) / Way::out,
              (out.width + Way::out - 1) / Way::out,
              Way::step,
              Way::in,
              padding_h,
              padding_w,
              1} {
    tiles.strip_rows = std::clamp<Index>(Way::strip_tiles / tiles.across, 1, tiles.down);
    strips = images * tiles.strips_per_image();
    block = std::max<Index>(1, Way::block_tiles / tiles.strip_tiles());
    blocks = (strips + block - 1) / block;
  }
  Index strip_size() const { return tiles.rows(tiles.strip_rows) * tiles.columns(); }
  /// Points are slightly farther apart than needed, so that they use different cache sets.
  template <class T>
  Index point_pitch(Index some_strips, Index numbers) const {
    return std::min(some_strips, strips) * tiles.strip_tiles() * numbers + lanes<T>;
  }
};

/// y = the convolution of x + bias, or y +=, for `images` images. With `turned`, the gradient w.r.t. the input: see
/// Kernels. x and y start at the group's channels.
template <class Way, class T>
void winograd_convolve(Cpu device, Index images, const ImageChannels& in, const ImageChannels& out, Index padding_h,
                       Index padding_w, bool turned, const T* x, const T* weight, const T* bias, T* y,
                       bool accumulate) {
  constexpr Index w = tile_columns<T>;
  const WinogradPlan<Way> plan(images, in, out, padding_h, padding_w);
  const TiledImages& tiles = plan.tiles;
  const Kernels<T> kernels{weight, out.channels, in.channels, turned};
  const Index panels = (out.channels + w - 1) / w, pitch = rounded_to_panels<T>(in.channels), threads = num_threads();
  // Transformed weights above 8 MiB fit into no cache, so they are made when used, some channels at a time.
  const bool heavy = winograd_points * in.channels * w * panels > (Index{1} << 21);
  const Index depth = heavy ? 128 : 256;
  const Index u_pitch = (heavy ? std::min(depth, in.channels) : in.channels) * w + lanes<T>;
  const Index weights = winograd_points * u_pitch;
  // If there are enough blocks, each thread has its own; otherwise threads share a block's panels.
  const bool own_blocks = !heavy && plan.blocks >= 2 * threads;
  const Index at_once = own_blocks || heavy ? plan.block : plan.block * threads;
  const Index v_pitch = plan.template point_pitch<T>(at_once, pitch);
  const Index m_pitch = plan.template point_pitch<T>(plan.block, w), buffer = tiles.strip_tiles() * Way::out * Way::out;
  const ThreadScratch<T> rasters(device, std::max(plan.strip_size(), buffer) * lanes<T>);
  const ThreadScratch<T> vs(device, Way::points * Way::points * v_pitch, own_blocks);
  const ThreadScratch<T> ms(device, Way::points * Way::points * m_pitch);
  const ThreadScratch<T> us(device, heavy ? weights : weights * panels, heavy);
  if (!heavy)
    parallel_for(panels, [&](Index panel) {
      transform_weights<Way>(kernels, panel * w, 0, in.channels, u_pitch, us.data() + panel * weights);
    });

  const auto transform = [&](Index strip, T* v) {
    transform_tiles<Way::in, Way::points>(tiles, x, strip, std::min(at_once, plan.strips - strip),
                                          TilePanels{pitch, pitch, 0}, v_pitch, Way::input, rasters, v);
  };
  // Computes one panel's results for a block of strips; v: the data of the block's first tile.
  const auto multiply = [&](Index panel, Index strip, const T* v) {
    const Index first = panel * w, end = std::min(strip + plan.block, plan.strips);
    const Index before = tiles.tiles_before(strip), count = tiles.tiles_before(end) - before;
    T* m = ms.data();
    for_pieces(in.channels, depth, [&](Index c, Index channels) {
      if (heavy) transform_weights<Way>(kernels, first, c, channels, u_pitch, us.data());
      const T* u = heavy ? us.data() : us.data() + panel * weights + c * w;
      // Prefetches the next weights to transform during these products, which need little memory bandwidth.
      const bool more = c + channels < in.channels;
      const Stretches<T> next =
          heavy ? kernels.at(more ? first : first + w, more ? c + channels : 0, depth) : Stretches<T>{};
      for (int i = 0; i < Way::points; ++i)
        for (int j = 0; j < Way::points; ++j) {
          next.fetch(i * Way::points + j, Way::points * Way::points);
          multiply_packed(count, channels,
                          Matrix<T, Index, Fixed<1>>{v + (i * Way::points + j) * v_pitch + c, pitch, {}},
                          u + (Way::weight_of(i) * winograd_weights + Way::weight_of(j)) * u_pitch,
                          m + (i * Way::points + j) * m_pitch, Fixed<w>{}, c > 0);
        }
    });
    for (Index s = strip; s < end; ++s)
      store_strip<Way>(tiles, tiles.strip(s), m + (tiles.tiles_before(s) - before) * w, m_pitch,
                       std::min(w, out.channels - first), bias == nullptr ? nullptr : bias + first, out, rasters.data(),
                       y + s / tiles.strips_per_image() * out.image_size + first * out.plane(), accumulate);
  };

  if (own_blocks)
    return parallel_for(plan.blocks, [&](Index block) {
      T* v = vs.data();
      transform(block * plan.block, v);
      for (Index panel = 0; panel < panels; ++panel) multiply(panel, block * plan.block, v);
    });
  for (Index strip = 0; strip < plan.strips; strip += at_once) {
    transform(strip, vs.data());
    const Index blocks = (std::min(at_once, plan.strips - strip) + plan.block - 1) / plan.block;
    parallel_for(panels * blocks, [&](Index task) {
      const Index block = strip + task % blocks * plan.block;
      multiply(task / blocks, block, vs.data() + (tiles.tiles_before(block) - tiles.tiles_before(strip)) * pitch);
    });
  }
}

/// dweight = the gradient w.r.t. the weight, or +=, for one group. x and dy start at its channels.
template <class Way, class T>
void winograd_backward_weight(Cpu device, Index images, const ImageChannels& in, const ImageChannels& out,
                              Index padding_h, Index padding_w, const T* x, const T* dy, T* dweight, bool accumulate) {
  constexpr Index w = tile_columns<T>, filters_at_once = 64, channels_at_once = 2 * w, tiles_at_once = 64;
  constexpr int points = Way::points;
  const WinogradPlan<Way> plan(images, in, out, padding_h, padding_w);
  const TiledImages& tiles = plan.tiles;
  TiledImages dy_tiles = tiles;
  dy_tiles.image = out;
  dy_tiles.step = dy_tiles.reach = Way::out;
  dy_tiles.padding_h = dy_tiles.padding_w = 0;
  const Index channels = in.channels, filters = out.channels, size = filters * channels * 9;
  // The number of tiles at a time that makes the back-transform of the weights cheap.
  const Index aim = 2 * channels * filters / (channels + filters) / tiles.strip_tiles();
  const Index at_once = std::max(plan.block, aim), groups = (plan.strips + at_once - 1) / at_once;
  // Groups are split into slices with separate sums, added in pairs, if threads have their own slices. The number of
  // slices depends only on the shape.
  const Index slices = std::min<Index>(groups, size <= (Index{1} << 16) ? 8 : 2);
  // A product's input is stored in reading order: w channels, or filters_at_once filters, of one tile after the other.
  const Index room = std::min(at_once, plan.strips) * tiles.strip_tiles();
  const TilePanels x_panels{rounded_to_panels<T>(channels), w, room};
  const Index dy_width = std::min(filters_at_once, rounded_to_panels<T>(filters));
  const TilePanels dy_panels{(filters + dy_width - 1) / dy_width * dy_width, dy_width, room};
  const Index v_pitch = plan.template point_pitch<T>(at_once, x_panels.channels);
  const Index m_pitch = plan.template point_pitch<T>(at_once, dy_panels.channels),
              du_pitch = filters_at_once * channels_at_once + lanes<T>;
  const ThreadScratch<T> rasters(
      device, std::max(plan.strip_size(), dy_tiles.rows(tiles.strip_rows) * dy_tiles.columns()) * lanes<T>);
  const ThreadScratch<T> vs(device, points * points * v_pitch, slices > 1);
  const ThreadScratch<T> ms(device, points * points * m_pitch, slices > 1);
  const ThreadScratch<T> dus(device, winograd_points * du_pitch);
  const Scratch<T> partial(device, (slices - 1) * size);
  const Index columns = (channels + channels_at_once - 1) / channels_at_once,
              rows = (filters + filters_at_once - 1) / filters_at_once;
  const auto sums = [&](Index slice) { return slice == 0 ? dweight : partial.data() + (slice - 1) * size; };

  // A gradient of at least 2 MiB, written once, leaves the caches before the all-reduce or the step reads it.
  const bool past_caches =
      groups == 1 && size >= (Index{1} << 19) && channels % lanes<T> == 0 && is_aligned(dweight);
  const Results written = past_caches ? Results::past_caches : Results::overwrite;

  const auto add_group = [&](Index strip, T* dw, bool add) {
    const Index strips = std::min(at_once, plan.strips - strip);
    const Index total = tiles.tiles_before(strip + strips) - tiles.tiles_before(strip);
    T *v = vs.data(), *m = ms.data();
    transform_tiles<Way::in, points>(tiles, x, strip, strips, x_panels, v_pitch, Way::input, rasters, v);
    transform_tiles<Way::out, points>(dy_tiles, dy, strip, strips, dy_panels, m_pitch, Way::output_gradient, rasters,
                                      m);
    parallel_for(rows * columns, [&](Index task) {
      const Index o = task / columns * filters_at_once, first = task % columns * channels_at_once;
      const Index some = std::min(filters_at_once, filters - o),
                  end = std::min(first + channels_at_once, x_panels.channels);
      T* du = dus.data();
      bool started[winograd_points] = {};
      for (int i = 0; i < points; ++i)
        for (int j = 0; j < points; ++j) {
          const int at = Way::weight_of(i) * static_cast<int>(winograd_weights) + Way::weight_of(j);
          const Index point = i * points + j;
          for_pieces(total, tiles_at_once, [&](Index tile, Index depth) {
            for (Index c = first; c < end; c += w)
              multiply_packed(some, depth,
                              Matrix<T, Fixed<1>>{m + point * m_pitch + dy_panels.at(tile, o), {}, dy_panels.width},
                              v + point * v_pitch + x_panels.at(tile, c), du + at * du_pitch + (c - first),
                              Fixed<channels_at_once>{}, started[at]);
            started[at] = true;
          });
        }
      weight_gradients<Way>(some, std::min(channels_at_once, channels - first), du_pitch, du, channels_at_once,
                            channels * 9, dw + (o * channels + first) * 9, add ? Results::accumulate : written);
    });
  };
  parallel_for(slices, [&](Index slice) {
    const Index first = slice * groups / slices, end = (slice + 1) * groups / slices;
    for (Index group = first; group < end; ++group)
      add_group(group * at_once, sums(slice), group > first || (slice == 0 && accumulate));
  });
  for (Index step = 1; step < slices; step *= 2)
    for (Index slice = 0; slice + step < slices; slice += 2 * step)
      for (Index i = 0; i < size; ++i) sums(slice)[i] += sums(slice + step)[i];
}

}  // namespace chorus::kernels::detail
