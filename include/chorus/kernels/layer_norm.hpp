#pragma once
/// The layer_norm kernels for every kind of device that this build has.

#include <chorus/kernels/cpu/layer_norm.hpp>
