#pragma once
/// Metrics that are correct over all ranks: each rank counts its share, and `sum(net)` adds the counts of all ranks.
/// Use samplers without `padding`, which counts samples twice.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus::scores {

/// Counts of (label, guess) and the metrics derived from them. Metrics of classes without labels and guesses are 0
/// (scikit-learn's zero_division = 0).
class ConfusionMatrix {
 public:
  /// Throws UsageError for less than one class.
  explicit ConfusionMatrix(Index classes) : classes_(classes) {
    check<UsageError>(classes >= 1, "ConfusionMatrix: expected at least 1 class, got ", classes);
    counts_.resize(static_cast<std::size_t>(classes * classes));
  }

  /// `guesses`: class numbers, [samples]. Throws ShapeError if the sizes differ, UsageError for an unknown class.
  void add(const Tensor<std::int64_t, 1>& guesses, const Tensor<std::int64_t, 1>& labels) {
    check<ShapeError>(guesses.shape() == labels.shape(), "ConfusionMatrix: expected guesses of shape ", labels.shape(),
                      ", as the labels, got ", guesses.shape());
    for (Index i = 0; i < labels.numel(); ++i) ++counts_[place(known(labels(i)), known(guesses(i)))];
  }
  /// `logits`: [samples, classes]; the largest is the guess, the first of equal ones.
  template <class T>
  void add(const Tensor<T, 2>& logits, const Tensor<std::int64_t, 1>& labels) {
    check<ShapeError>(logits.shape() == Shape<2>{labels.numel(), classes_},
                      "ConfusionMatrix: expected logits of shape ", Shape<2>{labels.numel(), classes_}, ", got ",
                      logits.shape());
    const auto dense = contiguous(logits);
    const auto guesses = Tensor<std::int64_t, 1>::empty(labels.shape());
    for (Index i = 0; i < labels.numel(); ++i) {
      const T* const row = dense.data() + i * classes_;
      guesses.data()[i] = std::max_element(row, row + classes_) - row;
    }
    add(guesses, labels);
  }
  /// Adds up the counts of all ranks; call it once. `net`: a policy. All ranks call it.
  template <class Net>
  void sum(Net& net) {
    net.sum(std::span<double>(counts_));
  }

  Index classes() const { return classes_; }
  /// The number of samples with that label and that guess.
  double count(Index label, Index guess) const { return counts_[place(known(label), known(guess))]; }
  double samples() const {
    double all = 0;
    for (const double count : counts_) all += count;
    return all;
  }
  double accuracy() const {
    double right = 0;
    for (Index c = 0; c < classes_; ++c) right += count(c, c);
    return ratio(right, samples());
  }
  /// p: the fraction of a class's guesses that are right; r: of its samples that are found; F1: 2 p r / (p + r).
  double precision(Index c) const { return ratio(count(c, c), guessed(c)); }
  double recall(Index c) const { return ratio(count(c, c), labelled(c)); }
  double f1(Index c) const { return ratio(2 * count(c, c), guessed(c) + labelled(c)); }
  /// The mean of the classes' F1.
  double f1_macro() const {
    double all = 0;
    for (Index c = 0; c < classes_; ++c) all += f1(c);
    return all / static_cast<double>(classes_);
  }
  /// F1 of the summed counts of all classes: with one label and one guess per sample, the accuracy.
  double f1_micro() const { return accuracy(); }

 private:
  static double ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }
  Index known(Index c) const {
    check<UsageError>(c >= 0 && c < classes_, "ConfusionMatrix: class ", c, " is not in [0, ", classes_, ")");
    return c;
  }
  std::size_t place(Index label, Index guess) const { return static_cast<std::size_t>(label * classes_ + guess); }
  double guessed(Index c) const {
    double all = 0;
    for (Index label = 0; label < classes_; ++label) all += count(label, c);
    return all;
  }
  double labelled(Index c) const {
    double all = 0;
    for (Index guess = 0; guess < classes_; ++guess) all += count(c, guess);
    return all;
  }

  Index classes_;
  std::vector<double> counts_;  // [label, guess]
};

/// The area under the ROC curve: the probability that a positive sample has a higher score than a negative one. Scores
/// in [0, 1] are counted in bins; scores in one bin are ties, which count one half.
class Auc {
 public:
  explicit Auc(Index bins = Index{1} << 14) : bins_(bins), counts_(static_cast<std::size_t>(2 * bins)) {
    check<UsageError>(bins >= 2, "Auc: expected at least 2 bins, got ", bins);
  }
  /// `scores`: [samples], `labels`: 0 or 1. Throws ShapeError if the sizes differ, UsageError for other labels.
  template <class T>
  void add(const Tensor<T, 1>& scores, const Tensor<std::int64_t, 1>& labels) {
    check<ShapeError>(scores.shape() == labels.shape(), "Auc: expected scores of shape ", labels.shape(),
                      ", as the labels, got ", scores.shape());
    for (Index i = 0; i < labels.numel(); ++i) {
      const auto score = static_cast<double>(scores(i));
      check<UsageError>(score >= 0 && score <= 1, "Auc: expected scores in [0, 1], got ", score);
      check<UsageError>(labels(i) == 0 || labels(i) == 1, "Auc: expected labels 0 and 1, got ", labels(i));
      const auto bin = std::min(static_cast<Index>(score * static_cast<double>(bins_)), bins_ - 1);
      ++counts_[static_cast<std::size_t>(2 * bin + labels(i))];
    }
  }
  template <class Net>
  void sum(Net& net) {
    net.sum(std::span<double>(counts_));
  }
  /// NaN if one of the classes has no sample.
  double value() const {
    double negatives = 0, positives = 0, above = 0;
    for (std::size_t bin = 0; bin < counts_.size(); bin += 2) {
      above += counts_[bin + 1] * (negatives + counts_[bin] / 2);
      negatives += counts_[bin];
      positives += counts_[bin + 1];
    }
    return above / (negatives * positives);
  }

 private:
  Index bins_;
  std::vector<double> counts_;  // [bin, label]
};

/// exp of the mean loss over all tokens.
class Perplexity {
 public:
  /// `loss`: the mean cross entropy over `tokens` tokens; ignored if there are none.
  void add(double loss, Index tokens) {
    if (tokens == 0) return;
    sums_[0] += loss * static_cast<double>(tokens);
    sums_[1] += static_cast<double>(tokens);
  }
  template <class Net>
  void sum(Net& net) {
    net.sum(std::span<double>(sums_));
  }
  /// NaN without tokens.
  double value() const { return std::exp(sums_[0] / sums_[1]); }

 private:
  std::array<double, 2> sums_{};
};

}  // namespace chorus::scores
