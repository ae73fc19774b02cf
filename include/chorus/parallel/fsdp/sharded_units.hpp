#pragma once
/// FullyShardedDataParallel as an extension of DistributedDataParallel, called at the moments of a pass.

#include <algorithm>
#include <chorus/kernels/copy.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/learned_order.hpp>
#include <chorus/parallel/ddp/parts.hpp>
#include <chorus/parallel/fsdp/shard.hpp>
#include <chorus/parallel/fsdp/units_at_hand.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace chorus::fsdp {

/// A bucket holds the gradients of one unit. Averages are taken in parts (ReduceScatter). Each part becomes the
/// gradient of this rank's shard; the rest is freed as soon as the bucket has returned.
template <Device D, class Communicator>
class ShardedUnits final : public ddp::Extension<D> {
 public:
  using AtHand = UnitsAtHand<D, Communicator>;

  /// `repeats`: gradients of all units are written before the first one is complete.
  ShardedUnits(ddp::Core<D, Communicator>& core, std::shared_ptr<AtHand> at_hand, bool repeats)
      : core_(core), at_hand_(std::move(at_hand)), repeats_(repeats) {
    std::vector<char> begins(core_.entries());
    unit_of_.resize(core_.entries());
    for (std::size_t u = 0; u < at_hand_->units(); ++u) {
      const Unit& unit = at_hand_->unit(u);
      begins[unit.entries.front()] = 1;
      for (const std::size_t i : unit.entries) unit_of_[i] = u;
      make_shards(unit, at_hand_->part(u));
    }
    core_.begins_bucket = [begins](const auto& next) { return begins[next.entry] != 0; };
    for (std::size_t i = 0; i < core_.entries(); ++i) wanted_.push_back(core_.parameter(i).wants_grad());
    missing_.resize(at_hand_->units());
    aside_.resize(at_hand_->units());
    // The layout of gradients must stay that of the units.
    if (auto* const order = core_.template find<ddp::LearnedOrder<D, Communicator>>()) order->set_learned(true);
  }
  ~ShardedUnits() override { at_hand_->end(); }

  AtHand& at_hand() const { return *at_hand_; }
  /// This rank's parts of all parameters, for an optimizer.
  const std::vector<nn::NamedParameter<D>>& shards() const { return shards_; }

  // A unit with any gradient to send is sent whole, so that parts don't change when parameters freeze.
  void choose(std::span<char> sends) override {
    std::vector<char> of_unit(at_hand_->units());
    for (std::size_t i = 0; i < sends.size(); ++i)
      if (sends[i]) of_unit[unit_of_[i]] = true;
    for (std::size_t i = 0; i < sends.size(); ++i) sends[i] = of_unit[unit_of_[i]];
  }
  // Ranks compare which parameters want gradients whenever that changes.
  void forward_begins(ddp::ForwardPass& pass) override {
    for (std::size_t i = 0; i < core_.entries(); ++i)
      if (std::exchange(wanted_[i], core_.parameter(i).wants_grad()) != core_.parameter(i).wants_grad())
        pass.changed = true;
  }

  // Backward is about to begin on all ranks.
  void weighed() override {
    keep_averages();
    std::fill(missing_.begin(), missing_.end(), 0);
    for (std::size_t i = 0; i < core_.entries(); ++i) {
      const int gradients = core_.parameter(i).wants_grad() ? 1 : 0;
      missing_[unit_of_[i]] += gradients;
      core_.buckets.expect(i, gradients);
    }
    at_hand_->begin(Pass::backward);
    for (std::size_t u = 0; repeats_ && u < at_hand_->units(); ++u) at_hand_->gradient_begins(u);
    at_backward_end([units = at_hand_] { units->end_pass(); });
  }
  void gradient_arrived(std::size_t i) override {
    const std::size_t u = unit_of_[i];
    at_hand_->gradient_begins(u);
    if (--missing_[u] == 0) at_hand_->gradients_complete(u);
    if (!core_.sync) shard_of_[i]->set_grad_local(true);
  }
  // At most two buckets are sent at once: one may be under way while the next one fills.
  void bucket_is_full(const ddp::Bucket&) override {
    while (core_.buckets.on_their_way().size() > 2) {
      const auto first = core_.buckets.on_their_way().first(1);
      core_.finalize_buckets(first);
      at_hand_->give_gradients_back(unit_of_[first.front().parameters.front()]);
    }
  }
  // Other ranks may need gathers that this one does not, before they send gradients.
  void backward_ended() override { at_hand_->end_pass(); }
  void averaged() override {
    for (std::size_t i = 0; i < core_.entries(); ++i) {
      shard_of_[i]->set_averaged(core_.parameter(i).wants_grad() && core_.parameter(i).grad_arrived());
      shard_of_[i]->set_grad_local(false);
    }
    for (std::size_t u = 0; u < at_hand_->units(); ++u) at_hand_->give_gradients_back(u);
    add_kept_averages();
  }
  void pass_ended() override { core_.template find<ddp::GradientParts<D, Communicator>>()->forget(); }

