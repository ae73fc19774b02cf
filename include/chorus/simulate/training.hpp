#pragma once
/// `simulate_training`: steps of the distributed policies without their numbers, by the calls that they make, on
/// thousands of ranks. tests/unit/parallel/simulated_training_test.cpp holds them against the policies themselves. For
/// pipelines see pipelined.hpp, for meshes meshed.hpp.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/ddp/ddp_options.hpp>
#include <chorus/simulate/device_copies.hpp>
#include <chorus/simulate/models.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/together.hpp>
#include <chorus/simulate/units.hpp>
#include <chorus/tensor/size_class.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::simulated {

/// The policies whose training is simulated.
enum class TrainingPolicy : std::uint8_t {
  ddp,
  local_sgd,
  parameter_server,
  data_parallel,
  fully_sharded,
  tensor_parallel,
  sequence_parallel
};
constexpr std::string_view name(TrainingPolicy policy) {
  constexpr std::string_view names[] = {"ddp", "local_sgd", "parameter_server", "dp", "fsdp", "tp", "sp"};
  return names[static_cast<std::size_t>(policy)];
}

/// A bucket of gradients: how long after backward's begin it is full, if nothing else is to do.
struct BucketTime {
  double ready = 0;
  std::size_t bytes = 0;
};

/// One rank's step, as it is where nobody has to be waited for; in seconds.
struct Training {
  TrainingPolicy policy = TrainingPolicy::ddp;
  double forward = 0, backward = 0, optimizer = 0;
  std::vector<BucketTime> buckets = {};
  std::size_t parameters = 1;        ///< how many; a server's workers tell of each whether it has a gradient
  int period = 8;                    ///< local_sgd: steps between means
  /// local_sgd: bytes of an outer optimizer's fragments, in turn one every `period` / fragments steps; none: all goes
  /// together. Steps while a message travels. Theta and v are `optimizer_slots` of their own.
  std::vector<std::size_t> fragments = {};
  int overlap = 0;
  DataParallelSizes copied = {};     ///< dp: what moves, of a batch that has `copied.samples` on each device
  std::vector<UnitTime> units = {};  ///< fsdp: in the order of the layers, instead of `buckets`
  bool keeps_parameters = false;     ///< fsdp: see KeepParameters
  int layers = 0;                    ///< tp, sp: of a transformer
  std::size_t activation = 0;        ///< tp, sp: bytes of the batch between two of them
  /// What a rank holds, for traces: bytes of the parameters, 0: nobody knows; and how many numbers an optimizer has for
  /// each of them. Activations, which a step's times don't tell, are left out.
  std::size_t parameter_bytes = 0;
  int optimizer_slots = 0;

  /// Whether a rank keeps, and steps, a part of the parameters.
  bool has_parts() const {
    return policy == TrainingPolicy::fully_sharded || policy == TrainingPolicy::tensor_parallel;
  }

  double seconds() const { return forward + backward + optimizer; }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& bucket : buckets) sum += bucket.bytes;
    for (const auto& unit : units) sum += unit.bytes;
    return sum;
  }
};

/// When which bucket is full: gradients come in the reverse order of the forward pass, and buckets are cut as
/// DistributedDataParallel cuts them.
[[gnu::cold]] inline std::vector<BucketTime> bucket_times(const ModelSizes& model, const BucketOptions& options,
                                                          double backward) {
  double operations = 0;
  for (const auto& parameter : model.parameters) operations += parameter.operations;
  std::vector<BucketTime> buckets;
  BucketTime open;
  double done = 0;
  for (std::size_t i = model.parameters.size(); i-- > 0;) {
    const auto& parameter = model.parameters[i];
    const auto bytes = parameter.count * sizeof(float);
    if (open.bytes > 0 && options({.bytes = bytes, .bucket = buckets.size(), .bucket_bytes = open.bytes}))
      buckets.push_back(std::exchange(open, {}));
    done += parameter.operations;
    open.bytes += bytes;
    open.ready = operations == 0 ? backward : backward * (done / operations);
  }
  if (open.bytes > 0) buckets.push_back(open);
  return buckets;
}

