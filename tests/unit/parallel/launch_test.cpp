// The launcher with real processes: the program launch_probe, found in the folder `programs` beside this test or in
// $CHORUS_TEST_PROGRAMS.

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch.hpp>
#include <cerrno>
#include <chorus/core/error.hpp>
#include <chorus/parallel/run.hpp>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace launch_test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using chorus::cat;

std::string probe() {
  if (const char* folder = std::getenv("CHORUS_TEST_PROGRAMS")) return cat(folder, "/launch_probe");
  char path[PATH_MAX] = {};
  REQUIRE(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
  const std::string self = path;
  return self.substr(0, self.rfind('/')) + "/programs/launch_probe";
}

/// A program that runs beside the test; what it writes, errors too, is collected. The destructor kills it.
class Program {
 public:
  using Variables = std::vector<std::string>;

  explicit Program(std::vector<std::string> words, const Variables& variables = {},
                   const std::vector<int>& ignored = {}) {
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    output_ = ends[0];
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/zero", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, ends[1], 1);
    posix_spawn_file_actions_adddup2(&files, ends[1], 2);
    // As a shell does it: a process group of its own.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    std::vector<char*> argv, environment;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    for (const auto& variable : variables) environment.push_back(const_cast<char*>(variable.c_str()));
    for (char** old = environ; *old != nullptr; ++old) environment.push_back(*old);
    environment.push_back(nullptr);
    for (const int number : ignored) signal(number, SIG_IGN);
    const int error = posix_spawnp(&pid_, argv[0], &files, &attributes, argv.data(), environment.data());
    for (const int number : ignored) signal(number, SIG_DFL);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    close(ends[1]);
    INFO(words[0]);
    REQUIRE(error == 0);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (status_ < 0) kill(-pid_, SIGKILL), waitpid(pid_, nullptr, 0);
    close(output_);
  }

  pid_t pid() const { return pid_; }

  /// The pids of `count` ranks, once each has said `ready RANK PID`.
  std::map<int, pid_t> ready(int count) {
    const auto deadline = Clock::now() + 20s;
    while (true) {
      std::map<int, pid_t> pids;
      const auto whole_lines = text_.substr(0, text_.rfind('\n') + 1);
      for (std::size_t at = 0; (at = whole_lines.find("ready ", at)) != std::string::npos; ++at) {
        int rank = 0, pid = 0;
        std::sscanf(whole_lines.c_str() + at, "ready %d %d", &rank, &pid);
        pids[rank] = pid;
      }
      if (static_cast<int>(pids.size()) == count) return pids;
      INFO(text_);
      REQUIRE(read_some(deadline));
    }
  }

  /// Waits for the end; the exit status, or 1000 + the signal that killed it. Fails after `limit`.
  int finish(Clock::duration limit = 5s) {
    const auto start = Clock::now();
    while (read_some(start + limit)) {
    }
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) != pid_) {
      INFO("still running: " << text_);
      REQUIRE(Clock::now() < start + limit);
      poll(nullptr, 0, 5);
    }
    return status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

  const std::string& text() const { return text_; }

 private:
  /// False at the end of the output, or at the deadline.
  bool read_some(Clock::time_point deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd entry{output_, POLLIN, 0};
    if (left <= 0 || poll(&entry, 1, static_cast<int>(left)) <= 0) return false;
    char part[4096];
    const auto n = read(output_, part, sizeof part);
    if (n > 0) text_.append(part, static_cast<std::size_t>(n));
    return n > 0;
  }

  pid_t pid_ = -1;
  int output_ = -1, status_ = -1;
  std::string text_;
};

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

/// The letter that ps shows: S sleeps, T is stopped, Z is dead and waits for its parent; 0 where there is no process.
char state(pid_t pid) {
  std::ifstream file(cat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(") ");
  return name_end == std::string::npos ? '\0' : line[name_end + 2];
}

void require_gone(const std::map<int, pid_t>& pids) {
  for (const auto& [rank, pid] : pids) {
    INFO("rank " << rank << ", pid " << pid);
    CHECK((kill(pid, 0) == -1 && errno == ESRCH));  // not even a zombie
  }
}

std::set<std::string> shared_memory() {
  std::set<std::string> names;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) names.insert(entry->d_name);
  closedir(folder);
  return names;
}

