/// Sequence to sequence: a GRU reads words of several lengths, another writes them backwards, with attention (Luong,
/// Pham, Manning 2015). It learns from the true letters, and writes by its own.

#include <chorus/chorus.hpp>
#include <chorus/data/loader.hpp>
#include <chorus/nn/recurrent.hpp>
#include <chorus/ops/rearranging.hpp>
#include <chorus/ops/truth.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <vector>

namespace ch = chorus;

namespace {

/// Letters are 2 to 6; 1 begins and ends what is written; 0 pads.
struct Reversals {
  ch::Index size() const { return 96; }
  auto get(ch::Index i, ch::data::RandomStream& random) const {
    std::vector<std::int64_t> source;
    for (ch::Index at = 0; at < 2 + i % 3; ++at) source.push_back(2 + random.below(5));
    std::vector<std::int64_t> target(source.rbegin(), source.rend());
    target.insert(target.begin(), 1), target.push_back(1);
    return std::pair{source, target};
  }
};

template <class Device>
struct Writer : ch::nn::Module {
  static constexpr ch::Index letters = 7, width = 24;
  ch::nn::Embedding<Device> embedding{letters, width};
  ch::nn::GRU<Device> encoder{width, width, {.batch_first = true}}, decoder{width, width, {.batch_first = true}};
  ch::nn::Linear<Device> head{2 * width, letters};
  CHORUS_MODULE(Writer, embedding, encoder, decoder, head)
  /// source: [samples, length], written: [samples, steps] -> logits of the letter after each: [samples, steps, letters]
  auto forward(const auto& source, const auto& written) const {
    const auto read = encoder(embedding(source), ch::sum(ch::to<std::int64_t>(source != 0), 1));
    const auto y = decoder(embedding(written), read.hidden).output;
    const auto empty = (source == 0).view(ch::Shape<3>{source.size(0), 1, source.size(1)});
    const auto scores = ch::masked_fill(ch::matmul(y, ch::transpose(read.output, 1, 2)), empty, -1e9);
    return head(ch::concat(2, y, ch::matmul(ch::softmax(scores, 2), read.output)));
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Writer<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const Reversals data;
    Net net{Model{}, run};
    ch::data::DataLoader loader{data, net.sampler(data), {.batch = 32}, ch::data::pad_to_longest(0)};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.02}};
    for (int epoch = 0; epoch < 30; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [source, target] : loader) {
        optimizer.zero_grad();
        const ch::Index steps = target.size(1) - 1;
        const auto next = ch::contiguous(target.slice(1, 1, steps + 1)).view(ch::Shape<1>{-1});
        const auto logits = ch::reshape(net(source, ch::contiguous(target.slice(1, 0, steps))), ch::Shape<2>{-1, 7});
        const auto cost = ch::cross_entropy(logits, next, {.ignore_index = 0});
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), ch::count_nonzero(next).item());
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
    const ch::NoGrad none;
    const auto word = ch::Tensor<std::int64_t, 2>::from({2, 4, 3, 6}, {1, 4});
    auto written = ch::Tensor<std::int64_t, 2>::ones({1, 1});
    for (int step = 0; step < 5; ++step) {
      const auto logits = ch::value_of(net.module().forward(word, written));
      written = ch::concat(1, written, ch::slice(ch::argmax(logits, 2), 1, step, step + 1));
    }
    for (ch::Index at = 0; run.is_main() && at < 6; ++at) std::printf("written %td\n", written(0, at));
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
