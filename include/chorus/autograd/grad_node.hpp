#pragma once
/// GradNode and LeafNode: nodes that hold a gradient, during backward or permanently.

#include <chorus/autograd/node.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

/// Where a backward function writes an input's gradient: contiguous memory that it adds to or overwrites.
template <Real T, int Rank, Device D>
struct GradTarget {
  Tensor<T, Rank, D> grad;
  bool accumulate = false;
  T* data() const { return grad.data(); }
};

namespace detail {
template <class T>
bool all_finite(const T* data, Index count) {
  for (Index i = 0; i < count; ++i)
    if (!std::isfinite(static_cast<double>(data[i]))) return false;
  return true;
}
template <class T, int Rank, class D>
[[gnu::noinline, gnu::cold]] bool all_finite(const Tensor<T, Rank, D>& x) {
  const auto host = contiguous(x).to_vector();
  return all_finite(host.data(), static_cast<Index>(host.size()));
}
template <class T, int Rank, class D>
[[gnu::noinline, gnu::cold]] void check_finite(const char* operation, const Tensor<T, Rank, D>& value) {
  // Attention masks are infinite on purpose.
  if (std::string_view(operation) == "masked_fill") return;
  check<NonFiniteError>(all_finite(value), "anomaly: a NaN or an infinity in the output of '", operation,
                        "', of shape ", value.shape());
}
}  // namespace detail

/// A node that holds the gradient of one value.
template <Real T, int Rank, Device D>
class GradNode : public Node {
 public:
  using tensor_type = Tensor<T, Rank, D>;

  GradNode(const char* operation, const Shape<Rank>& shape, D device)
      : Node(operation, Rank == 0), shape_(shape), device_(device) {}

  /// Where the next contribution is written. Marks the gradient as present.
  GradTarget<T, Rank, D> target() {
    grad_.storage().touch();
    if (!grad_.defined()) {
      grad_ = tensor_type::empty(shape_, device_);
    } else if (has_grad_ && !bound_ && grad_.storage().owners() > 1) {
      add_out_of_place(tensor_type::zeros(shape_, device_));
    }
    return {grad_, std::exchange(has_grad_, true)};
  }

  /// Adds a complete, contiguous contribution, whose memory others may share. A lazy one (see wide_later.hpp) stays
  /// lazy: the operation that made this value can take the narrow numbers.
  void add(const tensor_type& contribution) {
    if (!has_grad_ && !bound_) {
      grad_ = contribution;
      has_grad_ = true;
    } else {
      const auto [grad, accumulate] = target();
      contribution.storage().touch();
      if (accumulate)
        kernels::axpy(device_, grad.numel(), T{1}, contribution.data(), grad.data());
      else
        copy_bytes(device_, grad.data(), device_, contribution.data(), grad.bytes());
    }
  }

  /// Whether `add` would keep the memory that it is given, since this gradient has none yet.
  bool takes_over() const { return !grad_.defined(); }

  bool has_grad() const final { return has_grad_; }
  void drop_grad() final {
    if (this->is_leaf()) return;
    has_grad_ = false;
    grad_ = {};
  }
  /// The gradient; undefined if there is none.
  tensor_type grad() const {
    grad_.storage().touch();
    return has_grad_ ? grad_ : tensor_type{};
  }
  /// Replaces the gradient's values. Throws ShapeError if the shapes differ.
  void replace_grad(const tensor_type& other) {
    check<ShapeError>(other.defined() && other.shape() == shape_, "register_hook: the hook of a gradient of shape ",
                      shape_, " returned shape ", other.shape());
    const auto dense = contiguous(other);
    if (dense.data() == grad_.data()) return;
    if (bound_)
      copy_bytes(device_, grad_.data(), dense.device(), dense.data(), dense.bytes());
    else
      grad_ = dense;
    has_grad_ = true;
  }
  /// Clears the gradient but keeps its memory, which the next contribution overwrites. Handles that others hold keep
  /// the old values.
  void zero_grad() {
    if (grad_.storage().owners() > 1) {
      if (!bound_)
        grad_ = {};
      else if (has_grad_)
        leave_to_holders();
    }
    set_has_grad(false);
  }
  const Shape<Rank>& shape() const { return shape_; }
  D device() const { return device_; }
  bool gradient_is_finite() const override { return !has_grad_ || detail::all_finite(grad()); }

  /// A gradient and whether it is bound to a place.
  struct Held {
    tensor_type grad;
    bool has_grad = false, bound = false;
  };
  /// Replaces this gradient and returns the old one. `grad` uses it to leave accumulated gradients alone.
  Held exchange_grad(Held held) {
    return {std::exchange(grad_, std::move(held.grad)), std::exchange(has_grad_, held.has_grad),
            std::exchange(bound_, held.bound)};
  }

