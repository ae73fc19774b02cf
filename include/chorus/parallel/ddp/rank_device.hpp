#pragma once
/// The device of a distributed policy's rank, and its communicator.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/nn/copy_of.hpp>
#include <optional>
#include <utility>

#if CHORUS_USE_CUDA
#include <chorus/parallel/ddp/gpu_rank.hpp>
#endif

namespace chorus::detail {

/// CPU: the virtual device that the run names, or the model's device, and the run's own communicator.
template <Device D>
class RankDevice {
 public:
  template <class Run>
  explicit RankDevice(Run& run) : communicator_(&run.communicator()), named_(run.own_device()) {}
  template <class Model>
  Model place(Model model) const {
    return named_ ? moved_to(std::move(model), D{*named_}) : model;
  }
  comm::AnyCommunicator& communicator() const { return *communicator_; }

 private:
  comm::AnyCommunicator* communicator_;
  std::optional<int> named_;
};

}  // namespace chorus::detail
