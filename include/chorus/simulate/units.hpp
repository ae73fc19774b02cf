#pragma once
/// The units of FullyShardedDataParallel in a simulation: how large they are, and how long they compute.

#include <chorus/simulate/models.hpp>
#include <cstddef>
#include <vector>

namespace chorus::simulated {

/// Parameters that are gathered together, and how long forward and backward compute with them, in seconds.
struct UnitTime {
  std::size_t bytes = 0;
  double forward = 0, backward = 0;
};

/// The units that ByBytes cuts, in the order of the layers; passes take the times by their operations.
[[gnu::cold]] inline std::vector<UnitTime> unit_times(const ModelSizes& model, double most_mib, double forward,
                                                      double backward) {
  const auto& parameters = model.parameters;
  const auto most = most_mib * 1024 * 1024;
  double operations = 0;
  for (const auto& parameter : parameters) operations += parameter.operations;
  std::vector<UnitTime> units;  // the last one first, as the policy cuts them
  for (std::size_t end = parameters.size(); end > 0;) {
    std::size_t begin = end - 1;
    while (begin > 0 && !parameters[begin].begins_layer) --begin;
    UnitTime layer;
    double of_layer = 0;
    for (std::size_t i = begin; i < end; ++i) {
      layer.bytes += parameters[i].count * sizeof(float);
      of_layer += parameters[i].operations;
    }
    const double part = operations > 0 ? of_layer / operations
                                       : static_cast<double>(end - begin) / static_cast<double>(parameters.size());
    if (units.empty() || static_cast<double>(units.back().bytes + layer.bytes) > most) units.emplace_back();
    auto& unit = units.back();
    unit.bytes += layer.bytes;
    unit.forward += forward * part;
    unit.backward += backward * part;
    end = begin;
  }
  return {units.rbegin(), units.rend()};
}

}  // namespace chorus::simulated
