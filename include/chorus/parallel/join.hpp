#pragma once
/// Loops over batches of which ranks have different numbers.

#include <array>
#include <chorus/core/config.hpp>
#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus {

struct JoinOptions {
  /// All ranks throw as soon as one has run out of batches, instead of going on without it. For models whose forward or
  /// backward has collectives of its own, which the ranks that have ended don't know of (SyncBatchNorm).
  bool throw_on_early_termination = false;
  /// What `body` does after each averaged backward pass: as a rule clipping, and `optimizer.step()`. Ranks that have
  /// ended do it, too, with the same averages, so that the optimizer's state stays the same on all ranks; a
  /// ShardedOptimizer needs that, and so does a ParameterServer, whose rank 0 steps for all. Without, parameters and
  /// buffers are the same afterwards, but momenta are not. Under a GradScaler it is `scaler.step(optimizer)`.
  std::function<void()> step = {};
};

/// What has come of taking part in a pass of others: there was none, for all have ended; a pass whose gradients were
/// not averaged; one whose gradients were.
enum class JoinedPass { none, passed, averaged };

namespace detail {

/// What a net is told of the join that begins.
struct JoinFacts {
  bool throw_early;  ///< JoinOptions::throw_on_early_termination
  bool steps;        ///< whether ranks that have ended do something after this net's averaged passes
};

/// What a policy has for `join`, and users don't call: `begin_join` and `end_join` are around all of it;
/// `run_out_of_batches` when this rank has run out of batches; `take_part_in_pass` takes part in the collectives of a
/// pass of others; `all_have_run_out` when all have ended. See parallel/access.hpp.
template <class Net>
class Access;

/// A net that takes part in `join`; what else is among the joined is a function.
template <class Net>
concept JoinedNet = requires {
  typename Net::policy_type;
};
template <JoinedNet Net>
using AccessTo = Access<typename Net::policy_type>;
template <JoinedNet Net>
AccessTo<Net> access_to(Net& net) {
  return AccessTo<Net>(net);
}

template <class Joined>
class JoinScope {
 public:
  JoinScope(const Joined&, const JoinFacts&) {}
};
template <JoinedNet Net>
class JoinScope<Net> {
 public:
  JoinScope(Net& net, const JoinFacts& facts) : net_(&net) { access_to(net).begin_join(facts); }
  JoinScope(JoinScope&& other) noexcept : net_(std::exchange(other.net_, nullptr)) {}
  ~JoinScope() {
    if (net_ != nullptr) access_to(*net_).end_join();
  }

 private:
  Net* net_;
};

/// Whether a function follows each of `Joined`.
template <class... Joined>
constexpr std::array<bool, sizeof...(Joined)> before_function() {
  const std::array<bool, sizeof...(Joined)> is_net{JoinedNet<Joined>...};
  std::array<bool, sizeof...(Joined)> out{};
  for (std::size_t i = 0; i + 1 < out.size(); ++i) out[i] = !is_net[i + 1];
  return out;
}

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
  constexpr auto before_function = detail::before_function<std::remove_reference_t<Joined>...>();
  std::size_t at = 0;
  const auto next = [&] {
    return detail::JoinFacts{options.throw_on_early_termination, options.step || before_function[at++]};
  };
  const std::tuple<detail::JoinScope<std::remove_reference_t<Joined>>...> scopes{
      detail::JoinScope<std::remove_reference_t<Joined>>(joined, next())...};
  body();
  const auto for_nets = [&](const auto& f) {
    const auto one = [&](auto& some) {
      if constexpr (detail::JoinedNet<std::remove_reference_t<decltype(some)>>) f(detail::access_to(some));
    };
    (one(joined), ...);
  };
  for_nets([](auto net) { net.run_out_of_batches(); });
  for (bool any = true; any;) {
    any = false;
    bool averaged = false;
    JoinedPass pass = JoinedPass::none;
    const auto take_part_in_pass = [&](auto& some) {
      if constexpr (detail::JoinedNet<std::remove_reference_t<decltype(some)>>) {
        pass = detail::access_to(some).take_part_in_pass();
        any = any || pass != JoinedPass::none;
        averaged = averaged || pass == JoinedPass::averaged;
      } else if (pass == JoinedPass::averaged) {
        some();
      }
    };
    (take_part_in_pass(joined), ...);
    if (averaged && options.step) options.step();
  }
  for_nets([](auto net) { net.all_have_run_out(); });
}

}  // namespace chorus
