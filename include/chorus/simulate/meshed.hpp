#pragma once
/// `simulate_mesh`: steps of Mesh, with axes pipe, data or shard, and tensor, in virtual time.
///
/// The ranks of a stage do the same at the same time: one of them is computed, call by call. What a call of the ranks
/// along an axis takes is simulated once, message by message, for each operation and size.

#include <algorithm>
#include <array>
#include <chorus/comm/world.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/ddp/ddp_options.hpp>
#include <chorus/parallel/pipeline/schedule.hpp>
#include <chorus/simulate/links.hpp>
#include <chorus/simulate/models.hpp>
#include <chorus/simulate/pipelined.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/simulated_engine.hpp>
#include <chorus/simulate/training.hpp>
#include <chorus/simulate/units.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::simulated {

/// How many ranks each axis has, outermost first: ranks are numbered with tensor fastest, as in Mesh.
struct MeshAxes {
  int pipe = 1, data = 1, shard = 1, tensor = 1;

  int shares() const { return data * shard; }
  int ranks() const { return pipe * shares() * tensor; }
  double count() const { return static_cast<double>(pipe) * data * shard * tensor; }  ///< of any size
};

/// What a step takes one device that has the whole model and a share of the batch, in seconds. Stages are equal parts
/// of it, and of a transformer's layers; tensor ranks have equal parts of all of its parameters.
struct MeshTraining {
  MeshAxes axes = {};
  ModelSizes model = {};
  double forward = 0, backward = 0, optimizer = 0;
  std::size_t activation = 0;  ///< bytes between two layers: of a micro-batch, without several stages of the batch
  Schedule schedule = {};      ///< of micro-batches; only if there are several stages
  /// Micro-batches that one stage computes one after another, and adds up their gradients: data averages with the last
  /// one, as under no_sync, and shard gathers and averages with each.
  int accumulated = 1;
  BucketOptions caps = {};     ///< data: in a pipeline all buckets are full at its end
  double unit_cap = 4;         ///< shard: largest size of a unit in MiB
  bool keeps_parameters = false;  ///< shard: see KeepParameters; in a pipeline they always do
  int optimizer_slots = 0;
  bool holds_activations = false;  ///< a rank's memory is with what its layers keep for backward, of a transformer
  bool recompute = false;          ///< layers keep their inputs alone, and backward computes the rest again
};

/// Bytes that a transformer's layer keeps for backward, on one of `tensor` ranks, where `activation` bytes go from
/// layer to layer: as Korthikanti et al. count them (arXiv 2205.05198, 4.1), with attention that keeps no table of
/// weights, and without dropout. The inputs of two norms and of two linear layers are whole on each rank.
inline std::int64_t kept_by_layer(std::size_t activation, int tensor) {
  constexpr double whole = 4, divided = 12;
  return static_cast<std::int64_t>(static_cast<double>(activation) * (whole + divided / tensor));
}

/// An axis' part of a step, the mean over the ranks.
struct AxisTimes {
  std::string_view name = {};
  int ranks = 1;
  double exposed = 0;  ///< seconds in which a rank waits
  double bytes = 0;    ///< that a rank sends
};
/// How long a step of a mesh takes, and what each axis adds to it.
struct MeshTimes : TrainingTimes {
  std::array<AxisTimes, 3> axes = {};
  std::size_t held = 0;  ///< bytes that a rank holds at most, without activations unless they are asked for
};

