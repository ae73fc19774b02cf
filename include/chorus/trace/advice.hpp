#pragma once
/// What might make a run that was traced faster or better, each with the figures behind it, and what several runs show
/// beside each other. What a trace does not tell is left out.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/trace/step_model.hpp>
#include <chorus/trace/trace_facts.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <chorus/trace/trace_sentences.hpp>
#include <chorus/trace/trace_times.hpp>
#include <chorus/trace/trace_words.hpp>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus {

/// A sentence about a run, what it follows from, and where the page has it.
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
            : "Computing takes longer than communication, and the wait for it is short.",
        cat("computing t1 = ", time_text(t1), ", communication t2 = ", time_text(t2),
            ", t2/t1 = ", decimals(t2 / t1, 2),
            has_ranks(facts) ? cat(", waits for who comes last ", time_text(late), " on average") : std::string(),
            ", waited for ", time_text(exposed), " of a step of ", time_text(facts.step_us)));
  if (const double bubbles = most_of(facts.bubble_us); bubbles > 0.1 * facts.step_us)
    add("timeline",
        "Stages of the pipeline wait for each other: more micro-batches, another schedule, as ZeroBubbleH1 or "
        "Interleaved, or a cut by measured times leave less of that.",
        cat("bubbles of ", range_text(facts.bubble_us, time_text), " in a step of ", time_text(facts.step_us)));
  const double batch = batch_of(trace);
  const auto& classes = trace.number("classes");
  if (const auto model = fit_step_model(trace, facts); model && model->passes_us > 0) {
    const auto assumption = [&](std::string_view what) {
      return cat("An estimate: ", what,
                 ", if each device has its own cores and the time of a pass is proportional to its share of "
                 "the batch.");
    };
    const auto ring =
        model->link.calls > 0
            ? cat("K = ", gradients_text(model->bytes, facts), ", n = ", model->buckets,
                  ", B = ", bytes_text(model->link.bandwidth * 1e6), "/s, alpha = ", time_text(model->link.alpha_us),
                  " from ", model->link.calls, " calls, ", percent_text(model->hidden), " hidden")
            : cat("averaging ", bytes_text(model->bytes), " takes ", time_text(model->averaging_us), ", ",
                  percent_text(model->hidden), " hidden");
    const double now = model->step_us(facts.devices);
    if (model->link.calls > 0) {
      const int more = 2 * facts.devices;
      const double then = model->step_us(more), faster = now / then;
      add("formulas",
          cat(faster > 1.1   ? "Twice the devices would help. "
              : faster > 1.0 ? "Twice the devices would help little. "
                             : "Twice the devices would not help. ",
              assumption(cat(more, " devices with the same batch would be ", decimals(faster, 2), " times as fast as ",
                             facts.devices))),
          cat("step by the model ", time_text(now), " with ", facts.devices, ", ", time_text(then), " with ", more,
              " devices (late ranks not counted; measured ", time_text(facts.step_us), "); communication ",
              time_text(model->communication_us(facts.devices)), " and ", time_text(model->communication_us(more)),
              "; ", ring));
    }
    const double twice = model->step_us(facts.devices, 2), gain = 2 * now / twice;
    add("formulas",
        cat(gain > 1.1 ? "A larger batch would use the devices better. " : "A larger batch would help little. ",
            assumption(cat("twice the batch would take ", decimals(gain, 2), " times as many samples a second"))),
        cat("step by the model ", time_text(now), " now, ", time_text(twice), " with twice the batch: of it ",
            time_text(2 * model->passes_us), " forward and backward",
            model->bytes > 0 ? cat(", communication as before; ", ring) : std::string()));
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
            facts.policy == "dp" ? " for communication and other devices, and " : " for communication and ",
            time_text(facts.loader_us[idlest]), " for the next batch"));
  if (batch > 0 && classes.is_number() && classes.get<double>() > 0) {
    const double wanted = 10 * classes.get<double>();
    add("happened",
        batch < wanted ? "A batch has few samples of each class: by a rule of thumb it should have ten."
                       : "A batch has ten samples of each class or more, which is the rule of thumb.",
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
      const auto cores = cores_text(run.trace, a), busy = cores.empty() ? cores : ' ' + cores;
      if (batch == base_batch)
        say("happened", "A step of ", run.name, " takes ", time_text(a.step_us), ", one of ", base->name, " ",
            time_text(b.step_us), ": ", run.name, " is ", decimals(b.step_us / a.step_us, 2), " times as fast.", busy);
      else if (batch > 0 && base_batch > 0)
        say("happened", "The batches differ: ", run.name, " trains on ", decimals(batch / a.step_us * 1e6, 0),
            " samples a second (batch ", number_text(batch), "), ", base->name, " on ",
            decimals(base_batch / b.step_us * 1e6, 0), " (batch ", number_text(base_batch), "): ", run.name, " is ",
            decimals(batch / a.step_us / (base_batch / b.step_us), 2), " times as fast.", busy);
    }
  }
  const auto *dp = find("dp"), *ddp = find("ddp");
  if (dp != nullptr && ddp != nullptr) {
    const double parallel = most_of(dp->facts.communication_us), distributed = most_of(ddp->facts.exposed_us),
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
