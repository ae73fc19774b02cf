#include <catch.hpp>

#include <string>
#include <string_view>

#include <chorus/io/sha256.hpp>

namespace sha256_test {

using namespace chorus;

#if CHORUS_USE_OPENSSL

TEST_CASE("SHA-256 of the examples of FIPS 180-2") {
  CHECK(io::sha256_hex("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(io::sha256_hex("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(io::sha256_hex(std::string(1'000'000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("SHA-256 of pieces is that of the whole, and can be asked for between") {
  io::Sha256 hash;
  hash.update("a");
  CHECK(hash.hex() == io::sha256_hex("a"));
  hash.update("");
  hash.update("bc");
  CHECK(hash.hex() == io::sha256_hex("abc"));
  CHECK(hash.hex() == io::sha256_hex("abc"));
}

#else

TEST_CASE("without OpenSSL, SHA-256 says what is missing") {
  CHECK_FALSE(io::Sha256::available);
  CHECK_THROWS_WITH(io::Sha256{},
                    "SHA-256: this program was built without OpenSSL (CHORUS_USE_OPENSSL=0): install libssl-dev "
                    "and build it again");
}

#endif

}  // namespace sha256_test
