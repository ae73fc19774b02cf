#pragma once
/// The axes of a Mesh: the dimensions along which ranks divide the work.

#include <array>
#include <chorus/core/error.hpp>
#include <chorus/parallel/fsdp/units.hpp>
#include <chorus/parallel/pipeline/schedule.hpp>
#include <chorus/parallel/tensor/group.hpp>
#include <chorus/parallel/tensor/sequence_split.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace chorus::detail {
template <class Communicator>
class SharedLayers;
}

namespace chorus::mesh {

template <class Part>
struct DataPolicy;

/// The ranks that share layers, as the model's layers see them. A room specialises this for its types around models.
template <class Model>
struct LayerGroup {
  template <class Communicator>
  static auto make(const Model&, Communicator& communicator, bool splits_sequences) {
    return std::make_shared<chorus::detail::CommunicatorGroup<Communicator>>(communicator, splits_sequences);
  }
};

/// An axis's size: all remaining ranks. At most one axis may have it.
inline constexpr int rest = -1;
/// An axis's size: taken from MeshOptions::sizes.
inline constexpr int dynamic = 0;

/// The sizes of the axes that are mesh::dynamic. One may be mesh::rest.
struct Sizes {
  int pipe = 1, data = 1, shard = 1, tensor = 1;
};

/// Stages of a pipeline: see Pipeline.
template <int ranks, class Order = OneForwardOneBackward>
struct Pipe {
  static constexpr int size = ranks, place = 0;
  using order = Order;
};
/// Shares of the batch; each rank has the whole model: see DistributedDataParallel.
template <int ranks>
struct Data {
  static constexpr int size = ranks, place = 1;
};
/// Shares of the batch; each rank keeps a part of each parameter: see FullyShardedDataParallel. In a pipeline use
/// KeepParameters, as each micro-batch needs every unit again.
template <int ranks, class Units = ByBytes<>>
struct Shard {
  static constexpr int size = ranks, place = 2;
  using units = Units;
};
/// Divided layers: see TensorParallel.
template <int ranks, class Sequence = NoSequenceSplit>
struct Tensor {
  static constexpr int size = ranks, place = 3;
  using sequence = Sequence;
  static constexpr bool shares_batch = false;  ///< whether its ranks have other shares of the batch
  static constexpr const char* name = "Tensor";
  template <class Communicator>
  using layers = chorus::detail::SharedLayers<Communicator>;
  /// What divides a model's layers among its ranks.
  template <class Groups, class Model>
  static auto layers_of(Groups& groups, const Model& model) {
    using Communicator = typename Groups::Communicator;
    return layers<Communicator>(groups.tensor,
                                LayerGroup<Model>::make(model, groups.tensor, sequence::splits_sequences));
  }
  /// Averages gradients on a mesh without shards.
  template <class Part>
  using policy = DataPolicy<Part>;
};

/// The pipe axis of a mesh without one.
using NoPipe = Pipe<1>;
/// The data axis of a mesh without one.
using NoData = Data<1>;
/// The shard axis of a mesh without one.
using NoShard = Shard<1>;
/// The tensor axis of a mesh without one.
using NoTensor = Tensor<1>;
/// The sequence axis of a mesh without one. mesh::Sequence needs <chorus/parallel/sequence_parallel.hpp>.
struct NoSequence {
  static constexpr int size = 1;
};

namespace detail {
template <int place, class Default, class... Axes>
struct AxisAt {
  using type = Default;
};
template <int place, class Default, class First, class... Rest>
struct AxisAt<place, Default, First, Rest...> {
  using type = typename std::conditional_t<First::place == place, std::type_identity<First>,
                                           AxisAt<place, Default, Rest...>>::type;
};
// mesh::Sequence has place 4. It divides Data's ranks, so it stands behind Data.
template <class Axis>
inline constexpr int order_of = Axis::place == 4 ? 3 : 2 * Axis::place;
template <class... Axes>
constexpr bool in_order() {
  [[maybe_unused]] int last = -1;
  return ((std::exchange(last, order_of<Axes>) < order_of<Axes>) && ...);
}
}  // namespace detail

/// Whether a mesh may have these axes: outermost first, in the order Pipe, Data, Sequence, Shard, Tensor, each once.
/// Ranks next to each other on the innermost axis communicate most.
template <class... Axes>
inline constexpr bool valid = sizeof...(Axes) > 0 && detail::in_order<Axes...>();

/// A mesh's axes, in order, and their sizes.
template <class... Axes>
struct AxesOf {
  using pipe = typename detail::AxisAt<0, NoPipe, Axes...>::type;
  using data = typename detail::AxisAt<1, NoData, Axes...>::type;
  using shard = typename detail::AxisAt<2, NoShard, Axes...>::type;
  using tensor = typename detail::AxisAt<3, NoTensor, Axes...>::type;
  using sequence = typename detail::AxisAt<4, NoSequence, Axes...>::type;
  static constexpr bool pipes = (... || (Axes::place == 0)), shards = (... || (Axes::place == 2));

  static constexpr std::array<int, 4> declared{pipe::size, data::size, shard::size, tensor::size};

  /// The sizes for `world` ranks: of the data axis with the ranks of the sequence axis in it. Throws UsageError if they
  /// don't fit.
  static std::array<int, 4> sizes(int world, const Sizes& chosen) {
    static_assert(((Axes::size >= dynamic || Axes::size == rest) && ...),
                  "Mesh: expected at least one rank for an axis, or mesh::rest, or mesh::dynamic");
    static_assert(((Axes::size == rest ? 1 : 0) + ... + 0) <= 1, "Mesh: expected one mesh::rest at most");
    auto all = declared;
    const int given[] = {chosen.pipe, chosen.data, chosen.shard, chosen.tensor};
    int product = sequence::size, open = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i] == dynamic) all[i] = given[i];
      check<UsageError>(all[i] > 0 || all[i] == rest,
                        "Mesh: MeshOptions::sizes: expected 1 or more, or mesh::rest, got ", all[i]);
      check<UsageError>(declared[i] == dynamic || given[i] == 1, "Mesh: MeshOptions::sizes has ", given[i],
                        " ranks for an axis that the type lacks or does not declare as mesh::dynamic");
      all[i] == rest ? ++open : product *= all[i];
    }
    check<UsageError>(open < 2, "Mesh: MeshOptions::sizes: expected one mesh::rest at most, got ", open);
    check<UsageError>(open > 0 ? world % product == 0 && world > 0 : world == product, "Mesh: expected ", product,
                      open > 0 ? " ranks, or a multiple, for its axes " : " ranks for its axes ", text(all), ", got ",
                      world);
    for (int& size : all)
      if (size == rest) size = world / product;
    all[1] *= sequence::size;
    return all;
  }
  static std::string text(const std::array<int, 4>& sizes) {
    std::string out;
    const char* const names[] = {"Pipe", "Data", "Shard", tensor::name};
    const bool here[] = {pipes, (... || (Axes::place == 1)), shards, (... || (Axes::place == 3))};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (here[i])
        out += cat(out.empty() ? "" : ", ", names[i], '<', sizes[i] == rest ? std::string("rest") : cat(sizes[i]), '>');
      if (i == 1 && sequence::size > 1) out += cat(out.empty() ? "" : ", ", "Sequence<", sequence::size, '>');
    }
    return out;
  }
};

}  // namespace chorus::mesh
