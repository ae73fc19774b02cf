#include <catch.hpp>
#include <chorus/tensor/size_class.hpp>

namespace size_class_test {

template <std::size_t Smallest>
void check_classes() {
  std::size_t last_list = 0, last_bytes = 0;
  for (std::size_t bytes = 0; bytes < (std::size_t{1} << 40); bytes = bytes * 17 / 16 + 1) {
    const auto [list, rounded] = chorus::size_class<Smallest>(bytes);
    CAPTURE(bytes, list, rounded);
    REQUIRE(list < chorus::size_classes);
    REQUIRE(rounded >= bytes);
    REQUIRE(rounded % Smallest == 0);
    if (bytes > 4 * Smallest) REQUIRE(rounded <= bytes + bytes / 4);
    // Each class has one size, increasing with its index; a rounded size maps to its own class.
    REQUIRE((list == last_list ? rounded == last_bytes || last_bytes == 0 : list > last_list && rounded > last_bytes));
    REQUIRE(chorus::size_class<Smallest>(rounded).list == list);
    REQUIRE(chorus::size_class<Smallest>(rounded).bytes == rounded);
    last_list = list;
    last_bytes = rounded;
  }
}

TEST_CASE("size classes grow by at most a quarter, and number their sizes") {
  check_classes<64>();
  check_classes<256>();
}

TEST_CASE("the first size classes") {
  CHECK(chorus::size_class<256>(0).bytes == 256);
  CHECK(chorus::size_class<256>(1024).bytes == 1024);
  CHECK(chorus::size_class<256>(1025).bytes == 1280);
  CHECK(chorus::size_class<256>(1024).list + 1 == chorus::size_class<256>(1025).list);
}

}  // namespace size_class_test
