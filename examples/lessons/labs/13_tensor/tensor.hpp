#pragma once
/// Lab 13: what the student's code gets and gives. Numbers are doubles.

#include <chorus/comm/any_communicator.hpp>
#include <cstddef>
#include <span>
#include <vector>

#include "../lab.hpp"

namespace tensor_lab {

inline constexpr const char* title = "Lab 13: a layer on several ranks";
using Ranks = ch::comm::AnyCommunicator;

/// Numbers in rows; a bias has one row.
struct Matrix {
  std::size_t rows = 0, columns = 0;
  std::vector<double> numbers = std::vector<double>(rows * columns);
  std::span<double> all() { return numbers; }
  std::span<const double> all() const { return numbers; }
};

Matrix times(const Matrix& a, const Matrix& b);             ///< a b
Matrix times_transposed(const Matrix& a, const Matrix& b);  ///< a b^T
Matrix transposed_times(const Matrix& a, const Matrix& b);  ///< a^T b
Matrix plus_row(const Matrix& x, const Matrix& row);        ///< adds `row` to each row of x
Matrix sum_of_rows(const Matrix& x);
Matrix relu(const Matrix& x);
Matrix relu_backward(const Matrix& dy, const Matrix& x);  ///< dy where x > 0, else 0

/// Normalises each row of x, multiplies it by `weight` and adds `bias`.
Matrix layer_norm(const Matrix& x, const Matrix& weight, const Matrix& bias);
struct NormGradients {
  Matrix x, weight, bias;
};
NormGradients layer_norm_backward(const Matrix& dy, const Matrix& x, const Matrix& weight);

/// y = down(relu(up(norm(x)))), where up(x) = x up^T + up_bias. A rank has its rows of `up`, their numbers in
/// `up_bias`, and the same columns of `down`; all ranks have the rest. The same struct holds the gradients of these.
struct Layer {
  Matrix norm_weight, norm_bias, up, up_bias, down, down_bias;
};
/// What forward keeps for backward, as you like.
struct Kept {
  Matrix x, normed, hidden;
};
struct Gradients {
  Matrix x;
  Layer layer;
};

/// The student's code, which all ranks call.
struct Code {
  /// All ranks have all rows of x, and get all rows of y.
  Matrix (*forward)(Ranks& ranks, const Layer& layer, const Matrix& x, Kept& kept);
  /// All ranks have all rows of dy. Gradients of x and of what all ranks have are whole on each rank.
  Gradients (*backward)(Ranks& ranks, const Layer& layer, const Kept& kept, const Matrix& dy);
  /// Rank r has the r-th of ranks.size() equal groups of rows of x, and gets these of y.
  Matrix (*forward_split)(Ranks& ranks, const Layer& layer, const Matrix& x, Kept& kept);
  /// A rank has its rows of dy, and gets these of the gradient of x. Gradients of what all ranks have are whole.
  Gradients (*backward_split)(Ranks& ranks, const Layer& layer, const Kept& kept, const Matrix& dy);
};

void check(lab::Lab& lab, const Code& code);

}  // namespace tensor_lab
