#pragma once
/// The precision of float products on GPUs.

#include <atomic>
#include <chorus/core/config.hpp>

namespace chorus {

namespace detail {
inline std::atomic<bool>& tf32_flag() {
  static std::atomic<bool> allowed{false};
  return allowed;
}
}  // namespace detail

/// Whether matrix products and convolutions of floats may round inputs to TF32 (10 bits of mantissa), which is several
/// times as fast. Off by default, so that all devices compute alike.
inline bool tf32_allowed() { return detail::tf32_flag().load(std::memory_order_relaxed); }
inline void allow_tf32(bool allowed) { detail::tf32_flag().store(allowed, std::memory_order_relaxed); }

}  // namespace chorus