/// The model of each stage, for ranks that have one of `tensor` parts of it. Layers before a transformer's belong to
/// the first stage, those behind them to the last one. Throws UsageError where a stage has nothing.
[[gnu::cold]] inline std::vector<ModelSizes> cut_in_stages(const ModelSizes& model, int stages, int tensor) {
  check<UsageError>(model.layers > 0 || tensor == 1, "mesh: tensor=", tensor, ": ", printable(model.name),
                    " is not a transformer: expected bert_base, bert_large, gpt2, gpt2_xl or gpt3_175b");
  check<UsageError>(model.layers % stages == 0, "mesh: the ", model.layers, " layers of ", printable(model.name),
                    " in ", stages, " stages: expected a multiple of the stages");
  std::vector<ModelSizes> out(static_cast<std::size_t>(stages));
  double all = 0, done = 0;
  for (const auto& parameter : model.parameters) all += parameter.operations;
  int stage = 0;
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    auto parameter = model.parameters[i];
    if (model.layers > 0) {
      const auto each = model.of_layer * static_cast<std::size_t>(model.layers / stages);
      stage = std::min(stages - 1, i < model.first ? 0 : static_cast<int>((i - model.first) / each));
    } else if (parameter.begins_layer) {
      stage = std::min(stages - 1, static_cast<int>((done + parameter.operations / 2) / all * stages));
    }
    done += parameter.operations;
    out[static_cast<std::size_t>(stage)].parameters.push_back(parameter);
  }
  for (const auto& each : out)
    check<UsageError>(!each.parameters.empty(), "mesh: ", stages, " stages of ", printable(model.name),
                      ": one of them has no parameters");
  return out;
}

namespace detail {

/// What calls of `ranks` ranks take that lie `apart`, and begin together.
class AxisCalls {
 public:
  using Time = comm::simulated::Time;
  struct Cost {
    Time time{};
    double sent = 0;  // bytes of a rank, on average
    std::vector<comm::simulated::Span> spans;  // of the first ranks; the others are like these
  };

  AxisCalls(const comm::simulated::SimulationOptions& options, std::string_view name, int ranks, int apart) {
    options_.ranks = ranks;
    options_.links = options.links;
    options_.all_reduce = options.all_reduce;
    auto& [_, island, inside, between, shared, call] = options_.links;
    const auto divides = [](int a, int b) { return std::max(a, b) % std::min(a, b) == 0; };
    if (island > 1 && ranks > 1)
      check<UsageError>(divides(island, apart) && divides(island, ranks * apart), "mesh: groups of ", ranks,
                        " ranks along ", name, ", ", apart, " apart, on islands of ", island,
                        ": expected that one divides the other");
    if (island > 0) island = ranks * apart <= island ? 0 : std::max(1, island / apart);
    if (island == 0) between = inside;
    if (island == 1) inside = between;
    if (options_.all_reduce == comm::Algorithm::hierarchical && (island <= 1 || island >= ranks))
      options_.all_reduce = comm::Algorithm::automatic;
    options_.true_numbers = false;
    options_.keep_spans = true;
    options_.alike = ranks_alike(options_, {});
  }
  int size() const { return options_.ranks; }
  const Cost& of(comm::Op op, std::size_t bytes, trace::Traffic traffic, int peer) {
    auto& cost = costs_[{op, bytes, traffic}];
    if (!cost.spans.empty()) return cost;
    auto times = comm::simulated::simulate(options_, [&](comm::simulated::SimulatedRank& rank) {
      rank.call(op, bytes, traffic, peer);
    });
    const auto run = static_cast<std::size_t>(options_.alike > 0 ? options_.alike : options_.ranks);
    for (std::size_t rank = 0; rank < run; ++rank) {
      cost.time = std::max(cost.time, times.ranks[rank].end);
      cost.spans.push_back(std::move(times.ranks[rank].calls.at(0)));
      for (const auto& [to, count] : cost.spans.back().sent)
        cost.sent += static_cast<double>(count) / static_cast<double>(run);
    }
    return cost;
  }

 private:
  comm::simulated::SimulationOptions options_;
  std::map<std::tuple<comm::Op, std::size_t, trace::Traffic>, Cost> costs_;
};

/// One rank of a stage, as a SimulatedRank: its calls are those along data or shard; and sums along tensor, which come
/// while it computes a pass.
class MeshRank {
 public:
  using Time = comm::simulated::Time;
  /// Usual seconds of a pass, and in how many equal parts sums along tensor cut it.
  struct Pass {
    double seconds = 0;
    int parts = 0;
    double done = 0;  // parts
  };
  struct Work {
    MeshRank* rank = nullptr;
    Time ended{};
    std::size_t span = 0;  // of those kept
    void wait() {
      if (rank != nullptr) std::exchange(rank, nullptr)->wait(ended, rank_data, span);
    }
  };
  static constexpr std::size_t rank_data = 1, rank_tensor = 2;  // axes, by their place in MeshTimes

