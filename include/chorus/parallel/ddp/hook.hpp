#pragma once
/// Communication hooks: types that say how DistributedDataParallel averages a bucket of gradients. Here: what a hook is
/// given, and all that it may have.

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

/// A parameter of a bucket: the place of its first number, its shape, and its name.
struct GradBucketPart {
  std::size_t begin;
  std::span<const Index> shape;
  std::string name;
};

/// One bucket's gradients. A hook replaces this rank's by what all ranks shall have: sum(weight * gradients) over the
/// ranks, where the weights are the ranks' shares of the batch, and add up to 1.
///
/// A hook is a class with one function template, which is called in the same order on every rank:
///
///   comm::Work start(const GradBucket<T, D>&, Communicator&)
///     when the bucket is full, in the middle of backward.
///
/// One of several rounds has
///
///   std::optional<comm::Work> resume(const GradBucket<T, D>&, Communicator&, int round)
///     when the last Work has ended: starts another one (round 0, 1, ...), or leaves the result in the bucket and
///     returns nothing
///   static constexpr bool several_rounds = true
///     if it ever starts more work there.
///
/// State is the hook's own: one hook belongs to one net. One that keeps something from step to step may have
///
///   void reset()
///     buckets change: what belongs to a bucket's index is no good any more
///   void remembered(const GradBucket<T, D>&, bool make, const auto& visit)
///     calls visit(what, part, shape, device, numbers) for all that it keeps of a part, in numbers of type T, as
///     `rest`, what has not been sent yet. Where the bucket has no state so far, there is nothing, unless it is to
///     `make` one. It goes with the parameters to other buckets, and into checkpoints
///   static constexpr std::string_view kept_as; std::array<double, N> kept() const; void keep(const array&);
///   static bool can_keep(const array&)
///     the numbers that it counts, each rank's own, for checkpoints: their name there, the numbers, back from a file,
///     and whether a file's make sense.
///
/// One that lets ranks differ may have
///
///   static constexpr bool own_gradients = true
///     it may leave each rank its own gradients
///   bool averages() const
///     whether it will average this step's gradients: those that it won't are not weighed
///   void after_backward(); void before_forward(flat parameters, communicator, shared)
///     around the optimizer's step, for methods that average parameters; `shared(name)`: whether ranks share that one
///   void synchronise(flat parameters, communicator)
///     in `eval()`: all ranks shall have the same parameters
///   bool ranks_differ() const; detail::LocalSteps stepped
///     for checkpoints: whether ranks have parameters and optimizers of their own, and which
///   static constexpr bool in_parts = true
///     it leaves each rank the average of its own part of each bucket alone: see ReduceScatter.
template <class T, Device D>
struct GradBucket {
  std::size_t index;  ///< in the order in which buckets are sent
  D device;
  std::span<T> gradients;
  double weight;
  std::span<const GradBucketPart> parts;
  bool last;  ///< no other bucket is still to be filled: there is nothing left for backward to do meanwhile
};

namespace ddp {

// What few programs need, whose headers bring it.
template <Device D, class Communicator>
class GradientParts;  // needs #include <chorus/parallel/ddp/parts.hpp>
template <Device D, class Communicator>
class StepInBackward;  // needs #include <chorus/parallel/ddp/step_in_backward.hpp>

/// What a hook has of all that: the one place that looks.
template <class Hook, Device D, class Communicator>
struct HookTraits {
  using View = GradBucket<double, D>;
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
