/// What TensorParallel refuses because it would not be one device's result.

#include "models.hpp"

#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/optim/lbfgs.hpp>
#include <cstdio>
#include <string>

namespace {

namespace ch = chorus;
using namespace test::names;
using test::Pair, test::Shared;

// The common error of all ranks.
template <class Model>
std::string refusal(int ranks, Model model = Model{}) {
  return common_text(ranks, [&](const World& world) {
    return message_of<UsageError>([&] { Shared<Model> rank(world, {}, ch::nn::copy_of(model)); });
  });
}

struct Whole : ch::nn::Module {
  ch::nn::Linear<Cpu, double> fc{5, 3};
  CHORUS_MODULE(Whole, fc)
  auto forward(const auto& x) const { return fc(x); }
};
struct HalfTied : ch::nn::Module {
  ch::nn::VocabularyParallelEmbedding<Cpu, double> words{7, 4};
  ch::nn::Linear<Cpu, double> head{4, 7};
  HalfTied() { head.weight = words.weight; }
  CHORUS_MODULE(HalfTied, words, head)
  auto forward(const auto& x) const { return head(words(x)); }
};
struct TiedAcross : ch::nn::Module {
  ch::nn::ColumnParallelLinear<Cpu, double> up{4, 4};
  ch::nn::RowParallelLinear<Cpu, double> down{4, 4};
  TiedAcross() { down.weight = up.weight; }
  CHORUS_MODULE(TiedAcross, up, down)
  auto forward(const auto& x) const { return down(up(x)); }
};
struct ByHeads : ch::nn::Module {
  ch::nn::MultiheadAttention<Cpu, double> attention{6, 2};
  CHORUS_MODULE(ByHeads, attention)
  auto forward(const auto& x) const { return attention(x, x, x); }
};

TEST_CASE("TensorParallel refuses models that it cannot share out", "[tensor_parallel]") {
  CHECK_THAT(refusal<Whole>(2), Contains("TensorParallel: the model has no layer that can be split: expected Column"));
  CHECK(refusal<Whole>(1) == "nothing");
  CHECK_THAT(refusal<HalfTied>(2), Contains("'words.weight' and 'head.weight' are one parameter, which the first"));
  CHECK_THAT(refusal<TiedAcross>(2), Contains("'up.weight' and 'down.weight' are one parameter, which their layers"));
  CHECK_THAT(refusal<ByHeads>(3), Contains("'attention.in_proj_weight' has 2 units of 3 along axis 0, which 3 ranks"));
  CHECK_THAT(refusal<TiedAcross>(5,
                                 [] {
                                   TiedAcross model;
                                   model.down = ch::nn::RowParallelLinear<Cpu, double>(4, 4);
                                   return model;
                                 }()),
             Contains("'up.weight' has 4 entries along axis 0, which 5 ranks can't split: each rank needs one"));
  CHECK(common_text(2,
                    [](const World& world) {
                      return message_of<UsageError>([&] {
                        auto model = make<Pair<Cpu>>();
                        model.up.weight.set_requires_grad(world.rank == 0);
                        Shared<Pair<Cpu>> rank(world, {}, std::move(model));
                      });
                    }) ==
        "TensorParallel: expected one model: rank 1 has up.weight F64 [13, 6], frozen, where rank 0 has up.weight F64 "
        "[13, 6]");
  CHECK_THAT(common_text(2,
                         [](const World& world) {
                           return message_of<UsageError>([&] { Shared<Pair<Cpu>> rank(world, {.check_every = -1}); });
                         }),
             Contains("expected dim and check_every of at least 0, got 0 and -1"));
  CHECK_THAT(common_text(2,
                         [](const World& world) {
                           Shared<Pair<Cpu>> rank(world);
                           return message_of<UsageError>([&] {
                             ch::TensorParallel<Pair<Cpu>> again{ch::nn::copy_of(rank.net.module()), rank.communicator};
                           });
                         }),
             Contains("'up.weight' is already split"));
}

TEST_CASE("TensorParallel: what needs whole parameters refuses parts", "[tensor_parallel]") {
  const auto says = [](const auto& call) {
    return common_text(2, [&](const World& world) {
      Shared<Pair<Cpu>> rank(world);
      auto& net = rank.net;
      ch::cross_entropy(net(numbers(4, 5, 1)), labels(4, 3, 1)).backward();
      return message_of<UsageError>([&] { call(net); });
    });
  };
  const std::string part = " is split over ranks, and this rank has a part: ",
                    shared = "'up.weight' is split by TensorParallel, and this rank has a part",
                    up = "'up.weight'" + part, down = "'down.weight'" + part;
  CHECK_THAT(says([](auto& net) { net.module()(numbers(4, 5, 1)); }),
             Contains("ColumnParallelLinear: its 13 entries are split over ranks, and this rank has a part: call"));
  CHECK_THAT(says([](auto& net) { ch::nn::copy_of(net.module())(numbers(4, 5, 1)); }),
             Contains("call the net, not its module()"));
  CHECK_THAT(says([](auto& net) { ch::io::save(net.module(), "never"); }), Contains(shared));
  CHECK_THAT(says([](auto& net) {
               Pair<Cpu> whole;
               const std::string path = ch::cat("tensor_parallel_", getpid(), ".refused");
               ch::io::save(whole, path);
               const auto text = message_of<UsageError>([&] { ch::io::load(net.module(), path); });
               std::remove(path.c_str());
               ch::fail<UsageError>(text);
             }), Contains(shared));
  CHECK_THAT(says([](auto& net) { ch::io::parameters_sha256(net.module()); }), Contains(up + "all ranks call it with the net"));
  CHECK_THAT(says([](auto& net) { ch::optim::Lbfgs{net.parameters()}; }), Contains(down + "it needs whole parameters"));
}

// Parameters that ranks have whole get different gradients.
struct OfRank : Pair<Cpu> {
  auto operator()(const auto& x) const {
    return Pair<Cpu>::forward(x) * (ch::tensor_group() ? 1.0 + ch::tensor_group()->rank() : 1.0);
  }
};
TEST_CASE("TensorParallel: gradients that should be the same and aren't are named", "[tensor_parallel]") {
  CHECK_THAT(common_text(3, [](const World& world) {
               Shared<OfRank> rank(world);
               return message_of<UsageError>([&] {
                 ch::cross_entropy(rank.net(numbers(12, 5, 1)), labels(12, 3, 1)).backward();
               });
             }), Contains("rank 1 has a different gradient of 'last.bias' than rank 0: expected the same bits"));
  CHECK_THAT(common_text(2, [](const World& world) {  // a share of the batch in place of the whole
               Shared<Pair<Cpu>> rank(world);
               return message_of<UsageError>([&] {
                 const auto key = static_cast<std::uint32_t>(world.rank);
                 ch::cross_entropy(rank.net(numbers(12, 5, key)), labels(12, 3, key)).backward();
               });
             }), Contains("Use the same batch on all ranks (net.sampler)"));
}

struct OtherUnits : ch::nn::Module {
  ch::nn::ColumnParallelLinear<Cpu, double> up{5, 12, {.unit = 4}};
  ch::nn::RowParallelLinear<Cpu, double> down{12, 3};
  CHORUS_MODULE(OtherUnits, up, down)
  auto forward(const auto& x) const { return down(up(x)); }
};
TEST_CASE("TensorParallel: columns that don't fit together are refused", "[tensor_parallel]") {
  const auto in_net = [](auto model, const auto& use) {
    return common_text(2, [&](const World& world) {
      Shared<decltype(model)> rank(world, {}, ch::nn::copy_of(model));
      return message_of<ch::Error>([&] { use(rank.net); });
    });
  };
  CHECK_THAT(in_net(OtherUnits{}, [](auto& net) { net(numbers(4, 5, 1)); }),
             Contains("RowParallelLinear: expected columns in units of 1, got units of 4"));
  CHECK_THAT(message_of<ShapeError>([] {
               ch::nn::RowParallelLinear<Cpu, double>{4, 3}(ch::nn::ColumnParallelLinear<Cpu, double>{5, 6}(
                   numbers(2, 5, 1)));
             }), Contains("RowParallelLinear: expected 4 columns, got 6"));
  const ch::nn::ColumnParallelLinear<Cpu, double> six{5, 6}, eight{5, 8};
  const auto x = numbers(2, 5, 1);
  CHECK_THAT(message_of<ShapeError>([&] { six(x) + eight(x); }), Contains("are split in different ways"));
  CHECK_THAT(message_of<ShapeError>([&] {
               ch::reshape(six(x), ch::Shape<2>{4, 3});
             }),
             Contains("reshape: split columns must stay the last axis: expected 6 as its size"));
  CHECK_THAT(message_of<ShapeError>([&] { ch::Columns<ch::Tensor<double, 2>>(x, 6); }),
             Contains("Columns: expected 6 of 6 columns, got shape [2, 5]"));
  CHECK_THAT(message_of<ShapeError>([] { ch::nn::ColumnParallelLinear<Cpu>(5, 6, {.unit = 4}); }),
             Contains("units of 4 do not divide 6 outputs"));
  CHECK_THAT(message_of<ShapeError>([] { ch::nn::RowParallelLinear<Cpu>(6, 5, {.unit = 4}); }),
             Contains("units of 4 do not divide 6 inputs"));
}

TEST_CASE("TensorParallel: backward after the policy has gone is refused", "[tensor_parallel]") {
  CHECK_THAT(common_text(2,
                         [](const World& world) {
                           ch::Variable<double, 0> loss;
                           {
                             Shared<Pair<Cpu>> rank(world);
                             loss = ch::cross_entropy(rank.net(numbers(12, 5, 1)), labels(12, 3, 1));
                           }
                           return message_of<UsageError>([&] { loss.backward(); });
                         }),
             Contains("TensorParallel: the policy that ran the forward pass was destroyed"));
}

TEST_CASE("TensorParallel: words beyond the vocabulary are refused on all ranks", "[tensor_parallel]") {
  using Model = test::Untied<Cpu>;
  const auto says = [](std::int64_t word, std::int64_t label) {
    return common_text(2, [&](const World& world) {
      Shared<Model> rank(world);
      auto words = labels(12, 7, 1), next = labels(12, 7, 2);
      words.data()[3] = word;
      next.data()[3] = label;
      return message_of<UsageError>([&] { ch::cross_entropy(rank.net(words.view(ch::Shape<2>{4, 3})), next); });
    });
  };
  CHECK(says(7, 1) == "embedding: index 7 is not in [0, 7)");
  CHECK_THAT(says(1, 7), Contains("cross_entropy: label 7 of sample 3 is not in [0, 7)"));
}

TEST_CASE("TensorParallel: a rank that throws ends the others", "[tensor_parallel]") {
  test::Ranks ranks(2, [](const World& world) -> std::string {
    Shared<Pair<Cpu>> rank(world);
    if (world.rank == 0) throw std::runtime_error("lost");
    rank.net(numbers(12, 5, 1));
    return "went on";
  });
  CHECK_THAT(ranks.outcome(1).text, Contains("rank 0 gave up: it threw an exception in the middle of a step"));
}

}  // namespace
