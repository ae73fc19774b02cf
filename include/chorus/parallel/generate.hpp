#pragma once
/// generate: tokens that follow a prompt, by the most likely token, by sampling or by beam search, as transformers
/// (Hugging Face) defines them.

#include <algorithm>
#include <chorus/core/philox.hpp>
#include <chorus/core/random.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/nn/kv_cache.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/columns.hpp>
#include <chorus/parallel/elsewhere.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus {

/// Options of generate. Tokens are drawn if one of temperature, top_k and top_p is set; otherwise the most likely one
/// follows.
struct GenerateOptions {
  Index max_new_tokens = 20;
  std::optional<double> temperature{};  ///< divides the logits; 1 if only top_k or top_p is set
  Index top_k = 0;                      ///< draw from the most likely ones and those as likely as the last; 0: from all
  double top_p = 1;                     ///< draw from the fewest tokens with this probability together
  Index beams = 1;                      ///< the continuations that beam search keeps
  double length_penalty = 1;            ///< a beam's score is sum(log p) / length^length_penalty
  std::uint64_t seed = initial_seed();
  std::vector<std::int64_t> eos{};  ///< tokens that end a sequence
};

namespace detail {

/// Whether ranks call this policy together for each token, so that each caches its own heads. The others give each rank
/// the whole model (`gathered`).
template <class Net>
inline constexpr bool generates_in_parts = false;
template <class Model, class Sequence, class Communicator>
inline constexpr bool generates_in_parts<TensorParallel<Model, Sequence, Communicator>> = true;

/// Whether the second parameter of the model's `forward` is a KvCache.
template <class Model>
constexpr bool takes_cache() {
  using Tokens = Tensor<std::int64_t, 2, typename nn::detail::DeviceOfModel<Model>::type>;
  if constexpr (requires(Model & wrapper) { wrapper.model(); })
    return takes_cache<std::remove_cvref_t<decltype(std::declval<Model&>().model())>>();
  else
    return requires(const Model& model, const Tokens& tokens) { model.forward(tokens, {nn::detail::CacheProbe{}}); };
}

/// The logits of the token after each sequence, by a model that may take a cache.
template <bool cached, class Call>
class NextLogits {
 public:
  NextLogits(Call& call, Index capacity) : call_(call) {
    if constexpr (cached) cache_ = nn::KvCache(capacity);
  }
  /// tokens: [sequences, length] -> [sequences, vocabulary]. Throws ShapeError for other results of the model,
  /// NonFiniteError for logits that are not numbers.
  Tensor<double, 2> operator()(const Tensor<std::int64_t, 2>& tokens) {
    const Index from = cache_.length(), length = tokens.size(1);
    const auto logits = numbers(contiguous(tokens.slice(1, from, length)));
    check<ShapeError>(logits.size(0) == tokens.size(0) && logits.size(1) == length - from,
                      "generate: expected logits [", tokens.size(0), ", ", length - from,
                      ", vocabulary] of the model, got shape ", logits.shape());
    const auto last = contiguous(to_device(contiguous(logits.select(1, length - from - 1)), Cpu{}));
    auto out = Tensor<double, 2>::empty(last.shape());
    for (Index i = 0; i < last.numel(); ++i) {
      out.data()[i] = static_cast<double>(last.data()[i]);
      check<NonFiniteError>(!std::isnan(out.data()[i]), "generate: expected numbers as logits of position ",
                            length - 1, ", got NaN");
    }
    if constexpr (cached) cache_.advance();
    return out;
  }
  void reorder(std::span<const std::int64_t> rows) { cache_.reorder(rows); }

