/// Measurements of lab 13: one device's numbers by the library's layers and their autograd, bytes by its
/// TensorParallel. SPOILERS: read this when your lab is right.

#include <chorus/chorus.hpp>
#include <chorus/nn/layer_norm.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>

#include "tensor.hpp"

namespace tensor_lab {

Matrix times(const Matrix& a, const Matrix& b) {
  Matrix y{a.rows, b.columns};
  ch::check<ch::ShapeError>(a.columns == b.rows, "times: ", a.columns, " columns and ", b.rows, " rows");
  for (std::size_t r = 0; r < a.rows; ++r)
    for (std::size_t k = 0; k < a.columns; ++k)
      for (std::size_t c = 0; c < b.columns; ++c)
        y.numbers[r * b.columns + c] += a.numbers[r * a.columns + k] * b.numbers[k * b.columns + c];
  return y;
}
static Matrix transposed(const Matrix& a) {
  Matrix y{a.columns, a.rows};
  for (std::size_t r = 0; r < a.rows; ++r)
    for (std::size_t c = 0; c < a.columns; ++c) y.numbers[c * a.rows + r] = a.numbers[r * a.columns + c];
  return y;
}
Matrix times_transposed(const Matrix& a, const Matrix& b) { return times(a, transposed(b)); }
Matrix transposed_times(const Matrix& a, const Matrix& b) { return times(transposed(a), b); }
Matrix plus_row(const Matrix& x, const Matrix& row) {
  ch::check<ch::ShapeError>(row.rows == 1 && row.columns == x.columns, "plus_row: expected 1 x ", x.columns, ", got ",
                            row.rows, " x ", row.columns);
  auto y = x;
  for (std::size_t i = 0; i < y.numbers.size(); ++i) y.numbers[i] += row.numbers[i % x.columns];
  return y;
}
Matrix sum_of_rows(const Matrix& x) {
  Matrix y{1, x.columns};
  for (std::size_t i = 0; i < x.numbers.size(); ++i) y.numbers[i % x.columns] += x.numbers[i];
  return y;
}
Matrix relu(const Matrix& x) { return relu_backward(x, x); }
Matrix relu_backward(const Matrix& dy, const Matrix& x) {
  ch::check<ch::ShapeError>(dy.rows == x.rows && dy.columns == x.columns, "relu_backward: dy is ", dy.rows, " x ",
                            dy.columns, ", x is ", x.rows, " x ", x.columns);
  auto dx = dy;
  for (std::size_t i = 0; i < dx.numbers.size(); ++i)
    if (x.numbers[i] <= 0) dx.numbers[i] = 0;
  return dx;
}

namespace {

constexpr double eps = 1e-5;  // nn::LayerNorm's

/// Rows of mean 0 and variance 1, and what each was divided by.
struct Standard {
  Matrix rows;
  std::vector<double> deviations;
  explicit Standard(const Matrix& x) : rows(x) {
    const auto n = static_cast<double>(x.columns);
    for (std::size_t r = 0; r < x.rows; ++r) {
      const auto row = rows.all().subspan(r * x.columns, x.columns);
      const double mean = std::accumulate(row.begin(), row.end(), 0.0) / n;
      double square = 0;
      for (const double x_i : row) square += (x_i - mean) * (x_i - mean);
      deviations.push_back(std::sqrt(square / n + eps));
      for (double& x_i : row) x_i = (x_i - mean) / deviations.back();
    }
  }
};
Matrix times_row(Matrix x, const Matrix& row) {
  ch::check<ch::ShapeError>(row.rows == 1 && row.columns == x.columns, "layer_norm: expected 1 x ", x.columns, ", got ",
                            row.rows, " x ", row.columns);
  for (std::size_t i = 0; i < x.numbers.size(); ++i) x.numbers[i] *= row.numbers[i % x.columns];
  return x;
}
Matrix times_each(Matrix a, const Matrix& b) {
  ch::check<ch::ShapeError>(a.rows == b.rows && a.columns == b.columns, "layer_norm_backward: dy is ", a.rows, " x ",
                            a.columns, ", x is ", b.rows, " x ", b.columns);
  for (std::size_t i = 0; i < a.numbers.size(); ++i) a.numbers[i] *= b.numbers[i];
  return a;
}

}  // namespace

Matrix layer_norm(const Matrix& x, const Matrix& weight, const Matrix& bias) {
  return plus_row(times_row(Standard(x).rows, weight), bias);
}
NormGradients layer_norm_backward(const Matrix& dy, const Matrix& x, const Matrix& weight) {
  const Standard standard(x);
  auto dx = times_row(dy, weight);
  const auto along = times_each(dx, standard.rows);
  const auto n = static_cast<double>(x.columns);
  for (std::size_t r = 0; r < x.rows; ++r) {
    double mean = 0, mean_along = 0;
    for (std::size_t i = r * x.columns; i < (r + 1) * x.columns; ++i) {
      mean += dx.numbers[i] / n;
      mean_along += along.numbers[i] / n;
    }
    for (std::size_t i = r * x.columns; i < (r + 1) * x.columns; ++i)
      dx.numbers[i] = (dx.numbers[i] - mean - standard.rows.numbers[i] * mean_along) / standard.deviations[r];
  }
  return {dx, sum_of_rows(times_each(dy, standard.rows)), sum_of_rows(dy)};
}

namespace {

/// The library's own: y = down(relu(up(norm(x)))) for x: [1, rows, columns].
struct Block : ch::nn::Module {
  ch::nn::LayerNorm<ch::Cpu, double> norm;
  ch::nn::ColumnParallelLinear<ch::Cpu, double> up;
  ch::nn::RowParallelLinear<ch::Cpu, double> down;
  Block(ch::Index columns, ch::Index hidden) : norm{columns}, up{columns, hidden}, down{hidden, columns} {}
  CHORUS_MODULE(Block, norm, up, down)
  auto forward(const auto& x) const { return down.to_sequence(ch::relu(up(norm(ch::split_sequence(x))))).part(); }
};

struct Sizes {
  std::size_t rows, columns, hidden;
};
double number(std::size_t i) { return 0.8 * std::sin(1.7 * static_cast<double>(i * i % 9973) + 0.3); }
Matrix numbers(std::size_t rows, std::size_t columns, std::size_t first) {
  Matrix m{rows, columns};
  for (std::size_t i = 0; i < m.numbers.size(); ++i) m.numbers[i] = number(first + i);
  return m;
}
Layer layer(const Sizes& s) {
  return {numbers(1, s.columns, 11), numbers(1, s.columns, 222),         numbers(s.hidden, s.columns, 3333),
          numbers(1, s.hidden, 444), numbers(s.columns, s.hidden, 5555), numbers(1, s.columns, 666)};
}
Matrix rows_of(const Matrix& m, std::size_t part, std::size_t parts) {
  Matrix out{m.rows / parts, m.columns};
  const auto from = m.all().subspan(part * out.numbers.size(), out.numbers.size());
  std::copy(from.begin(), from.end(), out.numbers.begin());
  return out;
}
Matrix columns_of(const Matrix& m, std::size_t part, std::size_t parts) {
  return transposed(rows_of(transposed(m), part, parts));
}
Layer part_of(const Layer& l, std::size_t part, std::size_t parts) {
  return {l.norm_weight,
          l.norm_bias,
          rows_of(l.up, part, parts),
          columns_of(l.up_bias, part, parts),
          columns_of(l.down, part, parts),
          l.down_bias};
}

/// y and the gradients on one device, by the library.
struct Truth {
  Matrix y;
  Gradients gradients;
};
template <int N>
Matrix matrix(const ch::Tensor<double, N>& t) {
  const auto columns = static_cast<std::size_t>(t.size(N - 1));
  Matrix m{static_cast<std::size_t>(t.numel()) / columns, columns};
  const auto dense = ch::contiguous(t);
  std::copy(dense.data(), dense.data() + dense.numel(), m.numbers.begin());
  return m;
}
template <class T>
void fill(T& tensor, const Matrix& m) {
  std::copy(m.numbers.begin(), m.numbers.end(), tensor.data());
}
ch::Tensor<double, 3> tensor(const Matrix& m) {
  auto t = ch::Tensor<double, 3>::empty({1, static_cast<ch::Index>(m.rows), static_cast<ch::Index>(m.columns)});
  fill(t, m);
  return t;
}
Truth one_device(const Layer& l, const Matrix& x, const Matrix& dy) {
  Block block(static_cast<ch::Index>(l.up.columns), static_cast<ch::Index>(l.up.rows));
  const auto set = [](auto& parameter, const Matrix& m) {
    auto value = parameter.value();
    fill(value, m);
  };
  set(block.norm.weight, l.norm_weight);
  set(block.norm.bias, l.norm_bias);
  set(block.up.weight, l.up);
  set(block.up.bias, l.up_bias);
  set(block.down.weight, l.down);
  set(block.down.bias, l.down_bias);
  const ch::Variable<double, 3> input(tensor(x), /*requires_grad=*/true);
  const auto y = block(input);
  y.backward(tensor(dy));
  return {matrix(y.value()),
          {matrix(input.grad()),
           {matrix(block.norm.weight.grad()), matrix(block.norm.bias.grad()), matrix(block.up.weight.grad()),
            matrix(block.up.bias.grad()), matrix(block.down.weight.grad()), matrix(block.down.bias.grad())}}};
}

/// Bytes that rank 0 sends by a ring, but for control.
constexpr int predicted_ranks = 4;
constexpr Sizes predicted{64, 32, 128};
double sent_by_0() {
  using ch::trace::Traffic;
  return static_cast<double>(ch::trace::bytes_sent(0) - ch::trace::bytes_sent(0, Traffic::control));
}
struct Bytes {
  double forward = 0, backward = 0;
};
template <class Sequence>
Bytes of_library(const Sizes& s, int n = predicted_ranks) {
  Bytes bytes;
  lab::on_ranks(
      n,
      [&](Ranks& ranks) {
        ch::TensorParallel<Block, Sequence> net{
            Block(static_cast<ch::Index>(s.columns), static_cast<ch::Index>(s.hidden)), ranks, {.check_every = 0}};
        const ch::Variable<double, 3> x(tensor(numbers(s.rows, s.columns, 7)), true);
        const auto counted = [&](const auto& pass, double& sum) {
          ranks.barrier();
          if (ranks.rank() == 0) ch::trace::reset_traffic();
          ranks.barrier();
          pass();
          ranks.barrier();
          if (ranks.rank() == 0) sum = sent_by_0();
        };
        decltype(net(x)) y;
        counted([&] { y = net(x); }, bytes.forward);
        counted([&] { y.backward(ch::contiguous(y.value())); }, bytes.backward);
      },
      std::chrono::seconds(20), ch::comm::Algorithm::ring);
  return bytes;
}

/// Whether all numbers are as near as sums in another order make them.
bool equal(const Matrix& a, const Matrix& b) {
  if (a.rows != b.rows || a.columns != b.columns) return false;
  for (std::size_t i = 0; i < a.numbers.size(); ++i)
    if (!(std::abs(a.numbers[i] - b.numbers[i]) <= 1e-12 * std::max(1.0, std::abs(b.numbers[i])))) return false;
  return true;
}
std::string shape(const Matrix& m) { return ch::cat(m.rows, " x ", m.columns); }
Matrix sum(Matrix a, const Matrix& b, double times_b = 1) {
  for (std::size_t i = 0; i < a.numbers.size(); ++i) a.numbers[i] += times_b * b.numbers[i % b.numbers.size()];
  return a;
}
Matrix scaled(const Matrix& a, double by) { return sum(a, a, by - 1); }

struct Suspect {
  Matrix numbers;
  const char* why;
};
/// What is wrong with a matrix; empty if nothing is.
std::string difference(const Matrix& is, const Matrix& right, const std::vector<Suspect>& suspects) {
  if (equal(is, right)) return "";
  if (is.rows != right.rows || is.columns != right.columns)
    return ch::cat("it is ", shape(is), ", and must be ", shape(right));
  for (const auto& suspect : suspects)
    if (equal(is, suspect.numbers)) return suspect.why;
  std::size_t i = 0;
  while (equal({1, 1, {is.numbers[i]}}, {1, 1, {right.numbers[i]}})) ++i;
  return ch::cat("row ", i / is.columns, ", column ", i % is.columns, " is ", is.numbers[i], ", and must be ",
                 right.numbers[i]);
}

/// One rank's results, and what they have to be.
struct Judge {
  const bool split;
  const std::size_t n, rank;
  const Layer whole, part;
  const Matrix x, dy;
  const Truth& truth;

