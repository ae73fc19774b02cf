#pragma once
/// `FlightRecorder`: the newest calls of an engine with their times, for debugging.

#include <algorithm>
#include <array>
#include <cerrno>
#include <chorus/comm/transport/envelope.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/environment.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/say.hpp>
#include <chorus/core/standard_streams.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::comm {

/// The name of a call in errors and records: `all_reduce #7 (sum of 10 F32), gradient bucket 2`.
struct NamedCall {
  Envelope envelope = {};
  int bucket = -1;
  int unit = -1;
  int peer = 0;                ///< of a message
  bool receives = false;       ///< a message
  const char* part_of = nullptr;  ///< a collective made of several calls
  const char* name = nullptr;  ///< instead of the envelope
  bool grouped = false;        ///< the envelope is the last one of a group, or the name stands for all its calls
  Algorithm algorithm = Algorithm::automatic;  ///< the chosen one, if an operation has several

  [[gnu::cold]] std::string text() const {
    std::string out = grouped && name == nullptr ? "a group of calls up to " : "";
    if (part_of != nullptr) out += cat(part_of, ": ");
    if (name != nullptr)
      out += grouped ? cat(name, " #", envelope.sequence) : name;
    else
      out += cat(envelope.op != Op::message ? "" : receives ? "receiving " : "sending ", envelope);
    if (bucket >= 0) out += cat(", gradient bucket ", bucket);
    if (unit >= 0) out += cat(", unit ", unit, " of the parameters");
    return out;
  }
};

/// Its owner holds a lock.
class FlightRecorder {
 public:
  /// `engine` is added to lines and file names if a rank has several recorders. So are `members`, see World, if the
  /// group is not the whole job: ranks and files have their numbers in the job.
  explicit FlightRecorder(int rank, std::string_view engine = {}, const std::vector<int>& members = {})
      : rank_(members.empty() ? rank : members[static_cast<std::size_t>(rank)]), engine_(engine) {
    for (const int member : members) group_ += cat(group_.empty() ? "group_" : "_", member);
  }

  /// Records a call that begins, and returns its number.
  std::uint64_t begin(const NamedCall& call) {
    entries_[calls_ % entries_.size()] = {call, Entry::runs, Clock::now(), {}};
    return calls_++;
  }
  /// Replaces the record of a call by a more precise one.
  void name(std::uint64_t number, const NamedCall& call) { entries_[number % entries_.size()].call = call; }
  void note(std::uint64_t number, Algorithm by) { entries_[number % entries_.size()].call.algorithm = by; }
  /// The call has ended; returns its duration. Nothing if the call is no longer recorded.
  Clock::duration end(std::uint64_t number, bool failed = false) {
    if (calls_ - number > entries_.size()) return {};
    auto& entry = entries_[number % entries_.size()];
    entry.state = failed ? Entry::failed : Entry::done;
    entry.ended = Clock::now();
    return entry.ended - entry.begun;
  }
  /// The number of the newest call, if there is one.
  std::uint64_t newest() const { return calls_ - 1; }
  const NamedCall& call(std::uint64_t number) const { return entries_[number % entries_.size()].call; }

  /// One line per call.
  [[gnu::cold]] std::string lines() const {
    const auto microseconds = [](Clock::duration time) {
      return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
    };
    std::string out;
    for (auto i = calls_ - std::min<std::uint64_t>(calls_, entries_.size()); i < calls_; ++i) {
      const auto& entry = entries_[i % entries_.size()];
      out += cat("rank ", rank_, ": ", group_, group_.empty() ? "" : ": ", engine_, engine_.empty() ? "" : ": ",
                 "call ", i, ": ", entry.call.text());
      if (entry.call.envelope.op == Op::message && entry.call.name == nullptr)
        out += cat(entry.call.receives ? " from rank " : " to rank ", entry.call.peer);
      if (entry.call.algorithm != Algorithm::automatic) out += cat(", by ", entry.call.algorithm);
      out += cat(", at ", microseconds(entry.begun - born_), " us");
      if (entry.state == Entry::runs) {
        out += cat(", under way for ", microseconds(Clock::now() - entry.begun), " us\n");
      } else {
        out += cat(entry.state == Entry::done ? ", took " : ", failed after ", microseconds(entry.ended - entry.begun),
                   " us\n");
      }
    }
    return out;
  }

  /// The destination of records, from CHORUS_FLIGHT_RECORDER: null, or see `dump`.
  static const char* wanted() { return chorus::detail::env("CHORUS_FLIGHT_RECORDER"); }
  /// Writes the records to their destination: `stderr`, or a file of that name plus the group and the engine, if named,
  /// and this rank's number.
  [[gnu::cold]] void dump() const {
    const char* where = wanted();
    if (where == nullptr) return;
    const auto text = lines();
    const bool to_stderr = std::string_view(where) == "stderr";
    const auto path =
        cat(where, group_.empty() ? "" : ".", group_, engine_.empty() ? "" : ".", engine_, ".rank", rank_);
    const chorus::detail::HeldSignal held(SIGXFSZ);
    std::FILE* const file = to_stderr ? stderr : chorus::detail::open_to_write(path.c_str());
    bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (file != nullptr) written = (to_stderr ? std::fflush(file) : std::fclose(file)) == 0 && written;
    if (!written) chorus::detail::say(cat("the flight record cannot be written to ", path, ": ", std::strerror(errno)));
  }

 private:
  struct Entry {
    NamedCall call = {};
    enum { runs, done, failed } state = runs;
    Clock::time_point begun{}, ended{};
  };

  const int rank_;
  const std::string_view engine_;
  std::string group_;  // `group_2_3`
  const Clock::time_point born_ = Clock::now();
  std::array<Entry, 64> entries_;  // a ring buffer
  std::uint64_t calls_ = 0;
};

}  // namespace chorus::comm
