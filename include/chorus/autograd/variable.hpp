#pragma once
/// Variable: a Tensor that records how it was made, so that gradients can be taken through it.

#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <chorus/autograd/node.hpp>
#include <chorus/autograd/tape.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/tensor/tensor.hpp>

namespace chorus::inline CHORUS_ABI {

/// Where a backward function writes the gradient of one input: dense memory, to be added to or overwritten.
template <Real T, int Rank, Device D>
struct GradTarget {
  Tensor<T, Rank, D> grad;
  bool accumulate = false;
  T* data() const { return grad.data(); }
};

namespace detail {
template <class T>
bool all_finite(const T* data, Index count) {
  for (Index i = 0; i < count; ++i)
    if (!std::isfinite(static_cast<double>(data[i]))) return false;
  return true;
}
template <class T, int Rank, class D>
[[gnu::noinline, gnu::cold]] bool all_finite(const Tensor<T, Rank, D>& x) {
  const auto host = contiguous(x).to_vector();
  return all_finite(host.data(), static_cast<Index>(host.size()));
}
template <class T, int Rank, class D>
[[gnu::noinline, gnu::cold]] void check_finite(const char* operation, const Tensor<T, Rank, D>& value) {
  // What masks attention is infinite on purpose.
  if (std::string_view(operation) == "masked_fill") return;
  check<NonFiniteError>(all_finite(value), "anomaly: a NaN or an infinity in the output of '", operation, "', of shape ",
                        value.shape());
}
}  // namespace detail

/// A node that holds the gradient by one value.
template <Real T, int Rank, Device D>
class GradNode : public Node {
 public:
  using tensor_type = Tensor<T, Rank, D>;

  GradNode(const char* operation, const Shape<Rank>& shape, D device) : Node(operation), shape_(shape), device_(device) {}

  /// Where the next contribution goes; from then on there is a gradient.
  GradTarget<T, Rank, D> target() {
    if (!grad_.defined()) {
      grad_ = tensor_type::empty(shape_, device_);
    } else if (has_grad_ && !bound_ && grad_.storage().owners() > 1) {
      add_out_of_place(tensor_type::zeros(shape_, device_));
    }
    return {grad_, std::exchange(has_grad_, true)};
  }

  /// A contribution that stands ready, dense, in a tensor of its own or in one that others may hold too.
  void add(const tensor_type& contribution) {
    if (!has_grad_ && !bound_) {
      grad_ = contribution;
      has_grad_ = true;
    } else {
      const auto [grad, accumulate] = target();
      if (accumulate)
        kernels::axpy(device_, grad.numel(), T{1}, contribution.data(), grad.data());
      else
        copy_bytes(device_, grad.data(), device_, contribution.data(), grad.bytes());
    }
  }

  bool has_grad() const { return has_grad_; }
  /// The gradient; undefined where there is none.
  tensor_type grad() const { return has_grad_ ? grad_ : tensor_type{}; }
  /// Puts other numbers in the gradient's place. Throws ShapeError where shapes differ.
  void replace_grad(const tensor_type& other) {
    check<ShapeError>(other.defined() && other.shape() == shape_, "register_hook: the hook of a gradient of shape ",
                      shape_, " returned shape ", other.shape());
    const auto dense = contiguous(other);
    if (dense.data() == grad_.data()) return;
    if (bound_)
      copy_bytes(device_, grad_.data(), dense.device(), dense.data(), dense.bytes());
    else
      grad_ = dense;
    has_grad_ = true;
  }
  /// Forgets the gradient. The memory stays: the next contribution overwrites it.
  void zero_grad() {
    has_grad_ = false;
    if (!bound_ && grad_.storage().owners() > 1) grad_ = {};
  }
  const Shape<Rank>& shape() const { return shape_; }
  D device() const { return device_; }
  bool gradient_is_finite() const override { return !has_grad_ || detail::all_finite(grad_); }

  /// A gradient and the place where it lies.
  struct Held {
    tensor_type grad;
    bool has_grad = false, bound = false;
  };
  /// Puts another gradient, or none, in the place of this one, which is returned: for `grad`, which adds to none.
  Held exchange_grad(Held held) {
    return {std::exchange(grad_, std::move(held.grad)), std::exchange(has_grad_, held.has_grad),
            std::exchange(bound_, held.bound)};
  }

