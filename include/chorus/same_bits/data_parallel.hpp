#pragma once
/// DataParallel with canonical shares: each device takes whole shares; there are at least as many shares as devices.

#include <chorus/parallel/data_parallel.hpp>
#include <chorus/same_bits/checked_shares.hpp>
#include <chorus/same_bits/device_sums.hpp>
#include <chorus/same_bits/model.hpp>
#include <chorus/same_bits/share_losses.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace chorus {

template <class Model, int Shares>
class DataParallel<SameBits<Model, Shares>> : public dp::PolicyWithOptions<Model> {
  using Base = dp::PolicyWithOptions<Model>;

 public:
  using typename Base::D;
  static constexpr const char* name = "dp";
  static constexpr bool adds_up_in_pass = true;
  template <class Other>
  using rebind = DataParallel<SameBits<Other, Shares>>;

  /// See DataParallel. Throws UsageError for an invalid number of shares.
  DataParallel(SameBits<Model, Shares> model, DataParallelOptions options, std::uint64_t seed = initial_seed())
      : Base(std::move(model.model()), std::move(options), seed),
        sums_(this->model_, this->replicas_,
              same_bits::checked_shares(model.shares(), this->devices(), this->options().dim)) {}
  template <class Run>
  requires requires(Run& run) { run.seed(); }
  DataParallel(SameBits<Model, Shares> model, Run& run, DataParallelOptions options = {})
      : DataParallel(std::move(model), dp::options_of<D>(run, std::move(options)), run.seed()) {
    run.check_options();
  }

  int canonical_shares() const { return static_cast<int>(sums_.shares()); }
  /// See DataParallel; for losses that the model returns, one per share.
  template <Real T>
  Variable<T, 0, D> mean_loss(const Variable<T, 1, D>& losses) const {
    this->scalars_.check_count(losses.numel());
    const auto cut = same_bits::find_cut(losses.node().get());
    return cut ? same_bits::mean_of_share_losses(losses, *cut) : Base::mean_loss(losses);
  }

  /// The five steps of DataParallel, with several shares per device.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    if constexpr (dp::is_recorded<Inputs...>)
      fail<UsageError>("canonical shares: GraphVariables, for gradients of gradients, are not cut into shares");
    std::vector<same_bits::ShareRange> runs;  // by device
    const auto pass = this->template begin_shares<dp::MakeShare>(
        static_cast<Index>(sums_.shares()),
        [&](const dp::Split& split) {
          runs = sums_.runs(split.devices);
          return runs.size();
        },
        inputs...);
    const trace::Span span(trace::Lane::forward, "forward", "DataParallel forward");
    const bool replicated = this->collectives_.replicate(pass->devices());
    // A task owns its data, because a device may end late.
    this->parallel_apply_(pass->devices(), [&, pass, replicated, runs, of_devices = sums_.devices()](std::size_t i) {
      const same_bits::ShareRange run = runs[i];
      pass->prepare([&] {
        for (std::size_t s = run.begin; s < run.end; ++s)
          pass->shares[s].emplace(dp::scatter(pass->split, s, this->replicas_.device(i), pass->returns[s], inputs...));
        if (!replicated) dp::replicate(this->replicas_, i);
      });
      pass->forward(i, [&](Model& model, const RandomContext& random) {
        return of_devices[i]->forward(random, pass->split, run.begin, run.count(), [&](std::size_t share) {
          pass->outputs[run.begin + share].emplace(dp::call(model, *pass->shares[run.begin + share]));
        });
      });
    });
    this->end_pass(*pass);
    const Ref<dp::BackwardNode> on_tape(
        new same_bits::SharesNode(*this, this->alive(), std::move(pass->returns), sums_.cut(pass->split)));
    return dp::gather(pass->outputs, pass->split, this->output_device(), on_tape);
  }

 private:
  void backward(const dp::Roots& roots, bool keep) override {
    this->parallel_apply_.await();
    sums_.backward(roots, keep, [this](std::size_t used, const auto& task) {
      this->before_backward(used);
      this->parallel_apply_(used, task);
    });
  }
  void backward_to_wanted(const dp::Roots&, bool) override {
    fail<UsageError>("canonical shares: grad() does not support a policy's forward pass: expected backward()");
  }

  same_bits::DeviceSums<Model> sums_;
};

}  // namespace chorus
