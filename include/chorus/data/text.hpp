#pragma once
/// Text files and their lines, and windows of a token sequence for language models.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/data/dataset.hpp>
#include <chorus/data/file.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::data {

/// Reads a whole file. Throws FileError with the path if it can't be read.
inline std::string read_text(const std::string& path) {
  InputFile file(path);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  text.resize(file.read({reinterpret_cast<std::uint8_t*>(text.data()), text.size()}));
  return text;
}

/// The lines of a file, without "\n" or "\r\n", for `VectorDataset{read_lines(path)}`. Throws FileError.
inline std::vector<std::string> read_lines(const std::string& path) {
  const std::string text = read_text(path);
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::size_t cut = end > begin && end < text.size() && text[end - 1] == '\r' ? end - 1 : end;
    lines.push_back(text.substr(begin, cut - begin));
    begin = end + 1;
  }
  return lines;
}

/// Non-overlapping windows of `window` tokens. A sample is the pair of a window and of each token's successor; in a
/// batch both are [samples, window].
class TokenWindows {
 public:
  /// Throws UsageError if the window is below 1.
  TokenWindows(std::vector<std::int64_t> tokens, Index window) : tokens_(std::move(tokens)), window_(window) {
    check<UsageError>(window >= 1, "TokenWindows: expected a window of at least 1, got ", window);
  }
  Index size() const { return tokens_.empty() ? 0 : (static_cast<Index>(tokens_.size()) - 1) / window_; }
  std::pair<std::span<const std::int64_t>, std::span<const std::int64_t>> get(Index i) const {
    detail::check_place("TokenWindows", i, size());
    const auto count = static_cast<std::size_t>(window_);
    const auto from = std::span(tokens_).subspan(static_cast<std::size_t>(i) * count);
    return {from.first(count), from.subspan(1, count)};
  }

 private:
  std::vector<std::int64_t> tokens_;
  Index window_;
};

}  // namespace chorus::data
