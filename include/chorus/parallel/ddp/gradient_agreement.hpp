#pragma once
/// What ranks tell each other after a backward pass: which gradients came, how often, in which order.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/parallel/ddp/gradient_layout.hpp>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus::detail {

/// Which gradients came in a backward pass.
struct UsedParameters {
  std::vector<char> anywhere;  ///< by entry: whether one came on any rank
  bool all = true;             ///< whether all came on every rank
};

/// The same for all ranks. `company`: this rank has used none, but only since it has run out of batches.
template <Device D, class Communicator>
[[gnu::cold]] UsedParameters agree_on_used(const GradientLayout<D>& layout, Communicator& communicator, bool company) {
  std::vector<std::int32_t> used(layout.common_entries() + 1);
  auto& one_lacks = used.back();
  for (std::size_t i = 0; i + 1 < used.size(); ++i) {
    used[i] = !company && layout.parameter(i).grad_arrived() ? 1 : 0;
    if (!company && layout.is_shared(i) && used[i] == 0) one_lacks = 1;
  }
  communicator.all_reduce(std::span(used), comm::ReduceOp::max, {});
  UsedParameters out{std::vector<char>(layout.entries()), one_lacks == 0};
  std::copy(used.begin(), used.end() - 1, out.anywhere.begin());
  return out;
}

/// Warns, once, where find_unused_parameters has found none (PyTorch does after the first pass).
class UnusedWatch {
 public:
  static constexpr int passes = 10;

  /// A backward pass has ended in which `all` parameters were used on every rank, or not.
  void saw(bool all, int rank) {
    found_ = found_ || !all;
    if (found_ || ++complete_ != passes || rank != 0) return;
    say(cat(
        "warning: DistributedDataParallel: find_unused_parameters is set, but in the first ", passes,
        " backward passes every parameter got a gradient on every rank; without it a step has one collective less. ",
        "If later passes leave parameters out, it is needed."));
  }

 private:
  int complete_ = 0;
  bool found_ = false;
};

/// What a static graph uses, from how often each gradient has arrived on this rank in the first backward pass.
template <Device D, class Communicator>
[[gnu::cold]] std::vector<typename GradientLayout<D>::Uses> agree_on_uses(const GradientLayout<D>& layout,
                                                                          Communicator& communicator,
                                                                          std::span<const int> arrivals, bool company) {
  std::vector<std::int32_t> used(arrivals.begin(), arrivals.end());
  // Parameters that are not sent are each rank's own, in number, too, but lie behind the others.
  communicator.all_reduce(std::span(used).first(layout.common_entries()), comm::ReduceOp::max, {});
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

}  // namespace chorus::detail
