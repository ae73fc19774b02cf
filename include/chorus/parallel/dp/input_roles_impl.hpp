#pragma once
/// The role of inputs whose length equals the batch's.

#include <algorithm>
#include <atomic>
#include <chorus/core/error.hpp>
#include <chorus/core/say.hpp>
#include <chorus/parallel/dp/input_roles.hpp>
#include <cstddef>
#include <span>

namespace chorus::dp {

CHORUS_INLINE bool InputRoles::see(Look& now, std::span<const Index> shape, int axis, bool says, bool counts) {
  const auto at = static_cast<std::size_t>(axis);
  const bool row = shape.size() == at + 1, square = shape.size() == at + 2 && shape[at] == shape[at + 1];
  if (now.first.data() == nullptr) {
    now.first = shape;
    now.first_is_doubtful = !says && (row || square);
    // Image height and width are never a number of samples.
    for (std::size_t i = 0; i < (shape.size() < 4 ? shape.size() : 2); ++i)
      now.coincides = now.coincides || (i != at && shape[i] == now.batch);
    return false;
  }
  Known nothing;
  Known& known = now.further < known_.size() ? known_[now.further] : nothing;
  ++now.further;
  if (says) return false;
  const bool whole = shape[at] != now.batch;
  const bool like_first = std::equal(shape.begin(), shape.end(), now.first.begin(), now.first.end());
  const bool doubtful = whole ? (shape.size() > at + 1 && shape[at + 1] == now.batch) ||
                                    (now.first_is_doubtful && shape.size() > now.first.size())
                              : !like_first && (now.coincides || (square && !counts));
  if (!doubtful) {
    known = {shape.size(), whole};
    return false;
  }
  if (known.axes == shape.size() && (known.whole || !whole)) return known.whole && !whole;
  const int doubt = whole || (square && !counts) ? 3 : row && !counts ? 2 : 1;
  if (doubt > now.doubt) {
    now.doubt = doubt;
    now.doubtful = shape;
  }
  return false;
}

CHORUS_INLINE void InputRoles::end(const Look& now) const {
  // If there is one input besides the first, it is likely its target.
  const int doubt = now.further == 1 && now.doubt < 3 ? now.doubt - 1 : now.doubt;
  if (doubt <= 0) return;
  const auto text = [&] {
    return cat(now.policy, ": an input of shape ", now.doubtful, " next to the first one of shape ", now.first,
               " may be ", now.batch, " samples or not: pass whole(input) if not, as for a mask or weights, else ",
               "batch_axis<0>(input), or another axis");
  };
  if (doubt > 1) fail<ShapeError>(text());
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) detail::say(cat("warning: ", text(), "; it is split as samples"));
}

}  // namespace chorus::dp
