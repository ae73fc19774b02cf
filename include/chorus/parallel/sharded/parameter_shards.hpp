#pragma once
/// Which rank steps which numbers of the parameters, and its own ones as an optimizer takes them.

#include <algorithm>
#include <array>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/optim/optimizer.hpp>
#include <chorus/parallel/access.hpp>
#include <chorus/parallel/ddp/parts.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace chorus::detail {

/// Some of a parameter's numbers, for an optimizer that steps these alone.
template <Device D>
class ParameterSlice : public ParameterOn<D> {
 public:
  ParameterSlice(ParameterOn<D>& whole, Index begin, Index count) : whole_(whole), begin_(begin), count_{count} {
    this->set_part(whole.part());
  }

  DType dtype() const override { return whole_.dtype(); }
  std::span<const Index> extents() const override { return count_; }
  D where() const override { return whole_.where(); }
  void* place() const override { return at(whole_.memory()); }
  Index part_begin() const override { return begin_; }
  std::span<const Index> whole_extents() const override { return whole_.extents(); }
  const Storage<D>& storage() const override { return whole_.storage(); }
  void* grad_data() const override { return at(whole_.grad_data()); }
  const void* grad_block() const override { return whole_.grad_block(); }
  bool grad_arrived() const override { return whole_.grad_arrived(); }
  void set_grad_arrived(bool arrived) override { whole_.set_grad_arrived(arrived); }
  std::uint32_t times_forgotten() const override { return whole_.times_forgotten(); }
  bool wants_grad() const override { return whole_.wants_grad(); }
  void set_wants_grad(bool wants) override { whole_.set_wants_grad(wants); }
  void bind(const Storage<D>&, void*, const Storage<D>&, void*) override { no_parameter(); }
  void on_grad(std::function<void()>) override { no_parameter(); }
  void move_to_device(D) override { no_parameter(); }
  void replace_numbers(std::span<const Index>, const Storage<D>&) override { no_parameter(); }
  Ref<Node> copy_to(D) const override { no_parameter(); }
  void add_grad_of(const ParameterOn<D>&) override { no_parameter(); }
  void set_origin(Ref<Node>) override { no_parameter(); }
  Ref<Node> make_stand_in() const override { no_parameter(); }
  const void* grad_data_of(const Node&) const override { no_parameter(); }
  void drop_grad_of(Node&) const override { no_parameter(); }

 protected:
  ParameterOn<D>& whole() const { return whole_; }
  void* at(void* whole) const {
    return static_cast<std::byte*>(whole) + static_cast<std::size_t>(begin_) * size_of(whole_.dtype());
  }

 private:
  [[noreturn]] static void no_parameter() { fail<UsageError>("ParameterSlice: a slice is no parameter of its own"); }
  ParameterOn<D>& whole_;
  Index begin_;
  std::array<Index, 1> count_;
};

/// Numbers [begin, end) of a parameter, which rank `owner` steps.
template <Device D>
struct ParameterShard {
  nn::NamedParameter<D> named;
  int owner;
  std::size_t begin, end;

  /// Where they are in a tensor of the whole parameter's state, and how many bytes they take there.
  std::uint8_t* in(const optim::StateTensor& t) const {
    return static_cast<std::uint8_t*>(t.data) + (t.on_host ? 0 : begin * size_of(t.dtype));
  }
  std::size_t bytes(const optim::StateTensor& t) const { return (t.on_host ? 1 : end - begin) * size_of(t.dtype); }
};

/// All numbers of a net's buckets, cut into shards: of each bucket rank r has `ddp::part_of(count, r, ranks)`.
template <Device D>
class ParameterShards {
 public:
  /// Of all ranks, in the same order on each.
  const std::vector<ParameterShard<D>>& all() const { return shards_; }
  /// This rank's.
  const std::vector<nn::NamedParameter<D>>& mine() const { return mine_; }

  /// Whether the net still has the buckets that were cut.
  template <class Net>
  bool fit(Net& net) const {
    return order_of(net) == order_;
  }

  /// Before `cut`: has parameters cut that no bucket has held so far, each by itself, if `wanted(name)`.
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
    // Those that are frozen now keep their state where it was.
    for (const auto& shard : before)
      if (std::none_of(order_.begin(), order_.end(),
                       [&](const auto& placed) { return placed.first == shard.named.parameter; }))
        shards_.push_back(shard);
    for (const auto& shard : shards_) {
      if (shard.owner != communicator.rank()) continue;
      slices_.push_back(std::make_unique<ParameterSlice<D>>(*shard.named.parameter, static_cast<Index>(shard.begin),
                                                            static_cast<Index>(shard.end - shard.begin)));
      mine_.push_back({shard.named.name, shard.named.handle, slices_.back().get()});
    }
  }

 private:
  /// The parameters of all buckets, and where each bucket ends.
  using Order = std::vector<std::pair<const ParameterOn<D>*, std::size_t>>;
  template <class Net>
  static Order order_of(Net& net) {
    Order order;
    for (const auto& bucket : access_to(net).buckets())
      for (const std::size_t i : bucket.parameters)
        order.emplace_back(&net.flat_parameters().entries()[i].parameter(), bucket.begin + bucket.count);
    return order;
  }

  Order order_;  // when they were cut
  std::vector<ParameterShard<D>> shards_;
  std::vector<std::unique_ptr<ParameterSlice<D>>> slices_;
  std::vector<nn::NamedParameter<D>> mine_;
};

}  // namespace chorus::detail
