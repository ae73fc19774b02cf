/// Lesson 11: a pipeline. Each rank holds a part of the model, a stage: rank 0 the first layers, the last rank the
/// loss. A batch is cut into micro-batches that pass the stages one after the other, so that rank 1 computes the first
/// while rank 0 computes the second. Across a cut activations are sent forward, and the gradients by them backward.
/// While the pipeline fills and drains, ranks wait: (p - 1) / (m + p - 1) of the time for p ranks and m micro-batches,
/// if all passes take equally long. Here they don't, unless --pass-ms 5 adds 5 ms to each. GPipe runs all micro-batches
/// forward, then all backward, and a rank keeps the activations of all. With --1f1b 1 a rank runs backward as soon as
/// it can: it waits as long, but rank r keeps those of at most p - r micro-batches.

#include <chorus/nn/chain.hpp>
#include <chorus/parallel/pipeline.hpp>

#include "toy.hpp"

struct Hidden : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc;
  Hidden(ch::Index in, ch::Index out) : fc{in, out} {}
  CHORUS_MODULE(Hidden, fc)
  auto forward(const auto& x) const { return ch::relu(fc(x)); }
};
struct Last : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{32, 10};
  CHORUS_MODULE(Last, fc)
  auto forward(const auto& x, const auto& labels) const { return ch::cross_entropy(fc(x), labels); }
};
struct Chain : ch::nn::Module {
  Hidden first{784, 64}, second{64, 32};
  Last last;
  CHORUS_MODULE(Chain, first, second, last)
  CHORUS_PIPELINE(first, second, last)
};

constexpr std::size_t m = 4;
using Policy = ch::Pipeline<Chain, ch::GPipe>;
using Matrix = ch::Tensor<float, 2>;
using Activation = ch::Variable<float, 2>;

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    const int n = ranks.size(), rank = ranks.rank();
    Data data{run.seed()};  // the whole batch on every rank: the first stage needs the images, the last one the labels
    Chain model;
    const auto begin_of = [n](int i) { return ch::share_begin(3, std::size_t(n), std::size_t(i)); };
    const auto begin = begin_of(rank), end = begin_of(rank + 1);  // this rank's layers
    const auto cut = n == 1 ? ch::At{} : n == 2 ? ch::At{2} : ch::At{1, 2};
    Policy net{ch::nn::copy_of(model), run, {.micro_batches = m, .cut = cut}};  // for the comparison at the end
    ch::optim::Sgd optimizer{ch::nn::named_parameters<ch::Cpu>(model), sgd};  // those of other stages get no gradient

    const auto all_of = [](const Matrix& x) { return std::span(x.data(), static_cast<std::size_t>(x.numel())); };
    const auto send = [&](const Matrix& x, int to) { ranks.send(all_of(x), to, {.traffic = Traffic::activations}); };
    double times[] = {0, 0};  // seconds that ranks have waited, and seconds in all passes
    const auto receive = [&](ch::Index rows, ch::Index columns, int from) {
      const auto x = Matrix::empty({rows, columns});
      times[0] -= seconds();
      ranks.recv(all_of(x), from, {.traffic = Traffic::activations});
      times[0] += seconds();
      return x;
    };
    const std::chrono::milliseconds more(run.option("pass-ms", 0));
    const std::size_t most = run.option("1f1b", 0) == 0 ? m : std::size_t(n - rank);  // micro-batches held at once
    std::size_t held = 0;
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        std::vector<Activation> inputs(m), outputs(m);
        std::vector<ch::Variable<float, 0>> losses;
        double whole = 0;
        const auto at = [&, samples = labels.numel()](std::size_t i) { return ch::share_begin(samples, m, i); };
        times[1] -= seconds();
        for (std::size_t there = 0, back = 0; back < m; held = std::max(held, there - back))
          if (there < m && there - back < most) {  // 1. forward, up to `most` micro-batches
            const auto i = there++;
            Activation h(rank == 0 ? ch::flatten(images).slice(0, at(i), at(i + 1))
                                   : receive(at(i + 1) - at(i), begin == 1 ? 64 : 32, rank - 1),
                         /*requires_grad=*/rank > 0);
            inputs[i] = h;
            if (rank == 0) h = model.first(h);
            if (begin <= 1 && end > 1) h = model.second(h);
            outputs[i] = h;
            if (rank == n - 1) losses.push_back(model.last(h, labels.slice(0, at(i), at(i + 1))));
            std::this_thread::sleep_for(more);
            if (rank < n - 1) send(h.value(), rank + 1);
          } else {  // 2. backward: a micro-batch's loss is weighted by its share of the batch
            const auto i = back++;
            const double part = static_cast<double>(at(i + 1) - at(i)) / static_cast<double>(at(m));
            if (rank < n - 1)
              outputs[i].backward(receive(outputs[i].size(0), outputs[i].size(1), rank + 1));
            else
              losses[i].backward(ch::Tensor<float, 0>::full({}, static_cast<float>(part)));
            if (rank == n - 1) whole += part * double{losses[i].item()};
            std::this_thread::sleep_for(more);
            if (rank > 0) send(inputs[i].grad(), rank - 1);
            inputs[i] = outputs[i] = {};  // frees the activations
          }
        times[1] += seconds();
        optimizer.step();  // 3. each rank steps its own parameters
        ranks.broadcast(std::span(&whole, 1), n - 1);
        mean.add(whole, static_cast<double>(at(m)));
      }
      if (run.is_main()) mean.print(epoch);
    }
    if (run.is_main()) print_sent("rank", 0, data);
    ranks.all_reduce(std::span(times));
    if (run.is_main())
      std::printf("idle: %.4f of the time; %.4f if all passes took as long; rank 0 held %zu micro-batches\n",
                  times[0] / times[1], (n - 1) / (double{m} + n - 1), held);
    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    for (int epoch = 0; epoch < epochs; ++epoch)
      for (const auto& [images, labels] : data.epoch(epoch)) {
        policy_optimizer.zero_grad();
        net(ch::flatten(images), labels).backward();
        policy_optimizer.step();
      }
    return compare_parameters(run, Policy::name, ch::nn::named_parameters<ch::Cpu>(model), net.parameters(), 0);
  });
}
