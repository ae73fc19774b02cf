// Files of torch.save: whatever their pickle says, tensors stay in their storages.
#include <chorus/io/pt.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(pt) {
  using namespace chorus;
  fuzz::Parts parts(input);
  const auto from = parts.number() % 2 == 0 ? "" : "model";
  const fuzz::MemoryFile memory(parts.rest());
  const io::PtReader file(memory.path(), from);
  for (const auto& entry : file.entries()) {
    FUZZ_REQUIRE(file.find(entry.name) == &entry && entry.bytes <= input.size());
    std::vector<std::byte> numbers(entry.bytes);
    file.read(entry, numbers);
  }
}
