#pragma once
/// The copies that a step of DataParallel makes between its devices, by their formulas or as a real one has made them,
/// and how long they take over the links of one machine.

#include <algorithm>
#include <chorus/autograd/batch_axis.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <chorus/simulate/links.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/tasks.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::simulated {

struct DeviceCopy {
  int from = 0, to = 0;
  trace::Traffic kind = trace::Traffic::control;
  std::size_t bytes = 0;
  friend bool operator==(const DeviceCopy&, const DeviceCopy&) = default;
};

/// Those of one step with one pass, in the order in which they begin.
struct DataParallelCopies {
  std::vector<DeviceCopy> prepare = {};           ///< inputs scattered; parameters and buffers to the replicas
  std::vector<DeviceCopy> gather = {};            ///< outputs, or losses
  std::vector<DeviceCopy> output_gradients = {};  ///< back to the devices
  std::vector<DeviceCopy> reduce = {};            ///< gradients
  std::vector<DeviceCopy> input_gradients = {};   ///< where inputs want one
  /// Parameters and buffers, and gradients, are no copies but NCCL's broadcast and reduce (dp/collectives.hpp).
  bool by_nccl = false;

  friend bool operator==(const DataParallelCopies&, const DataParallelCopies&) = default;
};

/// What moves for a DataParallel, in bytes. One input and one output; parameters that all change in a step.
struct DataParallelSizes {
  std::size_t parameters = 0;             ///< as they lie together, with what fills up between them
  std::size_t gradients = 0;              ///< without
  std::vector<std::size_t> buffers = {};  ///< each
  Index samples = 1;                      ///< of the whole batch
  std::size_t sample = 0;                 ///< of a sample's input
  std::size_t output = 0;                 ///< of a sample's output; 0: the model returns a loss
  bool by_nccl = false;  ///< where all devices have a sample: the devices are different GPUs, of a build with NCCL
  static constexpr std::size_t loss = sizeof(float);
};

/// What data_parallel.hpp does with such a model and batch. The devices' threads begin at once: each comes to its
/// inputs before anyone comes to the parameters, which NCCL sends before.
[[gnu::cold]] inline DataParallelCopies data_parallel_copies(const DataParallelSizes& sizes, int devices) {
  check<UsageError>(devices >= 1 && sizes.samples >= 0, "data_parallel_copies: ", sizes.samples, " samples for ",
                    devices, " devices");
  using trace::Traffic;
  const dp::Split split{sizes.samples, static_cast<std::size_t>(std::clamp<Index>(sizes.samples, 1, devices))};
  DataParallelCopies out;
  const auto to_each = [&](std::vector<DeviceCopy>& part, Traffic kind, const auto& bytes) {
    for (std::size_t i = 1; i < split.devices; ++i)
      if (const std::size_t size = bytes(i); size > 0) part.push_back({0, static_cast<int>(i), kind, size});
  };
  const auto of_all = [](std::size_t bytes) { return [bytes](std::size_t) { return bytes; }; };
  const auto samples = [&](std::size_t i) { return static_cast<std::size_t>(split.size(i)); };
  const auto outputs = [&](std::size_t i) {
    return sizes.output == 0 ? DataParallelSizes::loss : samples(i) * sizes.output;
  };
  out.by_nccl = sizes.by_nccl && devices > 1 && split.devices == static_cast<std::size_t>(devices);
  const auto inputs = [&] {
    to_each(out.prepare, Traffic::inputs, [&](std::size_t i) { return samples(i) * sizes.sample; });
  };
  if (!out.by_nccl) inputs();
  to_each(out.prepare, Traffic::parameters, of_all(sizes.parameters));
  for (const std::size_t bytes : sizes.buffers) to_each(out.prepare, Traffic::buffers, of_all(bytes));
  if (out.by_nccl) inputs();
  to_each(out.output_gradients, Traffic::outputs, outputs);
  to_each(out.reduce, Traffic::gradients, of_all(sizes.gradients));
  out.gather = out.output_gradients;
  for (auto* const part : {&out.gather, &out.reduce})
    for (auto& copy : *part) std::swap(copy.from, copy.to);
  return out;
}

