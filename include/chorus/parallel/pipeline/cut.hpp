#pragma once
/// How a pipeline cuts its model.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <span>
#include <utility>
#include <variant>
#include <vector>

namespace chorus {

/// Cuts into stages with nearly equal bytes of parameters.
struct EqualBytes {};

/// Cuts before these layers, counted from 0 in the order of CHORUS_PIPELINE, each module of a ModuleList as one: `At{3,
/// 7}`.
struct At {
  std::vector<int> layers;
  At(std::initializer_list<int> before) : layers(before) {}
  explicit At(std::vector<int> before) : layers(std::move(before)) {}
};

/// Cuts into stages with nearly equal times, from each layer's seconds: `ByTime{layer_times(model, x)}`, see
/// pipeline/layer_times.hpp. Rank 0's times are used.
struct ByTime {
  std::vector<double> seconds;
};

using PipelineCut = std::variant<EqualBytes, At, ByTime>;

namespace pipeline {

/// Cuts `costs` into `stages` nonempty runs whose largest sum is minimal. Returns the beginning of each, and the end.
[[gnu::cold]] inline std::vector<std::size_t> balanced(std::span<const double> costs, std::size_t stages) {
  const std::size_t n = costs.size();
  // worst[s][i]: the minimal largest sum of the first i costs in s runs; begin[s][i]: the last run's beginning.
  std::vector<std::vector<double>> worst(stages + 1,
                                         std::vector<double>(n + 1, std::numeric_limits<double>::infinity()));
  std::vector<std::vector<std::size_t>> begin(stages + 1, std::vector<std::size_t>(n + 1));
  worst[0][0] = 0;
  for (std::size_t s = 1; s <= stages; ++s)
    for (std::size_t i = s; i <= n; ++i) {
      double sum = 0;
      for (std::size_t b = i; b-- > s - 1;) {
        sum += costs[b];
        const double largest = std::max(worst[s - 1][b], sum);
        if (largest < worst[s][i]) worst[s][i] = largest, begin[s][i] = b;
      }
    }
  std::vector<std::size_t> out{n};
  for (std::size_t s = stages; s > 0; --s) out.push_back(begin[s][out.back()]);
  std::reverse(out.begin(), out.end());
  return out;
}

/// The beginning of each stage, and the end. `bytes`: of each layer's parameters. Throws UsageError for a cut that
/// doesn't fit the model.
[[gnu::cold]] inline std::vector<std::size_t> stage_begins(const PipelineCut& cut, std::span<const double> bytes,
                                                           std::size_t stages) {
  check<UsageError>(bytes.size() >= stages, "Pipeline: ", stages, " stages for a model of ", bytes.size(),
                    " layers in CHORUS_PIPELINE: expected no more stages than layers");
  if (const auto* const at = std::get_if<At>(&cut)) {
    check<UsageError>(at->layers.size() + 1 == stages, "Pipeline: At{", std::span(at->layers), "} makes ",
                      at->layers.size() + 1, " stages, expected ", stages);
    std::vector<std::size_t> out{0};
    for (const int layer : at->layers) {
      check<UsageError>(layer > static_cast<int>(out.back()) && layer < static_cast<int>(bytes.size()), "Pipeline: At{",
                        std::span(at->layers), "}: expected increasing layer numbers from 1 to ", bytes.size() - 1);
      out.push_back(static_cast<std::size_t>(layer));
    }
    out.push_back(bytes.size());
    return out;
  }
  if (const auto* const time = std::get_if<ByTime>(&cut)) {
    check<UsageError>(time->seconds.size() == bytes.size(), "Pipeline: ByTime has ", time->seconds.size(),
                      " times for ", bytes.size(), " layers: expected the result of layer_times(model, x)");
    return balanced(time->seconds, stages);
  }
  return balanced(bytes, stages);
}

}  // namespace pipeline

}  // namespace chorus
