#pragma once
/// A file descriptor that closes itself.

#include <cstddef>
#include <utility>

#include <unistd.h>

#include <chorus/core/config.hpp>
#include <chorus/core/standard_streams.hpp>

namespace chorus::io {

/// Owns `value`, unless it is negative. It is none of the standard streams'.
struct Descriptor {
  int value = -1;

  Descriptor() = default;
  explicit Descriptor(int descriptor) : value(chorus::detail::above_standard_streams(descriptor)) {}
  Descriptor(Descriptor&& other) noexcept : value(std::exchange(other.value, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value, other.value);
    return *this;
  }
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

/// The most that one call reads or writes: Linux stops just below 2 GiB, and some systems refuse more.
inline constexpr std::size_t io_chunk = std::size_t{1} << 30;

}  // namespace chorus::io
