#pragma once
/// TensorParallel with canonical shares: all ranks compute every share, and sums over a shared axis are added up in
/// leaves, as on one device.

#include <chorus/parallel/tensor_parallel.hpp>
#include <chorus/same_bits/checked_shares.hpp>
#include <chorus/same_bits/leaf_group.hpp>
#include <chorus/same_bits/model.hpp>
#include <chorus/same_bits/model_shares.hpp>
#include <chorus/same_bits/side_by_side.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

/// Divided layers cut the axis that ranks share into leaves of whole units, at most as many as there are shares. The
/// number of ranks must divide the leaves of each layer, with 1, 2, 4 or more of them for each; otherwise the first
/// forward pass throws UsageError. For the rest see TensorParallel.
template <class Model, int Shares, class Sequence, class Communicator>
class TensorParallel<SameBits<Model, Shares>, Sequence, Communicator> : public WholeBatchPolicy<Model, Communicator> {
  using Base = WholeBatchPolicy<Model, Communicator>;

 public:
  using D = typename Base::device_type;
  using policy_type = TensorParallel;
  static_assert(std::is_same_v<D, Cpu>,
                "TensorParallel: SameBits needs the CPU: a GPU's library chooses the order of a product's sums");
  static_assert(!Sequence::splits_sequences, "TensorParallel: SameBits does not split sequences: use NoSequenceSplit");
  static constexpr const char* name = "tensor_parallel";
  static constexpr bool adds_up_in_pass = true;
  template <class Other>
  using rebind = TensorParallel<SameBits<Other, Shares>, Sequence, Communicator>;

  /// See TensorParallel. Throws UsageError for an invalid number of shares, and on several ranks for layers that need
  /// the whole batch, such as SyncBatchNorm.
  TensorParallel(SameBits<Model, Shares> model, Communicator& communicator, const TensorParallelOptions& options = {},
                 std::uint64_t seed = initial_seed())
      : TensorParallel(std::make_unique<Layers>(communicator, group_for(model, communicator, options)),
                       model, communicator, options, seed) {}
  /// For `launch`: takes communicator and seed from `run`.
  template <detail::LaunchedRun Run>
  TensorParallel(SameBits<Model, Shares> model, Run& run, const TensorParallelOptions& options = {})
      : TensorParallel(std::make_unique<detail::RankDevice<D>>(run), std::move(model), options, run.seed()) {
    run.check_options();
  }
  /// Aborts the group after an exception, so that peers fail at once instead of waiting.
  ~TensorParallel() {
    if (std::uncaught_exceptions() > exceptions_before_ && this->communicator_.size() > 1)
      this->communicator_.abort(comm::why_it_unwinds());
  }

  int canonical_shares() const { return static_cast<int>(shares_.shares()); }

  /// See TensorParallel.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    handles_.check_kept(this->model_, this->flat_);
    this->compare_programs();
    const RandomScope random(this->begin_forward());
    const TensorGroupScope group(layers_->group());
    const detail::WatchScope watch(this->communicator_.rank() == 0 ? this->watch_once() : nullptr);
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    auto output = same_bits::forward(shares_, this->model_, this->random_, this->on_model_device(inputs)...);
    CHORUS_WHOLE_OUTPUT("TensorParallel", decltype(output));
    this->end_forward();
    return output;
  }

  /// See Policy::gathered. The model is a copy and needs memory for it.
  template <class F>
  void gathered(const F& f) {
    this->meet();
    layers_->with_whole(this->model_, f);
  }
  /// See TensorParallel.
  bool writes_part(bool, bool shared) const { return shared || this->communicator_.rank() == 0; }

 private:
  using Layers = detail::SharedLayers<Communicator>;

  TensorParallel(std::unique_ptr<detail::RankDevice<D>> device, SameBits<Model, Shares> model,
                 const TensorParallelOptions& options, std::uint64_t seed)
      : TensorParallel(device->place(std::move(model)), device->communicator(), options, seed) {
    device_ = std::move(device);
  }
  TensorParallel(std::unique_ptr<Layers> layers, SameBits<Model, Shares>& model, Communicator& communicator,
                 const TensorParallelOptions& options, std::uint64_t seed)
      : Base("TensorParallel",
             detail::with_numbers(layers->share_out(
                 std::move(model.model()),
                 cat("check_every ", options.check_every, "\nSameBits of ", model.shares(), " shares\n"))),
             communicator, seed),
        layers_(std::move(layers)),
        handles_(this->model_),
        replicas_(this->flat_, communicator, this->alive(), options.check_every),
        buffers_(nn::named_buffers<D>(this->model_)),
        shares_(this->model_, this->flat_, buffers_, this->alive(), static_cast<std::size_t>(model.shares()),
                0, 1) {
    detail::decide_together(this->parameters(), communicator, this->alive(), [&](const auto& named) {
      return named.parameter->part() != nullptr || communicator.rank() == 0;
    });
    this->program_.listen(this->flat_.parameters(), buffers_, {});
  }
  static auto group_for(SameBits<Model, Shares>& model, Communicator& communicator,
                        const TensorParallelOptions& options) {
    check<UsageError>(options.check_every >= 0, "TensorParallel: expected check_every of at least 0, got ",
                      options.check_every);
    const auto shares = same_bits::checked_shares(model.shares(), 1, options.dim);
    check<UsageError>(communicator.size() == 1 || !same_bits::needs_whole_batch(model.model()),
                      "TensorParallel: SameBits computes shares one after the other, and a layer, such as "
                      "SyncBatchNorm, needs the whole batch: expected BatchNorm, or another policy");
    return std::make_shared<same_bits::SharedInLeaves<Communicator>>(communicator, shares);
  }

  std::unique_ptr<detail::RankDevice<D>> device_;  // set if constructed from a run
  std::unique_ptr<Layers> layers_;
  detail::ModelHandles handles_;
  detail::ReplicaCheck<D, Communicator> replicas_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  same_bits::ModelShares<Model> shares_;
  const int exceptions_before_ = std::uncaught_exceptions();
};

}  // namespace chorus
