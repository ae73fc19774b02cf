#pragma once
/// `TraceRecorder`: a few steps of a training run as a picture: where time goes on each device, what moves, and what
/// memory holds. Perfetto (https://ui.perfetto.dev) and chorus-page show its files.

#include <array>
#include <atomic>
#include <chorus/core/config.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/launch/run_listener.hpp>
#include <chorus/train/log_file.hpp>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {
struct TraceHead;
}

/// Listens from step `first_step` on, for `steps` steps; a step begins with the first recorded forward pass after an
/// optimizer's step. Evaluation after a step, with the wait for its first batch, is left out. Each rank writes a file
/// of its own, a step at a time: rank 0 `path`, others `path.rankN`; all can be read wherever the run ends. When the
/// last rank has recorded its steps, all become one file at `path`. What can't be written later on is told in a
/// warning, and the run goes on.
///
/// Files are Chrome's trace events as JSON. One of a single rank is an array, without its end while it grows; the whole
/// is an object with "metadata". A process is a rank or a device (pid: its number + 1) and a thread a Lane
/// (tid: 10 pid + 1 + lane). Times are in us from the first recorded step. Ranks of one machine have one clock; clocks
/// of several machines are aligned by what both ends of a collective call know of each other, to within
/// "clock_error_us".
class TraceRecorder final : public trace::Listener, public trace::StepCounter {
 public:
  /// Throws UsageError for options that make no sense, FileError where the file can't be written, or another run is
  /// writing it. Must outlive all threads that compute. One at a time in a process.
  TraceRecorder(TraceOptions options, TracedProcess process);
  ~TraceRecorder() override { finish(); }

  /// The run is over: what has been recorded is written, and a warning where that is less than was asked for.
  void finish() noexcept;

  void stepped() override { stepped_ = true; }
  void forward_begins() override;
  void evaluation_begins() override;
  void note(std::string_view key, std::string_view json) override;

  std::int64_t now() override {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void span(const trace::Event& event) override;
  void instant(const trace::Event& event) override;
  void sent(int from, int to, trace::Traffic kind, std::size_t bytes) override;
  void allocated(int slot, trace::Memory kind, std::int64_t bytes) override;
  bool wants_steps() const override { return options_.ring_steps; }

  /// The file of a rank while it records.
  static std::string part_of(const std::string& path, int rank) { return rank == 0 ? path : cat(path, ".rank", rank); }

 private:
  using Held = std::array<std::int64_t, trace::memory_kinds>;
  struct Sum {
    int from, to;
    std::array<std::uint64_t, trace::traffic_kinds> bytes;
    bool written;
  };
  struct Sample {
    int device;
    std::int64_t at;
    Held held;
  };

  void hold(int device, std::int64_t at);
  int device_of(int place) const { return process_.distributed ? process_.rank : place; }
  detail::TraceHead head() const;
  void begin_window();
  void end_step(std::int64_t end);
  void end_window();
  bool end_empty();
  void give_up(const std::exception& error) noexcept;
  void write(char phase, const trace::Event& event);
  void write_counter(int device, std::int64_t at, std::string_view name, std::string_view args);
  void write_sums(std::int64_t at);
  void write_samples();
  void write_names(int device);

  const TraceOptions options_;
  const TracedProcess process_;
  std::atomic<bool> stepped_{true}, recording_{false};
  std::mutex mutex_;  // for all that follows
  std::int64_t step_ = -1, recorded_ = 0, step_begin_ = 0, base_ = 0;
  std::int64_t loader_begin_ = 0;  // of the first wait for a batch after the optimizer's step; 0: none yet
  std::int64_t core_wait_ = 0;     // see waited_for_core
  bool evaluates_ = false;         // since the last step's end
  std::string lines_;
  std::unique_ptr<detail::LogFile> file_;
  std::vector<std::pair<std::string, std::string>> notes_;
  std::vector<int> devices_;  // that are named in the file
  std::vector<Sum> sums_;
  std::vector<Held> held_, peak_;  // by device: now; in a step, where that was most
  std::vector<Sample> samples_;
  bool finished_ = false;
};

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/trace/trace_recorder_impl.hpp>
#endif
