#pragma once
/// The device of a distributed policy's rank, and its communicator.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/nn/copy_of.hpp>
#include <optional>
#include <utility>

#if CHORUS_USE_NCCL
#include <chorus/comm/nccl.hpp>
#elif CHORUS_USE_CUDA
#include <chorus/comm/staged.hpp>
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

#if CHORUS_USE_CUDA
/// GPU: the one that the run names, or the one with the rank's number on its machine, and NCCL. Ranks with the same GPU
/// share it (see comm::settle_gpus), which is for tests. In a program without NCCL, gradients go through the host's
/// memory.
template <>
class RankDevice<Cuda> {
 public:
  template <class Run>
  explicit RankDevice(Run& run) {
    cuda::require(Cuda{0});
    device_ = Cuda{run.own_device().value_or(run.local_rank() % cuda::device_count())};
#if CHORUS_USE_NCCL
    comm::settle_gpus(run.communicator(), device_.index);
    communicator_.emplace(comm::NcclCommunicator<>(run.communicator(), device_.index, run.world().timeout));
#else
    communicator_.emplace(comm::StagedCommunicator(run.communicator()));
#endif
  }
  template <class Model>
  Model place(Model model) const {
    return moved_to(std::move(model), device_);
  }
  comm::AnyCommunicator& communicator() { return *communicator_; }

 private:
  Cuda device_;
  std::optional<comm::AnyCommunicator> communicator_;
};
#endif

}  // namespace chorus::detail
