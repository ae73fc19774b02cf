#pragma once
/// Lab 15: what the student's code is.

#include "../lab.hpp"

namespace reshard_lab {

inline constexpr const char* title = "Lab 15: saved by 4 ranks, read by 3";

/// `bytes` bytes from byte `from` of file `file`, which go to byte `to` of this rank's parameters.
struct Read {
  int file;
  std::size_t from, bytes, to;
};
struct Code {
  std::function<std::vector<Read>(std::span<const std::size_t> units, int saved_by, int read_by, int rank)> reads;
};
/// Saves and reads checkpoints, measures what is read, and judges the code.
void check(lab::Lab& lab, const Code& code);

}  // namespace reshard_lab
