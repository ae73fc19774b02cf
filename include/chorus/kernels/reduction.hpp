#pragma once
/// The reduction kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/reduction.hpp>
