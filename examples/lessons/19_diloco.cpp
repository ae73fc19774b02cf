/// Lesson 19: DiLoCo. In lesson 12 ranks step by themselves and average their parameters every few steps. Here the
/// average of what they have done since is a gradient, for an optimizer of its own: the outer one, SGD with Nesterov's
/// momentum. The inner one is Adam (Douillard et al. 2023, arXiv 2311.08105). Its state stays where it is; only the
/// differences of parameters are sent, once in `period` steps. With an outer rate of 1 and no momentum the outer step is
/// lesson 12's average. Then the policy trains in other forms: fragments of the model that are sent in turn while
/// training goes on (Streaming DiLoCo, arXiv 2501.18512), and 4 bits a number. --period 62 is a message in two epochs.

#include <chorus/optim/adam.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/outer/quantised.hpp>
#include <chorus/parallel/outer/streaming.hpp>

#include "toy.hpp"

constexpr ch::optim::AdamOptions adam{.lr = 0.001};

/// The parameters that all ranks have in common, theta, and the optimizer that steps them.
class Outer {
 public:
  explicit Outer(const std::vector<Parameter>& parameters)
      : parameters_(parameters), theta_(in_a_row(parameters, numbers), 0, 1) {}

  /// All ranks go on from theta after its step. `samples`: those that this rank has seen since the last one.
  void step(ch::comm::AnyCommunicator& ranks, double samples) {
    double all = samples;
    ranks.all_reduce(std::span(&all, 1));
    const auto own = in_a_row(parameters_, numbers);
    const auto difference = theta_.new_gradient();  // theta - own, as a gradient points away from where to go
    for (std::size_t i = 0; i < own.size(); ++i) difference[i] = theta_.values()[i] - own[i];
    ranks.all_reduce(difference, ch::comm::ReduceOp::sum, {.scale = samples / all, .traffic = Traffic::parameters});
    optimizer_.step();
    copy_row(theta_.values(), parameters_, numbers);
  }

 private:
  std::vector<Parameter> parameters_;
  Part theta_;
  ch::optim::Sgd<ch::Cpu> optimizer_{{theta_.parameter()}, {.lr = 0.7, .momentum = 0.9, .nesterov = true}};
};

void train_by_hand(ch::Run& run, Data& data, Model& model, int period) {
  auto& ranks = run.communicator();
  const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
  for (const auto& p : parameters) ranks.broadcast(numbers(p), /*root=*/0);
  ch::optim::Adam inner{parameters, adam};
  Outer outer{parameters};
  double samples = 0;  // of this rank, since the last outer step
  int steps = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    double sums[2] = {};
    for (const auto& [images, labels] : data.epoch(epoch)) {
      inner.zero_grad();
      const auto loss = ch::cross_entropy(model(images), labels);
      loss.backward();  // of this rank's share: nothing is sent
      inner.step();
      const auto mine = static_cast<double>(labels.numel());
      samples += mine;
      sums[0] += mine * double{loss.item()}, sums[1] += mine;
      if (++steps % period == 0) outer.step(ranks, std::exchange(samples, 0));
    }
    ranks.all_reduce(std::span(sums));
    if (run.is_main()) MeanLoss{sums[0], sums[1]}.print(epoch);
  }
  if (steps % period != 0) outer.step(ranks, samples);
}

/// Trains under a policy; prints what rank 0 sends, and the common model's loss.
template <class Net>
void train_and_tell(ch::Run& run, Data& data, Net& net, const char* name) {
  ch::optim::Adam inner{net.parameters(), adam};
  ch::trace::reset_traffic();
  train(data, net, inner);
  net.eval();  // the last outer step
  const auto sent = ch::trace::bytes_sent(run.rank(), Traffic::parameters);
  const ch::NoGrad evaluation;
  MeanLoss mean;
  for (const auto& [images, labels] : data.epoch(0))
    mean.add(ch::cross_entropy(net(images), labels).item(), static_cast<double>(labels.numel()));
  double all[] = {mean.sum, mean.samples};
  run.communicator().all_reduce(std::span(all));
  if (run.is_main()) std::printf("%s: %zu bytes sent by rank 0; the loss is now %.4f\n", name, sent, all[0] / all[1]);
}

int main(int argc, char** argv) {
  return ch::launch<ch::LocalSgd<Model, ch::Nesterov>>(argc, argv, [](ch::Run& run) {
    const int period = 2 * static_cast<int>(run.option("period", 8) / 2);
    Data data{run.seed(), run.rank(), run.devices()};
    Model model;
    ch::LocalSgd<Model, ch::Nesterov> net{ch::nn::copy_of(model), run, {.period = period}};
    ch::LocalSgd<Model, ch::Streaming<2>> streaming{ch::nn::copy_of(model), run, {.period = period}};
    ch::LocalSgd<Model, ch::Quantised<>> quantised{ch::nn::copy_of(model), run, {.period = period}};
    train_by_hand(run, data, model, period);
    train_and_tell(run, data, net, "DiLoCo");
    train_and_tell(run, data, streaming, "Streaming DiLoCo, 2 fragments");
    train_and_tell(run, data, quantised, "DiLoCo in 4 bits");
    return compare_parameters(run, net.name, ch::nn::named_parameters<ch::Cpu>(model),
                              ch::nn::named_parameters<ch::Cpu>(net.module()), tolerance(run.devices()));
  });
}
