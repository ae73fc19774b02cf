#pragma once
/// What programs need not instantiate, because the library chorus::compiled holds it: included by chorus.hpp where
/// CHORUS_COMPILED is 1, and by the library itself, which defines CHORUS_EXTERN to nothing.
///
/// Write long bodies of these classes outside of the class: g++ instantiates what stands inside, for inlining, in spite
/// of `extern template`. A function that returns `auto` is instantiated in any case;
/// [[gnu::noinline]] keeps its code out of the program.

#include <chorus/core/error.hpp>
#include <chorus/data/cifar10.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/mnist.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/launch/run.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/convolution.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>

#ifndef CHORUS_EXTERN
#define CHORUS_EXTERN extern
#endif

namespace chorus {

namespace detail {
template <int Rank>
using Value = Variable<float, Rank, Cpu>;
}

CHORUS_EXTERN template void detail::throw_joined<DeviceError>(std::initializer_list<detail::Part>);
CHORUS_EXTERN template void detail::throw_joined<ShapeError>(std::initializer_list<detail::Part>);
CHORUS_EXTERN template void detail::throw_joined<UsageError>(std::initializer_list<detail::Part>);
CHORUS_EXTERN template void append(std::string&, const Cpu&);
CHORUS_EXTERN template int detail::to_number(const char*, std::string_view);
CHORUS_EXTERN template double detail::to_number(const char*, std::string_view);
CHORUS_EXTERN template Index detail::to_number(const char*, std::string_view);

CHORUS_EXTERN template class Tensor<std::int64_t, 1, Cpu>;
CHORUS_EXTERN template void detail::out_of_memory(Cpu, std::size_t, std::string_view);
CHORUS_EXTERN template class CachingAllocator<Cpu>;
CHORUS_EXTERN template void detail::move_numbers(nn::Module&, Cpu);
CHORUS_EXTERN template class Storage<Cpu>;

// Tensors, nodes and shapes of each rank.
#define CHORUS_RANK(R)                                       \
  CHORUS_EXTERN template class Tensor<float, R, Cpu>;        \
  CHORUS_EXTERN template class GradNode<float, R, Cpu>;      \
  CHORUS_EXTERN template class LeafNode<float, R, Cpu>;      \
  CHORUS_EXTERN template class Variable<float, R, Cpu>;      \
  CHORUS_EXTERN template class ParameterNode<float, R, Cpu>; \
  CHORUS_EXTERN template detail::Value<R> detail::map(const char*, const functors::Relu&, const detail::Value<R>&);
CHORUS_RANK(1)
CHORUS_RANK(2)
CHORUS_RANK(3)
CHORUS_RANK(4)
#undef CHORUS_RANK
// Before version 16, clang instantiates members whose constraints don't hold; there, who uses these has a copy.
#if !defined(__clang__) || __clang_major__ >= 16
CHORUS_EXTERN template class Tensor<float, 0, Cpu>;
CHORUS_EXTERN template class optim::Optimizer<Cpu>;
#endif
CHORUS_EXTERN template class GradNode<float, 0, Cpu>;
CHORUS_EXTERN template class Variable<float, 0, Cpu>;

CHORUS_EXTERN template detail::Value<2> operations::reshape(const detail::Value<4>&, const std::array<Index, 2>&);
CHORUS_EXTERN template detail::Value<2> operations::linear(const detail::Value<2>&, const detail::Value<2>&,
                                                           const detail::Value<1>&);
CHORUS_EXTERN template detail::Value<3> operations::linear(const detail::Value<3>&, const detail::Value<2>&,
                                                           const detail::Value<1>&);
CHORUS_EXTERN template detail::Value<4> operations::conv2d(const detail::Value<4>&, const detail::Value<4>&,
                                                           const detail::Value<1>&, const Conv2dOptions&);
CHORUS_EXTERN template detail::Value<4> operations::max_pool2d(const detail::Value<4>&, Size2d, const PoolOptions&);
CHORUS_EXTERN template detail::Value<0> detail::reduced_cross_entropy(const detail::Value<2>&,
                                                                      const Tensor<std::int64_t, 1, Cpu>&,
                                                                      const CrossEntropyOptions&);

CHORUS_EXTERN template auto relu(const detail::Value<2>&);
CHORUS_EXTERN template auto relu(const detail::Value<4>&);
CHORUS_EXTERN template auto max_pool2d(const detail::Value<4>&, Size2d, const PoolOptions&);
CHORUS_EXTERN template auto nn::Linear<Cpu, float>::operator()(const chorus::detail::Value<2>&) const;
CHORUS_EXTERN template auto nn::Linear<Cpu, float>::operator()(const Tensor<float, 2>&) const;
CHORUS_EXTERN template auto nn::Conv2d<Cpu, float>::operator()(const chorus::detail::Value<4>&) const;
CHORUS_EXTERN template auto nn::Conv2d<Cpu, float>::operator()(const Tensor<float, 4>&) const;

CHORUS_EXTERN template class data::DataLoader<data::Cifar10>;
CHORUS_EXTERN template class data::DataLoader<data::ImageDataset>;
CHORUS_EXTERN template class data::DataLoader<data::Mnist>;
CHORUS_EXTERN template class data::DataLoader<data::SyntheticImages>;
CHORUS_EXTERN template class nn::Linear<Cpu, float>;
CHORUS_EXTERN template class nn::detail::ConvolutionBase<4, Cpu, float>;
CHORUS_EXTERN template class nn::Conv2d<Cpu, float>;
CHORUS_EXTERN template class optim::Sgd<Cpu>;
CHORUS_EXTERN template class PolicyOn<Cpu>;
CHORUS_EXTERN template class PolicyOfRanks<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class detail::BatchShares<comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::Accumulation<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::BufferSharing<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::IgnoredParameters<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::Clock<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::Core<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::FrozenParameters<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::LearnedOrder<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::NonFiniteGradients<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::ShadowPasses<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template DistributedDataParallelOptions DistributedDataParallelOptions::checked_for<Cpu>(
    nn::Module&) const;
CHORUS_EXTERN template std::string DistributedDataParallelOptions::describe<Cpu>() const;
CHORUS_EXTERN template class ddp::PolicyWithOptions<Cpu, AllReduce, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::Reducer<Cpu, AllReduce, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::SameProgram<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::SeveralNets<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::StaticGraph<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::Traced<Cpu, comm::AnyCommunicator>;
CHORUS_EXTERN template class ddp::UnusedParameters<Cpu, comm::AnyCommunicator>;

}  // namespace chorus
