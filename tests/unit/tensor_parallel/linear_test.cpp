/// A pair of linear layers under TensorParallel: one device's steps, and what it sends.

#include <catch.hpp>
#include <chorus/core/trace.hpp>

#include "ranks.hpp"

namespace {

using namespace test::names;
using test::Pair, test::Shared;

TEST_CASE("TensorParallel: a pair of layers is trained as on one device, dropout included", "[tensor_parallel]") {
  for (const int ranks : {1, 2, 3, 4}) test::check_same_as_one_device<Pair<Cpu>>(ranks);
}

}  // namespace
