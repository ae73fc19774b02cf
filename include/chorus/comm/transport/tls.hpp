#pragma once
/// `Tls`: TLS 1.3 over a connected socket, by OpenSSL.
///
/// In the handshake both sides prove that they know the job's token: it is the pre-shared key (RFC 8446, 4.2.11),
/// beside a Diffie-Hellman exchange, so that a later leak of the token does not reveal earlier traffic. One suite, no
/// certificates, no tickets, no early data: a downgrade is impossible.

#include <array>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

struct ssl_st;  // OpenSSL's

namespace chorus::comm {

/// Any thread may send and receive.
class Tls {
 public:
  enum class Side { server, client };

  /// Over `fd`, which does not block and stays the caller's. Throws UsageError if the program was built without
  /// OpenSSL, CommError if OpenSSL fails.
  Tls(int fd, Side side, const std::string& token);
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;
  ~Tls();

  /// Moves as many bytes as possible without waiting, the handshake first; -1 if the connection is closed or broken, or
  /// the other side's proof fails. After a partial `send` the caller must pass the rest again.
  std::ptrdiff_t send(std::span<const std::byte> bytes);
  std::ptrdiff_t receive(std::span<std::byte> bytes);
  /// The event that the last call without progress waits for: POLLIN or POLLOUT.
  short awaits() const;
  /// Whether bytes have been read from the socket but not received yet.
  bool holds_bytes() const;
  /// OpenSSL's text of the error; empty without one, and if the connection has just ended.
  std::string trouble() const;

 private:
  struct Socket;

  bool shake_hands();
  bool succeeded(int code);
  bool flush();

  mutable std::mutex mutex_;
  const int fd_;
  ssl_st* ssl_ = nullptr;
  std::array<unsigned char, 32> key_{};
  std::vector<char> out_;   ///< encrypted, several records: a system call for each would cost more than they do
  std::size_t gone_ = 0;    ///< of `out_`
  std::size_t held_ = 0;    ///< bytes in `out_` that have not been reported to the caller
  std::uint64_t sent_ = 0;  ///< under the present key
  bool proven_ = false;
  short awaits_ = 0;
  std::string trouble_;
};

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/transport/tls_impl.hpp>
#endif
