#pragma once
/// The order of the buckets, learned in the first backward pass.

#include <algorithm>
#include <chorus/parallel/ddp/extension.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace chorus::ddp {

/// After the first backward pass gradients are laid out in their order of arrival on rank 0, so that buckets fill front
/// to back. The optimizer has not stepped yet, so no state depends on the old layout. If each rank may use different
/// parameters, there is no such order.
template <Device D, class Communicator>
class LearnedOrder final : public Extension<D> {
 public:
  static bool wanted(const DistributedDataParallelOptions& options) {
    return !options.find_unused_parameters || options.static_graph;
  }
  explicit LearnedOrder(Core<D, Communicator>& core) : core_(core) {}

  bool learned() const { return learned_; }
  /// A pass has settled the layout of the buffers before: in the run that wrote the checkpoint.
  void set_learned(bool learned) { learned_ = learned; }

  void backward_begins() override { arrivals_.clear(); }
  void gradient_arrived(std::size_t i) override {
    if (!learned_ && core_.sync) arrivals_.push_back(i);
  }
  void pass_ended() override {
    if (learned_) return;
    learned_ = true;
    const auto order = agree();
    arrivals_ = {};
    if (!std::is_sorted(order.begin(), order.end())) core_.reorder(order);
  }

 private:
  // Parameters that are not sent stand at the end.
  [[gnu::cold]] std::vector<std::size_t> agree() {
    std::vector<std::int64_t> order;
    std::vector<char> placed(core_.entries());
    const auto chosen = core_.chosen();
    const auto add = [&](std::size_t i) {
      if (chosen[i] && std::exchange(placed[i], 1) == 0) order.push_back(static_cast<std::int64_t>(i));
    };
    for (const std::size_t i : last_arrivals()) add(i);
    for (std::size_t i = 0; i < placed.size(); ++i) add(i);
    // Rank 0's order; the order of the first rank with batches once rank 0 has none.
    if (core_.ranks.size() > 1) core_.ranks.broadcast(std::span(order), std::max(0, core_.shares.first_active()), {});
    std::vector<std::size_t> entries(order.begin(), order.end());
    for (std::size_t i = 0; i < placed.size(); ++i)
      if (!core_.buckets.sends(i)) entries.push_back(i);
    return entries;
  }
  // In a static graph a gradient may arrive in several parts: the last part completes it.
  std::vector<std::size_t> last_arrivals() const {
    std::vector<std::size_t> order;
    for (auto i = arrivals_.rbegin(); i != arrivals_.rend(); ++i)
      if (std::find(order.begin(), order.end(), *i) == order.end()) order.push_back(*i);
    std::reverse(order.begin(), order.end());
    return order;
  }

  Core<D, Communicator>& core_;
  std::vector<std::size_t> arrivals_;  // entries
  bool learned_ = false;
};

}  // namespace chorus::ddp
