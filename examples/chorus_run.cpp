/// chorus-run: starts the ranks of a program, stands by them, and starts them again when one fails. Its options and the
/// variables that ranks find in their environment are torchrun's.

#include <climits>
#include <cmath>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <chorus/parallel/job.hpp>

namespace ch = chorus;

namespace {

constexpr const char* description = R"(Starts a program once for each rank, on this machine or as this machine's part of a larger job.

  chorus-run --nproc-per-node 4 ./train --epochs 10
  chorus-run --nproc-per-node 2 --max-restarts 5 ./train --save run.safetensors --resume auto
  chorus-run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 4 ./train     on machine 0
  chorus-run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --nproc-per-node 4 ./train     on machine 1

When a rank fails, it is named with its reason, and all others are stopped: SIGTERM, then SIGKILL after --grace seconds.
The exit status is that of the rank that failed first, or 128 + a signal's number. SIGINT, SIGTERM, SIGHUP and SIGQUIT
are passed on. Jobs of several machines need the same secret in CHORUS_TOKEN on each of them.)";

std::string run_id() {
  const char* given = std::getenv("TORCHELASTIC_RUN_ID");
  return given ? given : "none";
}

}  // namespace

int main(int argc, char** argv) {
  ch::RankGroup group;
  group.run_id = run_id();
  double grace = 3;
  bool standalone = false;
  CLI::App app{description, "chorus-run"};
  app.prefix_command();
  app.add_option("--nproc-per-node,--nproc_per_node", group.ranks, "ranks on this machine")->check(CLI::Range(1, ch::comm::max_ranks))->capture_default_str();
  app.add_option("--nnodes", group.nodes, "machines")->check(CLI::Range(1, ch::comm::max_ranks))->capture_default_str();
  app.add_option("--node-rank,--node_rank", group.node_rank, "which of them this is, from 0")->check(CLI::Range(0, ch::comm::max_ranks - 1))->capture_default_str();
  app.add_option("--master-addr,--master_addr", group.master_addr, "address of machine 0, where the ranks meet")->capture_default_str();
  app.add_option("--master-port,--master_port", group.master_port, "port there (default: a free one; 29500 for several machines)")->check(CLI::Range(1, 65535));
  app.add_flag("--standalone", standalone, "a job of this machine alone, on a free port of loopback");
  app.add_option("--max-restarts,--max_restarts", group.max_restarts,
                 "how often all ranks are started again after a failure")
      ->check(CLI::Range(0, INT_MAX))
      ->capture_default_str();
  app.add_option("--grace", grace, "seconds between SIGTERM and SIGKILL")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  app.add_option("--log-dir,--log_dir", group.log_dir,
                 "folder for ranks' output: attempt_R/rank_N.log; it is shown, too, with the rank in front");
  app.add_flag("--prefix", group.prefix, "show the rank in front of each line");
  app.add_option("--rdzv-id,--rdzv_id", group.run_id, "a name for the job, for the ranks to know");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  auto words = app.remaining();
  if (!words.empty() && words.front() == "--") words.erase(words.begin());
  try {
    ch::check<ch::UsageError>(!words.empty() && !words.front().starts_with("-"),
                              words.empty() ? "no program to start" : "unknown option ",
                              words.empty() ? "" : words.front(), "; see chorus-run --help");
    ch::check<ch::UsageError>(group.node_rank < group.nodes, "--node-rank ", group.node_rank, " is not in [0, ",
                              group.nodes, ")");
    ch::check<ch::UsageError>(group.nodes * group.ranks <= ch::comm::max_ranks, group.nodes, " machines x ",
                              group.ranks, " ranks are more than ", ch::comm::max_ranks);
    ch::check<ch::UsageError>(!standalone || group.nodes == 1, "--standalone is for one machine, got --nnodes ",
                              group.nodes);
    ch::check<ch::UsageError>(!std::isnan(grace), "--grace: expected seconds from 0 to 3600, got nan");
    if (standalone) group.master_addr = "127.0.0.1", group.master_port = 0;
    if (group.nodes > 1 && group.master_port == 0) group.master_port = 29500;
    group.grace = std::chrono::milliseconds(static_cast<std::int64_t>(grace * 1000));
    group.program = words.front();
    std::vector<char*> arguments;
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    group.argv = arguments.data();
    return ch::run_job(group);
  } catch (const ch::UsageError& error) {
    ch::detail::say(error.what());
    return 2;
  } catch (const std::exception& error) {
    ch::detail::say(error.what());
    return 1;
  }
}
