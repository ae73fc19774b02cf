/// Lesson 1: one device, without a policy. Each batch has four steps: clear the old gradients, compute the loss
/// (forward), compute the gradients (backward), change the parameters (step). The next lessons only add code between
/// these steps.

#include "toy.hpp"

using Policy = ch::SingleDevice<Model>;

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    Data data{run.seed()};
    Model model;
    Policy net{ch::nn::copy_of(model), run};  // for the comparison at the end

    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    ch::optim::Sgd optimizer{parameters, sgd};
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(model(images), labels);  // the mean over the batch
        loss.backward();
        optimizer.step();
        mean.add(loss.item(), static_cast<double>(labels.numel()));
      }
      mean.print(epoch);
    }
    std::size_t count = 0;
    for (const auto& p : parameters) count += numbers(p).size();
    std::printf("%zu parameters in %zu tensors: %zu bytes\n", count, parameters.size(), count * sizeof(float));

    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, model, net, policy_optimizer, /*allowed=*/0);
  });
}
