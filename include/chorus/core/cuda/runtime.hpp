#pragma once
/// The CUDA runtime with chorus's errors: checked calls, the available devices, and a thread's current device.

#include <cuda_runtime_api.h>

#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

namespace chorus::cuda {

namespace detail {
/// Source paths from "chorus/" on, so that messages don't depend on the project's location.
constexpr std::string_view short_path(std::string_view path) {
  const auto at = path.rfind("chorus/");
  return at == std::string_view::npos ? path : path.substr(at);
}

[[noreturn, gnu::noinline, gnu::cold]] inline void throw_error(cudaError_t status, const char* call, const char* file,
                                                               int line) {
  static_cast<void>(cudaGetLastError());  // so that the next call does not report it again
  fail<DeviceError>("CUDA: ", call, " failed: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), "), at ",
                    short_path(file), ":", line);
}
}  // namespace detail

/// Throws DeviceError with the call, its error and the source location, unless `status` is success.
inline void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) [[unlikely]]
    detail::throw_error(status, call, file, line);
}
#define CHORUS_CUDA_CHECK(...) ::chorus::cuda::check(__VA_ARGS__, #__VA_ARGS__, __FILE__, __LINE__)

/// Clears an expected error, so that the next call does not report it.
inline void forget_error() { static_cast<void>(cudaGetLastError()); }
/// After a library's successful call: clears an error that one of its probes left in the runtime, which the next kernel
/// would report. Throws DeviceError if the error persists, as a broken device's does. A missing GPU or driver is
/// reported when a GPU is requested.
inline void check_left_over(const char* call, const char* file, int line) {
  if (cudaPeekAtLastError() == cudaSuccess) return;
  forget_error();
  const auto status = cudaPeekAtLastError();
  if (status != cudaErrorNoDevice && status != cudaErrorInsufficientDriver) check(status, call, file, line);
}

namespace detail {
struct Devices {
  int count = 0;
  cudaError_t status = cudaSuccess;
};
inline const Devices& devices() {
  static const Devices found = [] {
    Devices d;
    d.status = cudaGetDeviceCount(&d.count);
    if (d.status != cudaSuccess) d.count = 0;
    static_cast<void>(cudaGetLastError());
    return d;
  }();
  return found;
}
}  // namespace detail

/// The number of GPUs that this process can use; 0 without GPU or driver.
inline int device_count() { return detail::devices().count; }

/// Throws DeviceError, with a list of the machine's devices, unless `device` exists.
inline void require(Cuda device) {
  const auto& found = detail::devices();
  if (device.index >= 0 && device.index < found.count) [[likely]]
    return;
  if (found.count == 0)
    fail<DeviceError>("device ", device, " does not exist: this machine has no CUDA device (",
                      found.status == cudaSuccess ? "none was found" : cudaGetErrorString(found.status), ")");
  fail<DeviceError>("device ", device, " does not exist: this machine has ", found.count,
                    " CUDA devices, numbered from 0");
}

/// While it lives, `device` is this thread's current device. Throws DeviceError if it doesn't exist.
class DeviceGuard {
 public:
  explicit DeviceGuard(Cuda device) {
    require(device);
    CHORUS_CUDA_CHECK(cudaGetDevice(&before_));
    if (before_ == device.index)
      before_ = -1;
    else
      CHORUS_CUDA_CHECK(cudaSetDevice(device.index));
  }
  ~DeviceGuard() {
    if (before_ >= 0) static_cast<void>(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;
};

/// Deletes a CUDA object with `free`.
template <auto free>
struct GiveBack {
  template <class Handle>
  void operator()(Handle handle) const {
    static_cast<void>(free(handle));
  }
};
template <class Handle, auto free>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, GiveBack<free>>;

/// Pinned host memory, for copies from and to devices without staging.
inline Owned<void*, cudaFreeHost> pinned_memory(std::size_t bytes) {
  void* data = nullptr;
  CHORUS_CUDA_CHECK(cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  return Owned<void*, cudaFreeHost>(data);
}

}  // namespace chorus::cuda
