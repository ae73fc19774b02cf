#pragma once
/// Streams and events. All threads share one compute stream per device, so that a tensor may pass from one thread to
/// another as on the CPU: a thread's work runs after everything that was enqueued before. A thread that needs its own
/// stream (communication, copies, graph capture) takes one by StreamScope, and orders it by `order`.

#include <array>
#include <chorus/core/cuda/runtime.hpp>
#include <chorus/core/replaced.hpp>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

namespace chorus::cuda {

/// Owns a stream that doesn't wait for the legacy default stream. Wait for its work before you destroy it: memory that
/// was taken on it stays with its handle, which the next stream may get.
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
  operator cudaStream_t() const { return get(); }  // NOLINT: it stands for the stream

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
  static std::array<cudaStream_t, Cuda::max_devices> streams{};  // never destroyed: tensors outlive everything
  const auto i = static_cast<std::size_t>(device.index);
  std::call_once(once[i], [&] {
    const DeviceGuard guard(device);
    CHORUS_CUDA_CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
  });
  return streams[i];
}

/// The stream of this thread's work on `device`: its StreamScope's, or the compute stream.
inline cudaStream_t current_stream(Cuda device) {
  const cudaStream_t own = detail::stream_of_thread(device);
  return own != nullptr ? own : compute_stream(device);
}

/// While it lives, this thread's work on `device`, and the memory it takes there, belongs to `stream`.
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
/// Returns false. For the runtime the answer was an error, which the next call must not find.
inline bool not_ready() {
  static_cast<void>(cudaGetLastError());
  return false;
}
}  // namespace detail

/// A place in a stream's work, for other streams to wait for.
class Event {
 public:
  explicit Event(Cuda device) {
    require(device);
    const DeviceGuard guard(device);
    cudaEvent_t event = nullptr;
    CHORUS_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    event_.reset(event);
  }

  /// Marks the work that `stream`, of this event's device, has so far.
  void record(cudaStream_t stream) const { CHORUS_CUDA_CHECK(cudaEventRecord(get(), stream)); }
  /// Later work of `stream`, of any device, runs after the mark.
  void hold(cudaStream_t stream) const { CHORUS_CUDA_CHECK(cudaStreamWaitEvent(stream, get(), 0)); }
  /// Whether all marked work is done; true if nothing was ever marked.
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

/// Later work of `later` runs after the present work of `earlier`, a stream of `device`. It may be captured: then
/// `later` joins the capture.
inline void order(Cuda device, cudaStream_t earlier, cudaStream_t later) {
  if (earlier == later) return;
  const Event event(device);
  event.record(earlier);
  event.hold(later);
}

/// The default time limit of `synchronize`. It is far above any kernel's time, and ends a wait for peers that are gone.
inline constexpr std::chrono::milliseconds default_wait{600'000};

/// Calls `done()` until it is true. Throws TimeoutError after `limit`.
template <class Done>
void wait_until(const Done& done, const char* what, std::chrono::milliseconds limit = default_wait) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  while (!done()) {
    const auto waited = Clock::now() - start;
    if (waited > limit) fail<TimeoutError>("CUDA: ", what, " was not done after ", limit.count(), " ms");
    if (waited > std::chrono::milliseconds(1)) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

/// Waits until `stream` has done all its work. Throws DeviceError for errors of that work, and TimeoutError.
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
