/// Lab 3: overlap. See README.md.

#include "overlap.hpp"

struct Mine {
  /// The largest size of the first bucket and of all others, in MiB.
  static overlap_lab::Caps caps() { lab::hole("caps"); }
};

int main(int argc, char** argv) { return lab::run(argc, argv, overlap_lab::title, overlap_lab::run<Mine>); }
