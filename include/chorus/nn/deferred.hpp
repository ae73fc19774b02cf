#pragma once
/// Deferred: a model that is yet to be made, so that no process ever has to hold all of it.

#include <chorus/tensor/promised_numbers.hpp>
#include <tuple>
#include <utility>

namespace chorus {

/// What `deferred` gives: the arguments of a model's constructor.
template <class Model, class... Arguments>
class Deferred {
 public:
  explicit Deferred(Arguments... arguments) : arguments_(std::move(arguments)...) {}
  Model make() const { return std::make_from_tuple<Model>(arguments_); }

 private:
  std::tuple<Arguments...> arguments_;
};

/// `Model(arguments...)`, for a policy that keeps a part of the parameters on each rank: it makes the model with
/// addresses for its parameters and no numbers, and each rank draws the initial numbers of its part alone, the same as
/// the whole model's. For models whose parameters come from nn::init, as those of all layers do: a constructor that
/// reads or writes their numbers is refused.
///   Net net{ch::deferred<Gpt>(config), run};
template <class Model, class... Arguments>
Deferred<Model, Arguments...> deferred(Arguments... arguments) {
  return Deferred<Model, Arguments...>(std::move(arguments)...);
}

namespace detail {

/// While it lives, models that this thread makes, and policies that take them, leave promised numbers promised.
template <class Model>
class Making {
 public:
  template <class... Arguments>
  explicit Making(const Deferred<Model, Arguments...>& model) : scope_(promises_), model_(model.make()) {}
  ~Making() { promises_.keep_the_rest(); }
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;
  Model take() { return std::move(model_); }
  const PromisedNumbers& promises() const { return promises_; }

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

}  // namespace detail
}  // namespace chorus