  MeshRank(AxisCalls& data, AxisCalls& tensor, comm::simulated::RankTimes& times, bool keeps_spans)
      : data_(data), tensor_(tensor), times_(times), keeps_spans_(keeps_spans) {}

  int rank() const { return 0; }
  int size() const { return data_.size(); }
  Time clock() const { return times_.end; }
  void next_step() {
    constexpr std::size_t program_bytes = 56;
    sum(comm::Op::all_gather, program_bytes, trace::Traffic::control);
  }
  void compute(double usual, std::string_view what = "compute") {
    Pass* const pass = what == "forward" ? &forward : what == "backward" ? &backward : nullptr;
    if (pass == nullptr || tensor_.size() == 1 || usual == 0) return move(usual / tensor_.size());
    constexpr double near = 1e-6;
    const double end = pass->done + usual / pass->seconds * pass->parts;
    for (double next = std::floor(pass->done + near) + 1; next <= end + near; ++next) {
      const double part = next - pass->done;
      move(pass->seconds / (static_cast<double>(pass->parts) * tensor_.size()) * (part > 1 - near ? 1 : part));
      sum(comm::Op::all_reduce, activation, trace::Traffic::activations);
      pass->done = next;
    }
    if (end > pass->done + near)
      move((end - std::exchange(pass->done, end)) * pass->seconds / pass->parts / tensor_.size());
    if (pass->done > pass->parts - near) pass->done = 0;
  }
  void mark(std::string_view kind, std::string_view name, Time begun, std::size_t bytes = 0, int bucket = -1) {
    if (keeps_spans_) times_.marks.push_back({std::string(kind), std::string(name), begun, clock(), bytes, bucket});
  }
  void hold(trace::Memory kind, std::int64_t bytes) {
    held_.bytes[static_cast<std::size_t>(kind)] += static_cast<std::size_t>(bytes);
    std::size_t all = 0;
    for (const auto each : held_.bytes) all += each;
    most_held = std::max(most_held, all);
    if (!keeps_spans_) return;
    if (!times_.memory.empty() && times_.memory.back().at == clock()) times_.memory.pop_back();
    held_.at = clock();
    times_.memory.push_back(held_);
  }
  Work start(comm::Op op, std::size_t bytes, trace::Traffic traffic = trace::Traffic::gradients, int peer = 0,
             bool = false, int bucket = -1, int unit = -1) {
    if (data_.size() == 1) return {};
    const auto& cost = data_.of(op, bytes, traffic, peer);
    const Time begun = std::max(free_, clock());
    free_ = comm::simulated::later(begun, cost.time);
    return {this, free_, keep(cost, rank_data, begun, bucket, unit)};
  }
  void call(comm::Op op, std::size_t bytes, trace::Traffic traffic, int peer = 0, bool = false) {
    start(op, bytes, traffic, peer).wait();
  }

  Pass forward, backward;
  std::size_t activation = 0;                    ///< bytes of what is summed along tensor
  std::array<Time, 3> waited = {};               ///< by axis
  std::array<double, 3> sent = {};               ///< likewise, bytes
  std::size_t most_held = 0;
  std::map<std::size_t, std::pair<std::size_t, const AxisCalls::Cost*>> kept;  ///< axis, cost: of `times.calls`

