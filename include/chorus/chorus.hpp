#pragma once
/// The headers that most programs need: tensors, the common operators, layers and optimizers, data, the policies
/// SingleDevice, DataParallel and DistributedDataParallel, and launch. <chorus/all.hpp> has the rest; each of its
/// headers can be included alone. It costs compile time, and reading model files needs a JSON parser.

// First: the requirements on the compiler and its settings.
#include <chorus/core/requirements.hpp>

#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/print.hpp>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/data/cifar10.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/data/mnist.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/data/synthetic_images.hpp>
#include <chorus/io/elsewhere.hpp>
#include <chorus/io/model_file.hpp>
#include <chorus/launch/launch.hpp>
#include <chorus/nn/activations.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/elsewhere.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/comparison.hpp>
#include <chorus/ops/convolution.hpp>
#include <chorus/ops/convolution1d.hpp>
#include <chorus/ops/creation.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/ops/in_place.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/padding.hpp>
#include <chorus/ops/pointwise.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/random.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/resize.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/ops/size2d.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/clip.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/optim/schedules.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <chorus/parallel/single_device.hpp>
#include <chorus/tensor/print.hpp>
#include <chorus/tensor/tensor.hpp>
#include <chorus/train/progress.hpp>

#if CHORUS_COMPILED
#include <chorus/compiled/extern.hpp>
#endif
#ifdef CHORUS_IMPLEMENTATION
#include <chorus/compiled/implementation.hpp>
#endif
