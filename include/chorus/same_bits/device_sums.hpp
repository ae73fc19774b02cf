#pragma once
/// Canonical shares on several devices: their assignment, and step 5, reduce, in the order of the tree.

#include <algorithm>
#include <chorus/core/batch_group.hpp>
#include <chorus/parallel/dp/backward.hpp>
#include <chorus/parallel/dp/reduce.hpp>
#include <chorus/parallel/dp/replica.hpp>
#include <chorus/parallel/dp/replicate.hpp>
#include <chorus/same_bits/batch_cut.hpp>
#include <chorus/same_bits/device_shares.hpp>
#include <chorus/same_bits/earlier_gradients.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace chorus::same_bits {

/// For DataParallel's devices.
template <class Model>
class DeviceSums {
 public:
  using D = typename dp::Replicas<Model>::D;

  DeviceSums(Model& model, const dp::Replicas<Model>& replicas, std::size_t shares)
      : counted_(replicas.parameters(0).parameters()), replicas_(replicas), shares_(shares) {
    for (std::size_t i = 0; i < replicas.size(); ++i)
      devices_.push_back(std::make_shared<DeviceShares<D>>(i == 0 ? model : replicas[i].model(), replicas.parameters(i),
                                                           replicas.buffers(i), shares,
                                                           shares_of_device(shares, replicas.size(), i)));
  }

  std::size_t shares() const { return shares_; }
  /// By device.
  const std::vector<std::shared_ptr<DeviceShares<D>>>& devices() const { return devices_; }
  /// The shares of each device, out of the first `used`, for devices that have any.
  std::vector<ShareRange> runs(std::size_t used) const {
    std::vector<ShareRange> runs;
    for (const auto& device : devices_)
      if (const auto [begin, end] = device->run(); begin < used) runs.push_back({begin, std::min(end, used)});
    return runs;
  }

  /// The cut for the outputs of such a pass.
  std::shared_ptr<const BatchCut> cut(const dp::Split& split) const {
    return std::make_shared<const BatchCut>(shares_, ShareRange{0, shares_}, split.batch);
  }

  /// From each share's roots. `apply(devices, task)` calls `task(i)` in the threads of the devices.
  template <class Apply>
  void backward(const dp::Roots& roots, bool keep, const Apply& apply) {
    earlier_.take(replicas_.parameters(0));
    const auto used = runs(roots.size());
    // The task owns its data, because a device may end late.
    apply(used.size(), [roots, keep, used, devices = devices_, copies = replicas_.copies()](std::size_t i) {
      devices[i]->backward(std::span(roots).subspan(used[i].begin, used[i].count()), keep, roots.size(), batch_group(),
                           [](Node&) {});
    });
    reduce(used.size());
    earlier_.give_back();
  }

 private:
  struct Sum {
    std::size_t device, number;  // index among the device's sums
  };

  // Adds the sums of all devices into the first device's gradients: each right sum is added to its left neighbour.
  void reduce(std::size_t used) {
    const auto parameter = [&](std::size_t i, std::size_t p) -> auto& {
      return replicas_.parameters(i).entries()[p].parameter();
    };
    const auto& entries = replicas_.parameters(0).entries();
    dp::for_each_run(
        entries,
        [&](std::size_t p) {
          bool any = false;
          for (std::size_t i = 0; i < used; ++i) any = any || parameter(i, p).grad_arrived();
          for (std::size_t i = 0; any && i < used; ++i)  // a missing gradient is zero
            if (!parameter(i, p).grad_arrived())
              zero_bytes(parameter(i, p).where(), parameter(i, p).grad_place(), parameter(i, p).size_bytes());
          if (any) parameter(0, p).set_grad_arrived(true);
          if (any) entries[p].named.handle.shared()->set_reached();
          return any;
        },
        [&](std::size_t group, std::size_t begin, std::size_t count) { add_up(used, group, begin, count); });
  }
  void add_up(std::size_t used, std::size_t group, std::size_t begin, std::size_t count) {
    const trace::Span span(trace::Lane::communication, "copy", "reduce");
    const DType dtype = replicas_.parameters(0).groups()[group].dtype;
    const auto at = [&](const Sum& sum) { return devices_[sum.device]->tree().sum(sum.number, group, begin); };
    const auto add = [&](const Sum& left, const Sum& right) {
      const D to = replicas_.device(left.device), from = replicas_.device(right.device);
      dp::add_gradients(dtype, count, from, at(right), to, at(left), true);
      if (left.device != right.device)
        trace::sent(from.index, to.index, trace::Traffic::gradients, count * size_of(dtype));
    };
    TreeSum<Sum> sum;
    for (std::size_t i = 0; i < used; ++i)
      for (std::size_t k = 0; k < devices_[i]->tree().sums().size(); ++k)
        sum.push(devices_[i]->tree().sums()[k], {i, k}, add);
    const auto* const all = at(*sum.finish(add));
    const D first = replicas_.device(0);
    auto* const gradients = replicas_.parameters(0).groups()[group].grad(begin);
    if (all != gradients) copy_bytes(first, gradients, first, all, count * size_of(dtype));
  }

  CutsBatches counted_;
  const dp::Replicas<Model>& replicas_;
  std::size_t shares_;
  std::vector<std::shared_ptr<DeviceShares<D>>> devices_;
  EarlierGradients<D> earlier_;
};

}  // namespace chorus::same_bits
