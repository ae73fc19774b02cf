#pragma once
/// One trace file of those of all ranks: with one clock, and arrows from rank to rank.

#include <chorus/core/config.hpp>
#include <string>

namespace chorus {

/// Makes one file at `path` of what ranks have recorded in `TraceRecorder::part_of(path, rank)`, and removes those.
/// Returns false, and changes nothing, while one of them is not complete; `as_it_is`: what there is will do, unless
/// another run is writing it. Throws FileError where it can't be written; only rank 0's part, at `path`, is left then.
bool merge_traces(const std::string& path, int ranks, bool as_it_is = false);

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/trace/merge_traces_impl.hpp>
#endif
