#pragma once
/// NCCL as a Communicator of GPU memory: `NcclCommunicator<>`, and among the GPUs of a DataParallel. Needs CUDA and
/// NCCL; link chorus::cuda.

#include <nccl.h>

#include <chorus/comm/connect.hpp>
#include <chorus/comm/meeting/rendezvous_messages.hpp>
#include <chorus/comm/nccl/gpu_seats.hpp>
#include <chorus/comm/nccl/nccl_device_group.hpp>
#include <chorus/comm/nccl/nccl_engine.hpp>
#include <chorus/core/cuda/stream.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>

namespace chorus::comm {

/// The calls of NCCL and of the CUDA runtime that NcclCommunicator makes; each returns the library's code. Streams and
/// events are the runtime's, so errors are codes here, not exceptions as elsewhere in chorus.
struct NcclApi {
  using Comm = ncclComm_t;
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;
  using UniqueId = ncclUniqueId;
  using RedOp = ncclRedOp_t;

  static constexpr int success = 0, in_progress = ncclInProgress, not_ready = cudaErrorNotReady;
  static_assert(static_cast<int>(ncclSuccess) == success && static_cast<int>(cudaSuccess) == success);

  static int unique_id(UniqueId& id) { return ncclGetUniqueId(&id); }
  static int init(Comm& comm, int size, const UniqueId& id, int rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return ncclCommInitRankConfig(&comm, size, id, rank, &config);
  }
  static int async_error(Comm comm, int& state) {
    ncclResult_t result = ncclSuccess;
    const int code = ncclCommGetAsyncError(comm, &result);
    state = result;
    return code;
  }
  static int finalize(Comm comm) { return ncclCommFinalize(comm); }
  static void destroy(Comm comm) { static_cast<void>(ncclCommDestroy(comm)); }
  static void abort(Comm comm) { static_cast<void>(ncclCommAbort(comm)); }
  static std::string nccl_error(int code, Comm comm) {
    const char* more = ncclGetLastError(comm);
    return cat(ncclGetErrorString(static_cast<ncclResult_t>(code)), more != nullptr && *more != '\0' ? ": " : "",
               more != nullptr ? more : "",
               code == ncclInvalidUsage ? " (one GPU for several ranks? See share_gpu in chorus/comm/nccl.hpp)" : "");
  }

  static RedOp reduce_op(ReduceOp op) {
    return op == ReduceOp::sum ? ncclSum : op == ReduceOp::min ? ncclMin : ncclMax;
  }
  static int scaled_sum(RedOp& op, double scale, DType dtype, Comm comm) {
    union {
      double f64;
      float f32;
      std::uint16_t narrow;
    } scalar{};
    if (dtype == DType::f64) scalar.f64 = scale;
    if (dtype == DType::f32) scalar.f32 = static_cast<float>(scale);
    if (dtype == DType::bfloat16) scalar.narrow = bf16(scale).bits();
    if (dtype == DType::f16) scalar.narrow = half(scale).bits();
    return ncclRedOpCreatePreMulSum(&op, &scalar, type(dtype), ncclScalarHostImmediate, comm);
  }
  static void destroy_operator(RedOp op, Comm comm) { static_cast<void>(ncclRedOpDestroy(op, comm)); }

  static int all_reduce(const void* in, void* out, std::size_t n, DType dtype, RedOp op, Comm comm, Stream stream) {
    return ncclAllReduce(in, out, n, type(dtype), op, comm, stream);
  }
  static int reduce_scatter(const void* in, void* out, std::size_t n, DType dtype, RedOp op, Comm comm, Stream stream) {
    return ncclReduceScatter(in, out, n, type(dtype), op, comm, stream);
  }
  static int reduce(const void* in, void* out, std::size_t n, DType dtype, RedOp op, int root, Comm comm,
                    Stream stream) {
    return ncclReduce(in, out, n, type(dtype), op, root, comm, stream);
  }
  static int broadcast(const void* in, void* out, std::size_t bytes, int root, Comm comm, Stream stream) {
    return ncclBroadcast(in, out, bytes, ncclUint8, root, comm, stream);
  }
  static int all_gather(const void* in, void* out, std::size_t bytes, Comm comm, Stream stream) {
    return ncclAllGather(in, out, bytes, ncclUint8, comm, stream);
  }
  static int send(const void* in, std::size_t bytes, int peer, Comm comm, Stream stream) {
    return ncclSend(in, bytes, ncclUint8, peer, comm, stream);
  }
  static int recv(void* out, std::size_t bytes, int peer, Comm comm, Stream stream) {
    return ncclRecv(out, bytes, ncclUint8, peer, comm, stream);
  }
  static int group_start() { return ncclGroupStart(); }
  static int group_end() { return ncclGroupEnd(); }