/// Tests that run beside this one come and go; what stays is ours.
void require_no_new_shared_memory(const std::set<std::string>& before) {
  std::string left;
  for (const auto deadline = Clock::now() + 3s; Clock::now() < deadline; poll(nullptr, 0, 20)) {
    left.clear();
    for (const auto& name : shared_memory()) {
      if (!before.contains(name)) left += name + ' ';
    }
    if (left.empty()) return;
  }
  FAIL("left in /dev/shm: " << left);
}

/// A socket that listens on a free port of loopback.
struct TakenPort {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port = 0;
  TakenPort() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(listen(fd, 1) == 0);
    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
    port = ntohs(address.sin_port);
  }
  ~TakenPort() { close(fd); }
};

int free_port() { return TakenPort{}.port; }

Program::Variables torchrun_like(int rank, int size, int port) {
  return {cat("RANK=", rank), cat("LOCAL_RANK=", rank), cat("WORLD_SIZE=", size), "MASTER_ADDR=127.0.0.1",
          cat("MASTER_PORT=", port)};
}

bool has(const Program& program, const std::string& part) { return program.text().find(part) != std::string::npos; }

/// Runs the probe with `words` and checks status and message.
void require_refused(std::vector<std::string> words, int status, const std::string& message,
                     const Program::Variables& variables = {}) {
  words.insert(words.begin(), probe());
  Program program(words, variables);
  CHECK(program.finish() == status);
  INFO("got: " << program.text());
  CHECK(has(program, "chorus: " + message));
}

TEST_CASE("launch starts as many ranks as devices were asked for") {
  Program program({probe(), "--do", "hello", "--devices=3", "--seed", "5", "--timeout", "2.5"});
  CHECK(program.finish() == 0);
  INFO(program.text());
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(has(program, cat("rank ", rank, " of 3, local ", rank, " of 3, 127.0.0.1:")));
  }
  CHECK(count(program.text(), "listens 1") == 1);  // rank 0 alone
  CHECK(count(program.text(), "devices 3, seed 5 5, timeout 2500") == 3);
  CHECK(count(program.text(), "input 0\n") == 1);  // rank 0 alone reads what the program is given
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
  for (const bool told : {true, false}) {  // or there are more ranks than cores, not as many on each
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
  require_refused({"--single", "--single=yes"}, 2, "option --single takes no value, got 'yes'\n");
  require_refused({"--single", "--do", "hello", "--epocs", "3"}, 0, "warning: the program has no use for --epocs\n");
}

TEST_CASE("a misspelt option ends a run before it trains") {
  for (const std::string policy : {"--single", "--"}) {  // in this process, and in those that are started
    Program program({probe(), "--do", "check", "--devcies", "3", policy});
    CHECK(program.finish() == 2);
    INFO(program.text());
    CHECK(has(program, "unknown option --devcies: is --devices meant?"));
    CHECK_FALSE(has(program, "training"));
  }
  Program right({probe(), "--do", "check", "--devices", "3"});
  CHECK(right.finish() == 0);
  CHECK(count(right.text(), "training") == 3);
}

TEST_CASE("launch refuses options that make no sense") {
  require_refused({"--do", "hello", "--devices", "0"}, 2, "--devices must be from 1 to 64, got 0\n");
  require_refused({"--do", "hello", "--devices", "-2"}, 2, "--devices must be from 1 to 64, got -2\n");
  require_refused({"--do", "hello", "--devices", "65"}, 2, "--devices must be from 1 to 64, got 65\n");
  require_refused({"--do", "hello", "--devices=two"}, 2, "--devices must be a whole number, got 'two'\n");
  require_refused({"--do", "hello", "--devices=-99999999999"}, 2, "--devices is out of range, got '-99999999999'\n");
  require_refused({"--do", "hello", "--seed=18446744073709551616"}, 2, "--seed is out of range, got");
  require_refused({"--do", "hello", "--timeout=1e400"}, 2, "--timeout is out of range, got '1e400'\n");
  require_refused({"--do", "hello", "--devices"}, 2, "option --devices needs a value\n");
  require_refused({"--do", "hello", "--seed=-1"}, 2, "--seed must be a whole number of at least 0, got '-1'\n");
  require_refused({"--do", "hello", "--timeout", "0"}, 2, "--timeout must be a number of seconds from 0.001");
  require_refused({"--do", "hello", "--timeout", "nan"}, 2, "--timeout must be a number of seconds from 0.001");
  require_refused({"--do", "hello"}, 2, "environment variable CHORUS_TIMEOUT must be a number, got 'soon'\n",
                  {"CHORUS_TIMEOUT=soon"});
}

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
  CHECK(has(program, "lost touch with the others, exit status 76\n"));
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
  CHECK(has(program, "chorus: SIGINT: stopping"));
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

