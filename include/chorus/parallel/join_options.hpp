#pragma once
/// The options of `join`, under every policy.

#include <functional>

namespace chorus {

struct JoinOptions {
  /// All ranks throw as soon as one has run out of batches, instead of continuing. For models whose forward or backward
  /// has collectives of its own, which ended ranks can't join (SyncBatchNorm).
  bool throw_on_early_termination = false;
  /// The part of `body` after each averaged backward pass: usually clipping and `optimizer.step()`. Ranks that have
  /// ended call it, too, with the same averages, so that optimizer state stays equal on all ranks. A ShardedOptimizer
  /// needs it, and so does a ParameterServer, whose rank 0 steps for all. Without it, parameters and buffers are equal
  /// afterwards, but momenta are not. With a GradScaler it is `scaler.step(optimizer)`.
  std::function<void()> step = {};
};

}  // namespace chorus
