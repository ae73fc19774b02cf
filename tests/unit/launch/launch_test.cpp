// How launch starts ranks, and what it refuses.

#include "launched.hpp"

namespace launch_test {

using namespace launched;

TEST_CASE("launch starts as many ranks as devices were asked for") {
  Program program({probe(), "--do", "hello", "--devices=3", "--seed", "5", "--timeout", "2.5"});
  CHECK(program.finish() == 0);
  INFO(program.text());
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(has(program, cat("rank ", rank, " of 3, local ", rank, " of 3, 127.0.0.1:")));
  }
  CHECK(count(program.text(), "listens 1") == 1);  // only rank 0
  CHECK(count(program.text(), "devices 3, seed 5 5, timeout 2500") == 3);
  CHECK(count(program.text(), "input 0\n") == 1);  // only rank 0 reads stdin
  CHECK(count(program.text(), "input -1\n") == 2);
  CHECK(count(program.text(), "\n") == 3);
}

TEST_CASE("64 ranks start on one machine") {
  for (const std::string backend : {"shm", "tcp"}) {
    Program program({probe(), "--do", "reduce", "--devices", "64", "--backend", backend});
    CHECK(program.finish(30s) == 0);
    INFO(program.text());
    CHECK(count(program.text(), "sum 2080\n") == 64);
  }
}

TEST_CASE("the all-reduce that was asked for runs on every rank, and what can't run is refused by name") {
  const auto served = [](const std::vector<std::string>& words, const Program::Variables& variables = {}) {
    std::vector<std::string> all{probe(), "--do", "record", "--devices", "3"};
    all.insert(all.end(), words.begin(), words.end());
    Program program(all, variables);
    CHECK(program.finish(30s) == 0);
    return program.text();
  };
  CHECK(count(served({}), ", by ring, at ") == 3);
  CHECK(count(served({"--all-reduce", "direct"}), ", by direct, at ") == 3);
  CHECK(count(served({"--all-reduce=auto"}, {"CHORUS_ALL_REDUCE=direct"}), ", by ring, at ") == 3);
  CHECK(count(served({}, {"CHORUS_ALL_REDUCE=direct"}), ", by direct, at ") == 3);
  Program tcp({probe(), "--do", "record", "--devices", "2", "--backend", "tcp", "--all-reduce", "in_place"});
  CHECK(tcp.finish(30s) == 2);
  INFO(tcp.text());
  CHECK(has(tcp, "all-reduce in_place needs at most 8 ranks that share memory"));
  CHECK(has(tcp, "can do: auto, ring, direct"));
}

TEST_CASE("each rank keeps to its share of the cores, unless someone has chosen others") {
  cpu_set_t all;
  REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &all)) cores.push_back(core);
  const auto has_cores = [&](const Program& program, int rank, std::size_t first, std::size_t last) {
    std::string line = cat("rank ", rank, " has");
    for (std::size_t i = first; i < last; ++i) line += cat(" ", cores[i]);
    INFO(program.text());
    CHECK(has(program, line + "\n"));
  };
  const std::size_t n = cores.size();
  const bool free = n >= 2 && static_cast<long>(n) == sysconf(_SC_NPROCESSORS_ONLN);
  Program program({probe(), "--do", "cores", "--devices", "2"});
  CHECK(program.finish() == 0);
  has_cores(program, 0, 0, free ? n / 2 : n);
  has_cores(program, 1, free ? n / 2 : 0, n);
  if (free && n <= 32) {  // neighbours share a core
    Program crowd({probe(), "--do", "cores", "--devices", cat(2 * n)});
    CHECK(crowd.finish() == 0);
    has_cores(crowd, 1, 0, 1);
    has_cores(crowd, static_cast<int>(2 * n - 1), n - 1, n);
  }
  for (const bool told : {true, false}) {  // told not to bind, or the ranks don't divide evenly among the cores
    const auto ranks = told ? std::size_t{2} : std::min<std::size_t>(n + 1, 64);
    if (!told && n >= 64) continue;
    Program other({probe(), "--do", "cores", "--devices", cat(ranks)}, {told ? "CHORUS_BIND=0" : "CHORUS_BIND=1"});
    CHECK(other.finish() == 0);
    has_cores(other, 1, 0, n);
  }
}

TEST_CASE("launch refuses a switch in the environment that is neither 0 nor 1") {
  for (const std::string value : {"2", "no", "yes", "01", " 0"}) {
    Program program({probe(), "--do", "hello", "--devices", "2"}, {cat("CHORUS_BIND=", value)});
    CHECK(program.finish() == 2);
    INFO(program.text());
    CHECK(has(program, cat("environment variable CHORUS_BIND must be 0 or 1, got '", value, "'\n")));
    CHECK_FALSE(has(program, "rank 0 of 2"));
  }
}

