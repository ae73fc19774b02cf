#pragma once
/// The policy of a mesh's ranks that have shares of one batch.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/hooks/hybrid_reduce_scatter.hpp>
#include <chorus/parallel/mesh/axes.hpp>
#include <chorus/parallel/mesh/groups.hpp>
#include <chorus/parallel/pipeline/staged_model.hpp>
#include <chorus/parallel/tensor/shared_layers.hpp>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace chorus {

/// Options of Mesh.
struct MeshOptions {
  mesh::Sizes sizes = {};          ///< for axes that are mesh::dynamic
  int micro_batches = 8;           ///< of a pipeline: see PipelineOptions
  PipelineCut cut = EqualBytes{};  ///< of a pipeline
  bool broadcast_buffers = true;   ///< along the batch: see DistributedDataParallelOptions
  bool find_unused_parameters = false;
  int check_every = 100;  ///< see TensorParallelOptions
};

namespace mesh {

/// A rank's part of a model: all of it, or its stages. `whole`: what `module()` returns. A room specialises this for
/// its types around models.
template <class Model, class Axes, bool = Axes::pipes>
struct PartOf {
  using whole = Model;
  using type = Model;
  static Model make(Model model, Groups&, const MeshOptions&) { return model; }
};
template <class Model, class Axes>
struct PartOf<Model, Axes, true> {
  using whole = Model;
  using type = pipeline::StagedModel<Model, typename Axes::pipe::order>;
  static type make(Model model, Groups& groups, const MeshOptions& options) {
    return type(std::move(model), groups.pipe, groups.pipe_world,
                {.micro_batches = options.micro_batches, .cut = options.cut});
  }
};

/// Averages gradients on a mesh without shards.
template <class Part>
struct DataPolicy : DistributedDataParallel<Part> {
  DataPolicy(Part part, Groups& groups, const MeshOptions& options, std::uint64_t seed)
      : DistributedDataParallel<Part>(
            std::move(part), groups.batch,
            {.broadcast_buffers = options.broadcast_buffers, .find_unused_parameters = options.find_unused_parameters},
            seed) {}
};

/// Shards parameters and averages gradients on a mesh with shards.
template <class Part, class Units>
struct ShardPolicy
    : FullyShardedDataParallel<Part, Units, comm::AnyCommunicator, HybridReduceScatter<comm::AnyCommunicator>> {
  ShardPolicy(Part part, Groups& groups, const MeshOptions& options, std::uint64_t seed)
      : ShardPolicy::FullyShardedDataParallel(
            std::move(part), groups.batch, groups.gathers,
            {.broadcast_buffers = options.broadcast_buffers, .find_unused_parameters = options.find_unused_parameters},
            seed, {&groups.shards(), &groups.replicas}) {}
};

/// A policy, with what an axis of a room adds to it: a room specialises this.
template <class Policy, class Axes>
struct WithRooms {
  using type = Policy;
};

/// The policy of a mesh among the ranks that have shares of a batch.
template <class Model, class Axes>
using BatchPolicy = typename WithRooms<
    std::conditional_t<Axes::shards, ShardPolicy<typename PartOf<Model, Axes>::type, typename Axes::shard::units>,
                       typename Axes::tensor::template policy<typename PartOf<Model, Axes>::type>>,
    Axes>::type;

}  // namespace mesh
}  // namespace chorus
