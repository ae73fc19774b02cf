#pragma once
/// Parameter: a leaf Variable that a model owns. A copy of a handle shares the numbers. Policies move them, into flat
/// buffers and to other devices; handles, optimizers and tensors that a program has from before go on to stand for the
/// same numbers.

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

/// The ranks that have a model's parameters together, each a part of them, or some: what they decide by these they
/// decide together. All make the same calls, in one order. They throw CommError where one is lost.
class ModelRanks {
 public:
  virtual ~ModelRanks() = default;
  /// Over all ranks, in place; the same bits on each.
  virtual void sum(std::span<double> numbers) = 0;
  virtual void max(std::span<double> numbers) = 0;
};

/// A parameter whose scalar type and rank are known at run time only: what policies, optimizers and checkpoints work
/// with.
template <Device D>
class ParameterOn : public detail::AtHome<D> {
 public:
  /// The numbers that are here, `count()` of them, to read or write: see Parameter::value.
  void* value_data() const { return this->watched_memory(); }
  /// The gradient's memory, of as many; null where there has been none yet. Throws UsageError where each process has a
  /// part of it alone.
  void* grad_data() const {
    check_grad_whole();
    return grad_place();
  }
  /// The same for library code, which knows what it has of it.
  virtual void* grad_place() const = 0;
  /// Throws UsageError where each process has a part of the gradient alone: of the whole parameter, under
  /// FullyShardedDataParallel, whose `parameters()` know their parts; and where a policy has said so.
  void check_grad_whole() const {
    if (parts_at_ == 0 && !this->storage().in_parts()) [[likely]]
      return;
    if (parts_at_ == times_forgotten() + 1 || (this->storage().in_parts() && !this->is_part())) raise_grad_in_parts();
  }
  /// Holds until the gradient is forgotten.
  void set_grad_in_parts(bool in_parts) { parts_at_ = in_parts ? times_forgotten() + 1 : 0; }
  /// The block of memory that the gradient lies in; null where it is not known.
  virtual const void* grad_block() const { return nullptr; }
  /// Whether a gradient has arrived since the last `clear_grad`.
  virtual bool grad_arrived() const = 0;
  virtual void set_grad_arrived(bool arrived) = 0;
  /// Changes with each `set_grad_arrived(false)` and each `zero_grad`.
  virtual std::uint32_t times_forgotten() const = 0;
  virtual bool wants_grad() const = 0;
  virtual void set_wants_grad(bool wants) = 0;
  /// A copy of the value in a type of 2 bytes, good while `version` is the value's: MixedPrecision keeps it, `to` takes
  /// it.
  struct NarrowCopy {
    Storage<D> storage;
    void* data = nullptr;
    DType dtype{};
    std::uint64_t version = 0;
  };
  NarrowCopy narrow_copy;
  /// Moves value and gradient, contents included, to these places, which stay.
  virtual void bind(const Storage<D>& values, void* value, const Storage<D>& grads, void* grad) = 0;
  /// For policies: `hook` runs once the gradient is complete, and all of the user's hooks have run.
  virtual void on_grad(std::function<void()> hook) = 0;
  /// Moves value and gradient to another device. Handles, hooks and optimizers stay.
  virtual void move_to_device(D device) = 0;
  /// A new parameter with the same value on another device.
  virtual Ref<Node> copy_to(D device) const = 0;
  /// Adds the gradient of a copy on another device to this one's.
  virtual void add_grad_of(const ParameterOn& copy) = 0;
  /// For a copy: puts the operation that made it, a GradNode of this parameter's type, in this leaf's place on the
  /// tape; null: the leaf itself stands there.
  virtual void set_origin(Ref<Node> operation) = 0;
  /// A leaf that may stand in this one's place, by `set_origin`, with a gradient of its own.
  virtual Ref<Node> make_stand_in() const = 0;
  /// Where the gradient of such a leaf lies; null where there is none.
  virtual const void* grad_data_of(const Node& stand_in) const = 0;
  /// Forgets it, with its memory.
  virtual void drop_grad_of(Node& stand_in) const = 0;

  /// Makes this a parameter of other extents, of the same number of axes, with these numbers. Handles, hooks and
  /// optimizers that have not stepped yet stay; gradients go, and tensors of its numbers from before are no longer its.
  virtual void replace_numbers(std::span<const Index> extents, const Storage<D>& numbers) = 0;
  /// How a policy has shared the parameter out along an axis, where it has; else null.
  const std::shared_ptr<const PartOfParameter>& part() const { return part_; }
  /// Throws UsageError for numbers that are one rank's entries of an axis, unless a layer reads them that knows of it.
  void check_reader() const {
    if (part_ != nullptr && !detail::reads_parts) [[unlikely]]
      raise_part();
  }
  /// Whether processes have pieces of its numbers: what depends on whole parameters, as a norm does, refuses it. One
  /// that is another process's, all of it, is in no pieces.
  bool in_pieces() const { return part_ != nullptr || (this->is_part() && this->is_here()); }
  void set_part(std::shared_ptr<const PartOfParameter> part) { part_ = std::move(part); }

