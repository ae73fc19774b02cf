#pragma once
/// Runs a function as several ranks, each in its own process, and collects the results or errors.

#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>

#include <chorus/comm/connect.hpp>
#include <chorus/comm/meeting/rendezvous.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <csignal>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace test {

namespace ch = chorus;
using namespace std::chrono_literals;

struct Outcome {
  std::string text;    ///< the function's result or its exception's what(); plus the status if that is not 0
  int status = 0;      ///< from waitpid
  double seconds = 0;  ///< from start to end
};

inline ch::comm::Socket free_port() { return ch::comm::Socket::listen(ch::comm::Address::resolve("127.0.0.1", 0)); }

/// In a rank: appends what `body` writes to stderr to its result.
template <class Body>
std::string with_stderr(const Body& body) {
  std::FILE* const file = std::tmpfile();
  dup2(fileno(file), STDERR_FILENO);
  std::string text = body();
  std::rewind(file);
  char line[1000];
  while (std::fgets(line, sizeof line, file) != nullptr) text += line;
  return text;
}

/// While it lives, this process can't start threads: the default stack size is too large for any machine.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 60);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

/// One of three ranks: rank 1 waits for rank 0, which starts a little later and waits for rank 2, which never calls.
/// Returns the error.
inline std::string wait_in_a_chain(ch::comm::AnyCommunicator& c) {
  std::vector<float> x(1);
  c.barrier();
  if (c.rank() != 1) std::this_thread::sleep_for(c.rank() == 0 ? 300ms : 20s);
  try {
    c.broadcast(std::span(x), 2);  // data goes to rank 0, and from there to rank 1
  } catch (const ch::CommError& error) {
    return error.what();
  }
  return "";
}

class Ranks {
 public:
  using Function = std::function<std::string(const ch::comm::World&)>;

  Ranks(int size, Function function, std::chrono::milliseconds timeout = 10s) : start_(ch::comm::Clock::now()) {
    auto listener = free_port();
    port_ = listener.local().port();
    for (int rank = 0; rank < size; ++rank) {
      ch::comm::World world{.rank = rank, .size = size, .local_rank = rank, .local_size = size, .master_port = port_};
      world.timeout = timeout;
      if (rank == 0) world.listen_fd = listener.fd();
      start(world, function, listener.fd());
    }
  }
  Ranks(const Ranks&) = delete;
  ~Ranks() {
    for (const auto& child : children_) {
      if (child.pid > 0) kill(child.pid, SIGKILL);
      if (child.pid > 0) waitpid(child.pid, nullptr, 0);
    }
  }

  int pid(int rank) const { return children_[static_cast<std::size_t>(rank)].pid; }
  int port() const { return port_; }

  /// Waits until the process calls give_sign.
  void await_sign(int rank) {
    char byte;
    [[maybe_unused]] const auto n = read(children_[static_cast<std::size_t>(rank)].sign, &byte, 1);
  }

  /// Waits until one rank ends.
  Outcome outcome(int rank) {
    auto& child = children_[static_cast<std::size_t>(rank)];
    Outcome result;
    char buffer[4096];
    for (ssize_t n; (n = read(child.output, buffer, sizeof buffer)) > 0;)
      result.text.append(buffer, static_cast<std::size_t>(n));
    result.seconds = std::chrono::duration<double>(ch::comm::Clock::now() - start_).count();
    waitpid(child.pid, &result.status, 0);
    if (result.status != 0) result.text += ch::cat("(ended with status ", result.status, ")");
    close(child.output);
    close(child.sign);
    child.pid = 0;
    return result;
  }
  std::vector<std::string> texts() {
    std::vector<std::string> all;
    for (std::size_t rank = 0; rank < children_.size(); ++rank) all.push_back(outcome(static_cast<int>(rank)).text);
    return all;
  }

  /// In a rank: tells the test that it has reached this point.
  static void give_sign() { [[maybe_unused]] const auto n = write(sign_fd(), "!", 1); }

 private:
  struct Child {
    int pid = 0, output = -1, sign = -1;
  };
  static int& sign_fd() {
    static int fd = -1;
    return fd;
  }

  void start(const ch::comm::World& world, const Function& function, int listener) {
    int output[2], sign[2];
    if (pipe2(output, O_CLOEXEC) != 0 || pipe2(sign, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    std::fflush(nullptr);  // otherwise parent and child both write the buffers
    const int pid = fork();
    if (pid == 0) {
      sign_fd() = sign[1];
      close(output[0]);
      if (world.rank != 0) close(listener);
      for (const auto& other : children_) close(other.output);
      std::string text;
      try {
        text = function(world);
      } catch (const std::exception& error) {
        text = error.what();
      }
      [[maybe_unused]] const auto n = write(output[1], text.data(), text.size());
      _exit(0);
    }
    close(output[1]);
    close(sign[1]);
    children_.push_back({pid, output[0], sign[0]});
  }

  std::vector<Child> children_;
  int port_ = 0;
  ch::comm::Clock::time_point start_;
};

}  // namespace test
