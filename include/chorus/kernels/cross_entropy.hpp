#pragma once
/// The cross_entropy kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/cross_entropy.hpp>
