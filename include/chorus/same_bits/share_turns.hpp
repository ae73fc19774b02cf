#pragma once
/// Canonical shares of one device that go through the model side by side: for layers that look at the whole batch.

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

/// Each share has a thread, and one of them runs at a time: a share goes on until it ends or waits for the others in
/// `meet`; then the next one does. The first is the calling thread. So shares come to any place in their order.
class ShareTurns {
 public:
  /// What is done for a share; `enter` and `leave` it around each of its turns.
  struct Work {
    std::function<void(std::size_t)> task, enter, leave;
  };

  explicit ShareTurns(std::size_t shares) : threads_(shares) {}

  /// Throws what a task has thrown, of several the one because of which others have.
  void run(std::size_t shares, Work work);

  /// In share `i`'s task: waits until all have come here; `complete()` is called in the first one's thread. Throws
  /// UsageError where one ends without.
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
  // All is written by the share whose turn it is.
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
  std::unique_ptr<detail::ThreadTeam> team_;  // that the kernels use, between turns
};

}  // namespace chorus::same_bits

#if !CHORUS_COMPILED
#include <chorus/same_bits/share_turns_impl.hpp>
#endif
