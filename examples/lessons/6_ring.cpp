/// Lesson 6: inside an all-reduce. Ranks form a ring; each communicates with its two neighbours only. The numbers are
/// cut into N chunks. In N-1 rounds (reduce-scatter) each chunk goes around, and each rank adds its own numbers to it:
/// then each rank has the sum of one chunk. In N-1 more rounds (all-gather) the sums go around. A rank sends 2(N-1)
/// chunks of K/N bytes: less than 2K for any number of ranks. In lesson 2 device 0 sends (N-1)K, and receives as much.

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<Model>;

/// data := the sum of all ranks' `data`, the same bits on every rank.
void ring_all_reduce(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
  const auto n = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
  const int next = static_cast<int>((me + 1) % n), previous = static_cast<int>((me + n - 1) % n);
  const auto chunk = [&](std::size_t i) {  // chunk i modulo n
    const std::size_t begin = data.size() * (i % n) / n, end = data.size() * (i % n + 1) / n;
    return data.subspan(begin, end - begin);
  };
  const auto pass_on = [&](std::span<float> out, std::span<float> in) {
    // If all ranks sent first, each would wait for a neighbour that also waits.
    if (me % 2 == 0) ranks.send(out, next, {.traffic = Traffic::gradients});
    ranks.recv(in, previous);
    if (me % 2 == 1) ranks.send(out, next, {.traffic = Traffic::gradients});
  };

  std::vector<float> received(data.size() / n + 1);
  for (std::size_t round = 0; round + 1 < n; ++round) {  // reduce-scatter
    const auto mine = chunk(me + n - 2 - round);
    const auto in = std::span(received).first(mine.size());
    pass_on(chunk(me + n - 1 - round), in);
    for (std::size_t i = 0; i < in.size(); ++i) mine[i] += in[i];
  }
  for (std::size_t round = 0; round + 1 < n; ++round)  // all-gather, beginning with the own chunk, which is complete
    pass_on(chunk(me + n - round), chunk(me + n - 1 - round));
}

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end

    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    for (const auto& p : parameters) ranks.broadcast(numbers(p), /*root=*/0);
    ch::optim::Sgd optimizer{parameters, sgd};
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(model(images), labels);
        loss.backward();
        const auto mine = static_cast<double>(labels.numel());
        double all[] = {mine, mine * double{loss.item()}};
        ranks.all_reduce(std::span(all));
        for (const auto& p : parameters) {
          for (float& g : gradient(p)) g *= static_cast<float>(mine / all[0]);
          ring_all_reduce(ranks, gradient(p));
        }
        optimizer.step();
        mean.add(all[1] / all[0], all[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }
    double bytes = 0, sent = static_cast<double>(ch::trace::bytes_sent(ranks.rank(), Traffic::gradients));
    for (const auto& p : parameters) bytes += static_cast<double>(gradient(p).size_bytes());
    ranks.all_reduce(std::span(&sent, 1));
    if (run.is_main())
      std::printf("a rank sends %.1f bytes of gradients in a step; 2(N-1)K/N with K = %.0f is %.1f\n",
                  sent / ranks.size() / data.steps(), bytes, 2 * (ranks.size() - 1) * bytes / ranks.size());

    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    // The policy sums bucket by bucket: it rounds in another order.
    return compare(run, data, model, net, policy_optimizer, 10 * tolerance(ranks.size()));
  });
}
