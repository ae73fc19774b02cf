#pragma once
/// Picking by index, for every kind of device that this build has.

#include <chorus/kernels/cpu/indexing.hpp>
