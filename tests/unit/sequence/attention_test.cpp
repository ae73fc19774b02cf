// Attention of ranks that share the tokens of each sample, beside one device's.
#include <chorus/comm/thread_group.hpp>
#include <chorus/nn/positions.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/parallel/sequence/places.hpp>
#include <numeric>
#include <thread>

#include "texts.hpp"

namespace sequence_attention_test {

namespace ch = chorus;
using ch::Index;
template <int Rank>
using Variable = ch::Variable<double, Rank>;

template <std::size_t N>
ch::Tensor<double, static_cast<int>(N)> numbers(const std::array<Index, N>& shape, std::uint32_t key) {
  return test::numbers(1, ch::numel(shape), key).view(shape);
}
template <int Rank>
std::vector<double> values(const ch::Tensor<double, Rank>& x) {
  return ch::contiguous(x).to_vector();
}

using Communicator = ch::comm::AnyCommunicator;
using Places = ch::sequence::Places<Communicator>;
using ch::sequence::stretches, ch::sequence::places_in;

/// Runs `f(communicator)` on `size` ranks that are threads; throws the first rank's exception.
template <class F>
void on_ranks(int size, const F& f) {
  auto group = ch::comm::thread_group(size);
  std::vector<std::exception_ptr> errors(group.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < group.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        f(group[rank]);
      } catch (...) {
        errors[rank] = std::current_exception();
        group[rank].abort("it has failed");
      }
    });
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

/// This rank's places of axis 2.
ch::Tensor<double, 4> part(const ch::Tensor<double, 4>& x, const ch::sequence::Runs& runs) {
  return ch::concat(2, x.slice(2, runs[0].begin, runs[0].begin + runs[0].count),
                    x.slice(2, runs[1].begin, runs[1].begin + runs[1].count));
}

struct Problem {
  Index length;
  double dropout = 0;
  bool causal = false;
  int mask = 0;  // 1: random bool, with a row that sees nothing; 2: packed texts, for each head
};

constexpr Index samples = 2, heads = 3, features = 5, width = 4;
const std::array<ch::Shape<4>, 4> shapes_of(Index length) {
  const auto shape = [&](Index last) { return ch::Shape<4>{samples, heads, length, last}; };
  return {shape(features), shape(features), shape(width), shape(width)};
}

/// The result and the gradients of q, k and v, given these and the result's gradient.
std::array<ch::Tensor<double, 4>, 4> run(const Problem& problem, const std::array<ch::Tensor<double, 4>, 4>& in) {
  ch::RandomContext random{.seed = 5, .step = 3, .next_operation = 0, .first_sample = [] { return 11; }};
  random.samples = samples;
  const ch::RandomScope scope(random);
  const Variable<4> q(in[0], true), k(in[1], true), v(in[2], true);
  const ch::AttentionOptions options{.causal = problem.causal, .dropout = problem.dropout};
  const Index n = problem.length;
  const auto y = [&] {
    if (problem.mask == 0) return ch::scaled_dot_product_attention(q, k, v, options);
    if (problem.mask == 1) {
      auto mask = ch::Tensor<bool, 2>::empty({n, n});
      for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < n; ++j) mask(i, j) = i != n / 2 && (i * 7 + j * 5) % 3 != 0;
      return ch::scaled_dot_product_attention(q, k, v, mask, options);
    }
    auto mask = ch::Tensor<double, 4>::zeros({samples, heads, n, n});
    for (Index s = 0; s < samples * heads; ++s)
      for (Index i = 0; i < n; ++i)
        for (Index j = 0; j < n; ++j)
          mask.data()[(s * n + i) * n + j] = i * (s + 2) / n == j * (s + 2) / n
                                                 ? 0.1 * static_cast<double>(s)
                                                 : -std::numeric_limits<double>::infinity();
    return ch::scaled_dot_product_attention(q, k, v, mask, options);
  }();
  y.backward(in[3]);
  return {y.value(), q.grad(), k.grad(), v.grad()};
}

