// Arrays of IDX files.
#include <chorus/data/idx.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(idx) {
  using namespace chorus;
  fuzz::Parts parts(input);
  const int rank = 1 + static_cast<int>(parts.number() % 4);
  const fuzz::MemoryFile file(parts.rest());
  const auto array = data::read_idx(file.path(), rank);
  std::size_t count = 1;
  for (const Index size : array.sizes) count *= static_cast<std::size_t>(size);
  FUZZ_REQUIRE(array.sizes.size() == static_cast<std::size_t>(rank) && count == array.values.size());
  FUZZ_REQUIRE(count < input.size());
}
