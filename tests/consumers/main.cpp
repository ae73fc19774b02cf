// The program of every consumer project. That the headers, what they include and what they link are found is asked here;
// all of chorus.hpp is compiled elsewhere.
#include <chorus/core/random.hpp>
#include <chorus/data/images/decode.hpp>
#include <chorus/data/mnist.hpp>
#include <cstdio>

#if !__has_include(<Eigen/Core>) || !__has_include(<nlohmann/json.hpp>)
#error "Eigen and nlohmann/json come with chorus"
#endif

int main() {
  const auto words = chorus::philox(0, {0, 0, 0, 0});
  std::printf("chorus %d.%d.%d, zlib %d, libpng %d, libjpeg %d, Philox %08x\n", CHORUS_VERSION_MAJOR,
              CHORUS_VERSION_MINOR, CHORUS_VERSION_PATCH, CHORUS_USE_ZLIB, CHORUS_USE_PNG, CHORUS_USE_JPEG,
              static_cast<unsigned>(words[0]));
  try {
    chorus::data::decode_image({});
    return 1;
  } catch (const chorus::FileError&) {
  }
  try {
    chorus::data::Mnist("no such folder");
  } catch (const chorus::FileError& error) {
    return words[0] == 0x6627e8d5u ? 0 : 1;
  }
  return 1;
}
