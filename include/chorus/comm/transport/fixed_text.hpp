#pragma once
/// The parts of messages of fixed size: `FixedText`, and `is_message`, which looks for padding.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace chorus::comm {

/// Up to size - 1 characters, and zeros after them.
template <std::size_t size>
struct FixedText {
  std::array<char, size> characters{};

  FixedText() = default;
  /// Longer texts are truncated.
  explicit FixedText(std::string_view text) {
    std::copy_n(text.data(), std::min(text.size(), size - 1), characters.data());
  }
  /// The text ends before the last character, even if a peer has sent no zero.
  std::string_view view() const { return {characters.data(), strnlen(characters.data(), size - 1)}; }
  friend bool operator==(const FixedText&, const FixedText&) = default;
};

/// Whether T can be sent as its bytes: a struct of `bytes` bytes without padding.
template <class T, std::size_t bytes>
inline constexpr bool is_message =
    sizeof(T) == bytes&& std::is_trivially_copyable_v<T>&& std::has_unique_object_representations_v<T>;

}  // namespace chorus::comm
