#pragma once
/// A progress bar for a training loop: `for (int epoch : ch::progress(run, 10))`.

#include <chrono>
#include <cstdio>
#include <iterator>
#include <string>

#include <unistd.h>

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>

namespace chorus {

/// Options of Progress.
struct ProgressOptions {
  bool enabled = true;  ///< false: only count epochs, as all processes but one do
  int epochs = 1;       ///< epochs of the whole run
  int first_epoch = 0;  ///< the first epoch of a resumed run
  std::FILE* out = stderr;
};

/// A range of epoch numbers that shows progress. On a terminal one line is redrawn at most ten times per second;
/// elsewhere a plain line is written every ten seconds, and always at an epoch's end. Loss and throughput appear if the
/// loop calls `step`; otherwise there is one line with the time per epoch.
class Progress {
 public:
  explicit Progress(ProgressOptions options);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  class Iterator {
   public:
    using value_type = int;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(Progress& progress) : progress_(&progress), epoch_(progress.options_.first_epoch) {}
    int operator*() const { return epoch_; }
    Iterator& operator++() {
      progress_->finish_epoch(epoch_++);
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return epoch_ >= progress_->options_.epochs; }

   private:
    Progress* progress_;
    int epoch_;
  };

  /// Each iterator starts with the first epoch. The line shows the iterator that was last begun or incremented.

  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

  /// Reports that batch `step` of `steps` in this epoch is done, with its mean `loss` over `samples`.
  void step(double loss, Index samples, Index step, Index steps);

 private:
  using Clock = std::chrono::steady_clock;

  void start_epoch(int epoch);

  void finish_epoch(int epoch);

  double seconds() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }

  std::string head() const { return cat("epoch ", epoch_ + 1, "/", options_.epochs); }

  static std::string bar(double done);

  // The mean loss of the epoch so far, and the throughput.
  std::string rates() const;

  // The remaining time of the run, if each epoch takes as long as this one, which has run for `elapsed` seconds.
  std::string eta(double epoch_seconds, double elapsed) const;

  void write(const std::string& line, bool final);

  // After an exception the line is ended, so that the error message starts on a new line.
  void clear();

  ProgressOptions options_;
  bool terminal_;
  bool line_open_ = false;
  int epoch_;
  double loss_sum_ = 0;
  Index samples_ = 0;
  Clock::time_point started_{}, drawn_{};
};

/// The epochs `first_epoch`, ..., `epochs - 1` of a run, shown by its main process only.
template <class Run>
Progress progress(Run& run, int epochs, int first_epoch = 0) {
  return Progress({.enabled = run.is_main(), .epochs = epochs, .first_epoch = first_epoch});
}

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/train/progress_impl.hpp>
#endif
