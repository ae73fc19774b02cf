#pragma once
/// The dropout kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/dropout.hpp>
