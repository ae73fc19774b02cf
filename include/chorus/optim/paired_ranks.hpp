#pragma once
/// The ranks of one model, as optimizers see them that send pieces of parameters from rank to rank.

#include <chorus/autograd/parameter.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus::optim {

/// Ranks that also exchange messages in pairs.
class PairedRanks : public ModelRanks {
 public:
  using Messages = std::vector<std::vector<std::uint8_t>>;  ///< by rank, in bytes

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// An all-to-all: sends `to[r]` to each rank r, and fills `from[r]`, whose size is known, with what r sends. Empty
  /// messages are not sent.
  virtual void exchange(const Messages& to, Messages& from) = 0;
};

}  // namespace chorus::optim
