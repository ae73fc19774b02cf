#pragma once
/// Counts communication and memory: bytes sent per device and content, and memory per device and kind. Under
/// DataParallel a device is one of this process, under DistributedDataParallel it is the rank. Listeners
/// (core/trace_listener.hpp) get each event.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/trace_listener.hpp>

namespace chorus::trace {

/// Device slots: 64 per kind (`trace_slot`).
inline constexpr int max_devices = 128;

/// A device's bytes in use, now and at the peak.
struct MemoryUse {
  std::size_t current = 0, peak = 0;
};

namespace detail {
struct DeviceCounters {
  std::array<std::atomic<std::uint64_t>, traffic_kinds> sent{};
  std::array<std::atomic<std::int64_t>, memory_kinds> held{};
  std::atomic<std::int64_t> total{0}, peak{0};
  std::mutex at_peak_mutex;
  std::array<std::size_t, memory_kinds> at_peak{};
};
inline DeviceCounters& counters(int device) {
  static std::array<DeviceCounters, max_devices> all;
  check<DeviceError>(device >= 0 && device < max_devices, "trace: device index ", device, " is not in [0, ",
                     max_devices, ")");
  return all[static_cast<std::size_t>(device)];
}
/// Concurrent allocations of other threads may be included.
[[gnu::noinline, gnu::cold]] inline void note_peak(DeviceCounters& c, std::int64_t now) {
  const std::lock_guard lock(c.at_peak_mutex);
  if (now <= c.peak.load(std::memory_order_relaxed)) return;
  c.peak.store(now, std::memory_order_relaxed);
  for (std::size_t kind = 0; kind < memory_kinds; ++kind)
    c.at_peak[kind] = static_cast<std::size_t>(c.held[kind].load(std::memory_order_relaxed));
}
}  // namespace detail

/// Counts `bytes` sent by the device (or rank) `from` to `to`.
inline void sent(int from, int to, Traffic kind, std::size_t bytes) {
  detail::counters(from).sent[static_cast<std::size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  if (auto* const listener = listening()) [[unlikely]]
    listener->sent(from, to, kind, bytes);
}
/// Bytes sent by a device since the last reset_traffic: of one kind, or of all.
inline std::uint64_t bytes_sent(int device, Traffic kind) {
  return detail::counters(device).sent[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed);
}
inline std::uint64_t bytes_sent(int device) {
  std::uint64_t sum = 0;
  for (const auto& kind : detail::counters(device).sent) sum += kind.load(std::memory_order_relaxed);
  return sum;
}
/// Resets the counters of bytes sent.
inline void reset_traffic() {
  for (int device = 0; device < max_devices; ++device)
    for (auto& kind : detail::counters(device).sent) kind.store(0, std::memory_order_relaxed);
}

/// Counts `bytes` allocated (negative: freed) on the device with that trace_slot.
inline void allocated(int slot, Memory kind, std::int64_t bytes) {
  auto& c = detail::counters(slot);
  c.held[static_cast<std::size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  const auto now = c.total.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (now > c.peak.load(std::memory_order_relaxed)) [[unlikely]]
    detail::note_peak(c, now);
  if (auto* const listener = listening()) [[unlikely]]
    listener->allocated(slot, kind, bytes);
}
/// A device's bytes in tensors, now and at the peak; or of one kind, now.
inline MemoryUse memory(int device) {
  const auto& c = detail::counters(device);
  return {static_cast<std::size_t>(c.total.load()), static_cast<std::size_t>(c.peak.load())};
}
inline std::size_t memory(int device, Memory kind) {
  return static_cast<std::size_t>(detail::counters(device).held[static_cast<std::size_t>(kind)].load());
}
/// The memory at the peak, by kind.
inline std::array<std::size_t, memory_kinds> memory_at_peak(int device) {
  auto& c = detail::counters(device);
  const std::lock_guard lock(c.at_peak_mutex);
  return c.at_peak;
}

/// Allocations in the slot while it lives don't count for its peak.
class PeakKept {
 public:
  explicit PeakKept(int slot) : counters_(detail::counters(slot)), at_peak_(memory_at_peak(slot)) {
    peak_ = counters_.peak.load();
  }
  PeakKept(const PeakKept&) = delete;
  PeakKept& operator=(const PeakKept&) = delete;
  ~PeakKept() {
    const std::lock_guard lock(counters_.at_peak_mutex);
    counters_.peak.store(peak_);
    counters_.at_peak = at_peak_;
  }

 private:
  detail::DeviceCounters& counters_;
  std::array<std::size_t, memory_kinds> at_peak_;
  std::int64_t peak_ = 0;
};

}  // namespace chorus::trace
