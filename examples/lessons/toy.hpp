#pragma once
/// Shared by the lessons: a toy model and its data, parameters as plain numbers, and the comparison with the policy.

#include <algorithm>
#include <chorus/chorus.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace ch = chorus;

template <class Device>
struct Mlp : ch::nn::Module {
  ch::nn::Linear<Device> fc1{784, 64}, fc2{64, 32}, fc3{32, 10};
  CHORUS_MODULE(Mlp, fc1, fc2, fc3)

  auto forward(const auto& images) const { return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(images)))))); }
};

/// With four layers, of which the middle ones have the most numbers: 6,400, 16,512, 16,512 and 1,290.
struct Deep : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc1{49, 128}, fc2{128, 128}, fc3{128, 128}, fc4{128, 10};
  CHORUS_MODULE(Deep, fc1, fc2, fc3, fc4)

  static auto small(const auto& images) { return ch::flatten(ch::max_pool2d(images, 4)); }  // 28 x 28 to 49
  auto forward(const auto& images) const { return fc4(ch::relu(fc3(ch::relu(fc2(ch::relu(fc1(small(images)))))))); }
};

using Model = Mlp<ch::Cpu>;
using Parameter = ch::nn::NamedParameter<ch::Cpu>;
using ch::trace::Traffic;

constexpr int epochs = 3;
constexpr ch::optim::SgdOptions sgd{.lr = 0.05, .momentum = 0.9};

/// 1,000 generated digits in batches of 33; each rank gets its share. 33 is odd on purpose: two ranks have 17 and 16
/// samples, and unequal shares reveal mistakes in means.
class Data {
 public:
  /// `shares`: the number of shares of a batch; 0: one per rank.
  explicit Data(std::uint64_t seed, int rank = 0, int ranks = 1, int shares = 0, int batch = 33)
      : images_{1000, seed, ch::data::Split::train, {1, 28, 28}},
        loader_{images_,
                ch::data::Sampler(1000, {.rank = rank, .world_size = ranks, .seed = seed, .shares = shares}),
                {.batch = batch}} {}

  /// `for (auto& [images, labels] : data.epoch(e))`: the samples are shuffled differently in each epoch.
  auto& epoch(int e) {
    loader_.set_epoch(e);
    return loader_;
  }
  /// Training steps in all epochs.
  double steps() const { return epochs * static_cast<double>(loader_.size()); }

 private:
  ch::data::SyntheticImages images_;
  ch::data::DataLoader<ch::data::SyntheticImages> loader_;
};

/// A parameter's numbers, for reading and writing.
inline std::span<float> numbers(const Parameter& p) {
  return {static_cast<float*>(p.parameter->value_data()), static_cast<std::size_t>(p.parameter->count())};
}
/// Its gradient, if backward has left one.
inline std::span<float> gradient(const Parameter& p) {
  return {static_cast<float*>(p.parameter->grad_data()), static_cast<std::size_t>(p.parameter->count())};
}

/// `what` (numbers or gradient) of all parameters in a row, with zeros at the end up to a multiple of `n`.
inline std::vector<float> in_a_row(const std::vector<Parameter>& parameters, std::span<float> (*what)(const Parameter&),
                                   int n = 1) {
  std::vector<float> row;
  for (const auto& p : parameters) row.insert(row.end(), what(p).begin(), what(p).end());
  while (row.size() % static_cast<std::size_t>(n) != 0) row.push_back(0);
  return row;
}
/// The way back: copies such a row to the parameters.
inline void copy_row(std::span<const float> row, const std::vector<Parameter>& parameters,
                     std::span<float> (*what)(const Parameter&)) {
  for (auto from = row.begin(); const auto& p : parameters)
    from = std::ranges::copy_n(from, p.parameter->count(), what(p).begin()).in;
}

/// Part `i` of `n` of a row, as a parameter of its own that an optimizer steps.
class Part {
 public:
  Part(std::span<const float> row, int i, int n) {
    const auto size = row.size() / static_cast<std::size_t>(n);
    const auto mine = row.subspan(size * static_cast<std::size_t>(i), size);
    const auto values = ch::Tensor<float, 1>::from(mine, {static_cast<ch::Index>(size)});
    const auto gradients = ch::Tensor<float, 1>::zeros(values.shape());
    own_ = ch::Parameter<float, 1>{values};
    own_.on<ch::Cpu>().bind(values.storage(), values.data(), gradients.storage(), gradients.data());
  }
  /// For an optimizer.
  Parameter parameter() { return {"own", own_, &own_.on<ch::Cpu>()}; }
  std::span<float> values() { return numbers(parameter()); }
  /// To be overwritten with a gradient: the optimizer's next step uses it.
  std::span<float> new_gradient() {
    parameter().parameter->set_grad_arrived(true);
    return gradient(parameter());
  }

 private:
  ch::Parameter<float, 1> own_;
};

/// The time in seconds, from an arbitrary start.
inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The mean loss of an epoch.
struct MeanLoss {
  double sum = 0, samples = 0;

