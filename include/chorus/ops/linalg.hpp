#pragma once
/// Linear algebra of matrices and stacks of matrices, float or double, on the CPU, with Eigen: solve, inverse, det,
/// cholesky, qr, svd, eigh, all differentiable any number of times. Names and results are torch.linalg's. Not in
/// chorus.hpp, since Eigen's factorizations are slow to compile.

#include <algorithm>
#include <array>
#include <chorus/autograd/parameter.hpp>
#include <chorus/autograd/saved.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/cpu/linalg.hpp>
#include <chorus/kernels/cpu/linalg_gradients.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/comparison.hpp>
#include <chorus/ops/creation.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/shape.hpp>
#include <concepts>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace chorus::operations {
#define CHORUS_MATRIX_OPERATION(TYPE, NAME)     \
  struct TYPE {                                 \
    static constexpr const char* name = NAME; \
  }
CHORUS_MATRIX_OPERATION(Solve, "solve");
CHORUS_MATRIX_OPERATION(Inverse, "inverse");
CHORUS_MATRIX_OPERATION(Determinant, "det");
CHORUS_MATRIX_OPERATION(Cholesky, "cholesky");
#undef CHORUS_MATRIX_OPERATION
#define CHORUS_FACTORIZATION(TYPE, NAME)      \
  struct TYPE {                               \
    static constexpr const char* name = NAME; \
    Index count, rows, columns;               \
  }
CHORUS_FACTORIZATION(Qr, "qr");
CHORUS_FACTORIZATION(Svd, "svd");
CHORUS_FACTORIZATION(Eigh, "eigh");
#undef CHORUS_FACTORIZATION
}  // namespace chorus::operations

