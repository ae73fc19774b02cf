#pragma once
/// The options of `join`, under every policy.

#include <functional>

namespace chorus {

struct JoinOptions {
  /// All ranks throw as soon as one has run out of batches, instead of going on without it. For models whose forward or
  /// backward has collectives of its own, which the ranks that have ended don't know of (SyncBatchNorm).
  bool throw_on_early_termination = false;
  /// What `body` does after each averaged backward pass: as a rule clipping, and `optimizer.step()`. Ranks that have
  /// ended do it, too, with the same averages, so that the optimizer's state stays the same on all ranks; a
  /// ShardedOptimizer needs that, and so does a ParameterServer, whose rank 0 steps for all. Without, parameters and
  /// buffers are the same afterwards, but momenta are not. Under a GradScaler it is `scaler.step(optimizer)`.
  std::function<void()> step = {};
};

}  // namespace chorus