  Matrix own(const Matrix& m) const { return split ? rows_of(m, rank, n) : m; }

  std::string of_y(const Matrix& y) const {
    const auto normed = layer_norm(x, part.norm_weight, part.norm_bias);
    const auto hidden = plus_row(times_transposed(normed, part.up), part.up_bias);
    const auto term = times_transposed(relu(hidden), part.down);
    const auto all = sum(truth.y, part.down_bias, -1);
    const auto ranks = static_cast<double>(n);
    const char* const alone = "it is this rank's term alone: the other ranks' terms are missing";
    const char* const often = "each term counts as often as there are ranks";
    const char* const biased = "down_bias counts as often as there are ranks";
    return difference(y, own(truth.y),
                      {{own(plus_row(term, part.down_bias)), alone},
                       {own(term), alone},
                       {own(plus_row(scaled(all, ranks), part.down_bias)), often},
                       {own(scaled(truth.y, ranks)), often},
                       {own(sum(all, part.down_bias, ranks)), biased},
                       {own(all), "down_bias is missing"}});
  }

  std::string of(const Gradients& g) const {
    const auto normed = layer_norm(x, part.norm_weight, part.norm_bias);
    const auto hidden = plus_row(times_transposed(normed, part.up), part.up_bias);
    const auto term = times(relu_backward(times(dy, part.down), hidden), part.up);
    const auto alone = layer_norm_backward(term, x, part.norm_weight);
    const auto& right = truth.gradients;
    const auto ranks = static_cast<double>(n);
    const std::string missing = "it comes from this rank's term alone: the other ranks' terms are missing";
    const std::string often = "each term counts as often as there are ranks";
    // Of the gradient in front of the norm, x alone shows it: the norm's are sums over rows as well.
    if (const auto why = difference(g.x, own(right.x),
                                    {{own(alone.x), missing.c_str()}, {own(scaled(right.x, ranks)), often.c_str()}});
        !why.empty())
      return "the gradient of x: " + why;
    const auto rows = [&](const Matrix& all_rows) { return sum_of_rows(own(all_rows)); };
    const char* const some = "it covers the rows of this rank alone";
    const Matrix d_normed = gradient_of_normed();
    const auto of_rows = layer_norm_backward(own(d_normed), own(x), part.norm_weight);
    struct Line {
      const char* name;
      const Matrix &is, right;
      Matrix of_own_rows;
    };
    const auto& l = right.layer;
    for (const auto& line : {Line{"norm_weight", g.layer.norm_weight, l.norm_weight, of_rows.weight},
                             Line{"norm_bias", g.layer.norm_bias, l.norm_bias, of_rows.bias},
                             Line{"up", g.layer.up, rows_of(l.up, rank, n), {}},
                             Line{"up_bias", g.layer.up_bias, columns_of(l.up_bias, rank, n), {}},
                             Line{"down", g.layer.down, columns_of(l.down, rank, n), {}},
                             Line{"down_bias", g.layer.down_bias, l.down_bias, rows(dy)}})
      if (const auto why =
              difference(line.is, line.right, {{line.of_own_rows, some}, {scaled(line.right, ranks), often.c_str()}});
          !why.empty())
        return ch::cat("the gradient of ", line.name, ": ", why);
    return "";
  }

