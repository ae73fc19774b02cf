/// Transformers under TensorParallel: heads, features, and words of the vocabulary are divided.

#include "models.hpp"

#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/ops/reduction.hpp>

#include "../comm/nccl_carrier.hpp"

#if CHORUS_USE_GLOO
#include <chorus/comm/gloo.hpp>
#endif

namespace {

namespace ch = chorus;
using namespace test::names;
using test::Shared, test::Tied, test::Untied;

TEST_CASE("TensorParallel: transformers are trained as on one device", "[tensor_parallel]") {
  for (const int ranks : {2, 3, 4}) test::check_same_as_one_device<Untied<Cpu>>(ranks);
}

TEST_CASE("TensorParallel: a table and a head with one weight are trained as on one device", "[tensor_parallel]") {
  for (const int ranks : {2, 3}) test::check_same_as_one_device<Tied<Cpu>>(ranks);
}

TEST_CASE("TensorParallel: with sequences shared out, too, transformers are trained as on one device",
          "[tensor_parallel]") {
  for (const int ranks : {2, 3, 4}) test::check_same_as_one_device<Untied<Cpu>, ch::SequenceSplit>(ranks);
  test::check_same_as_one_device<test::InParts<Cpu>, ch::SequenceSplit>(2);
}

TEST_CASE("TensorParallel: over NCCL's stand-in and gloo as over shared memory", "[tensor_parallel]") {
  test::NcclCarrier::register_it(/*host_computes=*/true);
  test::check_same_as_one_device<Untied<Cpu>>(3, 1e-9, comm::Backend::nccl);
#if CHORUS_USE_GLOO
  test::check_same_as_one_device<Untied<Cpu>>(3, 1e-9, comm::Backend::gloo);
#endif
}

// The bytes of outputs that a rank sends in a step through a block, and its calls. A: the bytes of [batch, length,
// features].
struct Block : ch::nn::Module {
  ch::nn::Linear<Cpu, double> in{6, 6};
  ch::nn::TransformerEncoderLayer<Cpu, double> block{6, {.heads = 6}};
  CHORUS_MODULE(Block, in, block)
  auto forward(const auto& x) const { return block(in(x)); }
};
TEST_CASE("TensorParallel: a block sends 8 (t - 1) / t A, in 2 + 2 calls", "[tensor_parallel]") {
  for (const int ranks : {2, 3})
    CHECK(common_text(ranks, [](const World& world) {
            Shared<Block> rank(world, {.check_every = 0});
            const auto x = numbers(12, 6, 1).view(ch::Shape<3>{2, 6, 6});
            ch::trace::reset_traffic();
            const int before = test::calls(rank.communicator);
            const auto y = ch::sum(rank.net(x));  // before it ranks compare their programs, in one call
            const int between = test::calls(rank.communicator);
            y.backward();
            return ch::cat(ch::trace::bytes_sent(world.rank, ch::trace::Traffic::outputs), " ", between - before - 1,
                           " ", test::calls(rank.communicator) - between);
          }) == ch::cat(8 * (ranks - 1) * 2 * 6 * 6 * 8 / ranks, " 2 2"));
}

struct BlockInParts : Block {
  auto operator()(const auto& x) const { return ch::gather_sequence(block(ch::split_sequence(in(x)))); }
};
TEST_CASE("TensorParallel: a block of a sequence in parts sends as much, in reduce-scatters and all-gathers",
          "[tensor_parallel]") {
  constexpr int features = 6, all = 2 * 6 * features * 8, parameters = (4 + 2) * features * 8;
  for (const int ranks : {2, 3})
    CHECK(common_text(ranks, [](const World& world) {
            Shared<BlockInParts, ch::SequenceSplit> rank(world, {.check_every = 0});
            const auto x = numbers(12, features, 1).view(ch::Shape<3>{2, 6, features});
            ch::trace::reset_traffic();
            const int before = test::calls(rank.communicator);
            const auto y = ch::sum(rank.net(x));  // before it ranks compare their programs, in one call
            const int between = test::calls(rank.communicator);
            y.backward();
            return ch::cat(ch::trace::bytes_sent(world.rank, ch::trace::Traffic::outputs), " ", between - before - 1,
                           " ", test::calls(rank.communicator) - between);
            // 8 in the block, 2 at the borders of divided parts, plus the summed gradients of norms and biases.
          }) == ch::cat(((8 + 2) * all + 2 * parameters) * (ranks - 1) / ranks, " 5 11"));
}

// Classes that ranks divide, and functions of their scores.
struct Classes : ch::nn::Module {
  ch::nn::ColumnParallelLinear<Cpu, double> head{5, 7};
  CHORUS_MODULE(Classes, head)
  auto forward(const auto& x) const { return head(x) * 30.0; }
};
template <class Net>
std::string losses(Net& net) {
  auto next = labels(12, 7, 3);
  next.data()[2] = 6;
  next.data()[7] = 4;
  const auto x = numbers(12, 5, 1);
  std::vector<double> all;
  const auto note = [&](const auto& loss) {
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
    const auto total = ch::sum(loss);
    total.backward();
    all.push_back(total.item());
    all.push_back(net.clip_grad_norm(1e9));
  };
  note(ch::cross_entropy(net(x), next));
  note(ch::cross_entropy(net(x), next, {.ignore_index = 4, .reduction = ch::Reduction::sum}));
  note(ch::cross_entropy(net(x), next, {.label_smoothing = 0.3, .mean_over = 40}));
  note(ch::cross_entropy_per_sample(net(x), next, {.ignore_index = 6}) * next.numel());
  return test::text_of(all);
}
struct One : ch::SingleDevice<Classes> {
  using SingleDevice::SingleDevice;
  double clip_grad_norm(double most) const { return ch::optim::clip_grad_norm(parameters(), most); }
};
TEST_CASE("TensorParallel: vocab_parallel_cross_entropy, with all options", "[tensor_parallel]") {
  One one{make<Classes>(), 3};
  const auto expected = test::numbers_in(losses(one));
  REQUIRE(expected.size() == 8);
  for (const int ranks : {2, 3, 7})
    CHECK(distance(test::numbers_in(common_text(ranks, [](const World& world) {
            Shared<Classes> rank(world);
            return losses(rank.net);
          })), expected) < test::rounding);
  CHECK(common_text(2, [](const World& world) {  // a call for the largest scores, and one for three sums per sample
          Shared<Classes> rank(world, {.check_every = 0});
          const auto scores = rank.net(numbers(12, 5, 1));
          const int before = test::calls(rank.communicator);
          ch::trace::reset_traffic();
          ch::cross_entropy(scores, labels(12, 7, 3)).backward();
          return ch::cat(test::calls(rank.communicator) - before, " ",
                         ch::trace::bytes_sent(world.rank, ch::trace::Traffic::outputs));
        }) == ch::cat("2 ", (1 + 3) * 12 * 8));
}

}  // namespace
