#pragma once
/// `simulate`: runs a program as all ranks of a group in one process, in virtual time.

#include <algorithm>
#include <array>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/connect.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/simulate/fault_plan.hpp>
#include <chorus/simulate/faults.hpp>
#include <chorus/simulate/links.hpp>
#include <chorus/simulate/simulated_engine.hpp>
#include <chorus/simulate/simulated_transport.hpp>
#include <chorus/simulate/tasks.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

/// How fast ranks compute. It is the only thing about a simulation that is random, by Philox: the same on all machines.
struct Computing {
  std::vector<std::pair<int, double>> stragglers = {};  ///< ranks that take that many times as long
  double jitter = 0;  ///< the standard deviation of how long a rank's step takes, as a part of the mean
  std::uint64_t seed = 0;

  /// How long the rank takes in that step, where others take `usual`. Jitter is the sum of four uniform
  /// numbers, near enough to a normal one, and needs no function whose last bit differs between libraries.
  Time time(Time usual, int rank, std::uint32_t step) const {
    auto scaled = static_cast<double>(usual.count());
    for (const auto& [straggler, factor] : stragglers)
      if (straggler == rank) scaled *= factor;
    if (jitter == 0) return Time(static_cast<std::int64_t>(scaled));
    std::int64_t sum = -2 * (std::int64_t{1} << 32);  // of four words, each 2^31 on average
    for (const auto word : philox(seed, {static_cast<std::uint32_t>(rank), step, 0, 0})) sum += word;
    const double deviations = static_cast<double>(sum) * (0x1p-32 * 1.7320508075688772);
    const auto extra = static_cast<std::int64_t>(scaled * (jitter * deviations));
    return std::max(Time{}, Time(static_cast<std::int64_t>(scaled) + extra));
  }
};

/// What simulate simulates: ranks, their links, their computing.
struct SimulationOptions {
  int ranks = 2;
  Links links = links_named("25gbit");
  Computing computing = {};
  Algorithm all_reduce = Algorithm::automatic;  ///< see World
  /// True numbers: each rank is a thread, of which one runs at a time, and has memory of its own; up to `max_ranks`.
  /// Else ranks are fibers, up to `most_scheduled_ranks`: calls take their time, but nobody looks at what they move.
  /// Then programs call `call` and `start`, and use no thread_local state.
  bool true_numbers = true;
  bool keep_spans = false;  ///< see SimulatedTimes
  /// Without true numbers: rank r + alike does what rank r does, for all r; 0: nobody knows. Then ranks below `alike`
  /// run, and the others have their times. Numbers of a call are as many for each rank; of a broadcast, which comes to
  /// one rank after another, all have what the last one has.
  int alike = 0;
  /// Told after each million of messages how many there have been.
  std::function<void(std::size_t)> progress = {};
  /// And each step of the algorithms that have steps, as TraceOptions::ring_steps: many.
  bool keep_steps = false;
  /// What goes wrong, with true numbers. Then waits have a deadline, and the ranks' errors and deaths are in their
  /// times: `simulate` doesn't throw them.
  std::optional<FaultPlan> faults = {};
};
inline constexpr int most_scheduled_ranks = 65'536;

/// A part of a rank's program, for a picture: `forward`, `backward`, ...
struct Mark {
  std::string kind, name;
  Time begun{}, ended{};
  std::size_t bytes = 0;
  int bucket = -1;
};

/// Numbers that a device of a process has handed to another one.
struct Copied {
  int to = 0;
  trace::Traffic kind = trace::Traffic::control;
  std::size_t bytes = 0;
  Time begun{}, ended{};
};
/// Bytes in use from a time on, by kind.
struct Held {
  Time at{};
  std::array<std::size_t, trace::memory_kinds> bytes{};
};

