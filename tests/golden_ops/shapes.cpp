// The same numbers in another shape or order, and numbers picked by index.
#include <chorus/ops/embedding.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/interpolation.hpp>
#include <chorus/ops/padding_modes.hpp>
#include <chorus/ops/shape.hpp>

#include "case.hpp"

namespace golden {
namespace {

// Calls `f(a, b, ...)` with all float inputs, in the order of their names.
template <int Least, class F>
void inputs_of_one_rank(Case& test, const F& f) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : test.group("in")) names.push_back(name);
  with_rank<Least>(test.rank(names.at(0)), [&]<int Rank>(std::integral_constant<int, Rank>) {
    const auto in = [&](std::size_t i) { return test.in<Rank>(names[i]); };
    switch (names.size()) {
      case 1:
        return test.out("y", f(in(0)));
      case 2:
        return test.out("y", f(in(0), in(1)));
      case 3:
        return test.out("y", f(in(0), in(1), in(2)));
      case 4:
        return test.out("y", f(in(0), in(1), in(2), in(3)));
      default:
        ch::fail<ch::UsageError>(names.size(), " inputs are more than this test takes");
    }
  });
}

}  // namespace

void add_shapes(Operations& operations) {
  operations["reshape"] = [](Case& test) {
    const auto sizes = test.attr<std::vector<Index>>("shape");
    with_rank(static_cast<int>(sizes.size()), [&]<int Rank>(std::integral_constant<int, Rank>) {
      const auto shape = as_shape<Rank>("shape", sizes);
      with_rank(test.rank("x"), [&]<int From>(std::integral_constant<int, From>) {
        test.out("y", ch::reshape(test.in<From>("x"), shape));
      });
    });
  };
  operations["permute"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::permute(test.in<Rank>("x"), as_shape<Rank>("axes", test.attr<std::vector<Index>>("axes"))));
    });
  };
  operations["slice"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::slice(test.in<Rank>("x"), test.attr<Index>("axis"), test.attr<Index>("start"),
                              test.attr<Index>("stop")));
    });
  };
  operations["concat"] = [](Case& test) {
    inputs_of_one_rank<1>(test, [&](const auto&... x) { return ch::concat(test.attr<Index>("axis"), x...); });
  };
  operations["stack"] = [](Case& test) {
    inputs_of_one_rank<0>(test, [&](const auto&... x) { return ch::stack(test.attr<Index>("axis"), x...); });
  };
  operations["pad2d"] = [](Case& test) {
    with_rank<2>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      const ch::Padding2d padding{test.attr<Index>("left"), test.attr<Index>("right"), test.attr<Index>("top"),
                                  test.attr<Index>("bottom")};
      const auto mode = test.attr<std::string>("mode", "constant");
      const auto x = test.in<Rank>("x");
      if (mode == "constant") return test.out("y", ch::pad2d(x, padding, test.attr("value", 0.0)));
      ch::check<ch::UsageError>(mode == "reflect" || mode == "replicate" || mode == "circular", "unknown mode ", mode);
      test.out("y", ch::pad2d(x, padding,
                              mode == "reflect"     ? ch::PaddingMode::reflect
                              : mode == "replicate" ? ch::PaddingMode::replicate
                                                    : ch::PaddingMode::circular));
    });
  };
  operations["upsample_nearest2d"] = [](Case& test) {
    test.out_numbers("y", ch::upsample_nearest2d(test.in("x", test.widened<4>("x")), size2d(test, "scale", 1)));
  };
  operations["upsample_bilinear2d"] = [](Case& test) {
    test.out_numbers("y", ch::upsample_bilinear2d(test.in("x", test.widened<4>("x")), size2d(test, "size", 1),
                                                  test.attr("align_corners", false)));
  };
  operations["adaptive_max_pool2d"] = [](Case& test) {
    test.out_numbers("y", ch::adaptive_max_pool2d(test.in("x", test.widened<4>("x")), size2d(test, "output", 1)));
  };
  operations["gather"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::gather(test.in<Rank>("x"), test.attr<Index>("axis"), test.integers<Rank>("index")));
    });
  };
  operations["index_select"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::index_select(test.in<Rank>("x"), test.attr<Index>("axis"), test.integers<1>("index")));
    });
  };
  operations["embedding"] = [](Case& test) {
    with_rank(test.rank("index"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      const auto weight = test.in<2>("weight");
      const auto index = test.integers<Rank>("index");
      if (test.attrs().contains("padding_idx"))
        test.out("y", ch::embedding(weight, index, test.attr<Index>("padding_idx")));
      else
        test.out("y", ch::embedding(weight, index));
    });
  };
}

}  // namespace golden
