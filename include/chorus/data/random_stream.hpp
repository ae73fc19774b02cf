#pragma once
/// The random numbers of one sample: a Philox stream with the key (key, place, lap), the same on any rank and thread.

#include <chorus/core/dtype.hpp>
#include <chorus/core/philox.hpp>
#include <cstdint>

namespace chorus::data {

/// The purpose of a stream. Streams of different purposes are independent under one seed.
enum class Purpose : std::uint64_t {
  shuffle = 0x7368756666'6c6500ull,
  augment = 0x6175676d65'6e7400ull,
  generate = 0x67656e6572'617400ull,
  weigh = 0x77656967'6800ull,
  split = 0x73706c69'7400ull,
};

/// A stream of random words. For augmentation `place` is the sample's index in the dataset and `lap` the epoch.
class RandomStream {
 public:
  RandomStream(std::uint64_t seed, Purpose purpose, Index place, Index lap)
      : key_(seed ^ static_cast<std::uint64_t>(purpose)),
        counter_{static_cast<std::uint32_t>(place), static_cast<std::uint32_t>(place >> 32),
                 static_cast<std::uint32_t>(lap), 0} {}

  /// 32 random bits.
  std::uint32_t word() {
    if (used_ == 4) {
      words_ = philox(key_, counter_);
      ++counter_[3];
      used_ = 0;
    }
    return words_[used_++];
  }

  /// 64 random bits.
  std::uint64_t long_word() {
    const std::uint64_t high = word(), low = word();
    return high << 32 | low;
  }

  /// Uniform in [0, 1).
  float uniform() { return unit_float(word()); }
  /// Uniform in [low, high).
  float uniform(float low, float high) { return low + (high - low) * uniform(); }

  /// A uniform integer in [0, count), for 0 < count < 2^32: the upper part of a 64-bit random number times `count`.
  /// Probabilities differ by at most 2^-32.
  Index below(Index count) {
    const auto n = static_cast<std::uint64_t>(count);
    const std::uint64_t high = word(), low = word();
    return static_cast<Index>((high * n + (low * n >> 32)) >> 32);
  }

 private:
  std::uint64_t key_;
  PhiloxWords counter_;
  PhiloxWords words_{};
  std::size_t used_ = 4;
};

}  // namespace chorus::data
