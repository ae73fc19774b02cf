#pragma once
/// A quantised model: a list of integer steps that runs on batches of any size. Values between steps are 8-bit numbers,
/// channels last, in one shared piece of memory.

#include <algorithm>
#include <array>
#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/cpu/scratch.hpp>
#include <chorus/quantization/int8/step.hpp>
#include <chorus/quantization/kernels/convolution.hpp>
#include <chorus/quantization/kernels/image.hpp>
#include <chorus/quantization/kernels/pointwise.hpp>
#include <chorus/quantization/kernels/pooling.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::nn::int8 {

/// A value's shape for one sample. A vector has one pixel.
struct Extent {
  Index channels = 0, height = 1, width = 1;
  bool is_image = false;

  Index count() const { return channels * height * width; }
  bool operator==(const Extent&) const = default;
};
inline void append(std::string& out, const Extent& extent) {
  out += extent.is_image ? cat("[", extent.channels, ", ", extent.height, ", ", extent.width, "]")
                         : cat("[", extent.channels, "]");
}

/// A value's integers, as Program::watch passes them.
struct Seen {
  const std::string& name;
  const Levels& levels;
  const kernels::int8::Images& images;
};

class Program {
 public:
  Program() = default;
  /// `input`: the levels of the input. The last step's value is the result. Throws UsageError if a step can't be
  /// computed.
  Program(Levels input, std::vector<Step> steps) : input_(input), steps_(std::move(steps)) {
    check<UsageError>(!steps_.empty(), who, ": expected at least one step");
    check_levels<UsageError>(who, "input", input_);
    for (std::size_t i = 0; i < steps_.size(); ++i) check_step<UsageError>(who, steps_[i], static_cast<Index>(i));
    for (auto& step : steps_) prepare(step);
  }

  const std::vector<Step>& steps() const { return steps_; }
  const Levels& input() const { return input_; }
  const Levels& output() const { return steps_.back().levels; }

  /// x: [batch, channels, height, width] or [batch, channels], is quantised -> the result in float: [batch, ...].
  /// Throws ShapeError if x does not fit the steps or the result's rank is not OutRank.
  template <int OutRank = 2, int Rank>
  Tensor<float, OutRank> operator()(const Tensor<float, Rank>& x) const {
    return run<OutRank>(x, [](const Seen&) {});
  }

  /// The same; passes each value's integers to `watch` when they are computed.
  template <int OutRank = 2, int Rank, class Watch>
  Tensor<float, OutRank> watch(const Tensor<float, Rank>& x, const Watch& watch) const {
    return run<OutRank>(x, watch);
  }

 private:
  static constexpr const char* who = "quantized model";
  using Images = kernels::int8::Images;

  /// A step's data in its kernel's form.
  struct Prepared {
    kernels::int8::PackedWeights weights;
    std::vector<std::int32_t> offset;
    std::vector<float> bias, multiplier;
    std::vector<std::array<std::uint8_t, 256>> tables;  // for each input
  };

  const Levels& levels_of(Index value) const {
    return value == 0 ? input_ : steps_[static_cast<std::size_t>(value - 1)].levels;
  }

  static kernels::Conv2dShape convolution_of(const Step& step) {
    return {.batch = 0,
            .in_channels = step.weight_shape[1] * step.groups,
            .height = 0,
            .width = 0,
            .out_channels = step.weight_shape[0],
            .kernel_h = step.weight_shape[2],
            .kernel_w = step.weight_shape[3],
            .stride_h = step.stride[0],
            .stride_w = step.stride[1],
            .padding_h = step.padding[0],
            .padding_w = step.padding[1],
            .dilation_h = step.dilation[0],
            .dilation_w = step.dilation[1],
            .groups = step.groups};
  }
  static kernels::Pool2dShape pooling_of(const Step& step, const Extent& x) {
    return {.planes = x.channels,
            .height = x.height,
            .width = x.width,
            .kernel_h = step.window[0],
            .kernel_w = step.window[1],
            .stride_h = step.stride[0],
            .stride_w = step.stride[1],
            .padding_h = step.padding[0],
            .padding_w = step.padding[1],
            .dilation_h = step.dilation[0],
            .dilation_w = step.dilation[1],
            .ceil_mode = step.ceil_mode};
  }

