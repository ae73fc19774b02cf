#pragma once
/// Lab 11: what the student's code is.

#include "../lab.hpp"

namespace zero_lab {

inline constexpr const char* title = "Lab 11: an optimizer in N parts";

using Ranks = ch::comm::AnyCommunicator;
using ch::trace::Traffic;

/// The numbers [begin, end) of a row.
struct Part {
  std::size_t begin, end;
};
/// The library's Adam. Its state is made by the first step: two numbers for each that it steps.
class Adam {
 public:
  virtual ~Adam() = default;
  /// Steps these parameters, which have as many numbers in each call.
  virtual void step(std::span<float> parameters, std::span<const float> gradients) = 0;
};

struct Code {
  std::function<Part(std::size_t count, int ranks, int rank)> part;
  std::function<void(Ranks& ranks, std::span<float> parameters, std::span<const float> gradients, Adam& adam)> step;
};
/// Measures DDP with a plain and a sharded optimizer, and judges the code.
void check(lab::Lab& lab, const Code& code);

}  // namespace zero_lab
