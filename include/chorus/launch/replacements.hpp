#pragma once
/// `Replacements`: when another process may take the place of a killed rank.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace chorus::detail {

/// At most one in 200 ms, `most` a minute, and 10 a minute after ones that were killed before they were let in.
class Replacements {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Replacements(int most) : most_(most) {}

  bool any() const { return most_ > 0; }
  void note_start(Time now) { started_.push_back(now); }
  void note_early_loss(Time now) { killed_early_.push_back(now); }
  /// When the next one may start; `any()` must hold.
  Time next(Time now) const {
    auto start = started_.empty() ? now : std::max(now, started_.back() + std::chrono::milliseconds(200));
    const auto limit = [&](const std::vector<Time>& times, int most) {
      const auto kept = static_cast<std::size_t>(most);
      if (times.size() >= kept) start = std::max(start, times[times.size() - kept] + std::chrono::minutes(1));
    };
    limit(started_, most_);
    limit(killed_early_, 10);
    return start;
  }

 private:
  int most_;
  std::vector<Time> started_, killed_early_;
};

}  // namespace chorus::detail
