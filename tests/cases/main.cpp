#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string_view>
#include <vector>

#include "case.hpp"

namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    line.erase(line.find_last_not_of(' ') + 1);
    if (!line.empty()) lines.push_back(line);
  }
  return lines;
}

bool passes(const std::string& name, const cases::Program& program) {
  std::ostringstream out;
  try {
    program.run(out);
  } catch (const std::exception& error) {
    out << "\nthrew: " << error.what() << "\n";
  }
  const auto printed = lines_of(out.str()), right = lines_of(program.right);
  if (printed == right) return true;
  std::printf("FAILED %s\n", name.c_str());
  for (std::size_t i = 0; i < std::max(printed.size(), right.size()); ++i) {
    const char *p = i < printed.size() ? printed[i].c_str() : "(nothing)",
               *r = i < right.size() ? right[i].c_str() : "(nothing)";
    if (std::string_view(p) != r) std::printf("  printed: %s\n  right:   %s\n", p, r);
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string_view> wanted(argv + 1, argv + argc);
  int passed = 0, failed = 0;
  for (const auto& [name, program] : cases::all())
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end())
      ++(passes(name, program) ? passed : failed);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
