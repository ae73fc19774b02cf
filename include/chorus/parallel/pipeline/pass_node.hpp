#pragma once
/// The tape's node for a pass through a pipeline.

#include <chorus/autograd/grad_node.hpp>
#include <functional>
#include <utility>
#include <vector>

namespace chorus::pipeline {

template <Real T, int Rank, Device D>
class PassNode : public GradNode<T, Rank, D> {
 public:
  using Back = std::function<void(const Tensor<T, Rank, D>& gradient, bool keep)>;

  /// `back` computes the gradients of `leaves`, or of some of them, from the gradient by the pass's result.
  PassNode(const Tensor<T, Rank, D>& value, std::vector<Ref<Node>> leaves, Back back)
      : GradNode<T, Rank, D>("Pipeline", value.shape(), value.device()),
        leaves_(std::move(leaves)),
        back_(std::move(back)) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check<UsageError>(static_cast<bool>(back_), "backward: the pass through the pipeline was freed by an earlier ",
                      "backward; pass retain_graph = true to that one");
    const auto gradient = this->take_grad();
    back_(gradient, keep);
    if (!keep) back_ = nullptr;
  }
  void backward_to_wanted(bool) override {
    fail<UsageError>("Pipeline: grad() does not support a pipeline's forward pass: expected backward()");
  }
  void for_each_input(void (*)(Node&, void*), void*) const override {}
  void for_each_far_leaf(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& leaf : leaves_) visit(*leaf, context);
  }
  bool only_to_inputs() const override { return false; }

 private:
  std::vector<Ref<Node>> leaves_;
  Back back_;
};

}  // namespace chorus::pipeline