/// What a rank has done with its time. All but the first three where spans are kept.
struct RankTimes {
  Time end{};                      ///< when its program ended
  Time waited{};                   ///< for how long it waited for calls
  Time late{};                     ///< of that, until the last rank had come to the call
  std::vector<Mark> marks;         ///< see SimulatedRank::mark
  std::vector<Span> calls, waits;  ///< see SimulatedEngine
  std::vector<StepSpan> steps;     ///< see SimulationOptions::keep_steps
  std::vector<Copied> copies;      ///< of a device
  std::vector<Held> memory;        ///< where somebody knows
  std::exception_ptr error;        ///< with a plan of faults: what the rank's program has thrown
  bool killed = false;             ///< by the plan
};
/// When and how long the ranks of a simulation computed and waited, in virtual seconds.
struct SimulatedTimes {
  std::vector<RankTimes> ranks;
  bool one_process = false;    ///< they are the devices of one
  std::vector<Struck> faults = {};  ///< those of the plan that have happened
  double seconds() const {
    Time last{};
    for (const auto& rank : ranks) last = std::max(last, rank.end);
    return simulated::seconds(last);
  }
};

/// What a program of one rank is given.
class SimulatedRank {
 public:
  SimulatedRank(std::shared_ptr<SimulatedEngine> engine, Network& network, const Computing& computing, RankTimes& times)
      : engine_(engine), network_(network), computing_(computing), times_(times), communicator_(std::move(engine)) {}

  int rank() const { return engine_->rank; }
  int size() const { return engine_->size; }
  /// For policies and everything else that takes one.
  AnyCommunicator& communicator() { return communicator_; }
  /// The World of `communicator()`, for `split` and policies with groups. With true numbers.
  World world() const {
    return {.rank = rank(), .size = size(), .local_rank = rank(), .local_size = size(), .backend = Backend::simulated};
  }
  /// Virtual seconds since the beginning.
  double time() const { return seconds(engine_->clock()); }
  /// This rank computes for as long as one that is neither fast nor slow takes `usual` seconds for.
  void compute(double usual, const char* what = "compute") {
    engine_->clock() = later(engine_->clock(), computing_.time(time_of(what, usual), rank(), step_));
  }
  /// This rank does nothing for that long; others get on.
  void pause(double seconds) { engine_->pause(time_of("pause", seconds)); }
  /// Whether a plan of faults has killed that rank.
  bool has_died(int rank) const { return network_.faults && network_.faults->is_dead(rank); }
  /// Programs call it before each operation on a file that a plan's `@file` counts. What is wrong with the operation
  /// then, if something is. A rank that the plan kills there unwinds, by an exception that is no std::exception.
  std::optional<Fault::Kind> touch_file() {
    return network_.faults ? network_.faults->file_begins(rank()) : std::nullopt;
  }
  /// The rank's next step begins, with a jitter of its own.
  void next_step() { ++step_; }
  /// Where spans are kept: `kind` and `name` of what this rank has done since `begun`, which was `clock()`.
  void mark(std::string_view kind, std::string_view name, Time begun, std::size_t bytes = 0, int bucket = -1) {
    if (engine_->keeps_spans)
      times_.marks.push_back({std::string(kind), std::string(name), begun, engine_->clock(), bytes, bucket});
  }
  /// Where spans are kept: from now on this rank holds so many bytes more of that kind; negative: less.
  void hold(trace::Memory kind, std::int64_t bytes) {
    if (!engine_->keeps_spans) return;
    Held now = times_.memory.empty() ? Held{} : times_.memory.back();
    now.bytes[static_cast<std::size_t>(kind)] += static_cast<std::size_t>(bytes);
    if (!times_.memory.empty() && now.at == engine_->clock()) times_.memory.pop_back();
    now.at = engine_->clock();
    times_.memory.push_back(now);
  }
  Time clock() const { return engine_->clock(); }

