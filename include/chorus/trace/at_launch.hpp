#pragma once
/// A program that includes this header records its runs where `--trace`, CHORUS_TRACE or LaunchOptions::trace ask for
/// it: `launch` calls these functions.

#include <chorus/core/config.hpp>
#include <chorus/launch/run_listener.hpp>
#include <memory>

namespace chorus::detail {

/// A recorder of this process, which ends when the result goes; nothing on ranks beside the first where the file is a
/// pipe or a device. Throws as TraceRecorder does.
std::shared_ptr<void> record_rank(const TraceOptions& asked, const TracedProcess& process);
/// Makes one file of what ranks have left that were killed while they recorded. A failure is a warning.
void merge_leftovers(const TraceOptions& asked, int ranks);

inline const bool launch_records = (run_listener = {&record_rank, &merge_leftovers}, true);

}  // namespace chorus::detail

#if !CHORUS_COMPILED
#include <chorus/trace/at_launch_impl.hpp>
#endif
