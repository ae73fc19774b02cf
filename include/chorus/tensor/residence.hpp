#pragma once
/// Residence: fetches sharded values when they are needed.

#include <cstddef>

namespace chorus {

/// The owner of sharded values: the policy that splits parameters into units. A home (see Storage) has a residence and
/// a unit index, and calls it before an operation, in forward or backward, reads the values.
class Residence {
 public:
  virtual ~Residence() = default;
  /// Called before a unit's values are read; they are present on return. Throws UsageError with advice if they cannot
  /// be fetched now.
  virtual void touch(std::size_t unit) = 0;
  /// Whether the unit's values are present.
  virtual bool present(std::size_t unit) const = 0;
};

}  // namespace chorus