/// Listens to a step of a real DataParallel, and keeps its copies: `take` at its end.
class DeviceCopyListener final : public trace::Listener {
 public:
  /// `device_ids`: those of the DataParallel, by which devices are numbered here. Throws UsageError where somebody
  /// listens already.
  explicit DeviceCopyListener(const std::vector<int>& device_ids) {
    for (std::size_t i = 0; i < device_ids.size(); ++i) numbers_.emplace(device_ids[i], static_cast<int>(i));
    check<UsageError>(trace::listening() == nullptr, "DeviceCopyListener: somebody listens already, such as a trace");
    trace::listen(this);
  }
  DeviceCopyListener(const DeviceCopyListener&) = delete;
  DeviceCopyListener& operator=(const DeviceCopyListener&) = delete;
  ~DeviceCopyListener() override { trace::listen(nullptr); }

  /// The copies since then. Throws UsageError where they are not those of one pass, forward and backward.
  DataParallelCopies take() {
    const std::lock_guard lock(mutex_);
    check<UsageError>(!several_, "DeviceCopyListener: expected one forward pass, got a second one");
    auto out = std::exchange(copies_, {});
    // Threads race; each keeps its own order.
    std::map<int, std::vector<DeviceCopy>> by_device;
    for (const auto& copy : out.prepare) by_device[copy.to].push_back(copy);
    out.prepare.clear();
    for (std::size_t turn = 0, more = 1; std::exchange(more, 0) != 0; ++turn)
      for (const auto& [device, own] : by_device)
        if (turn < own.size()) out.prepare.push_back(own[turn]), more = 1;
    has_gathered_ = false;
    return out;
  }

  std::int64_t now() override { return 0; }
  void span(const trace::Event& event) override {
    if (event.category != "copy" || event.name != "gather") return;
    const std::lock_guard lock(mutex_);
    has_gathered_ = true;
  }
  void instant(const trace::Event&) override {}
  void allocated(int, trace::Memory, std::int64_t) override {}
  void sent(int from, int to, trace::Traffic kind, std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (bytes == 0 || !numbers_.contains(from) || !numbers_.contains(to)) return;
    const bool prepares = kind == trace::Traffic::parameters || kind == trace::Traffic::buffers;
    several_ = several_ || (prepares && has_gathered_);
    auto& part = prepares                            ? copies_.prepare
                 : kind == trace::Traffic::gradients ? copies_.reduce
                 : kind == trace::Traffic::outputs   ? (has_gathered_ ? copies_.output_gradients : copies_.gather)
                 : has_gathered_                     ? copies_.input_gradients
                                                     : copies_.prepare;
    part.push_back({numbers_.at(from), numbers_.at(to), kind, bytes});
  }

 private:
  std::mutex mutex_;
  std::map<int, int> numbers_;
  DataParallelCopies copies_;
  bool has_gathered_ = false, several_ = false;
};

/// The streams of devices of one machine, in virtual time. A copy begins when both devices' streams have come to it,
/// and both go on when it has ended (copy_bytes in tensor/cuda/memory.hpp orders them so): it takes alpha + bytes *
/// beta. So a device's link carries one copy at a time, and that of the first device all.
class DeviceStreams {
 public:
  using Time = comm::simulated::Time;

