#pragma once
/// How TraceRecorder writes.

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chorus/core/atomic_file.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/core/say.hpp>
#include <chorus/trace/merge_traces.hpp>
#include <chorus/trace/trace_lines.hpp>
#include <chorus/trace/trace_recorder.hpp>
#include <chorus/trace/whole_trace.hpp>
#include <exception>
#include <fstream>

namespace chorus {

namespace detail {

/// Nanoseconds for which this thread was ready to run and had no core, since it began; -1: the system does not tell.
CHORUS_INLINE std::int64_t waited_for_core() {
  std::int64_t ran = 0, waited = -1;
  std::ifstream("/proc/thread-self/schedstat") >> ran >> waited;
  return waited;
}

}  // namespace detail

CHORUS_INLINE TraceRecorder::TraceRecorder(TraceOptions options, TracedProcess process)
    : options_(std::move(options)), process_(std::move(process)) {
  check<UsageError>(!options_.path.empty(), "trace: the file has no name");
  check<UsageError>(options_.first_step >= 0, "trace: expected a first step of at least 0, got ", options_.first_step);
  check<UsageError>(options_.steps >= 1, "trace: expected 1 step or more, got ", options_.steps);
  // What was written before stays until there is something new; but that it can be written is known at once.
  file_ = std::make_unique<detail::LogFile>("trace", part_of(options_.path, process_.rank),
                                            detail::LogFile::Sharing::alone);
  if (process_.rank > 0) file_->clear();  // of an earlier run
  if (process_.distributed) trace::set_place_of_process(process_.rank);
  trace::count_steps(this);
}

CHORUS_INLINE void TraceRecorder::finish() noexcept {
  try {
    trace::count_steps(nullptr);
    const std::lock_guard lock(mutex_);
    if (std::exchange(finished_, true)) return;
    if (recording_) {
      if (stepped_ && !evaluates_) end_step(now());
      end_window();
    }
    const bool earlier = recorded_ == 0 && !end_empty();
    if (recorded_ < options_.steps && process_.rank == 0)
      detail::say(cat("warning: trace: the run has ended after ", step_ + 1, " steps: '",
                      printable(options_.path, 4096), "' has ", recorded_, " of the ", options_.steps, " from step ",
                      options_.first_step, " on", earlier ? ": it is of an earlier run" : ""));
  } catch (const std::exception& error) {
    give_up(error);
  }
}

CHORUS_INLINE void TraceRecorder::forward_begins() {
  if (!stepped_.exchange(false)) return;
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  ++step_;
  try {
    if (recording_ && !evaluates_) end_step(now());
    if (std::exchange(evaluates_, false)) {  // what it sent and holds is no step's
      const auto begin = now();
      write_sums(begin);
      for (std::size_t device = 0; device < held_.size(); ++device)
        if (held_[device] != Held{}) hold(static_cast<int>(device), begin);
    }
    if (step_ == options_.first_step) begin_window();
    if (step_ == options_.first_step + options_.steps) end_window();
  } catch (const FileError& error) {
    give_up(error);
  }
  step_begin_ = now();
  loader_begin_ = 0;
}

CHORUS_INLINE void TraceRecorder::evaluation_begins() {
  if (!stepped_) return;
  const std::lock_guard lock(mutex_);
  if (!recording_ || evaluates_) return;
  try {
    end_step(loader_begin_ > 0 ? loader_begin_ : now());
    evaluates_ = true;
  } catch (const FileError& error) {
    give_up(error);
  }
}

// The run is worth more than its picture.
CHORUS_INLINE void TraceRecorder::give_up(const std::exception& error) noexcept {
  detail::say(cat("warning: ", error.what(), "; the trace ends here"));
  finished_ = true;
  recording_ = false;
  trace::listen(nullptr);
  file_.reset();
  if (process_.rank > 0) unlink(part_of(options_.path, process_.rank).c_str());
}

// A file that was there before stays, and the result is false; a new one becomes a trace without events.
CHORUS_INLINE bool TraceRecorder::end_empty() {
  file_.reset();
  struct stat facts {};
  const bool is_file = stat(options_.path.c_str(), &facts) == 0 && S_ISREG(facts.st_mode);
  if (process_.rank > 0) {
    unlink(part_of(options_.path, process_.rank).c_str());
  } else if (is_file && facts.st_size == 0) {
    detail::TracePart nothing;
    nothing.head = head();
    io::write_file("trace", options_.path, detail::whole_trace({nothing}, process_.ranks, 0));
  }
  return !is_file || facts.st_size == 0;
}

CHORUS_INLINE void TraceRecorder::note(std::string_view key, std::string_view json) {
  const std::lock_guard lock(mutex_);
  for (auto& [known, value] : notes_)
    if (known == key) {
      value = json;
      return;
    }
  notes_.emplace_back(key, json);
}

CHORUS_INLINE detail::TraceHead TraceRecorder::head() const {
  return {.policy = process_.policy,
          .distributed = process_.distributed,
          .rank = process_.rank,
          .ranks = process_.ranks,
          .device_kind = process_.device_kind,
          .first_step = options_.first_step,
          .base = base_,
          .machine = detail::machine_of_this_clock()};
}

CHORUS_INLINE void TraceRecorder::begin_window() {
  file_->clear();
  base_ = now();
  file_->write(cat("[\n", head().text()));
  constexpr int devices = 64;
  held_.assign(devices, Held{});
  peak_.assign(devices, Held{});
  for (int slot = process_.first_slot; slot < process_.first_slot + devices; ++slot)
    for (std::size_t kind = 0; kind < trace::memory_kinds; ++kind) {
      const int device = device_of(slot - process_.first_slot);
      held_[static_cast<std::size_t>(device)][kind] +=
          static_cast<std::int64_t>(trace::memory(slot, static_cast<trace::Memory>(kind)));
    }
  for (int device = 0; device < devices; ++device)
    if (held_[static_cast<std::size_t>(device)] != Held{}) hold(device, base_);
  core_wait_ = detail::waited_for_core();
  recording_ = true;
  trace::listen(this);
}

CHORUS_INLINE void TraceRecorder::end_step(std::int64_t end) {
  const auto number = options_.first_step + recorded_;
  const auto name = cat("step ", number);
  write('X', {.device = trace::place(),
              .lane = trace::Lane::step,
              .category = "step",
              .name = name,
              .begin = step_begin_,
              .end = end,
              .args = detail::JsonObject().field("step", number).fields()});
  write_samples();
  write_sums(end);
  file_->write(lines_);
  file_->flush();
  lines_.clear();
  ++recorded_;
}

CHORUS_INLINE void TraceRecorder::end_window() {
  recording_ = false;
  trace::listen(nullptr);
  write_sums(now());
  detail::JsonObject peaks;
  for (const int device : devices_)
    peaks.json(cat(device),
               cat('{', detail::kinds_fields<trace::Memory>(peak_[static_cast<std::size_t>(device)]), '}'));
  detail::JsonObject notes;
  for (const auto& [key, value] : notes_) notes.json(key, value);
  if (process_.device_kind == "cpu") {
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) notes.field("cores", CPU_COUNT(&cores));
    if (const auto waited = detail::waited_for_core(); waited >= core_wait_ && core_wait_ >= 0)
      notes.json("core_wait_us", detail::microseconds(waited - core_wait_));
  }
  file_->write(lines_ + detail::trace_end(process_.rank, peaks.str(), notes.str()));
  file_->flush();
  file_.reset();
  lines_.clear();
  merge_traces(options_.path, process_.distributed ? process_.ranks : 1);
}

