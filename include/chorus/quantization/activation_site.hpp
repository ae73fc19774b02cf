#pragma once
/// One quantiser of activations: the range of a value of the model, of the global batch.

#include <chorus/autograd/parameter.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/quantization/kernels/fake_quantize.hpp>
#include <chorus/quantization/observer.hpp>
#include <chorus/quantization/scheme.hpp>
#include <string>

namespace chorus::nn::quantization {

class ActivationSite {
 public:
  /// `name`: the layer's path and what of it: `conv1.output`.
  explicit ActivationSite(std::string name);

  const std::string& name() const { return name_; }
  Range range() const;
  void set_range(const Range& range) const;

  /// Moves the range towards that of the whole batch, of which these numbers are this device's share, maybe an empty
  /// one: all members of the batch's group call it. Throws NonFiniteError, on all members, where one has a NaN or an
  /// infinity. Returns whether the batch had any numbers.
  bool observe(const float* numbers, Index count, float share) const;

  /// Throws UsageError where no range is known.
  quantized::Levels levels(const Scheme& scheme) const;

  void visit(Visitor& visitor) { visitor.buffer(name_, range_); }

 private:
  std::string name_;
  Buffer<float, 1, Cpu> range_;
};

}  // namespace chorus::nn::quantization

#if !CHORUS_COMPILED
#include <chorus/quantization/activation_site_impl.hpp>
#endif