  /// Without true numbers: a call of `bytes` of f32, as Engine::later has it, on memory that nobody looks at.
  /// `bucket`, `unit`: see Call.
  Work start(Op op, std::size_t bytes, trace::Traffic traffic = trace::Traffic::gradients, int peer = 0,
             bool receives = false, int bucket = -1, int unit = -1) {
    const bool gathers = op == Op::all_gather || op == Op::reduce_scatter;
    if (network_.alike < size() && op == Op::all_reduce) {
      const auto all = static_cast<std::size_t>(size()) * 4;
      bytes = (bytes + all - 1) / all * all;
    }
    check<UsageError>(!network_.moves_data, "simulation: a call without data, in one of true numbers");
    check<UsageError>(bytes <= network_.scratch.size() / (gathers ? static_cast<std::size_t>(size()) : 1),
                      "simulation: ", name(op), " of ", bytes, " bytes is too large");
    const bool words = bytes % 4 == 0;
    Reduction nothing{.dtype = words ? DType::f32 : DType::u8, .element = words ? std::size_t{4} : 1};
    nothing.combine = [](void*, const void*, const void*, std::size_t) {};
    nothing.combine_products = [](void*, const void*, double, const void*, double, std::size_t) {};
    nothing.scaled = [](void*, const void*, std::size_t, double) {};
    std::byte* const whole = network_.scratch.data();  // of which a gathering call has a part from each rank
    std::byte* const own = gathers ? whole + static_cast<std::size_t>(rank()) * bytes : whole;
    const bool scatters = op == Op::reduce_scatter;
    Call call{op, nothing, traffic, bytes / nothing.element, scatters ? whole : own, scatters ? own : whole, peer};
    call.receives = receives;
    call.bucket = bucket;
    call.unit = unit;
    return engine_->later(call);
  }
  void call(Op op, std::size_t bytes, trace::Traffic traffic = trace::Traffic::gradients, int peer = 0,
            bool receives = false) {
    start(op, bytes, traffic, peer, receives).wait();
  }

 private:
  const std::shared_ptr<SimulatedEngine> engine_;
  Network& network_;
  const Computing& computing_;
  RankTimes& times_;
  std::uint32_t step_ = 0;
  AnyCommunicator communicator_;
};

