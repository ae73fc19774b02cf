#pragma once
/// Mesh with canonical shares: its ranks that have other samples divide the shares, those that share layers divide the
/// leaves of products, and a rank's shares are the micro-batches of a pipeline.

#include <chorus/parallel/mesh.hpp>
#include <chorus/same_bits/checked_shares.hpp>
#include <chorus/same_bits/distributed_policy.hpp>
#include <chorus/same_bits/leaf_group.hpp>
#include <chorus/same_bits/model.hpp>
#include <chorus/same_bits/side_by_side.hpp>
#include <chorus/same_bits/staged_shares.hpp>
#include <cstddef>
#include <memory>
#include <utility>

namespace chorus::mesh {

template <class Model, int Shares>
struct LayerGroup<SameBits<Model, Shares>> {
  template <class Communicator>
  static std::shared_ptr<chorus::detail::CommunicatorGroup<Communicator>> make(const SameBits<Model, Shares>& model,
                                                                       Communicator& communicator, bool) {
    return std::make_shared<same_bits::SharedInLeaves<Communicator>>(
        communicator, same_bits::checked_shares(model.shares(), 1, 0));
  }
};

/// What parts of a model with canonical shares have in common.
template <class Model, int Shares, class Axes>
struct PartInShares {
  static_assert(!Axes::tensor::shares_batch && Axes::sequence::size == 1 && !Axes::tensor::sequence::splits_sequences,
                "Mesh: expected mesh::Pipe, Data, Shard and Tensor with SameBits: others add in another order");
  static_assert(!Axes::pipes || !Axes::shards,
                "Mesh: expected mesh::Pipe or mesh::Shard with SameBits, not both: stages keep their units");
  using whole = Model;

 protected:
  static void check_ranks(SameBits<Model, Shares>& model, Groups& groups) {
    chorus::detail::check_same_description(groups.all(), "Mesh", cat("SameBits of ", model.shares(), " shares\n"));
    check<UsageError>(groups.tensor.size() == 1 || !same_bits::needs_whole_batch(model.model()),
                      "Mesh: SameBits computes shares one after the other where ranks share layers, and a layer, such "
                      "as SyncBatchNorm, needs the whole batch: expected BatchNorm, or no mesh::Tensor");
  }
};

/// The policy among ranks with other samples takes SameBits; the mesh's module is the inner model.
template <class Model, int Shares, class Axes>
struct PartOf<SameBits<Model, Shares>, Axes, false> : PartInShares<Model, Shares, Axes> {
  using type = SameBits<Model, Shares>;
  static type make(type model, Groups& groups, const MeshOptions&) {
    PartOf::check_ranks(model, groups);
    return model;
  }
};
/// The same of its stages.
template <class Model, int Shares, class Axes>
struct PartOf<SameBits<Model, Shares>, Axes, true> : PartInShares<Model, Shares, Axes> {
  using Staged = pipeline::StagedModel<Model, typename Axes::pipe::order>;
  using type = SameBits<Staged, Shares>;
  static type make(SameBits<Model, Shares> model, Groups& groups, const MeshOptions& options) {
    PartOf::check_ranks(model, groups);
    const int shares = model.shares();
    Staged staged(std::move(model.model()), groups.pipe, groups.pipe_world, {.micro_batches = 1, .cut = options.cut});
    if constexpr (Shares == 0)
      return type(std::move(staged), shares);
    else
      return type(std::move(staged));
  }
};

}  // namespace chorus::mesh