void compare(const Problem& problem, int ranks) {
  CAPTURE(problem.length, problem.dropout, problem.causal, problem.mask, ranks);
  std::array<ch::Tensor<double, 4>, 4> whole;
  for (std::size_t i = 0; i < whole.size(); ++i)
    whole[i] = numbers<4>(shapes_of(problem.length)[i], static_cast<std::uint32_t>(i + 1));
  const auto expected = run(problem, whole);
  std::vector<double> worst(static_cast<std::size_t>(ranks), 1e9);
  on_ranks(ranks, [&](Communicator& communicator) {
    const auto alive = std::make_shared<int>();
    const auto places = std::make_shared<Places>(ch::sequence::Ring(communicator), problem.length, alive);
    const ch::SharedPlacesScope scope(places.get());
    auto mine = whole;
    for (auto& x : mine) x = part(x, places->runs());
    const auto got = run(problem, mine);
    double largest = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto a = values(got[i]), b = values(part(expected[i], places->runs()));
      if (a.size() != b.size()) largest = 1e9;
      for (std::size_t n = 0; n < std::min(a.size(), b.size()); ++n) largest = std::max(largest, std::abs(a[n] - b[n]));
    }
    worst[static_cast<std::size_t>(communicator.rank())] = largest;
  });
  for (const double difference : worst) CHECK(difference < 1e-12);
}

TEST_CASE("zig-zag stretches cover a sequence once, and give ranks equal work under a causal mask") {
  for (const int ranks : {1, 2, 3, 5, 8})
    for (const Index length : {Index{8}, Index{9}, Index{13}, Index{31}, Index{160}}) {
      std::vector<int> seen(static_cast<std::size_t>(length));
      std::vector<Index> pairs;
      for (int rank = 0; rank < ranks; ++rank) {
        CHECK(places_in(stretches(length, ranks, rank)) > 0);
        pairs.push_back(0);
        for (const auto& run : stretches(length, ranks, rank))
          for (Index i = run.begin; i < run.begin + run.count; ++i) {
            ++seen[static_cast<std::size_t>(i)];
            pairs.back() += i + 1;
          }
      }
      CHECK(std::count(seen.begin(), seen.end(), 1) == length);
      const auto [least, most] = std::minmax_element(pairs.begin(), pairs.end());
      if (length % (2 * ranks) == 0)
        CHECK(*least == *most);
      else
        CHECK(*most - *least <= 2 * length);
    }
  // In each hop, too: rank r sees of rank s's keys half of the pairs.
  constexpr Index length = 160;
  for (int r = 0; r < 4; ++r)
    for (int s = 0; s < 4; ++s) {
      Index pairs = 0;
      for (const auto& queries : stretches(length, 4, r))
        for (const auto& keys : stretches(length, 4, s))
          for (Index i = queries.begin; i < queries.begin + queries.count; ++i)
            pairs += std::clamp<Index>(i + 1 - keys.begin, 0, keys.count);
      CHECK(pairs == (r == s ? 820 : 800));
    }
}

TEST_CASE("attention round a ring is one device's, with its gradients") {
  compare({.length = 150, .causal = true}, 2);
  compare({.length = 131}, 3);
  compare({.length = 131, .dropout = 0.3, .causal = true}, 4);
  compare({.length = 40, .causal = true}, 8);
  compare({.length = 9, .causal = true}, 8);  // shorter than 2c
  compare({.length = 5, .dropout = 0.5}, 5);
  compare({.length = 7}, 1);
  for (const int mask : {1, 2}) compare({.length = 33, .dropout = 0.2, .causal = mask == 2, .mask = mask}, 3);
}

