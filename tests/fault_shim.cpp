/// Preloaded into the ranks of a job (LD_PRELOAD): what the plan in CHORUS_FAULT_PLAN, a text of FaultPlan, does to
/// simulated ranks happens to these processes. A call is a `send`, and a file is a temporary one that takes the place of
/// another. A lost link is the one on which the byte would go, whoever the peer is; a slow one delays each message.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Fault {
  char kind[8];
  char where;  // c: a call, f: an operation on a file, b: a byte
  unsigned long at;
  double amount;
  std::atomic<bool> struck;
};
std::array<Fault, 16> faults;
std::size_t count = 0;
std::atomic<unsigned long> calls{0}, files{0}, bytes{0};
std::array<std::atomic<bool>, 4096> is_saved;  // by descriptor

bool is(const Fault& fault, const char* kind) { return std::strcmp(fault.kind, kind) == 0; }

/// Keeps the faults of this process' rank.
[[gnu::constructor]] void read_plan() {
  const char *text = std::getenv("CHORUS_FAULT_PLAN"), *rank = std::getenv("RANK");
  if (text == nullptr || rank == nullptr) return;
  for (; text != nullptr && count < faults.size(); text = std::strchr(text, ',')) {
    text += std::strspn(text, ", ");
    auto& fault = faults[count];
    int own = -1, peer = -1, end = 0;
    if (std::sscanf(text, "%7s %d%n", fault.kind, &own, &end) != 2) break;
    if (text[end] == '-') peer = std::atoi(text + end + 1);
    const bool lasts = is(fault, "slow") || is(fault, "delay");
    if (std::atoi(rank) != own && !(lasts && std::atoi(rank) == peer)) continue;
    char word[8] = {};
    if (std::sscanf(text, "%*s %*s @%7s %lu for %lf", word, &fault.at, &fault.amount) < 2)
      std::sscanf(text, is(fault, "slow") ? "%*s %*s x %lf" : "%*s %*s up to %lf", &fault.amount);
    fault.where = word[0];
    ++count;
  }
}

/// Returns the fault that an operation meets and that it has to carry out; null: none.
const Fault* met(char where, unsigned long at) {
  const Fault* own = nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    auto& fault = faults[i];
    if (fault.where != where || fault.at > at || fault.struck.exchange(true)) continue;
    if (is(fault, "kill"))
      ::kill(getpid(), SIGKILL);
    else if (is(fault, "hang"))
      ::kill(getpid(), SIGSTOP);
    else if (is(fault, "stop"))
      ::usleep(static_cast<useconds_t>(fault.amount * 1e6));
    else
      own = &fault;
  }
  return own;
}
/// The errno of the next operation on a saved file; 0: it succeeds. Of a write, `size` may become less.
int fault_of_file(std::size_t* size = nullptr) {
  const auto* fault = met('f', ++files);
  if (fault == nullptr) return 0;
  if (!is(*fault, "part")) return is(*fault, "full") ? ENOSPC : EIO;
  if (size != nullptr) *size = (*size + 1) / 2;
  return 0;
}
bool saved(int file) { return file >= 0 && static_cast<std::size_t>(file) < is_saved.size() && is_saved[static_cast<std::size_t>(file)]; }
bool is_temporary(const char* path) {
  const auto length = std::strlen(path);
  return length > 4 && std::strcmp(path + length - 4, ".tmp") == 0;
}
template <class... Words>
long answered(int error, long call, const Words&... words) {
  if (error != 0) return errno = error, -1;
  return ::syscall(call, words...);
}
int opened(int folder, const char* path, int flags, mode_t mode) {
  const bool counts = (flags & O_ACCMODE) != O_RDONLY && is_temporary(path);
  const auto file = answered(counts ? fault_of_file() : 0, SYS_openat, folder, path, flags, mode);
  if (file >= 0 && static_cast<std::size_t>(file) < is_saved.size()) is_saved[static_cast<std::size_t>(file)] = counts;
  return static_cast<int>(file);
}
/// Before a message of `size` bytes: 0, or an errno.
int fault_of_message(int socket, std::size_t size) {
  for (std::size_t i = 0; i < count; ++i) {
    if (is(faults[i], "slow")) ::usleep(static_cast<useconds_t>(faults[i].amount));
    if (is(faults[i], "delay")) ::usleep(static_cast<useconds_t>(faults[i].amount * 1e5));
  }
  const auto *at_call = met('c', ++calls), *at_byte = met('b', bytes += size);
  if (at_call == nullptr && at_byte == nullptr) return 0;
  ::shutdown(socket, SHUT_RDWR);
  return ECONNRESET;
}

}  // namespace

extern "C" {
ssize_t send(int socket, const void* data, std::size_t size, int flags) {
  return answered(fault_of_message(socket, size), SYS_sendto, socket, data, size, flags, nullptr, 0);
}
ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  std::size_t size = 0;
  for (std::size_t i = 0; i < message->msg_iovlen; ++i) size += message->msg_iov[i].iov_len;
  return answered(fault_of_message(socket, size), SYS_sendmsg, socket, message, flags);
}
int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : mode_t{};
  va_end(more);
  return opened(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : mode_t{};
  va_end(more);
  return opened(folder, path, flags, mode);
}
ssize_t write(int file, const void* data, std::size_t size) {
  const int error = saved(file) ? fault_of_file(&size) : 0;
  return answered(error, SYS_write, file, data, size);
}
ssize_t pwrite(int file, const void* data, std::size_t size, off_t offset) {
  const int error = saved(file) ? fault_of_file(&size) : 0;
  return answered(error, SYS_pwrite64, file, data, size, offset);
}
int ftruncate(int file, off_t length) noexcept {
  return static_cast<int>(answered(saved(file) ? fault_of_file() : 0, SYS_ftruncate, file, length));
}
int fsync(int file) { return static_cast<int>(answered(saved(file) ? fault_of_file() : 0, SYS_fsync, file)); }
int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  return static_cast<int>(answered(is_temporary(from) ? fault_of_file() : 0, SYS_renameat2, from_folder, from, to_folder, to, 0));
}
}
