#pragma once
/// For tests of the launcher with real processes: the program launch_probe is in the folder `programs` next to the
/// test, or in $CHORUS_TEST_PROGRAMS.

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

namespace launched {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using chorus::cat;

inline std::string probe() {
  if (const char* folder = std::getenv("CHORUS_TEST_PROGRAMS")) return cat(folder, "/launch_probe");
  char path[PATH_MAX] = {};
  REQUIRE(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
  const std::string self = path;
  return self.substr(0, self.rfind('/')) + "/programs/launch_probe";
}

/// A program that runs beside the test, and its collected output and errors. The destructor kills it.
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
    // Its own process group, as in a shell.
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

  /// The pids of `count` ranks, once each has printed `ready RANK PID`.
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

  /// Waits for the end; returns the exit status, or 1000 + the signal that killed it. Fails after `limit`.
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
  /// Returns false at the end of the output, or at the deadline.
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

inline int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

/// The state letter of ps: S sleeping, T stopped, Z zombie; 0 if there is no such process.
inline char state(pid_t pid) {
  std::ifstream file(cat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(") ");
  return name_end == std::string::npos ? '\0' : line[name_end + 2];
}

inline void require_gone(const std::map<int, pid_t>& pids) {
  for (const auto& [rank, pid] : pids) {
    INFO("rank " << rank << ", pid " << pid);
    CHECK((kill(pid, 0) == -1 && errno == ESRCH));  // not even a zombie
  }
}

inline std::set<std::string> shared_memory() {
  std::set<std::string> names;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) names.insert(entry->d_name);
  closedir(folder);
  return names;
}

/// Files of tests that run at the same time disappear; one that stays is from this test.
inline void require_no_new_shared_memory(const std::set<std::string>& before) {
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

inline int free_port() { return TakenPort{}.port; }

inline Program::Variables torchrun_like(int rank, int size, int port) {
  return {cat("RANK=", rank), cat("LOCAL_RANK=", rank), cat("WORLD_SIZE=", size), "MASTER_ADDR=127.0.0.1",
          cat("MASTER_PORT=", port)};
}

inline bool has(const Program& program, const std::string& part) {
  return program.text().find(part) != std::string::npos;
}

/// Runs the probe with `words`, and checks exit status and message.
inline void require_refused(std::vector<std::string> words, int status, const std::string& message,
                            const Program::Variables& variables = {}) {
  words.insert(words.begin(), probe());
  Program program(words, variables);
  CHECK(program.finish() == status);
  INFO("got: " << program.text());
  CHECK(has(program, "chorus: " + message));
}

}  // namespace launched
