#pragma once
/// What DataParallel can do beyond its five steps, and where each extension is called. Two more are called where they
/// work: recorded.hpp, in place of the steps, and deadline.hpp, by parallel_apply.

#include <chorus/parallel/dp/collectives.hpp>
#include <chorus/parallel/dp/device_balance.hpp>
#include <chorus/parallel/dp/gathered_scalars.hpp>
#include <chorus/parallel/dp/samples.hpp>
#include <cstddef>

namespace chorus::dp {

template <class Model>
class Extensions {
 public:
  /// Collectives need `device_ids`, `timeout`, and what the others are made of, for as long as they live.
  template <class... Arguments>
  explicit Extensions(const std::vector<int>& device_ids, Arguments&&... arguments)
      : collectives_(device_ids, arguments...) {
    warn_of_imbalance<typename Replica<Model>::D>(device_ids);
  }

  /// Step 2: whether the copies on `devices` devices were brought up to date in another way, by NCCL's broadcast.
  bool replicate(std::size_t devices) { return collectives_.replicate(devices); }
  /// After step 4: `scalars` says whether there are scalars among the outputs.
  void gathered(const Split& split, bool scalars) { scalars_.begin_pass(split.batch, split.devices, scalars); }
  /// Step 5: whether the gradients were added up in another way, by NCCL's reduce.
  bool reduce(std::size_t devices) { return collectives_.reduce(devices); }

  const detail::GatheredScalars& scalars() const { return scalars_; }

 private:
  Collectives<Model> collectives_;
  detail::GatheredScalars scalars_;
};

}  // namespace chorus::dp
