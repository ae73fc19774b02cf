#pragma once
/// QuantizationAware: a model that trains with the rounding of integers (Jacob et al., "Quantization and Training of
/// Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018).

#include <array>
#include <chorus/core/batch_group.hpp>
#include <chorus/core/replaced.hpp>
#include <chorus/core/tensor_group.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/intercepted.hpp>
#include <chorus/quantization/layers.hpp>
#include <chorus/quantization/scheme.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::nn {

namespace quantization {

/// The three switches of QuantizationAware.
struct Phases {
  bool observe = true, fake_quantize = true, norms_frozen = false;
  friend bool operator==(const Phases&, const Phases&) = default;
};
inline void append(std::string& out, const Phases& phases) {
  const auto text = [](bool on) { return on ? "true" : "false"; };
  out += cat("observe(", text(phases.observe), "), fake_quantize(", text(phases.fake_quantize), "), freeze_norms(",
             text(phases.norms_frozen), ")");
}

/// A model's phases as a buffer, so that they are saved with it, and the program's changes since the last pass.
class KeptPhases {
 public:
  KeptPhases() : buffer_(Tensor<std::int64_t, 1, Cpu>::zeros({3})) { keep(now_); }

  /// Sets `member` of Phases to `on`.
  void set(bool Phases::*member, bool on) {
    if (!called_) now_ = kept();
    called_ = true;
    now_.*member = on;
    keep(now_);
  }
  Phases get() const { return called_ ? now_ : kept(); }
  /// A pass in training begins. Throws UsageError, on all members of the batch's group, if their phases differ: they
  /// would deadlock or diverge.
  Phases begin_pass() {
    const Phases own = get();
    if (const auto group = batch_group()) {
      const std::array<double, 3> mine{own.observe ? 1.0 : 0.0, own.fake_quantize ? 1.0 : 0.0,
                                       own.norms_frozen ? 1.0 : 0.0};
      std::array<double, 6> ends{};
      for (std::size_t i = 0; i < mine.size(); ++i) {
        ends[2 * i] = mine[i];
        ends[2 * i + 1] = -mine[i];
      }
      group->max(ends);
      for (std::size_t i = 0; i < mine.size(); ++i)
        check<UsageError>(ends[2 * i] == -ends[2 * i + 1],
                          "QuantizationAware: expected the same phases on all ranks, got ", own,
                          " here: call observe, fake_quantize and freeze_norms with the same values");
    }
    called_ = false;
    return own;
  }
  void visit(Visitor& visitor) { visitor.buffer("phases", buffer_); }

 private:
  Phases kept() const {
    const auto* const on = value_of(buffer_).data();
    return {on[0] != 0, on[1] != 0, on[2] != 0};
  }
  void keep(const Phases& phases) const {
    auto* const on = value_of(buffer_).data();
    on[0] = phases.observe;
    on[1] = phases.fake_quantize;
    on[2] = phases.norms_frozen;
    buffer_.on<Cpu>().touch();
  }

  Buffer<std::int64_t, 1, Cpu> buffer_;
  Phases now_;  // with the program's changes
  bool called_ = false;
};

/// The ranges of a model's layers and its phases, as a module: buffers `conv1.output`, `conv1.weight_min`, ...
class Ranges : public Module {
 public:
  std::vector<LayerRanges> layers;
  KeptPhases phases;
  void visit(Visitor& visitor) override {
    phases.visit(visitor);
    for (auto& layer : layers) layer.visit(visitor);
  }
  std::string describe() const override { return "Ranges"; }
};

}  // namespace quantization

/// `Model`, computed with the rounding of integers, so that training adapts to it: a model type like any other, for
/// SingleDevice, DataParallel, DistributedDataParallel and FullyShardedDataParallel, with any training loop.
///   using Net = ch::DistributedDataParallel<ch::nn::QuantizationAware<ResNet18<ch::Cpu>>>;
/// - Each layer with weights (Linear, Conv1d to Conv3d) rounds its weight and takes rounded inputs. Its result is
///   rounded where such a layer or a pooling uses it, after a ReLU that follows, and at the end of the model. Other
///   values (the model's input, results of other functions) are rounded by the layer that takes them. Recurrent layers
///   and transposed convolutions stay float.
/// - `a + b` and `concat` round layers' results; the sum has a range of its own, named after the last layer in it:
///   `quantization.conv2.sum`. This requires one operand that is a layer's result; the other has its shape or was taken
///   by a layer before. Other sums stay float. Dropout rounds its input and keeps the levels.
/// - Embedding rounds each row of its table. MultiheadAttention rounds the operands of its first projection and of both
///   products: `quantization.attn.query`, `.key`, `.value`, and the weights of values, `.attention`.
/// - A batch norm that CHORUS_MODULE (or a Sequential) lists directly after a layer with as many channels is folded
///   into it: the layer's weight is rounded after multiplication by gamma / sqrt(running_var + eps). A residual that
///   BatchNormReLU adds is rounded, and so is the sum.
/// - Ranges are the global batch's, independent of the number of devices, and observed in training only. Each takes a
///   collective of 16 bytes; one of 48 bytes per pass compares the ranks' phases. Ranges are buffers,
///   `quantization.conv1.output`; a float model's file fills the rest by name, with `io::load(net.module(), path,
///   {.strict = false})`.
/// Evaluation changes nothing and needs ranges. Its rounded values are those of `quantized(model, x)`, to the last
/// integer. Throws NonFiniteError for NaNs.
template <class Model, class Scheme = Int8>
class QuantizationAware : public Module {
 public:
  using device_type = typename Model::device_type;
  static_assert(std::is_same_v<device_type, Cpu>, "QuantizationAware: expected a model on the CPU");

