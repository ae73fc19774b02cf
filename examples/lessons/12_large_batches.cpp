/// Lesson 12: fewer averages. In lesson 3 ranks average their gradients after each 33 samples. There are two ways to do
/// so a quarter as often, and send a quarter of the bytes. Larger batches: a step is of 132 samples. As it replaces
/// four steps, its rate is 4 times as high (the linear rule: Goyal et al. 2017, arXiv 1706.02677). Local SGD: each rank
/// steps by itself, and after every 4 steps all ranks average their parameters (Stich 2019, arXiv 1805.09767). Neither
/// is the same training: the lesson prints what the model has learned from the same samples. --rate 0.15 shows the
/// rule's end.
///
/// One loop does all of it: plain SGD is linear in the gradient, so averaging parameters after each step is averaging
/// gradients. (Adam is not linear: lab 6.)

#include <chorus/parallel/local_sgd.hpp>

#include "toy.hpp"

using Policy = ch::LocalSgd<Model>;

struct Way {
  const char* name;
  int batch;       // samples in a step, on all ranks together
  int period = 1;  // steps from average to average
  double rate;
};

/// All ranks get the mean of their parameters, weighted by the samples that each has seen.
void average(ch::comm::AnyCommunicator& ranks, const std::vector<Parameter>& parameters, double samples) {
  double all = samples;
  ranks.all_reduce(std::span(&all, 1));
  auto row = in_a_row(parameters, numbers);
  ranks.all_reduce(std::span(row), ch::comm::ReduceOp::sum, {.scale = samples / all, .traffic = Traffic::parameters});
  copy_row(row, parameters, numbers);
}

/// The mean over the samples of all ranks.
double loss_of(ch::comm::AnyCommunicator& ranks, const Model& model, Data& data) {
  const ch::NoGrad evaluation;
  MeanLoss mean;
  for (const auto& [images, labels] : data.epoch(0))
    mean.add(ch::cross_entropy(model(images), labels).item(), static_cast<double>(labels.numel()));
  double all[] = {mean.sum, mean.samples};
  ranks.all_reduce(std::span(all));
  return all[0] / all[1];
}

void train(ch::Run& run, Model& model, const Way& way) {
  auto& ranks = run.communicator();
  Data data{run.seed(), ranks.rank(), ranks.size(), /*shares=*/0, way.batch};
  const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
  for (const auto& p : parameters) ranks.broadcast(numbers(p), /*root=*/0);
  ch::optim::Sgd optimizer{parameters, {.lr = way.rate}};
  ch::trace::reset_traffic();
  double samples = 0;  // of this rank, since the last average
  int steps = 0, averages = 0;
  for (int epoch = 0; epoch < epochs; ++epoch)
    for (const auto& [images, labels] : data.epoch(epoch)) {
      optimizer.zero_grad();
      ch::cross_entropy(model(images), labels).backward();  // of this rank's share: nothing is sent
      optimizer.step();
      samples += static_cast<double>(labels.numel());
      if (++steps % way.period != 0 && steps != static_cast<int>(data.steps())) continue;
      average(ranks, parameters, std::exchange(samples, 0));
      ++averages;
    }
  const auto sent = ch::trace::bytes_sent(ranks.rank(), Traffic::parameters);
  const double loss = loss_of(ranks, model, data);
  if (run.is_main())
    std::printf("%s: %d averages, %zu bytes sent by rank 0; the loss is now %.4f\n", way.name, averages, sent, loss);
}

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    const double rate = run.option("rate", 0.05);
    Model start;
    Policy net{ch::nn::copy_of(start), run, {.period = 4}};  // for the comparison at the end
    Model model;
    for (const Way& way : {Way{"batches of 33", 33, 1, rate}, Way{"batches of 132", 132, 1, rate},
                           Way{"batches of 132, rate times 4", 132, 1, 4 * rate},
                           Way{"batches of 33, an average every 4 steps", 33, 4, rate}}) {
      model = ch::nn::copy_of(start);
      train(run, model, way);
    }

    Data data{run.seed(), run.rank(), run.devices()};
    ch::optim::Sgd policy_optimizer{net.parameters(), {.lr = rate}};
    train(data, net, policy_optimizer);
    net.synchronise();  // the average after the last step
    return compare_parameters(run, Policy::name, ch::nn::named_parameters<ch::Cpu>(model),
                              ch::nn::named_parameters<ch::Cpu>(net.module()), tolerance(run.devices()));
  });
}
