#pragma once
// chorus in one header, made by tests/amalgamate.py from include/chorus: change it there.

// <chorus/chorus.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CHORUS_HPP
#define CHORUS_SINGLE_CHORUS_CHORUS_HPP
/// All of chorus but for reading model files, which costs every program a JSON parser: <chorus/io/load_model.hpp> and
/// <chorus/io/checkpoint.hpp>.

// <chorus/autograd/gradient_check.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_GRADIENT_CHECK_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_GRADIENT_CHECK_HPP
/// Numeric gradients, to check those of an operator or of a whole model.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <utility>

// <chorus/autograd/variable.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_VARIABLE_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_VARIABLE_HPP
/// Variable: a Tensor that records how it was made, so that gradients can be taken through it.

#include <functional>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

// <chorus/autograd/node.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_NODE_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_NODE_HPP
/// Node: what a value remembers of how it was made. The nodes behind a loss are the tape that backward walks.

#include <array>
#include <atomic>
#include <new>
#include <span>

// <chorus/core/config.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_CONFIG_HPP
#define CHORUS_SINGLE_CHORUS_CORE_CONFIG_HPP
/// Version, optional parts, and the macros that every other header may rely on.

#define CHORUS_VERSION_MAJOR 0
#define CHORUS_VERSION_MINOR 1
#define CHORUS_VERSION_PATCH 0

// Optional parts: always defined, 0 or 1. CMake sets them from what it finds.
#ifndef CHORUS_USE_CUDA
#define CHORUS_USE_CUDA 0
#endif
#ifndef CHORUS_USE_ZLIB
#define CHORUS_USE_ZLIB 0
#endif
#ifndef CHORUS_USE_OPENSSL
#define CHORUS_USE_OPENSSL 0
#endif

// The configuration is part of every symbol's name, so that mixing two of them in one program is a link error.
#if CHORUS_USE_CUDA
#define CHORUS_ABI v0_1_cuda
#else
#define CHORUS_ABI v0_1
#endif

// Marks functions that also run in a CUDA kernel.
#if defined(__CUDACC__)
#define CHORUS_HD __host__ __device__
#else
#define CHORUS_HD
#endif

// Eigen turns its vectorisation off, on the host too, when it sees nvcc; we never use it inside a kernel.
#ifndef EIGEN_NO_CUDA
#define EIGEN_NO_CUDA
#endif
#endif  // CHORUS_SINGLE_CHORUS_CORE_CONFIG_HPP

namespace chorus::inline CHORUS_ABI {

template <class N>
class Ref;
struct BackwardOptions;

/// Whether operations of this thread record nodes.
inline bool& grad_enabled() {
  thread_local bool enabled = true;
  return enabled;
}

/// While it lives, operations of this thread record nodes, or don't.
class GradMode {
 public:
  explicit GradMode(bool enabled) : before_(std::exchange(grad_enabled(), enabled)) {}
  ~GradMode() { grad_enabled() = before_; }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  bool before_;
};

/// While one lives, operations of this thread make no nodes: for evaluation and for updates of parameters.
class NoGrad : GradMode {
 public:
  NoGrad() : GradMode(false) {}
};

namespace detail {

/// Node memory: freed pieces are kept by size, per thread, so that a steady training step calls no malloc.
class NodePool {
 public:
  static void* allocate(std::size_t bytes) {
    const std::size_t list = (bytes + granule - 1) / granule;
    if (list >= lists) return ::operator new(bytes);
    auto& free = of_thread().free_[list];
    if (free == nullptr) return ::operator new(list * granule);
    return std::exchange(free, free->next);
  }
  static void release(void* data, std::size_t bytes) noexcept {
    const std::size_t list = (bytes + granule - 1) / granule;
    if (list >= lists) return ::operator delete(data);
    auto& free = of_thread().free_[list];
    free = new (data) Piece{free};
  }
  ~NodePool() {
    for (auto*& free : free_)
      while (free != nullptr) ::operator delete(std::exchange(free, free->next));
  }

 private:
  struct Piece {
    Piece* next;
  };
  static constexpr std::size_t granule = 64, lists = 64;
  static NodePool& of_thread() {
    thread_local NodePool pool;
    return pool;
  }
  std::array<Piece*, lists> free_{};
};

}  // namespace detail

/// One recorded operation, or a leaf. It also holds the gradient by its one output while backward runs.
class Node {
 public:
  explicit Node(const char* operation) : operation_(operation), sequence_(next_sequence()) {}
  virtual ~Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Sends this node's gradient to its inputs, then forgets it and, unless `keep`, what it saved.
  virtual void backward(bool keep) = 0;
  /// Calls `visit` on each input that wants a gradient.
  virtual void for_each_input(void (*visit)(Node&, void*), void* context) const = 0;
  /// Called on a leaf once all of this backward's contributions are in its gradient.
  virtual void gradient_is_final() {}
  virtual bool is_leaf() const { return false; }

  const char* operation() const { return operation_; }
  /// Grows in the order in which nodes are made: an operation's inputs have smaller numbers.
  std::uint64_t sequence() const { return sequence_; }

  void* operator new(std::size_t bytes) { return detail::NodePool::allocate(bytes); }
  void operator delete(void* data, std::size_t bytes) { detail::NodePool::release(data, bytes); }

 private:
  friend void run_backward(std::span<const Ref<Node>> roots, const BackwardOptions& options);
  template <class>
  friend class Ref;

  static std::uint64_t next_sequence() {
    static std::atomic<std::uint64_t> counter{0};
    return counter.fetch_add(1, std::memory_order_relaxed);
  }

  // Destroying a node may release its inputs: they are queued, so that a long chain doesn't exhaust the stack.
  static void dispose(Node* node) {
    thread_local std::vector<Node*> waiting;
    thread_local bool draining = false;
    waiting.push_back(node);
    if (draining) return;
    draining = true;
    while (!waiting.empty()) {
      Node* next = waiting.back();
      waiting.pop_back();
      delete next;
    }
    draining = false;
  }

  const char* operation_;
  std::uint64_t sequence_;
  std::uint64_t visited_by_ = 0;  // the backward run that last counted this node
  int pending_ = 0;               // consumers that have yet to contribute in that run
  std::atomic<int> owners_{0};
};

/// A counted pointer to a Node.
template <class N>
class Ref {
 public:
  Ref() = default;
  explicit Ref(N* node) : node_(node) { retain(); }
  Ref(const Ref& other) : node_(other.node_) { retain(); }
  Ref(Ref&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  template <class Derived>
    requires std::is_base_of_v<N, Derived>
  Ref(const Ref<Derived>& other) : node_(other.get()) {  // NOLINT: converts as pointers do
    retain();
  }
  Ref& operator=(Ref other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~Ref() {
    if (node_ != nullptr && node_->Node::owners_.fetch_sub(1, std::memory_order_acq_rel) == 1) Node::dispose(node_);
  }

  N* get() const { return node_; }
  N* operator->() const { return node_; }
  N& operator*() const { return *node_; }
  explicit operator bool() const { return node_ != nullptr; }
  friend bool operator==(const Ref&, const Ref&) = default;

 private:
  void retain() {
    if (node_ != nullptr) node_->Node::owners_.fetch_add(1, std::memory_order_relaxed);
  }
  N* node_ = nullptr;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_NODE_HPP

// <chorus/autograd/tape.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_TAPE_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_TAPE_HPP
/// Backward: walks the recorded operations from the last to the first.

// <chorus/core/error.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_ERROR_HPP
#define CHORUS_SINGLE_CHORUS_CORE_ERROR_HPP
/// Exceptions and the two calls that throw them. A message names the operation, what was expected and what was got.

#include <charconv>
#include <concepts>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string_view>

namespace chorus::inline CHORUS_ABI {

/// Base of every exception that chorus throws.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Shapes, axes or ranks that don't fit the operation.
struct ShapeError : Error {
  using Error::Error;
};
/// Tensors on the wrong device, or a device that does not exist.
struct DeviceError : Error {
  using Error::Error;
};
/// A call or an option that makes no sense.
struct UsageError : Error {
  using Error::Error;
};
/// A file that is missing, malformed, or could not be written.
struct FileError : Error {
  using Error::Error;
};
/// A collective, a peer or a rendezvous that failed; the message names rank and operation.
struct CommError : Error {
  using Error::Error;
};
/// A wait that reached its deadline.
struct TimeoutError : CommError {
  using CommError::CommError;
};

// How a value looks in a message. A type of chorus brings its own `append`, found by its namespace.
inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, char part) { out += part; }
inline void append(std::string& out, bool part) { out += part ? "true" : "false"; }

template <class Number>
  requires std::integral<Number> || std::floating_point<Number>
void append(std::string& out, Number part) {
  char digits[64];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
}

template <class Element, std::size_t Extent>
void append(std::string& out, std::span<Element, Extent> parts) {
  out += '[';
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i != 0) out += ", ";
    append(out, parts[i]);
  }
  out += ']';
}

template <class Element, std::size_t Extent>
void append(std::string& out, const std::array<Element, Extent>& parts) {
  append(out, std::span<const Element, Extent>(parts));
}

namespace detail {
/// One part of a message: a reference to a value and the function that appends it, one for each type of value.
struct Part {
  const void* value;
  void (*append_to)(std::string&, const void*);

  template <class T>
  static Part of(const T& part) {
    return {&part, [](std::string& out, const void* from) { append(out, *static_cast<const T*>(from)); }};
  }
  static Part of(const char* text) {
    return {text, [](std::string& out, const void* from) { out += static_cast<const char*>(from); }};
  }
  template <std::size_t N>
  static Part of(const char (&text)[N]) {
    return of(static_cast<const char*>(text));
  }
  static Part of(char* text) { return of(static_cast<const char*>(text)); }
};
inline std::string join(std::initializer_list<Part> parts) {
  std::string out;
  for (const Part& part : parts) part.append_to(out, part.value);
  return out;
}
template <class Kind>
[[noreturn, gnu::noinline, gnu::cold]] void throw_joined(std::initializer_list<Part> parts) {
  throw Kind(join(parts));
}
}  // namespace detail

/// Joins text, numbers and shapes into one string: `cat("got ", shape)` gives `got [2, 3]`.
template <class... Parts>
std::string cat(const Parts&... parts) {
  return detail::join({detail::Part::of(parts)...});
}

/// Throws `Kind` with the joined parts as its message.
template <class Kind = Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  detail::throw_joined<Kind>({detail::Part::of(parts)...});
}

/// Throws `Kind` unless `ok`.
template <class Kind = Error, class... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    detail::throw_joined<Kind>({detail::Part::of(parts)...});
}

/// Throws the error again, of the same kind, with `context` in front of its message.
[[noreturn]] inline void rethrow_with(const std::exception_ptr& error, std::string_view context) {
  try {
    std::rethrow_exception(error);
  } catch (const ShapeError& e) {
    fail<ShapeError>(context, std::string_view(e.what()));
  } catch (const DeviceError& e) {
    fail<DeviceError>(context, std::string_view(e.what()));
  } catch (const UsageError& e) {
    fail<UsageError>(context, std::string_view(e.what()));
  } catch (const FileError& e) {
    fail<FileError>(context, std::string_view(e.what()));
  } catch (const TimeoutError& e) {
    fail<TimeoutError>(context, std::string_view(e.what()));
  } catch (const CommError& e) {
    fail<CommError>(context, std::string_view(e.what()));
  } catch (const std::exception& e) {
    fail<Error>(context, std::string_view(e.what()));
  }
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_ERROR_HPP

namespace chorus::inline CHORUS_ABI {

namespace detail {
/// What is to be done when the backward run of this thread has ended; null outside of one.
inline std::vector<std::function<void()>>*& backward_end_actions() {
  thread_local std::vector<std::function<void()>>* actions = nullptr;
  return actions;
}
}  // namespace detail

/// Has `action` called once, at the end of the backward run that this thread is in. For gradient hooks.
inline void at_backward_end(std::function<void()> action) {
  auto* actions = detail::backward_end_actions();
  check<UsageError>(actions != nullptr, "at_backward_end: no backward is running in this thread");
  actions->push_back(std::move(action));
}

struct BackwardOptions {
  /// Keep what the operations saved, so that backward can run again.
  bool retain_graph = false;
  /// Run the leaves' hooks. Without, whoever runs backward has more to add to the gradients.
  bool hooks = true;
};

/// Sends the gradients that `roots` hold to all leaves behind them. Operations run in the reverse of the order in which
/// they were recorded, without recursion; a leaf's hooks run as soon as its last contribution is in. Memory is freed on the
/// way unless the graph is retained.
inline void run_backward(std::span<const Ref<Node>> roots, const BackwardOptions& options = {}) {
  static std::atomic<std::uint64_t> runs{0};
  const std::uint64_t run = runs.fetch_add(1, std::memory_order_relaxed) + 1;

  // Nested runs (DataParallel's replicas) use lists of their own; all are kept for the next run.
  struct Lists {
    std::vector<Ref<Node>> nodes;
    std::vector<Node*> final_leaves;
    std::uint64_t run = 0;
  };
  thread_local std::vector<std::unique_ptr<Lists>> spare;
  if (spare.empty()) spare.push_back(std::make_unique<Lists>());
  struct Borrowed {
    std::unique_ptr<Lists> lists;
    ~Borrowed() {
      lists->nodes.clear();
      lists->final_leaves.clear();
      spare.push_back(std::move(lists));
    }
  } borrowed{std::move(spare.back())};
  spare.pop_back();
  Lists& lists = *borrowed.lists;
  lists.run = run;

  for (const auto& root : roots) {
    if (root->visited_by_ == run) continue;
    root->visited_by_ = run;
    root->pending_ = 0;
    lists.nodes.push_back(root);
  }
  for (std::size_t next = 0; next < lists.nodes.size(); ++next) {
    lists.nodes[next]->for_each_input(
        [](Node& input, void* context) {
          auto& found = *static_cast<Lists*>(context);
          if (input.visited_by_ != found.run) {
            input.visited_by_ = found.run;
            input.pending_ = 0;
            found.nodes.emplace_back(&input);
          }
          ++input.pending_;
        },
        &lists);
  }
  std::sort(lists.nodes.begin(), lists.nodes.end(),
            [](const Ref<Node>& a, const Ref<Node>& b) { return a->sequence() > b->sequence(); });

  std::vector<std::function<void()>> actions;
  struct Scope {
    std::vector<std::function<void()>>* outer;
    ~Scope() { detail::backward_end_actions() = outer; }
  } scope{std::exchange(detail::backward_end_actions(), &actions)};

  const NoGrad no_grad;
  if (options.hooks)
    for (const auto& root : roots)
      if (root->is_leaf() && root->pending_ == 0) root->gradient_is_final();
  for (Ref<Node>& node : lists.nodes) {
    if (node->is_leaf()) continue;
    // Counted before the node runs, since it then forgets its inputs.
    node->for_each_input(
        [](Node& input, void* context) {
          if (--input.pending_ == 0 && input.is_leaf()) static_cast<Lists*>(context)->final_leaves.push_back(&input);
        },
        &lists);
    node->backward(options.retain_graph);
    if (options.hooks)
      for (Node* leaf : lists.final_leaves) leaf->gradient_is_final();
    lists.final_leaves.clear();
    node = {};
  }
  for (const auto& action : actions) action();
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_TAPE_HPP

// <chorus/kernels/contiguous.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CONTIGUOUS_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CONTIGUOUS_HPP
/// Dense copies of strided views.

// <chorus/kernels/pointwise.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_POINTWISE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_POINTWISE_HPP
/// Element-wise kernels for every kind of device that this build has.

// <chorus/kernels/cpu/pointwise.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_POINTWISE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_POINTWISE_HPP
/// Element-wise functors over CPU arrays: one fused pass forward, one back. The backward pass reads the inputs again
/// and needs nothing else saved. A functor is compiled once forward and once back; broadcasting only arranges blocks
/// for it.

// <chorus/autograd/functor_gradient.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_FUNCTOR_GRADIENT_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_FUNCTOR_GRADIENT_HPP
/// The gradient of an element-wise functor at one element: its own, or by Dual numbers.

// <chorus/autograd/dual.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_DUAL_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_DUAL_HPP
/// Dual: a number and its derivatives. A functor called with Duals computes its own gradient (forward-mode automatic
/// differentiation of one element, inside the fused backward pass of an element-wise operation).

// <chorus/kernels/scalar_math.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_SCALAR_MATH_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_SCALAR_MATH_HPP
/// The functions that element-wise functors call, for plain floating-point numbers, on the host and in CUDA kernels.
/// Pack and Dual bring the same functions; all three stand in one namespace.

namespace chorus::inline CHORUS_ABI::math {

/// The floating-point type that a number type is made of: `float` for float, Pack<float> and Dual<Pack<float>, 2>.
template <class S>
struct RealOf {
  using type = S;
};
template <class S>
using real_of = typename RealOf<S>::type;

/// What may stand beside a Pack or a Dual in an expression, as in `0.5 * x`.
template <class A>
concept Arithmetic = std::is_arithmetic_v<A>;

/// `a` where `condition` holds, else `b`: what functors use in place of `if`.
CHORUS_HD inline float where(bool condition, float a, float b) { return condition ? a : b; }
CHORUS_HD inline double where(bool condition, double a, double b) { return condition ? a : b; }

template <std::floating_point T>
CHORUS_HD T exp(T x) {
  return std::exp(x);
}
template <std::floating_point T>
CHORUS_HD T expm1(T x) {
  return std::expm1(x);
}
template <std::floating_point T>
CHORUS_HD T log(T x) {
  return std::log(x);
}
template <std::floating_point T>
CHORUS_HD T log1p(T x) {
  return std::log1p(x);
}
template <std::floating_point T>
CHORUS_HD T sqrt(T x) {
  return std::sqrt(x);
}
template <std::floating_point T>
CHORUS_HD T rsqrt(T x) {
  return 1 / std::sqrt(x);
}
template <std::floating_point T>
CHORUS_HD T sin(T x) {
  return std::sin(x);
}
template <std::floating_point T>
CHORUS_HD T cos(T x) {
  return std::cos(x);
}
template <std::floating_point T>
CHORUS_HD T tanh(T x) {
  return std::tanh(x);
}
template <std::floating_point T>
CHORUS_HD T erf(T x) {
  return std::erf(x);
}
template <std::floating_point T>
CHORUS_HD T abs(T x) {
  return std::fabs(x);
}
template <std::floating_point T>
CHORUS_HD T pow(T x, std::type_identity_t<T> exponent) {
  return std::pow(x, exponent);
}
/// The larger one; NaN if either is, as PyTorch's maximum.
template <std::floating_point T>
CHORUS_HD T max(T a, std::type_identity_t<T> b) {
  return a > b || a != a ? a : b;
}
/// The smaller one; NaN if either is.
template <std::floating_point T>
CHORUS_HD T min(T a, std::type_identity_t<T> b) {
  return a < b || a != a ? a : b;
}
/// 1 / (1 + exp(-x)).
template <std::floating_point T>
CHORUS_HD T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}
/// log(1 + exp(x)), without overflow.
template <std::floating_point T>
CHORUS_HD T softplus(T x) {
  return max(x, T{0}) + std::log1p(std::exp(-std::fabs(x)));
}

}  // namespace chorus::inline CHORUS_ABI::math
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_SCALAR_MATH_HPP

namespace chorus::inline CHORUS_ABI::math {

/// `value` and its derivatives in `N` directions. `S` is float, double or a Pack. Kinks follow the branch that `where`
/// takes; the branch not taken has no influence, not even as NaN. `Dual<S, 0>` is a plain number with this interface.
template <class S, int N>
struct Dual {
  S value;
  S d[N == 0 ? 1 : N];

  Dual() = default;
  template <class X>
  requires(std::is_same_v<X, S> || Arithmetic<X>) CHORUS_HD Dual(const X& x)
      : value(static_cast<S>(x)) {  // NOLINT: converts as numbers do
    for (int i = 0; i < N; ++i) d[i] = S(0);
  }
};

template <class S, int N>
struct RealOf<Dual<S, N>> {
  using type = real_of<S>;
};

namespace detail {

/// The chain rule: a result `value` whose derivative by `x` is `slope`.
template <class S, int N>
CHORUS_HD Dual<S, N> chain(const S& value, const S& slope, const Dual<S, N>& x) {
  Dual<S, N> out;
  out.value = value;
  for (int i = 0; i < N; ++i) out.d[i] = slope * x.d[i];
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> chain(const S& value, const S& slope_a, const Dual<S, N>& a, const S& slope_b,
                           const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = value;
  for (int i = 0; i < N; ++i) out.d[i] = slope_a * a.d[i] + slope_b * b.d[i];
  return out;
}

}  // namespace detail

template <class S, int N>
CHORUS_HD Dual<S, N> operator-(const Dual<S, N>& a) {
  Dual<S, N> out;
  out.value = -a.value;
  for (int i = 0; i < N; ++i) out.d[i] = -a.d[i];
  return out;
}

template <class S, int N>
CHORUS_HD Dual<S, N> operator+(const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = a.value + b.value;
  for (int i = 0; i < N; ++i) out.d[i] = a.d[i] + b.d[i];
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> operator-(const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = a.value - b.value;
  for (int i = 0; i < N; ++i) out.d[i] = a.d[i] - b.d[i];
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> operator*(const Dual<S, N>& a, const Dual<S, N>& b) {
  return detail::chain<S, N>(a.value * b.value, b.value, a, a.value, b);
}
template <class S, int N>
CHORUS_HD Dual<S, N> operator/(const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = a.value / b.value;
  for (int i = 0; i < N; ++i) out.d[i] = (a.d[i] - out.value * b.d[i]) / b.value;
  return out;
}

// A plain number on one side has no derivatives to carry along.
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator+(const Dual<S, N>& a, A b) {
  Dual<S, N> out = a;
  out.value = a.value + static_cast<real_of<S>>(b);
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator+(A a, const Dual<S, N>& b) {
  return b + a;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator-(const Dual<S, N>& a, A b) {
  Dual<S, N> out = a;
  out.value = a.value - static_cast<real_of<S>>(b);
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator-(A a, const Dual<S, N>& b) {
  Dual<S, N> out = -b;
  out.value = static_cast<real_of<S>>(a) - b.value;
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator*(const Dual<S, N>& a, A b) {
  const auto factor = static_cast<real_of<S>>(b);
  Dual<S, N> out;
  out.value = a.value * factor;
  for (int i = 0; i < N; ++i) out.d[i] = a.d[i] * factor;
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator*(A a, const Dual<S, N>& b) {
  return b * a;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator/(const Dual<S, N>& a, A b) {
  const auto divisor = static_cast<real_of<S>>(b);
  Dual<S, N> out;
  out.value = a.value / divisor;
  for (int i = 0; i < N; ++i) out.d[i] = a.d[i] / divisor;
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> operator/(A a, const Dual<S, N>& b) {
  const S value = static_cast<real_of<S>>(a) / b.value;
  return detail::chain<S, N>(value, -value / b.value, b);
}

// Comparisons look at the value alone.
#define CHORUS_DUAL_COMPARISON(OP)                                       \
  template <class S, int N>                                              \
  CHORUS_HD auto operator OP(const Dual<S, N>& a, const Dual<S, N>& b) { \
    return a.value OP b.value;                                           \
  }                                                                      \
  template <class S, int N, Arithmetic A>                                \
  CHORUS_HD auto operator OP(const Dual<S, N>& a, A b) {                 \
    return a.value OP static_cast<real_of<S>>(b);                        \
  }                                                                      \
  template <class S, int N, Arithmetic A>                                \
  CHORUS_HD auto operator OP(A a, const Dual<S, N>& b) {                 \
    return static_cast<real_of<S>>(a) OP b.value;                        \
  }
CHORUS_DUAL_COMPARISON(<)
CHORUS_DUAL_COMPARISON(<=)
CHORUS_DUAL_COMPARISON(>)
CHORUS_DUAL_COMPARISON(>=)
CHORUS_DUAL_COMPARISON(==)
#undef CHORUS_DUAL_COMPARISON

template <class Condition, class S, int N>
CHORUS_HD Dual<S, N> where(const Condition& condition, const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = where(condition, a.value, b.value);
  for (int i = 0; i < N; ++i) out.d[i] = where(condition, a.d[i], b.d[i]);
  return out;
}
template <class Condition, class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> where(const Condition& condition, A a, const Dual<S, N>& b) {
  return where(condition, Dual<S, N>(a), b);
}
template <class Condition, class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> where(const Condition& condition, const Dual<S, N>& a, A b) {
  return where(condition, a, Dual<S, N>(b));
}

template <class S, int N>
CHORUS_HD Dual<S, N> exp(const Dual<S, N>& x) {
  const S y = exp(x.value);
  return detail::chain<S, N>(y, y, x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> expm1(const Dual<S, N>& x) {
  return detail::chain<S, N>(expm1(x.value), exp(x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> log(const Dual<S, N>& x) {
  return detail::chain<S, N>(log(x.value), 1 / x.value, x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> log1p(const Dual<S, N>& x) {
  return detail::chain<S, N>(log1p(x.value), 1 / (1 + x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> sqrt(const Dual<S, N>& x) {
  const S y = sqrt(x.value);
  return detail::chain<S, N>(y, 1 / (y + y), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> rsqrt(const Dual<S, N>& x) {
  const S y = rsqrt(x.value);
  return detail::chain<S, N>(y, y * y * y / -2, x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> sin(const Dual<S, N>& x) {
  return detail::chain<S, N>(sin(x.value), cos(x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> cos(const Dual<S, N>& x) {
  return detail::chain<S, N>(cos(x.value), -sin(x.value), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> tanh(const Dual<S, N>& x) {
  const S y = tanh(x.value);
  return detail::chain<S, N>(y, 1 - y * y, x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> erf(const Dual<S, N>& x) {
  constexpr auto two_over_sqrt_pi = static_cast<real_of<S>>(1.1283791670955126);
  return detail::chain<S, N>(erf(x.value), two_over_sqrt_pi * exp(-(x.value * x.value)), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> sigmoid(const Dual<S, N>& x) {
  const S y = sigmoid(x.value);
  return detail::chain<S, N>(y, y * (1 - y), x);
}
template <class S, int N>
CHORUS_HD Dual<S, N> softplus(const Dual<S, N>& x) {
  return detail::chain<S, N>(softplus(x.value), sigmoid(x.value), x);
}
/// At 0 the derivative is 0.
template <class S, int N>
CHORUS_HD Dual<S, N> abs(const Dual<S, N>& x) {
  Dual<S, N> out;
  out.value = abs(x.value);
  for (int i = 0; i < N; ++i) out.d[i] = where(x.value > 0, x.d[i], where(x.value < 0, -x.d[i], S(0)));
  return out;
}

/// At a tie each side has half of the derivative, as in PyTorch.
template <class S, int N>
CHORUS_HD Dual<S, N> max(const Dual<S, N>& a, const Dual<S, N>& b) {
  Dual<S, N> out;
  out.value = max(a.value, b.value);
  for (int i = 0; i < N; ++i)
    out.d[i] = where(a.value > b.value, a.d[i], where(a.value < b.value, b.d[i], (a.d[i] + b.d[i]) / 2));
  return out;
}
template <class S, int N>
CHORUS_HD Dual<S, N> min(const Dual<S, N>& a, const Dual<S, N>& b) {
  return -max(-a, -b);
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> max(const Dual<S, N>& a, A b) {
  return max(a, Dual<S, N>(b));
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> max(A a, const Dual<S, N>& b) {
  return max(Dual<S, N>(a), b);
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> min(const Dual<S, N>& a, A b) {
  return min(a, Dual<S, N>(b));
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> min(A a, const Dual<S, N>& b) {
  return min(Dual<S, N>(a), b);
}

/// By the exponent it is 0 where the base is 0 and the exponent is not negative; by the base it is 0 where the exponent
/// is.
template <class S, int N>
CHORUS_HD Dual<S, N> pow(const Dual<S, N>& x, const Dual<S, N>& exponent) {
  const S y = pow(x.value, exponent.value);
  const S by_base = where(exponent.value == 0, S(0), exponent.value * pow(x.value, exponent.value - 1));
  const S by_exponent = where(x.value == 0, where(exponent.value >= 0, S(0), y * log(x.value)), y * log(x.value));
  Dual<S, N> out;
  out.value = y;
  // A negative base is no NaN for the base's gradient, although the exponent's does not exist.
  for (int i = 0; i < N; ++i)
    out.d[i] =
        where(x.d[i] == 0, S(0), by_base * x.d[i]) + where(exponent.d[i] == 0, S(0), by_exponent * exponent.d[i]);
  return out;
}
template <class S, int N, Arithmetic A>
CHORUS_HD Dual<S, N> pow(const Dual<S, N>& x, A exponent) {
  const auto e = static_cast<real_of<S>>(exponent);
  const S slope = e == 0 ? S(0) : S(e * pow(x.value, e - 1));
  return detail::chain<S, N>(S(pow(x.value, e)), slope, x);
}

}  // namespace chorus::inline CHORUS_ABI::math

namespace chorus::inline CHORUS_ABI {
using math::Dual;
}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_DUAL_HPP

namespace chorus::inline CHORUS_ABI::math {

/// What `gradient` returns: one number for each input of a functor.
template <class S, int N>
struct Partials {
  S d[N];
};

/// The gradient by each input of `y = f(x...)` at one element (or Pack), where `dy` is the gradient by y. A functor
/// that knows a cheaper or more exact way than Dual numbers brings it along: `template <class S> Partials<S, 2>
/// gradient(const S& dy, const S& a, const S& b) const`.
template <class F, class S, class... X>
CHORUS_HD Partials<S, static_cast<int>(sizeof...(X))> gradient(const F& f, const S& dy, const X&... x) {
  constexpr int n = static_cast<int>(sizeof...(X));
  if constexpr (requires { f.gradient(dy, x...); }) {
    return f.gradient(dy, x...);
  } else {
    int next = 0;
    const auto seed = [&](const S& value) {
      Dual<S, n> input(value);
      input.d[next++] = dy;
      return input;
    };
    Dual<S, n> inputs[] = {seed(x)...};
    return [&]<int... i>(std::integer_sequence<int, i...>) {
      const Dual<S, n> y = f(inputs[i]...);
      return Partials<S, n>{{y.d[i]...}};
    }
    (std::make_integer_sequence<int, n>());
  }
}

}  // namespace chorus::inline CHORUS_ABI::math

namespace chorus::inline CHORUS_ABI {
using math::Partials;
}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_FUNCTOR_GRADIENT_HPP

// <chorus/kernels/cpu/copy.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_COPY_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_COPY_HPP
/// Copies, fills and sums of whole arrays, dense or strided, of any scalar type.

// <chorus/core/device.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_DEVICE_HPP
#define CHORUS_SINGLE_CHORUS_CORE_DEVICE_HPP
/// Devices: the kind is a type, the number is a value.

#include <compare>

namespace chorus::inline CHORUS_ABI {

/// A processor of this machine. `Cpu{1}`, `Cpu{2}`, ... are virtual devices: each has its own memory account, and under
/// `DataParallel` its own thread, so that everything about several devices can be run and tested on one machine.
struct Cpu {
  int index = 0;
  static constexpr const char* kind = "cpu";
  static constexpr int max_devices = 64;
  friend auto operator<=>(const Cpu&, const Cpu&) = default;
};

/// A device type: a kind and an index.
template <class D>
concept Device = std::regular<D> && requires(D d) {
  { d.index } -> std::convertible_to<int>;
  { D::kind } -> std::convertible_to<const char*>;
};

template <Device D>
void append(std::string& out, const D& device) {
  out += D::kind;
  out += ':';
  append(out, device.index);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_DEVICE_HPP

// <chorus/core/dtype.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_DTYPE_HPP
#define CHORUS_SINGLE_CHORUS_CORE_DTYPE_HPP
/// The scalar types of tensors and their run-time names.

namespace chorus::inline CHORUS_ABI {

/// Extents, strides and element counts. Signed, so that differences behave.
using Index = std::int64_t;

/// Names as in the safetensors format.
enum class DType : std::uint8_t { boolean, u8, i8, i16, u16, i32, u32, i64, u64, f32, f64 };

template <class T>
struct dtype_of;
#define CHORUS_DTYPE(TYPE, VALUE) \
  template <>                     \
  struct dtype_of<TYPE> {         \
    static constexpr DType value = DType::VALUE; \
  }
CHORUS_DTYPE(bool, boolean);
CHORUS_DTYPE(std::uint8_t, u8);
CHORUS_DTYPE(std::int8_t, i8);
CHORUS_DTYPE(std::int16_t, i16);
CHORUS_DTYPE(std::uint16_t, u16);
CHORUS_DTYPE(std::int32_t, i32);
CHORUS_DTYPE(std::uint32_t, u32);
CHORUS_DTYPE(std::int64_t, i64);
CHORUS_DTYPE(std::uint64_t, u64);
CHORUS_DTYPE(float, f32);
CHORUS_DTYPE(double, f64);
#undef CHORUS_DTYPE

/// A type that a tensor can hold.
template <class T>
concept Scalar = requires { dtype_of<T>::value; };

/// A type that gradients can be taken in.
template <class T>
concept Real = Scalar<T> && std::floating_point<T>;

template <Scalar T>
inline constexpr DType dtype = dtype_of<T>::value;

constexpr std::string_view name(DType type) {
  constexpr std::string_view names[] = {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F32", "F64"};
  return names[static_cast<std::size_t>(type)];
}

constexpr std::size_t size_of(DType type) {
  constexpr std::size_t sizes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8};
  return sizes[static_cast<std::size_t>(type)];
}

inline void append(std::string& out, DType part) { out += name(part); }

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_DTYPE_HPP

// <chorus/kernels/cpu/packet.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACKET_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACKET_HPP
/// SIMD registers for kernels that reduce: loads and stores with a tail, and sums in an order that is fixed (whatever
/// the alignment) and accurate.

#include <limits>

// GCC's own AVX-512 header leaves registers undefined, of which GCC up to 12 then warns wherever it inlines them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <Eigen/Core>
#pragma GCC diagnostic pop

namespace chorus::inline CHORUS_ABI::kernels {

/// The widest register of this build for `T`; `T` itself where Eigen does not vectorise.
template <class T>
using Packet = typename Eigen::internal::packet_traits<T>::type;

template <class T>
inline constexpr Index lanes = Eigen::internal::packet_traits<T>::size;

/// The count of a whole packet; the count of a tail is an Index.
template <class T>
using Whole = std::integral_constant<Index, lanes<T>>;

using Eigen::internal::padd;
using Eigen::internal::pcmp_eq;
using Eigen::internal::pcmp_lt;
using Eigen::internal::pmadd;
using Eigen::internal::pmul;
using Eigen::internal::pselect;
using Eigen::internal::psub;

template <class T>
Packet<T> splat(T value) {
  return Eigen::internal::pset1<Packet<T>>(value);
}

namespace detail {
// Not inlined: kernels have many tails, and tails have few elements.
template <class T>
[[gnu::noinline]] Packet<T> load_one_by_one(const T* from, Index count, T fill) {
  alignas(sizeof(Packet<T>)) T all[lanes<T>];
  for (Index i = 0; i < lanes<T>; ++i) all[i] = i < count ? from[i] : fill;
  return Eigen::internal::pload<Packet<T>>(all);
}
template <class T>
[[gnu::noinline]] void store_one_by_one(T* to, Packet<T> value, Index count) {
  alignas(sizeof(Packet<T>)) T all[lanes<T>];
  Eigen::internal::pstore(all, value);
  for (Index i = 0; i < count; ++i) to[i] = all[i];
}
template <class Mask>
Mask first_lanes(Index count) {
  return static_cast<Mask>((1u << count) - 1);
}
}  // namespace detail

/// The first `count` lanes from memory of any alignment, the others `fill`.
template <class T, class Count>
Packet<T> load(const T* from, Count count, T fill = T{0}) {
  if constexpr (std::is_same_v<Count, Whole<T>>) {
    return Eigen::internal::ploadu<Packet<T>>(from);
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(Packet<T>) == 64 && sizeof(T) == 4)
      return _mm512_mask_loadu_ps(splat(fill), detail::first_lanes<__mmask16>(count), from);
    else if constexpr (sizeof(Packet<T>) == 64)
      return _mm512_mask_loadu_pd(splat(fill), detail::first_lanes<__mmask8>(count), from);
    else
#endif
      return detail::load_one_by_one<T>(from, count, fill);
  }
}

/// Writes the first `count` lanes, or adds them to what is there.
template <class T, class Count>
void store(T* to, Packet<T> value, Count count, bool accumulate = false) {
  if (accumulate) value = padd(load<T>(to, count), value);
  if constexpr (std::is_same_v<Count, Whole<T>>) {
    Eigen::internal::pstoreu(to, value);
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(Packet<T>) == 64 && sizeof(T) == 4)
      _mm512_mask_storeu_ps(to, detail::first_lanes<__mmask16>(count), value);
    else if constexpr (sizeof(Packet<T>) == 64)
      _mm512_mask_storeu_pd(to, detail::first_lanes<__mmask8>(count), value);
    else
#endif
      detail::store_one_by_one<T>(to, value, count);
  }
}

/// The first `count` lanes of `value`, the others `fill`.
template <class T, class Count>
Packet<T> keep_first(Packet<T> value, Count count, T fill) {
  if constexpr (std::is_same_v<Count, Whole<T>>)
    return value;
  else
    return pselect(pcmp_lt(Eigen::internal::plset<Packet<T>>(T{0}), splat(static_cast<T>(count))), value, splat(fill));
}

/// Calls `f(i, count)` for the packets of `n` elements in order; only the last may be short.
template <class T, class F>
void for_packets(Index n, F f) {
  Index i = 0;
  for (; i + lanes<T> <= n; i += lanes<T>) f(i, Whole<T>{});
  if (i < n) f(i, n - i);
}

/// What `reduce_packets` and `reduce_rows` combine with. Max and Min let NaN win.
template <class T>
struct Sum {
  static constexpr T neutral = T{0};
  Packet<T> operator()(Packet<T> a, Packet<T> b) const { return padd(a, b); }
  static T fold(Packet<T> a) { return Eigen::internal::predux(a); }
};
template <class T>
struct Max {
  static constexpr T neutral = -std::numeric_limits<T>::infinity();
  Packet<T> operator()(Packet<T> a, Packet<T> b) const { return Eigen::internal::pmax<Eigen::PropagateNaN>(a, b); }
  static T fold(Packet<T> a) { return Eigen::internal::predux_max<Eigen::PropagateNaN>(a); }
};
template <class T>
struct Min {
  static constexpr T neutral = std::numeric_limits<T>::infinity();
  Packet<T> operator()(Packet<T> a, Packet<T> b) const { return Eigen::internal::pmin<Eigen::PropagateNaN>(a, b); }
  static T fold(Packet<T> a) { return Eigen::internal::predux_min<Eigen::PropagateNaN>(a); }
};

/// Combines `value(i, count)` over the packets of [begin, end), starting from `zero`: in two chains, and pairwise above
/// blocks of 128 packets, so that rounding errors stay near those of one block.
template <class T, class V, class Combine, class Value>
V reduce_packets(Index begin, Index end, V zero, Combine combine, const Value& value) {
  constexpr Index w = lanes<T>, block = 128 * w;
  if (end - begin > block) {
    const Index middle = begin + ((end - begin) / block + 1) / 2 * block;
    return combine(reduce_packets<T>(begin, middle, zero, combine, value),
                   reduce_packets<T>(middle, end, zero, combine, value));
  }
  V a = zero, b = zero;
  Index i = begin;
  for (; i + 2 * w <= end; i += 2 * w) {
    a = combine(a, value(i, Whole<T>{}));
    b = combine(b, value(i + w, Whole<T>{}));
  }
  if (i + w <= end) {
    a = combine(a, value(i, Whole<T>{}));
    i += w;
  }
  if (i < end) b = combine(b, value(i, end - i));
  return combine(a, b);
}

/// Combines `value(i)` over the rows [begin, end), pairwise above blocks of 64 rows.
template <class V, class Combine, class Value>
V reduce_rows(Index begin, Index end, V zero, Combine combine, const Value& value) {
  constexpr Index block = 64;
  if (end - begin > block) {
    const Index middle = begin + ((end - begin) / block + 1) / 2 * block;
    return combine(reduce_rows(begin, middle, zero, combine, value), reduce_rows(middle, end, zero, combine, value));
  }
  V total = zero;
  for (Index i = begin; i < end; ++i) total = combine(total, value(i));
  return total;
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACKET_HPP

// <chorus/kernels/strided_runs.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_STRIDED_RUNS_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_STRIDED_RUNS_HPP
/// StridedRuns: the way through a strided or broadcast array in the row-major order of a shape, as few and as long runs
/// of constant step. The rank is a run-time value, so that kernels are not instantiated per rank.

namespace chorus::inline CHORUS_ABI::kernels {

inline constexpr int max_rank = 8;

class StridedRuns {
 public:
  /// `strides` in elements, one for each axis of `shape`; 0 along axes that are broadcast. Throws ShapeError.
  StridedRuns(std::span<const Index> shape, std::span<const Index> strides) {
    check<ShapeError>(shape.size() == strides.size() && shape.size() <= static_cast<std::size_t>(max_rank),
                      "kernels: shape ", shape, " with strides ", strides,
                      "; expected as many strides as sizes, at most ", max_rank);
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      if (shape[axis] == 1) continue;
      const std::size_t last = rank_ - 1;
      if (rank_ > 0 && strides[axis] == stride_[last] * size_[last]) {
        size_[last] *= shape[axis];
      } else {
        size_[rank_] = shape[axis];
        stride_[rank_++] = strides[axis];
      }
    }
    if (rank_ == 0) {
      rank_ = 1;
      size_[0] = stride_[0] = 1;
    }
  }

  /// True where the array's order in memory is that of the shape, without gaps.
  bool contiguous() const { return rank_ == 1 && stride_[0] == 1; }

  // The axes after merging, the innermost first.
  std::size_t rank() const { return rank_; }
  Index size(std::size_t axis) const { return size_[axis]; }
  Index stride(std::size_t axis) const { return stride_[axis]; }

  /// Walks over the next `count` elements: `run(offset of the first, step, how many)`.
  template <class Run>
  void next(Index count, const Run& run) {
    while (count > 0) {
      const Index n = std::min(count, size_[0] - at_[0]);
      run(offset_, stride_[0], n);
      count -= n;
      at_[0] += n;
      offset_ += n * stride_[0];
      for (std::size_t axis = 0; at_[axis] == size_[axis]; ++axis) {
        offset_ -= size_[axis] * stride_[axis];
        at_[axis] = 0;
        if (axis + 1 == rank_) return;
        ++at_[axis + 1];
        offset_ += stride_[axis + 1];
      }
    }
  }

 private:
  std::size_t rank_ = 0;
  std::array<Index, max_rank> size_{}, stride_{}, at_{};
  Index offset_ = 0;
};

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_STRIDED_RUNS_HPP

#include <cstring>

namespace chorus::inline CHORUS_ABI::kernels {

/// x = value
template <Scalar T>
void fill(Cpu, Index count, T* x, T value) {
  if constexpr (Real<T>)
    for_packets<T>(count, [&](Index i, auto n) { store(x + i, splat(value), n); });
  else
    std::fill_n(x, count, value);
}

/// y = x in another scalar type, converted as `static_cast` does. The arrays don't overlap.
template <Scalar From, Scalar To>
void convert(Cpu, Index count, const From* x, To* y) {
  for (Index i = 0; i < count; ++i) y[i] = static_cast<To>(x[i]);
}

/// y += a x
template <Real T>
void axpy(Cpu, Index count, T a, const T* x, T* y) {
  const auto factor = splat(a);
  for_packets<T>(count, [&](Index i, auto n) { store(y + i, pmadd(factor, load(x + i, n), load(y + i, n)), n); });
}

/// x *= a
template <Real T>
void scale(Cpu, Index count, T a, T* x) {
  const auto factor = splat(a);
  for_packets<T>(count, [&](Index i, auto n) { store(x + i, pmul(factor, load(x + i, n)), n); });
}

namespace detail {

/// The next `count` elements of a strided array, put side by side.
template <class T>
void gather(StridedRuns& runs, Index count, const T* from, T* to) {
  runs.next(count, [&](Index offset, Index step, Index n) {
    const T* x = from + offset;
    if (step == 1) {
      std::memcpy(to, x, static_cast<std::size_t>(n) * sizeof(T));
    } else if (step == 0) {
      fill(Cpu{}, n, to, *x);
    } else {
      for (Index i = 0; i < n; ++i) to[i] = x[i * step];
    }
    to += n;
  });
}

/// The opposite: `count` neighbouring elements to (or added to) where they belong.
template <bool Accumulate, class T>
void scatter(StridedRuns& runs, Index count, const T* from, T* to) {
  runs.next(count, [&](Index offset, Index step, Index n) {
    T* y = to + offset;
    if constexpr (!Accumulate) {
      if (step == 1)
        std::memcpy(y, from, static_cast<std::size_t>(n) * sizeof(T));
      else
        for (Index i = 0; i < n; ++i) y[i * step] = from[i];
    } else {
      if (step == 1)
        axpy(Cpu{}, n, T{1}, from, y);
      else if (step == 0)
        *y += Sum<T>::fold(reduce_packets<T>(Index{0}, n, splat(T{0}), Sum<T>{},
                                             [&](Index i, auto lanes_used) { return load(from + i, lanes_used); }));
      else
        for (Index i = 0; i < n; ++i) y[i * step] += from[i];
    }
    from += n;
  });
}

/// dst[i][j] = src[j][i] for i < rows, j < columns, by tiles that fit into the cache.
template <class T>
void transpose(Index rows, Index columns, const T* src, Index src_stride, T* dst, Index dst_stride) {
  constexpr Index tile = 16;
  for (Index i0 = 0; i0 < rows; i0 += tile)
    for (Index j0 = 0; j0 < columns; j0 += tile) {
      const Index i_end = std::min(i0 + tile, rows), j_end = std::min(j0 + tile, columns);
      for (Index i = i0; i < i_end; ++i)
        for (Index j = j0; j < j_end; ++j) dst[i * dst_stride + j] = src[j * src_stride + i];
    }
}

}  // namespace detail

/// dst = the view (src, src_strides) in row-major order of `shape`: makes slices, permutations and broadcasts dense.
template <Scalar T>
void copy_strided(Cpu, std::span<const Index> shape, const T* src, std::span<const Index> src_strides, T* dst) {
  Index count = 1;
  for (const Index size : shape) count *= size;
  if (count == 0) return;
  StridedRuns runs(shape, src_strides);

  // A transposed view: the innermost axis jumps, but some other axis has step 1. Those two are done by tiles.
  std::size_t unit = 1;
  while (unit < runs.rank() && runs.stride(unit) != 1) ++unit;
  if (unit >= runs.rank() || runs.stride(0) == 0) return detail::gather(runs, count, src, dst);

  Index dst_stride = 1;
  std::array<Index, max_rank> rest_shape{}, rest_src{}, rest_dst{};
  std::size_t rest = 0;
  Index unit_dst_stride = 0;
  for (std::size_t axis = 0; axis < runs.rank(); dst_stride *= runs.size(axis++)) {
    if (axis == unit) unit_dst_stride = dst_stride;
    if (axis == 0 || axis == unit) continue;
    rest_shape[rest] = runs.size(axis);
    rest_src[rest] = runs.stride(axis);
    rest_dst[rest++] = dst_stride;
  }
  std::array<Index, max_rank> at{};
  for (;;) {
    detail::transpose(runs.size(unit), runs.size(0), src, runs.stride(0), dst, unit_dst_stride);
    std::size_t axis = 0;
    for (; axis < rest; ++axis) {
      src += rest_src[axis];
      dst += rest_dst[axis];
      if (++at[axis] < rest_shape[axis]) break;
      src -= rest_src[axis] * rest_shape[axis];
      dst -= rest_dst[axis] * rest_shape[axis];
      at[axis] = 0;
    }
    if (axis == rest) return;
  }
}

/// The opposite of `copy_strided`: dense `src` in row-major order of `shape` goes to the view (dst, dst_strides), and
/// is added to what is there if `accumulate` (floating-point types only). Elements that the view leaves out stay.
template <Scalar T>
void scatter_strided(Cpu, std::span<const Index> shape, const T* src, T* dst, std::span<const Index> dst_strides,
                     bool accumulate = false) {
  Index count = 1;
  for (const Index size : shape) count *= size;
  if (count == 0) return;
  StridedRuns runs(shape, dst_strides);
  if (!accumulate) return detail::scatter<false>(runs, count, src, dst);
  if constexpr (Real<T>)
    detail::scatter<true>(runs, count, src, dst);
  else
    fail<UsageError>("scatter_strided: cannot accumulate ", dtype<T>);
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_COPY_HPP

// <chorus/kernels/functors.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_FUNCTORS_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_FUNCTORS_HPP
/// The element-wise functions of the library, with PyTorch's definitions. Each is written once and runs on numbers, on
/// Packs and, for its gradient, on Duals. Options are members.

namespace chorus::inline CHORUS_ABI::functors {

using namespace math;  // for plain numbers, which no argument-dependent lookup finds

struct Add {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a + b;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S&, const S&) const {
    return {{dy, dy}};
  }
};

struct Sub {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a - b;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S&, const S&) const {
    return {{dy, -dy}};
  }
};

struct Mul {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a * b;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& a, const S& b) const {
    return {{dy * b, dy * a}};
  }
};

struct Div {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return a / b;
  }
  template <class S>
  CHORUS_HD Partials<S, 2> gradient(const S& dy, const S& a, const S& b) const {
    return {{dy / b, -dy * (a / b / b)}};
  }
};

/// The larger one; a tie gives half of the gradient to each.
struct Maximum {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return max(a, b);
  }
};

struct Minimum {
  template <class S>
  CHORUS_HD S operator()(const S& a, const S& b) const {
    return min(a, b);
  }
};

/// base^exponent
struct Pow {
  template <class S>
  CHORUS_HD S operator()(const S& base, const S& exponent) const {
    return pow(base, exponent);
  }
};

struct AddScalar {
  double value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x + real_of<S>(value);
  }
};

struct MulScalar {
  double value = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * real_of<S>(value);
  }
};

/// x^exponent; fast for -1, -0.5, 0, 0.5, 1, 2, 3.
struct PowScalar {
  double exponent = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return pow(x, real_of<S>(exponent));
  }
};

struct Neg {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return -x;
  }
};

struct Square {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * x;
  }
};

struct Reciprocal {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return 1 / x;
  }
};

// Functors that are one call of a function that all number types have.
#define CHORUS_FUNCTOR(NAME, FUNCTION)         \
  struct NAME {                                \
    template <class S>                         \
    CHORUS_HD S operator()(const S& x) const { \
      return FUNCTION(x);                      \
    }                                          \
  }
CHORUS_FUNCTOR(Abs, abs);
CHORUS_FUNCTOR(Sqrt, sqrt);
CHORUS_FUNCTOR(Rsqrt, rsqrt);
CHORUS_FUNCTOR(Exp, exp);
CHORUS_FUNCTOR(Log, log);
CHORUS_FUNCTOR(Log1p, log1p);
CHORUS_FUNCTOR(Sin, sin);
CHORUS_FUNCTOR(Cos, cos);
CHORUS_FUNCTOR(Tanh, tanh);
CHORUS_FUNCTOR(Erf, erf);
CHORUS_FUNCTOR(Sigmoid, sigmoid);
#undef CHORUS_FUNCTOR

/// max(x, 0); NaN stays. The gradient at 0 is 0.
struct Relu {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x <= 0, S(0), x);
  }
};

/// x limited to [min, max], with a gradient at the limits, as PyTorch's clamp.
struct Clamp {
  double min = 0, max = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x < real_of<S>(min), S(real_of<S>(min)), where(x > real_of<S>(max), S(real_of<S>(max)), x));
  }
};

/// The same without a gradient at the limits, as PyTorch's hardtanh.
struct Hardtanh {
  double min = -1, max = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x <= real_of<S>(min), S(real_of<S>(min)), where(x >= real_of<S>(max), S(real_of<S>(max)), x));
  }
};

struct Relu6 {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return Hardtanh{0, 6}(x);
  }
};

struct LeakyRelu {
  double slope = 0.01;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x > 0, x, x * real_of<S>(slope));
  }
};

/// x for positive x, else alpha (exp(x) - 1).
struct Elu {
  double alpha = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x <= 0, expm1(x) * real_of<S>(alpha), x);
  }
};

/// x sigmoid(x), also called swish.
struct Silu {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * sigmoid(x);
  }
};

/// x Φ(x), Φ being the normal distribution function (Hendrycks, Gimpel 2016).
struct Gelu {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * (erf(x * real_of<S>(0.70710678118654752)) + 1) * real_of<S>(0.5);
  }
};

/// GELU's approximation 0.5 x (1 + tanh(u)), u = sqrt(2/π) (x + 0.044715 x³), which is x sigmoid(2 u).
struct GeluTanh {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    return x * sigmoid(x * (x * x * R(2 * 0.79788456080286536 * 0.044715) + R(2 * 0.79788456080286536)));
  }
};

/// log(1 + exp(beta x)) / beta; x itself where beta x is above the threshold.
struct Softplus {
  double beta = 1, threshold = 20;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    using R = real_of<S>;
    const S scaled = x * R(beta);
    return where(scaled > R(threshold), x, softplus(scaled) / R(beta));
  }
};

/// x tanh(softplus(x)) (Misra 2019).
struct Mish {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x * tanh(softplus(x));
  }
};

struct LogSigmoid {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return -softplus(-x);
  }
};

/// relu6(x + 3) / 6
struct Hardsigmoid {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x <= -3, S(0), where(x >= 3, S(1), (x + 3) / 6));
  }
};

/// x relu6(x + 3) / 6, with PyTorch's choice of gradients at -3 and 3.
struct Hardswish {
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return where(x < -3, S(0), where(x <= 3, x * (x + 3) / 6, x));
  }
};

}  // namespace chorus::inline CHORUS_ABI::functors
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_FUNCTORS_HPP

// <chorus/kernels/pack.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_PACK_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_PACK_HPP
/// Pack: a few neighbouring elements of an array, computed with as one number. The storage is plain, so that nvcc
/// accepts the type in functors for host and device; every operation works in SIMD registers, and compilers keep values
/// there.

// <chorus/kernels/cpu/packet_math.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACKET_MATH_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACKET_MATH_HPP
/// The mathematical functions of SIMD registers `P` of numbers `T`, on the host only: Eigen's where it has them and
/// they are exact enough, our own, or element by element.

namespace chorus::inline CHORUS_ABI::math::packets {

/// `function` element by element: for what Eigen has no register function for.
template <class T, class P>
P by_lane(T (*function)(T), const P& x) {
  alignas(P) T v[static_cast<std::size_t>(kernels::lanes<T>)];
  Eigen::internal::pstore(v, x);
  for (T& value : v) value = function(value);
  return Eigen::internal::pload<P>(v);
}

/// exp in float, to about 1 unit in the last place; 0 below -87, infinity above 88.73. Cephes' polynomial; the power of
/// two comes from adding a number so large that the integer part ends up in the lowest bits.
template <class P>
P exp_float(const P& x_in) {
  using namespace Eigen::internal;
  const auto c = [](float value) { return pset1<P>(value); };
  const P x = pmax(pmin(x_in, c(88.75f)), c(-87.4f));
  const P magic = c(12582912.0f + 126.0f);  // 1.5 * 2^23, plus the exponent's bias less one
  const P shifted = pmadd(x, c(1.44269504088896341f), magic);
  const P m = psub(shifted, magic);
  P r = pmadd(m, c(-0.693359375f), x);
  r = pmadd(m, c(2.12194440e-4f), r);
  P y = pmadd(c(1.9875691500e-4f), r, c(1.3981999507e-3f));
  y = pmadd(y, r, c(8.3334519073e-3f));
  y = pmadd(y, r, c(4.1665795894e-2f));
  y = pmadd(y, r, c(1.6666665459e-1f));
  y = pmadd(y, r, c(5.0000001201e-1f));
  y = pmadd(y, pmul(r, r), padd(r, c(1.0f)));
  using Integers = typename unpacket_traits<P>::integer_packet;
  const P half_power = preinterpret<P>(plogical_shift_left<23>(preinterpret<Integers>(shifted)));
  return pmul(padd(y, y), half_power);
}

/// erf in float: a rational approximation, clamped to [-4, 4], whose error is below 3e-7 (the coefficients of Eigen's
/// unsupported/SpecialFunctions, which does not belong to Eigen/Core).
template <class P>
P erf_float(const P& x_in) {
  using namespace Eigen::internal;
  const auto c = [](float value) { return pset1<P>(value); };
  const P x = pmax(pmin(x_in, c(4.0f)), c(-4.0f));
  const P x2 = pmul(x, x);
  P p = pmadd(x2, c(-2.72614225801306e-10f), c(2.77068142495902e-08f));
  p = pmadd(x2, p, c(-2.10102402082508e-06f));
  p = pmadd(x2, p, c(-5.69250639462346e-05f));
  p = pmadd(x2, p, c(-7.34990630326855e-04f));
  p = pmadd(x2, p, c(-2.95459980854025e-03f));
  p = pmadd(x2, p, c(-1.60960333262415e-02f));
  P q = pmadd(x2, c(-1.45660718464996e-05f), c(-2.13374055278905e-04f));
  q = pmadd(x2, q, c(-1.68282697438203e-03f));
  q = pmadd(x2, q, c(-7.37332916720468e-03f));
  q = pmadd(x2, q, c(-1.42647390514189e-02f));
  return pdiv(pmul(x, p), q);
}

/// Eigen's approximation of sqrt makes infinity NaN.
template <class T, class P>
P sqrt(const P& x) {
  using namespace Eigen::internal;
  return pselect(pcmp_eq(x, kernels::splat(std::numeric_limits<T>::infinity())), x, psqrt(x));
}

template <class T>
inline constexpr bool vectorised = kernels::lanes<T> > 1;
template <class T>
inline constexpr bool vectorised_float = vectorised<T> && (std::is_same_v<T, float>);

template <class T>
using Traits = Eigen::internal::packet_traits<T>;

#define CHORUS_PACKET_OPERATION(NAME, PARAMETERS, ...) \
  struct NAME {                                        \
    template <class T, class P>                        \
    static P of PARAMETERS {                           \
      using namespace Eigen::internal;                 \
      __VA_ARGS__                                      \
    }                                                  \
  };
CHORUS_PACKET_OPERATION(Add, (const P& x, const P& y), return padd(x, y);)
CHORUS_PACKET_OPERATION(Sub, (const P& x, const P& y), return psub(x, y);)
CHORUS_PACKET_OPERATION(Mul, (const P& x, const P& y), return pmul(x, y);)
CHORUS_PACKET_OPERATION(Div, (const P& x, const P& y), return pdiv(x, y);)
CHORUS_PACKET_OPERATION(Max, (const P& x, const P& y), return pmax<Eigen::PropagateNaN>(x, y);)
CHORUS_PACKET_OPERATION(Min, (const P& x, const P& y), return pmin<Eigen::PropagateNaN>(x, y);)
CHORUS_PACKET_OPERATION(Less, (const P& x, const P& y), return pcmp_lt(x, y);)
CHORUS_PACKET_OPERATION(LessEqual, (const P& x, const P& y), return pcmp_le(x, y);)
CHORUS_PACKET_OPERATION(Greater, (const P& x, const P& y), return pcmp_lt(y, x);)
CHORUS_PACKET_OPERATION(GreaterEqual, (const P& x, const P& y), return pcmp_le(y, x);)
CHORUS_PACKET_OPERATION(Equal, (const P& x, const P& y), return pcmp_eq(x, y);)
CHORUS_PACKET_OPERATION(And, (const P& x, const P& y), return pand(x, y);)
CHORUS_PACKET_OPERATION(Or, (const P& x, const P& y), return por(x, y);)
CHORUS_PACKET_OPERATION(Select, (const P& mask, const P& x, const P& y), return pselect(mask, x, y);)
CHORUS_PACKET_OPERATION(Negate, (const P& x), return pnegate(x);)
CHORUS_PACKET_OPERATION(Abs, (const P& x), return pabs(x);)
CHORUS_PACKET_OPERATION(Sqrt, (const P& x), return packets::sqrt<T>(x);)
CHORUS_PACKET_OPERATION(Exp, (const P& x), if constexpr (vectorised_float<T>) return exp_float(x);
                        else return pselect(pcmp_lt(x, kernels::splat(T(-708.4))), kernels::splat(T(0)), pexp(x));)
CHORUS_PACKET_OPERATION(Erf, (const P& x), if constexpr (vectorised_float<T>) return erf_float(x);
                        else return by_lane<T>(std::erf, x);)
CHORUS_PACKET_OPERATION(Log, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasLog) return plog(x);
                        else return by_lane<T>(std::log, x);)
CHORUS_PACKET_OPERATION(Log1p, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasLog1p) return plog1p(x);
                        else return by_lane<T>(std::log1p, x);)
CHORUS_PACKET_OPERATION(Expm1, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasExpm1) return pexpm1(x);
                        else return by_lane<T>(std::expm1, x);)
CHORUS_PACKET_OPERATION(Sin, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasSin) return psin(x);
                        else return by_lane<T>(std::sin, x);)
CHORUS_PACKET_OPERATION(Cos, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasCos) return pcos(x);
                        else return by_lane<T>(std::cos, x);)
CHORUS_PACKET_OPERATION(Tanh, (const P& x), if constexpr (vectorised<T> && Traits<T>::HasTanh) return ptanh(x);
                        else return by_lane<T>(std::tanh, x);)
#undef CHORUS_PACKET_OPERATION

}  // namespace chorus::inline CHORUS_ABI::math::packets
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACKET_MATH_HPP

// Functors are for host and device, so nvcc wants everything that they call to be. What belongs to Pack then says that
// it is, never mentions a register itself, and hands over to host functions, which the pragma permits.
#if defined(__CUDACC__)
#define CHORUS_PACK_MEMBER _Pragma("nv_exec_check_disable") __host__ __device__
#define CHORUS_PACK_TEMPLATE(...)                         \
  _Pragma("nv_exec_check_disable") template <__VA_ARGS__> \
  __host__ __device__
#else
#define CHORUS_PACK_MEMBER
#define CHORUS_PACK_TEMPLATE(...) template <__VA_ARGS__>
#endif

namespace chorus::inline CHORUS_ABI::math {

namespace packets {
template <class T>
void copy(const T* from, T* to) {
  Eigen::internal::pstore(to, Eigen::internal::pload<kernels::Packet<T>>(from));
}
template <class T>
void splat(T value, T* to) {
  Eigen::internal::pstore(to, kernels::splat(value));
}
}  // namespace packets

/// One SIMD register of `T`; one number where Eigen does not vectorise.
template <class T>
struct alignas(sizeof(kernels::Packet<T>)) Pack {
  static constexpr Index width = kernels::lanes<T>;
  T v[static_cast<std::size_t>(width)];

  Pack() = default;
  /// The same number in all lanes.
  CHORUS_PACK_TEMPLATE(Arithmetic A)
  Pack(A value) { packets::splat(static_cast<T>(value), v); }  // NOLINT: converts as numbers do
  // Copied as a register: compilers copy the array piece by piece, through memory.
  CHORUS_PACK_MEMBER Pack(const Pack& other) { packets::copy(other.v, v); }
  CHORUS_PACK_MEMBER Pack& operator=(const Pack& other) {
    packets::copy(other.v, v);
    return *this;
  }

  static Pack load(const T* from) {
    Pack out;
    Eigen::internal::pstore(out.v, Eigen::internal::ploadu<kernels::Packet<T>>(from));
    return out;
  }
  void store(T* to) const { Eigen::internal::pstoreu(to, Eigen::internal::pload<kernels::Packet<T>>(v)); }
};

template <class T>
struct RealOf<Pack<T>> {
  using type = T;
};

/// A truth value for each lane of a Pack, as comparisons give it: all bits or none.
template <class T>
struct Mask {
  Pack<T> bits;
};

namespace packets {

/// `Op`, one of the operations of packet_math.hpp.
template <class Op, class T, class... Packs>
Pack<T> apply(const Pack<T>& a, const Packs&... b) {
  Pack<T> out;
  Eigen::internal::pstore(out.v, Op::template of<T>(Eigen::internal::pload<kernels::Packet<T>>(a.v),
                                                    Eigen::internal::pload<kernels::Packet<T>>(b.v)...));
  return out;
}

template <class T>
Pack<T> pow(const Pack<T>& x, const Pack<T>& exponent) {
  Pack<T> out;
  for (std::size_t i = 0; i < static_cast<std::size_t>(Pack<T>::width); ++i) out.v[i] = std::pow(x.v[i], exponent.v[i]);
  return out;
}

}  // namespace packets

// What functors call. A plain number may stand on either side.
#define CHORUS_PACK_BINARY(RESULT, NAME, OPERATION)                                                      \
  CHORUS_PACK_TEMPLATE(class T)                                                                          \
  RESULT NAME(const Pack<T>& a, const Pack<T>& b) { return {packets::apply<packets::OPERATION>(a, b)}; } \
  CHORUS_PACK_TEMPLATE(class T, Arithmetic A)                                                            \
  RESULT NAME(const Pack<T>& a, A b) { return {packets::apply<packets::OPERATION>(a, Pack<T>(b))}; }     \
  CHORUS_PACK_TEMPLATE(class T, Arithmetic A)                                                            \
  RESULT NAME(A a, const Pack<T>& b) { return {packets::apply<packets::OPERATION>(Pack<T>(a), b)}; }
CHORUS_PACK_BINARY(Pack<T>, operator+, Add)
CHORUS_PACK_BINARY(Pack<T>, operator-, Sub)
CHORUS_PACK_BINARY(Pack<T>, operator*, Mul)
CHORUS_PACK_BINARY(Pack<T>, operator/, Div)
CHORUS_PACK_BINARY(Mask<T>, operator<, Less)
CHORUS_PACK_BINARY(Mask<T>, operator<=, LessEqual)
CHORUS_PACK_BINARY(Mask<T>, operator>, Greater)
CHORUS_PACK_BINARY(Mask<T>, operator>=, GreaterEqual)
CHORUS_PACK_BINARY(Mask<T>, operator==, Equal)
CHORUS_PACK_BINARY(Pack<T>, max, Max)
CHORUS_PACK_BINARY(Pack<T>, min, Min)
#undef CHORUS_PACK_BINARY

#define CHORUS_PACK_UNARY(NAME, OPERATION) \
  CHORUS_PACK_TEMPLATE(class T)            \
  Pack<T> NAME(const Pack<T>& x) { return packets::apply<packets::OPERATION>(x); }
CHORUS_PACK_UNARY(operator-, Negate)
CHORUS_PACK_UNARY(abs, Abs)
CHORUS_PACK_UNARY(sqrt, Sqrt)
CHORUS_PACK_UNARY(exp, Exp)
CHORUS_PACK_UNARY(expm1, Expm1)
CHORUS_PACK_UNARY(log, Log)
CHORUS_PACK_UNARY(log1p, Log1p)
CHORUS_PACK_UNARY(sin, Sin)
CHORUS_PACK_UNARY(cos, Cos)
CHORUS_PACK_UNARY(tanh, Tanh)
CHORUS_PACK_UNARY(erf, Erf)
#undef CHORUS_PACK_UNARY

CHORUS_PACK_TEMPLATE(class T)
Mask<T> operator&&(const Mask<T>& a, const Mask<T>& b) { return {packets::apply<packets::And>(a.bits, b.bits)}; }
CHORUS_PACK_TEMPLATE(class T)
Mask<T> operator||(const Mask<T>& a, const Mask<T>& b) { return {packets::apply<packets::Or>(a.bits, b.bits)}; }

CHORUS_PACK_TEMPLATE(class T)
Pack<T> where(const Mask<T>& condition, const Pack<T>& a, const Pack<T>& b) {
  return packets::apply<packets::Select>(condition.bits, a, b);
}
CHORUS_PACK_TEMPLATE(class T, Arithmetic A)
Pack<T> where(const Mask<T>& condition, A a, const Pack<T>& b) { return where(condition, Pack<T>(a), b); }
CHORUS_PACK_TEMPLATE(class T, Arithmetic A)
Pack<T> where(const Mask<T>& condition, const Pack<T>& a, A b) { return where(condition, a, Pack<T>(b)); }

CHORUS_PACK_TEMPLATE(class T)
Pack<T> rsqrt(const Pack<T>& x) { return 1 / sqrt(x); }
CHORUS_PACK_TEMPLATE(class T)
Pack<T> sigmoid(const Pack<T>& x) { return 1 / (1 + exp(-x)); }
CHORUS_PACK_TEMPLATE(class T)
Pack<T> softplus(const Pack<T>& x) { return max(x, 0) + log1p(exp(-abs(x))); }

CHORUS_PACK_TEMPLATE(class T)
Pack<T> pow(const Pack<T>& x, const Pack<T>& exponent) { return packets::pow(x, exponent); }
/// The usual exponents are computed in registers, the others element by element.
CHORUS_PACK_TEMPLATE(class T, Arithmetic A)
Pack<T> pow(const Pack<T>& x, A exponent) {
  const auto e = static_cast<T>(exponent);
  if (e == T(0)) return T(1);
  if (e == T(0.5)) return sqrt(x);
  if (e == T(-0.5)) return rsqrt(x);
  if (e == T(1)) return x;
  if (e == T(2)) return x * x;
  if (e == T(3)) return x * x * x;
  if (e == T(-1)) return 1 / x;
  return packets::pow(x, Pack<T>(e));
}
CHORUS_PACK_TEMPLATE(class T, Arithmetic A)
Pack<T> pow(A x, const Pack<T>& exponent) { return packets::pow(Pack<T>(x), exponent); }

}  // namespace chorus::inline CHORUS_ABI::math

#undef CHORUS_PACK_MEMBER
#undef CHORUS_PACK_TEMPLATE

namespace chorus::inline CHORUS_ABI {
using math::Pack;
}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_PACK_HPP

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {

/// Full Packs only: `count` is a multiple of the width.
template <class F, class T, std::size_t... K>
[[gnu::noinline]] void forward_packs(const F& f, Index count, const std::array<const T*, sizeof...(K)>& in_pointers,
                                     T* out, std::index_sequence<K...>) {
  const F function = f;
  const auto in = in_pointers;
  for (Index i = 0; i < count; i += Pack<T>::width) {
    const Pack<T> y = function(Pack<T>::load(in[K] + i)...);
    y.store(out + i);
  }
}

template <class F, class T, std::size_t... K>
[[gnu::noinline]] void backward_packs(const F& f, Index count, const std::array<const T*, sizeof...(K)>& in_pointers,
                                      const T* dy, const std::array<T*, sizeof...(K)>& dx_pointers,
                                      const std::array<bool, sizeof...(K)>& accumulate_flags,
                                      std::index_sequence<K...>) {
  const F function = f;
  const auto in = in_pointers;
  const auto dx = dx_pointers;
  const auto accumulate = accumulate_flags;
  const auto put = [](T* to, const Pack<T>& value, bool add) {
    if (to == nullptr) return;
    if (add)
      (Pack<T>::load(to) + value).store(to);
    else
      value.store(to);
  };
  for (Index i = 0; i < count; i += Pack<T>::width) {
    const auto partials = math::gradient(function, Pack<T>::load(dy + i), Pack<T>::load(in[K] + i)...);
    (put(dx[K] == nullptr ? nullptr : dx[K] + i, partials.d[K], accumulate[K]), ...);
  }
}

inline constexpr Index block_elements = 512;

inline Index element_count(std::span<const Index> shape) {
  Index count = 1;
  for (const Index size : shape) count *= size;
  return count;
}

template <std::size_t N>
std::array<StridedRuns, N> runs_of(std::span<const Index> shape, const std::array<std::span<const Index>, N>& strides) {
  return [&]<std::size_t... k>(std::index_sequence<k...>) {
    return std::array<StridedRuns, N>{StridedRuns(shape, strides[k])...};
  }
  (std::make_index_sequence<N>());
}

}  // namespace detail

/// out[i] = f(in_0[i], in_1[i], ...) for dense arrays of one size; `out` may be one of the inputs.
template <class F, class T, std::size_t N>
void pointwise_forward(Cpu, const F& f, Index count, const std::array<const T*, N>& in, T* out) {
  constexpr std::make_index_sequence<N> each;
  const Index whole = count / Pack<T>::width * Pack<T>::width, tail = count - whole;
  if (whole > 0) detail::forward_packs(f, whole, in, out, each);
  if (tail == 0) return;
  // The tail goes through one padded Pack, so that the result of an element doesn't depend on its place.
  const std::size_t bytes = static_cast<std::size_t>(tail) * sizeof(T);
  Pack<T> padded[N + 1];
  std::array<const T*, N> pointers;
  for (std::size_t k = 0; k < N; ++k) {
    padded[k] = Pack<T>(0);
    std::memcpy(padded[k].v, in[k] + whole, bytes);
    pointers[k] = padded[k].v;
  }
  detail::forward_packs(f, Pack<T>::width, pointers, padded[N].v, each);
  std::memcpy(out + whole, padded[N].v, bytes);
}

/// dx_k[i] = (or +=, where `accumulate[k]`) dy[i] * df/dx_k(in_0[i], ...). A null `dx[k]` is not wanted. A `dx[k]` may
/// be `dy` or an input.
template <class F, class T, std::size_t N>
void pointwise_backward(Cpu, const F& f, Index count, const std::array<const T*, N>& in, const T* dy,
                        const std::array<T*, N>& dx, const std::array<bool, N>& accumulate) {
  constexpr std::make_index_sequence<N> each;
  const Index whole = count / Pack<T>::width * Pack<T>::width, tail = count - whole;
  if (whole > 0) detail::backward_packs(f, whole, in, dy, dx, accumulate, each);
  if (tail == 0) return;
  const std::size_t bytes = static_cast<std::size_t>(tail) * sizeof(T);
  Pack<T> padded[N], padded_dy(0), padded_dx[N];
  std::array<const T*, N> pointers;
  std::array<T*, N> dx_pointers;
  std::memcpy(padded_dy.v, dy + whole, bytes);
  for (std::size_t k = 0; k < N; ++k) {
    padded[k] = padded_dx[k] = Pack<T>(0);
    std::memcpy(padded[k].v, in[k] + whole, bytes);
    pointers[k] = padded[k].v;
    dx_pointers[k] = dx[k] == nullptr ? nullptr : padded_dx[k].v;
    if (dx[k] != nullptr && accumulate[k]) std::memcpy(padded_dx[k].v, dx[k] + whole, bytes);
  }
  detail::backward_packs(f, Pack<T>::width, pointers, padded_dy.v, dx_pointers, accumulate, each);
  for (std::size_t k = 0; k < N; ++k)
    if (dx[k] != nullptr) std::memcpy(dx[k] + whole, padded_dx[k].v, bytes);
}

/// The same with broadcasting: input k is read with `in_strides[k]` (0 along broadcast axes, as `Tensor::expand` gives
/// them); `out` is dense in `shape` and overlaps no input. Throws ShapeError.
template <class F, class T, std::size_t N>
void pointwise_forward(Cpu device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                       const std::array<std::span<const Index>, N>& in_strides, T* out) {
  auto runs = detail::runs_of(shape, in_strides);
  const Index count = detail::element_count(shape);
  bool all_dense = true;
  for (const auto& r : runs) all_dense = all_dense && r.contiguous();
  if (all_dense) return pointwise_forward(device, f, count, in, out);

  alignas(64) T buffers[N][detail::block_elements];
  for (Index start = 0; start < count; start += detail::block_elements) {
    const Index n = std::min(detail::block_elements, count - start);
    std::array<const T*, N> pointers;
    for (std::size_t k = 0; k < N; ++k) {
      pointers[k] = runs[k].contiguous() ? in[k] + start : buffers[k];
      if (!runs[k].contiguous()) detail::gather(runs[k], n, in[k], buffers[k]);
    }
    pointwise_forward(device, f, n, pointers, out + start);
  }
}

/// Backward with broadcasting: `dy` is dense in `shape`; dx_k has `dx_strides[k]`, 0 along the axes over which it sums,
/// and is dense in its own shape (or, with `accumulate[k]` or without sums, any view).
template <class F, class T, std::size_t N>
void pointwise_backward(Cpu device, const F& f, std::span<const Index> shape, const std::array<const T*, N>& in,
                        const std::array<std::span<const Index>, N>& in_strides, const T* dy,
                        const std::array<T*, N>& dx, const std::array<std::span<const Index>, N>& dx_strides,
                        const std::array<bool, N>& accumulate) {
  auto in_runs = detail::runs_of(shape, in_strides), dx_runs = detail::runs_of(shape, dx_strides);
  const Index count = detail::element_count(shape);
  bool all_dense = true;
  auto add = accumulate;
  for (std::size_t k = 0; k < N; ++k) {
    all_dense = all_dense && in_runs[k].contiguous() && (dx[k] == nullptr || dx_runs[k].contiguous());
    if (dx[k] == nullptr || add[k]) continue;
    // What sums starts from zero.
    Index own = 1;
    bool sums = false;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      if (dx_strides[k][axis] != 0) own *= shape[axis];
      sums = sums || (dx_strides[k][axis] == 0 && shape[axis] != 1);
    }
    if (sums) {
      fill(device, own, dx[k], T{0});
      add[k] = true;
    }
  }
  if (all_dense) return pointwise_backward(device, f, count, in, dy, dx, add);

  alignas(64) T buffers[N][detail::block_elements], dx_buffers[N][detail::block_elements];
  for (Index start = 0; start < count; start += detail::block_elements) {
    const Index n = std::min(detail::block_elements, count - start);
    std::array<const T*, N> pointers;
    std::array<T*, N> dx_pointers;
    std::array<bool, N> add_now;
    for (std::size_t k = 0; k < N; ++k) {
      pointers[k] = in_runs[k].contiguous() ? in[k] + start : buffers[k];
      if (!in_runs[k].contiguous()) detail::gather(in_runs[k], n, in[k], buffers[k]);
      const bool direct = dx_runs[k].contiguous();
      dx_pointers[k] = dx[k] == nullptr ? nullptr : direct ? dx[k] + start : dx_buffers[k];
      add_now[k] = direct && add[k];
    }
    pointwise_backward(device, f, n, pointers, dy + start, dx_pointers, add_now);
    for (std::size_t k = 0; k < N; ++k) {
      if (dx[k] == nullptr || dx_runs[k].contiguous()) continue;
      if (add[k])
        detail::scatter<true>(dx_runs[k], n, dx_buffers[k], dx[k]);
      else
        detail::scatter<false>(dx_runs[k], n, dx_buffers[k], dx[k]);
    }
  }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_POINTWISE_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_POINTWISE_HPP

// <chorus/tensor/tensor.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_TENSOR_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_TENSOR_HPP
/// Tensor: a shared, strided view of device memory. Copying a Tensor copies the handle, not the numbers.

// <chorus/tensor/allocator.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_ALLOCATOR_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_ALLOCATOR_HPP
/// Device memory: blocks that are kept and reused, so that the second step of a training loop asks the system for nothing.

#include <bit>
#include <cstdlib>
#include <mutex>

#include <sys/mman.h>

// <chorus/core/trace.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_TRACE_HPP
#define CHORUS_SINGLE_CHORUS_CORE_TRACE_HPP
/// Everything that moves is counted here: bytes sent per device by what they carried, and memory per device by kind.
/// Under DataParallel a "device" is a device of this process; under DistributedDataParallel it is the rank.

namespace chorus::inline CHORUS_ABI::trace {

inline constexpr int max_devices = 64;

/// What a message between devices or ranks carried.
enum class Traffic : std::uint8_t { control, parameters, gradients, buffers, inputs, outputs };
inline constexpr std::size_t traffic_kinds = 6;

/// What a block of device memory holds.
enum class Memory : std::uint8_t { activations, parameters, gradients, optimizer, buckets };
inline constexpr std::size_t memory_kinds = 5;

constexpr std::string_view name(Traffic kind) {
  constexpr std::string_view names[] = {"control", "parameters", "gradients", "buffers", "inputs", "outputs"};
  return names[static_cast<std::size_t>(kind)];
}
constexpr std::string_view name(Memory kind) {
  constexpr std::string_view names[] = {"activations", "parameters", "gradients", "optimizer", "buckets"};
  return names[static_cast<std::size_t>(kind)];
}

/// Bytes of one device, in use now and at most so far.
struct MemoryUse {
  std::size_t current = 0, peak = 0;
};

namespace detail {
struct DeviceCounters {
  std::array<std::atomic<std::uint64_t>, traffic_kinds> sent{};
  std::array<std::atomic<std::int64_t>, memory_kinds> held{};
  std::atomic<std::int64_t> total{0}, peak{0};
};
inline DeviceCounters& counters(int device) {
  static std::array<DeviceCounters, max_devices> all;
  check<DeviceError>(device >= 0 && device < max_devices, "trace: device index ", device, " is not in [0, ", max_devices,
                     ")");
  return all[static_cast<std::size_t>(device)];
}
}  // namespace detail

/// Counts `bytes` that `device` (or rank) handed to another one.
inline void sent(int device, Traffic kind, std::size_t bytes) {
  detail::counters(device).sent[static_cast<std::size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
}
inline std::uint64_t bytes_sent(int device, Traffic kind) {
  return detail::counters(device).sent[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed);
}
inline std::uint64_t bytes_sent(int device) {
  std::uint64_t sum = 0;
  for (const auto& kind : detail::counters(device).sent) sum += kind.load(std::memory_order_relaxed);
  return sum;
}
inline void reset_traffic() {
  for (int device = 0; device < max_devices; ++device)
    for (auto& kind : detail::counters(device).sent) kind.store(0, std::memory_order_relaxed);
}

/// Counts `bytes` that came into use on `device` (negative: that were given back).
inline void allocated(int device, Memory kind, std::int64_t bytes) {
  auto& c = detail::counters(device);
  c.held[static_cast<std::size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  const auto now = c.total.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  auto peak = c.peak.load(std::memory_order_relaxed);
  while (now > peak && !c.peak.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}
inline MemoryUse memory(int device) {
  const auto& c = detail::counters(device);
  return {static_cast<std::size_t>(c.total.load()), static_cast<std::size_t>(c.peak.load())};
}
inline std::size_t memory(int device, Memory kind) {
  return static_cast<std::size_t>(detail::counters(device).held[static_cast<std::size_t>(kind)].load());
}

}  // namespace chorus::inline CHORUS_ABI::trace
#endif  // CHORUS_SINGLE_CHORUS_CORE_TRACE_HPP

namespace chorus::inline CHORUS_ABI {

/// What allocations of this thread are accounted as while the scope lives.
class MemoryScope {
 public:
  explicit MemoryScope(trace::Memory kind) : before_(std::exchange(current(), kind)) {}
  ~MemoryScope() { current() = before_; }
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

  static trace::Memory& current() {
    thread_local trace::Memory kind = trace::Memory::activations;
    return kind;
  }

 private:
  trace::Memory before_;
};

/// Where a device's memory comes from: the only part of the allocator that differs between kinds of device. A null
/// pointer means that there is no more.
inline void* system_allocate(Cpu, std::size_t bytes) {
  constexpr std::size_t huge_page = std::size_t{2} << 20;
  const bool large = bytes >= huge_page;
  void* data = std::aligned_alloc(large ? huge_page : 64, large ? (bytes + huge_page - 1) / huge_page * huge_page : bytes);
  if (large && data != nullptr) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}
inline void system_free(Cpu, void* data) { std::free(data); }

/// A block of device memory, owned by the handles that count it, then by its allocator's free list.
template <Device D>
struct Block {
  std::atomic<int> owners{0};
  trace::Memory kind{};
  D device{};
  std::size_t bytes = 0;
  void* data = nullptr;
  Block* next_free = nullptr;
};

/// Keeps freed blocks by size class, four classes an octave, so at most a quarter of a block is unused. One per device;
/// never destroyed, since tensors in static storage may outlive it. Thread-safe.
template <Device D>
class CachingAllocator {
 public:
  static CachingAllocator& of(D device) {
    static auto& all = *new std::array<CachingAllocator, D::max_devices>;
    check<DeviceError>(device.index >= 0 && device.index < D::max_devices, "device ", device, " does not exist: ", D::kind,
                       " devices are numbered 0 to ", D::max_devices - 1);
    return all[static_cast<std::size_t>(device.index)];
  }

  /// A block of at least `bytes`, aligned to 64 bytes, contents undefined. Throws Error when the device has no more.
  Block<D>* allocate(D device, std::size_t bytes) {
    const auto [list, rounded] = size_class(bytes);
    Block<D>* block = nullptr;
    {
      std::lock_guard lock(mutex_);
      block = free_[list];
      if (block != nullptr) free_[list] = block->next_free;
    }
    if (block == nullptr) block = fresh(device, rounded);
    block->kind = MemoryScope::current();
    trace::allocated(device.index, block->kind, static_cast<std::int64_t>(block->bytes));
    return block;
  }

  void release(Block<D>* block) noexcept {
    trace::allocated(block->device.index, block->kind, -static_cast<std::int64_t>(block->bytes));
    const auto list = size_class(block->bytes).first;
    std::lock_guard lock(mutex_);
    block->next_free = free_[list];
    free_[list] = block;
  }

  /// Gives all unused blocks back to the system.
  void empty_cache() noexcept {
    std::lock_guard lock(mutex_);
    for (auto& list : free_)
      while (list != nullptr) {
        Block<D>* block = std::exchange(list, list->next_free);
        system_free(block->device, block->data);
        delete block;
      }
  }

  /// How often the system was asked for memory; a steady training loop doesn't change it.
  std::uint64_t system_allocations() const { return system_allocations_.load(); }

 private:
  static constexpr std::size_t smallest = 64;

  // The list's number and the block size for a request. Sizes are 64 * {4, 5, 6, 7} / 4 * 2^octave.
  static std::pair<std::size_t, std::size_t> size_class(std::size_t bytes) {
    if (bytes <= smallest * 4) {
      const std::size_t units = bytes == 0 ? 1 : (bytes + smallest - 1) / smallest;
      return {units - 1, units * smallest};
    }
    const auto octave = static_cast<std::size_t>(std::bit_width(bytes - 1)) - 1;
    const std::size_t quarter = std::size_t{1} << (octave - 2);
    const std::size_t steps = (bytes + quarter - 1) / quarter;  // 5 to 8
    return {4 * (octave - 7) + steps - 5, steps * quarter};
  }

  Block<D>* fresh(D device, std::size_t bytes) {
    void* data = system_allocate(device, bytes);
    if (data == nullptr) {
      empty_cache();
      data = system_allocate(device, bytes);
    }
    if (data == nullptr) out_of_memory(device, bytes);
    system_allocations_.fetch_add(1, std::memory_order_relaxed);
    auto* block = new Block<D>;
    block->device = device;
    block->bytes = bytes;
    block->data = data;
    return block;
  }

  [[noreturn]] static void out_of_memory(D device, std::size_t bytes) {
    std::string held;
    for (std::size_t kind = 0; kind < trace::memory_kinds; ++kind) {
      const auto memory = static_cast<trace::Memory>(kind);
      held += cat(kind == 0 ? "" : ", ", trace::name(memory), " ", trace::memory(device.index, memory) >> 20, " MiB");
    }
    fail<Error>("out of memory on ", device, ": asked for ", bytes, " bytes; in use: ", held);
  }

  std::mutex mutex_;
  std::array<Block<D>*, 256> free_{};
  std::atomic<std::uint64_t> system_allocations_{0};
};

/// A counted handle to a block. Copies share it.
template <Device D>
class Storage {
 public:
  Storage() = default;
  Storage(D device, std::size_t bytes) : block_(CachingAllocator<D>::of(device).allocate(device, bytes)) {
    block_->owners.store(1, std::memory_order_relaxed);
  }
  Storage(const Storage& other) noexcept : block_(other.block_) {
    if (block_ != nullptr) block_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  Storage(Storage&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Storage& operator=(Storage other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Storage() {
    if (block_ != nullptr && block_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1)
      CachingAllocator<D>::of(block_->device).release(block_);
  }

  explicit operator bool() const { return block_ != nullptr; }
  void* data() const { return block_ == nullptr ? nullptr : block_->data; }
  std::size_t bytes() const { return block_ == nullptr ? 0 : block_->bytes; }
  D device() const { return block_ == nullptr ? D{} : block_->device; }
  int owners() const { return block_ == nullptr ? 0 : block_->owners.load(std::memory_order_relaxed); }

 private:
  Block<D>* block_ = nullptr;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_ALLOCATOR_HPP

// <chorus/tensor/memory.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_MEMORY_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_MEMORY_HPP
/// Moving bytes between devices: what a kind of device must bring so that tensors can be created and read there.

namespace chorus::inline CHORUS_ABI {

/// Copies bytes between two places of one kind of device; the ranges don't overlap.
inline void copy_bytes(Cpu, void* to, Cpu, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

inline void zero_bytes(Cpu, void* data, std::size_t bytes) {
  if (bytes != 0) std::memset(data, 0, bytes);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_MEMORY_HPP

// <chorus/tensor/shape.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_SHAPE_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_SHAPE_HPP
/// Extents and strides. The rank is a type, the sizes are values.

namespace chorus::inline CHORUS_ABI {

/// The sizes of a tensor's axes, outermost first; also used for strides and lists of axes.
template <int Rank>
using Shape = std::array<Index, static_cast<std::size_t>(Rank)>;

/// Number of elements.
constexpr Index numel(std::span<const Index> shape) {
  Index count = 1;
  for (const Index size : shape) count *= size;
  return count;
}

/// Strides, in elements, of a dense row-major tensor.
template <std::size_t N>
constexpr std::array<Index, N> row_major(const std::array<Index, N>& shape) {
  std::array<Index, N> strides{};
  Index stride = 1;
  for (std::size_t axis = N; axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  return strides;
}

/// The axis counted from the front; negative axes count from the back, as in PyTorch.
inline std::size_t normalize_axis(std::string_view operation, Index axis, int rank) {
  check<ShapeError>(axis >= -rank && axis < rank, operation, ": axis ", axis, " does not exist in a tensor of rank ", rank);
  return static_cast<std::size_t>(axis < 0 ? axis + rank : axis);
}

/// The shape that two shapes broadcast to, aligned at their last axes. Throws ShapeError where sizes differ and neither is 1.
template <std::size_t A, std::size_t B>
constexpr auto broadcast_shapes(std::string_view operation, const std::array<Index, A>& a, const std::array<Index, B>& b) {
  constexpr std::size_t rank = A > B ? A : B;
  std::array<Index, rank> out{};
  for (std::size_t i = 0; i < rank; ++i) {
    const Index size_a = i < A ? a[A - 1 - i] : 1, size_b = i < B ? b[B - 1 - i] : 1;
    check<ShapeError>(size_a == size_b || size_a == 1 || size_b == 1, operation, ": shapes ", a, " and ", b,
                      " do not broadcast");
    out[rank - 1 - i] = size_a == 1 ? size_b : size_a;
  }
  return out;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_SHAPE_HPP

namespace chorus::inline CHORUS_ABI {

/// Numbers of type `T` in `Rank` axes on a `D`. Scalar type, rank and kind of device are part of the type; sizes, strides
/// and the device's index are values. Views (slice, select, permute, expand, reshape of dense memory) share memory.
template <Scalar T, int Rank, Device D = Cpu>
class Tensor {
  static_assert(Rank >= 0 && Rank <= 8, "a Tensor has 0 to 8 axes");

 public:
  using value_type = T;
  using device_type = D;
  static constexpr int rank = Rank;

  /// An undefined tensor: no memory, no device.
  Tensor() = default;

  /// A view of `storage`, from element `data` on. For library code.
  Tensor(Storage<D> storage, T* data, const Shape<Rank>& shape, const Shape<Rank>& strides)
      : storage_(std::move(storage)), data_(data), shape_(shape), strides_(strides) {}

  /// Dense, contents undefined. Throws ShapeError where a size is negative or their product too large for any memory.
  static Tensor empty(const Shape<Rank>& shape, D device = {}) {
    constexpr Index most = (Index{1} << 56) / static_cast<Index>(sizeof(T));
    Index count = 1;
    for (const Index size : shape) {
      check<ShapeError>(size >= 0, "Tensor: shape ", shape, " has a negative size");
      check<ShapeError>(size == 0 || count <= most / size, "Tensor: shape ", shape, " has too many elements");
      if (size > 0) count *= size;
    }
    Storage<D> storage(device, static_cast<std::size_t>(chorus::numel(shape)) * sizeof(T));
    T* data = static_cast<T*>(storage.data());
    return Tensor(std::move(storage), data, shape, row_major(shape));
  }

  static Tensor zeros(const Shape<Rank>& shape, D device = {}) {
    Tensor out = empty(shape, device);
    zero_bytes(device, out.data_, out.bytes());
    return out;
  }

  /// Dense, with the given numbers in row-major order. Throws ShapeError where their count doesn't fit the shape.
  static Tensor from(std::span<const T> values, const Shape<Rank>& shape, D device = {}) {
    Tensor out = empty(shape, device);
    check<ShapeError>(static_cast<Index>(values.size()) == out.numel(), "Tensor::from: ", values.size(),
                      " numbers for shape ", shape);
    copy_bytes(device, out.data_, Cpu{}, values.data(), out.bytes());
    return out;
  }
  static Tensor from(std::initializer_list<T> values, const Shape<Rank>& shape, D device = {}) {
    return from(std::span<const T>(values.begin(), values.size()), shape, device);
  }

  static Tensor full(const Shape<Rank>& shape, T value, D device = {}) {
    if constexpr (std::is_same_v<D, Cpu>) {
      Tensor out = empty(shape, device);
      std::fill_n(out.data_, out.numel(), value);
      return out;
    } else {
      const auto host = Tensor<T, Rank, Cpu>::full(shape, value);
      return from(std::span<const T>(host.data(), static_cast<std::size_t>(host.numel())), shape, device);
    }
  }
  static Tensor ones(const Shape<Rank>& shape, D device = {}) { return full(shape, T{1}, device); }

  bool defined() const { return static_cast<bool>(storage_); }
  D device() const { return storage_.device(); }
  const Storage<D>& storage() const { return storage_; }
  const Shape<Rank>& shape() const { return shape_; }
  const Shape<Rank>& strides() const { return strides_; }
  Index size(Index axis) const { return shape_[normalize_axis("size", axis, Rank)]; }
  Index numel() const { return chorus::numel(shape_); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * sizeof(T); }
  T* data() const { return data_; }

  /// True where the elements lie in row-major order without gaps.
  bool is_contiguous() const {
    Index expected = 1;
    for (std::size_t axis = Rank; axis-- > 0;) {
      if (shape_[axis] != 1 && strides_[axis] != expected) return shape_has_zero();
      expected *= shape_[axis];
    }
    return true;
  }

  /// One element, on the CPU. Throws ShapeError where an index is out of range.
  template <class... Indices>
    requires(sizeof...(Indices) == static_cast<std::size_t>(Rank) && std::is_same_v<D, Cpu>)
  T& operator()(Indices... indices) const {
    const Shape<Rank> at{static_cast<Index>(indices)...};
    Index offset = 0;
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis) {
      check<ShapeError>(at[axis] >= 0 && at[axis] < shape_[axis], "Tensor: index ", at, " is outside of shape ", shape_);
      offset += at[axis] * strides_[axis];
    }
    return data_[offset];
  }

  /// The number in a tensor of one element, brought to the host.
  T item() const {
    check<ShapeError>(defined() && numel() == 1, "item: expected a tensor of one element, got shape ", shape_);
    T value{};
    copy_bytes(Cpu{}, &value, device(), data_, sizeof(T));
    return value;
  }

  /// Indices `start` to `stop - 1` of an axis; a view.
  Tensor slice(Index axis, Index start, Index stop) const {
    const auto a = normalize_axis("slice", axis, Rank);
    check<ShapeError>(0 <= start && start <= stop && stop <= shape_[a], "slice: range [", start, ", ", stop,
                      ") is not inside axis ", axis, " of shape ", shape_);
    Tensor out = *this;
    out.shape_[a] = stop - start;
    out.data_ += start * strides_[a];
    return out;
  }

  /// Index `at` of an axis, which goes away; a view.
  Tensor<T, Rank - 1, D> select(Index axis, Index at) const
    requires(Rank > 0)
  {
    const auto a = normalize_axis("select", axis, Rank);
    check<ShapeError>(at >= 0 && at < shape_[a], "select: index ", at, " is not inside axis ", axis, " of shape ", shape_);
    Shape<Rank - 1> shape{}, strides{};
    for (std::size_t from = 0, to = 0; from < static_cast<std::size_t>(Rank); ++from) {
      if (from == a) continue;
      shape[to] = shape_[from];
      strides[to++] = strides_[from];
    }
    return {storage_, data_ + at * strides_[a], shape, strides};
  }
  Tensor<T, Rank - 1, D> operator[](Index at) const
    requires(Rank > 0)
  {
    return select(0, at);
  }

  /// The axes in another order; a view. `axes` names each axis once.
  Tensor permute(const Shape<Rank>& axes) const {
    Tensor out = *this;
    Shape<Rank> seen{};
    for (std::size_t i = 0; i < static_cast<std::size_t>(Rank); ++i) {
      const auto from = normalize_axis("permute", axes[i], Rank);
      check<ShapeError>(seen[from]++ == 0, "permute: axes ", axes, " name an axis twice");
      out.shape_[i] = shape_[from];
      out.strides_[i] = strides_[from];
    }
    return out;
  }
  Tensor transpose(Index a, Index b) const {
    Tensor out = *this;
    const auto i = normalize_axis("transpose", a, Rank), j = normalize_axis("transpose", b, Rank);
    std::swap(out.shape_[i], out.shape_[j]);
    std::swap(out.strides_[i], out.strides_[j]);
    return out;
  }

  /// Another shape over the same memory, which must be dense. One size may be -1: it is worked out.
  template <std::size_t NewRank>
  Tensor<T, static_cast<int>(NewRank), D> view(std::array<Index, NewRank> shape) const {
    check<ShapeError>(is_contiguous(), "view: a tensor of shape ", shape_, " and strides ", strides_, " is not contiguous");
    infer_size(shape);
    return {storage_, data_, shape, row_major(shape)};
  }

  /// Repeats axes of size 1, and new axes in front, without copying: their stride is 0.
  template <std::size_t NewRank>
  Tensor<T, static_cast<int>(NewRank), D> expand(const std::array<Index, NewRank>& shape) const {
    static_assert(NewRank >= static_cast<std::size_t>(Rank), "expand: the new rank is smaller");
    Shape<static_cast<int>(NewRank)> strides{};
    constexpr std::size_t extra = NewRank - static_cast<std::size_t>(Rank);
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis) {
      const Index wanted = shape[axis + extra];
      check<ShapeError>(shape_[axis] == wanted || shape_[axis] == 1, "expand: shape ", shape_, " does not expand to ", shape);
      strides[axis + extra] = shape_[axis] == wanted ? strides_[axis] : 0;
    }
    return {storage_, data_, shape, strides};
  }

  /// The numbers in row-major order, on the host.
  std::vector<T> to_vector() const
    requires(!std::is_same_v<T, bool>)
  {
    check<ShapeError>(is_contiguous(), "to_vector: a tensor of shape ", shape_, " and strides ", strides_,
                      " is not contiguous");
    std::vector<T> out(static_cast<std::size_t>(numel()));
    copy_bytes(Cpu{}, out.data(), device(), data_, bytes());
    return out;
  }

 private:
  bool shape_has_zero() const { return std::find(shape_.begin(), shape_.end(), Index{0}) != shape_.end(); }

  template <std::size_t NewRank>
  void infer_size(std::array<Index, NewRank>& shape) const {
    Index known = 1, unknown = -1;
    for (std::size_t axis = 0; axis < NewRank; ++axis) {
      if (shape[axis] == -1 && unknown < 0)
        unknown = static_cast<Index>(axis);
      else
        known *= shape[axis];
    }
    const bool fits = unknown < 0 ? known == numel() : known > 0 && numel() % known == 0;
    check<ShapeError>(fits, "reshape: shape ", shape_, " does not fit ", shape);
    if (unknown >= 0) shape[static_cast<std::size_t>(unknown)] = numel() / known;
  }

  Storage<D> storage_;
  T* data_ = nullptr;
  Shape<Rank> shape_{};
  Shape<Rank> strides_{};
};

namespace detail {
template <class X>
inline constexpr bool is_tensor = false;
template <class T, int Rank, class D>
inline constexpr bool is_tensor<Tensor<T, Rank, D>> = true;
}  // namespace detail

/// Any Tensor.
template <class X>
concept AnyTensor = detail::is_tensor<std::remove_cvref_t<X>>;

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_TENSOR_HPP

namespace chorus::inline CHORUS_ABI {

/// The same numbers in dense row-major memory: `x` itself where it already is.
template <Scalar T, int Rank, Device D>
Tensor<T, Rank, D> contiguous(const Tensor<T, Rank, D>& x) {
  if (!x.defined() || x.is_contiguous()) return x;
  auto out = Tensor<T, Rank, D>::empty(x.shape(), x.device());
  kernels::copy_strided(x.device(), x.shape(), x.data(), x.strides(), out.data());
  return out;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CONTIGUOUS_HPP

namespace chorus::inline CHORUS_ABI {

/// Where a backward function writes the gradient of one input: dense memory, to be added to or overwritten.
template <Real T, int Rank, Device D>
struct GradTarget {
  Tensor<T, Rank, D> grad;
  bool accumulate = false;
  T* data() const { return grad.data(); }
};

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
  /// Forgets the gradient. The memory stays: the next contribution overwrites it.
  void zero_grad() {
    has_grad_ = false;
    if (!bound_ && grad_.storage().owners() > 1) grad_ = {};
  }
  const Shape<Rank>& shape() const { return shape_; }
  D device() const { return device_; }

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
    for (const auto& hook : hooks_) hook();
  }
  /// `hook` runs during each backward as soon as this leaf's gradient is complete.
  void add_hook(std::function<void()> hook) { hooks_.push_back(std::move(hook)); }
  void remove_hooks() { hooks_.clear(); }

 private:
  std::vector<std::function<void()>> hooks_;
};

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

  /// `hook` runs during each backward as soon as this leaf's gradient is complete. Throws UsageError on other values.
  void register_hook(std::function<void()> hook) const {
    check<UsageError>(node_ && node_->is_leaf(), "register_hook: not a leaf that requires a gradient");
    static_cast<LeafNode<T, Rank, D>&>(*node_).add_hook(std::move(hook));
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

/// An operation's node. `Inputs` are the types of the inputs' nodes.
template <class Backward, class T, int Rank, class D, class... Inputs>
class OperationNode final : public GradNode<T, Rank, D> {
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
    std::apply([&](const auto&... inputs) { (*saved_)(grad, inputs.get()...); }, inputs_);
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
  if (!(static_cast<bool>(inputs) || ...)) return Result(std::move(value));
  using Made = OperationNode<decltype(backward), typename Value::value_type, Value::rank, typename Value::device_type, Inputs...>;
  Ref<typename Result::node_type> node(new Made(operation, value, std::move(backward), std::move(inputs)...));
  return Result(std::move(value), std::move(node));
}

}  // namespace detail

/// Gives an operation's result a place on the tape. `backward(dy, dx...)` gets the gradient by the result, and for each
/// input a pointer to the node that collects its gradient (null where none is wanted). What it captures is what is saved.
/// Where all inputs are Tensors the result is the Tensor itself.
template <class T, int Rank, class D, class Backward, Operand... Inputs>
auto record(const char* operation, Tensor<T, Rank, D> value, Backward backward, const Inputs&... inputs) {
  if constexpr ((AnyTensor<Inputs> && ...)) {
    return value;
  } else {
    if (!grad_enabled()) return Variable<T, Rank, D>(std::move(value));
    return detail::make_operation(operation, std::move(value), std::move(backward), node_of(inputs)...);
  }
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_VARIABLE_HPP

// <chorus/core/philox.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_PHILOX_HPP
#define CHORUS_SINGLE_CHORUS_CORE_PHILOX_HPP
/// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
/// SC 2011). A number depends on its key and its counter alone, so that it doesn't matter which device, thread or rank
/// draws it, nor when.

namespace chorus::inline CHORUS_ABI {

using PhiloxWords = std::array<std::uint32_t, 4>;

/// Four random words for a counter under a key.
CHORUS_HD constexpr PhiloxWords philox(std::uint64_t key, PhiloxWords counter) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<std::uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

/// The upper 24 bits of a word as a float in [0, 1), exact on every device.
CHORUS_HD constexpr float unit_float(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_PHILOX_HPP

namespace chorus::inline CHORUS_ABI {

struct GradientCheckOptions {
  /// Half the distance of the two points of a central difference.
  double step = 1e-6;
};

/// Compares the gradients by all `inputs` (double, on the CPU) of `function(inputs...)`, a Variable of any shape, with
/// central differences. The output is weighted with fixed random numbers, so that errors don't cancel. Returns the
/// largest difference, relative to the largest gradient of that input (at least 1); 1e-6 is a good bound for smooth
/// functions.
template <class Function, int... Ranks>
double gradient_error(const Function& function, const GradientCheckOptions& options,
                      const Tensor<double, Ranks>&... inputs) {
  const auto weight = [](Index i) {
    return static_cast<double>(unit_float(philox(7, {static_cast<std::uint32_t>(i), 0, 0, 0})[0])) + 0.5;
  };
  const auto copy = []<int Rank>(const Tensor<double, Rank>& x) {
    auto out = Tensor<double, Rank>::empty(x.shape());
    const auto dense = contiguous(x);
    std::copy_n(dense.data(), dense.numel(), out.data());
    return out;
  };
  const std::tuple leaves{Variable(copy(inputs), true)...};
  const auto evaluate = [&] { return std::apply([&](const auto&... x) { return function(x...); }, leaves); };
  const auto weighted_sum = [&] {
    const auto value = contiguous(evaluate().value());
    double sum = 0;
    for (Index i = 0; i < value.numel(); ++i) sum += weight(i) * value.data()[i];
    return sum;
  };

  const auto output = evaluate();
  auto seed = std::remove_cvref_t<decltype(output.value())>::empty(output.shape());
  for (Index i = 0; i < seed.numel(); ++i) seed.data()[i] = weight(i);
  output.backward(seed);

  double worst = 0;
  const auto check_one = [&](const auto& leaf) {
    const auto grad = leaf.grad();
    double largest = 1, error = 0;
    for (Index i = 0; i < leaf.numel(); ++i) {
      double& x = leaf.value().data()[i];
      const double before = x;
      x = before + options.step;
      const double above = weighted_sum();
      x = before - options.step;
      const double below = weighted_sum();
      x = before;
      const double numeric = (above - below) / (2 * options.step);
      const double analytic = grad.defined() ? grad.data()[i] : 0;
      largest = std::max(largest, std::abs(numeric));
      error = std::max(error, std::abs(numeric - analytic));
      if (!(std::abs(numeric - analytic) >= 0)) error = INFINITY;  // NaN
    }
    worst = std::max(worst, error / largest);
  };
  std::apply([&](const auto&... leaf) { (check_one(leaf), ...); }, leaves);
  return worst;
}
template <class Function, int... Ranks>
double gradient_error(const Function& function, const Tensor<double, Ranks>&... inputs) {
  return gradient_error(function, GradientCheckOptions{}, inputs...);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_GRADIENT_CHECK_HPP

// <chorus/autograd/parameter.hpp>
#ifndef CHORUS_SINGLE_CHORUS_AUTOGRAD_PARAMETER_HPP
#define CHORUS_SINGLE_CHORUS_AUTOGRAD_PARAMETER_HPP
/// Parameter: a leaf Variable that a model owns, and Buffer: numbers that a model owns and no gradient goes to. A copy of a
/// handle shares the numbers; policies move them into flat buffers and copy them to other devices behind the handles.

namespace chorus::inline CHORUS_ABI {

/// A parameter whose scalar type and rank are known at run time only: what policies, optimizers and checkpoints work with.
template <Device D>
class ParameterOn {
 public:
  virtual ~ParameterOn() = default;
  virtual DType dtype() const = 0;
  virtual std::span<const Index> extents() const = 0;
  virtual D where() const = 0;
  virtual void* value_data() const = 0;
  /// The gradient's memory; null where there has been none yet.
  virtual void* grad_data() const = 0;
  /// Whether a gradient has arrived since the last `clear_grad`.
  virtual bool grad_arrived() const = 0;
  virtual void set_grad_arrived(bool arrived) = 0;
  virtual bool wants_grad() const = 0;
  virtual void set_wants_grad(bool wants) = 0;
  /// Grows whenever the value changes, so that replicas know what to fetch.
  std::uint64_t version() const { return version_; }
  /// To be called by whoever writes into the value's memory.
  void touch() { ++version_; }
  /// Moves value and gradient, contents included, to these places, which stay.
  virtual void bind(const Storage<D>& values, void* value, const Storage<D>& grads, void* grad) = 0;
  virtual void on_grad(std::function<void()> hook) = 0;
  /// A new parameter with the same value on another device.
  virtual Ref<Node> copy_to(D device) const = 0;

  Index count() const { return numel(extents()); }
  std::size_t size_bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype()); }

 private:
  std::uint64_t version_ = 1;
};

template <Real T, int Rank, Device D>
class ParameterNode final : public LeafNode<T, Rank, D>, public ParameterOn<D> {
 public:
  explicit ParameterNode(Tensor<T, Rank, D> value) : LeafNode<T, Rank, D>(value), value_(std::move(value)) {}

  const Tensor<T, Rank, D>& value() const { return value_; }

  DType dtype() const override { return chorus::dtype<T>; }
  std::span<const Index> extents() const override { return value_.shape(); }
  D where() const override { return value_.device(); }
  void* value_data() const override { return value_.data(); }
  void* grad_data() const override { return this->grad_memory().data(); }
  bool grad_arrived() const override { return this->has_grad(); }
  void set_grad_arrived(bool arrived) override { this->set_has_grad(arrived); }
  bool wants_grad() const override { return wants_grad_; }
  void set_wants_grad(bool wants) override { wants_grad_ = wants; }
  void bind(const Storage<D>& values, void* value, const Storage<D>& grads, void* grad) override {
    Tensor<T, Rank, D> place(values, static_cast<T*>(value), value_.shape(), row_major(value_.shape()));
    copy_bytes(place.device(), place.data(), value_.device(), value_.data(), value_.bytes());
    value_ = std::move(place);
    this->bind_grad({grads, static_cast<T*>(grad), value_.shape(), row_major(value_.shape())});
  }
  void on_grad(std::function<void()> hook) override { this->add_hook(std::move(hook)); }
  Ref<Node> copy_to(D device) const override {
    const MemoryScope scope(trace::Memory::parameters);
    auto copy = Tensor<T, Rank, D>::empty(value_.shape(), device);
    copy_bytes(device, copy.data(), value_.device(), value_.data(), value_.bytes());
    auto* made = new ParameterNode(std::move(copy));
    made->wants_grad_ = wants_grad_;
    return Ref<Node>(made);
  }

 private:
  Tensor<T, Rank, D> value_;
  bool wants_grad_ = true;
};

/// A handle to a parameter of unknown type.
class AnyParameter {
 public:
  explicit operator bool() const { return static_cast<bool>(node_); }
  const Ref<Node>& shared() const { return node_; }
  /// Makes this handle stand for another parameter of the same type; for policies that make replicas.
  void replace(Ref<Node> node) { node_ = std::move(node); }

  /// Throws DeviceError where the parameter is not on a device of kind `D`.
  template <Device D>
  ParameterOn<D>& on() const {
    auto* parameter = dynamic_cast<ParameterOn<D>*>(node_.get());
    check<DeviceError>(parameter != nullptr, "parameter: expected one on a ", D::kind, " device");
    return *parameter;
  }

 protected:
  Ref<Node> node_;
};

/// A leaf Variable that a model owns. An empty one stands for "there is none" (a layer without bias).
template <Real T, int Rank, Device D = Cpu>
class Parameter : public AnyParameter {
 public:
  using value_type = T;
  using device_type = D;
  static constexpr int rank = Rank;

  Parameter() = default;
  explicit Parameter(Tensor<T, Rank, D> value) {
    node_ = Ref<Node>(new ParameterNode<T, Rank, D>(std::move(value)));
  }

  const Tensor<T, Rank, D>& value() const {
    static const Tensor<T, Rank, D> none;
    return node_ ? typed().value() : none;
  }
  Tensor<T, Rank, D> grad() const { return typed().grad(); }
  const Shape<Rank>& shape() const { return value().shape(); }
  D device() const { return value().device(); }
  bool requires_grad() const { return typed().wants_grad(); }
  /// Without, no gradient is computed for it and optimizers leave it alone.
  void set_requires_grad(bool requires_grad) const { typed().set_wants_grad(requires_grad); }
  void zero_grad() const { typed().zero_grad(); }
  /// Copies numbers into the parameter. Throws ShapeError where the shapes differ.
  void assign(const Tensor<T, Rank, D>& numbers) const {
    check<ShapeError>(numbers.shape() == shape() && numbers.is_contiguous(), "Parameter::assign: expected a dense tensor of shape ",
                      shape(), ", got shape ", numbers.shape());
    copy_bytes(device(), value().data(), numbers.device(), numbers.data(), numbers.bytes());
    typed().touch();
  }
  void register_hook(std::function<void()> hook) const { typed().add_hook(std::move(hook)); }

  Variable<T, Rank, D> as_variable() const {
    if (!node_ || !requires_grad()) return Variable<T, Rank, D>(value());
    return {value(), Ref<GradNode<T, Rank, D>>(&typed())};
  }

 private:
  ParameterNode<T, Rank, D>& typed() const { return static_cast<ParameterNode<T, Rank, D>&>(*node_); }
};

/// A buffer whose scalar type and rank are known at run time only.
template <Device D>
class BufferOn {
 public:
  virtual ~BufferOn() = default;
  virtual DType dtype() const = 0;
  virtual std::span<const Index> extents() const = 0;
  virtual D where() const = 0;
  virtual void* data() const = 0;
  virtual Ref<Node> copy_to(D device) const = 0;

  Index count() const { return numel(extents()); }
  std::size_t size_bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype()); }
};

template <Scalar T, int Rank, Device D>
class BufferNode final : public Node, public BufferOn<D> {
 public:
  explicit BufferNode(Tensor<T, Rank, D> value) : Node("buffer"), value_(std::move(value)) {}
  void backward(bool) override {}
  void for_each_input(void (*)(Node&, void*), void*) const override {}
  bool is_leaf() const override { return true; }

  const Tensor<T, Rank, D>& value() const { return value_; }
  DType dtype() const override { return chorus::dtype<T>; }
  std::span<const Index> extents() const override { return value_.shape(); }
  D where() const override { return value_.device(); }
  void* data() const override { return value_.data(); }
  Ref<Node> copy_to(D device) const override {
    const MemoryScope scope(trace::Memory::parameters);
    auto copy = Tensor<T, Rank, D>::empty(value_.shape(), device);
    copy_bytes(device, copy.data(), value_.device(), value_.data(), value_.bytes());
    return Ref<Node>(new BufferNode(std::move(copy)));
  }

 private:
  Tensor<T, Rank, D> value_;
};

/// A handle to a buffer of unknown type.
class AnyBuffer {
 public:
  explicit operator bool() const { return static_cast<bool>(node_); }
  const Ref<Node>& shared() const { return node_; }
  /// Makes this handle stand for another buffer of the same type; for policies that make replicas.
  void replace(Ref<Node> node) { node_ = std::move(node); }

  /// Throws DeviceError where the buffer is not on a device of kind `D`.
  template <Device D>
  BufferOn<D>& on() const {
    auto* buffer = dynamic_cast<BufferOn<D>*>(node_.get());
    check<DeviceError>(buffer != nullptr, "buffer: expected one on a ", D::kind, " device");
    return *buffer;
  }

 protected:
  Ref<Node> node_;
};

/// Numbers that belong to a model and are saved with it, but are not trained (batch norm's running mean).
template <Scalar T, int Rank, Device D = Cpu>
class Buffer : public AnyBuffer {
 public:
  Buffer() = default;
  explicit Buffer(Tensor<T, Rank, D> value) { node_ = Ref<Node>(new BufferNode<T, Rank, D>(std::move(value))); }
  const Tensor<T, Rank, D>& value() const { return static_cast<BufferNode<T, Rank, D>&>(*node_).value(); }
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_AUTOGRAD_PARAMETER_HPP

// <chorus/core/random.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_RANDOM_HPP
#define CHORUS_SINGLE_CHORUS_CORE_RANDOM_HPP
/// Which random numbers an operation draws: keyed by seed, step, layer and the sample's place in the global batch, so that
/// a run gives the same numbers under every policy and on any number of devices.

namespace chorus::inline CHORUS_ABI {

namespace detail {
struct SeedState {
  std::atomic<std::uint64_t> seed{0};
  std::atomic<std::uint32_t> next_stream{0};
};
inline SeedState& seed_state() {
  static SeedState state;
  return state;
}
}  // namespace detail

/// Seeds the initialisation of layers and everything random that no policy seeds.
inline void manual_seed(std::uint64_t seed) {
  detail::seed_state().seed = seed;
  detail::seed_state().next_stream = 0;
}
inline std::uint64_t initial_seed() { return detail::seed_state().seed; }
/// A new stream of numbers; each initialised parameter takes one.
inline std::uint32_t next_random_stream() { return detail::seed_state().next_stream++; }

/// What the random operations of one forward pass draw from.
struct RandomContext {
  std::uint64_t seed = 0;
  /// Number of the forward pass.
  std::uint32_t step = 0;
  /// Counts the random operations of the pass.
  std::uint32_t next_operation = 0;
  /// Place, in the global batch, of this device's first sample. A function, since DistributedDataParallel has to ask.
  std::function<std::int64_t()> first_sample;
};

namespace detail {
inline RandomContext*& random_context() {
  thread_local RandomContext* context = nullptr;
  return context;
}
}  // namespace detail

/// While it lives, random operations of this thread draw from `context`.
class RandomScope {
 public:
  explicit RandomScope(RandomContext& context) : before_(std::exchange(detail::random_context(), &context)) {}
  ~RandomScope() { detail::random_context() = before_; }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  RandomContext* before_;
};

/// The key of one random operation.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint32_t step = 0, operation = 0;
  std::int64_t first_sample = 0;
};

/// The key for the next random operation of this thread. Outside of a policy each call is a pass of its own.
inline RandomKey next_random_key() {
  if (auto* context = detail::random_context())
    return {context->seed, context->step, context->next_operation++, context->first_sample ? context->first_sample() : 0};
  constexpr std::uint32_t outside_of_policies = 0xFFFFFFFFu;
  return {initial_seed(), next_random_stream(), outside_of_policies, 0};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_RANDOM_HPP

// <chorus/data/cifar10.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_CIFAR10_HPP
#define CHORUS_SINGLE_CHORUS_DATA_CIFAR10_HPP
/// CIFAR-10: 32 x 32 colour images of ten kinds of things, in its binary form: records of one label byte and 3072
/// pixels, red, green, blue (A. Krizhevsky: "Learning multiple layers of features from tiny images", 2009).

// <chorus/data/dataset.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_DATASET_HPP
#define CHORUS_SINGLE_CHORUS_DATA_DATASET_HPP
/// What a loader asks of a dataset, and the form that the library's own take: images as bytes in memory.

// <chorus/data/transforms.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_TRANSFORMS_HPP
#define CHORUS_SINGLE_CHORUS_DATA_TRANSFORMS_HPP
/// What happens to an image between the dataset and the batch. Random transforms draw from the sample's own stream,
/// keyed by (seed, epoch, sample), so that a sample looks the same whichever rank, device or worker prepares it.

// <chorus/data/random_stream.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_RANDOM_STREAM_HPP
#define CHORUS_SINGLE_CHORUS_DATA_RANDOM_STREAM_HPP
/// Random numbers of one sample: a Philox stream named by (key, place, lap), so that it is the same on any rank or
/// thread.

namespace chorus::inline CHORUS_ABI::data {

/// What a stream is for; streams of different purposes under one seed have nothing in common.
enum class Purpose : std::uint64_t {
  shuffle = 0x7368756666'6c6500ull,
  augment = 0x6175676d65'6e7400ull,
  generate = 0x67656e6572'617400ull,
};

/// A stream of random words: for augmentation `place` is the sample's index in the dataset and `lap` the epoch.
class RandomStream {
 public:
  RandomStream(std::uint64_t seed, Purpose purpose, Index place, Index lap)
      : key_(seed ^ static_cast<std::uint64_t>(purpose)),
        counter_{static_cast<std::uint32_t>(place), static_cast<std::uint32_t>(place >> 32),
                 static_cast<std::uint32_t>(lap), 0} {}

  /// 32 random bits.
  std::uint32_t word() {
    if (used_ == 4) {
      words_ = philox(key_, counter_);
      ++counter_[3];
      used_ = 0;
    }
    return words_[used_++];
  }

  /// In [0, 1).
  float uniform() { return unit_float(word()); }
  /// In [low, high).
  float uniform(float low, float high) { return low + (high - low) * uniform(); }

  /// A whole number in [0, count), for 0 < count < 2^32: the upper part of a 64-bit random number times `count`, so
  /// that no value is likelier than another by more than 2^-32.
  Index below(Index count) {
    const auto n = static_cast<std::uint64_t>(count);
    const std::uint64_t high = word(), low = word();
    return static_cast<Index>((high * n + (low * n >> 32)) >> 32);
  }

 private:
  std::uint64_t key_;
  PhiloxWords counter_;
  PhiloxWords words_{};
  std::size_t used_ = 4;
};

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_RANDOM_STREAM_HPP

namespace chorus::inline CHORUS_ABI::data {

/// {channels, height, width}.
using ImageShape = std::array<Index, 3>;

/// One image being prepared, channel after channel, row after row; pixels in [0, 1] until they are normalised.
struct Image {
  std::span<float> pixels;
  ImageShape shape;

  std::span<float> row(Index channel, Index y) const {
    const auto width = static_cast<std::size_t>(shape[2]);
    return pixels.subspan(static_cast<std::size_t>(channel * shape[1] + y) * width, width);
  }
};

/// Changes an image in place. It is called on several threads at once; any function object of this form will do.
using Transform = std::function<void(const Image&, RandomStream&)>;

/// (pixel - mean) / stddev, per channel.
struct Normalize {
  std::vector<float> mean, stddev;

  void operator()(const Image& image, RandomStream&) const {
    const auto channels = static_cast<std::size_t>(image.shape[0]);
    check<ShapeError>(mean.size() == channels && stddev.size() == channels,
                      "Normalize: expected a mean and a stddev for ", "each of ", channels, " channels, got ",
                      mean.size(), " and ", stddev.size());
    const std::size_t area = image.pixels.size() / channels;
    for (std::size_t c = 0; c < channels; ++c) {
      const float scale = 1 / stddev[c], shift = -mean[c] / stddev[c];
      for (float& pixel : image.pixels.subspan(c * area, area)) pixel = pixel * scale + shift;
    }
  }
};

/// Mirrors left and right.
struct RandomHorizontalFlip {
  float probability = 0.5f;

  void operator()(const Image& image, RandomStream& random) const {
    if (random.uniform() >= probability) return;
    for (Index c = 0; c < image.shape[0]; ++c)
      for (Index y = 0; y < image.shape[1]; ++y) std::ranges::reverse(image.row(c, y));
  }
};

/// Pads all sides with `padding` zeros and cuts a window of the old size out of a random place: a shift of up to
/// `padding`.
struct RandomCrop {
  Index padding = 4;

  void operator()(const Image& image, RandomStream& random) const {
    const auto [channels, height, width] = image.shape;
    check<ShapeError>(padding >= 0 && padding <= std::min(height, width),
                      "RandomCrop: expected a padding from 0 to the ", "image's size, got ", padding, " for ", height,
                      " x ", width);
    // Output row y is input row y + down, moved left by `right`; both in [-padding, padding].
    const Index down = random.below(2 * padding + 1) - padding, right = random.below(2 * padding + 1) - padding;
    const auto kept = static_cast<std::size_t>(width - std::abs(right));
    for (Index c = 0; c < channels; ++c)
      for (Index i = 0; i < height; ++i) {
        const Index y = down >= 0 ? i : height - 1 - i;  // a row is read before it is overwritten
        const auto to = image.row(c, y);
        if (y + down < 0 || y + down >= height) {
          std::ranges::fill(to, 0.0f);
          continue;
        }
        const auto from = image.row(c, y + down);
        const auto skip = static_cast<std::size_t>(std::abs(right));
        std::memmove(to.data() + (right < 0 ? skip : 0), from.data() + (right > 0 ? skip : 0), kept * sizeof(float));
        std::ranges::fill(right < 0 ? to.first(skip) : to.last(skip), 0.0f);
      }
  }
};

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_TRANSFORMS_HPP

namespace chorus::inline CHORUS_ABI::data {

/// Which part of a dataset.
enum class Split : std::uint8_t { train, test };

constexpr std::string_view name(Split split) { return split == Split::train ? "train" : "test"; }

/// A numbered collection of labelled images of one size. `get(i, image)` fills `image`, [channels, height, width] with
/// pixels in [0, 1], and returns the label, in [0, classes()); it is called on several threads at once, and it has to
/// return: a loader waits for it. A dataset may also have `Normalize normalization() const`, which a loader applies by
/// default.
template <class D>
concept Dataset = requires(const D& dataset, Index i, std::span<float> image) {
  { dataset.size() } -> std::convertible_to<Index>;
  { dataset.classes() } -> std::convertible_to<Index>;
  { dataset.image_shape() } -> std::convertible_to<ImageShape>;
  { dataset.get(i, image) } -> std::convertible_to<std::int64_t>;
};

/// Images and labels in memory, a byte a pixel and a byte a label. Mnist, Cifar10 and SyntheticImages are ways to fill
/// one, so that a program can choose between them at run time: `ImageDataset train = SyntheticImages{8000, seed};`
class ImageDataset {
 public:
  /// `pixels`: [labels.size(), channels, height, width]. Throws UsageError where the sizes don't fit.
  ImageDataset(ImageShape shape, std::vector<std::uint8_t> pixels, std::vector<std::uint8_t> labels, Index classes,
               Normalize normalization)
      : shape_(shape),
        pixels_(std::move(pixels)),
        labels_(std::move(labels)),
        classes_(classes),
        normalization_(std::move(normalization)) {
    check<UsageError>(pixels_.size() == labels_.size() * pixels_per_image(), "ImageDataset: ", pixels_.size(),
                      " pixels are not ", labels_.size(), " images of shape ", shape_);
  }

  Index size() const { return static_cast<Index>(labels_.size()); }
  Index classes() const { return classes_; }
  const ImageShape& image_shape() const { return shape_; }
  /// Mean and standard deviation of the pixels by channel, as they are commonly used with this dataset.
  const Normalize& normalization() const { return normalization_; }

  std::int64_t get(Index i, std::span<float> image) const {
    check<UsageError>(i >= 0 && i < size(), "dataset: sample ", i, " is not in [0, ", size(), ")");
    const std::size_t count = pixels_per_image(), at = static_cast<std::size_t>(i);
    check<ShapeError>(image.size() == count, "dataset: expected room for ", count, " pixels, got ", image.size());
    const std::uint8_t* bytes = pixels_.data() + at * count;
    for (std::size_t p = 0; p < count; ++p) image[p] = static_cast<float>(bytes[p]) / 255.0f;
    return labels_[at];
  }

 private:
  std::size_t pixels_per_image() const { return static_cast<std::size_t>(shape_[0] * shape_[1] * shape_[2]); }

  ImageShape shape_;
  std::vector<std::uint8_t> pixels_, labels_;
  Index classes_;
  Normalize normalization_;
};

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_DATASET_HPP

// <chorus/data/file.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_FILE_HPP
#define CHORUS_SINGLE_CHORUS_DATA_FILE_HPP
/// Files of a dataset: opened once, sized, read in order; each error names the path.

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>

namespace chorus::inline CHORUS_ABI::data {

inline bool file_exists(const std::string& path) {
  struct stat facts {};
  return ::stat(path.c_str(), &facts) == 0;
}

/// Throws FileError unless `path` is a folder.
inline void require_folder(std::string_view reader, const std::string& path) {
  struct stat facts {};
  check<FileError>(::stat(path.c_str(), &facts) == 0, reader, ": folder ", path, ": ", std::strerror(errno));
  check<FileError>(S_ISDIR(facts.st_mode), reader, ": ", path, " is not a folder");
}

/// A regular file, open for reading.
class InputFile {
 public:
  /// Throws FileError where the file can't be opened, or is a folder, a pipe or a device.
  explicit InputFile(std::string path) : path_(std::move(path)), file_(std::fopen(path_.c_str(), "rb")) {
    check<FileError>(file_ != nullptr, path_, ": ", std::strerror(errno));
    struct stat facts {};
    const bool regular = ::fstat(::fileno(file_), &facts) == 0 && S_ISREG(facts.st_mode);
    if (!regular) std::fclose(file_);
    check<FileError>(regular, path_, " is not a regular file");
    size_ = static_cast<std::uint64_t>(facts.st_size);
  }
  ~InputFile() { std::fclose(file_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }

  /// Fills `to` as far as the file goes; returns the number of bytes.
  std::size_t read(std::span<std::uint8_t> to) {
    const std::size_t count = std::fread(to.data(), 1, to.size(), file_);
    check<FileError>(std::ferror(file_) == 0, path_, ": reading failed: ", std::strerror(errno));
    return count;
  }

 private:
  std::string path_;
  std::FILE* file_;
  std::uint64_t size_ = 0;
};

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_FILE_HPP

namespace chorus::inline CHORUS_ABI::data {

/// Images of shape {3, 32, 32} and labels from 0 to 9.
class Cifar10 : public ImageDataset {
 public:
  /// Reads `data_batch_1.bin` to `data_batch_5.bin` (for the test split `test_batch.bin`) from the folder or from
  /// `cifar-10-batches-bin` in it. Throws FileError with the path where one is missing, or its size or a label is
  /// wrong.
  explicit Cifar10(const std::string& folder, Split split = Split::train) : ImageDataset(read(folder, split)) {}

  /// Where the binary batches lie: the folder, or `cifar-10-batches-bin` in it; nothing where neither has any.
  static std::string find(const std::string& folder) {
    const auto has_batches = [](const std::string& place) {
      return file_exists(place + "/data_batch_1.bin") || file_exists(place + "/test_batch.bin");
    };
    if (has_batches(folder)) return folder;
    const std::string inside = folder + "/cifar-10-batches-bin";
    return has_batches(inside) ? inside : std::string();
  }

 private:
  static constexpr std::size_t pixels_per_image = 3 * 32 * 32;

  static ImageDataset read(const std::string& folder, Split split) {
    require_folder("Cifar10", folder);
    const std::string place = find(folder);
    check<FileError>(!place.empty(), "Cifar10: folder ", folder,
                     " has neither data_batch_1.bin nor test_batch.bin, nor has ", "cifar-10-batches-bin in it");
    std::vector<std::uint8_t> pixels, labels;
    if (split == Split::test) {
      read_batch(place + "/test_batch.bin", pixels, labels);
    } else {
      for (const char digit : {'1', '2', '3', '4', '5'})
        read_batch(place + "/data_batch_" + digit + ".bin", pixels, labels);
    }
    return {{3, 32, 32},
            std::move(pixels),
            std::move(labels),
            10,
            {{0.4914f, 0.4822f, 0.4465f}, {0.2470f, 0.2435f, 0.2616f}}};
  }

  static void read_batch(const std::string& path, std::vector<std::uint8_t>& pixels,
                         std::vector<std::uint8_t>& labels) {
    InputFile file(path);
    constexpr std::size_t record_size = 1 + pixels_per_image;
    check<FileError>(file.size() != 0 && file.size() % record_size == 0, "Cifar10: ", path,
                     ": expected a whole number of ", record_size,
                     "-byte records (a label and 3 x 32 x 32 pixels), got ", file.size(), " bytes");
    const std::size_t first = labels.size(), last = first + file.size() / record_size;
    labels.resize(last);
    pixels.resize(last * pixels_per_image);
    for (std::size_t i = first; i < last; ++i) {
      const std::size_t got = file.read({&labels[i], 1}) + file.read({&pixels[i * pixels_per_image], pixels_per_image});
      check<FileError>(got == record_size, "Cifar10: ", path, ": cut short in record ", i - first);
      check<FileError>(labels[i] < 10, "Cifar10: ", path, ": the label of record ", i - first, " is ", int{labels[i]},
                       ", expected 0 to 9");
    }
  }
};

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_CIFAR10_HPP

// <chorus/data/loader.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_LOADER_HPP
#define CHORUS_SINGLE_CHORUS_DATA_LOADER_HPP
/// DataLoader: batches of a dataset as tensors, prepared by background threads while the caller trains on the one
/// before.

// <chorus/data/prefetch.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_PREFETCH_HPP
#define CHORUS_SINGLE_CHORUS_DATA_PREFETCH_HPP
/// Items made ahead of time on background threads and handed out in order.

#include <condition_variable>
#include <thread>

namespace chorus::inline CHORUS_ABI::data {

/// Calls `make(i)` for i = first, ..., count - 1 on `workers` threads, at most `ahead` items before the one that is
/// taken next; with 0 workers, on the caller's thread. A thread can't be stopped from outside: `make` has to return.
template <class Item>
class Prefetch {
 public:
  Prefetch(Index first, Index count, int workers, Index ahead, std::function<Item(Index)> make)
      : make_(std::move(make)), count_(count), claimed_(first), taken_(first), slots_(static_cast<std::size_t>(ahead)) {
    try {
      for (int i = 0; i < std::min<Index>(workers, count - first); ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Prefetch() { stop(); }
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  /// The next item; none after the last. Rethrows what `make` threw for it, and has no item after that.
  std::optional<Item> next() {
    if (taken_ >= count_) return std::nullopt;
    if (threads_.empty()) {
      const Index i = std::exchange(taken_, count_);  // the end, should make_ throw
      std::optional<Item> item = make_(i);
      taken_ = i + 1;
      return item;
    }
    Slot slot;
    {
      std::unique_lock lock(mutex_);
      Slot& mine = slots_[index(taken_)];
      ready_.wait(lock, [&] { return mine.item || mine.error; });
      slot = std::exchange(mine, {});
      taken_ = slot.error ? count_ : taken_ + 1;
    }
    room_.notify_one();
    if (slot.error) std::rethrow_exception(slot.error);
    return std::move(slot.item);
  }

 private:
  struct Slot {
    std::optional<Item> item;
    std::exception_ptr error;
  };

  std::size_t index(Index i) const { return static_cast<std::size_t>(i) % slots_.size(); }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      room_.wait(lock, [&] { return claimed_ >= count_ || claimed_ < taken_ + static_cast<Index>(slots_.size()); });
      if (claimed_ >= count_) return;
      const Index i = claimed_++;
      lock.unlock();
      Slot made;
      try {
        made.item = make_(i);
      } catch (...) {
        made.error = std::current_exception();
      }
      lock.lock();
      slots_[index(i)] = std::move(made);
      ready_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      claimed_ = count_;
    }
    room_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  std::function<Item(Index)> make_;
  Index count_;
  std::mutex mutex_;
  std::condition_variable room_, ready_;
  Index claimed_, taken_;  // the next item to be made, and to be handed out
  std::vector<Slot> slots_;
  std::vector<std::thread> threads_;
};

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_PREFETCH_HPP

// <chorus/data/sampler.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_SAMPLER_HPP
#define CHORUS_SINGLE_CHORUS_DATA_SAMPLER_HPP
/// Which samples a rank trains on, in which order: one order per (seed, epoch), cut into global batches, each shared
/// out.

// <chorus/kernels/cpu/random.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_RANDOM_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_RANDOM_HPP
/// Random numbers on the CPU, counter-based: number i of a stream depends on (seed, stream, i) alone, so that any part
/// of the stream can be drawn anywhere. A stream is a purpose: a parameter's number, an epoch.

#include <numbers>
#include <numeric>

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
/// Four random words for draw number `counter` of a stream.
constexpr PhiloxWords stream_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t counter) {
  return philox(seed, {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                       static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)});
}

/// out[i] = numbers(words of draw (offset + i) / N)[(offset + i) % N]: N numbers from each draw.
template <int N, class T, class Numbers>
void fill_from_stream(std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out,
                      const Numbers& numbers) {
  for (Index i = 0; i < count;) {
    const Index at = offset + i;
    const std::array<T, N> drawn = numbers(stream_words(seed, stream, static_cast<std::uint64_t>(at / N)));
    for (Index lane = at % N; lane < N && i < count; ++lane) out[i++] = drawn[static_cast<std::size_t>(lane)];
  }
}
}  // namespace detail

/// Numbers `offset` to `offset + count - 1` of a stream, uniform in [lo, hi): 24 random bits for a float, 53 for a
/// double. The floats have the same bits on every device.
template <class T>
void fill_uniform(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T lo, T hi) {
  const double start = static_cast<double>(lo), width = static_cast<double>(hi) - start;
  const T last = std::nextafter(hi, lo);
  // In double the product is exact for floats, so that it doesn't matter whether the compiler fuses it with the sum.
  const auto scaled = [&](double unit) { return std::min(last, static_cast<T>(start + width * unit)); };
  if constexpr (sizeof(T) == 4) {
    detail::fill_from_stream<4>(seed, stream, offset, count, out, [&](const PhiloxWords& words) {
      const auto number = [&](std::uint32_t word) { return scaled(static_cast<double>(unit_float(word))); };
      return std::array<T, 4>{number(words[0]), number(words[1]), number(words[2]), number(words[3])};
    });
  } else {
    detail::fill_from_stream<2>(seed, stream, offset, count, out, [&](const PhiloxWords& words) {
      const auto number = [&](std::uint32_t high, std::uint32_t low) {
        return scaled(static_cast<double>((std::uint64_t{high} << 32 | low) >> 11) * 0x1p-53);
      };
      return std::array<T, 2>{number(words[0], words[1]), number(words[2], words[3])};
    });
  }
}

/// Numbers `offset` to `offset + count - 1` of a stream, normally distributed (Box and Muller 1958, in double).
template <class T>
void fill_normal(Cpu, std::uint64_t seed, std::uint64_t stream, Index offset, Index count, T* out, T mean,
                 T deviation) {
  const double centre = static_cast<double>(mean), spread = static_cast<double>(deviation);
  detail::fill_from_stream<4>(seed, stream, offset, count, out, [&](const PhiloxWords& words) {
    std::array<T, 4> numbers;
    for (std::size_t i = 0; i < 4; i += 2) {
      const double radius = spread * std::sqrt(-2 * std::log((words[i] + 1.0) * 0x1p-32));
      const double angle = 2 * std::numbers::pi * (words[i + 1] * 0x1p-32);
      numbers[i] = static_cast<T>(centre + radius * std::cos(angle));
      numbers[i + 1] = static_cast<T>(centre + radius * std::sin(angle));
    }
    return numbers;
  });
}

/// The numbers 0 to n - 1 in random order (Fisher and Yates; Durstenfeld 1964).
inline std::vector<Index> permutation(std::uint64_t seed, std::uint64_t stream, Index n) {
  __extension__ using Wide = unsigned __int128;
  std::vector<Index> order(static_cast<std::size_t>(std::max(Index{0}, n)));
  std::iota(order.begin(), order.end(), Index{0});
  for (std::size_t i = order.size(); i > 1; --i) {
    const PhiloxWords words = detail::stream_words(seed, stream, i);
    const std::uint64_t bits = std::uint64_t{words[0]} << 32 | words[1];
    const auto j = static_cast<std::size_t>(Wide{bits} * i >> 64);  // uniform in [0, i), but for 2^-64
    std::swap(order[i - 1], order[j]);
  }
  return order;
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_RANDOM_HPP

namespace chorus::inline CHORUS_ABI::data {

struct SamplerOptions {
  int rank = 0;
  int world_size = 1;
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// Repeat samples so that all shares of a batch have one size.
  bool padding = false;
};

/// The order of an epoch and each rank's share of it. It depends on seed and epoch alone, so that a global batch is the
/// same set of samples for any number of ranks: with one seed, training on 1, 2 or 3 ranks sees the same data.
///
/// Of a global batch of n samples each rank gets a contiguous share of n / world_size; the first n % world_size ranks
/// get one more. A last batch with fewer samples than ranks leaves some with an empty share.
///
/// With `padding` each share has ceil(n / world_size) samples, and where the data end, the epoch's first samples come
/// again: the sets of PyTorch's DistributedSampler. It needs no uneven shares, but it counts some samples twice:
/// gradients are a little off, and an accuracy measured over padded shares is wrong. Measure without it.
class Sampler {
 public:
  /// Throws UsageError where the size is negative or the rank isn't in [0, world_size).
  explicit Sampler(Index dataset_size, SamplerOptions options = {}) : size_(dataset_size), options_(options) {
    check<UsageError>(size_ >= 0, "Sampler: expected a dataset of at least 0 samples, got ", size_);
    check<UsageError>(options_.world_size >= 1, "Sampler: expected a world size of at least 1, got ",
                      options_.world_size);
    check<UsageError>(options_.rank >= 0 && options_.rank < options_.world_size, "Sampler: rank ", options_.rank,
                      " is not in [0, ", options_.world_size, "), the ranks of a world of ", options_.world_size);
    make_order();
  }

  /// Takes the order of another epoch; without a call each epoch has that of epoch 0. All ranks must say the same.
  void set_epoch(Index epoch) {
    check<UsageError>(epoch >= 0, "Sampler: expected an epoch of at least 0, got ", epoch);
    if (std::exchange(epoch_, epoch) != epoch && options_.shuffle) make_order();
  }

  Index dataset_size() const { return size_; }
  Index epoch() const { return epoch_; }
  const SamplerOptions& options() const { return options_; }

  /// The samples of the epoch in order, of all ranks.
  std::span<const Index> order() const& { return std::span(order_).first(static_cast<std::size_t>(size_)); }
  std::span<const Index> order() const&& = delete;

  /// Number of batches of `batch` samples over all ranks. Throws UsageError where a batch has fewer samples than the
  /// world has ranks.
  Index global_batches(Index batch, bool drop_last = false) const {
    check_batch(batch);
    return drop_last ? size_ / batch : (size_ + batch - 1) / batch;
  }

  /// Number of samples of global batch `b`, over all ranks and without padding.
  Index global_size(Index b, Index batch) const { return std::min(batch, size_ - b * batch); }

  /// The place in global batch `b` at which this rank's share starts.
  Index share_begin(Index b, Index batch) const { return boundary(global_size(b, batch), options_.rank); }

  /// This rank's samples of global batch `b`; valid until the epoch changes.
  std::span<const Index> share(Index b, Index batch) const& {
    check_batch(batch);
    check<UsageError>(b >= 0 && b * batch < size_, "Sampler: batch ", b, " of ", batch, " does not exist in ", size_,
                      " samples");
    const Index count = global_size(b, batch);
    const Index begin = boundary(count, options_.rank), end = boundary(count, options_.rank + 1);
    return std::span(order_).subspan(static_cast<std::size_t>(b * batch + begin),
                                     static_cast<std::size_t>(end - begin));
  }
  std::span<const Index> share(Index, Index) const&& = delete;  // would refer to a sampler that is gone

 private:
  void check_batch(Index batch) const {
    check<UsageError>(batch >= options_.world_size, "Sampler: a global batch of ", batch,
                      " samples can't be shared among ", options_.world_size, " ranks: each needs at least one");
  }

  /// The place in a global batch of `count` samples at which the share of `rank` starts and that of the rank before
  /// ends.
  Index boundary(Index count, int rank) const {
    const Index world = options_.world_size;
    if (options_.padding) return rank * ((count + world - 1) / world);
    return rank * (count / world) + std::min<Index>(rank, count % world);
  }

  void make_order() {
    if (options_.shuffle) {
      const auto key = options_.seed ^ static_cast<std::uint64_t>(Purpose::shuffle);
      order_ = kernels::permutation(key, static_cast<std::uint64_t>(epoch_), size_);
    } else {
      order_.resize(static_cast<std::size_t>(size_));
      std::iota(order_.begin(), order_.end(), Index{0});
    }
    // Padding reads on past the end by at most world_size - 1 samples: the first ones again.
    if (options_.padding && size_ > 0)
      for (int i = 0; i + 1 < options_.world_size; ++i) order_.push_back(order_[static_cast<std::size_t>(i)]);
  }

  Index size_;
  SamplerOptions options_;
  Index epoch_ = 0;
  std::vector<Index> order_;
};

/// PyTorch's name for a sampler with a rank and a world size; a world of one takes the same path.
using DistributedSampler = Sampler;

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_SAMPLER_HPP

#include <iterator>

namespace chorus::inline CHORUS_ABI::data {

/// One rank's share of a global batch: `auto& [images, labels] = batch;`.
struct Batch {
  Tensor<float, 4> images;         ///< [samples, channels, height, width]; samples is 0 where the share is empty
  Tensor<std::int64_t, 1> labels;  ///< [samples]
  Index index = 0;                 ///< number of the batch in its epoch
  Index global_size = 0;           ///< samples in the global batch, over all ranks
  Index first_sample = 0;          ///< place of images[0] in the global batch

  template <std::size_t I>
  auto& get() {
    return std::get<I>(std::tie(images, labels));
  }
  template <std::size_t I>
  auto& get() const {
    return std::get<I>(std::tie(images, labels));
  }
};

struct LoaderOptions {
  Index batch = 64;        ///< samples in a global batch: shared out among the ranks
  int workers = 2;         ///< threads that prepare batches; 0: the caller's thread does
  int prefetch = 2;        ///< batches that each worker may be ahead
  bool drop_last = false;  ///< leave out a last batch that isn't full
  bool normalize = true;   ///< apply the dataset's own normalisation, where it has one, after the transforms
  std::vector<Transform> transforms = {};
};

/// Batches of `dataset`, in the order and the shares of `sampler`; the loader keeps a reference to the dataset, which
/// must outlive it. Each pass of `for (auto& [images, labels] : loader)` is an epoch; the same one again unless
/// `set_epoch` says otherwise. Threads live from begin() to the end of the epoch, to the next begin() or to the
/// loader's destruction. What a worker throws is rethrown to the caller, at the batch where it happened.
template <Dataset D>
class DataLoader {
 public:
  /// Throws UsageError where the sampler is for another size, or an option makes no sense.
  DataLoader(const D& dataset, Sampler sampler, LoaderOptions options = {})
      : dataset_(dataset), sampler_(std::move(sampler)), options_(std::move(options)) {
    check<UsageError>(sampler_.dataset_size() == dataset.size(), "DataLoader: the sampler is for ",
                      sampler_.dataset_size(), " samples, the dataset has ", dataset.size());
    check<UsageError>(options_.batch >= 1, "DataLoader: expected a batch of at least 1, got ", options_.batch);
    check<UsageError>(options_.workers >= 0 && options_.workers <= 1024, "DataLoader: expected 0 to 1024 workers, got ",
                      options_.workers);
    check<UsageError>(options_.prefetch >= 1 && options_.prefetch <= 1024,
                      "DataLoader: expected to prefetch 1 to 1024 ", "batches a worker, got ", options_.prefetch);
    batches_ = sampler_.global_batches(options_.batch, options_.drop_last);
    if constexpr (requires {
                    { dataset.normalization() } -> std::convertible_to<Normalize>;
                  })
      if (options_.normalize) options_.transforms.push_back(dataset.normalization());
  }
  DataLoader(const D&&, Sampler, LoaderOptions = {}) = delete;  // the dataset would be gone at once
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// Batches in an epoch.
  Index size() const { return batches_; }
  const D& dataset() const { return dataset_; }
  const Sampler& sampler() const { return sampler_; }

  /// Takes the order and the augmentation of another epoch, from the next begin() on; an epoch that is under way ends.
  void set_epoch(Index epoch) {
    running_.reset();
    sampler_.set_epoch(epoch);
  }

  /// Lets the next epoch start at batch `batches`, to go on where an earlier run was left; the one after is whole
  /// again.
  void skip(Index batches) {
    check<UsageError>(batches >= 0 && batches <= batches_, "DataLoader: can't skip ", batches, " batches of ",
                      batches_);
    skip_ = batches;
  }

  /// Reads the batches one by one; all iterators of a loader are the same place.
  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(DataLoader& loader) : loader_(&loader) {}
    Batch& operator*() const { return *loader_->current_; }
    Iterator& operator++() {
      loader_->advance();
      return *this;
    }
    void operator++(int) { loader_->advance(); }
    bool operator==(std::default_sentinel_t) const { return !loader_->current_; }

   private:
    DataLoader* loader_;
  };

  Iterator begin() {
    running_.reset();
    const Index ahead = Index{options_.prefetch} * std::max(options_.workers, 1);
    running_.emplace(std::exchange(skip_, 0), batches_, options_.workers, ahead, [this](Index b) { return make(b); });
    advance();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  void advance() {
    current_.reset();  // its memory is free for the next batch to be made
    if (running_) current_ = running_->next();
    if (!current_) running_.reset();
  }

  /// Called on the workers' threads.
  Batch make(Index b) const {
    const auto samples = sampler_.share(b, options_.batch);
    const ImageShape shape = dataset_.image_shape();
    const auto count = static_cast<Index>(samples.size());
    Batch out{.images = Tensor<float, 4>::empty({count, shape[0], shape[1], shape[2]}),
              .labels = Tensor<std::int64_t, 1>::empty({count}),
              .index = b,
              .global_size = sampler_.global_size(b, options_.batch),
              .first_sample = sampler_.share_begin(b, options_.batch)};
    const auto pixels = static_cast<std::size_t>(shape[0] * shape[1] * shape[2]);
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const Image image{{out.images.data() + i * pixels, pixels}, shape};
      out.labels.data()[i] = dataset_.get(samples[i], image.pixels);
      RandomStream random(sampler_.options().seed, Purpose::augment, samples[i], sampler_.epoch());
      for (const auto& transform : options_.transforms) transform(image, random);
    }
    return out;
  }

  const D& dataset_;
  Sampler sampler_;
  LoaderOptions options_;
  Index batches_ = 0, skip_ = 0;
  std::optional<Batch> current_;
  std::optional<Prefetch<Batch>> running_;  // last: its threads read the members above
};

}  // namespace chorus::inline CHORUS_ABI::data

// A batch takes part in structured bindings as its images and labels.
template <>
struct std::tuple_size<chorus::data::Batch> : std::integral_constant<std::size_t, 2> {};
template <>
struct std::tuple_element<0, chorus::data::Batch> {
  using type = chorus::Tensor<float, 4>;
};
template <>
struct std::tuple_element<1, chorus::data::Batch> {
  using type = chorus::Tensor<std::int64_t, 1>;
};
#endif  // CHORUS_SINGLE_CHORUS_DATA_LOADER_HPP

// <chorus/data/mnist.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_MNIST_HPP
#define CHORUS_SINGLE_CHORUS_DATA_MNIST_HPP
/// MNIST: 28 x 28 grey images of handwritten digits, in a folder of IDX files, plain or compressed. Fashion-MNIST and
/// KMNIST come in the same files.

// <chorus/data/idx.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_IDX_HPP
#define CHORUS_SINGLE_CHORUS_DATA_IDX_HPP
/// Reads IDX files, MNIST's format: two zero bytes, a type (8: unsigned bytes), the number of axes, one big-endian
/// 32-bit size for each axis, then the values, the last axis fastest (Y. LeCun, C. Cortes, C. Burges: "The MNIST
/// database").

// <chorus/data/gzip.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_GZIP_HPP
#define CHORUS_SINGLE_CHORUS_DATA_GZIP_HPP
/// Files compressed with gzip, through zlib where the build has it.

#if CHORUS_USE_ZLIB
#include <zlib.h>
#endif

namespace chorus::inline CHORUS_ABI::data {

#if CHORUS_USE_ZLIB

/// Decompresses a file in order. Only as many bytes as are asked for are ever made, so that a small file can't fill
/// memory.
class GzipFile {
 public:
  explicit GzipFile(std::string path) : file_(std::move(path)), input_(std::size_t{1} << 16) {
    constexpr int gzip_format = 16;
    check<FileError>(inflateInit2(&stream_, MAX_WBITS + gzip_format) == Z_OK, file_.path(), ": zlib could not start");
  }
  ~GzipFile() { inflateEnd(&stream_); }
  GzipFile(const GzipFile&) = delete;
  GzipFile& operator=(const GzipFile&) = delete;

  const std::string& path() const { return file_.path(); }

  /// The decompressed size can't be above this: deflate shrinks by a factor of 1032 at most.
  std::uint64_t size_limit() const { return file_.size() * 1032; }

  /// Fills `to` as far as the data go; returns the number of bytes. Throws FileError where the data are corrupt or cut
  /// short.
  std::size_t read(std::span<std::uint8_t> to) {
    std::size_t done = 0;
    while (done < to.size() && !ended_) {
      refill();
      const std::size_t wanted = std::min(to.size() - done, std::size_t{1} << 30);  // zlib counts in unsigned int
      stream_.next_out = to.data() + done;
      stream_.avail_out = static_cast<uInt>(wanted);
      const int status = inflate(&stream_, Z_NO_FLUSH);
      done += wanted - stream_.avail_out;
      ended_ = status == Z_STREAM_END;
      check<FileError>(ended_ || status == Z_OK, path(),
                       ": corrupt gzip data: ", stream_.msg != nullptr ? stream_.msg : zError(status));
    }
    return done;
  }

  /// True where nothing but the gzip data is in the file; to be asked after all was read.
  bool at_end() {
    std::uint8_t byte = 0;
    return read({&byte, 1}) == 0 && stream_.avail_in == 0 && file_.read({&byte, 1}) == 0;
  }

 private:
  void refill() {
    if (stream_.avail_in != 0) return;
    const std::size_t count = file_.read(input_);
    check<FileError>(count != 0, path(), ": cut short: the gzip data of ", file_.size(), " bytes have no end");
    stream_.next_in = input_.data();
    stream_.avail_in = static_cast<uInt>(count);
  }

  InputFile file_;
  std::vector<std::uint8_t> input_;
  z_stream stream_{};
  bool ended_ = false;
};

#else

/// Stands in where the build has no zlib: throws FileError.
class GzipFile {
 public:
  explicit GzipFile(const std::string& path) {
    fail<FileError>(
        path, ": this program was built without zlib (CHORUS_USE_ZLIB=0) and can't read .gz files: decompress it ",
        "with gunzip, or build with zlib");
  }
  std::uint64_t size_limit() const { return 0; }
  std::size_t read(std::span<std::uint8_t>) { return 0; }
  bool at_end() { return true; }
};

#endif

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_GZIP_HPP

namespace chorus::inline CHORUS_ABI::data {

/// Bytes in row-major order, with their sizes.
struct IdxArray {
  std::vector<Index> sizes;
  std::vector<std::uint8_t> values;
};

namespace detail {

inline std::uint32_t big_endian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 | bytes[3];
}

// A plain file's size is known, so it has to fit; a compressed one only sets a limit, and its end is looked at after
// reading.
inline bool may_hold(const InputFile& file, std::uint64_t bytes) { return file.size() == bytes; }
inline bool may_hold(const GzipFile& file, std::uint64_t bytes) { return bytes <= file.size_limit(); }
inline std::string room(const InputFile& file) { return cat("the file has ", file.size()); }
inline std::string room(const GzipFile& file) {
  return cat("the compressed file can't hold more than ", file.size_limit());
}
inline bool at_end(InputFile&) { return true; }
inline bool at_end(GzipFile& file) { return file.at_end(); }

template <class File>
IdxArray parse_idx(const std::string& path, int rank) {
  File file(path);
  const auto axes = static_cast<std::size_t>(rank);
  std::vector<std::uint8_t> header(4 + 4 * axes);
  const std::size_t got = file.read(header);
  check<FileError>(got == header.size(), path, ": cut short: expected an IDX header of ", header.size(), " bytes, got ",
                   got);
  const std::uint32_t magic = big_endian(header.data()), expected = 0x0800u + static_cast<std::uint32_t>(rank);
  check<FileError>(magic == expected, path, ": wrong magic number: expected ", expected, " (bytes in ", rank,
                   " axes), got ", magic);

  IdxArray out;
  std::uint64_t count = 1;
  for (std::size_t axis = 0; axis < axes; ++axis) {
    const std::uint32_t size = big_endian(header.data() + 4 + 4 * axis);
    out.sizes.push_back(size);
    check<FileError>(size != 0, path, ": axis ", axis, " has size 0: the file has no values");
    // Above 2^32 values no file fits, and a product of two 32-bit factors can't wrap.
    check<FileError>((count *= size) >> 32 == 0, path, ": sizes ", std::span<const Index>(out.sizes),
                     " are too large, ", room(file));
  }
  check<FileError>(may_hold(file, header.size() + count), path, ": sizes ", std::span<const Index>(out.sizes), " need ",
                   header.size() + count, " bytes, ", room(file));

  out.values.resize(count);
  const std::size_t read = file.read(out.values);
  check<FileError>(read == count, path, ": cut short: expected ", count, " values, got ", read);
  check<FileError>(at_end(file), path, ": more data follow after the ", count, " values that its header declares");
  return out;
}

}  // namespace detail

/// Reads the bytes of `path`, which must have `rank` axes; a name that ends in .gz is decompressed. Throws FileError
/// where the header, the sizes and the length don't fit each other; nothing is allocated for sizes that the file can't
/// hold.
inline IdxArray read_idx(const std::string& path, int rank) {
  if (path.ends_with(".gz")) return detail::parse_idx<GzipFile>(path, rank);
  return detail::parse_idx<InputFile>(path, rank);
}

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_IDX_HPP

namespace chorus::inline CHORUS_ABI::data {

/// Images of shape {1, 28, 28} (or what size the file says) and labels from 0 to 9.
class Mnist : public ImageDataset {
 public:
  /// Reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` (for the test split `t10k-...`), each as it is or
  /// with
  /// `.gz`. Throws FileError with the path where one is missing or malformed, or where they don't fit each other.
  explicit Mnist(const std::string& folder, Split split = Split::train) : ImageDataset(read(folder, split)) {}

  /// The plain or compressed form of one of MNIST's files, or nothing where the folder has neither.
  static std::string find(const std::string& folder, Split split, const char* suffix) {
    const std::string plain = cat(folder, "/", split == Split::train ? "train" : "t10k", suffix);
    if (file_exists(plain)) return plain;
    return file_exists(plain + ".gz") ? plain + ".gz" : std::string();
  }
  static constexpr const char* images = "-images-idx3-ubyte";
  static constexpr const char* labels = "-labels-idx1-ubyte";

 private:
  static std::string require(const std::string& folder, Split split, const char* suffix) {
    std::string path = find(folder, split, suffix);
    check<FileError>(!path.empty(), "Mnist: folder ", folder, " has no ", split == Split::train ? "train" : "t10k",
                     suffix, ", neither plain nor .gz");
    return path;
  }

  static ImageDataset read(const std::string& folder, Split split) {
    require_folder("Mnist", folder);
    const std::string image_path = require(folder, split, images), label_path = require(folder, split, labels);
    IdxArray pixels = read_idx(image_path, 3), classes = read_idx(label_path, 1);
    check<FileError>(pixels.sizes[0] == classes.sizes[0], "Mnist: ", image_path, " has ", pixels.sizes[0],
                     " images, but ", label_path, " has ", classes.sizes[0], " labels");
    for (std::size_t i = 0; i < classes.values.size(); ++i)
      check<FileError>(classes.values[i] < 10, "Mnist: ", label_path, ": label ", i, " is ", int{classes.values[i]},
                       ", expected 0 to 9");
    return {{1, pixels.sizes[1], pixels.sizes[2]},
            std::move(pixels.values),
            std::move(classes.values),
            10,
            {{0.1307f}, {0.3081f}}};
  }
};

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_MNIST_HPP

// <chorus/data/synthetic_images.hpp>
#ifndef CHORUS_SINGLE_CHORUS_DATA_SYNTHETIC_IMAGES_HPP
#define CHORUS_SINGLE_CHORUS_DATA_SYNTHETIC_IMAGES_HPP
/// A generated image task that needs no download: ten digits in seven strokes, drawn with random place, size, slant,
/// colours, a stray stroke and noise. Of 2,000 test images, trained on 8,000, softmax regression gets 85 % right, the
/// five-layer CNN 98 %.

namespace chorus::inline CHORUS_ABI::data {

/// `count` labelled images. Each depends on (seed, split, its index) alone: longer sets begin with shorter ones, the
/// test split shares no random number with the train split, and the labels go round from 0 to 9. Programs compiled with
/// and without fused multiply-add round differently: one pixel in 100,000 or fewer is then off by 1/255.
class SyntheticImages : public ImageDataset {
 public:
  /// `shape`: {1 or 3 (or more) channels, height, width}; sides of at least 8. Throws UsageError otherwise.
  explicit SyntheticImages(Index count, std::uint64_t seed = 0, Split split = Split::train,
                           ImageShape shape = {3, 32, 32})
      : ImageDataset(generate(count, seed, split, shape)) {}

 private:
  struct Point {
    float x, y;
  };

  static ImageDataset generate(Index count, std::uint64_t seed, Split split, const ImageShape& shape) {
    check<UsageError>(count >= 0, "SyntheticImages: expected a count of at least 0, got ", count);
    check<UsageError>(
        shape[0] >= 1 && shape[0] <= 16 && std::min(shape[1], shape[2]) >= 8 && std::max(shape[1], shape[2]) <= 4096,
        "SyntheticImages: expected 1 to 16 channels and sides of 8 to 4096, got shape ", shape);
    const auto size = static_cast<std::size_t>(shape[0] * shape[1] * shape[2]);
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(count) * size), labels(static_cast<std::size_t>(count));
    std::vector<float> ink(static_cast<std::size_t>(shape[1] * shape[2]));
    for (std::size_t i = 0; i < labels.size(); ++i) {
      RandomStream random(seed, Purpose::generate, static_cast<Index>(i), split == Split::train ? 0 : 1);
      labels[i] = static_cast<std::uint8_t>(i % 10);
      draw_digit(random, labels[i], shape, ink);
      colour(random, shape, ink, std::span(pixels).subspan(i * size, size));
    }
    const auto channels = static_cast<std::size_t>(shape[0]);
    return {shape,
            std::move(pixels),
            std::move(labels),
            10,
            {std::vector<float>(channels, 0.3f), std::vector<float>(channels, 0.2f)}};
  }

  /// Where there is ink, from 0 to 1.
  static void draw_digit(RandomStream& random, std::size_t digit, const ImageShape& shape, std::span<float> ink) {
    // The strokes of a seven-segment display between its six corners, two a row, from the top, and which a digit has.
    constexpr std::uint8_t strokes[7][2] = {{0, 1}, {1, 3}, {3, 5}, {4, 5}, {2, 4}, {0, 2}, {2, 3}};
    constexpr std::uint8_t digits[10] = {0b0111111, 0b0000110, 0b1011011, 0b1001111, 0b1100110,
                                         0b1101101, 0b1111101, 0b0000111, 0b1111111, 0b1101111};
    const float side = static_cast<float>(std::min(shape[1], shape[2]));
    const float tall = side * random.uniform(0.25f, 0.38f), wide = tall * random.uniform(0.45f, 0.75f);
    const float angle = random.uniform(-0.2f, 0.2f), slant = random.uniform(-0.2f, 0.2f);
    const float cosine = std::cos(angle), sine = std::sin(angle);
    const Point centre{static_cast<float>(shape[2]) / 2 + side * random.uniform(-0.12f, 0.12f),
                       static_cast<float>(shape[1]) / 2 + side * random.uniform(-0.1f, 0.1f)};
    const float thickness = side / 32 * random.uniform(0.7f, 1.5f);

    std::array<Point, 6> corners{};
    for (std::size_t i = 0; i < corners.size(); ++i) {
      const float v = static_cast<float>(i / 2) - 1 + random.uniform(-0.12f, 0.12f);
      const float u = static_cast<float>(i % 2) * 2 - 1 + random.uniform(-0.2f, 0.2f);
      const float x = wide * u - tall * v * slant, y = tall * v;
      corners[i] = {centre.x + cosine * x - sine * y, centre.y + sine * x + cosine * y};
    }

    std::ranges::fill(ink, 0.0f);
    for (std::size_t s = 0; s < 7; ++s)
      if ((digits[digit] >> s & 1) != 0)
        draw_stroke(corners[strokes[s][0]], corners[strokes[s][1]], thickness, shape, ink);
    // A stray stroke, short and anywhere.
    const Point from{random.uniform(0, static_cast<float>(shape[2])), random.uniform(0, static_cast<float>(shape[1]))};
    const Point to{from.x + side * random.uniform(-0.1f, 0.1f), from.y + side * random.uniform(-0.1f, 0.1f)};
    draw_stroke(from, to, thickness, shape, ink);
  }

  /// A line with round ends; its edge fades over one pixel.
  static void draw_stroke(Point from, Point to, float thickness, const ImageShape& shape, std::span<float> ink) {
    const float reach = thickness + 1, dx = to.x - from.x, dy = to.y - from.y,
                square = std::max(dx * dx + dy * dy, 1e-6f);
    const auto pixel = [](float at, Index size) { return std::clamp(static_cast<Index>(at), Index{0}, size); };
    const Index left = pixel(std::min(from.x, to.x) - reach, shape[2]),
                right = pixel(std::max(from.x, to.x) + reach + 1, shape[2]);
    const Index top = pixel(std::min(from.y, to.y) - reach, shape[1]),
                bottom = pixel(std::max(from.y, to.y) + reach + 1, shape[1]);
    for (Index y = top; y < bottom; ++y)
      for (Index x = left; x < right; ++x) {
        const float px = static_cast<float>(x) - from.x, py = static_cast<float>(y) - from.y;
        const float along = std::clamp((px * dx + py * dy) / square, 0.0f, 1.0f);
        const float ex = px - along * dx, ey = py - along * dy;
        const float shade = std::clamp(thickness + 0.5f - std::sqrt(ex * ex + ey * ey), 0.0f, 1.0f);
        float& there = ink[static_cast<std::size_t>(y * shape[2] + x)];
        there = std::max(there, shade);
      }
  }

  /// Ink and paper in random colours and contrast, the ink lighter; uneven light; noise.
  static void colour(RandomStream& random, const ImageShape& shape, std::span<const float> ink,
                     std::span<std::uint8_t> pixels) {
    const float noise = random.uniform(0.05f, 0.15f);
    const float slope_x = random.uniform(-0.2f, 0.2f) / static_cast<float>(shape[2]);
    const float slope_y = random.uniform(-0.2f, 0.2f) / static_cast<float>(shape[1]);
    std::uint8_t* out = pixels.data();
    for (Index c = 0; c < shape[0]; ++c) {
      const float contrast = random.uniform(0.3f, 0.6f), paper = random.uniform(0.1f, 0.4f);
      const float* at = ink.data();
      for (Index y = 0; y < shape[1]; ++y) {
        for (Index x = 0; x < shape[2]; x += 2) {
          std::uint32_t bits = random.word();  // two pixels' noise: sums of two bytes each
          for (Index i = x; i < std::min(x + 2, shape[2]); ++i, bits >>= 16) {
            const float grain = static_cast<float>((bits & 255) + (bits >> 8 & 255)) / 255 - 1;
            const float light = slope_x * static_cast<float>(i) + slope_y * static_cast<float>(y);
            const float value = paper + light + contrast * *at++ + noise * grain;
            *out++ = static_cast<std::uint8_t>(std::clamp(value, 0.0f, 1.0f) * 255 + 0.5f);
          }
        }
      }
    }
  }
};

}  // namespace chorus::inline CHORUS_ABI::data
#endif  // CHORUS_SINGLE_CHORUS_DATA_SYNTHETIC_IMAGES_HPP

// <chorus/io/model_file.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_MODEL_FILE_HPP
#define CHORUS_SINGLE_CHORUS_IO_MODEL_FILE_HPP
/// Models as safetensors files: every parameter and buffer under its path, as PyTorch names it (`conv1.weight`). The
/// same file loads under any policy and on any number of devices.

// <chorus/io/safetensors_writer.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_WRITER_HPP
#define CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_WRITER_HPP
/// Writes safetensors files: the same bytes as the reference writer's for the same tensors, replaced whole or not at
/// all. The format: https://github.com/huggingface/safetensors#format

// <chorus/io/atomic_file.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_ATOMIC_FILE_HPP
#define CHORUS_SINGLE_CHORUS_IO_ATOMIC_FILE_HPP
/// A file that appears whole or not at all: written beside its place, synced, and renamed over the old one. A process
/// killed or a disk full at any moment leaves the old file or the new one.

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

// <chorus/io/descriptor.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_DESCRIPTOR_HPP
#define CHORUS_SINGLE_CHORUS_IO_DESCRIPTOR_HPP
/// A file descriptor that closes itself.

namespace chorus::inline CHORUS_ABI::io {

/// Owns `value`, unless it is negative.
struct Descriptor {
  int value = -1;

  Descriptor() = default;
  explicit Descriptor(int descriptor) : value(descriptor) {}
  Descriptor(Descriptor&& other) noexcept : value(std::exchange(other.value, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value, other.value);
    return *this;
  }
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

/// The most that one call reads or writes: Linux stops just below 2 GiB, and some systems refuse more.
inline constexpr std::size_t io_chunk = std::size_t{1} << 30;

}  // namespace chorus::inline CHORUS_ABI::io
#endif  // CHORUS_SINGLE_CHORUS_IO_DESCRIPTOR_HPP

namespace chorus::inline CHORUS_ABI::io {

/// Writes to `.NAME.<16 hex digits>.tmp` in the folder of `path`; `commit` puts it in place. Without a commit the
/// destructor removes it and the old file stays. What a killed process left is removed by the next AtomicFile of the
/// same path: a temporary file that is still being written is locked. Every FileError names path, step and reason.
class AtomicFile {
 public:
  /// A symbolic link is followed. Throws FileError where the folder is missing or can't be written, or `path` is there
  /// and is read-only or no regular file.
  explicit AtomicFile(std::string path) : AtomicFile(Unopened{}, std::move(path)) {
    // The object is complete by now, so that the destructor cleans up after whatever throws here.
    open_folder();
    const mode_t mode = check_old_file();
    remove_leftovers();
    create(mode);
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile() { discard(); }

  /// Appends. Throws FileError, and then removes the temporary file.
  void write(std::span<const std::byte> data) {
    check<UsageError>(!temporary_.empty(), "saving ", path_, ": write to a file that is committed or has failed");
    while (!data.empty()) {
      const ssize_t count = ::write(file_.value, data.data(), std::min(data.size(), io_chunk));
      if (count < 0 && errno == EINTR) continue;
      if (count == 0) errno = EIO;
      if (count <= 0) fail_at("writing");
      data = data.subspan(static_cast<std::size_t>(count));
    }
  }
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  /// Syncs the file to the disk, renames it to its place, and syncs the folder. Throws FileError; the old file is then
  /// untouched, save where the message says that only the folder's sync failed.
  void commit() {
    check<UsageError>(!temporary_.empty(), "saving ", path_, ": commit of a file that is committed or has failed");
    if (sync(file_) != 0) fail_at("syncing the file to the disk");
    if (::renameat(folder_.value, temporary_.c_str(), folder_.value, name_.c_str()) != 0) {
      fail_at("renaming the temporary file");
    }
    temporary_.clear();
    // Some file systems can't sync a folder and say EINVAL.
    if (sync(folder_) != 0 && errno != EINVAL) {
      fail_at("the file is in place, but a loss of power may bring the old one back: syncing the folder");
    }
  }

 private:
  struct Unopened {};
  static constexpr std::string_view suffix = ".tmp";
  static constexpr std::size_t digits = 16;

  AtomicFile(Unopened, std::string path) : path_(std::move(path)) {}

  void discard() {
    if (!temporary_.empty()) ::unlinkat(folder_.value, temporary_.c_str(), 0);
    temporary_.clear();
  }

  /// Reports errno. What was written so far is of no use, and must not be committed by a caller who catches the error.
  [[noreturn]] void fail_at(std::string_view step) {
    const char* reason = std::strerror(errno);
    discard();
    fail<FileError>("saving ", path_, ": ", step, " failed: ", reason);
  }

  static int sync(const Descriptor& descriptor) {
    int status = 0;
    do {
      status = ::fsync(descriptor.value);
    } while (status != 0 && errno == EINTR);
    return status;
  }

  void open_folder() {
    std::string target = path_;
    struct stat facts {};
    if (::lstat(path_.c_str(), &facts) == 0 && S_ISLNK(facts.st_mode)) {
      const std::unique_ptr<char, decltype(&std::free)> followed(::realpath(path_.c_str(), nullptr), &std::free);
      if (followed == nullptr) fail_at("following the symbolic link");
      target = followed.get();
    }
    const std::size_t slash = target.rfind('/');
    const std::string folder = slash == target.npos ? "." : target.substr(0, slash + 1);
    name_ = slash == target.npos ? target : target.substr(slash + 1);
    check<FileError>(!name_.empty(), "saving ", path_.empty() ? "\"\"" : path_, ": the path has no file name");
    // NAME_MAX is 255 bytes; a longer name shares its leftovers with its namesakes, which the locks make harmless.
    prefix_ = cat('.', name_.substr(0, 200), '.');
    folder_.value = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_.value < 0) fail_at(cat("opening the folder ", folder));
  }

  /// The permissions that the new file takes over; 0 where there is no old file.
  mode_t check_old_file() {
    struct stat facts {};
    if (::fstatat(folder_.value, name_.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno != ENOENT) fail_at("looking at the old file");
      return 0;
    }
    check<FileError>(S_ISREG(facts.st_mode), "saving ", path_, ": it exists and is not a regular file");
    if (::faccessat(folder_.value, name_.c_str(), W_OK, 0) != 0) fail_at("replacing the old file");
    return facts.st_mode & 0777;
  }

  /// Unlinks what writers of this path left that no longer live. Best effort: it may fail and the save go on.
  void remove_leftovers() const {
    const auto close_folder = [](DIR* folder) { ::closedir(folder); };
    Descriptor own(::openat(folder_.value, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    const std::unique_ptr<DIR, decltype(close_folder)> folder(own.value < 0 ? nullptr : ::fdopendir(own.value));
    if (folder == nullptr) return;
    own.value = -1;
    while (const dirent* entry = ::readdir(folder.get())) {
      const std::string_view name = entry->d_name;
      if (name.size() != prefix_.size() + digits + suffix.size()) continue;
      if (!name.starts_with(prefix_) || !name.ends_with(suffix)) continue;
      const Descriptor file(::openat(folder_.value, entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
      if (file.value < 0 || ::flock(file.value, LOCK_EX | LOCK_NB) != 0) continue;
      ::unlinkat(folder_.value, entry->d_name, 0);
    }
  }

  void create(mode_t mode) {
    constexpr int attempts = 100;
    for (int attempt = 0; attempt < attempts; ++attempt) {
      const std::string name = random_name();
      Descriptor file(
          ::openat(folder_.value, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
      if (file.value < 0) {
        if (errno == EEXIST || errno == EINTR) continue;
        fail_at("creating a temporary file in its folder");
      }
      temporary_ = name;
      file_ = std::move(file);
      // Another process's remove_leftovers may be faster than this lock: then it holds the lock, or the file has no
      // name any more.
      const bool taken = ::flock(file_.value, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
      struct stat facts {};
      if (::fstat(file_.value, &facts) != 0) fail_at("looking at the temporary file");
      if (taken || facts.st_nlink == 0) continue;
      if (mode != 0 && ::fchmod(file_.value, mode) != 0) fail_at("setting the permissions");
      return;
    }
    fail<FileError>("saving ", path_, ": no temporary file could be made in its folder in ", attempts, " attempts");
  }

  std::string random_name() {
    unsigned char bytes[digits / 2];
    if (::getentropy(bytes, sizeof bytes) != 0) fail_at("getting a random name");
    std::string name = prefix_;
    for (const unsigned char byte : bytes) {
      constexpr std::string_view hex = "0123456789abcdef";
      (name += hex[byte >> 4]) += hex[byte & 15];
    }
    return name += suffix;
  }

  std::string path_, name_, prefix_, temporary_;
  Descriptor folder_, file_;
};

}  // namespace chorus::inline CHORUS_ABI::io
#endif  // CHORUS_SINGLE_CHORUS_IO_ATOMIC_FILE_HPP

// <chorus/io/tensor_entry.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_TENSOR_ENTRY_HPP
#define CHORUS_SINGLE_CHORUS_IO_TENSOR_ENTRY_HPP
/// One tensor of a safetensors file, and the rules that its reader and its writer share.

#include <map>

// <chorus/io/file_dtype.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_FILE_DTYPE_HPP
#define CHORUS_SINGLE_CHORUS_IO_FILE_DTYPE_HPP
/// The element types that a safetensors file may hold: those of chorus::DType and the narrow floats that tensors don't
/// have yet.

namespace chorus::inline CHORUS_ABI::io {

/// In the order of the format's own list, by which writers sort tensors: later types come first in a file.
enum class FileDType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};

namespace detail {
struct FileDTypeFacts {
  std::string_view name;
  unsigned bits;
};
inline constexpr FileDTypeFacts file_dtypes[] = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};
}  // namespace detail

/// The name in the file, as `F8_E4M3`.
constexpr std::string_view name(FileDType type) { return detail::file_dtypes[static_cast<std::size_t>(type)].name; }

/// Bits of one element; F4 and F6 elements are packed.
constexpr unsigned bits_of(FileDType type) { return detail::file_dtypes[static_cast<std::size_t>(type)].bits; }

/// The type of that name, if there is one.
constexpr std::optional<FileDType> file_dtype_named(std::string_view text) {
  for (std::size_t i = 0; i < std::size(detail::file_dtypes); ++i) {
    if (detail::file_dtypes[i].name == text) return static_cast<FileDType>(i);
  }
  return std::nullopt;
}

/// Every type of a tensor has a type in the file, of the same name.
constexpr FileDType file_dtype(DType type) { return *file_dtype_named(chorus::name(type)); }

inline void append(std::string& out, FileDType part) { out += name(part); }

}  // namespace chorus::inline CHORUS_ABI::io
#endif  // CHORUS_SINGLE_CHORUS_IO_FILE_DTYPE_HPP

// <chorus/io/json_string.hpp>
#ifndef CHORUS_SINGLE_CHORUS_IO_JSON_STRING_HPP
#define CHORUS_SINGLE_CHORUS_IO_JSON_STRING_HPP
/// Strings as JSON writes them, for files and messages that need no JSON library.

namespace chorus::inline CHORUS_ABI::io {

/// Appends `text` in double quotes, with control characters, quotes and backslashes escaped.
inline void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view hex = "0123456789abcdef", plain = "\b\t\n\f\r\"\\", letters = "btnfr\"\\";
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (const std::size_t at = plain.find(c); at != plain.npos) {
      (out += '\\') += letters[at];
    } else if (byte < 0x20) {
      ((out += "\\u00") += hex[byte >> 4]) += hex[byte & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

/// Text from outside, in a message: quoted, escaped, and cut where it is long.
struct Quoted {
  std::string_view text;
};
inline void append(std::string& out, Quoted part) {
  constexpr std::size_t longest = 120;
  append_json_string(out, part.text.substr(0, longest));
  if (part.text.size() > longest) out += "...";
}

/// True where `text` is well-formed UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF).
constexpr bool valid_utf8(std::string_view text) {
  const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
  for (std::size_t i = 0; i < text.size();) {
    const unsigned lead = byte(i);
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xC2 ? 0
                               : lead < 0xE0 ? 2
                               : lead < 0xF0 ? 3
                               : lead < 0xF5 ? 4
                                             : 0;
    if (length == 0) return false;
    for (std::size_t k = 1; k < length; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80) return false;
    }
    const unsigned second = byte(i + 1);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F)) return false;
    if ((lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) return false;
    i += length;
  }
  return true;
}

}  // namespace chorus::inline CHORUS_ABI::io
#endif  // CHORUS_SINGLE_CHORUS_IO_JSON_STRING_HPP

namespace chorus::inline CHORUS_ABI::io {

/// What a file says of one tensor: row-major elements, little-endian, `bytes` bytes from `begin` on in the data that
/// follows the header. Nothing is said about alignment.
struct TensorEntry {
  std::string name;
  FileDType dtype{};
  std::vector<Index> shape;
  std::size_t begin = 0;
  std::size_t bytes = 0;
};

/// The notes that a file carries beside its tensors: text by text.
using Metadata = std::map<std::string, std::string>;

/// What a reader accepts. A file's sizes are also checked against the file itself before anything is allocated.
struct ReaderLimits {
  std::uint64_t header_bytes = std::uint64_t{16} << 20;  ///< never above `format_header_bytes`
  std::size_t tensors = 1'000'000;
  std::size_t rank = 8;
  std::size_t name_bytes = 1024;
};

/// The format's own limit on the size of its header.
inline constexpr std::uint64_t format_header_bytes = 100'000'000;

namespace detail {

/// How a message about one tensor of a file begins.
struct TensorOfFile {
  std::string_view path, tensor;
};
inline void append(std::string& out, TensorOfFile part) {
  out += cat(part.path, ": tensor ", Quoted{part.tensor}, ": ");
}

/// Bytes of a tensor. Throws `Kind` where they can't be counted.
template <class Kind>
std::size_t tensor_bytes(FileDType dtype, std::span<const Index> shape, TensorOfFile who) {
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<Index>::max());
  std::uint64_t bits = bits_of(dtype);
  bool empty = false;
  for (const Index size : shape) {
    check<Kind>(size >= 0, who, "negative size in shape ", shape);
    // Axes of size 0 don't shorten the count: strides of the other axes are computed later and must not overflow.
    empty = empty || size == 0;
    const auto factor = static_cast<std::uint64_t>(std::max<Index>(size, 1));
    check<Kind>(bits <= most / factor, who, "the size of shape ", shape, " of ", dtype, " overflows");
    bits *= factor;
  }
  if (empty) return 0;
  check<Kind>(bits % 8 == 0, who, "shape ", shape, " of ", dtype, " is ", bits, " bits, which are no whole bytes");
  return static_cast<std::size_t>(bits / 8);
}

/// Throws `Kind` unless the tensor's name is short enough and printable.
template <class Kind>
void check_tensor_name(TensorOfFile who, std::size_t limit) {
  const std::string_view name = who.tensor;
  check<Kind>(name.size() <= limit, who, "its name has ", name.size(), " bytes; the limit is ", limit);
  const bool control = std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; });
  check<Kind>(!control, who, "its name has a control character");
}

}  // namespace detail
}  // namespace chorus::inline CHORUS_ABI::io
#endif  // CHORUS_SINGLE_CHORUS_IO_TENSOR_ENTRY_HPP

namespace chorus::inline CHORUS_ABI::io {

static_assert(std::endian::native == std::endian::little,
              "safetensors files are little-endian, and so must this machine be");

/// A tensor to be written: its row-major elements, which must outlive the call.
struct TensorView {
  std::string name;
  FileDType dtype{};
  std::span<const Index> shape;
  std::span<const std::byte> data;
};

namespace detail {

/// Checks what is to be written, sorts it as it will lie in the file, and returns all that stands before the data.
/// Throws UsageError where a reader would refuse the file.
inline std::string safetensors_header(std::string_view path, std::vector<const TensorView*>& tensors,
                                      const Metadata& metadata) {
  // By alignment, largest first, so that every tensor is aligned in the file; then by name.
  std::sort(tensors.begin(), tensors.end(), [](const TensorView* a, const TensorView* b) {
    return a->dtype != b->dtype ? a->dtype > b->dtype : a->name < b->name;
  });
  std::string json = "{";
  if (!metadata.empty()) {
    json += "\"__metadata__\":";
    char separator = '{';
    for (const auto& [key, value] : metadata) {
      check<UsageError>(valid_utf8(key) && valid_utf8(value), "saving ", path, ": metadata ", Quoted{key},
                        " is not valid UTF-8");
      json += separator;
      append_json_string(json, key);
      json += ':';
      append_json_string(json, value);
      separator = ',';
    }
    json += '}';
  }

  std::vector<std::string_view> names;
  std::size_t offset = 0;
  const std::string saving = cat("saving ", path);
  for (const TensorView* tensor : tensors) {
    const TensorOfFile who{saving, tensor->name};
    check_tensor_name<UsageError>(who, ReaderLimits{}.name_bytes);
    check<UsageError>(valid_utf8(tensor->name), who, "its name is not valid UTF-8");
    check<UsageError>(tensor->name != "__metadata__", who, "the format keeps that name for itself");
    check<UsageError>(tensor->shape.size() <= ReaderLimits{}.rank, who, "shape ", tensor->shape, " has more than ",
                      ReaderLimits{}.rank, " axes");
    const std::size_t bytes = tensor_bytes<UsageError>(tensor->dtype, tensor->shape, who);
    check<UsageError>(tensor->data.size() == bytes, who, "shape ", tensor->shape, " of ", tensor->dtype, " takes ",
                      bytes, " bytes, but the data have ", tensor->data.size());
    names.push_back(tensor->name);
    if (json.size() > 1) json += ',';
    append_json_string(json, tensor->name);
    json += cat(":{\"dtype\":\"", tensor->dtype, "\",\"shape\":[");
    for (const Index& size : tensor->shape) json += cat(&size == tensor->shape.data() ? "" : ",", size);
    json += cat("],\"data_offsets\":[", offset, ",", offset + bytes, "]}");
    offset += bytes;
  }
  json += '}';

  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) fail<UsageError>(TensorOfFile{saving, *twice}, "appears twice");

  json.resize((json.size() + 7) / 8 * 8, ' ');
  check<UsageError>(json.size() <= format_header_bytes, saving, ": the header would have ", json.size(),
                    " bytes; the format allows ", format_header_bytes);
  const auto prefix = std::bit_cast<std::array<char, 8>>(std::uint64_t{json.size()});
  json.insert(0, prefix.data(), prefix.size());
  return json;
}

}  // namespace detail

/// Writes a file and replaces what was at `path`, atomically: see AtomicFile, also for its FileErrors. Throws
/// UsageError, and touches nothing, where a name comes twice or can't be a name, or data don't have the size of their
/// shape and dtype.
inline void write_safetensors(const std::string& path, std::span<const TensorView> tensors,
                              const Metadata& metadata = {}) {
  std::vector<const TensorView*> order;
  for (const TensorView& tensor : tensors) order.push_back(&tensor);
  const std::string header = detail::safetensors_header(path, order, metadata);
  AtomicFile file(path);
  file.write(header);
  for (const TensorView* tensor : order) file.write(tensor->data);
  file.commit();
}

}  // namespace chorus::inline CHORUS_ABI::io
#endif  // CHORUS_SINGLE_CHORUS_IO_SAFETENSORS_WRITER_HPP

// <chorus/nn/module.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_MODULE_HPP
#define CHORUS_SINGLE_CHORUS_NN_MODULE_HPP
/// Module: a struct of layers and parameters that knows their names.

namespace chorus::inline CHORUS_ABI::nn {

class Module;

/// Sees the members of a module, in the order in which they were listed. It may replace the handles.
class Visitor {
 public:
  virtual ~Visitor() = default;
  virtual void module(std::string_view name, Module& module) = 0;
  virtual void parameter(std::string_view name, AnyParameter& parameter) = 0;
  virtual void buffer(std::string_view name, AnyBuffer& buffer) = 0;
};

/// Base of layers and models. A model lists its members once, by CHORUS_MODULE; names are paths as in PyTorch:
/// `conv1.weight`, `blocks.3.norm.running_mean`.
class Module {
 public:
  virtual ~Module() = default;
  Module() = default;
  Module(const Module&) = default;
  Module(Module&&) = default;
  Module& operator=(const Module&) = default;
  Module& operator=(Module&&) = default;

  virtual void visit(Visitor&) {}
  /// The type and its sizes, for the summary: `Conv2d(3, 6, kernel=5)`.
  virtual std::string describe() const { return "Module"; }

  bool training() const { return training_; }
  /// Switches this module and all below it; dropout and batch norm behave differently in evaluation.
  void train(bool training = true);
  void eval() { train(false); }
  /// Switches this module alone, not those below it.
  void set_own_training(bool training) { training_ = training; }

 private:
  bool training_ = true;
};

namespace detail {

// The listed members' names come as one text, "conv1, conv2": the preprocessor's `#__VA_ARGS__`.
inline std::string_view next_name(std::string_view& names) {
  const auto comma = names.find(',');
  auto name = names.substr(0, comma);
  names.remove_prefix(comma == std::string_view::npos ? names.size() : comma + 1);
  while (!name.empty() && name.front() == ' ') name.remove_prefix(1);
  while (!name.empty() && name.back() == ' ') name.remove_suffix(1);
  return name;
}

template <class Member>
void visit_member(Visitor& visitor, std::string_view name, Member& member) {
  if constexpr (std::is_base_of_v<Module, Member>) {
    visitor.module(name, member);
  } else if constexpr (requires { member.has_value(); *member; }) {  // a layer that a model may do without
    if (member.has_value()) visit_member(visitor, name, *member);
  } else if constexpr (std::is_base_of_v<AnyParameter, Member>) {
    if (member) visitor.parameter(name, member);
  } else {
    static_assert(std::is_base_of_v<AnyBuffer, Member>, "CHORUS_MODULE lists layers, modules, parameters, buffers, and std::optional ones");
    if (member) visitor.buffer(name, member);
  }
}

template <class... Members>
void visit_members(Visitor& visitor, std::string_view names, Members&... members) {
  (visit_member(visitor, next_name(names), members), ...);
}

// The device type of the first member that has one.
template <class... Members>
struct DeviceOf {
  using type = void;
};
template <class First, class... Rest>
struct DeviceOf<First, Rest...> : DeviceOf<Rest...> {};
template <class First, class... Rest>
  requires requires { typename std::remove_cvref_t<First>::device_type; } &&
           (!std::is_void_v<typename std::remove_cvref_t<First>::device_type>)
struct DeviceOf<First, Rest...> {
  using type = typename std::remove_cvref_t<First>::device_type;
};
template <class... Members>
DeviceOf<Members...> device_of(const Members&... members);

}  // namespace detail

/// A parameter and its path in the model.
template <Device D>
struct NamedParameter {
  std::string name;
  AnyParameter handle;
  ParameterOn<D>* parameter;
};

/// A buffer and its path in the model.
template <Device D>
struct NamedBuffer {
  std::string name;
  AnyBuffer handle;
  BufferOn<D>* buffer;
};

namespace detail {

// Walks a module and all below it; what is shared is seen at each of its places.
class Walker : public Visitor {
 public:
  void walk(Module& module) { module.visit(*this); }
  void module(std::string_view name, Module& child) override {
    const auto length = prefix_.size();
    prefix_.append(name).append(1, '.');
    enter(child);
    child.visit(*this);
    prefix_.resize(length);
  }
  void parameter(std::string_view, AnyParameter&) override {}
  void buffer(std::string_view, AnyBuffer&) override {}

 protected:
  virtual void enter(Module&) {}
  std::string path(std::string_view name) const { return prefix_ + std::string(name); }
  const std::string& prefix() const { return prefix_; }

 private:
  std::string prefix_;
};

template <Device D>
struct Collector final : Walker {
  std::vector<NamedParameter<D>> parameters;
  std::vector<NamedBuffer<D>> buffers;
  void parameter(std::string_view name, AnyParameter& handle) override {
    for (const auto& known : parameters)
      if (known.handle.shared() == handle.shared()) return;
    parameters.push_back({path(name), handle, &handle.on<D>()});
  }
  void buffer(std::string_view name, AnyBuffer& handle) override {
    for (const auto& known : buffers)
      if (known.handle.shared() == handle.shared()) return;
    buffers.push_back({path(name), handle, &handle.on<D>()});
  }
};

}  // namespace detail

/// All parameters of a model with their paths, in the order in which members are listed; a shared one once.
template <Device D>
std::vector<NamedParameter<D>> named_parameters(Module& module) {
  detail::Collector<D> collector;
  collector.walk(module);
  return std::move(collector.parameters);
}

/// All buffers of a model with their paths, likewise.
template <Device D>
std::vector<NamedBuffer<D>> named_buffers(Module& module) {
  detail::Collector<D> collector;
  collector.walk(module);
  return std::move(collector.buffers);
}

inline void Module::train(bool training) {
  struct Switch final : detail::Walker {
    bool on = true;
    void enter(Module& module) override { module.training_ = on; }
  } all;
  all.on = training;
  training_ = training;
  all.walk(*this);
}

}  // namespace chorus::inline CHORUS_ABI::nn

/// Inside a model: lists its layers, submodules, parameters and buffers, whose names become paths, and makes the model
/// callable as its `forward` is.
#define CHORUS_MODULE(TYPE, ...)                                                                         \
  using device_type = typename decltype(::chorus::nn::detail::device_of(__VA_ARGS__))::type;            \
  void visit(::chorus::nn::Visitor& visitor) override {                                                 \
    ::chorus::nn::detail::visit_members(visitor, #__VA_ARGS__, __VA_ARGS__);                            \
  }                                                                                                      \
  std::string describe() const override { return #TYPE; }                                               \
  template <class... Inputs>                                                                             \
  auto operator()(const Inputs&... inputs) const {                                                      \
    return this->forward(inputs...);                                                                    \
  }
#endif  // CHORUS_SINGLE_CHORUS_NN_MODULE_HPP

namespace chorus::inline CHORUS_ABI::io {

namespace detail {

/// A tensor in device memory that goes into a file, or comes from one. What begins with this prefix in a checkpoint is
/// not the model's.
inline constexpr std::string_view training_prefix = "training/";

/// Tensors on their way to a file, brought to the host.
class Outgoing {
 public:
  template <Device D>
  void add(std::string name, DType dtype, std::vector<Index> shape, D device, const void* data) {
    const auto bytes = static_cast<std::size_t>(numel(shape)) * size_of(dtype);
    items_.push_back({std::move(name), dtype, std::move(shape), std::vector<std::byte>(bytes)});
    copy_bytes(Cpu{}, items_.back().bytes.data(), device, data, bytes);
  }
  std::vector<TensorView> views() const {
    std::vector<TensorView> out;
    for (const Item& item : items_) out.push_back({item.name, file_dtype(item.dtype), item.shape, item.bytes});
    return out;
  }

 private:
  struct Item {
    std::string name;
    DType dtype;
    std::vector<Index> shape;
    std::vector<std::byte> bytes;
  };
  std::vector<Item> items_;
};

/// Calls `visit(name, dtype, extents, device, data)` for all numbers of a model; `touch` says that they will change.
template <class Model, class Visit>
void for_each_tensor(Model& model, const Visit& visit, bool touch) {
  using D = typename Model::device_type;
  for (const auto& named : nn::named_parameters<D>(model)) {
    visit(named.name, named.parameter->dtype(), named.parameter->extents(), named.parameter->where(),
          named.parameter->value_data());
    if (touch) named.parameter->touch();
  }
  for (const auto& named : nn::named_buffers<D>(model))
    visit(named.name, named.buffer->dtype(), named.buffer->extents(), named.buffer->where(), named.buffer->data());
}

template <class Model>
void add_model(Outgoing& out, Model& model) {
  for_each_tensor(
      model,
      [&](const std::string& name, DType dtype, std::span<const Index> extents, auto device, const void* data) {
        out.add(name, dtype, {extents.begin(), extents.end()}, device, data);
      },
      false);
}

}  // namespace detail

/// Writes all parameters and buffers of `model`, atomically: a failure leaves an older file as it was. Throws
/// FileError.
template <class Model>
void save(Model& model, const std::string& path, const Metadata& metadata = {}) {
  detail::Outgoing out;
  detail::add_model(out, model);
  write_safetensors(path, out.views(), metadata);
}

}  // namespace chorus::inline CHORUS_ABI::io
#endif  // CHORUS_SINGLE_CHORUS_IO_MODEL_FILE_HPP

// <chorus/nn/activations.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_ACTIVATIONS_HPP
#define CHORUS_SINGLE_CHORUS_NN_ACTIVATIONS_HPP
/// Functions as layers, for Sequential: activations, pooling, flatten, dropout.

// <chorus/ops/activations.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_ACTIVATIONS_HPP
#define CHORUS_SINGLE_CHORUS_OPS_ACTIVATIONS_HPP
/// Activation functions, element by element, with PyTorch's definitions and defaults; formulas stand with the functors.

// <chorus/ops/pointwise.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_POINTWISE_HPP
#define CHORUS_SINGLE_CHORUS_OPS_POINTWISE_HPP
/// Element-wise functions of any functor, the library's own or a user's, with broadcasting.

namespace chorus::inline CHORUS_ABI {

namespace detail {

/// How each input of an element-wise function lies in the output: by strides, which are 0 along axes that are repeated.
template <std::size_t Rank, std::size_t Inputs>
struct BroadcastLayout {
  std::array<Index, Rank> shape{};
  std::array<std::array<Index, Rank>, Inputs> strides{};
  bool same = true;  // all inputs have the output's shape

  template <std::size_t InputRank>
  void add(const char* operation, const std::array<Index, InputRank>& input, std::size_t i) {
    shape = broadcast_shapes(operation, shape, input);
    const auto dense = row_major(input);
    for (std::size_t axis = 0; axis < InputRank; ++axis)
      strides[i][Rank - InputRank + axis] = input[axis] == 1 ? 0 : dense[axis];
  }
  template <std::size_t InputRank>
  void compare(const std::array<Index, InputRank>& input) {
    same = same && InputRank == Rank && std::equal(input.begin(), input.end(), shape.begin());
  }
  std::array<std::span<const Index>, Inputs> spans() const {
    std::array<std::span<const Index>, Inputs> out;
    std::copy(strides.begin(), strides.end(), out.begin());
    return out;
  }
};

template <class F, Operand First, Operand... Rest>
auto pointwise(const char* operation, const F& f, const First& first, const Rest&... rest) {
  using T = typename tensor_of<First>::value_type;
  using D = typename tensor_of<First>::device_type;
  static_assert((std::is_same_v<T, typename tensor_of<Rest>::value_type> && ...),
                "element-wise: operands have different scalar types");
  constexpr int rank = std::max({tensor_of<First>::rank, tensor_of<Rest>::rank...});
  constexpr std::size_t count = 1 + sizeof...(Rest);
  const std::tuple inputs{contiguous(value_of(first)), contiguous(value_of(rest))...};
  const D device = std::get<0>(inputs).device();
  BroadcastLayout<static_cast<std::size_t>(rank), count> layout;
  layout.shape.fill(1);
  std::apply(
      [&](const auto&... input) {
        check<DeviceError>(((input.device() == device) && ...), operation, ": operands are on ", device,
                           " and on another device");
        std::size_t i = 0;
        (layout.add(operation, input.shape(), i++), ...);
        (layout.compare(input.shape()), ...);
      },
      inputs);
  const auto pointers = [](const auto& tensors) {
    return std::apply([](const auto&... tensor) { return std::array<const T*, count>{tensor.data()...}; }, tensors);
  };
  auto out = Tensor<T, rank, D>::empty(layout.shape, device);
  if (count == 1 || layout.same) {
    kernels::pointwise_forward(device, f, out.numel(), pointers(inputs), out.data());
  } else if constexpr (count > 1) {
    kernels::pointwise_forward(device, f, std::span<const Index>(layout.shape), pointers(inputs), layout.spans(),
                               out.data());
  }
  return record(
      operation, std::move(out),
      [f, inputs, pointers, layout](const auto& dy, auto... nodes) {
        std::array<T*, count> grads{};
        std::array<bool, count> accumulate{};
        // Kernels write each gradient to a place of its own; an operand that occurs again gets one and is added after
        // that.
        std::array<Storage<D>, count> again{};
        const auto want = [&](std::size_t i, auto node) {
          if (!node) return;
          const auto target = node->target();
          const auto before = grads.begin() + static_cast<std::ptrdiff_t>(i);
          if (std::find(grads.begin(), before, target.data()) != before)
            again[i] = Storage<D>(dy.device(), target.grad.bytes());
          grads[i] = again[i] ? static_cast<T*>(again[i].data()) : target.data();
          accumulate[i] = target.accumulate && !again[i];
        };
        const auto add_again = [&](std::size_t i, auto node) {
          if (again[i]) kernels::axpy(dy.device(), numel(node->shape()), T{1}, grads[i], node->target().data());
        };
        std::size_t i = 0, j = 0;
        (want(i++, nodes), ...);
        const T* gradient = dy.data();
        if (count == 1 || layout.same) {
          kernels::pointwise_backward(dy.device(), f, dy.numel(), pointers(inputs), gradient, grads, accumulate);
        } else if constexpr (count > 1) {
          kernels::pointwise_backward(dy.device(), f, std::span<const Index>(layout.shape), pointers(inputs),
                                      layout.spans(), gradient, grads, layout.spans(), accumulate);
        }
        (add_again(j++, nodes), ...);
      },
      first, rest...);
}

}  // namespace detail

/// `f` of each element, in one pass forward and one back: the gradient comes from calling `f` with Dual numbers. A
/// functor is `struct SwiGlu { template <class S> CHORUS_HD S operator()(const S& a, const S& b) const { ... } };`,
/// with `where(condition, a, b)` for a choice and mathematical functions called without a namespace. Operands broadcast
/// as in NumPy.
template <class F, Operand... Xs>
auto pointwise(const F& f, const Xs&... xs) {
  return detail::pointwise("pointwise", f, xs...);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_POINTWISE_HPP

namespace chorus::inline CHORUS_ABI {

#define CHORUS_UNARY(NAME, FUNCTOR)                          \
  template <Operand X>                                       \
  auto NAME(const X& x) {                                    \
    return detail::pointwise(#NAME, functors::FUNCTOR{}, x); \
  }
/// max(x, 0); the gradient at 0 is 0.
CHORUS_UNARY(relu, Relu)
/// x limited to [0, 6].
CHORUS_UNARY(relu6, Relu6)
/// 1 / (1 + exp(-x))
CHORUS_UNARY(sigmoid, Sigmoid)
/// log(sigmoid(x)), without underflow.
CHORUS_UNARY(log_sigmoid, LogSigmoid)
/// x sigmoid(x), also called swish.
CHORUS_UNARY(silu, Silu)
/// x Φ(x), Φ being the normal distribution function.
CHORUS_UNARY(gelu, Gelu)
/// The approximation of gelu by tanh.
CHORUS_UNARY(gelu_tanh, GeluTanh)
/// x tanh(softplus(x))
CHORUS_UNARY(mish, Mish)
/// relu6(x + 3) / 6
CHORUS_UNARY(hardsigmoid, Hardsigmoid)
/// x relu6(x + 3) / 6
CHORUS_UNARY(hardswish, Hardswish)
#undef CHORUS_UNARY

/// x for positive x, else slope x.
template <Operand X>
auto leaky_relu(const X& x, double slope = 0.01) {
  return detail::pointwise("leaky_relu", functors::LeakyRelu{slope}, x);
}

/// x for positive x, else alpha (exp(x) - 1).
template <Operand X>
auto elu(const X& x, double alpha = 1) {
  return detail::pointwise("elu", functors::Elu{alpha}, x);
}

/// log(1 + exp(beta x)) / beta, and x itself where beta x is above the threshold. Throws UsageError unless beta is
/// positive.
template <Operand X>
auto softplus(const X& x, double beta = 1, double threshold = 20) {
  check<UsageError>(beta > 0, "softplus: beta is positive, got ", beta);
  return detail::pointwise("softplus", functors::Softplus{beta, threshold}, x);
}

/// x limited to [min, max], without gradient at the limits themselves. Throws UsageError unless min < max.
template <Operand X>
auto hardtanh(const X& x, double min = -1, double max = 1) {
  check<UsageError>(min < max, "hardtanh: the limits are [", min, ", ", max, "]");
  return detail::pointwise("hardtanh", functors::Hardtanh{min, max}, x);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_ACTIVATIONS_HPP

// <chorus/ops/dropout.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_DROPOUT_HPP
#define CHORUS_SINGLE_CHORUS_OPS_DROPOUT_HPP
/// Dropout (Srivastava et al. 2014).

// <chorus/kernels/dropout.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_DROPOUT_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_DROPOUT_HPP
/// The dropout kernels for every kind of device that this build has.

// <chorus/kernels/cpu/dropout.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_DROPOUT_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_DROPOUT_HPP
/// Dropout on the CPU (Srivastava et al., JMLR 15, 2014; scaled in training). The backward pass draws the mask again
/// instead of keeping it. Forward overwrites y; backward overwrites dx or, with `accumulate`, adds.

// <chorus/kernels/cpu/philox_block.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_PHILOX_BLOCK_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_PHILOX_BLOCK_HPP
/// Philox for several counters at once, in plain loops that compilers vectorise.

namespace chorus::inline CHORUS_ABI::kernels {

inline constexpr std::size_t philox_block = 16;

/// words[4 * i + lane] = philox(key, counters[i])[lane] for `philox_block` counters.
inline void philox_words(std::uint64_t key, const PhiloxWords* counters, std::uint32_t* words) {
  constexpr std::size_t n = philox_block;
  std::uint32_t a[n], b[n], c[n], d[n];
  for (std::size_t i = 0; i < n; ++i) {
    a[i] = counters[i][0];
    b[i] = counters[i][1];
    c[i] = counters[i][2];
    d[i] = counters[i][3];
  }
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t p = 0xD2511F53ull * a[i], q = 0xCD9E8D57ull * c[i];
      a[i] = static_cast<std::uint32_t>(q >> 32) ^ b[i] ^ k0;
      c[i] = static_cast<std::uint32_t>(p >> 32) ^ d[i] ^ k1;
      b[i] = static_cast<std::uint32_t>(q);
      d[i] = static_cast<std::uint32_t>(p);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (std::size_t i = 0; i < n; ++i) {
    words[4 * i] = a[i];
    words[4 * i + 1] = b[i];
    words[4 * i + 2] = c[i];
    words[4 * i + 3] = d[i];
  }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_PHILOX_BLOCK_HPP

// <chorus/kernels/dropout_key.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_DROPOUT_KEY_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_DROPOUT_KEY_HPP
/// Which elements dropout keeps: a pure function of the seed, the step, the layer and the element's place in the global
/// batch, the same on every device and for every way to split the batch.

namespace chorus::inline CHORUS_ABI::kernels {

/// `first_sample` is the place of sample 0 of this tensor in the global batch; `layer` numbers the model's dropouts.
struct DropoutKey {
  std::uint64_t seed = 0;
  std::uint32_t step = 0, layer = 0;
  std::int64_t first_sample = 0;
};

/// The Philox counter behind elements 4 * quad to 4 * quad + 3 of a sample (its place in the global batch, modulo
/// 2^32); the key is the seed. The constant keeps these words apart from those that initialisation draws from the same
/// seed.
CHORUS_HD constexpr PhiloxWords dropout_counter(const DropoutKey& key, std::int64_t sample, std::int64_t quad) {
  return {static_cast<std::uint32_t>(quad), static_cast<std::uint32_t>(sample), key.step, key.layer ^ 0x64726F70u};
}

/// An element is kept where the upper 24 bits of its word, the number behind `unit_float`, reach this: where
/// unit_float(word) >= p.
CHORUS_HD constexpr std::uint32_t dropout_threshold(double p) {
  const double scaled = p * 0x1p24;
  const auto below = static_cast<std::uint32_t>(scaled);
  return below + (static_cast<double>(below) < scaled ? 1u : 0u);
}
CHORUS_HD constexpr bool dropout_keeps(std::uint32_t word, std::uint32_t threshold) { return word >> 8 >= threshold; }

/// What kept elements are multiplied by.
CHORUS_HD constexpr double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_DROPOUT_KEY_HPP

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
/// `out[i] = put(out[i], kept ? in[i] * scale : 0)`, block of Philox counters by block. Counters run through the
/// samples, each of which has ceil(inner / 4) of them.
template <bool accumulate, class T>
void dropout(Index samples, Index inner, const T* in, T* out, double p, const DropoutKey& key) {
  check<UsageError>(p >= 0 && p <= 1, "dropout: p must be in [0, 1], got ", p);
  constexpr auto at_once = static_cast<Index>(philox_block);
  const Index quads = (inner + 3) / 4, counters = samples * quads;
  const std::uint32_t threshold = dropout_threshold(p);
  const T scale = static_cast<T>(dropout_scale(p));
  const auto apply = [&](Index i, T factor) { out[i] = accumulate ? out[i] + in[i] * factor : in[i] * factor; };

  std::array<PhiloxWords, philox_block> counter{};
  std::array<std::uint32_t, 4 * philox_block> words;
  std::array<T, 4 * philox_block> factors;
  Index sample = 0, quad = 0;
  for (Index first = 0; first < counters; first += at_once) {
    const Index here = std::min(at_once, counters - first), start_sample = sample, start_quad = quad;
    for (Index i = 0; i < here; ++i) {
      counter[static_cast<std::size_t>(i)] = dropout_counter(key, key.first_sample + sample, quad);
      if (++quad == quads) {
        quad = 0;
        ++sample;
      }
    }
    philox_words(key.seed, counter.data(), words.data());
    for (std::size_t i = 0; i < words.size(); ++i) factors[i] = dropout_keeps(words[i], threshold) ? scale : T{0};
    const Index begin = start_sample * inner + 4 * start_quad;
    if (inner % 4 == 0 && here == at_once) {
      for (Index i = 0; i < 4 * at_once; ++i) apply(begin + i, factors[static_cast<std::size_t>(i)]);
      continue;
    }
    Index at = begin, q = start_quad;
    for (Index i = 0; i < here; ++i) {
      const Index wanted = std::min(Index{4}, inner - 4 * q);
      for (Index lane = 0; lane < wanted; ++lane) apply(at + lane, factors[static_cast<std::size_t>(4 * i + lane)]);
      at += wanted;
      if (++q == quads) q = 0;
    }
  }
}
}  // namespace detail

/// y = x / (1 - p) where the element is kept, else 0; kept with probability 1 - p, as DropoutKey says. x, y: [samples,
/// inner]; `y` may be `x`. Throws UsageError for p outside of [0, 1].
template <class T>
void dropout_forward(Cpu, Index samples, Index inner, const T* x, T* y, double p, const DropoutKey& key) {
  detail::dropout<false>(samples, inner, x, y, p, key);
}

/// dx = dy / (1 - p) where the element was kept, else 0.
template <class T>
void dropout_backward(Cpu, Index samples, Index inner, const T* dy, T* dx, double p, const DropoutKey& key,
                      bool accumulate) {
  if (accumulate)
    detail::dropout<true>(samples, inner, dy, dx, p, key);
  else
    detail::dropout<false>(samples, inner, dy, dx, p, key);
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_DROPOUT_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_DROPOUT_HPP

namespace chorus::inline CHORUS_ABI {

/// In training, zeroes each element with probability p and scales the others by 1 / (1 - p); else x itself. x: [batch,
/// ...]. Which elements go depends on the seed, the pass, and the sample's place in the global batch, not on the device
/// that holds it. Throws UsageError unless 0 <= p < 1.
template <Operand X>
auto dropout(const X& x, double p, bool training = true) {
  static_assert(tensor_of<X>::rank >= 1, "dropout: the input has a batch axis");
  check<UsageError>(p >= 0 && p < 1, "dropout: the probability is in [0, 1), got ", p);
  const auto input = contiguous(value_of(x));
  const auto key = next_random_key();
  if (!training || p == 0)
    return record(
        "dropout", input, [](const auto& dy, auto dx) { dx->add(dy); }, x);
  const kernels::DropoutKey philox_key{key.seed, key.step, key.operation, key.first_sample};
  const Index samples = input.size(0), inner = samples == 0 ? 0 : input.numel() / samples;
  const auto device = input.device();
  auto out = tensor_of<X>::empty(input.shape(), device);
  kernels::dropout_forward(device, samples, inner, input.data(), out.data(), p, philox_key);
  return record(
      "dropout", std::move(out),
      [samples, inner, p, philox_key](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::dropout_backward(dy.device(), samples, inner, dy.data(), grad.data(), p, philox_key, accumulate);
      },
      x);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_DROPOUT_HPP

// <chorus/ops/elementary.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_ELEMENTARY_HPP
#define CHORUS_SINGLE_CHORUS_OPS_ELEMENTARY_HPP
/// Elementary functions, element by element, of Tensors, Variables and Parameters of any rank.

namespace chorus::inline CHORUS_ABI {

#define CHORUS_UNARY(NAME, FUNCTOR)                          \
  template <Operand X>                                       \
  auto NAME(const X& x) {                                    \
    return detail::pointwise(#NAME, functors::FUNCTOR{}, x); \
  }
/// |x|; the gradient at 0 is 0.
CHORUS_UNARY(abs, Abs)
CHORUS_UNARY(square, Square)
CHORUS_UNARY(sqrt, Sqrt)
/// 1 / sqrt(x)
CHORUS_UNARY(rsqrt, Rsqrt)
/// 1 / x
CHORUS_UNARY(reciprocal, Reciprocal)
CHORUS_UNARY(exp, Exp)
CHORUS_UNARY(log, Log)
/// log(1 + x), exact for small x.
CHORUS_UNARY(log1p, Log1p)
CHORUS_UNARY(sin, Sin)
CHORUS_UNARY(cos, Cos)
CHORUS_UNARY(tanh, Tanh)
/// The error function.
CHORUS_UNARY(erf, Erf)
#undef CHORUS_UNARY

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_ELEMENTARY_HPP

// <chorus/ops/pooling.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_POOLING_HPP
#define CHORUS_SINGLE_CHORUS_OPS_POOLING_HPP
/// Max and average pooling over windows of an image.

// <chorus/kernels/pooling.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_POOLING_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_POOLING_HPP
/// The pooling kernels for every kind of device that this build has.

// <chorus/kernels/cpu/pooling.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_POOLING_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_POOLING_HPP
/// Max and average pooling on the CPU. Results overwrite; gradients overwrite or, with `accumulate`, add.

// <chorus/kernels/pooling_shape.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_POOLING_SHAPE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_POOLING_SHAPE_HPP
/// The sizes of a two-dimensional pooling, shared by every kind of device.

namespace chorus::inline CHORUS_ABI::kernels {

/// x: [planes, height, width], y: [planes, out_height(), out_width()], where planes = batch * channels.
struct Pool2dShape {
  Index planes, height, width, kernel_h, kernel_w, stride_h, stride_w;
  Index padding_h = 0, padding_w = 0;

  Index out_height() const { return (height + 2 * padding_h - kernel_h) / stride_h + 1; }
  Index out_width() const { return (width + 2 * padding_w - kernel_w) / stride_w + 1; }
};

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_POOLING_SHAPE_HPP

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
/// Calls f(plane, output index in the plane, first row, last row + 1, first column, last column + 1) for every window,
/// cut to the image.
template <class F>
void for_windows(const Pool2dShape& s, F f) {
  for (Index plane = 0; plane < s.planes; ++plane)
    for (Index oh = 0, out = 0; oh < s.out_height(); ++oh) {
      const Index top = oh * s.stride_h - s.padding_h;
      for (Index ow = 0; ow < s.out_width(); ++ow, ++out) {
        const Index left = ow * s.stride_w - s.padding_w;
        f(plane, out, std::max<Index>(top, 0), std::min(top + s.kernel_h, s.height), std::max<Index>(left, 0),
          std::min(left + s.kernel_w, s.width));
      }
    }
}

/// Windows of 2 x 2 side by side: as many of a row's `n` as can be computed in whole packets without reading behind
/// `x_end` or writing behind `y_end`. Results are written up to a packet further than n. Returns how many are done.
template <class T>
Index max_pool_2x2(Index n, const T* row, Index width, Index position, const T* x_end, T* y, const T* y_end,
                   std::int32_t* argmax) {
  constexpr Index w = lanes<T>;
  const T steps[] = {T{0}, T{1}, static_cast<T>(width), static_cast<T>(width + 1)};
  Index j = 0;
  for (; j < n && x_end - row >= width + 2 * (j + w) && y_end - y >= j + w; j += w) {
    const T *upper = row + 2 * j, *lower = upper + width;
    alignas(64) T values[4][w];
    for (Index i = 0; i < w; ++i) {
      values[0][i] = upper[2 * i];
      values[1][i] = upper[2 * i + 1];
      values[2][i] = lower[2 * i];
      values[3][i] = lower[2 * i + 1];
    }
    auto best = load(values[0], Whole<T>{}), step = splat(T{0});
    for (int i = 1; i < 4; ++i) {
      const auto value = load(values[i], Whole<T>{}), here = splat(steps[i]);
      const auto number = pcmp_eq(value, value), larger = pcmp_lt(best, value);
      best = pselect(number, pselect(larger, value, best), value);
      step = pselect(number, pselect(larger, here, step), here);
    }
    store(y + j, best, Whole<T>{});
    if (argmax == nullptr) continue;
    alignas(64) T all[w];
    store(all, step, Whole<T>{});
    for (Index i = 0; i < w; ++i)
      argmax[j + i] = static_cast<std::int32_t>(position + 2 * (j + i)) + static_cast<std::int32_t>(all[i]);
  }
  return std::min(j, n);
}
}  // namespace detail

/// y = the largest number of each window, and `argmax` (null, or as large as y) its index within the plane: the first
/// of equal ones. NaN counts as largest.
template <class T>
void max_pool2d_forward(Cpu, const Pool2dShape& s, const T* x, T* y, std::int32_t* argmax) {
  const Index pixels = s.out_height() * s.out_width();
  const auto window = [&](Index plane, Index out, Index top, Index bottom, Index left, Index right) {
    const T* image = x + plane * s.height * s.width;
    T best = -std::numeric_limits<T>::infinity();
    Index where = top * s.width + left;
    for (Index h = top; h < bottom; ++h)
      for (Index w = left; w < right; ++w) {
        const T value = image[h * s.width + w];
        if (value > best || value != value) {
          best = value;
          where = h * s.width + w;
        }
      }
    y[plane * pixels + out] = best;
    if (argmax != nullptr) argmax[plane * pixels + out] = static_cast<std::int32_t>(where);
  };
  const bool two_by_two = s.kernel_h == 2 && s.kernel_w == 2 && s.stride_h == 2 && s.stride_w == 2 &&
                          s.padding_h == 0 && s.padding_w == 0 && s.width < (Index{1} << 24);
  if (!two_by_two) return detail::for_windows(s, window);
  const Index columns = s.out_width();
  for (Index plane = 0; plane < s.planes; ++plane)
    for (Index i = 0; i < s.out_height(); ++i) {
      const Index out = plane * pixels + i * columns;
      Index j = detail::max_pool_2x2(columns, x + (plane * s.height + 2 * i) * s.width, s.width, 2 * i * s.width,
                                     x + s.planes * s.height * s.width, y + out, y + s.planes * pixels,
                                     argmax != nullptr ? argmax + out : nullptr);
      for (; j < columns; ++j) window(plane, i * columns + j, 2 * i, 2 * i + 2, 2 * j, 2 * j + 2);
    }
}

/// dx = dy where x was its window's maximum, else 0; summed where windows overlap.
template <class T>
void max_pool2d_backward(Cpu, const Pool2dShape& s, const T* dy, const std::int32_t* argmax, T* dx, bool accumulate) {
  const Index in = s.height * s.width, out = s.out_height() * s.out_width();
  if (!accumulate) std::fill_n(dx, s.planes * in, T{0});
  for (Index plane = 0; plane < s.planes; ++plane)
    for (Index i = plane * out; i < (plane + 1) * out; ++i) dx[plane * in + argmax[i]] += dy[i];
}

/// y = the mean of each window, padding counted as zeros (PyTorch's count_include_pad).
template <class T>
void avg_pool2d_forward(Cpu, const Pool2dShape& s, const T* x, T* y) {
  const Index pixels = s.out_height() * s.out_width();
  const T area = static_cast<T>(s.kernel_h * s.kernel_w);
  detail::for_windows(s, [&](Index plane, Index out, Index top, Index bottom, Index left, Index right) {
    const T* image = x + plane * s.height * s.width;
    T sum = 0;
    for (Index h = top; h < bottom; ++h)
      for (Index w = left; w < right; ++w) sum += image[h * s.width + w];
    y[plane * pixels + out] = sum / area;
  });
}

/// dx = each window's dy, shared evenly among its pixels.
template <class T>
void avg_pool2d_backward(Cpu, const Pool2dShape& s, const T* dy, T* dx, bool accumulate) {
  const Index pixels = s.out_height() * s.out_width();
  const T area = static_cast<T>(s.kernel_h * s.kernel_w);
  if (!accumulate) std::fill_n(dx, s.planes * s.height * s.width, T{0});
  detail::for_windows(s, [&](Index plane, Index out, Index top, Index bottom, Index left, Index right) {
    T* image = dx + plane * s.height * s.width;
    const T share = dy[plane * pixels + out] / area;
    for (Index h = top; h < bottom; ++h)
      for (Index w = left; w < right; ++w) image[h * s.width + w] += share;
  });
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_POOLING_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_POOLING_HPP

// <chorus/ops/size2d.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_SIZE2D_HPP
#define CHORUS_SINGLE_CHORUS_OPS_SIZE2D_HPP
/// Height and width options, given as one number or two.

namespace chorus::inline CHORUS_ABI {

/// `{.kernel = 5}` or `{.kernel = {5, 3}}`: height, then width.
struct Size2d {
  Index height = 0, width = 0;
  constexpr Size2d(Index both) : height(both), width(both) {}  // NOLINT: one number stands for both
  constexpr Size2d(Index h, Index w) : height(h), width(w) {}
};

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_SIZE2D_HPP

namespace chorus::inline CHORUS_ABI {

/// `stride` 0 stands for the window's own size.
struct PoolOptions {
  Size2d stride = 0, padding = 0;
};

namespace detail {
inline kernels::Pool2dShape pool2d_shape(const char* operation, const Shape<4>& input, Size2d window,
                                         const PoolOptions& options) {
  const kernels::Pool2dShape shape{
      .planes = input[0] * input[1],
      .height = input[2],
      .width = input[3],
      .kernel_h = window.height,
      .kernel_w = window.width,
      .stride_h = options.stride.height == 0 ? window.height : options.stride.height,
      .stride_w = options.stride.width == 0 ? window.width : options.stride.width,
      .padding_h = options.padding.height,
      .padding_w = options.padding.width,
  };
  check<UsageError>(shape.kernel_h > 0 && shape.kernel_w > 0 && shape.stride_h > 0 && shape.stride_w > 0, operation,
                    ": window and stride are at least 1");
  check<UsageError>(shape.padding_h >= 0 && shape.padding_w >= 0 && 2 * shape.padding_h <= shape.kernel_h &&
                        2 * shape.padding_w <= shape.kernel_w,
                    operation, ": the padding is at most half of the window");
  check<ShapeError>(
      shape.height + 2 * shape.padding_h >= shape.kernel_h && shape.width + 2 * shape.padding_w >= shape.kernel_w,
      operation, ": a window of ", shape.kernel_h, " x ", shape.kernel_w, " does not fit an input of shape ", input);
  return shape;
}
}  // namespace detail

/// x: [batch, channels, height, width] -> the largest number of each window: [batch, channels, out_h, out_w] with
/// out_h = (height + 2 padding - window) / stride + 1. Where several are largest, the first gets the gradient.
template <Operand X>
auto max_pool2d(const X& x, Size2d window, const PoolOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  const auto input = contiguous(value_of(x));
  const auto shape = detail::pool2d_shape("max_pool2d", input.shape(), window, options);
  const auto device = input.device();
  const Shape<4> out_shape{input.size(0), input.size(1), shape.out_height(), shape.out_width()};
  auto out = Tensor<T, 4, D>::empty(out_shape, device);
  const bool recorded = AnyVariable<X> && grad_enabled();
  Tensor<std::int32_t, 4, D> argmax;
  if (recorded) argmax = Tensor<std::int32_t, 4, D>::empty(out_shape, device);
  kernels::max_pool2d_forward(device, shape, input.data(), out.data(), argmax.data());
  return record(
      "max_pool2d", std::move(out),
      [argmax, shape, device](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::max_pool2d_backward(device, shape, dy.data(), argmax.data(), grad.data(), accumulate);
      },
      x);
}

/// The mean of each window, padding counted as zeros; shapes as for max_pool2d.
template <Operand X>
auto avg_pool2d(const X& x, Size2d window, const PoolOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  const auto input = contiguous(value_of(x));
  const auto shape = detail::pool2d_shape("avg_pool2d", input.shape(), window, options);
  const auto device = input.device();
  auto out = Tensor<T, 4, typename tensor_of<X>::device_type>::empty(
      {input.size(0), input.size(1), shape.out_height(), shape.out_width()}, device);
  kernels::avg_pool2d_forward(device, shape, input.data(), out.data());
  return record(
      "avg_pool2d", std::move(out),
      [shape, device](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::avg_pool2d_backward(device, shape, dy.data(), grad.data(), accumulate);
      },
      x);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_POOLING_HPP

// <chorus/ops/shape.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_SHAPE_HPP
#define CHORUS_SINGLE_CHORUS_OPS_SHAPE_HPP
/// The same numbers in another shape or order: reshape, flatten, permute, transpose, expand, slice,
/// concat, stack.

// <chorus/kernels/axis_block.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_AXIS_BLOCK_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_AXIS_BLOCK_HPP
/// Ranges of an axis, for every kind of device that this build has.

// <chorus/kernels/cpu/axis_block.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_AXIS_BLOCK_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_AXIS_BLOCK_HPP
/// A range of an axis, taken out or put in: what slice and concat move. The whole is seen as [outer, axis, inner], the
/// block as [outer, count, inner], both dense.

// <chorus/kernels/axis_shape.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_AXIS_SHAPE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_AXIS_SHAPE_HPP
/// How kernels see a dense tensor of any rank: the axis they work along, what lies outside of it and what inside.

namespace chorus::inline CHORUS_ABI::kernels {

/// A row-major tensor seen as [outer, axis, inner]. Any of them may be 0.
struct AxisShape {
  Index outer = 1, axis = 1, inner = 1;

  constexpr Index numel() const { return outer * axis * inner; }
  /// Elements of a result that has the axis reduced away: [outer, inner].
  constexpr Index reduced() const { return outer * inner; }
};

/// A row-major tensor seen as [batch, channels, inner], for what normalises channels.
struct ChannelShape {
  Index batch = 1, channels = 1, inner = 1;

  constexpr Index numel() const { return batch * channels * inner; }
  /// Elements of one channel.
  constexpr Index per_channel() const { return batch * inner; }
};

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_AXIS_SHAPE_HPP

namespace chorus::inline CHORUS_ABI::kernels {

/// block = whole[:, start : start + count, :], or is added to.
template <class T>
void take_block(Cpu device, AxisShape whole, Index start, Index count, const T* from, T* block, bool accumulate = false) {
  for (Index o = 0; o < whole.outer; ++o) {
    const T* source = from + (o * whole.axis + start) * whole.inner;
    T* target = block + o * count * whole.inner;
    if (accumulate)
      axpy(device, count * whole.inner, T{1}, source, target);
    else
      std::memcpy(target, source, static_cast<std::size_t>(count * whole.inner) * sizeof(T));
  }
}

/// whole[:, start : start + count, :] = block, or is added to.
template <class T>
void put_block(Cpu device, AxisShape whole, Index start, Index count, const T* block, T* to, bool accumulate = false) {
  for (Index o = 0; o < whole.outer; ++o) {
    const T* source = block + o * count * whole.inner;
    T* target = to + (o * whole.axis + start) * whole.inner;
    if (accumulate)
      axpy(device, count * whole.inner, T{1}, source, target);
    else
      std::memcpy(target, source, static_cast<std::size_t>(count * whole.inner) * sizeof(T));
  }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_AXIS_BLOCK_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_AXIS_BLOCK_HPP

namespace chorus::inline CHORUS_ABI {

namespace detail {
/// A shape seen from one of its axes: what lies outside, the axis, what lies inside.
template <std::size_t N>
kernels::AxisShape around_axis(const std::array<Index, N>& shape, std::size_t axis) {
  kernels::AxisShape out;
  for (std::size_t i = 0; i < N; ++i) (i < axis ? out.outer : i == axis ? out.axis : out.inner) *= shape[i];
  return out;
}
}  // namespace detail

/// Another shape with as many elements; one size may be -1. Throws ShapeError where it doesn't fit.
template <Operand X, std::size_t NewRank>
auto reshape(const X& x, const std::array<Index, NewRank>& shape) {
  const auto input = contiguous(value_of(x));
  return record(
      "reshape", input.view(shape), [old = input.shape()](const auto& dy, auto dx) { dx->add(dy.view(old)); }, x);
}

/// Joins all axes from `start_axis` on: [batch, channels, height, width] -> [batch, channels * height * width].
template <int StartAxis = 1, Operand X>
auto flatten(const X& x) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(StartAxis >= 0 && StartAxis <= rank, "flatten: the start axis doesn't exist");
  const auto& old = value_of(x).shape();
  Shape<StartAxis + 1> shape{};
  shape.back() = 1;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(rank); ++axis) {
    if (axis < static_cast<std::size_t>(StartAxis))
      shape[axis] = old[axis];
    else
      shape.back() *= old[axis];
  }
  return reshape(x, shape);
}

/// Axis i of the result is axis `axes[i]` of x.
template <Operand X>
auto permute(const X& x, const Shape<tensor_of<X>::rank>& axes) {
  const auto& input = value_of(x);
  constexpr auto rank = static_cast<std::size_t>(tensor_of<X>::rank);
  auto out = contiguous(input.permute(axes));
  Shape<tensor_of<X>::rank> inverse{};
  for (std::size_t i = 0; i < rank; ++i)
    inverse[normalize_axis("permute", axes[i], tensor_of<X>::rank)] = static_cast<Index>(i);
  return record(
      "permute", std::move(out), [inverse](const auto& dy, auto dx) { dx->add(contiguous(dy.permute(inverse))); }, x);
}

/// Swaps two axes.
template <Operand X>
auto transpose(const X& x, Index a, Index b) {
  constexpr int rank = tensor_of<X>::rank;
  Shape<rank> axes{};
  std::iota(axes.begin(), axes.end(), Index{0});
  std::swap(axes[normalize_axis("transpose", a, rank)], axes[normalize_axis("transpose", b, rank)]);
  return permute(x, axes);
}

/// Repeats axes of size 1, and new axes in front. Throws ShapeError where x doesn't expand to the shape.
template <Operand X, std::size_t NewRank>
auto expand(const X& x, const std::array<Index, NewRank>& shape) {
  const auto& input = value_of(x);
  auto out = contiguous(input.expand(shape));
  return record(
      "expand", std::move(out),
      [shape](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        if (!accumulate) zero_bytes(grad.device(), grad.data(), grad.bytes());
        kernels::scatter_strided(grad.device(), shape, dy.data(), grad.data(), grad.expand(shape).strides(), true);
      },
      x);
}

/// Indices `start` to `stop - 1` of an axis.
template <Operand X>
auto slice(const X& x, Index axis, Index start, Index stop) {
  const auto& input = value_of(x);
  const auto whole = detail::around_axis(input.shape(), normalize_axis("slice", axis, tensor_of<X>::rank));
  auto out = contiguous(input.slice(axis, start, stop));
  return record(
      "slice", std::move(out),
      [whole, start, count = stop - start](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        if (!accumulate) zero_bytes(grad.device(), grad.data(), grad.bytes());
        kernels::put_block(grad.device(), whole, start, count, dy.data(), grad.data(), true);
      },
      x);
}

/// Joins operands along an axis; their other sizes are equal. Throws ShapeError where they are not.
template <Operand First, Operand... Rest>
auto concat(Index axis, const First& first, const Rest&... rest) {
  using T = typename tensor_of<First>::value_type;
  constexpr int rank = tensor_of<First>::rank;
  static_assert(((tensor_of<Rest>::rank == rank) && ...), "concat: operands have different ranks");
  const auto a = normalize_axis("concat", axis, rank);
  constexpr std::size_t count = 1 + sizeof...(Rest);
  const std::array<tensor_of<First>, count> parts{contiguous(value_of(first)), contiguous(value_of(rest))...};
  std::array<Index, count> starts{};
  auto shape = parts[0].shape();
  for (std::size_t i = 1; i < count; ++i) {
    auto expected = parts[0].shape();
    expected[a] = parts[i].shape()[a];
    check<ShapeError>(parts[i].shape() == expected, "concat: shapes ", parts[0].shape(), " and ", parts[i].shape(),
                      " differ beside axis ", axis);
    starts[i] = shape[a];
    shape[a] += expected[a];
  }
  const auto device = parts[0].device();
  const auto whole = detail::around_axis(shape, a);
  auto out = Tensor<T, rank, typename tensor_of<First>::device_type>::empty(shape, device);
  for (std::size_t i = 0; i < count; ++i)
    kernels::put_block(device, whole, starts[i], parts[i].shape()[a], parts[i].data(), out.data());
  return record(
      "concat", std::move(out),
      [whole, starts, a](const auto& dy, auto... inputs) {
        const auto give = [&](std::size_t i, auto input) {
          if (!input) return;
          const auto [grad, accumulate] = input->target();
          kernels::take_block(grad.device(), whole, starts[i], grad.shape()[a], dy.data(), grad.data(), accumulate);
        };
        std::size_t i = 0;
        (give(i++, inputs), ...);
      },
      first, rest...);
}

/// Joins a list of any length. Throws UsageError for an empty one.
template <Operand X>
X concat(Index axis, std::span<const X> list) {
  check<UsageError>(!list.empty(), "concat: the list is empty");
  if (list.size() == 1) return list.front();
  const auto half = list.size() / 2;
  return concat(axis, concat(axis, list.first(half)), concat(axis, list.subspan(half)));
}

/// Joins operands of one shape along a new axis.
template <Operand First, Operand... Rest>
auto stack(Index axis, const First& first, const Rest&... rest) {
  constexpr int rank = tensor_of<First>::rank;
  const auto a = normalize_axis("stack", axis, rank + 1);
  const auto widen = [a](const auto& x) {
    Shape<rank + 1> shape{};
    for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = i < a ? x.shape()[i] : i == a ? 1 : x.shape()[i - 1];
    return reshape(x, shape);
  };
  return concat(axis, widen(first), widen(rest)...);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_SHAPE_HPP

// <chorus/ops/softmax.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_SOFTMAX_HPP
#define CHORUS_SINGLE_CHORUS_OPS_SOFTMAX_HPP
/// softmax, log_softmax and logsumexp along an axis.

// <chorus/kernels/softmax.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_SOFTMAX_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_SOFTMAX_HPP
/// The softmax kernels for every kind of device that this build has.

// <chorus/kernels/cpu/softmax.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_SOFTMAX_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_SOFTMAX_HPP
/// Softmax, its logarithm and logsumexp along one axis, on the CPU. Results overwrite; gradients overwrite or, with
/// `accumulate`, add. Inputs are shifted by their maximum, so that no finite input overflows. As in PyTorch a NaN, and
/// a line of -inf alone, make NaN.

// <chorus/kernels/cpu/axis_lines.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_AXIS_LINES_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_AXIS_LINES_HPP
/// The lines of a tensor along one axis, as registers see them. A kernel over an axis is written once, against `Row`
/// and `Columns` alike: `reduce` gives each lane the result of its line, `each` visits the line's packets.

namespace chorus::inline CHORUS_ABI::kernels {

/// One line whose elements are neighbours: packets lie along it.
template <class T>
struct Row {
  Index at;      ///< of the first element in [outer, axis, inner]
  Index result;  ///< of the line's place in [outer, inner]
  Index length;

  /// `value(offset, count)` is a packet of what to combine; every lane gets the whole line's result.
  template <class Op, class Value>
  Packet<T> reduce(Op op, const Value& value) const {
    return splat(Op::fold(reduce_packets<T>(at, at + length, splat(Op::neutral), op, [&](Index i, auto count) {
      return keep_first<T>(value(i, count), count, Op::neutral);
    })));
  }
  template <class F>
  void each(const F& f) const {
    for_packets<T>(length, [&](Index i, auto count) { f(at + i, count); });
  }
  /// A scalar function of a result.
  template <class F>
  Packet<T> map(Packet<T> value, const F& f) const {
    return splat(f(Eigen::internal::pfirst(value)));
  }
  Packet<T> load_result(const T* y) const { return splat(y[result]); }
  void store_result(T* y, Packet<T> value, bool accumulate = false) const {
    const T first = Eigen::internal::pfirst(value);
    y[result] = accumulate ? y[result] + first : first;
  }
  /// Calls `f(place, a, b)` for each line with two of its results.
  template <class F>
  void for_results(Packet<T> a, Packet<T> b, const F& f) const {
    f(result, Eigen::internal::pfirst(a), Eigen::internal::pfirst(b));
  }
};

/// As many neighbouring lines as a packet has lanes, or `Count` of them: packets lie across.
template <class T, class Count>
struct Columns {
  Index at, result, length;
  Index stride;
  Count count;

  template <class Op, class Value>
  Packet<T> reduce(Op op, const Value& value) const {
    return reduce_rows(Index{0}, length, splat(Op::neutral), op,
                       [&](Index i) { return value(at + i * stride, count); });
  }
  template <class F>
  void each(const F& f) const {
    for (Index i = 0; i < length; ++i) f(at + i * stride, count);
  }
  template <class F>
  Packet<T> map(Packet<T> value, const F& f) const {
    alignas(sizeof(Packet<T>)) T all[lanes<T>];
    Eigen::internal::pstore(all, value);
    for (Index i = 0; i < count; ++i) all[i] = f(all[i]);
    return Eigen::internal::pload<Packet<T>>(all);
  }
  Packet<T> load_result(const T* y) const { return load(y + result, count); }
  void store_result(T* y, Packet<T> value, bool accumulate = false) const {
    store(y + result, value, count, accumulate);
  }
  template <class F>
  void for_results(Packet<T> a, Packet<T> b, const F& f) const {
    alignas(sizeof(Packet<T>)) T as[lanes<T>], bs[lanes<T>];
    Eigen::internal::pstore(as, a);
    Eigen::internal::pstore(bs, b);
    for (Index i = 0; i < count; ++i) f(result + i, as[i], bs[i]);
  }
};

/// Calls `f` with every Row, or with every Columns where `inner` is not 1: those from `first` (of inner) on.
template <class T, class F>
void for_lines(AxisShape shape, const F& f, Index first = 0) {
  for (Index o = 0; o < shape.outer; ++o) {
    if (shape.inner == 1)
      f(Row<T>{o * shape.axis, o, shape.axis});
    else
      for_packets<T>(shape.inner - first, [&](Index i, auto count) {
        const Index j = first + i;
        f(Columns<T, decltype(count)>{o * shape.axis * shape.inner + j, o * shape.inner + j, shape.axis, shape.inner,
                                      count});
      });
  }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_AXIS_LINES_HPP

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
/// exp(x) where x is not far above 0. Eigen's exp stops short of 0, but a masked logit (-inf) must give 0 itself.
template <class T>
Packet<T> exp_to_zero(Packet<T> x) {
  constexpr T smallest = sizeof(T) == 4 ? T(-87.3) : T(-708.3);
  return pselect(pcmp_lt(x, splat(smallest)), splat(T{0}), Eigen::internal::pexp(x));
}

/// log(sum(exp(x))) of a line: in each lane that of its own line.
template <class T, class Line>
Packet<T> logsumexp(const Line& line, const T* x) {
  const auto maximum = line.reduce(Max<T>{}, [&](Index i, auto count) { return load(x + i, count); });
  // A line of -inf alone must give -inf, and one with +inf must give that: shift those by 0.
  const auto finite = pcmp_lt(Eigen::internal::pabs(maximum), splat(std::numeric_limits<T>::infinity()));
  const auto shift = pselect(finite, maximum, splat(T{0}));
  const auto total =
      line.reduce(Sum<T>{}, [&](Index i, auto count) { return exp_to_zero<T>(psub(load(x + i, count), shift)); });
  return padd(shift, line.map(total, [](T value) { return std::log(value); }));
}
}  // namespace detail

/// y = log(sum(exp(x))). x: [outer, axis, inner]; y: [outer, inner]. -inf for an empty axis.
template <class T>
void logsumexp_forward(Cpu, AxisShape shape, const T* x, T* y) {
  for_lines<T>(shape, [&](const auto& line) { line.store_result(y, detail::logsumexp(line, x)); });
}

/// dx = exp(x - y) * dy. x, dx: [outer, axis, inner]; y, dy: [outer, inner].
template <class T>
void logsumexp_backward(Cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto lse = line.load_result(y), gradient = line.load_result(dy);
    line.each([&](Index i, auto count) {
      store(dx + i, pmul(detail::exp_to_zero<T>(psub(load(x + i, count), lse)), gradient), count, accumulate);
    });
  });
}

/// y = exp(x) / sum(exp(x)). `y` may be `x`.
template <class T>
void softmax_forward(Cpu, AxisShape shape, const T* x, T* y) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto maximum = line.reduce(Max<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) {
      const auto power = detail::exp_to_zero<T>(psub(load(x + i, count), maximum));
      store(y + i, power, count);
      return power;
    });
    const auto factor = Eigen::internal::pdiv(splat(T{1}), total);
    line.each([&](Index i, auto count) { store(y + i, pmul(load(y + i, count), factor), count); });
  });
}

/// dx = y * (dy - sum(y * dy)). `dx` may be `dy`, unless it accumulates.
template <class T>
void softmax_backward(Cpu, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto dot =
        line.reduce(Sum<T>{}, [&](Index i, auto count) { return pmul(load(y + i, count), load(dy + i, count)); });
    line.each([&](Index i, auto count) {
      store(dx + i, pmul(load(y + i, count), psub(load(dy + i, count), dot)), count, accumulate);
    });
  });
}

/// y = x - log(sum(exp(x))). `y` may be `x`.
template <class T>
void log_softmax_forward(Cpu, AxisShape shape, const T* x, T* y) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto lse = detail::logsumexp(line, x);
    line.each([&](Index i, auto count) { store(y + i, psub(load(x + i, count), lse), count); });
  });
}

/// dx = dy - exp(y) * sum(dy). `dx` may be `dy`, unless it accumulates.
template <class T>
void log_softmax_backward(Cpu, AxisShape shape, const T* y, const T* dy, T* dx, bool accumulate) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(dy + i, count); });
    line.each([&](Index i, auto count) {
      const auto p = detail::exp_to_zero<T>(load(y + i, count));
      store(dx + i, psub(load(dy + i, count), pmul(p, total)), count, accumulate);
    });
  });
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_SOFTMAX_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_SOFTMAX_HPP

// <chorus/ops/reduction.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_REDUCTION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_REDUCTION_HPP
/// Sums, means, extremes and variances, of all elements or along one axis.

// <chorus/kernels/reduction.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_REDUCTION_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_REDUCTION_HPP
/// The reduction kernels for every kind of device that this build has.

// <chorus/kernels/cpu/reduction.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_REDUCTION_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_REDUCTION_HPP
/// Reductions over one axis, and their gradients, on the CPU. Forward functions read x: [outer, axis, inner] and
/// overwrite y: [outer, inner], backward functions write dx like x; both add instead where `accumulate` says so. The
/// same input gives the same bits.

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
/// Four neighbouring packets, so that a sum over rows reads pieces of them that are worth fetching.
template <class T>
struct Strip {
  static constexpr Index w = lanes<T>, size = 4 * w;
  Packet<T> a, b, c, d;

  static Strip load(const T* from) {
    using Eigen::internal::ploadu;
    using P = Packet<T>;
    return {ploadu<P>(from), ploadu<P>(from + w), ploadu<P>(from + 2 * w), ploadu<P>(from + 3 * w)};
  }
  friend Strip operator+(const Strip& x, const Strip& y) {
    return {padd(x.a, y.a), padd(x.b, y.b), padd(x.c, y.c), padd(x.d, y.d)};
  }
};

template <class T>
void sum(AxisShape shape, const T* x, T* y, bool accumulate, T divisor) {
  using Eigen::internal::pdiv;
  const auto n = splat(divisor), zero = splat(T{0});
  const Index strips = shape.inner / Strip<T>::size * Strip<T>::size;
  for (Index o = 0; o < shape.outer; ++o)
    for (Index j = 0; j < strips; j += Strip<T>::size) {
      const T* from = x + o * shape.axis * shape.inner + j;
      T* to = y + o * shape.inner + j;
      const auto total = reduce_rows(Index{0}, shape.axis, Strip<T>{zero, zero, zero, zero}, std::plus<>{},
                                     [&](Index i) { return Strip<T>::load(from + i * shape.inner); });
      for (const auto& part : {total.a, total.b, total.c, total.d}) {
        store(to, pdiv(part, n), Whole<T>{}, accumulate);
        to += lanes<T>;
      }
    }
  const auto rest = [&](const auto& line) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    line.store_result(y, pdiv(total, n), accumulate);
  };
  for_lines<T>(shape, rest, strips);
}
}  // namespace detail

/// y = sum(x), pairwise: 1e6 floats are within 1e-6 of the exact sum. 0 for an empty axis.
template <class T>
void sum(Cpu, AxisShape shape, const T* x, T* y, bool accumulate = false) {
  detail::sum(shape, x, y, accumulate, T{1});
}

/// y = sum(x) / axis. NaN for an empty axis, as in PyTorch.
template <class T>
void mean(Cpu, AxisShape shape, const T* x, T* y, bool accumulate = false) {
  detail::sum(shape, x, y, accumulate, static_cast<T>(shape.axis));
}

/// The sum of n numbers.
template <class T>
T sum_all(Cpu, Index n, const T* x) {
  return Eigen::internal::pfirst(
      Row<T>{0, 0, n}.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); }));
}

/// dx = dy * scale, for every element of the axis: the gradient of a sum, and with scale = 1 / axis that of a mean.
template <class T>
void sum_backward(Cpu, AxisShape shape, const T* dy, T* dx, bool accumulate, T scale = T{1}) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto value = pmul(line.load_result(dy), splat(scale));
    line.each([&](Index i, auto count) { store(dx + i, value, count, accumulate); });
  });
}

template <class T>
void mean_backward(Cpu cpu, AxisShape shape, const T* dy, T* dx, bool accumulate) {
  sum_backward(cpu, shape, dy, dx, accumulate, T{1} / static_cast<T>(shape.axis));
}

namespace detail {
template <class Op, class T>
void extremum(AxisShape shape, const T* x, T* y) {
  for_lines<T>(shape, [&](const auto& line) {
    line.store_result(y, line.reduce(Op{}, [&](Index i, auto count) { return load(x + i, count); }));
  });
}
}  // namespace detail

/// y = max(x); NaN wins. -inf for an empty axis.
template <class T>
void amax(Cpu, AxisShape shape, const T* x, T* y) {
  detail::extremum<Max<T>>(shape, x, y);
}

/// y = min(x); NaN wins. +inf for an empty axis.
template <class T>
void amin(Cpu, AxisShape shape, const T* x, T* y) {
  detail::extremum<Min<T>>(shape, x, y);
}

/// The gradient of amax: elements that equal the result share dy evenly, as in PyTorch.
template <class T>
void amax_backward(Cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto best = line.load_result(y), gradient = line.load_result(dy), zero = splat(T{0});
    const auto chosen = [&](Index i, auto count, auto value) {
      return pselect(pcmp_eq(load(x + i, count), best), value, zero);
    };
    const auto ties = line.reduce(Sum<T>{}, [&](Index i, auto count) { return chosen(i, count, splat(T{1})); });
    const auto share = Eigen::internal::pdiv(gradient, ties);
    line.each([&](Index i, auto count) { store(dx + i, chosen(i, count, share), count, accumulate); });
  });
}

/// The gradient of amin: the same.
template <class T>
void amin_backward(Cpu cpu, AxisShape shape, const T* x, const T* y, const T* dy, T* dx, bool accumulate) {
  amax_backward(cpu, shape, x, y, dy, dx, accumulate);
}

/// y: the index of the maximum in its line; of several the first, and a NaN counts as the maximum. 0 for an empty axis.
template <class T>
void argmax(Cpu, AxisShape shape, const T* x, Index* y) {
  for_lines<T>(shape, [&](const auto& line) {
    const auto best = line.reduce(Max<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    line.for_results(best, best, [&](Index place, T value, T) {
      const T* element = x + line.at + (place - line.result);
      y[place] = 0;
      for (Index i = 0; i < shape.axis; ++i, element += shape.inner)
        if (*element == value || std::isnan(*element)) {
          y[place] = i;
          break;
        }
    });
  });
}

/// y = sum((x - mean(x))^2) / (axis - correction), in two passes; correction 1 makes it unbiased. NaN where there are
/// not more elements than that.
template <class T>
void var(Cpu, AxisShape shape, const T* x, T* y, Index correction) {
  const auto n = splat(static_cast<T>(shape.axis));
  const auto divisor = splat(static_cast<T>(std::max(Index{0}, shape.axis - correction)));
  for_lines<T>(shape, [&](const auto& line) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto centre = Eigen::internal::pdiv(total, n);
    const auto squares = line.reduce(Sum<T>{}, [&](Index i, auto count) {
      const auto d = psub(load(x + i, count), centre);
      return pmul(d, d);
    });
    line.store_result(y, Eigen::internal::pdiv(squares, divisor));
  });
}

/// dx = 2 * (x - mean(x)) / (axis - correction) * dy.
template <class T>
void var_backward(Cpu, AxisShape shape, const T* x, const T* dy, T* dx, Index correction, bool accumulate) {
  const auto n = splat(static_cast<T>(shape.axis));
  const auto factor = splat(T{2} / static_cast<T>(std::max(Index{0}, shape.axis - correction)));
  for_lines<T>(shape, [&](const auto& line) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto centre = Eigen::internal::pdiv(total, n), scale = pmul(line.load_result(dy), factor);
    line.each(
        [&](Index i, auto count) { store(dx + i, pmul(psub(load(x + i, count), centre), scale), count, accumulate); });
  });
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_REDUCTION_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_REDUCTION_HPP

namespace chorus::inline CHORUS_ABI {

/// As the last argument of a reduction: the axis stays, with size 1.
struct KeepAxis {};
inline constexpr KeepAxis keep_axis{};

namespace detail {

// The reduced axis goes away.
template <int Rank>
Shape<Rank - 1> without_axis(const Shape<Rank>& shape, std::size_t axis) {
  Shape<Rank - 1> out{};
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = shape[i < axis ? i : i + 1];
  return out;
}

// A reduction along an axis: `forward(device, view, x, y)` and `backward(device, view, x, y, dy, dx, accumulate)`.
template <Operand X, class Forward, class Backward>
auto reduce(const char* operation, const X& x, Index axis, Forward forward, Backward backward) {
  using T = typename tensor_of<X>::value_type;
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "a tensor without axes cannot be reduced along one");
  const auto input = contiguous(value_of(x));
  const auto a = normalize_axis(operation, axis, rank);
  const auto view = around_axis(input.shape(), a);
  auto out = Tensor<T, rank - 1, typename tensor_of<X>::device_type>::empty(without_axis<rank>(input.shape(), a),
                                                                            input.device());
  forward(input.device(), view, input.data(), out.data());
  return record(
      operation, out,
      [input, out, view, backward](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        backward(input.device(), view, input.data(), out.data(), dy.data(), grad.data(), accumulate);
      },
      x);
}

// The same over all elements.
template <Operand X, class Reduce>
auto reduce_all(const X& x, Reduce along_axis) {
  return along_axis(reshape(x, Shape<1>{-1}), 0);
}

// The same, and the axis stays.
template <Operand X, class Reduce>
auto reduce_keeping(const X& x, Index axis, Reduce along_axis) {
  auto shape = value_of(x).shape();
  shape[normalize_axis("reduction", axis, tensor_of<X>::rank)] = 1;
  return reshape(along_axis(x, axis), shape);
}

}  // namespace detail

/// The sum along an axis, which goes away.
template <Operand X>
auto sum(const X& x, Index axis) {
  return detail::reduce(
      "sum", x, axis, [](auto device, auto view, const auto* in, auto* out) { kernels::sum(device, view, in, out); },
      [](auto device, auto view, const auto*, const auto*, const auto* dy, auto* dx, bool accumulate) {
        kernels::sum_backward(device, view, dy, dx, accumulate);
      });
}

/// The mean along an axis, which goes away.
template <Operand X>
auto mean(const X& x, Index axis) {
  return detail::reduce(
      "mean", x, axis, [](auto device, auto view, const auto* in, auto* out) { kernels::mean(device, view, in, out); },
      [](auto device, auto view, const auto*, const auto*, const auto* dy, auto* dx, bool accumulate) {
        kernels::mean_backward(device, view, dy, dx, accumulate);
      });
}

/// The largest element along an axis, which goes away. Elements that tie share the gradient evenly, as in PyTorch.
template <Operand X>
auto amax(const X& x, Index axis) {
  return detail::reduce(
      "amax", x, axis, [](auto device, auto view, const auto* in, auto* out) { kernels::amax(device, view, in, out); },
      [](auto device, auto view, const auto* in, const auto* out, const auto* dy, auto* dx, bool accumulate) {
        kernels::amax_backward(device, view, in, out, dy, dx, accumulate);
      });
}

/// The smallest element along an axis, which goes away; ties as for amax.
template <Operand X>
auto amin(const X& x, Index axis) {
  return detail::reduce(
      "amin", x, axis, [](auto device, auto view, const auto* in, auto* out) { kernels::amin(device, view, in, out); },
      [](auto device, auto view, const auto* in, const auto* out, const auto* dy, auto* dx, bool accumulate) {
        kernels::amin_backward(device, view, in, out, dy, dx, accumulate);
      });
}

#define CHORUS_REDUCTION_FORMS(NAME)                                                             \
  template <Operand X>                                                                           \
  auto NAME(const X& x) {                                                                        \
    return detail::reduce_all(x, [](const auto& flat, Index axis) { return NAME(flat, axis); }); \
  }                                                                                              \
  template <Operand X>                                                                           \
  auto NAME(const X& x, Index axis, KeepAxis) {                                                  \
    return detail::reduce_keeping(x, axis, [](const auto& in, Index a) { return NAME(in, a); }); \
  }
CHORUS_REDUCTION_FORMS(sum)
CHORUS_REDUCTION_FORMS(mean)
CHORUS_REDUCTION_FORMS(amax)
CHORUS_REDUCTION_FORMS(amin)
#undef CHORUS_REDUCTION_FORMS

/// The variance along an axis, which goes away: squared distances from the mean, divided by size - `correction`
/// (1: the unbiased estimate).
template <Operand X>
auto var(const X& x, Index axis, Index correction = 1) {
  return detail::reduce(
      "var", x, axis,
      [correction](auto device, auto view, const auto* in, auto* out) {
        kernels::var(device, view, in, out, correction);
      },
      [correction](auto device, auto view, const auto* in, const auto*, const auto* dy, auto* dx, bool accumulate) {
        kernels::var_backward(device, view, in, dy, dx, correction, accumulate);
      });
}

/// The variance of all elements.
template <Operand X>
auto var(const X& x) {
  return detail::reduce_all(x, [](const auto& flat, Index axis) { return var(flat, axis); });
}
/// The variance along an axis, which stays with size 1.
template <Operand X>
auto var(const X& x, Index axis, KeepAxis, Index correction = 1) {
  return detail::reduce_keeping(x, axis, [correction](const auto& in, Index a) { return var(in, a, correction); });
}

/// The position of the largest element along an axis; of several, the first.
template <Operand X>
Tensor<Index, tensor_of<X>::rank - 1, typename tensor_of<X>::device_type> argmax(const X& x, Index axis) {
  constexpr int rank = tensor_of<X>::rank;
  const auto input = contiguous(value_of(x));
  const auto a = normalize_axis("argmax", axis, rank);
  auto out = Tensor<Index, rank - 1, typename tensor_of<X>::device_type>::empty(
      detail::without_axis<rank>(input.shape(), a), input.device());
  kernels::argmax(input.device(), detail::around_axis(input.shape(), a), input.data(), out.data());
  return out;
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_REDUCTION_HPP

namespace chorus::inline CHORUS_ABI {

namespace detail {
// Both need only their result for the way back.
template <Operand X, class Forward, class Backward>
auto along_axis(const char* operation, const X& x, Index axis, Forward forward, Backward backward) {
  const auto input = contiguous(value_of(x));
  const auto view = around_axis(input.shape(), normalize_axis(operation, axis, tensor_of<X>::rank));
  auto out = tensor_of<X>::empty(input.shape(), input.device());
  forward(input.device(), view, input.data(), out.data());
  return record(
      operation, out,
      [out, view, backward](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        backward(out.device(), view, out.data(), dy.data(), grad.data(), accumulate);
      },
      x);
}
}  // namespace detail

/// exp(x) / sum(exp(x)) along an axis, computed without overflow.
template <Operand X>
auto softmax(const X& x, Index axis) {
  return detail::along_axis(
      "softmax", x, axis,
      [](auto device, auto view, const auto* in, auto* out) { kernels::softmax_forward(device, view, in, out); },
      [](auto device, auto view, const auto* y, const auto* dy, auto* dx, bool accumulate) {
        kernels::softmax_backward(device, view, y, dy, dx, accumulate);
      });
}

/// log(softmax(x)) along an axis.
template <Operand X>
auto log_softmax(const X& x, Index axis) {
  return detail::along_axis(
      "log_softmax", x, axis,
      [](auto device, auto view, const auto* in, auto* out) { kernels::log_softmax_forward(device, view, in, out); },
      [](auto device, auto view, const auto* y, const auto* dy, auto* dx, bool accumulate) {
        kernels::log_softmax_backward(device, view, y, dy, dx, accumulate);
      });
}

/// log(sum(exp(x))) along an axis, which goes away.
template <Operand X>
auto logsumexp(const X& x, Index axis) {
  return detail::reduce(
      "logsumexp", x, axis,
      [](auto device, auto view, const auto* in, auto* out) { kernels::logsumexp_forward(device, view, in, out); },
      [](auto device, auto view, const auto* in, const auto* out, const auto* dy, auto* dx, bool accumulate) {
        kernels::logsumexp_backward(device, view, in, out, dy, dx, accumulate);
      });
}

/// The same over all elements.
template <Operand X>
auto logsumexp(const X& x) {
  return detail::reduce_all(x, [](const auto& flat, Index axis) { return logsumexp(flat, axis); });
}
/// The same along an axis, which stays with size 1.
template <Operand X>
auto logsumexp(const X& x, Index axis, KeepAxis) {
  return detail::reduce_keeping(x, axis, [](const auto& in, Index a) { return logsumexp(in, a); });
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_SOFTMAX_HPP

namespace chorus::inline CHORUS_ABI::nn {

#define CHORUS_FUNCTION_LAYER(LAYER, FUNCTION)               \
  struct LAYER : Module {                                    \
    template <Operand X>                                     \
    auto operator()(const X& x) const {                      \
      return FUNCTION(x);                                    \
    }                                                        \
    std::string describe() const override { return #LAYER; } \
  }
CHORUS_FUNCTION_LAYER(ReLU, relu);
CHORUS_FUNCTION_LAYER(ReLU6, relu6);
CHORUS_FUNCTION_LAYER(Sigmoid, sigmoid);
CHORUS_FUNCTION_LAYER(LogSigmoid, log_sigmoid);
CHORUS_FUNCTION_LAYER(Tanh, tanh);
CHORUS_FUNCTION_LAYER(SiLU, silu);
CHORUS_FUNCTION_LAYER(GELU, gelu);
CHORUS_FUNCTION_LAYER(Mish, mish);
CHORUS_FUNCTION_LAYER(Hardsigmoid, hardsigmoid);
CHORUS_FUNCTION_LAYER(Hardswish, hardswish);
CHORUS_FUNCTION_LAYER(Flatten, flatten);
#undef CHORUS_FUNCTION_LAYER

/// x for positive x, else slope x.
struct LeakyReLU : Module {
  double slope;
  explicit LeakyReLU(double negative_slope = 0.01) : slope(negative_slope) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return leaky_relu(x, slope);
  }
  std::string describe() const override { return cat("LeakyReLU(", slope, ")"); }
};

/// x for positive x, else alpha (exp(x) - 1).
struct ELU : Module {
  double alpha;
  explicit ELU(double scale = 1) : alpha(scale) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return elu(x, alpha);
  }
  std::string describe() const override { return cat("ELU(", alpha, ")"); }
};

/// exp(x) / sum(exp(x)) along an axis.
struct Softmax : Module {
  Index axis;
  explicit Softmax(Index along) : axis(along) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return softmax(x, axis);
  }
  std::string describe() const override { return cat("Softmax(", axis, ")"); }
};

/// The largest number of each window.
struct MaxPool2d : Module {
  Size2d window;
  PoolOptions options;
  explicit MaxPool2d(Size2d size, const PoolOptions& pool = {}) : window(size), options(pool) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return max_pool2d(x, window, options);
  }
  std::string describe() const override { return cat("MaxPool2d(", window.height, ")"); }
};

/// The mean of each window.
struct AvgPool2d : Module {
  Size2d window;
  PoolOptions options;
  explicit AvgPool2d(Size2d size, const PoolOptions& pool = {}) : window(size), options(pool) {}
  template <Operand X>
  auto operator()(const X& x) const {
    return avg_pool2d(x, window, options);
  }
  std::string describe() const override { return cat("AvgPool2d(", window.height, ")"); }
};

/// In training, zeroes each element with probability `p` and scales the others by 1 / (1 - p).
struct Dropout : Module {
  double p;
  /// Throws UsageError unless 0 <= probability < 1.
  explicit Dropout(double probability = 0.5) : p(probability) {
    check<UsageError>(p >= 0 && p < 1, "Dropout: the probability is in [0, 1), got ", p);
  }
  template <Operand X>
  auto operator()(const X& x) const {
    return dropout(x, p, training());
  }
  std::string describe() const override { return cat("Dropout(", p, ")"); }
};

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_ACTIVATIONS_HPP

// <chorus/nn/batch_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_BATCH_NORM_HPP
#define CHORUS_SINGLE_CHORUS_NN_BATCH_NORM_HPP
/// Batch normalisation layers.

// <chorus/nn/init.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_INIT_HPP
#define CHORUS_SINGLE_CHORUS_NN_INIT_HPP
/// The numbers that parameters start with.

// <chorus/kernels/random.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_RANDOM_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_RANDOM_HPP
/// The random kernels for every kind of device that this build has.

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_RANDOM_HPP

namespace chorus::inline CHORUS_ABI::nn::init {

template <Device D, Real T, int Rank>
Tensor<T, Rank, D> to_device(const Tensor<T, Rank, Cpu>& host) {
  if constexpr (std::is_same_v<D, Cpu>)
    return host;
  else
    return Tensor<T, Rank, D>::from({host.data(), static_cast<std::size_t>(host.numel())}, host.shape());
}

/// Uniform in [-bound, bound), from the next random stream: the same numbers on every device.
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> uniform(const Shape<Rank>& shape, double bound) {
  const MemoryScope scope(trace::Memory::parameters);
  auto host = Tensor<T, Rank, Cpu>::empty(shape);
  kernels::fill_uniform(Cpu{}, initial_seed(), next_random_stream(), 0, host.numel(), host.data(), static_cast<T>(-bound),
                        static_cast<T>(bound));
  return to_device<D>(host);
}

/// From N(mean, deviation²), from the next random stream.
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> normal(const Shape<Rank>& shape, double mean, double deviation) {
  const MemoryScope scope(trace::Memory::parameters);
  auto host = Tensor<T, Rank, Cpu>::empty(shape);
  kernels::fill_normal(Cpu{}, initial_seed(), next_random_stream(), 0, host.numel(), host.data(), static_cast<T>(mean),
                       static_cast<T>(deviation));
  return to_device<D>(host);
}

/// PyTorch's default for weights and biases of linear and convolution layers: uniform within 1 / sqrt(fan_in)
/// (He et al. 2015 with a = sqrt(5)).
template <Real T, Device D, int Rank>
Tensor<T, Rank, D> default_uniform(const Shape<Rank>& shape, Index fan_in) {
  return uniform<T, D, Rank>(shape, fan_in > 0 ? 1 / std::sqrt(static_cast<double>(fan_in)) : 0);
}

template <Scalar T, Device D, int Rank>
Tensor<T, Rank, D> constant(const Shape<Rank>& shape, T value) {
  const MemoryScope scope(trace::Memory::parameters);
  return Tensor<T, Rank, D>::full(shape, value);
}

}  // namespace chorus::inline CHORUS_ABI::nn::init
#endif  // CHORUS_SINGLE_CHORUS_NN_INIT_HPP

// <chorus/ops/batch_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_BATCH_NORM_HPP
#define CHORUS_SINGLE_CHORUS_OPS_BATCH_NORM_HPP
/// Batch normalisation (Ioffe, Szegedy 2015).

// <chorus/kernels/batch_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_BATCH_NORM_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_BATCH_NORM_HPP
/// The batch_norm kernels for every kind of device that this build has.

// <chorus/kernels/cpu/batch_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_BATCH_NORM_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_BATCH_NORM_HPP
/// Batch normalisation on the CPU (Ioffe and Szegedy, "Batch normalization", ICML 2015, algorithms 1 and 2), with x, y:
/// [batch, channels, inner] and everything else [channels]. Statistics and normalisation are functions of their own:
/// between them SyncBatchNorm adds up the sums of all ranks. Sums are doubles: first of all channels, then of all
/// channels.

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
/// The same line of several samples, taken together.
template <class T>
struct RowBlock : Row<T> {
  Index rows, stride;

  template <class Op, class Value>
  Packet<T> reduce(Op op, const Value& value) const {
    return splat(Op::fold(reduce_rows(Index{0}, rows, splat(Op::neutral), op, [&](Index r) {
      const Index begin = this->at + r * stride;
      return reduce_packets<T>(begin, begin + this->length, splat(Op::neutral), op,
                               [&](Index i, auto count) { return keep_first<T>(value(i, count), count, Op::neutral); });
    })));
  }
};

/// Calls `f(line, elements of a channel in it)` with pieces of all channels: a few samples at a time, so that a piece
/// can be read twice from the cache, and memory is read in as many streams as processors follow.
template <class T, class F>
void for_channels(ChannelShape shape, const F& f) {
  const Index sample = shape.channels * shape.inner;
  const Index rows = shape.inner == 1 ? 32 : std::clamp(2048 / std::max(Index{1}, shape.inner), Index{1}, Index{16});
  for (Index b = 0; b < shape.batch; b += rows) {
    const Index n = std::min(rows, shape.batch - b);
    if (shape.inner == 1)
      for_packets<T>(shape.channels, [&](Index c, auto count) {
        f(Columns<T, decltype(count)>{b * sample + c, c, n, sample, count}, n);
      });
    else
      for (Index c = 0; c < shape.channels; ++c)
        f(RowBlock<T>{{b * sample + c * shape.inner, c, shape.inner}, n, sample}, n * shape.inner);
  }
}

/// Calls `f(line)` in the order of memory; a line belongs to one channel, or to a packet of channels where inner is 1.
template <class T, class F>
void for_samples(ChannelShape shape, const F& f) {
  for (Index b = 0; b < shape.batch; ++b) {
    if (shape.inner == 1)
      for_packets<T>(shape.channels, [&](Index c, auto count) {
        f(Columns<T, decltype(count)>{b * shape.channels + c, c, 1, shape.channels, count});
      });
    else
      for (Index c = 0; c < shape.channels; ++c) f(Row<T>{(b * shape.channels + c) * shape.inner, c, shape.inner});
  }
}

/// Memory for numbers per channel, kept for the next call of this thread that asks for the same slot.
template <class T, int slot>
T* channel_scratch(Index count) {
  thread_local std::vector<T> numbers;
  if (numbers.size() < static_cast<std::size_t>(count)) numbers.resize(static_cast<std::size_t>(count));
  return numbers.data();
}

template <class T>
const T* inverse_std(Index channels, const T* variance, double eps) {
  T* out = channel_scratch<T, 0>(channels);
  for (Index c = 0; c < channels; ++c) out[c] = static_cast<T>(1 / std::sqrt(static_cast<double>(variance[c]) + eps));
  return out;
}
}  // namespace detail

/// sums: [2, channels], sum(x) and sum(x * x). Each piece of a channel is summed about its own mean, so that a mean
/// that is large against the deviation costs no digits.
template <class T>
void batch_norm_sums(Cpu, ChannelShape shape, const T* x, double* sums) {
  std::fill_n(sums, 2 * shape.channels, 0.0);
  detail::for_channels<T>(shape, [&](const auto& line, Index n) {
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); });
    const auto mean = pmul(total, splat(T{1} / static_cast<T>(n)));
    const auto squares = line.reduce(Sum<T>{}, [&](Index i, auto count) {
      const auto d = psub(load(x + i, count), mean);
      return pmul(d, d);
    });
    line.for_results(total, squares, [&](Index c, T sum, T square_sum) {
      const auto elements = static_cast<double>(n), s = static_cast<double>(sum);
      const auto m = static_cast<double>(sum * (T{1} / static_cast<T>(n)));  // as above
      sums[c] += s;
      sums[shape.channels + c] += static_cast<double>(square_sum) + m * (2 * s - elements * m);
    });
  });
}

/// Mean and 1 / sqrt(variance + eps) from the sums over `count` elements per channel, and the running statistics moved
/// towards them (the variance unbiased); those may be null. Leaves them alone where count is 0.
template <class T>
void batch_norm_statistics(Cpu, Index channels, double count, const double* sums, double momentum, double eps,
                           T* running_mean, T* running_var, T* mean, T* invstd) {
  for (Index c = 0; c < channels; ++c) {
    const double m = count > 0 ? sums[c] / count : 0;
    const double variance = count > 0 ? std::max(0.0, sums[channels + c] / count - m * m) : 0;
    mean[c] = static_cast<T>(m);
    invstd[c] = static_cast<T>(1 / std::sqrt(variance + eps));
    if (!(count > 0)) continue;
    const auto move = [&](T* running, double value) {
      if (running != nullptr)
        running[c] = static_cast<T>((1 - momentum) * static_cast<double>(running[c]) + momentum * value);
    };
    move(running_mean, m);
    move(running_var, count > 1 ? variance * count / (count - 1) : variance);
  }
}

/// y = (x - mean) * invstd * weight + bias. weight and bias may be null: 1 and 0. `y` may be `x`.
template <class T>
void batch_norm_normalise(Cpu, ChannelShape shape, const T* x, const T* weight, const T* bias, const T* mean,
                          const T* invstd, T* y) {
  detail::for_samples<T>(shape, [&](const auto& line) {
    const auto m = line.load_result(mean);
    auto scale = line.load_result(invstd), shift = splat(T{0});
    if (weight != nullptr) scale = pmul(scale, line.load_result(weight));
    if (bias != nullptr) shift = line.load_result(bias);
    line.each([&](Index i, auto count) { store(y + i, pmadd(psub(load(x + i, count), m), scale, shift), count); });
  });
}

/// The whole forward pass of training; saves mean and invstd for the backward pass. Throws ShapeError where a channel
/// has one element alone: it has no variance.
template <class T>
void batch_norm_forward_train(Cpu cpu, ChannelShape shape, const T* x, const T* weight, const T* bias, T* running_mean,
                              T* running_var, double momentum, double eps, T* y, T* saved_mean, T* saved_invstd) {
  check<ShapeError>(shape.per_channel() != 1, "batch_norm: training needs more than one value per channel, got [batch ",
                    shape.batch, ", channels ", shape.channels, ", inner ", shape.inner, "]");
  double* sums = detail::channel_scratch<double, 2>(2 * shape.channels);
  batch_norm_sums(cpu, shape, x, sums);
  batch_norm_statistics(cpu, shape.channels, static_cast<double>(shape.per_channel()), sums, momentum, eps,
                        running_mean, running_var, saved_mean, saved_invstd);
  batch_norm_normalise(cpu, shape, x, weight, bias, saved_mean, saved_invstd, y);
}

/// The forward pass with running statistics.
template <class T>
void batch_norm_forward_eval(Cpu cpu, ChannelShape shape, const T* x, const T* weight, const T* bias,
                             const T* running_mean, const T* running_var, double eps, T* y) {
  batch_norm_normalise(cpu, shape, x, weight, bias, running_mean, detail::inverse_std(shape.channels, running_var, eps),
                       y);
}

/// sums: [2, channels], sum(dy) and sum(dy * (x - mean)).
template <class T>
void batch_norm_backward_sums(Cpu, ChannelShape shape, const T* x, const T* dy, const T* mean, double* sums) {
  std::fill_n(sums, 2 * shape.channels, 0.0);
  detail::for_channels<T>(shape, [&](const auto& line, Index) {
    const auto m = line.load_result(mean);
    const auto total = line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(dy + i, count); });
    const auto product = line.reduce(
        Sum<T>{}, [&](Index i, auto count) { return pmul(load(dy + i, count), psub(load(x + i, count), m)); });
    line.for_results(total, product, [&](Index c, T sum, T product_sum) {
      sums[c] += static_cast<double>(sum);
      sums[shape.channels + c] += static_cast<double>(product_sum);
    });
  });
}

/// dweight = invstd * sum(dy * (x - mean)), dbias = sum(dy). Either may be null.
template <class T>
void batch_norm_backward_affine(Cpu, Index channels, const double* sums, const T* invstd, T* dweight, T* dbias,
                                bool accumulate_weight, bool accumulate_bias) {
  for (Index c = 0; c < channels; ++c) {
    if (dweight != nullptr) {
      const T value = static_cast<T>(sums[channels + c] * static_cast<double>(invstd[c]));
      dweight[c] = accumulate_weight ? dweight[c] + value : value;
    }
    if (dbias != nullptr) {
      const T value = static_cast<T>(sums[c]);
      dbias[c] = accumulate_bias ? dbias[c] + value : value;
    }
  }
}

/// dx = weight * invstd * (dy - sum(dy) / count - (x - mean) * invstd^2 * sum(dy * (x - mean)) / count), the sums being
/// over `count` elements per channel. With null sums the statistics were constants (evaluation): dx = weight * invstd *
/// dy.
template <class T>
void batch_norm_backward_input(Cpu, ChannelShape shape, const T* x, const T* dy, const T* weight, const T* mean,
                               const T* invstd, double count, const double* sums, T* dx, bool accumulate) {
  T* centre = detail::channel_scratch<T, 1>(2 * shape.channels);
  T* slope = centre + shape.channels;
  for (Index c = 0; c < shape.channels; ++c) {
    const double s = static_cast<double>(invstd[c]);
    centre[c] = sums == nullptr ? T{0} : static_cast<T>(sums[c] / count);
    slope[c] = sums == nullptr ? T{0} : static_cast<T>(s * s * sums[shape.channels + c] / count);
  }
  detail::for_samples<T>(shape, [&](const auto& line) {
    auto scale = line.load_result(invstd);
    if (weight != nullptr) scale = pmul(scale, line.load_result(weight));
    const auto m = line.load_result(mean), a = line.load_result(centre), b = line.load_result(slope);
    line.each([&](Index i, auto n) {
      const auto d = psub(psub(load(dy + i, n), a), pmul(psub(load(x + i, n), m), b));
      store(dx + i, pmul(scale, d), n, accumulate);
    });
  });
}

/// The whole backward pass of training. Outputs that are null are not computed; `accumulate` is for dx, dweight, dbias.
template <class T>
void batch_norm_backward_train(Cpu cpu, ChannelShape shape, const T* x, const T* dy, const T* weight,
                               const T* saved_mean, const T* saved_invstd, T* dx, T* dweight, T* dbias,
                               std::array<bool, 3> accumulate) {
  double* sums = detail::channel_scratch<double, 2>(2 * shape.channels);
  batch_norm_backward_sums(cpu, shape, x, dy, saved_mean, sums);
  batch_norm_backward_affine(cpu, shape.channels, sums, saved_invstd, dweight, dbias, accumulate[1], accumulate[2]);
  if (dx != nullptr)
    batch_norm_backward_input(cpu, shape, x, dy, weight, saved_mean, saved_invstd,
                              static_cast<double>(shape.per_channel()), sums, dx, accumulate[0]);
}

/// The backward pass of evaluation, where the statistics are constants.
template <class T>
void batch_norm_backward_eval(Cpu cpu, ChannelShape shape, const T* x, const T* dy, const T* weight,
                              const T* running_mean, const T* running_var, double eps, T* dx, T* dweight, T* dbias,
                              std::array<bool, 3> accumulate) {
  const T* invstd = detail::inverse_std(shape.channels, running_var, eps);
  if (dweight != nullptr || dbias != nullptr) {
    double* sums = detail::channel_scratch<double, 2>(2 * shape.channels);
    batch_norm_backward_sums(cpu, shape, x, dy, running_mean, sums);
    batch_norm_backward_affine(cpu, shape.channels, sums, invstd, dweight, dbias, accumulate[1], accumulate[2]);
  }
  if (dx != nullptr)
    batch_norm_backward_input(cpu, shape, x, dy, weight, running_mean, invstd, 0, nullptr, dx, accumulate[0]);
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_BATCH_NORM_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_BATCH_NORM_HPP

namespace chorus::inline CHORUS_ABI {

struct BatchNormOptions {
  double eps = 1e-5;
  /// The share of the new batch in the running statistics.
  double momentum = 0.1;
};

namespace detail {
template <std::size_t N>
kernels::ChannelShape channel_view(const std::array<Index, N>& shape) {
  static_assert(N >= 2, "batch_norm: the input is [batch, channels, ...]");
  kernels::ChannelShape view{shape[0], shape[1], 1};
  for (std::size_t i = 2; i < N; ++i) view.inner *= shape[i];
  return view;
}
}  // namespace detail

/// x: [batch, channels, ...], weight, bias, running_mean, running_var: [channels] -> (x - mean) / sqrt(var + eps) *
/// weight + bias for each channel. In training, mean and (biased) variance are the batch's, and the running ones are
/// moved towards them (the variance unbiased), except by an empty batch; else the running ones are used. Throws
/// ShapeError where channels don't fit, or for a training batch with one number a channel.
template <Operand X, Operand W, Operand B, class T, class D>
auto batch_norm(const X& x, const W& weight, const B& bias, const Tensor<T, 1, D>& running_mean,
                const Tensor<T, 1, D>& running_var, bool training, const BatchNormOptions& options = {}) {
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto b = contiguous(value_of(bias));
  const auto view = detail::channel_view(input.shape());
  for (const auto& per_channel : {w, b, running_mean, running_var})
    check<ShapeError>(!per_channel.defined() || per_channel.numel() == view.channels, "batch_norm: an input of shape ",
                      input.shape(), " does not fit ", per_channel.numel(), " channels");
  check<UsageError>(training || (running_mean.defined() && running_var.defined()),
                    "batch_norm: there are no running statistics to use in evaluation");
  const auto device = input.device();
  auto out = tensor_of<X>::empty(input.shape(), device);
  Tensor<T, 1, D> mean = running_mean, invstd;
  if (training) {
    mean = Tensor<T, 1, D>::empty({view.channels}, device);
    invstd = Tensor<T, 1, D>::empty({view.channels}, device);
    kernels::batch_norm_forward_train(device, view, input.data(), w.data(), b.data(), running_mean.data(),
                                      running_var.data(), options.momentum, options.eps, out.data(), mean.data(),
                                      invstd.data());
  } else {
    kernels::batch_norm_forward_eval(device, view, input.data(), w.data(), b.data(), running_mean.data(),
                                     running_var.data(), options.eps, out.data());
  }
  return record(
      "batch_norm", std::move(out),
      [input, w, mean, invstd, running_var, view, training, eps = options.eps](const auto& dy, auto dx, auto dw,
                                                                               auto db) {
        T* grads[3] = {};
        std::array<bool, 3> accumulate{};
        const auto want = [&](std::size_t i, auto node) {
          if (!node) return;
          const auto target = node->target();
          grads[i] = target.data();
          accumulate[i] = target.accumulate;
        };
        want(0, dx);
        want(1, dw);
        want(2, db);
        if (training)
          kernels::batch_norm_backward_train(dy.device(), view, input.data(), dy.data(), w.data(), mean.data(),
                                             invstd.data(), grads[0], grads[1], grads[2], accumulate);
        else
          kernels::batch_norm_backward_eval(dy.device(), view, input.data(), dy.data(), w.data(), mean.data(),
                                            running_var.data(), eps, grads[0], grads[1], grads[2], accumulate);
      },
      x, weight, bias);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_BATCH_NORM_HPP

namespace chorus::inline CHORUS_ABI::nn {

/// Normalises each channel of x: [batch, channels, ...] over the batch and all inner axes. In training the batch's
/// statistics are used and the running ones are updated; in evaluation the running ones are used.
template <Device D, Real T = float>
class BatchNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;
  Buffer<T, 1, D> running_mean, running_var;
  Buffer<std::int64_t, 0, D> num_batches_tracked;

  /// Throws ShapeError unless `channels` is positive.
  explicit BatchNorm(Index channels, const BatchNormOptions& options = {}) : options_(options) {
    check<ShapeError>(channels > 0, "BatchNorm: ", channels, " channels: must be positive");
    weight = Parameter(init::constant<T, D, 1>({channels}, T{1}));
    bias = Parameter(init::constant<T, D, 1>({channels}, T{0}));
    running_mean = Buffer(init::constant<T, D, 1>({channels}, T{0}));
    running_var = Buffer(init::constant<T, D, 1>({channels}, T{1}));
    num_batches_tracked = Buffer(init::constant<std::int64_t, D, 0>({}, 0));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    if (training() && x.numel() > 0) {
      const auto& count = num_batches_tracked.value();
      const std::int64_t next = count.item() + 1;
      copy_bytes(count.device(), count.data(), Cpu{}, &next, sizeof next);
    }
    return batch_norm(x, weight, bias, running_mean.value(), running_var.value(), training(), options_);
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    visitor.parameter("bias", bias);
    visitor.buffer("running_mean", running_mean);
    visitor.buffer("running_var", running_var);
    visitor.buffer("num_batches_tracked", num_batches_tracked);
  }
  std::string describe() const override { return cat("BatchNorm(", weight.shape()[0], ")"); }

 private:
  BatchNormOptions options_;
};

/// The names that PyTorch has for them; the number of inner axes is the input's.
template <Device D, Real T = float>
using BatchNorm1d = BatchNorm<D, T>;
template <Device D, Real T = float>
using BatchNorm2d = BatchNorm<D, T>;

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_BATCH_NORM_HPP

// <chorus/nn/containers.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_CONTAINERS_HPP
#define CHORUS_SINGLE_CHORUS_NN_CONTAINERS_HPP
/// Modules made of modules: Sequential (a fixed list, run in turn) and ModuleList (a list of one type, of any length).

namespace chorus::inline CHORUS_ABI::nn {

/// Runs its layers one after the other; their names are "0", "1", ...
template <class... Layers>
class Sequential : public Module {
 public:
  using device_type = typename decltype(detail::device_of(std::declval<const Layers&>()...))::type;

  explicit Sequential(Layers... layers) : layers_(std::move(layers)...) {}

  template <class X>
  auto operator()(const X& x) const {
    return run<0>(x);
  }
  template <std::size_t I>
  auto& get() {
    return std::get<I>(layers_);
  }
  void visit(Visitor& visitor) override {
    int index = 0;
    std::apply([&](auto&... layers) { (detail::visit_member(visitor, cat(index++), layers), ...); }, layers_);
  }
  std::string describe() const override { return "Sequential"; }

 private:
  template <std::size_t I, class X>
  auto run(const X& x) const {
    if constexpr (I == sizeof...(Layers))
      return x;
    else
      return run<I + 1>(std::get<I>(layers_)(x));
  }
  std::tuple<Layers...> layers_;
};

/// Blocks of one type, named "0", "1", ...: `for (const auto& block : blocks) x = block(x);`
template <class M>
class ModuleList : public Module {
 public:
  using device_type = typename M::device_type;

  ModuleList() = default;
  explicit ModuleList(std::vector<M> modules) : modules_(std::move(modules)) {}

  void push_back(M module) { modules_.push_back(std::move(module)); }
  std::size_t size() const { return modules_.size(); }
  const M& operator[](std::size_t i) const { return modules_.at(i); }
  M& operator[](std::size_t i) { return modules_.at(i); }
  auto begin() const { return modules_.begin(); }
  auto end() const { return modules_.end(); }

  void visit(Visitor& visitor) override {
    for (std::size_t i = 0; i < modules_.size(); ++i) visitor.module(cat(i), modules_[i]);
  }
  std::string describe() const override { return "ModuleList"; }

 private:
  std::vector<M> modules_;
};

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_CONTAINERS_HPP

// <chorus/nn/convolution.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_CONVOLUTION_HPP
#define CHORUS_SINGLE_CHORUS_NN_CONVOLUTION_HPP
/// The two-dimensional convolution layer.

// <chorus/ops/convolution.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION_HPP
/// Two-dimensional convolution (cross-correlation, as in PyTorch).

// <chorus/kernels/convolution.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CONVOLUTION_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CONVOLUTION_HPP
/// The convolution kernels for every kind of device that this build has.

// <chorus/kernels/cpu/convolution.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_CONVOLUTION_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_CONVOLUTION_HPP
/// Two-dimensional convolution (cross-correlation, as in PyTorch) on the CPU. x: [batch, in_channels, height, width],
/// weight: [out_channels, in_channels / groups, kernel_h, kernel_w], y: [batch, out_channels, out_height, out_width].
/// Results overwrite; gradients overwrite or, with `accumulate`, add.
///
/// Each pass is a matrix product over rasters (raster.hpp), some images at a time. With many rows it pays to gather
/// panels of the pixels that are wanted; with few, the rasters are multiplied as they are, with the positions between
/// the rows.

// <chorus/kernels/convolution_shape.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CONVOLUTION_SHAPE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CONVOLUTION_SHAPE_HPP
/// The sizes of a two-dimensional convolution, shared by every kind of device.

namespace chorus::inline CHORUS_ABI::kernels {

/// x: [batch, in_channels, height, width], weight: [out_channels, in_channels / groups, kernel_h, kernel_w],
/// y: [batch, out_channels, out_height(), out_width()].
struct Conv2dShape {
  Index batch, in_channels, height, width, out_channels, kernel_h, kernel_w;
  Index stride_h = 1, stride_w = 1, padding_h = 0, padding_w = 0, dilation_h = 1, dilation_w = 1, groups = 1;

  Index out_height() const { return (height + 2 * padding_h - dilation_h * (kernel_h - 1) - 1) / stride_h + 1; }
  Index out_width() const { return (width + 2 * padding_w - dilation_w * (kernel_w - 1) - 1) / stride_w + 1; }
};

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CONVOLUTION_SHAPE_HPP

// <chorus/kernels/cpu/input_raster.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_INPUT_RASTER_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_INPUT_RASTER_HPP
/// The layout that a convolution's forward and weight passes read x in.

// <chorus/kernels/cpu/raster.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_RASTER_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_RASTER_HPP
/// How the convolutions lay images out. In a raster (rows at a pitch, zeros for padding between them) all input pixels
/// of one kernel tap are the output pixels' positions plus one offset, so a convolution is a matrix product whose
/// right-hand side needs no copy for each tap. With stride s, every s-th row and column makes a plane of its own, and
/// the same holds there. Positions between the rows are computed too and thrown away.

namespace chorus::inline CHORUS_ABI::kernels::detail {

/// One axis: raster position i stands for coordinate `step * i + origin` of the image.
struct Axis {
  Index extent, step, origin;

  // First position at or after coordinate `at`.
  Index position(Index at) const { return std::max<Index>(0, (at - origin + step - 1) / step); }
  Index begin(Index positions) const { return std::min(position(0), positions); }
  Index end(Index positions) const { return std::clamp(position(extent), begin(positions), positions); }
};

/// to[0, n) = from[0, n)
template <class T>
void copy_row(const T* from, Index n, T* to) {
  constexpr Index w = lanes<T>;
  if (n < w) {
    for (Index j = 0; j < n; ++j) to[j] = from[j];
    return;
  }
  for (Index j = 0; j < n - w; j += w) store(to + j, load(from + j, Whole<T>{}), Whole<T>{});
  store(to + n - w, load(from + n - w, Whole<T>{}), Whole<T>{});
}

/// Lays one image out in `rows` rows of `pitch` numbers, zeros where a position is outside of the image.
template <class T>
void to_raster(const T* image, Axis vertical, Axis horizontal, Index rows, Index pitch, T* to) {
  const Index top = vertical.begin(rows), bottom = vertical.end(rows);
  const Index left = horizontal.begin(pitch), right = horizontal.end(pitch);
  std::fill_n(to, top * pitch, T{0});
  for (Index i = top; i < bottom; ++i) {
    const T* from = image + (i * vertical.step + vertical.origin) * horizontal.extent;
    T* row = to + i * pitch;
    for (Index j = 0; j < left; ++j) row[j] = T{0};
    if (horizontal.step == 1)
      copy_row(from + left + horizontal.origin, right - left, row + left);
    else
      for (Index j = left; j < right; ++j) row[j] = from[j * horizontal.step + horizontal.origin];
    for (Index j = right; j < pitch; ++j) row[j] = T{0};
  }
  std::fill_n(to + bottom * pitch, (rows - bottom) * pitch, T{0});
}

/// The way back, without the padding: image = raster + `bias`, or image += with `accumulate`. Positions outside of the
/// image are skipped, image pixels without a position are left alone.
template <class T>
void from_raster(const T* raster, Axis vertical, Axis horizontal, Index rows, Index pitch, T bias, T* image,
                 bool accumulate) {
  const Index left = horizontal.begin(pitch), right = horizontal.end(pitch), n = right - left;
  for (Index i = vertical.begin(rows); i < vertical.end(rows); ++i) {
    const T* from = raster + i * pitch + left;
    T* to =
        image + (i * vertical.step + vertical.origin) * horizontal.extent + left * horizontal.step + horizontal.origin;
    if (horizontal.step == 1 && !accumulate && n >= lanes<T>) {
      constexpr Index w = lanes<T>;
      for (Index j = 0; j < n - w; j += w) store(to + j, padd(load(from + j, Whole<T>{}), splat(bias)), Whole<T>{});
      store(to + n - w, padd(load(from + n - w, Whole<T>{}), splat(bias)), Whole<T>{});
    } else {
      for (Index j = 0; j < n; ++j) {
        T& pixel = to[j * horizontal.step];
        pixel = (accumulate ? pixel : T{0}) + from[j] + bias;
      }
    }
  }
}

/// Where a result's pixels lie in a raster: pixel (image, i, j) at image * plane + i * pitch + j.
struct Pixels {
  Index images, rows, columns, pitch, plane;
  Index count() const { return images * rows * columns; }
  Index position(Index pixel) const {
    const Index row = pixel / columns;
    return row / rows * plane + row % rows * pitch + pixel % columns;
  }
};

/// The pieces of raster rows that hold the pixels [first, first + count), at most 256.
class Segments {
 public:
  Segments(const Pixels& pixels, Index first, Index count) {
    for (Index done = 0; done < count; ++size_) {
      const Index length = std::min(pixels.columns - (first + done) % pixels.columns, count - done);
      all_[size_] = {pixels.position(first + done), done, done + length};
      done += length;
    }
  }

  /// to[0, count) = those pixels of `from`. Writes whole packets, so up to one packet behind `to[count]` as well.
  template <class T>
  void gather(const T* from, T* to) const {
    for (Index i = 0; i < size_; ++i) {
      const T* source = from + all_[i].position - all_[i].begin;
      for (Index j = all_[i].begin; j < all_[i].end; j += lanes<T>)
        store(to + j, load(source + j, Whole<T>{}), Whole<T>{});
    }
  }

 private:
  struct Segment {
    Index position, begin, end;
  };
  Segment all_[256];
  Index size_ = 0;
};

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_RASTER_HPP

// <chorus/kernels/cpu/tile.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_TILE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_TILE_HPP
/// The two inner loops that matrix products and convolutions are made of. Each keeps a tile of sums in registers:
/// `multiply_tile` sums outer products, `dot_tile` sums products along contiguous rows.

namespace chorus::inline CHORUS_ABI::kernels::detail {

#ifdef __CUDACC__
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675  // "unrecognized GCC pragma": the host compiler knows it
#endif

// A tile's sums take 16 of 32 registers, or 12 of 16: enough chains to keep two multipliers busy for a latency of 4.
#ifdef EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS
inline constexpr bool many_registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32;
#else
inline constexpr bool many_registers = false;
#endif
inline constexpr int tile_rows = many_registers ? 8 : 6, dot_rows = many_registers ? 6 : 3;
inline constexpr int dot_columns = many_registers ? 4 : 3;
template <class T>
inline constexpr Index tile_columns = 2 * lanes<T>;

/// Calls f(first, count) for pieces of [0, n) of at most `most` elements, of sizes as equal as can be.
template <class F>
void for_pieces(Index n, Index most, F f) {
  const Index pieces = (n + most - 1) / most;
  for (Index piece = 0, first = 0; piece < pieces; ++piece) {
    const Index count = (n - first + pieces - piece - 1) / (pieces - piece);
    f(first, count);
    first += count;
  }
}

/// A strided matrix: element (i, p) is at data[i * row + p * column].
template <class T>
struct Matrix {
  const T* data;
  Index row, column;
};

/// c[i, j] = start[j] + sum over p of a[i, p] * b[offsets[p] + j], for `Rows` rows and `tile_columns` columns; `+=`
/// with `accumulate`.
template <int Rows, class T>
void multiply_tile(Index depth, Matrix<T> a, const T* b, const Index* offsets, const T* start, T* c, Index c_row,
                   bool accumulate) {
  constexpr Index w = lanes<T>;
  Packet<T> left[Rows], right[Rows];
  const auto start_left = load(start, Whole<T>{}), start_right = load(start + w, Whole<T>{});
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    left[i] = start_left;
    right[i] = start_right;
  }
  for (Index p = 0; p < depth; ++p) {
    const T* row = b + offsets[p];
    const auto b_left = load(row, Whole<T>{}), b_right = load(row + w, Whole<T>{});
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const auto factor = splat(a.data[i * a.row + p * a.column]);
      left[i] = pmadd(factor, b_left, left[i]);
      right[i] = pmadd(factor, b_right, right[i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    store(c + i * c_row, left[i], Whole<T>{}, accumulate);
    store(c + i * c_row + w, right[i], Whole<T>{}, accumulate);
  }
}

/// The same for any number of rows up to `Most`.
template <class T, int Most = tile_rows>
void multiply_rows(Index rows, Index depth, Matrix<T> a, const T* b, const Index* offsets, const T* start, T* c,
                   Index c_row, bool accumulate) {
  if (rows == Most) return multiply_tile<Most>(depth, a, b, offsets, start, c, c_row, accumulate);
  if constexpr (Most > 1) multiply_rows<T, Most - 1>(rows, depth, a, b, offsets, start, c, c_row, accumulate);
}

/// The same for any number of rows, and for any number of columns up to `tile_columns`: `b` and `start` must be
/// readable to `tile_columns`, c is written no further than `columns`.
template <class T>
void multiply_panel(Index rows, Index columns, Index depth, Matrix<T> a, const T* b, const Index* offsets,
                    const T* start, T* c, Index c_row, bool accumulate) {
  constexpr Index w = tile_columns<T>;
  for_pieces(rows, tile_rows, [&](Index first, Index count) {
    const Matrix<T> left{a.data + first * a.row, a.row, a.column};
    T* to = c + first * c_row;
    if (columns == w) return multiply_rows(count, depth, left, b, offsets, start, to, c_row, accumulate);
    alignas(64) T edge[tile_rows * w];
    multiply_rows(count, depth, left, b, offsets, start, edge, w, false);
    for (Index i = 0; i < count; ++i)
      for (Index j = 0; j < columns; ++j) to[i * c_row + j] = (accumulate ? to[i * c_row + j] : T{0}) + edge[i * w + j];
  });
}

/// Contiguous runs of a long row: `count` runs of `length` elements, `pitch` apart.
struct Runs {
  Index count, length, pitch;
};

/// `value`, but g++ won't read it from memory anew for each use.
template <class P>
P in_register(P value) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDA_ARCH__)
  asm("" : "+x"(value));
#endif
  return value;
}

/// c[i, j] += sum over the runs of b, and as many elements of a without gaps, of a[i * a_row + q] * b[offsets[j] +
/// position of q], for `Rows` rows and up to `dot_columns` columns. Runs are read in whole packets: `length` is a
/// multiple of a packet's.
template <int Rows, class T>
void dot_tile(Index columns, Runs runs, const T* a, Index a_row, const T* b, const Index* offsets, T* c, Index c_row) {
  constexpr Index w = lanes<T>;
  Packet<T> sums[Rows][dot_columns];
  const T* bs[dot_columns];
#pragma GCC unroll 8
  for (int j = 0; j < dot_columns; ++j) {
    bs[j] = b + offsets[std::min<Index>(j, columns - 1)];
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) sums[i][j] = splat(T{0});
  }
  for (Index run = 0; run < runs.count; ++run, a += runs.length)
    for (Index q = 0; q < runs.length; q += w) {
      Packet<T> values[dot_columns];
#pragma GCC unroll 8
      for (int j = 0; j < dot_columns; ++j) values[j] = in_register(load(bs[j] + run * runs.pitch + q, Whole<T>{}));
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        const auto factor = in_register(load(a + i * a_row + q, Whole<T>{}));
#pragma GCC unroll 8
        for (int j = 0; j < dot_columns; ++j) sums[i][j] = pmadd(factor, values[j], sums[i][j]);
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < dot_columns; ++j)
      if (j < columns) c[i * c_row + j] += Eigen::internal::predux(sums[i][j]);
}

/// The same for any number of rows up to `Most`.
template <class T, int Most = dot_rows>
void dot_rows_tile(Index rows, Index columns, Runs runs, const T* a, Index a_row, const T* b, const Index* offsets,
                   T* c, Index c_row) {
  if (rows == Most) return dot_tile<Most>(columns, runs, a, a_row, b, offsets, c, c_row);
  if constexpr (Most > 1) dot_rows_tile<T, Most - 1>(rows, columns, runs, a, a_row, b, offsets, c, c_row);
}

#ifdef __CUDACC__
#pragma nv_diagnostic pop
#endif

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_TILE_HPP

namespace chorus::inline CHORUS_ABI::kernels::detail {

/// As many images at a time as make a thousand pixels.
inline Index images_at_once(Index batch, Index plane) {
  const Index most = (1023 + plane) / plane;
  const Index parts = (batch + most - 1) / most;
  return (batch + parts - 1) / parts;
}

/// Along one axis, tap t reads phase t * dilation % stride; phases that no tap reads are left out of a raster.
struct Phases {
  Index kernel, stride, dilation;
  bool used(Index phase) const {
    for (Index tap = 0; tap < std::min(kernel, stride); ++tap)
      if (tap * dilation % stride == phase) return true;
    return false;
  }
  /// How many used phases are below `phase`.
  Index rank(Index phase) const {
    Index below = 0;
    for (Index other = 0; other < phase; ++other) below += used(other) ? 1 : 0;
    return below;
  }
  Index count() const { return rank(stride); }
};

/// The rasters of one group's input channels (in phases, where there are strides), as the forward and the weight's pass
/// read them: image n of plane p starts at (p * images + n) * plane.
template <class T>
struct InputRaster {
  const Conv2dShape& s;
  Phases vertical, horizontal;
  Index channels, rows, pitch, plane, images, reach;

  explicit InputRaster(const Conv2dShape& shape)
      : s(shape),
        vertical{s.kernel_h, s.stride_h, s.dilation_h},
        horizontal{s.kernel_w, s.stride_w, s.dilation_w},
        channels(s.in_channels / s.groups) {
    // Without stride a row's right padding is the next row's left padding, and so is an image's bottom padding.
    rows = s.stride_h == 1 ? std::max(s.height + s.padding_h, s.out_height())
                           : (s.height + 2 * s.padding_h + s.stride_h - 1) / s.stride_h;
    pitch = s.stride_w == 1 ? std::max(s.width + s.padding_w, s.out_width())
                            : (s.width + 2 * s.padding_w + s.stride_w - 1) / s.stride_w;
    plane = rows * pitch;
    images = images_at_once(s.batch, plane);
    reach = s.dilation_h * (s.kernel_h - 1) / s.stride_h * pitch + s.dilation_w * (s.kernel_w - 1) / s.stride_w;
  }

  /// Numbers in the rasters, with the zeros behind them that the last tile may read.
  Index size() const {
    return channels * vertical.count() * horizontal.count() * images * plane + reach + 2 * tile_columns<T>;
  }

  /// Distance of each channel's kernel taps from the output's position.
  void offsets(Index* to) const {
    const Index phases_w = horizontal.count(), phases = vertical.count() * phases_w;
    for (Index c = 0; c < channels; ++c)
      for (Index kh = 0; kh < s.kernel_h; ++kh)
        for (Index kw = 0; kw < s.kernel_w; ++kw) {
          const Index h = kh * s.dilation_h, w = kw * s.dilation_w;
          const Index phase = vertical.rank(h % s.stride_h) * phases_w + horizontal.rank(w % s.stride_w);
          *to++ = (c * phases + phase) * images * plane + h / s.stride_h * pitch + w / s.stride_w;
        }
  }

  /// x: the first of `count` images, at the group's first channel.
  void fill(const T* x, Index count, T* to) const {
    for (Index c = 0; c < channels; ++c)
      for (Index h = 0; h < s.stride_h; ++h)
        for (Index w = 0; w < s.stride_w; ++w) {
          if (!vertical.used(h) || !horizontal.used(w)) continue;
          for (Index n = 0; n < count; ++n, to += plane)
            to_raster(x + (n * s.in_channels + c) * s.height * s.width, Axis{s.height, s.stride_h, h - s.padding_h},
                      Axis{s.width, s.stride_w, w - s.padding_w}, rows, pitch, to);
          std::fill_n(to, (images - count) * plane, T{0});
          to += (images - count) * plane;
        }
    std::fill_n(to, reach + 2 * tile_columns<T>, T{0});
  }

  Pixels pixels(Index count) const { return {count, s.out_height(), s.out_width(), pitch, plane}; }
};

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_INPUT_RASTER_HPP

// <chorus/kernels/cpu/pack.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACK_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACK_HPP
/// Panels: the right-hand sides of `multiply_tile`, copied so that they are contiguous and in the first-level cache.

namespace chorus::inline CHORUS_ABI::kernels::detail {

/// to[p, j] = b[p, j] for `depth` rows of `columns` numbers, padded with zeros to `tile_columns`.
template <class T>
void pack_rows(Index depth, Index columns, const T* b, Index b_row, T* to) {
  constexpr Index w = lanes<T>;
  if (columns == tile_columns<T>) {
    for (Index p = 0; p < depth; ++p, b += b_row, to += 2 * w) {
      store(to, load(b, Whole<T>{}), Whole<T>{});
      store(to + w, load(b + w, Whole<T>{}), Whole<T>{});
    }
  } else {
    for (Index p = 0; p < depth; ++p, b += b_row, to += 2 * w)
      for (Index j = 0; j < 2 * w; ++j) to[j] = j < columns ? b[j] : T{0};
  }
}

// g++ warns about alignment attributes that Eigen's packets lose as template arguments, and about undefined values in
// its own shuffles; both are harmless.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
/// to[p, j] = b[j, p], padded likewise. Squares of packets are transposed in registers; where `depth` is no multiple of
/// a packet, the last square overlaps the one before.
template <class T>
void pack_columns(Index depth, Index columns, const T* b, Index b_row, T* to) {
  constexpr Index w = lanes<T>;
  if (depth < w) {
    for (Index p = 0; p < depth; ++p)
      for (Index j = 0; j < 2 * w; ++j) to[p * 2 * w + j] = j < columns ? b[j * b_row + p] : T{0};
    return;
  }
  for (Index half = 0; half < 2 * w; half += w)
    for (Index next = 0; next < depth; next += w) {
      const Index p = std::min(next, depth - w);
      Eigen::internal::PacketBlock<Packet<T>, w> square;
      for (Index j = 0; j < w; ++j)
        square.packet[j] = half + j < columns ? load(b + (half + j) * b_row + p, Whole<T>{}) : splat(T{0});
      Eigen::internal::ptranspose(square);
      for (Index j = 0; j < w; ++j) store(to + (p + j) * 2 * w + half, square.packet[j], Whole<T>{});
    }
}
#pragma GCC diagnostic pop

}  // namespace chorus::inline CHORUS_ABI::kernels::detail
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_PACK_HPP

// <chorus/kernels/cpu/scratch.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_SCRATCH_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_SCRATCH_HPP
/// Working memory of a kernel.

namespace chorus::inline CHORUS_ABI::kernels {

/// `count` numbers, uninitialised, from the device's cache; given back at the end of the scope.
template <class T>
class Scratch {
 public:
  Scratch(Cpu device, Index count) : storage_(device, static_cast<std::size_t>(count) * sizeof(T)) {}
  T* data() const { return static_cast<T*>(storage_.data()); }

 private:
  Storage<Cpu> storage_;
};

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_SCRATCH_HPP

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {

inline constexpr Index conv_depth = 256, conv_rows = 256, gather_rows = 24;

constexpr Index round_up(Index n, Index unit) { return (n + unit - 1) / unit * unit; }

/// Runs of positions that hold all pixels: one for all, or one for each image where that is less work.
inline Runs runs_of(const Pixels& p, Index unit) {
  const Index span = (p.rows - 1) * p.pitch + p.columns, separate = round_up(span, unit);
  if (separate < p.plane) return {p.images, separate, p.plane};
  return {1, round_up((p.images - 1) * p.plane + span, unit), 0};
}

/// c[i, q] = sum over p of a[i, p] * b[offsets[p] + position of q]. Columns of c are the pixels themselves, with
/// `gather`, or else all positions. Rows of c have room for a tile more.
template <class T>
void multiply_raster(bool gather, Index m, Index k, const Pixels& pixels, Matrix<T> a, const T* b, const Index* offsets,
                     T* c, Index c_row) {
  constexpr Index w = tile_columns<T>;
  alignas(64) T panel[conv_depth * w + w];
  alignas(64) constexpr T zeros[w] = {};
  Index packed[conv_depth];
  for (Index p = 0; p < conv_depth; ++p) packed[p] = p * w;
  if (gather) std::fill_n(panel, conv_depth * w, T{0});
  const Runs runs = gather ? Runs{1, round_up(pixels.count(), w), 0} : runs_of(pixels, w);

  const auto block = [&](Index p0, Index depth) {
    for_pieces(m, conv_rows, [&](Index i, Index rows) {
      for (Index run = 0; run < runs.count; ++run)
        for (Index q = run * runs.pitch; q < run * runs.pitch + runs.length; q += w) {
          const Matrix<T> left{a.data + i * a.row + p0 * a.column, a.row, a.column};
          if (gather) {
            const Segments segments(pixels, q, std::min(w, pixels.count() - q));
            for (Index p = 0; p < depth; ++p) segments.gather(b + offsets[p0 + p], panel + p * w);
          }
          multiply_panel(rows, w, depth, left, gather ? panel : b + q, gather ? packed : offsets + p0, zeros,
                         c + i * c_row + q, c_row, p0 > 0);
        }
    });
  };
  if (k == 0)
    block(0, 0);
  else
    for_pieces(k, conv_depth, block);
}

/// c[i, j] += sum over the pixels q of a[i, q] * b[offsets[j] + position of q].
template <class T>
void multiply_gathered(Index m, Index n, const Pixels& pixels, const T* a, Index a_row, const T* b,
                       const Index* offsets, T* c, Index c_row) {
  constexpr Index w = tile_columns<T>;
  alignas(64) T columns[w * conv_depth + w], panel[conv_depth * w];
  alignas(64) constexpr T zeros[w] = {};
  Index packed[conv_depth];
  for (Index p = 0; p < conv_depth; ++p) packed[p] = p * w;
  for (Index j = 0; j < n; j += w)
    for_pieces(pixels.count(), conv_depth, [&](Index q, Index depth) {
      const Index width = std::min(w, n - j);
      const Segments segments(pixels, q, depth);
      for (Index l = 0; l < width; ++l) segments.gather(b + offsets[j + l], columns + l * conv_depth);
      pack_columns(depth, width, columns, conv_depth, panel);
      multiply_panel(m, width, depth, Matrix<T>{a + q, a_row, 1}, panel, packed, zeros, c + j, c_row, true);
    });
}

}  // namespace detail

/// y = conv(x, weight) + bias; `bias` may be null.
template <std::floating_point T>
void conv2d_forward(Cpu device, const Conv2dShape& s, const T* x, const T* weight, const T* bias, T* y) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, out_h = s.out_height(), out_w = s.out_width(), out = out_h * out_w;
  if (s.batch * s.out_channels * out == 0) return;
  const InputRaster<T> raster(s);
  const bool gather = filters >= gather_rows;
  const Index k = raster.channels * s.kernel_h * s.kernel_w, row = raster.images * raster.plane + tile_columns<T>;
  const Index pitch = gather ? out_w : raster.pitch, plane = gather ? out : raster.plane;
  const Scratch<T> xs(device, raster.size()), ys(device, filters * row);
  const Scratch<Index> offsets(device, k);
  raster.offsets(offsets.data());
  for (Index group = 0; group < s.groups; ++group)
    for (Index first = 0; first < s.batch; first += raster.images) {
      const Index count = std::min(raster.images, s.batch - first);
      raster.fill(x + (first * s.in_channels + group * raster.channels) * s.height * s.width, count, xs.data());
      multiply_raster(gather, filters, k, raster.pixels(count), Matrix<T>{weight + group * filters * k, k, 1},
                      xs.data(), offsets.data(), ys.data(), row);
      for (Index n = 0; n < count; ++n)
        for (Index o = 0; o < filters; ++o) {
          const Index channel = group * filters + o;
          from_raster(ys.data() + o * row + n * plane, Axis{out_h, 1, 0}, Axis{out_w, 1, 0}, out_h, pitch,
                      bias != nullptr ? bias[channel] : T{0}, y + ((first + n) * s.out_channels + channel) * out,
                      false);
        }
    }
}

/// dweight = the gradient with respect to the weight.
template <std::floating_point T>
void conv2d_backward_weight(Cpu device, const Conv2dShape& s, const T* x, const T* dy, T* dweight, bool accumulate) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, out_h = s.out_height(), out_w = s.out_width(), out = out_h * out_w;
  const Index k = s.in_channels / s.groups * s.kernel_h * s.kernel_w;
  if (!accumulate) std::fill_n(dweight, s.out_channels * k, T{0});
  if (s.batch * s.out_channels * k * out == 0) return;
  const InputRaster<T> raster(s);
  const bool gather = filters >= gather_rows;
  const Index row = raster.images * raster.plane + tile_columns<T>;
  const Scratch<T> xs(device, raster.size()), ys(device, filters * row);
  const Scratch<Index> offsets(device, k);
  raster.offsets(offsets.data());
  for (Index group = 0; group < s.groups; ++group)
    for (Index first = 0; first < s.batch; first += raster.images) {
      const Index count = std::min(raster.images, s.batch - first);
      raster.fill(x + (first * s.in_channels + group * raster.channels) * s.height * s.width, count, xs.data());
      const Pixels pixels = raster.pixels(count);
      const Runs runs = runs_of(pixels, lanes<T>);
      // dy as `b`'s pixels lie: without gaps, as they are computed in one run, or as in one run for each image.
      const Index pitch = gather ? out_w : raster.pitch, rows = gather || runs.count > 1 ? out_h : raster.rows;
      const Index plane = gather ? out : runs.count > 1 ? runs.length : raster.plane;
      for (Index o = 0; o < filters; ++o) {
        T* to = ys.data() + o * row;
        for (Index n = 0; n < count; ++n, to += plane) {
          to_raster(dy + ((first + n) * s.out_channels + group * filters + o) * out, Axis{out_h, 1, 0},
                    Axis{out_w, 1, 0}, rows, pitch, to);
          if (rows * pitch < plane) std::fill_n(to + rows * pitch, plane - rows * pitch, T{0});
        }
        std::fill_n(to, tile_columns<T>, T{0});
      }
      T* dw = dweight + group * filters * k;
      if (gather) {
        multiply_gathered(filters, k, pixels, ys.data(), row, xs.data(), offsets.data(), dw, k);
        continue;
      }
      for_pieces(filters, dot_rows, [&](Index o, Index dots) {
        for (Index p = 0; p < k; p += dot_columns)
          dot_rows_tile(dots, std::min<Index>(dot_columns, k - p), runs, ys.data() + o * row, row, xs.data(),
                        offsets.data() + p, dw + o * k + p, k);
      });
    }
}

/// dx = the gradient with respect to x. Along each axis dx[i] with i + padding = stride * j + phase is the sum of
/// weight[t] * dy[j - t * dilation / stride] over the taps t with t * dilation % stride = phase.
template <std::floating_point T>
void conv2d_backward_input(Cpu device, const Conv2dShape& s, const T* weight, const T* dy, T* dx, bool accumulate) {
  using namespace detail;
  const Index filters = s.out_channels / s.groups, channels = s.in_channels / s.groups, taps = s.kernel_h * s.kernel_w;
  const Index out_h = s.out_height(), out_w = s.out_width(), out = out_h * out_w, image = s.height * s.width;
  if (s.batch * s.in_channels * image == 0) return;

  // The j of dx's first and last pixel. dy's raster has zeros above and left of dy, for taps that reach there.
  const Index first_h = s.padding_h / s.stride_h, last_h = (s.height - 1 + s.padding_h) / s.stride_h;
  const Index first_w = s.padding_w / s.stride_w, last_w = (s.width - 1 + s.padding_w) / s.stride_w;
  const Index top = std::max<Index>(0, s.dilation_h * (s.kernel_h - 1) / s.stride_h - first_h);
  const Index left = std::max<Index>(0, s.dilation_w * (s.kernel_w - 1) / s.stride_w - first_w);
  const Index rows = std::max(out_h + top, last_h + 1), pitch = std::max(out_w + left, last_w + 1),
              plane = rows * pitch;
  const Index images = images_at_once(s.batch, plane), row = images * plane + tile_columns<T>;
  const Index slack = (first_h + top) * pitch + first_w + left + 2 * tile_columns<T>;
  const bool gather = channels >= gather_rows;

  const Scratch<T> ys(device, filters * images * plane + slack), xs(device, channels * row);
  const Scratch<T> turned(device, filters * taps * channels);
  const Scratch<Index> offsets(device, filters * taps);
  for (Index group = 0; group < s.groups; ++group)
    for (Index phase = 0; phase < s.stride_h * s.stride_w; ++phase) {
      const Index phase_h = phase / s.stride_w, phase_w = phase % s.stride_w;
      Index k = 0;
      for (Index o = 0; o < filters; ++o)
        for (Index tap = 0; tap < taps; ++tap) {
          const Index h = tap / s.kernel_w * s.dilation_h, w = tap % s.kernel_w * s.dilation_w;
          if (h % s.stride_h != phase_h || w % s.stride_w != phase_w) continue;
          offsets.data()[k] =
              o * images * plane + (first_h + top - h / s.stride_h) * pitch + first_w + left - w / s.stride_w;
          const T* from = weight + (group * filters + o) * channels * taps + tap;
          for (Index c = 0; c < channels; ++c) turned.data()[k * channels + c] = from[c * taps];
          ++k;
        }

      for (Index first = 0; first < s.batch; first += images) {
        const Index count = std::min(images, s.batch - first);
        T* to = ys.data();
        for (Index o = 0; o < filters; ++o) {
          for (Index n = 0; n < count; ++n, to += plane)
            to_raster(dy + ((first + n) * s.out_channels + group * filters + o) * out, Axis{out_h, 1, -top},
                      Axis{out_w, 1, -left}, rows, pitch, to);
          std::fill_n(to, (images - count) * plane, T{0});
          to += (images - count) * plane;
        }
        std::fill_n(to, slack, T{0});

        const Pixels pixels{count, last_h - first_h + 1, last_w - first_w + 1, pitch, plane};
        multiply_raster(gather, channels, k, pixels, Matrix<T>{turned.data(), 1, channels}, ys.data(), offsets.data(),
                        xs.data(), row);
        for (Index n = 0; n < count; ++n)
          for (Index c = 0; c < channels; ++c)
            from_raster(xs.data() + c * row + n * (gather ? pixels.rows * pixels.columns : plane),
                        Axis{s.height, s.stride_h, first_h * s.stride_h + phase_h - s.padding_h},
                        Axis{s.width, s.stride_w, first_w * s.stride_w + phase_w - s.padding_w}, pixels.rows,
                        gather ? pixels.columns : pitch, T{0},
                        dx + ((first + n) * s.in_channels + group * channels + c) * image, accumulate);
      }
    }
}

/// dbias = the sum of dy over batch and pixels.
template <std::floating_point T>
void conv2d_backward_bias(Cpu, const Conv2dShape& s, const T* dy, T* dbias, bool accumulate) {
  const Index pixels = s.out_height() * s.out_width();
  for (Index o = 0; o < s.out_channels; ++o) {
    const T total = reduce_rows(0, s.batch, T{0}, std::plus<T>{}, [&](Index n) {
      const T* plane = dy + (n * s.out_channels + o) * pixels;
      return Sum<T>::fold(reduce_packets<T>(0, pixels, splat(T{0}), Sum<T>{},
                                            [&](Index i, auto count) { return load(plane + i, count); }));
    });
    dbias[o] = (accumulate ? dbias[o] : T{0}) + total;
  }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_CONVOLUTION_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CONVOLUTION_HPP

namespace chorus::inline CHORUS_ABI {

struct Conv2dOptions {
  Size2d stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
};

/// x: [batch, in, height, width], weight: [out, in / groups, kernel_h, kernel_w], bias: [out] or absent
/// -> [batch, out, out_h, out_w] with out_h = (height + 2 padding - dilation (kernel - 1) - 1) / stride + 1.
/// Throws ShapeError where channels don't fit or the kernel is larger than the padded image.
template <Operand X, Operand W, Operand B>
auto conv2d(const X& x, const W& weight, const B& bias, const Conv2dOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank == 4, "conv2d: the input is [batch, channels, height, width]");
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto b = contiguous(value_of(bias));
  const kernels::Conv2dShape shape{.batch = input.size(0),
                                   .in_channels = input.size(1),
                                   .height = input.size(2),
                                   .width = input.size(3),
                                   .out_channels = w.size(0),
                                   .kernel_h = w.size(2),
                                   .kernel_w = w.size(3),
                                   .stride_h = options.stride.height,
                                   .stride_w = options.stride.width,
                                   .padding_h = options.padding.height,
                                   .padding_w = options.padding.width,
                                   .dilation_h = options.dilation.height,
                                   .dilation_w = options.dilation.width,
                                   .groups = options.groups};
  check<UsageError>(shape.groups > 0 && shape.stride_h > 0 && shape.stride_w > 0 && shape.dilation_h > 0 &&
                        shape.dilation_w > 0 && shape.padding_h >= 0 && shape.padding_w >= 0,
                    "conv2d: stride, dilation and groups are at least 1, padding at least 0");
  check<ShapeError>(w.size(1) * shape.groups == shape.in_channels && shape.out_channels % shape.groups == 0,
                    "conv2d: an input of shape ", input.shape(), " does not fit a weight of shape ", w.shape(),
                    " with ", shape.groups, " groups");
  check<ShapeError>(!b.defined() || b.numel() == shape.out_channels, "conv2d: the bias has ", b.numel(),
                    " elements for ", shape.out_channels, " channels");
  check<ShapeError>(shape.height + 2 * shape.padding_h >= shape.dilation_h * (shape.kernel_h - 1) + 1 &&
                        shape.width + 2 * shape.padding_w >= shape.dilation_w * (shape.kernel_w - 1) + 1,
                    "conv2d: the kernel of ", w.shape(), " is larger than the padded input of ", input.shape());
  const auto device = input.device();
  auto out = Tensor<T, 4, typename tensor_of<X>::device_type>::empty(
      {shape.batch, shape.out_channels, shape.out_height(), shape.out_width()}, device);
  kernels::conv2d_forward(device, shape, input.data(), w.data(), b.data(), out.data());
  return record(
      "conv2d", std::move(out),
      [input, w, shape, device](const auto& dy, auto dx, auto dw, auto db) {
        if (db) {
          const auto [grad, accumulate] = db->target();
          kernels::conv2d_backward_bias(device, shape, dy.data(), grad.data(), accumulate);
        }
        if (dw) {
          const auto [grad, accumulate] = dw->target();
          kernels::conv2d_backward_weight(device, shape, input.data(), dy.data(), grad.data(), accumulate);
        }
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          kernels::conv2d_backward_input(device, shape, w.data(), dy.data(), grad.data(), accumulate);
        }
      },
      x, weight, bias);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION_HPP

namespace chorus::inline CHORUS_ABI::nn {

struct Conv2dOptions {
  Size2d kernel = 1, stride = 1, padding = 0, dilation = 1;
  Index groups = 1;
  bool bias = true;
};

/// x: [batch, in, height, width] -> [batch, out, out_h, out_w]; weight: [out, in / groups, kernel_h, kernel_w].
template <Device D, Real T = float>
class Conv2d : public Module {
 public:
  using device_type = D;
  Parameter<T, 4, D> weight;
  Parameter<T, 1, D> bias;

  /// Throws ShapeError unless channels and kernel are positive and `groups` divides both channel numbers.
  Conv2d(Index in_channels, Index out_channels, const Conv2dOptions& options)
      : options_{options.stride, options.padding, options.dilation, options.groups} {
    const auto [height, width] = options.kernel;
    check<ShapeError>(in_channels > 0 && out_channels > 0 && height > 0 && width > 0 && options.groups > 0 &&
                          in_channels % options.groups == 0 && out_channels % options.groups == 0,
                      "Conv2d: ", in_channels, " -> ", out_channels, " channels, kernel ", height, " x ", width, ", ",
                      options.groups, " groups: all must be positive, and groups divide the channels");
    const Index fan_in = in_channels / options.groups * height * width;
    weight = Parameter(init::default_uniform<T, D, 4>({out_channels, in_channels / options.groups, height, width}, fan_in));
    if (options.bias) bias = Parameter(init::default_uniform<T, D, 1>({out_channels}, fan_in));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return conv2d(x, weight, bias, options_);
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    if (bias) visitor.parameter("bias", bias);
  }
  std::string describe() const override {
    const auto& w = weight.shape();
    auto text = cat("Conv2d(", w[1] * options_.groups, ", ", w[0], ", kernel=", w[2], "x", w[3]);
    if (options_.stride.height != 1) text += cat(", stride=", options_.stride.height);
    if (options_.padding.height != 0) text += cat(", padding=", options_.padding.height);
    if (options_.groups != 1) text += cat(", groups=", options_.groups);
    return text + ")";
  }

 private:
  chorus::Conv2dOptions options_;
};

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_CONVOLUTION_HPP

// <chorus/nn/embedding.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_EMBEDDING_HPP
#define CHORUS_SINGLE_CHORUS_NN_EMBEDDING_HPP
/// The table of learned vectors.

// <chorus/ops/indexing.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_INDEXING_HPP
#define CHORUS_SINGLE_CHORUS_OPS_INDEXING_HPP
/// Picking by integer tensors: index_select, embedding, gather. Gradients of what is picked several times add up.

// <chorus/kernels/indexing.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_INDEXING_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_INDEXING_HPP
/// Picking by index, for every kind of device that this build has.

// <chorus/kernels/cpu/indexing.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_INDEXING_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_INDEXING_HPP
/// Picking along an axis by a list of indices (index_select) or by an index for each element (gather), and the way
/// back, which adds up what was picked several times, in the order of the indices. x: [outer, axis, inner]; y: [outer,
/// count, inner].

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
inline void check_indices(std::string_view operation, Index count, const std::int64_t* index, Index axis) {
  for (Index i = 0; i < count; ++i)
    check<UsageError>(index[i] >= 0 && index[i] < axis, operation, ": index ", index[i], " is not in [0, ", axis, ")");
}
}  // namespace detail

/// y[o, i, :] = x[o, index[i], :]. Overwrites y. Throws UsageError for an index outside of the axis.
template <class T>
void index_select(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("index_select", count, index, whole.axis);
  const auto bytes = static_cast<std::size_t>(whole.inner) * sizeof(T);
  if (bytes == 0) return;
  for (Index o = 0; o < whole.outer; ++o)
    for (Index i = 0; i < count; ++i, y += whole.inner)
      std::memcpy(y, x + (o * whole.axis + index[i]) * whole.inner, bytes);
}

/// dx[o, index[i], :] += dy[o, i, :]; dx starts from zero unless `accumulate`.
template <class T>
void index_select_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                           bool accumulate) {
  if (!accumulate) fill(device, whole.numel(), dx, T{0});
  for (Index o = 0; o < whole.outer; ++o)
    for (Index i = 0; i < count; ++i, dy += whole.inner)
      axpy(device, whole.inner, T{1}, dy, dx + (o * whole.axis + index[i]) * whole.inner);
}

/// y[o, j, i] = x[o, index[o, j, i], i]. Overwrites y. Throws UsageError for an index outside of the axis.
template <class T>
void gather(Cpu, AxisShape whole, Index count, const std::int64_t* index, const T* x, T* y) {
  detail::check_indices("gather", whole.outer * count * whole.inner, index, whole.axis);
  for (Index o = 0; o < whole.outer; ++o, x += whole.axis * whole.inner)
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i) *y++ = x[*index++ * whole.inner + i];
}

/// dx[o, index[o, j, i], i] += dy[o, j, i]; dx starts from zero unless `accumulate`.
template <class T>
void gather_backward(Cpu device, AxisShape whole, Index count, const std::int64_t* index, const T* dy, T* dx,
                     bool accumulate) {
  if (!accumulate) fill(device, whole.numel(), dx, T{0});
  for (Index o = 0; o < whole.outer; ++o, dx += whole.axis * whole.inner)
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < whole.inner; ++i) dx[*index++ * whole.inner + i] += *dy++;
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_INDEXING_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_INDEXING_HPP

namespace chorus::inline CHORUS_ABI {

/// Entry i of an axis of the result is entry `index[i]` of that axis of x. Throws UsageError for an index outside of
/// the axis.
template <Operand X, class D>
auto index_select(const X& x, Index axis, const Tensor<std::int64_t, 1, D>& index) {
  const auto input = contiguous(value_of(x));
  const auto chosen = contiguous(index);
  const auto a = normalize_axis("index_select", axis, tensor_of<X>::rank);
  const auto whole = detail::around_axis(input.shape(), a);
  auto shape = input.shape();
  shape[a] = chosen.numel();
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::index_select(input.device(), whole, chosen.numel(), chosen.data(), input.data(), out.data());
  return record(
      "index_select", std::move(out),
      [whole, chosen](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::index_select_backward(grad.device(), whole, chosen.numel(), chosen.data(), dy.data(), grad.data(),
                                       accumulate);
      },
      x);
}

/// weight: [entries, features], index: [...] -> the entries' rows: [..., features]. Throws UsageError for an index that
/// is no entry.
template <Operand W, int Rank, class D>
auto embedding(const W& weight, const Tensor<std::int64_t, Rank, D>& index) {
  static_assert(tensor_of<W>::rank == 2, "embedding: the weight is [entries, features]");
  const auto flat = contiguous(index).view(Shape<1>{index.numel()});
  Shape<Rank + 1> shape{};
  std::copy(index.shape().begin(), index.shape().end(), shape.begin());
  shape.back() = value_of(weight).size(1);
  return reshape(index_select(weight, 0, flat), shape);
}

namespace detail {
template <Operand X, class Indices>
auto gather_along(const X& x, std::size_t axis, const Indices& index) {
  const auto input = contiguous(value_of(x));
  const auto chosen = contiguous(index);
  const auto whole = around_axis(input.shape(), axis);
  const Index count = chosen.shape()[axis];
  auto out = tensor_of<X>::empty(chosen.shape(), input.device());
  kernels::gather(input.device(), whole, count, chosen.data(), input.data(), out.data());
  return record(
      "gather", std::move(out),
      [whole, count, chosen](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::gather_backward(grad.device(), whole, count, chosen.data(), dy.data(), grad.data(), accumulate);
      },
      x);
}
}  // namespace detail

/// The result has the index's shape; along `axis` its element is x's at the position that the index gives, at the same
/// place in the other axes, where the index may be smaller than x. Throws ShapeError where it is larger, UsageError for
/// an index outside of the axis.
template <Operand X, class D>
auto gather(const X& x, Index axis, const Tensor<std::int64_t, tensor_of<X>::rank, D>& index) {
  static_assert(tensor_of<X>::rank >= 1, "gather: the input has at least one axis");
  const auto a = normalize_axis("gather", axis, tensor_of<X>::rank);
  auto narrowed = reshape(x, value_of(x).shape());
  for (std::size_t other = 0; other < index.shape().size(); ++other) {
    const Index size = index.shape()[other];
    if (other == a || size == narrowed.shape()[other]) continue;
    check<ShapeError>(size < narrowed.shape()[other], "gather: an index of shape ", index.shape(),
                      " is larger than the input of ", value_of(x).shape(), " beside axis ", axis);
    narrowed = slice(narrowed, static_cast<Index>(other), 0, size);
  }
  return detail::gather_along(narrowed, a, index);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_INDEXING_HPP

namespace chorus::inline CHORUS_ABI::nn {

/// index: [...] -> the rows of weight: [entries, features] that it names: [..., features].
template <Device D, Real T = float>
class Embedding : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> weight;

  /// Starts with numbers from N(0, 1). Throws ShapeError unless both sizes are positive.
  Embedding(Index entries, Index features) {
    check<ShapeError>(entries > 0 && features > 0, "Embedding: ", entries, " entries of ", features,
                      " features: both must be positive");
    weight = Parameter(init::normal<T, D, 2>({entries, features}, 0, 1));
  }

  template <int Rank>
  auto operator()(const Tensor<std::int64_t, Rank, D>& index) const {
    return embedding(weight, index);
  }
  void visit(Visitor& visitor) override { visitor.parameter("weight", weight); }
  std::string describe() const override { return cat("Embedding(", weight.shape()[0], ", ", weight.shape()[1], ")"); }
};

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_EMBEDDING_HPP

// <chorus/nn/layer_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_LAYER_NORM_HPP
#define CHORUS_SINGLE_CHORUS_NN_LAYER_NORM_HPP
/// Layer normalisation as a layer.

// <chorus/ops/normalization.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_NORMALIZATION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_NORMALIZATION_HPP
/// Normalisation within each sample: layer, group and root-mean-square normalisation.

// <chorus/kernels/layer_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_LAYER_NORM_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_LAYER_NORM_HPP
/// The layer_norm kernels for every kind of device that this build has.

// <chorus/kernels/cpu/layer_norm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_LAYER_NORM_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_LAYER_NORM_HPP
/// Layer normalisation on the CPU (Ba, Kiros, Hinton 2016). x, y: [rows, columns]; weight, bias: [columns], null for 1
/// and 0; statistics: [2, rows], the rows' means and their 1 / sqrt(variance + eps).

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {
template <class T, class F>
void for_rows(Index rows, Index columns, const F& f) {
  for (Index r = 0; r < rows; ++r) f(Row<T>{r * columns, r, columns});
}
}  // namespace detail

/// y = (x - mean) * invstd * weight + bias. Overwrites y and statistics.
template <class T>
void layer_norm_forward(Cpu, Index rows, Index columns, const T* x, const T* weight, const T* bias, double eps, T* y,
                        T* statistics) {
  const auto n = splat(static_cast<T>(columns));
  detail::for_rows<T>(rows, columns, [&](const Row<T>& line) {
    const auto mean =
        Eigen::internal::pdiv(line.reduce(Sum<T>{}, [&](Index i, auto count) { return load(x + i, count); }), n);
    const auto squares = line.reduce(Sum<T>{}, [&](Index i, auto count) {
      const auto d = psub(load(x + i, count), mean);
      return pmul(d, d);
    });
    const auto invstd = line.map(Eigen::internal::pdiv(squares, n), [eps](T variance) {
      return static_cast<T>(1 / std::sqrt(static_cast<double>(variance) + eps));
    });
    line.store_result(statistics, mean);
    line.store_result(statistics + rows, invstd);
    line.each([&](Index i, auto count) {
      auto value = pmul(psub(load(x + i, count), mean), invstd);
      if (weight != nullptr) value = pmul(value, load(weight + (i - line.at), count));
      if (bias != nullptr) value = padd(value, load(bias + (i - line.at), count));
      store(y + i, value, count);
    });
  });
}

/// With g = dy * weight and u = (x - mean) * invstd: dx = invstd * (g - mean(g) - u * mean(g * u)). Overwrites dx, or
/// adds.
template <class T>
void layer_norm_backward_input(Cpu, Index rows, Index columns, const T* x, const T* weight, const T* dy,
                               const T* statistics, T* dx, bool accumulate) {
  const auto n = splat(static_cast<T>(columns));
  detail::for_rows<T>(rows, columns, [&](const Row<T>& line) {
    const auto mean = line.load_result(statistics), invstd = line.load_result(statistics + rows);
    const auto gradient = [&](Index i, auto count) {
      const auto g = load(dy + i, count);
      return weight == nullptr ? g : pmul(g, load(weight + (i - line.at), count));
    };
    const auto normalized = [&](Index i, auto count) { return pmul(psub(load(x + i, count), mean), invstd); };
    const auto a = Eigen::internal::pdiv(line.reduce(Sum<T>{}, gradient), n);
    const auto b = Eigen::internal::pdiv(
        line.reduce(Sum<T>{}, [&](Index i, auto count) { return pmul(gradient(i, count), normalized(i, count)); }), n);
    line.each([&](Index i, auto count) {
      const auto d = psub(psub(gradient(i, count), a), pmul(normalized(i, count), b));
      store(dx + i, pmul(d, invstd), count, accumulate);
    });
  });
}

/// dweight = sum over rows of dy * (x - mean) * invstd, dbias = sum of dy. Either may be null. Overwrite, or add.
template <class T>
void layer_norm_backward_affine(Cpu, Index rows, Index columns, const T* x, const T* dy, const T* statistics,
                                T* dweight, T* dbias, bool accumulate_weight, bool accumulate_bias) {
  for_packets<T>(columns, [&](Index j, auto count) {
    const auto zero = splat(T{0});
    if (dweight != nullptr)
      store(dweight + j,
            reduce_rows(Index{0}, rows, zero, Sum<T>{},
                        [&](Index r) {
                          const auto d = psub(load(x + r * columns + j, count), splat(statistics[r]));
                          return pmul(load(dy + r * columns + j, count), pmul(d, splat(statistics[rows + r])));
                        }),
            count, accumulate_weight);
    if (dbias != nullptr)
      store(dbias + j,
            reduce_rows(Index{0}, rows, zero, Sum<T>{}, [&](Index r) { return load(dy + r * columns + j, count); }),
            count, accumulate_bias);
  });
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_LAYER_NORM_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_LAYER_NORM_HPP

// <chorus/ops/arithmetic.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_ARITHMETIC_HPP
#define CHORUS_SINGLE_CHORUS_OPS_ARITHMETIC_HPP
/// Arithmetic of operands and numbers, element by element: + - * / and pow, maximum, minimum, clamp. Operands broadcast
/// as in NumPy; each function gives a Tensor for Tensors, else a Variable. Throws ShapeError where shapes don't
/// broadcast.

namespace chorus::inline CHORUS_ABI {

namespace functors {

/// value - x
struct SubtractFrom {
  double value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return real_of<S>(value) - x;
  }
};

/// x / value
struct DivScalar {
  double value = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return x / real_of<S>(value);
  }
};

/// value / x
struct DivideInto {
  double value = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x) const {
    return real_of<S>(value) / x;
  }
};

}  // namespace functors

/// What may stand beside an operand in an expression: converted to its scalar type.
using math::Arithmetic;

#define CHORUS_BINARY(NAME, FUNCTOR)                            \
  template <Operand A, Operand B>                               \
  auto NAME(const A& a, const B& b) {                           \
    return detail::pointwise(#NAME, functors::FUNCTOR{}, a, b); \
  }
CHORUS_BINARY(add, Add)
CHORUS_BINARY(sub, Sub)
CHORUS_BINARY(mul, Mul)
CHORUS_BINARY(div, Div)
/// The larger of two; a tie gives half of the gradient to each, NaN wins.
CHORUS_BINARY(maximum, Maximum)
/// The smaller of two, likewise.
CHORUS_BINARY(minimum, Minimum)
/// a to the power of b.
CHORUS_BINARY(pow, Pow)
#undef CHORUS_BINARY

#define CHORUS_WITH_NUMBER(NAME, NUMBER_RIGHT, NUMBER_LEFT)                                  \
  template <Operand X>                                                                       \
  auto NAME(const X& x, Arithmetic auto number) {                                            \
    return detail::pointwise(#NAME, functors::NUMBER_RIGHT{static_cast<double>(number)}, x); \
  }                                                                                          \
  template <Operand X>                                                                       \
  auto NAME(Arithmetic auto number, const X& x) {                                            \
    return detail::pointwise(#NAME, functors::NUMBER_LEFT{static_cast<double>(number)}, x);  \
  }
CHORUS_WITH_NUMBER(add, AddScalar, AddScalar)
CHORUS_WITH_NUMBER(mul, MulScalar, MulScalar)
CHORUS_WITH_NUMBER(div, DivScalar, DivideInto)
#undef CHORUS_WITH_NUMBER

template <Operand X>
auto sub(const X& x, Arithmetic auto number) {
  return detail::pointwise("sub", functors::AddScalar{-static_cast<double>(number)}, x);
}
template <Operand X>
auto sub(Arithmetic auto number, const X& x) {
  return detail::pointwise("sub", functors::SubtractFrom{static_cast<double>(number)}, x);
}

/// x to the power of a number; fast for -1, -0.5, 0, 0.5, 1, 2 and 3.
template <Operand X>
auto pow(const X& x, Arithmetic auto exponent) {
  return detail::pointwise("pow", functors::PowScalar{static_cast<double>(exponent)}, x);
}

template <Operand X>
auto neg(const X& x) {
  return detail::pointwise("neg", functors::Neg{}, x);
}

/// x limited to [min, max]; an infinity leaves its side open. At the limits themselves the gradient passes. Throws
/// UsageError unless min <= max.
template <Operand X>
auto clamp(const X& x, double min, double max = std::numeric_limits<double>::infinity()) {
  check<UsageError>(min <= max, "clamp: the limits are [", min, ", ", max, "]");
  return detail::pointwise("clamp", functors::Clamp{min, max}, x);
}

#define CHORUS_OPERATOR(OP, NAME)                        \
  template <Operand A, Operand B>                        \
  auto operator OP(const A& a, const B& b) {             \
    return NAME(a, b);                                   \
  }                                                      \
  template <Operand X>                                   \
  auto operator OP(const X& x, Arithmetic auto number) { \
    return NAME(x, number);                              \
  }                                                      \
  template <Operand X>                                   \
  auto operator OP(Arithmetic auto number, const X& x) { \
    return NAME(number, x);                              \
  }
CHORUS_OPERATOR(+, add)
CHORUS_OPERATOR(-, sub)
CHORUS_OPERATOR(*, mul)
CHORUS_OPERATOR(/, div)
#undef CHORUS_OPERATOR

template <Operand X>
auto operator-(const X& x) {
  return neg(x);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_ARITHMETIC_HPP

namespace chorus::inline CHORUS_ABI {

namespace functors {
struct ScaleShift {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& scale, const S& shift) const {
    return x * scale + shift;
  }
};
}  // namespace functors

/// x: [...], weight, bias: the shape of x's last axes, which are normalised together (Ba, Kiros, Hinton 2016) -> (x -
/// mean) / sqrt(var + eps) * weight + bias, var being the biased variance. Both may be undefined: 1 and 0. Throws
/// ShapeError where shapes don't fit.
template <Operand X, Operand W, Operand B>
auto layer_norm(const X& x, const W& weight, const B& bias, double eps = 1e-5) {
  using T = typename tensor_of<X>::value_type;
  constexpr std::size_t rank = tensor_of<X>::rank, inner = tensor_of<W>::rank;
  static_assert(inner >= 1 && inner <= rank && inner == tensor_of<B>::rank,
                "layer_norm: weight and bias have the shape of the input's last axes");
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto b = contiguous(value_of(bias));
  Shape<static_cast<int>(inner)> normalized{};
  std::copy_n(input.shape().begin() + (rank - inner), inner, normalized.begin());
  check<ShapeError>((!w.defined() || w.shape() == normalized) && (!b.defined() || b.shape() == normalized),
                    "layer_norm: an input of shape ", input.shape(), " does not fit a weight of shape ", w.shape(),
                    " and a bias of shape ", b.shape());
  const Index columns = numel(normalized), rows = columns == 0 ? 0 : input.numel() / columns;
  const auto device = input.device();
  auto out = tensor_of<X>::empty(input.shape(), device);
  // Mean and 1 / deviation of each row.
  const auto statistics = Tensor<T, 2, typename tensor_of<X>::device_type>::empty({2, rows}, device);
  kernels::layer_norm_forward(device, rows, columns, input.data(), w.data(), b.data(), eps, out.data(),
                              statistics.data());
  return record(
      "layer_norm", std::move(out),
      [input, w, statistics, device, rows, columns](const auto& dy, auto dx, auto dw, auto db) {
        if (dw || db) {
          T* grads[2] = {};
          bool accumulate[2] = {};
          const auto want = [&](std::size_t i, auto node) {
            if (!node) return;
            const auto target = node->target();
            grads[i] = target.data();
            accumulate[i] = target.accumulate;
          };
          want(0, dw);
          want(1, db);
          kernels::layer_norm_backward_affine(device, rows, columns, input.data(), dy.data(), statistics.data(),
                                              grads[0], grads[1], accumulate[0], accumulate[1]);
        }
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          kernels::layer_norm_backward_input(device, rows, columns, input.data(), w.data(), dy.data(),
                                             statistics.data(), grad.data(), accumulate);
        }
      },
      x, weight, bias);
}

/// x: [batch, channels, ...], weight, bias: [channels]: like layer_norm, over each of `groups` groups of neighbouring
/// channels of a sample (Wu, He 2018). Throws ShapeError where channels don't fit or groups don't divide them.
template <Operand X, Operand W, Operand B>
auto group_norm(const X& x, Index groups, const W& weight, const B& bias, double eps = 1e-5) {
  using Row = Tensor<typename tensor_of<X>::value_type, 1, typename tensor_of<X>::device_type>;
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 2, "group_norm: the input is [batch, channels, ...]");
  const auto& shape = value_of(x).shape();
  check<ShapeError>(groups > 0 && shape[1] % groups == 0, "group_norm: ", groups,
                    " groups do not divide the channels of shape ", shape);
  check<ShapeError>(value_of(weight).numel() == shape[1] && value_of(bias).numel() == shape[1],
                    "group_norm: an input of shape ", shape, " does not fit a weight of ", value_of(weight).numel(),
                    " and a bias of ", value_of(bias).numel(), " channels");
  const Index rows = shape[0] * groups, columns = rows == 0 ? 0 : value_of(x).numel() / rows;
  const auto normalized = layer_norm(reshape(x, Shape<2>{rows, columns}), Row{}, Row{}, eps);
  Shape<rank - 1> per_channel{};
  per_channel.fill(1);
  per_channel[0] = shape[1];
  return detail::pointwise("group_norm", functors::ScaleShift{}, reshape(normalized, shape),
                           reshape(weight, per_channel), reshape(bias, per_channel));
}

/// x: [..., features], weight: [features] -> x / sqrt(mean(x²) + eps) * weight (Zhang, Sennrich 2019). Throws
/// ShapeError where sizes differ.
template <Operand X, Operand W>
auto rms_norm(const X& x, const W& weight, double eps = 1e-6) {
  static_assert(tensor_of<X>::rank >= 1 && tensor_of<W>::rank == 1, "rms_norm: the weight is [features]");
  check<ShapeError>(value_of(x).size(-1) == value_of(weight).numel(), "rms_norm: an input of shape ",
                    value_of(x).shape(), " does not fit a weight of ", value_of(weight).numel(), " features");
  return x * rsqrt(mean(square(x), -1, keep_axis) + eps) * weight;
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_NORMALIZATION_HPP

namespace chorus::inline CHORUS_ABI::nn {

/// Normalises the last axis of x: [..., features], then scales and shifts it.
template <Device D, Real T = float>
class LayerNorm : public Module {
 public:
  using device_type = D;
  Parameter<T, 1, D> weight, bias;

  /// Throws ShapeError unless `features` is positive.
  explicit LayerNorm(Index features, double eps = 1e-5) : eps_(eps) {
    check<ShapeError>(features > 0, "LayerNorm: ", features, " features: must be positive");
    weight = Parameter(init::constant<T, D, 1>({features}, T{1}));
    bias = Parameter(init::constant<T, D, 1>({features}, T{0}));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return layer_norm(x, weight, bias, eps_);
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    visitor.parameter("bias", bias);
  }
  std::string describe() const override { return cat("LayerNorm(", weight.shape()[0], ")"); }

 private:
  double eps_;
};

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_LAYER_NORM_HPP

// <chorus/nn/linear.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_LINEAR_HPP
#define CHORUS_SINGLE_CHORUS_NN_LINEAR_HPP
/// The fully connected layer.

// <chorus/ops/matmul.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_MATMUL_HPP
#define CHORUS_SINGLE_CHORUS_OPS_MATMUL_HPP
/// Matrix products and the linear layer's function.

// <chorus/kernels/gemm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_GEMM_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_GEMM_HPP
/// Matrix products for every kind of device that this build has.

// <chorus/kernels/cpu/gemm.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_GEMM_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_GEMM_HPP
/// Matrix products on the CPU, in the manner of BLIS (Van Zee, van de Geijn, 2015), but only `b` is packed: panels of
/// it into the first-level cache. `a` is read one number at a time, so its layout doesn't matter.

// <chorus/kernels/trans.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_TRANS_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_TRANS_HPP
/// How a matrix product reads an operand.

namespace chorus::inline CHORUS_ABI::kernels {

/// Whether an operand is read transposed.
enum class Trans : bool { no, yes };

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_TRANS_HPP

namespace chorus::inline CHORUS_ABI::kernels {

namespace detail {

inline constexpr Index gemm_depth = 256, gemm_rows = 256;

}  // namespace detail

/// c = op(a) op(b), or c += with `accumulate`; `bias_n` (of length n, or null) is added to every row. Row-major; op(a):
/// [m, k], op(b): [k, n], c: [m, n]. `lda` is the row pitch of `a` as stored: [m, k], or [k, m] with Trans::yes;
/// likewise `ldb`.
template <std::floating_point T>
void gemm(Cpu, Trans ta, Trans tb, Index m, Index n, Index k, const T* a, Index lda, const T* b, Index ldb, T* c,
          Index ldc, bool accumulate, const T* bias_n = nullptr) {
  using namespace detail;
  constexpr Index w = tile_columns<T>;
  alignas(64) T panel[gemm_depth * w], start[w] = {};
  Index packed[gemm_depth], direct[gemm_depth];
  for (Index p = 0; p < std::min(k, gemm_depth); ++p) {
    packed[p] = p * w;
    direct[p] = p * ldb;
  }
  const Matrix<T> whole{a, ta == Trans::no ? lda : 1, ta == Trans::no ? 1 : lda};
  // With few rows of c a panel is not used often enough to repay its packing.
  const bool pack_all = tb == Trans::yes || m > 2 * tile_rows;

  const auto block = [&](Index p0, Index depth) {
    const bool add = accumulate || p0 > 0;
    for_pieces(m, gemm_rows, [&](Index i0, Index rows) {
      for (Index j = 0; j < n; j += w) {
        const Index columns = std::min(w, n - j);
        const bool pack = pack_all || columns < w;
        const T* from = tb == Trans::no ? b + p0 * ldb + j : b + j * ldb + p0;
        if (pack) {
          if (tb == Trans::no)
            pack_rows(depth, columns, from, ldb, panel);
          else
            pack_columns(depth, columns, from, ldb, panel);
        }
        if (bias_n != nullptr)
          for (Index l = 0; l < w; ++l) start[l] = p0 == 0 && l < columns ? bias_n[j + l] : T{0};
        const Matrix<T> left{whole.data + i0 * whole.row + p0 * whole.column, whole.row, whole.column};
        multiply_panel(rows, columns, depth, left, pack ? panel : from, pack ? packed : direct, start, c + i0 * ldc + j,
                       ldc, add);
      }
    });
  };
  if (k == 0)
    block(0, 0);
  else
    for_pieces(k, gemm_depth, block);
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_GEMM_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_GEMM_HPP

namespace chorus::inline CHORUS_ABI {

namespace detail {
// A product for each pair of matrices of two stacks of one shape.
template <Operand A, Operand B>
auto stacked_matmul(const A& a, const B& b) {
  using T = typename tensor_of<A>::value_type;
  constexpr int rank = tensor_of<A>::rank;
  const auto left = contiguous(value_of(a));
  const auto right = contiguous(value_of(b));
  using kernels::Trans;
  const auto device = left.device();
  const Index m = left.size(-2), k = left.size(-1), n = right.size(-1);
  const Index count = std::accumulate(left.shape().begin(), left.shape().end() - 2, Index{1}, std::multiplies<>());
  auto shape = left.shape();
  shape.back() = n;
  auto out = Tensor<T, rank, typename tensor_of<A>::device_type>::empty(shape, device);
  for (Index i = 0; i < count; ++i)
    kernels::gemm(device, Trans::no, Trans::no, m, n, k, left.data() + i * m * k, k, right.data() + i * k * n, n,
                  out.data() + i * m * n, n, false);
  return record(
      "matmul", std::move(out),
      [left, right, device, count, m, n, k](const auto& dy, auto da, auto db) {
        if (da) {
          const auto [grad, accumulate] = da->target();
          for (Index i = 0; i < count; ++i)
            kernels::gemm(device, Trans::no, Trans::yes, m, k, n, dy.data() + i * m * n, n, right.data() + i * k * n, n,
                          grad.data() + i * m * k, k, accumulate);
        }
        if (db) {
          const auto [grad, accumulate] = db->target();
          for (Index i = 0; i < count; ++i)
            kernels::gemm(device, Trans::yes, Trans::no, k, n, m, left.data() + i * m * k, k, dy.data() + i * m * n, n,
                          grad.data() + i * k * n, n, accumulate);
        }
      },
      a, b);
}

// The sizes of two stacks once the axes in front of the matrices are broadcast. Throws ShapeError where anything
// differs.
template <std::size_t A, std::size_t B>
auto matmul_shapes(const std::array<Index, A>& a, const std::array<Index, B>& b) {
  constexpr std::size_t rank = std::max(A, B);
  std::array<Index, rank> left{}, right{};
  bool fits = a[A - 1] == b[B - 2];
  for (std::size_t i = 1; i <= rank; ++i) {
    const Index size_a = i <= A ? a[A - i] : 1, size_b = i <= B ? b[B - i] : 1, common = size_a == 1 ? size_b : size_a;
    fits = fits && (i <= 2 || size_a == size_b || size_a == 1 || size_b == 1);
    left[rank - i] = i <= 2 ? size_a : common;
    right[rank - i] = i <= 2 ? size_b : common;
  }
  check<ShapeError>(fits, "matmul: shapes ", a, " and ", b, " do not fit");
  return std::pair(left, right);
}
}  // namespace detail

/// a: [..., m, k], b: [..., k, n] -> [..., m, n], a product for each pair of matrices; the axes in front broadcast.
/// Throws ShapeError where sizes differ.
template <Operand A, Operand B>
auto matmul(const A& a, const B& b) {
  constexpr int rank_a = tensor_of<A>::rank, rank_b = tensor_of<B>::rank;
  static_assert(rank_a >= 2 && rank_b >= 2, "matmul: operands are matrices or stacks of matrices");
  const auto& shape_a = value_of(a).shape();
  const auto& shape_b = value_of(b).shape();
  const auto shapes = detail::matmul_shapes(shape_a, shape_b);
  if constexpr (rank_a > 2 && rank_b == 2) {
    // One matrix for the whole stack: one tall product.
    auto out = shape_a;
    out.back() = shape_b[1];
    const Index rows = std::accumulate(shape_a.begin(), shape_a.end() - 1, Index{1}, std::multiplies<>());
    return reshape(detail::stacked_matmul(reshape(a, Shape<2>{rows, shape_b[0]}), b), out);
  } else {
    if constexpr (rank_a == rank_b)
      if (shapes.first == shape_a && shapes.second == shape_b) return detail::stacked_matmul(a, b);
    return detail::stacked_matmul(expand(a, shapes.first), expand(b, shapes.second));
  }
}

/// x: [..., in], weight: [out, in], bias: [out] or absent -> x weightᵀ + bias: [..., out]. Throws ShapeError where
/// sizes differ.
template <Operand X, Operand W, Operand B>
auto linear(const X& x, const W& weight, const B& bias) {
  using kernels::Trans;
  using T = typename tensor_of<X>::value_type;
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "linear: the input has at least one axis");
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto b = contiguous(value_of(bias));
  check<ShapeError>(input.size(-1) == w.size(1), "linear: the input's shape is ", input.shape(), ", the weight's ",
                    w.shape(), ": expected ", w.size(1), " features, got ", input.size(-1));
  const Index out_features = w.size(0), in_features = w.size(1);
  check<ShapeError>(!b.defined() || b.numel() == out_features, "linear: the bias has ", b.numel(), " elements for ",
                    out_features, " features");
  const auto device = input.device();
  auto shape = input.shape();
  shape.back() = 1;
  const Index rows = numel(shape);
  shape.back() = out_features;
  auto out = Tensor<T, rank, typename tensor_of<X>::device_type>::empty(shape, device);
  kernels::gemm(device, Trans::no, Trans::yes, rows, out_features, in_features, input.data(), in_features, w.data(),
                in_features, out.data(), out_features, false, b.data());
  return record(
      "linear", std::move(out),
      [input, w, device, rows, in_features, out_features](const auto& dy, auto dx, auto dw, auto db) {
        if (db) {
          const auto [grad, accumulate] = db->target();
          kernels::sum(device, {1, rows, out_features}, dy.data(), grad.data(), accumulate);
        }
        if (dw) {
          const auto [grad, accumulate] = dw->target();
          kernels::gemm(device, Trans::yes, Trans::no, out_features, in_features, rows, dy.data(), out_features,
                        input.data(), in_features, grad.data(), in_features, accumulate);
        }
        if (dx) {
          const auto [grad, accumulate] = dx->target();
          kernels::gemm(device, Trans::no, Trans::no, rows, in_features, out_features, dy.data(), out_features,
                        w.data(), in_features, grad.data(), in_features, accumulate);
        }
      },
      x, weight, bias);
}
template <Operand X, Operand W>
auto linear(const X& x, const W& weight) {
  return linear(x, weight, Tensor<typename tensor_of<X>::value_type, 1, typename tensor_of<X>::device_type>());
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_MATMUL_HPP

namespace chorus::inline CHORUS_ABI::nn {

struct LinearOptions {
  bool bias = true;
};

/// y = x weightᵀ + bias for x: [..., in]; weight: [out, in], bias: [out].
template <Device D, Real T = float>
class Linear : public Module {
 public:
  using device_type = D;
  Parameter<T, 2, D> weight;
  Parameter<T, 1, D> bias;

  /// Throws ShapeError unless both numbers are positive.
  Linear(Index in_features, Index out_features, const LinearOptions& options = {}) {
    check<ShapeError>(in_features > 0 && out_features > 0, "Linear: ", in_features, " inputs and ", out_features,
                      " outputs: both must be positive");
    weight = Parameter(init::default_uniform<T, D, 2>({out_features, in_features}, in_features));
    if (options.bias) bias = Parameter(init::default_uniform<T, D, 1>({out_features}, in_features));
  }

  template <Operand X>
  auto operator()(const X& x) const {
    return linear(x, weight, bias);
  }
  void visit(Visitor& visitor) override {
    visitor.parameter("weight", weight);
    if (bias) visitor.parameter("bias", bias);
  }
  std::string describe() const override {
    return cat("Linear(", weight.shape()[1], ", ", weight.shape()[0], bias ? ")" : ", bias=false)");
  }
};

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_LINEAR_HPP

// <chorus/nn/summary.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_SUMMARY_HPP
#define CHORUS_SINGLE_CHORUS_NN_SUMMARY_HPP
/// A table of a model's layers and their parameters.

namespace chorus::inline CHORUS_ABI::nn {

/// One line a module: its path, what it is, its own parameters; then the sums.
template <class Model>
std::string summary(Model& model) {
  using D = typename Model::device_type;
  struct Row {
    std::string path, layer;
    Index parameters;
  };
  struct Rows final : detail::Walker {
    std::vector<Row> rows;
    void enter(Module& module) override { rows.push_back({prefix().substr(0, prefix().size() - 1), module.describe(), 0}); }
    void parameter(std::string_view, AnyParameter& handle) override {
      const std::string own = prefix().empty() ? "" : prefix().substr(0, prefix().size() - 1);
      for (Row& row : rows)
        if (row.path == own) row.parameters += handle.on<D>().count();
    }
  } table;
  table.rows.push_back({"", model.describe(), 0});
  table.walk(model);

  Index all = 0, trainable = 0;
  std::size_t bytes = 0;
  for (const auto& named : named_parameters<D>(model)) {
    all += named.parameter->count();
    bytes += named.parameter->size_bytes();
    if (named.parameter->wants_grad()) trainable += named.parameter->count();
  }

  std::size_t path_width = 6, layer_width = 5;
  for (const Row& row : table.rows) {
    path_width = std::max(path_width, row.path.size());
    layer_width = std::max(layer_width, row.layer.size());
  }
  const auto padded = [](std::string text, std::size_t width) {
    text.resize(std::max(width, text.size()), ' ');
    return text;
  };
  std::string out = padded("module", path_width) + "  " + padded("layer", layer_width) + "  parameters\n";
  for (const Row& row : table.rows)
    out += padded(row.path, path_width) + "  " + padded(row.layer, layer_width) + "  " +
           (row.parameters == 0 ? "-" : cat(row.parameters)) + "\n";
  return out + cat(all, " parameters, ", trainable, " trainable, ", bytes / 1024, " KiB\n");
}

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_SUMMARY_HPP

// <chorus/ops/attention.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_ATTENTION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_ATTENTION_HPP
/// Scaled dot-product attention (Vaswani et al. 2017).

// <chorus/ops/masking.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_MASKING_HPP
#define CHORUS_SINGLE_CHORUS_OPS_MASKING_HPP
/// Choices by a mask: where and masked_fill.

namespace chorus::inline CHORUS_ABI {

namespace functors {

/// a where the mask is not 0, else b.
struct Where {
  template <class S>
  CHORUS_HD S operator()(const S& mask, const S& a, const S& b) const {
    return where(mask == 0, b, a);
  }
};

/// The value where the mask is not 0, else x.
struct MaskedFill {
  double value = 0;
  template <class S>
  CHORUS_HD S operator()(const S& mask, const S& x) const {
    return where(mask == 0, x, S(real_of<S>(value)));
  }
};

}  // namespace functors

namespace detail {
// The mask as 0 and 1 in the operands' scalar type: element-wise kernels work in one.
template <Real T, int Rank, Device D>
Tensor<T, Rank, D> as_numbers(const Tensor<bool, Rank, D>& mask) {
  const auto dense = contiguous(mask);
  auto out = Tensor<T, Rank, D>::empty(mask.shape(), mask.device());
  kernels::convert(mask.device(), dense.numel(), dense.data(), out.data());
  return out;
}
}  // namespace detail

/// a where the mask is true, else b; the three broadcast. Throws ShapeError where they don't.
template <int Rank, Device D, Operand A, Operand B>
auto where(const Tensor<bool, Rank, D>& mask, const A& a, const B& b) {
  const auto numbers = detail::as_numbers<typename tensor_of<A>::value_type>(mask);
  return detail::pointwise("where", functors::Where{}, numbers, a, b);
}

/// The value where the mask is true, else x; they broadcast. Throws ShapeError where they don't.
template <Operand X, int Rank, Device D>
auto masked_fill(const X& x, const Tensor<bool, Rank, D>& mask, double value) {
  const auto numbers = detail::as_numbers<typename tensor_of<X>::value_type>(mask);
  return detail::pointwise("masked_fill", functors::MaskedFill{value}, numbers, x);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_MASKING_HPP

namespace chorus::inline CHORUS_ABI {

/// q: [batch..., queries, features], k: [batch..., keys, features], v: [batch..., keys, values] -> softmax(q kᵀ /
/// sqrt(features)) v: [batch..., queries, values]. With `causal`, query i sees keys 0 to i only. Throws ShapeError
/// where sizes differ.
template <Operand Q, Operand K, Operand V>
auto scaled_dot_product_attention(const Q& q, const K& k, const V& v, bool causal = false) {
  using D = typename tensor_of<Q>::device_type;
  const auto features = static_cast<double>(value_of(q).size(-1));
  auto scores = matmul(q * (1 / std::sqrt(features)), transpose(k, -2, -1));
  if (causal) {
    const Index queries = scores.size(-2), keys = scores.size(-1);
    auto later = Tensor<bool, 2, Cpu>::empty({queries, keys});
    for (Index i = 0; i < queries; ++i)
      for (Index j = 0; j < keys; ++j) later.data()[i * keys + j] = j > i;
    const std::span<const bool> mask(later.data(), static_cast<std::size_t>(later.numel()));
    scores = masked_fill(scores, Tensor<bool, 2, D>::from(mask, later.shape(), scores.device()),
                         -std::numeric_limits<double>::infinity());
  }
  return matmul(softmax(scores, -1), v);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_ATTENTION_HPP

// <chorus/ops/convolution1d.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION1D_HPP
#define CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION1D_HPP
/// One-dimensional convolution (cross-correlation, as in PyTorch): conv2d on images of height 1.

namespace chorus::inline CHORUS_ABI {

struct Conv1dOptions {
  Index stride = 1, padding = 0, dilation = 1, groups = 1;
};

/// x: [batch, in, length], weight: [out, in / groups, kernel], bias: [out] or absent -> [batch, out, out_length] with
/// out_length = (length + 2 padding - dilation (kernel - 1) - 1) / stride + 1. Throws as conv2d does.
template <Operand X, Operand W, Operand B>
auto conv1d(const X& x, const W& weight, const B& bias, const Conv1dOptions& options = {}) {
  static_assert(tensor_of<X>::rank == 3 && tensor_of<W>::rank == 3, "conv1d: the input is [batch, channels, length]");
  const auto& in = value_of(x).shape();
  const auto& w = value_of(weight).shape();
  const auto y =
      conv2d(reshape(x, Shape<4>{in[0], in[1], 1, in[2]}), reshape(weight, Shape<4>{w[0], w[1], 1, w[2]}), bias,
             {.stride = {1, options.stride},
              .padding = {0, options.padding},
              .dilation = {1, options.dilation},
              .groups = options.groups});
  return reshape(y, Shape<3>{y.size(0), y.size(1), y.size(3)});
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_CONVOLUTION1D_HPP

// <chorus/ops/cross_entropy.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_CROSS_ENTROPY_HPP
#define CHORUS_SINGLE_CHORUS_OPS_CROSS_ENTROPY_HPP
/// Losses over classes.

// <chorus/kernels/cross_entropy.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CROSS_ENTROPY_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CROSS_ENTROPY_HPP
/// The cross_entropy kernels for every kind of device that this build has.

// <chorus/kernels/cpu/cross_entropy.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_CROSS_ENTROPY_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_CROSS_ENTROPY_HPP
/// Cross entropy straight from logits, and negative log likelihood, on the CPU. Losses are overwritten; gradients are
/// overwritten or, with `accumulate`, added to.

// <chorus/kernels/loss_options.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_LOSS_OPTIONS_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_LOSS_OPTIONS_HPP
/// Options of losses over classes, the same on every device.

namespace chorus::inline CHORUS_ABI {

/// What becomes of the losses of the samples.
enum class Reduction : std::uint8_t { none, mean, sum };

/// As in PyTorch. Samples with the label `ignore_index` count for nothing: neither in the loss nor in the mean's
/// divisor.
struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  Reduction reduction = Reduction::mean;
};

struct NllLossOptions {
  std::int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
};

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_LOSS_OPTIONS_HPP

namespace chorus::inline CHORUS_ABI::kernels {

/// The number of labels that are not `ignore_index`: the divisor of a mean. Throws UsageError, which names the sample
/// and its label, where one lies outside of [0, classes).
inline Index count_labels(Cpu, std::string_view operation, Index batch, Index classes, const std::int64_t* labels,
                          std::int64_t ignore_index) {
  Index counted = 0;
  for (Index i = 0; i < batch; ++i) {
    if (labels[i] == ignore_index) continue;
    check<UsageError>(labels[i] >= 0 && labels[i] < classes, operation, ": label ", labels[i], " of sample ", i,
                      " is not in [0, ", classes, "), nor is it ignore_index ", ignore_index);
    ++counted;
  }
  return counted;
}

namespace detail {
/// The losses of all samples by `sample_loss(i)`: kept apart, summed or averaged. The mean of no sample is 0, so that a
/// device's empty share of a batch contributes nothing.
template <class T, class SampleLoss>
void reduce_losses(Index batch, Index counted, const std::int64_t* labels, std::int64_t ignore_index,
                   Reduction reduction, T* loss, SampleLoss sample_loss) {
  double total = 0;
  for (Index i = 0; i < batch; ++i) {
    const T value = labels[i] == ignore_index ? T{0} : sample_loss(i);
    if (reduction == Reduction::none)
      loss[i] = value;
    else
      total += static_cast<double>(value);
  }
  if (reduction == Reduction::none) return;
  if (reduction == Reduction::mean) total /= static_cast<double>(counted == 0 ? 1 : counted);
  loss[0] = static_cast<T>(total);
}

/// What a sample's gradient is multiplied by.
template <class T>
T sample_scale(Index i, Index counted, Reduction reduction, const T* dloss) {
  if (reduction == Reduction::none) return dloss[i];
  return reduction == Reduction::sum || counted == 0 ? dloss[0] : dloss[0] / static_cast<T>(counted);
}
}  // namespace detail

/// loss = logsumexp(x) - x[label], smoothed as in PyTorch: (1 - s) * that + s * (logsumexp(x) - mean(x)).
/// logits: [batch, classes]; labels: [batch]; loss: [batch] for Reduction::none, else one number; log_sum_exp: [batch],
/// kept for the backward pass. Throws UsageError for a bad label or a smoothing outside of [0, 1] before it writes
/// anything.
template <class T>
void cross_entropy_forward(Cpu cpu, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                           const CrossEntropyOptions& options, T* loss, T* log_sum_exp) {
  check<UsageError>(options.label_smoothing >= 0 && options.label_smoothing <= 1,
                    "cross_entropy: label_smoothing must be in [0, 1], got ", options.label_smoothing);
  const Index counted = count_labels(cpu, "cross_entropy", batch, classes, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  for (Index i = 0; i < batch; ++i) {
    const Row<T> row{i * classes, i, classes};
    row.store_result(log_sum_exp, detail::logsumexp(row, logits));
  }
  detail::reduce_losses(batch, counted, labels, options.ignore_index, options.reduction, loss, [&](Index i) {
    const T* x = logits + i * classes;
    const T sharp = log_sum_exp[i] - x[labels[i]];
    if (smoothing == 0) return sharp;
    const T smooth = log_sum_exp[i] - sum_all(cpu, classes, x) / static_cast<T>(classes);
    return (T{1} - smoothing) * sharp + smoothing * smooth;
  });
}

/// dlogits = (softmax(x) - target) * scale with target = (1 - s) * onehot + s / classes; 0 for ignored samples.
/// dloss: [batch] for Reduction::none, else one number. `dlogits` may be `logits`, unless it accumulates.
template <class T>
void cross_entropy_backward(Cpu cpu, Index batch, Index classes, const T* logits, const std::int64_t* labels,
                            const CrossEntropyOptions& options, const T* log_sum_exp, const T* dloss, T* dlogits,
                            bool accumulate) {
  const Index counted = count_labels(cpu, "cross_entropy", batch, classes, labels, options.ignore_index);
  const T smoothing = static_cast<T>(options.label_smoothing);
  for (Index i = 0; i < batch; ++i) {
    const T* x = logits + i * classes;
    T* dx = dlogits + i * classes;
    if (labels[i] == options.ignore_index) {
      if (!accumulate) std::fill_n(dx, classes, T{0});
      continue;
    }
    const T scale = detail::sample_scale(i, counted, options.reduction, dloss);
    const auto s = splat(scale), lse = splat(log_sum_exp[i]), uniform = splat(smoothing / static_cast<T>(classes));
    for_packets<T>(classes, [&](Index j, auto count) {
      const auto p = detail::exp_to_zero<T>(psub(load(x + j, count), lse));
      store(dx + j, pmul(psub(p, uniform), s), count, accumulate);
    });
    dx[labels[i]] -= (T{1} - smoothing) * scale;
  }
}

/// loss = -log_probabilities[label]. Shapes, errors and reductions as in `cross_entropy_forward`.
template <class T>
void nll_loss_forward(Cpu cpu, Index batch, Index classes, const T* log_probabilities, const std::int64_t* labels,
                      const NllLossOptions& options, T* loss) {
  const Index counted = count_labels(cpu, "nll_loss", batch, classes, labels, options.ignore_index);
  detail::reduce_losses(batch, counted, labels, options.ignore_index, options.reduction, loss,
                        [&](Index i) { return -log_probabilities[i * classes + labels[i]]; });
}

template <class T>
void nll_loss_backward(Cpu cpu, Index batch, Index classes, const std::int64_t* labels, const NllLossOptions& options,
                       const T* dloss, T* dlog_probabilities, bool accumulate) {
  const Index counted = count_labels(cpu, "nll_loss", batch, classes, labels, options.ignore_index);
  if (!accumulate) std::fill_n(dlog_probabilities, batch * classes, T{0});
  for (Index i = 0; i < batch; ++i)
    if (labels[i] != options.ignore_index)
      dlog_probabilities[i * classes + labels[i]] -= detail::sample_scale(i, counted, options.reduction, dloss);
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_CROSS_ENTROPY_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CROSS_ENTROPY_HPP

namespace chorus::inline CHORUS_ABI {

namespace detail {
template <class T, class D, class Options>
void check_class_loss(const char* operation, const Tensor<T, 2, D>& scores, const Tensor<std::int64_t, 1, D>& labels,
                      const Options& options, Reduction expected) {
  check<ShapeError>(scores.size(0) == labels.size(0), operation, ": scores of shape ", scores.shape(), " need ",
                    scores.size(0), " labels, got ", labels.size(0));
  check<UsageError>((options.reduction == Reduction::none) == (expected == Reduction::none), operation,
                    ": one loss a sample has a function of its own: ", operation, "_per_sample");
}

template <int Rank, Operand X, class D>
auto cross_entropy(const X& logits, const Tensor<std::int64_t, 1, D>& labels, const CrossEntropyOptions& options) {
  using T = typename tensor_of<X>::value_type;
  const auto scores = contiguous(value_of(logits));
  const auto targets = contiguous(labels);
  check_class_loss("cross_entropy", scores, targets, options, Rank == 1 ? Reduction::none : Reduction::mean);
  const auto device = scores.device();
  const Index batch = scores.size(0), classes = scores.size(1);
  Shape<Rank> shape{};
  if constexpr (Rank == 1) shape[0] = batch;
  auto loss = Tensor<T, Rank, D>::empty(shape, device);
  auto log_sum_exp = Tensor<T, 1, D>::empty({batch}, device);
  kernels::cross_entropy_forward(device, batch, classes, scores.data(), targets.data(), options, loss.data(),
                                 log_sum_exp.data());
  return record(
      "cross_entropy", std::move(loss),
      [scores, targets, options, log_sum_exp](const auto& dloss, auto dlogits) {
        const auto [grad, accumulate] = dlogits->target();
        kernels::cross_entropy_backward(scores.device(), scores.size(0), scores.size(1), scores.data(), targets.data(),
                                        options, log_sum_exp.data(), dloss.data(), grad.data(), accumulate);
      },
      logits);
}

template <int Rank, Operand X, class D>
auto nll_loss(const X& log_probabilities, const Tensor<std::int64_t, 1, D>& labels, const NllLossOptions& options) {
  using T = typename tensor_of<X>::value_type;
  const auto scores = contiguous(value_of(log_probabilities));
  const auto targets = contiguous(labels);
  check_class_loss("nll_loss", scores, targets, options, Rank == 1 ? Reduction::none : Reduction::mean);
  Shape<Rank> shape{};
  if constexpr (Rank == 1) shape[0] = scores.size(0);
  auto loss = Tensor<T, Rank, D>::empty(shape, scores.device());
  kernels::nll_loss_forward(scores.device(), scores.size(0), scores.size(1), scores.data(), targets.data(), options,
                            loss.data());
  return record(
      "nll_loss", std::move(loss),
      [scores, targets, options](const auto& dloss, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::nll_loss_backward(scores.device(), scores.size(0), scores.size(1), targets.data(), options,
                                   dloss.data(), grad.data(), accumulate);
      },
      log_probabilities);
}
}  // namespace detail

/// logits: [batch, classes], labels: [batch] in [0, classes) -> -log softmax(logits)[label], averaged (or summed) over
/// the batch. The mean over no samples is 0, so that an empty share of a batch contributes nothing. Throws UsageError
/// for a bad label, ShapeError where the batches differ.
template <Operand X, class D>
auto cross_entropy(const X& logits, const Tensor<std::int64_t, 1, D>& labels, const CrossEntropyOptions& options = {}) {
  return detail::cross_entropy<0>(logits, labels, options);
}

/// The same without a reduction: [batch].
template <Operand X, class D>
auto cross_entropy_per_sample(const X& logits, const Tensor<std::int64_t, 1, D>& labels,
                              CrossEntropyOptions options = {}) {
  options.reduction = Reduction::none;
  return detail::cross_entropy<1>(logits, labels, options);
}

/// log_probabilities: [batch, classes], labels: [batch] -> -log_probabilities[label], averaged (or summed) over the
/// batch.
template <Operand X, class D>
auto nll_loss(const X& log_probabilities, const Tensor<std::int64_t, 1, D>& labels,
              const NllLossOptions& options = {}) {
  return detail::nll_loss<0>(log_probabilities, labels, options);
}

/// The same without a reduction: [batch].
template <Operand X, class D>
auto nll_loss_per_sample(const X& log_probabilities, const Tensor<std::int64_t, 1, D>& labels,
                         NllLossOptions options = {}) {
  options.reduction = Reduction::none;
  return detail::nll_loss<1>(log_probabilities, labels, options);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_CROSS_ENTROPY_HPP

// <chorus/ops/cumulative.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_CUMULATIVE_HPP
#define CHORUS_SINGLE_CHORUS_OPS_CUMULATIVE_HPP
/// Running sums.

// <chorus/kernels/cumulative.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CUMULATIVE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CUMULATIVE_HPP
/// Running sums, for every kind of device that this build has.

// <chorus/kernels/cpu/cumulative.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_CUMULATIVE_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_CUMULATIVE_HPP
/// Running sums along an axis on the CPU. x, y: [outer, axis, inner].

namespace chorus::inline CHORUS_ABI::kernels {

/// y[i] = x[0] + ... + x[i] along the axis, or with `reverse` x[i] + ... + x[last]; overwrites y, or adds to it. Summed
/// in double.
template <class T>
void cumsum(Cpu, AxisShape shape, const T* x, T* y, bool reverse = false, bool accumulate = false) {
  for (Index o = 0; o < shape.outer; ++o)
    for (Index i = 0; i < shape.inner; ++i) {
      double sum = 0;
      for (Index a = 0; a < shape.axis; ++a) {
        const Index at = (o * shape.axis + (reverse ? shape.axis - 1 - a : a)) * shape.inner + i;
        sum += static_cast<double>(x[at]);
        y[at] = static_cast<T>(sum) + (accumulate ? y[at] : T{0});
      }
    }
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_CUMULATIVE_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CUMULATIVE_HPP

namespace chorus::inline CHORUS_ABI {

/// Element i along the axis is the sum of x's elements 0 to i.
template <Operand X>
auto cumsum(const X& x, Index axis) {
  const auto input = contiguous(value_of(x));
  const auto view = detail::around_axis(input.shape(), normalize_axis("cumsum", axis, tensor_of<X>::rank));
  auto out = tensor_of<X>::empty(input.shape(), input.device());
  kernels::cumsum(input.device(), view, input.data(), out.data());
  return record(
      "cumsum", std::move(out),
      [view](const auto& dy, auto dx) {
        const auto [grad, accumulate] = dx->target();
        kernels::cumsum(dy.device(), view, dy.data(), grad.data(), /*reverse=*/true, accumulate);
      },
      x);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_CUMULATIVE_HPP

// <chorus/ops/losses.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_LOSSES_HPP
#define CHORUS_SINGLE_CHORUS_OPS_LOSSES_HPP
/// Losses that compare two operands element by element. Each comes in two forms: `NAME` is the mean (or sum) of all
/// elements, `NAME_per_element` keeps them. Gradients go to both operands.

namespace chorus::inline CHORUS_ABI {

namespace functors {

struct SquaredError {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return (x - target) * (x - target);
  }
};

struct AbsoluteError {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return abs(x - target);
  }
};

/// d² / (2 beta) where |d| < beta, else |d| - beta / 2 (Girshick 2015).
struct SmoothL1 {
  double beta = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    using R = real_of<S>;
    const S d = x - target, distance = abs(d);
    return where(distance < R(beta), d * d * R(0.5 / beta), distance - R(0.5 * beta));
  }
};

/// d² / 2 where |d| <= delta, else delta (|d| - delta / 2) (Huber 1964).
struct Huber {
  double delta = 1;
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    using R = real_of<S>;
    const S d = x - target, distance = abs(d);
    return where(distance <= R(delta), d * d * R(0.5), (distance - R(0.5 * delta)) * R(delta));
  }
};

/// -target log(sigmoid(x)) - (1 - target) log(1 - sigmoid(x)), without overflow.
struct BinaryCrossEntropy {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return softplus(x) - x * target;
  }
};

/// target (log(target) - x); 0 where the target is 0.
struct KlDivergence {
  template <class S>
  CHORUS_HD S operator()(const S& x, const S& target) const {
    return where(target > 0, target * (log(target) - x), S(0));
  }
};

}  // namespace functors

namespace detail {
// The mean of no elements is 0, so that an empty share of a batch contributes nothing.
template <Operand X, Operand Y, class F>
auto reduced_loss(const char* operation, const F& f, const X& x, const Y& target, Reduction reduction) {
  check<UsageError>(reduction != Reduction::none, operation, ": for the loss of each element call ", operation,
                    "_per_element");
  const auto losses = pointwise(operation, f, x, target);
  const Index count = reduction == Reduction::mean ? std::max(losses.numel(), Index{1}) : 1;
  return sum(losses) / count;
}
}  // namespace detail

#define CHORUS_LOSS(NAME, FUNCTOR)                                                 \
  template <Operand X, Operand Y>                                                  \
  auto NAME(const X& x, const Y& target, Reduction reduction = Reduction::mean) {  \
    return detail::reduced_loss(#NAME, functors::FUNCTOR{}, x, target, reduction); \
  }                                                                                \
  template <Operand X, Operand Y>                                                  \
  auto NAME##_per_element(const X& x, const Y& target) {                           \
    return detail::pointwise(#NAME, functors::FUNCTOR{}, x, target);               \
  }
/// (x - target)²
CHORUS_LOSS(mse_loss, SquaredError)
/// |x - target|
CHORUS_LOSS(l1_loss, AbsoluteError)
/// Binary cross entropy of logits x with targets in [0, 1].
CHORUS_LOSS(bce_with_logits, BinaryCrossEntropy)
#undef CHORUS_LOSS

/// Squared below `beta`, linear above it. Throws UsageError unless beta is positive.
template <Operand X, Operand Y>
auto smooth_l1_loss(const X& x, const Y& target, double beta = 1, Reduction reduction = Reduction::mean) {
  check<UsageError>(beta > 0, "smooth_l1_loss: beta is positive, got ", beta);
  return detail::reduced_loss("smooth_l1_loss", functors::SmoothL1{beta}, x, target, reduction);
}
template <Operand X, Operand Y>
auto smooth_l1_loss_per_element(const X& x, const Y& target, double beta = 1) {
  check<UsageError>(beta > 0, "smooth_l1_loss: beta is positive, got ", beta);
  return detail::pointwise("smooth_l1_loss", functors::SmoothL1{beta}, x, target);
}

/// Squared up to `delta`, linear above it: delta times smooth_l1_loss. Throws UsageError unless delta is positive.
template <Operand X, Operand Y>
auto huber_loss(const X& x, const Y& target, double delta = 1, Reduction reduction = Reduction::mean) {
  check<UsageError>(delta > 0, "huber_loss: delta is positive, got ", delta);
  return detail::reduced_loss("huber_loss", functors::Huber{delta}, x, target, reduction);
}
template <Operand X, Operand Y>
auto huber_loss_per_element(const X& x, const Y& target, double delta = 1) {
  check<UsageError>(delta > 0, "huber_loss: delta is positive, got ", delta);
  return detail::pointwise("huber_loss", functors::Huber{delta}, x, target);
}

/// The Kullback-Leibler divergence of distributions `target` from those whose logarithms are given: both [batch, ...];
/// summed, and divided by the batch's size (PyTorch's `batchmean`).
template <Operand X, Operand Y>
auto kl_div(const X& log_probabilities, const Y& target) {
  static_assert(tensor_of<X>::rank >= 1, "kl_div: the input has a batch axis");
  const Index batch = value_of(log_probabilities).size(0);
  return detail::reduced_loss("kl_div", functors::KlDivergence{}, log_probabilities, target, Reduction::sum) /
         std::max(batch, Index{1});
}
template <Operand X, Operand Y>
auto kl_div_per_element(const X& log_probabilities, const Y& target) {
  return detail::pointwise("kl_div", functors::KlDivergence{}, log_probabilities, target);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_LOSSES_HPP

// <chorus/ops/padding.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_PADDING_HPP
#define CHORUS_SINGLE_CHORUS_OPS_PADDING_HPP
/// Padding of images.

namespace chorus::inline CHORUS_ABI {

struct Padding2d {
  Index left = 0, right = 0, top = 0, bottom = 0;
};

/// x: [..., height, width] -> [..., top + height + bottom, left + width + right], `value` around x. Throws UsageError
/// for negative padding.
template <Operand X>
auto pad2d(const X& x, const Padding2d& padding, double value = 0) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank >= 2, "pad2d: the input is [..., height, width]");
  check<UsageError>(padding.left >= 0 && padding.right >= 0 && padding.top >= 0 && padding.bottom >= 0,
                    "pad2d: padding is at least 0, got left ", padding.left, ", right ", padding.right, ", top ",
                    padding.top, ", bottom ", padding.bottom);
  const auto input = contiguous(value_of(x));
  const Index height = input.size(-2), width = input.size(-1);
  const auto inside = [padding, height, width](const auto& whole) {
    return whole.slice(-2, padding.top, padding.top + height).slice(-1, padding.left, padding.left + width);
  };
  auto shape = input.shape();
  shape[shape.size() - 2] += padding.top + padding.bottom;
  shape.back() += padding.left + padding.right;
  auto out = tensor_of<X>::empty(shape, input.device());
  kernels::fill(input.device(), out.numel(), out.data(), static_cast<T>(value));
  const auto place = inside(out);
  kernels::scatter_strided(input.device(), input.shape(), input.data(), place.data(), place.strides());
  return record(
      "pad2d", std::move(out), [inside](const auto& dy, auto dx) { dx->add(contiguous(inside(dy))); }, x);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_PADDING_HPP

// <chorus/ops/recurrent.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_RECURRENT_HPP
#define CHORUS_SINGLE_CHORUS_OPS_RECURRENT_HPP
/// Recurrent layers over whole sequences: LSTM (Hochreiter, Schmidhuber 1997) and GRU (Cho et al. 2014), with PyTorch's
/// weights and gate order.

namespace chorus::inline CHORUS_ABI {

namespace functors {

/// The next cell state from the gates before their activations and the present state.
struct LstmCell {
  template <class S>
  CHORUS_HD S operator()(const S& input, const S& forget, const S& candidate, const S& cell) const {
    return sigmoid(forget) * cell + sigmoid(input) * tanh(candidate);
  }
};
struct LstmOutput {
  template <class S>
  CHORUS_HD S operator()(const S& output, const S& cell) const {
    return sigmoid(output) * tanh(cell);
  }
};

/// The candidate state: the reset gate acts on what comes from the present state.
struct GruCandidate {
  template <class S>
  CHORUS_HD S operator()(const S& reset_x, const S& reset_h, const S& x, const S& h) const {
    return tanh(x + sigmoid(reset_x + reset_h) * h);
  }
};
/// The next state, between the candidate and the present one.
struct GruState {
  template <class S>
  CHORUS_HD S operator()(const S& update_x, const S& update_h, const S& candidate, const S& state) const {
    return candidate + sigmoid(update_x + update_h) * (state - candidate);
  }
};

}  // namespace functors

/// The outputs of all steps, [batch, time, hidden], and the last step's states, [batch, hidden].
template <class Sequence, class State>
struct LstmResult {
  Sequence output;
  State hidden, cell;
};
template <class Sequence, class State>
struct GruResult {
  Sequence output;
  State hidden;
};

namespace detail {

template <Operand X, Operand W>
void check_recurrent(const char* operation, const X& x, const W& weight_ih, const W& weight_hh, Index gates) {
  static_assert(tensor_of<X>::rank == 3, "a recurrent layer's input is [batch, time, features]");
  const auto& in = value_of(x).shape();
  const auto& ih = value_of(weight_ih).shape();
  const auto& hh = value_of(weight_hh).shape();
  check<ShapeError>(ih[1] == in[2] && hh[0] == gates * hh[1] && ih[0] == hh[0], operation, ": an input of shape ", in,
                    " and weights of shapes ", ih, " and ", hh, " do not fit: expected [", gates,
                    " hidden, features] and [", gates, " hidden, hidden]");
  check<ShapeError>(in[1] > 0, operation, ": an input of shape ", in, " has no time steps");
}

// Columns `gate` of the rows of a step.
template <Operand X>
auto gate(const X& gates, Index number, Index hidden) {
  return slice(gates, -1, number * hidden, (number + 1) * hidden);
}

template <Operand X>
auto time_step(const X& sequence, Index t) {
  const auto& shape = value_of(sequence).shape();
  return reshape(slice(sequence, 1, t, t + 1), Shape<2>{shape[0], shape[2]});
}

template <class State>
auto join_steps(const std::vector<State>& steps) {
  const auto& shape = steps.front().shape();
  std::vector<decltype(reshape(steps.front(), Shape<3>{}))> rows;
  for (const State& step : steps) rows.push_back(reshape(step, Shape<3>{shape[0], 1, shape[1]}));
  return concat(1, std::span<const typename decltype(rows)::value_type>(rows));
}

}  // namespace detail

/// x: [batch, time, features], weight_ih: [4 hidden, features], weight_hh: [4 hidden, hidden], biases: [4 hidden];
/// gates in the order input, forget, candidate, output; states start from zero. Throws ShapeError where sizes don't
/// fit.
template <Operand X, Operand W, Operand B>
auto lstm(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh) {
  using T = typename tensor_of<X>::value_type;
  detail::check_recurrent("lstm", x, weight_ih, weight_hh, 4);
  const Index batch = value_of(x).size(0), time = value_of(x).size(1), hidden = value_of(weight_hh).size(1);
  const auto from_x = linear(x, weight_ih, bias_ih);
  using State = decltype(detail::time_step(from_x, 0));
  State h(Tensor<T, 2, typename tensor_of<X>::device_type>::zeros({batch, hidden}, value_of(x).device()));
  State c = h;
  std::vector<State> steps;
  for (Index t = 0; t < time; ++t) {
    const auto gates =
        detail::pointwise("lstm", functors::Add{}, detail::time_step(from_x, t), linear(h, weight_hh, bias_hh));
    c = detail::pointwise("lstm", functors::LstmCell{}, detail::gate(gates, 0, hidden), detail::gate(gates, 1, hidden),
                          detail::gate(gates, 2, hidden), c);
    h = detail::pointwise("lstm", functors::LstmOutput{}, detail::gate(gates, 3, hidden), c);
    steps.push_back(h);
  }
  auto output = detail::join_steps(steps);
  return LstmResult<decltype(output), State>{std::move(output), h, c};
}

/// x: [batch, time, features], weight_ih: [3 hidden, features], weight_hh: [3 hidden, hidden], biases: [3 hidden];
/// gates in the order reset, update, candidate; the state starts from zero. Throws ShapeError where sizes don't fit.
template <Operand X, Operand W, Operand B>
auto gru(const X& x, const W& weight_ih, const W& weight_hh, const B& bias_ih, const B& bias_hh) {
  using T = typename tensor_of<X>::value_type;
  detail::check_recurrent("gru", x, weight_ih, weight_hh, 3);
  const Index batch = value_of(x).size(0), time = value_of(x).size(1), hidden = value_of(weight_hh).size(1);
  const auto from_x = linear(x, weight_ih, bias_ih);
  using State = decltype(detail::time_step(from_x, 0));
  State h(Tensor<T, 2, typename tensor_of<X>::device_type>::zeros({batch, hidden}, value_of(x).device()));
  std::vector<State> steps;
  for (Index t = 0; t < time; ++t) {
    const auto gx = detail::time_step(from_x, t);
    const auto gh = linear(h, weight_hh, bias_hh);
    const auto candidate =
        detail::pointwise("gru", functors::GruCandidate{}, detail::gate(gx, 0, hidden), detail::gate(gh, 0, hidden),
                          detail::gate(gx, 2, hidden), detail::gate(gh, 2, hidden));
    h = detail::pointwise("gru", functors::GruState{}, detail::gate(gx, 1, hidden), detail::gate(gh, 1, hidden),
                          candidate, h);
    steps.push_back(h);
  }
  auto output = detail::join_steps(steps);
  return GruResult<decltype(output), State>{std::move(output), h};
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_RECURRENT_HPP

// <chorus/ops/resize.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_RESIZE_HPP
#define CHORUS_SINGLE_CHORUS_OPS_RESIZE_HPP
/// Images in other sizes: nearest-neighbour enlargement, and pooling to a given size.

namespace chorus::inline CHORUS_ABI {

/// x: [batch, channels, height, width] -> each pixel repeated `scale` times along both axes. Throws UsageError unless
/// the scale is positive.
template <Operand X>
auto upsample_nearest2d(const X& x, Size2d scale) {
  static_assert(tensor_of<X>::rank == 4, "upsample_nearest2d: the input is [batch, channels, height, width]");
  check<UsageError>(scale.height > 0 && scale.width > 0, "upsample_nearest2d: the scale is at least 1, got ",
                    scale.height, " x ", scale.width);
  const auto [n, c, h, w] = value_of(x).shape();
  const auto pixels = reshape(x, Shape<5>{n * c, h, 1, w, 1});
  return reshape(expand(pixels, Shape<5>{n * c, h, scale.height, w, scale.width}),
                 Shape<4>{n, c, h * scale.height, w * scale.width});
}

namespace detail {
// [out, in]: row i averages the entries that lie in the i-th of `out` equal parts of the axis, whole or in part.
template <Real T, Device D>
Tensor<T, 2, D> averaging_matrix(Index in, Index out, D device) {
  auto host = Tensor<T, 2, Cpu>::zeros({out, in});
  for (Index i = 0; i < out; ++i) {
    const Index first = i * in / out, last = ((i + 1) * in + out - 1) / out;
    for (Index j = first; j < last; ++j) host(i, j) = T{1} / static_cast<T>(last - first);
  }
  return Tensor<T, 2, D>::from({host.data(), static_cast<std::size_t>(host.numel())}, host.shape(), device);
}
}  // namespace detail

/// x: [batch, channels, height, width] -> [batch, channels, size.height, size.width], each the mean of its part of the
/// image, as PyTorch divides it. Throws UsageError unless the size is positive, ShapeError for an image without pixels.
template <Operand X>
auto adaptive_avg_pool2d(const X& x, Size2d size) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank == 4, "adaptive_avg_pool2d: the input is [batch, channels, height, width]");
  check<UsageError>(size.height > 0 && size.width > 0, "adaptive_avg_pool2d: the size is at least 1, got ", size.height,
                    " x ", size.width);
  const auto [n, c, h, w] = value_of(x).shape();
  check<ShapeError>(h > 0 && w > 0, "adaptive_avg_pool2d: an image of shape ", value_of(x).shape(), " has no pixels");
  const auto device = value_of(x).device();
  // Means along the width, then along the height; the one or the other may be the whole axis.
  const auto along_last = [&](const auto& image, Index in, Index out) {
    return linear(image, detail::averaging_matrix<T>(in, out, device));
  };
  const auto narrow = transpose(along_last(x, w, size.width), 2, 3);
  return transpose(along_last(narrow, h, size.height), 2, 3);
}

/// x: [batch, channels, ...] -> the mean of each channel: [batch, channels].
template <Operand X>
auto global_avg_pool(const X& x) {
  return mean(flatten<2>(x), 2);
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_RESIZE_HPP

// <chorus/ops/transposed_convolution.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPS_TRANSPOSED_CONVOLUTION_HPP
#define CHORUS_SINGLE_CHORUS_OPS_TRANSPOSED_CONVOLUTION_HPP
/// The transposed convolution: what conv2d's backward pass does to its input's gradient, as a forward function.

namespace chorus::inline CHORUS_ABI {

struct ConvTranspose2dOptions {
  /// `output_padding` adds rows and columns at the bottom and on the right.
  Size2d stride = 1, padding = 0, output_padding = 0, dilation = 1;
  Index groups = 1;
};

/// x: [batch, in, height, width], weight: [in, out / groups, kernel_h, kernel_w] -> [batch, out, out_h, out_w] with
/// out_h = (height - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1. Throws ShapeError where
/// channels don't fit or nothing would be left, UsageError for options that make no sense.
template <Operand X, Operand W>
auto conv_transpose2d(const X& x, const W& weight, const ConvTranspose2dOptions& options = {}) {
  using T = typename tensor_of<X>::value_type;
  static_assert(tensor_of<X>::rank == 4 && tensor_of<W>::rank == 4,
                "conv_transpose2d: the input is [batch, channels, height, width]");
  const auto input = contiguous(value_of(x));
  const auto w = contiguous(value_of(weight));
  const auto [stride, padding, extra, dilation, groups] = options;
  check<UsageError>(groups > 0 && stride.height > 0 && stride.width > 0 && dilation.height > 0 && dilation.width > 0 &&
                        padding.height >= 0 && padding.width >= 0,
                    "conv_transpose2d: stride, dilation and groups are at least 1, padding at least 0");
  check<UsageError>(extra.height >= 0 && extra.width >= 0 && extra.height < std::max(stride.height, dilation.height) &&
                        extra.width < std::max(stride.width, dilation.width),
                    "conv_transpose2d: output_padding is at least 0 and below stride or dilation");
  check<ShapeError>(w.size(0) == input.size(1) && input.size(1) % groups == 0, "conv_transpose2d: an input of shape ",
                    input.shape(), " does not fit a weight of shape ", w.shape(), " with ", groups, " groups");
  const auto spread = [](Index size, Index step, Index pad, Index gap, Index kernel, Index more) {
    return (size - 1) * step - 2 * pad + gap * (kernel - 1) + more + 1;
  };
  // The convolution that this one turns round: it would make x from the result.
  const kernels::Conv2dShape shape{
      .batch = input.size(0),
      .in_channels = w.size(1) * groups,
      .height = spread(input.size(2), stride.height, padding.height, dilation.height, w.size(2), extra.height),
      .width = spread(input.size(3), stride.width, padding.width, dilation.width, w.size(3), extra.width),
      .out_channels = input.size(1),
      .kernel_h = w.size(2),
      .kernel_w = w.size(3),
      .stride_h = stride.height,
      .stride_w = stride.width,
      .padding_h = padding.height,
      .padding_w = padding.width,
      .dilation_h = dilation.height,
      .dilation_w = dilation.width,
      .groups = groups};
  check<ShapeError>(shape.height > 0 && shape.width > 0, "conv_transpose2d: an input of shape ", input.shape(),
                    " gives images of ", shape.height, " x ", shape.width);
  const auto device = input.device();
  auto out = Tensor<T, 4, typename tensor_of<X>::device_type>::empty(
      {shape.batch, shape.in_channels, shape.height, shape.width}, device);
  kernels::conv2d_backward_input(device, shape, w.data(), input.data(), out.data(), false);
  return record(
      "conv_transpose2d", std::move(out),
      [input, w, shape, device](const auto& dy, auto dx, auto dw) {
        if (dw) {
          const auto [grad, accumulate] = dw->target();
          kernels::conv2d_backward_weight(device, shape, dy.data(), input.data(), grad.data(), accumulate);
        }
        if (dx) {
          auto grad = tensor_of<X>::empty(input.shape(), device);
          kernels::conv2d_forward(device, shape, dy.data(), w.data(), static_cast<const T*>(nullptr), grad.data());
          dx->add(grad);
        }
      },
      x, weight);
}

/// The same with a bias for each channel: [out].
template <Operand X, Operand W, Operand B>
auto conv_transpose2d(const X& x, const W& weight, const B& bias, const ConvTranspose2dOptions& options = {}) {
  const Index channels = value_of(weight).size(1) * options.groups;
  check<ShapeError>(value_of(bias).numel() == channels, "conv_transpose2d: the bias has ", value_of(bias).numel(),
                    " elements for ", channels, " channels");
  return conv_transpose2d(x, weight, options) + reshape(bias, Shape<3>{channels, 1, 1});
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_OPS_TRANSPOSED_CONVOLUTION_HPP

// <chorus/optim/adagrad.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_ADAGRAD_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_ADAGRAD_HPP
/// Adagrad (Duchi, Hazan, Singer 2011), as PyTorch computes it.

// <chorus/kernels/optimizer.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_OPTIMIZER_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_OPTIMIZER_HPP
/// The optimizer kernels for every kind of device that this build has.

// <chorus/kernels/cpu/optimizer.hpp>
#ifndef CHORUS_SINGLE_CHORUS_KERNELS_CPU_OPTIMIZER_HPP
#define CHORUS_SINGLE_CHORUS_KERNELS_CPU_OPTIMIZER_HPP
/// Optimizer steps over flat arrays, each in one pass over memory. Formulas are PyTorch 1.13's.

namespace chorus::inline CHORUS_ABI::kernels {

struct SgdScalars {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, first_step = false;
};

/// g += weight_decay p; m = momentum m + (1 - dampening) g (in the first step m = g); g = m, or g + momentum m for
/// Nesterov; p -= lr g. Overwrites `p` and `momentum`, which is null where there is none; `g` stays.
template <Real T>
void sgd_step(Cpu, Index count, T* p, const T* g, T* momentum, const SgdScalars& s) {
  const auto scalar = [](double x) { return splat(static_cast<T>(x)); };
  const auto lr = scalar(-s.lr), decay = scalar(s.weight_decay), keep = scalar(s.momentum),
             mix = scalar(1 - s.dampening);
  for_packets<T>(count, [&](Index i, auto n) {
    const auto value = load(p + i, n);
    auto step = pmadd(decay, value, load(g + i, n));
    if (momentum != nullptr) {
      const auto m = s.first_step ? step : pmadd(mix, step, pmul(keep, load(momentum + i, n)));
      store(momentum + i, m, n);
      step = s.nesterov ? pmadd(keep, m, step) : m;
    }
    store(p + i, pmadd(lr, step, value), n);
  });
}

struct AdamScalars {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  /// True: weight decay shrinks the parameter itself (AdamW); false: it is added to the gradient (Adam).
  bool decoupled = false;
  /// The number of this step, from 1.
  Index step = 1;
};

/// m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g²;
/// p -= lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps), with the largest v so far if `vmax` is not null
/// (AMSGrad). Overwrites p, m, v and vmax; `g` stays.
template <Real T>
void adam_step(Cpu, Index count, T* p, const T* g, T* m, T* v, T* vmax, const AdamScalars& s) {
  const auto scalar = [](double x) { return splat(static_cast<T>(x)); };
  const auto exponent = static_cast<double>(s.step);
  const auto step_size = scalar(-s.lr / (1 - std::pow(s.beta1, exponent)));
  const auto correction = scalar(std::sqrt(1 - std::pow(s.beta2, exponent))), eps = scalar(s.eps);
  const auto keep1 = scalar(s.beta1), mix1 = scalar(1 - s.beta1), keep2 = scalar(s.beta2), mix2 = scalar(1 - s.beta2);
  const auto decay = scalar(s.decoupled ? 0 : s.weight_decay),
             shrink = scalar(s.decoupled ? 1 - s.lr * s.weight_decay : 1);
  for_packets<T>(count, [&](Index i, auto n) {
    const auto value = load(p + i, n);
    const auto grad = pmadd(decay, value, load(g + i, n));
    const auto mean = pmadd(mix1, grad, pmul(keep1, load(m + i, n)));
    auto square = pmadd(pmul(mix2, grad), grad, pmul(keep2, load(v + i, n)));
    store(m + i, mean, n);
    store(v + i, square, n);
    if (vmax != nullptr) {
      square = Eigen::internal::pmax(load(vmax + i, n), square);
      store(vmax + i, square, n);
    }
    const auto denominator = padd(Eigen::internal::pdiv(math::packets::sqrt<T>(square), correction), eps);
    store(p + i, pmadd(step_size, Eigen::internal::pdiv(mean, denominator), pmul(shrink, value)), n);
  });
}

struct RmsPropScalars {
  double lr = 0, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
};

/// g += weight_decay p; v = alpha v + (1 - alpha) g²; step = g / (sqrt(v) + eps); with momentum m = momentum m + step
/// and step = m; p -= lr step. Overwrites p, v and m, which is null where there is no momentum; `g` stays.
template <Real T>
void rms_prop_step(Cpu, Index count, T* p, const T* g, T* v, T* m, const RmsPropScalars& s) {
  const auto scalar = [](double x) { return splat(static_cast<T>(x)); };
  const auto lr = scalar(-s.lr), keep = scalar(s.alpha), mix = scalar(1 - s.alpha), eps = scalar(s.eps);
  const auto decay = scalar(s.weight_decay), momentum = scalar(s.momentum);
  for_packets<T>(count, [&](Index i, auto n) {
    const auto value = load(p + i, n);
    const auto grad = pmadd(decay, value, load(g + i, n));
    const auto square = pmadd(pmul(mix, grad), grad, pmul(keep, load(v + i, n)));
    store(v + i, square, n);
    auto step = Eigen::internal::pdiv(grad, padd(math::packets::sqrt<T>(square), eps));
    if (m != nullptr) {
      step = pmadd(momentum, load(m + i, n), step);
      store(m + i, step, n);
    }
    store(p + i, pmadd(lr, step, value), n);
  });
}

struct AdagradScalars {
  double lr = 0, lr_decay = 0, eps = 1e-10, weight_decay = 0;
  /// The number of this step, from 1.
  Index step = 1;
};

/// g += weight_decay p; sum += g²; p -= lr / (1 + (step - 1) lr_decay) * g / (sqrt(sum) + eps). Overwrites p and sum.
template <Real T>
void adagrad_step(Cpu, Index count, T* p, const T* g, T* sum, const AdagradScalars& s) {
  const auto scalar = [](double x) { return splat(static_cast<T>(x)); };
  const auto lr = scalar(-s.lr / (1 + static_cast<double>(s.step - 1) * s.lr_decay));
  const auto eps = scalar(s.eps), decay = scalar(s.weight_decay);
  for_packets<T>(count, [&](Index i, auto n) {
    const auto value = load(p + i, n);
    const auto grad = pmadd(decay, value, load(g + i, n));
    const auto square = pmadd(grad, grad, load(sum + i, n));
    store(sum + i, square, n);
    store(p + i, pmadd(lr, Eigen::internal::pdiv(grad, padd(math::packets::sqrt<T>(square), eps)), value), n);
  });
}

/// The sum of squares, in an order that depends on `count` alone.
template <Real T>
double square_sum(Cpu, Index count, const T* x) {
  constexpr Index block = 4096;
  double sum = 0;
  for (Index start = 0; start < count; start += block) {
    const Index end = count - start < block ? count : start + block;
    sum += static_cast<double>(Sum<T>::fold(reduce_packets<T>(start, end, splat(T{0}), Sum<T>{}, [&](Index i, auto n) {
      const auto value = load(x + i, n);
      return pmul(value, value);
    })));
  }
  return sum;
}

}  // namespace chorus::inline CHORUS_ABI::kernels
#endif  // CHORUS_SINGLE_CHORUS_KERNELS_CPU_OPTIMIZER_HPP

#endif  // CHORUS_SINGLE_CHORUS_KERNELS_OPTIMIZER_HPP

// <chorus/optim/optimizer.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_OPTIMIZER_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_OPTIMIZER_HPP
/// What all optimizers share: the parameters, their state beside them, and the walk over both in long ranges.

// <chorus/nn/flat_parameters.hpp>
#ifndef CHORUS_SINGLE_CHORUS_NN_FLAT_PARAMETERS_HPP
#define CHORUS_SINGLE_CHORUS_NN_FLAT_PARAMETERS_HPP
/// All parameters of a model in one buffer per dtype, and all gradients in another, so that a replica's copy, a gradient
/// bucket and an optimizer step are each a range of memory.

namespace chorus::inline CHORUS_ABI::nn {

/// Owns the buffers; the parameters are views of them. Within a dtype parameters lie without gaps: those that want
/// gradients first, in the order in which backward is expected to finish them (the last layer's first), frozen ones behind.
template <Device D>
class FlatParameters {
 public:
  /// Where one parameter lies, in elements of its group's buffers.
  struct Entry {
    NamedParameter<D> named;
    std::size_t group, begin, count;
    ParameterOn<D>& parameter() const { return *named.parameter; }
  };
  /// The parameters of one dtype.
  struct Group {
    DType dtype;
    Storage<D> values, grads;
    std::size_t count = 0;      // elements in all
    std::size_t trainable = 0;  // elements at the front that want gradients
    std::byte* value(std::size_t element) const {
      return static_cast<std::byte*>(values.data()) + element * size_of(dtype);
    }
    std::byte* grad(std::size_t element) const { return static_cast<std::byte*>(grads.data()) + element * size_of(dtype); }
  };

  FlatParameters() = default;

  /// Moves the parameters of `model`, contents included, into new buffers on their device.
  explicit FlatParameters(Module& model) {
    auto parameters = named_parameters<D>(model);
    std::reverse(parameters.begin(), parameters.end());
    std::stable_partition(parameters.begin(), parameters.end(),
                          [](const auto& named) { return named.parameter->wants_grad(); });
    lay_out(std::move(parameters));
  }

  /// Lays the parameters out anew: `order[i]` is the present index of the one that becomes number i.
  void reorder(std::span<const std::size_t> order) {
    check<UsageError>(order.size() == entries_.size(), "FlatParameters::reorder: ", order.size(), " indices for ",
                      entries_.size(), " parameters");
    std::vector<NamedParameter<D>> parameters;
    for (const std::size_t index : order) parameters.push_back(entries_.at(index).named);
    lay_out(std::move(parameters));
  }

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Group>& groups() const { return groups_; }

  /// Bytes of all parameters.
  std::size_t bytes() const {
    return std::accumulate(groups_.begin(), groups_.end(), std::size_t{0},
                           [](std::size_t sum, const Group& group) { return sum + group.count * size_of(group.dtype); });
  }

  /// In memory order: an optimizer that keeps it touches memory from front to back.
  std::vector<NamedParameter<D>> parameters() const {
    std::vector<NamedParameter<D>> out;
    for (const Entry& entry : entries_) out.push_back(entry.named);
    return out;
  }

 private:
  void lay_out(std::vector<NamedParameter<D>> parameters) {
    std::vector<Group> groups;
    std::vector<Entry> entries;
    for (auto& named : parameters) {
      const DType type = named.parameter->dtype();
      auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.dtype == type; });
      if (group == groups.end()) group = groups.insert(groups.end(), Group{type, {}, {}});
      const auto count = static_cast<std::size_t>(named.parameter->count());
      entries.push_back({std::move(named), static_cast<std::size_t>(group - groups.begin()), group->count, count});
      group->count += count;
      if (entries.back().parameter().wants_grad()) group->trainable = group->count;
    }
    for (std::size_t g = 0; g < groups.size(); ++g) {
      Group& group = groups[g];
      const auto first = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.group == g; });
      const D device = first->parameter().where();
      const std::size_t bytes = group.count * size_of(group.dtype);
      {
        const MemoryScope scope(trace::Memory::parameters);
        group.values = Storage<D>(device, bytes);
      }
      const MemoryScope scope(trace::Memory::gradients);
      group.grads = Storage<D>(device, bytes);
    }
    for (const Entry& entry : entries) {
      const Group& group = groups[entry.group];
      entry.parameter().bind(group.values, group.value(entry.begin), group.grads, group.grad(entry.begin));
    }
    groups_ = std::move(groups);
    entries_ = std::move(entries);
  }

  std::vector<Entry> entries_;
  std::vector<Group> groups_;
};

}  // namespace chorus::inline CHORUS_ABI::nn
#endif  // CHORUS_SINGLE_CHORUS_NN_FLAT_PARAMETERS_HPP

namespace chorus::inline CHORUS_ABI::optim {

/// The learning rate, apart from the rest so that schedules know nothing else.
class HasLearningRate {
 public:
  explicit HasLearningRate(double lr) : lr_(lr) { check_rate(lr); }
  double lr() const { return lr_; }
  void set_lr(double lr) {
    check_rate(lr);
    lr_ = lr;
  }

 private:
  static void check_rate(double lr) { check<UsageError>(lr >= 0, "optimizer: the learning rate is at least 0, got ", lr); }
  double lr_;
};

/// State that an optimizer keeps for a parameter, under the name by which checkpoints know it: `momentum.conv1.weight`.
struct StateTensor {
  std::string name;
  DType dtype;
  std::vector<Index> shape;
  void* data;
  bool on_host = false;
};

template <Device D>
class Optimizer : public HasLearningRate {
 public:
  /// Throws UsageError where there are no parameters.
  Optimizer(std::vector<nn::NamedParameter<D>> parameters, double lr) : HasLearningRate(lr) {
    check<UsageError>(!parameters.empty(), "optimizer: there are no parameters");
    for (auto& named : parameters) entries_.push_back({std::move(named)});
  }
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Changes every parameter that has a gradient; the others stay as they are.
  virtual void step() = 0;

  /// Forgets all gradients.
  void zero_grad() {
    for (const Entry& entry : entries_) entry.named.parameter->set_grad_arrived(false);
  }

  /// All state, made on the first step or by this call, for checkpoints. Numbers of steps are tensors of one integer.
  std::vector<StateTensor> state() {
    make_state();
    std::vector<StateTensor> out;
    for (Entry& entry : entries_) {
      const auto extents = entry.named.parameter->extents();
      for (std::size_t slot = 0; slot < slots().size(); ++slot)
        out.push_back({cat(slots()[slot], '.', entry.named.name), entry.named.parameter->dtype(),
                       {extents.begin(), extents.end()}, state_data(entry, slot)});
      out.push_back({cat("steps.", entry.named.name), DType::i64, {}, &entry.steps, true});
    }
    return out;
  }

  D device() const { return entries_.front().named.parameter->where(); }

 protected:
  static constexpr std::size_t max_slots = 3;

  /// Neighbouring parameters of one dtype that have gradients and have made equally many steps.
  struct Range {
    DType dtype;
    Index count;
    void* value;
    const void* grad;
    std::array<void*, max_slots> state;
    std::int64_t steps;  // before this one
  };

  /// The names of the state that each parameter has, of its own dtype and shape, at first 0.
  virtual std::span<const std::string_view> slots() const = 0;

  /// Calls `update(T{}, range)` for ranges that cover all parameters with gradients, then counts the step.
  template <class Update>
  void for_each_range(const Update& update) {
    make_state();
    Range range{};
    const auto flush = [&] {
      if (range.count == 0) return;
      if (range.dtype == DType::f32)
        update(float{}, range);
      else
        update(double{}, range);
      range.count = 0;
    };
    for (Entry& entry : entries_) {
      auto& parameter = *entry.named.parameter;
      if (!parameter.grad_arrived() || !parameter.wants_grad()) continue;
      Range next{parameter.dtype(), parameter.count(), parameter.value_data(), parameter.grad_data(), {}, entry.steps++};
      for (std::size_t slot = 0; slot < slots().size(); ++slot) next.state[slot] = state_data(entry, slot);
      parameter.touch();
      if (!continues(range, next)) {
        flush();
        range = next;
      } else {
        range.count += next.count;
      }
    }
    flush();
  }

 private:
  struct Entry {
    nn::NamedParameter<D> named;
    std::int64_t steps = 0;
    std::size_t state_begin = 0;  // bytes
  };

  void make_state() {
    if (made_) return;
    made_ = true;
    std::size_t bytes = 0;
    for (const DType type : {DType::f32, DType::f64})  // a dtype's state lies together, as its parameters do
      for (Entry& entry : entries_)
        if (entry.named.parameter->dtype() == type) {
          entry.state_begin = bytes;
          bytes += entry.named.parameter->size_bytes();
        }
    const MemoryScope scope(trace::Memory::optimizer);
    for (std::size_t slot = 0; slot < slots().size(); ++slot) {
      state_[slot] = Storage<D>(device(), bytes);
      zero_bytes(device(), state_[slot].data(), bytes);
    }
  }

  void* state_data(const Entry& entry, std::size_t slot) const {
    return static_cast<std::byte*>(state_[slot].data()) + entry.state_begin;
  }

  bool continues(const Range& range, const Range& next) const {
    const auto bytes = static_cast<std::size_t>(range.count) * size_of(range.dtype);
    const auto follows = [bytes](const void* first, const void* second) {
      return static_cast<const std::byte*>(first) + bytes == second;
    };
    bool all = range.count > 0 && range.dtype == next.dtype && range.steps == next.steps &&
               follows(range.value, next.value) && follows(range.grad, next.grad);
    for (std::size_t slot = 0; slot < slots().size(); ++slot) all = all && follows(range.state[slot], next.state[slot]);
    return all;
  }

  std::vector<Entry> entries_;
  std::array<Storage<D>, max_slots> state_;
  bool made_ = false;
};

}  // namespace chorus::inline CHORUS_ABI::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_OPTIMIZER_HPP

namespace chorus::inline CHORUS_ABI::optim {

struct AdagradOptions {
  double lr = 0.01, lr_decay = 0, eps = 1e-10, weight_decay = 0;
};

/// sum += g²; p -= lr / (1 + lr_decay t) g / (sqrt(sum) + eps), t being the number of steps before. Weight decay is
/// added to the gradient.
template <Device D>
class Adagrad final : public Optimizer<D> {
 public:
  /// Throws UsageError for negative options.
  explicit Adagrad(std::vector<nn::NamedParameter<D>> parameters, const AdagradOptions& options = {})
      : Optimizer<D>(std::move(parameters), options.lr), options_(options) {
    check<UsageError>(options.lr_decay >= 0 && options.eps >= 0 && options.weight_decay >= 0,
                      "Adagrad: lr_decay, eps and weight_decay are at least 0, got ", options.lr_decay, ", ",
                      options.eps, " and ", options.weight_decay);
  }

  void step() override {
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      kernels::adagrad_step(this->device(), range.count, static_cast<T*>(range.value),
                            static_cast<const T*>(range.grad), static_cast<T*>(range.state[0]),
                            kernels::AdagradScalars{.lr = this->lr(),
                                                    .lr_decay = options_.lr_decay,
                                                    .eps = options_.eps,
                                                    .weight_decay = options_.weight_decay,
                                                    .step = range.steps + 1});
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"sum"};
    return names;
  }

 private:
  AdagradOptions options_;
};

}  // namespace chorus::inline CHORUS_ABI::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_ADAGRAD_HPP

// <chorus/optim/adam.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_ADAM_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_ADAM_HPP
/// Adam (Kingma, Ba 2015), AMSGrad (Reddi et al. 2018) and AdamW (Loshchilov, Hutter 2019), as PyTorch computes them.

namespace chorus::inline CHORUS_ABI::optim {

struct AdamOptions {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool amsgrad = false;
};

/// m and v are decaying means of g and g²; p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps). Weight decay is
/// added to the gradient.
template <Device D>
class Adam : public Optimizer<D> {
 public:
  /// Throws UsageError for betas outside of [0, 1) and negative eps or weight_decay.
  explicit Adam(std::vector<nn::NamedParameter<D>> parameters, const AdamOptions& options = {})
      : Adam(std::move(parameters), options, false) {}

  void step() override {
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      kernels::adam_step(this->device(), range.count, static_cast<T*>(range.value), static_cast<const T*>(range.grad),
                         static_cast<T*>(range.state[0]), static_cast<T*>(range.state[1]), static_cast<T*>(range.state[2]),
                         kernels::AdamScalars{.lr = this->lr(),
                                              .beta1 = options_.beta1,
                                              .beta2 = options_.beta2,
                                              .eps = options_.eps,
                                              .weight_decay = options_.weight_decay,
                                              .decoupled = decoupled_,
                                              .step = range.steps + 1});
    });
  }

 protected:
  Adam(std::vector<nn::NamedParameter<D>> parameters, const AdamOptions& options, bool decoupled)
      : Optimizer<D>(std::move(parameters), options.lr), options_(options), decoupled_(decoupled) {
    check<UsageError>(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
                      "Adam: betas are in [0, 1), got ", options.beta1, " and ", options.beta2);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0, "Adam: eps and weight_decay are at least 0, got ",
                      options.eps, " and ", options.weight_decay);
  }

  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {names, options_.amsgrad ? std::size_t{3} : std::size_t{2}};
  }

 private:
  AdamOptions options_;
  bool decoupled_;
};

/// Adam whose weight decay shrinks the parameter itself: p -= lr weight_decay p.
template <Device D>
class AdamW final : public Adam<D> {
 public:
  explicit AdamW(std::vector<nn::NamedParameter<D>> parameters, AdamOptions options = {.weight_decay = 0.01})
      : Adam<D>(std::move(parameters), options, true) {}
};

}  // namespace chorus::inline CHORUS_ABI::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_ADAM_HPP

// <chorus/optim/clip.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_CLIP_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_CLIP_HPP
/// Gradient clipping.

namespace chorus::inline CHORUS_ABI::optim {

namespace detail {
template <Device D, class F>
void for_each_grad(const std::vector<nn::NamedParameter<D>>& parameters, const F& f) {
  for (const auto& named : parameters) {
    auto& parameter = *named.parameter;
    if (!parameter.grad_arrived()) continue;
    if (parameter.dtype() == DType::f32)
      f(parameter, static_cast<float*>(parameter.grad_data()));
    else
      f(parameter, static_cast<double*>(parameter.grad_data()));
  }
}
}  // namespace detail

/// Scales all gradients down so that their common Euclidean norm is at most `max_norm`; returns the norm before. Under
/// DistributedDataParallel to be called after backward, when all ranks hold the same gradients.
template <Device D>
double clip_grad_norm(const std::vector<nn::NamedParameter<D>>& parameters, double max_norm) {
  check<UsageError>(max_norm > 0, "clip_grad_norm: the largest norm must be positive, got ", max_norm);
  double squares = 0;
  detail::for_each_grad(parameters, [&](auto& parameter, auto* grad) {
    squares += kernels::square_sum(parameter.where(), parameter.count(), grad);
  });
  const double norm = std::sqrt(squares);
  const double factor = max_norm / (norm + 1e-6);
  if (factor < 1)
    detail::for_each_grad(parameters, [&]<class T>(auto& parameter, T* grad) {
      kernels::scale(parameter.where(), parameter.count(), static_cast<T>(factor), grad);
    });
  return norm;
}

}  // namespace chorus::inline CHORUS_ABI::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_CLIP_HPP

// <chorus/optim/rmsprop.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_RMSPROP_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_RMSPROP_HPP
/// RMSprop (Tieleman, Hinton 2012), as PyTorch computes it.

namespace chorus::inline CHORUS_ABI::optim {

struct RmsPropOptions {
  double lr = 0.01, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
};

/// v = alpha v + (1 - alpha) g²; p -= lr g / (sqrt(v) + eps), or along the momentum of that. Weight decay is added to
/// the gradient.
template <Device D>
class RmsProp final : public Optimizer<D> {
 public:
  /// Throws UsageError for alpha outside of [0, 1) and other negative options.
  explicit RmsProp(std::vector<nn::NamedParameter<D>> parameters, const RmsPropOptions& options = {})
      : Optimizer<D>(std::move(parameters), options.lr), options_(options) {
    check<UsageError>(options.alpha >= 0 && options.alpha < 1, "RmsProp: alpha is in [0, 1), got ", options.alpha);
    check<UsageError>(options.eps >= 0 && options.weight_decay >= 0 && options.momentum >= 0,
                      "RmsProp: eps, weight_decay and momentum are at least 0, got ", options.eps, ", ",
                      options.weight_decay, " and ", options.momentum);
  }

  void step() override {
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      kernels::rms_prop_step(this->device(), range.count, static_cast<T*>(range.value),
                             static_cast<const T*>(range.grad), static_cast<T*>(range.state[0]),
                             static_cast<T*>(range.state[1]),
                             kernels::RmsPropScalars{.lr = this->lr(),
                                                     .alpha = options_.alpha,
                                                     .eps = options_.eps,
                                                     .weight_decay = options_.weight_decay,
                                                     .momentum = options_.momentum});
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"square_avg", "momentum"};
    return {names, options_.momentum > 0 ? std::size_t{2} : std::size_t{1}};
  }

 private:
  RmsPropOptions options_;
};

}  // namespace chorus::inline CHORUS_ABI::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_RMSPROP_HPP

// <chorus/optim/schedules.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_SCHEDULES_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_SCHEDULES_HPP
/// Learning rates that change with the epoch, as closed formulas of it, so that a resumed run sets the same rate.

namespace chorus::inline CHORUS_ABI::optim {

/// A schedule gives the rate of an epoch from the rate at the start; `step` moves the optimizer to the next epoch. What
/// counts as an epoch is up to the caller: OneCycle is usually stepped after each batch.
template <class Formula>
class Schedule {
 public:
  /// Throws UsageError where the formula's options make no sense.
  Schedule(HasLearningRate& optimizer, Formula formula)
      : optimizer_(optimizer), formula_(std::move(formula)), start_(optimizer.lr()) {
    set_epoch(0);
  }
  double rate(int epoch) const { return formula_(start_, epoch); }
  int epoch() const { return epoch_; }
  void step() { set_epoch(epoch_ + 1); }
  /// Throws UsageError for a negative epoch.
  void set_epoch(int epoch) {
    check<UsageError>(epoch >= 0, "schedule: epochs are counted from 0, got ", epoch);
    optimizer_.set_lr(rate(epoch));
    epoch_ = epoch;
  }

 private:
  HasLearningRate& optimizer_;
  Formula formula_;
  double start_;
  int epoch_ = 0;
};

/// Multiplied by `gamma` every `step_size` epochs.
struct StepDecay {
  int step_size = 30;
  double gamma = 0.1;
  double operator()(double start, int epoch) const {
    check<UsageError>(step_size > 0, "StepDecay: step_size is at least 1, got ", step_size);
    return start * std::pow(gamma, epoch / step_size);
  }
};

/// Multiplied by `gamma` at each milestone.
struct MultiStepDecay {
  std::vector<int> milestones;
  double gamma = 0.1;
  double operator()(double start, int epoch) const {
    const auto passed = std::count_if(milestones.begin(), milestones.end(), [epoch](int at) { return at <= epoch; });
    return start * std::pow(gamma, passed);
  }
};

/// Multiplied by `gamma` every epoch.
struct ExponentialDecay {
  double gamma = 0.95;
  double operator()(double start, int epoch) const { return start * std::pow(gamma, epoch); }
};

/// The rate times a factor that goes in a straight line from `start_factor` to `end_factor` in `total` epochs and stays
/// there: a warm-up.
struct LinearRamp {
  double start_factor = 1.0 / 3, end_factor = 1;
  int total = 5;
  double operator()(double start, int epoch) const {
    check<UsageError>(total > 0, "LinearRamp: total is at least 1, got ", total);
    const double done = static_cast<double>(std::min(epoch, total)) / total;
    return start * (start_factor + (end_factor - start_factor) * done);
  }
};

/// Half a cosine from the start to `eta_min` in `t_max` epochs (SGDR, Loshchilov, Hutter 2017, without restarts), and
/// on along the cosine after that, as in PyTorch.
struct CosineAnnealing {
  int t_max = 10;
  double eta_min = 0;
  double operator()(double start, int epoch) const {
    check<UsageError>(t_max > 0, "CosineAnnealing: t_max is at least 1, got ", t_max);
    return eta_min + (start - eta_min) * (1 + std::cos(std::numbers::pi * epoch / t_max)) / 2;
  }
};

/// From max_lr / div_factor up to max_lr in the first `pct_start` of `total` steps, then down to the first rate /
/// final_div_factor, both along half a cosine (Smith, Topin 2017, as in PyTorch, without its cycling of the momentum).
/// The optimizer's own rate has no influence; after the last step the rate stays.
struct OneCycle {
  double max_lr = 0.1;
  int total = 100;
  double pct_start = 0.3, div_factor = 25, final_div_factor = 1e4;
  double operator()(double, int step) const {
    check<UsageError>(total > 1 && pct_start >= 0 && pct_start <= 1 && div_factor > 0 && final_div_factor > 0,
                      "OneCycle: expected total above 1, pct_start in [0, 1] and positive factors, got ", total, ", ",
                      pct_start, ", ", div_factor, " and ", final_div_factor);
    const auto along_cosine = [](double from, double to, double done) {
      return to + (from - to) * (1 + std::cos(std::numbers::pi * done)) / 2;
    };
    const double first = max_lr / div_factor, last = total - 1, top = pct_start * total - 1,
                 at = std::min<double>(step, last);
    if (at <= top && top > 0) return along_cosine(first, max_lr, at / top);
    return along_cosine(max_lr, first / final_div_factor, (at - top) / (last - top));
  }
};

}  // namespace chorus::inline CHORUS_ABI::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_SCHEDULES_HPP

// <chorus/optim/sgd.hpp>
#ifndef CHORUS_SINGLE_CHORUS_OPTIM_SGD_HPP
#define CHORUS_SINGLE_CHORUS_OPTIM_SGD_HPP
/// Stochastic gradient descent with momentum, as PyTorch computes it.

namespace chorus::inline CHORUS_ABI::optim {

struct SgdOptions {
  double lr = 0.01, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
};

/// g += weight_decay p; m = momentum m + (1 - dampening) g (at first m = g); g = m, or g + momentum m for Nesterov;
/// p -= lr g.
template <Device D>
class Sgd final : public Optimizer<D> {
 public:
  /// Throws UsageError for negative options, and for Nesterov without momentum or with dampening.
  explicit Sgd(std::vector<nn::NamedParameter<D>> parameters, const SgdOptions& options = {})
      : Optimizer<D>(std::move(parameters), options.lr), options_(options) {
    check<UsageError>(options.momentum >= 0 && options.weight_decay >= 0,
                      "Sgd: momentum and weight_decay are at least 0, got ", options.momentum, " and ", options.weight_decay);
    check<UsageError>(!options.nesterov || (options.momentum > 0 && options.dampening == 0),
                      "Sgd: Nesterov needs momentum above 0 and no dampening");
  }

  void step() override {
    this->for_each_range([&]<class T>(T, const typename Optimizer<D>::Range& range) {
      kernels::sgd_step(this->device(), range.count, static_cast<T*>(range.value), static_cast<const T*>(range.grad),
                        static_cast<T*>(range.state[0]),
                        kernels::SgdScalars{.lr = this->lr(),
                                            .momentum = options_.momentum,
                                            .dampening = options_.dampening,
                                            .weight_decay = options_.weight_decay,
                                            .nesterov = options_.nesterov,
                                            .first_step = range.steps == 0});
    });
  }

 protected:
  std::span<const std::string_view> slots() const override {
    static constexpr std::string_view names[] = {"momentum"};
    return {names, options_.momentum > 0 ? std::size_t{1} : std::size_t{0}};
  }

 private:
  SgdOptions options_;
};

}  // namespace chorus::inline CHORUS_ABI::optim
#endif  // CHORUS_SINGLE_CHORUS_OPTIM_SGD_HPP

// <chorus/parallel/data_parallel.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_DATA_PARALLEL_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_DATA_PARALLEL_HPP
/// DataParallel: one process, several devices. The batch is scattered, copies of the model run on all devices at once, the
/// outputs are gathered, and in backward the gradients are summed to the first device, where the optimizer steps.

// <chorus/parallel/device_threads.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_DEVICE_THREADS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_DEVICE_THREADS_HPP
/// One thread per device of a process, kept from step to step.

namespace chorus::inline CHORUS_ABI {

/// Runs a task for several devices at once. The calling thread serves device 0.
class DeviceThreads {
 public:
  explicit DeviceThreads(std::size_t devices) : errors_(devices), workers_(devices > 0 ? devices - 1 : 0) {
    for (std::size_t i = 0; i < workers_.size(); ++i)
      workers_[i].thread = std::thread([this, i] { serve(workers_[i], i + 1); });
  }
  ~DeviceThreads() {
    for (auto& worker : workers_) give(worker, Order::stop);
    for (auto& worker : workers_) worker.thread.join();
  }
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// Calls `task(i)` for devices 0 to `count` - 1, each on its own thread, and returns when all have ended. What they threw
  /// is in the result, by device.
  const std::vector<std::exception_ptr>& run(std::size_t count, const std::function<void(std::size_t)>& task) {
    errors_.assign(errors_.size(), nullptr);
    task_ = &task;
    for (std::size_t i = 1; i < count; ++i) give(workers_[i - 1], Order::work);
    attempt(0);
    for (std::size_t i = 1; i < count; ++i) {
      auto& worker = workers_[i - 1];
      while (worker.order.load(std::memory_order_acquire) != Order::none) worker.order.wait(Order::work);
    }
    return errors_;
  }

 private:
  enum class Order : int { none, work, stop };
  struct Worker {
    std::thread thread;
    std::atomic<Order> order{Order::none};
  };

  static void give(Worker& worker, Order order) {
    worker.order.store(order, std::memory_order_release);
    worker.order.notify_one();
  }

  void attempt(std::size_t device) noexcept {
    try {
      (*task_)(device);
    } catch (...) {
      errors_[device] = std::current_exception();
    }
  }

  void serve(Worker& worker, std::size_t device) {
    for (;;) {
      worker.order.wait(Order::none, std::memory_order_acquire);
      if (worker.order.load(std::memory_order_acquire) == Order::stop) return;
      attempt(device);
      worker.order.store(Order::none, std::memory_order_release);
      worker.order.notify_one();
    }
  }

  const std::function<void(std::size_t)>* task_ = nullptr;
  std::vector<std::exception_ptr> errors_;
  std::vector<Worker> workers_;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_DEVICE_THREADS_HPP

// <chorus/parallel/policy.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_POLICY_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_POLICY_HPP
/// What all policies share: the model, its flat parameters, its samples and its random numbers.

namespace chorus::inline CHORUS_ABI {

/// Base of SingleDevice, DataParallel and DistributedDataParallel.
template <class Model>
class Policy {
 public:
  using model_type = Model;
  using device_type = typename Model::device_type;
  static_assert(!std::is_void_v<device_type>, "a policy needs a model with parameters");

  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  /// The model itself: the one that is trained, saved and loaded. Its parameters have the same names under every policy.
  Model& module() { return model_; }
  const Model& module() const { return model_; }
  /// All parameters, for an optimizer.
  std::vector<nn::NamedParameter<device_type>> parameters() const { return flat_.parameters(); }
  const nn::FlatParameters<device_type>& flat_parameters() const { return flat_; }

  void train(bool training = true) { model_.train(training); }
  void eval() { model_.eval(); }
  bool training() const { return model_.training(); }

  std::uint64_t seed() const { return random_.seed; }
  /// Forward passes in training so far; random operations depend on it, so a checkpoint keeps it.
  std::uint32_t forward_passes() const { return random_.step; }
  void set_forward_passes(std::uint32_t passes) { random_.step = passes; }

  /// The layout of the flat buffers, by parameters' names. Sums over three and more ranks may be rounded in an order that
  /// depends on it, so a checkpoint keeps it.
  std::vector<std::string> parameter_order() const {
    std::vector<std::string> names;
    for (const auto& entry : flat_.entries()) names.push_back(entry.named.name);
    return names;
  }

 protected:
  Policy(Model model, std::uint64_t seed) : model_(std::move(model)), flat_(model_) { random_.seed = seed; }

  /// The random context of the forward pass that begins.
  RandomContext& begin_forward() {
    random_.next_operation = 0;
    return random_;
  }
  void end_forward() {
    if (model_.training()) ++random_.step;
  }

  Model model_;
  nn::FlatParameters<device_type> flat_;
  RandomContext random_;
};

struct SamplingOptions {
  bool shuffle = true;
  /// Repeat samples so that all shares of a batch have one size, as PyTorch's DistributedSampler does.
  bool padding = false;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_POLICY_HPP

// <chorus/parallel/replicas.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_REPLICAS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_REPLICAS_HPP
/// Copies of a model on several devices, for DataParallel.

namespace chorus::inline CHORUS_ABI::detail {

/// Gives every handle of a model a copy of its parameter or buffer on `device`; what was shared stays shared.
template <Device D>
class Relocate final : public nn::detail::Walker {
 public:
  explicit Relocate(D device) : device_(device) {}
  void parameter(std::string_view, AnyParameter& handle) override { replace(handle, handle.on<D>()); }
  void buffer(std::string_view, AnyBuffer& handle) override { replace(handle, handle.on<D>()); }

 private:
  template <class Handle, class Interface>
  void replace(Handle& handle, const Interface& original) {
    auto& copy = copies_[handle.shared().get()];
    if (!copy) copy = original.copy_to(device_);
    handle.replace(copy);
  }
  D device_;
  std::map<const Node*, Ref<Node>> copies_;
};

/// The model with all its numbers on `device`.
template <class Model, Device D>
Model copy_to(Model model, D device) {
  Relocate<D> relocate(device);
  relocate.walk(model);
  return model;
}

/// Gives every module of `to` the training flag that its counterpart in `from` has.
inline void copy_training_flags(nn::Module& from, nn::Module& to) {
  struct Read final : nn::detail::Walker {
    std::vector<bool> flags;
    void enter(nn::Module& module) override { flags.push_back(module.training()); }
  } read;
  struct Write final : nn::detail::Walker {
    const std::vector<bool>* flags = nullptr;
    std::size_t next = 0;
    void enter(nn::Module& module) override { module.set_own_training((*flags)[next++]); }
  } write;
  read.walk(from);
  write.flags = &read.flags;
  write.walk(to);
  to.set_own_training(from.training());
}

/// A model's copy on one device, kept from step to step, that follows the original.
template <class Model>
class Replica {
 public:
  using D = typename Model::device_type;
  using Flat = nn::FlatParameters<D>;

  Replica(const Model& original, D device)
      : model_(copy_to(original, device)), flat_(model_), buffers_(nn::named_buffers<D>(model_)), device_(device) {
    seen_.resize(flat_.entries().size());
  }
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  Model& model() { return model_; }
  const Flat& flat() const { return flat_; }
  D device() const { return device_; }
  RandomContext& random() { return random_; }

  /// Fetches the parameters that have changed since the last call, all buffers, and nothing else; freezes what is frozen.
  void follow(const Flat& original, const std::vector<nn::NamedBuffer<D>>& buffers, D source) {
    const auto& entries = original.entries();
    for (std::size_t i = 0; i < entries.size(); ++i)
      flat_.entries()[i].parameter().set_wants_grad(entries[i].parameter().wants_grad());
    for (std::size_t i = 0; i < entries.size();) {
      std::size_t last = i, count = 0;  // a run of neighbours that have changed
      while (last < entries.size() && entries[last].group == entries[i].group &&
             entries[last].begin == entries[i].begin + count && seen_[last] != entries[last].parameter().version()) {
        seen_[last] = entries[last].parameter().version();
        count += entries[last++].count;
      }
      if (last == i) {
        ++i;
        continue;
      }
      const auto& from = original.groups()[entries[i].group];
      const std::size_t bytes = count * size_of(from.dtype);
      copy_bytes(device_, flat_.groups()[entries[i].group].value(entries[i].begin), source, from.value(entries[i].begin), bytes);
      trace::sent(source.index, trace::Traffic::parameters, bytes);
      i = last;
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const auto& from = *buffers[i].buffer;
      copy_bytes(device_, buffers_[i].buffer->data(), source, from.data(), from.size_bytes());
      trace::sent(source.index, trace::Traffic::buffers, from.size_bytes());
    }
  }

 private:
  Model model_;
  Flat flat_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  D device_;
  RandomContext random_;
  std::vector<std::uint64_t> seen_;  // versions of the original's parameters
};

}  // namespace chorus::inline CHORUS_ABI::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_REPLICAS_HPP

// <chorus/parallel/scatter_gather.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SCATTER_GATHER_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SCATTER_GATHER_HPP
/// Cutting a batch into shares for several devices, and joining what comes back, in both directions of the tape.

namespace chorus::inline CHORUS_ABI::detail {

/// Where share `i` of `shares` begins among `count` samples: sizes differ by at most one, the first ones are larger.
constexpr Index share_begin(Index count, std::size_t shares, std::size_t i) {
  const auto n = static_cast<Index>(shares), at = static_cast<Index>(i);
  return at * (count / n) + std::min(at, count % n);
}

/// A dense copy of `x` on `device`; `x` itself where it is one already.
template <Scalar T, int Rank, Device D>
Tensor<T, Rank, D> on_device(const Tensor<T, Rank, D>& x, D device, trace::Traffic traffic) {
  const auto dense = contiguous(x);
  if (dense.device() == device) return dense;
  auto out = Tensor<T, Rank, D>::empty(dense.shape(), device);
  copy_bytes(device, out.data(), dense.device(), dense.data(), dense.bytes());
  trace::sent(dense.device().index, traffic, dense.bytes());
  return out;
}

/// Whether an argument is cut up: a Tensor or Variable that has the axis. Others go to every replica as they are.
template <class X>
bool is_scattered(const X& x, int dim) {
  if constexpr (Operand<X>)
    return dim < static_cast<int>(value_of(x).shape().size());
  else
    return false;
}

/// The size that all scattered arguments have along `dim`; 1 where there are none. Throws ShapeError where they differ.
template <class... Inputs>
Index batch_size(int dim, const Inputs&... inputs) {
  Index batch = -1;
  const auto look = [&](const auto& x) {
    if constexpr (Operand<decltype(x)>) {
      if (!is_scattered(x, dim)) return;
      const Index size = value_of(x).size(dim);
      check<ShapeError>(batch == -1 || batch == size, "DataParallel: inputs have ", batch, " and ", size,
                        " samples along axis ", dim);
      batch = size;
    }
  };
  (look(inputs), ...);
  return batch == -1 ? 1 : batch;
}

/// Share `i` of an argument, on `device`. A Variable that wants a gradient becomes a leaf, whose gradient goes back later.
template <class X, Device D>
decltype(auto) scatter(const X& x, int dim, std::size_t shares, std::size_t i, D device) {
  if constexpr (!Operand<X>) {
    return x;  // by reference
  } else {
    const auto share = [&] {
      const auto& whole = value_of(x);
      if (!is_scattered(x, dim)) return on_device(whole, device, trace::Traffic::inputs);
      const Index size = whole.size(dim);
      return on_device(whole.slice(dim, share_begin(size, shares, i), share_begin(size, shares, i + 1)), device,
                       trace::Traffic::inputs);
    }();
    if constexpr (AnyTensor<X>)
      return share;
    else
      return Variable(share, static_cast<bool>(node_of(x)) && grad_enabled());
  }
}

/// Stands on the tape for everything that ran on the replicas: gathered outputs leave their gradients' shares with the
/// replicas' outputs, then this node runs backward on all replicas.
class ReplicaBackward final : public Node {
 public:
  using Roots = std::vector<std::vector<Ref<Node>>>;

  explicit ReplicaBackward(std::size_t replicas) : Node("data_parallel"), roots(replicas) {}

  void backward(bool keep) override {
    run(roots, keep);
    for (auto& list : roots) list.clear();
    for (const auto& give_back : gradient_returns) give_back();
    if (!keep) {
      gradient_returns.clear();
      inputs.clear();
    }
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    for (const auto& input : inputs) visit(*input, context);
  }

  Roots roots;                                              // of each replica, the outputs that have a gradient
  std::function<void(const Roots&, bool keep)> run;         // backward on all replicas
  std::vector<std::function<void()>> gradient_returns;      // from the replicas' inputs to the inputs
  std::vector<Ref<Node>> inputs;
};

/// Hands the gradients by the replicas' shares of an input back to the input.
template <class X, class Share>
void return_gradient(const X& x, int dim, std::vector<Share> shares, ReplicaBackward& backward) {
  if constexpr (AnyVariable<X>) {
    const auto node = node_of(x);
    if (!node || !grad_enabled()) return;
    backward.inputs.push_back(node);
    backward.gradient_returns.push_back([node, dim, shares = std::move(shares), cut = is_scattered(x, dim)] {
      const auto whole = around_axis(node->shape(), cut ? static_cast<std::size_t>(dim) : 0);
      for (std::size_t i = 0; i < shares.size(); ++i) {
        if (!shares[i].grad().defined()) continue;
        const auto part = on_device(shares[i].grad(), node->device(), trace::Traffic::inputs);
        shares[i].zero_grad();
        if (!cut) {
          node->add(part);
          continue;
        }
        const bool fresh = !node->has_grad();
        const auto target = node->target();
        if (fresh) zero_bytes(node->device(), target.data(), target.grad.bytes());
        kernels::put_block(node->device(), whole, share_begin(whole.axis, shares.size(), i), part.size(dim), part.data(),
                           target.data(), true);
      }
    });
  }
}

/// A gathered output's node.
template <Real T, int Rank, int PartRank, Device D>
class GatherNode final : public GradNode<T, Rank, D> {
 public:
  GatherNode(const Tensor<T, Rank, D>& value, int dim, std::vector<Variable<T, PartRank, D>> parts, Ref<ReplicaBackward> backward)
      : GradNode<T, Rank, D>("gather", value.shape(), value.device()),
        dim_(dim),
        parts_(std::move(parts)),
        backward_(std::move(backward)) {}

  void backward(bool) override {
    if (!this->has_grad()) return;
    const auto grad = this->take_grad();
    Index begin = 0;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const auto& part = parts_[i];
      const auto share = [&] {
        if constexpr (PartRank == 0) {
          return grad.select(0, static_cast<Index>(i));
        } else {
          const Index first = std::exchange(begin, begin + part.size(dim_));
          return grad.slice(dim_, first, begin);
        }
      }();
      if (!part.requires_grad()) continue;
      part.node()->add(on_device(share, part.device(), trace::Traffic::outputs));
      backward_->roots[i].push_back(part.node());
    }
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override { visit(*backward_, context); }

 private:
  int dim_;
  std::vector<Variable<T, PartRank, D>> parts_;
  Ref<ReplicaBackward> backward_;
};

/// Joins tensors of several devices along `dim` on one of them; scalars become a vector.
template <Scalar T, int Rank, Device D>
auto gather_tensors(const std::vector<Tensor<T, Rank, D>>& parts, int dim, D device) {
  if constexpr (Rank == 0) {
    auto out = Tensor<T, 1, D>::empty({static_cast<Index>(parts.size())}, device);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      copy_bytes(device, out.data() + i, parts[i].device(), parts[i].data(), sizeof(T));
      if (parts[i].device() != device) trace::sent(parts[i].device().index, trace::Traffic::outputs, sizeof(T));
    }
    return out;
  } else {
    if (parts.size() == 1) return on_device(parts.front(), device, trace::Traffic::outputs);
    const auto axis = normalize_axis("DataParallel", dim, Rank);
    auto shape = parts.front().shape();
    for (std::size_t i = 1; i < parts.size(); ++i) {
      auto expected = parts.front().shape();
      expected[axis] = parts[i].shape()[axis];
      check<ShapeError>(parts[i].shape() == expected, "DataParallel: replica ", i, "'s output of shape ", parts[i].shape(),
                        " can't be joined to replica 0's of shape ", parts.front().shape(), " along axis ", dim);
      shape[axis] += expected[axis];
    }
    auto out = Tensor<T, Rank, D>::empty(shape, device);
    const auto whole = around_axis(shape, axis);
    Index begin = 0;
    for (const auto& part : parts) {
      const auto dense = contiguous(part);
      const Index row = part.shape()[axis] * whole.inner;
      for (Index o = 0; o < whole.outer; ++o)
        copy_bytes(device, out.data() + (o * whole.axis + begin) * whole.inner, dense.device(), dense.data() + o * row,
                   static_cast<std::size_t>(row) * sizeof(T));
      if (dense.device() != device) trace::sent(dense.device().index, trace::Traffic::outputs, dense.bytes());
      begin += part.shape()[axis];
    }
    return out;
  }
}

template <Scalar T, int Rank, Device D>
auto gather(const std::vector<Tensor<T, Rank, D>>& parts, int dim, D device, const Ref<ReplicaBackward>&) {
  return gather_tensors(parts, dim, device);
}

template <Real T, int Rank, Device D>
auto gather(const std::vector<Variable<T, Rank, D>>& parts, int dim, D device, const Ref<ReplicaBackward>& backward) {
  std::vector<Tensor<T, Rank, D>> values;
  bool wanted = false;
  for (const auto& part : parts) {
    values.push_back(part.value());
    wanted = wanted || part.requires_grad();
  }
  auto value = gather_tensors(values, dim, device);
  constexpr int rank = decltype(value)::rank;
  if (!wanted) return Variable<T, rank, D>(std::move(value));
  Ref<GradNode<T, rank, D>> node(new GatherNode<T, rank, Rank, D>(value, dim, parts, backward));
  return Variable<T, rank, D>(std::move(value), std::move(node));
}

/// Tuples are gathered member by member.
template <class... Members, Device D>
auto gather(const std::vector<std::tuple<Members...>>& parts, int dim, D device, const Ref<ReplicaBackward>& backward) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto member = [&]<std::size_t At>(std::integral_constant<std::size_t, At>) {
      std::vector<std::tuple_element_t<At, std::tuple<Members...>>> list;
      for (const auto& part : parts) list.push_back(std::get<At>(part));
      return gather(list, dim, device, backward);
    };
    return std::tuple(member(std::integral_constant<std::size_t, I>{})...);
  }(std::index_sequence_for<Members...>{});
}

}  // namespace chorus::inline CHORUS_ABI::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SCATTER_GATHER_HPP

namespace chorus::inline CHORUS_ABI {

struct DataParallelOptions {
  /// Indices of the devices. The first holds the model. One may be named twice: two copies then share it.
  std::vector<int> device_ids;
  /// Index of the device on which outputs are gathered; -1: the first of `device_ids`.
  int output_device = -1;
  /// The axis along which inputs are cut and outputs are joined.
  int dim = 0;
};

/// Keeps a copy of the model on each device from step to step; each forward pass sends it the parameters that have changed.
/// What a copy writes into its buffers is lost, but for the first device's. Must outlive the losses made through it.
template <class Model>
class DataParallel : public Policy<Model> {
 public:
  using D = typename Model::device_type;
  static constexpr bool distributed = false;
  static constexpr const char* name = "dp";

  /// Throws UsageError without devices, DeviceError for one that doesn't exist.
  DataParallel(Model model, DataParallelOptions options, std::uint64_t seed = initial_seed())
      : Policy<Model>(detail::copy_to(std::move(model), first_device(options)), seed),
        options_(std::move(options)),
        buffers_(nn::named_buffers<D>(this->model_)),
        threads_(options_.device_ids.size()) {
    if (options_.output_device < 0) options_.output_device = options_.device_ids.front();
    CachingAllocator<D>::of(D{options_.output_device});  // throws where it doesn't exist
    check<UsageError>(options_.dim >= 0, "DataParallel: dim is at least 0, got ", options_.dim);
    for (std::size_t i = 1; i < options_.device_ids.size(); ++i)
      replicas_.push_back(std::make_unique<detail::Replica<Model>>(this->model_, device(i)));
  }
  /// For `launch`: as many devices as `run` says.
  template <class Run>
    requires requires(Run& run) { run.seed(); }
  DataParallel(Model model, Run& run) : DataParallel(std::move(model), {.device_ids = first_indices(run.devices())}, run.seed()) {}

  /// The model's output for the whole batch, on the output device; scalars become a vector with one element a device.
  /// Tensors and Variables are cut along `dim` into shares that differ by at most one, on no more devices than there are
  /// samples; other arguments go to every copy as they are. What a copy throws is thrown again, of the same kind, with the
  /// copy's number and device in the message.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const auto& random = this->begin_forward();
    const Index batch = detail::batch_size(options_.dim, inputs...);
    const auto used = static_cast<std::size_t>(std::clamp<Index>(batch, 1, devices()));
    const bool grad = grad_enabled();
    using Shares = decltype(scatter(0, 1, inputs...));
    using Output = decltype(std::apply([&](const auto&... own) { return this->model_.forward(own...); }, std::declval<Shares&>()));
    std::vector<std::optional<Shares>> shares(used);
    std::vector<std::optional<Output>> outputs(used);
    const auto update_copy = [&](std::size_t i) {
      if (i > 0) replicas_[i - 1]->follow(this->flat_, buffers_, device(0));
    };
    // The first device's forward pass may write into the buffers: all others have copied them before.
    if (!buffers_.empty()) run(used, update_copy);
    run(used, [&](std::size_t i) {
      const GradMode mode(grad);
      RandomContext context{random.seed, random.step, 0, [first = detail::share_begin(batch, used, i)] { return first; }};
      const RandomScope scope(context);
      shares[i].emplace(scatter(i, used, inputs...));
      if (buffers_.empty()) update_copy(i);
      Model& model = i == 0 ? this->model_ : replicas_[i - 1]->model();
      if (i > 0) detail::copy_training_flags(this->model_, model);
      outputs[i].emplace(std::apply([&](const auto&... own) { return model.forward(own...); }, *shares[i]));
    });
    this->end_forward();
    return gather(outputs, shares, std::index_sequence_for<Inputs...>{}, inputs...);
  }

  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(dataset.size(), {.shuffle = options.shuffle, .seed = this->seed(), .padding = options.padding});
  }
  int devices() const { return static_cast<int>(options_.device_ids.size()); }
  const DataParallelOptions& options() const { return options_; }

  /// `value`, the mean over this process's `samples`, as the mean over the samples of all processes.
  double mean(double value, Index) const { return value; }
  /// Sums over all processes, in place.
  void sum(std::span<double>) const {}
  /// Whether `text` is the same in all processes.
  bool same_on_all_ranks(std::string_view) const { return true; }

 private:
  static D first_device(const DataParallelOptions& options) {
    check<UsageError>(!options.device_ids.empty(), "DataParallel: device_ids is empty: expected at least one device");
    return D{options.device_ids.front()};
  }
  static std::vector<int> first_indices(int count) {
    std::vector<int> indices;
    for (int i = 0; i < count; ++i) indices.push_back(i);
    return indices;
  }
  D device(std::size_t i) const { return D{options_.device_ids[i]}; }

  // Runs a task on the first `used` devices' threads; throws what one of them threw.
  template <class Task>
  void run(std::size_t used, const Task& task) {
    const auto& errors = threads_.run(used, task);
    for (std::size_t i = 0; i < used; ++i)
      if (errors[i]) rethrow_with(errors[i], cat("DataParallel: replica ", i, " on device ", device(i), ": "));
  }

  template <class... Inputs>
  auto scatter(std::size_t i, std::size_t used, const Inputs&... inputs) const {
    return std::tuple<decltype(detail::scatter(inputs, 0, used, i, D{}))...>(
        detail::scatter(inputs, options_.dim, used, i, device(i))...);
  }

  template <class Outputs, class Shares, std::size_t... I, class... Inputs>
  auto gather(const Outputs& outputs, const Shares& shares, std::index_sequence<I...>, const Inputs&... inputs) {
    using Output = typename Outputs::value_type::value_type;
    std::vector<Output> parts;
    for (const auto& output : outputs) parts.push_back(*output);
    Ref<detail::ReplicaBackward> backward(new detail::ReplicaBackward(parts.size()));
    backward->run = [this](const auto& roots, bool keep) { backward_on_replicas(roots, keep); };
    const auto share = [&]<std::size_t At>(std::integral_constant<std::size_t, At>, const auto& input) {
      std::vector<std::remove_cvref_t<std::tuple_element_t<At, typename Shares::value_type::value_type>>> list;
      if constexpr (AnyVariable<decltype(input)>)
        for (const auto& own : shares) list.push_back(std::get<At>(*own));
      detail::return_gradient(input, options_.dim, std::move(list), *backward);
    };
    (share(std::integral_constant<std::size_t, I>{}, inputs), ...);
    return detail::gather(parts, options_.dim, D{options_.output_device}, backward);
  }

  void backward_on_replicas(const detail::ReplicaBackward::Roots& roots, bool keep) {
    // A backward pass that failed may have left gradients on the copies.
    for (std::size_t r = 1; r < roots.size(); ++r)
      for (const auto& entry : replicas_[r - 1]->flat().entries()) entry.parameter().set_grad_arrived(false);
    run(roots.size(), [&](std::size_t i) { run_backward(roots[i], {.retain_graph = keep, .hooks = false}); });
    reduce_gradients(roots.size());
    // Hooks wait until the gradients of all devices are in, and of all forward passes behind the loss.
    if (!hooks_due_.expired()) return;
    const auto due = std::make_shared<bool>();
    hooks_due_ = due;
    at_backward_end([this, due] {
      for (const auto& entry : this->flat_.entries())
        if (entry.parameter().grad_arrived()) entry.named.handle.shared()->gradient_is_final();
    });
  }

  // Adds the copies' gradients, copy by copy, to the first device's. Each device's thread does a part of the elements.
  void reduce_gradients(std::size_t used) {
    struct Piece {
      const detail::Replica<Model>* replica;
      std::size_t group, begin, count;
      bool add;
    };
    std::vector<Piece> pieces;
    const auto& entries = this->flat_.entries();
    for (std::size_t r = 1; r < used; ++r) {
      auto& replica = *replicas_[r - 1];
      for (std::size_t e = 0; e < entries.size(); ++e) {
        if (!replica.flat().entries()[e].parameter().grad_arrived()) continue;
        auto& to = entries[e].parameter();
        const bool add = to.grad_arrived();
        to.set_grad_arrived(true);
        trace::sent(device(r).index, trace::Traffic::gradients, to.size_bytes());
        if (!pieces.empty() && pieces.back().replica == &replica && pieces.back().group == entries[e].group &&
            pieces.back().add == add && pieces.back().begin + pieces.back().count == entries[e].begin)
          pieces.back().count += entries[e].count;
        else
          pieces.push_back({&replica, entries[e].group, entries[e].begin, entries[e].count, add});
      }
    }
    if (pieces.empty()) return;
    run(used, [&](std::size_t i) {
      for (const Piece& piece : pieces) {
        const auto count = static_cast<Index>(piece.count);
        const auto first = detail::share_begin(count, used, i), last = detail::share_begin(count, used, i + 1);
        const auto at = piece.begin + static_cast<std::size_t>(first);
        const auto& group = this->flat_.groups()[piece.group];
        const std::byte* from = piece.replica->flat().groups()[piece.group].grad(at);
        if (!piece.add)
          copy_bytes(device(0), group.grad(at), piece.replica->device(), from, static_cast<std::size_t>(last - first) * size_of(group.dtype));
        else if (group.dtype == DType::f32)
          kernels::axpy(device(0), last - first, 1.0f, reinterpret_cast<const float*>(from), reinterpret_cast<float*>(group.grad(at)));
        else
          kernels::axpy(device(0), last - first, 1.0, reinterpret_cast<const double*>(from), reinterpret_cast<double*>(group.grad(at)));
      }
    });
  }

  DataParallelOptions options_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  std::vector<std::unique_ptr<detail::Replica<Model>>> replicas_;  // number 0 is the model itself
  DeviceThreads threads_;
  std::weak_ptr<bool> hooks_due_;  // alive during a backward pass at whose end the hooks will run
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_DATA_PARALLEL_HPP

// <chorus/parallel/distributed_data_parallel.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_DISTRIBUTED_DATA_PARALLEL_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_DISTRIBUTED_DATA_PARALLEL_HPP
/// DistributedDataParallel: one process per device. Every rank holds the whole model and computes on its share of the batch;
/// while backward runs, gradients are averaged over all ranks, bucket by bucket, so that all take the same step.

// <chorus/comm/communicator.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_COMMUNICATOR_HPP
#define CHORUS_SINGLE_CHORUS_COMM_COMMUNICATOR_HPP
/// What a communicator offers: collectives over a group of ranks, blocking and asynchronous.

// <chorus/comm/work.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_WORK_HPP
#define CHORUS_SINGLE_CHORUS_COMM_WORK_HPP
/// `Work`: the handle of a collective that runs in the background.

namespace chorus::inline CHORUS_ABI::comm {

/// What a communicator keeps of its asynchronous collectives. They finish in the order in which they were called, so
/// that a number, the ticket, is enough to name one: no allocation per call.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void wait(std::uint64_t ticket) = 0;  ///< returns when it has finished, throws what it threw
  virtual bool done(std::uint64_t ticket) = 0;  ///< whether it has finished or failed
};

/// An asynchronous collective. Its buffers must stay alive and untouched until `wait` returns or `done` is true; so the
/// destructor waits too, at most as long as the communicator's timeout lets the collective run, and drops its error.
class Work {
 public:
  Work() = default;
  Work(std::shared_ptr<Progress> progress, std::uint64_t ticket) : progress_(std::move(progress)), ticket_(ticket) {}
  Work(Work&& other) noexcept : progress_(std::move(other.progress_)), ticket_(other.ticket_) {}
  Work& operator=(Work&& other) noexcept {
    if (this == &other) return *this;
    finish();
    progress_ = std::move(other.progress_);
    ticket_ = other.ticket_;
    return *this;
  }
  ~Work() { finish(); }

  /// Returns when the collective has finished. Throws CommError if it failed.
  void wait() {
    if (const auto progress = std::move(progress_)) progress->wait(ticket_);
  }
  /// True once `wait` would return or throw at once.
  bool done() const { return !progress_ || progress_->done(ticket_); }

 private:
  void finish() noexcept {
    try {
      wait();
    } catch (...) {
      // The communicator stays failed: its next call throws.
    }
  }

  std::shared_ptr<Progress> progress_;
  std::uint64_t ticket_ = 0;
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_WORK_HPP

namespace chorus::inline CHORUS_ABI::comm {

/// How contributions are combined. On bool, sum and max are "or", min is "and". A NaN wins over any number in min and
/// max.
enum class ReduceOp : std::uint8_t { sum, min, max };

constexpr std::string_view name(ReduceOp op) {
  constexpr std::string_view names[] = {"sum", "min", "max"};
  return names[static_cast<std::size_t>(op)];
}
inline void append(std::string& out, ReduceOp op) { out += name(op); }

struct CollectiveOptions {
  /// Multiplies this rank's contribution before it is reduced (NCCL's PreMulSum), without a pass of its own over
  /// memory. Only for all_reduce and reduce_scatter of floating-point numbers.
  double scale = 1;
  trace::Traffic traffic = trace::Traffic::control;  ///< what the bytes are counted as
};

/// A group of ranks. Every rank calls the same collectives, in the same order, with the same counts and scalar types.
///
///   all_reduce(data, op, options)         data := the reduction of every rank's data; the same bits on every rank
///   broadcast(data, root, options)        data := root's data
///   all_gather(mine, all, options)        all  := every rank's `mine`, in the order of ranks; all.size() == size *
///   mine.size() reduce_scatter(all, mine, op, options) mine := this rank's part of the reduction of every rank's `all`
///   send(data, peer), recv(data, peer)    in the order of calls, without tags; send may return before the peer
///   receives barrier()                             returns when every rank has called it
///
/// `X_async` starts X and returns a Work; asynchronous collectives run in the order of calls, and a blocking call
/// keeps its place behind them. A failed communicator stays failed: every later call throws CommError.
template <class C>
concept Communicator = requires(C& c, std::span<float> out, std::span<const float> in, ReduceOp op,
                                CollectiveOptions options) {
  { c.rank() } -> std::convertible_to<int>;
  { c.size() } -> std::convertible_to<int>;
  c.all_reduce(out, op, options);
  c.broadcast(out, 0, options);
  c.all_gather(in, out, options);
  c.reduce_scatter(in, out, op, options);
  c.send(in, 0, options);
  c.recv(out, 0, options);
  c.barrier();
  { c.all_reduce_async(out, op, options) } -> std::same_as<Work>;
  { c.broadcast_async(out, 0, options) } -> std::same_as<Work>;
  { c.all_gather_async(in, out, options) } -> std::same_as<Work>;
  { c.reduce_scatter_async(in, out, op, options) } -> std::same_as<Work>;
  { c.send_async(in, 0, options) } -> std::same_as<Work>;
  { c.recv_async(out, 0, options) } -> std::same_as<Work>;
  { c.barrier_async() } -> std::same_as<Work>;
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_COMMUNICATOR_HPP

// <chorus/comm/ring_communicator.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_RING_COMMUNICATOR_HPP
#define CHORUS_SINGLE_CHORUS_COMM_RING_COMMUNICATOR_HPP
/// `RingCommunicator`: the collectives of `ring.hpp` over a Transport, with checks, order, and errors that stay.

// <chorus/comm/ring_call.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_RING_CALL_HPP
#define CHORUS_SINGLE_CHORUS_COMM_RING_CALL_HPP
/// One call of a RingCommunicator, and the object that runs such calls one after another.

// <chorus/comm/in_order.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_IN_ORDER_HPP
#define CHORUS_SINGLE_CHORUS_COMM_IN_ORDER_HPP
/// `InOrder`: runs tasks one after another, in the caller's thread or, for asynchronous ones, in one background thread.

#include <csignal>

namespace chorus::inline CHORUS_ABI::comm {

/// An error that several threads will throw, each its own copy. Empty: no error.
struct Failure {
  std::string what;
  bool timed_out = false;

  explicit operator bool() const { return !what.empty(); }
  [[noreturn]] void raise() const {
    if (timed_out) throw TimeoutError(what);
    throw CommError(what);
  }
};

/// `run(self, task, caller_waits)` is called by one thread at a time and tells how it failed. `caller_waits` is true
/// while the calling thread has nothing else to do than to wait for it. The first failure is final: tasks that wait
/// behind it are dropped, and their Works throw it too.
template <class Task>
class InOrder final : public Progress {
 public:
  using Run = Failure (*)(void* self, const Task& task, const std::atomic<bool>& caller_waits);

  InOrder(Run run, void* self) : run_(run), self_(self) {}
  ~InOrder() override { stop(); }

  /// Runs `task` behind all that were given before, and returns when it is done; throws how it failed.
  void now(const Task& task) {
    std::unique_lock lock(mutex_);
    const auto ticket = ++given_;
    if (tasks_.empty() && !running_) {
      caller_waits_ = true;
      const auto failure = execute(lock, task);
      caller_waits_ = false;
      if (failure) failure.raise();
      return;
    }
    start();
    tasks_.push_back(task);
    change_.notify_all();
    lock.unlock();
    wait(ticket);
  }

  /// Puts `task` behind all that were given before. Starts the thread at the first call.
  std::uint64_t later(const Task& task) {
    const std::lock_guard lock(mutex_);
    start();
    if (!failure_) tasks_.push_back(task);
    change_.notify_all();
    return ++given_;
  }

  void wait(std::uint64_t ticket) override {
    std::unique_lock lock(mutex_);
    caller_waits_ = true;
    change_.wait(lock, [&] { return finished_ >= ticket || bool(failure_); });
    caller_waits_ = false;
    if (finished_ < ticket) failure_.raise();
  }

  bool done(std::uint64_t ticket) override {
    const std::lock_guard lock(mutex_);
    return finished_ >= ticket || bool(failure_);
  }

  /// Finishes what was given and ends the thread.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      change_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  Failure execute(std::unique_lock<std::mutex>& lock, const Task& task) {
    running_ = true;
    lock.unlock();
    const auto failure = run_(self_, task, caller_waits_);
    lock.lock();
    running_ = false;
    if (!failure) {
      ++finished_;
    } else if (!failure_) {
      failure_ = failure;
      tasks_.clear();
      first_ = 0;
    }
    change_.notify_all();
    return failure;
  }

  void start() {
    if (thread_.joinable()) return;
    sigset_t all, before;  // signals are for the threads that the user knows of
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { loop(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      change_.wait(lock, [&] { return !running_ && (stopping_ || !tasks_.empty()); });
      if (tasks_.empty()) return;
      const Task task = tasks_[first_++];
      if (first_ == tasks_.size()) {  // keeps its memory
        tasks_.clear();
        first_ = 0;
      }
      execute(lock, task);
    }
  }

  Run run_;
  void* self_;
  std::mutex mutex_;
  std::condition_variable change_;
  std::vector<Task> tasks_;  // those from first_ on wait
  std::size_t first_ = 0;
  std::uint64_t given_ = 0, finished_ = 0;
  Failure failure_;
  bool running_ = false, stopping_ = false;
  std::atomic<bool> caller_waits_{false};
  std::thread thread_;
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_IN_ORDER_HPP

// <chorus/comm/ring.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_RING_HPP
#define CHORUS_SINGLE_CHORUS_COMM_RING_HPP
/// The collective algorithms, over any Transport. Ranks stand in a ring, rank r sends to r + 1 and receives from r - 1.
///
/// All-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): data
/// is cut into one chunk per rank. Chunk c starts at rank c + 1 and goes once around, each rank adding its part, so
/// that it is complete at rank c (reduce-scatter: n - 1 steps); then it goes around once more to be stored (all-gather:
/// n - 1 steps). Every rank sends 2 (n - 1) chunks, which is 2 (n - 1) / n of the data whatever n is. The order of
/// additions is fixed by the chunk, and a chunk's sum is computed at one place: results are the same bits on all ranks,
/// in every run.

// <chorus/comm/reduction.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_REDUCTION_HPP
#define CHORUS_SINGLE_CHORUS_COMM_REDUCTION_HPP
/// The arithmetic of collectives: the ring code moves bytes and calls these two functions on them.

namespace chorus::inline CHORUS_ABI::comm {

/// A scalar type and an operator, as code that knows only bytes sees them. Pointers are aligned to the scalar type.
struct Reduction {
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  std::size_t element = 1;  ///< bytes of one number
  double scale = 1;
  /// out[i] = in[i] (+) scale * mine[i]; `out` may be `in` or `mine`
  void (*combine)(void* out, const void* in, const void* mine, std::size_t count, double scale) = nullptr;
  /// out[i] = scale * mine[i]; `out` may be `mine`
  void (*scaled)(void* out, const void* mine, std::size_t count, double scale) = nullptr;
};

namespace detail {

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a || b;
    } else {
      return static_cast<T>(a + b);
    }
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

/// Calls f(i) for i in [0, count), in blocks of constant length, which compilers vectorise at -O2 already.
template <class Function>
void for_each_index(std::size_t count, Function f) {
  constexpr std::size_t block = 64;
  std::size_t i = 0;
  for (; i + block <= count; i += block) {
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (std::size_t j = i; j < i + block; ++j) f(j);
  }
  for (; i < count; ++i) f(i);
}

template <class T, class Op>
void combine(void* out, const void* in, const void* mine, std::size_t count, double scale) {
  const auto o = static_cast<T*>(out);
  const auto a = static_cast<const T*>(in), b = static_cast<const T*>(mine);
  if constexpr (std::is_floating_point_v<T>) {
    const T factor = static_cast<T>(scale);
    for_each_index(count, [=](std::size_t i) { o[i] = Op::apply(a[i], static_cast<T>(factor * b[i])); });
  } else {
    for_each_index(count, [=](std::size_t i) { o[i] = Op::apply(a[i], b[i]); });
  }
}

template <class T>
void scaled(void* out, const void* mine, std::size_t count, double scale) {
  if constexpr (std::is_floating_point_v<T>) {
    if (scale != 1) {
      const auto o = static_cast<T*>(out);
      const auto a = static_cast<const T*>(mine);
      const T factor = static_cast<T>(scale);
      for_each_index(count, [=](std::size_t i) { o[i] = static_cast<T>(factor * a[i]); });
      return;
    }
  }
  if (count != 0 && out != mine) std::memcpy(out, mine, count * sizeof(T));
}

}  // namespace detail

/// The reduction of numbers of type T with `op`. Throws UsageError for a scale that T cannot hold.
template <Scalar T>
Reduction reduction(ReduceOp op, double scale) {
  check<UsageError>(scale == 1 || std::is_floating_point_v<T>, "collective: scale ", scale,
                    " needs floating-point numbers, these are ", dtype<T>);
  const auto combine = op == ReduceOp::sum   ? &detail::combine<T, detail::Sum>
                       : op == ReduceOp::min ? &detail::combine<T, detail::Min>
                                             : &detail::combine<T, detail::Max>;
  return {dtype<T>, op, sizeof(T), scale, combine, &detail::scaled<T>};
}

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_REDUCTION_HPP

// <chorus/comm/transport.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_TRANSPORT_HPP
#define CHORUS_SINGLE_CHORUS_COMM_TRANSPORT_HPP
/// `Transport`: links between the ranks of a group, over which the algorithms of `ring.hpp` are written once.

#include <chrono>

namespace chorus::inline CHORUS_ABI::comm {

enum class Op : std::uint8_t { all_reduce, broadcast, all_gather, reduce_scatter, message, barrier };

constexpr std::string_view name(Op op) {
  constexpr std::string_view names[] = {"all_reduce",     "broadcast", "all_gather",
                                        "reduce_scatter", "message",   "barrier"};
  const auto i = static_cast<std::size_t>(op);
  return i < std::size(names) ? names[i] : "an unknown operation";
}

/// Which call a piece of data belongs to. It travels with every piece, and both ends compare: ranks that call different
/// collectives get an error that names both, not a hang or wrong numbers.
struct Envelope {
  Op op = Op::barrier;
  DType dtype = DType::u8;
  std::uint8_t detail = 0;  ///< a ReduceOp, or the root's rank
  std::uint8_t reserved = 0;
  std::uint32_t sequence = 0;  ///< the how-manieth collective, or the how-manieth message between two ranks
  std::uint64_t count = 0;     ///< numbers of type `dtype` in this rank's call
  friend bool operator==(const Envelope&, const Envelope&) = default;
};

/// `all_reduce #7 (sum of 1024 F32)`
[[gnu::cold]] inline void append(std::string& out, const Envelope& call) {
  const bool reduces = call.op == Op::all_reduce || call.op == Op::reduce_scatter;
  const bool known = call.dtype <= DType::f64 && (!reduces || call.detail <= static_cast<std::uint8_t>(ReduceOp::max));
  out += name(call.op);
  out += " #";
  chorus::append(out, call.sequence);
  if (call.op == Op::barrier || !known) return;
  out += " (";
  if (reduces) out.append(name(static_cast<ReduceOp>(call.detail))).append(" of ");
  chorus::append(out, call.count);
  out.append(" ").append(name(call.dtype));
  if (call.op == Op::broadcast) chorus::append(out.append(" from rank "), call.detail);
  out += ')';
}

/// Why a link failed, in words that name the peer. The communicator adds its own rank and the operation.
struct LinkError : Error {
  using Error::Error;
};
struct LinkTimeout : LinkError {
  using LinkError::LinkError;
};

/// Links of one rank to all others of its group. A link is a queue of a few pieces of at most `piece_bytes` each, so a
/// rank can send some while its peer is busy; `queue_pieces` of them before `acquire` waits.
///
/// Every call that waits throws LinkTimeout when the peer makes no progress for `timeout`, and LinkError when a process
/// of the group has died, when a rank has called `abort`, and when the peer has left. Not thread-safe: one thread at a
/// time.
class Transport {
 public:
  struct Piece {
    Envelope envelope;
    const std::byte* data = nullptr;  ///< aligned to 64 bytes, valid until `release`
    std::size_t bytes = 0;
  };

  Transport(int me, int ranks, std::size_t piece_limit, std::size_t queue_limit, std::chrono::milliseconds limit)
      : rank(me), size(ranks), piece_bytes(piece_limit), queue_pieces(queue_limit), timeout(limit) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// Waits for room in the queue to `peer`: `piece_bytes` to write to, aligned to 64 bytes.
  virtual std::byte* acquire(int peer) = 0;
  /// Sends the first `bytes` of what `acquire` gave.
  virtual void publish(int peer, const Envelope& envelope, std::size_t bytes) = 0;
  /// Waits for the next piece from `peer`; `release` gives its room back.
  virtual Piece receive(int peer) = 0;
  virtual void release(int peer) = 0;
  /// Waits until all that was published has left this rank: it arrives whatever this rank does next.
  virtual void flush() = 0;
  /// Throws if the group is known to have failed. Cheap.
  virtual void check() = 0;
  /// Tells all ranks that this one gives up, and why.
  virtual void abort(const std::string& why) noexcept = 0;

  const int rank, size;
  const std::size_t piece_bytes, queue_pieces;
  const std::chrono::milliseconds timeout;
  /// Whether a thread that waits here may keep its core for some microseconds. It may not while its program computes.
  const std::atomic<bool>* may_spin = nullptr;
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_TRANSPORT_HPP

namespace chorus::inline CHORUS_ABI::comm {

/// One rank's part in one collective.
struct Ring {
  Transport& link;
  const Envelope& call;
  const Reduction& reduction;
  trace::Traffic traffic = trace::Traffic::control;

  int rank() const { return link.rank; }
  int size() const { return link.size; }
  /// The rank `steps` further on; negative: further back.
  int neighbour(int steps) const { return ((rank() + steps) % size() + size()) % size(); }
  /// Numbers of a chunk that can be under way at once. Half a queue: a whole chunk fits while its receiver still reads
  /// the one before, so no rank waits for room in a circle.
  std::size_t longest_chunk() const { return link.queue_pieces / 2 * (link.piece_bytes / reduction.element); }
};

namespace detail {

inline constexpr int nobody = -1;

/// What one rank does with one chunk. value = (what comes `from`) (+) scale * `mine`, or the one of them that is given;
/// it goes `to` the next rank, into `store`, or both.
struct Step {
  int from = nobody, to = nobody;
  bool reads = false, stores = false;  ///< whether `mine` and `store` take part
  const std::byte* mine = nullptr;
  std::byte* store = nullptr;
};

inline void copy_bytes(std::byte* out, const std::byte* in, std::size_t bytes) {
  if (bytes != 0) std::memcpy(out, in, bytes);
}

inline Transport::Piece receive(const Ring& ring, int from, std::size_t bytes) {
  const auto piece = ring.link.receive(from);
  check<LinkError>(piece.envelope == ring.call, "rank ", from, " is in another call, ", piece.envelope);
  check<LinkError>(piece.bytes == bytes, "rank ", from, " sent ", piece.bytes, " bytes where ", bytes, " belong");
  return piece;
}

/// Moves `count` numbers, piece by piece: while one piece is being added here, the next one is being written by the
/// neighbour. An empty chunk travels as one empty piece, so that a mismatch of calls shows in any case.
inline void relay(const Ring& ring, Step m, std::size_t count) {
  const auto element = ring.reduction.element, per_piece = ring.link.piece_bytes / element;
  do {
    const auto n = std::min(count, per_piece), bytes = n * element;
    const std::byte* in = m.from == nobody ? nullptr : receive(ring, m.from, bytes).data;
    std::byte* slot = m.to == nobody ? nullptr : ring.link.acquire(m.to);
    std::byte* out = slot ? slot : m.store;
    if (in && m.reads) {
      ring.reduction.combine(out, in, m.mine, n, ring.reduction.scale);
    } else if (in) {
      copy_bytes(out, in, bytes);
    } else {
      ring.reduction.scaled(out, m.mine, n, ring.reduction.scale);
    }
    if (slot) {
      if (m.stores) copy_bytes(m.store, slot, bytes);
      ring.link.publish(m.to, ring.call, bytes);
      trace::sent(ring.rank(), ring.traffic, bytes);
    }
    if (in) ring.link.release(m.from);
    m.mine += m.reads ? bytes : 0;
    m.store += m.stores ? bytes : 0;
    count -= n;
  } while (count != 0);
}

}  // namespace detail

/// data: count numbers, in place. Bytes sent: 2 (n - 1) / n of the data, to within 2 numbers when n does not divide
/// count.
inline void ring_all_reduce(const Ring& ring, std::byte* data, std::size_t count) {
  const int n = ring.size(), r = ring.rank(), next = ring.neighbour(1), previous = ring.neighbour(-1);
  const auto element = ring.reduction.element;
  do {  // segments that fit the queues and the caches
    const auto ranks = static_cast<std::size_t>(n), segment = std::min(count, ranks * ring.longest_chunk());
    const auto start = [&](int c) { return segment * static_cast<std::size_t>(c) / ranks; };  // of chunk c
    const auto length = [&](int c) { return start(c + 1) - start(c); };
    const auto at = [&](int c) { return data + start(c) * element; };

    int c = ring.neighbour(-1);
    detail::relay(ring, {.to = next, .reads = true, .mine = at(c)}, length(c));
    for (int step = 2; step < n; ++step) {
      c = ring.neighbour(-step);
      detail::relay(ring, {.from = previous, .to = next, .reads = true, .mine = at(c)}, length(c));
    }
    detail::relay(ring, {.from = previous, .to = next, .reads = true, .stores = true, .mine = at(r), .store = at(r)},
                  length(r));
    for (int step = 1; step < n - 1; ++step) {
      c = ring.neighbour(-step);
      detail::relay(ring, {.from = previous, .to = next, .stores = true, .store = at(c)}, length(c));
    }
    c = ring.neighbour(1);
    detail::relay(ring, {.from = previous, .stores = true, .store = at(c)}, length(c));

    data += segment * element;
    count -= segment;
  } while (count != 0);
}

/// all: size * count numbers; mine: the `count` of this rank, reduced. Bytes sent: (n - 1) / n of `all`.
inline void ring_reduce_scatter(const Ring& ring, const std::byte* all, std::byte* mine, std::size_t count) {
  const int n = ring.size(), next = ring.neighbour(1), previous = ring.neighbour(-1);
  const auto element = ring.reduction.element, stride = count * element;
  do {
    const auto length = std::min(count, ring.longest_chunk());
    const auto at = [&](int steps) { return all + static_cast<std::size_t>(ring.neighbour(steps)) * stride; };

    detail::relay(ring, {.to = next, .reads = true, .mine = at(-1)}, length);
    for (int step = 2; step < n; ++step)
      detail::relay(ring, {.from = previous, .to = next, .reads = true, .mine = at(-step)}, length);
    detail::relay(ring, {.from = previous, .reads = true, .stores = true, .mine = at(0), .store = mine}, length);

    all += length * element;
    mine += length * element;
    count -= length;
  } while (count != 0);
}

/// mine: count numbers; all: size * count, every rank's. `mine` may be this rank's part of `all`. Bytes sent: (n - 1) /
/// n of `all`.
inline void ring_all_gather(const Ring& ring, const std::byte* mine, std::byte* all, std::size_t count) {
  const int n = ring.size(), next = ring.neighbour(1), previous = ring.neighbour(-1);
  const auto element = ring.reduction.element, stride = count * element;
  do {
    const auto length = std::min(count, ring.longest_chunk());
    const auto at = [&](int steps) { return all + static_cast<std::size_t>(ring.neighbour(steps)) * stride; };

    const bool in_place = mine == at(0);
    detail::relay(ring, {.to = next, .reads = true, .stores = !in_place, .mine = mine, .store = at(0)}, length);
    for (int step = 1; step < n - 1; ++step)
      detail::relay(ring, {.from = previous, .to = next, .stores = true, .store = at(-step)}, length);
    detail::relay(ring, {.from = previous, .stores = true, .store = at(1)}, length);

    mine += length * element;
    all += length * element;
    count -= length;
  } while (count != 0);
}

/// A chain from root to root - 1, piece by piece, so that all links are busy at once. Every rank but the last sends the
/// whole data once.
inline void ring_broadcast(const Ring& ring, std::byte* data, std::size_t count, int root) {
  const int next = ring.neighbour(1), previous = ring.neighbour(-1);
  if (ring.rank() == root) {
    detail::relay(ring, {.to = next, .reads = true, .mine = data}, count);
  } else if (next == root) {
    detail::relay(ring, {.from = previous, .stores = true, .store = data}, count);
  } else {
    detail::relay(ring, {.from = previous, .to = next, .stores = true, .store = data}, count);
  }
}

/// data: count numbers to, or from, one peer.
inline void ring_send(const Ring& ring, const std::byte* data, std::size_t count, int peer) {
  detail::relay(ring, {.to = peer, .reads = true, .mine = data}, count);
}
inline void ring_receive(const Ring& ring, std::byte* data, std::size_t count, int peer) {
  detail::relay(ring, {.from = peer, .stores = true, .store = data}, count);
}

/// Dissemination (Hensgen, Finkel and Manber, 1988): after k rounds a rank has heard of 2^k others.
inline void ring_barrier(const Ring& ring) {
  for (int distance = 1; distance < ring.size(); distance *= 2) {
    detail::relay(ring, {.to = ring.neighbour(distance)}, 0);
    detail::relay(ring, {.from = ring.neighbour(-distance)}, 0);
  }
}

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_RING_HPP

// <chorus/comm/world.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_WORLD_HPP
#define CHORUS_SINGLE_CHORUS_COMM_WORLD_HPP
/// A process's place among the processes of a job, as a launcher tells it.

namespace chorus::inline CHORUS_ABI::comm {

/// The ranks that one communicator can join; `trace` counts bytes for as many.
inline constexpr int max_ranks = 64;

struct World {
  int rank = 0, size = 1;                 ///< this process's number in [0, size), and how many there are
  int local_rank = 0, local_size = 1;     ///< the same among the processes of this machine
  std::string master_addr = "127.0.0.1";  ///< where rank 0 listens; a name or an address of rank 0's machine
  int master_port = 0;
  int listen_fd = -1;  ///< rank 0: a socket that listens there already, which `connect` takes over; or -1
  std::chrono::milliseconds timeout{60'000};  ///< the longest that any wait for another rank lasts
};

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

/// What carries the bytes between ranks. `automatic`: shared memory when all ranks run on one machine, else TCP.
enum class TransportKind : std::uint8_t { automatic, shm, tcp };

constexpr std::string_view name(TransportKind kind) {
  constexpr std::string_view names[] = {"automatic", "shm", "tcp"};
  return names[static_cast<std::size_t>(kind)];
}
inline void append(std::string& out, TransportKind kind) { out += name(kind); }

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_WORLD_HPP

namespace chorus::inline CHORUS_ABI::comm {

struct RingCall {
  Op op = Op::barrier;
  Reduction reduction = comm::reduction<std::uint8_t>(ReduceOp::sum, 1);
  trace::Traffic traffic = trace::Traffic::control;
  std::size_t count = 0;     ///< numbers per rank: of `mine` where there is a `mine`, else of `data`
  const void* in = nullptr;  ///< what this rank contributes
  void* out = nullptr;       ///< where the result goes
  int peer = 0;              ///< the root of a broadcast, the other end of a message
  bool receives = false;     ///< a message: recv, not send
};

/// Runs calls over a link, numbers them, and turns what goes wrong into one message: rank, call, peer, why.
class RingRunner {
 public:
  explicit RingRunner(std::unique_ptr<Transport> link) : link_(std::move(link)) {}

  /// Returns how the call failed.
  Failure run(const RingCall& call, const std::atomic<bool>& caller_waits) {
    if (!link_) {
      run_alone(call);
      return {};
    }
    const Envelope envelope = number(call);
    if (!failure_.empty()) return failed(call, envelope, cat("this communicator has failed before: ", failure_));
    try {
      link_->check();
      link_->may_spin = &caller_waits;
      start(call, envelope);
      link_->flush();
      return {};
    } catch (const LinkTimeout& error) {
      return failed(call, envelope, error.what(), true);
    } catch (const std::exception& error) {
      return failed(call, envelope, error.what());
    }
  }

 private:
  Envelope number(const RingCall& call) {
    Envelope envelope{.op = call.op, .dtype = call.reduction.dtype, .count = call.count};
    const auto peer = static_cast<std::size_t>(call.peer);
    switch (call.op) {
      case Op::message:
        envelope.sequence = call.receives ? received_[peer]++ : sent_[peer]++;
        return envelope;
      case Op::broadcast:
        envelope.detail = static_cast<std::uint8_t>(call.peer);
        break;
      default:
        envelope.detail = static_cast<std::uint8_t>(call.reduction.op);
    }
    envelope.sequence = collectives_++;
    return envelope;
  }

  [[gnu::cold]] Failure failed(const RingCall& call, const Envelope& envelope, std::string_view why,
                               bool timed_out = false) {
    const auto direction = call.op != Op::message ? "" : call.receives ? "receiving " : "sending ";
    const auto what = cat("rank ", link_->rank, ": ", direction, envelope, ": ", why);
    if (failure_.empty()) {
      failure_ = what;
      link_->abort(what);
    }
    return {what, timed_out};
  }

  void start(const RingCall& call, const Envelope& envelope) {
    const Ring ring{*link_, envelope, call.reduction, call.traffic};
    const auto in = static_cast<const std::byte*>(call.in);
    const auto out = static_cast<std::byte*>(call.out);
    switch (call.op) {
      case Op::all_reduce:
        return ring_all_reduce(ring, out, call.count);
      case Op::broadcast:
        return ring_broadcast(ring, out, call.count, call.peer);
      case Op::all_gather:
        return ring_all_gather(ring, in, out, call.count);
      case Op::reduce_scatter:
        return ring_reduce_scatter(ring, in, out, call.count);
      case Op::barrier:
        return ring_barrier(ring);
      case Op::message:
        return call.receives ? ring_receive(ring, out, call.count, call.peer)
                             : ring_send(ring, in, call.count, call.peer);
    }
  }

  /// A group of one: nothing moves, but results are where, and what, they would be.
  static void run_alone(const RingCall& call) {
    if (call.op == Op::broadcast || call.op == Op::barrier) return;
    if (call.out != call.in || call.reduction.scale != 1)
      call.reduction.scaled(call.out, call.in, call.count, call.reduction.scale);
  }

  std::unique_ptr<Transport> link_;
  std::string failure_;
  std::uint32_t collectives_ = 0;
  std::array<std::uint32_t, max_ranks> sent_{}, received_{};  // messages, per peer
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_RING_CALL_HPP

namespace chorus::inline CHORUS_ABI::comm {

/// A Communicator over shared memory, TCP or threads; made by `connect` or `thread_group`. Blocking calls run in the
/// caller's thread, asynchronous ones in one thread of the communicator. Call it from one thread at a time, so that all
/// ranks see one order. Wrong sizes, roots and peers throw UsageError before anything moves; failures of the group
/// throw CommError, which names this rank, the call, the peer and why.
class RingCommunicator {
 public:
  /// The rank that `link` stands for; without a link, a group of one, in which nothing moves.
  explicit RingCommunicator(std::unique_ptr<Transport> link = nullptr)
      : rank_(link ? link->rank : 0),
        size_(link ? link->size : 1),
        runner_(std::move(link)),
        calls_(std::make_shared<InOrder<RingCall>>(&run, &runner_)) {}
  RingCommunicator(const RingCommunicator&) = delete;
  RingCommunicator& operator=(const RingCommunicator&) = delete;
  /// Finishes what was called, and leaves the group.
  ~RingCommunicator() { calls_->stop(); }

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// data := the reduction of every rank's scale * data.
  template <Scalar T, std::size_t E>
  void all_reduce(std::span<T, E> data, ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    calls_->now(reduces<T>(Op::all_reduce, data, data, data.size(), op, options));
  }
  template <Scalar T, std::size_t E>
  Work all_reduce_async(std::span<T, E> data, ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    return later(reduces<T>(Op::all_reduce, data, data, data.size(), op, options));
  }

  /// data := root's data.
  template <Scalar T, std::size_t E>
  void broadcast(std::span<T, E> data, int root, CollectiveOptions options = {}) {
    calls_->now(moves<T>(Op::broadcast, data, data, data.size(), root, options));
  }
  template <Scalar T, std::size_t E>
  Work broadcast_async(std::span<T, E> data, int root, CollectiveOptions options = {}) {
    return later(moves<T>(Op::broadcast, data, data, data.size(), root, options));
  }

  /// all := every rank's `mine`, in the order of ranks; all.size() is size() * mine.size(). `mine` may be its own
  /// place.
  template <Scalar T, std::size_t E>
  void all_gather(std::span<const std::type_identity_t<T>> mine, std::span<T, E> all, CollectiveOptions options = {}) {
    check_parts("all_gather", all.size(), mine.size());
    calls_->now(moves<T>(Op::all_gather, mine, all, mine.size(), rank_, options));
  }
  template <Scalar T, std::size_t E>
  Work all_gather_async(std::span<const std::type_identity_t<T>> mine, std::span<T, E> all,
                        CollectiveOptions options = {}) {
    check_parts("all_gather", all.size(), mine.size());
    return later(moves<T>(Op::all_gather, mine, all, mine.size(), rank_, options));
  }

  /// mine := this rank's part of the reduction of every rank's scale * all; all.size() is size() * mine.size().
  template <Scalar T, std::size_t E>
  void reduce_scatter(std::span<const std::type_identity_t<T>> all, std::span<T, E> mine, ReduceOp op = ReduceOp::sum,
                      CollectiveOptions options = {}) {
    check_parts("reduce_scatter", all.size(), mine.size());
    calls_->now(reduces<T>(Op::reduce_scatter, all, mine, mine.size(), op, options));
  }
  template <Scalar T, std::size_t E>
  Work reduce_scatter_async(std::span<const std::type_identity_t<T>> all, std::span<T, E> mine,
                            ReduceOp op = ReduceOp::sum, CollectiveOptions options = {}) {
    check_parts("reduce_scatter", all.size(), mine.size());
    return later(reduces<T>(Op::reduce_scatter, all, mine, mine.size(), op, options));
  }

  /// Messages between two ranks arrive in the order in which they were sent. `send` returns when `data` may be reused:
  /// before the peer has received it, if the link's queue has room. Two ranks that send each other much at once, and
  /// only then receive, wait for each other until the timeout.
  template <class T, std::size_t E>
  requires Scalar<std::remove_const_t<T>>
  void send(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    calls_->now(message<std::remove_const_t<T>>(data, {}, false, peer, options));
  }
  template <class T, std::size_t E>
  requires Scalar<std::remove_const_t<T>> Work send_async(std::span<T, E> data, int peer,
                                                          CollectiveOptions options = {}) {
    return later(message<std::remove_const_t<T>>(data, {}, false, peer, options));
  }
  template <Scalar T, std::size_t E>
  void recv(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    calls_->now(message<T>({}, data, true, peer, options));
  }
  template <Scalar T, std::size_t E>
  Work recv_async(std::span<T, E> data, int peer, CollectiveOptions options = {}) {
    return later(message<T>({}, data, true, peer, options));
  }

  /// Returns when every rank has called it.
  void barrier() { calls_->now(RingCall{}); }
  Work barrier_async() { return later(RingCall{}); }

 private:
  static Failure run(void* runner, const RingCall& call, const std::atomic<bool>& caller_waits) {
    return static_cast<RingRunner*>(runner)->run(call, caller_waits);
  }

  Work later(const RingCall& call) { return {calls_, calls_->later(call)}; }

  template <class T>
  RingCall reduces(Op op, std::span<const T> in, std::span<T> out, std::size_t count, ReduceOp how,
                   const CollectiveOptions& options) const {
    return {op, reduction<T>(how, options.scale), options.traffic, count, in.data(), out.data()};
  }

  template <class T>
  RingCall moves(Op op, std::span<const T> in, std::span<T> out, std::size_t count, int peer,
                 const CollectiveOptions& options) const {
    check<UsageError>(options.scale == 1, name(op), ": scale ", options.scale, " needs an operation that reduces");
    check<UsageError>(peer >= 0 && peer < size_, name(op), ": rank ", peer, " is not in [0, ", size_, ")");
    return {op, reduction<T>(ReduceOp::sum, 1), options.traffic, count, in.data(), out.data(), peer};
  }

  template <class T>
  RingCall message(std::span<const T> in, std::span<T> out, bool receives, int peer,
                   const CollectiveOptions& options) const {
    check<UsageError>(peer != rank_, receives ? "recv" : "send", ": rank ", peer, " is this rank itself");
    auto call = moves<T>(Op::message, in, out, in.size() + out.size(), peer, options);
    call.receives = receives;
    return call;
  }

  void check_parts(std::string_view what, std::size_t all, std::size_t mine) const {
    check<UsageError>(all == mine * static_cast<std::size_t>(size_), what, ": all has ", all, " numbers, expected ",
                      size_, " ranks x ", mine);
  }

  int rank_, size_;
  RingRunner runner_;
  std::shared_ptr<InOrder<RingCall>> calls_;
};

static_assert(Communicator<RingCommunicator>);

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_RING_COMMUNICATOR_HPP

// <chorus/parallel/gradient_buckets.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_GRADIENT_BUCKETS_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_GRADIENT_BUCKETS_HPP
/// Gradient buckets: ranges of the flat gradient buffer that are all-reduced while backward still fills the next ones
/// (Li et al., "PyTorch Distributed", VLDB 2020).

namespace chorus::inline CHORUS_ABI {

struct BucketOptions {
  /// Largest size of the first bucket, in MiB. Small, so that communication starts early.
  double first_bucket_cap_mb = 1;
  /// Largest size of the others, in MiB. A parameter larger than that has a bucket of its own.
  double bucket_cap_mb = 25;
};

namespace detail {

/// Neighbouring gradients of one dtype that travel together.
struct GradientBucket {
  std::size_t group, begin, count;         // elements of the flat buffer
  std::vector<std::size_t> parameters;     // indices into the flat parameters' entries
  std::size_t missing = 0;                 // gradients that this backward has yet to deliver
  comm::Work work;
};

/// Cuts the trainable part of the flat buffers into buckets, in the order of the layout.
template <Device D>
std::vector<GradientBucket> make_buckets(const nn::FlatParameters<D>& flat, const BucketOptions& options) {
  constexpr double mib = 1024 * 1024;
  std::vector<GradientBucket> buckets;
  std::vector<GradientBucket> open(flat.groups().size());
  const auto bytes = [&](const GradientBucket& bucket, std::size_t more) {
    return static_cast<double>((bucket.count + more) * size_of(flat.groups()[bucket.group].dtype));
  };
  const auto close = [&](GradientBucket& bucket) {
    if (!bucket.parameters.empty()) buckets.push_back(std::move(bucket));
    bucket = {};
  };
  for (std::size_t i = 0; i < flat.entries().size(); ++i) {
    const auto& entry = flat.entries()[i];
    if (!entry.parameter().wants_grad()) continue;
    auto& bucket = open[entry.group];
    const double cap = mib * (buckets.empty() ? options.first_bucket_cap_mb : options.bucket_cap_mb);
    const bool apart = bucket.begin + bucket.count != entry.begin;  // a frozen parameter lies between
    if (!bucket.parameters.empty() && (apart || bytes(bucket, entry.count) > cap)) close(bucket);
    if (bucket.parameters.empty()) bucket = {.group = entry.group, .begin = entry.begin, .count = 0, .parameters = {}, .missing = 0, .work = {}};
    bucket.parameters.push_back(i);
    bucket.count += entry.count;
  }
  for (auto& bucket : open) close(bucket);
  return buckets;
}

}  // namespace detail
}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_GRADIENT_BUCKETS_HPP

// <chorus/parallel/same_model.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SAME_MODEL_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SAME_MODEL_HPP
/// The check that all ranks built the same model, before any number is sent.

namespace chorus::inline CHORUS_ABI::detail {

/// One line for each parameter and buffer: `conv1.weight F32 [6, 3, 5, 5]`.
template <Device D>
std::string model_description(nn::Module& model) {
  std::string text;
  for (const auto& named : nn::named_parameters<D>(model))
    text += cat(named.name, " ", named.parameter->dtype(), " ", named.parameter->extents(),
                named.parameter->wants_grad() ? "\n" : ", frozen,\n");
  for (const auto& named : nn::named_buffers<D>(model))
    text += cat(named.name, " ", named.buffer->dtype(), " ", named.buffer->extents(), "\n");
  return text;
}

/// The first line in which two descriptions differ, of each; "nothing" where one has ended.
inline std::pair<std::string, std::string> first_difference(std::string_view a, std::string_view b) {
  const auto line = [](std::string_view& text) {
    const auto end = text.find('\n');
    const std::string_view first = end == std::string_view::npos ? std::string_view("nothing") : text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    return first;
  };
  for (;;) {
    const auto from_a = line(a), from_b = line(b);
    if (from_a != from_b) return {std::string(from_a), std::string(from_b)};
  }
}

/// Throws the same UsageError on every rank where a rank's model is not rank 0's.
template <Device D, class Communicator>
void check_same_model(Communicator& communicator, nn::Module& model) {
  const std::string own = model_description<D>(model);
  const auto ranks = static_cast<std::size_t>(communicator.size());
  const auto own_length = static_cast<std::int64_t>(own.size());
  std::vector<std::int64_t> lengths(ranks);
  communicator.all_gather(std::span<const std::int64_t>(&own_length, 1), std::span<std::int64_t>(lengths), {});
  const auto longest = static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::vector<std::uint8_t> padded(own.begin(), own.end()), all(longest * ranks);
  padded.resize(longest);
  communicator.all_gather(std::span<const std::uint8_t>(padded), std::span<std::uint8_t>(all), {});
  const auto of_rank = [&](std::size_t rank) {
    return std::string_view(reinterpret_cast<const char*>(all.data()) + rank * longest, static_cast<std::size_t>(lengths[rank]));
  };
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    if (of_rank(rank) == of_rank(0)) continue;
    const auto [theirs, first] = first_difference(of_rank(rank), of_rank(0));
    fail<UsageError>("DistributedDataParallel: the ranks' models differ: rank ", rank, " has ", theirs, " where rank 0 has ", first);
  }
}

}  // namespace chorus::inline CHORUS_ABI::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SAME_MODEL_HPP

namespace chorus::inline CHORUS_ABI {

struct DistributedDataParallelOptions {
  /// See BucketOptions.
  double first_bucket_cap_mb = 1, bucket_cap_mb = 25;
  /// Send rank 0's buffers to all ranks before each forward pass in training.
  bool broadcast_buffers = true;
  /// Allow parameters that get no gradient in some backward passes. Costs a small collective a step.
  bool find_unused_parameters = false;
};

/// The gradient is the mean over the *samples* of all ranks: with shares of different sizes the step is the one that a
/// single device would take. All ranks hold bit-identical parameters after each step. Every rank makes the same calls.
template <class Model, class Communicator = comm::RingCommunicator>
class DistributedDataParallel : public Policy<Model> {
 public:
  using D = typename Model::device_type;
  static constexpr bool distributed = true;
  static constexpr const char* name = "ddp";

  /// Compares the models of all ranks and takes rank 0's numbers. Throws UsageError, on every rank, where names, shapes or
  /// dtypes differ, and where no parameter wants a gradient. The communicator must outlive this.
  DistributedDataParallel(Model model, Communicator& communicator, const DistributedDataParallelOptions& options = {},
                          std::uint64_t seed = initial_seed())
      : Policy<Model>(std::move(model), seed),
        communicator_(communicator),
        options_(options),
        buffers_(nn::named_buffers<D>(this->model_)),
        counts_(static_cast<std::size_t>(communicator.size())) {
    detail::check_same_model<D>(communicator_, this->model_);
    for (const auto& group : this->flat_.groups())
      broadcast_bytes(group.value(0), group.count * size_of(group.dtype), trace::Traffic::parameters);
    for (const auto& entry : this->flat_.entries()) entry.parameter().touch();
    broadcast_buffers();
    build_buckets();
    check<UsageError>(!buckets_.empty(), "DistributedDataParallel: no parameter of the model wants a gradient");
    for (std::size_t i = 0; i < this->flat_.entries().size(); ++i) {
      auto& parameter = this->flat_.entries()[i].parameter();
      parameter.on_grad([this, alive = std::weak_ptr<void>(alive_), &parameter] {
        if (!alive.expired()) gradient_ready(parameter);
      });
    }
    this->random_.first_sample = [this] { return first_sample(); };
  }
  /// For `launch`: takes communicator and seed from `run`.
  template <class Run>
    requires requires(Run& run) { run.communicator(); }
  DistributedDataParallel(Model model, Run& run, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(std::move(model), run.communicator(), options, run.seed()) {}

  /// The model's output for this rank's share of the batch.
  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    check<UsageError>(!in_backward_, "DistributedDataParallel: the last backward pass ended early; its gradients are incomplete");
    counting_.wait();  // of a forward pass that no backward followed
    if (grad_enabled()) {
      if (!buckets_fit()) build_buckets();
      if (this->training() && options_.broadcast_buffers && sync_) broadcast_buffers();
      own_count_ = detail::batch_size(0, inputs...);
      counting_ = communicator_.all_gather_async(std::span<const std::int64_t>(&own_count_, 1), std::span<std::int64_t>(counts_), {});
    } else {
      // Without gradients nothing is exchanged, so ranks need not agree on the number of calls.
      std::fill(counts_.begin(), counts_.end(), 0);
    }
    const RandomScope scope(this->begin_forward());
    auto output = this->model_.forward(inputs...);
    this->end_forward();
    return output;
  }

  /// While it lives, backward adds to this rank's own gradients alone; the first backward after it averages the sum.
  class NoSync {
   public:
    explicit NoSync(bool& sync) : sync_(sync), before_(std::exchange(sync, false)) {}
    ~NoSync() { sync_ = before_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    bool& sync_;
    bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(sync_); }

  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(dataset.size(), {.rank = communicator_.rank(),
                                          .world_size = communicator_.size(),
                                          .shuffle = options.shuffle,
                                          .seed = this->seed(),
                                          .padding = options.padding});
  }
  int devices() const { return communicator_.size(); }
  Communicator& communicator() const { return communicator_; }

  /// `value`, the mean over this rank's `samples`, as the mean over the samples of all ranks.
  double mean(double value, Index samples) {
    double sums[2] = {samples == 0 ? 0 : value * static_cast<double>(samples), static_cast<double>(samples)};
    sum(sums);
    return sums[1] == 0 ? 0 : sums[0] / sums[1];
  }
  /// Sums over all ranks, in place.
  void sum(std::span<double> values) { communicator_.all_reduce(values, comm::ReduceOp::sum, {}); }

  /// Whether `text` is the same on all ranks; a collective.
  bool same_on_all_ranks(std::string_view text) {
    std::vector<std::uint8_t> first(text.begin(), text.end());
    auto length = static_cast<std::uint64_t>(first.size());
    communicator_.broadcast(std::span(&length, 1), 0, {});
    first.resize(length);
    communicator_.broadcast(std::span<std::uint8_t>(first), 0, {});
    double different = std::equal(first.begin(), first.end(), text.begin(), text.end()) ? 0 : 1;
    sum({&different, 1});
    return different == 0;
  }

  /// Lays the flat buffers out as a checkpoint says. Names that the model doesn't have are left out.
  void set_parameter_order(std::span<const std::string> names) {
    const auto& entries = this->flat_.entries();
    std::vector<std::size_t> order;
    for (const auto& wanted : names)
      for (std::size_t i = 0; i < entries.size(); ++i)
        if (entries[i].named.name == wanted) order.push_back(i);
    if (order.size() != entries.size()) return;
    this->flat_.reorder(order);
    build_buckets();
    order_learned_ = true;
  }
  /// Sizes of the buckets in bytes, in the order in which they are reduced.
  std::vector<std::size_t> bucket_bytes() const {
    std::vector<std::size_t> sizes;
    for (const auto& bucket : buckets_) sizes.push_back(bucket.count * size_of(this->flat_.groups()[bucket.group].dtype));
    return sizes;
  }

 private:
  void broadcast_bytes(void* data, std::size_t bytes, trace::Traffic traffic) {
    communicator_.broadcast(std::span(static_cast<std::uint8_t*>(data), bytes), 0, {.traffic = traffic});
  }

  void broadcast_buffers() {
    std::size_t bytes = 0;
    for (const auto& named : buffers_) bytes += named.buffer->size_bytes();
    if (bytes == 0) return;
    buffer_message_.resize(bytes);
    const auto copy = [&](bool pack) {
      std::uint8_t* place = buffer_message_.data();
      for (const auto& named : buffers_) {
        const std::size_t size = named.buffer->size_bytes();
        if (pack)
          copy_bytes(Cpu{}, place, named.buffer->where(), named.buffer->data(), size);
        else
          copy_bytes(named.buffer->where(), named.buffer->data(), Cpu{}, place, size);
        place += size;
      }
    };
    if (communicator_.rank() == 0) copy(true);
    broadcast_bytes(buffer_message_.data(), bytes, trace::Traffic::buffers);
    if (communicator_.rank() != 0) copy(false);
  }

  void build_buckets() {
    buckets_ = detail::make_buckets(this->flat_, {options_.first_bucket_cap_mb, options_.bucket_cap_mb});
    bucket_of_.assign(this->flat_.entries().size(), no_bucket);
    entry_of_.clear();
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const std::size_t i : buckets_[b].parameters) bucket_of_[i] = b;
    for (std::size_t i = 0; i < this->flat_.entries().size(); ++i) entry_of_.push_back({&this->flat_.entries()[i].parameter(), i});
    std::sort(entry_of_.begin(), entry_of_.end());
  }

  // Whether no parameter was frozen or thawed since the buckets were made.
  bool buckets_fit() const {
    for (std::size_t i = 0; i < bucket_of_.size(); ++i)
      if (this->flat_.entries()[i].parameter().wants_grad() != (bucket_of_[i] != no_bucket)) return false;
    return true;
  }

  // The place of this rank's first sample in the global batch: the shares lie in the order of the ranks.
  std::int64_t first_sample() {
    counting_.wait();
    return std::accumulate(counts_.begin(), counts_.begin() + communicator_.rank(), std::int64_t{0});
  }

  // This rank's part of the global batch: the weight of its mean gradient.
  double weight() {
    counting_.wait();
    const auto all = std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0});
    return all == 0 ? 1.0 / communicator_.size() : static_cast<double>(own_count_) / static_cast<double>(all);
  }

  // A leaf's hook: its gradient is final. Buckets leave in order, each as soon as it is full.
  void gradient_ready(const ParameterOn<D>& parameter) {
    if (!sync_) return;
    if (!in_backward_) begin_backward();
    const auto found = std::lower_bound(entry_of_.begin(), entry_of_.end(), std::pair(&parameter, std::size_t{0}));
    arrival_.push_back(found->second);
    --buckets_[bucket_of_[found->second]].missing;
    launch_full_buckets();
  }

  void begin_backward() {
    in_backward_ = true;
    weight_ = weight();
    arrival_.clear();
    next_bucket_ = 0;
    for (auto& bucket : buckets_) bucket.missing = bucket.parameters.size();
    at_backward_end([this] { finish_backward(); });
  }

  void launch_full_buckets() {
    for (; next_bucket_ < buckets_.size() && buckets_[next_bucket_].missing == 0; ++next_bucket_) {
      auto& bucket = buckets_[next_bucket_];
      const auto& group = this->flat_.groups()[bucket.group];
      const comm::CollectiveOptions options{.scale = weight_, .traffic = trace::Traffic::gradients};
      const auto start = [&]<class T>(T) {
        bucket.work = communicator_.all_reduce_async(std::span(reinterpret_cast<T*>(group.grad(bucket.begin)), bucket.count),
                                                     comm::ReduceOp::sum, options);
      };
      if (group.dtype == DType::f32)
        start(float{});
      else
        start(double{});
    }
  }

  void finish_backward() {
    if (next_bucket_ < buckets_.size()) complete_with_unused();
    for (auto& bucket : buckets_) bucket.work.wait();
    if (options_.find_unused_parameters) agree_on_unused();
    in_backward_ = false;
    // Where parameters may be left out, ranks don't know the same order.
    if (!order_learned_ && !options_.find_unused_parameters) learn_order();
  }

  // Parameters without a gradient take part with zeros, or, where that was not allowed, are named.
  void complete_with_unused() {
    std::vector<bool> arrived(this->flat_.entries().size());
    for (const std::size_t i : arrival_) arrived[i] = true;
    std::string unused;
    for (auto& bucket : buckets_)
      for (const std::size_t i : bucket.parameters) {
        if (arrived[i]) continue;
        const auto& entry = this->flat_.entries()[i];
        unused += cat(unused.empty() ? "" : ", ", entry.named.name);
        // What earlier passes under no_sync left there still counts.
        auto& parameter = entry.parameter();
        if (!parameter.grad_arrived()) zero_bytes(parameter.where(), parameter.grad_data(), parameter.size_bytes());
      }
    check<UsageError>(options_.find_unused_parameters, "DistributedDataParallel: on rank ", communicator_.rank(),
                      " no gradient came for ", unused,
                      ". If they are not always used, set find_unused_parameters; if never, set_requires_grad(false)");
    for (auto& bucket : buckets_) bucket.missing = 0;
    launch_full_buckets();
  }

  // A parameter has a gradient where any rank used it; where none did it stays without, so that no optimizer moves it.
  void agree_on_unused() {
    std::vector<std::int32_t> used(this->flat_.entries().size());
    for (std::size_t i = 0; i < used.size(); ++i) used[i] = this->flat_.entries()[i].parameter().grad_arrived() ? 1 : 0;
    communicator_.all_reduce(std::span<std::int32_t>(used), comm::ReduceOp::max, {});
    for (std::size_t i = 0; i < used.size(); ++i)
      if (this->flat_.entries()[i].parameter().wants_grad()) this->flat_.entries()[i].parameter().set_grad_arrived(used[i] != 0);
  }

  // After the first backward: lays gradients out in the order in which they came on rank 0, so that buckets fill front to
  // back. The optimizer has not stepped yet, so nothing else knows the old places.
  void learn_order() {
    order_learned_ = true;
    std::vector<std::int64_t> order(arrival_.begin(), arrival_.end());
    communicator_.broadcast(std::span<std::int64_t>(order), 0, {});
    if (std::is_sorted(order.begin(), order.end())) return;
    std::vector<std::size_t> indices(order.begin(), order.end());
    for (std::size_t i = 0; i < this->flat_.entries().size(); ++i)
      if (!this->flat_.entries()[i].parameter().wants_grad()) indices.push_back(i);
    this->flat_.reorder(indices);
    build_buckets();
  }

  static constexpr std::size_t no_bucket = static_cast<std::size_t>(-1);

  Communicator& communicator_;
  DistributedDataParallelOptions options_;
  std::vector<nn::NamedBuffer<D>> buffers_;
  std::vector<std::uint8_t> buffer_message_;

  std::int64_t own_count_ = 0;        // samples of this rank in the current batch
  std::vector<std::int64_t> counts_;  // of all ranks, once counting_ has ended
  comm::Work counting_;
  double weight_ = 1;

  std::vector<detail::GradientBucket> buckets_;
  std::vector<std::size_t> bucket_of_;                                        // by entry of the flat parameters
  std::vector<std::pair<const ParameterOn<D>*, std::size_t>> entry_of_;       // sorted by address
  std::vector<std::size_t> arrival_;                                          // entries, in the order of this backward
  std::size_t next_bucket_ = 0;
  bool sync_ = true, in_backward_ = false, order_learned_ = false;
  std::shared_ptr<void> alive_ = std::make_shared<int>();  // the model's parameters, and their hooks, may live longer
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_DISTRIBUTED_DATA_PARALLEL_HPP

// <chorus/parallel/launch.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_LAUNCH_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_LAUNCH_HPP
/// `launch`: the one call in main. It builds the Run and calls the program's body: in this process or, under a policy
/// of processes, in each rank that it starts or that a launcher has started.

#include <climits>

// <chorus/parallel/message.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_MESSAGE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_MESSAGE_HPP
/// The launcher's messages, in printf's form: it is checked by the compiler as any other code, and costs it least.

#include <cstdarg>

namespace chorus::inline CHORUS_ABI::detail {

inline std::string format_list(const char* form, std::va_list values) {
  std::va_list again;
  va_copy(again, values);
  std::string text(static_cast<std::size_t>(std::vsnprintf(nullptr, 0, form, again)), '\0');
  va_end(again);
  std::vsnprintf(text.data(), text.size() + 1, form, values);
  return text;
}

[[gnu::format(printf, 1, 2)]] inline std::string format(const char* form, ...) {
  std::va_list values;
  va_start(values, form);
  std::string text = format_list(form, values);
  va_end(values);
  return text;
}

[[noreturn, gnu::format(printf, 1, 2)]] inline void usage_error(const char* form, ...) {
  std::va_list values;
  va_start(values, form);
  const std::string text = format_list(form, values);
  va_end(values);
  throw UsageError(text);
}

/// A line on stderr in one write, so that lines of several processes don't mix.
inline void say(std::string_view message) {
  std::string line = "chorus: ";
  line.append(message);
  line += '\n';
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace chorus::inline CHORUS_ABI::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_MESSAGE_HPP

// <chorus/parallel/run.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_RUN_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_RUN_HPP
/// What the body of a program gets from `launch`: its options, its place among the ranks, its seed, its communicator.

#include <sched.h>

// <chorus/comm/connect.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_CONNECT_HPP
#define CHORUS_SINGLE_CHORUS_COMM_CONNECT_HPP
/// `connect`: makes the communicator of the processes of a job.

// <chorus/comm/mesh.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_MESH_HPP
#define CHORUS_SINGLE_CHORUS_COMM_MESH_HPP
/// `connect_all`: TCP connections between every two ranks.

// <chorus/comm/rendezvous.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_RENDEZVOUS_HPP
#define CHORUS_SINGLE_CHORUS_COMM_RENDEZVOUS_HPP
/// How the ranks of a job find each other: rank 0 listens, the others report to it, and all learn the same outcome.
///
/// Each message is a struct of fixed size in this machine's byte order: Hello (rank to rank 0), Answer (back: a refusal
/// with its reason, or the transport), then for TCP the addresses of all ranks, and for shared memory an Ack (rank to
/// rank 0: whether it could open the region) and a Verdict (back: the transport for all). Nothing is encrypted and
/// nobody is authenticated: listen on loopback, or in a network that you trust.

// <chorus/comm/guests.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_GUESTS_HPP
#define CHORUS_SINGLE_CHORUS_COMM_GUESTS_HPP
/// `Guests`: accepts connections from whoever comes, when only some are wanted.

// <chorus/comm/socket.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SOCKET_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SOCKET_HPP
/// TCP sockets with deadlines. All of them are non-blocking and closed on exec.

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

namespace chorus::inline CHORUS_ABI::comm {

inline int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<decltype(left)>(left, 0, 1'000'000));
}

/// An address of a socket, IPv4 or IPv6.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_storage);

  sockaddr* data() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int port() const {
    return ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port
                                               : reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  }
  Address with_port(int port) const {
    auto other = *this;
    const auto value = htons(static_cast<std::uint16_t>(port));
    if (storage.ss_family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&other.storage)->sin6_port = value;
    } else {
      reinterpret_cast<sockaddr_in*>(&other.storage)->sin_port = value;
    }
    return other;
  }

  /// Looks `name` up. Throws CommError.
  static Address resolve(const std::string& name, int port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int code = getaddrinfo(name.c_str(), nullptr, &hints, &found);
    check<CommError>(code == 0 && found != nullptr, "address '", name, "': ", gai_strerror(code));
    Address address;
    std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
    address.length = found->ai_addrlen;
    freeaddrinfo(found);
    return address.with_port(port);
  }
};

/// `127.0.0.1:29500`
inline void append(std::string& out, const Address& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  const bool six = address.storage.ss_family == AF_INET6;
  if (six) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr, text, sizeof text);
  } else {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr, text, sizeof text);
  }
  out += cat(six ? "[" : "", text, six ? "]:" : ":", address.port());
}

/// Owns a socket.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  /// Takes over a socket that someone else has made.
  static Socket adopt(int fd) {
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
    return Socket(fd);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

  /// A listening socket on exactly this address; port 0 takes a free one. Throws CommError.
  static Socket listen(const Address& address) {
    Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int yes = 1;
    setsockopt(socket.fd_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (!socket || bind(socket.fd_, address.data(), address.length) != 0 || ::listen(socket.fd_, SOMAXCONN) != 0) {
      const int error = errno;
      const auto hint = error == EADDRINUSE      ? " (another job or program listens there; choose another port)"
                        : error == EADDRNOTAVAIL ? " (it is not an address of this machine)"
                                                 : "";
      fail<CommError>("cannot listen on ", address, ": ", std::strerror(error), hint);
    }
    return socket;
  }

  /// A connection, or an empty socket with errno set when there is none by the deadline.
  static Socket connect(const Address& address, Deadline deadline) {
    Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) return socket;
    if (::connect(socket.fd_, address.data(), address.length) == 0) return socket;
    if (errno != EINPROGRESS) return Socket();
    int error = ETIMEDOUT;
    socklen_t length = sizeof error;
    if (socket.wait(POLLOUT, deadline)) getsockopt(socket.fd_, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == 0) return socket;
    errno = error;
    return Socket();
  }

  Socket accept() const { return Socket(::accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)); }

  void no_delay() const {
    const int yes = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  }
  Address local() const {
    Address address;
    getsockname(fd_, address.data(), &address.length);
    return address;
  }
  Address remote() const {
    Address address;
    getpeername(fd_, address.data(), &address.length);
    return address;
  }

  /// Moves as many bytes as can be moved without waiting; -1 when the connection is closed or broken.
  std::ptrdiff_t try_send(std::span<const std::byte> bytes) const {
    const auto n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return n >= 0 ? n : would_wait() ? 0 : -1;
  }
  std::ptrdiff_t try_receive(std::span<std::byte> bytes) const {
    const auto n = ::recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    return n > 0 ? n : n < 0 && would_wait() ? 0 : -1;
  }

  /// Moves all bytes; false when the connection ends or the deadline comes first.
  bool send_all(std::span<const std::byte> bytes, Deadline deadline) const {
    while (!bytes.empty()) {
      const auto n = try_send(bytes);
      if (n < 0 || (n == 0 && !wait(POLLOUT, deadline))) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }
  bool receive_all(std::span<std::byte> bytes, Deadline deadline) const {
    while (!bytes.empty()) {
      const auto n = try_receive(bytes);
      if (n < 0 || (n == 0 && !wait(POLLIN, deadline))) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }

  /// False at the deadline.
  bool wait(short event, Deadline deadline) const {
    pollfd entry{fd_, event, 0};
    return Clock::now() < deadline && poll(&entry, 1, milliseconds_until(deadline)) != 0;
  }
  /// Whether the other end has closed, and all that it sent has been read.
  bool ended() const {
    char byte;
    return recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
  }
  /// Whether there is something to read.
  bool has_data() const {
    char byte;
    return recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
  }

 private:
  static bool would_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

  int fd_ = -1;
};

/// The bytes of a struct that is sent as it is.
template <class T>
requires std::is_trivially_copyable_v<T> std::span<std::byte> bytes_of(T& value) {
  return {reinterpret_cast<std::byte*>(&value), sizeof value};
}

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_SOCKET_HPP

namespace chorus::inline CHORUS_ABI::comm {

/// A connection, and the first bytes that came over it.
struct Guest {
  Socket socket;
  std::array<std::byte, 64> hello{};
  std::size_t got = 0;
  Deadline deadline{};
};

/// Each guest has to send a hello of fixed size within 5 s. All are heard side by side, and nothing is allocated on
/// their word, so that one who sends garbage, nothing, or a byte a second keeps no other one waiting.
class Guests {
 public:
  Guests(const Socket& listener, std::size_t hello_bytes) : listener_(listener), hello_bytes_(hello_bytes) {}

  /// Waits for the next guest whose hello is complete. At the deadline: one without a socket.
  [[gnu::cold]] Guest next(Deadline deadline) {
    while (true) {
      for (auto& guest : waiting_)
        if (hear(guest)) return std::exchange(guest, {});
      if (Clock::now() >= deadline) return {};
      if (auto socket = listener_.accept()) {
        seat() = {std::move(socket), {}, 0, Clock::now() + std::chrono::seconds(5)};
      } else {
        sleep(deadline);
      }
    }
  }

 private:
  bool hear(Guest& guest) const {
    if (!guest.socket) return false;
    const auto n = guest.socket.try_receive(std::span(guest.hello).subspan(guest.got, hello_bytes_ - guest.got));
    if (n > 0) guest.got += static_cast<std::size_t>(n);
    if (n < 0 || Clock::now() >= guest.deadline) guest = {};
    return guest.got == hello_bytes_;
  }

  /// A free place, or that of the one who has been there longest.
  Guest& seat() {
    Guest* oldest = &waiting_[0];
    for (auto& guest : waiting_) {
      if (!guest.socket) return guest;
      if (guest.deadline < oldest->deadline) oldest = &guest;
    }
    return *oldest;
  }

  void sleep(Deadline deadline) const {
    std::array<pollfd, crowd + 1> events;
    for (std::size_t i = 0; i < crowd; ++i) {
      events[i] = {waiting_[i].socket.fd(), POLLIN, 0};
      if (waiting_[i].socket) deadline = std::min(deadline, waiting_[i].deadline);
    }
    events[crowd] = {listener_.fd(), POLLIN, 0};
    poll(events.data(), events.size(), milliseconds_until(deadline));
  }

  static constexpr std::size_t crowd = 128;

  const Socket& listener_;
  std::size_t hello_bytes_;
  std::array<Guest, crowd> waiting_;
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_GUESTS_HPP

// <chorus/comm/shm_transport.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SHM_TRANSPORT_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SHM_TRANSPORT_HPP
/// `ShmTransport`: links through memory that all ranks share, whether they are processes or threads.
///
/// The region starts with a Board (who is here, who waits for whom, who gave up), then holds a queue for each ordered
/// pair of ranks. A queue is an array of slots, used in turn. A slot's `full` flag says whose it is: the sender writes
/// into an empty one and sets the flag, the receiver reads a full one and clears it. Flag, envelope and data lie side
/// by side, so that a short message costs one transfer between two cores' caches.

#include <signal.h>
#include <sys/syscall.h>

// <chorus/comm/futex.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_FUTEX_HPP
#define CHORUS_SINGLE_CHORUS_COMM_FUTEX_HPP
/// Waiting on a word of memory, within a process or between processes.

#include <linux/futex.h>

#include <ctime>

namespace chorus::inline CHORUS_ABI::comm {

/// Sleeps while `word` is `value`, until `futex_wake`, `limit`, or for no reason.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::nanoseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec time{.tv_sec = seconds.count(), .tv_nsec = (limit - seconds).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

/// Wakes all that sleep on `word`.
inline void futex_wake(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Tells the processor that this is a waiting loop.
inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_FUTEX_HPP

// <chorus/comm/shared_region.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_SHARED_REGION_HPP
#define CHORUS_SINGLE_CHORUS_COMM_SHARED_REGION_HPP
/// `SharedRegion`: memory that several processes map. It has no name, so that nothing stays when they die.

namespace chorus::inline CHORUS_ABI::comm {

class SharedRegion {
 public:
  /// Zeroed memory, which takes room only where it has been written.
  static SharedRegion create(std::size_t bytes) {
    const int fd = memfd_create("chorus", MFD_CLOEXEC);
    check<CommError>(fd >= 0, "shared memory: memfd_create: ", std::strerror(errno));
    SharedRegion region;
    region.fd_ = fd;
    check<CommError>(ftruncate(fd, static_cast<off_t>(bytes)) == 0, "shared memory: ", bytes,
                     " bytes: ", std::strerror(errno));
    region.map(bytes);
    return region;
  }

  /// The region that process `pid` of this machine and user has created and knows as `fd`.
  static SharedRegion open(int pid, int fd, std::size_t bytes) {
    const auto path = cat("/proc/", pid, "/fd/", fd);
    SharedRegion region;
    region.fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    check<CommError>(region.fd_ >= 0, "shared memory: ", path, ": ", std::strerror(errno));
    // Touching memory beyond a file's end would end this process.
    check<CommError>(lseek(region.fd_, 0, SEEK_END) >= static_cast<off_t>(bytes), "shared memory: ", path,
                     " is too small");
    region.map(bytes);
    return region;
  }

  SharedRegion() = default;
  SharedRegion(SharedRegion&& other) noexcept { *this = std::move(other); }
  SharedRegion& operator=(SharedRegion&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SharedRegion() {
    if (data_) munmap(data_, bytes_);
    if (fd_ >= 0) close(fd_);
  }

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t size() const { return bytes_; }
  int fd() const { return fd_; }

 private:
  void map(std::size_t bytes) {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    check<CommError>(data != MAP_FAILED, "shared memory: mmap of ", bytes, " bytes: ", std::strerror(errno));
    data_ = data;
    bytes_ = bytes;
  }

  int fd_ = -1;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_SHARED_REGION_HPP

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {

struct alignas(64) Seat {
  std::atomic<std::uint32_t> bell;       ///< goes up to wake this rank
  std::atomic<std::int32_t> awaits;      ///< while it sleeps: 1 + the rank whose data it waits for
  std::atomic<std::int32_t> wants_room;  ///< while it sleeps: 1 + the rank that it waits for to read
  std::atomic<Clock::rep> pulse;         ///< while it sleeps: when it last looked around, by the machine's clock
  std::atomic<std::uint32_t> left;       ///< 1 once it has left the group
  std::atomic<std::int32_t> pid;         ///< its process, or 0 among threads
};

struct Board {
  std::uint64_t key;                   ///< random: shows that a process has opened the right region
  std::atomic<std::uint32_t> verdict;  ///< 0: all is well, 1: someone writes `reason`, 2: it is written
  std::int32_t culprit;                ///< who wrote it
  std::array<char, 1024> reason;
  std::array<Seat, max_ranks> seats;
};

struct alignas(64) SlotHead {
  std::atomic<std::uint32_t> full;
  std::uint32_t bytes;
  Envelope envelope;
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace detail

class ShmTransport final : public Transport {
 public:
  static constexpr std::size_t slot_bytes = 32 * 1024, slots = 16;

  static constexpr std::size_t region_bytes(int size) {
    return sizeof(detail::Board) + static_cast<std::size_t>(size * size) * queue_stride;
  }

  /// Takes a seat in a zeroed region of `region_bytes(ranks)`. Where the region names the ranks' processes, it watches
  /// for their deaths.
  ShmTransport(SharedRegion region, int me, int ranks, std::chrono::milliseconds limit)
      : Transport(me, ranks, slot_bytes, slots, limit),
        region_(std::move(region)),
        board_(*reinterpret_cast<detail::Board*>(region_.data())),
        queues_(region_.data() + sizeof(detail::Board)),
        room_to_spin_(static_cast<unsigned>(size) <= std::thread::hardware_concurrency()) {
    for (int peer = 0; peer < size; ++peer) {
      const int pid = seat(peer).pid.load();
      death(peer) = pid != 0 && peer != rank ? static_cast<int>(syscall(SYS_pidfd_open, pid, 0)) : -1;
    }
  }

  ~ShmTransport() override {
    seat(rank).left.store(1);
    ring_all_bells();
    for (int peer = 0; peer < size; ++peer)
      if (death(peer) >= 0) close(death(peer));
  }

  /// Writes down, before anyone takes a seat, which process a rank is.
  static void name_process(const SharedRegion& region, std::size_t who, int pid) {
    reinterpret_cast<detail::Board*>(region.data())->seats[who].pid.store(pid);
  }

  std::byte* acquire(int peer) override {
    auto& head = slot(rank, peer, sent_);
    if (head.full.load(std::memory_order_acquire) != 0) wait(peer, seat(rank).wants_room, head.full, 1);
    return reinterpret_cast<std::byte*>(&head) + sizeof head;
  }

  void publish(int peer, const Envelope& envelope, std::size_t bytes) override {
    auto& head = slot(rank, peer, sent_);
    head.envelope = envelope;
    head.bytes = static_cast<std::uint32_t>(bytes);
    head.full.store(1);
    advance(peer, sent_);
    if (seat(peer).awaits.load() == rank + 1) ring_bell(peer);
  }

  Piece receive(int peer) override {
    auto& head = slot(peer, rank, received_);
    if (head.full.load(std::memory_order_acquire) == 0) wait(peer, seat(rank).awaits, head.full, 0);
    return {head.envelope, reinterpret_cast<const std::byte*>(&head) + sizeof head, head.bytes};
  }

  void release(int peer) override {
    slot(peer, rank, received_).full.store(0);
    advance(peer, received_);
    if (seat(peer).wants_room.load() == rank + 1) ring_bell(peer);
  }

  void flush() override {}

  void check() override {
    chorus::check<LinkError>(board_.verdict.load() != 2, "rank ", board_.culprit, " gave up: ", board_.reason.data());
  }

  [[gnu::cold]] void abort(const std::string& why) noexcept override {
    std::uint32_t none = 0;
    if (board_.verdict.compare_exchange_strong(none, 1)) {
      board_.culprit = rank;
      const auto length = std::min(why.size(), board_.reason.size() - 1);
      std::copy_n(why.data(), length, board_.reason.data());
      board_.verdict.store(2);
    }
    ring_all_bells();
  }

 private:
  static constexpr std::chrono::milliseconds nap{20};  // of a sleeper between two looks around
  static constexpr std::size_t slot_stride = sizeof(detail::SlotHead) + slot_bytes;
  static constexpr std::size_t queue_stride = slots * slot_stride;

  detail::Seat& seat(int who) const { return board_.seats[static_cast<std::size_t>(who)]; }

  detail::SlotHead& slot(int from, int to, const std::array<std::uint32_t, max_ranks>& next) const {
    const auto peer = static_cast<std::size_t>(from == rank ? to : from);
    const auto queue = queues_ + static_cast<std::size_t>(from * size + to) * queue_stride;
    return *reinterpret_cast<detail::SlotHead*>(queue + next[peer] * slot_stride);
  }
  static void advance(int peer, std::array<std::uint32_t, max_ranks>& next) {
    auto& i = next[static_cast<std::size_t>(peer)];
    i = (i + 1) % slots;
  }

  int& death(int peer) { return deaths_[static_cast<std::size_t>(peer)]; }

  void ring_bell(int who) const noexcept {
    seat(who).bell.fetch_add(1);
    futex_wake(seat(who).bell);
  }
  void ring_all_bells() const noexcept {
    for (int who = 0; who < size; ++who)
      if (who != rank) ring_bell(who);
  }

  /// Returns when `flag` is no longer `busy`: spins for some microseconds if it may, then sleeps. While it sleeps,
  /// `sign` tells `peer` to ring this rank's bell. Who sets a flag looks at the sign afterwards, who sets the sign
  /// looks at the flag afterwards (all sequentially consistent), so one of them sees the other.
  void wait(int peer, std::atomic<std::int32_t>& sign, std::atomic<std::uint32_t>& flag, std::uint32_t busy) {
    for (int round = 0; round < 60; ++round) {
      for (int i = 0; i < 10; ++i) {
        if (flag.load(std::memory_order_acquire) != busy) return;
        spin_pause();
      }
      if (!room_to_spin_ || !may_spin || !*may_spin) break;
      sched_yield();  // the peer may need this very core
    }
    const auto deadline = Clock::now() + timeout;
    sign.store(peer + 1);
    try {
      while (true) {
        const auto bell = seat(rank).bell.load();
        if (flag.load() != busy) break;
        const auto now = Clock::now();
        seat(rank).pulse.store(now.time_since_epoch().count());
        look_for_trouble(peer, flag, busy, now >= deadline);
        futex_wait(seat(rank).bell, bell, std::min<Clock::duration>(deadline - now, nap));
      }
    } catch (...) {
      sign.store(0);
      throw;
    }
    sign.store(0);
  }

  [[gnu::cold]] void look_for_trouble(int peer, const std::atomic<std::uint32_t>& flag, std::uint32_t busy, bool late) {
    check();
    for (int who = 0; who < size; ++who)
      if (has_died(who)) fail<LinkError>("rank ", who, " is gone: its process ", seat(who).pid.load(), " has ended");
    // Whatever a rank sent before it left is there by now.
    if (seat(peer).left.load() != 0 && flag.load() == busy) fail<LinkError>("rank ", peer, " has left the group");
    if (late) fail<LinkTimeout>("waited ", timeout.count(), " ms for ", chain(peer));
  }

  [[gnu::cold]] bool has_died(int who) {
    const int pid = seat(who).pid.load();
    if (pid == 0 || who == rank) return false;
    pollfd event{death(who), POLLIN, 0};
    const bool ended = event.fd >= 0 ? poll(&event, 1, 0) > 0 : kill(pid, 0) != 0 && errno == ESRCH;
    return ended && seat(who).left.load() == 0;
  }

  /// `rank 2, which waits for rank 1, which ...`: the last one is the one to look at.
  [[gnu::cold]] std::string chain(int who) const {
    std::string text = cat("rank ", who);
    for (int length = 0; length < size; ++length) {
      const int awaits = seat(who).awaits.load(), wants_room = seat(who).wants_room.load();
      const int next = (awaits != 0 ? awaits : wants_room) - 1;
      const auto pulse = Clock::time_point(Clock::duration(seat(who).pulse.load()));
      if (next < 0 || Clock::now() - pulse > 10 * nap) return text + ", which is stopped or busy elsewhere";
      if (next == rank) return text + ", which waits for this rank";
      text += cat(", which waits for rank ", next);
      who = next;
    }
    return text;
  }

  SharedRegion region_;
  detail::Board& board_;
  std::byte* queues_;
  std::array<std::uint32_t, max_ranks> sent_{}, received_{};  // per peer, the next slot
  std::array<int, max_ranks> deaths_{};                       // per peer: a pidfd, readable once its process has ended
  bool room_to_spin_;
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_SHM_TRANSPORT_HPP

namespace chorus::inline CHORUS_ABI::comm {

/// What the ranks agreed on.
struct Meeting {
  TransportKind kind = TransportKind::tcp;
  std::uint64_t key = 0;                     ///< random, the same on all ranks
  SharedRegion region;                       ///< shm
  std::array<Address, max_ranks> addresses;  ///< tcp: where each rank's `listener` is
  Socket listener;                           ///< tcp: where the other ranks connect to this one
};

namespace detail {

inline constexpr std::uint64_t magic = 0x0001'7375'726f'6863;  // "chorus", then the protocol's version

struct Hello {
  std::uint64_t magic = detail::magic;
  std::int32_t rank = 0, size = 0, pid = 0, port = 0;
  std::uint64_t machine = 0;
  TransportKind kind = TransportKind::automatic;
  std::array<std::uint8_t, 7> reserved{};
};

struct Answer {
  std::uint64_t magic = detail::magic;
  std::uint64_t key = 0;
  std::int32_t welcome = 0, pid = 0, fd = -1, port = 0;
  TransportKind kind = TransportKind::tcp;
  std::array<std::uint8_t, 7> reserved{};
  std::array<char, 1024> refusal{};
};

/// The same number for processes that can open each other's memory: one boot of one kernel, one space of process ids.
inline std::uint64_t machine_id() {
  char text[256] = {};
  if (const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC); fd >= 0) {
    [[maybe_unused]] const auto n = read(fd, text, 64);
    close(fd);
  }
  [[maybe_unused]] const auto n = readlink("/proc/self/ns/pid", text + 64, 128);
  std::uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

inline std::uint64_t random_key() {
  std::uint64_t key = 0;
  check<CommError>(getrandom(&key, sizeof key, 0) == sizeof key, "getrandom: ", std::strerror(errno));
  return key;
}

inline constexpr const char* no_shared_memory =
    "shared memory was asked for, but the ranks are on several machines, or belong to several users";

inline void refuse(const Socket& guest, const std::string& why) {
  Answer answer;
  std::copy_n(why.data(), std::min(why.size(), answer.refusal.size() - 1), answer.refusal.data());
  guest.send_all(bytes_of(answer), Clock::now() + std::chrono::milliseconds(100));
}

/// Rank 0's side.
class Host {
 public:
  Host(const World& world, TransportKind kind) : world_(world), kind_(kind) {}

  [[gnu::cold]] Meeting meet() {
    const auto deadline = Clock::now() + world_.timeout;
    const auto listener = world_.listen_fd >= 0
                              ? Socket::adopt(world_.listen_fd)
                              : Socket::listen(Address::resolve(world_.master_addr, world_.master_port));
    where_ = cat("rank 0: rendezvous at ", listener.local());
    Guests guests(listener, sizeof(Hello));
    while (!complete()) {
      auto guest = guests.next(deadline);
      if (!guest.socket) {
        const auto why = missing();
        for (int rank = 1; rank < world_.size; ++rank)
          if (at(rank).socket) refuse(at(rank).socket, why);
        throw TimeoutError(why);
      }
      Hello hello;
      std::memcpy(&hello, guest.hello.data(), sizeof hello);
      if (hello.magic != magic) continue;  // a stranger
      const auto objection = admit(guest.socket, hello);
      if (objection.empty()) continue;
      refuse(guest.socket, cat(where_, ": ", objection));
      refused_ = objection;
    }
    return agree(listener, deadline);
  }

 private:
  struct Rank {
    Socket socket;
    Hello hello;
  };
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  /// Whether all ranks are here, still.
  [[gnu::cold]] bool complete() {
    bool all = true;
    for (int rank = 1; rank < world_.size; ++rank) {
      auto& socket = at(rank).socket;
      if (socket && socket.ended()) socket = Socket();  // it may come again
      all = all && socket;
    }
    return all;
  }

  /// Gives a rank its place, or says why not.
  [[gnu::cold]] std::string admit(Socket& guest, const Hello& hello) {
    if (hello.size != world_.size)
      return cat("rank ", hello.rank, " says that there are ", hello.size, " ranks, rank 0 says ", world_.size);
    if (hello.rank < 1 || hello.rank >= world_.size)
      return cat("rank ", hello.rank, " is not in [1, ", world_.size, ")");
    if (hello.kind != kind_)
      return cat("rank ", hello.rank, " asks for transport ", name_of(hello.kind), ", rank 0 for ", kind_);
    auto& place = at(hello.rank);
    if (place.socket && !place.socket.ended())
      return cat("rank ", hello.rank, " is there already, as process ", place.hello.pid);
    place.socket = std::move(guest);
    place.hello = hello;
    return "";
  }

  static std::string_view name_of(TransportKind kind) { return kind <= TransportKind::tcp ? name(kind) : "unknown"; }

  [[gnu::cold]] std::string missing() {
    std::string ranks;
    int count = 0;
    for (int rank = 1; rank < world_.size; ++rank)
      if (!at(rank).socket) ranks += cat(count++ == 0 ? "" : ", ", rank);
    return cat(where_, count == 1 ? ": rank " : ": ranks ", ranks, " of ", world_.size, " did not arrive within ",
               world_.timeout.count(), " ms", refused_.empty() ? "" : "; refused: ", refused_);
  }

  [[gnu::cold]] Meeting agree(const Socket& listener, Deadline deadline) {
    Meeting meeting;
    bool one_machine = true;
    for (int rank = 1; rank < world_.size; ++rank) one_machine = one_machine && at(rank).hello.machine == machine_id();
    meeting.key = random_key();
    meeting.listener = Socket::listen(listener.local().with_port(0));
    meeting.kind = kind_ != TransportKind::tcp && one_machine ? TransportKind::shm : TransportKind::tcp;
    Answer answer;
    answer.key = meeting.key;
    answer.welcome = 1;
    answer.kind = meeting.kind;
    answer.pid = getpid();
    answer.port = meeting.listener.local().port();
    if (meeting.kind == TransportKind::shm) {
      meeting.region = SharedRegion::create(ShmTransport::region_bytes(world_.size));
      std::memcpy(meeting.region.data(), &meeting.key, sizeof meeting.key);
      for (int rank = 0; rank < world_.size; ++rank)
        ShmTransport::name_process(meeting.region, static_cast<std::size_t>(rank),
                                   rank == 0 ? getpid() : at(rank).hello.pid);
      answer.fd = meeting.region.fd();
    }
    tell_all(bytes_of(answer), deadline);
    if (answer.kind == TransportKind::shm) {
      if (!all_share(deadline)) meeting.kind = TransportKind::tcp;
      tell_all(bytes_of(meeting.kind), deadline);
    }
    check<CommError>(kind_ != TransportKind::shm || meeting.kind == kind_, where_, ": ", no_shared_memory);
    for (int rank = 1; rank < world_.size; ++rank)
      meeting.addresses[static_cast<std::size_t>(rank)] = at(rank).socket.remote().with_port(at(rank).hello.port);
    if (meeting.kind == TransportKind::tcp) tell_all(bytes_of(meeting.addresses), deadline);
    return meeting;
  }

  void tell_all(std::span<const std::byte> message, Deadline deadline) {
    for (int rank = 1; rank < world_.size; ++rank)
      if (!at(rank).socket.send_all(message, deadline)) lost(rank);
  }

  bool all_share(Deadline deadline) {
    bool all = true;
    for (int rank = 1; rank < world_.size; ++rank) {
      std::uint8_t opened = 0;
      if (!at(rank).socket.receive_all(bytes_of(opened), deadline)) lost(rank);
      all = all && opened != 0;
    }
    return all;
  }

  [[noreturn]] void lost(int rank) {
    fail<CommError>(where_, ": rank ", rank, " (process ", at(rank).hello.pid, ") went away");
  }

  const World& world_;
  const TransportKind kind_;
  std::array<Rank, max_ranks> ranks_;
  std::string where_, refused_;
};

/// The other ranks' side.
[[gnu::cold]] inline Meeting join(const World& world, TransportKind kind) {
  const auto deadline = Clock::now() + world.timeout;
  const auto grace = deadline + std::chrono::milliseconds(500) + world.timeout / 10;  // rank 0's refusal may come late
  const auto address = Address::resolve(world.master_addr, world.master_port);
  const auto where = cat("rank ", world.rank, ": rendezvous at ", address);
  Hello hello;
  hello.rank = world.rank;
  hello.size = world.size;
  hello.pid = getpid();
  hello.machine = machine_id();
  hello.kind = kind;

  Meeting meeting;
  Socket host;
  Answer answer;
  const char* trouble = "no answer";
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
    if (Clock::now() >= deadline)
      fail<TimeoutError>(where, ": rank 0 was not found within ", world.timeout.count(), " ms: ", trouble);
    host = Socket::connect(address, std::min(deadline, Clock::now() + std::chrono::seconds(5)));
    if (!host) trouble = std::strerror(errno);
    // A port that nobody listens on can, on loopback, be connected to itself.
    if (!host || host.local().port() == address.port()) continue;
    meeting.listener = Socket::listen(host.local().with_port(0));
    hello.port = meeting.listener.local().port();
    trouble = "it took the connection and gave no answer";
    if (!host.send_all(bytes_of(hello), deadline) || !host.receive_all(bytes_of(answer.magic), grace)) continue;
    check<CommError>(answer.magic == magic, where, ": something other than a rank 0 of this version answers there");
    if (host.receive_all(bytes_of(answer).subspan(sizeof answer.magic), grace)) break;
  }
  answer.refusal.back() = 0;
  check<CommError>(answer.welcome == 1, "rank ", world.rank, ": ", answer.refusal.data());

  const auto hear = [&](std::span<std::byte> message) {
    check<CommError>(host.receive_all(message, grace), where, ": rank 0 went away");
  };
  meeting.key = answer.key;
  meeting.kind = answer.kind;
  if (meeting.kind == TransportKind::shm) {
    std::uint8_t opened = 0;
    try {
      meeting.region = SharedRegion::open(answer.pid, answer.fd, ShmTransport::region_bytes(world.size));
      opened = std::memcmp(meeting.region.data(), &meeting.key, sizeof meeting.key) == 0;
    } catch (const CommError&) {
      // Rank 0 hears of it and decides for all.
    }
    host.send_all(bytes_of(opened), deadline);
    hear(bytes_of(meeting.kind));
  }
  check<CommError>(kind != TransportKind::shm || meeting.kind == kind, where, ": ", no_shared_memory);
  if (meeting.kind == TransportKind::tcp) hear(bytes_of(meeting.addresses));
  meeting.addresses[0] = host.remote().with_port(answer.port);
  return meeting;
}

}  // namespace detail
}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_RENDEZVOUS_HPP

// <chorus/comm/tcp_transport.hpp>
#ifndef CHORUS_SINGLE_CHORUS_COMM_TCP_TRANSPORT_HPP
#define CHORUS_SINGLE_CHORUS_COMM_TCP_TRANSPORT_HPP
/// `TcpTransport`: links over TCP. Between two ranks there are two connections: one carries pieces, the other one news
/// about the rank itself, which must not wait behind data: that it leaves, gives up, or has long waited for another
/// one. A process that dies closes both; the others see the news connection end without a goodbye.

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {

struct PieceHead {
  Envelope envelope;
  std::uint64_t bytes = 0;
};

struct News {
  enum Kind : std::uint32_t { leaves, gives_up, waits };
  std::uint32_t kind = leaves;
  std::int32_t other = -1;  ///< for whom it waits
  std::array<char, 1016> reason{};
};

}  // namespace detail

class TcpTransport final : public Transport {
 public:
  static constexpr std::size_t slot_bytes = 128 * 1024, slots = 8;

  /// The connections to one peer, with what is half sent and half received.
  struct Peer {
    Socket data, news;
    std::unique_ptr<std::byte[]> out, in;  ///< out: a queue of slots; in: one piece. Allocated at first use
    std::size_t first = 0, used = 0;       ///< slots that wait to be sent
    std::size_t sent = 0;                  ///< bytes of the first of them that have gone
    detail::PieceHead head;                ///< of the piece that comes in
    std::size_t received = 0;              ///< bytes of it that have come, with its head
    detail::News last;                     ///< the news that come in
    std::size_t news_received = 0;
    bool left = false;
    int waits_for = -1;
  };

  using Peers = std::array<Peer, max_ranks>;

  TcpTransport(int me, int ranks, std::chrono::milliseconds limit) : Transport(me, ranks, slot_bytes, slots, limit) {}
  ~TcpTransport() override { tell_all({.kind = detail::News::leaves}); }

  /// By rank; to be connected before anything else is called. This rank's own entry stays empty.
  Peers& peers() { return peers_; }

  std::byte* acquire(int peer) override {
    auto& p = at(peer);
    if (!p.out) p.out = std::make_unique<std::byte[]>(slots * slot_stride + alignment);
    await(peer, Goal::room);
    return payload(p, (p.first + p.used) % slots);
  }

  void publish(int peer, const Envelope& envelope, std::size_t bytes) override {
    auto& p = at(peer);
    new (payload(p, (p.first + p.used) % slots) - sizeof(detail::PieceHead)) detail::PieceHead{envelope, bytes};
    ++p.used;
    push(peer);
  }

  Piece receive(int peer) override {
    auto& p = at(peer);
    if (!p.in) p.in = std::make_unique<std::byte[]>(slot_bytes + alignment);
    await(peer, Goal::piece);
    return {p.head.envelope, aligned(p.in.get()), p.head.bytes};
  }
  void release(int peer) override { at(peer).received = 0; }

  void flush() override {
    for (int peer = 0; peer < size; ++peer) await(peer, Goal::sent);
  }

  void check() override { read_news(nobody); }

  void abort(const std::string& why) noexcept override {
    detail::News news{.kind = detail::News::gives_up};
    std::copy_n(why.data(), std::min(why.size(), news.reason.size() - 1), news.reason.data());
    tell_all(news);
  }

 private:
  static constexpr int nobody = -1;
  static constexpr std::size_t alignment = 64;
  static constexpr std::size_t slot_stride = alignment + slot_bytes;  // a head lies right in front of its data

  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }

  static std::byte* aligned(std::byte* p) {
    return p + (alignment - reinterpret_cast<std::uintptr_t>(p) % alignment) % alignment;
  }
  static std::byte* payload(const Peer& p, std::size_t slot) {
    return aligned(p.out.get()) + slot * slot_stride + alignment;
  }

  /// Sends what goes without waiting.
  void push(int peer) {
    auto& p = at(peer);
    while (p.used != 0) {
      const auto* head = reinterpret_cast<const detail::PieceHead*>(payload(p, p.first) - sizeof(detail::PieceHead));
      const auto all = sizeof *head + head->bytes;
      const auto n = p.data.try_send(std::span(reinterpret_cast<const std::byte*>(head), all).subspan(p.sent));
      if (n < 0) lost(peer);
      if (n == 0) return;
      p.sent += static_cast<std::size_t>(n);
      if (p.sent < all) continue;
      p.sent = 0;
      p.first = (p.first + 1) % slots;
      --p.used;
    }
  }

  /// Receives what is there; true once a whole piece is.
  bool pull(int peer) {
    auto& p = at(peer);
    while (true) {
      const bool in_head = p.received < sizeof p.head;
      if (!in_head && p.head.bytes > slot_bytes)
        fail<LinkError>("rank ", peer, " announced a piece of ", p.head.bytes, " bytes, at most ", slot_bytes,
                        " are possible");
      if (!in_head && p.received == sizeof p.head + p.head.bytes) return true;
      const auto rest = in_head ? bytes_of(p.head).subspan(p.received)
                                : std::span(aligned(p.in.get()), p.head.bytes).subspan(p.received - sizeof p.head);
      const auto n = p.data.try_receive(rest);
      if (n < 0) lost(peer);
      if (n == 0) return false;
      p.received += static_cast<std::size_t>(n);
    }
  }

  /// The data connection has ended: the news may say why, or end too.
  [[noreturn, gnu::cold]] void lost(int peer) {
    for (int i = 0; i < 10; ++i) {
      read_news(peer);
      poll(nullptr, 0, 10);
    }
    fail<LinkError>("rank ", peer, " has closed its connection");
  }

  enum class Goal { room, piece, sent };
  bool reached(int peer, Goal goal) {
    if (goal == Goal::piece) return pull(peer);
    return at(peer).used < (goal == Goal::room ? slots : 1);
  }

  /// Returns once `goal` is reached; meanwhile sends what other peers have room for, and hears the news.
  void await(int peer, Goal goal) {
    if (!reached(peer, goal)) wait(peer, goal);
  }
  void wait(int peer, Goal goal) {
    const auto start = Clock::now(), deadline = start + timeout, alarm = start + timeout * 9 / 10;
    bool alarmed = false;
    std::array<pollfd, 2 * max_ranks> events;
    do {
      std::size_t n = 0;
      for (int who = 0; who < size; ++who) {
        auto& p = at(who);
        const int interest = (who == peer && goal == Goal::piece ? POLLIN : 0) | (p.used != 0 ? POLLOUT : 0);
        events[n++] = {interest != 0 ? p.data.fd() : -1, static_cast<short>(interest), 0};
        events[n++] = {p.left ? -1 : p.news.fd(), POLLIN, 0};
      }
      poll(events.data(), n, milliseconds_until(alarmed ? deadline : alarm));
      for (int who = 0; who < size; ++who) push(who);
      if (reached(peer, goal)) break;
      read_news(peer);
      if (Clock::now() >= deadline) fail<LinkTimeout>("waited ", timeout.count(), " ms for ", chain(peer));
      if (Clock::now() >= alarm && !alarmed) {
        alarmed = true;
        tell_all({.kind = detail::News::waits, .other = peer});
      }
    } while (!reached(peer, goal));
    if (alarmed) tell_all({.kind = detail::News::waits, .other = nobody});
  }

  /// Throws if a rank has died or given up, or if `needed` has left.
  void read_news(int needed) {
    for (int who = 0; who < size; ++who) {
      auto& p = at(who);
      while (who != rank && !p.left) {
        const auto n = p.news.try_receive(bytes_of(p.last).subspan(p.news_received));
        if (n < 0) fail<LinkError>("rank ", who, " is gone: its process has ended, or the network to it");
        if (n == 0) break;
        p.news_received += static_cast<std::size_t>(n);
        if (p.news_received < sizeof p.last) continue;
        p.news_received = 0;
        p.last.reason.back() = 0;
        if (p.last.kind == detail::News::gives_up) fail<LinkError>("rank ", who, " gave up: ", p.last.reason.data());
        if (p.last.kind == detail::News::leaves) p.left = true;
        if (p.last.kind == detail::News::waits) p.waits_for = p.last.other;
      }
    }
    if (needed != nobody && at(needed).left && !at(needed).data.has_data())
      fail<LinkError>("rank ", needed, " has left the group");
  }

  void tell_all(detail::News news) noexcept {
    for (int who = 0; who < size; ++who)
      if (at(who).news) at(who).news.try_send(bytes_of(news));
  }

  /// `rank 2, which waits for rank 1, which ...`: the last one is the one to look at.
  [[gnu::cold]] std::string chain(int who) {
    auto text = cat("rank ", who);
    for (int length = 0; length < size; ++length) {
      who = at(who).waits_for;
      if (who < 0 || who >= size) return text + ", which is stopped or busy elsewhere";
      if (who == rank) return text + ", which waits for this rank";
      text += cat(", which waits for rank ", who);
    }
    return text;
  }

  Peers peers_;
};

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_TCP_TRANSPORT_HPP

namespace chorus::inline CHORUS_ABI::comm {

namespace detail {
struct MeshHello {
  std::uint64_t key = 0;
  std::int32_t rank = -1, lane = 0;
};
}  // namespace detail

/// Fills in the sockets of `peers[rank]` for all other ranks. Every rank connects to those before it and accepts those
/// after it. Throws CommError, which names a rank that cannot be reached.
[[gnu::cold]] inline void connect_all(const World& world, const Meeting& meeting, TcpTransport::Peers& peers) {
  const auto deadline = Clock::now() + world.timeout;
  const auto socket_of = [&](int rank, int lane) -> Socket& {
    auto& peer = peers[static_cast<std::size_t>(rank)];
    return lane == 0 ? peer.data : peer.news;
  };

  for (int rank = 0; rank < world.rank; ++rank) {
    const auto& address = meeting.addresses[static_cast<std::size_t>(rank)];
    for (int lane = 0; lane < 2; ++lane) {
      auto& socket = socket_of(rank, lane) = Socket::connect(address, deadline);
      const int error = errno;
      detail::MeshHello hello{meeting.key, world.rank, lane};
      check<CommError>(socket && socket.send_all(bytes_of(hello), deadline), "rank ", world.rank,
                       ": cannot connect to rank ", rank, " at ", address, ": ", std::strerror(error));
    }
  }

  Guests guests(meeting.listener, sizeof(detail::MeshHello));
  for (int missing = (world.size - 1 - world.rank) * 2; missing > 0;) {
    auto guest = guests.next(deadline);
    if (!guest.socket) break;
    detail::MeshHello hello;
    std::memcpy(&hello, guest.hello.data(), sizeof hello);
    if (hello.key != meeting.key || hello.rank <= world.rank || hello.rank >= world.size) continue;
    auto& place = socket_of(hello.rank, hello.lane);
    if (!place) --missing;
    place = std::move(guest.socket);
  }
  for (int rank = 0; rank < world.size; ++rank) {
    if (rank == world.rank) continue;
    check<TimeoutError>(socket_of(rank, 0) && socket_of(rank, 1), "rank ", world.rank, ": rank ", rank,
                        " did not connect within ", world.timeout.count(), " ms");
    socket_of(rank, 0).no_delay();
    socket_of(rank, 1).no_delay();
  }
}

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_MESH_HPP

namespace chorus::inline CHORUS_ABI::comm {

/// Meets the other ranks at world.master_addr:master_port and returns this rank's communicator. Blocks until all have
/// come. Throws UsageError for a World that makes no sense; CommError when the port is in use, a rank is refused, or
/// shared memory was asked for and cannot be had; TimeoutError, naming the missing ranks, after world.timeout. Takes
/// over world.listen_fd. A group of one needs no address and opens no socket.
[[gnu::cold]] inline std::unique_ptr<RingCommunicator> connect(const World& world,
                                                               TransportKind kind = TransportKind::automatic) {
  check<UsageError>(world.size >= 1 && world.size <= max_ranks, "connect: world size is ", world.size,
                    ", expected 1 to ", max_ranks);
  check<UsageError>(world.rank >= 0 && world.rank < world.size, "connect: rank ", world.rank, " is not in [0, ",
                    world.size, ")");
  check<UsageError>(world.timeout.count() > 0, "connect: timeout is ", world.timeout.count(),
                    " ms, expected more than 0");
  if (world.size == 1) {
    const auto unused = Socket::adopt(world.listen_fd);
    return std::make_unique<RingCommunicator>();
  }
  check<UsageError>((world.rank == 0 && world.listen_fd >= 0) || (world.master_port > 0 && world.master_port < 65536),
                    "connect: master_port is ", world.master_port, ", expected 1 to 65535");
  auto meeting = world.rank == 0 ? detail::Host(world, kind).meet() : detail::join(world, kind);
  std::unique_ptr<Transport> link;
  if (meeting.kind == TransportKind::shm) {
    link.reset(new ShmTransport(std::move(meeting.region), world.rank, world.size, world.timeout));
  } else {
    const auto tcp = new TcpTransport(world.rank, world.size, world.timeout);
    link.reset(tcp);
    connect_all(world, meeting, tcp->peers());
  }
  return std::make_unique<RingCommunicator>(std::move(link));
}

}  // namespace chorus::inline CHORUS_ABI::comm
#endif  // CHORUS_SINGLE_CHORUS_COMM_CONNECT_HPP

// <chorus/parallel/world_from_environment.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_WORLD_FROM_ENVIRONMENT_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_WORLD_FROM_ENVIRONMENT_HPP
/// Which rank this process is, when a launcher has started it: torchrun, mpirun (Open MPI, MPICH) or srun.

namespace chorus::inline CHORUS_ABI {

namespace detail {

/// The value of an environment variable, or a null pointer; an empty one counts as not set.
inline const char* env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

/// A whole number in [low, high] from the environment, or nothing where the variable is not set.
inline std::optional<int> env_number(const char* name, int low, int high) {
  const char* text = env(name);
  if (text == nullptr) return std::nullopt;
  int number = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, number);
  if (error != std::errc{} || stop != end || number < low || number > high) {
    usage_error("environment variable %s must be a whole number from %d to %d, got '%s'", name, low, high, text);
  }
  return number;
}

/// What a launcher says about this process, before an address is known.
struct Seat {
  int rank, size;
  std::optional<int> local_rank, local_size;
  std::string job = {};  ///< the same in all ranks of a job, another one in another job
};

inline constexpr int most_ranks = 1 << 20;

/// Reads the variables of one launcher; nothing if neither rank nor size is there.
inline std::optional<Seat> read_seat(const char* rank_name, const char* size_name, const char* local_rank_name,
                                     const char* local_size_name) {
  const auto rank = env_number(rank_name, 0, most_ranks), size = env_number(size_name, 1, most_ranks);
  if (!rank && !size) return std::nullopt;
  if (!rank || !size) {
    usage_error("environment variable %s is set but %s is not: a launcher sets both", rank ? rank_name : size_name,
                rank ? size_name : rank_name);
  }
  if (*rank >= *size) {
    usage_error("environment variable %s is %d, but %s is %d: ranks count from 0", rank_name, *rank, size_name, *size);
  }
  return Seat{*rank, *size, env_number(local_rank_name, 0, most_ranks), env_number(local_size_name, 1, most_ranks)};
}

/// mpirun or srun: a rank and a size, and something that tells jobs apart.
inline std::optional<Seat> seat_of_mpi_or_slurm() {
  if (auto seat = read_seat("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                            "OMPI_COMM_WORLD_LOCAL_SIZE")) {
    const char* job = env("PMIX_NAMESPACE");
    seat->job = job != nullptr ? job : format("%d", getppid());
    return seat;
  }
  // srun sets PMI_* too, for a single interactive shell as well; MPICH's mpirun alone gives the place in the host.
  auto seat = read_seat("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  if (seat && (seat->size > 1 || seat->local_size)) {
    seat->job = format("%d", getppid());
    return seat;
  }
  // A batch script or an salloc shell has SLURM_NTASKS too; only what srun itself started has a step.
  const char* job = env("SLURM_JOB_ID");
  const char* step = env("SLURM_STEP_ID");
  const char* size_name = env("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  if (!env("SLURM_PROCID") || (job && !step && !env("SLURM_STEP_NUM_TASKS"))) return std::nullopt;
  seat = read_seat("SLURM_PROCID", size_name, "SLURM_LOCALID", "");
  if (seat->size == 1) return std::nullopt;
  const char* hosts_name = env("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES";
  if (env_number(hosts_name, 1, most_ranks).value_or(1) == 1) seat->local_size = seat->size;
  seat->job = format("%s.%s", job ? job : format("%d", getppid()).c_str(), step ? step : "0");
  return seat;
}

/// A port in [20000, 32000), below the range that systems give out by themselves; FNV-1a of the job's name.
inline int port_of_job(std::string_view job) {
  std::uint32_t hash = 2166136261u;
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return 20000 + static_cast<int>(hash % 12000u);
}

}  // namespace detail

/// The world that a launcher has put this process in, or nothing where none has.
///
/// - torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; also LOCAL_RANK and LOCAL_WORLD_SIZE. Where torchrun itself
///   listens on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True), ranks meet at MASTER_PORT + 1.
/// - mpirun (Open MPI: OMPI_COMM_WORLD_*; MPICH: PMI_RANK, PMI_SIZE) and srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS; only
///   where srun started several tasks). MASTER_ADDR and MASTER_PORT count here too. Without them the ranks of one host
///   meet on loopback at a port made from the job's id (20000 to 31999); on several hosts they must be set.
/// CHORUS_RENDEZVOUS_FD, set by chorus' own launcher, is a socket that already listens there.
/// Throws UsageError for a variable that is missing or malformed.
inline std::optional<comm::World> world_from_environment() {
  using namespace detail;
  const bool torchrun = env("RANK") || env("WORLD_SIZE");
  const auto seat =
      torchrun ? read_seat("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") : seat_of_mpi_or_slurm();
  if (!seat) return std::nullopt;

  const char* address = env("MASTER_ADDR");
  const auto port = env_number("MASTER_PORT", 1, 65535);
  if ((!address || !port) && seat->size > 1) {
    if (torchrun) {
      usage_error("environment variables RANK and WORLD_SIZE are set but %s is not: where do the ranks meet?",
                  address ? "MASTER_PORT" : "MASTER_ADDR");
    }
    if (seat->local_size != seat->size) {
      usage_error("the launcher started ranks on several hosts: set MASTER_ADDR (rank 0's host) and MASTER_PORT");
    }
  }

  comm::World world;
  world.rank = seat->rank;
  world.size = seat->size;
  world.master_addr = address ? address : "127.0.0.1";
  world.master_port = port.value_or(port_of_job(seat->job));
  const bool loopback = world.master_addr.starts_with("127.") || world.master_addr == "localhost";
  world.local_rank = seat->local_rank.value_or(seat->rank);
  world.local_size = seat->local_size.value_or(loopback ? seat->size : 1);
  const char* agent_store = env("TORCHELASTIC_USE_AGENT_STORE");
  if (torchrun && port && agent_store && std::string_view(agent_store) == "True") {
    if (*port == 65535) usage_error("MASTER_PORT is 65535, but ranks meet at the port above torchrun's own");
    world.master_port = *port + 1;
  }
  if (world.rank == 0) world.listen_fd = env_number("CHORUS_RENDEZVOUS_FD", 3, most_ranks).value_or(-1);
  return world;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_WORLD_FROM_ENVIRONMENT_HPP

namespace chorus::inline CHORUS_ABI {

namespace detail {
/// The whole of `text` as a number; throws UsageError that names `what` and says what was got.
template <class Number>
Number to_number(const char* what, std::string_view text) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc{} || stop != end) {
    const char* kind = std::is_floating_point_v<Number> ? "number" : "whole number";
    const char* range = std::is_unsigned_v<Number> ? " of at least 0" : "";
    usage_error("%s must be a %s%s, got '%.*s'", what, kind, range, static_cast<int>(text.size()), text.data());
  }
  return number;
}
}  // namespace detail

/// The options of a command line: `--name value`, `--name=value`, and flags `--name`. What follows `--` is left alone.
/// The last one counts where an option is repeated. A value that starts with `--` has to be written `--name=--value`.
class Arguments {
 public:
  Arguments() = default;
  /// `argv` is kept, not copied.
  Arguments(int argc, const char* const* argv) : argv_(argv) {
    while (count_ + 1 < argc && std::string_view(argv[count_ + 1]) != "--") ++count_;
    used_.resize(static_cast<std::size_t>(count_));
  }

  /// The value of `--name`, or nothing where the option is not given; a missing value is a UsageError.
  std::optional<std::string_view> find(const char* name) {
    std::optional<std::string_view> value;
    for (int i = 0; i < count_; ++i) {
      const char* rest = after_name(i, name);
      if (rest == nullptr) continue;
      use(i);
      if (*rest == '=') {
        value = rest + 1;
      } else {
        if (i + 1 == count_ || word(i + 1).starts_with("--")) detail::usage_error("option --%s needs a value", name);
        value = word(i + 1);
      }
    }
    return value;
  }

  /// Whether `--name` is given.
  bool has(const char* name) {
    bool found = false;
    for (int i = 0; i < count_; ++i) {
      const char* rest = after_name(i, name);
      if (rest == nullptr) continue;
      use(i);
      if (*rest == '=') detail::usage_error("option --%s takes no value, got '%s'", name, rest + 1);
      found = true;
    }
    return found;
  }

  /// The options that nobody has asked for so far, each after a blank.
  std::string unused() const {
    std::string out;
    for (int i = 0; i < count_; ++i) {
      if (used_[static_cast<std::size_t>(i)] || !word(i).starts_with("--")) continue;
      out += ' ';
      out.append(word(i));
    }
    return out;
  }

 private:
  std::string_view word(int i) const { return argv_[i + 1]; }
  void use(int i) { used_[static_cast<std::size_t>(i)] = 1; }
  /// What follows `--name` in word i: nothing or `=value`; a null pointer where that is another word.
  const char* after_name(int i, const char* name) const {
    const std::size_t length = std::strlen(name);
    const char* text = argv_[i + 1];
    if (std::strncmp(text, "--", 2) != 0 || std::strncmp(text + 2, name, length) != 0) return nullptr;
    const char* rest = text + 2 + length;
    return *rest == '\0' || *rest == '=' ? rest : nullptr;
  }

  const char* const* argv_ = nullptr;
  int count_ = 0;
  std::vector<char> used_;
};

/// What `launch` has to know; what is left open has a default.
struct LaunchOptions {
  std::optional<int> devices;                        ///< devices of this process, or processes under DDP
  std::uint64_t seed = 0;                            ///< of everything random, initial parameters among it
  std::optional<std::chrono::milliseconds> timeout;  ///< of every wait for another rank; else CHORUS_TIMEOUT, else 60 s

  static constexpr int most_devices = comm::max_ranks;

  /// Reads `--devices N`, `--seed S`, `--timeout SECONDS`.
  static LaunchOptions from(Arguments& arguments) {
    LaunchOptions options;
    if (const auto text = arguments.find("devices")) options.devices = detail::to_number<int>("--devices", *text);
    if (const auto text = arguments.find("seed")) options.seed = detail::to_number<std::uint64_t>("--seed", *text);
    if (const auto text = arguments.find("timeout")) options.timeout = seconds("--timeout", *text);
    return options;
  }

  /// Throws UsageError for what makes no sense, and fills in the timeout.
  void complete() {
    if (devices && (*devices < 1 || *devices > most_devices)) {
      detail::usage_error("--devices must be from 1 to %d, got %d", most_devices, *devices);
    }
    if (!timeout) {
      const char* text = detail::env("CHORUS_TIMEOUT");
      timeout = seconds("environment variable CHORUS_TIMEOUT", text ? text : "60");
    }
    if (timeout->count() <= 0) detail::usage_error("the timeout must be above 0 ms, got %ld", long{timeout->count()});
  }

 private:
  static std::chrono::milliseconds seconds(const char* what, std::string_view text) {
    const double value = detail::to_number<double>(what, text);
    if (!(value >= 0.001 && value <= 1e6)) {
      detail::usage_error("%s must be a number of seconds from 0.001 to 1000000, got %g", what, value);
    }
    return std::chrono::milliseconds(static_cast<std::int64_t>(value * 1000));
  }
};

/// Devices where nobody asked for a number: 2, or 1 where this process may use only one core.
inline int default_devices() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? std::clamp(CPU_COUNT(&cores), 1, 2) : 2;
}

/// One process of a program: what `launch` hands to the body. Without a launcher, or where the policy needs no
/// processes, it is rank 0 of 1.
class Run {
 public:
  Run(Arguments arguments, LaunchOptions options, comm::World world = {})
      : arguments_(std::move(arguments)), options_(options), world_(std::move(world)) {
    options_.complete();
    world_.timeout = *options_.timeout;
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// The value of `--name value` or `--name=value`. Throws UsageError where it is missing.
  std::string option(const char* name) {
    const auto value = arguments_.find(name);
    if (!value) detail::usage_error("option --%s is missing: give it as --%s VALUE", name, name);
    return std::string(*value);
  }
  std::string option(const char* name, const char* fallback) {
    return std::string(arguments_.find(name).value_or(fallback));
  }
  /// A number, of the type of `fallback`: `run.option("lr", 0.01)`. Throws UsageError where the value is none.
  template <class Number>
    requires std::is_arithmetic_v<Number>
  Number option(const char* name, Number fallback) {
    const auto value = arguments_.find(name);
    return value ? detail::to_number<Number>(detail::format("option --%s", name).c_str(), *value) : fallback;
  }
  /// Whether `--name` is given.
  bool flag(const char* name) { return arguments_.has(name); }

  int rank() const { return world_.rank; }
  int world_size() const { return world_.size; }
  int local_rank() const { return world_.local_rank; }
  /// Whether this is rank 0, the one that prints and writes files.
  bool is_main() const { return world_.rank == 0; }

  /// Devices of the whole run: ranks where there are several, else `--devices`, else `fallback`.
  int devices(int fallback = default_devices()) const {
    return world_.size > 1 ? world_.size : options_.devices.value_or(fallback);
  }
  std::uint64_t seed() const { return options_.seed; }

  const comm::World& world() const { return world_; }
  /// The connection to the other ranks, made at the first call, in which all of them have to take part.
  /// Throws CommError where they don't meet.
  auto& communicator() {
    if (!communicator_) {
      communicator_ = comm::connect(world_);
      world_.listen_fd = -1;  // it took that over
    }
    return *communicator_;
  }

  /// Options of the command line that the program has not asked for, each after a blank.
  std::string unused_options() const { return arguments_.unused(); }

 private:
  Arguments arguments_;
  LaunchOptions options_;
  comm::World world_;
  decltype(comm::connect(std::declval<const comm::World&>())) communicator_;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_RUN_HPP

// <chorus/parallel/supervisor.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SUPERVISOR_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SUPERVISOR_HPP
/// Starts the ranks of one machine as processes and stands by them: the first that fails is named and ends all, signals
/// are passed on, and nobody outlives the supervisor. `tether.hpp` is the rank's end of this.

#include <spawn.h>
#include <sys/wait.h>

// <chorus/parallel/signal_pipe.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SIGNAL_PIPE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SIGNAL_PIPE_HPP
/// File descriptors with an owner, and signals as bytes in a pipe: what a process that waits for others needs.

namespace chorus::inline CHORUS_ABI::detail {

inline std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? format("SIG%s", name) : format("signal %d", signal);
}

[[noreturn]] inline void system_error(const char* what, int error = errno) {
  throw Error(format("launch: %s: %s", what, std::strerror(error)));
}

/// A file descriptor with an owner. It is closed on exec, and is none of the standard three even where one of them was
/// closed.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd, const char* what) {
    if (fd < 0) system_error(what);
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    const int error = errno;
    close(fd);
    if (fd_ < 0) system_error(what, error);
  }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  void reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

struct Pipe {
  Fd read_end, write_end;
  Pipe() {
    int ends[2] = {-1, -1};
    const bool ok = pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0;
    read_end = Fd(ok ? ends[0] : -1, "pipe");
    write_end = Fd(ends[1], "pipe");
  }
};

/// Signals as numbers in a pipe, from construction to destruction: SIGCHLD and those that ask the program to end.
/// A SIGHUP that was ignored (nohup) stays ignored.
class SignalPipe {
 public:
  using Time = std::chrono::steady_clock::time_point;

  SignalPipe() {
    write_end() = pipe_.write_end.get();
    struct sigaction action {};
    action.sa_handler = [](int signal) {
      const int error = errno;
      const auto byte = static_cast<unsigned char>(signal);
      [[maybe_unused]] const auto written = write(write_end(), &byte, 1);
      errno = error;
    };
    action.sa_flags = SA_RESTART;
    sigset_t ours;
    sigemptyset(&ours);
    for (std::size_t i = 0; i < std::size(watched); ++i) {
      sigaction(watched[i], nullptr, &before_[i]);
      if (watched[i] == SIGHUP && before_[i].sa_handler == SIG_IGN) continue;
      sigaction(watched[i], &action, nullptr);
      sigaddset(&ours, watched[i]);
    }
    pthread_sigmask(SIG_UNBLOCK, &ours, &mask_before_);
  }
  ~SignalPipe() {
    for (std::size_t i = 0; i < std::size(watched); ++i) sigaction(watched[i], &before_[i], nullptr);
    pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
  }
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  /// The next signal, or 0 at the deadline.
  int wait(std::optional<Time> deadline) {
    while (true) {
      unsigned char signal = 0;
      if (read(pipe_.read_end.get(), &signal, 1) == 1) return signal;
      int milliseconds = -1;
      if (deadline) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - std::chrono::steady_clock::now());
        if (left.count() <= 0) return 0;
        milliseconds = static_cast<int>(left.count());
      }
      pollfd entry{pipe_.read_end.get(), POLLIN, 0};
      poll(&entry, 1, milliseconds);
    }
  }

 private:
  static constexpr int watched[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT};
  static int& write_end() {
    static int fd = -1;
    return fd;
  }

  Pipe pipe_;
  struct sigaction before_[std::size(watched)] {};
  sigset_t mask_before_{};
};

}  // namespace chorus::inline CHORUS_ABI::detail
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SIGNAL_PIPE_HPP

// <chorus/parallel/tether.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_TETHER_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_TETHER_HPP
/// The rank's end of the line between a rank and the supervisor that started it.

#include <sys/prctl.h>

namespace chorus::inline CHORUS_ABI {

/// Exit status of a rank that failed only because it lost another one (EX_PROTOCOL of sysexits.h).
inline constexpr int lost_peer_status = 76;

/// A rank's tie to the supervisor that started it: the rank ends when the supervisor does, and hands it the reason when
/// it fails itself. In a process that no supervisor started it is tied to nothing.
class Tether {
 public:
  Tether() {
    const auto supervisor = detail::env_number("CHORUS_SUPERVISOR_PID", 1, INT32_MAX);
    const auto report_fd = detail::env_number("CHORUS_REPORT_FD", 3, detail::most_ranks);
    if (!supervisor || !report_fd) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != *supervisor) _exit(128 + SIGKILL);  // it ended before the line above
    // What this process starts in turn is no rank of that supervisor.
    unsetenv("CHORUS_SUPERVISOR_PID");
    unsetenv("CHORUS_REPORT_FD");
    fcntl(*report_fd, F_SETFD, FD_CLOEXEC);
    report_fd_ = *report_fd;
  }

  /// Says why this rank fails: to the supervisor, which tells the first cause from those that follow from it, else on
  /// stderr as `chorus: prefix message`.
  void report(std::string_view prefix, std::string_view message) const {
    // A pipe holds 64 KiB, and nobody reads it before this process has ended.
    message = message.substr(0, 60'000);
    if (report_fd_ < 0 || write(report_fd_, message.data(), message.size()) < 0) {
      detail::say(std::string(prefix).append(message));
    }
  }

 private:
  int report_fd_ = -1;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_TETHER_HPP

namespace chorus::inline CHORUS_ABI {

/// The processes to start: `ranks` times the same program with the same arguments and torchrun's variables.
struct RankGroup {
  int ranks = 1;
  std::string program;                     ///< path of the executable
  char* const* argv = nullptr;             ///< its arguments, ended by a null pointer
  std::chrono::milliseconds grace{3'000};  ///< between SIGTERM and SIGKILL
};

/// How a group ended.
struct GroupOutcome {
  int status = 0;        ///< 0, the exit status of the rank that failed first, or 128 + a signal's number
  int failed_rank = -1;  ///< the rank that failed first, -1 if none did
  int signal = 0;        ///< the signal that the supervisor itself was sent
};

namespace detail {

/// A socket that listens on a free port of loopback. It is opened before there are ranks, and handed to rank 0 open, so
/// that nobody can take the port in between.
class Rendezvous {
 public:
  Rendezvous() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket") {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    if (bind(fd(), plain, size) != 0 || listen(fd(), SOMAXCONN) != 0 || getsockname(fd(), plain, &size) != 0) {
      system_error("no port on loopback");
    }
    port_ = ntohs(address.sin_port);
  }
  int fd() const { return socket_.get(); }
  int port() const { return port_; }

 private:
  Fd socket_;
  int port_ = 0;
};

class Supervisor {
 public:
  explicit Supervisor(const RankGroup& group)
      : group_(group), ranks_(std::make_unique<Rank[]>(static_cast<std::size_t>(group.ranks))) {}
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;
  /// Where something threw half-way, nobody is left behind.
  ~Supervisor() {
    for (Rank& rank : ranks()) {
      if (!rank.running) continue;
      kill(rank.pid, SIGKILL);
      waitpid(rank.pid, nullptr, 0);
    }
  }

  GroupOutcome run() {
    start_all();
    while (running_ > 0) {
      const int signal = signals_.wait(deadline_);
      if (signal == SIGCHLD) {
        reap();
      } else if (signal != 0) {
        pass_on(signal);
      } else if (stage_ == Stage::watching) {
        judge();
      } else if (stage_ == Stage::stopping) {
        kill_all();
      } else {
        say(format("%d ranks did not end after SIGKILL; giving up on them", running_));
        for (Rank& rank : ranks()) rank.running = false;
        break;
      }
    }
    return outcome_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  enum class Stage { watching, stopping, killing };
  struct Rank {
    pid_t pid = -1;
    bool running = false;
    int wait_status = 0;
    Fd reports;  ///< what the rank has to say when it fails
  };

  std::span<Rank> ranks() { return {ranks_.get(), static_cast<std::size_t>(group_.ranks)}; }

  void start_all() {
    Rendezvous rendezvous;
    const Fd nothing(open("/dev/null", O_RDONLY | O_CLOEXEC), "/dev/null");
    for (int rank = 0; rank < group_.ranks; ++rank) start(rank, rendezvous, nothing.get());
  }

  void start(int rank, const Rendezvous& rendezvous, int nothing) {
    Pipe reports;
    const int report_fd = reports.write_end.get();
    const std::string ours[] = {
        format("RANK=%d", rank),
        format("LOCAL_RANK=%d", rank),
        format("WORLD_SIZE=%d", group_.ranks),
        format("LOCAL_WORLD_SIZE=%d", group_.ranks),
        "MASTER_ADDR=127.0.0.1",
        format("MASTER_PORT=%d", rendezvous.port()),
        "TORCHELASTIC_USE_AGENT_STORE=False",
        format("CHORUS_SUPERVISOR_PID=%d", getpid()),
        format("CHORUS_REPORT_FD=%d", report_fd),
        format("CHORUS_RENDEZVOUS_FD=%d", rendezvous.fd()),  // of use to rank 0 alone
    };
    std::vector<const char*> environment;
    for (const std::string& entry : ours) environment.push_back(entry.c_str());
    for (char** old = environ; *old != nullptr; ++old) {
      const std::size_t name = std::string_view(*old).find('=') + 1;
      bool replaced = false;
      for (const std::string& entry : ours) replaced |= std::strncmp(*old, entry.c_str(), name) == 0;
      if (!replaced) environment.push_back(*old);
    }
    environment.push_back(nullptr);

    // A descriptor that is copied onto itself stays open in the new program.
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, report_fd, report_fd);
    if (rank == 0) {
      posix_spawn_file_actions_adddup2(&files, rendezvous.fd(), rendezvous.fd());
    } else {
      posix_spawn_file_actions_adddup2(&files, nothing, STDIN_FILENO);
    }
    // Signals that we handle here are back at their default in a new program; nor may it inherit that we block any.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);

    pid_t pid = -1;
    const int error = posix_spawn(&pid, group_.program.c_str(), &files, &attributes, group_.argv,
                                  const_cast<char* const*>(environment.data()));
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) system_error(format("cannot start rank %d of %d", rank, group_.ranks).c_str(), error);
    ranks_[static_cast<std::size_t>(rank)] = {pid, true, 0, std::move(reports.read_end)};
    ++running_;
  }

  void reap() {
    for (Rank& rank : ranks()) {
      if (!rank.running || waitpid(rank.pid, &rank.wait_status, WNOHANG) != rank.pid) continue;
      rank.running = false;
      --running_;
      if (stage_ == Stage::watching && rank.wait_status != 0) suspect(rank);
    }
    if (stage_ == Stage::watching && suspect_ && (running_ == 0 || Clock::now() >= *deadline_)) judge();
  }

  /// How long to wait for a better explanation. A rank that lost another one may end before that other one does; and
  /// Ctrl-C reaches the ranks as soon as it reaches us.
  static Milliseconds patience(int wait_status) {
    if (WIFEXITED(wait_status)) return Milliseconds(WEXITSTATUS(wait_status) == lost_peer_status ? 1'000 : 0);
    const int signal = WTERMSIG(wait_status);
    return Milliseconds(signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT ? 50 : 0);
  }

  void suspect(const Rank& rank) {
    const auto better = patience(rank.wait_status);
    if (suspect_ && patience(suspect_->wait_status) <= better) return;
    const auto until = Clock::now() + better;
    suspect_ = &rank;
    if (!deadline_ || until < *deadline_) deadline_ = until;
  }

  /// Names the rank that failed first, and stops the others.
  void judge() {
    const int status = suspect_->wait_status;
    outcome_.failed_rank = static_cast<int>(suspect_ - ranks_.get());
    outcome_.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    const bool lost_peer = outcome_.status == lost_peer_status;
    if (const std::string report = read_report(*suspect_); !report.empty()) {
      const bool named = report.starts_with("rank ");  // as errors of a communicator are
      say(named ? report : format("rank %d: %s", outcome_.failed_rank, report.c_str()));
    }
    std::string line = format("rank %d (pid %d) ", outcome_.failed_rank, suspect_->pid);
    line += WIFSIGNALED(status)
                ? format("was killed by %s", signal_name(WTERMSIG(status)).c_str())
                : format("%s, exit status %d", lost_peer ? "lost touch with the others" : "failed", outcome_.status);
    for (const Rank& rank : ranks()) {
      if (!lost_peer || rank.running || rank.wait_status != 0) continue;
      line += format("; rank %d had ended before, exit status 0", static_cast<int>(&rank - ranks_.get()));
    }
    if (running_ == 1) line += "; stopping the other rank";
    if (running_ > 1) line += format("; stopping the other %d ranks", running_);
    say(line);
    stop(SIGTERM);
  }

  static std::string read_report(const Rank& rank) {
    std::string text;
    char part[4096];
    for (ssize_t size = 0; (size = read(rank.reports.get(), part, sizeof part)) > 0;) {
      text.append(part, static_cast<std::size_t>(size));
    }
    return text;
  }

  void pass_on(int signal) {
    if (stage_ != Stage::watching) return kill_all();  // asked twice
    outcome_.signal = signal;
    outcome_.status = 128 + signal;
    say(format("%s: stopping %d %s", signal_name(signal).c_str(), running_, running_ == 1 ? "rank" : "ranks"));
    stop(signal);
  }

  void stop(int signal) {
    stage_ = Stage::stopping;
    deadline_ = Clock::now() + group_.grace;
    kill_running(signal);
    kill_running(SIGCONT);  // a stopped process gets no other signal
  }
  void kill_all() {
    stage_ = Stage::killing;
    deadline_ = Clock::now() + Milliseconds(1'500);
    kill_running(SIGKILL);
  }
  void kill_running(int signal) {
    for (const Rank& rank : ranks()) {
      if (rank.running) kill(rank.pid, signal);
    }
  }

  const RankGroup& group_;
  SignalPipe signals_;
  std::unique_ptr<Rank[]> ranks_;
  int running_ = 0;
  Stage stage_ = Stage::watching;
  const Rank* suspect_ = nullptr;  ///< the best explanation so far
  std::optional<Clock::time_point> deadline_;
  GroupOutcome outcome_;
};

}  // namespace detail

/// Starts the ranks and waits until all have ended. When one fails, it is named on stderr, the others get SIGTERM and
/// after `grace` SIGKILL; SIGINT, SIGTERM, SIGHUP and SIGQUIT sent to this process are passed on in the same way.
/// Call it from a thread that lives as long as the ranks: they are killed when it ends.
/// Throws Error where a process cannot be started.
inline GroupOutcome supervise(const RankGroup& group) { return detail::Supervisor(group).run(); }

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SUPERVISOR_HPP

namespace chorus::inline CHORUS_ABI {

namespace detail {

struct Failure {
  int status;
  std::string message;
};

/// What the exception that is being handled means for the user. Call it inside a catch block.
inline Failure current_failure() {
  try {
    throw;
  } catch (const UsageError& error) {
    return {2, error.what()};
  } catch (const CommError& error) {
    return {lost_peer_status, error.what()};
  } catch (const std::bad_alloc&) {
    return {1, "out of memory"};
  } catch (const std::exception& error) {
    return {1, error.what()};
  } catch (...) {
    return {1, "an exception that is no std::exception"};
  }
}

/// The path of this program; /proc/self/exe itself would do, but `ps` would call every rank "exe".
inline std::string own_program() {
  char path[PATH_MAX];
  const auto size = readlink("/proc/self/exe", path, sizeof path);
  if (size > 0 && size < PATH_MAX) {
    std::string program(path, static_cast<std::size_t>(size));
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return "/proc/self/exe";
}

inline void print_launch_help(const char* program) {
  std::printf(
      "usage: %s [options]\n"
      "  --devices N        devices that share the work, 1 to %d (default: 2, or 1 on a single core). Under\n"
      "                     DistributedDataParallel this many processes are started; where torchrun, mpirun or srun\n"
      "                     has started them, their number counts instead.\n"
      "  --seed S           of everything random: initial parameters, order of samples, dropout (default: 0)\n"
      "  --timeout SECONDS  for every wait for another process (default: CHORUS_TIMEOUT, else 60)\n"
      "Other options are the program's own.\n",
      program, LaunchOptions::most_devices);
}

/// Joins the world of a launcher, or returns nothing. `devices` is what the user asked for, if anything.
inline std::optional<comm::World> join(std::optional<int> devices) {
  auto world = world_from_environment();
  if (!world) return world;
  unsetenv("CHORUS_RENDEZVOUS_FD");
  if (world->listen_fd >= 0) fcntl(world->listen_fd, F_SETFD, FD_CLOEXEC);
  if (devices && *devices != world->size && world->rank == 0) {
    say(format("--devices %d is ignored: the launcher has started %d %s", *devices, world->size,
               world->size == 1 ? "process" : "processes"));
  }
  return world;
}

/// Calls the body; what it throws becomes a message and a status. The Run, and with it the connection to other ranks,
/// lives on until the message is out: ranks that notice the loss come second.
template <class Body>
int call(Run& run, const Tether& tether, Body& body) {
  try {
    if constexpr (std::is_void_v<decltype(body(run))>) {
      body(run);
      return 0;
    } else {
      return body(run);
    }
  } catch (...) {
    const Failure failure = current_failure();
    tether.report(run.world_size() > 1 ? format("rank %d: ", run.rank()) : std::string(), failure.message);
    return failure.status;
  }
}

template <class Net, class Body>
int launch(char** argv, Arguments arguments, LaunchOptions options, Body& body) {
  options.complete();
  const Tether tether;
  comm::World world;
  if constexpr (Net::distributed) {
    auto joined = join(options.devices);
    if (!joined) return supervise({options.devices.value_or(default_devices()), own_program(), argv}).status;
    world = std::move(*joined);
  }
  manual_seed(options.seed);
  Run run(std::move(arguments), options, std::move(world));
  return call(run, tether, body);
}

}  // namespace detail

/// Runs `body(run)` under the policy `Net` with options that the program has read by itself; returns main's status.
/// `Net::distributed` says whether its devices are processes. If not, the body is called here. If so and torchrun,
/// mpirun or srun has started this process (see world_from_environment), it is called here as that rank; else
/// `options.devices` processes of this same program with the same arguments are started and watched. Call it once,
/// early in main: what stands before it happens in every process. It calls manual_seed(options.seed).
/// `body` takes a Run& and returns nothing or a status. What it throws is printed: UsageError gives status 2, CommError
/// 76, others 1; a rank killed by a signal gives 128 + its number, as does a signal to the program itself.
template <class Net, class Body>
int launch(int argc, char** argv, const LaunchOptions& options, Body&& body) {
  try {
    return detail::launch<Net>(argv, Arguments(argc, argv), options, body);
  } catch (...) {
    const auto failure = detail::current_failure();
    detail::say(failure.message);
    return failure.status;
  }
}

/// The same, with `--devices N`, `--seed S`, `--timeout SECONDS` and `--help` read from the command line. Other options
/// belong to the program, which asks for them with `run.option(name)`; one that it never asked for is named at the end.
template <class Net, class Body>
int launch(int argc, char** argv, Body&& body) {
  try {
    Arguments arguments(argc, argv);
    if (arguments.has("help")) {
      detail::print_launch_help(argc > 0 ? argv[0] : "program");
      return 0;
    }
    const auto options = LaunchOptions::from(arguments);
    auto checked = [&](Run& run) {
      if constexpr (std::is_void_v<decltype(body(run))>) {
        body(run);
      } else if (const int status = body(run); status != 0) {
        return status;
      }
      const std::string unused = run.unused_options();
      if (run.is_main() && !unused.empty()) detail::say("warning: the program has no use for" + unused);
      return 0;
    };
    return detail::launch<Net>(argv, arguments, options, checked);
  } catch (...) {
    const auto failure = detail::current_failure();
    detail::say(failure.message);
    return failure.status;
  }
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_LAUNCH_HPP

// <chorus/parallel/single_device.hpp>
#ifndef CHORUS_SINGLE_CHORUS_PARALLEL_SINGLE_DEVICE_HPP
#define CHORUS_SINGLE_CHORUS_PARALLEL_SINGLE_DEVICE_HPP
/// SingleDevice: the policy of one device, which the others must agree with.

namespace chorus::inline CHORUS_ABI {

template <class Model>
class SingleDevice : public Policy<Model> {
 public:
  static constexpr bool distributed = false;
  static constexpr const char* name = "single";

  explicit SingleDevice(Model model, std::uint64_t seed = initial_seed()) : Policy<Model>(std::move(model), seed) {}
  /// For `launch`: takes the seed from `run`.
  template <class Run>
    requires requires(Run& run) { run.seed(); }
  SingleDevice(Model model, Run& run) : SingleDevice(std::move(model), run.seed()) {}

  template <class... Inputs>
  auto operator()(const Inputs&... inputs) {
    const RandomScope scope(this->begin_forward());
    auto output = this->model_.forward(inputs...);
    this->end_forward();
    return output;
  }

  template <class Dataset>
  data::Sampler sampler(const Dataset& dataset, const SamplingOptions& options = {}) const {
    return data::Sampler(dataset.size(), {.shuffle = options.shuffle, .seed = this->seed(), .padding = options.padding});
  }
  int devices() const { return 1; }

  /// `value`, the mean over this process's `samples`, as the mean over the samples of all processes.
  double mean(double value, Index) const { return value; }
  /// Sums over all processes, in place.
  void sum(std::span<double>) const {}
  /// Whether `text` is the same in all processes.
  bool same_on_all_ranks(std::string_view) const { return true; }
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_PARALLEL_SINGLE_DEVICE_HPP

// <chorus/tensor/print.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_PRINT_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_PRINT_HPP
/// Tensors as text: nested brackets, long axes shortened.

namespace chorus::inline CHORUS_ABI {

/// `[[1, 2], [3, 4]]`; of an axis of over 8 entries the first and last 3 are shown.
template <Scalar T, int Rank>
void append(std::string& out, const Tensor<T, Rank, Cpu>& tensor) {
  if (!tensor.defined()) {
    out += "undefined";
  } else if constexpr (Rank == 0) {
    append(out, *tensor.data());
  } else {
    const Index size = tensor.size(0);
    out += '[';
    for (Index i = 0; i < size; ++i) {
      if (i != 0) out += ", ";
      if (size > 8 && i == 3) {
        out += "..., ";
        i = size - 3;
      }
      append(out, tensor[i]);
    }
    out += ']';
  }
}

template <class Stream, Scalar T, int Rank>
Stream& operator<<(Stream& stream, const Tensor<T, Rank, Cpu>& tensor) {
  stream << cat(tensor);
  return stream;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_PRINT_HPP

// <chorus/train/metrics.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TRAIN_METRICS_HPP
#define CHORUS_SINGLE_CHORUS_TRAIN_METRICS_HPP
/// The metrics log: one file of JSON lines (https://jsonlines.org) that tells how a training run went.

namespace chorus::inline CHORUS_ABI {

/// What a finished run reports. Per-device lists have an entry for each device or, under DDP, rank.
struct RunSummary {
  std::string policy;
  int devices = 1;
  double samples_per_second = 0;
  std::vector<std::uint64_t> bytes_sent_per_device;
  std::vector<std::uint64_t> peak_memory_bytes_per_device;
  std::string parameters_sha256;
};

namespace detail {

/// One flat JSON object. Numbers keep all their digits; NaN and infinities, which JSON lacks, become null.
class JsonObject {
 public:
  JsonObject& field(std::string_view key, std::string_view text) {
    next(key);
    append_string(text);
    return *this;
  }
  template <class Number>
    requires std::integral<Number> || std::floating_point<Number>
  JsonObject& field(std::string_view key, Number value) {
    next(key);
    append_number(value);
    return *this;
  }
  template <class Number>
  JsonObject& field(std::string_view key, const std::vector<Number>& values) {
    next(key);
    text_ += '[';
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i != 0) text_ += ',';
      append_number(values[i]);
    }
    text_ += ']';
    return *this;
  }

  std::string str() const { return text_ + '}'; }

 private:
  void next(std::string_view key) {
    if (text_.size() > 1) text_ += ',';
    append_string(key);
    text_ += ':';
  }

  template <class Number>
  void append_number(Number value) {
    if constexpr (std::floating_point<Number>) {
      if (!std::isfinite(value)) {
        text_ += "null";
        return;
      }
    }
    append(text_, value);
  }

  void append_string(std::string_view text) {
    constexpr std::string_view hex = "0123456789abcdef";
    text_ += '"';
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (byte < 0x20) {
        text_ += "\\u00";
        text_ += hex[byte >> 4];
        text_ += hex[byte & 15];
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_ = "{";
};

}  // namespace detail

/// Writes the events of a run to a file, a line each:
///
///     {"event":"step","step":0,"loss":2.3}
///     {"event":"epoch","epoch":0,"train_loss":1.9,"test_accuracy":0.61,"seconds":4.2}
///     {"event":"done","policy":"ddp","devices":2,"samples_per_second":...,"bytes_sent_per_device":[...],
///      "peak_memory_bytes_per_device":[...],"parameters_sha256":"..."}
///
/// An epoch is on disk when `epoch` returns. Only one process of a run writes: the others give no path.
class MetricsLog {
 public:
  /// Replaces the file at `path`; an empty path makes a log that writes nothing. Throws FileError.
  explicit MetricsLog(std::string path) : path_(std::move(path)) {
    if (path_.empty()) return;
    file_.reset(std::fopen(path_.c_str(), "we"));
    check<FileError>(file_ != nullptr, "metrics: cannot write '", path_, "': ", std::strerror(errno));
  }

  /// The loss of a training step, counted from 0 over the whole run.
  void step(Index step, double loss) {
    write(detail::JsonObject().field("event", "step").field("step", step).field("loss", loss));
  }

  /// An epoch's mean training loss, the accuracy after it in [0, 1], and how long it took.
  void epoch(int epoch, double train_loss, double test_accuracy, double seconds) {
    write(detail::JsonObject()
              .field("event", "epoch")
              .field("epoch", epoch)
              .field("train_loss", train_loss)
              .field("test_accuracy", test_accuracy)
              .field("seconds", seconds));
    flush();
  }

  /// The last line.
  void done(const RunSummary& run) {
    write(detail::JsonObject()
              .field("event", "done")
              .field("policy", run.policy)
              .field("devices", run.devices)
              .field("samples_per_second", run.samples_per_second)
              .field("bytes_sent_per_device", run.bytes_sent_per_device)
              .field("peak_memory_bytes_per_device", run.peak_memory_bytes_per_device)
              .field("parameters_sha256", run.parameters_sha256));
    flush();
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  void write(const detail::JsonObject& event) {
    if (file_ == nullptr) return;
    const std::string line = event.str() + '\n';
    if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size()) write_failed();
  }
  void flush() {
    if (file_ != nullptr && std::fflush(file_.get()) != 0) write_failed();
  }
  [[noreturn]] void write_failed() const {
    fail<FileError>("metrics: cannot write '", path_, "': ", std::strerror(errno));
  }

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_TRAIN_METRICS_HPP

// <chorus/train/progress.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TRAIN_PROGRESS_HPP
#define CHORUS_SINGLE_CHORUS_TRAIN_PROGRESS_HPP
/// A progress bar for a training loop: `for (int epoch : ch::progress(run, 10))`.

namespace chorus::inline CHORUS_ABI {

struct ProgressOptions {
  bool enabled = true;  ///< false: only count epochs, as all processes but one do
  int epochs = 1;       ///< epochs of the whole run
  int first_epoch = 0;  ///< where a resumed run goes on
  std::FILE* out = stderr;
};

/// A range of epoch numbers that tells how they go. On a terminal one line is redrawn at most ten times a second;
/// elsewhere a plain line is written every ten seconds. An epoch's end always writes one. Loss and samples a second
/// appear when the loop calls `step`; a loop that doesn't gets a line of time per epoch.
class Progress {
 public:
  explicit Progress(ProgressOptions options)
      : options_(options), terminal_(isatty(fileno(options.out)) == 1), epoch_(options.first_epoch) {
    check<UsageError>(options.epochs >= 0, "progress: epochs is ", options.epochs, ", expected 0 or more");
  }
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  class Iterator {
   public:
    using value_type = int;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(Progress& progress) : progress_(&progress) {}
    int operator*() const { return progress_->epoch_; }
    Iterator& operator++() {
      progress_->finish_epoch();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return progress_->epoch_ >= progress_->options_.epochs; }

   private:
    Progress* progress_;
  };

  Iterator begin() {
    start_epoch();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

  /// Tells that the batch number `step` of the `steps` in this epoch is done, with its mean `loss` over `samples`.
  void step(double loss, Index samples, Index step, Index steps) {
    if (!options_.enabled) return;
    loss_sum_ += loss * static_cast<double>(samples);
    samples_ += samples;
    const auto now = Clock::now();
    if (now - drawn_ < (terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10))) return;
    drawn_ = now;
    const double done = steps > 0 ? std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(steps)) : 0;
    write(head() + (terminal_ ? "  " + bar(done) : "") + "  step " + cat(step + 1, "/", steps) + rates() +
              eta(done > 0 ? seconds() / done : 0, seconds()),
          !terminal_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  void start_epoch() {
    loss_sum_ = 0;
    samples_ = 0;
    started_ = drawn_ = Clock::now();
  }

  void finish_epoch() {
    if (options_.enabled) {
      char time[32];
      std::snprintf(time, sizeof time, "  %.2f s", seconds());
      const bool last = epoch_ + 1 >= options_.epochs;
      write(head() + rates() + time + (last ? "" : eta(seconds(), seconds())), true);
    }
    ++epoch_;
    start_epoch();
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }

  std::string head() const { return cat("epoch ", epoch_ + 1, "/", options_.epochs); }

  static std::string bar(double done) {
    constexpr int width = 20;
    const int full = static_cast<int>(done * width);
    std::string cells(static_cast<std::size_t>(full), '=');
    if (full < width) cells += '>';
    cells.resize(width, ' ');
    return "[" + cells + "]";
  }

  // The mean loss of the epoch so far, and the throughput.
  std::string rates() const {
    if (samples_ == 0) return "";
    const auto count = static_cast<double>(samples_);
    char text[80];
    const double rate = count / std::max(seconds(), 1e-9);
    std::snprintf(text, sizeof text, "  loss %.4f  %.0f samples/s", loss_sum_ / count, rate);
    return text;
  }

  // What is left of the run, if each epoch takes as long as this one will and this one has run for `elapsed` seconds.
  std::string eta(double epoch_seconds, double elapsed) const {
    if (epoch_seconds <= 0) return "";
    const auto left = static_cast<long>(std::lround(epoch_seconds * (options_.epochs - epoch_) - elapsed));
    char text[48];
    if (left >= 3600) {
      std::snprintf(text, sizeof text, "  ETA %ld:%02ld:%02ld", left / 3600, left / 60 % 60, left % 60);
    } else {
      std::snprintf(text, sizeof text, "  ETA %ld:%02ld", left / 60, left % 60);
    }
    return text;
  }

  void write(const std::string& line, bool final) {
    std::fprintf(options_.out, "%s%s%s", terminal_ ? "\r\x1b[K" : "", line.c_str(), final ? "\n" : "");
    std::fflush(options_.out);
    line_open_ = !final;
  }

  // An exception left the loop: what it prints starts on a line of its own.
  void clear() {
    if (line_open_) std::fputc('\n', options_.out);
  }

  ProgressOptions options_;
  bool terminal_;
  bool line_open_ = false;
  int epoch_;
  double loss_sum_ = 0;
  Index samples_ = 0;
  Clock::time_point started_{}, drawn_{};
};

/// The epochs `first_epoch`, ..., `epochs - 1` of a run, shown by its main process alone.
template <class Run>
Progress progress(Run& run, int epochs, int first_epoch = 0) {
  return Progress({.enabled = run.is_main(), .epochs = epochs, .first_epoch = first_epoch});
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_TRAIN_PROGRESS_HPP

#endif  // CHORUS_SINGLE_CHORUS_CHORUS_HPP
