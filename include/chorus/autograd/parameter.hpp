#pragma once
/// Parameter: a leaf Variable that a model owns. Copies of a handle share the values. Policies move the values into
/// flat buffers and to other devices; existing handles, optimizers and tensors stay valid.

#include <algorithm>
#include <chorus/autograd/at_home.hpp>
#include <chorus/autograd/buffer.hpp>
#include <chorus/core/ledger.hpp>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

namespace chorus {

/// The ranks that hold parts of one model. They decide together: all make the same calls in the same order. Calls throw
/// CommError if a rank is lost.
class ModelRanks {
 public:
  virtual ~ModelRanks() = default;
  /// Sums over all ranks, in place. All ranks get the same bits.
  virtual void sum(std::span<double> numbers) = 0;
  virtual void max(std::span<double> numbers) = 0;
};

/// A parameter whose scalar type and rank are known only at run time. Policies, optimizers and checkpoints use it.
template <Device D>
class ParameterOn : public detail::AtHome<D> {
 public:
  /// The local values, `count()` of them, to read or write: see Parameter::value.
  void* value_data() const { return this->watched_memory(); }
  /// The gradient's memory, with as many elements; null if there has been none yet. Throws UsageError if each process
  /// has only a part of the gradient.
  void* grad_data() const {
    check_grad_whole();
    return grad_place();
  }
  /// The same without the check, for library code.
  virtual void* grad_place() const = 0;
  /// Throws UsageError if each process has only a part of the gradient: for a whole parameter under
  /// FullyShardedDataParallel (its `parameters()` can read their parts), or after `set_grad_in_parts`.
  void check_grad_whole() const {
    if (parts_at_ == 0 && !this->storage().in_parts()) [[likely]]
      return;
    if (parts_at_ == times_forgotten() + 1 || (this->storage().in_parts() && !this->is_part())) raise_grad_in_parts();
  }
  /// Valid until the gradient is cleared.
  void set_grad_in_parts(bool in_parts) { parts_at_ = in_parts ? times_forgotten() + 1 : 0; }
  /// The gradient's home, for policies that move it.
  virtual const Storage<D>& grad_storage() const = 0;
  /// The memory block of the gradient; null if unknown.
  virtual const void* grad_block() const { return nullptr; }
  /// Whether a gradient has arrived since it was last cleared.
  virtual bool grad_arrived() const = 0;
  virtual void set_grad_arrived(bool arrived) = 0;
  /// Changes with each `set_grad_arrived(false)` and each `zero_grad`.
  virtual std::uint32_t times_forgotten() const = 0;
  virtual bool wants_grad() const = 0;
  virtual void set_wants_grad(bool wants) = 0;
  /// A 2-byte copy of the value, valid while `version` is the value's. MixedPrecision stores it, `to` returns it.
  struct NarrowCopy {
    Storage<D> storage;
    void* data = nullptr;
    DType dtype{};
    std::uint64_t version = 0;
  };
  NarrowCopy narrow_copy;
  /// Moves value and gradient, contents included, to these permanent places.
  virtual void bind(const Storage<D>& values, void* value, const Storage<D>& grads, void* grad) = 0;
  /// For policies: `hook` runs when the gradient is complete, after all user hooks.
  virtual void on_grad(std::function<void()> hook) = 0;
  /// Moves value and gradient to another device. Handles, hooks and optimizers stay valid.
  virtual void move_to_device(D device) = 0;
  /// A new parameter with the same value on another device.
  virtual Ref<Node> copy_to(D device) const = 0;
  /// Adds the gradient of a copy on another device to this gradient.
  virtual void add_grad_of(const ParameterOn& copy) = 0;
  /// For a copy: `operation`, a GradNode of this parameter's type that made the copy, replaces this leaf on the tape.
  /// Null restores the leaf.
  virtual void set_origin(Ref<Node> operation) = 0;
  /// A leaf with its own gradient that can replace this one on the tape, by `set_origin`.
  virtual Ref<Node> make_stand_in() const = 0;
  /// The memory of such a leaf's gradient; null if there is none.
  virtual const void* grad_data_of(const Node& stand_in) const = 0;
  /// Drops that gradient and its memory.
  virtual void drop_grad_of(Node& stand_in) const = 0;

