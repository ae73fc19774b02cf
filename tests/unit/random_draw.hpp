#pragma once
/// What all random tests share: numbers from a seed, and the seeds that are tried.

#include <chorus/core/philox.hpp>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <vector>

namespace test {

/// Numbers that depend on a seed and on how many were drawn before.
template <std::uint32_t Stream>
class DrawFrom {
 public:
  explicit DrawFrom(std::uint64_t seed) : seed_(seed) {}
  std::uint32_t below(std::uint32_t n) { return chorus::philox(seed_, {next_++, Stream, Stream, Stream})[0] % n; }
  bool chance(std::uint32_t percent) { return below(100) < percent; }
  std::uint64_t bits() { return std::uint64_t{below(1u << 31)} << 31 | below(1u << 31); }
  template <class T>
  const T& one_of(const std::vector<T>& all) {
    return all[below(static_cast<std::uint32_t>(all.size()))];
  }

 private:
  std::uint64_t seed_;
  std::uint32_t next_ = 0;
};

/// Calls `f(seed)` for seeds from 1 to `last`, or for those that the environment names; `show(seed)` where it is one.
template <class F, class Show>
void for_seeds(std::uint64_t last, const F& f, const Show& show) {
  std::uint64_t first = 1;
  if (const char* wanted = std::getenv("CHORUS_RANDOM_SEEDS")) {
    char* end = nullptr;
    first = last = std::strtoull(wanted, &end, 10);
    if (*end == '-') last = std::strtoull(end + 1, nullptr, 10);
    if (first == last) std::cerr << show(first);
  }
  for (auto seed = first; seed <= last; ++seed) f(seed);
}

/// How often each feature was drawn, where the environment names the seeds.
inline void show_features(const std::map<std::string, int>& drawn) {
  if (!std::getenv("CHORUS_RANDOM_SEEDS")) return;
  for (const auto& [feature, programs] : drawn) std::cerr << feature << ": " << programs << "\n";
}

}  // namespace test