 protected:
  // The value has a new shape, so the old gradient and its memory are dropped.
  void change_shape(const Shape<Rank>& shape) {
    set_has_grad(false);
    shape_ = shape;
    grad_ = {};
    bound_ = false;
  }
  // Moves the gradient to a permanent place: a range of the flat buffer `whole`.
  void bind_grad(const Storage<D>& whole, T* place) {
    const auto bytes = static_cast<std::size_t>(numel(shape_)) * sizeof(T);
    if (has_grad_) copy_bytes(whole.device(), place, device_, grad_.data(), bytes);
    device_ = whole.device();
    if (bound_)
      grad_.storage().move_home(whole, place);
    else
      grad_ = {Storage<D>::home_in(whole, place, bytes), place, shape_, row_major(shape_)};
    bound_ = true;
  }
  // Moves the gradient to new memory on another device.
  void move_grad(D device) {
    if (grad_.defined()) {
      const auto near = tensor_type::empty(shape_, device);
      if (has_grad_) copy_bytes(device, near.data(), device_, grad_.data(), grad_.bytes());
      if (bound_)
        grad_.storage().move_home(near.storage(), near.data());
      else
        grad_ = near;
    }
    device_ = device;
  }
  tensor_type take_grad() {
    has_grad_ = false;
    if (this->scale() != 1) [[unlikely]]
      return take_scaled();
    return std::move(grad_);
  }
  void set_has_grad(bool has) {
    has_grad_ = has;
    if (!has) ++times_forgotten_;
  }
  std::uint32_t times_forgotten() const { return times_forgotten_; }
  const tensor_type& grad_memory() const { return grad_; }

 private:
  // Handles keep the old values in new memory; the next gradient uses the bound place.
  [[gnu::noinline, gnu::cold]] void leave_to_holders() {
    const MemoryScope scope(trace::Memory::gradients);
    const Storage<D> held = grad_.storage(), whole = held.memory(), aside(device_, grad_.bytes());
    T* const place = grad_.data();
    copy_bytes(device_, aside.data(), device_, place, grad_.bytes());
    grad_ = {Storage<D>::home_in(whole, place, grad_.bytes()), place, shape_, row_major(shape_)};
    held.move_home(aside, aside.data());
  }
  // Not in place: others may share this memory.
  [[gnu::noinline, gnu::cold]] tensor_type take_scaled() {
    auto scaled = tensor_type::zeros(shape_, device_);
    grad_.storage().touch();
    kernels::axpy(device_, scaled.numel(), static_cast<T>(this->scale()), grad_.data(), scaled.data());
    grad_ = {};
    return scaled;
  }
  // Others share this memory, so accumulation continues in a copy.
  void add_out_of_place(tensor_type copy) {
    copy_bytes(device_, copy.data(), device_, grad_.data(), grad_.bytes());
    grad_ = std::move(copy);
  }

  Shape<Rank> shape_;
  D device_;
  tensor_type grad_;
  bool has_grad_ = false;
  bool bound_ = false;
  std::uint32_t times_forgotten_ = 0;
};

/// The node of a leaf: a value that no operation made.
template <Real T, int Rank, Device D>
class LeafNode : public GradNode<T, Rank, D> {
 public:
  explicit LeafNode(const Tensor<T, Rank, D>& value) : GradNode<T, Rank, D>("leaf", value.shape(), value.device()) {}

  void backward(bool) override {}
  void for_each_input(void (*)(Node&, void*), void*) const override {}
  bool is_leaf() const override { return true; }
  void gradient_is_final() override {
    this->run_gradient_hooks();
    run_hooks();
    for (const auto& hook : last_hooks_) hook();
  }
  void run_hooks() const {
    for (const auto& hook : hooks_) hook();
  }
  bool has_hooks() const { return !hooks_.empty() || this->has_gradient_hooks(); }
  /// `hook` runs in each backward as soon as this leaf's gradient is complete.
  void add_hook(std::function<void()> hook) { hooks_.push_back(std::move(hook)); }
  /// The same, but after all other hooks, since it hands the gradient on.
  void add_last_hook(std::function<void()> hook) { last_hooks_.push_back(std::move(hook)); }

 private:
  std::vector<std::function<void()>> hooks_, last_hooks_;
};

namespace detail {
template <class Hook, class N>
struct TypedHook final : GradientHook {
  explicit TypedHook(Hook h) : hook(std::move(h)) {}
  void run(Node& node) override {
    auto& typed = static_cast<N&>(node);
    const auto grad = typed.grad();
    if (!grad.defined()) return;
    if constexpr (std::is_void_v<decltype(hook(grad))>)
      hook(grad);
    else
      typed.replace_grad(hook(grad));
  }
  Hook hook;
};
}  // namespace detail

}  // namespace chorus
