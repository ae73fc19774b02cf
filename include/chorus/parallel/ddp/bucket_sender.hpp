#pragma once
/// Sends gradient buckets through a hook while backward goes on, and takes back what has become of them.

#include <chorus/parallel/ddp/ddp_options.hpp>
#include <chorus/parallel/ddp/ddp_times.hpp>
#include <chorus/parallel/ddp/gradient_layout.hpp>
#include <chorus/parallel/ddp/non_finite.hpp>
#include <chrono>
#include <span>
#include <utility>
#include <vector>

namespace chorus::detail {

/// What becomes of a backward pass' gradients: what the hook does; whole averages, where a hook's parts are not enough;
/// nothing, for other ranks reach them, and the optimizer averages as it steps.
enum class Averaging { by_hook, whole, by_optimizer };

/// Buckets leave in order, each as soon as it is full: all ranks have to call in one order.
template <Device D, class Hook, class Communicator>
class BucketSender {
 public:
  static constexpr std::size_t no_bucket = GradientLayout<D>::no_bucket;
  // A hook that starts more work when a bucket comes back does so at the end: all ranks have to call in one order.
  static constexpr bool several_rounds = requires { Hook::several_rounds; };
  // A hook after which each rank has the average of its part alone.
  static constexpr bool in_parts = requires { Hook::in_parts; };

  BucketSender(GradientLayout<D>& layout, Communicator& communicator, const DistributedDataParallelOptions& options,
               Hook hook)
      : layout_(layout), communicator_(communicator), options_(options), hook_(std::move(hook)) {}
  /// Waits for what is under way in the hook's memory.
  ~BucketSender() {
    for (auto& bucket : layout_.buckets()) bucket.work = {};
  }
  BucketSender(const BucketSender&) = delete;
  BucketSender& operator=(const BucketSender&) = delete;

  Hook& hook() { return hook_; }
  DdpClock& clock() { return clock_; }
  const DdpClock& clock() const { return clock_; }

  /// A backward pass begins, whose gradients count `weight` in the average.
  void begin(double weight, Averaging averaging) {
    weight_ = weight;
    averaging_ = averaging;
    next_ = next_back_ = 0;
    bad_ = no_bucket;
    clock_.backward_begins(busy());
  }
  /// Others have been made, which leave in the same pass.
  void begin_again() { next_ = next_back_ = 0; }
  /// Sends the buckets that are full, up to the first that isn't.
  void send_full() {
    auto& buckets = layout_.buckets();
    for (; next_ < buckets.size() && buckets[next_].missing == 0; ++next_) {
      if (options_.non_finite == NonFinite::throw_error && bad_ == no_bucket && weight_ != 0)
        bad_ = first_not_finite(layout_, next_);
      const DdpClock::Exposed scope(clock_);
      with_bucket(next_, [&](const auto& view) { buckets[next_].work = start(view); });
    }
  }
  /// Sends the others, too.
  void send_all() {
    for (auto& bucket : layout_.buckets()) bucket.missing = 0;
    send_full();
  }
  double weight() const { return weight_; }
  Averaging averaging() const { return averaging_; }
  bool all_sent() const { return next_ == layout_.buckets().size(); }

  /// Whether the next bucket in order has come back.
  bool next_is_back() const { return next_back_ < next_ && layout_.buckets()[next_back_].work.done(); }
  bool all_back() const { return next_back_ == layout_.buckets().size(); }
  /// Waits for the next bucket in order, and whatever the hook sends after it.
  const GradientBucket& take_back_next() {
    const std::size_t b = next_back_++;
    auto& bucket = layout_.buckets()[b];
    const DdpClock::Exposed scope(clock_);
    bucket.work.wait();
    for (int round = 0; resume(b, round); ++round) bucket.work.wait();
    return bucket;
  }
  /// Waits for all that are left; what the hook sends after each, it sends for all of them at a time.
  void take_back_all() {
    const DdpClock::Exposed scope(clock_);
    open_.clear();
    for (; !all_back(); ++next_back_) open_.push_back(next_back_);
    for (int round = 0; !open_.empty(); ++round)
      std::erase_if(open_, [&](std::size_t b) {
        layout_.buckets()[b].work.wait();
        return !resume(b, round);
      });
  }
  void end() { clock_.backward_ends(busy()); }

  /// Calls `f(bucket)` for all buckets as hooks see them.
  template <class F>
  void for_each_bucket(const F& f) {
    for (std::size_t b = 0; b < layout_.buckets().size(); ++b) with_bucket(b, f);
  }
  D device() const { return layout_.device(layout_.buckets().front()); }

  /// The first entry whose gradient by this rank was not finite, where that is to be named, or no_bucket.
  std::size_t first_bad() const { return bad_; }

 private:
  std::chrono::nanoseconds busy() const {
    if constexpr (requires { communicator_.busy(); }) return communicator_.busy();
    return {};
  }

  // Calls `f(bucket as hooks see it)`.
  template <class F>
  void with_bucket(std::size_t b, const F& f) {
    const auto& bucket = layout_.buckets()[b];
    with_type(layout_.dtype(bucket), layout_.gradients(bucket), [&]<class T>(T* grads) {
      f(GradBucket<T, D>{b, layout_.device(bucket), std::span<T>(grads, bucket.count), weight_, layout_.parts(b),
                         b + 1 == layout_.buckets().size()});
    });
  }
  template <class View>
  comm::Work start(const View& view) {
    if constexpr (in_parts) {
      if (averaging_ == Averaging::whole) return AllReduce{}.start(view, communicator_);
      if (averaging_ == Averaging::by_optimizer) return {};
    }
    return hook_.start(view, communicator_);
  }
  bool resume(std::size_t b, int round) {
    bool more = false;
    if (averaging_ != Averaging::by_hook) return more;
    with_bucket(b, [&](const auto& view) {
      if (auto next = hook_.resume(view, communicator_, round)) {
        layout_.buckets()[b].work = std::move(*next);
        more = true;
      }
    });
    return more;
  }

  GradientLayout<D>& layout_;
  Communicator& communicator_;
  const DistributedDataParallelOptions& options_;
  Hook hook_;
  DdpClock clock_;
  double weight_ = 1;
  Averaging averaging_ = Averaging::by_hook;
  std::size_t next_ = 0, next_back_ = 0;  // buckets: to be sent, to be taken back
  std::size_t bad_ = no_bucket;
  std::vector<std::size_t> open_;  // buckets that are awaited
};

}  // namespace chorus::detail