CHORUS_INLINE void TraceRecorder::span(const trace::Event& event) {
  const std::lock_guard lock(mutex_);
  if (!recording_ || event.begin < base_ || evaluates_) return;
  if (event.lane == trace::Lane::loader && stepped_ && loader_begin_ == 0) loader_begin_ = event.begin;
  write('X', event);
  if (event.lane == trace::Lane::communication || event.lane == trace::Lane::gathers) write_sums(event.end);
}
CHORUS_INLINE void TraceRecorder::instant(const trace::Event& event) {
  const std::lock_guard lock(mutex_);
  if (recording_ && !evaluates_) write('i', event);
}

CHORUS_INLINE void TraceRecorder::sent(int from, int to, trace::Traffic kind, std::size_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  if (!recording_) return;
  auto sum = std::find_if(sums_.begin(), sums_.end(), [&](const Sum& s) { return s.from == from && s.to == to; });
  if (sum == sums_.end()) sum = sums_.insert(sum, {from, to, {}, true});
  sum->bytes[static_cast<std::size_t>(kind)] += bytes;
  sum->written = false;
  if (process_.distributed || evaluates_) return;  // of ranks messages are of calls, which are told
  const auto name = detail::sent_name(to, kind), args = detail::sent_fields(to, kind, bytes);
  const auto at = now();
  write('i', {from, trace::Lane::communication, "sent", name, at, at, args});
}

