#pragma once
/// Quantisation: models that train with rounded numbers, models of 8-bit integers, and their files. Contents, and the
/// connection to layers and operators: quantization/README.md.

#include <chorus/quantization/conv_bn_relu.hpp>
#include <chorus/quantization/ops/quantized.hpp>
#include <chorus/quantization/quantization_aware.hpp>
#include <chorus/quantization/quantized.hpp>
#include <chorus/quantization/quantized_file.hpp>
