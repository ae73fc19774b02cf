/// The C++ side of tests/python/tokenizer_check.py.
///   tokenizer_tool FILE   for each line of its input, a text as hexadecimal digits: its tokens, and their text in the
///   same form, with and without special tokens
#include <chorus/data/tokenizer.hpp>
#include <cstdio>
#include <iostream>
#include <string>

namespace {

std::string from_hex(const std::string& digits) {
  std::string out;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2)
    out += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return out;
}
std::string to_hex(const std::string& text) {
  std::string out;
  for (const char c : text)
    for (const int shift : {4, 0}) out += "0123456789abcdef"[static_cast<unsigned char>(c) >> shift & 15];
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    chorus::check<chorus::UsageError>(argc == 2, "usage: tokenizer_tool FILE");
    const chorus::data::Tokenizer tokenizer(argv[1]);
    std::string line, out;
    while (std::getline(std::cin, line)) {
      const auto tokens = tokenizer.encode(from_hex(line));
      for (const auto token : tokens) out += std::to_string(token) + " ";
      out += "|" + to_hex(tokenizer.decode(tokens, false)) + "|" + to_hex(tokenizer.decode(tokens)) + "\n";
    }
    std::fwrite(out.data(), 1, out.size(), stdout);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
