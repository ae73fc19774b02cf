#pragma once
/// The reducer: sees each gradient of a backward pass as it becomes final, and averages full buckets over all ranks
/// while backward goes on.

#include <algorithm>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/pointwise.hpp>
#include <chorus/parallel/batch_shares.hpp>
#include <chorus/parallel/ddp_options.hpp>
#include <chorus/parallel/gradient_buckets.hpp>
#include <chorus/parallel/hooks/all_reduce.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::inline CHORUS_ABI::detail {

/// Calls `f(float*)` or `f(double*)`: a pointer into a flat buffer as what it is.
template <class F>
void with_type(DType type, std::byte* at, const F& f) {
  check<UsageError>(type == DType::f32 || type == DType::f64, "DistributedDataParallel: gradients of dtype ", type,
                    " can't be averaged; expected F32 or F64");
  if (type == DType::f32)
    f(reinterpret_cast<float*>(at));
  else
    f(reinterpret_cast<double*>(at));
}

template <Device D, class Hook, class Communicator>
class Reducer {
 public:
  Reducer(nn::FlatParameters<D>& flat, Communicator& communicator, BatchShares<Communicator>& shares,
          const DistributedDataParallelOptions& options, Hook hook)
      : flat_(flat), communicator_(communicator), shares_(shares), options_(options), hook_(std::move(hook)) {
    sort_in();
    rebuild();
    check<UsageError>(!buckets_.empty(), "DistributedDataParallel: no parameter of the model wants a gradient");
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  Hook& hook() { return hook_; }
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  bool in_backward() const { return in_backward_; }
  std::int64_t skipped_steps() const { return skipped_; }
  /// Whether backward averages gradients; without, each rank adds up its own.
  bool sync = true;
  /// Called with each parameter whose gradient has been averaged, in the middle of backward: for an optimizer's step.
  std::function<void(const ParameterOn<D>&)> on_averaged;

  /// Before a forward pass: makes new buckets where parameters were frozen or thawed, and weighs what earlier passes
  /// under no_sync have added up, so that each pass counts by its own batch.
  void prepare() {
    if (!buckets_fit()) rebuild();
    if (unit_) rescale();
  }

  /// Lays the flat buffers out anew, in this order of the entries.
  void reorder(std::span<const std::size_t> order) {
    flat_.reorder(order);
    rebuild();
    order_learned_ = true;
  }

  /// A leaf's hook: its gradient is final. Buckets leave in order, each as soon as it is full.
  void gradient_ready(const ParameterOn<D>& parameter) {
    if (!sync) {
      if (!unit_) unit_ = shares_.weight();
      return;
    }
    if (!in_backward_) {
      begin_backward();
      at_backward_end([this] { finish_backward(); });
    }
    const auto found = std::lower_bound(entry_of_.begin(), entry_of_.end(), std::pair(&parameter, std::size_t{0}));
    const std::size_t i = found->second;
    const int arrivals = ++arrivals_[i];
    arrival_.push_back(i);
    if (learning_graph()) return;
    if (bucket_of_[i] == no_bucket) {
      if (unused_for_good(i)) fail<UsageError>(where(), name(i), wrong_graph);
      return;
    }
    if (arrivals < expected_[i]) return;
    if (arrivals > expected_[i]) fail<UsageError>(where(), name(i), too_often);
    --buckets_[bucket_of_[i]].missing;
    launch_full_buckets();
    if (on_averaged && (options_.static_graph || !options_.find_unused_parameters)) step_averaged();
  }

  /// Takes part in a backward pass of other ranks, with zeros.
  void keep_company() {
    begin_backward();
    for (auto& bucket : buckets_) {
      const auto& group = flat_.groups()[bucket.group];
      zero_bytes(device(bucket), group.grad(bucket.begin), bucket.count * size_of(group.dtype));
      bucket.missing = 0;
    }
    company_ = true;
    if (!learning_graph()) launch_full_buckets();
    finish_backward();
    company_ = false;
  }

  std::vector<std::size_t> bucket_bytes() const {
    std::vector<std::size_t> sizes;
    for (const auto& bucket : buckets_) sizes.push_back(bucket.count * size_of(flat_.groups()[bucket.group].dtype));
    return sizes;
  }

 private:
  static constexpr std::size_t no_bucket = static_cast<std::size_t>(-1);
  static constexpr const char* wrong_graph =
      " got a gradient, but did not in the first backward pass: with static_graph all passes use the same parameters";
  static constexpr const char* too_often =
      " got its gradient in several parts in one backward pass (backward within backward); if it always does, set "
      "static_graph";

  ParameterOn<D>& parameter(std::size_t i) const { return flat_.entries()[i].parameter(); }
  const std::string& name(std::size_t i) const { return flat_.entries()[i].named.name; }
  D device(const GradientBucket& bucket) const { return parameter(bucket.parameters.front()).where(); }
  std::string where() const { return cat("DistributedDataParallel: rank ", communicator_.rank(), ": "); }

  static bool lists(const std::vector<std::string>& names, const std::string& wanted) {
    return std::find(names.begin(), names.end(), wanted) != names.end();
  }
  Sending sending(std::size_t i) const {
    if (!parameter(i).wants_grad() || lists(options_.parameters_and_buffers_to_ignore, name(i)) || unused_for_good(i))
      return Sending::no;
    return lists(options_.delay_all_reduce_named_params, name(i)) ? Sending::late : Sending::early;
  }
  bool learning_graph() const { return options_.static_graph && used_.empty(); }
  // Whether the first pass of a static graph has shown that no rank uses it.
  bool unused_for_good(std::size_t i) const { return !used_.empty() && used_.at(&parameter(i)) == 0; }

  // What is not sent lies behind what is: ranks may have parameters of their own there, of any size.
  void sort_in() {
    if (options_.parameters_and_buffers_to_ignore.empty() && options_.delay_all_reduce_named_params.empty()) return;
    std::vector<std::size_t> order(flat_.entries().size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return place(a) < place(b); });
    flat_.reorder(order);
  }
  int place(std::size_t i) const {
    if (lists(options_.parameters_and_buffers_to_ignore, name(i))) return 3;
    const auto when = sending(i);
    return when == Sending::early ? 0 : when == Sending::late ? 1 : 2;
  }

