#pragma once
/// Direct convolution for many channels. Pixels are read one by one where they lie and multiplied with panels of
/// weights, so that strides cost nothing and nothing is copied per tap.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/input_raster.hpp>
#include <chorus/kernels/cpu/pack.hpp>
#include <chorus/kernels/cpu/packet.hpp>
#include <chorus/kernels/cpu/raster.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/kernels/cpu/scratch_vector.hpp>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/cpu/transpose.hpp>
#include <utility>

namespace chorus::kernels::detail {

/// The number of a product's columns from which this is faster than the product over rasters.
inline constexpr Index direct_columns = 24;

/// The size of packed panels of `columns` columns and `depth` rows.
template <class T>
Index panels_size(Index columns, Index depth) {
  return round_up(columns, tile_columns<T>) * depth;
}

/// Images with zeros above and on the left. These also serve as the zeros below the image before, and on its right.
/// Images without zeros are read in place.
struct PaddedImages {
  Index images, channels, height, width, between;  ///< `between`: the distance from an image to the next one
  Index top, left, rows, pitch;

  bool in_place() const { return rows == height && pitch == width; }
  Index image() const { return in_place() ? between : rows * pitch; }
  Index channel() const { return in_place() ? height * width : images * rows * pitch; }
  Index size() const { return in_place() ? 0 : channels * channel() + slack(); }

  /// Copies `count` images, if that is necessary. Returns the position of the padded pixel (0, 0).
  template <class T>
  const T* fill(const T* from, Index count, T* to) const {
    if (in_place()) return from;
    for (Index c = 0; c < channels; ++c) {
      T* next = to + c * channel();
      for (Index n = 0; n < count; ++n, next += image())
        to_raster(from + n * between + c * height * width, Axis{height, 1, -top}, Axis{width, 1, -left}, rows, pitch,
                  next);
      std::fill_n(next, slack(), T{0});
    }
    return to;
  }

 private:
  Index slack() const { return top * pitch + left; }
};

/// The images that forward and the weight gradient read, the positions of y's pixels in them, and the taps' offsets.
struct DirectInput {
  PaddedImages images;
  ScratchVector<Index> positions, offsets;