 private:
  auto numbers(const Tensor<std::int64_t, 2>& tokens) {
    if constexpr (cached)
      return tensor_of_logits(call_(tokens, cache_));
    else
      return tensor_of_logits(call_(tokens));
  }
  template <class Y>
  static auto tensor_of_logits(const Y& y) {
    if constexpr (is_placed<Y>) {
      return tensor_of_logits(gather_columns(y));
    } else {
      static_assert(Operand<Y> && tensor_of<Y>::rank == 3,
                    "generate: expected a model that returns logits [batch, length, vocabulary]");
      return value_of(y);
    }
  }

  Call& call_;
  nn::KvCache cache_;
};

/// The probabilities of the next token after temperature, top_k and top_p; 0 for tokens that are not kept.
[[gnu::cold]] inline std::vector<double> kept_probabilities(std::span<const double> logits,
                                                            const GenerateOptions& options) {
  constexpr double none = -std::numeric_limits<double>::infinity();
  std::vector<double> scores(logits.begin(), logits.end());
  for (double& score : scores) score /= options.temperature.value_or(1);
  if (options.top_k > 0 && options.top_k < static_cast<Index>(scores.size())) {
    auto sorted = scores;
    const auto last = sorted.begin() + (options.top_k - 1);
    std::nth_element(sorted.begin(), last, sorted.end(), [](double a, double b) { return a > b; });
    for (double& score : scores) score = score < *last ? none : score;
  }
  const auto softmax = [](std::vector<double> x) {
    const double largest = *std::max_element(x.begin(), x.end());
    for (double& v : x) v = std::exp(v - largest);
    const double sum = std::accumulate(x.begin(), x.end(), 0.0);
    for (double& v : x) v /= sum;
    return x;
  };
  auto p = softmax(scores);
  if (options.top_p < 1) {
    std::vector<std::size_t> order(p.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return p[a] < p[b]; });
    double sum = 0;
    for (std::size_t i = 0; i + 1 < order.size() && (sum += p[order[i]]) <= 1 - options.top_p; ++i)
      scores[order[i]] = none;
    p = softmax(scores);
  }
  return p;
}

/// The token that the draw of this sequence and position takes.
inline std::int64_t drawn_token(std::span<const double> p, std::uint64_t seed, Index sequence, Index position) {
  const auto words = philox(seed, {static_cast<std::uint32_t>(sequence), static_cast<std::uint32_t>(position),
                                   static_cast<std::uint32_t>(sequence >> 32), 0x67656e});
  double left = (static_cast<double>(words[0]) + static_cast<double>(words[1]) * 0x1p-32) * 0x1p-32;
  std::size_t token = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) continue;
    token = i;
    if ((left -= p[i]) < 0) break;
  }
  return static_cast<std::int64_t>(token);
}

inline bool ends(const GenerateOptions& options, std::int64_t token) {
  return std::find(options.eos.begin(), options.eos.end(), token) != options.eos.end();
}

/// `tokens` with room for `more`, which hold the first of `eos` or 0.
inline Tensor<std::int64_t, 2> with_room(const Tensor<std::int64_t, 2>& tokens, Index more,
                                         const GenerateOptions& options) {
  const Index length = tokens.size(1);
  auto all = Tensor<std::int64_t, 2>::full({tokens.size(0), length + more}, options.eos.empty() ? 0 : options.eos[0]);
  for (Index row = 0; row < tokens.size(0); ++row)
    for (Index i = 0; i < length; ++i) all(row, i) = tokens(row, i);
  return all;
}

