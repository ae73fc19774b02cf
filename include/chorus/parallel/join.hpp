#pragma once
/// Loops over batches with different numbers of batches on the ranks.

#include <array>
#include <chorus/core/config.hpp>
#include <chorus/parallel/join_options.hpp>
#include <cstddef>
#include <functional>
#include <span>
#include <type_traits>

namespace chorus {

/// The result of taking part in a pass of other ranks: none, as all ranks have ended; a pass without averaging; a pass
/// that averaged gradients.
enum class JoinedPass { none, passed, averaged };

namespace detail {

/// Facts about the join that begins, for a net.
struct JoinFacts {
  bool throw_early;  ///< JoinOptions::throw_on_early_termination
  bool steps;        ///< whether ended ranks make a step after this net's averaged passes
};

/// A policy's functions for `join`.
class JoiningPolicy {
 public:
  virtual void begin_join(const JoinFacts&) = 0;
  /// This rank has run out of batches.
  virtual void run_out_of_batches() {}
  /// Shadows a pass of other ranks: takes part in its collectives.
  virtual JoinedPass take_part_in_pass() = 0;
  /// All ranks have run out of batches.
  virtual void all_have_run_out() = 0;
  virtual void end_join() = 0;

 protected:
  ~JoiningPolicy() = default;
};

/// An argument of `join`: a net, or a function.
struct Joined {
  JoiningPolicy* net = nullptr;
  std::function<void()> function = {};  // neither: a net of one process, with nothing to do

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

/// A running join: ends the join of the nets that have begun it.
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
  /// The loop of a rank that has run out of batches, until all ranks have.
  void shadow_all() const {
    for_nets(&JoiningPolicy::run_out_of_batches);
    for (bool any = true; any;) {
      any = false;
      bool averaged = false;
      JoinedPass pass = JoinedPass::none;  // of the preceding net
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

/// Runs `body`, a loop over batches whose number may differ between ranks. A rank that has ended takes part in the
/// others' collectives, without samples, until all have ended. In each iteration `body` makes a forward and a backward
/// pass through each net in `joined`, in this order. It makes no other collective calls except those of the functions
/// in `joined`, such as steps of sharded optimizers, each after the preceding net:
///
///   ch::join(loop, {}, net, [&] { optimizer.step(); }, other_net, [&] { other_optimizer.step(); });
///
/// Only ranks that have ended call these functions, and `options.step` at the iteration's end. Nets of one process are
/// allowed and ignored. Gradients that remain afterwards are not averaged: begin the next loop with `zero_grad`.
template <class Body, class... Joined>
void join(const Body& body, const JoinOptions& options, Joined&&... joined) {
  const std::array<detail::Joined, sizeof...(Joined)> all{detail::Joined::of(joined)...};
  detail::JoinScope scope(all, options);
  scope.begin();
  body();
  scope.shadow_all();
}

}  // namespace chorus