  /// Changes the extents, but not the rank, and the values of this parameter. Handles, hooks and optimizers that have
  /// not stepped yet stay valid. Gradients are dropped, and older tensors no longer share its values.
  virtual void replace_numbers(std::span<const Index> extents, const Storage<D>& numbers) = 0;
  /// How a policy has sharded the parameter along an axis; null if it has not.
  const std::shared_ptr<const PartOfParameter>& part() const { return part_; }
  /// Throws UsageError for a part of a sharded axis, unless the calling layer supports parts.
  void check_reader() const {
    if (part_ != nullptr && !detail::reads_parts) [[unlikely]]
      raise_part();
  }
  /// Whether processes hold pieces of its values. Functions of whole parameters, such as a norm, then refuse it. A
  /// parameter that one process holds completely is not in pieces.
  bool in_pieces() const { return part_ != nullptr || (this->is_part() && this->is_here()); }
  void set_part(std::shared_ptr<const PartOfParameter> part) { part_ = std::move(part); }

  /// Set if a policy of several processes wants to know of optimizer steps; else null.
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }
  void set_ledger(std::shared_ptr<Ledger> ledger) { ledger_ = std::move(ledger); }

  /// Whether the gradient is this process's own, accumulated under `no_sync` and not averaged. The policy sets the mark
  /// and clears it after averaging; clearing the gradient clears it, too. Optimizers and others that read gradients for
  /// a step refuse such a gradient.
  bool grad_local() const { return local_at_ != 0 && local_at_ == times_forgotten() + 1; }
  void set_grad_local(bool local) { local_at_ = local ? times_forgotten() + 1 : 0; }

  /// The ranks that hold the rest of the model, if this process has only a part. A norm over local parameters is then
  /// not the model's. Null if this process has all.
  const std::shared_ptr<ModelRanks>& ranks() const { return ranks_; }
  /// Whether this rank's copy is the one that counts, of the ranks with the same values.
  bool counts() const { return counts_; }
  void set_ranks(std::shared_ptr<ModelRanks> ranks, bool counts) {
    ranks_ = std::move(ranks);
    counts_ = counts;
  }

  /// Whether the last gradient was sent to another process that steps for this one. A missing gradient is then no
  /// mistake.
  bool grad_sent() const { return grad_sent_; }
  void set_grad_sent(bool sent) { grad_sent_ = sent; }

 private:
  [[noreturn, gnu::noinline, gnu::cold]] void raise_grad_in_parts() const {
    const auto* const writes = this->storage().writes();
    fail<UsageError>(
        "gradient of '", writes == nullptr ? "" : writes->name,
        "': it is sharded over the ranks: under FullyShardedDataParallel net.parameters() has this rank's part; under "
        "DistributedDataParallel use the ShardedOptimizer: clip_grad_norm(max), step(), and scaler.unscale(optimizer)");
  }
  [[noreturn, gnu::noinline, gnu::cold]] void raise_part() const {
    const auto* const writes = this->storage().writes();
    fail<UsageError>("parameter '", writes == nullptr ? "" : writes->name,
                     "': it is split over the ranks, and only its layer can compute with this rank's part: read and "
                     "write all of it in net.gathered([](auto& model) { ... }), which all ranks call");
  }
  bool grad_sent_ = false, counts_ = true;
  std::uint32_t local_at_ = 0, parts_at_ = 0;  // times_forgotten() + 1 when it was set
  std::shared_ptr<const PartOfParameter> part_;
  std::shared_ptr<ModelRanks> ranks_;
  std::shared_ptr<Ledger> ledger_;
};

namespace detail {
/// While set, it is told of each parameter (its ParameterOn and its node) that this thread's operations use.
class ParameterWatch {
 public:
  virtual void saw(const void* parameter, Node& node, std::span<const Index> extents, bool wants_grad) = 0;

 protected:
  ~ParameterWatch() = default;
};
inline thread_local constinit ParameterWatch* parameter_watch = nullptr;
}  // namespace detail

/// The leaf node of a Parameter: its values and its gradient.
template <Real T, int Rank, Device D>
class ParameterNode final : public LeafNode<T, Rank, D>, public ParameterOn<D> {
 public:
  explicit ParameterNode(const Tensor<T, Rank, D>& value)
      : LeafNode<T, Rank, D>(value), value_(detail::at_home(value)) {
    this->set_operands(false, false, false);
  }

  const Tensor<T, Rank, D>& value() const {
    this->check_here();
    this->check_reader();
    return value_;
  }
  /// For shape and device, even if the values are elsewhere.
  const Tensor<T, Rank, D>& described() const { return value_; }

