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
/// and an activation arrives an alpha after its last byte has left. Messages of a few bytes take no time. The ranks of
/// neighbouring stages are `apart`.
class PipelineWalk {
 public:
  using Time = comm::simulated::Time;
  using Kind = Schedule::Kind;
  using Action = Schedule::Action;

  PipelineWalk(const comm::simulated::SimulationOptions& options, const PipelineTraining& training, int apart = 1)
      : options_(options), training_(training), apart_(apart), splits_(training.schedule.splits_backward()) {
    times_.ranks.resize(training.schedule.ranks.size());
    ports_.resize(times_.ranks.size());
    sent_.resize(times_.ranks.size());
  }
  PipelineWalk(const PipelineWalk&) = delete;
  PipelineWalk& operator=(const PipelineWalk&) = delete;
  virtual ~PipelineWalk() = default;

  void step(int number) {
    const auto cells = static_cast<std::size_t>(schedule().stages) * static_cast<std::size_t>(schedule().micro_batches);
    for (auto& there : there_) there.assign(cells, never);
    std::vector<std::size_t> next(times_.ranks.size(), 0);
    std::vector<Time> begun;
    for (const auto& rank : times_.ranks) begun.push_back(rank.end);
    for (int rank = 0; rank < schedule().size(); ++rank) begin(rank);
    for (bool any = true; std::exchange(any, false);)
      for (std::size_t rank = 0; rank < next.size(); ++rank)
        for (const auto& actions = schedule().ranks[rank];
             next[rank] < actions.size() && carry_out(static_cast<int>(rank), actions[next[rank]], number); any = true)
          ++next[rank];
    for (std::size_t rank = 0; rank < next.size(); ++rank) {
      finish(static_cast<int>(rank));
      const Time passed = times_.ranks[rank].end;
      compute(static_cast<int>(rank), training_.optimizer / schedule().size(), number);
      mark(static_cast<int>(rank), "optimizer", "optimizer step", passed);
      mark(static_cast<int>(rank), "step", cat("step ", number), begun[rank], number);
    }
  }
  /// Bytes that a rank has sent.
  double sent(int rank) const { return sent_[static_cast<std::size_t>(rank)]; }
  comm::simulated::SimulatedTimes take() { return std::move(times_); }

 protected:
  comm::simulated::RankTimes& of(int rank) { return times_.ranks[static_cast<std::size_t>(rank)]; }
  // What a rank does in a step before its actions, in each of them, and after them.
  virtual void begin(int) {}
  virtual void act(int rank, const Action& action, double usual, int step) {
    const Time begun = of(rank).end;
    compute(rank, usual, step);
    mark(rank, action, begun);
  }
  virtual void finish(int) {}
  void mark(int rank, const Action& action, Time begun) {
    if (options_.keep_spans)
      mark(rank, action.kind == Kind::forward ? "forward" : "backward",
           cat(name(action.kind), " of micro-batch ", action.micro_batch, " in stage ", action.stage), begun);
  }

 private:
  static constexpr Time never = Time::min();

  const Schedule& schedule() const { return training_.schedule; }
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
        of(rank).waited += came - begun;
        mark(rank, "bubble", cat("bubble before ", name(kind), " of micro-batch ", i), begun);
      }
    }
    const double parts = static_cast<double>(schedule().stages) * schedule().micro_batches;
    const double usual = kind == Kind::forward ? training_.forward : training_.backward / (splits_ ? 2 : 1);
    act(rank, action, usual / parts, step);
    if (kind == Kind::forward && stage + 1 < schedule().stages) send(rank, kind, i, stage + 1);
    if (kind == Kind::backward && stage > 0) send(rank, kind, i, stage - 1);
    return true;
  }
  void compute(int rank, double usual, int step) {
    const auto own = comm::simulated::time_of("compute", usual);
    of(rank).end =
        comm::simulated::later(of(rank).end, options_.computing.time(own, rank, static_cast<std::uint32_t>(step)));
  }
  void send(int rank, Kind kind, int micro_batch, int stage) {
    const int to = schedule().rank_of(stage);
    const Time ready = of(rank).end;
    if (to == rank) {
      there(kind, micro_batch, stage) = ready;
      return;
    }
    const auto& links = options_.links;
    const bool near = links.island == 0 || rank * apart_ / links.island == to * apart_ / links.island;
    const auto& link = near ? links.inside : links.between;
    Time& port = ports_[static_cast<std::size_t>(rank)];
    const Time begun = std::max(ready, port);
    port = comm::simulated::later(begun, link.transfer(training_.activation));
    there(kind, micro_batch, stage) = comm::simulated::later(port, link.latency());
    sent_[static_cast<std::size_t>(rank)] += static_cast<double>(training_.activation);
    if (!options_.keep_spans) return;
    comm::simulated::Span span;
    span.call.envelope.op = comm::Op::message;
    span.call.envelope.sequence = static_cast<std::uint32_t>(of(rank).calls.size());
    span.call.envelope.count = training_.activation;
    span.call.peer = to * apart_;
    span.traffic = trace::Traffic::activations;
    span.bytes = training_.activation;
    span.begun = begun;
    span.ended = apart_ == 1 ? port : begun;  // calls along other axes go on meanwhile, in the same lane
    span.sent[to * apart_] = training_.activation;
    of(rank).calls.push_back(std::move(span));
  }
  void mark(int rank, std::string_view kind, std::string_view what, Time begun, int number = -1) {
    if (options_.keep_spans)
      of(rank).marks.push_back({std::string(kind), std::string(what), begun, of(rank).end, 0, number});
  }

  const comm::simulated::SimulationOptions& options_;
  const PipelineTraining& training_;
  const int apart_;
  const bool splits_;
  comm::simulated::SimulatedTimes times_;
  std::vector<Time> ports_;     // when each is free again
  std::vector<double> sent_;
  std::vector<Time> there_[3];  // by kind, stage and micro-batch
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
  out.times = walk.take();
  count_steps(out, steps);
  return out;
}

}  // namespace chorus::simulated
