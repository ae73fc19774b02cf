#pragma once
/// SingleDevice with canonical shares: the other policies must give the same bits.

#include <chorus/parallel/dp/samples.hpp>
#include <chorus/parallel/single_device.hpp>
#include <chorus/same_bits/checked_shares.hpp>
#include <chorus/same_bits/model.hpp>
#include <chorus/same_bits/model_shares.hpp>
#include <cstdint>
#include <utility>
#include <vector>

namespace chorus {

/// Computes all shares of each batch, one after the other.
template <class Model, int Shares>
class SingleDevice<SameBits<Model, Shares>> : public OneProcessPolicy<Model> {
 public:
  static constexpr const char* name = "single";
  static constexpr bool one_device = true;
  static constexpr bool adds_up_in_pass = true;
  template <class Other>
  using rebind = SingleDevice<SameBits<Other, Shares>>;

  explicit SingleDevice(SameBits<Model, Shares> model, std::uint64_t seed = initial_seed(),
                        const SingleDeviceOptions& options = {})
      : OneProcessPolicy<Model>(std::move(model.model()), seed),
        handles_(this->model_),
        buffers_(nn::named_buffers<typename Policy<Model>::device_type>(this->model_)),
        shares_(this->model_, this->flat_, buffers_, this->alive(),
                same_bits::checked_shares(model.shares(), 1, options.dim), 0, 1) {}
  /// For `launch`: see SingleDevice.
  template <class Run>
  requires requires(Run& run) { run.seed(); }
  SingleDevice(SameBits<Model, Shares> model, Run& run, const SingleDeviceOptions& options = {})
      : SingleDevice(detail::placed(std::move(model), run), run.seed(), options) {
    run.check_options();
  }

  /// See SingleDevice.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    handles_.check_kept(this->model_);
    const RandomScope scope(this->begin_forward());
    const detail::WatchScope watch(this->watch_once());
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    auto output = same_bits::forward(shares_, this->model_, this->random_, this->on_model_device(inputs)...);
    this->end_forward();
    return output;
  }

  int devices() const { return 1; }
  int canonical_shares() const { return static_cast<int>(shares_.shares()); }

 private:
  detail::ModelHandles handles_;
  std::vector<nn::NamedBuffer<typename Policy<Model>::device_type>> buffers_;
  same_bits::ModelShares<Model> shares_;
};

}  // namespace chorus
