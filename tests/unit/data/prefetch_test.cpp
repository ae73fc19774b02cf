#include <catch.hpp>
#include <chorus/data/prefetch.hpp>

#include "files.hpp"

namespace prefetch_test {

using chorus::Index;
using chorus::data::Prefetch;

TEST_CASE("items come in order, from the first to the last") {
  const int workers = GENERATE(0, 1, 4, 20);
  Prefetch<Index> squares(3, 10, workers, 2, [](Index i) { return i * i; });
  for (Index i = 3; i < 10; ++i) CHECK(squares.next() == i * i);
  CHECK(!squares.next());
  CHECK(!squares.next());
}

TEST_CASE("after an exception there are no more items") {
  const int workers = GENERATE(0, 1, 4);
  Prefetch<Index> items(0, 10, workers, 3, [](Index i) {
    chorus::check<chorus::UsageError>(i != 4, "item ", i, " is broken");
    return i;
  });
  for (Index i = 0; i < 4; ++i) CHECK(items.next() == i);
  CHECK(message_of<chorus::UsageError>([&] { items.next(); }) == "item 4 is broken");
  CHECK(!items.next());
}

TEST_CASE("a prefetch of nothing ends at once, and an unread one can be destroyed") {
  CHECK(!Prefetch<Index>(5, 5, 2, 2, [](Index i) { return i; }).next());
  for (int i = 0; i < 100; ++i) Prefetch<Index>(0, 1000, 3, 2, [](Index item) { return item; });
}

}  // namespace prefetch_test
