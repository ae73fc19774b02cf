#pragma once
/// SHA-256 through OpenSSL, if the build has it.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>

#if CHORUS_USE_OPENSSL
#include <openssl/evp.h>
#endif

namespace chorus::io {

#if CHORUS_USE_OPENSSL

/// A hash over bytes that arrive in pieces.
class Sha256 {
 public:
  static constexpr bool available = true;

  Sha256() : context_(EVP_MD_CTX_new()) {
    require(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }

  void update(std::span<const std::byte> data) {
    require(EVP_DigestUpdate(context_.get(), data.data(), data.size()) == 1);
  }
  void update(std::string_view text) { update(std::as_bytes(std::span(text))); }

  /// The hash of all bytes so far, as 64 hexadecimal digits; `update` may continue.
  std::string hex() const {
    constexpr std::string_view digits = "0123456789abcdef";
    unsigned char hash[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    const Context last(EVP_MD_CTX_new());
    require(last != nullptr && EVP_MD_CTX_copy_ex(last.get(), context_.get()) == 1 &&
            EVP_DigestFinal_ex(last.get(), hash, &size) == 1);
    std::string out;
    for (unsigned i = 0; i < size; ++i) (out += digits[hash[i] >> 4]) += digits[hash[i] & 15];
    return out;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  using Context = std::unique_ptr<EVP_MD_CTX, Free>;

  static void require(bool ok) { check<Error>(ok, "SHA-256: OpenSSL refuses to compute it"); }

  Context context_;
};

#else

/// For builds without OpenSSL: its constructor throws UsageError.
class Sha256 {
 public:
  static constexpr bool available = false;

  Sha256() {
    fail<UsageError>(
        "SHA-256: this program was built without OpenSSL (CHORUS_USE_OPENSSL=0): install libssl-dev and build "
        "it again");
  }
  void update(std::span<const std::byte>) {}
  void update(std::string_view) {}
  std::string hex() const { return {}; }
};

#endif

/// The hash of `data`, as 64 hexadecimal digits.
inline std::string sha256_hex(std::span<const std::byte> data) {
  Sha256 hash;
  hash.update(data);
  return hash.hex();
}
inline std::string sha256_hex(std::string_view text) { return sha256_hex(std::as_bytes(std::span(text))); }

}  // namespace chorus::io
