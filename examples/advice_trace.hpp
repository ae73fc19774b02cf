#pragma once
/// --advise: the location of the run's trace, and the advice that rank 0 prints at the end.

#include <sys/stat.h>
#include <unistd.h>

#include <chorus/core/environment.hpp>
#include <chorus/core/say.hpp>
#include <chorus/trace/advice.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <tuple>

/// The trace for a run's advice: the user's trace if one was requested, else a temporary one, which is removed at the
/// end.
class AdviceTrace {
 public:
  /// `path`: the user's, if any. The ranks of a machine name their file after their common parent; a policy of one
  /// process (not `distributed`) after itself. Throws FileError if no folder can be made for it.
  AdviceTrace(const std::string& path, bool distributed) {
    const char* of_environment = chorus::detail::env("CHORUS_TRACE");
    if (!path.empty() || of_environment != nullptr) {
      path_ = path.empty() ? of_environment : path;
      before_ = state();
      return;
    }
    const char* temporary = chorus::detail::env("TMPDIR");
    folder_ = chorus::cat(temporary != nullptr ? temporary : "/tmp", "/chorus_advice_", getuid());
    mkdir(folder_.c_str(), 0700);
    struct stat found {};
    chorus::check<chorus::FileError>(lstat(folder_.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
                                         found.st_uid == getuid() && (found.st_mode & 077) == 0,
                                     "--advise: expected a folder '", folder_,
                                     "' that only this user can use for the trace; give --trace a file instead");
    path_ = name_of(distributed ? getppid() : getpid());
    before_ = state();
  }
  AdviceTrace(const AdviceTrace&) = delete;
  AdviceTrace& operator=(const AdviceTrace&) = delete;

  const std::string& path() const { return path_; }
  bool is_own() const { return !folder_.empty(); }

  /// Called on rank 0 after its own part is written: prints the advice. Waits for the last rank, which merges all parts
  /// into one file.
  void print(long long first_step) const {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::seconds patience{5};
    if (state() == before_ || std::filesystem::file_size(path_) == 0) {
      chorus::detail::say(
          chorus::cat("--advise: the run ended before step ", first_step + 1,
                      " and recorded nothing: train for more steps, or choose others with --trace-steps"));
      return;
    }
    for (const auto end = Clock::now() + patience; !is_whole();
         std::this_thread::sleep_for(std::chrono::milliseconds(10)))
      if (Clock::now() > end) {
        chorus::detail::say(chorus::cat(
            "--advise: within ", patience.count(),
            " s not all ranks wrote their trace; on several machines give --trace a file that all machines see"));
        return;
      }
    try {
      std::printf("\n%s", chorus::advice_text(chorus::read_trace(path_)).c_str());
      std::fflush(stdout);
    } catch (const chorus::FileError& error) {
      chorus::detail::say(chorus::cat("--advise: ", error.what()));
    }
  }

  /// Removes a temporary trace. A process that has started ranks removes their files.
  void remove(bool started_ranks, int ranks) const {
    if (folder_.empty()) return;
    const auto path = started_ranks ? name_of(getpid()) : path_;
    unlink(path.c_str());
    for (int rank = 1; rank < ranks; ++rank) unlink(chorus::cat(path, ".rank", rank).c_str());
    rmdir(folder_.c_str());  // if no other run has a file in it
  }

 private:
  using State = std::tuple<ino_t, off_t, time_t, long>;

  std::string name_of(pid_t job) const { return chorus::cat(folder_, '/', job, ".json"); }
  State state() const {
    struct stat found {};
    if (stat(path_.c_str(), &found) != 0) return {};
    return {found.st_ino, found.st_size, found.st_mtim.tv_sec, found.st_mtim.tv_nsec};
  }
  bool is_whole() const { return std::ifstream(path_).get() == '{'; }

  std::string folder_, path_;  // folder_ is empty for the user's trace
  State before_;
};