TEST_CASE("launch takes options that the program has read itself, and the timeout from the environment") {
  Program program({probe(), "--parsed", "--do", "hello", "--devices", "2"}, {"CHORUS_TIMEOUT=9"});
  CHECK(program.finish() == 0);
  INFO(program.text());
  CHECK(count(program.text(), "devices 3, seed 7 7, timeout 9000") == 3);
}

TEST_CASE("launch calls a policy without processes in this one") {
  Program program({probe(), "--single", "--do", "hello", "--devices", "4"});
  CHECK(program.finish() == 0);
  INFO(program.text());
  CHECK(has(program, "rank 0 of 1, local 0 of 1"));
  CHECK(has(program, "devices 4"));
}

TEST_CASE("what the body throws becomes a message and a status") {
  require_refused({"--single", "--do", "throw", "--rank", "0"}, 1, "load: no such file: weights\n");
  require_refused({"--single", "--do", "usage", "--rank", "0"}, 2, "the batch is smaller than the ranks\n");
  require_refused({"--single"}, 2, "option --do is missing: give it as --do VALUE\n");
  require_refused({"--single", "--do"}, 2, "option --do needs a value\n");
  require_refused({"--single", "--do", "fly"}, 2, "option --do: fly is unknown\n");
  require_refused({"--single", "--do", "x", "--rank", "one"}, 2, "option --rank must be a whole number, got 'one'\n");
  require_refused({"--single", "--single=yes"}, 2, "option --single: expected no value, got 'yes'\n");
  require_refused({"--single", "--do", "hello", "--epocs", "3"}, 0, "warning: the program does not use --epocs\n");
}

TEST_CASE("a misspelt option ends a run before it trains") {
  for (const std::string policy : {"--single", "--"}) {  // in this process, and in those that it starts
    Program program({probe(), "--do", "check", "--devcies", "3", policy});
    CHECK(program.finish() == 2);
    INFO(program.text());
    CHECK(has(program, "unknown option --devcies: did you mean --devices?"));
    CHECK_FALSE(has(program, "training"));
  }
  Program right({probe(), "--do", "check", "--devices", "3"});
  CHECK(right.finish() == 0);
  CHECK(count(right.text(), "training") == 3);
}

TEST_CASE("main may call launch again: each call runs its own body once, in as many processes as it has") {
  Program program({probe(), "--main", "tells", "--devices", "3"});
  CHECK(program.finish(20s) == 0);
  INFO(program.text());
  CHECK(count(program.text(), "setting 0: rank 0 of 1, sum 1\n") == 1);
  for (const int number : {1, 2})
    for (const int rank : {0, 1, 2})
      CHECK(count(program.text(), cat("setting ", number, ": rank ", rank, " of 3, sum 3\n")) == 1);
  CHECK(count(program.text(), "setting ") == 7 + 7 * 3);  // and each main prints the result of each call
  CHECK(!has(program, "chorus:"));
}

TEST_CASE("a call of launch that fails gives its status, here and in the ranks of the calls behind it") {
  for (const std::string number : {"0", "1"}) {
    Program program({probe(), "--main", "tells", "--fail", number});
    CHECK(program.finish(20s) == 0);
    INFO(program.text());
    CHECK(has(program, cat("setting ", number, " has no file\n")));
    // The process itself and the ranks that get the error; ranks of the failing call that finished early may print too.
    CHECK(count(program.text(), cat("setting ", number, " gave 1\n")) >= (number == "0" ? 5 : 3));
    CHECK(!has(program, cat("setting ", number, " gave 0\n")));
    CHECK(count(program.text(), "setting 2: rank ") == 2);
  }
}

TEST_CASE("a rank that has failed has failed, even where its main returns 0") {
  Program program({probe(), "--main", "ignores", "--fail", "2"});
  CHECK(program.finish(20s) == 0);
  INFO(program.text());
  CHECK(has(program, "setting 2 has no file\n"));
  CHECK(has(program, "failed, exit status 1"));
  CHECK(has(program, "setting 2 gave 1\n"));
}

TEST_CASE("a rank whose main takes another way than the process that started it is refused") {
  const auto refused = [](const std::string& way, const std::string& message) {
    Program program({probe(), "--main", way, "--devices", "2"});
    CHECK(program.finish(20s) == 2);
    INFO(program.text());
    CHECK(has(program, message));
    CHECK(has(program, "setting 1 gave 2\n"));
    CHECK(!has(program, "setting 1: rank"));
  };
  refused("changes",
          "launch: this process was started as a rank of policy 'processes', but its main launches 'one process'");
  refused("grows", "launch: this process was started as one of 2 devices, but its main launches 3");
  refused("quits", ": its main ended without the call of launch that started it\n");
}

TEST_CASE("launch in the body of another launch is refused") {
  Program program({probe(), "--main", "nests", "--devices", "1"});
  CHECK(program.finish(20s) == 2);
  INFO(program.text());
  CHECK(has(program, "launch: called in the body of another launch; call them one after the other, in main\n"));
  const std::string mine = "environment variable CHORUS_LAUNCH, which only chorus' launcher sets,";
  require_refused({"--do", "hello"}, 2, mine + " must be a whole number, got 'x'\n", {"CHORUS_LAUNCH=1 x"});
  require_refused({"--do", "hello"}, 2, mine + " must be an order of the launcher, got '2 1 0 dp'\n",
                  {"CHORUS_LAUNCH=2 1 0 dp"});
}

