// Compressed files: read in parts of any size they give the same as read at once.
#include <chorus/data/idx.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(gzip) {
  using namespace chorus;
  fuzz::Parts parts(input);
  const std::size_t step = 1 + parts.number();
  const fuzz::MemoryFile file(parts.rest());
  constexpr std::size_t most = 1 << 16;
  const auto read = [&](std::size_t part) {
    data::GzipFile gzip(file.path());
    std::vector<std::uint8_t> all;
    try {
      while (all.size() < most) {
        const auto before = all.size();
        all.resize(std::min(before + part, most));
        const auto got = gzip.read(std::span(all).subspan(before));
        all.resize(before + got);
        if (got < part) break;
      }
    } catch (const FileError&) {
      return std::string("refused");
    }
    FUZZ_REQUIRE(all.size() <= gzip.size_limit());
    return std::string(all.begin(), all.end()) + (gzip.at_end() ? "!" : "?");
  };
  const auto whole = read(most);
  FUZZ_REQUIRE(read(step) == whole);
  data::detail::parse_idx<data::GzipFile>(file.path(), 1);
}