 private:
  void move(double usual) {
    times_.end = comm::simulated::later(clock(), comm::simulated::Computing{}.time(
                                                     comm::simulated::time_of("compute", usual), 0, 0));
  }
  void sum(comm::Op op, std::size_t bytes, trace::Traffic traffic) {
    if (tensor_.size() == 1) return;
    const auto& cost = tensor_.of(op, bytes, traffic, 0);
    const auto span = keep(cost, rank_tensor, clock(), -1, -1);
    wait(comm::simulated::later(clock(), cost.time), rank_tensor, span);
  }
  std::size_t keep(const AxisCalls::Cost& cost, std::size_t axis, Time begun, int bucket, int unit) {
    sent[axis] += cost.sent;
    if (!keeps_spans_) return 0;
    const auto at = times_.calls.size();
    auto span = cost.spans.front();
    span.call.envelope.sequence = static_cast<std::uint32_t>(at);
    span.call.bucket = bucket;
    span.call.unit = unit;
    // Sums along tensor and calls along data go side by side.
    const bool beside = unit >= 0 || (axis == rank_data && tensor_.size() > 1);
    span.lane = beside ? trace::Lane::gathers : trace::Lane::communication;
    span.ended = begun + (span.ended - span.begun);
    span.begun = begun;
    kept[at] = {axis, &cost};
    times_.calls.push_back(std::move(span));
    return at;
  }
  void wait(Time until, std::size_t axis, std::size_t span) {
    if (until <= clock()) return;
    if (keeps_spans_) {
      times_.waits.push_back(times_.calls[span]);
      times_.waits.back().begun = clock();
      times_.waits.back().ended = until;
    }
    waited[axis] += until - clock();
    times_.waited += until - clock();
    times_.end = until;
  }

  AxisCalls &data_, &tensor_;
  comm::simulated::RankTimes& times_;
  const bool keeps_spans_;
  Time free_{};  // from when on calls along data can begin
  comm::simulated::Held held_ = {};
};

/// The ranks of the stages, one of each. Gradients are averaged once a pipeline has made all of them, as under Mesh.
class MeshWalk final : public PipelineWalk {
 public:
  MeshWalk(const comm::simulated::SimulationOptions& options, const MeshTraining& training,
           const PipelineTraining& pipeline)
      : PipelineWalk(options, pipeline, training.axes.shares() * training.axes.tensor),
        axes_(training.axes),
        data_(options, axes_.shard > 1 ? "shard" : "data", axes_.shares(), axes_.tensor),
        tensor_(options, "tensor", axes_.tensor, 1),
        begins_(static_cast<std::size_t>(axes_.pipe)),
        micro_batches_(pipeline.schedule.micro_batches),
        splits_(pipeline.schedule.splits_backward()) {
    const auto& schedule = pipeline.schedule;
    if (training.holds_activations) {
      const std::int64_t layers = training.model.layers / schedule.stages;
      const auto all = kept_by_layer(training.activation, axes_.tensor);
      kept_ = layers * (training.recompute ? static_cast<std::int64_t>(training.activation) : all);
      computed_again_ = training.recompute ? all : 0;
    }
    const double parts = static_cast<double>(schedule.stages) * schedule.micro_batches;
    const auto stages = cut_in_stages(training.model, schedule.stages, axes_.tensor);
    for (int rank = 0; rank < axes_.pipe; ++rank) {
      auto& own = ranks_.emplace_back(data_, tensor_, of(rank), options.keep_spans);
      const int sums = 2 * training.model.layers / schedule.stages;
      own.forward = {.seconds = training.forward / parts, .parts = sums};
      own.backward = {.seconds = training.backward / (splits_ ? 2 : 1) / parts,
                      .parts = training.recompute ? 2 * sums : sums};
      own.activation = training.activation;
      ModelSizes model;
      for (int stage = rank; stage < schedule.stages; stage += axes_.pipe)
        for (const auto& parameter : stages[static_cast<std::size_t>(stage)].parameters)
          model.parameters.push_back(parameter);
      programs_.emplace_back(own, trainings_.emplace_back(training_of(training, std::move(model), parts)));
    }
  }

  /// Of so many steps.
  MeshTimes times(int steps) {
    MeshTimes out;
    out.axes = {AxisTimes{"pipe", axes_.pipe}, {axes_.shard > 1 ? "shard" : "data", axes_.shares()},
                {"tensor", axes_.tensor}};
    const auto whole = [&](Time time) { return comm::simulated::seconds(time) / axes_.pipe / steps; };
    for (int rank = 0; rank < axes_.pipe; ++rank) {
      auto& own = ranks_[static_cast<std::size_t>(rank)];
      own.waited[0] = of(rank).waited - own.waited[1] - own.waited[2];
      own.sent[0] = sent(rank);
      for (std::size_t axis = 0; axis < out.axes.size(); ++axis) {
        out.axes[axis].exposed += whole(own.waited[axis]);
        out.axes[axis].bytes += own.sent[axis] / axes_.pipe / steps;
      }
      out.held = std::max(out.held, own.most_held);
    }
    for (int rank = 0; rank < axes_.ranks(); ++rank) out.times.ranks.push_back(like(rank));
    count_steps(out, steps);
    return out;
  }

