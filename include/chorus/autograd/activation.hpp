#pragma once
/// What crosses a cut of a pipeline, without its type: numbers forward, the gradient by them backward.

#include <algorithm>
#include <array>
#include <chorus/autograd/variable.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

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
