#pragma once
/// A model's chain as a stage runs a part of it: from types that are known at a cut to the next cut.

#include <algorithm>
#include <array>
#include <chorus/autograd/activation.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/parallel/pipeline/layers.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus::pipeline {

/// A stage: so many layers from this one on.
struct Stage {
  Place begin;
  std::size_t layers = 0;
};

/// What layers `begin` to `end` - 1 of link I make of `x`.
template <std::size_t I, class Model, class In, class... Targets>
auto run_part(const Model& model, std::size_t begin, std::size_t end, const In& x,
              [[maybe_unused]] const Targets&... targets) {
  const auto links = model.pipeline_links();
  if constexpr (I + 1 == std::tuple_size_v<decltype(links)>)
    return nn::detail::run_link(std::get<I>(links), begin, end, x, targets...);
  else
    return nn::detail::run_link(std::get<I>(links), begin, end, x);
}

/// The chain of `Model` for an input X. Where a stage begins is known when the program runs, what types it has there
/// when it is compiled: a table with a function for each link, N of them, not one for each pair of a beginning and an
/// end.
template <class Model, class X, class... Targets>
class Chain {
  using D = typename Model::device_type;
  using Links = decltype(std::declval<const Model&>().pipeline_links());
  static constexpr std::size_t count = std::tuple_size_v<Links>;

 public:
  using Result =
      decltype(std::declval<const Model&>().forward(std::declval<const X&>(), std::declval<const Targets&>()...));
  using Held = std::shared_ptr<AnyActivation<D>>;

  /// What a stage gives: of the last one the model's result, of others what they hand on.
  struct Outcome {
    Held output;
    std::optional<Result> result;
  };

  /// Runs `stage` on `input`, which `room_for` has made, or is an Activation<X> of the first one.
  static Outcome run(const Model& model, const Stage& stage, const AnyActivation<D>& input, const Targets&... targets) {
    return table(std::make_index_sequence<count>())[stage.begin.link].run(model, stage, input, targets...);
  }
  /// An input of the stage, with room for numbers that come with `header`.
  static Held room_for(const Stage& stage, const Header& header, D device) {
    return table(std::make_index_sequence<count>())[stage.begin.link].room_for(stage, header, device);
  }

 private:
  // What link I takes and gives.
  template <std::size_t I, class = void>
  struct Types {
    using In = typename Types<I - 1>::Out;
    using Out = decltype(run_part<I>(std::declval<const Model&>(), 0, 0, std::declval<const In&>(),
                                     std::declval<const Targets&>()...));
    static_assert(I + 1 == count || Operand<Out>, "CHORUS_PIPELINE: expected a link to return a Tensor or a Variable");
  };
  template <class Unused>
  struct Types<0, Unused> {
    using In = X;
    using Out = decltype(run_part<0>(std::declval<const Model&>(), 0, 0, std::declval<const X&>(),
                                     std::declval<const Targets&>()...));
  };

  // Link I from its layer `index` on, and what comes behind it, `left` layers in all.
  template <std::size_t I, class In>
  static Outcome go_on(const Model& model, std::size_t index, std::size_t left, const In& x,
                       const Targets&... targets) {
    const std::size_t layers = nn::detail::layers_of(std::get<I>(model.pipeline_links()));
    const std::size_t here = std::min(left, layers - index);
    auto y = run_part<I>(model, index, index + here, x, targets...);
    using Y = decltype(y);
    if constexpr (I + 1 == count) {
      if (index + here == layers) return {nullptr, std::move(y)};
    } else {
      if (left > here) return go_on<I + 1>(model, 0, left - here, y, targets...);
    }
    if constexpr (I + 1 == count && !nn::detail::is_module_list<LinkOf<I>>)
      return {};  // it has one layer
    else
      return {std::make_shared<Activation<Y>>(std::move(y)), std::nullopt};
  }
  template <std::size_t I>
  using LinkOf = std::remove_cvref_t<std::tuple_element_t<I, Links>>;

  struct Entry {
    Outcome (*run)(const Model&, const Stage&, const AnyActivation<D>&, const Targets&...);
    Held (*room_for)(const Stage&, const Header&, D);
  };
  // Within a list a stage takes what the list's modules give.
  template <std::size_t I>
  static Outcome run_from(const Model& model, const Stage& stage, const AnyActivation<D>& input,
                          const Targets&... targets) {
    if constexpr (nn::detail::is_module_list<LinkOf<I>>)
      if (stage.begin.index > 0)
        return go_on<I>(model, stage.begin.index, stage.layers,
                        static_cast<const Activation<typename Types<I>::Out>&>(input).value, targets...);
    return go_on<I>(model, 0, stage.layers, static_cast<const Activation<typename Types<I>::In>&>(input).value,
                    targets...);
  }
  template <std::size_t I>
  static Held room_in(const Stage& stage, const Header& header, D device) {
    if constexpr (nn::detail::is_module_list<LinkOf<I>>)
      if (stage.begin.index > 0) return std::make_shared<Activation<typename Types<I>::Out>>(header, device);
    return std::make_shared<Activation<typename Types<I>::In>>(header, device);
  }
  template <std::size_t... I>
  static const std::array<Entry, count>& table(std::index_sequence<I...>) {
    static constexpr std::array<Entry, count> entries{Entry{run_from<I>, room_in<I>}...};
    return entries;
  }
};

}  // namespace chorus::pipeline