/// Bytes of a policy's parameters, gradients and optimizer, which lie together each, in a block of the allocator's
/// (tensor/allocator.hpp). Without what they are made from at first.
inline std::array<std::size_t, trace::memory_kinds> held_by(const Training& training, bool steps, int ranks = 1) {
  std::array<std::size_t, trace::memory_kinds> held{};
  if (training.parameter_bytes == 0) return held;
  // Of parts, which have pages of their own, what is the rank's.
  const auto block = training.has_parts() ? training.parameter_bytes / static_cast<std::size_t>(ranks)
                                          : size_class<64>(training.parameter_bytes).bytes;
  const auto of = [&](trace::Memory kind) -> auto& { return held[static_cast<std::size_t>(kind)]; };
  of(trace::Memory::parameters) = of(trace::Memory::gradients) = block;
  of(trace::Memory::optimizer) = steps ? block * static_cast<std::size_t>(training.optimizer_slots) : 0;
  return held;
}

/// A step of one rank. Each does what the policy of that name does, call by call. `Rank`: a SimulatedRank, or what has
/// its functions.
template <class Rank = comm::simulated::SimulatedRank>
class TrainingRank {
 public:
  TrainingRank(Rank& rank, const Training& training) : rank_(rank), training_(training) {
    if (training.parameter_bytes == 0) return;
    const auto held = held_by(training, true, rank.size());
    for (std::size_t kind = 0; kind < held.size(); ++kind)
      if (held[kind] > 0) rank_.hold(static_cast<trace::Memory>(kind), static_cast<std::int64_t>(held[kind]));
  }

  void step(int number) {
    const auto begun = rank_.clock();
    rank_.next_step();
    switch (training_.policy) {
      case TrainingPolicy::ddp:
      case TrainingPolicy::fully_sharded:
        forward_pass();
        backward_pass();
        break;
      case TrainingPolicy::local_sgd:
        local_sgd(number);
        break;
      case TrainingPolicy::parameter_server:
        parameter_server();
        break;
      case TrainingPolicy::tensor_parallel:
        tensor_parallel();
        break;
      case TrainingPolicy::sequence_parallel:
        sequence_parallel();
        break;
      case TrainingPolicy::data_parallel:  // has no ranks: see simulate_data_parallel
        break;
    }
    const auto optimizer = rank_.clock();
    const double steps = training_.optimizer / (training_.has_parts() ? rank_.size() : 1);
    const bool one = training_.policy == TrainingPolicy::parameter_server;
    if constexpr (is_all)
      rank_.compute(steps, "optimizer", one ? 1 : rank_.size());
    else if (!one || rank_.rank() == 0)
      rank_.compute(steps, "optimizer");
    rank_.mark("optimizer", "optimizer step", optimizer);
    rank_.mark("step", cat("step ", number), begun, 0, number);
  }
  /// The two parts of a step of ddp and fsdp.
  void forward_pass() { sharded() ? gathering_forward() : forward(); }
  void backward_pass() { sharded() ? scattering_backward() : reducing_backward(); }

 private:
  using Op = comm::Op;
  using Traffic = trace::Traffic;
  using Work = decltype(std::declval<Rank&>().start(Op::barrier, 0));
  static constexpr bool is_all = std::is_same_v<Rank, comm::simulated::RanksTogether>;
  static constexpr std::size_t share_bytes = 120;   // what ranks tell each other in BatchShares
  static constexpr std::size_t count_bytes = 88;    // and in LocalSgd
  static constexpr std::size_t program_bytes = 56;  // what they compare where they tell each other nothing else

  bool sharded() const { return training_.policy == TrainingPolicy::fully_sharded; }
  void forward() {
    const auto begun = rank_.clock();
    rank_.compute(training_.forward, "forward");
    rank_.mark("forward", "forward", begun);
  }
  void call(Op op, std::size_t bytes, Traffic traffic, int peer = 0, bool receives = false) {
    rank_.call(op, bytes, traffic, peer, receives);
  }
  void exchange_shares() {
    if (rank_.size() > 1) call(Op::all_gather, share_bytes, Traffic::control);
  }

