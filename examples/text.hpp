#pragma once
/// Text for language models: read or generated, cut into windows, and continued by a model.

#include <algorithm>
#include <chorus/chorus.hpp>
#include <chorus/data/text.hpp>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// A text as numbers, one number per distinct byte.
struct Text {
  std::string alphabet;
  std::vector<std::int64_t> tokens;

  explicit Text(const std::string& text) : alphabet(text) {
    std::sort(alphabet.begin(), alphabet.end());
    alphabet.erase(std::unique(alphabet.begin(), alphabet.end()), alphabet.end());
    for (const char letter : text)
      tokens.push_back(std::lower_bound(alphabet.begin(), alphabet.end(), letter) - alphabet.begin());
  }
  chorus::Index letters() const { return static_cast<chorus::Index>(alphabet.size()); }
};

/// Sentences of a small grammar, the same for the same seed: 'the old cat sees a red house.'
inline std::string generated_text(std::size_t length, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto one_of = [&](std::initializer_list<std::string_view> words) {
    return std::string(words.begin()[random() % words.size()]);
  };
  const auto thing = [&] {
    return one_of({"the ", "a ", "my ", "your "}) + one_of({"", "", "old ", "red ", "small ", "clever ", "quiet "}) +
           one_of({"cat", "dog", "house", "river", "teacher", "garden", "bird", "stone"});
  };
  std::string text;
  while (text.size() < length) {
    text += thing() + one_of({" sees ", " follows ", " likes ", " is behind ", " is larger than "}) + thing();
    text += one_of({".\n", ".\n", ", and ", ", but "});
  }
  return text;
}

/// Reads the file, or generates sentences for "generated". Throws FileError, and UsageError for a text with fewer than
/// two different letters.
inline Text read_text(const std::string& data, std::uint64_t seed) {
  std::string text;
  if (data == "generated") {
    text = generated_text(200'000, seed);
  } else {
    text = chorus::data::read_text(data);
  }
  Text out(text);
  chorus::check<chorus::UsageError>(out.letters() >= 2, "text: expected at least 2 different bytes, ", data, " has ",
                                    text.size(), " bytes and ", out.letters(), " different ones");
  return out;
}

/// Windows of a text that don't overlap. Throws UsageError if they are too few for a batch.
inline chorus::data::TokenWindows windows_of(const Text& text, chorus::Index window, chorus::Index batch) {
  chorus::data::TokenWindows windows(text.tokens, window);
  chorus::check<chorus::UsageError>(windows.size() >= batch, "text: ", text.tokens.size(), " letters have ",
                                    windows.size(), " windows of ", window, ": expected at least one batch of ", batch);
  return windows;
}

/// The mean cross entropy of a net's predictions [samples, window, letters] of the letters `next`, [samples, window].
template <class Net>
auto guess_loss(Net& net, const chorus::Tensor<std::int64_t, 2>& tokens, const chorus::Tensor<std::int64_t, 2>& next) {
  const auto guesses = net(tokens);
  const chorus::Shape<2> rows{next.numel(), guesses.size(2)};
  return chorus::cross_entropy(chorus::reshape(guesses, rows), next.view(chorus::Shape<1>{next.numel()}));
}

/// All ranks call it. Continues `begin` by `length` letters, each drawn from softmax(prediction / temperature). The
/// model sees the last `window` letters. Letters of `begin` that are not in the text are skipped.
template <class Net>
std::string continue_text(Net& net, const Text& text, std::string begin, chorus::Index window, int length,
                          double temperature, std::uint64_t seed) {
  const chorus::NoGrad no_grad;
  net.eval();
  std::mt19937_64 random(seed);
  std::erase_if(begin, [&](char letter) { return text.alphabet.find(letter) == std::string::npos; });
  if (begin.empty()) begin = text.alphabet[static_cast<std::size_t>(text.tokens[0])];
  auto tokens = Text(begin + text.alphabet).tokens;  // keeps the text's alphabet
  tokens.resize(begin.size());
  for (int i = 0; i < length; ++i) {
    const auto count = std::min(window, static_cast<chorus::Index>(tokens.size()));
    const std::span<const std::int64_t> last(tokens.data() + tokens.size() - static_cast<std::size_t>(count),
                                             static_cast<std::size_t>(count));
    const auto guesses = net(chorus::Tensor<std::int64_t, 2>::from(last, {1, count}));
    const auto chances = chorus::softmax(chorus::slice(guesses, 1, count - 1, count).value() / temperature, 2);
    double rest = static_cast<double>(random() >> 11) * 0x1p-53;
    std::int64_t token = 0;
    while (token + 1 < text.letters() && (rest -= static_cast<double>(chances(0, 0, token))) > 0) ++token;
    tokens.push_back(token);
    begin += text.alphabet[static_cast<std::size_t>(token)];
  }
  net.train();
  return begin;
}