  void prepare(Step& step) {
    Prepared out;
    const Levels& x = levels_of(step.inputs[0]);
    if (step.keeps_levels()) step.levels = x;
    if (step.kind == Kind::relu || step.kind == Kind::concat) {
      const bool clips = step.kind == Kind::relu || step.relu;
      const auto least = clips ? step.levels.zero_point : step.levels.integers.least;
      for (const Index input : step.inputs) {
        auto& table = out.tables.emplace_back();
        for (int q = 0; q < 256; ++q)
          table[static_cast<std::size_t>(q)] =
              kernels::int8::level_of(step.levels, levels_of(input).number(q), least);
      }
    }
    if (step.has_weight()) {
      const auto shape = convolution_of(step);
      check<UsageError>(step.weight_shape[1] * shape.kernel_h * shape.kernel_w <= kernels::int8::most_terms, who, ": '",
                        step.name, "' adds ", step.weight_shape[1] * shape.kernel_h * shape.kernel_w,
                        " products, expected at most ", kernels::int8::most_terms);
      out.weights = kernels::int8::pack_weights(shape, step.weight);
      // Kernels read whole vectors, also past the last channel.
      const auto outputs = static_cast<std::size_t>(shape.out_channels);
      const std::size_t padded = outputs + static_cast<std::size_t>(kernels::int8::panel);
      out.offset.assign(padded, 0);
      out.bias.assign(padded, 0);
      out.multiplier.assign(padded, 0);
      for (std::size_t o = 0; o < outputs; ++o) {
        const quantized::Requantizer to(x.scale, step.weight_scale[o], step.bias.empty() ? 0.0f : step.bias[o],
                                        step.levels, step.relu);
        out.offset[o] = -x.zero_point * out.weights.sums[o];
        out.bias[o] = to.bias_in_units;
        out.multiplier[o] = to.multiplier;
      }
    }
    prepared_.push_back(std::move(out));
  }

  static void check_pooled(const Step& step, Index count) {
    check<ShapeError>(count <= kernels::int8::most_pooled, who, ": ", step.kind, " '", step.name,
                      "' averages ", count, " numbers, expected at most ", kernels::int8::most_pooled);
  }

