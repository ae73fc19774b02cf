#pragma once
/// Builds and prints the table of a model's layers.

#include <algorithm>
#include <array>
#include <chorus/core/layer_watch.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/nn/summary.hpp>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::nn::detail {

template <Device D>
SummaryTable<D>::SummaryTable(Module& model) {
  rows_.push_back({.path = "", .layer = model.describe(), .module = &model});
  walk(model);
}

template <Device D>
void SummaryTable<D>::begins(const void* layer) {
  const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& r) { return r.module == layer; });
  // A layer that calls itself with more arguments counts once. An unlisted layer belongs to its caller.
  const bool counts = row != rows_.end() && (under_way_.empty() || under_way_.back().row != &*row);
  under_way_.push_back({row != rows_.end() ? &*row : (under_way_.empty() ? nullptr : under_way_.back().row), counts});
  if (!counts) return;
  if (row->place == uncalled) row->place = next_place_++;
  ++row->calls;
}

template <Device D>
void SummaryTable<D>::ended(const std::string& output) {
  if (under_way_.back().counts) under_way_.back().row->output = output;
  under_way_.pop_back();
}

template <Device D>
void SummaryTable<D>::multiply_adds(std::int64_t count) {
  if (!under_way_.empty() && under_way_.back().row != nullptr) under_way_.back().row->multiply_adds += count;
}

template <Device D>
std::int64_t SummaryTable<D>::all_multiply_adds() const {
  std::int64_t sum = 0;
  for (const Row& row : rows_) sum += row.multiply_adds;
  return sum;
}

template <Device D>
std::string SummaryTable<D>::text(bool called) {
  if (called) sort_by_calls();
  std::set<const Node*> above;
  std::vector<std::vector<std::string>> lines{{"module", "layer", "output", "parameters", "multiply-adds"}};
  for (const Row& row : rows_) {
    Index parameters = 0;
    bool shared = true;
    for (const AnyParameter& parameter : row.parameters) {
      parameters += numel(parameter.on<D>().extents());
      shared = !above.insert(parameter.shared().get()).second && shared;
    }
    const std::string own = parameters == 0 ? "-" : cat(parameters);
    lines.push_back({row.path, row.calls > 1 ? cat(row.layer, ", ", row.calls, " calls") : row.layer, row.output,
                     parameters > 0 && shared ? cat("(", own, ")") : own,
                     row.multiply_adds == 0 ? "-" : cat(row.multiply_adds)});
  }
  std::vector<std::size_t> columns{0, 1, 3};
  if (called) columns = {0, 1, 2, 3, 4};
  std::array<std::size_t, 5> widths{};
  for (const auto& line : lines)
    for (const auto c : columns) widths[c] = std::max(widths[c], line[c].size());
  std::string out;
  for (const auto& line : lines) {
    for (const auto c : columns) {
      out += line[c];
      if (c != columns.back()) out.append(widths[c] - line[c].size() + 2, ' ');
    }
    out += '\n';
  }
  return out;
}

template <Device D>
void SummaryTable<D>::enter(Module& module) {
  rows_.push_back({.path = own_path(), .layer = module.describe(), .module = &module});
}

template <Device D>
void SummaryTable<D>::parameter(std::string_view, AnyParameter& handle) {
  for (Row& row : rows_)
    if (row.path == own_path()) row.parameters.push_back(handle);
}

template <Device D>
void SummaryTable<D>::sort_by_calls() {
  for (Row& row : rows_)
    if (row.place == uncalled)
      for (const Row& other : rows_)
        if (other.calls > 0 && other.path.starts_with(row.path + ".")) row.place = std::min(row.place, other.place);
  std::stable_sort(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) { return a.place < b.place; });
}

}  // namespace chorus::nn::detail