 protected:
  // Puts the gradient at a place that stays: a range of a flat buffer.
  void bind_grad(tensor_type place) {
    if (has_grad_) copy_bytes(device_, place.data(), device_, grad_.data(), grad_.bytes());
    grad_ = std::move(place);
    bound_ = true;
  }
  tensor_type take_grad() {
    has_grad_ = false;
    return std::move(grad_);
  }
  void set_has_grad(bool has) { has_grad_ = has; }
  void set_device(D device) { device_ = device; }
  const tensor_type& grad_memory() const { return grad_; }

 private:
  // Others hold this memory, so it must not change: continues in a copy.
  void add_out_of_place(tensor_type copy) {
    copy_bytes(device_, copy.data(), device_, grad_.data(), grad_.bytes());
    grad_ = std::move(copy);
  }

  Shape<Rank> shape_;
  D device_;
  tensor_type grad_;
  bool has_grad_ = false;
  bool bound_ = false;
};

/// The gradient of a value that no operation made.
template <Real T, int Rank, Device D>
class LeafNode : public GradNode<T, Rank, D> {
 public:
  explicit LeafNode(const Tensor<T, Rank, D>& value) : GradNode<T, Rank, D>("leaf", value.shape(), value.device()) {}

  void backward(bool) override {}
  void for_each_input(void (*)(Node&, void*), void*) const override {}
  bool is_leaf() const override { return true; }
  void gradient_is_final() override {
    this->run_gradient_hooks();
    for (const auto& hook : hooks_) hook();
  }
  /// `hook` runs during each backward as soon as this leaf's gradient is complete.
  void add_hook(std::function<void()> hook) { hooks_.push_back(std::move(hook)); }
  void remove_hooks() { hooks_.clear(); }

 private:
  std::vector<std::function<void()>> hooks_;
};

namespace detail {
template <class Hook, class N>
struct TypedHook final : GradientHook {
  explicit TypedHook(Hook h) : hook(std::move(h)) {}
  void run(Node& node) override {
    auto& typed = static_cast<N&>(node);
    const auto grad = typed.grad();
    if (!grad.defined()) return;
    if constexpr (std::is_void_v<decltype(hook(grad))>)
      hook(grad);
    else
      typed.replace_grad(hook(grad));
  }
  Hook hook;
};
}  // namespace detail

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
  /// A leaf: with `requires_grad`, backward leaves the gradient in `grad()`.
  explicit Variable(tensor_type value, bool requires_grad = false) : value_(std::move(value)) {
    if (requires_grad) node_ = Ref<node_type>(new LeafNode<T, Rank, D>(value_));
  }
  /// The result of a recorded operation.
  Variable(tensor_type value, Ref<node_type> node) : value_(std::move(value)), node_(std::move(node)) {}

  const tensor_type& value() const { return value_; }
  const Ref<node_type>& node() const { return node_; }
  bool requires_grad() const { return static_cast<bool>(node_); }
  tensor_type grad() const { return node_ ? node_->grad() : tensor_type{}; }
  void zero_grad() const {
    if (node_) node_->zero_grad();
  }
  /// The same numbers, cut off from the tape.
  Variable detach() const { return Variable(value_); }

  const Shape<Rank>& shape() const { return value_.shape(); }
  Index size(Index axis) const { return value_.size(axis); }
  Index numel() const { return value_.numel(); }
  D device() const { return value_.device(); }
  T item() const { return value_.item(); }

  /// Gradients of this scalar by all leaves behind it are added to the leaves. With `retain_graph` it can be done again.
  void backward(bool retain_graph = false) const
    requires(Rank == 0)
  {
    backward(tensor_type::full({}, T{1}, value_.device()), retain_graph);
  }
  /// The same for a value of any shape; `seed` is the gradient by this value.
  void backward(const tensor_type& seed, bool retain_graph = false) const {
    check<UsageError>(requires_grad(), "backward: nothing behind this value requires a gradient");
    check<ShapeError>(seed.shape() == shape(), "backward: the seed's shape is ", seed.shape(), ", the value's is ", shape());
    node_->add(contiguous(seed));
    const Ref<Node> root = node_;
    run_backward({&root, 1}, {.retain_graph = retain_graph});
  }

