#pragma once
/// A stand-in for the NCCL and CUDA calls of NcclCommunicator: streams that run late and in the worst order that their
/// events allow, collectives over another communicator in host memory, faults on request, and a record of calls.

#include <atomic>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/nccl/nccl_engine.hpp>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace test {

namespace ch = chorus;

/// The streams and events of one rank, and the record of its calls. Stream 0 is the compute stream.
class StandInDevice {
 public:
  explicit StandInDevice(ch::comm::AnyCommunicator* data = nullptr) : data_(data) {}

  // Set by tests.

  /// The host is the compute stream: it runs the work at once, and waiting for an event blocks.
  bool host_computes = false;
  /// Whether an address is device memory.
  std::function<bool(const void*)> holds = [](const void*) { return true; };
  /// Error codes that the next calls of a name return, once each.
  std::map<std::string, int> refusals;
  /// How often a call returns "in progress" before it succeeds.
  int slow_accepts = 0;
  /// Streams other than the compute stream make no progress. Tests may set it while other threads read it.
  std::atomic<bool> stuck = false;
  /// A collective does not return until an abort; then it returns `code_of_blocked`.
  std::atomic<bool> blocks = false;
  int code_of_blocked = 0;
  bool capturing = false;
  /// Graphs with calls of the communicator. An abort ends the kernels, but returns only when they are destroyed.
  std::atomic<int> graphs = 0;
  int async_code = 0;
  /// Called while a group begins.
  std::function<void()> at_group_start = [] {};

  void compute(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    streams_[0].push_back({[work = std::move(work)] { return work(), true; }});
  }
  /// Work that runs until `goes_on` is false.
  void compute_while(const std::atomic<bool>& goes_on) {
    const std::lock_guard lock(mutex_);
    streams_[0].push_back({[&goes_on] { return !goes_on; }});
  }
  /// Waits until the compute stream is idle; returns false after `limit`.
  bool finish(std::chrono::milliseconds limit = std::chrono::seconds(20)) {
    const auto deadline = ch::comm::Clock::now() + limit;
    while (ch::comm::Clock::now() < deadline) {
      {
        const std::lock_guard lock(mutex_);
        pump();
        if (streams_[0].empty()) return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }
  std::vector<std::string> record() {
    const std::lock_guard lock(mutex_);
    return record_;
  }
  int count(std::string_view start) {
    const std::lock_guard lock(mutex_);
    int n = 0;
    for (const auto& line : record_) n += line.starts_with(start) ? 1 : 0;
    return n;
  }
  /// Whether exactly one abort has begun. Another thread begins it, so this waits a moment.
  bool aborted() {
    for (int turn = 0; turn < 5000 && count("abort") == 0; ++turn)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return count("abort") == 1;
  }

 private:
  friend struct StandIn;
  struct Step {
    std::function<bool()> done;  // runs or continues the step; true when it has ended
  };
  struct Event {
    int asked = 0, reached = 0;  // records that were enqueued, and that the stream has passed
    bool exists = true;
  };

  int note(std::string line) {
    const auto name = line.substr(0, line.find(' '));
    record_.push_back(std::move(line));
    const auto refusal = refusals.find(name);
    if (refusal == refusals.end()) return 0;
    const int code = refusal->second;
    refusals.erase(refusal);
    return code;
  }

  static std::string stream_name(int stream) { return stream == 0 ? "compute" : "comm"; }

  // Runs the other streams as far as possible, then one step of the compute stream. So a stream that lacks a wait runs
  // ahead, and the test notices.
  void pump() {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& [number, steps] : streams_) {
        if (number == 0 || stuck) continue;
        while (!steps.empty() && steps.front().done()) {
          steps.pop_front();
          moved = true;
        }
      }
      auto& steps = streams_[0];
      if (!steps.empty() && steps.front().done()) {
        steps.pop_front();
        moved = true;
      }
    }
  }

  void enqueue(int stream, std::function<bool()> step) { streams_[stream].push_back({std::move(step)}); }

  // A collective begins when the stream reaches it and ends when the other ranks have joined.
  void enqueue(int stream, const ch::comm::Call& call) {
    auto work = std::make_shared<std::optional<ch::comm::Work>>();
    enqueue(stream, [this, work, call] {
      if (data_ == nullptr) return true;
      if (!*work) *work = data_->engine().later(call);
      if (async_code != 0 || !(**work).done()) return false;
      try {
        (**work).wait();
        return true;
      } catch (const ch::CommError&) {
        async_code = 6;
        return false;
      }
    });
  }

