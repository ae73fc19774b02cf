#pragma once
/// The pooling kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/pooling.hpp>
