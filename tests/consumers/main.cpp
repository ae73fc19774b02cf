// The program of every consumer project.
#include <cstdio>

#include <chorus/chorus.hpp>

int main() {
  const auto words = chorus::philox(0, {0, 0, 0, 0});
  std::printf("chorus %d.%d.%d, zlib %d, Philox %08x\n", CHORUS_VERSION_MAJOR, CHORUS_VERSION_MINOR,
              CHORUS_VERSION_PATCH, CHORUS_USE_ZLIB, static_cast<unsigned>(words[0]));
  return words[0] == 0x6627e8d5u ? 0 : 1;
}
