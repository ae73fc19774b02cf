/// Lesson 11: a pipeline. Each rank has a stage: rank 0 the first layers, the last rank the loss. A batch is cut into
/// micro-batches, which pass the stages one after the other, so that rank 1 computes the first while rank 0 computes
/// the second. Activations go forward to the next rank, and their gradients come back. While the pipeline fills and
/// drains, ranks wait: the bubble, (p-1)/(m+p-1) of the time for p ranks and m micro-batches if all stages take equally
/// long. GPipe sends all micro-batches forward, then all backward: a rank keeps the activations of all. 1F1B goes
/// backward as soon as it can: the bubble is as large, but rank r keeps those of at most p-r micro-batches. At the end
/// both are measured and drawn, with passes of 3 ms forward and 6 ms backward.

#include "toy_chain.hpp"

using Policy = ch::Pipeline<Chain, ch::GPipe>;
constexpr std::size_t m = 4;  // micro-batches

/// What a rank does, in order: 0123 are micro-batches forward, abcd the same backward. `ahead`: how many go forward
/// before the first goes backward. GPipe: all. 1F1B: one for this rank and each later one.
std::string schedule(std::size_t ahead) {
  std::string actions;
  for (std::size_t there = 0, back = 0; back < m;) {
    while (there < m && there < back + ahead) actions += static_cast<char>('0' + there++);
    actions += static_cast<char>('a' + back++);
  }
  return actions;
}

/// A rank's layers: those in [begin, end) of the three.
struct Stage {
  ch::comm::AnyCommunicator& ranks;
  Chain& model;
  int begin, end;
  Timeline timeline{};                    // what this rank has computed of the last batch
  std::size_t held = 0, most_held = 0;    // micro-batches whose activations are here
  std::vector<Activation> in{m}, out{m};  // the activations that came, and those that left
  std::vector<ch::Variable<float, 0>> losses{m};

  void forward(std::size_t i, const auto& images, const auto& labels) {
    const auto x = begin == 0 ? ch::flatten(images) : receive(ranks, labels.numel(), widths[begin], ranks.rank() - 1);
    timeline.compute(static_cast<char>('0' + i), [&] {
      auto y = in[i] = ch::Variable(x, /*requires_grad=*/begin > 0);
      if (begin == 0) y = model.first(y);
      if (begin <= 1 && end > 1) y = model.second(y);
      if (end == 3) losses[i] = model.last(y, labels);
      out[i] = y;
    });
    if (end < 3) send(ranks, out[i].value(), ranks.rank() + 1);
    most_held = std::max(most_held, ++held);
  }
  /// `part`: the micro-batch's part of the batch. Returns its part of the batch's loss, which the last rank knows.
  double backward(std::size_t i, double part) {
    const auto dy = end < 3 ? receive(ranks, out[i].size(0), out[i].size(1), ranks.rank() + 1) : Matrix{};
    timeline.compute(static_cast<char>('a' + i), [&] {
      end < 3 ? out[i].backward(dy) : losses[i].backward(ch::Tensor<float, 0>::full({}, static_cast<float>(part)));
    });
    if (begin > 0) send(ranks, in[i].grad(), ranks.rank() - 1);
    in[i] = out[i] = {}, --held;  // frees the activations
    return end < 3 ? 0 : part * double{losses[i].item()};
  }
  /// A batch. Returns its mean loss.
  double run(const std::string& actions, const auto& images, const auto& labels) {
    double loss = 0;
    timeline.busy.clear();
    for (const char action : actions) {
      const auto i = static_cast<std::size_t>(action - (action < 'a' ? '0' : 'a'));
      const auto all = labels.numel(), from = ch::share_begin(all, m, i), to = ch::share_begin(all, m, i + 1);
      if (action < 'a')
        forward(i, images.slice(0, from, to), labels.slice(0, from, to));
      else
        loss += backward(i, static_cast<double>(to - from) / static_cast<double>(all));
    }
    return loss;
  }
};

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    const auto n = static_cast<std::size_t>(ranks.size()), rank = static_cast<std::size_t>(ranks.rank());
    Data data{run.seed()};  // whole batches: the first rank needs their images, the last one their labels
    Chain model;
    const auto cut = n == 1 ? ch::At{} : n == 2 ? ch::At{2} : ch::At{1, 2};
    Policy net{ch::nn::copy_of(model), run, {.micro_batches = m, .cut = cut}};  // for the comparison at the end
    Stage stage{ranks, model, int(ch::share_begin(3, n, rank)), int(ch::share_begin(3, n, rank + 1))};
    ch::optim::Sgd optimizer{ch::nn::named_parameters<ch::Cpu>(model), sgd};  // those of other stages get no gradient
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        double loss = stage.run(schedule(epoch == 0 ? m : n - rank), images, labels);  // both give the same numbers
        optimizer.step();
        ranks.broadcast(std::span(&loss, 1), /*root=*/ranks.size() - 1);
        mean.add(loss, static_cast<double>(labels.numel()));
      }
      if (run.is_main()) mean.print(epoch);
    }
    if (run.is_main()) print_sent("rank", 0, data);

    stage.timeline.pass_seconds = run.option("pass-ms", 3.0) / 1e3;
    for (const auto& [name, ahead] : {std::pair{"GPipe", m}, std::pair{"1F1B", n - rank}}) {
      double begin = 0, end = 0, times[] = {0, 0};  // the last step's; and sums over ranks: steps, computing
      stage.most_held = 0;
      for (int step = 0; const auto& [images, labels] : data.epoch(0)) {
        if (++step > 5) break;
        ranks.barrier();
        begin = seconds();
        stage.run(schedule(ahead), images, labels);
        ranks.barrier();
        times[0] += (end = seconds()) - begin;
        times[1] += stage.timeline.computed();
      }
      ranks.all_reduce(std::span(times));
      stage.timeline.draw(ranks, begin, end);
      if (run.is_main())
        std::printf("%s: idle %.3f of the time, by the formula %.3f; rank 0 held %zu micro-batches\n", name,
                    1 - times[1] / times[0], double(n - 1) / double(m + n - 1), stage.most_held);
    }
    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    train_pipeline(data, net, policy_optimizer);
    return compare_parameters(run, Policy::name, ch::nn::named_parameters<ch::Cpu>(model), net.parameters(), 0);
  });
}
