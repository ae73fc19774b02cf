#pragma once
/// The ranks of an Elastic job in virtual time: who lives is known from the plan of faults, and newcomers are ranks
/// that begin later.

#include <algorithm>
#include <chorus/comm/connect.hpp>
#include <chorus/parallel/elastic/members.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

/// What the ranks of one job know together. Make one for each run of `simulate`.
struct ElasticJob {
  explicit ElasticJob(int first_ranks, elastic::Options how = {}) : options(how) {
    for (int rank = 0; rank < first_ranks; ++rank) members.push_back(rank);
  }

  const elastic::Options options;
  std::vector<int> members;  ///< of the present epoch, by age
  std::set<int> arrived, ended;
  std::vector<int> waiting;  ///< newcomers
  std::string failure;       ///< the first rank's own error
  std::int64_t epoch = 0;
};

/// One rank's view.
class ElasticMembers final : public elastic::Members {
 public:
  ElasticMembers(SimulatedRank& rank, std::shared_ptr<ElasticJob> job) : rank_(rank), job_(std::move(job)) {
    if (!is_member()) job_->waiting.push_back(rank_.rank());
  }
  ~ElasticMembers() override { job_->ended.insert(rank_.rank()); }

  AnyCommunicator regroup(std::string_view) override {
    check<elastic::Evicted>(epoch == 0 || is_member(), "elastic: rank ", rank_.rank(),
                            " was silent for too long: the others continue without it");
    const auto last = job_->epoch;
    const double begun = rank_.time(),
                 end = begun + std::chrono::duration<double>(job_->options.lost_after).count();
    job_->arrived.insert(rank_.rank());
    double look_after = 1e-4;
    while (job_->epoch == last || !is_member()) {
      check<CommError>(job_->failure.empty(), job_->failure);
      const bool any = std::ranges::any_of(job_->members, [&](int rank) { return lives(rank); });
      check<elastic::Evicted>(any, "Elastic: the ranks with the state of the run ended before they could give it to ",
                              "this one");
      check<TimeoutError>(is_member() || rank_.time() < end + 10 * (end - begun),
                          "elastic: a newcomer, waiting for rank ", job_->members.front(), ", which lets nobody in");
      if (is_member() && all_here(rank_.time() > end))
        next_epoch();
      else
        rank_.pause(std::exchange(look_after, std::min(2 * look_after, 0.5)));
    }
    epoch = job_->epoch;
    const auto& members = job_->members;
    const auto size = static_cast<int>(members.size());
    check<elastic::TooFewRanks>(size >= job_->options.at_least, "elastic: ", size, " of the ranks live, expected ",
                                job_->options.at_least, " at least");
    const auto me = static_cast<int>(std::find(members.begin(), members.end(), rank_.rank()) - members.begin());
    return connect({.rank = me,
                    .size = size,
                    .master_port = static_cast<int>(epoch),
                    .members = members,
                    .backend = Backend::simulated});
  }
  bool knocked() override { return !job_->waiting.empty(); }
  void fail(std::string_view why) noexcept override {
    if (rank_.has_died(rank_.rank()) || !job_->failure.empty()) return;  // a dead rank says nothing; the first one counts
    try {
      job_->failure = cat("rank ", rank_.rank(), " failed: ", why);
    } catch (...) {
    }
  }

 private:
  bool is_member() const {
    return std::find(job_->members.begin(), job_->members.end(), rank_.rank()) != job_->members.end();
  }
  bool lives(int rank) const { return !rank_.has_died(rank) && !job_->ended.contains(rank); }
  /// `late`: those who have not come are lost.
  bool all_here(bool late) const {
    return std::all_of(job_->members.begin(), job_->members.end(),
                       [&](int rank) { return late || !lives(rank) || job_->arrived.contains(rank); });
  }
  void next_epoch() {
    auto& job = *job_;
    std::erase_if(job.members, [&](int rank) { return !lives(rank) || !job.arrived.contains(rank); });
    for (const int rank : job.waiting)
      if (lives(rank)) job.members.push_back(rank);
    job.waiting.clear();
    job.arrived.clear();
    ++job.epoch;
  }

  SimulatedRank& rank_;
  const std::shared_ptr<ElasticJob> job_;
};

}  // namespace chorus::comm::simulated
