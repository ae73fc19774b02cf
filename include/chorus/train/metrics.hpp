#pragma once
/// The metrics log of a training run: JSON lines (https://jsonlines.org), CSV, or curves for TensorBoard.

#include <chorus/core/config.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/train/log_file.hpp>
#include <chorus/train/summary_writer.hpp>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

/// The final report of a run. Per-device lists have an entry per device or, under DDP, per rank.
struct RunSummary {
  std::string policy = {};
  int devices = 1;
  /// Omitted if 0.
  int canonical_shares = 0;
  double samples_per_second = 0;
  std::vector<std::uint64_t> bytes_sent_per_device = {};
  std::vector<std::uint64_t> peak_memory_bytes_per_device = {};
  /// Omitted if empty.
  std::string parameters_sha256 = {};
};

/// The destinations of a run's events; empty paths are not written.
struct MetricsFiles {
  std::string json_lines = {};   ///< all events, one per line
  std::string csv = {};          ///< one row per epoch: epoch,train_loss,test_accuracy,seconds
  std::string tensorboard = {};  ///< a folder for TensorBoard's curves
};

/// Writes a run's events to files. As JSON lines:
///
///     {"event":"step","step":0,"loss":2.3}
///     {"event":"epoch","epoch":0,"train_loss":1.9,"test_accuracy":0.61,"seconds":4.2}
///     {"event":"done","policy":"ddp","devices":2,"canonical_shares":4,"samples_per_second":...,
///      "bytes_sent_per_device":[...],"peak_memory_bytes_per_device":[...],"parameters_sha256":"..."}
///
/// TensorBoard gets step losses as `loss/step`, epoch losses as `loss/train`, and accuracies as `accuracy/test`. An
/// epoch is on disk when `epoch` returns. Only one process of a run may write; others pass no paths.
class MetricsLog {
 public:
  /// Replaces the files; for TensorBoard adds a new file to its folder. Throws FileError.
  explicit MetricsLog(const MetricsFiles& files);
  /// Only JSON lines.
  explicit MetricsLog(std::string path) : MetricsLog(MetricsFiles{.json_lines = std::move(path)}) {}

  /// The loss of a training step; steps are counted from 0 over the whole run.
  void step(Index step, double loss);

  /// An epoch's mean training loss, the accuracy after it in [0, 1], and its duration.
  void epoch(int epoch, double train_loss, double test_accuracy, double seconds);

  /// Writes the last line.
  void done(const RunSummary& run);

 private:
  void write(const detail::JsonObject& event);
  void flush();

  detail::LogFile json_lines_, csv_;
  SummaryWriter curves_;
};

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/train/metrics_impl.hpp>
#endif
