#pragma once
/// The reducer: sees each gradient of a backward pass as it becomes final, and has full buckets averaged over all ranks
/// while backward goes on.

#include <algorithm>
#include <chorus/parallel/ddp/accumulated_weight.hpp>
#include <chorus/parallel/ddp/backward_turn.hpp>
#include <chorus/parallel/ddp/batch_shares.hpp>
#include <chorus/parallel/ddp/bucket_sender.hpp>
#include <chorus/parallel/ddp/ddp_options.hpp>
#include <chorus/parallel/ddp/ddp_times.hpp>
#include <chorus/parallel/ddp/gradient_agreement.hpp>
#include <chorus/parallel/ddp/gradient_arrivals.hpp>
#include <chorus/parallel/ddp/gradient_layout.hpp>
#include <chorus/parallel/ddp/gradient_parts.hpp>
#include <chorus/parallel/ddp/gradients_aside.hpp>
#include <chorus/parallel/ddp/hook_memory.hpp>
#include <chorus/parallel/ddp/non_finite.hpp>
#include <chorus/parallel/ddp/same_model.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::detail {

template <Device D, class Hook, class Communicator>
class Reducer {
 public:
  static constexpr bool in_parts = BucketSender<D, Hook, Communicator>::in_parts;

  /// `alive` is empty once the net is gone: the model's parameters, and the tape, may live longer.
  Reducer(nn::FlatParameters<D>& flat, Communicator& communicator, BatchShares<Communicator>& shares,
          const DistributedDataParallelOptions& options, Hook hook, std::weak_ptr<void> alive)
      : layout_(flat, options),
        communicator_(communicator),
        shares_(shares),
        options_(options),
        alive_(std::move(alive)),
        sender_(layout_, communicator, options, std::move(hook)),
        memory_(sender_),
        parts_(layout_),
        accumulated_(layout_, shares),
        arrivals_(layout_, communicator.rank()) {
    check<UsageError>(!layout_.buckets().empty(), "DistributedDataParallel: no parameter of the model wants a gradient",
                      options_.parameters_and_buffers_to_ignore.empty() ? "" : " that ranks share");
    check<UsageError>(
        !in_parts || !options_.skip_all_reduce_unused_params,
        "DistributedDataParallel: skip_all_reduce_unused_params makes buckets anew behind a backward pass, "
        "and this hook leaves each rank a part of each bucket");
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  Hook& hook() { return sender_.hook(); }
  /// What the hook remembers.
  HookMemory<D, Hook, Communicator>& memory() { return memory_; }
  const GradientLayout<D>& layout() const { return layout_; }
  /// What a hook that averages in parts has left.
  GradientParts<D>& parts() { return parts_; }
  bool in_backward() const { return in_backward_; }
  std::int64_t skipped_steps() const { return skipped_; }
  DdpClock& clock() { return sender_.clock(); }
  const DdpClock& clock() const { return sender_.clock(); }
  /// Whether backward averages gradients; without, each rank adds up its own.
  bool sync = true;
  /// Whether operators of the model have collectives in backward.
  bool operators_send = false;
  /// Called with each parameter whose gradient has been averaged, in the middle of backward: for an optimizer's step.
  std::function<void(const ParameterOn<D>&)> on_averaged;

  /// Before a forward pass: makes new buckets where parameters were frozen or thawed. Returns whether they were.
  bool fit_buckets() {
    if (layout_.buckets_fit()) return false;
    parts_.refuse_if_waiting("parameters can't be frozen or thawed");
    start_anew([&] { layout_.rebuild(); });
    return true;
  }
  /// Behind it, when ranks have told each other their samples: weighs what earlier passes under no_sync have added up,
  /// so that each pass counts by its own batch.
  void weigh_anew() {
    if (hook_averages()) accumulated_.weigh_anew();
  }

  /// Lays the flat buffers out anew, in this order of the entries. `learned`: as a backward pass has shown it.
  void reorder(std::span<const std::size_t> order, bool learned) {
    start_anew([&] { layout_.reorder(order); });
    order_learned_ = learned;
  }
  /// Leaves the gradients of these parameters out until a rank has them again, where that may be.
  void rest(std::span<const std::string> names) {
    if (!options_.skip_all_reduce_unused_params) return;
    std::vector<char> resting(layout_.entries());
    for (std::size_t i = 0; i < resting.size(); ++i)
      resting[i] = std::find(names.begin(), names.end(), name(i)) != names.end();
    if (!layout_.are_resting(resting)) start_anew([&] { layout_.set_resting(std::move(resting)); });
  }

  /// A leaf's hook: its gradient is final. Buckets leave in order, each as soon as it is full.
  void gradient_ready(const ParameterOn<D>& parameter) {
    if (accumulated_.adds_nothing()) [[unlikely]]
      accumulated_.arrived(layout_.index_of(parameter));
    if (!sync) {
      parts_.refuse_if_waiting("no other backward pass can begin");
      if (hook_averages()) accumulated_.note();
      return;
    }
    if (!in_backward_) {
      begin_backward();
      at_backward_end([this, alive = alive_] {
        if (!alive.expired()) finish_backward();
      });
    }
    clock().gradient(&parameter);
    const std::size_t i = layout_.index_of(parameter);
    arrivals_.add(i);
    if (!may_leave_out()) this->parameter(i).set_grad_arrived(true);
    if (learning_graph() || !arrivals_.completes(i) || turn_.waits()) return;
    sender_.send_full();
    if (on_averaged && !may_leave_out() && !sender_.several_rounds)
      while (sender_.next_is_back()) step_next_bucket();
  }

  /// Takes part in a backward pass of other ranks, with what this one has added up under no_sync, else with zeros.
  [[gnu::cold]] void keep_company() {
    const bool brings_nothing = !accumulated_.any();
    if (!brings_nothing) own_.take_none(layout_.flat());  // it is sent now
    clock().keeps_company();
    begin_backward();
    for (std::size_t i = 0; i < layout_.entries(); ++i) {
      if (brings_nothing) parameter(i).set_grad_arrived(false);
      if (!layout_.is_sent(i)) continue;
      arrivals_.zero_unless_arrived(i);
      // An optimizer that steps behind this pass sees the averages.
      if (!may_leave_out()) parameter(i).set_grad_arrived(true);
    }
    const struct Scope {
      Company& company;
      ~Scope() { company = Company::none; }
    } scope{company_};
    company_ = brings_nothing ? Company::idle : Company::with_gradients;
    if (!learning_graph()) sender_.send_all();
    finish_backward();
  }
  /// Around such passes: behind them this rank has the gradients that it had before.
  [[gnu::cold]] void begin_company() { own_.take(layout_.flat()); }
  [[gnu::cold]] void end_company() {
    own_.give_back();
    own_.forget();
  }

 private:
  [[gnu::cold]] std::string where() const { return cat("DistributedDataParallel: rank ", communicator_.rank(), ": "); }

  bool hook_averages() {
    if constexpr (requires { hook().averages(); }) return hook().averages();
    return true;
  }
  ParameterOn<D>& parameter(std::size_t i) const { return layout_.parameter(i); }
  const std::string& name(std::size_t i) const { return layout_.name(i); }
  bool learning_graph() const { return options_.static_graph && !layout_.knows_uses(); }
  /// Whether any parameter may be left out of a backward pass, in another way on each rank.
  bool may_leave_out() const { return options_.find_unused_parameters && !options_.static_graph; }

  // With the buckets that `change()` makes.
  template <class Change>
  [[gnu::cold]] void start_anew(const Change& change) {
    memory_.carry_over(change);
    arrivals_.reset();
  }

  Averaging averaging() const {
    if (!in_parts) return Averaging::by_hook;
    // Behind the first pass gradients change their places.
    if (!order_learned_ && !may_leave_out()) return Averaging::whole;
    // A policy for numbers that are not finite judges averages, behind this pass.
    const bool judged = options_.non_finite != NonFinite::propagate;
    return !judged && parts_.all_reached() ? Averaging::by_optimizer : Averaging::by_hook;
  }
  void begin_backward() {
    parts_.refuse_if_waiting("no other backward pass can begin");
    if (shares_.take_changed()) check_same_description(communicator_, "DistributedDataParallel", layout_.describe());
    sender_.begin(accumulated_.weight(), averaging());
    turn_.begin(&communicator_, options_.find_unused_parameters || options_.static_graph, operators_send);
    in_backward_ = true;
    arrivals_.begin();
  }

  // An optimizer steps the parameters of the next bucket, which is waited for.
  void step_next_bucket() {
    for (const std::size_t i : sender_.take_back_next().parameters) {
      parameter(i).set_grad_arrived(true);  // in a static graph other ranks' may have
      on_averaged(parameter(i));
    }
  }
  // Parameters that are each rank's own have their gradients, too.
  void step_own() {
    for (std::size_t i = 0; i < layout_.entries(); ++i)
      if (!layout_.is_shared(i) && parameter(i).wants_grad() && parameter(i).grad_arrived()) on_averaged(parameter(i));
  }

  void finish_backward() {
    clock().last_gradient();
    if (turn_.waits() && !learning_graph()) sender_.send_full();
    if (learning_graph())
      learn_graph();
    else if (!sender_.all_sent())
      complete_with_unused();
    if (may_leave_out()) {
      sender_.take_back_all();
      settle_used();
      for (std::size_t i = 0; on_averaged && i < layout_.entries(); ++i)
        if (layout_.is_sent(i) && parameter(i).grad_arrived()) on_averaged(parameter(i));
    } else if (on_averaged) {
      while (!sender_.all_back()) step_next_bucket();
    } else {
      sender_.take_back_all();
      if (options_.static_graph)
        for (const auto& bucket : layout_.buckets())
          for (const std::size_t i : bucket.parameters) parameter(i).set_grad_arrived(true);
    }
    sender_.end();
    turn_.end();
    if (on_averaged) step_own();
    if (options_.non_finite != NonFinite::propagate) judge();
    if constexpr (requires { hook().after_backward(); }) hook().after_backward();
    in_backward_ = false;
    accumulated_.forget();
    // Where parameters may be left out, ranks don't know the same order.
    if (!order_learned_ && !may_leave_out()) learn_order();
    if (in_parts) parts_.hide(sender_.averaging() == Averaging::by_optimizer, sender_.weight());
  }

  // A parameter has a gradient where any rank used it; where none did it stays without, so that no optimizer moves it.
  [[gnu::cold]] void settle_used() {
    const auto used = agree_on_used(layout_, communicator_, company_ == Company::idle);
    if (options_.skip_all_reduce_unused_params) rest_unused(used.anywhere);
    for (std::size_t i = 0; i < layout_.entries(); ++i)
      if (layout_.is_shared(i)) parameter(i).set_grad_arrived(used.anywhere[i] != 0);
    unused_watch_.saw(used.all, communicator_.rank());
  }
  // Gradients that rested, and have come on some rank after all, are averaged now; what has come on none will rest.
  [[gnu::cold]] void rest_unused(const std::vector<char>& used) {
    std::vector<char> others(used.size(), 1), unused(used.size());
    bool any = false;
    for (std::size_t i = 0; i < used.size(); ++i) {
      unused[i] = layout_.is_shared(i) && used[i] == 0;
      if (!layout_.rests(i) || used[i] == 0) continue;
      others[i] = 0;
      any = true;
      arrivals_.zero_unless_arrived(i);
    }
    if (any) {
      start_anew([&] { layout_.set_resting(std::move(others)); });
      sender_.begin_again();
      sender_.send_all();
      sender_.take_back_all();
    }
    if (!layout_.are_resting(unused)) start_anew([&] { layout_.set_resting(std::move(unused)); });
  }

  // Parameters without a gradient take part with zeros, or, where that was not allowed, are named.
  [[gnu::cold]] void complete_with_unused() {
    const auto unused = arrivals_.lacking();
    if (options_.static_graph)
      fail<UsageError>(where(), "no gradient, or not all of it, came for ", unused,
                       ", but did in the first backward pass: with static_graph all passes use the same parameters");
    check<UsageError>(options_.find_unused_parameters, "DistributedDataParallel: on rank ", communicator_.rank(),
                      " no gradient came for ", unused,
                      ". If they are not always used, set find_unused_parameters; "
                      "if never, set_requires_grad(false)");
    sender_.send_all();
  }

  // The first pass of a static graph shows which parameters are used, and how often. Its gradients leave now.
  [[gnu::cold]] void learn_graph() {
    auto uses = agree_on_uses(layout_, communicator_, arrivals_.counts(), company_ != Company::none);
    start_anew([&] {
      layout_.set_uses(std::move(uses));
      arrivals_.settle();
    });
    for (std::size_t i = 0; i < layout_.entries(); ++i) {
      if (!layout_.unused_for_good(i)) continue;
      memory_.forget(name(i));
      if (company_ == Company::idle) parameter(i).set_grad_arrived(false);  // its zeros were for others that use it
    }
    sender_.send_all();
  }

  // After the first backward: lays gradients out in the order in which they came on rank 0, so that buckets fill front
  // to back. The optimizer has not stepped yet, so nothing else knows the old places.
  [[gnu::cold]] void learn_order() {
    order_learned_ = true;
    const auto order = agree_on_order(layout_, communicator_, arrivals_.order(), std::max(0, shares_.first_active()));
    if (!std::is_sorted(order.begin(), order.end())) reorder(order, true);
  }

  // All ranks come to the same verdict.
  [[gnu::cold]] void judge() {
    std::uint64_t first = first_not_finite(layout_);
    // Of averages in parts a rank sees its own, and what it brought to the others'.
    if (in_parts || requires { Hook::own_gradients; })
      communicator_.all_reduce(std::span(&first, 1), comm::ReduceOp::min, {});
    if (first == layout_.no_bucket) return;
    in_backward_ = false;  // nothing is under way
    if (options_.non_finite == NonFinite::throw_error)
      raise_not_finite(layout_, communicator_, first, sender_.first_bad());
    ++skipped_;
    for (std::size_t i = 0; i < layout_.entries(); ++i) parameter(i).set_grad_arrived(false);
  }

  GradientLayout<D> layout_;
  Communicator& communicator_;
  BatchShares<Communicator>& shares_;
  const DistributedDataParallelOptions& options_;
  const std::weak_ptr<void> alive_;
  BucketSender<D, Hook, Communicator> sender_;
  HookMemory<D, Hook, Communicator> memory_;
  GradientParts<D> parts_;
  AccumulatedWeight<D, Communicator> accumulated_;
  GradientArrivals<D> arrivals_;
  GradientsAside<D> own_;  // while this rank only keeps others company
  BackwardTurn turn_;

  std::int64_t skipped_ = 0;
  UnusedWatch unused_watch_;
  bool in_backward_ = false, order_learned_ = false;
  // Whether this rank only keeps others company in this pass, and if so, whether it brings what it has added up.
  enum class Company { none, idle, with_gradients } company_ = Company::none;
};

}  // namespace chorus::detail
