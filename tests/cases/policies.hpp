#pragma once
/// The same program under each policy.

#include <chorus/all.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "case.hpp"

namespace cases {

namespace ch = chorus;

/// A linear layer in double, with made-up numbers.
template <class D>
struct Line : ch::nn::Module {
  ch::nn::Linear<D, double> fc{3, 2};
  CHORUS_MODULE(Line, fc)
  auto forward(const auto& x) const { return fc(x); }
};
/// Two layers, from what a Line gives to one number.
template <class D>
struct Critic : ch::nn::Module {
  ch::nn::Linear<D, double> a{2, 5}, b{5, 1};
  CHORUS_MODULE(Critic, a, b)
  auto forward(const auto& x) const { return b(ch::tanh(a(x))); }
};

template <class Model>
Model filled(double key = 1) {
  Model model;
  double k = key;
  for (const auto& named : ch::nn::named_parameters<ch::Cpu>(model))
    for (ch::Index i = 0; i < named.parameter->count(); ++i)
      static_cast<double*>(named.parameter->value_data())[i] = std::sin(1.7 * ++k);
  return model;
}
/// Rows [begin, end) of a batch.
inline ch::Tensor<double, 2> rows(ch::Index begin, ch::Index end, ch::Index columns = 3) {
  auto x = ch::Tensor<double, 2>::empty({end - begin, columns});
  for (ch::Index i = 0; i < x.numel(); ++i) x.data()[i] = std::cos(0.9 * static_cast<double>(begin * columns + i));
  return x;
}

/// Which rows of a batch of that many a process has.
struct Share {
  int rank = 0, ranks = 1;
  ch::Index begin(ch::Index batch) const { return batch * rank / ranks; }
  ch::Index end(ch::Index batch) const { return batch * (rank + 1) / ranks; }
  ch::Tensor<double, 2> rows(ch::Index batch, ch::Index columns = 3) const {
    return cases::rows(begin(batch), end(batch), columns);
  }
};

struct Single {
  template <class Model>
  auto operator()(Model model) const {
    return std::make_unique<ch::SingleDevice<Model>>(std::move(model), 3);
  }
};
struct Dp {
  template <class Model>
  auto operator()(Model model) const {
    return std::make_unique<ch::DataParallel<Model>>(std::move(model), ch::DataParallelOptions{.device_ids = {0, 1}},
                                                     3);
  }
};
struct Ddp {
  ch::comm::AnyCommunicator& communicator;
  template <class Model>
  auto operator()(Model model) const {
    return std::make_unique<ch::DistributedDataParallel<Model>>(std::move(model), communicator,
                                                                ch::DistributedDataParallelOptions{}, 3);
  }
};

/// Prints what `program(make, share)` returns, a text, under each policy: `make(model)` gives the net. Of two ranks,
/// which are threads here, rank 0's.
template <class Program>
void under_each(std::ostream& out, const Program& program) {
  const auto text = [&](const auto& make, const Share& share) -> std::string {
    try {
      return program(make, share);
    } catch (const std::exception& error) {
      return std::string("refused: ") + error.what();
    }
  };
  out << "single: " << text(Single{}, {}) << "\n";
  out << "dp:     " << text(Dp{}, {}) << "\n";
  auto communicators = ch::comm::thread_group(2, std::chrono::seconds(20));
  std::string texts[2];
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 2; ++rank)
      ranks.emplace_back([&, rank] {
        texts[rank] = text(Ddp{communicators[static_cast<std::size_t>(rank)]}, Share{rank, 2});
      });
  }
  out << "ddp:    " << texts[0] << "\n";
}

}  // namespace cases
