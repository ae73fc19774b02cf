#pragma once
/// Matrix products for every kind of device that this build has.

#include <chorus/kernels/cpu/gemm.hpp>