  static bool on_device(const void* memory) {
    const Unrestricted scope;
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, memory) == cudaSuccess)
      return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    static_cast<void>(cudaGetLastError());
    return false;
  }
  static int use_device(int device) { return cudaSetDevice(device); }
  /// With the highest priority: a bucket's reduction precedes blocks of kernels that wait for a processor.
  static int create_stream(Stream& stream) {
    int lowest = 0, highest = 0;
    const cudaError_t status = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    return status != cudaSuccess ? status : cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest);
  }
  static void destroy_stream(Stream stream) { static_cast<void>(cudaStreamDestroy(stream)); }
  static Stream compute_stream(int device) { return cuda::current_stream(Cuda{device}); }
  static bool capturing(Stream stream) { return cuda::is_capturing(stream); }
  static int create_event(Event& event) {
    const Unrestricted scope;
    return cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  }
  static void destroy_event(Event event) { static_cast<void>(cudaEventDestroy(event)); }
  static int record(Event event, Stream stream) { return cudaEventRecord(event, stream); }
  static int wait(Stream stream, Event event) { return cudaStreamWaitEvent(stream, event, 0); }
  static int query(Event event) {
    const int code = cudaEventQuery(event);
    if (code == not_ready) static_cast<void>(cudaGetLastError());  // clears it, so that the next call doesn't report it
    return code;
  }
  static std::string cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

 private:
  /// While it lives, this thread's calls don't invalidate a capture that it has begun.
  class Unrestricted {
   public:
    Unrestricted() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
    ~Unrestricted() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
    Unrestricted(const Unrestricted&) = delete;
    Unrestricted& operator=(const Unrestricted&) = delete;

   private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  };

  static ncclDataType_t type(DType dtype) {  // 16-bit integers are never used
    constexpr ncclDataType_t types[] = {ncclUint8,    ncclUint8,   ncclInt8,   ncclUint8,  ncclUint8,
                                        ncclInt32,    ncclUint32,  ncclInt64,  ncclUint64, ncclFloat16,
                                        ncclBfloat16, ncclFloat32, ncclFloat64};
    return types[static_cast<std::size_t>(dtype)];
  }
};

/// Lets several ranks, each a process of its own, share one GPU, for tests on a machine with only one: NCCL then takes
/// each for another host and uses sockets, slowly; on loopback if all ranks are on `one_machine`. Call it before the
/// process's first call of NCCL. It sets NCCL_HOSTID, NCCL_NET, NCCL_SOCKET_IFNAME and NCCL_IB_DISABLE unless they are
/// set.
inline void share_gpu(int rank, bool one_machine = true) {
  setenv("NCCL_HOSTID", cat("chorus-rank-", rank).c_str(), 0);
  setenv("NCCL_NET", "Socket", 0);
  if (one_machine) setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  setenv("NCCL_IB_DISABLE", "1", 0);
}

/// Calls share_gpu on the ranks whose GPU another rank holds, too. All ranks call it, each with its own GPU, before
/// NCCL's first call. Throws DeviceError if there is no such GPU.
inline void settle_gpus(AnyCommunicator& ranks, int device) {
  cudaDeviceProp facts{};
  check<DeviceError>(cudaGetDeviceProperties(&facts, device) == cudaSuccess, "nccl: this machine has no GPU ", device);
  GpuSeat own{.machine = detail::machine_id()};
  std::memcpy(own.uuid.data(), facts.uuid.bytes, own.uuid.size());
  if (const auto found = gpu_sharing(ranks, own); found.shared) share_gpu(ranks.rank(), found.one_machine);
}

static_assert(Communicator<NcclCommunicator<>>);

namespace detail {

/// For Backend::nccl: a rank on the GPU with its local rank's number, and its communicator for host memory.
struct NcclRank {
  AnyCommunicator control;
  NcclEngine<NcclApi> engine;

  explicit NcclRank(const World& world)
      : control(connect(world)), engine(control, settled(control, world.local_rank), world.timeout, {}) {}
  static int settled(AnyCommunicator& ranks, int local_rank) {
    int count = 0;
    check<DeviceError>(cudaGetDeviceCount(&count) == cudaSuccess && count > 0, "nccl: this machine has no GPU");
    settle_gpus(ranks, local_rank % count);
    return local_rank % count;
  }
};
inline std::shared_ptr<Engine> nccl_engine(const World& world) {
  const auto rank = std::make_shared<NcclRank>(world);
  return {rank, &rank->engine};
}
inline std::unique_ptr<DeviceGroup> nccl_device_group(std::span<const int> devices, std::chrono::milliseconds timeout) {
  return std::make_unique<NcclDeviceGroup<NcclApi>>(devices, timeout);
}
inline const bool nccl_registered =
    (device_group_maker() = nccl_device_group, register_backend(Backend::nccl, nccl_engine));

}  // namespace detail

}  // namespace chorus::comm
