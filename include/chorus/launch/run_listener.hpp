#pragma once
/// Who records runs: `launch` tells it of each rank and knows nothing else of it. <chorus/trace.hpp> brings one.

#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>

namespace chorus {

/// Which steps of a run are recorded, and where to.
struct TraceOptions {
  std::string path = {};        ///< of the file; empty: none is
  std::int64_t first_step = 5;  ///< once buckets, memory and caches are warm
  std::int64_t steps = 3;
  bool ring_steps = false;  ///< each step of each collective, too, with its first number: many

  /// From `FIRST:COUNT`, as `5:3`. Throws UsageError that names `what`.
  void set_steps(std::string_view what, std::string_view text);
};

/// The process that is recorded.
struct TracedProcess {
  std::string policy = "single";
  bool distributed = false;  ///< it is one rank of several: all that happens in it is the rank's
  int rank = 0, ranks = 1;   ///< where it is distributed
  std::string device_kind = "cpu";
  int first_slot = 0;  ///< of the kind of devices, see trace_slot
};

namespace detail {

/// What `launch` calls where a trace is asked for.
struct RunListener {
  /// Before the body of a rank, or of a policy of one process. What it returns goes once the body has returned and the
  /// communicator is closed. May throw: then the body is not called.
  std::shared_ptr<void> (*rank_begins)(const TraceOptions& asked, const TracedProcess& process) = nullptr;
  /// In the process that has started `ranks` ranks, when all of them have ended: some may have been killed.
  void (*ranks_have_ended)(const TraceOptions& asked, int ranks) = nullptr;
};
/// Null functions: a program without any. Set before main begins.
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
