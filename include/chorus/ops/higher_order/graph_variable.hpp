#pragma once
/// GraphVariable: a Variable whose gradients are recorded, too, for gradients of gradients.

#include <chorus/autograd/custom_function.hpp>
#include <chorus/autograd/grad.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace chorus {

/// The result of an operation with a GraphVariable among its inputs. It is also a Variable: `backward` adds Tensors to
/// the leaves, as usual.
template <Real T, int Rank, Device D = Cpu>
class GraphVariable : public Variable<T, Rank, D> {
 public:
  GraphVariable() = default;
  GraphVariable(const GraphVariable&) = default;
  GraphVariable(GraphVariable&&) noexcept = default;
  GraphVariable& operator=(const GraphVariable&) & = default;
  GraphVariable& operator=(GraphVariable&&) & noexcept = default;
  /// A leaf; without `requires_grad` a constant that starts a recorded computation.
  explicit GraphVariable(Tensor<T, Rank, D> value, bool requires_grad = false)
      : Variable<T, Rank, D>(std::move(value), requires_grad) {}
  GraphVariable(Tensor<T, Rank, D> value, Ref<GradNode<T, Rank, D>> node)
      : Variable<T, Rank, D>(std::move(value), std::move(node)) {}
  /// The same value on the same tape.
  explicit GraphVariable(const Variable<T, Rank, D>& x) : Variable<T, Rank, D>(x) {}
  explicit GraphVariable(const Parameter<T, Rank, D>& x)
      : Variable<T, Rank, D>(x ? x.as_variable() : Variable<T, Rank, D>()) {}

  const Variable<T, Rank, D>& as_variable() const { return *this; }
  GraphVariable detach() const { return GraphVariable(this->value()); }
};

namespace detail {

template <class T, int Rank, class D>
inline constexpr bool is_graph_variable<GraphVariable<T, Rank, D>> = true;

template <class N>
struct GraphVariableOf;
template <class T, int Rank, class D>
struct GraphVariableOf<GradNode<T, Rank, D>> {
  using type = GraphVariable<T, Rank, D>;
};

/// The gradients of one running call of `grad`, by node.
class GraphGradients {
 public:
  explicit GraphGradients(const GradPath& path) : path_(path) {}

  template <class T, int Rank, class D>
  void add(const GradNode<T, Rank, D>& node, const GraphVariable<T, Rank, D>& gradient) {
    if (!gradient.value().defined()) return;  // user-defined functions may return none
    check(gradient.shape() == node.shape(), "grad: a gradient of shape ", gradient.shape(), " for a value of shape ",
          node.shape(), " that '", node.operation(), "' made: this is a bug");
    auto& place = gradients_[&node];
    if (!place)
      place = std::make_shared<GraphVariable<T, Rank, D>>(gradient);
    else
      place = std::make_shared<GraphVariable<T, Rank, D>>(of(node) + gradient);
  }
  /// Undefined if there is none.
  template <class T, int Rank, class D>
  GraphVariable<T, Rank, D> of(const GradNode<T, Rank, D>& node) const {
    const auto place = gradients_.find(&node);
    if (place == gradients_.end()) return {};
    return *static_cast<const GraphVariable<T, Rank, D>*>(place->second.get());
  }
  void forget(const Node& node) { gradients_.erase(&node); }
  bool wants(const Node* node) const { return node != nullptr && path_.contains(*node); }

 private:
  const GradPath& path_;
  std::unordered_map<const Node*, std::shared_ptr<void>> gradients_;
};

template <class Operation, class... Values>
concept HasDerivatives = requires(const Operation& operation, const Values&... values) {
  derivatives(operation, values...);
};

/// A node that can send its gradient to its inputs by recorded operations.
class GraphNode {
 public:
  virtual void graph_backward(GraphGradients& gradients) = 0;

 protected:
  ~GraphNode() = default;
};

/// A recorded operation's value and inputs.
template <class Value, class... Xs>
class GraphOperands {
 public:
  explicit GraphOperands(const Value& y, const Xs&... x) : value(y), inputs(x...), saved_(Saved(x.value())...) {}

  /// Throws UsageError if an input has been written since.
  void check_unwritten(const char* operation) const {
    std::apply([&](const auto&... x) { (x.read(operation), ...); }, saved_);
  }

  const Value value;
  const std::tuple<Xs...> inputs;

 private:
  std::tuple<Saved<typename Xs::tensor_type>...> saved_;
};

template <class Operation, class Backward, class T, int Rank, class D, class... Inputs>
class GraphOperation final : public OperationNode<Backward, T, Rank, D, Inputs...>, public GraphNode {
 public:
  GraphOperation(Operation operation, const Tensor<T, Rank, D>& value, Backward backward,
                 const typename GraphVariableOf<Inputs>::type&... inputs)
      : OperationNode<Backward, T, Rank, D, Inputs...>(operation_name(operation), value, std::move(backward),
                                                       {inputs.node()...}),
        operands_(std::in_place, value, inputs...),
        operation_(std::move(operation)) {}
  ~GraphOperation() override { forget(); }

  void backward(bool keep) override {
    OperationNode<Backward, T, Rank, D, Inputs...>::backward(keep);
    if (!keep) forget();
  }

  void graph_backward(GraphGradients& gradients) override {
    check<UsageError>(operands_.has_value(), "grad: the graph behind '", this->operation(),
                      "' was freed by an earlier backward; pass retain_graph = true to that one");
    const auto dy = gradients.of(*this);
    if (!dy.value().defined()) return;
    if constexpr (!requires { requires Operation::linear; }) operands_->check_unwritten(this->operation());
    send(gradients, dy, GraphVariable<T, Rank, D>(operands_->value, Ref<GradNode<T, Rank, D>>(this)),
         std::index_sequence_for<Inputs...>());
  }

