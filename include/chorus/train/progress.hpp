#pragma once
/// A progress bar for a training loop: `for (int epoch : ch::progress(run, 10))`.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <string>

#include <unistd.h>

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>

namespace chorus::inline CHORUS_ABI {

struct ProgressOptions {
  bool enabled = true;  ///< false: only count epochs, as all processes but one do
  int epochs = 1;       ///< epochs of the whole run
  int first_epoch = 0;  ///< where a resumed run goes on
  std::FILE* out = stderr;
};

/// A range of epoch numbers that tells how they go. On a terminal one line is redrawn at most ten times a second;
/// elsewhere a plain line is written every ten seconds. An epoch's end always writes one. Loss and samples a second
/// appear when the loop calls `step`; a loop that doesn't gets a line of time per epoch.
class Progress {
 public:
  explicit Progress(ProgressOptions options)
      : options_(options), terminal_(isatty(fileno(options.out)) == 1), epoch_(options.first_epoch) {
    check<UsageError>(options.epochs >= 0, "progress: epochs is ", options.epochs, ", expected 0 or more");
  }
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  class Iterator {
   public:
    using value_type = int;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(Progress& progress) : progress_(&progress) {}
    int operator*() const { return progress_->epoch_; }
    Iterator& operator++() {
      progress_->finish_epoch();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return progress_->epoch_ >= progress_->options_.epochs; }

   private:
    Progress* progress_;
  };

  Iterator begin() {
    start_epoch();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

  /// Tells that the batch number `step` of the `steps` in this epoch is done, with its mean `loss` over `samples`.
  void step(double loss, Index samples, Index step, Index steps) {
    if (!options_.enabled) return;
    loss_sum_ += loss * static_cast<double>(samples);
    samples_ += samples;
    const auto now = Clock::now();
    if (now - drawn_ < (terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10))) return;
    drawn_ = now;
    const double done = steps > 0 ? std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(steps)) : 0;
    write(head() + (terminal_ ? "  " + bar(done) : "") + "  step " + cat(step + 1, "/", steps) + rates() +
              eta(done > 0 ? seconds() / done : 0, seconds()),
          !terminal_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  void start_epoch() {
    loss_sum_ = 0;
    samples_ = 0;
    started_ = drawn_ = Clock::now();
  }

  void finish_epoch() {
    if (options_.enabled) {
      char time[32];
      std::snprintf(time, sizeof time, "  %.2f s", seconds());
      const bool last = epoch_ + 1 >= options_.epochs;
      write(head() + rates() + time + (last ? "" : eta(seconds(), seconds())), true);
    }
    ++epoch_;
    start_epoch();
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }

  std::string head() const { return cat("epoch ", epoch_ + 1, "/", options_.epochs); }

  static std::string bar(double done) {
    constexpr int width = 20;
    const int full = static_cast<int>(done * width);
    std::string cells(static_cast<std::size_t>(full), '=');
    if (full < width) cells += '>';
    cells.resize(width, ' ');
    return "[" + cells + "]";
  }

  // The mean loss of the epoch so far, and the throughput.
  std::string rates() const {
    if (samples_ == 0) return "";
    const auto count = static_cast<double>(samples_);
    char text[80];
    const double rate = count / std::max(seconds(), 1e-9);
    std::snprintf(text, sizeof text, "  loss %.4f  %.0f samples/s", loss_sum_ / count, rate);
    return text;
  }

  // What is left of the run, if each epoch takes as long as this one will and this one has run for `elapsed` seconds.
  std::string eta(double epoch_seconds, double elapsed) const {
    if (epoch_seconds <= 0) return "";
    const auto left = static_cast<long>(std::lround(epoch_seconds * (options_.epochs - epoch_) - elapsed));
    char text[48];
    if (left >= 3600) {
      std::snprintf(text, sizeof text, "  ETA %ld:%02ld:%02ld", left / 3600, left / 60 % 60, left % 60);
    } else {
      std::snprintf(text, sizeof text, "  ETA %ld:%02ld", left / 60, left % 60);
    }
    return text;
  }

  void write(const std::string& line, bool final) {
    std::fprintf(options_.out, "%s%s%s", terminal_ ? "\r\x1b[K" : "", line.c_str(), final ? "\n" : "");
    std::fflush(options_.out);
    line_open_ = !final;
  }

  // An exception left the loop: what it prints starts on a line of its own.
  void clear() {
    if (line_open_) std::fputc('\n', options_.out);
  }

  ProgressOptions options_;
  bool terminal_;
  bool line_open_ = false;
  int epoch_;
  double loss_sum_ = 0;
  Index samples_ = 0;
  Clock::time_point started_{}, drawn_{};
};

/// The epochs `first_epoch`, ..., `epochs - 1` of a run, shown by its main process alone.
template <class Run>
Progress progress(Run& run, int epochs, int first_epoch = 0) {
  return Progress({.enabled = run.is_main(), .epochs = epochs, .first_epoch = first_epoch});
}

}  // namespace chorus::inline CHORUS_ABI
