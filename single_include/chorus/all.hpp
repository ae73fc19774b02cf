#pragma once
// Made by tests/amalgamate.py from include/chorus: change it there.

#include <chorus/chorus.hpp>

// <chorus/all.hpp>
#ifndef CHORUS_SINGLE_CHORUS_ALL_HPP
#define CHORUS_SINGLE_CHORUS_ALL_HPP
/// <chorus/chorus.hpp> and everything beside it that needs no library of its own: other policies, communication hooks,
/// sharded and fused optimizers, mixed precision, checkpoints, groups of ranks, further layers, losses and optimizers,
/// gradients of gradients. Engines of other libraries stay apart: <chorus/comm/mpi.hpp>, <chorus/comm/gloo.hpp>.

// First of all: what a compiler has to be and to be told.

// <chorus/autograd/anomaly.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_ANOMALY_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_ANOMALY_HPP
/// DetectAnomaly: finds the operation that makes the first NaN or infinity.

namespace chorus {

/// While one lives, in any thread, every recorded operation's output and every gradient that it sends back is searched,
/// and the first NaN or infinity becomes a NonFiniteError that names the operation. `masked_fill` may give infinities.
/// Slow: for looking for a mistake.
///   const ch::DetectAnomaly detect;
///   loss_of(net, batch).backward();
class DetectAnomaly {
 public:
  DetectAnomaly() { ++detail::anomaly_detectors(); }
  ~DetectAnomaly() { --detail::anomaly_detectors(); }
  DetectAnomaly(const DetectAnomaly&) = delete;
  DetectAnomaly& operator=(const DetectAnomaly&) = delete;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_ANOMALY_HPP

// <chorus/autograd/checkpoint.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_CHECKPOINT_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_CHECKPOINT_HPP
/// Activation checkpointing (Chen, Xu, Zhang, Guestrin 2016): memory for time. What a part of a model computes is
/// forgotten and computed again when backward needs it.

namespace chorus {

namespace detail {

/// The random numbers of a part of a forward pass, to be drawn again, and what its layers found.
class PassReplay {
 public:
  PassReplay() : outer_(random_context()), outer_run_(first_run) {
    if (outer_ != nullptr) {
      context_ = *outer_;
      // Asked for once, while its answer holds; not at all if no random operation asks.
      if (context_.first_sample)
        context_.first_sample = [ask = context_.first_sample, known = std::optional<std::int64_t>()]() mutable {
          if (!known) known = ask();
          return *known;
        };
    } else {
      constexpr std::uint32_t outside_of_policies = 0x80000000u;
      context_ = {.seed = initial_seed(),
                  .step = next_random_stream(),
                  .next_operation = outside_of_policies,
                  .first_sample = {}};
    }
    start_ = context_.next_operation;
  }
  /// Runs the part, each time with the same numbers.
  template <class Function>
  auto run(const Function& function) {
    context_.next_operation = start_;
    context_.passes = &passes_;
    passes_.rewind(outer_ != nullptr ? outer_->passes : nullptr);
    const RandomScope scope(context_);
    findings_.begin(outer_run_, ran_);
    const FirstRunScope run_scope(findings_);
    return function();
  }
  /// After the first run: the rest of the pass goes on after it.
  void leave() {
    if (outer_ != nullptr) {
      outer_->next_operation = context_.next_operation;
      outer_->drew = context_.drew;
    }
    context_.is_share = nullptr;  // it has been asked; by backward there may be another batch
    outer_ = nullptr;
    outer_run_ = nullptr;
    ran_ = true;
  }

 private:
  RandomContext* outer_;
  FirstRun* outer_run_;
  FirstRun findings_;
  bool ran_ = false;
  RandomContext context_;
  std::uint32_t start_ = 0;
  PassNumbers passes_;
};

/// The parameters that a part of a forward pass takes, and the versions of their numbers: what is computed again needs
/// the same ones.
class SeenParameters final : public ParameterWatch {
 public:
  SeenParameters() : outer_(std::exchange(parameter_watch, this)) {}
  SeenParameters(const SeenParameters&) = delete;
  SeenParameters& operator=(const SeenParameters&) = delete;
  ~SeenParameters() { parameter_watch = outer_; }

  void saw(const void* parameter, Node& node, std::span<const Index> extents, bool wants_grad) override {
    if (outer_ != nullptr) outer_->saw(parameter, node, extents, wants_grad);
    for (const auto& known : list)
      if (known.node.get() == &node) return;
    list.push_back({Ref<Node>(&node), node.numbers_version()});
  }

  struct Seen {
    Ref<Node> node;
    std::uint64_t version;
  };
  std::vector<Seen> list;

 private:
  ParameterWatch* outer_;
};

template <Operand X>
auto fresh_leaf(const X& x) {
  if constexpr (AnyTensor<X>)
    return x;
  else
    return Variable(value_of(x), static_cast<bool>(node_of(x)));
}

/// The leaves behind a value, recorded after `start`, that existed then. Throws UsageError where it was made from an
/// older one.
inline std::vector<Ref<Node>> older_leaves(const Ref<Node>& root, std::uint64_t start) {
  struct Walk {
    std::vector<Ref<Node>> nodes, leaves;
    std::unordered_set<const Node*> known;
  } walk;
  walk.nodes.push_back(root);
  for (std::size_t next = 0; next < walk.nodes.size(); ++next) {
    const auto node = walk.nodes[next];
    if (node->is_leaf()) {
      if (node->sequence() < start) walk.leaves.push_back(node);
      continue;
    }
    check<UsageError>(node->sequence() > start, "checkpoint: the function uses what '", node->operation(),
                      "' has recorded before it; give that as an input");
    const auto see = [](Node& input, void* context) {
      auto& w = *static_cast<Walk*>(context);
      if (w.known.insert(&input).second) w.nodes.emplace_back(&input);
    };
    node->for_each_input(see, &walk);
    node->for_each_far_leaf(see, &walk);
  }
  return std::move(walk.leaves);
}

template <class Function, class T, int Rank, class D, class... Inputs>
class CheckpointNode final : public GradNode<T, Rank, D> {
 public:
  CheckpointNode(const Tensor<T, Rank, D>& value, Function function, PassReplay random,
                 std::vector<Ref<Node>> parameters, std::vector<SeenParameters::Seen> seen, const Inputs&... inputs)
      : GradNode<T, Rank, D>("checkpoint", value.shape(), value.device()),
        saved_(std::in_place,
               Saved{std::move(function), std::move(random), {inputs...}, std::move(parameters), std::move(seen),
                     batch_group(), tensor_group()}) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check<UsageError>(saved_.has_value(), "backward: the graph behind 'checkpoint' was freed by an earlier backward; ",
                      "pass retain_graph = true to that one");
    for (const auto& [node, version] : saved_->seen) {
      const auto now = node->numbers_version();
      check<UsageError>(now == version, "backward of 'checkpoint': it has to compute again with '",
                        node->numbers_name(), "' as it was in the forward pass, at version ", version,
                        ", but it has been written since, and is at version ", now,
                        ": go backward before an optimizer steps or numbers are assigned");
    }
    const auto dy = this->take_grad();
    const auto leaves = std::apply([](const auto&... x) { return std::tuple{fresh_leaf(x)...}; }, saved_->inputs);
    {
      const GradMode recording(true);
      const auto& group = saved_->group;
      const BatchGroupScope scope(group && group->is_here() ? group : nullptr);
      const TensorGroupScope layers(saved_->layers);
      const auto again = saved_->random.run([&] { return std::apply(saved_->function, leaves); });
      check<UsageError>(again.requires_grad() && again.shape() == dy.shape(), "checkpoint: the function gave shape ",
                        dy.shape(), " at first and then shape ", again.shape());
      again.node()->add(dy);
      const Ref<Node> root = again.node();
      run_backward({&root, 1}, {.hooks = false});
    }
    [&]<std::size_t... I>(std::index_sequence<I...>) { (give(std::get<I>(leaves), std::get<I>(saved_->inputs)), ...); }
    (std::index_sequence_for<Inputs...>{});
    if (!keep) saved_.reset();
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    if (!saved_) return;
    const auto see = [&](const auto& x) {
      if (const auto node = node_of(x)) visit(*node, context);
    };
    std::apply([&](const auto&... x) { (see(x), ...); }, saved_->inputs);
    for (const auto& parameter : saved_->parameters) visit(*parameter, context);
  }
  bool only_to_inputs() const override { return false; }

 private:
  template <class Leaf, class Input>
  static void give(const Leaf& leaf, const Input& input) {
    if constexpr (!AnyTensor<Leaf>)
      if (leaf.requires_grad() && leaf.grad().defined()) node_of(input)->add(leaf.grad());
  }

  struct Saved {
    Function function;
    PassReplay random;
    std::tuple<Inputs...> inputs;
    std::vector<Ref<Node>> parameters;
    std::vector<SeenParameters::Seen> seen;
    std::shared_ptr<BatchGroup> group;
    std::shared_ptr<TensorGroup> layers;  // who shares them
  };
  std::optional<Saved> saved_;
};

}  // namespace detail

/// `function(inputs...)`, a Variable, of which only the inputs and the result are kept: backward runs it a second time,
/// with the same random numbers, to have what lies between. Parameters that the function uses get their gradients as
/// ever. Other recorded values must be inputs; what the function refers to must live until backward. Layers are in
/// training or in evaluation as they were the first time, and batch norm counts its batch once; a layer of one's own
/// that changes buffers asks `is_recomputed`. Throws UsageError for a value that is no input, and in backward where a
/// parameter has been written since.
///   for (const auto& block : blocks) x = ch::checkpoint([&](const auto& in) { return block(in); }, x);
template <class Function, Operand... Inputs>
auto checkpoint(const Function& function, const Inputs&... inputs) {
  const auto start = Node::next_sequence();
  const std::tuple leaves{detail::fresh_leaf(inputs)...};
  detail::PassReplay random;
  std::vector<detail::SeenParameters::Seen> seen;
  const auto value = random.run([&] {
    detail::SeenParameters watch;
    auto made = std::apply(function, leaves);
    seen = std::move(watch.list);
    return made;
  });
  random.leave();
  using Output = std::remove_const_t<decltype(value)>;
  static_assert(AnyVariable<Output>, "checkpoint: the function returns one Variable");
  if (!value.requires_grad()) return Output(value.value());
  auto parameters = detail::older_leaves(value.node(), start);
  using T = typename Output::value_type;
  using D = typename Output::device_type;
  using Made = detail::CheckpointNode<Function, T, Output::rank, D, Inputs...>;
  Ref<GradNode<T, Output::rank, D>> node(new Made(value.value(), function, std::move(random), std::move(parameters),
                                                  std::move(seen), inputs...));
  node->take_mean(*value.node());  // of a function that returns its loss
  return Output(value.value(), std::move(node));
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_CHECKPOINT_HPP

// <chorus/autograd/custom_function.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_CUSTOM_FUNCTION_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_CUSTOM_FUNCTION_HPP
/// Differentiable functions of a user's own.

namespace chorus {

// What the tape remembers of this operation beside its backward function: see ops/higher_order.hpp.
namespace operations {
template <class Backward>
struct Custom {
  const char* name;
  Backward backward;
};
}  // namespace operations

namespace detail {
template <class... Xs>
std::tuple<Xs...> as_tuple(std::tuple<Xs...> several) {
  return several;
}
template <Operand X>
std::tuple<X> as_tuple(X one) {
  return std::tuple<X>(std::move(one));
}
}  // namespace detail

/// A function given by its forward and its backward pass, both in Tensors: `forward(x...)` returns the value y,
/// `backward(dy, y, x...)` the gradient by x, or a tuple of those by each input (an undefined Tensor{}: none). `inputs`
/// are Tensors, Variables or Parameters; the result is a Tensor for Tensors, else a Variable. Inputs and value are
/// saved for the way back. A backward function that takes any operand (`const auto&`) is differentiated again in
/// programs with <chorus/ops/higher_order.hpp>. Throws ShapeError where a gradient hasn't its input's shape.
///   auto clipped_exp(const auto& x) {  // exp(min(x, 3)), whose gradient never ends
///     return ch::custom_function(
///         "clipped_exp", [](const auto& in) { return ch::exp(ch::minimum(in, ceiling)); },
///         [](const auto& dy, const auto& y, const auto& in) { return dy * y; }, x);
///   }
template <class Forward, class Backward, Operand... Inputs>
auto custom_function(const char* name, const Forward& forward, const Backward& backward, const Inputs&... inputs) {
  const auto y = forward(value_of(inputs)...);
  static_assert(AnyTensor<decltype(y)>, "custom_function: forward gets Tensors and returns one");
  return record(
      operations::Custom<Backward>{name, backward}, y,
      [name, backward, y, saved = std::tuple{detail::Saved(value_of(inputs))...}](const auto& dy, auto... nodes) {
        const auto give = [name](auto node, const auto& gradient) {
          if (!node || !gradient.defined()) return;
          check<ShapeError>(gradient.shape() == node->shape(), name, ": backward gave a gradient of shape ",
                            gradient.shape(), " for an input of shape ", node->shape());
          node->add(contiguous(gradient));
        };
        const auto gradients =
            detail::as_tuple(std::apply([&](const auto&... x) { return backward(dy, y, x.read(name)...); }, saved));
        static_assert(std::tuple_size_v<std::remove_const_t<decltype(gradients)>> == sizeof...(Inputs),
                      "custom_function: backward returns a gradient for each input");
        std::apply([&](const auto&... gradient) { (give(nodes, gradient), ...); }, gradients);
      },
      inputs...);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_CUSTOM_FUNCTION_HPP

// <chorus/autograd/grad.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_GRAD_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_GRAD_HPP
/// grad: gradients by chosen values as results, added to nothing (PyTorch's torch.autograd.grad).

namespace chorus {

struct GradOptions {
  /// Record how the gradients are made, so that gradients can be taken through them: for GraphVariables, see
  /// <chorus/ops/higher_order.hpp>.
  bool create_graph = false;
  /// Keep what the operations saved, so that backward or grad can go through them again. Unset: as `create_graph`.
  std::optional<bool> retain_graph = {};
  /// Give an undefined gradient for an input on which the value does not depend, rather than an error.
  bool allow_unused = false;
};

namespace detail {

/// The part of a tape that lies between a value and the chosen inputs. While it lives, what it leads to beside them is
/// skipped.
class GradPath {
 public:
  GradPath(const Ref<Node>& root, const std::vector<Node*>& inputs, bool allow_unused)
      : inputs_(inputs.begin(), inputs.end()) {
    check<UsageError>(inputs_.size() == inputs.size() && !inputs_.contains(nullptr),
                      "grad: inputs are different values that require a gradient; one does not, or is given twice");
    add(*root);
    const Node* freed = nullptr;
    for (std::size_t next = 0; next < nodes_.size(); ++next) {
      Node& node = *nodes_[next];
      any_input_ = false;
      for_each_behind(
          node, [](Node& input, void* path) { static_cast<GradPath*>(path)->add(input); }, this);
      if (!any_input_ && !node.is_leaf()) freed = &node;
    }
    for (const Node* input : inputs_) {
      if (known_.contains(input) || allow_unused) continue;
      check<UsageError>(freed == nullptr, "grad: the graph behind '", freed == nullptr ? "" : freed->operation(),
                        "' was freed by an earlier backward; pass retain_graph = true to that one");
      fail_unused();
    }
    std::sort(nodes_.begin(), nodes_.end(),
              [](const Ref<Node>& a, const Ref<Node>& b) { return a->sequence() > b->sequence(); });
    // From the first recorded to the last: an operation leads to an input where one of its own inputs is on the path.
    for (std::size_t i = nodes_.size(); i-- > 0;) {
      struct Search {
        const GradPath* path;
        bool found;
      } search{this, false};
      for_each_behind(
          *nodes_[i],
          [](Node& input, void* context) {
            auto& s = *static_cast<Search*>(context);
            s.found = s.found || s.path->contains(input);
          },
          &search);
      if (search.found) through_.insert(nodes_[i].get());
    }
    for (const auto& node : nodes_)
      check<UsageError>(
          !leads_on(*node) || node->only_to_inputs(), "grad: '", node->operation(),
          "' sends gradients to parameters by itself; call grad inside of the function that it runs, or backward");
    // No further: what lies behind may be on the path of another thread.
    for (const auto& node : nodes_)
      if (leads_on(*node))
        for_each_behind(
            *node, [](Node& input, void* path) { static_cast<GradPath*>(path)->skip(input); }, this);
  }
  ~GradPath() {
    for (const auto& node : skipped_) node->set_skipped(false);
  }
  GradPath(const GradPath&) = delete;
  GradPath& operator=(const GradPath&) = delete;

  /// All nodes, the last recorded first.
  const std::vector<Ref<Node>>& nodes() const { return nodes_; }
  bool is_input(const Node& node) const { return inputs_.contains(&node); }
  /// Whether an input lies behind this node.
  bool leads_on(const Node& node) const { return through_.contains(&node); }
  bool contains(const Node& node) const { return is_input(node) || leads_on(node); }
  [[noreturn, gnu::cold]] static void fail_unused() {
    fail<UsageError>(
        "grad: the value does not depend on one of the inputs; with allow_unused its gradient is undefined");
  }

 private:
  static void for_each_behind(const Node& node, void (*visit)(Node&, void*), void* context) {
    node.for_each_input(visit, context);
    node.for_each_far_leaf(visit, context);
  }
  void add(Node& node) {
    any_input_ = true;
    if (known_.insert(&node).second) nodes_.emplace_back(&node);
  }

  void skip(Node& node) {
    if (contains(node) || node.skipped()) return;
    node.set_skipped(true);
    skipped_.emplace_back(&node);
  }

  std::vector<Ref<Node>> nodes_, skipped_;
  std::unordered_set<const Node*> known_, inputs_, through_;
  bool any_input_ = false;
};

/// Takes an input's gradient out of the way of what `grad` computes, and puts it back.
template <class N>
class Divert {
 public:
  Divert(const Ref<N>& node) : node_(node), held_(node->exchange_grad({})) {}
  ~Divert() { node_->exchange_grad(std::move(held_)); }
  Divert(const Divert&) = delete;
  Divert& operator=(const Divert&) = delete;

 private:
  Ref<N> node_;
  typename N::Held held_;
};

/// The gradients as Tensors.
template <class T, class D, class... Nodes>
auto grad_tensors(const Variable<T, 0, D>& value, const GradOptions& options, const Ref<Nodes>&... nodes) {
  check<UsageError>(value.requires_grad(), "grad: nothing behind the value requires a gradient");
  const GradPath path(value.node(), {nodes.get()...}, options.allow_unused);
  const std::tuple<Divert<Nodes>...> diverted{nodes...};
  std::tuple<typename Nodes::tensor_type...> gradients;
  if (path.contains(*value.node())) value.node()->add(Tensor<T, 0, D>::full({}, T{1}, value.device()));
  const NoGrad no_grad;
  for (const Ref<Node>& node : path.nodes()) {
    if (path.is_input(*node)) {
      const auto take = [&](auto& gradient, const auto& input) {
        if (node.get() == input.get()) gradient = input->grad();
      };
      std::apply([&](auto&... gradient) { (take(gradient, nodes), ...); }, gradients);
    }
    if (path.leads_on(*node)) node->backward_to_wanted(options.retain_graph.value_or(options.create_graph));
  }
  // A far leaf may turn out to be unused.
  const bool all = std::apply([](const auto&... gradient) { return (gradient.defined() && ...); }, gradients);
  if (!all && !options.allow_unused) GradPath::fail_unused();
  return gradients;
}

}  // namespace detail

/// The gradients of `value`, a scalar, by `inputs`, a tuple of Variables and Parameters, leaves or not: a tuple of
/// Tensors. Nothing is added to any value's `grad()`, no hook runs. For a value of another shape take `sum(value *
/// seed)`. Throws UsageError for an input that requires no gradient or on which the value does not depend (but see
/// `allow_unused`).
///   const auto [dx, dw] = ch::grad(loss, std::tie(x, layer.weight));
template <AnyVariable Y, class... Inputs>
auto grad(const Y& value, const std::tuple<Inputs...>& inputs, const GradOptions& options = {}) {
  static_assert(tensor_of<Y>::rank == 0, "grad: the value is a scalar; of another one take sum(value * seed)");
  check<UsageError>(!options.create_graph, "grad: create_graph is for GraphVariables: begin the computation with ",
                    "GraphVariable(x), of <chorus/ops/higher_order.hpp>");
  return std::apply([&](const auto&... x) { return detail::grad_tensors(value, options, node_of(x)...); }, inputs);
}
/// The same by one input: a Tensor.
template <AnyVariable Y, AnyVariable X>
auto grad(const Y& value, const X& input, const GradOptions& options = {}) {
  return std::get<0>(grad(value, std::tie(input), options));
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_GRAD_HPP

// <chorus/comm/simulated/simulate.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATE_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATE_HPP
/// `simulate`: runs a program as all ranks of a group in one process, in virtual time.

// <chorus/comm/simulated/links.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SIMULATED_LINKS_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SIMULATED_LINKS_HPP
/// `Links`: what messages cost in a simulated network, by the alpha-beta model (Hockney, 1994): alpha seconds and beta
/// seconds a byte.

// <chorus/comm/simulated/tasks.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SIMULATED_TASKS_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SIMULATED_TASKS_HPP
/// `Tasks`: functions that run in turn, each with a clock of its own that stands still unless it is moved: virtual
/// time.

#include <ucontext.h>

#include <queue>
#include <ratio>
#include <semaphore>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace chorus::comm::simulated {

/// Virtual time, in whole femtoseconds: sums of integers are the same on every machine and with every compiler option.
/// It lasts for 2.5 hours.
using Time = std::chrono::duration<std::int64_t, std::femto>;

/// Throws UsageError for seconds below 0, and for more than 8000: there virtual time is near its end.
inline Time time_of(std::string_view what, double seconds) {
  check<UsageError>(seconds >= 0 && seconds <= 8000, what, ": ", seconds, " s of virtual time, expected 0 to 8000");
  return Time(static_cast<std::int64_t>(seconds * 1e15));
}
/// `clock` after so much more. Throws UsageError near the end of virtual time.
inline Time later(Time clock, Time more) {
  constexpr Time end(std::int64_t{9'000'000'000'000'000'000});
  check<UsageError>(more < end - clock, "simulation: more than 9000 s of virtual time");
  return clock + more;
}
inline double seconds(Time time) { return static_cast<double>(time.count()) * 1e-15; }

/// Where a task runs. A fiber costs some pages of memory and a change between two of them 0.3 us; all are on the thread
/// of `run`, so they have one `thread_local` state between them: they are for code without any. A thread costs more,
/// has its own, and runs only when it is its turn.
enum class RunsOn : std::uint8_t { fiber, thread };

/// What the address sanitizer has to be told of a change between stacks; nothing elsewhere.
struct StackChange {
#if defined(__SANITIZE_ADDRESS__)
  static void begin(void** own, const void* bottom, std::size_t size) {
    __sanitizer_start_switch_fiber(own, bottom, size);
  }
  static void end(void* own, const void** bottom, std::size_t* size) {
    __sanitizer_finish_switch_fiber(own, bottom, size);
  }
#else
  static void begin(void**, const void*, std::size_t) {}
  static void end(void*, const void**, std::size_t*) {}
#endif
};

/// One task runs at a time, until it ends or blocks: no two ever race. In the order of their clocks, if that is wanted,
/// else in the order in which they are woken.
class Tasks {
 public:
  explicit Tasks(bool in_time_order = false) : in_time_order_(in_time_order) {}
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;
  ~Tasks() {
    if (stacks_ != nullptr) munmap(stacks_, stack_bytes * fibers_);
  }

  /// A task that begins when `run` is called. `body` must not throw.
  int add(RunsOn where, std::function<void()> body) {
    auto& task = tasks_.emplace_back();
    task.body = std::move(body);
    if (where == RunsOn::thread)
      task.own = std::make_unique<Thread>();
    else
      task.stack = fibers_++;
    const int number = static_cast<int>(tasks_.size()) - 1;
    wake(number, {});
    return number;
  }

  /// Returns when all tasks have ended. Where none can go on, `stuck()` has to wake one. Throws CommError where there
  /// is no memory for stacks, or no thread.
  void run(const std::function<void()>& stuck) {
    reserve_stacks();
    start_threads();
    for (std::size_t left = tasks_.size(); left > 0;) {
      if (nobody_is_ready()) stuck();
      const auto next = take_next();
      if (next.event) {
        next.event();
        continue;
      }
      current_ = next.task;
      Task& task = tasks_[static_cast<std::size_t>(current_)];
      task.is_ready = false;
      task.own ? give_turn(*task.own) : enter_fiber(task);
      left -= task.ended;
    }
    for (auto& task : tasks_)
      if (task.own) task.own->thread.join();
  }

  // From a task that runs:

  int current() const { return current_; }
  Time& clock() { return clock_of(current_); }
  Time& clock_of(int task) { return tasks_[static_cast<std::size_t>(task)].clock; }
  /// Lets others run until somebody wakes this one.
  void block() {
    Task& task = tasks_[static_cast<std::size_t>(current_)];
    if (task.own) {
      turn_.release();
      task.own->turn.acquire();
    } else {
      StackChange::begin(&task.shadow, bottom_, size_);
      swapcontext(&task.context, &scheduler_);
      StackChange::end(task.shadow, &bottom_, &size_);
    }
  }
  /// `task` may go on. It is ready at the virtual time `at`, which is not before the caller's own.
  void wake(int task, Time at) {
    Task& woken = tasks_[static_cast<std::size_t>(task)];
    if (std::exchange(woken.is_ready, true)) return;
    if (in_time_order_)
      ordered_.push({std::max(at, woken.clock), given_++, task, {}});
    else
      ready_.push_back(task);
  }
  /// In time order: returns when no other task can do anything before the caller's clock.
  void await_turn() {
    if (ordered_.empty() || ordered_.top().at >= clock()) return;
    wake(current_, clock());
    block();
  }
  /// In time order: calls `event` at that virtual time.
  void at(Time when, std::function<void()> event) { ordered_.push({when, given_++, -1, std::move(event)}); }

 private:
  static constexpr std::size_t stack_bytes = 128 << 10;  // reserved; what is not touched costs nothing

  struct Thread {
    std::binary_semaphore turn{0};
    std::thread thread;
  };
  struct Task {
    std::function<void()> body;
    Time clock{};
    bool is_ready = false, begun = false, ended = false;
    std::size_t stack = 0;
    void* shadow = nullptr;  // the sanitizer's
    ucontext_t context;
    std::unique_ptr<Thread> own;  // else it is a fiber
  };
  struct Ready {
    Time at;
    std::uint64_t number;  // of two at one time, the first that was given
    int task;
    std::function<void()> event;
    friend bool operator<(const Ready& a, const Ready& b) {
      return a.at != b.at ? a.at > b.at : a.number > b.number;  // the queue's top is the largest
    }
  };

  bool nobody_is_ready() const { return ready_.empty() && ordered_.empty(); }
  Ready take_next() {
    if (in_time_order_) {
      check<CommError>(!ordered_.empty(), "simulation: nobody can go on");
      auto next = ordered_.top();
      ordered_.pop();
      return next;
    }
    check<CommError>(!ready_.empty(), "simulation: nobody can go on");
    const int task = ready_.front();
    ready_.pop_front();
    return {{}, 0, task, {}};
  }

  [[gnu::cold]] void reserve_stacks() {
    if (fibers_ == 0) return;
    void* const memory = mmap(nullptr, stack_bytes * fibers_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check<CommError>(memory != MAP_FAILED, "simulation: no memory for ", fibers_, " stacks");
    stacks_ = static_cast<std::byte*>(memory);
  }
  [[gnu::cold]] void start_threads() {
    try {
      for (auto& task : tasks_) {
        if (!task.own) continue;
        task.own->thread = chorus::detail::start_thread("simulation", [this, &task] {
          task.own->turn.acquire();
          if (!given_up_) task.body();
          task.ended = true;
          turn_.release();
        });
      }
    } catch (...) {
      given_up_ = true;
      for (auto& task : tasks_) {
        if (!task.own || !task.own->thread.joinable()) continue;
        give_turn(*task.own);
        task.own->thread.join();
      }
      throw;
    }
  }
  void give_turn(Thread& thread) {
    thread.turn.release();
    turn_.acquire();
  }
  void enter_fiber(Task& task) {
    if (!std::exchange(task.begun, true)) {
      getcontext(&task.context);
      task.context.uc_stack.ss_sp = stacks_ + stack_bytes * task.stack;
      task.context.uc_stack.ss_size = stack_bytes;
      task.context.uc_link = &scheduler_;
      const auto self = reinterpret_cast<std::uintptr_t>(this);  // makecontext passes int
      makecontext(&task.context, reinterpret_cast<void (*)()>(&Tasks::in_fiber), 2, static_cast<unsigned>(self),
                  static_cast<unsigned>(self >> 32));
    }
    void* shadow = nullptr;
    StackChange::begin(&shadow, stacks_ + stack_bytes * task.stack, stack_bytes);
    swapcontext(&scheduler_, &task.context);
    StackChange::end(shadow, nullptr, nullptr);
  }
  static void in_fiber(unsigned low, unsigned high) {
    auto& tasks = *reinterpret_cast<Tasks*>(static_cast<std::uintptr_t>(high) << 32 | low);
    Task& task = tasks.tasks_[static_cast<std::size_t>(tasks.current_)];
    StackChange::end(nullptr, &tasks.bottom_, &tasks.size_);
    task.body();
    task.ended = true;
    StackChange::begin(nullptr, tasks.bottom_, tasks.size_);
  }

  const bool in_time_order_;
  std::deque<Task> tasks_;  // they stay where they are
  std::deque<int> ready_;
  std::priority_queue<Ready> ordered_;
  std::uint64_t given_ = 0;
  int current_ = -1;
  std::size_t fibers_ = 0;
  std::byte* stacks_ = nullptr;
  ucontext_t scheduler_;
  const void* bottom_ = nullptr;  // of its stack, for the sanitizer
  std::size_t size_ = 0;
  std::binary_semaphore turn_{0};  // of the thread of `run`
  bool given_up_ = false;          // a thread could not be started
};

}  // namespace chorus::comm::simulated
#endif  // CHORUS_SINGLE_CHORUS_COMM_SIMULATED_TASKS_HPP

namespace chorus::comm::simulated {

/// One kind of link.
struct AlphaBeta {
  double alpha = 0;      ///< seconds from when a message's first byte leaves to when it arrives
  double bandwidth = 1;  ///< bytes a second, each way

  Time latency() const { return time_of("alpha", alpha); }
  /// How long a port is busy with that many bytes.
  Time transfer(std::size_t bytes) const {
    return Time(static_cast<std::int64_t>(static_cast<double>(bytes) * (1e15 / bandwidth)));
  }
};

/// Every rank has a port for each kind of link. A port sends one piece after another, and receives one after another.
struct Links {
  std::string name = {};                ///< what `links_named` was given
  int island = 1;                       ///< ranks of an island: rank r is on island r / island; 0: all are on one
  AlphaBeta inside = {}, between = {};  ///< of an island; of islands
  bool shared = false;                  ///< an island has one port to the others between its ranks, not one for each
  double call = 0;                      ///< seconds that each collective call takes to begin
};

/// Constants of NCCL 2's model (its tuning.cc: ring, Simple protocol), in seconds: what a call costs, and each hop.
namespace nccl {
inline constexpr double call = 8.4e-6, nvlink = 3.4e-6, pcie = 5.7e-6, network = 14.0e-6;
}

namespace detail {

/// `digits` at the front of `text`, which are taken off; 0 where there are none.
inline double take_number(std::string_view& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return 0;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

}  // namespace detail

/// Links by name: `nvlink` and `pcie` for ranks of one machine; `25gbit`, `100mbit` for a network in which each rank
/// has a port of that rate; `nvlink8+25gbit` for islands of 8 ranks, and `nvlink8+25gbit:shared` where those 8 have one
/// port between them. Rates are nominal: NVLink of an A100, 300 GB/s each way; PCIe 3.0 x 16, 15.75 GB/s. What is
/// measured is less; `efficiency` multiplies all. Alphas are NCCL's (see above). Throws UsageError for other names.
[[gnu::cold]] inline Links links_named(std::string_view name, double efficiency = 1) {
  constexpr std::string_view expected =
      ": expected nvlink, pcie, 25gbit, 100mbit, nvlink8+25gbit, pcie4+10gbit:shared, or such with other numbers";
  check<UsageError>(efficiency > 0 && efficiency <= 1, "links: efficiency ", efficiency, " is not in (0, 1]");
  Links links{.name = std::string(name), .call = nccl::call};
  const auto refuse = [&] { fail<UsageError>("links ", printable(name), expected); };
  const auto machine = [&](std::string_view& text, AlphaBeta& link) {
    const bool nvlink = text.starts_with("nvlink");
    if (!nvlink && !text.starts_with("pcie")) return false;
    text.remove_prefix(nvlink ? 6 : 4);
    link = nvlink ? AlphaBeta{nccl::nvlink, 300e9 * efficiency} : AlphaBeta{nccl::pcie, 15.75e9 * efficiency};
    return true;
  };
  std::string_view rest = name;
  if (machine(rest, links.inside)) {
    links.island = 0;
    links.between = links.inside;
    if (rest.empty()) return links;
    const double ranks = detail::take_number(rest);
    if (!(ranks >= 1 && ranks <= 1024) || ranks != static_cast<int>(ranks) || !rest.starts_with('+')) refuse();
    links.island = static_cast<int>(ranks);
    rest.remove_prefix(1);
  }
  const double rate = detail::take_number(rest);
  const bool giga = rest.starts_with("gbit");
  if (!(rate > 0 && rate <= 1e6) || (!giga && !rest.starts_with("mbit"))) refuse();
  rest.remove_prefix(4);
  links.shared = rest == ":shared" && links.island > 1;
  if (!rest.empty() && !links.shared) refuse();
  links.between = {nccl::network, rate * (giga ? 1e9 : 1e6) / 8 * efficiency};
  if (links.island == 1) links.inside = links.between;
  return links;
}

}  // namespace chorus::comm::simulated
#endif  // CHORUS_SINGLE_CHORUS_COMM_SIMULATED_LINKS_HPP

// <chorus/comm/simulated/simulated_engine.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATED_ENGINE_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATED_ENGINE_HPP
/// `SimulatedEngine`: a rank's calls in virtual time. A task of its own carries them out, one after another, while the
/// rank's program goes on: what hides behind computing shows in the clocks.

// <chorus/comm/simulated/simulated_transport.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATED_TRANSPORT_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATED_TRANSPORT_HPP
/// `SimulatedTransport`: links of ranks of one process in virtual time, over which the algorithms of algorithms/ run as
/// they are.
///
/// A piece leaves when its sender has come to that and the sender's port is free; the port is busy with it for
/// bytes * beta. Its first byte arrives alpha later; the receiver has it when its own port has been free for as long:
///
///   leaves   = max(sender's clock, sender's port free)       sender's port free   = leaves + bytes * beta
///   begins   = max(leaves + alpha, receiver's port free)     receiver's port free = begins + bytes * beta
///   receiver's clock = max(receiver's clock, begins + bytes * beta)
///
/// A port of one rank receives in the order in which the rank asks; so no time depends on which rank runs first, and
/// nothing has to be sorted. Ports that ranks share serve them in the order of time: there ranks run in time order.

namespace chorus::comm::simulated {

/// Memory that costs nothing until it is touched.
class ReservedMemory {
 public:
  explicit ReservedMemory(std::size_t bytes) : bytes_(bytes) {
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check<CommError>(memory != MAP_FAILED, "simulation: ", bytes, " bytes cannot be reserved");
    data_ = static_cast<std::byte*>(memory);
  }
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;
  ~ReservedMemory() { munmap(data_, bytes_); }
  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

/// What the transports of a group have in common.
class Network {
 public:
  static constexpr std::size_t piece_bytes = 512 << 10, queue_pieces = 8;  // those of TcpTransport

  struct Piece {
    Envelope envelope;
    std::size_t bytes = 0;
    std::byte* data = nullptr;
    Time head{};     // when its first byte arrives
    Time arrival{};  // through a shared port: when its last one has
  };
  /// Pieces on their way from one rank to another, and who waits for them.
  struct Queue {
    explicit Queue(std::size_t limit) : pieces(limit) {}
    std::vector<Piece> pieces;  // in turn
    std::size_t sent = 0, arrived = 0, received = 0;
    int receiver = -1, sender = -1;  // tasks that wait
    Piece& slot(std::size_t number) { return pieces[number % pieces.size()]; }
  };
  struct Port {
    Time sends{}, receives{};  // from when on it is free
  };
  struct Kind {
    Time alpha;
    AlphaBeta speed;
    std::vector<Port> ports;
  };

  /// `moves_data`: else the ranks' data is never looked at.
  Network(Tasks& to_run, const Links& ls, int ranks, bool data)
      : tasks(to_run),
        links(ls),
        size(ranks),
        island(ls.island == 0 ? ranks : ls.island),
        call(time_of("call", ls.call)),
        moves_data(data),
        inside{ls.inside.latency(), ls.inside, std::vector<Port>(static_cast<std::size_t>(ranks))},
        between{ls.between.latency(), ls.between,
                std::vector<Port>(static_cast<std::size_t>(ls.shared ? (ranks - 1) / ls.island + 1 : ranks))},
        scratch(data ? piece_bytes : std::size_t{1} << 38) {
    if (island > 1 && island < ranks)
      for (int rank = 0; rank < ranks; ++rank) islands.push_back(rank / island);
  }

  bool crosses(int a, int b) const { return a / island != b / island; }
  Port& port(Kind& kind, int rank) {
    return kind.ports[static_cast<std::size_t>(&kind == &between && links.shared ? rank / island : rank)];
  }
  Queue& queue(int from, int to) {
    auto& queue = queues_[static_cast<std::uint64_t>(from) << 32 | static_cast<std::uint32_t>(to)];
    // How far ranks run ahead of each other costs memory, not virtual time.
    if (!queue) queue = std::make_unique<Queue>(moves_data ? queue_pieces : 64);
    return *queue;
  }
  std::byte* take_slot() {
    if (!moves_data) return scratch.data();
    if (slots_.empty()) return (all_slots_.emplace_back(std::make_unique<ReservedMemory>(piece_bytes)))->data();
    std::byte* const slot = slots_.back();
    slots_.pop_back();
    return slot;
  }
  void give_slot(std::byte* slot) {
    if (moves_data) slots_.push_back(slot);
  }

  /// Ends all waiting, for that reason.
  void abort(const std::string& why) {
    if (why_.empty()) why_ = why;
    for (auto& [ends, queue] : queues_)
      for (const int task : {queue->receiver, queue->sender})
        if (task >= 0) tasks.wake(task, tasks.clock_of(task));
  }
  void check() const { chorus::check<LinkError>(why_.empty(), why_); }

  Tasks& tasks;
  const Links links;
  const int size, island;
  const Time call;  ///< what each collective call costs
  const bool moves_data;
  Kind inside, between;
  std::vector<int> islands;  // by rank, where there are several
  ReservedMemory scratch;

 private:
  std::unordered_map<std::uint64_t, std::unique_ptr<Queue>> queues_;
  std::vector<std::unique_ptr<ReservedMemory>> all_slots_;
  std::vector<std::byte*> slots_;
  std::string why_;
};

/// A step of an algorithm; times in ns, as its listener has them.
struct StepSpan {
  std::string name, args;
  std::int64_t begun = 0, ended = 0;
};

/// Keeps the steps of one rank, by virtual time.
class StepKeeper final : public trace::Listener {
 public:
  /// `true_numbers`: else the first number of a step is none.
  StepKeeper(Tasks& tasks, bool true_numbers) : tasks_(tasks), true_numbers_(true_numbers) {}
  std::int64_t now() override { return std::chrono::floor<std::chrono::nanoseconds>(tasks_.clock()).count(); }
  void span(const trace::Event& event) override {
    auto args = event.args;
    if (!true_numbers_) args = args.substr(0, args.find(",\"first\":"));
    steps.push_back({std::string(event.name), std::string(args), event.begin, event.end});
  }
  void instant(const trace::Event&) override {}
  void sent(int, int, trace::Traffic, std::size_t) override {}
  void allocated(int, trace::Memory, std::int64_t) override {}
  bool wants_steps() const override { return true; }

  std::vector<StepSpan> steps;

 private:
  Tasks& tasks_;
  const bool true_numbers_;
};

/// One rank's end. All calls come from one task of `network`'s.
class SimulatedTransport final : public Transport {
 public:
  SimulatedTransport(Network& network, int me)
      : Transport(me, network.size, Network::piece_bytes, Network::queue_pieces, std::chrono::minutes(1)),
        network_(network),
        tasks_(network.tasks),
        steps_(network.tasks, network.moves_data) {
    counts_bytes = network.size <= trace::max_devices;
  }

  std::byte* acquire(int peer) override {
    auto& queue = out(peer);
    while (queue.sent - queue.received == queue.pieces.size()) wait_in(queue.sender, peer);
    network_.check();
    return queue.slot(queue.sent).data = network_.take_slot();
  }
  void fill(int peer, std::byte* slot, const std::byte* data, std::size_t bytes) override {
    if (network_.moves_data) Transport::fill(peer, slot, data, bytes);
  }
  void publish(int peer, const Envelope& envelope, std::size_t bytes) override {
    auto& queue = out(peer);
    auto& kind = network_.crosses(rank, peer) ? network_.between : network_.inside;
    const bool shared = &kind == &network_.between && network_.links.shared;
    if (shared) tasks_.await_turn();
    auto& port = network_.port(kind, rank);
    const Time leaves = std::max(tasks_.clock(), port.sends), length = kind.speed.transfer(bytes);
    port.sends = sent_until_ = leaves + length;
    if (keeps_sent) sent[peer] += bytes;
    auto& piece = queue.slot(queue.sent++);
    piece.envelope = envelope;
    piece.bytes = bytes;
    piece.head = leaves + kind.alpha;
    if (!shared) return arrived(queue, piece.head);
    tasks_.at(piece.head, [this, &queue, &piece, length, peer] {
      Time& free = network_.port(network_.between, peer).receives;
      piece.arrival = free = std::max(free, piece.head) + length;
      arrived(queue, piece.arrival);
    });
  }
  /// It does; but the algorithms that serve shall be those of TcpTransport.
  bool copies() const override { return false; }
  Piece receive(int peer) override { return next(peer, nullptr); }
  Piece receive_at(int peer, const Envelope&, std::byte* place, std::size_t) override {
    return next(peer, network_.moves_data ? nullptr : place);
  }
  void release(int peer) override {
    auto& queue = in(peer);
    network_.give_slot(queue.slot(queue.received++).data);
    // A sender that waits goes on when there is room for half a queue: for less it isn't worth a change of tasks.
    if (queue.sender >= 0 && queue.sent - queue.received <= queue.pieces.size() / 2)
      tasks_.wake(queue.sender, tasks_.clock());
  }
  bool has_piece(int peer) override { return in(peer).arrived > in(peer).received; }
  void flush() override { tasks_.clock() = std::max(tasks_.clock(), sent_until_); }
  void check() override { network_.check(); }
  void abort(const std::string& why) noexcept override { network_.abort(cat("rank ", rank, " gave up: ", why)); }
  std::span<const int> machines() const override { return network_.islands; }

  /// The rank that this one waits for; -1: none.
  int waits_for() const { return waits_for_; }
  /// From now on, each step of an algorithm; and those there were.
  void keep_steps() { step_listener = &steps_; }
  std::vector<StepSpan> take_steps() { return std::move(steps_.steps); }
  /// Where it is wanted: bytes, by the rank they went to.
  bool keeps_sent = false;
  std::map<int, std::size_t> sent;

 private:
  Network::Queue& out(int peer) {
    if (peer != out_peer_) out_ = &network_.queue(rank, out_peer_ = peer);
    return *out_;
  }
  Network::Queue& in(int peer) {
    if (peer != in_peer_) in_ = &network_.queue(in_peer_ = peer, rank);
    return *in_;
  }
  void wait_in(int& place, int peer) {
    network_.check();
    place = tasks_.current();
    waits_for_ = peer;
    tasks_.block();
    place = waits_for_ = -1;
  }
  void arrived(Network::Queue& queue, Time when) {
    ++queue.arrived;
    if (queue.receiver >= 0) tasks_.wake(queue.receiver, when);
  }
  Piece next(int peer, std::byte* place) {
    auto& queue = in(peer);
    while (queue.arrived == queue.received) wait_in(queue.receiver, peer);
    network_.check();
    const auto& piece = queue.slot(queue.received);
    auto& kind = network_.crosses(rank, peer) ? network_.between : network_.inside;
    Time arrival = piece.arrival;
    if (&kind == &network_.inside || !network_.links.shared) {
      Time& free = network_.port(kind, rank).receives;
      arrival = free = std::max(free, piece.head) + kind.speed.transfer(piece.bytes);
    }
    tasks_.clock() = std::max(tasks_.clock(), arrival);
    return {piece.envelope, place != nullptr ? place : piece.data, piece.bytes};
  }

  Network& network_;
  Tasks& tasks_;
  StepKeeper steps_;
  Time sent_until_{};
  int out_peer_ = -1, in_peer_ = -1, waits_for_ = -1;
  Network::Queue *out_ = nullptr, *in_ = nullptr;
};

}  // namespace chorus::comm::simulated
#endif  // CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATED_TRANSPORT_HPP

namespace chorus::comm::simulated {

/// A call that has been carried out, or a part of a program's time.
struct Span {
  NamedCall call = {};
  trace::Traffic traffic = trace::Traffic::control;
  std::size_t bytes = 0;
  Time begun{}, ended{};
  std::map<int, std::size_t> sent = {};  ///< bytes, by the rank they went to
};

class SimulatedEngine final : public Engine, public Progress, public std::enable_shared_from_this<SimulatedEngine> {
 public:
  SimulatedEngine(Network& network, int me, Algorithm all_reduce)
      : Engine(me, network.size), link(network, me), network_(network), tasks_(network.tasks), asked_(all_reduce) {
    check_all_reduce(all_reduce, link, name());
  }

  // The program's side.

  void now(const Call& call) override {
    if (failure_)
      fail<CommError>("rank ", rank, ": ", comm::name(call.op),
                      ": this communicator has failed before: ", failure_.what);
    give(call);
    wait(given_);
  }
  Work later(const Call& call) override {
    give(call);
    return {shared_from_this(), given_};
  }
  void wait(std::uint64_t ticket) override {
    const Time begun = clock();
    while (ended_.size() < ticket && !failure_) tasks_.block();
    if (ended_.size() < ticket) failure_.raise();
    clock() = std::max(begun, ended_[ticket - 1]);
    if (keeps_spans && clock() > begun) {
      waits.push_back(calls[ticket - 1]);
      waits.back().begun = begun;
      waits.back().ended = clock();
    }
  }
  /// A look that finds nothing takes a microsecond of virtual time, so that a program that only looks gets on, too.
  bool done(std::uint64_t ticket) override {
    polls_ = true;
    while (polls_ && ended_.size() < ticket && !failure_) tasks_.block();
    polls_ = false;
    const bool is = failure_ || (ended_.size() >= ticket && ended_[ticket - 1] <= clock());
    if (!is) clock() += std::chrono::microseconds(1);
    return is;
  }
  /// From a task of the simulation.
  void abort(std::string_view why) noexcept override { link.abort(std::string(why)); }
  std::string_view name() const override { return "simulated"; }
  Algorithm all_reduce() const override { return asked_; }
  std::chrono::nanoseconds busy() const override { return std::chrono::duration_cast<std::chrono::nanoseconds>(busy_); }
  Clock::time_point time() const override {
    return Clock::time_point(std::chrono::seconds(1) +  // a program may take 0 for "not yet"
                             std::chrono::duration_cast<std::chrono::nanoseconds>(clock()));
  }

  // The simulation's side.

  /// The tasks of the program and of its calls, which runs `serve`.
  void set_tasks(int program, int calls_task) { program_ = program, server_ = calls_task; }
  Time& clock() const { return tasks_.clock_of(program_); }
  /// Carries out calls until the program has ended.
  void serve() {
    link.keeps_sent = keeps_spans;
    while (true) {
      while (first_ == waiting_.size()) {
        if (has_ended_) return;
        tasks_.block();
      }
      const auto [call, launched] = waiting_[first_++];
      if (first_ == waiting_.size()) waiting_.clear(), first_ = 0;
      Time& own = tasks_.clock();
      own = std::max(own, launched);
      const Time begun = own;
      carry_out(call);
      busy_ += own - begun;
      if (keeps_spans)
        calls.push_back(
            {current_, call.traffic, call.count * call.reduction.element, begun, own, std::exchange(link.sent, {})});
      if (!failure_) ended_.push_back(own);
      tasks_.wake(program_, own);
    }
  }
  void end() {
    has_ended_ = true;
    tasks_.wake(server_, clock());
  }
  /// Where nobody can go on: whether the program asks if a call is done, which then it isn't.
  bool answer_poll() {
    if (!std::exchange(polls_, false)) return false;
    tasks_.wake(program_, clock());
    return true;
  }
  /// What this rank does: for errors.
  [[gnu::cold]] std::string state() const {
    if (link.waits_for() >= 0) return cat(current_.text(), " waits for rank ", link.waits_for());
    return has_ended_ ? "has ended" : "is in no call";
  }

  SimulatedTransport link;
  bool keeps_spans = false;
  std::vector<Span> calls, waits;  ///< where they are kept: what was carried out; when the program waited for it

 private:
  void give(const Call& call) {
    ++given_;
    if (failure_) return;
    waiting_.emplace_back(call, clock());
    tasks_.wake(server_, clock());
  }
  void carry_out(const Call& call) {
    Envelope envelope{.op = call.op, .dtype = call.reduction.dtype, .count = call.count};
    if (call.op == Op::message) {
      envelope.sequence = messages_[call.receives ? ~call.peer : call.peer]++;
    } else {
      envelope.detail =
          static_cast<std::uint8_t>(call.op == Op::broadcast ? call.peer : static_cast<int>(call.reduction.op));
      envelope.sequence = collectives_++;
    }
    current_ = {.envelope = envelope, .bucket = call.bucket, .peer = call.peer, .receives = call.receives};
    if (failure_) return;
    std::string why;
    try {
      link.check();
      if (size == 1) return alone_.now(call);
      if (call.op != Op::message) tasks_.clock() += network_.call;
      // A barrier names nobody who is missing: a deadlock does.
      auto served = call;
      if (served.op == Op::monitored_barrier) served.op = Op::barrier;
      comm::detail::run_call(link, {}, served, envelope, asked_, [this](Algorithm by) { current_.algorithm = by; });
      link.flush();
      return;
    } catch (const std::exception& error) {
      why = error.what();
    }
    failure_ = {cat("rank ", rank, ": ", current_.text(), ": ", why), false};
    link.abort(why);
  }

  Network& network_;
  Tasks& tasks_;
  const Algorithm asked_;
  comm::detail::Alone alone_;
  int program_ = -1, server_ = -1;
  std::vector<std::pair<Call, Time>> waiting_;  // those from first_ on
  std::size_t first_ = 0;
  std::uint64_t given_ = 0;
  std::vector<Time> ended_;  // by ticket
  Failure failure_;
  NamedCall current_;
  std::uint32_t collectives_ = 0;
  std::unordered_map<int, std::uint32_t> messages_;  // by peer: sent; ~peer: received
  Time busy_{};
  bool has_ended_ = false, polls_ = false;
};

}  // namespace chorus::comm::simulated
#endif  // CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATED_ENGINE_HPP

namespace chorus::comm::simulated {

/// How fast ranks compute. It is the only thing about a simulation that is random, by Philox: the same on all machines.
struct Computing {
  std::vector<std::pair<int, double>> stragglers = {};  ///< ranks that take that many times as long
  double jitter = 0;  ///< the standard deviation of how long a rank's step takes, as a part of the mean
  std::uint64_t seed = 0;

  /// How long the rank takes in that step, where others take `usual`. Jitter is the sum of four uniform
  /// numbers, near enough to a normal one, and needs no function whose last bit differs between libraries.
  Time time(Time usual, int rank, std::uint32_t step) const {
    auto scaled = static_cast<double>(usual.count());
    for (const auto& [straggler, factor] : stragglers)
      if (straggler == rank) scaled *= factor;
    if (jitter == 0) return Time(static_cast<std::int64_t>(scaled));
    std::int64_t sum = -2 * (std::int64_t{1} << 32);  // of four words, each 2^31 on average
    for (const auto word : philox(seed, {static_cast<std::uint32_t>(rank), step, 0, 0})) sum += word;
    const double deviations = static_cast<double>(sum) * (0x1p-32 * 1.7320508075688772);
    const auto extra = static_cast<std::int64_t>(scaled * (jitter * deviations));
    return std::max(Time{}, Time(static_cast<std::int64_t>(scaled) + extra));
  }
};

struct SimulationOptions {
  int ranks = 2;
  Links links = links_named("25gbit");
  Computing computing = {};
  Algorithm all_reduce = Algorithm::automatic;  ///< see World
  /// True numbers: each rank is a thread, of which one runs at a time, and has memory of its own; up to `max_ranks`.
  /// Else ranks are fibers, up to `most_scheduled_ranks`: calls take their time, but nobody looks at what they move.
  /// Then programs call `call` and `start`, and use no thread_local state.
  bool true_numbers = true;
  bool keep_spans = false;  ///< see SimulatedTimes
  /// And each step of the algorithms that have steps, as TraceOptions::ring_steps: many.
  bool keep_steps = false;
};
inline constexpr int most_scheduled_ranks = 65'536;

/// A part of a rank's program, for a picture: `forward`, `backward`, ...
struct Mark {
  std::string kind, name;
  Time begun{}, ended{};
  std::size_t bytes = 0;
  int bucket = -1;
};

/// Numbers that a device of a process has handed to another one.
struct Copied {
  int to = 0;
  trace::Traffic kind = trace::Traffic::control;
  std::size_t bytes = 0;
  Time begun{}, ended{};
};
/// Bytes in use from a time on, by kind.
struct Held {
  Time at{};
  std::array<std::size_t, trace::memory_kinds> bytes{};
};

/// What a rank has done with its time. All but `end` where spans are kept.
struct RankTimes {
  Time end{};                      ///< when its program ended
  std::vector<Mark> marks;         ///< see SimulatedRank::mark
  std::vector<Span> calls, waits;  ///< see SimulatedEngine
  std::vector<StepSpan> steps;     ///< see SimulationOptions::keep_steps
  std::vector<Copied> copies;      ///< of a device
  std::vector<Held> memory;        ///< where somebody knows
};
struct SimulatedTimes {
  std::vector<RankTimes> ranks;
  bool one_process = false;  ///< they are the devices of one
  double seconds() const {
    Time last{};
    for (const auto& rank : ranks) last = std::max(last, rank.end);
    return simulated::seconds(last);
  }
};

/// What a program of one rank is given.
class SimulatedRank {
 public:
  SimulatedRank(std::shared_ptr<SimulatedEngine> engine, Network& network, const Computing& computing, RankTimes& times)
      : engine_(engine), network_(network), computing_(computing), times_(times), communicator_(std::move(engine)) {}

  int rank() const { return engine_->rank; }
  int size() const { return engine_->size; }
  /// For policies and everything else that takes one.
  AnyCommunicator& communicator() { return communicator_; }
  /// Virtual seconds since the beginning.
  double time() const { return seconds(engine_->clock()); }
  /// This rank computes for as long as one that is neither fast nor slow takes `usual` seconds for.
  void compute(double usual, const char* what = "compute") {
    engine_->clock() = later(engine_->clock(), computing_.time(time_of(what, usual), rank(), step_));
  }
  /// The rank's next step begins, with a jitter of its own.
  void next_step() { ++step_; }
  /// Where spans are kept: `kind` and `name` of what this rank has done since `begun`, which was `clock()`.
  void mark(std::string_view kind, std::string_view name, Time begun, std::size_t bytes = 0, int bucket = -1) {
    if (engine_->keeps_spans)
      times_.marks.push_back({std::string(kind), std::string(name), begun, engine_->clock(), bytes, bucket});
  }
  /// Where spans are kept: from now on this rank holds so many bytes more of that kind; negative: less.
  void hold(trace::Memory kind, std::int64_t bytes) {
    if (!engine_->keeps_spans) return;
    Held now = times_.memory.empty() ? Held{} : times_.memory.back();
    now.bytes[static_cast<std::size_t>(kind)] += static_cast<std::size_t>(bytes);
    if (!times_.memory.empty() && now.at == engine_->clock()) times_.memory.pop_back();
    now.at = engine_->clock();
    times_.memory.push_back(now);
  }
  Time clock() const { return engine_->clock(); }

  /// Without true numbers: a call of `bytes` of f32, as Engine::later has it, on memory that nobody looks at.
  Work start(Op op, std::size_t bytes, trace::Traffic traffic = trace::Traffic::gradients, int peer = 0,
             bool receives = false, int bucket = -1) {
    const bool gathers = op == Op::all_gather || op == Op::reduce_scatter;
    check<UsageError>(!network_.moves_data, "simulation: a call without data, in one of true numbers");
    check<UsageError>(bytes <= network_.scratch.size() / (gathers ? static_cast<std::size_t>(size()) : 1),
                      "simulation: ", name(op), " of ", bytes, " bytes is too large");
    const bool words = bytes % 4 == 0;
    Reduction nothing{.dtype = words ? DType::f32 : DType::u8, .element = words ? std::size_t{4} : 1};
    nothing.combine = [](void*, const void*, const void*, std::size_t) {};
    nothing.combine_products = [](void*, const void*, double, const void*, double, std::size_t) {};
    nothing.scaled = [](void*, const void*, std::size_t, double) {};
    std::byte* const whole = network_.scratch.data();  // of which a gathering call has a part from each rank
    std::byte* const own = gathers ? whole + static_cast<std::size_t>(rank()) * bytes : whole;
    const bool scatters = op == Op::reduce_scatter;
    Call call{op, nothing, traffic, bytes / nothing.element, scatters ? whole : own, scatters ? own : whole, peer};
    call.receives = receives;
    call.bucket = bucket;
    return engine_->later(call);
  }
  void call(Op op, std::size_t bytes, trace::Traffic traffic = trace::Traffic::gradients, int peer = 0,
            bool receives = false) {
    start(op, bytes, traffic, peer, receives).wait();
  }

 private:
  const std::shared_ptr<SimulatedEngine> engine_;
  Network& network_;
  const Computing& computing_;
  RankTimes& times_;
  std::uint32_t step_ = 0;
  AnyCommunicator communicator_;
};

namespace detail {

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options)
      : options_(options),
        tasks_(options.links.shared),
        network_(tasks_, options.links, options.ranks, options.true_numbers),
        times_{std::vector<RankTimes>(static_cast<std::size_t>(options.ranks))} {}

  template <class Body>
  SimulatedTimes run(const Body& body) {
    for (int rank = 0; rank < options_.ranks; ++rank) {
      auto engine = std::make_shared<SimulatedEngine>(network_, rank, options_.all_reduce);
      engine->keeps_spans = options_.keep_spans;
      if (options_.keep_steps) engine->link.keep_steps();
      const int program = tasks_.add(options_.true_numbers ? RunsOn::thread : RunsOn::fiber,
                                     [this, rank, &body] { run_program(rank, body); });
      const int calls = tasks_.add(RunsOn::fiber, [engine = engine.get()] { engine->serve(); });
      engine->set_tasks(program, calls);
      engines_.push_back(std::move(engine));
    }
    tasks_.run([this] { stuck(); });
    if (error_) std::rethrow_exception(error_);
    for (std::size_t rank = 0; rank < engines_.size(); ++rank) {
      times_.ranks[rank].calls = std::move(engines_[rank]->calls);
      times_.ranks[rank].waits = std::move(engines_[rank]->waits);
      times_.ranks[rank].steps = engines_[rank]->link.take_steps();
    }
    return std::move(times_);
  }

 private:
  template <class Body>
  void run_program(int rank, const Body& body) {
    auto& engine = engines_[static_cast<std::size_t>(rank)];
    auto& times = times_.ranks[static_cast<std::size_t>(rank)];
    try {
      SimulatedRank self(engine, network_, options_.computing, times);
      body(self);
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
    times.end = engine->clock();
    engine->end();
  }
  // Nobody can go on. Every call fails with what each rank does.
  [[gnu::cold]] void stuck() {
    bool polled = false;
    for (const auto& engine : engines_) polled = engine->answer_poll() || polled;
    if (polled) return;
    constexpr std::size_t most = 16;
    std::string all = "deadlock: ";
    for (std::size_t rank = 0; rank < std::min(engines_.size(), most); ++rank)
      all += cat(rank == 0 ? "" : "; ", "rank ", rank, " ", engines_[rank]->state());
    if (engines_.size() > most) all += cat("; and ", engines_.size() - most, " more");
    network_.abort(all);
  }

  const SimulationOptions options_;
  Tasks tasks_;
  Network network_;
  SimulatedTimes times_;
  std::vector<std::shared_ptr<SimulatedEngine>> engines_;
  std::exception_ptr error_;  // the first
};

}  // namespace detail

/// Runs `body(rank)`, with a SimulatedRank, as each rank, and returns when all have ended. The times are the same in
/// every run and on every machine. Throws what a rank's program throws first; where no rank can go on, their calls
/// throw CommError, which tells what each of them waits for. Throws UsageError for options out of range.
template <class Body>
SimulatedTimes simulate(const SimulationOptions& options, const Body& body) {
  const int most = options.true_numbers ? max_ranks : most_scheduled_ranks;
  check<UsageError>(options.ranks >= 1 && options.ranks <= most, "simulate: ", options.ranks, " ranks, expected 1 to ",
                    most, options.true_numbers ? " with true numbers" : "");
  check<UsageError>(options.links.island >= 0, "simulate: islands of ", options.links.island, " ranks");
  for (const auto* link : {&options.links.inside, &options.links.between})
    check<UsageError>(link->bandwidth > 0 && std::isfinite(link->bandwidth), "simulate: a bandwidth of ",
                      link->bandwidth, " bytes a second");
  check<UsageError>(options.computing.jitter >= 0 && options.computing.jitter <= 1, "simulate: jitter ",
                    options.computing.jitter, " is not in [0, 1]");
  for (const auto& [rank, factor] : options.computing.stragglers) {
    check<UsageError>(rank >= 0 && rank < options.ranks, "simulate: straggler: rank ", rank, " is not in [0, ",
                      options.ranks, ")");
    check<UsageError>(factor > 0 && factor <= 1e6, "simulate: straggler: factor ", factor, " is not in (0, 1e6]");
  }
  check<UsageError>(options.all_reduce != Algorithm::direct || options.ranks <= 1024,
                    "simulate: a direct all-reduce of ", options.ranks, " ranks, expected up to 1024");
  return detail::Simulation(options).run(body);
}

}  // namespace chorus::comm::simulated
#endif  // CHORUS_SINGLE_CHORUS_COMM_SIMULATED_SIMULATE_HPP

// <chorus/comm/simulated/trace_file.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SIMULATED_TRACE_FILE_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SIMULATED_TRACE_FILE_HPP
/// `trace_text`: what simulated ranks have done, as a trace file that Perfetto reads, in the form of chorus' own.

namespace chorus::comm::simulated {

namespace detail {

/// The lines of one rank, as its recorder would have written them.
class RankLines {
 public:
  using Lane = trace::Lane;
  using Sums = std::array<std::size_t, trace::traffic_kinds>;

  RankLines(int rank, const RankTimes& times) : rank_(rank) {
    for (const auto& mark : times.marks) put(mark);
    for (const auto& span : times.calls) {
      put_call(Lane::communication, "comm", span);
      for (const auto& [to, bytes] : span.sent) count(to, span.traffic, bytes, span.ended);
    }
    for (const auto& span : times.waits) put_call(Lane::wait, "wait", span);
    for (const auto& step : times.steps)
      add({'X', rank_ + 1, number(Lane::communication), step.begun, step.ended, "ring", step.name, step.args});
    for (const auto& copied : times.copies) put(copied);
    for (const auto& held : times.memory)
      add({'C', rank_ + 1, 0, ns(held.at), ns(held.at), {}, "memory, bytes", fields(held.bytes, false)});
  }

  std::vector<chorus::detail::TraceLine> take() { return std::move(lines_); }

  /// The most that it held, by kind, as a JSON object; without any where nobody knows.
  static std::string peak(const RankTimes& times) {
    const auto total = [](const Held& held) {
      return std::accumulate(held.bytes.begin(), held.bytes.end(), std::size_t{0});
    };
    const auto most = std::max_element(times.memory.begin(), times.memory.end(),
                                       [&](const Held& a, const Held& b) { return total(a) < total(b); });
    return cat('{', most == times.memory.end() ? std::string() : fields(most->bytes, false), '}');
  }

 private:
  static std::int64_t ns(Time time) { return std::chrono::floor<std::chrono::nanoseconds>(time).count(); }
  static int number(Lane lane) { return static_cast<int>(lane) + 1; }
  /// Marks are called as their lanes are, but for copies, which communicate.
  static int number(std::string_view kind) {
    if (kind == "copy") return number(Lane::communication);
    std::size_t lane = 0;
    while (lane < trace::lanes && trace::name(static_cast<Lane>(lane)) != kind) ++lane;
    return static_cast<int>(lane) + 1;
  }
  static constexpr trace::Traffic kind_of(const Sums&) { return {}; }
  static constexpr trace::Memory kind_of(const std::array<std::size_t, trace::memory_kinds>&) { return {}; }
  template <class Numbers>
  static std::string fields(const Numbers& numbers, bool without_zeros) {
    using Kind = decltype(kind_of(numbers));
    chorus::detail::JsonObject out;
    for (std::size_t kind = 0; kind < numbers.size(); ++kind)
      if (!without_zeros || numbers[kind] != 0) out.field(trace::name(static_cast<Kind>(kind)), numbers[kind]);
    return out.fields();
  }

  void add(chorus::detail::TraceLine line) { lines_.push_back(std::move(line)); }
  void put(const Mark& mark) {
    if (mark.kind == "bucket")
      return add({'i', rank_ + 1, number(Lane::backward), ns(mark.begun), ns(mark.begun), mark.kind, mark.name,
                  cat(R"("bucket":)", mark.bucket, R"(,"bytes":)", mark.bytes)});
    add({'X', rank_ + 1, number(mark.kind), ns(mark.begun), ns(mark.ended), mark.kind, mark.name,
         mark.kind == "step" ? cat(R"("step":)", mark.bucket) : ""});
  }
  void put_call(Lane lane, const char* category, const Span& span) {
    TracedCall call(span.call, span.traffic, span.bytes);
    add({'X', rank_ + 1, number(lane), ns(span.begun), ns(span.ended), category, std::move(call.name),
         std::move(call.args)});
  }
  void put(const Copied& copied) {
    add({'i', rank_ + 1, number(Lane::communication), ns(copied.begun), ns(copied.begun), "sent",
         cat(trace::name(copied.kind), " to ", copied.to),
         chorus::detail::JsonObject()
             .field("to", copied.to)
             .field("kind", trace::name(copied.kind))
             .field("bytes", copied.bytes)
             .fields()});
    count(copied.to, copied.kind, copied.bytes, copied.ended);
  }
  void count(int to, trace::Traffic kind, std::size_t bytes, Time at) {
    auto& sums = sums_[to];
    sums[static_cast<std::size_t>(kind)] += bytes;
    add({'C', rank_ + 1, 0, ns(at), ns(at), {}, cat("sent to ", to, ", bytes"), fields(sums, true)});
  }

  const int rank_;
  std::vector<chorus::detail::TraceLine> lines_;
  std::map<int, Sums> sums_;  // by the rank they went to
};

}  // namespace detail

/// The first `drawn` ranks of `times`, whose spans were kept. `notes`: members of a JSON object, what else there is to
/// tell.
[[gnu::cold]] inline std::string trace_text(const SimulatedTimes& times, int drawn, std::string_view policy,
                                            std::string_view notes) {
  using detail::RankLines;
  const int ranks = std::min(drawn, static_cast<int>(times.ranks.size()));
  chorus::detail::JsonObject peaks;
  for (int rank = 0; rank < ranks; ++rank)
    peaks.json(cat(rank), RankLines::peak(times.ranks[static_cast<std::size_t>(rank)]));
  std::vector<chorus::detail::TracePart> parts(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& of = times.ranks[static_cast<std::size_t>(rank)];
    auto& part = parts[static_cast<std::size_t>(rank)];
    part.head.policy = policy;
    part.head.distributed = !times.one_process;
    part.head.rank = rank;
    part.head.ranks = ranks;
    part.head.device_kind = "simulated";
    part.names = chorus::detail::trace_names(rank, cat(times.one_process ? "device " : "rank ", rank));
    part.peaks = peaks.str();
    part.notes = cat('{', notes, '}');
    part.lines = RankLines(rank, of).take();
  }
  return chorus::detail::whole_trace(parts, ranks, 0);
}

}  // namespace chorus::comm::simulated
#endif  // CHORUS_SINGLE_CHORUS_COMM_SIMULATED_TRACE_FILE_HPP

// <chorus/comm/store.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_STORE_HPP
#define CHORUS_SINGLE_CHORUS_COMM_STORE_HPP
/// `Store`: keys and values that the ranks of a job share, with the names and the meaning of PyTorch's TCPStore.

namespace chorus::comm {

class AnyCommunicator;
class Store;
class StoreServer;
namespace detail {
enum class StoreCode : std::uint8_t;
struct StoreMessage;
class StoreLink;
}  // namespace detail

/// One rank's access to the store. Copies share it; any thread may use it, and one that waits does not hold up another.
///
/// Rank 0 holds the data, in memory: a rank that still uses the store when rank 0 has ended gets a CommError, so let a
/// barrier be the last that ranks do together. Keys have 1 to 8192 bytes, values up to 8 MiB, of any kind; a call up
/// to 64 MiB and 262144 keys and values; a store up to 131072 keys and 1 GiB. What all calls together have on the way
/// takes at most 256 MiB of rank 0's memory: a large one waits for room. Each call throws UsageError for what is
/// against these limits, TimeoutError for keys that are not there in time or a server that does not answer, and
/// CommError for a server that has gone, or that has had no room in time.
class Store {
 public:
  /// A store of this process alone, without any socket.
  Store();
  /// That of the server at this address. Waits for it to come up, at most `timeout`. Throws TimeoutError, and CommError
  /// where something else answers there or the token is another one.
  static Store connect(const std::string& host, int port, const std::string& token = {},
                       std::chrono::milliseconds timeout = default_timeout, std::uint64_t key = 0);
  /// That of a group of ranks; all of them have to call it, as a collective. Rank 0 holds it, at a free port of
  /// world.master_addr, under the job's token; a group of one needs no socket. Throws CommError, on every rank, where
  /// rank 0 cannot listen there.
  static Store of(const World& world, AnyCommunicator& communicator);
  /// That of a server in this process.
  explicit Store(std::shared_ptr<StoreServer> server);

  void set(std::string_view key, std::string_view value);
  /// The value; waits for the key to be set.
  std::string get(std::string_view key);
  /// Adds to the whole number that the key holds, 0 where there is none, and returns the sum; `get` has it as text.
  std::int64_t add(std::string_view key, std::int64_t amount);
  /// Sets the key to `desired` where it holds `expected`, or where there is no such key and `expected` is empty. What
  /// it holds then; `expected` where there still is no such key.
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired);
  /// Whether it was there.
  bool delete_key(std::string_view key);
  /// Whether all are there now.
  bool check(const std::vector<std::string>& keys);
  /// Until all are there.
  void wait(const std::vector<std::string>& keys);
  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout);
  /// Keys in the whole store, those of other prefixes among them.
  std::int64_t num_keys();
  /// Puts it after what the key holds, nothing where there is none.
  void append(std::string_view key, std::string_view value);
  /// Waits for all, and takes them at one moment.
  std::vector<std::string> multi_get(const std::vector<std::string>& keys);
  /// Sets them at one moment.
  void multi_set(const std::vector<std::string>& keys, const std::vector<std::string>& values);

  /// How long a call waits: 300 s unless set. Of this copy alone.
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  /// The same store, with `prefix/` before each key (PyTorch's PrefixStore): users who know nothing of each other don't
  /// meet.
  Store prefix_store(std::string_view prefix) const;

  static constexpr std::chrono::milliseconds default_timeout{300'000};

 private:
  explicit Store(std::shared_ptr<detail::StoreLink> link);
  detail::StoreMessage ask(detail::StoreCode code, std::vector<std::string> texts, std::int64_t number = 0) const;

  std::shared_ptr<detail::StoreLink> link_;
  std::string prefix_;
  std::chrono::milliseconds timeout_ = default_timeout;
};

}  // namespace chorus::comm

// <chorus/comm/store/store_impl.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_IMPL_HPP
#define CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_IMPL_HPP
/// How `Store` asks its server.

// <chorus/comm/store/store_server.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_SERVER_HPP
#define CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_SERVER_HPP
/// `StoreServer`: holds the keys and values of a store, and answers those who use it.

// <chorus/comm/store/store_table.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_TABLE_HPP
#define CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_TABLE_HPP
/// `StoreTable`: what a store holds, and what each request does to it.

// <chorus/comm/store/store_messages.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_MESSAGES_HPP
#define CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_MESSAGES_HPP
/// What a store and those who use it say to each other.
///
/// A visitor is sent a Challenge and answers with a StoreHello, which proves that it knows the job's token;
/// StoreWelcome proves the same of the server. Then each request gets one reply, both of them a StoreMessage: a
/// StoreHead, and after it each text as its length (32 bits) and its bytes.

namespace chorus::comm::detail {

inline constexpr std::uint64_t store_magic = 0x0002'6572'6f74'7363;  // "cstore", then the protocol's version

struct StoreHello {
  std::uint64_t magic = store_magic;
  std::uint64_t key = 0;  ///< a number that only the store's users were told; keeps strangers away without a token, too
  Nonce nonce{};          ///< the visitor's challenge to the server
  Mac proof{};
};
static_assert(is_message<StoreHello, 64>);

struct StoreWelcome {
  std::uint64_t magic = store_magic;
  std::uint64_t welcome = 0;
  Mac proof{};
};
static_assert(is_message<StoreWelcome, 48>);

/// Limits, checked before anything is kept: those of one key, one value, one message, and of all of a store.
inline constexpr std::size_t most_key_bytes = 8 << 10, most_value_bytes = 8 << 20, most_message_bytes = 64 << 20,
                             most_store_keys = 128 << 10, most_store_bytes = 1 << 30,
                             most_message_texts = 2 * most_store_keys;

enum class StoreCode : std::uint8_t {
  // requests
  set,
  get,
  add,
  compare_set,
  delete_key,
  check,
  wait,
  num_keys,
  append,
  multi_set,
  // replies
  done,
  timed_out,
  refused
};

/// `set`, as in TCPStore.
constexpr std::string_view name(StoreCode code) {
  constexpr std::string_view names[] = {"set",   "get",  "add",      "compare_set", "delete_key",
                                        "check", "wait", "num_keys", "append",      "multi_set"};
  const auto i = static_cast<std::size_t>(code);
  return i < std::size(names) ? names[i] : "unknown";
}

/// Whether text `i` of a request is a key; the others are values.
constexpr bool is_key(StoreCode code, std::size_t i) {
  const bool keys_alone = code == StoreCode::get || code == StoreCode::wait || code == StoreCode::check;
  const bool pairs = code == StoreCode::set || code == StoreCode::multi_set;
  return i == 0 || keys_alone || (pairs && i % 2 == 0);
}

/// A request: keys, values, and a number to be added or the milliseconds that a wait may last. Or a reply: values, a
/// number, or what is wrong; of keys that are missing, their number and the first few.
struct StoreMessage {
  StoreCode code = StoreCode::done;
  std::int64_t number = 0;
  std::vector<std::string> texts;
};

struct StoreHead {
  StoreCode code = StoreCode::done;
  std::array<std::uint8_t, 3> reserved{};
  std::uint32_t count = 0;  ///< texts
  std::uint64_t bytes = 0;  ///< of all that follows
  std::int64_t number = 0;
};
static_assert(is_message<StoreHead, 24>);

inline std::size_t body_bytes(const StoreMessage& message) {
  std::size_t bytes = 0;
  for (const auto& text : message.texts) bytes += sizeof(std::uint32_t) + text.size();
  return bytes;
}

/// False where the connection ends or the deadline comes first. What is large is not copied.
[[gnu::cold]] inline bool send(const Socket& socket, const StoreMessage& message, Deadline deadline) {
  constexpr std::size_t large = 64 << 10;
  StoreHead head;
  head.code = message.code;
  head.count = static_cast<std::uint32_t>(message.texts.size());
  head.bytes = body_bytes(message);
  head.number = message.number;
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  const auto flush = [&] {
    const bool sent = socket.send_all(std::as_bytes(std::span(bytes)), deadline);
    bytes.clear();
    return sent;
  };
  for (const auto& text : message.texts) {
    const auto length = static_cast<std::uint32_t>(text.size());
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    if (text.size() < large) bytes.append(text);
    if ((bytes.size() >= large || text.size() >= large) && !flush()) return false;
    if (text.size() >= large && !socket.send_all(std::as_bytes(std::span(text)), deadline)) return false;
  }
  return flush();
}

/// The texts in a message's body; nothing where it is garbled.
[[gnu::cold]] inline std::optional<std::vector<std::string>> texts_in(std::string_view body, std::uint32_t count) {
  if (count > std::min(body.size() / sizeof(std::uint32_t), most_message_texts)) return std::nullopt;
  std::vector<std::string> texts;
  texts.reserve(count);
  while (!body.empty()) {
    std::uint32_t length = 0;
    if (body.size() < sizeof length) return std::nullopt;
    std::memcpy(&length, body.data(), sizeof length);
    body.remove_prefix(sizeof length);
    if (length > body.size() || texts.size() == count) return std::nullopt;
    texts.emplace_back(body.substr(0, length));
    body.remove_prefix(length);
  }
  if (texts.size() != count) return std::nullopt;
  return texts;
}

/// The memory that a message takes while it comes in: its bytes, and the texts that are made of them.
inline std::size_t memory_for(const StoreHead& head) { return 2 * head.bytes + head.count * sizeof(std::string); }
/// And that it takes then.
inline std::size_t memory_of(const StoreMessage& message) {
  return body_bytes(message) + message.texts.size() * sizeof(std::string);
}

/// The next message; nothing where the connection ends, the deadline comes first, what comes is none, or there is no
/// place for so many bytes: `admit(bytes)`. Memory is taken as bytes come in, not on anybody's word.
template <class Admit>
[[gnu::cold]] std::optional<StoreMessage> receive(const Socket& socket, Deadline deadline, const Admit& admit) {
  constexpr std::size_t step = 1 << 20;
  StoreHead head;
  if (!socket.receive_all(bytes_of(head), deadline)) return std::nullopt;
  if (head.bytes > most_message_bytes || head.code > StoreCode::refused) return std::nullopt;
  if (head.count > most_message_texts || !admit(memory_for(head))) return std::nullopt;
  std::string body;
  while (body.size() < head.bytes) {
    const auto before = body.size();
    body.resize(std::min<std::size_t>(before + step, head.bytes));
    if (!socket.receive_all(std::as_writable_bytes(std::span(body)).subspan(before), deadline)) return std::nullopt;
  }
  auto texts = texts_in(body, head.count);
  if (!texts) return std::nullopt;
  return StoreMessage{head.code, head.number, std::move(*texts)};
}
inline std::optional<StoreMessage> receive(const Socket& socket, Deadline deadline) {
  return receive(socket, deadline, [](std::size_t) { return true; });
}

}  // namespace chorus::comm::detail
#endif  // CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_MESSAGES_HPP

namespace chorus::comm::detail {

/// Keys and values; any thread may ask.
class StoreTable {
 public:
  using Gone = std::function<bool()>;

  /// The memory that one user's messages take on their way. All users together have most_room, beyond the small
  /// messages, which don't wait for large ones: with as many users as there may be these are 64 MiB more.
  class Room {
   public:
    explicit Room(StoreTable& table) : table_(table) {}
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    ~Room() { keep(0); }

    /// Waits until there is room for a message of so many bytes. False where the deadline or `close` comes first, or
    /// who asks is `gone`.
    [[gnu::cold]] bool take(std::size_t bytes, Deadline deadline, const Gone& gone) {
      std::unique_lock lock(table_.mutex_);
      const auto fits = [&] { return table_.closed_ || table_.has_room(bytes); };
      table_.wait(lock, deadline, gone, fits);
      return !table_.closed_ && take_now(bytes);
    }
    /// Gives back what is more than that.
    void keep(std::size_t bytes) {
      if (bytes_ <= bytes) return;
      const std::lock_guard lock(table_.mutex_);
      table_.taken_ -= bytes_ - bytes;
      bytes_ = bytes;
      table_.changed_.notify_all();
    }

   private:
    friend StoreTable;
    bool take_now(std::size_t bytes) {
      if (!table_.has_room(bytes)) return false;
      if (bytes <= small_bytes) return true;
      table_.taken_ += bytes;
      bytes_ += bytes;
      return true;
    }

    StoreTable& table_;
    std::size_t bytes_ = 0;
  };

  /// Carries out one request. `get` and `wait` last until all their keys are there, until the request's time is over,
  /// until `close`, or until who asks is `gone`, which is looked at now and then. A large reply takes its `room`;
  /// throws CommError where there was none in time, `patience` for what does not wait for keys.
  [[gnu::cold]] StoreMessage answer(StoreMessage request, Room& room, Deadline patience, const Gone& gone) {
    std::unique_lock lock(mutex_);
    try {
      return carry_out(request, room, patience, lock, gone);
    } catch (const UsageError& error) {
      return {StoreCode::refused, 0, {error.what()}};
    }
  }

  /// Ends all waits.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  static constexpr std::size_t small_bytes = 64 << 10, most_room = 192 << 20;

 private:
  using Texts = std::vector<std::string>;
  using Lock = std::unique_lock<std::mutex>;

  StoreMessage carry_out(StoreMessage& request, Room& room, Deadline patience, Lock& lock, const Gone& gone) {
    auto& texts = request.texts;
    check_texts(request.code, texts);
    StoreMessage reply;
    switch (request.code) {
      case StoreCode::set:
      case StoreCode::multi_set:
        put(texts);
        break;
      case StoreCode::append: {
        const auto at = values_.find(texts[0]);
        if (at != values_.end()) {
          check_value(texts[0], at->second.size() + texts[1].size());
          texts[1].insert(0, at->second);
        }
        put(texts);
        break;
      }
      case StoreCode::add:
        reply.number = sum(texts[0], request.number);
        texts.push_back(cat(reply.number));
        put(texts);
        break;
      case StoreCode::compare_set: {
        // As TCPStore: a key that is not there is set where nothing is expected, and else what is expected comes back.
        const std::string nothing;
        const auto other = [&]() -> const std::string* {  // than what is expected
          const auto at = values_.find(texts[0]);
          const bool there = at != values_.end();
          if ((there ? at->second : nothing) == texts[1]) return nullptr;
          return there ? &at->second : &texts[1];
        };
        wait(lock, patience, gone, [&] { return closed_ || !other() || has_room(other()->size()); });
        if (const auto* found = other()) {
          take(room, found->size());
          reply.texts = {*found};
        } else {
          reply.texts = {texts[2]};
          std::swap(texts[1], texts[2]);
          put(std::span(texts).first(2));
        }
        break;
      }
      case StoreCode::delete_key:
        reply.number = erase(texts[0]);
        break;
      case StoreCode::check:
        reply.number = missing(texts) == 0;
        break;
      case StoreCode::num_keys:
        reply.number = static_cast<std::int64_t>(values_.size());
        break;
      case StoreCode::wait:
      case StoreCode::get: {
        const auto time = std::chrono::milliseconds(std::clamp<std::int64_t>(request.number, 0, 1LL << 40));
        std::size_t bytes = 0;  // of the reply
        const auto ready = [&] {
          if (missing(texts) != 0) return false;
          bytes = request.code == StoreCode::get ? reply_bytes(texts) : 0;
          return bytes > most_message_bytes || has_room(bytes + texts.size() * sizeof(std::string));
        };
        wait(lock, Clock::now() + time, gone, [&] { return closed_ || ready(); });
        if (const auto count = missing(texts); count != 0) {
          reply = {StoreCode::timed_out, count, {}};
          for (const auto& key : texts)
            if (reply.texts.size() < 10 && !values_.contains(key)) reply.texts.push_back(printable(key));
          break;
        }
        if (request.code == StoreCode::wait) break;
        bytes = reply_bytes(texts);
        check<UsageError>(bytes <= most_message_bytes, "these values have more than ", most_message_bytes,
                          " bytes together");
        take(room, bytes + texts.size() * sizeof(std::string));
        for (const auto& key : texts) reply.texts.push_back(values_.find(key)->second);
        break;
      }
      default:
        fail<UsageError>("an unknown request");
    }
    return reply;
  }

  /// Waits until `ready`, which is so at `close`, too.
  template <class Ready>
  void wait(Lock& lock, Deadline deadline, const Gone& gone, const Ready& ready) {
    while (!ready() && Clock::now() < deadline && !gone())
      changed_.wait_until(lock, std::min(deadline, Clock::now() + std::chrono::milliseconds(100)), ready);
  }

  bool has_room(std::size_t bytes) const { return bytes <= small_bytes || taken_ + bytes <= most_room; }
  static void take(Room& room, std::size_t bytes) {
    check<CommError>(room.take_now(bytes), "store: no room for a reply of ", bytes, " bytes");
  }
  std::size_t reply_bytes(const Texts& keys) const {
    std::size_t bytes = 0;
    for (const auto& key : keys) bytes += sizeof(std::uint32_t) + values_.find(key)->second.size();
    return bytes;
  }

  /// Whether these are the keys and values of such a request, and none of them is too long.
  static void check_texts(StoreCode code, const Texts& texts) {
    const bool pairs = code == StoreCode::set || code == StoreCode::multi_set;
    const std::size_t count = code == StoreCode::append || code == StoreCode::set       ? 2
                              : code == StoreCode::add || code == StoreCode::delete_key ? 1
                              : code == StoreCode::compare_set                          ? 3
                              : code == StoreCode::num_keys                             ? 0
                                                                                        : texts.size();
    check<UsageError>(texts.size() == count && (!pairs || count % 2 == 0), "a request with ", texts.size(), " texts");
    const std::string* key = nullptr;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      if (is_key(code, i)) {
        key = &texts[i];
        check<UsageError>(!key->empty() && key->size() <= most_key_bytes, "a key of ", key->size(),
                          " bytes, expected 1 to ", most_key_bytes);
      } else {
        check_value(*key, texts[i].size());
      }
    }
  }
  static void check_value(const std::string& key, std::size_t bytes) {
    check<UsageError>(bytes <= most_value_bytes, "the value of '", printable(key), "' has ", bytes, " bytes, at most ",
                      most_value_bytes, " are possible");
  }

  std::int64_t sum(const std::string& key, std::int64_t amount) const {
    const auto at = values_.find(key);
    const std::string_view text = at == values_.end() ? std::string_view() : at->second;
    std::int64_t value = 0, result = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = text.empty() || (error == std::errc{} && end == text.data() + text.size());
    check<UsageError>(whole, "'", printable(key), "' holds no whole number");
    check<UsageError>(!__builtin_add_overflow(value, amount, &result), "'", printable(key), "' holds ", value, ", and ",
                      amount, " more is no number of 64 bits");
    return result;
  }

  /// Keys, and after each its value: all of them or, with an error, none.
  void put(std::span<std::string> pairs) {
    std::unordered_map<std::string_view, std::size_t> sizes;  // of the values; of a key's several the last one counts
    for (std::size_t i = 0; i < pairs.size(); i += 2) sizes[pairs[i]] = pairs[i + 1].size();
    auto keys = values_.size(), bytes = bytes_;
    for (const auto& [key, size] : sizes) {
      const auto at = values_.find(key);
      keys += at == values_.end();
      bytes += at == values_.end() ? key.size() + size : size - at->second.size();
    }
    check<UsageError>(bytes <= most_store_bytes && keys <= most_store_keys, "the store is full: it holds ",
                      values_.size(), " keys and ", bytes_, " bytes, at most ", most_store_keys, " and ",
                      most_store_bytes, " are possible");
    for (std::size_t i = 0; i < pairs.size(); i += 2) values_[pairs[i]] = std::move(pairs[i + 1]);
    bytes_ = bytes;
    changed_.notify_all();
  }

  bool erase(const std::string& key) {
    const auto at = values_.find(key);
    if (at == values_.end()) return false;
    bytes_ -= key.size() + at->second.size();
    values_.erase(at);
    return true;
  }

  std::int64_t missing(const Texts& keys) const {
    return std::count_if(keys.begin(), keys.end(), [&](const auto& key) { return !values_.contains(key); });
  }

  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, std::string, Hash, std::equal_to<>> values_;
  std::size_t bytes_ = 0;  ///< of keys and values
  std::size_t taken_ = 0;  ///< of most_room
  bool closed_ = false;
};

}  // namespace chorus::comm::detail
#endif  // CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_TABLE_HPP

namespace chorus::comm {

/// Each user's connection has a thread, and what it asks is carried out at once or waits there: a few hundred
/// connections, as a job has them. Who visits the socket and does not prove that it knows the token is told no.
class StoreServer {
 public:
  /// For users in this process alone: no socket.
  StoreServer() = default;
  /// For visitors too, who know `token` (empty: whoever knows `key`). Throws UsageError for a token that is too short,
  /// and where there is none though `listener` is not on loopback.
  StoreServer(Socket listener, std::string token, std::uint64_t key)
      : listener_(std::move(listener)), token_(std::move(token)), key_(key) {
    encrypted_ = detail::check_token(token_, listener_.local());
    acceptor_ = chorus::detail::start_thread("store", [this] { accept_visitors(); });
  }
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  /// Ends all connections: those who wait get an error.
  ~StoreServer() {
    ending_.store(true);
    if (acceptor_.joinable()) acceptor_.join();
    table_.close();
    for (auto& user : users_) shutdown(user.socket.fd(), SHUT_RDWR);
    for (auto& user : users_) user.thread.join();
  }

  /// A connection for a user in this process. Throws CommError.
  Socket attach() {
    int ends[2] = {-1, -1};
    check<CommError>(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
                     "store: socketpair: ", std::strerror(errno));
    Socket near(ends[0]), far(ends[1]);
    serve(std::move(far), false);
    return near;
  }
  /// Until no visitor is connected, at most `timeout`.
  void await_departures(std::chrono::milliseconds timeout) {
    const auto somebody = [&] {
      const std::lock_guard lock(mutex_);
      return std::any_of(users_.begin(), users_.end(),
                         [](const User& user) { return user.visits && !user.gone.load(); });
    };
    for (const auto deadline = Clock::now() + timeout; somebody() && Clock::now() < deadline;)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

 private:
  struct User {
    Socket socket;
    bool visits = false;
    std::thread thread;
    std::atomic<bool> gone{false};
  };

  void accept_visitors() {
    Acceptor acceptor(listener_, sizeof(detail::StoreHello), detail::store_magic, encrypted_, token_);
    while (!ending_.load()) {
      try {
        auto accepted = acceptor.next(Clock::now() + std::chrono::milliseconds(100));
        if (accepted.socket) admit(std::move(accepted));
      } catch (const std::exception&) {
        // Without memory or a thread for it a visitor loses its connection; the next one may find some.
      }
    }
  }

  void admit(Accepted accepted) {
    const auto hello = accepted.hello_as<detail::StoreHello>();
    if (hello.magic != detail::store_magic) return;  // a stranger
    const bool knows = hello.key == key_ && detail::proves(hello, accepted.nonce, token_);
    detail::StoreWelcome answer{.welcome = knows};
    if (knows) answer.proof = detail::proof_of(answer, hello.nonce, token_);
    accepted.socket.no_delay();
    accepted.socket.send_all(bytes_of(answer), Clock::now() + std::chrono::milliseconds(100));
    if (knows) serve(std::move(accepted.socket), true);
  }

  /// One user more; those who have gone make room. Beyond the limit a connection is closed. Throws CommError where
  /// there can be no thread for it.
  void serve(Socket socket, bool visits) {
    const std::lock_guard lock(mutex_);
    for (auto user = users_.begin(); user != users_.end();) {
      if (!user->gone.load()) {
        ++user;
        continue;
      }
      user->thread.join();
      user = users_.erase(user);
    }
    if (users_.size() >= most_users) return;
    std::list<User> one(1);
    auto& user = one.front();
    user.socket = std::move(socket);
    user.visits = visits;
    user.thread = chorus::detail::start_thread("store", [this, &user] { answer(user); });
    users_.splice(users_.end(), one);
  }

  void answer(User& user) {
    try {
      while (!ending_.load()) {
        if (!user.socket.wait(POLLIN, Clock::now() + std::chrono::minutes(1))) continue;
        detail::StoreTable::Room room(table_);
        const auto gone = [&] { return user.socket.hung_up(); };
        const auto until = Clock::now() + patience;
        auto request =
            detail::receive(user.socket, until, [&](std::size_t bytes) { return room.take(bytes, until, gone); });
        if (!request) break;
        room.keep(detail::memory_of(*request));
        const auto reply = table_.answer(std::move(*request), room, Clock::now() + patience, gone);
        if (ending_.load() || !detail::send(user.socket, reply, Clock::now() + patience)) break;
      }
    } catch (const std::exception&) {
      // There is no memory for what this user asks: it loses its connection, nobody else does.
    }
    shutdown(user.socket.fd(), SHUT_RDWR);  // closed later, by who joins this thread
    user.gone.store(true);
  }

  static constexpr std::size_t most_users = 1024;
  static constexpr std::chrono::seconds patience{30};  ///< for the rest of a message that has begun

  detail::StoreTable table_;
  Socket listener_;
  std::string token_;
  std::uint64_t key_ = 0;
  bool encrypted_ = false;
  std::mutex mutex_;
  std::list<User> users_;
  std::atomic<bool> ending_{false};
  std::thread acceptor_;
};

}  // namespace chorus::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_SERVER_HPP

namespace chorus::comm {

namespace detail {

/// Connections to one server: each call has one for itself while it lasts.
class StoreLink {
 public:
  StoreLink(std::string where, std::function<Socket(Deadline)> connect)
      : where_(std::move(where)), connect_(std::move(connect)) {}

  const std::string& where() const { return where_; }
  Socket take(Deadline deadline) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto socket = std::move(idle_.back());
        idle_.pop_back();
        return socket;
      }
    }
    return connect_(deadline);
  }
  void give_back(Socket socket) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(socket));
  }

 private:
  std::string where_;
  std::function<Socket(Deadline)> connect_;
  std::mutex mutex_;
  std::vector<Socket> idle_;
};

/// A connection on which both sides have proved that they know the token; empty, with why, where that is for later.
[[gnu::cold]] inline Socket visit_store(const Address& address, const std::string& token, std::uint64_t key,
                                        Deadline deadline, std::string& why) {
  auto socket = Socket::connect(address, std::min(deadline, Clock::now() + std::chrono::seconds(5)));
  if (!socket) {
    why = std::strerror(errno);
    return socket;
  }
  const auto soon = std::min(deadline, Clock::now() + std::chrono::seconds(5));
  why = "it took the connection and gave no answer";
  Challenge challenge;
  if (!socket.receive_all(bytes_of(challenge), soon)) return Socket();
  check<CommError>(challenge.magic == store_magic, "store: something other than a store of this version is at ",
                   address);
  follow(challenge, socket, check_token(token, address), token, "store", address);
  StoreHello hello;
  hello.key = key;
  fill_random(hello.nonce);
  hello.proof = proof_of(hello, challenge.nonce, token);
  StoreWelcome answer;
  const bool heard = socket.send_all(bytes_of(hello), soon) && socket.receive_all(bytes_of(answer), soon);
  check<CommError>(socket.trouble().empty(), "store: the server at ", address, socket.trouble());
  if (!heard) return Socket();
  check<CommError>(answer.magic == store_magic && answer.welcome == 1, "store: the server at ", address,
                   " refuses this process: it does not know the job's token");
  check<CommError>(proves(answer, hello.nonce, token), "store: who answers at ", address,
                   " does not know the job's token");
  socket.no_delay();
  return socket;
}

/// The first of `count` keys.
[[gnu::cold]] inline std::string list_of(const std::vector<std::string>& keys, std::int64_t count) {
  std::string list;
  const std::size_t shown = std::min<std::size_t>(keys.size(), 10);
  for (std::size_t i = 0; i < shown; ++i) list += cat(i ? ", '" : "'", printable(keys[i]), "'");
  const auto more = count - static_cast<std::int64_t>(shown);
  return more > 0 ? cat(list, " and ", more, " more") : list;
}

}  // namespace detail

CHORUS_INLINE Store::Store() : Store(std::make_shared<StoreServer>()) {}
CHORUS_INLINE Store::Store(std::shared_ptr<detail::StoreLink> link) : link_(std::move(link)) {}
CHORUS_INLINE Store::Store(std::shared_ptr<StoreServer> server)
    : Store(std::make_shared<detail::StoreLink>("in this process", [server](Deadline) { return server->attach(); })) {}

CHORUS_INLINE Store Store::connect(const std::string& host, int port, const std::string& token,
                                   std::chrono::milliseconds timeout, std::uint64_t key) {
  check_timeout("store", timeout);
  chorus::check<UsageError>(port > 0 && port < 65536, "store: port is ", port, ", expected 1 to 65535");
  const auto deadline = Clock::now() + timeout;
  const auto address = Address::resolve(host, port, deadline);
  detail::check_token(token, address);
  const auto visit = [=](Deadline until) {
    std::string why;
    auto socket = detail::visit_store(address, token, key, until, why);
    chorus::check<CommError>(static_cast<bool>(socket), "store: the server at ", address, " has gone: ", why);
    return socket;
  };
  Socket first;
  std::string why = "no answer";
  while (
      !(first = detail::visit_store(address, token, key, deadline, why))) {  // it may come up later than this process
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    chorus::check<TimeoutError>(Clock::now() < deadline, "store: no server was found at ", address, ": ", why);
  }
  auto link = std::make_shared<detail::StoreLink>(cat("at ", address), visit);
  link->give_back(std::move(first));
  Store store(std::move(link));
  store.timeout_ = timeout;
  return store;
}

/// One request, whose keys get the prefix here, and its reply. A connection on which something went wrong is not used
/// again.
CHORUS_INLINE detail::StoreMessage Store::ask(detail::StoreCode code, std::vector<std::string> texts,
                                              std::int64_t number) const {
  using detail::StoreCode;
  const bool waits = code == StoreCode::get || code == StoreCode::wait;
  const auto patience = waits ? std::chrono::milliseconds(number) : timeout_;
  chorus::check<UsageError>(patience.count() >= 0, "store.", name(code), ": a timeout of ", patience.count(), " ms");
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (!is_key(code, i)) continue;
    const auto bytes = prefix_.size() + texts[i].size();
    chorus::check<UsageError>(!texts[i].empty() && bytes <= detail::most_key_bytes, "store.", name(code), ": a key of ",
                              bytes, " bytes, expected 1 to ", detail::most_key_bytes);
    texts[i].insert(0, prefix_);
  }
  const detail::StoreMessage request{code, number, std::move(texts)};
  chorus::check<UsageError>(body_bytes(request) <= detail::most_message_bytes, "store.", name(code), ": ",
                            body_bytes(request), " bytes, at most ", detail::most_message_bytes, " are possible");
  chorus::check<UsageError>(request.texts.size() <= detail::most_message_texts, "store.", name(code), ": ",
                            request.texts.size(), " keys and values, at most ", detail::most_message_texts,
                            " are possible");
  // The server says itself when a wait is over; it may be a little late.
  const auto deadline = Clock::now() + std::min<std::chrono::milliseconds>(patience, std::chrono::hours(1'000'000)) +
                        (waits ? std::chrono::seconds(2) : std::chrono::seconds(0));
  auto socket = link_->take(deadline);
  auto reply = detail::send(socket, request, deadline) ? detail::receive(socket, deadline) : std::nullopt;
  if (!reply && Clock::now() >= deadline)
    fail<TimeoutError>("store.", name(code), ": the server ", link_->where(), " did not answer within ",
                       patience.count(), " ms");
  chorus::check<CommError>(reply.has_value(), "store.", name(code), ": the server ", link_->where(), " has gone",
                           socket.trouble());
  link_->give_back(std::move(socket));
  if (reply->code == StoreCode::timed_out)
    fail<TimeoutError>("store.", name(code), ": ", detail::list_of(reply->texts, reply->number),
                       reply->number == 1 ? " was" : " were", " not set within ", patience.count(), " ms");
  chorus::check<UsageError>(reply->code == StoreCode::done, "store.", name(code), ": ",
                            reply->texts.empty() ? "refused" : printable(reply->texts[0], 1000));
  return std::move(*reply);
}

CHORUS_INLINE void Store::set(std::string_view key, std::string_view value) {
  ask(detail::StoreCode::set, {std::string(key), std::string(value)});
}
CHORUS_INLINE std::string Store::get(std::string_view key) { return multi_get({std::string(key)}).front(); }
CHORUS_INLINE std::int64_t Store::add(std::string_view key, std::int64_t amount) {
  return ask(detail::StoreCode::add, {std::string(key)}, amount).number;
}
CHORUS_INLINE std::string Store::compare_set(std::string_view key, std::string_view expected,
                                             std::string_view desired) {
  auto reply = ask(detail::StoreCode::compare_set, {std::string(key), std::string(expected), std::string(desired)});
  return reply.texts.empty() ? "" : std::move(reply.texts.front());
}
CHORUS_INLINE bool Store::delete_key(std::string_view key) {
  return ask(detail::StoreCode::delete_key, {std::string(key)}).number != 0;
}
CHORUS_INLINE bool Store::check(const std::vector<std::string>& keys) {
  return ask(detail::StoreCode::check, keys).number != 0;
}
CHORUS_INLINE void Store::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }
CHORUS_INLINE void Store::wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  ask(detail::StoreCode::wait, keys, timeout.count());
}
CHORUS_INLINE std::int64_t Store::num_keys() { return ask(detail::StoreCode::num_keys, {}).number; }
CHORUS_INLINE void Store::append(std::string_view key, std::string_view value) {
  ask(detail::StoreCode::append, {std::string(key), std::string(value)});
}
CHORUS_INLINE std::vector<std::string> Store::multi_get(const std::vector<std::string>& keys) {
  auto reply = ask(detail::StoreCode::get, keys, timeout_.count());
  chorus::check<CommError>(reply.texts.size() == keys.size(), "store.get: the server ", link_->where(), " answers ",
                           reply.texts.size(), " values, expected ", keys.size());
  return std::move(reply.texts);
}
CHORUS_INLINE void Store::multi_set(const std::vector<std::string>& keys, const std::vector<std::string>& values) {
  chorus::check<UsageError>(keys.size() == values.size(), "store.multi_set: ", keys.size(), " keys, but ",
                            values.size(), " values");
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < keys.size(); ++i) texts.insert(texts.end(), {keys[i], values[i]});
  ask(detail::StoreCode::multi_set, std::move(texts));
}

CHORUS_INLINE Store Store::prefix_store(std::string_view prefix) const {
  auto other = *this;
  other.prefix_ += std::string(prefix) + "/";
  return other;
}

CHORUS_INLINE Store Store::of(const World& world, AnyCommunicator& communicator) {
  struct News {
    std::uint64_t key = 0;
    std::int32_t port = 0;
    FixedText<252> why{};
  } news;
  static_assert(is_message<News, 264>);
  std::optional<Store> store;
  if (communicator.size() == 1) return Store();
  if (communicator.rank() == 0) {
    try {
      auto listener = Socket::listen(Address::resolve(world.master_addr, 0, Clock::now() + world.timeout));
      news.key = random_key();
      news.port = listener.local().port();
      store = Store(std::make_shared<StoreServer>(std::move(listener), world.token, news.key));
    } catch (const Error& error) {  // the others shall not wait for it
      news.port = 0;
      news.why = FixedText<252>(error.what());
    }
  }
  const auto bytes = std::span(reinterpret_cast<std::uint8_t*>(&news), sizeof news);
  communicator.broadcast(bytes, 0);
  chorus::check<CommError>(news.port > 0, "rank ", communicator.rank(),
                           ": rank 0 has no store: ", printable(news.why.view(), sizeof news.why));
  if (!store) {
    store = Store::connect(world.master_addr, news.port, world.token, world.timeout, news.key);
    store->set_timeout(Store::default_timeout);
  }
  return *store;
}

}  // namespace chorus::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_STORE_STORE_IMPL_HPP

#endif  // CHORUS_SINGLE_CHORUS_COMM_STORE_HPP

// <chorus/data/open_images.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_OPEN_IMAGES_HPP
#define CHORUS_SINGLE_CHORUS_DATA_OPEN_IMAGES_HPP
/// Opens a folder of images, whichever of the known datasets it holds.

namespace chorus::data {

/// The dataset in `folder`: MNIST where one of its files for `split` is there, else CIFAR-10. Throws FileError with
/// what was looked for where the folder has neither, and all that `Mnist` and `Cifar10` throw.
inline ImageDataset open_images(const std::string& folder, Split split = Split::train) {
  require_folder("open_images", folder);
  if (!Mnist::find(folder, split, Mnist::images).empty() || !Mnist::find(folder, split, Mnist::labels).empty())
    return Mnist(folder, split);
  if (!Cifar10::find(folder).empty()) return Cifar10(folder, split);
  const char* which = split == Split::train ? "train" : "t10k";
  fail<FileError>("open_images: folder ", folder, " holds no dataset that is known here; looked for MNIST (", which,
                  Mnist::images, " and ", which, Mnist::labels, ", plain or .gz) and CIFAR-10 (",
                  split == Split::train ? "data_batch_1.bin to data_batch_5.bin" : "test_batch.bin",
                  ", also in cifar-10-batches-bin)", what_is_there(folder), Cifar10::advice(folder));
}

}  // namespace chorus::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_OPEN_IMAGES_HPP

// <chorus/io/checkpoint.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_CHECKPOINT_HPP
#define CHORUS_SINGLE_CHORUS_IO_CHECKPOINT_HPP
/// Checkpoints: a model's file with all that is needed to go on training as if nothing had happened.

// <chorus/io/load_model.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_LOAD_MODEL_HPP
#define CHORUS_SINGLE_CHORUS_IO_LOAD_MODEL_HPP
/// Reading a model's numbers from a safetensors file.

// <chorus/io/converted_numbers.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_CONVERTED_NUMBERS_HPP
#define CHORUS_SINGLE_CHORUS_IO_CONVERTED_NUMBERS_HPP
/// Numbers of a file in the type that a model has them in, as PyTorch's `copy_` converts them.

namespace chorus::io::detail {

/// The tensors' type of that name, if they have it.
constexpr std::optional<DType> dtype_of_tensors(FileDType type) {
  for (std::size_t i = 0; i <= static_cast<std::size_t>(DType::f64); ++i)
    if (file_dtype(static_cast<DType>(i)) == type) return static_cast<DType>(i);
  return std::nullopt;
}

constexpr bool is_floating(DType type) { return type >= DType::f16; }

/// Whether numbers of the file may become numbers of the model: floating-point ones from floating-point ones, integers
/// and bools from integers and bools.
constexpr bool convertible(FileDType from, DType to) {
  const auto known = dtype_of_tensors(from);
  return known && is_floating(*known) == is_floating(to);
}

/// Calls `visit(T{})` with that of the types T that has the name `type`; a bool's is its byte.
template <class... T, class Visit>
void with_one_of(DType type, const Visit& visit) {
  const DType stored = type == DType::boolean ? DType::u8 : type;
  ((stored == dtype<T> ? visit(T{}) : void()), ...);
}
template <class Visit>
void with_float(DType type, const Visit& visit) {
  with_one_of<half, bf16, float, double>(type, visit);
}
template <class Visit>
void with_integer(DType type, const Visit& visit) {
  with_one_of<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, std::int64_t,
              std::uint64_t>(type, visit);
}

/// `bytes`, which are numbers of type `from`, in type `to`: floating-point numbers are rounded, integers keep their
/// values. Both are convertible. Throws FileError, whose message begins with `who`, where a number is beyond what `to`
/// holds.
inline std::vector<std::byte> converted(std::vector<std::byte> bytes, DType from, DType to, std::string_view who) {
  if (from == to) return bytes;
  const std::size_t count = bytes.size() / size_of(from);
  std::vector<std::byte> out(count * size_of(to));
  const auto refuse = [&](auto value) {
    fail<FileError>(who, ": the number ", value, " of type ", from, " is beyond the range of ", to);
  };
  const auto numbers_in = []<class T>(std::vector<std::byte>& memory, T) {
    return std::span(reinterpret_cast<T*>(memory.data()), memory.size() / sizeof(T));
  };
  if (is_floating(from)) {
    std::vector<double> wide;  // holds every number of every type
    with_float(from, [&](auto type) {
      const auto numbers = numbers_in(bytes, type);
      wide.assign(numbers.begin(), numbers.end());
    });
    with_float(to, [&](auto type) {
      const auto numbers = numbers_in(out, type);
      for (std::size_t i = 0; i < count; ++i) {
        numbers[i] = static_cast<decltype(type)>(wide[i]);
        if (std::isfinite(wide[i]) && !std::isfinite(static_cast<double>(numbers[i]))) refuse(wide[i]);
      }
    });
  } else {
    std::vector<std::int64_t> wide(count);
    with_integer(from, [&](auto type) {
      const auto numbers = numbers_in(bytes, type);
      for (std::size_t i = 0; i < count; ++i) {
        if (!std::in_range<std::int64_t>(numbers[i])) refuse(numbers[i]);  // and so beyond all types but its own
        wide[i] = static_cast<std::int64_t>(numbers[i]);
      }
    });
    with_integer(to, [&](auto type) {
      using T = decltype(type);
      const auto numbers = numbers_in(out, type);
      for (std::size_t i = 0; i < count; ++i) {
        if (!std::in_range<T>(wide[i]) || (to == DType::boolean && (wide[i] & ~std::int64_t{1}) != 0)) refuse(wide[i]);
        numbers[i] = static_cast<T>(wide[i]);
      }
    });
  }
  return out;
}

}  // namespace chorus::io::detail
#endif  // CHORUS_SINGLE_CHORUS_IO_CONVERTED_NUMBERS_HPP

// <chorus/io/file_names.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_FILE_NAMES_HPP
#define CHORUS_SINGLE_CHORUS_IO_FILE_NAMES_HPP
/// What the tensors of a file are called in a model, and which of them fill which of the model's.

// <chorus/io/load_options.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_LOAD_OPTIONS_HPP
#define CHORUS_SINGLE_CHORUS_IO_LOAD_OPTIONS_HPP
/// What `load` may be told, and what it answers.

namespace chorus::io {

/// Turns a name in the file into the model's; an empty answer leaves the tensor out.
using Rename = std::function<std::string(std::string_view)>;

/// How a model is filled from a file.
struct LoadOptions {
  /// Whether the file has to have all of the model's tensors, of the same shapes, and no others. Without, `load` fills
  /// what fits, leaves the rest of the model as it is, and says in its report what didn't fit.
  bool strict = true;
  /// Is asked for each tensor of the file, before names of PyTorch's wrappers are looked for. See without_prefix,
  /// with_prefix and only_prefix.
  Rename rename = {};
};

/// How the file and the model differed. In a text: `cat(report)`.
struct LoadReport {
  struct Mismatch {
    std::string name;  ///< the model's
    DType expected{};
    std::vector<Index> expected_shape;
    FileDType got{};
    std::vector<Index> got_shape;
  };
  std::vector<std::string> missing;     ///< tensors of the model that the file has not: they stay as they are
  std::vector<std::string> unexpected;  ///< tensors of the file, by their names there, that the model has not
  std::vector<Mismatch> mismatched;     ///< tensors of other shapes, or integers for floating-point numbers: they stay

  /// Whether the file had exactly the model's tensors.
  bool complete() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
};

/// "missing: a, b; unexpected: c; mismatched: d (expected F32 [2], got F32 [3])", of what there is.
inline void append(std::string& out, const LoadReport& report) {
  std::string_view before_list;
  const auto list = [&](std::string_view what, const auto& items, const auto& text_of) {
    if (items.empty()) return;
    out += cat(std::exchange(before_list, "; "), what, ": ");
    std::string_view before;
    for (const auto& item : items) out += cat(std::exchange(before, ", "), text_of(item));
  };
  const auto name = [](const std::string& text) { return printable(text); };
  list("missing", report.missing, name);
  list("unexpected", report.unexpected, name);
  list("mismatched", report.mismatched, [](const LoadReport::Mismatch& x) {
    return cat(printable(x.name), " (expected ", x.expected, " ", std::span<const Index>(x.expected_shape), ", got ",
               x.got, " ", std::span<const Index>(x.got_shape), ")");
  });
}

/// For LoadOptions: takes `prefix` from the names that begin with it. `without_prefix("model.")` makes `fc1.weight` of
/// `model.fc1.weight`.
inline Rename without_prefix(std::string prefix) {
  return [prefix = std::move(prefix)](std::string_view name) {
    return std::string(name.starts_with(prefix) ? name.substr(prefix.size()) : name);
  };
}

/// For LoadOptions: the same, and leaves out all tensors whose names don't begin so: to fill a part of a model from a
/// file of the whole, as in `load(net.module().encoder, path, {.rename = only_prefix("encoder.")})`.
inline Rename only_prefix(std::string prefix) {
  return [prefix = std::move(prefix)](std::string_view name) {
    return std::string(name.starts_with(prefix) ? name.substr(prefix.size()) : std::string_view());
  };
}

/// For LoadOptions: puts `prefix` before all names: a file of a part fills the part of a whole.
inline Rename with_prefix(std::string prefix) {
  return [prefix = std::move(prefix)](std::string_view name) { return prefix + std::string(name); };
}

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_LOAD_OPTIONS_HPP

// <chorus/io/safetensors_reader.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_READER_HPP
#define CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_READER_HPP
/// Reads safetensors files. A file is checked whole before a tensor is read; it can't make the program run code,
/// allocate more than its own size in data, or read outside itself. Values are not checked: NaN and infinity are left
/// as they are.

// <chorus/io/foreign_file.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_FOREIGN_FILE_HPP
#define CHORUS_SINGLE_CHORUS_IO_FOREIGN_FILE_HPP
/// Tells by its first bytes what a file is that a reader can't read, and how to come from it to one that it can. No
/// byte of such a file is interpreted beyond that: a pickle could make a program run code.

namespace chorus::io::detail {

/// So many first bytes are enough.
inline constexpr std::size_t foreign_bytes = 4096;

/// "it is ...: ...", or "" where nothing is known of such a file. `begin`: its first bytes, up to `foreign_bytes`.
[[gnu::cold]] inline std::string what_file_is(std::span<const std::byte> begin, std::string_view path) {
  constexpr std::string_view from_numpy =
      "to read a model from it, convert it once in Python: import numpy; from safetensors.numpy import save_file; ";
  constexpr std::string_view from_torch =
      "Nothing of it is read here, for a pickle can run code. Convert it once in Python: import torch; "
      "from safetensors.torch import save_file; save_file({k: v.contiguous().clone() for k, v in torch.load(\"FILE\", "
      "map_location=\"cpu\", weights_only=True).items()}, \"FILE.safetensors\") (a checkpoint may hold the numbers one "
      "level deeper: torch.load(...)[\"state_dict\"] or [\"model\"]; "
      "a TorchScript file: torch.jit.load(\"FILE\").state_dict())";
  using namespace std::string_view_literals;
  const std::string_view text(reinterpret_cast<const char*>(begin.data()), std::min(begin.size(), foreign_bytes));
  const auto has = [&](std::string_view part) { return text.find(part) != text.npos; };
  const auto starts = [&](auto... marks) { return (text.starts_with(marks) || ...); };
  const auto is = [](auto... parts) { return (std::string("it is ") + ... + std::string(parts)); };
  const auto packed = [&](std::string_view kind, std::string_view command) {
    return is("compressed with ", kind, ": unpack it first (", command, ")");
  };

  if (text.empty()) return is("empty: was it downloaded, or written, to its end?");
  if (std::ranges::all_of(text, [](char c) { return c == '\0'; }))
    return is("zeros from its first byte on: was it downloaded, or written, to its end?");
  if (starts("version https://git-lfs"sv))
    return is("a pointer that git-lfs left in the file's place: fetch the file itself with git lfs pull");
  if (starts("PK\3\4"sv, "PK\5\6"sv)) {
    if (has("data.pkl") || has("/constants.pkl") || has("/code/"))
      return is("a file of PyTorch's torch.save (a zip archive with a pickle). ", from_torch);
    if (has(".npy"))
      return is("a NumPy archive (.npz), which io::NpzReader reads; ", from_numpy,
                "save_file(dict(numpy.load(\"FILE\")), \"FILE.safetensors\")");
    if (has("model.weights.h5") || has("config.json"))
      return is(
          "a model of Keras (a zip archive with an HDF5 file): convert it once in Python with keras and "
          "safetensors.numpy.save_file; Keras keeps weights as [inputs, outputs], so transpose them");
    return is("a zip archive: unpack it first (unzip FILE)");
  }
  if (text.size() > 1 && text[0] == '\x80' && text[1] >= 2 && text[1] <= 5)
    return is("a Python pickle, as older versions of PyTorch's torch.save write it. ", from_torch);
  if (starts("\x89HDF\r\n"sv))
    return is(
        "an HDF5 file, as Keras and h5py write it: convert it once in Python: import h5py; from safetensors.numpy "
        "import save_file; t = {}; h5py.File(\"FILE\").visititems(lambda k, v: t.update({k.replace(\"/\", \".\"): "
        "v[()]}) if hasattr(v, \"dtype\") else None); save_file(t, \"FILE.safetensors\") (Keras keeps weights as "
        "[inputs, outputs]: transpose them)");
  if (starts("GGUF"sv, "lmgg"sv, "tjgg"sv, "fmgg"sv))
    return is(
        "a model of llama.cpp (GGUF): convert it once in Python: from gguf import GGUFReader, dequantize; from "
        "safetensors.numpy import save_file; save_file({t.name: dequantize(t.data, t.tensor_type) for t in "
        "GGUFReader(\"FILE\").tensors}, \"FILE.safetensors\")");
  if (starts("\x93NUMPY"sv))
    return is("a NumPy array (.npy), which io::load_npy reads; ", from_numpy,
              "save_file({\"NAME\": numpy.load(\"FILE\")}, \"FILE.safetensors\")");
  if (starts("\x1f\x8b"sv)) return packed("gzip", "gunzip FILE, or tar xzf FILE where it is a .tar.gz");
  if (starts("BZh"sv)) return packed("bzip2", "bunzip2 FILE");
  if (starts("\xFD\x37zXZ"sv)) return packed("xz", "unxz FILE");
  if (starts("\x28\xB5\x2F\xFD"sv)) return packed("zstd", "unzstd FILE");
  if (starts("7z\xBC\xAF"sv)) return packed("7-Zip", "7z x FILE");
  if (text.size() > 262 && text.substr(257, 5) == "ustar") return is("a tar archive: unpack it first (tar xf FILE)");

  const auto blanks = text.find_first_not_of(" \t\r\n\xEF\xBB\xBF");
  const auto word = text.substr(std::min(blanks, text.size()));
  if (word.starts_with('<'))
    return is(
        "an HTML or XML page, such as a server sends in place of a file (an error, a login): download the file "
        "itself, and look at what came");
  if (word.starts_with('{') && (has("\"weight_map\"") || path.ends_with(".index.json")))
    return is(
        "the list of a model that lies in several files: put them together once in Python: import json; from "
        "safetensors.torch import load_file, save_file; save_file({k: v for f in set(json.load(open(\"FILE\"))"
        "[\"weight_map\"].values()) for k, v in load_file(f).items()}, \"model.safetensors\")");
  if (word.starts_with('{') || word.starts_with('['))
    return is("a JSON text (a configuration?): the numbers lie in a file beside it");

  // Protocol buffers have no mark. ONNX begins with its version, then the text or the graph.
  const bool onnx =
      text.size() > 4 && text[0] == '\x08' && text[1] > 0 && text[1] < 32 && (text[2] == '\x12' || text[2] == '\x3A');
  if (path.ends_with(".onnx") || onnx)
    return is(
        "an ONNX model: convert it once in Python: import onnx; from safetensors.numpy import save_file; "
        "save_file({t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(\"FILE\").graph.initializer}, "
        "\"FILE.safetensors\")");
  if (text.size() > 8 && text.substr(4, 4) == "TFL3")
    return is("a TensorFlow Lite model: read its tensors in Python, and write them with safetensors.numpy.save_file");
  for (const std::string_view end : {".msgpack", ".ckpt", ".pb", ".pt", ".pth", ".bin"})
    if (path.ends_with(end))
      return is("no file of a format that is known here, though its name ends in ", end,
                ": load it with the library that wrote it, and write it with safetensors.numpy.save_file in Python");
  return "";
}

/// The end of a message of a reader of NumPy's files about one that it refuses.
[[gnu::cold]] inline std::string instead_of_numpy(std::span<const std::byte> begin, std::string_view path) {
  // The size of the header in 8 bytes, few of them used, then the header.
  if (begin.size() > 8 && begin[8] == std::byte{'{'} && begin[5] == std::byte{} && begin[7] == std::byte{})
    return "; it is a safetensors file: io::load fills a model from it, io::SafetensorsReader reads its tensors";
  const auto what = what_file_is(begin, path);
  return what.empty() ? "" : "; " + what;
}

}  // namespace chorus::io::detail
#endif  // CHORUS_SINGLE_CHORUS_IO_FOREIGN_FILE_HPP

// <chorus/io/safetensors_header.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_HEADER_HPP
#define CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_HEADER_HPP
/// Parses the JSON header of a safetensors file. Stricter than the reference reader: no name, metadata key or field
/// twice, no unknown fields, no control characters in names. The format:
/// https://github.com/huggingface/safetensors#format

namespace chorus::io {

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  ///< in the order of their data
  Metadata metadata;
};

namespace detail {

/// Takes the events of nlohmann's parser: unlike a parsed document, they show duplicates, and nothing deeper than the
/// format allows is ever stored. Every event that doesn't fit throws FileError.
class SafetensorsHeaderEvents {
 public:
  using json = nlohmann::json;

  SafetensorsHeaderEvents(std::string_view path, const ReaderLimits& limits) : path_(path), limits_(limits) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() {
    if (place_ == Place::top && key_ == metadata_key) return true;
    unexpected("null");
  }
  bool boolean(bool value) { unexpected(value ? "true" : "false"); }
  bool number_integer(std::int64_t value) { unexpected(cat("the number ", value)); }
  bool number_float(double, const std::string& text) { unexpected(cat("the number ", text.substr(0, 40))); }
  bool binary(json::binary_t&) { unexpected("binary data"); }

  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::shape) {
      check<FileError>(entry_.shape.size() < limits_.rank, who(), "shape has more than ", limits_.rank,
                       " axes, the limit (ReaderLimits::rank)");
      check<FileError>(value <= static_cast<std::uint64_t>(std::numeric_limits<Index>::max()), who(), "size ", value,
                       " in shape is too large");
      entry_.shape.push_back(static_cast<Index>(value));
    } else if (place_ == Place::offsets && offset_count_ < 2) {
      offsets_[offset_count_++] = value;
    } else {
      unexpected(cat("the number ", value));
    }
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::metadata) {
      header_.metadata[key_] = std::move(value);
    } else if (place_ == Place::tensor && field_ == Field::dtype) {
      const auto dtype = file_dtype_named(value);
      check<FileError>(dtype.has_value(), who(), "unknown dtype ", Quoted{value});
      entry_.dtype = *dtype;
    } else {
      unexpected(cat("the string ", Quoted{value}));
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = key_ == metadata_key ? Place::metadata : Place::tensor;
      entry_ = {key_, {}, {}, 0, 0};
      seen_ = 0;
      offset_count_ = 0;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& value) {
    if (place_ == Place::tensor) {
      field_ = field_named(value);
      check<FileError>((seen_ & bit(field_)) == 0, who(), "field ", Quoted{value}, " appears twice");
      seen_ |= bit(field_);
      return true;
    }
    key_ = std::move(value);
    if (place_ == Place::metadata) {
      check<FileError>(!header_.metadata.contains(key_), path_, ": metadata key ", Quoted{key_}, " appears twice");
    } else if (key_ == metadata_key) {
      check<FileError>(!std::exchange(has_metadata_, true), path_, ": __metadata__ appears twice");
    } else {
      check_tensor_name<FileError>({path_, key_}, limits_.name_bytes);
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::tensor) finish_tensor();
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ != Place::tensor || field_ == Field::dtype) unexpected("an array");
    place_ = field_ == Field::shape ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() {
    check<FileError>(place_ == Place::shape || offset_count_ == 2, who(), "data_offsets must hold two numbers, got ",
                     offset_count_);
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception& error) {
    fail<FileError>(path_, ": the header is not valid JSON at byte ", position,
                    " of it: ", std::string_view(error.what()).substr(0, 240));
  }

 private:
  enum class Place { outside, top, metadata, tensor, shape, offsets };
  enum class Field { dtype, shape, offsets };
  static constexpr std::string_view metadata_key = "__metadata__";

  static unsigned bit(Field field) { return 1u << static_cast<unsigned>(field); }

  Field field_named(std::string_view text) const {
    if (text == "dtype") return Field::dtype;
    if (text == "shape") return Field::shape;
    if (text == "data_offsets") return Field::offsets;
    fail<FileError>(who(), "unknown field ", Quoted{text}, "; expected dtype, shape and data_offsets");
  }

  void finish_tensor() {
    check<FileError>((seen_ & bit(Field::dtype)) != 0, who(), "no dtype");
    check<FileError>((seen_ & bit(Field::shape)) != 0, who(), "no shape");
    check<FileError>((seen_ & bit(Field::offsets)) != 0, who(), "no data_offsets");
    const auto [begin, end] = offsets_;
    check<FileError>(begin <= end, who(), "data_offsets [", begin, ", ", end, "] end before they begin");
    const std::size_t bytes = tensor_bytes<FileError>(entry_.dtype, entry_.shape, who());
    check<FileError>(end - begin == bytes, who(), "shape ", std::span<const Index>(entry_.shape), " of ", entry_.dtype,
                     " takes ", bytes, " bytes, but data_offsets [", begin, ", ", end, "] span ", end - begin);
    check<FileError>(header_.entries.size() < limits_.tensors, path_, ": more than ", limits_.tensors,
                     " tensors, the limit (ReaderLimits::tensors)");
    entry_.begin = static_cast<std::size_t>(begin);
    entry_.bytes = bytes;
    header_.entries.push_back(std::move(entry_));
  }

  TensorOfFile who() const { return {path_, entry_.name}; }

  [[noreturn]] void unexpected(std::string_view got) const {
    switch (place_) {
      case Place::outside:
        fail<FileError>(path_, ": the header must be an object, got ", got);
      case Place::top:
        fail<FileError>(path_, ": ", key_ == metadata_key ? "" : "tensor ", Quoted{key_}, " must be an object, got ",
                        got);
      case Place::metadata:
        fail<FileError>(path_, ": metadata key ", Quoted{key_}, " must have a string, got ", got);
      case Place::tensor:
        if (field_ == Field::dtype) fail<FileError>(who(), "dtype must be a string, got ", got);
        fail<FileError>(who(), field_ == Field::shape ? "shape" : "data_offsets", " must be an array, got ", got);
      case Place::shape:
        fail<FileError>(who(), "a size in shape must be a whole number of 64 bits, got ", got);
      case Place::offsets:
        break;
    }
    fail<FileError>(who(), "data_offsets must hold two whole numbers of 64 bits, got ", got);
  }

  std::string_view path_;
  const ReaderLimits& limits_;
  SafetensorsHeader header_;
  Place place_ = Place::outside;
  Field field_ = Field::dtype;
  std::string key_;
  TensorEntry entry_;
  std::uint64_t offsets_[2] = {};
  std::size_t offset_count_ = 0;
  unsigned seen_ = 0;
  bool has_metadata_ = false;
};

/// Checks that the tensors, sorted here by offset, fill the data without holes or overlaps, and that no name comes
/// twice.
inline void check_layout(std::string_view path, std::vector<TensorEntry>& entries, std::uint64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);
  });
  std::size_t end = 0;
  for (const TensorEntry& entry : entries) {
    check<FileError>(entry.begin == end, TensorOfFile{path, entry.name}, "data begin at ", entry.begin, ", ",
                     entry.begin < end ? "inside the tensor before, which ends at " : "after a hole that begins at ",
                     end);
    end += entry.bytes;
  }
  check<FileError>(end == data_bytes, path, ": the tensors have ", end, " bytes, but after the header the file has ",
                   data_bytes);

  std::vector<std::string_view> names;
  for (const TensorEntry& entry : entries) names.push_back(entry.name);
  check_names_differ<FileError>(path, std::move(names));
}

}  // namespace detail

/// Parses and checks a header. `data_bytes`: what the file holds after it. `path`: how messages begin.
/// Throws FileError.
inline SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                                  std::string_view path, const ReaderLimits& limits) {
  // The parser would skip a byte order mark, and take a zero byte for the end of its input.
  check<FileError>(text.find('\0') == text.npos, path, ": the header is not valid JSON: it has a zero byte");
  check<FileError>(!text.starts_with("\xEF\xBB\xBF"), path, ": the header is not valid JSON: it has a byte order mark");
  detail::SafetensorsHeaderEvents events(path, limits);
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);
  SafetensorsHeader header = events.take();
  detail::check_layout(path, header.entries, data_bytes);
  return header;
}

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_HEADER_HPP

namespace chorus::io {

static_assert(std::endian::native == std::endian::little,
              "safetensors files are little-endian, and so must this machine be");

/// An open safetensors file: the list of its tensors, and their bytes on demand. It may be read from several threads. A
/// file that is replaced by `write_safetensors` while it is open stays readable as it was.
class SafetensorsReader {
 public:
  /// Opens and checks the file. Throws FileError, with the path and the tensor's name, where it is not there, can't be
  /// read, breaks a rule of the format, or is above a limit.
  explicit SafetensorsReader(const std::string& path, const ReaderLimits& limits = {})
      : path_(path), loading_(cat("loading ", path)), file_(path, loading_), size_(file_.size()) {
    read_header(limits);
  }

  /// Reads a file that lies in memory, which must outlive the reader. `name` stands for the path in messages.
  explicit SafetensorsReader(std::span<const std::byte> memory, const std::string& name,
                             const ReaderLimits& limits = {})
      : path_(name), loading_(cat("loading ", name)), memory_(memory), size_(memory.size()) {
    read_header(limits);
  }

  const std::string& path() const { return path_; }

  /// All tensors, in the order of their data in the file.
  std::span<const TensorEntry> entries() const { return header_.entries; }

  const Metadata& metadata() const { return header_.metadata; }

  /// The tensor of that name, or nullptr.
  const TensorEntry* find(std::string_view name) const {
    const auto at =
        std::lower_bound(by_name_.begin(), by_name_.end(), name,
                         [](const TensorEntry* entry, std::string_view text) { return entry->name < text; });
    return at != by_name_.end() && (*at)->name == name ? *at : nullptr;
  }

  /// The tensor of that name; throws FileError where there is none.
  const TensorEntry& at(std::string_view name) const {
    const TensorEntry* entry = find(name);
    check<FileError>(entry != nullptr, loading_, ": no tensor ", Quoted{name}, " among the ", entries().size(),
                     " in the file");
    return *entry;
  }

  /// Copies a tensor's bytes; `to` must have exactly `entry.bytes`. Throws UsageError where it has not, or `entry` is
  /// not of this file, and FileError where the file can't be read or was cut since it was opened.
  void read(const TensorEntry& entry, std::span<std::byte> to) const {
    check<UsageError>(to.size() == entry.bytes, loading_, ": tensor ", Quoted{entry.name}, " has ", entry.bytes,
                      " bytes, but the place to read it to has ", to.size());
    read(entry, to, 0);
  }
  /// Copies as many bytes as `to` has from byte `begin` of a tensor on. Throws UsageError where it has not so many.
  void read(const TensorEntry& entry, std::span<std::byte> to, std::uint64_t begin) const {
    check<UsageError>(begin <= entry.bytes && to.size() <= entry.bytes - begin, loading_, ": tensor ",
                      Quoted{entry.name}, " has ", entry.bytes, " bytes, got ", to.size(), " from ", begin, " on");
    check<UsageError>(entry.begin <= size_ - data_begin_ && entry.bytes <= size_ - data_begin_ - entry.begin, loading_,
                      ": tensor ", Quoted{entry.name}, " is not of this file");
    read_at(data_begin_ + entry.begin + begin, to, &entry);
  }

 private:
  void read_header(const ReaderLimits& limits) {
    std::array<std::byte, 8> prefix{};
    check<FileError>(size_ >= prefix.size(), loading_, ": not a safetensors file: ", size_,
                     " bytes are too few for the 8 that give the header's size");
    read_at(0, prefix, nullptr);
    const auto length = std::bit_cast<std::uint64_t>(prefix);
    const bool none = length == 0 && size_ > prefix.size();
    const bool fits = !none && length <= format_header_bytes && length <= size_ - prefix.size();
    const auto other = fits ? "" : other_format();
    check<FileError>(other.empty(), loading_, ": not a safetensors file; ", other);
    check<FileError>(length <= format_header_bytes, loading_, ": not a safetensors file: a header of ", length,
                     " bytes; the format allows ", format_header_bytes);
    check<FileError>(length <= limits.header_bytes, loading_, ": a header of ", length, " bytes; the limit is ",
                     limits.header_bytes, " (ReaderLimits::header_bytes)");
    check<FileError>(length <= size_ - prefix.size(), loading_, ": cut short: the header should have ", length,
                     " bytes, but the file has ", size_, " in all");
    data_begin_ = prefix.size() + length;

    std::string text(static_cast<std::size_t>(length), '\0');
    read_at(prefix.size(), std::as_writable_bytes(std::span(text)), nullptr);
    header_ = parse_safetensors_header(text, size_ - data_begin_, loading_, limits);

    by_name_.reserve(header_.entries.size());
    for (const TensorEntry& entry : header_.entries) by_name_.push_back(&entry);
    std::sort(by_name_.begin(), by_name_.end(),
              [](const TensorEntry* a, const TensorEntry* b) { return a->name < b->name; });
  }

  /// What the file is instead of a safetensors file, if that is known.
  [[gnu::cold]] std::string other_format() const {
    std::vector<std::byte> begin(static_cast<std::size_t>(std::min<std::uint64_t>(size_, detail::foreign_bytes)));
    read_at(0, begin, nullptr);
    return detail::what_file_is(begin, path_);
  }

  void read_at(std::uint64_t offset, std::span<std::byte> to, const TensorEntry* tensor) const {
    if (!file_.is_open()) {
      if (!to.empty()) std::memcpy(to.data(), memory_.data() + offset, to.size());
      return;
    }
    const auto what = tensor == nullptr ? "the header" : cat("tensor ", Quoted{tensor->name});
    file_.read(offset, to, loading_, ": reading ", what);
  }

  std::string path_, loading_;
  RegularFile file_;
  std::span<const std::byte> memory_;
  std::uint64_t size_ = 0;
  std::uint64_t data_begin_ = 0;
  SafetensorsHeader header_;
  std::vector<const TensorEntry*> by_name_;
};

namespace detail {

/// Throws FileError where bytes that are to become bools are neither 0 nor 1: a program that takes others for a bool
/// may do anything.
inline void check_bools(const SafetensorsReader& file, const TensorEntry& entry, std::span<const std::byte> bytes) {
  const auto is_odd = [](std::byte value) { return value > std::byte{1}; };
  check<FileError>(entry.dtype != FileDType::boolean || std::none_of(bytes.begin(), bytes.end(), is_odd), "loading ",
                   file.path(), ": tensor ", Quoted{entry.name}, ": a BOOL is neither 0 nor 1");
}

}  // namespace detail

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_READER_HPP

namespace chorus::io::detail {

/// All names of a model's tensors; tied ones have several.
using NameSet = std::set<std::string, std::less<>>;

/// Turns names of a file into the model's: by the user's function, then without what PyTorch's wrappers put in.
class FileNames {
 public:
  FileNames(const SafetensorsReader& file, const NameSet& model, const Rename& rename)
      : model_(model), rename_(rename) {
    std::vector<std::string> names;
    for (const TensorEntry& entry : file.entries())
      if (auto name = own_name(entry.name); !name.empty()) names.push_back(std::move(name));
    // DataParallel's and DistributedDataParallel's word may be a model's own, too: it has to stand before all names.
    const auto is_wrapped = [&](const std::string& name) {
      return name.starts_with(parallel) && !model.contains(name);
    };
    for (; !names.empty() && std::ranges::all_of(names, is_wrapped); ++wrappers_)
      for (auto& name : names) name.erase(0, parallel.size());
  }

  /// The model's name for it; "" where it is to be left out.
  std::string operator()(std::string_view in_file) const {
    auto name = own_name(in_file);
    for (int i = 0; i < wrappers_ && name.starts_with(parallel); ++i) name.erase(0, parallel.size());
    return name;
  }

 private:
  static constexpr std::string_view parallel = "module.";

  std::string own_name(std::string_view in_file) const {
    if (in_file.starts_with(training_prefix)) return {};
    std::string name = rename_ ? rename_(in_file) : std::string(in_file);
    if (model_.contains(name)) return name;
    // No model calls a member so: torch.compile, FSDP, activation checkpointing, Lightning and DeepSpeed do.
    for (const std::string_view wrapper :
         {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module."})
      for (std::size_t at = 0; (at = name.find(wrapper, at)) != name.npos;)
        if (at == 0 || name[at - 1] == '.')
          name.erase(at, wrapper.size());
        else
          ++at;
    return name;
  }

  const NameSet& model_;
  const Rename& rename_;
  int wrappers_ = 0;
};

/// The tensors of a file by the names that the model has for them.
class FileTensors {
 public:
  /// Throws FileError where two tensors get one name.
  FileTensors(const SafetensorsReader& file, const NameSet& model, const Rename& rename) {
    const FileNames model_name(file, model, rename);
    for (const TensorEntry& entry : file.entries()) {
      const auto name = model_name(entry.name);
      if (name.empty() && !entry.name.empty()) continue;  // left out
      if (!model.contains(name)) {
        unexpected_.push_back({name, entry.name});
        continue;
      }
      const auto [there, is_new] = tensors_.emplace(name, &entry);
      check<FileError>(is_new, "loading ", file.path(), ": the tensors ", Quoted{there->second->name}, " and ",
                       Quoted{entry.name}, " both stand for the model's ", Quoted{name},
                       "; a LoadOptions::rename that gives \"\" for one of them leaves it out");
    }
    // Python's save_model writes tied tensors once, and notes their other names with the one that is there.
    for (const auto& [name, other] : file.metadata())
      if (const TensorEntry* entry = file.find(other); entry != nullptr && !model_name(name).empty())
        tensors_.emplace(model_name(name), entry);
  }

  /// The tensor of that name, or nullptr.
  const TensorEntry* find(std::string_view name) const {
    const auto found = tensors_.find(name);
    return found != tensors_.end() ? found->second : nullptr;
  }
  struct Unexpected {
    std::string name, in_file;
  };
  /// Those that the model has not.
  const std::vector<Unexpected>& unexpected() const { return unexpected_; }

 private:
  std::map<std::string, const TensorEntry*, std::less<>> tensors_;
  std::vector<Unexpected> unexpected_;
};

}  // namespace chorus::io::detail
#endif  // CHORUS_SINGLE_CHORUS_IO_FILE_NAMES_HPP

namespace chorus::io {

namespace detail {

/// A tensor of a model: all names that it has there, and what it takes.
struct Destination {
  std::vector<std::string> names;
  DType dtype{};
  std::vector<Index> shape;
};

/// Which tensors of a file fill a model, and what doesn't fit.
struct LoadPlan {
  std::vector<std::vector<const TensorEntry*>> sources;  ///< of each destination, to which all of them are to be equal
  LoadReport report;
};

/// PyTorch takes one number for a scalar, too.
inline bool same_shape(std::span<const Index> file, std::span<const Index> model) {
  return std::ranges::equal(file, model) || (model.empty() && file.size() == 1 && file[0] == 1);
}

/// What a user may have meant where names or shapes don't fit.
[[gnu::cold]] inline std::string hints_for(const SafetensorsReader& file, const LoadReport& report,
                                           const FileTensors& tensors) {
  std::string hints;
  NameSet missing(report.missing.begin(), report.missing.end());
  const auto count = [&](const auto& is_found) {
    return std::ranges::count_if(tensors.unexpected(), [&](const auto& tensor) { return is_found(tensor.name); });
  };
  const auto hint = [&](const std::string& what, std::ptrdiff_t fitting) {
    hints += cat("; {.rename = io::", what, "} makes ", fitting, fitting == 1 ? " name fit" : " names fit");
  };
  for (const auto& [name, in_file] : tensors.unexpected()) {
    // "model.fc.weight" for "fc.weight", or the other way round?
    if (const auto dot = name.find('.'); dot != name.npos)
      for (auto end = dot + 1; end != 0 && end < name.size(); end = name.find('.', end) + 1)
        if (missing.contains(name.substr(end))) {
          const auto prefix = name.substr(0, end);
          hint(cat("without_prefix(", Quoted{prefix}, ")"), count([&](const std::string& other) {
                 return other.starts_with(prefix) && missing.contains(other.substr(end));
               }));
          break;
        }
    for (const auto& wanted : missing)
      if (hints.empty() && wanted.ends_with("." + name)) {
        const auto prefix = wanted.substr(0, wanted.size() - name.size());
        hint(cat("with_prefix(", Quoted{prefix}, ")"),
             count([&](const std::string& other) { return missing.contains(prefix + other); }));
      }
    if (!hints.empty()) break;
  }
  if (hints.empty() && !report.missing.empty() && !report.unexpected.empty())
    hints = "; a function as {.rename = ...} turns names of the file into the model's";
  for (const auto& x : report.mismatched) {
    if (!convertible(x.got, x.expected) && same_shape(x.got_shape, x.expected_shape))
      hints += cat("; ", x.got, " is not converted to ", x.expected, " (floating-point numbers are to each other, ",
                   "integers to each other): convert ", x.name, " in Python, if that is what it means");
    else if (x.got_shape.size() == 2 && x.expected_shape.size() == 2 && x.got_shape[0] == x.expected_shape[1] &&
             x.got_shape[1] == x.expected_shape[0])
      hints += cat("; ", x.name, " is transposed there: Keras, Flax and GPT-2's Conv1D keep [inputs, outputs], ",
                   "PyTorch and chorus [outputs, inputs]: transpose it in Python (also square ones, which fit)");
    else
      continue;
    break;
  }
  if (const auto of = file.path().rfind("-of-"); !report.missing.empty() && of != std::string::npos)
    hints += cat("; the name ", Quoted{file.path().substr(file.path().rfind('/') + 1)},
                 " says that the model lies in several files: put them together in Python");
  return hints;
}

/// Finds the file's tensors for each destination.
inline LoadPlan plan_load(const SafetensorsReader& file, const std::vector<Destination>& model,
                          const LoadOptions& options) {
  LoadPlan plan;
  NameSet names;
  for (const auto& to : model) names.insert(to.names.begin(), to.names.end());
  const FileTensors tensors(file, names, options.rename);
  bool any = false;
  for (const auto& to : model) {
    auto& sources = plan.sources.emplace_back();
    for (const auto& name : to.names)
      if (const TensorEntry* entry = tensors.find(name)) sources.push_back(entry);
    const auto& name = to.names.front();
    const auto misfit = std::ranges::find_if(sources, [&](const TensorEntry* entry) {
      return !convertible(entry->dtype, to.dtype) || !same_shape(entry->shape, to.shape);
    });
    // Batch norm of PyTorch before 0.4.1 counted no batches: as there, the layer keeps its own count.
    constexpr std::string_view counted = "num_batches_tracked";
    const bool may_lack = name.ends_with(counted) && to.dtype == DType::i64 && to.shape.empty() &&
                          tensors.find(name.substr(0, name.size() - counted.size()) + "running_mean") != nullptr;
    if (sources.empty()) {
      if (!may_lack) plan.report.missing.push_back(name);
    } else if (misfit != sources.end()) {
      plan.report.mismatched.push_back({name, to.dtype, to.shape, (*misfit)->dtype, (*misfit)->shape});
      sources.clear();
    } else {
      any = true;
    }
  }
  for (const auto& tensor : tensors.unexpected()) plan.report.unexpected.push_back(tensor.in_file);
  if (plan.report.complete()) return plan;
  const auto hints = hints_for(file, plan.report, tensors);
  check<FileError>(any || model.empty(), "loading ", file.path(),
                   ": the file doesn't fit the model: ", "none of its tensors does; ", plan.report, hints);
  check<FileError>(!options.strict, "loading ", file.path(), ": the file doesn't fit the model; ", plan.report, hints,
                   "; with {.strict = false} io::load fills what fits and returns the rest in a report");
  return plan;
}

/// The numbers of the file for a destination. Throws FileError where one can't be had in its type, and where tensors of
/// the file that are one in the model have different numbers.
inline std::vector<std::byte> numbers_for(const SafetensorsReader& file, const Destination& to,
                                          const std::vector<const TensorEntry*>& sources) {
  std::vector<std::byte> first;
  for (const TensorEntry* entry : sources) {
    std::vector<std::byte> numbers(entry->bytes);
    file.read(*entry, numbers);
    check_bools(file, *entry, numbers);
    const auto who = cat("loading ", file.path(), ": tensor ", Quoted{entry->name});
    numbers = converted(std::move(numbers), *dtype_of_tensors(entry->dtype), to.dtype, who);
    if (entry == sources.front())
      first = std::move(numbers);
    else
      check<FileError>(numbers == first, who, " has other numbers than ", Quoted{sources.front()->name},
                       ", and the model's ", to.names[0], " is to be both of them, for they are tied there; a ",
                       "LoadOptions::rename that gives \"\" for one of them leaves it out");
  }
  return first;
}

/// The tensors at `places` with all of their names.
template <Device D>
std::vector<Destination> destinations(nn::Module& model, const std::vector<TensorPlace<D>>& places) {
  const auto names = all_names(model);
  std::vector<Destination> out;
  for (const auto& place : places) out.push_back({names.at(place.name), place.dtype, place.shape});
  return out;
}

/// All tensors of a model, whole also where this rank has a part.
template <Device D>
std::vector<Destination> whole_destinations(nn::Module& model) {
  const auto names = all_names(model);
  std::vector<Destination> out;
  for (const auto& named : nn::named_parameters<D>(model))
    out.push_back({names.at(named.name), named.parameter->dtype(),
                   whole_shape(named.parameter->extents(), named.parameter->part().get())});
  for (const auto& named : nn::named_buffers<D>(model)) {
    const auto extents = named.buffer->extents();
    out.push_back({names.at(named.name), named.buffer->dtype(), {extents.begin(), extents.end()}});
  }
  return out;
}

template <Device D>
LoadReport load_model(nn::Module& model, const std::string& path, const LoadOptions& options) {
  const SafetensorsReader file(path);
  const auto places = model_places<D>(model);
  for (const auto& place : places) check_whole(place);
  const auto wanted = destinations(model, places);
  auto plan = plan_load(file, wanted, options);
  std::vector<std::vector<std::byte>> numbers;  // all are read before one is stored
  for (std::size_t i = 0; i < wanted.size(); ++i)
    numbers.push_back(numbers_for(file, wanted[i], plan.sources[i]));
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (!plan.sources[i].empty()) places[i].fill(numbers[i].data());
  say_changed<D>(model);
  return std::move(plan.report);
}

/// Of a policy whose ranks have parts of the model each takes its own. All ranks call it.
template <class Net>
LoadReport load_parts(Net& net, const std::string& path, const LoadOptions& options) {
  using D = typename Net::device_type;
  const auto places = places_in_parts<D>(net);
  const auto wanted = whole_destinations<D>(net.module());
  const auto place_of = [&](const Destination& tensor) {
    return std::find_if(places.begin(), places.end(),
                        [&](const auto& place) { return place.name == tensor.names.front(); });
  };
  std::vector<std::vector<std::byte>> numbers(wanted.size());
  LoadReport report;
  const auto read = [&] {
    const SafetensorsReader file(path);
    auto plan = plan_load(file, wanted, options);
    for (std::size_t i = 0; i < wanted.size(); ++i)
      if (const auto place = place_of(wanted[i]); place != places.end() && !plan.sources[i].empty())
        numbers[i] = place->own_of(numbers_for(file, wanted[i], plan.sources[i]));
    report = std::move(plan.report);
  };
  on_all_ranks(net.communicator(), path, read, "load it");
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (!numbers[i].empty()) place_of(wanted[i])->fill(numbers[i].data());
  say_changed<D>(net.module());
  return report;
}

}  // namespace detail

/// Fills all parameters and buffers of `model` from a file. Numbers are converted to the model's type: floating-point
/// ones of any type to each other, integers and bools to each other. A file of PyTorch fits as it does there: also one
/// whose batch norm counted no batches (the layer keeps its own count), and with one name for tied tensors, as
/// safetensors' `save_model` writes it, or all. Names that PyTorch's wrappers have made are those of what was wrapped:
/// `module.` (DataParallel, DistributedDataParallel) before all names, and anywhere `_orig_mod.` (torch.compile),
/// `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.` and `_forward_module.`; unless the model has them, too.
///
/// Returns what didn't fit: nothing, unless `options.strict` is false. Throws FileError, and changes nothing, where the
/// file is damaged or of another format; where its names, shapes or kinds of numbers are not the model's (one message
/// names all that don't fit), or, without `strict`, no tensor fits at all; where a number is beyond the range of the
/// model's type; and where tensors that are one in the model have different numbers in the file.
///
/// Copies on other devices, and in 16 bits, follow. Of a policy it takes the net, under every one, and all ranks call
/// it: each reads the file, and where it has parts of the model it takes these. FileError on all ranks, then, where one
/// of them fails.
template <class Model>
LoadReport load(Model& model, const std::string& path, const LoadOptions& options) {
  if constexpr (std::is_base_of_v<nn::Module, Model>) {
    return detail::load_model<typename Model::device_type>(model, path, options);
  } else {
    static_assert(detail::IsNet<Model>, "io::load fills a model, or that of a policy");
    if constexpr (detail::keeps_parts<Model>)
      return detail::load_parts(model, path, options);
    else
      return load(model.module(), path, options);
  }
}
template <class Model>
LoadReport load(Model& model, const std::string& path) {
  return load(model, path, LoadOptions{});
}

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_LOAD_MODEL_HPP

// <chorus/io/ranks_own.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_RANKS_OWN_HPP
#define CHORUS_SINGLE_CHORUS_IO_RANKS_OWN_HPP
/// What each rank has of its own in a checkpoint: rank 0's tensors have plain names, those of the others a prefix.

namespace chorus::io::detail {

inline constexpr std::string_view hook_prefix = "training/hook/", rank_prefix = "training/rank";

/// Whether a tensor of a file is a communication hook's or another rank's than 0.
inline bool is_ranks_own(std::string_view name) {
  return name.starts_with(hook_prefix) || name.starts_with(rank_prefix);
}

/// What `name` is called of rank `rank`: `training/rank1/hook/rest.fc1.weight`, `training/rank1/model/fc1.weight`.
inline std::string name_of_rank(int rank, std::string_view name) {
  if (rank == 0) return std::string(name);
  const bool of_model = !name.starts_with(training_prefix);
  return cat(rank_prefix, rank, '/', of_model ? "model/" : "", of_model ? name : name.substr(training_prefix.size()));
}

/// The numbers that `x` keeps from step to step, such as a loss scale; none where it keeps tensors.
template <class X>
auto numbers_of(const X& x) {
  if constexpr (requires { x.kept(); })
    return x.kept();
  else
    return std::array<double, 0>{};
}

/// Where that lies which `x` keeps: its tensors, or `numbers`, which are taken from it and given back to it.
template <Device D, class X, std::size_t N>
std::vector<TensorPlace<D>> places_of(X& x, std::array<double, N>& numbers) {
  std::vector<TensorPlace<D>> places;
  if constexpr (N > 0)
    places.push_back({cat(training_prefix, X::kept_as), DType::f64, {Index{N}}, {}, numbers.data()});
  else
    for (auto& tensor : x.state()) {
      const auto device = tensor.on_host ? std::nullopt : std::optional<D>(x.device());
      places.push_back({.name = cat(training_prefix, tensor.name),
                        .dtype = tensor.dtype,
                        .shape = std::move(tensor.shape),
                        .device = device,
                        .data = tensor.data,
                        .part_begin = tensor.part_begin,
                        .part_count = tensor.part_count,
                        .part = tensor.part});
    }
  return places;
}

/// Whether each rank may have a model and an optimizer of its own.
template <class Net>
constexpr bool ranks_may_differ = requires {
  requires chorus::detail::AccessTo<Net>::ranks_may_differ;
};
/// Whether all ranks take part when a checkpoint is written, for one of these, or since a communication hook remembers
/// something.
template <class Net>
constexpr bool all_ranks_save = keeps_parts<Net> || ranks_may_differ<Net> || requires {
  requires chorus::detail::AccessTo<Net>::hook_remembers;
};

/// A number that files with different contents hardly share.
[[gnu::cold]] inline std::size_t fingerprint(const SafetensorsReader& file) {
  std::size_t all = 0;
  const auto add = [&](std::string_view text) { all = all * 31 + std::hash<std::string_view>()(text); };
  for (const auto& [key, value] : file.metadata()) add(key), add(value);
  std::string bytes;
  for (const TensorEntry& entry : file.entries()) {
    bytes.resize(entry.bytes);
    file.read(entry, std::as_writable_bytes(std::span(bytes)));
    add(entry.name), add(bytes);
  }
  return all;
}

/// What a rank says of its file before it loads it.
struct Opened {
  std::int64_t found = 0, step = 0, fingerprint = 0, seed = 0;  // the seed is the net's
};

/// Throws FileError where a rank, but not each, has no file, or one with other contents than rank 0.
[[gnu::cold]] inline void check_same_file(const std::string& path, const std::vector<Opened>& ranks,
                                          const std::string& why_not) {
  std::string without;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].found == 0) without += cat(without.empty() ? "" : ", ", rank);
  const bool nobody = std::none_of(ranks.begin(), ranks.end(), [](const Opened& rank) { return rank.found != 0; });
  check<FileError>(!nobody, why_not);
  check<FileError>(without.empty(), "loading ", path, ": rank ", without, " can't read the file, as others can",
                   why_not.empty() ? "" : cat(" (", why_not, ")"), ": all ranks have to read the same");
  for (std::size_t rank = 1; rank < ranks.size(); ++rank)
    check<FileError>(ranks[rank].step == ranks[0].step && ranks[rank].fingerprint == ranks[0].fingerprint, "loading ",
                     path, ": rank ", rank, " has another file, of step ", ranks[rank].step, ", than rank 0, of step ",
                     ranks[0].step, ": all ranks have to read the same");
}

/// A number in the file's metadata, from 0 to `most`. Throws FileError where there is none.
inline std::int64_t number_in(const SafetensorsReader& file, const std::string& key,
                              std::int64_t most = std::int64_t{1} << 53) {
  const auto found = file.metadata().find(key);
  check<FileError>(found != file.metadata().end(), "resuming from ", file.path(), ": the file holds a model, but no ",
                   key, ": it is not a checkpoint of a training run (io::load fills a model from it)");
  std::int64_t value = 0;
  const auto& text = found->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check<FileError>(error == std::errc{} && end == text.data() + text.size() && value >= 0 && value <= most,
                   "resuming from ", file.path(), ": ", key, " is ", Quoted{text}, ", expected a number from 0 to ",
                   most);
  return value;
}

inline constexpr const char* canonical_shares_key = "training/canonical_shares";

/// Throws UsageError where the net adds up over samples in another way than the file's run.
[[gnu::cold]] inline void check_same_shares(const SafetensorsReader& file, int shares) {
  const auto found = file.metadata().find(canonical_shares_key);
  const bool has = found != file.metadata().end();  // that of a run without any has not
  const auto of_run = has ? number_in(file, canonical_shares_key, most_canonical_shares) : 0;
  check<UsageError>(of_run == shares, "resuming from ", file.path(), ": expected the run's canonical_shares, ", of_run,
                    of_run == 0 ? " (none)" : "", ", got ", shares, shares == 0 ? " (none)" : "",
                    ": sums over samples would be rounded in another way than in either run; io::load takes the model "
                    "alone, for a new run");
}

/// Opens the file, of which `step_in(file)` gives the step. Throws FileError on all ranks where one of them can't, or
/// they have files with different contents, and UsageError where a rank's net has another seed, or another number of
/// canonical shares, than the file's run.
template <class Net, class StepIn>
[[gnu::cold]] SafetensorsReader open_on_all_ranks(const std::string& path, Net& net, const StepIn& step_in) {
  std::optional<SafetensorsReader> file;
  std::vector<Opened> ranks(1);
  Opened& own = ranks[0];
  own.seed = static_cast<std::int64_t>(net.seed());
  const auto open = [&] { own.step = step_in(file.emplace(path)); };
  if constexpr (requires { net.communicator().rank(); }) {
    if (auto& communicator = net.communicator(); communicator.size() > 1) {
      std::string why_not;
      try {
        open();
        own.fingerprint = static_cast<std::int64_t>(fingerprint(*file));
        own.found = 1;
      } catch (const FileError& error) {
        why_not = error.what();
      }
      const std::array mine{own.found, own.step, own.fingerprint, own.seed};
      std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(communicator.size()));
      communicator.all_gather(std::span<const std::int64_t>(mine), std::span<std::int64_t>(all), {});
      ranks.clear();
      for (std::size_t at = 0; at < all.size(); at += mine.size())
        ranks.push_back({all[at], all[at + 1], all[at + 2], all[at + 3]});
      check_same_file(path, ranks, why_not);
    }
  }
  if (!file) open();
  if (const auto seed = file->metadata().find("training/seed"); seed != file->metadata().end())
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      check<UsageError>(seed->second == cat(static_cast<std::uint64_t>(ranks[rank].seed)), "resuming from ", path,
                        ": expected the run's seed, ", printable(seed->second),
                        ", for dropout and samplers follow it, got ",
                        static_cast<std::uint64_t>(ranks[rank].seed), ranks.size() > 1 ? cat(" on rank ", rank) : "");
  check_same_shares(*file, net.canonical_shares());
  return std::move(*file);
}

/// What keeps numbers beside the model and the optimizer: a net's hook, or, where it has none, the net.
template <class Net>
auto& keeper_of(Net& net) {
  if constexpr (requires { net.hook(); })
    return net.hook();
  else
    return net;
}

/// Adds `own` of all other ranks to rank 0's file, one rank after the other. All ranks call it.
template <Device D, class Communicator>
void add_of_ranks(Outgoing& out, Communicator& communicator, const std::vector<TensorPlace<D>>& own) {
  std::size_t bytes = 0;
  for (const auto& tensor : own) bytes += tensor.bytes();
  // No other call has this form: where other ranks are in another one, that is found out here.
  const std::array<std::int64_t, 5> mine{'s', 'a', 'v', static_cast<std::int64_t>(own.size()),
                                         static_cast<std::int64_t>(bytes)};
  std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(std::span<const std::int64_t>(mine), std::span<std::int64_t>(all), {});
  for (std::size_t i = 0; i < all.size(); ++i)
    check<CommError>(all[i] == mine[i % mine.size()], "rank ", i / mine.size(), " has other tensors than rank ",
                     communicator.rank());
  std::vector<std::uint8_t> message(bytes);
  if (communicator.rank() != 0) {
    std::uint8_t* to = message.data();
    for (const auto& tensor : own) {
      tensor.copy_to(to);
      to += tensor.bytes();
    }
    return communicator.send(std::span<const std::uint8_t>(message), 0, {});
  }
  for (int rank = 1; rank < communicator.size(); ++rank) {
    communicator.recv(std::span<std::uint8_t>(message), rank, {});
    const std::uint8_t* from = message.data();
    for (const auto& tensor : own) {
      out.add(name_of_rank(rank, tensor.name), tensor,
              [&](std::byte* to) { std::copy_n(reinterpret_cast<const std::byte*>(from), tensor.bytes(), to); });
      from += tensor.bytes();
    }
  }
}

/// Adds what a hook or the net itself remembers, of all ranks, and `places` of all other ranks where they differ.
/// Returns whether this is the rank that writes. All ranks call it.
template <Device D, class Net>
bool add_ranks_own(Outgoing& out, Net& net, const std::vector<TensorPlace<D>>& places) {
  const auto device = net.flat_parameters().entries().front().parameter().where();
  std::vector<TensorPlace<D>> own;
  auto access = chorus::detail::access_to(net);
  if constexpr (requires { access.hook_state(); })
    for (auto& tensor : access.hook_state())
      own.push_back({cat(hook_prefix, tensor.name), tensor.dtype, std::move(tensor.shape),
                     tensor.on_host ? std::nullopt : std::optional<D>(device), tensor.data});
  auto& keeper = keeper_of(net);
  auto numbers = numbers_of(keeper);
  if constexpr (numbers.size() > 0)
    own.push_back({cat(hook_prefix, keeper.kept_as), DType::f64, {Index{numbers.size()}}, {}, numbers.data()});
  for (const auto& tensor : own) out.add(tensor);
  if (access.ranks_differ()) own.insert(own.end(), places.begin(), places.end());
  try {
    add_of_ranks(out, net.communicator(), own);
  } catch (const CommError& error) {
    fail<CommError>(
        "save_checkpoint: under LocalSgd, or a communication hook that remembers something, all ranks call it: ",
        error.what());
  }
  return net.communicator().rank() == 0;
}

/// Where ranks had tensors of their own: takes the one of this rank, if there are as many ranks as there were and
/// `each_its_own`, else the mean of all.
template <Device D, class Net>
void choose_among_ranks(const SafetensorsReader& file, TensorPlace<D>& tensor, [[maybe_unused]] Net& net,
                        [[maybe_unused]] bool each_its_own) {
  std::vector<std::string> others;
  for (int rank = 1; file.find(name_of_rank(rank, tensor.name)) != nullptr; ++rank)
    others.push_back(name_of_rank(rank, tensor.name));
  if (others.empty()) return;
  if constexpr (requires { net.communicator().rank(); })
    if (each_its_own && static_cast<int>(others.size()) + 1 == net.communicator().size()) {
      tensor.name = name_of_rank(net.communicator().rank(), tensor.name);
      return;
    }
  tensor.mean_with = std::move(others);
}

/// What a hook or the net itself remembers, on its way from a file; nothing where none does.
template <Device D, class Net>
class HookReading {
 public:
  /// Adds to `wanted` what the file has of it.
  HookReading(const SafetensorsReader& file, Net& net, std::vector<TensorPlace<D>>& wanted) {
    if constexpr (has_tensors) {
      const auto known = chorus::detail::access_to(net).hook_state(true);
      for (const TensorEntry& entry : file.entries()) {
        const auto name = entry.name.substr(std::min(hook_prefix.size(), entry.name.size()));
        if (!entry.name.starts_with(hook_prefix) || name.find('.') == name.npos) continue;
        // Of a parameter that is frozen now the file knows the shape; the type is the parameter's.
        optim::StateTensor tensor{name, entry.dtype == FileDType::f64 ? DType::f64 : DType::f32, entry.shape, {}, true};
        const auto parameter = name.substr(name.find('.') + 1);
        for (const auto& one : net.flat_parameters().entries())
          if (one.named.name == parameter) tensor.dtype = one.parameter().dtype();
        for (const auto& one : known)
          if (one.name == name) tensor = {name, one.dtype, one.shape, {}, true};
        bytes_.emplace_back(static_cast<std::size_t>(numel(tensor.shape)) * size_of(tensor.dtype));
        tensor.data = bytes_.back().data();
        wanted.push_back({entry.name, tensor.dtype, tensor.shape, {}, tensor.data});
        choose_among_ranks(file, wanted.back(), net, true);
        tensors_.push_back(std::move(tensor));
      }
    }
    numbers_.fill(0);
    if constexpr (numbers > 0)
      if (const auto name = cat(hook_prefix, keeper_of(net).kept_as); file.find(name) != nullptr) {
        wanted.push_back({name, DType::f64, {Index{numbers}}, {}, numbers_.data()});
        choose_among_ranks(file, wanted.back(), net, true);
      }
  }
  HookReading(const HookReading&) = delete;
  HookReading& operator=(const HookReading&) = delete;

  /// After the order of parameters.
  void give(Net& net) const {
    if constexpr (has_tensors) chorus::detail::access_to(net).set_hook_state(tensors_);
    if constexpr (numbers > 0) keeper_of(net).keep(numbers_);
  }

 private:
  using Numbers = decltype(numbers_of(keeper_of(std::declval<Net&>())));
  static constexpr std::size_t numbers = std::tuple_size_v<Numbers>;
  static constexpr bool has_tensors =
      all_ranks_save<Net> && requires(Net& net) { chorus::detail::access_to(net).hook_state(true); };

  std::vector<optim::StateTensor> tensors_;
  std::vector<std::vector<std::byte>> bytes_;
  Numbers numbers_;
};

}  // namespace chorus::io::detail
#endif  // CHORUS_SINGLE_CHORUS_IO_RANKS_OWN_HPP

namespace chorus::io {

/// How far a run has come.
struct TrainingPosition {
  std::int64_t epoch = 0;  ///< epochs that are complete
  std::int64_t batch = 0;  ///< batches of the next one that are done
  std::int64_t step = 0;   ///< optimizer steps in all
};

namespace detail {

/// Names, one a line, as they are in the file's metadata.
inline std::string lines_of(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += name + "\n";
  return text;
}
inline std::vector<std::string> lines_in(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const auto end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}
inline std::vector<std::string> lines_in(const SafetensorsReader& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  return lines_in(found != file.metadata().end() ? std::string_view(found->second) : std::string_view());
}

/// The model's tensors, and those that `kept` have, optimizers and others: where they lie, or `numbers`, which are
/// taken from them and given back.
template <Device D, class Net, class Numbers, class... Kept>
std::vector<TensorPlace<D>> all_places(Net& net, Numbers& numbers, Kept&... kept) {
  auto all = [&] {
    if constexpr (keeps_parts<Net>)
      return places_in_parts<D>(net);
    else
      return model_places<D>(net.module());
  }();
  const auto add = [&](auto& x, auto& its_numbers) {
    for (auto& place : places_of<D>(x, its_numbers)) all.push_back(std::move(place));
  };
  std::apply([&](auto&... each) { (add(kept, each), ...); }, numbers);
  if constexpr (keeps_parts<Net>) choose_writers(net, all);
  return all;
}

/// Reads what is here of a tensor.
template <Device D>
std::vector<std::byte> read_own(const SafetensorsReader& file, const TensorEntry& entry, const TensorPlace<D>& place) {
  std::vector<std::byte> numbers(place.bytes());
  place.for_runs([&](std::size_t in_whole, std::size_t here, std::size_t count) {
    file.read(entry, std::span(numbers).subspan(here, count), in_whole);
  });
  return numbers;
}

/// The texts of all ranks of a policy under which they have different tensors, each once.
template <class Net>
std::vector<std::string> of_all_ranks(Net& net, const std::vector<std::string>& own) {
  if constexpr (!keeps_parts<Net>) {
    return own;
  } else {
    std::vector<std::string> all;
    for (const auto& text : comm::all_gather_object(net.communicator(), lines_of(own)))
      for (const auto& line : lines_in(text))
        if (std::find(all.begin(), all.end(), line) == all.end()) all.push_back(line);
    return all;
  }
}

/// Throws FileError where a number that the host counts with is none that it can have kept.
template <class... Kept, Device D>
void check_kept(const SafetensorsReader& file, const TensorPlace<D>& place, std::span<const std::byte> bytes) {
  const auto require = [&](bool sane) {
    check<FileError>(sane, "resuming from ", file.path(), ": tensor ", place.name, " has a number that makes no sense");
  };
  if (!place.device && place.dtype == DType::i64) {
    std::int64_t steps = 0;
    std::memcpy(&steps, bytes.data(), sizeof steps);
    require(steps >= 0 && steps < std::int64_t{1} << 53);
  }
  const auto ask = [&]<class X>() {
    if constexpr (requires { &X::can_keep; }) {
      decltype(std::declval<const X&>().kept()) numbers;
      if (place.device || !place.name.ends_with(cat('/', X::kept_as))) return;
      std::memcpy(numbers.data(), bytes.data(), sizeof numbers);
      require(X::can_keep(numbers));
    }
  };
  (ask.template operator()<Kept>(), ...);
}

/// An optimizer's learning rate, as what goes on from step to step.
class KeptRate {
 public:
  explicit KeptRate(optim::HasLearningRate& optimizer) : optimizer_(optimizer) {}
  static constexpr std::string_view kept_as = "lr";
  std::array<double, 1> kept() const { return {optimizer_.lr()}; }
  static bool can_keep(const std::array<double, 1>& kept) { return kept[0] >= 0; }
  void keep(const std::array<double, 1>& kept) { optimizer_.resume_lr(kept[0]); }

 private:
  optim::HasLearningRate& optimizer_;
};

/// The names of parameters, one a line, in the order in which gradients arrive. Throws FileError for one that comes
/// twice.
inline std::vector<std::string> parameter_order_in(const SafetensorsReader& file) {
  auto order = lines_in(file, "training/parameter_order");
  auto sorted = order;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end())
    fail<FileError>("resuming from ", file.path(), ": training/parameter_order has ", Quoted{*twice}, " twice");
  return order;
}

/// Makes `numbers` the mean of themselves and those of the other tensors of a file.
template <class T, Device D>
void take_mean(const SafetensorsReader& file, const TensorPlace<D>& tensor, std::span<std::byte> numbers) {
  const auto view = [](std::span<std::byte> bytes) {
    return std::span(reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T));
  };
  const auto mean = view(numbers);
  std::vector<double> sums(mean.begin(), mean.end());
  for (const auto& name : tensor.mean_with) {
    auto other = read_own(file, file.at(name), tensor);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(view(other)[i]);
  }
  for (std::size_t i = 0; i < sums.size(); ++i)
    mean[i] = static_cast<T>(sums[i] / static_cast<double>(tensor.mean_with.size() + 1));
}

/// Checks that the file has these tensors, and no others but those that `expected(name)` allows, then reads them all.
/// Throws FileError with every missing, unexpected and mismatched name, and what `judge(wanted, bytes)` throws of a
/// tensor's numbers, before anything is changed.
template <Device D, class Expected, class Judge>
void read_all(const SafetensorsReader& file, const std::vector<TensorPlace<D>>& wanted, const Expected& expected,
              const Judge& judge) {
  LoadReport report;
  const auto compare = [&](const TensorPlace<D>& tensor, const std::string& name) {
    const TensorEntry* entry = file.find(name);
    if (entry == nullptr)
      report.missing.push_back(name);
    else if (entry->dtype != file_dtype(tensor.dtype) || entry->shape != tensor.whole_shape())
      report.mismatched.push_back({name, tensor.dtype, tensor.whole_shape(), entry->dtype, entry->shape});
  };
  for (const auto& tensor : wanted) {
    compare(tensor, tensor.name);
    for (const auto& name : tensor.mean_with) compare(tensor, name);
  }
  for (const TensorEntry& entry : file.entries())
    if (!expected(entry.name)) report.unexpected.push_back(entry.name);
  check<FileError>(report.complete(), "loading ", file.path(), ": the file doesn't fit the model; ", report,
                   "; resuming needs the model and the optimizer that were saved (io::load takes the model alone)");

  std::vector<std::vector<std::byte>> numbers;  // all are read before one is stored
  for (const auto& tensor : wanted) {
    const TensorEntry& entry = file.at(tensor.name);
    numbers.push_back(read_own(file, entry, tensor));
    check_bools(file, entry, numbers.back());
    if (!tensor.mean_with.empty() && tensor.dtype == DType::f32) take_mean<float>(file, tensor, numbers.back());
    if (!tensor.mean_with.empty() && tensor.dtype == DType::f64) take_mean<double>(file, tensor, numbers.back());
    judge(tensor, std::span<const std::byte>(numbers.back()));
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i].fill(numbers[i].data());
}

}  // namespace detail

/// Whether all ranks call `save_checkpoint` for this net; else rank 0 alone, but for a ShardedOptimizer.
template <class Net>
constexpr bool all_ranks_save = detail::all_ranks_save<Net>;

/// Writes model, optimizer, learning rate and position to one file, atomically. The model's tensors have their own
/// names, so the file is also a model's file. One process calls it, under ParameterServer the server, whose workers
/// return at once; with a ShardedOptimizer, under LocalSgd, or under a communication hook that remembers something, all
/// do, and rank 0 writes; where ranks have parts of the model (FullyShardedDataParallel, TensorParallel, Pipeline,
/// Mesh) all do, and each writes its parts into the one file. The file is the same for the plain, the fused and the
/// sharded form of an optimizer. `more`: what else goes on from step to step, as GradScaler, ParameterAverage and
/// ReduceOnPlateau do; at most one of each.
/// Gradients are not in it: a checkpoint belongs between two steps. The seed is, and the number of `canonical_shares`.
///
/// What is each rank's own under a hook, such as errors to be fed back, and under LocalSgd and PostLocalSgd models,
/// optimizers and `more`, is in the file for each rank; rank 0 holds the whole file in memory for a moment. Of
/// parameters and buffers that DistributedDataParallel ignores or doesn't broadcast, rank 0's are in it, and under
/// ParameterServer the server's.
///
/// Throws FileError, and CommError where all ranks should call it and don't.
template <class Net, class Optimizer, class... More>
void save_checkpoint(Net& net, Optimizer& optimizer, const TrainingPosition& position, const std::string& path,
                     More&... more) {
  if constexpr (requires { net.is_server(); })
    if (!net.is_server()) return;
  if constexpr (requires { optimizer.gathered(net); }) {
    const auto whole = optimizer.gathered(net);
    if (detail::all_ranks_save<Net> || net.communicator().rank() == 0)
      save_checkpoint(net, *whole, position, path, more...);
  } else {
    using D = decltype(optimizer.device());
    detail::Outgoing out;
    detail::KeptRate rate(optimizer);
    std::tuple numbers{detail::numbers_of(optimizer), detail::numbers_of(rate), detail::numbers_of(more)...};
    const auto places = detail::all_places<D>(net, numbers, optimizer, rate, more...);
    if constexpr (!detail::keeps_parts<Net>) {
      for (const auto& tensor : places) out.add(tensor);
      if constexpr (detail::all_ranks_save<Net>)
        if (!detail::add_ranks_own<D>(out, net, places)) return;
    }
    Metadata metadata{{"training/epoch", cat(position.epoch)},
                      {"training/batch", cat(position.batch)},
                      {"training/step", cat(position.step)},
                      {"training/forward_passes", cat(net.forward_passes())},
                      {"training/seed", cat(net.seed())},
                      {"training/parameter_order",
                       detail::lines_of(detail::of_all_ranks(net, net.parameter_order()))}};
    if (const int shares = net.canonical_shares(); shares > 0)
      metadata.emplace(detail::canonical_shares_key, cat(shares));
    if constexpr (requires { chorus::detail::access_to(net).resting_parameters(); })
      if (const auto names = chorus::detail::access_to(net).resting_parameters(); !names.empty())
        metadata.emplace("training/resting_parameters", detail::lines_of(names));
    if constexpr (requires { chorus::detail::access_to(net).parameters_apart(); })
      metadata.emplace("training/parameters_apart",
                       detail::lines_of(chorus::detail::access_to(net).parameters_apart()));
    detail::note_tied(metadata, net.module());
    if constexpr (detail::keeps_parts<Net>)
      detail::write_in_parts(net.communicator(), path, places, metadata);
    else
      write_safetensors(path, out.views(), metadata);
  }
}

/// Restores what `save_checkpoint` wrote; every process calls it, with the same `more`. Training then goes on bit for
/// bit as it would have without the break. Where the number of ranks is another one, each takes the mean over the ranks
/// of the file of what was each one's own, so that no error that was to be fed back is lost; of models and optimizers
/// that differed so does each rank of a policy under which they never do. A communication hook takes what it knows of
/// another one's memory, and starts anew where the file has none; without a hook it is left out. The learning rate is
/// the file's, until a schedule sets it, which starts from the one that was set before. Throws FileError, and changes
/// nothing, where the file is damaged, is no checkpoint, doesn't fit, or isn't the same on all ranks; UsageError, too,
/// where the net has another seed than the run had, or other `canonical_shares`; and CommError where all ranks should
/// call it and don't.
///
/// With as many `canonical_shares` as the run had, its bits don't depend on the policy and the number of devices, nor
/// does the order matter in which parameters lie in memory. A net with another number of shares, or with none where the
/// run had some, and the other way round, would end with the bits of neither run: it is refused. A file that doesn't
/// say a number, as all of earlier versions, is one of a run without shares. `io::load` asks for no number: weights
/// alone, where a new run begins with them, go from any net to any other.
template <class Net, class Optimizer, class... More>
TrainingPosition load_checkpoint(Net& net, Optimizer& optimizer, const std::string& path, More&... more) {
  if constexpr (requires { optimizer.whole(net); }) {
    const auto whole = optimizer.whole(net);
    const auto position = load_checkpoint(net, *whole, path, more...);
    optimizer.adopt(net, *whole);
    return position;
  } else {
    using D = decltype(optimizer.device());
    TrainingPosition position;
    const auto file = detail::open_on_all_ranks(path, net, [&](const SafetensorsReader& opened) {
      position = {detail::number_in(opened, "training/epoch"), detail::number_in(opened, "training/batch"),
                  detail::number_in(opened, "training/step")};
      return position.step;
    });
    const auto passes = detail::number_in(file, "training/forward_passes", UINT32_MAX);
    const auto order = detail::parameter_order_in(file);
    detail::KeptRate rate(optimizer);
    std::tuple numbers{detail::numbers_of(optimizer), detail::numbers_of(rate), detail::numbers_of(more)...};
    auto wanted = detail::all_places<D>(net, numbers, optimizer, rate, more...);
    const auto rate_name = cat(detail::training_prefix, rate.kept_as);
    if (file.find(rate_name) == nullptr)  // earlier versions kept none
      std::erase_if(wanted, [&](const auto& tensor) { return tensor.name == rate_name; });
    std::vector<std::string> own_names;
    for (const auto& tensor : wanted) own_names.push_back(tensor.name);
    const auto all_names = detail::of_all_ranks(net, own_names);
    const std::set<std::string, std::less<>> names(all_names.begin(), all_names.end());
    for (auto& tensor : wanted) {
      detail::choose_among_ranks(file, tensor, net, detail::ranks_may_differ<Net>);
    }
    detail::HookReading<D, Net> hook(file, net, wanted);
    detail::read_all(
        file, wanted, [&](std::string_view name) { return detail::is_ranks_own(name) || names.contains(name); },
        [&](const auto& place, std::span<const std::byte> bytes) {
          detail::check_kept<detail::KeptRate, More...>(file, place, bytes);
          detail::check_kept<std::remove_cvref_t<decltype(detail::keeper_of(net))>>(file, place, bytes);
        });
    detail::say_changed<D>(net.module());
    const auto give_back = [](auto& kept, const auto& read) {
      if constexpr (requires { kept.keep(read); }) kept.keep(read);
    };
    const auto give_back_all = [&](auto&, auto& of_rate, auto&... others) {
      give_back(rate, of_rate);
      (give_back(more, others), ...);
    };
    std::apply(give_back_all, numbers);
    net.set_forward_passes(static_cast<std::uint32_t>(passes));
    if constexpr (requires { chorus::detail::access_to(net).resting_parameters(); }) {
      chorus::detail::access_to(net).set_parameter_order(order, passes > 0);
      chorus::detail::access_to(net).set_resting_parameters(detail::lines_in(file, "training/resting_parameters"));
    }
    if constexpr (requires { chorus::detail::access_to(net).parameters_apart(); })
      chorus::detail::access_to(net).set_parameters_apart(detail::lines_in(file, "training/parameters_apart"));
    hook.give(net);
    return position;
  }
}

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_CHECKPOINT_HPP

// <chorus/io/npy.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_NPY_HPP
#define CHORUS_SINGLE_CHORUS_IO_NPY_HPP
/// NumPy's files of one array, `.npy`, versions 1 to 3 of the format:
/// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

namespace chorus::io {

namespace detail {

static_assert(std::endian::native == std::endian::little, ".npy files are written little-endian");

/// What NumPy calls a dtype of tensors, without the byte order; empty for bf16, which NumPy has not.
constexpr std::string_view numpy_name(DType type) {
  constexpr std::string_view names[] = {"b1", "u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "", "f4", "f8"};
  return names[static_cast<std::size_t>(type)];
}

/// An array in a file's bytes.
struct NpyArray {
  DType dtype{};
  bool fortran_order = false;
  std::vector<Index> shape;
  std::span<const std::byte> data;
};

/// Reads the dictionary of a header: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
class NpyHeader {
 public:
  NpyHeader(std::string_view text, std::string_view who) : text_(text), who_(who) {}

  NpyArray parse() {
    NpyArray out;
    bool seen[3] = {};
    expect('{');
    while (!take('}')) {
      const std::string_view key = quoted();
      const std::size_t which = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : 3;
      check<FileError>(which < 3 && !seen[which], who_, ": the header has the key ", Quoted{key}, " ",
                       which < 3 ? "twice" : "which is unknown");
      seen[which] = true;
      expect(':');
      if (which == 0) out.dtype = dtype();
      if (which == 1) out.fortran_order = boolean();
      if (which == 2) out.shape = sizes();
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    check<FileError>(seen[0] && seen[1] && seen[2], who_, ": the header lacks 'descr', 'fortran_order' or 'shape'");
    skip();
    check<FileError>(at_ == text_.size(), who_, ": the header goes on after its dictionary");
    return out;
  }

 private:
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) { check<FileError>(take(c), who_, ": byte ", at_, " of the header: expected '", c, "'"); }
  std::string_view quoted() {
    skip();
    const char mark = at_ < text_.size() ? text_[at_] : '\0';
    check<FileError>(mark == '\'' || mark == '"', who_, ": byte ", at_, " of the header: expected a text in quotes");
    const auto end = text_.find(mark, ++at_);
    check<FileError>(end != std::string_view::npos, who_, ": the header ends in a text");
    const auto out = text_.substr(at_, end - at_);
    at_ = end + 1;
    return out;
  }
  DType dtype() {
    check<FileError>(!take('['), who_, ": structured arrays are not supported");
    const std::string_view name = quoted();
    for (std::size_t i = 0; i <= static_cast<std::size_t>(DType::f64); ++i) {
      const auto type = static_cast<DType>(i);
      const auto known = numpy_name(type);
      if (known.empty() || name.size() != 3 || name.substr(1) != known) continue;
      const bool one_byte = size_of(type) == 1;
      check<FileError>(name[0] != '>' || one_byte, who_, ": big-endian numbers (", Quoted{name}, ") are not supported");
      if (name[0] == '<' || name[0] == '=' || (one_byte && (name[0] == '|' || name[0] == '>'))) return type;
    }
    fail<FileError>(who_, ": numbers of type ", Quoted{name}, " are not supported",
                    name.ends_with('O') ? ": these are Python objects in a pickle, which can run code; in Python, "
                                          "astype(\"float32\") makes numbers of them"
                                        : "");
  }
  bool boolean() {
    skip();
    for (const bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return value;
    }
    fail<FileError>(who_, ": 'fortran_order' is neither True nor False");
  }
  std::vector<Index> sizes() {
    std::vector<Index> out;
    expect('(');
    while (!take(')')) {
      skip();
      Index size = 0;
      std::size_t digits = 0;
      for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_, ++digits) {
        check<FileError>(digits < 18, who_, ": a size in the shape is too large");
        size = 10 * size + (text_[at_] - '0');
      }
      check<FileError>(digits > 0, who_, ": byte ", at_, " of the header: expected a size");
      check<FileError>(out.size() < 8, who_, ": the shape has more than 8 axes");
      out.push_back(size);
      if (!take(',')) {
        expect(')');
        check<FileError>(out.size() > 1, who_, ": '(", out[0], ")' is no tuple");
        break;
      }
    }
    return out;
  }

  std::string_view text_, who_;
  std::size_t at_ = 0;
};

/// The array in the bytes of a .npy file. Throws FileError where they break the format.
inline NpyArray parse_npy(std::span<const std::byte> bytes, std::string_view who) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with("\x93NUMPY") || text.size() < 10)
    fail<FileError>(who, ": not a .npy file", instead_of_numpy(bytes, who));
  const int version = text[6];
  check<FileError>(version >= 1 && version <= 3 && text[7] == 0, who, ": version ", version, ".", int{text[7]},
                   " of the format is not supported");
  const std::size_t prefix = version == 1 ? 10 : 12;
  std::uint32_t length = 0;
  check<FileError>(text.size() >= prefix, who, ": the file ends in its header");
  std::memcpy(&length, bytes.data() + 8, prefix - 8);
  check<FileError>(length <= 65535 && length <= text.size() - prefix, who, ": a header of ", length,
                   " bytes in a file of ", text.size());
  NpyArray out = NpyHeader(text.substr(prefix, length), who).parse();
  out.data = bytes.subspan(prefix + length);
  std::uint64_t expected = size_of(out.dtype);
  bool empty = false;
  for (const Index size : out.shape) {
    empty = empty || size == 0;
    const auto factor = static_cast<std::uint64_t>(std::max(size, Index{1}));
    check<FileError>(expected <= (std::uint64_t{1} << 62) / factor, who, ": shape ", std::span<const Index>(out.shape),
                     " is too large");
    expected *= factor;
  }
  if (empty) expected = 0;
  check<FileError>(expected == out.data.size(), who, ": shape ", std::span<const Index>(out.shape), " of ", out.dtype,
                   " takes ", expected, " bytes, but the file has ", out.data.size());
  return out;
}

/// The array as a Tensor; throws FileError where it has another dtype or number of axes.
template <Scalar T, int Rank>
Tensor<T, Rank, Cpu> to_tensor(const NpyArray& array, std::string_view who) {
  check<FileError>(array.dtype == dtype<T> && array.shape.size() == static_cast<std::size_t>(Rank), who, ": expected ",
                   dtype<T>, " with ", Rank, " axes, got ", array.dtype, " ", std::span<const Index>(array.shape));
  const auto is_odd = [](std::byte value) { return value > std::byte{1}; };
  check<FileError>(array.dtype != DType::boolean || std::none_of(array.data.begin(), array.data.end(), is_odd), who,
                   ": a BOOL is neither 0 nor 1");
  Shape<Rank> shape{}, backwards{};
  for (std::size_t i = 0; i < shape.size(); ++i) {
    shape[i] = array.shape[array.fortran_order ? shape.size() - 1 - i : i];
    backwards[i] = static_cast<Index>(shape.size() - 1 - i);
  }
  auto out = Tensor<T, Rank, Cpu>::empty(shape);
  if (!array.data.empty()) std::memcpy(static_cast<void*>(out.data()), array.data.data(), array.data.size());
  return array.fortran_order ? contiguous(out.permute(backwards)) : out;
}

/// All that stands before an array's numbers.
inline std::string npy_header(DType type, std::span<const Index> shape, std::string_view who) {
  check<UsageError>(!numpy_name(type).empty(), who, ": NumPy has no ", type, "; convert to another dtype first");
  std::string text =
      cat("{'descr': '", size_of(type) == 1 ? "|" : "<", numpy_name(type), "', 'fortran_order': False, 'shape': (");
  for (std::size_t i = 0; i < shape.size(); ++i) text += cat(i == 0 ? "" : " ", shape[i], ",");
  if (shape.size() > 1) text.pop_back();
  text += "), }";
  text.append(63 - (10 + text.size()) % 64, ' ');
  text += '\n';
  const auto length = static_cast<std::uint16_t>(text.size());
  std::string out = "\x93NUMPY";
  out += {'\x01', '\x00', static_cast<char>(length & 0xFF), static_cast<char>(length >> 8)};
  return out + text;
}

/// A regular file's bytes. Throws FileError.
inline std::vector<std::byte> read_whole(const std::string& path) {
  const std::string who = cat("loading ", path);
  const RegularFile file(path, who);
  std::vector<std::byte> out(static_cast<std::size_t>(file.size()));
  file.read(0, out, who, ": reading");
  return out;
}

}  // namespace detail

/// Reads an array that `numpy.save` wrote, in either memory order. Throws FileError where the file is damaged, holds
/// what tensors cannot (texts, objects, complex or big-endian numbers), or has another dtype or number of axes.
template <Scalar T, int Rank>
Tensor<T, Rank, Cpu> load_npy(const std::string& path) {
  const auto bytes = detail::read_whole(path);
  const std::string who = cat("loading ", path);
  return detail::to_tensor<T, Rank>(detail::parse_npy(bytes, who), who);
}

/// Writes an array for `numpy.load`, atomically. Throws FileError, and UsageError for bf16, which NumPy has not.
template <Scalar T, int Rank, Device D>
void save_npy(const std::string& path, const Tensor<T, Rank, D>& tensor) {
  const auto header = detail::npy_header(dtype<T>, tensor.shape(), cat("saving ", path));
  const auto dense = contiguous(tensor);
  std::vector<std::byte> numbers(dense.bytes());
  copy_bytes(Cpu{}, numbers.data(), dense.device(), dense.data(), numbers.size());
  AtomicFile file(path);
  file.write(header);
  file.write(numbers);
  file.commit();
}

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_NPY_HPP

// <chorus/io/npz.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_NPZ_HPP
#define CHORUS_SINGLE_CHORUS_IO_NPZ_HPP
/// NumPy's files of several arrays, `.npz`: zip archives (PKWARE's APPNOTE.TXT) of .npy files, stored or, with zlib,
/// deflated.

namespace chorus::io {

namespace detail {

/// The check sum of zip (and zlib): CRC-32.
inline std::uint32_t crc32_of(std::span<const std::byte> bytes) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> out{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      out[i] = c;
    }
    return out;
  }();
  std::uint32_t c = 0xFFFFFFFFu;
  for (const std::byte byte : bytes) c = table[(c ^ std::to_integer<std::uint32_t>(byte)) & 0xFF] ^ (c >> 8);
  return ~c;
}

/// Little-endian numbers at a place in an archive. Throws FileError past its end.
class ZipBytes {
 public:
  ZipBytes(std::span<const std::byte> bytes, std::string who) : bytes_(bytes), who_(std::move(who)) {}

  std::uint64_t number(std::uint64_t at, std::size_t width) const {
    std::uint64_t out = 0;
    const auto from = part(at, width);
    std::memcpy(&out, from.data(), width);
    return out;
  }
  std::span<const std::byte> part(std::uint64_t at, std::uint64_t size) const {
    check<FileError>(at <= bytes_.size() && size <= bytes_.size() - at, who_, ": the archive is cut short or damaged");
    return bytes_.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(size));
  }
  std::string text(std::uint64_t at, std::uint64_t size) const {
    const auto from = part(at, size);
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  std::uint64_t size() const { return bytes_.size(); }
  const std::string& who() const { return who_; }

 private:
  std::span<const std::byte> bytes_;
  std::string who_;
};

struct ZipEntry {
  std::uint64_t method, packed, size, offset;
  std::uint32_t crc;
};

/// The archive's own list of its files, which stands at its end. Throws FileError.
inline std::map<std::string, ZipEntry> zip_directory(const ZipBytes& zip) {
  constexpr std::uint64_t end_size = 22, wide = 0xFFFFFFFFu;
  const auto refuse = [&] {
    fail<FileError>(zip.who(), ": not a .npz file", instead_of_numpy(zip.part(0, zip.size()), zip.who()));
  };
  if (zip.size() < end_size) refuse();
  std::uint64_t end = zip.size() - end_size;
  const std::uint64_t least = end > 65535 ? end - 65535 : 0;  // a comment may follow
  while (zip.number(end, 4) != 0x06054B50u) {
    if (end-- == least) refuse();
  }
  check<FileError>(end + end_size + zip.number(end + 20, 2) == zip.size(), zip.who(), ": the archive is damaged");
  std::uint64_t directory_end = end, count = zip.number(end + 10, 2), at = zip.number(end + 16, 4);
  if (end >= 20 && zip.number(end - 20, 4) == 0x07064B50u) {  // numbers of 8 bytes, where needed, or always
    const std::uint64_t wide_end = zip.number(end - 12, 8);
    check<FileError>(zip.number(wide_end, 4) == 0x06064B50u, zip.who(), ": the archive is damaged");
    directory_end = wide_end;
    count = zip.number(wide_end + 32, 8);
    at = zip.number(wide_end + 48, 8);
  }
  std::map<std::string, ZipEntry> out;
  for (std::uint64_t i = 0; i < count; ++i) {
    check<FileError>(zip.number(at, 4) == 0x02014B50u, zip.who(), ": the archive's directory is damaged");
    check<FileError>((zip.number(at + 8, 2) & 1) == 0, zip.who(), ": the archive is encrypted");
    ZipEntry entry{zip.number(at + 10, 2), zip.number(at + 20, 4), zip.number(at + 24, 4), zip.number(at + 42, 4),
                   static_cast<std::uint32_t>(zip.number(at + 16, 4))};
    const std::uint64_t name = zip.number(at + 28, 2), extra = zip.number(at + 30, 2), note = zip.number(at + 32, 2);
    // Sizes that don't fit stand in a field of their own, in this order.
    for (std::uint64_t field = at + 46 + name; field + 4 <= at + 46 + name + extra;
         field += 4 + zip.number(field + 2, 2)) {
      if (zip.number(field, 2) != 1) continue;
      std::uint64_t value = field + 4;
      for (auto* number : {&entry.size, &entry.packed, &entry.offset})
        if (*number == wide) {
          *number = zip.number(value, 8);
          value += 8;
        }
    }
    const bool once = out.emplace(zip.text(at + 46, name), entry).second;
    check<FileError>(once, zip.who(), ": the archive has two files of one name");
    at += 46 + name + extra + note;
  }
  check<FileError>(at == directory_end, zip.who(), ": the archive's directory is damaged");
  const auto is_array = [](const auto& file) { return file.first.ends_with(".npy"); };
  if (!out.empty() && std::none_of(out.begin(), out.end(), is_array)) refuse();
  return out;
}

inline std::vector<std::byte> zip_content(const ZipBytes& zip, const std::string& name, const ZipEntry& entry) {
  const std::string who = cat(zip.who(), ": ", Quoted{name});
  check<FileError>(zip.number(entry.offset, 4) == 0x04034B50u, who, ": the archive is damaged");
  const std::uint64_t begin = entry.offset + 30 + zip.number(entry.offset + 26, 2) + zip.number(entry.offset + 28, 2);
  const auto packed = zip.part(begin, entry.packed);
  std::vector<std::byte> out;
  if (entry.method == 0) {
    check<FileError>(entry.size == entry.packed, who, ": the archive is damaged");
    out.assign(packed.begin(), packed.end());
  } else {
    check<FileError>(entry.method == 8, who, ": compression method ", entry.method, " is not supported");
#if CHORUS_USE_ZLIB
    // Deflate makes at most 1032 bytes of one.
    check<FileError>(entry.size / 1032 <= entry.packed, who, ": the archive is damaged");
    z_stream stream{};
    check<FileError>(inflateInit2(&stream, -MAX_WBITS) == Z_OK, who, ": zlib could not start");
    const std::unique_ptr<z_stream, decltype(&inflateEnd)> ended(&stream, &inflateEnd);
    int status = Z_OK;
    constexpr std::size_t most = std::size_t{1} << 30;  // zlib counts in unsigned int
    std::size_t read = 0, written = 0;
    while (status == Z_OK) {
      if (written == out.size()) data::detail::grow(out, entry.size);
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(packed.data() + read));
      stream.avail_in = static_cast<uInt>(std::min(packed.size() - read, most));
      stream.next_out = reinterpret_cast<Bytef*>(out.data() + written);
      stream.avail_out = static_cast<uInt>(std::min(out.size() - written, most));
      const auto in_before = stream.avail_in, out_before = stream.avail_out;
      status = inflate(&stream, Z_NO_FLUSH);
      read += in_before - stream.avail_in;
      written += out_before - stream.avail_out;
    }
    check<FileError>(status == Z_STREAM_END && written == entry.size && read == packed.size(), who,
                     ": the compressed data are damaged");
#else
    fail<FileError>(who, ": compressed, and chorus was built without zlib");
#endif
  }
  check<FileError>(crc32_of(out) == entry.crc, who, ": the check sum is wrong");
  return out;
}

}  // namespace detail

/// An open .npz file. Nothing is unpacked until it is asked for.
class NpzReader {
 public:
  /// Throws FileError where the file can't be read or is no archive.
  explicit NpzReader(const std::string& path)
      : bytes_(detail::read_whole(path)), zip_(bytes_, cat("loading ", path)), entries_(detail::zip_directory(zip_)) {}
  NpzReader(const NpzReader&) = delete;
  NpzReader& operator=(const NpzReader&) = delete;

  /// Names of the arrays, in alphabetic order.
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& [name, entry] : entries_)
      if (name.ends_with(".npy")) out.push_back(name.substr(0, name.size() - 4));
    return out;
  }

  /// The array of that name. Throws FileError where there is none, and as load_npy does.
  template <Scalar T, int Rank>
  Tensor<T, Rank, Cpu> read(const std::string& name) const {
    const auto found = entries_.find(name + ".npy");
    check<FileError>(found != entries_.end(), zip_.who(), ": no array ", Quoted{name}, " among the ", names().size(),
                     " in the file");
    const auto bytes = detail::zip_content(zip_, name, found->second);
    const std::string who = cat(zip_.who(), ": ", Quoted{name});
    return detail::to_tensor<T, Rank>(detail::parse_npy(bytes, who), who);
  }

 private:
  std::vector<std::byte> bytes_;
  detail::ZipBytes zip_;
  std::map<std::string, detail::ZipEntry> entries_;
};

/// Collects arrays, then writes them as `numpy.savez` does, uncompressed.
class NpzWriter {
 public:
  /// Throws UsageError for a name that is empty or comes twice, for bf16, and where the file would exceed 4 GiB.
  template <Scalar T, int Rank, Device D>
  void add(const std::string& name, const Tensor<T, Rank, D>& tensor) {
    check<UsageError>(!name.empty() && name.size() < 1024 && offsets_.emplace(name, content_.size()).second,
                      "saving a .npz file: the name '", name, "' is empty, too long, or there already");
    std::string array = detail::npy_header(dtype<T>, tensor.shape(), cat("saving ", name));
    const auto dense = contiguous(tensor);
    const std::size_t begin = array.size();
    array.resize(begin + dense.bytes());
    copy_bytes(Cpu{}, array.data() + begin, dense.device(), dense.data(), dense.bytes());
    check<UsageError>(content_.size() + array.size() < 0xF0000000u, "saving a .npz file: more than 4 GiB");
    const std::string facts = record(array);
    content_ += number(0x04034B50u, 4) + facts + number(name.size() + 4, 2) + number(0, 2) + name + ".npy" + array;
    facts_.emplace(name, facts);
  }

  /// Writes the file, atomically. Throws FileError.
  void save(const std::string& path) const {
    std::string directory;
    for (const auto& [name, offset] : offsets_)
      directory += number(0x02014B50u, 4) + number(20, 2) + facts_.at(name) + number(name.size() + 4, 2) +
                   std::string(12, '\0') + number(offset, 4) + name + ".npy";
    const std::string end = number(0x06054B50u, 4) + number(0, 4) + number(offsets_.size(), 2) +
                            number(offsets_.size(), 2) + number(directory.size(), 4) + number(content_.size(), 4) +
                            number(0, 2);
    AtomicFile file(path);
    file.write(content_);
    file.write(directory);
    file.write(end);
    file.commit();
  }

 private:
  static std::string number(std::uint64_t value, std::size_t width) {
    std::string out(width, '\0');
    std::memcpy(out.data(), &value, width);
    return out;
  }
  // What the directory and the array's own header share: version, flags (names in UTF-8), stored, 1980-01-01, sizes.
  static std::string record(const std::string& array) {
    return number(20, 2) + number(0x800, 2) + number(0, 2) + number(0, 2) + number(0x21, 2) +
           number(detail::crc32_of(std::as_bytes(std::span(array))), 4) + number(array.size(), 4) +
           number(array.size(), 4);
  }

  std::string content_;
  std::map<std::string, std::size_t> offsets_;
  std::map<std::string, std::string> facts_;
};

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_NPZ_HPP

// <chorus/io/parameters_hash.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_PARAMETERS_HASH_HPP
#define CHORUS_SINGLE_CHORUS_IO_PARAMETERS_HASH_HPP
/// A fingerprint of a model's parameters, to compare ranks and runs bit by bit.

// <chorus/io/sha256.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_SHA256_HPP
#define CHORUS_SINGLE_CHORUS_IO_SHA256_HPP
/// SHA-256 through OpenSSL, where the build has it.

#if CHORUS_USE_OPENSSL
#endif

namespace chorus::io {

#if CHORUS_USE_OPENSSL

/// A hash over bytes that come in pieces.
class Sha256 {
 public:
  static constexpr bool available = true;

  Sha256() : context_(EVP_MD_CTX_new()) {
    require(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }

  void update(std::span<const std::byte> data) {
    require(EVP_DigestUpdate(context_.get(), data.data(), data.size()) == 1);
  }
  void update(std::string_view text) { update(std::as_bytes(std::span(text))); }

  /// The hash of all bytes so far, as 64 hexadecimal digits; more may follow.
  std::string hex() const {
    constexpr std::string_view digits = "0123456789abcdef";
    unsigned char hash[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    const Context last(EVP_MD_CTX_new());
    require(last != nullptr && EVP_MD_CTX_copy_ex(last.get(), context_.get()) == 1 &&
            EVP_DigestFinal_ex(last.get(), hash, &size) == 1);
    std::string out;
    for (unsigned i = 0; i < size; ++i) (out += digits[hash[i] >> 4]) += digits[hash[i] & 15];
    return out;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  using Context = std::unique_ptr<EVP_MD_CTX, Free>;

  static void require(bool ok) { check<Error>(ok, "SHA-256: OpenSSL refuses to compute it"); }

  Context context_;
};

#else

/// Stands in where the build has no OpenSSL: making one throws UsageError.
class Sha256 {
 public:
  static constexpr bool available = false;

  Sha256() {
    fail<UsageError>(
        "SHA-256: this program was built without OpenSSL (CHORUS_USE_OPENSSL=0): install libssl-dev and build "
        "it again");
  }
  void update(std::span<const std::byte>) {}
  void update(std::string_view) {}
  std::string hex() const { return {}; }
};

#endif

/// The hash of `data`, as 64 hexadecimal digits.
inline std::string sha256_hex(std::span<const std::byte> data) {
  Sha256 hash;
  hash.update(data);
  return hash.hex();
}
inline std::string sha256_hex(std::string_view text) { return sha256_hex(std::as_bytes(std::span(text))); }

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_SHA256_HPP

namespace chorus::io {

/// SHA-256 over the names and numbers of all parameters, in the order of the model's members, as 64 hexadecimal digits.
template <class Model>
std::string parameters_sha256(Model& model) {
  Sha256 hash;
  std::vector<std::byte> numbers;
  for (const auto& named : nn::named_parameters<typename Model::device_type>(model)) {
    nn::check_whole("parameters_sha256", named, "all ranks call it with the net");
    numbers.resize(named.parameter->size_bytes());
    copy_bytes(Cpu{}, numbers.data(), named.parameter->where(), named.parameter->memory(), numbers.size());
    hash.update(named.name);
    hash.update(numbers);
  }
  return hash.hex();
}

/// That of a policy's model, the same on all ranks, which all call it; also where each has parts of it.
template <detail::IsNet Net>
std::string parameters_sha256(Net& net) {
  if constexpr (!detail::keeps_parts<Net>) {
    return parameters_sha256(net.module());
  } else {
    using D = typename Net::device_type;
    auto& ranks = net.communicator();
    const auto places = detail::places_in_parts<D>(net);
    const detail::TensorsOfAll<D> tensors(ranks, places);
    Sha256 hash;  // rank 0's
    std::vector<std::byte> whole;
    for (const auto& named : nn::named_parameters<D>(net.module())) {
      const auto tensor = std::find_if(tensors.items().begin(), tensors.items().end(),
                                       [&](const auto& item) { return item.view.name == named.name; });
      whole.resize(tensor->view.data.size());
      detail::for_all_ranges<D>(ranks, *tensor, [&](std::size_t begin, std::span<const std::byte> bytes) {
        std::copy(bytes.begin(), bytes.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin));
      });
      hash.update(named.name);
      hash.update(whole);
    }
    return comm::broadcast_object(ranks, hash.hex());
  }
}

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_PARAMETERS_HASH_HPP

// <chorus/io/quantized_file.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_QUANTIZED_FILE_HPP
#define CHORUS_SINGLE_CHORUS_IO_QUANTIZED_FILE_HPP
/// Quantised models as safetensors files: I8 weights, F32 scales and biases, U8 zero points under the layers' paths,
/// and the steps as JSON in the metadata, so that a file is a whole model: none of its C++ is needed to run it.

// <chorus/nn/int8/program.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_INT8_PROGRAM_HPP
#define CHORUS_SINGLE_CHORUS_NN_INT8_PROGRAM_HPP
/// A quantised model: a list of integer steps that is run over batches of any size. Between its steps there are 8-bit
/// numbers alone, channels last, in one piece of memory that they share.

// <chorus/kernels/int8/convolution.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_INT8_CONVOLUTION_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_INT8_CONVOLUTION_HPP
/// Convolutions and matrix products of u8 with s8. A row of the product is an output pixel: what it is multiplied with
/// lies in `runs` of neighbouring bytes, one for each row of the kernel (or each tap, where there are groups), so that
/// nothing is copied into columns first.

// <chorus/kernels/int8/dot.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_INT8_DOT_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_INT8_DOT_HPP
/// Inner products of u8 with s8, four terms a lane, in 32 bits: by VNNI where the compiler may use it, else widened to
/// 16 bits. Every way gives the same integers: none adds in 16 bits, where two products of 255 * 127 would saturate
/// (as `vpmaddubsw` does).

// <chorus/kernels/int8/requantize.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_INT8_REQUANTIZE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_INT8_REQUANTIZE_HPP
/// From sums of integers to 8-bit numbers: what ends every integer product.

namespace chorus::kernels::int8 {

/// How the columns of a product become numbers of 8 bits:
///   q = clamp(rint((float(sum + offset) + bias) * multiplier) + zero_point, least, most).
/// With x's scale and zero point s_x, z_x, a column's weight scale s_w and its bias b: offset = -z_x (sum of the
/// column's weights), unit = s_x s_w, bias = b / unit, multiplier = unit / s_y, all in float; PyTorch's engines
/// (FBGEMM, oneDNN) compute the same. A ReLU is `least = zero_point`.
struct Requantize {
  const std::int32_t* offset;
  const float* bias;
  const float* multiplier;
  std::int32_t zero_point;
  std::int32_t least;
  std::int32_t most;

  std::uint8_t operator()(std::int32_t sum, Index column) const {
    const float level = (static_cast<float>(sum + offset[column]) + bias[column]) * multiplier[column];
    // Limits are whole numbers: to clamp before rounding gives the same, and keeps the cast defined.
    const float high = static_cast<float>(most - zero_point), low = static_cast<float>(least - zero_point);
    return static_cast<std::uint8_t>(
        static_cast<std::int32_t>(std::nearbyint(std::min(std::max(level, low), high))) + zero_point);
  }
};

}  // namespace chorus::kernels::int8
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_INT8_REQUANTIZE_HPP

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// g++ 12 warns of what its own AVX-512 intrinsics leave undefined.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace chorus::kernels::int8 {

// A way has vectors of `lanes` sums. left(x): four u8, for every lane; right(w): four s8 for each lane, lane after
// lane; add(sums, left, right): each lane's four products, added. A tile has rows * vectors of them in registers.

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#define CHORUS_INT8_VNNI512 1
/// `vpdpbusd` on 16 lanes.
struct Vnni512 {
  static constexpr const char* name = "AVX-512 VNNI";
  static constexpr int lanes = 16, rows = 6, vectors = 4;
  using Sums = __m512i;
  using Left = __m512i;
  using Right = __m512i;

  [[gnu::always_inline]] static Sums zero() { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static Left left(const std::uint8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }
  [[gnu::always_inline]] static Right right(const std::int8_t* w) { return _mm512_loadu_si512(w); }
  [[gnu::always_inline]] static Sums add(Sums sums, Left x, Right w) { return _mm512_dpbusd_epi32(sums, x, w); }
  [[gnu::always_inline]] static void store(Sums sums, const Requantize& to, Index column, std::uint8_t* y,
                                           Index count) {
    const auto level = _mm512_mul_ps(
        _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_loadu_si512(to.offset + column))),
                      _mm512_loadu_ps(to.bias + column)),
        _mm512_loadu_ps(to.multiplier + column));
    const auto clamped =
        _mm512_min_ps(_mm512_max_ps(level, _mm512_set1_ps(static_cast<float>(to.least - to.zero_point))),
                      _mm512_set1_ps(static_cast<float>(to.most - to.zero_point)));
    const auto q = _mm512_add_epi32(_mm512_cvtps_epi32(clamped), _mm512_set1_epi32(to.zero_point));
    const auto mask = static_cast<__mmask16>((1u << std::min<Index>(count, lanes)) - 1);
    _mm512_mask_cvtepi32_storeu_epi8(y, mask, q);
  }
};
#endif

#if defined(__AVX2__)
namespace detail {
/// What the ways of 8 lanes share.
struct EightLanes {
  static constexpr int lanes = 8;
  using Sums = __m256i;

  [[gnu::always_inline]] static Sums zero() { return _mm256_setzero_si256(); }
  [[gnu::always_inline]] static __m256i four_of(const std::uint8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
  [[gnu::always_inline]] static __m256i lanes_of(const std::int8_t* w) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  }
  [[gnu::always_inline]] static void store(Sums sums, const Requantize& to, Index column, std::uint8_t* y,
                                           Index count) {
    const auto offset = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(to.offset + column));
    const auto level = _mm256_mul_ps(
        _mm256_add_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(sums, offset)), _mm256_loadu_ps(to.bias + column)),
        _mm256_loadu_ps(to.multiplier + column));
    const auto clamped =
        _mm256_min_ps(_mm256_max_ps(level, _mm256_set1_ps(static_cast<float>(to.least - to.zero_point))),
                      _mm256_set1_ps(static_cast<float>(to.most - to.zero_point)));
    const auto q = _mm256_add_epi32(_mm256_cvtps_epi32(clamped), _mm256_set1_epi32(to.zero_point));
    const auto words = _mm_packus_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    const auto bytes = _mm_packus_epi16(words, words);
    if (count >= lanes) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(y), bytes);
    } else {
      std::uint8_t all[16];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(all), bytes);
      std::copy_n(all, count, y);
    }
  }
};
}  // namespace detail

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
#define CHORUS_INT8_VNNI256 1
/// `vpdpbusd` on 8 lanes.
struct Vnni256 : detail::EightLanes {
  static constexpr const char* name = "VNNI on 256 bits";
  static constexpr int rows = 6, vectors = 2;
  using Left = __m256i;
  using Right = __m256i;

  [[gnu::always_inline]] static Left left(const std::uint8_t* x) { return four_of(x); }
  [[gnu::always_inline]] static Right right(const std::int8_t* w) { return lanes_of(w); }
  [[gnu::always_inline]] static Sums add(Sums sums, Left x, Right w) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(sums, x, w);
#else
    return _mm256_dpbusd_avx_epi32(sums, x, w);
#endif
  }
};
#endif

/// AVX2: bytes become 16 bits, of which `vpmaddwd` adds pairs in 32 bits.
struct Widened : detail::EightLanes {
  static constexpr const char* name = "AVX2, widened to 16 bits";
  static constexpr int rows = 4, vectors = 2;
  // The bytes with even, and with odd places.
  struct Pairs {
    __m256i even, odd;
  };
  using Left = Pairs;
  using Right = Pairs;

  [[gnu::always_inline]] static Left left(const std::uint8_t* x) {
    const auto four = four_of(x);
    return {_mm256_and_si256(four, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(four, 8)};
  }
  [[gnu::always_inline]] static Right right(const std::int8_t* w) {
    const auto all = lanes_of(w);
    return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
  }
  [[gnu::always_inline]] static Sums add(Sums sums, Left x, Right w) {
    return _mm256_add_epi32(
        sums, _mm256_add_epi32(_mm256_madd_epi16(x.even, w.even), _mm256_madd_epi16(x.odd, w.odd)));
  }
};
#endif

/// Plain C++, for every processor; what the other ways are tested against.
struct Plain {
  static constexpr const char* name = "plain C++";
  static constexpr int lanes = 8, rows = 2, vectors = 1;
  struct Sums {
    std::int32_t lane[lanes];
  };
  using Left = const std::uint8_t*;
  using Right = const std::int8_t*;

  static Sums zero() { return {}; }
  static Left left(const std::uint8_t* x) { return x; }
  static Right right(const std::int8_t* w) { return w; }
  static Sums add(Sums sums, Left x, Right w) {
    for (int i = 0; i < lanes; ++i)
      sums.lane[i] += x[0] * w[4 * i] + x[1] * w[4 * i + 1] + x[2] * w[4 * i + 2] + x[3] * w[4 * i + 3];
    return sums;
  }
  static void store(const Sums& sums, const Requantize& to, Index column, std::uint8_t* y, Index count) {
    for (Index i = 0; i < std::min<Index>(count, lanes); ++i) y[i] = to(sums.lane[i], column + i);
  }
};

/// The fastest way that the compiler's flags allow.
#if defined(CHORUS_INT8_VNNI512)
using Best = Vnni512;
#elif defined(CHORUS_INT8_VNNI256)
using Best = Vnni256;
#elif defined(__AVX2__)
using Best = Widened;
#else
using Best = Plain;
#endif

}  // namespace chorus::kernels::int8

#pragma GCC diagnostic pop
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_INT8_DOT_HPP

// <chorus/kernels/int8/image.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_INT8_IMAGE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_INT8_IMAGE_HPP
/// A batch of 8-bit images as integer kernels see them: channels lie next to each other, and around each image there
/// may be a border, so that a convolution reads its padding as it reads anything else.

namespace chorus::kernels::int8 {

/// Kernels read up to so many bytes behind the last number, and take them times zero.
inline constexpr Index slack = 4;

/// [batch, height + 2 border, width + 2 border, channels], without gaps.
struct Images {
  std::uint8_t* data = nullptr;
  Index batch = 0, height = 1, width = 1, channels = 0, border = 0;

  Index pitch() const { return (width + 2 * border) * channels; }  ///< from one row to the next
  Index image_bytes() const { return (height + 2 * border) * pitch(); }
  Index bytes() const { return batch * image_bytes() + slack; }
  Index pixels() const { return batch * height * width; }
  /// The first channel of a pixel; rows and columns count from behind the border, and may be within it.
  std::uint8_t* at(Index image, Index row, Index column) const {
    return data + image * image_bytes() + (row + border) * pitch() + (column + border) * channels;
  }

  /// Sets the borders to `value`.
  void fill_border(std::uint8_t value) const {
    if (border == 0) return;
    for (Index image = 0; image < batch; ++image) {
      std::uint8_t* const first = at(image, -border, -border);
      // Above the first row and at its left; from each row's right on to the next one's left; and the rest.
      std::fill_n(first, border * pitch() + border * channels, value);
      for (Index row = 0; row + 1 < height; ++row) std::fill_n(at(image, row, width), 2 * border * channels, value);
      std::fill(at(image, height - 1, width), first + image_bytes(), value);
    }
  }
};

}  // namespace chorus::kernels::int8
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_INT8_IMAGE_HPP

// g++ 12 warns of what its own AVX-512 intrinsics leave undefined.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace chorus::kernels::int8 {

/// Columns of a panel of packed weights.
inline constexpr Index panel = 64;

/// The sums of 32 bits hold so many products of 255 and -128.
inline constexpr Index most_terms = 65'793;

/// Weights in the order in which the kernels read them: [group][panel][run][4 terms of it][column][4].
struct PackedWeights {
  Index out_channels = 0, groups = 1, kernel_h = 1, kernel_w = 1, channels = 0;  // channels: of the input, in a group
  bool row_runs = true;   // a run is a whole row of the kernel, not one tap
  bool depthwise = false;  // [tap][channel] then
  std::vector<std::int8_t> numbers;
  std::vector<std::int32_t> sums;  // of each output's weights

  Index group_outputs() const { return out_channels / groups; }
  Index panels() const { return (group_outputs() + panel - 1) / panel; }
  Index runs() const { return row_runs ? kernel_h : kernel_h * kernel_w; }
  Index run_bytes() const { return row_runs ? kernel_w * channels : channels; }
  Index run_steps() const { return (run_bytes() + 3) / 4; }
  Index panel_bytes() const { return runs() * run_steps() * panel * 4; }
};

/// Packs weight: [out, in / groups, kernel_h, kernel_w], row-major, for convolutions of `shape` but for its batch,
/// height and width.
inline PackedWeights pack_weights(const Conv2dShape& shape, std::span<const std::int8_t> weight) {
  PackedWeights out;
  out.out_channels = shape.out_channels;
  out.groups = shape.groups;
  out.kernel_h = shape.kernel_h;
  out.kernel_w = shape.kernel_w;
  out.channels = shape.in_channels / shape.groups;
  out.row_runs = shape.groups == 1 && shape.dilation_w == 1;
  out.depthwise = shape.groups > 1 && out.channels == 1 && shape.out_channels == shape.groups;
  const Index taps = shape.kernel_h * shape.kernel_w, terms = out.channels * taps;
  out.sums.assign(static_cast<std::size_t>(shape.out_channels), 0);
  for (Index o = 0; o < shape.out_channels; ++o)
    for (Index k = 0; k < terms; ++k)
      out.sums[static_cast<std::size_t>(o)] += weight[static_cast<std::size_t>(o * terms + k)];

  if (out.depthwise) {
    out.numbers.resize(static_cast<std::size_t>(taps * shape.out_channels));
    for (Index o = 0; o < shape.out_channels; ++o)
      for (Index tap = 0; tap < taps; ++tap)
        out.numbers[static_cast<std::size_t>(tap * shape.out_channels + o)] =
            weight[static_cast<std::size_t>(o * taps + tap)];
    return out;
  }
  out.numbers.assign(static_cast<std::size_t>(out.groups * out.panels() * out.panel_bytes()), 0);
  for (Index o = 0; o < shape.out_channels; ++o) {
    const Index group = o / out.group_outputs(), column = o % out.group_outputs();
    std::int8_t* const to =
        out.numbers.data() + (group * out.panels() + column / panel) * out.panel_bytes() + column % panel * 4;
    for (Index c = 0; c < out.channels; ++c)
      for (Index tap = 0; tap < taps; ++tap) {
        const Index run = out.row_runs ? tap / shape.kernel_w : tap;
        const Index place = out.row_runs ? tap % shape.kernel_w * out.channels + c : c;
        to[(run * out.run_steps() + place / 4) * panel * 4 + place % 4] =
            weight[static_cast<std::size_t>((o * out.channels + c) * taps + tap)];
      }
  }
  return out;
}

namespace detail {

/// Rows of the product that share one look at a panel of weights, some 16 to 128 KiB of x.
inline constexpr Index chunk_rows = 240;

/// Where the rows of a chunk begin.
struct Rows {
  const std::uint8_t* x[chunk_rows];
  std::uint8_t* y[chunk_rows];
  Index count = 0;
};

/// A tile of sums: `Count` rows times `Vectors` vectors of columns.
template <class Way, int Count, int Vectors>
void multiply_tile(const std::uint8_t* const* x, std::span<const Index> runs, Index steps, const std::int8_t* w,
                   const Requantize& to, Index column, std::uint8_t* const* y, Index rows, Index columns) {
  typename Way::Sums sums[Count][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Count; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) sums[r][v] = Way::zero();

  const std::uint8_t* from[Count];
  for (const Index run : runs) {
#pragma GCC unroll 16
    for (int r = 0; r < Count; ++r) from[r] = x[r] + run;
    for (Index step = 0; step < steps; ++step, w += panel * 4) {
      typename Way::Right right[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) right[v] = Way::right(w + v * Way::lanes * 4);
#pragma GCC unroll 16
      for (int r = 0; r < Count; ++r) {
        const auto left = Way::left(from[r] + 4 * step);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sums[r][v] = Way::add(sums[r][v], left, right[v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Count; ++r) {
    if (r >= rows) break;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v)
      if (v * Way::lanes < columns)
        Way::store(sums[r][v], to, column + v * Way::lanes, y[r] + v * Way::lanes, columns - v * Way::lanes);
  }
}

/// Rows [first, first + rows) of a chunk, at most `Count`, times a panel's columns.
template <class Way, int Count>
void multiply_rows(const Rows& chunk, Index first, Index rows, std::span<const Index> runs, Index steps,
                   const std::int8_t* w, const Requantize& to, Index column, Index columns) {
  // Rows that are not there are computed as the last one, and not stored.
  const std::uint8_t* x[Count];
  std::uint8_t* y[Count];
  for (Index r = 0; r < Count; ++r) {
    x[r] = chunk.x[first + std::min(r, rows - 1)];
    y[r] = chunk.y[first + std::min(r, rows - 1)] + column;
  }
  constexpr Index wide = Way::vectors * Way::lanes;
  for (Index done = 0; done < columns; done += wide) {
    const Index left = columns - done;
    const auto tile = [&]<int Vectors>(std::integral_constant<int, Vectors>) {
      std::uint8_t* at[Count];
      for (int r = 0; r < Count; ++r) at[r] = y[r] + done;
      multiply_tile<Way, Count, Vectors>(x, runs, steps, w + done * 4, to, column + done, at, rows,
                                         std::min(left, wide));
    };
    if (Way::vectors > 1 && left <= Way::lanes)
      tile(std::integral_constant<int, 1>{});
    else if (Way::vectors > 2 && left <= 2 * Way::lanes)
      tile(std::integral_constant<int, 2>{});
    else
      tile(std::integral_constant<int, Way::vectors>{});
  }
}

/// A chunk's rows times a panel.
template <class Way>
void multiply_chunk(const Rows& chunk, std::span<const Index> runs, Index steps, const std::int8_t* w,
                    const Requantize& to, Index column, Index columns) {
  constexpr int few = Way::rows / 2 > 0 ? Way::rows / 2 : 1;
  for (Index first = 0; first < chunk.count; first += Way::rows) {
    const Index rows = std::min<Index>(Way::rows, chunk.count - first);
    if (rows == 1)
      multiply_rows<Way, 1>(chunk, first, rows, runs, steps, w, to, column, columns);
    else if (rows <= few)
      multiply_rows<Way, few>(chunk, first, rows, runs, steps, w, to, column, columns);
    else
      multiply_rows<Way, Way::rows>(chunk, first, rows, runs, steps, w, to, column, columns);
  }
}

/// The depthwise form: each channel by itself.
inline void convolve_depthwise(const Conv2dShape& s, const Images& x, const PackedWeights& weights,
                               const Requantize& to, const Images& y) {
  constexpr Index block = 64;
  parallel_for(s.batch * s.out_height(), [&](Index line) {
    const Index image = line / s.out_height(), row = line % s.out_height();
    for (Index column = 0; column < s.out_width(); ++column)
      for (Index c = 0; c < s.in_channels; c += block) {
        const Index count = std::min(block, s.in_channels - c);
        std::int32_t sums[block] = {};
        for (Index tap = 0; tap < s.kernel_h * s.kernel_w; ++tap) {
          const std::uint8_t* from =
              x.at(image, row * s.stride_h - s.padding_h + tap / s.kernel_w * s.dilation_h,
                   column * s.stride_w - s.padding_w + tap % s.kernel_w * s.dilation_w) + c;
          const std::int8_t* w = weights.numbers.data() + tap * s.in_channels + c;
          for (Index i = 0; i < count; ++i) sums[i] += from[i] * w[i];
        }
        std::uint8_t* const out = y.at(image, row, column) + c;
        for (Index i = 0; i < count; ++i) out[i] = to(sums[i], c + i);
      }
  }, s.y_count() * s.kernel_h * s.kernel_w > 100'000);
}

}  // namespace detail

/// y = the convolution of x, whose border is at least the padding and holds x's zero point. `to` has a number for each
/// output channel, and up to `panel` more may be read.
template <class Way = Best>
void convolution(const Conv2dShape& s, const Images& x, const PackedWeights& weights, const Requantize& to,
                 const Images& y) {
  if (weights.depthwise) return detail::convolve_depthwise(s, x, weights, to, y);
  std::vector<Index> runs;
  for (Index kh = 0; kh < s.kernel_h; ++kh)
    for (Index kw = 0; kw < (weights.row_runs ? 1 : s.kernel_w); ++kw)
      runs.push_back(kh * s.dilation_h * x.pitch() + kw * s.dilation_w * x.channels);

  const Index out_h = s.out_height(), out_w = s.out_width(), pixels = s.batch * out_h * out_w;
  const Index chunks = (pixels + detail::chunk_rows - 1) / detail::chunk_rows, outputs = weights.group_outputs();
  const Index tasks = chunks * weights.groups * weights.panels();
  const bool worth_it = pixels * weights.panel_bytes() * weights.panels() * weights.groups > 2'000'000;
  parallel_for(tasks, [&](Index task) {
    const Index at_panel = task % weights.panels(), group = task / weights.panels() % weights.groups;
    const Index first = task / weights.panels() / weights.groups * detail::chunk_rows;
    detail::Rows rows;
    rows.count = std::min(detail::chunk_rows, pixels - first);
    Index column = first % out_w, row = first / out_w % out_h, image = first / (out_w * out_h);
    for (Index i = 0; i < rows.count; ++i) {
      rows.x[i] = x.at(image, row * s.stride_h - s.padding_h, column * s.stride_w - s.padding_w) +
                  group * weights.channels;
      rows.y[i] = y.at(image, row, column);
      if (++column == out_w) {
        column = 0;
        if (++row == out_h) row = 0, ++image;
      }
    }
    const Index begin = at_panel * panel;
    detail::multiply_chunk<Way>(rows, runs, weights.run_steps(),
                                weights.numbers.data() + (group * weights.panels() + at_panel) * weights.panel_bytes(),
                                to, group * outputs + begin, std::min(panel, outputs - begin));
  }, worth_it);
}

}  // namespace chorus::kernels::int8

#pragma GCC diagnostic pop
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_INT8_CONVOLUTION_HPP

// <chorus/kernels/int8/pointwise.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_INT8_POINTWISE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_INT8_POINTWISE_HPP
/// Sums, ReLUs and conversions of 8-bit numbers.

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

// g++ 12 warns of what its own AVX-512 intrinsics leave undefined.
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace chorus::kernels::int8 {

using quantized::Levels;

/// The integer that stands for x, or `least` where it would be smaller: with a ReLU that is the zero point.
inline std::uint8_t level_of(const Levels& levels, float x, std::int32_t least) {
  return static_cast<std::uint8_t>(std::max(levels.level(x), least));
}
inline std::uint8_t level_of(const Levels& levels, float x) { return static_cast<std::uint8_t>(levels.level(x)); }

/// How two operands are added.
struct Sum {
  Levels a, b, y;
  bool relu = false;

  std::int32_t least() const { return relu ? y.zero_point : y.integers.least; }
};

/// y = the levels of a + b, or of relu(a + b), which are added in float: `count` numbers, one behind the other.
inline void add(const Sum& sum, const std::uint8_t* a, const std::uint8_t* b, std::uint8_t* y, Index count) {
  Index i = 0;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  constexpr int exact = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const auto number = [](const std::uint8_t* q, const Levels& levels) {
    const auto wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    // With its rounding named, a product is never joined with the sum that follows.
    return _mm512_mul_round_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(wide, _mm512_set1_epi32(levels.zero_point))),
                               _mm512_set1_ps(levels.scale), exact);
  };
  const auto inverse = _mm512_set1_ps(1.0f / sum.y.scale);
  const auto least = _mm512_set1_ps(static_cast<float>(sum.least() - sum.y.zero_point));
  const auto most = _mm512_set1_ps(static_cast<float>(sum.y.integers.most - sum.y.zero_point));
  const auto zero_point = _mm512_set1_epi32(sum.y.zero_point);
  for (; i + 16 <= count; i += 16) {
    const auto both = _mm512_add_round_ps(number(a + i, sum.a), number(b + i, sum.b), exact);
    const auto level = _mm512_min_ps(_mm512_max_ps(_mm512_mul_round_ps(both, inverse, exact), least), most);
    const auto q = _mm512_add_epi32(_mm512_cvtps_epi32(level), zero_point);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), _mm512_cvtepi32_epi8(q));
  }
#endif
  if (i == count) return;
  // Products come from tables: the compiler cannot join them with the sum, which would round once less.
  std::array<float, 256> numbers_a, numbers_b;
  for (int q = 0; q < 256; ++q) {
    numbers_a[static_cast<std::size_t>(q)] = sum.a.number(q);
    numbers_b[static_cast<std::size_t>(q)] = sum.b.number(q);
  }
  for (; i < count; ++i) y[i] = level_of(sum.y, numbers_a[a[i]] + numbers_b[b[i]], sum.least());
}

/// The same of images.
inline void add(const Sum& sum, const Images& a, const Images& b, const Images& y) {
  parallel_for(y.batch * y.height, [&](Index line) {
    const Index image = line / y.height, row = line % y.height;
    add(sum, a.at(image, row, 0), b.at(image, row, 0), y.at(image, row, 0), y.width * y.channels);
  }, y.pixels() * y.channels > 200'000);
}

/// y[q] of every number: any function of one 8-bit number, such as a ReLU with other levels than its input's.
inline void look_up(const std::array<std::uint8_t, 256>& table, const Images& x, const Images& y) {
  for (Index image = 0; image < y.batch; ++image)
    for (Index row = 0; row < y.height; ++row) {
      const std::uint8_t* const from = x.at(image, row, 0);
      std::uint8_t* const to = y.at(image, row, 0);
      for (Index i = 0; i < y.width * y.channels; ++i) to[i] = table[from[i]];
    }
}

/// y = the levels of x: [batch, channels, height, width], row-major.
inline void quantize(const Levels& levels, const float* x, const Images& y) {
  const Index plane = y.height * y.width;
  parallel_for(y.batch * y.height, [&](Index line) {
    const Index image = line / y.height, row = line % y.height;
    for (Index c = 0; c < y.channels; ++c) {
      const float* const from = x + (image * y.channels + c) * plane + row * y.width;
      std::uint8_t* const to = y.at(image, row, 0) + c;
      for (Index column = 0; column < y.width; ++column) to[column * y.channels] = level_of(levels, from[column]);
    }
  }, y.pixels() * y.channels > 50'000);
}

/// y: [batch, channels, height, width], row-major, gets f(number) of x.
template <class T, class F>
void for_channels_first(const Images& x, T* y, const F& f) {
  const Index plane = x.height * x.width;
  for (Index image = 0; image < x.batch; ++image)
    for (Index row = 0; row < x.height; ++row)
      for (Index column = 0; column < x.width; ++column) {
        const std::uint8_t* const from = x.at(image, row, column);
        T* const to = y + image * x.channels * plane + row * x.width + column;
        for (Index c = 0; c < x.channels; ++c) to[c * plane] = f(from[c]);
      }
}

/// y = the numbers that x stands for: [batch, channels, height, width], row-major.
inline void dequantize(const Levels& levels, const Images& x, float* y) {
  for_channels_first(x, y, [&](std::uint8_t q) { return levels.number(q); });
}

}  // namespace chorus::kernels::int8

#pragma GCC diagnostic pop
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_INT8_POINTWISE_HPP

// <chorus/kernels/int8/pooling.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_INT8_POOLING_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_INT8_POOLING_HPP
/// Pooling of 8-bit images.

namespace chorus::kernels::int8 {

namespace detail {
/// Calls f(image, row, column, top, left) for each window, which may begin or end outside of the image.
template <class F>
void for_windows(const Pool2dShape& s, const Images& x, const Images& y, const F& f) {
  parallel_for(y.batch * y.height, [&](Index line) {
    const Index image = line / y.height, row = line % y.height;
    const Index top = row * s.stride_h - s.padding_h;
    for (Index column = 0; column < y.width; ++column) f(image, row, column, top, column * s.stride_w - s.padding_w);
  }, x.bytes() > 100'000);
}
}  // namespace detail

/// y = the largest number of each window. Padding never counts. `s.planes` is not looked at.
inline void max_pool2d(const Pool2dShape& s, const Images& x, const Images& y) {
  detail::for_windows(s, x, y, [&](Index image, Index row, Index column, Index top, Index left) {
    std::uint8_t* const to = y.at(image, row, column);
    std::fill_n(to, x.channels, std::uint8_t{0});
    for (Index kh = 0; kh < s.kernel_h; ++kh)
      for (Index kw = 0; kw < s.kernel_w; ++kw) {
        const Index i = top + kh * s.dilation_h, j = left + kw * s.dilation_w;
        if (i < 0 || i >= x.height || j < 0 || j >= x.width) continue;
        const std::uint8_t* const from = x.at(image, i, j);
        for (Index c = 0; c < x.channels; ++c) to[c] = std::max(to[c], from[c]);
      }
  });
}

/// How means become numbers of 8 bits: the levels of float(sum of (x - zero_point)) * (scale / count), `count` being
/// the numbers of a window.
struct Mean {
  Levels x, y;
  bool count_include_pad = true;

  std::uint8_t operator()(std::int32_t sum, Index numbers, Index divisor) const {
    const auto centered = sum - static_cast<std::int32_t>(numbers) * x.zero_point;
    return level_of(y, static_cast<float>(centered) * (x.scale / static_cast<float>(divisor)));
  }
};

/// y = the mean of each window.
inline void avg_pool2d(const Pool2dShape& s, const Images& x, const Images& y, const Mean& mean) {
  constexpr Index block = 128;
  detail::for_windows(s, x, y, [&](Index image, Index row, Index column, Index top, Index left) {
    for (Index c = 0; c < x.channels; c += block) {
      const Index count = std::min(block, x.channels - c);
      std::int32_t sums[block] = {};
      Index numbers = 0;
      for (Index i = std::max<Index>(top, 0); i < std::min(top + s.kernel_h, x.height); ++i)
        for (Index j = std::max<Index>(left, 0); j < std::min(left + s.kernel_w, x.width); ++j, ++numbers) {
          const std::uint8_t* const from = x.at(image, i, j) + c;
          for (Index l = 0; l < count; ++l) sums[l] += from[l];
        }
      // What lies behind the padding at the far side, with `ceil_mode`, never counts.
      const Index whole = (std::min(top + s.kernel_h, x.height + s.padding_h) - top) *
                          (std::min(left + s.kernel_w, x.width + s.padding_w) - left);
      const Index divisor = std::max<Index>(1, mean.count_include_pad ? whole : numbers);
      std::uint8_t* const to = y.at(image, row, column) + c;
      for (Index l = 0; l < count; ++l) to[l] = mean(sums[l], numbers, divisor);
    }
  });
}

}  // namespace chorus::kernels::int8
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_INT8_POOLING_HPP

// <chorus/nn/int8/step.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_INT8_STEP_HPP
#define CHORUS_SINGLE_CHORUS_NN_INT8_STEP_HPP
/// What a quantised model is made of: steps from 8-bit numbers to 8-bit numbers, as plain data.

namespace chorus::nn::int8 {

using kernels::int8::Levels;

enum class Kind : std::uint8_t { conv2d, linear, add, max_pool2d, avg_pool2d, global_avg_pool, relu, flatten };

inline constexpr std::array<std::string_view, 8> kind_names{"conv2d",     "linear",          "add",  "max_pool2d",
                                                            "avg_pool2d", "global_avg_pool", "relu", "flatten"};
inline void append(std::string& out, Kind kind) { out += kind_names[static_cast<std::size_t>(kind)]; }

/// One operation. Value 0 is the program's input, value i + 1 what step i gives.
struct Step {
  Kind kind = Kind::relu;
  /// The layer's path in the model ("layer1.0.conv1"), or one that says what the step does; no other step has it.
  std::string name;
  std::vector<Index> inputs;
  /// What the output's integers stand for. max_pool2d and flatten keep their input's.
  Levels levels;
  /// conv2d, linear, add: whether a ReLU follows.
  bool relu = false;

  /// conv2d and pooling: height, then width. A kernel of convolutions is their weight's.
  std::array<Index, 2> window{1, 1}, stride{1, 1}, padding{0, 0}, dilation{1, 1};
  Index groups = 1;
  bool ceil_mode = false, count_include_pad = true;

  /// conv2d: [out, in / groups, kernel_h, kernel_w]; linear: [out, in, 1, 1].
  std::array<Index, 4> weight_shape{};
  std::vector<std::int8_t> weight;
  /// Of each output: what its weights' integers are multiplied with, and the bias, which may be absent.
  std::vector<float> weight_scale, bias;

  bool has_weight() const { return kind == Kind::conv2d || kind == Kind::linear; }
  bool keeps_levels() const { return kind == Kind::max_pool2d || kind == Kind::flatten; }
};

/// Throws `Error` unless 8-bit numbers can stand for something in that way.
template <class Error>
void check_levels(std::string_view who, const std::string& name, const Levels& levels) {
  check<Error>(std::isfinite(levels.scale) && levels.scale > 0 && levels.integers.least >= 0 &&
                   levels.integers.most <= 255 && levels.zero_point >= levels.integers.least &&
                   levels.zero_point <= levels.integers.most,
               who, ": '", name, "' has a scale of ", levels.scale, ", a zero point of ", levels.zero_point,
               " and integers from ", levels.integers.least,
               " to ", levels.integers.most, ": expected a positive scale, a zero point among the integers, and those ",
               "from 0 to 255");
}

/// Throws `Error` unless the step can be computed, wherever its input comes from. `who`: how messages begin.
template <class Error>
void check_step(std::string_view who, const Step& step, Index index) {
  const auto positive = [](const std::array<Index, 2>& both) {
    return both[0] > 0 && both[1] > 0 && both[0] < 1 << 20 && both[1] < 1 << 20;
  };
  const std::size_t operands = step.kind == Kind::add ? 2 : 1;
  check<Error>(step.inputs.size() == operands, who, ": ", step.kind, " '", step.name, "' takes ", operands,
               " inputs, got ", step.inputs.size());
  for (const Index input : step.inputs)
    check<Error>(input >= 0 && input <= index, who, ": input ", input, " of '", step.name, "', step ", index,
                 ", is none that comes before it");
  check_levels<Error>(who, step.name, step.levels);
  check<Error>(positive(step.window) && positive(step.stride) && positive(step.dilation) && step.padding[0] >= 0 &&
                   step.padding[1] >= 0 && step.padding[0] < 1 << 20 && step.padding[1] < 1 << 20 && step.groups > 0,
               who, ": '", step.name, "': window, stride, dilation and groups are at least 1, padding at least 0");
  if (!step.has_weight()) return;
  const auto [out, in, kernel_h, kernel_w] = step.weight_shape;
  check<Error>(out > 0 && in > 0 && kernel_h > 0 && kernel_w > 0 && out % step.groups == 0, who, ": '", step.name,
               "' has a weight of shape ", step.weight_shape, " for ", step.groups, " groups");
  check<Error>(static_cast<Index>(step.weight.size()) == out * in * kernel_h * kernel_w, who, ": '", step.name,
               "' has ", step.weight.size(), " weights for shape ", step.weight_shape);
  check<Error>(static_cast<Index>(step.weight_scale.size()) == out &&
                   (step.bias.empty() || static_cast<Index>(step.bias.size()) == out),
               who, ": '", step.name, "' has ", step.weight_scale.size(), " scales and ", step.bias.size(),
               " biases for ", out, " outputs");
  for (const float scale : step.weight_scale)
    check<Error>(std::isfinite(scale) && scale > 0, who, ": '", step.name, "' has a weight scale of ", scale,
                 ": expected a positive number");
  for (const float bias : step.bias)
    check<Error>(std::isfinite(bias), who, ": '", step.name, "' has a bias of ", bias);
}

}  // namespace chorus::nn::int8
#endif  // CHORUS_SINGLE_CHORUS_NN_INT8_STEP_HPP

namespace chorus::nn::int8 {

/// What a value is, of one sample. A vector has one pixel.
struct Extent {
  Index channels = 0, height = 1, width = 1;
  bool is_image = false;

  Index count() const { return channels * height * width; }
  bool operator==(const Extent&) const = default;
};
inline void append(std::string& out, const Extent& extent) {
  out += extent.is_image ? cat("[", extent.channels, ", ", extent.height, ", ", extent.width, "]")
                         : cat("[", extent.channels, "]");
}

/// The integers of a value as they are computed: see Program::watch.
struct Seen {
  const std::string& name;
  const Levels& levels;
  const kernels::int8::Images& images;
};

class Program {
 public:
  Program() = default;
  /// `input`: what the first value's integers stand for. The value of the last step is the result. Throws UsageError
  /// where a step can't be computed.
  Program(Levels input, std::vector<Step> steps) : input_(input), steps_(std::move(steps)) {
    check<UsageError>(!steps_.empty(), who, ": there are no steps");
    check_levels<UsageError>(who, "input", input_);
    for (std::size_t i = 0; i < steps_.size(); ++i) check_step<UsageError>(who, steps_[i], static_cast<Index>(i));
    for (auto& step : steps_) prepare(step);
  }

  const std::vector<Step>& steps() const { return steps_; }
  const Levels& input() const { return input_; }
  const Levels& output() const { return steps_.back().levels; }

  /// x: [batch, channels, height, width] or [batch, channels], quantised -> what the result stands for, in float:
  /// [batch, ...]. Throws ShapeError where x does not fit the steps, or the result has another rank.
  template <int OutRank = 2, int Rank>
  Tensor<float, OutRank> operator()(const Tensor<float, Rank>& x) const {
    return run<OutRank>(x, [](const Seen&) {});
  }

  /// The same, which shows each value's integers as soon as they are there.
  template <int OutRank = 2, int Rank, class Watch>
  Tensor<float, OutRank> watch(const Tensor<float, Rank>& x, const Watch& watch) const {
    return run<OutRank>(x, watch);
  }

 private:
  static constexpr const char* who = "quantized model";
  using Images = kernels::int8::Images;

  /// What a step's kernel needs beside the step.
  struct Prepared {
    kernels::int8::PackedWeights weights;
    std::vector<std::int32_t> offset;
    std::vector<float> bias, multiplier;
    std::array<std::uint8_t, 256> table{};
  };

  const Levels& levels_of(Index value) const {
    return value == 0 ? input_ : steps_[static_cast<std::size_t>(value - 1)].levels;
  }

  static kernels::Conv2dShape convolution_of(const Step& step) {
    return {.batch = 0,
            .in_channels = step.weight_shape[1] * step.groups,
            .height = 0,
            .width = 0,
            .out_channels = step.weight_shape[0],
            .kernel_h = step.weight_shape[2],
            .kernel_w = step.weight_shape[3],
            .stride_h = step.stride[0],
            .stride_w = step.stride[1],
            .padding_h = step.padding[0],
            .padding_w = step.padding[1],
            .dilation_h = step.dilation[0],
            .dilation_w = step.dilation[1],
            .groups = step.groups};
  }
  static kernels::Pool2dShape pooling_of(const Step& step, const Extent& x) {
    return {.planes = x.channels,
            .height = x.height,
            .width = x.width,
            .kernel_h = step.window[0],
            .kernel_w = step.window[1],
            .stride_h = step.stride[0],
            .stride_w = step.stride[1],
            .padding_h = step.padding[0],
            .padding_w = step.padding[1],
            .dilation_h = step.dilation[0],
            .dilation_w = step.dilation[1],
            .ceil_mode = step.ceil_mode};
  }

  void prepare(Step& step) {
    Prepared out;
    const Levels& x = levels_of(step.inputs[0]);
    if (step.keeps_levels()) step.levels = x;
    if (step.kind == Kind::relu)
      for (int q = 0; q < 256; ++q) {
        const auto at = static_cast<std::size_t>(q);
        out.table[at] = kernels::int8::level_of(step.levels, x.number(q), step.levels.zero_point);
      }
    if (step.has_weight()) {
      const auto shape = convolution_of(step);
      check<UsageError>(step.weight_shape[1] * shape.kernel_h * shape.kernel_w <= kernels::int8::most_terms, who,
                        ": '", step.name, "' adds ", step.weight_shape[1] * shape.kernel_h * shape.kernel_w,
                        " products, of which 32 bits hold ", kernels::int8::most_terms);
      out.weights = kernels::int8::pack_weights(shape, step.weight);
      // Vectors are read whole: behind the last channel, too.
      const auto outputs = static_cast<std::size_t>(shape.out_channels);
      const std::size_t padded = outputs + static_cast<std::size_t>(kernels::int8::panel);
      out.offset.assign(padded, 0);
      out.bias.assign(padded, 0);
      out.multiplier.assign(padded, 0);
      for (std::size_t o = 0; o < outputs; ++o) {
        const float unit = x.scale * step.weight_scale[o];
        out.offset[o] = -x.zero_point * out.weights.sums[o];
        out.bias[o] = step.bias.empty() ? 0.0f : step.bias[o] / unit;
        out.multiplier[o] = unit / step.levels.scale;
      }
    }
    prepared_.push_back(std::move(out));
  }

  /// What a step makes of its inputs. Throws ShapeError where they don't fit.
  Extent extent_after(const Step& step, std::span<const Extent> values) const {
    const Extent& x = values[static_cast<std::size_t>(step.inputs[0])];
    const auto wants_image = [&] {
      check<ShapeError>(x.is_image, who, ": ", step.kind, " '", step.name, "' takes images, got ", x);
    };
    switch (step.kind) {
      case Kind::conv2d: {
        wants_image();
        auto s = convolution_of(step);
        check<ShapeError>(s.in_channels == x.channels, who, ": '", step.name, "' takes ", s.in_channels,
                          " channels, got ", x);
        s.height = x.height;
        s.width = x.width;
        check<ShapeError>(x.height + 2 * s.padding_h > s.dilation_h * (s.kernel_h - 1) &&
                              x.width + 2 * s.padding_w > s.dilation_w * (s.kernel_w - 1),
                          who, ": the kernel of '", step.name, "' is larger than its padded input of ", x);
        return {s.out_channels, s.out_height(), s.out_width(), true};
      }
      case Kind::linear:
        check<ShapeError>(!x.is_image && x.channels == step.weight_shape[1], who, ": '", step.name, "' takes ",
                          step.weight_shape[1], " numbers, got ", x);
        return {step.weight_shape[0], 1, 1, false};
      case Kind::add: {
        const Extent& other = values[static_cast<std::size_t>(step.inputs[1])];
        check<ShapeError>(x == other, who, ": '", step.name, "' adds ", x, " and ", other);
        return x;
      }
      case Kind::max_pool2d:
      case Kind::avg_pool2d: {
        wants_image();
        const auto s = pooling_of(step, x);
        check<ShapeError>(x.height + 2 * s.padding_h >= s.span_h() && x.width + 2 * s.padding_w >= s.span_w(), who,
                          ": the window of '", step.name, "' does not fit ", x);
        return {x.channels, s.out_height(), s.out_width(), true};
      }
      case Kind::global_avg_pool:
        wants_image();
        return {x.channels, 1, 1, false};
      case Kind::relu:
        return x;
      case Kind::flatten:
        return {x.count(), 1, 1, false};
    }
    return x;
  }

  /// Where the values of a batch lie: those that are not needed at one time may share their memory.
  struct Places {
    std::vector<Images> values;
    std::vector<Index> offsets;
    Index bytes = 0;
  };
  Places place(std::span<const Extent> extents, Index batch) const {
    Places out;
    std::vector<Index> last(extents.size(), 0), border(extents.size(), 0);
    for (std::size_t i = 0; i < steps_.size(); ++i)
      for (const Index input : steps_[i].inputs) {
        const auto at = static_cast<std::size_t>(input);
        last[at] = static_cast<Index>(i) + 1;
        if (steps_[i].kind == Kind::conv2d)
          border[at] = std::max({border[at], steps_[i].padding[0], steps_[i].padding[1]});
      }
    for (std::size_t v = 0; v < extents.size(); ++v) {
      const auto& extent = extents[v];
      out.values.push_back({nullptr, batch, extent.height, extent.width, extent.channels, border[v]});
      const Index bytes = (out.values[v].bytes() + 63) / 64 * 64;
      // First fit among those that are still read when this one is written.
      std::vector<std::pair<Index, Index>> taken;
      for (std::size_t other = 0; other < v; ++other)
        if (last[other] >= static_cast<Index>(v))
          taken.emplace_back(out.offsets[other], out.offsets[other] + (out.values[other].bytes() + 63) / 64 * 64);
      std::sort(taken.begin(), taken.end());
      Index at = 0;
      for (const auto& [begin, end] : taken) {
        if (at + bytes <= begin) break;
        at = std::max(at, end);
      }
      out.offsets.push_back(at);
      out.bytes = std::max(out.bytes, at + bytes);
    }
    return out;
  }

  void run_step(std::size_t i, std::span<const Images> values) const {
    const Step& step = steps_[i];
    const Prepared& ready = prepared_[i];
    const Images& x = values[static_cast<std::size_t>(step.inputs[0])];
    const Images& y = values[i + 1];
    const Levels& from = levels_of(step.inputs[0]);
    switch (step.kind) {
      case Kind::conv2d:
      case Kind::linear: {
        auto shape = convolution_of(step);
        shape.batch = x.batch;
        shape.height = x.height;
        shape.width = x.width;
        const auto& levels = step.levels;
        kernels::int8::convolution(
            shape, x, ready.weights,
            {ready.offset.data(), ready.bias.data(), ready.multiplier.data(), levels.zero_point,
             step.relu ? levels.zero_point : levels.integers.least, levels.integers.most},
            y);
        break;
      }
      case Kind::add:
        kernels::int8::add({from, levels_of(step.inputs[1]), step.levels, step.relu}, x,
                           values[static_cast<std::size_t>(step.inputs[1])], y);
        break;
      case Kind::max_pool2d:
        kernels::int8::max_pool2d(pooling_of(step, {x.channels, x.height, x.width, true}), x, y);
        break;
      case Kind::avg_pool2d:
        kernels::int8::avg_pool2d(
            pooling_of(step, {x.channels, x.height, x.width, true}), x, y,
            {from, step.levels, step.count_include_pad});
        break;
      case Kind::global_avg_pool: {
        const kernels::Pool2dShape whole{x.channels, x.height, x.width, x.height, x.width, 1, 1};
        kernels::int8::avg_pool2d(whole, x, y, {from, step.levels, true});
        break;
      }
      case Kind::relu:
        kernels::int8::look_up(ready.table, x, y);
        break;
      case Kind::flatten:
        for (Index image = 0; image < x.batch; ++image) {
          Images one = x;
          one.data = x.data + image * x.image_bytes();
          one.batch = 1;
          kernels::int8::for_channels_first(one, y.at(image, 0, 0), [](std::uint8_t q) { return q; });
        }
        break;
    }
  }

  template <int OutRank, int Rank, class Watch>
  Tensor<float, OutRank> run(const Tensor<float, Rank>& x, const Watch& watch) const {
    static_assert((Rank == 4 || Rank == 2) && (OutRank == 4 || OutRank == 2),
                  "a quantized model takes and gives [batch, channels, height, width] or [batch, channels]");
    check<UsageError>(!steps_.empty(), who, ": it has no steps: call quantized(model), or load one");
    check<UsageError>(x.defined(), who, ": the input is undefined");
    const auto input = contiguous(x);
    std::vector<Extent> extents{{input.size(1), 1, 1, Rank == 4}};
    if constexpr (Rank == 4) extents[0] = {input.size(1), input.size(2), input.size(3), true};
    for (const auto& step : steps_) extents.push_back(extent_after(step, extents));
    const Extent& result = extents.back();
    check<ShapeError>(result.is_image == (OutRank == 4), who, ": the result of a sample is ", result, ", not of rank ",
                      OutRank - 1);
    const Index batch = input.size(0);
    Shape<OutRank> shape{batch, result.channels};
    if constexpr (OutRank == 4) shape = {batch, result.channels, result.height, result.width};
    auto out = Tensor<float, OutRank>::empty(shape);
    if (out.numel() == 0 || input.numel() == 0) return out;

    Places places = place(extents, batch);
    const kernels::Scratch<std::uint8_t> memory(Cpu{}, places.bytes);
    for (std::size_t v = 0; v < extents.size(); ++v) places.values[v].data = memory.data() + places.offsets[v];

    const std::string input_name = "input";
    for (std::size_t v = 0; v < extents.size(); ++v) {
      const Images& value = places.values[v];
      value.fill_border(static_cast<std::uint8_t>(levels_of(static_cast<Index>(v)).zero_point));
      if (v == 0)
        kernels::int8::quantize(input_, input.data(), value);
      else
        run_step(v - 1, places.values);
      watch(Seen{v == 0 ? input_name : steps_[v - 1].name, levels_of(static_cast<Index>(v)), value});
    }
    kernels::int8::dequantize(output(), places.values.back(), out.data());
    return out;
  }

  Levels input_;
  std::vector<Step> steps_;
  std::vector<Prepared> prepared_;
};

}  // namespace chorus::nn::int8
#endif  // CHORUS_SINGLE_CHORUS_NN_INT8_PROGRAM_HPP

namespace chorus::io {

namespace detail {

/// The key of the metadata under which the steps stand.
inline constexpr const char* int8_key = "chorus.int8";

/// A number of the JSON that has to be a whole one.
inline Index whole_number(std::string_view who, const nlohmann::json& json, const char* field) {
  const auto found = json.find(field);
  check<FileError>(found != json.end() && found->is_number_integer(), who, ": the steps lack a whole number '", field,
                   "'");
  return found->get<Index>();
}
inline std::vector<Index> whole_numbers(std::string_view who, const nlohmann::json& json, const char* field) {
  const auto found = json.find(field);
  check<FileError>(found != json.end() && found->is_array() && found->size() <= 8, who,
                   ": the steps lack a list of numbers '", field, "'");
  std::vector<Index> out;
  for (const auto& number : *found) {
    check<FileError>(number.is_number_integer(), who, ": '", field, "' of a step has what is no whole number");
    out.push_back(number.get<Index>());
  }
  return out;
}
inline std::array<Index, 2> two_numbers(std::string_view who, const nlohmann::json& json, const char* field) {
  const auto both = whole_numbers(who, json, field);
  check<FileError>(both.size() == 2, who, ": '", field, "' of a step has ", both.size(), " numbers, expected 2");
  return {both[0], both[1]};
}
inline bool truth(std::string_view who, const nlohmann::json& json, const char* field) {
  const auto found = json.find(field);
  check<FileError>(found != json.end() && found->is_boolean(), who, ": the steps lack '", field, "', true or false");
  return found->get<bool>();
}

/// The steps without their numbers.
inline std::string steps_json(const nn::int8::Program& program) {
  auto steps = nlohmann::json::array();
  for (const auto& step : program.steps()) {
    nlohmann::json one{{"kind", std::string(nn::int8::kind_names[static_cast<std::size_t>(step.kind)])},
                       {"name", step.name},
                       {"inputs", step.inputs}};
    if (!step.keeps_levels()) one["integers"] = {step.levels.integers.least, step.levels.integers.most};
    if (step.has_weight() || step.kind == nn::int8::Kind::add) one["relu"] = step.relu;
    if (step.kind == nn::int8::Kind::conv2d) one["groups"] = step.groups;
    const bool pools = step.kind == nn::int8::Kind::max_pool2d || step.kind == nn::int8::Kind::avg_pool2d;
    if (pools) {
      one["window"] = step.window;
      one["ceil_mode"] = step.ceil_mode;
      one["count_include_pad"] = step.count_include_pad;
    }
    if (pools || step.kind == nn::int8::Kind::conv2d) {
      one["stride"] = step.stride;
      one["padding"] = step.padding;
      one["dilation"] = step.dilation;
    }
    steps.push_back(std::move(one));
  }
  const auto& integers = program.input().integers;
  return nlohmann::json{{"version", 1}, {"integers", {integers.least, integers.most}}, {"steps", std::move(steps)}}
      .dump();
}

/// The numbers of a tensor, which must have that dtype. Throws FileError.
template <class T>
std::vector<T> numbers_of(const SafetensorsReader& file, const std::string& name, std::vector<Index>* shape = nullptr) {
  const TensorEntry& entry = file.at(name);
  check<FileError>(entry.dtype == file_dtype(dtype<T>), "loading ", file.path(), ": tensor ", Quoted{name},
                   ": expected ", dtype<T>, ", got ", entry.dtype);
  std::vector<T> out(entry.bytes / sizeof(T));
  file.read(entry, std::as_writable_bytes(std::span(out)));
  if (shape != nullptr) *shape = entry.shape;
  return out;
}

inline nn::int8::Levels read_levels(std::string_view who, const SafetensorsReader& file, const std::string& name,
                                    const nlohmann::json& json) {
  const auto scale = numbers_of<float>(file, name + ".scale");
  const auto zero_point = numbers_of<std::uint8_t>(file, name + ".zero_point");
  check<FileError>(scale.size() == 1 && zero_point.size() == 1, "loading ", file.path(), ": ", Quoted{name},
                   " has ", scale.size(), " scales and ", zero_point.size(), " zero points, expected one of each");
  const auto [least, most] = two_numbers(who, json, "integers");
  check<FileError>(0 <= least && least < most && most <= 255, who, ": ", Quoted{name}, " has integers from ", least,
                   " to ", most, ", which are no 8-bit ones");
  const nn::int8::Levels levels{
      scale[0], zero_point[0], {static_cast<std::int32_t>(least), static_cast<std::int32_t>(most)}};
  nn::int8::check_levels<FileError>(who, name, levels);
  return levels;
}

inline nn::int8::Step read_step(std::string_view who, const SafetensorsReader& file, const nlohmann::json& json) {
  using nn::int8::Kind;
  nn::int8::Step step;
  const auto text = [&](const char* field) {
    const auto found = json.find(field);
    check<FileError>(found != json.end() && found->is_string(), who, ": the steps lack a text '", field, "'");
    return found->get<std::string>();
  };
  const auto kind = text("kind");
  const auto found = std::find(nn::int8::kind_names.begin(), nn::int8::kind_names.end(), kind);
  check<FileError>(found != nn::int8::kind_names.end(), who, ": there is no step ", Quoted{kind});
  step.kind = static_cast<Kind>(found - nn::int8::kind_names.begin());
  step.name = text("name");
  step.inputs = whole_numbers(who, json, "inputs");
  if (step.has_weight() || step.kind == Kind::add) step.relu = truth(who, json, "relu");
  const bool pools = step.kind == Kind::max_pool2d || step.kind == Kind::avg_pool2d;
  if (pools) {
    step.window = two_numbers(who, json, "window");
    step.ceil_mode = truth(who, json, "ceil_mode");
    step.count_include_pad = truth(who, json, "count_include_pad");
  }
  if (pools || step.kind == Kind::conv2d) {
    step.stride = two_numbers(who, json, "stride");
    step.padding = two_numbers(who, json, "padding");
    step.dilation = two_numbers(who, json, "dilation");
  }
  if (step.kind == Kind::conv2d) step.groups = whole_number(who, json, "groups");
  if (!step.keeps_levels()) step.levels = read_levels(who, file, step.name, json);
  if (step.has_weight()) {
    std::vector<Index> shape;
    step.weight = numbers_of<std::int8_t>(file, step.name + ".weight", &shape);
    if (step.kind == Kind::linear) shape.resize(4, 1);
    check<FileError>(shape.size() == 4, who, ": the weight of ", Quoted{step.name}, " has ", shape.size(), " axes");
    std::copy_n(shape.begin(), 4, step.weight_shape.begin());
    step.weight_scale = numbers_of<float>(file, step.name + ".weight_scale");
    if (file.find(step.name + ".bias") != nullptr) step.bias = numbers_of<float>(file, step.name + ".bias");
  }
  return step;
}

}  // namespace detail

/// Writes a quantised model, atomically. Throws FileError.
template <std::derived_from<nn::int8::Program> Program>
void save(const Program& program, const std::string& path, Metadata metadata = {}) {
  check<UsageError>(!program.steps().empty(), "saving ", path, ": a quantized model without steps");
  metadata[detail::int8_key] = detail::steps_json(program);
  std::vector<TensorView> tensors;
  std::list<std::vector<Index>> shapes;  // which stay where they are
  std::list<std::uint8_t> zero_points;
  const auto add = [&]<class T>(const std::string& name, std::vector<Index> shape, std::span<const T> numbers) {
    shapes.push_back(std::move(shape));
    tensors.push_back({name, file_dtype(dtype<T>), shapes.back(), std::as_bytes(numbers)});
  };
  const auto add_levels = [&](const std::string& name, const nn::int8::Levels& levels) {
    zero_points.push_back(static_cast<std::uint8_t>(levels.zero_point));
    add(name + ".scale", {}, std::span(&levels.scale, 1));
    add(name + ".zero_point", {}, std::span<const std::uint8_t>(&zero_points.back(), 1));
  };
  add_levels("input", program.input());
  for (const auto& step : program.steps()) {
    if (!step.keeps_levels()) add_levels(step.name, step.levels);
    if (!step.has_weight()) continue;
    const auto& shape = step.weight_shape;
    add(step.name + ".weight",
        std::vector<Index>(shape.begin(), step.kind == nn::int8::Kind::linear ? shape.begin() + 2 : shape.end()),
        std::span(step.weight));
    add(step.name + ".weight_scale", {shape[0]}, std::span(step.weight_scale));
    if (!step.bias.empty()) add(step.name + ".bias", {shape[0]}, std::span(step.bias));
  }
  write_safetensors(path, tensors, metadata);
}
template <std::derived_from<nn::int8::Program> Program>
void save(Program& program, const std::string& path, const Metadata& metadata = {}) {
  save(std::as_const(program), path, metadata);
}

/// Reads what `save` has written. Throws FileError where the file holds no quantised model, or one that can't be run.
inline nn::int8::Program load_quantized(const std::string& path) {
  const SafetensorsReader file(path);
  const std::string who = cat("loading ", path);
  const auto text = file.metadata().find(detail::int8_key);
  check<FileError>(text != file.metadata().end(), who, ": no quantized model: the metadata lack '", detail::int8_key,
                   "'");
  const auto json = nlohmann::json::parse(text->second, nullptr, /*allow_exceptions=*/false);
  check<FileError>(json.is_object() && json.contains("steps") && json["steps"].is_array(), who, ": '",
                   detail::int8_key, "' of the metadata is no list of steps");
  const Index version = detail::whole_number(who, json, "version");
  check<FileError>(version == 1, who, ": a quantized model of version ", version, ", of which only 1 is known");
  std::vector<nn::int8::Step> steps;
  for (const auto& one : json["steps"]) {
    check<FileError>(one.is_object(), who, ": '", detail::int8_key, "' has a step that is no object");
    steps.push_back(detail::read_step(who, file, one));
    nn::int8::check_step<FileError>(who, steps.back(), static_cast<Index>(steps.size()) - 1);
  }
  check<FileError>(!steps.empty(), who, ": a quantized model without steps");
  return {detail::read_levels(who, file, "input", json), std::move(steps)};
}

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_QUANTIZED_FILE_HPP

// <chorus/io/tensor_file.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_TENSOR_FILE_HPP
#define CHORUS_SINGLE_CHORUS_IO_TENSOR_FILE_HPP
/// Single tensors in safetensors files, of any dtype that a Tensor can have: bf16 and half lie there in 2 bytes.

namespace chorus::io {

/// A dense tensor on the host as `write_safetensors` takes it; the tensor must outlive the view. Throws UsageError
/// where it is not contiguous.
template <Scalar T, int Rank>
TensorView view_of(std::string name, const Tensor<T, Rank, Cpu>& tensor) {
  check<UsageError>(tensor.is_contiguous(), "saving ", name, ": a tensor of shape ", tensor.shape(), " and strides ",
                    tensor.strides(), " is not contiguous");
  return {std::move(name), file_dtype(dtype<T>), tensor.shape(),
          std::as_bytes(std::span(tensor.data(), static_cast<std::size_t>(tensor.numel())))};
}

/// The tensor of that name. Throws FileError where there is none, or it has another dtype or number of axes,
/// or a BOOL is neither 0 nor 1.
template <Scalar T, int Rank>
Tensor<T, Rank, Cpu> read_tensor(const SafetensorsReader& file, std::string_view name) {
  const TensorEntry& entry = file.at(name);
  check<FileError>(entry.dtype == file_dtype(dtype<T>) && entry.shape.size() == static_cast<std::size_t>(Rank),
                   "loading ", file.path(), ": tensor ", name, ": expected ", dtype<T>, " with ", Rank, " axes, got ",
                   entry.dtype, " ", std::span<const Index>(entry.shape));
  Shape<Rank> shape{};
  std::copy_n(entry.shape.begin(), Rank, shape.begin());
  auto out = Tensor<T, Rank, Cpu>::empty(shape);
  const auto bytes = std::as_writable_bytes(std::span(out.data(), static_cast<std::size_t>(out.numel())));
  file.read(entry, bytes);
  detail::check_bools(file, entry, bytes);
  return out;
}

}  // namespace chorus::io
#endif  // CHORUS_SINGLE_CHORUS_IO_TENSOR_FILE_HPP

// <chorus/nn/attention.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_ATTENTION_HPP
#define CHORUS_SINGLE_CHORUS_NN_ATTENTION_HPP
/// Multi-head attention (Vaswani et al. 2017), with PyTorch's parameter names and initialisation.

// <chorus/nn/parallel_linear.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_PARALLEL_LINEAR_HPP
#define CHORUS_SINGLE_CHORUS_NN_PARALLEL_LINEAR_HPP
/// Fully connected layers that the ranks of TensorParallel share: by columns of the output, then by rows.

// <chorus/ops/columns.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_COLUMNS_HPP
#define CHORUS_SINGLE_CHORUS_OPS_COLUMNS_HPP
/// Columns: a value whose last axis is shared out among the ranks of a TensorGroup, as a type of its own. Functions of
/// each element take it; what mixes columns does not compile.

// <chorus/ops/tensor_regions.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_TENSOR_REGIONS_HPP
#define CHORUS_SINGLE_CHORUS_OPS_TENSOR_REGIONS_HPP
/// Where tensor parallelism begins and ends (Shoeybi et al. 2019, Megatron-LM): functions whose gradients are each
/// other's. Of a null group all are the identity.

namespace chorus {

using TensorGroupRef = std::shared_ptr<TensorGroup>;

namespace detail {

template <class T, int Rank, class D>
std::span<T> span_of(const Tensor<T, Rank, D>& x) {
  return {x.data(), static_cast<std::size_t>(x.numel())};
}

/// The sum over the group.
template <class T, int Rank, class D>
Tensor<T, Rank, D> summed(const Tensor<T, Rank, D>& x, TensorGroup& group) {
  const auto dense = contiguous(x);
  auto sum = Tensor<T, Rank, D>::empty(dense.shape(), dense.device());
  copy_bytes(sum.device(), sum.data(), dense.device(), dense.data(), dense.bytes());
  group.sum(span_of(sum));
  return sum;
}

/// How an axis of `width` entries is shared out, whose parts have `unit` entries or several times as many.
struct SharedAxis {
  std::size_t axis;
  Index width, unit;
};

// The most numbers that a member has; messages have that size.
inline Index most_numbers(const kernels::AxisShape& whole, const SharedAxis& shared, int ranks) {
  return whole.outer * axis_part(shared.width, shared.unit, ranks, 0).count * whole.inner;
}

/// All members' parts, each `x` of its own, joined along the axis.
template <class T, int Rank, class D>
Tensor<T, Rank, D> all_parts(const Tensor<T, Rank, D>& x, const SharedAxis& shared, TensorGroup& group) {
  const auto part = contiguous(x);
  auto shape = part.shape();
  shape[shared.axis] = shared.width;
  const auto whole = around_axis(shape, shared.axis);
  const Index most = most_numbers(whole, shared, group.size());
  auto mine = Tensor<T, 1, D>::zeros({most}, part.device());
  copy_bytes(part.device(), mine.data(), part.device(), part.data(), part.bytes());
  auto all = Tensor<T, 1, D>::empty({most * group.size()}, part.device());
  group.all_gather(std::span<const T>(span_of(mine)), span_of(all));
  auto out = Tensor<T, Rank, D>::empty(shape, part.device());
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto of_rank = axis_part(shared.width, shared.unit, group.size(), rank);
    if (of_rank.count > 0)
      kernels::put_block(out.device(), whole, of_rank.begin, of_rank.count, all.data() + rank * most, out.data());
  }
  return out;
}

/// This member's part of the sum of all members' `x`.
template <class T, int Rank, class D>
Tensor<T, Rank, D> part_of_sum(const Tensor<T, Rank, D>& x, const SharedAxis& shared, TensorGroup& group) {
  const auto dense = contiguous(x);
  const auto whole = around_axis(dense.shape(), shared.axis);
  const Index most = most_numbers(whole, shared, group.size());
  auto all = Tensor<T, 1, D>::zeros({most * group.size()}, dense.device());
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto of_rank = axis_part(shared.width, shared.unit, group.size(), rank);
    if (of_rank.count > 0)
      kernels::take_block(dense.device(), whole, of_rank.begin, of_rank.count, dense.data(), all.data() + rank * most);
  }
  auto mine = Tensor<T, 1, D>::empty({most}, dense.device());
  group.reduce_scatter(std::span<const T>(span_of(all)), span_of(mine));
  auto shape = dense.shape();
  shape[shared.axis] = group.part(shared.width, shared.unit).count;
  return contiguous(mine.slice(0, 0, numel(shape))).view(shape);
}

template <class T, int Rank, class D>
Tensor<T, Rank, D> part_of(const Tensor<T, Rank, D>& x, const SharedAxis& shared, const TensorGroup& group) {
  const auto part = group.part(shared.width, shared.unit);
  return contiguous(x.slice(static_cast<Index>(shared.axis), part.begin, part.begin + part.count));
}

template <Operand X>
void check_first_order() {
  if constexpr (is_graph_variable<X>)
    fail<UsageError>("gradients of gradients go through one device's layers alone: expected Variables in what ",
                     "TensorParallel shares out");
}

/// An operation between ranks: `forward(x)`, and `backward(dy)` for the gradient.
template <class Forward, class Backward, Operand X>
X between_ranks(const char* name, const Forward& forward, Backward backward, const X& x) {
  check_first_order<X>();
  if constexpr (is_graph_variable<X>)
    return x;
  else
    return record(
        name, forward(value_of(x)),
        [backward = std::move(backward)](const auto& dy, auto dx) { dx->add(backward(dy)); }, x);
}

/// What takes a Variable's place: of a Parameter its Variable.
template <Operand X>
auto as_recorded(const X& x) {
  if constexpr (AnyTensor<X> || is_graph_variable<X>)
    return x;
  else
    return variable_of(x);
}

}  // namespace detail

/// x, which all members have, where each begins to compute something of its own with it. Gradients are added up.
template <Operand X>
auto enter_tensor_region(const X& x, const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  return detail::between_ranks(
      "enter_tensor_region", [](const auto& value) { return value; },
      [group](const auto& dy) { return detail::summed(dy, *group); }, detail::as_recorded(x));
}

/// The sum of all members' x: each has it then.
template <Operand X>
auto leave_tensor_region(const X& x, const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  return detail::between_ranks(
      "leave_tensor_region", [&](const auto& value) { return detail::summed(value, *group); },
      [](const auto& dy) { return dy; }, detail::as_recorded(x));
}

/// This member's part of an axis of x, which all members have. Gradients are gathered.
template <Operand X>
auto scatter_axis(const X& x, Index axis, Index unit = 1, const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  const auto a = normalize_axis("scatter_axis", axis, tensor_of<X>::rank);
  const detail::SharedAxis shared{a, value_of(x).shape()[a], unit};
  return detail::between_ranks(
      "scatter_axis", [&](const auto& value) { return detail::part_of(value, shared, *group); },
      [shared, group](const auto& dy) { return detail::all_parts(dy, shared, *group); }, detail::as_recorded(x));
}

/// All members' parts of an axis of `width` entries, of which x is this one's. `summing`: what comes after it differs
/// between members, so that gradients are added up; else all compute the same with it.
template <Operand X>
auto gather_axis(const X& x, Index axis, Index width, Index unit = 1, bool summing = false,
                 const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  const auto a = normalize_axis("gather_axis", axis, tensor_of<X>::rank);
  const detail::SharedAxis shared{a, width, unit};
  check<ShapeError>(value_of(x).shape()[a] == group->part(width, unit).count, "gather_axis: expected ",
                    group->part(width, unit).count, " of ", width, " entries along axis ", a, ", got shape ",
                    value_of(x).shape());
  return detail::between_ranks(
      "gather_axis", [&](const auto& value) { return detail::all_parts(value, shared, *group); },
      [shared, group, summing](const auto& dy) {
        return summing ? detail::part_of_sum(dy, shared, *group) : detail::part_of(dy, shared, *group);
      },
      detail::as_recorded(x));
}

/// This member's part of an axis of the sum of all members' x. Gradients are gathered.
template <Operand X>
auto reduce_scatter_axis(const X& x, Index axis, Index unit = 1, const TensorGroupRef& group = tensor_group()) {
  if (group == nullptr) return detail::as_recorded(x);
  const auto a = normalize_axis("reduce_scatter_axis", axis, tensor_of<X>::rank);
  const detail::SharedAxis shared{a, value_of(x).shape()[a], unit};
  return detail::between_ranks(
      "reduce_scatter_axis", [&](const auto& value) { return detail::part_of_sum(value, shared, *group); },
      [shared, group](const auto& dy) { return detail::all_parts(dy, shared, *group); }, detail::as_recorded(x));
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_TENSOR_REGIONS_HPP

namespace chorus {

/// [..., width], of which this rank has some neighbouring columns: `part()`. Without a group that is all of them.
template <Operand X>
class Columns {
 public:
  using operand_type = X;

  /// `unit`: see Split. Throws ShapeError where the part is not this rank's.
  Columns(X part, Index width, Index unit = 1, TensorGroupRef group = nullptr)
      : part_(std::move(part)), width_(width), unit_(unit), group_(std::move(group)) {
    check<ShapeError>(value_of(part_).shape().back() == range().count, "Columns: expected ", range().count, " of ",
                      width, " columns, got shape ", value_of(part_).shape());
  }

  const X& part() const { return part_; }
  Index width() const { return width_; }
  Index unit() const { return unit_; }
  const TensorGroupRef& group() const { return group_; }
  /// Which columns this rank has.
  AxisPart range() const { return group_ ? group_->part(width_, unit_) : AxisPart{0, width_}; }
  /// Of all columns.
  auto shape() const {
    auto shape = value_of(part_).shape();
    shape.back() = width_;
    return shape;
  }
  /// Another value whose columns are shared out as these are.
  template <Operand Y>
  Columns<Y> with(Y part) const {
    return {std::move(part), width_, unit_, group_};
  }
  /// Whether two values' columns are shared out in the same way.
  template <class Y>
  bool same_as(const Columns<Y>& other) const {
    return width_ == other.width() && group_ == other.group() &&
           (group_ == nullptr || unit_ == other.unit() || group_->size() == 1);
  }

 private:
  X part_;
  Index width_, unit_;
  TensorGroupRef group_;
};

namespace detail {
template <class X>
inline constexpr bool is_columns = false;
template <class X>
inline constexpr bool is_columns<Columns<X>> = true;
template <class... Xs>
inline constexpr bool no_columns = false;

template <class A, class B>
void check_same_columns(const char* operation, const Columns<A>& a, const Columns<B>& b) {
  check<ShapeError>(a.same_as(b), operation, ": columns of shapes ", a.shape(), " and ", b.shape(),
                    " are shared out in different ways");
}
}  // namespace detail

/// All columns, on every rank.
template <class X>
auto gather_columns(const Columns<X>& x) {
  return gather_axis(x.part(), -1, x.width(), x.unit(), false, x.group());
}

/// This rank's columns of what all ranks have.
template <Operand X>
auto scatter_columns(const X& x, Index unit = 1, const TensorGroupRef& group = tensor_group()) {
  const Index width = value_of(x).shape().back();
  auto part = scatter_axis(x, -1, unit, group);
  return Columns<decltype(part)>(std::move(part), width, unit, group);
}

#define CHORUS_OF_COLUMNS(FUNCTION)                               \
  template <class X, class... Numbers>                            \
  auto FUNCTION(const Columns<X>& x, const Numbers&... numbers) { \
    return x.with(FUNCTION(x.part(), numbers...));                \
  }
CHORUS_OF_COLUMNS(relu)
CHORUS_OF_COLUMNS(relu6)
CHORUS_OF_COLUMNS(sigmoid)
CHORUS_OF_COLUMNS(log_sigmoid)
CHORUS_OF_COLUMNS(silu)
CHORUS_OF_COLUMNS(gelu)
CHORUS_OF_COLUMNS(gelu_tanh)
CHORUS_OF_COLUMNS(mish)
CHORUS_OF_COLUMNS(hardsigmoid)
CHORUS_OF_COLUMNS(hardswish)
CHORUS_OF_COLUMNS(leaky_relu)
CHORUS_OF_COLUMNS(elu)
CHORUS_OF_COLUMNS(softplus)
CHORUS_OF_COLUMNS(hardtanh)
CHORUS_OF_COLUMNS(abs)
CHORUS_OF_COLUMNS(square)
CHORUS_OF_COLUMNS(sqrt)
CHORUS_OF_COLUMNS(exp)
CHORUS_OF_COLUMNS(log)
CHORUS_OF_COLUMNS(sin)
CHORUS_OF_COLUMNS(cos)
CHORUS_OF_COLUMNS(tanh)
CHORUS_OF_COLUMNS(erf)
#undef CHORUS_OF_COLUMNS

#define CHORUS_OF_COLUMNS(OP)                                 \
  template <class A, class B>                                 \
  auto operator OP(const Columns<A>& a, const Columns<B>& b) { \
    detail::check_same_columns(#OP, a, b);                    \
    return a.with(a.part() OP b.part());                      \
  }                                                           \
  template <class X>                                          \
  auto operator OP(const Columns<X>& x, Arithmetic auto n) {  \
    return x.with(x.part() OP n);                             \
  }                                                           \
  template <class X>                                          \
  auto operator OP(Arithmetic auto n, const Columns<X>& x) {  \
    return x.with(n OP x.part());                             \
  }
CHORUS_OF_COLUMNS(+)
CHORUS_OF_COLUMNS(-)
CHORUS_OF_COLUMNS(*)
CHORUS_OF_COLUMNS(/)
#undef CHORUS_OF_COLUMNS

template <class X>
auto operator-(const Columns<X>& x) {
  return x.with(-x.part());
}

// What would mix columns, of which no rank has all. The sentence is the only error, so what they return is x.
#define CHORUS_MIXES_COLUMNS(FUNCTION)                                                                               \
  template <class X, class... More>                                                                                  \
  auto FUNCTION(const Columns<X>& x, const More&...) {                                                               \
    static_assert(detail::no_columns<X, More...>,                                                                    \
                  #FUNCTION ": it mixes columns, of which each rank has a part: use gather_columns(x), or a "       \
                            "RowParallelLinear");                                                                    \
    return x.part();                                                                                                 \
  }
CHORUS_MIXES_COLUMNS(linear)
CHORUS_MIXES_COLUMNS(matmul)
CHORUS_MIXES_COLUMNS(softmax)
CHORUS_MIXES_COLUMNS(log_softmax)
CHORUS_MIXES_COLUMNS(layer_norm)
CHORUS_MIXES_COLUMNS(sum)
CHORUS_MIXES_COLUMNS(mean)
#undef CHORUS_MIXES_COLUMNS

/// The same elements go as of the whole value on one device: each row's numbers are drawn at this part's place.
template <class X>
auto dropout(const Columns<X>& x, double p, bool training = true) {
  static_assert(tensor_of<X>::rank >= 2, "dropout: the input has a batch axis");
  if (x.group() == nullptr || !(training && p > 0)) return x.with(dropout(x.part(), p, training));
  check<UsageError>(p < 1, "dropout: the probability is in [0, 1), got ", p);
  const auto columns = x.range();
  return x.with(detail::dropout_part(x.part(), p, {x.width(), columns.begin, columns.count}));
}

/// Another shape for all axes but the last, which stays: the sizes are those of all columns. Throws ShapeError.
template <class X, std::size_t NewRank>
auto reshape(const Columns<X>& x, std::array<Index, NewRank> shape) {
  check<ShapeError>(shape.back() == x.width(), "reshape: columns that are shared out stay the last axis: expected ",
                    x.width(), " as its size, got ", shape);
  shape.back() = x.range().count;
  return x.with(reshape(x.part(), shape));
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_COLUMNS_HPP

// <chorus/ops/sequence_part.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_SEQUENCE_PART_HPP
#define CHORUS_SINGLE_CHORUS_OPS_SEQUENCE_PART_HPP
/// SequencePart: a value whose places of a text are shared out among the ranks of a TensorGroup (Korthikanti et al.
/// 2022, sequence parallelism), between the layers that share columns. A type of its own, as Columns are.

namespace chorus {

/// The group that shares out sequences, where the policy wants that; null else.
inline TensorGroupRef sequence_group() {
  const auto& group = tensor_group();
  return group != nullptr && group->splits_sequences() ? group : nullptr;
}

/// [batch, length, ...], of which this rank has some neighbouring places: `part()`. Without a group that is all.
template <Operand X>
class SequencePart {
 public:
  SequencePart(X part, Index length, TensorGroupRef group)
      : part_(std::move(part)), length_(length), group_(std::move(group)) {}

  const X& part() const { return part_; }
  Index length() const { return length_; }
  const TensorGroupRef& group() const { return group_; }
  /// Of all places.
  auto shape() const {
    auto shape = value_of(part_).shape();
    shape[1] = length_;
    return shape;
  }
  /// Another value of the same places.
  template <Operand Y>
  SequencePart<Y> with(Y part) const {
    return {std::move(part), length_, group_};
  }

 private:
  X part_;
  Index length_;
  TensorGroupRef group_;
};

/// This rank's places of x: [batch, length, ...], which all ranks have; all places where sequences are whole. Blocks of
/// a transformer take what it gives, and give such: a model that calls it before its blocks, and gather_sequence after
/// them, keeps each rank at its own places in between.
template <Operand X>
auto split_sequence(const X& x, const TensorGroupRef& group = sequence_group()) {
  static_assert(tensor_of<X>::rank >= 2, "split_sequence: the value is [batch, length, ...]");
  auto part = scatter_axis(x, 1, 1, group);
  return SequencePart<decltype(part)>(std::move(part), value_of(x).shape()[1], group);
}

/// All places, on every rank, which compute the same with them.
template <class X>
auto gather_sequence(const SequencePart<X>& x) {
  return gather_axis(x.part(), 1, x.length(), 1, false, x.group());
}

template <class A, class B>
auto operator+(const SequencePart<A>& a, const SequencePart<B>& b) {
  check<ShapeError>(a.length() == b.length() && a.group() == b.group(), "+: sequences of shapes ", a.shape(), " and ",
                    b.shape(), " are shared out in different ways");
  return a.with(a.part() + b.part());
}

/// The same elements go as of the whole value on one device.
template <class X>
auto dropout(const SequencePart<X>& x, double p, bool training = true) {
  if (x.group() == nullptr || !(training && p > 0)) return x.with(dropout(x.part(), p, training));
  check<UsageError>(p < 1, "dropout: the probability is in [0, 1), got ", p);
  const auto& value = value_of(x.part());
  const Index samples = value.size(0), count = value.size(1);
  const Index inner = samples * count == 0 ? 0 : value.numel() / (samples * count);
  const auto places = x.group()->part(x.length(), 1);
  return x.with(detail::dropout_part(x.part(), p, {x.length() * inner, places.begin * inner, count * inner}));
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_SEQUENCE_PART_HPP

namespace chorus::nn {

namespace detail {
/// The group that shares a layer's `width` entries, of which the layer has `mine`; null where it has all. Throws
/// UsageError where there is none.
inline TensorGroupRef group_of_part(const char* layer, Index mine, Index width, Index unit) {
  if (mine == width) return nullptr;
  const auto& group = tensor_group();
  check<UsageError>(group != nullptr && group->part(width, unit).count == mine, layer, ": its ", width,
                    " entries are shared out, and this rank has a part of them: call the net, not its module(), and "
                    "see TensorParallel::gathered for a whole model");
  return group;
}

/// What goes into a layer that `group` shares, and differs between ranks from there on: all places of it.
template <Operand X>
auto entered(const X& x, const TensorGroupRef& group) {
  return enter_tensor_region(x, group);
}
template <class X>
auto entered(const SequencePart<X>& x, const TensorGroupRef& group) {
  if (x.group() == nullptr) return enter_tensor_region(x.part(), group);
  return gather_axis(x.part(), 1, x.length(), 1, /*summing=*/group != nullptr, x.group());
}
}  // namespace detail

struct ParallelLinearOptions {
  bool bias = true;
  /// Ranks have whole groups of so many columns each, such as the features of a head.
  Index unit = 1;
};

/// Linear whose outputs are shared out under TensorParallel: each rank has rows of the weight and the same of the bias,
/// and computes its columns of y. Else it is Linear, with the same names, shapes and initial numbers.
template <Device D, Real T = float>
class ColumnParallelLinear : public Linear<D, T> {
 public:
  /// Throws ShapeError unless `unit` divides the outputs.
  ColumnParallelLinear(Index in_features, Index out_features, const ParallelLinearOptions& options = {})
      : Linear<D, T>(in_features, out_features, {.bias = options.bias}), out_(out_features), unit_(options.unit) {
    check<ShapeError>(unit_ > 0 && out_ % unit_ == 0, "ColumnParallelLinear: units of ", unit_, " do not divide ", out_,
                      " outputs");
  }

  /// x: [..., in], on each rank the same -> Columns of [..., out].
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return columns_of(x); });
  }
  /// x: [batch, length, in] in parts -> Columns of [batch, length, out], of all places.
  template <class X>
  auto operator()(const SequencePart<X>& x) const {
    return detail::watched(*this, [&] { return columns_of(x); });
  }
  template <class X>
  auto operator()(const Columns<X>& x) const {
    return linear(x, this->weight, this->bias);  // which does not compile, and says why
  }
  void visit(Visitor& visitor) override {
    visitor.split_parameter("weight", this->weight, {.axis = 0, .unit = unit_});
    if (this->bias) visitor.split_parameter("bias", this->bias, {.axis = 0, .unit = unit_});
  }
  std::string describe() const override {
    return cat("Linear(", this->weight.shape()[1], ", ", out_, this->bias ? ")" : ", bias=false)");
  }

 private:
  auto columns_of(const auto& x) const {
    auto group = detail::group_of_part("ColumnParallelLinear", this->weight.shape()[0], out_, unit_);
    auto y = this->of_whole_input(detail::entered(x, group));
    return Columns<decltype(y)>(std::move(y), out_, unit_, std::move(group));
  }

  Index out_, unit_;
};

/// Linear whose inputs are shared out under TensorParallel: each rank has columns of the weight, and computes a term of
/// y; the terms are added up, then the bias. Else it is Linear, with the same names, shapes and initial numbers.
template <Device D, Real T = float>
class RowParallelLinear : public Linear<D, T> {
 public:
  /// `unit` is that of the columns that come in. Throws ShapeError unless it divides the inputs.
  RowParallelLinear(Index in_features, Index out_features, const ParallelLinearOptions& options = {})
      : Linear<D, T>(in_features, out_features, {.bias = options.bias}), in_(in_features), unit_(options.unit) {
    check<ShapeError>(unit_ > 0 && in_ % unit_ == 0, "RowParallelLinear: units of ", unit_, " do not divide ", in_,
                      " inputs");
  }

  /// x: [..., in], as a ColumnParallelLinear gives it -> [..., out], on each rank the same. Throws ShapeError where the
  /// columns are shared out in another way.
  template <class X>
  auto operator()(const Columns<X>& x) const {
    return detail::watched(*this, [&] { return of_columns(x); });
  }
  /// Of what each rank has whole, it takes its columns.
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return of_whole(x); });
  }
  /// The same, y: [batch, length, out] in parts, where `group` shares out sequences: it adds up what each rank needs.
  template <class X>
  auto to_sequence(const Columns<X>& x, const TensorGroupRef& group = sequence_group()) const {
    return detail::watched(*this, [&] { return sequence_of(x, group); });
  }
  void visit(Visitor& visitor) override {
    visitor.split_parameter("weight", this->weight, {.axis = 1, .unit = unit_});
    if (this->bias) visitor.parameter("bias", this->bias);
  }
  std::string describe() const override {
    return cat("Linear(", in_, ", ", this->weight.shape()[0], this->bias ? ")" : ", bias=false)");
  }

 private:
  TensorGroupRef group() const {
    return detail::group_of_part("RowParallelLinear", this->weight.shape()[1], in_, unit_);
  }
  template <class X>
  auto of_columns(const Columns<X>& x) const {
    check<ShapeError>(x.width() == in_, "RowParallelLinear: expected ", in_, " columns, got ", x.width());
    const auto own = group();
    if (own == nullptr) return this->of_whole_input(gather_columns(x));
    if (x.group() == nullptr) return sum_of(scatter_columns(x.part(), unit_, own));
    check_unit(x);
    return sum_of(x);
  }
  template <Operand X>
  auto of_whole(const X& x) const {
    if (const auto own = group()) return sum_of(scatter_columns(x, unit_, own));
    return this->of_whole_input(x);
  }
  template <class X>
  auto sum_of(const Columns<X>& x) const {
    return with_bias(leave_tensor_region(linear(x.part(), this->weight), x.group()), this->bias);
  }
  template <class X>
  auto sequence_of(const Columns<X>& x, const TensorGroupRef& sequence) const {
    using Y = decltype(of_columns(x));
    const Index length = x.shape()[1];
    if (sequence == nullptr) return SequencePart<Y>(of_columns(x), length, nullptr);
    if (group() != sequence || x.group() != sequence) return split_sequence(of_columns(x), sequence);
    check_unit(x);
    Y y = with_bias(reduce_scatter_axis(linear(x.part(), this->weight), 1, 1, sequence),
                    enter_tensor_region(this->bias, this->bias ? sequence : nullptr));
    return SequencePart<Y>(std::move(y), length, sequence);
  }
  template <Operand Y, Operand B>
  static Y with_bias(const Y& y, const B& bias) {
    using Number = typename tensor_of<Y>::value_type;
    if (!value_of(bias).defined()) return y;
    if constexpr (std::is_same_v<Number, T>)
      return y + bias;
    else
      return y + to<Number>(bias);
  }
  template <class X>
  void check_unit(const Columns<X>& x) const {
    check<ShapeError>(x.unit() == unit_, "RowParallelLinear: expected columns in units of ", unit_,
                      ", got units of ", x.unit(), ": give both layers the same unit");
  }

  Index in_, unit_;
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_PARALLEL_LINEAR_HPP

namespace chorus::nn {

struct MultiheadAttentionOptions {
  bool bias = true;
};

/// query: [batch, queries, features], key, value: [batch, keys, features] -> [batch, queries, features]; each of
/// `heads` heads attends with features / heads numbers. in_proj_weight: [3 features, features], the projections of
/// query, key and value one below the other. Batches come first (PyTorch's batch_first = True). Under TensorParallel
/// each rank has some of the heads, whole ones.
template <Device D, Real T>
class MultiheadAttention : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> in_proj_weight;
  Parameter<T, 1, D> in_proj_bias;
  RowParallelLinear<D, T> out_proj;

  /// Throws ShapeError unless `heads` divides the features.
  MultiheadAttention(Index features, Index heads, const MultiheadAttentionOptions& options = {})
      : out_proj(features, features, {options.bias, checked_head(features, heads)}), heads_(heads) {
    // Xavier's bound (Glorot, Bengio 2010) for the three projections as one.
    const double bound = std::sqrt(6.0 / static_cast<double>(4 * features));
    in_proj_weight = Parameter(init::uniform<T, D, 2>({3 * features, features}, bound));
    if (!options.bias) return;
    in_proj_bias = Parameter(init::constant<T, D, 1>({3 * features}, T{0}));
    out_proj.bias = Parameter(init::constant<T, D, 1>({features}, T{0}));
  }

  /// With `causal`, query i sees keys 0 to i only.
  template <Operand Q, Operand K, Operand V>
  auto operator()(const Q& query, const K& key, const V& value, bool causal = false) const {
    return detail::watched(*this, [&] { return attend(query, key, value, causal); });
  }
  /// `mask` says which keys each query sees: [queries, keys], or with axes [batch, heads] in front.
  template <Operand Q, Operand K, Operand V, int Rank>
  auto operator()(const Q& query, const K& key, const V& value, const Tensor<bool, Rank, D>& mask) const {
    return detail::watched(*this, [&] { return attend(query, key, value, mask); });
  }

  /// Of sequences in parts, which give such a one: each query sees keys of all places.
  template <class Q, class K, class V, class Seen = bool>
  auto operator()(const SequencePart<Q>& query, const K& key, const V& value, const Seen& seen = Seen{}) const {
    return detail::watched(
        *this, [&] { return out_proj.to_sequence(attended(query, key, value, seen), query.group()); });
  }

  void visit(Visitor& visitor) override {
    const Split by_heads{.axis = 0, .blocks = 3, .unit = in_proj_weight.shape()[1] / heads_};
    visitor.split_parameter("in_proj_weight", in_proj_weight, by_heads);
    if (in_proj_bias) visitor.split_parameter("in_proj_bias", in_proj_bias, by_heads);
    visitor.module("out_proj", out_proj);
  }
  std::string describe() const override {
    return cat("MultiheadAttention(", in_proj_weight.shape()[1], ", ", heads_, " heads)");
  }

 private:
  static Index checked_head(Index features, Index heads) {
    check<ShapeError>(heads > 0 && features % heads == 0, "MultiheadAttention: ", heads, " heads do not divide ",
                      features, " features");
    return features / heads;
  }

  template <Operand Q, Operand K, Operand V, class Seen>
  auto attend(const Q& query, const K& key, const V& value, const Seen& seen) const {
    return out_proj(attended(query, key, value, seen));
  }
  // [batch, queries, features], before the last layer.
  template <class Q, class K, class V, class Seen>
  auto attended(const Q& query, const K& key, const V& value, const Seen& seen) const {
    const Index features = in_proj_weight.shape()[1], head = features / heads_;
    auto group = detail::group_of_part("MultiheadAttention", in_proj_weight.shape()[0] / 3, features, head);
    const auto q = detail::entered(query, group);
    const auto k = entered_once(key, group, query, q), v = entered_once(value, group, key, k);
    const auto& shape = value_of(q).shape();
    check<ShapeError>(shape[2] == features, "MultiheadAttention: a query of shape ", shape, " does not have ", features,
                      " features");
    const auto heads = scaled_dot_product_attention(project(q, 0, head), project(k, 1, head), project(v, 2, head),
                                                    of_heads(seen, group));
    auto joined = reshape(permute(heads, Shape<4>{0, 2, 1, 3}),
                          Shape<3>{shape[0], shape[1], in_proj_weight.shape()[0] / 3});
    return Columns<decltype(joined)>(std::move(joined), features, head, std::move(group));
  }
  template <Operand X>
  static auto node_in(const X& x) {
    return node_of(x);
  }
  template <class X>
  static auto node_in(const SequencePart<X>& x) {
    return node_of(x.part());
  }
  // One value that goes in at several places enters once, so that its gradients are added up in one message.
  template <class X, class Known, class Entered>
  static Entered entered_once(const X& x, const TensorGroupRef& group, const Known& known, const Entered& known_entered)
    requires std::is_same_v<X, Known>
  {
    if constexpr (!chorus::detail::is_graph_variable<Entered>)
      if (group != nullptr && node_in(x) && node_in(x) == node_in(known)) return known_entered;
    return detail::entered(x, group);
  }
  template <class X, class Known, class Entered>
  static auto entered_once(const X& x, const TensorGroupRef& group, const Known&, const Entered&) {
    return detail::entered(x, group);
  }
  // Of a mask with an axis of heads, this rank's.
  template <class Seen>
  Seen of_heads(const Seen& seen, const TensorGroupRef& group) const {
    if constexpr (AnyTensor<Seen>)
      if constexpr (Seen::rank > 2)
        if (group != nullptr && seen.size(-3) == heads_) {
          const auto part = group->part(heads_, 1);
          return contiguous(seen.slice(-3, part.begin, part.begin + part.count));
        }
    return seen;
  }
  // [batch, length, features] -> [batch, this rank's heads, length, features / heads]
  template <Operand X>
  auto project(const X& x, Index part, Index head) const {
    static_assert(tensor_of<X>::rank == 3, "MultiheadAttention: inputs are [batch, length, features]");
    const Index columns = in_proj_weight.shape()[0] / 3;
    const auto weight = slice(in_proj_weight, 0, part * columns, (part + 1) * columns);
    const auto lines = [&] {
      return linear(x, weight, slice(in_proj_bias, 0, part * columns, (part + 1) * columns));
    };
    const auto y = in_proj_bias ? lines() : decltype(lines())(linear(x, weight));
    const auto& shape = value_of(x).shape();
    return permute(reshape(y, Shape<4>{shape[0], shape[1], columns / head, head}), Shape<4>{0, 2, 1, 3});
  }

  Index heads_;
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_ATTENTION_HPP

// <chorus/nn/conv_bn_relu.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_CONV_BN_RELU_HPP
#define CHORUS_SINGLE_CHORUS_NN_CONV_BN_RELU_HPP
/// Convolution, batch norm and ReLU as one module; nn::QuantizationAware folds the first two.

namespace chorus::nn {

namespace detail {
inline Conv2dOptions without_bias(Conv2dOptions options) {
  options.bias = false;  // batch norm has one
  return options;
}
}  // namespace detail

/// x: [batch, in, height, width] -> relu(bn(conv(x))): [batch, out, ...]. The convolution has no bias.
template <Device D>
struct ConvBnReLU : Module {
  Conv2d<D> conv;
  BatchNormReLU2d<D> bn;
  CHORUS_MODULE(ConvBnReLU, conv, bn)

  /// Throws ShapeError as Conv2d and BatchNorm do.
  ConvBnReLU(Index in_channels, Index out_channels, const Conv2dOptions& options,
             const BatchNormLayerOptions& norm = {})
      : conv(in_channels, out_channels, detail::without_bias(options)), bn(out_channels, norm) {}

  auto forward(const auto& x) const { return bn(conv(x)); }
};

/// The same without a ReLU.
template <Device D>
struct ConvBn : Module {
  Conv2d<D> conv;
  BatchNorm2d<D> bn;
  CHORUS_MODULE(ConvBn, conv, bn)

  ConvBn(Index in_channels, Index out_channels, const Conv2dOptions& options, const BatchNormLayerOptions& norm = {})
      : conv(in_channels, out_channels, detail::without_bias(options)), bn(out_channels, norm) {}

  auto forward(const auto& x) const { return bn(conv(x)); }
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_CONV_BN_RELU_HPP

// <chorus/nn/convolutions.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_CONVOLUTIONS_HPP
#define CHORUS_SINGLE_CHORUS_NN_CONVOLUTIONS_HPP
/// Convolution layers of sequences and volumes, and transposed convolutions.

// <chorus/ops/convolution3d.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION3D_HPP
#define CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION3D_HPP
/// Three-dimensional convolution (cross-correlation, as in PyTorch): conv2d with the kernel's depth among the channels.

namespace chorus {

/// Depth, height and width, given as one number or three.
struct Size3d {
  Index depth = 0, height = 0, width = 0;
  constexpr Size3d(Index all) : depth(all), height(all), width(all) {}  // NOLINT: one number stands for three
  constexpr Size3d(Index d, Index h, Index w) : depth(d), height(h), width(w) {}
};

struct Conv3dOptions {
  Size3d stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
};

/// x: [batch, in, depth, height, width], weight: [out, in / groups, kernel_d, kernel_h, kernel_w], bias: [out] or
/// absent -> [batch, out, out_d, out_h, out_w], sizes as for conv2d. Throws as conv2d does.
template <Operand X, Operand W, Operand B>
auto conv3d(const X& x, const W& weight, const B& bias, const Conv3dOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  static_assert(tensor_of<X>::rank == 5 && tensor_of<W>::rank == 5,
                "conv3d: the input is [batch, channels, depth, height, width]");
  const auto [batch, channels, depth, height, width] = value_of(x).shape();
  const auto& w = value_of(weight).shape();
  const Index pad = options.padding.depth, stride = options.stride.depth, dilation = options.dilation.depth;
  check<UsageError>(pad >= 0 && stride > 0 && dilation > 0,
                    "conv3d: stride, dilation and groups are at least 1, padding at least 0");
  check<ShapeError>(w[2] > 0 && depth + 2 * pad >= dilation * (w[2] - 1) + 1, "conv3d: the kernel of ", w,
                    " is larger than the padded input of ", value_of(x).shape());
  const Index out_depth = (depth + 2 * pad - dilation * (w[2] - 1) - 1) / stride + 1;

  // The slices that each slice of the result sees; slice 0 of the padded input is zero and serves for all padding.
  std::vector<std::int64_t> slices;
  for (Index d = 0; d < out_depth; ++d)
    for (Index k = 0; k < w[2]; ++k) {
      const Index at = d * stride + k * dilation - pad;
      slices.push_back(at < 0 || at >= depth ? 0 : at + 1);
    }
  const auto device = value_of(x).device();
  const auto index = Tensor<std::int64_t, 1, D>::from(slices, Shape<1>{out_depth * w[2]}, device);
  const auto padded = concat(2, Tensor<T, 5, D>::zeros({batch, channels, 1, height, width}, device), x);
  const auto seen = reshape(index_select(padded, 2, index), Shape<6>{batch, channels, out_depth, w[2], height, width});
  const auto images =
      reshape(permute(seen, Shape<6>{0, 2, 1, 3, 4, 5}), Shape<4>{batch * out_depth, channels * w[2], height, width});
  const auto y = conv2d(images, reshape(weight, Shape<4>{w[0], w[1] * w[2], w[3], w[4]}), bias,
                        {.stride = {options.stride.height, options.stride.width},
                         .padding = {options.padding.height, options.padding.width},
                         .dilation = {options.dilation.height, options.dilation.width},
                         .groups = options.groups});
  return transpose(reshape(y, Shape<5>{batch, out_depth, w[0], y.size(2), y.size(3)}), 1, 2);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION3D_HPP

namespace chorus::nn {

struct Conv1dOptions {
  Index kernel = 1, stride = 1, padding = 0, dilation = 1, groups = 1;
  bool bias = true;
};

/// x: [batch, in, length] -> [batch, out, out_length]; weight: [out, in / groups, kernel].
template <Device D, Real T>
class Conv1d : public detail::ConvolutionBase<3, D, T>, public quantization::WeightedLayer {
 public:
  /// Throws ShapeError unless channels and kernel are positive and `groups` divides both channel numbers.
  Conv1d(Index in_channels, Index out_channels, const Conv1dOptions& options)
      : detail::ConvolutionBase<3, D, T>("Conv1d", in_channels, out_channels, {options.kernel}, options.groups,
                                         options.bias, false),
        options_{options.stride, options.padding, options.dilation, options.groups} {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      return detail::weighted(this, x, this->weight, this->bias,
                              [this](const auto&... xs) { return conv1d(xs..., options_); });
    });
  }

 private:
  chorus::Conv1dOptions options_;
};

struct Conv3dOptions {
  Size3d kernel = 1, stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
  bool bias = true;
};

/// x: [batch, in, depth, height, width] -> [batch, out, ...]; weight: [out, in / groups, depth, height, width].
template <Device D, Real T>
class Conv3d : public detail::ConvolutionBase<5, D, T>, public quantization::WeightedLayer {
 public:
  /// Throws as Conv1d does.
  Conv3d(Index in_channels, Index out_channels, const Conv3dOptions& options)
      : detail::ConvolutionBase<5, D, T>("Conv3d", in_channels, out_channels,
                                         {options.kernel.depth, options.kernel.height, options.kernel.width},
                                         options.groups, options.bias, false),
        options_{options.stride, options.padding, options.dilation, options.groups} {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      return detail::weighted(this, x, this->weight, this->bias,
                              [this](const auto&... xs) { return conv3d(xs..., options_); });
    });
  }

 private:
  chorus::Conv3dOptions options_;
};

struct ConvTranspose1dOptions {
  Index kernel = 1, stride = 1, padding = 0, output_padding = 0, dilation = 1, groups = 1;
  bool bias = true;
};

/// x: [batch, in, length] -> [batch, out, ...]; weight: [in, out / groups, kernel].
template <Device D, Real T>
class ConvTranspose1d : public detail::ConvolutionBase<3, D, T> {
 public:
  /// Throws as Conv1d does.
  ConvTranspose1d(Index in_channels, Index out_channels, const ConvTranspose1dOptions& options)
      : detail::ConvolutionBase<3, D, T>("ConvTranspose1d", in_channels, out_channels, {options.kernel}, options.groups,
                                         options.bias, true),
        options_{options.stride, options.padding, options.output_padding, options.dilation, options.groups} {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      const auto with_bias = [&] { return conv_transpose1d(x, this->weight, this->bias, options_); };
      return this->bias ? with_bias() : decltype(with_bias())(conv_transpose1d(x, this->weight, options_));
    });
  }

 private:
  chorus::ConvTranspose1dOptions options_;
};

struct ConvTranspose2dOptions {
  Size2d kernel = 1, stride = 1, padding = 0, output_padding = 0, dilation = 1;
  Index groups = 1;
  bool bias = true;
};

/// x: [batch, in, height, width] -> [batch, out, ...]; weight: [in, out / groups, kernel_h, kernel_w].
template <Device D, Real T>
class ConvTranspose2d : public detail::ConvolutionBase<4, D, T> {
 public:
  /// Throws as Conv1d does.
  ConvTranspose2d(Index in_channels, Index out_channels, const ConvTranspose2dOptions& options)
      : detail::ConvolutionBase<4, D, T>("ConvTranspose2d", in_channels, out_channels,
                                         {options.kernel.height, options.kernel.width}, options.groups, options.bias,
                                         true),
        options_{options.stride, options.padding, options.output_padding, options.dilation, options.groups} {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      const auto with_bias = [&] { return conv_transpose2d(x, this->weight, this->bias, options_); };
      return this->bias ? with_bias() : decltype(with_bias())(conv_transpose2d(x, this->weight, options_));
    });
  }

 private:
  chorus::ConvTranspose2dOptions options_;
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_CONVOLUTIONS_HPP

// <chorus/nn/group_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_GROUP_NORM_HPP
#define CHORUS_SINGLE_CHORUS_NN_GROUP_NORM_HPP
/// Normalisation within a sample as layers: groups of channels, single channels, root mean square.

namespace chorus::nn {

/// Normalises groups of neighbouring channels of x: [batch, channels, ...], then scales and shifts each channel.
template <Device D, Real T>
class GroupNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;

  /// Throws ShapeError unless `groups` divides the channels.
  GroupNorm(Index groups, Index channels, double eps = 1e-5) : groups_(groups), eps_(eps) {
    check<ShapeError>(groups > 0 && channels > 0 && channels % groups == 0, "GroupNorm: ", groups,
                      " groups do not divide ", channels, " channels");
    weight = Parameter(init::constant<T, D, 1>({channels}, T{1}));
    bias = Parameter(init::constant<T, D, 1>({channels}, T{0}));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return group_norm(x, groups_, weight, bias, eps_); });
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    visitor.parameter("bias", bias);
  }
  std::string describe() const override { return cat("GroupNorm(", groups_, ", ", weight.shape()[0], ")"); }

 private:
  Index groups_;
  double eps_;
};

struct InstanceNormOptions {
  double eps = 1e-5;
  /// Whether channels are scaled and shifted; not, by default, as in PyTorch.
  bool affine = false;
};

/// Normalises each channel of each sample of x: [batch, channels, ...].
template <Device D, Real T>
class InstanceNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;

  /// Throws ShapeError unless `channels` is positive.
  explicit InstanceNorm(Index channels, const InstanceNormOptions& options = {})
      : channels_(channels), eps_(options.eps) {
    check<ShapeError>(channels > 0, "InstanceNorm: ", channels, " channels: must be positive");
    if (!options.affine) return;
    weight = Parameter(init::constant<T, D, 1>({channels}, T{1}));
    bias = Parameter(init::constant<T, D, 1>({channels}, T{0}));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      check<ShapeError>(value_of(x).size(1) == channels_, "InstanceNorm: an input of shape ", value_of(x).shape(),
                        " does not have ", channels_, " channels");
      return instance_norm(x, weight, bias, eps_);
    });
  }
  void visit(Visitor& visitor) override {
    if (weight) visitor.parameter("weight", weight);
    if (bias) visitor.parameter("bias", bias);
  }
  std::string describe() const override { return cat("InstanceNorm(", channels_, ")"); }

 private:
  Index channels_;
  double eps_;
};

/// PyTorch's names; the number of inner axes is the input's.
template <Device D, Real T = float>
using InstanceNorm1d = InstanceNorm<D, T>;
template <Device D, Real T = float>
using InstanceNorm2d = InstanceNorm<D, T>;

/// Divides the last axis of x: [..., features] by its root mean square, then scales it.
template <Device D, Real T>
class RMSNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight;

  /// Throws ShapeError unless `features` is positive.
  explicit RMSNorm(Index features, double eps = 1e-6) : eps_(eps) {
    check<ShapeError>(features > 0, "RMSNorm: ", features, " features: must be positive");
    weight = Parameter(init::constant<T, D, 1>({features}, T{1}));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return rms_norm(x, weight, eps_); });
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override { return cat("RMSNorm(", weight.shape()[0], ")"); }

 private:
  double eps_;
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_GROUP_NORM_HPP

// <chorus/nn/mixed_precision.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_MIXED_PRECISION_HPP
#define CHORUS_SINGLE_CHORUS_NN_MIXED_PRECISION_HPP
/// MixedPrecision: a model that computes in bf16 or half, over float parameters (Micikevicius et al., "Mixed Precision
/// Training", ICLR 2018).

namespace chorus::nn {

namespace detail {

/// 2-byte copies of a model's float parameters, laid out as they are. A copy of this object has none.
template <Narrow T, Device D>
class NarrowCopies {
 public:
  NarrowCopies() = default;
  NarrowCopies(const NarrowCopies&) {}
  NarrowCopies& operator=(const NarrowCopies&) { return *this; }

  /// Converts the parameters that have changed since the last call: neighbours in memory by one kernel.
  void refresh(Module& model) {
    Collector found;
    model.visit(found);
    auto& parameters = found.parameters;
    std::sort(parameters.begin(), parameters.end(),
              [](const auto* a, const auto* b) { return std::less<>()(a->memory(), b->memory()); });
    parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());  // shared ones
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
      // Where a rank has only a part at hand, operations convert what they have gathered.
      if (parameter.storage().in_parts()) return;
      if (parameter.dtype() == DType::f32 && parameter.count() > 0) parameters.push_back(&parameter);
    }
    void buffer(std::string_view, AnyBuffer&) override {}
  };

  static const float* value(const ParameterOn<D>& parameter) {
    return static_cast<const float*>(parameter.memory());
  }

  // Elements up to where a small one that follows begins: in front of a large one there may be more.
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

}  // namespace detail

/// `Model`, whose layers compute in T: floating-point inputs are turned into T, outputs into float. Parameters, their
/// gradients, their reduction over devices and the optimizer's step stay float, as does the loss; of the parameters a
/// copy in T is kept, which is renewed in the first forward pass after a step. A type like any other model, for every
/// policy: `DistributedDataParallel<MixedPrecision<ToyModel<Cuda>>>`; parameters keep their names. With half, gradients
/// may be too small for T: see optim::GradScaler.
template <class Model, Narrow T = bf16>
class MixedPrecision : public Module {
 public:
  using device_type = typename Model::device_type;

  explicit MixedPrecision(Model model = {}) : model_(std::move(model)) {}

  /// What `Model::forward` takes and gives, tuples included; tensors that are not floating-point pass as they are.
  template <class... Inputs>
  auto forward(const Inputs&... inputs) const {
    copies_.refresh(model_);
    return widened(model_.forward(narrowed(inputs)...));
  }
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) const {
    return detail::watched(*this, [&] { return forward(inputs...); });
  }

  /// The model inside.
  Model& model() { return model_; }
  void visit(Visitor& visitor) override {
    visitor.inner(model_);
    model_.visit(visitor);
  }
  std::string describe() const override { return cat("MixedPrecision(", model_.describe(), ", ", dtype<T>, ")"); }

 private:
  template <class X>
  static decltype(auto) narrowed(const X& x) {
    if constexpr (Operand<X>) {
      if constexpr (Real<typename tensor_of<X>::value_type>)
        return to<T>(x);
      else
        return x;
    } else {
      return x;
    }
  }

  template <class Y>
  static auto widened(const Y& y) {
    if constexpr (NarrowOperand<Y>)
      return to<float>(y);
    else
      return y;
  }
  template <class... Members>
  static auto widened(const std::tuple<Members...>& members) {
    return std::apply([](const auto&... y) { return std::tuple(widened(y)...); }, members);
  }

  mutable Model model_;  // a visit hands out its parameters, to which the copies belong
  mutable detail::NarrowCopies<T, device_type> copies_;
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_MIXED_PRECISION_HPP

// <chorus/nn/more_activations.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_MORE_ACTIVATIONS_HPP
#define CHORUS_SINGLE_CHORUS_NN_MORE_ACTIVATIONS_HPP
/// Functions as layers, beside those of activations.hpp.

// <chorus/ops/dropout_variants.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_DROPOUT_VARIANTS_HPP
#define CHORUS_SINGLE_CHORUS_OPS_DROPOUT_VARIANTS_HPP
/// Dropout of whole channels, and dropout that keeps mean and variance.

namespace chorus {

/// x: [batch, channels, ...]: in training zeroes each channel of each sample with probability p and scales the others
/// by 1 / (1 - p) (Tompson et al. 2015). Throws UsageError unless 0 <= p < 1.
template <Operand X>
auto dropout_channels(const X& x, double p, bool training = true) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 2, "dropout_channels: the input is [batch, channels, ...]");
  const auto& shape = value_of(x).shape();
  using Mask = Tensor<typename tensor_of<X>::value_type, 2, typename tensor_of<X>::device_type>;
  const auto kept = dropout(Mask::ones({shape[0], shape[1]}, value_of(x).device()), p, training);
  Shape<rank> per_channel{};
  per_channel.fill(1);
  per_channel[0] = shape[0];
  per_channel[1] = shape[1];
  return x * reshape(kept, per_channel);
}

/// In training sets each element with probability p to SELU's limit at minus infinity, then scales and shifts all, so
/// that mean 0 and variance 1 stay (Klambauer et al. 2017). Throws UsageError unless 0 <= p < 1.
template <Operand X>
auto alpha_dropout(const X& x, double p, bool training = true) {
  const double limit = -1.7580993408473766, keep = 1 - p;
  const auto kept = dropout(tensor_of<X>::ones(value_of(x).shape(), value_of(x).device()), p, training);
  const double drops = training ? p : 0;
  const double scale = 1 / std::sqrt((1 - drops) * (1 + drops * limit * limit));
  // `kept` is 0 or 1 / keep in training: times keep it chooses.
  const auto chosen = kept * (training ? keep : 1);
  return (x * chosen + (1 - chosen) * limit) * scale - scale * limit * drops;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_DROPOUT_VARIANTS_HPP

// <chorus/ops/interpolation.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_INTERPOLATION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_INTERPOLATION_HPP
/// Images in other sizes: bilinear interpolation, and the largest number of each part of an image.

namespace chorus {

namespace detail {

// Along an axis each place of the resized one lies between two entries of x, at a share of the way from the one to the
// other. (No product with a matrix of shares: 0 times an infinity elsewhere in the image is NaN.)
template <Operand X>
auto interpolate_axis(const X& x, std::size_t a, Index out, bool align_corners) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto device = value_of(x).device();
  auto shape = value_of(x).shape();
  const Index in = shape[a];
  const auto same = [&] { return reshape(x, shape); };
  if (in == out) return same();
  std::vector<std::int64_t> left, right;
  std::vector<T> near, far;
  for (Index i = 0; i < out; ++i) {
    const double at =
        align_corners
            ? (out > 1 ? static_cast<double>(i * (in - 1)) / static_cast<double>(out - 1) : 0)
            : std::max(0.0, (static_cast<double>(i) + 0.5) * static_cast<double>(in) / static_cast<double>(out) - 0.5);
    left.push_back(std::min(static_cast<Index>(at), in - 1));
    right.push_back(std::min(left.back() + 1, std::int64_t{in - 1}));
    const double share = at - static_cast<double>(left.back());
    near.push_back(static_cast<T>(1 - share));
    far.push_back(static_cast<T>(share));
  }
  shape.fill(1);
  shape[a] = out;
  const auto part = [&](const auto& places, const auto& shares) {
    const auto index = Tensor<std::int64_t, 1, D>::from(places, Shape<1>{out}, device);
    return index_select(x, static_cast<Index>(a), index) * tensor_of<X>::from(shares, shape, device);
  };
  return decltype(same())(part(left, near) + part(right, far));
}

// The largest of each of `out` equal parts of an axis; shorter parts repeat their last one.
template <Operand X>
auto adaptive_max(const X& x, std::size_t a, Index out) {
  const AxisParts parts{value_of(x).shape()[a], out};
  const auto split = split_axis(x, a, parts, [&](Index i) { return parts.last(i) - 1; });
  auto one = split.shape();
  one[a + 1] = 1;
  auto shape = value_of(x).shape();
  shape[a] = out;
  const auto along = static_cast<Index>(a) + 1;
  return reshape(gather(split, along, argmax(split, along).view(one)), shape);
}

inline void check_resize(const char* operation, const Shape<4>& image, Size2d size) {
  check<UsageError>(size.height > 0 && size.width > 0, operation, ": the size is at least 1, got ", size.height, " x ",
                    size.width);
  check<ShapeError>(image[2] > 0 && image[3] > 0, operation, ": an image of shape ", image, " has no pixels");
}

}  // namespace detail

/// x: [batch, channels, height, width] -> [batch, channels, size.height, size.width], between pixels in straight lines.
/// With `align_corners` the centres of the corner pixels stay in the corners, else the corners of the images do. Throws
/// UsageError unless the size is positive, ShapeError for an image without pixels.
template <Operand X>
auto upsample_bilinear2d(const X& x, Size2d size, bool align_corners = false) {
  static_assert(tensor_of<X>::rank == 4, "upsample_bilinear2d: the input is [batch, channels, height, width]");
  detail::check_resize("upsample_bilinear2d", value_of(x).shape(), size);
  return detail::interpolate_axis(detail::interpolate_axis(x, 3, size.width, align_corners), 2, size.height,
                                  align_corners);
}

/// x: [batch, channels, height, width] -> the largest number of each part of an image: [batch, channels, size.height,
/// size.width]; parts as of adaptive_avg_pool2d. Of pixels that tie the first gets the gradient. Throws as that does.
template <Operand X>
auto adaptive_max_pool2d(const X& x, Size2d size) {
  static_assert(tensor_of<X>::rank == 4, "adaptive_max_pool2d: the input is [batch, channels, height, width]");
  const auto& shape = value_of(x).shape();
  detail::check_resize("adaptive_max_pool2d", shape, size);
  const auto parts = [&] { return detail::adaptive_max(detail::adaptive_max(x, 3, size.width), 2, size.height); };
  // Equal parts are the windows of a plain pooling.
  if (shape[2] % size.height == 0 && shape[3] % size.width == 0)
    return decltype(parts())(max_pool2d(x, Size2d{shape[2] / size.height, shape[3] / size.width}));
  return parts();
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_INTERPOLATION_HPP

// <chorus/ops/more_activations.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_MORE_ACTIVATIONS_HPP
#define CHORUS_SINGLE_CHORUS_OPS_MORE_ACTIVATIONS_HPP
/// Activations beside the usual ones, with PyTorch's definitions.

namespace chorus {

namespace functors {

/// scale (x, or alpha (exp(x) - 1) below 0) with the constants that keep mean 0 and variance 1 (Klambauer et al. 2017).
struct Selu {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    return where(x > 0, x * R(1.0507009873554805), expm1(x) * R(1.6732632423543772 * 1.0507009873554805));
  }
};
/// x, or alpha (exp(x / alpha) - 1) below 0 (Barron 2017).
struct Celu {
  double alpha = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    return where(x > 0, x, expm1(x * R(1 / alpha)) * R(alpha));
  }
};
/// x / (1 + |x|)
struct Softsign {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x / (1 + abs(x));
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    const S below = 1 + abs(x);
    return {{dy / below / below}};
  }
};
/// x - tanh(x)
struct Tanhshrink {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x - tanh(x);
  }
};
/// x outside of [-lambda, lambda], else 0.
struct Hardshrink {
  double lambda = 0.5;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(abs(x) <= real_of<S>(lambda), S(0), x);
  }
  template <class S>
  CHORUS_HD Partials<S, 1> gradient(const S& dy, const S& x) const {
    return {{where(abs(x) > real_of<S>(lambda), dy, S(0))}};
  }
};
/// x moved by lambda towards 0, where it ends.
struct Softshrink {
  double lambda = 0.5;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    return where(x > R(lambda), x - R(lambda), where(x < R(-lambda), x + R(lambda), x * 0));  // NaN stays
  }
};
/// x above the threshold, else a value.
struct Threshold {
  double threshold = 0, value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x <= real_of<S>(threshold), S(real_of<S>(value)), x);
  }
};
/// x for positive x, else slope x, the slope being learned (He et al. 2015).
struct Prelu {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& slope) const {
    return where(x > 0, x, x * slope);
  }
};

}  // namespace functors

template <Operand X>
auto selu(const X& x) {
  return detail::pointwise("selu", functors::Selu{}, x);
}
/// Throws UsageError where alpha is 0.
template <Operand X>
auto celu(const X& x, double alpha = 1) {
  check<UsageError>(alpha != 0, "celu: alpha is 0");
  return detail::pointwise("celu", functors::Celu{alpha}, x);
}
template <Operand X>
auto softsign(const X& x) {
  return detail::pointwise("softsign", functors::Softsign{}, x);
}
template <Operand X>
auto tanhshrink(const X& x) {
  return detail::pointwise("tanhshrink", functors::Tanhshrink{}, x);
}
template <Operand X>
auto hardshrink(const X& x, double lambda = 0.5) {
  return detail::pointwise("hardshrink", functors::Hardshrink{lambda}, x);
}
template <Operand X>
auto softshrink(const X& x, double lambda = 0.5) {
  return detail::pointwise("softshrink", functors::Softshrink{lambda}, x);
}
template <Operand X>
auto threshold(const X& x, double above, double value) {
  return detail::pointwise("threshold", functors::Threshold{above, value}, x);
}

/// x: [batch, channels, ...], slope: [channels] or [1]. Throws ShapeError where the channels differ.
template <Operand X, Operand W>
auto prelu(const X& x, const W& slope) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 2 && tensor_of<W>::rank == 1,
                "prelu: the input is [batch, channels, ...], the slope [channels]");
  Shape<rank - 1> per_channel{};
  per_channel.fill(1);
  per_channel[0] = value_of(slope).numel();
  check<ShapeError>(per_channel[0] == 1 || per_channel[0] == value_of(x).size(1), "prelu: an input of shape ",
                    value_of(x).shape(), " does not fit ", per_channel[0], " slopes");
  return detail::pointwise("prelu", functors::Prelu{}, x, reshape(slope, per_channel));
}

/// The first half of an axis times the sigmoid of the second (Dauphin et al. 2017). Throws ShapeError for an odd size.
template <Operand X>
auto glu(const X& x, Index axis = -1) {
  const Index size = value_of(x).size(axis);
  check<ShapeError>(size % 2 == 0, "glu: axis ", axis, " of shape ", value_of(x).shape(), " has no two halves");
  return slice(x, axis, 0, size / 2) * sigmoid(slice(x, axis, size / 2, size));
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_MORE_ACTIVATIONS_HPP

namespace chorus::nn {

CHORUS_FUNCTION_LAYER(SELU, selu);
CHORUS_FUNCTION_LAYER(Softsign, softsign);
CHORUS_FUNCTION_LAYER(Tanhshrink, tanhshrink);
CHORUS_FUNCTION_LAYER(GELUTanh, gelu_tanh);
/// The mean of each channel of an image: [batch, channels].
CHORUS_FUNCTION_LAYER(GlobalAvgPool, global_avg_pool);

// One option, given at construction.
#define CHORUS_OPTION_LAYER(LAYER, FUNCTION, OPTION, DEFAULT)                                  \
  struct LAYER : Module {                                                                      \
    double OPTION;                                                                             \
    explicit LAYER(double option = DEFAULT) : OPTION(option) {}                                \
    template <Operand X>                                                                       \
    auto operator()(const X& x) const {                                                        \
      return detail::watched(*this, [&] { return FUNCTION(x, OPTION); });                      \
    }                                                                                          \
    std::string describe() const override { return cat(#LAYER "(" #OPTION "=", OPTION, ")"); } \
  }
CHORUS_OPTION_LAYER(CELU, celu, alpha, 1);
CHORUS_OPTION_LAYER(Hardshrink, hardshrink, lambda, 0.5);
CHORUS_OPTION_LAYER(Softshrink, softshrink, lambda, 0.5);
#undef CHORUS_OPTION_LAYER

/// log(1 + exp(beta x)) / beta; x itself where beta x is above the threshold.
struct Softplus : Module {
  double beta, threshold;
  explicit Softplus(double scale = 1, double above = 20) : beta(scale), threshold(above) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return softplus(x, beta, threshold); });
  }
  std::string describe() const override { return cat("Softplus(", beta, ")"); }
};

/// x limited to [min, max].
struct Hardtanh : Module {
  double min, max;
  explicit Hardtanh(double low = -1, double high = 1) : min(low), max(high) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return hardtanh(x, min, max); });
  }
  std::string describe() const override { return cat("Hardtanh(", min, ", ", max, ")"); }
};

/// x above the threshold, else the value.
struct Threshold : Module {
  double threshold, value;
  Threshold(double above, double otherwise) : threshold(above), value(otherwise) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return chorus::threshold(x, threshold, value); });
  }
  std::string describe() const override { return cat("Threshold(", threshold, ", ", value, ")"); }
};

/// log(softmax(x)) along an axis.
struct LogSoftmax : Module {
  Index axis;
  explicit LogSoftmax(Index along) : axis(along) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return log_softmax(x, axis); });
  }
  std::string describe() const override { return cat("LogSoftmax(", axis, ")"); }
};

/// The first half of an axis times the sigmoid of the second.
struct GLU : Module {
  Index axis;
  explicit GLU(Index along = -1) : axis(along) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return glu(x, axis); });
  }
  std::string describe() const override { return cat("GLU(", axis, ")"); }
};

/// x for positive x, else x times a learned slope: one, or one a channel of x: [batch, channels, ...].
template <Device D, Real T = float>
class PReLU : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight;
  explicit PReLU(Index channels = 1, double slope = 0.25) {
    check<ShapeError>(channels > 0, "PReLU: ", channels, " channels: must be positive");
    weight = Parameter(init::constant<T, D, 1>({channels}, static_cast<T>(slope)));
  }
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return prelu(x, weight); });
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override { return cat("PReLU(", weight.shape()[0], ")"); }
};

/// x as it is: in the place of a layer that a variant of a model lacks.
struct Identity : Module {
  template <Operand X>
  X operator()(const X& x) const {
    return detail::watched(*this, [&] { return x; });
  }
  std::string describe() const override { return "Identity"; }
};

/// In training zeroes whole channels of x: [batch, channels, ...] with probability `p`.
struct Dropout2d : Dropout {
  using Dropout::Dropout;
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return dropout_channels(x, p, training()); });
  }
  std::string describe() const override { return cat("Dropout2d(", p, ")"); }
};
/// Dropout for SELU: keeps mean and variance.
struct AlphaDropout : Dropout {
  using Dropout::Dropout;
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return alpha_dropout(x, p, training()); });
  }
  std::string describe() const override { return cat("AlphaDropout(", p, ")"); }
};

/// Images of any size to images of one.
struct AdaptiveAvgPool2d : Module {
  Size2d size;
  explicit AdaptiveAvgPool2d(Size2d to) : size(to) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return adaptive_avg_pool2d(x, size); });
  }
  std::string describe() const override { return cat("AdaptiveAvgPool2d(", size.height, "x", size.width, ")"); }
};
struct AdaptiveMaxPool2d : Module {
  Size2d size;
  explicit AdaptiveMaxPool2d(Size2d to) : size(to) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return adaptive_max_pool2d(x, size); });
  }
  std::string describe() const override { return cat("AdaptiveMaxPool2d(", size.height, "x", size.width, ")"); }
};

enum class UpsampleMode : std::uint8_t { nearest, bilinear };

/// Images `scale` times as large.
struct Upsample : Module {
  Size2d scale;
  UpsampleMode mode;
  bool align_corners;
  explicit Upsample(Size2d by, UpsampleMode how = UpsampleMode::nearest, bool corners = false)
      : scale(by), mode(how), align_corners(corners) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      auto nearest = [&] { return upsample_nearest2d(x, scale); };
      if (mode == UpsampleMode::nearest) return nearest();
      const Size2d size{value_of(x).size(2) * scale.height, value_of(x).size(3) * scale.width};
      return decltype(nearest())(upsample_bilinear2d(x, size, align_corners));
    });
  }
  std::string describe() const override {
    return cat("Upsample(", scale.height, "x", scale.width,
               mode == UpsampleMode::nearest ? ", nearest)" : ", bilinear)");
  }
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_MORE_ACTIVATIONS_HPP

// <chorus/nn/positions.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_POSITIONS_HPP
#define CHORUS_SINGLE_CHORUS_NN_POSITIONS_HPP
/// Encodings of positions in a sequence: learned, sinusoidal, rotary.

namespace chorus::nn {

/// Adds a learned vector for each place: x: [batch, length, features], weight: [most, features].
template <Device D, Real T = float>
class LearnedPositions : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> weight;

  /// Starts with numbers from N(0, 0.02²). Throws ShapeError unless both sizes are positive.
  LearnedPositions(Index most, Index features) {
    check<ShapeError>(most > 0 && features > 0, "LearnedPositions: ", most, " places of ", features,
                      " features: both must be positive");
    weight = Parameter(init::normal<T, D, 2>({most, features}, 0, 0.02));
  }
  /// Throws ShapeError where the sequence is longer than there are places.
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      const Index length = value_of(x).size(-2);
      check<ShapeError>(length <= weight.shape()[0], "LearnedPositions: a sequence of ", length, " is longer than ",
                        weight.shape()[0], " places");
      return x + slice(weight, 0, 0, length);
    });
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override {
    return cat("LearnedPositions(", weight.shape()[0], ", ", weight.shape()[1], ")");
  }
};

namespace detail {
// [at least `length`, features / 2]: sines and cosines of the place times 10000^(-2 i / features).
template <Real T, Device D>
struct PositionTables {
  Index features = 0, length = 0;
  D device{};
  Tensor<T, 2, D> sine{}, cosine{};
};

// Each thread keeps its tables for the next call.
template <Real T, Device D>
const PositionTables<T, D>& position_tables(Index length, Index features, D device) {
  thread_local std::vector<PositionTables<T, D>> kept;
  auto tables = std::find_if(kept.begin(), kept.end(),
                             [&](const auto& t) { return t.features == features && t.device == device; });
  if (tables != kept.end() && tables->length >= length) {
    chorus::detail::keep_for_replays(tables->sine.storage());
    chorus::detail::keep_for_replays(tables->cosine.storage());
    return *tables;
  }
  const auto table = [&, places = tables == kept.end() ? length : std::max(length, 2 * tables->length)](auto f) {
    auto host = Tensor<T, 2, Cpu>::empty({places, features / 2});
    for (Index place = 0; place < places; ++place)
      for (Index i = 0; i < features / 2; ++i)
        host(place, i) =
            static_cast<T>(f(static_cast<double>(place) *
                             std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(features))));
    return Tensor<T, 2, D>::from({host.data(), static_cast<std::size_t>(host.numel())}, host.shape(), device);
  };
  const auto sine = table([](double angle) { return std::sin(angle); });
  const auto cosine = table([](double angle) { return std::cos(angle); });
  if (tables == kept.end()) tables = kept.insert(kept.end(), {.features = features, .device = device});
  tables->length = sine.size(0);
  tables->sine = sine;
  tables->cosine = cosine;
  return *tables;
}
}  // namespace detail

/// Adds sines (features 0, 2, ...) and cosines (1, 3, ...) of the place at falling frequencies (Vaswani et al. 2017) to
/// x: [batch, length, features]. Throws ShapeError for an odd number of features.
struct SinusoidalPositions : Module {
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] {
      using T = typename tensor_of<X>::value_type;
      const Index length = value_of(x).size(-2), features = value_of(x).size(-1);
      check<ShapeError>(features % 2 == 0, "SinusoidalPositions: ", features, " features are not even");
      const auto& tables = detail::position_tables<T>(length, features, value_of(x).device());
      return x + reshape(stack(2, tables.sine.slice(0, 0, length), tables.cosine.slice(0, 0, length)),
                         Shape<2>{length, features});
    });
  }
  std::string describe() const override { return "SinusoidalPositions"; }
};

/// Turns the pairs (i, i + features / 2) of queries or keys x: [..., length, features] by an angle that grows with the
/// place, so that products of them depend on distances alone (Su et al. 2021). `first` is the place of the first entry.
/// Throws ShapeError for an odd number of features.
template <Operand X>
auto rotary_positions(const X& x, Index first = 0) {
  using T = typename tensor_of<X>::value_type;
  const Index length = value_of(x).size(-2), features = value_of(x).size(-1);
  check<ShapeError>(features % 2 == 0, "rotary_positions: ", features, " features are not even");
  check<UsageError>(first >= 0, "rotary_positions: the first place is ", first);
  const auto& tables = detail::position_tables<T>(first + length, features, value_of(x).device());
  const auto sine = tables.sine.slice(0, first, first + length), cosine = tables.cosine.slice(0, first, first + length);
  const auto a = slice(x, -1, 0, features / 2), b = slice(x, -1, features / 2, features);
  return concat(-1, a * cosine - b * sine, b * cosine + a * sine);
}

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_POSITIONS_HPP

// <chorus/nn/quantization_aware.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_QUANTIZATION_AWARE_HPP
#define CHORUS_SINGLE_CHORUS_NN_QUANTIZATION_AWARE_HPP
/// QuantizationAware: a model that trains with the rounding that integers will bring (Jacob et al., "Quantization and
/// Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018).

// <chorus/nn/quantization/layers.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_QUANTIZATION_LAYERS_HPP
#define CHORUS_SINGLE_CHORUS_NN_QUANTIZATION_LAYERS_HPP
/// The layers of a model that become integers, found by a walk through it.

namespace chorus::nn::quantization {

/// A layer with weights, and the batch norm that is listed directly after it in the same module, with as many channels
/// and running statistics: those are folded.
struct FoundLayer {
  std::string name, norm_name;
  Module* layer = nullptr;
  Module* norm = nullptr;
  const FoldableNorm* foldable = nullptr;
  Index channels = 0;
};

/// All such layers, in the order in which they are listed; one that stands at several places at the first. Throws
/// UsageError for weights that are not float.
inline std::vector<FoundLayer> find_layers(Module& model) {
  struct Find final : nn::detail::Walker {
    std::vector<FoundLayer> found;
    const Module* before = nullptr;  // the layer entered last, and the module that it is listed in
    std::string listed_in;

    void enter(Module& module) override {
      std::string name = prefix();
      if (!name.empty()) name.pop_back();
      const auto dot = name.rfind('.');
      const std::string parent = dot == std::string::npos ? "" : name.substr(0, dot);
      const auto* const last = std::exchange(before, &module);
      const bool neighbours = std::exchange(listed_in, parent) == parent && last != nullptr && !found.empty() &&
                              found.back().layer == last;
      if (const auto* const norm = dynamic_cast<const FoldableNorm*>(&module);
          norm != nullptr && neighbours && norm->channels() == found.back().channels && norm->can_be_folded()) {
        found.back().norm = &module;
        found.back().foldable = norm;
        found.back().norm_name = name;
      } else if (dynamic_cast<const WeightedLayer*>(&module) != nullptr) {
        for (const auto& known : found)
          if (known.layer == &module) return;
        if (name.empty()) name = "model";
        const Index channels = output_channels(module, name);
        found.push_back({std::move(name), "", &module, nullptr, nullptr, channels});
      }
    }
    static Index output_channels(Module& layer, const std::string& layer_name) {
      struct Weight final : Visitor {
        const ParameterOn<Cpu>* found = nullptr;
        void module(std::string_view, Module&) override {}
        void parameter(std::string_view name, AnyParameter& handle) override {
          if (name == "weight") found = &handle.on<Cpu>();
        }
        void buffer(std::string_view, AnyBuffer&) override {}
      } weight;
      layer.visit(weight);
      check<UsageError>(weight.found->dtype() == DType::f32, "QuantizationAware: '", layer_name, "' has a weight of ",
                        weight.found->dtype(), ": expected F32");
      return weight.found->whole_extents()[0];
    }
  } find;
  find.inner(model);
  find.walk(model);
  return std::move(find.found);
}

/// The places of a model's layers, by address. A copy of this object has none: its model's layers lie elsewhere.
class Places {
 public:
  Places() = default;
  Places(const Places&) {}
  Places& operator=(const Places&) {
    layers_.clear();
    return *this;
  }

  /// `ranges`: in the order of find_layers. `norms`: all folded ones.
  const Pass::Layers& of(Module& model, std::span<const LayerRanges> ranges) {
    if (!layers_.empty() || ranges.empty()) return layers_;
    const auto found = find_layers(model);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const LayerPlace place{&ranges[i], found[i].norm, found[i].foldable, found[i].norm_name};
      layers_.emplace(found[i].layer, place);
      if (found[i].norm != nullptr) layers_.emplace(found[i].norm, place);
    }
    return layers_;
  }

 private:
  Pass::Layers layers_;
};

}  // namespace chorus::nn::quantization
#endif  // CHORUS_SINGLE_CHORUS_NN_QUANTIZATION_LAYERS_HPP

namespace chorus::nn {

namespace quantization {

/// How a model computes: the three switches of QuantizationAware.
struct Phases {
  bool observe = true, fake_quantize = true, norms_frozen = false;
  friend bool operator==(const Phases&, const Phases&) = default;
};
inline void append(std::string& out, const Phases& phases) {
  const auto text = [](bool on) { return on ? "true" : "false"; };
  out += cat("observe(", text(phases.observe), "), fake_quantize(", text(phases.fake_quantize), "), freeze_norms(",
             text(phases.norms_frozen), ")");
}

/// Those of a model, as a buffer, so that they are saved with it, and what the program has called since the last pass.
class KeptPhases {
 public:
  KeptPhases() : buffer_(Tensor<std::int64_t, 1, Cpu>::zeros({3})) { keep(now_); }

  /// From now on `member` of Phases is `on`.
  void set(bool Phases::*member, bool on) {
    if (!called_) now_ = kept();
    called_ = true;
    now_.*member = on;
    keep(now_);
  }
  Phases get() const { return called_ ? now_ : kept(); }
  /// A pass in training begins. Throws UsageError, on all members of the batch's group, where they compute in different
  /// ways: they would wait for each other, or drift apart.
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
        check<UsageError>(ends[2 * i] == -ends[2 * i + 1], "QuantizationAware: ranks differ in their phases; this one ",
                          "has ", own, ": call observe, fake_quantize and freeze_norms alike on all ranks");
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
  Phases now_;  // as the program has called
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

/// `Model`, computed with the rounding of integers, so that it learns to do with it: a type like any other model, for
/// SingleDevice, DataParallel, DistributedDataParallel and FullyShardedDataParallel, in whichever loop.
///   using Net = ch::DistributedDataParallel<ch::nn::QuantizationAware<ResNet18<ch::Cpu>>>;
/// - Each layer with weights (Linear, Conv1d to Conv3d) takes rounded numbers and a rounded weight. Its result is
///   rounded where it is used by such a layer or a pooling, after a ReLU that follows, and at the end of the model.
///   What comes from elsewhere (the input, sums, other functions) is rounded by the layer that takes it. All else stays
///   float: embeddings, attention's products and its first projection, recurrent layers, transposed convolutions.
/// - A batch norm listed by CHORUS_MODULE (or in a Sequential) directly after a layer with as many channels is folded
///   into it: the layer's weight is rounded as it will be then, times gamma / sqrt(running_var + eps). A residual that
///   BatchNormReLU adds is rounded, and so is the sum.
/// - Ranges are the global batch's, the same for any number of devices, found in training alone: one collective of 16
///   bytes for each, and one of 48 a pass, by which ranks see that they are in the same phase. They are buffers,
///   `quantization.conv1.output`; a float model's file fills the rest by its names, with
///   `io::load(net.module(), path, {.strict = false})`.
/// Evaluation changes nothing, and needs ranges. Throws NonFiniteError for NaNs.
template <class Model, class Scheme = Int8>
class QuantizationAware : public Module {
 public:
  using device_type = typename Model::device_type;
  static_assert(std::is_same_v<device_type, Cpu>,
                "QuantizationAware: fake quantisation has kernels for the CPU alone; the model is on another device");

  QuantizationAware() : QuantizationAware(Model{}) {}
  /// `scheme`: other numbers than the type's. Throws UsageError where the model has no layer with weights.
  explicit QuantizationAware(Model model, const quantization::Scheme& scheme = quantization::scheme_of<Scheme>())
      : scheme_(scheme), model_(std::move(model)) {
    for (const auto& found : quantization::find_layers(model_)) {
      auto& ranges = quantization_.layers.emplace_back(found.name, scheme_.per_channel ? found.channels : 1);
      ranges.has_sum = found.norm != nullptr;
    }
    check<UsageError>(!quantization_.layers.empty(), "QuantizationAware: ", model_.describe(),
                      " has no layer with weights that could be integers: expected Linear or Conv1d to Conv3d");
  }

  /// What `Model::forward` takes and gives.
  template <class... Inputs>
  auto forward(const Inputs&... inputs) const {
    check<UsageError>(tensor_group() == nullptr,
                      "QuantizationAware: not under TensorParallel, where ranks have parts of a layer's channels");
    check<UsageError>(chorus::detail::quantization_pass == nullptr, "QuantizationAware: a model of another one");
    const auto phases = training() ? quantization_.phases.begin_pass() : quantization_.phases.get();
    const auto& layers = places_.of(model_, quantization_.layers);
    if (phases.norms_frozen)
      for (const auto& [address, place] : layers)
        if (place.norm != nullptr) place.norm->set_own_training(false);
    const bool observes = training() && phases.observe && !is_recomputed();
    quantization::Pass pass(scheme_, layers, observes, phases.fake_quantize);
    const bool quantizes = observes || phases.fake_quantize;
    const chorus::detail::Replaced<QuantizationPass*> scope(chorus::detail::quantization_pass,
                                                            quantizes ? &pass : nullptr);
    return rounded(model_.forward(inputs...));
  }
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) const {
    return detail::watched(*this, [&] { return forward(inputs...); });
  }

  /// Whether passes in training move the ranges, of activations and weights. All ranks call it alike, as those below.
  void observe(bool on) { quantization_.phases.set(&quantization::Phases::observe, on); }
  /// Whether numbers are rounded; without, the model is the float one.
  void fake_quantize(bool on) { quantization_.phases.set(&quantization::Phases::fake_quantize, on); }
  /// From now on folded batch norms take their running statistics, in training, too, and leave them alone.
  void freeze_norms(bool frozen = true) {
    quantization_.phases.set(&quantization::Phases::norms_frozen, frozen);
    if (frozen) return;
    for (const auto& [address, place] : places_.of(model_, quantization_.layers))
      if (place.norm != nullptr) place.norm->set_own_training(training());
  }
  quantization::Phases phases() const { return quantization_.phases.get(); }

  /// The model inside.
  Model& model() { return model_; }
  /// What is known of each layer, in the order in which they are listed.
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
      return chorus::detail::rounded(y);
    else
      return y;
  }
  template <class... Members>
  static auto rounded(const std::tuple<Members...>& members) {
    return std::apply([](const auto&... y) { return std::tuple(rounded(y)...); }, members);
  }

  quantization::Scheme scheme_;
  mutable Model model_;  // a visit hands out its layers
  mutable quantization::Ranges quantization_;
  mutable quantization::Places places_;
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_QUANTIZATION_AWARE_HPP

// <chorus/nn/quantized.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_QUANTIZED_HPP
#define CHORUS_SINGLE_CHORUS_NN_QUANTIZED_HPP
/// Models of integers: what `quantized` makes of a model that was trained with fake quantisation.

// <chorus/nn/int8/conversion.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_INT8_CONVERSION_HPP
#define CHORUS_SINGLE_CHORUS_NN_INT8_CONVERSION_HPP
/// From a recorded pass with fake quantisation to integer steps: what lies between two roundings becomes one step. An
/// operation that has no integer form is refused by its name.

// <chorus/nn/int8/recorded_pass.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_INT8_RECORDED_PASS_HPP
#define CHORUS_SINGLE_CHORUS_NN_INT8_RECORDED_PASS_HPP
/// One forward pass as a list of operations, with the layers in which they happened.

#include <variant>

namespace chorus::nn::int8 {

/// An operation on what comes from the model's input. Operations on parameters alone are no steps of a pass; their
/// results are constants.
struct RecordedOperation {
  std::string name;
  /// The path of the innermost layer in which it happened, empty in the model itself; and what that says of itself.
  std::string layer, layer_description;
  /// Values by number, 0 being the input; -1: a constant, -2: an operand that is not there.
  std::vector<Index> inputs;
  std::vector<chorus::detail::WatchedTensor> operands;
  Index output = 0;
  chorus::detail::WatchedTensor result;
  std::variant<std::monostate, kernels::Conv2dShape, kernels::Pool2dShape, operations::Mean, operations::FakeQuantize,
               operations::BatchNorm<float, Cpu>>
      facts;
};

/// A constant that came out of fake quantisation: what was quantised, and how.
struct RecordedConstant {
  chorus::detail::WatchedTensor original;
  operations::FakeQuantize how;
};

/// Watches one forward pass of a model.
class RecordedPass final : public chorus::detail::OperationWatch, public chorus::detail::LayerWatch {
  // A view has its tensor's address, but another shape.
  using Key = std::pair<const void*, std::vector<Index>>;

 public:
  /// Runs `pass()`, what the model makes of `input`, and remembers what it does.
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
  /// The number of the value that the pass returned; -1 where it does not come from the input.
  Index output() const { return output_; }
  /// How a constant was quantised; null where it wasn't.
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
#endif  // CHORUS_SINGLE_CHORUS_NN_INT8_RECORDED_PASS_HPP

namespace chorus::nn::int8 {

namespace detail {

class Conversion {
  using Tensor_ = chorus::detail::WatchedTensor;

 public:
  explicit Conversion(const RecordedPass& pass) : pass_(pass) {
    values_[0].is_input = true;
    for (const auto& operation : pass.operations()) convert(operation);
    const auto output = values_.find(pass.output());
    check<UsageError>(output != values_.end(), who, ": the model's output does not come from its input, or by ",
                      "operations that keep no record");
    check<UsageError>(output->second.number > 0, who, ": the model's output is not rounded to integers",
                      unrounded_.empty() ? "" : cat(": it comes from ", unrounded_));
    check<UsageError>(output->second.number == static_cast<Index>(steps_.size()), who,
                      ": the model's output is not what its last operation gives");
  }

  Program program() && { return {*input_, std::move(steps_)}; }
  /// The rounded numbers of the program's values, as the pass had them.
  const std::map<Index, Tensor_>& rounded_numbers() const { return rounded_; }

 private:
  static constexpr const char* who = "quantized";

  /// What is known of a value of the pass: it is a value of the program (`number`), or yet to be rounded: `step` gives
  /// it, and `after` follows, which keeps levels.
  struct Value {
    Index number = -1;
    std::optional<Step> step;
    std::vector<Step> after;
    bool is_input = false;  // the model's input, or that in another shape, yet to be rounded
    bool folds = false;     // what is to be normalised by the batch norm that is folded into the weights
  };

  std::string place(const RecordedOperation& operation) const {
    return operation.layer.empty() ? cat("'", operation.name, "'")
                                   : cat("'", operation.name, "' in '", operation.layer, "', a ",
                                         operation.layer_description);
  }

  Value& value(const RecordedOperation& operation, std::size_t operand) {
    const Index number = operation.inputs.at(operand);
    check<UsageError>(number >= 0, who, ": ", place(operation), " computes with a constant: it has no integer form");
    const auto found = values_.find(number);
    check<UsageError>(found != values_.end(), who, ": ", place(operation), " takes what no step gives");
    return found->second;
  }
  /// The program's value that an operand is. Throws where its numbers are none that integers stand for.
  Index rounded(const RecordedOperation& operation, std::size_t operand) {
    const Value& x = value(operation, operand);
    if (x.number < 0) unrounded_ = x.step ? cat("'", x.step->name, "'") : "the input";
    check<UsageError>(x.number >= 0, who, ": ", place(operation),
                      " takes numbers that are not rounded to integers, of ", unrounded_);
    return x.number;
  }

  std::string name_of(const RecordedOperation& operation, std::string_view otherwise) {
    const std::string wanted = operation.layer.empty() ? std::string(otherwise) : operation.layer;
    std::string name = wanted;
    for (int i = 2; !names_.insert(name).second; ++i) name = cat(wanted, "_", i);
    return name;
  }
  Step begin_step(Kind kind, const RecordedOperation& operation, std::vector<Index> inputs) {
    Step out;
    out.kind = kind;
    out.name = name_of(operation, kind_names[static_cast<std::size_t>(kind)]);
    out.inputs = std::move(inputs);
    return out;
  }
  Index push(Step step) {
    steps_.push_back(std::move(step));
    return static_cast<Index>(steps_.size());
  }

  /// A step that several values came from: they may have been rounded before, to the same levels or to others.
  Index push_once(Step step) {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (steps_[i].name != step.name) continue;
      if (steps_[i].levels == step.levels && steps_[i].relu == step.relu) return static_cast<Index>(i) + 1;
      const std::string name = step.name;
      for (int n = 2; !names_.insert(step.name = cat(name, "_", n)).second; ++n) continue;
      return push(std::move(step));
    }
    return push(std::move(step));
  }

  void convert(const RecordedOperation& operation) {
    const std::string_view name = operation.name;
    if (name == "fake_quantize") return round(operation);
    if (name == "conv2d" || name == "linear") return multiply(operation);
    if (name == "fold_batch_norm") return unfold(operation);
    if (name == "batch_norm" || name == "batch_norm_relu") return normalise(operation);
    if (name == "relu") return apply_relu(operation);
    if (name == "add") return add(operation);
    if (name == "max_pool2d" || name == "avg_pool2d") return pool(operation);
    if (name == "reshape") return reshape(operation);
    if (name == "mean") return average(operation);
    fail<UsageError>(who, ": ", place(operation), " has no integer form");
  }

  const Levels& levels_of(Index number) const {
    return number == 0 ? *input_ : steps_[static_cast<std::size_t>(number - 1)].levels;
  }

  void round(const RecordedOperation& operation) {
    const auto& how = std::get<operations::FakeQuantize>(operation.facts);
    check<UsageError>(how.levels.size() == 1, who, ": ", place(operation), " rounds activations by channel");
    const Levels& levels = how.levels[0];
    check<UsageError>(levels.integers.least >= 0 && levels.integers.most <= 255, who, ": ", place(operation),
                      " rounds activations to integers in [", levels.integers.least, ", ", levels.integers.most,
                      "]: integer kernels take u8");
    Value& x = value(operation, 0);
    if (x.is_input && x.number < 0) {
      if (!input_) input_ = levels;
      check<UsageError>(*input_ == levels, who, ": ", place(operation), " rounds the model's input to another scale ",
                        "than a layer before: an integer model has one");
      x.number = 0;
    } else if (x.step) {
      x.step->levels = levels;
      x.number = push_once(std::move(*x.step));
      x.step.reset();
    }
    if (!x.after.empty()) {
      for (auto& step : x.after) {
        step.inputs = {x.number};
        step.levels = levels;
        x.number = push_once(std::move(step));
      }
      x.after.clear();
    }
    check<UsageError>(x.number >= 0 && levels_of(x.number) == levels, who, ": ", place(operation),
                      " rounds one value to two scales");
    rounded_.emplace(x.number, operation.result);
    Value out;
    out.number = x.number;
    values_[operation.output] = out;
  }

  static std::span<const float> floats(const Tensor_& x) {
    Index count = 1;
    for (const Index size : x.shape) count *= size;
    return {static_cast<const float*>(x.data), static_cast<std::size_t>(count)};
  }
  static bool is_dense(const Tensor_& x) {
    Index expected = 1;
    for (std::size_t axis = x.shape.size(); axis-- > 0; expected *= x.shape[axis])
      if (x.shape[axis] != 1 && x.strides[axis] != expected) return false;
    return true;
  }

  void multiply(const RecordedOperation& operation) {
    const bool is_linear = operation.name == "linear";
    const Index x = rounded(operation, 0);
    const auto* const weight = pass_.constant(operation.operands[1]);
    check<UsageError>(weight != nullptr, who, ": the weight of ", place(operation), " is not quantized");
    const auto& levels = weight->how.levels;
    const auto& shape = weight->original.shape;
    check<UsageError>(levels.size() == 1 || weight->how.axis == 0, who, ": the weight of ", place(operation),
                      " has scales along axis ", weight->how.axis, ", expected its outputs, axis 0");
    check<UsageError>(!is_linear || operation.operands[0].shape.size() == 2, who, ": ", place(operation),
                      " takes more axes than [batch, features]: it has no integer form yet");
    Step step = begin_step(is_linear ? Kind::linear : Kind::conv2d, operation, {x});
    step.weight_shape = {1, 1, 1, 1};
    std::copy(shape.begin(), shape.end(), step.weight_shape.begin());
    if (!is_linear) {
      const auto& s = std::get<kernels::Conv2dShape>(operation.facts);
      step.stride = {s.stride_h, s.stride_w};
      step.padding = {s.padding_h, s.padding_w};
      step.dilation = {s.dilation_h, s.dilation_w};
      step.groups = s.groups;
    }
    check<UsageError>(is_dense(weight->original), who, ": the weight of ", place(operation), " is not contiguous");
    const auto numbers = floats(weight->original);
    const auto outputs = static_cast<std::size_t>(shape[0]);
    for (std::size_t o = 0; o < outputs; ++o) {
      const auto& own = levels[levels.size() == 1 ? 0 : o];
      check<UsageError>(own.zero_point == 0 && own.integers.least >= -128 && own.integers.most <= 127, who,
                        ": the weight of ", place(operation), " has a zero point of ", own.zero_point,
                        " and integers in [", own.integers.least, ", ", own.integers.most, "]: expected s8, symmetric");
      step.weight_scale.push_back(own.scale);
      for (std::size_t i = o * numbers.size() / outputs; i < (o + 1) * numbers.size() / outputs; ++i)
        step.weight.push_back(static_cast<std::int8_t>(own.level(numbers[i])));
    }
    if (operation.inputs.size() > 2 && operation.inputs[2] != -2) {
      check<UsageError>(operation.inputs[2] == -1, who, ": the bias of ", place(operation), " depends on the input");
      const auto bias = floats(operation.operands[2]);
      step.bias.assign(bias.begin(), bias.end());
    }
    Value out;
    out.step = std::move(step);
    values_[operation.output] = std::move(out);
  }

  void unfold(const RecordedOperation& operation) {
    Value out = value(operation, 0);
    check<UsageError>(out.step && out.step->has_weight() && !out.folds && !out.step->relu && out.after.empty(), who,
                      ": ", place(operation), " follows no convolution");
    out.folds = true;
    values_[operation.output] = std::move(out);
  }

  void normalise(const RecordedOperation& operation) {
    const auto& norm = std::get<operations::BatchNorm<float, Cpu>>(operation.facts);
    check<UsageError>(!norm.training, who, ": ", place(operation), " is in training: call eval() first");
    Value out = value(operation, 0);
    check<UsageError>(out.step && out.folds, who, ": ", place(operation),
                      " is folded into no convolution in front of it: it has no integer form");
    Step& step = *out.step;
    const auto outputs = static_cast<std::size_t>(step.weight_shape[0]);
    const auto numbers = [&](std::size_t operand) {
      return operation.inputs[operand] == -2 ? std::span<const float>() : floats(operation.operands[operand]);
    };
    const auto gamma = numbers(1), beta = numbers(2);
    const float* const mean = norm.running_mean.data();
    const float* const var = norm.running_var.data();
    const std::size_t terms = step.weight.size() / outputs;
    std::vector<float> bias(outputs);
    for (std::size_t o = 0; o < outputs; ++o) {
      const float factor =
          quantized::fold_factor(gamma.empty() ? 1.0f : gamma[o], var[o], static_cast<float>(norm.eps));
      bias[o] = quantized::folded_bias(factor, step.bias.empty() ? 0.0f : step.bias[o], mean[o],
                                       beta.empty() ? 0.0f : beta[o]);
      // A channel that is multiplied by 0 was not folded (FoldFactors): what is left of it is the bias.
      if (std::abs(factor) < 1e-30f)
        std::fill_n(step.weight.begin() + static_cast<std::ptrdiff_t>(o * terms), terms, std::int8_t{0});
    }
    step.bias = std::move(bias);
    step.relu = operation.name == "batch_norm_relu";
    out.folds = false;
    values_[operation.output] = std::move(out);
  }

  void apply_relu(const RecordedOperation& operation) {
    Value out = value(operation, 0);
    if (out.number >= 0) {
      Step step = begin_step(Kind::relu, operation, {out.number});
      step.levels = levels_of(out.number);
      out.number = push(std::move(step));
    } else {
      check<UsageError>(out.step && !out.folds, who, ": ", place(operation), " takes what is not rounded to integers");
      const bool fuses = out.step->has_weight() || out.step->kind == Kind::add;
      check<UsageError>(fuses, who, ": ", place(operation), " follows '", out.step->name,
                        "', which is not rounded to integers first");
      out.step->relu = true;
    }
    values_[operation.output] = std::move(out);
  }

  void add(const RecordedOperation& operation) {
    // The bias of a layer whose batch norm is folded is added behind the unfolding.
    if (operation.inputs.size() == 2 && operation.inputs[0] >= 0 && operation.inputs[1] == -1) {
      Value out = value(operation, 0);
      const auto bias = floats(operation.operands[1]);
      if (out.step && out.folds && out.step->bias.empty() &&
          static_cast<Index>(bias.size()) == out.step->weight_shape[0]) {
        out.step->bias.assign(bias.begin(), bias.end());
        values_[operation.output] = std::move(out);
        return;
      }
    }
    check<UsageError>(operation.inputs.size() == 2 && operation.operands[0].shape == operation.operands[1].shape, who,
                      ": ", place(operation), " adds a number, or operands of two shapes: it has no integer form");
    Value out;
    const Index a = rounded(operation, 0), b = rounded(operation, 1);
    out.step = begin_step(Kind::add, operation, {a, b});
    values_[operation.output] = std::move(out);
  }

  void pool(const RecordedOperation& operation) {
    const auto& s = std::get<kernels::Pool2dShape>(operation.facts);
    const bool takes_mean = operation.name == "avg_pool2d";
    Value out = value(operation, 0);
    Step step = begin_step(takes_mean ? Kind::avg_pool2d : Kind::max_pool2d, operation, {-1});
    step.window = {s.kernel_h, s.kernel_w};
    step.stride = {s.stride_h, s.stride_w};
    step.padding = {s.padding_h, s.padding_w};
    step.dilation = {s.dilation_h, s.dilation_w};
    step.ceil_mode = s.ceil_mode;
    values_[operation.output] = takes_mean ? averaged(operation, std::move(step)) : chained(out, std::move(step));
  }

  /// A mean is yet to be rounded.
  Value averaged(const RecordedOperation& operation, Step step) {
    Value out;
    step.inputs = {rounded(operation, 0)};
    out.step = std::move(step);
    return out;
  }
  /// A step that keeps levels, behind a value that may be yet to be rounded.
  Value chained(Value out, Step step) {
    if (out.number >= 0) {
      step.inputs = {out.number};
      step.levels = levels_of(out.number);
      out.number = push(std::move(step));
    } else {
      check<UsageError>((out.step || out.is_input) && !out.folds, who, ": '", step.name,
                        "' takes what is not rounded to integers");
      out.after.push_back(std::move(step));
    }
    return out;
  }

  void reshape(const RecordedOperation& operation) {
    const auto& from = operation.operands[0].shape;
    const auto& to = operation.result.shape;
    const Value& x = value(operation, 0);
    if (from == to) {
      values_[operation.output] = Value(x);
    } else if (from.size() == 4 && to.size() == 2 && to[0] == from[0]) {
      values_[operation.output] = chained(x, begin_step(Kind::flatten, operation, {-1}));
    } else if (from.size() == 4 && to.size() == 3 && to[0] == from[0] && to[1] == from[1]) {
      values_[operation.output] = Value(x);  // for a mean over all pixels: `average` looks
      pixels_.insert(operation.output);
    } else {
      fail<UsageError>(who, ": ", place(operation), " from ", std::span<const Index>(from), " to ",
                       std::span<const Index>(to), " has no integer form");
    }
  }

  void average(const RecordedOperation& operation) {
    const auto axis = std::get<operations::Mean>(operation.facts).axis;
    check<UsageError>(pixels_.contains(operation.inputs[0]) && (axis == -1 || axis == 2), who, ": ", place(operation),
                      " is over other axes than an image's: it has no integer form");
    values_[operation.output] = averaged(operation, begin_step(Kind::global_avg_pool, operation, {-1}));
  }

  const RecordedPass& pass_;
  std::map<Index, Value> values_;
  std::map<Index, Tensor_> rounded_;
  std::set<Index> pixels_;
  std::set<std::string> names_{"input"};
  std::optional<Levels> input_;
  std::vector<Step> steps_;
  std::string unrounded_;
};

}  // namespace detail

/// The integer program of a pass in evaluation with fake quantisation. Throws UsageError where something in it has no
/// integer form, by its name.
inline Program converted(const RecordedPass& pass) { return detail::Conversion(pass).program(); }

}  // namespace chorus::nn::int8
#endif  // CHORUS_SINGLE_CHORUS_NN_INT8_CONVERSION_HPP

namespace chorus::nn {

/// A model with weights and activations of 8 bits, and sums of 32: it is called as a float model is, with float images
/// or features, and gives float numbers. Evaluation alone. `io::save` writes it, `io::load_quantized` reads it.
using QuantizedModel = int8::Program;

namespace detail {

/// Sets a model and all below it to evaluation, and back at the end: each layer to what it was.
class EvaluatedForNow {
 public:
  explicit EvaluatedForNow(Module& model) {
    struct Look final : Walker {
      std::vector<std::pair<Module*, bool>>* found = nullptr;
      void enter(Module& layer) override { found->emplace_back(&layer, layer.training()); }
    } look;
    look.found = &before_;
    before_.emplace_back(&model, model.training());
    look.walk(model);
    for (const auto& [layer, trained] : before_) layer->set_own_training(false);
  }
  ~EvaluatedForNow() {
    for (const auto& [layer, trained] : before_) layer->set_own_training(trained);
  }
  EvaluatedForNow(const EvaluatedForNow&) = delete;
  EvaluatedForNow& operator=(const EvaluatedForNow&) = delete;

 private:
  std::vector<std::pair<Module*, bool>> before_;
};

/// A pass of the model in evaluation over `x`, which is watched.
template <class Model, class Scheme, int Rank>
int8::RecordedPass recorded_evaluation(QuantizationAware<Model, Scheme>& model, const Tensor<float, Rank, Cpu>& x) {
  check<UsageError>(model.phases().fake_quantize,
                    "quantized: the model computes with floats: call fake_quantize(true), and evaluate it, first");
  const EvaluatedForNow evaluated(model);
  // With a tape operations keep what they computed with, batch norms their statistics.
  const GradMode with_tape(true);
  return {model, x, [&] { return model(x); }};
}

}  // namespace detail

/// The model in integers. `x`: a batch that it takes, a sample is enough: one pass over it in evaluation is watched,
/// and what lies between two roundings becomes one step: weights are folded and rounded once, ReLUs are limits, and
/// between the layers there are u8 alone. The steps take batches of any size. Throws UsageError, by the layer's name,
/// where a range is unknown or an operation has no integer form.
///
/// Integers are those of training: the same levels and weights, sums without rounding error, and one rounding. Float
/// sums in training have errors of some 1e-6, so that a number that lies as near to the middle between two levels may
/// fall to the other side there.
template <class Model, class Scheme, int Rank>
QuantizedModel quantized(QuantizationAware<Model, Scheme>& model, const Tensor<float, Rank, Cpu>& x) {
  return int8::converted(detail::recorded_evaluation(model, x));
}

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_QUANTIZED_HPP

// <chorus/nn/recurrent.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_RECURRENT_HPP
#define CHORUS_SINGLE_CHORUS_NN_RECURRENT_HPP
/// LSTM and GRU: several layers, both directions, with PyTorch's parameter names (`weight_ih_l0_reverse`) and
/// initialisation.

namespace chorus::nn {

struct RecurrentOptions {
  Index num_layers = 1;
  bool bias = true;
  /// Inputs and outputs are [batch, time, features], else [time, batch, features].
  bool batch_first = false;
  /// Applied to the outputs of all layers but the last.
  double dropout = 0;
  bool bidirectional = false;
};

/// The parameters of an LSTM or a GRU, and the walk through layers and directions.
template <Device D, Real T>
class Recurrent : public Module {
 public:
  using device_type = D;

  /// The weights of one layer in one direction.
  struct Cell {
    Parameter<T, 2, D> weight_ih, weight_hh;
    Parameter<T, 1, D> bias_ih, bias_hh;
  };
  /// Of layer 0, of its reverse direction if there is one, of layer 1, ...
  std::vector<Cell> cells;

  void visit(Visitor& visitor) override {
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const auto directions = static_cast<std::size_t>(this->directions());
      const std::string ending = cat("_l", i / directions, i % directions == 1 ? "_reverse" : "");
      visitor.parameter("weight_ih" + ending, cells[i].weight_ih);
      visitor.parameter("weight_hh" + ending, cells[i].weight_hh);
      if (!options_.bias) continue;
      visitor.parameter("bias_ih" + ending, cells[i].bias_ih);
      visitor.parameter("bias_hh" + ending, cells[i].bias_hh);
    }
  }
  std::string describe() const override {
    return cat(name_, "(", cells[0].weight_ih.shape()[1], ", ", hidden_, ", num_layers=", options_.num_layers,
               options_.bidirectional ? ", bidirectional)" : ")");
  }

 protected:
  Recurrent(const char* name, Index gates, Index in_features, Index hidden, const RecurrentOptions& options)
      : name_(name), hidden_(hidden), options_(options) {
    check<ShapeError>(in_features > 0 && hidden > 0 && options.num_layers > 0, name, ": ", in_features, " inputs, ",
                      hidden, " hidden features, ", options.num_layers, " layers: all must be positive");
    check<UsageError>(options.dropout >= 0 && options.dropout < 1, name,
                      ": the probability of dropout is in [0, 1), got ", options.dropout);
    const double bound = 1 / std::sqrt(static_cast<double>(hidden));
    for (Index i = 0; i < options.num_layers * directions(); ++i) {
      const Index inputs = i < directions() ? in_features : hidden * directions();
      Cell cell;
      cell.weight_ih = Parameter(init::uniform<T, D, 2>({gates * hidden, inputs}, bound));
      cell.weight_hh = Parameter(init::uniform<T, D, 2>({gates * hidden, hidden}, bound));
      if (options.bias) {
        cell.bias_ih = Parameter(init::uniform<T, D, 1>({gates * hidden}, bound));
        cell.bias_hh = Parameter(init::uniform<T, D, 1>({gates * hidden}, bound));
      }
      cells.push_back(std::move(cell));
    }
  }

  Index directions() const { return options_.bidirectional ? 2 : 1; }

  /// Calls `run(input, cell, number, reverse)`, which returns outputs [batch, time, hidden], for all layers and
  /// directions, and gives the last layer's outputs.
  template <class X, class Run>
  auto through_layers(const X& x, const Run& run) const {
    const auto layer = [&](const auto& in, Index number) {
      const auto at = static_cast<std::size_t>(number * directions());
      auto forward = run(in, cells[at], number * directions(), false);
      if (!options_.bidirectional) return forward;
      return concat(2, forward, run(in, cells[at + 1], number * directions() + 1, true));
    };
    auto y = options_.batch_first ? layer(x, 0) : layer(transpose(x, 0, 1), 0);
    for (Index number = 1; number < options_.num_layers; ++number)
      y = layer(dropout(y, options_.dropout, this->training()), number);
    return options_.batch_first ? y : decltype(y)(transpose(y, 0, 1));
  }

  /// Row `number` of the first states [layers * directions, batch, hidden].
  template <Operand H>
  auto state_of(const H& states, Index number) const {
    const Shape<3> expected{static_cast<Index>(cells.size()), value_of(states).size(1), hidden_};
    check<ShapeError>(value_of(states).shape() == expected, name_, ": first states of shape ", value_of(states).shape(),
                      ", expected ", expected);
    return reshape(slice(states, 0, number, number + 1), Shape<2>{expected[1], expected[2]});
  }
  template <Operand X>
  Tensor<T, 3, D> zero_states(const X& x) const {
    const Index batch = value_of(x).size(options_.batch_first ? 0 : 1);
    return Tensor<T, 3, D>::zeros({static_cast<Index>(cells.size()), batch, hidden_}, value_of(x).device());
  }
  /// The states of all layers and directions, each [batch, hidden], as [layers * directions, batch, hidden], which says
  /// that the batch is axis 1: DataParallel goes by it.
  template <class State>
  static auto join_states(const std::vector<State>& states) {
    const auto& shape = states.front().shape();
    std::vector<decltype(reshape(states.front(), Shape<3>{}))> rows;
    for (const State& state : states) rows.push_back(reshape(state, Shape<3>{1, shape[0], shape[1]}));
    return batch_axis<1>(concat(0, std::span<const typename decltype(rows)::value_type>(rows)));
  }

 private:
  const char* name_;
  Index hidden_;
  RecurrentOptions options_;
};

/// x: [time, batch, features] (or batch first) -> {output: [time, batch, directions * hidden], hidden, cell: [layers *
/// directions, batch, hidden]}. First states default to zero. Throws ShapeError where sizes don't fit.
template <Device D, Real T>
class LSTM final : public Recurrent<D, T> {
 public:
  LSTM(Index in_features, Index hidden, const RecurrentOptions& options = {})
      : Recurrent<D, T>("LSTM", 4, in_features, hidden, options) {}

  template <Operand X, Operand H, Operand C>
  auto operator()(const X& x, const H& h0, const C& c0) const {
    return detail::watched(*this, [&] { return run(x, h0, c0); });
  }
  template <Operand X>
  auto operator()(const X& x) const {
    const auto zero = this->zero_states(x);
    return (*this)(x, zero, zero);
  }

 private:
  template <class X, class H, class C>
  auto run(const X& x, const H& h0, const C& c0) const {
    using State = decltype(lstm(x, this->cells[0].weight_ih, this->cells[0].weight_hh, this->cells[0].bias_ih,
                                this->cells[0].bias_hh, this->state_of(h0, 0), this->state_of(c0, 0))
                               .hidden);
    std::vector<State> hidden, cell;
    auto output = this->through_layers(x, [&](const auto& in, const auto& of, Index number, bool reverse) {
      auto made = lstm(in, of.weight_ih, of.weight_hh, of.bias_ih, of.bias_hh, this->state_of(h0, number),
                       this->state_of(c0, number), reverse);
      hidden.push_back(made.hidden);
      cell.push_back(made.cell);
      return made.output;
    });
    auto states = this->join_states(hidden);
    return LstmResult<decltype(output), decltype(states)>{std::move(output), std::move(states),
                                                          this->join_states(cell)};
  }
};

/// The same with one state: {output, hidden}.
template <Device D, Real T>
class GRU final : public Recurrent<D, T> {
 public:
  GRU(Index in_features, Index hidden, const RecurrentOptions& options = {})
      : Recurrent<D, T>("GRU", 3, in_features, hidden, options) {}

  template <Operand X, Operand H>
  auto operator()(const X& x, const H& h0) const {
    return detail::watched(*this, [&] { return run(x, h0); });
  }
  template <Operand X>
  auto operator()(const X& x) const {
    return (*this)(x, this->zero_states(x));
  }

 private:
  template <class X, class H>
  auto run(const X& x, const H& h0) const {
    using State = decltype(gru(x, this->cells[0].weight_ih, this->cells[0].weight_hh, this->cells[0].bias_ih,
                               this->cells[0].bias_hh, this->state_of(h0, 0))
                               .hidden);
    std::vector<State> hidden;
    auto output = this->through_layers(x, [&](const auto& in, const auto& of, Index number, bool reverse) {
      auto made = gru(in, of.weight_ih, of.weight_hh, of.bias_ih, of.bias_hh, this->state_of(h0, number), reverse);
      hidden.push_back(made.hidden);
      return made.output;
    });
    auto states = this->join_states(hidden);
    return GruResult<decltype(output), decltype(states)>{std::move(output), std::move(states)};
  }
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_RECURRENT_HPP

// <chorus/nn/transformer.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_TRANSFORMER_HPP
#define CHORUS_SINGLE_CHORUS_NN_TRANSFORMER_HPP
/// Layers of the transformer (Vaswani et al. 2017), as PyTorch has them: TransformerEncoderLayer,
/// TransformerDecoderLayer.

namespace chorus::nn {

enum class FeedForwardActivation : std::uint8_t { relu, gelu };

struct TransformerOptions {
  Index heads = 8;
  /// Features between the two linear layers; 0 stands for 4 times the model's.
  Index feed_forward = 0;
  double dropout = 0.1;
  FeedForwardActivation activation = FeedForwardActivation::relu;
  /// Normalisation before attention and feed-forward instead of after them.
  bool norm_first = false;
};

namespace detail {
template <class X>
auto feed_forward(const X& x, FeedForwardActivation activation) {
  return activation == FeedForwardActivation::relu ? relu(x) : gelu(x);
}
inline Index inner_features(Index features, const TransformerOptions& options) {
  return options.feed_forward > 0 ? options.feed_forward : 4 * features;
}
}  // namespace detail

/// x: [batch, length, features] -> the same shape: self-attention, then two linear layers on each place, each with
/// dropout, a residual connection and layer normalisation. Under TensorParallel ranks share heads, and the features
/// between the two linear layers.
template <Device D, Real T>
class TransformerEncoderLayer : public Module {
 public:
  using device_type = D;
  MultiheadAttention<D, T> self_attn;
  ColumnParallelLinear<D, T> linear1;
  RowParallelLinear<D, T> linear2;
  LayerNorm<D, T> norm1, norm2;

  explicit TransformerEncoderLayer(Index features, const TransformerOptions& options = {})
      : self_attn(features, options.heads),
        linear1(features, detail::inner_features(features, options)),
        linear2(detail::inner_features(features, options), features),
        norm1(features),
        norm2(features),
        options_(options) {}

  /// With `causal` (or a mask: true for the keys that a query sees).
  template <Operand X, class Seen = bool>
  auto operator()(const X& x, const Seen& seen = Seen{}) const {
    return detail::watched(*this, [&] { return gather_sequence(forward(split_sequence(x), seen)); });
  }
  /// The same of a sequence in parts: see split_sequence.
  template <class X, class Seen = bool>
  auto operator()(const SequencePart<X>& x, const Seen& seen = Seen{}) const {
    return detail::watched(*this, [&] { return forward(x, seen); });
  }

  void visit(Visitor& visitor) override {
    visitor.module("self_attn", self_attn);
    visitor.module("linear1", linear1);
    visitor.module("linear2", linear2);
    visitor.module("norm1", norm1);
    visitor.module("norm2", norm2);
  }
  std::string describe() const override { return cat("TransformerEncoderLayer(", linear1.weight.shape()[1], ")"); }

 private:
  template <class X, class Seen>
  auto forward(const SequencePart<X>& x, const Seen& seen) const {
    if (options_.norm_first) {
      const auto y = x + attended(norm1(x), seen);
      return y + transformed(norm2(y));
    }
    const auto y = norm1(x + attended(x, seen));
    return norm2(y + transformed(y));
  }
  template <class X, class Seen>
  auto attended(const X& x, const Seen& seen) const {
    return dropout(self_attn(x, x, x, seen), options_.dropout, training());
  }
  template <class X>
  auto transformed(const X& x) const {
    const auto inner = dropout(detail::feed_forward(linear1(x), options_.activation), options_.dropout, training());
    return dropout(linear2.to_sequence(inner, x.group()), options_.dropout, training());
  }

  TransformerOptions options_;
};

/// x: [batch, length, features], memory: [batch, keys, features] (what the encoder made) -> x's shape: causal
/// self-attention, attention to the memory, then two linear layers on each place.
template <Device D, Real T>
class TransformerDecoderLayer : public Module {
 public:
  using device_type = D;
  MultiheadAttention<D, T> self_attn, multihead_attn;
  ColumnParallelLinear<D, T> linear1;
  RowParallelLinear<D, T> linear2;
  LayerNorm<D, T> norm1, norm2, norm3;

  explicit TransformerDecoderLayer(Index features, const TransformerOptions& options = {})
      : self_attn(features, options.heads),
        multihead_attn(features, options.heads),
        linear1(features, detail::inner_features(features, options)),
        linear2(detail::inner_features(features, options), features),
        norm1(features),
        norm2(features),
        norm3(features),
        options_(options) {}

  template <Operand X, class M>
  auto operator()(const X& x, const M& memory, bool causal = true) const {
    return detail::watched(*this, [&] { return gather_sequence(forward(split_sequence(x), memory, causal)); });
  }
  /// The same of a sequence in parts: see split_sequence. The memory may be whole or in parts.
  template <class X, class M>
  auto operator()(const SequencePart<X>& x, const M& memory, bool causal = true) const {
    return detail::watched(*this, [&] { return forward(x, memory, causal); });
  }

  void visit(Visitor& visitor) override {
    visitor.module("self_attn", self_attn);
    visitor.module("multihead_attn", multihead_attn);
    visitor.module("linear1", linear1);
    visitor.module("linear2", linear2);
    visitor.module("norm1", norm1);
    visitor.module("norm2", norm2);
    visitor.module("norm3", norm3);
  }
  std::string describe() const override { return cat("TransformerDecoderLayer(", linear1.weight.shape()[1], ")"); }

 private:
  template <class X, class M>
  auto forward(const SequencePart<X>& x, const M& memory, bool causal) const {
    if (options_.norm_first) {
      const auto own = norm1(x);
      const auto y = x + dropped(self_attn(own, own, own, causal));
      const auto z = y + dropped(multihead_attn(norm2(y), memory, memory));
      return z + transformed(norm3(z));
    }
    const auto y = norm1(x + dropped(self_attn(x, x, x, causal)));
    const auto z = norm2(y + dropped(multihead_attn(y, memory, memory)));
    return norm3(z + transformed(z));
  }
  template <class X>
  auto dropped(const X& x) const {
    return dropout(x, options_.dropout, training());
  }
  template <class X>
  auto transformed(const X& x) const {
    return dropped(linear2.to_sequence(dropped(detail::feed_forward(linear1(x), options_.activation)), x.group()));
  }

  TransformerOptions options_;
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_TRANSFORMER_HPP

// <chorus/nn/vocabulary_embedding.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_VOCABULARY_EMBEDDING_HPP
#define CHORUS_SINGLE_CHORUS_NN_VOCABULARY_EMBEDDING_HPP
/// The table of learned vectors, shared by the ranks of TensorParallel.

// <chorus/ops/vocabulary.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_VOCABULARY_HPP
#define CHORUS_SINGLE_CHORUS_OPS_VOCABULARY_HPP
/// Looking up and scoring the entries of a vocabulary that ranks share (Shoeybi et al. 2019, section 3).

// <chorus/kernels/vocabulary.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_VOCABULARY_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_VOCABULARY_HPP
/// Cross entropy over classes of which this rank has some, in steps between which ranks add up.

// <chorus/kernels/cpu/vocabulary.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_VOCABULARY_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_VOCABULARY_HPP
/// Cross entropy over shared classes on the CPU.

namespace chorus::kernels {

/// Which of `classes` are here. Scores are [batch, count].
struct Vocabulary {
  Index classes, begin, count;
  bool has(std::int64_t label) const { return label >= begin && label < begin + count; }
};

/// largest[i]: of the scores of sample i that are here.
template <class T>
void vocabulary_maximum(Cpu, Index batch, const Vocabulary& words, const T* scores, T* largest) {
  for (Index i = 0; i < batch; ++i) {
    const Row<T> row{i * words.count, i, words.count};
    row.store_result(largest, row.reduce(Max<T>{}, [&](Index j, auto count) { return load(scores + j, count); }));
  }
}

/// sums[i]: of sample i the sum of exp(x - largest), x - largest of the label if it is here, else 0, and, where labels
/// are smoothed, the sum of x - largest. Throws UsageError for a bad label and a bad option.
template <class T>
void vocabulary_sums(Cpu cpu, Index batch, const Vocabulary& words, const T* scores, const std::int64_t* labels,
                     const CrossEntropyOptions& options, const T* largest, T* sums) {
  check<UsageError>(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                    "cross_entropy: label_smoothing must be in [0, 1], got ", options.label_smoothing);
  count_labels(cpu, "cross_entropy", batch, words.classes, labels, options.ignore_index);
  for (Index i = 0; i < batch; ++i) {
    const Row<T> row{i * words.count, 3 * i, words.count};
    const auto shift = splat(largest[i]);
    row.store_result(sums, row.reduce(Sum<T>{}, [&](Index j, auto count) {
      return detail::exp_to_zero<T>(psub(load(scores + j, count), shift));
    }));
    sums[3 * i + 1] = words.has(labels[i]) ? scores[row.at + labels[i] - words.begin] - largest[i] : T{0};
    sums[3 * i + 2] = 0;
    if (options.label_smoothing > 0)
      Row<T>{row.at, 3 * i + 2, words.count}.store_result(
          sums, row.reduce(Sum<T>{}, [&](Index j, auto count) { return psub(load(scores + j, count), shift); }));
  }
}

/// The loss, of `sums` that all ranks have added up.
template <class T>
void vocabulary_loss(Cpu cpu, Index batch, const Vocabulary& words, const std::int64_t* labels,
                     const CrossEntropyOptions& options, const T* sums, T* loss) {
  const Index counted = count_labels(cpu, "cross_entropy", batch, words.classes, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  detail::reduce_losses(batch, counted, options.reduction, loss, [&](Index i) {
    if (labels[i] == options.ignore_index) return T{0};
    const T log_sum = std::log(sums[3 * i]), sharp = log_sum - sums[3 * i + 1];
    if (smoothing == 0) return sharp;
    const T smooth = log_sum - sums[3 * i + 2] / static_cast<T>(words.classes);
    return (T{1} - smoothing) * sharp + smoothing * smooth;
  });
}

/// The gradient by the scores that are here.
template <class T>
void vocabulary_backward(Cpu cpu, Index batch, const Vocabulary& words, const T* scores, const std::int64_t* labels,
                         const CrossEntropyOptions& options, const T* largest, const T* sums, const T* dloss,
                         T* dscores, bool accumulate) {
  const Index counted = count_labels(cpu, "cross_entropy", batch, words.classes, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  for (Index i = 0; i < batch; ++i) {
    const T* const x = scores + i * words.count;
    T* const dx = dscores + i * words.count;
    if (labels[i] == options.ignore_index) {
      if (!accumulate) std::fill_n(dx, words.count, T{0});
      continue;
    }
    const T scale = detail::sample_scale(i, counted, options.reduction, dloss);
    const auto s = splat(scale), uniform = splat(smoothing / static_cast<T>(words.classes)),
               shift = splat(largest[i]), log_sum = splat(std::log(sums[3 * i]));
    for_packets<T>(words.count, [&](Index j, auto count) {
      const auto p = detail::exp_to_zero<T>(psub(psub(load(x + j, count), shift), log_sum));
      store(dx + j, pmul(psub(p, uniform), s), count, accumulate);
    });
    if (words.has(labels[i])) dx[labels[i] - words.begin] -= (T{1} - smoothing) * scale;
  }
}

}  // namespace chorus::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_VOCABULARY_HPP

#if CHORUS_USE_CUDA
namespace chorus::kernels {

/// On GPUs there is none: use gather_columns.
template <class T>
void vocabulary_maximum(Cuda, Index, const Vocabulary&, const T*, T*) {
  fail<UsageError>("cross_entropy: of classes that ranks share it is for the CPU; use gather_columns(logits)");
}
template <class T>
void vocabulary_sums(Cuda, Index, const Vocabulary&, const T*, const std::int64_t*, const CrossEntropyOptions&,
                     const T*, T*) {}
template <class T>
void vocabulary_loss(Cuda, Index, const Vocabulary&, const std::int64_t*, const CrossEntropyOptions&, const T*, T*) {}
template <class T>
void vocabulary_backward(Cuda, Index, const Vocabulary&, const T*, const std::int64_t*, const CrossEntropyOptions&,
                         const T*, const T*, const T*, T*, bool) {}

}  // namespace chorus::kernels
#endif
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_VOCABULARY_HPP

namespace chorus {

/// weight: this rank's entries of `entries`: [part, features], index: [...] -> the rows that it names: [..., features],
/// on all ranks. Throws UsageError for an index that is no entry.
template <Operand W, int Rank, class D>
auto vocabulary_embedding(const W& weight, const Tensor<std::int64_t, Rank, D>& index, Index entries,
                          const TensorGroupRef& group = tensor_group()) {
  using Rows = decltype(leave_tensor_region(embedding(weight, index), group));
  if (group == nullptr) return Rows(embedding(weight, index));
  const auto part = group->part(entries, 1);
  auto own = contiguous(index).to_vector();
  Shape<Rank + 1> shape{};
  std::copy(index.shape().begin(), index.shape().end(), shape.begin());
  shape.back() = 1;
  auto elsewhere = Tensor<bool, Rank + 1, Cpu>::empty(shape);
  for (std::size_t i = 0; i < own.size(); ++i) {
    check<UsageError>(own[i] >= 0 && own[i] < entries, "embedding: index ", own[i], " is not in [0, ", entries, ")");
    own[i] -= part.begin;
    elsewhere.data()[i] = own[i] < 0 || own[i] >= part.count;
    if (elsewhere.data()[i]) own[i] = 0;
  }
  const auto device = index.device();
  const auto rows = embedding(
      weight, Tensor<std::int64_t, Rank, D>::from(std::span<const std::int64_t>(own), index.shape(), device));
  const auto nothing = tensor_of<decltype(rows)>::zeros(value_of(rows).shape(), device);
  return leave_tensor_region(
      Rows(where(Tensor<bool, Rank + 1, D>::from(std::span<const bool>(elsewhere.data(), own.size()), shape, device),
                 nothing, rows)),
      group);
}

namespace detail {

template <int Rank, Operand X, class D>
Recorded<Rank, X> vocabulary_cross_entropy(const Columns<X>& logits, const Tensor<std::int64_t, 1, D>& labels,
                                           const CrossEntropyOptions& options) {
  using T = typename tensor_of<X>::value_type;
  const auto scores = contiguous(value_of(logits.part()));
  const auto targets = contiguous(labels);
  check_class_loss("cross_entropy", scores, targets, options, Rank == 1 ? Reduction::none : Reduction::mean);
  const auto device = scores.device();
  const Index batch = scores.size(0);
  const auto part = logits.range();
  const kernels::Vocabulary words{logits.width(), part.begin, part.count};
  auto largest = Tensor<T, 1, D>::empty({batch}, device);
  kernels::vocabulary_maximum(device, batch, words, scores.data(), largest.data());
  logits.group()->max(span_of(largest));
  // Of each sample: the sum of exp(x - largest), x - largest of the label, and the sum of x - largest.
  auto sums = Tensor<T, 2, D>::empty({batch, 3}, device);
  kernels::vocabulary_sums(device, batch, words, scores.data(), targets.data(), options, largest.data(), sums.data());
  logits.group()->sum(span_of(sums));
  Shape<Rank> shape{};
  if constexpr (Rank == 1) shape[0] = batch;
  auto loss = Tensor<T, Rank, D>::empty(shape, device);
  kernels::vocabulary_loss(device, batch, words, targets.data(), options, sums.data(), loss.data());
  return record(
      "cross_entropy", std::move(loss),
      [saved = Saved(scores), targets, options, largest, sums, words](const auto& dloss, auto dlogits) {
        const auto& x = saved.read("cross_entropy");
        const auto [grad, accumulate] = dlogits->target();
        kernels::vocabulary_backward(x.device(), x.size(0), words, x.data(), targets.data(), options, largest.data(),
                                     sums.data(), dloss.data(), grad.data(), accumulate);
      },
      logits.part());
}

// `f(columns)`, of bf16 and half ones in float.
template <class X, class F>
auto columns_in_float(const Columns<X>& logits, const F& f) {
  if constexpr (NarrowOperand<X>)
    return to<typename tensor_of<X>::value_type>(f(logits.with(to<float>(logits.part()))));
  else
    return f(logits);
}

}  // namespace detail

/// Of scores that ranks share by classes: the loss of all classes, on every rank, for which three numbers a sample go
/// between ranks. Throws as it does for whole scores.
template <class X, class D>
auto cross_entropy(const Columns<X>& logits, const Tensor<std::int64_t, 1, D>& labels,
                   const CrossEntropyOptions& options = {}) {
  detail::check_first_order<X>();
  using Loss = decltype(cross_entropy(logits.part(), labels, options));
  if (logits.group() == nullptr) return cross_entropy(logits.part(), labels, options);
  return Loss(detail::columns_in_float(logits, [&](const auto& scores) {
    const auto targets = to_device(labels, value_of(scores.part()).device());
    const auto loss_of = [&](const CrossEntropyOptions& reducing) {
      return detail::vocabulary_cross_entropy<0>(scores, targets, reducing);
    };
    const auto each = [&](const CrossEntropyOptions& unreduced) {
      return detail::vocabulary_cross_entropy<1>(scores, targets, unreduced);
    };
    return detail::reduced_over_labels("cross_entropy", scores.part(), loss_of, each, labels, options);
  }));
}

/// The same without a reduction: [batch].
template <class X, class D>
auto cross_entropy_per_sample(const Columns<X>& logits, const Tensor<std::int64_t, 1, D>& labels,
                              const CrossEntropyOptions& options = {}) {
  detail::check_first_order<X>();
  using Losses = decltype(cross_entropy_per_sample(logits.part(), labels, options));
  if (logits.group() == nullptr) return cross_entropy_per_sample(logits.part(), labels, options);
  return Losses(detail::columns_in_float(logits, [&](const auto& scores) {
    return detail::vocabulary_cross_entropy<1>(scores, to_device(labels, value_of(scores.part()).device()),
                                               detail::unreduced("cross_entropy_per_sample", options));
  }));
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_VOCABULARY_HPP

namespace chorus::nn {

/// Embedding whose entries are shared out under TensorParallel: each rank looks up those that it has, and what they
/// give is added up. Else it is Embedding, with the same name, shape and initial numbers.
template <Device D, Real T = float>
class VocabularyParallelEmbedding : public Embedding<D, T> {
 public:
  VocabularyParallelEmbedding(Index entries, Index features) : Embedding<D, T>(entries, features), entries_(entries) {}

  template <int Rank>
  auto operator()(const Tensor<std::int64_t, Rank, D>& index) const {
    return detail::watched(*this, [&] { return vocabulary_embedding(this->weight, index, entries_, group()); });
  }
  /// The head of a model that has its weight in common with the table: x: [..., features] -> the scores of all entries,
  /// x weightᵀ, as Columns of [..., entries].
  template <Operand X>
  auto scores(const X& x) const {
    auto own = group();
    auto y = linear(enter_tensor_region(x, own), this->weight);
    return Columns<decltype(y)>(std::move(y), entries_, 1, std::move(own));
  }
  void visit(Visitor& visitor) override { visitor.split_parameter("weight", this->weight, {.axis = 0}); }
  std::string describe() const override { return cat("Embedding(", entries_, ", ", this->weight.shape()[1], ")"); }

 private:
  TensorGroupRef group() const {
    return detail::group_of_part("VocabularyParallelEmbedding", this->weight.shape()[0], entries_, 1);
  }

  Index entries_;
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_VOCABULARY_EMBEDDING_HPP

// <chorus/ops/class_losses.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_CLASS_LOSSES_HPP
#define CHORUS_SINGLE_CHORUS_OPS_CLASS_LOSSES_HPP
/// Losses over classes beyond [batch, classes]: weights of classes, a class for each pixel, probabilities as targets.

namespace chorus {

namespace detail {

// [batch, classes, ...] -> [batch * ..., classes]
template <Operand X>
auto class_rows(const X& x) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 2, "a loss over classes takes scores [batch, classes, ...]");
  Shape<rank> order{};
  order[0] = 0;
  for (int axis = 2; axis < rank; ++axis) order[static_cast<std::size_t>(axis - 1)] = axis;
  order.back() = 1;
  const Index classes = value_of(x).size(1);
  const Index rows = classes == 0 ? 0 : value_of(x).numel() / classes;
  return reshape(permute(x, order), Shape<2>{rows, classes});
}

template <std::size_t Rank>
Shape<static_cast<int>(Rank) - 1> shape_without_classes(const std::array<Index, Rank>& scores) {
  Shape<static_cast<int>(Rank) - 1> out{};
  out[0] = scores[0];
  for (std::size_t axis = 2; axis < Rank; ++axis) out[axis - 1] = scores[axis];
  return out;
}

template <class D, class T, int Rank>
Tensor<std::int64_t, 1, D> label_row(const char* operation, const Tensor<T, Rank, D>& scores,
                                     const Tensor<std::int64_t, Rank - 1, D>& labels) {
  check<ShapeError>(labels.shape() == shape_without_classes(scores.shape()), operation, ": scores of shape ",
                    scores.shape(), " do not fit labels of shape ", labels.shape());
  return contiguous(labels).view(Shape<1>{-1});
}

// The losses of samples, and what a mean of them is divided by.
template <Operand X, class T, class D>
auto weighted_losses(const X& log_probabilities, const Tensor<std::int64_t, 1, D>& labels,
                     const Tensor<T, 1, D>& weight, std::int64_t ignore_index, double smoothing) {
  const auto& shape = value_of(log_probabilities).shape();
  check<ShapeError>(weight.numel() == shape[1], "loss over classes: ", weight.numel(), " weights for ", shape[1],
                    " classes");
  const NllLossOptions options{.ignore_index = ignore_index, .reduction = Reduction::none};
  const auto scaled = log_probabilities * weight;
  auto losses = nll_loss_per_sample(scaled, labels, options);
  if (smoothing != 0) {
    const auto counted = nll_loss_per_sample(Tensor<T, 2, D>::full(shape, T{-1}, weight.device()), labels, options);
    losses = losses * (1 - smoothing) -
             sum(scaled, 1) * counted * (smoothing / static_cast<double>(std::max(shape[1], Index{1})));
  }
  return losses;
}

template <class T, class D>
Tensor<T, 0, D> total_weight(const Tensor<std::int64_t, 1, D>& labels, const Tensor<T, 1, D>& weight,
                             std::int64_t ignore_index) {
  const Shape<2> shape{labels.numel(), weight.numel()};
  const auto each = nll_loss_per_sample(contiguous((-weight).expand(shape)), labels, {.ignore_index = ignore_index});
  // The mean of no sample is 0, not 0 / 0.
  return maximum(sum(each), Tensor<T, 0, D>::full({}, std::numeric_limits<T>::min(), weight.device()));
}

template <Operand X, class T, class D, class Options>
auto reduce_weighted(const char* operation, const X& losses, const Tensor<std::int64_t, 1, D>& labels,
                     const Tensor<T, 1, D>& weight, const Options& options) {
  if (options.mean_over) return sum_of_losses_over(losses, checked_mean_over(operation, options));
  if constexpr (AnyVariable<X> && !is_graph_variable<X>)
    if (const auto cut = options.reduction == Reduction::mean ? cut_of_losses(losses) : nullptr) [[unlikely]]
      return canonical_mean(losses, *cut, [&](Index begin, Index end) {
        const T weights = total_weight(labels.slice(0, begin, end), weight, options.ignore_index).item();
        return weights == std::numeric_limits<T>::min() ? 0 : static_cast<double>(weights);
      });
  auto total = sum(losses);
  if (options.reduction != Reduction::mean) return total;
  const auto over = total_weight(labels, weight, options.ignore_index);
  return as_counted_mean<D>(total / over, [over] {
    const T weights = over.item();
    return weights == std::numeric_limits<T>::min() ? 0 : static_cast<double>(weights);
  });
}

}  // namespace detail

/// logits: [batch, classes, ...], labels: [batch, ...]: cross entropy of each place, averaged (or summed) over all.
template <Operand X, int LabelRank, class D>
requires(LabelRank >= 2 && tensor_of<X>::rank == LabelRank + 1) auto cross_entropy(
    const X& logits, const Tensor<std::int64_t, LabelRank, D>& labels, const CrossEntropyOptions& options = {}) {
  const auto row = detail::label_row("cross_entropy", value_of(logits), labels);
  return cross_entropy(detail::class_rows(logits), row, options);
}
/// The same without a reduction: [batch, ...].
template <Operand X, int LabelRank, class D>
requires(LabelRank >= 2 && tensor_of<X>::rank == LabelRank + 1) auto cross_entropy_per_sample(
    const X& logits, const Tensor<std::int64_t, LabelRank, D>& labels, const CrossEntropyOptions& options = {}) {
  const auto row = detail::label_row("cross_entropy", value_of(logits), labels);
  return reshape(cross_entropy_per_sample(detail::class_rows(logits), row, options), labels.shape());
}

/// With a weight for each class, [classes]: every loss is multiplied by its label's weight, and the mean is divided by
/// the sum of those, as PyTorch does. logits: [batch, classes, ...], labels: [batch, ...].
template <Operand X, int LabelRank, class T, class D>
auto cross_entropy(const X& logits, const Tensor<std::int64_t, LabelRank, D>& labels, const Tensor<T, 1, D>& weight,
                   const CrossEntropyOptions& options = {}) {
  const auto row = detail::label_row("cross_entropy", value_of(logits), labels);
  const auto losses = detail::weighted_losses(log_softmax(detail::class_rows(logits), 1), row, weight,
                                              options.ignore_index, options.label_smoothing);
  return detail::reduce_weighted("cross_entropy", losses, row, weight, options);
}
template <Operand X, int LabelRank, class T, class D>
auto cross_entropy_per_sample(const X& logits, const Tensor<std::int64_t, LabelRank, D>& labels,
                              const Tensor<T, 1, D>& weight, const CrossEntropyOptions& options = {}) {
  detail::unreduced("cross_entropy_per_sample", options);
  const auto row = detail::label_row("cross_entropy", value_of(logits), labels);
  return reshape(detail::weighted_losses(log_softmax(detail::class_rows(logits), 1), row, weight, options.ignore_index,
                                         options.label_smoothing),
                 labels.shape());
}

/// Negative log likelihood of log_probabilities: [batch, classes, ...], labels: [batch, ...], likewise.
template <Operand X, int LabelRank, class D>
requires(LabelRank >= 2 && tensor_of<X>::rank == LabelRank + 1) auto nll_loss(
    const X& log_probabilities, const Tensor<std::int64_t, LabelRank, D>& labels, const NllLossOptions& options = {}) {
  const auto row = detail::label_row("nll_loss", value_of(log_probabilities), labels);
  return nll_loss(detail::class_rows(log_probabilities), row, options);
}
template <Operand X, int LabelRank, class D>
requires(LabelRank >= 2 && tensor_of<X>::rank == LabelRank + 1) auto nll_loss_per_sample(
    const X& log_probabilities, const Tensor<std::int64_t, LabelRank, D>& labels, const NllLossOptions& options = {}) {
  const auto row = detail::label_row("nll_loss", value_of(log_probabilities), labels);
  return reshape(nll_loss_per_sample(detail::class_rows(log_probabilities), row, options), labels.shape());
}

/// Negative log likelihood with a weight for each class, likewise.
template <Operand X, int LabelRank, class T, class D>
auto nll_loss(const X& log_probabilities, const Tensor<std::int64_t, LabelRank, D>& labels,
              const Tensor<T, 1, D>& weight, const NllLossOptions& options = {}) {
  const auto row = detail::label_row("nll_loss", value_of(log_probabilities), labels);
  const auto losses =
      detail::weighted_losses(detail::class_rows(log_probabilities), row, weight, options.ignore_index, 0);
  return detail::reduce_weighted("nll_loss", losses, row, weight, options);
}
template <Operand X, int LabelRank, class T, class D>
auto nll_loss_per_sample(const X& log_probabilities, const Tensor<std::int64_t, LabelRank, D>& labels,
                         const Tensor<T, 1, D>& weight, const NllLossOptions& options = {}) {
  detail::unreduced("nll_loss_per_sample", options);
  const auto row = detail::label_row("nll_loss", value_of(log_probabilities), labels);
  return reshape(detail::weighted_losses(detail::class_rows(log_probabilities), row, weight, options.ignore_index, 0),
                 labels.shape());
}

/// Targets that are probabilities: [batch, classes, ...] like the logits -> -sum over classes of target
/// log_softmax(logits) for each place: [batch, ...]. Throws ShapeError where shapes differ.
template <Operand X, Operand Y>
requires(
    tensor_of<X>::rank == tensor_of<Y>::rank &&
    Real<typename tensor_of<Y>::value_type>) auto cross_entropy_per_sample(const X& logits, const Y& target,
                                                                           const CrossEntropyOptions& options = {}) {
  const auto& shape = value_of(logits).shape();
  check<ShapeError>(shape == value_of(target).shape(), "cross_entropy: logits of shape ", shape,
                    " do not fit targets of shape ", value_of(target).shape());
  const double s = detail::unreduced("cross_entropy_per_sample", options).label_smoothing;
  check<UsageError>(s >= 0 && s <= 1, "cross_entropy: label_smoothing must be in [0, 1], got ", s);
  const auto smooth = target * (1 - s) + s / static_cast<double>(std::max(shape[1], Index{1}));
  return -sum(smooth * log_softmax(logits, 1), 1);
}
/// The same averaged over the batch and all places, or summed.
template <Operand X, Operand Y>
requires(tensor_of<X>::rank == tensor_of<Y>::rank &&
         Real<typename tensor_of<Y>::value_type>) auto cross_entropy(const X& logits, const Y& target,
                                                                     const CrossEntropyOptions& options = {}) {
  const auto losses = cross_entropy_per_sample(logits, target, {.label_smoothing = options.label_smoothing});
  if (options.mean_over)
    return detail::sum_of_losses_over(losses, detail::checked_mean_over("cross_entropy", options));
  return detail::mean_or_sum(losses, options.reduction);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_CLASS_LOSSES_HPP

// <chorus/ops/ctc_loss.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_CTC_LOSS_HPP
#define CHORUS_SINGLE_CHORUS_OPS_CTC_LOSS_HPP
/// Connectionist temporal classification: the likelihood of a sequence of labels under scores of a longer sequence,
/// whatever their alignment (Graves et al. 2006).

namespace chorus {

struct CtcLossOptions {
  std::int64_t blank = 0;
  /// mean: each loss divided by its number of labels (at least 1), averaged over the batch; or sum.
  Reduction reduction = Reduction::mean;
  /// Whether a loss that is infinite, because the labels don't fit into the time, counts as 0, with no gradient.
  bool zero_infinity = false;
};

namespace operations {
struct CtcLoss {
  static constexpr const char* name = "ctc_loss";
};
}  // namespace operations

namespace detail {

inline double log_add(double a, double b) {
  const double most = std::max(a, b);
  return most == -std::numeric_limits<double>::infinity() ? most : most + std::log1p(std::exp(std::min(a, b) - most));
}

/// One sample: -log of the probability that its scores give the labels. scores: [time, classes], rows `pitch` apart.
/// `grad`, unless it is null, has room for as much, with the same pitch, and is 0 at first.
template <class T>
double ctc_of_sample(Index time, const T* scores, Index pitch, Index labels, const std::int64_t* label,
                     std::int64_t blank, bool zero_infinity, T* grad) {
  constexpr double never = -std::numeric_limits<double>::infinity();
  if (time == 0) return labels == 0 || zero_infinity ? 0 : -never;
  // States: the labels with a blank around each.
  const Index states = 2 * labels + 1;
  const auto at = [&](Index state) { return state % 2 == 0 ? blank : label[state / 2]; };
  const auto score = [&](Index t, Index state) { return static_cast<double>(scores[t * pitch + at(state)]); };
  const auto skips = [&](Index state) { return state >= 2 && at(state) != blank && at(state) != at(state - 2); };
  const kernels::Scratch<double> numbers(Cpu{}, (time + 2) * states);
  double* before = numbers.data();  // [time, states]: of all ways to come here, this score included
  for (Index t = 0; t < time; ++t)
    for (Index s = 0; s < states; ++s) {
      double sum = s < 2 ? 0 : never;
      if (t > 0) {
        const double* last = before + (t - 1) * states;
        sum = last[s];
        if (s >= 1) sum = log_add(sum, last[s - 1]);
        if (skips(s)) sum = log_add(sum, last[s - 2]);
      }
      before[t * states + s] = sum + score(t, s);
    }
  const double* end = before + time * states;
  const double loss = -(states > 1 ? log_add(end[-1], end[-2]) : end[-1]);
  if (zero_infinity && loss == -never) return 0;
  if (grad == nullptr) return loss;
  double *after = before + time * states, *next = after + states;  // of all ways on from here, this score left out
  for (Index t = time - 1; t >= 0; --t, std::swap(after, next))
    for (Index s = 0; s < states; ++s) {
      if (t == time - 1) {
        after[s] = s + 2 >= states ? 0 : never;
      } else {
        double sum = next[s] + score(t + 1, s);
        if (s + 1 < states) sum = log_add(sum, next[s + 1] + score(t + 1, s + 1));
        if (s + 2 < states && skips(s + 2)) sum = log_add(sum, next[s + 2] + score(t + 1, s + 2));
        after[s] = sum;
      }
      grad[t * pitch + at(s)] -= static_cast<T>(std::exp(before[t * states + s] + after[s] + loss));
    }
  return loss;
}

}  // namespace detail

/// log_probabilities: [time, batch, classes]; labels: [batch, most], of which the first label_lengths[n] count, none of
/// them `blank`; of the time the first input_lengths[n] steps -> [batch]: -log p(labels). A sequence that is too short
/// for its labels has an infinite loss and, without `zero_infinity`, no gradient but NaN. It is computed on the host,
/// in double. Throws ShapeError where sizes differ, UsageError for lengths and labels out of range.
template <Operand X>
auto ctc_loss_per_sample(const X& log_probabilities, const Tensor<std::int64_t, 2, Cpu>& labels,
                         const Tensor<std::int64_t, 1, Cpu>& input_lengths,
                         const Tensor<std::int64_t, 1, Cpu>& label_lengths, const CtcLossOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  const auto device = value_of(log_probabilities).device();
  const auto scores = to_device(contiguous(value_of(log_probabilities)), Cpu{});
  const auto targets = contiguous(labels);
  const Index time = scores.size(0), batch = scores.size(1), classes = scores.size(2), most = targets.size(1);
  check<ShapeError>(targets.size(0) == batch && input_lengths.size(0) == batch && label_lengths.size(0) == batch,
                    "ctc_loss: scores of shape ", scores.shape(), " need labels, input_lengths and label_lengths of ",
                    batch, " samples, got ", targets.shape(), ", ", input_lengths.shape(), " and ",
                    label_lengths.shape());
  check<UsageError>(options.blank >= 0 && options.blank < classes, "ctc_loss: blank ", options.blank,
                    " is not one of ", classes, " classes");
  for (Index n = 0; n < batch; ++n) {
    check<UsageError>(input_lengths(n) >= 0 && input_lengths(n) <= time && label_lengths(n) >= 0 &&
                          label_lengths(n) <= most,
                      "ctc_loss: sample ", n, " has ", input_lengths(n), " of ", time, " steps and ", label_lengths(n),
                      " of ", most, " labels");
    for (Index i = 0; i < label_lengths(n); ++i)
      check<UsageError>(targets(n, i) >= 0 && targets(n, i) < classes && targets(n, i) != options.blank,
                        "ctc_loss: label ", targets(n, i), " of sample ", n, " is not in [0, ", classes,
                        "), or is the blank ", options.blank);
  }
  auto losses = Tensor<T, 1, Cpu>::empty({batch});
  Tensor<T, 3, Cpu> grads;
  if (node_of(log_probabilities) && grad_enabled()) grads = Tensor<T, 3, Cpu>::zeros(scores.shape());
  parallel_for(batch, [&](Index n) {
    losses.data()[n] = static_cast<T>(detail::ctc_of_sample(
        input_lengths(n), scores.data() + n * classes, batch * classes, label_lengths(n), targets.data() + n * most,
        options.blank, options.zero_infinity, grads.defined() ? grads.data() + n * classes : nullptr));
  });
  return record(
      operations::CtcLoss{}, to_device(losses, device),
      [grads, batch](const auto& dloss, auto dx) {
        dx->add(to_device(grads, dloss.device()) * contiguous(dloss).view(Shape<3>{1, batch, 1}));
      },
      log_probabilities);
}

/// The same, reduced.
template <Operand X>
auto ctc_loss(const X& log_probabilities, const Tensor<std::int64_t, 2, Cpu>& labels,
              const Tensor<std::int64_t, 1, Cpu>& input_lengths, const Tensor<std::int64_t, 1, Cpu>& label_lengths,
              const CtcLossOptions& options = {}) {
  check<UsageError>(options.reduction != Reduction::none,
                    "ctc_loss: one loss a sample has a function of its own: ctc_loss_per_sample");
  using T = typename tensor_of<X>::value_type;
  const auto losses = ctc_loss_per_sample(log_probabilities, labels, input_lengths, label_lengths, options);
  const Index batch = label_lengths.size(0);
  if constexpr (AnyVariable<X> && !detail::is_graph_variable<X>)
    if (options.reduction == Reduction::mean && detail::cut_of_losses(losses)) [[unlikely]] {
      auto of_labels = Tensor<T, 1, Cpu>::empty({batch});
      for (Index n = 0; n < batch; ++n)
        of_labels.data()[n] = T{1} / static_cast<T>(std::max<Index>(1, label_lengths(n)));
      return detail::mean_of_losses(losses * to_device(of_labels, value_of(losses).device()),
                                    static_cast<double>(batch));
    }
  auto weight = Tensor<T, 1, Cpu>::full({batch}, T{1});
  if (options.reduction == Reduction::mean)
    for (Index n = 0; n < batch; ++n)
      weight.data()[n] = T{1} / static_cast<T>(std::max<Index>(1, label_lengths(n)) * batch);
  auto loss = sum(losses * to_device(weight, value_of(losses).device()));
  if (options.reduction == Reduction::mean) return detail::as_mean(std::move(loss), static_cast<double>(batch));
  return loss;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_CTC_LOSS_HPP

// <chorus/ops/einsum.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_EINSUM_HPP
#define CHORUS_SINGLE_CHORUS_OPS_EINSUM_HPP
/// Einstein summation of two operands: one matrix product.

// <chorus/ops/reduction_axes.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_REDUCTION_AXES_HPP
#define CHORUS_SINGLE_CHORUS_OPS_REDUCTION_AXES_HPP
/// Reductions along several axes at once: `mean(x, std::array<Index, 2>{2, 3})`.

namespace chorus {

namespace detail {

template <std::size_t N, std::size_t Rank>
std::array<bool, Rank> chosen_axes(const char* operation, const std::array<Index, N>& axes) {
  std::array<bool, Rank> chosen{};
  for (const Index axis : axes) {
    const auto a = normalize_axis(operation, axis, static_cast<int>(Rank));
    check<ShapeError>(!chosen[a], operation, ": axes ", axes, " name an axis twice");
    chosen[a] = true;
  }
  return chosen;
}

// The axes that stay, in their order, and one last axis with all elements of the others.
template <std::size_t N, Operand X>
auto merge_axes(const char* operation, const X& x, const std::array<Index, N>& axes) {
  constexpr auto rank = static_cast<std::size_t>(tensor_of<X>::rank);
  static_assert(N >= 1 && N <= rank, "a reduction names 1 to rank axes");
  const auto chosen = chosen_axes<N, rank>(operation, axes);
  Shape<tensor_of<X>::rank> order{};
  std::array<Index, rank - N + 1> shape{};
  shape.back() = 1;
  std::size_t stay = 0, go = rank - N;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    const Index size = value_of(x).shape()[axis];
    if (chosen[axis])
      shape.back() *= size;
    else
      shape[stay] = size;
    order[chosen[axis] ? go++ : stay++] = static_cast<Index>(axis);
  }
  return reshape(permute(x, order), shape);
}

/// `reduce(y, axis)` over the named axes: over neighbours of them at once, the last ones first. What is summed so need
/// not be moved together first. Of bf16 and half, sums between would be rounded.
template <std::size_t N, Operand X, class Reduce>
auto reduce_neighbours(const char* operation, const X& x, const std::array<Index, N>& axes, const Reduce& reduce) {
  constexpr auto rank = static_cast<std::size_t>(tensor_of<X>::rank);
  static_assert(N >= 1 && N <= rank, "a reduction names 1 to rank axes");
  const auto chosen = chosen_axes<N, rank>(operation, axes);
  const auto& shape = value_of(x).shape();
  std::array<Index, rank - N> left{};
  for (std::size_t axis = 0, stay = 0; axis < rank; ++axis)
    if (!chosen[axis]) left[stay++] = shape[axis];
  std::size_t end = rank;
  // A run of axes [begin, end) in the middle of what is left of the others.
  const auto next = [&](const auto& y) {
    while (!chosen[end - 1]) --end;
    std::size_t begin = end;
    while (begin > 0 && chosen[begin - 1]) --begin;
    Shape<3> view{1, 1, 1};
    for (std::size_t axis = 0; axis < begin; ++axis) view[0] *= shape[axis];
    for (std::size_t axis = begin; axis < end; ++axis) view[1] *= shape[axis];
    for (std::size_t axis = end; axis < rank; ++axis)
      if (!chosen[axis]) view[2] *= shape[axis];
    end = begin;
    return reduce(reshape(y, view), 1);
  };
  const std::size_t first = static_cast<std::size_t>(std::find(chosen.begin(), chosen.end(), true) - chosen.begin());
  auto y = next(x);
  while (end > first) y = next(y);
  return reshape(y, left);
}

template <std::size_t N, Operand X, Operand Reduced>
auto restore_axes(const X& x, const Reduced& reduced, const std::array<Index, N>& axes) {
  auto shape = value_of(x).shape();
  for (const Index axis : axes) shape[normalize_axis("reduction", axis, tensor_of<X>::rank)] = 1;
  return reshape(reduced, shape);
}

}  // namespace detail

#define CHORUS_REDUCTION_OF_AXES(NAME, SEPARATELY)                                                               \
  template <Operand X, std::size_t N>                                                                            \
  auto NAME(const X& x, const std::array<Index, N>& axes) {                                                      \
    if constexpr (SEPARATELY && N < static_cast<std::size_t>(tensor_of<X>::rank) && !NarrowOperand<X>)           \
      return detail::reduce_neighbours(#NAME, x, axes, [](const auto& y, Index axis) { return NAME(y, axis); }); \
    else                                                                                                         \
      return NAME(detail::merge_axes(#NAME, x, axes), -1);                                                       \
  }                                                                                                              \
  template <Operand X, std::size_t N>                                                                            \
  auto NAME(const X& x, const std::array<Index, N>& axes, KeepAxis) {                                            \
    return detail::restore_axes(x, NAME(x, axes), axes);                                                         \
  }
/// NAME(x, axes) goes over several axes, which go away, or with keep_axis stay with size 1. Throws ShapeError where an
/// axis doesn't exist or is named twice.
CHORUS_REDUCTION_OF_AXES(sum, true)
CHORUS_REDUCTION_OF_AXES(mean, true)
CHORUS_REDUCTION_OF_AXES(amax, false)
CHORUS_REDUCTION_OF_AXES(amin, false)
CHORUS_REDUCTION_OF_AXES(logsumexp, false)
#undef CHORUS_REDUCTION_OF_AXES

/// The variance over several axes, with the same forms.
template <Operand X, std::size_t N>
auto var(const X& x, const std::array<Index, N>& axes, Index correction = 1) {
  return var(detail::merge_axes("var", x, axes), -1, correction);
}
template <Operand X, std::size_t N>
auto var(const X& x, const std::array<Index, N>& axes, KeepAxis, Index correction = 1) {
  return detail::restore_axes(x, var(x, axes, correction), axes);
}

/// The position of the smallest element along an axis; of several, the first.
template <Operand X>
auto argmin(const X& x, Index axis) {
  detail::check_not_empty("argmin", x, axis);
  return argmax(-value_of(x), axis);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_REDUCTION_AXES_HPP

namespace chorus {

/// The text of `einsum<"bij,bjk->bik">`.
template <std::size_t N>
struct Equation {
  char text[N]{};
  consteval Equation(const char (&from)[N]) { std::copy_n(from, N, text); }  // NOLINT: stands for the text
  constexpr std::string_view view() const { return {text, N - 1}; }
};

namespace detail {

/// Where `c` stands in `text`, or npos. string_view's own `find` compares the text's address with null, and that of a
/// template's argument is no constant to GCC under its undefined behaviour sanitizer.
constexpr std::size_t place_of(char c, std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i)
    if (text[i] == c) return i;
  return std::string_view::npos;
}
constexpr bool has(std::string_view text, char c) { return place_of(c, text) != std::string_view::npos; }

struct EinsumPlan {
  std::string_view a, b, out;
  static constexpr std::size_t most = 8;
  struct Letters {
    char letter[most]{};
    std::size_t count = 0;
    constexpr void add(char c) { letter[count++] = c; }
  };
  Letters both, summed, of_a, of_b, a_alone, b_alone;

  constexpr explicit EinsumPlan(std::string_view equation) {
    const auto comma = place_of(',', equation), arrow = place_of('-', equation);
    a = equation.substr(0, comma);
    b = equation.substr(comma + 1, arrow - comma - 1);
    out = equation.substr(arrow + 2);
    for (const char c : a) (has(b, c) ? (has(out, c) ? both : summed) : has(out, c) ? of_a : a_alone).add(c);
    for (const char c : b)
      if (!has(a, c)) (has(out, c) ? of_b : b_alone).add(c);
  }

  static constexpr bool valid(std::string_view equation) {
    const auto comma = place_of(',', equation), arrow = place_of('-', equation);
    if (comma > arrow || arrow == std::string_view::npos || !equation.substr(arrow).starts_with("->")) return false;
    const auto a = equation.substr(0, comma), b = equation.substr(comma + 1, arrow - comma - 1),
               out = equation.substr(arrow + 2);
    for (const auto part : {a, b, out})
      for (std::size_t i = 0; i < part.size(); ++i) {
        if (part[i] < 'a' || part[i] > 'z' || has(part.substr(i + 1), part[i])) return false;
        if (part.data() == out.data() && !has(a, part[i]) && !has(b, part[i])) return false;
      }
    return a.size() <= most && b.size() <= most;
  }
};

// x without the axes that only it has and the result has not, summed.
template <std::size_t Count, Operand X>
auto sum_letters(const X& x, std::string_view names, const EinsumPlan::Letters& letters) {
  if constexpr (Count == 0) {
    return reshape(x, value_of(x).shape());
  } else {
    std::array<Index, Count> axes{};
    for (std::size_t i = 0; i < Count; ++i) axes[i] = static_cast<Index>(names.find(letters.letter[i]));
    return sum(x, axes);
  }
}

}  // namespace detail

/// `einsum<"bij,bjk->bik">(a, b)`: letters name the axes of a, b and the result; those that the result lacks are summed
/// over. Each letter once in an operand, small letters, no ellipsis. Throws ShapeError where sizes of one letter
/// differ.
template <Equation equation, Operand A, Operand B>
auto einsum(const A& a, const B& b) {
  static_assert(detail::EinsumPlan::valid(equation.view()),
                "einsum: expected two operands and a result, as in \"ij,jk->ik\", each letter once in a part");
  constexpr detail::EinsumPlan plan(equation.view());
  static_assert(plan.a.size() == tensor_of<A>::rank && plan.b.size() == tensor_of<B>::rank,
                "einsum: the operands have other numbers of axes than the equation");
  std::array<Index, 128> size{};
  const auto measure = [&](std::string_view names, const auto& shape) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      auto& known = size[static_cast<std::size_t>(names[i])];
      check<ShapeError>(known == 0 || known == shape[i] + 1, "einsum ", equation.view(), ": shapes ",
                        value_of(a).shape(), " and ", value_of(b).shape(), " differ in axis ", names[i]);
      known = shape[i] + 1;
    }
  };
  measure(plan.a, value_of(a).shape());
  measure(plan.b, value_of(b).shape());

  // Each operand as [both, free, summed] and [both, summed, free].
  constexpr auto both = plan.both.count, summed = plan.summed.count, free_a = plan.of_a.count, free_b = plan.of_b.count;
  const auto arrange = [&]<std::size_t Rank, std::size_t Alone>(
                           const auto& x, std::string_view names, const detail::EinsumPlan::Letters& alone,
                           const detail::EinsumPlan::Letters& second, const detail::EinsumPlan::Letters& third) {
    const auto kept = detail::sum_letters<Alone>(x, names, alone);
    std::array<char, Rank + Alone> left{};
    std::size_t count = 0;
    for (const char c : names)
      if (std::string_view(alone.letter, alone.count).find(c) == std::string_view::npos) left[count++] = c;
    const std::string_view present(left.data(), count);
    Shape<static_cast<int>(Rank)> order{};
    std::array<Index, 3> sizes{1, 1, 1};
    std::size_t at = 0, part = 0;
    for (const auto* letters : {&plan.both, &second, &third}) {
      for (std::size_t i = 0; i < letters->count; ++i) {
        order[at++] = static_cast<Index>(present.find(letters->letter[i]));
        sizes[part] *= size[static_cast<std::size_t>(letters->letter[i])] - 1;
      }
      ++part;
    }
    return reshape(permute(kept, order), sizes);
  };
  const auto left = arrange.template operator()<both + free_a + summed, plan.a_alone.count>(a, plan.a, plan.a_alone,
                                                                                            plan.of_a, plan.summed);
  const auto right = arrange.template operator()<both + free_b + summed, plan.b_alone.count>(b, plan.b, plan.b_alone,
                                                                                             plan.summed, plan.of_b);
  std::array<char, both + free_a + free_b + 1> made{};
  Shape<static_cast<int>(both + free_a + free_b)> shape{}, order{};
  std::size_t at = 0;
  for (const auto* letters : {&plan.both, &plan.of_a, &plan.of_b})
    for (std::size_t i = 0; i < letters->count; ++i) {
      made[at] = letters->letter[i];
      shape[at++] = size[static_cast<std::size_t>(letters->letter[i])] - 1;
    }
  for (std::size_t i = 0; i < plan.out.size(); ++i)
    order[i] = static_cast<Index>(std::string_view(made.data(), at).find(plan.out[i]));
  return permute(reshape(matmul(left, right), shape), order);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_EINSUM_HPP

// <chorus/ops/embedding.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_EMBEDDING_HPP
#define CHORUS_SINGLE_CHORUS_OPS_EMBEDDING_HPP
/// Embedding with an entry that stands for "nothing".

namespace chorus {

/// The same as embedding(weight, index), but entry `padding_index` gets no gradient. Throws UsageError where there is
/// no such entry.
template <Operand W, int Rank, class D>
auto embedding(const W& weight, const Tensor<std::int64_t, Rank, D>& index, Index padding_index) {
  check<UsageError>(padding_index >= 0 && padding_index < value_of(weight).size(0), "embedding: padding_index ",
                    padding_index, " is not in [0, ", value_of(weight).size(0), ")");
  const auto rows = embedding(weight, index);
  Shape<Rank + 1> shape{};
  std::copy(index.shape().begin(), index.shape().end(), shape.begin());
  shape.back() = 1;
  auto host = Tensor<bool, Rank + 1, Cpu>::empty(shape);
  const auto indices = contiguous(index).to_vector();
  for (std::size_t i = 0; i < indices.size(); ++i) host.data()[i] = indices[i] == padding_index;
  const auto padding =
      Tensor<bool, Rank + 1, D>::from(std::span<const bool>(host.data(), indices.size()), shape, index.device());
  return where(padding, value_of(rows), rows);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_EMBEDDING_HPP

// <chorus/ops/higher_order.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_HPP
#define CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_HPP
/// Gradients of gradients. Where a computation begins with GraphVariables, every result is one, and `grad` with
/// `create_graph` gives gradients that are recorded in turn:
///
///   const ch::GraphVariable x(images, true);
///   const auto dx = ch::grad(sum(critic(x)), x, {.create_graph = true});
///   const auto norm = ch::sqrt(ch::sum(ch::square(ch::flatten(dx)), 1) + 1e-12);
///   ch::mean(ch::square(norm - 1)).backward();  // into the critic's parameters
///
/// Under a policy this stands in the model's `forward`, or around the call of the policy, whose outputs are
/// GraphVariables where an input is one.
///
/// How it works: GraphVariable is a type of its own, so that Variables pay nothing. `record` is overloaded for it and
/// makes nodes that, beside their backward function, keep the operation and its inputs. `grad` walks them and calls
/// `derivatives(operation, dy, y, inputs...)`, which stands here for each operation, once, in terms of other
/// operations. Those run on GraphVariables, so their results are on the tape. An element-wise functor's gradient is a
/// functor itself; its own gradient comes from Dual numbers of Dual numbers.
///
/// Derivatives of the second order exist for element-wise functions, matrix products, convolutions, pooling,
/// normalisation, reductions, softmax, cross entropy, dropout, and what changes shapes or picks elements; higher orders
/// where only products, sums and exp are met. Else `grad` throws a UsageError that names the operation.

// <chorus/ops/higher_order/convolution.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_CONVOLUTION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_CONVOLUTION_HPP
/// Derivatives of convolutions, recorded. conv2d and its two gradients are three faces of one form that is linear in
/// each of image, weight and result, so that every derivative of one is another of them.

// <chorus/ops/higher_order/reduction.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_REDUCTION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_REDUCTION_HPP
/// Derivatives of matrix products, reductions, softmax and losses over classes, recorded.

// <chorus/ops/higher_order/pointwise.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_POINTWISE_HPP
#define CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_POINTWISE_HPP
/// Derivatives of element-wise functions, recorded: Dual numbers of Dual numbers. And of what changes shapes.

// <chorus/ops/higher_order/graph_variable.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_GRAPH_VARIABLE_HPP
#define CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_GRAPH_VARIABLE_HPP
/// GraphVariable: a Variable whose gradients are recorded as it is, so that gradients can be taken through gradients.

namespace chorus {

/// What an operation makes of a GraphVariable and whatever else is a GraphVariable. It is a Variable too: `backward`
/// adds to leaves, in Tensors, as ever.
template <Real T, int Rank, Device D = Cpu>
class GraphVariable : public Variable<T, Rank, D> {
 public:
  GraphVariable() = default;
  /// A leaf, or with `requires_grad` unset a constant that begins a recorded computation.
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

/// The gradients of one call of `grad`, by node, while it runs.
class GraphGradients {
 public:
  explicit GraphGradients(const GradPath& path) : path_(path) {}

  template <class T, int Rank, class D>
  void add(const GradNode<T, Rank, D>& node, const GraphVariable<T, Rank, D>& gradient) {
    if (!gradient.value().defined()) return;  // a user's own function may give none
    check(gradient.shape() == node.shape(), "grad: a gradient of shape ", gradient.shape(), " for a value of shape ",
          node.shape(), " that '", node.operation(), "' made: this is a bug");
    auto& place = gradients_[&node];
    if (!place)
      place = std::make_shared<GraphVariable<T, Rank, D>>(gradient);
    else
      place = std::make_shared<GraphVariable<T, Rank, D>>(of(node) + gradient);
  }
  /// Undefined where there is none.
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

/// A node that can send its gradient to its inputs by operations that are recorded themselves.
class GraphNode {
 public:
  virtual void graph_backward(GraphGradients& gradients) = 0;

 protected:
  ~GraphNode() = default;
};

template <class Operation, class Backward, class T, int Rank, class D, class... Inputs>
class GraphOperation final : public OperationNode<Backward, T, Rank, D, Inputs...>, public GraphNode {
 public:
  GraphOperation(Operation operation, const Tensor<T, Rank, D>& value, Backward backward,
                 typename GraphVariableOf<Inputs>::type... inputs)
      : OperationNode<Backward, T, Rank, D, Inputs...>(operation_name(operation), value, std::move(backward),
                                                       inputs.node()...),
        numbers_(detail::Saved(inputs.value())...),
        saved_(std::in_place, Saved{std::move(operation), value, {std::move(inputs)...}}) {}

  void backward(bool keep) override {
    OperationNode<Backward, T, Rank, D, Inputs...>::backward(keep);
    if (!keep) saved_.reset();
  }

  void graph_backward(GraphGradients& gradients) override {
    check<UsageError>(saved_.has_value(), "grad: the graph behind '", this->operation(),
                      "' was freed by an earlier backward; pass retain_graph = true to that one");
    const auto dy = gradients.of(*this);
    if (!dy.value().defined()) return;
    if constexpr (!requires { requires Operation::linear; })
      std::apply([&](const auto&... x) { (x.read(this->operation()), ...); }, numbers_);
    const GraphVariable<T, Rank, D> y(saved_->value, Ref<GradNode<T, Rank, D>>(this));
    std::apply([&](const auto&... x) { send(gradients, dy, y, x...); }, saved_->inputs);
  }

 private:
  template <class Value, class... Xs>
  void send(GraphGradients& gradients, const Value& dy, const Value& y, const Xs&... x) const {
    if constexpr (HasDerivatives<Operation, Value, Value, Xs...>) {
      const auto rules = derivatives(saved_->operation, dy, y, x...);
      std::apply([&](const auto&... rule) { (give(gradients, rule, x), ...); }, rules);
    } else {
      fail<UsageError>("grad: create_graph: '", this->operation(), "' has no derivative of this order");
    }
  }
  template <class Rule, class X>
  static void give(GraphGradients& gradients, const Rule& rule, const X& input) {
    if (gradients.wants(input.node().get())) gradients.add(*input.node(), rule());
  }

  struct Saved {
    Operation operation;
    Tensor<T, Rank, D> value;
    std::tuple<typename GraphVariableOf<Inputs>::type...> inputs;
  };
  std::tuple<detail::Saved<typename GraphVariableOf<Inputs>::type::tensor_type>...> numbers_;  // seen unchanged
  std::optional<Saved> saved_;
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
  Ref<GradNode<T, Rank, D>> node(new Made(std::move(operation), value, std::move(backward), inputs...));
  return GraphVariable(std::move(value), std::move(node));
}

}  // namespace detail

/// What `record` does where one of the inputs is a GraphVariable: the result is one. Its node can also send its
/// gradient on by recorded operations, if there is a `derivatives(operation, dy, y, inputs...)`: all GraphVariables ->
/// a tuple of functions, one for each input, that give the gradient by it.
template <class Operation, class T, int Rank, class D, class Backward, Operand... Inputs>
auto record_graph(Operation operation, Tensor<T, Rank, D> value, Backward backward, const Inputs&... inputs) {
  if (!grad_enabled()) return GraphVariable<T, Rank, D>(std::move(value));
  return detail::make_graph_operation(std::move(operation), std::move(value), std::move(backward),
                                      detail::as_graph(inputs)...);
}

/// A user's backward function that takes GraphVariables, too, is what it is in Tensors: computed once for all inputs.
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
                      "' was recorded by plain Variables; let the computation begin with GraphVariables");
    graph_node->graph_backward(gradients);
    if (!path.is_input(*node)) gradients.forget(*node);
  }
  return std::tuple{gradients.of(*nodes)...};
}

}  // namespace detail

/// The gradients of a scalar by a tuple of inputs, as for Variables (see <chorus/autograd/grad.hpp>), as
/// GraphVariables: with `create_graph` recorded ones. Throws UsageError, which names the operation, where one on the
/// way has no second derivative.
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
/// The same by one input.
template <class T, class D, AnyVariable X>
auto grad(const GraphVariable<T, 0, D>& value, const X& input, const GradOptions& options = {}) {
  return std::get<0>(grad(value, std::tie(input), options));
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_GRAPH_VARIABLE_HPP

namespace chorus {

namespace functors {
/// dy * df/dx_I (x...)
template <class F, int I>
struct PartialDerivative {
  F f;
  template <class S, class... X>
  CHORUS_HD S operator()(const S& dy, const X&... x) const {
    return math::gradient(f, dy, x...).d[I];
  }
};
}  // namespace functors

namespace operations {
struct SumTo {
  static constexpr const char* name = "sum_to";
};
struct PutSlice {
  static constexpr const char* name = "put_slice";
  Index axis, start, count;
};
}  // namespace operations

namespace detail {

template <class F>
inline constexpr bool is_derivative = false;
template <class F, int I>
inline constexpr bool is_derivative<functors::PartialDerivative<F, I>> = true;

/// Sums x over the axes that `expand` to x's shape would repeat: expand's transpose.
template <Operand X, std::size_t Rank>
auto sum_to(const X& x, const std::array<Index, Rank>& shape) {
  using T = typename tensor_of<X>::value_type;
  const auto input = contiguous(value_of(x));
  auto out = Tensor<T, static_cast<int>(Rank), typename tensor_of<X>::device_type>::zeros(shape, input.device());
  kernels::scatter_strided(input.device(), input.shape(), input.data(), out.data(), out.expand(input.shape()).strides(),
                           true);
  return record(
      operations::SumTo{}, std::move(out),
      [whole = input.shape()](const auto& dy, auto dx) { dx->add(contiguous(dy.expand(whole))); }, x);
}

/// x as a slice of zeros of another shape: slice's transpose.
template <Operand X>
auto put_slice(const X& x, const Shape<tensor_of<X>::rank>& shape, Index axis, Index start) {
  const auto input = contiguous(value_of(x));
  const Index count = input.size(axis);
  const auto whole = around_axis(shape, normalize_axis("put_slice", axis, tensor_of<X>::rank));
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::pad_block(input.device(), whole, start, count, input.data(), out.data());
  return record(
      operations::PutSlice{axis, start, count}, std::move(out),
      [axis, start, count](const auto& dy, auto dx) { dx->add(contiguous(dy.slice(axis, start, start + count))); }, x);
}

}  // namespace detail

template <class F, class Dy, class Y, class... Xs>
requires(!detail::is_derivative<F>) auto derivatives(const operations::Pointwise<F>& operation, const Dy& dy, const Y&,
                                                     const Xs&... x) {
  const auto by = [&]<int I>(std::integral_constant<int, I>) {
    return [&operation, &dy, &x...] {
      const functors::PartialDerivative<F, I> derivative{operation.f};
      return detail::sum_to(detail::pointwise(operation.name, derivative, dy, x...),
                            std::get<I>(std::tie(x...)).shape());
    };
  };
  return [&]<int... I>(std::integer_sequence<int, I...>) { return std::tuple{by(std::integral_constant<int, I>{})...}; }
  (std::make_integer_sequence<int, static_cast<int>(sizeof...(Xs))>());
}

// Those of which any order is easy to have.
template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Pointwise<functors::Add>&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return detail::sum_to(dy, a.shape()); }, [&] { return detail::sum_to(dy, b.shape()); }};
}
template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Pointwise<functors::Sub>&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return detail::sum_to(dy, a.shape()); }, [&] { return detail::sum_to(-dy, b.shape()); }};
}
template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Pointwise<functors::Mul>&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return detail::sum_to(dy * b, a.shape()); },
                    [&] { return detail::sum_to(dy * a, b.shape()); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::Neg>&, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return -dy; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::AddScalar>&, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return dy; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::MulScalar>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return dy * operation.f.value; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::DivScalar>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return dy / operation.f.value; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::Square>&, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return dy * x * 2; }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pointwise<functors::Exp>&, const Dy& dy, const Y& y, const X&) {
  return std::tuple{[&] { return dy * y; }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::SumTo&, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return expand(dy, x.shape()); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Expand&, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::sum_to(dy, x.shape()); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Cast&, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return to<typename tensor_of<X>::value_type>(dy); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Reshape&, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return reshape(dy, x.shape()); }};
}
template <int Rank, class Dy, class Y, class X>
auto derivatives(const operations::Permute<Rank>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return permute(dy, operation.inverse); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Slice& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::put_slice(dy, x.shape(), operation.axis, operation.start); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::PutSlice& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return slice(dy, operation.axis, operation.start, operation.start + operation.count); }};
}
template <class Dy, class Y, class... Xs>
auto derivatives(const operations::Concat& operation, const Dy& dy, const Y&, const Xs&... x) {
  Index end = 0;
  const auto part = [&](const auto& input) {
    end += input.size(operation.axis);
    return [&dy, axis = operation.axis, start = end - input.size(operation.axis), stop = end] {
      return slice(dy, axis, start, stop);
    };
  };
  return std::tuple{part(x)...};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Pad2d& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    const auto& [left, right, top, bottom] = operation.padding;
    return slice(slice(dy, -2, top, top + x.size(-2)), -1, left, left + x.size(-1));
  }};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_POINTWISE_HPP

namespace chorus {

namespace detail {
// A gradient by a reduced value, repeated along the axis that was reduced.
template <class Dy, class X>
auto repeated(const Dy& dy, Index axis, const X& x) {
  auto shape = x.shape();
  shape[normalize_axis("reduction", axis, tensor_of<X>::rank)] = 1;
  return expand(reshape(dy, shape), x.shape());
}
}  // namespace detail

template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Matmul&, const Dy& dy, const Y&, const A& a, const B& b) {
  return std::tuple{[&] { return matmul(dy, transpose(b, -2, -1)); }, [&] { return matmul(transpose(a, -2, -1), dy); }};
}

template <class Dy, class Y, class X, class W, class B>
auto derivatives(const operations::Linear&, const Dy& dy, const Y&, const X& x, const W& weight, const B&) {
  const auto rows = [](const auto& operand, Index features) {
    return reshape(operand, Shape<2>{operand.numel() / std::max(features, Index{1}), features});
  };
  const Index out = weight.size(0), in = weight.size(1);
  return std::tuple{[&, rows, out] { return reshape(matmul(rows(dy, out), weight), x.shape()); },
                    [&, rows, out, in] { return matmul(transpose(rows(dy, out), 0, 1), rows(x, in)); },
                    [&, rows, out] { return sum(rows(dy, out), 0); }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::Sum& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::repeated(dy, operation.axis, x); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Mean& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::repeated(dy / x.size(operation.axis), operation.axis, x); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Var& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    const auto factor = dy * (2.0 / static_cast<double>(x.size(operation.axis) - operation.correction));
    return detail::repeated(factor, operation.axis, x) * (x - mean(x, operation.axis, keep_axis));
  }};
}

namespace detail {
// Each element's share of the gradient: where the extremes lie does not change with x, almost everywhere.
template <class Dy, class Y, class X, class Kernel>
auto extreme_derivative(Index axis, const Dy& dy, const Y& y, const X& x, Kernel backward) {
  const auto input = contiguous(x.value());
  const auto view = around_axis(input.shape(), normalize_axis("amax", axis, tensor_of<X>::rank));
  const auto ones = tensor_of<Y>::full(y.shape(), 1, y.device());
  auto share = tensor_of<X>::empty(input.shape(), input.device());
  backward(input.device(), view, input.data(), y.value().data(), ones.data(), share.data());
  return repeated(dy, axis, x) * share;
}
}  // namespace detail

template <class Dy, class Y, class X>
auto derivatives(const operations::Amax& operation, const Dy& dy, const Y& y, const X& x) {
  return std::tuple{[&] {
    return detail::extreme_derivative(
        operation.axis, dy, y, x,
        [](auto device, auto view, const auto* in, const auto* out, const auto* ones, auto* share) {
          kernels::amax_backward(device, view, in, out, ones, share, false);
        });
  }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::Amin& operation, const Dy& dy, const Y& y, const X& x) {
  return std::tuple{[&] {
    return detail::extreme_derivative(
        operation.axis, dy, y, x,
        [](auto device, auto view, const auto* in, const auto* out, const auto* ones, auto* share) {
          kernels::amin_backward(device, view, in, out, ones, share, false);
        });
  }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::Softmax& operation, const Dy& dy, const Y& y, const X&) {
  return std::tuple{[&] { return y * (dy - sum(dy * y, operation.axis, keep_axis)); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::LogSoftmax& operation, const Dy& dy, const Y& y, const X&) {
  return std::tuple{[&] { return dy - exp(y) * sum(dy, operation.axis, keep_axis); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::LogSumExp& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::repeated(dy, operation.axis, x) * softmax(x, operation.axis); }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::CumulativeSum& operation, const Dy& dy, const Y&, const X&) {
  // The sum of the elements from i on.
  return std::tuple{[&] { return sum(dy, operation.axis, keep_axis) - cumsum(dy, operation.axis) + dy; }};
}

namespace detail {
/// The gradient of nll_loss by the log probabilities, for a gradient of 1 by each sample's loss, or by the reduced one.
template <class X, class D>
auto label_gradient(const X& scores, const Tensor<std::int64_t, 1, D>& labels, std::int64_t ignore_index,
                    Reduction reduction) {
  using T = typename tensor_of<X>::value_type;
  if (reduction == Reduction::none) reduction = Reduction::sum;
  const auto one = Tensor<T, 0, D>::full({}, T{1}, scores.device());
  auto gradient = tensor_of<X>::empty(scores.shape(), scores.device());
  kernels::nll_loss_backward(scores.device(), scores.size(0), scores.size(1), labels.data(), {ignore_index, reduction},
                             one.data(), gradient.data(), false);
  return gradient;
}

// A gradient by the loss, or by each sample's, beside [batch, classes].
template <class Dy>
auto beside_scores(const Dy& dy) {
  if constexpr (tensor_of<Dy>::rank == 0)
    return dy;
  else
    return reshape(dy, Shape<2>{dy.numel(), 1});
}
}  // namespace detail

template <class D, class Dy, class Y, class X>
auto derivatives(const operations::NllLoss<D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    const auto& options = operation.options;
    return detail::beside_scores(dy) *
           detail::label_gradient(x, operation.labels, options.ignore_index, options.reduction);
  }};
}
template <class D, class Dy, class Y, class X>
auto derivatives(const operations::CrossEntropy<D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    const auto& options = operation.options;
    const double smoothing = options.label_smoothing;
    const auto sharp = detail::label_gradient(x, operation.labels, options.ignore_index, options.reduction);
    const auto weight = -sum(sharp, 1, keep_axis);  // of each sample: 0 where it is ignored
    const auto targets = (1 - smoothing) * sharp - weight * (smoothing / static_cast<double>(x.size(1)));
    return detail::beside_scores(dy) * (softmax(x, 1) * weight + targets);
  }};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_REDUCTION_HPP

namespace chorus {

namespace operations {
struct Conv2dWeightGradient {
  static constexpr const char* name = "conv2d_weight_gradient";
  kernels::Conv2dShape shape;
};
}  // namespace operations

namespace detail {

// The three faces, by the shape of the convolution. x: [batch, in, height, width], y: [batch, out, out_h, out_w].

template <class X, class W>
auto conv2d_by_shape(const X& x, const W& weight, const kernels::Conv2dShape& s) {
  using Row = Tensor<typename X::value_type, 1, typename X::device_type>;
  return conv2d(x, weight, Row{},
                {.stride = {s.stride_h, s.stride_w},
                 .padding = {s.padding_h, s.padding_w},
                 .dilation = {s.dilation_h, s.dilation_w},
                 .groups = s.groups});
}

template <class Y, class W>
auto conv2d_input_gradient(const Y& y, const W& weight, const kernels::Conv2dShape& s) {
  const auto missing = [](Index size, Index out, Index stride, Index padding, Index dilation, Index kernel) {
    return size - ((out - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1);
  };
  return conv_transpose2d(
      y, weight,
      {.stride = {s.stride_h, s.stride_w},
       .padding = {s.padding_h, s.padding_w},
       .output_padding = {missing(s.height, s.out_height(), s.stride_h, s.padding_h, s.dilation_h, s.kernel_h),
                          missing(s.width, s.out_width(), s.stride_w, s.padding_w, s.dilation_w, s.kernel_w)},
       .dilation = {s.dilation_h, s.dilation_w},
       .groups = s.groups});
}

template <class X, class Y>
auto conv2d_weight_gradient(const X& x, const Y& y, const kernels::Conv2dShape& shape) {
  using T = typename X::value_type;
  const auto image = contiguous(x.value());
  const auto result = contiguous(y.value());
  const auto device = image.device();
  auto out = tensor_of<X>::empty({shape.out_channels, shape.in_channels / shape.groups, shape.kernel_h, shape.kernel_w},
                                 device);
  kernels::conv2d_backward_weight(device, shape, image.data(), result.data(), out.data(), false);
  return record(
      operations::Conv2dWeightGradient{shape}, std::move(out),
      [image = Saved(image), result = Saved(result), shape, device](const auto& dw, auto dx, auto dy) {
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          kernels::conv2d_backward_input(device, shape, dw.data(), result.read("conv2d").data(), grad.data(),
                                         accumulate);
        }
        if (dy) {
          auto grad = tensor_of<Y>::empty(result.tensor().shape(), device);
          kernels::conv2d_forward(device, shape, image.read("conv2d").data(), dw.data(), static_cast<const T*>(nullptr),
                                  grad.data());
          dy->add(grad);
        }
      },
      x, y);
}

}  // namespace detail

template <class Dy, class Y, class X, class W, class B>
auto derivatives(const operations::Conv2d& operation, const Dy& dy, const Y&, const X& x, const W& weight, const B&) {
  return std::tuple{[&] { return detail::conv2d_input_gradient(dy, weight, operation.shape); },
                    [&] { return detail::conv2d_weight_gradient(x, dy, operation.shape); },
                    [&] { return sum(sum(flatten<2>(dy), 2), 0); }};
}

// Here the convolution's result is the input, and the other way round.
template <class Dy, class Y, class X, class W>
auto derivatives(const operations::ConvTranspose2d& operation, const Dy& dy, const Y&, const X& x, const W& weight) {
  return std::tuple{[&] { return detail::conv2d_by_shape(dy, weight, operation.shape); },
                    [&] { return detail::conv2d_weight_gradient(dy, x, operation.shape); }};
}

template <class Dw, class W, class X, class Y>
auto derivatives(const operations::Conv2dWeightGradient& operation, const Dw& dw, const W&, const X& x, const Y& y) {
  return std::tuple{[&] { return detail::conv2d_input_gradient(y, dw, operation.shape); },
                    [&] { return detail::conv2d_by_shape(x, dw, operation.shape); }};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_CONVOLUTION_HPP

// <chorus/ops/higher_order/normalization.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_NORMALIZATION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_NORMALIZATION_HPP
/// Derivatives of layer and batch normalisation, recorded: the formulas of their kernels, by operations.

namespace chorus {

namespace detail {

// x: [rows, columns], normalised in each row, and 1 / deviation of each row.
template <class X>
auto normalized_rows(const X& x, double eps) {
  const auto centred = x - mean(x, 1, keep_axis);
  const auto inverse = rsqrt(mean(square(centred), 1, keep_axis) + eps);
  return std::pair(centred * inverse, inverse);
}

// The gradient by x where `dn` is that by what `normalized_rows` made of it.
template <class Dn, class N, class I>
auto unnormalized_rows(const Dn& dn, const N& normalized, const I& inverse) {
  return (dn - mean(dn, 1, keep_axis) - normalized * mean(dn * normalized, 1, keep_axis)) * inverse;
}

// [batch, channels, ...] as [channels, batch * inner], and back.
template <class X>
auto channels_first(const X& x) {
  const Index batch = x.size(0), channels = x.size(1);
  const Index inner = x.numel() / std::max(batch * channels, Index{1});
  return reshape(permute(reshape(x, Shape<3>{batch, channels, inner}), Shape<3>{1, 0, 2}),
                 Shape<2>{channels, batch * inner});
}
template <class X, std::size_t Rank>
auto batch_first(const X& x, const std::array<Index, Rank>& shape) {
  const Index inner = numel(shape) / std::max(shape[0] * shape[1], Index{1});
  return reshape(permute(reshape(x, Shape<3>{shape[1], shape[0], inner}), Shape<3>{1, 0, 2}), shape);
}

}  // namespace detail

template <class Dy, class Y, class X, class W, class B>
auto derivatives(const operations::LayerNorm& operation, const Dy& dy, const Y&, const X& x, const W& weight,
                 const B& bias) {
  const auto rows = [shape = Shape<2>{operation.rows, operation.columns}](const auto& operand) {
    return reshape(operand, shape);
  };
  const auto row = [columns = operation.columns](const auto& operand) { return reshape(operand, Shape<1>{columns}); };
  return std::tuple{[&, rows, row] {
                      const auto [normalized, inverse] = detail::normalized_rows(rows(x), operation.eps);
                      auto dn = rows(dy);
                      if (weight.value().defined()) dn = dn * row(weight);
                      return reshape(detail::unnormalized_rows(dn, normalized, inverse), x.shape());
                    },
                    [&, rows] {
                      const auto [normalized, inverse] = detail::normalized_rows(rows(x), operation.eps);
                      return reshape(sum(rows(dy) * normalized, 0), weight.shape());
                    },
                    [&, rows] { return reshape(sum(rows(dy), 0), bias.shape()); }};
}

template <class T, class D, class Dy, class Y, class X, class W, class B>
auto derivatives(const operations::BatchNorm<T, D>& operation, const Dy& dy, const Y&, const X& x, const W& weight,
                 const B&) {
  // What normalises: the batch's own statistics, or constants.
  const auto statistics = [&operation, &x] {
    if (operation.training) return detail::normalized_rows(detail::channels_first(x), operation.eps);
    const Shape<2> column{x.size(1), 1};
    const auto inverse = GraphVariable(rsqrt(reshape(operation.running_var, column) + operation.eps));
    return std::pair((detail::channels_first(x) - reshape(operation.running_mean, column)) * inverse, inverse);
  };
  return std::tuple{[&, statistics] {
                      const auto [normalized, inverse] = statistics();
                      auto dn = detail::channels_first(dy);
                      if (weight.value().defined()) dn = dn * reshape(weight, Shape<2>{x.size(1), 1});
                      const auto dx =
                          operation.training ? detail::unnormalized_rows(dn, normalized, inverse) : dn * inverse;
                      return detail::batch_first(dx, x.shape());
                    },
                    [&, statistics] { return sum(detail::channels_first(dy) * statistics().first, 1); },
                    [&] { return sum(detail::channels_first(dy), 1); }};
}

template <class T, class D, class Dy, class Y, class X, class W, class B, class... R>
auto derivatives(const operations::BatchNormRelu<T, D>& operation, const Dy& dy, const Y& y, const X& x,
                 const W& weight, const B& bias, const R&...) {
  const auto masked = [&] {
    const auto& result = y.value();
    const auto ones = tensor_of<Y>::full(result.shape(), T{1}, result.device());
    return dy * detail::pointwise("relu", functors::PartialDerivative<functors::Relu, 0>{}, ones, result);
  };
  const auto rule = [&, masked]<int I>(std::integral_constant<int, I>) {
    return [&, masked] {
      const auto gradient = masked();
      const operations::BatchNorm<T, D>& norm = operation;
      return std::get<I>(derivatives(norm, gradient, y, x, weight, bias))();
    };
  };
  using std::integral_constant;
  return std::tuple_cat(std::tuple{rule(integral_constant<int, 0>{}), rule(integral_constant<int, 1>{}),
                                   rule(integral_constant<int, 2>{})},
                        std::tuple{(static_cast<void>(sizeof(R)), masked)...});
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_NORMALIZATION_HPP

// <chorus/ops/higher_order/picking.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_PICKING_HPP
#define CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_PICKING_HPP
/// Derivatives of what picks elements, recorded: index_select, gather, pooling, dropout. All are linear.

namespace chorus {

namespace operations {
template <class D>
struct IndexAdd {
  static constexpr const char* name = "index_add";
  Tensor<std::int64_t, 1, D> index;
  std::size_t axis;
};
template <int Rank, class D>
struct ScatterAdd {
  static constexpr const char* name = "scatter_add";
  Tensor<std::int64_t, Rank, D> index;
  std::size_t axis;
};
struct AvgUnpool2d {
  static constexpr const char* name = "avg_unpool2d";
  kernels::Pool2dShape shape;
};
}  // namespace operations

namespace detail {

/// index_select's transpose: entry i of x is added to entry `index[i]` of zeros of the shape.
template <Operand X, class D>
auto index_add(const X& x, const Shape<tensor_of<X>::rank>& shape, std::size_t axis,
               const Tensor<std::int64_t, 1, D>& index) {
  const auto input = contiguous(value_of(x));
  const auto whole = around_axis(shape, axis);
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::index_select_backward(input.device(), whole, index.numel(), index.data(), input.data(), out.data(), false);
  return record(
      operations::IndexAdd<D>{index, axis}, std::move(out),
      [index, whole, of = input.shape()](const auto& dy, auto dx) {
        auto grad = tensor_of<X>::empty(of, dy.device());
        kernels::index_select(dy.device(), whole, index.numel(), index.data(), dy.data(), grad.data());
        dx->add(grad);
      },
      x);
}

/// gather's transpose.
template <Operand X, int Rank, class D>
auto scatter_add(const X& x, const Shape<Rank>& shape, std::size_t axis, const Tensor<std::int64_t, Rank, D>& index) {
  const auto input = contiguous(value_of(x));
  const auto whole = around_axis(shape, axis);
  const Index count = index.shape()[axis];
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::gather_backward(input.device(), whole, count, index.data(), input.data(), out.data(), false);
  return record(
      operations::ScatterAdd<Rank, D>{index, axis}, std::move(out),
      [index, whole, count, of = input.shape()](const auto& dy, auto dx) {
        auto grad = tensor_of<X>::empty(of, dy.device());
        kernels::gather(dy.device(), whole, count, index.data(), dy.data(), grad.data());
        dx->add(grad);
      },
      x);
}

/// avg_pool2d's transpose.
template <Operand X>
auto avg_unpool2d(const X& x, const Shape<4>& shape, const kernels::Pool2dShape& pool) {
  const auto input = contiguous(value_of(x));
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::avg_pool2d_backward(input.device(), pool, input.data(), out.data(), false);
  return record(
      operations::AvgUnpool2d{pool}, std::move(out),
      [pool, of = input.shape()](const auto& dy, auto dx) {
        auto grad = tensor_of<X>::empty(of, dy.device());
        kernels::avg_pool2d_forward(dy.device(), pool, dy.data(), grad.data());
        dx->add(grad);
      },
      x);
}

/// Multiplies by the factors, 0 or 1 / (1 - p), that an earlier dropout had.
template <Operand X>
auto dropout_again(const X& x, const operations::Dropout& operation) {
  const auto input = contiguous(value_of(x));
  const Index samples = input.size(0), inner = samples == 0 ? 0 : input.numel() / samples;
  auto out = tensor_of<X>::empty(input.shape(), input.device());
  kernels::dropout_forward(input.device(), samples, inner, input.data(), out.data(), operation.p, operation.key);
  return record(
      operation, std::move(out),
      [samples, inner, operation](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::dropout_backward(dy.device(), samples, inner, dy.data(), grad.data(), operation.p, operation.key,
                                  accumulate);
      },
      x);
}

}  // namespace detail

template <class D, class Dy, class Y, class X>
auto derivatives(const operations::IndexSelect<D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::index_add(dy, x.shape(), operation.axis, operation.index); }};
}
template <class D, class Dy, class Y, class X>
auto derivatives(const operations::IndexAdd<D>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return index_select(dy, static_cast<Index>(operation.axis), operation.index); }};
}
template <int Rank, class D, class Dy, class Y, class X>
auto derivatives(const operations::Gather<Rank, D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::scatter_add(dy, x.shape(), operation.axis, operation.index); }};
}
template <int Rank, class D, class Dy, class Y, class X>
auto derivatives(const operations::ScatterAdd<Rank, D>& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return detail::gather_along(dy, operation.axis, operation.index); }};
}

template <class D, class Dy, class Y, class X>
auto derivatives(const operations::MaxPool2d<D>& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] {
    // In each plane the elements that were the largest of their windows, by number.
    const auto& [batch, channels, height, width] = x.shape();
    const Shape<3> picked{batch, channels, operation.argmax.size(2) * operation.argmax.size(3)};
    auto index = Tensor<std::int64_t, 3, D>::empty(picked, x.device());
    kernels::convert(x.device(), index.numel(), operation.argmax.data(), index.data());
    return reshape(
        detail::scatter_add(reshape(dy, picked), Shape<3>{batch, channels, height * width}, std::size_t{2}, index),
        x.shape());
  }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::AvgPool2d& operation, const Dy& dy, const Y&, const X& x) {
  return std::tuple{[&] { return detail::avg_unpool2d(dy, x.shape(), operation.shape); }};
}
template <class Dy, class Y, class X>
auto derivatives(const operations::AvgUnpool2d& operation, const Dy& dy, const Y& y, const X&) {
  (void)y;
  return std::tuple{[&] { return detail::mean_of_windows(dy, operation.shape); }};
}

template <class Dy, class Y, class X>
auto derivatives(const operations::Dropout& operation, const Dy& dy, const Y&, const X&) {
  return std::tuple{[&] { return detail::dropout_again(dy, operation); }};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_PICKING_HPP

// <chorus/ops/higher_order/sync_batch_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_SYNC_BATCH_NORM_HPP
#define CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_SYNC_BATCH_NORM_HPP
/// Batch normalisation with the statistics of several devices or ranks, by operations that are recorded.

namespace chorus {

namespace detail {

// The sum over members of weight * own, by this member's weight.
template <class T, class D>
Tensor<T, 1, D> sum_over_members(BatchGroup& group, const Tensor<T, 1, D>& own, double weight) {
  const auto values = own.to_vector();
  std::vector<double> numbers(values.begin(), values.end());
  for (double& number : numbers) number *= weight;
  group.sum(numbers);
  std::vector<T> out;
  for (const double number : numbers) out.push_back(static_cast<T>(weight == 0 ? 0 : number / weight));
  return Tensor<T, 1, D>::from(out, own.shape(), own.device());
}

template <class T, class D>
GraphVariable<T, 1, D> group_sum(const GraphVariable<T, 1, D>& own, const std::shared_ptr<BatchGroup>& group);

/// The node of `group_sum`. Where all members go back through theirs at the same time, each to its own part, the
/// gradient by that is the members' gradients, added up in turn. Where one thread goes back through the graph of all
/// members' devices, each of their nodes leads to all parts.
template <class T, class D>
class GroupSumNode final : public GradNode<T, 1, D>, public GraphNode {
 public:
  using Part = GraphVariable<T, 1, D>;

  /// `parts`: those of all members, if they make one graph.
  GroupSumNode(const Part& own, std::vector<Part> parts, const std::shared_ptr<BatchGroup>& group)
      : GradNode<T, 1, D>("group_sum", own.shape(), own.device()),
        own_(own),
        parts_(std::move(parts)),
        group_(group),
        place_(group) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check_kept();
    auto dy = this->take_grad();
    if (together()) dy = sum_over_members(*group_, dy, group_->weight());
    for_each_part([&](const Part& part) {
      if (auto* node = unless_skipped(part.node().get()))
        node->add(on_device(dy, part.device(), trace::Traffic::control));
    });
    if (keep) return;
    own_ = {};
    parts_.clear();
  }
  void graph_backward(GraphGradients& gradients) override {
    check_kept();
    auto dy = gradients.of(*this);
    if (!dy.value().defined()) return;
    if (together()) dy = group_sum(dy, group_);
    for_each_part([&](const Part& part) {
      if (gradients.wants(part.node().get()))
        gradients.add(*part.node(), copy_recorded(dy, part.device(), trace::Traffic::control));
    });
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    for_each_part([&](const Part& part) {
      if (part.requires_grad()) visit(*part.node(), context);
    });
  }

 private:
  bool together() const { return parts_.empty() || place_.is_here(); }
  template <class F>
  void for_each_part(const F& f) const {
    if (together())
      f(own_);
    else
      for (const Part& part : parts_) f(part);
  }
  void check_kept() const {
    check<UsageError>(own_.value().defined(),
                      "backward: the graph behind 'group_sum' was freed by an earlier backward; ",
                      "pass retain_graph = true to that one");
  }

  Part own_;
  std::vector<Part> parts_;
  std::shared_ptr<BatchGroup> group_;
  PlaceInPass place_;
};

/// A number for the operation that each member records next: they grow with the members, whichever thread is faster, so
/// that whoever goes back through all of them adds up in one order.
inline std::uint64_t sequence_in_order(BatchGroup& group) {
  std::vector<std::uint64_t> numbers;
  for (const auto& given : group.exchange(Node::next_sequence()))
    numbers.push_back(given_by_member<std::uint64_t>(given));
  std::sort(numbers.begin(), numbers.end());
  return numbers[group.member()];
}

/// What all members of `group` have, added up, for each of them.
template <class T, class D>
GraphVariable<T, 1, D> group_sum(const GraphVariable<T, 1, D>& own, const std::shared_ptr<BatchGroup>& group) {
  std::vector<GraphVariable<T, 1, D>> parts;
  Tensor<T, 1, D> total;
  const auto all = group->recorded() ? group->exchange(own) : std::vector<std::any>();
  for (const auto& given : all) {
    parts.push_back(given_by_member<GraphVariable<T, 1, D>>(given));
    check<UsageError>(parts.back().shape() == own.shape(), different_layers);
    const auto near = on_device(parts.back().value(), own.device(), trace::Traffic::control);
    total = total.defined() ? total + near : near;
  }
  const auto sequence = all.empty() ? 0 : sequence_in_order(*group);
  if (all.empty()) total = sum_over_members(*group, own.value(), 1);
  if (!own.requires_grad() || !grad_enabled()) return GraphVariable(std::move(total));
  if (detects_anomalies()) [[unlikely]]
    check_finite("group_sum", total);
  Ref<GradNode<T, 1, D>> node(new GroupSumNode<T, D>(own, std::move(parts), group));
  if (!all.empty()) node->set_sequence(sequence);
  return GraphVariable(std::move(total), std::move(node));
}

}  // namespace detail

/// What `sync_batch_norm` makes of GraphVariables, `count` being the numbers a channel in the whole batch.
template <Operand X, Operand W, Operand B>
auto sync_batch_norm_graph(const X& x, const W& weight, const B& bias, double count,
                           const std::shared_ptr<BatchGroup>& group, double eps) {
  const auto column = [channels = x.size(1)](const auto& per_channel) {
    return reshape(per_channel, Shape<2>{channels, 1});
  };
  const auto mean = [&](const auto& rows) {
    return column(detail::group_sum(sum(rows, 1), group) / std::max(count, 1.0));
  };
  const auto rows = detail::channels_first(detail::as_graph(x));
  const auto centred = rows - mean(rows);
  auto y = centred * rsqrt(mean(square(centred)) + eps);
  if (value_of(weight).defined()) y = y * column(detail::as_graph(weight));
  if (value_of(bias).defined()) y = y + column(detail::as_graph(bias));
  return detail::batch_first(y, x.shape());
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_SYNC_BATCH_NORM_HPP

#endif  // CHORUS_SINGLE_CHORUS_OPS_HIGHER_ORDER_HPP

// <chorus/ops/more_losses.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_MORE_LOSSES_HPP
#define CHORUS_SINGLE_CHORUS_OPS_MORE_LOSSES_HPP
/// Losses of distances, rankings and distributions, with PyTorch's definitions. `NAME` is the mean (or sum) of what
/// `NAME_per_element` or `NAME_per_sample` keeps apart.

namespace chorus {

namespace functors {

/// max(0, margin - y (a - b)) for y = 1 or -1.
struct MarginRanking {
  double margin = 0;
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b, const S& y) const {
    const S loss = y * (b - a) + real_of<S>(margin);
    return where(loss <= 0, S(0), loss);
  }
  template <class S>
  CHORUS_HD Partials<S, 3> gradient(const S& dy, const S& a, const S& b, const S& y) const {
    const S counted = where(y * (b - a) + real_of<S>(margin) > 0, dy, S(0));
    return {{-(counted * y), counted * y, counted * (b - a)}};
  }
};

/// x for y = 1, max(0, margin - x) for y = -1.
struct HingeEmbedding {
  double margin = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& y) const {
    const S distance = real_of<S>(margin) - x;
    return where(y == 1, x, where(distance <= 0, S(0), distance));
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& y) const {
    return {{where(y == 1, dy, where(real_of<S>(margin) - x > 0, -dy, S(0))), S(0)}};
  }
};

/// log(1 + exp(-y x)).
struct SoftMargin {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& y) const {
    return softplus(-(y * x));
  }
};

/// 1 - cosine for y = 1, max(0, cosine - margin) for y = -1.
struct CosineEmbedding {
  double margin = 0;
  template <class S>
  CHORUS_HD S operator()(const S& cosine, const S& y) const {
    const S above = cosine - real_of<S>(margin);
    return where(y == 1, 1 - cosine, where(above <= 0, S(0), above));
  }
};

/// (log(var) + (x - target)² / var) / 2; variances below `eps` count as that, but get the gradient.
struct GaussianNll {
  double eps = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target, const S& var) const {
    const S d = x - target, safe = where(var < real_of<S>(eps), S(real_of<S>(eps)), var);
    return (log(safe) + d * d / safe) * real_of<S>(0.5);
  }
  template <class S>
  CHORUS_HD Partials<S, 3> gradient(const S& dy, const S& x, const S& target, const S& var) const {
    const S d = x - target, safe = where(var < real_of<S>(eps), S(real_of<S>(eps)), var);
    const S by_x = dy * d / safe;
    return {{by_x, -by_x, dy * (1 / safe - d * d / safe / safe) * real_of<S>(0.5)}};
  }
};

/// exp(x) - target x, x being the logarithm of the rate.
struct PoissonNllOfLog {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return exp(x) - target * x;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& target) const {
    return {{dy * (exp(x) - target), -(dy * x)}};
  }
};
/// x - target log(x + eps), x being the rate.
struct PoissonNll {
  double eps = 1e-8;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return x - target * log(x + real_of<S>(eps));
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& x, const S& target) const {
    const S rate = x + real_of<S>(eps);
    return {{dy * (1 - target / rate), -(dy * log(rate))}};
  }
};
/// Stirling's approximation of log(target!), for targets above 1.
struct Stirling {
  template <class S>
  CHORUS_HD S operator()(const S& target) const {
    using R = real_of<S>;
    const S safe = where(target > 1, target, S(1));
    return where(target > 1, safe * log(safe) - safe + log(safe * R(6.283185307179586)) * R(0.5), S(0));
  }
};

/// Binary cross entropy of a logit, the positive part weighted: (1 - t) x + (1 + (p - 1) t) log(1 + exp(-x)), where |x|
/// counts as in BinaryCrossEntropy.
struct WeightedBinaryCrossEntropy {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& t, const S& weight, const S& p) const {
    return weight * loss(x, t, p);
  }
  template <class S>
  CHORUS_HD Partials<S, 4> gradient(const S& dy, const S& x, const S& t, const S& weight, const S& p) const {
    const S scaled = dy * weight, size = abs(x), rest = log1p(exp(-size));
    const S by_t = where(x > 0, -size, size * p) + (p - 1) * rest;
    const S by_p = where(t == 0, S(0), t * softplus(-x));
    return {{scaled * ((1 - t) * sigmoid(x) - p * t * sigmoid(-x)), scaled * by_t, dy * loss(x, t, p), scaled * by_p}};
  }

 private:
  template <class S>
  CHORUS_HD static S loss(const S& x, const S& t, const S& p) {
    const S wrong = where(x > 0, 1 - t, p * t), size = abs(x);
    return where(wrong == 0, S(0), size * wrong) + (1 + (p - 1) * t) * log1p(exp(-size));
  }
};

}  // namespace functors

namespace detail {
template <Operand X>
auto reduce_losses(const char* operation, const X& losses, Reduction reduction) {
  check<UsageError>(reduction != Reduction::none, operation, ": for losses that are not reduced there is a function ",
                    operation, "_per_...");
  return mean_or_sum(losses, reduction);
}

// The Euclidean length of each row of x + eps: [batch, features] -> [batch].
template <Operand A, Operand B>
auto pair_distance(const A& a, const B& b, double eps) {
  return sqrt(sum(square(a - b + eps), -1));
}
}  // namespace detail

/// The cosine of the angle between a and b along an axis, which goes away. Lengths below `eps` count as `eps`.
template <Operand A, Operand B>
auto cosine_similarity(const A& a, const B& b, Index axis = 1, double eps = 1e-8) {
  // Each by itself, so that the product of two lengths need not be a number.
  const auto normalized = [&](const auto& x) { return x * rsqrt(clamp(sum(square(x), axis, keep_axis), eps * eps)); };
  return sum(normalized(a) * normalized(b), axis);
}

struct TripletOptions {
  double margin = 1;
  /// Added to each difference.
  double eps = 1e-6;
  /// The negative's distance is the smaller one of those to the anchor and to the positive (Balntas et al. 2016).
  bool swap = false;
  Reduction reduction = Reduction::mean;
};

/// anchor, positive, negative: [batch, features] -> max(0, |anchor - positive| - |anchor - negative| + margin) for each
/// sample, with Euclidean distances (Schroff et al. 2015): [batch].
template <Operand A, Operand P, Operand N>
auto triplet_margin_loss_per_sample(const A& anchor, const P& positive, const N& negative,
                                    const TripletOptions& options = {}) {
  const auto near = detail::pair_distance(anchor, positive, options.eps);
  auto far = detail::pair_distance(anchor, negative, options.eps);
  if (options.swap) far = minimum(far, detail::pair_distance(positive, negative, options.eps));
  return relu(near - far + options.margin);
}
template <Operand A, Operand P, Operand N>
auto triplet_margin_loss(const A& anchor, const P& positive, const N& negative, const TripletOptions& options = {}) {
  return detail::reduce_losses("triplet_margin_loss",
                               triplet_margin_loss_per_sample(anchor, positive, negative, options), options.reduction);
}

/// a, b: [batch, features], target: [batch] of 1 and -1 -> 1 - cosine, or max(0, cosine - margin): [batch].
template <Operand A, Operand B, Operand Y>
auto cosine_embedding_loss_per_sample(const A& a, const B& b, const Y& target, double margin = 0) {
  constexpr double eps = 1e-12;  // PyTorch's, added to the squares of lengths
  const auto scale = [](const auto& x) { return rsqrt(sum(square(x), -1) + eps); };
  return detail::pointwise("cosine_embedding_loss", functors::CosineEmbedding{margin},
                           sum(a * b, -1) * scale(a) * scale(b), target);
}
template <Operand A, Operand B, Operand Y>
auto cosine_embedding_loss(const A& a, const B& b, const Y& target, double margin = 0,
                           Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("cosine_embedding_loss", cosine_embedding_loss_per_sample(a, b, target, margin),
                               reduction);
}

/// max(0, margin - target (a - b)); target: 1 where a should rank higher, -1 where b should.
template <Operand A, Operand B, Operand Y>
auto margin_ranking_loss_per_element(const A& a, const B& b, const Y& target, double margin = 0) {
  return detail::pointwise("margin_ranking_loss", functors::MarginRanking{margin}, a, b, target);
}
template <Operand A, Operand B, Operand Y>
auto margin_ranking_loss(const A& a, const B& b, const Y& target, double margin = 0,
                         Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("margin_ranking_loss", margin_ranking_loss_per_element(a, b, target, margin), reduction);
}

/// x where the target is 1, max(0, margin - x) where it is -1.
template <Operand X, Operand Y>
auto hinge_embedding_loss_per_element(const X& x, const Y& target, double margin = 1) {
  return detail::pointwise("hinge_embedding_loss", functors::HingeEmbedding{margin}, x, target);
}
template <Operand X, Operand Y>
auto hinge_embedding_loss(const X& x, const Y& target, double margin = 1, Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("hinge_embedding_loss", hinge_embedding_loss_per_element(x, target, margin), reduction);
}

/// log(1 + exp(-target x)); target: 1 or -1.
template <Operand X, Operand Y>
auto soft_margin_loss_per_element(const X& x, const Y& target) {
  return detail::pointwise("soft_margin_loss", functors::SoftMargin{}, x, target);
}
template <Operand X, Operand Y>
auto soft_margin_loss(const X& x, const Y& target, Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("soft_margin_loss", soft_margin_loss_per_element(x, target), reduction);
}

struct GaussianNllOptions {
  /// Adds log(2 π) / 2.
  bool full = false;
  /// Variances below it count as `eps`, but get the gradient.
  double eps = 1e-6;
  Reduction reduction = Reduction::mean;
};

/// The negative logarithm of the density of N(x, var) at the target (Nix, Weigend 1994).
template <Operand X, Operand Y, Operand V>
auto gaussian_nll_loss_per_element(const X& x, const Y& target, const V& var, const GaussianNllOptions& options = {}) {
  return detail::pointwise("gaussian_nll_loss", functors::GaussianNll{options.eps}, x, target, var) +
         (options.full ? 0.91893853320467274 : 0);
}
template <Operand X, Operand Y, Operand V>
auto gaussian_nll_loss(const X& x, const Y& target, const V& var, const GaussianNllOptions& options = {}) {
  return detail::reduce_losses("gaussian_nll_loss", gaussian_nll_loss_per_element(x, target, var, options),
                               options.reduction);
}

struct PoissonNllOptions {
  /// Whether x is the logarithm of the rate or the rate itself.
  bool log_input = true;
  /// Adds Stirling's approximation of log(target!).
  bool full = false;
  double eps = 1e-8;
  Reduction reduction = Reduction::mean;
};

/// The negative logarithm of a Poisson distribution's probability of the target, without log(target!) unless `full`.
template <Operand X, Operand Y>
auto poisson_nll_loss_per_element(const X& x, const Y& target, const PoissonNllOptions& options = {}) {
  auto losses = options.log_input ? detail::pointwise("poisson_nll_loss", functors::PoissonNllOfLog{}, x, target)
                                  : detail::pointwise("poisson_nll_loss", functors::PoissonNll{options.eps}, x, target);
  if (options.full) losses = losses + detail::pointwise("poisson_nll_loss", functors::Stirling{}, target);
  return losses;
}
template <Operand X, Operand Y>
auto poisson_nll_loss(const X& x, const Y& target, const PoissonNllOptions& options = {}) {
  return detail::reduce_losses("poisson_nll_loss", poisson_nll_loss_per_element(x, target, options), options.reduction);
}

/// Binary cross entropy of logits x with a weight for each element and one for the positive part; both broadcast.
template <Operand X, Operand Y, Operand W, Operand P>
auto bce_with_logits_per_element(const X& x, const Y& target, const W& weight, const P& pos_weight) {
  return detail::pointwise("bce_with_logits", functors::WeightedBinaryCrossEntropy{}, x, target, weight, pos_weight);
}
template <Operand X, Operand Y, Operand W, Operand P>
auto bce_with_logits(const X& x, const Y& target, const W& weight, const P& pos_weight,
                     Reduction reduction = Reduction::mean) {
  return detail::reduce_losses("bce_with_logits", bce_with_logits_per_element(x, target, weight, pos_weight),
                               reduction);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_MORE_LOSSES_HPP

// <chorus/ops/norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_NORM_HPP
#define CHORUS_SINGLE_CHORUS_OPS_NORM_HPP
/// Norms and standard deviations, with the subgradient 0 where they have no gradient, as in PyTorch. Large and small
/// numbers are scaled on the way, so that their squares neither overflow nor vanish.

namespace chorus {

namespace functors {

/// A power of two by which numbers up to x are divided so that neither their squares nor the gradients overflow or
/// vanish: one of `first`, `second` and the latter's reciprocal, but 1 for most x.
struct SquareUnit {
  double first = 1, second = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    const S small = where(x == 0, S(1), where(x < R(1 / first), S(R(1 / second)), S(1)));
    const S large = where(x > R(second), S(R(second)), S(R(first)));
    return where(x > std::numeric_limits<R>::max(), S(1), where(x > R(first), large, small));
  }
};

/// x, or 1 where x is 0 or not finite.
struct DivisorOrOne {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x == 0, S(1), where(x > std::numeric_limits<real_of<S>>::max(), S(1), x));
  }
};

/// 1 where x is 0, else 0.
struct IsZero {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x == 0, S(1), S(0));
  }
};

}  // namespace functors

namespace detail {

template <class T>
constexpr functors::SquareUnit square_unit =
    std::is_same_v<T, double> ? functors::SquareUnit{0x1p400, 0x1p704} : functors::SquareUnit{0x1p50, 0x1p88};

// Constants for whoever differentiates: what is made of values alone. Sizes of 1 stay, so that they broadcast.
template <class F, Operand X>
auto largest_as(const F& f, const X& x, Index axis) {
  return pointwise(f, amax(abs(value_of(x)), axis, keep_axis));
}
template <Operand X>
auto one_where_zero(const X& x) {
  return pointwise(functors::IsZero{}, value_of(x));
}

// Without an axis that has stayed with size 1.
template <Operand X>
auto drop_axis(const char* operation, const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  return reshape(x, without_axis<rank>(value_of(x).shape(), normalize_axis(operation, axis, rank)));
}

// Of an axis that stays with size 1, over which there are elements.
template <Operand X>
auto norm_keeping(const X& x, double p, Index axis) {
  using T = typename tensor_of<X>::value_type;
  const double inf = std::numeric_limits<double>::infinity();
  if (p == inf) return amax(abs(x), axis, keep_axis);
  if (p == -inf) return amin(abs(x), axis, keep_axis);
  if (p == 1) return sum(abs(x), axis, keep_axis);
  // unit * (sum of |x / unit|^p)^(1 / p). Where that sum is 0, 1 is added to it under the root and taken off outside.
  const auto root = [&](const auto& unit, const auto& powers, const auto& f) {
    const auto total = sum(powers, axis, keep_axis);
    const auto zero = one_where_zero(total);
    return (f(total + zero) - zero) * unit;
  };
  if (p == 2) {
    const auto unit = largest_as(square_unit<T>, x, axis);
    return root(unit, square(x / unit), [](const auto& total) { return sqrt(total); });
  }
  // |x|^p has no gradient at 0 for p below 1.
  const auto unit = largest_as(functors::DivisorOrOne{}, x, axis);
  const auto part = abs(x) / unit;
  const auto zero = one_where_zero(part);
  return root(unit, pow(part + zero, p) - zero, [p](const auto& total) { return pow(total, 1 / p); });
}

}  // namespace detail

/// (sum of |x|^p)^(1 / p) along an axis, which stays with size 1; p is positive or infinite, which gives the largest
/// |x|, or with -inf the smallest (torch.linalg.vector_norm). The arguments' order is that of torch.norm. The gradient
/// is 0 where the norm is 0, and of elements that are 0; elements that tie for the largest share it. Along an axis
/// without elements it is 0. Throws UsageError for other p, and for an empty axis and an infinite p.
template <Operand X>
auto norm(const X& x, double p, Index axis, KeepAxis) {
  check<UsageError>(p > 0 || p == -std::numeric_limits<double>::infinity(),
                    "norm: p is positive, or -inf for the smallest element, got ", p);
  if constexpr (NarrowOperand<X>) {
    return to<typename tensor_of<X>::value_type>(norm(to<float>(x), p, axis, keep_axis));
  } else {
    const auto a = normalize_axis("norm", axis, tensor_of<X>::rank);
    if (value_of(x).shape()[a] == 0) {
      check<UsageError>(p < std::numeric_limits<double>::infinity() && p > 0, "norm: an axis of a tensor of shape ",
                        value_of(x).shape(), " has no element that could be the largest or smallest");
      return sum(x, axis, keep_axis);
    }
    return detail::norm_keeping(x, p, axis);
  }
}
/// The same; the axis goes away.
template <Operand X>
auto norm(const X& x, double p, Index axis) {
  return detail::drop_axis("norm", norm(x, p, axis, keep_axis), axis);
}
/// The norm of all elements: the Euclidean one, of a matrix Frobenius', unless p says otherwise.
template <Operand X>
auto norm(const X& x, double p = 2) {
  return detail::reduce_all("norm", x, [p](const auto& flat, Index axis) { return norm(flat, p, axis); });
}
/// The norm over several axes, which go away, or with keep_axis stay with size 1.
template <Operand X, std::size_t N>
auto norm(const X& x, double p, const std::array<Index, N>& axes) {
  return norm(detail::merge_axes("norm", x, axes), p, -1);
}
template <Operand X, std::size_t N>
auto norm(const X& x, double p, const std::array<Index, N>& axes, KeepAxis) {
  return detail::restore_axes(x, norm(x, p, axes), axes);
}

/// The standard deviation along an axis, which stays with size 1: the root of `var`. The gradient is 0 where it is 0.
/// Not a number, and no number in the gradient, where there are no more elements than `correction`.
template <Operand X>
auto std(const X& x, Index axis, KeepAxis, Index correction = 1) {
  if constexpr (NarrowOperand<X>) {
    return to<typename tensor_of<X>::value_type>(std(to<float>(x), axis, keep_axis, correction));
  } else {
    const auto a = normalize_axis("std", axis, tensor_of<X>::rank);
    if (value_of(x).shape()[a] == 0) return var(x, axis, keep_axis, correction);
    const auto unit = detail::largest_as(detail::square_unit<typename tensor_of<X>::value_type>, x, axis);
    const auto squares = var(x / unit, axis, keep_axis, correction);
    const auto zero = detail::one_where_zero(squares);
    return (sqrt(squares + zero) - zero) * unit;
  }
}
/// The same; the axis goes away.
template <Operand X>
auto std(const X& x, Index axis, Index correction = 1) {
  return detail::drop_axis("std", std(x, axis, keep_axis, correction), axis);
}
/// The standard deviation of all elements.
template <Operand X>
auto std(const X& x) {
  return detail::reduce_all("std", x, [](const auto& flat, Index axis) { return std(flat, axis); });
}
/// The standard deviation over several axes, with the same forms.
template <Operand X, std::size_t N>
auto std(const X& x, const std::array<Index, N>& axes, Index correction = 1) {
  return std(detail::merge_axes("std", x, axes), -1, correction);
}
template <Operand X, std::size_t N>
auto std(const X& x, const std::array<Index, N>& axes, KeepAxis, Index correction = 1) {
  return detail::restore_axes(x, std(x, axes, correction), axes);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_NORM_HPP

// <chorus/ops/padding_modes.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_PADDING_MODES_HPP
#define CHORUS_SINGLE_CHORUS_OPS_PADDING_MODES_HPP
/// Padding of images with what lies in them.

namespace chorus {

/// What stands around an image: itself mirrored at its edge pixels, its edge pixels again, or its other side.
enum class PaddingMode : std::uint8_t { reflect, replicate, circular };

namespace detail {
// For each place of the padded axis the entry of the axis that stands there.
inline std::vector<std::int64_t> padded_places(PaddingMode mode, Index size, Index before, Index after) {
  const Index most = mode == PaddingMode::reflect ? size - 1 : mode == PaddingMode::circular ? size : before + after;
  check<UsageError>(before >= 0 && after >= 0, "pad2d: the padding is at least 0, got ", before, " and ", after);
  check<ShapeError>(size > 0 && before <= most && after <= most, "pad2d: padding of ", before, " and ", after,
                    " is more than an axis of ", size, " can fill");
  std::vector<std::int64_t> places;
  for (Index i = -before; i < size + after; ++i) {
    Index at = i;
    if (mode == PaddingMode::replicate) at = std::clamp(i, Index{0}, size - 1);
    if (mode == PaddingMode::circular) at = (i + size) % size;
    if (mode == PaddingMode::reflect) at = i < 0 ? -i : i >= size ? 2 * (size - 1) - i : i;
    places.push_back(at);
  }
  return places;
}

template <Operand X>
auto pad_axis(const X& x, Index axis, PaddingMode mode, Index before, Index after) {
  const auto places = padded_places(mode, value_of(x).size(axis), before, after);
  const auto index = Tensor<std::int64_t, 1, typename tensor_of<X>::device_type>::from(
      places, Shape<1>{static_cast<Index>(places.size())}, value_of(x).device());
  return index_select(x, axis, index);
}
}  // namespace detail

/// x: [..., height, width] -> [..., top + height + bottom, left + width + right], filled as the mode says. Throws
/// UsageError for negative padding, ShapeError for more padding than the image can fill.
template <Operand X>
auto pad2d(const X& x, const Padding2d& padding, PaddingMode mode) {
  static_assert(tensor_of<X>::rank >= 2, "pad2d: the input is [..., height, width]");
  return detail::pad_axis(detail::pad_axis(x, -2, mode, padding.top, padding.bottom), -1, mode, padding.left,
                          padding.right);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_PADDING_MODES_HPP

// <chorus/ops/quantized.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_QUANTIZED_HPP
#define CHORUS_SINGLE_CHORUS_OPS_QUANTIZED_HPP
/// Operators on 8-bit integers, with PyTorch's names and numbers. Each call turns its operands round and packs its
/// weights: a model of many layers is for `quantized(model)`, which does so once.

namespace chorus {

/// Integers, and what they stand for: (q - zero_point) * scale.
template <int Rank>
struct Quantized {
  Tensor<std::uint8_t, Rank, Cpu> values;
  float scale = 1;
  std::int32_t zero_point = 0;
};

/// Weights of 8 bits with a scale for each output, the first axis.
template <int Rank>
struct QuantizedWeight {
  Tensor<std::int8_t, Rank, Cpu> values;
  Tensor<float, 1, Cpu> scale;
};

/// What the integers of a result stand for, and whether a ReLU is applied first.
struct QuantizedOutput {
  float scale = 1;
  std::int32_t zero_point = 0;
  bool relu = false;
};

namespace detail {

inline void check_levels(const char* operation, float scale, std::int32_t zero_point) {
  check<UsageError>(std::isfinite(scale) && scale > 0 && zero_point >= 0 && zero_point <= 255, operation,
                    ": a scale of ", scale, " and a zero point of ", zero_point,
                    ": expected a positive number and one in [0, 255]");
}

template <int Rank>
kernels::int8::Levels levels_of(const Quantized<Rank>& x) {
  return {x.scale, x.zero_point, {}};
}

/// Images with their channels last, and the memory in which they lie.
struct OwnImages {
  std::vector<std::uint8_t> memory;
  kernels::int8::Images images;

  OwnImages(const Shape<4>& shape, Index border) : images{nullptr, shape[0], shape[2], shape[3], shape[1], border} {
    memory.resize(static_cast<std::size_t>(images.bytes()));
    images.data = memory.data();
  }
  OwnImages(const Tensor<std::uint8_t, 4, Cpu>& x, Index border, std::uint8_t outside) : OwnImages(x.shape(), border) {
    const auto from = contiguous(x);
    images.fill_border(outside);
    const std::uint8_t* number = from.data();
    for (Index image = 0; image < images.batch; ++image)
      for (Index c = 0; c < images.channels; ++c)
        for (Index row = 0; row < images.height; ++row)
          for (Index column = 0; column < images.width; ++column) images.at(image, row, column)[c] = *number++;
  }
  Tensor<std::uint8_t, 4, Cpu> tensor() const {
    auto out = Tensor<std::uint8_t, 4, Cpu>::empty({images.batch, images.channels, images.height, images.width});
    kernels::int8::for_channels_first(images, out.data(), [](std::uint8_t q) { return q; });
    return out;
  }
};

template <class Way>
Quantized<4> quantized_conv2d(const char* operation, const Quantized<4>& x, const QuantizedWeight<4>& weight,
                              const Tensor<float, 1, Cpu>& bias, const QuantizedOutput& y,
                              const Conv2dOptions& options) {
  check_defined(operation, x.values, weight.values, weight.scale);
  check_levels(operation, x.scale, x.zero_point);
  check_levels(operation, y.scale, y.zero_point);
  const auto& in = x.values.shape();
  const auto& taps = weight.values.shape();
  const kernels::Conv2dShape shape{.batch = in[0],
                                   .in_channels = in[1],
                                   .height = in[2],
                                   .width = in[3],
                                   .out_channels = taps[0],
                                   .kernel_h = taps[2],
                                   .kernel_w = taps[3],
                                   .stride_h = options.stride.height,
                                   .stride_w = options.stride.width,
                                   .padding_h = options.padding.height,
                                   .padding_w = options.padding.width,
                                   .dilation_h = options.dilation.height,
                                   .dilation_w = options.dilation.width,
                                   .groups = options.groups};
  check<UsageError>(shape.groups > 0 && shape.stride_h > 0 && shape.stride_w > 0 && shape.dilation_h > 0 &&
                        shape.dilation_w > 0 && shape.padding_h >= 0 && shape.padding_w >= 0,
                    operation, ": stride, dilation and groups are at least 1, padding at least 0");
  check<ShapeError>(taps[1] * shape.groups == shape.in_channels && shape.out_channels % shape.groups == 0, operation,
                    ": an input of shape ", in, " does not fit a weight of shape ", taps, " with ", shape.groups,
                    " groups");
  check<ShapeError>(weight.scale.numel() == shape.out_channels &&
                        (!bias.defined() || bias.numel() == shape.out_channels),
                    operation, ": ", weight.scale.numel(), " scales and ", bias.defined() ? bias.numel() : 0,
                    " biases for ", shape.out_channels, " outputs");
  check<ShapeError>(shape.height + 2 * shape.padding_h > shape.dilation_h * (shape.kernel_h - 1) &&
                        shape.width + 2 * shape.padding_w > shape.dilation_w * (shape.kernel_w - 1),
                    operation, ": the kernel of ", taps, " is larger than the padded input of ", in);
  const Index terms = taps[1] * taps[2] * taps[3];
  check<UsageError>(terms <= kernels::int8::most_terms, operation, ": it adds ", terms,
                    " products, of which 32 bits hold ", kernels::int8::most_terms);

  const auto numbers = contiguous(weight.values);
  const auto packed =
      kernels::int8::pack_weights(shape, {numbers.data(), static_cast<std::size_t>(numbers.numel())});
  const auto padded = static_cast<std::size_t>(shape.out_channels + kernels::int8::panel);
  std::vector<std::int32_t> offset(padded);
  std::vector<float> start(padded), multiplier(padded);
  for (Index o = 0; o < shape.out_channels; ++o) {
    const auto at = static_cast<std::size_t>(o);
    const float unit = x.scale * weight.scale(o);
    offset[at] = -x.zero_point * packed.sums[at];
    start[at] = bias.defined() ? bias(o) / unit : 0.0f;
    multiplier[at] = unit / y.scale;
  }
  const OwnImages from(x.values, std::max(shape.padding_h, shape.padding_w), static_cast<std::uint8_t>(x.zero_point));
  const OwnImages to({shape.batch, shape.out_channels, shape.out_height(), shape.out_width()}, 0);
  kernels::int8::convolution<Way>(
      shape, from.images, packed,
      {offset.data(), start.data(), multiplier.data(), y.zero_point, y.relu ? y.zero_point : 0, 255},
      to.images);
  return {to.tensor(), y.scale, y.zero_point};
}

}  // namespace detail

/// The nearest integers: clamp(rint(x / scale) + zero_point, 0, 255), ties to even. Throws UsageError unless the scale
/// is positive and the zero point in [0, 255].
template <int Rank>
Quantized<Rank> quantize(const Tensor<float, Rank, Cpu>& x, float scale, std::int32_t zero_point) {
  detail::check_defined("quantize", x);
  detail::check_levels("quantize", scale, zero_point);
  const auto from = contiguous(x);
  Quantized<Rank> out{Tensor<std::uint8_t, Rank, Cpu>::empty(x.shape()), scale, zero_point};
  const kernels::int8::Levels levels{scale, zero_point, {}};
  for (Index i = 0; i < from.numel(); ++i) out.values.data()[i] = kernels::int8::level_of(levels, from.data()[i]);
  return out;
}

/// What the integers stand for.
template <int Rank>
Tensor<float, Rank, Cpu> dequantize(const Quantized<Rank>& x) {
  detail::check_defined("dequantize", x.values);
  const auto from = contiguous(x.values);
  auto out = Tensor<float, Rank, Cpu>::empty(from.shape());
  for (Index i = 0; i < from.numel(); ++i) out.data()[i] = detail::levels_of(x).number(from.data()[i]);
  return out;
}

/// conv2d of integers, added up in 32 bits; padding stands for 0, which is x's zero point. bias: [out], of floats, or
/// undefined. Throws ShapeError where the shapes don't fit, as `conv2d` does, and UsageError for levels that can't be.
template <class Way = kernels::int8::Best>
Quantized<4> quantized_conv2d(const Quantized<4>& x, const QuantizedWeight<4>& weight,
                              const Tensor<float, 1, Cpu>& bias, const QuantizedOutput& y,
                              const Conv2dOptions& options = {}) {
  return detail::quantized_conv2d<Way>("quantized_conv2d", x, weight, bias, y, options);
}

/// x: [batch, in], weight: [out, in] -> x weightᵀ + bias: [batch, out], of integers.
template <class Way = kernels::int8::Best>
Quantized<2> quantized_linear(const Quantized<2>& x, const QuantizedWeight<2>& weight,
                              const Tensor<float, 1, Cpu>& bias, const QuantizedOutput& y) {
  constexpr const char* name = "quantized_linear";
  detail::check_defined(name, x.values, weight.values);
  const auto from = contiguous(x.values);
  const auto w = contiguous(weight.values);
  check<ShapeError>(from.size(1) == w.size(1), name, ": an input of shape ", from.shape(),
                    " does not fit a weight of shape ", w.shape());
  const auto out = detail::quantized_conv2d<Way>(
      name, {from.view(Shape<4>{from.size(0), from.size(1), 1, 1}), x.scale, x.zero_point},
      {w.view(Shape<4>{w.size(0), w.size(1), 1, 1}), weight.scale}, bias, y, {});
  return {out.values.view(Shape<2>{from.size(0), w.size(0)}), out.scale, out.zero_point};
}

/// a + b, added in float and rounded once.
template <int Rank>
Quantized<Rank> quantized_add(const Quantized<Rank>& a, const Quantized<Rank>& b, const QuantizedOutput& y) {
  constexpr const char* name = "quantized_add";
  detail::check_defined(name, a.values, b.values);
  detail::check_levels(name, a.scale, a.zero_point);
  detail::check_levels(name, b.scale, b.zero_point);
  detail::check_levels(name, y.scale, y.zero_point);
  check<ShapeError>(a.values.shape() == b.values.shape(), name, ": operands of shapes ", a.values.shape(), " and ",
                    b.values.shape());
  const auto left = contiguous(a.values), right = contiguous(b.values);
  Quantized<Rank> out{Tensor<std::uint8_t, Rank, Cpu>::empty(left.shape()), y.scale, y.zero_point};
  kernels::int8::add({detail::levels_of(a), detail::levels_of(b), {y.scale, y.zero_point, {}}, y.relu}, left.data(),
                     right.data(), out.values.data(), left.numel());
  return out;
}

/// The larger of x and 0, as integers of the same levels.
template <int Rank>
Quantized<Rank> quantized_relu(const Quantized<Rank>& x) {
  detail::check_defined("quantized_relu", x.values);
  const auto from = contiguous(x.values);
  Quantized<Rank> out{Tensor<std::uint8_t, Rank, Cpu>::empty(from.shape()), x.scale, x.zero_point};
  const auto zero = static_cast<std::uint8_t>(x.zero_point);
  for (Index i = 0; i < from.numel(); ++i) out.values.data()[i] = std::max(from.data()[i], zero);
  return out;
}

/// max_pool2d of integers, whose levels stay.
inline Quantized<4> quantized_max_pool2d(const Quantized<4>& x, Size2d window, const PoolOptions& options = {}) {
  detail::check_defined("quantized_max_pool2d", x.values);
  const auto shape = detail::pool2d_shape("quantized_max_pool2d", x.values.shape(), window, options);
  const detail::OwnImages from(x.values, 0, 0);
  const detail::OwnImages to({x.values.size(0), x.values.size(1), shape.out_height(), shape.out_width()}, 0);
  kernels::int8::max_pool2d(shape, from.images, to.images);
  return {to.tensor(), x.scale, x.zero_point};
}

/// avg_pool2d of integers, added up in 32 bits and rounded once, to x's levels.
inline Quantized<4> quantized_avg_pool2d(const Quantized<4>& x, Size2d window, const PoolOptions& options = {}) {
  constexpr const char* name = "quantized_avg_pool2d";
  detail::check_defined(name, x.values);
  detail::check_levels(name, x.scale, x.zero_point);
  const auto shape = detail::pool2d_shape(name, x.values.shape(), window, options);
  check<UsageError>(shape.dilation_h == 1 && shape.dilation_w == 1, name, ": its windows have no dilation");
  const detail::OwnImages from(x.values, 0, 0);
  const detail::OwnImages to({x.values.size(0), x.values.size(1), shape.out_height(), shape.out_width()}, 0);
  kernels::int8::avg_pool2d(shape, from.images, to.images,
                            {detail::levels_of(x), detail::levels_of(x), options.count_include_pad});
  return {to.tensor(), x.scale, x.zero_point};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_QUANTIZED_HPP

// <chorus/ops/scatter.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_SCATTER_HPP
#define CHORUS_SINGLE_CHORUS_OPS_SCATTER_HPP
/// Putting elements where an index says: scatter_add and scatter.

namespace chorus {

namespace detail {
template <class T, int Rank, class D>
void check_scatter(const char* operation, const Tensor<T, Rank, D>& x, std::size_t axis,
                   const Tensor<std::int64_t, Rank, D>& index, const Shape<Rank>& source) {
  auto expected = x.shape();
  expected[axis] = index.shape()[axis];
  check<ShapeError>(index.shape() == expected && source == expected, operation, ": an index of shape ", index.shape(),
                    " and a source of shape ", source, " do not fit an input of ", x.shape());
  // The kernel that picks checks positions; the one that puts does not.
  const auto input = contiguous(x);
  const auto places = contiguous(index);
  auto unused = Tensor<T, Rank, D>::empty(index.shape(), x.device());
  kernels::gather(x.device(), around_axis(x.shape(), axis), index.shape()[axis], places.data(), input.data(),
                  unused.data());
}
}  // namespace detail

/// x with every element of `source` added at the position along `axis` that `index` gives, at the same place in the
/// other axes. index and source have one shape, x's but for the axis. Throws ShapeError where they have not, UsageError
/// for an index outside of the axis.
template <Operand X, class D, Operand S>
auto scatter_add(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index, const S& source) {
  const auto a = normalize_axis("scatter_add", axis, tensor_of<X>::rank);
  detail::check_scatter("scatter_add", value_of(x), a, index, value_of(source).shape());
  return x + detail::scatter_add(source, value_of(x).shape(), a, contiguous(index));
}

/// x with every element of `source` in place of the one at the position that `index` gives. Throws as scatter_add does,
/// and UsageError where a position is given twice.
template <Operand X, class D, Operand S>
auto scatter(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index, const S& source) {
  using T = typename tensor_of<X>::value_type;
  constexpr int rank = tensor_of<X>::rank;
  const auto a = normalize_axis("scatter", axis, rank);
  detail::check_scatter("scatter", value_of(x), a, index, value_of(source).shape());
  const auto places = contiguous(index);
  const auto ones = Tensor<T, rank, D>::ones(index.shape(), index.device());
  const auto count = detail::scatter_add(ones, value_of(x).shape(), a, places);
  check<UsageError>(count.numel() == 0 || !(static_cast<double>(amax(count).item()) > 1),
                    "scatter: the index gives a position twice");
  return detail::pointwise("scatter", functors::Where{}, count,
                           detail::scatter_add(source, value_of(x).shape(), a, places), x);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_SCATTER_HPP

// <chorus/ops/sort.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_SORT_HPP
#define CHORUS_SINGLE_CHORUS_OPS_SORT_HPP
/// Sorting along an axis: argsort, sort, topk.

// <chorus/kernels/sort.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_SORT_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_SORT_HPP
/// Order along an axis. x: [outer, axis, inner]; index: [outer, count, inner].

namespace chorus::kernels {

/// The positions of the first `count` elements in ascending (or descending) order; equal ones keep their order, NaN is
/// larger than all numbers.
template <Scalar T>
void argsort(Cpu, AxisShape shape, Index count, bool descending, const T* x, std::int64_t* index);

}  // namespace chorus::kernels

// <chorus/kernels/cpu/sort.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_SORT_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_SORT_HPP
/// Order along an axis on the CPU.

namespace chorus::kernels {

template <Scalar T>
void argsort(Cpu, AxisShape shape, Index count, bool descending, const T* x, std::int64_t* index) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(shape.axis));
  for (Index o = 0; o < shape.outer; ++o)
    for (Index i = 0; i < shape.inner; ++i) {
      const T* line = x + o * shape.axis * shape.inner + i;
      // A strict order of all positions, so that a partial sort is stable too.
      const auto before = [&](std::int64_t a, std::int64_t b) {
        const auto u = static_cast<compute_type<T>>(line[a * shape.inner]);
        const auto v = static_cast<compute_type<T>>(line[b * shape.inner]);
        const bool less = u < v || (v != v && u == u), more = v < u || (u != u && v == v);
        return less != more ? (descending ? more : less) : a < b;
      };
      std::iota(order.begin(), order.end(), std::int64_t{0});
      std::partial_sort(order.begin(), order.begin() + count, order.end(), before);
      for (Index j = 0; j < count; ++j)
        index[(o * count + j) * shape.inner + i] = order[static_cast<std::size_t>(j)];
    }
}

}  // namespace chorus::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_SORT_HPP

#if CHORUS_USE_CUDA && defined(__CUDACC__)
// <chorus/kernels/cuda/sort.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CUDA_SORT_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CUDA_SORT_HPP
/// Order along an axis on GPUs: each element counts those that come before it, which is its place. Quadratic in the
/// axis, but without a step that waits for another.

namespace chorus::kernels {

namespace cuda {

template <class T>
struct Rank {
  AxisShape shape;
  Index count;
  bool descending;
  const T* x;
  std::int64_t* index;
  __device__ void operator()(Index i) const {
    const Index row = i / shape.inner, o = row / shape.axis, a = row - o * shape.axis, inner = i - row * shape.inner;
    const Index line = o * shape.axis * shape.inner + inner;
    const auto mine = get(x, i);
    Index rank = 0;
    for (Index other = 0; other < shape.axis; ++other) {
      const auto value = get(x, line + other * shape.inner);
      const bool less = value < mine || (mine != mine && value == value);
      const bool more = mine < value || (value != value && mine == mine);
      if (less != more ? (descending ? more : less) : other < a) ++rank;
    }
    if (rank < count) index[(o * count + rank) * shape.inner + inner] = a;
  }
};

}  // namespace cuda

template <Scalar T>
void argsort(Cuda device, AxisShape shape, Index count, bool descending, const T* x, std::int64_t* index) {
  cuda::for_each(device, "argsort", shape.numel(), cuda::Rank<T>{shape, count, descending, x, index});
}

}  // namespace chorus::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CUDA_SORT_HPP

#endif
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_SORT_HPP

namespace chorus {

/// Numbers in order, and the positions at which they were.
template <class Values, class Indices>
struct Sorted {
  Values values;
  Indices indices;
};

namespace detail {
template <Operand X>
auto first_in_order(const char* operation, const X& x, Index axis, Index count, bool descending) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "a tensor without axes cannot be sorted");
  const auto input = contiguous(value_of(x));
  const auto a = normalize_axis(operation, axis, rank);
  auto shape = input.shape();
  check<ShapeError>(count >= 0 && count <= shape[a], operation, ": ", count, " elements of an axis of ", shape[a]);
  shape[a] = count;
  auto index = Tensor<std::int64_t, rank, typename tensor_of<X>::device_type>::empty(shape, input.device());
  kernels::argsort(input.device(), around_axis(input.shape(), a), count, descending, input.data(), index.data());
  return index;
}
}  // namespace detail

/// The positions of an axis's elements in order; equal elements keep theirs, NaN is the largest.
template <Operand X>
auto argsort(const X& x, Index axis = -1, bool descending = false) {
  const Index size = value_of(x).size(axis);
  return detail::first_in_order("argsort", x, axis, size, descending);
}

/// The elements of an axis in order. Gradients go back to where the elements were.
template <Operand X>
auto sort(const X& x, Index axis = -1, bool descending = false) {
  const auto index = detail::first_in_order("sort", x, axis, value_of(x).size(axis), descending);
  auto values = gather(x, axis, index);
  return Sorted<decltype(values), std::remove_const_t<decltype(index)>>{std::move(values), index};
}

/// The `count` largest (or smallest) elements of an axis, the best first. Throws ShapeError where there are fewer.
template <Operand X>
auto topk(const X& x, Index count, Index axis = -1, bool largest = true) {
  const auto index = detail::first_in_order("topk", x, axis, count, largest);
  auto values = gather(x, axis, index);
  return Sorted<decltype(values), std::remove_const_t<decltype(index)>>{std::move(values), index};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_OPS_SORT_HPP

// <chorus/optim/averaging.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_AVERAGING_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_AVERAGING_HPP
/// Averages of parameters over steps: exponential (EMA) and equal weights (SWA).

namespace chorus::optim {

/// How an average follows.
struct AverageRule {
  /// The share of the average that stays in an update; below 0, all updates weigh the same.
  double decay = -1;
  double keep(std::int64_t updates) const {
    return decay >= 0 ? decay : static_cast<double>(updates) / static_cast<double>(updates + 1);
  }
};
/// An exponential moving average (EMA). Throws UsageError unless 0 <= decay < 1.
inline AverageRule exponential(double decay) {
  check<UsageError>(decay >= 0 && decay < 1, "exponential: the decay is in [0, 1), got ", decay);
  return {decay};
}
/// The mean of the parameters at all updates: stochastic weight averaging (Izmailov et al. 2018).
inline AverageRule equal_weights() { return {}; }

namespace detail {
/// Which averages models hold at the moment, by the number (a parameter or a buffer) that they are in place of. Each
/// one keeps what it has displaced: the trained numbers, or an average below it.
class HeldAverages {
 public:
  /// Where a displaced number lies now.
  using Place = void*;

  static HeldAverages& all() {
    static HeldAverages held;
    return held;
  }
  void add(const void* number, Place displaced) {
    const std::lock_guard lock(mutex_);
    held_[number].push_back(displaced);
    ++count_;
  }
  /// The average whose displaced number is there leaves; returns where its own number is: an average above it may have
  /// displaced it, else it is null, in the model.
  Place remove(const void* number, Place displaced) {
    const std::lock_guard lock(mutex_);
    auto& stack = held_.at(number);
    auto at = std::find(stack.begin(), stack.end(), displaced);
    at = stack.erase(at);
    const Place above = at == stack.end() ? nullptr : *at;
    if (stack.empty()) held_.erase(number);
    --count_;
    return above;
  }
  bool holds(const void* number) {
    if (count_ == 0) return false;
    const std::lock_guard lock(mutex_);
    return held_.contains(number);
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::vector<Place>> held_;
  std::atomic<int> count_{0};
};
}  // namespace detail

/// A policy.
template <class Net>
concept HoldsModel = requires(Net& net) {
  net.module();
  net.parameters();
};

struct ParameterAverageOptions {
  /// Average the buffers, too. Else the average has those of the last update, as in PyTorch's AveragedModel. Buffers of
  /// integers are never averaged.
  bool use_buffers = false;
};

/// A second set of a model's parameters that follows them. It starts as a copy of them. On the workers of a
/// ParameterServer, which fetch a step's parameters with the next forward pass, it follows a step behind the server's.
///
///   optim::ParameterAverage average{net.parameters(), optim::exponential(0.999)};
///   ...                                  // after each optimizer.step():
///   average.update();
///   ...
///   optim::AveragedScope use{average};   // the model computes with the averages while this lives
///
/// Batch norm's running statistics are those of the trained parameters: `update_bn(net, loader)` inside of the scope
/// makes them anew. An average that was made of the net, `ParameterAverage average{net, optim::equal_weights()}`, has
/// buffers of its own, which come and go with the averages; a scope that is made with the net, `AveragedScope
/// use{average, net}`, gives the trained ones' back.
template <Device D>
class ParameterAverage {
 public:
  /// Throws UsageError where there are no parameters.
  ParameterAverage(std::vector<nn::NamedParameter<D>> parameters, AverageRule rule) : rule_(rule) {
    check<UsageError>(!parameters.empty(), "ParameterAverage: there are no parameters");
    for (auto& named : parameters) {
      auto& parameter = *named.parameter;
      entries_.push_back({named.name, named.handle.shared(), &parameter, &parameter,
                          copy_of(parameter.where(), parameter.memory(), parameter.size_bytes())});
    }
  }
  /// Of all parameters and buffers of `net`, a policy.
  template <HoldsModel Net>
  ParameterAverage(Net& net, AverageRule rule, const ParameterAverageOptions& options = {})
      : ParameterAverage(net.parameters(), rule) {
    use_buffers_ = options.use_buffers;
    for (auto& named : nn::named_buffers<D>(net.module())) {
      auto& buffer = *named.buffer;
      entries_.push_back({named.name, named.handle.shared(), &buffer, nullptr,
                          copy_of(buffer.where(), buffer.memory(), buffer.size_bytes())});
    }
  }
  ~ParameterAverage() {
    if (swapped_)
      for (Entry& entry : entries_) detail::HeldAverages::all().remove(entry.number(), entry.average.data());
  }
  ParameterAverage(const ParameterAverage&) = delete;
  ParameterAverage& operator=(const ParameterAverage&) = delete;

  /// average = keep average + (1 - keep) parameter. Throws UsageError while the model holds averages, these or others,
  /// and for `equal_weights` in a step that is captured.
  void update() {
    check<UsageError>(!swapped_, "ParameterAverage: no update while the model holds the averages");
    check<UsageError>(!detail::HeldAverages::all().holds(entries_.front().number()),
                      "ParameterAverage: no update while the model holds other averages: expected the trained "
                      "parameters");
#if CHORUS_USE_CUDA
    if constexpr (std::is_same_v<D, Cuda>)
      if (auto* numbers = cuda::replay_numbers()) {
        check<UsageError>(rule_.decay >= 0,
                          "ParameterAverage: equal_weights() weigh each update otherwise, and a step that is captured "
                          "repeats one");
        replayed_.add(*numbers, {&updates_});
      }
#endif
    const double keep = rule_.keep(updates_++);
    for (Entry& entry : entries_) {
      const auto average = [&]<class T>(T* own, const T* value) {
        kernels::scale(entry.where(), entry.count(), static_cast<T>(keep), own);
        kernels::axpy(entry.where(), entry.count(), static_cast<T>(1 - keep), value, own);
      };
      const bool averages = entry.parameter != nullptr || use_buffers_;
      if (averages && entry.dtype() == DType::f32)
        average(static_cast<float*>(entry.average.data()), static_cast<const float*>(entry.value()));
      else if (averages && entry.dtype() == DType::f64)
        average(static_cast<double*>(entry.average.data()), static_cast<const double*>(entry.value()));
      else
        copy_bytes(entry.where(), entry.average.data(), entry.where(), entry.value(), entry.size_bytes());
    }
  }

  /// Exchanges the model's numbers and the averages. Both stay where they are, for captured steps know the places.
  /// Where the model holds several averages, one above the other, they may go in any order. Throws UsageError where
  /// ranks have the model's numbers in common.
  void swap() {
    for (const Entry& entry : entries_)
      check<UsageError>(entry.parameter == nullptr || !entry.parameter->in_common(),
                        "ParameterAverage: all ranks have '", entry.name,
                        "' in common (share_parameters of ShardedOptimizer), and would each exchange it");
    for (Entry& entry : entries_) {
      const auto device = entry.where();
      const auto bytes = entry.size_bytes();
      void* const mine = entry.average.data();
      void* other = nullptr;
      if (swapped_)
        other = detail::HeldAverages::all().remove(entry.number(), mine);
      else
        detail::HeldAverages::all().add(entry.number(), mine);
      if (other == nullptr) other = entry.value();
      const Storage<D> aside(device, bytes);
      copy_bytes(device, aside.data(), device, other, bytes);
      copy_bytes(device, other, device, mine, bytes);
      copy_bytes(device, mine, device, aside.data(), bytes);
      entry.numbers->touch();
    }
    swapped_ = !swapped_;
  }
  /// Whether the model holds the averages.
  bool swapped() const { return swapped_; }

  std::int64_t updates() const { return updates_; }

  D device() const { return entries_.front().where(); }
  /// The averages and their number, for checkpoints: `average.conv1.weight`.
  std::vector<StateTensor> state() {
    check<UsageError>(!swapped_, "ParameterAverage: no state to keep while the model holds the averages");
    std::vector<StateTensor> out;
    for (Entry& entry : entries_) {
      const bool is_part = entry.parameter != nullptr && entry.parameter->is_part();
      const auto extents = is_part ? entry.parameter->whole_extents() : entry.extents();
      out.push_back({.name = cat("average.", entry.name),
                     .dtype = entry.dtype(),
                     .shape = {extents.begin(), extents.end()},
                     .data = entry.average.data(),
                     .part = entry.parameter != nullptr ? entry.parameter->part() : nullptr});
      if (!is_part) continue;
      out.back().part_begin = static_cast<std::size_t>(entry.parameter->part_begin());
      out.back().part_count = static_cast<std::size_t>(entry.parameter->count());
    }
    out.push_back({"average_updates", DType::i64, {}, &updates_, true});
    return out;
  }

 private:
  /// A parameter's or a buffer's.
  struct Entry {
    std::string name;
    Ref<Node> owner;
    chorus::detail::AtHome<D>* numbers;
    ParameterOn<D>* parameter;  // null for a buffer
    Storage<D> average;

    const void* number() const { return owner.get(); }
    void* value() const { return numbers->memory(); }
    D where() const { return numbers->where(); }
    DType dtype() const { return numbers->dtype(); }
    std::span<const Index> extents() const { return numbers->extents(); }
    Index count() const { return numbers->count(); }
    std::size_t size_bytes() const { return numbers->size_bytes(); }
  };

  static Storage<D> copy_of(D device, const void* from, std::size_t bytes) {
    const MemoryScope scope(trace::Memory::optimizer);
    Storage<D> copy(device, bytes);
    copy_bytes(device, copy.data(), device, from, bytes);
    return copy;
  }

  AverageRule rule_;
  std::vector<Entry> entries_;
  std::int64_t updates_ = 0;
  bool swapped_ = false, use_buffers_ = false;
  detail::ReplayedSteps<D> replayed_;
};

template <Device D>
ParameterAverage(std::vector<nn::NamedParameter<D>>, AverageRule) -> ParameterAverage<D>;
template <HoldsModel Net>
ParameterAverage(Net&, AverageRule, const ParameterAverageOptions& = {}) -> ParameterAverage<typename Net::device_type>;

/// While it lives, the model computes with the averages. No optimizer may step meanwhile: its step would be taken with
/// the averages, and be lost. Scopes of several averages may be one in another, and the innermost one's hold. Throws
/// UsageError where the model holds this average already.
template <Device D>
class AveragedScope {
 public:
  explicit AveragedScope(ParameterAverage<D>& average) : average_(average) {
    check_free();
    average_.swap();
  }
  /// The buffers of `net`, a policy, are afterwards what they were, whatever passes with the averages make of them.
  template <HoldsModel Net>
  AveragedScope(ParameterAverage<D>& average, Net& net) : average_(average) {
    check_free();
    for (const auto& named : nn::named_buffers<D>(net.module())) {
      auto& buffer = *named.buffer;
      kept_.push_back({named.handle.shared(), &buffer, Storage<D>(buffer.where(), buffer.size_bytes())});
      copy_bytes(buffer.where(), kept_.back().numbers.data(), buffer.where(), buffer.memory(), buffer.size_bytes());
    }
    average_.swap();
  }
  ~AveragedScope() {
    average_.swap();
    for (const Kept& kept : kept_)
      copy_bytes(kept.buffer->where(), kept.buffer->memory(), kept.buffer->where(), kept.numbers.data(),
                 kept.buffer->size_bytes());
  }
  AveragedScope(const AveragedScope&) = delete;
  AveragedScope& operator=(const AveragedScope&) = delete;

 private:
  void check_free() const {
    check<UsageError>(!average_.swapped(), "AveragedScope: the model holds this average already");
  }
  struct Kept {
    Ref<Node> owner;
    BufferOn<D>* buffer;
    Storage<D> numbers;
  };
  ParameterAverage<D>& average_;
  std::vector<Kept> kept_;
};

}  // namespace chorus::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_AVERAGING_HPP

// <chorus/optim/grad_scaler.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_GRAD_SCALER_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_GRAD_SCALER_HPP
/// GradScaler: the loss is multiplied before backward, so that gradients are not too small for half, and steps whose
/// gradients overflowed are left out (Micikevicius et al., "Mixed Precision Training", ICLR 2018).

// <chorus/core/while_alive.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_WHILE_ALIVE_HPP
#define CHORUS_SINGLE_CHORUS_CORE_WHILE_ALIVE_HPP
/// What is held of an object that may end first.

namespace chorus::detail {

/// `call`, which may be made while the net lives of whose life `alive` tells: afterwards it throws UsageError in the
/// name of `who`.
template <class Call>
auto while_alive(std::string_view who, std::weak_ptr<void> alive, Call call) {
  return [who, alive = std::move(alive), call = std::move(call)](auto&&... arguments) {
    check<UsageError>(!alive.expired(), who, ": the net that it was made for is gone");
    return call(std::forward<decltype(arguments)>(arguments)...);
  };
}

}  // namespace chorus::detail
#endif  // CHORUS_SINGLE_CHORUS_CORE_WHILE_ALIVE_HPP

// <chorus/optim/loss_scale.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_LOSS_SCALE_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_LOSS_SCALE_HPP
/// What GradScaler's scale is and how it changes.

// <chorus/kernels/loss_scale.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_LOSS_SCALE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_LOSS_SCALE_HPP
/// How a loss scale changes, on the host as on a GPU.

namespace chorus::kernels {

struct LossScaleState {
  double scale = 1;
  std::int64_t good_steps = 0;  ///< in a row without an overflow
  std::int64_t skipped = 0;
};

struct LossScaleRule {
  double growth_factor, backoff_factor;
  std::int64_t growth_interval;
  double min_scale, max_scale;

  /// After a step whose gradients were all `finite`, or that was left out. A scale that would grow beyond `max_scale`
  /// stays as it is, as one of PyTorch's does that would become infinite; one that is below `min_scale` from the start
  /// does not become smaller.
  CHORUS_HD void operator()(LossScaleState& state, bool finite) const {
    if (!finite) {
      const double smaller = state.scale * backoff_factor, least = state.scale < min_scale ? state.scale : min_scale;
      state.scale = smaller < least ? least : smaller;
      state.good_steps = 0;
      ++state.skipped;
    } else if (++state.good_steps >= growth_interval) {
      if (state.scale * growth_factor <= max_scale) state.scale *= growth_factor;
      state.good_steps = 0;
    }
  }
};

}  // namespace chorus::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_LOSS_SCALE_HPP

namespace chorus::optim {

/// PyTorch's defaults.
struct GradScalerOptions {
  double init_scale = 65536, growth_factor = 2, backoff_factor = 0.5;
  /// Steps in a row without an overflow after which the scale grows.
  int growth_interval = 2000;
  /// The scale does not get smaller than this, however many steps are left out: after a stretch of bad batches it is
  /// still one by which gradients can be divided. An `init_scale` below it is the least one itself.
  double min_scale = 0x1p-10;
  /// The scale does not grow beyond this. The largest float, as in PyTorch: a loss can be multiplied by it.
  double max_scale = std::numeric_limits<float>::max();
};

namespace detail {

inline kernels::LossScaleRule rule_of(const GradScalerOptions& options) {
  return {options.growth_factor, options.backoff_factor, options.growth_interval, options.min_scale,
          options.max_scale};
}

/// Makes a number the largest one of all ranks; it lies where the gradients do.
using AgreeOnFound = std::function<void(std::int32_t* found)>;

/// The host keeps the scale, looks at the gradients, and decides.
template <Device D>
class LossScale {
 public:
  LossScale(const std::vector<nn::NamedParameter<D>>&, const GradScalerOptions& options)
      : rule_(rule_of(options)), state_{.scale = options.init_scale} {}

  template <Operand X>
  auto multiply(const X& loss) const {
    return loss * static_cast<typename tensor_of<X>::value_type>(state_.scale);
  }

  /// Divides the gradients by the scale. Returns whether all are finite, by the word of all ranks.
  bool unscale(const std::vector<nn::NamedParameter<D>>& parameters, const AgreeOnFound& agree) {
    // A finite number may become infinite where it is squared as it is, so the division comes first.
    for_each_grad(parameters, [this]<class T>(auto& parameter, T* grad) {
      kernels::scale(parameter.where(), parameter.count(), static_cast<T>(1 / state_.scale), grad);
    });
    double squares = 0;
    for_each_grad(parameters, [&]<class T>(auto& parameter, T* grad) {
      squares += kernels::square_sum(parameter.where(), parameter.count(), grad);
    });
    std::int32_t found = std::isfinite(squares) || first_not_finite(parameters) == nullptr ? 0 : 1;
    if (agree) agree(&found);
    return found == 0;
  }

  /// All step, if `finite`; then the scale changes.
  template <class... Optimizers>
  void step(bool finite, Optimizers&... optimizers) {
    if (finite) (optimizers.step(), ...);
    rule_(state_, finite);
  }
  /// The scale changes as in a step.
  void leave(bool finite) { rule_(state_, finite); }

  double scale() const { return state_.scale; }
  std::int64_t good_steps() const { return state_.good_steps; }
  std::int64_t skipped() const { return state_.skipped; }
  void set(double scale, std::int64_t good_steps) {
    state_.scale = scale;
    state_.good_steps = good_steps;
  }

 private:
  kernels::LossScaleRule rule_;
  kernels::LossScaleState state_;
};

}  // namespace detail

}  // namespace chorus::optim

#if CHORUS_USE_CUDA && defined(__CUDACC__)
// <chorus/optim/cuda/loss_scale.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_CUDA_LOSS_SCALE_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_CUDA_LOSS_SCALE_HPP
/// GradScaler's scale on a GPU: the device looks at the gradients and changes the scale, also in captured steps.

namespace chorus::optim::detail {

template <>
class LossScale<Cuda> {
 public:
  LossScale(const std::vector<nn::NamedParameter<Cuda>>& parameters, const GradScalerOptions& options)
      : rule_(rule_of(options)),
        memory_(memory_on(parameters.empty() ? Cuda{} : parameters.front().parameter->where())) {
    set(options.init_scale, 0);
  }

  /// The loss times the scale, which the device reads.
  template <Operand X>
  auto multiply(const X& loss) const {
    using T = typename tensor_of<X>::value_type;
    if constexpr (std::is_same_v<T, double>) {
      return mul(loss, Tensor<T, 0, Cuda>(memory_, &numbers()->scale, {}, {}));
    } else {
      const Tensor<float, 0, Cuda> scale(memory_, &numbers()->scale_f32, {}, {});
      if constexpr (std::is_same_v<T, float>) {
        return mul(loss, scale);
      } else {
        const auto narrow = Tensor<T, 0, Cuda>::empty({}, scale.device());
        kernels::convert(scale.device(), 1, static_cast<const float*>(scale.data()), narrow.data());
        return mul(loss, narrow);
      }
    }
  }

  /// Divides the gradients by the scale. Returns whether all are finite, by the word of all ranks; in a step that is
  /// captured the device alone knows, and it is true.
  bool unscale(const std::vector<nn::NamedParameter<Cuda>>& parameters, const AgreeOnFound& agree) {
    const GradArrays grads(parameters);
    kernels::cuda::unscale_grads(device(), grads.f32(), numbers());
    kernels::cuda::unscale_grads(device(), grads.f64(), numbers());
    if (agree) agree(&numbers()->found);
    if (captured()) return true;
    std::int32_t found = 0;
    copy_bytes(Cpu{}, &found, device(), &numbers()->found, sizeof found);
    return found == 0;
  }

  /// All step, unless a gradient was not finite; then the scale changes.
  template <class... Optimizers>
  void step(bool finite, Optimizers&... optimizers) {
    if (captured()) {
      (optimizers.step_unless(&numbers()->found), ...);
    } else {
      (optimizers.prepare_to_skip(), ...);
      if (finite) (optimizers.step(), ...);
    }
    kernels::cuda::update_loss_scale(device(), numbers(), rule_);
  }
  /// The scale changes as in a step, but not in each replay of a step that is captured.
  void leave(bool) {
    if (!captured()) kernels::cuda::update_loss_scale(device(), numbers(), rule_);
  }

  double scale() const { return read().scale; }
  std::int64_t good_steps() const { return read().good_steps; }
  std::int64_t skipped() const { return read().skipped; }
  void set(double scale, std::int64_t good_steps) {
    Numbers next = read();
    next.scale = scale;
    next.inverse = 1 / scale;
    next.scale_f32 = static_cast<float>(scale);
    next.good_steps = good_steps;
    copy_bytes(device(), memory_.data(), Cpu{}, &next, sizeof next);
  }

 private:
  using Numbers = kernels::cuda::LossScale;
  static Storage<Cuda> memory_on(Cuda device) {
    const MemoryScope scope(trace::Memory::optimizer);
    Storage<Cuda> memory(device, sizeof(Numbers));
    zero_bytes(device, memory.data(), memory.bytes());
    return memory;
  }
  Numbers* numbers() const { return static_cast<Numbers*>(memory_.data()); }
  Cuda device() const { return memory_.device(); }
  bool captured() const { return cuda::replay_numbers() != nullptr; }
  Numbers read() const {
    Numbers out;
    copy_bytes(Cpu{}, &out, device(), memory_.data(), sizeof out);
    return out;
  }

  kernels::LossScaleRule rule_;
  Storage<Cuda> memory_;
};

}  // namespace chorus::optim::detail
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_CUDA_LOSS_SCALE_HPP

#endif
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_LOSS_SCALE_HPP

namespace chorus::optim {

namespace detail {
/// The gradients that one scaler's losses have gone into, and which it has yet to divide. Several scalers of the same
/// parameters take turns: gradients in two units can't be told apart.
template <Device D>
class ScaledGradients {
 public:
  explicit ScaledGradients(const std::vector<nn::NamedParameter<D>>& parameters) {
    for (const auto& named : parameters) own_->parameters.push_back({named.parameter, 0});
    std::sort(own_->parameters.begin(), own_->parameters.end(), before);
    const std::lock_guard lock(mutex());
    std::erase_if(all(), [](const auto& book) { return book.expired(); });
    all().push_back(own_);
  }
  /// A loss is multiplied.
  void begin() {
    for (auto& entry : own_->parameters) entry.forgotten = entry.parameter->times_forgotten();
    own_->open = true;
  }
  /// The gradients are divided, or thrown away.
  void end() { own_->open = false; }
  /// Whether another scaler's losses are in some of the same gradients, as they are now.
  bool are_anothers() const {
    const std::lock_guard lock(mutex());
    for (const auto& book : all()) {
      const auto other = book.lock();
      if (!other || other == own_ || !other->open) continue;
      for (auto a = own_->parameters.begin(), b = other->parameters.begin();
           a != own_->parameters.end() && b != other->parameters.end();) {
        if (a->parameter == b->parameter && b->parameter->grad_arrived() &&
            b->parameter->times_forgotten() == b->forgotten)
          return true;
        before(*a, *b) ? ++a : ++b;
      }
    }
    return false;
  }

 private:
  struct Entry {
    const ParameterOn<D>* parameter;
    std::uint32_t forgotten;  // when the loss was multiplied
  };
  struct Book {
    std::vector<Entry> parameters;  // by address
    std::atomic<bool> open{false};
  };
  static bool before(const Entry& a, const Entry& b) { return std::less<>()(a.parameter, b.parameter); }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::vector<std::weak_ptr<Book>>& all() {
    static std::vector<std::weak_ptr<Book>> books;
    return books;
  }
  std::shared_ptr<Book> own_ = std::make_shared<Book>();
};
}  // namespace detail

/// An optimizer that knows better which gradients its step takes, as ShardedOptimizer does.
template <class Optimizer>
concept SharedOut = requires(Optimizer& optimizer, std::int32_t* found) {
  optimizer.in_parts();
  optimizer.make_largest(found);
};

///   scaler.scale(loss).backward();
///   scaler.step(optimizer);
///
/// A net has one scaler, or several that take turns, of which each steps before the next one scales a loss. Several
/// optimizers take one step together, `scaler.step(a, b)`: gradients are divided by the scale once, and either
/// all optimizers step or none.
///
/// Whether a step is left out is decided by the gradients after they were reduced over all devices. Sums keep what is
/// infinite or not a number, and all ranks hold the same bits, so all decide alike without a word; but where ranks have
/// parameters of their own, they have to ask each other: `GradScaler scaler{net}`. With a ShardedOptimizer they ask
/// each other in any case, since each rank may have averaged a part of the gradients alone.
///
/// What a communication hook with error feedback leaves for later steps has the scale of its gradients. A scaler that
/// was made for the net, `GradScaler scaler{net}`, multiplies it when the scale changes, but not on GPUs. There, and
/// where it was made of parameters, what is left over at each change counts once as much more, or less, as the scale
/// has changed: half for a scale that has doubled.
///
/// On GPUs the scale lies in device memory. A step that is captured by Graphed looks at its gradients there, and leaves
/// itself out there: the host never waits for it. An eager step waits, to say whether it has stepped.
template <Device D>
class GradScaler {
 public:
  /// Throws UsageError for options that make no sense.
  explicit GradScaler(std::vector<nn::NamedParameter<D>> parameters, const GradScalerOptions& options = {})
      : parameters_(std::move(parameters)),
        scale_(parameters_, checked(options)),
        gradients_(parameters_),
        least_(std::min(options.min_scale, options.init_scale)),
        most_(options.max_scale) {}
  /// Of all parameters of `net`. All ranks leave out the steps that any of them has to, and ask each other as long as
  /// `net` lives: afterwards that throws UsageError. Throws UsageError under a NonFinite policy, too.
  template <class Net>
  requires requires { Net::distributed; }
  explicit GradScaler(Net& net, const GradScalerOptions& options = {}) : GradScaler(net.parameters(), options) {
    if constexpr (requires { net.options().non_finite; })
      check<UsageError>(net.options().non_finite == std::remove_cvref_t<decltype(net.options().non_finite)>::propagate,
                        "GradScaler: the policy acts on gradients that are not finite before the scaler sees them; "
                        "expected NonFinite::propagate");
    if constexpr (Net::distributed)
      agree_ = chorus::detail::while_alive("GradScaler", net.alive(),
                                           [&net](std::int32_t* found) { net.make_largest(found); });
    if constexpr (std::is_same_v<D, Cpu> && requires { chorus::detail::access_to(net).scale_hook_rest(1.0); })
      follow_ = [&net, alive = net.alive()](double factor) {
        if (!alive.expired()) chorus::detail::access_to(net).scale_hook_rest(factor);
      };
  }

  /// The loss times the scale. Where gradients were unscaled since the last one, but not stepped by `step`, as by those
  /// who leave a step out or take it themselves, the scale first changes as if they had been.
  template <Operand X>
  auto scale(const X& loss) {
    if (std::exchange(unscaled_, false)) change([&] { scale_.leave(finite_); });
    stepped_.clear();
    gradients_.begin();
    return scale_.multiply(loss);
  }

  /// Divides all gradients by the scale, once a step; returns whether all are finite. For those who clip or look at
  /// gradients before the step. In a step that is captured it returns true: the device alone will know. Throws
  /// UsageError where no parameter has a gradient, unless it asks other ranks, and where it has been called since the
  /// last `step` or `scale`.
  bool unscale() {
    check_can_unscale();
    for (const auto& named : parameters_)
      check<UsageError>(agree_ || !(named.parameter->is_part() || named.parameter->one_of_a_part()), "GradScaler: '",
                        named.name, "' is in a part of the model that this rank has, and all ranks step or none: "
                        "GradScaler scaler{net}");
    check<UsageError>(agree_ || any_gradient(),
                      "GradScaler: no parameter has a gradient. Where a policy leaves a rank none, it has to ask the "
                      "others: GradScaler scaler{net}");
    begin_unscale();
    by_parameters_ = true;
    finite_ = false;  // unless all ranks can be asked
    return finite_ = scale_.unscale(parameters_, agree_);
  }
  /// The same for the gradients that a ShardedOptimizer steps, of which each rank may have averaged its part alone.
  /// All ranks call it, and return the same.
  template <SharedOut Sharded>
  bool unscale(Sharded& optimizer) {
    check_can_unscale();
    begin_unscale();
    by_parameters_ = finite_ = false;
    const auto unscale = [&](const std::vector<nn::NamedParameter<D>>& parameters) {
      finite_ = scale_.unscale(parameters, [&](std::int32_t* found) { optimizer.make_largest(found); });
    };
    if (optimizer.in_parts())
      optimizer.with_parts(unscale);
    else
      unscale(parameters_);  // whole gradients may be looked at elsewhere, too
    return finite_;
  }

  /// Steps with the unscaled gradients, or, where one is not finite, leaves the step out and makes the scale smaller.
  /// Returns whether it has stepped; true in a step that is captured. Throws UsageError for another optimizer than
  /// that of the last step, without a `scale` in between.
  template <std::derived_from<Optimizer<D>>... Optimizers>
  requires(sizeof...(Optimizers) > 0) bool step(Optimizers&... optimizers) {
    note_step({static_cast<const Optimizer<D>*>(&optimizers)...});
    const bool finite = unscaled_ ? finite_ : unscale();
    unscaled_ = false;
    change([&] { scale_.step(finite, optimizers...); });
    return finite;
  }

  /// The same for a ShardedOptimizer; all ranks step, or leave the step out. Throws UsageError after `unscale()` where
  /// ranks have parts of the averages, which `unscale(optimizer)` finds.
  template <SharedOut Sharded>
  bool step(Sharded& optimizer) {
    check<UsageError>(!unscaled_ || !by_parameters_ || !optimizer.in_parts(),
                      "GradScaler: unscale() has not seen the gradients, of which each rank has averaged a part: "
                      "expected unscale(optimizer)");
    note_step({&optimizer});
    const bool finite = unscaled_ ? finite_ : unscale(optimizer);
    unscaled_ = false;
    change([&] { scale_.step(finite, optimizer); });
    if (!finite) optimizer.skip_step();
    return finite;
  }

  /// On GPUs these wait for the device.
  double loss_scale() const { return scale_.scale(); }
  std::int64_t skipped_steps() const { return scale_.skipped(); }

  /// What a checkpoint keeps.
  struct State {
    double scale = 1;
    std::int64_t good_steps = 0;
  };
  State state() const { return {scale_.scale(), scale_.good_steps()}; }
  /// What the net's hook remembers stays as it is: that comes from the same checkpoint. A scale beyond the options'
  /// bounds, which they did not have in files of earlier versions, becomes the nearest within them.
  void set_state(const State& state) {
    check<UsageError>(is_scale(state.scale) && state.good_steps >= 0, "GradScaler: a state with scale ", state.scale,
                      " and ", state.good_steps, " good steps");
    scale_.set(std::clamp(state.scale, least_, most_), state.good_steps);
  }
  /// The same for a checkpoint's file.
  static constexpr std::string_view kept_as = "loss_scale";
  std::array<double, 2> kept() const { return {state().scale, static_cast<double>(state().good_steps)}; }
  static bool can_keep(const std::array<double, 2>& kept) {
    return is_scale(kept[0]) && kept[1] >= 0 && kept[1] < 1e15;
  }
  void keep(const std::array<double, 2>& kept) { set_state({kept[0], static_cast<std::int64_t>(kept[1])}); }

 private:
  static bool is_scale(double scale) { return scale > 0 && std::isfinite(scale); }
  static const GradScalerOptions& checked(const GradScalerOptions& options) {
    check<UsageError>(is_scale(options.init_scale) && options.growth_factor >= 1 && options.backoff_factor > 0 &&
                          options.backoff_factor <= 1 && options.growth_interval > 0,
                      "GradScaler: init_scale and growth_interval must be positive and finite, growth_factor at "
                      "least 1, backoff_factor in (0, 1]");
    check<UsageError>(is_scale(options.min_scale) && options.max_scale >= options.min_scale &&
                          options.max_scale >= options.init_scale,
                      "GradScaler: expected a positive min_scale, and a max_scale that is no smaller than that and "
                      "init_scale, got ",
                      options.min_scale, ", ", options.max_scale, " and ", options.init_scale);
    return options;
  }

  // Has `step()` change the scale, and what is kept in its unit follow.
  template <class Step>
  void change(const Step& step) {
    if (!follow_) return step();
    const double before = scale_.scale();
    step();
    if (const double after = scale_.scale(); after != before) follow_(after / before);
  }

  void begin_unscale() {
    check<UsageError>(!gradients_.are_anothers(),
                      "GradScaler: another scaler has multiplied a loss behind the same gradients, and has not divided "
                      "them: expected its step() before this one's scale(), or one scaler for both losses");
    gradients_.end();
    unscaled_ = true;
  }
  void check_can_unscale() const {
    check<UsageError>(!unscaled_,
                      "GradScaler: the gradients are unscaled already: expected a step() or a scale() "
                      "between two calls of unscale()");
    detail::check_averaged(parameters_);
  }
  // The same optimizer may step again: a rank that has run out of batches, under `join`, has no loss to scale.
  void note_step(std::initializer_list<const void*> optimizers) {
    check<UsageError>(
        stepped_.empty() || std::equal(stepped_.begin(), stepped_.end(), optimizers.begin(), optimizers.end()),
        "GradScaler: a second step() since the last scale() would divide gradients by the scale again: "
        "expected step(a, b) for several optimizers");
    stepped_.assign(optimizers);
  }

  bool any_gradient() const {
    return std::any_of(parameters_.begin(), parameters_.end(),
                       [](const auto& named) { return named.parameter->grad_arrived(); });
  }

  std::vector<nn::NamedParameter<D>> parameters_;
  detail::LossScale<D> scale_;
  detail::ScaledGradients<D> gradients_;
  double least_, most_;
  detail::AgreeOnFound agree_;
  std::function<void(double factor)> follow_;  // multiplies what a net's hook keeps
  std::vector<const void*> stepped_;           // since the last `scale`
  bool unscaled_ = false, by_parameters_ = false, finite_ = true;
};

template <Device D>
GradScaler(std::vector<nn::NamedParameter<D>>, const GradScalerOptions& = {}) -> GradScaler<D>;
template <class Net>
requires requires { Net::distributed; }
GradScaler(Net&, const GradScalerOptions& = {})->GradScaler<typename Net::device_type>;

}  // namespace chorus::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_GRAD_SCALER_HPP

// <chorus/optim/layerwise.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_LAYERWISE_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_LAYERWISE_HPP
/// Optimizers for large batches that scale each parameter's step by the ratio of its norm to its step's: LARS, LAMB.
/// They look at whole parameters, so that an optimizer of slices (ShardedOptimizer) cannot hold them.

namespace chorus::optim {

namespace detail {
/// `parameters`. Throws UsageError where one is a part of a parameter.
template <Device D>
[[gnu::cold]] std::vector<nn::NamedParameter<D>> all_whole(const char* optimizer,
                                                           std::vector<nn::NamedParameter<D>> parameters) {
  for (const auto& named : parameters)
    check<UsageError>(!named.parameter->is_part(), optimizer,
                      ": it needs whole parameters, and this rank has a part of '", named.name, "' alone");
  return parameters;
}

/// An array of one parameter's size beside the state.
template <class T, Device D>
class StepMemory {
 public:
  StepMemory(D device, Index count) : storage_(device, static_cast<std::size_t>(count) * sizeof(T)) {}
  T* data() const { return static_cast<T*>(storage_.data()); }

 private:
  Storage<D> storage_;
};

template <class T, Device D>
double norm(D device, Index count, const T* x) {
  return std::sqrt(kernels::square_sum(device, count, x));
}
}  // namespace detail

struct LarsOptions {
  double lr = 0.1, momentum = 0.9, weight_decay = 0;
  /// The share of a parameter's norm that a step may have at a learning rate of 1.
  double trust = 0.001, eps = 1e-8;
};

/// g += weight_decay p; m = momentum m + rate g with rate = lr trust |p| / (|gradient| + weight_decay |p| + eps), or lr
/// where |p| or |gradient| is 0; p -= m (You, Gitman, Ginsburg 2017). Parameters of at most one axis (biases,
/// normalisation) take plain steps of lr without weight decay.
template <Device D>
class Lars final : public Optimizer<D> {
 public:
  using options_type = LarsOptions;
  /// A step depends on norms of whole parameters, so that a piece of one can't be stepped alone.
  static constexpr bool needs_whole_parameters = true;

  /// Throws UsageError for negative options, and where this rank has only a part of a parameter.
  explicit Lars(std::vector<nn::NamedParameter<D>> parameters, const LarsOptions& options = {})
      : Optimizer<D>(detail::all_whole("Lars", std::move(parameters)), options.lr), options_(options) {
    check<UsageError>(options.momentum >= 0 && options.weight_decay >= 0 && options.trust > 0 && options.eps >= 0,
                      "Lars: momentum, weight_decay and eps are at least 0, trust above it; got ", options.momentum,
                      ", ", options.weight_decay, ", ", options.eps, " and ", options.trust);
  }

  void step() override {
    this->refuse_capture("Lars");
    this->for_each_range({.each_alone = true}, [&]<class T>(T, const typename Optimizer<D>::Range& range) {
      const auto device = this->device();
      const auto p = static_cast<T*>(range.value), m = static_cast<T*>(range.state[0]);
      const auto g = static_cast<const T*>(range.grad);
      double rate = this->lr_of(range), decay = 0;
      if (range.axes > 1) {
        decay = range.weight_decay(options_.weight_decay);
        const double of_p = detail::norm(device, range.count, static_cast<const T*>(p)),
                     of_g = detail::norm(device, range.count, g);
        if (of_p > 0 && of_g > 0) rate *= options_.trust * of_p / (of_g + decay * of_p + options_.eps);
      }
      detail::update(device, range.count, detail::Mix{options_.momentum, rate}, m, static_cast<const T*>(m), g);
      detail::update(device, range.count, detail::Mix{1, rate * decay}, m, static_cast<const T*>(m),
                     static_cast<const T*>(p));
      detail::update(device, range.count, detail::Mix{1, -1}, p, static_cast<const T*>(p), static_cast<const T*>(m));
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"momentum"};
    return names;
  }

 private:
  LarsOptions options_;
};

struct LambOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0.01;
};

namespace detail {
struct LambDirection {
  double first, second, eps, weight_decay;
  template <class S>
  CHORUS_HD S operator()(const S& m, const S& v, const S& p) const {
    using namespace math;
    using R = real_of<S>;
    return m * R(first) / (sqrt(v * R(second)) + R(eps)) + p * R(weight_decay);
  }
};
}  // namespace detail

/// Adam's direction with weight decay, u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p, and
/// p -= lr |p| / |u| u, or p -= lr u where |p| or |u| is 0 (You et al. 2020).
template <Device D>
class Lamb final : public Optimizer<D> {
 public:
  using options_type = LambOptions;
  /// A step depends on norms of whole parameters, so that a piece of one can't be stepped alone.
  static constexpr bool needs_whole_parameters = true;

  /// Throws UsageError for betas outside of [0, 1), for negative eps or weight_decay, and where this rank has only a
  /// part of a parameter.
  explicit Lamb(std::vector<nn::NamedParameter<D>> parameters, const LambOptions& options = {})
      : Optimizer<D>(detail::all_whole("Lamb", std::move(parameters)), options.lr), options_(options) {
    check<UsageError>(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                      "Lamb: betas are in [0, 1), got ", options.beta1, " and ", options.beta2);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0, "Lamb: eps and weight_decay are at least 0, got ",
                      options.eps, " and ", options.weight_decay);
  }

  void step() override {
    this->refuse_capture("Lamb");
    this->for_each_range({.each_alone = true}, [&]<class T>(T, const typename Optimizer<D>::Range& range) {
      const auto device = this->device();
      const auto p = static_cast<T*>(range.value), m = static_cast<T*>(range.state[0]),
                 v = static_cast<T*>(range.state[1]);
      const auto g = static_cast<const T*>(range.grad);
      const auto t = static_cast<double>(range.steps + 1);
      detail::update(device, range.count, detail::Mix{options_.beta1, 1 - options_.beta1}, m, static_cast<const T*>(m),
                     g);
      detail::update(device, range.count, detail::MixSquare{options_.beta2, 1 - options_.beta2}, v,
                     static_cast<const T*>(v), g);
      const detail::StepMemory<T, D> u(device, range.count);
      detail::update(device, range.count,
                     detail::LambDirection{1 / (1 - std::pow(options_.beta1, t)), 1 / (1 - std::pow(options_.beta2, t)),
                                           options_.eps, range.weight_decay(options_.weight_decay)},
                     u.data(), static_cast<const T*>(m), static_cast<const T*>(v), static_cast<const T*>(p));
      const double of_p = detail::norm(device, range.count, static_cast<const T*>(p)),
                   of_u = detail::norm(device, range.count, static_cast<const T*>(u.data()));
      const double rate = this->lr_of(range) * (of_p > 0 && of_u > 0 ? of_p / of_u : 1);
      detail::update(device, range.count, detail::Mix{1, -rate}, p, static_cast<const T*>(p),
                     static_cast<const T*>(u.data()));
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg", "exp_avg_sq"};
    return names;
  }

 private:
  LambOptions options_;
};

}  // namespace chorus::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_LAYERWISE_HPP

// <chorus/optim/lion.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_LION_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_LION_HPP
/// Lion (Chen et al. 2023).

namespace chorus::optim {

struct LionOptions {
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
};

namespace detail {
struct LionStep {
  double lr, beta1, weight_decay;
  template <class S>
  CHORUS_HD S operator()(const S& p, const S& g, const S& m) const {
    using namespace math;
    using R = real_of<S>;
    const S mixed = m * R(beta1) + g * R(1 - beta1);
    const S sign = where(mixed > 0, S(1), where(mixed < 0, S(-1), S(0)));
    return p * R(1 - lr * weight_decay) - sign * R(lr);
  }
};
}  // namespace detail

/// p -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay p); m = beta2 m + (1 - beta2) g.
template <Device D>
class Lion final : public Optimizer<D> {
 public:
  using options_type = LionOptions;

  /// Throws UsageError for betas outside of [0, 1) and a negative weight_decay.
  explicit Lion(std::vector<nn::NamedParameter<D>> parameters, const LionOptions& options = {})
      : Optimizer<D>(std::move(parameters), options.lr), options_(options) {
    check<UsageError>(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                      "Lion: betas are in [0, 1), got ", options.beta1, " and ", options.beta2);
    check<UsageError>(options.weight_decay >= 0, "Lion: weight_decay is at least 0, got ", options.weight_decay);
  }

  void step() override {
    this->refuse_capture("Lion");
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      const auto device = this->device();
      const auto p = static_cast<T*>(range.value), m = static_cast<T*>(range.state[0]);
      const auto g = static_cast<const T*>(range.grad);
      detail::update(device, range.count,
                     detail::LionStep{this->lr_of(range), options_.beta1, range.weight_decay(options_.weight_decay)}, p,
                     static_cast<const T*>(p), g, static_cast<const T*>(m));
      detail::update(device, range.count, detail::Mix{options_.beta2, 1 - options_.beta2}, m, static_cast<const T*>(m),
                     g);
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg"};
    return names;
  }

 private:
  LionOptions options_;
};

}  // namespace chorus::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_LION_HPP

// <chorus/optim/update_bn.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_UPDATE_BN_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_UPDATE_BN_HPP
/// Batch norm's running statistics for parameters that no pass in training has computed with, as averaged ones are.

namespace chorus::optim {

namespace detail {

/// A model in training mode whose batch norms take the mean over all batches; afterwards all are as they were.
class BatchNormPasses {
 public:
  explicit BatchNormPasses(nn::Module& model) {
    struct Modules final : nn::detail::Walker {
      std::vector<nn::Module*> all;
      void enter(nn::Module& module) override { all.push_back(&module); }
    } modules;
    modules.all.push_back(&model);
    modules.walk(model);
    for (nn::Module* module : modules.all) {
      modes_.emplace_back(module, module->training());
      auto* norm = dynamic_cast<nn::RunningStatistics*>(module);
      if (norm != nullptr && norm->tracks_running_stats()) norms_.emplace_back(norm, norm->momentum());
    }
  }
  void begin() {
    for (const auto& [module, training] : modes_) module->set_own_training(true);
    for (const auto& [norm, momentum] : norms_) {
      norm->reset_running_stats();
      norm->set_momentum(std::nullopt);
    }
  }
  ~BatchNormPasses() {
    for (const auto& [module, training] : modes_) module->set_own_training(training);
    for (const auto& [norm, momentum] : norms_) norm->set_momentum(momentum);
  }
  BatchNormPasses(const BatchNormPasses&) = delete;
  BatchNormPasses& operator=(const BatchNormPasses&) = delete;

  const auto& norms() const { return norms_; }

 private:
  std::vector<std::pair<nn::Module*, bool>> modes_;
  std::vector<std::pair<nn::RunningStatistics*, std::optional<double>>> norms_;
};

/// A model's input: the first part of a loader's batch, or all of it.
template <class Batch>
const auto& input_of(const Batch& batch) {
  if constexpr (AnyTensor<Batch>)
    return batch;
  else if constexpr (requires { batch.template get<0>(); })
    return batch.template get<0>();
  else
    return std::get<0>(batch);
}

/// Each rank's statistics become their mean over all ranks, in which each counts by its batches.
template <class Net>
void average_statistics(Net& net, const BatchNormPasses& passes) {
  std::vector<double> numbers;
  for (const auto& [norm, momentum] : passes.norms()) {
    auto own = norm->running_stats();
    for (std::size_t i = 1; i < own.size(); ++i) own[i] *= own[0];
    numbers.insert(numbers.end(), own.begin(), own.end());
  }
  net.sum(std::span(numbers));
  auto at = numbers.begin();
  for (const auto& [norm, momentum] : passes.norms()) {
    const double batches = *at++;
    const auto end = at + static_cast<std::ptrdiff_t>(norm->running_stats().size() - 1);
    for (auto number = at; number != end; ++number) *number /= batches;
    if (batches > 0) norm->set_running_stats({at, end});
    at = end;
  }
}

}  // namespace detail

/// Makes the running statistics of all batch norms in `net`, a policy or a model, anew: the means over all batches that
/// `passes` computes, each of which counts the same (torch.optim.swa_utils.update_bn). `passes` is a loader, of whose
/// batches the net takes the first part, or a function that calls the net as often as it likes:
///   optim::AveragedScope use{average, net};
///   optim::update_bn(net, loader);
///   optim::update_bn(net, [&] { for (auto& [x, mask, y] : loader) net(x, mask); });
/// The net is in training mode meanwhile, and records no gradients. Afterwards its modules are in training or
/// evaluation as before, and the momenta are what they were.
///
/// All ranks make the call, each with its share of the batches; the statistics are then the mean over all ranks of each
/// one's own, the same on all. Under DataParallel they are those of the first device's shares, as in training. With
/// SyncBatchNorm they are those of whole batches, under each policy. Nothing happens where there are no batch norms
/// that keep statistics; where there is no batch, they are those of new layers.
template <class Net, class Passes>
void update_bn(Net& net, Passes&& passes) {
  auto& model = [&]() -> auto& {
    if constexpr (requires { net.module(); })
      return net.module();
    else
      return net;
  }();
  detail::BatchNormPasses scope(model);
  if (scope.norms().empty()) return;
  scope.begin();
  {
    const NoGrad no_grad;
    if constexpr (std::is_invocable_v<Passes&>)
      passes();
    else
      for (auto&& batch : passes) net(detail::input_of(batch));
  }
  if constexpr (requires { requires Net::distributed; }) detail::average_statistics(net, scope);
}

}  // namespace chorus::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_UPDATE_BN_HPP

// <chorus/parallel/fused_optimizer.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_FUSED_OPTIMIZER_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_FUSED_OPTIMIZER_HPP
/// Optimizers whose step is part of backward: parameters move as soon as their averaged gradient is there.

namespace chorus {

/// An optimizer of type `Opt` for each parameter of a DistributedDataParallel net, which steps it in the middle of
/// backward, while its gradient is still in the cache and other buckets are under way. The training loop stays the
/// same: `step()` finds nothing left to do. What needs all gradients at once, before any step, does not go together
/// with it: clipping, NonFinite policies, several backward passes per step (but for those under no_sync). Under other
/// policies nothing is under way meanwhile, and `step()` steps.
///
///   ch::FusedOptimizer<ch::optim::Sgd<ch::Cpu>> optimizer{net, {.lr = 0.1, .momentum = 0.9}};
template <class Opt>
class FusedOptimizer : public optim::HasLearningRate {
  using D = decltype(std::declval<const Opt&>().device());

 public:
  /// Steps all parameters of `net`, as long as that lives. Throws UsageError where another optimizer does so,
  /// and under canonical shares.
  template <class Net>
  FusedOptimizer(Net& net, const typename Opt::options_type& options)
      : HasLearningRate(options.lr), options_(options), parameters_(net.parameters()) {
    for (const auto& named : parameters_) optimizers_.push_back(std::make_unique<Opt>(std::vector{named}, options));
    const auto while_there = [&net](auto call) {
      return detail::while_alive("FusedOptimizer", net.alive(), std::move(call));
    };
    check_there_ = while_there([] {});
    if constexpr (requires { detail::access_to(net).step_in_backward({}); }) {
      check<UsageError>(net.canonical_shares() == 0,
                        "FusedOptimizer: with canonical shares gradients are complete when backward has ended: "
                        "expected the plain optimizer");
      step_in_backward(net);
      step_ = check_there_;
      remove_ = [&net, alive = net.alive()] {
        if (!alive.expired()) detail::access_to(net).step_in_backward({});
      };
    } else {
      step_ = while_there([this] {
        for (auto& optimizer : optimizers_) step_one(*optimizer);
      });
    }
  }
  FusedOptimizer(const FusedOptimizer&) = delete;
  FusedOptimizer& operator=(const FusedOptimizer&) = delete;
  ~FusedOptimizer() {
    if (remove_) remove_();
  }

  /// Nothing where backward has done it. Throws UsageError where the net is gone.
  void step() { step_(); }
  /// Forgets all gradients.
  void zero_grad() {
    for (auto& optimizer : optimizers_) optimizer->zero_grad();
  }
  /// See Optimizer::set_group.
  template <class Chosen>
  void set_group(const Chosen& chosen, const optim::GroupOptions& options) {
    check_there_();
    Opt(parameters_, options_).set_group(chosen, options);  // throws what the plain one does
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (chosen(std::as_const(parameters_[i]))) optimizers_[i]->set_group([](const auto&) { return true; }, options);
  }
  /// See Optimizer::no_decay_on_biases_and_norms.
  void no_decay_on_biases_and_norms() { set_group(optim::IsBiasOrNorm{}, {.weight_decay = 0}); }
  /// The state of all parameters, for checkpoints.
  std::vector<optim::StateTensor> state() {
    std::vector<optim::StateTensor> all;
    for (auto& optimizer : optimizers_)
      for (auto& tensor : optimizer->state()) all.push_back(std::move(tensor));
    return all;
  }
  auto device() const { return optimizers_.front()->device(); }

 private:
  template <class Net>
  void step_in_backward(Net& net) {
    using Parameter = ParameterOn<D>;
    std::vector<std::pair<const Parameter*, Opt*>> found;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      found.emplace_back(parameters_[i].parameter, optimizers_[i].get());
    std::sort(found.begin(), found.end());
    detail::access_to(net).step_in_backward([this, found = std::move(found)](const Parameter& parameter) {
      step_one(*std::lower_bound(found.begin(), found.end(), std::pair<const Parameter*, Opt*>(&parameter, nullptr))
                    ->second);
    });
  }
  void step_one(Opt& optimizer) {
    optimizer.set_lr(lr());  // a schedule knows this object alone
    optimizer.step();
  }

  typename Opt::options_type options_;
  std::vector<nn::NamedParameter<D>> parameters_;
  std::vector<std::unique_ptr<Opt>> optimizers_;       // one for each
  std::function<void()> check_there_, step_, remove_;  // what knows the net's type
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_FUSED_OPTIMIZER_HPP

// <chorus/parallel/hooks/compress.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_COMPRESS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_COMPRESS_HPP
/// Gradients that travel in 2 bytes a number.

// <chorus/parallel/hooks/bucket_states.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_BUCKET_STATES_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_BUCKET_STATES_HPP
/// What a communication hook keeps of each bucket from step to step.

namespace chorus::detail {

/// A hook doesn't know its model's scalar and device types; what it keeps does. A bucket's index has one type of state.
/// A copy is for another net, with other buckets: it has nothing yet.
class BucketStates {
 public:
  BucketStates() = default;
  BucketStates(const BucketStates&) {}
  BucketStates(BucketStates&&) = default;
  BucketStates& operator=(const BucketStates& other) {
    if (this != &other) clear();
    return *this;
  }
  BucketStates& operator=(BucketStates&&) = default;

  template <class State>
  State& of(std::size_t index) {
    if (states_.size() <= index) states_.resize(index + 1);
    if (!states_[index]) states_[index] = std::make_shared<State>();
    return *static_cast<State*>(states_[index].get());
  }
  void clear() { states_.clear(); }

 private:
  std::vector<std::shared_ptr<void>> states_;
};

/// `tensor` with `count` numbers; 0 where it is new.
template <Scalar T, Device D>
void grow(Tensor<T, 1, D>& tensor, std::size_t count, D device) {
  if (tensor.defined() && tensor.numel() == static_cast<Index>(count)) return;
  const MemoryScope scope(trace::Memory::buckets);
  tensor = Tensor<T, 1, D>::zeros({static_cast<Index>(count)}, device);
}

/// This rank's weight in units of that of an even share. What has not been sent waits in the unit of an even share,
/// since the next step may weigh this rank otherwise; without samples it waits on.
template <Scalar T>
T even_shares(double weight, int ranks) {
  return static_cast<T>(weight * ranks);
}

/// Adds to the gradients what has not been sent yet, of which nothing is left then: one rank alone sends nothing, and
/// may have it from a checkpoint of several.
template <Scalar T, Device D>
void add_rest(Tensor<T, 1, D>& rest, std::span<T> gradients, D device) {
  if (!rest.defined()) return;
  kernels::axpy(device, rest.numel(), T{1}, rest.data(), gradients.data());
  zero_bytes(device, rest.data(), gradients.size_bytes());
}

}  // namespace chorus::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_BUCKET_STATES_HPP

// <chorus/parallel/hooks/not_sent.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_NOT_SENT_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_NOT_SENT_HPP
/// What a compressed gradient leaves for the next step.

namespace chorus::detail {

/// gradient - sent; nothing where one of them is not finite, which would stay for ever.
struct NotSent {
  template <class S>
  CHORUS_HD S operator()(const S& gradient, const S& sent) const {
    using namespace math;
    using R = real_of<S>;
    const S rest = gradient - sent;
    return where(rest < R(INFINITY), where(rest > -R(INFINITY), rest, S(0)), S(0));
  }
};

}  // namespace chorus::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_NOT_SENT_HPP

namespace chorus {

/// An all-reduce of numbers of type `Wire`. A rank's gradients are weighed in their own type and then rounded, once;
/// what ranks pass on is rounded again, and only added up in float. What the rounding cuts off is added to the
/// next step's gradient (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014), unless `error_feedback`
/// is off. Each of n ranks sends 2 (n - 1) / n of the bucket's numbers, of 2 bytes each.
template <Narrow Wire>
struct Compress {
  bool error_feedback = true;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    auto& state = states.of<State<T, D>>(bucket.index);
    if (communicator.size() == 1) {
      detail::add_rest(state.rest, bucket.gradients, bucket.device);
      return {};
    }
    const auto count = static_cast<Index>(bucket.gradients.size());
    T* grad = bucket.gradients.data();
    detail::grow(state.wire, bucket.gradients.size(), bucket.device);
    // The wire's type has no room for the weight: a third in bf16 is off by 0.2 %.
    if (bucket.weight != 1) kernels::scale(bucket.device, count, static_cast<T>(bucket.weight), grad);
    const bool remembers = error_feedback && bucket.weight > 0;
    const auto ranks = static_cast<T>(communicator.size());  // the rest is in units of an even share
    if (error_feedback) detail::grow(state.rest, bucket.gradients.size(), bucket.device);
    if (remembers) kernels::axpy(bucket.device, count, T{1} / ranks, state.rest.data(), grad);
    kernels::convert(bucket.device, count, grad, state.wire.data());
    if (remembers) {
      kernels::convert(bucket.device, count, state.wire.data(), state.rest.data());
      kernels::pointwise_forward(bucket.device, detail::NotSent{}, count,
                                 std::array<const T*, 2>{grad, state.rest.data()}, state.rest.data());
      kernels::scale(bucket.device, count, ranks, state.rest.data());
    }
    return communicator.all_reduce_async(std::span<Wire>(state.wire.data(), bucket.gradients.size()),
                                         comm::ReduceOp::sum, {.traffic = trace::Traffic::gradients});
  }

  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int) {
    if (communicator.size() > 1)
      kernels::convert(bucket.device, static_cast<Index>(bucket.gradients.size()),
                       states.of<State<T, D>>(bucket.index).wire.data(), bucket.gradients.data());
    return {};
  }

  void reset() { states.clear(); }
  template <class T, Device D, class Visit>
  void remembered(const GradBucket<T, D>& bucket, bool make, const Visit& visit) {
    auto& rest = states.of<State<T, D>>(bucket.index).rest;
    if (make && error_feedback) detail::grow(rest, bucket.gradients.size(), bucket.device);
    if (!rest.defined()) return;
    for (const auto& part : bucket.parts) visit("rest", part, part.shape, bucket.device, rest.data() + part.begin);
  }

  template <class T, class D>
  struct State {
    Tensor<Wire, 1, D> wire;
    Tensor<T, 1, D> rest;  // what has not been sent yet
  };
  detail::BucketStates states = {};
};

/// 3 decimal digits and the exponents of float: any gradient fits.
using Bf16Compress = Compress<bf16>;
/// 3.3 decimal digits; gradients that are beyond 65504 once they are weighed, or added up, become infinite, those below
/// 6e-8 are left for later steps.
using Fp16Compress = Compress<half>;

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_COMPRESS_HPP

// <chorus/parallel/hooks/hybrid_reduce_scatter.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_HYBRID_REDUCE_SCATTER_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_HYBRID_REDUCE_SCATTER_HPP
/// Averages gradients in parts, where groups of ranks have the same parts.

namespace chorus {

/// Each rank of `shards` gets the sum of its part of the group's gradients, as by ReduceScatter, and then that of the
/// ranks of `replicas`, which have the same part in other groups (Zhao et al., "PyTorch FSDP", VLDB 2023, hybrid
/// sharding): of d groups of s ranks each rank sends (s - 1) / s + 2 (d - 1) / (d s) of the model's bytes. Both
/// communicators must outlive it.
template <class Communicator>
struct HybridReduceScatter {
  Communicator *shards, *replicas;
  static constexpr bool in_parts = true, several_rounds = true;

  template <class T, Device D, class All>
  comm::Work start(const GradBucket<T, D>& bucket, All&) {
    return ReduceScatter().start(bucket, *shards);
  }
  template <class T, Device D, class All>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, All&, int round) {
    if (round == 0)
      if (auto rest = ReduceScatter().resume(bucket, *shards, 0)) return rest;
    if (replicas->size() == 1 || round > (left_over(bucket) ? 1 : 0)) return {};
    const auto part = ddp::part_of(bucket.gradients.size(), static_cast<std::size_t>(shards->rank()),
                                   static_cast<std::size_t>(shards->size()));
    // The weight has been multiplied by already, but where there is one shard alone.
    return replicas->all_reduce_async(
        bucket.gradients.subspan(part.begin, part.end - part.begin), comm::ReduceOp::sum,
        {.scale = shards->size() == 1 ? bucket.weight : 1,
         .traffic = trace::Traffic::gradients,
         .bucket = static_cast<int>(bucket.index)});
  }

 private:
  template <class Bucket>
  bool left_over(const Bucket& bucket) const {
    return bucket.gradients.size() % static_cast<std::size_t>(shards->size()) != 0;
  }
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_HYBRID_REDUCE_SCATTER_HPP

// <chorus/parallel/hooks/post_local_sgd.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_POST_LOCAL_SGD_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_POST_LOCAL_SGD_HPP
/// Post-local SGD: gradients are averaged at first, and parameters every few steps from then on.

// <chorus/parallel/local_steps.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_LOCAL_STEPS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_LOCAL_STEPS_HPP
/// Local SGD: ranks step parameters by themselves, and average these every few steps. What the policy LocalSgd and the
/// communication hook PostLocalSgd have in common.

namespace chorus::detail {

/// The steps of one rank. It knows which parameters ranks have stepped by themselves since they last had the same: no
/// others are averaged, for the mean of equal numbers may differ from them in its last digit.
class LocalSteps {
 public:
  int steps = 0;  ///< since the last average

  /// A forward pass begins. First, where it is due, comes the average, which `average()` takes; then a step may follow,
  /// of all parameters that want gradients and of which `shared(name)`.
  template <Device D, class Shared, class Average>
  void begin_pass(const nn::FlatParameters<D>& flat, const Shared& shared, bool due, const Average& average) {
    if (due) average();
    for (const auto& entry : flat.entries())
      if (entry.parameter().wants_grad() && shared(entry.named.name)) add(&entry.parameter());
  }
  /// Their names, for checkpoints.
  template <Device D>
  std::vector<std::string> names(const nn::FlatParameters<D>& flat) const {
    std::vector<std::string> all;
    for (const auto& entry : flat.entries())
      if (is_stepped(entry)) all.push_back(entry.named.name);
    return all;
  }
  template <Device D>
  void set(const nn::FlatParameters<D>& flat, std::span<const std::string> names) {
    stepped_.clear();
    for (const auto& entry : flat.entries())
      if (std::find(names.begin(), names.end(), entry.named.name) != names.end()) add(&entry.parameter());
  }

  bool empty() const { return stepped_.empty(); }

  /// Adds those that other ranks have stepped. All ranks call it.
  template <Device D, class Communicator>
  void unite(const nn::FlatParameters<D>& flat, Communicator& communicator) {
    std::vector<std::uint8_t> marks;
    for (const auto& entry : flat.entries()) marks.push_back(is_stepped(entry) ? 1 : 0);
    communicator.all_reduce(std::span(marks), comm::ReduceOp::max, {});
    for (std::size_t i = 0; i < marks.size(); ++i)
      if (marks[i] != 0) add(&flat.entries()[i].parameter());
  }

  /// Replaces them by sum(weight * parameters) over the ranks; the weights add up to 1. Each of n ranks sends
  /// 2 (n - 1) / n of their bytes. Throws UsageError for parameters that are not F32 or F64.
  template <Device D, class Communicator>
  void average(const nn::FlatParameters<D>& flat, Communicator& communicator, double weight) {
    const auto& entries = flat.entries();
    for (std::size_t i = 0; i < entries.size();) {
      const std::size_t first = i;
      while (i < entries.size() && entries[i].group == entries[first].group && is_stepped(entries[i])) ++i;
      if (i == first) {
        ++i;
      } else if (communicator.size() > 1) {
        average(flat.groups()[entries[first].group], entries[first].begin, entries[i - 1].begin + entries[i - 1].count,
                communicator, weight);
        for (std::size_t k = first; k < i; ++k) entries[k].parameter().touch();
      }
    }
    stepped_.clear();
    steps = 0;
  }

 private:
  void add(const void* parameter) {
    const auto place = std::lower_bound(stepped_.begin(), stepped_.end(), parameter, std::less<>());
    if (place == stepped_.end() || *place != parameter) stepped_.insert(place, parameter);
  }
  template <class Entry>
  bool is_stepped(const Entry& entry) const {
    return std::binary_search(stepped_.begin(), stepped_.end(), &entry.parameter(), std::less<const void*>());
  }
  template <class Group, class Communicator>
  static void average(const Group& group, std::size_t begin, std::size_t end, Communicator& communicator,
                      double weight) {
    ddp::with_type("averaging parameters", group.dtype, group.value(begin), [&]<class T>(T* values) {
      communicator.all_reduce(std::span<T>(values, end - begin), comm::ReduceOp::sum,
                              {.scale = weight, .traffic = trace::Traffic::parameters});
    });
  }

  std::vector<const void*> stepped_;  // sorted
};

}  // namespace chorus::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_LOCAL_STEPS_HPP

namespace chorus {

/// Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020. The average is taken at the
/// beginning of the forward pass that follows; between averages, ranks have different parameters: call the policy's
/// `eval()`, on all ranks, before these are tested or saved. Each of n ranks sends 2 (n - 1) / n of the model's bytes
/// in each of the first `start_local_sgd_iter` steps, and then every `period` steps.
struct PostLocalSgd {
  static constexpr bool own_gradients = true;

  int start_local_sgd_iter = 100;
  int period = 4;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    if (!averages()) return {};
    return AllReduce{}.start(bucket, communicator);
  }

  bool averages() const { return steps < start_local_sgd_iter; }
  /// A backward pass that synchronises has ended; the optimizer's step follows.
  void after_backward() {
    check<UsageError>(period > 0, "PostLocalSgd: the period is at least 1, got ", period);
    if (steps++ < start_local_sgd_iter) return;
    ++stepped.steps;
    due = (steps - start_local_sgd_iter) % period == 0;
  }
  template <Device D, class Communicator, class Shared>
  void before_forward(const nn::FlatParameters<D>& flat, Communicator& communicator, const Shared& shared) {
    if (!averages()) stepped.begin_pass(flat, shared, due, [&] { synchronise(flat, communicator); });
  }
  template <Device D, class Communicator>
  void synchronise(const nn::FlatParameters<D>& flat, Communicator& communicator) {
    if (stepped.steps > 0) stepped.average(flat, communicator, 1.0 / communicator.size());
    due = false;
  }

  /// Once ranks step by themselves, momenta differ, too, and stay so.
  bool ranks_differ() const { return steps > start_local_sgd_iter; }
  /// What a checkpoint keeps.
  static constexpr std::string_view kept_as = "post_local_sgd";
  std::array<double, 3> kept() const {
    return {static_cast<double>(steps), due ? 1.0 : 0.0, stepped.steps > 0 ? 1.0 : 0.0};
  }
  static bool can_keep(const std::array<double, 3>& kept) { return kept[0] >= 0 && kept[0] < 1e9; }
  void keep(const std::array<double, 3>& kept) {
    steps = static_cast<int>(kept[0]);
    due = kept[1] != 0;
    stepped.steps = kept[2] != 0 ? 1 : 0;  // how many it was does not matter
  }

  int steps = 0;
  bool due = false;  ///< an average is to be taken
  detail::LocalSteps stepped = {};
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_POST_LOCAL_SGD_HPP

// <chorus/parallel/hooks/power_sgd.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_POWER_SGD_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_POWER_SGD_HPP
/// PowerSGD: gradients that travel as products of two thin matrices (Vogels, Karimireddy, Jaggi, "PowerSGD: practical
/// low-rank gradient compression for distributed optimization", NeurIPS 2019).

namespace chorus {

/// A parameter of shape [n, ...] is an n x m matrix M, gradient and what earlier steps have left out. One step of
/// subspace iteration: P = mean of M Q over ranks, made orthonormal; Q = mean of M' P; the gradient becomes P Q', and
/// this rank's M - P Q' waits for the next step. Sent are rank (n + m) numbers in place of n m, twice (n - 1) / n each,
/// in two all-reduces. Vectors, and matrices that this does not make much smaller, go as they are.
struct PowerSgd {
  static constexpr bool several_rounds = true;
  /// Columns of P and Q. 1 or 2 are usual.
  Index matrix_approximation_rank = 1;
  /// So many steps are averaged in full at first, while gradients change most.
  int start_powersgd_iter = 0;
  /// How many times fewer numbers have to be sent for it to be done: rank (n + m) min_compression_rate < n m.
  double min_compression_rate = 2;
  /// Whether what is left out waits for the next step; without, it is lost, and needs no memory.
  bool use_error_feedback = true;
  /// Whether a step begins with the last one's Q; without, with random numbers, new ones each time.
  bool warm_start = true;
  std::uint64_t seed = 0;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    check<UsageError>(matrix_approximation_rank >= 1, "PowerSgd: matrix_approximation_rank is at least 1, got ",
                      matrix_approximation_rank);
    check<UsageError>(min_compression_rate > 0, "PowerSgd: min_compression_rate is above 0, got ",
                      min_compression_rate);
    auto& state = states.of<State<T, D>>(bucket.index);
    if (communicator.size() == 1) {
      detail::add_rest(state.rest, bucket.gradients, bucket.device);
      return {};
    }
    state.full = steps < start_powersgd_iter;
    if (state.full) return communicator.all_reduce_async(bucket.gradients, comm::ReduceOp::sum, options(bucket.weight));
    if (state.matrices.empty()) lay_out(bucket, state);
    if (!warm_start) draw_second(bucket, state);
    const T even = detail::even_shares<T>(bucket.weight, communicator.size());
    if (use_error_feedback && even > 0)
      kernels::axpy(bucket.device, state.rest.numel(), T{1} / even, state.rest.data(), bucket.gradients.data());
    for (const Matrix& matrix : state.matrices) {
      const T* grad = bucket.gradients.data() + matrix.begin;
      T* to = state.first.data() + matrix.in_first;
      if (matrix.low_rank())
        kernels::gemm(bucket.device, no, no, matrix.rows, matrix.rank, matrix.columns, grad, matrix.columns,
                      state.second.data() + matrix.in_second, matrix.rank, to, matrix.rank, false);
      else
        copy_bytes(bucket.device, to, bucket.device, grad, static_cast<std::size_t>(matrix.rows) * sizeof(T));
    }
    return communicator.all_reduce_async(
        std::span<T>(state.first.data(), static_cast<std::size_t>(state.first.numel())), comm::ReduceOp::sum,
        options(bucket.weight));
  }

  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int round) {
    if (communicator.size() == 1) return {};
    auto& state = states.of<State<T, D>>(bucket.index);
    if (state.full) return {};
    if (round == 0) {
      for (std::size_t i = 0; i < state.matrices.size(); ++i) {
        const Matrix& matrix = state.matrices[i];
        if (!matrix.low_rank()) continue;
        T* p = state.first.data() + matrix.in_first;
        orthonormalise(bucket.device, matrix, bucket.parts[i].name, p);
        kernels::gemm(bucket.device, yes, no, matrix.columns, matrix.rank, matrix.rows,
                      bucket.gradients.data() + matrix.begin, matrix.columns, p, matrix.rank,
                      state.second.data() + matrix.in_second, matrix.rank, false);
      }
      return communicator.all_reduce_async(
          std::span<T>(state.second.data(), static_cast<std::size_t>(state.second.numel())), comm::ReduceOp::sum,
          options(bucket.weight));
    }
    const T even = detail::even_shares<T>(bucket.weight, communicator.size());
    const bool leaves_rest = use_error_feedback && even > 0;
    if (leaves_rest)
      copy_bytes(bucket.device, state.rest.data(), bucket.device, bucket.gradients.data(),
                 bucket.gradients.size_bytes());
    for (const Matrix& matrix : state.matrices) {
      T* grad = bucket.gradients.data() + matrix.begin;
      const T* first = state.first.data() + matrix.in_first;
      if (matrix.low_rank())
        kernels::gemm(bucket.device, no, yes, matrix.rows, matrix.columns, matrix.rank, first, matrix.rank,
                      state.second.data() + matrix.in_second, matrix.rank, grad, matrix.columns, false);
      else
        copy_bytes(bucket.device, grad, bucket.device, first, static_cast<std::size_t>(matrix.rows) * sizeof(T));
    }
    if (leaves_rest) {
      kernels::axpy(bucket.device, state.rest.numel(), T{-1}, bucket.gradients.data(), state.rest.data());
      for (const Matrix& matrix : state.matrices)  // what was sent in full leaves no rest
        if (!matrix.low_rank())
          zero_bytes(bucket.device, state.rest.data() + matrix.begin,
                     static_cast<std::size_t>(matrix.rows) * sizeof(T));
      if (even != T{1}) kernels::scale(bucket.device, state.rest.numel(), even, state.rest.data());
    }
    // A gradient that was not finite would stay for ever. All ranks have this Q.
    if (!std::isfinite(kernels::square_sum(bucket.device, state.second.numel(), state.second.data()))) state = {};
    return {};
  }

  void after_backward() { ++steps; }
  void reset() { states.clear(); }
  template <class T, Device D, class Visit>
  void remembered(const GradBucket<T, D>& bucket, bool make, const Visit& visit) {
    auto& state = states.of<State<T, D>>(bucket.index);
    if (make && state.matrices.empty()) lay_out(bucket, state);
    for (std::size_t i = 0; i < state.matrices.size(); ++i) {
      const auto& part = bucket.parts[i];
      const auto& matrix = state.matrices[i];
      if (use_error_feedback) visit("rest", part, part.shape, bucket.device, state.rest.data() + part.begin);
      const std::array<Index, 2> shape{matrix.columns, matrix.rank};
      if (matrix.low_rank() && warm_start)
        visit("q", part, std::span<const Index>(shape), bucket.device, state.second.data() + matrix.in_second);
    }
  }
  /// What a checkpoint keeps: the steps so far.
  static constexpr std::string_view kept_as = "power_sgd";
  std::array<double, 1> kept() const { return {static_cast<double>(steps)}; }
  static bool can_keep(const std::array<double, 1>& kept) { return kept[0] >= 0 && kept[0] < 1e9; }
  void keep(const std::array<double, 1>& kept) { steps = static_cast<int>(kept[0]); }

  /// A parameter: `rows` x `columns` numbers, approximated by `rank` columns; rank 0: it goes in full, as `rows`
  /// numbers.
  struct Matrix {
    std::size_t begin, in_first, in_second;
    Index rows, columns, rank;
    bool low_rank() const { return rank > 0; }
  };
  template <class T, class D>
  struct State {
    std::vector<Matrix> matrices;
    Tensor<T, 1, D> rest;           // what has not been sent yet
    Tensor<T, 1, D> first, second;  // all P, and what goes in full; all Q
    bool full = false;
  };
  int steps = 0;
  detail::BucketStates states = {};

 private:
  static constexpr auto no = kernels::Trans::no, yes = kernels::Trans::yes;

  static comm::CollectiveOptions options(double weight) {
    return {.scale = weight, .traffic = trace::Traffic::gradients};
  }

  template <class T, Device D>
  void lay_out(const GradBucket<T, D>& bucket, State<T, D>& state) const {
    std::size_t first = 0, second = 0;
    for (const auto& part : bucket.parts) {
      const Index count = numel(part.shape);
      const Index rows = part.shape.size() < 2 || count == 0 ? count : part.shape[0];
      const Index columns = rows == 0 ? 0 : count / rows;
      const Index rank = std::min({matrix_approximation_rank, rows, columns});
      Matrix matrix{part.begin, first, second, count, 1, 0};
      if (part.shape.size() >= 2 &&
          static_cast<double>((rows + columns) * rank) * min_compression_rate < static_cast<double>(count))
        matrix = {part.begin, first, second, rows, columns, rank};
      first += static_cast<std::size_t>(matrix.rows * std::max(matrix.rank, Index{1}));
      second += static_cast<std::size_t>(matrix.columns * matrix.rank);
      state.matrices.push_back(matrix);
    }
    if (use_error_feedback) detail::grow(state.rest, bucket.gradients.size(), bucket.device);
    detail::grow(state.first, first, bucket.device);
    detail::grow(state.second, second, bucket.device);
    if (warm_start) draw_second(bucket, state);  // otherwise each step draws
  }
  template <class T, Device D>
  void draw_second(const GradBucket<T, D>& bucket, State<T, D>& state) const {
    std::vector<T> q(static_cast<std::size_t>(state.second.numel()));
    for (std::size_t i = 0; i < state.matrices.size(); ++i) {
      const auto& matrix = state.matrices[i];
      if (matrix.low_rank())
        draw(bucket.parts[i].name,
             std::span<T>(q).subspan(matrix.in_second, static_cast<std::size_t>(matrix.columns * matrix.rank)));
    }
    copy_bytes(bucket.device, state.second.data(), Cpu{}, q.data(), q.size() * sizeof(T));
  }
  // A Q of a parameter: the same on all ranks and in any bucket. The name's hash is FNV-1a.
  template <class T>
  void draw(std::string_view name, std::span<T> q) const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    const auto step = warm_start ? 0 : static_cast<std::uint64_t>(steps);
    for (std::size_t i = 0; i < q.size(); ++i)
      q[i] = static_cast<T>(unit_float(
                 philox(seed + step, {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i >> 32),
                                      static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32)})[0])) -
             static_cast<T>(0.5);
  }

  // Gram and Schmidt's, column by column. A column that vanishes, as all do where the gradient is 0, is replaced by a
  // drawn one, the same on all ranks: with a 0, Q's column would be 0, too, and so would be all later ones.
  template <class T, Device D>
  void orthonormalise(D device, const Matrix& matrix, const std::string& name, T* numbers) const {
    const auto rows = static_cast<std::size_t>(matrix.rows), rank = static_cast<std::size_t>(matrix.rank);
    std::vector<T> p(rows * rank), drawn;
    copy_bytes(Cpu{}, p.data(), device, numbers, p.size() * sizeof(T));
    const auto dot = [&](std::size_t a, std::size_t b) {
      double sum = 0;
      for (std::size_t i = 0; i < rows; ++i)
        sum += static_cast<double>(p[i * rank + a]) * static_cast<double>(p[i * rank + b]);
      return sum;
    };
    // Whether there is something left of the column; what is not finite stays so.
    const auto normalise = [&](std::size_t c) {
      const double before = dot(c, c);
      for (std::size_t earlier = 0; earlier < c; ++earlier) {
        const auto along = static_cast<T>(dot(earlier, c));
        for (std::size_t i = 0; i < rows; ++i) p[i * rank + c] -= along * p[i * rank + earlier];
      }
      const double length = dot(c, c);
      if (std::isfinite(before) && length <= 1e-12 * before) return false;  // what is left is rounding
      const double factor = 1 / std::sqrt(length);                          // which T may have no room for
      for (std::size_t i = 0; i < rows; ++i)
        p[i * rank + c] = static_cast<T>(factor * static_cast<double>(p[i * rank + c]));
      return true;
    };
    for (std::size_t c = 0; c < rank; ++c) {
      if (normalise(c)) continue;
      if (drawn.empty()) {
        drawn.resize(p.size());
        draw(cat(name, ' ', steps), std::span<T>(drawn));  // others in the next step
      }
      for (std::size_t i = 0; i < rows; ++i) p[i * rank + c] = drawn[i * rank + c];
      normalise(c);
    }
    copy_bytes(device, numbers, Cpu{}, p.data(), p.size() * sizeof(T));
  }
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_POWER_SGD_HPP

// <chorus/parallel/hooks/quantize.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_QUANTIZE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_QUANTIZE_HPP
/// Gradients that travel in one byte a number.

namespace chorus {

/// Each block of 512 numbers is sent as integers in [-127, 127] and one float, its unit (Dettmers, "8-bit
/// approximations for parallelism in deep learning", ICLR 2016, with linear steps). All ranks gather all ranks' and add
/// them up in the order of ranks. What rounding cuts off is added to the next step's gradient. Each of n ranks sends n
/// - 1 times the bucket's numbers as bytes, and 4 bytes a block: less than an all-reduce of floats for up to 8 ranks.
struct Quantize8Bit {
  static constexpr std::size_t block = 512;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    auto& state = states.of<State<T>>(bucket.index);
    const std::size_t count = bucket.gradients.size(), blocks = (count + block - 1) / block;
    if (communicator.size() == 1) {
      if (!state.rest.empty()) add_rest(bucket, state);
      return {};
    }
    const T even = detail::even_shares<T>(bucket.weight, communicator.size());
    state.rest.resize(count);
    state.values.resize(count);
    state.own.resize(blocks * sizeof(float) + count);
    state.all.resize(state.own.size() * static_cast<std::size_t>(communicator.size()));
    copy_bytes(Cpu{}, state.values.data(), bucket.device, bucket.gradients.data(), count * sizeof(T));
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t begin = b * block, end = std::min(count, begin + block);
      T largest = 0;
      for (std::size_t i = begin; i < end; ++i) {
        if (even > 0) state.values[i] += state.rest[i] / even;
        const T size = std::abs(state.values[i]);
        if (size > largest || std::isnan(size)) largest = size;
      }
      const T unit = static_cast<T>(static_cast<float>(largest / 127));
      auto* steps = reinterpret_cast<std::int8_t*>(state.own.data() + blocks * sizeof(float));
      const bool finite = std::isfinite(unit);
      for (std::size_t i = begin; i < end; ++i) {
        const T step = finite && unit > 0 ? std::nearbyint(std::clamp(state.values[i] / unit, T{-127}, T{127})) : T{0};
        steps[i] = static_cast<std::int8_t>(finite ? step : T{1});  // times a unit that is no number
        if (even > 0) state.rest[i] = finite ? even * (state.values[i] - step * unit) : T{0};
      }
      const float sent = static_cast<float>(unit) * static_cast<float>(bucket.weight);
      std::memcpy(state.own.data() + b * sizeof(float), &sent, sizeof sent);
    }
    return communicator.all_gather_async(std::span<const std::uint8_t>(state.own), std::span<std::uint8_t>(state.all),
                                         {.traffic = trace::Traffic::gradients});
  }

  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int) {
    if (communicator.size() == 1) return {};
    auto& state = states.of<State<T>>(bucket.index);
    const std::size_t count = bucket.gradients.size(), blocks = (count + block - 1) / block;
    std::fill(state.values.begin(), state.values.end(), T{0});
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(communicator.size()); ++rank) {
      const std::uint8_t* message = state.all.data() + rank * state.own.size();
      const auto* steps = reinterpret_cast<const std::int8_t*>(message + blocks * sizeof(float));
      for (std::size_t b = 0; b < blocks; ++b) {
        float unit;
        std::memcpy(&unit, message + b * sizeof(float), sizeof unit);
        for (std::size_t i = b * block; i < std::min(count, (b + 1) * block); ++i)
          state.values[i] += static_cast<T>(unit) * static_cast<T>(steps[i]);
      }
    }
    copy_bytes(bucket.device, bucket.gradients.data(), Cpu{}, state.values.data(), count * sizeof(T));
    return {};
  }

  void reset() { states.clear(); }
  template <class T, Device D, class Visit>
  void remembered(const GradBucket<T, D>& bucket, bool make, const Visit& visit) {
    auto& rest = states.of<State<T>>(bucket.index).rest;
    if (make) rest.resize(bucket.gradients.size());
    if (rest.empty()) return;
    for (const auto& part : bucket.parts) visit("rest", part, part.shape, Cpu{}, rest.data() + part.begin);
  }

  template <class T>
  struct State {
    std::vector<T> rest, values;         // what has not been sent yet; scratch
    std::vector<std::uint8_t> own, all;  // messages: the units of all blocks, then the steps
  };
  detail::BucketStates states = {};

 private:
  template <class T, Device D>
  static void add_rest(const GradBucket<T, D>& bucket, State<T>& state) {
    auto rest = Tensor<T, 1, D>::empty({static_cast<Index>(state.rest.size())}, bucket.device);
    copy_bytes(bucket.device, rest.data(), Cpu{}, state.rest.data(), bucket.gradients.size_bytes());
    detail::add_rest(rest, bucket.gradients, bucket.device);
    state.rest.clear();
  }
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_QUANTIZE_HPP

// <chorus/parallel/hooks/sparse_rows.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_SPARSE_ROWS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_SPARSE_ROWS_HPP
/// Gradients of which most rows are zero, as an embedding's are.

namespace chorus {

/// Ranks send the rows of their gradients that are not all zeros, with their numbers; all add them up in the order of
/// ranks. A parameter of shape [n, ...] has n rows, a vector is one. What PyTorch does for embeddings made with
/// `sparse=True`; here gradients stay dense in memory, and optimizers step all rows.
///
/// Where the fullest rank has R rows, of V numbers of b bytes in all, each of n ranks sends (n - 1) (8 R + b V) bytes a
/// bucket, b V rounded up to 8, and 16 (n - 1) before that for the counts. A bucket for which an all-reduce would send
/// no more goes by that. An embedding should have a bucket of its own: a `bucket_cap_mb` below its size gives it one.
/// On GPUs rows are found on the host.
struct SparseRows {
  static constexpr bool several_rounds = true;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    if (communicator.size() == 1) return {};
    auto& state = states.of<State<T>>(bucket.index);
    if (state.rows.empty()) lay_out(bucket, state.rows);
    fetch(bucket, state);
    const T* gradients = on_host(bucket, state);
    state.own.clear();
    state.count = {};
    for (std::size_t id = 0; id < state.rows.size(); ++id) {
      const Row row = state.rows[id];
      const T* first = gradients + row.begin;
      if (std::all_of(first, first + row.count, [](T x) { return x == 0; })) continue;
      state.own.push_back(static_cast<Id>(id));
      state.count.rows += 1;
      state.count.numbers += static_cast<Id>(row.count);
    }
    state.counts.resize(static_cast<std::size_t>(communicator.size()));
    return communicator.all_gather_async(std::span<const Id>(&state.count.rows, 2),
                                         std::span<Id>(&state.counts[0].rows, 2 * state.counts.size()), {});
  }

  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int round) {
    if (communicator.size() == 1) return {};
    auto& state = states.of<State<T>>(bucket.index);
    if (round == 0) return send(bucket, communicator, state);
    if (!state.message.empty()) add_up(bucket, state);
    return {};
  }

  void reset() { states.clear(); }

  using Id = std::int64_t;
  struct Row {
    std::size_t begin, count;
  };
  struct Counts {  // travels as two numbers
    Id rows = 0, numbers = 0;
  };
  static_assert(sizeof(Counts) == 2 * sizeof(Id));
  template <class T>
  struct State {
    std::vector<Row> rows;                   // of the bucket
    std::vector<Id> own;                     // those that are not zero on this rank
    Counts count;                            // of those
    std::vector<Counts> counts;              // of all ranks
    std::vector<std::uint8_t> message, all;  // ids of rows, then their numbers; empty where an all-reduce does it
    std::size_t values_at = 0;               // where in a message the numbers begin
    std::vector<T> host;                     // the bucket, where it lies on another device
  };
  detail::BucketStates states = {};

 private:
  template <class T, Device D>
  static void lay_out(const GradBucket<T, D>& bucket, std::vector<Row>& rows) {
    for (const auto& part : bucket.parts) {
      const auto count = static_cast<std::size_t>(numel(part.shape));
      const auto n = part.shape.size() < 2 ? std::size_t{1} : static_cast<std::size_t>(part.shape[0]);
      for (std::size_t i = 0; i < n && count > 0; ++i) rows.push_back({part.begin + i * (count / n), count / n});
    }
  }

  // The bucket's numbers, where this thread can work with them: on another device since they were fetched.
  template <class T, Device D>
  static T* on_host(const GradBucket<T, D>& bucket, State<T>& state) {
    return std::is_same_v<D, Cpu> ? bucket.gradients.data() : state.host.data();
  }
  template <class T, Device D>
  static void fetch(const GradBucket<T, D>& bucket, State<T>& state) {
    if constexpr (!std::is_same_v<D, Cpu>) {
      state.host.resize(bucket.gradients.size());
      copy_bytes(Cpu{}, state.host.data(), bucket.device, bucket.gradients.data(), bucket.gradients.size_bytes());
    }
  }

  template <class T, Device D, class Communicator>
  static std::optional<comm::Work> send(const GradBucket<T, D>& bucket, Communicator& communicator, State<T>& state) {
    std::size_t rows = 0, numbers = 0;
    for (const Counts& counts : state.counts) {
      rows = std::max(rows, static_cast<std::size_t>(counts.rows));
      numbers = std::max(numbers, static_cast<std::size_t>(counts.numbers));
    }
    const std::size_t bytes = rows * sizeof(Id) + padded(numbers * sizeof(T));
    state.message.resize(bytes);
    if (rows == 0) return {};
    if (bytes * state.counts.size() >= 2 * bucket.gradients.size_bytes()) {
      state.message.clear();
      return communicator.all_reduce_async(bucket.gradients, comm::ReduceOp::sum,
                                           {.scale = bucket.weight, .traffic = trace::Traffic::gradients});
    }
    state.all.resize(bytes * state.counts.size());
    state.values_at = rows * sizeof(Id);
    std::copy(state.own.begin(), state.own.end(), reinterpret_cast<Id*>(state.message.data()));
    T* to = reinterpret_cast<T*>(state.message.data() + state.values_at);
    const T* gradients = on_host(bucket, state);
    for (const Id id : state.own) {
      const Row row = state.rows[static_cast<std::size_t>(id)];
      for (std::size_t k = 0; k < row.count; ++k) *to++ = static_cast<T>(bucket.weight) * gradients[row.begin + k];
    }
    return communicator.all_gather_async(std::span<const std::uint8_t>(state.message),
                                         std::span<std::uint8_t>(state.all), {.traffic = trace::Traffic::gradients});
  }

  template <class T, Device D>
  static void add_up(const GradBucket<T, D>& bucket, State<T>& state) {
    T* gradients = on_host(bucket, state);
    for (const Id id : state.own) {
      const Row row = state.rows[static_cast<std::size_t>(id)];
      std::fill_n(gradients + row.begin, row.count, T{0});
    }
    for (std::size_t rank = 0; rank < state.counts.size(); ++rank) {
      const std::uint8_t* message = state.all.data() + rank * state.message.size();
      const Id* ids = reinterpret_cast<const Id*>(message);
      const T* from = reinterpret_cast<const T*>(message + state.values_at);
      for (Id i = 0; i < state.counts[rank].rows; ++i) {
        const Row row = state.rows[static_cast<std::size_t>(ids[i])];
        for (std::size_t k = 0; k < row.count; ++k) gradients[row.begin + k] += *from++;
      }
    }
    if constexpr (!std::is_same_v<D, Cpu>)
      copy_bytes(bucket.device, bucket.gradients.data(), Cpu{}, gradients, bucket.gradients.size_bytes());
  }

  static std::size_t padded(std::size_t bytes) { return (bytes + sizeof(Id) - 1) / sizeof(Id) * sizeof(Id); }
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_HOOKS_SPARSE_ROWS_HPP

// <chorus/parallel/local_sgd.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_LOCAL_SGD_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_LOCAL_SGD_HPP
/// LocalSgd: ranks step by themselves and average their parameters every few steps.

namespace chorus {

struct LocalSgdOptions {
  /// Optimizer steps between averages. 1: after every one.
  int period = 8;
  /// The axis of the inputs along which their samples lie.
  int dim = 0;
};

/// Local SGD, also known as federated or parameter averaging (Stich, "Local SGD converges fast and communicates
/// little", ICLR 2019): each rank trains on its share of the data by itself; after every `period` steps, at the
/// beginning of the forward pass that follows, all take the mean of their parameters and of the buffers that are
/// floating-point numbers, in which a rank counts by the samples that it has seen since the last mean; other buffers
/// are rank 0's. Momentum and other state of optimizers stay each rank's own. All ranks freeze the same parameters.
///
/// Each of n ranks sends 2 (n - 1) / n of the model's bytes per `period` steps, and 32 bytes per rank for what
/// each has counted: a `period`-th of DistributedDataParallel's. With a period of 1 and plain SGD the steps are those
/// of one device.
///
/// In between, ranks have different parameters: `eval()` or `synchronise()`, which all ranks call, brings them
/// together. A checkpoint, which all ranks save, has each rank's model and optimizer, and may be taken at any step. Its
/// plain names, which `io::load` reads, are rank 0's.
template <class Model, class Communicator = comm::AnyCommunicator>
class LocalSgd : public DistributedPolicy<Model, Communicator> {
  using Base = DistributedPolicy<Model, Communicator>;
  using typename Base::All;

 public:
  using D = typename Base::device_type;
  using policy_type = LocalSgd;
  static constexpr const char* name = "local_sgd";

  /// Compares the models of all ranks and takes rank 0's numbers, as DistributedDataParallel does. Throws UsageError
  /// for a period below 1. The communicator must outlive this.
  LocalSgd(Model model, Communicator& communicator, const LocalSgdOptions& options = {},
           std::uint64_t seed = initial_seed())
      : Base("LocalSgd", std::move(model), communicator, options.dim, seed), options_(options) {
    check<UsageError>(options.period >= 1, "LocalSgd: the period is at least 1 step, got ", options.period);
    this->check_same(cat("options: period ", options.period, ", dim ", options.dim, "\n"), All{});
    this->broadcast_parameters(0, All{});
    this->broadcast_buffers(0);
    if (auto* const trace = trace::step_counter()) [[unlikely]]
      trace->note("period", cat(options.period));
    // Nobody is asked for the sizes of the shares: they are taken to be as large as this rank's.
    this->random_.first_sample = [this] { return this->communicator_.rank() * rows_; };
    this->random_.is_share = nullptr;
    this->on_gradients([this](std::size_t) {
      if (!in_backward_) begin_backward();
    });
  }
  /// For `launch`: takes communicator and seed from `run`. The model moves to the device that `run` names, if any.
  template <detail::LaunchedRun Run>
  LocalSgd(Model model, Run& run, const LocalSgdOptions& options = {})
      : LocalSgd(detail::placed(std::move(model), run), run.communicator(), options, run.seed()) {
    run.check_options();
  }

  /// The model's output for this rank's share of the batch.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    rows_ = detail::samples_of(options_.dim, inputs...);
    if (grad_enabled()) {
      in_backward_ = false;  // where the last one ended early
      samples_ = rows_;
      // Ranks that have ended would speak at the next mean alone.
      this->begin_pass({.samples = samples_, .number = this->forward_passes(), .sync = sync_}, this->throw_early_);
      local_.begin_pass(this->flat_, All{}, local_.steps >= options_.period, [this] { synchronise(); });
      if (sync_) ++passes_;
    }
    this->begin_forward(rows_);
    return this->forward(true, inputs...);
  }

  /// While it lives, backward passes add to gradients and don't count as steps.
  [[nodiscard]] NoSync no_sync() { return NoSync(sync_); }

  /// Runs `body`, a loop over batches of which ranks may have different numbers: see chorus::join. A rank that has
  /// ended counts in the next mean by what it has done since the last one, and in those after it by nothing; when all
  /// have ended they take the mean. Nobody steps for others.
  template <class Body>
  void join(const Body& body, const JoinOptions& options = {}) {
    chorus::join(body, options, *this);
  }
  /// All ranks take the mean of their parameters and buffers now. Throws UsageError on all where they have counted
  /// different numbers of steps, or of forward passes that recorded gradients, outside of no_sync, since the last mean:
  /// where one leaves a backward pass out, it would take the means later than others.
  void synchronise() { take_mean(); }
  /// All ranks call it: they are brought together.
  void eval() {
    synchronise();
    Base::eval();
  }

  /// For a GradScaler. Within `join`, where ranks that have ended make no steps, nobody is asked: each rank leaves out
  /// steps, and has a scale, of its own.
  void make_largest(std::int32_t* number) {
    if (!this->joining_) Base::make_largest(number);
  }

  /// For checkpoints: steps and this rank's samples since the last mean.
  static constexpr std::string_view kept_as = "local_sgd";
  std::array<double, 2> kept() const { return {static_cast<double>(local_.steps), static_cast<double>(seen_)}; }
  static bool can_keep(const std::array<double, 2>& kept) {
    return kept[0] >= 0 && kept[0] < 1e9 && kept[1] >= 0 && kept[1] < 0x1p53;
  }
  void keep(const std::array<double, 2>& kept) {
    local_.steps = passes_ = static_cast<int>(kept[0]);
    seen_ = static_cast<std::int64_t>(std::round(kept[1]));
  }

 private:
  friend class detail::Access<LocalSgd>;

  // Samples, steps and passes since the last mean; all forward passes, of which a rank may have had some of its own.
  using Counts = std::array<std::int64_t, 4>;
  static constexpr std::int64_t ended = -1;  // the steps of a rank that has run out of batches

  void run_out_of_batches() override { ended_ = true; }
  [[gnu::cold]] JoinedPass take_part_in_pass() override {
    if (this->throw_early_) this->begin_pass_of_others();  // throws unless all have ended
    return take_mean() ? JoinedPass::passed : JoinedPass::none;
  }
  [[gnu::cold]] void all_have_run_out() override { this->end_passes_of_others(); }
  void end_join() override {
    ended_ = false;
    Base::end_join();
  }

  // Returns whether any rank goes on.
  bool take_mean() {
    bool any_on = !ended_;
    if (this->communicator_.size() > 1) {
      const auto ranks = static_cast<std::size_t>(this->communicator_.size());
      const Counts own{seen_, ended_ ? ended : local_.steps, passes_, this->forward_passes()};
      std::vector<Counts> all(ranks);
      this->communicator_.all_gather(std::span<const std::int64_t>(own),
                                     std::span<std::int64_t>(all.front().data(), ranks * own.size()), {});
      any_on = check_same_steps(all);
      std::int64_t sum = 0, passes = 0;
      bool any_ended = false;
      for (const Counts& counts : all) {
        sum += counts[0];
        passes = std::max(passes, counts[3]);
        any_ended = any_ended || counts[1] == ended;
      }
      this->set_forward_passes(static_cast<std::uint32_t>(passes));
      if (any_ended) local_.unite(this->flat_, this->communicator_);  // they don't know of others' steps
      if (!local_.empty()) {
        const double weight = sum == 0 ? 1.0 / static_cast<double>(ranks)  // optimizers may step without samples
                                       : static_cast<double>(seen_) / static_cast<double>(sum);
        local_.average(this->flat_, this->communicator_, weight);
        average_buffers(weight);
      }
    }
    seen_ = 0;
    local_.steps = passes_ = 0;
    return any_on;
  }

  // Those that go on have counted the same. Returns whether any does.
  static bool check_same_steps(const std::vector<Counts>& all) {
    std::string list;
    bool same = true;
    const Counts* first = nullptr;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const Counts& counts = all[rank];
      if (counts[1] == ended) continue;
      if (first == nullptr) first = &counts;
      same = same && counts[1] == (*first)[1] && counts[2] == (*first)[2];
      list += cat(list.empty() ? "" : ", ", "rank ", rank, ": ", counts[1], " in ", counts[2]);
    }
    check<UsageError>(same, "LocalSgd: expected as many steps in as many forward passes of all ranks, got ", list,
                      " since the last mean; a rank that has no samples trains with an empty batch, or under join");
    return first != nullptr;
  }

  // In double, where the mean of equal numbers is that number; integers are rank 0's.
  void average_buffers(double weight) {
    this->broadcast_buffers(0, [](DType type) { return type != DType::f32 && type != DType::f64; });
    std::vector<double> all;
    const auto for_each_real = [&](const auto& f) {
      for (const auto& named : this->buffers_) {
        const auto count = static_cast<std::size_t>(named.buffer->count());
        if (named.buffer->dtype() == DType::f32) f(*named.buffer, std::vector<float>(count));
        if (named.buffer->dtype() == DType::f64) f(*named.buffer, std::vector<double>(count));
      }
    };
    for_each_real([&](const auto& buffer, auto values) {
      copy_bytes(Cpu{}, values.data(), buffer.where(), buffer.memory(), buffer.size_bytes());
      all.insert(all.end(), values.begin(), values.end());
    });
    if (all.empty()) return;
    this->communicator_.all_reduce(std::span<double>(all), comm::ReduceOp::sum,
                                   {.scale = weight, .traffic = trace::Traffic::buffers});
    auto next = all.begin();
    for_each_real([&]<class T>(const auto& buffer, std::vector<T> values) {
      for (T& value : values) value = static_cast<T>(*next++);
      copy_bytes(buffer.where(), buffer.memory(), Cpu{}, values.data(), buffer.size_bytes());
    });
  }

  void begin_backward() {
    in_backward_ = true;
    this->when_backward_ends([this] {
      in_backward_ = false;
      seen_ += samples_;
      if (sync_) ++local_.steps;
    });
  }

  LocalSgdOptions options_;
  detail::LocalSteps local_;
  std::int64_t rows_ = 0;     // of the last forward pass
  std::int64_t samples_ = 0;  // of the last one that wanted gradients
  std::int64_t seen_ = 0;     // since the last mean
  int passes_ = 0;            // the same: those that wanted gradients, outside of no_sync
  bool sync_ = true, in_backward_ = false;
  bool ended_ = false;  // this rank has run out of batches
};

/// For checkpoints.
template <class Model, class Communicator>
class detail::Access<LocalSgd<Model, Communicator>> {
 public:
  explicit Access(LocalSgd<Model, Communicator>& net) : net_(net) {}
  /// From the first step on, models differ, and momenta for good.
  static constexpr bool ranks_may_differ = true;
  bool ranks_differ() const { return net_.communicator().size() > 1; }
  /// Those that ranks have stepped by themselves since they last had the same.
  std::vector<std::string> parameters_apart() const { return net_.local_.names(net_.flat_); }
  void set_parameters_apart(std::span<const std::string> names) { net_.local_.set(net_.flat_, names); }

 private:
  LocalSgd<Model, Communicator>& net_;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_LOCAL_SGD_HPP

// <chorus/parallel/mesh.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_MESH_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_MESH_HPP
/// Mesh: ranks along several axes, which share a model's stages, its batches, its parameters and its layers.

// <chorus/parallel/mesh/axes.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_MESH_AXES_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_MESH_AXES_HPP
/// The axes of a Mesh: along which of a model's dimensions ranks share the work.

// <chorus/parallel/pipeline/schedule.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_SCHEDULE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_SCHEDULE_HPP
/// Schedule: which rank of a pipeline does what, in which order, as a table. GPipe, OneForwardOneBackward, Interleaved
/// and ZeroBubbleH1 write such tables; `check_schedule` reads them without any rank.

namespace chorus {

/// The model is cut into stages, neighbours in turn: stage s lies on rank s % ranks, so that a rank of an interleaved
/// pipeline has several. Each micro-batch goes forward through all stages and backward through all stages.
struct Schedule {
  enum class Kind : std::uint8_t {
    forward,
    backward,  ///< by the stage's input; by its parameters, too, where the table has no `weight`
    weight     ///< by its parameters, which nobody waits for
  };
  struct Action {
    Kind kind;
    int micro_batch, stage;
    friend bool operator==(const Action&, const Action&) = default;
  };

  int stages = 0, micro_batches = 0;
  std::vector<std::vector<Action>> ranks;  ///< in the order in which each rank does them

  int size() const { return static_cast<int>(ranks.size()); }
  int rank_of(int stage) const { return stage % size(); }
  /// Whether gradients by parameters are actions of their own.
  bool splits_backward() const {
    const auto splits = [](const std::vector<Action>& actions) {
      return std::any_of(actions.begin(), actions.end(), [](const Action& a) { return a.kind == Kind::weight; });
    };
    return std::any_of(ranks.begin(), ranks.end(), splits);
  }

  /// A table without actions. Throws UsageError unless there are a rank, a stage on each rank and a micro-batch.
  static Schedule empty(std::string_view name, int p, int m, int stages_of_rank = 1) {
    check<UsageError>(p >= 1 && m >= 1 && stages_of_rank >= 1, name, ": expected ranks, micro-batches and stages on ",
                      "each rank, got ", p, ", ", m, " and ", stages_of_rank);
    return {p * stages_of_rank, m, std::vector<std::vector<Action>>(static_cast<std::size_t>(p))};
  }
};

constexpr std::string_view name(Schedule::Kind kind) {
  constexpr std::string_view names[] = {"forward", "backward", "weight"};
  return names[static_cast<std::size_t>(kind)];
}
inline void append(std::string& out, const Schedule::Action& action) {
  out += cat(name(action.kind), " of micro-batch ", action.micro_batch, " in stage ", action.stage);
}

/// All micro-batches forward, then all backward (Huang et al. 2019, arXiv 1811.06965). A rank keeps the inputs of all
/// m; of the time (p - 1) / (m + p - 1) is idle.
struct GPipe {
  static constexpr const char* name = "gpipe";
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m);
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      for (int i = 0; i < m; ++i) actions.push_back({Schedule::Kind::forward, i, rank});
      for (int i = 0; i < m; ++i) actions.push_back({Schedule::Kind::backward, i, rank});
    }
    return table;
  }
};

/// 1F1B (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473): after p - 1 - rank forwards a backward follows each
/// forward. As much is idle as under GPipe, but a rank keeps at most p - rank inputs.
struct OneForwardOneBackward {
  static constexpr const char* name = "1f1b";
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m);
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      const int warm_up = std::min(p - 1 - rank, m);
      for (int i = 0; i < warm_up; ++i) actions.push_back({Schedule::Kind::forward, i, rank});
      for (int i = 0; i < m; ++i) {
        if (i + warm_up < m) actions.push_back({Schedule::Kind::forward, i + warm_up, rank});
        actions.push_back({Schedule::Kind::backward, i, rank});
      }
    }
    return table;
  }
};

/// 1F1B with V stages on each rank (Narayanan et al. 2021): a stage is shorter by V, and so is the time that passes
/// until the last rank can begin; V times the messages. Micro-batches go in groups of at least p (of m, where that is
/// less), nearly equal ones, each through all of the rank's stages before the next one.
template <int V>
struct Interleaved {
  static_assert(V >= 1, "Interleaved<V>: a rank has at least one stage");
  static constexpr const char* name = "interleaved";
  static constexpr int stages_of_rank = V;
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m, V);
    // The order in which a rank's parts of the model meet the micro-batches.
    struct Turn {
      int part, micro_batch;
    };
    std::vector<Turn> turns;
    const int groups = std::max(m / p, 1), first_group = (m + groups - 1) / groups;
    for (int begin = 0, group = 0; group < groups; ++group) {
      const int end = begin + m / groups + (group < m % groups ? 1 : 0);
      for (int part = 0; part < V; ++part)
        for (int i = begin; i < end; ++i) turns.push_back({part, i});
      begin = end;
    }
    const int count = static_cast<int>(turns.size());
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      const auto forward = [&](int i) {
        const Turn turn = turns[static_cast<std::size_t>(i)];
        actions.push_back({Schedule::Kind::forward, turn.micro_batch, turn.part * p + rank});
      };
      const int warm_up = std::min(V == 1 ? p - 1 - rank : 2 * (p - 1 - rank) + (V - 1) * first_group, count);
      for (int i = 0; i < warm_up; ++i) forward(i);
      for (int i = 0; i < count; ++i) {
        if (i + warm_up < count) forward(i + warm_up);
        const Turn turn = turns[static_cast<std::size_t>(i)];
        actions.push_back({Schedule::Kind::backward, turn.micro_batch, (V - 1 - turn.part) * p + rank});
      }
    }
    return table;
  }
};

/// ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B whose gradients by parameters are put off into the time that would be
/// idle. A rank is behind with those of `rank` micro-batches at most, so that it keeps p inputs, what 1F1B's first rank
/// does. For m >= p a pass takes 3 m + p - 1 units.
struct ZeroBubbleH1 {
  static constexpr const char* name = "zb-h1";
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m);
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      const int warm_up = std::min(p - 1 - rank, m);
      int next_weight = 0;
      const auto weight = [&] { actions.push_back({Schedule::Kind::weight, next_weight++, rank}); };
      for (int i = 0; i < warm_up; ++i) actions.push_back({Schedule::Kind::forward, i, rank});
      for (int i = 0; i < m; ++i) {
        const bool goes_forward = i + warm_up < m;
        if (goes_forward) actions.push_back({Schedule::Kind::forward, i + warm_up, rank});
        actions.push_back({Schedule::Kind::backward, i, rank});
        // With nothing to go forward with, a rank would wait for the next gradient.
        if (!goes_forward || i + 1 - next_weight > rank) weight();
      }
      while (next_weight < m) weight();
    }
    return table;
  }
};

/// How many stages a schedule gives each rank.
template <class S>
inline constexpr int stages_of_rank = 1;
template <int V>
inline constexpr int stages_of_rank<Interleaved<V>> = V;

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_SCHEDULE_HPP

// <chorus/parallel/tensor/sequence_split.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SEQUENCE_SPLIT_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SEQUENCE_SPLIT_HPP
/// Whether TensorParallel shares out the places of a sequence, too, where layers are whole.

namespace chorus {

struct NoSequenceSplit {
  static constexpr bool splits_sequences = false;
};
struct SequenceSplit {
  static constexpr bool splits_sequences = true;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SEQUENCE_SPLIT_HPP

namespace chorus::mesh {

/// As an axis's size: as many ranks as there are for it. At most one axis.
inline constexpr int rest = -1;
/// As an axis's size: what MeshOptions::sizes says.
inline constexpr int dynamic = 0;

/// How many ranks the axes have that are mesh::dynamic. One may have the rest.
struct Sizes {
  int pipe = 1, data = 1, shard = 1, tensor = 1;
};

/// Stages of a pipeline: see Pipeline.
template <int ranks, class Order = OneForwardOneBackward>
struct Pipe {
  static constexpr int size = ranks, place = 0;
  using order = Order;
};
/// Shares of the batch, of a model that each rank has whole: see DistributedDataParallel.
template <int ranks>
struct Data {
  static constexpr int size = ranks, place = 1;
};
/// Shares of the batch, of a model of which each rank keeps a part: see FullyShardedDataParallel. In a pipeline, which
/// comes back to each unit with every micro-batch, KeepParameters.
template <int ranks, class Units = ByBytes<>>
struct Shard {
  static constexpr int size = ranks, place = 2;
  using units = Units;
};
/// Layers that are shared out: see TensorParallel.
template <int ranks, class Sequence = NoSequenceSplit>
struct Tensor {
  static constexpr int size = ranks, place = 3;
  using sequence = Sequence;
};

/// An axis of one rank, where a mesh has none.
using NoPipe = Pipe<1>;
using NoData = Data<1>;
using NoShard = Shard<1>;
using NoTensor = Tensor<1>;

namespace detail {
template <int place, class Default, class... Axes>
struct AxisAt {
  using type = Default;
};
template <int place, class Default, class First, class... Rest>
struct AxisAt<place, Default, First, Rest...> {
  using type = typename std::conditional_t<First::place == place, std::type_identity<First>,
                                           AxisAt<place, Default, Rest...>>::type;
};
template <class... Axes>
constexpr bool in_order() {
  [[maybe_unused]] int last = -1;
  return ((std::exchange(last, Axes::place) < Axes::place) && ...);
}
}  // namespace detail

/// Whether a mesh may have these axes: outermost first, as Pipe, Data, Shard, Tensor, each once. Neighbours on the
/// innermost axis talk most.
template <class... Axes>
inline constexpr bool valid = sizeof...(Axes) > 0 && detail::in_order<Axes...>();

/// A mesh's axes, in their order, and how many ranks each has.
template <class... Axes>
struct AxesOf {
  using pipe = typename detail::AxisAt<0, NoPipe, Axes...>::type;
  using data = typename detail::AxisAt<1, NoData, Axes...>::type;
  using shard = typename detail::AxisAt<2, NoShard, Axes...>::type;
  using tensor = typename detail::AxisAt<3, NoTensor, Axes...>::type;
  static constexpr bool pipes = (... || (Axes::place == 0)), shards = (... || (Axes::place == 2));

  static constexpr std::array<int, 4> declared{pipe::size, data::size, shard::size, tensor::size};

  /// Of `world` ranks. Throws UsageError where they don't fit.
  static std::array<int, 4> sizes(int world, const Sizes& chosen) {
    static_assert(((Axes::size >= dynamic || Axes::size == rest) && ...),
                  "Mesh: an axis has at least one rank, or mesh::rest, or mesh::dynamic");
    static_assert(((Axes::size == rest ? 1 : 0) + ... + 0) <= 1, "Mesh: one axis may have the rest of the ranks");
    auto all = declared;
    const int given[] = {chosen.pipe, chosen.data, chosen.shard, chosen.tensor};
    int product = 1, open = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i] == dynamic) all[i] = given[i];
      check<UsageError>(all[i] > 0 || all[i] == rest, "Mesh: MeshOptions::sizes: an axis has at least one rank, or ",
                        "mesh::rest, got ", all[i]);
      check<UsageError>(declared[i] == dynamic || given[i] == 1, "Mesh: MeshOptions::sizes has ", given[i],
                        " ranks for an axis that the type does not have, or not as mesh::dynamic");
      all[i] == rest ? ++open : product *= all[i];
    }
    check<UsageError>(open < 2, "Mesh: MeshOptions::sizes: one axis may have the rest of the ranks, got ", open);
    check<UsageError>(open > 0 ? world % product == 0 && world > 0 : world == product, "Mesh: expected ", product,
                      open > 0 ? " ranks, or a multiple, for its axes " : " ranks for its axes ", text(all), ", got ",
                      world);
    for (int& size : all)
      if (size == rest) size = world / product;
    return all;
  }
  static std::string text(const std::array<int, 4>& sizes) {
    std::string out;
    const char* const names[] = {"Pipe", "Data", "Shard", "Tensor"};
    const bool here[] = {pipes, (... || (Axes::place == 1)), shards, (... || (Axes::place == 3))};
    for (std::size_t i = 0; i < sizes.size(); ++i)
      if (here[i])
        out += cat(out.empty() ? "" : ", ", names[i], '<', sizes[i] == rest ? std::string("rest") : cat(sizes[i]), '>');
    return out;
  }
};

}  // namespace chorus::mesh
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_MESH_AXES_HPP

// <chorus/parallel/mesh/groups.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_MESH_GROUPS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_MESH_GROUPS_HPP
/// A rank's place in a mesh, and its communicators along each axis.

// <chorus/parallel/tensor/shared_layers.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SHARED_LAYERS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SHARED_LAYERS_HPP
/// The layers of a model that a group of ranks shares out, for policies: their parts, and what operators know of it.

// <chorus/parallel/tensor/group.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_GROUP_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_GROUP_HPP
/// A TensorGroup over a communicator.

namespace chorus::detail {

template <class Communicator>
class CommunicatorGroup final : public TensorGroup {
 public:
  CommunicatorGroup(Communicator& communicator, bool splits_sequences)
      : communicator_(&communicator),
        rank_(communicator.rank()),
        size_(communicator.size()),
        splits_sequences_(splits_sequences) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool splits_sequences() const override { return splits_sequences_; }
  /// Nodes of the tape may live longer than the policy.
  void end() { communicator_ = nullptr; }

 protected:
  void all_reduce(void* data, std::size_t count, DType type, bool largest) override {
    of_type(type, [&]<class T>(T) {
      living().all_reduce(std::span(static_cast<T*>(data), count),
                          largest ? comm::ReduceOp::max : comm::ReduceOp::sum, {.traffic = trace::Traffic::outputs});
    });
  }
  void all_gather(const void* mine, void* all, std::size_t count, DType type) override {
    of_type(type, [&]<class T>(T) {
      living().all_gather(std::span(static_cast<const T*>(mine), count),
                          std::span(static_cast<T*>(all), count * static_cast<std::size_t>(size_)),
                          {.traffic = trace::Traffic::outputs});
    });
  }
  void reduce_scatter(const void* all, void* mine, std::size_t count, DType type) override {
    of_type(type, [&]<class T>(T) {
      living().reduce_scatter(std::span(static_cast<const T*>(all), count * static_cast<std::size_t>(size_)),
                              std::span(static_cast<T*>(mine), count), comm::ReduceOp::sum,
                              {.traffic = trace::Traffic::outputs});
    });
  }

 private:
  template <class F>
  static void of_type(DType type, const F& f) {
    switch (type) {
      case DType::f32: return f(float{});
      case DType::f64: return f(double{});
      case DType::bfloat16: return f(bf16{});
      default: return f(half{});
    }
  }
  Communicator& living() const {
    check<UsageError>(communicator_ != nullptr, "TensorParallel: the policy that ran the forward pass is gone");
    return *communicator_;
  }

  Communicator* communicator_;
  int rank_, size_;
  bool splits_sequences_;
};

}  // namespace chorus::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_GROUP_HPP

// <chorus/parallel/tensor/split_parameters.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SPLIT_PARAMETERS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SPLIT_PARAMETERS_HPP
/// Cuts the parameters of a model into this rank's parts, in place, and puts whole ones together again.

namespace chorus::detail {

/// The parameters of a model that its layers share out, each once, with how. Throws UsageError where two layers have
/// one parameter in common and don't share it out in the same way.
template <Device D>
class SplitParameters final : public nn::detail::Walker {
 public:
  struct Item {
    std::string name;
    AnyParameter handle;
    Split split;
    ParameterOn<D>& parameter() const { return handle.on<D>(); }
  };

  explicit SplitParameters(nn::Module& model) {
    walk(model);
    for (const auto& one : whole_)
      for (const Item& item : items_)
        check<UsageError>(item.handle.shared() != one.handle.shared(), "TensorParallel: '", item.name, "' and '",
                          one.name, "' are one parameter, which the first one's layer shares out and the other one's ",
                          "has whole: give both layers that share it out, as VocabularyParallelEmbedding and ",
                          "ColumnParallelLinear do");
  }
  const std::vector<Item>& items() const { return items_; }

  void parameter(std::string_view name, AnyParameter& handle) override { whole_.push_back({path(name), handle, {}}); }
  void split_parameter(std::string_view name, AnyParameter& handle, const Split& split) override {
    for (const Item& item : items_)
      if (item.handle.shared() == handle.shared()) {
        check<UsageError>(item.split == split, "TensorParallel: '", item.name, "' and '", path(name), "' are one ",
                          "parameter, which their layers share out in different ways");
        return;
      }
    items_.push_back({path(name), handle, split});
  }

 private:
  std::vector<Item> items_, whole_;
};

/// Makes `item` this rank's part of what it is. Throws UsageError where a rank would have nothing of it.
template <Device D>
void cut(const typename SplitParameters<D>::Item& item, const std::shared_ptr<TensorGroup>& group) {
  auto& parameter = item.parameter();
  const Split& split = item.split;
  std::vector<Index> extents(parameter.extents().begin(), parameter.extents().end());
  Index& along = extents[static_cast<std::size_t>(split.axis)];
  const SplitLayout layout(parameter.extents(), split, along);
  check<UsageError>(layout.width / split.unit >= group->size(), "TensorParallel: '", item.name, "' has ",
                    layout.width / split.unit, split.unit > 1 ? cat(" units of ", split.unit) : std::string(" entries"),
                    " along axis ", split.axis, ", which ", group->size(), " ranks can't share: each needs one");
  const auto mine = group->part(layout.width, split.unit);
  auto whole = std::make_shared<PartOfParameter>(PartOfParameter{split, along, group});
  const MemoryScope scope(trace::Memory::parameters);
  const auto size = size_of(parameter.dtype());
  const D device = parameter.where();
  const Storage<D> part(device, static_cast<std::size_t>(layout.numbers(mine)) * size);
  auto* const to = static_cast<std::byte*>(part.data());
  const auto* const from = static_cast<const std::byte*>(parameter.memory());
  layout.for_runs(mine, [&](Index in_whole, Index in_part, Index count) {
    copy_bytes(device, to + static_cast<std::size_t>(in_part) * size, device,
               from + static_cast<std::size_t>(in_whole) * size, static_cast<std::size_t>(count) * size);
  });
  along = split.blocks * mine.count;
  parameter.replace_numbers(extents, part);
  parameter.set_part(std::move(whole));
}

/// Puts into `whole`, another model's parameter, what all ranks have of `part`. A collective.
template <Device D, class Communicator>
void join(const ParameterOn<D>& part, ParameterOn<D>& whole, Communicator& communicator) {
  const PartOfParameter& of = *part.part();
  std::vector<Index> extents(part.extents().begin(), part.extents().end());
  extents[static_cast<std::size_t>(of.split.axis)] = of.width;
  const SplitLayout layout(part.extents(), of.split, of.width);
  const int ranks = of.group->size();
  const auto size = size_of(part.dtype());
  const D device = part.where();
  const MemoryScope scope(trace::Memory::parameters);
  const auto most = static_cast<std::size_t>(layout.numbers(axis_part(layout.width, of.split.unit, ranks, 0))) * size;
  const Storage<D> mine(device, most), all(device, most * static_cast<std::size_t>(ranks)),
      joined(device, static_cast<std::size_t>(numel(extents)) * size);
  zero_bytes(device, mine.data(), most);
  copy_bytes(device, mine.data(), device, part.memory(), part.size_bytes());
  communicator.all_gather(std::span(static_cast<const std::uint8_t*>(mine.data()), most),
                          std::span(static_cast<std::uint8_t*>(all.data()), most * static_cast<std::size_t>(ranks)),
                          {.traffic = trace::Traffic::parameters});
  auto* const to = static_cast<std::byte*>(joined.data());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto* const from = static_cast<const std::byte*>(all.data()) + static_cast<std::size_t>(rank) * most;
    layout.for_runs(axis_part(layout.width, of.split.unit, ranks, rank), [&](Index in_whole, Index at, Index count) {
      copy_bytes(device, to + static_cast<std::size_t>(in_whole) * size, device,
                 from + static_cast<std::size_t>(at) * size, static_cast<std::size_t>(count) * size);
    });
  }
  whole.replace_numbers(extents, joined);
  whole.set_part(nullptr);
}

/// Writes this rank's part of `whole`'s numbers into `part`.
template <Device D>
void take_part(const ParameterOn<D>& whole, ParameterOn<D>& part) {
  const PartOfParameter& of = *part.part();
  const SplitLayout layout(whole.extents(), of.split, of.width);
  const auto size = size_of(part.dtype());
  auto* const to = static_cast<std::byte*>(part.memory());
  const auto* const from = static_cast<const std::byte*>(whole.memory());
  layout.for_runs(of.group->part(layout.width, of.split.unit), [&](Index in_whole, Index in_part, Index count) {
    copy_bytes(part.where(), to + static_cast<std::size_t>(in_part) * size, whole.where(),
               from + static_cast<std::size_t>(in_whole) * size, static_cast<std::size_t>(count) * size);
  });
  part.touch();
}

}  // namespace chorus::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SPLIT_PARAMETERS_HPP

namespace chorus::detail {

template <class Communicator>
class SharedLayers {
 public:
  SharedLayers(Communicator& communicator, bool splits_sequences)
      : communicator_(communicator),
        group_(std::make_shared<CommunicatorGroup<Communicator>>(communicator, splits_sequences)) {}
  SharedLayers(const SharedLayers&) = delete;
  SharedLayers& operator=(const SharedLayers&) = delete;
  ~SharedLayers() { group_->end(); }

  /// Compares the ranks' models, and takes rank 0's numbers and of them this rank's part. `options`: what must be the
  /// same, too. Throws UsageError, on all ranks, where they differ, where no layer can be shared out, and where a rank
  /// would have nothing of one.
  template <class Model>
  Model share_out(Model model, const std::string& options = "") {
    using D = typename nn::detail::DeviceOfModel<Model>::type;
    if constexpr (!std::is_same_v<D, Cpu>)
      check<UsageError>(communicator_.takes_device_memory(), "TensorParallel: a model on ", D::kind,
                        " needs a communicator for its memory, such as comm::NcclCommunicator; got ",
                        communicator_.backend());
    for (const auto& named : nn::named_parameters<D>(model))
      check<UsageError>(named.parameter->part() == nullptr, "TensorParallel: '", named.name,
                        "' is a part already, of a model that a policy has shared out");
    const auto all = [](const auto&) { return true; };
    check_same_description(communicator_, "TensorParallel", options + model_description<D>(model, all));
    const SplitParameters<D> split(model);
    if (communicator_.size() == 1) return model;
    check<UsageError>(!split.items().empty(), "TensorParallel: no layer of the model can be shared out: expected ",
                      "ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding, MultiheadAttention or ",
                      "the layers of transformers");
    take_rank_0s<D>(model, communicator_);
    for (const auto& item : split.items()) cut<D>(item, group_);
    return model;
  }

  /// For TensorGroupScope: what layers are to know in a forward pass; null where they are whole.
  std::shared_ptr<TensorGroup> group() const {
    return communicator_.size() > 1 ? std::shared_ptr<TensorGroup>(group_) : nullptr;
  }

  /// A whole model, on every rank, of one that has been shared out. All ranks call it.
  template <class Model>
  Model gathered(Model& model) {
    using D = typename nn::detail::DeviceOfModel<Model>::type;
    Model whole = nn::copy_of(model);
    const SplitParameters<D> parts(model), wholes(whole);
    if (communicator_.size() > 1)
      for (std::size_t i = 0; i < parts.items().size(); ++i)
        join(parts.items()[i].parameter(), wholes.items()[i].parameter(), communicator_);
    return whole;
  }

 private:
  Communicator& communicator_;
  std::shared_ptr<CommunicatorGroup<Communicator>> group_;
};

}  // namespace chorus::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_SHARED_LAYERS_HPP

namespace chorus::mesh {

/// Ranks are numbered with the innermost axis, tensor, fastest. All ranks make one, together; `all` and `world`, what
/// it was connected with, must outlive it.
class Groups {
 public:
  using Communicator = comm::AnyCommunicator;

  Groups(Communicator& all, const comm::World& world, const std::array<int, 4>& sizes, bool splits_sequences)
      : all_(all), sizes_(sizes), place_(place_of(all.rank(), sizes)) {
    const auto [p, d, s, t] = place_;
    const int tensor_size = sizes[3], batch_size = sizes[1] * sizes[2];
    // A color is a number of its own for each group: that of its first rank.
    pipe_world = split(world, sizes[0], all.rank() - p * batch_size * tensor_size);
    pipe = comm::connect(pipe_world);
    const int first_of_batch = all.rank() - (d * sizes[2] + s) * tensor_size;
    batch = comm::connect(split(world, batch_size, first_of_batch));
    const int first_of_shards = all.rank() - s * tensor_size;
    gathers = comm::connect(split(world, sizes[2], first_of_shards));
    if (sizes[1] > 1) shards_ = comm::connect(split(world, sizes[2], first_of_shards));
    replicas = comm::connect(split(world, sizes[1], all.rank() - d * sizes[2] * tensor_size));
    tensor = comm::connect(split(world, tensor_size, all.rank() - t));
    layers.emplace(tensor, splits_sequences);
  }
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;
  /// Nobody waits for a rank that throws.
  ~Groups() {
    if (std::uncaught_exceptions() <= exceptions_before_) return;
    for (Communicator* const group : {&pipe, &batch, &gathers, &shards_, &replicas, &tensor})
      if (group->size() > 1)
        group->abort(cat("rank ", all_.rank(), " of the mesh threw an exception in the middle of a step"));
  }

  Communicator& all() const { return all_; }
  /// Among which gradients are averaged in parts.
  Communicator& shards() { return sizes_[1] > 1 ? shards_ : batch; }
  /// How many ranks each axis has, and this rank's place on it: pipe, data, shard, tensor.
  const std::array<int, 4>& sizes() const { return sizes_; }
  const std::array<int, 4>& place() const { return place_; }

  comm::World pipe_world;
  Communicator pipe;      ///< those that have the other stages
  Communicator batch;     ///< those that have the other shares of the batch, and the same of the model
  Communicator gathers;   ///< of these those that have the other shards, which they gather
  Communicator replicas;  ///< those that have the same shards
  Communicator tensor;    ///< those that have the other parts of layers
  std::optional<chorus::detail::SharedLayers<Communicator>> layers;

 private:
  static std::array<int, 4> place_of(int rank, const std::array<int, 4>& sizes) {
    std::array<int, 4> place{};
    for (std::size_t axis = sizes.size(); axis-- > 0; rank /= sizes[axis]) place[axis] = rank % sizes[axis];
    return place;
  }
  // Of a group of one the rank is alone.
  comm::World split(const comm::World& world, int size, int color) {
    return size == 1 ? comm::World{} : comm::split(all_, world, color);
  }

  Communicator& all_;
  Communicator shards_;
  std::array<int, 4> sizes_, place_;
  const int exceptions_before_ = std::uncaught_exceptions();
};

/// Base of Mesh, which has to have them before its other base.
struct WithGroups {
  mutable Groups groups;
  template <class... Arguments>
  explicit WithGroups(Arguments&&... arguments) : groups(std::forward<Arguments>(arguments)...) {}
};

}  // namespace chorus::mesh
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_MESH_GROUPS_HPP

// <chorus/parallel/mesh/policies.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_MESH_POLICIES_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_MESH_POLICIES_HPP
/// The policy among the ranks of a mesh that have shares of one batch.

// <chorus/parallel/pipeline/staged_model.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_STAGED_MODEL_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_STAGED_MODEL_HPP
/// A model of which each rank has a part, a stage, and whose forward pass is all ranks' together.

// <chorus/parallel/pipeline/check_schedule.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CHECK_SCHEDULE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CHECK_SCHEDULE_HPP
/// Reads a schedule's table as ranks would follow it, without any rank: for tables of any size.

namespace chorus {

/// What a table says of itself, where forward, backward by the input and backward by the parameters take one unit of
/// time each, and messages none.
struct ScheduleFacts {
  int time = 0;                  ///< until the last rank has ended
  double idle = 0;               ///< the share of all ranks' time in which they wait
  std::vector<int> kept_inputs;  ///< of each rank: how many inputs of stages it keeps at most for backward
};

namespace detail {

/// A walk through a table: each rank goes on as far as it finds what it needs.
class ScheduleWalk {
 public:
  explicit ScheduleWalk(const Schedule& schedule)
      : schedule_(schedule), splits_(schedule.splits_backward()), progress_(schedule.ranks.size()) {
    for (auto& ends : ends_) ends.assign(cells(), never);
  }

  ScheduleFacts facts() {
    check_complete();
    for (bool any = true; any;) {
      any = false;
      for (std::size_t rank = 0; rank < progress_.size(); ++rank)
        while (goes_on(rank)) any = true;
    }
    check_all_ended();
    ScheduleFacts facts;
    long busy = 0;
    for (const Progress& rank : progress_) {
      facts.time = std::max(facts.time, rank.time);
      facts.kept_inputs.push_back(rank.most_kept);
      busy += rank.busy;
    }
    facts.idle = 1 - static_cast<double>(busy) / (static_cast<double>(facts.time) * schedule_.size());
    return facts;
  }

 private:
  using Kind = Schedule::Kind;
  using Action = Schedule::Action;
  static constexpr int never = -1;

  struct Progress {
    std::size_t next = 0;
    int time = 0, busy = 0, kept = 0, most_kept = 0;
  };

  std::size_t cells() const {
    check<UsageError>(schedule_.size() >= 1 && schedule_.micro_batches >= 1 && schedule_.stages >= 1,
                      "schedule: expected ranks, stages and micro-batches, got ", schedule_.size(), ", ",
                      schedule_.stages, " and ", schedule_.micro_batches);
    return static_cast<std::size_t>(schedule_.stages) * static_cast<std::size_t>(schedule_.micro_batches);
  }
  // When the action has ended; `never` before.
  int& end(Kind kind, int micro_batch, int stage) {
    return ends_[static_cast<std::size_t>(kind)]
                [static_cast<std::size_t>(stage) * static_cast<std::size_t>(schedule_.micro_batches) +
                 static_cast<std::size_t>(micro_batch)];
  }

  void check_complete() const {
    std::vector<int> counts[3];
    for (auto& count : counts) count.assign(cells(), 0);
    for (int rank = 0; rank < schedule_.size(); ++rank)
      for (const Action& action : schedule_.ranks[static_cast<std::size_t>(rank)]) {
        check<UsageError>(action.stage >= 0 && action.stage < schedule_.stages && action.micro_batch >= 0 &&
                              action.micro_batch < schedule_.micro_batches && action.kind <= Kind::weight,
                          "schedule: rank ", rank, " has ", action, ": there are ", schedule_.stages, " stages and ",
                          schedule_.micro_batches, " micro-batches");
        check<UsageError>(schedule_.rank_of(action.stage) == rank, "schedule: rank ", rank, " has ", action,
                          ", which lies on rank ", schedule_.rank_of(action.stage));
        ++counts[static_cast<std::size_t>(action.kind)]
                [static_cast<std::size_t>(action.stage * schedule_.micro_batches + action.micro_batch)];
      }
    for (const Kind kind : {Kind::forward, Kind::backward, Kind::weight})
      for (int stage = 0; stage < schedule_.stages; ++stage)
        for (int i = 0; i < schedule_.micro_batches && (splits_ || kind != Kind::weight); ++i) {
          const int count =
              counts[static_cast<std::size_t>(kind)][static_cast<std::size_t>(stage * schedule_.micro_batches + i)];
          check<UsageError>(count == 1, "schedule: ", Action{kind, i, stage}, " occurs ", count,
                            " times, expected once");
        }
  }

  /// What has to come before the action, in another stage or in its own.
  std::vector<Action> needs(const Action& action) const {
    const auto [kind, i, stage] = action;
    std::vector<Action> out;
    if (kind == Kind::forward && stage > 0) out.push_back({Kind::forward, i, stage - 1});
    if (kind == Kind::backward) {
      out.push_back({Kind::forward, i, stage});
      if (stage + 1 < schedule_.stages) out.push_back({Kind::backward, i, stage + 1});
    }
    if (kind == Kind::weight) out.push_back({Kind::backward, i, stage});
    return out;
  }

  bool goes_on(std::size_t rank) {
    Progress& progress = progress_[rank];
    if (progress.next == schedule_.ranks[rank].size()) return false;
    const Action& action = schedule_.ranks[rank][progress.next];
    int begin = progress.time;
    for (const Action& need : needs(action)) {
      const int ended = end(need.kind, need.micro_batch, need.stage);
      if (ended == never) return false;
      begin = std::max(begin, ended);
    }
    const int duration = action.kind == Kind::backward && !splits_ ? 2 : 1;
    progress.time = end(action.kind, action.micro_batch, action.stage) = begin + duration;
    progress.busy += duration;
    if (action.kind == Kind::forward) progress.most_kept = std::max(progress.most_kept, ++progress.kept);
    if (action.kind == (splits_ ? Kind::weight : Kind::backward)) --progress.kept;
    ++progress.next;
    return true;
  }

  void check_all_ended() {
    std::string waiting;
    for (std::size_t rank = 0; rank < progress_.size(); ++rank) {
      if (progress_[rank].next == schedule_.ranks[rank].size()) continue;
      const Action& action = schedule_.ranks[rank][progress_[rank].next];
      for (const Action& need : needs(action))
        if (end(need.kind, need.micro_batch, need.stage) == never)
          waiting += cat(waiting.empty() ? "" : "; ", "rank ", rank, "'s ", action, " waits for ", need);
    }
    check<UsageError>(waiting.empty(), "schedule: no rank can go on: ", waiting);
  }

  const Schedule& schedule_;
  const bool splits_;
  std::vector<Progress> progress_;
  std::vector<int> ends_[3];
};

}  // namespace detail

/// Throws UsageError where an action is missing, occurs twice or lies on the wrong rank, and where ranks would wait for
/// each other for ever.
[[gnu::cold]] inline ScheduleFacts check_schedule(const Schedule& schedule) {
  return detail::ScheduleWalk(schedule).facts();
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CHECK_SCHEDULE_HPP

// <chorus/parallel/pipeline/pass.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_HPP
/// One batch on its way through a pipeline: what this rank's stages keep of its micro-batches, and what an action does.

// <chorus/parallel/pipeline/chain.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CHAIN_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CHAIN_HPP
/// A model's chain as a stage runs a part of it: from types that are known at a cut to the next cut.

// <chorus/autograd/activation.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_ACTIVATION_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_ACTIVATION_HPP
/// What crosses a cut of a pipeline, without its type: numbers forward, the gradient by them backward.

namespace chorus::pipeline {

/// Goes before each message: types at cuts are known where the model is compiled, shapes are not.
struct Header {
  std::int32_t micro_batch = 0, stage = 0;  ///< whose input, or whose output's gradient, follows
  std::uint32_t next_operation = 0;         ///< what random operations have counted to so far
  DType dtype{};
  std::uint8_t rank = 0;
  std::uint8_t wants_grad = 0;  ///< whether the gradient is waited for
  std::uint8_t drew = 0;        ///< whether a layer has drawn random numbers
  std::uint8_t part = 0;        ///< 0: what goes from layer to layer; from 1 on, what was stashed
  std::uint8_t stashed = 0;     ///< of part 0: how many others follow
  std::array<char, 22> name{};  ///< of what was stashed
  std::array<Index, 8> extents{};
  std::uint64_t batch = 0;  ///< of the first micro-batch: a fingerprint of the whole batch

  std::size_t bytes() const {
    std::size_t bytes = size_of(dtype);
    for (std::size_t axis = 0; axis < rank; ++axis) bytes *= static_cast<std::size_t>(extents[axis]);
    return bytes;
  }
};
static_assert(sizeof(Header) == 112);

/// The input of a stage, or its output.
template <Device D>
class AnyActivation {
 public:
  virtual ~AnyActivation() = default;
  /// Dtype, rank and extents, and whether a gradient is wanted.
  virtual Header header() const = 0;
  virtual std::size_t bytes() const = 0;
  /// The numbers, dense.
  virtual void* numbers() const = 0;
  /// Of an output: where the gradient by it is to be written before `take_gradient`.
  virtual void* gradient_to_come() = 0;
  /// Gives that gradient to the node, from which backward is to go on; null where there is none.
  virtual Ref<Node> take_gradient() = 0;
  /// Of an input: the gradient by it, dense; zeros where none has come.
  virtual void* gradient() = 0;
};

template <class X>
class Activation final : public AnyActivation<typename tensor_of<X>::device_type> {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  static constexpr int rank = tensor_of<X>::rank;

 public:
  explicit Activation(X x) : value(dense(std::move(x))) {}
  /// An input with room for numbers to come. Throws UsageError where `header` is not of this type.
  Activation(const Header& header, D device) : value(made(header, device)) {}

  Header header() const override {
    Header header;
    header.dtype = dtype<T>;
    header.rank = static_cast<std::uint8_t>(rank);
    header.wants_grad = wants_grad();
    std::copy(value_of(value).shape().begin(), value_of(value).shape().end(), header.extents.begin());
    return header;
  }
  std::size_t bytes() const override { return value_of(value).bytes(); }
  void* numbers() const override { return value_of(value).data(); }
  void* gradient_to_come() override {
    gradient_ = tensor_of<X>::empty(value_of(value).shape(), value_of(value).device());
    return gradient_.data();
  }
  Ref<Node> take_gradient() override {
    if constexpr (AnyVariable<X>) {
      if (!value.node()) return {};
      value.node()->add(std::exchange(gradient_, {}));
      return value.node();
    } else {
      return {};
    }
  }
  void* gradient() override {
    if constexpr (AnyVariable<X>) {
      const auto found = value.grad();
      gradient_ =
          found.defined() ? contiguous(found) : tensor_of<X>::zeros(value_of(value).shape(), value_of(value).device());
    }
    return gradient_.data();
  }

  const X value;

 private:
  // What is sent lies dense. A copy is as good as what it is of, where a gradient goes back through the same node.
  static X dense(X x) {
    if constexpr (AnyTensor<X>)
      return contiguous(x);
    else
      return X(contiguous(x.value()), x.node());
  }
  bool wants_grad() const {
    if constexpr (AnyVariable<X>)
      return value.requires_grad();
    else
      return false;
  }
  static X made(const Header& header, D device) {
    check<UsageError>(header.dtype == dtype<T> && header.rank == rank, "Pipeline: stage ", header.stage, " takes ",
                      dtype<T>, " with ", rank, " axes, and got ", header.dtype, " with ", int{header.rank},
                      ": do all ranks run the same program?");
    Shape<rank> shape{};
    std::copy_n(header.extents.begin(), rank, shape.begin());
    auto numbers = tensor_of<X>::empty(shape, device);
    if constexpr (AnyTensor<X>)
      return numbers;
    else
      return X(std::move(numbers), header.wants_grad != 0);
  }

  tensor_of<X> gradient_;
};

/// What was stashed in an earlier stage: its type is that of the Pop that takes it, if this stage has it.
template <Device D>
class RawActivation final : public AnyActivation<D> {
 public:
  RawActivation(const Header& header, D device) : header_(header), numbers_(device, header.bytes()) {}

  Header header() const override { return header_; }
  std::size_t bytes() const override { return header_.bytes(); }
  void* numbers() const override { return numbers_.data(); }
  void* gradient_to_come() override {
    gradient_ = Storage<D>(numbers_.device(), bytes());
    return gradient_.data();
  }
  Ref<Node> take_gradient() override { return {}; }
  /// Of the value that was popped; else the one that has come from the next stage.
  void* gradient() override { return popped_ ? popped_->gradient() : gradient_.data(); }

  /// The value as a Variable X. Throws UsageError where it is of another type.
  template <class X>
  const X& pop() {
    auto typed = std::make_shared<Activation<X>>(header_, numbers_.device());
    copy_bytes(numbers_.device(), typed->numbers(), numbers_.device(), numbers_.data(), bytes());
    popped_ = typed;
    return typed->value;
  }

 private:
  Header header_;
  Storage<D> numbers_, gradient_;
  std::shared_ptr<AnyActivation<D>> popped_;
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_ACTIVATION_HPP

// <chorus/nn/chain.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_CHAIN_HPP
#define CHORUS_SINGLE_CHORUS_NN_CHAIN_HPP
/// CHORUS_PIPELINE: a model whose forward function is a chain of layers, which a pipeline may cut between any two.

// <chorus/nn/stash.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_STASH_HPP
#define CHORUS_SINGLE_CHORUS_NN_STASH_HPP
/// Stash and Pop: a value that leaves a chain of layers and comes back in a later one, a skip connection over any
/// number of layers, and of a pipeline's stages.

namespace chorus::nn {

namespace detail {

/// What is stashed in a pass of this thread, in the order in which it was.
template <Device D>
class Stashes {
 public:
  struct Entry {
    std::string name;
    std::shared_ptr<pipeline::AnyActivation<D>> value;
  };
  /// The pass begins with what was stashed in earlier stages, or with nothing.
  explicit Stashes(std::vector<Entry> entries = {})
      : entries_(std::move(entries)), before_(std::exchange(of_thread(), this)) {}
  ~Stashes() { of_thread() = before_; }
  Stashes(const Stashes&) = delete;
  Stashes& operator=(const Stashes&) = delete;

  /// Throws UsageError outside of a model with CHORUS_PIPELINE.
  static Stashes& current(std::string_view who) {
    check<UsageError>(of_thread() != nullptr, who, ": expected a layer of a model with CHORUS_PIPELINE");
    return *of_thread();
  }

  void stash(std::string_view name, std::shared_ptr<pipeline::AnyActivation<D>> value) {
    check<UsageError>(find(name) == entries_.end(), "nn::Stash<\"", name,
                      "\">: another value of that name waits to be ", "popped");
    entries_.push_back({std::string(name), std::move(value)});
  }
  std::shared_ptr<pipeline::AnyActivation<D>> pop(std::string_view name) {
    const auto entry = find(name);
    check<UsageError>(entry != entries_.end(), "nn::Pop<\"", name, "\">: nothing was stashed under that name");
    auto value = std::move(entry->value);
    entries_.erase(entry);
    return value;
  }
  const std::vector<Entry>& entries() const { return entries_; }
  /// What the pass has given; all that was stashed has to be popped by then.
  template <class Y>
  Y checked(Y y) const {
    check<UsageError>(entries_.empty(), "nn::Stash<\"", entries_.empty() ? "" : entries_.front().name,
                      "\">: no layer pops it");
    return y;
  }

 private:
  static Stashes*& of_thread() {
    thread_local Stashes* current = nullptr;
    return current;
  }
  auto find(std::string_view name) {
    return std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.name == name; });
  }

  std::vector<Entry> entries_;
  Stashes* before_;
};

/// A text as a template's argument.
template <std::size_t N>
struct StashName {
  static_assert(N <= 22, "nn::Stash: a name has at most 21 characters");
  char text[N];
  constexpr StashName(const char (&name)[N]) { std::copy_n(name, N, text); }  // NOLINT: converts as texts do
};

/// The Variable of an operand.
template <Operand X>
using VariableLike =
    Variable<typename tensor_of<X>::value_type, tensor_of<X>::rank, typename tensor_of<X>::device_type>;

}  // namespace detail

/// `stash(x)` is x, which `nn::Pop` of that name takes in a later layer of a model with CHORUS_PIPELINE, in whichever
/// stage: `nn::Stash<"skip"> stash;`. Throws UsageError where a value of that name waits already, and at the end of the
/// model where no layer has popped it.
template <detail::StashName Name>
struct Stash : Module {
  template <Operand X>
  auto operator()(const X& x) const {
    using V = detail::VariableLike<X>;
    using D = typename V::device_type;
    detail::Stashes<D>::current("nn::Stash").stash(Name.text, std::make_shared<pipeline::Activation<V>>(value(x)));
    return x;
  }
  std::string describe() const override { return cat("Stash(", static_cast<const char*>(Name.text), ")"); }

 private:
  template <Operand X>
  static auto value(const X& x) {
    if constexpr (AnyTensor<X>)
      return detail::VariableLike<X>(x);
    else
      return chorus::detail::variable_of(x);
  }
};

/// `pop(x)` is x + what was stashed; `pop(x, combine)` is `combine(x, stashed)`. What was stashed has x's scalar type
/// and rank. Throws UsageError where it has not, or where nothing was stashed under that name.
template <detail::StashName Name>
struct Pop : Module {
  template <Operand X>
  auto operator()(const X& x) const {
    return (*this)(x, [](const auto& a, const auto& b) { return a + b; });
  }
  template <Operand X, class Combine>
  auto operator()(const X& x, const Combine& combine) const {
    using V = detail::VariableLike<X>;
    using D = typename V::device_type;
    const auto stashed = detail::Stashes<D>::current("nn::Pop").pop(Name.text);
    if (auto* const raw = dynamic_cast<pipeline::RawActivation<D>*>(stashed.get()))
      return combine(x, raw->template pop<V>());
    const auto* const own = dynamic_cast<const pipeline::Activation<V>*>(stashed.get());
    check<UsageError>(own != nullptr, "nn::Pop<\"", static_cast<const char*>(Name.text), "\">: expected ",
                      dtype<typename V::value_type>, " with ", V::rank, " axes, got ", stashed->header().dtype,
                      " with ", int{stashed->header().rank});
    return combine(x, own->value);
  }
  std::string describe() const override { return cat("Pop(", static_cast<const char*>(Name.text), ")"); }
};

}  // namespace chorus::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_STASH_HPP

namespace chorus::nn {

namespace detail {

template <class Link>
inline constexpr bool is_module_list = false;
template <class M>
inline constexpr bool is_module_list<ModuleList<M>> = true;

/// How many layers a link has: a list's modules one each.
template <class Link>
std::size_t layers_of(const Link& link) {
  if constexpr (is_module_list<Link>)
    return link.size();
  else
    return 1;
}

/// What layers `begin` to `end` - 1 of a link make of `x`. The targets are the last link's.
template <class Link, class X, class... Targets>
auto run_link(const Link& link, std::size_t begin, [[maybe_unused]] std::size_t end, const X& x,
              const Targets&... targets) {
  if constexpr (is_module_list<Link>) {
    static_assert(sizeof...(Targets) == 0,
                  "CHORUS_PIPELINE: the targets go to the last link with the output before it, and that is a "
                  "ModuleList here: let a layer of its own take the loss");
    using Y = decltype(link[0](x));
    constexpr bool gives_what_it_takes = std::is_same_v<decltype(link[0](std::declval<const Y&>())), Y>;
    static_assert(gives_what_it_takes,
                  "CHORUS_PIPELINE: the blocks of a ModuleList have to give what they take: the same rank and type");
    check<UsageError>(begin < end, "CHORUS_PIPELINE: a ModuleList has no modules");
    Y y = link[begin](x);
    if constexpr (gives_what_it_takes)
      for (std::size_t i = begin + 1; i < end; ++i) y = link[i](y);
    return y;
  } else {
    return link(x, targets...);
  }
}

/// What links I and later make of `x`.
template <std::size_t I, class Links, class X, class... Targets>
auto run_chain(const Links& links, const X& x, const Targets&... targets) {
  const auto& link = std::get<I>(links);
  if constexpr (I + 1 == std::tuple_size_v<Links>)
    return run_link(link, 0, layers_of(link), x, targets...);
  else
    return run_chain<I + 1>(links, run_link(link, 0, layers_of(link), x), targets...);
}

}  // namespace detail

}  // namespace chorus::nn

/// Beside CHORUS_MODULE in a model: lists the links of a chain, and makes `forward` run them one after the other. Each
/// takes what the one before it has returned, a Variable or a Tensor; the last one takes the further arguments, too, as
/// a model that returns its loss does: `forward(x, targets)` is `head(blocks(embed(x)), targets)`. Links are layers,
/// modules and ModuleLists, each module of which is a place to cut.
#define CHORUS_PIPELINE(...)                                                                            \
  static constexpr ::std::string_view pipeline_names = #__VA_ARGS__;                                    \
  auto pipeline_links() { return ::std::tie(__VA_ARGS__); }                                             \
  auto pipeline_links() const { return ::std::tie(__VA_ARGS__); }                                       \
  template <class X, class... Targets>                                                                  \
  auto forward(const X& x, const Targets&... targets) const {                                           \
    const ::chorus::nn::detail::Stashes<device_type> stashes;                                           \
    return stashes.checked(::chorus::nn::detail::run_chain<0>(pipeline_links(), x, targets...));        \
  }
#endif  // CHORUS_SINGLE_CHORUS_NN_CHAIN_HPP

// <chorus/parallel/pipeline/layers.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LAYERS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LAYERS_HPP
/// The layers of a model with CHORUS_PIPELINE, one after the other, and the members that a stage has of it.

namespace chorus::pipeline {

/// A layer's place: the link, and which of its modules where it is a list.
struct Place {
  std::size_t link = 0, index = 0;
};

/// Calls `f(place, name, layer)` for each layer.
template <class Model, class F>
void for_each_layer(Model& model, const F& f) {
  std::string_view names = Model::pipeline_names;
  std::size_t number = 0;
  const auto each = [&](auto& link) {
    const std::string name(nn::detail::next_name(names));
    if constexpr (nn::detail::is_module_list<std::remove_cvref_t<decltype(link)>>)
      for (std::size_t i = 0; i < link.size(); ++i) f(Place{number, i}, cat(name, '.', i), link[i]);
    else
      f(Place{number, 0}, name, link);
    ++number;
  };
  std::apply([&](auto&... links) { (each(links), ...); }, model.pipeline_links());
}

template <class Model>
std::vector<Place> places_of(Model& model) {
  std::vector<Place> places;
  for_each_layer(model, [&](Place place, const auto&, auto&) { places.push_back(place); });
  return places;
}

/// Some of a model's layers, by the names that they have in the model.
template <class Model>
class SomeLayers final : public nn::Module {
 public:
  /// `counts[i]`: whether layer i is one of them.
  SomeLayers(Model& model, std::vector<bool> counts) : model_(model), counts_(std::move(counts)) {}
  void visit(nn::Visitor& visitor) override {
    std::size_t number = 0;
    for_each_layer(model_, [&](Place, const std::string& name, auto& layer) {
      if constexpr (std::is_base_of_v<nn::Module, std::remove_cvref_t<decltype(layer)>>)
        if (counts_[number]) visitor.module(name, layer);
      ++number;
    });
  }

 private:
  Model& model_;
  std::vector<bool> counts_;
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LAYERS_HPP

namespace chorus::pipeline {

/// A stage: so many layers from this one on.
struct Stage {
  Place begin;
  std::size_t layers = 0;
};

/// What layers `begin` to `end` - 1 of link I make of `x`.
template <std::size_t I, class Model, class In, class... Targets>
auto run_part(const Model& model, std::size_t begin, std::size_t end, const In& x,
              [[maybe_unused]] const Targets&... targets) {
  const auto links = model.pipeline_links();
  if constexpr (I + 1 == std::tuple_size_v<decltype(links)>)
    return nn::detail::run_link(std::get<I>(links), begin, end, x, targets...);
  else
    return nn::detail::run_link(std::get<I>(links), begin, end, x);
}

/// The chain of `Model` for an input X. Where a stage begins is known when the program runs, what types it has there
/// when it is compiled: a table with a function for each link, N of them, not one for each pair of a beginning and an
/// end.
template <class Model, class X, class... Targets>
class Chain {
  using D = typename Model::device_type;
  using Links = decltype(std::declval<const Model&>().pipeline_links());
  static constexpr std::size_t count = std::tuple_size_v<Links>;

 public:
  using Result =
      decltype(std::declval<const Model&>().forward(std::declval<const X&>(), std::declval<const Targets&>()...));
  using Held = std::shared_ptr<AnyActivation<D>>;

  /// What a stage gives: of the last one the model's result, of others what they hand on.
  struct Outcome {
    Held output;
    std::optional<Result> result;
  };

  /// Runs `stage` on `input`, which `room_for` has made, or is an Activation<X> of the first one.
  static Outcome run(const Model& model, const Stage& stage, const AnyActivation<D>& input, const Targets&... targets) {
    return table(std::make_index_sequence<count>())[stage.begin.link].run(model, stage, input, targets...);
  }
  /// An input of the stage, with room for numbers that come with `header`.
  static Held room_for(const Stage& stage, const Header& header, D device) {
    return table(std::make_index_sequence<count>())[stage.begin.link].room_for(stage, header, device);
  }

 private:
  // What link I takes and gives.
  template <std::size_t I, class = void>
  struct Types {
    using In = typename Types<I - 1>::Out;
    using Out = decltype(run_part<I>(std::declval<const Model&>(), 0, 0, std::declval<const In&>(),
                                     std::declval<const Targets&>()...));
    static_assert(I + 1 == count || Operand<Out>,
                  "CHORUS_PIPELINE: what goes from a link to the next one is a Tensor or a Variable");
  };
  template <class Unused>
  struct Types<0, Unused> {
    using In = X;
    using Out = decltype(run_part<0>(std::declval<const Model&>(), 0, 0, std::declval<const X&>(),
                                     std::declval<const Targets&>()...));
  };

  // Link I from its layer `index` on, and what comes behind it, `left` layers in all.
  template <std::size_t I, class In>
  static Outcome go_on(const Model& model, std::size_t index, std::size_t left, const In& x,
                       const Targets&... targets) {
    const std::size_t layers = nn::detail::layers_of(std::get<I>(model.pipeline_links()));
    const std::size_t here = std::min(left, layers - index);
    auto y = run_part<I>(model, index, index + here, x, targets...);
    using Y = decltype(y);
    if constexpr (I + 1 == count) {
      if (index + here == layers) return {nullptr, std::move(y)};
    } else {
      if (left > here) return go_on<I + 1>(model, 0, left - here, y, targets...);
    }
    if constexpr (I + 1 == count && !nn::detail::is_module_list<LinkOf<I>>)
      return {};  // it has one layer
    else
      return {std::make_shared<Activation<Y>>(std::move(y)), std::nullopt};
  }
  template <std::size_t I>
  using LinkOf = std::remove_cvref_t<std::tuple_element_t<I, Links>>;

  struct Entry {
    Outcome (*run)(const Model&, const Stage&, const AnyActivation<D>&, const Targets&...);
    Held (*room_for)(const Stage&, const Header&, D);
  };
  // Within a list a stage takes what the list's modules give.
  template <std::size_t I>
  static Outcome run_from(const Model& model, const Stage& stage, const AnyActivation<D>& input,
                          const Targets&... targets) {
    if constexpr (nn::detail::is_module_list<LinkOf<I>>)
      if (stage.begin.index > 0)
        return go_on<I>(model, stage.begin.index, stage.layers,
                        static_cast<const Activation<typename Types<I>::Out>&>(input).value, targets...);
    return go_on<I>(model, 0, stage.layers, static_cast<const Activation<typename Types<I>::In>&>(input).value,
                    targets...);
  }
  template <std::size_t I>
  static Held room_in(const Stage& stage, const Header& header, D device) {
    if constexpr (nn::detail::is_module_list<LinkOf<I>>)
      if (stage.begin.index > 0) return std::make_shared<Activation<typename Types<I>::Out>>(header, device);
    return std::make_shared<Activation<typename Types<I>::In>>(header, device);
  }
  template <std::size_t... I>
  static const std::array<Entry, count>& table(std::index_sequence<I...>) {
    static constexpr std::array<Entry, count> entries{Entry{run_from<I>, room_in<I>}...};
    return entries;
  }
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CHAIN_HPP

// <chorus/parallel/pipeline/loss_weights.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LOSS_WEIGHTS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LOSS_WEIGHTS_HPP
/// By how much the micro-batches' losses count in the loss of the whole batch.

namespace chorus::pipeline {

/// A mean over the batch is the sum of w_i mean_i / W, where w_i is what micro-batch i's mean is a mean of: samples,
/// tokens that count, class weights. W is known after the last forward, and backward begins before it: micro-batches
/// are seeded with w_i / G, G being what the first one lets expect, and all gradients multiplied by G / W in the end.
/// Of samples G is W.
class LossWeights {
 public:
  /// `samples`: of the whole batch.
  explicit LossWeights(Index samples) : samples_(static_cast<double>(samples)) {}

  /// What the gradient by the next micro-batch's loss begins with. Throws UsageError where it is no mean over samples,
  /// or has several that are divided in different ways.
  double add(Node* root, double loss, Index samples) {
    double weight = static_cast<double>(samples);
    if (root != nullptr) {
      const auto overs = means_behind(*root);
      check<UsageError>(!overs.empty(),
                        "Pipeline: the model's loss is no mean over the batch: expected mean(), cross_entropy(), "
                        "mse_loss() or another loss of the library, with Reduction::mean");
      weight = overs.front();
      if (first_.empty()) first_ = overs;
      bool alike = overs.size() == first_.size();
      for (std::size_t i = 0; alike && i < overs.size(); ++i)
        alike = std::abs(overs[i] * first_.front() - overs.front() * first_[i]) <= 1e-9 * overs[i] * first_.front();
      check<UsageError>(alike,
                        "Pipeline: the model's loss is made of several means, which micro-batches divide in "
                        "different ways (the tokens that count, say): expected all over samples");
    }
    if (expected_ == 0)
      expected_ =
          weight > 0 && samples > 0 ? weight * samples_ / static_cast<double>(samples) : std::max(samples_, 1.0);
    total_ += weight;
    if (weight > 0) sum_ += weight * loss;
    last_ = loss;
    return weight / expected_;
  }
  /// The loss of the whole batch. Of one in which nothing counts it is what the last micro-batch says.
  double loss() const { return total_ > 0 ? sum_ / total_ : last_; }
  /// What it is a mean of.
  double total() const { return total_; }
  /// What all gradients are multiplied by.
  double correction() const { return total_ > 0 ? expected_ / total_ : 1; }

 private:
  // What the losses behind `root` are means of, in the order in which they are found; where there is none, the first
  // plain mean.
  static std::vector<double> means_behind(Node& root) {
    std::vector<double> losses, plain;
    std::vector<Node*> nodes{&root};
    std::unordered_set<Node*> seen{&root};
    using Context = std::pair<std::vector<Node*>*, std::unordered_set<Node*>*>;
    Context context{&nodes, &seen};
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i]->is_mean()) (nodes[i]->is_loss() ? losses : plain).push_back(nodes[i]->mean_over());
      nodes[i]->for_each_input(
          [](Node& input, void* to) {
            const auto [found, known] = *static_cast<Context*>(to);
            if (known->insert(&input).second) found->push_back(&input);
          },
          &context);
    }
    if (losses.empty() && !plain.empty()) losses.push_back(plain.front());
    return losses;
  }

  double samples_, expected_ = 0, total_ = 0, sum_ = 0, last_ = 0;
  std::vector<double> first_;
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LOSS_WEIGHTS_HPP

// <chorus/parallel/pipeline/pass_gradients.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_GRADIENTS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_GRADIENTS_HPP
/// The gradients of one pass through a pipeline, beside those that the parameters have from before.

// <chorus/parallel/pipeline/tied.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_TIED_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_TIED_HPP
/// Parameters that layers of several stages share, as an embedding and the output layer often do.

namespace chorus::pipeline {

/// Each of the stages' ranks has a copy of a tied parameter; they add up its gradients, to the same bits, and all take
/// the same step.
template <Device D>
class TiedParameters {
 public:
  /// `owners[i]`: the ranks that have parameter i of the whole model, falling in no order. A collective call.
  TiedParameters(comm::AnyCommunicator& all, const comm::World& world, const std::vector<Node*>& parameters,
                 const std::vector<std::vector<int>>& owners) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (owners[i].size() < 2) continue;
      bool mine = false;
      for (const int rank : owners[i]) mine = mine || rank == all.rank();
      Group* group = nullptr;
      for (Group& known : groups_)
        if (known.ranks == owners[i]) group = &known;
      if (group == nullptr) {
        groups_.push_back({owners[i], std::nullopt, {}});
        group = &groups_.back();
        auto communicator = comm::connect(comm::split(all, world, mine ? 0 : 1 + all.rank()));
        if (mine) group->communicator.emplace(std::move(communicator));
      }
      if (mine) group->parameters.push_back(parameters[i]);
    }
  }

  /// Calls `f(i, communicator)` for each tied parameter of `own`, this rank's, in the order of the model's members.
  template <class F>
  void for_each(const std::vector<nn::NamedParameter<D>>& own, const F& f) {
    for (Group& group : groups_)
      for (const Node* parameter : group.parameters)
        for (std::size_t i = 0; i < own.size(); ++i)
          if (own[i].handle.shared().get() == parameter) f(i, *group.communicator);
  }
  static void sum(comm::AnyCommunicator& group, const ParameterOn<D>& parameter, void* numbers) {
    const auto count = static_cast<std::size_t>(parameter.count());
    const auto add_up = [&]<class T>(T* of_type) {
      group.all_reduce(std::span(of_type, count), comm::ReduceOp::sum, {.traffic = trace::Traffic::gradients});
    };
    if (parameter.dtype() == DType::f32)
      add_up(static_cast<float*>(numbers));
    else
      add_up(static_cast<double*>(numbers));
  }
  /// Whether this rank has one.
  bool any() const {
    for (const Group& group : groups_)
      if (group.communicator) return true;
    return false;
  }
  /// Whether this rank is the one whose numbers count where each is to count once.
  bool counts_here(const Node& parameter, int rank) const {
    for (const Group& group : groups_)
      for (const Node* known : group.parameters)
        if (known == &parameter) return group.ranks.front() == rank;
    return true;
  }
  void abort(std::string_view why) noexcept {
    for (Group& group : groups_)
      if (group.communicator) group.communicator->abort(why);
  }

 private:
  struct Group {
    std::vector<int> ranks;
    std::optional<comm::AnyCommunicator> communicator;  // where this rank is in it
    std::vector<const Node*> parameters;
  };
  std::vector<Group> groups_;
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_TIED_HPP

namespace chorus::pipeline {

/// While a pass is recorded a leaf stands in each parameter's place, and collects the gradients of its micro-batches.
/// The user's backward then adds them, times its seed, to the parameters' own, or never comes, and they are dropped.
template <Device D>
class PassGradients {
 public:
  explicit PassGradients(const std::vector<nn::NamedParameter<D>>& parameters)
      : parameters_(parameters), stand_ins_(parameters.size()) {
    for (std::size_t i = 0; i < stand_ins_.size(); ++i)
      if (parameter(i).wants_grad()) {
        stand_ins_[i] = parameter(i).make_stand_in();
        leaves_.insert(stand_ins_[i].get());
      }
  }

  /// While it lives, what is recorded goes to the stand-ins.
  class Scope {
   public:
    explicit Scope(const PassGradients& gradients) : gradients_(gradients) { set(true); }
    ~Scope() { set(false); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void set(bool stand_in) const {
      for (std::size_t i = 0; i < gradients_.stand_ins_.size(); ++i)
        if (gradients_.stand_ins_[i])
          gradients_.parameter(i).set_origin(stand_in ? gradients_.stand_ins_[i] : Ref<Node>());
    }
    const PassGradients& gradients_;
  };

  /// The stand-ins.
  const std::unordered_set<const Node*>& leaves() const { return leaves_; }

  /// Adds up those of parameters that several stages have. A collective call of those stages' ranks.
  void sum_tied(TiedParameters<D>& tied) {
    const MemoryScope memory(trace::Memory::gradients);
    sums_.resize(stand_ins_.size());
    tied.for_each(parameters_, [&](std::size_t i, auto& group) {
      if (!stand_ins_[i]) return;
      sums_[i] = Storage<D>(parameter(i).where(), parameter(i).size_bytes());
      if (const void* const own = parameter(i).grad_data_of(*stand_ins_[i]); own != nullptr)
        copy_bytes(D{}, sums_[i].data(), D{}, own, sums_[i].bytes());
      else
        zero_bytes(D{}, sums_[i].data(), sums_[i].bytes());
      TiedParameters<D>::sum(group, parameter(i), sums_[i].data());
    });
  }

  /// Adds `scale` times the pass's gradients to the parameters'.
  void add_to_parameters(double scale) {
    for (std::size_t i = 0; i < stand_ins_.size(); ++i) {
      const void* const from = gradient(i);
      if (from == nullptr) continue;
      if (parameter(i).dtype() == DType::f32)
        add<float>(parameter(i), from, scale);
      else
        add<double>(parameter(i), from, scale);
      parameters_[i].handle.shared()->set_reached();
    }
  }

  template <class F>
  void for_each_leaf(const F& f) const {
    for (std::size_t i = 0; i < stand_ins_.size(); ++i)
      if (stand_ins_[i]) f(*parameters_[i].handle.shared());
  }

 private:
  ParameterOn<D>& parameter(std::size_t i) const { return *parameters_[i].parameter; }
  const void* gradient(std::size_t i) const {
    if (!stand_ins_[i]) return nullptr;
    return i < sums_.size() && sums_[i] ? sums_[i].data() : parameter(i).grad_data_of(*stand_ins_[i]);
  }
  template <class T>
  static void add(ParameterOn<D>& parameter, const void* from, double scale) {
    auto* const to = static_cast<T*>(parameter.grad_data());
    if (!parameter.grad_arrived()) zero_bytes(parameter.where(), to, parameter.size_bytes());
    kernels::axpy(parameter.where(), parameter.count(), static_cast<T>(scale), static_cast<const T*>(from), to);
    parameter.set_grad_arrived(true);
  }

  const std::vector<nn::NamedParameter<D>>& parameters_;
  std::vector<Ref<Node>> stand_ins_;  // none of frozen parameters
  std::unordered_set<const Node*> leaves_;
  std::vector<Storage<D>> sums_;  // of tied ones
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_GRADIENTS_HPP

// <chorus/parallel/pipeline/wires.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_WIRES_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_WIRES_HPP
/// The messages between neighbouring stages of a pipeline.

namespace chorus::pipeline {

/// An engine's calls run in their order, and a `send` may wait until the peer receives. Two neighbours that each had
/// activations and gradients in one queue would wait for each other once messages are larger than the link's room; so
/// each edge has a group of two ranks for each direction. Edges that meet in a rank can't be made by one `split`: even
/// and odd ones are made in turn.
template <Device D>
class Wires {
 public:
  enum class Direction : std::uint8_t { forward, backward };

  /// What is sent counts as `Traffic::activations`, headers as control. A ring, which also has an edge from the last
  /// rank to the first, is for ranks with several stages. A collective call of all ranks.
  Wires(comm::AnyCommunicator& all, const comm::World& world, bool ring) : rank_(all.rank()), size_(all.size()) {
    const int edges = size_ == 1 ? 0 : ring ? size_ : size_ - 1;
    const int colors = edges == size_ && size_ % 2 == 1 ? 3 : std::min(edges, 2);
    for (const Direction direction : {Direction::forward, Direction::backward})
      for (int color = 0; color < colors; ++color) {
        int own = -1;  // the edge of this color that this rank is at an end of
        for (int edge = 0; edge < edges; ++edge)
          if (color_of(edge) == color && (edge == rank_ || (edge + 1) % size_ == rank_)) own = edge;
        auto group = comm::connect(comm::split(all, world, own >= 0 ? own : size_ + rank_,
                                               /*key=*/own == rank_ ? 0 : 1));
        if (own >= 0) links_[static_cast<std::size_t>(direction)][own == rank_ ? out : in].emplace(std::move(group));
      }
  }

  /// Sends what belongs to `header.stage`, on rank `to`: an activation's numbers, or the gradient by it. Returns before
  /// it has gone; the activation is kept until then.
  void send(Direction direction, int to, const Header& header, std::shared_ptr<AnyActivation<D>> what) {
    if (to == rank_) return local_.push_back({direction, header, std::move(what)});
    auto& wire = link(direction, direction == Direction::forward ? out : in);
    auto& message = on_their_way_.emplace_back();
    message.header = header;
    message.what = std::move(what);
    const auto numbers = direction == Direction::forward ? message.what->numbers() : message.what->gradient();
    message.head = wire.send_async(bytes_of(message.header), 1 - wire.rank());
    message.body = wire.send_async(std::span(static_cast<const std::uint8_t*>(numbers), message.what->bytes()),
                                   1 - wire.rank(), activations);
    while (!on_their_way_.empty() && on_their_way_.front().body.done()) on_their_way_.pop_front();
  }

  /// Waits for the message of that stage, micro-batch and part. `place(header)` gives the activation whose
  /// numbers, or whose gradient, are to be filled. Those of others that come first are kept.
  template <class Place>
  std::shared_ptr<AnyActivation<D>> receive(Direction direction, const Header& which, const Place& place) {
    const auto is_it = [&](Direction d, const Header& header) {
      return d == direction && header.stage == which.stage && header.micro_batch == which.micro_batch &&
             header.part == which.part;
    };
    for (auto message = local_.begin(); message != local_.end(); ++message)
      if (is_it(message->direction, message->header)) {
        auto what = std::move(message->what);
        const Header header = message->header;
        local_.erase(message);
        auto into = place(header);
        copy_bytes(D{}, room(direction, *into), D{},
                   direction == Direction::forward ? what->numbers() : what->gradient(), into->bytes());
        return into;
      }
    for (auto message = early_.begin(); message != early_.end(); ++message)
      if (is_it(message->direction, message->header)) {
        auto into = place(message->header);
        copy_bytes(D{}, room(direction, *into), D{}, message->numbers.data(), into->bytes());
        early_.erase(message);
        return into;
      }
    auto& wire = link(direction, direction == Direction::forward ? in : out);
    for (;;) {
      Header header;
      wire.recv(std::span(reinterpret_cast<std::uint8_t*>(&header), sizeof header), 1 - wire.rank());
      if (is_it(direction, header)) {
        auto into = place(header);
        wire.recv(std::span(static_cast<std::uint8_t*>(room(direction, *into)), into->bytes()), 1 - wire.rank(),
                  activations);
        return into;
      }
      const std::size_t bytes = header.bytes();
      early_.push_back({direction, header, Storage<D>(D{}, bytes)});
      wire.recv(std::span(static_cast<std::uint8_t*>(early_.back().numbers.data()), bytes), 1 - wire.rank(),
                activations);
    }
  }

  /// Returns when all that was sent has gone.
  void flush() {
    for (Message& message : on_their_way_) message.head.wait(), message.body.wait();
    on_their_way_.clear();
  }
  void abort(std::string_view why) noexcept {
    for (auto& direction : links_)
      for (auto& link : direction)
        if (link) link->abort(why);
  }

 private:
  static constexpr comm::CollectiveOptions activations{.traffic = trace::Traffic::activations};
  enum End : std::uint8_t { out, in };  // of an edge, as the activations see it

  struct Message {
    Header header;
    std::shared_ptr<AnyActivation<D>> what;
    comm::Work head, body;
  };
  struct Local {
    Direction direction;
    Header header;
    std::shared_ptr<AnyActivation<D>> what;
  };
  struct Early {
    Direction direction;
    Header header;
    Storage<D> numbers;
  };

  // Edge e goes from rank e to the next one.
  int color_of(int edge) const { return edge == size_ - 1 && size_ % 2 == 1 ? 2 : edge % 2; }
  comm::AnyCommunicator& link(Direction direction, End end) {
    return *links_[static_cast<std::size_t>(direction)][end];
  }
  static std::span<const std::uint8_t> bytes_of(const Header& header) {
    return {reinterpret_cast<const std::uint8_t*>(&header), sizeof header};
  }
  static void* room(Direction direction, AnyActivation<D>& into) {
    return direction == Direction::forward ? into.numbers() : into.gradient_to_come();
  }

  const int rank_, size_;
  std::optional<comm::AnyCommunicator> links_[2][2];
  std::deque<Message> on_their_way_;
  std::deque<Local> local_;
  std::deque<Early> early_;
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_WIRES_HPP

namespace chorus::pipeline {

/// Layers that want the whole batch's statistics say so here.
struct NoWholeBatch final : BatchGroup {
  void sum(std::span<double>) override {
    fail<UsageError>(
        "Pipeline: SyncBatchNorm in training needs the whole batch at once, and stages see one "
        "micro-batch after the other: expected nn::BatchNorm, which takes each micro-batch's statistics, or a norm "
        "without any, such as nn::GroupNorm or nn::LayerNorm");
  }
  double weight() override { return 1; }
  void check_mean_over() const override {
    fail<UsageError>(
        "Pipeline: mean_over in a model that returns its loss: expected none, for each micro-batch's loss "
        "says by itself what it is a mean of");
  }
};

/// What a pass works with. What is passed by reference outlives it.
template <class Model>
struct PassFacts {
  using D = typename Model::device_type;
  const Model& model;
  const std::vector<Stage>& stages;
  const Schedule& schedule;
  Wires<D>& wires;
  const std::vector<nn::NamedParameter<D>>& parameters;  ///< this rank's
  RandomContext random;  ///< of the pass
  Index samples;
  D device;
};

template <class Model, class X, class... Targets>
class Pass {
 public:
  using D = typename Model::device_type;
  using Chain = pipeline::Chain<Model, X, Targets...>;
  using Result = typename Chain::Result;
  static_assert(Operand<Result>, "Pipeline: the model returns a Tensor or a Variable: its loss, or its output");
  using Action = Schedule::Action;
  /// Whether the model returns its loss.
  static constexpr bool gives_loss = tensor_of<Result>::rank == 0;

  using Facts = PassFacts<Model>;

  Pass(const Facts& facts, const X& x, const Targets&... targets)
      : facts_(facts),
        x_(x),
        targets_(targets...),
        recorded_(grad_enabled()),
        weights_(facts.samples),
        kept_(static_cast<std::size_t>(facts.schedule.stages * facts.schedule.micro_batches)),
        results_(static_cast<std::size_t>(facts.schedule.micro_batches)) {
    if (recorded_) gradients_.emplace(facts.parameters);
  }

  /// Receives a stage's input, runs the stage, and sends its output on, with what is stashed for later ones.
  void forward(const Action& action) {
    const bool first = action.stage == 0, last = action.stage + 1 == facts_.schedule.stages;
    const Stage& stage = facts_.stages[static_cast<std::size_t>(action.stage)];
    Header header{.micro_batch = action.micro_batch, .stage = action.stage};
    Kept here;
    if (first) {
      here.inputs.push_back({"", std::make_shared<Activation<X>>(rows(x_, action.micro_batch))});
    } else {
      receive_input(here, header, [&](const Header& came) { return Chain::room_for(stage, came, facts_.device); });
      for (int part = 1; part <= header.stashed; ++part) {
        Header stashed = header;
        stashed.part = static_cast<std::uint8_t>(part);
        receive_input(here, stashed,
                      [&](const Header& came) { return std::make_shared<RawActivation<D>>(came, facts_.device); });
      }
    }
    if (action.micro_batch == 0 && first) header.batch = fingerprint();
    if (action.micro_batch == 0 && last) check_same_batch(header);
    auto result = run(stage, action.micro_batch, header, here);
    if (last) {
      drew_ = drew_ || header.drew != 0;
      if constexpr (gives_loss) weigh(action.micro_batch, *result);
      results_[static_cast<std::size_t>(action.micro_batch)] = std::move(result);
    } else {
      for (std::size_t part = 0; part < here.outputs.size(); ++part) {
        Header next = here.outputs[part].value->header();
        next.micro_batch = action.micro_batch;
        next.stage = action.stage + 1;
        next.next_operation = header.next_operation;
        next.drew = header.drew;
        next.batch = header.batch;
        next.part = static_cast<std::uint8_t>(part);
        next.stashed = static_cast<std::uint8_t>(here.outputs.size() - 1);
        std::copy(here.outputs[part].name.begin(), here.outputs[part].name.end(), next.name.begin());
        facts_.wires.send(Direction::forward, rank_of(action.stage + 1), next, here.outputs[part].value);
      }
    }
    if (recorded_) kept(action) = std::move(here);
  }

  /// Receives the gradients by a stage's output, goes back through the stage, and sends those by its input on.
  void backward(const Action& action) {
    Kept& here = kept(action);
    std::vector<Ref<Node>> roots;
    if (action.stage + 1 == facts_.schedule.stages) {
      if (auto root = result_root(action.micro_batch)) roots.push_back(std::move(root));
    }
    for (std::size_t part = 0; part < here.outputs.size(); ++part) {
      AnyActivation<D>& output = *here.outputs[part].value;
      if (output.header().wants_grad == 0) continue;
      facts_.wires.receive(Direction::backward, header_of(action, action.stage, part),
                           [&](const Header&) { return here.outputs[part].value; });
      if (auto root = output.take_gradient()) roots.push_back(std::move(root));
    }
    here.later.weights = &gradients_->leaves();
    {
      const typename PassGradients<D>::Scope stand_ins(*gradients_);  // for what checkpoints compute again
      const detail::DeferralScope put_off(splits_ ? &here.later : nullptr);
      run_backward(roots, {.hooks = false});
    }
    here.outputs.clear();
    for (std::size_t part = 0; part < here.inputs.size(); ++part) {
      auto input = std::move(here.inputs[part].value);
      if (input->header().wants_grad == 0) continue;
      Header header = header_of(action, action.stage - 1, part);
      header.dtype = input->header().dtype;
      header.rank = input->header().rank;
      header.extents = input->header().extents;
      facts_.wires.send(Direction::backward, rank_of(action.stage - 1), header, std::move(input));
    }
    here.inputs.clear();
  }

  /// What `backward` has put off.
  void weight(const Action& action) {
    const NoGrad no_grad;
    kept(action).later.run();
  }

  bool recorded() const { return recorded_; }
  bool drew() const { return drew_; }
  bool loss_wants_grad() const { return loss_wants_grad_; }
  const LossWeights& weights() const { return weights_; }
  PassGradients<D>& gradients() { return *gradients_; }
  std::vector<std::optional<Result>>& results() { return results_; }
  Index begin(int micro_batch) const {
    return share_begin(facts_.samples, static_cast<std::size_t>(facts_.schedule.micro_batches),
                       static_cast<std::size_t>(micro_batch));
  }
  Index size(int micro_batch) const { return begin(micro_batch + 1) - begin(micro_batch); }

  /// On the last rank: the gradient by what the model returned for the whole batch.
  void take_result_gradient(const tensor_of<Result>& gradient) { result_gradient_ = gradient; }

 private:
  using Direction = typename Wires<D>::Direction;
  using Stashes = nn::detail::Stashes<D>;
  struct Kept {
    std::vector<typename Stashes::Entry> inputs, outputs;  // what goes from layer to layer, and what is stashed
    detail::DeferredGradients later;
  };

  Kept& kept(const Action& action) {
    return kept_[static_cast<std::size_t>(action.stage * facts_.schedule.micro_batches + action.micro_batch)];
  }
  int rank_of(int stage) const { return facts_.schedule.rank_of(stage); }

  static Header header_of(const Action& action, int stage, std::size_t part) {
    return {.micro_batch = action.micro_batch, .stage = stage, .part = static_cast<std::uint8_t>(part)};
  }
  // `header` becomes the one that has come.
  template <class Room>
  void receive_input(Kept& here, Header& header, const Room& room) {
    auto value = facts_.wires.receive(Direction::forward, Header(header), [&](const Header& came) {
      header = came;
      return std::shared_ptr<AnyActivation<D>>(room(came));
    });
    here.inputs.push_back({header.name.data(), std::move(value)});
  }

  // The last stage has the targets, the first one the inputs.
  void check_same_batch(const Header& header) const {
    check<UsageError>(header.batch == fingerprint(),
                      "Pipeline: this rank has another batch than rank 0: all ranks call "
                      "the net with the same one, as net.sampler(dataset) gives it");
  }
  std::uint64_t fingerprint() const {
    std::uint64_t all = 0;
    const auto add = [&]<class Input>(const Input& input) {
      if constexpr (AnyTensor<Input>) {
        const auto dense = contiguous(input);
        const std::string_view bytes(reinterpret_cast<const char*>(dense.data()), dense.bytes());
        all = all * 0x9E3779B97F4A7C15u + std::hash<std::string_view>()(bytes);
      }
    };
    add(x_);
    std::apply([&](const auto&... targets) { (add(targets), ...); }, targets_);
    return all;
  }

  // A micro-batch's rows; what has no axes goes to each as it is.
  template <class Input>
  Input rows(const Input& input, int micro_batch) const {
    if constexpr (AnyTensor<Input>)
      if constexpr (Input::rank > 0) return contiguous(input.slice(0, begin(micro_batch), begin(micro_batch + 1)));
    return input;
  }

  // The model's layers draw the numbers that they draw on one device: by the samples' places in the whole batch, and by
  // the number of random operations in the stages before.
  std::optional<Result> run(const Stage& stage, int micro_batch, Header& header, Kept& here) {
    RandomContext random = facts_.random;
    random.next_operation = header.next_operation;
    random.samples = size(micro_batch);
    random.first_sample = [first = begin(micro_batch), &of_batch = facts_.random.first_sample] {
      return (of_batch ? of_batch() : 0) + first;
    };
    random.devices = 2;  // what has other rows than samples is the same for all micro-batches
    const RandomScope numbers(random);
    const BatchGroupScope group(whole_batch_);
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    std::optional<typename PassGradients<D>::Scope> stand_ins;
    if (recorded_) stand_ins.emplace(*gradients_);
    const Stashes stashes({here.inputs.begin() + 1, here.inputs.end()});
    auto outcome = std::apply(
        [&](const auto&... targets) {
          return Chain::run(facts_.model, stage, *here.inputs.front().value, rows(targets, micro_batch)...);
        },
        targets_);
    header.next_operation = random.next_operation;
    header.drew = header.drew != 0 || random.drew;
    if (!outcome.output) return stashes.checked(std::move(outcome.result));
    here.outputs = stashes.entries();
    here.outputs.insert(here.outputs.begin(), {"", std::move(outcome.output)});
    return {};
  }

  // Of a model that returns its loss: the loss's part in the batch's is where backward begins.
  void weigh(int micro_batch, const Result& loss) {
    const auto node = node_of(loss);
    loss_wants_grad_ = loss_wants_grad_ || static_cast<bool>(node);
    const double weight =
        weights_.add(recorded_ ? node.get() : nullptr, static_cast<double>(value_of(loss).item()), size(micro_batch));
    using T = typename tensor_of<Result>::value_type;
    if (recorded_ && node) node->add(Tensor<T, 0, D>::full({}, static_cast<T>(weight), facts_.device));
  }

  // Where backward begins; null where nothing wants a gradient.
  Ref<Node> result_root(int micro_batch) {
    const auto result = std::exchange(results_[static_cast<std::size_t>(micro_batch)], std::nullopt);
    if constexpr (AnyVariable<Result>) {
      if (!result->node()) return {};
      if constexpr (!gives_loss) result->node()->add(contiguous(rows_of_result(micro_batch)));
      return result->node();
    } else {
      return {};
    }
  }
  // The result may have several rows of each sample.
  auto rows_of_result(int micro_batch) const {
    const Index of_sample = facts_.samples == 0 ? 1 : result_gradient_.size(0) / facts_.samples;
    return result_gradient_.slice(0, begin(micro_batch) * of_sample, begin(micro_batch + 1) * of_sample);
  }

  const Facts facts_;
  const X x_;
  const std::tuple<Targets...> targets_;
  const bool recorded_;
  const bool splits_ = facts_.schedule.splits_backward();
  LossWeights weights_;
  std::optional<PassGradients<D>> gradients_;
  std::vector<Kept> kept_;  // by stage and micro-batch
  std::vector<std::optional<Result>> results_;
  tensor_of<Result> result_gradient_;
  bool drew_ = false, loss_wants_grad_ = false;
  std::shared_ptr<BatchGroup> whole_batch_ = std::make_shared<NoWholeBatch>();
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_HPP

// <chorus/parallel/pipeline/pass_node.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_NODE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_NODE_HPP
/// What stands on the tape for a pass through a pipeline.

namespace chorus::pipeline {

template <Real T, int Rank, Device D>
class PassNode final : public GradNode<T, Rank, D> {
 public:
  using Back = std::function<void(const Tensor<T, Rank, D>& gradient, bool keep)>;

  /// `back` sends the gradient by the pass's result to `leaves`, or to some of them.
  PassNode(const Tensor<T, Rank, D>& value, std::vector<Ref<Node>> leaves, Back back)
      : GradNode<T, Rank, D>("Pipeline", value.shape(), value.device()),
        leaves_(std::move(leaves)),
        back_(std::move(back)) {}

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check<UsageError>(static_cast<bool>(back_), "backward: the pass through the pipeline was freed by an earlier ",
                      "backward; pass retain_graph = true to that one");
    const auto gradient = this->take_grad();
    back_(gradient, keep);
    if (!keep) back_ = nullptr;
  }
  void backward_to_wanted(bool) override {
    fail<UsageError>("Pipeline: grad() does not go through a pipeline's forward pass: expected backward()");
  }
  void for_each_input(void (*)(Node&, void*), void*) const override {}
  void for_each_far_leaf(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& leaf : leaves_) visit(*leaf, context);
  }
  bool only_to_inputs() const override { return false; }

 private:
  std::vector<Ref<Node>> leaves_;
  Back back_;
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_PASS_NODE_HPP

// <chorus/parallel/pipeline/stages.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_STAGES_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_STAGES_HPP
/// What a rank of a pipeline holds: its stages' parameters, the wires to its neighbours, and what all ranks agree on.

// <chorus/parallel/pipeline/cut.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CUT_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CUT_HPP
/// Where a pipeline cuts its model.

namespace chorus {

/// Stages with nearly equal bytes of parameters.
struct EqualBytes {};

/// Before these layers, counted from 0 in the order of CHORUS_PIPELINE, each module of a ModuleList as one: `At{3, 7}`.
struct At {
  std::vector<int> layers;
  At(std::initializer_list<int> before) : layers(before) {}
  explicit At(std::vector<int> before) : layers(std::move(before)) {}
};

/// Stages that take nearly equally long, by what each layer takes: `ByTime{layer_times(model, x)}`, see
/// pipeline/layer_times.hpp. Rank 0's numbers count.
struct ByTime {
  std::vector<double> seconds;
};

using PipelineCut = std::variant<EqualBytes, At, ByTime>;

namespace pipeline {

/// Cuts `costs` into `stages` runs, none of them empty, whose largest sum is as small as it can be. Returns where each
/// begins, and the end.
[[gnu::cold]] inline std::vector<std::size_t> balanced(std::span<const double> costs, std::size_t stages) {
  const std::size_t n = costs.size();
  // worst[s][i]: the smallest largest sum of the first i costs in s runs; begin[s][i]: where the last one begins.
  std::vector<std::vector<double>> worst(stages + 1,
                                         std::vector<double>(n + 1, std::numeric_limits<double>::infinity()));
  std::vector<std::vector<std::size_t>> begin(stages + 1, std::vector<std::size_t>(n + 1));
  worst[0][0] = 0;
  for (std::size_t s = 1; s <= stages; ++s)
    for (std::size_t i = s; i <= n; ++i) {
      double sum = 0;
      for (std::size_t b = i; b-- > s - 1;) {
        sum += costs[b];
        const double largest = std::max(worst[s - 1][b], sum);
        if (largest < worst[s][i]) worst[s][i] = largest, begin[s][i] = b;
      }
    }
  std::vector<std::size_t> out{n};
  for (std::size_t s = stages; s > 0; --s) out.push_back(begin[s][out.back()]);
  std::reverse(out.begin(), out.end());
  return out;
}

/// Where each of the stages begins, and the end. `bytes`: of each layer's parameters. Throws UsageError for a cut that
/// doesn't fit the model.
[[gnu::cold]] inline std::vector<std::size_t> stage_begins(const PipelineCut& cut, std::span<const double> bytes,
                                                           std::size_t stages) {
  check<UsageError>(bytes.size() >= stages, "Pipeline: ", stages, " stages for a model of ", bytes.size(),
                    " layers in CHORUS_PIPELINE: expected at least as many layers");
  if (const auto* const at = std::get_if<At>(&cut)) {
    check<UsageError>(at->layers.size() + 1 == stages, "Pipeline: At{", std::span(at->layers), "} makes ",
                      at->layers.size() + 1, " stages, expected ", stages);
    std::vector<std::size_t> out{0};
    for (const int layer : at->layers) {
      check<UsageError>(layer > static_cast<int>(out.back()) && layer < static_cast<int>(bytes.size()), "Pipeline: At{",
                        std::span(at->layers), "}: expected rising numbers of layers from 1 to ", bytes.size() - 1);
      out.push_back(static_cast<std::size_t>(layer));
    }
    out.push_back(bytes.size());
    return out;
  }
  if (const auto* const time = std::get_if<ByTime>(&cut)) {
    check<UsageError>(time->seconds.size() == bytes.size(), "Pipeline: ByTime has ", time->seconds.size(),
                      " times for ", bytes.size(), " layers: expected those of layer_times(model, x)");
    return balanced(time->seconds, stages);
  }
  return balanced(bytes, stages);
}

}  // namespace pipeline

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_CUT_HPP

// <chorus/parallel/pipeline/elsewhere.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_ELSEWHERE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_ELSEWHERE_HPP
/// Parameters and buffers of other stages: their memory is given back, and who reads them is told.

namespace chorus::pipeline {

/// Addresses at which every bit is 1, which is a NaN to floating-point numbers, all within one small piece of memory.
/// For tensors that a program has kept of numbers that are no longer here: a pointer can't throw.
[[gnu::cold]] inline std::shared_ptr<void> only_nans(std::size_t bytes) {
  constexpr std::size_t granule = 64 << 10, most_pieces = 1024;
  const std::size_t piece = std::max(granule, (bytes / most_pieces / granule + 1) * granule);
  const std::size_t size = (bytes + piece - 1) / piece * piece;
  const int file = memfd_create("chorus-elsewhere", MFD_CLOEXEC);
  check<Error>(file >= 0, "Pipeline: no memory file for the parameters of other stages");
  struct Close {
    int file;
    ~Close() { close(file); }
  } const at_end{file};
  const std::vector<unsigned char> ones(piece, 0xFF);
  void* const begin = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  check<Error>(begin != MAP_FAILED && write(file, ones.data(), piece) == static_cast<ssize_t>(piece),
               "Pipeline: no memory for the parameters of other stages");
  std::shared_ptr<void> memory(begin, [size](void* mapped) { munmap(mapped, size); });
  for (std::size_t at = 0; at < size; at += piece)
    check<Error>(mmap(static_cast<std::byte*>(begin) + at, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file,
                      0) != MAP_FAILED,
                 "Pipeline: no addresses for the parameters of other stages");
  return memory;
}

/// Gives the memory of numbers back. Handles throw UsageError with `why` from now on; tensors of them hold NaNs.
template <Device D>
void send_away(const std::vector<const detail::AtHome<D>*>& numbers, const std::vector<std::string>& why) {
  std::size_t largest = 0;
  for (const auto* each : numbers) largest = std::max(largest, each->size_bytes());
  if (largest == 0) return;
  const Storage<D> nowhere(D{}, only_nans(largest), largest);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i]->touch();
    numbers[i]->storage().move_home(nowhere, nowhere.data());
    numbers[i]->storage().writes()->end_watch();
    numbers[i]->storage().writes()->elsewhere = why[i];
  }
}

/// Gives numbers that were sent away memory again; what is in it is not said.
template <Device D>
void fetch_back(const detail::AtHome<D>& numbers, D device) {
  const MemoryScope scope(trace::Memory::parameters);
  const Storage<D> near(device, numbers.size_bytes());
  numbers.storage().writes()->elsewhere.clear();
  numbers.storage().move_home(near, near.data());
}

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_ELSEWHERE_HPP

namespace chorus {

struct PipelineOptions {
  /// Into how many a batch is cut; one with fewer samples, into one of each sample. Sizes differ by at most one.
  int micro_batches = 8;
  /// Where the model is cut: EqualBytes{}, At{3, 7}, or ByTime{layer_times(model, x)}.
  PipelineCut cut = EqualBytes{};
};

namespace pipeline {

template <class Model, class Order, class Communicator>
class Stages {
 public:
  using D = typename nn::detail::DeviceOfModel<Model>::type;
  static_assert(std::is_same_v<D, Cpu>, "Pipeline: models on the CPU");
  static_assert(
      requires { Model::pipeline_names; },
      "Pipeline: the model needs CHORUS_PIPELINE(...) with its links in their order");

  /// All ranks begin with rank 0's numbers. A collective.
  Stages(Model model, Communicator& communicator, const comm::World& world, const PipelineOptions& options)
      : model_(std::move(model)), communicator_(communicator), options_(options) {
    check<UsageError>(options.micro_batches >= 1, "Pipeline: micro_batches is at least 1, got ", options.micro_batches);
    stage_count_ = static_cast<std::size_t>(Order::of(communicator.size(), 1).stages);
    take_first_state();
    cut();
    keep_own(world);
  }
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;

  Model& model() { return model_; }
  /// This rank's layers, by the names that they have in the model. What another one's layer has, too, has its name.
  void visit(nn::Visitor& visitor) {
    for (auto& [name, handle] : named_elsewhere_) visitor.parameter(name, handle);
    own_->visit(visitor);
  }
  Communicator& communicator() const { return communicator_; }
  const PipelineOptions& options() const { return options_; }
  const std::vector<std::size_t>& stage_begins() const { return begins_; }

  /// Calls `f(model)` on every rank while all parameters and buffers are there, in memory of the whole model, as for
  /// `io::save` by rank 0. What `f` writes, as `io::load` does, stays; all ranks write the same. All ranks call it.
  template <class F>
  void gathered(const F& f) {
    or_all_end([&] {
      std::vector<const detail::AtHome<D>*> foreign;
      std::vector<std::string> why;
      for (const Numbers& each : numbers_) {
        if (!each.why.empty()) {
          fetch_back(*each.numbers, D{});
          foreign.push_back(each.numbers);
          why.push_back(each.why);
        }
        broadcast(each.numbers->memory(), each.numbers->size_bytes(), each.owner, trace::Traffic::parameters);
        each.numbers->touch();
      }
      struct AtEnd {
        const std::vector<const detail::AtHome<D>*>& foreign;
        const std::vector<std::string>& why;
        ~AtEnd() { send_away<D>(foreign, why); }
      } const at_end{foreign, why};
      f(model_);
    });
  }

  /// Whether this rank has a parameter that another one's stages have, too.
  bool ties_stages() const { return tied_->any(); }
  /// Whether a parameter's numbers count here, where those that several stages have are to count once.
  bool counts(const nn::NamedParameter<D>& named) const {
    return tied_->counts_here(*named.handle.shared(), communicator_.rank());
  }

  template <class First, class... Rest>
  Index samples_of(const First& first, const Rest&... rest) const {
    static_assert(AnyTensor<First> && First::rank >= 1,
                  "Pipeline: the input is a Tensor with the samples along axis 0");
    const Index samples = first.size(0);
    [[maybe_unused]] const auto look = [&]<class Input>(const Input& input) {
      static_assert(!AnyVariable<Input>, "Pipeline: targets are Tensors, to which no gradient goes");
      if constexpr (AnyTensor<Input>)
        if constexpr (Input::rank > 0)
          check<ShapeError>(input.size(0) == samples, "Pipeline: the input has ", samples, " samples, and a target ",
                            input.size(0));
    };
    (look(rest), ...);
    return samples;
  }

  const Schedule& schedule_for(Index samples) {
    const int m = static_cast<int>(std::clamp<Index>(samples, 1, options_.micro_batches));
    const auto known = schedules_.find(m);
    if (known != schedules_.end()) return known->second;
    auto schedule = Order::of(communicator_.size(), m);
    check<UsageError>(schedule.size() == communicator_.size() &&
                          static_cast<std::size_t>(schedule.stages) == stage_count_ && schedule.micro_batches == m,
                      "Pipeline: the schedule for ", communicator_.size(), " ranks and ", m, " micro-batches has ",
                      schedule.size(), " and ", schedule.micro_batches, ", and ", schedule.stages, " stages for ",
                      stage_count_);
    check_schedule(schedule);
    return schedules_.emplace(m, std::move(schedule)).first->second;
  }
  const std::vector<Schedule::Action>& own_actions(const Schedule& schedule) const {
    return schedule.ranks[static_cast<std::size_t>(communicator_.rank())];
  }

  auto facts(const Schedule& schedule, const RandomContext& random, Index samples) {
    using Facts = PassFacts<Model>;
    return Facts{model_, stages_, schedule, *wires_, parameters_, random, samples, D{}};
  }
  /// Of results on the tape, which may live longer.
  std::weak_ptr<void> alive() const { return alive_; }
  TiedParameters<D>& tied() { return *tied_; }
  void flush() { wires_->flush(); }
  /// For messages.
  void at_stage(int stage) { stage_now_ = stage; }

  /// What a pass has given, on all ranks.
  template <class Value>
  struct Shared {
    Value value;
    double correction = 1;  ///< of gradients: see LossWeights
    double mean_over = 0;   ///< what a loss is a mean of
    bool wants_grad = false, drew = false;
  };

  /// The last stage's result, for all.
  template <class Pass>
  auto share_result(const Schedule& schedule, Pass& pass) {
    using Value = tensor_of<typename Pass::Result>;
    flush();
    const int root = schedule.rank_of(schedule.stages - 1);
    Shared<Value> shared;
    Header header;
    if (communicator_.rank() == root) {
      shared.value = whole_result(schedule, pass);
      std::copy(shared.value.shape().begin(), shared.value.shape().end(), header.extents.begin());
      header.wants_grad = result_wants_grad_;
      header.drew = pass.drew();
    }
    broadcast(&header, sizeof header, root, trace::Traffic::control);
    if (communicator_.rank() != root) {
      Shape<Value::rank> shape{};
      std::copy_n(header.extents.begin(), Value::rank, shape.begin());
      shared.value = Value::empty(shape, D{});
    }
    broadcast(shared.value.data(), shared.value.bytes(), root, trace::Traffic::outputs);
    if constexpr (Pass::gives_loss) {
      double of_loss[] = {pass.weights().correction(), pass.weights().total()};
      broadcast(of_loss, sizeof of_loss, root, trace::Traffic::control);
      shared.correction = of_loss[0];
      shared.mean_over = of_loss[1];
    }
    shared.wants_grad = header.wants_grad != 0;
    shared.drew = header.drew != 0;
    return shared;
  }

  /// Runs a part of a step. Whatever is thrown ends all ranks: none waits for what does not come.
  template <class Part>
  auto or_all_end(const Part& part) {
    try {
      return part();
    } catch (const CommError& error) {
      abort(error.what());
      throw;
    } catch (const std::exception& error) {
      abort(cat("Pipeline: stage ", stage_now_, ", on rank ", communicator_.rank(), ", threw: ", error.what()));
      throw;
    } catch (...) {
      abort(cat("Pipeline: stage ", stage_now_, ", on rank ", communicator_.rank(), ", threw what is no exception"));
      throw;
    }
  }

 private:
  void broadcast(void* data, std::size_t bytes, int root, trace::Traffic traffic) {
    if (bytes > 0 && communicator_.size() > 1)
      communicator_.broadcast(std::span(static_cast<std::uint8_t*>(data), bytes), root, {.traffic = traffic});
  }

  // Of a loss the mean by weights, of outputs all rows.
  template <class Pass>
  auto whole_result(const Schedule& schedule, Pass& pass) {
    using Value = tensor_of<typename Pass::Result>;
    using T = typename Value::value_type;
    if constexpr (Pass::gives_loss) {
      result_wants_grad_ = pass.loss_wants_grad();
      return Value::full({}, static_cast<T>(pass.weights().loss()), D{});
    } else {
      auto& parts = pass.results();
      auto shape = value_of(*parts[0]).shape();
      shape[0] = 0;
      result_wants_grad_ = false;
      for (int i = 0; i < schedule.micro_batches; ++i) {
        const auto& part = value_of(*parts[static_cast<std::size_t>(i)]);
        check<UsageError>(pass.size(i) == 0 || part.size(0) % pass.size(i) == 0, "Pipeline: the model's output for ",
                          pass.size(i), " samples has shape ", part.shape(),
                          ": expected a row, or as many, of each sample along axis 0");
        shape[0] += part.size(0);
        result_wants_grad_ = result_wants_grad_ || static_cast<bool>(node_of(*parts[static_cast<std::size_t>(i)]));
      }
      auto whole = Value::empty(shape, D{});
      T* to = whole.data();
      for (const auto& part : parts) {
        const auto dense = contiguous(value_of(*part));
        copy_bytes(D{}, to, D{}, dense.data(), dense.bytes());
        to += dense.numel();
      }
      return whole;
    }
  }

  void abort(std::string_view why) noexcept {
    if (communicator_.size() == 1) return;
    wires_->abort(why);
    tied_->abort(why);
    communicator_.abort(why);
  }

  // All begin with rank 0's numbers, from which each keeps its part.
  [[gnu::cold]] void take_first_state() {
    const auto all = [](const auto&) { return true; };
    std::string cut = cat(options_.cut.index());
    if (const auto* const at = std::get_if<At>(&options_.cut)) cut += cat(std::span(at->layers));
    detail::check_same_description(communicator_, "Pipeline",
                                   cat("micro_batches ", options_.micro_batches, ", cut ", cut, ", stages ",
                                       stage_count_, "\n", detail::model_description<D>(model_, all)));
    detail::take_rank_0s<D>(model_, communicator_);
  }

  // The layers of each stage.
  [[gnu::cold]] void cut() {
    std::vector<double> bytes;
    for (const auto& layer : layers()) {
      double sum = 0;
      for (const auto& named : layer.parameters) sum += static_cast<double>(named.parameter->size_bytes());
      bytes.push_back(sum);
    }
    if (auto* const time = std::get_if<ByTime>(&options_.cut)) {
      check<UsageError>(time->seconds.size() == bytes.size(), "Pipeline: ByTime has ", time->seconds.size(),
                        " times for ", bytes.size(), " layers: expected those of layer_times(model, x)");
      broadcast(time->seconds.data(), time->seconds.size() * sizeof(double), 0, trace::Traffic::control);
    }
    begins_ = pipeline::stage_begins(options_.cut, bytes, stage_count_);
    const auto places = places_of(model_);
    for (std::size_t s = 0; s < stage_count_; ++s) stages_.push_back({places[begins_[s]], begins_[s + 1] - begins_[s]});
  }

  struct Layer {
    std::vector<nn::NamedParameter<D>> parameters;
    std::vector<nn::NamedBuffer<D>> buffers;
  };
  [[gnu::cold]] std::vector<Layer> layers() {
    std::vector<Layer> out;
    const std::size_t count = places_of(model_).size();
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<bool> one(count);
      one[i] = true;
      SomeLayers<Model> layer(model_, std::move(one));
      out.push_back({nn::named_parameters<D>(layer), nn::named_buffers<D>(layer)});
    }
    return out;
  }
  int rank_of_layer(std::size_t layer) const {
    const auto after = std::upper_bound(begins_.begin(), begins_.end(), layer);
    return static_cast<int>((after - begins_.begin() - 1) % communicator_.size());
  }

  // The memory of other stages is given back.
  [[gnu::cold]] void keep_own(const comm::World& world) {
    const auto all = layers();
    std::unordered_map<const Node*, std::vector<int>> owners;
    std::vector<bool> own(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const int rank = rank_of_layer(i);
      own[i] = rank == communicator_.rank();
      const auto note = [&](const Node* node) {
        auto& ranks = owners[node];
        if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
      };
      for (const auto& named : all[i].parameters) note(named.handle.shared().get());
      for (const auto& named : all[i].buffers) note(named.handle.shared().get());
    }
    std::vector<const detail::AtHome<D>*> foreign;
    std::vector<std::string> why;
    std::vector<Node*> parameters;
    std::vector<std::vector<int>> ranks_of;
    const auto sort = [&](const auto& named, const detail::AtHome<D>& numbers) {
      const Node* const node = named.handle.shared().get();
      check<UsageError>(owners.contains(node), "Pipeline: the model's '", named.name,
                        "' is in none of the layers that CHORUS_PIPELINE lists");
      const auto& ranks = owners[node];
      if constexpr (requires { named.parameter; })
        if (ranks.front() != communicator_.rank() && ranks.size() > 1 &&
            std::find(ranks.begin(), ranks.end(), communicator_.rank()) != ranks.end())
          named_elsewhere_.emplace_back(named.name, named.handle);
      numbers_.push_back({&numbers, named.handle.shared(), ranks.front(), {}});
      if (std::find(ranks.begin(), ranks.end(), communicator_.rank()) != ranks.end()) return;
      foreign.push_back(&numbers);
      why.push_back(numbers_.back().why =
                        cat("Pipeline: '", named.name, "' is in a stage of rank ", ranks.front(), ", and this is rank ",
                            communicator_.rank(), ", which has no memory for it"));
    };
    for (const auto& named : nn::named_parameters<D>(model_)) {
      sort(named, *named.parameter);
      parameters.push_back(named.handle.shared().get());
      ranks_of.push_back(owners[named.handle.shared().get()]);
    }
    for (const auto& named : nn::named_buffers<D>(model_)) {
      sort(named, *named.buffer);
      check<UsageError>(owners[named.handle.shared().get()].size() == 1, "Pipeline: the buffer '", named.name,
                        "' is in several stages, and would have other numbers in each");
    }
    std::vector<bool> has_parameters(static_cast<std::size_t>(communicator_.size()));
    for (const auto& ranks : ranks_of)
      for (const int rank : ranks) has_parameters[static_cast<std::size_t>(rank)] = true;
    for (int rank = 0; rank < communicator_.size(); ++rank)
      check<UsageError>(has_parameters[static_cast<std::size_t>(rank)], "Pipeline: rank ", rank,
                        " has no parameters: cut the model elsewhere, or into fewer stages");
    own_.emplace(model_, std::move(own));
    struct Own final : nn::Module {
      Stages& stages;
      explicit Own(Stages& of) : stages(of) {}
      void visit(nn::Visitor& visitor) override { stages.visit(visitor); }
    } own_model(*this);
    parameters_ = nn::named_parameters<D>(own_model);
    for (const auto& named : nn::named_parameters<D>(model_))
      if (const auto& ranks = owners[named.handle.shared().get()];
          std::find(ranks.begin(), ranks.end(), communicator_.rank()) == ranks.end())
        named.parameter->drop_grad_of(*named.handle.shared());
    for (const auto& named : parameters_) named.parameter->set_one_of_a_part(communicator_.size() > 1);
    send_away(foreign, why);
    wires_.emplace(communicator_, world, stage_count_ > static_cast<std::size_t>(communicator_.size()));
    tied_.emplace(communicator_, world, parameters, ranks_of);
  }

  /// A parameter or a buffer of the whole model.
  struct Numbers {
    const detail::AtHome<D>* numbers;
    Ref<Node> kept;
    int owner;
    std::string why;  // it is not here; empty where it is
  };

  Model model_;
  Communicator& communicator_;
  PipelineOptions options_;
  std::size_t stage_count_ = 0;
  std::vector<std::size_t> begins_;
  std::vector<Stage> stages_;
  std::optional<SomeLayers<Model>> own_;
  std::vector<std::pair<std::string, AnyParameter>> named_elsewhere_;  // that own_ has, too
  std::vector<nn::NamedParameter<D>> parameters_;                      // of all these
  std::vector<Numbers> numbers_;
  std::map<int, Schedule> schedules_;  // by the number of micro-batches
  std::optional<Wires<D>> wires_;
  std::optional<TiedParameters<D>> tied_;
  bool result_wants_grad_ = false;
  int stage_now_ = communicator_.rank();
  std::shared_ptr<void> alive_ = std::make_shared<int>();
};

}  // namespace pipeline

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_STAGES_HPP

namespace chorus::pipeline {

/// A model type, for policies: what they see of it is this rank's stages, and a call is a pass of the whole batch
/// through all of them. Policies of several processes share out batches between groups of ranks that have a pipeline
/// each.
template <class Model, class Order, class Communicator = comm::AnyCommunicator>
class StagedModel : public nn::Module {
 public:
  using Stages = pipeline::Stages<Model, Order, Communicator>;
  using device_type = typename Stages::D;
  using D = device_type;

  /// Takes rank 0's numbers: see Pipeline. Communicator and world must outlive this.
  StagedModel(Model model, Communicator& communicator, const comm::World& world, const PipelineOptions& options)
      : stages_(std::make_shared<Stages>(std::move(model), communicator, world, options)) {}

  Stages& stages() const { return *stages_; }
  void visit(nn::Visitor& visitor) override {
    visitor.inner(stages_->model());
    stages_->visit(visitor);
  }
  std::string describe() const override { return stages_->model().describe(); }

  /// The loss, or the output, of the whole batch; the same on all ranks, which all call it, within a policy's pass.
  template <class X, class... Targets>
  auto forward(const X& x, const Targets&... targets) const {
    if constexpr (requires { Model::pipeline_names; })
      return pass(x, targets...);
    else
      return Variable<float, 0, D>();  // nothing but the sentence about CHORUS_PIPELINE is an error then
  }
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) const {
    return forward(inputs...);
  }

 private:
  using Action = Schedule::Action;
  using Kind = Schedule::Kind;

  template <class... Inputs>
  auto pass(const Inputs&... inputs) const {
    using Pass = pipeline::Pass<Model, Inputs...>;
    RandomContext* const random = chorus::detail::random_context();
    check<UsageError>(random != nullptr, "Pipeline: call the net, not its module()");
    // 1. The batch becomes micro-batches, of which the schedule's table says who does what with them, and when.
    const Index samples = stages_->samples_of(inputs...);
    const Schedule& schedule = stages_->schedule_for(samples);
    return stages_->or_all_end([&] {
      const auto batch = std::make_shared<Pass>(stages_->facts(schedule, *random, samples), inputs...);
      // 2. Where the model returns its loss, backward begins within the schedule; else it has to wait for the loss.
      const bool goes_back = Pass::gives_loss && batch->recorded();
      for (const Action& action : stages_->own_actions(schedule))
        if (goes_back || action.kind == Kind::forward) act(*stages_, *batch, action);
      if (goes_back) batch->gradients().sum_tied(stages_->tied());
      // 3. All ranks have what the last stage has.
      auto shared = stages_->share_result(schedule, *batch);
      random->drew = random->drew || shared.drew;
      return on_tape(schedule, batch, std::move(shared));
    });
  }

  template <class Pass>
  static void act(Stages& stages, Pass& batch, const Action& action) {
    stages.at_stage(action.stage);
    switch (action.kind) {
      case Kind::forward:
        return batch.forward(action);
      case Kind::backward:
        return batch.backward(action);
      case Kind::weight:
        return batch.weight(action);
    }
  }

  template <class Pass, class Shared>
  auto on_tape(const Schedule& schedule, const std::shared_ptr<Pass>& batch, Shared shared) const {
    using Result = typename Pass::Result;
    if constexpr (AnyTensor<Result>) {
      return std::move(shared.value);
    } else {
      if (!batch->recorded() || !shared.wants_grad) return Result(std::move(shared.value));
      std::vector<Ref<Node>> leaves;
      batch->gradients().for_each_leaf([&](Node& leaf) { leaves.emplace_back(&leaf); });
      using T = typename tensor_of<Result>::value_type;
      using Made = pipeline::PassNode<T, tensor_of<Result>::rank, D>;
      Ref<typename Result::node_type> node(
          new Made(shared.value, std::move(leaves), way_back(schedule, batch, shared.correction)));
      if (Pass::gives_loss) node->set_mean(shared.mean_over, true);
      return Result(std::move(shared.value), std::move(node));
    }
  }

  // 4. What the user's backward pass does when it comes to the net's result.
  template <class Pass>
  auto way_back(const Schedule& schedule, const std::shared_ptr<Pass>& batch,
                [[maybe_unused]] double correction) const {
    using Gradient = tensor_of<typename Pass::Result>;
    const auto check_alive = [alive = stages_->alive()] {
      check<UsageError>(!alive.expired(), "Pipeline: the net whose result goes backward is gone");
    };
    if constexpr (Pass::gives_loss) {
      return [check_alive, batch, correction](const Gradient& gradient, bool) {
        check_alive();
        batch->gradients().add_to_parameters(static_cast<double>(gradient.item()) * correction);
      };
    } else {
      return [stages = stages_.get(), check_alive, batch, &schedule](const Gradient& gradient, bool keep) {
        check_alive();
        check<UsageError>(!keep, "Pipeline: retain_graph needs a model that returns its loss");
        stages->or_all_end([&] {
          batch->take_result_gradient(gradient);
          for (const Action& action : stages->own_actions(schedule))
            if (action.kind != Kind::forward) act(*stages, *batch, action);
          batch->gradients().sum_tied(stages->tied());
          stages->flush();
        });
        batch->gradients().add_to_parameters(1);
      };
    }
  }

  std::shared_ptr<Stages> stages_;
};

}  // namespace chorus::pipeline
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_STAGED_MODEL_HPP

namespace chorus {

struct MeshOptions {
  mesh::Sizes sizes = {};          ///< of axes that are mesh::dynamic
  int micro_batches = 8;           ///< of a pipeline: see PipelineOptions
  PipelineCut cut = EqualBytes{};  ///< likewise
  bool broadcast_buffers = true;   ///< along the batch: see DistributedDataParallelOptions
  bool find_unused_parameters = false;
  int check_every = 100;  ///< see TensorParallelOptions
};

namespace mesh {

/// What a rank has of a model: all of it, or its stages.
template <class Model, class Axes, bool = Axes::pipes>
struct PartOf {
  using type = Model;
  static Model make(Model model, Groups&, const MeshOptions&) { return model; }
};
template <class Model, class Axes>
struct PartOf<Model, Axes, true> {
  using type = pipeline::StagedModel<Model, typename Axes::pipe::order>;
  static type make(Model model, Groups& groups, const MeshOptions& options) {
    return type(std::move(model), groups.pipe, groups.pipe_world,
                {.micro_batches = options.micro_batches, .cut = options.cut});
  }
};

template <class Part>
struct DataPolicy : DistributedDataParallel<Part> {
  DataPolicy(Part part, Groups& groups, const MeshOptions& options, std::uint64_t seed)
      : DistributedDataParallel<Part>(
            std::move(part), groups.batch,
            {.broadcast_buffers = options.broadcast_buffers, .find_unused_parameters = options.find_unused_parameters},
            seed) {}
};

template <class Part, class Units>
struct ShardPolicy
    : FullyShardedDataParallel<Part, Units, comm::AnyCommunicator, HybridReduceScatter<comm::AnyCommunicator>> {
  ShardPolicy(Part part, Groups& groups, const MeshOptions& options, std::uint64_t seed)
      : ShardPolicy::FullyShardedDataParallel(
            std::move(part), groups.batch, groups.gathers,
            {.broadcast_buffers = options.broadcast_buffers, .find_unused_parameters = options.find_unused_parameters},
            seed, {&groups.shards(), &groups.replicas}) {}
};

template <class Model, class Axes>
using BatchPolicy = std::conditional_t<Axes::shards,
                                       ShardPolicy<typename PartOf<Model, Axes>::type, typename Axes::shard::units>,
                                       DataPolicy<typename PartOf<Model, Axes>::type>>;

}  // namespace mesh
}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_MESH_POLICIES_HPP

// <chorus/parallel/tensor/replicas.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_REPLICAS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_REPLICAS_HPP
/// What all ranks of TensorParallel have whole gets the same gradients on all of them, to the bit: checked, now and
/// then, in what backward leaves.

namespace chorus::detail {

template <Device D, class Communicator>
class ReplicaCheck {
 public:
  /// Each `every` backward passes; 0: never.
  ReplicaCheck(const nn::FlatParameters<D>& flat, Communicator& communicator, const std::weak_ptr<void>& alive,
               int every)
      : flat_(flat), communicator_(communicator), every_(every) {
    if (every == 0 || communicator.size() == 1) return;
    for (const auto& entry : flat.entries())
      entry.parameter().on_grad([this, alive] {
        if (alive.expired() || last_run_ == backward_run()) return;
        last_run_ = backward_run();
        if (runs_++ % static_cast<std::uint64_t>(every_) != 0) return;
        at_backward_end([this, alive] {
          if (!alive.expired()) check_now();
        });
      });
  }
  ReplicaCheck(const ReplicaCheck&) = delete;
  ReplicaCheck& operator=(const ReplicaCheck&) = delete;

  /// Throws UsageError, on every rank, where gradients differ. A collective.
  [[gnu::cold]] void check_now() {
    std::vector<std::uint64_t> own;
    std::uint64_t all = 0;
    for (const auto& entry : flat_.entries()) {
      if (entry.parameter().part() != nullptr) continue;
      own.push_back(hash(entry.parameter()));
      all = 31 * all + own.back();
    }
    const auto number = static_cast<std::int64_t>(all >> 1);
    std::array<std::int64_t, 2> largest{number, std::numeric_limits<std::int64_t>::max() - number};
    communicator_.all_reduce(std::span(largest), comm::ReduceOp::max, {});
    if (std::numeric_limits<std::int64_t>::max() - largest[1] != largest[0]) raise(own);
  }

 private:
  static std::uint64_t hash(const ParameterOn<D>& parameter) {
    if (!parameter.grad_arrived()) return 0;
    std::vector<std::uint32_t> words(parameter.size_bytes() / sizeof(std::uint32_t));
    copy_bytes(Cpu{}, words.data(), parameter.where(), parameter.grad_data(), parameter.size_bytes());
    std::uint64_t bits = 14695981039346656037ull;
    for (const std::uint32_t word : words) bits = (bits ^ word) * 1099511628211ull;  // FNV-1a, of words
    return bits;
  }
  [[noreturn, gnu::cold]] void raise(const std::vector<std::uint64_t>& own) {
    std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(communicator_.size()));
    communicator_.all_gather(std::span<const std::uint64_t>(own), std::span<std::uint64_t>(all), {});
    std::size_t i = 0;
    for (const auto& entry : flat_.entries()) {
      if (entry.parameter().part() != nullptr) continue;
      for (std::size_t at = i; at < all.size(); at += own.size())
        if (all[at] != all[i])
          fail<UsageError>("TensorParallel: rank ", at / own.size(), " has another gradient of '", entry.named.name,
                           "' than rank 0: expected the same bits of what all ranks have whole. Is the batch the same "
                           "on all ranks (net.sampler), and does the model reach its ColumnParallelLinear's columns "
                           "through a RowParallelLinear or gather_columns?");
      ++i;
    }
    fail<UsageError>("TensorParallel: ranks have different gradients of what all of them have whole");
  }

  const nn::FlatParameters<D>& flat_;
  Communicator& communicator_;
  int every_;
  std::uint64_t runs_ = 0, last_run_ = 0;
};

}  // namespace chorus::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_REPLICAS_HPP

namespace chorus {

/// Axes, outermost first: `Mesh<Gpt, mesh::Pipe<2>, mesh::Data<2>, mesh::Tensor<2>>` is 8 ranks, of which neighbours
/// share layers. Any of mesh::Pipe, Data, Shard and Tensor, in this order, whose sizes' product is the number of ranks;
/// one size may be mesh::rest, and those that are mesh::dynamic are MeshOptions::sizes. Data and Shard together are
/// groups that have the same shards (hybrid sharding).
///
/// A model is cut along the axes from the inside out: each rank takes its parts of layers (TensorParallel), of these
/// its stages (Pipeline), and of these, with Shard, a part of each parameter (FullyShardedDataParallel); the rest is
/// DistributedDataParallel among the ranks that have the same of the model. Ranks that differ in their place on Data
/// or Shard alone have shares of a batch (`sampler`); the others the same one. What each of these policies says of
/// losses, dropout, numbers and files holds.
///
/// From 3 shares of a batch on, ranks that have the same numbers must lay them out alike, or averages would be rounded
/// in different orders: refused where Tensor does not divide the layers evenly, or stages share a parameter.
template <class Model, class... Axes>
class Mesh : private mesh::WithGroups, public mesh::BatchPolicy<Model, mesh::AxesOf<Axes...>> {
  using Base = mesh::BatchPolicy<Model, mesh::AxesOf<Axes...>>;
  using All = mesh::AxesOf<Axes...>;
  using Communicator = comm::AnyCommunicator;
  static_assert(mesh::valid<Axes...>,
                "Mesh: axes go from the outside in: Pipe, Data, Shard, Tensor, each at most once");
  static_assert(!All::pipes || !All::shards || !All::shard::units::reshard_after_forward,
                "Mesh: in a pipeline, which comes back to each unit with every micro-batch, shards keep what they have "
                "gathered: expected mesh::Shard<ranks, KeepParameters>");

 public:
  using typename Base::D;
  using model_type = Model;
  using policy_type = Mesh;
  static constexpr const char* name = "mesh";

  /// Takes rank 0's numbers. Throws UsageError, on every rank, where the number of ranks is not the axes', and what the
  /// policies of the axes throw. `all`, and `world`, what it was connected with, must outlive this.
  Mesh(Model model, Communicator& all, const comm::World& world, const MeshOptions& options = {},
       std::uint64_t seed = initial_seed())
      : WithGroups(all, world, All::sizes(all.size(), options.sizes), All::tensor::sequence::splits_sequences),
        Base(cut(std::move(model), options), groups, options, seed) {
    all.broadcast(std::span(&this->random_.seed, 1), 0, {});
    check_same_order();
    if constexpr (!All::shards) replicas_.emplace(this->flat_, groups.tensor, this->alive(), options.check_every);
  }
  /// For `launch`: takes communicator and seed from `run`.
  template <detail::LaunchedRun Run>
  Mesh(Model model, Run& run, const MeshOptions& options = {})
      : Mesh(std::move(model), run.communicator(), run.world(), options, run.seed()) {
    run.check_options();
  }

  /// The model's output for this rank's share of the batch, or its loss: see Pipeline. All ranks call it.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const TensorGroupScope group(groups.layers->group());
    return Base::operator()(inputs...);
  }

  /// Of all ranks; `devices()` are as many.
  Communicator& communicator() const { return groups.all(); }
  int devices() const { return groups.all().size(); }
  /// How many ranks each axis has: pipe, data, shard, tensor; and this rank's place on each.
  const std::array<int, 4>& sizes() const { return groups.sizes(); }
  const std::array<int, 4>& place() const { return groups.place(); }
  /// How many shares a batch has.
  int shares() const { return groups.batch.size(); }
  /// The whole model, of which this rank can read its part.
  Model& module() {
    if constexpr (All::pipes)
      return this->model_.stages().model();
    else
      return this->model_;
  }

  /// Makes a number the largest one of all ranks.
  void make_largest(std::int32_t* number) {
    groups.all().all_reduce(std::span(number, 1), comm::ReduceOp::max, {});
  }
  /// For files, which all ranks write together: see io::detail::keeps_parts.
  bool writes_part(bool sharded, bool shared) const {
    const auto [p, d, s, t] = groups.place();
    return d == 0 && (sharded || s == 0) && (shared || t == 0);
  }
  /// optim::clip_grad_norm with the norm of all ranks' gradients, of which each number counts once. All ranks call it.
  double clip_grad_norm(double max_norm, const optim::ClipGradNormOptions& options = {}) {
    std::vector<nn::NamedParameter<D>> parts, whole;
    for (const auto& named : this->parameters())
      if (counts(named)) (named.parameter->part() != nullptr ? parts : whole).push_back(named);
    return optim::detail::clip_parts(this->parameters(), max_norm, options, [&] {
      double squares = optim::detail::square_sum(parts);
      const auto add_up = [&](Communicator& ranks) {
        if (ranks.size() > 1) ranks.all_reduce(std::span(&squares, 1), comm::ReduceOp::sum, {});
      };
      add_up(groups.tensor);
      squares += optim::detail::square_sum(whole);  // the same on all of these
      add_up(groups.gathers);
      add_up(groups.pipe);
      return squares;
    });
  }

 private:
  using Part = mesh::PartOf<Model, All>;

  typename Part::type cut(Model model, const MeshOptions& options) {
    return Part::make(groups.layers->share_out(std::move(model)), groups, options);
  }
  bool counts(const nn::NamedParameter<D>& named) const {
    if constexpr (All::pipes)
      return this->model_.stages().counts(named);
    else
      return true;
  }
  // Sums of two terms are the same in any order, those of more are not.
  [[gnu::cold]] void check_same_order() {
    if (groups.batch.size() < 3) return;
    std::string sizes;
    for (const auto& entry : this->flat_.entries()) sizes += cat(entry.count, ' ');
    const auto of_all = comm::all_gather_object(groups.tensor, sizes);
    bool tied = false;
    if constexpr (All::pipes) tied = this->model_.stages().ties_stages();
    const bool alike = std::all_of(of_all.begin(), of_all.end(), [&](const auto& other) { return other == sizes; });
    double found[] = {alike ? 0.0 : 1.0, tied ? 1.0 : 0.0};
    groups.all().all_reduce(std::span<double>(found), comm::ReduceOp::max, {});
    check<UsageError>(found[0] == 0, "Mesh: ", groups.batch.size(), " shares of a batch and Tensor<",
                      groups.tensor.size(), ">: expected layers that Tensor divides evenly, for ranks have parts of ",
                      "different sizes, and would round the averages of what they have in common differently");
    check<UsageError>(found[1] == 0, "Mesh: ", groups.batch.size(), " shares of a batch and a pipeline: expected no ",
                      "parameter that stages share, of which they would round the averages differently");
  }

  std::optional<detail::ReplicaCheck<D, Communicator>> replicas_;
};

/// For checkpoints: the order of parameters, on which rounding depends.
template <class Model, class... Axes>
requires(!mesh::AxesOf<Axes...>::shards) class detail::Access<Mesh<Model, Axes...>> {
  using Net = Mesh<Model, Axes...>;
  using Inner = DistributedDataParallel<typename mesh::PartOf<Model, mesh::AxesOf<Axes...>>::type>;

 public:
  explicit Access(Net& net) : inner_(net) {}
  void set_parameter_order(std::span<const std::string> names, bool learned = true) {
    inner_.set_parameter_order(names, learned);
  }
  std::vector<std::string> resting_parameters() const { return {}; }
  void set_resting_parameters(std::span<const std::string>) {}

 private:
  Access<Inner> inner_;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_MESH_HPP

// <chorus/parallel/parameter_server.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PARAMETER_SERVER_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PARAMETER_SERVER_HPP
/// ParameterServer: rank 0 has the parameters; all others push gradients to it and pull parameters from it.

namespace chorus {

struct ParameterServerOptions {
  /// The axis of the inputs along which their samples lie.
  int dim = 0;
  /// See SingleDeviceOptions: a rank takes whole shares, of which there are at least as many as ranks. Workers push
  /// sums of their shares, and `no_sync` saves no messages.
  int canonical_shares = 0;
};

/// Synchronous SGD with a parameter server (Li et al., "Scaling distributed machine learning with the parameter
/// server", OSDI 2014). At the end of backward every worker sends its gradients, and has none left, so that its
/// optimizer's step changes nothing; the server, rank 0, which works on a share of the batch as well, adds them up and
/// steps, alone. At the beginning of the next forward pass in training, of the model or of one of its layers, every
/// worker fetches the new parameters: all ranks make that pass, with gradients or without; within `join` those without
/// don't fetch. The training loop is that of the other policies, and so are the steps: gradients are means over the
/// samples of the batch. A GradScaler has to ask all ranks, for workers have no gradients to look at:
/// `GradScaler scaler{net}`.
///
/// The server sends n - 1 times the model's bytes a step and receives as many; a worker sends and receives them once.
/// With DistributedDataParallel's ring every rank sends 2 (n - 1) / n times: as much in all, but no link is crowded.
/// Optimizer state exists on the server alone.
///
/// After the last step workers have old parameters: `eval()`, which all ranks call, fetches them, too. A forward pass
/// without gradients of a model that is all in evaluation, with old ones, throws UsageError. A worker's
/// ParameterAverage that is updated after each step lags by one: the server's is the one to use and to keep.
template <class Model, class Communicator = comm::AnyCommunicator>
class ParameterServer : public DistributedPolicy<Model, Communicator> {
  using Base = DistributedPolicy<Model, Communicator>;

 public:
  using D = typename Base::device_type;
  using policy_type = ParameterServer;
  static constexpr const char* name = "parameter_server";

  /// Compares the models of all ranks. Throws UsageError, on every rank, where they or the options differ. The
  /// communicator must outlive this.
  ParameterServer(Model model, Communicator& communicator, const ParameterServerOptions& options = {},
                  std::uint64_t seed = initial_seed())
      : Base("ParameterServer", std::move(model), communicator, options.dim, seed, options.canonical_shares) {
    this->check_same(cat("options: dim ", options.dim, ", canonical_shares ", options.canonical_shares, "\n"),
                     typename Base::All{});
    pull();
    this->on_gradients([this](std::size_t i) { gradient_arrived(i); });
  }
  /// With a seed and no options.
  template <std::integral Seed>
  ParameterServer(Model model, Communicator& communicator, Seed seed)
      : ParameterServer(std::move(model), communicator, {}, static_cast<std::uint64_t>(seed)) {}
  /// For `launch`: takes communicator and seed from `run`. The model moves to the device that `run` names, if any.
  template <detail::LaunchedRun Run>
  ParameterServer(Model model, Run& run, const ParameterServerOptions& options = {})
      : ParameterServer(detail::placed(std::move(model), run), run.communicator(), options, run.seed()) {
    run.check_options();
  }

  /// Peers don't wait for a rank that throws in the middle of a backward pass: the group is given up.
  ~ParameterServer() {
    if (in_backward_) this->give_up();
  }

  /// The model's output for this rank's share of the batch. Each is followed by one backward pass at most, but under
  /// no_sync: another one throws UsageError.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!in_backward_,
                      "ParameterServer: the last backward pass ended early; its gradients are incomplete");
    ddp::ForwardPass pass{.samples = detail::samples_of(this->random_.dim, inputs...), .sync = sync_};
    pass.number = this->begin_forward(pass.samples).step;
    if (grad_enabled()) {
      pushed_ = false;
      this->begin_pass(pass, this->joining_);  // those that have ended have to know
      if (stepped_) pull();
      return this->forward_recorded(inputs...);
    }
    if (stepped_ && !this->joining_) {
      check<UsageError>(this->any_training(),
                        "ParameterServer: the server has stepped since workers had its parameters; before a forward "
                        "pass in evaluation all ranks call eval()");
      pull();
    }
    return this->forward_aside(pass, inputs...);
  }

  /// While it lives, backward adds to this rank's own gradients alone; the first backward after it pushes the sum. Each
  /// pass counts by its own global batch.
  [[nodiscard]] NoSync no_sync() { return this->scope_without(sync_); }

  /// Runs `body`, a loop over batches of which ranks may have different numbers: see chorus::join. `options.step` is
  /// what the server does where it has run out of batches before others have: throws UsageError without. Buffers are
  /// the server's.
  template <class Body>
  void join(const Body& body, const JoinOptions& options = {}) {
    chorus::join(body, options, *this);
  }
  bool is_server() const { return this->communicator_.rank() == 0; }

  /// Workers take the server's parameters and buffers now; all ranks call it.
  void pull() {
    const comm::CollectiveOptions options{.traffic = trace::Traffic::parameters};
    for (const auto& group : this->flat_.groups())
      with_numbers(group, group.value(0), [&](auto values) {
        if (is_server())
          for (int worker = 1; worker < this->devices(); ++worker) this->communicator_.send(values, worker, options);
        else
          this->communicator_.recv(values, 0, options);
      });
    if (!is_server())
      for (const auto& entry : this->flat_.entries()) entry.parameter().touch();
    this->broadcast_buffers(0);
    stepped_ = false;
  }
  void eval() {
    if (stepped_) pull();
    Base::eval();
  }

 private:
  void begin_join(const detail::JoinFacts& facts) override {
    check<UsageError>(facts.steps || facts.throw_early,
                      "ParameterServer::join: the server steps for all, also where others have more batches than it "
                      "has: JoinOptions::step, or a function after the net");
    Base::begin_join(facts);
  }
  [[gnu::cold]] JoinedPass take_part_in_pass() override {
    if (!this->begin_pass_of_others()) return JoinedPass::none;
    if (stepped_) pull();
    this->shares_.weigh({});
    if (!this->shares_.active_pass().sync) return JoinedPass::passed;
    push(/*ended=*/true);
    return JoinedPass::averaged;
  }
  [[gnu::cold]] void all_have_run_out() override {
    this->end_passes_of_others();
    if (stepped_) pull();
  }

  // Calls `f` with all numbers of a group that begin at `at`.
  template <class F>
  static void with_numbers(const typename nn::FlatParameters<D>::Group& group, std::byte* at, const F& f) {
    ddp::with_type("ParameterServer: parameters", group.dtype, at,
                   [&]<class T>(T* numbers) { f(std::span<T>(numbers, group.count)); });
  }

  // What earlier passes have left, on the server or under no_sync, is to stay as it is when `push` weighs all.
  void backward_is_weighed() override {
    earlier_.change_unit(this->flat_, this->shares_.weight(), [](std::size_t) { return true; });
  }

  void gradient_arrived(std::size_t i) {
    if (!in_backward_) begin_backward();
    auto& p = this->flat_.entries()[i].parameter();
    earlier_.gradient_arrived(p);
    if (!sync_ && this->devices() > 1) p.set_grad_local(true);
  }
  void begin_backward() {
    check<UsageError>(this->weighed(),
                      "ParameterServer: backward goes through the model, but not through a forward pass of the net in "
                      "this thread: call the net, not its module(): there workers fetch the parameters");
    check<UsageError>(!pushed_,
                      "ParameterServer: expected a forward pass between two backward passes; what the first one has "
                      "sent to the server can't be told from what the second one adds");
    in_backward_ = true;
    this->when_backward_ends([this] {
      if (sync_)
        push();
      else
        accumulated_ = true;
      in_backward_ = false;
    });
  }

  // What a rank says of a parameter: whether it has a gradient, and whether its loop has called zero_grad since the
  // last push, as it would on a server that has run out of batches.
  static constexpr std::uint8_t has_gradient = 1, forgotten = 2;

  std::vector<std::uint8_t> own_marks(bool ended) const {
    std::vector<std::uint8_t> marks;
    for (const auto& entry : this->flat_.entries()) {
      const auto& p = entry.parameter();
      const auto i = marks.size();
      const bool was_forgotten = forgotten_before_.empty() || p.times_forgotten() != forgotten_before_[i];
      marks.push_back((p.grad_arrived() ? has_gradient : 0) | (!ended && was_forgotten ? forgotten : 0));
    }
    return marks;
  }
  // The marks of all workers together, on the server.
  std::vector<std::uint8_t> workers_marks(const std::vector<std::uint8_t>& own) {
    std::vector<std::uint8_t> all(own.size()), marks(own.size());
    if (!is_server()) this->communicator_.send(std::span<const std::uint8_t>(own), 0);
    for (int worker = 1; is_server() && worker < this->devices(); ++worker) {
      this->communicator_.recv(std::span<std::uint8_t>(marks), worker);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] |= marks[i];
    }
    return all;
  }

  // Gradients weighed by samples go to the server. `ended`: this rank has run out of batches.
  void push(bool ended = false) {
    const double weight = std::exchange(earlier_.unit, 1);
    const bool accumulated = std::exchange(accumulated_, false);
    const auto& entries = this->flat_.entries();
    auto own = own_marks(ended);
    const auto workers = workers_marks(own);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      auto& p = entries[i].parameter();
      // An earlier step has used what is left of a push.
      if (ended && !accumulated && (workers[i] & forgotten) != 0) own[i] = 0;
      if ((own[i] & has_gradient) == 0) zero_bytes(p.where(), p.grad_data(), p.size_bytes());
    }
    if (this->canonical_)
      push_sums();
    else
      push_weighed(weight);
    forgotten_before_.clear();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      auto& p = entries[i].parameter();
      p.set_grad_arrived(is_server() && ((own[i] | workers[i]) & has_gradient) != 0);
      p.set_grad_local(false);
      p.set_grad_sent(!is_server());
      forgotten_before_.push_back(p.times_forgotten());
    }
    pushed_ = stepped_ = true;
  }
  void push_weighed(double weight) {
    auto& communicator = this->communicator_;
    const D device = this->flat_.entries().front().parameter().where();
    const comm::CollectiveOptions options{.traffic = trace::Traffic::gradients};
    for (const auto& group : this->flat_.groups())
      with_numbers(group, group.grad(0), [&]<class T>(std::span<T> grads) {
        const auto count = static_cast<Index>(grads.size());
        kernels::scale(device, count, static_cast<T>(weight), grads.data());
        if (!is_server()) return communicator.send(grads, 0, options);
        const MemoryScope scope(trace::Memory::buckets);
        const auto theirs = Tensor<T, 1, D>::empty({count}, device);
        for (int worker = 1; worker < this->devices(); ++worker) {
          communicator.recv(std::span<T>(theirs.data(), grads.size()), worker, options);
          kernels::axpy(device, count, T{1}, theirs.data(), grads.data());
        }
      });
  }
  // Sums of canonical shares, which the server adds up in the order of the tree.
  void push_sums() {
    auto& communicator = this->communicator_;
    const auto& tree = this->canonical_->tree();
    const D device = this->flat_.entries().front().parameter().where();
    const comm::CollectiveOptions options{.traffic = trace::Traffic::gradients};
    const MemoryScope scope(trace::Memory::buckets);
    const auto batch = static_cast<std::size_t>(this->shares_.batch());
    const auto of_ranks = canonical::sums_of_ranks(this->canonical_->shares(), this->ranks(), batch);
    for (std::size_t g = 0; g < this->flat_.groups().size(); ++g) {
      const auto& group = this->flat_.groups()[g];
      if (!is_server()) {
        for (std::size_t k = 0; k < tree.sums().size(); ++k)
          with_numbers(group, tree.sum(k, g, 0), [&](auto numbers) { communicator.send(numbers, 0, options); });
        continue;
      }
      std::vector<Storage<D>> theirs;
      const auto numbers_of = [&](std::size_t rank, std::size_t k) {
        if (rank == 0) return tree.sum(k, g, 0);
        theirs.emplace_back(device, group.count * size_of(group.dtype));
        auto* const sum = static_cast<std::byte*>(theirs.back().data());
        with_numbers(group, sum, [&](auto numbers) { communicator.recv(numbers, static_cast<int>(rank), options); });
        return sum;
      };
      canonical::add_up(of_ranks, numbers_of, device, group.dtype, group.count, group.grad(0));
    }
  }

  ddp::EarlierGradients<D> earlier_;
  bool sync_ = true;
  bool accumulated_ = false;  // there are gradients that no push has sent
  bool in_backward_ = false;
  bool pushed_ = false;                          // the gradients of the last forward pass have been sent
  bool stepped_ = false;                         // the server's parameters may have changed since the last pull
  std::vector<std::uint32_t> forgotten_before_;  // times_forgotten of all parameters at the last push
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PARAMETER_SERVER_HPP

// <chorus/parallel/pipeline.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_HPP
/// Pipeline: each rank holds a part of the model, a stage, and micro-batches go through the stages one behind the
/// other, so that all ranks compute at the same time.

// <chorus/parallel/whole_batch_policy.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_WHOLE_BATCH_POLICY_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_WHOLE_BATCH_POLICY_HPP
/// What the policies share whose ranks all have the whole batch, and parts of the model.

namespace chorus {

/// Base of TensorParallel and Pipeline.
template <class Model, class Communicator>
class WholeBatchPolicy : public Policy<Model> {
 public:
  static constexpr bool distributed = true;

  /// The same samples on all ranks.
  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(dataset.size(),
                         {.shuffle = options.shuffle, .seed = this->seed(), .padding = options.padding});
  }
  int devices() const { return communicator_.size(); }
  /// Among how many groups of ranks a batch is shared out.
  int shares() const { return 1; }
  Communicator& communicator() const { return communicator_; }

  /// For loops that add up the gradients of several batches: they are the whole batches' always.
  [[nodiscard]] NoSync no_sync() { return {}; }
  /// All ranks have the same batches.
  template <class Body>
  void join(const Body& body, const JoinOptions& = {}) {
    body();
  }
  /// `value` is the mean over the whole batch on every rank, and what a rank has counted is all.
  double mean(double value, Index) const { return value; }
  void sum(std::span<double>) const {}
  /// Makes a number, which lies where the parameters do, the largest one of all ranks.
  void make_largest(std::int32_t* number) { communicator_.all_reduce(std::span(number, 1), comm::ReduceOp::max, {}); }
  /// Whether `text` is the same on all ranks; a collective.
  [[gnu::cold]] bool same_on_all_ranks(std::string_view text) { return comm::same_text(communicator_, text); }

 protected:
  /// Rank 0's seed is all ranks'.
  WholeBatchPolicy(Model model, Communicator& communicator, std::uint64_t seed)
      : Policy<Model>(std::move(model), seed), communicator_(communicator) {
    communicator.broadcast(std::span(&this->random_.seed, 1), 0, {});
  }

  Communicator& communicator_;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_WHOLE_BATCH_POLICY_HPP

namespace chorus {

/// The whole batch is on every rank: samplers are the same, and the first stage takes its inputs, the last one its
/// targets. `Order` says in which order micro-batches go: OneForwardOneBackward, GPipe, Interleaved<v>, ZeroBubbleH1,
/// or a type of your own whose `of(p, m)` gives a Schedule.
///
/// A model that returns its loss, `net(x, y)`, goes through the whole schedule in that call, gradients included, and
/// `loss.backward()` adds them to the parameters', times its seed. Of a model that returns its output, `net(x)` is all
/// forwards, and the backward pass of what is made of it all backwards: the loop of other policies, and GPipe's memory.
/// Either way loss or output are on all ranks, and parameters are those of one device, up to rounding, dropout
/// included. A loss is a mean over samples or over tokens that count; in the model its `mean_over` is refused, for each
/// micro-batch's loss says by itself what it is a mean of. BatchNorm takes the statistics of each micro-batch, and
/// differs; SyncBatchNorm is refused. A rank's `parameters()` are those of its stages: others are not in its memory,
/// and who reads them gets a UsageError.
template <class Model, class Order = OneForwardOneBackward, class Communicator = comm::AnyCommunicator>
class Pipeline : public WholeBatchPolicy<pipeline::StagedModel<Model, Order, Communicator>, Communicator> {
  using Staged = pipeline::StagedModel<Model, Order, Communicator>;
  using Base = WholeBatchPolicy<Staged, Communicator>;

 public:
  using D = typename Base::device_type;
  using model_type = Model;
  using policy_type = Pipeline;
  static constexpr const char* name = "pipeline";

  /// Takes rank 0's numbers. Throws UsageError, on every rank, where the ranks' models or options differ, and for a cut
  /// that doesn't fit. `world` is what the communicator was connected with; it must outlive this.
  Pipeline(Model model, Communicator& communicator, const comm::World& world, const PipelineOptions& options = {},
           std::uint64_t seed = initial_seed())
      : Base(Staged(std::move(model), communicator, world, options), communicator, seed), handles_(this->model_) {}
  /// For `launch`: takes communicator and seed from `run`.
  template <class Run>
  requires requires(Run& run) { run.communicator(); }
  Pipeline(Model model, Run& run, const PipelineOptions& options = {})
      : Pipeline(detail::RankDevice<D>(run).place(std::move(model)), run.communicator(), run.world(), options,
                 run.seed()) {
    run.check_options();
  }

  /// The loss, or the output, of the whole batch; the same on all ranks, which all call it.
  template <class X, class... Targets>
  auto operator()(const X& x, const Targets&... targets) {
    handles_.check_kept(this->model_);
    const RandomScope random(this->begin_forward());
    const detail::WatchScope watch(this->watch_once());
    auto result = this->model_(this->on_model_device(x), this->on_model_device(targets)...);
    this->end_forward();
    return result;
  }

  const PipelineOptions& options() const { return stages().options(); }
  /// The whole model, of which this rank can read its stages' numbers.
  Model& module() { return stages().model(); }
  const Model& module() const { return stages().model(); }
  /// The layer that each stage begins with, counted as in At, and the number of layers.
  const std::vector<std::size_t>& stage_begins() const { return stages().stage_begins(); }

  /// For files, which all ranks write together: see io::detail::keeps_parts.
  bool writes_part(bool, bool) const { return true; }
  /// Calls `f(model)` on every rank while all parameters and buffers are there, in memory of the whole model.
  /// What `f` writes stays; all ranks write the same. All ranks call it.
  template <class F>
  void gathered(const F& f) {
    stages().gathered(f);
  }

  /// optim::clip_grad_norm with the norm of all stages' gradients; each tied parameter counts once. All ranks call it.
  double clip_grad_norm(double max_norm, const optim::ClipGradNormOptions& options = {}) {
    return optim::detail::clip_parts(this->parameters(), max_norm, options, [&] {
      auto counted = this->parameters();
      std::erase_if(counted, [&](const auto& named) { return !stages().counts(named); });
      double squares = optim::detail::square_sum(counted);
      this->communicator_.all_reduce(std::span(&squares, 1), comm::ReduceOp::sum, {});
      return squares;
    });
  }

 private:
  pipeline::Stages<Model, Order, Communicator>& stages() const { return this->model_.stages(); }

  detail::ModelHandles handles_;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_HPP

// <chorus/parallel/pipeline/layer_times.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LAYER_TIMES_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LAYER_TIMES_HPP
/// How long each layer of a model takes, to cut it by: ByTime{layer_times(model, x)}.

namespace chorus {

/// Seconds that each layer of CHORUS_PIPELINE takes to go forward, the second time; backward takes about twice as long
/// in all of them. `x` and `targets`: what the model will be called with. Draws the random numbers that it needs
/// outside of any policy.
template <class Model, class X, class... Targets>
[[gnu::cold]] std::vector<double> layer_times(Model& model, const X& x, const Targets&... targets) {
  using Chain = pipeline::Chain<Model, X, Targets...>;
  std::vector<double> seconds;
  const NoGrad no_grad;
  for (int round = 0; round < 2; ++round) {
    seconds.clear();
    const nn::detail::Stashes<typename Model::device_type> stashes;
    std::shared_ptr<pipeline::AnyActivation<typename Model::device_type>> input =
        std::make_shared<pipeline::Activation<X>>(x);
    for (const pipeline::Place& place : pipeline::places_of(model)) {
      const auto begin = std::chrono::steady_clock::now();
      auto outcome = Chain::run(model, {place, 1}, *input, targets...);
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      input = std::move(outcome.output);
    }
  }
  return seconds;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_PIPELINE_LAYER_TIMES_HPP

// <chorus/parallel/sharded_optimizer.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SHARDED_OPTIMIZER_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SHARDED_OPTIMIZER_HPP
/// An optimizer of whose state each rank keeps a shard (Rajbhandari et al., "ZeRO: memory optimizations toward
/// training trillion parameter models", SC 2020, stages 1 and, with the hook ReduceScatter, 2).

namespace chorus {

namespace detail {
/// A DistributedDataParallel: under other policies there is nobody to share an optimizer's state with.
template <class Net>
concept DistributedInBuckets = requires(AccessTo<Net> access) {
  access.buckets();
};
}  // namespace detail

struct ShardedOptimizerOptions {
  /// Keep one copy of the parameters for all ranks, where all run on CPUs of one machine: each reads them where they
  /// lie, and steps its shard of them for all, so that nothing is gathered. On GPUs and across machines every rank
  /// keeps its own. See ShardedOptimizer::shares_parameters.
  bool share_parameters = false;
};

/// An optimizer of type `Opt` of which each of n ranks keeps and steps its shard of each bucket of a
/// DistributedDataParallel net, an n-th of all parameters; then all gather all shards. The numbers are those of `Opt`
/// itself. A step sends (n - 1) / n of the parameters' bytes from each rank; the state takes an n-th of the memory. All
/// ranks make the same calls. Where the net's hook is ReduceScatter, gradients are averaged in these shards alone.
///
///   ch::ShardedOptimizer<ch::optim::Adam<ch::Cpu>> optimizer{net, {.lr = 1e-3}};
///
/// A model in MixedPrecision goes with it, and `scaler.step(optimizer)` of optim::GradScaler. Its float parameters, of
/// which it computes with copies in 2 bytes, are what is stepped. They stay whole on each rank, for they are the model:
/// what is saved, compared, and read by layers that compute in float; the state beside them is what is sharded.
///
/// With share_parameters they are not even whole on each rank, but there once (as MPI_Win_allocate_shared gives
/// memory): a step sends nothing, and ranks on neighbouring cores find weights in their cache that another one has
/// read. With the hook ReduceScatter backward sends nothing either: gradients lie where all ranks reach them, and each
/// rank averages its shard as it steps, in the same pass over memory. What a program does with parameters itself then
/// acts on all ranks. To read them, or to write the same on all ranks, as loading does, takes no care; `p *= 0.9` on
/// every rank would be done by each. Optimizers that don't know of it refuse. The optimizer's end gives each rank a
/// copy of its own.
template <class Opt>
class ShardedOptimizer : public optim::HasLearningRate {
  static_assert(
      !requires { Opt::needs_whole_parameters; },
      "ShardedOptimizer: a shard ends in the middle of a parameter, and this optimizer needs whole ones");
  using D = decltype(std::declval<const Opt&>().device());
  using Shard = detail::ParameterShard<D>;
  using UseParts = std::function<void(const std::vector<nn::NamedParameter<D>>&)>;

 public:
  /// Steps all parameters of `net`, as long as that lives: afterwards there is its state, and other calls throw
  /// UsageError. Throws UsageError where ranks have parameters or gradients of their own. A collective with
  /// share_parameters.
  template <detail::DistributedInBuckets Net>
  ShardedOptimizer(Net& net, const typename Opt::options_type& options, const ShardedOptimizerOptions& how = {})
      : HasLearningRate(options.lr), options_(options), in_parts_(detail::AccessTo<Net>::averages_in_parts) {
    check<UsageError>(!detail::AccessTo<Net>::own_gradients,
                      "ShardedOptimizer: the hook may leave each rank its own gradients, and a rank steps its "
                      "shard of the parameters with them for all");
    check<UsageError>(net.options().parameters_and_buffers_to_ignore.empty(),
                      "ShardedOptimizer: parameters that are each rank's own can't be sharded");
    const auto while_there = [&net](auto call) {
      return detail::while_alive("ShardedOptimizer", net.alive(), std::move(call));
    };
    step_ = while_there([this, &net](const std::int32_t* unwanted) { step(net, unwanted); });
    clip_ = while_there([this, &net](double max_norm, bool strict) { return clip(net, max_norm, strict); });
    with_parts_ = while_there([this, &net](const UseParts& use) {
      prepare(net);
      detail::access_to(net).average_parts();
      detail::access_to(net).with_gradients([&] { use(shards_.mine()); });
    });
    make_largest_ = while_there([&net](std::int32_t* number) { net.make_largest(number); });
    skip_step_ = while_there([&net] { detail::access_to(net).forget_parts(); });
    zero_grad_ = while_there([&net] {
      for (const auto& entry : net.flat_parameters().entries()) entry.parameter().set_grad_arrived(false);
      detail::access_to(net).forget_parts();
    });
    parameters_ = while_there([&net] { return net.parameters(); });
    if (!how.share_parameters) return;
    detail::access_to(net).share_parameters();
    keep_own_parameters_ = [&net, alive = net.alive()] {
      if (!alive.expired() && in_common(net)) detail::access_to(net).keep_own_parameters();
    };
  }
  ~ShardedOptimizer() {
    if (!keep_own_parameters_) return;
    try {
      keep_own_parameters_();
    } catch (const std::exception& error) {  // no memory
      detail::say(cat("ShardedOptimizer: the parameters stay in memory that all ranks have in common: ", error.what()));
    }
  }
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  void step() { step_(nullptr); }
  /// Scales the gradients that will be stepped down so that the Euclidean norm of all ranks' together is at most
  /// `max_norm`; returns the norm before, the same on all ranks. What becomes of gradients that are not finite is the
  /// same as under optim::clip_grad_norm, and so are the options. Throws UsageError where `max_norm` is not positive,
  /// and in a step that is captured.
  double clip_grad_norm(double max_norm, const optim::ClipGradNormOptions& options = {}) {
    return clip_(max_norm, options.error_if_nonfinite);
  }
  /// Forgets all gradients.
  void zero_grad() { zero_grad_(); }
  /// See Optimizer::set_group; all ranks make the same groups.
  template <class Chosen>
  void set_group(const Chosen& chosen, const optim::GroupOptions& options) {
    const auto all = parameters_();
    Opt(all, options_).set_group(chosen, options);  // throws what the plain one does
    Group& group = groups_.emplace_back(Group{{}, options});
    for (const auto& named : all)
      if (chosen(named)) group.names.insert(named.name);
    if (own_) make_group(group);
  }
  /// See Optimizer::no_decay_on_biases_and_norms.
  void no_decay_on_biases_and_norms() { set_group(optim::IsBiasOrNorm{}, {.weight_decay = 0}); }
  /// Whether all ranks have one copy of the parameters: as share_parameters says, where that can be.
  bool shares_parameters() const {
    const auto all = parameters_();
    return std::any_of(all.begin(), all.end(), [](const auto& named) { return named.parameter->in_common(); });
  }
  /// This rank's shard of the state, made by the first step.
  std::vector<optim::StateTensor> state() { return own_ ? own_->state() : std::vector<optim::StateTensor>(); }

  // For optim::GradScaler.

  /// Whether this rank has averages of its own shard alone.
  bool in_parts() const { return in_parts_; }
  /// Calls `use(parts)` with what this rank steps, while all have their gradients.
  void with_parts(const UseParts& use) { with_parts_(use); }
  /// Makes a number, which lies where the parameters do, the largest one of all ranks.
  void make_largest(std::int32_t* number) { make_largest_(number); }
  /// Instead of `step`, where the gradients are no good.
  void skip_step() { skip_step_(); }
  /// See Optimizer::step_unless: in a replay that is left out all gather the parameters that they have.
  void step_unless(const std::int32_t* unwanted) requires(!std::is_same_v<D, Cpu>) { step_(unwanted); }
  void prepare_to_skip() requires(!std::is_same_v<D, Cpu>) {
    with_parts_([this](const auto&) {
      if (own_) own_->prepare_to_skip();
    });
  }

  // For checkpoints. For a moment each rank holds the whole state.

  /// A plain optimizer of all parameters, without state, but with the learning rate.
  template <class Net>
  std::unique_ptr<Opt> whole(Net& net) const {
    std::vector<nn::NamedParameter<D>> all;
    for (const auto& entry : net.flat_parameters().entries()) all.push_back(entry.named);
    auto optimizer = std::make_unique<Opt>(std::move(all), options_);
    optimizer->set_lr(lr());
    return optimizer;
  }
  /// One with the state of all ranks, on every rank; all of them call it.
  template <class Net>
  std::unique_ptr<Opt> gathered(Net& net) {
    auto all = whole(net);
    auto& communicator = net.communicator();
    for_each_tensor(communicator, *all, [&](const Shard& shard, const optim::StateTensor& to, const auto* own) {
      if (own) copy(shard.in(to), *own, own->data, shard.bytes(to));
      communicator.broadcast(std::span(shard.in(to), shard.bytes(to)), shard.owner);
    });
    return all;
  }
  /// Takes this rank's shard of the state that `all`, made by `whole`, has, and its learning rate.
  template <class Net>
  void adopt(Net& net, Opt& all) {
    resume_lr(all.lr());
    // Frozen parameters have no bucket, but state, where they have been stepped.
    std::set<std::string> stepped;
    for (const auto& tensor : all.state())
      if (tensor.name.starts_with("steps.") && *static_cast<const std::int64_t*>(tensor.data) > 0)
        stepped.insert(tensor.name);
    shards_.place(net, [&](const std::string& name) { return stepped.contains(cat("steps.", name)); });
    cut_shards(net);
    for_each_tensor(net.communicator(), all, [&](const Shard& shard, const optim::StateTensor& from, const auto* own) {
      if (own) copy(static_cast<std::uint8_t*>(own->data), from, shard.in(from), shard.bytes(from));
    });
  }

 private:
  /// Calls `f(shard, tensor of all, this rank's own or null)` for the state of each shard.
  template <class Communicator, class F>
  void for_each_tensor(Communicator& communicator, Opt& all, const F& f) {
    const auto wholes = all.state(), owns = state();  // as many for each parameter, the last one its steps
    std::map<std::string, std::size_t> last;          // the order may have changed since `all` was made
    std::size_t each = 0;
    for (std::size_t i = 0; i < wholes.size(); ++i)
      if (wholes[i].name.starts_with("steps.")) {
        if (each == 0) each = i + 1;
        last.emplace(wholes[i].name, i);
      }
    std::size_t own = 0;
    for (const Shard& shard : shards_.all()) {
      const bool mine = shard.owner == communicator.rank();
      const std::size_t first = last.at(cat("steps.", shard.named.name)) + 1 - each;
      for (std::size_t t = 0; t < each; ++t) f(shard, wholes[first + t], mine ? &owns[own++] : nullptr);
    }
  }

  void copy(std::uint8_t* to, const optim::StateTensor& tensor, const void* from, std::size_t bytes) const {
    const auto device = own_->device();
    if (tensor.on_host)
      std::memcpy(to, from, bytes);
    else
      copy_bytes(device, to, device, from, bytes);
  }

  template <class Net>
  void step(Net& net, [[maybe_unused]] const std::int32_t* unwanted) {
    prepare(net);
    const bool shared = in_common(net);
    const auto* const of_all = detail::access_to(net).gradients_to_average();
    if (shared && of_all == nullptr) net.communicator().barrier();  // others may compute with the old ones still
    if (own_) {
      take_learning_rate();
      detail::access_to(net).with_gradients([&] {
        if constexpr (std::is_same_v<D, Cpu>) {
          if (of_all != nullptr)
            return own_->step_averaging([&](const void* own, std::size_t bytes) { return of_all->terms(own, bytes); });
        } else {
          if (unwanted != nullptr) return own_->step_unless(unwanted);
        }
        own_->step();
      });
    }
    detail::access_to(net).forget_parts();
    gather(net);
    if (shared || of_all != nullptr) net.communicator().barrier();
    for (const auto& entry : net.flat_parameters().entries()) entry.parameter().touch();
  }

  void take_learning_rate() {
    own_->set_lr(lr());
#if CHORUS_USE_CUDA
    if constexpr (std::is_same_v<D, Cuda>)
      if (auto* numbers = cuda::replay_numbers()) numbers->at_replay([this] { own_->set_lr(lr()); });
#endif
  }

  template <class Net>
  double clip(Net& net, double max_norm, bool error_if_nonfinite) {
    optim::detail::check_max_norm(max_norm);
#if CHORUS_USE_CUDA
    check<UsageError>((std::is_same_v<D, Cpu> || cuda::replay_numbers() == nullptr),
                      "ShardedOptimizer: clip_grad_norm in a step that is captured, where no rank knows its norm");
#endif
    prepare(net);
    detail::access_to(net).average_parts();
    double squares = 0;
    detail::access_to(net).with_gradients([&] { squares = optim::detail::square_sum(shards_.mine()); });
    net.communicator().all_reduce(std::span(&squares, 1), comm::ReduceOp::sum, {});
    const double norm = std::sqrt(squares);
    if (error_if_nonfinite && !std::isfinite(norm)) raise_not_finite(net, norm);
    detail::access_to(net).with_gradients([&] { optim::detail::scale_down(shards_.mine(), norm, max_norm); });
    return norm;
  }

  /// Throws NonFiniteError, with the same text on all ranks.
  template <class Net>
  [[noreturn, gnu::cold]] void raise_not_finite(Net& net, double norm) {
    const auto& entries = net.flat_parameters().entries();
    std::size_t first = entries.size();
    detail::access_to(net).with_gradients([&] {
      if (const auto* bad = optim::detail::first_not_finite(shards_.mine()))
        for (first = 0; first < entries.size() && entries[first].named.name != bad->name;) ++first;
    });
    auto of_all = static_cast<std::int64_t>(first);
    net.communicator().all_reduce(std::span(&of_all, 1), comm::ReduceOp::min, {});
    first = static_cast<std::size_t>(of_all);
    optim::detail::raise_not_finite(norm, first < entries.size() ? entries[first].named.name : "several together");
  }

  /// Cuts the parameters into shards, at the first step, for the first backward pass settles the buckets; and anew,
  /// with their state, when some were frozen or thawed meanwhile.
  template <class Net>
  void prepare(Net& net) {
    for (const auto& entry : net.flat_parameters().entries()) optim::detail::check_averaged(entry.named);
    if (shards_.fit(net)) return;
    if (shards_.all().empty()) return cut_shards(net);
    const auto all = gathered(net);
    adopt(net, *all);
  }
  template <class Net>
  void cut_shards(Net& net) {
    own_.reset();  // it knows the old shards
    shards_.cut(net);
    if (shards_.mine().empty()) return;
    own_ = std::make_unique<Opt>(shards_.mine(), options_);
    for (const Group& group : groups_) make_group(group);
  }

  // By name: a shard of a parameter does not have its shape.
  struct Group {
    std::set<std::string> names;
    optim::GroupOptions options;
  };
  void make_group(const Group& group) {
    const auto chosen = [&](const auto& named) { return group.names.contains(named.name); };
    if (std::any_of(shards_.mine().begin(), shards_.mine().end(), chosen)) own_->set_group(chosen, group.options);
  }

  template <class Net>
  static bool in_common(const Net& net) {
    const auto& groups = net.flat_parameters().groups();
    return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.in_common; });
  }

  template <class Net>
  static void gather(Net& net) {
    auto& communicator = net.communicator();
    if (communicator.size() == 1) return;
    const comm::CollectiveOptions options{.traffic = trace::Traffic::parameters};
    const auto ranks = static_cast<std::size_t>(communicator.size()),
               rank = static_cast<std::size_t>(communicator.rank());
    for (const auto& bucket : detail::access_to(net).buckets()) {
      const auto& group = net.flat_parameters().groups()[bucket.group];
      if (group.in_common) continue;
      ddp::with_type(group.dtype, group.value(bucket.begin), [&]<class T>(T* values) {
        const std::size_t shard = bucket.count / ranks, even = shard * ranks;
        if (shard > 0)
          communicator.all_gather(std::span<const T>(values + rank * shard, shard), std::span<T>(values, even),
                                  options);
        if (even < bucket.count)
          communicator.broadcast(std::span<T>(values + even, bucket.count - even), communicator.size() - 1, options);
      });
    }
  }

  typename Opt::options_type options_;
  // What knows the net's type.
  std::function<void(const std::int32_t*)> step_;
  std::function<double(double, bool)> clip_;
  std::function<void(const UseParts&)> with_parts_;
  std::function<void(std::int32_t*)> make_largest_;
  std::function<void()> zero_grad_, skip_step_, keep_own_parameters_;
  std::function<std::vector<nn::NamedParameter<D>>()> parameters_;
  bool in_parts_;
  detail::ParameterShards<D> shards_;
  std::vector<Group> groups_;
  std::unique_ptr<Opt> own_;  // none where there are fewer numbers than ranks
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SHARDED_OPTIMIZER_HPP

// <chorus/parallel/simulated/recorded.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_RECORDED_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_RECORDED_HPP
/// `recorded_training`: one rank's step as a trace file has it, to be simulated on other ranks and links.

// <chorus/parallel/simulated/training.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_TRAINING_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_TRAINING_HPP
/// `simulate_training`: steps of the distributed policies without their numbers, by the calls that they make, on
/// thousands of ranks. tests/unit/parallel/simulated_training_test.cpp holds them against the policies themselves.

// <chorus/parallel/simulated/device_copies.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_DEVICE_COPIES_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_DEVICE_COPIES_HPP
/// The copies that a step of DataParallel makes between its devices, by their formulas or as a real one has made them,
/// and how long they take over the links of one machine.

namespace chorus::simulated {

struct DeviceCopy {
  int from = 0, to = 0;
  trace::Traffic kind = trace::Traffic::control;
  std::size_t bytes = 0;
  friend bool operator==(const DeviceCopy&, const DeviceCopy&) = default;
};

/// Those of one step with one pass, in the order in which they begin.
struct DataParallelCopies {
  std::vector<DeviceCopy> prepare = {};           ///< inputs scattered; parameters and buffers to the replicas
  std::vector<DeviceCopy> gather = {};            ///< outputs, or losses
  std::vector<DeviceCopy> output_gradients = {};  ///< back to the devices
  std::vector<DeviceCopy> reduce = {};            ///< gradients
  std::vector<DeviceCopy> input_gradients = {};   ///< where inputs want one
  /// Parameters and buffers, and gradients, are no copies but NCCL's broadcast and reduce (dp/collectives.hpp).
  bool by_nccl = false;

  friend bool operator==(const DataParallelCopies&, const DataParallelCopies&) = default;
};

/// What moves for a DataParallel, in bytes. One input and one output; parameters that all change in a step.
struct DataParallelSizes {
  std::size_t parameters = 0;             ///< as they lie together, with what fills up between them
  std::size_t gradients = 0;              ///< without
  std::vector<std::size_t> buffers = {};  ///< each
  Index samples = 1;                      ///< of the whole batch
  std::size_t sample = 0;                 ///< of a sample's input
  std::size_t output = 0;                 ///< of a sample's output; 0: the model returns a loss
  bool by_nccl = false;  ///< where all devices have a sample: the devices are different GPUs, of a build with NCCL
  static constexpr std::size_t loss = sizeof(float);
};

/// What data_parallel.hpp does with such a model and batch. The devices' threads begin at once: each comes to its
/// inputs before anyone comes to the parameters, which NCCL sends before.
[[gnu::cold]] inline DataParallelCopies data_parallel_copies(const DataParallelSizes& sizes, int devices) {
  check<UsageError>(devices >= 1 && sizes.samples >= 0, "data_parallel_copies: ", sizes.samples, " samples for ",
                    devices, " devices");
  using trace::Traffic;
  const dp::Split split{sizes.samples, static_cast<std::size_t>(std::clamp<Index>(sizes.samples, 1, devices))};
  DataParallelCopies out;
  const auto to_each = [&](std::vector<DeviceCopy>& part, Traffic kind, const auto& bytes) {
    for (std::size_t i = 1; i < split.devices; ++i)
      if (const std::size_t size = bytes(i); size > 0) part.push_back({0, static_cast<int>(i), kind, size});
  };
  const auto of_all = [](std::size_t bytes) { return [bytes](std::size_t) { return bytes; }; };
  const auto samples = [&](std::size_t i) { return static_cast<std::size_t>(split.size(i)); };
  const auto outputs = [&](std::size_t i) {
    return sizes.output == 0 ? DataParallelSizes::loss : samples(i) * sizes.output;
  };
  out.by_nccl = sizes.by_nccl && devices > 1 && split.devices == static_cast<std::size_t>(devices);
  const auto inputs = [&] {
    to_each(out.prepare, Traffic::inputs, [&](std::size_t i) { return samples(i) * sizes.sample; });
  };
  if (!out.by_nccl) inputs();
  to_each(out.prepare, Traffic::parameters, of_all(sizes.parameters));
  for (const std::size_t bytes : sizes.buffers) to_each(out.prepare, Traffic::buffers, of_all(bytes));
  if (out.by_nccl) inputs();
  to_each(out.output_gradients, Traffic::outputs, outputs);
  to_each(out.reduce, Traffic::gradients, of_all(sizes.gradients));
  out.gather = out.output_gradients;
  for (auto* const part : {&out.gather, &out.reduce})
    for (auto& copy : *part) std::swap(copy.from, copy.to);
  return out;
}

/// Listens to a step of a real DataParallel, and keeps its copies: `take` at its end.
class DeviceCopyListener final : public trace::Listener {
 public:
  /// `device_ids`: those of the DataParallel, by which devices are numbered here. Throws UsageError where somebody
  /// listens already.
  explicit DeviceCopyListener(const std::vector<int>& device_ids) {
    for (std::size_t i = 0; i < device_ids.size(); ++i) numbers_.emplace(device_ids[i], static_cast<int>(i));
    check<UsageError>(trace::listening() == nullptr, "DeviceCopyListener: somebody listens already, such as a trace");
    trace::listen(this);
  }
  DeviceCopyListener(const DeviceCopyListener&) = delete;
  DeviceCopyListener& operator=(const DeviceCopyListener&) = delete;
  ~DeviceCopyListener() override { trace::listen(nullptr); }

  /// The copies since then. Throws UsageError where they are not those of one pass, forward and backward.
  DataParallelCopies take() {
    const std::lock_guard lock(mutex_);
    check<UsageError>(!several_, "DeviceCopyListener: expected one forward pass, there was another one after it");
    auto out = std::exchange(copies_, {});
    // Threads race; each keeps its own order.
    std::map<int, std::vector<DeviceCopy>> by_device;
    for (const auto& copy : out.prepare) by_device[copy.to].push_back(copy);
    out.prepare.clear();
    for (std::size_t turn = 0, more = 1; std::exchange(more, 0) != 0; ++turn)
      for (const auto& [device, own] : by_device)
        if (turn < own.size()) out.prepare.push_back(own[turn]), more = 1;
    has_gathered_ = false;
    return out;
  }

  std::int64_t now() override { return 0; }
  void span(const trace::Event& event) override {
    if (event.category != "copy" || event.name != "gather") return;
    const std::lock_guard lock(mutex_);
    has_gathered_ = true;
  }
  void instant(const trace::Event&) override {}
  void allocated(int, trace::Memory, std::int64_t) override {}
  void sent(int from, int to, trace::Traffic kind, std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (bytes == 0 || !numbers_.contains(from) || !numbers_.contains(to)) return;
    const bool prepares = kind == trace::Traffic::parameters || kind == trace::Traffic::buffers;
    several_ = several_ || (prepares && has_gathered_);
    auto& part = prepares                            ? copies_.prepare
                 : kind == trace::Traffic::gradients ? copies_.reduce
                 : kind == trace::Traffic::outputs   ? (has_gathered_ ? copies_.output_gradients : copies_.gather)
                 : has_gathered_                     ? copies_.input_gradients
                                                     : copies_.prepare;
    part.push_back({numbers_.at(from), numbers_.at(to), kind, bytes});
  }

 private:
  std::mutex mutex_;
  std::map<int, int> numbers_;
  DataParallelCopies copies_;
  bool has_gathered_ = false, several_ = false;
};

/// The streams of devices of one machine, in virtual time. A copy begins when both devices' streams have come to it,
/// and both go on when it has ended (copy_bytes in tensor/cuda/memory.hpp orders them so): it takes alpha + bytes *
/// beta. So a device's link carries one copy at a time, and that of the first device all.
class DeviceStreams {
 public:
  using Time = comm::simulated::Time;

  /// Throws UsageError where the devices are more than the links of one machine join.
  DeviceStreams(const comm::simulated::SimulationOptions& options)
      : link_(options.links.inside),
        alpha_(link_.latency()),
        call_(comm::simulated::time_of("call", options.links.call)),
        computing_(options.computing),
        keeps_(options.keep_spans) {
    const int most = options.links.island == 0 ? most_devices : std::min(options.links.island, most_devices);
    check<UsageError>(options.ranks >= 1 && options.ranks <= most_devices, "DataParallel: ", options.ranks,
                      " devices, expected 1 to ", most_devices);
    check<UsageError>(options.ranks <= most, "DataParallel: one process on one machine: ", options.ranks,
                      " devices over ", options.links.name.empty() ? "links" : options.links.name, ", which ",
                      most == 1 ? "join machines of one device each" : cat("join machines of ", most, " devices each"),
                      ": expected nvlink or pcie, or fewer devices");
    check<UsageError>(link_.bandwidth > 0, "DataParallel: a bandwidth of ", link_.bandwidth, " bytes a second");
    times_.ranks.resize(static_cast<std::size_t>(options.ranks));
    times_.one_process = true;
  }

  int size() const { return static_cast<int>(times_.ranks.size()); }
  /// A device's clock: where its stream has come to.
  Time& clock(int device) { return of(device).end; }
  void next_step() { ++step_; }
  void compute(int device, double usual, std::string_view kind, std::string_view name) {
    const Time begun = clock(device);
    using namespace comm::simulated;
    clock(device) = later(begun, computing_.time(time_of("compute", usual), device, step_));
    computed_ += seconds(clock(device) - begun);
    mark(device, kind, name, begun);
  }
  void copy(const DeviceCopy& copy, std::string_view name) {
    Time &from = clock(copy.from), &to = clock(copy.to);
    const Time begun = std::max(from, to);
    comm::simulated::time_of("a copy", static_cast<double>(copy.bytes) / link_.bandwidth);  // not too long
    from = to = comm::simulated::later(begun, alpha_ + link_.transfer(copy.bytes));
    for (const int device : {copy.from, copy.to}) mark(device, "copy", name, begun);
    if (keeps_) of(copy.from).copies.push_back({copy.to, copy.kind, copy.bytes, begun, to});
  }
  /// NCCL's broadcast from the first device to all others, or its reduce to it, as one call: pieces go along a chain of
  /// all devices. By its own model of a ring (tuning.cc) it takes the call, an alpha a hop, and the bytes once.
  void collective(std::span<const DeviceCopy> parts, std::string_view name) {
    if (parts.empty()) return;
    std::size_t bytes = 0;  // of one device
    Time begun{};
    for (const auto& part : parts)
      if (part.from == parts.front().from && part.to == parts.front().to) bytes += part.bytes;
    for (int device = 0; device < size(); ++device) begun = std::max(begun, clock(device));
    comm::simulated::time_of("a collective", static_cast<double>(bytes) / link_.bandwidth);
    const Time ended = comm::simulated::later(begun, call_ + (size() - 1) * alpha_ + link_.transfer(bytes));
    for (int device = 0; device < size(); ++device) {
      clock(device) = ended;
      mark(device, "copy", name, begun);
    }
    if (!keeps_) return;
    for (const auto& part : parts) of(part.from).copies.push_back({part.to, part.kind, part.bytes, begun, ended});
  }
  void mark(int device, std::string_view kind, std::string_view name, Time begun, int number = -1) {
    if (keeps_) of(device).marks.push_back({std::string(kind), std::string(name), begun, clock(device), 0, number});
  }
  void hold(int device, const comm::simulated::Held& held) {
    if (keeps_) of(device).memory.push_back(held);
  }
  /// Seconds that all devices have computed for, together.
  double computed() const { return computed_; }
  comm::simulated::SimulatedTimes take() { return std::move(times_); }

 private:
  static constexpr int most_devices = 64;  // of a kind

  comm::simulated::RankTimes& of(int device) { return times_.ranks[static_cast<std::size_t>(device)]; }

  const comm::simulated::AlphaBeta link_;
  const Time alpha_, call_;
  const comm::simulated::Computing computing_;
  const bool keeps_;
  comm::simulated::SimulatedTimes times_;
  std::uint32_t step_ = 0;
  double computed_ = 0;
};

}  // namespace chorus::simulated
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_DEVICE_COPIES_HPP

// <chorus/parallel/simulated/models.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_MODELS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_MODELS_HPP
/// What a simulation has to know of a model: how large its parameters are, and how its time falls to them.

namespace chorus::simulated {

/// A parameter, in the order of the forward pass. Its gradient takes its part of backward's time by its operations.
struct ParameterSize {
  std::size_t count = 0;
  double operations = 0;
};
struct ModelSizes {
  std::string name = {};
  std::vector<ParameterSize> parameters = {};
  std::vector<std::size_t> buffers = {};  ///< bytes of each
  std::size_t sample = 0, output = 0;     ///< bytes of a sample's input, and of what the model makes of it; 0: a loss

  std::size_t count() const {
    std::size_t sum = 0;
    for (const auto& parameter : parameters) sum += parameter.count;
    return sum;
  }

  /// Bytes that its parameters take together, as nn::FlatParameters lays them out in the host's memory: the last first.
  std::size_t flat_bytes() const {
    std::size_t end = 0;
    for (std::size_t i = parameters.size(); i-- > 0;) {
      const auto count = parameters[i].count;
      end = parameter_place<Cpu>(end, count, sizeof(float)) + padded_count<Cpu>(count, sizeof(float));
    }
    return end * sizeof(float);
  }

  /// A weight that is used `uses` times for each sample, and a bias of as many numbers as it has outputs.
  void add(std::size_t weight, std::size_t bias, double uses) {
    parameters.push_back({weight, static_cast<double>(weight) * uses});
    if (bias > 0) parameters.push_back({bias, static_cast<double>(bias) * uses});
  }
};

/// An image of 224 x 224, and what is said of 1000 classes.
inline constexpr std::size_t image_bytes = 3 * 224 * 224 * sizeof(float), class_bytes = 1000 * sizeof(float);

/// ResNet of bottlenecks (He et al., CVPR 2016) for 224 x 224 images and 1000 classes: 50, 101 or 152 layers.
[[gnu::cold]] inline ModelSizes resnet_sizes(std::string_view name, const std::vector<std::size_t>& blocks) {
  ModelSizes model{.name = std::string(name), .sample = image_bytes, .output = class_bytes};
  const auto convolution = [&](std::size_t in, std::size_t out, std::size_t kernel, double side) {
    model.add(in * out * kernel * kernel, 0, side * side);
    model.add(out, out, side * side);  // batch norm, with its mean, variance and count
    for (const std::size_t bytes : {out * sizeof(float), out * sizeof(float), sizeof(std::int64_t)})
      model.buffers.push_back(bytes);
  };
  convolution(3, 64, 7, 112);
  std::size_t in = 64;
  double side = 56;
  for (std::size_t stage = 0; stage < blocks.size(); ++stage) {
    const auto width = std::size_t{64} << stage;
    for (std::size_t block = 0; block < blocks[stage]; ++block) {
      const bool halves = block == 0 && stage > 0;
      convolution(in, width, 1, halves ? 2 * side : side);
      convolution(width, width, 3, side);
      convolution(width, 4 * width, 1, side);
      if (block == 0) convolution(in, 4 * width, 1, side);
      in = 4 * width;
    }
    side /= 2;
  }
  model.add(in * 1000, 1000, 1);
  return model;
}
/// VGG-16 (Simonyan and Zisserman, ICLR 2015).
[[gnu::cold]] inline ModelSizes vgg16_sizes() {
  ModelSizes model{.name = "vgg16", .sample = image_bytes, .output = class_bytes};
  std::size_t in = 3;
  double side = 224;
  for (const auto& [width, layers] : {std::pair<std::size_t, int>{64, 2}, {128, 2}, {256, 3}, {512, 3}, {512, 3}}) {
    for (int layer = 0; layer < layers; ++layer) {
      model.add(in * width * 9, width, side * side);
      in = width;
    }
    side /= 2;
  }
  model.add(in * 49 * 4096, 4096, 1);
  model.add(std::size_t{4096} * 4096, 4096, 1);
  model.add(std::size_t{4096} * 1000, 1000, 1);
  return model;
}
/// BERT (Devlin et al., NAACL 2019): encoder and pooler. Embeddings are looked up, which takes no operations. A sample
/// is 512 tokens, each with its segment and mask.
[[gnu::cold]] inline ModelSizes bert_sizes(std::string_view name, std::size_t layers, std::size_t width) {
  ModelSizes model{
      .name = std::string(name), .sample = 3 * 512 * sizeof(std::int64_t), .output = width * sizeof(float)};
  for (const std::size_t rows : {std::size_t{30522}, std::size_t{512}, std::size_t{2}}) model.add(rows * width, 0, 0);
  model.add(width, width, 1);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (int projection = 0; projection < 4; ++projection) model.add(width * width, width, 1);
    model.add(width, width, 1);
    model.add(4 * width * width, 4 * width, 1);
    model.add(4 * width * width, width, 1);
    model.add(width, width, 1);
  }
  model.add(width * width, width, 0);
  return model;
}

/// `resnet50`, `resnet101`, `resnet152`, `vgg16`, `bert_base`, `bert_large`; or a number of bytes of f32, as 64
/// parameters of one size, without inputs, that make a loss. Throws UsageError for other names.
[[gnu::cold]] inline ModelSizes model_named(std::string_view name) {
  if (name == "resnet50") return resnet_sizes(name, {3, 4, 6, 3});
  if (name == "resnet101") return resnet_sizes(name, {3, 4, 23, 3});
  if (name == "resnet152") return resnet_sizes(name, {3, 8, 36, 3});
  if (name == "vgg16") return vgg16_sizes();
  if (name == "bert_base") return bert_sizes(name, 12, 768);
  if (name == "bert_large") return bert_sizes(name, 24, 1024);
  std::size_t bytes = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), bytes);
  check<UsageError>(
      error == std::errc() && end == name.data() + name.size() && bytes >= 256 && bytes <= 1'000'000'000'000, "model ",
      printable(name),
      ": expected resnet50, resnet101, resnet152, vgg16, bert_base, bert_large, or bytes from 256 to 1e12");
  ModelSizes model{.name = cat(bytes, " bytes")};
  const auto numbers = bytes / 4;
  for (std::size_t i = 0; i < 64; ++i) model.add(numbers * (i + 1) / 64 - numbers * i / 64, 0, 1);
  return model;
}

}  // namespace chorus::simulated
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_MODELS_HPP

namespace chorus::simulated {

enum class TrainingPolicy : std::uint8_t { ddp, local_sgd, parameter_server, data_parallel };
constexpr std::string_view name(TrainingPolicy policy) {
  constexpr std::string_view names[] = {"ddp", "local_sgd", "parameter_server", "dp"};
  return names[static_cast<std::size_t>(policy)];
}

/// A bucket of gradients: how long after backward's begin it is full, if nothing else is to do.
struct BucketTime {
  double ready = 0;
  std::size_t bytes = 0;
};

/// One rank's step, as it is where nobody has to be waited for; in seconds.
struct Training {
  TrainingPolicy policy = TrainingPolicy::ddp;
  double forward = 0, backward = 0, optimizer = 0;
  std::vector<BucketTime> buckets = {};
  std::size_t parameters = 1;     ///< how many; a server's workers tell of each whether it has a gradient
  int period = 8;                 ///< local_sgd: steps between means
  DataParallelSizes copied = {};  ///< dp: what moves, of a batch that has `copied.samples` on each device
  /// What a rank holds, for traces: bytes of its parameters, 0: nobody knows; and how many numbers an optimizer has for
  /// each of them. Activations, which a step's times don't tell, are left out.
  std::size_t parameter_bytes = 0;
  int optimizer_slots = 0;

  double seconds() const { return forward + backward + optimizer; }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& bucket : buckets) sum += bucket.bytes;
    return sum;
  }
};

/// When which bucket is full: gradients come in the reverse order of the forward pass, and buckets are cut as
/// DistributedDataParallel cuts them.
[[gnu::cold]] inline std::vector<BucketTime> bucket_times(const ModelSizes& model, const BucketOptions& options,
                                                          double backward) {
  constexpr double mib = 1024 * 1024;
  double operations = 0;
  for (const auto& parameter : model.parameters) operations += parameter.operations;
  std::vector<BucketTime> buckets;
  BucketTime open;
  double done = 0;
  for (std::size_t i = model.parameters.size(); i-- > 0;) {
    const auto& parameter = model.parameters[i];
    const auto bytes = parameter.count * sizeof(float);
    if (open.bytes > 0 && static_cast<double>(open.bytes + bytes) > mib * options.cap_mb(buckets.size()))
      buckets.push_back(std::exchange(open, {}));
    done += parameter.operations;
    open.bytes += bytes;
    open.ready = operations == 0 ? backward : backward * (done / operations);
  }
  if (open.bytes > 0) buckets.push_back(open);
  return buckets;
}

/// Bytes of a policy's parameters, gradients and optimizer, which lie together each, in a block of the allocator's
/// (tensor/allocator.hpp). Without what they are made from at first.
inline std::array<std::size_t, trace::memory_kinds> held_by(const Training& training, bool steps) {
  std::array<std::size_t, trace::memory_kinds> held{};
  if (training.parameter_bytes == 0) return held;
  const auto block = size_class<64>(training.parameter_bytes).bytes;
  const auto of = [&](trace::Memory kind) -> auto& { return held[static_cast<std::size_t>(kind)]; };
  of(trace::Memory::parameters) = of(trace::Memory::gradients) = block;
  of(trace::Memory::optimizer) = steps ? block * static_cast<std::size_t>(training.optimizer_slots) : 0;
  return held;
}

/// A step of one rank. Each does what the policy of that name does, call by call.
class TrainingRank {
 public:
  TrainingRank(comm::simulated::SimulatedRank& rank, const Training& training) : rank_(rank), training_(training) {
    if (training.parameter_bytes == 0) return;
    const auto held = held_by(training, true);
    for (std::size_t kind = 0; kind < held.size(); ++kind)
      if (held[kind] > 0) rank_.hold(static_cast<trace::Memory>(kind), static_cast<std::int64_t>(held[kind]));
  }

  void step(int number) {
    const auto begun = rank_.clock();
    rank_.next_step();
    switch (training_.policy) {
      case TrainingPolicy::ddp:
        ddp();
        break;
      case TrainingPolicy::local_sgd:
        local_sgd(number);
        break;
      case TrainingPolicy::parameter_server:
        parameter_server(number);
        break;
      case TrainingPolicy::data_parallel:  // has no ranks: see simulate_data_parallel
        break;
    }
    const auto optimizer = rank_.clock();
    if (training_.policy != TrainingPolicy::parameter_server || rank_.rank() == 0) rank_.compute(training_.optimizer);
    rank_.mark("optimizer", "optimizer step", optimizer);
    rank_.mark("step", cat("step ", number), begun, 0, number);
  }
  /// Seconds that this rank's program has waited for calls.
  double exposed() const { return exposed_; }

 private:
  using Op = comm::Op;
  using Traffic = trace::Traffic;
  static constexpr std::size_t share_bytes = 64;  // what ranks tell each other in BatchShares
  static constexpr std::size_t count_bytes = 32;  // and in LocalSgd

  void forward() {
    const auto begun = rank_.clock();
    rank_.compute(training_.forward);
    rank_.mark("forward", "forward", begun);
  }
  template <class Waits>
  void wait(const Waits& waits) {
    const double begun = rank_.time();
    waits();
    exposed_ += rank_.time() - begun;
  }
  void call(Op op, std::size_t bytes, Traffic traffic, int peer = 0, bool receives = false) {
    wait([&] { rank_.call(op, bytes, traffic, peer, receives); });
  }
  void tell_shares() {
    if (rank_.size() > 1) call(Op::all_gather, share_bytes, Traffic::control);
  }

  void ddp() {
    forward();
    const auto begun = rank_.clock();
    tell_shares();
    std::vector<comm::Work> works;
    double done = 0;
    for (const auto& bucket : training_.buckets) {
      const auto index = static_cast<int>(works.size());
      rank_.compute(bucket.ready - std::exchange(done, bucket.ready));
      rank_.mark("bucket", cat("bucket full: ", index), rank_.clock(), bucket.bytes, index);
      works.push_back(rank_.start(Op::all_reduce, bucket.bytes, Traffic::gradients, 0, false, index));
    }
    rank_.compute(training_.backward - done);
    wait([&] {
      for (auto& work : works) work.wait();
    });
    rank_.mark("backward", "backward", begun);
  }

  void backward() {
    const auto begun = rank_.clock();
    rank_.compute(training_.backward);
    rank_.mark("backward", "backward", begun);
  }
  void local_sgd(int number) {
    if (number % training_.period == 0 && rank_.size() > 1) {
      call(Op::all_gather, count_bytes, Traffic::control);
      call(Op::all_reduce, training_.bytes(), Traffic::parameters);
    }
    forward();
    backward();
  }

  void parameter_server(int) {
    const int size = rank_.size();
    const auto each_worker = [&](const auto& f) {
      for (int worker = 1; worker < size; ++worker) f(worker);
    };
    const bool serves = rank_.rank() == 0;
    // The new parameters.
    if (serves)
      each_worker([&](int worker) { call(Op::message, training_.bytes(), Traffic::parameters, worker); });
    else
      call(Op::message, training_.bytes(), Traffic::parameters, 0, true);
    forward();
    const auto begun = rank_.clock();
    tell_shares();
    rank_.compute(training_.backward);
    // Which gradients there are, and the gradients.
    for (const auto& [bytes, traffic] :
         {std::pair(training_.parameters, Traffic::control), std::pair(training_.bytes(), Traffic::gradients)}) {
      // The server has a place for a worker's.
      const auto place = serves && traffic == Traffic::gradients && training_.parameter_bytes > 0
                             ? static_cast<std::int64_t>(size_class<64>(training_.parameter_bytes).bytes)
                             : 0;
      if (place > 0) rank_.hold(trace::Memory::buckets, place);
      if (serves)
        each_worker([&, b = bytes, t = traffic](int worker) { call(Op::message, b, t, worker, true); });
      else
        call(Op::message, bytes, traffic);
      if (place > 0) rank_.hold(trace::Memory::buckets, -place);
    }
    rank_.mark("backward", "backward", begun);
  }

  comm::simulated::SimulatedRank& rank_;
  const Training& training_;
  double exposed_ = 0;
};

struct TrainingTimes {
  double step = 0;     ///< seconds of a step, the mean over the steps, of the last rank
  double exposed = 0;  ///< of them: seconds in which a rank waits for communication, the mean over the ranks
  comm::simulated::SimulatedTimes times = {};
};

/// Steps of DataParallel on `options.ranks` devices of one machine, with those copies: of `data_parallel_copies`, or as
/// a DeviceCopyListener has heard them. Devices go on as their streams do; the program never waits for one. The loss of
/// gathered outputs takes no time. Throws UsageError for devices of several machines, for copies between others than
/// those there are, and for times out of range.
[[gnu::cold]] inline TrainingTimes simulate_data_parallel(const comm::simulated::SimulationOptions& options,
                                                          const Training& training, const DataParallelCopies& copies,
                                                          int steps) {
  check<UsageError>(steps >= 1 && steps <= 100'000, "simulate_data_parallel: ", steps, " steps, expected 1 to 100000");
  DeviceStreams streams(options);
  int used = 1;
  for (const auto* const part :
       {&copies.prepare, &copies.gather, &copies.output_gradients, &copies.reduce, &copies.input_gradients})
    for (const auto& [from, to, kind, bytes] : *part) {
      check<UsageError>(from != to && std::min(from, to) >= 0 && std::max(from, to) < streams.size(),
                        "simulate_data_parallel: a copy from device ", from, " to ", to, ", of ", streams.size());
      used = std::max({used, from + 1, to + 1});
    }
  for (int device = 0; device < streams.size(); ++device)
    if (training.parameter_bytes > 0) streams.hold(device, {{}, held_by(training, device == 0)});
  const auto all = [&](const std::vector<DeviceCopy>& part, std::string_view name) {
    for (const auto& copy : part) streams.copy(copy, name);
  };
  const auto compute = [&](double usual, std::string_view pass) {
    for (int device = 0; device < used; ++device) streams.compute(device, usual, pass, pass);
  };
  std::vector<DeviceCopy> sent_by_nccl, prepared;
  for (const auto& copy : copies.prepare)
    (copies.by_nccl && copy.kind != trace::Traffic::inputs ? sent_by_nccl : prepared).push_back(copy);
  for (int step = 0; step < steps; ++step) {
    streams.next_step();
    const auto begun = streams.clock(0);
    streams.collective(sent_by_nccl, "replicate");
    for (const auto& copy : prepared) streams.copy(copy, copy.kind == trace::Traffic::inputs ? "scatter" : "replicate");
    compute(training.forward, "forward");
    all(copies.gather, "gather");
    streams.mark(0, "forward", "DataParallel forward", begun);
    const auto backward = streams.clock(0);
    all(copies.output_gradients, "scatter gradients");
    compute(training.backward, "backward");
    if (copies.by_nccl)
      streams.collective(copies.reduce, "reduce");
    else
      all(copies.reduce, "reduce");
    all(copies.input_gradients, "gather gradients");
    streams.mark(0, "backward", "backward", backward);
    streams.compute(0, training.optimizer, "optimizer", "optimizer step");
    streams.mark(0, "step", cat("step ", step), begun, step);
  }
  TrainingTimes out;
  const double computed = streams.computed();
  out.times = streams.take();
  out.step = out.times.seconds() / steps;
  out.exposed = out.step - computed / options.ranks / steps;
  return out;
}

/// Trains for so many steps, `options.ranks` ranks with a batch each. Throws UsageError for times and sizes out of
/// range.
[[gnu::cold]] inline TrainingTimes simulate_training(comm::simulated::SimulationOptions options,
                                                     const Training& training, int steps) {
  check<UsageError>(steps >= 1 && steps <= 100'000, "simulate_training: ", steps, " steps, expected 1 to 100000");
  if (training.policy == TrainingPolicy::data_parallel) {
    auto sizes = training.copied;
    check<UsageError>(sizes.samples >= 0 && sizes.samples <= 1'000'000'000, "simulate_training: ", sizes.samples,
                      " samples a device, expected 0 to 1e9");
    sizes.samples *= options.ranks;
    return simulate_data_parallel(options, training, data_parallel_copies(sizes, std::max(options.ranks, 1)), steps);
  }
  check<UsageError>(training.period >= 1, "simulate_training: the period is at least 1 step, got ", training.period);
  check<UsageError>(!training.buckets.empty(), "simulate_training: no buckets");
  double last = 0;
  for (const auto& bucket : training.buckets) {
    check<UsageError>(bucket.ready >= last && bucket.ready <= training.backward,
                      "simulate_training: a bucket that is full after ", bucket.ready, " s, expected ", last, " to ",
                      training.backward);
    last = bucket.ready;
  }
  options.true_numbers = false;
  std::vector<double> exposed(static_cast<std::size_t>(std::max(options.ranks, 0)));
  TrainingTimes out;
  out.times = comm::simulated::simulate(options, [&](comm::simulated::SimulatedRank& rank) {
    TrainingRank self(rank, training);
    for (int step = 0; step < steps; ++step) self.step(step);
    exposed[static_cast<std::size_t>(rank.rank())] = self.exposed();
  });
  out.step = out.times.seconds() / steps;
  for (const double one : exposed) out.exposed += one / options.ranks / steps;
  return out;
}

}  // namespace chorus::simulated
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_TRAINING_HPP

namespace chorus::simulated {

/// The last whole step of rank 0: its forward and optimizer spans, and what backward computes, which is its span less
/// what it waits for; buckets as they were full, by the same count. Throws FileError for a file that can't be read, is
/// no trace, or has no such step.
[[gnu::cold]] inline Training recorded_training(const std::string& path) {
  std::ifstream file(path);
  check<FileError>(file.good(), printable(path), ": the trace cannot be opened");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  // That of a run that was killed is an array without an end, whose last line may be cut off.
  if (const auto end = text.rfind("},\n"); text.starts_with('[') && end != text.npos && !nlohmann::json::accept(text))
    text = text.substr(0, end + 1) + ']';
  struct Event {
    std::string phase, kind;
    std::int64_t pid = 0, bytes = 0;
    double begin = 0, end = 0;
  };
  std::vector<Event> events;
  try {
    const auto all = nlohmann::json::parse(text);
    for (const auto& json : all.is_array() ? all : all.at("traceEvents")) {
      Event event{.phase = json.at("ph"), .kind = json.value("cat", ""), .pid = json.at("pid")};
      if (event.pid != 1 || (event.phase != "X" && event.phase != "i")) continue;
      event.begin = json.at("ts").get<double>() * 1e-6;
      event.end = event.begin + json.value("dur", 0.0) * 1e-6;
      if (event.kind == "bucket") event.bytes = json.at("args").at("bytes");
      check<FileError>(std::isfinite(event.begin) && event.end >= event.begin && event.bytes >= 0, printable(path),
                       ": an event of ", event.begin, " to ", event.end, " s");
      events.push_back(event);
    }
  } catch (const nlohmann::json::exception& error) {
    fail<FileError>(printable(path), ": no trace of chorus': ", printable(error.what()));
  }
  const auto is = [](const Event& event, const char* kind) { return event.kind == kind; };
  const Event* step = nullptr;
  const auto last_in = [&](const char* kind) -> const Event* {
    const Event* last = nullptr;
    for (const auto& event : events)
      if (is(event, kind) && (step == nullptr || (event.begin >= step->begin && event.end <= step->end)) &&
          (last == nullptr || event.begin > last->begin))
        last = &event;
    return last;
  };
  step = last_in("step");
  check<FileError>(step != nullptr, printable(path), ": no step of rank 0");
  const auto* const forward = last_in("forward");
  const auto* const backward = last_in("backward");
  const auto* const optimizer = last_in("optimizer");
  check<FileError>(forward != nullptr && backward != nullptr, printable(path), ": no ",
                   forward == nullptr ? "forward" : "backward", " span in rank 0's last step");
  // Seconds from backward's begin to `end` in which it doesn't wait.
  const auto computed = [&](double end) {
    double waited = 0;
    for (const auto& event : events)
      if (is(event, "wait")) waited += std::max(0.0, std::min(end, event.end) - std::max(backward->begin, event.begin));
    return std::max(0.0, end - backward->begin - waited);
  };
  Training out{.forward = forward->end - forward->begin,
               .backward = computed(backward->end),
               .optimizer = optimizer == nullptr ? 0 : optimizer->end - optimizer->begin};
  for (const auto& event : events)
    if (is(event, "bucket") && event.begin >= backward->begin && event.begin <= backward->end)
      out.buckets.push_back({std::min(computed(event.begin), out.backward), static_cast<std::size_t>(event.bytes)});
  check<FileError>(!out.buckets.empty(), printable(path), ": no buckets in rank 0's last step");
  std::sort(out.buckets.begin(), out.buckets.end(), [](const auto& a, const auto& b) { return a.ready < b.ready; });
  return out;
}

}  // namespace chorus::simulated
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SIMULATED_RECORDED_HPP

// <chorus/parallel/tensor_parallel.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_PARALLEL_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_PARALLEL_HPP
/// TensorParallel: every rank has the whole batch and a part of each layer that can be shared out.

namespace chorus {

struct TensorParallelOptions {
  /// The axis of the inputs along which the samples lie. Each sample draws its own random numbers.
  int dim = 0;
  /// Each so many backward passes, from the first on, ranks compare the bits of the gradients of what each of them has
  /// whole, in a message of 16 bytes. 0: never.
  int check_every = 100;
};

/// Layers that are shared out (ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding,
/// MultiheadAttention, and with them those of transformers) hold 1 / ranks of their numbers, gradients and optimizer
/// state on each rank; all else is computed by all ranks, to the same bits. Results, masks of dropout included, are one
/// device's up to the rounding of sums. Every rank makes the same calls with the same batch.
///
/// The numbers of a parameter that is shared out become this rank's part of it in place: handles, and optimizers that
/// have not stepped yet, go on to stand for that; a tensor of its numbers from before stays what it was.
///
/// `Sequence`: with SequenceSplit, what lies between shared layers of a transformer (normalisation, dropout, residual
/// connections) is shared out by places of the text, so that its activations are, too. Sums become reduce-scatters and
/// all-gathers, of as many bytes together; see split_sequence.
template <class Model, class Sequence = NoSequenceSplit, class Communicator = comm::AnyCommunicator>
class TensorParallel : public WholeBatchPolicy<Model, Communicator> {
  using Base = WholeBatchPolicy<Model, Communicator>;

 public:
  using D = typename Base::device_type;
  using policy_type = TensorParallel;
  static constexpr const char* name = "tensor_parallel";

  /// Compares the models of all ranks, takes rank 0's numbers, and keeps this rank's part. Throws UsageError, on every
  /// rank, where names, shapes, dtypes or options differ, where no layer can be shared out, and where one has less than
  /// an entry for each rank. The communicator must outlive this.
  TensorParallel(Model model, Communicator& communicator, const TensorParallelOptions& options = {},
                 std::uint64_t seed = initial_seed())
      : TensorParallel(std::make_unique<Layers>(communicator, Sequence::splits_sequences), std::move(model),
                       communicator, options, seed) {}
  /// For `launch`: takes communicator and seed from `run`. A model on GPUs moves to this rank's, and talks over NCCL.
  template <detail::LaunchedRun Run>
  TensorParallel(Model model, Run& run, const TensorParallelOptions& options = {})
      : TensorParallel(std::make_unique<detail::RankDevice<D>>(run), std::move(model), options, run.seed()) {
    run.check_options();
  }
  /// Peers don't wait for a rank that throws: the group is given up.
  ~TensorParallel() {
    if (std::uncaught_exceptions() > exceptions_before_ && this->communicator_.size() > 1)
      this->communicator_.abort(
          cat("rank ", this->communicator_.rank(), " threw an exception in the middle of a step"));
  }

  /// The model's output for the whole batch. Throws UsageError where a layer of the model has got other parameters or
  /// buffers since the policy took it.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    handles_.check_kept(this->model_, this->flat_);
    const int dim = this->random_.dim;
    const RandomScope random(this->begin_forward(dim == 0 ? 0 : detail::samples_of(dim, inputs...)));
    const TensorGroupScope group(layers_->group());
    const detail::WatchScope watch(this->communicator_.rank() == 0 ? this->watch_once() : nullptr);
    const trace::Span span(trace::Lane::forward, "forward", "forward");
    auto output = this->model_(this->on_model_device(inputs)...);
    this->end_forward();
    return output;
  }

  /// A model with whole parameters, on every rank, as one device would have it: to evaluate, to copy. All ranks call
  /// it.
  [[gnu::cold]] Model gathered() { return layers_->gathered(this->model_); }
  /// For files, which all ranks write together: see io::detail::keeps_parts.
  bool writes_part(bool, bool shared) const { return shared || this->communicator_.rank() == 0; }

 private:
  using Layers = detail::SharedLayers<Communicator>;

  TensorParallel(std::unique_ptr<detail::RankDevice<D>> device, Model model, const TensorParallelOptions& options,
                 std::uint64_t seed)
      : TensorParallel(device->place(std::move(model)), device->communicator(), options, seed) {
    device_ = std::move(device);
  }
  TensorParallel(std::unique_ptr<Layers> layers, Model model, Communicator& communicator,
                 const TensorParallelOptions& options, std::uint64_t seed)
      : Base(layers->share_out(std::move(model), described(options)), communicator, seed),
        layers_(std::move(layers)),
        handles_(this->model_),
        replicas_(this->flat_, communicator, this->alive(), options.check_every) {
    this->random_.dim = options.dim;
  }
  static std::string described(const TensorParallelOptions& options) {
    check<UsageError>(options.dim >= 0 && options.check_every >= 0,
                      "TensorParallel: dim and check_every are at least 0, got ", options.dim, " and ",
                      options.check_every);
    return cat("dim ", options.dim, "\ncheck_every ", options.check_every, "\n");
  }

  std::unique_ptr<detail::RankDevice<D>> device_;  // where it was made for a run
  std::unique_ptr<Layers> layers_;
  detail::ModelHandles handles_;
  detail::ReplicaCheck<D, Communicator> replicas_;
  const int exceptions_before_ = std::uncaught_exceptions();
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_TENSOR_PARALLEL_HPP

// <chorus/train/advice.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TRAIN_ADVICE_HPP
#define CHORUS_SINGLE_CHORUS_TRAIN_ADVICE_HPP
/// What a trace's numbers mean, in sentences, and what might make the run faster or better, each with the figures
/// behind it. What a trace does not tell is left out.

// <chorus/train/trace_facts.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TRAIN_TRACE_FACTS_HPP
#define CHORUS_SINGLE_CHORUS_TRAIN_TRACE_FACTS_HPP
/// What a trace says of a run in numbers: where a step's time goes, what moves, and who waits for whom.

// <chorus/train/trace_reader.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TRAIN_TRACE_READER_HPP
#define CHORUS_SINGLE_CHORUS_TRAIN_TRACE_READER_HPP
/// Reads the files that TraceRecorder writes, also those of a run that ended while it recorded.

namespace chorus {

/// Something that took time; of an instant, `begin` and `end` are one. In us from the window's start.
struct TraceSpan {
  int lane = 0;  ///< of its process, from 1: see trace::Lane
  double begin = 0, end = 0;
  std::string category = {}, name = {};
  nlohmann::json args = nlohmann::json::object();
};
/// What was counted, from `at` on.
struct TraceCounter {
  double at = 0;
  std::string name = {};                             ///< "memory, bytes" or "sent to 1, bytes"
  nlohmann::json values = nlohmann::json::object();  ///< numbers by name
};
/// One end of an arrow; both have its category and its id.
struct TraceArrowEnd {
  bool leaves = true;  ///< the end from which it comes
  int process = 0;     ///< rank or device
  double at = 0;
  std::string category = {};
  std::int64_t id = 0;
};
/// A rank or a device; each list in order of time.
struct TraceProcess {
  std::string name = {};
  std::vector<TraceSpan> spans = {}, instants = {};
  std::vector<TraceCounter> counters = {};
};

/// A few steps of a training run, as its file tells of them.
struct Trace {
  std::string file = {};
  /// The file's: "policy", "devices", "device_kind", "first_step", "steps", "peak", "notes". These are all there, and
  /// of their kind; a run that was killed may have told no peaks and no notes.
  nlohmann::json metadata = {};
  std::vector<TraceProcess> processes = {};  ///< by rank or device
  std::vector<TraceArrowEnd> arrows = {};
  std::vector<nlohmann::json> events = {};  ///< all, as they are in the file

  std::string policy() const { return metadata.at("policy"); }
  int devices() const { return metadata.at("devices"); }
  /// What the run has told of itself, a number; null where it has not, or told something else.
  const nlohmann::json& number(const char* note) const {
    static const nlohmann::json none;
    const auto& notes = metadata.at("notes");
    const auto found = notes.find(note);
    return found != notes.end() && found->is_number() ? *found : none;
  }
};

namespace detail {

/// Puts together a Trace out of a file's events. Errors are FileErrors that name the file.
class TraceReader {
 public:
  using json = nlohmann::json;
  static constexpr int most_processes = 4096;

  explicit TraceReader(std::string file) { trace_.file = std::move(file); }

  Trace read(std::string_view text) {
    const auto first = text.find_first_not_of(" \t\r\n");
    expect(first != text.npos, "got an empty file");
    if (text[first] == '[')
      read_lines(text.substr(first + 1));
    else
      read_whole(text);
    for (auto& process : trace_.processes) {
      // A span comes before those in it; steps of collectives stay in their order, see whole_trace.
      const auto end = [](const TraceSpan& span) { return span.category == "ring" ? span.begin : span.end; };
      const auto by_begin = [&](const TraceSpan& a, const TraceSpan& b) {
        return a.begin != b.begin ? a.begin < b.begin : end(a) > end(b);
      };
      std::stable_sort(process.spans.begin(), process.spans.end(), by_begin);
      std::stable_sort(process.instants.begin(), process.instants.end(), by_begin);
      std::stable_sort(process.counters.begin(), process.counters.end(),
                       [](const TraceCounter& a, const TraceCounter& b) { return a.at < b.at; });
    }
    return std::move(trace_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail<FileError>("trace '", trace_.file,
                    "': expected a file that train_classifier --trace or another program of "
                    "chorus has written; ",
                    parts...);
  }
  template <class... Parts>
  void expect(bool good, const Parts&... parts) const {
    if (!good) refuse(parts...);
  }

  void read_whole(std::string_view text) {
    auto file = json::parse(text.begin(), text.end(), nullptr, false);
    expect(!file.is_discarded(), "it is not valid JSON, or ends early");
    expect(file.is_object() && file.contains("traceEvents") && file["traceEvents"].is_array(),
           "it has no list \"traceEvents\"");
    expect(file.contains("metadata") && file["metadata"].is_object() && file["metadata"].contains("chorus"),
           "its \"metadata\" does not say \"chorus\"");
    trace_.metadata = std::move(file["metadata"]);
    check_metadata();
    for (auto& event : file["traceEvents"]) add(std::move(event));
  }

  // A rank's own file, an event a line. Where the run was killed its last line may be cut off.
  void read_lines(std::string_view text) {
    std::vector<json> events;
    json head, end;
    for (std::size_t number = 2; !text.empty();) {
      const auto length = std::min(text.find('\n'), text.size());
      auto line = text.substr(0, length);
      const bool last = text.find_first_not_of(" \t\r\n", length) == text.npos;
      text.remove_prefix(std::min(length + 1, text.size()));
      while (!line.empty() && (line.back() == '\r' || line.back() == ' ' || line.back() == ',')) line.remove_suffix(1);
      if (line.empty() || line == "]") {
        number += events.empty() && line.empty() ? 0 : 1;
        continue;
      }
      auto event = json::parse(line.begin(), line.end(), nullptr, false);
      if (event.is_discarded() && last) break;
      expect(event.is_object(), "line ", number, " is not an event");
      const auto name = event.value("name", json());
      if (name == "chorus")
        head = event.value("args", json());
      else if (name == "chorus end")
        end = event.value("args", json());
      else
        events.push_back(std::move(event));
      ++number;
    }
    expect(head.is_object(), "its first event is not named \"chorus\"");
    std::set<json> processes, steps;
    for (const auto& event : events) {
      processes.insert(event.value("pid", json()));
      if (event.value("cat", json()) == "step") steps.insert(event.value("name", json()));
    }
    const bool distributed = head.value("distributed", json(0)) != 0;
    trace_.metadata = {
        {"chorus", 1},
        {"policy", head.value("policy", json())},
        {"devices", distributed ? head.value("ranks", json()) : json(std::max<std::size_t>(1, processes.size()))},
        {"device_kind", head.value("device_kind", json())},
        {"first_step", head.value("first_step", json())},
        {"steps", steps.size()},
        {"clock_error_us", nullptr},
        {"peak", json::array()},
        {"notes", json::object()}};
    if (end.is_object()) {
      if (end.value("peaks", json()).is_object())
        for (auto& peak : end["peaks"]) trace_.metadata["peak"].push_back(peak);
      if (end.value("notes", json()).is_object()) trace_.metadata["notes"] = end["notes"];
    }
    check_metadata();
    for (auto& event : events) add(std::move(event));
  }

  void check_metadata() {
    auto& about = trace_.metadata;
    const auto is_count = [&](const char* key, int least, int most) {
      const auto value = about.value(key, json());
      return value.is_number_integer() && value >= least && value <= most;
    };
    constexpr int many = 1 << 30;
    for (const char* key : {"policy", "device_kind"})
      expect(about.value(key, json()).is_string(), "its metadata has no text \"", key, "\"");
    expect(is_count("devices", 1, most_processes), "its metadata has no number \"devices\" from 1 to ", most_processes);
    for (const char* key : {"first_step", "steps"})
      expect(is_count(key, 0, many), "its metadata has no number \"", key, "\"");
    if (!about.contains("notes")) about["notes"] = json::object();
    if (!about.contains("peak")) about["peak"] = json::array();
    expect(about["notes"].is_object(), "its \"notes\" are no object");
    expect(about["peak"].is_array(), "its \"peak\" is no list");
    for (const auto& peak : about["peak"])
      expect(peak.is_null() || are_numbers(peak), "its \"peak\" has something else than bytes by kind");
    trace_.processes.resize(static_cast<std::size_t>(trace_.devices()));
  }
  static bool are_numbers(const json& values) {
    return values.is_object() && std::all_of(values.begin(), values.end(), [](const json& v) { return v.is_number(); });
  }

  double time(const json& event, const char* key) const {
    const auto value = event.value(key, json());
    expect(value.is_number() && std::abs(value.get<double>()) < 1e15, "event ", trace_.events.size() + 1,
           " has no time \"", key, "\"");
    return value;
  }
  std::string text(const json& event, const char* key) const {
    const auto value = event.value(key, json(""));
    expect(value.is_string(), "event ", trace_.events.size() + 1, " has a \"", key, "\" that is no text");
    return value;
  }

  void add(json event) {
    const auto number = trace_.events.size() + 1;
    expect(event.is_object(), "event ", number, " is no object");
    const auto phase = text(event, "ph");
    expect(phase.size() == 1, "event ", number, " has no \"ph\" of one letter");
    const auto pid = event.value("pid", json());
    expect(pid.is_number_integer() && pid >= 1 && pid <= trace_.devices(), "event ", number,
           " has no \"pid\" from 1 to ", trace_.devices());
    const int place = pid.get<int>() - 1;
    auto& process = trace_.processes[static_cast<std::size_t>(place)];
    const auto tid = event.value("tid", json(10 * (place + 1)));
    expect(tid.is_number_integer() && tid >= 0 && tid <= 1 << 30, "event ", number,
           " has a \"tid\" that is no number of a thread");
    auto args = event.value("args", json::object());
    expect(args.is_object(), "event ", number, " has \"args\" that are no object");
    if (phase == "M") {
      if (text(event, "name") == "process_name") process.name = text(args, "name");
    } else if (phase == "C") {
      expect(are_numbers(args), "event ", number, " counts something else than numbers");
      process.counters.push_back({time(event, "ts"), text(event, "name"), std::move(args)});
    } else if (phase == "X" || phase == "i") {
      const auto begin = time(event, "ts"), length = phase == "X" ? time(event, "dur") : 0;
      expect(length >= 0, "event ", number, " ends before it begins");
      TraceSpan span{tid.get<int>() - 10 * (place + 1),
                     begin,
                     begin + length,
                     text(event, "cat"),
                     text(event, "name"),
                     std::move(args)};
      (phase == "X" ? process.spans : process.instants).push_back(std::move(span));
    } else if (phase == "s" || phase == "f") {
      const auto id = event.value("id", json());
      expect(id.is_number_integer(), "event ", number, " is an arrow without an \"id\"");
      trace_.arrows.push_back({phase == "s", place, time(event, "ts"), text(event, "cat"), id.get<std::int64_t>()});
    }
    trace_.events.push_back(std::move(event));
  }

  Trace trace_;
};

}  // namespace detail

/// What the text of a trace file says; `file` is its name, for messages. Throws FileError for what is no trace of
/// chorus.
inline Trace parse_trace(std::string_view text, std::string file) {
  return detail::TraceReader(std::move(file)).read(text);
}

/// Reads a trace file: the whole of a run, or the list of events of a run that was killed, whose last line may be cut
/// off. Throws FileError for one that cannot be read, is larger than 256 MiB, or is no trace of chorus.
inline Trace read_trace(const std::string& path) {
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  constexpr std::size_t most = std::size_t{256} << 20;
  const std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "rbe"));
  check<FileError>(file != nullptr, "trace: cannot read '", path, "': ", std::strerror(errno));
  std::string text;
  for (std::vector<char> part(1 << 16);;) {
    const auto count = std::fread(part.data(), 1, part.size(), file.get());
    text.append(part.data(), count);
    check<FileError>(std::ferror(file.get()) == 0, "trace: cannot read '", path, "': ", std::strerror(errno));
    check<FileError>(text.size() <= most, "trace '", path, "': expected at most ", most, " bytes, it has more");
    if (count == 0) return parse_trace(text, path);
  }
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TRAIN_TRACE_READER_HPP

namespace chorus {

/// What one rank or device sends another in the median step, of one kind, and what it should be.
struct TraceLink {
  int from = 0, to = 0;
  std::string kind = {};
  double bytes = 0;
  std::optional<double> formula = {};  ///< where there is one
  std::string rule = {};               ///< the formula
};
/// How long others waited for a rank that came last to a call of all, a step, on average over all steps.
struct TraceLate {
  int rank = 0;
  double us = 0;     ///< of each call, the one who waited longest
  double times = 0;  ///< calls a step
};

/// Of a run, all but `step_us` and `late` of its median step. Lists are by rank or device.
struct TraceFacts {
  std::string policy = {};
  int devices = 1;
  int steps = 0;        ///< that were recorded
  int median_step = 0;  ///< its number: half of the steps, or fewer, took less time on their slowest device
  double step_us = 0;   ///< how long that took
  /// Forward, backward and optimizer passes, without the time in which they wait for communication; of passes within
  /// passes, as DataParallel's, the innermost.
  std::vector<double> compute_us = {};
  std::vector<double> communication_us = {};  ///< in which calls or copies were under way
  /// In which the program waited for them; under DataParallel, whose copies do not run beside computing, all that is
  /// outside of passes.
  std::vector<double> exposed_us = {};
  std::optional<double> hidden = {};     ///< part of communication beside which the same device computed
  std::vector<double> utilisation = {};  ///< computing / the device's step
  std::vector<double> loader_us = {};    ///< waiting for the next batch
  std::vector<double> samples = {};      ///< its share of the batch; 0 where the trace does not say
  std::optional<double> gradient_bytes = {};
  std::vector<TraceLink> links = {};
  std::vector<TraceLate> late = {};
  nlohmann::json peak = nlohmann::json::array();  ///< as in the metadata
};

namespace detail {

/// Stretches of time, in order, without overlaps.
class TimeSet {
 public:
  TimeSet() = default;
  explicit TimeSet(std::vector<std::pair<double, double>> stretches) {
    std::sort(stretches.begin(), stretches.end());
    for (const auto& [begin, end] : stretches) {
      if (end <= begin) continue;
      if (!parts_.empty() && begin <= parts_.back().second)
        parts_.back().second = std::max(parts_.back().second, end);
      else
        parts_.emplace_back(begin, end);
    }
  }
  double length() const {
    double sum = 0;
    for (const auto& [begin, end] : parts_) sum += end - begin;
    return sum;
  }
  TimeSet both(const TimeSet& other) const {
    std::vector<std::pair<double, double>> out;
    for (auto a = parts_.begin(), b = other.parts_.begin(); a != parts_.end() && b != other.parts_.end();) {
      out.emplace_back(std::max(a->first, b->first), std::min(a->second, b->second));
      a->second < b->second ? ++a : ++b;
    }
    return TimeSet(std::move(out));
  }
  TimeSet without(const TimeSet& other) const {
    std::vector<std::pair<double, double>> gaps;
    double from = -std::numeric_limits<double>::infinity();
    for (const auto& [begin, end] : other.parts_) {
      gaps.emplace_back(from, begin);
      from = end;
    }
    gaps.emplace_back(from, std::numeric_limits<double>::infinity());
    return both(TimeSet(std::move(gaps)));
  }

 private:
  std::vector<std::pair<double, double>> parts_;
};

struct StepTime {
  double begin = 0, end = 0;
};
/// When each step was on each rank, by its number; under a policy of one process all devices have the first one's.
inline std::map<int, std::vector<StepTime>> step_times(const Trace& trace) {
  std::map<int, std::vector<StepTime>> steps;
  for (std::size_t place = 0; place < trace.processes.size(); ++place)
    for (const auto& span : trace.processes[place].spans) {
      if (span.category != "step" || !span.args.value("step", nlohmann::json()).is_number_integer()) continue;
      auto& times = steps[span.args.at("step").get<int>()];
      if (times.empty()) times.assign(trace.processes.size(), StepTime{span.begin, span.end});
      times[place] = {span.begin, span.end};
    }
  return steps;
}
inline double slowest(const std::vector<StepTime>& times) {
  double most = 0;
  for (const auto& [begin, end] : times) most = std::max(most, end - begin);
  return most;
}

/// The parts of a process' spans of one of the categories that lie in a step. `innermost`: of those that hold others of
/// their lane, only the others.
inline TimeSet time_of(const TraceProcess& process, std::initializer_list<std::string_view> categories,
                       const StepTime& step, bool innermost = false) {
  std::vector<std::pair<double, double>> stretches;
  std::map<int, std::pair<double, double>> before;  // by lane: the last stretch, which may turn out to hold another
  const auto put = [&](const std::pair<double, double>& stretch) {
    stretches.emplace_back(std::max(stretch.first, step.begin), std::min(stretch.second, step.end));
  };
  for (const auto& span : process.spans) {
    if (std::find(categories.begin(), categories.end(), span.category) == categories.end()) continue;
    if (const auto last = before.find(span.lane); last != before.end()) {
      if (!innermost || span.begin >= last->second.second) put(last->second);
    }
    before[span.lane] = {span.begin, span.end};
  }
  for (const auto& [lane, stretch] : before) put(stretch);
  return TimeSet(std::move(stretches));
}

inline double number_of(const nlohmann::json& args, const char* key, double otherwise = 0) {
  const auto found = args.find(key);
  return found != args.end() && found->is_number() ? found->get<double>() : otherwise;
}
inline std::string text_of(const nlohmann::json& args, const char* key) {
  const auto found = args.find(key);
  return found != args.end() && found->is_string() ? found->get<std::string>() : "";
}

/// What a rank sends each other one in a step's all_reduces of `kind`, by the algorithms that ran them: a ring's rank
/// sends all of its 2 (N-1)/N K to the next one, the direct algorithms 2 K/N to each. Nothing where another one ran.
inline std::optional<std::map<int, double>> all_reduce_links(const TraceProcess& process, int rank, int ranks,
                                                             const StepTime& step, std::string_view kind) {
  std::map<int, double> out;
  for (const auto& span : process.spans) {
    if (span.category != "comm" || span.begin < step.begin || span.begin >= step.end) continue;
    if (text_of(span.args, "traffic") != kind) continue;
    const auto algorithm = text_of(span.args, "algorithm");
    if (text_of(span.args, "op") != "all_reduce" || span.args.contains("group")) return std::nullopt;
    const double bytes = number_of(span.args, "bytes");
    if (algorithm == "ring")
      out[(rank + 1) % ranks] += 2.0 * (ranks - 1) / ranks * bytes;
    else if (algorithm == "direct" || algorithm == "in_place")
      for (int to = 0; to < ranks; ++to) out[to] += to == rank ? 0 : 2.0 / ranks * bytes;
    else
      return std::nullopt;
  }
  if (out.empty()) return std::nullopt;
  return out;
}

/// The formula of a link, or nothing.
inline void add_formula(TraceLink& link, const Trace& trace, const TraceFacts& facts, const StepTime& step) {
  const auto& sender = trace.processes[static_cast<std::size_t>(link.from)];
  const bool by_all_reduce =
      (facts.policy == "ddp" && link.kind == "gradients") || (facts.policy == "local_sgd" && link.kind == "parameters");
  if (by_all_reduce) {
    const auto links = all_reduce_links(sender, link.from, facts.devices, step, link.kind);
    if (!links || !links->contains(link.to)) return;
    link.formula = links->at(link.to);
    int others = 0;
    for (const auto& [to, bytes] : *links) others += bytes > 0 ? 1 : 0;
    link.rule = others == 1 ? "2 (N-1)/N K" : "2 K/N";
  } else if (facts.policy == "dp" || facts.policy == "parameter_server") {
    const bool down = link.kind == "parameters" && link.from == 0, up = link.kind == "gradients" && link.to == 0;
    if ((down || up) && facts.gradient_bytes) {
      link.formula = *facts.gradient_bytes;
      const double more = link.bytes - *link.formula;
      link.rule = more > 0 && more < 0.01 * *link.formula ? "K without what fills up between parameters" : "K";
    } else if (const auto& sample = trace.number("sample_bytes");
               facts.policy == "dp" && link.kind == "inputs" && link.from == 0 && sample.is_number()) {
      const double share = facts.samples[static_cast<std::size_t>(link.to)];
      if (share > 0) {
        link.formula = share * sample.get<double>();
        link.rule = "its share of the inputs";
      }
    }
  }
}

inline std::vector<TraceLink> links_of(const Trace& trace, const TraceFacts& facts, const std::vector<StepTime>& step) {
  std::vector<TraceLink> out;
  for (std::size_t place = 0; place < trace.processes.size(); ++place) {
    std::map<std::pair<int, std::string>, double> before, after;  // until the step's begin and its end
    for (const auto& counter : trace.processes[place].counters) {
      constexpr std::string_view prefix = "sent to ";
      if (!counter.name.starts_with(prefix) || counter.at > step[place].end) continue;
      const auto name = counter.name.substr(prefix.size());
      int to = -1;
      std::from_chars(name.data(), name.data() + name.size(), to);
      if (to < 0 || to >= facts.devices) continue;
      for (const auto& [kind, value] : counter.values.items()) {
        after[{to, kind}] = value.get<double>();
        if (counter.at <= step[place].begin) before[{to, kind}] = value.get<double>();
      }
    }
    for (const auto& [link, sum] : after) {
      const double sent = sum - before[link];
      if (sent <= 0) continue;
      out.push_back({.from = static_cast<int>(place), .to = link.first, .kind = link.second, .bytes = sent});
      add_formula(out.back(), trace, facts, step[place]);
    }
  }
  return out;
}

inline std::vector<TraceLate> late_of(const Trace& trace, int steps) {
  std::map<std::int64_t, const TraceArrowEnd*> from;
  for (const auto& arrow : trace.arrows)
    if (arrow.category == "late" && arrow.leaves) from[arrow.id] = &arrow;
  std::vector<std::vector<const TraceSpan*>> calls(trace.processes.size());  // by their begin
  for (std::size_t place = 0; place < trace.processes.size(); ++place)
    for (const auto& span : trace.processes[place].spans)
      if (span.category == "comm") calls[place].push_back(&span);
  std::map<std::pair<int, double>, double> longest;  // of a call: by who came last, and when
  for (const auto& arrow : trace.arrows) {
    const auto start = from.find(arrow.id);
    if (arrow.category != "late" || arrow.leaves || start == from.end()) continue;
    auto& most = longest[{start->second->process, start->second->at}];
    const auto& own = calls[static_cast<std::size_t>(arrow.process)];
    auto span = std::upper_bound(own.begin(), own.end(), std::min(start->second->at, arrow.at),
                                 [](double at, const TraceSpan* each) { return at < each->begin; });
    constexpr int groups = 8;  // whose calls may be under way beside each other
    for (int i = 0; i < groups && span != own.begin(); ++i)
      if (--span; arrow.at <= (*span)->end) {
        most = std::max(most, start->second->at - (*span)->begin);
        break;
      }
  }
  std::map<int, TraceLate> by_rank;
  for (const auto& [call, us] : longest) {
    auto& late = by_rank[call.first];
    late.rank = call.first;
    late.us += us;
    ++late.times;
  }
  std::vector<TraceLate> out;
  for (const auto& [rank, late] : by_rank) out.push_back({rank, late.us / steps, late.times / steps});
  return out;
}

}  // namespace detail

/// The facts of a run. Throws FileError for a trace without a complete step.
inline TraceFacts facts_of(const Trace& trace) {
  const auto steps = detail::step_times(trace);
  check<FileError>(
      !steps.empty(), "trace '", trace.file,
      "': expected a complete step, it has none: the run ended in the first one that was recorded, or before");
  TraceFacts facts;
  facts.policy = trace.policy();
  facts.devices = trace.devices();
  facts.steps = static_cast<int>(steps.size());
  std::vector<std::pair<double, int>> lengths;
  for (const auto& [number, times] : steps) lengths.emplace_back(detail::slowest(times), number);
  std::sort(lengths.begin(), lengths.end());
  std::tie(facts.step_us, facts.median_step) = lengths[(lengths.size() - 1) / 2];
  const auto& step = steps.at(facts.median_step);
  double communicating = 0, beside = 0;
  for (std::size_t place = 0; place < trace.processes.size(); ++place) {
    const auto& process = trace.processes[place];
    const auto of = [&](std::initializer_list<std::string_view> categories, bool innermost = false) {
      return detail::time_of(process, categories, step[place], innermost);
    };
    const auto communication = of({"comm", "copy"}), waits = of({"wait"});
    const auto passes = of({"forward", "backward", "optimizer"}, true).without(waits);
    const auto exposed = facts.policy == "dp" ? communication.without(passes) : waits;
    const double length = step[place].end - step[place].begin;
    facts.compute_us.push_back(passes.length());
    facts.communication_us.push_back(communication.length());
    facts.exposed_us.push_back(exposed.length());
    facts.utilisation.push_back(length > 0 ? passes.length() / length : 0);
    facts.loader_us.push_back(of({"loader"}).length());
    communicating += communication.length();
    beside += communication.both(passes).length();
    double samples = 0;
    for (const auto& span : process.spans)
      if (span.category == "loader") samples = std::max(samples, detail::number_of(span.args, "samples"));
    facts.samples.push_back(samples);
  }
  if (facts.policy == "dp") {  // whose one loader has the whole batch; the first shares may be larger by one sample
    const auto batch = static_cast<std::int64_t>(facts.samples.front());
    for (int i = 0; i < facts.devices; ++i)
      facts.samples[static_cast<std::size_t>(i)] =
          static_cast<double>(batch / facts.devices + (i < batch % facts.devices ? 1 : 0));
  }
  if (communicating > 0) facts.hidden = beside / communicating;
  if (const auto& bytes = trace.number("gradient_bytes"); bytes.is_number()) facts.gradient_bytes = bytes.get<double>();
  facts.links = detail::links_of(trace, facts, step);
  facts.late = detail::late_of(trace, facts.steps);
  facts.peak = trace.metadata.at("peak");
  return facts;
}

/// The same as JSON: what is not known is null.
inline nlohmann::json to_json(const TraceFacts& facts) {
  using nlohmann::json;
  const auto rounded = [](double value) { return std::round(value * 1000) / 1000; };
  const auto known = [](const std::optional<double>& value) { return value ? json(*value) : json(); };
  const auto list = [&](std::vector<double> values) {
    std::transform(values.begin(), values.end(), values.begin(), rounded);
    return values;
  };
  json links = json::array(), late = json::array();
  for (const auto& link : facts.links)
    links.push_back({{"from", link.from},
                     {"to", link.to},
                     {"kind", link.kind},
                     {"bytes", link.bytes},
                     {"formula", known(link.formula)},
                     {"rule", link.rule}});
  for (const auto& rank : facts.late)
    late.push_back({{"rank", rank.rank}, {"us", rounded(rank.us)}, {"times", rounded(rank.times)}});
  return {{"step_us", rounded(facts.step_us)},
          {"compute_us", list(facts.compute_us)},
          {"communication_us", list(facts.communication_us)},
          {"exposed_us", list(facts.exposed_us)},
          {"hidden", known(facts.hidden)},
          {"utilisation", list(facts.utilisation)},
          {"gradient_bytes", known(facts.gradient_bytes)},
          {"links", links},
          {"late", late},
          {"peak", facts.peak}};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TRAIN_TRACE_FACTS_HPP

namespace chorus {

/// Something that was measured. `section` is that of chorus-page to which it belongs: happened, timeline, links,
/// memory, ring, gradients or formulas.
struct TraceSentence {
  std::string text = {}, section = {};
};
struct TraceAdvice {
  std::string text = {};
  std::string figures = {};  ///< what was measured, and how the rest follows from it
  std::string section = {};
};
/// A run as chorus-page shows it.
struct TracedRun {
  std::string name = {};
  Trace trace = {};
  TraceFacts facts = {};
};

/// A model of a step under DistributedDataParallel: passes take as long as the device's share of the batch is large,
/// the optimizer and what is left of the step always the same, and averaging K bytes of N ranks' gradients in B buckets
///   2 (N-1)/N K/beta + B 2 (N-1) alpha
/// (a ring's; Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005), of
/// which a constant part lies beside computing. Ranks that come late are not in it.
struct StepModel {
  int devices = 1;       ///< of the run
  double passes_us = 0;  ///< forward and backward of the slowest device
  double optimizer_us = 0;
  double other_us = 0;  ///< of the step: neither computing nor waiting
  double hidden = 0;    ///< part of communication beside which devices compute
  double bytes = 0;     ///< K
  int buckets = 0;      ///< B
  double alpha_us = 0;  ///< a message's
  double beta = 0;      ///< bytes per us
  int calls = 0;        ///< of the run from which alpha and beta come; 0: it has no communication

  double communication_us(int n) const {
    if (n == 1 || calls == 0) return 0;
    return 2.0 * (n - 1) / n * bytes / beta + buckets * 2.0 * (n - 1) * alpha_us;
  }
  /// With `n` devices and a batch `larger` times as large.
  double step_us(int n, double larger = 1) const {
    return passes_us * larger * devices / n + optimizer_us + other_us + (1 - hidden) * communication_us(n);
  }
};

namespace detail {

inline std::string decimals(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}
/// A length of time with three digits or so.
inline std::string time_text(double us) {
  if (us == 0) return "0 us";
  if (us < 9.995) return decimals(us, 1) + " us";
  if (us < 999.5) return decimals(us, 0) + " us";
  if (us < 999500) return decimals(us / 1000, us < 9995 ? 2 : us < 99950 ? 1 : 0) + " ms";
  return decimals(us / 1e6, 2) + " s";
}
inline std::string bytes_text(double bytes) {
  if (bytes < 1024) return decimals(bytes, 0) + " bytes";
  if (bytes < 1024 * 1024) return decimals(bytes / 1024, 1) + " KiB";
  if (bytes < 1024.0 * 1024 * 1024) return decimals(bytes / 1024 / 1024, 1) + " MiB";
  return decimals(bytes / 1024 / 1024 / 1024, 2) + " GiB";
}
inline std::string percent_text(double part) { return decimals(100 * part, 0) + " %"; }
/// 2.00 as 2, 0.05 as 0.05.
inline std::string number_text(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}
inline std::string plural(double count, std::string_view noun) {
  return cat(number_text(count), ' ', noun, count == 1 ? "" : "s");
}
inline bool has_ranks(const TraceFacts& facts) { return facts.policy != "dp" && facts.policy != "single"; }
inline std::string_view place_noun(const TraceFacts& facts) { return has_ranks(facts) ? "rank" : "device"; }
/// A quantity of all devices: "1 ms" or "1 ms to 2 ms".
template <class Text>
std::string range_text(const std::vector<double>& values, const Text& text) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  const auto low = text(*least), high = text(*most);
  return low == high ? low : cat(low, " to ", high);
}
inline double most_of(const std::vector<double>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}
/// The whole batch, as the run or its loaders have told it; 0 where they have not.
inline double batch_of(const Trace& trace) {
  if (const auto& note = trace.number("batch"); note.is_number()) return note.get<double>();
  double batch = 0;
  for (const auto& process : trace.processes)
    for (const auto& span : process.spans)
      if (span.category == "loader") batch = std::max(batch, number_of(span.args, "batch"));
  return batch;
}

/// How long the calls of all ranks took once the last one had come: in the others' spans lies the wait for it.
struct CallTime {
  std::string op, traffic;
  double bucket = -1, bytes = 0, us = 0;
};
inline std::vector<CallTime> call_times(const Trace& trace) {
  std::map<std::pair<std::string, double>, std::pair<CallTime, std::size_t>> calls;
  for (const auto& process : trace.processes)
    for (const auto& span : process.spans) {
      const auto op = text_of(span.args, "op");
      if (span.category != "comm" || (op != "all_reduce" && op != "all_gather") || span.args.contains("group"))
        continue;
      auto& [call, ranks] = calls[{op, number_of(span.args, "sequence", -1)}];
      const double us = span.end - span.begin;
      call = {op, text_of(span.args, "traffic"), number_of(span.args, "bucket", -1), number_of(span.args, "bytes"),
              ranks == 0 ? us : std::min(call.us, us)};
      ++ranks;
    }
  std::vector<CallTime> out;
  for (const auto& [key, call] : calls)
    if (call.second == trace.processes.size()) out.push_back(call.first);
  return out;
}

inline double total_of(const nlohmann::json& peak) {
  double sum = 0;
  if (peak.is_object())
    for (const auto& bytes : peak) sum += bytes.get<double>();
  return sum;
}
/// A peak's kinds, largest first: "activations 4.1 MiB, parameters 0.2 MiB".
inline std::string kinds_text(const nlohmann::json& peak) {
  std::vector<std::pair<double, std::string>> kinds;
  for (const auto& [kind, bytes] : peak.items())
    if (bytes.get<double>() > 0) kinds.emplace_back(-bytes.get<double>(), kind);
  std::sort(kinds.begin(), kinds.end());
  std::string out;
  for (const auto& [bytes, kind] : kinds)
    out += cat(out.empty() ? "" : ", ", kind == "optimizer" ? "optimizer state" : kind, ' ', bytes_text(-bytes));
  return out;
}

}  // namespace detail

/// The model, fitted to a run: alpha is the median of its small all_gathers over their N-1 messages, beta what the
/// all_reduces of its buckets moved over the rest of their time, of each bucket the median's: on a machine whose cores
/// are shared some calls take many times as long. Nothing for a policy other than ddp and single.
inline std::optional<StepModel> fit_step_model(const Trace& trace, const TraceFacts& facts) {
  if (facts.policy != "ddp" && facts.policy != "single") return std::nullopt;
  StepModel model;
  model.devices = facts.devices;
  const auto step = detail::step_times(trace).at(facts.median_step);
  model.other_us = std::numeric_limits<double>::infinity();
  for (std::size_t place = 0; place < trace.processes.size(); ++place) {
    const auto& process = trace.processes[place];
    const auto waits = detail::time_of(process, {"wait"}, step[place]);
    const double passes = detail::time_of(process, {"forward", "backward"}, step[place], true).without(waits).length();
    model.passes_us = std::max(model.passes_us, passes);
    model.optimizer_us = std::max(model.optimizer_us, facts.compute_us[place] - passes);
    model.other_us = std::min(model.other_us,
                              step[place].end - step[place].begin - facts.compute_us[place] - facts.exposed_us[place]);
  }
  model.other_us = std::max(0.0, model.other_us);
  model.hidden = facts.hidden.value_or(0);
  if (facts.devices == 1) return model;
  const double n = facts.devices;
  std::vector<double> small;
  std::map<double, std::vector<detail::CallTime>> buckets;
  for (const auto& call : detail::call_times(trace)) {
    if (call.op == "all_gather" && call.bytes <= 4096) small.push_back(call.us / (n - 1));
    if (call.op == "all_reduce" && call.traffic == "gradients") buckets[call.bucket].push_back(call);
  }
  double us = 0;
  for (auto& [bucket, calls] : buckets) {
    const auto middle = calls.begin() + static_cast<std::ptrdiff_t>((calls.size() - 1) / 2);
    std::nth_element(calls.begin(), middle, calls.end(), [](const auto& a, const auto& b) { return a.us < b.us; });
    us += middle->us;
    model.bytes += middle->bytes;
    model.calls += static_cast<int>(calls.size());
  }
  if (model.bytes <= 0 || us <= 0) return std::nullopt;
  model.buckets = static_cast<int>(buckets.size());
  if (!small.empty()) {
    const auto middle = small.begin() + static_cast<std::ptrdiff_t>((small.size() - 1) / 2);
    std::nth_element(small.begin(), middle, small.end());
    model.alpha_us = *middle;
    model.calls += static_cast<int>(small.size());
  }
  double rest = us - model.buckets * 2 * (n - 1) * model.alpha_us;
  if (rest <= 0) {  // small calls say nothing of large ones here
    model.alpha_us = 0;
    rest = us;
  }
  model.beta = 2 * (n - 1) / n * model.bytes / rest;
  return model;
}

/// What was measured, in sentences.
inline std::vector<TraceSentence> sentences_of(const Trace& trace, const TraceFacts& facts) {
  using namespace detail;
  std::vector<TraceSentence> out;
  const auto noun = place_noun(facts);
  const auto kind = trace.metadata.at("device_kind").get<std::string>();
  const int first = trace.metadata.at("first_step");
  const auto say = [&](std::string_view section, const auto&... parts) {
    out.push_back({cat(parts...), std::string(section)});
  };
  say("happened", "Policy ", facts.policy, " on ", plural(facts.devices, kind + " device"), ": ",
      plural(facts.steps, "step"), " recorded from step ", first, " on; step ", facts.median_step,
      ", the median, is shown in full.");
  if (const double batch = batch_of(trace); batch > 0)
    say("happened", "A batch has ", plural(batch, "sample"),
        facts.devices == 1 ? std::string()
                           : cat("; each ", noun, " has ", range_text(facts.samples, number_text), " of them"),
        ".");
  if (const auto& period = trace.number("period"); period.is_number())
    say("happened", "Ranks take the mean of their parameters every ", number_text(period.get<double>()), " steps.");
  say("timeline", "A step takes ", time_text(facts.step_us), " (median of ", facts.steps, ", slowest ", noun, ").");
  say("timeline", "In it a ", noun, " computes for ", range_text(facts.compute_us, time_text),
      " (t1): ", range_text(facts.utilisation, percent_text), " of its step.");
  if (most_of(facts.communication_us) > 0) {
    say("timeline", "Communication is under way for ", range_text(facts.communication_us, time_text),
        " (t2); the program waits for it ", range_text(facts.exposed_us, time_text), ", and ",
        percent_text(facts.hidden.value_or(0)), " of it lies beside computing.");
  } else if (facts.devices > 1) {
    int with = 0;
    double most = 0;
    for (const auto& [number, times] : step_times(trace)) {
      double longest = 0;
      for (std::size_t place = 0; place < times.size(); ++place)
        longest = std::max(longest, time_of(trace.processes[place], {"comm", "copy"}, times[place]).length());
      with += longest > 0 ? 1 : 0;
      most = std::max(most, longest);
    }
    say("timeline", "No communication lies in this step; ",
        with == 0 ? std::string("nor in another one that was recorded.")
                  : cat(with, " of the ", facts.steps, " recorded steps ", with == 1 ? "has" : "have", " up to ",
                        time_text(most), " of it."));
  }
  auto latest = facts.late;
  std::sort(latest.begin(), latest.end(), [](const TraceLate& a, const TraceLate& b) { return a.us > b.us; });
  for (std::size_t i = 0; i < std::min<std::size_t>(3, latest.size()); ++i)
    say("timeline", "Others waited for rank ", latest[i].rank, " ", time_text(latest[i].us), " a step, in ",
        decimals(latest[i].times, 1), " calls a step to which it came last.");
  if (latest.size() > 3)
    say("timeline", "They waited less for ", plural(static_cast<double>(latest.size() - 3), "other rank"), ".");
  if (const double us = most_of(facts.loader_us); us > 0)
    say("timeline", "The longest wait for the next batch took ", time_text(us), " of the step.");
  // Of many links, those that carry the same together.
  std::map<std::tuple<std::string, double, double, std::string>, std::vector<const TraceLink*>> alike;
  for (const auto& link : facts.links)
    if (link.kind != "control") alike[{link.kind, link.bytes, link.formula.value_or(-1), link.rule}].push_back(&link);
  for (const auto& [carried, links] : alike) {
    const auto rest = cat(decimals(links.front()->bytes, 0), " bytes of ", links.front()->kind,
                          links.front()->formula ? cat("; the formula, ", links.front()->rule, ", gives ",
                                                       decimals(*links.front()->formula, 0))
                                                 : std::string(),
                          ".");
    if (links.size() > 4)
      say("links", "In a step each of ", links.size(), " links between ", noun, "s carries ", rest);
    else
      for (const auto* link : links)
        say("links", "In a step ", noun, ' ', link->from, " sends ", noun, ' ', link->to, " ", rest);
  }
  std::size_t fullest = 0;
  for (std::size_t place = 0; place < facts.peak.size(); ++place)
    if (total_of(facts.peak[place]) > total_of(facts.peak[fullest])) fullest = place;
  for (std::size_t place = 0; place < facts.peak.size(); ++place)
    if (const auto total = total_of(facts.peak[place]); total > 0 && (facts.peak.size() <= 8 || place == fullest))
      say("memory", "At its peak ", noun, ' ', place, facts.peak.size() <= 8 ? "" : ", which has most,", " holds ",
          bytes_text(total), ": ", kinds_text(facts.peak[place]), ".");
  std::set<double> buckets;
  double first_full = -1, backward_end = 0;
  const auto step = step_times(trace).at(facts.median_step).front();
  for (const auto& instant : trace.processes.front().instants)
    if (instant.category == "bucket" && instant.begin >= step.begin && instant.begin <= step.end) {
      buckets.insert(number_of(instant.args, "bucket"));
      if (first_full < 0) first_full = instant.begin;
    }
  for (const auto& span : trace.processes.front().spans)
    if (span.category == "backward" && span.begin >= step.begin && span.end <= step.end)
      backward_end = std::max(backward_end, span.end);
  if (facts.gradient_bytes) say("gradients", "The model has ", bytes_text(*facts.gradient_bytes), " of gradients (K).");
  if (!buckets.empty())
    say("gradients", "They leave in ", plural(static_cast<double>(buckets.size()), "bucket"),
        "; on rank 0 the first is full ", time_text(std::max(0.0, backward_end - first_full)),
        " before backward ends.");
  std::size_t chunks = 0;
  std::set<double> calls;
  for (const auto& span : trace.processes.front().spans)
    if (span.category == "ring" && span.begin >= step.begin && span.begin < step.end) {
      ++chunks;
      calls.insert(number_of(span.args, "sequence"));
    }
  if (chunks > 0)
    say("ring", "Rank 0 makes ", plural(static_cast<double>(chunks), "step"), " in ",
        plural(static_cast<double>(calls.size()), "call"), "; a ring of ", facts.devices, " ranks takes ",
        2 * (facts.devices - 1), " rounds: ", facts.devices - 1, " that add and ", facts.devices - 1, " that copy.");
  if (const auto model = fit_step_model(trace, facts); model && model->calls > 0)
    say("formulas",
        "Averaging K bytes of gradients in B buckets by rings takes 2 (N-1)/N K/beta + B 2 (N-1) alpha: with "
        "N = ",
        facts.devices, ", K = ", bytes_text(model->bytes), ", B = ", model->buckets,
        ", beta = ", decimals(model->beta / 1000, 2), " GB/s and alpha = ", time_text(model->alpha_us), ", fitted to ",
        model->calls, " calls of this run, ", time_text(model->communication_us(facts.devices)), ".");
  return out;
}

/// What might make the run faster or better.
inline std::vector<TraceAdvice> advice_of(const Trace& trace, const TraceFacts& facts) {
  using namespace detail;
  std::vector<TraceAdvice> out;
  const auto noun = place_noun(facts);
  const auto add = [&](std::string_view section, std::string text, std::string figures) {
    out.push_back({std::move(text), std::move(figures), std::string(section)});
  };
  double late = 0, mean_step = 0;
  for (const auto& rank : facts.late) late += rank.us;
  for (const auto& [number, times] : step_times(trace)) mean_step += slowest(times) / facts.steps;
  const double t1 = most_of(facts.compute_us), t2 = most_of(facts.communication_us),
               exposed = most_of(facts.exposed_us);
  if (t1 > 0 && t2 > 0)
    add("timeline",
        t2 > t1 && late > 0.5 * t2
            ? "Communication takes longer than computing, but most of it is waiting for the rank that comes last."
        : t2 > t1 ? "Communication takes longer than computing: a larger batch, or fewer devices, gives it less weight."
        : exposed > 0.1 * facts.step_us
            ? "Computing takes longer than communication, but waiting for it is more than a tenth of the step."
            : "Computing takes longer than communication, which is hardly waited for: it is no hindrance here.",
        cat("computing t1 = ", time_text(t1), ", communication t2 = ", time_text(t2),
            ", t2/t1 = ", decimals(t2 / t1, 2),
            has_ranks(facts) ? cat(", waits for who comes last ", time_text(late), " on average") : std::string(),
            ", waited for ", time_text(exposed), " of a step of ", time_text(facts.step_us)));
  const double batch = batch_of(trace);
  const auto& classes = trace.number("classes");
  if (const auto model = fit_step_model(trace, facts); model && model->passes_us > 0) {
    const auto assumption = [&](std::string_view what) {
      return cat("An estimate: ", what,
                 ", if each device has cores of its own and passes take as long as the share of the batch is large.");
    };
    const auto ring = cat("K = ", bytes_text(model->bytes), ", B = ", model->buckets,
                          ", beta = ", decimals(model->beta / 1000, 2), " GB/s, alpha = ", time_text(model->alpha_us),
                          " from ", model->calls, " calls, ", percent_text(model->hidden), " hidden");
    const double now = model->step_us(facts.devices);
    if (model->calls > 0) {
      const int more = 2 * facts.devices;
      const double then = model->step_us(more), faster = now / then;
      add("formulas",
          cat(faster > 1.1   ? "Twice as many devices would help. "
              : faster > 1.0 ? "Twice as many devices would hardly help. "
                             : "Twice as many devices would not help. ",
              assumption(cat(more, " devices with the same batch would be ", decimals(faster, 2), " times as fast as ",
                             facts.devices))),
          cat("step by the model ", time_text(now), " with ", facts.devices, ", ", time_text(then), " with ", more,
              " devices (late ranks not counted; measured ", time_text(facts.step_us), "); communication ",
              time_text(model->communication_us(facts.devices)), " and ", time_text(model->communication_us(more)),
              "; ", ring));
    }
    const double twice = model->step_us(facts.devices, 2), gain = 2 * now / twice;
    add("formulas",
        cat(gain > 1.1 ? "A larger batch would use the devices better. " : "A larger batch would hardly help. ",
            assumption(cat("twice the batch would take ", decimals(gain, 2), " times as many samples a second"))),
        cat("step by the model ", time_text(now), " now, ", time_text(twice), " with twice the batch: of it ",
            time_text(2 * model->passes_us), " forward and backward",
            model->calls > 0 ? cat(", communication as before; ", ring) : std::string()));
  }
  const auto idlest = static_cast<std::size_t>(std::min_element(facts.utilisation.begin(), facts.utilisation.end()) -
                                               facts.utilisation.begin());
  const auto [least, most] = std::minmax_element(facts.compute_us.begin(), facts.compute_us.end());
  if (const double idle = 1 - facts.utilisation[idlest]; idle > 0.1)
    add("timeline",
        cat("A ", noun, " is idle for up to ", percent_text(idle), " of the step",
            *least < 0.8 * *most
                ? cat("; the work is not even: ", noun, ' ', least - facts.compute_us.begin(), " has least of it.")
                : std::string(".")),
        cat("computing / step: ", range_text(facts.utilisation, percent_text), "; of its step ", noun, ' ', idlest,
            " computes ", time_text(facts.compute_us[idlest]), ", waits ", time_text(facts.exposed_us[idlest]),
            " for communication and ", time_text(facts.loader_us[idlest]), " for the next batch"));
  if (batch > 0 && classes.is_number() && classes.get<double>() > 0) {
    const double wanted = 10 * classes.get<double>();
    add("happened",
        batch < wanted ? "A batch has few samples of each class: by a rule of thumb it should have ten."
                       : "A batch has ten samples of each class or more, as a rule of thumb wants it.",
        cat("batch ", number_text(batch), ", 10 x ", number_text(classes.get<double>()),
            " classes = ", number_text(wanted)));
  }
  const auto& rate = trace.number("lr");
  const auto& notes = trace.metadata.at("notes");
  const bool sgd = !notes.contains("optimizer") || notes.at("optimizer") == "sgd";
  if (batch > 0 && rate.is_number() && rate.get<double>() > 0 && sgd) {
    const double lr = rate.get<double>();
    add("formulas",
        cat("For a batch k times as large take k times the learning rate, reached in a warm-up: with ",
            number_text(2 * batch), " samples ", number_text(2 * lr), " (Goyal et al. 2017, for SGD)."),
        cat("batch ", number_text(batch), ", learning rate ", number_text(lr)));
  }
  for (std::size_t place = 0; place < facts.samples.size(); ++place)
    if (const double share = facts.samples[place]; share > 0 && share < 8) {
      add("timeline",
          cat("The share of ", noun, ' ', place,
              " is small: below 8 samples, passes don't get much shorter with fewer. Fewer devices or a larger batch "
              "use "
              "them better."),
          cat(plural(share, "sample"), ", ", time_text(facts.compute_us[place] / share), " of computing for each"));
      break;
    }
  if (const auto last = std::max_element(facts.late.begin(), facts.late.end(),
                                         [](const TraceLate& a, const TraceLate& b) { return a.us < b.us; });
      last != facts.late.end() && last->us > 0.05 * mean_step)
    add("timeline",
        cat("Others wait for rank ", last->rank,
            ": look whether it has more work, a slower machine, or a core that it shares."),
        cat(time_text(last->us), " a step, ", percent_text(last->us / mean_step), " of the mean step, in ",
            decimals(last->times, 1), " calls"));
  if (const double us = most_of(facts.loader_us); us > 0.05 * facts.step_us)
    add("timeline", "Training waits for data: more threads that prepare batches (--workers), or cheaper transforms.",
        cat(time_text(us), " of ", time_text(facts.step_us), ", ", percent_text(us / facts.step_us), " of the step"));
  return out;
}

/// What several runs show beside each other: how fast they are, why one waits less than another, and what device 0 of
/// DataParallel holds more than the others.
inline std::vector<TraceSentence> compare_runs(const std::vector<TracedRun>& runs) {
  using namespace detail;
  std::vector<TraceSentence> out;
  const auto say = [&](std::string_view section, const auto&... parts) {
    out.push_back({cat(parts...), std::string(section)});
  };
  // Of the first one's model: by what it has of gradients.
  const auto same_model = [&](const TracedRun& run) {
    const auto &a = run.facts.gradient_bytes, &b = runs.front().facts.gradient_bytes;
    return !a || !b || *a == *b;
  };
  const auto find = [&](std::string_view policy) -> const TracedRun* {
    for (const auto& run : runs)
      if (run.facts.policy == policy && same_model(run)) return &run;
    return nullptr;
  };
  if (runs.size() > 1) {
    const auto* base = find("single") != nullptr ? find("single") : &runs.front();
    for (const auto& run : runs) {
      if (&run == base) continue;
      if (!same_model(run)) {
        say("happened", run.name, " trains another model than ", runs.front().name, ", of ",
            bytes_text(*run.facts.gradient_bytes), " of gradients instead of ",
            bytes_text(*runs.front().facts.gradient_bytes), ": they are not compared.");
        continue;
      }
      const double batch = batch_of(run.trace), base_batch = batch_of(base->trace);
      const auto& a = run.facts;
      const auto& b = base->facts;
      if (batch == base_batch)
        say("happened", "A step of ", run.name, " takes ", time_text(a.step_us), ", one of ", base->name, " ",
            time_text(b.step_us), ": ", run.name, " is ", decimals(b.step_us / a.step_us, 2), " times as fast.");
      else if (batch > 0 && base_batch > 0)
        say("happened", "The batches differ: ", run.name, " trains on ", decimals(batch / a.step_us * 1e6, 0),
            " samples a second (batch ", number_text(batch), "), ", base->name, " on ",
            decimals(base_batch / b.step_us * 1e6, 0), " (batch ", number_text(base_batch), "): ", run.name, " is ",
            decimals(batch / a.step_us / (base_batch / b.step_us), 2), " times as fast.");
    }
  }
  const auto *dp = find("dp"), *ddp = find("ddp");
  if (dp != nullptr && ddp != nullptr) {
    const double parallel = most_of(dp->facts.exposed_us), distributed = most_of(ddp->facts.exposed_us),
                 hidden = ddp->facts.hidden.value_or(0);
    double late = 0;
    for (const auto& rank : ddp->facts.late) late += rank.us;
    if (distributed <= parallel)
      say("timeline", ddp->name, " waits ", time_text(distributed), " a step for communication, ", dp->name, " ",
          time_text(parallel), ": gradients leave in buckets while backward still computes, and ", percent_text(hidden),
          " of communication is hidden so; the copies of DataParallel lie between its passes.");
    else
      say("timeline", ddp->name, " waits ", time_text(distributed), " a step for communication, ", dp->name, " ",
          time_text(parallel), ": here the ranks wait for each other, ", time_text(late),
          " a step on average for who comes last; ", percent_text(hidden),
          " of communication is hidden behind backward.");
  }
  if (dp != nullptr && dp->facts.peak.size() > 1 && dp->facts.peak[0].is_object() && dp->facts.peak[1].is_object()) {
    const auto &first = dp->facts.peak[0], &second = dp->facts.peak[1];
    std::string more;
    for (const auto& [kind, bytes] : first.items()) {
      const double by = bytes.get<double>() - number_of(second, kind.c_str());
      if (by > 0)
        more +=
            cat(more.empty() ? "" : ", ", bytes_text(by), " more of ", kind == "optimizer" ? "optimizer state" : kind);
    }
    if (!more.empty() && total_of(first) > total_of(second))
      say("memory", "Under ", dp->name, " device 0 holds ", bytes_text(total_of(first)), " at its peak, device 1 ",
          bytes_text(total_of(second)), ": ", more,
          ". The whole batch, all outputs and the loss are on device 0, and only there the optimizer steps.");
  }
  return out;
}

/// Advice, and what was measured, as text for a terminal.
inline std::string advice_text(const Trace& trace) {
  const auto facts = facts_of(trace);
  std::string out = "What the trace says:\n";
  for (const auto& sentence : sentences_of(trace, facts))
    if (sentence.section == "happened" || sentence.section == "timeline") out += cat("  ", sentence.text, '\n');
  out += "Advice:\n";
  for (const auto& advice : advice_of(trace, facts)) out += cat("  ", advice.text, "\n    ", advice.figures, '\n');
  return out;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TRAIN_ADVICE_HPP

#if CHORUS_USE_CUDA
// <chorus/parallel/cuda/graphed.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_CUDA_GRAPHED_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_CUDA_GRAPHED_HPP
/// Graphed: a training step that is recorded once as a CUDA graph, communication and optimizer included, and from then
/// on started by one call instead of by hundreds.

namespace chorus {

struct GraphedOptions {
  /// Steps that run eagerly first, so that memory, plans and buckets are as they will stay.
  int warm_up = 3;
  /// How many losses are kept until `losses` reads them.
  int kept_losses = 1024;
};

/// Calls `step(inputs...)`, which does all of a training step and returns the loss, a number on the GPU; inputs that
/// are tensors of the host come to it on the GPU:
///
///   Graphed step(net, [&](const auto& images, const auto& labels) {
///     optimizer.zero_grad();
///     auto loss = cross_entropy(net(images), labels);
///     loss.backward();
///     optimizer.step();
///     return loss;
///   });
///   for (auto& [images, labels] : loader) step(images, labels);
///   double last = step.losses().back();
///
/// Steps with the shapes of the first one are replayed after the warm-up; others run eagerly. What the step reads from
/// the host at other times than in the capture does not change any more, but for the optimizers' learning rates and
/// numbers of steps and the random numbers, which go on as in eager steps. Inside, nothing may wait for the GPU or copy
/// to or from the host: those calls throw UsageError. Under DistributedDataParallel all ranks replay, or none does:
/// every call agrees on it. Where parameters, buckets or an optimizer's state have changed their places, as a
/// checkpoint that is loaded may have it, there is a warm-up and a capture again. Must be destroyed before `net` and
/// its communicator. GPUs with one device per process.
template <class Net, class Step>
class Graphed {
 public:
  Graphed(Net& net, Step step, const GraphedOptions& options = {})
      : net_(net),
        step_(std::move(step)),
        options_(checked(options)),
        device_(net.flat_parameters().entries().front().parameter().where()),
        stream_(device_),
        pool_(device_, stream_.get()),
        numbers_(device_),
        ring_(device_, static_cast<std::size_t>(options.kept_losses) * sizeof(double)) {
    check<UsageError>(Net::distributed || net.devices() == 1, "Graphed: a process has one device, this one has ",
                      net.devices());
  }
  Graphed(const Graphed&) = delete;
  Graphed& operator=(const Graphed&) = delete;
  ~Graphed() {
    try {
      drop_graph();
    } catch (const Error&) {
      // The device is broken or its peers are gone; what it was doing is of no use.
      static_cast<void>(cudaGraphExecDestroy(exec_));
    }
  }

  /// One step, replayed where that can be. Throws what the step throws.
  template <AnyTensor... Inputs>
  void operator()(const Inputs&... inputs) {
    if (inputs_.empty()) (keep(inputs), ...);
    const auto [unfit, moved] = any_rank(!fits(inputs...), exec_ != nullptr && !everything_in_place());
    if (moved) begin_anew();
    if (unfit) {
      note_loss(step_(inputs...));
      return;
    }
    std::size_t next = 0;
    const std::tuple fixed{refill(inputs, next)...};
    if (steps_++ < options_.warm_up) return std::apply([this](const auto&... x) { warm_up(x...); }, fixed);
    if (exec_ == nullptr) std::apply([this](const auto&... x) { capture(x...); }, fixed);
    replay();
  }

  /// Whether steps of the first shapes are replayed by now.
  bool captured() const { return exec_ != nullptr; }
  std::int64_t replays() const { return replays_; }

  /// The losses of the steps since the last call, at most the newest `kept_losses`. Waits for the GPU; throws what went
  /// wrong there.
  std::vector<double> losses() {
    const auto kept = static_cast<std::int64_t>(options_.kept_losses);
    std::vector<std::byte> bytes(ring_.bytes());
    copy_bytes(Cpu{}, bytes.data(), device_, ring_.data(), bytes.size());
    std::vector<double> out;
    for (std::int64_t i = std::max(read_, noted_ - kept); i < noted_; ++i) {
      const std::byte* place = bytes.data() + static_cast<std::size_t>(i % kept) * sizeof(double);
      float single = 0;
      double number = 0;
      std::memcpy(&single, place, sizeof single);
      std::memcpy(&number, place, sizeof number);
      out.push_back(loss_type_ == DType::f32 ? static_cast<double>(single) : number);
    }
    read_ = noted_;
    return out;
  }

 private:
  static const GraphedOptions& checked(const GraphedOptions& options) {
    check<UsageError>(options.warm_up >= 1 && options.kept_losses >= 1,
                      "Graphed: warm_up and kept_losses are at least 1, got ", options.warm_up, " and ",
                      options.kept_losses);
    return options;
  }

  struct Input {
    Storage<Cuda> storage;
    DType dtype;
    std::vector<Index> shape;
  };

  template <class T, int Rank, class From>
  void keep(const Tensor<T, Rank, From>& input) {
    inputs_.push_back({Storage<Cuda>(device_, input.bytes()), dtype<T>, {input.shape().begin(), input.shape().end()}});
  }
  template <class... Inputs>
  bool fits(const Inputs&... inputs) const {
    std::size_t i = 0;
    const auto same = [&]<class T, int Rank, class From>(const Tensor<T, Rank, From>& x) {
      const Input& known = inputs_[i++];
      return known.dtype == dtype<T> &&
             std::equal(known.shape.begin(), known.shape.end(), x.shape().begin(), x.shape().end());
    };
    return sizeof...(Inputs) == inputs_.size() && (same(inputs) && ...);
  }
  template <class T, int Rank, class From>
  Tensor<T, Rank, Cuda> refill(const Tensor<T, Rank, From>& input, std::size_t& next) const {
    check<ShapeError>(input.is_contiguous(), "Graphed: an input of shape ", input.shape(), " is not contiguous");
    const Storage<Cuda>& storage = inputs_[next++].storage;
    copy_bytes(device_, storage.data(), input.device(), input.data(), input.bytes());
    return {storage, static_cast<T*>(storage.data()), input.shape(), row_major(input.shape())};
  }

  std::array<bool, 2> any_rank(bool first, bool second) {
    std::array<double, 2> ranks{first ? 1.0 : 0.0, second ? 1.0 : 0.0};
    net_.sum(ranks);
    return {ranks[0] != 0, ranks[1] != 0};
  }

  // Whether all is still where the graph knows it.
  bool everything_in_place() const { return net_.flat_parameters().generation() == generation_ && numbers_.complete(); }
  void drop_graph() {
    if (exec_ == nullptr) return;
    cuda::synchronize(cuda::compute_stream(device_));
    static_cast<void>(cudaGraphExecDestroy(std::exchange(exec_, nullptr)));
  }
  // In the memory that there is now, an optimizer's state has to be made, and so on.
  void begin_anew() {
    drop_graph();
    numbers_.forget();
    steps_ = 0;
  }

  // On the stream and with the memory that the capture will have.
  template <class... Inputs>
  void warm_up(const Inputs&... inputs) {
    const cudaStream_t outside = cuda::current_stream(device_);
    cuda::order(device_, outside, stream_);
    try {
      const cuda::StreamScope stream(stream_);
      const cuda::PoolScope pool(pool_);
      note_loss(step_(inputs...));
    } catch (...) {
      cuda::order(device_, stream_, outside);  // some of the step may be under way
      throw;
    }
    cuda::order(device_, stream_, outside);
  }

  template <class... Inputs>
  void capture(const Inputs&... inputs) {
    cuda::synchronize(device_);
    cuda::synchronize(stream_.get());
    touch_parameters();  // what depends on them is worked out anew in every replay
    const cuda::DeviceGuard guard(device_);
    const cuda::StreamScope stream(stream_);
    const cuda::PoolScope pool(pool_);
    const cuda::ReplayScope numbers(numbers_);
    const auto passes = net_.forward_passes();
    cudaGraph_t graph = nullptr;
    std::exception_ptr error;
    CHORUS_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    pool_->seal(true);
    try {
      const auto loss = step_(inputs...);
      loss_ = value_of(loss).storage();
      loss_data_ = value_of(loss).data();
      loss_type_ = dtype<typename tensor_of<decltype(loss)>::value_type>;
    } catch (...) {
      error = std::current_exception();
    }
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    pool_->seal(false);
    cudaError_t made = ended;
    if (!error && made == cudaSuccess) made = cudaGraphInstantiate(&exec_, graph, 0);
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    if (error || made != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      numbers_.take_back();
      net_.set_forward_passes(passes);
      touch_parameters();  // what was worked out of them has not been
      if (error) rethrow_with(error, "Graphed: while the step was captured: ");
      CHORUS_CUDA_CHECK(made);
    }
    generation_ = net_.flat_parameters().generation();
    const auto more = net_.forward_passes() - passes;
    numbers_.at_replay([this, more] {
      net_.set_forward_passes(net_.forward_passes() + more);
      touch_parameters();
    });
    // Steps of several passes, and eager ones in between, draw others' numbers nowhere.
    if (more > 0) numbers_.count_by([this, last = passes + more] { return net_.forward_passes() - last; });
  }

  void replay() {
    numbers_.renew();
    const auto start = [this] {
      const cuda::DeviceGuard guard(device_);
      CHORUS_CUDA_CHECK(cudaGraphLaunch(exec_, cuda::current_stream(device_)));
    };
    if constexpr (Net::distributed)
      net_.communicator().launch("the replay of a captured step", start);
    else
      start();
    ++replays_;
    note(loss_data_, size_of(loss_type_));
  }

  template <class Loss>
  void note_loss(const Loss& loss) {
    using T = typename tensor_of<Loss>::value_type;
    static_assert(tensor_of<Loss>::rank == 0 && std::floating_point<T>,
                  "Graphed: the step returns the loss, one number");
    loss_type_ = dtype<T>;
    note(value_of(loss).data(), sizeof(T));
  }
  void note(const void* loss, std::size_t bytes) {
    const auto place = static_cast<std::size_t>(noted_++ % options_.kept_losses) * sizeof(double);
    copy_bytes(device_, static_cast<std::byte*>(ring_.data()) + place, device_, loss, bytes);
  }

  void touch_parameters() {
    for (const auto& entry : net_.flat_parameters().entries()) entry.parameter().touch();
  }

  Net& net_;
  Step step_;
  GraphedOptions options_;
  Cuda device_;
  cuda::Stream stream_;
  cuda::PrivatePool pool_;
  cuda::ReplayNumbers numbers_;
  Storage<Cuda> ring_;
  std::vector<Input> inputs_;
  Storage<Cuda> loss_;
  const void* loss_data_ = nullptr;
  DType loss_type_ = DType::f32;
  int steps_ = 0;
  std::uint64_t generation_ = 0;  // of the parameters' layout that was captured
  std::int64_t replays_ = 0, noted_ = 0, read_ = 0;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_CUDA_GRAPHED_HPP

#endif
#endif  // CHORUS_SINGLE_CHORUS_ALL_HPP
