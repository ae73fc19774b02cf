#pragma once
/// Where the library differs from PyTorch at the edge, and why.

#include <span>
#include <string_view>

namespace edge {

/// `what` names the type, the inputs, and the places in the value (y) or in a gradient (dx, d1, ...).
struct Difference {
  std::string_view name, what, reason;
  /// Unset where it depends on the machine; `what` may then leave the places out.
  bool everywhere = true;
};

/// The list, which stands in differences_test.cpp.
std::span<const Difference> differences();

}  // namespace edge