namespace chorus::linalg {

namespace detail {

template <Operand X>
auto stack_of(const char* operation, const X& x, bool square) {
  using Of = tensor_of<X>;
  static_assert(std::is_same_v<typename Of::device_type, Cpu>,
                "linalg: expected an operand on the CPU; to_device(x, Cpu{}) copies it");
  static_assert(std::floating_point<typename Of::value_type>, "linalg: expected an operand of float or double");
  static_assert(Of::rank >= 2, "linalg: expected a matrix or a stack of matrices");
  chorus::detail::check_defined(operation, value_of(x));
  auto out = contiguous(value_of(x));
  check<ShapeError>(!square || out.size(-1) == out.size(-2), operation, ": expected square matrices, got shape ",
                    out.shape());
  return out;
}

// The number of matrices in a stack.
template <std::size_t N>
Index matrices(const std::array<Index, N>& shape) {
  Index count = 1;
  for (std::size_t i = 0; i + 2 < N; ++i) count *= shape[i];
  return count;
}

// All factors of a matrix are in one row, [count, all], so that their gradients arrive together.
template <Operand Packed, std::size_t N>
auto factor(const Packed& packed, Index start, const std::array<Index, N>& shape, Index size) {
  return reshape(slice(packed, 1, start, start + size), shape);
}

template <std::size_t N>
std::array<Index, N> with_matrix(std::array<Index, N> shape, Index rows, Index columns) {
  shape[N - 2] = rows;
  shape[N - 1] = columns;
  return shape;
}
template <std::size_t N>
std::array<Index, N - 1> with_vector(const std::array<Index, N>& shape, Index size) {
  std::array<Index, N - 1> out{};
  std::copy(shape.begin(), shape.end() - 1, out.begin());
  out.back() = size;
  return out;
}

}  // namespace detail

/// Solves a x = b. a: [..., n, n], b: [..., n, k] -> x: [..., n, k]; leading axes are equal. Backward: b̄ = a⁻ᵀ x̄, ā =
/// -b̄ xᵀ (Giles 2008). Throws ShapeError if sizes differ, UsageError if a matrix is singular.
template <Operand A, Operand B>
auto solve(const A& a, const B& b) {
  constexpr int rank = tensor_of<A>::rank;
  static_assert(tensor_of<B>::rank == rank && of_one_type<A, B>, "solve: expected one rank and scalar type");
  using T = typename tensor_of<A>::value_type;
  const auto left = detail::stack_of("solve", a, true), right = detail::stack_of("solve", b, false);
  const Index n = left.size(-1), k = right.size(-1), count = detail::matrices(left.shape());
  check<ShapeError>(right.shape() == detail::with_matrix(left.shape(), n, k), "solve: expected a right side of shape ",
                    detail::with_matrix(left.shape(), n, k), ", got ", right.shape());
  auto out = Tensor<T, rank>::empty(right.shape());
  kernels::linalg::solve("solve", count, n, k, left.data(), right.data(), out.data());
  return record(
      operations::Solve{}, out,
      [left = chorus::detail::Saved(left), out = chorus::detail::Saved(out), count, n, k](const auto& dy, auto da,
                                                                                          auto db) {
        const auto turned = contiguous(left.read("solve").transpose(-1, -2));
        const auto back = Tensor<T, rank>::empty(dy.shape());
        kernels::linalg::solve("solve", count, n, k, turned.data(), dy.data(), back.data());
        if (db) db->add(back);
        if (!da) return;
        const auto minus = Tensor<T, rank>::empty(turned.shape());
        const auto& x = out.read("solve");
        for (Index i = 0; i < count; ++i)
          kernels::linalg::matrix(minus.data(), i, n, n) =
              -kernels::linalg::matrix(back.data(), i, n, k) * kernels::linalg::matrix(x.data(), i, n, k).transpose();
        da->add(minus);
      },
      a, b);
}

/// a⁻¹ of [..., n, n]. Backward: ā = -a⁻ᵀ ȳ a⁻ᵀ (Giles 2008). Throws UsageError if a matrix is singular.
template <Operand A>
auto inverse(const A& a) {
  using Of = tensor_of<A>;
  const auto input = detail::stack_of("inverse", a, true);
  const Index n = input.size(-1), count = detail::matrices(input.shape());
  const auto ones = Of::zeros(input.shape());
  for (Index i = 0; i < count; ++i) kernels::linalg::matrix(ones.data(), i, n, n).setIdentity();
  auto out = Of::empty(input.shape());
  kernels::linalg::solve("inverse", count, n, n, input.data(), ones.data(), out.data());
  return record(
      operations::Inverse{}, out,
      [out = chorus::detail::Saved(out), count, n](const auto& dy, auto da) {
        const auto [grad, accumulate] = da->target();
        const auto& y = out.read("inverse");
        for (Index i = 0; i < count; ++i) {
          const auto inverse = kernels::linalg::matrix(y.data(), i, n, n);
          kernels::linalg::give(
              kernels::linalg::matrix(grad.data(), i, n, n),
              -(inverse.transpose() * kernels::linalg::matrix(dy.data(), i, n, n) * inverse.transpose()), accumulate);
        }
      },
      a);
}

/// The determinants of [..., n, n]: [...]. Backward: ā = ȳ times the cofactors, also for singular matrices.
template <Operand A>
auto det(const A& a) {
  using T = typename tensor_of<A>::value_type;
  constexpr int rank = tensor_of<A>::rank;
  const auto input = detail::stack_of("det", a, true);
  const Index n = input.size(-1), count = detail::matrices(input.shape());
  Shape<rank - 2> shape{};
  std::copy(input.shape().begin(), input.shape().end() - 2, shape.begin());
  auto out = Tensor<T, rank - 2>::empty(shape);
  kernels::linalg::determinant(count, n, input.data(), out.data());
  return record(
      operations::Determinant{}, std::move(out),
      [input = chorus::detail::Saved(input), count, n](const auto& dy, auto da) {
        const auto cofactors = Tensor<T, rank>::empty(input.tensor().shape());
        kernels::linalg::cofactors(count, n, input.read("det").data(), cofactors.data());
        for (Index i = 0; i < count; ++i) kernels::linalg::matrix(cofactors.data(), i, n, n) *= dy.data()[i];
        da->add(cofactors);
      },
      a);
}

/// Lower triangular L with L Lᵀ = a, for symmetric positive definite a: [..., n, n]. Reads the lower triangle only; the
/// gradient is symmetric. Throws UsageError if a matrix is not positive definite.
template <Operand A>
auto cholesky(const A& a) {
  const auto input = detail::stack_of("cholesky", a, true);
  const Index n = input.size(-1), count = detail::matrices(input.shape());
  auto out = tensor_of<A>::zeros(input.shape());
  kernels::linalg::cholesky(count, n, input.data(), out.data());
  return record(
      operations::Cholesky{}, out,
      [out = chorus::detail::Saved(out), count, n](const auto& dy, auto da) {
        const auto [grad, accumulate] = da->target();
        kernels::linalg::cholesky_backward(count, n, out.read("cholesky").data(), dy.data(), grad.data(), accumulate);
      },
      a);
}

/// The factors of qr.
template <class Q, class R>
struct Qr {
  Q q;
  R r;
};

/// a = Q R, where Q has orthonormal columns: a, Q: [..., m, n], R: [..., n, n], upper triangular, with LAPACK's signs.
/// Throws ShapeError if there are fewer rows than columns.
template <Operand A>
auto qr(const A& a) {
  using T = typename tensor_of<A>::value_type;
  const auto input = detail::stack_of("qr", a, false);
  const Index m = input.size(-2), n = input.size(-1), count = detail::matrices(input.shape());
  check<ShapeError>(m >= n, "qr: expected rows >= columns, got shape ", input.shape());
  auto packed = Tensor<T, 2>::empty({count, m * n + n * n});
  kernels::linalg::qr(count, m, n, input.data(), packed.data());
  const auto factors = record(
      operations::Qr{count, m, n}, packed,
      [packed = chorus::detail::Saved(packed), count, m, n](const auto& dy, auto da) {
        const auto [grad, accumulate] = da->target();
        kernels::linalg::qr_backward(count, m, n, packed.read("qr").data(), dy.data(), grad.data(), accumulate);
      },
      a);
  auto q = detail::factor(factors, 0, input.shape(), m * n);
  auto r = detail::factor(factors, m * n, detail::with_matrix(input.shape(), n, n), n * n);
  return Qr<decltype(q), decltype(r)>{std::move(q), std::move(r)};
}

/// The factors of svd.
template <class U, class S, class V>
struct Svd {
  U u;
  S s;
  V vh;
};

/// a = U diag(S) Vᵀ: a: [..., m, n] -> u: [..., m, k], s: [..., k] in descending order, vh = Vᵀ: [..., k, n], k =
/// min(m, n). The signs of singular vectors are arbitrary, so gradients that depend on them are undefined. Throws
/// UsageError for non-finite numbers.
template <Operand A>
auto svd(const A& a) {
  using T = typename tensor_of<A>::value_type;
  const auto input = detail::stack_of("svd", a, false);
  const Index m = input.size(-2), n = input.size(-1), k = std::min(m, n), count = detail::matrices(input.shape());
  auto packed = Tensor<T, 2>::empty({count, m * k + k + k * n});
  kernels::linalg::svd(count, m, n, input.data(), packed.data());
  const auto factors = record(
      operations::Svd{count, m, n}, packed,
      [packed = chorus::detail::Saved(packed), count, m, n](const auto& dy, auto da) {
        const auto [grad, accumulate] = da->target();
        kernels::linalg::svd_backward(count, m, n, packed.read("svd").data(), dy.data(), grad.data(), accumulate);
      },
      a);
  auto u = detail::factor(factors, 0, detail::with_matrix(input.shape(), m, k), m * k);
  auto s = detail::factor(factors, m * k, detail::with_vector(input.shape(), k), k);
  auto vh = detail::factor(factors, m * k + k, detail::with_matrix(input.shape(), k, n), k * n);
  return Svd<decltype(u), decltype(s), decltype(vh)>{std::move(u), std::move(s), std::move(vh)};
}

/// The result of eigh.
template <class Values, class Vectors>
struct Eigh {
  Values eigenvalues;
  Vectors eigenvectors;
};

/// Eigenvalues, [..., n] in ascending order, and eigenvectors, the columns of [..., n, n], of symmetric a: [..., n, n].
/// Reads the lower triangle only; the gradient is symmetric. The signs of eigenvectors are arbitrary, so gradients that
/// depend on them are undefined. Throws UsageError for non-finite numbers.
template <Operand A>
auto eigh(const A& a) {
  using T = typename tensor_of<A>::value_type;
  const auto input = detail::stack_of("eigh", a, true);
  const Index n = input.size(-1), count = detail::matrices(input.shape());
  auto packed = Tensor<T, 2>::empty({count, n + n * n});
  kernels::linalg::eigh(count, n, input.data(), packed.data());
  const auto factors = record(
      operations::Eigh{count, n, n}, packed,
      [packed = chorus::detail::Saved(packed), count, n](const auto& dy, auto da) {
        const auto [grad, accumulate] = da->target();
        kernels::linalg::eigh_backward(count, n, packed.read("eigh").data(), dy.data(), grad.data(), accumulate);
      },
      a);
  auto values = detail::factor(factors, 0, detail::with_vector(input.shape(), n), n);
  auto vectors = detail::factor(factors, n, input.shape(), n * n);
  return Eigh<decltype(values), decltype(vectors)>{std::move(values), std::move(vectors)};
}

}  // namespace chorus::linalg

