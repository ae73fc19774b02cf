/// Lab 2: write the ring. See README.md.

#include "ring.hpp"

struct Mine {
  /// data := the sum of all ranks' data, the same bits on every rank.
  static void all_reduce(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
    static_cast<void>(ranks);
    static_cast<void>(data);
    lab::hole("all_reduce");
  }
};

int main(int argc, char** argv) { return lab::run(argc, argv, ring_lab::title, ring_lab::run<Mine>); }