  template <class T>
  static DirectInput of(Cpu device, const Conv2dShape& s) {
    const Index image = s.in_channels * s.height * s.width;
    DirectInput in{{InputRaster<T>(s).images, s.in_channels / s.groups, s.height, s.width, image, s.padding_h,
                    s.padding_w, s.height + s.padding_h, s.width + s.padding_w},
                   ScratchVector<Index>(device),
                   ScratchVector<Index>(device)};
    const PaddedImages& to = in.images;
    in.positions.reserve(static_cast<std::size_t>(to.images * s.out_height() * s.out_width()));
    in.offsets.reserve(static_cast<std::size_t>(to.channels * s.kernel_h * s.kernel_w));
    for (Index n = 0; n < to.images; ++n)
      for (Index i = 0; i < s.out_height(); ++i)
        for (Index j = 0; j < s.out_width(); ++j)
          in.positions.push_back(n * to.image() + i * s.stride_h * to.pitch + j * s.stride_w);
    for (Index c = 0; c < to.channels; ++c)
      for (Index h = 0; h < s.kernel_h; ++h)
        for (Index w = 0; w < s.kernel_w; ++w)
          in.offsets.push_back(c * to.channel() + h * s.dilation_h * to.pitch + w * s.dilation_w);
    return in;
  }
};

/// c[i, j] = sum over p of a[rows[i] + columns[p]] * b[p, j], or +=, for a panel b of `width` columns.
template <class T>
void multiply_picked_panel(Index count, Index width, Index depth, const T* a, const Index* rows, const Index* columns,
                           const T* b, T* c, bool accumulate) {
  width > lanes<T> ? multiply_picked<tile_rows, 2>(count, depth, a, rows, columns, b, c, accumulate)
                   : multiply_picked<8, 1>(count, depth, a, rows, columns, b, c, accumulate);
}

/// Calls put(j, width, first, sums) for pieces of the product sums[q, j] = sum over p of x[positions[q] + offsets[p]] *
/// panels[p, j]: for `width` columns from j on, and for the pixels `first`. Rows of sums are tile_columns apart.
template <class T, class Put>
void multiply_pixels(Index pixels, Index columns, const T* x, const Index* positions,
                     const ScratchVector<Index>& offsets, const T* panels, const Put& put) {
  constexpr Index w = tile_columns<T>;
  const Index k = static_cast<Index>(offsets.size());
  T* const sums = left_memory<T>();
  for_pieces(pixels, left_rows, [&](Index first, Index count) {
    for (Index j = 0; j < columns; j += w) {
      const Index width = std::min(w, columns - j);
      if (k == 0) std::fill_n(sums, count * w, T{0});
      for_pieces(k, gemm_depth, [&](Index p, Index depth) {
        multiply_picked_panel(count, width, depth, x, positions + first, offsets.data() + p, panels + j * k + p * w,
                              sums, p > 0);
      });
      put(j, width, first, count, sums);
    }
  });
}

/// to[j * to_row + i] = from[i * tile_columns + j] + bias[j], or +=. `bias` may be null.
template <class T>
void unpack_columns(Index rows, Index columns, const T* from, const T* bias, T* to, Index to_row, bool accumulate) {
  constexpr Index w = lanes<T>;
  for (Index side = 0; side < columns; side += w)
    for_packets<T>(rows, [&](Index i, auto count) {
      Square<T> square;
      for (Index l = 0; l < w; ++l)
        square.packet[l] = l < count ? load(from + (i + l) * 2 * w + side, Whole<T>{}) : splat(T{0});
      transpose<T>(square);
      for (Index l = 0; l < std::min(w, columns - side); ++l)
        store(to + (side + l) * to_row + i, padd(square.packet[l], splat(bias == nullptr ? T{0} : bias[side + l])),
              count, accumulate);
    });
}

/// Calls f(q, count) for the parts of [first, first + total) that lie in one line of `length` each.
template <class F>
void for_lines(Index first, Index total, Index length, const F& f) {
  for (Index q = first, count = 0; q < first + total; q += count) {
    count = std::min(length - q % length, first + total - q);
    f(q, count);
  }
}

template <class T>
void direct_forward(Cpu device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  constexpr Index w = tile_columns<T>;
  const Index filters = s.out_channels / s.groups, out = s.out_height() * s.out_width();
  const auto in = DirectInput::of<T>(device, s);
  const Index k = static_cast<Index>(in.offsets.size()), size = panels_size<T>(filters, k);
  const Scratch<T> panels(device, s.groups * size);
  parallel_ranges(s.groups, 1, thread_elements / (size + 1) + 1, [&](Index first, Index count) {
    for (Index group = first; group < first + count; ++group)
      for (Index j = 0; j < filters; j += w)
        pack_columns(k, std::min(w, filters - j), weight + (group * filters + j) * k, k,
                     panels.data() + group * size + j * k);
  });
  const ThreadScratch<T> xs(device, in.images.size());
  for_blocks(s, in.images.images, s.groups, [&](Index group, Index n, Index count) {
    const T* const from =
        in.images.fill(x + (n * s.groups + group) * in.images.channels * s.height * s.width, count, xs.data());
    multiply_pixels(count * out, filters, from, in.positions.data(), in.offsets, panels.data() + group * size,
                    [&](Index j, Index width, Index first, Index pixels, const T* sums) {
                      const Index channel = group * filters + j;
                      for_lines(first, pixels, out, [&](Index q, Index length) {
                        unpack_columns(length, width, sums + (q - first) * w,
                                       bias == nullptr ? nullptr : bias + channel,
                                       y + ((n + q / out) * s.out_channels + channel) * out + q % out, out, false);
                      });
                    });
  });
}

template <class T>
void direct_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight, bool accumulate) {
  constexpr Index w = tile_columns<T>;
  const Index filters = s.out_channels / s.groups, out = s.out_height() * s.out_width();
  const auto in = DirectInput::of<T>(device, s);
  const Index k = static_cast<Index>(in.offsets.size()), size = panels_size<T>(filters, k);
  const ThreadScratch<T> xs(device, in.images.size());
  const Scratch<T> turned(device, s.groups * size);
  std::fill_n(turned.data(), s.groups * size, T{0});
  sum_slices(
      device, s, in.images.images, s.groups * size, turned.data(), [&](Index group, Index n, Index count, T* all) {
        alignas(64) T panel[gemm_depth * w];
        T* const sums = all + group * size;
        const T* const from =
            in.images.fill(x + (n * s.groups + group) * in.images.channels * s.height * s.width, count, xs.data());
        for_pieces(count * out, gemm_depth, [&](Index first, Index depth) {
          for (Index j = 0; j < filters; j += w) {
            const Index width = std::min(w, filters - j);
            for_lines(first, depth, out, [&](Index q, Index length) {
              pack_columns(length, width, dy + ((n + q / out) * s.out_channels + group * filters + j) * out + q % out,
                           out, panel + (q - first) * w);
            });
            multiply_picked_panel(k, width, depth, from, in.offsets.data(), in.positions.data() + first, panel,
                                  sums + j * k, true);
          }
        });
      });
  for (Index group = 0; group < s.groups; ++group)
    for (Index j = 0; j < filters; j += w)
      unpack_columns<T>(k, std::min(w, filters - j), turned.data() + group * size + j * k, nullptr,
                        dweight + (group * filters + j) * k, k, accumulate);
}

