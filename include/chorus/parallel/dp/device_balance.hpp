#pragma once
/// A warning if devices that share the work evenly differ in size.

#include <algorithm>
#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#if CHORUS_USE_CUDA
#include <chorus/core/cuda/runtime.hpp>
#endif
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace chorus::dp {

/// A device's memory in bytes and its number of processors; 0: unknown.
struct DeviceSize {
  double memory = 0, processors = 0;
};

/// A warning if the weakest device has less than three quarters of the strongest one's memory or processors; else "".
inline std::string imbalance(std::span<const int> ids, std::span<const DeviceSize> sizes) {
  const auto compare = [&](const char* what, double DeviceSize::*size) -> std::string {
    const auto [weakest, strongest] = std::minmax_element(
        sizes.begin(), sizes.end(), [&](const auto& a, const auto& b) { return a.*size < b.*size; });
    if (sizes.empty() || (*weakest).*size >= 0.75 * (*strongest).*size) return "";
    const auto id = [&](auto at) { return ids[static_cast<std::size_t>(at - sizes.begin())]; };
    return cat("DataParallel: device ", id(weakest), " has less than 75 % of the ", what, " of device ", id(strongest),
               ", and gets the same share of each batch, so the others wait for it: remove it from device_ids");
  };
  const auto text = compare("memory", &DeviceSize::memory);
  return text.empty() ? compare("processors", &DeviceSize::processors) : text;
}

#if CHORUS_USE_CUDA
inline DeviceSize device_size(Cuda device) {
  const cuda::DeviceGuard guard(device);
  std::size_t free = 0, total = 0;
  CHORUS_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  int processors = 0;
  CHORUS_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.index));
  return {static_cast<double>(total), static_cast<double>(processors)};
}
#endif

/// Warns if the device type has a function `device_size(D)`.
template <Device D>
void warn_of_imbalance(const std::vector<int>& device_ids) {
  if constexpr (requires(D device) { device_size(device); }) {
    std::vector<DeviceSize> sizes;
    for (const int id : device_ids) sizes.push_back(device_size(D{id}));
    if (const auto text = imbalance(device_ids, sizes); !text.empty()) detail::say("warning: " + text);
  }
}

}  // namespace chorus::dp
