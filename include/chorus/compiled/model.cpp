// Part of the library chorus::compiled: tensors, nodes, operations and layers of float on the CPU.

#define CHORUS_BUILDS_LIBRARY
#define CHORUS_EXTERN
#include <chorus/compiled/extern.hpp>
