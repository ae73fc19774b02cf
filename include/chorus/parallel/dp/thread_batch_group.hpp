#pragma once
/// An extension of step 3 for SyncBatchNorm: the devices' threads are a BatchGroup and meet to add up their statistics.
/// Each wait has a deadline.

#include <algorithm>
#include <any>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::dp {

/// A barrier that threads with a common task use repeatedly. Once a member has ended its task, has thrown, or has not
/// arrived within `timeout`, the members of this task stop meeting: the others throw errors that name it.
class ThreadMeeting {
 public:
  /// `names`: the members, in errors.
  ThreadMeeting(std::vector<std::string> names, std::chrono::milliseconds timeout);

  /// Called before the members' next task; `recorded`: its forward pass is recorded as one graph.
  void begin(bool recorded);
  bool recorded() const { return recorded_; }
  /// The number of the task, different for each.
  std::size_t task() const { return task_; }

  /// This member's task has ended or thrown. The first member's thread is the caller's: if it never ends, no error can
  /// be reported, so a member that gave up waiting for it ends the process.
  void leave(std::size_t member, bool thrown);
  /// Among the members that threw in this task, the one that caused the failure; none if none threw.
  std::optional<std::size_t> culprit() const;

  /// Adds in the order of members, so that every run gives the same bits.
  void sum(std::size_t member, std::span<double> values);
  /// The elementwise maximum.
  void max(std::size_t member, std::span<double> values);
  /// The values of all members.
  std::vector<std::any> exchange(std::size_t member, const std::any& own);

 private:
  // A member that throws at work has an error of its own; the others' errors follow from it or from a missing member.
  enum class Member { at_work, gave_up, turned_away, waiting, ended, failed };
  // Of several members the lowest-numbered one, independent of timing.
  struct Culprit {
    Member was;
    std::size_t member;
    auto operator<=>(const Culprit&) const = default;
  };

  // `into_total` combines all members' `values_` into the total, which is 0 before.
  template <class IntoTotal>
  void combine(std::size_t member, std::span<double> values, const IntoTotal& into_total) {
    const auto all = [&] {
      const bool fit =
          std::all_of(values_.begin(), values_.end(), [&](const auto& own) { return own.size() == values.size(); });
      total_.assign(fit ? values.size() : 0, 0);
      if (fit) into_total();
    };
    const auto lock = meet(
        member, [&] { values_[member].assign(values.begin(), values.end()); }, all);
    check<UsageError>(total_.size() == values.size(), detail::different_layers);
    std::copy(total_.begin(), total_.end(), values.begin());
  }

  // The first member may continue for this many timeouts after the others have failed.
  static constexpr int patience = 5;

  // Each member calls `arrive`, then the last one calls `complete`; the caller holds the returned lock. No member can
  // end the next meeting before all have left this one.
  template <class Arrive, class Complete>
  std::unique_lock<std::mutex> meet(std::size_t member, const Arrive& arrive, const Complete& complete) {
    std::unique_lock lock(mutex_);
    arrive();
    const auto round = round_;
    members_[member] = Member::waiting;
    if (together_ && ++arrived_ == names_.size()) {
      complete();
      arrived_ = 0;
      ++round_;
      members_.assign(names_.size(), Member::at_work);
      change_.notify_all();
    }
    const auto met = [&] { return round_ != round; };
    const bool in_time = change_.wait_for(lock, timeout_, [&] { return met() || !together_; });
    if (!met()) fail_alone(member, in_time);
    return lock;
  }

  [[noreturn, gnu::cold]] void fail_alone(std::size_t member, bool in_time);
  void await_first(std::unique_lock<std::mutex>& lock);
  [[gnu::cold]] std::string names_of(Member state) const;

  std::vector<std::string> names_;
  std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::condition_variable change_;
  std::vector<Member> members_;
  std::vector<std::vector<double>> values_;
  std::vector<double> total_;
  std::vector<std::any> given_, all_;
  std::size_t arrived_ = 0, left_ = 0, round_ = 0, task_ = 0;
  bool together_ = true, recorded_ = false;
  std::optional<Culprit> culprit_;
};

/// One device's membership as a BatchGroup. Outputs are joined before the loss, so gradients are the whole batch's
/// already.
class ThreadBatchGroup final : public BatchGroup {
 public:
  ThreadBatchGroup(std::shared_ptr<ThreadMeeting> meeting, std::size_t member)
      : meeting_(std::move(meeting)), member_(member) {}
  void sum(std::span<double> values) override;
  void max(std::span<double> values) override { meeting_->max(member_, values); }
  double weight() override { return 1; }
  bool is_here() const override { return batch_group().get() == this; }
  bool recorded() const override { return meeting_->recorded(); }
  std::vector<std::any> exchange(const std::any& own) override { return meeting_->exchange(member_, own); }
  std::size_t member() const override { return member_; }
  std::size_t pass() const override { return meeting_->task(); }

 private:
  std::shared_ptr<ThreadMeeting> meeting_;
  std::size_t member_;
};

/// The groups of a process's first 2, 3, ... devices.
class ThreadBatchGroups {
 public:
  /// `names`: the devices' copies of the model, in errors; `timeout`: of each wait for the others.
  ThreadBatchGroups(std::vector<std::string> names, std::chrono::milliseconds timeout)
      : names_(std::move(names)), timeout_(timeout), of_(names_.size() + 1) {}

  /// While it lives, device `member` of `members` works on its share.
  class Membership {
   public:
    Membership(ThreadBatchGroups& groups, std::size_t members, std::size_t member);
    ~Membership();
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;

   private:
    std::shared_ptr<ThreadMeeting> meeting_;  // this thread may end after the groups
    std::size_t member_;
    int exceptions_before_ = std::uncaught_exceptions();
    BatchGroupScope scope_;
  };

  /// Called before a task of `members` devices, each of which opens a Membership.
  void begin(std::size_t members, bool recorded);
  /// Called after it: the device whose exception made others throw, if any.
  std::optional<std::size_t> culprit(std::size_t members) const;

 private:
  struct Set {
    std::shared_ptr<ThreadMeeting> meeting;
    std::vector<std::shared_ptr<ThreadBatchGroup>> groups;
  };
  std::vector<std::string> names_;
  std::chrono::milliseconds timeout_;
  std::vector<Set> of_;  // by the number of members
};

}  // namespace chorus::dp

#if !CHORUS_COMPILED
#include <chorus/parallel/dp/thread_batch_group_impl.hpp>
#endif
