#pragma once
/// What a trace's numbers mean, in sentences, and what might make the run faster or better, each with the figures
/// behind it. What a trace does not tell is left out.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/train/trace_facts.hpp>
#include <chorus/train/trace_reader.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus {

/// Something that was measured. `section` is that of chorus-page to which it belongs: happened, timeline, links,
/// memory, ring, gradients or formulas.
struct TraceSentence {
  std::string text = {}, section = {};
};
struct TraceAdvice {
  std::string text = {};
  std::string figures = {};  ///< what was measured, and how the rest follows from it
  std::string section = {};
};
/// A run as chorus-page shows it.
struct TracedRun {
  std::string name = {};
  Trace trace = {};
  TraceFacts facts = {};
};

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

inline std::string decimals(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}
/// A length of time with three digits or so.
inline std::string time_text(double us) {
  if (us == 0) return "0 us";
  if (us < 9.995) return decimals(us, 1) + " us";
  if (us < 999.5) return decimals(us, 0) + " us";
  if (us < 999500) return decimals(us / 1000, us < 9995 ? 2 : us < 99950 ? 1 : 0) + " ms";
  return decimals(us / 1e6, 2) + " s";
}
inline std::string bytes_text(double bytes) {
  if (bytes < 1024) return decimals(bytes, 0) + " bytes";
  if (bytes < 1024 * 1024) return decimals(bytes / 1024, 1) + " KiB";
  if (bytes < 1024.0 * 1024 * 1024) return decimals(bytes / 1024 / 1024, 1) + " MiB";
  return decimals(bytes / 1024 / 1024 / 1024, 2) + " GiB";
}
inline std::string percent_text(double part) { return decimals(100 * part, 0) + " %"; }
/// 2.00 as 2, 0.05 as 0.05.
inline std::string number_text(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}
inline std::string plural(double count, std::string_view noun) {
  return cat(number_text(count), ' ', noun, count == 1 ? "" : "s");
}
inline bool has_ranks(const TraceFacts& facts) { return facts.policy != "dp" && facts.policy != "single"; }
inline std::string_view place_noun(const TraceFacts& facts) { return has_ranks(facts) ? "rank" : "device"; }
/// A quantity of all devices: "1 ms" or "1 ms to 2 ms".
template <class Text>
std::string range_text(const std::vector<double>& values, const Text& text) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  const auto low = text(*least), high = text(*most);
  return low == high ? low : cat(low, " to ", high);
}
inline double most_of(const std::vector<double>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}
/// The whole batch, as the run or its loaders have told it; 0 where they have not.
inline double batch_of(const Trace& trace) {
  if (const auto& note = trace.number("batch"); note.is_number()) return note.get<double>();
  double batch = 0;
  for (const auto& process : trace.processes)
    for (const auto& span : process.spans)
      if (span.category == "loader") batch = std::max(batch, number_of(span.args, "batch"));
  return batch;
}

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

