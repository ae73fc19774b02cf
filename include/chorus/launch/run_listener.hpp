#pragma once
/// The recorder of runs: `launch` reports each rank to it. <chorus/trace.hpp> registers one.

#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>

namespace chorus {

/// Which steps of a run are recorded, and in which file.
struct TraceOptions {
  std::string path = {};        ///< of the file; empty: no trace
  std::int64_t first_step = 5;  ///< when buckets, memory and caches are warm
  std::int64_t steps = 3;
  bool ring_steps = false;  ///< also each step of each collective, with its first number: many events

  /// Parses `FIRST:COUNT`, such as `5:3`. Throws UsageError that names `what`.
  void set_steps(std::string_view what, std::string_view text);
};

/// The recorded process.
struct TracedProcess {
  std::string policy = "single";
  bool distributed = false;  ///< one rank of several: all events in this process are that rank's
  int rank = 0, ranks = 1;   ///< if distributed
  std::string device_kind = "cpu";
  int first_slot = 0;  ///< of this kind of device, see trace_slot
};

namespace detail {

/// The functions that `launch` calls if a trace is requested.
struct RunListener {
  /// Called before the body of a rank, or of a policy of one process. The returned object is destroyed after the body
  /// has returned and the communicator is closed. May throw: then the body is not called.
  std::shared_ptr<void> (*rank_begins)(const TraceOptions& asked, const TracedProcess& process) = nullptr;
  /// Called in the process that has started `ranks` ranks, when all have ended: some may have been killed.
  void (*ranks_have_ended)(const TraceOptions& asked, int ranks) = nullptr;
};
/// Null functions in a program without a recorder. Set before main begins.
inline constinit RunListener run_listener = {};

}  // namespace detail

[[gnu::cold]] inline void TraceOptions::set_steps(std::string_view what, std::string_view text) {
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, first_step);
  const bool has_count = first.ec == std::errc{} && first.ptr != end && *first.ptr == ':';
  const auto count = has_count ? std::from_chars(first.ptr + 1, end, steps) : first;
  check<UsageError>(has_count && count.ec == std::errc{} && count.ptr == end && first_step >= 0 && steps >= 1, what,
                    ": expected FIRST:COUNT, the first step from 0 and how many from 1, as 5:3; got '", printable(text),
                    "'");
}

}  // namespace chorus
