/// Trains a net on texts of several lengths under the policy that --policy names, and prints the losses, which are
/// those of any other one. A target network follows it, whose accuracy on all samples comes last.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/data/weighted_sampler.hpp>
#include <chorus/nn/weights.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <chorus/parallel/scores.hpp>
#include <cstdio>
#include <vector>

namespace ch = chorus;

namespace {

struct Sentence {
  std::vector<std::int64_t> tokens;
  std::int64_t label;
};

/// tokens: [samples, time] -> [samples, 3]. Padding counts: the length has to be the same on all ranks.
template <class Device>
struct Bag : ch::nn::Module {
  ch::nn::Embedding<Device> embedding{12, 8};
  ch::nn::Dropout dropout{0.1};
  ch::nn::Linear<Device> fc{8, 3};
  CHORUS_MODULE(Bag, embedding, dropout, fc)
  auto forward(const auto& tokens) const { return fc(dropout(ch::sum(embedding(tokens), 1))); }
};

}  // namespace

int main(int argc, char** argv) {
  return ch::launch_any<Bag<ch::Cpu>>(argc, argv, []<class Net>(ch::Run& run) {
    std::vector<Sentence> sentences;
    std::vector<double> weights;
    for (std::int64_t i = 0; i < 36; ++i) {
      sentences.push_back({std::vector<std::int64_t>(static_cast<std::size_t>(1 + i % 5), 1 + i % 11), i % 11 % 3});
      weights.push_back(static_cast<double>(1 + i % 4));
    }
    const ch::data::VectorDataset all{std::move(sentences)};
    const Bag<ch::Cpu> model;
    Net net{ch::nn::copy_of(model), run}, target{ch::nn::copy_of(model), run};
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    // The last batch has one sample: on several ranks some have an empty share.
    ch::data::DataLoader loader{
        all, ch::data::WeightedRandomSampler{net.sampler(all), weights}, {.batch = 7}, ch::data::pad_to_longest()};
    for (int epoch = 0; epoch < 3; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [tokens, labels] : loader) {
        optimizer.zero_grad();
        const auto cost = ch::cross_entropy(net(tokens), labels);
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), labels.numel());
        const auto whole = net.gathered();
        const auto written = target.gathered({.write = true});
        ch::nn::soft_update(target, net, 0.5);
        if (run.is_main()) std::printf("%.6f\n", loss);
      }
    }
    target.eval();
    const ch::NoGrad no_grad;
    ch::data::DataLoader test{all, target.sampler(all, {.shuffle = false}), {.batch = 36}, ch::data::pad_to(5)};
    ch::scores::ConfusionMatrix matrix{3};
    for (auto& [tokens, labels] : test) matrix.add(target(tokens).value(), labels);
    matrix.sum(target);
    if (run.is_main()) std::printf("%.6f %.6f\n", matrix.accuracy(), matrix.f1_macro());
  });
}