template <class Next>
Tensor<std::int64_t, 2> generate_one_by_one(Next next, const Tensor<std::int64_t, 2>& prompt,
                                            const GenerateOptions& options) {
  const Index rows = prompt.size(0);
  const bool draws = options.temperature || options.top_k > 0 || options.top_p < 1;
  auto all = with_room(prompt, options.max_new_tokens, options);
  std::vector<bool> finished(static_cast<std::size_t>(rows));
  Index length = prompt.size(1);
  while (length < all.size(1) && std::find(finished.begin(), finished.end(), false) != finished.end()) {
    const auto logits = next(all.slice(1, 0, length));
    const auto vocabulary = static_cast<std::size_t>(logits.size(1));
    for (Index row = 0; row < rows; ++row) {
      if (finished[static_cast<std::size_t>(row)]) continue;
      const std::span<const double> of_row(logits.data() + row * logits.size(1), vocabulary);
      const auto best = std::max_element(of_row.begin(), of_row.end()) - of_row.begin();
      const auto token = draws ? drawn_token(kept_probabilities(of_row, options), options.seed, row, length)
                               : static_cast<std::int64_t>(best);
      all(row, length) = token;
      finished[static_cast<std::size_t>(row)] = ends(options, token);
    }
    ++length;
  }
  return contiguous(all.slice(1, 0, length));
}

/// One continuation of a prompt: its new tokens, and the sum of their log-probabilities, or the final score.
struct Beam {
  std::vector<std::int64_t> tokens;
  double score = 0;
  std::int64_t row = 0;  // the beam that it continues
};

/// The beams of one prompt.
class Beams {
 public:
  explicit Beams(const GenerateOptions& options) : options_(options), count_(static_cast<std::size_t>(options.beams)) {
    running_.resize(count_, {{}, unlikely, 0});
    running_.front().score = 0;
  }
  const std::vector<Beam>& running() const { return running_; }
  /// Whether a running beam may still become one of the best.
  bool open() const { return open_; }
  const Beam& best() const { return finished_.empty() ? running_.front() : finished_.front(); }

  /// Continues each beam by one token, from logits [beams, vocabulary].
  void step(const double* logits, std::size_t vocabulary) {
    const auto candidates = best_continuations(logits, vocabulary);
    std::vector<Beam> ended;
    running_.clear();
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const Beam& beam = candidates[i];
      const auto length = static_cast<double>(beam.tokens.size());
      const bool ends_here = ends(options_, beam.tokens.back()) || beam.tokens.size() == most();
      if (!ends_here && running_.size() < count_) running_.push_back(beam);
      if (!ends_here || i >= count_ || !open_) continue;
      finished_.push_back(beam);
      finished_.back().score /= std::pow(length, options_.length_penalty);
    }
    const auto better = [](const Beam& a, const Beam& b) { return a.score > b.score; };
    std::stable_sort(finished_.begin(), finished_.end(), better);
    if (finished_.size() > count_) finished_.resize(count_);
    open_ = open_ && !running_.empty();
    if (open_ && finished_.size() == count_) {
      const double length = static_cast<double>(running_.front().tokens.size());
      open_ = running_.front().score / std::pow(length, options_.length_penalty) > finished_.back().score;
    }
    // At the last token all beams end.
    for (std::size_t i = 0; running_.size() < count_; ++i)
      running_.push_back(candidates[i]);
  }

 private:
  static constexpr double unlikely = -1e9;
  std::size_t most() const { return static_cast<std::size_t>(options_.max_new_tokens); }

  std::vector<Beam> best_continuations(const double* logits, std::size_t vocabulary) const {
    std::vector<double> scores(count_ * vocabulary);
    for (std::size_t beam = 0; beam < count_; ++beam) {
      const double* const x = logits + beam * vocabulary;
      const double largest = *std::max_element(x, x + vocabulary);
      double sum = 0;
      for (std::size_t i = 0; i < vocabulary; ++i) sum += std::exp(x[i] - largest);
      const double shift = running_[beam].score - largest - std::log(sum);
      for (std::size_t i = 0; i < vocabulary; ++i) scores[beam * vocabulary + i] = x[i] + shift;
    }
    const std::size_t kept = std::max(std::size_t{2}, 1 + options_.eos.size()) * count_;
    check<UsageError>(kept <= scores.size(), "generate: beam search with ", options_.eos.size(),
                      " end tokens expected a vocabulary of at least ", kept / count_, ", got ", vocabulary);
    std::vector<std::size_t> order(scores.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                      [&](std::size_t a, std::size_t b) {
                        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
                      });
    std::vector<Beam> best(kept);
    for (std::size_t i = 0; i < kept; ++i) {
      const std::size_t beam = order[i] / vocabulary;
      best[i] = {running_[beam].tokens, scores[order[i]], static_cast<std::int64_t>(beam)};
      best[i].tokens.push_back(static_cast<std::int64_t>(order[i] % vocabulary));
    }
    return best;
  }

  const GenerateOptions& options_;
  std::size_t count_;
  std::vector<Beam> running_, finished_;
  bool open_ = true;
};

