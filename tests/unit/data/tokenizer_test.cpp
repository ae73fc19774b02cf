// Byte-level BPE: the tokens of Hugging Face's tokenizers, kept in tests/tokenizer; what is refused; streams.
#include <array>
#include <catch.hpp>
#include <chorus/data/tokenizer.hpp>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <unit/message_of.hpp>
#include <vector>

namespace tokenizer_test {

namespace ch = chorus;
using Catch::Matchers::Contains;
using nlohmann::json;
using Ids = std::vector<std::int64_t>;

std::string file(const char* name) {
  const auto tests = std::filesystem::path(CHORUS_TESTS);
  return ch::data::read_text((tests / "tokenizer" / name).string());
}
ch::data::Tokenizer small() { return {file("small.json"), "small.json"}; }

/// What the message of `small.json`, changed in this way, says.
template <class Change>
std::string refusal(const Change& change) {
  auto text = json::parse(file("small.json"));
  change(text);
  return message_of<ch::FileError>([&] { ch::data::Tokenizer(text.dump(), "F"); });
}

TEST_CASE("a tokenizer's tokens and texts are those of Hugging Face's tokenizers") {
  const auto tokenizer = small();
  const auto vectors = json::parse(file("vectors.json"));
  REQUIRE(vectors.size() > 25);
  for (const auto& vector : vectors) {
    const auto text = vector[0].get<std::string>();
    INFO(text);
    CHECK(tokenizer.encode(text) == vector[1].get<Ids>());
    CHECK(tokenizer.decode(vector[1].get<Ids>(), false) == vector[2].get<std::string>());
  }
}

TEST_CASE("a tokenizer keeps bytes that are not UTF-8, and decodes them as U+FFFD") {
  const auto tokenizer = small();
  const std::string text = "a\xFF\xE4\xBDz\xED\xA0\x80\xF0\x9F\x98";
  const auto tokens = tokenizer.encode(text);
  std::string letters;
  for (const auto token : tokens) letters += tokenizer.id_to_token(token);
  CHECK(letters == "a\u00FF\u00E4\u00BDz\u00ED\u0142\u0122\u00F0\u0141\u013A");
  const std::string bad = "\xEF\xBF\xBD";
  CHECK(tokenizer.decode(tokens) == "a" + bad + bad + "z" + bad + bad + bad + bad);  // as Python's errors="replace"
}

TEST_CASE("a stream gives whole characters, and the text of all tokens") {
  const auto tokenizer = small();
  const std::string text = "x\xF0\x9F\x98\x80y caf\xC3\xA9<|endoftext|>z";
  ch::data::TokenStream stream(tokenizer);
  std::string out;
  for (const auto token : tokenizer.encode(text)) {
    const auto part = stream.push(token);
    CHECK(ch::valid_utf8(part));
    out += part;
  }
  CHECK(out == "x\xF0\x9F\x98\x80y caf\xC3\xA9z");
  CHECK(stream.finish().empty());
  stream.push(tokenizer.encode("\xF0\x9F")[0]);
  CHECK(stream.finish() == "\xEF\xBF\xBD");
  CHECK(stream.finish().empty());
}

TEST_CASE("100 kB of one letter take no time") {
  const auto tokenizer = small();
  const std::string text(100'000, 'a');
  const auto tokens = tokenizer.encode(text);
  CHECK(tokens.size() < 60'000);
  CHECK(tokenizer.decode(tokens) == text);
}

TEST_CASE("a tokenizer's words and numbers") {
  const auto tokenizer = small();
  CHECK(tokenizer.vocab_size() == 352);
  CHECK(tokenizer.token_to_id("<|endoftext|>") == 0);
  CHECK_FALSE(tokenizer.token_to_id("nothing like that").has_value());
  CHECK(tokenizer.id_to_token(tokenizer.encode(" the")[0]) == "\xC4\xA0the");
  CHECK(tokenizer.decode(Ids{0, 261}) == " the");
  CHECK(tokenizer.decode(Ids{0, 261}, false) == "<|endoftext|> the");
  for (const std::int64_t id : {-1, 352, 1 << 30})
    CHECK_THAT(message_of<ch::UsageError>([&] { tokenizer.decode(Ids{id}); }),
               Contains("expected a token of the vocabulary, 0 to 351, got"));
}

TEST_CASE("a tokenizer refuses by name what it does not do") {
  const auto typed = [](const char* type) { return json{{"type", type}}; };
  CHECK(refusal([](json&) {}) == "nothing");
  CHECK_THAT(refusal([&](json& j) { j["normalizer"] = typed("NFC"); }),
             Contains("F: normalizer: expected null, got NFC"));
  CHECK_THAT(refusal([&](json& j) { j["pre_tokenizer"] = typed("Metaspace"); }),
             Contains("pre_tokenizer: expected ByteLevel, got Metaspace"));
  CHECK_THAT(refusal([&](json& j) { j["pre_tokenizer"]["use_regex"] = false; }), Contains("use_regex: expected true"));
  CHECK_THAT(refusal([&](json& j) { j["decoder"] = nullptr; }), Contains("decoder: expected ByteLevel, got null"));
  CHECK_THAT(refusal([&](json& j) { j["post_processor"] = typed("RobertaProcessing"); }),
             Contains("expected ByteLevel or null, got RobertaProcessing"));
  CHECK_THAT(refusal([&](json& j) { j["truncation"] = {{"max_length", 5}}; }), Contains("truncation: expected null"));
  for (const char* type : {"WordPiece", "Unigram", "WordLevel"})
    CHECK_THAT(refusal([&](json& j) { j["model"]["type"] = type; }), Contains("model.type: expected BPE, got"));
  for (const char* name : {"byte_fallback", "ignore_merges"})
    CHECK_THAT(refusal([&](json& j) { j["model"][name] = true; }),
               Contains(ch::cat("model.", name, ": expected false")));
  CHECK_THAT(refusal([&](json& j) { j["model"]["dropout"] = 0.1; }), Contains("model.dropout: expected null, got 0.1"));
  CHECK_THAT(refusal([&](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }), Contains("end_of_word_suffix"));
  for (const char* name : {"single_word", "lstrip", "rstrip"})
    CHECK_THAT(refusal([&](json& j) { j["added_tokens"][0][name] = true; }),
               Contains(ch::cat("added token \"<|endoftext|>\": ", name, ": expected false, got true")));
}

TEST_CASE("a tokenizer refuses files that are damaged") {
  CHECK_THAT(refusal([](json& j) {
               j["model"]["merges"].push_back({"a", "nothing like that"});
             }),
             Contains("\"nothing like that\" is not in the vocabulary"));
  CHECK_THAT(refusal([](json& j) { j["model"]["merges"][0] = "abc"; }), Contains("expected two tokens, got"));
  CHECK_THAT(refusal([](json& j) { j["model"]["vocab"]["x"] = -1; }),
             Contains("token \"x\": expected a number below 5"));
  CHECK_THAT(refusal([](json& j) { j["model"]["vocab"]["x"] = 5'000'000'000; }), Contains("expected a number below"));
  CHECK_THAT(refusal([](json& j) { j["model"]["vocab"]["xx"] = 7; }), Contains("have one number, 7"));
  CHECK_THAT(refusal([](json& j) { j["added_tokens"][0]["id"] = 5; }), Contains("have one number, 5"));
  CHECK_THAT(message_of<ch::FileError>([] { ch::data::Tokenizer("{", "F"); }), Contains("F: not valid JSON"));
  CHECK_THAT(message_of<ch::FileError>([] { ch::data::Tokenizer("[]", "F"); }), Contains("F: expected a JSON object"));
  CHECK_THAT(message_of<ch::FileError>([] { ch::data::Tokenizer("/nonexistent/tokenizer.json"); }),
             Contains("/nonexistent/tokenizer.json"));
  // A vocabulary without some byte: a text with it is refused, not silently shortened.
  auto text = json::parse(file("small.json"));
  text["model"]["merges"] = json::array();
  text["model"]["vocab"].erase("z");
  const ch::data::Tokenizer without(text.dump(), "F");
  CHECK(without.encode("ab").size() == 2);
  CHECK(message_of<ch::UsageError>([&] { without.encode("a zoo"); }) ==
        "Tokenizer: the vocabulary lacks byte 122 of the text \" zoo\"");
}

TEST_CASE("merges may be texts, a prefix space is added where the file says so") {
  auto text = json::parse(file("small.json"));
  for (auto& merge : text["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  text["pre_tokenizer"]["add_prefix_space"] = true;
  const ch::data::Tokenizer tokenizer(text.dump(), "F");
  CHECK(tokenizer.encode("the cat<tag>dog") == Ids(tokenizer.encode(" the cat<tag> dog")));
  CHECK(tokenizer.encode("the") == Ids{261});
  CHECK(tokenizer.encode("").empty());
}

}  // namespace tokenizer_test
