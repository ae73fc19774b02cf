#pragma once
/// What holds of each image that is decoded.

#include <chorus/data/image_folder.hpp>

#include "fuzz.hpp"

namespace fuzz_images {

inline void decode(fuzz::Bytes input) {
  using namespace chorus;
  const data::Picture picture = data::decode_image(input, "FILE");
  FUZZ_REQUIRE(picture.height() >= 1 && picture.width() >= 1);
  FUZZ_REQUIRE(picture.width() <= data::Picture::most_pixels / picture.height());
  std::size_t sum = 0;
  for (const std::uint8_t byte : picture.pixels()) sum += byte;
  FUZZ_REQUIRE(sum <= picture.pixels().size() * 255);
  data::RandomStream random(1, data::Purpose::augment, 0, static_cast<Index>(input.size()));
  const auto image = data::framed(picture, data::RandomResizedCrop{5}(picture.height(), picture.width(), random));
  for (Index i = 0; i < image.numel(); ++i) FUZZ_REQUIRE(image.data()[i] >= 0 && image.data()[i] <= 1.0001f);
}

}  // namespace fuzz_images
