#pragma once
/// The metrics log: one file of JSON lines (https://jsonlines.org) that tells how a training run went.

#include <cerrno>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/json_string.hpp>
#include <chorus/core/standard_streams.hpp>

namespace chorus {

/// What a finished run reports. Per-device lists have an entry for each device or, under DDP, rank.
struct RunSummary {
  std::string policy;
  int devices = 1;
  double samples_per_second = 0;
  std::vector<std::uint64_t> bytes_sent_per_device;
  std::vector<std::uint64_t> peak_memory_bytes_per_device;
  /// Left out where it is empty.
  std::string parameters_sha256;
};

namespace detail {

/// One flat JSON object. Numbers keep all their digits; NaN and infinities, which JSON lacks, become null.
class JsonObject {
 public:
  JsonObject& field(std::string_view key, std::string_view text) {
    next(key);
    append_json_string(text_, text);
    return *this;
  }
  template <class Number>
    requires std::integral<Number> || std::floating_point<Number>
  JsonObject& field(std::string_view key, Number value) {
    next(key);
    append_number(value);
    return *this;
  }
  template <class Number>
  JsonObject& field(std::string_view key, const std::vector<Number>& values) {
    next(key);
    text_ += '[';
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i != 0) text_ += ',';
      append_number(values[i]);
    }
    text_ += ']';
    return *this;
  }

  std::string str() const { return text_ + '}'; }

 private:
  void next(std::string_view key) {
    if (text_.size() > 1) text_ += ',';
    append_json_string(text_, key);
    text_ += ':';
  }

  template <class Number>
  void append_number(Number value) {
    if constexpr (std::floating_point<Number>) {
      if (!std::isfinite(value)) {
        text_ += "null";
        return;
      }
    }
    append(text_, value);
  }

  std::string text_ = "{";
};

}  // namespace detail

/// Writes the events of a run to a file, a line each:
///
///     {"event":"step","step":0,"loss":2.3}
///     {"event":"epoch","epoch":0,"train_loss":1.9,"test_accuracy":0.61,"seconds":4.2}
///     {"event":"done","policy":"ddp","devices":2,"samples_per_second":...,"bytes_sent_per_device":[...],
///      "peak_memory_bytes_per_device":[...],"parameters_sha256":"..."}
///
/// An epoch is on disk when `epoch` returns. Only one process of a run writes: the others give no path.
class MetricsLog {
 public:
  /// Replaces the file at `path`; an empty path makes a log that writes nothing. Throws FileError.
  explicit MetricsLog(std::string path) : path_(std::move(path)) {
    if (path_.empty()) return;
    file_.reset(detail::open_to_write(path_.c_str()));
    check<FileError>(file_ != nullptr, "metrics: cannot write '", path_, "': ", std::strerror(errno));
  }

  /// The loss of a training step, counted from 0 over the whole run.
  void step(Index step, double loss) {
    write(detail::JsonObject().field("event", "step").field("step", step).field("loss", loss));
  }

  /// An epoch's mean training loss, the accuracy after it in [0, 1], and how long it took.
  void epoch(int epoch, double train_loss, double test_accuracy, double seconds) {
    write(detail::JsonObject()
              .field("event", "epoch")
              .field("epoch", epoch)
              .field("train_loss", train_loss)
              .field("test_accuracy", test_accuracy)
              .field("seconds", seconds));
    flush();
  }

  /// The last line.
  void done(const RunSummary& run) {
    detail::JsonObject line;
    line.field("event", "done")
        .field("policy", run.policy)
        .field("devices", run.devices)
        .field("samples_per_second", run.samples_per_second)
        .field("bytes_sent_per_device", run.bytes_sent_per_device)
        .field("peak_memory_bytes_per_device", run.peak_memory_bytes_per_device);
    if (!run.parameters_sha256.empty()) line.field("parameters_sha256", run.parameters_sha256);
    write(line);
    flush();
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      const detail::HeldSignal held(SIGXFSZ);
      std::fclose(file);
    }
  };

  void write(const detail::JsonObject& event) {
    if (file_ == nullptr) return;
    const std::string line = event.str() + '\n';
    const detail::HeldSignal held(SIGXFSZ);
    if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size()) write_failed();
  }
  void flush() {
    const detail::HeldSignal held(SIGXFSZ);
    if (file_ != nullptr && std::fflush(file_.get()) != 0) write_failed();
  }
  [[noreturn]] void write_failed() const {
    fail<FileError>("metrics: cannot write '", path_, "': ", std::strerror(errno));
  }

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace chorus