CHORUS_INLINE void TraceRecorder::allocated(int slot, trace::Memory kind, std::int64_t bytes) {
  const int number = slot - process_.first_slot;
  if (number < 0 || number >= 64) return;
  const std::lock_guard lock(mutex_);
  if (!recording_) return;
  const int device = device_of(number);
  held_[static_cast<std::size_t>(device)][static_cast<std::size_t>(kind)] += bytes;
  if (!evaluates_) hold(device, now());
}

CHORUS_INLINE void TraceRecorder::hold(int device, std::int64_t at) {
  const auto& held = held_[static_cast<std::size_t>(device)];
  auto& peak = peak_[static_cast<std::size_t>(device)];
  if (detail::total_bytes(held) > detail::total_bytes(peak)) peak = held;
  samples_.push_back({device, at, held});
}

CHORUS_INLINE void TraceRecorder::write(char phase, const trace::Event& event) {
  const int device = device_of(event.device);
  write_names(device);
  detail::TraceLine line;
  line.phase = phase;
  line.pid = device + 1;
  line.lane = static_cast<int>(event.lane) + 1;
  line.begin = (phase == 'X' ? event.begin : event.end) - base_;
  line.end = event.end - base_;
  line.category = event.category;
  line.name = event.name;
  line.args = event.args;
  lines_ += line.text();
}

CHORUS_INLINE void TraceRecorder::write_names(int device) {
  if (std::find(devices_.begin(), devices_.end(), device) != devices_.end()) return;
  devices_.push_back(device);
  lines_ += detail::trace_names(
      device, process_.distributed ? cat("rank ", device) : cat("device ", process_.device_kind, ":", device));
}

CHORUS_INLINE void TraceRecorder::write_counter(int device, std::int64_t at, std::string_view name,
                                                std::string_view args) {
  write('C', {device, trace::Lane::step, {}, name, at, at, args});
}

CHORUS_INLINE void TraceRecorder::write_sums(std::int64_t at) {
  for (Sum& sum : sums_) {
    if (std::exchange(sum.written, true)) continue;
    write_counter(sum.from, at, detail::sent_counter(sum.to), detail::kinds_fields<trace::Traffic>(sum.bytes, false));
  }
}

// Of a step with many allocations, what was most and what was last in each small part of its time.
CHORUS_INLINE void TraceRecorder::write_samples() {
  constexpr std::int64_t parts = 100;
  const auto put = [&](const Sample& sample) {
    write_counter(sample.device, sample.at, detail::memory_counter, detail::kinds_fields<trace::Memory>(sample.held));
  };
  std::stable_sort(samples_.begin(), samples_.end(),
                   [](const Sample& a, const Sample& b) { return a.device < b.device; });
  const auto length = std::max<std::int64_t>(1, now() - step_begin_);
  const auto part_of_time = [&](const Sample& sample) { return (sample.at - step_begin_) * parts / length; };
  for (std::size_t i = 0; i < samples_.size();) {
    std::size_t most = i, last = i;
    const auto part = part_of_time(samples_[i]);
    const int device = samples_[i].device;
    for (; i < samples_.size() && samples_[i].device == device && part_of_time(samples_[i]) == part; ++i) {
      last = i;
      if (detail::total_bytes(samples_[i].held) > detail::total_bytes(samples_[most].held)) most = i;
    }
    put(samples_[most]);
    if (last != most) put(samples_[last]);
  }
  samples_.clear();
}

}  // namespace chorus
