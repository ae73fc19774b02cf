#pragma once
/// Deep copies of models: a plain copy of a model shares its parameters.

#include <chorus/nn/module.hpp>
#include <map>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace chorus {

namespace detail {

/// Gives every handle of a model a copy of its parameter or buffer on `device`, or where it is; what was shared stays
/// shared.
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

/// A model with the same numbers on `device`.
template <class Model, Device D>
Model copy_to(Model model, D device) {
  GiveCopies<D> give(device);
  give.walk(model);
  return model;
}

/// Moves a model's numbers to `device`, where they aren't there. Whatever stands for them goes along: handles, copies
/// of the model, optimizers, hooks.
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
/// The model itself, after that.
template <class Model, Device D>
Model moved_to(Model model, D device) {
  move_numbers(model, device);
  return model;
}

}  // namespace detail

namespace nn {

/// A model of its own with the same numbers: parameters and buffers are copied, each on its device, and those that
/// want no gradient want none; what was shared within the model is. All else that layers have is copied by value.
/// Gradients, and hooks of parameters, are the original's alone. For a second policy, or a target network.
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

/// The same, with all parameters and buffers on `device`. Throws DeviceError where that doesn't exist.
template <class Model, Device D>
Model copy_of(const Model& model, D device) {
  return chorus::detail::copy_to(model, device);
}

}  // namespace nn

}  // namespace chorus