 private:
  using Value = GraphVariable<T, Rank, D>;
  template <std::size_t... I>
  void send(GraphGradients& gradients, const Value& dy, const Value& y, std::index_sequence<I...>) const {
    if constexpr (HasDerivatives<Operation, Value, Value, typename GraphVariableOf<Inputs>::type...>) {
      const auto rules = derivatives(operation_, dy, y, std::get<I>(operands_->inputs)...);
      (give(gradients, std::get<I>(rules), std::get<I>(operands_->inputs)), ...);
    } else {
      fail<UsageError>("grad: create_graph: '", this->operation(), "' has no derivative of this order");
    }
  }
  template <class Rule, class X>
  static void give(GraphGradients& gradients, const Rule& rule, const X& input) {
    if (gradients.wants(input.node().get())) gradients.add(*input.node(), rule());
  }
  void forget() {
    if (!operands_) return;
    operation_.~Operation();
    operands_.reset();
  }

  std::optional<GraphOperands<Tensor<T, Rank, D>, typename GraphVariableOf<Inputs>::type...>> operands_;
  union {  // as in OperationNode; it is there while the operands are
    Operation operation_;
  };
};

template <Operand X>
auto as_graph(const X& x) {
  return GraphVariable(value_of(x), node_of(x));
}

template <class Operation, class T, int Rank, class D, class Backward, class... Nodes>
GraphVariable<T, Rank, D> make_graph_operation(Operation operation, Tensor<T, Rank, D> value, Backward backward,
                                               const Nodes&... inputs) {
  if (detects_anomalies()) [[unlikely]]
    check_finite(operation_name(operation), value);
  if (!(inputs.requires_grad() || ...)) return GraphVariable(std::move(value));
  using Made = GraphOperation<Operation, Backward, T, Rank, D, typename Nodes::node_type...>;
  Ref<GradNode<T, Rank, D>> node(new Made(operation, value, std::move(backward), inputs...));
  record_form<Rank>(*node, operation);
  return GraphVariable(std::move(value), std::move(node));
}

}  // namespace detail

/// `record` for inputs with a GraphVariable; returns one. Its node can also pass its gradient on by recorded
/// operations, if there is `derivatives(operation, dy, y, inputs...)`. That takes GraphVariables and returns a tuple of
/// functions, one for each input, that compute the input's gradient.
template <class Operation, class T, int Rank, class D, class Backward, Operand... Inputs>
auto record_graph(Operation operation, Tensor<T, Rank, D> value, Backward backward, const Inputs&... inputs) {
  if (!grad_enabled()) return GraphVariable<T, Rank, D>(std::move(value));
  return detail::make_graph_operation(std::move(operation), std::move(value), std::move(backward),
                                      detail::as_graph(inputs)...);
}

/// A user's backward function that accepts GraphVariables is called once for all inputs, as for Tensors.
template <class Backward, class Dy, class Y, class... Xs>
requires std::is_invocable_v<const Backward&, const Dy&, const Y&, const Xs&...>
auto derivatives(const operations::Custom<Backward>& operation, const Dy& dy, const Y& y, const Xs&... x) {
  const auto gradients = std::make_shared<decltype(detail::as_tuple(operation.backward(dy, y, x...)))>(
      detail::as_tuple(operation.backward(dy, y, x...)));
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return std::tuple{[gradients] { return std::get<I>(*gradients); }...};
  }
  (std::index_sequence_for<Xs...>{});
}

namespace detail {

template <class T, class D, class... Nodes>
auto grad_variables(const GraphVariable<T, 0, D>& value, const GradOptions& options, const Ref<Nodes>&... nodes) {
  check<UsageError>(value.requires_grad(), "grad: nothing behind the value requires a gradient");
  const GradPath path(value.node(), {nodes.get()...}, options.allow_unused);
  GraphGradients gradients(path);
  gradients.add(*value.node(), GraphVariable(Tensor<T, 0, D>::full({}, T{1}, value.device())));
  const GradMode recording(true);
  for (const Ref<Node>& node : path.nodes()) {
    if (!path.leads_on(*node)) continue;
    auto* graph_node = dynamic_cast<GraphNode*>(node.get());
    check<UsageError>(graph_node != nullptr, "grad: create_graph: '", node->operation(),
                      "' was recorded by plain Variables; begin the computation with GraphVariable(x)");
    graph_node->graph_backward(gradients);
    if (!path.is_input(*node)) gradients.forget(*node);
  }
  return std::tuple{gradients.of(*nodes)...};
}

}  // namespace detail

/// The gradients of a scalar w.r.t. a tuple of inputs (see <chorus/autograd/grad.hpp>), as GraphVariables; with
/// `create_graph` recorded ones. Throws UsageError with the operation's name if an operation on the path has no second
/// derivative.
template <class T, class D, class... Inputs>
auto grad(const GraphVariable<T, 0, D>& value, const std::tuple<Inputs...>& inputs, const GradOptions& options = {}) {
  return std::apply(
      [&](const auto&... x) {
        if (options.create_graph) return detail::grad_variables(value, options, node_of(x)...);
        return std::apply([](const auto&... gradient) { return std::tuple{GraphVariable(gradient)...}; },
                          detail::grad_tensors(value, options, node_of(x)...));
      },
      inputs);
}
/// The same for one input.
template <class T, class D, AnyVariable X>
auto grad(const GraphVariable<T, 0, D>& value, const X& input, const GradOptions& options = {}) {
  return std::get<0>(grad(value, std::tie(input), options));
}

}  // namespace chorus
