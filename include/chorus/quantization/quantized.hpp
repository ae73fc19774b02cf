#pragma once
/// Models of integers: what `quantized` makes of a model that was trained with fake quantisation.

#include <chorus/autograd/node.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/quantization/int8/conversion.hpp>
#include <chorus/quantization/int8/program.hpp>
#include <chorus/quantization/int8/recorded_pass.hpp>
#include <chorus/quantization/quantization_aware.hpp>
#include <chorus/tensor/tensor.hpp>
#include <map>
#include <utility>
#include <vector>

namespace chorus::nn {

/// A model with weights and activations of 8 bits, and sums of 32: it is called as a float model is, with float images
/// or features, and gives float numbers. Evaluation alone. `io::save` writes it, `io::load_quantized` reads it.
using QuantizedModel = int8::Program;

namespace detail {

/// Sets a model and all below it to evaluation, and back at the end: each layer to what it was.
class EvaluatedForNow {
 public:
  explicit EvaluatedForNow(Module& model) {
    struct Look final : Walker {
      std::vector<std::pair<Module*, bool>>* found = nullptr;
      void enter(Module& layer) override { found->emplace_back(&layer, layer.training()); }
    } look;
    look.found = &before_;
    before_.emplace_back(&model, model.training());
    look.walk(model);
    for (const auto& [layer, trained] : before_) layer->set_own_training(false);
  }
  ~EvaluatedForNow() {
    for (const auto& [layer, trained] : before_) layer->set_own_training(trained);
  }
  EvaluatedForNow(const EvaluatedForNow&) = delete;
  EvaluatedForNow& operator=(const EvaluatedForNow&) = delete;

 private:
  std::vector<std::pair<Module*, bool>> before_;
};

/// A pass of the model in evaluation over `x`, which is watched.
template <class Model, class Scheme, int Rank>
int8::RecordedPass recorded_evaluation(QuantizationAware<Model, Scheme>& model, const Tensor<float, Rank, Cpu>& x) {
  check<UsageError>(model.phases().fake_quantize,
                    "quantized: the model computes with floats: call fake_quantize(true), and evaluate it, first");
  const EvaluatedForNow evaluated(model);
  // With a tape operations keep what they computed with, batch norms their statistics.
  const GradMode with_tape(true);
  return {model, x, [&] { return model(x); }};
}

}  // namespace detail

/// The model in integers. `x`: a batch that it takes, a sample is enough: one pass over it in evaluation is watched,
/// and what lies between two roundings becomes one step: weights are folded and rounded once, ReLUs are limits, and
/// between the layers there are u8 alone. The steps take batches of any size. Throws UsageError, by the layer's name,
/// where a range is unknown or an operation has no integer form.
///
/// Its results are those of the model in evaluation, to the last integer: evaluation with fake quantisation computes
/// what integers stand for, in the same order. Float sums in training have errors of some 1e-6, so that a number that
/// lies as near to the middle between two levels may fall to the other side there.
template <class Model, class Scheme, int Rank>
QuantizedModel quantized(QuantizationAware<Model, Scheme>& model, const Tensor<float, Rank, Cpu>& x) {
  return int8::converted(detail::recorded_evaluation(model, x));
}

/// Of a model that takes tokens there is none: throws UsageError.
template <class Model, class Scheme, int Rank>
QuantizedModel quantized(QuantizationAware<Model, Scheme>& model, const Tensor<std::int64_t, Rank, Cpu>&) {
  fail<UsageError>("quantized: ", model.model().describe(),
                   " begins with an Embedding, but an integer model needs quantised input: use quantized_embedding");
}

}  // namespace chorus::nn
