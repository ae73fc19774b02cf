#pragma once
/// Functions that depend on an object's lifetime.

#include <memory>
#include <string_view>
#include <utility>

#include <chorus/core/error.hpp>

namespace chorus::detail {

/// `call`, valid while the net that `alive` tracks exists; then it throws UsageError in the name of `who`.
template <class Call>
auto while_alive(std::string_view who, std::weak_ptr<void> alive, Call call) {
  return [who, alive = std::move(alive), call = std::move(call)](auto&&... arguments) {
    check<UsageError>(!alive.expired(), who, ": its net was destroyed");
    return call(std::forward<decltype(arguments)>(arguments)...);
  };
}

}  // namespace chorus::detail
