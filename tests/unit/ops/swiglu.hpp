#pragma once
/// A user's element-wise function of two operands, written once for numbers, Packs and Duals.

#include <chorus/core/config.hpp>

struct SwiGlu {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a / (1 + exp(-a)) * b;
  }
};
