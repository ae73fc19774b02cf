#pragma once
/// Detects changes of values.

#include <chorus/tensor/writes.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace chorus {

CHORUS_INLINE std::uint64_t Writes::fingerprint(const void* numbers, std::size_t bytes) {
  constexpr std::size_t lanes = 64, block = lanes * sizeof(std::uint32_t);
  constexpr std::uint32_t odd = 0x9E3779B1u;
  std::uint32_t sums[lanes] = {}, words[lanes] = {};
  const auto* from = static_cast<const std::byte*>(numbers);
  for (; bytes >= block; bytes -= block, from += block)
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      std::uint32_t word;  // copying a whole block would be a function call
      std::memcpy(&word, from + lane * sizeof word, sizeof word);
      sums[lane] = (sums[lane] ^ word) * odd;
    }
  std::memcpy(words, from, bytes);
  std::uint64_t out = 0;
  for (std::size_t lane = 0; lane < lanes; ++lane)
    out = (out ^ ((sums[lane] ^ words[lane]) * odd)) * 0x9E3779B97F4A7C15u;
  return out;
}

CHORUS_INLINE void Writes::look(const void* numbers, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t now = fingerprint(numbers, bytes);
  if (now != fingerprint_) {
    add();
    found_.fetch_add(1, std::memory_order_relaxed);
  }
  fingerprint_ = now;
}

}  // namespace chorus
