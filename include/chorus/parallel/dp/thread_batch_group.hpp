#pragma once
/// The devices of one process as a BatchGroup: each is served by a thread, and they meet to add up their numbers.

#include <any>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/error.hpp>
#include <chorus/parallel/dp/thread_meeting.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::dp {

/// One device's place in it. The outputs are joined before the loss, so gradients are those of the whole batch already.
class ThreadBatchGroup final : public BatchGroup {
 public:
  ThreadBatchGroup(std::shared_ptr<ThreadMeeting> meeting, std::size_t member)
      : meeting_(std::move(meeting)), member_(member) {}
  void sum(std::span<double> values) override {
    check<UsageError>(is_here(),
                      "SyncBatchNorm under DataParallel: one thread goes back through this layer, without the other ",
                      "devices' threads: let backward or grad begin at what the policy returns");
    meeting_->sum(member_, values);
  }
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
  /// `names` of the devices' copies of the model, for errors; `timeout` of each wait of one for the others.
  ThreadBatchGroups(std::vector<std::string> names, std::chrono::milliseconds timeout)
      : names_(std::move(names)), timeout_(timeout), of_(names_.size() + 1) {}

  /// While it lives, `member` of `members` devices works on its share.
  class Membership {
   public:
    Membership(ThreadBatchGroups& groups, std::size_t members, std::size_t member)
        : meeting_(groups.of_[members].meeting),
          member_(member),
          scope_(meeting_ == nullptr ? nullptr : groups.of_[members].groups[member]) {}
    ~Membership() {
      if (meeting_ != nullptr) meeting_->leave(member_, std::uncaught_exceptions() > exceptions_before_);
    }
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;

   private:
    std::shared_ptr<ThreadMeeting> meeting_;  // this thread may come back when the groups are gone
    std::size_t member_;
    int exceptions_before_ = std::uncaught_exceptions();
    BatchGroupScope scope_;
  };

  /// Before a task of `members` devices, each of which opens a Membership.
  void begin(std::size_t members, bool recorded) {
    auto& set = of_[members];
    if (members > 1 && !set.meeting) {
      set.meeting = std::make_shared<ThreadMeeting>(
          std::vector(names_.begin(), names_.begin() + static_cast<std::ptrdiff_t>(members)), timeout_);
      for (std::size_t i = 0; i < members; ++i)
        set.groups.push_back(std::make_shared<ThreadBatchGroup>(set.meeting, i));
    }
    if (set.meeting) set.meeting->begin(recorded);
  }
  /// After it: the device that has thrown and made others throw, if one has.
  std::optional<std::size_t> culprit(std::size_t members) const {
    return of_[members].meeting ? of_[members].meeting->culprit() : std::nullopt;
  }

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
