/// Lesson 10: tensor parallelism. In the earlier lessons ranks shared the samples and each had all parameters. Here
/// each rank has all samples and parts of two layers: the rows of fc2 that give its columns of the output, and the
/// columns of fc3 that these are multiplied by. relu between them works on each column alone, so nothing is sent there.
/// fc3 gives each rank one term of the output: forward adds up the terms once, then the bias. All ranks have the same
/// input of fc2, and each has one term of its gradient: backward adds up the terms once.

#include <chorus/autograd/custom_function.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/parallel/tensor_parallel.hpp>

#include "toy.hpp"

struct SharedMlp : ch::nn::Module {  // for the policy: its layers know how to split
  ch::nn::Linear<ch::Cpu> fc1{784, 64};
  ch::nn::ColumnParallelLinear<ch::Cpu> fc2{64, 32};
  ch::nn::RowParallelLinear<ch::Cpu> fc3{32, 10};
  CHORUS_MODULE(SharedMlp, fc1, fc2, fc3)
  auto forward(const auto& images) const { return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(images)))))); }
};
using Policy = ch::TensorParallel<SharedMlp>;

struct PartOfMlp : ch::nn::Module {  // by hand: plain, smaller layers
  ch::nn::Linear<ch::Cpu> fc1{784, 64}, fc2, fc3;
  ch::comm::AnyCommunicator* ranks;
  CHORUS_MODULE(PartOfMlp, fc1, fc2, fc3)

  PartOfMlp(ch::Index columns, ch::comm::AnyCommunicator& all) : fc2(64, columns), fc3(columns, 10), ranks(&all) {}
  ch::Tensor<float, 2> sum_of_ranks(const ch::Tensor<float, 2>& x, Traffic traffic) const {
    auto sum = ch::Tensor<float, 2>::empty(x.shape());
    std::copy_n(x.data(), x.numel(), sum.data());
    ranks->all_reduce(std::span(sum.data(), static_cast<std::size_t>(sum.numel())), ch::comm::ReduceOp::sum,
                      {.traffic = traffic});
    return sum;
  }
  auto forward(const auto& images) const {
    const auto enter = [this](const auto& x) {  // the identity; its gradient is a sum
      return ch::custom_function(
          "enter", [](const auto& value) { return value; },
          [this](const auto& dy, const auto&, const auto&) { return sum_of_ranks(dy, Traffic::gradients); }, x);
    };
    const auto leave = [this](const auto& x) {  // a sum; its gradient is the identity
      return ch::custom_function(
          "leave", [this](const auto& value) { return sum_of_ranks(value, Traffic::outputs); },
          [](const auto& dy, const auto&, const auto&) { return dy; }, x);
    };
    const auto x = ch::relu(fc1(ch::flatten(images)));
    return leave(ch::linear(ch::relu(fc2(enter(x))), fc3.weight)) + fc3.bias;  // the bias once, not `ranks` times
  }
};

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    auto& ranks = run.communicator();
    Data data{run.seed()};  // every rank loads whole batches
    SharedMlp whole;
    Policy net{ch::nn::copy_of(whole), run};  // for the comparison at the end

    const auto n = static_cast<std::size_t>(ranks.size()), rank = static_cast<std::size_t>(ranks.rank());
    const auto begin = ch::share_begin(32, n, rank), end = ch::share_begin(32, n, rank + 1);
    PartOfMlp model{end - begin, ranks};
    model.fc1 = whole.fc1;  // 1. equal parameters: ranks have the same seed
    model.fc2.weight.assign(ch::contiguous(whole.fc2.weight.value().slice(0, begin, end)));
    model.fc2.bias.assign(ch::contiguous(whole.fc2.bias.value().slice(0, begin, end)));
    model.fc3.weight.assign(ch::contiguous(whole.fc3.weight.value().slice(1, begin, end)));
    model.fc3.bias.assign(whole.fc3.bias.value());
    ch::optim::Sgd optimizer{ch::nn::named_parameters<ch::Cpu>(model), sgd};
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {  // 2. the same loop as on one device
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(model(images), labels);
        loss.backward();
        optimizer.step();
        mean.add(double{loss.item()}, static_cast<double>(labels.numel()));
      }
      if (run.is_main()) mean.print(epoch);
    }
    if (run.is_main()) {
      std::printf("rank 0 has %d of 2410 parameters of fc2 and fc3\n", static_cast<int>((end - begin) * 75 + 10));
      print_sent("rank", 0, data);
    }
    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    // On one rank the policy's layers are plain ones, which add the bias inside the product and round differently.
    train(data, net, policy_optimizer);
    return compare_parameters(run, Policy::name, ch::nn::named_parameters<ch::Cpu>(model),
                              ch::nn::named_parameters<ch::Cpu>(net.module()), ranks.size() == 2 ? 0 : 1e-5);
  });
}
