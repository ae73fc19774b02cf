#pragma once
/// What layers found in a part of a forward pass that is run again, as activation checkpointing does in backward: the
/// second time they go by the same, and leave alone what they change in a pass.

#include <chorus/core/config.hpp>
#include <chorus/core/replaced.hpp>
#include <map>
#include <utility>

namespace chorus {

/// The findings of one such part.
class FirstRun {
 public:
  /// What layer `of` found about `what` when the part ran first; in that run `now`, which is remembered. Where the part
  /// itself changes it on the way it is what it is now, each time.
  bool found(const void* of, int what, bool now);
  /// Whether the part, or one that it is a part of, runs again.
  bool repeats() const { return repeats_ || (around_ != nullptr && around_->repeats()); }

  /// A run begins. `around`: the part that this one is a part of, while it runs first.
  void begin(FirstRun* around, bool again) {
    around_ = around;
    repeats_ = again;
  }

 private:
  struct Finding {
    bool value, changes;
  };
  std::map<std::pair<const void*, int>, Finding> findings_;
  FirstRun* around_ = nullptr;
  bool repeats_ = false;
};

namespace detail {
inline thread_local constinit FirstRun* first_run = nullptr;

/// While it lives, layers of this thread are in that part.
struct FirstRunScope : Replaced<FirstRun*> {
  explicit FirstRunScope(FirstRun& run) : Replaced(first_run, &run) {}
};
}  // namespace detail

/// Whether backward computes this part of a forward pass again. A layer that changes a buffer in each pass in training,
/// as batch norm does, leaves it alone then: the pass was counted the first time.
inline bool is_recomputed() { return detail::first_run != nullptr && detail::first_run->repeats(); }

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/core/recomputation_impl.hpp>
#endif
