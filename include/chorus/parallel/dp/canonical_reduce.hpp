#pragma once
/// An extension for canonical shares: which device has which, and step 5, reduce, in the order of the tree.

#include <chorus/core/batch_group.hpp>
#include <chorus/core/canonical_cut.hpp>
#include <chorus/core/config.hpp>
#include <chorus/parallel/canonical/device_shares.hpp>
#include <chorus/parallel/canonical/earlier_gradients.hpp>
#include <chorus/parallel/dp/backward.hpp>
#include <chorus/parallel/dp/reduce.hpp>
#include <chorus/parallel/dp/replica.hpp>
#include <chorus/parallel/dp/replicate.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace chorus::dp {

template <class Model>
class CanonicalReduce {
 public:
  using D = typename Replicas<Model>::D;

  /// `shares`: 0 for none.
  CanonicalReduce(Model& model, const Replicas<Model>& replicas, std::size_t shares);

  std::size_t shares() const { return shares_; }
  /// By device; empty without shares.
  const std::vector<std::shared_ptr<canonical::DeviceShares<D>>>& devices() const { return devices_; }
  /// The shares that each device has of so many, of those devices that have any.
  std::vector<ShareRange> runs(std::size_t used) const;

  /// For the outputs of such a pass; null without shares.
  std::shared_ptr<const CanonicalCut> cut(const Split& split) const;

  /// Of each share's roots. `apply(devices, task)` calls `task(i)` in the threads of the devices.
  template <class Apply>
  void backward(const Roots& roots, bool keep, const Apply& apply) {
    earlier_.take(replicas_.parameters(0));
    const auto used = runs(roots.size());
    // The task owns what it works with, for a device may come back late.
    apply(used.size(), [roots, keep, used, devices = devices_, copies = replicas_.copies()](std::size_t i) {
      devices[i]->backward(std::span(roots).subspan(used[i].begin, used[i].count()), keep, roots.size(), batch_group(),
                           [](Node&) {});
    });
    reduce(used.size());
    earlier_.give_back();
  }

 private:
  struct Sum {
    std::size_t device, number;  // of the device's sums
  };

  // The sums of all devices become the first one's gradients: the left one of two grows by the right one.
  void reduce(std::size_t used);
  void add_up(std::size_t used, std::size_t group, std::size_t begin, std::size_t count);

  const Replicas<Model>& replicas_;
  std::size_t shares_;
  std::vector<std::shared_ptr<canonical::DeviceShares<D>>> devices_;
  canonical::EarlierGradients<D> earlier_;
  std::optional<detail::CountedCanonicalPolicy> counted_;  // where there are shares
};

}  // namespace chorus::dp

#if CHORUS_DEFINES_DEVICE_TEMPLATES
#include <chorus/parallel/dp/canonical_reduce_impl.hpp>
#endif