  void reducing_backward() {
    const auto begun = rank_.clock();
    exchange_shares();
    std::vector<Work> works;
    double done = 0;
    for (const auto& bucket : training_.buckets) {
      const auto index = static_cast<int>(works.size());
      rank_.compute(bucket.ready - std::exchange(done, bucket.ready), "backward");
      rank_.mark("bucket", cat("bucket full: ", index), rank_.clock(), bucket.bytes, index);
      works.push_back(rank_.start(Op::all_reduce, bucket.bytes, Traffic::gradients, 0, false, index));
    }
    rank_.compute(training_.backward - done, "backward");
    for (auto& work : works) work.wait();
    rank_.mark("backward", "backward", begun);
  }

  // FullyShardedDataParallel's, once its order is learned. Gathers and averages take turns in one queue.
  std::size_t numbers(std::size_t u) const { return training_.units[u].bytes / sizeof(float); }
  std::int64_t others(std::size_t u) const {
    const auto bytes = training_.units[u].bytes;
    return static_cast<std::int64_t>(bytes - bytes / static_cast<std::size_t>(rank_.size()));
  }
  void holds(trace::Memory kind, std::int64_t bytes) {
    if (training_.parameter_bytes > 0 && rank_.size() > 1) rank_.hold(kind, bytes);
  }
  void gather(std::size_t u) {
    const auto ranks = static_cast<std::size_t>(rank_.size());
    if (ranks == 1) return;
    holds(trace::Memory::parameters, others(u));
    const auto start = [&](Op op, std::size_t n, int peer) {
      if (n > 0)
        gathers_[u].push_back(
            rank_.start(op, n * sizeof(float), Traffic::parameters, peer, false, -1, static_cast<int>(u)));
    };
    start(Op::all_gather, numbers(u) / ranks, 0);
    start(Op::broadcast, numbers(u) % ranks, rank_.size() - 1);
  }
  void arrive(std::size_t u) {
    for (auto& work : gathers_[u]) work.wait();
    gathers_[u].clear();
  }
  void give_back(std::size_t u) { holds(trace::Memory::parameters, -others(u)); }
  void compute(double usual, const char* pass, std::size_t u) {
    const auto begun = rank_.clock();
    rank_.compute(usual, pass);
    rank_.mark(pass, cat(pass, ", unit ", u), begun);
  }

  void gathering_forward() {
    const std::size_t count = training_.units.size();
    gathers_.resize(count);
    exchange_shares();
    gather(0);
    for (std::size_t u = 0; u < count; ++u) {
      arrive(u);
      if (u > 0 && !training_.keeps_parameters) give_back(u - 1);
      if (u + 1 < count) gather(u + 1);
      compute(training_.units[u].forward, "forward", u);
    }
  }
  void scattering_backward() {
    const auto ranks = static_cast<std::size_t>(rank_.size());
    const std::size_t count = training_.units.size(), last = count - 1;
    exchange_shares();
    std::deque<std::pair<std::size_t, Work>> averages;
    const auto take_back = [&] {
      const auto u = averages.front().first;
      averages.front().second.wait();
      if (const auto rest = numbers(u) % ranks; rest > 0)
        rank_.call(Op::all_reduce, rest * sizeof(float), Traffic::gradients);
      holds(trace::Memory::gradients, -others(u));
      averages.pop_front();
    };
    const bool gathers_again = !training_.keeps_parameters;
    if (gathers_again && last > 0) gather(last - 1);
    for (std::size_t u = count; u-- > 0;) {
      if (gathers_again && u < last) {
        arrive(u);
        if (u > 0) gather(u - 1);
      }
      holds(trace::Memory::gradients, others(u));
      compute(training_.units[u].backward, "backward", u);
      give_back(u);
      if (ranks == 1) continue;
      while (averages.size() > 1) take_back();
      const auto part = numbers(u) / ranks * sizeof(float);
      averages.emplace_back(
          u, rank_.start(Op::reduce_scatter, part, Traffic::gradients, 0, false, static_cast<int>(last - u)));
    }
    while (!averages.empty()) take_back();
  }

  // TensorParallel's of a transformer's layers: in each, attention and the two linear layers end with a sum over all
  // ranks, and so do the gradients by what goes into them.
  void tensor_parallel() {
    if (rank_.size() > 1) call(Op::all_gather, program_bytes, Traffic::control);
    for (const auto& [pass, seconds] : {std::pair("forward", training_.forward), {"backward", training_.backward}}) {
      const auto begun = rank_.clock();
      for (int half = 0; half < 2 * training_.layers; ++half) {
        rank_.compute(seconds / (2.0 * training_.layers * rank_.size()));
        if (rank_.size() > 1) call(Op::all_reduce, training_.activation, Traffic::activations);
      }
      rank_.mark(pass, pass, begun);
    }
  }

