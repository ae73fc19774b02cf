#pragma once
/// Expert parallelism (GShard, Lepikhin et al. 2021): the experts of nn::MixtureOfExperts live on different ranks.

#include <chorus/parallel/expert/shared_experts.hpp>
#include <chorus/parallel/mesh.hpp>
#include <cstdint>
#include <utility>

namespace chorus::mesh {

/// DistributedDataParallel, except for experts: each rank has some, and they get their gradients from their tokens.
template <class Part>
struct ExpertPolicy : DistributedDataParallel<Part> {
  ExpertPolicy(Part part, Groups& groups, const MeshOptions& options, std::uint64_t seed)
      : ExpertPolicy(options_for(part, options), part, groups, seed) {}

 private:
  ExpertPolicy(const DistributedDataParallelOptions& options, Part& part, Groups& groups, std::uint64_t seed)
      : DistributedDataParallel<Part>(std::move(part), groups.batch, options, seed) {}
  static DistributedDataParallelOptions options_for(Part& part, const MeshOptions& options) {
    DistributedDataParallelOptions out{.broadcast_buffers = options.broadcast_buffers,
                                       .find_unused_parameters = options.find_unused_parameters};
    using D = typename nn::detail::DeviceOfModel<Part>::type;
    for (const auto& named : nn::named_parameters<D>(part))
      if (named.parameter->part() != nullptr) out.parameters_and_buffers_to_ignore.push_back(named.name);
    return out;
  }
};

/// Ranks that have other experts of each nn::MixtureOfExperts, other shares of the batch, and all else of the model.
/// Their tokens go to the experts and back in two all-to-alls. The innermost axis of a Mesh, alone or inside of Data.
template <int ranks>
struct Expert {
  static_assert(ranks > 0 || ranks == rest, "mesh::Expert: expected a number of ranks, or mesh::rest");
  static constexpr int size = ranks, place = 3;
  using sequence = NoSequenceSplit;
  static constexpr bool shares_batch = true;
  static constexpr const char* name = "Expert";
  template <class Communicator>
  using layers = chorus::detail::SharedExperts<Communicator>;
  template <class Groups, class Model>
  static auto layers_of(Groups& groups, const Model&) {
    return layers<typename Groups::Communicator>(groups.all(), groups.tensor, groups.replicas);
  }
  template <class Part>
  using policy = ExpertPolicy<Part>;
};

}  // namespace chorus::mesh

namespace chorus {

/// All ranks along the axis Expert.
template <class Model>
using ExpertParallel = Mesh<Model, mesh::Expert<mesh::rest>>;

}  // namespace chorus
