#pragma once
/// The default communication hook, all-reduce, and a hook that sends nothing.

#include <chorus/parallel/ddp/hook.hpp>
#include <type_traits>

namespace chorus {

/// The default: a ring all-reduce that also scales. Each of n ranks sends 2 (n - 1) / n of the bucket's bytes.
struct AllReduce {
  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    if (communicator.size() == 1) return {};
    const comm::CollectiveOptions options{
        .scale = bucket.weight, .traffic = trace::Traffic::gradients, .bucket = static_cast<int>(bucket.index)};
    // On the CPU this thread does the work itself, which is cheaper than waking another one.
    if (std::is_same_v<D, Cpu> && bucket.last) {
      communicator.all_reduce(bucket.gradients, comm::ReduceOp::sum, options);
      return {};
    }
    return communicator.all_reduce_async(bucket.gradients, comm::ReduceOp::sum, options);
  }
};

/// Sends nothing: each rank keeps its own gradients. For measuring the cost of communication, and for methods that
/// average parameters instead.
struct NoCommunication {
  static constexpr bool own_gradients = true;
  static constexpr bool averages() { return false; }

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>&, Communicator&) {
    return {};
  }
};

}  // namespace chorus
