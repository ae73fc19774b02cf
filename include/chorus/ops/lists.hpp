#pragma once
/// Lists of tensors: concat and stack of a std::vector in one pass, split, chunk, unbind, meshgrid. All are
/// differentiable.

#include <array>
#include <chorus/ops/rearranging.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/shape.hpp>
#include <cstddef>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

namespace detail {

/// The node of a list that is joined along an axis. Each part takes its block of the gradient.
template <Real T, int Rank, int PartRank, Device D>
class ListNode final : public GradNode<T, Rank, D> {
 public:
  struct Part {
    Ref<GradNode<T, PartRank, D>> input;
    Index start, count;
  };

  ListNode(const char* operation, const Tensor<T, Rank, D>& value, kernels::AxisShape whole, std::vector<Part> parts)
      : GradNode<T, Rank, D>(operation, value.shape(), value.device()), whole_(whole), parts_(std::move(parts)) {
    bool loose = false, of_data = false;
    for (const Part& part : parts_) {
      loose = loose || !part.input;
      of_data = of_data || !part.input || part.input->may_be_of_data();
    }
    this->set_operands(loose, !parts_.front().input, of_data);
    this->set_form(Node::Form::linear);
  }

  void backward(bool keep) override {
    if (!this->has_grad()) return;
    check<UsageError>(!parts_.empty(), "backward: the graph behind '", this->operation(),
                      "' was freed by an earlier backward; pass retain_graph = true to that one");
    const auto grad = this->take_grad();
    for (const Part& part : parts_)
      if (auto* const input = unless_skipped(part.input.get())) {
        const auto [to, accumulate] = input->target();
        kernels::take_block(to.device(), whole_, part.start, part.count, grad.data(), to.data(), accumulate);
      }
    if (!keep) parts_.clear();
  }
  void for_each_input(void (*visit)(Node&, void*), void* context) const override {
    for (const Part& part : parts_)
      if (part.input) visit(*part.input, context);
  }

 private:
  kernels::AxisShape whole_;
  std::vector<Part> parts_;
};

// Joins the list to a tensor of the given shape along an axis, where part i takes `count(its shape)` entries.
template <std::size_t Size, Operand X, class Count>
auto join_list(const char* operation, const std::array<Index, Size>& shape, std::size_t axis,
               const std::vector<X>& list, const Count& count) {
  using Numbers = tensor_of<X>;
  using T = typename Numbers::value_type;
  using D = typename Numbers::device_type;
  constexpr int rank = static_cast<int>(Size);
  const auto whole = around_axis(shape, axis);
  auto out = Tensor<T, rank, D>::empty(shape, value_of(list.front()).device());
  ++operations_ended;
  Index start = 0;
  const auto put = [&](const X& x) {
    const auto part = contiguous(value_of(x));
    check_same_device(operation, out, part);
    const Index entries = count(part.shape());
    kernels::put_block(out.device(), whole, start, entries, part.data(), out.data());
    start += entries;
    return entries;
  };
  if constexpr (AnyTensor<X>) {
    for (const X& x : list) put(x);
    return out;
  } else {
    using Node = ListNode<T, rank, Numbers::rank, D>;
    std::vector<typename Node::Part> parts;
    bool recorded = false;
    for (const X& x : list) {
      parts.push_back({grad_enabled() ? node_of(x) : Ref<GradNode<T, Numbers::rank, D>>(), start, put(x)});
      recorded = recorded || parts.back().input;
    }
    if (detects_anomalies()) [[unlikely]]
      check_finite(operation, out);
    if (!recorded) return Variable<T, rank, D>(std::move(out));
    Ref<GradNode<T, rank, D>> node(new Node(operation, out, whole, std::move(parts)));
    return Variable<T, rank, D>(std::move(out), std::move(node));
  }
}

// Whether a list is joined by operations of two operands, which an observer knows, or whose gradients are recorded.
template <Operand X>
bool is_joined_by_twos() {
  if constexpr (may_be_intercepted<X>)
    if (interceptor != nullptr) return true;
  return is_graph_variable<X> || operation_watch != nullptr;
}

template <Operand X>
void check_list(const char* operation, const std::vector<X>& list) {
  check<UsageError>(!list.empty(), operation, ": expected at least one tensor, got none");
  for (const X& x : list) check_defined(operation, value_of(x));
}

}  // namespace detail

/// Joins a list along an axis, in one pass. Throws UsageError for an empty list, ShapeError if sizes differ in other
/// axes, DeviceError if devices differ.
template <Operand X>
requires(tensor_of<X>::rank >= 0) auto concat(Index axis, const std::vector<X>& list) {
  detail::check_list("concat", list);
  const auto a = normalize_axis("concat", axis, tensor_of<X>::rank);
  using Joined = decltype(detail::plain_concat(axis, list.front(), list.front()));
  if (detail::is_joined_by_twos<X>()) {
    if constexpr (std::is_same_v<X, Joined>)
      return concat(axis, std::span<const X>(list));
    else
      return concat(axis, std::vector<Joined>(list.begin(), list.end()));
  }
  auto shape = value_of(list.front()).shape();
  shape[a] = 0;
  for (const X& x : list) {
    auto expected = value_of(x).shape();
    const Index size = std::exchange(expected[a], shape[a]);
    check<ShapeError>(expected == shape, "concat: shapes ", value_of(list.front()).shape(), " and ",
                      value_of(x).shape(), " differ outside of axis ", axis);
    shape[a] += size;
  }
  return Joined(detail::join_list("concat", shape, a, list, [a](const auto& part) { return part[a]; }));
}

