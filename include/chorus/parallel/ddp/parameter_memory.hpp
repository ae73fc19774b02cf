#pragma once
/// A communication hook's state per parameter, as checkpoints, scalers and other extensions see it.

#include <chorus/optim/state_tensor.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <string>
#include <vector>

namespace chorus::ddp {

/// HookMemory implements it.
template <Device D>
class ParameterMemory : public Extension<D> {
 public:
  /// Drops the state of a parameter that is in no bucket and never will be again.
  virtual void forget(const std::string& parameter) = 0;
  /// The whole state, under names such as `rest.conv1.weight`: the same names on all ranks, each rank's own values.
  /// `full`: also creates missing state.
  virtual std::vector<optim::StateTensor> state(bool full) = 0;
  /// Replaces the state by copies of `tensors`, such as those from `state`. Tensors of a kind that the hook doesn't
  /// keep are ignored.
  virtual void replace(const std::vector<optim::StateTensor>& tensors) = 0;
  /// Multiplies the residual that has not been sent yet.
  virtual void scale_rest(double factor) = 0;
};

}  // namespace chorus::ddp
