#pragma once
/// Checks a schedule's table by following it as ranks would, without running any: for tables of any size.

#include <algorithm>
#include <chorus/parallel/pipeline/schedule.hpp>
#include <cstddef>
#include <string>
#include <vector>

namespace chorus {

/// Facts about a table, if forward, backward by inputs and backward by parameters take one unit of time each, and
/// messages none.
struct ScheduleFacts {
  int time = 0;                  ///< until the last rank ends
  double idle = 0;               ///< the fraction of all ranks' time spent waiting
  std::vector<int> kept_inputs;  ///< by rank: the maximum number of stage inputs kept for backward
};

namespace detail {

/// Walks through a table: each rank continues while the results it needs are there.
class ScheduleWalk {
 public:
  explicit ScheduleWalk(const Schedule& schedule)
      : schedule_(schedule), splits_(schedule.splits_backward()), progress_(schedule.ranks.size()) {
    for (auto& ends : ends_) ends.assign(cells(), never);
  }

  ScheduleFacts facts() {
    check_complete();
    for (bool any = true; any;) {
      any = false;
      for (std::size_t rank = 0; rank < progress_.size(); ++rank)
        while (goes_on(rank)) any = true;
    }
    check_all_ended();
    ScheduleFacts facts;
    long busy = 0;
    for (const Progress& rank : progress_) {
      facts.time = std::max(facts.time, rank.time);
      facts.kept_inputs.push_back(rank.most_kept);
      busy += rank.busy;
    }
    facts.idle = 1 - static_cast<double>(busy) / (static_cast<double>(facts.time) * schedule_.size());
    return facts;
  }

 private:
  using Kind = Schedule::Kind;
  using Action = Schedule::Action;
  static constexpr int never = -1;

  struct Progress {
    std::size_t next = 0;
    int time = 0, busy = 0, kept = 0, most_kept = 0;
  };

  std::size_t cells() const {
    check<UsageError>(schedule_.size() >= 1 && schedule_.micro_batches >= 1 && schedule_.stages >= 1,
                      "schedule: expected ranks, stages and micro-batches, got ", schedule_.size(), ", ",
                      schedule_.stages, " and ", schedule_.micro_batches);
    return static_cast<std::size_t>(schedule_.stages) * static_cast<std::size_t>(schedule_.micro_batches);
  }
  // The action's end time; `never` if it has not ended.
  int& end(Kind kind, int micro_batch, int stage) {
    return ends_[static_cast<std::size_t>(kind)]
                [static_cast<std::size_t>(stage) * static_cast<std::size_t>(schedule_.micro_batches) +
                 static_cast<std::size_t>(micro_batch)];
  }

  void check_complete() const {
    std::vector<int> counts[3];
    for (auto& count : counts) count.assign(cells(), 0);
    for (int rank = 0; rank < schedule_.size(); ++rank)
      for (const Action& action : schedule_.ranks[static_cast<std::size_t>(rank)]) {
        check<UsageError>(action.stage >= 0 && action.stage < schedule_.stages && action.micro_batch >= 0 &&
                              action.micro_batch < schedule_.micro_batches && action.kind <= Kind::weight,
                          "schedule: rank ", rank, " has ", action, ": there are ", schedule_.stages, " stages and ",
                          schedule_.micro_batches, " micro-batches");
        check<UsageError>(schedule_.rank_of(action.stage) == rank, "schedule: rank ", rank, " has ", action,
                          ", which belongs to rank ", schedule_.rank_of(action.stage));
        ++counts[static_cast<std::size_t>(action.kind)]
                [static_cast<std::size_t>(action.stage * schedule_.micro_batches + action.micro_batch)];
      }
    for (const Kind kind : {Kind::forward, Kind::backward, Kind::weight})
      for (int stage = 0; stage < schedule_.stages; ++stage)
        for (int i = 0; i < schedule_.micro_batches && (splits_ || kind != Kind::weight); ++i) {
          const int count =
              counts[static_cast<std::size_t>(kind)][static_cast<std::size_t>(stage * schedule_.micro_batches + i)];
          check<UsageError>(count == 1, "schedule: ", Action{kind, i, stage}, " occurs ", count,
                            " times, expected once");
        }
  }

  /// The actions that must end first, in this or another stage.
  std::vector<Action> needs(const Action& action) const {
    const auto [kind, i, stage] = action;
    std::vector<Action> out;
    if (kind == Kind::forward && stage > 0) out.push_back({Kind::forward, i, stage - 1});
    if (kind == Kind::backward) {
      out.push_back({Kind::forward, i, stage});
      if (stage + 1 < schedule_.stages) out.push_back({Kind::backward, i, stage + 1});
    }
    if (kind == Kind::weight) out.push_back({Kind::backward, i, stage});
    return out;
  }

  bool goes_on(std::size_t rank) {
    Progress& progress = progress_[rank];
    if (progress.next == schedule_.ranks[rank].size()) return false;
    const Action& action = schedule_.ranks[rank][progress.next];
    int begin = progress.time;
    for (const Action& need : needs(action)) {
      const int ended = end(need.kind, need.micro_batch, need.stage);
      if (ended == never) return false;
      begin = std::max(begin, ended);
    }
    const int duration = action.kind == Kind::backward && !splits_ ? 2 : 1;
    progress.time = end(action.kind, action.micro_batch, action.stage) = begin + duration;
    progress.busy += duration;
    if (action.kind == Kind::forward) progress.most_kept = std::max(progress.most_kept, ++progress.kept);
    if (action.kind == (splits_ ? Kind::weight : Kind::backward)) --progress.kept;
    ++progress.next;
    return true;
  }

  void check_all_ended() {
    std::string waiting;
    for (std::size_t rank = 0; rank < progress_.size(); ++rank) {
      if (progress_[rank].next == schedule_.ranks[rank].size()) continue;
      const Action& action = schedule_.ranks[rank][progress_[rank].next];
      for (const Action& need : needs(action))
        if (end(need.kind, need.micro_batch, need.stage) == never)
          waiting += cat(waiting.empty() ? "" : "; ", "rank ", rank, "'s ", action, " waits for ", need);
    }
    check<UsageError>(waiting.empty(), "schedule: no rank can continue: ", waiting);
  }

  const Schedule& schedule_;
  const bool splits_;
  std::vector<Progress> progress_;
  std::vector<int> ends_[3];
};

}  // namespace detail

/// Throws UsageError if an action is missing, occurs twice or is on the wrong rank, and if ranks would wait for each
/// other for ever.
[[gnu::cold]] inline ScheduleFacts check_schedule(const Schedule& schedule) {
  return detail::ScheduleWalk(schedule).facts();
}

}  // namespace chorus
