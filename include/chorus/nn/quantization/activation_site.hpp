#pragma once
/// One quantiser of activations: the range of a value of the model, of the global batch.

#include <chorus/autograd/parameter.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/fake_quantize.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/nn/quantization/observer.hpp>
#include <chorus/nn/quantization/scheme.hpp>
#include <string>
#include <utility>

namespace chorus::nn::quantization {

class ActivationSite {
 public:
  /// `name`: the layer's path and what of it: `conv1.output`.
  explicit ActivationSite(std::string name) : name_(std::move(name)) {
    range_ = Buffer(Tensor<float, 1, Cpu>::zeros({2}));
    set_range({});
  }

  const std::string& name() const { return name_; }
  Range range() const {
    const float* const ends = value_of(range_).data();
    return {ends[0], ends[1]};
  }
  void set_range(const Range& range) const {
    float* const ends = value_of(range_).data();
    ends[0] = range.min;
    ends[1] = range.max;
    range_.on<Cpu>().touch();
  }

  /// Moves the range towards that of the whole batch, of which these numbers are this device's share, maybe an empty
  /// one: all members of the batch's group call it. Throws NonFiniteError, on all members, where one has a NaN or an
  /// infinity. Returns whether the batch had any numbers.
  bool observe(const float* numbers, Index count, float share) const {
    Range seen;
    kernels::min_max(Cpu{}, {1, 1, count}, numbers, &seen.min, &seen.max);
    if (const auto group = batch_group()) {
      double ends[] = {-static_cast<double>(seen.min), static_cast<double>(seen.max)};
      group->max(ends);
      seen = {static_cast<float>(-ends[0]), static_cast<float>(ends[1])};
    }
    check<NonFiniteError>(seen.empty() || seen.finite(), "QuantizationAware: '", name_,
                          "': a NaN or an infinity came, which no integer stands for");
    if (seen.empty()) return false;
    set_range(observed(range(), seen, share));
    return true;
  }

  /// Throws UsageError where no range is known.
  quantized::Levels levels(const Scheme& scheme) const {
    const Range known = range();
    check<UsageError>(!known.empty(), "QuantizationAware: '", name_,
                      "' has no range yet: expected a forward pass in training, with observe(true), or a file that ",
                      "has one");
    return scheme.activation_levels(known.min, known.max);
  }

  void visit(Visitor& visitor) { visitor.buffer(name_, range_); }

 private:
  std::string name_;
  Buffer<float, 1, Cpu> range_;
};

}  // namespace chorus::nn::quantization
