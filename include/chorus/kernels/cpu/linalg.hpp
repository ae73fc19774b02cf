#pragma once
/// Factorizations of stacks of row-major matrices with Eigen, one matrix at a time. Compiled per scalar type, not per
/// rank.

#include <Eigen/Cholesky>
#include <Eigen/Eigenvalues>
#include <Eigen/LU>
#include <Eigen/QR>
#include <Eigen/SVD>
#include <algorithm>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <concepts>
#include <type_traits>

namespace chorus::kernels::linalg {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Matrix `i` of a stack at `from`.
template <class T>
Eigen::Map<const Matrix<T>> matrix(const T* from, Index i, Index rows, Index columns) {
  return Eigen::Map<const Matrix<T>>(from + i * rows * columns, rows, columns);
}
template <class T>
Eigen::Map<Matrix<T>> matrix(T* from, Index i, Index rows, Index columns) {
  return Eigen::Map<Matrix<T>>(from + i * rows * columns, rows, columns);
}

/// x with a x = b. a: [count, n, n]; b, x: [count, n, k]. Throws UsageError if an a is exactly singular.
template <std::floating_point T>
void solve(const char* operation, Index count, Index n, Index k, const T* a, const T* b, T* x) {
  if (n == 0) return;
  for (Index i = 0; i < count; ++i) {
    const Eigen::PartialPivLU<Matrix<T>> lu(matrix(a, i, n, n));
    check<UsageError>(!(lu.matrixLU().diagonal().array() == T{0}).any(), operation,
                      ": expected invertible matrices, got a singular one at index ", i, " of the stack");
    matrix(x, i, n, k) = lu.solve(matrix(b, i, n, k));
  }
}

/// The determinants, [count], and their derivatives w.r.t. a, the cofactors, [count, n, n]: with a = U S Vᵀ they are
/// det(U) det(V) U diag(product of the other singular values) Vᵀ, also for singular matrices.
template <std::floating_point T>
void determinant(Index count, Index n, const T* a, T* out) {
  for (Index i = 0; i < count; ++i)
    out[i] = n == 0 ? T{1} : Eigen::PartialPivLU<Matrix<T>>(matrix(a, i, n, n)).determinant();
}
template <std::floating_point T>
void cofactors(Index count, Index n, const T* a, T* out) {
  if (n == 0) return;
  for (Index i = 0; i < count; ++i) {
    const Eigen::JacobiSVD<Matrix<T>> svd(matrix(a, i, n, n), Eigen::ComputeFullU | Eigen::ComputeFullV);
    const auto& s = svd.singularValues();
    auto others = s.eval();
    for (Index j = 0; j < n; ++j) {
      others[j] = 1;
      for (Index l = 0; l < n; ++l)
        if (l != j) others[j] *= s[l];
    }
    const T sign = svd.matrixU().determinant() * svd.matrixV().determinant() < 0 ? T{-1} : T{1};
    matrix(out, i, n, n) = sign * (svd.matrixU() * others.asDiagonal() * svd.matrixV().transpose());
  }
}

/// Lower L with L Lᵀ = a; reads the lower triangle of a. Throws UsageError if an a is not positive definite.
template <std::floating_point T>
void cholesky(Index count, Index n, const T* a, T* out) {
  for (Index i = 0; i < count; ++i) {
    if (n == 0) continue;
    const Eigen::LLT<Matrix<T>, Eigen::Lower> llt(matrix(a, i, n, n));
    check<UsageError>(llt.info() == Eigen::Success,
                      "cholesky: expected positive definite matrices, got an indefinite one at index ", i,
                      " of the stack");
    matrix(out, i, n, n) = llt.matrixL();
  }
}

/// a: [count, m, n], m >= n -> for each matrix Q: [m, n], then R: [n, n].
template <std::floating_point T>
void qr(Index count, Index m, Index n, const T* a, T* out) {
  if (n == 0) return;
  for (Index i = 0; i < count; ++i) {
    const Eigen::HouseholderQR<Matrix<T>> qr(matrix(a, i, m, n));
    T* const at = out + i * (m * n + n * n);
    matrix(at, 0, m, n) = qr.householderQ() * Matrix<T>::Identity(m, n);
    matrix(at + m * n, 0, n, n) = qr.matrixQR().topRows(n).template triangularView<Eigen::Upper>();
  }
}

/// a: [count, m, n] -> for each matrix U: [m, k], S: [k] in descending order, Vᵀ: [k, n], k = min(m, n).
template <std::floating_point T>
void svd(Index count, Index m, Index n, const T* a, T* out) {
  const Index k = std::min(m, n);
  if (k == 0) return;
  for (Index i = 0; i < count; ++i) {
    const auto input = matrix(a, i, m, n);
    check<UsageError>(input.allFinite(), "svd: expected finite numbers, got others at index ", i, " of the stack");
    const Eigen::JacobiSVD<Matrix<T>> svd(input, Eigen::ComputeThinU | Eigen::ComputeThinV);
    T* const at = out + i * (m * k + k + k * n);
    matrix(at, 0, m, k) = svd.matrixU();
    matrix(at + m * k, 0, k, 1) = svd.singularValues();
    matrix(at + m * k + k, 0, k, n) = svd.matrixV().transpose();
  }
}

/// Symmetric a: [count, n, n], of which the lower triangle is read -> for each the eigenvalues, [n] in ascending order,
/// then the eigenvectors as columns, [n, n].
template <std::floating_point T>
void eigh(Index count, Index n, const T* a, T* out) {
  if (n == 0) return;
  for (Index i = 0; i < count; ++i) {
    const auto input = matrix(a, i, n, n);
    check<UsageError>(input.allFinite(), "eigh: expected finite numbers, got others at index ", i, " of the stack");
    const Eigen::SelfAdjointEigenSolver<Matrix<T>> solver(input);
    check<UsageError>(solver.info() == Eigen::Success, "eigh: no convergence at index ", i, " of the stack");
    T* const at = out + i * (n + n * n);
    matrix(at, 0, n, 1) = solver.eigenvalues();
    matrix(at + n, 0, n, n) = solver.eigenvectors();
  }
}

}  // namespace chorus::kernels::linalg
