#pragma once
/// A distributed policy's rank on a GPU, and its communicators: NCCL's, or without NCCL through the host's memory.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/core/cuda/runtime.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chrono>
#include <optional>
#include <utility>

#if CHORUS_USE_NCCL
#include <chorus/comm/nccl.hpp>
#else
#include <chorus/comm/staged.hpp>
#endif

namespace chorus::detail {

template <Device D>
class RankDevice;

/// GPU: the one that the run names, or the one with the rank's number on its machine, and NCCL. Ranks with the same GPU
/// share it (see comm::settle_gpus), which is for tests. In a program without NCCL, numbers go through the host's
/// memory.
template <>
class RankDevice<Cuda> {
 public:
  template <class Run>
  explicit RankDevice(Run& run) {
    cuda::require(Cuda{0});
    device_ = Cuda{run.own_device().value_or(run.local_rank() % cuda::device_count())};
    over(run.communicator(), device_, run.world().timeout, communicator_);
  }
  template <class Model>
  Model place(Model model) const {
    return moved_to(std::move(model), device_);
  }
  comm::AnyCommunicator& communicator() { return *communicator_; }

  /// Puts a communicator over `host` for the memory of `device` into `made`.
  static comm::AnyCommunicator& over(comm::AnyCommunicator& host, [[maybe_unused]] Cuda device,
                                     [[maybe_unused]] std::chrono::milliseconds timeout,
                                     std::optional<comm::AnyCommunicator>& made) {
#if CHORUS_USE_NCCL
    comm::settle_gpus(host, device.index);
    return made.emplace(comm::NcclCommunicator<>(host, device.index, timeout));
#else
    return made.emplace(comm::StagedCommunicator(host));
#endif
  }

 private:
  Cuda device_;
  std::optional<comm::AnyCommunicator> communicator_;
};

}  // namespace chorus::detail
