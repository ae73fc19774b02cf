#pragma once
// Runs a kernel on the CPU and on the GPU, on the same numbers, and compares everything that it was given.

#include <catch.hpp>
#include <chorus/core/cuda/runtime.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "../unit/kernels/reference.hpp"

// `half` alone would be CUDA's, too, in places.
using chorus::bf16;
using chorus::Cpu;
using chorus::Cuda;

/// Whether there is a GPU; says loudly where a test is left out. ctest looks for this text.
inline bool gpu_present() {
  if (chorus::cuda::device_count() > 0) return true;
  if (std::getenv("CHORUS_REQUIRE_GPU") != nullptr) FAIL("no CUDA device, and CHORUS_REQUIRE_GPU is set");
  std::printf("SKIPPED: no CUDA device (%s)\n", cudaGetErrorString(chorus::cuda::detail::devices().status));
  return false;
}

/// `body(device, pointers...)` gets a copy of each array on that device.
template <class Body, class... T>
void compare(double tolerance, const Body& body, const std::vector<T>&... arrays) {
  const auto run = [&](auto device) {
    using D = decltype(device);
    const std::tuple tensors{chorus::Tensor<T, 1, D>::from(arrays, {static_cast<Index>(arrays.size())}, device)...};
    std::apply([&](const auto&... tensor) { body(device, tensor.data()...); }, tensors);
    return std::apply([](const auto&... tensor) { return std::tuple{tensor.to_vector()...}; }, tensors);
  };
  const auto expected = run(Cpu{}), actual = run(Cuda{});
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    std::size_t array = 0;
    const auto check_one = [&](const auto& a, const auto& b) {
      CAPTURE(array++);
      CHECK(error(a, b) <= tolerance);
    };
    (check_one(std::get<i>(actual), std::get<i>(expected)), ...);
  }
  (std::make_index_sequence<sizeof...(T)>());
}

/// What kernels of `T` may differ by.
template <class T>
constexpr double near = sizeof(T) == 8   ? 1e-12
                        : sizeof(T) == 4 ? 1e-5
                                         : 2e-2;