TEST_CASE("ranks that don't heed SIGTERM are killed") {
  Program program({probe(), "--do", "stubborn", "--devices", "2"});
  const auto pids = program.ready(2);
  const auto start = Clock::now();
  kill(program.pid(), SIGTERM);
  CHECK(program.finish() == 128 + SIGTERM);
  CHECK(Clock::now() - start > 2900ms);
  require_gone(pids);
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
    const auto dead = [p = pid] { return state(p) == '\0' || state(p) == 'Z'; };  // its new parent may be slow
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
  CHECK(has(program, "lost touch with the others, exit status 76; rank 1 had ended before, exit status 0\n"));
}

TEST_CASE("launch joins ranks that a torchrun-like launcher has started") {
  const int port = free_port();
  Program one({probe(), "--do", "reduce", "--devices", "5"}, torchrun_like(1, 2, port));
  Program zero({probe(), "--do", "reduce", "--devices", "5"}, torchrun_like(0, 2, port));
  CHECK(zero.finish(20s) == 0);
  CHECK(one.finish(20s) == 0);
  CHECK(zero.text() == "chorus: --devices 5 is ignored: the launcher has started 2 processes\nsum 3\n");
  CHECK(one.text() == "sum 3\n");
}

TEST_CASE("an error in a rank of another launcher names the rank") {
  Program program({probe(), "--do", "throw", "--rank", "1"}, torchrun_like(1, 2, 1));
  CHECK(program.finish() == 1);
  CHECK(program.text() == "chorus: rank 1: load: no such file: weights\n");
}

TEST_CASE("where torchrun itself listens at MASTER_PORT, ranks meet one above") {
  auto variables = torchrun_like(0, 1, 30000);
  variables.push_back("TORCHELASTIC_USE_AGENT_STORE=True");
  Program program({probe(), "--do", "hello"}, variables);
  CHECK(program.finish() == 0);
  CHECK(has(program, "127.0.0.1:30001"));
}

TEST_CASE("the environment of mpirun and srun") {
  using Variables = Program::Variables;
  const auto hello = [](const Variables& variables) {
    Program program({probe(), "--do", "hello"}, variables);
    CHECK(program.finish() == 0);
    return program.text();
  };
  const auto port_of = [](const std::string& text) { return text.substr(text.find("127.0.0.1:"), 16); };

  const auto open_mpi = hello({"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_RANK=1",
                               "OMPI_COMM_WORLD_LOCAL_SIZE=4", "PMIX_NAMESPACE=77"});
  CHECK(open_mpi.find("rank 1 of 4, local 1 of 4, 127.0.0.1:") != std::string::npos);
  const Variables mpich = {"PMI_RANK=2", "PMI_SIZE=3", "MPI_LOCALRANKID=2", "MPI_LOCALNRANKS=3"};
  const auto first = hello(mpich), second = hello(mpich);
  CHECK(first.find("rank 2 of 3, local 2 of 3") != std::string::npos);
  CHECK(port_of(first) == port_of(second));  // same parent, same port
  CHECK(port_of(first) != port_of(open_mpi));

  Variables slurm = {"SLURM_PROCID=1", "SLURM_NTASKS=2", "SLURM_LOCALID=1", "SLURM_JOB_ID=9", "SLURM_STEP_ID=0"};
  CHECK(hello(slurm).find("rank 1 of 2, local 1 of 2") != std::string::npos);
  slurm.pop_back();  // a batch script, not a task that srun started
  const int all = chorus::default_devices();
  CHECK(count(hello(slurm), cat(" of ", all, ", local")) == all);
  CHECK(hello({"SLURM_PROCID=0", "SLURM_NTASKS=1", "SLURM_STEP_NUM_TASKS=1", "SLURM_STEP_ID=0"})
            .find(cat("rank ", all - 1, " of ", all)) != std::string::npos);
  const auto other_hosts = hello({"SLURM_PROCID=3", "SLURM_NTASKS=4", "SLURM_LOCALID=1", "SLURM_NNODES=2",
                                  "MASTER_ADDR=10.0.0.1", "MASTER_PORT=2000"});
  CHECK(other_hosts.find("rank 3 of 4, local 1 of 1, 10.0.0.1:2000") != std::string::npos);
}

