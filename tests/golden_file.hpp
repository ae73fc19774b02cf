#pragma once
/// A golden case: what PyTorch computed for one operator, as a safetensors file whose metadata name the operator and
/// its attributes.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include <chorus/core/error.hpp>
#include <chorus/core/narrow_float.hpp>
#include <chorus/io/safetensors_reader.hpp>

namespace chorus_test {

struct GoldenTensor {
  std::vector<chorus::Index> shape;
  std::variant<std::vector<float>, std::vector<std::int64_t>, std::vector<std::uint8_t>>
      values;  ///< floats as F32, integers as I64, BOOL or U8

  const std::vector<float>& f32() const { return std::get<0>(values); }
  const std::vector<std::int64_t>& i64() const { return std::get<1>(values); }
  const std::vector<std::uint8_t>& u8() const { return std::get<2>(values); }
};

struct GoldenCase {
  std::string op;
  nlohmann::json attrs;
  std::map<std::string, GoldenTensor, std::less<>> tensors;  ///< "in.x", "out.y", "gout.y", "grad.x", ...

  bool has(std::string_view name) const { return tensors.find(name) != tensors.end(); }

  /// Throws FileError where the case has no such tensor.
  const GoldenTensor& operator[](std::string_view name) const {
    const auto found = tensors.find(name);
    chorus::check<chorus::FileError>(found != tensors.end(), "golden case ", op, ": no tensor ", name);
    return found->second;
  }

  /// The tensors called PREFIX.NAME, without the prefix: `group("in")`.
  std::map<std::string, const GoldenTensor*> group(std::string_view prefix) const {
    std::map<std::string, const GoldenTensor*> out;
    for (const auto& [name, tensor] : tensors) {
      if (name.size() > prefix.size() && name.starts_with(prefix) && name[prefix.size()] == '.') {
        out.emplace(name.substr(prefix.size() + 1), &tensor);
      }
    }
    return out;
  }
};

/// Throws FileError where the file is no golden case, or has a dtype of 8 bits and less other than BOOL, U8 and I8.
inline GoldenCase load_golden(const std::string& path) {
  const chorus::io::SafetensorsReader file(path);
  const auto note = [&](const char* key) {
    const auto found = file.metadata().find(key);
    chorus::check<chorus::FileError>(found != file.metadata().end(), path, ": not a golden case: no metadata key ",
                                     key);
    return found->second;
  };
  GoldenCase out;
  out.op = note("op");
  out.attrs = nlohmann::json::parse(note("attrs"), nullptr, /*allow_exceptions=*/false);
  chorus::check<chorus::FileError>(out.attrs.is_object(), path, ": not a golden case: attrs is not a JSON object");

  for (const chorus::io::TensorEntry& entry : file.entries()) {
    const auto load = [&]<class T>(std::vector<T> values) {
      values.resize(entry.bytes / sizeof(T));
      file.read(entry, std::as_writable_bytes(std::span(values)));
      out.tensors.emplace(entry.name, GoldenTensor{entry.shape, std::move(values)});
    };
    // Other types of floats and of integers as these.
    const auto load_as = [&]<class From, class To>(From, To) {
      std::vector<From> values(entry.bytes / sizeof(From));
      file.read(entry, std::as_writable_bytes(std::span(values)));
      std::vector<To> converted;
      for (const From value : values) converted.push_back(static_cast<To>(value));
      out.tensors.emplace(entry.name, GoldenTensor{entry.shape, std::move(converted)});
    };
    switch (entry.dtype) {
      case chorus::io::FileDType::f64:
        load_as(double{}, float{});
        break;
      case chorus::io::FileDType::bf16:
        load_as(chorus::bf16{}, float{});
        break;
      case chorus::io::FileDType::f16:
        load_as(chorus::half{}, float{});
        break;
      case chorus::io::FileDType::i32:
        load_as(std::int32_t{}, std::int64_t{});
        break;
      case chorus::io::FileDType::i16:
        load_as(std::int16_t{}, std::int64_t{});
        break;
      case chorus::io::FileDType::i8:
        load_as(std::int8_t{}, std::int64_t{});
        break;
      case chorus::io::FileDType::f32:
        load(std::vector<float>{});
        break;
      case chorus::io::FileDType::i64:
        load(std::vector<std::int64_t>{});
        break;
      case chorus::io::FileDType::boolean:
      case chorus::io::FileDType::u8:
        load(std::vector<std::uint8_t>{});
        break;
      default:
        chorus::fail<chorus::FileError>(path, ": tensor ", entry.name, ": no golden case has ", entry.dtype);
    }
  }
  return out;
}

}  // namespace chorus_test
