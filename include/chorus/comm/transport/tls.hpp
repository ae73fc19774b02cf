#pragma once
/// `Tls`: TLS 1.3 over a connected socket, by OpenSSL.
///
/// Both sides prove in the handshake that they know the job's token: it is the pre-shared key (RFC 8446, 4.2.11),
/// beside a Diffie-Hellman exchange, so that who learns the token later can't read what was overheard before. One
/// suite, no certificates, no tickets, no early data: there is nothing to be negotiated down to.

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

  /// Over `fd`, which does not block and stays the caller's. Throws UsageError where the program was built without
  /// OpenSSL, CommError where OpenSSL fails.
  Tls(int fd, Side side, const std::string& token);
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;
  ~Tls();

  /// Moves what can be moved without waiting, the handshake first; -1 when the connection is closed or broken, or the
  /// other side proves nothing. What `send` has not moved whole it is to be given again.
  std::ptrdiff_t send(std::span<const std::byte> bytes);
  std::ptrdiff_t receive(std::span<std::byte> bytes);
  /// What the last call that moved nothing waits for: POLLIN or POLLOUT.
  short awaits() const;
  /// Whether there are bytes that have left the socket and nobody has received yet.
  bool holds_bytes() const;
  /// What is wrong, as OpenSSL says it; empty where nothing is, and where the connection has simply ended.
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
  std::vector<char> out_;   ///< encrypted, several records: a call of the system for each would cost more than they do
  std::size_t gone_ = 0;    ///< of `out_`
  std::size_t held_ = 0;    ///< bytes that lie in `out_` and the caller has not been told of
  std::uint64_t sent_ = 0;  ///< under the present key
  bool proven_ = false;
  short awaits_ = 0;
  std::string trouble_;
};

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/transport/tls_impl.hpp>
#endif
