#pragma once
/// How the threads of one pass meet, and detect members that will not arrive.

#include <algorithm>
#include <any>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/parallel/dp/thread_batch_group.hpp>
#include <chrono>
#include <compare>
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

CHORUS_INLINE ThreadMeeting::ThreadMeeting(std::vector<std::string> names, std::chrono::milliseconds timeout)
    : names_(std::move(names)),
      timeout_(timeout),
      members_(names_.size()),
      values_(names_.size()),
      given_(names_.size()),
      all_(names_.size()) {}

CHORUS_INLINE void ThreadMeeting::begin(bool recorded) {
  const std::lock_guard lock(mutex_);
  members_.assign(names_.size(), Member::at_work);
  arrived_ = left_ = 0;
  together_ = true;
  culprit_.reset();
  recorded_ = recorded;
  ++task_;
}

CHORUS_INLINE void ThreadMeeting::leave(std::size_t member, bool thrown) {
  std::unique_lock lock(mutex_);
  const Culprit own{.was = members_[member], .member = member};
  if (thrown && (!culprit_ || own < *culprit_)) culprit_ = own;
  const bool gave_up = members_[member] == Member::gave_up;
  members_[member] = thrown ? Member::failed : Member::ended;
  together_ = false;
  if (++left_ == names_.size()) {
    given_.assign(left_, std::any());
    all_.assign(left_, std::any());
  }
  change_.notify_all();
  if (gave_up) await_first(lock);
}

CHORUS_INLINE std::optional<std::size_t> ThreadMeeting::culprit() const {
  const std::lock_guard lock(mutex_);
  return culprit_ ? std::optional(culprit_->member) : std::nullopt;
}

CHORUS_INLINE void ThreadMeeting::sum(std::size_t member, std::span<double> values) {
  combine(member, values, [&] {
    for (const auto& own : values_)
      for (std::size_t i = 0; i < total_.size(); ++i) total_[i] += own[i];
  });
}

CHORUS_INLINE void ThreadMeeting::max(std::size_t member, std::span<double> values) {
  combine(member, values, [&] {
    total_ = values_[0];
    for (const auto& own : values_)
      for (std::size_t i = 0; i < total_.size(); ++i) total_[i] = std::max(total_[i], own[i]);
  });
}

CHORUS_INLINE std::vector<std::any> ThreadMeeting::exchange(std::size_t member, const std::any& own) {
  const auto lock = meet(
      member, [&] { given_[member] = own; }, [&] { all_.swap(given_); });
  return all_;
}

CHORUS_INLINE void ThreadMeeting::fail_alone(std::size_t member, bool in_time) {
  together_ = false;
  change_.notify_all();
  if (!in_time) {
    members_[member] = Member::gave_up;
    fail<TimeoutError>("SyncBatchNorm: ", names_of(Member::at_work), " did not join within ", timeout_.count(), " ms");
  }
  members_[member] = Member::turned_away;
  const auto ended = names_of(Member::ended), failed = names_of(Member::failed);
  check<UsageError>(ended.empty(), "SyncBatchNorm: ", ended, " ended without calling this layer");
  check<UsageError>(failed.empty(), "SyncBatchNorm: ", failed, " failed");
  fail<TimeoutError>("SyncBatchNorm: ", names_of(Member::gave_up), " timed out on ", names_of(Member::at_work));
}

CHORUS_INLINE void ThreadMeeting::await_first(std::unique_lock<std::mutex>& lock) {
  const auto back = [&] { return members_[0] != Member::at_work; };
  if (back()) return;
  detail::say(cat("warning: SyncBatchNorm under DataParallel: ", names_[0], " did not join within ", timeout_.count(),
                  " ms; the error is thrown when it ends"));
  if (change_.wait_for(lock, patience * timeout_, back)) return;
  detail::say(cat("error: DataParallel: ", names_[0], ", in the calling thread, does not end: the process exits"));
  std::terminate();
}

CHORUS_INLINE std::string ThreadMeeting::names_of(Member state) const {
  std::string out;
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (members_[i] == state) out += (out.empty() ? "" : ", ") + names_[i];
  return out;
}

CHORUS_INLINE void ThreadBatchGroup::sum(std::span<double> values) {
  check<UsageError>(is_here(),
                    "SyncBatchNorm under DataParallel: one thread runs backward through this layer without the other "
                    "devices: call backward or grad on the policy's output");
  meeting_->sum(member_, values);
}

CHORUS_INLINE ThreadBatchGroups::Membership::Membership(ThreadBatchGroups& groups, std::size_t members,
                                                        std::size_t member)
    : meeting_(groups.of_[members].meeting),
      member_(member),
      scope_(meeting_ == nullptr ? nullptr : groups.of_[members].groups[member]) {}

CHORUS_INLINE ThreadBatchGroups::Membership::~Membership() {
  if (meeting_ != nullptr) meeting_->leave(member_, std::uncaught_exceptions() > exceptions_before_);
}

CHORUS_INLINE void ThreadBatchGroups::begin(std::size_t members, bool recorded) {
  auto& set = of_[members];
  if (members > 1 && !set.meeting) {
    set.meeting = std::make_shared<ThreadMeeting>(
        std::vector(names_.begin(), names_.begin() + static_cast<std::ptrdiff_t>(members)), timeout_);
    for (std::size_t i = 0; i < members; ++i) set.groups.push_back(std::make_shared<ThreadBatchGroup>(set.meeting, i));
  }
  if (set.meeting) set.meeting->begin(recorded);
}

CHORUS_INLINE std::optional<std::size_t> ThreadBatchGroups::culprit(std::size_t members) const {
  return of_[members].meeting ? of_[members].meeting->culprit() : std::nullopt;
}

}  // namespace chorus::dp
