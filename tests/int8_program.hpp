#pragma once
/// A small quantised model that has a step of each kind, for tests of what models become.

#include <chorus/quantization/int8/program.hpp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace test {

using chorus::nn::int8::Kind;
using chorus::nn::int8::Levels;
using chorus::nn::int8::Program;
using chorus::nn::int8::Step;

inline Step step(Kind kind, std::string name, std::vector<chorus::Index> inputs, Levels levels) {
  Step out;
  out.kind = kind;
  out.name = std::move(name);
  out.inputs = std::move(inputs);
  out.levels = levels;
  return out;
}

inline Step product(Kind kind, std::string name, chorus::Index input, Levels levels,
                    const std::array<chorus::Index, 4>& shape, bool bias = true) {
  Step out = step(kind, std::move(name), {input}, levels);
  out.weight_shape = shape;
  const auto count = shape[0] * shape[1] * shape[2] * shape[3];
  std::uint32_t state = static_cast<std::uint32_t>(count);
  for (chorus::Index i = 0; i < count; ++i) {
    state = state * 1664525 + 1013904223;
    out.weight.push_back(static_cast<std::int8_t>(static_cast<int>(state >> 16) % 255 - 127));
  }
  for (chorus::Index o = 0; o < shape[0]; ++o) {
    out.weight_scale.push_back(0.001f + 0.0003f * static_cast<float>(o));
    if (bias) out.bias.push_back(0.1f * static_cast<float>(o) - 0.3f);
  }
  return out;
}

/// [batch, 3, height, width] with height and width of 9 -> [batch, 10].
inline std::vector<Step> steps_of_each_kind() {
  auto conv1 = product(Kind::conv2d, "conv1", 0, {0.02f, 3, {}}, {8, 3, 3, 3});
  conv1.relu = true;
  conv1.padding = {1, 1};
  auto pool = step(Kind::max_pool2d, "pool", {1}, {});
  pool.window = pool.stride = {2, 2};
  auto depthwise = product(Kind::conv2d, "block.depthwise", 2, {0.03f, 130, {}}, {8, 1, 3, 3}, false);
  depthwise.groups = 8;
  depthwise.padding = {1, 1};
  auto sum = step(Kind::add, "block.add", {3, 2}, {0.04f, 60, {}});
  auto relu = step(Kind::relu, "relu", {4}, {0.025f, 0, {0, 200}});
  auto mean = step(Kind::avg_pool2d, "avg", {5}, {0.02f, 10, {}});
  mean.window = {2, 2};
  mean.stride = {1, 2};
  mean.padding = {1, 0};
  mean.count_include_pad = false;
  auto flat = step(Kind::flatten, "flatten", {6}, {});
  auto fc1 = product(Kind::linear, "fc1", 7, {0.05f, 20, {}}, {6, 80, 1, 1});
  fc1.relu = true;
  auto fc2 = product(Kind::linear, "fc2", 8, {0.03f, 90, {}}, {10, 6, 1, 1});
  return {conv1, pool, depthwise, sum, relu, mean, flat, fc1, fc2};
}

inline chorus::Tensor<float, 4> some_images(chorus::Index batch) {
  auto out = chorus::Tensor<float, 4>::empty({batch, 3, 9, 9});
  for (chorus::Index i = 0; i < out.numel(); ++i)
    out.data()[i] = static_cast<float>((i * 7919 + i / 243) % 1000) / 400 - 1.2f;
  return out;
}

}  // namespace test
