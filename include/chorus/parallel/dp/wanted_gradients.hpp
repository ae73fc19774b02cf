#pragma once
/// An extension of step 5 for `grad`: it takes the gradients of some parameters, and leaves all others as they are.

#include <chorus/parallel/dp/reduce.hpp>
#include <cstddef>

namespace chorus::dp {

/// Runs `backward` on all devices while the copies skip the parameters that the model skips, and adds what comes of it
/// to where `grad` collects.
template <class Model, class Backward>
void reduce_wanted(const Replicas<Model>& replicas, std::size_t used, const Backward& backward) {
  const auto skip = [&](bool on) {
    for_each_copy(replicas, used, [on](std::size_t, const auto& entry, const auto& copy) {
      copy.named.handle.shared()->set_skipped(on && entry.named.handle.shared()->skipped());
    });
  };
  skip(true);
  try {
    backward();
  } catch (...) {
    skip(false);
    throw;
  }
  skip(false);
  for_each_copy(replicas, used, [&](std::size_t i, const auto& entry, const auto& copy) {
    auto& parameter = copy.parameter();
    if (!parameter.grad_arrived()) return;
    trace::sent(replicas.device(i).index, trace::Traffic::gradients, parameter.size_bytes());
    entry.parameter().add_grad_of(parameter);
    parameter.set_grad_arrived(false);
  });
}

}  // namespace chorus::dp
