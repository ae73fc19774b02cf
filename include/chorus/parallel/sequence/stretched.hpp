#pragma once
/// A policy whose ranks share the tokens of each sample, around a policy whose ranks have shares of a batch.

#include <chorus/autograd/batch_axis.hpp>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/engine/failure.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/shared_places.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <chorus/parallel/join.hpp>
#include <chorus/parallel/loss_share.hpp>
#include <chorus/parallel/policy.hpp>
#include <chorus/parallel/sequence/places.hpp>
#include <chorus/parallel/sequence/places_watch.hpp>
#include <chorus/parallel/sequence/ring.hpp>
#include <chorus/parallel/sequence/whole_loss.hpp>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::sequence {

/// `Base`: DistributedDataParallel, or a policy derived from it. Its ranks lie in rings; a ring has one share of the
/// batch, and each of its ranks some places of every sample.
///
/// A rank's loss counts its own tokens, and through attention its gradients have parts of other ranks' losses. So each
/// loss gets its weight in the whole before backward, and the gradients of all ranks have one weight.
///
/// `staged`: the model is a pipeline's, which returns the loss of all places already.
template <class Base, bool staged = false>
class Stretched : public Base {
  using Communicator = comm::AnyCommunicator;
  using Tokens = Places<Communicator>;

 public:
  using typename Base::D;
  static_assert(std::is_same_v<D, Cpu>, "SequenceParallel: expected a model on the CPU");
  static_assert(!Base::adds_up_in_pass,
                "SequenceParallel: its sums have no fixed order: expected a model without SameBits");

  /// Aborts the group after an exception: the others may wait for this rank's keys.
  ~Stretched() {
    if (std::uncaught_exceptions() > exceptions_before_ && ring_.size() > 1)
      this->communicator_.abort(comm::why_it_unwinds());
  }

