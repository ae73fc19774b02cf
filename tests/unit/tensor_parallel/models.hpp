#pragma once
/// Models whose layers the tests of TensorParallel divide.

#include <chorus/nn/transformer.hpp>
#include <chorus/nn/vocabulary_embedding.hpp>
#include <cstdint>

#include "ranks.hpp"

namespace test {

/// Five heads, nine features between the linear layers and seven words: few numbers of ranks divide them.
template <class D, bool tied>
struct LanguageModel : ch::nn::Module {
  ch::nn::VocabularyParallelEmbedding<D, double> words{7, 10};
  ch::nn::TransformerEncoderLayer<D, double> first{10, {.heads = 5, .feed_forward = 9, .dropout = 0.3}};
  ch::nn::TransformerDecoderLayer<D, double> second{
      10,
      {.heads = 5,
       .feed_forward = 9,
       .dropout = 0.2,
       .activation = ch::nn::FeedForwardActivation::gelu,
       .norm_first = true}};
  ch::nn::ColumnParallelLinear<D, double> head{10, 7, {.bias = !tied}};
  LanguageModel() {
    if (tied) head.weight = words.weight;
  }
  CHORUS_MODULE(LanguageModel, words, first, second, head)
  auto forward(const ch::Tensor<std::int64_t, 2, D>& tokens) const {
    const auto x = words(tokens);
    const auto h = first(x, true);
    return ch::reshape(head(second(h, x)), ch::Shape<2>{tokens.numel(), 7});
  }
};
template <class D>
using Untied = LanguageModel<D, false>;
/// Activations between its blocks are divided.
template <class D>
struct InParts : Untied<D> {
  auto operator()(const ch::Tensor<std::int64_t, 2, D>& tokens) const {
    const auto x = ch::split_sequence(this->words(tokens));
    const auto h = ch::gather_sequence(this->second(this->first(x, true), x));
    return ch::reshape(this->head(h), ch::Shape<2>{tokens.numel(), 7});
  }
};
template <class D>
using Tied = LanguageModel<D, true>;

/// A step on 4 texts of 3 words.
template <class Net>
requires requires(Net& net) { net.module().words; }
double step(Net& net, ch::optim::Optimizer<ch::Cpu>& optimizer, std::uint32_t number, Index) {
  optimizer.zero_grad();
  auto next = labels(12, 7, number + 50);
  next.data()[5] = -100;
  const auto loss = ch::cross_entropy(net(labels(12, 7, number).view(ch::Shape<2>{4, 3})), next,
                                      {.label_smoothing = number % 2 == 0 ? 0.0 : 0.1});
  loss.backward();
  optimizer.step();
  return loss.item();
}

}  // namespace test