/// Joins a list of tensors of one shape along a new axis, in one pass. Throws as concat does.
template <Operand X>
requires(tensor_of<X>::rank >= 0) auto stack(Index axis, const std::vector<X>& list) {
  detail::check_list("stack", list);
  const auto a = normalize_axis("stack", axis, tensor_of<X>::rank + 1);
  const auto& first = value_of(list.front()).shape();
  for (const X& x : list)
    check<ShapeError>(value_of(x).shape() == first, "stack: expected tensors of one shape, got ", first, " and ",
                      value_of(x).shape());
  using Wide = decltype(unsqueeze(list.front(), axis));
  if (detail::is_joined_by_twos<X>()) {
    std::vector<Wide> wide;
    for (const X& x : list) wide.push_back(unsqueeze(x, axis));
    return concat(axis, std::span<const Wide>(wide));
  }
  std::array<Index, static_cast<std::size_t>(tensor_of<X>::rank) + 1> shape{};
  for (std::size_t i = 0; i < shape.size(); ++i)
    shape[i] = i < a ? first[i] : i == a ? static_cast<Index>(list.size()) : first[i - 1];
  return Wide(detail::join_list("stack", shape, a, list, [](const auto&) { return Index{1}; }));
}

/// Parts of an axis of the given sizes. Throws ShapeError unless they sum to the axis's size.
template <Operand X>
auto split(const X& x, const std::vector<Index>& sizes, Index axis = 0) {
  const auto a = normalize_axis("split", axis, tensor_of<X>::rank);
  const auto& shape = value_of(x).shape();
  Index sum = 0;
  for (const Index size : sizes) {
    check<ShapeError>(size >= 0, "split: expected sizes of at least 0, got ", size);
    sum += size;
  }
  check<ShapeError>(sum == shape[a], "split: expected sizes with the sum ", shape[a], ", that of axis ", axis,
                    " of shape ", shape, ", got ", sum);
  std::vector<decltype(slice(x, axis, 0, 0))> parts;
  Index start = 0;
  for (const Index size : sizes) {
    parts.push_back(slice(x, axis, start, start + size));
    start += size;
  }
  return parts;
}
/// Parts of an axis of `size` entries each; the last may be smaller. Throws UsageError unless the size is positive.
template <Operand X>
auto split(const X& x, Index size, Index axis = 0) {
  check<UsageError>(size > 0, "split: expected a size of at least 1, got ", size);
  Index left = value_of(x).size(axis);
  std::vector<Index> sizes;
  for (; left > 0 || sizes.empty(); left -= sizes.back()) sizes.push_back(left < size ? left : size);
  return split(x, sizes, axis);
}

/// At most `chunks` parts of an axis, of equal size; the last may be smaller, and there may be fewer, as in PyTorch.
/// Throws UsageError unless `chunks` is positive.
template <Operand X>
auto chunk(const X& x, Index chunks, Index axis = 0) {
  check<UsageError>(chunks > 0, "chunk: expected at least 1 chunk, got ", chunks);
  const Index size = value_of(x).size(axis);
  if (size == 0) return split(x, std::vector<Index>(static_cast<std::size_t>(chunks)), axis);
  return split(x, (size + chunks - 1) / chunks, axis);
}

/// The entries of an axis, without it.
template <Operand X>
auto unbind(const X& x, Index axis = 0) {
  constexpr int rank = tensor_of<X>::rank;
  static_assert(rank >= 1, "unbind: expected at least one axis");
  const auto a = normalize_axis("unbind", axis, rank);
  const auto& shape = value_of(x).shape();
  const auto rest = detail::without_axis<rank>(shape, a);
  std::vector<decltype(reshape(x, rest))> entries;
  for (Index i = 0; i < shape[a]; ++i) entries.push_back(reshape(slice(x, axis, i, i + 1), rest));
  return entries;
}

/// The coordinates of a grid, a tuple of one tensor for each vector: all have the shape [size of the first vector, size
/// of the second, ...]. `const auto [y, x] = meshgrid(arange(h), arange(w));` (torch.meshgrid with indexing="ij").
template <Operand... Xs>
auto meshgrid(const Xs&... xs) {
  static_assert(((tensor_of<Xs>::rank == 1) && ...), "meshgrid: expected vectors");
  const std::array<Index, sizeof...(Xs)> whole{value_of(xs).size(0)...};
  std::size_t axis = 0;
  const auto along = [&](const auto& x) {
    std::array<Index, sizeof...(Xs)> shape{};
    shape.fill(1);
    shape[axis] = whole[axis];
    ++axis;
    return expand(reshape(x, shape), whole);
  };
  return std::tuple{along(xs)...};
}

}  // namespace chorus
