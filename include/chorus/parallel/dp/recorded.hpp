#pragma once
/// An extension for gradients of gradients: if an input is a GraphVariable, the work of all devices is one graph on the
/// tape. Each copy between devices is an operation in it: of parameters (PyTorch's Broadcast, whose backward sums the
/// gradients), of inputs and of outputs. A program with GraphVariables includes ops/higher_order.hpp; this header
/// doesn't, to keep other programs small.

#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/ops/device_copy.hpp>
#include <chorus/parallel/dp/gather.hpp>
#include <chorus/parallel/dp/pass.hpp>
#include <chorus/parallel/dp/replicate.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::dp {

/// Whether a forward pass with these inputs is recorded as one graph.
template <class... Inputs>
inline constexpr bool is_recorded = (detail::holds_graph_variables<Inputs> || ...);

/// Records `copy`, a replica's parameter with the values of `original`, on the tape as a copy of it.
template <Real T, int Rank, Device D>
void record_parameter_copy(ParameterOn<D>& original, ParameterOn<D>& copy) {
  auto& from = static_cast<ParameterNode<T, Rank, D>&>(original);
  const auto& to = static_cast<const ParameterNode<T, Rank, D>&>(copy);
  copy.set_origin(detail::record_copy(to.value(), GraphVariable(from.as_variable()), trace::Traffic::gradients).node());
}
/// The same for a parameter of any type. Throws UsageError for more than 5 axes.
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
                    " axes can't be copied to devices for GraphVariables, expected at most 5");
}

/// MakeShare that turns Variables into GraphVariables.
template <class D>
struct MakeRecordedShare : MakeShare<D> {
  using MakeShare<D>::MakeShare;
  template <class X>
  decltype(auto) operator()(const std::array<const X*, 1>& input) const {
    if constexpr (!AnyVariable<X>) {
      return MakeShare<D>::operator()(input);
    } else {
      const auto& x = detail::variable_of(*input[0]);
      const auto whole_or_part = [&] {
        if (!this->split.cuts(*input[0])) return GraphVariable(x);
        const Index begin = this->split.begin(this->number);
        return slice(GraphVariable(x), detail::batch_axis_of<X>(this->split.dim), begin,
                     begin + this->split.size(this->number));
      };
      return detail::with_batch_axis_of<X>(
          detail::copy_recorded(whole_or_part(), this->device, trace::Traffic::inputs));
    }
  }
};

/// JoinOutputs that joins Variables with recorded operations.
template <class D>
struct JoinRecordedOutputs : JoinOutputs<D> {
  using JoinOutputs<D>::JoinOutputs;
  template <class X>
  auto operator()(const std::vector<const X*>& outputs) const {
    if constexpr (!detail::is_variable<X> && !detail::is_graph_variable<X>) {
      return JoinOutputs<D>::operator()(outputs);
    } else {
      const auto axis = static_cast<int>(this->axis_of(outputs));
      const auto near = this->with_axes(outputs, [this](const X& output) {
        return detail::copy_recorded(detail::variable_of(output), this->device, trace::Traffic::outputs);
      });
      const auto joined = concat(axis, std::span<const typename decltype(near)::value_type>(near));
      if constexpr (detail::is_graph_variable<X>)
        return detail::with_batch_axis_of<X>(joined);
      else
        return detail::with_batch_axis_of<X>(joined.as_variable());
    }
  }
};

/// Steps 1 to 3. Operations are recorded in the order of the devices, not of their threads, so backward sums in the
/// reverse of that order. There is no step 5.
template <class Model, class Shares, class Output, class Apply, class... Inputs>
void recorded_forward(const std::shared_ptr<Pass<Model, Shares, Output>>& pass, const Replicas<Model>& replicas,
                      Apply& parallel_apply, const Inputs&... inputs) {
  const std::size_t devices = pass->split.devices;
  parallel_apply.run(devices, [&](std::size_t i) { replicate(replicas, i); });
  for (std::size_t i = 0; i < devices; ++i) {
    if (i > 0) {
      replicas[i].begin_recording();
      for (std::size_t p = 0; p < replicas.parameters(0).entries().size(); ++p)
        record_parameter_copy(replicas.parameters(0).entries()[p].parameter(),
                              replicas.parameters(i).entries()[p].parameter());
    }
    pass->shares[i].emplace(
        scatter<MakeRecordedShare>(pass->split, i, replicas.device(i), pass->returns[i], inputs...));
  }
  parallel_apply(
      devices, [pass](std::size_t i) { pass->forward(i); }, true);
}

}  // namespace chorus::dp