TEST_CASE("--device starts a rank for each device that it names, on it") {
  const auto said = [](const std::vector<std::string>& words) {
    std::vector<std::string> all{probe(), "--do", "device"};
    all.insert(all.end(), words.begin(), words.end());
    Program program(all);
    CHECK(program.finish(20s) == 0);
    CHECK(!has(program, "chorus:"));
    return program.text();
  };
  const auto text = said({"--device", "cpu:4,0,7"});
  INFO(text);
  CHECK(count(text, "\n") == 3);
  CHECK(count(text, "rank 0 of 3 computes on 4\n") == 1);
  CHECK(count(text, "rank 1 of 3 computes on 0\n") == 1);
  CHECK(count(text, "rank 2 of 3 computes on 7\n") == 1);
  CHECK(count(said({"--device", "3,2", "--devices", "2"}), "rank 1 of 2 computes on 2\n") == 1);
  CHECK(count(said({"--device", "cpu", "--devices", "3"}), " of 3 computes on 0\n") == 3);
  CHECK(said({"--device", "2,5", "--single"}) == "rank 0 of 2 computes on 2\n");
  CHECK(said({"--device", "6", "--one-device"}) == "rank 0 of 1 computes on 6\n");
}

TEST_CASE("devices that the program can't use are refused before anything starts") {
  require_refused({"--do", "device", "--device", "0,0"}, 2, "--device: expected each device once, got 0 twice in");
  require_refused({"--do", "device", "--device"}, 2, "option --device needs a value\n");
  require_refused({"--do", "device", "--device="}, 2, "--device: expected numbers of devices, as 0,1 or cpu:0,1");
  require_refused({"--do", "device", "--device", "0,1", "--devices", "3"}, 2,
                  "--devices 3, but --device 0,1 names 2: expected the same number, or one of the two\n");
  require_refused(
      {"--do", "device", "--device", "cuda:0"}, 2,
      "--device cuda:0: expected cpu, the device of this program, got cuda; to use GPUs, give the model the device "
      "type chorus::Cuda, and compile it by nvcc with CHORUS_USE_CUDA=1 (CMake: chorus::cuda)\n");
  require_refused({"--do", "device", "--device", "cuda"}, 2,
                  "--device cuda: expected cpu, the device of this program, got cuda;");
  require_refused({"--do", "device", "--device", "0,1", "--one-device"}, 2,
                  "--device 0,1: expected one device for policy 'one process', got 2: dp and ddp take several\n");
}

TEST_CASE("a trace that nothing in the program writes is refused, with the header that does") {
  const std::string said =
      "launch: a trace is requested (--trace, CHORUS_TRACE or LaunchOptions::trace), but this program has no code to "
      "write it to 'run.json': include <chorus/trace.hpp>\n";
  for (const std::string policy : {"--single", "--parsed", "--one-device"})
    require_refused({"--untraced", policy, "--do", "hello"}, 2, said, {"CHORUS_TRACE=run.json"});
  require_refused({"--untraced", "--do", "hello", "--trace", "run.json"}, 2, said);
}

TEST_CASE("launch refuses options that make no sense") {
  require_refused({"--do", "hello", "--devices", "0"}, 2, "--devices: expected 1 to 64, got 0\n");
  require_refused({"--do", "hello", "--devices", "-2"}, 2, "--devices: expected 1 to 64, got -2\n");
  require_refused({"--do", "hello", "--devices", "65"}, 2, "--devices: expected 1 to 64, got 65\n");
  require_refused({"--do", "hello", "--devices=two"}, 2, "--devices must be a whole number, got 'two'\n");
  require_refused({"--do", "hello", "--devices=-99999999999"}, 2,
                  "--devices must be in the range of its type, got '-99999999999'\n");
  require_refused({"--do", "hello", "--seed=18446744073709551616"}, 2, "--seed must be in the range of its type, got");
  require_refused({"--do", "hello", "--timeout=1e400"}, 2, "--timeout must be in the range of its type, got '1e400'\n");
  require_refused({"--do", "hello", "--devices"}, 2, "option --devices needs a value\n");
  require_refused({"--do", "hello", "--seed=-1"}, 2, "--seed must be a whole number of at least 0, got '-1'\n");
  require_refused({"--do", "hello", "--timeout", "0"}, 2, "--timeout must be a number of seconds from 0.001");
  require_refused({"--do", "hello", "--timeout", "nan"}, 2, "--timeout must be a number of seconds from 0.001");
  require_refused({"--do", "hello"}, 2, "environment variable CHORUS_TIMEOUT must be a number, got 'soon'\n",
                  {"CHORUS_TIMEOUT=soon"});
}

}  // namespace launch_test
