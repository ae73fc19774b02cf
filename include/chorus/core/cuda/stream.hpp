#pragma once
/// Streams and events. All threads share one compute stream per device, so that tensors may be passed between threads
/// as on the CPU: a thread's work runs after all earlier work. A thread that needs its own stream (communication,
/// copies, graph capture) sets one with StreamScope and orders it with `order`.

#include <array>
#include <chorus/core/cuda/runtime.hpp>
#include <chorus/core/replaced.hpp>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

namespace chorus::cuda {

/// Owns a stream that does not synchronise with the legacy default stream. Wait for its work before you destroy it: its
/// memory pool belongs to the handle's value, which a new stream may get.
class Stream {
 public:
  explicit Stream(Cuda device) : device_(device) {
    require(device);
    const DeviceGuard guard(device);
    cudaStream_t stream = nullptr;
    CHORUS_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_.reset(stream);
  }

  Cuda device() const { return device_; }
  cudaStream_t get() const { return stream_.get(); }
  operator cudaStream_t() const { return get(); }  // NOLINT: converts to the handle

 private:
  Cuda device_;
  Owned<cudaStream_t, cudaStreamDestroy> stream_;
};

namespace detail {
inline cudaStream_t& stream_of_thread(Cuda device) {
  require(device);
  thread_local std::array<cudaStream_t, Cuda::max_devices> streams{};
  return streams[static_cast<std::size_t>(device.index)];
}
}  // namespace detail

/// The compute stream that all threads share. Throws DeviceError if the device does not exist.
inline cudaStream_t compute_stream(Cuda device) {
  require(device);
  static std::array<std::once_flag, Cuda::max_devices> once;
  static std::array<cudaStream_t, Cuda::max_devices> streams{};  // never destroyed: tensors may outlive everything
  const auto i = static_cast<std::size_t>(device.index);
  std::call_once(once[i], [&] {
    const DeviceGuard guard(device);
    CHORUS_CUDA_CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
  });
  return streams[i];
}

/// This thread's stream on `device`: that of its StreamScope, else the compute stream.
inline cudaStream_t current_stream(Cuda device) {
  const cudaStream_t own = detail::stream_of_thread(device);
  return own != nullptr ? own : compute_stream(device);
}

/// While it lives, this thread's work and allocations on `device` use `stream`.
struct StreamScope : chorus::detail::Replaced<cudaStream_t> {
  StreamScope(Cuda device, cudaStream_t stream) : Replaced(detail::stream_of_thread(device), stream) {}
  explicit StreamScope(const Stream& stream) : StreamScope(stream.device(), stream.get()) {}
};

/// Whether work on `stream` is being captured into a graph.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CHORUS_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

namespace detail {
/// Returns false, and clears the runtime's "not ready" error for the next call.
inline bool not_ready() {
  static_cast<void>(cudaGetLastError());
  return false;
}
}  // namespace detail

/// A point in a stream's work that other streams can wait for.
class Event {
 public:
  explicit Event(Cuda device) {
    require(device);
    const DeviceGuard guard(device);
    cudaEvent_t event = nullptr;
    CHORUS_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    event_.reset(event);
  }

  /// Marks the current end of the work on `stream`, a stream of the event's device.
  void record(cudaStream_t stream) const { CHORUS_CUDA_CHECK(cudaEventRecord(get(), stream)); }
  /// Makes later work on `stream`, of any device, wait for the mark.
  void hold(cudaStream_t stream) const { CHORUS_CUDA_CHECK(cudaStreamWaitEvent(stream, get(), 0)); }
  /// Whether the marked work is done; true if nothing was marked.
  bool done() const {
    const cudaError_t status = cudaEventQuery(get());
    if (status == cudaErrorNotReady) return detail::not_ready();
    CHORUS_CUDA_CHECK(status);
    return true;
  }
  cudaEvent_t get() const { return event_.get(); }

 private:
  Owned<cudaEvent_t, cudaEventDestroy> event_;
};

/// Makes later work on `later` wait for the current work on `earlier`, a stream of `device`. In a graph capture `later`
/// joins the capture.
inline void order(Cuda device, cudaStream_t earlier, cudaStream_t later) {
  if (earlier == later) return;
  const Event event(device);
  event.record(earlier);
  event.hold(later);
}

/// The default timeout of `synchronize`: far longer than any kernel, but it ends a wait for lost peers.
inline constexpr std::chrono::milliseconds default_wait{600'000};
/// A wait asks without a pause for that long. A sleep may end 70 us late, 0.3 % of such a wait.
inline constexpr std::chrono::milliseconds spin{20};

/// Waits until `done()` is true. Throws TimeoutError after `limit`.
template <class Done>
void wait_until(const Done& done, const char* what, std::chrono::milliseconds limit = default_wait) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  while (!done()) {
    const auto waited = Clock::now() - start;
    if (waited > limit) fail<TimeoutError>("CUDA: ", what, " was not done after ", limit.count(), " ms");
    if (waited > spin) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

/// Waits until `stream` is idle. Throws DeviceError for errors of its work, and TimeoutError.
inline void synchronize(cudaStream_t stream, std::chrono::milliseconds limit = default_wait) {
  wait_until(
      [stream] {
        const cudaError_t status = cudaStreamQuery(stream);
        if (status == cudaErrorNotReady) return detail::not_ready();
        CHORUS_CUDA_CHECK(status);
        return true;
      },
      "a stream's work", limit);
}

}  // namespace chorus::cuda
