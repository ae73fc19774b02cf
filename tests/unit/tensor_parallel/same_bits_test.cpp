/// SameBits under TensorParallel and in meshes with it: the bits of one device, and of DistributedDataParallel, in real
/// processes.

#include <catch.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/models/gpt.hpp>
#include <chorus/nn/transformer.hpp>
#include <chorus/nn/vocabulary_embedding.hpp>
#include <chorus/optim/layerwise.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/same_bits.hpp>
#include <chorus/same_bits/mesh.hpp>
#include <chorus/same_bits/tensor_parallel.hpp>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ranks.hpp"

namespace tensor_same_bits_test {

namespace ch = chorus;
namespace nn = ch::nn;
using namespace test::names;

/// Words whose table is the head's weight, too: [texts, length] -> the loss of the words after them.
struct Language : nn::Module {
  nn::VocabularyParallelEmbedding<Cpu> words{16, 24};
  nn::TransformerEncoderLayer<Cpu> first{24, {.heads = 8, .feed_forward = 40, .dropout = 0.3}};
  nn::TransformerDecoderLayer<Cpu> second{24,
                                          {.heads = 8,
                                           .feed_forward = 48,
                                           .dropout = 0.2,
                                           .activation = nn::FeedForwardActivation::gelu,
                                           .norm_first = true}};
  nn::LayerNorm<Cpu> norm{24};
  CHORUS_MODULE(Language, words, first, second, norm)
  auto forward(const ch::Tensor<std::int64_t, 2>& tokens, const ch::Tensor<std::int64_t, 2>& next) const {
    const auto x = words(tokens);
    const auto h = norm(second(first(x, true), x));
    return ch::cross_entropy(words.scores(ch::reshape(h, ch::Shape<2>{tokens.numel(), 24})),
                             next.view(ch::Shape<1>{next.numel()}), {.label_smoothing = 0.1});
  }
};
/// The scores of a GPT, whose products of query, key and value are one.
struct Gpt : nn::Module {
  nn::GPT<Cpu> gpt{{.vocab_size = 16, .n_positions = 6, .n_embd = 24, .n_layer = 2, .n_head = 8, .checkpoint = true}};
  CHORUS_MODULE(Gpt, gpt)
  auto forward(const ch::Tensor<std::int64_t, 2>& tokens, const ch::Tensor<std::int64_t, 2>& next) const {
    return ch::cross_entropy(ch::reshape(gpt(tokens), ch::Shape<2>{tokens.numel(), 16}),
                             next.view(ch::Shape<1>{next.numel()}));
  }
};
/// The same in stages, with its loss outside.
struct Stacked : nn::GPT<Cpu> {
  Stacked() : GPT({.vocab_size = 16, .n_positions = 6, .n_embd = 24, .n_layer = 2, .n_head = 8}) {}
};
/// Leaves of more than one piece, and columns that are gathered.
struct Wide : nn::Module {
  nn::VocabularyParallelEmbedding<Cpu> words{16, 8};
  nn::ColumnParallelLinear<Cpu> up{8, 2400};
  nn::RowParallelLinear<Cpu> down{2400, 24};
  nn::ColumnParallelLinear<Cpu> head{24, 24};
  nn::Dropout inner{0.4};
  CHORUS_MODULE(Wide, words, up, down, head, inner)
  auto forward(const ch::Tensor<std::int64_t, 2>& tokens, const ch::Tensor<std::int64_t, 2>& next) const {
    const auto scores = ch::gather_columns(head(ch::tanh(down(inner(ch::gelu(up(words(tokens))))))));
    return ch::cross_entropy(ch::reshape(scores, ch::Shape<2>{tokens.numel(), 24}),
                             next.view(ch::Shape<1>{next.numel()}));
  }
};

template <class Model>
Model filled() {
  Model model;
  std::uint32_t number = 0;
  for (const auto& named : nn::named_parameters<Cpu>(model)) {
    auto* const to = static_cast<float*>(named.parameter->memory());
    const auto values = numbers(named.parameter->count(), 1, ++number);
    for (Index i = 0; i < named.parameter->count(); ++i) to[i] = static_cast<float>(0.3 * values.data()[i]);
  }
  return model;
}

/// Three clipped steps of Adam on 9 texts, of which a rank has rows [begin, end): the norms, a loss without a tape, and
/// the parameters' hash.
template <class Net>
std::string trained(Net& net, Index begin = 0, Index end = 9) {
  ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
  const auto texts = [&](std::uint32_t key) {
    return labels(9 * 5, 16, key).view(ch::Shape<2>{9, 5}).slice(0, begin, end);
  };
  std::string text;
  for (std::uint32_t i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(net.module())>, Stacked>)
      ch::cross_entropy(ch::reshape(net(texts(i)), ch::Shape<2>{-1, 16}), texts(i + 50).view(ch::Shape<1>{-1}))
          .backward();
    else
      net(texts(i), texts(i + 50)).backward();
    text += ch::cat(ch::optim::clip_grad_norm(net.parameters(), 0.5), " ");
    optimizer.step();
  }
  return text + ch::io::parameters_sha256(net);
}
template <class Cut>
std::string on_one(int shares) {
  ch::SingleDevice<ch::SameBits<Cut>> net{ch::SameBits{filled<Cut>(), shares}, 3};
  return trained(net);
}
template <class Model>
std::string shared(int ranks, int shares) {
  return common_text(ranks, [shares](const World& world) {
    auto communicator = comm::connect(world);
    ch::TensorParallel<ch::SameBits<Model>> net{
        ch::SameBits{filled<Model>(), shares}, communicator, {.check_every = 1}, 3};
    return trained(net);
  });
}
/// The same by device `i` of `n` that have other texts.
template <class Net>
std::string trained_part(Net& net, int n, int i) {
  const auto shares = static_cast<std::size_t>(net.canonical_shares());
  const auto run = ch::same_bits::shares_of_device(shares, static_cast<std::size_t>(n), static_cast<std::size_t>(i));
  return trained(net, ch::share_begin(9, shares, run.begin), ch::share_begin(9, shares, run.end));
}
template <class Model>
std::string in_batches(int ranks, int shares) {
  return common_text(ranks, [shares](const World& world) {
    auto communicator = comm::connect(world);
    ch::DistributedDataParallel<ch::SameBits<Model>> net{ch::SameBits{filled<Model>(), shares}, communicator, {}, 3};
    return trained_part(net, world.size, world.rank);
  });
}
template <class Model, class... Axes>
std::string meshed(int ranks) {
  return common_text(ranks, [](const World& world) {
    auto communicator = comm::connect(world);
    ch::Mesh<ch::SameBits<Model>, Axes...> net{ch::SameBits{filled<Model>(), 8}, communicator, world,
                                               {.check_every = 1}, 3};
    return trained_part(net, net.shares(), net.place()[1] * net.sizes()[2] + net.place()[2]);
  });
}

