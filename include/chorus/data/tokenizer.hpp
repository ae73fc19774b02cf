#pragma once
/// Byte-level BPE tokenizers from Hugging Face's `tokenizer.json`, as GPT-2 has them (Radford et al. 2019;
/// Sennrich, Haddow, Birch 2016).

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/data/text.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::data {

/// Turns text into tokens and back, with the numbers of Hugging Face's `tokenizers`. Several threads may use it.
class Tokenizer {
 public:
  /// Reads a file. Throws FileError if it can't be read, is damaged, or describes a tokenizer of another kind: the
  /// message names what is not supported.
  explicit Tokenizer(const std::string& path) : Tokenizer(read_text(path), cat("loading ", printable(path, 4096))) {}
  /// The same from the file's text; `who` begins the messages.
  Tokenizer(const std::string& json, const std::string& who);

  /// The tokens of a text. Added tokens, such as "<|endoftext|>", are found in it. Bytes that are not UTF-8 are kept.
  /// Throws UsageError if the vocabulary lacks a byte of the text.
  std::vector<std::int64_t> encode(std::string_view text) const;

  /// The text of tokens; bytes that are not UTF-8 become U+FFFD. Special tokens are left out unless
  /// `skip_special_tokens` is false (`transformers` keeps them, `tokenizers` does not). Throws UsageError for a number
  /// that is not in the vocabulary.
  std::string decode(std::span<const std::int64_t> tokens, bool skip_special_tokens = true) const;

  /// One more than the largest token.
  Index vocab_size() const { return static_cast<Index>(tokens_.size()); }
  /// The number of a token as the file has it ("Ġthe"), if there is one.
  std::optional<std::int64_t> token_to_id(std::string_view token) const;
  /// A token as the file has it. Throws UsageError for a number that is not in the vocabulary.
  const std::string& id_to_token(std::int64_t id) const { return at(id).text; }

 private:
  friend class TokenStream;
  struct Token {
    std::string text, bytes;
    bool known = false, special = false;
  };
  struct Merge {
    std::uint32_t rank = 0;
    std::int32_t token = 0;
  };
  /// Added tokens by their first byte, long ones first.
  using Added = std::map<char, std::vector<std::pair<std::string, std::int64_t>>>;
  using Pieces = std::unordered_map<std::string_view, std::vector<std::int64_t>>;

  const Token& at(std::int64_t id) const;
  void encode_plain(std::string_view text, Pieces& known, std::vector<std::int64_t>& out) const;
  void encode_piece(std::string_view piece, std::vector<std::int64_t>& out) const;
  void encode_from(std::size_t pass, std::string_view text, Pieces& known, std::vector<std::int64_t>& out) const;

  std::vector<Token> tokens_;
  std::unordered_map<std::string, std::int64_t> ids_;
  std::unordered_map<std::uint64_t, Merge> merges_;
  std::int32_t of_byte_[256];  // -1: the vocabulary lacks it
  Added added_[2];             // found first, and in the rest
  bool add_prefix_space_ = false;
};

/// Decodes tokens as they arrive: an unfinished character waits for its other bytes.
class TokenStream {
 public:
  /// The tokenizer must outlive it.
  explicit TokenStream(const Tokenizer& tokenizer, bool skip_special_tokens = true)
      : tokenizer_(tokenizer), skips_(skip_special_tokens) {}
  /// The text that this token completes; often a word, "" within a character. Throws UsageError as `decode` does.
  std::string push(std::int64_t token);
  /// The rest: U+FFFD if a character is unfinished.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  bool skips_;
  std::string rest_;
};

}  // namespace chorus::data

#if !CHORUS_COMPILED
#include <chorus/data/tokenizer_impl.hpp>
#endif
