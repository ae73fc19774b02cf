// CIFAR-10's records. They are large, so the input says what isn't zero in them: a length, then places and bytes.
#include <chorus/data/cifar10.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(cifar10) {
  using namespace chorus;
  static const fuzz::Folder folder;
  fuzz::Parts parts(input);
  std::vector<std::uint8_t> content(parts.number(2) % (3 * 3073 + 2));
  while (!parts.empty()) {
    const auto place = parts.number(2);
    const auto value = static_cast<std::uint8_t>(parts.number());
    if (place < content.size()) content[place] = value;
  }
  folder.put("test_batch.bin", content);
  const data::Cifar10 images(folder.path(), data::Split::test);
  FUZZ_REQUIRE(static_cast<std::size_t>(images.size()) * 3073 == content.size());
}
