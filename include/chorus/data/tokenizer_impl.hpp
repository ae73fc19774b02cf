#pragma once
/// How a byte-level BPE tokenizer reads its file, splits text and merges pieces.

#include <algorithm>
#include <array>
#include <chorus/core/config.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/data/tokenizer.hpp>
#include <chorus/data/unicode_classes.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace chorus::data {

namespace detail {

/// The letter of each byte in the file's tokens: printable ones represent themselves, the others, in their order, are
/// U+0100 and those after it. Space is U+0120.
inline const std::array<std::string, 256>& letters_of_bytes() {
  static const auto letters = [] {
    std::array<std::string, 256> out;
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      const unsigned code = itself ? byte : next++;
      if (code < 0x80)
        out[byte] = {static_cast<char>(code)};
      else
        out[byte] = {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
    }
    return out;
  }();
  return letters;
}

/// The bytes of a token; a token with letters of no byte is its own text.
inline std::string bytes_of_token(std::string_view token) {
  static const auto bytes = [] {
    std::unordered_map<std::string_view, char> out;
    for (unsigned byte = 0; byte < 256; ++byte) out.emplace(letters_of_bytes()[byte], static_cast<char>(byte));
    return out;
  }();
  std::string out;
  for (std::size_t at = 0, length = 0; at < token.size(); at += length) {
    length = std::max<std::size_t>(utf8_length(token.substr(at)), 1);
    const auto found = bytes.find(token.substr(at, length));
    if (found == bytes.end()) return std::string(token);
    out += found->second;
  }
  return out;
}

enum class CharacterClass : std::uint8_t { letter, number, blank, other };

struct Character {
  std::size_t bytes = 1;
  CharacterClass kind = CharacterClass::other;
};

/// The first character of a text that is not empty. A byte that is not UTF-8 is a character of no class.
inline Character first_character(std::string_view text) {
  using enum CharacterClass;
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) {
    if ((lead | 0x20) >= 'a' && (lead | 0x20) <= 'z') return {1, letter};
    if (lead >= '0' && lead <= '9') return {1, number};
    return {1, lead == ' ' || (lead >= 9 && lead <= 13) ? blank : other};
  }
  const std::size_t length = utf8_length(text);
  if (length == 0) return {1, other};
  std::uint32_t code = lead & (0xFFu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) code = code << 6 | (static_cast<unsigned char>(text[i]) & 0x3Fu);
  const auto is_in = [code](const auto& ranges) {
    const auto after =
        std::upper_bound(ranges.begin(), ranges.end(), code,
                         [](std::uint32_t value, const CodePoints& range) { return value < range.first; });
    return after != ranges.begin() && code <= std::prev(after)->last;
  };
  if (is_in(std::span(unicode_letters))) return {length, letter};
  if (is_in(std::span(unicode_numbers))) return {length, number};
  const bool is_blank = code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) ||
                        code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
  return {length, is_blank ? blank : other};
}

/// The bytes of the first piece of a text that is not empty. Pieces are GPT-2's:
/// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
inline std::size_t first_piece(std::string_view text) {
  if (text[0] == '\'')
    for (const std::string_view end : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
      if (text.starts_with(end)) return end.size();
  const auto run_from = [&](std::size_t at, CharacterClass kind, std::size_t& last) {
    while (at < text.size()) {
      const auto next = first_character(text.substr(at));
      if (next.kind != kind) break;
      last = next.bytes;
      at += next.bytes;
    }
    return at;
  };
  std::size_t last = 0;
  const std::size_t begin = text[0] == ' ' && text.size() > 1 ? 1 : 0;
  if (const auto kind = first_character(text.substr(begin)).kind; kind != CharacterClass::blank)
    return run_from(begin, kind, last);
  // Blanks: the last one before other text is a piece of its own, or belongs to that text.
  const std::size_t end = run_from(0, CharacterClass::blank, last);
  return end < text.size() && end > last ? end - last : end;
}

/// The first character of a text that is not empty, or what replaces it.
struct DecodedCharacter {
  std::size_t bytes = 1;  ///< of the character; if it is not UTF-8, of its well-formed beginning
  bool valid = false;
  bool unfinished = false;  ///< more bytes may make it valid
};
inline DecodedCharacter decoded_character(std::string_view text) {
  if (const auto length = utf8_length(text); length > 0) return {length, true, false};
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned lead = byte(0);
  const std::size_t length = lead < 0xC2 || lead > 0xF4 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  std::size_t good = 1;
  if (length > 2 && text.size() > 1) {
    const unsigned least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(1) >= least && byte(1) <= most) good = 2;
    if (good == 2 && length == 4 && text.size() > 2 && (byte(2) & 0xC0) == 0x80) good = 3;
  }
  return {good, false, length > 1 && good == text.size()};
}

