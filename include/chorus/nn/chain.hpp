#pragma once
/// CHORUS_PIPELINE: a model whose forward function is a chain of layers, which a pipeline may cut anywhere.

#include <chorus/autograd/variable.hpp>
#include <chorus/nn/containers.hpp>
#include <chorus/nn/stash.hpp>
#include <cstddef>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus::nn {

namespace detail {

template <class Link>
inline constexpr bool is_module_list = false;
template <class M>
inline constexpr bool is_module_list<ModuleList<M>> = true;

/// The number of layers in a link; each module of a list is one.
template <class Link>
std::size_t layers_of(const Link& link) {
  if constexpr (is_module_list<Link>)
    return link.size();
  else
    return 1;
}

/// Applies layers `begin` to `end` - 1 of a link to `x`. Only the last link gets the targets.
template <class Link, class X, class... Targets>
auto run_link(const Link& link, std::size_t begin, [[maybe_unused]] std::size_t end, const X& x,
              const Targets&... targets) {
  if constexpr (is_module_list<Link>) {
    static_assert(sizeof...(Targets) == 0,
                  "CHORUS_PIPELINE: the last link takes the targets, and here it is a ModuleList: add a layer that "
                  "computes the loss");
    using Y = decltype(link[0](x));
    constexpr bool gives_what_it_takes = std::is_same_v<decltype(link[0](std::declval<const Y&>())), Y>;
    static_assert(gives_what_it_takes,
                  "CHORUS_PIPELINE: the output of a ModuleList's blocks must have the rank and type of their input");
    check<UsageError>(begin < end, "CHORUS_PIPELINE: a ModuleList has no modules");
    Y y = link[begin](x);
    if constexpr (gives_what_it_takes)
      for (std::size_t i = begin + 1; i < end; ++i) y = link[i](y);
    return y;
  } else {
    return link(x, targets...);
  }
}

/// Applies link I and all later ones to `x`.
template <std::size_t I, class Links, class X, class... Targets>
auto run_chain(const Links& links, const X& x, const Targets&... targets) {
  const auto& link = std::get<I>(links);
  if constexpr (I + 1 == std::tuple_size_v<Links>)
    return run_link(link, 0, layers_of(link), x, targets...);
  else
    return run_chain<I + 1>(links, run_link(link, 0, layers_of(link), x), targets...);
}

}  // namespace detail

}  // namespace chorus::nn

/// Used beside CHORUS_MODULE in a model: lists the links of a chain and defines `forward`, which runs them in order.
/// Each link takes the result of the previous one, a Variable or a Tensor. The last link also gets the further
/// arguments, as in a model that returns its loss: `forward(x, targets)` is `head(blocks(embed(x)), targets)`. Links
/// are layers, modules and ModuleLists; a pipeline may cut between any two modules of a list.
#define CHORUS_PIPELINE(...)                                                                            \
  static constexpr ::std::string_view pipeline_names = #__VA_ARGS__;                                    \
  auto pipeline_links() { return ::std::tie(__VA_ARGS__); }                                             \
  auto pipeline_links() const { return ::std::tie(__VA_ARGS__); }                                       \
  template <class X, class... Targets>                                                                  \
  auto forward(const X& x, const Targets&... targets) const {                                           \
    const ::chorus::nn::detail::Stashes<device_type> stashes;                                           \
    return stashes.checked(::chorus::nn::detail::run_chain<0>(pipeline_links(), x, targets...));        \
  }
