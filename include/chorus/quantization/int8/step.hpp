#pragma once
/// The steps of a quantised model, from 8-bit numbers to 8-bit numbers, as plain data.

#include <array>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/quantization/kernels/pointwise.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::nn::int8 {

using kernels::int8::Levels;

enum class Kind : std::uint8_t { conv2d, linear, add, max_pool2d, avg_pool2d, global_avg_pool, relu, flatten, concat };

inline constexpr std::array<std::string_view, 9> kind_names{
    "conv2d", "linear", "add", "max_pool2d", "avg_pool2d", "global_avg_pool", "relu", "flatten", "concat"};
/// The maximum number of operands of a concatenation.
inline constexpr std::size_t most_inputs = 1024;
inline void append(std::string& out, Kind kind) { out += kind_names[static_cast<std::size_t>(kind)]; }

/// One operation. Value 0 is the program's input, value i + 1 the output of step i.
struct Step {
  Kind kind = Kind::relu;
  /// The layer's path in the model ("layer1.0.conv1"), or a name for the step's function; unique.
  std::string name;
  std::vector<Index> inputs;
  /// The output's levels. max_pool2d and flatten keep their input's.
  Levels levels;
  /// conv2d, linear, add, concat: whether a ReLU follows.
  bool relu = false;

  /// conv2d and pooling: height, then width. For convolutions the weight gives the window.
  std::array<Index, 2> window{1, 1}, stride{1, 1}, padding{0, 0}, dilation{1, 1};
  Index groups = 1;
  bool ceil_mode = false, count_include_pad = true;

  /// conv2d: [out, in / groups, kernel_h, kernel_w]; linear: [out, in, 1, 1].
  std::array<Index, 4> weight_shape{};
  std::vector<std::int8_t> weight;
  /// By output: the scale of its weights, and the bias, which may be empty.
  std::vector<float> weight_scale, bias;

  bool has_weight() const { return kind == Kind::conv2d || kind == Kind::linear; }
  bool may_have_relu() const { return has_weight() || kind == Kind::add || kind == Kind::concat; }
  bool keeps_levels() const { return kind == Kind::max_pool2d || kind == Kind::flatten; }
};

/// Throws `Error` if these are not valid levels of 8-bit numbers.
template <class Error>
void check_levels(std::string_view who, const std::string& name, const Levels& levels) {
  check<Error>(std::isfinite(levels.scale) && levels.scale > 0 && levels.integers.least >= 0 &&
                   levels.integers.most <= 255 && levels.zero_point >= levels.integers.least &&
                   levels.zero_point <= levels.integers.most,
               who, ": '", name, "' has a scale of ", levels.scale, ", a zero point of ", levels.zero_point,
               " and integers from ", levels.integers.least,
               " to ", levels.integers.most, ": expected a positive scale, a zero point among the integers, and those ",
               "from 0 to 255");
}

/// Throws `Error` if the step can't be computed for any input. `who`: the beginning of messages.
template <class Error>
void check_step(std::string_view who, const Step& step, Index index) {
  const auto positive = [](const std::array<Index, 2>& both) {
    return both[0] > 0 && both[1] > 0 && both[0] < 1 << 20 && both[1] < 1 << 20;
  };
  const std::size_t operands = step.kind == Kind::add ? 2 : 1;
  const auto given = step.inputs.size();
  if (step.kind == Kind::concat)
    check<Error>(given > 0 && given <= most_inputs, who, ": concat '", step.name, "' expected 1 to ", most_inputs,
                 " inputs, got ", given);
  else
    check<Error>(given == operands, who, ": ", step.kind, " '", step.name, "' expected ", operands, " inputs, got ",
                 given);
  for (const Index input : step.inputs)
    check<Error>(input >= 0 && input <= index, who, ": input ", input, " of '", step.name, "', step ", index,
                 ", is not an earlier step");
  check_levels<Error>(who, step.name, step.levels);
  check<Error>(positive(step.window) && positive(step.stride) && positive(step.dilation) && step.padding[0] >= 0 &&
                   step.padding[1] >= 0 && step.padding[0] < 1 << 20 && step.padding[1] < 1 << 20 && step.groups > 0,
               who, ": '", step.name, "': expected window, stride, dilation and groups >= 1, padding >= 0");
  if (!step.has_weight()) return;
  const auto [out, in, kernel_h, kernel_w] = step.weight_shape;
  check<Error>(out > 0 && in > 0 && kernel_h > 0 && kernel_w > 0 && out % step.groups == 0, who, ": '", step.name,
               "' has a weight of shape ", step.weight_shape, " for ", step.groups, " groups");
  check<Error>(static_cast<Index>(step.weight.size()) == out * in * kernel_h * kernel_w, who, ": '", step.name,
               "' has ", step.weight.size(), " weights for shape ", step.weight_shape);
  check<Error>(static_cast<Index>(step.weight_scale.size()) == out &&
                   (step.bias.empty() || static_cast<Index>(step.bias.size()) == out),
               who, ": '", step.name, "' has ", step.weight_scale.size(), " scales and ", step.bias.size(),
               " biases for ", out, " outputs");
  for (const float scale : step.weight_scale)
    check<Error>(std::isfinite(scale) && scale > 0, who, ": '", step.name, "' has a weight scale of ", scale,
                 ": expected a positive number");
  for (const float bias : step.bias)
    check<Error>(std::isfinite(bias), who, ": '", step.name, "' has a bias of ", bias);
}

}  // namespace chorus::nn::int8
