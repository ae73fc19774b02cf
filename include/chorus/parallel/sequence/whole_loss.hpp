#pragma once
/// The loss of all ranks' tokens.

#include <chorus/autograd/loss_terms.hpp>
#include <chorus/core/error.hpp>
#include <chorus/parallel/loss_share.hpp>
#include <chorus/parallel/sequence/ring.hpp>
#include <cstddef>
#include <vector>

namespace chorus::sequence {

/// The value of a loss over all members' tokens; `root` and `value`: of this rank's. Means are weighted by what they
/// count, sums are added. A collective. Throws UsageError if the loss is no linear function of these.
template <class Communicator>
double whole_loss(Node& root, double value, const Ring<Communicator>& ring) {
  detail::LossTerms terms;
  terms.find(root);
  terms.check_linear("SequenceParallel");
  const auto values = terms.values(root, value);
  std::vector<double> sums{value};  // what is no term depends on parameters alone
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto& term = terms.all()[i];
    if (term.may_be_penalty) continue;
    Node& origin = *term.origin;
    check<UsageError>(origin.is_mean() || origin.divisor() != 0 ||
                          !(term.factor.by_tensor || term.factor.may_be_own(origin.counted())),
                      "SequenceParallel: the model's loss is a sum over tokens divided by ", 1 / term.factor.all,
                      detail::own_mean);
    const double over = origin.is_mean() ? origin.mean_over() : 1;
    sums[0] -= values[i];
    sums.push_back(over == 0 ? 0 : over * values[i]);
    sums.push_back(origin.is_mean() ? over : 0);
  }
  check<UsageError>(sums.size() > 1 || terms.has_more(),
                    "SequenceParallel: expected the model to return a mean or sum "
                    "over tokens, or a value for each token, got a number");
  if (ring.member() != 0) sums[0] = 0;
  ring.sum(sums);
  double whole = sums[0];
  for (std::size_t i = 1; i < sums.size(); i += 2) whole += sums[i + 1] == 0 ? sums[i] : sums[i] / sums[i + 1];
  return whole;
}

}  // namespace chorus::sequence
