#pragma once
/// Averaging parameters instead of gradients.

#include <chorus/comm/communicator.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <span>

namespace chorus::inline CHORUS_ABI::detail {

/// Replaces all parameters by sum(weight * parameters) over the ranks; the weights add up to 1. Each of n ranks sends
/// 2 (n - 1) / n of their bytes.
template <Device D, class Communicator>
void average_parameters(const nn::FlatParameters<D>& flat, Communicator& communicator, double weight) {
  if (communicator.size() == 1) return;
  const comm::CollectiveOptions options{.scale = weight, .traffic = trace::Traffic::parameters};
  for (const auto& group : flat.groups()) {
    const auto average = [&]<class T>(T* values) {
      communicator.all_reduce(std::span<T>(values, group.count), comm::ReduceOp::sum, options);
    };
    if (group.dtype == DType::f32)
      average(reinterpret_cast<float*>(group.value(0)));
    else
      average(reinterpret_cast<double*>(group.value(0)));
  }
  for (const auto& entry : flat.entries()) entry.parameter().touch();
}

}  // namespace chorus::inline CHORUS_ABI::detail