  void add(double mean_of_batch, double samples_of_batch) {
    sum += mean_of_batch * samples_of_batch;
    samples += samples_of_batch;
  }
  void print(int epoch) const { std::printf("epoch %d: mean loss %.4f\n", epoch + 1, sum / samples); }
};

/// Prints the bytes that a device, or this process's rank, has sent per step since `trace::reset_traffic`, by
/// kind.
inline void print_sent(const char* what, int i, double steps) {
  std::printf("%s %d sends in a step:", what, i);
  for (const auto kind : {Traffic::inputs, Traffic::outputs, Traffic::parameters, Traffic::gradients,
                          Traffic::activations, Traffic::control})
    if (const auto bytes = ch::trace::bytes_sent(i, kind); bytes > 0)
      std::printf(" %s %.0f bytes;", std::string(ch::trace::name(kind)).c_str(), double(bytes) / steps);
  std::printf("\n");
}
inline void print_sent(const char* what, int i, const Data& data) { print_sent(what, i, data.steps()); }

/// The allowed difference of parameters. A sum of two numbers has the same bits in either order; with more ranks,
/// rounding depends on the algorithm's order of additions.
inline double tolerance(int ranks) { return ranks <= 2 ? 0 : 1e-5; }

/// Main's status: 1 if a parameter of this rank differs by more than `allowed`, on any rank, from the policy's
/// parameter with the same name.
inline int compare_parameters(ch::Run& run, const char* policy, const std::vector<Parameter>& mine,
                              const std::vector<Parameter>& others, double allowed) {
  double most = 0;
  for (const Parameter& other : others)
    for (const Parameter& own : mine)
      for (std::size_t j = 0; own.name == other.name && j < numbers(other).size(); ++j) {
        const double difference = std::abs(double{numbers(own)[j]} - double{numbers(other)[j]});
        if (!(difference <= most)) most = difference;  // also for a NaN
      }
  run.communicator().all_reduce(std::span(&most, 1), ch::comm::ReduceOp::max);
  const bool same = most <= allowed;
  if (run.is_main())
    std::printf("%s: the largest difference from the parameters of policy %s is %g, allowed is %g\n",
                same ? "same" : "NOT THE SAME", policy, most, allowed);
  return same ? 0 : 1;
}

/// Lesson 3's loop, for epochs [begin, end). `step(weight)` averages the gradients and makes the step; the weight is
/// this rank's samples / all ranks'.
template <class Step>
void train_by_hand(ch::Run& run, Data& data, Model& model, int begin, int end, const Step& step) {
  for (int epoch = begin; epoch < end; ++epoch) {
    MeanLoss mean;
    for (const auto& [images, labels] : data.epoch(epoch)) {
      for (const auto& p : ch::nn::named_parameters<ch::Cpu>(model)) p.parameter->set_grad_arrived(false);
      const auto loss = ch::cross_entropy(model(images), labels);
      loss.backward();
      const auto mine = static_cast<double>(labels.numel());
      double all[] = {mine, mine * double{loss.item()}};
      run.communicator().all_reduce(std::span(all));
      step(mine / all[0]);
      mean.add(all[1] / all[0], all[0]);
    }
    if (run.is_main()) mean.print(epoch);
  }
}

/// The same from rank 0's parameters, with `all_reduce(numbers)` for the sums of gradients.
template <class AllReduce>
void train_by_hand(ch::Run& run, Data& data, Model& model, const AllReduce& all_reduce) {
  const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
  for (const auto& p : parameters) run.communicator().broadcast(numbers(p), /*root=*/0);
  ch::optim::Sgd optimizer{parameters, sgd};
  train_by_hand(run, data, model, 0, epochs, [&](double weight) {
    for (const auto& p : parameters) {
      for (float& g : gradient(p)) g *= static_cast<float>(weight);
      all_reduce(gradient(p));
    }
    optimizer.step();
  });
}

/// Trains `net`, a policy, with the usual loop.
template <class Net, class Optimizer>
void train(Data& data, Net& net, Optimizer& optimizer) {
  for (int e = 0; e < epochs; ++e)
    for (const auto& [images, labels] : data.epoch(e)) {
      optimizer.zero_grad();
      const auto loss = ch::cross_entropy(net(images), labels);
      loss.backward();
      optimizer.step();
    }
}

/// Trains `net`, a policy that began with the parameters of the lesson's model, and compares them. Returns main's
/// status: 1 if a parameter differs by more than `allowed` on any rank.
template <class Net, class Optimizer>
int compare(ch::Run& run, Data& data, ch::nn::Module& lesson, Net& net, Optimizer& optimizer, double allowed) {
  train(data, net, optimizer);
  int status = 1;
  net.gathered([&](ch::nn::Module& whole) {
    status = compare_parameters(run, Net::name, ch::nn::named_parameters<ch::Cpu>(lesson),
                                ch::nn::named_parameters<ch::Cpu>(whole), allowed);
  });
  return status;
}
