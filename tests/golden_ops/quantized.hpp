#pragma once
/// Cases of integer arithmetic: every integer must be PyTorch's.

#include <chorus/quantization/int8/program.hpp>
#include <chorus/quantization/ops/quantized.hpp>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "case.hpp"

namespace golden {

/// Counts the integers that differ, and says how many.
inline void compare_levels(Case& test, const std::string& name, const std::vector<std::uint8_t>& actual) {
  test.seen(name);
  const auto& expected = test.file(name).u8();
  if (actual.size() != expected.size())
    return test.report(name, ch::cat(actual.size(), " integers, expected ", expected.size()));
  std::size_t differ = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) differ += actual[i] != expected[i] ? 1 : 0;
  if (differ > 0) test.report(name, ch::cat(differ, " of ", expected.size(), " integers differ"));
}

template <int Rank>
ch::Quantized<Rank> levels_in(const Case& test, const std::string& name, const char* prefix) {
  const auto& from = test.file(name);
  Shape<Rank> shape{};  // rows of any rank are a matrix
  shape.fill(1);
  const std::size_t axes = std::max<std::size_t>(from.shape.size(), Rank);
  ch::check<ch::ShapeError>(Rank == 2 || from.shape.size() == Rank, "expected ", name, " of rank ", Rank);
  for (std::size_t i = 0; i < from.shape.size(); ++i) {
    const std::size_t at = i + axes - from.shape.size() + Rank;
    shape[at < axes ? 0 : at - axes] *= from.shape[i];
  }
  return {ch::Tensor<std::uint8_t, Rank>::from(from.u8(), shape), test.attr<float>(ch::cat(prefix, "_scale").c_str()),
          test.attr<std::int32_t>(ch::cat(prefix, "_zero_point").c_str())};
}

inline ch::Tensor<float, 1> floats_in(const Case& test, const std::string& name) {
  const auto& numbers = test.file(name).f32();
  return ch::Tensor<float, 1>::from(numbers, {static_cast<Index>(numbers.size())});
}

/// Integers of 8 bits, which a case holds as I64.
inline std::vector<std::int8_t> int8_in(const Case& test, const std::string& name) {
  std::vector<std::int8_t> out;
  for (const std::int64_t number : test.file(name).i64()) out.push_back(static_cast<std::int8_t>(number));
  return out;
}

/// `call(Way, x, weight, bias, y)` by each way of computing that this program has, and the numbers they stand for.
template <int Rank, class Call>
void quantized_product(Case& test, const Call& call) {
  const auto x = levels_in<Rank>(test, "in.x", "x");
  const auto& shape = test.file("in.weight").shape;
  const ch::QuantizedWeight<Rank> weight{
      ch::Tensor<std::int8_t, Rank>::from(int8_in(test, "in.weight"), as_shape<Rank>("in.weight", shape)),
      floats_in(test, "in.weight_scale")};
  const ch::QuantizedOutput y{test.attr<float>("y_scale"), test.attr<std::int32_t>("y_zero_point"),
                              test.attr("relu", false)};
  const auto by = [&](auto way) {
    const auto out = call(way, x, weight, floats_in(test, "in.bias"), y);
    compare_levels(test, "out.q", out.values.to_vector());
    test.compare_numbers("out.y", ch::dequantize(out).to_vector());
  };
  by(ch::kernels::int8::Best{});
#if defined(__AVX2__)
  by(ch::kernels::int8::Widened{});
#endif
  by(ch::kernels::int8::Plain{});
}

/// The integers that a model of train.QatConvBnReLU's form gives for the case's images, layer by layer.
inline void compare_integers_of(Case& test, const ch::nn::int8::Program& program) {
  const auto& images = test.file("in.eval_images");
  const auto batch = ch::Tensor<float, 4>::from(images.f32(), as_shape<4>("in.eval_images", images.shape));
  const auto logits = program.watch(batch, [&](const ch::nn::int8::Seen& seen) {
    const std::string name = seen.name == "input" ? "int8.x" : ch::cat("int8.", seen.name, ".q");
    if (!test.has(name)) return;
    std::vector<std::uint8_t> numbers(static_cast<std::size_t>(seen.images.pixels() * seen.images.channels));
    ch::kernels::int8::for_channels_first(seen.images, numbers.data(), [](std::uint8_t q) { return q; });
    compare_levels(test, name, numbers);
  });
  test.compare_numbers("out.int8_logits", logits.to_vector());
}

/// The integers of a converted model, given its integer weights: `int8.*` of train.QatConvBnReLU.
inline void compare_int8_network(Case& test) {
  using ch::nn::int8::Kind;
  using ch::nn::int8::Step;
  const auto level = [&](const std::string& name) {
    return ch::nn::int8::Levels{test.file(name + ".scale").f32()[0],
                                static_cast<std::int32_t>(test.file(name + ".zero_point").i64()[0]),
                                {0, test.attrs()["activation"][1].get<std::int32_t>()}};
  };
  const auto layer = [&](const char* name, Kind kind, Index input, Index stride) {
    const std::string at = ch::cat("int8.", name);
    Step step;
    step.kind = kind;
    step.name = name;
    step.inputs = {input};
    step.levels = level(at);
    step.relu = kind == Kind::conv2d;
    step.stride = {stride, stride};
    if (kind == Kind::conv2d) step.padding = {1, 1};
    auto shape = test.file(at + ".weight").shape;
    shape.resize(4, 1);
    std::copy_n(shape.begin(), 4, step.weight_shape.begin());
    step.weight = int8_in(test, at + ".weight");
    step.weight_scale = test.file(at + ".weight_scale").f32();
    step.bias = test.file(at + ".bias").f32();
    return step;
  };
  // The last scale of each step is the one of evaluation.
  const ch::nn::int8::Levels input{test.file("out.scale.quant").f32().back(),
                                   static_cast<std::int32_t>(test.file("out.zero_point.quant").i64().back()),
                                   {0, test.attrs()["activation"][1].get<std::int32_t>()}};
  Step flat;
  flat.kind = Kind::flatten;
  flat.name = "flatten";
  flat.inputs = {2};
  const ch::nn::int8::Program program(input, {layer("conv1", Kind::conv2d, 0, 1), layer("conv2", Kind::conv2d, 1, 2),
                                              flat, layer("fc", Kind::linear, 3, 1)});
  compare_integers_of(test, program);
}

}  // namespace golden
