#pragma once
/// `Faults`: a plan at work. Transports and engines of a simulation ask it, where there is one.

#include <algorithm>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/simulate/fault_plan.hpp>
#include <chorus/simulate/tasks.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

/// Unwinds the tasks of a rank that is dead. No std::exception: nobody takes it for an error that can be reported.
struct Killed {};

/// A fault that has happened.
struct Struck {
  Fault fault;
  Time at{};
};

/// Who lives, which links hold, who has heard of what. A rank that dies or loses a link sends nothing any more; what it
/// had sent arrives. Its peers notice after the link's latency, as by a closed connection.
class Faults {
 public:
  Faults(Tasks& tasks, const FaultPlan& plan, int ranks, Time latency)
      : tasks_(tasks), plan_(plan), latency_(latency), ranks_(static_cast<std::size_t>(ranks)) {
    for (const auto& fault : plan.faults) {
      check<UsageError>(fault.rank < ranks && fault.peer < ranks, "fault plan: '", text_of(fault), "' with ", ranks,
                        " ranks");
      if (fault.lasts()) struck.push_back({fault, {}});
    }
    left_ = plan.faults;
  }

  /// A rank's program, and the tasks that carry out its calls, one for each of its groups.
  void add_task(int rank, int task) { of(rank).tasks.push_back(task); }
  bool is_dead(int rank) const { return of(rank).state == State::dead; }

  /// A rank's next call has its turn. From the task that carries it out, as all that follows, up to `end`.
  void call_begins(int rank) {
    const auto number = ++of(rank).calls;
    for (const auto& fault : take([&](const Fault& f) { return f.rank == rank && f.at_call == number; }))
      strike(fault, rank);
  }
  /// A rank's next operation on a file begins, from the rank's program. What is wrong with it, if something is.
  std::optional<Fault::Kind> file_begins(int rank) {
    check_rank(rank, -1);
    const auto number = ++of(rank).files;
    std::optional<Fault::Kind> wrong;
    for (const auto& fault : take([&](const Fault& f) { return f.rank == rank && f.at_file == number; })) {
      strike(fault, rank);
      if (fault.is_of_file() && wrong.value_or(Fault::Kind::part) == Fault::Kind::part) wrong = fault.kind;
    }
    return wrong;
  }
  /// A rank sends so many bytes to another one. Returns how much later they arrive than without faults, and how much
  /// longer the ports are busy, as a factor.
  std::pair<Time, double> passes(int rank, int peer, int group, std::size_t bytes) {
    auto& link = links_[{rank, peer}];
    link.bytes += bytes;
    ++link.pieces;
    for (const auto& fault : take([&](const Fault& f) {
           return f.rank == rank && f.peer == peer && f.at_byte > 0 && f.at_byte <= link.bytes;
         }))
      strike(fault, rank);
    check_link(rank, peer, group);
    std::pair<Time, double> cost{Time{}, 1.0};
    for (const auto& fault : plan_.faults) {
      const auto ends = std::minmax(fault.rank, fault.peer);
      if (ends != std::minmax(rank, peer)) continue;
      if (fault.kind == Fault::Kind::slow) cost.second = std::max(cost.second, fault.amount);
      if (fault.kind != Fault::Kind::delay) continue;
      const auto drawn = philox(plan_.seed, {static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(peer),
                                             static_cast<std::uint32_t>(link.pieces), 0xDE1A})[0];
      cost.first += time_of("delay", fault.amount * (drawn * 0x1p-32));
    }
    return cost;
  }
  /// Throws LinkError with why this rank can't go on in that group, if somebody has told it.
  void check_rank(int rank, int group) const {
    if (is_dead(rank)) throw Killed{};
    const auto end = ends_.find({rank, group});
    if (end == ends_.end() || end->second.why.empty()) return;
    if (end->second.timed_out) throw LinkTimeout(end->second.why);
    throw LinkError(end->second.why);
  }
  /// And if the link to that rank is lost.
  void check_link(int rank, int peer, int group) const {
    check_rank(rank, group);
    const auto lost = lost_.find({rank, peer});
    if (lost != lost_.end()) throw LinkError(lost->second);
  }
  /// This rank waits for that one: it hears of it if that takes longer than the plan's timeout.
  void waits(int rank, int peer, int group) {
    const int task = tasks_.current();
    const auto wait = ++waits_;
    of(rank).waits[task] = {peer, group, wait};
    const Time deadline = later(tasks_.clock(), time_of("timeout", plan_.timeout));
    tasks_.at(deadline, [this, rank, peer, group, task, wait, deadline] {
      const auto late = of(rank).waits.find(task);
      if (late == of(rank).waits.end() || late->second.number != wait || of(rank).state != State::lives) return;
      const int first = awaited_by(peer);
      auto why = cat("no progress for ", plan_.timeout, " s, waiting for rank ", first);
      if (!of(first).why.empty()) why += cat(", which gave up: ", of(first).why);  // it has said so, but too late
      auto& own = ends_[{rank, group}];
      own.timed_out = own.why.empty();
      tell(rank, group, why, deadline);
    });
  }
  void waited(int rank) { of(rank).waits.erase(tasks_.current()); }
  /// The rank gives up in that group: others hear why, where links hold.
  void abort(int rank, int group, const std::string& why) {
    tell(rank, group, why, tasks_.clock());
    if (of(rank).state != State::lives || std::exchange(ends_[{rank, group}].gave_up, true)) return;
    for_others(rank, [this, rank, group, why](int other, Time when) {
      if (!lost_.contains({other, rank})) tell(other, group, cat("rank ", rank, " gave up: ", why), when);
    });
  }
  /// The rank's program has ended.
  void end(int rank) {
    of(rank).ended = true;
    end_those_that_hang();
  }