 private:
  static constexpr int with_spans = 64;  // more are in no trace

  Training training_of(const MeshTraining& of, ModelSizes model, double parts) const {
    const auto tensor = static_cast<std::size_t>(axes_.tensor);
    Training own{.policy = axes_.shard > 1                     ? TrainingPolicy::fully_sharded
                           : axes_.tensor > 1 && axes_.data == 1 ? TrainingPolicy::tensor_parallel
                                                                 : TrainingPolicy::ddp,
                 .forward = of.forward / parts,
                 .backward = axes_.pipe > 1 ? 0 : of.backward / parts,
                 .keeps_parameters = of.keeps_parameters || axes_.pipe > 1,
                 .parameter_bytes = model.flat_bytes() / tensor,
                 .optimizer_slots = of.optimizer_slots};
    for (auto& parameter : model.parameters) parameter.count = (parameter.count + tensor - 1) / tensor;
    if (axes_.shard > 1)
      own.units = unit_times(model, of.unit_cap, own.forward, own.backward);
    else if (axes_.data > 1)
      own.buckets = bucket_times(model, of.caps, own.backward);
    return own;
  }

  void begin(int rank) override {
    ranks_[static_cast<std::size_t>(rank)].next_step();
    begins_[static_cast<std::size_t>(rank)] = true;
  }
  void act(int rank, const Action& action, double usual, int) override {
    auto& own = ranks_[static_cast<std::size_t>(rank)];
    auto& program = programs_[static_cast<std::size_t>(rank)];
    const bool forward = action.kind == Kind::forward, first = forward && begins_[static_cast<std::size_t>(rank)];
    if (first) begins_[static_cast<std::size_t>(rank)] = false;
    const auto hold = [&](std::int64_t bytes) {
      if (bytes != 0) own.hold(trace::Memory::activations, bytes);
    };
    const bool ends = action.kind == (splits_ ? Kind::weight : Kind::backward);
    if (ends) hold(computed_again_);
    if (forward ? axes_.pipe == 1 || (first && axes_.shard > 1)
                : axes_.pipe == 1 && (axes_.shard > 1 || action.micro_batch + 1 == micro_batches_)) {
      forward ? program.forward_pass() : program.backward_pass();
    } else {
      const Time begun = own.clock();
      own.compute(usual, name(action.kind));
      mark(rank, action, begun);
    }
    if (forward) hold(kept_);
    if (ends) hold(-kept_ - computed_again_);
  }
  void finish(int rank) override {
    if (axes_.pipe > 1 && axes_.shares() > 1) programs_[static_cast<std::size_t>(rank)].backward_pass();
  }

  // What the rank of that number has done: as the one of its stage, but that it has other neighbours.
  comm::simulated::RankTimes like(int rank) {
    const int apart = axes_.shares() * axes_.tensor, place = rank % apart;
    const auto& own = ranks_[static_cast<std::size_t>(rank / apart)];
    const auto& stage = of(rank / apart);
    comm::simulated::RankTimes out;
    out.end = stage.end, out.waited = stage.waited;
    if (rank >= with_spans) return out;
    out = stage;
    for (std::size_t at = 0; at < out.calls.size(); ++at) {
      auto& call = out.calls[at];
      const auto sent = std::exchange(call.sent, {});
      const auto kept = own.kept.find(at);
      if (kept == own.kept.end()) {
        call.call.peer += place;
        for (const auto& [to, bytes] : sent) call.sent[to + place] = bytes;
        continue;
      }
      const auto& [axis, cost] = kept->second;
      const bool tensor = axis == MeshRank::rank_tensor;
      const int size = tensor ? axes_.tensor : axes_.shares(), step = tensor ? 1 : axes_.tensor;
      const int here = rank / step % size, like_it = here % static_cast<int>(cost->spans.size());
      for (int member = 0; member < size && size < axes_.ranks(); ++member)
        call.members.push_back(rank + (member - here) * step);
      for (const auto& [to, bytes] : cost->spans[static_cast<std::size_t>(like_it)].sent)
        call.sent[rank + ((to + here - like_it) % size - here) * step] = bytes;
    }
    return out;
  }

