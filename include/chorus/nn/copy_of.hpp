#pragma once
/// Deep copies of models: a plain copy of a model shares its parameters.

#include <chorus/nn/module.hpp>
#include <map>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

namespace chorus::inline CHORUS_ABI {

namespace detail {

/// Gives every handle of a model a copy of its parameter or buffer on `device`, or where it is; what was shared stays
/// shared. `in_place`: the copies take the originals' places, with their gradients and the hooks that users have
/// registered.
template <Device D>
class Relocate final : public nn::detail::Walker {
 public:
  Relocate(std::optional<D> device, bool in_place) : device_(device), in_place_(in_place) {}
  void parameter(std::string_view, AnyParameter& handle) override {
    const auto original = handle.shared();
    const bool first = !copies_.contains(original.get());
    const auto& before = handle.on<D>();
    replace(handle, before);
    if (!in_place_ || !first) return;
    if (before.grad_arrived()) handle.on<D>().add_grad_of(before);
    handle.on<D>().take_hooks_of(original);
  }
  void buffer(std::string_view, AnyBuffer& handle) override { replace(handle, handle.on<D>()); }

 private:
  template <class Handle, class Interface>
  void replace(Handle& handle, const Interface& original) {
    auto& copy = copies_[handle.shared().get()];
    if (!copy) copy = original.copy_to(device_.value_or(original.where()));
    handle.replace(copy);
  }
  std::optional<D> device_;
  bool in_place_;
  std::map<const Node*, Ref<Node>> copies_;
};

/// The model with all its numbers on `device`.
template <class Model, Device D>
Model copy_to(Model model, D device, bool in_place = false) {
  Relocate<D> relocate(device, in_place);
  relocate.walk(model);
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
    chorus::detail::Relocate<D> relocate({}, false);
    relocate.walk(copy);
  }
  return copy;
}

}  // namespace nn

}  // namespace chorus::inline CHORUS_ABI