  /// The shape of a step's output. Throws ShapeError if its inputs don't fit.
  Extent extent_after(const Step& step, std::span<const Extent> values) const {
    const Extent& x = values[static_cast<std::size_t>(step.inputs[0])];
    const auto wants_image = [&] {
      check<ShapeError>(x.is_image, who, ": ", step.kind, " '", step.name, "' expected an image, got ", x);
    };
    switch (step.kind) {
      case Kind::conv2d: {
        wants_image();
        auto s = convolution_of(step);
        check<ShapeError>(s.in_channels == x.channels, who, ": '", step.name, "' expected ", s.in_channels,
                          " channels, got ", x);
        s.height = x.height;
        s.width = x.width;
        check<ShapeError>(x.height + 2 * s.padding_h > s.dilation_h * (s.kernel_h - 1) &&
                              x.width + 2 * s.padding_w > s.dilation_w * (s.kernel_w - 1),
                          who, ": the kernel of '", step.name, "' is larger than its padded input of ", x);
        return {s.out_channels, s.out_height(), s.out_width(), true};
      }
      case Kind::linear:
        check<ShapeError>(!x.is_image && x.channels == step.weight_shape[1], who, ": '", step.name, "' expected ",
                          step.weight_shape[1], " numbers, got ", x);
        return {step.weight_shape[0], 1, 1, false};
      case Kind::add: {
        const Extent& other = values[static_cast<std::size_t>(step.inputs[1])];
        check<ShapeError>(x == other, who, ": '", step.name, "' adds ", x, " and ", other);
        return x;
      }
      case Kind::concat: {
        Extent whole = x;
        whole.channels = 0;
        for (const Index input : step.inputs) {
          const Extent& part = values[static_cast<std::size_t>(input)];
          check<ShapeError>(part.is_image == x.is_image && part.height == x.height && part.width == x.width, who,
                            ": '", step.name, "' concatenates ", x, " and ", part);
          whole.channels += part.channels;
        }
        return whole;
      }
      case Kind::max_pool2d:
      case Kind::avg_pool2d: {
        wants_image();
        const auto s = pooling_of(step, x);
        if (step.kind == Kind::avg_pool2d) check_pooled(step, s.kernel_h * s.kernel_w);
        check<ShapeError>(x.height + 2 * s.padding_h >= s.span_h() && x.width + 2 * s.padding_w >= s.span_w(), who,
                          ": the window of '", step.name, "' does not fit ", x);
        return {x.channels, s.out_height(), s.out_width(), true};
      }
      case Kind::global_avg_pool:
        wants_image();
        check_pooled(step, x.height * x.width);
        return {x.channels, 1, 1, false};
      case Kind::relu:
        return x;
      case Kind::flatten:
        return {x.count(), 1, 1, false};
    }
    return x;
  }

  /// The places of a batch's values: values that are not needed at the same time may share memory.
  struct Places {
    std::vector<Images> values;
    std::vector<Index> offsets;
    Index bytes = 0;
  };
  Places place(std::span<const Extent> extents, Index batch) const {
    Places out;
    std::vector<Index> last(extents.size(), 0), border(extents.size(), 0);
    for (std::size_t i = 0; i < steps_.size(); ++i)
      for (const Index input : steps_[i].inputs) {
        const auto at = static_cast<std::size_t>(input);
        last[at] = static_cast<Index>(i) + 1;
        if (steps_[i].kind == Kind::conv2d)
          border[at] = std::max({border[at], steps_[i].padding[0], steps_[i].padding[1]});
      }
    for (std::size_t v = 0; v < extents.size(); ++v) {
      const auto& extent = extents[v];
      out.values.push_back({nullptr, batch, extent.height, extent.width, extent.channels, border[v]});
      const Index bytes = (out.values[v].bytes() + 63) / 64 * 64;
      // First fit between the values that are still read when this one is written.
      std::vector<std::pair<Index, Index>> taken;
      for (std::size_t other = 0; other < v; ++other)
        if (last[other] >= static_cast<Index>(v))
          taken.emplace_back(out.offsets[other], out.offsets[other] + (out.values[other].bytes() + 63) / 64 * 64);
      std::sort(taken.begin(), taken.end());
      Index at = 0;
      for (const auto& [begin, end] : taken) {
        if (at + bytes <= begin) break;
        at = std::max(at, end);
      }
      out.offsets.push_back(at);
      out.bytes = std::max(out.bytes, at + bytes);
    }
    return out;
  }

