#pragma once
/// How much each device's loss counts in the mean over the batch.

#include <algorithm>
#include <chorus/autograd/grad_node.hpp>
#include <chorus/core/error.hpp>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

namespace chorus::detail {

/// The node of a vector that has a scalar from each device.
class OfDeviceScalars {
 public:
  /// The scalars' nodes; null where there is none.
  virtual std::vector<Node*> scalars() const = 0;

 protected:
  ~OfDeviceScalars() = default;
};

/// Calls `found(node)` on the nearest nodes behind `node`, itself included, for which it returns true, on ways through
/// scalars and vectors.
template <Real T, Device D, class Found>
void search_tape(Node* node, const Found& found) {
  if (node == nullptr) return;
  std::vector<Node*> nodes{node};
  for (std::size_t next = 0; next < nodes.size(); ++next) {
    if (found(*nodes[next])) continue;
    if (dynamic_cast<GradNode<T, 0, D>*>(nodes[next]) == nullptr &&
        dynamic_cast<GradNode<T, 1, D>*>(nodes[next]) == nullptr)
      continue;
    nodes[next]->for_each_input(
        [](Node& input, void* context) {
          auto& known = *static_cast<std::vector<Node*>*>(context);
          if (std::find(known.begin(), known.end(), &input) == known.end()) known.push_back(&input);
        },
        &nodes);
  }
}

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

}  // namespace chorus::detail
