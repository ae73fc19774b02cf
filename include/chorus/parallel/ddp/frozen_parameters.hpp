#pragma once
/// Parameters that are frozen or unfrozen between passes.

#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/same_model.hpp>
#include <cstddef>
#include <string>

namespace chorus::ddp {

/// Buckets hold the parameters that want gradients. If that set changes, buckets are cut again and ranks compare it.
template <Device D, class Communicator>
class FrozenParameters final : public Extension<D> {
 public:
  explicit FrozenParameters(Core<D, Communicator>& core) : core_(core) {}

  /// Cuts buckets again if needed; returns whether it did.
  bool fit_buckets() {
    const auto chosen = core_.chosen();
    bool fit = true;
    for (std::size_t i = 0; i < chosen.size(); ++i) fit = fit && (chosen[i] != 0) == core_.buckets.sends(i);
    if (!fit) core_.cut_buckets();
    return !fit;
  }
  void forward_begins(ForwardPass& pass) override { pass.changed = fit_buckets(); }
  void backward_begins() override {
    if (core_.shares.take_changed()) detail::check_same_description(core_.ranks, "DistributedDataParallel", describe());
  }

 private:
  [[gnu::cold]] std::string describe() const {
    std::string text;
    for (std::size_t i = 0; i < core_.entries(); ++i)
      if (!core_.options.ignores(core_.name(i)))
        text += cat(core_.name(i), core_.parameter(i).wants_grad() ? "\n" : ", frozen,\n");
    return text;
  }

  Core<D, Communicator>& core_;
};

}  // namespace chorus::ddp
