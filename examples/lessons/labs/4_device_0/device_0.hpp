#pragma once
/// Lab 4: what the student's code is.

#include <chorus/chorus.hpp>

#include "../lab.hpp"

namespace device_0_lab {

inline constexpr const char* title = "Lab 4: what device 0 holds under DataParallel";

using Layer = ch::nn::Linear<ch::Cpu>;
using Inputs = ch::Tensor<float, 2>;          ///< [samples, features]
using Labels = ch::Tensor<std::int64_t, 1>;   ///< [samples]
using Loss = ch::Variable<float, 0>;
struct Code {
  /// The forward pass of a model that returns its loss; `fc` is its layer.
  std::function<Loss(const Layer& fc, const Inputs& inputs, const Labels& labels)> forward;
};
/// Measures the memory of both devices by kind, with the loss outside of the model and inside; judges the code.
void check(lab::Lab& lab, const Code& code);

}  // namespace device_0_lab
