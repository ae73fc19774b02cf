#pragma once
/// `DeviceGroup`: collectives among the GPUs of one process, for DataParallel, independent of the library.

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

/// Several devices, numbered from 0, with one thread each. Each thread calls `join`, then the same collectives as the
/// others in the same order, with pieces of the same sizes, and finally `leave`. A collective runs on the stream after
/// the present work of the thread's compute stream and before its later work; the host continues. So a device's failure
/// is thrown by a later call: CommError, or TimeoutError after the group's deadline. The first failure is final for all
/// devices.
class DeviceGroup {
 public:
  DeviceGroup() = default;
  virtual ~DeviceGroup() = default;
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  /// Meets the other devices.
  virtual void join(int rank) = 0;
  /// All devices' pieces := device 0's.
  virtual void broadcast(int rank, std::span<const DevicePiece> pieces) = 0;
  /// Device 0's pieces := the sums of all devices' pieces, in float or double, added in the library's order.
  virtual void reduce(int rank, std::span<const DevicePiece> pieces) = 0;
  virtual void leave(int rank) noexcept = 0;
  /// Aborts the group for a failure at `rank`: waiting and later calls throw CommError with `why`. From any thread.
  virtual void abort(int rank, std::string_view why) noexcept = 0;
  /// The device of the first failure; -1: none.
  virtual int failed() = 0;
};

/// Makes the group of these GPUs, all different. `timeout`: how long a device waits for the others in a call.
using DeviceGroupMaker = std::unique_ptr<DeviceGroup> (*)(std::span<const int> devices,
                                                          std::chrono::milliseconds timeout);

/// The maker of such groups: null, until <chorus/comm/nccl.hpp> is included and registers NCCL's.
inline DeviceGroupMaker& device_group_maker() {
  static DeviceGroupMaker maker = nullptr;
  return maker;
}

}  // namespace chorus::comm
