#pragma once
/// By how much the micro-batches' losses count in the loss of the whole batch.

#include <algorithm>
#include <chorus/autograd/node.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <cmath>
#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace chorus::pipeline {

/// A mean over the batch is the sum of w_i mean_i / W, where w_i is what micro-batch i's mean is a mean of: samples,
/// tokens that count, class weights. W is known after the last forward, and backward begins before it: micro-batches
/// are seeded with w_i / G, G being what the first one lets expect, and all gradients multiplied by G / W in the end.
/// Of samples G is W.
class LossWeights {
 public:
  /// `samples`: of the whole batch.
  explicit LossWeights(Index samples) : samples_(static_cast<double>(samples)) {}

  /// What the gradient by the next micro-batch's loss begins with. Throws UsageError where it is no mean over samples,
  /// or has several that are divided in different ways.
  double add(Node* root, double loss, Index samples) {
    double weight = static_cast<double>(samples);
    if (root != nullptr) {
      const auto overs = means_behind(*root);
      check<UsageError>(!overs.empty(),
                        "Pipeline: the model's loss is no mean over the batch: expected mean(), cross_entropy(), "
                        "mse_loss() or another loss of the library, with Reduction::mean");
      weight = overs.front();
      if (first_.empty()) first_ = overs;
      bool alike = overs.size() == first_.size();
      for (std::size_t i = 0; alike && i < overs.size(); ++i)
        alike = std::abs(overs[i] * first_.front() - overs.front() * first_[i]) <= 1e-9 * overs[i] * first_.front();
      check<UsageError>(alike,
                        "Pipeline: the model's loss is made of several means, which micro-batches divide in "
                        "different ways (the tokens that count, say): expected all over samples");
    }
    if (expected_ == 0)
      expected_ =
          weight > 0 && samples > 0 ? weight * samples_ / static_cast<double>(samples) : std::max(samples_, 1.0);
    total_ += weight;
    if (weight > 0) sum_ += weight * loss;
    last_ = loss;
    return weight / expected_;
  }
  /// The loss of the whole batch. Of one in which nothing counts it is what the last micro-batch says.
  double loss() const { return total_ > 0 ? sum_ / total_ : last_; }
  /// What it is a mean of.
  double total() const { return total_; }
  /// What all gradients are multiplied by.
  double correction() const { return total_ > 0 ? expected_ / total_ : 1; }

 private:
  // What the losses behind `root` are means of, in the order in which they are found; where there is none, the first
  // plain mean.
  static std::vector<double> means_behind(Node& root) {
    std::vector<double> losses, plain;
    std::vector<Node*> nodes{&root};
    std::unordered_set<Node*> seen{&root};
    using Context = std::pair<std::vector<Node*>*, std::unordered_set<Node*>*>;
    Context context{&nodes, &seen};
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i]->is_mean()) (nodes[i]->is_loss() ? losses : plain).push_back(nodes[i]->mean_over());
      nodes[i]->for_each_input(
          [](Node& input, void* to) {
            const auto [found, known] = *static_cast<Context*>(to);
            if (known->insert(&input).second) found->push_back(&input);
          },
          &context);
    }
    if (losses.empty() && !plain.empty()) losses.push_back(plain.front());
    return losses;
  }

  double samples_, expected_ = 0, total_ = 0, sum_ = 0, last_ = 0;
  std::vector<double> first_;
};

}  // namespace chorus::pipeline