TEST_CASE("attention round a ring sends (c-1)/c of keys and values, and twice that in backward") {
  constexpr int ranks = 4;
  constexpr Index length = 48;
  ch::trace::reset_traffic();
  compare({.length = length, .causal = true}, ranks);
  constexpr auto all = static_cast<std::uint64_t>(samples * heads * length * (features + width)) * sizeof(double);
  for (int rank = 0; rank < ranks; ++rank)
    CHECK(ch::trace::bytes_sent(rank, ch::trace::Traffic::activations) == 3 * all * (ranks - 1) / ranks);
}

TEST_CASE("dropout and positions of ranks that share tokens are one device's") {
  constexpr Index length = 11;
  const auto draw = [](const ch::Tensor<double, 3>& x) {
    ch::RandomContext random{.seed = 5, .step = 3, .next_operation = 0, .first_sample = [] { return 11; }};
    random.samples = samples;
    const ch::RandomScope scope(random);
    const Variable<3> in(x, true);
    const auto y = ch::dropout(in, 0.4);
    const auto z = ch::dropout(ch::reshape(y, ch::Shape<2>{-1, 6}), 0.4);
    const auto rotated = ch::nn::rotary_positions(ch::reshape(z, ch::Shape<3>{samples, -1, 6}));
    auto out = ch::nn::SinusoidalPositions{}(rotated);
    ch::sum(out).backward();
    return std::array{out.value(), in.grad()};
  };
  const auto x = numbers<3>({samples, length, 6}, 1);
  const auto expected = draw(x);
  std::atomic<int> equal = 0;
  on_ranks(3, [&](Communicator& communicator) {
    const auto places = std::make_shared<Places>(ch::sequence::Ring(communicator), length, std::make_shared<int>());
    const auto& runs = places->runs();
    const auto mine = [&](const ch::Tensor<double, 3>& whole) {
      return ch::concat(1, whole.slice(1, runs[0].begin, runs[0].begin + runs[0].count),
                        whole.slice(1, runs[1].begin, runs[1].begin + runs[1].count));
    };
    const ch::SharedPlacesScope scope(places.get());
    const auto got = draw(mine(x));
    equal += values(got[0]) == values(mine(expected[0])) && values(got[1]) == values(mine(expected[1]));
  });
  CHECK(equal == 3);
}

TEST_CASE("what is no self-attention of a rank's places is refused") {
  on_ranks(2, [](Communicator& communicator) {
    const auto places = std::make_shared<Places>(ch::sequence::Ring(communicator), 10, std::make_shared<int>());
    const ch::SharedPlacesScope scope(places.get());
    ch::RandomContext random{.seed = 5, .first_sample = [] { return 0; }, .samples = samples};
    const ch::RandomScope draws(random);
    const auto refused = [](const auto& call) {
      try {
        call();
        return std::string();
      } catch (const ch::UsageError& error) {
        return std::string(error.what());
      }
    };
    const auto q = Variable<4>(numbers<4>({samples, 2, 5, 3}, 1));
    const auto memory = Variable<4>(numbers<4>({samples, 2, 7, 3}, 1));
    const auto shared = Variable<4>(numbers<4>({samples, 1, 5, 3}, 1));
    CHECK(refused([&] { ch::scaled_dot_product_attention(q, memory, memory); }).find("only self-attention") < 200);
    CHECK(refused([&] { ch::scaled_dot_product_attention(q, shared, shared); }).find("one key for each") < 300);
    CHECK(refused([&] { ch::dropout(Variable<2>(numbers<2>({samples, 3}, 1)), 0.5); }).find("dropout: expected") < 99);
    CHECK(refused([&] { ch::nn::SinusoidalPositions{}(numbers<3>({samples, 7, 4}, 1)); }).find("positions of 5") < 99);
  });
  const auto few = [] {
    on_ranks(3, [](Communicator& c) { Places(ch::sequence::Ring(c), 2, std::make_shared<int>()); });
  };
  CHECK_THROWS_WITH(few(), Catch::Contains("at least one token for each of 3 ranks"));
}

}  // namespace sequence_attention_test
