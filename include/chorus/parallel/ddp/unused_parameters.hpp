#pragma once
/// Option `find_unused_parameters`: some backward passes don't use all parameters, different ones on each rank.

#include <algorithm>
#include <chorus/core/say.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace chorus::ddp {

/// A missing gradient is 0 on its rank. After the pass ranks exchange what arrived: a parameter has a gradient if any
/// rank used it. If none did, it has none, so that no optimizer changes it.
template <Device D, class Communicator>
class UnusedParameters final : public Extension<D> {
 public:
  explicit UnusedParameters(Core<D, Communicator>& core) : core_(core) {}

  void backward_ended() override {
    came_.clear();
    for (std::size_t i = 0; i < core_.entries(); ++i)
      came_.push_back(core_.contribution != Contribution::zeros && core_.parameter(i).grad_arrived());
    core_.fill_missing();
    core_.buckets.complete();
  }
  void averaged() override {
    agree();
    for (std::size_t i = 0; i < core_.entries(); ++i)
      if (core_.is_shared(i)) core_.parameter(i).set_grad_arrived(came_[i] != 0);
  }

 private:
  // Combines `came_` over all ranks.
  [[gnu::cold]] void agree() {
    const std::size_t common = core_.common_entries();
    std::vector<std::int32_t> came(came_.begin(), came_.begin() + static_cast<std::ptrdiff_t>(common));
    const auto lacks_one = [&] {
      for (std::size_t i = 0; i < common; ++i)
        if (core_.is_shared(i) && came[i] == 0) return true;
      return false;
    };
    came.push_back(core_.contribution != Contribution::zeros && lacks_one() ? 1 : 0);
    core_.ranks.all_reduce(std::span(came), comm::ReduceOp::max, {});
    came_.assign(core_.entries(), 0);
    std::copy(came.begin(), came.end() - 1, came_.begin());
    warn_if_all_used(came.back() == 0);
  }
  // Says once that this option is not needed (as PyTorch does after the first pass).
  void warn_if_all_used(bool all) {
    constexpr int passes = 10;
    found_ = found_ || !all;
    if (found_ || ++complete_ != passes || core_.ranks.rank() != 0) return;
    detail::say(cat("warning: DistributedDataParallel: find_unused_parameters is set, but in the first ", passes,
                    " backward passes every parameter got a gradient on every rank; without it a step has one "
                    "collective less. Keep it if later passes leave parameters out."));
  }

  Core<D, Communicator>& core_;
  std::vector<char> came_;  // by entry: whether a gradient came in this pass
  int complete_ = 0;
  bool found_ = false;
};

}  // namespace chorus::ddp
