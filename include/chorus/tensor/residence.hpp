#pragma once
/// Residence: fetches numbers of which a process may hold only a part, when they are needed.

#include <cstddef>

namespace chorus {

/// The owner of such numbers: the policy that cuts parameters into units. A home (see Storage) knows its residence and
/// its unit, and tells it whenever an operation, forward or backward, is about to read the numbers.
class Residence {
 public:
  virtual ~Residence() = default;
  /// The numbers of a unit are about to be read: they are present when it returns. Throws UsageError with advice if
  /// they cannot be fetched now.
  virtual void touch(std::size_t unit) = 0;
  /// Whether they are present.
  virtual bool present(std::size_t unit) const = 0;
};

}  // namespace chorus
