#pragma once
/// Everything that moves is counted here: bytes sent per device by what they carried, and memory per device by kind.
/// Under DataParallel a "device" is a device of this process; under DistributedDataParallel it is the rank.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

namespace chorus::trace {

/// Slots for devices: 64 of a kind (`trace_slot`).
inline constexpr int max_devices = 128;

/// What a message between devices or ranks carried.
enum class Traffic : std::uint8_t { control, parameters, gradients, buffers, inputs, outputs };
inline constexpr std::size_t traffic_kinds = 6;

/// What a block of device memory holds.
enum class Memory : std::uint8_t { activations, parameters, gradients, optimizer, buckets };
inline constexpr std::size_t memory_kinds = 5;

constexpr std::string_view name(Traffic kind) {
  constexpr std::string_view names[] = {"control", "parameters", "gradients", "buffers", "inputs", "outputs"};
  return names[static_cast<std::size_t>(kind)];
}
constexpr std::string_view name(Memory kind) {
  constexpr std::string_view names[] = {"activations", "parameters", "gradients", "optimizer", "buckets"};
  return names[static_cast<std::size_t>(kind)];
}

/// Bytes of one device, in use now and at most so far.
struct MemoryUse {
  std::size_t current = 0, peak = 0;
};

namespace detail {
struct DeviceCounters {
  std::array<std::atomic<std::uint64_t>, traffic_kinds> sent{};
  std::array<std::atomic<std::int64_t>, memory_kinds> held{};
  std::atomic<std::int64_t> total{0}, peak{0};
};
inline DeviceCounters& counters(int device) {
  static std::array<DeviceCounters, max_devices> all;
  check<DeviceError>(device >= 0 && device < max_devices, "trace: device index ", device, " is not in [0, ",
                     max_devices, ")");
  return all[static_cast<std::size_t>(device)];
}
}  // namespace detail

/// Counts `bytes` that `device` (or rank) handed to another one.
inline void sent(int device, Traffic kind, std::size_t bytes) {
  detail::counters(device).sent[static_cast<std::size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
}
inline std::uint64_t bytes_sent(int device, Traffic kind) {
  return detail::counters(device).sent[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed);
}
inline std::uint64_t bytes_sent(int device) {
  std::uint64_t sum = 0;
  for (const auto& kind : detail::counters(device).sent) sum += kind.load(std::memory_order_relaxed);
  return sum;
}
inline void reset_traffic() {
  for (int device = 0; device < max_devices; ++device)
    for (auto& kind : detail::counters(device).sent) kind.store(0, std::memory_order_relaxed);
}

/// Counts `bytes` that came into use on `device` (negative: that were given back).
inline void allocated(int device, Memory kind, std::int64_t bytes) {
  auto& c = detail::counters(device);
  c.held[static_cast<std::size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  const auto now = c.total.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  auto peak = c.peak.load(std::memory_order_relaxed);
  while (now > peak && !c.peak.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}
inline MemoryUse memory(int device) {
  const auto& c = detail::counters(device);
  return {static_cast<std::size_t>(c.total.load()), static_cast<std::size_t>(c.peak.load())};
}
inline std::size_t memory(int device, Memory kind) {
  return static_cast<std::size_t>(detail::counters(device).held[static_cast<std::size_t>(kind)].load());
}

}  // namespace chorus::trace