  /// Throws UsageError where the devices are more than the links of one machine join.
  DeviceStreams(const comm::simulated::SimulationOptions& options)
      : link_(options.links.inside),
        alpha_(link_.latency()),
        call_(comm::simulated::time_of("call", options.links.call)),
        computing_(options.computing),
        keeps_(options.keep_spans) {
    const int most = options.links.island == 0 ? most_devices : std::min(options.links.island, most_devices);
    check<UsageError>(options.ranks >= 1 && options.ranks <= most_devices, "DataParallel: ", options.ranks,
                      " devices, expected 1 to ", most_devices);
    check<UsageError>(options.ranks <= most, "DataParallel: one process on one machine: ", options.ranks,
                      " devices over ", options.links.name.empty() ? "links" : options.links.name, ", which ",
                      most == 1 ? "join machines of one device each" : cat("join machines of ", most, " devices each"),
                      ": expected nvlink or pcie, or fewer devices");
    check<UsageError>(link_.bandwidth > 0, "DataParallel: a bandwidth of ", link_.bandwidth, " bytes a second");
    times_.ranks.resize(static_cast<std::size_t>(options.ranks));
    times_.one_process = true;
  }

  int size() const { return static_cast<int>(times_.ranks.size()); }
  /// A device's clock: where its stream has come to.
  Time& clock(int device) { return of(device).end; }
  void next_step() { ++step_; }
  void compute(int device, double usual, std::string_view kind, std::string_view name) {
    const Time begun = clock(device);
    using namespace comm::simulated;
    clock(device) = later(begun, computing_.time(time_of("compute", usual), device, step_));
    computed_ += seconds(clock(device) - begun);
    mark(device, kind, name, begun);
  }
  void copy(const DeviceCopy& copy, std::string_view name) {
    Time &from = clock(copy.from), &to = clock(copy.to);
    const Time begun = std::max(from, to);
    comm::simulated::time_of("a copy", static_cast<double>(copy.bytes) / link_.bandwidth);  // not too long
    from = to = comm::simulated::later(begun, alpha_ + link_.transfer(copy.bytes));
    for (const int device : {copy.from, copy.to}) mark(device, "copy", name, begun);
    if (keeps_) of(copy.from).copies.push_back({copy.to, copy.kind, copy.bytes, begun, to});
  }
  /// NCCL's broadcast from the first device to all others, or its reduce to it, as one call: pieces go along a chain of
  /// all devices. By its own model of a ring (tuning.cc) it takes the call, an alpha a hop, and the bytes once.
  void collective(std::span<const DeviceCopy> parts, std::string_view name) {
    if (parts.empty()) return;
    std::size_t bytes = 0;  // of one device
    Time begun{};
    for (const auto& part : parts)
      if (part.from == parts.front().from && part.to == parts.front().to) bytes += part.bytes;
    for (int device = 0; device < size(); ++device) begun = std::max(begun, clock(device));
    comm::simulated::time_of("a collective", static_cast<double>(bytes) / link_.bandwidth);
    const Time ended = comm::simulated::later(begun, call_ + (size() - 1) * alpha_ + link_.transfer(bytes));
    for (int device = 0; device < size(); ++device) {
      clock(device) = ended;
      mark(device, "copy", name, begun);
    }
    if (!keeps_) return;
    for (const auto& part : parts) of(part.from).copies.push_back({part.to, part.kind, part.bytes, begun, ended});
  }
  void mark(int device, std::string_view kind, std::string_view name, Time begun, int number = -1) {
    if (keeps_) of(device).marks.push_back({std::string(kind), std::string(name), begun, clock(device), 0, number});
  }
  void hold(int device, const comm::simulated::Held& held) {
    if (keeps_) of(device).memory.push_back(held);
  }
  /// Seconds that all devices have computed for, together.
  double computed() const { return computed_; }
  comm::simulated::SimulatedTimes take() { return std::move(times_); }

 private:
  static constexpr int most_devices = 64;  // of a kind

  comm::simulated::RankTimes& of(int device) { return times_.ranks[static_cast<std::size_t>(device)]; }

  const comm::simulated::AlphaBeta link_;
  const Time alpha_, call_;
  const comm::simulated::Computing computing_;
  const bool keeps_;
  comm::simulated::SimulatedTimes times_;
  std::uint32_t step_ = 0;
  double computed_ = 0;
};

}  // namespace chorus::simulated
