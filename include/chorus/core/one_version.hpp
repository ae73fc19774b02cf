#pragma once
/// A program is made with one version of chorus. Units of two versions would link, for their symbols have the same
/// names, and would then take each other's functions for their own.
#include <chorus/core/config.hpp>
#include <cstdio>
#include <cstdlib>

namespace chorus::detail {

/// Ends the program, with a message, where a unit of another version has been loaded before. The options
/// CHORUS_USE_... don't count: they add types and functions, and change none.
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

namespace {
[[maybe_unused]] const bool only_version =
    is_only_version(CHORUS_VERSION_MAJOR * 1000000 + CHORUS_VERSION_MINOR * 1000 + CHORUS_VERSION_PATCH);
}  // namespace

}  // namespace chorus::detail
