#pragma once
/// Lab 12: what the student's code is.

#include "../counted.hpp"
#include "../lab.hpp"

namespace fsdp_lab {

inline constexpr const char* title = "Lab 12: a unit of FSDP";

using Ranks = ch::comm::AnyCommunicator;
using Values = std::vector<float>;  ///< activations
using ch::trace::Memory;
using ch::trace::Traffic;

/// Numbers that the memory counters count: `Numbers whole(ranks.rank(), Memory::parameters, count)` are zeros on this
/// rank, `whole.numbers()` is their span. They are freed with the last copy of `whole`.
using Numbers = lab::Counted;

/// A layer, of whose parameters this rank has a part.
class Unit {
 public:
  virtual ~Unit() = default;
  /// This rank's part of the parameters. All ranks' parts have the same length: together, in the order of ranks, they
  /// are all parameters of the layer, followed by padding.
  virtual std::span<const float> parameters() const = 0;
  /// The place for this rank's part of the gradients, as long as `parameters()`.
  virtual std::span<float> gradients() const = 0;
  /// The layer's output for the input x. `whole`: all parameters, with or without the padding.
  virtual Values forward(const Numbers& whole, const Values& x) const = 0;
  /// Writes the gradients of this rank's samples to `gradients`, as long as `whole`. Returns the gradient by x; `dy` is
  /// that by the output.
  virtual Values backward(const Numbers& whole, const Values& x, const Values& dy, const Numbers& gradients) const = 0;
};

struct Code {
  std::function<Values(Ranks& ranks, const Unit& unit, const Values& x)> forward;
  std::function<Values(Ranks& ranks, const Unit& unit, const Values& x, const Values& dy)> backward;
};
/// Measures DDP and FSDP, and judges the code.
void check(lab::Lab& lab, const Code& code);

}  // namespace fsdp_lab
