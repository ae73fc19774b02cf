/// chorus-run: starts the ranks of a program, supervises them, and restarts them after a failure. Its options and the
/// ranks' environment variables are torchrun's.

#include <chorus/launch/variables.hpp>
#include <climits>
#include <string>
#include <vector>

#include "chorus_run_words.hpp"
#include "command_line.hpp"

namespace ch = chorus;
using namespace chorus_run;

namespace {

constexpr const char* description =
    R"(Starts a program once for each rank, on this machine or as this machine's part of a larger job.

  chorus-run --nproc-per-node 4 ./train --epochs 10
  chorus-run --nproc-per-node 2 --max-restarts 5 ./train --save run.safetensors --resume auto
  chorus-run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 4 ./train     on machine 0
  chorus-run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --nproc-per-node 4 ./train     on machine 1
  chorus-run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1 --max-restarts 3 ./train    on 2 to 4 machines

When a rank fails, a message names it and the reason. All others are stopped: SIGTERM, then SIGKILL after --grace
seconds. The exit status is that of the rank that failed first, or 128 + a signal's number. SIGINT, SIGTERM, SIGHUP and
SIGQUIT are passed on. So are SIGUSR1 and SIGUSR2, which end nothing. If the reader of the output stops reading, the
ranks are still supervised and no output is lost: a rank that prints waits (with --redirects it does not).
A job of several machines needs the same secret in CHORUS_TOKEN on each machine. With --rdzv-backend c10d machines
number themselves; machine 0 has the endpoint's address. If a machine is lost and at least MIN are left, all ranks
restart without it. If a machine joins or returns and fewer than MAX are there, all restart with it. Neither counts
as a restart. Work after the newest checkpoint is lost. In an elastic job nobody restarts: the ranks that live
continue, also if this process is killed.)";

}  // namespace

