#pragma once
/// Running sums, for every kind of device that this build has.

#include <chorus/kernels/cpu/cumulative.hpp>
