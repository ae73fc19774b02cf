#pragma once
/// Parameter: a leaf Variable that a model owns, and Buffer: numbers that a model owns and no gradient goes to. A copy
/// of a handle shares the numbers. Policies move them, into flat buffers and to other devices; handles, optimizers and
/// tensors that a program has from before go on to stand for the same numbers.

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <chorus/core/tensor_group.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace chorus {

namespace detail {

/// The same numbers, dense, with a home of their own.
template <class T, int Rank, class D>
Tensor<T, Rank, D> at_home(const Tensor<T, Rank, D>& numbers) {
  if (!numbers.defined()) return numbers;
  const auto dense = contiguous(numbers);
  return {Storage<D>::home_in(dense.storage(), dense.data(), dense.bytes()), dense.data(), dense.shape(),
          row_major(dense.shape())};
}

/// What a parameter or a buffer has that does not depend on its type: a home, whose numbers are written and moved.
template <Device D>
class AtHome {
 public:
  virtual ~AtHome() = default;
  virtual DType dtype() const = 0;
  virtual std::span<const Index> extents() const = 0;
  virtual D where() const = 0;
  /// Where the numbers are, for library code: to read, or to write and then call `touch`. Throws UsageError where they
  /// are not there, under a policy that keeps a part of them on each rank.
  void* memory() const {
    check_here();
    if (!storage().present() && !is_part()) [[unlikely]]
      raise_absent();
    return place();
  }
  /// The same, whether they are there or not.
  virtual void* place() const = 0;
  /// The home.
  virtual const Storage<D>& storage() const = 0;
  /// Where the numbers are, for anybody: from the first call on, what is written through it on the CPU is found by
  /// comparing the numbers with what they were. On a GPU each call counts as one write.
  void* watched_memory() const {
    if constexpr (std::is_same_v<D, Cpu>)
      storage().watch();
    else if (auto* const writes = storage().writes())
      writes->add();
    return memory();
  }
  /// Grows whenever the numbers change, so that copies know that they are old.
  std::uint64_t version() const { return storage().version(); }
  /// To be called by library code that writes into the memory.
  void touch() const {
    if (auto* const writes = storage().writes()) writes->add();
  }
  /// The path in the model, for messages; the longest one known.
  void set_name(std::string_view name) const {
    if (auto* const writes = storage().writes(); writes != nullptr && name.size() > writes->name.size())
      writes->name = name;
  }

  /// Whether the numbers are this process's.
  bool is_here() const {
    const auto* const writes = storage().writes();
    return writes == nullptr || writes->elsewhere.empty();
  }
  /// Throws UsageError where they are another one's.
  void check_here() const {
    if (const auto* const writes = storage().writes()) writes->check_here();
  }
  Index count() const { return numel(extents()); }
  /// Whether it is a part of a parameter, which other processes have the rest of: what needs the whole, or all of the
  /// model, refuses it.
  virtual bool is_part() const { return false; }
  /// Where it begins in the whole parameter, in elements.
  virtual Index part_begin() const { return 0; }
  /// The extents of the whole parameter, of which this may be a part.
  virtual std::span<const Index> whole_extents() const { return extents(); }
  std::size_t size_bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype()); }

 protected:
  /// Moves the numbers to `to`, within `whole`.
  void move_numbers(const Storage<D>& whole, void* to) const {
    const Storage<D>& home = storage();
    if (!promised(to)) copy_bytes(whole.device(), to, where(), memory(), size_bytes());
    home.move_home(whole, to);
    if (home.owners() == 1) home.writes()->end_watch();  // pointers to where they were are no good any more
  }
  // Whether the numbers are yet to be drawn: then they will be at `to`.
  bool promised([[maybe_unused]] void* to) const {
    if constexpr (std::is_same_v<D, Cpu>)
      if (auto* const promises = PromisedNumbers::current())
        return promises->move(place(), to);
    return false;
  }
  [[noreturn, gnu::noinline, gnu::cold]] void raise_absent() const {
    const auto* const writes = storage().writes();
    fail<UsageError>("'", writes == nullptr ? "" : writes->name,
                     "' is in parts, one on each rank: its numbers are here while the net computes with them, and "
                     "while net.gathered() lives, which all ranks call");
  }
  /// Moves them to memory of their own on another device.
  void move_numbers(D device) const {
    const MemoryScope scope(trace::Memory::parameters);
    const Storage<D> near(device, size_bytes());
    move_numbers(near, near.data());
  }
};

}  // namespace detail