namespace detail {

class Simulation;
/// The simulation and the rank whose program this thread runs.
inline thread_local std::pair<Simulation*, int> running{nullptr, 0};

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options)
      : options_(options),
        tasks_(options.links.shared || options.faults, options.faults ? options.faults->seed + 1 : 0),
        network_(tasks_, options.links, options.ranks, options.true_numbers, options.alike),
        times_{.ranks = std::vector<RankTimes>(static_cast<std::size_t>(options.ranks))} {
    network_.progress = options.progress;
    if (options.faults)
      network_.faults =
          std::make_unique<Faults>(tasks_, *options.faults, options.ranks, network_.between.alpha);
  }

  template <class Body>
  SimulatedTimes run(const Body& body) {
    for (int rank = 0; rank < network_.alike; ++rank) {
      auto engine = std::make_shared<SimulatedEngine>(network_, rank, options_.all_reduce);
      engine->keeps_spans = options_.keep_spans;
      if (options_.keep_steps) engine->link.keep_steps();
      const int program = tasks_.add(options_.true_numbers ? RunsOn::thread : RunsOn::fiber,
                                     [this, rank, &body] { run_program(rank, body); });
      const int calls = tasks_.add(RunsOn::fiber, [engine = engine.get()] { engine->serve(); });
      engine->set_tasks(program, calls);
      if (network_.faults)
        for (const int task : {program, calls}) network_.faults->add_task(rank, task);
      engines_.push_back(std::move(engine));
    }
    tasks_.run([this] { stuck(); });
    if (network_.faults) times_.faults = std::move(network_.faults->struck);
    if (error_) std::rethrow_exception(error_);
    for (std::size_t rank = 0; rank < engines_.size(); ++rank) {
      times_.ranks[rank].calls = std::move(engines_[rank]->calls);
      times_.ranks[rank].waits = std::move(engines_[rank]->waits);
      times_.ranks[rank].steps = engines_[rank]->link.take_steps();
    }
    count_late();
    constexpr std::size_t with_spans = 64;  // of those alike: more are in no trace
    for (std::size_t rank = engines_.size(); rank < times_.ranks.size(); ++rank) {
      const auto& alike = times_.ranks[rank % engines_.size()];
      auto& own = times_.ranks[rank];
      if (rank < with_spans)
        own = alike;
      else
        own.end = alike.end, own.waited = alike.waited, own.late = alike.late;
      for (auto* const spans : {&own.calls, &own.waits})
        for (auto& span : *spans) {
          std::map<int, std::size_t> sent;
          for (const auto& [to, bytes] : span.sent)
            sent[(to + static_cast<int>(rank - rank % engines_.size())) % options_.ranks] = bytes;
          span.sent = std::move(sent);
        }
    }
    return std::move(times_);
  }

  /// This rank's end of a group of some ranks, from its program.
  std::shared_ptr<Engine> join(int rank, const World& world) {
    // Its port is a number that no other group has, for as long as somebody listens there.
    auto& group = groups_[world.master_port];
    if (group.number == 0) group.number = static_cast<int>(groups_.size());
    if (world.listen_fd >= 0) group.listener = Socket::adopt(world.listen_fd);
    const auto engine =
        std::make_shared<SimulatedEngine>(network_, world.rank, world.all_reduce, world.members, group.number);
    engine->keeps_spans = options_.keep_spans;
    const int calls = tasks_.add(RunsOn::fiber, [engine] { engine->serve(); });
    engine->set_tasks(tasks_.current(), calls);
    if (network_.faults) network_.faults->add_task(rank, calls);
    groups_of_[rank].push_back(engine);
    return engine;
  }

 private:
  struct Group {
    int number = 0;
    Socket listener = {};
  };

  template <class Body>
  void run_program(int rank, const Body& body) {
    auto& engine = engines_[static_cast<std::size_t>(rank)];
    auto& times = times_.ranks[static_cast<std::size_t>(rank)];
    running = {this, rank};
    try {
      SimulatedRank self(engine, network_, options_.computing, times);
      body(self);
    } catch (const Killed&) {
      times.killed = true;
    } catch (...) {
      if (network_.faults)
        times.error = std::current_exception();
      else if (!error_)
        error_ = std::current_exception();
    }
    times.end = engine->clock();
    engine->end();
    for (const auto& group : groups_of_[rank]) group->end();
    if (network_.faults) network_.faults->end(rank);
  }
  // What programs have waited for calls, and of it until the last rank had come to the call under way. Calls of all
  // ranks are known by their number: where one sends messages, or makes fewer calls, there is no last rank.
  void count_late() {
    std::vector<Time> last;
    bool comparable = true;
    for (const auto& engine : engines_) {
      comparable = comparable && !engine->has_messages && engine->came.size() == engines_.front()->came.size();
      last.resize(std::max(last.size(), engine->came.size()));
      for (std::size_t call = 0; call < engine->came.size(); ++call)
        last[call] = std::max(last[call], engine->came[call]);
    }
    for (std::size_t rank = 0; rank < engines_.size(); ++rank) {
      const auto& own = engines_[rank]->came;  // one after another; which of them is under way while the program waits
      std::size_t call = 0;
      for (const auto& [begun, ended] : engines_[rank]->waited) {
        times_.ranks[rank].waited += ended - begun;
        while (call + 1 < own.size() && own[call + 1] <= begun) ++call;
        for (std::size_t i = call; comparable && i < own.size() && own[i] < ended; ++i)
          times_.ranks[rank].late += std::max(Time{}, std::min(ended, last[i]) - std::max(begun, own[i]));
      }
    }
  }
  // Nobody can go on. Every call fails with what each rank does.
  [[gnu::cold]] void stuck() {
    bool polled = false;
    for (const auto& engine : engines_) polled = engine->answer_poll() || polled;
    if (polled) return;
    for (const auto& [rank, groups] : groups_of_)
      for (const auto& engine : groups) polled = engine->answer_poll() || polled;
    if (polled) return;
    constexpr std::size_t most = 16;
    std::string all = "deadlock: ";
    for (std::size_t rank = 0; rank < std::min(engines_.size(), most); ++rank)
      all += cat(rank == 0 ? "" : "; ", "rank ", rank, " ", engines_[rank]->state());
    if (engines_.size() > most) all += cat("; and ", engines_.size() - most, " more");
    network_.abort(all);
  }

  const SimulationOptions options_;
  Tasks tasks_;
  Network network_;
  SimulatedTimes times_;
  std::vector<std::shared_ptr<SimulatedEngine>> engines_;
  std::map<int, Group> groups_;                                         // by port
  std::map<int, std::vector<std::shared_ptr<SimulatedEngine>>> groups_of_;  // by rank
  std::exception_ptr error_;  // the first
};

}  // namespace detail

