#pragma once
/// `run_job`: a group of ranks that is started again when one of them fails.

#include <chorus/launch/supervisor.hpp>
#include <chrono>
#include <thread>

namespace chorus {

namespace detail {

/// A program that fails at once shall not keep the machine busy.
inline constexpr std::chrono::milliseconds shortest_attempt{200};

/// A wrong option stays wrong, and who sends a signal wants an end.
inline bool worth_a_restart(const GroupOutcome& outcome) {
  return outcome.status != 0 && outcome.status != 2 && outcome.signal == 0;
}

}  // namespace detail

/// Supervises the group, and starts all its ranks again after a failure, up to `group.max_restarts` times and at most
/// once in 200 ms; a program loses what it did after its newest checkpoint. A wrong option (exit status 2) and a signal
/// to this process end the job at once. The ranks of other machines notice that ranks are gone, fail, and are started
/// again by their own supervisors; they meet anew at the same address. Returns the status of the last attempt.
///
/// Where the reader of the output stands still, ranks are supervised all the same (see Console); at the end of the job
/// it is waited for, after a signal for `group.grace` at most.
inline int run_job(RankGroup group) {
  detail::Console console;
  for (group.restart = 0;; ++group.restart) {
    const auto next = std::chrono::steady_clock::now() + detail::shortest_attempt;
    group.attempt = group.restart;
    const auto outcome = detail::Supervisor(group, console).run();
    if (outcome.signal != 0) console.finish(group.grace);
    if (!detail::worth_a_restart(outcome) || group.restart >= group.max_restarts)
      return console.status_after(outcome.status);
    console.say(detail::format("restart %d of %d", group.restart + 1, group.max_restarts));
    std::this_thread::sleep_until(next);
  }
}

}  // namespace chorus
