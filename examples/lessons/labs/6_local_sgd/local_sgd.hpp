#pragma once
/// What lab 6 compares: local SGD with periods of 1, 4 and 16 steps with DistributedDataParallel, under three
/// optimizers.

#include "../lab.hpp"

namespace local_sgd_lab {

inline constexpr const char* title = "Lab 6: parameters or gradients";
constexpr int ranks_of_lab = 3, steps = 16;
constexpr std::size_t model_numbers = 32 * 36 + 36 * 12 + 12 * 2;

template <class D>
struct Net : ch::nn::Module {
  ch::nn::Linear<D, double> fc1{32, 36, {.bias = false}}, fc2{36, 12, {.bias = false}};
  ch::nn::Linear<D, double> fc3{12, 2, {.bias = false}};
  CHORUS_MODULE(Net, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(ch::tanh(fc2(ch::tanh(fc1(x))))); }
};
using Model = Net<ch::Cpu>;
using Parameters = std::vector<ch::nn::NamedParameter<ch::Cpu>>;
using Optimizer = std::unique_ptr<ch::optim::Optimizer<ch::Cpu>>;

inline Optimizer optimizer(const std::string& name, const Parameters& parameters) {
  using namespace ch::optim;
  if (name == "adam") return std::make_unique<Adam<ch::Cpu>>(parameters, AdamOptions{.lr = 0.02});
  return std::make_unique<Sgd<ch::Cpu>>(parameters, SgdOptions{.lr = 0.2, .momentum = name == "momentum" ? 0.9 : 0.0});
}
inline std::span<double> numbers(const ch::nn::NamedParameter<ch::Cpu>& p) {
  return {static_cast<double*>(p.parameter->value_data()), static_cast<std::size_t>(p.parameter->count())};
}

/// A step's gradients on this rank's two samples of a batch of six. Batches are the same in all runs.
template <class Policy>
void backward(Policy& net, int rank, int step) {
  auto x = ch::Tensor<double, 2>::empty({2, 32});
  auto y = ch::Tensor<std::int64_t, 1>::empty({2});
  for (ch::Index i = 0; i < x.numel(); ++i)
    x.data()[i] = std::sin(static_cast<double>((i + 1) * (6 * step + 2 * rank + 1)));
  for (ch::Index i = 0; i < 2; ++i) y(i) = (step + rank + i) % 2;
  ch::cross_entropy(net(x), y).backward();
}
inline void fill(const Parameters& parameters) {
  for (const auto& p : parameters)
    for (std::size_t i = 0; i < numbers(p).size(); ++i) numbers(p)[i] = 0.2 * std::cos(static_cast<double>(7 * i + numbers(p).size()));
}
inline std::vector<double> all(const Parameters& parameters) {
  std::vector<double> out;
  for (const auto& p : parameters) out.insert(out.end(), numbers(p).begin(), numbers(p).end());
  return out;
}

/// Rank 0's parameters after all steps under DistributedDataParallel.
inline std::vector<double> train_ddp(const std::string& name) {
  std::vector<double> out;
  lab::on_ranks(ranks_of_lab, [&](ch::comm::AnyCommunicator& ranks) {
    Model model;
    fill(ch::nn::named_parameters<ch::Cpu>(model));
    ch::DistributedDataParallel<Model> net{std::move(model), ranks};
    const auto adjust = optimizer(name, net.parameters());
    for (int step = 0; step < steps; ++step) {
      adjust->zero_grad();
      backward(net, ranks.rank(), step);
      adjust->step();
    }
    if (ranks.rank() == 0) out = all(ch::nn::named_parameters<ch::Cpu>(net.module()));
  });
  return out;
}
/// The same where ranks step by themselves, and the student averages every `period` steps.
template <class Student>
std::vector<double> train_local(const std::string& name, int period, bool& same) {
  std::vector<std::vector<double>> by_rank(ranks_of_lab);
  ch::trace::reset_traffic();
  lab::on_ranks(ranks_of_lab, [&](ch::comm::AnyCommunicator& ranks) {
    ch::SingleDevice<Model> net{Model{}};
    fill(net.parameters());
    const auto adjust = optimizer(name, net.parameters());
    const auto& group = net.flat_parameters().groups().front();
    const std::span<double> parameters(static_cast<double*>(static_cast<void*>(group.value(0))), model_numbers);
    for (int step = 0; step < steps; ++step) {
      adjust->zero_grad();
      backward(net, ranks.rank(), step);
      adjust->step();
      if ((step + 1) % period == 0) Student::average(ranks, parameters);
    }
    by_rank[static_cast<std::size_t>(ranks.rank())] = all(ch::nn::named_parameters<ch::Cpu>(net.module()));
  });
  same = by_rank[0] == by_rank[1] && by_rank[0] == by_rank[2];
  return by_rank[0];
}
inline bool near(const std::vector<double>& a, const std::vector<double>& b) {
  double apart = 0;
  for (std::size_t i = 0; i < a.size(); ++i) apart = std::max(apart, std::abs(a[i] - b[i]));
  return apart < 1e-9;
}

template <class Student>
void run(lab::Lab& lab) {
  const auto sent = [] { return static_cast<double>(ch::trace::bytes_sent(0)); };
  std::vector<double> every_step;
  for (const char* name : {"sgd", "momentum", "adam"}) {
    bool same = false;
    const auto local = train_local<Student>(name, 1, same);
    lab.require(ch::cat("after an average all ranks have the same parameters: ", name), same, "they differ");
    if (name == std::string("sgd")) {
      every_step = local;
      lab.compare("bytes that a rank sends: H = 1", sent());
    }
    lab.compare(ch::cat("H = 1 is the same training: ", name), near(local, train_ddp(name)));
  }
  bool same = false;
  lab.compare("H = 4 is the same training: sgd", near(train_local<Student>("sgd", 4, same), every_step));
  lab.compare("bytes that a rank sends: H = 4", sent());
  train_local<Student>("sgd", 16, same);
  lab.compare("bytes that a rank sends: H = 16", sent());
}

}  // namespace local_sgd_lab