  // SequenceParallel's of a transformer's layers: in each of n parts of a layer a rank computes with the keys and
  // values of another rank, and sends these on meanwhile; in backward their gradients follow. Parameters' gradients are
  // averaged as by ddp.
  void sequence_parallel() {
    if constexpr (!is_all) {
      const int n = rank_.size();
      const auto block = 2 * training_.activation / static_cast<std::size_t>(n);
      std::vector<Work> works, ring;
      const auto arrive = [&] {
        for (auto& work : ring) work.wait();
        ring.clear();
      };
      const auto hop = [&] {
        const int next = (rank_.rank() + 1) % n, before = (rank_.rank() + n - 1) % n;
        const bool receives_first = rank_.rank() % 2 == 1;
        for (const bool receives : {receives_first, !receives_first})
          ring.push_back(rank_.start(Op::message, block, Traffic::activations, receives ? before : next, receives));
      };
      exchange_shares();
      for (const auto& [pass, seconds] : {std::pair("forward", training_.forward), {"backward", training_.backward}}) {
        const bool back = pass[0] == 'b';
        const auto begun = rank_.clock();
        if (back) exchange_shares();
        double done = 0;
        for (int layer = 0; layer < training_.layers; ++layer) {
          for (int part = 0; part < n; ++part) {
            if (part + 1 < n) hop();
            rank_.compute(seconds / training_.layers / n / n, pass);
            arrive();
            if (back && part > 0) hop();
          }
          arrive();
          done += seconds / training_.layers;
          for (auto i = works.size(); back && i < training_.buckets.size(); ++i) {
            const auto& bucket = training_.buckets[i];
            if (bucket.ready > done * (1 + 1e-9)) break;
            const auto index = static_cast<int>(i);
            works.push_back(rank_.start(Op::all_reduce, bucket.bytes, Traffic::gradients, 0, false, index));
          }
        }
        for (auto& work : works) work.wait();
        rank_.mark(pass, pass, begun);
      }
    }
  }

  void backward() {
    const auto begun = rank_.clock();
    rank_.compute(training_.backward);
    rank_.mark("backward", "backward", begun);
  }
  void local_sgd(int number) {
    const auto fragments = std::max<std::size_t>(training_.fragments.size(), 1);
    const auto moment = static_cast<std::size_t>(training_.period) / fragments, at = static_cast<std::size_t>(number);
    if (at % moment == 0 && rank_.size() > 1) {
      call(Op::all_gather, count_bytes, Traffic::control);
      const auto bytes = training_.fragments.empty() ? training_.bytes() : training_.fragments[at / moment % fragments];
      message_ = rank_.start(Op::all_reduce, bytes, Traffic::parameters);
    }
    if (at % moment == static_cast<std::size_t>(training_.overlap)) message_.wait();
    forward();
    backward();
  }

  // What the server, rank 0, sends each worker, or each worker the server.
  void exchange(std::size_t bytes, Traffic traffic, bool to_server) {
    if constexpr (is_all) {
      to_server ? rank_.to_server(bytes) : rank_.from_server(bytes);
    } else if (rank_.rank() > 0) {
      call(Op::message, bytes, traffic, 0, !to_server);
    } else {
      for (int worker = 1; worker < rank_.size(); ++worker) call(Op::message, bytes, traffic, worker, to_server);
    }
  }
  void parameter_server() {
    exchange(training_.bytes(), Traffic::parameters, false);  // the new ones
    forward();
    const auto begun = rank_.clock();
    exchange_shares();
    rank_.compute(training_.backward);
    exchange(training_.parameters, Traffic::control, true);  // which gradients there are
    // The server has a place for a worker's.
    const auto place = rank_.rank() == 0 && training_.parameter_bytes > 0
                           ? static_cast<std::int64_t>(size_class<64>(training_.parameter_bytes).bytes)
                           : 0;
    if (place > 0) rank_.hold(trace::Memory::buckets, place);
    exchange(training_.bytes(), Traffic::gradients, true);
    if (place > 0) rank_.hold(trace::Memory::buckets, -place);
    rank_.mark("backward", "backward", begun);
  }