/// Appends `bytes` as UTF-8, with U+FFFD for what is not. Returns the bytes that it took: with `keeps_unfinished` all
/// but an unfinished character at the end.
inline std::size_t append_utf8(std::string& out, std::string_view bytes, bool keeps_unfinished) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const auto next = decoded_character(bytes.substr(at));
    if (next.unfinished && keeps_unfinished) break;
    out += next.valid ? bytes.substr(at, next.bytes) : std::string_view("\xEF\xBF\xBD");
    at += next.bytes;
  }
  return at;
}

/// Reads the parts of a tokenizer.json that a byte-level BPE has, and refuses others by name.
class TokenizerFile {
 public:
  using json = nlohmann::json;

  TokenizerFile(const std::string& text, const std::string& who) : who_(who), bytes_(text.size()), root_(parsed(text)) {
    refuse_unless_null(root_, "normalizer", "tokenizers without a normalizer");
    refuse_unless_null(root_, "truncation", "tokenizers without truncation: shorten texts after encode()");
    refuse_unless_null(root_, "padding", "tokenizers without padding: pad with data::pad_to_longest");
    const auto* const after = part(root_, "post_processor");
    check<FileError>(after == nullptr || type_of(*after) == "ByteLevel", who_,
                     ": post_processor: expected ByteLevel or null, got ", got(after));
    for (const char* name : {"pre_tokenizer", "decoder"})
      check<FileError>(part(root_, name) != nullptr && type_of(*part(root_, name)) == "ByteLevel", who_, ": ", name,
                       ": expected ByteLevel, got ", got(part(root_, name)),
                       "; chorus reads byte-level BPE tokenizers, such as those of GPT-2 and RoBERTa");
    check<FileError>(flag(*part(root_, "pre_tokenizer"), "use_regex", true), who_,
                     ": pre_tokenizer.use_regex: expected true, got false");
    const auto* const model = part(root_, "model");
    check<FileError>(model != nullptr, who_, ": expected a model, got none");
    const auto type = type_of(*model);
    check<FileError>(type == "BPE" || (type.empty() && model->contains("merges")), who_,
                     ": model.type: expected BPE, got ", got(model));
    model_ = model;
    for (const char* name : {"byte_fallback", "ignore_merges"})
      check<FileError>(!flag(*model, name, false), who_, ": model.", name, ": expected false, got true");
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
      check<FileError>(text_of(*model, name).empty(), who_, ": model.", name, ": expected none, got ",
                       Quoted{text_of(*model, name)});
    const auto* const dropout = part(*model, "dropout");
    check<FileError>(dropout == nullptr || (dropout->is_number() && dropout->get<double>() == 0), who_,
                     ": model.dropout: expected null, got ", dropout != nullptr ? dropout->dump() : "");
  }

  bool add_prefix_space() const { return flag(*part(root_, "pre_tokenizer"), "add_prefix_space", true); }

