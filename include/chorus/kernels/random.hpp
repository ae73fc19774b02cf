#pragma once
/// The random kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/random.hpp>
