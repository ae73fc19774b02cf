#pragma once
/// Copies between host and GPUs, on a GPU and between GPUs, and zeroing, on the thread's current stream. A copy from
/// the host returns as soon as the source may be changed; a copy to the host returns when the data has arrived.

#include <algorithm>
#include <array>
#include <chorus/core/cuda/fault.hpp>
#include <chorus/core/device.hpp>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <optional>

namespace chorus {

namespace cuda {

namespace detail {

/// Pinned buffers for copies from the host: the caller fills one while the device reads another.
class Staging {
 public:
  static constexpr std::size_t piece = std::size_t{4} << 20, pieces = 4;

  static Staging& of(Cuda device) {
    static auto& all = *new std::array<Staging, Cuda::max_devices>;
    return all[static_cast<std::size_t>(device.index)];
  }

  void copy(Cuda device, std::byte* to, const std::byte* from, std::size_t bytes, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    while (bytes > 0) {
      Slot& slot = slots_[next_];
      next_ = (next_ + 1) % pieces;
      if (!slot.read) {
        slot.buffer = pinned_memory(piece);
        slot.read.emplace(device);
      }
      wait_until([&] { return slot.read->done(); }, "a captured graph: copy from the host");
      const std::size_t now = std::min(bytes, piece);
      std::memcpy(slot.buffer.get(), from, now);
      CHORUS_CUDA_CHECK(cudaMemcpyAsync(to, slot.buffer.get(), now, cudaMemcpyHostToDevice, stream));
      slot.read->record(stream);
      to += now;
      from += now;
      bytes -= now;
    }
  }

 private:
  struct Slot {
    Owned<void*, cudaFreeHost> buffer;
    std::optional<Event> read;
  };
  std::mutex mutex_;
  std::array<Slot, pieces> slots_;
  std::size_t next_ = 0;
};

/// Enables direct access of `to` to `from`'s memory, if the machine supports it.
inline void enable_peer(Cuda to, Cuda from) {
  static std::array<std::once_flag, Cuda::max_devices * Cuda::max_devices> once;
  std::call_once(once[static_cast<std::size_t>(to.index * Cuda::max_devices + from.index)], [&] {
    int possible = 0;
    CHORUS_CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, to.index, from.index));
    if (possible == 0) return;  // the driver copies through the host
    const DeviceGuard guard(to);
    const cudaError_t status = cudaDeviceEnablePeerAccess(from.index, 0);
    // A device has a maximum number of peers; copies from other devices go through the host.
    if (status == cudaErrorPeerAccessAlreadyEnabled || status == cudaErrorTooManyPeers)
      static_cast<void>(cudaGetLastError());
    else
      CHORUS_CUDA_CHECK(status);
  });
}

}  // namespace detail

}  // namespace cuda

/// From the host; `from` may be changed after the return. Throws UsageError in a graph capture, which would repeat the
/// copy.
inline void copy_bytes(Cuda to_device, void* to, Cpu, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const cudaStream_t stream = cuda::current_stream(to_device);
  const cuda::DeviceGuard guard(to_device);
  check<UsageError>(!cuda::is_capturing(stream), "captured graph: copy from the host to ", to_device,
                    " is not possible; copy into the graph's inputs before a replay");
  cuda::detail::Staging::of(to_device).copy(to_device, static_cast<std::byte*>(to), static_cast<const std::byte*>(from),
                                            bytes, stream);
}

/// To the host; waits for the data. Throws errors of earlier work.
inline void copy_bytes(Cpu, void* to, Cuda from_device, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const cudaStream_t stream = cuda::current_stream(from_device);
  const cuda::DeviceGuard guard(from_device);
  check<UsageError>(!cuda::is_capturing(stream), "captured graph: copy from ", from_device,
                    " to the host is not possible; read the graph's outputs after a replay");
  cuda::synchronize(stream);  // has a timeout; the copy to pageable memory would wait in the driver, without one
  CHORUS_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
  cuda::synchronize(from_device);
}

/// On one device, or between two. Between two, each device's stream waits until the other's data is ready.
inline void copy_bytes(Cuda to_device, void* to, Cuda from_device, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const cudaStream_t stream = cuda::current_stream(to_device);
  if (to_device == from_device) {
    const cuda::DeviceGuard guard(to_device);
    CHORUS_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
    return;
  }
  const cudaStream_t source = cuda::current_stream(from_device);
  cuda::detail::enable_peer(to_device, from_device);
  cuda::order(from_device, source, stream);
  {
    const cuda::DeviceGuard guard(to_device);
    CHORUS_CUDA_CHECK(cudaMemcpyPeerAsync(to, to_device.index, from, from_device.index, bytes, stream));
  }
  cuda::order(to_device, stream, source);
}

inline void zero_bytes(Cuda device, void* data, std::size_t bytes) {
  if (bytes == 0) return;
  const cuda::DeviceGuard guard(device);
  CHORUS_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, cuda::current_stream(device)));
}

}  // namespace chorus