  std::vector<Struck> struck;  ///< in the order in which they happened

 private:
  enum class State : std::uint8_t { lives, hangs, dead };
  struct Wait {
    int peer, group;
    std::uint64_t number;
  };
  struct Rank {
    State state = State::lives;
    bool ended = false;
    std::uint64_t calls = 0, files = 0;
    std::vector<int> tasks;
    std::map<int, Wait> waits;  // by the task that waits
    std::string why;            // the first reason for which it could not go on
  };
  // A rank in a group.
  struct End {
    std::string why;  // it can't go on
    bool timed_out = false, gave_up = false;
  };
  struct Link {
    std::uint64_t bytes = 0, pieces = 0;
  };

  Rank& of(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  const Rank& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  template <class Is>
  std::vector<Fault> take(const Is& is) {
    const auto rest = std::stable_partition(left_.begin(), left_.end(), [&](const Fault& f) { return !is(f); });
    std::vector<Fault> taken(rest, left_.end());
    left_.erase(rest, left_.end());
    return taken;
  }
  /// All of its tasks look again at what there is; those that wait for a peer have waited until `when`.
  void wake(const Rank& rank, Time when) {
    for (const auto& [task, wait] : rank.waits) tasks_.clock_of(task) = std::max(tasks_.clock_of(task), when);
    for (const int task : rank.tasks) tasks_.wake(task, when);
  }
  void tell(int rank, int group, const std::string& why, Time when) {
    for (auto* const known : {&of(rank).why, &ends_[{rank, group}].why})
      if (known->empty()) *known = why;
    wake(of(rank), when);
  }
  template <class Hear>
  void for_others(int rank, const Hear& hear) {
    const Time when = later(tasks_.clock(), latency_);
    for (int other = 0; other < static_cast<int>(ranks_.size()); ++other)
      if (other != rank) tasks_.at(when, [hear, other, when] { hear(other, when); });
  }
  void lose(int rank, int peer, const std::string& why, Time when) {
    lost_.emplace(std::pair{rank, peer}, why);
    wake(of(rank), when);
  }
  /// Follows who waits for whom, each for whom it has waited longest, to a rank that waits for nobody.
  int awaited_by(int rank) const {
    std::vector<bool> seen(ranks_.size());
    while (of(rank).state == State::lives && !of(rank).waits.empty() && !seen[static_cast<std::size_t>(rank)]) {
      seen[static_cast<std::size_t>(rank)] = true;
      const auto& waits = of(rank).waits;
      rank = std::min_element(waits.begin(), waits.end(), [](const auto& a, const auto& b) {
               return a.second.number < b.second.number;
             })->second.peer;
    }
    return rank;
  }
  /// When all others have ended, ranks that hang are killed.
  void end_those_that_hang() {
    if (!std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.ended || r.state == State::hangs; }))
      return;
    for (auto& rank : ranks_) {
      if (rank.state != State::hangs) continue;
      rank.state = State::dead;
      wake(rank, {});
    }
  }
  void strike(const Fault& fault, int rank) {
    auto& own = of(rank);
    struck.push_back({fault, tasks_.clock()});
    switch (fault.kind) {
      case Fault::Kind::kill:
        own.state = State::dead;
        wake(own, tasks_.clock());
        for_others(rank, [this, rank](int other, Time when) {
          lose(other, rank, cat("rank ", rank, " has died"), when);
        });
        throw Killed{};
      case Fault::Kind::hang:
        own.state = State::hangs;
        end_those_that_hang();
        while (own.state == State::hangs) tasks_.block();
        throw Killed{};
      case Fault::Kind::stop:
        for (const int task : own.tasks)
          tasks_.clock_of(task) = later(tasks_.clock_of(task), time_of("stop", fault.amount));
        return tasks_.await_turn();
      case Fault::Kind::cut:
        lost_.emplace(std::pair{rank, fault.peer}, cat("the connection to rank ", fault.peer, " is lost"));
        for_others(rank, [this, rank, fault](int other, Time when) {
          if (other == fault.peer) lose(other, rank, cat("the connection to rank ", rank, " is lost"), when);
        });
        return;
      case Fault::Kind::slow:
      case Fault::Kind::delay:
      case Fault::Kind::full:
      case Fault::Kind::bad:
      case Fault::Kind::part: return;
    }
  }

  Tasks& tasks_;
  const FaultPlan plan_;
  const Time latency_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int>, End> ends_;  // by rank and group
  std::uint64_t waits_ = 0;
  std::vector<Fault> left_;
  std::map<std::pair<int, int>, Link> links_;
  std::map<std::pair<int, int>, std::string> lost_;  // by the rank that knows, and its peer
};

}  // namespace chorus::comm::simulated
