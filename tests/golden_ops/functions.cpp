// Comparisons, truth values, tensors made of a rule, rearranging, counting, linear algebra, Fourier transforms.
#include <chorus/ops/counting.hpp>
#include <chorus/ops/creation.hpp>
#include <chorus/ops/distances.hpp>
#include <chorus/ops/fft.hpp>
#include <chorus/ops/linalg.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/matrix_parts.hpp>
#include <chorus/ops/truth.hpp>

#include "case.hpp"

namespace golden {
namespace {

// Truth values and integers stand in the files as they are compared: as floats, as 64-bit integers.
template <int Rank>
void truth(Case& test, const ch::Tensor<bool, Rank, Device>& y) {
  test.compare("out.y", ch::to<float>(y));
}
template <int Rank>
void whole(Case& test, const char* name, const ch::Tensor<std::int64_t, Rank, Device>& y) {
  test.compare_integers(name, y.to_vector());
}

template <class F>
Operation compared(const F&) {
  return [](Case& test) { truth(test, F{}(test.tensor<2>("x"), test.tensor<1>("y"))); };
}
template <class F>
Operation tested(const F&) {
  return [](Case& test) { truth(test, F{}(test.tensor<2>("x"))); };
}

#if CHORUS_GOLDEN_ON_CPU
// What is factorized where it has to be symmetric.
template <class X>
auto symmetric(const X& x) {
  return x + ch::transpose(x, -1, -2) + ch::unsqueeze(ch::eye<float>(x.shape().back()) * 6, 0);
}

void add_linear_algebra(Operations& operations) {
  namespace la = ch::linalg;
  operations["linalg.solve"] = [](Case& test) { test.out("y", la::solve(test.in<3>("a"), test.in<3>("b"))); };
  operations["linalg.inverse"] = [](Case& test) { test.out("y", la::inverse(test.in<3>("x"))); };
  operations["linalg.det"] = [](Case& test) { test.out("y", la::det(test.in<3>("x"))); };
  operations["linalg.cholesky"] = [](Case& test) { test.out("y", la::cholesky(symmetric(test.in<3>("x")))); };
  operations["linalg.qr"] = [](Case& test) {
    const auto y = la::qr(test.in<3>("x"));
    test.out("q", y.q);
    test.out("r", y.r);
  };
  operations["linalg.svd"] = [](Case& test) {
    const auto y = la::svd(test.in<3>("x"));
    test.out("u2", y.u * y.u);
    test.out("s", y.s);
    test.out("uv", ch::matmul(y.u, y.vh));
  };
  operations["linalg.eigh"] = [](Case& test) {
    const auto y = la::eigh(symmetric(test.in<3>("x")));
    test.out("w", y.eigenvalues);
    test.out("v2", y.eigenvectors * y.eigenvectors);
  };
}

template <class Options>
Options fourier_options(const Case& test) {
  Options out;
  const auto norm = test.attr<std::string>("norm");
  out.norm = norm == "ortho"     ? ch::fft::Norm::ortho
             : norm == "forward" ? ch::fft::Norm::forward
                                 : ch::fft::Norm::backward;
  if constexpr (requires { out.n; }) {
    if (const auto n = test.attr<Index>("n", 0)) out.n = n;
  } else if (const auto s = test.attr<std::vector<Index>>("s", {}); !s.empty()) {
    out.s = Shape<2>{s[0], s[1]};
  }
  return out;
}
template <int Rank, class F>
Operation fourier(const F&) {
  return [](Case& test) { test.out("y", F{}(test.in<Rank>("x"), fourier_options<ch::fft::Options>(test))); };
}
template <int Rank, class F>
Operation fourier2(const F&) {
  return [](Case& test) { test.out("y", F{}(test.in<Rank>("x"), fourier_options<ch::fft::Options2>(test))); };
}
void add_fourier(Operations& operations) {
  namespace fft = ch::fft;
  operations["fft.rfft"] = fourier<2>([](const auto& x, const auto& o) { return fft::rfft(x, o); });
  operations["fft.irfft"] = fourier<3>([](const auto& x, const auto& o) { return fft::irfft(x, o); });
  operations["fft.fft"] = fourier<3>([](const auto& x, const auto& o) { return fft::fft(x, o); });
  operations["fft.ifft"] = fourier<3>([](const auto& x, const auto& o) { return fft::ifft(x, o); });
  operations["fft.rfft2"] = fourier2<3>([](const auto& x, const auto& o) { return fft::rfft2(x, o); });
  operations["fft.irfft2"] = fourier2<4>([](const auto& x, const auto& o) { return fft::irfft2(x, o); });
  operations["fft.fft2"] = fourier2<4>([](const auto& x, const auto& o) { return fft::fft2(x, o); });
  operations["fft.ifft2"] = fourier2<4>([](const auto& x, const auto& o) { return fft::ifft2(x, o); });
}
#else
void add_linear_algebra(Operations& operations) {
  for (const char* name : {"solve", "inverse", "det", "cholesky", "qr", "svd", "eigh"})
    operations[ch::cat("linalg.", name)] = [](Case& test) { test.leave_out(": on the CPU alone"); };
}
void add_fourier(Operations& operations) {
  for (const char* name : {"rfft", "irfft", "fft", "ifft", "rfft2", "irfft2", "fft2", "ifft2"})
    operations[ch::cat("fft.", name)] = [](Case& test) { test.leave_out(": on the CPU alone"); };
}
#endif

}  // namespace

void add_functions(Operations& operations) {
  operations["eq"] = compared([](const auto& x, const auto& y) { return x == y; });
  operations["ne"] = compared([](const auto& x, const auto& y) { return x != y; });
  operations["lt"] = compared([](const auto& x, const auto& y) { return x < y; });
  operations["le"] = compared([](const auto& x, const auto& y) { return x <= y; });
  operations["gt"] = compared([](const auto& x, const auto& y) { return x > y; });
  operations["ge"] = compared([](const auto& x, const auto& y) { return x >= y; });
  operations["isnan"] = tested([](const auto& x) { return ch::isnan(x); });
  operations["isinf"] = tested([](const auto& x) { return ch::isinf(x); });
  operations["isfinite"] = tested([](const auto& x) { return ch::isfinite(x); });
  operations["any"] = [](Case& test) {
    truth(test, ch::any(test.tensor<2>("x") > test.attr<double>("above"), test.attr<Index>("axis")));
  };
  operations["all"] = [](Case& test) {
    truth(test, ch::all(test.tensor<2>("x") > test.attr<double>("above"), test.attr<Index>("axis")));
  };
  operations["masked_select"] = [](Case& test) {
    test.out("y", ch::masked_select(test.in<2>("x"), test.mask<1>("mask")));
  };
  operations["nonzero"] = [](Case& test) { whole(test, "out.y", ch::nonzero(test.mask<2>("mask"))); };
  operations["linspace"] = [](Case& test) {
    test.out("y",
             ch::linspace(test.attr<double>("start"), test.attr<double>("stop"), test.attr<Index>("count"), Device{}));
  };
  operations["arange"] = [](Case& test) {
    test.out("y",
             ch::arange(test.attr<double>("start"), test.attr<double>("stop"), test.attr<double>("step"), Device{}));
  };
  operations["one_hot"] = [](Case& test) {
    whole(test, "out.y", ch::one_hot(test.integers<2>("index"), test.attr<Index>("classes")));
  };
  operations["tril"] = [](Case& test) { test.out("y", ch::tril(test.in<3>("x"), test.attr<Index>("diagonal"))); };
  operations["triu"] = [](Case& test) { test.out("y", ch::triu(test.in<3>("x"), test.attr<Index>("diagonal"))); };
  operations["diag"] = [](Case& test) {
    const auto diagonal = test.attr<Index>("diagonal");
    if (test.rank("x") == 1)
      test.out("y", ch::diag(test.in<1>("x"), diagonal));
    else
      test.out("y", ch::diag(test.in<2>("x"), diagonal));
  };
  operations["repeat"] = [](Case& test) {
    test.out("y", ch::repeat(test.in<3>("x"), as_shape<4>("times", test.attr<std::vector<Index>>("times"))));
  };
  operations["flip"] = [](Case& test) {
    test.out("y", ch::flip(test.in<3>("x"), as_shape<2>("axes", test.attr<std::vector<Index>>("axes"))));
  };
  operations["roll"] = [](Case& test) {
    test.out("y", ch::roll(test.in<3>("x"), test.attr<Index>("shift"), test.attr<Index>("axis")));
  };
  operations["outer"] = [](Case& test) { test.out("y", ch::outer(test.in<1>("a"), test.in<1>("b"))); };
  operations["dot"] = [](Case& test) { test.out("y", ch::dot(test.in<1>("a"), test.in<1>("b"))); };
  operations["cross"] = [](Case& test) {
    test.out("y", ch::cross(test.in<2>("a"), test.in<2>("b"), test.attr<Index>("axis")));
  };
  operations["unique"] = [](Case& test) {
    const auto y = ch::unique(test.tensor<2>("x"));
    test.out("values", y.values);
    whole(test, "out.inverse", y.inverse);
    whole(test, "out.counts", y.counts);
  };
  operations["searchsorted"] = [](Case& test) {
    whole(test, "out.y",
          ch::searchsorted(test.tensor<1>("sorted"), test.tensor<2>("values"), test.attr<bool>("right")));
  };
  operations["bincount"] = [](Case& test) {
    whole(test, "out.y", ch::bincount(test.integers<1>("x"), test.attr<Index>("at_least")));
  };
  operations["histogram"] = [](Case& test) {
    const auto y = ch::histogram(test.tensor<1>("x"), test.attr<Index>("bins"), test.attr<double>("low"),
                                 test.attr<double>("high"));
    test.out("y", ch::to<float>(y.counts));
  };
  operations["logaddexp"] = [](Case& test) { test.out("y", ch::logaddexp(test.in<2>("a"), test.in<1>("b"))); };
  operations["nan_to_num"] = [](Case& test) {
    test.out("y", ch::nan_to_num(test.in<1>("x"), test.attr<double>("nan"), test.attr<double>("above"),
                                 test.attr<double>("below")));
  };
  operations["cdist"] = [](Case& test) {
    test.out("y", ch::cdist(test.in<3>("a"), test.in<3>("b"), test.attr<double>("p")));
  };
  add_linear_algebra(operations);
  add_fourier(operations);
}

}  // namespace golden
