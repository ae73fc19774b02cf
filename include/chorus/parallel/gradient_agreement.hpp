#pragma once
/// What ranks tell each other after a backward pass: which gradients came, how often, in which order.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/parallel/gradient_layout.hpp>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::detail {

/// The largest of each entry's numbers. Parameters that are not sent are each rank's own, in number, too, but lie
/// behind the others.
template <Device D, class Communicator>
[[gnu::cold]] void max_over_ranks(const GradientLayout<D>& layout, Communicator& communicator,
                                  std::vector<std::int32_t>& numbers) {
  communicator.all_reduce(std::span(numbers).first(layout.common_entries()), comm::ReduceOp::max, {});
}

/// A parameter has a gradient where any rank used it; where none did it stays without, so that no optimizer moves it.
/// `company`: this rank has used none.
template <Device D, class Communicator>
[[gnu::cold]] void agree_on_unused(const GradientLayout<D>& layout, Communicator& communicator, bool company) {
  std::vector<std::int32_t> used(layout.entries());
  for (std::size_t i = 0; i < used.size(); ++i) used[i] = !company && layout.parameter(i).grad_arrived() ? 1 : 0;
  max_over_ranks(layout, communicator, used);
  for (std::size_t i = 0; i < used.size(); ++i)
    if (layout.is_sent(i)) layout.parameter(i).set_grad_arrived(used[i] != 0);
}

/// What a static graph uses, from how often each gradient has arrived on this rank in the first backward pass.
template <Device D, class Communicator>
[[gnu::cold]] std::vector<typename GradientLayout<D>::Uses> agree_on_uses(const GradientLayout<D>& layout,
                                                                          Communicator& communicator,
                                                                          std::span<const int> arrivals, bool company) {
  std::vector<std::int32_t> used(arrivals.begin(), arrivals.end());
  max_over_ranks(layout, communicator, used);
  std::vector<typename GradientLayout<D>::Uses> uses;
  for (std::size_t i = 0; i < used.size(); ++i)
    uses.push_back({company ? used[i] : arrivals[i], !layout.is_sent(i) || used[i] != 0});
  return uses;
}

/// The order in which rank `root` saw gradients come: `arrival` there. Those that are not sent stand at the end.
template <Device D, class Communicator>
[[gnu::cold]] std::vector<std::size_t> agree_on_order(const GradientLayout<D>& layout, Communicator& communicator,
                                                      std::span<const std::size_t> arrival, int root) {
  std::vector<std::int64_t> order;
  std::vector<char> placed(layout.entries());
  for (const Sending when : {Sending::early, Sending::late}) {
    const auto add = [&](std::size_t i) {
      if (layout.sending(i) == when && std::exchange(placed[i], 1) == 0) order.push_back(static_cast<std::int64_t>(i));
    };
    for (const std::size_t i : arrival) add(i);
    for (std::size_t i = 0; i < placed.size(); ++i) add(i);
  }
  if (communicator.size() > 1) communicator.broadcast(std::span<std::int64_t>(order), root, {});
  std::vector<std::size_t> indices(order.begin(), order.end());
  for (std::size_t i = 0; i < placed.size(); ++i)
    if (!layout.is_sent(i)) indices.push_back(i);
  return indices;
}

}  // namespace chorus::inline CHORUS_ABI::detail
