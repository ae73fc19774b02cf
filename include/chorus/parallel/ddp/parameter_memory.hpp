#pragma once
/// What checkpoints, scalers and other extensions of DistributedDataParallel see of a hook's memory.

#include <chorus/optim/state_tensor.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <string>
#include <vector>

namespace chorus::ddp {

/// See HookMemory.
template <Device D>
class ParameterMemory : public Extension<D> {
 public:
  /// What is remembered of a parameter that is in no bucket, and never will be again.
  virtual void forget(const std::string& parameter) = 0;
  /// All of it, as `rest.conv1.weight`: the same names on all ranks, with each rank's own numbers. `full`: made where
  /// there is none so far.
  virtual std::vector<optim::StateTensor> state(bool full) = 0;
  /// Takes copies of `tensors`, such as those that `state` gives, instead of all that was there. What is unlike
  /// anything that the hook remembers is left out.
  virtual void replace(const std::vector<optim::StateTensor>& tensors) = 0;
  /// Multiplies what has not been sent yet.
  virtual void scale_rest(double factor) = 0;
};

}  // namespace chorus::ddp
