#pragma once
/// Random numbers of operations, keyed by seed, step, layer and the sample's index in the global batch. They are the
/// same under every policy and on any number of devices.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <chorus/core/device.hpp>
#include <chorus/core/philox.hpp>
#include <chorus/core/replaced.hpp>

namespace chorus {

namespace detail {
struct SeedState {
  std::atomic<std::uint64_t> seed{0};
  std::atomic<std::uint32_t> next_stream{0};
};
inline SeedState& seed_state() {
  static SeedState state;
  return state;
}
}  // namespace detail

/// Sets the seed for initialisation and for all random numbers outside of policies.
inline void manual_seed(std::uint64_t seed) {
  detail::seed_state().seed = seed;
  detail::seed_state().next_stream = 0;
}
/// The seed of manual_seed, or the default.
inline std::uint64_t initial_seed() { return detail::seed_state().seed; }
/// A new random stream; each initialised parameter takes one.
inline std::uint32_t next_random_stream() { return detail::seed_state().next_stream++; }

/// The pass numbers of nets called in a part of a program that may run again, as with activation checkpointing. Each
/// run has the same numbers as the first.
class PassNumbers {
 public:
  /// The number of the next pass; `fresh` in a first run.
  std::uint32_t take(std::uint32_t fresh) {
    if (next_ == numbers_.size()) numbers_.push_back(around_ != nullptr ? around_->take(fresh) : fresh);
    return numbers_[next_++];
  }
  /// Whether the next pass is a repetition.
  bool repeats() const { return next_ < numbers_.size() || (around_ != nullptr && around_->repeats()); }
  /// Starts a run. `around`: the enclosing part, if that is in its first run.
  void rewind(PassNumbers* around) {
    around_ = around;
    next_ = 0;
  }

 private:
  PassNumbers* around_ = nullptr;
  std::vector<std::uint32_t> numbers_;
  std::size_t next_ = 0;
};

/// The state of one forward pass's random operations.
struct RandomContext {
  std::uint64_t seed = 0;
  /// The number of the forward pass.
  std::uint32_t step = 0;
  /// Counts the random operations of the pass.
  std::uint32_t next_operation = 0;
  /// The global index of this device's first sample. A function, since DistributedDataParallel communicates for it.
  std::function<std::int64_t()> first_sample;
  /// The number of this device's samples; 0: unknown.
  std::int64_t samples = 0;
  /// For nets called in here; null if nothing can run again.
  PassNumbers* passes = nullptr;
  /// Whether an operation has drawn numbers, so that the next pass needs another number.
  bool drew = false;
  /// The number of devices or ranks that share the batch.
  int devices = 1;
  /// The axis of samples in the model's inputs.
  int dim = 0;
  /// Whether one of the devices has that many samples; null if unknown.
  std::function<bool(std::int64_t)> is_share = {};
  /// The slot of the device that runs this part of the model; -1: unknown.
  int device_slot = -1;
};

namespace detail {
inline RandomContext*& random_context() {
  thread_local RandomContext* context = nullptr;
  return context;
}
}  // namespace detail

/// While it lives, this thread's random operations draw from `context`, and new tensors are on its device.
class RandomScope {
 public:
  explicit RandomScope(RandomContext& context)
      : context_(detail::random_context(), &context),
        slot_(detail::pass_slot, context.device_slot < 0 ? detail::pass_slot : context.device_slot) {}

 private:
  detail::Replaced<RandomContext*> context_;
  detail::Replaced<int> slot_;
};

namespace detail {
inline const std::uint32_t*& replay_count() {
  thread_local const std::uint32_t* count = nullptr;
  return count;
}

/// The key of the pass's next operation, with the index of this device's first sample.
inline RandomKey next_key(RandomContext& context, bool draws) {
  context.drew = context.drew || draws;
  // Called first, since ranks may then agree on another pass number.
  const std::int64_t first = draws && context.first_sample ? context.first_sample() : 0;
  return {context.seed, context.step, context.next_operation++, first, replay_count()};
}
inline RandomKey next_key_outside_of_policies() {
  constexpr std::uint32_t outside_of_policies = 0xFFFFFFFFu;
  return {initial_seed(), next_random_stream(), outside_of_policies, 0};
}
}  // namespace detail

/// The key of this thread's next random operation, on a tensor with `rows` rows along its first axis: one per sample,
/// or several if another axis was merged into it. Otherwise, and with `same_on_all`, all devices draw the same. Without
/// `draws` the operation is only counted. Outside of policies each call is a pass of its own.
inline RandomKey next_random_key(std::int64_t rows, bool draws = true, bool same_on_all = false) {
  auto* context = detail::random_context();
  if (context == nullptr) return detail::next_key_outside_of_policies();
  RandomKey key = detail::next_key(*context, draws);
  const bool of_samples = context->samples > 0 && rows % context->samples == 0;
  if (of_samples) key.first_sample *= rows / context->samples;
  // Samples along another axis than the first cannot be counted here.
  if (same_on_all || (!of_samples && context->devices > 1 && context->dim == 0)) key.first_sample = 0;
  return key;
}

}  // namespace chorus
