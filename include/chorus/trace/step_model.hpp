#pragma once
/// `StepModel`: how long a step under DistributedDataParallel takes, by the numbers of one that was recorded.

#include <algorithm>
#include <chorus/trace/trace_facts.hpp>
#include <chorus/trace/trace_links.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <chorus/trace/trace_times.hpp>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

/// A model of a step under DistributedDataParallel: passes take as long as the device's share of the batch is large,
/// the optimizer and what is left of the step always the same, and averaging K bytes of N ranks' gradients in n buckets
///   2 (N-1)/N K/B + n 2 (N-1) alpha
/// where links have a bandwidth of B (a ring's; Thakur, Rabenseifner, Gropp: Optimization of collective communication
/// operations in MPICH, 2005), of which a constant part lies beside computing. Ranks that come late are not in it.
struct StepModel {
  int devices = 1;       ///< of the run
  double passes_us = 0;  ///< forward and backward of the slowest device
  double optimizer_us = 0;
  double other_us = 0;      ///< of the step: neither computing nor waiting
  double hidden = 0;        ///< part of communication beside which devices compute
  double bytes = 0;         ///< K, with what fills up between parameters
  int buckets = 0;          ///< n
  double averaging_us = 0;  ///< what the run's own calls take
  TraceLinkFit link =
      {};  ///< of rings; without calls: none ran, and `communication_us` is known of the run's ranks alone

  double communication_us(int n) const {
    if (n == 1 || bytes == 0) return 0;
    if (link.calls == 0) return averaging_us;
    return 2.0 * (n - 1) / n * bytes / link.bandwidth + buckets * 2.0 * (n - 1) * link.alpha_us;
  }
  /// With `n` devices and a batch `larger` times as large.
  double step_us(int n, double larger = 1) const {
    return passes_us * larger * devices / n + optimizer_us + other_us + (1 - hidden) * communication_us(n);
  }
};

/// The model, fitted to a run. Nothing for a policy other than ddp and single.
inline std::optional<StepModel> fit_step_model(const Trace& trace, const TraceFacts& facts) {
  if (facts.policy != "ddp" && facts.policy != "single") return std::nullopt;
  StepModel model;
  model.devices = facts.devices;
  const auto step = detail::step_times(trace).at(facts.median_step);
  model.other_us = std::numeric_limits<double>::infinity();
  for (std::size_t place = 0; place < trace.processes.size(); ++place) {
    const auto& process = trace.processes[place];
    const auto waits = detail::time_of(process, {"wait"}, step[place]);
    const double passes = detail::time_of(process, {"forward", "backward"}, step[place], true).without(waits).length();
    model.passes_us = std::max(model.passes_us, passes);
    model.optimizer_us = std::max(model.optimizer_us, facts.compute_us[place] - passes);
    model.other_us = std::min(model.other_us,
                              step[place].end - step[place].begin - facts.compute_us[place] - facts.exposed_us[place]);
  }
  model.other_us = std::max(0.0, model.other_us);
  model.hidden = facts.hidden.value_or(0);
  if (facts.devices == 1) return model;
  std::map<double, std::vector<double>> buckets, bytes;
  for (const auto& call : detail::call_times(trace)) {
    if (call.op != "all_reduce" || call.traffic != "gradients") continue;
    buckets[call.bucket].push_back(call.us);
    bytes[call.bucket].push_back(call.bytes);
  }
  for (const auto& [bucket, times] : buckets) {
    model.averaging_us += detail::median_of(times);
    model.bytes += detail::median_of(bytes.at(bucket));
  }
  if (model.bytes <= 0 || model.averaging_us <= 0) return std::nullopt;
  model.buckets = static_cast<int>(buckets.size());
  model.link = facts.link_fit.value_or(TraceLinkFit{});
  return model;
}

}  // namespace chorus
