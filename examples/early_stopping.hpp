#pragma once
/// When training doesn't help any more.

#include <limits>

/// Says after which epoch to stop: where the last `patience` of them have brought no better score, the higher the
/// better. With 0 never.
class EarlyStopping {
 public:
  explicit EarlyStopping(int patience) : patience_(patience) {}

  /// Once an epoch. On several ranks all call it, with one number: a sum over their shares, say.
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
