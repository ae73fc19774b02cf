#pragma once
/// Gradients that wait while a pass runs that must not add to them.

#include <chorus/core/device.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <cstddef>
#include <optional>
#include <vector>

namespace chorus::inline CHORUS_ABI::detail {

/// A rank without samples has no say in the average, but a loss may have terms that need none, such as a penalty of the
/// weights; and one that only keeps others company has their averages. What earlier passes have left is kept meanwhile,
/// in the host's memory: it happens seldom.
template <Device D>
class GradientsAside {
 public:
  [[gnu::cold]] void take(const nn::FlatParameters<D>& flat) {
    take_none(flat);
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      const auto& p = flat.entries()[i].parameter();
      if (!p.grad_arrived()) continue;
      kept_[i].emplace(p.size_bytes());
      copy_bytes(Cpu{}, kept_[i]->data(), p.where(), p.grad_data(), p.size_bytes());
    }
  }
  /// As if there were none.
  [[gnu::cold]] void take_none(const nn::FlatParameters<D>& flat) { kept_.assign(flat.entries().size(), std::nullopt); }
  void forget() { kept_.clear(); }
  bool any() const { return !kept_.empty(); }
  /// Entry `i` has what it had, or zeros.
  [[gnu::cold]] void put_back(const nn::FlatParameters<D>& flat, std::size_t i) const {
    auto& p = flat.entries()[i].parameter();
    if (kept_[i])
      copy_bytes(p.where(), p.grad_data(), Cpu{}, kept_[i]->data(), p.size_bytes());
    else
      zero_bytes(p.where(), p.grad_data(), p.size_bytes());
  }
  /// All entries have what they had, or none.
  [[gnu::cold]] void give_back(const nn::FlatParameters<D>& flat) const {
    for (std::size_t i = 0; i < kept_.size(); ++i) {
      flat.entries()[i].parameter().set_grad_arrived(kept_[i].has_value());
      if (kept_[i]) put_back(flat, i);
    }
  }

 private:
  std::vector<std::optional<std::vector<std::byte>>> kept_;  // by entry
};

}  // namespace chorus::inline CHORUS_ABI::detail
