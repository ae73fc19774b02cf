#pragma once
/// The random numbers of an operation: keyed by seed, step, layer and the sample's place in the global batch. A run
/// gives the same numbers under every policy and on any number of devices.

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

/// The seed of layers' initialisation and of all random numbers that no policy seeds.
inline void manual_seed(std::uint64_t seed) {
  detail::seed_state().seed = seed;
  detail::seed_state().next_stream = 0;
}
/// The seed that manual_seed has set, or the default.
inline std::uint64_t initial_seed() { return detail::seed_state().seed; }
/// A new stream of numbers; each initialised parameter takes one.
inline std::uint32_t next_random_stream() { return detail::seed_state().next_stream++; }

/// The numbers of the nets' forward passes in a part of a program that runs several times, as under activation
/// checkpointing. Each run has the numbers of the first.
class PassNumbers {
 public:
  /// The next pass begins. In a first run its number is `fresh`.
  std::uint32_t take(std::uint32_t fresh) {
    if (next_ == numbers_.size()) numbers_.push_back(around_ != nullptr ? around_->take(fresh) : fresh);
    return numbers_[next_++];
  }
  /// Whether the next pass has run before.
  bool repeats() const { return next_ < numbers_.size() || (around_ != nullptr && around_->repeats()); }
  /// A run begins. `around`: the enclosing part's, if that runs for the first time.
  void rewind(PassNumbers* around) {
    around_ = around;
    next_ = 0;
  }

 private:
  PassNumbers* around_ = nullptr;
  std::vector<std::uint32_t> numbers_;
  std::size_t next_ = 0;
};

/// The source of the random operations of one forward pass.
struct RandomContext {
  std::uint64_t seed = 0;
  /// Number of the forward pass.
  std::uint32_t step = 0;
  /// Counts the random operations of the pass.
  std::uint32_t next_operation = 0;
  /// Place of this device's first sample in the global batch. A function, since DistributedDataParallel has to ask.
  std::function<std::int64_t()> first_sample;
  /// The number of this device's samples; 0: unknown.
  std::int64_t samples = 0;
  /// For nets that are called in here; null if nothing runs again.
  PassNumbers* passes = nullptr;
  /// Whether an operation has drawn numbers: then the next pass has to draw others.
  bool drew = false;
  /// The number of devices or ranks that share the batch.
  int devices = 1;
  /// The axis of the model's inputs along which samples lie.
  int dim = 0;
  /// Whether one of the devices has that number of samples; null if unknown.
  std::function<bool(std::int64_t)> is_share = {};
  /// The slot of the device of this part of the model; -1: unknown.
  int device_slot = -1;
};

namespace detail {
inline RandomContext*& random_context() {
  thread_local RandomContext* context = nullptr;
  return context;
}
}  // namespace detail

/// While it lives, random operations of this thread draw from `context`, and tensors are made on its device.
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

/// The key of the pass's next operation, with the place of this device's first sample.
inline RandomKey next_key(RandomContext& context, bool draws) {
  context.drew = context.drew || draws;
  // Asked first: ranks may agree on another number of the pass.
  const std::int64_t first = draws && context.first_sample ? context.first_sample() : 0;
  return {context.seed, context.step, context.next_operation++, first, replay_count()};
}
inline RandomKey next_key_outside_of_policies() {
  constexpr std::uint32_t outside_of_policies = 0xFFFFFFFFu;
  return {initial_seed(), next_random_stream(), outside_of_policies, 0};
}
}  // namespace detail

/// The key for the next random operation of this thread, on a tensor with `rows` rows along its first axis: one for
/// each sample, or several if another axis was joined to it. Otherwise, or with `same_on_all`, all devices draw the
/// same. An operation that `draws` nothing is only counted. Outside of a policy each call is a pass of its own.
inline RandomKey next_random_key(std::int64_t rows, bool draws = true, bool same_on_all = false) {
  auto* context = detail::random_context();
  if (context == nullptr) return detail::next_key_outside_of_policies();
  RandomKey key = detail::next_key(*context, draws);
  const bool of_samples = context->samples > 0 && rows % context->samples == 0;
  if (of_samples) key.first_sample *= rows / context->samples;
  // Samples along another axis than the first can't be counted here.
  if (same_on_all || (!of_samples && context->devices > 1 && context->dim == 0)) key.first_sample = 0;
  return key;
}

}  // namespace chorus
