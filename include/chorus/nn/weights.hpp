#pragma once
/// freeze, unfreeze, copy_into, and soft_update for target networks.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::nn {

namespace detail {

/// A policy's model, or the model itself.
template <class Model>
auto& model_of(Model& model) {
  if constexpr (requires { model.module(); })
    return model.module();
  else
    return model;
}

template <class Model>
using DeviceTypeOf = typename decltype(device_of(std::declval<Model&>()))::type;

template <class Model>
void want_gradients(Model& model, bool wants) {
  using D = DeviceTypeOf<Model>;
  static_assert(!std::is_void_v<D>, "freeze, unfreeze: expected a model or a layer with parameters");
  for (auto& named : named_parameters<D>(model)) named.parameter->set_wants_grad(wants);
}

/// Calls `visit(to, from, parameter)` for the local parameters, then buffers, of two models. Before the first call,
/// throws ShapeError if they differ in name, shape or dtype, and UsageError if a rank holds a part of one but not of
/// the other.
template <class D, class Visit>
void for_both(const char* who, Module& to, Module& from, const Visit& visit) {
  struct Place {
    std::string name;
    chorus::detail::AtHome<D>* numbers;
    bool parameter;
    std::string describe() const { return cat("'", name, "' ", numbers->extents(), " ", numbers->dtype()); }
  };
  const auto places = [](Module& model) {
    std::vector<Place> out;
    for (auto& named : named_parameters<D>(model)) out.push_back({named.name, named.parameter, true});
    for (auto& named : named_buffers<D>(model)) out.push_back({named.name, named.buffer, false});
    return out;
  };
  const auto targets = places(to), sources = places(from);
  for (std::size_t i = 0; i < std::max(targets.size(), sources.size()); ++i) {
    const auto wanted = i < targets.size() ? targets[i].describe() : "no more parameters or buffers";
    const auto got = i < sources.size() ? sources[i].describe() : "none";
    check<ShapeError>(wanted == got, who, ": expected ", wanted, ", got ", got);
    check<UsageError>(std::ranges::equal(targets[i].numbers->extents_here(), sources[i].numbers->extents_here()), who,
                      ": of '", targets[i].name, "' this rank has ", targets[i].numbers->extents_here(),
                      " of the target and ", sources[i].numbers->extents_here(),
                      " of the source: expected both under the same policy, or net.gathered() around the call");
  }
  for (std::size_t i = 0; i < targets.size(); ++i)
    if (targets[i].numbers->is_here() || sources[i].numbers->is_here())
      visit(*targets[i].numbers, *sources[i].numbers, targets[i].parameter);
}

template <class D>
void copy_numbers(const chorus::detail::AtHome<D>& to, const chorus::detail::AtHome<D>& from) {
  copy_bytes(to.where(), to.memory(), from.where(), from.memory(), to.size_bytes());
  to.touch_by_hand();
}

}  // namespace detail

/// Excludes a model's or layer's parameters from training: no gradients, and optimizers skip them. Call it before the
/// model is given to a policy: DistributedDataParallel compares frozen parameters at construction.
template <class Model>
void freeze(Model& model) {
  detail::want_gradients(model, false);
}
/// Undoes freeze.
template <class Model>
void unfreeze(Model& model) {
  detail::want_gradients(model, true);
}

/// Copies parameters and buffers into another model with the same names, shapes and dtypes. Both may be policies; then
/// all ranks must call it. Throws ShapeError if they differ, before anything is copied, and UsageError if a rank does
/// not hold all values (under FullyShardedDataParallel outside of `gathered()`).
template <class From, class To>
void copy_into(const From& from, To& to) {
  auto& target = detail::model_of(to);
  auto& source = const_cast<From&>(from);  // walking modules needs a mutable model
  using D = detail::DeviceTypeOf<std::remove_reference_t<decltype(target)>>;
  detail::for_both<D>("copy_into", target, detail::model_of(source),
                      [](auto& out, auto& in, bool) { detail::copy_numbers(out, in); });
}

/// target = (1 - tau) target + tau source, for float and double parameters; buffers and others are copied. For target
/// networks in reinforcement learning (Lillicrap et al. 2016) and self-supervised learning. Throws as copy_into does,
/// and UsageError for a tau outside of [0, 1].
template <class To, class From>
void soft_update(To& target, const From& source, double tau) {
  check<UsageError>(tau >= 0 && tau <= 1, "soft_update: expected tau in [0, 1], got ", tau);
  auto& model = detail::model_of(target);
  using D = detail::DeviceTypeOf<std::remove_reference_t<decltype(model)>>;
  const auto mix = [tau]<class T>(auto& out, T* own, const T* other) {
    kernels::scale(out.where(), out.count(), static_cast<T>(1 - tau), own);
    kernels::axpy(out.where(), out.count(), static_cast<T>(tau), other, own);
    out.touch_by_hand();
  };
  detail::for_both<D>("soft_update", model, detail::model_of(const_cast<From&>(source)),
                      [&](auto& out, auto& in, bool parameter) {
                        check<DeviceError>(out.where() == in.where(), "soft_update: expected both models on ",
                                           out.where(), ", got the source on ", in.where());
                        if (parameter && out.dtype() == DType::f32)
                          mix(out, static_cast<float*>(out.memory()), static_cast<const float*>(in.memory()));
                        else if (parameter && out.dtype() == DType::f64)
                          mix(out, static_cast<double*>(out.memory()), static_cast<const double*>(in.memory()));
                        else
                          detail::copy_numbers(out, in);
                      });
}

}  // namespace chorus::nn
