#pragma once
/// `FarCopy`: copies into memory that another core has read and will read again.

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <chorus/comm/transport/transport.hpp>
#include <chorus/comm/world.hpp>
#include <chrono>
#include <cstddef>

namespace chorus::comm {

/// Ordinary stores must fetch each line back from the other core's cache. If the two share a cache, that is fast, and
/// the other core then reads from it: an all-reduce between two cores of one Zen 4 complex reaches 20 GB/s, against 8
/// with streaming stores, which bypass the caches. Between two complexes it is 2 GB/s against 10. The cores of threads
/// are unknown and change, so periodically the beginning of a copy is done both ways and timed.
class FarCopy {
 public:
  /// The ranges do not overlap. `out` is aligned to 64 bytes.
  void operator()(std::byte* out, const std::byte* in, std::size_t bytes) {
    if (bytes >= 2 * sample && ++copies_ % period == 0) {
      measure(out, in);
      out += 2 * sample, in += 2 * sample, bytes -= 2 * sample;
    }
    far_ ? stream(out, in, bytes) : detail::copy_bytes(out, in, bytes);
  }

 private:
  static constexpr std::size_t sample = 8 * 1024;
  static constexpr std::chrono::nanoseconds slow{sample / 4};  // 4 GB/s
  static constexpr unsigned period = 32;  // copies: the first ones write to untouched memory

  static void stream(std::byte* out, const std::byte* in, std::size_t bytes) {
    std::size_t i = 0;
#if defined(__SSE2__)
    for (; i + 64 <= bytes; i += 64)
      for (std::size_t j = i; j < i + 64; j += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + j),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + j)));
#endif
    detail::copy_bytes(out + i, in + i, bytes - i);
    finish();  // before the flag that announces it
  }
  static void finish() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
  }

  /// 8 KiB of ordinary stores took 0.1 to 0.9 us near and 2.6 to 4 us far; streaming ones 0.2 to 0.8 us, near or far,
  /// but the reader pays more for them. A sample in which the thread was interrupted is wrong, so two in a row must
  /// agree.
  void measure(std::byte* out, const std::byte* in) {
    for (std::size_t i = 0; i < 2 * sample; i += 64) seen_ ^= in[i];  // into this core's cache, not timed
    finish();
    const auto start = Clock::now();
    stream(out, in, sample);
    const auto middle = Clock::now();
    detail::copy_bytes(out + sample, in + sample, sample);
    finish();
    const auto end = Clock::now();
    const bool far = end - middle > slow && end - middle > 2 * (middle - start);
    if (far == seems_far_) far_ = far;
    seems_far_ = far;
  }

  unsigned copies_ = 0;
  std::byte seen_{};
  bool far_ = false, seems_far_ = false;
};

}  // namespace chorus::comm
