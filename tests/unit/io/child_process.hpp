#pragma once
/// Runs code in a child process in which the n-th system call on files fails, or kills the process: the kernel asks the
/// parent (seccomp user notification) before each of these calls.

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace chorus_test {

struct ChildResult {
  bool supervised = true;   ///< false if this machine does not allow the parent to intercept calls
  bool killed = false;      ///< by a signal
  std::string message;      ///< of the std::exception that ended the body, or ""
  std::vector<long> calls;  ///< the body's system calls on files, as SYS_write
  long hit = -1;            ///< the call that the fault hit, or -1
};

/// Which call the fault hits, from 1 on (0: none), and the errno of its failure (0: the process is killed).
struct Fault {
  std::size_t call = 0;
  int error = 0;
};

namespace detail {

inline constexpr long file_calls[] = {
#ifdef SYS_open
    SYS_open,       SYS_lstat, SYS_stat,      SYS_rename, SYS_unlink,   SYS_readlink,   SYS_newfstatat,
#endif
#ifdef SYS_faccessat2
    SYS_faccessat2,
#endif
    SYS_openat,     SYS_close, SYS_write,     SYS_fsync,  SYS_renameat, SYS_renameat2,  SYS_unlinkat,
    SYS_readlinkat, SYS_fstat, SYS_faccessat, SYS_fchmod, SYS_flock,    SYS_getdents64, SYS_getrandom,
    SYS_pread64,    SYS_read,  SYS_writev,    SYS_ftruncate, SYS_lseek};

/// Makes the kernel ask before each of `file_calls`; returns the descriptor for the answers, or -1.
inline int install_filter() {
  constexpr std::size_t count = std::size(file_calls);
  sock_filter program[count + 3] = {};
  program[0] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr));
  for (std::size_t i = 0; i < count; ++i) {
    const auto to_end = static_cast<unsigned char>(count - i);
    program[1 + i] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(file_calls[i]), to_end, 0);
  }
  program[count + 1] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  program[count + 2] = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF);
  const sock_fprog whole{count + 3, program};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
  return static_cast<int>(::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &whole));
}

/// Sends a descriptor (or -1 for none) over a socket.
inline void send_descriptor(int socket, int descriptor) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  ::sendmsg(socket, &message, MSG_NOSIGNAL);
}

inline int receive_descriptor(int socket) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  int descriptor = -1;
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == 1 && message.msg_controllen > 0) {
    std::memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
  }
  return descriptor;
}

/// Answers the kernel until the child ends.
inline void supervise(pid_t child, int listener, Fault fault, ChildResult& result) {
  for (;;) {
    pollfd ready{listener, POLLIN, 0};
    const int count = ::poll(&ready, 1, 20'000);
    if (count == 0) ::kill(child, SIGKILL);  // it hangs
    if (count == 0 || (ready.revents & POLLIN) == 0) return;
    seccomp_notif request{};
    if (::ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &request) != 0) continue;
    seccomp_notif_resp response{};
    response.id = request.id;
    response.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    result.calls.push_back(request.data.nr);
    if (result.calls.size() == fault.call) {
      result.hit = request.data.nr;
      if (fault.error == 0) {
        ::kill(child, SIGKILL);
        return;
      }
      response.flags = 0;
      response.error = -fault.error;
    }
    ::ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
  }
}

}  // namespace detail

/// Runs `body` in a child process, supervised if there is a fault.
template <class Body>
ChildResult in_child(Body body, const Fault* fault = nullptr) {
  constexpr std::size_t room = 4096;
  void* shared = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int sockets[2];
  if (shared == MAP_FAILED || ::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) throw std::runtime_error("no child");
  auto* text = static_cast<char*>(shared);

  std::fflush(nullptr);  // a sanitizer's _exit would write the buffers, and its calls would count
  const pid_t child = ::fork();
  if (child == 0) {
    const int listener = fault != nullptr ? detail::install_filter() : -1;
    detail::send_descriptor(sockets[1], listener);
    if (fault != nullptr && listener < 0) ::_exit(0);
    try {
      body();
    } catch (const std::exception& error) {
      std::strncpy(text, error.what(), room - 1);
    }
    ::_exit(0);
  }
  ::close(sockets[1]);
  ChildResult result;
  const int listener = detail::receive_descriptor(sockets[0]);
  ::close(sockets[0]);
  result.supervised = listener >= 0;
  if (listener >= 0) {
    detail::supervise(child, listener, *fault, result);
    ::close(listener);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  result.killed = WIFSIGNALED(status);
  result.message = text;
  ::munmap(shared, room);
  return result;
}

}  // namespace chorus_test
