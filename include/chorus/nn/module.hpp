#pragma once
/// Module: a struct of layers and parameters that knows their names.

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

/// Sees the members of a module, in the order in which they were listed. It may replace the handles.
class Visitor {
 public:
  virtual ~Visitor() = default;
  virtual void module(std::string_view name, Module& module) = 0;
  /// A model inside of the one that is seen, which has the same members and no name of its own, as in MixedPrecision.
  virtual void inner(Module&) {}
  virtual void parameter(std::string_view name, AnyParameter& parameter) = 0;
  /// A parameter that ranks may share out, and how: to most visitors one like any other.
  virtual void split_parameter(std::string_view name, AnyParameter& handle, const Split&) { parameter(name, handle); }
  virtual void buffer(std::string_view name, AnyBuffer& buffer) = 0;
};

/// Base of layers and models. A model lists its members once, by CHORUS_MODULE; names are paths as in PyTorch:
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

  /// What a layer goes by. In what backward computes again (`checkpoint`) it is what it was the first time.
  bool training() const {
    if (chorus::detail::first_run != nullptr) [[unlikely]]
      return chorus::detail::first_run->found(this, 0, training_);
    return training_;
  }
  /// Switches this module and all below it; dropout and batch norm behave differently in evaluation.
  void train(bool training = true);
  void eval() { train(false); }
  /// Switches this module alone, not those below it.
  void set_own_training(bool training) { training_ = training; }

 private:
  bool training_ = true;
};

namespace detail {

// A layer's output for people: the shape of a tensor, of each member of a tuple, or of what has `fields()`.
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

/// `call()`, which is what `layer` does; who watches layers is told.
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

// The same of a model, which `call` gets: clang 14 takes `this->forward` in a lambda for a call of what comes later.
template <class Model, class Call>
auto watched_model(const Model& model, const Call& call) {
  return watched(model, [&] { return call(model); });
}

// The listed members' names come as one text, "conv1, conv2": the preprocessor's `#__VA_ARGS__`.
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
  } else if constexpr (requires { member.has_value(); *member; }) {  // a layer that a model may do without
    if (member.has_value()) visit_member(visitor, name, *member);
  } else if constexpr (std::is_base_of_v<AnyParameter, Member>) {
    if (member) visitor.parameter(name, member);
  } else if constexpr (std::is_base_of_v<AnyBuffer, Member>) {
    if (member) visitor.buffer(name, member);
  } else {
    static_assert(std::is_base_of_v<AnyBuffer, Member>,
                  "CHORUS_MODULE: expected layers, modules, parameters, buffers, and std::optional ones; for a list of "
                  "modules use nn::ModuleList<M>, not std::vector<M>");
  }
}

template <class... Members>
void visit_members(Visitor& visitor, std::string_view names, Members&... members) {
  (visit_member(visitor, next_name(names), members), ...);
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

// A model's `device_type`. Of one without CHORUS_MODULE, which policies refuse, some: so that they say just that.
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

/// Throws UsageError where the parameter is one rank's part of what `who` has to see whole; `instead`: what to do.
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

/// Walks a module and all below it; what is shared is seen at each of its places.
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

[[gnu::cold]] inline bool any_layer_trains(Module& model) {
  struct Look final : Walker {
    bool any = false;
    void enter(Module& layer) override { any = any || layer.training(); }
  } look;
  look.walk(model);
  return look.any;
}
/// Whether the model or any layer of it is in training: a layer's flag may differ from the model's.
inline bool any_training(Module& model) { return model.training() || any_layer_trains(model); }

}  // namespace detail

/// All parameters of a model with their paths, in the order in which members are listed; a shared one once.
template <Device D>
std::vector<NamedParameter<D>> named_parameters(Module& module);

/// All buffers of a model with their paths, likewise.
template <Device D>
std::vector<NamedBuffer<D>> named_buffers(Module& module);

}  // namespace chorus::nn

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/nn/module_impl.hpp>
#endif

/// Inside a model: lists its layers, submodules, parameters and buffers, whose names become paths, and makes the model
/// callable as its `forward` is.
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
