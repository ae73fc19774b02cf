#pragma once
/// Assigns each number of the parameters to a rank that steps it, and gives this rank's to an optimizer.

#include <algorithm>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/parallel/access.hpp>
#include <chorus/parallel/ddp/parts.hpp>
#include <chorus/parallel/model_ranks.hpp>
#include <chorus/parallel/parameter_slice.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace chorus::detail {

/// Numbers [begin, end) of a parameter, which rank `owner` steps.
template <Device D>
struct ParameterShard {
  nn::NamedParameter<D> named;
  int owner;
  std::size_t begin, end;

  /// Their address in a state tensor of the whole parameter, and their bytes there.
  std::uint8_t* in(const optim::StateTensor& t) const {
    return static_cast<std::uint8_t*>(t.data) + (t.on_host ? 0 : begin * size_of(t.dtype));
  }
  std::size_t bytes(const optim::StateTensor& t) const { return (t.on_host ? 1 : end - begin) * size_of(t.dtype); }
};

/// All numbers of a net's buckets, cut into shards: rank r has `ddp::part_of(count, r, ranks)` of each bucket.
template <Device D>
class ParameterShards {
 public:
  /// The shards of all ranks, in the same order on each.
  const std::vector<ParameterShard<D>>& all() const { return shards_; }
  /// This rank's shards, in the order of `all`; after `share`, parameters without one have an empty one.
  const std::vector<nn::NamedParameter<D>>& mine() const { return mine_; }

  /// Whether the net's buckets are still those that were cut.
  template <class Net>
  bool fit(Net& net) const {
    return order_of(net) == order_;
  }

  /// Called before `cut`: each parameter with `wanted(name)` that no bucket has held so far is cut by itself.
  template <class Net, class Wanted>
  void place(Net& net, const Wanted& wanted) {
    std::set<const ParameterOn<D>*> placed;
    for (const auto& shard : shards_) placed.insert(shard.named.parameter);
    const auto ranks = static_cast<std::size_t>(net.communicator().size());
    for (const auto& entry : net.flat_parameters().entries()) {
      if (placed.contains(entry.named.parameter) || !wanted(entry.named.name)) continue;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const auto part = ddp::part_of(static_cast<std::size_t>(entry.parameter().count()), rank, ranks);
        if (part.begin < part.end) shards_.push_back({entry.named, static_cast<int>(rank), part.begin, part.end});
      }
    }
  }
  template <class Net>
  void cut(Net& net) {
    mine_.clear();
    slices_.clear();
    order_ = order_of(net);
    const auto before = std::exchange(shards_, {});
    const auto& communicator = net.communicator();
    for (const auto& bucket : access_to(net).buckets())
      for (int rank = 0; rank < communicator.size(); ++rank) {
        const auto part =
            ddp::part_of(bucket.count, static_cast<std::size_t>(rank), static_cast<std::size_t>(communicator.size()));
        for (const std::size_t i : bucket.parameters) {
          const auto& entry = net.flat_parameters().entries()[i];
          const auto from = entry.begin - bucket.begin;
          const auto end = std::min(part.end, from + static_cast<std::size_t>(entry.parameter().count()));
          if (const auto begin = std::max(part.begin, from); begin < end)
            shards_.push_back({entry.named, rank, begin - from, end - from});
        }
      }
    // Parameters that are frozen now keep their shards.
    for (const auto& shard : before)
      if (std::none_of(order_.begin(), order_.end(),
                       [&](const auto& placed) { return placed.first == shard.named.parameter; }))
        shards_.push_back(shard);
    for (const auto& shard : shards_)
      if (shard.owner == communicator.rank()) add(shard.named, shard.begin, shard.end);
  }
  /// For optimizers that ask the ranks with the other pieces: all ranks have shards of the same parameters, in the same
  /// order.
  template <class Net>
  void share(Net& net) {
    mine_.clear();
    slices_.clear();
    std::map<const ParameterOn<D>*, std::size_t> places;
    std::vector<ParameterShard<D>> own;
    for (const auto& shard : shards_) {
      const auto [at, is_new] = places.emplace(shard.named.parameter, own.size());
      if (is_new) own.push_back({shard.named, shard.owner, 0, 0});
      if (shard.owner == net.communicator().rank()) own[at->second] = shard;
    }
    for (const auto& shard : own) add(shard.named, shard.begin, shard.end);
    decide_together(mine_, net.communicator(), net.alive(), [](const auto&) { return true; });
  }

 private:
  void add(const nn::NamedParameter<D>& named, std::size_t begin, std::size_t end) {
    slices_.push_back(std::make_unique<ParameterSlice<D>>(*named.parameter, static_cast<Index>(begin),
                                                          static_cast<Index>(end - begin)));
    mine_.push_back({named.name, named.handle, slices_.back().get()});
  }

  /// The parameters of all buckets, and each bucket's end.
  using Order = std::vector<std::pair<const ParameterOn<D>*, std::size_t>>;
  template <class Net>
  static Order order_of(Net& net) {
    Order order;
    for (const auto& bucket : access_to(net).buckets())
      for (const std::size_t i : bucket.parameters)
        order.emplace_back(&net.flat_parameters().entries()[i].parameter(), bucket.begin + bucket.count);
    return order;
  }

  Order order_;  // at the time of `cut`
  std::vector<ParameterShard<D>> shards_;
  std::vector<std::unique_ptr<ParameterSlice<D>>> slices_;
  std::vector<nn::NamedParameter<D>> mine_;
};

}  // namespace chorus::detail
