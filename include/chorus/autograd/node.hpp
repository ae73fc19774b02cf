#pragma once
/// Node: the record of an operation. The nodes behind a loss are the tape that backward walks.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <chorus/core/config.hpp>

namespace chorus {

template <class N>
class Ref;
struct BackwardOptions;

/// Whether this thread's operations record nodes.
inline bool& grad_enabled() {
  thread_local bool enabled = true;
  return enabled;
}

/// Turns recording on or off in this thread while it lives.
class GradMode {
 public:
  explicit GradMode(bool enabled) : before_(std::exchange(grad_enabled(), enabled)) {}
  ~GradMode() { grad_enabled() = before_; }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  bool before_;
};

/// Turns recording off in this thread while it lives, as torch.no_grad: for evaluation and for parameter updates.
class NoGrad : GradMode {
 public:
  NoGrad() : GradMode(false) {}
};

namespace detail {

/// Per-thread free lists for nodes, so that a steady training step calls no malloc. The lists are bounded: with
/// DataParallel some threads only allocate nodes and one only frees them.
class NodePool {
 public:
  static void* allocate(std::size_t bytes) {
    const std::size_t list = (bytes + granule - 1) / granule;
    if (list >= lists) return ::operator new(bytes);
    auto& [free, count] = of_thread().free_[list];
    if (free == nullptr) return ::operator new(list * granule);
    --count;
    return std::exchange(free, free->next);
  }
  static void release(void* data, std::size_t bytes) noexcept {
    const std::size_t list = (bytes + granule - 1) / granule;
    if (list >= lists) return ::operator delete(data);
    auto& [free, count] = of_thread().free_[list];
    if (count * list * granule >= most_bytes) return ::operator delete(data);
    free = new (data) Piece{free};
    ++count;
  }
  ~NodePool() {
    for (auto& [free, count] : free_)
      while (free != nullptr) ::operator delete(std::exchange(free, free->next));
  }

