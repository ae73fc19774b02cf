#pragma once
/// A stage's part of a model's chain: from one cut, whose types are known, to the next.

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

/// A stage: `layers` layers from `begin` on.
struct Stage {
  Place begin;
  std::size_t layers = 0;
};

/// Applies layers `begin` to `end` - 1 of link I to `x`.
template <std::size_t I, class Model, class In, class... Targets>
auto run_part(const Model& model, std::size_t begin, std::size_t end, const In& x,
              [[maybe_unused]] const Targets&... targets) {
  const auto links = model.pipeline_links();
  if constexpr (I + 1 == std::tuple_size_v<decltype(links)>)
    return nn::detail::run_link(std::get<I>(links), begin, end, x, targets...);
  else
    return nn::detail::run_link(std::get<I>(links), begin, end, x);
}

/// The chain of `Model` for an input X. A stage's begin is known at run time, its types at compile time: the table has
/// one function per link, N in all, rather than one per pair of begin and end.
template <class Model, class X, class... Targets>
class Chain {
  using D = typename Model::device_type;
  using Links = decltype(std::declval<const Model&>().pipeline_links());
  static constexpr std::size_t count = std::tuple_size_v<Links>;

 public:
  using Result =
      decltype(std::declval<const Model&>().forward(std::declval<const X&>(), std::declval<const Targets&>()...));
  using Held = std::shared_ptr<AnyActivation<D>>;

  /// A stage's result: the model's for the last stage, the handed-on activation for others.
  struct Outcome {
    Held output;
    std::optional<Result> result;
  };

  /// Runs `stage` on `input`, an Activation<X> for the first stage, else made by `room_for`.
  static Outcome run(const Model& model, const Stage& stage, const AnyActivation<D>& input, const Targets&... targets) {
    return table(std::make_index_sequence<count>())[stage.begin.link].run(model, stage, input, targets...);
  }
  /// A stage's input with memory for the numbers that `header` announces.
  static Held room_for(const Stage& stage, const Header& header, D device) {
    return table(std::make_index_sequence<count>())[stage.begin.link].room_for(stage, header, device);
  }

 private:
  // The input and output types of link I.
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

  // Runs `left` layers in all, from layer `index` of link I on.
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
  // Within a list a stage's input has the output type of the list's modules.
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
