#pragma once
/// Loops over batches of which ranks have different numbers.

#include <array>
#include <chorus/core/config.hpp>
#include <chorus/parallel/join_options.hpp>
#include <cstddef>
#include <functional>
#include <span>
#include <type_traits>

namespace chorus {

/// What has come of taking part in a pass of others: there was none, for all have ended; a pass whose gradients were
/// not averaged; one whose gradients were.
enum class JoinedPass { none, passed, averaged };

namespace detail {

/// What a net is told of the join that begins.
struct JoinFacts {
  bool throw_early;  ///< JoinOptions::throw_on_early_termination
  bool steps;        ///< whether ranks that have ended do something after this net's averaged passes
};

/// What a policy of several processes has for `join`.
class JoiningPolicy {
 public:
  virtual void begin_join(const JoinFacts&) = 0;
  /// This rank has run out of batches.
  virtual void run_out_of_batches() {}
  /// Takes part in the collectives of a pass of others.
  virtual JoinedPass take_part_in_pass() = 0;
  virtual void all_have_run_out() = 0;
  virtual void end_join() = 0;

 protected:
  ~JoiningPolicy() = default;
};

/// An argument of `join`: a net, or a function.
struct Joined {
  JoiningPolicy* net = nullptr;
  std::function<void()> function = {};  // neither of the two: a net of one process, for which there is nothing to do

  template <class X>
  static Joined of(X& x) {
    if constexpr (std::is_base_of_v<JoiningPolicy, X>)
      return {.net = &x};
    else if constexpr (requires { typename X::policy_type; })
      return {};
    else
      return {.function = std::ref(x)};
  }
};

/// A join under way: nets that have begun it end it.
class JoinScope {
 public:
  JoinScope(std::span<const Joined> all, const JoinOptions& options) : all_(all), options_(options) {}
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;
  ~JoinScope() {
    for (const Joined& one : all_.first(begun_))
      if (one.net != nullptr) one.net->end_join();
  }

  void begin() {
    for (; begun_ < all_.size(); ++begun_) {
      const bool before_function = begun_ + 1 < all_.size() && all_[begun_ + 1].function;
      if (auto* const net = all_[begun_].net)
        net->begin_join({options_.throw_on_early_termination, options_.step || before_function});
    }
  }
  /// What a rank does that has run out of batches, until all have.
  void take_part_in_passes() const {
    for_nets(&JoiningPolicy::run_out_of_batches);
    for (bool any = true; any;) {
      any = false;
      bool averaged = false;
      JoinedPass pass = JoinedPass::none;  // of the net in front
      for (const Joined& one : all_) {
        if (one.function) {
          if (pass == JoinedPass::averaged) one.function();
          continue;
        }
        pass = one.net != nullptr ? one.net->take_part_in_pass() : JoinedPass::none;
        any = any || pass != JoinedPass::none;
        averaged = averaged || pass == JoinedPass::averaged;
      }
      if (averaged && options_.step) options_.step();
    }
    for_nets(&JoiningPolicy::all_have_run_out);
  }

 private:
  void for_nets(void (JoiningPolicy::*call)()) const {
    for (const Joined& one : all_)
      if (one.net != nullptr) (one.net->*call)();
  }

  std::span<const Joined> all_;
  const JoinOptions& options_;
  std::size_t begun_ = 0;
};

}  // namespace detail

/// Runs `body`, a loop over batches of which ranks may have different numbers. A rank that has ended takes part in the
/// others' collectives, with no samples, until all have. In each iteration `body` makes a forward and a backward pass
/// through each of the nets among `joined`, one after the other in this order, and no other collective calls but those
/// of the functions among `joined`, such as the steps of sharded optimizers, each after the net in front of it:
///
///   ch::join(loop, {}, net, [&] { optimizer.step(); }, other_net, [&] { other_optimizer.step(); });
///
/// Only ranks that have ended call these functions, and `options.step` at the iteration's end. Nets of one process may
/// be among them, too: for them there is nothing to do. Gradients that are left after it are each rank's own: the next
/// loop begins with `zero_grad`.
template <class Body, class... Joined>
void join(const Body& body, const JoinOptions& options, Joined&&... joined) {
  const std::array<detail::Joined, sizeof...(Joined)> all{detail::Joined::of(joined)...};
  detail::JoinScope scope(all, options);
  scope.begin();
  body();
  scope.take_part_in_passes();
}

}  // namespace chorus
