#pragma once
/// How shares side by side take turns.

#include <chorus/core/batch_group.hpp>
#include <chorus/core/device.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <chorus/same_bits/share_turns.hpp>
#include <cstddef>
#include <exception>
#include <mutex>
#include <utility>

namespace chorus::same_bits {

CHORUS_INLINE void ShareTurns::run(std::size_t shares, Work work) {
  work_ = std::move(work);
  ended_.assign(shares, false);
  turn_ = arrived_ = round_ = 0;
  first_error_ = nullptr;
  team_ = std::move(detail::thread_team());
  threads_.run(shares, [this, slot = detail::pass_slot](std::size_t i) {
    const detail::Replaced<int> here(detail::pass_slot, slot);
    take_turns(i);
  });
  detail::thread_team() = std::move(team_);
  ended_.clear();
  if (first_error_) std::rethrow_exception(std::exchange(first_error_, nullptr));
}

CHORUS_INLINE void ShareTurns::take_turns(std::size_t i) {
  try {
    await_turn(i);
    work_.task(i);
  } catch (...) {
    if (!first_error_) first_error_ = std::current_exception();
  }
  leave(i);
  ended_[i] = true;
  pass_on(i);
}

CHORUS_INLINE void ShareTurns::await_turn(std::size_t i) {
  {
    std::unique_lock lock(mutex_);
    change_.wait(lock, [&] { return turn_ == i; });
  }
  detail::thread_team() = std::move(team_);
  work_.enter(i);
}

CHORUS_INLINE void ShareTurns::leave(std::size_t i) {
  work_.leave(i);
  team_ = std::move(detail::thread_team());
}

CHORUS_INLINE void ShareTurns::pass_on(std::size_t i) {
  const std::lock_guard lock(mutex_);
  for (std::size_t step = 1; step <= ended_.size(); ++step) {
    turn_ = (i + step) % ended_.size();
    if (!ended_[turn_]) break;
  }
  change_.notify_all();
}

}  // namespace chorus::same_bits
