/// Linear layers under TensorParallel: one device's steps, traffic, and refusals.

#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <string>

#include "ranks.hpp"

namespace {

namespace ch = chorus;
using namespace test::names;
using test::Pair, test::Shared;

TEST_CASE("TensorParallel: a pair of layers is trained as on one device, dropout included", "[tensor_parallel]") {
  for (const int ranks : {1, 2, 3, 4}) test::check_same_as_one_device<Pair<Cpu>>(ranks);
}

template <class D>
struct Recomputed : Pair<D> {
  auto forward(const auto& x) const {
    const Pair<D>* const pair = this;
    return ch::checkpoint([pair](const auto& y) { return pair->forward(y); }, x);
  }
  auto operator()(const auto& x) const { return forward(x); }
};
TEST_CASE("TensorParallel: what backward computes again is added up again", "[tensor_parallel]") {
  test::check_same_as_one_device<Recomputed<Cpu>>(3);
}

unsigned frozen = 0;  // bits of frozen layers; ranks are forked and see it
template <class D>
struct Freezing : Pair<D> {
  Freezing() {
    const auto freeze = [](const auto& layer, unsigned bit) {
      layer.weight.set_requires_grad((frozen & bit) == 0);
      layer.bias.set_requires_grad((frozen & bit) == 0);
    };
    freeze(this->first, 1);
    freeze(this->up, 2);
    freeze(this->down, 4);
  }
};
TEST_CASE("TensorParallel: LinearWithFrozenWeight, in all patterns", "[tensor_parallel]") {
  for (frozen = 1; frozen < 8; ++frozen) {
    INFO(frozen);
    test::check_same_as_one_device<Freezing<Cpu>>(2);
  }
}

TEST_CASE("TensorParallel: embedding_init, row_init, col_init: ranks begin with the unsplit layers' numbers",
          "[tensor_parallel]") {
  ch::manual_seed(5);
  Pair<Cpu> whole;
  const auto expected = test::text_of(test::values(whole));
  CHECK(common_text(3, [](const World& world) {
          ch::manual_seed(world.rank == 0 ? 5 : 6);  // rank 0's values are used
          Shared<Pair<Cpu>> rank(world, {}, Pair<Cpu>{});
          std::string text;
          rank.net.gathered([&](auto& model) { text = test::text_of(test::values(model)); });
          return text;
        }) == expected);
}

// 1 for each kept element of the columns.
struct Mask : ch::nn::Module {
  ch::nn::ColumnParallelLinear<Cpu, double> up{5, 13};
  CHORUS_MODULE(Mask, up)
  auto forward(const auto& x) const { return ch::gather_columns(ch::dropout(up(x) * 0.0 + 1.0, 0.4)); }
};
template <class Net>
std::string masks(Net& net) {
  std::string text;
  for (std::uint32_t i = 0; i < 3; ++i) text += test::text_of(net(numbers(6, 5, i)).value().to_vector());
  return text;
}
TEST_CASE("TensorParallel: parts of a mask, gathered, are one device's bits", "[tensor_parallel]") {
  ch::SingleDevice<Mask> net{make<Mask>(), 3};
  const auto expected = masks(net);
  CHECK(expected.find("0 1.6666") != std::string::npos);
  for (const int ranks : {2, 3, 4, 13})
    CHECK(common_text(ranks, [](const World& world) {
            Shared<Mask> rank(world);
            return masks(rank.net);
          }) == expected);
}

template <class Net>
std::string calls_of_a_step(Net& net, const ch::comm::AnyCommunicator& communicator) {
  const int before = test::calls(communicator);
  const auto loss = ch::cross_entropy(net(numbers(12, 5, 1)), labels(12, 3, 1));
  const int between = test::calls(communicator);
  loss.backward();
  const int compares_programs = communicator.size() > 1 ? 1 : 0;
  return ch::cat(between - before - compares_programs, " ", test::calls(communicator) - between);
}
TEST_CASE("TensorParallel: a pair of layers is one call forward and one backward", "[tensor_parallel]") {
  const auto step = [](const World& world) {
    Shared<Pair<Cpu>> rank(world, {.check_every = 0});
    return calls_of_a_step(rank.net, rank.communicator);
  };
  CHECK(common_text(3, step) == "1 1");
  CHECK(common_text(1, step) == "0 0");
  CHECK(common_text(2, [](const World& world) {  // and one more call for the comparison
          Shared<Pair<Cpu>> rank(world, {.check_every = 2});
          std::string text;
          for (int i = 0; i < 3; ++i) text += calls_of_a_step(rank.net, rank.communicator) + ";";
          return text;
        }) == "1 2;1 1;1 2;");
}

TEST_CASE("TensorParallel: a pair sends 2 (t - 1) / t of its output's bytes each way", "[tensor_parallel]") {
  for (const int ranks : {2, 3})
    CHECK(common_text(ranks, [](const World& world) {
            Shared<Pair<Cpu>> rank(world, {.check_every = 0});
            ch::trace::reset_traffic();
            calls_of_a_step(rank.net, rank.communicator);
            return ch::cat(ch::trace::bytes_sent(world.rank, ch::trace::Traffic::outputs));
          }) == ch::cat(2 * 2 * (ranks - 1) * 12 * 6 * 8 / ranks));
}

TEST_CASE("TensorParallel: the clipped norm is one device's, in both forms", "[tensor_parallel]") {
  const auto clipped = [](auto& net, auto clip) {
    std::vector<double> norms;
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (std::uint32_t i = 0; i < 5; ++i) {
      optimizer.zero_grad();
      ch::cross_entropy(net(numbers(12, 5, i)), labels(12, 3, i)).backward();
      norms.push_back(clip(net));
      norms.push_back(clip(net));
      optimizer.step();
    }
    return norms;
  };
  const auto by_function = [](auto& net) { return ch::optim::clip_grad_norm(net.parameters(), 0.1); };
  ch::SingleDevice<Pair<Cpu>> one{make<Pair<Cpu>>(), 3};
  const auto expected = clipped(one, by_function);
  REQUIRE(expected[0] > 0.2);
  CHECK(expected[1] == Approx(0.1).epsilon(1e-4));
  const auto of_ranks = [&](auto clip) {
    return test::numbers_in(common_text(3, [&](const World& world) {
      Shared<Pair<Cpu>> rank(world);
      return test::text_of(clipped(rank.net, clip));
    }));
  };
  CHECK(distance(of_ranks(by_function), expected) < 1e-9);
  CHECK(distance(of_ranks([](auto& net) { return net.clip_grad_norm(0.1); }), expected) < 1e-9);
}

struct Floats : ch::nn::Module {
  ch::nn::ColumnParallelLinear<Cpu> up{5, 13};
  ch::nn::RowParallelLinear<Cpu> down{13, 3};
  CHORUS_MODULE(Floats, up, down)
  auto forward(const auto& x) const { return down(ch::dropout(ch::relu(up(x)), 0.3)); }
};
TEST_CASE("TensorParallel: in 16 bits it comes close to one device", "[tensor_parallel]") {
  using Narrow = ch::nn::MixedPrecision<Floats, ch::bf16>;
  const auto losses = [](auto& net) {
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    std::vector<double> out;
    for (std::uint32_t i = 0; i < 10; ++i) {
      optimizer.zero_grad();
      const auto loss = ch::cross_entropy(net(ch::to<float>(numbers(12, 5, i))), labels(12, 3, i));
      loss.backward();
      optimizer.step();
      out.push_back(loss.item());
    }
    return out;
  };
  ch::manual_seed(1);
  ch::SingleDevice<Narrow> one{Narrow{}, 3};
  const auto expected = losses(one);
  CHECK(distance(test::numbers_in(common_text(2, [&](const World& world) {
          ch::manual_seed(1);
          Shared<Narrow> rank(world, {.check_every = 1}, Narrow{});
          return test::text_of(losses(rank.net));
        })), expected) < 0.02);
}

TEST_CASE("TensorParallel: a handle from before stands for this rank's part", "[tensor_parallel]") {
  CHECK(common_text(2, [](const World& world) {
          auto model = make<Pair<Cpu>>();
          const auto weight = model.up.weight;
          const auto whole = value_of(weight);
          ch::optim::Sgd optimizer{ch::nn::named_parameters<Cpu>(model), {.lr = 0.1}};
          Shared<Pair<Cpu>> rank(world, {}, std::move(model));
          test::step(rank.net, optimizer, 1, 12);
          const auto& mine = weight.on<Cpu>();
          const bool same = mine.value_data() == rank.net.module().up.weight.on<Cpu>().value_data();
          return ch::cat(same, whole.shape(), mine.extents(), mine.count() == (world.rank == 0 ? 7 : 6) * 6,
                         weight.shape()[0] == (world.rank == 0 ? 7 : 6));
        }) == "true[13, 6][13, 6]truetrue");
}

}  // namespace
