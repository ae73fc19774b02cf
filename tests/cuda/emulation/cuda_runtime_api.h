#pragma once
// A CUDA runtime that computes on the CPU, for tests on machines without a GPU. Three devices, whose memory is the
// host's. Streams do what they are given as late as they may: when somebody waits for them, be it the host or another
// stream, so that numbers are wrong where an order is missing. Kernels run block by block, with a fiber for each thread
// that waits at a barrier; threads of a block that don't meet at the same barriers end the program. order.h: in which
// order, and without which barrier.
#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "order.h"
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

#define __host__
#define __device__
#define __global__
#define __grid_constant__

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotReady = 600,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorTooManyPeers = 711,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureIsolation = 905,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
inline constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocPortable = 1,
                          cudaHostAllocMapped = 2;

// Of what streams are given while they capture, copies of the calls, in order.
struct CUgraph_st {
  std::vector<std::function<void()>> calls;
};
struct CUstream_st {
  std::shared_ptr<CUgraph_st> capture;
  std::deque<std::function<void()>> pending;
  std::size_t given = 0, done = 0;
  bool destroyed = false;

  void run(std::function<void()> call);
  /// Does what it was given first, `until` calls in all.
  void finish(std::size_t until);
};
/// A place in a stream's work.
struct CUevent_st {
  CUstream_st* stream = nullptr;
  std::size_t place = 0;
  std::shared_ptr<CUgraph_st> capture;
};
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraph_st*;
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace emulation {

inline constexpr int devices = 3;

struct Counters {
  static constexpr std::size_t limit = std::size_t{1} << 32;  ///< bytes of a device
  std::atomic<std::size_t> launches{0};
  std::atomic<std::size_t> waiting_copies{0};  ///< to the host, behind work that the copy itself would wait for
  /// How often the next calls answer so: queries that nothing is done yet, the others an error.
  std::atomic<int> not_ready{0}, failing_waits{0}, failing_host_allocations{0}, too_many_peers{0};
  std::atomic<int> failing_products{0}, products_that_leave_an_error{0};
  std::atomic<bool> errors_persist{false};  ///< as those of a broken device, whoever asks for them
  std::array<int, devices> processors = {4, 4, 4};
};
inline Counters& counters() {
  static Counters all;
  return all;
}

inline int& current_device() {
  thread_local int device = 0;
  return device;
}

/// This thread's last error, until it is asked for.
inline cudaError_t& last_error() {
  thread_local cudaError_t error = cudaSuccess;
  return error;
}
/// Whether a call shall fail: then with `error`.
inline bool fails(std::atomic<int>& times, cudaError_t error) {
  if (times <= 0 || times-- <= 0) return false;
  return last_error() = error, true;
}

/// Held by every call that touches streams.
inline std::recursive_mutex& runtime() {
  static std::recursive_mutex mutex;
  return mutex;
}
/// All streams that ever were, so that the use of one that is gone is seen.
inline std::vector<std::unique_ptr<CUstream_st>>& streams() {
  static std::vector<std::unique_ptr<CUstream_st>> all;
  return all;
}
inline void finish_all() {
  const std::lock_guard lock(runtime());
  for (std::size_t i = 0; i < streams().size(); ++i) streams()[i]->finish(streams()[i]->given);
}
/// The devices' memory: the end and the device of each block, by its begin.
struct DeviceMemory {
  std::mutex mutex;
  std::map<const char*, std::pair<const char*, int>> blocks;
};
inline DeviceMemory& device_memory() {
  static DeviceMemory memory;
  return memory;
}
/// Captures that this thread has begun: calls that a capture forbids are errors in it.
inline int& captures() {
  thread_local int count = 0;
  return count;
}
inline CUstream_st* alive(CUstream_st* stream) {
  if (!stream->destroyed) return stream;
  std::fprintf(stderr, "emulated CUDA: a stream is used that was destroyed\n");
  std::abort();
}

/// A stack that is left and come back to. A new one begins by its context; after that jumps are enough, and call no
/// system. The thread sanitizer knows contexts alone, and wants to be told.
struct Stack {
  ucontext_t context;
  jmp_buf place;
  bool is_new = false;
#if defined(__SANITIZE_THREAD__)
  void* known_as = nullptr;
#endif

  /// Goes on in `to`; returns when somebody comes back to this one.
  void leave_for(Stack& to) {
    const bool begins = std::exchange(to.is_new, false);
#if defined(__SANITIZE_THREAD__)
    if (begins) to.known_as = __tsan_create_fiber(0);
    known_as = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to.known_as, 0);
    swapcontext(&context, &to.context);
#else
    if (_setjmp(place) != 0) return;
    if (begins) setcontext(&to.context);
    _longjmp(to.place, 1);
#endif
  }
};

/// The threads of one block: each fiber runs threads to their end, one after the other, until one waits at a barrier.
class Block {
 public:
  uint3 thread{}, block{};
  dim3 threads, blocks;

