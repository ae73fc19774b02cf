#pragma once
/// SameBits: a model type that asks its policy for the same bits on any number of devices.

#include <chorus/core/shares.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <string>
#include <utility>

namespace chorus {

/// A model whose batches are cut into `Shares` canonical shares, whatever the number of devices. Shares are computed
/// one after the other and added up in one fixed tree. A run then ends with the same bits under every policy that takes
/// this type, on any number of devices up to the number of shares:
///
///     using Net = ch::DistributedDataParallel<ch::SameBits<Model, 8>>;
///
/// `Shares` is 1 to 64; 0: the constructor takes the number, `ch::SameBits{Model{}, shares}`. SingleDevice,
/// DataParallel, DistributedDataParallel, FullyShardedDataParallel and ParameterServer take it; TensorParallel,
/// Pipeline and Mesh with their headers in same_bits/. `module()` is the inner Model.
template <class Model, int Shares>
class SameBits : public nn::Module {
  static_assert(Shares >= 0 && Shares <= most_shares, "SameBits: expected 1 to 64 shares, or 0 for a run-time number");

 public:
  using device_type = typename nn::detail::DeviceOfModel<Model>::type;

  /// Converts a model implicitly to one with that many shares.
  SameBits(Model model = {}) requires(Shares > 0) : model_(std::move(model)), shares_(Shares) {}
  /// The policy throws UsageError for an invalid number.
  SameBits(Model model, int shares) requires(Shares == 0) : model_(std::move(model)), shares_(shares) {}

  /// The inner model.
  Model& model() { return model_; }
  int shares() const { return shares_; }

  template <class... Inputs>
  void forward(const Inputs&...) const {
    static_assert(sizeof...(Inputs) != sizeof...(Inputs),
                  "SameBits: this policy does not compute in shares: expected SingleDevice, DataParallel, "
                  "DistributedDataParallel, FullyShardedDataParallel, ParameterServer, or, with its header in "
                  "chorus/same_bits/, Pipeline, TensorParallel or Mesh");
  }
  void visit(nn::Visitor& visitor) override {
    visitor.inner(model_);
    model_.visit(visitor);
  }
  std::string describe() const override { return cat("SameBits(", model_.describe(), ", ", shares_, ")"); }

 private:
  Model model_;
  int shares_;
};

template <class Model>
SameBits(Model, int) -> SameBits<Model, 0>;

}  // namespace chorus
