#pragma once
/// Modules whose parameters are inputs of a golden case.

#include <algorithm>
#include <chorus/nn/module.hpp>

#include "case.hpp"

namespace golden {

/// Fills the module's parameters from the inputs of their names; gradients of all that the case has are compared.
inline void load_parameters(Case& test, ch::nn::Module& module) {
  for (const auto& named : ch::nn::named_parameters<Device>(module)) {
    const auto& values = test.file("in." + named.name).f32();
    const auto count = static_cast<std::size_t>(named.parameter->count());
    ch::check<ch::ShapeError>(values.size() == count, named.name, ": ", values.size(), " numbers");
    ch::copy_bytes(Device{}, named.parameter->value_data(), ch::Cpu{}, values.data(), count * sizeof(float));
    const auto grad = "grad." + named.name;
    if (!test.has(grad)) continue;
    test.expect_gradient(grad, [handle = named.handle, parameter = named.parameter, count] {
      if (!parameter->grad_arrived()) return std::vector<float>();
      std::vector<float> numbers(count);
      ch::copy_bytes(ch::Cpu{}, numbers.data(), Device{}, parameter->grad_data(), count * sizeof(float));
      return numbers;
    });
  }
}

}  // namespace golden
