#pragma once
/// Crops and scales a picture.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/data/images/frames.hpp>
#include <chorus/data/images/picture.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus::data {

namespace detail {

/// Output i along one axis is the sum of weights(i)[k] * input first(i) + k: linear interpolation that averages over
/// all inputs when it makes a picture smaller, as Pillow's and, with `antialias`, PyTorch's. The weights are a triangle
/// of radius max(1, scale) around (i + 0.5) * scale, and add up to 1.
class ScaleWeights {
 public:
  /// Of `from` inputs scaled to `to` outputs: the outputs `begin` to `begin + count - 1`.
  ScaleWeights(Index from, Index to, Index begin, Index count) {
    const double scale = static_cast<double>(from) / static_cast<double>(to), radius = std::max(scale, 1.0);
    most_ = static_cast<std::size_t>(std::ceil(radius) * 2 + 1);
    first_.resize(static_cast<std::size_t>(count));
    counts_.resize(first_.size());
    weights_.resize(first_.size() * most_);
    for (std::size_t i = 0; i < first_.size(); ++i) {
      const double center = (static_cast<double>(begin) + static_cast<double>(i) + 0.5) * scale;
      first_[i] = std::max<Index>(static_cast<Index>(center - radius + 0.5), 0);
      const Index last = std::min(static_cast<Index>(center + radius + 0.5), from);
      counts_[i] = std::min(static_cast<std::size_t>(last - first_[i]), most_);
      float* const out = weights_.data() + i * most_;
      double sum = 0;
      for (std::size_t k = 0; k < counts_[i]; ++k) {
        const double at = (static_cast<double>(first_[i]) + static_cast<double>(k) + 0.5 - center) / radius;
        const double weight = std::max(0.0, 1 - std::abs(at));
        out[k] = static_cast<float>(weight);
        sum += weight;
      }
      for (std::size_t k = 0; k < counts_[i]; ++k) out[k] = static_cast<float>(out[k] / sum);
    }
  }

  Index first(std::size_t i) const { return first_[i]; }
  std::span<const float> weights(std::size_t i) const { return {weights_.data() + i * most_, counts_[i]}; }
  /// The inputs that are used: the first, and the one behind the last.
  Index begin() const { return first_.front(); }
  Index end() const {
    Index out = 0;
    for (std::size_t i = 0; i < first_.size(); ++i) out = std::max(out, first_[i] + static_cast<Index>(counts_[i]));
    return out;
  }

 private:
  std::vector<Index> first_;
  std::vector<std::size_t> counts_;
  std::vector<float> weights_;
  std::size_t most_;
};

/// sums += weight * bytes, in blocks of a fixed length, which compilers vectorise at -O2, too.
inline void add_weighted(float* __restrict sums, const std::uint8_t* __restrict bytes, float weight,
                         std::size_t count) {
  constexpr std::size_t block = 32;
  std::size_t i = 0;
  for (; i + block <= count; i += block)
    for (std::size_t k = 0; k < block; ++k) sums[i + k] += weight * static_cast<float>(bytes[i + k]);
  for (; i < count; ++i) sums[i] += weight * static_cast<float>(bytes[i]);
}

}  // namespace detail

/// The part of `picture` in `frame`, scaled: [3, frame.window_height, frame.window_width], in [0, 1]. Rows are added up
/// first, then columns; numbers are rounded as floats only, where Pillow rounds to 8 bits twice. Throws ShapeError if
/// the frame does not fit the picture, or has more pixels than a picture may have.
inline Tensor<float, 3> framed(const Picture& picture, const Frame& frame) {
  const auto inside = [](Index begin, Index count, Index size) {
    return begin >= 0 && count >= 1 && count <= size && begin <= size - count;
  };
  check<ShapeError>(
      inside(frame.top, frame.height, picture.height()) && inside(frame.left, frame.width, picture.width()),
      "framed: the part of ", frame.height, " x ", frame.width, " at ", frame.top, ", ", frame.left,
      " is not inside the picture of ", picture.height(), " x ", picture.width());
  check<ShapeError>(inside(frame.window_top, frame.window_height, frame.scaled_height) &&
                        inside(frame.window_left, frame.window_width, frame.scaled_width),
                    "framed: the window of ", frame.window_height, " x ", frame.window_width, " at ", frame.window_top,
                    ", ", frame.window_left, " is not inside the scaled picture of ", frame.scaled_height, " x ",
                    frame.scaled_width);
  check<ShapeError>(frame.window_width <= Picture::most_pixels / frame.window_height, "framed: expected at most ",
                    Picture::most_pixels, " pixels, got ", frame.window_height, " x ", frame.window_width);
  const detail::ScaleWeights rows(frame.height, frame.scaled_height, frame.window_top, frame.window_height);
  const detail::ScaleWeights columns(frame.width, frame.scaled_width, frame.window_left, frame.window_width);
  const Index begin = columns.begin();
  const auto used = static_cast<std::size_t>(columns.end() - begin) * 3;
  std::vector<float> sums(used + 1);  // one more, since pixels are read as four numbers
  auto out = Tensor<float, 3>::empty({3, frame.window_height, frame.window_width});
  const auto width = static_cast<std::size_t>(frame.window_width);
  const std::size_t area = width * static_cast<std::size_t>(frame.window_height);
  for (std::size_t y = 0; y < static_cast<std::size_t>(frame.window_height); ++y) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    Index row = frame.top + rows.first(y);
    for (const float weight : rows.weights(y))
      detail::add_weighted(sums.data(), picture.row(row++) + (frame.left + begin) * 3, weight, used);
    float* const to = out.data() + y * width;
    for (std::size_t x = 0; x < width; ++x) {
      const float* from = sums.data() + (columns.first(x) - begin) * 3;
      std::array<float, 4> pixel{};
      for (const float weight : columns.weights(x)) {
        for (std::size_t c = 0; c < 4; ++c) pixel[c] += weight * from[c];
        from += 3;
      }
      for (std::size_t c = 0; c < 3; ++c) to[c * area + x] = pixel[c] / 255.0f;
    }
  }
  return out;
}

}  // namespace chorus::data
