#pragma once
/// Combines the losses of a pipeline's micro-batches, which are canonical shares.

#include <chorus/core/error.hpp>
#include <chorus/parallel/pipeline/loss_weights.hpp>
#include <chorus/same_bits/batch_cut.hpp>
#include <chorus/same_bits/share_losses.hpp>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace chorus::same_bits {

/// Has LossWeights's members. The gradient by a share's loss is known only if the whole batch's divisor is: backward
/// begins before the last shares are computed. So means must be over numbers that are proportional to samples.
class MicroBatchLosses {
 public:
  explicit MicroBatchLosses(std::shared_ptr<const BatchCut> cut) : cut_(std::move(cut)) {}

  /// A pass begins, on a batch of that many samples.
  void begin(Index batch) { batch_ = static_cast<double>(batch); }
  /// Returns the gradient of the batch's loss by the loss of share `i` of this process. Throws UsageError for losses
  /// that SingleDevice refuses.
  template <class Loss>
  double add(const Loss& loss, std::size_t i, Index samples) {
    using T = typename tensor_of<Loss>::value_type;
    using D = typename tensor_of<Loss>::device_type;
    const auto value = static_cast<double>(value_of(loss).item());
    const auto node = node_of(loss);
    if (!node) {
      check<UsageError>(i == 0 && !known_, scalar_of_share);
      loss_ = value;
      return 1;
    }
    const bool sums = is_sum(*node);
    auto over = sums ? std::vector<double>{1} : means_in<T, D>(node.get(), /*only_losses=*/true);
    if (over.empty()) over = means_in<T, D>(node.get(), /*only_losses=*/false);
    if (!known_) {
      first_ = over;
      sums_only_ = sums;
    }
    check<UsageError>(!over.empty() && over.size() == first_.size() && sums == sums_only_, not_a_mean);
    check_common_weight(over, first_);
    if (!std::exchange(known_, true) && samples > 0)
      all_ = sums ? 1 : over.front() * batch_ / static_cast<double>(samples);
    if (overs_.size() <= i) {
      overs_.resize(i + 1);
      weighted_.resize(i + 1);
    }
    overs_[i] = samples > 0 ? over.front() : 0;
    weighted_[i] = overs_[i] == 0 ? 0 : value * overs_[i];
    return all_ == 0 ? 0 : overs_[i] / all_;
  }
  /// Called after the last micro-batch, by all processes that have the last stage. Throws UsageError if the gradients
  /// would need another divisor.
  void finish() {
    if (!known_) return;
    auto whole = cut_->add_up(weighted_, overs_);
    if (sums_only_) whole.over = 1;
    check<UsageError>(cut_->samples() == 0 || whole.over == all_,
                      "Pipeline: SameBits: the model's loss is a mean over ", whole.over,
                      " in the whole batch, and by the samples of its first micro-batch over ", all_,
                      ": expected a mean over samples, a mean over tokens with {.mean_over = the count in the whole "
                      "batch}, or a model that returns its output");
    loss_ = whole.value();
  }
  double loss() const { return loss_; }
  double correction() const { return 1; }
  pipeline::LossWeights::Description description() const { return {}; }

 private:
  std::shared_ptr<const BatchCut> cut_;
  double batch_ = 0, all_ = 0, loss_ = 0;  // all_: the whole batch's divisor
  std::vector<double> first_;              // the divisors of the first micro-batch's means
  std::vector<double> overs_, weighted_;   // by micro-batch
  bool known_ = false, sums_only_ = false;
};

}  // namespace chorus::same_bits
