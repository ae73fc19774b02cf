// What a file is that can't be read, told by its first bytes.
#include <chorus/io/foreign_file.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(foreign_file) {
  fuzz::Parts parts(input);
  constexpr std::string_view paths[] = {"FILE", "FILE.pt", "FILE.bin", "FILE.npz", "FILE.safetensors", "FILE.gguf"};
  const auto path = paths[parts.number() % std::size(paths)];
  const auto rest = parts.rest();
  const auto what = chorus::io::detail::identify_file(std::as_bytes(rest), path);
  FUZZ_REQUIRE(what.empty() || what.starts_with("it "));
  FUZZ_REQUIRE(std::ranges::none_of(what, [](char c) { return static_cast<unsigned char>(c) < ' '; }));
}
