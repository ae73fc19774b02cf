#pragma once
/// Residence: numbers of which a process may have only a part at hand, and fetches the rest when they are needed.

#include <cstddef>

namespace chorus {

/// Who owns such numbers: the policy that has cut parameters into units. A home (see Storage) knows its residence and
/// its unit, and tells it whenever an operation, forward or backward, is about to read the numbers.
class Residence {
 public:
  virtual ~Residence() = default;
  /// Somebody is about to read the numbers of a unit: they are there when it returns. Throws UsageError, which says
  /// what to do, where they cannot be had now.
  virtual void touch(std::size_t unit) = 0;
  /// Whether they are there.
  virtual bool present(std::size_t unit) const = 0;
};

}  // namespace chorus
