#pragma once
/// Writes metrics as JSON lines, CSV and TensorBoard events.

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/train/log_file.hpp>
#include <chorus/train/metrics.hpp>
#include <chorus/train/summary_writer.hpp>

namespace chorus {

CHORUS_INLINE MetricsLog::MetricsLog(const MetricsFiles& files)
    : json_lines_("metrics", files.json_lines), csv_("metrics", files.csv), curves_(files.tensorboard) {
  csv_.write("epoch,train_loss,test_accuracy,seconds\n");
}

CHORUS_INLINE void MetricsLog::step(Index step, double loss) {
  write(detail::JsonObject().field("event", "step").field("step", step).field("loss", loss));
  curves_.add_scalar("loss/step", loss, step);
}

CHORUS_INLINE void MetricsLog::epoch(int epoch, double train_loss, double test_accuracy, double seconds) {
  write(detail::JsonObject()
            .field("event", "epoch")
            .field("epoch", epoch)
            .field("train_loss", train_loss)
            .field("test_accuracy", test_accuracy)
            .field("seconds", seconds));
  csv_.write(cat(epoch, ',', train_loss, ',', test_accuracy, ',', seconds, '\n'));
  curves_.add_scalar("loss/train", train_loss, epoch);
  curves_.add_scalar("accuracy/test", test_accuracy, epoch);
  flush();
}

CHORUS_INLINE void MetricsLog::done(const RunSummary& run) {
  detail::JsonObject line;
  line.field("event", "done").field("policy", run.policy).field("devices", run.devices);
  if (run.canonical_shares > 0) line.field("canonical_shares", run.canonical_shares);
  line.field("samples_per_second", run.samples_per_second)
      .field("bytes_sent_per_device", run.bytes_sent_per_device)
      .field("peak_memory_bytes_per_device", run.peak_memory_bytes_per_device);
  if (!run.parameters_sha256.empty()) line.field("parameters_sha256", run.parameters_sha256);
  write(line);
  flush();
}

CHORUS_INLINE void MetricsLog::write(const detail::JsonObject& event) {
  if (json_lines_) json_lines_.write(event.str() + '\n');
}

CHORUS_INLINE void MetricsLog::flush() {
  json_lines_.flush();
  csv_.flush();
  curves_.flush();
}

}  // namespace chorus
