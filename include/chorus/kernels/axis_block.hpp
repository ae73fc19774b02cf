#pragma once
/// Ranges of an axis, for every kind of device that this build has.

#include <chorus/kernels/cpu/axis_block.hpp>
