/// Comparison in lab 6: local SGD with periods of 1, 4 and 16 steps, and DistributedDataParallel, under three
/// optimizers. SPOILERS: read this when your lab is right.

#include <chorus/chorus.hpp>
#include <cmath>

#include "local_sgd.hpp"

namespace local_sgd_lab {
namespace {


using Average = std::function<void(ch::comm::AnyCommunicator&, std::span<double>)>;
/// Every rank ends with the mean of all ranks' parameters.
void average_of_lab(ch::comm::AnyCommunicator& ranks, std::span<double> parameters) {
  ranks.all_reduce(parameters, ch::comm::ReduceOp::sum, {.scale = 1.0 / ranks.size()});
}

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

Optimizer optimizer(const std::string& name, const Parameters& parameters) {
  using namespace ch::optim;
  if (name == "adam") return std::make_unique<Adam<ch::Cpu>>(parameters, AdamOptions{.lr = 0.02});
  return std::make_unique<Sgd<ch::Cpu>>(parameters, SgdOptions{.lr = 0.2, .momentum = name == "momentum" ? 0.9 : 0.0});
}
std::span<double> numbers(const ch::nn::NamedParameter<ch::Cpu>& p) {
  return {static_cast<double*>(p.parameter->value_data()), static_cast<std::size_t>(p.parameter->count())};
}

/// A step's gradients for this rank's two samples of a batch of six. Batches are the same in all runs.
template <class Policy>
void backward(Policy& net, int rank, int step) {
  auto x = ch::Tensor<double, 2>::empty({2, 32});
  auto y = ch::Tensor<std::int64_t, 1>::empty({2});
  for (ch::Index i = 0; i < x.numel(); ++i)
    x.data()[i] = std::sin(static_cast<double>((i + 1) * (6 * step + 2 * rank + 1)));
  for (ch::Index i = 0; i < 2; ++i) y(i) = (step + rank + i) % 2;
  ch::cross_entropy(net(x), y).backward();
}
void fill(const Parameters& parameters) {
  for (const auto& p : parameters)
    for (std::size_t i = 0; i < numbers(p).size(); ++i)
      numbers(p)[i] = 0.2 * std::cos(static_cast<double>(7 * i + numbers(p).size()));
}
std::vector<double> all(const Parameters& parameters) {
  std::vector<double> out;
  for (const auto& p : parameters) out.insert(out.end(), numbers(p).begin(), numbers(p).end());
  return out;
}

/// Rank 0's parameters after all steps under DistributedDataParallel.
std::vector<double> train_ddp(const std::string& name) {
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
/// The same if ranks step by themselves, and `average` is called every `period` steps. `sent`: the bytes that
/// rank 0 has sent.
std::vector<double> train_local(const Average& average, const std::string& name, int period, double& sent) {
  std::vector<double> out;
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
      if ((step + 1) % period == 0) average(ranks, parameters);
    }
    if (ranks.rank() == 0) out = all(ch::nn::named_parameters<ch::Cpu>(net.module()));
  });
  sent = static_cast<double>(ch::trace::bytes_sent(0));
  return out;
}
double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  double apart = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (const double difference = std::abs(a[i] - b[i]); !(difference <= apart)) apart = difference;  // also for a NaN
  return apart;
}
/// Whether two trainings end with equal parameters, up to rounding.
bool near(const std::vector<double>& a, const std::vector<double>& b) { return farthest(a, b) < 1e-9; }

/// Checks the result of the student's function, and the bytes it sends.
void judge(lab::Lab& lab, const Code& code) {
  constexpr std::size_t count = 3000;
  const auto number_of = [](std::size_t rank, std::size_t i) {
    return std::sin(static_cast<double>(i * 7 + rank * rank));
  };
  std::vector<std::vector<double>> by_rank(ranks_of_lab);
  ch::trace::reset_traffic();
  const bool ended = lab.run("average", [&] {
    lab::on_ranks(
        ranks_of_lab,
        [&](ch::comm::AnyCommunicator& ranks) {
          const auto rank = static_cast<std::size_t>(ranks.rank());
          for (std::size_t i = 0; i < count; ++i) by_rank[rank].push_back(number_of(rank, i));
          code.average(ranks, by_rank[rank]);
        },
        std::chrono::seconds(3));
  });
  if (!ended) return;
  std::string wrong;
  for (std::size_t rank = 0; rank < by_rank.size() && wrong.empty(); ++rank)
    for (std::size_t i = 0; i < count && wrong.empty(); ++i) {
      const double mean = (number_of(0, i) + number_of(1, i) + number_of(2, i)) / 3;
      const double is = by_rank[rank][i];
      if (std::abs(is - mean) < 1e-12) continue;
      wrong = ch::cat("ranks had ", number_of(0, i), ", ", number_of(1, i), " and ", number_of(2, i), "; rank ", rank,
                      " ended with ", is,
                      is == number_of(rank, i)         ? ", which is its own number"
                      : is == number_of(0, i)          ? ", which is rank 0's number"
                      : std::abs(is - 3 * mean) < 1e-9 ? ", which is the sum"
                      : std::abs(is - mean) < 1e-6     ? ", which is the mean in single precision"
                                                       : "");
    }
  lab.require("average: every rank ends with the mean", wrong.empty(), wrong);
  lab.require("average: the same bits on every rank", by_rank[0] == by_rank[1] && by_rank[0] == by_rank[2],
              "they differ");
  bool least = true;
  std::string sent;
  for (int rank = 0; rank < ranks_of_lab; ++rank) {
    const auto bytes = static_cast<double>(ch::trace::bytes_sent(rank));
    least = least && bytes == 2.0 * (ranks_of_lab - 1) / ranks_of_lab * 8 * count;
    sent += ch::cat(rank == 0 ? "" : ", ", bytes);
  }
  lab.require("average: each rank sends 2(N-1)/N of the parameters' bytes", least,
              ch::cat("of ", 8 * count, " bytes on each of 3 ranks they have sent ", sent));
  double bytes = 0, apart = 0;
  const std::string training = "average: SGD with H = 1, farthest from DistributedDataParallel";
  if (lab.run(training, [&] { apart = farthest(train_local(code.average, "sgd", 1, bytes), train_ddp("sgd")); }))
    lab.expect(training, 0, apart, 1e-9, "Each rank steps by itself; then ranks average their parameters.");
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  double each_step = 0, each_fourth = 0, once = 0;
  const auto sgd = train_local(average_of_lab, "sgd", 1, each_step);
  const char* const hint = "Is the step with the mean of the gradients the mean of the steps with each gradient?";
  double not_asked = 0;
  for (const char* name : {"sgd", "momentum", "adam"})
    lab.compare(ch::cat("H = 1 is the same training: ", name),
                near(train_local(average_of_lab, name, 1, not_asked), train_ddp(name)), hint);
  lab.compare("H = 4 is the same training: sgd", near(train_local(average_of_lab, "sgd", 4, each_fourth), sgd),
              "At which parameters does a rank compute its second gradient?");
  train_local(average_of_lab, "sgd", 16, once);
  const char* const of_bytes = "How often do ranks average in 16 steps, and how many bytes does an all-reduce send?";
  lab.compare("bytes that a rank sends: H = 1", each_step, 0, of_bytes);
  lab.compare("bytes that a rank sends: H = 4", each_fourth, 0, of_bytes);
  lab.compare("bytes that a rank sends: H = 16", once, 0, of_bytes);
  judge(lab, code);
}

}  // namespace local_sgd_lab