/// Phases of dx (see conv2d_backward_input) that read the same pixels of dy.
struct EqualPhases {
  Index top, bottom, left, right;     ///< of the phases' pixels, in all pixels of a phase
  ScratchVector<Index> offsets;       ///< of the taps, in dy
  ScratchVector<Index> phases, taps;  ///< `taps`: [phases, offsets]

  Index columns(Index channels) const { return static_cast<Index>(phases.size()) * channels; }
  bool reads_as(const EqualPhases& o) const {
    return top == o.top && bottom == o.bottom && left == o.left && right == o.right && offsets == o.offsets;
  }
};

template <class T>
ScratchVector<EqualPhases> equal_phases(Cpu device, const Conv2dShape& s, const GradientRaster<T>& raster) {
  ScratchVector<EqualPhases> all(device);
  for (Index phase = 0; phase < s.stride_h * s.stride_w; ++phase) {
    const Axis vertical = raster.vertical(s, phase / s.stride_w), horizontal = raster.horizontal(s, phase % s.stride_w);
    const Index rows = raster.phase_rows(), columns = raster.phase_columns();
    EqualPhases own{vertical.begin(rows),  vertical.end(rows), horizontal.begin(columns), horizontal.end(columns),
                    ScratchVector<Index>(device), ScratchVector<Index>(1, phase, device), ScratchVector<Index>(device)};
    for (Index tap = 0; tap < s.kernel_h * s.kernel_w; ++tap) {
      const Index h = tap / s.kernel_w * s.dilation_h, w = tap % s.kernel_w * s.dilation_w;
      if (h % s.stride_h != phase / s.stride_w || w % s.stride_w != phase % s.stride_w) continue;
      own.offsets.push_back(raster.offset(s, h, w));
      own.taps.push_back(tap);
    }
    if (own.taps.empty()) continue;
    const auto met = std::find_if(all.begin(), all.end(), [&](const auto& other) { return own.reads_as(other); });
    if (met == all.end()) {
      all.push_back(std::move(own));
    } else {
      met->phases.push_back(phase);
      met->taps.insert(met->taps.end(), own.taps.begin(), own.taps.end());
    }
  }
  return all;
}

