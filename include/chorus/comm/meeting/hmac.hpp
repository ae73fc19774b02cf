#pragma once
/// Proofs that a peer knows the job's token: HMAC-SHA256, by OpenSSL. Without OpenSSL only a token of chorus' own
/// launcher can be proved, by sending it: it serves one job on loopback, and the launcher held the job's port before
/// the ranks existed.

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>
#if CHORUS_USE_OPENSSL
#include <openssl/evp.h>
#include <openssl/hmac.h>
#endif

namespace chorus::comm {

inline constexpr bool can_authenticate = CHORUS_USE_OPENSSL;

using Nonce = std::array<std::byte, 16>;
using Mac = std::array<std::byte, 32>;

inline void fill_random(std::span<std::byte> bytes) {
  const auto got = getrandom(bytes.data(), bytes.size(), 0);  // before errno is read
  check<CommError>(got == static_cast<ssize_t>(bytes.size()), "getrandom: ", std::strerror(errno));
}

/// A random number, not 0.
inline std::uint64_t random_key() {
  std::uint64_t key = 0;
  while (key == 0) fill_random(std::as_writable_bytes(std::span(&key, 1)));
  return key;
}

/// The beginning of the launcher's own tokens; 64 random digits follow.
inline constexpr std::string_view launched = "launched-";

/// Whether this program can prove that it knows the token.
inline bool provable(std::string_view token) {
  return can_authenticate || token.empty() ||
         (token.starts_with(launched) && token.size() == launched.size() + 2 * sizeof(Mac));
}

/// The proof for `parts`, concatenated, each of a fixed size. Zeros if there is no token.
[[gnu::cold]] inline Mac prove([[maybe_unused]] const std::string& token,
                               [[maybe_unused]] std::initializer_list<std::span<const std::byte>> parts) {
  Mac mac{};
#if CHORUS_USE_OPENSSL
  if (token.empty()) return mac;
  std::vector<unsigned char> message;
  for (const auto part : parts)
    for (const std::byte byte : part) message.push_back(static_cast<unsigned char>(byte));
  unsigned length = 0;
  const auto* made = HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()), message.data(), message.size(),
                          reinterpret_cast<unsigned char*>(mac.data()), &length);
  check<CommError>(made != nullptr && length == mac.size(), "OpenSSL: HMAC-SHA256 failed");
#else
  if (!token.empty() && provable(token)) std::memcpy(mac.data(), token.data() + launched.size(), mac.size());
#endif
  return mac;
}

/// Compares in a time that does not depend on the position of a difference.
inline bool same(const Mac& a, const Mac& b) {
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace chorus::comm