template <class Next>
Tensor<std::int64_t, 2> generate_by_beams(Next next, const Tensor<std::int64_t, 2>& prompt,
                                          const GenerateOptions& options) {
  const Index batch = prompt.size(0), width = options.beams, begin = prompt.size(1);
  std::vector<Beams> beams(static_cast<std::size_t>(batch), Beams(options));
  auto all = Tensor<std::int64_t, 2>::empty({batch * width, begin + options.max_new_tokens});
  for (Index row = 0; row < batch * width; ++row)
    for (Index i = 0; i < begin; ++i) all(row, i) = prompt(row / width, i);
  const auto any_open = [&] { return std::any_of(beams.begin(), beams.end(), [](const auto& b) { return b.open(); }); };
  std::vector<std::int64_t> rows(static_cast<std::size_t>(batch * width));
  for (Index length = begin; length < all.size(1) && any_open(); ++length) {
    if (length > begin) next.reorder(rows);
    const auto logits = next(all.slice(1, 0, length));
    const Index vocabulary = logits.size(1);
    for (Index sample = 0; sample < batch; ++sample) {
      auto& of_sample = beams[static_cast<std::size_t>(sample)];
      of_sample.step(logits.data() + sample * width * vocabulary, static_cast<std::size_t>(vocabulary));
      for (Index beam = 0; beam < width; ++beam) {
        const Index row = sample * width + beam;
        const Beam& now = of_sample.running()[static_cast<std::size_t>(beam)];
        rows[static_cast<std::size_t>(row)] = sample * width + now.row;
        std::copy(now.tokens.begin(), now.tokens.end(), all.data() + row * all.size(1) + begin);
      }
    }
  }
  std::size_t longest = 0;
  for (const auto& of_sample : beams) longest = std::max(longest, of_sample.best().tokens.size());
  auto out = with_room(prompt, static_cast<Index>(longest), options);
  for (Index sample = 0; sample < batch; ++sample) {
    const auto& tokens = beams[static_cast<std::size_t>(sample)].best().tokens;
    std::copy(tokens.begin(), tokens.end(), out.data() + sample * out.size(1) + begin);
  }
  return out;
}

template <bool cached, class Call>
Tensor<std::int64_t, 2> generate_by(Call&& call, const Tensor<std::int64_t, 2>& prompt,
                                    const GenerateOptions& options) {
  const NoGrad none;
  NextLogits<cached, std::remove_reference_t<Call>> next(call, prompt.size(1) + options.max_new_tokens);
  return options.beams > 1 ? generate_by_beams(std::move(next), prompt, options)
                           : generate_one_by_one(std::move(next), prompt, options);
}

[[gnu::cold]] inline void check_generates(const Tensor<std::int64_t, 2>& prompt, const GenerateOptions& options) {
  check<ShapeError>(prompt.defined() && prompt.numel() > 0,
                    "generate: expected a prompt [batch, length] of at least one token, got shape ", prompt.shape());
  check<UsageError>(options.max_new_tokens >= 0, "generate: expected max_new_tokens of at least 0, got ",
                    options.max_new_tokens);
  check<UsageError>(options.temperature.value_or(1) > 0,
                    "generate: expected a temperature above 0, or none for the most likely token, got ",
                    options.temperature.value_or(1));
  check<UsageError>(options.top_k >= 0, "generate: expected top_k of at least 0, got ", options.top_k);
  check<UsageError>(options.top_p > 0 && options.top_p <= 1, "generate: expected top_p in (0, 1], got ",
                    options.top_p);
  check<UsageError>(options.beams >= 1, "generate: expected at least 1 beam, got ", options.beams);
  check<UsageError>(options.beams == 1 || !(options.temperature || options.top_k > 0 || options.top_p < 1),
                    "generate: beam search draws nothing: expected beams without temperature, top_k and top_p");
}

