#pragma once
/// Variable: a Tensor that records how it was computed, for differentiation.

#include <array>
#include <chorus/autograd/grad_node.hpp>
#include <chorus/autograd/operation_watch.hpp>
#include <chorus/autograd/tape.hpp>
#include <chorus/autograd/wide_later.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace chorus {

/// A Tensor and the node behind it. Copies share both.
template <Real T, int Rank, Device D = Cpu>
class Variable {
 public:
  using value_type = T;
  using device_type = D;
  using tensor_type = Tensor<T, Rank, D>;
  using node_type = GradNode<T, Rank, D>;
  static constexpr int rank = Rank;

  Variable() = default;
  Variable(const Variable&) = default;
  Variable(Variable&&) noexcept = default;
  /// For lvalues only: `slice(x, 0, 0, 1) = y` would have no effect.
  Variable& operator=(const Variable&) & = default;
  Variable& operator=(Variable&&) & noexcept = default;
  void operator=(const Variable&) && = delete;  // it would not write through a view; use concat or where
  /// A leaf. With `requires_grad`, backward stores the gradient in `grad()`.
  explicit Variable(tensor_type value, bool requires_grad = false) : value_(std::move(value)) {
    if (requires_grad) node_ = Ref<node_type>(new LeafNode<T, Rank, D>(value_));
  }
  /// The result of a recorded operation.
  Variable(tensor_type value, Ref<node_type> node) : value_(std::move(value)), node_(std::move(node)) {}

  const tensor_type& value() const {
    value_.storage().touch();
    return value_;
  }
  /// The 2-byte values from which this value will be made when somebody reads it; undefined if there are none. For
  /// library code.
  template <Narrow From>
  Tensor<From, Rank, D> narrow() const {
    return detail::narrow_of<From>(value_);
  }
  const Ref<node_type>& node() const { return node_; }
  bool requires_grad() const { return static_cast<bool>(node_); }
  tensor_type grad() const { return node_ ? node_->grad() : tensor_type{}; }
  void zero_grad() const {
    if (node_) node_->zero_grad();
  }
  /// The same values without the tape.
  Variable detach() const { return Variable(value_); }

  const Shape<Rank>& shape() const { return value_.shape(); }
  Index size(Index axis) const { return value_.size(axis); }
  Index numel() const { return value_.numel(); }
  D device() const { return value_.device(); }
  T item() const { return value().item(); }

  /// Adds the gradients of this scalar to all leaves behind it. `retain_graph` allows another backward.
  [[gnu::noinline]] void backward(bool retain_graph = false) const requires(Rank == 0) {
    auto one = tensor_type::empty({}, value_.device());
    kernels::fill(value_.device(), 1, one.data(), T{1});  // no copy from the host: a GPU can capture the step
    backward(one, retain_graph);
  }
  void backward(bool = false) const requires(Rank != 0) = delete;  // take ch::mean(x), or backward(seed)
  /// The same for a value of any shape; `seed` is the gradient w.r.t. this value.
  [[gnu::noinline]] void backward(const tensor_type& seed, bool retain_graph = false) const {
    check<UsageError>(requires_grad(), "backward: nothing behind this value requires a gradient");
    check<ShapeError>(seed.shape() == shape(), "backward: expected a seed of shape ", shape(), ", got ", seed.shape());
    node_->add(contiguous(seed));
    const Ref<Node> root = node_;
    run_backward({&root, 1}, {.retain_graph = retain_graph});
  }

  /// `hook` runs in each backward, but not in `grad`, as soon as the gradient of this value is complete; a leaf's
  /// gradient includes what was accumulated before. `hook(gradient)` may return a Tensor of the same shape, which
  /// replaces the gradient. `hook()` is for leaves only and runs after those. Throws UsageError if the value requires
  /// no gradient.
  template <class Hook>
  void register_hook(Hook hook) const {
    if constexpr (std::is_invocable_v<Hook>) {
      check<UsageError>(node_ && node_->is_leaf(), "register_hook: not a leaf that requires a gradient");
      static_cast<LeafNode<T, Rank, D>&>(*node_).add_hook(std::move(hook));
    } else {
      check<UsageError>(requires_grad(), "register_hook: the value does not require a gradient");
      node_->add_gradient_hook(std::make_unique<detail::TypedHook<Hook, node_type>>(std::move(hook)));
    }
  }

 private:
  tensor_type value_;
  Ref<node_type> node_;
};

