#pragma once
/// TCP sockets with deadlines. All of them are non-blocking and closed on exec.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chorus/comm/transport/name_lookup.hpp>
#include <chorus/comm/transport/tls.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/standard_streams.hpp>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace chorus::comm {

/// A timeout for poll; at most 1000 s.
inline int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<decltype(left)>(left, 0, 1'000'000));
}

/// An address of a socket, IPv4 or IPv6.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_storage);

  sockaddr* data() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int port() const {
    return ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port
                                               : reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  }
  Address with_port(int port) const {
    auto other = *this;
    const auto value = htons(static_cast<std::uint16_t>(port));
    if (storage.ss_family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&other.storage)->sin6_port = value;
    } else {
      reinterpret_cast<sockaddr_in*>(&other.storage)->sin_port = value;
    }
    return other;
  }

  /// Whether it is a valid address: a peer may have sent any bytes.
  bool sound() const {
    return (storage.ss_family == AF_INET && length == sizeof(sockaddr_in)) ||
           (storage.ss_family == AF_INET6 && length == sizeof(sockaddr_in6));
  }
  /// Whether only this machine can reach it.
  bool loopback() const {
    if (storage.ss_family == AF_INET6) {
      const auto& address = reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
      return IN6_IS_ADDR_LOOPBACK(&address) || (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
    }
    return ntohl(reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr) >> 24 == 127;
  }

  /// The numeric address without the port.
  std::string host() const {
    char text[NI_MAXHOST] = "?";
    getnameinfo(data(), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
    return text;
  }

  /// From a numeric address, also `[::1]`; nothing for a name.
  [[gnu::cold]] static std::optional<Address> in_numbers(const std::string& text) {
    const auto found = detail::ask_system(detail::without_brackets(text), AI_NUMERICHOST);
    if (found.code != 0) return std::nullopt;
    Address address;
    address.storage = found.storage;
    address.length = found.length;
    return address;
  }

  /// Looks `name` up; it may be a numeric address, `::1` or `[::1]`, too. Throws CommError if there is no such name,
  /// TimeoutError if there is no answer by the deadline.
  static Address resolve(const std::string& name, int port,
                         Deadline deadline = Clock::now() + std::chrono::seconds(30)) {
    const auto found = detail::look_up(detail::without_brackets(name), deadline);
    check<TimeoutError>(found.has_value(), "address '", printable(name),
                        "': the system did not resolve the name in time: check the name server");
    check<CommError>(found->code == 0, "address '", printable(name), "': ", gai_strerror(found->code));
    Address address;
    address.storage = found->storage;
    address.length = found->length;
    return address.with_port(port);
  }
  /// Whether other machines resolve this name to another address: Debian's /etc/hosts maps a machine's own name to
  /// 127.0.1.1.
  bool misleads(const std::string& name) const {
    return loopback() && name.find("localhost") == std::string::npos && !in_numbers(name);
  }
};

/// `127.0.0.1:29500`
inline void append(std::string& out, const Address& address) {
  const bool six = address.storage.ss_family == AF_INET6;
  out += cat(six ? "[" : "", address.host(), six ? "]:" : ":", address.port());
}

/// Owns a socket. Its descriptor is above those of the standard streams.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(chorus::detail::above_standard_streams(fd)) {}
  /// Takes ownership of a socket that was made elsewhere.
  static Socket adopt(int fd) {
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
    return Socket(fd);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)), tls_(std::move(other.tls_)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(tls_, other.tls_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  /// Releases ownership: the caller closes the socket.
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

  /// A listening socket on exactly this address; port 0 takes a free one. Throws CommError.
  static Socket listen(const Address& address) {
    Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int yes = 1;
    if (socket) setsockopt(socket.fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (!socket || bind(socket.fd_, address.data(), address.length) != 0 || ::listen(socket.fd_, SOMAXCONN) != 0) {
      const int error = errno;
      const auto hint = error == EADDRINUSE      ? " (another job or program listens there; choose another port)"
                        : error == EADDRNOTAVAIL ? " (it is not an address of this machine)"
                                                 : "";
      fail<CommError>("cannot listen on ", address, ": ", std::strerror(error), hint);
    }
    return socket;
  }

  /// Begins a connection; returns an empty socket with errno set on failure.
  static Socket begin_connect(const Address& address) {
    Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket || ::connect(socket.fd_, address.data(), address.length) == 0 || errno == EINPROGRESS) return socket;
    return Socket();
  }
  /// A connection, or an empty socket with errno set if there is none by the deadline. On loopback a port without a
  /// listener can be connected to itself, which is not accepted.
  [[gnu::cold]] static Socket connect(const Address& address, Deadline deadline) {
    auto socket = begin_connect(address);
    if (!socket) return socket;
    int error = socket.wait(POLLOUT, deadline) ? socket.error() : ETIMEDOUT;
    if (error == 0 && socket.local().port() == address.port()) error = ECONNREFUSED;
    if (error == 0) return socket;
    errno = error;
    return Socket();
  }
  /// The socket's error, which is then cleared.
  int error() const {
    int error = 0;
    socklen_t length = sizeof error;
    return getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
  }

  Socket accept() const { return Socket(::accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)); }

  void no_delay() const {
    const int yes = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  }
  /// If both ends are on one machine, selects the plain congestion control instead of one that may pace data (BBR, the
  /// default of some distributions): nothing is lost there, and pacing costs a third of the speed.
  void no_pacing() const {
    constexpr std::string_view plain = "reno";  // every kernel has it and allows it to everyone
    if (local().host() == remote().host()) setsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, plain.data(), plain.size());
  }
  Address local() const {
    Address address;
    getsockname(fd_, address.data(), &address.length);
    return address;
  }
  Address remote() const {
    Address address;
    getpeername(fd_, address.data(), &address.length);
    return address;
  }

  /// Encrypts all data from here on, for peers that know `token`. The handshake is part of the first calls that move
  /// bytes. Throws as Tls does.
  void encrypt(Tls::Side side, const std::string& token) {
    no_delay();  // the messages of the handshake are short
    tls_ = std::make_unique<Tls>(fd_, side, token);
  }
  /// The reason if encryption has ended the connection, as an addition to a message; otherwise empty.
  std::string trouble() const {
    const auto why = tls_ ? tls_->trouble() : std::string();
    return why.empty() ? why : cat(": the data were damaged on the way, or the tokens differ (TLS: ", why, ")");
  }
  /// The events to poll for.
  short needs(short event) const { return tls_ && tls_->awaits() != 0 ? tls_->awaits() : event; }

  /// Moves as many bytes as possible without waiting; -1 if the connection is closed or broken.
  std::ptrdiff_t try_send(std::span<const std::byte> bytes) const {
    if (tls_) [[unlikely]]
      return tls_->send(bytes);
    const auto n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return n >= 0 ? n : would_wait() ? 0 : -1;
  }
  /// The same with two ranges, one after the other.
  std::ptrdiff_t try_send(std::span<const std::byte> first, std::span<const std::byte> second) const {
    if (tls_) [[unlikely]]
      return tls_->send(
          first.data() + first.size() == second.data() ? std::span(first.data(), first.size() + second.size()) : first);
    iovec ranges[2] = {{const_cast<std::byte*>(first.data()), first.size()},
                       {const_cast<std::byte*>(second.data()), second.size()}};
    msghdr message{};
    message.msg_iov = ranges;
    message.msg_iovlen = 2;
    const auto n = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    return n >= 0 ? n : would_wait() ? 0 : -1;
  }
  std::ptrdiff_t try_receive(std::span<std::byte> bytes) const {
    if (tls_) [[unlikely]]
      return tls_->receive(bytes);
    const auto n = ::recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    return n > 0 ? n : n < 0 && would_wait() ? 0 : -1;
  }

  /// Moves all bytes; returns false if the connection ends or the deadline comes first.
  bool send_all(std::span<const std::byte> bytes, Deadline deadline) const {
    while (!bytes.empty()) {
      const auto n = try_send(bytes);
      if (n < 0 || (n == 0 && !wait(POLLOUT, deadline))) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }
  bool receive_all(std::span<std::byte> bytes, Deadline deadline) const {
    while (!bytes.empty()) {
      const auto n = try_receive(bytes);
      if (n < 0 || (n == 0 && !wait(POLLIN, deadline))) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }

  /// Returns false at the deadline.
  bool wait(short event, Deadline deadline) const {
    if (tls_ && event == POLLIN && tls_->holds_bytes()) return true;
    pollfd entry{fd_, needs(event), 0};
    while (Clock::now() < deadline)
      if (poll(&entry, 1, milliseconds_until(deadline)) > 0) return true;
    return false;
  }
  /// Whether the other end has closed and all its data have been read, or the connection is broken.
  bool ended() const {
    char byte;
    const auto n = recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && !would_wait());
  }
  /// The same, even if some data have not been read.
  bool hung_up() const {
    pollfd entry{fd_, POLLRDHUP, 0};
    return poll(&entry, 1, 0) > 0;
  }

 private:
  static bool would_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

  int fd_ = -1;
  std::unique_ptr<Tls> tls_;
};

/// The bytes of a struct that is sent unchanged.
template <class T>
requires std::is_trivially_copyable_v<T> std::span<std::byte> bytes_of(T& value) {
  return {reinterpret_cast<std::byte*>(&value), sizeof value};
}

}  // namespace chorus::comm
