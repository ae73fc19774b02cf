#pragma once
/// PowerSGD: gradients are sent as products of two thin matrices (Vogels, Karimireddy, Jaggi, "PowerSGD: practical
/// low-rank gradient compression for distributed optimization", NeurIPS 2019).

#include <algorithm>
#include <array>
#include <chorus/core/philox.hpp>
#include <chorus/kernels/copy.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/optimizer.hpp>
#include <chorus/kernels/square_sum.hpp>
#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/hooks/bucket_states.hpp>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorus {

/// A parameter of shape [n, ...] is an n x m matrix M: its gradient plus the residual. One step of subspace iteration:
/// P = mean of M Q over ranks, orthonormalised; Q = mean of M' P; the gradient becomes P Q', and M - P Q' is this
/// rank's residual for the next step. rank (n + m) numbers instead of n m are all-reduced in two calls, each sending 2
/// (n - 1) / n of its numbers. Vectors, and matrices that gain too little, are sent in full.
struct PowerSgd {
  static constexpr bool several_rounds = true;
  /// Columns of P and Q; usually 1 or 2.
  Index matrix_approximation_rank = 1;
  /// The number of first steps that average in full, while gradients change most.
  int start_powersgd_iter = 0;
  /// The compression that makes it worthwhile: used if rank (n + m) min_compression_rate < n m.
  double min_compression_rate = 2;
  /// Whether the residual is added to the next step's gradient. If false, it is lost and needs no memory.
  bool use_error_feedback = true;
  /// Whether a step begins with the last step's Q. If false, it draws new random numbers.
  bool warm_start = true;
  std::uint64_t seed = 0;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    check<UsageError>(matrix_approximation_rank >= 1,
                      "PowerSgd: expected matrix_approximation_rank of at least 1, got ", matrix_approximation_rank);
    check<UsageError>(min_compression_rate > 0, "PowerSgd: expected min_compression_rate above 0, got ",
                      min_compression_rate);
    auto& state = states.of<State<T, D>>(bucket.index);
    if (communicator.size() == 1) {
      detail::add_rest(state.rest, bucket.gradients, bucket.device);
      return {};
    }
    state.full = steps < start_powersgd_iter;
    if (state.full) return communicator.all_reduce_async(bucket.gradients, comm::ReduceOp::sum, options(bucket.weight));
    if (state.matrices.empty()) lay_out(bucket, state);
    if (!warm_start) draw_second(bucket, state);
    const T even = detail::even_shares<T>(bucket.weight, communicator.size());
    if (use_error_feedback && even > 0)
      kernels::axpy(bucket.device, state.rest.numel(), T{1} / even, state.rest.data(), bucket.gradients.data());
    for (const Matrix& matrix : state.matrices) {
      const T* grad = bucket.gradients.data() + matrix.begin;
      T* to = state.first.data() + matrix.in_first;
      if (matrix.low_rank())
        kernels::gemm(bucket.device, no, no, matrix.rows, matrix.rank, matrix.columns, grad, matrix.columns,
                      state.second.data() + matrix.in_second, matrix.rank, to, matrix.rank, false);
      else
        copy_bytes(bucket.device, to, bucket.device, grad, static_cast<std::size_t>(matrix.rows) * sizeof(T));
    }
    return communicator.all_reduce_async(
        std::span<T>(state.first.data(), static_cast<std::size_t>(state.first.numel())), comm::ReduceOp::sum,
        options(bucket.weight));
  }

  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int round) {
    if (communicator.size() == 1) return {};
    auto& state = states.of<State<T, D>>(bucket.index);
    if (state.full) return {};
    if (round == 0) {
      for (std::size_t i = 0; i < state.matrices.size(); ++i) {
        const Matrix& matrix = state.matrices[i];
        if (!matrix.low_rank()) continue;
        T* p = state.first.data() + matrix.in_first;
        orthonormalise(bucket.device, matrix, bucket.parts[i].name, p);
        kernels::gemm(bucket.device, yes, no, matrix.columns, matrix.rank, matrix.rows,
                      bucket.gradients.data() + matrix.begin, matrix.columns, p, matrix.rank,
                      state.second.data() + matrix.in_second, matrix.rank, false);
      }
      return communicator.all_reduce_async(
          std::span<T>(state.second.data(), static_cast<std::size_t>(state.second.numel())), comm::ReduceOp::sum,
          options(bucket.weight));
    }
    const T even = detail::even_shares<T>(bucket.weight, communicator.size());
    const bool leaves_rest = use_error_feedback && even > 0;
    if (leaves_rest)
      copy_bytes(bucket.device, state.rest.data(), bucket.device, bucket.gradients.data(),
                 bucket.gradients.size_bytes());
    for (const Matrix& matrix : state.matrices) {
      T* grad = bucket.gradients.data() + matrix.begin;
      const T* first = state.first.data() + matrix.in_first;
      if (matrix.low_rank())
        kernels::gemm(bucket.device, no, yes, matrix.rows, matrix.columns, matrix.rank, first, matrix.rank,
                      state.second.data() + matrix.in_second, matrix.rank, grad, matrix.columns, false);
      else
        copy_bytes(bucket.device, grad, bucket.device, first, static_cast<std::size_t>(matrix.rows) * sizeof(T));
    }
    if (leaves_rest) {
      kernels::axpy(bucket.device, state.rest.numel(), T{-1}, bucket.gradients.data(), state.rest.data());
      for (const Matrix& matrix : state.matrices)  // sent in full: no residual
        if (!matrix.low_rank())
          zero_bytes(bucket.device, state.rest.data() + matrix.begin,
                     static_cast<std::size_t>(matrix.rows) * sizeof(T));
      if (even != T{1}) kernels::scale(bucket.device, state.rest.numel(), even, state.rest.data());
    }
    // A non-finite residual would stay for ever. All ranks have the same Q, so all decide the same.
    if (!std::isfinite(kernels::square_sum(bucket.device, state.second.numel(), state.second.data()))) state = {};
    return {};
  }

  void after_backward() { ++steps; }
  void reset() { states.clear(); }
  template <class T, Device D, class Visit>
  void remembered(const GradBucket<T, D>& bucket, bool make, const Visit& visit) {
    auto& state = states.of<State<T, D>>(bucket.index);
    if (make && state.matrices.empty()) lay_out(bucket, state);
    for (std::size_t i = 0; i < state.matrices.size(); ++i) {
      const auto& part = bucket.parts[i];
      const auto& matrix = state.matrices[i];
      if (use_error_feedback) visit("rest", part, part.shape, bucket.device, state.rest.data() + part.begin);
      const std::array<Index, 2> shape{matrix.columns, matrix.rank};
      if (matrix.low_rank() && warm_start)
        visit("q", part, std::span<const Index>(shape), bucket.device, state.second.data() + matrix.in_second);
    }
  }
  /// The number of steps, for a checkpoint.
  static constexpr std::string_view kept_as = "power_sgd";
  std::array<double, 1> kept() const { return {static_cast<double>(steps)}; }
  static bool can_keep(const std::array<double, 1>& kept) { return kept[0] >= 0 && kept[0] < 1e9; }
  void keep(const std::array<double, 1>& kept) { steps = static_cast<int>(kept[0]); }

  /// A parameter: `rows` x `columns` numbers, approximated with `rank` columns. rank 0: sent in full, as `rows`
  /// numbers.
  struct Matrix {
    std::size_t begin, in_first, in_second;
    Index rows, columns, rank;
    bool low_rank() const { return rank > 0; }
  };
  template <class T, class D>
  struct State {
    std::vector<Matrix> matrices;
    Tensor<T, 1, D> rest;           // the residual
    Tensor<T, 1, D> first, second;  // all P and all parameters sent in full; all Q
    bool full = false;
  };
  int steps = 0;
  detail::BucketStates states = {};

 private:
  static constexpr auto no = kernels::Trans::no, yes = kernels::Trans::yes;

  static comm::CollectiveOptions options(double weight) {
    return {.scale = weight, .traffic = trace::Traffic::gradients};
  }

  template <class T, Device D>
  void lay_out(const GradBucket<T, D>& bucket, State<T, D>& state) const {
    std::size_t first = 0, second = 0;
    for (const auto& part : bucket.parts) {
      const Index count = numel(part.shape);
      const Index rows = part.shape.size() < 2 || count == 0 ? count : part.shape[0];
      const Index columns = rows == 0 ? 0 : count / rows;
      const Index rank = std::min({matrix_approximation_rank, rows, columns});
      Matrix matrix{part.begin, first, second, count, 1, 0};
      if (part.shape.size() >= 2 &&
          static_cast<double>((rows + columns) * rank) * min_compression_rate < static_cast<double>(count))
        matrix = {part.begin, first, second, rows, columns, rank};
      first += static_cast<std::size_t>(matrix.rows * std::max(matrix.rank, Index{1}));
      second += static_cast<std::size_t>(matrix.columns * matrix.rank);
      state.matrices.push_back(matrix);
    }
    if (use_error_feedback) detail::grow(state.rest, bucket.gradients.size(), bucket.device);
    detail::grow(state.first, first, bucket.device);
    detail::grow(state.second, second, bucket.device);
    if (warm_start) draw_second(bucket, state);  // otherwise each step draws
  }
  template <class T, Device D>
  void draw_second(const GradBucket<T, D>& bucket, State<T, D>& state) const {
    std::vector<T> q(static_cast<std::size_t>(state.second.numel()));
    for (std::size_t i = 0; i < state.matrices.size(); ++i) {
      const auto& matrix = state.matrices[i];
      if (matrix.low_rank())
        draw(bucket.parts[i].name,
             std::span<T>(q).subspan(matrix.in_second, static_cast<std::size_t>(matrix.columns * matrix.rank)));
    }
    copy_bytes(bucket.device, state.second.data(), Cpu{}, q.data(), q.size() * sizeof(T));
  }
  // Draws Q for a parameter: the same on all ranks and in any bucket. The name is hashed with FNV-1a.
  template <class T>
  void draw(std::string_view name, std::span<T> q) const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    const auto step = warm_start ? 0 : static_cast<std::uint64_t>(steps);
    for (std::size_t i = 0; i < q.size(); ++i)
      q[i] = static_cast<T>(unit_float(
                 philox(seed + step, {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i >> 32),
                                      static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32)})[0])) -
             static_cast<T>(0.5);
  }

  // Gram-Schmidt, column by column. A column that vanishes, as all do if the gradient is 0, is replaced by a random
  // one, the same on all ranks: with a zero column, Q's column would stay 0 in all later steps.
  template <class T, Device D>
  void orthonormalise(D device, const Matrix& matrix, const std::string& name, T* numbers) const {
    const auto rows = static_cast<std::size_t>(matrix.rows), rank = static_cast<std::size_t>(matrix.rank);
    std::vector<T> p(rows * rank), drawn;
    copy_bytes(Cpu{}, p.data(), device, numbers, p.size() * sizeof(T));
    const auto dot = [&](std::size_t a, std::size_t b) {
      double sum = 0;
      for (std::size_t i = 0; i < rows; ++i)
        sum += static_cast<double>(p[i * rank + a]) * static_cast<double>(p[i * rank + b]);
      return sum;
    };
    // Returns false if nothing of the column is left; non-finite numbers stay.
    const auto normalise = [&](std::size_t c) {
      const double before = dot(c, c);
      for (std::size_t earlier = 0; earlier < c; ++earlier) {
        const auto along = static_cast<T>(dot(earlier, c));
        for (std::size_t i = 0; i < rows; ++i) p[i * rank + c] -= along * p[i * rank + earlier];
      }
      const double length = dot(c, c);
      if (std::isfinite(before) && length <= 1e-12 * before) return false;  // only rounding is left
      const double factor = 1 / std::sqrt(length);                          // may exceed the range of T
      for (std::size_t i = 0; i < rows; ++i)
        p[i * rank + c] = static_cast<T>(factor * static_cast<double>(p[i * rank + c]));
      return true;
    };
    for (std::size_t c = 0; c < rank; ++c) {
      if (normalise(c)) continue;
      if (drawn.empty()) {
        drawn.resize(p.size());
        draw(cat(name, ' ', steps), std::span<T>(drawn));  // a new draw in each step
      }
      for (std::size_t i = 0; i < rows; ++i) p[i * rank + c] = drawn[i * rank + c];
      normalise(c);
    }
    copy_bytes(device, numbers, Cpu{}, p.data(), p.size() * sizeof(T));
  }
};

}  // namespace chorus
