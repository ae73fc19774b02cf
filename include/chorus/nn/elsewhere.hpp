#pragma once
/// Declarations of layers whose headers are not in <chorus/chorus.hpp>: compile errors then name the missing header.

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>

namespace chorus::nn {

template <Device D, Real T = float>
class MultiheadAttention;  // needs #include <chorus/nn/attention.hpp>
template <Device D, Real T = float>
class TransformerEncoderLayer;  // needs #include <chorus/nn/transformer.hpp>
template <Device D, Real T = float>
class TransformerDecoderLayer;  // needs #include <chorus/nn/transformer.hpp>
template <Device D, Real T = float>
class LSTM;  // needs #include <chorus/nn/recurrent.hpp>
template <Device D, Real T = float>
class GRU;  // needs #include <chorus/nn/recurrent.hpp>
template <Device D, Real T = float>
class GroupNorm;  // needs #include <chorus/nn/group_norm.hpp>
template <Device D, Real T = float>
class InstanceNorm;  // needs #include <chorus/nn/group_norm.hpp>
template <Device D, Real T = float>
class RMSNorm;  // needs #include <chorus/nn/group_norm.hpp>
template <Device D, Real T = float>
class Conv1d;  // needs #include <chorus/nn/convolutions.hpp>
template <Device D, Real T = float>
class Conv3d;  // needs #include <chorus/nn/convolutions.hpp>
template <Device D, Real T = float>
class ConvTranspose1d;  // needs #include <chorus/nn/convolutions.hpp>
template <Device D, Real T = float>
class ConvTranspose2d;  // needs #include <chorus/nn/convolutions.hpp>

}  // namespace chorus::nn
