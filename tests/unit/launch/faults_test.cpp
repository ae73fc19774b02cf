// Ranks that fail, are killed, or lose each other, and signals to the launcher.

#include "launched.hpp"

namespace launch_faults_test {

using namespace launched;

TEST_CASE("a rank that is killed is named, and nobody stays behind") {
  Program program({probe(), "--do", "stay", "--devices", "3"});
  const auto pids = program.ready(3);
  kill(pids.at(2), SIGKILL);
  CHECK(program.finish() == 128 + SIGKILL);
  INFO(program.text());
  CHECK(has(program, cat("chorus: rank 2 (pid ", pids.at(2), ") was killed by SIGKILL; stopping the other 2 ranks\n")));
  CHECK(count(program.text(), "chorus:") == 1);
  require_gone(pids);
}

TEST_CASE("a job that outlives a killed rank goes on, and another process takes its place") {
  const int victim = GENERATE(0, 2);
  Program program({probe(), "--do", "outlive", "--size", "3", "--devices", "3"});
  const auto before = program.ready(3);
  kill(before.at(victim), SIGKILL);
  CHECK(program.finish() == 0);
  INFO(program.text());
  CHECK(has(program, cat("chorus: rank ", victim, " (pid ", before.at(victim),
                         ") was killed by SIGKILL; the others continue, and another process takes its place\n")));
  CHECK(count(program.text(), "chorus:") == 1);
  CHECK(count(program.text(), "done") == 3);
  CHECK(has(program, "done 2 of 3\n"));
  require_gone(before);
  require_gone(program.ready(3));
}

TEST_CASE("a job that outlives killed ranks ends with the last of them") {
  Program program({probe(), "--do", "outlive", "--devices", "2"});
  const auto pids = program.ready(2);
  for (const auto& [rank, pid] : pids) kill(pid, SIGSTOP);
  for (const auto& [rank, pid] : pids) kill(pid, SIGKILL);
  const int status = program.finish();  // another process may have started, which found nobody
  INFO(program.text());
  CHECK((status == 128 + SIGKILL || status == 76));
  require_gone(pids);
}

TEST_CASE("a rank that fails is named with its reason and gives its status") {
  struct Case {
    std::string what;
    int status;
    std::string ended, reason;
  };
  const auto [what, status, ended, reason] =
      GENERATE(Case{"throw", 1, "failed, exit status 1", "chorus: rank 1: load: no such file: weights\n"},
               Case{"usage", 2, "failed, exit status 2", "chorus: rank 1: the batch is smaller than the ranks\n"},
               Case{"exit", 3, "failed, exit status 3", ""}, Case{"status", 5, "failed, exit status 5", ""},
               Case{"abort", 128 + SIGABRT, "was killed by SIGABRT", ""});
  Program program({probe(), "--do", what, "--devices", "3"});
  CHECK(program.finish() == status);
  INFO(program.text());
  CHECK(has(program, reason));
  CHECK(has(program, ") " + ended + "; stopping the other 2 ranks\n"));
  CHECK(count(program.text(), "chorus:") == (reason.empty() ? 1 : 2));
}

TEST_CASE("the first cause is named, not the ranks that noticed it") {
  Program program({probe(), "--do", "messenger", "--devices", "4", "--rank", "3"});
  CHECK(program.finish() == 128 + SIGKILL);
  INFO(program.text());
  CHECK(has(program, "chorus: rank 3 (pid "));
  CHECK(has(program, "was killed by SIGKILL\n"));
  CHECK(count(program.text(), "chorus:") == 1);
}

TEST_CASE("ranks that lost each other without another cause say so") {
  Program program({probe(), "--do", "messenger", "--devices", "2", "--rank", "7"});
  CHECK(program.finish() == 76);
  INFO(program.text());
  CHECK(count(program.text(), "all_reduce: rank 1 closed the connection\n") == 1);
  CHECK(has(program, "lost the other ranks, exit status 76\n"));
}

TEST_CASE("of ranks that miss others the first to give up is named, though it ends last") {
  const std::string rank = GENERATE("0", "1", "2");
  Program program({probe(), "--do", "slow-end", "--devices", "3", "--rank", rank});
  CHECK(program.finish() == 76);
  INFO(program.text());
  CHECK(has(program, cat("chorus: rank ", rank, ": store.get: 'ready' was not set within 100 ms\n")));
  CHECK(has(program, cat("chorus: rank ", rank, " (pid ")));
  CHECK(count(program.text(), "chorus:") == 2);
}

TEST_CASE("signals to the launcher are passed on") {
  const int signal = GENERATE(SIGINT, SIGTERM, SIGHUP, SIGQUIT);
  Program program({probe(), "--do", "stay", "--devices", "3"});
  const auto pids = program.ready(3);
  kill(program.pid(), signal);
  CHECK(program.finish() == 128 + signal);
  INFO(program.text());
  CHECK(has(program, cat("chorus: SIG", sigabbrev_np(signal), ": stopping 3 ranks\n")));
  CHECK(count(program.text(), "chorus:") == 1);
  require_gone(pids);
}

TEST_CASE("Ctrl-C reaches launcher and ranks at once, and only the launcher speaks") {
  Program program({probe(), "--do", "stay", "--devices", "3"});
  const auto pids = program.ready(3);
  kill(-program.pid(), SIGINT);
  CHECK(program.finish() == 128 + SIGINT);
  INFO(program.text());
  CHECK(has(program, "chorus: SIGINT: "));
  CHECK(count(program.text(), "chorus:") == 1);
  require_gone(pids);
}

TEST_CASE("a launcher that a script started in the background can be interrupted too") {
  Program program({probe(), "--do", "stay", "--devices", "2"}, {}, {SIGINT, SIGQUIT});  // as after `program &`
  const auto pids = program.ready(2);
  kill(program.pid(), SIGINT);
  CHECK(program.finish() == 128 + SIGINT);
  require_gone(pids);
}

TEST_CASE("under nohup a hang-up ends nobody") {
  Program program({probe(), "--do", "stay", "--devices", "2"}, {}, {SIGHUP});
  const auto pids = program.ready(2);
  kill(-program.pid(), SIGHUP);
  poll(nullptr, 0, 100);
  for (const auto& [rank, pid] : pids) CHECK(state(pid) == 'S');
  kill(program.pid(), SIGTERM);
  CHECK(program.finish() == 128 + SIGTERM);
  CHECK_FALSE(has(program, "SIGHUP"));
}

TEST_CASE("ranks that don't heed SIGTERM are killed once the time for it is used up, with a word") {
  Program program({probe(), "--do", "stubborn", "--devices", "2", "--grace", "0.8"});
  const auto pids = program.ready(2);
  const auto start = Clock::now();
  kill(program.pid(), SIGTERM);
  CHECK(program.finish() == 128 + SIGTERM);
  CHECK(Clock::now() - start > 700ms);
  INFO(program.text());
  CHECK(has(program, "chorus: 2 ranks have not ended within 0.8 s (--grace): killing them\n"));
  require_gone(pids);
}

TEST_CASE("SIGUSR1 reaches the ranks, and ends nothing") {
  Program program({probe(), "--do", "heed", "--devices", "2"});
  const auto pids = program.ready(2);
  kill(program.pid(), SIGUSR1);
  CHECK(program.finish() == 0);
  INFO(program.text());
  CHECK(has(program, "rank 0 has heard 10\n"));
  CHECK(has(program, "rank 1 has heard 10\n"));
}

TEST_CASE("what a rank has printed before another one fails is there") {
  Program program({probe(), "--do", "lines", "--devices", "2"});
  CHECK(program.finish() == 1);
  INFO(program.text());
  CHECK(has(program, "ready 0 "));
}

TEST_CASE("asked twice, the launcher doesn't wait") {
  Program program({probe(), "--do", "stubborn", "--devices", "2"});
  const auto pids = program.ready(2);
  const auto start = Clock::now();
  kill(program.pid(), SIGTERM);
  poll(nullptr, 0, 100);
  kill(program.pid(), SIGTERM);
  CHECK(program.finish() == 128 + SIGTERM);
  CHECK(Clock::now() - start < 2500ms);
  require_gone(pids);
}

TEST_CASE("stopped ranks end with the others") {
  Program program({probe(), "--do", "stay", "--devices", "3"});
  const auto pids = program.ready(3);
  kill(pids.at(1), SIGSTOP);
  while (state(pids.at(1)) != 'T') poll(nullptr, 0, 1);
  kill(program.pid(), SIGTERM);
  CHECK(program.finish(2s) == 128 + SIGTERM);
  require_gone(pids);
}

TEST_CASE("ranks don't outlive a launcher that is killed") {
  Program program({probe(), "--do", "stubborn", "--devices", "3"});
  const auto pids = program.ready(3);
  kill(program.pid(), SIGKILL);
  CHECK(program.finish() == 1000 + SIGKILL);
  for (const auto& [rank, pid] : pids) {
    INFO("rank " << rank);
    const auto dead = [p = pid] { return state(p) == '\0' || state(p) == 'Z'; };  // init may be slow to reap it
    for (const auto deadline = Clock::now() + 2s; !dead() && Clock::now() < deadline;) poll(nullptr, 0, 5);
    CHECK(dead());
  }
}

TEST_CASE("a program that a rank starts is no rank of that launcher") {
  Program program({probe(), "--do", "child", "--devices", "2", "--self", probe()});
  CHECK(program.finish() == 0);
  INFO(program.text());
  CHECK(has(program, "rank 0 of 1"));
}

TEST_CASE("launched ranks talk to each other") {
  const auto before = shared_memory();
  Program program({probe(), "--do", "reduce", "--devices", "3"});
  CHECK(program.finish(20s) == 0);
  INFO(program.text());
  CHECK(count(program.text(), "sum 6\n") == 3);
  require_no_new_shared_memory(before);
}

TEST_CASE("launched ranks share a store; one alone has one, too") {
  for (const char* ranks : {"3", "1"}) {
    Program program({probe(), "--do", "store", "--devices", ranks});
    CHECK(program.finish(20s) == 0);
    INFO(program.text());
    CHECK(count(program.text(), *ranks == '3' ? "the last one says 20\n" : "the last one says 0\n") == *ranks - '0');
  }
}

TEST_CASE("a rank killed in the middle of all-reduces is the one that is named") {
  const auto before = shared_memory();
  Program program({probe(), "--do", "ring", "--devices", "3"});
  const auto pids = program.ready(3);
  kill(pids.at(1), SIGKILL);
  CHECK(program.finish() == 128 + SIGKILL);
  INFO(program.text());
  CHECK(has(program, cat("chorus: rank 1 (pid ", pids.at(1), ") was killed by SIGKILL")));
  CHECK(count(program.text(), "chorus:") == 1);
  require_gone(pids);
  require_no_new_shared_memory(before);
}

TEST_CASE("the ranks that are left have time to write their flight records") {
  const auto path = cat("/tmp/chorus_launch_flight_", getpid());
  Program program({probe(), "--do", "ring", "--devices", "3"}, {"CHORUS_FLIGHT_RECORDER=" + path});
  const auto pids = program.ready(3);
  kill(pids.at(1), SIGKILL);
  CHECK(program.finish() == 128 + SIGKILL);
  INFO(program.text());
  CHECK(has(program, cat("chorus: rank 1 (pid ", pids.at(1), ") was killed by SIGKILL")));
  for (const int rank : {0, 2}) {
    const auto file = cat(path, ".rank", rank);
    std::ifstream record(file);
    const std::string text(std::istreambuf_iterator<char>(record), {});
    INFO("rank " << rank);
    CHECK(text.find(": all_reduce #") != std::string::npos);
    CHECK(text.find(", failed after ") != std::string::npos);
    unlink(file.c_str());
  }
  Program waits({probe(), "--do", "stay", "--devices", "3"}, {"CHORUS_FLIGHT_RECORDER=" + path});
  kill(waits.ready(3).at(1), SIGKILL);
  CHECK(waits.finish() == 128 + SIGKILL);
  CHECK(has(waits, "was killed by SIGKILL; stopping the other 2 ranks\n"));
}

TEST_CASE("a rank that dies before all have met ends the others at once, not at their deadline") {
  Program program({probe(), "--do", "early", "--devices", "3", "--timeout", "120"});
  CHECK(program.finish(30s) == 128 + SIGKILL);
  INFO(program.text());
  CHECK(has(program, "rank 1 (pid"));
  CHECK(has(program, "was killed by SIGKILL"));
  CHECK(!has(program, "did not"));
}

TEST_CASE("a rank that leaves early is pointed at") {
  Program program({probe(), "--do", "quit", "--devices", "2", "--timeout", "3"});
  CHECK(program.finish(10s) == 76);
  INFO(program.text());
  CHECK(has(program, "rank 0 (pid "));
  CHECK(has(program, "lost the other ranks, exit status 76; rank 1 had ended before, exit status 0\n"));
}

}  // namespace launch_faults_test
