#pragma once
/// Early stopping.

#include <limits>

/// Stops after an epoch if the last `patience` epochs have not improved the score (higher is better). 0: never.
class EarlyStopping {
 public:
  explicit EarlyStopping(int patience) : patience_(patience) {}

  /// Call it once per epoch. On several ranks all call it with the same score, for example a sum over their shares.
  bool stops(double score) {
    if (score > best_) {
      best_ = score;
      epochs_without_ = 0;
    } else {
      ++epochs_without_;
    }
    return patience_ > 0 && epochs_without_ >= patience_;
  }
  double best() const { return best_; }

 private:
  int patience_, epochs_without_ = 0;
  double best_ = -std::numeric_limits<double>::infinity();
};
