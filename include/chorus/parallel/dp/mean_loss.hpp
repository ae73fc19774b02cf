#pragma once
/// Scalars that a model returns under DataParallel, one per device, and the batch's mean of losses.

#include <algorithm>
#include <chorus/autograd/loss_terms.hpp>
#include <chorus/autograd/variable.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/parallel/dp/device_scalars.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <chorus/parallel/loss_share.hpp>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace chorus::detail {

/// How the losses that a model returned, one per device, add up to the batch's loss: a mean is weighted by the device's
/// share of its elements, such as tokens; sums have weight 1; terms without samples count once. A loss without terms on
/// the tape is weighted by samples.
class LossShares {
 public:
  struct Scaled {
    Ref<Node> node;
    double scale;
  };
  double value = 0;
  std::vector<double> weights;  ///< of the devices' losses
  std::vector<Scaled> scaled;   ///< terms with another weight

  /// `losses`: the node of the vector of losses, of type GradNode<T, 1, D>, or null. Throws UsageError if a loss is not
  /// linear in means and sums over the batch, or the devices' losses have different terms.
  template <Real T, Device D>
  static LossShares of(Node* losses, const std::vector<T>& values, const std::vector<Index>& samples) {
    std::vector<Node*> scalars;
    search_tape<T, D>(losses, [&](Node& node) {
      const auto* gathered = dynamic_cast<const OfDeviceScalars*>(&node);
      if (gathered != nullptr && scalars.empty()) scalars = gathered->scalars();
      check<UsageError>(gathered != nullptr || node.form() == Node::Form::linear || node.form() == Node::Form::product,
                        "DataParallel::mean_loss: '", node.operation(),
                        "' of the net's output: expected the devices' losses, or a number times them");
      return gathered != nullptr;
    });
    LossShares out;
    const double batch = static_cast<double>(std::accumulate(samples.begin(), samples.end(), Index{0}));
    for (const Index own : samples) out.weights.push_back(batch == 0 ? 1 : static_cast<double>(own) / batch);
    const auto all_known = scalars.size() == samples.size() &&
                           std::none_of(scalars.begin(), scalars.end(), [](Node* node) { return node == nullptr; });
    if (all_known) return out.by_terms(scalars, std::vector<double>(values.begin(), values.end()), samples);
    out.value = std::inner_product(values.begin(), values.end(), out.weights.begin(), 0.0);
    return out;
  }

 private:
  LossShares& by_terms(const std::vector<Node*>& scalars, const std::vector<double>& values,
                       const std::vector<Index>& samples) {
    std::vector<LossTerms> devices(scalars.size());
    std::vector<std::vector<double>> value_of(scalars.size());
    for (std::size_t i = 0; i < devices.size(); ++i) {
      devices[i].find(*scalars[i]);
      devices[i].check_linear("DataParallel::mean_loss");
      check<UsageError>(devices[i].all().size() == devices.front().all().size(),
                        "DataParallel::mean_loss: the devices' losses consist of ", devices.front().all().size(),
                        " and of ", devices[i].all().size(),
                        " means and sums over the batch: expected the same number on all");
      const double own = scalars[i]->number(), times = own == 0 || std::isnan(own) ? 1 : values[i] / own;
      value_of[i] = devices[i].values(*scalars[i], values[i] / times);
      for (double& each : value_of[i]) each *= times;
    }
    std::vector<WholeLoss> whole(devices.front().all().size());
    for (std::size_t k = 0; k < whole.size(); ++k) {
      std::vector<LossShare> of_devices;
      for (const auto& terms : devices) of_devices.push_back(LossShare::of(terms.all()[k]));
      whole[k].add_up(of_devices, "device", samples);
    }
    // If all means are divided in the same proportion, these shares are the devices' weights.
    auto shares = weights;
    bool alike = true, any = false;
    for (const WholeLoss& term : whole) {
      if (term.sum == 0) continue;  // a zero sum: its share has no effect
      for (std::size_t i = 0; i < devices.size(); ++i) {
        if (!any) shares[i] = term.share(i);
        alike = alike && (!term.is_sum || devices.size() == 1) && std::abs(term.share(i) - shares[i]) < 1e-12;
      }
      any = true;
    }
    if (any && alike) weights = shares;
    for (std::size_t i = 0; i < devices.size(); ++i) {
      const char* const product = devices[i].needs_alike();
      check<UsageError>(alike || product == nullptr, "DataParallel::mean_loss: '", product == nullptr ? "" : product,
                        "' of terms that devices divide differently, and of a value with a gradient: ",
                        "expected one of each, or ", whole_batch_line);
      value += weights[i] * values[i];
      for (std::size_t k = 0; k < whole.size() && !alike; ++k) {
        if (whole[k].sum == 0) continue;
        value += (whole[k].share(i) - weights[i]) * value_of[i][k];
        scaled.push_back({Ref<Node>(devices[i].all()[k].node), whole[k].share(i) / weights[i]});
      }
    }
    return *this;
  }
};

/// Computes the mean loss of a batch from its shares' losses, and warns a program that averages them itself.
class GatheredScalars {
 public:
  /// A forward pass has split its batch among devices; `scalars`: its outputs contain scalars.
  void begin_pass(const dp::Split& split, bool scalars) {
    if (pending_ && !known_) {
      known_ = true;
      say(cat("warning: DataParallel: the model returns scalars, which are gathered into a vector for the ",
              shares_.size(), " devices. Its mean is not the batch's if shares differ: mean_loss computes that mean"));
    }
    pending_ = scalars && split.devices > 1;
    shares_.clear();
    for (std::size_t i = 0; i < split.devices; ++i) shares_.push_back(split.size(i));
  }

  /// Throws ShapeError if there are not as many losses as in the last forward pass.
  void check_count(Index losses) const {
    known_ = true;
    check<ShapeError>(losses == static_cast<Index>(shares_.size()), "DataParallel::mean_loss: expected ",
                      shares_.size(), " losses, one for each device of the last forward pass, got ", losses);
  }
  /// See DataParallel::mean_loss.
  template <Real T, Device D>
  Variable<T, 0, D> mean(const Variable<T, 1, D>& losses) const {
    check_count(losses.numel());
    const auto shares = LossShares::of<T, D>(losses.node().get(), losses.value().to_vector(), shares_);
    return record(
        "mean_loss", Tensor<T, 0, D>::full({}, static_cast<T>(shares.value), losses.device()),
        [shares](const auto& dy, auto dx) {
          for (const auto& [node, scale] : shares.scaled) node->set_scale(scale);
          std::vector<T> grads;
          for (const double weight : shares.weights) grads.push_back(static_cast<T>(weight) * dy.item());
          dx->add(Tensor<T, 1, D>::from(grads, {static_cast<Index>(grads.size())}, dy.device()));
        },
        losses);
  }

 private:
  std::vector<Index> shares_;   // samples of each device in the last forward pass
  bool pending_ = false;        // the last pass returned scalars
  mutable bool known_ = false;  // the caller knows that there is one per device
};

}  // namespace chorus::detail
