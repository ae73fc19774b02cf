/// Comparison in lab 5: averaged gradients of uneven shares, and those of one device. SPOILERS: read this when your lab
/// is right.

#include <chorus/chorus.hpp>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <numeric>

#include "means.hpp"

namespace means_lab {
namespace {



template <class D>
struct Net : ch::nn::Module {
  ch::nn::Linear<D, double> fc1{5, 8}, fc2{8, 3};
  CHORUS_MODULE(Net, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::tanh(fc1(x))); }
};

/// The gradients of the mean loss over samples `first` to `last` of seven; zeros if there are none.
std::vector<double> gradients(ch::Index first, ch::Index last) {
  ch::SingleDevice<Net<ch::Cpu>> net{Net<ch::Cpu>{}, 1};
  auto x = ch::Tensor<double, 2>::empty({7, 5});
  auto y = ch::Tensor<std::int64_t, 1>::empty({7});
  for (ch::Index i = 0; i < x.numel(); ++i) x.data()[i] = std::sin(static_cast<double>(i * i));
  for (ch::Index i = 0; i < 7; ++i) y(i) = i * i % 3;
  ch::manual_seed(3);
  std::vector<double> out;
  for (const auto& p : net.parameters()) {
    auto* const values = static_cast<double*>(p.parameter->value_data());
    for (ch::Index i = 0; i < p.parameter->count(); ++i)
      values[i] = 0.3 * std::cos(static_cast<double>(3 * i + p.parameter->count()));
  }
  if (first < last) ch::cross_entropy(net(x.slice(0, first, last)), y.slice(0, first, last)).backward();
  for (const auto& p : net.parameters()) {
    const auto* const numbers = static_cast<const double*>(p.parameter->grad_data());
    for (ch::Index i = 0; i < p.parameter->count(); ++i) out.push_back(first < last ? numbers[i] : 0.0);
  }
  return out;
}

/// How much each of seven samples, four on rank 0 and three on rank 1, counts in the sum of both ranks' means times
/// `scale`; 1: as much as in the mean over seven.
std::vector<double> counts(double scale) {
  std::vector<double> out;
  lab::on_ranks(2, [&](ch::comm::AnyCommunicator& ranks) {
    std::vector<double> of(7);
    const std::size_t begin = ranks.rank() == 0 ? 0 : 4, end = ranks.rank() == 0 ? 4 : 7;
    for (std::size_t i = begin; i < end; ++i) of[i] = 7.0 / static_cast<double>(end - begin);
    ranks.all_reduce(std::span(of), ch::comm::ReduceOp::sum, {.scale = scale});
    if (ranks.rank() == 0) out = of;
  });
  return out;
}

/// Gradients that are not the mean over all samples, and their names.
struct Answer {
  const char* name;
  std::vector<double> gradient;
};
std::vector<Answer> wrong_answers(const std::vector<ch::Index>& shares) {
  std::vector<double> sum_of_means, sum_of_sums;
  double not_empty = 0;
  ch::Index begin = 0;
  for (const ch::Index share : shares) {
    const auto own = gradients(begin, begin + share);
    sum_of_means.resize(own.size());
    sum_of_sums.resize(own.size());
    for (std::size_t i = 0; i < own.size(); ++i) {
      sum_of_means[i] += own[i];
      sum_of_sums[i] += own[i] * static_cast<double>(share);
    }
    not_empty += share > 0;
    begin += share;
  }
  const auto divided = [&](double by) {
    auto out = sum_of_means;
    for (double& x : out) x /= by;
    return out;
  };
  return {{"it is the mean of the means of the ranks that have samples", divided(not_empty)},
          {"it is the mean of the ranks' means", divided(static_cast<double>(shares.size()))},
          {"it is the sum of the ranks' means", sum_of_means},
          {"it is the sum over all samples, divided by nothing", sum_of_sums}};
}
/// apart := the largest difference of two vectors, if it is larger; also for a NaN.
void farthest(const std::vector<double>& a, const std::vector<double>& b, double& apart) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (const double difference = std::abs(a[i] - b[i]); !(difference <= apart)) apart = difference;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  const auto mean = counts(0.5), sum = counts(1);
  for (const std::size_t rank : {0u, 1u})
    lab.compare(ch::cat("mean of both: a sample of rank ", rank, " counts"), mean[rank == 0 ? 0 : 6], 1e-3,
                "Which weight does a sample have in its rank's mean, in the mean of both, and in a mean over seven?");
  lab.compare("sum of both, times too large", std::accumulate(sum.begin(), sum.end(), 0.0) / 7, 1e-9,
              "If every gradient were 1, what would each rank's mean be?");
  const auto whole = gradients(0, 7);
  for (const std::vector<ch::Index>& shares : {std::vector<ch::Index>{4, 3}, {6, 1}, {7, 0}, {3, 3, 1}}) {
    std::string name;
    for (const ch::Index share : shares) name += ch::cat(name.empty() ? "" : " + ", share);
    const auto answers = wrong_answers(shares);
    std::vector<double> apart(answers.size() + 1);
    std::mutex mutex;
    const auto average = [&](ch::comm::AnyCommunicator& ranks) {
      const auto me = static_cast<std::ptrdiff_t>(ranks.rank());
      const auto begin = std::accumulate(shares.begin(), shares.begin() + me, ch::Index{0});
      const auto own = shares[static_cast<std::size_t>(me)];
      auto gradient = gradients(begin, begin + own);
      code.average(ranks, gradient, own);
      const std::lock_guard lock(mutex);
      farthest(gradient, whole, apart[0]);
      for (std::size_t i = 0; i < answers.size(); ++i) farthest(gradient, answers[i].gradient, apart[i + 1]);
    };
    if (!lab.run(name, [&] { lab::on_ranks(static_cast<int>(shares.size()), average, std::chrono::seconds(3)); }))
      return;
    const char* why = "which weight does each rank's mean need?";
    for (std::size_t i = 0; i < answers.size(); ++i)
      if (apart[i + 1] <= 1e-9) why = answers[i].name;
    char text[200];
    std::snprintf(text, sizeof text, "it is up to %.3g away: %s", apart[0], why);
    lab.require(name + ": the gradient of one device, to 1e-9", apart[0] <= 1e-9, text);
  }
}

}  // namespace means_lab
