#pragma once
/// LoRA: a trained low-rank change of a frozen linear layer.

#include <chorus/nn/init.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/nn/weights.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/tensor_regions.hpp>
#include <string>

namespace chorus::nn {

/// x: [..., in] -> (alpha / rank) x Aᵀ Bᵀ: [..., out], to be added to a linear layer's result (Hu et al., "LoRA:
/// Low-Rank Adaptation of Large Language Models", ICLR 2022). lora_A.weight: [rank, in], with the initial values of a
/// Linear; lora_B.weight: [out, rank], zeros at first. The names are PEFT's. `split`: how TensorParallel shards the
/// outputs of the layer; lora_B is sharded alike.
template <Device D>
class LoRA : public Module {
 public:
  using device_type = D;
  Parameter<float, 2, D> lora_A, lora_B;

  /// Throws ShapeError unless all sizes are positive.
  LoRA(Index in_features, Index out_features, Index rank, double alpha, const Split& split = {})
      : split_(split), scale_(alpha / static_cast<double>(rank)) {
    check<ShapeError>(in_features > 0 && out_features > 0 && rank > 0, "LoRA: ", in_features, " inputs, ", out_features,
                      " outputs and rank ", rank, ": all must be positive");
    lora_A = Parameter(init::default_uniform<float, D, 2>({rank, in_features}, in_features));
    lora_B = Parameter(init::constant<float, D, 2>({out_features, rank}, 0.0f));
  }

  /// Under TensorParallel x is what all ranks have, and the result this rank's columns.
  template <Operand X>
  auto operator()(const X& x, const TensorGroupRef& group = nullptr) const {
    return detail::watched(*this, [&] {
      const ReadsParts parts;
      return linear(enter_tensor_region(linear(x, lora_A), group), lora_B) * scale_;
    });
  }
  /// alpha / rank.
  double scale() const { return scale_; }

  void visit(Visitor& visitor) override {
    visitor.parameter("lora_A.weight", lora_A);
    visitor.split_parameter("lora_B.weight", lora_B, split_);
  }
  std::string describe() const override { return cat("LoRA(rank ", lora_A.shape()[0], ")"); }

 private:
  Split split_;
  double scale_;
};

/// Freezes all parameters of a model but those of its LoRA layers. Call it before the model is given to a policy: see
/// freeze.
template <class Model>
void train_only_lora(Model& model) {
  freeze(model);
  for (auto& named : named_parameters<typename Model::device_type>(model))
    if (named.name.ends_with("lora_A.weight") || named.name.ends_with("lora_B.weight"))
      named.parameter->set_wants_grad(true);
}

}  // namespace chorus::nn