/// A parameter whose scalar type and rank are known at run time only: what policies, optimizers and checkpoints work
/// with.
template <Device D>
class ParameterOn : public detail::AtHome<D> {
 public:
  /// The numbers, to read or write: see Parameter::value.
  void* value_data() const { return this->watched_memory(); }
  /// The gradient's memory; null where there has been none yet.
  virtual void* grad_data() const = 0;
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
  /// What this is a part of, where a policy has shared a parameter out; null of a whole one. What depends on whole
  /// parameters (a norm, a file) has to ask.
  const std::shared_ptr<const PartOfParameter>& part() const { return part_; }
  void set_part(std::shared_ptr<const PartOfParameter> part) { part_ = std::move(part); }

  /// Whether other processes read and write the same value: one of them may step each of its numbers, then, and the
  /// others none.
  bool in_common() const { return in_common_; }
  void set_in_common(bool in_common) { in_common_ = in_common; }

  /// Whether the gradient is this process's own, where others have the same parameter: added up under `no_sync`, and
  /// not averaged. A policy says so, and takes it back when it has averaged; a gradient that is forgotten is none.
  /// Optimizers and what else reads gradients for a step refuse it.
  bool grad_local() const { return local_at_ != 0 && local_at_ == times_forgotten() + 1; }
  void set_grad_local(bool local) { local_at_ = local ? times_forgotten() + 1 : 0; }

  /// Whether this process has a part of the model's parameters, and others the rest: a norm over those that are here is
  /// not the model's.
  bool one_of_a_part() const { return one_of_a_part_; }
  void set_one_of_a_part(bool part) { one_of_a_part_ = part; }

  /// Whether the last gradient has gone to another process, which steps in this one's place: that an optimizer finds
  /// none here is no mistake.
  bool grad_sent() const { return grad_sent_; }
  void set_grad_sent(bool sent) { grad_sent_ = sent; }

 private:
  bool in_common_ = false, grad_sent_ = false, one_of_a_part_ = false;
  std::uint32_t local_at_ = 0;  // times_forgotten() + 1 when it was said
  std::shared_ptr<const PartOfParameter> part_;
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

template <Real T, int Rank, Device D>
class ParameterNode final : public LeafNode<T, Rank, D>, public ParameterOn<D> {
 public:
  explicit ParameterNode(const Tensor<T, Rank, D>& value)
      : LeafNode<T, Rank, D>(value), value_(detail::at_home(value)) {}

  const Tensor<T, Rank, D>& value() const {
    this->check_here();
    return value_;
  }
  /// For shape and device, wherever the numbers are.
  const Tensor<T, Rank, D>& described() const { return value_; }

  DType dtype() const override { return chorus::dtype<T>; }
  std::span<const Index> extents() const override { return value_.shape(); }
  D where() const override { return value_.device(); }
  void* place() const override { return value_.data(); }
  const Storage<D>& storage() const override { return value_.storage(); }
  std::uint64_t numbers_version() const override { return this->version(); }
  const char* numbers_name() const override {
    const auto* const writes = value_.storage().writes();
    return writes == nullptr ? "" : writes->name.c_str();
  }
  void* grad_data() const override { return this->grad_memory().data(); }
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
    copy_bytes(device, copy.data(), value_.device(), value_.data(), value_.bytes());
    auto* made = new ParameterNode(copy);
    made->wants_grad_ = wants_grad_;
    made->set_part(this->part());
    return Ref<Node>(made);
  }
  void add_grad_of(const ParameterOn<D>& copy) override {
    auto near = Tensor<T, Rank, D>::empty(value_.shape(), value_.device());
    copy_bytes(near.device(), near.data(), copy.where(), copy.grad_data(), near.bytes());
    this->add(near);
  }
  void set_origin(Ref<Node> operation) override {
    origin_ = Ref<GradNode<T, Rank, D>>(static_cast<GradNode<T, Rank, D>*>(operation.get()));
  }
  Ref<Node> make_stand_in() const override { return Ref<Node>(new LeafNode<T, Rank, D>(value_)); }
  const void* grad_data_of(const Node& stand_in) const override {
    const auto grad = static_cast<const LeafNode<T, Rank, D>&>(stand_in).grad();
    return grad.defined() ? grad.data() : nullptr;
  }
  void drop_grad_of(Node& stand_in) const override {
    static_cast<LeafNode<T, Rank, D>&>(stand_in).exchange_grad({});
  }
  void replace_numbers([[maybe_unused]] std::span<const Index> extents, const Storage<D>& numbers) override {
    Shape<Rank> shape{};
    if constexpr (Rank > 0) std::copy(extents.begin(), extents.end(), shape.begin());
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
                "parameters are float or double: bf16 and half copies of them come from to<bf16>() in forward");

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
  /// (`zero_grad`); a pointer to its numbers doesn't.
  Tensor<T, Rank, D> grad() const { return typed().grad(); }
  const Shape<Rank>& shape() const { return described().shape(); }
  D device() const { return described().device(); }
  bool requires_grad() const { return typed().wants_grad(); }
  /// Without, no gradient is computed for it and optimizers leave it alone.
  void set_requires_grad(bool requires_grad) const { typed().set_wants_grad(requires_grad); }
  void zero_grad() const { typed().zero_grad(); }
  /// Copies numbers into the parameter. Throws ShapeError where the shapes differ.
  void assign(const Tensor<T, Rank, D>& numbers) const {
    check<ShapeError>(numbers.shape() == shape() && numbers.is_contiguous(),
                      "Parameter::assign: expected a dense tensor of shape ", shape(), ", got shape ", numbers.shape());
    copy_bytes(device(), typed().memory(), numbers.device(), numbers.data(), numbers.bytes());
    typed().touch();
  }
  /// See Variable::register_hook.
  template <class Hook>
  void register_hook(Hook hook) const {
    Variable<T, Rank, D>(numbers(), Ref<GradNode<T, Rank, D>>(&typed())).register_hook(std::move(hook));
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
                      "Parameter: it is empty (that of a layer without bias, say), so it has no gradient");
    return static_cast<ParameterNode<T, Rank, D>&>(*node_);
  }
};

