/// Transformers under TensorParallel: heads, features, and words of the vocabulary are shared out.

#include "models.hpp"

#include <catch.hpp>

namespace {

namespace ch = chorus;
using namespace test::names;
using test::Tied, test::Untied;

TEST_CASE("TensorParallel: transformers are trained as on one device", "[tensor_parallel]") {
  for (const int ranks : {2, 3, 4}) test::check_same_as_one_device<Untied<Cpu>>(ranks);
}

TEST_CASE("TensorParallel: a table and a head with one weight are trained as on one device", "[tensor_parallel]") {
  for (const int ranks : {2, 3}) test::check_same_as_one_device<Tied<Cpu>>(ranks);
}

}  // namespace
