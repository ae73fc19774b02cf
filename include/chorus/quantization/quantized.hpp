#pragma once
/// Integer models: `quantized` converts a model that was trained with fake quantisation.

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

/// A model with 8-bit weights and activations and 32-bit sums. It is called like a float model, with float images or
/// features, and returns float numbers. For evaluation only. `io::save` writes it, `io::load_quantized` reads it.
using QuantizedModel = int8::Program;

namespace detail {

/// Sets a model and all its layers to evaluation; its destructor restores each layer's flag.
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

/// Records a pass of the model in evaluation over `x`.
template <class Model, class Scheme, int Rank>
int8::RecordedPass recorded_evaluation(QuantizationAware<Model, Scheme>& model, const Tensor<float, Rank, Cpu>& x) {
  check<UsageError>(model.phases().fake_quantize,
                    "quantized: the model computes with floats: call fake_quantize(true), and evaluate it, first");
  const EvaluatedForNow evaluated(model);
  // With a tape, operations keep their operands and batch norms their statistics.
  const GradMode with_tape(true);
  return {model, x, [&] { return model(x); }};
}

}  // namespace detail

/// The model in integers. `x`: any valid batch; one sample is enough. Records one pass over it in evaluation and turns
/// the operations between two roundings into one step: weights are folded and rounded once, ReLUs become limits, and
/// values between layers are u8. The steps take batches of any size. Throws UsageError, with the layer's name, if a
/// range is unknown or an operation has no integer form.
///
/// Results equal those of the model in evaluation, to the last integer: evaluation with fake quantisation computes the
/// integers' values in the same order. Float sums in training have errors of some 1e-6, so a number that close to the
/// middle between two levels may be rounded the other way.
template <class Model, class Scheme, int Rank>
QuantizedModel quantized(QuantizationAware<Model, Scheme>& model, const Tensor<float, Rank, Cpu>& x) {
  return int8::converted(detail::recorded_evaluation(model, x));
}

/// A model that takes tokens has no integer form: throws UsageError.
template <class Model, class Scheme, int Rank>
QuantizedModel quantized(QuantizationAware<Model, Scheme>& model, const Tensor<std::int64_t, Rank, Cpu>&) {
  fail<UsageError>("quantized: ", model.model().describe(),
                   " begins with an Embedding, but an integer model needs quantised input: use quantized_embedding");
}

}  // namespace chorus::nn
