#pragma once
/// Text for language models: read or generated, cut into windows, and continued by a model.

#include <algorithm>
#include <chorus/chorus.hpp>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// A text as numbers, one for each of the different bytes in it.
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

/// Sentences of a small grammar, the same for one seed: 'the old cat sees a red house.'
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

/// The file, or generated sentences for "generated". Throws FileError, and UsageError for a text with less than two
/// different letters.
inline Text read_text(const std::string& data, std::uint64_t seed) {
  std::string text;
  if (data == "generated") {
    text = generated_text(200'000, seed);
  } else {
    std::ifstream file(data, std::ios::binary);
    chorus::check<chorus::FileError>(file.good() && !std::filesystem::is_directory(data), "cannot read the text ",
                                     data);
    text.assign(std::istreambuf_iterator<char>(file), {});
  }
  Text out(text);
  chorus::check<chorus::UsageError>(out.letters() >= 2, "the text ", data, " has ", text.size(), " bytes and ",
                                    out.letters(), " different ones: too few to learn from");
  return out;
}

/// Windows of a text that don't overlap, in batches: each rank gets its share of every batch. A last batch that isn't
/// full is left out.
class TextBatches {
 public:
  /// tokens: [samples, window]; next: [samples * window], the letter that follows each.
  struct Batch {
    chorus::Tensor<std::int64_t, 2> tokens;
    chorus::Tensor<std::int64_t, 1> next;
  };

  /// `net` is a policy: it says which share is this rank's. Throws UsageError for a text with too few windows for a
  /// batch.
  template <class Net>
  TextBatches(const Text& text, chorus::Index window, const Net& net, chorus::Index batch)
      : text_(text), window_(window), batch_(batch), sampler_(net.sampler(Windows{text, window})) {
    chorus::check<chorus::UsageError>(sampler_.dataset_size() >= batch, "a text of ", text.tokens.size(),
                                      " letters has ", sampler_.dataset_size(), " windows of ", window,
                                      ": too few for a batch of ", batch);
  }

  chorus::Index size() const { return sampler_.global_batches(batch_, true); }
  void set_epoch(chorus::Index epoch) { sampler_.set_epoch(epoch); }

  /// Walks over the batches of an epoch; each is made when it is read.
  struct Iterator {
    const TextBatches* of;
    chorus::Index b = 0;
    Batch operator*() const { return of->get(b); }
    Iterator& operator++() {
      ++b;
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return b >= of->size(); }
  };
  Iterator begin() const { return {this}; }
  std::default_sentinel_t end() const { return {}; }

 private:
  Batch get(chorus::Index b) const {
    const auto samples = sampler_.share(b, batch_);
    const auto count = static_cast<chorus::Index>(samples.size());
    Batch out{chorus::Tensor<std::int64_t, 2>::empty({count, window_}),
              chorus::Tensor<std::int64_t, 1>::empty({count * window_})};
    for (chorus::Index i = 0; i < count; ++i) {
      const auto* letters = text_.tokens.data() + samples[static_cast<std::size_t>(i)] * window_;
      std::copy_n(letters, window_, out.tokens.data() + i * window_);
      std::copy_n(letters + 1, window_, out.next.data() + i * window_);
    }
    return out;
  }

  struct Windows {
    const Text& text;
    chorus::Index window;
    chorus::Index size() const { return (static_cast<chorus::Index>(text.tokens.size()) - 1) / window; }
  };

  const Text& text_;
  chorus::Index window_, batch_;
  chorus::data::Sampler sampler_;
};

/// The mean cross entropy of a net's guesses [samples, window, letters] at the next letters.
template <class Net>
auto guess_loss(Net& net, const TextBatches::Batch& batch) {
  const auto guesses = net(batch.tokens);
  const chorus::Shape<2> rows{batch.next.numel(), guesses.size(2)};
  return chorus::cross_entropy(chorus::reshape(guesses, rows), batch.next);
}

/// All ranks call it. Continues `begin` by `length` letters, each drawn from softmax(guess / temperature). The model sees the last
/// `window` letters. Letters of `begin` that the text doesn't have are left out.
template <class Net>
std::string continue_text(Net& net, const Text& text, std::string begin, chorus::Index window, int length,
                          double temperature, std::uint64_t seed) {
  const chorus::NoGrad no_grad;
  net.eval();
  std::mt19937_64 random(seed);
  std::erase_if(begin, [&](char letter) { return text.alphabet.find(letter) == std::string::npos; });
  if (begin.empty()) begin = text.alphabet[static_cast<std::size_t>(text.tokens[0])];
  auto tokens = Text(begin + text.alphabet).tokens;  // the alphabet stays the text's
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
