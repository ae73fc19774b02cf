/// Lesson 3: one process per device (DistributedDataParallel, the simplest form). There is no central rank: each has
/// the whole model, its own loader and its own optimizer. All begin with rank 0's parameters. After backward all
/// gradients are averaged over the ranks (all-reduce), so that all take the same step. The average is over samples: a
/// rank with 17 of 33 samples has weight 17/33, otherwise the step would not be a single device's.

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<Model>;

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {  // starts the processes; each runs this
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    ch::manual_seed(run.seed() + static_cast<std::uint64_t>(ranks.rank()));  // different initial models
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end

    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    for (const auto& p : parameters) ranks.broadcast(numbers(p), /*root=*/0);  // 1. equal parameters
    ch::optim::Sgd optimizer{parameters, sgd};
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(model(images), labels);  // the mean over this rank's share
        loss.backward();
        const auto mine = static_cast<double>(labels.numel());
        double all[] = {mine, mine * double{loss.item()}};  // 2. sums over all ranks: samples and losses
        ranks.all_reduce(std::span(all));
        for (const auto& p : parameters)  // 3. sum over ranks of (their samples / all samples) * gradient
          ranks.all_reduce(gradient(p), ch::comm::ReduceOp::sum,
                           {.scale = mine / all[0], .traffic = Traffic::gradients});
        optimizer.step();
        mean.add(all[1] / all[0], all[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }
    if (run.is_main()) {
      std::printf("%zu messages of gradients in a step\n", parameters.size());
      print_sent("rank", 0, data);
    }

    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, model, net, policy_optimizer, tolerance(ranks.size()));
  });
}
