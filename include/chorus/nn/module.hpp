#pragma once
/// Module: a struct of layers and parameters with names.

#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <chorus/autograd/parameter.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/core/recomputation.hpp>
#include <chorus/core/split.hpp>

namespace chorus::nn {

class Module;

/// Visits the members of a module in the order of their declaration in CHORUS_MODULE. It may replace the handles.
class Visitor {
 public:
  virtual ~Visitor() = default;
  virtual void module(std::string_view name, Module& module) = 0;
  /// A wrapped model with the same members and no name of its own, as in MixedPrecision.
  virtual void inner(Module&) {}
  virtual void parameter(std::string_view name, AnyParameter& parameter) = 0;
  /// A parameter that ranks may shard, and how. By default visited as any other.
  virtual void split_parameter(std::string_view name, AnyParameter& handle, const Split&) { parameter(name, handle); }
  virtual void buffer(std::string_view name, AnyBuffer& buffer) = 0;
};

/// Base of layers and models. A model lists its members once, with CHORUS_MODULE. Names are paths as in PyTorch:
/// `conv1.weight`, `blocks.3.norm.running_mean`.
class Module {
 public:
  virtual ~Module() = default;
  Module() = default;
  Module(const Module&) = default;
  Module(Module&&) = default;
  Module& operator=(const Module&) = default;
  Module& operator=(Module&&) = default;

  virtual void visit(Visitor&) {}
  /// The type and its sizes, for the summary: `Conv2d(3, 6, kernel=5)`.
  virtual std::string describe() const { return "Module"; }

  /// Whether the layer is in training mode. In a recomputation (`checkpoint`) it is the mode of the first run.
  bool training() const {
    if (chorus::detail::first_run != nullptr) [[unlikely]]
      return chorus::detail::first_run->found(this, 0, training_);
    return training_;
  }
  /// Sets the mode of this module and its submodules. Dropout and batch norm depend on it.
  void train(bool training = true);
  void eval() { train(false); }
  /// Sets the mode of this module only.
  void set_own_training(bool training) { training_ = training; }

