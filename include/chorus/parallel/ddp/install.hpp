#pragma once
/// Which extensions a net begins with. Others are added by the calls that need them.

#include <chorus/parallel/ddp/buffers.hpp>
#include <chorus/parallel/ddp/chosen_parameters.hpp>
#include <chorus/parallel/ddp/clock.hpp>
#include <chorus/parallel/ddp/frozen_parameters.hpp>
#include <chorus/parallel/ddp/hook_calls.hpp>
#include <chorus/parallel/ddp/hook_memory.hpp>
#include <chorus/parallel/ddp/learned_order.hpp>
#include <chorus/parallel/ddp/non_finite.hpp>
#include <chorus/parallel/ddp/parameter_averaging.hpp>
#include <chorus/parallel/ddp/parts.hpp>
#include <chorus/parallel/ddp/several_nets.hpp>
#include <chorus/parallel/ddp/static_graph.hpp>
#include <chorus/parallel/ddp/unused_parameters.hpp>
#include <utility>

namespace chorus::ddp {

/// In the order in which they are called at each moment. Throws UsageError where there is nothing to average.
template <Device D, class Hook, class Communicator>
[[gnu::cold]] void install_extensions(Core<D, Communicator>& core, HookCalls<D, Hook, Communicator>& calls,
                                      const bool& operators_send, typename Buffers<D, Communicator>::Policy buffers) {
  using Traits = HookTraits<Hook, D, Communicator>;
  const auto& options = core.options;
  if (ChosenParameters<D, Communicator>::wanted(options)) core.template add<ChosenParameters<D, Communicator>>(core);
  core.template add<FrozenParameters<D, Communicator>>(core);
  core.template add<Clock<D, Communicator>>(core);
  core.template add<SeveralNets<D, Communicator>>(core, operators_send);
  core.template add<Buffers<D, Communicator>>(core, std::move(buffers));
  if (options.static_graph)
    core.template add<StaticGraph<D, Communicator>>(core);
  else if (options.find_unused_parameters)
    core.template add<UnusedParameters<D, Communicator>>(core);
  if (options.non_finite != NonFinite::propagate)
    core.template add<NonFiniteGradients<D, Communicator>>(core, Traits::in_parts || Traits::own_gradients);
  if constexpr (ParameterAveraging<D, Hook, Communicator>::wanted)
    core.template add<ParameterAveraging<D, Hook, Communicator>>(core, calls.hook);
  if (LearnedOrder<D, Communicator>::wanted(options)) core.template add<LearnedOrder<D, Communicator>>(core);
  if constexpr (Traits::in_parts) core.template add<GradientParts<D, Communicator>>(core, calls.averaging);
  core.cut_buckets();
  check<UsageError>(!core.buckets.all().empty(), "DistributedDataParallel: no parameter of the model wants a gradient",
                    options.parameters_and_buffers_to_ignore.empty() ? "" : " that ranks share");
  if constexpr (Traits::remembers_parameters || Traits::resets)
    core.template add<HookMemory<D, Hook, Communicator>>(core, calls.hook);
}

}  // namespace chorus::ddp