namespace detail {
template <class X>
inline constexpr bool is_variable = false;
template <class T, int Rank, class D>
inline constexpr bool is_variable<Variable<T, Rank, D>> = true;
// See <chorus/ops/higher_order.hpp>.
template <class X>
inline constexpr bool is_graph_variable = false;
}  // namespace detail
template <Real T, int Rank, Device D>
class GraphVariable;

/// A Variable, or a type with `as_variable` (a Parameter).
template <class X>
concept AnyVariable = detail::is_variable<std::remove_cvref_t<X>> || requires(const std::remove_cvref_t<X>& x) {
  x.as_variable();
};

/// What operations take: a Tensor, a Variable or a Parameter.
template <class X>
concept Operand = AnyTensor<X> || AnyVariable<X>;

/// What this rank holds of a value that ranks share: see <chorus/ops/placement.hpp>.
template <Operand X, class... Kinds>
class Placed;
/// Positions of a sequence that ranks share: see <chorus/ops/sequence_part.hpp>.
template <Operand X>
class SequencePart;

/// The Tensor of an operand.
template <AnyTensor X>
const X& value_of(const X& x) {
  x.storage().touch();
  return x;
}
template <AnyVariable X>
const auto& value_of(const X& x) {
  return x.value();
}

/// The node that collects an operand's gradient; null if none is wanted.
template <class T, int Rank, class D>
Ref<GradNode<T, Rank, D>> node_of(const Variable<T, Rank, D>& x) {
  return x.node();
}
template <class X>
requires requires(const X& x) { x.as_variable(); }
auto node_of(const X& x) { return x.as_variable().node(); }
template <Real T, int Rank, class D>
Ref<GradNode<T, Rank, D>> node_of(const Tensor<T, Rank, D>&) {
  return {};
}

/// The Tensor type of an operand.
template <Operand X>
using tensor_of = std::remove_cvref_t<decltype(value_of(std::declval<const X&>()))>;

/// Operands of one scalar type.
template <class X, class... Rest>
inline constexpr bool of_one_type =
    (std::is_same_v<typename tensor_of<X>::value_type, typename tensor_of<Rest>::value_type> && ...);

namespace detail {

/// Number of finished operations in this thread: earlier reads of their inputs are complete.
inline thread_local constinit std::uint64_t operations_ended = 0;

template <class N>
N* unless_skipped(N* node) {
  return node != nullptr && !node->skipped() ? node : nullptr;
}

/// The part of an operation's node that depends on the number of inputs, not on their types or on the operation:
/// compilers make it once, and OperationNode for each operation.
template <class T, int Rank, class D, std::size_t Count>
class NodeOfInputs : public GradNode<T, Rank, D> {
 public:
  NodeOfInputs(const char* operation, const Tensor<T, Rank, D>& value, std::array<Ref<Node>, Count> inputs)
      : GradNode<T, Rank, D>(operation, value.shape(), value.device()), inputs_(std::move(inputs)) {
    if constexpr (Rank == 0) value_ = value;
    bool loose = false, of_data = false;
    for (const auto& input : inputs_) {
      loose = loose || !input;
      of_data = of_data || !input || input->may_be_of_data();
    }
    this->set_operands(loose, !inputs_[0], of_data);
  }

  void for_each_input(void (*visit)(Node&, void*), void* context) const final {
    for (const auto& input : inputs_)
      if (input) visit(*input, context);
  }
  double number() const final {
    if constexpr (Rank == 0) return static_cast<double>(value_.item());
    return Node::number();
  }

 protected:
  Node* receiver(std::size_t i) const { return unless_skipped(inputs_[i].get()); }
  void forget_inputs() { inputs_ = {}; }

 private:
  std::array<Ref<Node>, Count> inputs_;
  struct NoValue {};
  [[no_unique_address]] std::conditional_t<Rank == 0, Tensor<T, Rank, D>, NoValue> value_;
};

/// An operation's node. `Inputs` are the types of the inputs' nodes. If `Backward` has `last`, that is its last call.
template <class Backward, class T, int Rank, class D, class... Inputs>
class OperationNode : public NodeOfInputs<T, Rank, D, sizeof...(Inputs)> {
 public:
  OperationNode(const char* operation, const Tensor<T, Rank, D>& value, Backward backward,
                std::array<Ref<Node>, sizeof...(Inputs)> inputs)
      : NodeOfInputs<T, Rank, D, sizeof...(Inputs)>(operation, value, std::move(inputs)),
        saved_(std::move(backward)) {}
  ~OperationNode() override {
    if (!freed_) saved_.~Backward();
  }

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check<UsageError>(!freed_, "backward: the graph behind '", this->operation(),
                      "' was freed by an earlier backward; pass retain_graph = true to that one");
    go_back(keep, std::index_sequence_for<Inputs...>());
    if (!keep) {
      saved_.~Backward();
      freed_ = true;
      this->forget_inputs();
    }
  }

