#pragma once
/// Folds batch norms into the layers before them, for inference.

#include <algorithm>
#include <chorus/autograd/operation_watch.hpp>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/convolutions.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/module.hpp>
#include <cmath>
#include <cstdint>
#include <map>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::nn {

namespace detail {

/// Observes one forward pass and finds batch norms that are the only user of a layer's output.
class FollowingNorms final : public chorus::detail::OperationWatch, public chorus::detail::LayerWatch {
 public:
  explicit FollowingNorms(Module& model) {
    struct All final : Walker {
      std::map<const void*, Module*>* found = nullptr;
      void enter(Module& layer) override { found->emplace(&layer, &layer); }
    } all;
    all.found = &modules_;
    all.walk(model);
  }
  /// Pairs of a layer and its batch norm, both called once. `result`: the model's output.
  std::vector<std::pair<Module*, Module*>> found(const void* result) const {
    std::vector<std::pair<Module*, Module*>> out;
    for (const auto& [data, made] : made_)
      if (data != result && made.norm != nullptr && made.takers == 1 && calls_.at(made.layer) == 1 &&
          calls_.at(made.norm) == 1)
        out.emplace_back(modules_.at(made.layer), modules_.at(made.norm));
    return out;
  }

 private:
  struct Made {
    const void *layer = nullptr, *norm = nullptr;
    int takers = 0;
  };

  void begins(const void* layer) override {
    inside_.push_back(layer);
    ++calls_[layer];
  }
  void ended(const std::string&) override { inside_.pop_back(); }
  void multiply_adds(std::int64_t) override {}
  void ended(const chorus::detail::WatchedOperation& operation) override {
    const void* const layer = inside_.empty() ? nullptr : inside_.back();
    const bool known = modules_.contains(layer);
    const std::string_view name = operation.name;
    for (std::size_t i = 0; i < operation.inputs.size(); ++i) {
      const auto made = made_.find(operation.inputs[i].data);
      if (made == made_.end()) continue;
      ++made->second.takers;
      if (known && i == 0 && (name == "batch_norm" || name == "batch_norm_relu")) made->second.norm = layer;
    }
    kept_.push_back(operation.output);
    if (known && (name == "conv1d" || name == "conv2d" || name == "conv3d" || name == "linear"))
      made_[operation.output.data] = {layer};
  }