  const MeshAxes axes_;
  AxisCalls data_, tensor_;
  std::vector<bool> begins_;  // ranks whose first action is still to come
  const int micro_batches_;
  const bool splits_;
  std::int64_t kept_ = 0, computed_again_ = 0;  // bytes of a micro-batch, of a rank's layers and of one
  std::deque<MeshRank> ranks_;
  std::deque<Training> trainings_;
  std::deque<TrainingRank<MeshRank>> programs_;
};

}  // namespace detail

/// Trains for so many steps; a rank that computes alone is as fast as the others. Throws UsageError for axes that don't
/// fit the model, the schedule or the islands, and for stragglers, jitter and ports that ranks share.
[[gnu::cold]] inline MeshTimes simulate_mesh(comm::simulated::SimulationOptions options, MeshTraining training,
                                             int steps) {
  const auto& axes = training.axes;
  check<UsageError>(steps >= 1 && steps <= 100'000, "simulate_mesh: ", steps, " steps, expected 1 to 100000");
  for (const int size : {axes.pipe, axes.data, axes.shard, axes.tensor})
    check<UsageError>(size >= 1, "simulate_mesh: an axis of ", size, " ranks");
  check<UsageError>(axes.data == 1 || axes.shard == 1, "mesh: data and shard together are not simulated");
  constexpr int most = comm::simulated::most_scheduled_ranks;
  check<UsageError>(axes.count() <= most, "mesh: ", axes.count(), " ranks, expected up to ", most);
  check<UsageError>(options.computing.stragglers.empty() && options.computing.jitter == 0,
                    "mesh: ranks of a stage are computed once, as alike: no stragglers, no jitter");
  check<UsageError>(!options.links.shared, "mesh: ports that ranks share are not simulated: expected links without ",
                    ":shared");
  check<UsageError>(axes.tensor == 1 || training.activation > 0, "mesh: tensor=", axes.tensor, ": no activations");
  check<UsageError>(training.accumulated >= 1 && (training.accumulated == 1 || axes.pipe == 1), "mesh: ",
                    training.accumulated, " accumulated micro-batches in ", axes.pipe,
                    " stages: expected 1, or more in one stage; those of several stages are the schedule's");
  check<UsageError>(training.model.layers > 0 || !(training.holds_activations || training.recompute),
                    "mesh: what layers of ", printable(training.model.name),
                    " keep is not known: expected bert_base, bert_large, gpt2, gpt2_xl or gpt3_175b");
  check<UsageError>(!training.recompute || !training.schedule.splits_backward(),
                    "mesh: recomputing with a backward in two parts is not simulated: expected another schedule");
  if (training.recompute) training.backward += training.forward;
  PipelineTraining pipeline{.schedule = axes.pipe > 1 ? training.schedule
                                                      : OneForwardOneBackward::of(
                                                            1, training.accumulated),
                            .forward = training.forward,
                            .backward = training.backward,
                            .optimizer = training.optimizer / axes.tensor / axes.shard,
                            .activation = training.activation};
  check_schedule(pipeline.schedule);
  check<UsageError>(pipeline.schedule.size() == axes.pipe, "mesh: pipe=", axes.pipe, ": a schedule of ",
                    pipeline.schedule.size(), " ranks");
  options.ranks = axes.ranks();
  detail::MeshWalk walk(options, training, pipeline);
  for (int step = 0; step < steps; ++step) walk.step(step);
  return walk.times(steps);
}

}  // namespace chorus::simulated
