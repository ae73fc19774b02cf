#pragma once
/// Type-erased messages between pipeline stages: activations in forward, their gradients in backward.

#include <algorithm>
#include <array>
#include <chorus/autograd/variable.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace chorus::pipeline {

/// Precedes each message. Stages know the types at a cut from the model's type, but not the shapes.
struct Header {
  std::int32_t micro_batch = 0, stage = 0;  ///< of the input, or of the output whose gradient follows
  std::uint32_t next_operation = 0;         ///< the counter of random operations so far
  DType dtype{};
  std::uint8_t rank = 0;
  std::uint8_t wants_grad = 0;  ///< whether the sender waits for the gradient
  std::uint8_t drew = 0;        ///< whether a layer has drawn random numbers
  std::uint8_t part = 0;        ///< 0: the activation between layers; 1 and more: stashed values
  std::uint8_t stashed = 0;     ///< in part 0: number of stashed values that follow
  std::array<char, 22> name{};  ///< of the stashed value
  std::array<Index, 8> extents{};
  std::uint64_t batch = 0;  ///< in the first micro-batch: a fingerprint of the whole batch

  std::size_t bytes() const {
    std::size_t bytes = size_of(dtype);
    for (std::size_t axis = 0; axis < rank; ++axis) bytes *= static_cast<std::size_t>(extents[axis]);
    return bytes;
  }
};
static_assert(sizeof(Header) == 112);

/// The input or the output of a stage.
template <Device D>
class AnyActivation {
 public:
  virtual ~AnyActivation() = default;
  /// Dtype, rank, extents and `wants_grad`.
  virtual Header header() const = 0;
  virtual std::size_t bytes() const = 0;
  /// The values, contiguous.
  virtual void* numbers() const = 0;
  /// For an output: memory for its gradient, to be filled before `take_gradient`.
  virtual void* gradient_buffer() = 0;
  /// Adds that gradient to the output's node, from which backward continues; null if there is none.
  virtual Ref<Node> take_gradient() = 0;
  /// For an input: its gradient, contiguous; zeros if none has arrived.
  virtual void* gradient() = 0;
};

template <class X>
class Activation final : public AnyActivation<typename tensor_of<X>::device_type> {
  using T = typename tensor_of<X>::value_type;
  using D = typename tensor_of<X>::device_type;
  static constexpr int rank = tensor_of<X>::rank;

 public:
  explicit Activation(X x) : value(dense(std::move(x))) {}
  /// An input with room for values to receive. Throws UsageError if `header` describes another type.
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
  void* gradient_buffer() override {
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
  // Messages are contiguous. A contiguous copy keeps the node, so its gradient flows back as before.
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
    check<UsageError>(header.dtype == dtype<T> && header.rank == rank, "Pipeline: stage ", header.stage, ": expected ",
                      dtype<T>, " with ", rank, " axes, got ", header.dtype, " with ", int{header.rank},
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

/// A value stashed in an earlier stage. Its type is unknown until this stage pops it, if it does.
template <Device D>
class RawActivation final : public AnyActivation<D> {
 public:
  RawActivation(const Header& header, D device) : header_(header), numbers_(device, header.bytes()) {}

  Header header() const override { return header_; }
  std::size_t bytes() const override { return header_.bytes(); }
  void* numbers() const override { return numbers_.data(); }
  void* gradient_buffer() override {
    gradient_ = Storage<D>(numbers_.device(), bytes());
    return gradient_.data();
  }
  Ref<Node> take_gradient() override { return {}; }
  /// The gradient of the popped value; if none was popped here, the one received from the next stage.
  void* gradient() override { return popped_ ? popped_->gradient() : gradient_.data(); }

  /// The value as a Variable X. Throws UsageError if the types differ.
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
