#pragma once
/// How a batch's cut is found, which gradients may reach a net, and how the shares of all processes are added up.

#include <algorithm>
#include <chorus/autograd/found_nodes.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/batch_group.hpp>
#include <chorus/ops/mean_of_parts.hpp>
#include <chorus/same_bits/batch_cut.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

namespace chorus::same_bits {

CHORUS_INLINE std::shared_ptr<const BatchCut> find_cut(Node* node) {
  std::shared_ptr<const BatchCut> found;
  if (node == nullptr || CutsBatches::policies == 0 || detail::computes_part || !grad_enabled()) return found;
  detail::FoundNodes nodes;
  nodes.add(*node);
  nodes.walk([&](const Node& next) {
    const auto* const shares = dynamic_cast<const CutNode*>(&next);
    if (shares == nullptr) return true;
    const auto& cut = shares->cut;
    check<UsageError>(!found || (found->samples() == cut->samples() && found->run() == cut->run()),
                      "canonical shares: a loss combines two outputs whose batches are cut in different ways: ",
                      found ? found->samples() : 0, " and ", cut->samples(), " samples in ",
                      found ? found->run().count() : 0, " and ", cut->run().count(), " shares");
    found = cut;
    return false;
  });
  return found;
}

CHORUS_INLINE void check_means(std::span<const Ref<Node>> nodes) {
  const auto is_mean = [](const Node& node) {
    return std::string_view(node.operation()) == detail::mean_of_parts_name;  // maybe another file's copy of the name
  };
  const auto is_cut = [](const Node& node) { return dynamic_cast<const CutNode*>(&node) != nullptr; };
  detail::FoundNodes under;
  for (const Ref<Node>& node : nodes)
    if (is_mean(*node)) under.add_inputs_of(*node);
  under.walk([&](const Node& node) { return !is_cut(node); });
  for (const Node* const node : under.all())
    check<UsageError>(!node->is_leaf() || node->numbers_name()[0] == '\0',
                      "canonical shares: the loss uses the parameter ", node->numbers_name(),
                      " outside of the net's forward pass: use it in the model");
  detail::FoundNodes beside;  // inputs of nodes other than means
  for (const Ref<Node>& node : nodes)
    if (!is_mean(*node) && !under.has(*node)) beside.add_inputs_of(*node);
  for (const Node* const node : beside.all())
    check<UsageError>(!is_cut(*node) && !under.has(*node),
                      "canonical shares: backward does not begin at a mean over the batch: expected mean(), "
                      "cross_entropy(), mse_loss() or another loss of the library, of the net's output for samples");
}

CHORUS_INLINE BatchParts::Mean BatchCut::add_up(std::span<const double> sums, std::span<const double> overs) const {
  std::vector<double> numbers(3 * shares_);  // for all shares: sums, divisors, numbers of samples
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::size_t share = run_.begin + i;
    numbers[share] = sums[i];
    numbers[shares_ + share] = overs[i];
    numbers[2 * shares_ + share] = static_cast<double>(size(i));
  }
  sum_over_processes(numbers);
  const auto of_shares = [&](std::size_t which) { return std::span(numbers).subspan(which * shares_, shares_); };
  const auto samples = of_shares(2);
  const auto batch = static_cast<std::int64_t>(std::accumulate(samples.begin(), samples.end(), 0.0));
  for (std::size_t i = 0; i < shares_; ++i) {
    const auto expected = share_begin(batch, shares_, i + 1) - share_begin(batch, shares_, i);
    check<UsageError>(samples[i] == static_cast<double>(expected), "canonical shares: of ", batch, " samples in ",
                      shares_, " shares, share ", i, " has ", samples[i], ", expected ", expected,
                      ": use the policy's sampler, which gives each process its shares");
  }
  const auto used = static_cast<std::size_t>(std::min<std::int64_t>(batch, static_cast<std::int64_t>(shares_)));
  return {add_shares(of_shares(0).first(used)), add_shares(of_shares(1).first(used))};
}

}  // namespace chorus::same_bits
