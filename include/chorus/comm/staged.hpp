#pragma once
/// `StagedCommunicator`: any engine of host memory as a Communicator of GPU memory, for machines without NCCL. Needs
/// CUDA; link chorus::cuda.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/tensor/memory.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm {

namespace detail {

/// The calls under way, with their copies in pinned memory. They end in the order of their calls.
class StagedCalls final : public Progress {
 public:
  explicit StagedCalls(Engine& host) : host_(host) {}

  void now(const Call& call, Cuda device) {
    const std::lock_guard lock(mutex_);
    Staged staged = copy_in(call, device);
    host_.now(staged.on_host);
    copy_out(staged);
  }
  std::uint64_t later(const Call& call, Cuda device) {
    const std::lock_guard lock(mutex_);
    Staged staged = copy_in(call, device);
    staged.work = host_.later(staged.on_host);
    calls_.push_back(std::move(staged));
    return finished_ + calls_.size();
  }

  void wait(std::uint64_t ticket) override {
    const std::lock_guard lock(mutex_);
    while (finished_ < ticket) finish_first();
  }
  bool done(std::uint64_t ticket) override {
    const std::lock_guard lock(mutex_);
    while (finished_ < ticket && !failure_ && calls_.front().work.done()) try {
        finish_first();
      } catch (const Error&) {
        break;  // `wait` throws it
      }
    return finished_ >= ticket || failure_;
  }

 private:
  using Buffers = std::multimap<std::size_t, cuda::Owned<void*, cudaFreeHost>>;  // by size
  struct Staged {
    Call call, on_host;
    Cuda device;
    Buffers::node_type buffer;
    Work work = {};  // destroyed first: it uses the buffer
  };

  Staged copy_in(const Call& call, Cuda device) {
    check<UsageError>(!cuda::is_capturing(cuda::current_stream(device)), comm::name(call.op), ": ", host_.name(),
                      " carries it through the host's memory, which can't be captured; train without Graphed, or build "
                      "with NCCL");
    const auto ranks = static_cast<std::size_t>(host_.size);
    const std::size_t bytes = call.count * call.reduction.element;
    const std::size_t in = bytes * (call.op == Op::reduce_scatter ? ranks : 1),
                      out = bytes * (call.op == Op::all_gather ? ranks : 1);
    // A chunk to gather lies at its own place in the result.
    const std::size_t out_at = call.op == Op::reduce_scatter ? (in + 63) / 64 * 64 : 0,
                      in_at = call.op == Op::all_gather ? bytes * static_cast<std::size_t>(host_.rank) : 0;
    Staged staged{call, call, device, buffer(std::max(in, out_at + out))};
    auto* const memory = static_cast<std::byte*>(staged.buffer.mapped().get());
    if (call.in != nullptr) staged.on_host.in = memory + in_at;
    if (call.out != nullptr) staged.on_host.out = memory + out_at;
    const bool only_receives = call.op == Op::broadcast && call.peer != host_.rank;
    if (call.in != nullptr && !only_receives) copy_bytes(Cpu{}, memory + in_at, device, call.in, in);
    return staged;
  }
  void copy_out(Staged& staged) {
    const Call& call = staged.call;
    const auto ranks = static_cast<std::size_t>(call.op == Op::all_gather ? host_.size : 1);
    if (call.out != nullptr && !(call.op == Op::broadcast && call.peer == host_.rank))
      copy_bytes(staged.device, call.out, Cpu{}, staged.on_host.out, ranks * call.count * call.reduction.element);
    spare_.insert(std::move(staged.buffer));
  }
  void finish_first() {
    if (failure_) std::rethrow_exception(failure_);
    try {
      calls_.front().work.wait();
      copy_out(calls_.front());
    } catch (...) {
      failure_ = std::current_exception();
      calls_.clear();
      throw;
    }
    calls_.erase(calls_.begin());
    ++finished_;
  }

  // The smallest spare one that is large enough, or a new one.
  Buffers::node_type buffer(std::size_t bytes) {
    const auto found = spare_.lower_bound(bytes);
    return spare_.extract(found != spare_.end() ? found : spare_.emplace(bytes, cuda::pinned_memory(bytes)));
  }

  Engine& host_;
  std::mutex mutex_;
  Buffers spare_;
  std::vector<Staged> calls_;
  std::uint64_t finished_ = 0;
  std::exception_ptr failure_;
};

class StagedEngine final : public Engine {
 public:
  explicit StagedEngine(AnyCommunicator& host)
      : Engine(host.rank(), host.size(), host.engine().members),
        host_(host.engine()),
        calls_(std::make_shared<StagedCalls>(host_)) {}

  void now(const Call& call) override {
    const auto device = device_of(call);
    return device.index < 0 ? host_.now(call) : calls_->now(call, device);
  }
  Work later(const Call& call) override {
    const auto device = device_of(call);
    return device.index < 0 ? host_.later(call) : Work(calls_, calls_->later(call, device));
  }
  bool takes_device_memory() const override { return true; }
  void abort(std::string_view why) noexcept override { host_.abort(why); }
  std::string_view name() const override { return host_.name(); }
  std::chrono::nanoseconds busy() const override { return host_.busy(); }
  Clock::time_point time() const override { return host_.time(); }
  std::string record() const override { return host_.record(); }
  Algorithm all_reduce() const override { return host_.all_reduce(); }
  std::string trouble() override { return host_.trouble(); }

 private:
  // The device with the call's memory; -1: the host.
  static Cuda device_of(const Call& call) {
    if (call.count == 0) return Cuda{-1};
    const Cuda in = device_of(call.in), out = device_of(call.out);
    check<UsageError>(in == out || call.in == nullptr || call.out == nullptr, comm::name(call.op),
                      ": expected both arguments in one device's memory");
    return call.in != nullptr ? in : out;
  }
  static Cuda device_of(const void* memory) {
    if (memory == nullptr) return Cuda{-1};
    cudaPointerAttributes attributes{};
    CHORUS_CUDA_CHECK(cudaPointerGetAttributes(&attributes, memory));
    return Cuda{attributes.type == cudaMemoryTypeDevice ? attributes.device : -1};
  }

  Engine& host_;
  std::shared_ptr<StagedCalls> calls_;
};

}  // namespace detail

/// A Communicator for numbers in GPUs' memory, and in the host's. A call waits for the present work of the calling
/// thread's stream, copies its numbers to the host, and makes the same call over `host`; waiting for the call copies
/// the result back. So results, deadlines and failures are those of `host`. Calls of device memory can't be captured
/// (Graphed): UsageError. Policies on GPUs use it if the program is built without NCCL.
class StagedCommunicator : public AnyCommunicator {
 public:
  /// `host` must outlive this. Each rank may use any of its devices.
  explicit StagedCommunicator(AnyCommunicator& host) : AnyCommunicator(std::make_shared<detail::StagedEngine>(host)) {}
};

static_assert(Communicator<StagedCommunicator>);

}  // namespace chorus::comm
