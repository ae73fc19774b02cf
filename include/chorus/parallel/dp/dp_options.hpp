#pragma once
/// The options of DataParallel, and the devices that a run gives it.

#include <chorus/comm/world.hpp>
#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <chorus/launch/device_list.hpp>
#if CHORUS_USE_CUDA
#include <chorus/core/cuda/runtime.hpp>
#endif
#include <chorus/tensor/allocator.hpp>
#include <chrono>
#include <concepts>
#include <optional>
#include <string>
#include <vector>

namespace chorus {

struct DataParallelOptions {
  /// Indices of the devices. The first holds the model. An index may occur twice: two copies share that device. Empty:
  /// the devices of the run.
  std::vector<int> device_ids = {};
  /// Index of the device on which outputs are gathered; -1: the first of `device_ids`.
  int output_device = -1;
  /// The axis along which inputs are cut and outputs are joined.
  int dim = 0;
  /// How long a device waits for the others: in NCCL's collectives, in SyncBatchNorm, and device 0 at the end of a
  /// pass. Not set: the run's timeout, or 60 s without a run.
  std::optional<std::chrono::milliseconds> timeout = {};
};

namespace dp {

/// The device that holds the model. Throws UsageError if there is none.
template <Device D>
D first_device(const DataParallelOptions& options) {
  check<UsageError>(!options.device_ids.empty(), "DataParallel: device_ids is empty: expected at least one device");
  return D{options.device_ids.front()};
}

/// Names of the copies of the model in errors.
template <Device D>
std::vector<std::string> replica_names(const std::vector<int>& device_ids) {
  std::vector<std::string> names;
  for (const int id : device_ids) names.push_back(cat("replica ", names.size(), " on device ", D{id}));
  return names;
}

/// Takes devices and timeout from `run` if the options don't give them: the devices that `run` names, or as many as it
/// wants; if there are fewer GPUs, copies share them. Throws UsageError if both name devices, and they differ.
template <Device D, class Run>
DataParallelOptions options_of(Run& run, DataParallelOptions options) {
  if (!options.timeout) options.timeout = run.world().timeout;
  const auto named = run.device_ids();
  check<UsageError>(options.device_ids.empty() || named.empty() || options.device_ids == named,
                    "DataParallel: --device names ", DeviceList{.ids = named}.text(),
                    ", but the program's device_ids are ", DeviceList{.ids = options.device_ids}.text());
  if (!named.empty()) options.device_ids = named;
  if (!options.device_ids.empty()) return options;
  int count = 0, there = 0;
  if constexpr (std::same_as<D, Cpu>) {
    there = count = run.devices();
  } else {
#if CHORUS_USE_CUDA
    cuda::require(D{0});
    there = cuda::device_count();
    count = run.devices(there);
#endif
  }
  for (int i = 0; i < count; ++i) options.device_ids.push_back(i % there);
  return options;
}

/// Fills in the remaining defaults. Needs at least one device. Throws UsageError or DeviceError for invalid options.
template <Device D>
DataParallelOptions settled(DataParallelOptions options) {
  if (options.output_device < 0) options.output_device = options.device_ids.front();
  if (!options.timeout) options.timeout = std::chrono::seconds(60);
  CachingAllocator<D>::of(D{options.output_device});  // throws if it doesn't exist
  comm::check_timeout("DataParallel", *options.timeout);
  check<UsageError>(options.dim >= 0, "DataParallel: expected dim of at least 0, got ", options.dim);
  return options;
}

}  // namespace dp
}  // namespace chorus
