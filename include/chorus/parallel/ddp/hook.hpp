#pragma once
/// Communication hooks: types that say how DistributedDataParallel averages a bucket of gradients. This file defines
/// their arguments and all their possible members.

#include <chorus/comm/communicator.hpp>
#include <chorus/core/device.hpp>
#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace chorus {

namespace nn {
template <Device D>
class FlatParameters;
}  // namespace nn

/// A parameter of a bucket: the offset of its first number, its shape and its name.
struct GradBucketPart {
  std::size_t begin;
  std::span<const Index> shape;
  std::string name;
};

/// One bucket's gradients. A hook replaces this rank's gradients by sum(weight * gradients) over the ranks. The weights
/// are the ranks' shares of the batch and sum to 1.
///
/// A hook is a class with one function template, which is called in the same order on every rank:
///
///   comm::Work start(const GradBucket<T, D>&, Communicator&)
///     when the bucket is full, during backward.
///
/// A hook with several rounds has
///
///   std::optional<comm::Work> resume(const GradBucket<T, D>&, Communicator&, int round)
///     when the last Work has ended: starts another one (round 0, 1, ...), or leaves the result in the bucket and
///     returns nothing
///   static constexpr bool several_rounds = true
///     if `resume` ever starts more work.
///
/// A hook's state is its own: one hook belongs to one net. A hook with state may have
///
///   void reset()
///     buckets change: state by bucket index is invalid
///   void remembered(const GradBucket<T, D>&, bool make, const auto& visit)
///     calls visit(what, part, shape, device, numbers) for each state of a part, numbers of type T, for example `rest`,
///     the residual of error feedback. If the bucket has no state yet, creates it if `make`, else visits nothing. This
///     state follows parameters to other buckets and into checkpoints
///   static constexpr std::string_view kept_as; std::array<double, N> kept() const; void keep(const array&);
///   static bool can_keep(const array&)
///     each rank's own counters, for checkpoints: their name there, their values, restore, and whether values from a
///     file are valid.
///
/// A hook that lets ranks differ may have
///
///   static constexpr bool own_gradients = true
///     it may leave unaveraged gradients on each rank
///   bool averages() const
///     whether it will average this step's gradients: others get no weights
///   void after_backward(); void before_forward(flat parameters, communicator, shared)
///     around the optimizer's step, for methods that average parameters; `shared(name)`: whether ranks share it
///   void synchronise(flat parameters, communicator)
///     in `eval()`: gives all ranks the same parameters
///   bool ranks_differ() const; detail::LocalSteps stepped
///     for checkpoints: whether ranks have different parameters and optimizer states, and which
///   static constexpr bool in_parts = true
///     it gives each rank the average of its own part of each bucket only: see ReduceScatter.
template <class T, Device D>
struct GradBucket {
  std::size_t index;  ///< in the order in which buckets are sent
  D device;
  std::span<T> gradients;
  double weight;
  std::span<const GradBucketPart> parts;
  bool last;  ///< no other bucket is still to be filled: backward has no work left to overlap
};

namespace ddp {

// Rarely used; their headers define them.
template <Device D, class Communicator>
class GradientParts;  // needs #include <chorus/parallel/ddp/parts.hpp>
template <Device D, class Communicator>
class StepInBackward;  // needs #include <chorus/parallel/ddp/step_in_backward.hpp>

/// Which of these members a hook has.
template <class Hook, Device D, class Communicator>
struct HookTraits {
  using View = GradBucket<double, D>;
  static constexpr bool starts =
      requires(Hook& hook, const View& bucket, Communicator& communicator) { hook.start(bucket, communicator); };
  static constexpr bool resumes =
      requires(Hook& hook, const View& bucket, Communicator& communicator) { hook.resume(bucket, communicator, 0); };
  static constexpr bool several_rounds = requires { Hook::several_rounds; };
  static constexpr bool in_parts = requires { Hook::in_parts; };
  static constexpr bool own_gradients = requires { Hook::own_gradients; };
  static constexpr bool resets = requires(Hook& hook) { hook.reset(); };
  static constexpr bool remembers_parameters =
      requires(Hook& hook, const View& bucket) { hook.remembered(bucket, true, [](const auto&...) {}); };
  static constexpr bool remembers_numbers = requires(Hook& hook) { hook.keep(hook.kept()); };
  static constexpr bool acts_after_backward = requires(Hook& hook) { hook.after_backward(); };
  static constexpr bool averages_parameters =
      requires(Hook& hook, const nn::FlatParameters<D>& flat, Communicator& communicator) {
        hook.before_forward(flat, communicator, [](const std::string&) { return true; });
      };
  static constexpr bool ranks_may_differ = requires(const Hook& hook) { hook.ranks_differ(); };

  static bool averages(const Hook& hook) {
    if constexpr (requires { hook.averages(); })
      return hook.averages();
    else
      return true;
  }
};

}  // namespace ddp
}  // namespace chorus