 private:
  template <std::size_t... I>
  void go_back(bool keep, std::index_sequence<I...>) {
    const auto grad = this->take_grad();
    if (!(this->receiver(I) || ...)) return;  // `grad` over DataParallel's copies runs all operations
    if constexpr (requires { saved_.last(grad, static_cast<Inputs*>(nullptr)...); })
      if (!keep) return saved_.last(grad, static_cast<Inputs*>(this->receiver(I))...);
    saved_(grad, static_cast<Inputs*>(this->receiver(I))...);
  }

  union {  // not std::optional, of which compilers make 18 functions for each type
    Backward saved_;
  };
  bool freed_ = false;
};

/// The type of an operand's node.
template <class X>
using node_type_of = std::remove_reference_t<decltype(*node_of(std::declval<const X&>()))>;

template <class Operation>
constexpr Node::Form form_of() {
  if constexpr (requires { requires Operation::bilinear; }) return Node::Form::product;
  if constexpr (requires { requires Operation::quotient; }) return Node::Form::quotient;
  if constexpr (requires { requires Operation::linear; }) return Node::Form::linear;
  if constexpr (requires { requires Operation::pointwise; }) return Node::Form::pointwise;
  return Node::Form::other;
}
/// Tells the node what LossTerms needs: see Node::form.
template <int Rank, class Operation>
void record_form(Node& node, const Operation& operation) {
  if constexpr (requires { operation.index; } || requires { operation.labels; })
    node.set_operands(true, false, true);  // integers are operands, too
  else
    node.set_form(form_of<Operation>());
  if constexpr (Rank == 0 && requires { operation.f.value; }) node.set_operand_number(operation.f.value);
}

inline const char* operation_name(const char* name) { return name; }
template <class Operation>
const char* operation_name(const Operation& operation) {
  return operation.name;
}

template <class T, int Rank, class D>
WatchedTensor watched_tensor(const Tensor<T, Rank, D>& x) {
  if (!x.defined()) return {};
  const auto &shape = x.shape(), &strides = x.strides();
  return {dtype<T>, x.data(), {shape.begin(), shape.end()}, {strides.begin(), strides.end()},
          std::make_shared<Tensor<T, Rank, D>>(x)};
}
template <class Value, class... Inputs>
[[gnu::cold, gnu::noinline]] void notify_watch(const char* name, const void* operation, const Value& value,
                                               const Inputs&... inputs) {
  operation_watch->ended({name, operation, {watched_tensor(value_of(inputs))...}, watched_tensor(value)});
}
}  // namespace detail

/// Puts an operation's result on the tape. `backward(dy, dx...)` gets the gradient of the result, and for each input a
/// pointer to the node that collects its gradient (null if none is wanted). Its captures are the saved values. If it
/// has `last(dy, dx...)`, that is called instead when the saved values are no longer needed. If all inputs are Tensors,
/// returns the Tensor. `operation` is a name, or an object with a `name` and the facts that
/// <chorus/ops/higher_order.hpp> needs.
template <class Operation, class T, int Rank, class D, class Backward, Operand... Inputs>
auto record(Operation operation, Tensor<T, Rank, D> value, Backward backward, const Inputs&... inputs) {
  static_assert((std::is_same_v<typename tensor_of<Inputs>::device_type, D> && ...),
                "operands: expected one kind of device; to_device(x, device) copies");
  ++detail::operations_ended;
  const char* const name = detail::operation_name(operation);
  if (detail::operation_watch != nullptr) [[unlikely]]
    detail::notify_watch(name, &operation, value, inputs...);
  if constexpr ((AnyTensor<Inputs> && ...)) {
    return value;
  } else if constexpr ((detail::is_graph_variable<Inputs> || ...)) {
    return record_graph(std::move(operation), std::move(value), std::move(backward), inputs...);
  } else {
    if (!grad_enabled()) return Variable<T, Rank, D>(std::move(value));
    if (detail::detects_anomalies()) [[unlikely]]
      detail::check_finite(name, value);
    std::array<Ref<Node>, sizeof...(Inputs)> nodes{node_of(inputs)...};
    if (nodes == decltype(nodes)()) return Variable<T, Rank, D>(std::move(value));
    using Made = detail::OperationNode<Backward, T, Rank, D, detail::node_type_of<Inputs>...>;
    Ref<GradNode<T, Rank, D>> node(new Made(name, value, std::move(backward), std::move(nodes)));
    detail::record_form<Rank>(*node, operation);
    return Variable<T, Rank, D>(std::move(value), std::move(node));
  }
}

