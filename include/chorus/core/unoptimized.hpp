#pragma once
/// Warns at the start of a program compiled without optimisation, whose arithmetic is up to a hundred times slower.
#include <chorus/core/config.hpp>

// With chorus::compiled the arithmetic is in the library and does not depend on the program's options.
#if !defined(__OPTIMIZE__) && !CHORUS_COMPILED && !defined(CHORUS_ALLOW_UNOPTIMIZED)
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace chorus::detail {

/// Prints the warning once per program, on rank 0 only. CHORUS_ALLOW_UNOPTIMIZED=1 in the environment, or a macro of
/// that name, silences it.
inline bool say_unoptimized() {
  static const bool said = [] {
    constexpr const char* allow = "CHORUS_ALLOW_UNOPTIMIZED";
    if (const char* value = std::getenv(allow); value != nullptr && std::strcmp(value, "0") != 0) return false;
    setenv(allow, "1", 1);  // for ranks that this program starts
    for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
      if (const char* rank = std::getenv(name); rank != nullptr && std::strcmp(rank, "0") != 0) return false;
    std::fputs(
        "chorus: this program was compiled without optimization and is many times slower than with -O2 (CMake: "
        "-DCMAKE_BUILD_TYPE=Release); CHORUS_ALLOW_UNOPTIMIZED=1 silences this line\n",
        stderr);
    return true;
  }();
  return said;
}

namespace {
[[maybe_unused]] const bool said_unoptimized = say_unoptimized();
}  // namespace

}  // namespace chorus::detail
#endif