  void run(dim3 grid, unsigned count, const std::function<void()>& kernel) {
    const std::lock_guard lock(mutex_);
    threads = dim3(count);
    blocks = grid;
    kernel_ = &kernel;
    order_.resize(count);
    std::iota(order_.begin(), order_.end(), 0u);
    const auto at = [](unsigned i, unsigned size) { return seed == 0 ? i : size - 1 - i; };
    for (unsigned z = 0; z < grid.z; ++z)
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
          block = {at(x, grid.x), at(y, grid.y), at(z, grid.z)};
          run_block();
        }
  }

  /// The barrier; true in all threads where `value` was in any.
  bool wait(bool value) {
    any_ = any_ || value;
    Fiber* self = running_;
    self->thread = thread.x;
    waiting_.push_back(self);
    self->stack.leave_for(main_);
    return result_;
  }

  static Block& get() {
    static Block block;
    return block;
  }

 private:
  struct Fiber {
    Stack stack;
    // Much of it is never touched: sanitizers make frames several times as large.
    static constexpr std::size_t bytes = 1 << 20;
    std::unique_ptr<char[]> memory{new char[bytes]};
    unsigned thread = 0;
  };

  // What a fiber does: threads of one block after another.
  static void work() {
    Block& self = get();
    for (;;) {
      while (self.next_ < self.threads.x) {
        self.thread.x = self.order_[self.next_++];
        (*self.kernel_)();
        ++self.finished_;
      }
      Fiber* done = self.running_;
      self.idle_.push_back(done);
      done->stack.leave_for(self.main_);
    }
  }

  Fiber* new_fiber() {
    all_.push_back(std::make_unique<Fiber>());
    Fiber* fiber = all_.back().get();
    getcontext(&fiber->stack.context);
    fiber->stack.context.uc_stack.ss_sp = fiber->memory.get();
    fiber->stack.context.uc_stack.ss_size = Fiber::bytes;
    makecontext(&fiber->stack.context, &Block::work, 0);
    fiber->stack.is_new = true;
    return fiber;
  }

  void run(Fiber* fiber) {
    running_ = fiber;
    main_.leave_for(fiber->stack);
  }

  void run_block() {
    next_ = finished_ = 0;
    if (seed != 0) shuffle(order_), fill_shared();
    while (next_ < threads.x) {
      if (idle_.empty()) idle_.push_back(new_fiber());
      Fiber* fiber = idle_.back();
      idle_.pop_back();
      run(fiber);
    }
    while (!waiting_.empty()) {
      if (finished_ != 0) {
        std::fprintf(stderr, "emulated CUDA: %u of %u threads ended while the others wait at a barrier\n", finished_,
                     threads.x);
        std::abort();
      }
      result_ = any_;
      any_ = false;
      std::vector<Fiber*> now;
      now.swap(waiting_);
      if (seed != 0) shuffle(now);
      for (Fiber* fiber : now) {
        thread.x = fiber->thread;
        run(fiber);
      }
    }
  }

  std::mutex mutex_;
  const std::function<void()>* kernel_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> all_;
  std::vector<Fiber*> idle_, waiting_;
  std::vector<unsigned> order_;  // of threads
  Fiber* running_ = nullptr;
  Stack main_;
  unsigned next_ = 0, finished_ = 0;
  bool any_ = false, result_ = false;
};

}  // namespace emulation

inline void CUstream_st::run(std::function<void()> call) {
  const std::lock_guard lock(emulation::runtime());
  emulation::alive(this);
  if (capture) return capture->calls.push_back(std::move(call));
  pending.push_back(std::move(call));
  ++given;
}
inline void CUstream_st::finish(std::size_t until) {
  const std::lock_guard lock(emulation::runtime());
  while (done < until) {
    const auto call = std::move(pending.front());
    pending.pop_front();
    ++done;
    call();
  }
}

#define threadIdx (::emulation::Block::get().thread)
#define blockIdx (::emulation::Block::get().block)
#define blockDim (::emulation::Block::get().threads)
#define gridDim (::emulation::Block::get().blocks)
#define CHORUS_LAUNCH_KERNEL(KERNEL, BLOCKS, THREADS, STREAM, ...)                                           \
  (++::emulation::counters().launches, (STREAM)->run([=, grid = dim3(BLOCKS), threads = unsigned{THREADS}] { \
    ::emulation::Block::get().run(grid, threads, [&] { KERNEL(__VA_ARGS__); });                              \
  }))

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (!emulation::is_left_out(file, line)) emulation::Block::get().wait(false);
}
inline int __syncthreads_or(int value, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulation::is_left_out(file, line) ? value : emulation::Block::get().wait(value != 0);
}
inline void __threadfence_system() {}
inline unsigned atomicCAS(unsigned* place, unsigned expected, unsigned value) {
  const unsigned before = *place;
  if (before == expected) *place = value;
  return before;
}