inline double total_of(const nlohmann::json& peak) {
  double sum = 0;
  if (peak.is_object())
    for (const auto& bytes : peak) sum += bytes.get<double>();
  return sum;
}
/// A peak's kinds, largest first: "activations 4.1 MiB, parameters 0.2 MiB".
inline std::string kinds_text(const nlohmann::json& peak) {
  std::vector<std::pair<double, std::string>> kinds;
  for (const auto& [kind, bytes] : peak.items())
    if (bytes.get<double>() > 0) kinds.emplace_back(-bytes.get<double>(), kind);
  std::sort(kinds.begin(), kinds.end());
  std::string out;
  for (const auto& [bytes, kind] : kinds)
    out += cat(out.empty() ? "" : ", ", kind == "optimizer" ? "optimizer state" : kind, ' ', bytes_text(-bytes));
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

/// What was measured, in sentences.
inline std::vector<TraceSentence> sentences_of(const Trace& trace, const TraceFacts& facts) {
  using namespace detail;
  std::vector<TraceSentence> out;
  const auto noun = place_noun(facts);
  const auto kind = trace.metadata.at("device_kind").get<std::string>();
  const int first = trace.metadata.at("first_step");
  const auto say = [&](std::string_view section, const auto&... parts) {
    out.push_back({cat(parts...), std::string(section)});
  };
  say("happened", "Policy ", facts.policy, " on ", plural(facts.devices, kind + " device"), ": ",
      plural(facts.steps, "step"), " recorded from step ", first, " on; step ", facts.median_step,
      ", the median, is shown in full.");
  if (const double batch = batch_of(trace); batch > 0)
    say("happened", "A batch has ", plural(batch, "sample"),
        facts.devices == 1 ? std::string()
                           : cat("; each ", noun, " has ", range_text(facts.samples, number_text), " of them"),
        ".");
  if (const auto& period = trace.number("period"); period.is_number())
    say("happened", "Ranks take the mean of their parameters every ", number_text(period.get<double>()), " steps.");
  say("timeline", "A step takes ", time_text(facts.step_us), " (median of ", facts.steps, ", slowest ", noun, ").");
  say("timeline", "In it a ", noun, " computes for ", range_text(facts.compute_us, time_text),
      " (t1): ", range_text(facts.utilisation, percent_text), " of its step.");
  if (most_of(facts.communication_us) > 0) {
    say("timeline", "Communication is under way for ", range_text(facts.communication_us, time_text),
        " (t2); the program waits for it ", range_text(facts.exposed_us, time_text), ", and ",
        percent_text(facts.hidden.value_or(0)), " of it lies beside computing.");
  } else if (facts.devices > 1) {
    int with = 0;
    double most = 0;
    for (const auto& [number, times] : step_times(trace)) {
      double longest = 0;
      for (std::size_t place = 0; place < times.size(); ++place)
        longest = std::max(longest, time_of(trace.processes[place], {"comm", "copy"}, times[place]).length());
      with += longest > 0 ? 1 : 0;
      most = std::max(most, longest);
    }
    say("timeline", "No communication lies in this step; ",
        with == 0 ? std::string("nor in another one that was recorded.")
                  : cat(with, " of the ", facts.steps, " recorded steps ", with == 1 ? "has" : "have", " up to ",
                        time_text(most), " of it."));
  }
  auto latest = facts.late;
  std::sort(latest.begin(), latest.end(), [](const TraceLate& a, const TraceLate& b) { return a.us > b.us; });
  for (std::size_t i = 0; i < std::min<std::size_t>(3, latest.size()); ++i)
    say("timeline", "Others waited for rank ", latest[i].rank, " ", time_text(latest[i].us), " a step, in ",
        decimals(latest[i].times, 1), " calls a step to which it came last.");
  if (latest.size() > 3)
    say("timeline", "They waited less for ", plural(static_cast<double>(latest.size() - 3), "other rank"), ".");
  if (const double us = most_of(facts.loader_us); us > 0)
    say("timeline", "The longest wait for the next batch took ", time_text(us), " of the step.");
  // Of many links, those that carry the same together.
  std::map<std::tuple<std::string, double, double, std::string>, std::vector<const TraceLink*>> alike;
  for (const auto& link : facts.links)
    if (link.kind != "control") alike[{link.kind, link.bytes, link.formula.value_or(-1), link.rule}].push_back(&link);
  for (const auto& [carried, links] : alike) {
    const auto rest = cat(decimals(links.front()->bytes, 0), " bytes of ", links.front()->kind,
                          links.front()->formula ? cat("; the formula, ", links.front()->rule, ", gives ",
                                                       decimals(*links.front()->formula, 0))
                                                 : std::string(),
                          ".");
    if (links.size() > 4)
      say("links", "In a step each of ", links.size(), " links between ", noun, "s carries ", rest);
    else
      for (const auto* link : links)
        say("links", "In a step ", noun, ' ', link->from, " sends ", noun, ' ', link->to, " ", rest);
  }
  std::size_t fullest = 0;
  for (std::size_t place = 0; place < facts.peak.size(); ++place)
    if (total_of(facts.peak[place]) > total_of(facts.peak[fullest])) fullest = place;
  for (std::size_t place = 0; place < facts.peak.size(); ++place)
    if (const auto total = total_of(facts.peak[place]); total > 0 && (facts.peak.size() <= 8 || place == fullest))
      say("memory", "At its peak ", noun, ' ', place, facts.peak.size() <= 8 ? "" : ", which has most,", " holds ",
          bytes_text(total), ": ", kinds_text(facts.peak[place]), ".");
  std::set<double> buckets;
  double first_full = -1, backward_end = 0;
  const auto step = step_times(trace).at(facts.median_step).front();
  for (const auto& instant : trace.processes.front().instants)
    if (instant.category == "bucket" && instant.begin >= step.begin && instant.begin <= step.end) {
      buckets.insert(number_of(instant.args, "bucket"));
      if (first_full < 0) first_full = instant.begin;
    }
  for (const auto& span : trace.processes.front().spans)
    if (span.category == "backward" && span.begin >= step.begin && span.end <= step.end)
      backward_end = std::max(backward_end, span.end);
  if (facts.gradient_bytes) say("gradients", "The model has ", bytes_text(*facts.gradient_bytes), " of gradients (K).");
  if (!buckets.empty())
    say("gradients", "They leave in ", plural(static_cast<double>(buckets.size()), "bucket"),
        "; on rank 0 the first is full ", time_text(std::max(0.0, backward_end - first_full)),
        " before backward ends.");
  std::size_t chunks = 0;
  std::set<double> calls;
  for (const auto& span : trace.processes.front().spans)
    if (span.category == "ring" && span.begin >= step.begin && span.begin < step.end) {
      ++chunks;
      calls.insert(number_of(span.args, "sequence"));
    }
  if (chunks > 0)
    say("ring", "Rank 0 makes ", plural(static_cast<double>(chunks), "step"), " in ",
        plural(static_cast<double>(calls.size()), "call"), "; a ring of ", facts.devices, " ranks takes ",
        2 * (facts.devices - 1), " rounds: ", facts.devices - 1, " that add and ", facts.devices - 1, " that copy.");
  if (const auto model = fit_step_model(trace, facts); model && model->calls > 0)
    say("formulas",
        "Averaging K bytes of gradients in B buckets by rings takes 2 (N-1)/N K/beta + B 2 (N-1) alpha: with "
        "N = ",
        facts.devices, ", K = ", bytes_text(model->bytes), ", B = ", model->buckets,
        ", beta = ", decimals(model->beta / 1000, 2), " GB/s and alpha = ", time_text(model->alpha_us), ", fitted to ",
        model->calls, " calls of this run, ", time_text(model->communication_us(facts.devices)), ".");
  return out;
}

/// What might make the run faster or better.
inline std::vector<TraceAdvice> advice_of(const Trace& trace, const TraceFacts& facts) {
  using namespace detail;
  std::vector<TraceAdvice> out;
  const auto noun = place_noun(facts);
  const auto add = [&](std::string_view section, std::string text, std::string figures) {
    out.push_back({std::move(text), std::move(figures), std::string(section)});
  };
  double late = 0, mean_step = 0;
  for (const auto& rank : facts.late) late += rank.us;
  for (const auto& [number, times] : step_times(trace)) mean_step += slowest(times) / facts.steps;
  const double t1 = most_of(facts.compute_us), t2 = most_of(facts.communication_us),
               exposed = most_of(facts.exposed_us);
  if (t1 > 0 && t2 > 0)
    add("timeline",
        t2 > t1 && late > 0.5 * t2
            ? "Communication takes longer than computing, but most of it is waiting for the rank that comes last."
        : t2 > t1 ? "Communication takes longer than computing: a larger batch, or fewer devices, gives it less weight."
        : exposed > 0.1 * facts.step_us
            ? "Computing takes longer than communication, but waiting for it is more than a tenth of the step."
            : "Computing takes longer than communication, which is hardly waited for: it is no hindrance here.",
        cat("computing t1 = ", time_text(t1), ", communication t2 = ", time_text(t2),
            ", t2/t1 = ", decimals(t2 / t1, 2),
            has_ranks(facts) ? cat(", waits for who comes last ", time_text(late), " on average") : std::string(),
            ", waited for ", time_text(exposed), " of a step of ", time_text(facts.step_us)));
  const double batch = batch_of(trace);
  const auto& classes = trace.number("classes");
  if (const auto model = fit_step_model(trace, facts); model && model->passes_us > 0) {
    const auto assumption = [&](std::string_view what) {
      return cat("An estimate: ", what,
                 ", if each device has cores of its own and passes take as long as the share of the batch is large.");
    };
    const auto ring = cat("K = ", bytes_text(model->bytes), ", B = ", model->buckets,
                          ", beta = ", decimals(model->beta / 1000, 2), " GB/s, alpha = ", time_text(model->alpha_us),
                          " from ", model->calls, " calls, ", percent_text(model->hidden), " hidden");
    const double now = model->step_us(facts.devices);
    if (model->calls > 0) {
      const int more = 2 * facts.devices;
      const double then = model->step_us(more), faster = now / then;
      add("formulas",
          cat(faster > 1.1   ? "Twice as many devices would help. "
              : faster > 1.0 ? "Twice as many devices would hardly help. "
                             : "Twice as many devices would not help. ",
              assumption(cat(more, " devices with the same batch would be ", decimals(faster, 2), " times as fast as ",
                             facts.devices))),
          cat("step by the model ", time_text(now), " with ", facts.devices, ", ", time_text(then), " with ", more,
              " devices (late ranks not counted; measured ", time_text(facts.step_us), "); communication ",
              time_text(model->communication_us(facts.devices)), " and ", time_text(model->communication_us(more)),
              "; ", ring));
    }
    const double twice = model->step_us(facts.devices, 2), gain = 2 * now / twice;
    add("formulas",
        cat(gain > 1.1 ? "A larger batch would use the devices better. " : "A larger batch would hardly help. ",
            assumption(cat("twice the batch would take ", decimals(gain, 2), " times as many samples a second"))),
        cat("step by the model ", time_text(now), " now, ", time_text(twice), " with twice the batch: of it ",
            time_text(2 * model->passes_us), " forward and backward",
            model->calls > 0 ? cat(", communication as before; ", ring) : std::string()));
  }
  const auto idlest = static_cast<std::size_t>(std::min_element(facts.utilisation.begin(), facts.utilisation.end()) -
                                               facts.utilisation.begin());
  const auto [least, most] = std::minmax_element(facts.compute_us.begin(), facts.compute_us.end());
  if (const double idle = 1 - facts.utilisation[idlest]; idle > 0.1)
    add("timeline",
        cat("A ", noun, " is idle for up to ", percent_text(idle), " of the step",
            *least < 0.8 * *most
                ? cat("; the work is not even: ", noun, ' ', least - facts.compute_us.begin(), " has least of it.")
                : std::string(".")),
        cat("computing / step: ", range_text(facts.utilisation, percent_text), "; of its step ", noun, ' ', idlest,
            " computes ", time_text(facts.compute_us[idlest]), ", waits ", time_text(facts.exposed_us[idlest]),
            " for communication and ", time_text(facts.loader_us[idlest]), " for the next batch"));
  if (batch > 0 && classes.is_number() && classes.get<double>() > 0) {
    const double wanted = 10 * classes.get<double>();
    add("happened",
        batch < wanted ? "A batch has few samples of each class: by a rule of thumb it should have ten."
                       : "A batch has ten samples of each class or more, as a rule of thumb wants it.",
        cat("batch ", number_text(batch), ", 10 x ", number_text(classes.get<double>()),
            " classes = ", number_text(wanted)));
  }
  const auto& rate = trace.number("lr");
  const auto& notes = trace.metadata.at("notes");
  const bool sgd = !notes.contains("optimizer") || notes.at("optimizer") == "sgd";
  if (batch > 0 && rate.is_number() && rate.get<double>() > 0 && sgd) {
    const double lr = rate.get<double>();
    add("formulas",
        cat("For a batch k times as large take k times the learning rate, reached in a warm-up: with ",
            number_text(2 * batch), " samples ", number_text(2 * lr), " (Goyal et al. 2017, for SGD)."),
        cat("batch ", number_text(batch), ", learning rate ", number_text(lr)));
  }
  for (std::size_t place = 0; place < facts.samples.size(); ++place)
    if (const double share = facts.samples[place]; share > 0 && share < 8) {
      add("timeline",
          cat("The share of ", noun, ' ', place,
              " is small: below 8 samples, passes don't get much shorter with fewer. Fewer devices or a larger batch "
              "use "
              "them better."),
          cat(plural(share, "sample"), ", ", time_text(facts.compute_us[place] / share), " of computing for each"));
      break;
    }
  if (const auto last = std::max_element(facts.late.begin(), facts.late.end(),
                                         [](const TraceLate& a, const TraceLate& b) { return a.us < b.us; });
      last != facts.late.end() && last->us > 0.05 * mean_step)
    add("timeline",
        cat("Others wait for rank ", last->rank,
            ": look whether it has more work, a slower machine, or a core that it shares."),
        cat(time_text(last->us), " a step, ", percent_text(last->us / mean_step), " of the mean step, in ",
            decimals(last->times, 1), " calls"));
  if (const double us = most_of(facts.loader_us); us > 0.05 * facts.step_us)
    add("timeline", "Training waits for data: more threads that prepare batches (--workers), or cheaper transforms.",
        cat(time_text(us), " of ", time_text(facts.step_us), ", ", percent_text(us / facts.step_us), " of the step"));
  return out;
}

/// What several runs show beside each other: how fast they are, why one waits less than another, and what device 0 of
/// DataParallel holds more than the others.
inline std::vector<TraceSentence> compare_runs(const std::vector<TracedRun>& runs) {
  using namespace detail;
  std::vector<TraceSentence> out;
  const auto say = [&](std::string_view section, const auto&... parts) {
    out.push_back({cat(parts...), std::string(section)});
  };
  // Of the first one's model: by what it has of gradients.
  const auto same_model = [&](const TracedRun& run) {
    const auto &a = run.facts.gradient_bytes, &b = runs.front().facts.gradient_bytes;
    return !a || !b || *a == *b;
  };
  const auto find = [&](std::string_view policy) -> const TracedRun* {
    for (const auto& run : runs)
      if (run.facts.policy == policy && same_model(run)) return &run;
    return nullptr;
  };
  if (runs.size() > 1) {
    const auto* base = find("single") != nullptr ? find("single") : &runs.front();
    for (const auto& run : runs) {
      if (&run == base) continue;
      if (!same_model(run)) {
        say("happened", run.name, " trains another model than ", runs.front().name, ", of ",
            bytes_text(*run.facts.gradient_bytes), " of gradients instead of ",
            bytes_text(*runs.front().facts.gradient_bytes), ": they are not compared.");
        continue;
      }
      const double batch = batch_of(run.trace), base_batch = batch_of(base->trace);
      const auto& a = run.facts;
      const auto& b = base->facts;
      if (batch == base_batch)
        say("happened", "A step of ", run.name, " takes ", time_text(a.step_us), ", one of ", base->name, " ",
            time_text(b.step_us), ": ", run.name, " is ", decimals(b.step_us / a.step_us, 2), " times as fast.");
      else if (batch > 0 && base_batch > 0)
        say("happened", "The batches differ: ", run.name, " trains on ", decimals(batch / a.step_us * 1e6, 0),
            " samples a second (batch ", number_text(batch), "), ", base->name, " on ",
            decimals(base_batch / b.step_us * 1e6, 0), " (batch ", number_text(base_batch), "): ", run.name, " is ",
            decimals(batch / a.step_us / (base_batch / b.step_us), 2), " times as fast.");
    }
  }
  const auto *dp = find("dp"), *ddp = find("ddp");
  if (dp != nullptr && ddp != nullptr) {
    const double parallel = most_of(dp->facts.exposed_us), distributed = most_of(ddp->facts.exposed_us),
                 hidden = ddp->facts.hidden.value_or(0);
    double late = 0;
    for (const auto& rank : ddp->facts.late) late += rank.us;
    if (distributed <= parallel)
      say("timeline", ddp->name, " waits ", time_text(distributed), " a step for communication, ", dp->name, " ",
          time_text(parallel), ": gradients leave in buckets while backward still computes, and ", percent_text(hidden),
          " of communication is hidden so; the copies of DataParallel lie between its passes.");
    else
      say("timeline", ddp->name, " waits ", time_text(distributed), " a step for communication, ", dp->name, " ",
          time_text(parallel), ": here the ranks wait for each other, ", time_text(late),
          " a step on average for who comes last; ", percent_text(hidden),
          " of communication is hidden behind backward.");
  }
  if (dp != nullptr && dp->facts.peak.size() > 1 && dp->facts.peak[0].is_object() && dp->facts.peak[1].is_object()) {
    const auto &first = dp->facts.peak[0], &second = dp->facts.peak[1];
    std::string more;
    for (const auto& [kind, bytes] : first.items()) {
      const double by = bytes.get<double>() - number_of(second, kind.c_str());
      if (by > 0)
        more +=
            cat(more.empty() ? "" : ", ", bytes_text(by), " more of ", kind == "optimizer" ? "optimizer state" : kind);
    }
    if (!more.empty() && total_of(first) > total_of(second))
      say("memory", "Under ", dp->name, " device 0 holds ", bytes_text(total_of(first)), " at its peak, device 1 ",
          bytes_text(total_of(second)), ": ", more,
          ". The whole batch, all outputs and the loss are on device 0, and only there the optimizer steps.");
  }
  return out;
}

/// Advice, and what was measured, as text for a terminal.
inline std::string advice_text(const Trace& trace) {
  const auto facts = facts_of(trace);
  std::string out = "What the trace says:\n";
  for (const auto& sentence : sentences_of(trace, facts))
    if (sentence.section == "happened" || sentence.section == "timeline") out += cat("  ", sentence.text, '\n');
  out += "Advice:\n";
  for (const auto& advice : advice_of(trace, facts)) out += cat("  ", advice.text, "\n    ", advice.figures, '\n');
  return out;
}

}  // namespace chorus
