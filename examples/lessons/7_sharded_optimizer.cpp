/// Lesson 7: a sharded optimizer (ZeRO-1). In lesson 3 all ranks keep the same optimizer state and compute the same
/// step, N times. Here each rank keeps the state of 1/N of all numbers, and steps only those. So it needs averaged
/// gradients of those only: a reduce-scatter, the first half of lesson 6. Then all ranks all-gather the new parameters,
/// the second half. The bytes sent are those of an all-reduce; Adam's two numbers per parameter take 1/N of the memory.

#include <chorus/parallel/sharded_optimizer.hpp>

#include "toy.hpp"

using Policy = ch::DistributedDataParallel<Model>;
using Adam = ch::optim::Adam<ch::Cpu>;

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed(), ranks.rank(), ranks.size()};
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end

    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    // All numbers in a row, padded with zeros to a multiple of N. This rank's part of it is a parameter.
    std::vector<float> row;
    for (const auto& p : parameters) {
      ranks.broadcast(numbers(p), /*root=*/0);
      row.insert(row.end(), numbers(p).begin(), numbers(p).end());
    }
    const auto n = static_cast<std::size_t>(ranks.size()), part = (row.size() + n - 1) / n;
    row.resize(n * part);
    const std::span mine = std::span(row).subspan(part * static_cast<std::size_t>(ranks.rank()), part);
    const ch::Shape<1> shape{static_cast<ch::Index>(part)};
    const auto value = ch::Tensor<float, 1>::from(mine, shape), average = ch::Tensor<float, 1>::zeros(shape);
    const ch::Parameter<float, 1> own{value};
    // Its numbers are in `value`, its gradient in `average`.
    own.on<ch::Cpu>().bind(value.storage(), value.data(), average.storage(), average.data());
    Adam optimizer{{{"own", own, &own.on<ch::Cpu>()}}, {.lr = 1e-3}};

    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        for (const auto& p : parameters) p.parameter->set_grad_arrived(false);
        const auto loss = ch::cross_entropy(model(images), labels);
        loss.backward();
        const auto samples = static_cast<double>(labels.numel());
        double all[] = {samples, samples * double{loss.item()}};
        ranks.all_reduce(std::span(all));

        auto to = row.begin();
        for (const auto& p : parameters) to = std::ranges::copy(gradient(p), to).out;
        ranks.reduce_scatter(row, std::span(average.data(), part), ch::comm::ReduceOp::sum,
                             {.scale = samples / all[0], .traffic = Traffic::gradients});
        own.on<ch::Cpu>().set_grad_arrived(true);  // as backward does elsewhere
        optimizer.step();
        ranks.all_gather(value.to_vector(), std::span(row), {.traffic = Traffic::parameters});
        auto from = row.begin();
        for (const auto& p : parameters) from = std::ranges::copy_n(from, p.parameter->count(), numbers(p).begin()).in;
        mean.add(all[1] / all[0], all[0]);
      }
      if (run.is_main()) mean.print(epoch);
    }
    if (run.is_main()) {
      std::size_t state = 0;  // Adam's two averages of each gradient
      for (const auto& numbers : optimizer.state())
        if (numbers.dtype == ch::DType::f32) state += static_cast<std::size_t>(numbers.shape[0]);
      std::printf("rank 0 keeps %zu bytes of optimizer state; the parameters have %zu bytes\n", state * sizeof(float),
                  row.size() * sizeof(float));
      print_sent("rank", 0, data);
    }

    ch::ShardedOptimizer<Adam> policy_optimizer{net, {.lr = 1e-3}};
    return compare(run, data, model, net, policy_optimizer, tolerance(ranks.size()));
  });
}
