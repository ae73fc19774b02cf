#pragma once
/// Runs a device's canonical shares through the model side by side: for layers that need the whole batch.

#include <chorus/core/batch_group.hpp>
#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/threads.hpp>
#include <chorus/parallel/dp/device_threads.hpp>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace chorus::same_bits {

/// Each share has a thread, and only one runs at a time: a share runs until it ends or waits for the others in `meet`;
/// then the next one runs. The first is the calling thread. So shares reach any point of the program in order.
class ShareTurns {
 public:
  /// A share's task; `enter` and `leave` are called around each of its turns.
  struct Work {
    std::function<void(std::size_t)> task, enter, leave;
  };

  explicit ShareTurns(std::size_t shares) : threads_(shares) {}

  /// Rethrows a task's exception; of several, the one that caused the others.
  void run(std::size_t shares, Work work);

  /// In share `i`'s task: waits until all shares have arrived; then `complete()` is called in the first one's thread.
  /// Throws UsageError if a share ends without arriving.
  template <class Complete>
  void meet(std::size_t i, const Complete& complete) {
    check<UsageError>(i < ended_.size() && turn_ == i,
                      "canonical shares: a layer over the whole batch runs backward outside of the shares: call "
                      "backward on the policy's output");
    const std::size_t round = round_;
    ++arrived_;
    leave(i);
    pass_on(i);
    await_turn(i);
    if (i == 0 && arrived_ == ended_.size()) {
      complete();
      arrived_ = 0;
      ++round_;
    }
    check<UsageError>(round_ != round && !first_error_, detail::different_layers);
  }

 private:
  void take_turns(std::size_t i);
  // Only the share whose turn it is writes members.
  void await_turn(std::size_t i);
  void leave(std::size_t i);
  void pass_on(std::size_t i);

  dp::DeviceThreads threads_;
  Work work_;
  std::mutex mutex_;
  std::condition_variable change_;
  std::size_t turn_ = 0;
  std::vector<char> ended_;
  std::size_t arrived_ = 0, round_ = 0;
  std::exception_ptr first_error_;
  std::unique_ptr<detail::ThreadTeam> team_;  // the kernels' threads, saved between turns
};

}  // namespace chorus::same_bits

#if !CHORUS_COMPILED
#include <chorus/same_bits/share_turns_impl.hpp>
#endif
