#pragma once
/// A function of one operand as a layer.

#include <chorus/autograd/variable.hpp>
#include <chorus/nn/module.hpp>
#include <string>

/// Defines the layer `LAYER`, which calls `FUNCTION`. For use inside of a namespace.
#define CHORUS_FUNCTION_LAYER(LAYER, FUNCTION)                    \
  struct LAYER : Module {                                         \
    template <Operand X>                                          \
    auto operator()(const X& x) const {                           \
      return detail::watched(*this, [&] { return FUNCTION(x); }); \
    }                                                             \
    template <class X, class... Kinds>                            \
    auto operator()(const Placed<X, Kinds...>& x) const {         \
      return detail::watched(*this, [&] { return FUNCTION(x); }); \
    }                                                             \
    std::string describe() const override { return #LAYER; }      \
  }
