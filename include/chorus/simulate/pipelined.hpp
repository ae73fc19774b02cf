#pragma once
/// `simulate_pipeline`: steps of Pipeline by a schedule's table, for any number of ranks, in virtual time.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/parallel/pipeline/check_schedule.hpp>
#include <chorus/parallel/pipeline/schedule.hpp>
#include <chorus/simulate/links.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/tasks.hpp>
#include <chorus/simulate/training.hpp>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::simulated {

/// What a step takes on one device that has the whole model and the whole batch, in seconds; stages are equal parts of
/// it, and so are micro-batches.
struct PipelineTraining {
  Schedule schedule;
  double forward = 0, backward = 0, optimizer = 0;
  std::size_t activation = 0;  ///< bytes that a micro-batch takes from a stage to the next one, and its gradient back
};

namespace detail {

/// Each rank goes through its actions as soon as it has what they need. A rank's port sends one message after another,
/// and an activation arrives an alpha after its last byte has left. Messages of a few bytes take no time.
class PipelineWalk {
 public:
  using Time = comm::simulated::Time;
  using Kind = Schedule::Kind;
  using Action = Schedule::Action;

  PipelineWalk(const comm::simulated::SimulationOptions& options, const PipelineTraining& training)
      : options_(options), training_(training), splits_(training.schedule.splits_backward()) {
    times_.ranks.resize(training.schedule.ranks.size());
    ports_.resize(times_.ranks.size());
  }

  void step(int number) {
    const auto cells = static_cast<std::size_t>(schedule().stages) * static_cast<std::size_t>(schedule().micro_batches);
    for (auto& there : there_) there.assign(cells, never);
    std::vector<std::size_t> next(times_.ranks.size(), 0);
    std::vector<Time> begun;
    for (const auto& rank : times_.ranks) begun.push_back(rank.end);
    for (bool any = true; std::exchange(any, false);)
      for (std::size_t rank = 0; rank < next.size(); ++rank)
        for (const auto& actions = schedule().ranks[rank];
             next[rank] < actions.size() && carry_out(static_cast<int>(rank), actions[next[rank]], number); any = true)
          ++next[rank];
    for (std::size_t rank = 0; rank < next.size(); ++rank) {
      compute(static_cast<int>(rank), training_.optimizer / schedule().size(), number, "optimizer", "optimizer step");
      mark(static_cast<int>(rank), "step", cat("step ", number), begun[rank], number);
    }
  }
  /// Seconds that ranks have waited, all together.
  double waited() const { return waited_; }
  comm::simulated::SimulatedTimes take() { return std::move(times_); }

 private:
  static constexpr Time never = Time::min();

  const Schedule& schedule() const { return training_.schedule; }
  comm::simulated::RankTimes& of(int rank) { return times_.ranks[static_cast<std::size_t>(rank)]; }
  // When what the action takes from another stage is there.
  Time& there(Kind kind, int micro_batch, int stage) {
    const auto cell = static_cast<std::size_t>(stage * schedule().micro_batches + micro_batch);
    return there_[static_cast<std::size_t>(kind)][cell];
  }

  bool carry_out(int rank, const Action& action, int step) {
    const auto [kind, i, stage] = action;
    const int from = kind == Kind::forward ? stage - 1 : kind == Kind::backward ? stage + 1 : -1;
    Time& clock = of(rank).end;
    if (from >= 0 && from < schedule().stages) {
      const Time came = there(kind, i, stage);
      if (came == never) return false;
      if (came > clock) {
        const Time begun = std::exchange(clock, came);
        waited_ += comm::simulated::seconds(came - begun);
        mark(rank, "bubble", cat("bubble before ", name(kind), " of micro-batch ", i), begun);
      }
    }
    const double parts = static_cast<double>(schedule().stages) * schedule().micro_batches;
    const double usual = kind == Kind::forward ? training_.forward : training_.backward / (splits_ ? 2 : 1);
    compute(rank, usual / parts, step, kind == Kind::forward ? "forward" : "backward",
            cat(name(kind), " of micro-batch ", i, " in stage ", stage));
    if (kind == Kind::forward && stage + 1 < schedule().stages) send(rank, kind, i, stage + 1);
    if (kind == Kind::backward && stage > 0) send(rank, kind, i, stage - 1);
    return true;
  }
  void compute(int rank, double usual, int step, std::string_view kind, const std::string& what) {
    Time& clock = of(rank).end;
    const Time begun = clock;
    const auto own = comm::simulated::time_of("compute", usual);
    clock = comm::simulated::later(clock, options_.computing.time(own, rank, static_cast<std::uint32_t>(step)));
    mark(rank, kind, what, begun);
  }
  void send(int rank, Kind kind, int micro_batch, int stage) {
    const int to = schedule().rank_of(stage);
    const Time ready = of(rank).end;
    if (to == rank) {
      there(kind, micro_batch, stage) = ready;
      return;
    }
    const auto& links = options_.links;
    const bool near = links.island == 0 || rank / links.island == to / links.island;
    const auto& link = near ? links.inside : links.between;
    Time& port = ports_[static_cast<std::size_t>(rank)];
    const Time begun = std::max(ready, port);
    port = comm::simulated::later(begun, link.transfer(training_.activation));
    there(kind, micro_batch, stage) = comm::simulated::later(port, link.latency());
    if (!options_.keep_spans) return;
    comm::simulated::Span span;
    span.call.envelope.op = comm::Op::message;
    span.call.envelope.sequence = static_cast<std::uint32_t>(of(rank).calls.size());
    span.call.envelope.count = training_.activation;
    span.call.peer = to;
    span.traffic = trace::Traffic::activations;
    span.bytes = training_.activation;
    span.begun = begun;
    span.ended = port;
    span.sent[to] = training_.activation;
    of(rank).calls.push_back(std::move(span));
  }
  void mark(int rank, std::string_view kind, std::string_view what, Time begun, int number = -1) {
    if (options_.keep_spans)
      of(rank).marks.push_back({std::string(kind), std::string(what), begun, of(rank).end, 0, number});
  }

  const comm::simulated::SimulationOptions& options_;
  const PipelineTraining& training_;
  const bool splits_;
  comm::simulated::SimulatedTimes times_;
  std::vector<Time> ports_;     // when each is free again
  std::vector<Time> there_[3];  // by kind, stage and micro-batch
  double waited_ = 0;
};

}  // namespace detail

/// Trains for so many steps, a rank for each of the table's. Throws UsageError for a table that check_schedule refuses.
[[gnu::cold]] inline TrainingTimes simulate_pipeline(const comm::simulated::SimulationOptions& options,
                                                     const PipelineTraining& training, int steps) {
  check<UsageError>(steps >= 1 && steps <= 100'000, "simulate_pipeline: ", steps, " steps, expected 1 to 100000");
  check_schedule(training.schedule);
  detail::PipelineWalk walk(options, training);
  for (int step = 0; step < steps; ++step) walk.step(step);
  TrainingTimes out;
  out.exposed = walk.waited() / training.schedule.size() / steps;
  out.times = walk.take();
  out.step = out.times.seconds() / steps;
  return out;
}

}  // namespace chorus::simulated
