#pragma once
/// Decisions of layers in a part of a forward pass that may run again, as with activation checkpointing. The second run
/// reuses the first run's decisions and does not update buffers again.

#include <chorus/core/config.hpp>
#include <chorus/core/replaced.hpp>
#include <map>
#include <utility>

namespace chorus {

/// The decisions of one such part.
class FirstRun {
 public:
  /// Layer `of`'s decision `what`: `now` in the first run, which is stored; later the stored value. If the part itself
  /// changes the value, the current value is used each time.
  bool found(const void* of, int what, bool now);
  /// Whether the part, or an enclosing one, is running again.
  bool repeats() const { return repeats_ || (around_ != nullptr && around_->repeats()); }

  /// Starts a run. `around`: the enclosing part, if that is in its first run.
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

/// While it lives, this thread's layers belong to that part.
struct FirstRunScope : Replaced<FirstRun*> {
  explicit FirstRunScope(FirstRun& run) : Replaced(first_run, &run) {}
};
}  // namespace detail

/// Whether backward is recomputing this part of a forward pass. A layer that updates a buffer in each training pass,
/// such as batch norm, must not update it again.
inline bool is_recomputed() { return detail::first_run != nullptr && detail::first_run->repeats(); }

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/core/recomputation_impl.hpp>
#endif
