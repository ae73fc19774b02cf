#pragma once
/// How the example programs read their command lines.

#include <CLI/CLI.hpp>
#include <chorus/core/check_output.hpp>
#include <chorus/core/say.hpp>
#include <cstdio>
#include <optional>
#include <sstream>

/// Reads the command line. Returns main's status where the program ends here: after --help, or for a mistake.
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
