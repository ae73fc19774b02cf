#pragma once
/// Combines losses that a model returned, one for each canonical share, to the whole batch's.

#include <algorithm>
#include <chorus/autograd/loss_terms.hpp>
#include <chorus/ops/mean_of_parts.hpp>
#include <chorus/parallel/dp/device_scalars.hpp>
#include <chorus/same_bits/batch_cut.hpp>
#include <cmath>
#include <cstddef>
#include <vector>

namespace chorus::same_bits {

/// Whether a share's loss is a sum, or a number times a sum.
inline bool is_sum(Node& loss) {
  detail::LossTerms terms;
  terms.find(loss);
  terms.check_linear("canonical shares");
  for (const auto& term : terms.all())
    if (!term.origin->is_sum() || term.may_be_penalty || term.factor.by_tensor ||
        (term.origin->divisor() == 0 && term.factor.may_be_own(term.origin->counted())))
      return false;
  return !terms.all().empty() && !terms.has_more();
}
/// Whether each share's loss is.
inline bool are_sums(Node& losses) {
  const auto* const gathered = dynamic_cast<const detail::OfDeviceScalars*>(&losses);
  if (gathered == nullptr) return false;
  const auto scalars = gathered->scalars();
  return std::all_of(scalars.begin(), scalars.end(),
                     [](Node* scalar) { return scalar != nullptr && is_sum(*scalar); });
}

/// The number of elements in each mean of a share's loss: of the library's losses, or of all means.
template <Real T, Device D>
std::vector<double> means_in(Node* loss, bool only_losses) {
  std::vector<double> over;
  detail::search_tape<T, D>(loss, [&](Node& node) {
    const bool counts = only_losses ? node.is_loss() : node.is_mean();
    if (counts) over.push_back(node.mean_over());
    return counts;
  });
  return over;
}
inline constexpr const char* scalar_of_share =
    "canonical shares: the model returns a scalar for each share, not for the batch: expected one value for each "
    "sample, [batch]";
inline constexpr const char* not_a_mean =
    "canonical shares: the model returns a scalar that is not a mean over the share: expected cross_entropy(), "
    "mse_loss(), mean() or another loss of the library, or one number for each sample, [batch]";
/// Throws UsageError for a sum of means over numbers that other shares, such as the first one, have in another ratio.
inline void check_common_weight(const std::vector<double>& of_share, const std::vector<double>& of_first) {
  for (std::size_t i = 1; i < of_share.size(); ++i)
    check<UsageError>(of_share[i] * of_first.front() == of_share.front() * of_first[i],
                      "canonical shares: the model's loss adds means over different numbers of tokens, samples or "
                      "elements, so its shares have no common weight: return each loss separately");
}

/// The number of elements in each share's mean, if the tape knows it; several means over the same number count as one.
/// Throws UsageError if it doesn't, and for sums of means over different numbers.
template <Real T, Device D>
std::vector<double> mean_over_of_shares(Node& losses) {
  const auto* const gathered = dynamic_cast<const detail::OfDeviceScalars*>(&losses);
  std::vector<std::vector<double>> over;
  for (const bool only_losses : {true, false}) {
    over.clear();
    bool known = gathered != nullptr;
    for (Node* const scalar : gathered != nullptr ? gathered->scalars() : std::vector<Node*>{}) {
      const auto& of_share = over.emplace_back(means_in<T, D>(scalar, only_losses));
      known = known && !of_share.empty() && of_share.size() == over.front().size();
    }
    if (known) break;
    check<UsageError>(only_losses, not_a_mean);
  }
  std::vector<double> out;
  for (const auto& of_share : over) {
    out.push_back(of_share.front());
    check_common_weight(of_share, over.front());
  }
  return out;
}

/// The mean over the whole batch, on all processes, from `losses`, [shares of this process].
template <Real T, Device D>
Variable<T, 0, D> mean_of_share_losses(const Variable<T, 1, D>& losses, const BatchCut& cut) {
  const auto values = losses.value().to_vector();
  const bool sums_only = are_sums(*losses.node());
  const auto over = sums_only ? std::vector<double>(values.size(), 1) : mean_over_of_shares<T, D>(*losses.node());
  std::vector<double> sums, overs;  // shares without samples come last and are left out
  for (std::size_t i = 0; i < values.size(); ++i) {
    overs.push_back(cut.size(i) > 0 ? over[i] : 0);
    sums.push_back(overs[i] == 0 ? 0 : static_cast<double>(values[i]) * overs[i]);
  }
  auto whole = cut.add_up(sums, overs);
  if (sums_only) whole.over = 1;
  return record(
      detail::mean_of_parts_name, Tensor<T, 0, D>::full({}, static_cast<T>(whole.value()), losses.device()),
      [overs, all = whole.over](const auto& dy, auto dx) {
        std::vector<T> gradients;
        const auto gradient = static_cast<double>(dy.item());
        for (const double own : overs) gradients.push_back(static_cast<T>(all == 0 ? 0 : gradient * own / all));
        dx->add(Tensor<T, 1, D>::from(gradients, {static_cast<Index>(gradients.size())}, dy.device()));
      },
      losses);
}

}  // namespace chorus::same_bits
