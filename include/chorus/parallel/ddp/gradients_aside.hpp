#pragma once
/// Gradients that wait while a pass runs that must not add to them.

#include <chorus/core/device.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace chorus::detail {

/// A rank without samples has no say in the average, but a loss may have terms that need none, such as a penalty of the
/// weights; and one that has run out of batches has the others' averages. What earlier passes have left is kept,
/// meanwhile in the host's memory: it happens seldom. Meanwhile parameters may move within the flat buffers.
template <Device D>
class GradientsAside {
 public:
  [[gnu::cold]] void take(const nn::FlatParameters<D>& flat) {
    take_none(flat);
    for (Kept& kept : kept_) {
      const auto& p = *kept.parameter;
      if (!p.grad_arrived()) continue;
      kept.gradient.emplace(p.size_bytes());
      copy_bytes(Cpu{}, kept.gradient->data(), p.where(), p.grad_data(), p.size_bytes());
    }
  }
  /// As if there were none.
  [[gnu::cold]] void take_none(const nn::FlatParameters<D>& flat) {
    kept_.clear();
    for (const auto& entry : flat.entries())
      kept_.push_back({&entry.parameter(), {}, entry.parameter().times_forgotten()});
  }
  void forget() { kept_.clear(); }
  bool any() const { return !kept_.empty(); }
  /// A gradient has come: it becomes what there was, or zeros where there was none, or a `zero_grad` since then.
  [[gnu::cold]] void put_back(const ParameterOn<D>& parameter) const {
    for (const Kept& kept : kept_)
      if (kept.parameter == &parameter) put_back(kept);
  }
  /// The same for all that have come.
  [[gnu::cold]] void put_back_all() const {
    for (const Kept& kept : kept_)
      if (kept.parameter->grad_arrived()) put_back(kept);
  }
  /// All parameters have what they had, or none.
  [[gnu::cold]] void give_back() const {
    for (const Kept& kept : kept_) {
      kept.parameter->set_grad_arrived(kept.gradient.has_value());
      if (kept.gradient) copy_back(kept);
    }
  }

 private:
  struct Kept {
    ParameterOn<D>* parameter;
    std::optional<std::vector<std::byte>> gradient;
    std::uint32_t times_forgotten;
  };
  static void copy_back(const Kept& kept) {
    auto& p = *kept.parameter;
    copy_bytes(p.where(), p.grad_data(), Cpu{}, kept.gradient->data(), p.size_bytes());
  }
  static void put_back(const Kept& kept) {
    auto& p = *kept.parameter;
    if (kept.gradient && p.times_forgotten() == kept.times_forgotten)
      copy_back(kept);
    else
      zero_bytes(p.where(), p.grad_data(), p.size_bytes());
  }

  std::vector<Kept> kept_;
};

}  // namespace chorus::detail
