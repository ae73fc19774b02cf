#pragma once
/// How `Tls` uses OpenSSL.

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chorus/comm/meeting/hmac.hpp>
#include <chorus/comm/transport/tls.hpp>
#include <cstring>
#include <string_view>
#include <utility>
#if CHORUS_USE_OPENSSL
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

namespace chorus::comm {

#if CHORUS_USE_OPENSSL

namespace detail {

inline constexpr std::string_view tls_identity = "chorus";

/// The token's key as a session to be resumed.
inline SSL_SESSION* tls_session(SSL* ssl) {
  const unsigned char suite[] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256
  const auto& key = *static_cast<const std::array<unsigned char, 32>*>(SSL_get_app_data(ssl));
  auto* session = SSL_SESSION_new();
  if (session != nullptr && SSL_SESSION_set1_master_key(session, key.data(), key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, suite)) == 1 &&
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1)
    return session;
  SSL_SESSION_free(session);
  return nullptr;
}

inline SSL_CTX* tls_context() {
  static SSL_CTX* const context = [] {
    auto* made = SSL_CTX_new(TLS_method());
    check<CommError>(made != nullptr && SSL_CTX_set_min_proto_version(made, TLS1_3_VERSION) == 1 &&
                         SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256") == 1 &&
                         SSL_CTX_set_num_tickets(made, 0) == 1,
                     "TLS: OpenSSL refuses to be set up");
    SSL_CTX_set_session_cache_mode(made, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(made, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_read_ahead(made, 1);
    SSL_CTX_set_default_read_buffer_len(made, 256 << 10);
    SSL_CTX_set_psk_use_session_callback(
        made, [](SSL* ssl, const EVP_MD*, const unsigned char** id, std::size_t* length, SSL_SESSION** session) {
          *id = reinterpret_cast<const unsigned char*>(tls_identity.data());
          *length = tls_identity.size();
          *session = tls_session(ssl);
          return *session != nullptr ? 1 : 0;
        });
    SSL_CTX_set_psk_find_session_callback(
        made, [](SSL* ssl, const unsigned char* id, std::size_t length, SSL_SESSION** session) {
          const bool ours = std::string_view(reinterpret_cast<const char*>(id), length) == tls_identity;
          *session = ours ? tls_session(ssl) : nullptr;
          return 1;
        });
    return made;
  }();
  return context;
}

}  // namespace detail

/// The socket as OpenSSL's BIO; OpenSSL's own would raise SIGPIPE if the other end is gone. Written data go to `out_`.
struct Tls::Socket {
  static BIO_METHOD* method() {
    static BIO_METHOD* const method = [] {
      auto* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "chorus socket");
      BIO_meth_set_write_ex(made, [](BIO* bio, const char* data, std::size_t size, std::size_t* moved) {
        auto& out = static_cast<Tls*>(BIO_get_data(bio))->out_;
        out.insert(out.end(), data, data + size);
        *moved = size;
        return 1;
      });
      BIO_meth_set_read_ex(made, [](BIO* bio, char* data, std::size_t size, std::size_t* moved) {
        BIO_clear_retry_flags(bio);
        const auto n = ::recv(static_cast<Tls*>(BIO_get_data(bio))->fd_, data, size, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) BIO_set_retry_read(bio);
        *moved = n < 0 ? 0 : static_cast<std::size_t>(n);
        return n <= 0 ? 0 : 1;
      });
      BIO_meth_set_ctrl(made, [](BIO*, int command, long, void*) -> long { return command == BIO_CTRL_FLUSH; });
      return made;
    }();
    return method;
  }
};

CHORUS_INLINE Tls::Tls(int fd, Side side, const std::string& token) : fd_(fd) {
  static constexpr std::string_view purpose = "chorus: TLS";
  const auto key = prove(token, {std::as_bytes(std::span(purpose))});
  std::memcpy(key_.data(), key.data(), key_.size());
  ssl_ = SSL_new(detail::tls_context());
  auto* const bio = ssl_ == nullptr ? nullptr : BIO_new(Socket::method());
  if (bio == nullptr) SSL_free(ssl_);
  check<CommError>(bio != nullptr, "TLS: OpenSSL has no memory for a connection");
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_, bio, bio);
  SSL_set_app_data(ssl_, &key_);
  if (side == Side::server) {
    SSL_set_accept_state(ssl_);
  } else {
    SSL_set_connect_state(ssl_);
    SSL_set_verify(ssl_, SSL_VERIFY_PEER, nullptr);  // a server's certificate proves nothing here: none is trusted
  }
}

