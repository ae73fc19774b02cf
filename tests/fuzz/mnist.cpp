// A folder of MNIST: images and labels that have to fit each other, the labels compressed in every other input.
#include <chorus/data/open_images.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(mnist) {
  using namespace chorus;
  static const fuzz::Folder folder, zipped;
  fuzz::Parts parts(input);
  const bool gz = parts.number() % 2 == 1;
  const auto& where = gz ? zipped : folder;
  where.put("train-images-idx3-ubyte", parts.bytes(parts.number(2)));
  where.put(gz ? "train-labels-idx1-ubyte.gz" : "train-labels-idx1-ubyte", parts.rest());
  const auto images = data::open_images(where.path());
  FUZZ_REQUIRE(images.size() > 0 && images.size() < static_cast<Index>(input.size()));
}
