// tokenizer.json, and texts with a small one: the tokens of a text have its bytes.
#include <chorus/data/tokenizer.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(tokenizer) {
  using namespace chorus;
  fuzz::Parts parts(input);
  const auto text = parts.bytes(parts.number());
  const data::Tokenizer tokenizer(std::string(fuzz::text_of(parts.rest())), "FILE");
  const auto tokens = tokenizer.encode(fuzz::text_of(text));
  FUZZ_REQUIRE(valid_utf8(tokenizer.decode(tokens, false)));
  data::TokenStream stream(tokenizer, false);
  std::string out;
  for (const auto token : tokens) out += stream.push(token);
  FUZZ_REQUIRE(out + stream.finish() == tokenizer.decode(tokens, false));
}
