#pragma once
/// Quantised models as safetensors files: I8 weights, F32 scales and biases, U8 zero points under the layers' paths,
/// and the steps as JSON in the metadata. A file is a whole model: running it needs none of the model's C++.

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/io/safetensors_reader.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <chorus/quantization/int8/program.hpp>

namespace chorus::io {

namespace detail {

/// The metadata key of the steps.
inline constexpr const char* int8_key = "chorus.int8";

/// A JSON field that must be an integer. Throws FileError.
inline Index whole_number(std::string_view who, const nlohmann::json& json, const char* field) {
  const auto found = json.find(field);
  check<FileError>(found != json.end() && found->is_number_integer(), who, ": the steps lack a whole number '", field,
                   "'");
  return found->get<Index>();
}
inline std::vector<Index> whole_numbers(std::string_view who, const nlohmann::json& json, const char* field) {
  const auto found = json.find(field);
  check<FileError>(found != json.end() && found->is_array() && found->size() <= nn::int8::most_inputs, who,
                   ": the steps lack a list of numbers '", field, "'");
  std::vector<Index> out;
  for (const auto& number : *found) {
    check<FileError>(number.is_number_integer(), who, ": '", field, "' of a step has a non-integer value");
    out.push_back(number.get<Index>());
  }
  return out;
}
inline std::array<Index, 2> two_numbers(std::string_view who, const nlohmann::json& json, const char* field) {
  const auto both = whole_numbers(who, json, field);
  check<FileError>(both.size() == 2, who, ": '", field, "' of a step has ", both.size(), " numbers, expected 2");
  return {both[0], both[1]};
}
inline bool truth(std::string_view who, const nlohmann::json& json, const char* field) {
  const auto found = json.find(field);
  check<FileError>(found != json.end() && found->is_boolean(), who, ": the steps lack '", field, "', true or false");
  return found->get<bool>();
}

/// The steps without their numbers.
inline std::string steps_json(const nn::int8::Program& program) {
  auto steps = nlohmann::json::array();
  for (const auto& step : program.steps()) {
    nlohmann::json one{{"kind", std::string(nn::int8::kind_names[static_cast<std::size_t>(step.kind)])},
                       {"name", step.name},
                       {"inputs", step.inputs}};
    if (!step.keeps_levels()) one["integers"] = {step.levels.integers.least, step.levels.integers.most};
    if (step.may_have_relu()) one["relu"] = step.relu;
    if (step.kind == nn::int8::Kind::conv2d) one["groups"] = step.groups;
    const bool pools = step.kind == nn::int8::Kind::max_pool2d || step.kind == nn::int8::Kind::avg_pool2d;
    if (pools) {
      one["window"] = step.window;
      one["ceil_mode"] = step.ceil_mode;
      one["count_include_pad"] = step.count_include_pad;
    }
    if (pools || step.kind == nn::int8::Kind::conv2d) {
      one["stride"] = step.stride;
      one["padding"] = step.padding;
      one["dilation"] = step.dilation;
    }
    steps.push_back(std::move(one));
  }
  const auto& integers = program.input().integers;
  return nlohmann::json{{"version", 1}, {"integers", {integers.least, integers.most}}, {"steps", std::move(steps)}}
      .dump();
}

/// The numbers of a tensor, which must have that dtype. Throws FileError.
template <class T>
std::vector<T> numbers_of(const SafetensorsReader& file, const std::string& name, std::vector<Index>* shape = nullptr) {
  const TensorEntry& entry = file.at(name);
  check<FileError>(entry.dtype == file_dtype(dtype<T>), "loading ", file.path(), ": tensor ", Quoted{name},
                   ": expected ", dtype<T>, ", got ", entry.dtype);
  std::vector<T> out(entry.bytes / sizeof(T));
  file.read(entry, std::as_writable_bytes(std::span(out)));
  if (shape != nullptr) *shape = entry.shape;
  return out;
}

inline nn::int8::Levels read_levels(std::string_view who, const SafetensorsReader& file, const std::string& name,
                                    const nlohmann::json& json) {
  const auto scale = numbers_of<float>(file, name + ".scale");
  const auto zero_point = numbers_of<std::uint8_t>(file, name + ".zero_point");
  check<FileError>(scale.size() == 1 && zero_point.size() == 1, "loading ", file.path(), ": ", Quoted{name},
                   " has ", scale.size(), " scales and ", zero_point.size(), " zero points, expected one of each");
  const auto [least, most] = two_numbers(who, json, "integers");
  check<FileError>(0 <= least && least < most && most <= 255, who, ": ", Quoted{name}, " has integers from ", least,
                   " to ", most, ", expected 8-bit integers");
  const nn::int8::Levels levels{
      scale[0], zero_point[0], {static_cast<std::int32_t>(least), static_cast<std::int32_t>(most)}};
  nn::int8::check_levels<FileError>(who, name, levels);
  return levels;
}

inline nn::int8::Step read_step(std::string_view who, const SafetensorsReader& file, const nlohmann::json& json) {
  using nn::int8::Kind;
  nn::int8::Step step;
  const auto text = [&](const char* field) {
    const auto found = json.find(field);
    check<FileError>(found != json.end() && found->is_string(), who, ": the steps lack a text '", field, "'");
    return found->get<std::string>();
  };
  const auto kind = text("kind");
  const auto found = std::find(nn::int8::kind_names.begin(), nn::int8::kind_names.end(), kind);
  check<FileError>(found != nn::int8::kind_names.end(), who, ": unknown step ", Quoted{kind});
  step.kind = static_cast<Kind>(found - nn::int8::kind_names.begin());
  step.name = text("name");
  step.inputs = whole_numbers(who, json, "inputs");
  if (step.may_have_relu()) step.relu = truth(who, json, "relu");
  const bool pools = step.kind == Kind::max_pool2d || step.kind == Kind::avg_pool2d;
  if (pools) {
    step.window = two_numbers(who, json, "window");
    step.ceil_mode = truth(who, json, "ceil_mode");
    step.count_include_pad = truth(who, json, "count_include_pad");
  }
  if (pools || step.kind == Kind::conv2d) {
    step.stride = two_numbers(who, json, "stride");
    step.padding = two_numbers(who, json, "padding");
    step.dilation = two_numbers(who, json, "dilation");
  }
  if (step.kind == Kind::conv2d) step.groups = whole_number(who, json, "groups");
  if (!step.keeps_levels()) step.levels = read_levels(who, file, step.name, json);
  if (step.has_weight()) {
    std::vector<Index> shape;
    step.weight = numbers_of<std::int8_t>(file, step.name + ".weight", &shape);
    if (step.kind == Kind::linear) shape.resize(4, 1);
    check<FileError>(shape.size() == 4, who, ": the weight of ", Quoted{step.name}, " has ", shape.size(), " axes");
    std::copy_n(shape.begin(), 4, step.weight_shape.begin());
    step.weight_scale = numbers_of<float>(file, step.name + ".weight_scale");
    if (file.find(step.name + ".bias") != nullptr) step.bias = numbers_of<float>(file, step.name + ".bias");
  }
  return step;
}

}  // namespace detail

/// Writes a quantised model, atomically. Throws FileError.
template <std::derived_from<nn::int8::Program> Program>
void save(const Program& program, const std::string& path, Metadata metadata = {}) {
  check<UsageError>(!program.steps().empty(), "saving ", path, ": a quantized model without steps");
  metadata[detail::int8_key] = detail::steps_json(program);
  std::vector<TensorView> tensors;
  std::list<std::vector<Index>> shapes;  // a list, for stable addresses
  std::list<std::uint8_t> zero_points;
  const auto add = [&]<class T>(const std::string& name, std::vector<Index> shape, std::span<const T> numbers) {
    shapes.push_back(std::move(shape));
    tensors.push_back({name, file_dtype(dtype<T>), shapes.back(), std::as_bytes(numbers)});
  };
  const auto add_levels = [&](const std::string& name, const nn::int8::Levels& levels) {
    zero_points.push_back(static_cast<std::uint8_t>(levels.zero_point));
    add(name + ".scale", {}, std::span(&levels.scale, 1));
    add(name + ".zero_point", {}, std::span<const std::uint8_t>(&zero_points.back(), 1));
  };
  add_levels("input", program.input());
  for (const auto& step : program.steps()) {
    if (!step.keeps_levels()) add_levels(step.name, step.levels);
    if (!step.has_weight()) continue;
    const auto& shape = step.weight_shape;
    add(step.name + ".weight",
        std::vector<Index>(shape.begin(), step.kind == nn::int8::Kind::linear ? shape.begin() + 2 : shape.end()),
        std::span(step.weight));
    add(step.name + ".weight_scale", {shape[0]}, std::span(step.weight_scale));
    if (!step.bias.empty()) add(step.name + ".bias", {shape[0]}, std::span(step.bias));
  }
  write_safetensors(path, tensors, metadata);
}
template <std::derived_from<nn::int8::Program> Program>
void save(Program& program, const std::string& path, const Metadata& metadata = {}) {
  save(std::as_const(program), path, metadata);
}

/// Reads a file written by `save`. Throws FileError if it holds no quantised model, or one that can't be run.
inline nn::int8::Program load_quantized(const std::string& path) {
  const SafetensorsReader file(path);
  const std::string who = cat("loading ", path);
  const auto text = file.metadata().find(detail::int8_key);
  check<FileError>(text != file.metadata().end(), who, ": expected a quantized model, but the metadata lack '",
                   detail::int8_key, "'");
  const auto json = nlohmann::json::parse(text->second, nullptr, /*allow_exceptions=*/false);
  check<FileError>(json.is_object() && json.contains("steps") && json["steps"].is_array(), who, ": '", detail::int8_key,
                   "' of the metadata is not a list of steps");
  const Index version = detail::whole_number(who, json, "version");
  check<FileError>(version == 1, who, ": the quantized model has version ", version, ", expected 1");
  std::vector<nn::int8::Step> steps;
  for (const auto& one : json["steps"]) {
    check<FileError>(one.is_object(), who, ": '", detail::int8_key, "' has a step that is not an object");
    steps.push_back(detail::read_step(who, file, one));
    nn::int8::check_step<FileError>(who, steps.back(), static_cast<Index>(steps.size()) - 1);
  }
  check<FileError>(!steps.empty(), who, ": a quantized model without steps");
  return {detail::read_levels(who, file, "input", json), std::move(steps)};
}

}  // namespace chorus::io
