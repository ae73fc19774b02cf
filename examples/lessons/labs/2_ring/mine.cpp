/// Lab 2: write the ring. See README.md.

#include "ring.hpp"

/// data := the sum of all ranks' data, the same bits on every rank.
void all_reduce(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
  static_cast<void>(ranks);
  static_cast<void>(data);
  lab::hole("all_reduce");
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, ring_lab::title, ring_lab::check, {.all_reduce = all_reduce});
}
