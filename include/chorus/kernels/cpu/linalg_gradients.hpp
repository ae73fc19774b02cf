#pragma once
/// Gradients of the factorizations in linalg.hpp: dx = (or += with `accumulate`) the gradient w.r.t. the matrices.

#include <algorithm>
#include <chorus/kernels/cpu/linalg.hpp>
#include <concepts>

namespace chorus::kernels::linalg {

template <class Target, class Value>
void give(Target&& to, const Value& value, bool accumulate) {
  if (accumulate)
    to += value;
  else
    to = value;
}

/// L̄ -> (L⁻ᵀ Φ(Lᵀ L̄) L⁻¹), made symmetric; Φ takes the lower triangle and half of the diagonal (Murray 2016,
/// "Differentiation of the Cholesky decomposition", section 3).
template <std::floating_point T>
void cholesky_backward(Index count, Index n, const T* l, const T* dl, T* dx, bool accumulate) {
  if (n == 0) return;
  for (Index i = 0; i < count; ++i) {
    const auto lower = matrix(l, i, n, n);
    const auto solver = lower.template triangularView<Eigen::Lower>();
    const Matrix<T> given = matrix(dl, i, n, n).template triangularView<Eigen::Lower>();
    Matrix<T> phi = (lower.transpose() * given).template triangularView<Eigen::Lower>();
    phi.diagonal() *= T{0.5};
    solver.transpose().solveInPlace(phi);
    solver.template solveInPlace<Eigen::OnTheRight>(phi);
    give(matrix(dx, i, n, n), (phi + phi.transpose()) * T{0.5}, accumulate);
  }
}

/// (Q̄ + Q copyltu(M)) R⁻ᵀ, M = R R̄ᵀ - Q̄ᵀ Q, copyltu the lower triangle on both sides (Walter, Lehmann 2010,
/// "Algorithmic differentiation of linear algebra functions", m >= n).
template <std::floating_point T>
void qr_backward(Index count, Index m, Index n, const T* packed, const T* d, T* dx, bool accumulate) {
  if (n == 0) return;
  for (Index i = 0; i < count; ++i) {
    const Index at = i * (m * n + n * n);
    const auto q = matrix(packed + at, 0, m, n), r = matrix(packed + at + m * n, 0, n, n);
    const auto dq = matrix(d + at, 0, m, n), dr = matrix(d + at + m * n, 0, n, n);
    check<UsageError>(!(r.diagonal().array() == T{0}).any(),
                      "backward of 'qr': expected independent columns, got a singular R at index ", i, " of the stack");
    const Matrix<T> given = dr.template triangularView<Eigen::Upper>();
    const Matrix<T> product = r * given.transpose() - dq.transpose() * q;
    Matrix<T> both = product.template triangularView<Eigen::Lower>();
    both += product.template triangularView<Eigen::StrictlyLower>().toDenseMatrix().transpose();
    Matrix<T> result = (dq + q * both).transpose();
    r.template triangularView<Eigen::Upper>().solveInPlace(result);
    give(matrix(dx, i, m, n), result.transpose(), accumulate);
  }
}

/// With F_ij = 1 / (s_j² - s_i²), 0 on the diagonal, and skew(X) = X - Xᵀ: U (F ∘ skew(Uᵀ Ū) S + S F ∘ skew(Vᵀ V̄) +
/// S̄) Vᵀ + (1 - U Uᵀ) Ū S⁻¹ Vᵀ + U S⁻¹ V̄ᵀ (1 - V Vᵀ) (Townsend 2016, "Differentiating the singular value
/// decomposition"). Gradients w.r.t. U and V are NaN or infinite if two singular values are equal, as in PyTorch; if
/// nothing depends on U and V, only S̄ counts.
template <std::floating_point T>
void svd_backward(Index count, Index m, Index n, const T* packed, const T* d, T* dx, bool accumulate) {
  const Index k = std::min(m, n);
  for (Index i = 0; i < count && k > 0; ++i) {
    const Index at = i * (m * k + k + k * n);
    const auto u = matrix(packed + at, 0, m, k), s = matrix(packed + at + m * k, 0, k, 1),
               vt = matrix(packed + at + m * k + k, 0, k, n);
    const auto du = matrix(d + at, 0, m, k), ds = matrix(d + at + m * k, 0, k, 1),
               dvt = matrix(d + at + m * k + k, 0, k, n);
    Matrix<T> inner = ds.col(0).asDiagonal();
    Matrix<T> result = Matrix<T>::Zero(m, n);
    const auto over_gaps = [&](const Matrix<T>& x) {
      Matrix<T> out = x - x.transpose();
      for (Index row = 0; row < k; ++row)
        for (Index column = 0; column < k; ++column)
          out(row, column) = row == column ? T{0} : out(row, column) / ((s(column) - s(row)) * (s(column) + s(row)));
      return out;
    };
    const auto inverse = s.col(0).cwiseInverse().eval();
    if (!du.isZero(0)) {
      inner += over_gaps(u.transpose() * du) * s.col(0).asDiagonal();
      if (m > k) result += (du - u * (u.transpose() * du)) * inverse.asDiagonal() * vt;
    }
    if (!dvt.isZero(0)) {
      inner += s.col(0).asDiagonal() * over_gaps(vt * dvt.transpose());
      if (n > k) result += u * inverse.asDiagonal() * (dvt - (dvt * vt.transpose()) * vt);
    }
    result += u * inner * vt;
    give(matrix(dx, i, m, n), result, accumulate);
  }
}

/// V (diag(w̄) + F ∘ (Vᵀ V̄)) Vᵀ, made symmetric, F_ij = 1 / (w_j - w_i) (Giles 2008, "Collected matrix derivative
/// results for forward and reverse mode algorithmic differentiation", section 3.1). Gradients w.r.t. V are NaN or
/// infinite if two eigenvalues are equal; if nothing depends on V, only w̄ counts.
template <std::floating_point T>
void eigh_backward(Index count, Index n, const T* packed, const T* d, T* dx, bool accumulate) {
  for (Index i = 0; i < count && n > 0; ++i) {
    const Index at = i * (n + n * n);
    const auto w = matrix(packed + at, 0, n, 1), v = matrix(packed + at + n, 0, n, n);
    const auto dw = matrix(d + at, 0, n, 1), dv = matrix(d + at + n, 0, n, n);
    Matrix<T> inner = dw.col(0).asDiagonal();
    if (!dv.isZero(0)) {
      const Matrix<T> product = v.transpose() * dv;
      for (Index row = 0; row < n; ++row)
        for (Index column = 0; column < n; ++column)
          if (row != column) inner(row, column) = product(row, column) / (w(column) - w(row));
    }
    const Matrix<T> result = v * inner * v.transpose();
    give(matrix(dx, i, n, n), (result + result.transpose()) * T{0.5}, accumulate);
  }
}

}  // namespace chorus::kernels::linalg