  /// Calls `f(token, id)` for each entry of the vocabulary.
  template <class F>
  void for_each_token(const F& f) const {
    const auto* const vocab = part(*model_, "vocab");
    check<FileError>(vocab != nullptr && vocab->is_object(), who_, ": model.vocab: expected an object");
    for (const auto& [token, id] : vocab->items()) f(token, id_of(id, token));
  }
  /// Calls `f(left, right)` for each merge, in their order.
  template <class F>
  void for_each_merge(const F& f) const {
    const auto* const merges = part(*model_, "merges");
    check<FileError>(merges != nullptr && merges->is_array(), who_, ": model.merges: expected an array");
    for (const auto& merge : *merges) {
      if (merge.is_string()) {
        const auto& both = merge.get_ref<const std::string&>();
        const auto space = both.find(' ');
        check<FileError>(space != both.npos && both.find(' ', space + 1) == both.npos, who_,
                         ": model.merges: expected two tokens, got ", Quoted{both});
        f(both.substr(0, space), both.substr(space + 1));
      } else {
        check<FileError>(merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string(), who_,
                         ": model.merges: expected two tokens, got ", Quoted{merge.dump()});
        f(merge[0].get<std::string>(), merge[1].get<std::string>());
      }
    }
  }
  /// Calls `f(content, id, special, normalized)` for each added token.
  template <class F>
  void for_each_added(const F& f) const {
    const auto* const added = part(root_, "added_tokens");
    if (added == nullptr) return;
    check<FileError>(added->is_array(), who_, ": added_tokens: expected an array");
    for (const auto& token : *added) {
      check<FileError>(token.is_object() && token.contains("id"), who_, ": added_tokens: expected objects with an id");
      const auto content = text_of(token, "content");
      for (const char* name : {"single_word", "lstrip", "rstrip"})
        check<FileError>(!flag(token, name, false), who_, ": added token ", Quoted{content}, ": ", name,
                         ": expected false, got true");
      f(content, id_of(token.at("id"), content), flag(token, "special", false), flag(token, "normalized", true));
    }
  }

  const std::string& who() const { return who_; }

 private:
  json parsed(const std::string& text) const {
    try {
      auto out = json::parse(text);
      check<FileError>(out.is_object(), who_, ": expected a JSON object, as in Hugging Face's tokenizer.json");
      return out;
    } catch (const json::exception& error) {
      fail<FileError>(who_, ": not valid JSON: ", std::string_view(error.what()).substr(0, 200));
    }
  }
  /// The member of that name; nullptr if there is none, or null.
  static const json* part(const json& of, const char* name) {
    const auto found = of.find(name);
    return of.is_object() && found != of.end() && !found->is_null() ? &*found : nullptr;
  }
  static std::string type_of(const json& of) {
    const auto* const type = part(of, "type");
    return type != nullptr && type->is_string() ? type->get<std::string>() : "";
  }
  static std::string got(const json* of) {
    return of == nullptr ? "null" : type_of(*of).empty() ? "an object without a type" : printable(type_of(*of));
  }
  bool flag(const json& of, const char* name, bool otherwise) const {
    const auto* const value = part(of, name);
    check<FileError>(value == nullptr || value->is_boolean(), who_, ": ", name, ": expected true or false");
    return value == nullptr ? otherwise : value->get<bool>();
  }
  std::string text_of(const json& of, const char* name) const {
    const auto* const value = part(of, name);
    check<FileError>(value == nullptr || value->is_string(), who_, ": ", name, ": expected a string");
    return value == nullptr ? "" : value->get<std::string>();
  }
  void refuse_unless_null(const json& of, const char* name, const char* expected) const {
    check<FileError>(part(of, name) == nullptr, who_, ": ", name, ": expected null, got ", got(part(of, name)),
                     "; chorus reads ", expected);
  }
  std::int64_t id_of(const json& value, const std::string& token) const {
    // Each token takes some bytes of the file, so a damaged number does not take memory.
    check<FileError>(value.is_number_unsigned() && value.get<std::uint64_t>() < bytes_, who_, ": token ", Quoted{token},
                     ": expected a number below ", bytes_, ", got ", printable(value.dump()));
    return value.get<std::int64_t>();
  }

  std::string who_;
  std::uint64_t bytes_;
  json root_;
  const json* model_ = nullptr;
};

}  // namespace detail

