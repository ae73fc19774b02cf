#pragma once
/// `DeviceGroup`: collectives among the GPUs of one process, for DataParallel, whatever library carries them out.

#include <chorus/core/dtype.hpp>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

namespace chorus::comm {

/// Some numbers in one device's memory.
struct DevicePiece {
  void* data;
  std::size_t count;
  DType dtype;
};

/// Several devices, numbered from 0, with a thread each. Each thread calls `join`, then the same collectives as the
/// others in the same order, with pieces of the same sizes, and at last `leave`. A collective runs after what
/// the thread's compute stream has been given so far, and what the stream is given later runs after the collective; the
/// host goes on. So a failure on a device is thrown by a later call: CommError, TimeoutError after the group's
/// deadline. The first failure is final, for all devices.
class DeviceGroup {
 public:
  DeviceGroup() = default;
  virtual ~DeviceGroup() = default;
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  /// Meets the others.
  virtual void join(int rank) = 0;
  /// Everybody's pieces := device 0's.
  virtual void broadcast(int rank, std::span<const DevicePiece> pieces) = 0;
  /// Device 0's pieces := the sums of everybody's, in float or double, added in an order that the library chooses.
  virtual void reduce(int rank, std::span<const DevicePiece> pieces) = 0;
  virtual void leave(int rank) noexcept = 0;
  /// Gives up, because of what happened at `rank`: calls that wait, and later ones, throw CommError with `why`. From
  /// any thread.
  virtual void abort(int rank, std::string_view why) noexcept = 0;
  /// Where something failed first; -1: nowhere.
  virtual int failed() = 0;
};

/// Makes the group of these GPUs, all of them different. `timeout`: how long each waits for the others in a call.
using DeviceGroupMaker = std::unique_ptr<DeviceGroup> (*)(std::span<const int> devices,
                                                          std::chrono::milliseconds timeout);

/// How this program makes one: null, until <chorus/comm/nccl.hpp>, once included, makes NCCL's known.
inline DeviceGroupMaker& device_group_maker() {
  static DeviceGroupMaker maker = nullptr;
  return maker;
}

}  // namespace chorus::comm