  /// Returns the model's output for this rank's places of the samples, or the loss of all places. Inputs are the whole
  /// samples, [batch, length, ...], which are cut here; inputs [batch], numbers and `ch::whole(x)` are not cut. Throws
  /// UsageError for other inputs, and for models with operators that mix places.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    std::optional<Index> length;
    (find_length(inputs, length), ...);
    check<UsageError>(length.has_value(), "SequenceParallel: expected an input [batch, length, ...]");
    const Index samples = detail::samples_of(0, inputs...);
    const auto places = std::make_shared<Tokens>(ring_, *length, this->alive());
    const detail::Replaced<const Tokens*> now(places_, places.get());
    const SharedPlacesScope scope(ring_.size() > 1 ? places.get() : nullptr);
    std::optional<PlacesWatch> watch;
    if (ring_.size() > 1 && !std::exchange(watched_[grad_enabled() ? 1 : 0], true))
      watch.emplace(*places, samples, staged);
    return call(watch ? &*watch : nullptr, cut(inputs, *places, watch)...);
  }

  /// This rank's places of x: [batch, length, ...], such as the labels of a loss outside of the model.
  template <AnyTensor X>
  X stretch(const X& x) const {
    static_assert(X::rank >= 2, "stretch: expected a tensor [batch, length, ...]");
    const auto runs = stretches(x.size(1), ring_.size(), ring_.member());
    const auto of = [&](const AxisPart& run) { return x.slice(1, run.begin, run.begin + run.count); };
    return concat(1, of(runs[0]), of(runs[1]));
  }

  /// The same samples on all ranks of a ring.
  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    auto of_ring = this->sampler_options(options);
    of_ring.rank = share();
    of_ring.world_size /= ring_.size();
    return data::Sampler(dataset.size(), of_ring);
  }

 protected:
  /// `rings`: how many rings have neighbouring shares of the batch and lie side by side, rank by rank.
  template <class... Arguments>
  explicit Stretched(Ring<Communicator> ring, int rings, Arguments&&... arguments)
      : Base(std::forward<Arguments>(arguments)...), ring_(ring), rings_(rings) {
    this->shares_.add_alike(1.0 / this->communicator_.size());
    this->random_.first_sample = [this, of_rank = this->random_.first_sample] {
      check<UsageError>(places_ == nullptr || ring_.size() == 1 || places_->draws_by_place(),
                        "SequenceParallel: expected no random numbers but those of dropout and attention: others are "
                        "drawn without regard to places");
      const Index before = of_rank(), samples = this->random_.samples;
      if (rings_ == 1) return (before - ring_.member() * samples) / ring_.size();
      check<UsageError>(before == this->communicator_.rank() * samples,
                        "SequenceParallel: random numbers need equally many samples on all ranks if the mesh has "
                        "shards, too: expected a batch that its shares divide evenly; drop_last of the loader");
      return share() * samples;
    };
  }

  std::span<const double> weigh(std::span<const detail::LossShare> losses, bool refused) override {
    this->shares_.add_alike(0);
    const auto scales = Base::weigh(losses, refused);
    scales_.assign(scales.begin(), scales.end());
    for (double& scale : scales_) scale *= this->shares_.weight() * this->communicator_.size();
    this->shares_.add_alike(1.0 / this->communicator_.size());
    return scales_;
  }
  void begin_join(const detail::JoinFacts&) override {
    fail<UsageError>("SequenceParallel::join: expected the same number of batches on all ranks; use net.sampler(data)");
  }

 private:
  // The number of this ring's share of the batch.
  int share() const {
    const int rank = this->communicator_.rank();
    return rank / (rings_ * ring_.size()) * rings_ + rank % rings_;
  }
  template <class X>
  static void find_length(const X& x, std::optional<Index>& length) {
    if constexpr (Operand<X>)
      if constexpr (tensor_of<X>::rank >= 2 && detail::said_axis<X> != detail::no_axis)
        if (!length) length = value_of(x).size(1);
  }
  template <class X>
  auto cut(const X& x, const Tokens& places, std::optional<PlacesWatch>& watch) const {
    if constexpr (!Operand<X>) {
      static_assert(std::is_arithmetic_v<X>, "SequenceParallel: expected tensors and numbers as the net's inputs");
      return x;
    } else if constexpr (detail::said_axis<X> == detail::no_axis) {
      if constexpr (tensor_of<X>::rank >= 3)
        check<UsageError>(ring_.size() == 1 || value_of(x).size(1) != places.own(),
                          "SequenceParallel: a whole input of shape ", value_of(x).shape(),
                          " is as long as this rank's part of a sample: they could be taken for "
                          "each other; pad one of them");
      return x;
    } else {
      static_assert(!detail::says_batch_axis<X>, "SequenceParallel: expected inputs [batch, length, ...]");
      if constexpr (!AnyTensor<X>)
        check<UsageError>(!node_of(x), "SequenceParallel: expected inputs that need no gradient");
      if constexpr (tensor_of<X>::rank < 2) {
        return x;
      } else {
        const auto& shape = value_of(x).shape();
        check<UsageError>(shape[1] == places.length(), "SequenceParallel: expected inputs of ", places.length(),
                          " places, got shape ", shape, ": ch::whole(x) marks one that belongs to no place");
        const X mine(stretch(static_cast<const tensor_of<X>&>(value_of(x))));
        if (watch) watch->add_input(value_of(mine));
        return mine;
      }
    }
  }

  template <class... Inputs>
  auto call(PlacesWatch* watch, const Inputs&... inputs) {
    const auto run = [&] {
      const detail::Replaced<detail::OperationWatch*> watching(detail::operation_watch,
                                                               watch == nullptr ? detail::operation_watch : watch);
      return Base::operator()(inputs...);
    };
    using Output = decltype(run());
    if constexpr (AnyVariable<Output> && !detail::is_graph_variable<Output>) {
      if constexpr (Output::rank == 0) {
        const bool records = grad_enabled();
        const GradMode recording(true);  // the tape knows what a mean counts
        const Output own = run();
        if (staged || ring_.size() == 1) return records ? own : own.detach();
        check<UsageError>(own.requires_grad(), "SequenceParallel: expected a loss that depends on trained parameters");
        using T = typename Output::value_type;
        const double whole = whole_loss(*own.node(), static_cast<double>(own.item()), ring_);
        const auto value = tensor_of<Output>::full({}, static_cast<T>(whole));
        return records ? Output(value, own.node()) : Output(value);
      } else {
        return run();
      }
    } else {
      return run();
    }
  }

  Ring<Communicator> ring_;
  int rings_;
  const Tokens* places_ = nullptr;  // of the forward pass that runs
  std::vector<double> scales_;
  bool watched_[2] = {false, false};
  const int exceptions_before_ = std::uncaught_exceptions();
};

}  // namespace chorus::sequence
