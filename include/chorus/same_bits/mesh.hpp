#pragma once
/// Mesh with canonical shares: its ranks that have other samples divide the shares.

#include <chorus/same_bits/model.hpp>
#include <utility>

namespace chorus {

struct MeshOptions;

namespace mesh {

class Groups;
template <class Model, class Axes, bool>
struct PartOf;

/// The policy among ranks with other samples takes SameBits; the mesh's module is the inner model.
template <class Model, int Shares, class Axes>
struct PartOf<SameBits<Model, Shares>, Axes, false> {
  static_assert(Axes::tensor::size == 1 && !Axes::tensor::shares_batch && Axes::sequence::size == 1,
                "Mesh: expected no axes but mesh::Data and mesh::Shard with SameBits: others add in another order");
  using whole = Model;
  using type = SameBits<Model, Shares>;
  static type make(type model, Groups&, const MeshOptions&) { return model; }
};
template <class Model, int Shares, class Axes>
struct PartOf<SameBits<Model, Shares>, Axes, true> : PartOf<SameBits<Model, Shares>, Axes, false> {
  static_assert(!Axes::pipes, "Mesh: expected no mesh::Pipe with SameBits, whose shares are not micro-batches");
};

}  // namespace mesh
}  // namespace chorus
