#include <chorus/core/philox.hpp>
#include <chorus/core/random.hpp>

#include <catch.hpp>

namespace random_test {

namespace ch = chorus;

// Known answers of Random123 1.09, tests/kat_vectors, "philox4x32 10".
TEST_CASE("Philox gives the published numbers") {
  CHECK(ch::philox(0, {0, 0, 0, 0}) == ch::PhiloxWords{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(ch::philox(0xffffffffffffffff, {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}) ==
        ch::PhiloxWords{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(ch::philox(0x299f31d0a4093822, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}) ==
        ch::PhiloxWords{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  static_assert(ch::philox(0, {0, 0, 0, 0})[0] == 0x6627e8d5);
}

TEST_CASE("unit_float is in [0, 1)") {
  CHECK(ch::unit_float(0) == 0);
  CHECK(ch::unit_float(0xffffffff) < 1);
  CHECK(ch::unit_float(0x80000000) == 0.5f);
}

TEST_CASE("a seed starts the streams again") {
  ch::manual_seed(5);
  CHECK(ch::initial_seed() == 5);
  const auto first = ch::next_random_stream(), second = ch::next_random_stream();
  CHECK(second == first + 1);
  ch::manual_seed(5);
  CHECK(ch::next_random_stream() == first);
  ch::manual_seed(0);
}

TEST_CASE("random operations of a pass are numbered, and scopes nest") {
  ch::RandomContext context{.seed = 9, .step = 4, .first_sample = [] { return std::int64_t{12}; }};
  ch::RandomContext inner{.seed = 1, .first_sample = {}};
  {
    const ch::RandomScope scope(context);
    CHECK(ch::next_random_key(1).operation == 0);
    {
      const ch::RandomScope other(inner);
      CHECK(ch::next_random_key(1).seed == 1);
    }
    const auto key = ch::next_random_key(1);
    CHECK(key.seed == 9);
    CHECK(key.step == 4);
    CHECK(key.operation == 1);
    CHECK(key.first_sample == 12);
  }
  CHECK(ch::next_random_key(1).step != ch::next_random_key(1).step);
}

}  // namespace random_test