  /// Where the policy of several processes that has it wants to know of its optimizers' steps; else null.
  const std::shared_ptr<Ledger>& ledger() const { return ledger_; }
  void set_ledger(std::shared_ptr<Ledger> ledger) { ledger_ = std::move(ledger); }

  /// Whether the gradient is this process's own, where others have the same parameter: added up under `no_sync`, and
  /// not averaged. A policy says so, and takes it back when it has averaged; a gradient that is forgotten is none.
  /// Optimizers and what else reads gradients for a step refuse it.
  bool grad_local() const { return local_at_ != 0 && local_at_ == times_forgotten() + 1; }
  void set_grad_local(bool local) { local_at_ = local ? times_forgotten() + 1 : 0; }

  /// Who has the rest of the model, where this process has a part: a norm over the parameters that are here is not the
  /// model's. Null where it has all.
  const std::shared_ptr<ModelRanks>& ranks() const { return ranks_; }
  /// Of the ranks that have the same numbers of this parameter, whether this is the one whose numbers count.
  bool counts() const { return counts_; }
  void set_ranks(std::shared_ptr<ModelRanks> ranks, bool counts) {
    ranks_ = std::move(ranks);
    counts_ = counts;
  }

  /// Whether the last gradient has gone to another process, which steps in this one's place: that an optimizer finds
  /// none here is no mistake.
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
  std::uint32_t local_at_ = 0, parts_at_ = 0;  // times_forgotten() + 1 when it was said
  std::shared_ptr<const PartOfParameter> part_;
  std::shared_ptr<ModelRanks> ranks_;
  std::shared_ptr<Ledger> ledger_;
};

namespace detail {
/// Is told of each parameter that an operation of this thread takes, while it is set: its ParameterOn, its node.
class ParameterWatch {
 public:
  virtual void saw(const void* parameter, Node& node, std::span<const Index> extents, bool wants_grad) = 0;

 protected:
  ~ParameterWatch() = default;
};
inline thread_local constinit ParameterWatch* parameter_watch = nullptr;
}  // namespace detail

/// The leaf of the tape that a Parameter stands for: its numbers, and the gradient.
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
  /// For shape and device, wherever the numbers are.
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
  void* grad_place() const override { return this->grad_memory().data(); }
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
  void move_to_device(D device) override {
    this->move_numbers(device);
    this->move_grad(device);
  }
  Ref<Node> copy_to(D device) const override {
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

/// A leaf Variable that a model owns. An empty one stands for "there is none" (a layer without bias): its value is
/// undefined, and what needs more than that throws UsageError.
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

  /// The numbers, to read or write. From the first call on, each pass that uses them compares them with what they were,
  /// for the program may write through a pointer that it has kept: all devices compute with what is written, and
  /// backward refuses to go on with other numbers than the forward pass saw. `value_of(parameter)` is for reading
  /// alone and `assign` for writing; neither needs that. On a GPU only `assign` is noticed.
  const Tensor<T, Rank, D>& value() const {
    if (node_) {
      typed().storage().touch();
      typed().storage().watch();
    }
    return numbers();
  }
  /// The gradient; undefined where there is none. It stays what it is when the parameter's gradient is forgotten
  /// (`zero_grad`); a pointer to its numbers doesn't. Throws UsageError where each rank has a part of it.
  Tensor<T, Rank, D> grad() const {
    typed().check_grad_whole();
    typed().check_reader();
    return typed().grad();
  }
  const Shape<Rank>& shape() const { return described().shape(); }
  D device() const { return described().device(); }
  bool requires_grad() const { return typed().wants_grad(); }
  /// Without, no gradient is computed for it and optimizers leave it alone.
  void set_requires_grad(bool requires_grad) const { typed().set_wants_grad(requires_grad); }
  void zero_grad() const { typed().zero_grad(); }
  /// Copies numbers into the parameter. Throws ShapeError where the shapes differ.
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

  /// The copy in a type of 2 bytes that is kept for this parameter; undefined where there is none, or an old one.
  template <Narrow N>
  Tensor<N, Rank, D> narrow_copy() const {
    if (!node_ || typed().narrow_copy.version != typed().version() || typed().narrow_copy.dtype != chorus::dtype<N>)
      return {};
    const auto& copy = typed().narrow_copy;
    return {copy.storage, static_cast<N*>(copy.data), shape(), row_major(shape())};
  }

  Variable<T, Rank, D> as_variable() const { return node_ ? typed().as_variable() : Variable<T, Rank, D>(); }

  /// For reading.
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
