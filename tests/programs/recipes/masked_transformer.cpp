/// A transformer that guesses masked words (Devlin et al. 2019) of sentences of several lengths. The loss is a mean
/// over the masked words, and ranks count by them.

#include <chorus/chorus.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/nn/positions.hpp>
#include <chorus/nn/transformer.hpp>
#include <chorus/ops/truth.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <utility>
#include <vector>

namespace ch = chorus;

namespace {

constexpr std::int64_t padding = 0, mask = 1, words = 12, no_guess = -100;

/// Sentences, each with the two words of one topic, some of them hidden; others in each epoch.
struct Sentences {
  using Words = std::vector<std::int64_t>;
  ch::Index size() const { return 120; }
  std::pair<Words, Words> get(ch::Index i, ch::data::RandomStream& random) const {
    Words seen, wanted;
    for (ch::Index at = 0; at < 5 + i % 4; ++at) {
      const std::int64_t word = 2 + 2 * (i % 5) + random.below(2);
      const bool hidden = random.uniform() < 0.25F;
      seen.push_back(hidden ? mask : word);
      wanted.push_back(hidden ? word : no_guess);
    }
    return {seen, wanted};
  }
};

/// sentences: [samples, length] -> [samples * length, words]
template <class Device>
struct Guesser : ch::nn::Module {
  ch::nn::Embedding<Device> embedding{words, 16};
  ch::nn::SinusoidalPositions positions;
  ch::nn::TransformerEncoderLayer<Device> layer{16, {.heads = 2, .feed_forward = 32}};
  ch::nn::Linear<Device> head{16, words};
  CHORUS_MODULE(Guesser, embedding, positions, layer, head)

  auto forward(const auto& sentences) const {
    const ch::Shape<4> of_keys{sentences.size(0), 1, 1, sentences.size(1)};
    const auto y = layer(positions(embedding(sentences)), (sentences != padding).view(of_keys));
    return head(ch::reshape(y, ch::Shape<2>{-1, 16}));
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Guesser<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const Sentences sentences;
    Net net{Model{}, run};
    ch::optim::AdamW optimizer{net.parameters(), {.lr = 0.01}};
    ch::data::DataLoader loader{
        sentences, net.sampler(sentences), {.batch = 24}, ch::data::pad_to_longest(padding, no_guess)};
    for (int epoch = 0; epoch < 8; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [seen, wanted] : loader) {
        optimizer.zero_grad();
        const auto targets = wanted.view(ch::Shape<1>{wanted.numel()});
        const auto cost = ch::cross_entropy(net(seen), targets, {.ignore_index = no_guess});
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), ch::count_nonzero(wanted != no_guess).item());
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
