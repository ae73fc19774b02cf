// Products, convolutions, pooling, normalisation, attention.
#include <chorus/ops/attention.hpp>
#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/convolution.hpp>
#include <chorus/ops/convolution1d.hpp>
#include <chorus/ops/convolution3d.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/resize.hpp>
#include <chorus/ops/transposed_convolution.hpp>

#include "case.hpp"

namespace golden {
namespace {

ch::Size3d size3d(const Case& test, const char* name, Index otherwise) {
  const auto found = test.attrs().find(name);
  if (found == test.attrs().end() || found->is_null()) return otherwise;
  if (!found->is_array()) return found->get<Index>();
  return {found->at(0).get<Index>(), found->at(1).get<Index>(), found->at(2).get<Index>()};
}

// Images, or lines, of which a case may have one without an axis of samples.
template <int Rank>
Variable<Rank> batch(Case& test) {
  ch::check<ch::ShapeError>(test.rank("x") >= Rank - 1, "expected x of rank ", Rank, ", got ", test.rank("x"));
  return test.in("x", test.widened<Rank>("x"));
}

void matmul(Case& test) {
  if (test.rank("a") < 2 || test.rank("b") < 2) {  // a vector is a row on the left, a column on the right
    const Index inner = test.shape("a").back();
    const Shape<3> left = test.stacked<3>("a");
    const Shape<3> right = test.rank("b") < 2 ? Shape<3>{1, inner, 1} : test.stacked<3>("b");
    return test.out_numbers("y", ch::matmul(test.in("a", left), test.in("b", right)));
  }
  with_rank<2>(test.rank("a"), [&]<int A>(std::integral_constant<int, A>) {
    with_rank<2>(test.rank("b"), [&]<int B>(std::integral_constant<int, B>) {
      test.out("y", ch::matmul(test.in<A>("a"), test.in<B>("b")));
    });
  });
}

void batch_norm(Case& test) {
  const auto mean = test.tensor<1>("running_mean"), var = test.tensor<1>("running_var");
  with_rank<2>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
    test.out("y", ch::batch_norm(test.in<Rank>("x"), optional_in<1>(test, "weight"), optional_in<1>(test, "bias"), mean,
                                 var, test.attr<bool>("training"),
                                 {.eps = test.attr("eps", 1e-5), .momentum = test.attr("momentum", 0.1)}));
  });
  test.out("running_mean", mean);
  test.out("running_var", var);
}

}  // namespace