TEST_CASE("SameBits: TensorParallel on 1, 2, 4 and 8 ranks has the bits of one device", "[tensor_parallel]") {
  const auto expected = on_one<Language>(8);
  CHECK(in_batches<Language>(2, 8) == expected);
  for (const int ranks : {1, 2, 4, 8}) CHECK(shared<Language>(ranks, 8) == expected);
  CHECK(on_one<Language>(4) != expected);
}

TEST_CASE("SameBits: TensorParallel has the bits of one device for GPT and for wide layers", "[tensor_parallel]") {
  const auto gpt = on_one<Gpt>(8);
  for (const int ranks : {2, 4}) CHECK(shared<Gpt>(ranks, 8) == gpt);
  CHECK(in_batches<Gpt>(3, 8) == gpt);
  const auto wide = on_one<Wide>(8);
  for (const int ranks : {2, 4}) CHECK(shared<Wide>(ranks, 8) == wide);
  CHECK(shared<Wide>(3, 6) == on_one<Wide>(6));  // two leaves each
}

TEST_CASE("SameBits: meshes of Pipe, Data, Shard and Tensor have the bits of one device", "[tensor_parallel]") {
  namespace mesh = ch::mesh;
  CHECK(meshed<Gpt, mesh::Data<2>, mesh::Tensor<2>>(4) == on_one<Gpt>(8));
  CHECK(meshed<Gpt, mesh::Data<3>, mesh::Tensor<2>>(6) == on_one<Gpt>(8));
  CHECK(meshed<Language, mesh::Shard<2>, mesh::Tensor<2>>(4) == on_one<Language>(8));
  const auto stacked = on_one<Stacked>(8);
  CHECK(meshed<Stacked, mesh::Pipe<2>, mesh::Tensor<2>>(4) == stacked);
  CHECK(meshed<Stacked, mesh::Pipe<2>, mesh::Data<2>, mesh::Tensor<2>>(8) == stacked);
}

