#pragma once
/// Models of texts, and training steps, for the tests of ranks that share the tokens of each sample.

#include <chorus/nn/chain.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/positions.hpp>
#include <chorus/nn/transformer.hpp>
#include <chorus/parallel/sequence_parallel.hpp>
#include <string>
#include <unit/parallel/ranks.hpp>
#include <vector>

namespace test {

/// x: [batch, length, 8] -> with positions and dropout.
struct Placed : ch::nn::Module {
  ch::nn::LearnedPositions<ch::Cpu, double> places{16, 8};
  CHORUS_MODULE(Placed, places)
  auto forward(const auto& x) const { return ch::dropout(places(x), 0.1, training()); }
};
template <bool first>
struct Causal : ch::nn::Module {
  ch::nn::TransformerEncoderLayer<ch::Cpu, double> layer{
      8, {.heads = 2, .feed_forward = first ? 12 : 0, .dropout = 0.2, .norm_first = !first}};
  CHORUS_MODULE(Causal, layer)
  auto forward(const auto& x) const { return layer(x, true); }
};
/// The scores [batch * length, words]; with targets the loss, with a penalty.
struct TextHead : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, double> fc{8, 7};
  CHORUS_MODULE(TextHead, fc)
  auto forward(const auto& x) const { return ch::reshape(fc(x), ch::Shape<2>{x.size(0) * x.size(1), 7}); }
  auto forward(const auto& x, const ch::Tensor<std::int64_t, 2>& targets) const {
    const auto loss = ch::cross_entropy(forward(x), targets.view(ch::Shape<1>{targets.numel()}));
    return loss + ch::sum(ch::square(fc.weight)) * 0.01;
  }
};
struct Text : ch::nn::Module {
  ch::nn::Embedding<ch::Cpu, double> words{7, 8};
  Placed places;
  Causal<true> first;
  Causal<false> second;
  TextHead head;
  CHORUS_MODULE(Text, words, places, first, second, head)
  CHORUS_PIPELINE(words, places, first, second, head)
};

/// Batch `number`: `samples` texts of 9 to 11 words, and the next words, of which some don't count: in every third
/// batch all but the first and the last one of each text.
struct Texts {
  ch::Tensor<std::int64_t, 2> tokens, targets;
  Texts(std::uint32_t number, Index samples) {
    const Index length = 9 + number % 3;
    tokens = labels(samples * length, 7, number).view(ch::Shape<2>{samples, length});
    targets = labels(samples * length, 7, number + 50).view(ch::Shape<2>{samples, length});
    for (Index i = 0; i < samples * length; ++i)
      if (number % 3 == 1 ? i % length != 0 && i % length != length - 1 : i % 5 == 0) targets.data()[i] = -100;
  }
};

/// The targets that count.
inline Index own_count(const Texts& batch) {
  return batch.targets.numel() - std::count(batch.targets.data(), batch.targets.data() + batch.targets.numel(), -100);
}

/// This rank's part of the labels, as a list.
template <class Net>
ch::Tensor<std::int64_t, 1> own_labels(const Net& net, const ch::Tensor<std::int64_t, 2>& targets) {
  auto mine = targets;
  if constexpr (requires { net.stretch(targets); }) mine = net.stretch(targets);
  return mine.view(ch::Shape<1>{mine.numel()});
}

/// Seven steps; in the last one the loss is outside of the model. Returns the losses and norms, with one of an
/// evaluation, then the parameters. `texts(number)`: this rank's share of a batch.
template <class Net, class MakeTexts>
std::vector<double> text_training(Net& net, const MakeTexts& texts) {
  ch::optim::AdamW<ch::Cpu> optimizer{net.parameters(), {.lr = 0.02, .weight_decay = 0.01}};
  std::vector<double> out;
  for (std::uint32_t i = 0; i < 7; ++i) {
    const auto batch = texts(i);
    optimizer.zero_grad();
    if (i < 6) {
      const auto loss = net(batch.tokens, batch.targets);
      out.push_back(net.mean(loss.item(), own_count(batch)));
      loss.backward();
    } else {
      ch::cross_entropy(net(batch.tokens), own_labels(net, batch.targets)).backward();
    }
    out.push_back(net.clip_grad_norm(0.5));
    optimizer.step();
  }
  const ch::NoGrad no_grad;
  net.eval();
  const auto batch = texts(1);
  out.push_back(net.mean(net(batch.tokens, batch.targets).item(), own_count(batch)));
  return out;
}

/// One device's.
inline std::vector<double> text_alone(Index samples) {
  ch::SingleDevice<Text> net{make<Text>(), 3};
  auto out = text_training(net, [&](std::uint32_t number) { return Texts(number, samples); });
  const auto last = values(net.module());
  out.insert(out.end(), last.begin(), last.end());
  return out;
}

}  // namespace test
