#pragma once
/// How the ranks' trace files become one.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chorus/core/atomic_file.hpp>
#include <chorus/core/descriptor.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/trace/merge_traces.hpp>
#include <chorus/trace/trace_lines.hpp>
#include <chorus/trace/trace_recorder.hpp>
#include <chorus/trace/whole_trace.hpp>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::detail {

/// Whether another program is, as LogFile::Sharing::alone.
inline bool is_being_written(const std::string& path) {
  const io::Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  return file.value >= 0 && ::flock(file.value, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

/// Nothing where it is not there, or no part: another rank may have made one file of them by now. Throws FileError
/// where it can't be read.
inline std::optional<TracePart> read_trace_part(const std::string& path) {
  constexpr std::uint64_t most = std::uint64_t{1} << 30;
  struct stat facts {};
  if (::stat(path.c_str(), &facts) != 0 || !S_ISREG(facts.st_mode)) return std::nullopt;
  const auto who = cat("trace: cannot read '", printable(path, 4096), "'");
  const io::RegularFile file(path, who);
  check<FileError>(file.size() <= most, who, ": expected at most ", most, " bytes, it has ", file.size());
  std::string all(file.size(), ' ');
  file.read(0, std::as_writable_bytes(std::span(all)), who, ": reading");
  std::string_view rest = all, text;
  const auto next = [&] {  // as getline
    text = rest.substr(0, rest.find('\n'));
    const bool any = !rest.empty();
    rest.remove_prefix(std::min(text.size() + 1, rest.size()));
    return any;
  };
  if (!next() || text != "[") return std::nullopt;
  TracePart part;
  if (!next()) return std::nullopt;
  const auto head = TraceHead::read(text);
  if (!head) return std::nullopt;
  part.head = *head;
  while (next()) {
    if (text == "]") {
      part.complete = true;
    } else if (text.find("\"name\":\"chorus end\"") != text.npos) {
      part.peaks = json_value(text, "peaks").value_or("");
      part.notes = json_value(text, "notes").value_or("");
    } else if (text.starts_with("{\"ph\":\"M\"")) {
      (part.names += text) += '\n';
    } else if (auto line = TraceLine::read(text)) {  // not one that was cut off
      part.lines.push_back(std::move(*line));
    }
  }
  return part;
}

/// Moves all parts to the clock of the first one. Where machines differ: of a call of all, each rank's end comes after
/// every rank's begin. So each call bounds the difference of two clocks from both sides; the middle of what all calls
/// leave is taken. Returns how far that may be wrong, in ns; -1 where nobody knows.
inline std::int64_t align_clocks(std::vector<TracePart>& parts) {
  std::int64_t error = 0;
  bool unknown = false;
  std::vector<std::int64_t> shifts(parts.size());
  for (std::size_t p = 0; p < parts.size(); ++p) shifts[p] = parts[p].head.base;
  const auto calls = calls_of_all(parts);
  for (std::size_t p = 1; p < parts.size(); ++p) {
    if (parts[p].head.machine == parts[0].head.machine) continue;
    // The clock of part p is ahead of that of part 0 by at least `low`, and at most `high`.
    auto low = std::numeric_limits<std::int64_t>::min(), high = std::numeric_limits<std::int64_t>::max();
    for (const auto& [name, spans] : calls) {
      const TraceLine *here = nullptr, *there = nullptr;
      for (const auto& span : spans) {
        if (span.part == 0) here = span.line;
        if (span.part == p) there = span.line;
      }
      if (here == nullptr || there == nullptr) continue;
      const auto at = [&](std::size_t part, std::int64_t time) { return parts[part].head.base + time; };
      low = std::max(low, at(p, there->begin) - at(0, here->end));
      high = std::min(high, at(p, there->end) - at(0, here->begin));
    }
    if (low > high || low == std::numeric_limits<std::int64_t>::min()) {
      say(cat("warning: trace: no call tells how the clock of rank ", parts[p].head.rank, " differs from rank ",
              parts[0].head.rank, "'s: their first steps are drawn at one time"));
      shifts[p] = parts[0].head.base;
      unknown = true;
      continue;
    }
    shifts[p] -= low + (high - low) / 2;
    error = std::max(error, (high - low + 1) / 2);
  }
  const auto first = *std::min_element(shifts.begin(), shifts.end());
  for (std::size_t p = 0; p < parts.size(); ++p)
    for (auto& line : parts[p].lines) {
      line.begin += shifts[p] - first;
      line.end += shifts[p] - first;
    }
  return unknown ? -1 : error;
}

}  // namespace chorus::detail

namespace chorus {

CHORUS_INLINE bool merge_traces(const std::string& path, int ranks, bool as_it_is) {
  using namespace detail;
  const auto remove_parts = [&] {
    for (int rank = 1; rank < ranks; ++rank) unlink(TraceRecorder::part_of(path, rank).c_str());
  };
  std::vector<TracePart> parts;
  for (int rank = 0; as_it_is && rank < ranks; ++rank)
    if (is_being_written(TraceRecorder::part_of(path, rank))) return false;  // by another run
  for (int rank = 0; rank < ranks; ++rank) {
    auto part = read_trace_part(TraceRecorder::part_of(path, rank));
    const bool of_this_run = part && part->head.rank == rank && part->head.ranks == ranks;
    if (of_this_run && (part->complete || as_it_is))
      parts.push_back(std::move(*part));
    else if (!as_it_is)
      return false;
  }
  std::exception_ptr unwritten;
  if (!parts.empty()) try {
      const auto error = align_clocks(parts);
      io::write_file("trace", path, whole_trace(parts, ranks, error));
    } catch (const FileError&) {
      unwritten = std::current_exception();
    }
  remove_parts();
  if (unwritten) std::rethrow_exception(unwritten);
  return !parts.empty();
}

}  // namespace chorus
