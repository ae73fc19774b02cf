#pragma once
/// <chorus/chorus.hpp> and everything beside it that needs no library of its own: other policies, communication hooks,
/// sharded and fused optimizers, mixed precision, checkpoints, groups of ranks, further layers, losses and optimizers,
/// gradients of gradients. Engines of other libraries stay apart: <chorus/comm/mpi.hpp>, <chorus/comm/gloo.hpp>.

// First of all: what a compiler has to be and to be told.
#include <chorus/core/requirements.hpp>

#include <chorus/autograd/anomaly.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/autograd/custom_function.hpp>
#include <chorus/autograd/found_nodes.hpp>
#include <chorus/autograd/grad.hpp>
#include <chorus/chorus.hpp>
#include <chorus/comm/simulated/simulate.hpp>
#include <chorus/comm/simulated/trace_file.hpp>
#include <chorus/comm/split.hpp>
#include <chorus/comm/store.hpp>
#include <chorus/data/open_images.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/npy.hpp>
#include <chorus/io/npz.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/io/tensor_file.hpp>
#include <chorus/nn/attention.hpp>
#include <chorus/nn/convolutions.hpp>
#include <chorus/nn/group_norm.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/nn/more_activations.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/nn/positions.hpp>
#include <chorus/nn/recurrent.hpp>
#include <chorus/nn/transformer.hpp>
#include <chorus/nn/vocabulary_embedding.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/convolution3d.hpp>
#include <chorus/ops/ctc_loss.hpp>
#include <chorus/ops/dropout_variants.hpp>
#include <chorus/ops/einsum.hpp>
#include <chorus/ops/embedding.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/ops/interpolation.hpp>
#include <chorus/ops/more_activations.hpp>
#include <chorus/ops/more_losses.hpp>
#include <chorus/ops/norm.hpp>
#include <chorus/ops/padding_modes.hpp>
#include <chorus/ops/reduction_axes.hpp>
#include <chorus/ops/scatter.hpp>
#include <chorus/ops/sort.hpp>
#include <chorus/optim/averaging.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/optim/lion.hpp>
#include <chorus/optim/update_bn.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/hybrid_reduce_scatter.hpp>
#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <chorus/parallel/hooks/quantize.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/hooks/sparse_rows.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/mesh/axes.hpp>
#include <chorus/parallel/mesh/groups.hpp>
#include <chorus/parallel/mesh/policies.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/pipeline/layer_times.hpp>
#include <chorus/parallel/pipeline/staged_model.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <chorus/parallel/simulated/recorded.hpp>
#include <chorus/parallel/simulated/training.hpp>
#include <chorus/parallel/tensor/sequence_split.hpp>
#include <chorus/parallel/tensor/shared_layers.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <chorus/train/advice.hpp>
#include <chorus/train/trace_facts.hpp>
#include <chorus/train/trace_reader.hpp>

#if CHORUS_USE_CUDA
#include <chorus/parallel/cuda/graphed.hpp>
#endif
