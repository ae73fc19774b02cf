#pragma once
/// Communication hooks that average parameters, or act around the optimizer's step (PostLocalSgd).

#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/hook.hpp>
#include <string>

namespace chorus::ddp {

template <Device D, class Hook, class Communicator>
class ParameterAveraging final : public Extension<D> {
  using Traits = HookTraits<Hook, D, Communicator>;

 public:
  ParameterAveraging(Core<D, Communicator>& core, Hook& hook) : core_(core), hook_(hook) {}

  void ready_for_forward() override {
    if constexpr (Traits::averages_parameters)
      if (core_.contribution == Contribution::samples)
        hook_.before_forward(core_.flat, core_.ranks,
                             [this](const std::string& name) { return !core_.options.ignores(name); });
  }
  void averaged() override {
    if constexpr (Traits::acts_after_backward) hook_.after_backward();
  }

 private:
  Core<D, Communicator>& core_;
  Hook& hook_;
};

}  // namespace chorus::ddp