  Rank& rank_;
  const Training& training_;
  std::vector<std::vector<Work>> gathers_;  // of each unit, under way
  Work message_;                            // of local_sgd, under way
};

/// How long a simulated step takes, and of what that is made.
struct TrainingTimes {
  double step = 0;     ///< seconds of a step, the mean over the steps, of the last rank
  double exposed = 0;  ///< of them: seconds in which a rank waits for communication, the mean over the ranks
  double late = 0;     ///< of those: until the last rank had come to the call; DataParallel and pipelines don't tell
  comm::simulated::SimulatedTimes times = {};
};
/// What so many steps have taken, of `out.times`.
[[gnu::cold]] inline void count_steps(TrainingTimes& out, int steps) {
  const auto ranks = static_cast<double>(out.times.ranks.size());
  out.step = out.times.seconds() / steps;
  for (const auto& rank : out.times.ranks) {
    out.exposed += comm::simulated::seconds(rank.waited) / ranks / steps;
    out.late += comm::simulated::seconds(rank.late) / ranks / steps;
  }
}

/// Steps of DataParallel on `options.ranks` devices of one machine, with those copies: of `data_parallel_copies`, or as
/// a DeviceCopyListener has heard them. Devices go on as their streams do; the program never waits for one. The loss of
/// gathered outputs takes no time. Throws UsageError for devices of several machines, for copies between others than
/// those there are, and for times out of range.
[[gnu::cold]] inline TrainingTimes simulate_data_parallel(const comm::simulated::SimulationOptions& options,
                                                          const Training& training, const DataParallelCopies& copies,
                                                          int steps) {
  check<UsageError>(steps >= 1 && steps <= 100'000, "simulate_data_parallel: ", steps, " steps, expected 1 to 100000");
  DeviceStreams streams(options);
  int used = 1;
  for (const auto* const part :
       {&copies.prepare, &copies.gather, &copies.output_gradients, &copies.reduce, &copies.input_gradients})
    for (const auto& [from, to, kind, bytes] : *part) {
      check<UsageError>(from != to && std::min(from, to) >= 0 && std::max(from, to) < streams.size(),
                        "simulate_data_parallel: a copy from device ", from, " to ", to, ", of ", streams.size());
      used = std::max({used, from + 1, to + 1});
    }
  for (int device = 0; device < streams.size(); ++device)
    if (training.parameter_bytes > 0) streams.hold(device, {{}, held_by(training, device == 0)});
  const auto all = [&](const std::vector<DeviceCopy>& part, std::string_view name) {
    for (const auto& copy : part) streams.copy(copy, name);
  };
  const auto compute = [&](double usual, std::string_view pass) {
    for (int device = 0; device < used; ++device) streams.compute(device, usual, pass, pass);
  };
  std::vector<DeviceCopy> sent_by_nccl, prepared;
  for (const auto& copy : copies.prepare)
    (copies.by_nccl && copy.kind != trace::Traffic::inputs ? sent_by_nccl : prepared).push_back(copy);
  for (int step = 0; step < steps; ++step) {
    streams.next_step();
    const auto begun = streams.clock(0);
    streams.collective(sent_by_nccl, "replicate");
    for (const auto& copy : prepared) streams.copy(copy, copy.kind == trace::Traffic::inputs ? "scatter" : "replicate");
    compute(training.forward, "forward");
    all(copies.gather, "gather");
    streams.mark(0, "forward", "DataParallel forward", begun);
    const auto backward = streams.clock(0);
    all(copies.output_gradients, "scatter gradients");
    compute(training.backward, "backward");
    if (copies.by_nccl)
      streams.collective(copies.reduce, "reduce");
    else
      all(copies.reduce, "reduce");
    all(copies.input_gradients, "gather gradients");
    streams.mark(0, "backward", "backward", backward);
    streams.compute(0, training.optimizer, "optimizer", "optimizer step");
    streams.mark(0, "step", cat("step ", step), begun, step);
  }
  TrainingTimes out;
  const double computed = streams.computed();
  out.times = streams.take();
  out.step = out.times.seconds() / steps;
  out.exposed = out.step - computed / options.ranks / steps;
  return out;
}

/// How many ranks a simulation has to run, the others doing what they do (see SimulationOptions::alike); 0: all. Ranks
/// of an island are not alike.
[[gnu::cold]] inline int ranks_alike(const comm::simulated::SimulationOptions& options, const Training& training) {
  constexpr int few = 16;  // which run anyway
  const int island = options.links.island == 0 || options.links.island >= options.ranks ? 1 : options.links.island;
  const bool star = training.policy == TrainingPolicy::parameter_server;
  const bool ring = training.policy == TrainingPolicy::sequence_parallel;  // messages to a neighbour
  if (options.ranks <= few || star || ring || options.keep_steps || options.computing.jitter > 0 ||
      !options.computing.stragglers.empty() || options.ranks % island != 0)
    return 0;
  return island;
}

/// Whether all ranks are computed together, without messages: where some are slower than others, or one serves them.
inline bool trains_together(const comm::simulated::SimulationOptions& options, const Training& training) {
  const bool differ = options.computing.jitter > 0 || !options.computing.stragglers.empty() ||
                      training.policy == TrainingPolicy::parameter_server;
  const bool ring = training.policy == TrainingPolicy::sequence_parallel;
  return options.alike == 0 && differ && !ring && comm::simulated::run_together(options);
}

/// Trains for so many steps, `options.ranks` ranks with a batch each; of many that are alike some run for all, and
/// where they only compute at other speeds none sends messages. `options.alike`, as many as there are: all run. Throws
/// UsageError for times and sizes out of range.
[[gnu::cold]] inline TrainingTimes simulate_training(comm::simulated::SimulationOptions options,
                                                     const Training& training, int steps) {
  check<UsageError>(steps >= 1 && steps <= 100'000, "simulate_training: ", steps, " steps, expected 1 to 100000");
  if (training.policy == TrainingPolicy::data_parallel) {
    auto sizes = training.copied;
    check<UsageError>(sizes.samples >= 0 && sizes.samples <= 1'000'000'000, "simulate_training: ", sizes.samples,
                      " samples a device, expected 0 to 1e9");
    sizes.samples *= options.ranks;
    return simulate_data_parallel(options, training, data_parallel_copies(sizes, std::max(options.ranks, 1)), steps);
  }
  check<UsageError>(training.period >= 1, "simulate_training: expected a period of at least 1 step, got ",
                    training.period);
  const auto fragments = std::max(static_cast<int>(training.fragments.size()), 1);
  check<UsageError>(training.period % fragments == 0, "simulate_training: expected a period that ", fragments,
                    " fragments divide, got ", training.period, " steps");
  check<UsageError>(training.overlap >= 0 && training.overlap < training.period / fragments,
                    "simulate_training: expected an overlap of 0 to ", training.period / fragments - 1, " steps, got ",
                    training.overlap);
  const bool sharded = training.policy == TrainingPolicy::fully_sharded;
  const bool tensors = training.policy == TrainingPolicy::tensor_parallel;
  if (tensors || training.policy == TrainingPolicy::sequence_parallel)
    check<UsageError>(training.layers >= 1 && training.activation >= 1, "simulate_training: ", name(training.policy),
                      " of ", training.layers, " layers with activations of ", training.activation,
                      " bytes, expected both from 1 on");
  if (!tensors)
    check<UsageError>(sharded ? !training.units.empty() : !training.buckets.empty(), "simulate_training: no ",
                      sharded ? "units" : "buckets");
  double last = 0;
  for (const auto& bucket : training.buckets) {
    check<UsageError>(bucket.ready >= last && bucket.ready <= training.backward,
                      "simulate_training: a bucket that is full after ", bucket.ready, " s, expected ", last, " to ",
                      training.backward);
    last = bucket.ready;
  }
  options.true_numbers = false;
  const auto train = [&](auto& rank) {
    TrainingRank self(rank, training);
    for (int step = 0; step < steps; ++step) self.step(step);
  };
  TrainingTimes out;
  if (trains_together(options, training)) {
    comm::simulated::check_options(options);
    comm::simulated::RanksTogether ranks(options);
    train(ranks);
    out.times = ranks.take();
  } else {
    if (options.alike == 0) options.alike = ranks_alike(options, training);
    out.times = comm::simulated::simulate(options, train);
  }
  count_steps(out, steps);
  return out;
}

}  // namespace chorus::simulated
