#pragma once
/// Gradients that earlier passes have left, for which a new one counts otherwise, or not at all.

#include <chorus/core/device.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
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
      copy_bytes(Cpu{}, kept.gradient->data(), p.where(), p.grad_place(), p.size_bytes());
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
    copy_bytes(p.where(), p.grad_place(), Cpu{}, kept.gradient->data(), p.size_bytes());
  }
  static void put_back(const Kept& kept) {
    auto& p = *kept.parameter;
    if (kept.gradient && p.times_forgotten() == kept.times_forgotten)
      copy_back(kept);
    else
      zero_bytes(p.where(), p.grad_place(), p.size_bytes());
  }

  std::vector<Kept> kept_;
};

}  // namespace chorus::detail

namespace chorus::ddp {

/// Gradients that are added up over several passes, of which each counts by its own global batch: they are kept in the
/// unit of the last one.
template <Device D>
class EarlierGradients {
 public:
  double unit = 1;  ///< what they will be multiplied by

  /// A backward pass begins in which this rank counts `weight`. What is there of the entries `i` that are `kept(i)`
  /// changes to that unit, so that `unit` times it stays the same. To a pass in which this rank has no samples nothing
  /// is added.
  template <class Kept>
  void change_unit(const nn::FlatParameters<D>& flat, double weight, const Kept& kept) {
    aside_.forget();
    if (weight == unit) return;
    if (weight == 0) return aside_.take(flat);
    const double factor = unit / weight;
    for (std::size_t i = 0; i < flat.entries().size(); ++i) {
      auto& p = flat.entries()[i].parameter();
      if (!p.grad_arrived() || !kept(i)) continue;
      if (factor == 0)
        zero_bytes(p.where(), p.grad_place(), p.size_bytes());
      else
        with_type(p.dtype(), p.grad_place(),
                  [&]<class T>(T* grad) { kernels::scale(p.where(), p.count(), static_cast<T>(factor), grad); });
    }
    unit = weight;
  }
  void gradient_arrived(const ParameterOn<D>& parameter) const {
    if (aside_.any()) aside_.put_back(parameter);
  }
  void pass_ended() { aside_.forget(); }

 private:
  detail::GradientsAside<D> aside_;
};

}  // namespace chorus::ddp
