#pragma once
/// `NcclDeviceGroup`: NCCL as a DeviceGroup, over any table of NCCL's functions.

#include <chorus/comm/nccl/device_group.hpp>
#include <chorus/comm/nccl/nccl_queue.hpp>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm {

/// Each device has an NCCL communicator, its stream, and a thread that watches it. If one of them aborts, all others
/// abort within milliseconds.
template <class Api>
class NcclDeviceGroup final : public DeviceGroup {
 public:
  NcclDeviceGroup(std::span<const int> devices, std::chrono::milliseconds timeout, Api api = {})
      : api_(std::move(api)), devices_(devices.begin(), devices.end()), timeout_(timeout), queues_(devices.size()) {
    const int code = api_.unique_id(id_);
    check<CommError>(code == Api::success, "nccl: ncclGetUniqueId failed: ", api_.nccl_error(code, {}));
  }

  void join(int rank) override {
    auto& queue = queues_[static_cast<std::size_t>(rank)];
    queue = std::make_unique<NcclQueue<Api>>(
        api_, rank, devices_[static_cast<std::size_t>(rank)], timeout_,
        [this, rank](const Failure& failure) { give_up(rank, failure); }, [this] { return failure(); });
    queue->join(static_cast<int>(devices_.size()), id_);
  }

  void broadcast(int rank, std::span<const DevicePiece> pieces) override {
    each(rank, "broadcast", pieces, [](Api& api, const DevicePiece& piece, const auto& comm, const auto& stream) {
      return api.broadcast(piece.data, piece.data, piece.count * size_of(piece.dtype), 0, comm, stream);
    });
  }

  void reduce(int rank, std::span<const DevicePiece> pieces) override {
    each(rank, "reduce", pieces, [](Api& api, const DevicePiece& piece, const auto& comm, const auto& stream) {
      return api.reduce(piece.data, piece.data, piece.count, piece.dtype, api.reduce_op(ReduceOp::sum), 0, comm,
                        stream);
    });
  }

  void leave(int rank) noexcept override {
    if (auto& queue = queues_[static_cast<std::size_t>(rank)]) queue->stop();
  }

  void abort(int rank, std::string_view why) noexcept override { give_up(rank, {std::string(why)}); }
  int failed() override {
    const std::lock_guard lock(mutex_);
    return failed_;
  }

 private:
  // All pieces in one launch.
  template <class Issue>
  void each(int rank, const char* name, std::span<const DevicePiece> pieces, const Issue& issue) {
    if (pieces.empty()) return;
    auto& queue = *queues_[static_cast<std::size_t>(rank)];
    queue.wait(queue.together(name, pieces.size(), [&](Api& api, std::size_t i, const auto& comm, const auto& stream) {
      return issue(api, pieces[i], comm, stream);
    }));
  }

  void give_up(int rank, const Failure& failure) {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    failed_ = rank;
  }
  Failure failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  Api api_;
  typename Api::UniqueId id_{};
  const std::vector<int> devices_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  Failure failure_;  // the first one
  int failed_ = -1;  // its device
  std::vector<std::unique_ptr<NcclQueue<Api>>> queues_;
};

}  // namespace chorus::comm
