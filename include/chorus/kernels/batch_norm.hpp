#pragma once
/// The batch_norm kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/batch_norm.hpp>
