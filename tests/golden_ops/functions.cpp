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
  test.out_numbers("y", ch::to<float>(y));
}
template <int Rank>
void whole(Case& test, const char* name, const ch::Tensor<std::int64_t, Rank, Device>& y) {
  test.compare_integers(name, y.to_vector());
}

template <class F>
Operation compared(const F&) {
  return [](Case& test) { truth(test, F{}(test.tensor("x", test.widened("x")), test.tensor("y", test.widened("y")))); };
}
template <class F>
Operation tested(const F&) {
  return [](Case& test) { truth(test, F{}(test.tensor("x", flat(test, "x")))); };
}

#if CHORUS_GOLDEN_ON_CPU
// What is factorized where it has to be symmetric.
template <class X>
auto symmetric(const X& x) {
  return x + ch::transpose(x, -1, -2) + ch::unsqueeze(ch::eye<float>(x.shape().back()) * 6, 0);
}

Variable<3> matrices(Case& test, const char* name) { return test.in(name, test.stacked<3>(name)); }

void add_linear_algebra(Operations& operations) {
  namespace la = ch::linalg;
  operations["linalg.solve"] = [](Case& test) {
    test.out_numbers("y", la::solve(matrices(test, "a"), matrices(test, "b")));
  };
  operations["linalg.inverse"] = [](Case& test) { test.out_numbers("y", la::inverse(matrices(test, "x"))); };
  operations["linalg.det"] = [](Case& test) { test.out_numbers("y", la::det(matrices(test, "x"))); };
  operations["linalg.cholesky"] = [](Case& test) {
    test.out_numbers("y", la::cholesky(symmetric(matrices(test, "x"))));
  };
  operations["linalg.qr"] = [](Case& test) {
    const auto y = la::qr(matrices(test, "x"));
    test.out_numbers("q", y.q);
    test.out_numbers("r", y.r);
  };
  operations["linalg.svd"] = [](Case& test) {
    const auto y = la::svd(matrices(test, "x"));
    test.out_numbers("u2", y.u * y.u);
    test.out_numbers("s", y.s);
    test.out_numbers("uv", ch::matmul(y.u, y.vh));
  };
  operations["linalg.eigh"] = [](Case& test) {
    const auto y = la::eigh(symmetric(matrices(test, "x")));
    test.out_numbers("w", y.eigenvalues);
    test.out_numbers("v2", y.eigenvectors * y.eigenvectors);
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
  return [](Case& test) {
    test.out_numbers("y", F{}(test.in("x", test.stacked<Rank>("x")), fourier_options<ch::fft::Options>(test)));
  };
}
template <int Rank, class F>
Operation fourier2(const F&) {
  return [](Case& test) {
    test.out_numbers("y", F{}(test.in("x", test.stacked<Rank>("x")), fourier_options<ch::fft::Options2>(test)));
  };
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
    const auto x = test.tensor("x", test.around("x", test.attr<Index>("axis")));
    truth(test, ch::any(x > test.attr<double>("above"), 1));
  };
  operations["all"] = [](Case& test) {
    const auto x = test.tensor("x", test.around("x", test.attr<Index>("axis")));
    truth(test, ch::all(x > test.attr<double>("above"), 1));
  };
  operations["masked_select"] = [](Case& test) {
    test.out("y", ch::masked_select(test.in("x", test.widened("x")), test.mask("mask", test.widened("mask"))));
  };
  operations["nonzero"] = [](Case& test) {
    with_rank<1>(test.rank("mask"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      whole(test, "out.y", ch::nonzero(test.mask<Rank>("mask")));
    });
  };
  operations["linspace"] = [](Case& test) {
    test.out("y",
             ch::linspace(test.attr<double>("start"), test.attr<double>("stop"), test.attr<Index>("count"), Device{}));
  };
  operations["arange"] = [](Case& test) {
    const auto y =
        ch::arange(test.attr<double>("start"), test.attr<double>("stop"), test.attr<double>("step"), Device{});
    if (test.file("out.y").values.index() == 1)
      whole(test, "out.y", ch::to<std::int64_t>(y));
    else
      test.out("y", y);
  };
  operations["one_hot"] = [](Case& test) {
    whole(test, "out.y", ch::one_hot(test.integers("index", flat(test, "index")), test.attr<Index>("classes")));
  };
  operations["tril"] = [](Case& test) {
    test.out_numbers("y", ch::tril(test.in("x", test.stacked<3>("x")), test.attr<Index>("diagonal")));
  };
  operations["triu"] = [](Case& test) {
    test.out_numbers("y", ch::triu(test.in("x", test.stacked<3>("x")), test.attr<Index>("diagonal")));
  };
  operations["diag"] = [](Case& test) {
    const auto diagonal = test.attr<Index>("diagonal");
    if (test.rank("x") == 1)
      test.out("y", ch::diag(test.in<1>("x"), diagonal));
    else
      test.out("y", ch::diag(test.in<2>("x"), diagonal));
  };
  operations["repeat"] = [](Case& test) {
    const auto given = test.attr<std::vector<Index>>("times");
    ch::check<ch::ShapeError>(given.size() <= 5, "expected 5 times at most");
    Shape<5> times{1, 1, 1, 1, 1};
    std::copy(given.begin(), given.end(), times.end() - static_cast<std::ptrdiff_t>(given.size()));
    test.out_numbers("y", ch::repeat(test.in("x", test.widened("x")), times));
  };
  operations["flip"] = [](Case& test) {
    auto y = test.in("x", test.widened("x"));
    for (const Index axis : test.attr<std::vector<Index>>("axes"))
      y = ch::flip(y, Shape<1>{axis < 0 ? axis : axis - test.rank("x")});
    test.out_numbers("y", y);
  };
  operations["roll"] = [](Case& test) {
    test.out_numbers("y",
                     ch::roll(test.in("x", test.around("x", test.attr<Index>("axis"))), test.attr<Index>("shift"), 1));
  };
  operations["outer"] = [](Case& test) { test.out("y", ch::outer(test.in<1>("a"), test.in<1>("b"))); };
  operations["dot"] = [](Case& test) { test.out("y", ch::dot(test.in<1>("a"), test.in<1>("b"))); };
  operations["cross"] = [](Case& test) {
    const auto axis = test.attr<Index>("axis", -1);
    test.out_numbers("y", ch::cross(test.in("a", test.around("a", axis)), test.in("b", test.around("b", axis)), 1));
  };
  operations["unique"] = [](Case& test) {
    const auto y = ch::unique(test.tensor("x", flat(test, "x")));
    test.out("values", y.values);
    whole(test, "out.inverse", y.inverse);
    whole(test, "out.counts", y.counts);
  };
  operations["searchsorted"] = [](Case& test) {
    whole(test, "out.y",
          ch::searchsorted(test.tensor<1>("sorted"), test.tensor("values", flat(test, "values")),
                           test.attr<bool>("right")));
  };
  operations["bincount"] = [](Case& test) {
    whole(test, "out.y", ch::bincount(test.integers("x", flat(test, "x")), test.attr<Index>("at_least")));
  };
  operations["histogram"] = [](Case& test) {
    const auto y = ch::histogram(test.tensor("x", flat(test, "x")), test.attr<Index>("bins"), test.attr<double>("low"),
                                 test.attr<double>("high"));
    test.out("y", ch::to<float>(y.counts));
  };
  operations["logaddexp"] = [](Case& test) {
    test.out_numbers("y", ch::logaddexp(test.in("a", test.widened("a")), test.in("b", test.widened("b"))));
  };
  operations["nan_to_num"] = [](Case& test) {
    unary(test, [&](const auto& x) {
      return ch::nan_to_num(x, test.attr<double>("nan"), test.attr<double>("above"), test.attr<double>("below"));
    });
  };
  operations["cdist"] = [](Case& test) {
    test.out_numbers(
        "y", ch::cdist(test.in("a", test.stacked<3>("a")), test.in("b", test.stacked<3>("b")), test.attr<double>("p")));
  };
  add_linear_algebra(operations);
  add_fourier(operations);
}

}  // namespace golden