  QuantizationAware() : QuantizationAware(Model{}) {}
  /// `scheme`: replaces the type's numbers. Throws UsageError if the model has no layer with weights.
  explicit QuantizationAware(Model model, const quantization::Scheme& scheme = quantization::scheme_of<Scheme>())
      : scheme_(scheme), model_(std::move(model)) {
    for (const auto& found : quantization::find_layers(model_))
      quantization_.layers.emplace_back(found.name, scheme_.per_channel ? found.channels : 1, found.kind);
    check<UsageError>(!quantization_.layers.empty(), "QuantizationAware: ", model_.describe(),
                      " has no layer with weights that could be integers: expected Linear or Conv1d to Conv3d");
  }

  /// Arguments and result of `Model::forward`.
  template <class... Inputs>
  auto forward(const Inputs&... inputs) const {
    check<UsageError>(tensor_group() == nullptr || tensor_group()->size() == 1,
                      "QuantizationAware: TensorParallel, which splits a layer's channels, is not supported");
    check<UsageError>(chorus::detail::interceptor == nullptr, "QuantizationAware: nesting is not supported");
    const auto phases = training() ? quantization_.phases.begin_pass() : quantization_.phases.get();
    const auto& layers = places_.of(model_, quantization_.layers);
    if (phases.norms_frozen)
      for (const auto& [address, place] : layers)
        if (place.norm != nullptr) place.norm->set_own_training(false);
    const bool observes = training() && phases.observe && !is_recomputed();
    quantization::Pass pass(scheme_, layers, observes, phases.fake_quantize, !training());
    const bool quantizes = observes || phases.fake_quantize;
    const chorus::detail::Replaced<Interceptor*> scope(chorus::detail::interceptor, quantizes ? &pass : nullptr);
    return rounded(model_.forward(inputs...));
  }
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) const {
    return detail::watched(*this, [&] { return forward(inputs...); });
  }

  /// Whether passes in training move the ranges of activations and weights. All ranks call this and the next two alike.
  void observe(bool on) { quantization_.phases.set(&quantization::Phases::observe, on); }
  /// Whether numbers are rounded; if not, the model is the float one.
  void fake_quantize(bool on) { quantization_.phases.set(&quantization::Phases::fake_quantize, on); }
  /// From now on folded batch norms use their running statistics in training, too, and don't update them.
  void freeze_norms(bool frozen = true) {
    quantization_.phases.set(&quantization::Phases::norms_frozen, frozen);
    if (frozen) return;
    for (const auto& [address, place] : places_.of(model_, quantization_.layers))
      if (place.norm != nullptr) place.norm->set_own_training(training());
  }
  quantization::Phases phases() const { return quantization_.phases.get(); }

  /// The inner model.
  Model& model() { return model_; }
  /// The ranges of each layer, in the order in which they are listed.
  const std::vector<quantization::LayerRanges>& ranges() const { return quantization_.layers; }
  const quantization::Scheme& scheme() const { return scheme_; }

  void visit(Visitor& visitor) override {
    visitor.inner(model_);
    model_.visit(visitor);
    visitor.module("quantization", quantization_);
  }
  std::string describe() const override { return cat("QuantizationAware(", model_.describe(), ")"); }

 private:
  template <class Y>
  static auto rounded(const Y& y) {
    if constexpr (Operand<Y>)
      return chorus::detail::taken(y);
    else
      return y;
  }
  template <class... Members>
  static auto rounded(const std::tuple<Members...>& members) {
    return std::apply([](const auto&... y) { return std::tuple(rounded(y)...); }, members);
  }

  quantization::Scheme scheme_;
  mutable Model model_;  // a visit gives out its layers
  mutable quantization::Ranges quantization_;
  mutable quantization::Places places_;
};

}  // namespace chorus::nn
