#pragma once
/// Lab 14: what the student's code gives.

#include <chorus/parallel/pipeline/schedule.hpp>

#include "../lab.hpp"

namespace schedule_lab {

inline constexpr const char* title = "Lab 14: a schedule of your own";
using ch::Schedule;
using Kind = Schedule::Kind;

struct Code {
  /// The actions of p ranks with one stage each, for m micro-batches.
  Schedule (*schedule)(int p, int m);
};

void check(lab::Lab& lab, const Code& code);

}  // namespace schedule_lab