 private:
  bool training_ = true;
};

namespace detail {

// A layer's output as text: the shape of a tensor, of each tuple member, or of each of `fields()`.
template <class Y>
[[gnu::cold]] std::string shape_text(const Y& y) {
  if constexpr (requires { value_of(y).shape(); }) {
    return cat(value_of(y).shape());
  } else if constexpr (requires { cat(y.shape()); }) {
    return cat(y.shape());
  } else if constexpr (requires { std::tuple_size<Y>::value; }) {
    std::string text;
    std::apply([&](const auto&... members) { ((text += cat(text.empty() ? "" : ", ", shape_text(members))), ...); }, y);
    return text;
  } else if constexpr (requires(Y copy) { copy.fields(); }) {
    Y copy = y;
    return shape_text(copy.fields());
  } else {
    return "-";
  }
}

/// Runs `call()`, the computation of `layer`, and tells the observer of layers.
template <class Call>
auto watched(const Module& layer, const Call& call) {
  auto* const watch = chorus::detail::layer_watch;
  if (watch != nullptr) [[unlikely]]
    watch->begins(&layer);
  if constexpr (std::is_void_v<decltype(call())>) {
    call();
    if (watch != nullptr) [[unlikely]]
      watch->ended("-");
  } else {
    auto output = call();
    if (watch != nullptr) [[unlikely]]
      watch->ended(shape_text(output));
    return output;
  }
}

// The same for a model, which is passed to `call`: clang 14 rejects `this->forward` in the lambda.
template <class Model, class Call>
auto watched_model(const Model& model, const Call& call) {
  return watched(model, [&] { return call(model); });
}

// The member names come as one text, "conv1, conv2", from the preprocessor's `#__VA_ARGS__`.
inline std::string_view next_name(std::string_view& names) {
  const auto comma = names.find(',');
  auto name = names.substr(0, comma);
  names.remove_prefix(comma == std::string_view::npos ? names.size() : comma + 1);
  while (!name.empty() && name.front() == ' ') name.remove_prefix(1);
  while (!name.empty() && name.back() == ' ') name.remove_suffix(1);
  return name;
}

template <class Member>
void visit_member(Visitor& visitor, std::string_view name, Member& member) {
  if constexpr (std::is_base_of_v<Module, Member>) {
    visitor.module(name, member);
  } else if constexpr (requires { member.has_value(); *member; }) {  // an optional layer
    if (member.has_value()) visit_member(visitor, name, *member);
  } else if constexpr (std::is_base_of_v<AnyParameter, Member>) {
    if (member) visitor.parameter(name, member);
  } else if constexpr (std::is_base_of_v<AnyBuffer, Member>) {
    if (member) visitor.buffer(name, member);
  } else if constexpr (requires { member.visit(visitor, name); }) {  // it says what ranks have of it
    member.visit(visitor, name);
  } else {
    static_assert(std::is_base_of_v<AnyBuffer, Member>,
                  "CHORUS_MODULE: expected layers, modules, parameters, buffers, and std::optional ones; for a list of "
                  "modules use nn::ModuleList<M>, not std::vector<M>");
  }
}

template <class... Members>
void visit_members(Visitor& visitor, std::string_view names, Members&... members) {
  // A list, since clang refuses a fold over more than 256 members.
  static_cast<void>(std::initializer_list<int>{(visit_member(visitor, next_name(names), members), 0)...});
}

// The device type of the first member that has one.
template <class... Members>
struct DeviceOf {
  using type = void;
};
template <class First, class... Rest>
struct DeviceOf<First, Rest...> : DeviceOf<Rest...> {};
template <class First, class... Rest>
  requires requires { typename std::remove_cvref_t<First>::device_type; } &&
           (!std::is_void_v<typename std::remove_cvref_t<First>::device_type>)
struct DeviceOf<First, Rest...> {
  using type = typename std::remove_cvref_t<First>::device_type;
};
template <class... Members>
DeviceOf<Members...> device_of(const Members&... members);

// A model's `device_type`. Models without CHORUS_MODULE get Cpu, so that policies can report the missing macro only.
template <class Model>
struct DeviceOfModel {
  using type = Cpu;
};
template <class Model>
requires requires { typename Model::device_type; }
struct DeviceOfModel<Model> {
  using type = typename Model::device_type;
};

}  // namespace detail

/// A parameter and its path in the model.
template <Device D>
struct NamedParameter {
  std::string name;
  AnyParameter handle;
  ParameterOn<D>* parameter;
};

/// Throws UsageError if the parameter is a shard and `who` needs the whole one; `instead` is the advice.
template <Device D>
void check_whole(std::string_view who, const NamedParameter<D>& named, std::string_view instead) {
  if (named.parameter->in_pieces())
    chorus::fail<UsageError>(who, ": '", named.name, "' is split over ranks, and this rank has a part: ", instead);
}

/// A buffer and its path in the model.
template <Device D>
struct NamedBuffer {
  std::string name;
  AnyBuffer handle;
  BufferOn<D>* buffer;
};

namespace detail {

/// Walks a module and all its submodules. Shared members are visited at each place.
class Walker : public Visitor {
 public:
  void walk(Module& module) { module.visit(*this); }
  void module(std::string_view name, Module& child) override;
  void inner(Module& model) override { enter(model); }
  void parameter(std::string_view, AnyParameter&) override {}
  void buffer(std::string_view, AnyBuffer&) override {}

 protected:
  virtual void enter(Module&) {}
  std::string path(std::string_view name) const { return prefix_ + std::string(name); }
  const std::string& prefix() const { return prefix_; }

 private:
  std::string prefix_;
};

[[gnu::cold]] bool any_layer_trains(Module& model);
/// Whether the model or any of its layers is in training mode: a layer's flag may differ from the model's.
inline bool any_training(Module& model) { return model.training() || any_layer_trains(model); }

}  // namespace detail

/// All parameters of a model with their paths, in declaration order; a shared one once.
template <Device D>
std::vector<NamedParameter<D>> named_parameters(Module& module);

/// All buffers of a model with their paths, in declaration order.
template <Device D>
std::vector<NamedBuffer<D>> named_buffers(Module& module);

}  // namespace chorus::nn

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/nn/module_impl.hpp>
#endif

/// Inside a model: lists its layers, submodules, parameters and buffers, whose names become paths. Makes the model
/// callable with the arguments of its `forward`.
#define CHORUS_MODULE(TYPE, ...)                                                                         \
  using device_type = typename decltype(::chorus::nn::detail::device_of(__VA_ARGS__))::type;            \
  void visit(::chorus::nn::Visitor& visitor) override {                                                 \
    ::chorus::nn::detail::visit_members(visitor, #__VA_ARGS__, __VA_ARGS__);                            \
  }                                                                                                      \
  std::string describe() const override { return #TYPE; }                                               \
  template <class... Inputs>                                                                             \
  auto operator()(const Inputs&... inputs) const {                                                      \
    return ::chorus::nn::detail::watched_model(                                                         \
        *this, [&](const auto& self) { return self.forward(inputs...); });                              \
  }
