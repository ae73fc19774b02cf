// Reductions, softmax and its kin, running sums.
#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/reduction_axes.hpp>
#include <chorus/ops/softmax.hpp>

#include "case.hpp"

namespace golden {
namespace {

// `f(x)`, `f(x, axis)` or `f(x, axis, keep_axis)`, as the attributes say.
template <class F>
void reduction(Case& test, const F& f) {
  if (!test.attrs().contains("axis") || test.attrs().at("axis").is_null())
    return test.out_numbers("y", f(test.in<1>("x", {test.numel("x")})));
  if (test.attrs().at("axis").is_array()) {
    const auto axes = test.attr<std::vector<Index>>("axis");
    return with_rank<1>(static_cast<int>(axes.size()), [&]<int Axes>(std::integral_constant<int, Axes>) {
      const auto x = test.in("x", test.widened("x"));
      auto behind = as_shape<Axes>("axes", axes);  // axes of size 1 are in front
      for (Index& axis : behind) axis = axis < 0 ? axis : axis - test.rank("x");
      test.out_numbers("y", f(x, behind));
    });
  }
  const auto axis = test.attr<Index>("axis");
  with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
    const auto x = test.in<Rank>("x");
    if (test.attr("keepdim", false))
      test.out("y", f(x, axis, ch::keep_axis));
    else
      test.out("y", f(x, axis));
  });
}

// A function along an axis that keeps the shape.
template <class F>
void along_axis(Case& test, const F& f) {
  with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
    test.out("y", f(test.in<Rank>("x"), test.attr<Index>("axis")));
  });
}

}  // namespace

void add_reductions(Operations& operations) {
#define REDUCTION(NAME)                                                               \
  operations[#NAME] = [](Case& test) {                                                \
    reduction(test, [](const auto&... arguments) { return ch::NAME(arguments...); }); \
  }
  REDUCTION(sum);
  REDUCTION(mean);
  REDUCTION(amax);
  REDUCTION(amin);
  REDUCTION(logsumexp);
#undef REDUCTION
  operations["var"] = [](Case& test) {
    const Index correction = test.attr("unbiased", true) ? 1 : 0;
    reduction(test, [&](const auto& x, auto... arguments) {
      if constexpr (sizeof...(arguments) == 0)
        return ch::var(x, 0, correction);
      else
        return ch::var(x, arguments..., correction);
    });
  };
  operations["softmax"] = [](Case& test) {
    along_axis(test, [](const auto& x, Index axis) { return ch::softmax(x, axis); });
  };
  operations["log_softmax"] = [](Case& test) {
    along_axis(test, [](const auto& x, Index axis) { return ch::log_softmax(x, axis); });
  };
  operations["cumsum"] = [](Case& test) {
    along_axis(test, [](const auto& x, Index axis) { return ch::cumsum(x, axis); });
  };
  operations["cumprod"] = [](Case& test) {
    along_axis(test, [](const auto& x, Index axis) { return ch::cumprod(x, axis); });
  };
  operations["argmin"] = [](Case& test) {
    if (!in_float) test.leave_out(" of rounded numbers");
    if (!test.attrs().contains("axis") || test.attrs().at("axis").is_null())
      return test.compare_integers("out.y", ch::argmin(test.tensor("x", Shape<1>{test.numel("x")}), 0).to_vector());
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.compare_integers("out.y", ch::argmin(test.tensor<Rank>("x"), test.attr<Index>("axis")).to_vector());
    });
  };
  operations["argmax"] = [](Case& test) {
    if (!in_float) test.leave_out(" of rounded numbers");
    if (!test.attrs().contains("axis") || test.attrs().at("axis").is_null())
      return test.compare_integers("out.y", ch::argmax(test.tensor("x", Shape<1>{test.numel("x")}), 0).to_vector());
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      const auto y = ch::argmax(test.tensor<Rank>("x"), test.attr<Index>("axis"));
      test.compare_integers("out.y", y.to_vector());
    });
  };
}

}  // namespace golden
