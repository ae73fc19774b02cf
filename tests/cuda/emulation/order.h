#pragma once
// How the emulation runs a block's threads, from the environment:
//   CHORUS_EMULATED_ORDER=N          threads in a random order, another after each barrier; N is the seed. Blocks in
//                                    reverse, grids of at most 3 blocks, so that their loops loop, and shared memory full
//                                    of NaN when a block begins. Results are the same bits.
//   CHORUS_EMULATED_RESULTS=PATH     writes a sum of all copies to the host, or, with an order, compares it
//   CHORUS_EMULATED_WITHOUT=FILE:LINE    leaves out the barrier there
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

// clang puts shared memory together, so that it can be filled; g++ does not where templates have it. The address
// sanitizer wants each array for itself.
#define __shared__ static
#if defined(__clang__)
#if !__has_feature(address_sanitizer)
#undef __shared__
#define __shared__ [[gnu::section("emulated_shared")]] static
#endif
#endif
extern char begin_of_shared[] __asm__("__start_emulated_shared") __attribute__((weak));
extern char end_of_shared[] __asm__("__stop_emulated_shared") __attribute__((weak));

#define CHORUS_MOST_BLOCKS (::emulation::most_blocks())

namespace emulation {

inline const char* setting(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}
/// The seed of the order; 0: threads and blocks in the order of their numbers.
inline const std::uint64_t seed = std::strtoull(setting("CHORUS_EMULATED_ORDER"), nullptr, 10);

constexpr std::int64_t most_blocks() { return !std::is_constant_evaluated() && seed != 0 ? 3 : 8192; }

template <class T>
void shuffle(std::vector<T>& items) {
  static std::uint64_t state = seed;
  for (std::size_t left = items.size(); left > 1; --left) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(items[left - 1], items[(state >> 33) % left]);
  }
}

inline void fill_shared() {
  const auto bytes = static_cast<std::size_t>(end_of_shared - begin_of_shared);
  if (bytes > 0) std::memset(begin_of_shared, 0xFF, bytes);
}

inline bool is_left_out(const char* file, int line) {
  static const std::string_view place = setting("CHORUS_EMULATED_WITHOUT");
  static const std::size_t colon = place.rfind(':');
  static const int left_out = colon == place.npos ? 0 : std::atoi(place.data() + colon + 1);
  return line == left_out && std::string_view(file).ends_with(place.substr(0, colon));
}

/// What this process has copied to the host, in any order.
struct Results {
  const std::string path = setting("CHORUS_EMULATED_RESULTS");
  const int process = getpid();  // forked ones say nothing
  std::atomic<std::size_t> copies{0}, sum{0};

  void add(const void* data, std::size_t bytes) {
    ++copies;
    sum += std::hash<std::string_view>{}({static_cast<const char*>(data), bytes});
  }
  ~Results() {
    if (path.empty() || process != getpid()) return;
    const std::string own = std::to_string(copies) + " copies, sum " + std::to_string(sum) + "\n";
    char expected[100] = "none";
    std::FILE* const file = std::fopen(path.c_str(), seed == 0 ? "w" : "r");
    if (file != nullptr && seed == 0) std::fputs(own.c_str(), file);
    if (file != nullptr && seed != 0) static_cast<void>(std::fgets(expected, sizeof expected, file));
    if (file != nullptr) std::fclose(file);
    if (seed == 0 || own == expected) return;
    std::fprintf(stderr, "emulated CUDA: expected %sgot %sfor results depend on the order of threads, or on the grid\n",
                 expected, own.c_str());
    std::fflush(nullptr);
    _exit(1);
  }
};
inline Results results;

}  // namespace emulation
