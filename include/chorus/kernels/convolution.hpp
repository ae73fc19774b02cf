#pragma once
/// The convolution kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/convolution.hpp>
