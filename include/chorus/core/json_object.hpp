#pragma once
/// `JsonObject`: writes JSON field by field, without a JSON library.

#include <cmath>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <chorus/core/error.hpp>
#include <chorus/core/json_string.hpp>

namespace chorus::detail {

/// A flat JSON object. Numbers keep all digits; NaN and infinities become null.
class JsonObject {
 public:
  JsonObject& field(std::string_view key, std::string_view text) {
    next(key);
    append_json_string(text_, text);
    return *this;
  }
  template <class Number>
    requires std::integral<Number> || std::floating_point<Number>
  JsonObject& field(std::string_view key, Number value) {
    next(key);
    append_number(value);
    return *this;
  }
  template <class Number>
  JsonObject& field(std::string_view key, const std::vector<Number>& values) {
    next(key);
    text_ += '[';
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i != 0) text_ += ',';
      append_number(values[i]);
    }
    text_ += ']';
    return *this;
  }
  /// A value that already is JSON.
  JsonObject& json(std::string_view key, std::string_view value) {
    next(key);
    text_ += value;
    return *this;
  }

  std::string str() const { return text_ + '}'; }
  /// The fields without the braces.
  std::string fields() const { return text_.substr(1); }

 private:
  void next(std::string_view key) {
    if (text_.size() > 1) text_ += ',';
    append_json_string(text_, key);
    text_ += ':';
  }

  template <class Number>
  void append_number(Number value) {
    if constexpr (std::floating_point<Number>) {
      if (!std::isfinite(value)) {
        text_ += "null";
        return;
      }
    }
    append(text_, value);
  }

  std::string text_ = "{";
};

}  // namespace chorus::detail
