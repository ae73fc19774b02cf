/// Lab 15: saved by 4 ranks, read by 3. See README.md.

#include "reshard.hpp"

using namespace reshard_lab;

/// What `rank` of `read_by` ranks reads, from the files of `saved_by` ranks: each byte of a parameter in its parts
/// once, and no padding. `units`: the numbers of each unit; a number has 4 bytes. A rank's parts of all units lie one
/// after the other, in a file as in the memory that it reads to, and each of them is as long as on other ranks.
std::vector<Read> reads(std::span<const std::size_t> units, int saved_by, int read_by, int rank) {
  static_cast<void>(units);
  static_cast<void>(saved_by);
  static_cast<void>(read_by);
  static_cast<void>(rank);
  lab::hole("reads");
}

int main(int argc, char** argv) { return lab::run(argc, argv, title, check, {.reads = reads}); }
