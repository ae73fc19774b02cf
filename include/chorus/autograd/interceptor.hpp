#pragma once
/// A hook for code that changes how layers and operators compute in a forward pass, such as nn::QuantizationAware.
/// Layers and operators ask the pass's interceptor and know no implementation.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/recomputation.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace chorus {

/// A float Variable on the CPU whose rank is known at run time.
struct FloatVariable {
  const void* variable;
  int rank;

  template <int Rank>
  FloatVariable(const Variable<float, Rank, Cpu>& x) : variable(&x), rank(Rank) {}
  template <int Rank>
  const Variable<float, Rank, Cpu>& as() const {
    return *static_cast<const Variable<float, Rank, Cpu>*>(variable);
  }
};

/// `void* result` points to a Variable<float, rank, Cpu> of the operand's rank, which receives the result.
class Interceptor {
 public:
  virtual ~Interceptor() = default;

  /// The interceptor's state for a layer, found by the layer's address; null if it has none.
  virtual const void* find(const void* layer) const = 0;
  /// Called if an intercepted layer computes with other types than float on the CPU. Throws UsageError.
  [[noreturn]] virtual void refuse_numbers(const void* part) const = 0;

  /// The computation of a layer with a weight: `apply(f, x, weight, bias, result)`. All but the bias have one rank.
  struct LayerCall {
    FloatVariable x, weight;
    const Variable<float, 1, Cpu>& bias;  ///< may be empty
    const void* f;
    void (*apply)(const void* f, const FloatVariable& x, const FloatVariable& weight,
                  const Variable<float, 1, Cpu>& bias, void* result);
  };
  virtual void layer(const void* part, const LayerCall& call, void* result) = 0;
  /// The embedding table from which `rows` rows are looked up.
  virtual Variable<float, 2, Cpu> table(const void* part, const Variable<float, 2, Cpu>& weight, Index rows) = 0;

  /// Makes `part` the current attention (null: none); returns the previous one.
  virtual const void* begin_attention(const void* part) = 0;
  /// Attention's projection weight, its inputs, the projection's results (part 0, 1, 2), and the attention weights.
  virtual Variable<float, 2, Cpu> attention_weight(const void* part, const Variable<float, 2, Cpu>& weight,
                                                   bool any) = 0;
  virtual void attention_input(const void* part, const FloatVariable& x, void* result) = 0;
  virtual void attention_operand(const void* part, std::size_t number, const FloatVariable& y, void* result) = 0;
  virtual bool takes_attention_weights() const = 0;
  virtual void attends_by(const Storage<Cpu>& weights) = 0;

  /// An intercepted batch norm reads x; returns y, with `relu` after a ReLU; or y is added to a residual.
  virtual void norm_takes(const void* norm, const void* part, const Storage<Cpu>& x) = 0;
  virtual void norm_gives(const void* part, const Storage<Cpu>& y, bool relu) = 0;
  virtual void norm_adds(const void* part, const Storage<Cpu>& sum) = 0;

  /// An operator reads x. Returns false, or writes the replacement for x to `result`.
  virtual bool take(const FloatVariable& x, void* result) = 0;
  /// `result` was computed from `from`; `exact`: its values are values of `from`.
  virtual void derived(const Storage<Cpu>& from, const Storage<Cpu>& result, bool exact) = 0;
  /// How an operation joins operands into one result.
  enum class Joint : std::uint8_t { sum, concatenation };
  struct JointOperand {
    const Storage<Cpu>& storage;
    const float* numbers;
    Index count;
  };
  /// Whether it handles this operation. If so, each operand is read and `joined` follows. `alike`: equal shapes.
  virtual bool joins(Joint how, std::span<const JointOperand> operands, bool alike) = 0;
  virtual void joined(const Storage<Cpu>& result) = 0;
  /// Whether means of x are computed from its integers. Writes the integers to `integers`, [x.numel()]. The other turns
  /// sums of `count` integers each, [numel], into means.
  virtual bool integers_of(const Storage<Cpu>& x, const float* numbers, Index numel, float* integers) = 0;
  virtual void means_of_integers(const Storage<Cpu>& x, const float* sums, Index numel, Index count, float* means) = 0;
};

namespace detail {

/// The interceptor of this thread's forward pass; null if there is none.
inline thread_local constinit Interceptor* interceptor = nullptr;

/// The interceptor if it handles `layer`, and its state in `part`. Throws UsageError if a checkpoint recomputes a layer
/// outside of the pass.
inline Interceptor* interceptor_of(const void* layer, const void*& part) {
  if (first_run != nullptr) [[unlikely]]
    check<UsageError>(first_run->found(layer, 2, interceptor != nullptr) == (interceptor != nullptr),
                      "QuantizationAware: a checkpoint computes a layer again after the forward pass, without "
                      "quantisation: expected a model without checkpoints");
  if (interceptor == nullptr) [[likely]]
    return nullptr;
  part = interceptor->find(layer);
  return part != nullptr ? interceptor : nullptr;
}

/// Whether X can be intercepted: float on the CPU only.
template <class X>
inline constexpr bool may_be_intercepted =
    std::is_same_v<typename tensor_of<X>::value_type, float> &&
    std::is_same_v<typename tensor_of<X>::device_type, Cpu> && !is_graph_variable<X> &&
    (AnyTensor<X> || is_variable<X>);

}  // namespace detail

}  // namespace chorus
