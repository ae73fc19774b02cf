#pragma once
/// One forward pass as a list of operations, with the layers that ran them.

#include <chorus/autograd/operation_watch.hpp>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/kernels/pooling.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/convolution.hpp>
#include <chorus/ops/dropout.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/quantization/ops/fake_quantize.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace chorus::nn::int8 {

/// An operation on a value computed from the model's input. Results of operations on parameters alone are constants,
/// not steps.
struct RecordedOperation {
  std::string name;
  /// The path and the description of the innermost layer that ran it; empty for the model itself.
  std::string layer, layer_description;
  /// Values by number, 0 being the input; -1: a constant, -2: an absent operand.
  std::vector<Index> inputs;
  std::vector<chorus::detail::WatchedTensor> operands;
  Index output = 0;
  chorus::detail::WatchedTensor result;
  std::variant<std::monostate, kernels::Conv2dShape, kernels::Pool2dShape, operations::Mean, operations::FakeQuantize,
               operations::BatchNorm<float, Cpu>, operations::Concat, operations::Dropout>
      facts;
};

/// A constant that was fake-quantised: the original and its levels.
struct RecordedConstant {
  chorus::detail::WatchedTensor original;
  operations::FakeQuantize how;
};

/// Records one forward pass of a model.
class RecordedPass final : public chorus::detail::OperationWatch, public chorus::detail::LayerWatch {
  // A view has its tensor's address but another shape.
  using Key = std::pair<const void*, std::vector<Index>>;

 public:
  /// Runs `pass()`, the model's pass over `input`, and records its operations.
  template <int Rank, class Pass>
  RecordedPass(Module& model, const Tensor<float, Rank, Cpu>& input, const Pass& pass) {
    Paths paths;
    paths.found = &paths_;
    paths.walk(model);
    remember(chorus::detail::watched_tensor(input));
    const chorus::detail::Replaced<chorus::detail::LayerWatch*> layers(chorus::detail::layer_watch, this);
    const chorus::detail::Replaced<chorus::detail::OperationWatch*> operations(chorus::detail::operation_watch, this);
    const auto output = pass();
    output_ = find(chorus::detail::watched_tensor(value_of(output)));
  }

  const std::vector<RecordedOperation>& operations() const { return operations_; }
  /// The number of the value that the pass returned; -1 if it does not depend on the input.
  Index output() const { return output_; }
  /// How a constant was quantised; null if it wasn't.
  const RecordedConstant* constant(const chorus::detail::WatchedTensor& x) const {
    const auto found = constants_.find(Key(x.data, x.shape));
    return found == constants_.end() ? nullptr : &found->second;
  }

 private:
  using Tensor_ = chorus::detail::WatchedTensor;
  struct Paths final : nn::detail::Walker {
    std::map<const void*, std::pair<std::string, std::string>>* found = nullptr;
    void module(std::string_view name, Module& child) override {
      found->emplace(&child, std::pair(path(name), child.describe()));
      Walker::module(name, child);
    }
  };

  void begins(const void* layer) override {
    const auto found = paths_.find(layer);
    inside_.push_back(found == paths_.end() ? nullptr : &found->second);
  }
  void ended(const std::string&) override { inside_.pop_back(); }
  void multiply_adds(std::int64_t) override {}

  void ended(const chorus::detail::WatchedOperation& operation) override {
    RecordedOperation out{.name = operation.name,
                          .layer = {},
                          .layer_description = {},
                          .inputs = {},
                          .operands = operation.inputs,
                          .output = 0,
                          .result = operation.output,
                          .facts = {}};
    bool depends = false;
    for (const auto& input : operation.inputs) {
      out.inputs.push_back(input.defined() ? find(input) : -2);
      depends = depends || out.inputs.back() >= 0;
    }
    const std::string_view name = operation.name;
    if (!depends) {
      if (name == "fake_quantize") remember_constant(operation);
      return;
    }
    for (auto at = inside_.rbegin(); at != inside_.rend() && out.layer.empty(); ++at)
      if (*at != nullptr) {
        out.layer = (*at)->first;
        out.layer_description = (*at)->second;
      }
    if (name == "conv2d") out.facts = static_cast<const operations::Conv2d*>(operation.facts)->shape;
    if (name == "max_pool2d") out.facts = static_cast<const operations::MaxPool2d<Cpu>*>(operation.facts)->shape;
    if (name == "avg_pool2d") out.facts = static_cast<const operations::AvgPool2d*>(operation.facts)->shape;
    if (name == "concat") out.facts = *static_cast<const operations::Concat*>(operation.facts);
    if (name == "dropout") out.facts = *static_cast<const operations::Dropout*>(operation.facts);
    if (name == "mean") out.facts = *static_cast<const operations::Mean*>(operation.facts);
    if (name == "fake_quantize") out.facts = *static_cast<const operations::FakeQuantize*>(operation.facts);
    if (name == "batch_norm" || name == "batch_norm_relu")
      out.facts = *static_cast<const operations::BatchNorm<float, Cpu>*>(operation.facts);
    out.output = remember(operation.output);
    operations_.push_back(std::move(out));
  }

  Index remember(const Tensor_& x) {
    kept_.push_back(x);
    const auto number = static_cast<Index>(values_++);
    numbers_[Key(x.data, x.shape)] = number;
    return number;
  }
  Index find(const Tensor_& x) const {
    const auto found = numbers_.find(Key(x.data, x.shape));
    return found == numbers_.end() ? -1 : found->second;
  }

  void remember_constant(const chorus::detail::WatchedOperation& operation) {
    kept_.push_back(operation.output);
    constants_.insert_or_assign(
        Key(operation.output.data, operation.output.shape),
        RecordedConstant{operation.inputs[0], *static_cast<const operations::FakeQuantize*>(operation.facts)});
  }

  std::map<Key, RecordedConstant> constants_;
  std::map<const void*, std::pair<std::string, std::string>> paths_;
  std::vector<const std::pair<std::string, std::string>*> inside_;
  std::vector<RecordedOperation> operations_;
  std::map<Key, Index> numbers_;
  std::vector<Tensor_> kept_;
  std::size_t values_ = 0;
  Index output_ = -1;
};

}  // namespace chorus::nn::int8