  ch::comm::AnyCommunicator* data_;
  std::recursive_mutex mutex_;
  std::map<int, std::deque<Step>> streams_;
  std::vector<Event> events_;
  std::vector<std::string> record_;
  std::vector<ch::comm::Call> group_;
  std::vector<double> scales_;
  bool grouping_ = false;
};

/// The table of calls, as in NcclApi.
struct StandIn {
  using Comm = int;
  using Stream = int;
  using Event = int;
  struct UniqueId {
    char text[128];
  };
  /// A ReduceOp, or 10 + the index of a scale.
  using RedOp = int;

  static constexpr int success = 0, in_progress = 7, not_ready = 600;

  std::shared_ptr<StandInDevice> device;

  int unique_id(UniqueId& id) {
    std::snprintf(id.text, sizeof id.text, "stand-in");
    return device->note("unique_id");
  }
  int init(Comm& comm, int size, const UniqueId& id, int rank) {
    const std::lock_guard lock(device->mutex_);
    comm = 1;
    const int code = device->note(ch::cat("init rank ", rank, " of ", size, " by ", id.text));
    return code != 0 ? code : slowly();
  }
  int async_error(Comm, int& state) {
    const std::lock_guard lock(device->mutex_);
    state = device->async_code;
    if (device->slow_accepts > 0 && state == 0) {
      --device->slow_accepts;
      state = in_progress;
      if (device->slow_accepts == 0) device->note("nearly accepted");
    }
    return 0;
  }
  int finalize(Comm) {
    const std::lock_guard lock(device->mutex_);
    const int code = device->note("finalize");
    return code != 0 ? code : slowly();
  }
  void destroy(Comm) { device->note("destroy"); }
  void abort(Comm) {
    end_kernels();
    while (device->graphs > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard lock(device->mutex_);
    device->note("end of abort");
  }
  std::string nccl_error(int code, Comm) { return ch::cat("error ", code); }

  RedOp reduce_op(ch::comm::ReduceOp op) { return static_cast<int>(op); }
  /// The scale has the type of the reduced numbers.
  int scaled_sum(RedOp& op, double scale, ch::DType type, Comm) {
    const std::lock_guard lock(device->mutex_);
    if (type == ch::DType::bfloat16) scale = static_cast<double>(static_cast<float>(ch::bf16(scale)));
    if (type == ch::DType::f16) scale = static_cast<double>(static_cast<float>(ch::half(scale)));
    device->scales_.push_back(scale);
    op = 9 + static_cast<int>(device->scales_.size());
    return device->note(ch::cat("operator ", scale));
  }
  void destroy_operator(RedOp, Comm) { device->note("destroy_operator"); }

  int all_reduce(const void* in, void* out, std::size_t n, ch::DType type, RedOp op, Comm, Stream stream) {
    return call(stream, {ch::comm::Op::all_reduce, reduction(type, op), traffic, n, in, out});
  }
  int reduce_scatter(const void* in, void* out, std::size_t n, ch::DType type, RedOp op, Comm, Stream stream) {
    return call(stream, {ch::comm::Op::reduce_scatter, reduction(type, op), traffic, n, in, out});
  }
  int broadcast(const void* in, void* out, std::size_t bytes, int root, Comm, Stream stream) {
    return call(stream, {ch::comm::Op::broadcast, {}, traffic, bytes, in, out, root});
  }
  int all_gather(const void* in, void* out, std::size_t bytes, Comm, Stream stream) {
    return call(stream, {ch::comm::Op::all_gather, {}, traffic, bytes, in, out});
  }
  int send(const void* in, std::size_t bytes, int peer, Comm, Stream stream) {
    return call(stream, {ch::comm::Op::message, {}, traffic, bytes, in, nullptr, peer});
  }
  int recv(void* out, std::size_t bytes, int peer, Comm, Stream stream) {
    return call(stream, {ch::comm::Op::message, {}, traffic, bytes, nullptr, out, peer, true});
  }
  int group_start() {
    device->grouping_ = true;
    device->at_group_start();
    return device->note("group_start");
  }
  int group_end() {
    const std::lock_guard lock(device->mutex_);
    device->grouping_ = false;
    for (const auto& call : device->group_) device->enqueue(1, call);
    device->group_.clear();
    const int code = device->note("group_end");
    return code != 0 ? code : slowly();
  }

  bool on_device(const void* memory) const { return device->holds(memory); }
  int use_device(int) { return device->refusals.contains("use_device") ? device->note("use_device") : 0; }
  int create_stream(Stream& stream) {
    stream = 1;
    return device->note("create_stream");
  }
  void destroy_stream(Stream) { device->note("destroy_stream"); }
  Stream compute_stream(int) { return 0; }
  bool capturing(Stream) { return device->capturing; }
  int create_event(Event& event) {
    const std::lock_guard lock(device->mutex_);
    event = static_cast<int>(device->events_.size());
    device->events_.emplace_back();
    return 0;
  }
  void destroy_event(Event event) { at(event).exists = false; }
  int record(Event event, Stream stream) {
    const std::lock_guard lock(device->mutex_);
    if (!at(event).exists) return 1;
    const int turn = ++at(event).asked;
    if (stream == 0 && device->host_computes)
      at(event).reached = turn;
    else
      device->enqueue(stream, [this_device = device.get(), event, turn] {
        auto& reached = this_device->events_[static_cast<std::size_t>(event)].reached;
        reached = std::max(reached, turn);
        return true;
      });
    return device->note(ch::cat("record ", event, " on ", device->stream_name(stream)));
  }
  int wait(Stream stream, Event event) {
    const std::lock_guard lock(device->mutex_);
    const auto reached = [this_device = device.get(), event, turn = at(event).asked] {
      return this_device->events_[static_cast<std::size_t>(event)].reached >= turn;
    };
    if (stream == 0 && device->host_computes)
      while (!reached() && device->async_code == 0) {
        device->pump();
        std::this_thread::yield();
      }
    else
      device->enqueue(stream, reached);
    return device->note(ch::cat("wait ", device->stream_name(stream), " for ", event));
  }
  int query(Event event) {
    const std::lock_guard lock(device->mutex_);
    if (device->capturing) {
      device->note("query inside of a capture");
      return 900;
    }
    device->pump();
    return at(event).reached == at(event).asked ? success : not_ready;
  }
  std::string cuda_error(int code) { return ch::cat("CUDA error ", code); }

 private:
  void end_kernels() {
    const std::lock_guard lock(device->mutex_);
    device->note(device->grouping_ ? "inside of a group: abort" : "abort");
    if (device->data_ != nullptr) device->data_->abort("the stand-in for NCCL was");
    device->async_code = 0;
    device->blocks = false;
    for (auto& [number, steps] : device->streams_)
      if (number != 0) steps.clear();
    for (auto& event : device->events_) event.reached = event.asked;  // an abort ends the kernels
    device->pump();
  }

  StandInDevice::Event& at(Event event) { return device->events_[static_cast<std::size_t>(event)]; }

  static constexpr auto traffic = ch::trace::Traffic::control;

  int slowly() const { return device->slow_accepts > 0 ? in_progress : success; }

  ch::comm::Reduction reduction(ch::DType type, RedOp op) const {
    const double scale = op >= 10 ? device->scales_[static_cast<std::size_t>(op - 10)] : 1;
    const auto how = op >= 10 ? ch::comm::ReduceOp::sum : static_cast<ch::comm::ReduceOp>(op);
    if (type == ch::DType::f32) return ch::comm::reduction<float>(how, scale);
    if (type == ch::DType::f64) return ch::comm::reduction<double>(how, scale);
    if (type == ch::DType::i32) return ch::comm::reduction<std::int32_t>(how, scale);
    if (type == ch::DType::u32) return ch::comm::reduction<std::uint32_t>(how, scale);
    if (type == ch::DType::i64) return ch::comm::reduction<std::int64_t>(how, scale);
    if (type == ch::DType::u64) return ch::comm::reduction<std::uint64_t>(how, scale);
    if (type == ch::DType::f16) return ch::comm::reduction<ch::half>(how, scale);
    if (type == ch::DType::bfloat16) return ch::comm::reduction<ch::bf16>(how, scale);
    if (type == ch::DType::i8) return ch::comm::reduction<std::int8_t>(how, scale);
    return ch::comm::reduction<std::uint8_t>(how, scale);
  }

  int call(Stream stream, const ch::comm::Call& call) {
    const bool blocked = device->blocks;
    while (device->blocks) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (blocked && device->code_of_blocked != 0) return device->code_of_blocked;
    const std::lock_guard lock(device->mutex_);
    const int code = device->note(ch::cat(ch::comm::name(call.op), ' ', call.count, ' ', call.reduction.dtype, " on ",
                                          device->stream_name(stream)));
    if (code != 0) return code;
    if (device->grouping_)
      device->group_.push_back(call);
    else
      device->enqueue(stream, call);
    return device->grouping_ ? success : slowly();
  }
};

}  // namespace test
