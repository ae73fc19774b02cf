#pragma once
/// Scalars that a model returns under DataParallel: one a device.

#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/parallel/dp/mean_loss.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <cstddef>
#include <numeric>
#include <vector>

namespace chorus::detail {

/// Makes the mean of losses over a batch out of those over its shares, and warns of taking the one for the other.
class GatheredScalars {
 public:
  /// A forward pass has shared `batch` samples out to `devices`, which return `scalars` or not.
  void begin_pass(Index batch, std::size_t devices, bool scalars) {
    if (pending_ && !known_) {
      known_ = true;
      say(cat("warning: DataParallel: the model returns scalars: what is gathered is a vector with one for each of ",
              shares_.size(), " devices, whose plain mean is not the batch's where shares differ. mean_loss makes the ",
              "mean over the batch out of losses"));
    }
    pending_ = scalars && devices > 1;
    shares_.clear();
    for (std::size_t i = 0; i < devices; ++i)
      shares_.push_back(share_begin(batch, devices, i + 1) - share_begin(batch, devices, i));
  }

  /// See DataParallel::mean_loss.
  template <Real T, Device D>
  Variable<T, 0, D> mean(const Variable<T, 1, D>& losses) const {
    known_ = true;
    check<ShapeError>(losses.numel() == static_cast<Index>(shares_.size()), "DataParallel::mean_loss: got ",
                      losses.numel(), " losses of the last forward pass, which ran on ", shares_.size(), " devices");
    std::vector<T> weights;
    for (const double share : loss_shares<T, D>(losses.node().get(), shares_)) weights.push_back(static_cast<T>(share));
    const auto values = losses.value().to_vector();
    const T mean = std::inner_product(values.begin(), values.end(), weights.begin(), T{0});
    return record(
        "mean_loss", Tensor<T, 0, D>::full({}, mean, losses.device()),
        [weights](const auto& dy, auto dx) {
          auto grads = weights;
          for (T& grad : grads) grad *= dy.item();
          dx->add(Tensor<T, 1, D>::from(grads, {static_cast<Index>(grads.size())}, dy.device()));
        },
        losses);
  }

 private:
  std::vector<Index> shares_;   // samples of each device in the last forward pass
  bool pending_ = false;        // it returned scalars
  mutable bool known_ = false;  // the caller knows what they are
};

}  // namespace chorus::detail
