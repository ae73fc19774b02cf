#pragma once
/// A table of a model's layers and their parameters.

#include <algorithm>
#include <string>
#include <vector>

#include <chorus/nn/module.hpp>

namespace chorus::nn {

/// One line a module: its path, what it is, its own parameters; then the sums.
template <class Model>
std::string summary(Model& model) {
  using D = typename Model::device_type;
  struct Row {
    std::string path, layer;
    Index parameters;
  };
  struct Rows final : detail::Walker {
    std::vector<Row> rows;
    void enter(Module& module) override {
      rows.push_back({prefix().substr(0, prefix().size() - 1), module.describe(), 0});
    }
    void inner(Module&) override {}  // `describe` has said so
    void parameter(std::string_view, AnyParameter& handle) override {
      const std::string own = prefix().empty() ? "" : prefix().substr(0, prefix().size() - 1);
      for (Row& row : rows)
        if (row.path == own) row.parameters += handle.on<D>().count();
    }
  } table;
  table.rows.push_back({"", model.describe(), 0});
  table.walk(model);

  Index all = 0, trainable = 0;
  std::size_t bytes = 0;
  for (const auto& named : named_parameters<D>(model)) {
    all += named.parameter->count();
    bytes += named.parameter->size_bytes();
    if (named.parameter->wants_grad()) trainable += named.parameter->count();
  }

  std::size_t path_width = 6, layer_width = 5;
  for (const Row& row : table.rows) {
    path_width = std::max(path_width, row.path.size());
    layer_width = std::max(layer_width, row.layer.size());
  }
  const auto padded = [](std::string text, std::size_t width) {
    text.resize(std::max(width, text.size()), ' ');
    return text;
  };
  std::string out = padded("module", path_width) + "  " + padded("layer", layer_width) + "  parameters\n";
  for (const Row& row : table.rows)
    out += padded(row.path, path_width) + "  " + padded(row.layer, layer_width) + "  " +
           (row.parameters == 0 ? "-" : cat(row.parameters)) + "\n";
  return out + cat(all, " parameters, ", trainable, " trainable, ", bytes / 1024, " KiB\n");
}

}  // namespace chorus::nn
