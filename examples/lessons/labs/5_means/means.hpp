#pragma once
/// Comparison in lab 5: averaged gradients of uneven shares, and those of one device.

#include <numeric>

#include "../answers.hpp"

namespace means_lab {

inline constexpr const char* title = "Lab 5: means that lie";

template <class D>
struct Net : ch::nn::Module {
  ch::nn::Linear<D, double> fc1{5, 8}, fc2{8, 3};
  CHORUS_MODULE(Net, fc1, fc2)
  auto forward(const auto& x) const { return fc2(ch::tanh(fc1(x))); }
};

/// The gradients of the mean loss over samples `first` to `last` of seven; zeros if there are none.
inline std::vector<double> gradients(ch::Index first, ch::Index last) {
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

template <class Student>
void run(lab::Lab& lab) {
  for (const int rank : {0, 1})
    lab.compare(ch::cat("mean of both: a sample of rank ", rank, " counts"),
                answers::counts_in_mean_of_means(2, rank == 0 ? 4 : 3, 7), 1e-3,
                "Which weight does a sample have in its rank's mean, in the mean of both, and in a mean over seven?");
  lab.compare("sum of both, times too large", answers::sum_of_means(2), 0,
              "If every gradient were 1, what would each rank's mean be?");
  const auto whole = gradients(0, 7);
  for (const std::vector<ch::Index>& shares : {std::vector<ch::Index>{4, 3}, {6, 1}, {7, 0}, {3, 3, 1}}) {
    std::string name;
    for (const ch::Index share : shares) name += ch::cat(name.empty() ? "" : " + ", share);
    double apart = 0;
    std::mutex mutex;
    const auto average = [&](ch::comm::AnyCommunicator& ranks) {
      const auto me = static_cast<std::ptrdiff_t>(ranks.rank());
      const auto begin = std::accumulate(shares.begin(), shares.begin() + me, ch::Index{0});
      const auto own = shares[static_cast<std::size_t>(me)];
      auto gradient = gradients(begin, begin + own);
      Student::average(ranks, gradient, own);
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        const double difference = std::abs(gradient[i] - whole[i]);
        if (!(difference <= apart)) apart = difference;  // also for a NaN
      }
    };
    if (!lab.run(name, [&] { lab::on_ranks(static_cast<int>(shares.size()), average, std::chrono::seconds(3)); }))
      return;
    lab.expect(name + ": farthest from one device's gradient", 0, apart, 1e-9,
               "Which weight does each rank's mean need?");
  }
}

}  // namespace means_lab
