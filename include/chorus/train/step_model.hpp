#pragma once
/// `StepModel`: how long a step under DistributedDataParallel takes, by the numbers of one that was recorded.

#include <algorithm>
#include <chorus/train/trace_facts.hpp>
#include <chorus/train/trace_reader.hpp>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

/// A model of a step under DistributedDataParallel: passes take as long as the device's share of the batch is large,
/// the optimizer and what is left of the step always the same, and averaging K bytes of N ranks' gradients in B buckets
///   2 (N-1)/N K/beta + B 2 (N-1) alpha
/// (a ring's; Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005), of
/// which a constant part lies beside computing. Ranks that come late are not in it.
struct StepModel {
  int devices = 1;       ///< of the run
  double passes_us = 0;  ///< forward and backward of the slowest device
  double optimizer_us = 0;
  double other_us = 0;  ///< of the step: neither computing nor waiting
  double hidden = 0;    ///< part of communication beside which devices compute
  double bytes = 0;     ///< K
  int buckets = 0;      ///< B
  double alpha_us = 0;  ///< a message's
  double beta = 0;      ///< bytes per us
  int calls = 0;        ///< of the run from which alpha and beta come; 0: it has no communication

  double communication_us(int n) const {
    if (n == 1 || calls == 0) return 0;
    return 2.0 * (n - 1) / n * bytes / beta + buckets * 2.0 * (n - 1) * alpha_us;
  }
  /// With `n` devices and a batch `larger` times as large.
  double step_us(int n, double larger = 1) const {
    return passes_us * larger * devices / n + optimizer_us + other_us + (1 - hidden) * communication_us(n);
  }
};

namespace detail {

/// How long the calls of all ranks took once the last one had come: in the others' spans lies the wait for it.
struct CallTime {
  std::string op, traffic;
  double bucket = -1, bytes = 0, us = 0;
};
inline std::vector<CallTime> call_times(const Trace& trace) {
  std::map<std::pair<std::string, double>, std::pair<CallTime, std::size_t>> calls;
  for (const auto& process : trace.processes)
    for (const auto& span : process.spans) {
      const auto op = text_of(span.args, "op");
      if (span.category != "comm" || (op != "all_reduce" && op != "all_gather") || span.args.contains("group"))
        continue;
      auto& [call, ranks] = calls[{op, number_of(span.args, "sequence", -1)}];
      const double us = span.end - span.begin;
      call = {op, text_of(span.args, "traffic"), number_of(span.args, "bucket", -1), number_of(span.args, "bytes"),
              ranks == 0 ? us : std::min(call.us, us)};
      ++ranks;
    }
  std::vector<CallTime> out;
  for (const auto& [key, call] : calls)
    if (call.second == trace.processes.size()) out.push_back(call.first);
  return out;
}

}  // namespace detail

/// The model, fitted to a run: alpha is the median of its small all_gathers over their N-1 messages, beta what the
/// all_reduces of its buckets moved over the rest of their time, of each bucket the median's: on a machine whose cores
/// are shared some calls take many times as long. Nothing for a policy other than ddp and single.
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
  const double n = facts.devices;
  std::vector<double> small;
  std::map<double, std::vector<detail::CallTime>> buckets;
  for (const auto& call : detail::call_times(trace)) {
    if (call.op == "all_gather" && call.bytes <= 4096) small.push_back(call.us / (n - 1));
    if (call.op == "all_reduce" && call.traffic == "gradients") buckets[call.bucket].push_back(call);
  }
  double us = 0;
  for (auto& [bucket, calls] : buckets) {
    const auto middle = calls.begin() + static_cast<std::ptrdiff_t>((calls.size() - 1) / 2);
    std::nth_element(calls.begin(), middle, calls.end(), [](const auto& a, const auto& b) { return a.us < b.us; });
    us += middle->us;
    model.bytes += middle->bytes;
    model.calls += static_cast<int>(calls.size());
  }
  if (model.bytes <= 0 || us <= 0) return std::nullopt;
  model.buckets = static_cast<int>(buckets.size());
  if (!small.empty()) {
    const auto middle = small.begin() + static_cast<std::ptrdiff_t>((small.size() - 1) / 2);
    std::nth_element(small.begin(), middle, small.end());
    model.alpha_us = *middle;
    model.calls += static_cast<int>(small.size());
  }
  double rest = us - model.buckets * 2 * (n - 1) * model.alpha_us;
  if (rest <= 0) {  // small calls say nothing of large ones here
    model.alpha_us = 0;
    rest = us;
  }
  model.beta = 2 * (n - 1) / n * model.bytes / rest;
  return model;
}

}  // namespace chorus