/// A buffer whose scalar type and rank are known at run time only.
template <Device D>
class BufferOn : public detail::AtHome<D> {
 public:
  /// The numbers, to read or write: see Buffer::value.
  void* data() const { return this->watched_memory(); }
  virtual Ref<Node> copy_to(D device) const = 0;
  /// Moves the numbers to another device. Handles stay.
  virtual void move_to_device(D device) = 0;
};

template <Scalar T, int Rank, Device D>
class BufferNode final : public Node, public BufferOn<D> {
 public:
  explicit BufferNode(const Tensor<T, Rank, D>& value) : Node("buffer"), value_(detail::at_home(value)) {}
  void backward(bool) override {}
  void for_each_input(void (*)(Node&, void*), void*) const override {}
  bool is_leaf() const override { return true; }

  const Tensor<T, Rank, D>& value() const {
    this->check_here();
    return value_;
  }
  DType dtype() const override { return chorus::dtype<T>; }
  std::span<const Index> extents() const override { return value_.shape(); }
  D where() const override { return value_.device(); }
  void* place() const override { return value_.data(); }
  const Storage<D>& storage() const override { return value_.storage(); }
  Ref<Node> copy_to(D device) const override {
    const MemoryScope scope(trace::Memory::parameters);
    auto copy = Tensor<T, Rank, D>::empty(value_.shape(), device);
    copy_bytes(device, copy.data(), value_.device(), value_.data(), value_.bytes());
    return Ref<Node>(new BufferNode(copy));
  }
  void move_to_device(D device) override { this->move_numbers(device); }

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

/// Numbers that belong to a model and are saved with it, but are not trained (batch norm's running mean). The value of
/// an empty one is undefined.
template <Scalar T, int Rank, Device D = Cpu>
class Buffer : public AnyBuffer {
 public:
  Buffer() = default;
  explicit Buffer(const Tensor<T, Rank, D>& value) { node_ = Ref<Node>(new BufferNode<T, Rank, D>(value)); }
  /// The numbers, to read or write: as Parameter::value.
  const Tensor<T, Rank, D>& value() const {
    if (node_) typed().storage().watch();
    return value_of(*this);
  }
  /// Copies numbers into the buffer. Throws ShapeError where the shapes differ.
  void assign(const Tensor<T, Rank, D>& numbers) const {
    const auto& own = value_of(*this);
    check<ShapeError>(node_ && numbers.shape() == own.shape() && numbers.is_contiguous(),
                      "Buffer::assign: expected a dense tensor of shape ", own.shape(), ", got shape ",
                      numbers.shape());
    copy_bytes(own.device(), own.data(), numbers.device(), numbers.data(), numbers.bytes());
    typed().touch();
  }

  /// For reading; library code that writes calls `touch` of the node.
  friend const Tensor<T, Rank, D>& value_of(const Buffer& buffer) {
    static const Tensor<T, Rank, D> none;
    return buffer.node_ ? buffer.typed().value() : none;
  }

 private:
  BufferNode<T, Rank, D>& typed() const { return static_cast<BufferNode<T, Rank, D>&>(*node_); }
};

}  // namespace chorus
