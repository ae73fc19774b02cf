#pragma once
/// The optimizer kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/optimizer.hpp>
