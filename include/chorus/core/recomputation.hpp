#pragma once
/// The findings of layers in a part of a forward pass that runs again, as activation checkpointing does in backward.
/// The second time they use the first findings, and leave the values unchanged that they change in a pass.

#include <chorus/core/config.hpp>
#include <chorus/core/replaced.hpp>
#include <map>
#include <utility>

namespace chorus {

/// The findings of one such part.
class FirstRun {
 public:
  /// The finding of layer `of` about `what` in the first run of the part; in that run `now`, which is remembered. If
  /// the part itself changes the value on the way, it is the present value each time.
  bool found(const void* of, int what, bool now);
  /// Whether the part, or an enclosing one, runs again.
  bool repeats() const { return repeats_ || (around_ != nullptr && around_->repeats()); }

  /// A run begins. `around`: the enclosing part, while that runs first.
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

/// Whether backward computes this part of a forward pass again. A layer that changes a buffer in each training pass,
/// such as batch norm, then leaves it unchanged: the pass was counted the first time.
inline bool is_recomputed() { return detail::first_run != nullptr && detail::first_run->repeats(); }

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/core/recomputation_impl.hpp>
#endif
