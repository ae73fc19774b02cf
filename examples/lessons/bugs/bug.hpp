#pragma once
/// What the programs of the bug hunt are made of: ranks that are threads, and random numbers that are the same on every
/// machine. Programs are compiled in half a second: the ranks' code is elsewhere.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace bug {

using Numbers = std::vector<double>;

/// A rank of a group. All ranks make the same calls in the same order.
class Rank {
 public:
  virtual ~Rank() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// data := the sum of every rank's data.
  virtual void sum(std::span<double> data) = 0;
  /// The same while the program goes on. The sum is in `data` once the returned function has been called.
  virtual std::function<void()> start_sum(std::span<double> data) = 0;
  /// data := root's data.
  virtual void broadcast(std::span<double> data, int root) = 0;
  /// Every rank's numbers, in the order of ranks. All have as many.
  virtual Numbers gather(std::span<const double> mine) = 0;
  /// The group of `count` neighbours that this rank belongs to: ranks 0 to count - 1, and so on.
  virtual Rank& part(int count) = 0;
};

/// What a program is run with. One device has 1 rank and is never interrupted; its result is the right one.
struct Case {
  std::uint64_t seed = 1;
  int samples = 24;
  int steps = 6;
  int interrupted = 0;  // after so many steps the run ends, and another one goes on; 0: never
};

/// Evenly distributed in [0, 1), by a counter: splitmix64.
inline double uniform(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + (i + 1) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

/// A sample of a toy: y is near 2 x0 - x1 + 0.5.
struct Sample {
  double x[2], y;
};
inline Sample sample(std::uint64_t seed, int i) {
  const auto at = static_cast<std::uint64_t>(i) * 4;
  const double a = 2 * uniform(seed, at) - 1, b = 2 * uniform(seed, at + 1) - 1;
  return {{a, b}, 2 * a - b + 0.5 + uniform(seed, at + 2) - 0.5};
}
/// A linear model, its error, and the gradient of half the squared error.
struct Linear {
  Numbers w = {0, 0, 0};
  double error(const Sample& s) const { return w[0] * s.x[0] + w[1] * s.x[1] + w[2] - s.y; }
  void add_gradient(const Sample& s, Numbers& gradient, double times = 1) const {
    const double e = times * error(s);
    gradient[0] += e * s.x[0], gradient[1] += e * s.x[1], gradient[2] += e;
  }
  void step(const Numbers& gradient, double rate) {
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= rate * gradient[i];
  }
  double loss(std::uint64_t seed, int samples) const {
    double sum = 0;
    for (int i = 0; i < samples; ++i) sum += std::pow(error(sample(seed, i)), 2) / samples;
    return sum;
  }
};
/// The samples [begin, end) of a rank, where all ranks share `samples`; the last ranks have one less, if need be.
inline std::pair<int, int> share(int samples, int rank, int size) {
  const int each = samples / size, more = samples % size;
  const int begin = rank * each + std::min(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

/// Hands over a program: its number, and what each rank runs.
struct Program {
  using Train = double (*)(Rank& rank, const Case& with);
  Program(int number, Train train);
};

}  // namespace bug