  DType dtype() const override { return chorus::dtype<T>; }
  std::span<const Index> extents() const override {
    return this->part() != nullptr ? std::span<const Index>(this->part()->extents) : extents_here();
  }
  std::span<const Index> extents_here() const override { return value_.shape(); }
  D where() const override { return value_.device(); }
  void* place() const override { return value_.data(); }
  const Storage<D>& storage() const override { return value_.storage(); }
  std::uint64_t numbers_version() const override { return this->version(); }
  const char* numbers_name() const override {
    const auto* const writes = value_.storage().writes();
    return writes == nullptr ? "" : writes->name.c_str();
  }
  void* grad_place() const override { return grad_storage().touch(), this->grad_memory().data(); }
  const Storage<D>& grad_storage() const override { return this->grad_memory().storage(); }
  const void* grad_block() const override { return this->grad_memory().storage().memory().block(); }
  bool grad_arrived() const override { return this->has_grad(); }
  void set_grad_arrived(bool arrived) override {
    if (arrived)
      this->set_has_grad(true);
    else
      this->zero_grad();
  }
  std::uint32_t times_forgotten() const override { return GradNode<T, Rank, D>::times_forgotten(); }
  bool wants_grad() const override { return wants_grad_; }
  void set_wants_grad(bool wants) override { wants_grad_ = wants; }
  void bind(const Storage<D>& values, void* value, const Storage<D>& grads, void* grad) override {
    this->move_numbers(values, value);
    this->bind_grad(grads, static_cast<T*>(grad));
  }
  void on_grad(std::function<void()> hook) override { this->add_last_hook(std::move(hook)); }
  [[gnu::cold]] void move_to_device(D device) override {
    this->move_numbers(device);
    this->move_grad(device);
  }
  [[gnu::cold]] Ref<Node> copy_to(D device) const override {
    const MemoryScope scope(trace::Memory::parameters);
    auto copy = Tensor<T, Rank, D>::empty(value_.shape(), device);
    copy_bytes(device, copy.data(), value_.device(), this->memory(), value_.bytes());
    auto* made = new ParameterNode(copy);
    made->wants_grad_ = wants_grad_;
    made->set_part(this->part());
    return Ref<Node>(made);
  }
  void add_grad_of(const ParameterOn<D>& copy) override {
    auto near = Tensor<T, Rank, D>::empty(value_.shape(), value_.device());
    copy_bytes(near.device(), near.data(), copy.where(), copy.grad_place(), near.bytes());
    this->add(near);
  }
  void set_origin(Ref<Node> operation) override {
    origin_ = Ref<GradNode<T, Rank, D>>(static_cast<GradNode<T, Rank, D>*>(operation.get()));
  }
  Ref<Node> make_stand_in() const override {
    Ref<Node> leaf(new LeafNode<T, Rank, D>(value_));
    leaf->set_operands(false, false, false);
    return leaf;
  }
  const void* grad_data_of(const Node& stand_in) const override {
    const auto grad = static_cast<const LeafNode<T, Rank, D>&>(stand_in).grad();
    return grad.defined() ? grad.data() : nullptr;
  }
  void drop_grad_of(Node& stand_in) const override {
    static_cast<LeafNode<T, Rank, D>&>(stand_in).exchange_grad({});
  }
  void replace_numbers([[maybe_unused]] std::span<const Index> extents, const Storage<D>& numbers) override {
    Shape<Rank> shape{};
    if constexpr (Rank > 0) std::copy_n(extents.begin(), Rank, shape.begin());
    value_ = detail::at_home(Tensor<T, Rank, D>(numbers, static_cast<T*>(numbers.data()), shape, row_major(shape)));
    this->change_shape(shape);
    this->narrow_copy = {};
  }
  Variable<T, Rank, D> as_variable() {
    if (detail::parameter_watch != nullptr) [[unlikely]]
      detail::parameter_watch->saw(static_cast<const ParameterOn<D>*>(this), *this, value_.shape(), wants_grad_);
    value_.storage().touch();
    if (!wants_grad_) return Variable<T, Rank, D>(value());
    return {value(), origin_ ? origin_ : Ref<GradNode<T, Rank, D>>(this)};
  }

 private:
  Tensor<T, Rank, D> value_;
  Ref<GradNode<T, Rank, D>> origin_;
  bool wants_grad_ = true;
};

/// A handle to a parameter of unknown type.
class AnyParameter {
 public:
  explicit operator bool() const { return static_cast<bool>(node_); }
  const Ref<Node>& shared() const { return node_; }
  /// Makes this handle refer to another parameter of the same type. Policies use it to make replicas.
  void replace(Ref<Node> node) { node_ = std::move(node); }