// The common error of all ranks, in the passes of `use(net)`.
template <class Model, class Use>
std::string refusal(int ranks, int shares, const Use& use) {
  return common_text(ranks, [&](const World& world) {
    auto communicator = comm::connect(world);
    return message_of<UsageError>([&] {
      ch::TensorParallel<ch::SameBits<Model>> net{
          ch::SameBits{filled<Model>(), shares}, communicator, {.check_every = 1}, 3};
      use(net);
    });
  });
}
struct Own : Wide {
  auto forward(const ch::Tensor<std::int64_t, 2>& tokens, const ch::Tensor<std::int64_t, 2>& next) const {
    return Wide::forward(tokens, next) + ch::mean(ch::copy<ch::axis::Tensor>(down.bias).part());
  }
};
struct OfRank : Gpt {
  auto forward(const ch::Tensor<std::int64_t, 2>& tokens, const ch::Tensor<std::int64_t, 2>& next) const {
    return Gpt::forward(tokens, next) * static_cast<float>(1 + ch::tensor_group()->rank());
  }
};
struct Adapted : nn::Module {
  nn::GPT<Cpu> gpt{{.vocab_size = 16, .n_positions = 6, .n_embd = 24, .n_layer = 1, .n_head = 8, .lora_rank = 2}};
  CHORUS_MODULE(Adapted, gpt)
  auto forward(const auto& tokens, const auto& next) const {
    return ch::cross_entropy(ch::reshape(gpt(tokens), ch::Shape<2>{tokens.numel(), 16}),
                             next.view(ch::Shape<1>{next.numel()}));
  }
};
struct Synced : Wide {
  nn::SyncBatchNorm<Cpu> norm{4};
  CHORUS_MODULE(Synced, words, up, down, head, inner, norm)
};

TEST_CASE("SameBits: TensorParallel refuses what would not be one device's", "[tensor_parallel]") {
  const auto step = [](auto& net) {
    net(labels(40, 16, 1).view(ch::Shape<2>{8, 5}), labels(40, 16, 2).view(ch::Shape<2>{8, 5})).backward();
  };
  CHECK_THAT(refusal<Wide>(3, 8, step),
             Contains("ColumnParallelLinear: SameBits of 8 shares adds up 2400 units in 8 equal leaves, and each") &&
                 Contains("expected a number of ranks out of 1, 2, 4, 8, got 3;"));
  CHECK_THAT(refusal<Gpt>(2, 9, step), Contains("GPTAttention: SameBits of 9 shares adds up 8 units in 1 equal"));
  CHECK_THAT(refusal<Own>(2, 8, step), Contains("SameBits knows the order of sums over ranks in ColumnParallelLinear"));
  CHECK_THAT(refusal<Adapted>(2, 8, step), Contains("not in LoRA, copy or all_reduce"));
  CHECK_THAT(refusal<OfRank>(2, 8, step), Contains("rank 1 has a different gradient of 'gpt."));
  CHECK_THAT(refusal<Synced>(2, 8, step), Contains("SyncBatchNorm, needs the whole batch"));
  CHECK_THAT(refusal<Wide>(2, 0, step), Contains("SameBits: expected 1 to 64 shares, got 0"));
  CHECK_THAT(refusal<Wide>(2, 8,
                           [&](auto& net) {
                             ch::optim::Lamb optimizer{net.parameters(), {.lr = 0.1}};
                             step(net);
                             optimizer.step();
                           }),
             Contains("SameBits: ranks have pieces of parameters"));
}

}  // namespace tensor_same_bits_test
