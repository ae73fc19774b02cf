#pragma once
/// How runs are recorded that `launch` begins.

#include <sys/stat.h>

#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/trace/at_launch.hpp>
#include <chorus/trace/merge_traces.hpp>
#include <chorus/trace/trace_recorder.hpp>
#include <memory>
#include <vector>

namespace chorus::detail {

CHORUS_INLINE std::shared_ptr<void> record_rank(const TraceOptions& asked, const TracedProcess& process) {
  struct stat facts {};
  const bool stream = ::stat(asked.path.c_str(), &facts) == 0 && (S_ISFIFO(facts.st_mode) || S_ISCHR(facts.st_mode));
  if (stream && process.rank > 0) return nullptr;
  if (stream && process.ranks > 1)
    say(cat("warning: trace: '", asked.path, "' is a pipe or a device: it gets what rank 0 records, alone"));
  // Threads that have been left to themselves may still listen to it: it stays.
  auto* const recorder = new TraceRecorder(asked, process);
  static auto& all = *new std::vector<TraceRecorder*>;
  all.push_back(recorder);
  return {recorder, [](TraceRecorder* ended) { ended->finish(); }};
}

CHORUS_INLINE void merge_leftovers(const TraceOptions& asked, int ranks) {
  try {
    merge_traces(asked.path, ranks, true);
  } catch (const FileError& error) {  // the run is worth more than its picture
    say(cat("warning: ", error.what()));
  }
}

}  // namespace chorus::detail