  /// Throws DeviceError if the parameter is not on a device of kind `D`.
  template <Device D>
  ParameterOn<D>& on() const {
    auto* parameter = dynamic_cast<ParameterOn<D>*>(node_.get());
    check<DeviceError>(parameter != nullptr, "parameter: expected one on a ", D::kind, " device");
    return *parameter;
  }

 protected:
  Ref<Node> node_;
};

/// A leaf Variable that a model owns. An empty one means that there is none (a layer without bias): its value is
/// undefined, and other uses throw UsageError.
template <Real T, int Rank, Device D = Cpu>
class Parameter : public AnyParameter {
  static_assert(std::floating_point<T>,
                "parameter: expected float or double: bf16 and half copies of them come from to<bf16>() in forward");

 public:
  using value_type = T;
  using device_type = D;
  static constexpr int rank = Rank;

  Parameter() = default;
  explicit Parameter(const Tensor<T, Rank, D>& value) { node_ = Ref<Node>(new ParameterNode<T, Rank, D>(value)); }

  /// The values, to read or write. The program may keep the pointer and write through it. After the first call each
  /// pass therefore compares the values with the previous ones: all devices use what was written, and backward throws
  /// if the values changed after forward. `value_of(parameter)` for reading and `assign` for writing avoid the
  /// comparison. On a GPU only `assign` is detected.
  const Tensor<T, Rank, D>& value() const {
    if (node_) {
      typed().storage().touch();
      typed().storage().watch();
    }
    return numbers();
  }
  /// The gradient; undefined if there is none. The returned tensor keeps its values when the parameter's gradient is
  /// cleared (`zero_grad`); a raw pointer does not. Throws UsageError if each rank has a part of it.
  Tensor<T, Rank, D> grad() const {
    typed().check_grad_whole();
    typed().check_reader();
    return typed().grad();
  }
  const Shape<Rank>& shape() const { return described().shape(); }
  D device() const { return described().device(); }
  bool requires_grad() const { return typed().wants_grad(); }
  /// If false, no gradient is computed and optimizers skip the parameter.
  void set_requires_grad(bool requires_grad) const { typed().set_wants_grad(requires_grad); }
  void zero_grad() const { typed().zero_grad(); }
  /// Copies values into the parameter. Throws ShapeError if the shapes differ.
  void assign(const Tensor<T, Rank, D>& numbers) const {
    typed().check_reader();
    check<ShapeError>(numbers.shape() == shape() && numbers.is_contiguous(),
                      "Parameter::assign: expected a dense tensor of shape ", shape(), ", got shape ", numbers.shape());
    copy_bytes(device(), typed().memory(), numbers.device(), numbers.data(), numbers.bytes());
    typed().touch_by_hand();
  }
  /// See Variable::register_hook.
  template <class Hook>
  void register_hook(Hook hook) const {
    Variable<T, Rank, D>(described(), Ref<GradNode<T, Rank, D>>(&typed())).register_hook(std::move(hook));
  }

  /// The cached 2-byte copy of this parameter; undefined if there is none or it is stale.
  template <Narrow N>
  Tensor<N, Rank, D> narrow_copy() const {
    if (!node_ || typed().narrow_copy.version != typed().version() || typed().narrow_copy.dtype != chorus::dtype<N>)
      return {};
    const auto& copy = typed().narrow_copy;
    return {copy.storage, static_cast<N*>(copy.data), shape(), row_major(shape())};
  }

  Variable<T, Rank, D> as_variable() const { return node_ ? typed().as_variable() : Variable<T, Rank, D>(); }

  friend const Tensor<T, Rank, D>& value_of(const Parameter& parameter) {
    const auto& numbers = parameter.numbers();
    numbers.storage().touch();
    return numbers;
  }

 private:
  static const Tensor<T, Rank, D>& nothing() {
    static const Tensor<T, Rank, D> none;
    return none;
  }
  const Tensor<T, Rank, D>& numbers() const { return node_ ? typed().value() : nothing(); }
  const Tensor<T, Rank, D>& described() const { return node_ ? typed().described() : nothing(); }
  ParameterNode<T, Rank, D>& typed() const {
    check<UsageError>(node_.get() != nullptr,
                      "Parameter: it is empty (for example the bias of a layer without bias), so it has no gradient");
    return static_cast<ParameterNode<T, Rank, D>&>(*node_);
  }
};

}  // namespace chorus
