#pragma once
/// `join`: how a rank that has run out of batches takes part in passes of other ranks.

#include <chorus/parallel/ddp/accumulation.hpp>
#include <chorus/parallel/ddp/clock.hpp>
#include <chorus/parallel/ddp/earlier_gradients.hpp>
#include <chorus/parallel/ddp/extension.hpp>
#include <chorus/parallel/ddp/frozen_parameters.hpp>
#include <chorus/parallel/join.hpp>
#include <cstddef>

namespace chorus::ddp {

/// Such a rank shadows the others: it makes the same collective calls, with no samples. Afterwards it has its own
/// gradients again.
template <Device D, class Communicator>
class ShadowPasses final : public Extension<D> {
 public:
  explicit ShadowPasses(Core<D, Communicator>& core) : core_(core) {}

  void begin() { own_.take(core_.flat); }
  void end() {
    own_.give_back();
    own_.forget();
  }

  /// Takes part in a pass after ranks have exchanged their numbers of samples: with the gradients accumulated under
  /// no_sync if there are any, else with zeros.
  [[gnu::cold]] JoinedPass run() {
    const struct Scope {
      Contribution& contribution;
      ~Scope() { contribution = Contribution::samples; }
    } scope{core_.contribution};
    core_.contribution = Contribution::zeros;
    core_.template find<FrozenParameters<D, Communicator>>()->fit_buckets();
    core_.notify(&Extension<D>::ready_for_forward);
    core_.shares.weigh({});
    core_.notify(&Extension<D>::weighed);
    if (!core_.shares.active_pass().sync) return JoinedPass::passed;
    if (const auto* const added_up = core_.template find<Accumulation<D, Communicator>>();
        added_up && added_up->any()) {
      core_.contribution = Contribution::accumulated_gradients;
      own_.take_none(core_.flat);  // they are sent in this pass
    }
    if (auto* const clock = core_.template find<Clock<D, Communicator>>()) clock->shadow_forward();
    core_.begin_backward();
    for (std::size_t i = 0; i < core_.entries(); ++i) {
      if (core_.contribution == Contribution::zeros) core_.parameter(i).set_grad_arrived(false);
      if (core_.buckets.sends(i)) core_.fill(i);
    }
    core_.buckets.complete();
    core_.finalize_backward();
    return JoinedPass::averaged;
  }

 private:
  Core<D, Communicator>& core_;
  detail::GradientsAside<D> own_;
};

}  // namespace chorus::ddp