CHORUS_INLINE Tls::~Tls() { SSL_free(ssl_); }

CHORUS_INLINE std::ptrdiff_t Tls::send(std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes.empty()) return 0;
  if (!shake_hands()) return awaits_ != 0 ? 0 : -1;
  constexpr std::uint64_t key_bytes = std::uint64_t{1} << 37;  // RFC 8446, 5.5: at most 2^24.5 records of 2^14 bytes
  constexpr std::size_t batch = 256 << 10;
  if (sent_ >= key_bytes && SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED) == 1) sent_ = 0;
  while (held_ < bytes.size() && out_.size() < batch) {
    std::size_t moved = 0;
    const auto rest = bytes.subspan(held_);
    const int code = SSL_write_ex(ssl_, rest.data(), rest.size(), &moved);
    if (!succeeded(code)) return -1;
    held_ += moved;
  }
  if (!flush()) return awaits_ != 0 ? 0 : -1;
  sent_ += held_;
  return static_cast<std::ptrdiff_t>(std::exchange(held_, 0));
}

CHORUS_INLINE std::ptrdiff_t Tls::receive(std::span<std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes.empty()) return 0;
  if (!shake_hands()) return awaits_ != 0 ? 0 : -1;
  std::size_t received = 0;
  while (received < bytes.size()) {  // a record at a time
    std::size_t moved = 0;
    const auto rest = bytes.subspan(received);
    const int code = SSL_read_ex(ssl_, rest.data(), rest.size(), &moved);
    if (!succeeded(code)) break;
    received += moved;
  }
  if (received == 0 && awaits_ == 0) {
    flush();  // sends the reason to the other side
    return -1;
  }
  return static_cast<std::ptrdiff_t>(received);
}

/// Whether both sides have proved that they know the token.
CHORUS_INLINE bool Tls::shake_hands() {
  ERR_clear_error();
  if (proven_) return true;
  const bool done = succeeded(SSL_do_handshake(ssl_));
  const short waits_for = awaits_;
  if (!flush()) return false;
  awaits_ = waits_for;
  if (!done) return false;
  proven_ = SSL_session_reused(ssl_) == 1;
  if (!proven_) trouble_ = "the other side has not used the job's token";
  return proven_;
}

/// The result of a call of OpenSSL: false, with the event that it waits for, or without one if the connection has
/// ended.
CHORUS_INLINE bool Tls::succeeded(int code) {
  awaits_ = 0;
  if (code == 1) return true;
  const int error = SSL_get_error(ssl_, code);
  if (error == SSL_ERROR_WANT_READ) awaits_ = POLLIN;
  if (const auto what = ERR_peek_error(); error == SSL_ERROR_SSL && what != 0 && trouble_.empty()) {
    const char* const reason = ERR_reason_error_string(what);
    trouble_ = reason != nullptr ? reason : cat("error ", what);
  }
  return false;
}

/// Sends the encrypted data; returns true when all have been sent.
CHORUS_INLINE bool Tls::flush() {
  awaits_ = 0;
  while (gone_ < out_.size()) {
    const auto n = ::send(fd_, out_.data() + gone_, out_.size() - gone_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) awaits_ = POLLOUT;
    if (n < 0) return false;
    gone_ += static_cast<std::size_t>(n);
  }
  out_.clear();
  gone_ = 0;
  return true;
}

CHORUS_INLINE short Tls::awaits() const {
  const std::lock_guard lock(mutex_);
  return awaits_;
}
CHORUS_INLINE bool Tls::holds_bytes() const {
  const std::lock_guard lock(mutex_);
  return proven_ && SSL_has_pending(ssl_) == 1;
}
CHORUS_INLINE std::string Tls::trouble() const {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

#else

CHORUS_INLINE Tls::Tls(int fd, Side, const std::string&) : fd_(fd) {
  fail<UsageError>("TLS: this program was built without OpenSSL (CHORUS_USE_OPENSSL=0)");
}
CHORUS_INLINE Tls::~Tls() = default;
CHORUS_INLINE std::ptrdiff_t Tls::send(std::span<const std::byte>) { return -1; }
CHORUS_INLINE std::ptrdiff_t Tls::receive(std::span<std::byte>) { return -1; }
CHORUS_INLINE short Tls::awaits() const { return awaits_; }
CHORUS_INLINE bool Tls::holds_bytes() const { return false; }
CHORUS_INLINE std::string Tls::trouble() const { return trouble_; }

#endif

}  // namespace chorus::comm