void add_layers(Operations& operations) {
  operations["matmul"] = matmul;
  operations["bmm"] = matmul;
  operations["linear"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::linear(test.in<Rank>("x"), test.in<2>("weight"), optional_in<1>(test, "bias")));
    });
  };
  operations["conv2d"] = [](Case& test) {
    test.out_numbers("y", ch::conv2d(batch<4>(test), test.in<4>("weight"), optional_in<1>(test, "bias"),
                                     {.stride = size2d(test, "stride", 1),
                                      .padding = size2d(test, "padding", 0),
                                      .dilation = size2d(test, "dilation", 1),
                                      .groups = test.attr<Index>("groups", 1)}));
  };
  operations["conv1d"] = [](Case& test) {
    test.out_numbers("y", ch::conv1d(batch<3>(test), test.in<3>("weight"), optional_in<1>(test, "bias"),
                                     {.stride = test.attr<Index>("stride", 1),
                                      .padding = test.attr<Index>("padding", 0),
                                      .dilation = test.attr<Index>("dilation", 1),
                                      .groups = test.attr<Index>("groups", 1)}));
  };
  operations["conv_transpose1d"] = [](Case& test) {
    const ch::ConvTranspose1dOptions options{.stride = test.attr<Index>("stride", 1),
                                             .padding = test.attr<Index>("padding", 0),
                                             .output_padding = test.attr<Index>("output_padding", 0),
                                             .dilation = test.attr<Index>("dilation", 1),
                                             .groups = test.attr<Index>("groups", 1)};
    const auto x = batch<3>(test), weight = test.in<3>("weight");
    if (test.has("in.bias"))
      test.out_numbers("y", ch::conv_transpose1d(x, weight, test.in<1>("bias"), options));
    else
      test.out_numbers("y", ch::conv_transpose1d(x, weight, options));
  };
  operations["conv3d"] = [](Case& test) {
    test.out_numbers("y", ch::conv3d(batch<5>(test), test.in<5>("weight"), optional_in<1>(test, "bias"),
                                     {.stride = size3d(test, "stride", 1),
                                      .padding = size3d(test, "padding", 0),
                                      .dilation = size3d(test, "dilation", 1),
                                      .groups = test.attr<Index>("groups", 1)}));
  };
  operations["instance_norm"] = [](Case& test) {
    with_rank<3>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::instance_norm(test.in<Rank>("x"), optional_in<1>(test, "weight"), optional_in<1>(test, "bias"),
                                      test.attr("eps", 1e-5)));
    });
  };
  operations["conv_transpose2d"] = [](Case& test) {
    const ch::ConvTranspose2dOptions options{.stride = size2d(test, "stride", 1),
                                             .padding = size2d(test, "padding", 0),
                                             .output_padding = size2d(test, "output_padding", 0),
                                             .dilation = size2d(test, "dilation", 1),
                                             .groups = test.attr<Index>("groups", 1)};
    const auto x = batch<4>(test), weight = test.in<4>("weight");
    if (test.has("in.bias"))
      test.out_numbers("y", ch::conv_transpose2d(x, weight, test.in<1>("bias"), options));
    else
      test.out_numbers("y", ch::conv_transpose2d(x, weight, options));
  };
  operations["max_pool2d"] = [](Case& test) {
    test.out_numbers("y", ch::max_pool2d(batch<4>(test), size2d(test, "kernel", 1),
                                         {.stride = size2d(test, "stride", 0), .padding = size2d(test, "padding", 0)}));
  };
  operations["avg_pool2d"] = [](Case& test) {
    test.out_numbers("y", ch::avg_pool2d(batch<4>(test), size2d(test, "kernel", 1),
                                         {.stride = size2d(test, "stride", 0),
                                          .padding = size2d(test, "padding", 0),
                                          .count_include_pad = test.attr("count_include_pad", true)}));
  };
  operations["adaptive_avg_pool2d"] = [](Case& test) {
    test.out_numbers("y", ch::adaptive_avg_pool2d(batch<4>(test), size2d(test, "output", 1)));
  };
  operations["batch_norm1d"] = batch_norm;
  operations["batch_norm2d"] = batch_norm;
  operations["layer_norm"] = [](Case& test) {
    const int inner = test.attr("normalized", 1);
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      with_rank<1>(inner, [&]<int Inner>(std::integral_constant<int, Inner>) {
        if constexpr (Inner <= Rank)
          test.out("y", ch::layer_norm(test.in<Rank>("x"), optional_in<Inner>(test, "weight"),
                                       optional_in<Inner>(test, "bias"), test.attr("eps", 1e-5)));
      });
    });
  };
  operations["group_norm"] = [](Case& test) {
    with_rank<2>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::group_norm(test.in<Rank>("x"), test.attr<Index>("groups"), optional_in<1>(test, "weight"),
                                   optional_in<1>(test, "bias"), test.attr("eps", 1e-5)));
    });
  };
  operations["rms_norm"] = [](Case& test) {
    with_rank<1>(test.rank("x"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      test.out("y", ch::rms_norm(test.in<Rank>("x"), test.in<1>("weight"), test.attr("eps", 1e-6)));
    });
  };
  operations["scaled_dot_product_attention"] = [](Case& test) {
    const auto in = [&](const char* name) { return test.in(name, test.widened(name)); };
    const auto q = in("q"), k = in("k"), v = in("v");
    if (!test.has("in.mask"))
      return test.out_numbers("y", ch::scaled_dot_product_attention(q, k, v, test.attr("causal", false)));
    const auto attend = [&](const auto& mask) {
      test.out_numbers("y", ch::scaled_dot_product_attention(q, k, v, mask));
    };
    if (test.file("in.mask").values.index() == 0)  // is added
      attend(ch::to<Number>(test.tensor("mask", test.widened("mask"))));
    else if (test.rank("mask") == 2)
      attend(test.mask<2>("mask"));
    else
      attend(test.mask("mask", test.widened("mask")));
  };
}

}  // namespace golden
