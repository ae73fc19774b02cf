#pragma once
/// Lesson 11's model, a chain of three layers, and its picture of what ranks did when.

#include <chorus/comm/objects.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/parallel/pipeline.hpp>

#include "toy.hpp"

struct Hidden : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc;
  Hidden(ch::Index in, ch::Index out) : fc{in, out} {}
  CHORUS_MODULE(Hidden, fc)
  auto forward(const auto& x) const { return ch::relu(fc(x)); }
};
struct Last : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc{32, 10};
  CHORUS_MODULE(Last, fc)
  auto forward(const auto& x, const auto& labels) const { return ch::cross_entropy(fc(x), labels); }
};
struct Chain : ch::nn::Module {
  Hidden first{784, 64}, second{64, 32};
  Last last;
  CHORUS_MODULE(Chain, first, second, last)
  CHORUS_PIPELINE(first, second, last)
};

inline constexpr ch::Index widths[] = {784, 64, 32};  // of the layers' inputs

using Matrix = ch::Tensor<float, 2>;
using Activation = ch::Variable<float, 2>;

inline std::span<float> numbers(const Matrix& x) { return {x.data(), static_cast<std::size_t>(x.numel())}; }

inline void send(ch::comm::AnyCommunicator& ranks, const Matrix& x, int to) {
  ranks.send(numbers(x), to, {.traffic = Traffic::activations});
}
inline Matrix receive(ch::comm::AnyCommunicator& ranks, ch::Index rows, ch::Index columns, int from) {
  const auto x = Matrix::empty({rows, columns});
  ranks.recv(numbers(x), from, {.traffic = Traffic::activations});
  return x;
}

/// What this rank computes when.
struct Timeline {
  struct Busy {
    char action;
    double from, to;  // in seconds
  };
  double pass_seconds = 0;  // how much longer each pass takes; backward twice that
  std::vector<Busy> busy{};

  /// Calls `work` as that action: 0123 are micro-batches forward, abcd the same backward.
  void compute(char action, const auto& work) {
    const double from = seconds();
    work();
    std::this_thread::sleep_for(std::chrono::duration<double>((action < 'a' ? 1 : 2) * pass_seconds));
    busy.push_back({action, from, seconds()});
  }
  double computed() const {
    double sum = 0;
    for (const auto& each : busy) sum += each.to - each.from;
    return sum;
  }
  /// Rank 0 prints a line per rank: which action ran when. Points are waiting. All ranks call it.
  void draw(ch::comm::AnyCommunicator& ranks, double begin, double end) const {
    std::string line(72, '.');
    for (std::size_t i = 0; i < line.size(); ++i) {
      const double at = begin + (static_cast<double>(i) + 0.5) / static_cast<double>(line.size()) * (end - begin);
      for (const auto& [action, from, to] : busy)
        if (from <= at && at < to) line[i] = action;
    }
    const auto lines = ch::comm::all_gather_object(ranks, line);
    for (std::size_t rank = 0; ranks.rank() == 0 && rank < lines.size(); ++rank)
      std::printf("rank %zu %s\n", rank, lines[rank].c_str());
  }
};

/// Trains `net`, a pipeline, with the usual loop.
template <class Net, class Optimizer>
void train_pipeline(Data& data, Net& net, Optimizer& optimizer) {
  for (int e = 0; e < epochs; ++e)
    for (const auto& [images, labels] : data.epoch(e)) {
      optimizer.zero_grad();
      net(ch::flatten(images), labels).backward();
      optimizer.step();
    }
}
