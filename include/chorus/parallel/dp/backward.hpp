#pragma once
/// Backward through DataParallel: from the gathered outputs to all devices, and on to the inputs.

#include <chorus/autograd/node.hpp>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace chorus::dp {

/// By device: the outputs of its copy that have a gradient.
using Roots = std::vector<std::vector<Ref<Node>>>;

/// How the gradient of a device's share of an input is added to the input's.
struct GradientReturn {
  Ref<Node> input;
  std::function<void()> add;
};
/// For all inputs, in order.
using GradientReturns = std::vector<GradientReturn>;

/// Runs backward on the devices. Must outlive the losses.
class BackwardRunner {
 public:
  /// Adds to the gradients of the parameters.
  virtual void backward(const Roots& roots, bool keep) = 0;
  /// The same without hooks, for the parameters that are not skipped.
  virtual void backward_to_wanted(const Roots& roots, bool keep) = 0;
  virtual void for_each_parameter(void (*visit)(Node&, void*), void* context) const = 0;

 protected:
  virtual ~BackwardRunner() = default;
};

/// One node of the tape that represents the work of all devices. The gathered outputs pass their gradients to the
/// devices' outputs; then this node runs backward on all devices.
class BackwardNode : public Node {
 public:
  /// `alive` expires with `runner`. `returns`: by device, at least one.
  BackwardNode(BackwardRunner& runner, std::weak_ptr<void> alive, std::vector<GradientReturns> returns)
      : Node("data_parallel"),
        roots(returns.size()),
        returns_(std::move(returns)),
        runner_(runner),
        alive_(std::move(alive)) {}

  void backward(bool keep) override {
    runner().backward(roots, keep);
    go_on(keep);
  }
  void backward_to_wanted(bool keep) override {
    runner().backward_to_wanted(roots, keep);
    go_on(keep);
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& entry : returns_.front()) visit(*entry.input, context);
  }
  void for_each_far_leaf(void (*visit)(Node&, void*), void* context) const override {
    runner().for_each_parameter(visit, context);
  }

  Roots roots;

 private:
  // Goes on to the inputs one by one, for each in the order of the devices, so that all runs add in one order.
  void go_on(bool keep) {
    for (auto& list : roots) list.clear();
    for (std::size_t input = 0; input < returns_.front().size(); ++input)
      for (const auto& device : returns_) device[input].add();
    if (!keep)
      for (auto& device : returns_) device.clear();
  }
  BackwardRunner& runner() const {
    check<UsageError>(!alive_.expired(),
                      "backward: the policy of this output was destroyed; it must outlive the losses that use it");
    return runner_;
  }

  std::vector<GradientReturns> returns_;
  BackwardRunner& runner_;
  std::weak_ptr<void> alive_;
};

}  // namespace chorus::dp