  void run_step(std::size_t i, std::span<const Images> values) const {
    const Step& step = steps_[i];
    const Prepared& ready = prepared_[i];
    const Images& x = values[static_cast<std::size_t>(step.inputs[0])];
    const Images& y = values[i + 1];
    const Levels& from = levels_of(step.inputs[0]);
    switch (step.kind) {
      case Kind::conv2d:
      case Kind::linear: {
        auto shape = convolution_of(step);
        shape.batch = x.batch;
        shape.height = x.height;
        shape.width = x.width;
        const auto& levels = step.levels;
        kernels::int8::convolution(
            shape, x, ready.weights,
            {ready.offset.data(), ready.bias.data(), ready.multiplier.data(), levels.zero_point,
             step.relu ? levels.zero_point : levels.integers.least, levels.integers.most},
            y);
        break;
      }
      case Kind::add:
        kernels::int8::add({from, levels_of(step.inputs[1]), step.levels, step.relu}, x,
                           values[static_cast<std::size_t>(step.inputs[1])], y);
        break;
      case Kind::max_pool2d:
        kernels::int8::max_pool2d(pooling_of(step, {x.channels, x.height, x.width, true}), x, y);
        break;
      case Kind::avg_pool2d:
        kernels::int8::avg_pool2d(
            pooling_of(step, {x.channels, x.height, x.width, true}), x, y,
            {from, step.levels, step.count_include_pad});
        break;
      case Kind::global_avg_pool: {
        const kernels::Pool2dShape whole{x.channels, x.height, x.width, x.height, x.width, 1, 1};
        kernels::int8::avg_pool2d(whole, x, y, {from, step.levels, true});
        break;
      }
      case Kind::relu:
        kernels::int8::look_up(ready.tables[0], x, y);
        break;
      case Kind::concat: {
        Index first = 0;
        for (std::size_t part = 0; part < step.inputs.size(); ++part) {
          const Images& from_part = values[static_cast<std::size_t>(step.inputs[part])];
          kernels::int8::look_up_channels(ready.tables[part], from_part, y, first);
          first += from_part.channels;
        }
        break;
      }
      case Kind::flatten:
        for (Index image = 0; image < x.batch; ++image) {
          Images one = x;
          one.data = x.data + image * x.image_bytes();
          one.batch = 1;
          kernels::int8::for_channels_first(one, y.at(image, 0, 0), [](std::uint8_t q) { return q; });
        }
        break;
    }
  }

  template <int OutRank, int Rank, class Watch>
  Tensor<float, OutRank> run(const Tensor<float, Rank>& x, const Watch& watch) const {
    static_assert((Rank == 4 || Rank == 2) && (OutRank == 4 || OutRank == 2),
                  "quantized model: expected input and output [batch, channels, height, width] or [batch, channels]");
    check<UsageError>(!steps_.empty(), who, ": it has no steps: call quantized(model), or load a model");
    check<UsageError>(x.defined(), who, ": the input is undefined");
    const auto input = contiguous(x);
    std::vector<Extent> extents{{input.size(1), 1, 1, Rank == 4}};
    if constexpr (Rank == 4) extents[0] = {input.size(1), input.size(2), input.size(3), true};
    for (const auto& step : steps_) extents.push_back(extent_after(step, extents));
    const Extent& result = extents.back();
    check<ShapeError>(result.is_image == (OutRank == 4), who, ": the output of a sample is ", result, ", not of rank ",
                      OutRank - 1);
    const Index batch = input.size(0);
    Shape<OutRank> shape{batch, result.channels};
    if constexpr (OutRank == 4) shape = {batch, result.channels, result.height, result.width};
    auto out = Tensor<float, OutRank>::empty(shape);
    if (out.numel() == 0 || input.numel() == 0) return out;

    Places places = place(extents, batch);
    const kernels::Scratch<std::uint8_t> memory(Cpu{}, places.bytes);
    for (std::size_t v = 0; v < extents.size(); ++v) places.values[v].data = memory.data() + places.offsets[v];

    const std::string input_name = "input";
    for (std::size_t v = 0; v < extents.size(); ++v) {
      const Images& value = places.values[v];
      value.fill_border(static_cast<std::uint8_t>(levels_of(static_cast<Index>(v)).zero_point));
      if (v == 0)
        kernels::int8::quantize(input_, input.data(), value);
      else
        run_step(v - 1, places.values);
      watch(Seen{v == 0 ? input_name : steps_[v - 1].name, levels_of(static_cast<Index>(v)), value});
    }
    kernels::int8::dequantize(output(), places.values.back(), out.data());
    return out;
  }

  Levels input_;
  std::vector<Step> steps_;
  std::vector<Prepared> prepared_;
};

}  // namespace chorus::nn::int8
