#pragma once
/// Lab 7: what the student's code is.

#include "../lab.hpp"

namespace large_batch_lab {

inline constexpr const char* title = "Lab 7: large batches";

/// The inputs to a step's rate.
struct Plan {
  double base_rate;  ///< suits batches of `base_batch` samples
  ch::Index base_batch, batch;
  int steps_an_epoch, epochs;
  int steps() const { return epochs * steps_an_epoch; }
};
struct Code {
  /// The rate of a step, counted from 0.
  std::function<double(const Plan& plan, int step)> rate;
};
/// Trains on generated digits in batches of 8 on one device, and of 128 on 4 ranks, at several rates and at the code's.
void check(lab::Lab& lab, const Code& code);

}  // namespace large_batch_lab