/// Computes dx as a product for each set of equal phases, with a column for each channel of each phase.
template <class T>
void direct_backward_input(Cpu device, const Conv2dShape& s, const GradientRaster<T>& raster,
                           const ScratchVector<EqualPhases>& parts, const T* weight, const T* dy, T* dx,
                           bool accumulate) {
  constexpr Index w = tile_columns<T>;
  const Index filters = s.out_channels / s.groups, channels = s.in_channels / s.groups, taps = s.kernel_h * s.kernel_w;
  const Index out = s.out_height() * s.out_width(), image = s.height * s.width;
  const PaddedImages ys{images_per_block(s.batch, raster.rows * raster.pitch),
                        filters,
                        s.out_height(),
                        s.out_width(),
                        s.out_channels * out,
                        raster.top,
                        raster.left,
                        raster.rows,
                        raster.pitch};
  struct Product {
    const EqualPhases& part;
    Index columns, size;
    Scratch<T> panels;
    ScratchVector<Index> positions, offsets, places;  ///< `places`: of the columns, in an image of dx
  };
  ScratchVector<Product> products(device);
  const ScratchVector<Index> none(device);
  for (const EqualPhases& part : parts) {
    const Index phases = static_cast<Index>(part.phases.size()), reach = static_cast<Index>(part.offsets.size());
    const Index columns = phases * channels, size = panels_size<T>(columns, filters * reach);
    Product to{part, columns, size, Scratch<T>(device, s.groups * size), none, none, none};
    for (Index n = 0; n < ys.images; ++n)
      for (Index i = part.top; i < part.bottom; ++i)
        for (Index j = part.left; j < part.right; ++j) to.positions.push_back(n * ys.image() + i * ys.pitch + j);
    for (Index o = 0; o < filters; ++o)
      for (const Index offset : part.offsets) to.offsets.push_back(o * ys.channel() + offset);
    for (Index c = 0; c < channels; ++c)
      for (const Index phase : part.phases)
        to.places.push_back(c * image + raster.vertical(s, phase / s.stride_w).origin * s.width +
                            raster.horizontal(s, phase % s.stride_w).origin);
    std::fill_n(to.panels.data(), s.groups * size, T{0});
    parallel_ranges(s.out_channels, 1, thread_elements / (columns * reach + 1) + 1, [&](Index first, Index count) {
      for (Index o = first; o < first + count; ++o)
        for (Index j = 0; j < columns; ++j) {
          const T* from = weight + (o * channels + j / phases) * taps;
          T* panel = to.panels.data() + o / filters * size + (j / w * filters + o % filters) * reach * w + j % w;
          const Index* tap = part.taps.data() + j % phases * reach;
          for (Index t = 0; t < reach; ++t) panel[t * w] = from[tap[t]];
        }
    });
    products.push_back(std::move(to));
  }
  const ThreadScratch<T> memory(device, ys.size());
  for_blocks(s, ys.images, s.groups, [&](Index group, Index n, Index count) {
    const T* const from = ys.fill(dy + (n * s.groups + group) * filters * out, count, memory.data());
    for (const Product& product : products) {
      const EqualPhases& part = product.part;
      const Index width = part.right - part.left, pixels = (part.bottom - part.top) * width;
      const auto put = [&](Index j, Index columns, Index first, Index length, const T* sums) {
        alignas(64) T lines[w * left_rows];
        for_lines(first, length, pixels, [&](Index q, Index some) {
          T* const to = dx + ((n + q / pixels) * s.groups + group) * channels * image;
          if (s.stride_h * s.stride_w == 1)
            return unpack_columns<T>(some, columns, sums + (q - first) * w, nullptr, to + j * image + q % pixels, image,
                                     accumulate);
          unpack_columns<T>(some, columns, sums + (q - first) * w, nullptr, lines, left_rows, false);
          for_lines(q % pixels, some, width, [&](Index pixel, Index n_pixels) {
            T* const row =
                to + (part.top + pixel / width) * s.stride_h * s.width + (part.left + pixel % width) * s.stride_w;
            for (Index l = 0; l < columns; ++l)
              put_strided(lines + l * left_rows + pixel - q % pixels, n_pixels,
                          row + product.places[static_cast<std::size_t>(j + l)], s.stride_w, accumulate);
          });
        });
      };
      multiply_pixels(count * pixels, product.columns, from, product.positions.data(), product.offsets,
                      product.panels.data() + group * product.size, put);
    }
  });
}

}  // namespace chorus::kernels::detail
