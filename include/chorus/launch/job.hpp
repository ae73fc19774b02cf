#pragma once
/// `run_job`: a job of one machine, or of machines that are numbered; it may be restarted.

#include <chorus/launch/console.hpp>
#include <chorus/launch/message.hpp>
#include <chorus/launch/stand_by.hpp>
#include <chorus/launch/supervisor.hpp>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

namespace chorus {

namespace detail {

/// The minimum duration of an attempt, so that a program that fails at once does not keep the machine busy.
inline constexpr std::chrono::milliseconds shortest_attempt{200};

/// No restart for a wrong option, which stays wrong, and after a signal, whose sender wants an end.
inline bool worth_a_restart(const GroupOutcome& outcome) {
  return outcome.status != 0 && outcome.status != 2 && outcome.signal == 0;
}

}  // namespace detail

/// Supervises the group, and restarts all its ranks after a failure, up to `group.max_restarts` times and at most once
/// in 200 ms; a program loses its work since its newest checkpoint. A wrong option (exit status 2) and a signal to this
/// process end the job at once. The ranks of other machines notice the loss, fail, and are restarted by their own
/// supervisors; they meet again at the same address. Returns the status of the last attempt.
///
/// If the reader of the output stops, ranks are still supervised (see Console). At the end of the job the supervisor
/// waits for the reader; after a signal for at most `group.grace`.
///
/// In a process that was started to stand by, it begins with the ranks of a supervisor that was killed. In a job that
/// will outlive its ranks, all start again, at most 10 times, if one is killed before they have met.
[[gnu::cold]] inline int run_job(RankGroup group) {
  group.restart = group.attempt = 0;
  auto estate = detail::stand_by(group);
  detail::Console console;
  for (int early = 0;; ++group.attempt) {
    const auto next = std::chrono::steady_clock::now() + detail::shortest_attempt;
    const bool takes_over = estate.has_value();
    const auto outcome = detail::Supervisor(group, console, std::exchange(estate, std::nullopt)).run();
    if (takes_over) detail::release_signals(group);
    if (outcome.signal != 0) console.finish(group.grace);
    if (outcome.early && outcome.signal == 0 && ++early <= 10) {
      console.say("the ranks had not met: all start again");
    } else if (!detail::worth_a_restart(outcome) || group.restart >= group.max_restarts) {
      return console.status_after(outcome.status);
    } else {
      ++group.restart;
      console.say(detail::format("restart %d of %d", group.restart, group.max_restarts));
    }
    std::this_thread::sleep_until(next);
  }
}

}  // namespace chorus
