#pragma once
/// A rank's coordinates in a mesh, and its communicators along the axes.

#include <array>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/split.hpp>
#include <cstddef>
#include <exception>
#include <utility>

namespace chorus::mesh {

/// Ranks are numbered with the innermost axis, tensor, fastest. Construction is collective; `all` and `world`, from
/// which it was connected, must outlive it.
class Groups {
 public:
  using Communicator = comm::AnyCommunicator;

  /// `innermost`: the name of the innermost axis. `shares_batch`: its ranks, too, have other shares of the batch.
  Groups(Communicator& all, const comm::World& world, const std::array<int, 4>& sizes, const char* innermost,
         bool shares_batch)
      : all_(all), sizes_(sizes), place_(place_of(all.rank(), sizes)) {
    const auto [p, d, s, t] = place_;
    const int tensor_size = sizes[3], shares = sizes[1] * sizes[2];
    const int batch_size = shares_batch ? shares * tensor_size : shares;
    // A group's color is the number of its first rank.
    pipe_world = split(world, "pipe", sizes[0], all.rank() - p * shares * tensor_size);
    pipe = comm::connect(pipe_world);
    const int first_of_batch = all.rank() - (d * sizes[2] + s) * tensor_size - (shares_batch ? t : 0);
    const char* const of_batch = shares_batch ? "data and expert" : sizes[2] > 1 ? "data and shard" : "data";
    batch = comm::connect(split(world, of_batch, batch_size, first_of_batch));
    const int first_of_shards = all.rank() - s * tensor_size;
    gathers = comm::connect(split(world, "shard", sizes[2], first_of_shards));
    if (sizes[1] > 1) shards_ = comm::connect(split(world, "shard", sizes[2], first_of_shards));
    replicas = comm::connect(split(world, "data", sizes[1], all.rank() - d * sizes[2] * tensor_size));
    tensor = comm::connect(split(world, innermost, tensor_size, all.rank() - t));
  }
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;
  /// Aborts the groups after an exception, so that peers fail at once instead of waiting.
  ~Groups() {
    if (std::uncaught_exceptions() <= exceptions_before_) return;
    for (Communicator* const group : {&pipe, &batch, &gathers, &shards_, &replicas, &tensor})
      if (group->size() > 1) group->abort(comm::why_it_unwinds());
  }

  Communicator& all() const { return all_; }
  /// The ranks among which gradients are reduce-scattered.
  Communicator& shards() { return sizes_[1] > 1 ? shards_ : batch; }
  /// The size of each axis, and this rank's coordinate: pipe, data, shard, tensor.
  const std::array<int, 4>& sizes() const { return sizes_; }
  const std::array<int, 4>& place() const { return place_; }

  comm::World pipe_world;
  Communicator pipe;      ///< ranks with the other stages
  Communicator batch;     ///< ranks with the same part of the model and other shares of the batch
  Communicator gathers;   ///< those of `batch` with the other shards, for all-gathers
  Communicator replicas;  ///< ranks with the same shards
  Communicator tensor;    ///< ranks with the other parts of layers, or with other experts

 private:
  static std::array<int, 4> place_of(int rank, const std::array<int, 4>& sizes) {
    std::array<int, 4> place{};
    for (std::size_t axis = sizes.size(); axis-- > 0; rank /= sizes[axis]) place[axis] = rank % sizes[axis];
    return place;
  }
  // A group of one needs no communicator.
  comm::World split(const comm::World& world, const char* axis, int size, int color) {
    if (size == 1) return {};
    auto group = comm::split(all_, world, color);
    group.axis = axis;
    return group;
  }

  Communicator& all_;
  Communicator shards_;
  std::array<int, 4> sizes_, place_;
  const int exceptions_before_ = std::uncaught_exceptions();
};

/// Base of Mesh that constructs the groups, and what divides layers along the innermost axis, before its other base.
template <class Innermost>
struct WithGroups {
  mutable Groups groups;
  typename Innermost::template layers<comm::AnyCommunicator> layers;
  template <class Model>
  WithGroups(comm::AnyCommunicator& all, const comm::World& world, const std::array<int, 4>& sizes, const Model& model)
      : groups(all, world, sizes, Innermost::name, Innermost::shares_batch),
        layers(Innermost::layers_of(groups, model)) {}
};

}  // namespace chorus::mesh
