// Failing writes that return an error where a signal would kill the process.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch.hpp>
#include <cerrno>
#include <chorus/core/check_output.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/say.hpp>
#include <csignal>
#include <cstdio>
#include <string>

#include "../message_of.hpp"

namespace held_signal_test {

using namespace chorus;

/// The child's exit status, or 128 + the signal that killed it.
template <class Body>
int in_child(const Body& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/// Limits the size of this process's files.
void limit_files(rlim_t bytes) {
  const rlimit limits{bytes, bytes}, none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  setrlimit(RLIMIT_FSIZE, &limits);
}

volatile std::sig_atomic_t handled = 0;

TEST_CASE("HeldSignal: a write above the limit of files fails, and nobody hears of a signal") {
  CHECK(in_child([] {
          limit_files(10);
          std::signal(SIGXFSZ, [](int) { handled = 1; });
          sigset_t before, after;
          pthread_sigmask(SIG_BLOCK, nullptr, &before);
          const int file = fileno(std::tmpfile());
          int error = 0;
          {
            const detail::HeldSignal held(SIGXFSZ);
            for (int i = 0; i < 3; ++i)
              if (write(file, "0123456", 7) < 0) error = errno;
          }
          pthread_sigmask(SIG_BLOCK, nullptr, &after);
          for (int signal = 1; signal < NSIG; ++signal)
            if (sigismember(&before, signal) != sigismember(&after, signal)) return 3;
          if (error != EFBIG || handled != 0) return 1;
          [[maybe_unused]] const auto n = write(file, "x", 1);
          return handled == 1 ? 0 : 2;  // the program's own writes are unaffected
        }) == 0);
}

TEST_CASE("what is said on a stderr that is as long as it may be is lost, and no more") {
  CHECK(in_child([] {
          dup2(fileno(std::tmpfile()), STDERR_FILENO);
          limit_files(10);
          for (int i = 0; i < 3; ++i) detail::say("more than there is room for");
          return 0;
        }) == 0);
}

TEST_CASE("standard output that can't be written is an error") {
  CHECK(in_child([] {
          detail::check_output();  // nothing is lost so far
          return 0;
        }) == 0);
  if (access("/dev/full", W_OK) != 0) return;
  const auto message = [](const char* path, bool early) {
    if (std::freopen(path, "w", stdout) == nullptr) return std::string("?");
    std::printf("text\n");
    if (early) std::fflush(stdout);  // the program did not check the result
    return message_of<FileError>([] { detail::check_output(); });
  };
  CHECK(in_child([&] {
          return message("/dev/full", false) ==
                         "standard output: not all of it could be written: No space left on device"
                     ? 0
                     : 1;
        }) == 0);
  CHECK(in_child([&] { return message("/dev/full", true).starts_with("standard output: not all of it") ? 0 : 1; }) ==
        0);
  CHECK(in_child([&] { return message("/dev/null", true) == "nothing" ? 0 : 1; }) == 0);
}

}  // namespace held_signal_test
