#pragma once
/// Detects parameters that a model does not list.

#include <algorithm>
#include <chorus/core/say.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <chorus/parallel/unlisted_parameters.hpp>
#include <functional>
#include <span>

namespace chorus::detail {

CHORUS_INLINE void UnlistedParameters::saw(const void* parameter, Node&, std::span<const Index> extents,
                                           bool wants_grad) {
  if (!wants_grad) return;
  if (std::binary_search(listed_.begin(), listed_.end(), parameter, std::less<>())) return;
  if (std::find(unlisted_.begin(), unlisted_.end(), parameter) != unlisted_.end()) return;
  shapes_ += cat(unlisted_.empty() ? "" : ", ", extents);
  unlisted_.push_back(parameter);
}

CHORUS_INLINE void UnlistedParameters::report_seen() const {
  if (!unlisted_.empty())
    say(cat("warning: the model's forward pass uses parameters that CHORUS_MODULE does not list, of shape ", shapes_,
            ": the policy does not train, average or save them, and all copies of the model share them"));
}

CHORUS_INLINE WatchScope::~WatchScope() {
  parameter_watch = before_;
  if (watch_) watch_->report_seen();
}

}  // namespace chorus::detail