namespace detail {
[[gnu::cold]] inline std::shared_ptr<Engine> join_simulated(const World& world) {
  const auto [simulation, rank] = running;
  check<UsageError>(simulation != nullptr, "connect: backend simulated: expected a rank of simulate()");
  return simulation->join(rank, world);
}
inline const bool joins_simulated = register_backend(Backend::simulated, &join_simulated);
}  // namespace detail

/// Throws UsageError for options out of range.
[[gnu::cold]] inline void check_options(const SimulationOptions& options) {
  const int most = options.true_numbers ? max_ranks : most_scheduled_ranks;
  check<UsageError>(options.ranks >= 1 && options.ranks <= most, "simulate: ", options.ranks, " ranks, expected 1 to ",
                    most, options.true_numbers ? " with true numbers" : "");
  check<UsageError>(options.links.island >= 0, "simulate: islands of ", options.links.island, " ranks");
  const int island = options.links.island >= options.ranks ? 1 : std::max(options.links.island, 1);
  const bool divides = options.alike > 0 && options.ranks % options.alike == 0 && options.alike % island == 0;
  check<UsageError>(options.alike == 0 || (divides && !options.true_numbers && !options.keep_steps),
                    "simulate: ", options.alike, " of ", options.ranks, " ranks for all alike: expected several ",
                    "whole islands, without true numbers and single steps");
  for (const auto* link : {&options.links.inside, &options.links.between})
    check<UsageError>(link->bandwidth > 0 && std::isfinite(link->bandwidth), "simulate: a bandwidth of ",
                      link->bandwidth, " bytes a second");
  check<UsageError>(options.computing.jitter >= 0 && options.computing.jitter <= 1, "simulate: jitter ",
                    options.computing.jitter, " is not in [0, 1]");
  for (const auto& [rank, factor] : options.computing.stragglers) {
    check<UsageError>(rank >= 0 && rank < options.ranks, "simulate: straggler: rank ", rank, " is not in [0, ",
                      options.ranks, ")");
    check<UsageError>(factor > 0 && factor <= 1e6, "simulate: straggler: factor ", factor, " is not in (0, 1e6]");
  }
  check<UsageError>(!options.faults || (options.true_numbers && options.faults->timeout > 0),
                    "simulate: faults: expected true numbers and a timeout above 0, got ",
                    options.true_numbers ? "true" : "no true", " numbers and ",
                    options.faults ? options.faults->timeout : 0, " s");
  check<UsageError>(options.all_reduce != Algorithm::direct || options.ranks <= 1024,
                    "simulate: a direct all-reduce of ", options.ranks, " ranks, expected up to 1024");
}

/// Runs `body(rank)`, with a SimulatedRank, as each rank, and returns when all have ended. The times are the same in
/// every run and on every machine. Throws what a rank's program throws first; where no rank can go on, their calls
/// throw CommError, which tells what each of them waits for. Throws UsageError for options out of range.
template <class Body>
SimulatedTimes simulate(const SimulationOptions& options, const Body& body) {
  check_options(options);
  return detail::Simulation(options).run(body);
}

}  // namespace chorus::comm::simulated
