#pragma once
/// `SimulatedEngine`: a rank's calls in virtual time. A task of its own carries them out, one after another, while the
/// rank's program goes on: what hides behind computing shows in the clocks.

#include <algorithm>
#include <chorus/comm/algorithms/transport_communicator.hpp>
#include <chorus/comm/engine/engine.hpp>
#include <chorus/comm/engine/failure.hpp>
#include <chorus/comm/engine/flight_recorder.hpp>
#include <chorus/simulate/simulated_transport.hpp>
#include <chorus/simulate/tasks.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

/// A call that has been carried out, or a part of a program's time.
struct Span {
  NamedCall call = {};
  trace::Lane lane = trace::Lane::communication;
  trace::Traffic traffic = trace::Traffic::control;
  std::size_t bytes = 0;
  Time begun{}, ended{};
  std::map<int, std::size_t> sent = {};  ///< bytes, by the rank they went to
  std::vector<int> members = {};         ///< of a call of some ranks
};

class SimulatedEngine final : public Engine, public Progress, public std::enable_shared_from_this<SimulatedEngine> {
 public:
  /// `members`, `group`: see SimulatedTransport.
  SimulatedEngine(Network& network, int me, Algorithm all_reduce, const std::vector<int>& group_members = {},
                  int group = 0)
      : Engine(me, group_members.empty() ? network.size : static_cast<int>(group_members.size()), group_members),
        link(network, me, group_members, group),
        network_(network),
        tasks_(network.tasks),
        asked_(all_reduce) {
    check_all_reduce(all_reduce, link, name());
  }

  // The program's side.

  void now(const Call& call) override {
    if (failure_ && !is_dead())
      Failure{cat("rank ", rank_in_job(), ": ", comm::name(call.op),
                  ": this communicator has failed before: ", failure_.what),
              failure_.timed_out}
          .raise();
    give(call);
    wait(given_);
  }
  Work later(const Call& call) override {
    give(call);
    return {shared_from_this(), given_};
  }
  void wait(std::uint64_t ticket) override {
    const Time start = clock();
    while (ended_.size() < ticket && !failure_ && !is_dead()) tasks_.block();
    if (ended_.size() < ticket) {
      if (is_dead() && std::uncaught_exceptions() == 0) throw Killed{};
      clock() = std::max(start, tasks_.clock_of(server_));
      if (is_dead()) fail<CommError>("rank ", rank_in_job(), ": killed");
      failure_.raise();
    }
    clock() = std::max(start, ended_[ticket - 1]);
    if (clock() > start) waited.emplace_back(start, clock());
    if (keeps_spans && clock() > start) {
      waits.push_back(calls[ticket - 1]);
      waits.back().begun = start;
      waits.back().ended = clock();
    }
  }
  /// A look that finds nothing takes a microsecond of virtual time, so that a program that only looks gets on, too.
  bool done(std::uint64_t ticket) override {
    if (network_.faults) {  // time goes on to the next deadline only if this program's own does not
      clock() += std::chrono::microseconds(1);
      tasks_.wake(program_, clock());
      tasks_.block();
      return failure_ || (ended_.size() >= ticket && ended_[ticket - 1] <= clock());
    }
    polls_ = true;
    while (polls_ && ended_.size() < ticket && !failure_) tasks_.block();
    polls_ = false;
    const bool is = failure_ || (ended_.size() >= ticket && ended_[ticket - 1] <= clock());
    if (!is) clock() += std::chrono::microseconds(1);
    return is;
  }
  /// This program does nothing for that long.
  void pause(Time time) {
    clock() = comm::simulated::later(clock(), time);
    tasks_.wake(program_, clock());
    tasks_.block();
    if (is_dead()) throw Killed{};
  }
  /// From a task of the simulation.
  void abort(std::string_view why) noexcept override { link.abort(std::string(why)); }
  std::string_view name() const override { return "simulated"; }
  Algorithm all_reduce() const override { return asked_; }
  std::chrono::nanoseconds busy() const override { return std::chrono::duration_cast<std::chrono::nanoseconds>(busy_); }
  Clock::time_point time() const override {
    return Clock::time_point(std::chrono::seconds(1) +  // a program may take 0 for "not yet"
                             std::chrono::duration_cast<std::chrono::nanoseconds>(clock()));
  }

  // The simulation's side.

