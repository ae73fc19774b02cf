/// Lesson 7: a sharded optimizer (ZeRO-1). In lesson 3 all ranks keep the same optimizer state and compute the same
/// step, N times. Here each rank keeps the state of 1/N of all numbers, and steps only those. So it needs averaged
/// gradients of those only: a reduce-scatter, the first half of lesson 6. Then all ranks all-gather the new parameters,
/// the second half. The bytes sent are those of an all-reduce; Adam's two numbers per parameter take 1/N of the memory.

#include <chorus/parallel/sharded_optimizer.hpp>

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<Model>;
using Adam = ch::optim::Adam<ch::Cpu>;

/// The bytes of an optimizer's state on this rank: Adam keeps two averages per number.
std::size_t bytes_of(const std::vector<ch::optim::StateTensor>& state) {
  std::size_t count = 0;
  for (const auto& tensor : state) {
    std::size_t numbers = 1;
    for (const auto extent : tensor.shape) numbers *= static_cast<std::size_t>(extent);
    if (tensor.dtype == ch::DType::f32) count += tensor.part_count.value_or(numbers);
  }
  return count * sizeof(float);
}

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end

    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    for (const auto& p : parameters) ranks.broadcast(numbers(p), /*root=*/0);
    std::vector<float> row = in_a_row(parameters, numbers, ranks.size());  // all numbers, for N equal parts
    Part mine{row, ranks.rank(), ranks.size()};                            // a copy of this rank's
    Adam optimizer{{mine.parameter()}, {.lr = 1e-3}};

    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        for (const auto& p : parameters) p.parameter->set_grad_arrived(false);  // clears the gradient
        const auto loss = ch::cross_entropy(model(images), labels);
        loss.backward();
        const auto samples = static_cast<double>(labels.numel());
        double all[] = {samples, samples * double{loss.item()}};
        ranks.all_reduce(std::span(all));

        // 1. The averages of this rank's part of the gradients. 2. A step of this part. 3. The parts of all ranks.
        ranks.reduce_scatter(in_a_row(parameters, gradient, ranks.size()), mine.new_gradient(), ch::comm::ReduceOp::sum,
                             {.scale = samples / all[0], .traffic = Traffic::gradients});
        optimizer.step();
        ranks.all_gather(mine.values(), std::span(row), {.traffic = Traffic::parameters});
        copy_row(row, parameters, numbers);
        mean.add(all[1] / all[0], all[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }

    if (run.is_main()) print_sent("rank", 0, data);

    ch::ShardedOptimizer<Adam> policy_optimizer{net, {.lr = 1e-3}};
    const int status = compare(run, data, model, net, policy_optimizer, tolerance(ranks.size()));
    Adam whole{parameters, {.lr = 1e-3}};
    if (run.is_main())
      std::printf("bytes of optimizer state: rank 0 keeps %zu, the policy's rank 0 %zu, and lesson 3 would keep %zu\n",
                  bytes_of(optimizer.state()), bytes_of(policy_optimizer.state()), bytes_of(whole.state()));
    return status;
  });
}
