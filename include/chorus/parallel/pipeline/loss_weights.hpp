#pragma once
/// The weights of the micro-batches' losses in the loss of the whole batch.

#include <algorithm>
#include <chorus/autograd/loss_terms.hpp>
#include <chorus/autograd/node.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/shared_places.hpp>
#include <chorus/parallel/loss_share.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus::pipeline {

/// A mean over the batch is the sum of w_i mean_i / W, where w_i is the number of elements of micro-batch i's mean:
/// samples, counted tokens, class weights. W is known only after the last forward, but backward begins earlier:
/// micro-batches are seeded with w_i / G, where G is estimated from the first one, and in the end all gradients are
/// multiplied by G / W. For samples G equals W. A loss may have several means, and sums, which have weight 1: each
/// term's gradient is scaled, and one final factor must correct all terms.
///
/// If ranks share the tokens of each sample, their gradients have parts of each other's losses: G and W are those of
/// all of them. Later each gets an equal share of the weight of their batch, so that the factor is theirs together,
/// too.
class LossWeights {
 public:
  /// `samples`: of the whole batch.
  explicit LossWeights(Index samples) : samples_(static_cast<double>(samples)) {}

  /// The seed of the gradient by the next micro-batch's loss. Throws UsageError for a loss that does not consist of
  /// means and sums over samples.
  double add(Node* root, double loss, Index samples) {
    const double size = static_cast<double>(samples), share = samples_ == 0 ? 1 : size / samples_;
    last_ = loss;
    if (root == nullptr) {
      rest_ += share * loss;
      return share;
    }
    find_terms(*root, loss, size);
    double rest = loss, seed = 0;
    bool alike = true, counts = false;
    for (Term& term : terms_) {
      if (term.expected == 0) term.expected = term.is_mean ? of_all_places(term.over) / share : 1;
      term.total += term.over;
      term.sum += term.over * term.value;
      rest -= term.value;
      if (term.over == 0) continue;
      const double own = term.over / term.expected;
      alike = alike && term.is_mean && (!counts || std::abs(own - seed) <= 1e-12 * seed);
      if (!counts) seed = own;
      counts = true;
    }
    rest_ += share * rest;
    if (!alike) {
      seed = share;
      for (const Term& term : terms_) term.node->set_scale(term.over / std::max(term.expected, 1e-300) / share);
    }
    seeds_ += seed;
    return seed;
  }
  /// Called after the last micro-batch. Throws UsageError if no single factor corrects all terms.
  void finish() {
    if (chorus::detail::shared_places != nullptr) add_up_places();
    const double all = correction() / ranks_;
    const auto is_one = [](double x) { return std::abs(x - 1) <= 1e-9; };
    bool right = !has_more_ || is_one(seeds_ * all);
    for (const Term& term : terms_)
      right = right && (term.total == 0 || is_one(term.is_mean ? term.expected / term.total / all : all));
    check<UsageError>(right,
                      "Pipeline: micro-batches divide the means and sums of the model's loss in different ways (for "
                      "example by the tokens that count): expected all over samples, or a mean over tokens with "
                      "{.mean_over = the count in the whole batch}, passed to the net");
  }
  /// The loss of the whole batch. If nothing counts in it, the last micro-batch's value.
  double loss() const {
    double all = rest_;
    bool counts = terms_.empty();
    for (const Term& term : terms_) {
      counts = counts || term.total > 0;
      if (term.total > 0) all += term.sum / (term.is_mean ? term.total : 1);
    }
    return counts ? all : last_;
  }
  /// The factor for all gradients.
  double correction() const {
    bool has_sums = false;
    for (const Term& term : terms_) has_sums = has_sums || !term.is_mean;
    for (const Term& term : terms_)
      if (term.total > 0 && !has_sums) return ranks_ * term.expected / term.total;
    return 1;
  }
  /// The kind of loss, for callers that divide batches further.
  struct Description {
    double total = 0;                 ///< of a mean
    double divisor = 0, counted = 0;  ///< of a sum: see Node::set_sum
    enum : std::int32_t { other, mean, sum } kind = other;
  };
  Description description() const {
    const auto is_mean = [](const Term& term) { return term.is_mean; };
    if (terms_.empty()) return {};
    const Term& first = terms_.front();
    const auto like_first = [&](const Term& term) {
      return std::abs(term.total * first.expected - first.total * term.expected) <= 1e-9 * first.total * term.expected;
    };
    if (std::all_of(terms_.begin(), terms_.end(), is_mean)) {
      if (!std::all_of(terms_.begin(), terms_.end(), like_first)) return {};
      return {.total = first.total, .kind = Description::mean};
    }
    if (has_more_ || std::any_of(terms_.begin(), terms_.end(), is_mean)) return {};
    if (terms_.size() > 1) return {.kind = Description::sum};
    return {.divisor = first.divisor, .counted = first.counted, .kind = Description::sum};
  }

