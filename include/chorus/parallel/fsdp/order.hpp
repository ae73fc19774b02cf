#pragma once
/// The order in which a pass gathers units.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus::fsdp {

/// The first pass of a kind guesses the order; later all ranks gather in the order in which rank 0 used the units.
/// Every rank takes part in all gathers, each once, whatever it computes.
struct Order {
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  std::vector<std::size_t> units;
  std::vector<std::size_t> place;      // by unit: its index in `units`, or none
  std::vector<std::size_t> last_used;  // by unit: the pass's position in `units` at the unit's last use
  bool learned = false;

  /// Guesses that each unit is used once.
  Order(std::vector<std::size_t> guess, std::size_t of) : units(std::move(guess)), place(of, none), last_used(of, 0) {
    for (std::size_t i = 0; i < units.size(); ++i) place[units[i]] = last_used[units[i]] = i;
  }

  /// Gives all ranks rank 0's order.
  template <class Communicator>
  void take_rank_0s(Communicator& ranks) {
    learned = true;
    if (ranks.size() == 1) return;
    std::vector<std::int64_t> message(2 * place.size() + 1, 0);
    message[0] = static_cast<std::int64_t>(units.size());
    std::copy(units.begin(), units.end(), message.begin() + 1);
    const auto used = message.end() - static_cast<std::ptrdiff_t>(place.size());
    std::copy(last_used.begin(), last_used.end(), used);
    ranks.broadcast(std::span(message), 0, {});
    *this = Order({message.begin() + 1, message.begin() + 1 + message[0]}, place.size());
    last_used.assign(used, message.end());
    learned = true;
  }
};

}  // namespace chorus::fsdp
