#pragma once
/// How the range of a layer's input or output is updated.

#include <chorus/autograd/parameter.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/quantization/activation_site.hpp>
#include <chorus/quantization/kernels/fake_quantize.hpp>
#include <chorus/quantization/observer.hpp>
#include <chorus/quantization/scheme.hpp>
#include <string>
#include <utility>

namespace chorus::nn::quantization {

CHORUS_INLINE ActivationSite::ActivationSite(std::string name) : name_(std::move(name)) {
  range_ = Buffer(Tensor<float, 1, Cpu>::zeros({2}));
  set_range({});
}

CHORUS_INLINE Range ActivationSite::range() const {
  const float* const ends = value_of(range_).data();
  return {ends[0], ends[1]};
}

CHORUS_INLINE void ActivationSite::set_range(const Range& range) const {
  float* const ends = value_of(range_).data();
  ends[0] = range.min;
  ends[1] = range.max;
  range_.on<Cpu>().touch();
}

CHORUS_INLINE bool ActivationSite::observe(const float* numbers, Index count, float share) const {
  Range seen;
  kernels::min_max(Cpu{}, {1, 1, count}, numbers, &seen.min, &seen.max);
  if (const auto group = batch_group()) {
    double ends[] = {-static_cast<double>(seen.min), static_cast<double>(seen.max)};
    group->max(ends);
    seen = {static_cast<float>(-ends[0]), static_cast<float>(ends[1])};
  }
  check<NonFiniteError>(seen.empty() || seen.finite(), "QuantizationAware: '", name_,
                        "': got a NaN or an infinity, expected finite numbers");
  if (seen.empty()) return false;
  set_range(observed(range(), seen, share));
  return true;
}

CHORUS_INLINE quantized::Levels ActivationSite::levels(const Scheme& scheme) const {
  const Range known = range();
  check<UsageError>(!known.empty(), "QuantizationAware: '", name_,
                    "' has no range yet: expected a forward pass in training, with observe(true), or a file that ",
                    "has one");
  return scheme.activation_levels(known.min, known.max);
}

}  // namespace chorus::nn::quantization
