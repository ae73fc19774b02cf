#pragma once
/// Parameter: a leaf Variable that a model owns, and Buffer: numbers that a model owns and no gradient goes to. A copy
/// of a handle shares the numbers; policies move them into flat buffers and copy them to other devices behind the
/// handles.

#include <chorus/autograd/variable.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

namespace chorus::inline CHORUS_ABI {

/// A parameter whose scalar type and rank are known at run time only: what policies, optimizers and checkpoints work
/// with.
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
  /// The block of memory that the gradient lies in; null where it is not known.
  virtual const void* grad_block() const { return nullptr; }
  /// Whether a gradient has arrived since the last `clear_grad`.
  virtual bool grad_arrived() const = 0;
  virtual void set_grad_arrived(bool arrived) = 0;
  /// Changes with each `set_grad_arrived(false)` and each `zero_grad`.
  virtual std::uint32_t times_forgotten() const = 0;
  virtual bool wants_grad() const = 0;
  virtual void set_wants_grad(bool wants) = 0;
  /// Grows whenever the value changes, so that replicas know what to fetch.
  std::uint64_t version() const { return version_; }
  /// To be called by whoever writes into the value's memory.
  void touch() { ++version_; }
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
  /// Runs the hooks that a user has registered with another parameter of the same type, too: this one takes its place.
  virtual void take_hooks_of(const Ref<Node>& other) = 0;
  /// A new parameter with the same value on another device.
  virtual Ref<Node> copy_to(D device) const = 0;
  /// Adds the gradient of a copy on another device to this one's.
  virtual void add_grad_of(const ParameterOn& copy) = 0;
  /// For a copy: puts the operation that made it, a GradNode of this parameter's type, in this leaf's place on the
  /// tape; null: the leaf itself stands there.
  virtual void set_origin(Ref<Node> operation) = 0;

  /// Whether other processes read and write the same value: one of them may step each of its numbers, then, and the
  /// others none.
  bool in_common() const { return in_common_; }
  void set_in_common(bool in_common) { in_common_ = in_common; }

  Index count() const { return numel(extents()); }
  std::size_t size_bytes() const { return static_cast<std::size_t>(count()) * size_of(dtype()); }

 private:
  std::uint64_t version_ = 1;
  bool in_common_ = false;
};

namespace detail {
/// Is told of each parameter that wants a gradient and that an operation of this thread takes, while it is set.
class ParameterWatch {
 public:
  virtual void saw(const void* parameter, std::span<const Index> extents) = 0;

 protected:
  ~ParameterWatch() = default;
};
inline thread_local constinit ParameterWatch* parameter_watch = nullptr;
}  // namespace detail

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
  const void* grad_block() const override { return this->grad_memory().storage().block(); }
  bool grad_arrived() const override { return this->has_grad(); }
  void set_grad_arrived(bool arrived) override { this->set_has_grad(arrived); }
  std::uint32_t times_forgotten() const override { return GradNode<T, Rank, D>::times_forgotten(); }
  bool wants_grad() const override { return wants_grad_; }
  void set_wants_grad(bool wants) override { wants_grad_ = wants; }
  void bind(const Storage<D>& values, void* value, const Storage<D>& grads, void* grad) override {
    Tensor<T, Rank, D> place(values, static_cast<T*>(value), value_.shape(), row_major(value_.shape()));
    copy_bytes(place.device(), place.data(), value_.device(), value_.data(), value_.bytes());
    value_ = std::move(place);
    this->bind_grad({grads, static_cast<T*>(grad), value_.shape(), row_major(value_.shape())});
  }
  void on_grad(std::function<void()> hook) override { this->add_last_hook(std::move(hook)); }
  void take_hooks_of(const Ref<Node>& other) override {
    struct Others final : detail::GradientHook {
      explicit Others(Ref<Node> o) : owner(std::move(o)) {}
      void run(Node& node) override { owner->run_gradient_hooks_on(node); }
      Ref<Node> owner;
    };
    const auto& leaf = static_cast<const LeafNode<T, Rank, D>&>(*other);
    if (!leaf.has_hooks()) return;
    this->add_gradient_hook(std::make_unique<Others>(other));
    this->add_hook([other, &leaf] { leaf.run_hooks(); });
  }
  Ref<Node> copy_to(D device) const override {
    const MemoryScope scope(trace::Memory::parameters);
    auto copy = Tensor<T, Rank, D>::empty(value_.shape(), device);
    copy_bytes(device, copy.data(), value_.device(), value_.data(), value_.bytes());
    auto* made = new ParameterNode(std::move(copy));
    made->wants_grad_ = wants_grad_;
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
  Variable<T, Rank, D> as_variable() {
    if (!wants_grad_) return Variable<T, Rank, D>(value_);
    if (detail::parameter_watch != nullptr) [[unlikely]]
      detail::parameter_watch->saw(static_cast<const ParameterOn<D>*>(this), value_.shape());
    return {value_, origin_ ? origin_ : Ref<GradNode<T, Rank, D>>(this)};
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
  explicit Parameter(Tensor<T, Rank, D> value) { node_ = Ref<Node>(new ParameterNode<T, Rank, D>(std::move(value))); }

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
    check<ShapeError>(numbers.shape() == shape() && numbers.is_contiguous(),
                      "Parameter::assign: expected a dense tensor of shape ", shape(), ", got shape ", numbers.shape());
    copy_bytes(device(), value().data(), numbers.device(), numbers.data(), numbers.bytes());
    typed().touch();
  }
  /// See Variable::register_hook.
  template <class Hook>
  void register_hook(Hook hook) const {
    Variable<T, Rank, D>(value(), Ref<GradNode<T, Rank, D>>(&typed())).register_hook(std::move(hook));
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

 private:
  ParameterNode<T, Rank, D>& typed() const {
    check<UsageError>(node_.get() != nullptr,
                      "Parameter: it is empty (that of a layer without bias, say), so it has no gradient");
    return static_cast<ParameterNode<T, Rank, D>&>(*node_);
  }
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

/// Numbers that belong to a model and are saved with it, but are not trained (batch norm's running mean). The value of
/// an empty one is undefined.
template <Scalar T, int Rank, Device D = Cpu>
class Buffer : public AnyBuffer {
 public:
  Buffer() = default;
  explicit Buffer(Tensor<T, Rank, D> value) { node_ = Ref<Node>(new BufferNode<T, Rank, D>(std::move(value))); }
  const Tensor<T, Rank, D>& value() const {
    static const Tensor<T, Rank, D> none;
    return node_ ? static_cast<BufferNode<T, Rank, D>&>(*node_).value() : none;
  }
};

}  // namespace chorus::inline CHORUS_ABI
