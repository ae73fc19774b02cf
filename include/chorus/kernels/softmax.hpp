#pragma once
/// The softmax kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/softmax.hpp>
