#pragma once
/// Base of the policies of several processes that each have the whole model.

#include <chorus/parallel/policy_of_ranks.hpp>
#include <utility>

namespace chorus {

/// Base of DistributedDataParallel, LocalSgd and ParameterServer. `Base`: what a policy has beside its model.
template <class Model, class Communicator,
          class Base = PolicyOfRanks<typename nn::detail::DeviceOfModel<Model>::type, Communicator>>
class DistributedPolicy : public Policy<Model, Base> {
 protected:
  using Policy<Model, Base>::Policy;

  /// The model's output for the inputs.
  template <class... Inputs>
  auto call_model(const Inputs&... inputs) {
    return this->model_.forward(this->on_model_device(inputs)...);
  }
};

}  // namespace chorus
