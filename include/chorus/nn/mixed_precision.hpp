#pragma once
/// MixedPrecision: a model that computes in bf16 or half, over float parameters (Micikevicius et al., "Mixed Precision
/// Training", ICLR 2018).

#include <algorithm>
#include <chorus/autograd/batch_axis.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/narrow_indices.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::nn {

namespace detail {

/// 2-byte copies of a model's float parameters, with the same layout. A copy of this object is empty.
template <Narrow T, Device D>
class NarrowCopies {
 public:
  NarrowCopies() = default;
  NarrowCopies(const NarrowCopies&) {}
  NarrowCopies& operator=(const NarrowCopies&) { return *this; }

  /// Converts the parameters that changed since the last call; one kernel converts a run of adjacent ones.
  void refresh(Module& model) {
    Collector found;
    model.visit(found);
    auto& parameters = found.parameters;
    std::sort(parameters.begin(), parameters.end(),
              [](const auto* a, const auto* b) { return std::less<>()(a->memory(), b->memory()); });
    parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());  // shared parameters
    if (!laid_out_for(parameters)) lay_out(parameters);

    const auto is_old = [&](std::size_t i) { return parameters[i]->narrow_copy.version != parameters[i]->version(); };
    for (std::size_t i = 0; i < parameters.size();) {
      const std::size_t first = i;
      Index count = 0;
      while (i < parameters.size() && is_old(i) && value(*parameters[i]) == value(*parameters[first]) + count) {
        count += occupied(*parameters[i]);
        parameters[i]->narrow_copy.version = parameters[i]->version();
        parameters[i]->narrow_copy.storage.writes()->add();
        ++i;
      }
      if (count > 0)
        kernels::convert(parameters[first]->where(), count, value(*parameters[first]),
                         static_cast<T*>(parameters[first]->narrow_copy.data));
      i = std::max(i, first + 1);
    }
  }

 private:
  struct Collector final : Visitor {
    std::vector<ParameterOn<D>*> parameters;
    void module(std::string_view, Module& child) override { child.visit(*this); }
    void parameter(std::string_view, AnyParameter& handle) override {
      auto& parameter = handle.on<D>();
      // If parameters are sharded, operations convert what they have gathered.
      if (parameter.storage().in_parts()) return;
      if (parameter.dtype() == DType::f32 && parameter.count() > 0) parameters.push_back(&parameter);
    }
    void buffer(std::string_view, AnyBuffer&) override {}
  };

  static const float* value(const ParameterOn<D>& parameter) {
    return static_cast<const float*>(parameter.memory());
  }

  // Elements up to the next small parameter. There may be more before a large one, which is aligned.
  static Index occupied(const ParameterOn<D>& parameter) {
    return static_cast<Index>(padded_count<D>(static_cast<std::size_t>(parameter.count()), sizeof(float)));
  }

  bool laid_out_for(const std::vector<ParameterOn<D>*>& parameters) const {
    return std::equal(parameters.begin(), parameters.end(), places_.begin(), places_.end(),
                      [](const auto* parameter, const auto& place) {
                        return parameter == place.parameter && parameter->memory() == place.value;
                      });
  }

  void lay_out(const std::vector<ParameterOn<D>*>& parameters) {
    places_.clear();
    if (parameters.empty()) return;
    std::size_t count = 0;
    for (const auto* parameter : parameters) count += static_cast<std::size_t>(occupied(*parameter));
    const MemoryScope scope(trace::Memory::parameters);
    const Storage<D> storage(parameters.front()->where(), count * sizeof(T));
    auto* data = static_cast<T*>(storage.data());
    for (auto* parameter : parameters) {
      const auto bytes = static_cast<std::size_t>(parameter->count()) * sizeof(T);
      parameter->narrow_copy = {Storage<D>::home_in(storage, data, bytes), data, dtype<T>, 0};
      if (const auto* const own = parameter->storage().writes())
        parameter->narrow_copy.storage.writes()->name = own->name;
      places_.push_back({parameter, parameter->memory()});
      data += occupied(*parameter);
    }
  }

