#pragma once
/// Element-wise kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/pointwise.hpp>
