#pragma once
/// A table of a model's layers and parameters; given an input, also of output shapes, multiply-adds and activation
/// memory.

#include <algorithm>
#include <array>
#include <chorus/core/config.hpp>
#include <chorus/core/layer_watch.hpp>
#include <chorus/core/random.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/nn/copy_of.hpp>
#include <chorus/nn/module.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::nn {

namespace detail {

/// The rows of a summary. Observes the layers during the forward pass.
template <Device D>
class SummaryTable final : public Walker, public chorus::detail::LayerWatch {
 public:
  struct Row {
    std::string path, layer, output = "-";
    std::vector<AnyParameter> parameters{};
    const Module* module = nullptr;
    int calls = 0;
    std::size_t place = uncalled;  ///< index in call order
    std::int64_t multiply_adds = 0;
  };
  static constexpr std::size_t uncalled = std::numeric_limits<std::size_t>::max();

  explicit SummaryTable(Module& model);

  void begins(const void* layer) override;
  void ended(const std::string& output) override;
  void multiply_adds(std::int64_t count) override;

  std::int64_t all_multiply_adds() const;

  /// The rows, in call order if there were calls. Column widths fit the content.
  std::string text(bool called);

 private:
  struct Call {
    Row* row;  ///< the row that counts its multiply-adds
    bool counts;
  };

  std::string own_path() const { return prefix().empty() ? "" : prefix().substr(0, prefix().size() - 1); }
  void enter(Module& module) override;
  // The wrapper's description already names it.
  void inner(Module&) override {}
  void parameter(std::string_view, AnyParameter& handle) override;

  // A list of layers, which is not called itself, comes before its first layer. Uncalled layers come last.
  void sort_by_calls();

  std::vector<Row> rows_;
  std::vector<Call> under_way_;
  std::size_t next_place_ = 0;
};

template <Device D>
std::string summed_parameters(Module& model) {
  Index all = 0, trainable = 0;
  std::size_t bytes = 0;
  for (const auto& named : named_parameters<D>(model)) {
    const Index count = numel(named.parameter->extents());
    all += count;
    bytes += static_cast<std::size_t>(count) * size_of(named.parameter->dtype());
    if (named.parameter->wants_grad()) trainable += count;
  }
  return cat(all, " parameters, ", trainable, " trainable, ", bytes / 1024, " KiB\n");
}

template <Device D>
D device_for_summary(Module& model) {
  const auto parameters = named_parameters<D>(model);
  check<UsageError>(!parameters.empty(), "summary: the model has no parameters");
  return parameters.front().parameter->where();
}

/// The example input, on the model's device.
template <class X, Device D>
decltype(auto) example_on(const X& x, D device) {
  if constexpr (AnyTensor<X>)
    return to_device(x, device);
  else
    return (x);
}

}  // namespace detail

/// One line per module: path, description, own parameters (in parentheses if all are shared with a layer above). The
/// last lines are totals.
template <class Model>
std::string summary(Model& model) {
  using D = typename Model::device_type;
  return detail::SummaryTable<D>(model).text(false) + detail::summed_parameters<D>(model);
}

/// The same for `model(inputs...)`: lines in call order, with the shape of the (last) output and the module's own
/// multiply-adds: those of Linear, matrix products, convolutions, attention's two products (all pairs, causal or not),
/// and recurrent layers. Other operations, such as embeddings, don't count. Repeated calls are noted. "-": not called,
/// or called in a way that is not observed (only `layer(x)` in the calling thread is). The last line has totals:
/// multiply-adds, and the bytes of activations on the tape after the forward pass.
///
/// Runs the forward pass on a copy, with the model's mode and gradient settings: the model, its statistics and random
/// numbers don't change, and nothing is communicated. Call it with the bare model (`net.module()`) while no other
/// thread uses its device. Throws what the model throws, prefixed with "summary: ".
template <class Model, class... Inputs>
requires(sizeof...(Inputs) > 0) std::string summary(Model& model, const Inputs&... inputs) {
  using D = typename Model::device_type;
  const D device = detail::device_for_summary<D>(model);
  const int slot = trace_slot(device);
  const trace::PeakKept peak(slot);
  try {
    Model copy = copy_of(model);
    detail::SummaryTable<D> table(copy);
    RandomContext random;
    random.device_slot = slot;
    const RandomScope scope(random);
    const GradMode with_gradients(true);
    const auto run = [&](const auto&... xs) {
      const auto activations = [&] { return trace::memory(slot, trace::Memory::activations); };
      const auto before = activations();
      const chorus::detail::Replaced<chorus::detail::LayerWatch*> watching(chorus::detail::layer_watch, &table);
      const auto output = detail::watched(copy, [&] {
        if constexpr (requires { copy.forward(xs...); })
          return copy.forward(xs...);
        else
          return copy(xs...);
      });
      return activations() - before;
    };
    const auto held = run(detail::example_on(inputs, device)...);
    std::string shapes;
    ((shapes += cat(shapes.empty() ? "" : ", ", detail::shape_text(inputs))), ...);
    return table.text(true) + detail::summed_parameters<D>(model) +
           cat("input ", shapes, ": ", table.all_multiply_adds(), " multiply-adds, ", held,
               " bytes of activations held for backward\n");
  } catch (const std::exception&) {
    rethrow_with(std::current_exception(), "summary: ");
  }
}

/// The same for zeros of type T of the given shape: `summary(model, {1, 3, 224, 224})`.
template <Real T = float, class Model, std::size_t Rank>
std::string summary(Model& model, const Index (&shape)[Rank]) {
  std::array<Index, Rank> extents{};
  std::copy(shape, shape + Rank, extents.begin());
  return summary<T>(model, extents);
}
template <Real T = float, class Model, std::size_t Rank>
std::string summary(Model& model, const std::array<Index, Rank>& shape) {
  for (const Index extent : shape)
    check<ShapeError>(extent > 0, "summary: an input of shape ", shape, ": expected sizes of at least 1");
  const auto device = detail::device_for_summary<typename Model::device_type>(model);
  const trace::PeakKept peak(trace_slot(device));  // includes the zeros
  return summary(model, Tensor<T, static_cast<int>(Rank), typename Model::device_type>::zeros(shape, device));
}

}  // namespace chorus::nn

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/nn/summary_impl.hpp>
#endif
