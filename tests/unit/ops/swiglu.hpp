#pragma once
/// What a user writes: an element-wise function of two operands, once for numbers, packs of them and Dual numbers.

#include <chorus/core/config.hpp>

struct SwiGlu {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a / (1 + exp(-a)) * b;
  }
};