 private:
  /// All ranks' terms of the gradient in front of `up`.
  Matrix gradient_of_normed() const {
    const auto normed = layer_norm(x, whole.norm_weight, whole.norm_bias);
    const auto hidden = plus_row(times_transposed(normed, whole.up), whole.up_bias);
    return times(relu_backward(times(dy, whole.down), hidden), whole.up);
  }
};

/// Runs both passes on n ranks, and counts what rank 0 sends. Returns whether they are right.
bool judge(lab::Lab& lab, int n, const Sizes& s, bool split, const Code& code, Bytes& bytes) {
  const auto whole = layer(s);
  const auto x = numbers(s.rows, s.columns, 7), dy = numbers(s.rows, s.columns, 77);
  const auto truth = one_device(whole, x, dy);
  const auto parts = static_cast<std::size_t>(n);
  std::vector<std::string> forward(parts), backward(parts);
  const auto call = [&](Ranks& ranks) {
    const auto rank = static_cast<std::size_t>(ranks.rank());
    const Judge own{split, parts, rank, whole, part_of(whole, rank, parts), x, dy, truth};
    const auto sent = [] { return static_cast<double>(ch::trace::bytes_sent(0)); };
    Kept kept;
    const double before = sent();
    const auto y = (split ? code.forward_split : code.forward)(ranks, own.part, own.own(x), kept);
    const double between = sent();
    forward[rank] = own.of_y(y);
    const auto gradients = (split ? code.backward_split : code.backward)(ranks, own.part, kept, own.own(dy));
    if (rank == 0) bytes = {between - before, sent() - between};
    backward[rank] = own.of(gradients);
  };
  const auto what = ch::cat(n, " ranks, ", s.rows, split ? " rows split" : " rows");
  if (!lab.run(what, [&] { lab::on_ranks(n, call, std::chrono::seconds(3), ch::comm::Algorithm::ring); })) return false;
  const auto report = [&](const char* pass, const std::vector<std::string>& by_rank) {
    std::size_t rank = 0;
    while (rank + 1 < by_rank.size() && by_rank[rank].empty()) ++rank;
    return lab.require(ch::cat(what, ": ", pass), by_rank[rank].empty(), ch::cat("rank ", rank, ": ", by_rank[rank]));
  };
  return report("forward", forward) && report("backward", backward);
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  auto wider = predicted;
  wider.hidden *= 2;
  const auto whole = of_library<ch::NoSequenceSplit>(predicted), split = of_library<ch::SequenceSplit>(predicted);
  const char* const hint = "How many bytes does the sum have, and how often does a ring send each chunk of it?";
  lab.compare("forward, bytes that a rank sends", whole.forward, 0, hint);
  lab.compare("backward, bytes that a rank sends", whole.backward, 0, "Which gradient is a sum of the ranks' terms?");
  lab.compare("forward, rows split, bytes that a rank sends", split.forward, 0,
              "What do the two halves of an all-reduce send?");
  lab.compare("forward, hidden numbers doubled, bytes that a rank sends",
              of_library<ch::NoSequenceSplit>(wider).forward, 0,
              "Which numbers leave a rank? Are they the hidden ones?");
  lab.compare("forward, 2 ranks, bytes that a rank sends", of_library<ch::NoSequenceSplit>(predicted, 2).forward, 0,
              hint);
  for (const bool rows_split : {false, true}) {
    Bytes bytes;
    for (const int n : {2, 3, 4})
      if (!judge(lab, n, {12, 6, 24}, rows_split, code, bytes)) return;
    if (!judge(lab, predicted_ranks, predicted, rows_split, code, bytes)) return;
    const auto& library = rows_split ? split : whole;
    // Sums over the parameters that all ranks have are small, and the library makes some of them elsewhere.
    const double small = rows_split ? 3 * 2 * 8 * static_cast<double>(predicted.columns) : 0;
    lab.require(ch::cat(rows_split ? "rows split" : "rows whole", ": the bytes of the library"),
                bytes.forward <= library.forward && bytes.backward <= whole.backward + small,
                ch::cat("rank 0 sends ", bytes.forward, " bytes forward and ", bytes.backward,
                        " backward, the library ", library.forward, " and ", library.backward));
  }
}

}  // namespace tensor_lab
