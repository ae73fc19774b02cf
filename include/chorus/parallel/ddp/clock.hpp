#pragma once
/// Times of the parts of DistributedDataParallel's iterations.

#include <chorus/parallel/ddp/extension.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace chorus {

/// Times of an iteration in seconds, under the names of PyTorch's `_get_ddp_logging_data`.
struct DdpTimes {
  double forward_compute_time = 0;                ///< from the call of the net to its output
  double backward_compute_time = 0;               ///< from there to the last gradient
  double backward_comm_time = 0;                  ///< from the ranks' exchange of weights until all buckets are back
  double backward_compute_comm_overlap_time = 0;  ///< from when the first bucket leaves to the last gradient
  // Not in PyTorch:
  /// The buckets' collectives, each from start to end, including waits for other ranks; NaN over communicators that
  /// can't measure it, such as NCCL, whose collectives run on streams.
  double bucket_comm_time = 0;
  double exposed_comm_time = 0;  ///< backward's thread communicated or waited for communication

  /// The fraction of the collectives' time that backward overlapped; 1 without collectives, NaN if their time is NaN.
  double hidden() const {
    return std::isnan(bucket_comm_time)                      ? bucket_comm_time
           : bucket_comm_time <= 0 || exposed_comm_time <= 0 ? 1
           : exposed_comm_time >= bucket_comm_time           ? 0
                                                             : 1 - exposed_comm_time / bucket_comm_time;
  }
};

/// What DistributedDataParallel::logging_data returns.
struct DdpLoggingData {
  std::int64_t iterations = 0;  ///< passes of forward and backward that averaged gradients
  DdpTimes last, avg;           ///< of the newest iteration, and the mean over all
  /// Whether in all iterations so far the same parameters got gradients on this rank, each equally often.
  bool can_set_static_graph = true;
};

namespace ddp {

/// Whether the program has a call that asks for times: naming `asked` says so before main.
struct ClockIsWanted {
  static inline bool by_program = false;
  template <class>
  static inline const bool asked = by_program = true;
};

/// Measures the times of an iteration in this thread: work on a GPU is not measured.
template <Device D, class Communicator>
class Clock final : public Extension<D> {
  using Steady = std::chrono::steady_clock;

 public:
  explicit Clock(Core<D, Communicator>& core) : core_(core) {}

  void forward_begins(ForwardPass&) override { forward_start_ = now(); }
  void forward_ended() override {
    forward_end_ = now();
    busy_ = busy();
    exposed_ = {};
    comm_start_ = first_bucket_ = {};
  }
  /// The next backward pass belongs to other ranks and does not count.
  void shadow_forward() { forward_end_ = {}; }
  void bucket_is_full(const Bucket&) override {
    if (first_bucket_ == Steady::time_point{}) first_bucket_ = now();
  }
  // The hash is a sum, so the order of the gradients has no effect.
  void gradient_arrived(std::size_t i) override {
    if (!core_.sync) return;
    const auto number = (core_.number_of(i) + 1) * 0x9e3779b97f4a7c15u;
    uses_ += (number ^ (number >> 29)) * 0xbf58476d1ce4e5b9u;
  }
  void backward_ended() override {
    compute_end_ = now();
    if (uses_ == 0) return;  // a pass of other ranks
    const auto before = std::exchange(uses_before_, std::exchange(uses_, 0));
    if (data_.iterations > 0 && before != uses_before_) data_.can_set_static_graph = false;
  }
  void communicates(bool begins) override {
    const auto time = now();
    if (!begins) exposed_ += time - exposed_start_;
    exposed_start_ = time;
    if (comm_start_ == Steady::time_point{}) comm_start_ = time;
  }
  void pass_ended() override {
    const auto end = now();
    const auto forward_end = std::exchange(forward_end_, Steady::time_point{});
    if (forward_end == Steady::time_point{}) return;
    if (comm_start_ == Steady::time_point{}) comm_start_ = end;
    auto& last = data_.last;
    last.forward_compute_time = seconds(forward_end - forward_start_);
    last.backward_compute_time = seconds(compute_end_ - forward_end);
    last.backward_comm_time = seconds(end - comm_start_);
    last.backward_compute_comm_overlap_time = first_bucket_ < compute_end_ ? seconds(compute_end_ - first_bucket_) : 0;
    last.bucket_comm_time = busy_.count() < 0 ? std::numeric_limits<double>::quiet_NaN() : seconds(busy() - busy_);
    last.exposed_comm_time = seconds(exposed_);
    ++data_.iterations;
    for (const auto member :
         {&DdpTimes::forward_compute_time, &DdpTimes::backward_compute_time, &DdpTimes::backward_comm_time,
          &DdpTimes::backward_compute_comm_overlap_time, &DdpTimes::bucket_comm_time, &DdpTimes::exposed_comm_time})
      data_.avg.*member += (last.*member - data_.avg.*member) / static_cast<double>(data_.iterations);
  }
  void forget() { data_ = {}; }
  const DdpLoggingData& data() const { return data_; }

 private:
  static double seconds(Steady::duration time) { return std::chrono::duration<double>(time).count(); }
  Steady::time_point now() const {
    if constexpr (requires { core_.ranks.time(); }) return core_.ranks.time();
    return Steady::now();
  }
  // How long the communicator's calls have taken so far; negative if it does not know.
  std::chrono::nanoseconds busy() const {
    if constexpr (requires { core_.ranks.busy(); }) return core_.ranks.busy();
    return {};
  }

  Core<D, Communicator>& core_;
  Steady::time_point forward_start_, forward_end_, compute_end_, comm_start_, first_bucket_, exposed_start_;
  Steady::duration exposed_{};
  std::chrono::nanoseconds busy_{};
  std::uint64_t uses_ = 0, uses_before_ = 0;
  DdpLoggingData data_;
};

}  // namespace ddp
}  // namespace chorus