namespace detail {

template <Operand First, Operand... Rest>
struct FirstOf {
  using value_type = typename tensor_of<First>::value_type;
  using device_type = typename tensor_of<First>::device_type;
};

/// Returns the value and marks its node as a mean with divisor `over`.
template <class Y>
Y as_mean(Y value, double over, bool is_loss = true) {
  if constexpr (AnyVariable<Y>)
    if (value.node()) value.node()->set_mean(over, is_loss);
  return value;
}
/// Returns the value and marks its node as a sum: see Node::set_sum.
template <class Y>
Y as_sum(Y value, bool is_one = true, double divisor = 0, double counted = 0) {
  if constexpr (AnyVariable<Y>)
    if (is_one && value.node()) value.node()->set_sum(divisor, counted);
  return value;
}
/// As `as_mean`, for a divisor `count()` that device `D` computes: a GPU is asked only when it is needed.
template <Device D, class Y, class Count>
Y as_counted_mean(Y value, const Count& count) {
  if constexpr (AnyVariable<Y>) {
    if (!value.node()) return value;
    if constexpr (std::is_same_v<D, Cpu>)
      value.node()->set_mean(count(), true);
    else
      value.node()->set_mean_later(count);
  }
  return value;
}

// 0: a Tensor of any scalar type; 1: a Variable; 2: a GraphVariable.
template <int Kind, class T, int Rank, class D>
struct RecordedAs {
  using type = Tensor<T, Rank, D>;
};
template <class T, int Rank, class D>
struct RecordedAs<1, T, Rank, D> {
  using type = Variable<T, Rank, D>;
};
template <class T, int Rank, class D>
struct RecordedAs<2, T, Rank, D> {
  using type = GraphVariable<T, Rank, D>;
};

// A class, so that function names contain no expression: compilers mangle those differently.
template <int Rank, Operand... Inputs>
struct RecordedFrom {
  using type = typename RecordedAs<(is_graph_variable<Inputs> || ...)    ? 2
                                   : (AnyTensor<Inputs> && ...) ? 0
                                                                : 1,
                                   typename FirstOf<Inputs...>::value_type, Rank,
                                   typename FirstOf<Inputs...>::device_type>::type;
};
/// The result type of `record` for this rank and these inputs.
template <int Rank, Operand... Inputs>
using Recorded = typename RecordedFrom<Rank, Inputs...>::type;

template <class Like, Operand... Inputs>
struct RecordedFromLike : RecordedFrom<tensor_of<Like>::rank, Inputs...> {};
/// The same for the rank of `Like`.
template <class Like, Operand... Inputs>
using RecordedLike = typename RecordedFromLike<Like, Inputs...>::type;

template <class T, int Rank, class D>
Variable<T, Rank, D> variable_of(const Tensor<T, Rank, D>& x) {
  return Variable<T, Rank, D>(x);
}
template <class T, int Rank, class D>
const Variable<T, Rank, D>& variable_of(const Variable<T, Rank, D>& x) {
  return x;
}
template <class X>
  requires requires(const X& x) { x.as_variable(); }
decltype(auto) variable_of(const X& x) {
  return x.as_variable();
}

/// Calls `operation` with all operands as Variables, so that it is compiled once for all mixtures of Tensors, Variables
/// and Parameters. Returns a Tensor if all inputs are Tensors.
template <class Operation, Operand... Inputs>
auto with_variables(const Operation& operation, const Inputs&... inputs) {
  if constexpr ((is_graph_variable<Inputs> || ...) || !(Real<typename tensor_of<Inputs>::value_type> && ...))
    return operation(inputs...);  // integers and bools have no gradients
  else if constexpr ((AnyTensor<Inputs> && ...))
    return operation(variable_of(inputs)...).value();
  else
    return operation(variable_of(inputs)...);
}

}  // namespace detail

}  // namespace chorus
