#pragma once
/// One quantiser of activations: the range of a value in the model, over the global batch.

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
  /// `name`: the layer's path and the value: `conv1.output`.
  explicit ActivationSite(std::string name);

  const std::string& name() const { return name_; }
  Range range() const;
  void set_range(const Range& range) const;

  /// Moves the range towards the whole batch's range. `numbers`: this device's share, possibly empty. All members of
  /// the batch's group call it. Throws NonFiniteError, on all members, if one has a NaN or infinity. Returns whether
  /// the batch had any numbers.
  bool observe(const float* numbers, Index count, float share) const;

  /// Throws UsageError if the range is unknown.
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
