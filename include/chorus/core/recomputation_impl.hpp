#pragma once
/// Stores a part's first run.

#include <chorus/core/recomputation.hpp>

namespace chorus {

CHORUS_INLINE bool FirstRun::found(const void* of, int what, bool now) {
  const auto known = findings_.find({of, what});
  if (repeats_) return known != findings_.end() && !known->second.changes ? known->second.value : now;
  const bool value = around_ != nullptr ? around_->found(of, what, now) : now;
  const auto& kept = findings_.try_emplace({of, what}, Finding{value, false}).first->second;
  if (kept.value != value) findings_[{of, what}].changes = true;
  return value;
}

}  // namespace chorus