 private:
  struct Piece {
    Piece* next;
  };
  struct List {
    Piece* first = nullptr;
    std::size_t count = 0;
  };
  static constexpr std::size_t granule = 64, lists = 64, most_bytes = 1 << 20;  // most_bytes: of a list
  static NodePool& of_thread() {
    thread_local NodePool pool;
    return pool;
  }
  std::array<List, lists> free_{};
};

}  // namespace detail

class Node;

namespace detail {
class LossTerms;

/// An action on a node's gradient before it is passed on; a linked list.
struct GradientHook {
  virtual ~GradientHook() = default;
  virtual void run(Node& node) = 0;
  std::unique_ptr<GradientHook> next;
};

/// Number of live DetectAnomaly objects, over all threads.
inline std::atomic<int>& anomaly_detectors() {
  static std::atomic<int> count{0};
  return count;
}
inline bool detects_anomalies() { return anomaly_detectors().load(std::memory_order_relaxed) != 0; }

}  // namespace detail

/// One recorded operation, or a leaf. It also holds the gradient of its output while backward runs.
class Node {
 public:
  explicit Node(const char* operation, bool is_scalar = false)
      : operation_(operation), sequence_(next_sequence()), is_scalar_(is_scalar) {}
  virtual ~Node() {
    if (mean_ == Mean::uncounted_loss) delete count_;
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Sends this node's gradient to its inputs and clears it. Frees the saved tensors unless `keep`.
  virtual void backward(bool keep) = 0;
  /// Calls `visit` on each input that requires a gradient.
  virtual void for_each_input(void (*visit)(Node&, void*), void* context) const = 0;
  /// Called on a leaf when this backward has added its last contribution.
  virtual void gradient_is_final() {}
  virtual bool is_leaf() const { return false; }
  /// Whether backward sends gradients only to the inputs that `for_each_input` visits.
  virtual bool only_to_inputs() const { return true; }
  /// Calls `visit` on each far leaf: a leaf that is no input but may get a gradient from this backward.
  virtual void for_each_far_leaf(void (*)(Node&, void*), void*) const {}
  /// During backward: this leaf got a gradient from an operation that has it as a far leaf. The hooks of a far leaf
  /// without a gradient don't run.
  void set_reached() { reached_ = true; }
  /// Backward without the skipped far leaves; `grad` uses it to compute only some gradients.
  virtual void backward_to_wanted(bool keep) { backward(keep); }
  /// While a node is skipped, no gradient is sent to it; `grad` uses it to compute only some gradients.
  bool skipped() const { return skipped_; }
  void set_skipped(bool skipped) { skipped_ = skipped; }


  /// For a parameter: the version of its values, and its name in the model if known.
  virtual std::uint64_t numbers_version() const { return 0; }
  virtual const char* numbers_name() const { return ""; }

  /// Whether the gradient, if any, is free of NaN and infinity.
  virtual bool gradient_is_finite() const { return true; }
  virtual bool has_grad() const { return false; }
  /// For an operation: drops its gradient without passing it on.
  virtual void drop_grad() {}
  /// Hooks get the complete gradient of this node's value and may replace it before it is passed on.
  void add_gradient_hook(std::unique_ptr<detail::GradientHook> hook) {
    auto* last = &gradient_hooks_;
    while (*last) last = &(*last)->next;
    *last = std::move(hook);
  }
  void run_gradient_hooks() { run_gradient_hooks_on(*this); }
  /// Runs this node's hooks on the gradient of another node of the same type.
  void run_gradient_hooks_on(Node& node) {
    for (auto* hook = gradient_hooks_.get(); hook != nullptr; hook = hook->next.get()) hook->run(node);
  }
  bool has_gradient_hooks() const { return gradient_hooks_ != nullptr; }

  /// Whether the value is known to be a mean: the mean of a loss function, or a plain `mean(x)`.
  bool is_mean() const { return mean_ >= Mean::plain; }
  bool is_loss() const { return mean_ >= Mean::loss; }
  /// Whether it is known to be a sum along the first axis, or of all elements.
  bool is_sum() const { return mean_ == Mean::sum; }
  /// For a mean: the divisor of its sum, i.e. the number of counted tokens, the sum of their class weights, samples or
  /// elements; 0 if none counts. The gradient of the overall mean is the sum of the shares' gradients, each weighted by
  /// its share of the total divisor. 0 if the value is not known to be a mean. The first call may wait for a GPU.
  double mean_over() { return mean_ == Mean::uncounted_loss ? count_now() : is_mean() ? mean_over_ : 0; }
  void set_mean(double over, bool is_loss) {
    forget_mean();
    mean_over_ = over;
    mean_ = is_loss ? Mean::loss : Mean::plain;
  }
  /// The same for a loss whose divisor is not known yet: `count` is called when it is needed.
  void set_mean_later(std::function<double()> count) {
    forget_mean();
    count_ = new std::function<double()>(std::move(count));
    mean_ = Mean::uncounted_loss;
  }
  /// Marks a sum. `divisor`: what the caller divides the global batch's sum by (`mean_over`), 0 if unknown; `counted`:
  /// number of summands, if known.
  void set_sum(double divisor = 0, double counted = 0) {
    forget_mean();
    mean_over_ = divisor;
    counted_ = counted;
    mean_ = Mean::sum;
  }
  /// A sum over the batch that no library loss divides.
  bool is_sum_of_batch() const { return is_sum() && is_scalar_ && may_be_of_data() && counted_ >= 0; }
  double divisor() const { return is_sum() ? mean_over_ : 0; }
  double counted() const { return is_sum() ? counted_ : 0; }
  static constexpr double of_a_mean = -1;  ///< special value of `counted`
  /// For a scalar multiplied or divided by a constant: the constant. 0 otherwise.
  double operand_number() const { return mean_ == Mean::none ? counted_ : 0; }
  void set_operand_number(double number) { counted_ = number; }
  /// Copies the mean and sum marks of `other`.
  void take_mean(Node& other) {
    forget_mean();
    if (other.mean_ == Mean::uncounted_loss)
      count_ = other.count_;
    else
      mean_over_ = other.mean_over_;
    counted_ = other.counted_;
    mean_ = std::exchange(other.mean_, Mean::none);
  }

  /// How the value depends on the operands. `linear`: constant derivatives; `product`, `quotient`: of two operands;
  /// `pointwise`: any other element-wise function.
  enum class Form : std::uint8_t { other, linear, product, quotient, pointwise };
  Form form() const { return form_; }
  void set_form(Form form) { form_ = form; }
  bool is_scalar() const { return is_scalar_; }
  /// Whether an operand is off the tape, so that it may be batch data; and whether the first operand is.
  bool has_loose_operand() const { return (operands_ & 1) != 0; }
  bool first_operand_is_loose() const { return (operands_ & 2) != 0; }
  /// Whether the value depends on more than parameters.
  bool may_be_of_data() const { return (operands_ & 4) != 0; }
  void set_operands(bool loose, bool first_is_loose, bool of_data) {
    operands_ = static_cast<std::uint8_t>((loose ? 1 : 0) | (first_is_loose ? 2 : 0) | (of_data ? 4 : 0));
  }
  /// The value of a scalar operation, once it is on the host; else NaN.
  virtual double number() const { return std::numeric_limits<double>::quiet_NaN(); }

  /// A factor for this node's gradient, applied before it is passed on. Policies set it as a backward run begins. For a
  /// mean it is reset to 1 after the run; for other nodes see `scale_in_backward`.
  double scale() const { return scale_; }
  void set_scale(double scale) { scale_ = scale; }

  const char* operation() const { return operation_; }
  /// Increases in recording order: an operation's inputs have smaller numbers.
  std::uint64_t sequence() const { return sequence_; }
  /// For threads that record concurrently: a number from `next_sequence`, drawn in advance by one thread, makes the
  /// order deterministic.
  void set_sequence(std::uint64_t sequence) { sequence_ = sequence; }

  void* operator new(std::size_t bytes) { return detail::NodePool::allocate(bytes); }
  void operator delete(void* data, std::size_t bytes) { detail::NodePool::release(data, bytes); }

  /// A number greater than those of all existing nodes and smaller than those of all later ones.
  static std::uint64_t next_sequence() {
    static std::atomic<std::uint64_t> counter{0};
    return counter.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  friend void run_backward(std::span<const Ref<Node>> roots, const BackwardOptions& options);
  friend class detail::LossTerms;
  template <class>
  friend class Ref;

  // Destroying a node may release its inputs. They are queued, so that a long chain does not overflow the stack.
  static void dispose(Node* node);

  enum class Mean : std::uint8_t { none, sum, plain, loss, uncounted_loss };

  void forget_mean() {
    if (mean_ == Mean::uncounted_loss) delete count_;
    mean_ = Mean::none;
  }
  [[gnu::noinline, gnu::cold]] double count_now() {
    const double over = (*count_)();
    set_mean(over, true);
    return over;
  }

  const char* operation_;
  std::uint64_t sequence_;
  std::uint64_t visited_by_ = 0;  // the last backward run, or search of LossTerms, that saw this node
  int pending_ = 0;               // consumers that have not contributed in that run yet
  bool skipped_ = false;
  bool reached_ = false;  // a consumer has contributed
  Mean mean_ = Mean::none;
  const bool is_scalar_;
  Form form_ = Form::other;
  std::uint8_t operands_ = 4;
  std::uint8_t of_batch_ = 0;  // see LossTerms
  std::atomic<int> owners_{0};
  std::unique_ptr<detail::GradientHook> gradient_hooks_;
  union {
    double mean_over_ = 0;
    std::function<double()>* count_;  // owned, for an uncounted_loss
  };
  double scale_ = 1, counted_ = 0;
};

/// An intrusive counted pointer to a Node.
template <class N>
class Ref {
 public:
  Ref() = default;
  explicit Ref(N* node) : node_(node) { retain(); }
  Ref(const Ref& other) : node_(other.node_) { retain(); }
  Ref(Ref&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  template <class Derived>
    requires std::is_base_of_v<N, Derived>
  Ref(Ref<Derived> other) : node_(std::exchange(other.node_, nullptr)) {}  // NOLINT: converts as pointers do
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
  template <class>
  friend class Ref;
  void retain() {
    if (node_ != nullptr) node_->Node::owners_.fetch_add(1, std::memory_order_relaxed);
  }
  N* node_ = nullptr;
};

}  // namespace chorus
