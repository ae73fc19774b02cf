#pragma once
/// Deferred: a model that is built later, so that no process has to hold all of it.

#include <chorus/nn/module.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <tuple>
#include <utility>

namespace chorus {

/// The result of `deferred`: the arguments of a model's constructor.
template <class Model, class... Arguments>
class Deferred {
 public:
  explicit Deferred(Arguments... arguments) : arguments_(std::move(arguments)...) {}
  Model make() const { return std::make_from_tuple<Model>(arguments_); }
  /// For policies whose ranks hold the whole model.
  operator Model() const { return make(); }

 private:
  std::tuple<Arguments...> arguments_;
};

/// `Model(arguments...)` for a policy that shards parameters. It builds the model with addresses but without values,
/// and each rank draws only its part of the initial values, which equal the whole model's. For models whose parameters
/// come from nn::init, as in all layers. A constructor that reads or writes parameter values throws.
///   Net net{ch::deferred<Gpt>(config), run};
template <class Model, class... Arguments>
Deferred<Model, Arguments...> deferred(Arguments... arguments) {
  return Deferred<Model, Arguments...>(std::move(arguments)...);
}

namespace detail {

/// While it lives, models built by this thread, and policies that take them, keep their initial values undrawn until
/// `keep_promises`.
template <class Model>
class Making {
 public:
  template <class... Arguments>
  explicit Making(const Deferred<Model, Arguments...>& model) : scope_(promises_), model_(model.make()) {
    using D = typename nn::detail::DeviceOfModel<Model>::type;
    for (const auto& named : nn::named_parameters<D>(model_))
      promises_.check_untouched(named.parameter->place(), named.name);
    promises_.check_untouched();
  }
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;
  Model take() { return std::move(model_); }

 private:
  struct Scope {
    PromisedNumbers* before;
    explicit Scope(PromisedNumbers& promises) : before(std::exchange(PromisedNumbers::current(), &promises)) {}
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() { PromisedNumbers::current() = before; }
  };
  PromisedNumbers promises_;
  Scope scope_;
  Model model_;
};

/// Draws all undrawn initial values of this thread, and draws later ones at once.
inline void keep_promises() {
  if (auto* const promises = std::exchange(PromisedNumbers::current(), nullptr)) promises->keep_the_rest();
}
/// Draws the values of `part` and returns it.
template <class Part>
Part with_numbers(Part part) {
  keep_promises();
  return part;
}

}  // namespace detail
}  // namespace chorus
