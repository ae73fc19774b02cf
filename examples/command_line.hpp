#pragma once
/// Command-line parsing of the example programs.

#include <CLI/CLI.hpp>
#include <chorus/core/check_output.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/from_chars.hpp>
#include <chorus/core/say.hpp>
#include <cstdio>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <type_traits>

/// For an option's `transform`: a number within limits, in decimal digits (CLI11 would read 010 as 8). Its message is
/// short and repeats the input.
template <class Number>
CLI::Validator in_range(Number least, Number most = std::numeric_limits<Number>::max()) {
  const auto limits =
      most == std::numeric_limits<Number>::max() ? chorus::cat("at least ", least) : chorus::cat(least, " to ", most);
  const auto check = [=](std::string& text) -> std::string {
    Number number{};
    const auto* const end = text.data() + text.size();
    const auto read = chorus::detail::from_chars(text.data(), end, number);
    if (read.ec == std::errc() && read.ptr == end && number >= least && number <= most) {
      text = chorus::cat(number);
      return {};
    }
    return chorus::cat("expected a ", std::is_integral_v<Number> ? "whole " : "", "number, ", limits, ", got '",
                       chorus::printable(text), "'");
  };
  return CLI::Validator(check, limits);
}

/// Reads the command line. Returns main's status if the program ends here: after --help, or for an error.
inline std::optional<int> parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& end) {
    std::ostringstream help, mistake;
    const bool wrong = app.exit(end, help, mistake) != 0;
    std::fputs(help.str().c_str(), stdout);
    std::fputs(chorus::detail::printable_lines(mistake.str()).c_str(), stderr);
    if (wrong) return 2;
  }
  try {
    chorus::detail::check_output();
    return 0;
  } catch (const chorus::FileError& error) {
    chorus::detail::say(error.what());
    return 1;
  }
}