TEST_CASE("an environment that makes no sense is refused") {
  const std::vector<std::string> hello = {"--do", "hello"};
  require_refused(hello, 2, "environment variable RANK is set but WORLD_SIZE is not", {"RANK=0"});
  require_refused(hello, 2, "environment variable WORLD_SIZE is set but RANK is not", {"WORLD_SIZE=2"});
  require_refused(hello, 2, "environment variable RANK must be a whole number from 0", {"RANK=x", "WORLD_SIZE=2"});
  require_refused(hello, 2, "environment variable WORLD_SIZE must be a whole number", {"RANK=0", "WORLD_SIZE=0"});
  require_refused(hello, 2, "environment variable RANK is 2, but WORLD_SIZE is 2", {"RANK=2", "WORLD_SIZE=2"});
  require_refused(hello, 2, "environment variables RANK and WORLD_SIZE are set but MASTER_ADDR is not",
                  {"RANK=0", "WORLD_SIZE=2"});
  require_refused(hello, 2, "environment variables RANK and WORLD_SIZE are set but MASTER_PORT is not",
                  {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=localhost"});
  require_refused(hello, 2, "environment variable MASTER_PORT must be a whole number from 1 to 65535, got '70000'",
                  torchrun_like(0, 2, 70000));
  require_refused(hello, 2, "the launcher started ranks on several hosts: set MASTER_ADDR",
                  {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_SIZE=2"});
  const auto with = [](std::vector<std::string> more) {
    auto variables = torchrun_like(0, 2, 29999);
    variables[1] = more[0];
    variables.insert(variables.end(), more.begin() + 1, more.end());
    return variables;
  };
  require_refused(hello, 2, "environment variable LOCAL_RANK is 5, but this machine has 2 ranks: they count from 0",
                  with({"LOCAL_RANK=5"}));
  require_refused(hello, 2, "environment variable LOCAL_RANK is 1, but this machine has 1 rank: they count from 0",
                  with({"LOCAL_RANK=1", "LOCAL_WORLD_SIZE=1"}));
  require_refused(hello, 2, "environment variable LOCAL_WORLD_SIZE is 3, but WORLD_SIZE is 2",
                  with({"LOCAL_RANK=1", "LOCAL_WORLD_SIZE=3"}));
  require_refused(hello, 2,
                  "environment variable CHORUS_RENDEZVOUS_FD must be a descriptor of a socket that listens, "
                  "got '999'",
                  with({"LOCAL_RANK=0", "CHORUS_RENDEZVOUS_FD=999"}));
  require_refused(hello, 128 + SIGKILL,
                  "the process that started this rank (CHORUS_SUPERVISOR_PID=999999999) has ended",
                  with({"LOCAL_RANK=0", "CHORUS_SUPERVISOR_PID=999999999", "CHORUS_REPORT_FD=3"}));
}

TEST_CASE("a port that is taken is named") {
  const TakenPort taken;
  Program program({probe(), "--do", "reduce", "--timeout", "2"}, torchrun_like(0, 2, taken.port));
  CHECK(program.finish() == 76);
  INFO(program.text());
  CHECK(has(program, "chorus: rank 0: "));
  CHECK(has(program, cat(taken.port)));
  CHECK(has(program, "in use"));
}

TEST_CASE("a rank that never arrives is named at the deadline") {
  Program program({probe(), "--do", "reduce", "--timeout", "1"}, torchrun_like(0, 2, free_port()));
  CHECK(program.finish() == 76);
  INFO(program.text());
  CHECK(has(program, "rank 1"));
}

TEST_CASE("launch joins the ranks of a real mpirun") {
  if (std::system("command -v mpirun >/dev/null") != 0) {
    WARN("not run: there is no mpirun here");
    return;
  }
  Program program({"mpirun", "--oversubscribe", "-n", "3", probe(), "--do", "reduce"},
                  {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"});
  CHECK(program.finish(30s) == 0);
  INFO(program.text());
  CHECK(count(program.text(), "sum 6\n") == 3);
}

}  // namespace launch_test
