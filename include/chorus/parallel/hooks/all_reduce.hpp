#pragma once
/// Communication hooks: types that say how DistributedDataParallel averages a bucket of gradients. Here: what a hook is
/// given, and the default, the all-reduce.

#include <chorus/comm/communicator.hpp>
#include <chorus/core/device.hpp>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace chorus {

/// A parameter of a bucket: the place of its first number, its shape, and its name.
struct GradBucketPart {
  std::size_t begin;
  std::span<const Index> shape;
  std::string name;
};

/// One bucket's gradients. A hook replaces this rank's by what all ranks shall have: sum(weight * gradients) over the
/// ranks, where the weights are the ranks' parts of the batch, and add up to 1.
///
/// A hook is a class with two function templates, called in the same order on every rank:
///
///   comm::Work start(const GradBucket<T, D>&, Communicator&)
///     when the bucket is full, in the middle of backward;
///   std::optional<comm::Work> resume(const GradBucket<T, D>&, Communicator&, int round)
///     when the last Work has ended: starts another one (round 0, 1, ...), or leaves the result in the bucket and
///     returns nothing.
///
/// A hook whose `resume` starts more work has a member `static constexpr bool several_rounds = true`.
/// It may have, for methods that average parameters, too,
///   void after_backward(), void before_forward(flat parameters, communicator, shared): around an optimizer's step;
///     `shared(name)`: whether ranks share the parameter of that name;
///   void synchronise(flat parameters, communicator): in `eval()`, when all ranks shall have the same parameters.
/// A hook that may leave ranks with different gradients has a member `static constexpr bool own_gradients = true`, and
/// `bool averages() const`, whether it will average this step's: those that it won't are not weighed.
/// State is the hook's own: one hook belongs to one net. When buckets change, `reset()` is called, if there is one.
/// What it remembers of each parameter beyond that, and in checkpoints, it shows in
///   void remembered(const GradBucket<T, D>&, bool make, const auto& visit)
///     calls visit(what, part, shape, device, numbers) for all that it keeps of a part, in numbers of type T, as
///     `rest`, what has not been sent yet. Where the bucket has no state so far, there is nothing, unless it is to
///     `make` one.
/// The numbers that it counts are in a checkpoint as those of optim::GradScaler are: `kept_as`, `kept()`, `keep(...)`,
/// each rank's own, and `can_keep(...)`, whether a file's make sense. `bool ranks_differ() const` says whether
/// ranks have parameters and optimizers of their own, and `stepped`, a detail::ParametersApart, which parameters.
template <class T, Device D>
struct GradBucket {
  std::size_t index;  ///< in the order in which buckets are sent
  D device;
  std::span<T> gradients;
  double weight;
  std::span<const GradBucketPart> parts;
  bool last;  ///< no other bucket is still to be filled: there is nothing left for backward to do meanwhile
};

/// The default: a ring all-reduce, which weighs on the way. Each of n ranks sends 2 (n - 1) / n of the bucket's bytes.
struct AllReduce {
  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    if (communicator.size() == 1) return {};
    const comm::CollectiveOptions options{
        .scale = bucket.weight, .traffic = trace::Traffic::gradients, .bucket = static_cast<int>(bucket.index)};
    // On the CPU this thread does the work itself, rather than wake another one.
    if (std::is_same_v<D, Cpu> && bucket.last) {
      communicator.all_reduce(bucket.gradients, comm::ReduceOp::sum, options);
      return {};
    }
    return communicator.all_reduce_async(bucket.gradients, comm::ReduceOp::sum, options);
  }
  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>&, Communicator&, int) {
    return {};
  }
};

/// Sends nothing: each rank keeps its own gradients. To measure what communication costs, and for methods that average
/// parameters instead.
struct NoCommunication {
  static constexpr bool own_gradients = true;
  static constexpr bool averages() { return false; }

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>&, Communicator&) {
    return {};
  }
  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>&, Communicator&, int) {
    return {};
  }
};

}  // namespace chorus