CHORUS_INLINE Tokenizer::Tokenizer(const std::string& json, const std::string& who) {
  const detail::TokenizerFile file(json, who);
  add_prefix_space_ = file.add_prefix_space();
  const auto add = [&](const std::string& text, std::int64_t id, bool special) {
    const auto at = static_cast<std::size_t>(id);
    if (at >= tokens_.size()) tokens_.resize(at + 1);
    check<FileError>(!tokens_[at].known || tokens_[at].text == text, who, ": the tokens ", Quoted{tokens_[at].text},
                     " and ", Quoted{text}, " have one number, ", id);
    tokens_[at] = {text, detail::bytes_of_token(text), true, special};
    const auto [there, is_new] = ids_.emplace(text, id);
    check<FileError>(is_new || there->second == id, who, ": the token ", Quoted{text}, " has two numbers, ",
                     there->second, " and ", id);
  };
  file.for_each_token([&](const std::string& text, std::int64_t id) { add(text, id, false); });
  for (std::size_t byte = 0; byte < 256; ++byte)
    of_byte_[byte] = static_cast<std::int32_t>(token_to_id(detail::letters_of_bytes()[byte]).value_or(-1));

  std::uint32_t rank = 0;
  file.for_each_merge([&](const std::string& left, const std::string& right) {
    const auto number = [&](const std::string& token) {
      const auto id = token_to_id(token);
      check<FileError>(id.has_value(), who, ": merge ", rank, " of ", Quoted{left}, " and ", Quoted{right}, ": ",
                       Quoted{token}, " is not in the vocabulary");
      return *id;
    };
    const auto pair = static_cast<std::uint64_t>(number(left)) << 32 | static_cast<std::uint64_t>(number(right));
    merges_.insert_or_assign(pair, Merge{rank, static_cast<std::int32_t>(number(left + right))});
    ++rank;
  });
  file.for_each_added([&](const std::string& content, std::int64_t id, bool special, bool normalized) {
    add(content, id, special);
    if (content.empty()) return;
    auto& of_first = added_[normalized ? 1 : 0][content[0]];
    of_first.emplace_back(content, id);
    std::stable_sort(of_first.begin(), of_first.end(),
                     [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
  });
}

CHORUS_INLINE std::optional<std::int64_t> Tokenizer::token_to_id(std::string_view token) const {
  const auto found = ids_.find(std::string(token));
  return found != ids_.end() ? std::optional(found->second) : std::nullopt;
}

CHORUS_INLINE const Tokenizer::Token& Tokenizer::at(std::int64_t id) const {
  check<UsageError>(id >= 0 && id < vocab_size() && tokens_[static_cast<std::size_t>(id)].known,
                    "Tokenizer: expected a token of the vocabulary, 0 to ", vocab_size() - 1, ", got ", id);
  return tokens_[static_cast<std::size_t>(id)];
}

CHORUS_INLINE std::vector<std::int64_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int64_t> out;
  Pieces known;
  encode_from(0, text, known, out);
  return out;
}

/// Cuts out the added tokens of this pass, leftmost and longest first; the next pass reads what lies between.
CHORUS_INLINE void Tokenizer::encode_from(std::size_t pass, std::string_view text, Pieces& known,
                                          std::vector<std::int64_t>& out) const {
  if (text.empty()) return;
  if (pass == std::size(added_)) return encode_plain(text, known, out);
  const auto& added = added_[pass];
  std::size_t begin = 0;
  for (std::size_t i = 0; i < text.size() && !added.empty();) {
    const auto of_first = added.find(text[i]);
    const std::pair<std::string, std::int64_t>* found = nullptr;
    if (of_first != added.end())
      for (const auto& token : of_first->second)
        if (found == nullptr && text.substr(i).starts_with(token.first)) found = &token;
    if (found == nullptr) {
      ++i;
      continue;
    }
    encode_from(pass + 1, text.substr(begin, i - begin), known, out);
    out.push_back(found->second);
    begin = i += found->first.size();
  }
  encode_from(pass + 1, text.substr(begin), known, out);
}

CHORUS_INLINE void Tokenizer::encode_plain(std::string_view text, Pieces& known, std::vector<std::int64_t>& out) const {
  if (add_prefix_space_ && text[0] != ' ') {
    Pieces own;  // the longer text does not outlive this call
    return encode_plain(" " + std::string(text), own, out);
  }
  constexpr std::size_t longest_known = 32, most_known = 1 << 16;
  while (!text.empty()) {
    const auto piece = text.substr(0, detail::first_piece(text));
    text.remove_prefix(piece.size());
    if (const auto found = known.find(piece); found != known.end()) {
      out.insert(out.end(), found->second.begin(), found->second.end());
      continue;
    }
    const auto before = static_cast<std::ptrdiff_t>(out.size());
    encode_piece(piece, out);
    if (piece.size() <= longest_known && known.size() < most_known)
      known.emplace(piece, std::vector<std::int64_t>(out.begin() + before, out.end()));
  }
}

/// Merges the pair of the lowest rank, the leftmost of equal ones, until none is left.
CHORUS_INLINE void Tokenizer::encode_piece(std::string_view piece, std::vector<std::int64_t>& out) const {
  struct Symbol {
    std::int32_t token;
    std::size_t before, after;
  };
  constexpr auto none = static_cast<std::size_t>(-1);
  std::vector<Symbol> symbols(piece.size());
  for (std::size_t i = 0; i < piece.size(); ++i) {
    const auto byte = static_cast<unsigned char>(piece[i]);
    check<UsageError>(of_byte_[byte] >= 0, "Tokenizer: the vocabulary lacks byte ", static_cast<int>(byte),
                      " of the text ", Quoted{piece});
    symbols[i] = {of_byte_[byte], i == 0 ? none : i - 1, i + 1 < piece.size() ? i + 1 : none};
  }
  using Candidate = std::tuple<std::uint32_t, std::size_t, std::int32_t>;  // rank, place, the merged token
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto merge_at = [&](std::size_t place) -> const Merge* {
    if (place == none || symbols[place].token < 0 || symbols[place].after == none) return nullptr;
    const auto found = merges_.find(static_cast<std::uint64_t>(symbols[place].token) << 32 |
                                    static_cast<std::uint64_t>(symbols[symbols[place].after].token));
    return found != merges_.end() ? &found->second : nullptr;
  };
  const auto offer = [&](std::size_t place) {
    if (const auto* const merge = merge_at(place)) queue.emplace(merge->rank, place, merge->token);
  };
  for (std::size_t i = 0; i + 1 < piece.size(); ++i) offer(i);
  while (!queue.empty()) {
    const auto [rank, place, token] = queue.top();
    queue.pop();
    const auto* const merge = merge_at(place);
    if (merge == nullptr || merge->token != token) continue;  // one of the two was merged meanwhile
    auto& left = symbols[place];
    auto& right = symbols[left.after];
    left.token = token;
    left.after = right.after;
    right.token = -1;
    if (left.after != none) symbols[left.after].before = place;
    offer(left.before);
    offer(place);
  }
  for (std::size_t i = 0; i != none && !symbols.empty(); i = symbols[i].after) out.push_back(symbols[i].token);
}

CHORUS_INLINE std::string Tokenizer::decode(std::span<const std::int64_t> tokens, bool skip_special_tokens) const {
  std::string bytes, out;
  for (const auto id : tokens)
    if (const auto& token = at(id); !token.special || !skip_special_tokens) bytes += token.bytes;
  detail::append_utf8(out, bytes, false);
  return out;
}

CHORUS_INLINE std::string TokenStream::push(std::int64_t id) {
  std::string out;
  const auto& token = tokenizer_.at(id);
  if (token.special && skips_) return out;
  rest_ += token.bytes;
  rest_.erase(0, detail::append_utf8(out, rest_, true));
  return out;
}

CHORUS_INLINE std::string TokenStream::finish() {
  std::string out;
  detail::append_utf8(out, std::exchange(rest_, {}), false);
  return out;
}

}  // namespace chorus::data
