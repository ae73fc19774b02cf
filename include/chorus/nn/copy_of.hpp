#pragma once
/// Deep copies of models. A plain copy of a model shares its parameters.

#include <chorus/nn/module.hpp>
#include <map>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace chorus {

namespace detail {

/// Gives every handle of a model a copy of its parameter or buffer, on `device` or on its own device. Shared parameters
/// stay shared.
template <Device D>
class GiveCopies final : public nn::detail::Walker {
 public:
  explicit GiveCopies(std::optional<D> device) : device_(device) {}
  void parameter(std::string_view, AnyParameter& handle) override { replace(handle, handle.on<D>()); }
  void buffer(std::string_view, AnyBuffer& handle) override { replace(handle, handle.on<D>()); }

 private:
  template <class Handle, class Interface>
  void replace(Handle& handle, const Interface& original) {
    auto& copy = copies_[handle.shared().get()];
    if (!copy) copy = original.copy_to(device_.value_or(original.where()));
    handle.replace(copy);
  }
  std::optional<D> device_;
  std::map<const Node*, Ref<Node>> copies_;
};

/// A model with the same values on `device`.
template <class Model, Device D>
Model copy_to(Model model, D device) {
  GiveCopies<D> give(device);
  give.walk(model);
  return model;
}

/// Moves a model's values to `device`, unless they are there. Handles, copies of the model, optimizers and hooks stay
/// valid.
template <Device D>
[[gnu::cold, gnu::noinline]] void move_numbers(nn::Module& model, D device) {
  struct Move final : nn::detail::Walker {
    D device;
    explicit Move(D to) : device(to) {}
    void parameter(std::string_view, AnyParameter& handle) override {
      if (auto& own = handle.on<D>(); own.where() != device) own.move_to_device(device);
    }
    void buffer(std::string_view, AnyBuffer& handle) override {
      if (auto& own = handle.on<D>(); own.where() != device) own.move_to_device(device);
    }
  } move(device);
  move.walk(model);
}
/// The same; returns the model.
template <class Model, Device D>
Model moved_to(Model model, D device) {
  move_numbers(model, device);
  return model;
}

}  // namespace detail

namespace nn {

/// An independent model with the same values: parameters and buffers are copied, each on its device, with
/// requires_grad. Parameters shared within the model stay shared. Other members are copied by value. Gradients and
/// parameter hooks are not copied. For a second policy, or a target network.
template <class Model>
Model copy_of(const Model& model) {
  using D = typename decltype(detail::device_of(model))::type;
  Model copy = model;
  if constexpr (!std::is_void_v<D>) {
    chorus::detail::GiveCopies<D> give({});
    give.walk(copy);
  }
  return copy;
}

/// The same with all parameters and buffers on `device`. Throws DeviceError if it doesn't exist.
template <class Model, Device D>
Model copy_of(const Model& model, D device) {
  return chorus::detail::copy_to(model, device);
}

}  // namespace nn

}  // namespace chorus