  struct Place {
    const ParameterOn<D>* parameter;
    const void* value;
  };
  std::vector<Place> places_;
};

template <class X>
inline constexpr bool is_floating = false;
template <Operand X>
inline constexpr bool is_floating<X> = Real<typename tensor_of<X>::value_type> && !chorus::detail::says_exact<X>;

// Whether all outputs are float tensors with axes. A scalar loss is always float.
template <class Y>
inline constexpr bool all_in_float = false;
template <Operand Y>
inline constexpr bool all_in_float<Y> = is_floating<Y> && !NarrowOperand<Y> && (tensor_of<Y>::rank > 0);
template <class... Members>
inline constexpr bool all_in_float<std::tuple<Members...>> =
    (all_in_float<Members> || ...) && !(NarrowOperand<Members> || ...);

}  // namespace detail

/// Runs `Model` in T: converts floating-point inputs to T and outputs to float; Embeddings return T for integer inputs.
/// If all layers would run in float, it does not compile. Parameters, gradients, their reduction, the optimizer's step
/// and the loss stay float. A copy of the parameters in T is updated in the first forward pass after a step. It is a
/// model type for every policy: `DistributedDataParallel<MixedPrecision<ToyModel<Cuda>>>`. Parameter names stay the
/// same. With half, gradients may underflow: see optim::GradScaler.
template <class Model, Narrow T = bf16>
class MixedPrecision : public Module {
 public:
  using device_type = typename Model::device_type;

  explicit MixedPrecision(Model model = {}) : model_(std::move(model)) {}

  /// `Model::forward`, with tuples converted, too. Tensors that are not floating-point, and those marked `exact(x)`,
  /// are passed unchanged.
  template <class... Inputs>
  auto forward(const Inputs&... inputs) const {
    copies_.refresh(model_);
    auto outputs = model_.forward(narrowed(inputs)...);
    static_assert((detail::is_floating<Inputs> || ...) || !detail::all_in_float<decltype(outputs)>,
                  "MixedPrecision: the model takes integers and returns float, so all its layers would run in float: "
                  "take the integers as `const auto&` in `forward` and pass them to the Embedding unchanged, which "
                  "then returns 16 bits; or convert the layers' input with to<bf16>(x)");
    return widened(outputs);
  }
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) const {
    return detail::watched(*this, [&] { return forward(inputs...); });
  }

  /// The wrapped model.
  Model& model() { return model_; }
  void visit(Visitor& visitor) override {
    visitor.inner(model_);
    model_.visit(visitor);
  }
  std::string describe() const override { return cat("MixedPrecision(", model_.describe(), ", ", dtype<T>, ")"); }

 private:
  template <class X>
  static decltype(auto) narrowed(const X& x) {
    if constexpr (chorus::detail::says_batch_axis<X> && !chorus::detail::says_exact<X>) {
      return narrowed(chorus::detail::unmarked(x));
    } else if constexpr (Operand<X>) {
      if constexpr (chorus::detail::says_exact<X>)
        return chorus::detail::unmarked(x);
      else if constexpr (Real<typename tensor_of<X>::value_type>)
        return to<T>(x);
      else if constexpr (std::is_same_v<X, Tensor<std::int64_t, tensor_of<X>::rank, device_type>>)
        return NarrowIndices<T, tensor_of<X>::rank, device_type>(x);
      else
        return x;
    } else {
      return x;
    }
  }

  template <class Y>
  static auto widened(const Y& y) {
    if constexpr (NarrowOperand<Y>)
      return chorus::detail::widened(y);
    else
      return y;
  }
  template <class... Members>
  static auto widened(const std::tuple<Members...>& members) {
    return std::apply([](const auto&... y) { return std::tuple(widened(y)...); }, members);
  }

  mutable Model model_;  // visiting it hands out mutable parameters, which own the copies
  mutable detail::NarrowCopies<T, device_type> copies_;
};

}  // namespace chorus::nn
