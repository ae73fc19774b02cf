#pragma once
/// Draws the progress line.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <unistd.h>

#include <chorus/core/held_signal.hpp>
#include <chorus/train/progress.hpp>

namespace chorus {

CHORUS_INLINE Progress::Progress(ProgressOptions options)
    : options_(options), terminal_(isatty(fileno(options.out)) == 1), epoch_(options.first_epoch) {
  check<UsageError>(options.epochs >= 0, "progress: epochs is ", options.epochs, ", expected 0 or more");
}

CHORUS_INLINE Progress::Iterator Progress::begin() {
  start_epoch(options_.first_epoch);
  return Iterator(*this);
}

CHORUS_INLINE void Progress::step(double loss, Index samples, Index step, Index steps) {
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

CHORUS_INLINE void Progress::start_epoch(int epoch) {
  epoch_ = epoch;
  loss_sum_ = 0;
  samples_ = 0;
  started_ = drawn_ = Clock::now();
}

CHORUS_INLINE void Progress::finish_epoch(int epoch) {
  epoch_ = epoch;
  if (options_.enabled) {
    char time[32];
    std::snprintf(time, sizeof time, "  %.2f s", seconds());
    const bool last = epoch_ + 1 >= options_.epochs;
    write(head() + rates() + time + (last ? "" : eta(seconds(), seconds())), true);
  }
  start_epoch(epoch + 1);
}

CHORUS_INLINE std::string Progress::bar(double done) {
  constexpr int width = 20;
  const int full = static_cast<int>(done * width);
  std::string cells(static_cast<std::size_t>(full), '=');
  if (full < width) cells += '>';
  cells.resize(width, ' ');
  return "[" + cells + "]";
}

CHORUS_INLINE std::string Progress::rates() const {
  if (samples_ == 0) return "";
  const auto count = static_cast<double>(samples_);
  char text[80];
  const double rate = count / std::max(seconds(), 1e-9);
  std::snprintf(text, sizeof text, "  loss %.4f  %.0f samples/s", loss_sum_ / count, rate);
  return text;
}

CHORUS_INLINE std::string Progress::eta(double epoch_seconds, double elapsed) const {
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

CHORUS_INLINE void Progress::write(const std::string& line, bool final) {
  const detail::HeldSignal held(SIGXFSZ);  // out may be a file
  std::fprintf(options_.out, "%s%s%s", terminal_ ? "\r\x1b[K" : "", line.c_str(), final ? "\n" : "");
  std::fflush(options_.out);
  line_open_ = !final;
}

CHORUS_INLINE void Progress::clear() {
  const detail::HeldSignal held(SIGXFSZ);
  if (line_open_) std::fputc('\n', options_.out);
}

}  // namespace chorus
