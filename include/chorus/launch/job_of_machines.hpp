#pragma once
/// `run_job` for several launchers that find each other.

#include <chorus/launch/job.hpp>
#include <chorus/launch/machines.hpp>
#include <chorus/launch/stand_by.hpp>
#include <chrono>
#include <thread>

namespace chorus {

namespace detail {

/// Runs the ranks of this machine until they end, or until all machines start a new round.
inline GroupOutcome supervise_with_machines(const RankGroup& group, Console& console, Machines& machines) {
  try {
    Supervisor supervisor(group, console);
    const auto watcher = machines.watch([&](const char* why) { supervisor.interrupt(why); });
    return supervisor.run([&](const RankLife& life) { machines.open_doors(life); });
  } catch (const Error& error) {  // ranks can't be started
    machines.leave(group, error.what());
    throw;
  }
}

}  // namespace detail

/// `run_job` for machines that find each other. If ranks fail anywhere, all machines stop theirs and start a new round.
/// A failure counts as one restart of the whole job. A machine that does not join within `machines.last_call` is lost:
/// the others continue without it if they are at least `machines.least`. If a machine joins while ranks run, new or
/// again, all ranks restart with it, up to `machines.most`; beyond that it waits for a place for at most
/// `machines.join_timeout`. Neither counts as a restart. The job ends with the machine that listens at `machines.host`,
/// because it holds the machines' store.
///
/// In a job that outlives its ranks these continue, and let a new machine's ranks in. If this machine's supervisor is
/// killed in it, another process takes its place, but not its part in the store: no round begins here any more.
inline int run_job(RankGroup group, const MachineOptions& options) {
  auto estate = detail::stand_by(group);
  detail::Console console;
  if (estate) {
    const auto outcome = detail::Supervisor(group, console, std::move(estate)).run();
    if (outcome.signal != 0) console.finish(group.grace);
    return console.status_after(outcome.status);
  }
  detail::Machines machines(options, group, console);
  for (int status = 0;;) {
    const auto next = std::chrono::steady_clock::now() + detail::shortest_attempt;
    const int restarts = group.restart, nodes = group.nodes;
    const bool first = !machines.took_part();
    if (!first) console.say("waiting for the other machines");
    try {
      if (!machines.form(group)) {
        console.say("the job has succeeded without this machine");
        return console.status_after(0);
      }
      if (!group.doors.empty())
        console.say(detail::format("starting %d %s that join it", group.ranks, group.ranks == 1 ? "rank" : "ranks"));
      else if (group.restart > restarts)
        console.say(detail::format("restart %d of %d", group.restart, group.max_restarts));
      else if (!first && group.nodes <= nodes)
        console.say(detail::format("continuing with %d of %d machines", group.nodes, nodes));
      else if (!first)
        console.say(detail::format("continuing with %d machines instead of %d", group.nodes, nodes));
    } catch (const Error& error) {
      if (first) throw;
      console.say(error.what());
      return console.status_after(status);
    }
    auto outcome = detail::supervise_with_machines(group, console, machines);
    if (outcome.signal != 0) {
      console.finish(group.grace);
      if (group.node_rank == 0) machines.end(cat("machine 0 was sent ", detail::signal_name(outcome.signal)));
    }
    if (outcome.status == 0 && !machines.end_well()) outcome.status = lost_peer_status;
    status = outcome.status;
    if (!group.doors.empty() && !outcome.met && outcome.signal == 0 && status == lost_peer_status) {
      machines.was_not_let_in();
      std::this_thread::sleep_until(next);
      continue;
    }
    if (!detail::worth_a_restart(outcome)) {
      if (outcome.signal != 0)
        machines.leave();
      else if (status != 0)
        machines.leave(group, "the ranks of one machine refuse their options");
      return console.status_after(status);
    }
    machines.give_up_round();
    try {
      if (status != lost_peer_status && machines.count_restart(group.restart) > group.max_restarts) {
        machines.end(detail::format("rank %d has failed, and all restarts are used up", outcome.failed_rank));
        return console.status_after(status);
      }
    } catch (const CommError&) {  // machine 0 has ended
      return console.status_after(status);
    }
    std::this_thread::sleep_until(next);
  }
}

}  // namespace chorus
