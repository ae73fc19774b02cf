// SparseRows: embeddings' gradients are sent row by row.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/parallel/hooks/sparse_rows.hpp>

#include <unit/parallel/ranks.hpp>

namespace sparse_rows_test {

using namespace test::names;
constexpr Index words = 100, width = 5;  // less than a page: no padding before it

/// T: float rows of 5 numbers end in the middle of 8 bytes.
template <class D, class T = double>
struct Words : nn::Module {
  nn::Embedding<D, T> encoder{words, width};
  nn::Linear<D, T> decoder{width, 3};
  CHORUS_MODULE(Words, encoder, decoder)
  auto forward(const auto& tokens) const { return decoder(encoder(tokens)); }
};

/// Few of the words, some of them in several samples.
Tensor<std::int64_t, 1> batch(std::uint32_t number, Index size) { return labels(size, 11, number); }

template <class Net>
std::vector<double> steps(Net& net, const World& world) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
  std::uint32_t number = 0;
  for (const Index size : {7, 12, 2, 9}) {  // for 2, the third of three ranks has none
    optimizer.zero_grad();
    const auto tokens = batch(++number, size);
    cross_entropy(net(test::share(tokens, world)), test::share(labels(size, 3, number), world)).backward();
    optimizer.step();
  }
  return test::values(net.module());
}

/// Each parameter has its own bucket, or all share one.
const DistributedDataParallelOptions alone{.first_bucket_cap_mb = 0, .bucket_cap_mb = 0}, together{};

TEST_CASE("sparse rows: the steps are those of one device, with the same bits on all ranks") {
  SingleDevice<Words<Cpu>> single{make<Words<Cpu>>(), 3};
  const auto expected = steps(single, World{});
  for (const int ranks : {1, 2, 3})
    for (const auto& options : {alone, together}) {
      const auto text = common_text(ranks, [&](const World& world) {
        Distributed<Words<Cpu>, SparseRows> rank(world, options);
        return test::text_of(steps(rank.net, world));
      });
      INFO(ranks << " ranks: " << text);
      CHECK(distance(test::numbers_in(text), expected) < rounding);
    }
}

/// Bytes that rank 0 sends for gradients in a pass over the tokens `tokens[rank]` of each rank; and the norm of the
/// averaged gradient.
template <class T>
std::vector<double> sent(const std::vector<std::vector<std::int64_t>>& tokens,
                         const DistributedDataParallelOptions& options) {
  const auto text = common_text(static_cast<int>(tokens.size()), [&](const World& world) {
    auto communicator = comm::connect(world);
    Words<Cpu, T> model;
    DistributedDataParallel<Words<Cpu, T>, SparseRows> net{std::move(model), communicator, options, 3};
    const auto& own = tokens[static_cast<std::size_t>(world.rank)];
    trace::reset_traffic();
    sum(net(Tensor<std::int64_t, 1>::from(own, {static_cast<Index>(own.size())}))).backward();
    return cat(trace::bytes_sent(world.rank, trace::Traffic::gradients), " ",
               optim::clip_grad_norm(net.parameters(), 1e9));
  });
  return test::numbers_in(text);
}

TEST_CASE("sparse rows: a bucket sends (n - 1) times the rows of its fullest rank") {
  // decoder.weight and decoder.bias, 4 rows, are sent in full: 2 (n - 1) / n of 18 numbers.
  const auto full = [](std::size_t n, std::size_t bytes) {
    return static_cast<double>(2 * (n - 1) * 18 * bytes) / static_cast<double>(n);
  };
  CHECK(sent<double>({{3, 3, 7}, {99, 0, 7}}, alone)[0] == full(2, 8) + 3 * (8 + 5 * 8));
  CHECK(sent<double>({{3, 3, 7}, {1}, {5, 5}}, alone)[0] == full(3, 8) + 2 * 2 * (8 + 5 * 8));
  CHECK(sent<float>({{3, 3, 7}, {99, 0, 7}}, alone)[0] == full(2, 4) + 3 * 8 + 64);  // 60 rounded up
  // In one bucket with the embedding, the decoder's rows are listed, too.
  CHECK(sent<double>({{3, 3, 7}, {99, 0, 7}}, together)[0] == 7 * 8 + (3 * 5 + 18) * 8);
}

TEST_CASE("sparse rows: where most rows are in use, an all-reduce carries them") {
  std::vector<std::int64_t> all;
  for (std::int64_t i = 0; i < words; ++i) all.push_back(i);
  CHECK(sent<double>({all, {1}}, together)[0] == (words * width + 18) * 8);
}

TEST_CASE("sparse rows: what is not a number goes to all ranks") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Words<Cpu>, SparseRows> rank(world, alone);
    const auto loss = sum(rank.net(test::share(batch(1, 4), world)));
    (loss * (world.rank == 1 ? NAN : 1)).backward();
    int bad = 0;
    for (const double x : test::gradients(rank.net.module())) bad += std::isnan(x);
    return cat(bad > 0, " ", bad);
  });
  CHECK(text.substr(0, 5) == "true ");
}

}  // namespace sparse_rows_test
