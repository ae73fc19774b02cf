#pragma once
/// Copies between devices as recorded operations, for forward passes that begin with GraphVariables: of the parameters
/// to the replicas (PyTorch's Broadcast, whose reverse adds the gradients up), of inputs and of outputs. They make one
/// graph of all devices, through which gradients of any order can be taken. Who has a GraphVariable has included
/// ops/higher_order.hpp; this header does without, for the sake of programs that have none.

#include <chorus/autograd/parameter.hpp>
#include <chorus/ops/device_copy.hpp>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace chorus::detail {

/// Makes `copy`, a replica's parameter that has the numbers of `original`, stand for a copy on the tape.
template <Real T, int Rank, Device D>
void record_parameter_copy(ParameterOn<D>& original, ParameterOn<D>& copy) {
  auto& from = static_cast<ParameterNode<T, Rank, D>&>(original);
  const auto& to = static_cast<const ParameterNode<T, Rank, D>&>(copy);
  copy.set_origin(record_copy(to.value(), GraphVariable(from.as_variable()), trace::Traffic::gradients).node());
}
/// The same for one of any type. Throws UsageError for more axes than a convolution's weight has.
template <Device D>
void record_parameter_copy(ParameterOn<D>& original, ParameterOn<D>& copy) {
  const auto of_rank = [&]<int Rank>(std::integral_constant<int, Rank>) {
    if (original.extents().size() != Rank) return false;
    if (original.dtype() == DType::f32)
      record_parameter_copy<float, Rank>(original, copy);
    else
      record_parameter_copy<double, Rank>(original, copy);
    return true;
  };
  const bool known = [&]<int... Rank>(std::integer_sequence<int, Rank...>) {
    return (of_rank(std::integral_constant<int, Rank>{}) || ...);
  }
  (std::make_integer_sequence<int, 6>{});
  check<UsageError>(known, "DataParallel: a parameter of ", original.extents().size(),
                    " axes can't be copied to devices for GraphVariables: 5 are the most");
}

/// Share [begin, end) of x along `dim`, on `device`.
template <AnyVariable X, Device D>
auto scatter_recorded(const X& x, int dim, Index begin, Index end, D device) {
  return copy_recorded(slice(GraphVariable(x), dim, begin, end), device, trace::Traffic::inputs);
}

/// Joins what the devices return, along `dim` on one of them; scalars become a vector. Shapes have been checked.
template <AnyVariable X, Device D>
auto gather_recorded(const std::vector<X>& parts, int dim, D device) {
  const auto near = [&](const X& part) {
    const auto copy = copy_recorded(part, device, trace::Traffic::outputs);
    if constexpr (tensor_of<X>::rank == 0)
      return reshape(copy, Shape<1>{1});
    else
      return copy;
  };
  std::vector<decltype(near(parts.front()))> list;
  for (const X& part : parts) list.push_back(near(part));
  return concat(tensor_of<X>::rank == 0 ? 0 : dim, std::span<const typename decltype(list)::value_type>(list));
}

}  // namespace chorus::detail
