#pragma once
/// Gradient accumulation: several batches for one step, for more samples than a pass has memory for.

#include <algorithm>
#include <chorus/chorus.hpp>

/// A step's gradient is the mean over all samples of its `batches` batches, as if they were one large batch, also if an
/// epoch's last batches are fewer or smaller. All policies take one device's steps:
///
///   for (auto& [x, labels] : loader) {
///     const auto part = accumulation.next(optimizer);  // zero_grad() where a step begins
///     const auto loss = ch::cross_entropy(net(x), labels);
///     part.backward(loss);
///     if (part.ends_step()) optimizer.step();
///   }
///
/// Batch norm and dropout still see single batches.
template <class Net>
class Accumulation {
 public:
  /// `samples`: of the data; a batch has `batch` of them over all devices, the last one fewer. `first`: index of the
  /// epoch's next batch, nonzero if a run is resumed. Throws UsageError if that is in the middle of a step.
  Accumulation(Net& net, chorus::Index samples, chorus::Index batch, chorus::Index batches, chorus::Index first = 0)
      : net_(net), samples_(samples), of_step_(batches * batch), batch_(batch), begin_(first * batch) {
    if (begin_ >= samples) begin_ = 0;  // the checkpoint is of the end of an epoch
    chorus::check<chorus::UsageError>(begin_ % of_step_ == 0, "checkpoint: a run that accumulates ", batches,
                                      " batches per step can resume after whole steps only: expected a multiple of ",
                                      batches, " batches, got a checkpoint after ", first, " of its epoch");
  }

  /// A batch's part in a step. While it lives, ranks don't exchange gradients; only the last part of a step sends the
  /// sums.
  class Part {
   public:
    Part(Net& net, double weight, bool ends)
        : weight_(weight), ends_(ends), quiet_(ends ? chorus::NoSync{} : net.no_sync()) {}
    bool ends_step() const { return ends_; }
    /// Adds the gradient of the batch's mean loss to the step's gradient.
    void backward(const auto& loss) const {
      if (weight_ == 1)
        loss.backward();
      else
        (weight_ * loss).backward();
    }

   private:
    double weight_;
    bool ends_;
    chorus::NoSync quiet_;
  };

  /// All ranks call it before each batch's forward pass.
  Part next(auto& optimizer) {
    const auto step = begin_ - begin_ % of_step_;  // its first sample in the epoch
    const auto end = std::min(begin_ + batch_, samples_), step_end = std::min(step + of_step_, samples_);
    if (begin_ == step) optimizer.zero_grad();
    const auto weight = static_cast<double>(end - begin_) / static_cast<double>(step_end - step);
    begin_ = end == samples_ ? 0 : end;
    return Part(net_, weight, end == step_end);
  }

 private:
  Net& net_;
  chorus::Index samples_, of_step_, batch_, begin_;  // in samples of an epoch
};
