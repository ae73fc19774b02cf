#pragma once
/// How a batch's cut is found, and what may go back into a net.

#include <algorithm>
#include <chorus/autograd/found_nodes.hpp>
#include <chorus/autograd/parameter.hpp>
#include <chorus/core/canonical_cut.hpp>
#include <chorus/kernels/axis_shape.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/reduction.hpp>
#include <chorus/ops/canonical_mean.hpp>
#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

namespace chorus::detail {

CHORUS_INLINE std::shared_ptr<const CanonicalCut> find_cut(Node* node) {
  std::shared_ptr<const CanonicalCut> found;
  if (node == nullptr || within_share() || !grad_enabled()) return found;
  FoundNodes nodes;
  nodes.add(*node);
  nodes.walk([&](const Node& next) {
    const auto* const cut = next.canonical_cut();
    if (cut == nullptr) return true;
    check<UsageError>(!found || (found->samples() == (*cut)->samples() && found->run() == (*cut)->run()),
                      "canonical shares: a loss of two outputs, of batches that are cut in different ways: ",
                      found ? found->samples() : 0, " and ", (*cut)->samples(), " samples in ",
                      found ? found->run().count() : 0, " and ", (*cut)->run().count(), " shares");
    found = *cut;
    return false;
  });
  return found;
}

CHORUS_INLINE void check_canonical_means(std::span<const Ref<Node>> nodes) {
  const auto is_mean = [](const Node& node) {
    return std::string_view(node.operation()) == canonical_mean_name;  // it may be another file's copy of the name
  };
  FoundNodes under;
  for (const Ref<Node>& node : nodes)
    if (is_mean(*node)) under.add_inputs_of(*node);
  under.walk([](const Node& node) { return node.canonical_cut() == nullptr; });
  for (const Node* const node : under.all())
    check<UsageError>(!node->is_leaf() || node->numbers_name()[0] == '\0',
                      "canonical shares: the loss uses the parameter ", node->numbers_name(),
                      " outside of the net's forward pass, where samples are not in shares: use it in the model");
  FoundNodes beside;  // what others than means go back into
  for (const Ref<Node>& node : nodes)
    if (!is_mean(*node) && !under.has(*node)) beside.add_inputs_of(*node);
  for (const Node* const node : beside.all())
    check<UsageError>(node->canonical_cut() == nullptr && !under.has(*node),
                      "canonical shares: backward begins with something other than a mean over the batch: expected "
                      "mean(), cross_entropy(), mse_loss() or another loss of the library, taken of what the net "
                      "returned for its samples");
}

CHORUS_INLINE WholeMean add_shares(const CanonicalCut& cut, std::span<const double> sums,
                                   std::span<const double> overs) {
  const std::size_t shares = cut.shares();
  std::vector<double> numbers(3 * shares);  // of all shares: sums, what they are divided by, numbers of samples
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::size_t share = cut.run().begin + i;
    numbers[share] = sums[i];
    numbers[shares + share] = overs[i];
    numbers[2 * shares + share] = static_cast<double>(cut.size(i));
  }
  cut.sum_over_processes(numbers);
  const auto of_shares = [&](std::size_t which) { return std::span(numbers).subspan(which * shares, shares); };
  const auto samples = of_shares(2);
  const auto batch = static_cast<std::int64_t>(std::accumulate(samples.begin(), samples.end(), 0.0));
  for (std::size_t i = 0; i < shares; ++i) {
    const auto expected = share_begin(batch, shares, i + 1) - share_begin(batch, shares, i);
    check<UsageError>(samples[i] == static_cast<double>(expected), "canonical shares: of ", batch, " samples in ",
                      shares, " shares, share ", i, " has ", samples[i], ", expected ", expected,
                      ": each process takes its shares of the batch, as the policy's sampler gives them");
  }
  const auto used = static_cast<std::size_t>(std::min<std::int64_t>(batch, static_cast<std::int64_t>(shares)));
  return {chorus::add_shares(of_shares(0).first(used)), chorus::add_shares(of_shares(1).first(used))};
}

}  // namespace chorus::detail
