#pragma once
/// The devices of one process as a BatchGroup: each is served by a thread, and they meet to add up their numbers.

#include <algorithm>
#include <any>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/error.hpp>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::detail {

/// A meeting of `members` threads. Who has ended, or thrown, is waited for no more: the others throw.
class ThreadMeeting {
 public:
  explicit ThreadMeeting(std::size_t members) : values_(members), given_(members), all_(members) {}

  /// Before the members' next common task, whose forward pass is `recorded` as one graph or not.
  void begin(bool recorded) {
    const std::lock_guard lock(mutex_);
    arrived_ = left_ = 0;
    recorded_ = recorded;
  }
  bool recorded() const { return recorded_; }
  /// This member's task has ended.
  void leave() {
    const std::lock_guard lock(mutex_);
    if (++left_ == values_.size()) {
      given_.assign(left_, std::any());
      all_.assign(left_, std::any());
    }
    change_.notify_all();
  }

  /// Adds up in the order of members, so that every run gives the same bits.
  void sum(std::size_t member, std::span<double> values) {
    const auto add_up = [&] {
      const bool fit =
          std::all_of(values_.begin(), values_.end(), [&](const auto& own) { return own.size() == values.size(); });
      total_.assign(fit ? values.size() : 0, 0);
      for (const auto& own : values_)
        for (std::size_t i = 0; i < total_.size(); ++i) total_[i] += own[i];
    };
    const auto lock = meet([&] { values_[member].assign(values.begin(), values.end()); }, add_up);
    check_together(total_.size() == values.size());
    std::copy(total_.begin(), total_.end(), values.begin());
  }
  /// What each member gives.
  std::vector<std::any> exchange(std::size_t member, const std::any& own) {
    const auto lock = meet([&] { given_[member] = own; }, [&] { all_.swap(given_); });
    return all_;
  }

 private:
  // Each member calls `arrive`, the last one then `complete`; the lock is held for what follows. No member can come to
  // the next meeting's end before all have gone from this one.
  template <class Arrive, class Complete>
  std::unique_lock<std::mutex> meet(const Arrive& arrive, const Complete& complete) {
    std::unique_lock lock(mutex_);
    arrive();
    const auto round = round_;
    if (++arrived_ == values_.size()) {
      complete();
      arrived_ = 0;
      ++round_;
      change_.notify_all();
    } else {
      change_.wait(lock, [&] { return round_ != round || left_ > 0; });
    }
    check_together(round_ != round);
    return lock;
  }
  static void check_together(bool together) {
    check<UsageError>(together,
                      "SyncBatchNorm: another device's copy of the model ended, or failed, without this layer");
  }

  std::mutex mutex_;
  std::condition_variable change_;
  std::vector<std::vector<double>> values_;
  std::vector<double> total_;
  std::vector<std::any> given_, all_;
  std::size_t arrived_ = 0, left_ = 0, round_ = 0;
  bool recorded_ = false;
};

/// One device's place in it. The outputs are joined before the loss, so gradients are those of the whole batch already.
class ThreadBatchGroup final : public BatchGroup {
 public:
  ThreadBatchGroup(std::shared_ptr<ThreadMeeting> meeting, std::size_t member)
      : meeting_(std::move(meeting)), member_(member) {}
  void sum(std::span<double> values) override {
    check<UsageError>(batch_group().get() == this,
                      "SyncBatchNorm under DataParallel: in a pass with a GraphVariable among its inputs no gradient ",
                      "goes through this layer but from a GraphVariable: make one of each input that leads to it");
    meeting_->sum(member_, values);
  }
  double weight() override { return 1; }
  std::vector<std::any> exchange(const std::any& own) override {
    if (!meeting_->recorded()) return {};
    exchanged_ = true;
    return meeting_->exchange(member_, own);
  }
  bool exchanged() const override { return exchanged_; }
  void begin() { exchanged_ = false; }

 private:
  std::shared_ptr<ThreadMeeting> meeting_;
  std::size_t member_;
  bool exchanged_ = false;
};

/// The meetings of a process's first 2, 3, ... devices.
class ThreadBatchGroups {
 public:
  /// While it lives, `member` of `members` devices works on its share.
  class Membership {
   public:
    Membership(ThreadBatchGroups& groups, std::size_t members, std::size_t member)
        : meeting_(groups.of_[members].meeting.get()),
          scope_(meeting_ == nullptr ? nullptr : groups.of_[members].groups[member]) {}
    ~Membership() {
      if (meeting_ != nullptr) meeting_->leave();
    }
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;

   private:
    ThreadMeeting* meeting_;
    BatchGroupScope scope_;
  };

  /// Before a task of `members` devices, each of which opens a Membership.
  void begin(std::size_t members, bool recorded) {
    if (of_.size() <= members) of_.resize(members + 1);
    auto& set = of_[members];
    if (members > 1 && !set.meeting) {
      set.meeting = std::make_shared<ThreadMeeting>(members);
      for (std::size_t i = 0; i < members; ++i)
        set.groups.push_back(std::make_shared<ThreadBatchGroup>(set.meeting, i));
    }
    if (!set.meeting) return;
    set.meeting->begin(recorded);
    for (const auto& group : set.groups) group->begin();
  }

 private:
  struct Set {
    std::shared_ptr<ThreadMeeting> meeting;
    std::vector<std::shared_ptr<ThreadBatchGroup>> groups;
  };
  std::vector<Set> of_;  // by the number of members
};

}  // namespace chorus::inline CHORUS_ABI::detail