  std::map<const void*, Module*> modules_;
  std::map<const void*, int> calls_;
  std::vector<const void*> inside_;
  std::map<const void*, Made> made_;
  std::vector<chorus::detail::WatchedTensor> kept_;  // kept alive, so that no address is reused
};

/// A tensor like `like` with these values.
template <class T, int Rank, class D>
Tensor<T, Rank, D> tensor_like(const Tensor<T, Rank, D>& like, const std::vector<T>& numbers) {
  auto out = Tensor<T, Rank, D>::empty(like.shape(), like.device());
  copy_bytes(out.device(), out.data(), Cpu{}, numbers.data(), out.bytes());
  return out;
}

/// weight <- weight factor, bias <- beta + (bias - mean) factor, with factor = gamma / sqrt(var + eps), as new
/// parameters, computed in double.
template <class Layer, class T, class D>
void fold_into(Layer& layer, BatchNorm<D, T>& norm) {
  const auto& mean = value_of(norm.running_mean);
  const auto means = mean.to_vector(), vars = value_of(norm.running_var).to_vector();
  const std::size_t channels = means.size();
  std::vector<T> gamma(channels, T{1}), bias(channels, T{0}), beta(channels, T{0});
  if (norm.weight) gamma = value_of(norm.weight).to_vector(), beta = value_of(norm.bias).to_vector();
  if (layer.bias) bias = value_of(layer.bias).to_vector();
  auto weight = value_of(layer.weight).to_vector();
  const std::size_t terms = weight.size() / channels;
  for (std::size_t c = 0; c < channels; ++c) {
    const auto number = [c](const std::vector<T>& of) { return static_cast<double>(of[c]); };
    const double factor = number(gamma) / std::sqrt(number(vars) + norm.eps());
    for (std::size_t i = c * terms; i < (c + 1) * terms; ++i)
      weight[i] = static_cast<T>(static_cast<double>(weight[i]) * factor);
    bias[c] = static_cast<T>(number(beta) + (number(bias) - number(means)) * factor);
  }
  layer.weight = Parameter(tensor_like(value_of(layer.weight), weight));
  layer.bias = Parameter(tensor_like(mean, bias));
  norm.fold_away();
}

/// Folds the norm if both have scalar type T and the layer is supported.
template <class T, class D>
void fold_pair(Module& layer, Module& following) {
  auto* const norm = dynamic_cast<BatchNorm<D, T>*>(&following);
  if (norm == nullptr || !norm->tracks_running_stats()) return;
  const auto fold = [norm](auto* weighted) {
    if (weighted != nullptr && weighted->weight.shape()[0] == norm->channels()) fold_into(*weighted, *norm);
  };
  fold(dynamic_cast<Conv2d<D, T>*>(&layer));
  fold(dynamic_cast<Conv1d<D, T>*>(&layer));
  fold(dynamic_cast<Conv3d<D, T>*>(&layer));
  if (norm->tracks_running_stats()) fold(dynamic_cast<Linear<D, T>*>(&layer));
}

/// Throws UsageError if two results of a model differ by more than rounding.
template <class Y>
void check_same_results(const Y& expected, const Y& got) {
  const auto a = contiguous(value_of(expected)).to_vector(), b = contiguous(value_of(got)).to_vector();
  double most = 0, largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    largest = std::max(largest, std::abs(x));
    if (std::isfinite(x)) most = std::isfinite(y) ? std::max(most, std::abs(x - y)) : std::abs(x) + 1;
  }
  check<UsageError>(most <= 1e-3 * std::max(largest, 1e-3),
                    "fold_batch_norm: the outputs of the folded model differ by ", most,
                    " from the model's, whose largest is ", largest,
                    ": its forward uses a layer's output outside of the recorded operations");
}

}  // namespace detail

/// A copy of the model for inference, with each batch norm that directly follows a convolution or a linear layer folded
/// into that layer's weight and bias (PyTorch's fuse_conv_bn_eval). Results are the same up to rounding; parameters are
/// not shared. `x`: example inputs, one sample is enough. One forward pass finds the pairs, whatever the order of
/// members. A batch norm is not folded if its layer is called more than once, if the layer's output has other users, if
/// it has no running statistics, or after a transposed convolution. Throws UsageError if the model or a layer is in
/// training mode; a folded model refuses to train.
template <class Model, class... X>
Model fold_batch_norm(const Model& model, const X&... x) {
  using D = typename Model::device_type;
  Model folded = copy_of(model);
  check<UsageError>(!detail::any_training(folded), "fold_batch_norm: the model is in training mode: call eval() first");
  const NoGrad no_grad;
  detail::FollowingNorms watch(folded);
  const auto expected = [&] {
    const chorus::detail::Replaced<chorus::detail::LayerWatch*> layers(chorus::detail::layer_watch, &watch);
    const chorus::detail::Replaced<chorus::detail::OperationWatch*> operations(chorus::detail::operation_watch,
                                                                               &watch);
    return folded(x...);
  }();
  constexpr bool compares = requires { value_of(expected).to_vector(); };
  const void* result = nullptr;
  if constexpr (compares) result = value_of(expected).data();
  for (const auto& [layer, norm] : watch.found(result)) {
    detail::fold_pair<float, D>(*layer, *norm);
    detail::fold_pair<double, D>(*layer, *norm);
  }
  if constexpr (compares) detail::check_same_results(expected, folded(x...));
  return folded;
}

}  // namespace chorus::nn
