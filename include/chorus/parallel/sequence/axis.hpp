#pragma once
/// mesh::Sequence: the axis of a Mesh along which ranks share the tokens of each sample. The Mesh itself needs
/// <chorus/parallel/mesh.hpp>.

#include <chorus/parallel/sequence/stretched.hpp>
#include <cstdint>
#include <utility>

namespace chorus {

namespace mesh {

template <class Policy, class Axes>
struct WithRooms;

/// Places of the same samples: see SequenceParallel. Ranks that differ only here have the same parameters, and
/// gradients are averaged over them as over those of Data.
template <int ranks>
struct Sequence {
  static_assert(ranks > 0, "Mesh: expected mesh::Sequence<ranks> of at least one rank");
  static constexpr int size = ranks, place = 4;
};

}  // namespace mesh

namespace sequence {

/// A mesh's policy among ranks that have shares of a batch or of its tokens.
template <class Policy, int ranks, bool staged>
struct InMesh : Stretched<Policy, staged> {
  /// See mesh::DataPolicy.
  template <class Part, class Groups, class Options>
  InMesh(Part part, Groups& groups, const Options& options, std::uint64_t seed)
      : Stretched<Policy, staged>(ring(groups), groups.sizes()[2], std::move(part), groups, options, seed) {}

 private:
  // Along the data axis the ranks of a ring are neighbours.
  template <class Groups>
  static Ring<comm::AnyCommunicator> ring(Groups& groups) {
    const int data = groups.place()[1], shard = groups.place()[2], shards = groups.sizes()[2];
    return {groups.batch, (data - data % ranks) * shards + shard, shards, ranks};
  }
};

}  // namespace sequence

template <class Policy, class Axes>
requires requires { Axes::sequence::place; }
struct mesh::WithRooms<Policy, Axes> {
  static_assert(!Axes::tensor::sequence::splits_sequences,
                "Mesh: mesh::Sequence divides sequences already: expected mesh::Tensor<ranks> without SequenceSplit");
  using type = sequence::InMesh<Policy, Axes::sequence::size, Axes::pipes>;
};

}  // namespace chorus
