#pragma once
/// `Replaced`: a scoped assignment.

#include <chorus/core/config.hpp>
#include <utility>

namespace chorus::detail {

/// Sets `place` to `value` while it lives; then restores the old value.
template <class T>
class Replaced {
 public:
  Replaced(T& place, T value) : place_(place), before_(std::exchange(place, std::move(value))) {}
  ~Replaced() { place_ = std::move(before_); }
  Replaced(const Replaced&) = delete;
  Replaced& operator=(const Replaced&) = delete;

 private:
  T& place_;
  T before_;
};

}  // namespace chorus::detail
