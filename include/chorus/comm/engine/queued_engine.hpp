#pragma once
/// `QueuedEngine`: an engine that runs its calls one after another, blocking ones in the caller's thread, asynchronous
/// ones in a thread of its own.

#include <unistd.h>

#include <chorus/comm/engine/abort_reason.hpp>
#include <chorus/comm/engine/engine.hpp>
#include <chorus/comm/engine/in_order.hpp>
#include <memory>
#include <vector>

namespace chorus::comm {

/// `Runner` has `Failure run(const Call&, const std::atomic<bool>& caller_waits)`, called by one thread at a time, and
/// `void abort(std::string_view) noexcept`, called from any, after which the run that goes on and all later ones fail
/// soon; and `record() const` and `busy() const`, see Engine. The first failure is the runner's to keep: it fails again
/// in every later call.
template <class Runner>
class QueuedEngine final : public Engine {
 public:
  template <class... Arguments>
  QueuedEngine(int me, int ranks, const std::vector<int>& names, std::string_view what, Arguments&&... arguments)
      : Engine(me, ranks, names),
        name_(what),
        runner_(std::forward<Arguments>(arguments)...),
        calls_(std::make_shared<InOrder<Call>>(&run, &runner_)) {}
  ~QueuedEngine() override {
    if (getpid() == process_)
      calls_->stop();
    else
      new auto(calls_);  // a forked child has no such thread, and waits for ever for one
  }

  void now(const Call& call) override { calls_->now(call); }
  Work later(const Call& call) override { return {calls_, calls_->later(call)}; }
  void abort(std::string_view why) noexcept override { runner_.abort(why); }
  std::string_view name() const override { return name_; }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    if constexpr (requires { runner_.allocate(bytes); }) return runner_.allocate(bytes);
    return nullptr;
  }
  std::chrono::nanoseconds busy() const override { return runner_.busy(); }
  std::string record() const override { return runner_.record(); }
  Algorithm all_reduce() const override {
    if constexpr (requires { runner_.all_reduce(); }) return runner_.all_reduce();
    return Algorithm::automatic;
  }
  std::string trouble() override {
    if constexpr (requires { runner_.trouble(); }) return calls_->when_idle([this] { return runner_.trouble(); });
    return {};
  }

 private:
  static Failure run(void* runner, const Call& call, const std::atomic<bool>& caller_waits) {
    return static_cast<Runner*>(runner)->run(call, caller_waits);
  }

  const int process_ = getpid();
  std::string_view name_;
  Runner runner_;
  std::shared_ptr<InOrder<Call>> calls_;  // Works share it
};

}  // namespace chorus::comm
