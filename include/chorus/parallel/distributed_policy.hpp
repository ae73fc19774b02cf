#pragma once
/// Base of the policies of several processes that each have the whole model.

#include <chorus/parallel/policy_of_ranks.hpp>
#include <cstdint>
#include <string_view>
#include <utility>

namespace chorus {

/// Base of DistributedDataParallel, LocalSgd and ParameterServer. `Base`: the policy's part without the model.
template <class Model, class Communicator,
          class Base = PolicyOfRanks<typename nn::detail::DeviceOfModel<Model>::type, Communicator>>
class DistributedPolicy : public Policy<Model, Base> {
 protected:
  using Policy<Model, Base>::Policy;
  /// `title`: the policy's name in messages. `dim`: the axis of the samples.
  DistributedPolicy(std::string_view title, Model model, Communicator& communicator, int dim, std::uint64_t seed)
      : Policy<Model, Base>(std::move(model), title, communicator, dim, seed) {}

  /// Returns the model's output for the inputs.
  template <class... Inputs>
  auto call_model(const Inputs&... inputs) {
    return this->model_.forward(this->on_model_device(inputs)...);
  }
  /// A forward pass of the model: see PolicyOfRanks::run_forward. `forward_recorded` records gradients; `forward_aside`
  /// is a pass of this rank alone.
  template <class... Inputs>
  auto forward(bool with_others, const Inputs&... inputs) {
    return this->run_forward(with_others, [&] { return call_model(inputs...); });
  }
  template <class... Inputs>
  auto forward_recorded(const Inputs&... inputs) {
    return this->run_recorded([&] { return call_model(inputs...); });
  }
  template <class... Inputs>
  auto forward_aside(const ddp::ForwardPass& pass, const Inputs&... inputs) {
    return this->run_without_grad(pass, [&] { return call_model(inputs...); });
  }
};

}  // namespace chorus