 private:
  [[gnu::cold]] void make_shards(const Unit& unit, const ddp::Elements& part) {
    shard_of_.resize(core_.entries());
    for (const std::size_t i : unit.entries) {
      const auto& entry = core_.flat.entries()[i];
      const auto mine = within<D>(unit, entry, part);
      const std::size_t from = entry.begin - unit.begin, at = std::clamp(from + mine.begin, part.begin, part.end);
      shard_of_[i] =
          std::make_unique<Shard<D>>(entry.parameter(), static_cast<Index>(mine.begin),
                                     static_cast<Index>(mine.end - mine.begin), static_cast<std::ptrdiff_t>(at - from));
      shard_of_[i]->set_ledger(entry.parameter().ledger());
      shards_.push_back({entry.named.name, entry.named.handle, shard_of_[i].get()});
    }
  }
  // A pass adds to averages that no optimizer has dropped: they wait, as this pass's gradients are not averaged yet.
  void keep_averages() {
    for (std::size_t u = 0; u < at_hand_->units(); ++u)
      for (const std::size_t i : at_hand_->unit(u).entries) {
        if (!shard_of_[i]->grad_arrived()) continue;
        const Shard<D>& shard = *shard_of_[i];
        const MemoryScope scope(trace::Memory::gradients);
        aside_[u].push_back({i, Storage<D>(shard.where(), shard.size_bytes()), shard.times_forgotten()});
        copy_bytes(shard.where(), aside_[u].back().gradient.data(), shard.where(), shard.grad_place(),
                   shard.size_bytes());
        shard_of_[i]->set_averaged(false);
      }
  }
  void add_kept_averages() {
    for (auto& of_unit : aside_) {
      for (const Aside& aside : of_unit) {
        Shard<D>& shard = *shard_of_[aside.entry];
        if (shard.times_forgotten() != aside.times_forgotten) continue;
        if (!shard.grad_arrived()) {
          copy_bytes(shard.where(), shard.grad_place(), shard.where(), aside.gradient.data(), shard.size_bytes());
          shard.set_averaged(true);
          continue;
        }
        ddp::with_type(shard.dtype(), shard.grad_place(), [&]<class T>(T* grad) {
          kernels::axpy(shard.where(), shard.count(), T{1}, static_cast<const T*>(aside.gradient.data()), grad);
        });
      }
      of_unit.clear();
    }
  }

  struct Aside {
    std::size_t entry;
    Storage<D> gradient;
    std::uint32_t times_forgotten;
  };

  ddp::Core<D, Communicator>& core_;
  std::shared_ptr<AtHand> at_hand_;
  const bool repeats_;
  std::vector<std::size_t> unit_of_;                 // by entry
  std::vector<std::unique_ptr<Shard<D>>> shard_of_;  // by entry; empty if this rank has no part of it
  std::vector<nn::NamedParameter<D>> shards_;
  std::vector<char> wanted_;               // by entry: wanted a gradient in the last forward pass
  std::vector<int> missing_;               // by unit: gradients that are still missing in this backward pass
  std::vector<std::vector<Aside>> aside_;  // by unit
};

}  // namespace chorus::fsdp