  /// `hook` runs in each backward, but not in `grad`, as soon as the gradient by this value is complete; a leaf's
  /// includes what was there before. `hook(gradient)` sees it, and what it returns, a Tensor of the same shape, goes on
  /// in its place, if it returns anything. `hook()` is for leaves alone and runs after those. Throws UsageError where no
  /// gradient is required.
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

/// A Variable, or what converts to one by `as_variable` (a Parameter).
template <class X>
concept AnyVariable =
    detail::is_variable<std::remove_cvref_t<X>> || requires(const std::remove_cvref_t<X>& x) { x.as_variable(); };

/// What operations take: a Tensor, a Variable or a Parameter.
template <class X>
concept Operand = AnyTensor<X> || AnyVariable<X>;

/// The numbers of an operand.
template <AnyTensor X>
const X& value_of(const X& x) {
  return x;
}
template <AnyVariable X>
const auto& value_of(const X& x) {
  return x.value();
}

/// The node that wants an operand's gradient; null where none is wanted.
template <class T, int Rank, class D>
Ref<GradNode<T, Rank, D>> node_of(const Variable<T, Rank, D>& x) {
  return x.node();
}
template <class X>
  requires requires(const X& x) { x.as_variable(); }
auto node_of(const X& x) {
  return x.as_variable().node();
}
template <Real T, int Rank, class D>
Ref<GradNode<T, Rank, D>> node_of(const Tensor<T, Rank, D>&) {
  return {};
}

template <Operand X>
using tensor_of = std::remove_cvref_t<decltype(value_of(std::declval<const X&>()))>;

namespace detail {

template <class N>
N* unless_skipped(N* node) {
  return node != nullptr && !node->skipped() ? node : nullptr;
}

/// An operation's node. `Inputs` are the types of the inputs' nodes.
template <class Backward, class T, int Rank, class D, class... Inputs>
class OperationNode : public GradNode<T, Rank, D> {
 public:
  OperationNode(const char* operation, const Tensor<T, Rank, D>& value, Backward backward, Ref<Inputs>... inputs)
      : GradNode<T, Rank, D>(operation, value.shape(), value.device()),
        saved_(std::in_place, std::move(backward)),
        inputs_(std::move(inputs)...) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check<UsageError>(saved_.has_value(), "backward: the graph behind '", this->operation(),
                      "' was freed by an earlier backward; pass retain_graph = true to that one");
    const auto grad = this->take_grad();
    std::apply([&](const auto&... inputs) { (*saved_)(grad, unless_skipped(inputs.get())...); }, inputs_);
    if (!keep) {
      saved_.reset();
      inputs_ = {};
    }
  }

  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    std::apply([&](const auto&... inputs) { ((inputs ? visit(*inputs, context) : void()), ...); }, inputs_);
  }

 private:
  std::optional<Backward> saved_;
  std::tuple<Ref<Inputs>...> inputs_;
};

template <class... Inputs>
auto make_operation(const char* operation, auto value, auto backward, Ref<Inputs>... inputs) {
  using Value = decltype(value);
  using Result = Variable<typename Value::value_type, Value::rank, typename Value::device_type>;
  if (detects_anomalies()) [[unlikely]]
    check_finite(operation, value);
  if (!(static_cast<bool>(inputs) || ...)) return Result(std::move(value));
  using Made = OperationNode<decltype(backward), typename Value::value_type, Value::rank, typename Value::device_type, Inputs...>;
  Ref<typename Result::node_type> node(new Made(operation, value, std::move(backward), std::move(inputs)...));
  return Result(std::move(value), std::move(node));
}

}  // namespace detail

namespace detail {
inline const char* operation_name(const char* name) { return name; }
template <class Operation>
const char* operation_name(const Operation& operation) {
  return operation.name;
}
}  // namespace detail

/// Gives an operation's result a place on the tape. `backward(dy, dx...)` gets the gradient by the result, and for each
/// input a pointer to the node that collects its gradient (null where none is wanted). What it captures is what is saved.
/// Where all inputs are Tensors the result is the Tensor itself. `operation` is its name, or an object with a `name` and
/// what else <chorus/ops/higher_order.hpp> has to know of it.
template <class Operation, class T, int Rank, class D, class Backward, Operand... Inputs>
auto record(Operation operation, Tensor<T, Rank, D> value, Backward backward, const Inputs&... inputs) {
  if constexpr ((AnyTensor<Inputs> && ...)) {
    return value;
  } else if constexpr ((detail::is_graph_variable<Inputs> || ...)) {
    return record_graph(std::move(operation), std::move(value), std::move(backward), inputs...);
  } else {
    if (!grad_enabled()) return Variable<T, Rank, D>(std::move(value));
    return detail::make_operation(detail::operation_name(operation), std::move(value), std::move(backward), node_of(inputs)...);
  }
}

}  // namespace chorus
