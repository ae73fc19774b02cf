#pragma once
/// A program must use one version of chorus, compiled for one kind of processor. Units of two versions would link,
/// since their symbols have the same names, but call each other's functions. The same holds for units, or the library
/// chorus::compiled, with different packet sizes.
#include <chorus/core/config.hpp>
#include <cstdio>
#include <cstdlib>

namespace chorus::detail {

/// Ends the program with a message if a unit of another version was loaded before. CHORUS_USE_... options don't matter:
/// they only add types and functions.
inline bool is_only_version(int version) {
  static const int first = version;
  if (version == first) return true;
  std::fprintf(stderr,
               "chorus: this program has units compiled with version %d.%d.%d and with version %d.%d.%d: compile all "
               "with one\n",
               first / 1000000, first / 1000 % 1000, first % 1000, version / 1000000, version / 1000 % 1000,
               version % 1000);
  std::_Exit(EXIT_FAILURE);
}

/// Ends the program with a message if a unit with another packet size was loaded before.
inline bool is_only_packet(int bytes) {
  static const int first = bytes;
  if (bytes == first) return true;
  const auto name = [](int size) { return size == 64 ? "AVX-512" : size == 32 ? "AVX" : "no AVX"; };
  std::fprintf(stderr,
               "chorus: this program has units compiled for a processor with %s and with %s: give -march (in CMake: "
               "chorus::native, and CHORUS_NATIVE=ON for the library chorus::compiled) to all or none\n",
               name(first), name(bytes));
  std::_Exit(EXIT_FAILURE);
}

namespace {
#if defined(__AVX512F__)
[[maybe_unused]] const bool only_packet = is_only_packet(64);
#elif defined(__AVX__)
[[maybe_unused]] const bool only_packet = is_only_packet(32);
#else
[[maybe_unused]] const bool only_packet = is_only_packet(16);
#endif
[[maybe_unused]] const bool only_version =
    is_only_version(CHORUS_VERSION_MAJOR * 1000000 + CHORUS_VERSION_MINOR * 1000 + CHORUS_VERSION_PATCH);
}  // namespace

}  // namespace chorus::detail