 private:
  struct Term {
    bool is_mean;
    Node* node = nullptr;  // of the last micro-batch, like the next two
    double over = 0, value = 0;
    double expected = 0, total = 0, sum = 0;  // over / total is the share
    double divisor = 0, counted = 0;
  };

  static double of_all_places(double count) {
    if (chorus::detail::shared_places != nullptr) chorus::detail::shared_places->sum({&count, 1});
    return count;
  }
  void add_up_places() {
    std::vector<double> sums{1, seeds_, rest_};
    for (const Term& term : terms_) sums.insert(sums.end(), {term.total, term.sum});
    chorus::detail::shared_places->sum(sums);
    ranks_ = sums[0];
    seeds_ = sums[1];
    rest_ = sums[2] / ranks_;
    for (std::size_t i = 0; i < terms_.size(); ++i) {
      terms_[i].total = sums[3 + 2 * i];
      terms_[i].sum = sums[4 + 2 * i];
    }
    check<UsageError>(description().kind == Description::mean,
                      "Pipeline: ranks share the tokens of each sample, and the model's loss has sums, or means that "
                      "count different tokens: expected means over the same tokens");
  }

  void find_terms(Node& root, double loss, double size) {
    found_.find(root);
    found_.check_linear("Pipeline");
    const auto values = found_.values(root, loss);
    const auto found = without_penalties(values);
    check<UsageError>(!found.empty(),
                      "Pipeline: the model's loss is not a mean or sum over the batch: expected mean(), "
                      "cross_entropy(), mse_loss() or another loss of the library, or sums of them");
    has_more_ = has_more_ || found_.has_more();
    if (terms_.empty())
      for (const std::size_t term : found) terms_.push_back({found_.all()[term].origin->is_mean()});
    check<UsageError>(terms_.size() == found.size(), "Pipeline: the model's loss consists of ", found.size(),
                      " means and sums of one micro-batch and of ", terms_.size(), " of another");
    for (std::size_t i = 0; i < terms_.size(); ++i) {
      const auto& in_loss = found_.all()[found[i]];
      Node& origin = *in_loss.origin;
      Term& term = terms_[i];
      term.node = in_loss.node;
      term.over = term.is_mean ? origin.mean_over() : 1;
      // Only the last micro-batch could show whether it is a mean written by hand.
      const auto& factor = in_loss.factor;
      check<UsageError>(term.is_mean || origin.divisor() != 0 || size == samples_ ||
                            !(factor.by_tensor || factor.may_be_own(origin.counted())),
                        "Pipeline: the model's loss is a sum over the batch divided by ", 1 / factor.all,
                        chorus::detail::own_mean);
      term.divisor = origin.divisor();
      term.counted += origin.counted();
      term.value = values[found[i]];
    }
  }
  // The indices of the terms over samples. A penalty is not one: each micro-batch has the same, weighted by samples
  // like every term that is neither mean nor sum.
  std::vector<std::size_t> without_penalties(const std::vector<double>& values) {
    std::vector<std::size_t> found;
    std::size_t penalty = 0;
    for (std::size_t i = 0; i < found_.all().size(); ++i) {
      if (!found_.all()[i].may_be_penalty) {
        found.push_back(i);
        continue;
      }
      has_more_ = true;
      if (penalty == penalties_.size()) penalties_.push_back(values[i]);
      const double first = penalties_[penalty++];
      check<UsageError>(values[i] == first,
                        "Pipeline: a sum of parameters and of values that are not on the tape differs between "
                        "micro-batches, so it is not a penalty: it is ",
                        first, " and ", values[i],
                        ": expected a sum of the model's parameters alone, or of outputs of layers");
    }
    return found;
  }

  chorus::detail::LossTerms found_;
  std::vector<Term> terms_;
  std::vector<double> penalties_;  // of the first micro-batch
  double samples_, rest_ = 0, last_ = 0, seeds_ = 0;
  double ranks_ = 1;  // that share the tokens of each sample
  bool has_more_ = false;
};

}  // namespace chorus::pipeline
