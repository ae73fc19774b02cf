#pragma once
/// The devices of one process as a BatchGroup: each is served by a thread, and they meet to add up their numbers.

#include <algorithm>
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
  explicit ThreadMeeting(std::size_t members) : values_(members) {}

  /// Before the members' next common task.
  void begin() {
    const std::lock_guard lock(mutex_);
    arrived_ = 0;
    left_ = false;
  }
  /// This member's task has ended.
  void leave() {
    const std::lock_guard lock(mutex_);
    left_ = true;
    change_.notify_all();
  }

  /// Adds up in the order of members, so that every run gives the same bits.
  void sum(std::size_t member, std::span<double> values) {
    std::unique_lock lock(mutex_);
    values_[member].assign(values.begin(), values.end());
    const auto round = round_;
    if (++arrived_ == values_.size()) {
      const bool fit =
          std::all_of(values_.begin(), values_.end(), [&](const auto& own) { return own.size() == values.size(); });
      total_.assign(fit ? values.size() : 0, 0);
      for (const auto& own : values_)
        for (std::size_t i = 0; i < total_.size(); ++i) total_[i] += own[i];
      arrived_ = 0;
      ++round_;
      change_.notify_all();
    } else {
      change_.wait(lock, [&] { return round_ != round || left_; });
    }
    check<UsageError>(round_ != round && total_.size() == values.size(),
                      "SyncBatchNorm: another device's copy of the model ended, or failed, without this layer");
    std::copy(total_.begin(), total_.end(), values.begin());
  }

 private:
  std::mutex mutex_;
  std::condition_variable change_;
  std::vector<std::vector<double>> values_;
  std::vector<double> total_;
  std::size_t arrived_ = 0, round_ = 0;
  bool left_ = false;
};

/// One device's place in it. The outputs are joined before the loss, so gradients are those of the whole batch already.
class ThreadBatchGroup final : public BatchGroup {
 public:
  ThreadBatchGroup(std::shared_ptr<ThreadMeeting> meeting, std::size_t member)
      : meeting_(std::move(meeting)), member_(member) {}
  void sum(std::span<double> values) override {
    check<UsageError>(
        batch_group().get() == this,
        "SyncBatchNorm under DataParallel: no gradient goes through it in a recorded forward pass (an ",
        "input is a GraphVariable): there backward comes to one device after the other; take a BatchNorm");
    meeting_->sum(member_, values);
  }
  double weight() override { return 1; }

 private:
  std::shared_ptr<ThreadMeeting> meeting_;
  std::size_t member_;
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
  void begin(std::size_t members) {
    if (of_.size() <= members) of_.resize(members + 1);
    auto& set = of_[members];
    if (members > 1 && !set.meeting) {
      set.meeting = std::make_shared<ThreadMeeting>(members);
      for (std::size_t i = 0; i < members; ++i)
        set.groups.push_back(std::make_shared<ThreadBatchGroup>(set.meeting, i));
    }
    if (set.meeting) set.meeting->begin();
  }

 private:
  struct Set {
    std::shared_ptr<ThreadMeeting> meeting;
    std::vector<std::shared_ptr<ThreadBatchGroup>> groups;
  };
  std::vector<Set> of_;  // by the number of members
};

}  // namespace chorus::inline CHORUS_ABI::detail