  /// The tasks of the program and of its calls, which runs `serve`.
  void set_tasks(int program, int calls_task) { program_ = program, server_ = calls_task; }
  Time& clock() const { return tasks_.clock_of(program_); }
  /// Carries out calls until the program has ended.
  void serve() {
    link.keeps_sent = keeps_spans;
    while (true) {
      while (first_ == waiting_.size()) {
        if (has_ended_ || is_dead()) return;
        tasks_.block();
      }
      const auto [call, launched] = waiting_[first_++];
      if (first_ == waiting_.size()) waiting_.clear(), first_ = 0;
      Time& own = tasks_.clock();
      own = std::max(own, launched);
      const Time begun = own;
      came.push_back(begun);
      has_messages = has_messages || call.op == Op::message;
      try {
        if (network_.faults) network_.faults->call_begins(rank_in_job());
        carry_out(call);
      } catch (const Killed&) {
        return tasks_.wake(program_, own);
      }
      busy_ += own - begun;
      if (keeps_spans)
        calls.push_back({current_, call.lane(), call.traffic, call.count * call.reduction.element, begun, own,
                         std::exchange(link.sent, {})});
      if (!failure_) ended_.push_back(own);
      tasks_.wake(program_, own);
    }
  }
  void end() {
    has_ended_ = true;
    tasks_.wake(server_, clock());
  }
  /// Where nobody can go on: whether the program asks if a call is done, which then it isn't.
  bool answer_poll() {
    if (!std::exchange(polls_, false)) return false;
    tasks_.wake(program_, clock());
    return true;
  }
  /// What this rank does: for errors.
  [[gnu::cold]] std::string state() const {
    if (link.waits_for() >= 0) return cat(current_.text(), " waits for rank ", link.waits_for());
    return has_ended_ ? "has ended" : "is in no call";
  }

  SimulatedTransport link;
  bool keeps_spans = false;
  std::vector<Time> came;                     ///< of each call: when this rank had come to it
  std::vector<std::pair<Time, Time>> waited;  ///< when its program waited for one
  bool has_messages = false;                  ///< there were calls of two ranks
  std::vector<Span> calls, waits;  ///< where they are kept: what was carried out; when the program waited for it

 private:
  bool is_dead() const { return network_.faults && network_.faults->is_dead(rank_in_job()); }
  void give(const Call& call) {
    ++given_;
    if (failure_ || is_dead()) return;
    waiting_.emplace_back(call, clock());
    tasks_.wake(server_, clock());
  }
  void carry_out(const Call& call) {
    Envelope envelope{.op = call.op, .dtype = call.reduction.dtype, .count = call.count};
    if (call.op == Op::message) {
      envelope.sequence = messages_[call.receives ? ~call.peer : call.peer]++;
    } else {
      envelope.detail =
          static_cast<std::uint8_t>(call.op == Op::broadcast ? call.peer : static_cast<int>(call.reduction.op));
      envelope.sequence = collectives_++;
    }
    current_ = {.envelope = envelope,
                .bucket = call.bucket,
                .unit = call.unit,
                .peer = call.peer,
                .receives = call.receives,
                .part_of = call.part_of};
    if (failure_) return;
    std::string why;
    bool timed_out = false;
    try {
      link.check();
      if (size == 1) return alone_.now(call);
      if (call.op != Op::message) tasks_.clock() += network_.call;
      if (call.op == Op::broadcast && network_.alike < size) {
        tasks_.clock() =
            chorus::comm::simulated::later(tasks_.clock(), link.chain(call.count * call.reduction.element));
        return;
      }
      // A barrier names nobody who is missing: a deadlock does.
      auto served = call;
      if (served.op == Op::monitored_barrier) served.op = Op::barrier;
      comm::detail::run_call(link, {}, served, envelope, asked_, [this](Algorithm by) { current_.algorithm = by; });
      link.flush();
      return;
    } catch (const std::exception& error) {
      why = error.what();
      timed_out = dynamic_cast<const LinkTimeout*>(&error) != nullptr;
    }
    failure_ = {cat("rank ", rank_in_job(), ": ", current_.text(), ": ", why), timed_out};
    link.abort(why);
  }

  Network& network_;
  Tasks& tasks_;
  const Algorithm asked_;
  comm::detail::Alone alone_;
  int program_ = -1, server_ = -1;
  std::vector<std::pair<Call, Time>> waiting_;  // those from first_ on
  std::size_t first_ = 0;
  std::uint64_t given_ = 0;
  std::vector<Time> ended_;  // by ticket
  Failure failure_;
  NamedCall current_;
  std::uint32_t collectives_ = 0;
  std::unordered_map<int, std::uint32_t> messages_;  // by peer: sent; ~peer: received
  Time busy_{};
  bool has_ended_ = false, polls_ = false;
};

}  // namespace chorus::comm::simulated