int main(int argc, char** argv) {
  ch::RankGroup group;
  group.run_id = run_id();
  double grace = 3;
  bool standalone = false, no_python = false;
  std::string ranks = "1", backend = "static", endpoint;
  std::string nodes = "1", interval;
  std::vector<std::string> shown, redirects, tee, signals, conf;
  ch::MachineOptions machines;
  CLI::App app{description, "chorus-run"};
  app.prefix_command();
  app.footer(ch::detail::launch_variables);
  const auto add_list = [&](const char* names, std::vector<std::string>& words, const char* what,
                            const char* variable) {
    app.add_option(names, words, what)->delimiter(',')->allow_extra_args(false)->envname(variable);
  };
  app.add_option(
         "--nproc-per-node,--nproc_per_node", ranks,
         "ranks on this machine: a number; cpu or gpu: one for each; auto: one for each GPU, else for each core")
      ->envname("PET_NPROC_PER_NODE")
      ->capture_default_str();
  app.add_option("--nnodes", nodes, "number of machines; with --rdzv-backend c10d also MIN:MAX")
      ->envname("PET_NNODES")
      ->capture_default_str();
  auto* node_rank = app.add_option("--node-rank,--node_rank", group.node_rank, "number of this machine, from 0")
                        ->transform(in_range(0, ch::comm::max_ranks - 1))
                        ->envname("PET_NODE_RANK")
                        ->capture_default_str();
  auto* address =
      app.add_option("--master-addr,--master_addr", group.master_addr, "address of machine 0, where the ranks meet")
          ->envname("PET_MASTER_ADDR")
          ->capture_default_str();
  auto* port = app.add_option("--master-port,--master_port", group.master_port,
                              "port of machine 0 (default: a free one; 29500 for several machines)")
                   ->transform(in_range(1, 65535))
                   ->envname("PET_MASTER_PORT");
  app.add_option("--rdzv-endpoint,--rdzv_endpoint", endpoint,
                 "address and port of machine 0: HOST[:PORT]; port 0: a free one")
      ->excludes(address)
      ->excludes(port)
      ->envname("PET_RDZV_ENDPOINT");
  app.add_option("--rdzv-backend,--rdzv_backend", backend,
                 "static: --node-rank numbers the machines; c10d: they number themselves at the endpoint, port 29400")
      ->check(CLI::IsMember({"static", "c10d"}))
      ->envname("PET_RDZV_BACKEND")
      ->capture_default_str();
  add_list("--rdzv-conf,--rdzv_conf", conf,
           "c10d: join_timeout=600: seconds to wait for MIN machines, or for a place among MAX; last_call_timeout=30: "
           "for more "
           "machines than MIN, or for lost ones",
           "PET_RDZV_CONF");
  auto* local_address = app.add_option("--local-addr,--local_addr", machines.local_addr,
                                       "c10d: address of this machine; ranks meet there if it is machine 0")
                            ->envname("PET_LOCAL_ADDR");
  app.add_option("--monitor-interval,--monitor_interval", interval,
                 "c10d: seconds between checks for failed ranks of other machines (default: 0.1)")
      ->envname("PET_MONITOR_INTERVAL");
  app.add_option("--rdzv-id,--rdzv_id", group.run_id, "name of the job, which the ranks get")->envname("PET_RDZV_ID");
  app.add_option("--role", group.role, "name of the ranks' role, which they get")
      ->envname("PET_ROLE")
      ->capture_default_str();
  app.add_flag("--standalone", standalone, "a job of this machine alone, on a free port of loopback")
      ->envname("PET_STANDALONE");
  app.add_option("--max-restarts,--max_restarts", group.max_restarts,
                 "number of restarts of all ranks after failures; in an elastic job: of killed ranks a minute")
      ->transform(in_range(0, INT_MAX))
      ->envname("PET_MAX_RESTARTS")
      ->capture_default_str();
  app.add_option("--grace", grace, "seconds between SIGTERM and SIGKILL")
      ->transform(in_range(0.0, 3600.0))
      ->envname("CHORUS_GRACE")
      ->capture_default_str();
  app.add_option(
         "--log-dir,--log_dir", group.log_dir,
         "folder for the output of ranks: attempt_R/rank_N.log, appended. The output is also shown, with the rank in "
         "front")
      ->envname("PET_LOG_DIR");
  add_list("--local-ranks-filter,--local_ranks_filter", shown,
           "show only the output of these ranks of this machine: 0,2", "PET_LOCAL_RANKS_FILTER");
  add_list(
      "-r,--redirects", redirects,
      "write output to files (attempt_R/rank_N.stdout.log, .stderr.log) instead of showing it: 1 stdout, 2 stderr, 3 "
      "both; for all ranks, or for each: 0:1,1:3",
      "PET_REDIRECTS");
  add_list("-t,--tee", tee, "write output to these files and show it, with the rank in front", "PET_TEE");
  add_list("--signals-to-handle,--signals_to_handle", signals,
           "signals that end the job, passed on to the ranks (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
           "PET_SIGNALS_TO_HANDLE");
  app.add_flag("--prefix", group.prefix, "show the rank in front of each line");
  app.add_flag("--no-python,--no_python", no_python,
               "has no effect: torchrun needs it for programs that are not Python");
  if (const auto status = parse(app, argc, argv)) return *status;
  auto words = app.remaining();
  if (!words.empty() && words.front() == "--") words.erase(words.begin());
  try {
    const auto why = words.empty() ? "" : why_not(words.front());
    ch::check<ch::UsageError>(why.empty(), "option ", words.empty() ? "" : ch::printable(words.front()),
                              " of torchrun is not supported: ", why);
    ch::check<ch::UsageError>(!words.empty() && !words.front().starts_with("-"),
                              words.empty() ? "no program to start" : "unknown option ",
                              words.empty() ? "" : ch::printable(words.front()), "; see chorus-run --help");
    group.ranks = ranks_of(ranks);
    group.shown = ranks_in(shown, group.ranks);
    group.redirects = streams_in("--redirects", redirects, group.ranks);
    group.tee = streams_in("--tee", tee, group.ranks);
    if (!signals.empty()) group.signals = signals_in(signals);
    take_nodes(machines, nodes);
    group.replacements = group.max_restarts;
    group.nodes = machines.most;
    const bool found_out = backend == "c10d" && machines.most > 1 && node_rank->count() == 0;
    ch::check<ch::UsageError>(found_out || machines.least == machines.most, "--nnodes ", ch::printable(nodes),
                              ": a range of machines needs --rdzv-backend c10d, and no --node-rank");
    ch::check<ch::UsageError>(found_out || interval.empty(),
                              "--monitor-interval is for --rdzv-backend c10d: ranks of this machine are not polled, "
                              "because the system reports their end at once");
    ch::check<ch::UsageError>(found_out || (conf.empty() && local_address->count() == 0),
                              "--rdzv-conf and --local-addr are for --rdzv-backend c10d and several machines");
    ch::check<ch::UsageError>(group.node_rank < group.nodes, "--node-rank ", group.node_rank, " is not in [0, ",
                              group.nodes, ")");
    ch::check<ch::UsageError>(group.nodes * group.ranks <= ch::comm::max_ranks, group.nodes, " machines x ",
                              group.ranks, " ranks are more than ", ch::comm::max_ranks);
    ch::check<ch::UsageError>(!standalone || group.nodes == 1, "--standalone: expected one machine, got --nnodes ",
                              group.nodes);
    group.master_addr = ch::comm::detail::without_brackets(group.master_addr);
    machines.local_addr = ch::comm::detail::without_brackets(machines.local_addr);
    if (!endpoint.empty()) take_endpoint(group, endpoint, backend == "static" ? 29500 : 29400);
    if (standalone) group.master_addr = "127.0.0.1", group.master_port = 0;
    if (group.nodes > 1 && group.master_port == 0) group.master_port = backend == "static" ? 29500 : 29400;
    take_conf(machines, conf);
    if (!interval.empty()) machines.interval = seconds_of("--monitor-interval", interval);
    machines.host = group.master_addr;
    machines.port = group.master_port;
    group.grace = std::chrono::milliseconds(static_cast<std::int64_t>(grace * 1000));
    if (!(redirects.empty() && tee.empty()) && group.log_dir.empty()) group.log_dir = new_log_dir(group.run_id);
    group.program = words.front();
    std::vector<char*> arguments;
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    group.argv = arguments.data();
    return found_out ? ch::run_job(group, machines) : ch::run_job(group);
  } catch (const ch::UsageError& error) {
    ch::detail::say(error.what());
    return 2;
  } catch (const std::exception& error) {
    ch::detail::say(error.what());
    return 1;
  }
}
