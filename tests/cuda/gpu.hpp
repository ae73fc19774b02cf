#pragma once
/// Whether this machine has a GPU, found out without a trace in this process: CUDA does not survive a fork.

#include <sys/wait.h>
#include <unistd.h>

#include <chorus/core/cuda/runtime.hpp>
#include <cstdio>
#include <cstdlib>

namespace test {

inline bool has_gpu() {
  static const bool has = [] {
    const int pid = fork();
    if (pid == 0) {
      const auto& found = chorus::cuda::detail::devices();
      if (found.count > 0) _exit(0);
      std::fprintf(stderr, "SKIPPED: no CUDA device (%s)\n", cudaGetErrorString(found.status));
      _exit(1);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    return status == 0;
  }();
  return has;
}

}  // namespace test

/// Ends a test where there is no GPU, and says so; with CHORUS_REQUIRE_GPU in the environment it fails there.
#define CHORUS_NEEDS_GPU                                 \
  if (!test::has_gpu()) {                                \
    CHECK(std::getenv("CHORUS_REQUIRE_GPU") == nullptr); \
    WARN("SKIPPED: no CUDA device");                     \
    return;                                              \
  }                                                      \
  static_assert(true)