[[gnu::cold]] inline std::string said(const Tensor<std::int64_t, 2>& prompt, const GenerateOptions& o) {
  std::string text = cat(prompt.shape(), ' ', o.max_new_tokens, ' ', o.temperature.value_or(-1), ' ', o.top_k, ' ',
                         o.top_p, ' ', o.beams, ' ', o.length_penalty, ' ', o.seed);
  for (const auto token : o.eos) text += cat(" eos ", token);
  for (const auto token : contiguous(prompt).to_vector()) text += cat(' ', token);
  return text;
}

}  // namespace detail

/// `prompt`: [batch, length], tokens of sequences of one length -> [batch, at most length + max_new_tokens]: the prompt
/// and what follows. A sequence ends with the first of its `eos` tokens, and the first one listed fills the row after
/// it. `model`: a net, a model, or a function of tokens [sequences, length], that returns logits [sequences, length,
/// vocabulary]; with beams the sequences of a prompt are neighbours. If the second parameter of a model's `forward` is
/// a KvCache, each step computes the new position only; if not, all of them again.
///
/// Draws depend on the seed, the row and the position alone. All ranks call it, each with a prompt of its own if it
/// likes, and have the result of one device: they gather the model once, so each needs memory for it. Under
/// TensorParallel they have one prompt, and each computes and caches its own heads. Throws UsageError for a model in
/// training and for options out of range, ShapeError for an empty prompt.
template <class Net>
Tensor<std::int64_t, 2> generate(Net&& model, const Tensor<std::int64_t, 2>& prompt,
                                 const GenerateOptions& options = {}) {
  using Model = std::remove_cvref_t<Net>;
  detail::check_generates(prompt, options);
  constexpr const char* call_eval = "generate: expected a model in evaluation, got one in training: call eval() first";
  if constexpr (detail::generates_in_parts<Model>) {
    check<UsageError>(!nn::detail::any_training(model.module()), call_eval);
    check<UsageError>(model.same_on_all_ranks(detail::said(prompt, options)),
                      "generate: expected one prompt and the same options on all ranks of TensorParallel");
    return detail::generate_by<detail::takes_cache<typename Model::model_type>()>(model, prompt, options);
  } else if constexpr (requires { model.module(); }) {
    Tensor<std::int64_t, 2> result;
    check<UsageError>(!model.training(), call_eval);
    model.gathered([&](auto& whole) {
      // eval() of a pipeline's rank has reached the layers of its stages.
      if constexpr (requires { Model::model_type::pipeline_names; }) whole.eval();
      result = generate(whole, prompt, options);
    });
    return result;
  } else if constexpr (std::is_base_of_v<nn::Module, Model>) {
    using D = typename Model::device_type;
    auto& walked = const_cast<Model&>(std::as_const(model));
    check<UsageError>(!nn::detail::any_training(walked), call_eval);
    const auto parameters = nn::named_parameters<D>(walked);
    const D device = parameters.empty() ? default_device<D>() : parameters.front().parameter->where();
    return detail::generate_by<detail::takes_cache<Model>()>(
        [&](const Tensor<std::int64_t, 2>& tokens, const auto&... cache) {
          return std::as_const(model)(to_device(tokens, device), cache...);
        },
        prompt, options);
  } else {
    return detail::generate_by<false>(model, prompt, options);
  }
}

}  // namespace chorus