inline const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    default:
      return "invalid argument";
  }
}
inline const char* cudaGetErrorName(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorInvalidValue";
}
inline cudaError_t cudaGetLastError() {
  return emulation::counters().errors_persist ? emulation::last_error()
                                              : std::exchange(emulation::last_error(), cudaSuccess);
}
inline cudaError_t cudaPeekAtLastError() { return emulation::last_error(); }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = emulation::devices, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = emulation::current_device(), cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emulation::devices) return cudaErrorInvalidDevice;
  return emulation::current_device() = device, cudaSuccess;
}
inline cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (emulation::captures() > 0) return cudaErrorStreamCaptureUnsupported;
  if (bytes > emulation::counters().limit) return cudaErrorMemoryAllocation;
  *data = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(*data, 0xFF, bytes);  // NaN, so that nobody relies on zeros
  const std::lock_guard lock(emulation::device_memory().mutex);
  const char* const begin = static_cast<char*>(*data);
  emulation::device_memory().blocks[begin] = {begin + bytes, emulation::current_device()};
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  if (emulation::captures() > 0) return cudaErrorStreamCaptureUnsupported;
  emulation::finish_all();
  const std::lock_guard lock(emulation::device_memory().mutex);
  emulation::device_memory().blocks.erase(static_cast<char*>(data));
  return std::free(data), cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  if (emulation::captures() > 0) return cudaErrorStreamCaptureUnsupported;
  if (emulation::fails(emulation::counters().failing_host_allocations, cudaErrorMemoryAllocation))
    return cudaErrorMemoryAllocation;
  return *data = std::malloc(bytes), cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
enum cudaMemoryType { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2 };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const std::lock_guard lock(emulation::device_memory().mutex);
  const auto& blocks = emulation::device_memory().blocks;
  auto at = blocks.upper_bound(static_cast<const char*>(data));
  const bool found = at != blocks.begin() && data < (--at)->second.first;
  *attributes = {found ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, found ? at->second.second : -2};
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = emulation::counters().limit;
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  return *value = emulation::counters().processors[static_cast<std::size_t>(device)], cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const std::lock_guard lock(emulation::runtime());
  emulation::streams().push_back(std::make_unique<CUstream_st>());
  return *stream = emulation::streams().back().get(), cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stream->finish(emulation::alive(stream)->given);
  return stream->destroyed = true, cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (emulation::alive(stream)->capture) return cudaErrorStreamCaptureUnsupported;
  if (emulation::fails(emulation::counters().not_ready, cudaErrorNotReady)) return cudaErrorNotReady;
  return stream->finish(stream->given), cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = emulation::alive(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(emulation::runtime());
  return *event = {emulation::alive(stream), stream->given, stream->capture}, cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->capture) return cudaErrorStreamCaptureUnsupported;
  if (emulation::fails(emulation::counters().not_ready, cudaErrorNotReady)) return cudaErrorNotReady;
  if (event->stream != nullptr) event->stream->finish(event->place);
  return cudaSuccess;
}
// A stream that waits for a captured one joins its capture; one that captures waits for nothing outside of it.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(emulation::runtime());
  if (emulation::fails(emulation::counters().failing_waits, cudaErrorInvalidValue)) return cudaErrorInvalidValue;
  if (event->stream == nullptr || event->capture == emulation::alive(stream)->capture) {
    if (event->stream != nullptr && !event->capture)
      stream->run([of = event->stream, place = event->place] { of->finish(place); });
    return cudaSuccess;
  }
  if (stream->capture) return cudaErrorStreamCaptureIsolation;
  return stream->capture = event->capture, cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  if (kind == cudaMemcpyDeviceToHost && !stream->pending.empty()) ++emulation::counters().waiting_copies;
  return stream->run([=] {
    std::memcpy(to, from, bytes);
    if (kind == cudaMemcpyDeviceToHost) emulation::results.add(to, bytes);
  }), cudaSuccess;
}
inline cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
  return stream->run([=] { std::memcpy(to, from, bytes); }), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  return stream->run([=] { std::memset(data, value, bytes); }), cudaSuccess;
}
inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const std::lock_guard lock(emulation::runtime());
  ++emulation::captures();
  return emulation::alive(stream)->capture = std::make_shared<CUgraph_st>(), cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard lock(emulation::runtime());
  --emulation::captures();
  const auto captured = stream->capture;
  for (const auto& joined : emulation::streams())
    if (joined->capture == captured) joined->capture = nullptr;
  return *graph = new CUgraph_st(*captured), cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = new CUgraph_st(*graph), cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const auto& call : exec->calls) stream->run(call);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) { return *possible = 1, cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return emulation::fails(emulation::counters().too_many_peers, cudaErrorTooManyPeers) ? cudaErrorTooManyPeers
                                                                                       : cudaSuccess;
}
