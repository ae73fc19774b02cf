#pragma once
/// Programs after what people have reported of training on several devices, each with what it has to print: one
/// device's result, or a refusal that says why. build/tests/cases [NAME ...] runs them.

#include <exception>
#include <functional>
#include <iomanip>
#include <map>
#include <ostream>
#include <string>
#include <utility>

namespace cases {

struct Program {
  std::string right;  ///< what it prints, without spaces at the ends of lines
  std::function<void(std::ostream&)> run;
};
inline std::map<std::string, Program>& all() {
  static std::map<std::string, Program> programs;
  return programs;
}

struct Add {
  Add(const char* name, const char* right, std::function<void(std::ostream&)> run) {
    all().emplace(name, Program{right, std::move(run)});
  }
};

/// `x` to three digits behind the point, so that rounding does not matter.
inline std::string rounded(double x) {
  std::string text = std::to_string(x < 0 ? x - 0.0005 : x + 0.0005);
  text.resize(text.find('.') == std::string::npos ? text.size() : text.find('.') + 4);
  return text == "-0.000" ? "0.000" : text;
}

/// What `f` says when it throws, or "no error".
template <class F>
std::string refusal(const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace cases
