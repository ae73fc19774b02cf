#pragma once
/// The point at which others change what layers and operators compute in a forward pass, as nn::QuantizationAware does:
/// layers and operators ask the pass's interceptor, and know none.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/recomputation.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace chorus {

/// A float Variable on the CPU, of a rank that is known at run time.
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

/// A result goes where `void* result` points: a Variable<float, rank, Cpu> of the operand's rank.
class Interceptor {
 public:
  virtual ~Interceptor() = default;

  /// This pass's part in a layer, by the layer's address; null where it has none.
  virtual const void* find(const void* layer) const = 0;
  /// A layer of which this has a part computes with other numbers than float on the CPU: throws UsageError.
  [[noreturn]] virtual void refuse_numbers(const void* part) const = 0;

  /// What a layer with a weight computes: `apply(f, x, weight, bias, result)`, all of one rank but the bias.
  struct LayerCall {
    FloatVariable x, weight;
    const Variable<float, 1, Cpu>& bias;  ///< maybe empty
    const void* f;
    void (*apply)(const void* f, const FloatVariable& x, const FloatVariable& weight,
                  const Variable<float, 1, Cpu>& bias, void* result);
  };
  virtual void layer(const void* part, const LayerCall& call, void* result) = 0;
  /// The table of which `rows` rows are looked up.
  virtual Variable<float, 2, Cpu> table(const void* part, const Variable<float, 2, Cpu>& weight, Index rows) = 0;

  /// The attention that is computed from now on, or null; returns that before.
  virtual const void* begin_attention(const void* part) = 0;
  /// The weight, and inputs, of attention's first projection; the results of its parts 0, 1, 2; the weights of values.
  virtual Variable<float, 2, Cpu> attention_weight(const void* part, const Variable<float, 2, Cpu>& weight,
                                                   bool any) = 0;
  virtual void attention_input(const void* part, const FloatVariable& x, void* result) = 0;
  virtual void attention_operand(const void* part, std::size_t number, const FloatVariable& y, void* result) = 0;
  virtual bool takes_attention_weights() const = 0;
  virtual void attends_by(const Storage<Cpu>& weights) = 0;

  /// A batch norm of which this has a part takes x; gives y, `relu`: after a ReLU; has been added to a residual.
  virtual void norm_takes(const void* norm, const void* part, const Storage<Cpu>& x) = 0;
  virtual void norm_gives(const void* part, const Storage<Cpu>& y, bool relu) = 0;
  virtual void norm_adds(const void* part, const Storage<Cpu>& sum) = 0;

  /// An operator takes x: false, or what it takes in its place.
  virtual bool take(const FloatVariable& x, void* result) = 0;
  /// `result` was made of `from`, out of whose numbers it is, where it is `exact`.
  virtual void derived(const Storage<Cpu>& from, const Storage<Cpu>& result, bool exact) = 0;
  /// Operands come together in one result.
  enum class Joint : std::uint8_t { sum, concatenation };
  struct JointOperand {
    const Storage<Cpu>& storage;
    const float* numbers;
    Index count;
  };
  /// Whether this has a part in it: then each operand is taken, and `joined` follows. `alike`: they have one shape.
  virtual bool joins(Joint how, std::span<const JointOperand> operands, bool alike) = 0;
  virtual void joined(const Storage<Cpu>& result) = 0;
  /// Whether means of x are to be taken of its integers: writes those to `integers`, [x.numel()], and turns the sums of
  /// `count` of them each, [numel], into means.
  virtual bool integers_of(const Storage<Cpu>& x, const float* numbers, Index numel, float* integers) = 0;
  virtual void means_of_integers(const Storage<Cpu>& x, const float* sums, Index numel, Index count, float* means) = 0;
};

namespace detail {

/// That of this thread's forward pass; null where there is none.
inline thread_local constinit Interceptor* interceptor = nullptr;

/// The interceptor, where it has a part in `layer`; `part` gets that. Throws UsageError where a checkpoint computes a
/// layer again outside of the pass.
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

/// Whether an interceptor may be asked of X: it knows float numbers on the CPU alone.
template <class X>
inline constexpr bool may_be_intercepted =
    std::is_same_v<typename tensor_of<X>::value_type, float> &&
    std::is_same_v<typename tensor_of<X>::device_type, Cpu> && !is_graph_variable<X> &&
    (AnyTensor<X> || is_variable<X>);

}  // namespace detail

}  // namespace chorus
