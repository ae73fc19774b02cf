#pragma once
/// In which order a pass gathers units.

#include <chorus/comm/communicator.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus::fsdp {

/// The first pass of a kind guesses; from then on all ranks gather in the order in which rank 0 had touched the units:
/// whatever a rank computes, it takes part in all gathers, each once.
struct Order {
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  std::vector<std::size_t> units;
  std::vector<std::size_t> place;      // by unit: its index in `units`, or none
  std::vector<std::size_t> last_used;  // by unit: how far the pass had come in `units` when it was used last
  bool learned = false;

  /// With the guess that each unit is used once.
  Order(std::vector<std::size_t> guess, std::size_t of) : units(std::move(guess)), place(of, none), last_used(of, 0) {
    for (std::size_t i = 0; i < units.size(); ++i) place[units[i]] = last_used[units[i]] = i;
  }

  /// Rank 0's, made known to all.
  template <class Communicator>
  static Order of_rank_0(Communicator& ranks, std::span<const std::size_t> touched,
                         std::span<const std::size_t> last_used) {
    std::vector<std::int64_t> message(2 * last_used.size() + 1, 0);
    message[0] = static_cast<std::int64_t>(touched.size());
    for (std::size_t i = 0; i < touched.size(); ++i) message[1 + i] = static_cast<std::int64_t>(touched[i]);
    for (std::size_t u = 0; u < last_used.size(); ++u)
      message[1 + last_used.size() + u] = static_cast<std::int64_t>(last_used[u]);
    ranks.broadcast(std::span(message), 0, {});
    const auto end = message.begin() + 1 + message[0];
    Order order({message.begin() + 1, end}, last_used.size());
    order.last_used.assign(message.end() - static_cast<std::ptrdiff_t>(last_used.size()), message.end());
    order.learned = true;
    return order;
  }
};

}  // namespace chorus::fsdp