  void rebuild() {
    const auto count = flat_.entries().size();
    std::vector<Sending> kinds;
    for (std::size_t i = 0; i < count; ++i) kinds.push_back(sending(i));
    buckets_ = make_buckets(flat_, options_.buckets(), kinds);
    bucket_of_.assign(count, no_bucket);
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const std::size_t i : buckets_[b].parameters) bucket_of_[i] = b;
    parts_.assign(buckets_.size(), {});
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const std::size_t i : buckets_[b].parameters)
        parts_[b].push_back({flat_.entries()[i].begin - buckets_[b].begin, parameter(i).extents()});
    entry_of_.clear();
    for (std::size_t i = 0; i < count; ++i) entry_of_.push_back({&parameter(i), i});
    std::sort(entry_of_.begin(), entry_of_.end());
    arrivals_.assign(count, 0);
    expected_.assign(count, 1);
    if (!used_.empty())
      for (std::size_t i = 0; i < count; ++i) expected_[i] = own_uses_.at(&parameter(i));
    if constexpr (requires { hook_.reset(); }) hook_.reset();
  }

  // Whether no parameter was frozen or thawed since the buckets were made.
  bool buckets_fit() const {
    for (std::size_t i = 0; i < bucket_of_.size(); ++i)
      if ((sending(i) != Sending::no) != (bucket_of_[i] != no_bucket)) return false;
    return true;
  }

  // The sum over ranks of weight * (what is added up) stays the same when the weight changes to that of a new batch.
  void rescale() {
    if (std::none_of(bucket_of_.begin(), bucket_of_.end(), [&, i = std::size_t{0}](std::size_t bucket) mutable {
          return parameter(i++).grad_arrived() && bucket != no_bucket;
        })) {
      unit_.reset();
      return;
    }
    const double weight = shares_.weight();
    if (weight == 0 || weight == *unit_) return;
    const double factor = *unit_ / weight;
    for (std::size_t i = 0; i < bucket_of_.size(); ++i) {
      auto& p = parameter(i);
      if (bucket_of_[i] == no_bucket || !p.grad_arrived()) continue;
      if (factor == 0)
        zero_bytes(p.where(), p.grad_data(), p.size_bytes());
      else
        with_type(p.dtype(), static_cast<std::byte*>(p.grad_data()),
                  [&]<class T>(T* grad) { kernels::scale(p.where(), p.count(), static_cast<T>(factor), grad); });
    }
    unit_ = weight;
  }

  void begin_backward() {
    weight_ = unit_ ? *unit_ : shares_.weight();
    in_backward_ = true;
    arrival_.clear();
    next_bucket_ = next_step_ = 0;
    bad_ = no_bucket;
    std::fill(arrivals_.begin(), arrivals_.end(), 0);
    for (auto& bucket : buckets_) {
      bucket.missing = bucket.parameters.size();
      if (options_.static_graph && !learning_graph())
        for (const std::size_t i : bucket.parameters)
          if (expected_[i] == 0) {  // used by other ranks alone
            zero_unless_arrived(i);
            --bucket.missing;
          }
    }
  }
  void zero_unless_arrived(std::size_t i) {
    auto& p = parameter(i);
    // What earlier passes under no_sync left there still counts.
    if (!p.grad_arrived()) zero_bytes(p.where(), p.grad_data(), p.size_bytes());
  }

  // Calls `f(bucket as hooks see it)`.
  template <class F>
  void with_bucket(std::size_t b, const F& f) {
    const auto& bucket = buckets_[b];
    const auto& group = flat_.groups()[bucket.group];
    with_type(group.dtype, group.grad(bucket.begin), [&]<class T>(T* grads) {
      f(GradBucket<T, D>{b, device(bucket), std::span<T>(grads, bucket.count), weight_, parts_[b]});
    });
  }

  void launch_full_buckets() {
    for (; next_bucket_ < buckets_.size() && buckets_[next_bucket_].missing == 0; ++next_bucket_) {
      const auto b = next_bucket_;
      if (options_.non_finite == NonFinite::throw_error && bad_ == no_bucket && weight_ != 0) bad_ = first_bad(b);
      with_bucket(b, [&](const auto& view) { buckets_[b].work = hook_.start(view, communicator_); });
    }
  }

  // Waits for all buckets and whatever the hook sends after that.
  void complete_buckets() {
    std::vector<std::size_t> open;
    for (std::size_t b = next_step_; b < buckets_.size(); ++b) open.push_back(b);
    for (int round = 0; !open.empty(); ++round) {
      std::vector<std::size_t> again;
      for (const std::size_t b : open) {
        buckets_[b].work.wait();
        if (resume(b, round)) again.push_back(b);
      }
      open = std::move(again);
    }
  }
  bool resume(std::size_t b, int round) {
    bool more = false;
    with_bucket(b, [&](const auto& view) {
      if (auto next = hook_.resume(view, communicator_, round)) {
        buckets_[b].work = std::move(*next);
        more = true;
      }
    });
    return more;
  }

  // Steps the parameters of buckets that have come back. With one round a bucket, as the fused optimizer demands.
  void step_averaged() {
    for (; next_step_ < next_bucket_ && buckets_[next_step_].work.done(); ++next_step_) step_bucket(next_step_);
  }
  void step_bucket(std::size_t b) {
    buckets_[b].work.wait();
    for (int round = 0; resume(b, round); ++round) buckets_[b].work.wait();
    for (const std::size_t i : buckets_[b].parameters) {
      parameter(i).set_grad_arrived(true);  // in a static graph other ranks' may have
      on_averaged(parameter(i));
    }
  }

  void finish_backward() {
    if (learning_graph())
      learn_graph();
    else if (next_bucket_ < buckets_.size())
      complete_with_unused();
    if (options_.find_unused_parameters && !options_.static_graph) {
      complete_buckets();
      agree_on_unused();
      if (on_averaged)
        for (std::size_t i = 0; i < bucket_of_.size(); ++i)
          if (bucket_of_[i] != no_bucket && parameter(i).grad_arrived()) on_averaged(parameter(i));
    } else if (on_averaged) {
      for (; next_step_ < buckets_.size(); ++next_step_) step_bucket(next_step_);
    } else {
      complete_buckets();
      if (options_.static_graph)
        for (const auto& bucket : buckets_)
          for (const std::size_t i : bucket.parameters) parameter(i).set_grad_arrived(true);
    }
    if (options_.non_finite != NonFinite::propagate) judge();
    if constexpr (requires { hook_.after_backward(); }) hook_.after_backward();
    in_backward_ = false;
    unit_.reset();
    // Where parameters may be left out, ranks don't know the same order.
    if (!order_learned_ && (options_.static_graph || !options_.find_unused_parameters)) learn_order();
  }

  // Parameters without a gradient take part with zeros, or, where that was not allowed, are named.
  void complete_with_unused() {
    std::string unused;
    for (auto& bucket : buckets_)
      for (const std::size_t i : bucket.parameters) {
        if (arrivals_[i] >= expected_[i]) continue;
        unused += cat(unused.empty() ? "" : ", ", name(i));
        zero_unless_arrived(i);
      }
    if (options_.static_graph)
      fail<UsageError>(where(), "no gradient, or not all of it, came for ", unused,
                       ", but did in the first backward pass: with static_graph all passes use the same parameters");
    check<UsageError>(options_.find_unused_parameters, "DistributedDataParallel: on rank ", communicator_.rank(),
                      " no gradient came for ", unused,
                      ". If they are not always used, set find_unused_parameters; "
                      "if never, set_requires_grad(false)");
    for (auto& bucket : buckets_) bucket.missing = 0;
    launch_full_buckets();
  }

  // A parameter has a gradient where any rank used it; where none did it stays without, so that no optimizer moves it.
  void agree_on_unused() {
    std::vector<std::int32_t> used(flat_.entries().size());
    for (std::size_t i = 0; i < used.size(); ++i) used[i] = !company_ && parameter(i).grad_arrived() ? 1 : 0;
    max_over_ranks(used);
    for (std::size_t i = 0; i < used.size(); ++i)
      if (bucket_of_[i] != no_bucket) parameter(i).set_grad_arrived(used[i] != 0);
  }
  // Parameters that are not sent are each rank's own, in number, too, but lie behind the others.
  void max_over_ranks(std::vector<std::int32_t>& numbers) {
    std::size_t common = 0;
    for (std::size_t i = 0; i < numbers.size(); ++i)
      if (bucket_of_[i] != no_bucket) common = i + 1;
    communicator_.all_reduce(std::span(numbers).first(common), comm::ReduceOp::max, {});
  }

  // The first pass of a static graph shows which parameters are used, and how often. Its gradients leave now.
  void learn_graph() {
    std::vector<std::int32_t> used(arrivals_.begin(), arrivals_.end());
    max_over_ranks(used);
    for (std::size_t i = 0; i < used.size(); ++i) {
      own_uses_[&parameter(i)] = company_ ? used[i] : arrivals_[i];
      used_[&parameter(i)] = bucket_of_[i] == no_bucket ? 1 : used[i];
    }
    // The last of a parameter's several arrivals is the one that counts.
    std::vector<std::size_t> order;
    for (auto i = arrival_.rbegin(); i != arrival_.rend(); ++i)
      if (std::find(order.begin(), order.end(), *i) == order.end()) order.push_back(*i);
    std::reverse(order.begin(), order.end());
    const auto arrivals = arrivals_;
    rebuild();
    arrival_ = std::move(order);
    for (auto& bucket : buckets_)
      for (const std::size_t i : bucket.parameters)
        if (arrivals[i] == 0) zero_unless_arrived(i);
    launch_full_buckets();
  }

  // After the first backward: lays gradients out in the order in which they came on rank 0, so that buckets fill front
  // to back. The optimizer has not stepped yet, so nothing else knows the old places.
  void learn_order() {
    order_learned_ = true;
    std::vector<std::int64_t> order;
    std::vector<char> placed(flat_.entries().size());
    const auto add = [&](std::size_t i) {
      if (bucket_of_[i] == no_bucket || std::exchange(placed[i], 1)) return;
      order.push_back(static_cast<std::int64_t>(i));
    };
    for (const std::size_t i : arrival_) add(i);
    for (std::size_t i = 0; i < placed.size(); ++i) add(i);
    std::stable_partition(order.begin(), order.end(),
                          [&](std::int64_t i) { return sending(static_cast<std::size_t>(i)) == Sending::early; });
    if (communicator_.size() > 1)
      communicator_.broadcast(std::span<std::int64_t>(order), std::max(0, shares_.first_active()), {});
    std::vector<std::size_t> indices(order.begin(), order.end());
    for (std::size_t i = 0; i < placed.size(); ++i)
      if (bucket_of_[i] == no_bucket) indices.push_back(i);
    if (std::is_sorted(indices.begin(), indices.end())) return;
    flat_.reorder(indices);
    rebuild();
  }

  std::size_t first_bad(std::size_t b) const {
    for (const std::size_t i : buckets_[b].parameters) {
      const auto& p = parameter(i);
      bool bad = false;
      with_type(p.dtype(), static_cast<std::byte*>(p.grad_data()),
                [&](const auto* grad) { bad = !std::isfinite(kernels::square_sum(p.where(), p.count(), grad)); });
      if (bad) return i;
    }
    return no_bucket;
  }

  // All ranks see the same averages and come to the same verdict.
  void judge() {
    std::size_t first = no_bucket;
    for (std::size_t b = 0; b < buckets_.size() && first == no_bucket; ++b) first = first_bad(b);
    if (first == no_bucket) return;
    if (options_.non_finite == NonFinite::skip_step) {
      ++skipped_;
      for (const auto& entry : flat_.entries()) entry.parameter().set_grad_arrived(false);
      return;
    }
    const auto own = static_cast<std::int64_t>(bad_);
    std::vector<std::int64_t> bad(static_cast<std::size_t>(communicator_.size()));
    communicator_.all_gather(std::span<const std::int64_t>(&own, 1), std::span<std::int64_t>(bad), {});
    std::string from;
    for (std::size_t rank = 0; rank < bad.size(); ++rank)
      if (bad[rank] >= 0)
        from += cat(from.empty() ? "" : ", ", name(static_cast<std::size_t>(bad[rank])), " on rank ", rank);
    fail<NonFiniteError>("DistributedDataParallel: the averaged gradient of ", name(first),
                         " is not finite; it came from ", from.empty() ? "a sum that overflowed" : from);
  }

  nn::FlatParameters<D>& flat_;
  Communicator& communicator_;
  BatchShares<Communicator>& shares_;
  const DistributedDataParallelOptions& options_;
  Hook hook_;

  std::vector<GradientBucket> buckets_;
  std::vector<std::vector<GradBucketPart>> parts_;                       // of each bucket
  std::vector<std::size_t> bucket_of_;                                   // by entry of the flat parameters
  std::vector<std::pair<const ParameterOn<D>*, std::size_t>> entry_of_;  // sorted by address
  std::vector<int> expected_, arrivals_;                                 // hooks' calls in a backward pass, by entry
  std::vector<std::size_t> arrival_;                                     // entries, in the order of this backward
  std::map<const ParameterOn<D>*, int> own_uses_, used_;  // what the first pass of a static graph has shown
  std::size_t next_bucket_ = 0, next_step_ = 0;
  std::size_t bad_ = no_bucket;  // the first parameter whose gradient by this rank is not finite
  double weight_ = 1;
  // The weight by which accumulated gradients of earlier passes are to be multiplied.
  std::optional<double> unit_;
  std::int64_t skipped_ = 0;
  bool in_backward_ = false, order_learned_ = false, company_ = false;
};

}  // namespace chorus::inline CHORUS_ABI::detail
