#pragma once
/// Gradients of earlier passes, whose weight differs from the new gradient's or that must be kept out of a pass.

#include <chorus/core/device.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/ddp/with_type.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace chorus::detail {

/// A rank without samples has weight 0 in the average, but its loss may have terms without samples, such as a weight
/// penalty; a rank that has run out of batches gets the other ranks' averages. Meanwhile the gradients of earlier
/// passes are kept in host memory, as this is rare. Parameters may move within the flat buffers in the meantime.
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
  /// Like `take`, as if no parameter had a gradient.
  [[gnu::cold]] void take_none(const nn::FlatParameters<D>& flat) {
    kept_.clear();
    for (const auto& entry : flat.entries())
      kept_.push_back({&entry.parameter(), {}, entry.parameter().times_forgotten()});
  }
  void forget() { kept_.clear(); }
  bool any() const { return !kept_.empty(); }
  /// Replaces an arriving gradient by the kept one; by zeros if there was none or `zero_grad` was called since.
  [[gnu::cold]] void put_back(const ParameterOn<D>& parameter) const {
    for (const Kept& kept : kept_)
      if (kept.parameter == &parameter) put_back(kept);
  }
  /// Gives all parameters their kept gradients, or none.
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

/// Gradients accumulated over several passes, each weighted by its own global batch: they are kept in units of the last
/// pass's weight.
template <Device D>
class EarlierGradients {
 public:
  double unit = 1;  ///< the weight that they will be multiplied by

  /// A backward pass begins in which this rank has weight `weight`. Rescales the gradients of the entries `i` with
  /// `kept(i)`, so that weight times gradient stays the same. A pass in which this rank has no samples adds nothing to
  /// them.
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
