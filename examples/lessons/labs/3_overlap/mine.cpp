/// Lab 3: overlap. See README.md.

#include "overlap.hpp"

/// The largest size of the first bucket and of all others, in MiB.
overlap_lab::Caps caps() { lab::hole("caps"); }

int main(int argc, char** argv) {
  return lab::run(argc, argv, overlap_lab::title, overlap_lab::check, {.caps = caps});
}
