#pragma once
/// The options of `load`, and its report.

#include <chorus/core/dtype.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::io {

/// Turns a name in the file into the model's; an empty result skips the tensor.
using Rename = std::function<std::string(std::string_view)>;

/// Whether a file keeps a matrix transposed, by the model's name of it.
using Transposed = std::function<bool(std::string_view)>;

/// How a model is filled from a file.
struct LoadOptions {
  /// Whether the file must have exactly the model's tensors, with the same shapes. If false, `load` fills the tensors
  /// that fit, leaves the rest of the model unchanged, and reports the differences.
  bool strict = true;
  /// Called for each tensor of the file, before prefixes of PyTorch's wrappers are removed. See without_prefix,
  /// with_prefix and only_prefix.
  Rename rename = {};
  /// Called for each matrix of the model: whether the file keeps it transposed, as Keras, Flax and GPT-2's Conv1D do.
  Transposed transposed = {};
};

/// The differences of file and model. As text: `cat(report)`.
struct LoadReport {
  struct Mismatch {
    std::string name;  ///< the model's name
    DType expected{};
    std::vector<Index> expected_shape;
    FileDType got{};
    std::vector<Index> got_shape;
  };
  std::vector<std::string> missing;     ///< tensors of the model that are not in the file: unchanged
  std::vector<std::string> unexpected;  ///< tensors of the file, by their names there, that are not in the model
  std::vector<Mismatch> mismatched;     ///< tensors of other shapes, or integers for floating-point numbers: unchanged

  /// Whether the file had exactly the model's tensors.
  bool complete() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
};

/// "missing: a, b; unexpected: c; mismatched: d (expected F32 [2], got F32 [3])"; only the parts that exist.
inline void append(std::string& out, const LoadReport& report) {
  std::string_view before_list;
  const auto list = [&](std::string_view what, const auto& items, const auto& text_of) {
    if (items.empty()) return;
    out += cat(std::exchange(before_list, "; "), what, ": ");
    std::string_view before;
    for (const auto& item : items) out += cat(std::exchange(before, ", "), text_of(item));
  };
  const auto name = [](const std::string& text) { return printable(text); };
  list("missing", report.missing, name);
  list("unexpected", report.unexpected, name);
  list("mismatched", report.mismatched, [](const LoadReport::Mismatch& x) {
    return cat(printable(x.name), " (expected ", x.expected, " ", std::span<const Index>(x.expected_shape), ", got ",
               x.got, " ", std::span<const Index>(x.got_shape), ")");
  });
}

/// For LoadOptions: removes `prefix` from the names that begin with it. `without_prefix("model.")` turns
/// `model.fc1.weight` into `fc1.weight`.
inline Rename without_prefix(std::string prefix) {
  return [prefix = std::move(prefix)](std::string_view name) {
    return std::string(name.starts_with(prefix) ? name.substr(prefix.size()) : name);
  };
}

/// For LoadOptions: removes `prefix` and skips all tensors without it, to fill a part of a model from a file of the
/// whole: `load(net.module().encoder, path, {.rename = only_prefix("encoder.")})`.
inline Rename only_prefix(std::string prefix) {
  return [prefix = std::move(prefix)](std::string_view name) {
    return std::string(name.starts_with(prefix) ? name.substr(prefix.size()) : std::string_view());
  };
}

/// For LoadOptions: adds `prefix` to all names, so that a file of a part fills that part of a whole model.
inline Rename with_prefix(std::string prefix) {
  return [prefix = std::move(prefix)](std::string_view name) { return prefix + std::string(name); };
}

}  // namespace chorus::io
