#pragma once
/// Buffer: values that a model owns but does not train.

#include <chorus/autograd/at_home.hpp>
#include <span>
#include <utility>

namespace chorus {

/// A buffer whose scalar type and rank are known only at run time.
template <Device D>
class BufferOn : public detail::AtHome<D> {
 public:
  /// The values, to read or write: see Buffer::value.
  void* data() const { return this->watched_memory(); }
  virtual Ref<Node> copy_to(D device) const = 0;
  /// Moves the values to another device. Handles stay valid.
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
    copy_bytes(device, copy.data(), value_.device(), this->memory(), value_.bytes());
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
  /// Makes this handle refer to another buffer of the same type. Policies use it to make replicas.
  void replace(Ref<Node> node) { node_ = std::move(node); }

  /// Throws DeviceError if the buffer is not on a device of kind `D`.
  template <Device D>
  BufferOn<D>& on() const {
    auto* buffer = dynamic_cast<BufferOn<D>*>(node_.get());
    check<DeviceError>(buffer != nullptr, "buffer: expected one on a ", D::kind, " device");
    return *buffer;
  }

 protected:
  Ref<Node> node_;
};

/// Values that a model owns and saves but does not train, such as batch norm's running mean. An empty buffer's value is
/// undefined.
template <Scalar T, int Rank, Device D = Cpu>
class Buffer : public AnyBuffer {
 public:
  Buffer() = default;
  explicit Buffer(const Tensor<T, Rank, D>& value) { node_ = Ref<Node>(new BufferNode<T, Rank, D>(value)); }
  /// The values, to read or write: see Parameter::value.
  const Tensor<T, Rank, D>& value() const {
    if (node_) typed().storage().watch();
    return value_of(*this);
  }
  /// Copies values into the buffer. Throws ShapeError if the shapes differ.
  void assign(const Tensor<T, Rank, D>& numbers) const {
    const auto& own = value_of(*this);
    check<ShapeError>(node_ && numbers.shape() == own.shape() && numbers.is_contiguous(),
                      "Buffer::assign: expected a dense tensor of shape ", own.shape(), ", got shape ",
                      numbers.shape());
    copy_bytes(own.device(), own.data(), numbers.device(), numbers.data(), numbers.bytes());
    typed().touch_by_hand();
  }

  /// For reading. Library code that writes calls the node's `touch`.
  friend const Tensor<T, Rank, D>& value_of(const Buffer& buffer) {
    static const Tensor<T, Rank, D> none;
    return buffer.node_ ? buffer.typed().value() : none;
  }

 private:
  BufferNode<T, Rank, D>& typed() const { return static_cast<BufferNode<T, Rank, D>&>(*node_); }
};

}  // namespace chorus
