// Part of the library chorus::compiled: canonical shares on the CPU.

#define CHORUS_BUILDS_LIBRARY
#include <chorus/same_bits.hpp>

namespace chorus {

template class same_bits::BucketSums<Cpu, comm::AnyCommunicator>;
template class same_bits::DeviceShares<Cpu>;
template class same_bits::EarlierGradients<Cpu>;
template class same_bits::GradientCopy<Cpu>;
template class same_bits::GradientTree<Cpu>;
template class same_bits::ShareBuffers<Cpu>;
template class same_bits::SideBySide<Cpu>;

}  // namespace chorus