namespace chorus {

// The rules of backward as recorded operations: see ops/higher_order.hpp.

template <class Dy, class Y, class A, class B>
auto derivatives(const operations::Solve&, const Dy& dy, const Y& y, const A& a, const B&) {
  const auto back = [&] { return linalg::solve(transpose(a, -2, -1), dy); };
  return std::tuple{[&, back] { return -matmul(back(), transpose(y, -2, -1)); }, back};
}
template <class Dy, class Y, class A>
auto derivatives(const operations::Inverse&, const Dy& dy, const Y& y, const A&) {
  return std::tuple{[&] {
    const auto turned = transpose(y, -2, -1);
    return -matmul(matmul(turned, dy), turned);
  }};
}
/// Throws UsageError for a singular matrix.
template <class Dy, class Y, class A>
auto derivatives(const operations::Determinant&, const Dy& dy, const Y& y, const A& a) {
  return std::tuple{[&] {
    auto single = a.shape();
    single[single.size() - 2] = single[single.size() - 1] = 1;
    return reshape(dy * y, single) * transpose(linalg::inverse(a), -2, -1);
  }};
}

namespace detail {
// Ones below the diagonal and on it.
template <class T>
Tensor<T, 2> lower_ones(Index n) {
  auto out = eye<T>(n);
  for (Index i = 0; i < n; ++i)
    for (Index j = 0; j < i; ++j) out(i, j) = 1;
  return out;
}
template <class X>
auto turned(const X& x) {
  return transpose(x, -2, -1);
}
// The part of packed factors that begins at `start`.
template <class Packed>
auto part_of(const Packed& packed, Index start, Index rows, Index columns) {
  return reshape(slice(packed, 1, start, start + rows * columns), Shape<3>{packed.size(0), rows, columns});
}
// What comes of a gradient of zeros is 0 where its factor is infinite: where nothing depends on the vectors, equal
// values do no harm. Its own derivative is NaN there.
template <class Given, class X>
auto none_of_none(const Given& given, const X& x) {
  const auto numbers = contiguous(value_of(given));
  const bool none = std::all_of(numbers.data(), numbers.data() + numbers.numel(), [](auto v) { return v == 0; });
  return none ? masked_fill(x, isnan(value_of(x)), 0) : x;
}
}  // namespace detail

// The formulas of kernels/cpu/linalg_gradients.hpp, with their sources.

template <class Dy, class Y, class A>
auto derivatives(const operations::Cholesky&, const Dy& dy, const Y& y, const A& a) {
  return std::tuple{[&] {
    using T = typename A::value_type;
    const Index n = a.size(-1);
    const auto lower = detail::lower_ones<T>(n);
    const auto l = detail::turned(y);
    const auto phi = matmul(l, dy * lower) * (lower - eye<T>(n) * T(0.5));
    const auto both = linalg::solve(l, detail::turned(linalg::solve(l, phi)));
    return (both + detail::turned(both)) * 0.5;
  }};
}
template <class Dy, class Y, class A>
auto derivatives(const operations::Qr& operation, const Dy& dy, const Y& y, const A& a) {
  return std::tuple{[&] {
    using T = typename A::value_type;
    const Index m = operation.rows, n = operation.columns;
    const auto q = detail::part_of(y, 0, m, n), r = detail::part_of(y, m * n, n, n);
    const auto dq = detail::part_of(dy, 0, m, n), dr = detail::part_of(dy, m * n, n, n);
    const auto lower = detail::lower_ones<T>(n), strictly = lower - eye<T>(n);
    const auto product = matmul(r, detail::turned(dr * detail::turned(lower))) - matmul(detail::turned(dq), q);
    const auto both = product * lower + detail::turned(product * strictly);
    return reshape(detail::turned(linalg::solve(r, detail::turned(dq + matmul(q, both)))), a.shape());
  }};
}
template <class Dy, class Y, class A>
auto derivatives(const operations::Svd& operation, const Dy& dy, const Y& y, const A& a) {
  return std::tuple{[&] {
    using T = typename A::value_type;
    const Index m = operation.rows, n = operation.columns, k = std::min(m, n), after = m * k + k;
    const auto u = detail::part_of(y, 0, m, k), vh = detail::part_of(y, after, k, n);
    const auto du = detail::part_of(dy, 0, m, k), dvh = detail::part_of(dy, after, k, n);
    const auto row = detail::part_of(y, m * k, 1, k), column = detail::part_of(y, m * k, k, 1);
    const auto gaps = (row - column) * (row + column) + eye<T>(k);
    const auto turn_u = matmul(detail::turned(u), du), turn_v = matmul(vh, detail::turned(dvh));
    const auto of_u = detail::none_of_none(du, (turn_u - detail::turned(turn_u)) / gaps);
    const auto of_v = detail::none_of_none(dvh, (turn_v - detail::turned(turn_v)) / gaps);
    auto result = matmul(matmul(u, detail::part_of(dy, m * k, 1, k) * eye<T>(k) + of_u * row + column * of_v), vh);
    if (m > k) result = result + matmul(detail::none_of_none(du, (du - matmul(u, turn_u)) / row), vh);
    if (n > k)
      result = result + matmul(u, detail::none_of_none(dvh, (dvh - matmul(detail::turned(turn_v), vh)) / column));
    return reshape(result, a.shape());
  }};
}
template <class Dy, class Y, class A>
auto derivatives(const operations::Eigh& operation, const Dy& dy, const Y& y, const A& a) {
  return std::tuple{[&] {
    using T = typename A::value_type;
    const Index n = operation.rows;
    const auto v = detail::part_of(y, n, n, n), dv = detail::part_of(dy, n, n, n);
    const auto ones = eye<T>(n);
    const auto gaps = detail::part_of(y, 0, 1, n) - detail::part_of(y, 0, n, 1) + ones;
    const auto of_v = detail::none_of_none(dv, matmul(detail::turned(v), dv) * (T{1} - ones) / gaps);
    const auto result = matmul(matmul(v, detail::part_of(dy, 0, 1, n) * ones + of_v), detail::turned(v));
    return reshape((result + detail::turned(result)) * 0.5, a.shape());
  }};
}

}  // namespace chorus
