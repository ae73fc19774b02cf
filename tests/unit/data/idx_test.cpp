#include <catch.hpp>
#include <chorus/data/idx.hpp>
#include <random>

#include "../peak_memory.hpp"
#include "files.hpp"

namespace idx_test {

namespace data = chorus::data;

std::string error_of(const std::string& path, int rank) {
  return message_of<chorus::FileError>([&] { data::read_idx(path, rank); });
}
const Bytes two_images = idx({2, 3, 4}, counting(24));

TEST_CASE("an IDX file is read with its sizes") {
  const TestFolder folder;
  const auto array = data::read_idx(folder.write("images", two_images), 3);
  CHECK(array.sizes == std::vector<chorus::Index>{2, 3, 4});
  CHECK(array.values == counting(24));
}

TEST_CASE("malformed IDX files are refused with path, expected and got") {
  const TestFolder folder;
  CHECK(error_of(folder.path() + "/none", 3) == folder.path() + "/none: No such file or directory");
  CHECK(error_of(folder.path(), 3) == folder.path() + " is not a regular file");

  auto path = folder.write("magic", idx({24}, counting(24)));
  CHECK(error_of(path, 3) == path + ": wrong magic number: expected 2051 (bytes in 3 axes), got 2049");

  path = folder.write("long", [] {
    auto bytes = two_images;
    bytes.push_back(0);
    return bytes;
  }());
  CHECK(error_of(path, 3) == path + ": sizes [2, 3, 4] need 40 bytes, the file has 41");

  path = folder.write("count", idx({3, 3, 4}, counting(24)));
  CHECK(error_of(path, 3) == path + ": sizes [3, 3, 4] need 52 bytes, the file has 40");

  path = folder.write("zero", idx({0, 3, 4}, {}));
  CHECK(error_of(path, 3) == path + ": axis 0 has size 0: the file has no values");

  // 2^32 * 2^32 * 2^32 would overflow to a small number.
  path = folder.write("wraps", idx({0x80000000u, 0x80000000u, 4}, counting(24)));
  CHECK(error_of(path, 3) == path + ": sizes [2147483648, 2147483648] are too large, the file has 40");
  path = folder.write("huge", idx({0xffffffffu, 1, 1}, counting(24)));
  CHECK(error_of(path, 3) == path + ": sizes [4294967295, 1, 1] need 4294967311 bytes, the file has 40");
}

TEST_CASE("an IDX file that is cut short anywhere is refused") {
  const TestFolder folder;
  for (std::size_t length = 0; length < two_images.size(); ++length) {
    const auto path = folder.write("cut", std::span(two_images).first(length));
    CHECK_THROWS_AS(data::read_idx(path, 3), chorus::FileError);
  }
  const auto path = folder.write("cut", std::span(two_images).first(7));
  CHECK(error_of(path, 3) == path + ": cut short: expected an IDX header of 16 bytes, got 7");
}

#if CHORUS_USE_ZLIB

TEST_CASE("a compressed IDX file gives the same values") {
  const TestFolder folder;
  const Bytes values = counting(70000);  // more than one buffer
  const auto array = data::read_idx(folder.write("images.gz", gzip(idx({70, 100, 10}, values))), 3);
  CHECK(array.sizes == std::vector<chorus::Index>{70, 100, 10});
  CHECK(array.values == values);
}

TEST_CASE("a compressed IDX file that is cut short anywhere is refused") {
  const TestFolder folder;
  const Bytes whole = gzip(two_images);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const auto path = folder.write("cut.gz", std::span(whole).first(length));
    CHECK_THROWS_AS(data::read_idx(path, 3), chorus::FileError);
  }
  const auto path = folder.write("cut.gz", std::span(whole).first(20));
  CHECK(error_of(path, 3) == path + ": cut short: the gzip data of 20 bytes have no end");
}

TEST_CASE("a compressed IDX file with any byte changed is refused or harmless") {
  const TestFolder folder;
  const Bytes whole = gzip(two_images);
  for (std::size_t at = 0; at < whole.size(); ++at)
    for (const int change : {0x01, 0x80, 0xff}) {
      Bytes bytes = whole;
      bytes[at] = static_cast<std::uint8_t>(bytes[at] ^ change);
      const auto path = folder.write("changed.gz", bytes);
      Bytes values = counting(24);
      try {
        values = data::read_idx(path, 3).values;
      } catch (const chorus::FileError&) {
        continue;
      }
      CHECK(values == counting(24));  // for example a change of gzip's time stamp
    }
}

TEST_CASE("memory for a compressed IDX file grows with what it holds, not with what its header says") {
  const TestFolder folder;
  Bytes noise(1 << 20);
  std::mt19937 random(1);
  for (auto& byte : noise) byte = static_cast<std::uint8_t>(random());
  const auto path = folder.write("images.gz", gzip(idx({1000, 1000, 900}, noise)));
  std::string message;
  CHECK(peak_memory_of([&] { message = error_of(path, 3); }) < 100 << 20);
  CHECK(message == path + ": cut short: expected 900000000 values, got 1048576");
}

TEST_CASE("malformed compressed IDX files are refused with path, expected and got") {
  const TestFolder folder;
  auto path = folder.write("plain.gz", two_images);
  CHECK(error_of(path, 3) == path + ": corrupt gzip data: incorrect header check");

  path = folder.write("short.gz", gzip(idx({3, 3, 4}, counting(24))));
  CHECK(error_of(path, 3) == path + ": cut short: expected 36 values, got 24");

  const std::string more = ": more data follow after the 24 values that its header declares";
  path = folder.write("long.gz", gzip(idx({2, 3, 4}, counting(25))));
  CHECK(error_of(path, 3) == path + more);
  path = folder.write("tail.gz", [] {
    auto bytes = gzip(two_images);
    bytes.push_back(0);
    return bytes;
  }());
  CHECK(error_of(path, 3) == path + more);

  // A small file must not make the reader allocate more than it can hold.
  const Bytes bomb = gzip(idx({60000, 1000, 60}, {}));
  path = folder.write("bomb.gz", bomb);
  CHECK(error_of(path, 3) ==
        chorus::cat(path, ": sizes [60000, 1000, 60] need 3600000016 bytes, the compressed file can't hold ",
                    "more than ", bomb.size() * 1032));
}

#else

TEST_CASE("without zlib a compressed file is refused with a way out") {
  const TestFolder folder;
  const auto path = folder.write("images.gz", two_images);
  CHECK(error_of(path, 3).find("was built without zlib") != std::string::npos);
}

#endif

}  // namespace idx_test
