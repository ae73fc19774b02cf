#pragma once
/// Scalars that a model returns under DataParallel, one a device, and the mean over the batch of those that are losses.

#include <algorithm>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/parallel/canonical/share_losses.hpp>
#include <chorus/parallel/dp/device_scalars.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace chorus::detail {

/// What each device's loss is a mean over. Several numbers where it is a sum of means, none where it is not known.
template <Real T, Device D>
std::vector<std::vector<double>> mean_over_of_devices(Node* losses, std::size_t devices) {
  std::vector<std::vector<double>> over(devices);
  search_tape<T, D>(losses, [&](Node& node) {
    const auto* gathered = dynamic_cast<const OfDeviceScalars*>(&node);
    if (gathered == nullptr) return false;
    const auto scalars = gathered->scalars();
    for (std::size_t i = 0; i < scalars.size() && i < devices; ++i)
      search_tape<T, D>(scalars[i], [&](Node& scalar) {
        if (scalar.is_loss()) over[i].push_back(scalar.mean_over());
        return scalar.is_loss();
      });
    return true;
  });
  return over;
}

/// What share of the batch's mean each device's loss is, given the node of the vector of losses, of type
/// GradNode<T, 1, D>: its share of what the losses are means over, as tokens, where the tape knows; else its share of
/// the samples. Throws UsageError where the devices add up losses of which no one share is right.
template <Real T, Device D>
std::vector<double> loss_shares(Node* losses, const std::vector<Index>& samples) {
  const auto shares_of = [](const auto& parts) {
    const double whole = std::accumulate(parts.begin(), parts.end(), 0.0);
    std::vector<double> shares;
    for (const auto part : parts) shares.push_back(whole == 0 ? 1 : static_cast<double>(part) / whole);
    return shares;
  };
  const auto over = mean_over_of_devices<T, D>(losses, samples.size());
  for (const auto& device : over)
    check<UsageError>(device.size() == over.front().size(),
                      "DataParallel::mean_loss: of some devices' losses it is known what they are means over, and of "
                      "others it is not; expected the same of all");
  std::vector<double> shares;
  for (std::size_t loss = 0; loss < over.front().size(); ++loss) {
    std::vector<double> parts;
    for (const auto& device : over) parts.push_back(device[loss]);
    if (std::accumulate(parts.begin(), parts.end(), 0.0) == 0) continue;  // it is 0, whatever its share
    const auto next = shares_of(parts);
    if (shares.empty()) shares = next;
    for (std::size_t i = 0; i < next.size(); ++i)
      check<UsageError>(std::abs(next[i] - shares[i]) < 1e-6,
                        "DataParallel::mean_loss: each device's loss is a sum of losses that are means over different "
                        "numbers of tokens, samples or elements, of which no one share is right: let the model return "
                        "each by itself, and add up what mean_loss makes of them");
  }
  return shares.empty() ? shares_of(samples) : shares;
}

/// Makes the mean of losses over a batch out of those over its shares, and warns of taking the one for the other.
class GatheredScalars {
 public:
  /// A forward pass has split its batch among devices, whose outputs have `scalars` or not.
  void begin_pass(const dp::Split& split, bool scalars) {
    if (pending_ && !known_) {
      known_ = true;
      say(cat("warning: DataParallel: the model returns scalars: what is gathered is a vector with one for each of ",
              shares_.size(), " devices, whose plain mean is not the batch's where shares differ. mean_loss makes the ",
              "mean over the batch out of losses"));
    }
    pending_ = scalars && split.devices > 1;
    shares_.clear();
    for (std::size_t i = 0; i < split.devices; ++i) shares_.push_back(split.size(i));
  }

  /// See DataParallel::mean_loss.
  template <Real T, Device D>
  Variable<T, 0, D> mean(const Variable<T, 1, D>& losses) const {
    known_ = true;
    check<ShapeError>(losses.numel() == static_cast<Index>(shares_.size()), "DataParallel::mean_loss: got ",
                      losses.numel(), " losses of the last forward pass, which ran on ", shares_.size(), " devices");
    if (canonical_policies().load(std::memory_order_relaxed) != 0)
      if (const auto cut = find_cut(losses.node().get())) return canonical::mean_of_share_losses(losses, *cut);
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
