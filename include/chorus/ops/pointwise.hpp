#pragma once
/// Element-wise functions of the library's or a user's functor, with broadcasting.

#include <algorithm>
#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/functors.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <span>
#include <type_traits>

namespace chorus {

// The tape's record of these operations, in addition to their backward functions: see ops/higher_order.hpp.
namespace operations {
template <class F>
struct Pointwise {
  static constexpr bool pointwise = true;
  static constexpr bool linear = requires { requires F::linear; };
  static constexpr bool bilinear = requires { requires F::bilinear; };
  static constexpr bool quotient = std::is_same_v<F, functors::Div>;
  const char* name;
  F f;
};
}  // namespace operations

namespace detail {

/// x broadcast to the shape, contiguous.
template <class T, int Rank, class D, std::size_t N>
Tensor<T, static_cast<int>(N), D> broadcast_to(const Tensor<T, Rank, D>& x, const std::array<Index, N>& shape) {
  return contiguous(x.expand(shape));
}

/// The layout of broadcast inputs: strides in the output's shape, 0 along repeated axes.
template <std::size_t Rank, std::size_t Inputs>
struct BroadcastLayout {
  std::array<Index, Rank> shape{};
  std::array<std::array<Index, Rank>, Inputs> strides{};
  bool same = true;  // whether all inputs have the output's shape

  template <std::size_t InputRank>
  void add(const char* operation, const std::array<Index, InputRank>& input, std::size_t i) {
    shape = broadcast_shapes(operation, shape, input);
    const auto dense = row_major(input);
    for (std::size_t axis = 0; axis < input.size(); ++axis)
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

template <Operand... Inputs>
inline constexpr int broadcast_rank = std::max({tensor_of<Inputs>::rank...});

template <Operand... Inputs>
struct RecordedBroadcast : RecordedFrom<broadcast_rank<Inputs...>, Inputs...> {};

template <class F, Operand... Inputs>
struct Map {
  using T = typename FirstOf<Inputs...>::value_type;
  using D = typename FirstOf<Inputs...>::device_type;
  static constexpr std::size_t count = sizeof...(Inputs), rank = broadcast_rank<Inputs...>;

  /// `input`: the operands' values, contiguous.
  static auto record(const char* operation, const F& f, const Inputs&... operands, const tensor_of<Inputs>&... input) {
    check_defined(operation, input...);
    check_same_device(operation, input...);
    BroadcastLayout<rank, count> layout;
    layout.shape.fill(1);
    std::size_t added = 0;
    (layout.add(operation, input.shape(), added++), ...);
    (layout.compare(input.shape()), ...);
    const D device = std::array<D, count>{input.device()...}[0];
    const std::array<const T*, count> inputs{input.data()...};
    auto out = Tensor<T, static_cast<int>(rank), D>::empty(layout.shape, device);
    if (count == 1 || layout.same) {
      kernels::pointwise_forward(device, f, out.numel(), inputs, out.data());
    } else if constexpr (count > 1) {
      kernels::pointwise_forward(device, f, std::span<const Index>(layout.shape), inputs, layout.spans(), out.data());
    }
    return chorus::record(
        operations::Pointwise<F>{operation, f}, std::move(out),
        [operation, f, layout, ... saved = Saved(input)](const auto& dy, auto... nodes) {
          std::array<T*, count> grads{};
          std::array<bool, count> accumulate{};
          // Kernels need distinct outputs. An operand that occurs twice gets a temporary, which is added afterwards.
          std::array<Storage<D>, count> again{};
          const auto want = [&](std::size_t i, auto node) {
            if (!node) return;
            // Operations may share a gradient's memory, leaves may not. Kernels are slow where another operand repeats.
            if constexpr (requires { requires F::passes_gradient; node->add(dy); })
              if (node->shape() == dy.shape() && (!node->is_leaf() || !layout.same))
                return node->add(node->is_leaf() ? clone(dy) : dy);
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
          std::size_t i = 0, j = 0, k = 0;
          (want(i++, nodes), ...);
          const std::array<bool, count> wanted{nodes != nullptr...};
          const auto number_of = [&](const auto& operand) {
            const std::size_t own = k++;
            bool needed = !operations::Pointwise<F>::linear;
            if constexpr (requires { requires F::bilinear; }) needed = wanted[1 - own];
            return (needed ? operand.read(operation) : operand.tensor()).data();
          };
          const std::array<const T*, count> numbers{number_of(saved)...};
          const T* gradient = dy.data();
          if (std::ranges::none_of(grads, [](const T* grad) { return grad != nullptr; })) return;
          if (count == 1 || layout.same) {
            kernels::pointwise_backward(dy.device(), f, dy.numel(), numbers, gradient, grads, accumulate);
          } else if constexpr (count > 1) {
            kernels::pointwise_backward(dy.device(), f, std::span<const Index>(layout.shape), numbers, layout.spans(),
                                        gradient, grads, layout.spans(), accumulate);
          }
          (add_again(j++, nodes), ...);
        },
        operands...);
  }
};

template <class F, Operand... Inputs>
typename RecordedBroadcast<Inputs...>::type map(const char* operation, const F& f, const Inputs&... inputs) {
  return Map<F, Inputs...>::record(operation, f, inputs..., contiguous(value_of(inputs))...);
}

template <class F, Operand... Inputs>
auto pointwise(const char* operation, const F& f, const Inputs&... inputs) {
  static_assert(of_one_type<Inputs...>,
                "element-wise: operands have different scalar types; to<float>(x) converts one");
  if constexpr (of_one_type<Inputs...>)
    return with_variables([&](const auto&... xs) { return map(operation, f, xs...); }, inputs...);
  else
    return typename RecordedBroadcast<Inputs...>::type();  // so that the message above is the only error
}

}  // namespace detail

/// `f` of each element, with one fused pass in forward and one in backward, which calls `f` with Dual numbers. A
/// functor is `struct SwiGlu { template <class S> CHORUS_HD S operator()(const S& a, const S& b) const { ... } };`. It
/// uses `where(condition, a, b)` instead of branches and calls math functions without a namespace. Operands broadcast
/// as in NumPy. Throws UsageError if one is undefined.
template <class F, Operand... Xs>
auto pointwise(const F& f, const Xs&... xs) {
  return detail::pointwise("pointwise", f, xs...);
}

}  // namespace chorus
