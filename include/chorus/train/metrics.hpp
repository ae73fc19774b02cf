#pragma once
/// The metrics log: how a training run went, as JSON lines (https://jsonlines.org), CSV or curves for TensorBoard.

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

/// What a finished run reports. Per-device lists have an entry for each device or, under DDP, rank.
struct RunSummary {
  std::string policy = {};
  int devices = 1;
  /// Left out where there are none.
  int canonical_shares = 0;
  double samples_per_second = 0;
  std::vector<std::uint64_t> bytes_sent_per_device = {};
  std::vector<std::uint64_t> peak_memory_bytes_per_device = {};
  /// Left out where it is empty.
  std::string parameters_sha256 = {};
};

/// Where a run's events go; an empty path: not there.
struct MetricsFiles {
  std::string json_lines = {};   ///< all of them, a line each
  std::string csv = {};          ///< epochs, a row each: epoch,train_loss,test_accuracy,seconds
  std::string tensorboard = {};  ///< a folder: curves for TensorBoard
};

/// Writes the events of a run to files. As JSON lines:
///
///     {"event":"step","step":0,"loss":2.3}
///     {"event":"epoch","epoch":0,"train_loss":1.9,"test_accuracy":0.61,"seconds":4.2}
///     {"event":"done","policy":"ddp","devices":2,"canonical_shares":4,"samples_per_second":...,
///      "bytes_sent_per_device":[...],"peak_memory_bytes_per_device":[...],"parameters_sha256":"..."}
///
/// For TensorBoard the losses of steps are `loss/step`, those of epochs `loss/train`, and accuracies `accuracy/test`.
/// An epoch is on disk when `epoch` returns. Only one process of a run writes: the others give no path.
class MetricsLog {
 public:
  /// Replaces the files, but for TensorBoard's, which gets a new one in its folder. Throws FileError.
  explicit MetricsLog(const MetricsFiles& files);
  /// JSON lines alone.
  explicit MetricsLog(std::string path) : MetricsLog(MetricsFiles{.json_lines = std::move(path)}) {}

  /// The loss of a training step, counted from 0 over the whole run.
  void step(Index step, double loss);

  /// An epoch's mean training loss, the accuracy after it in [0, 1], and how long it took.
  void epoch(int epoch, double train_loss, double test_accuracy, double seconds);

  /// The last line.
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
