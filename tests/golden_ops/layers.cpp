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

void matmul(Case& test) {
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
    test.out("y", ch::conv2d(test.in<4>("x"), test.in<4>("weight"), optional_in<1>(test, "bias"),
                             {.stride = size2d(test, "stride", 1),
                              .padding = size2d(test, "padding", 0),
                              .dilation = size2d(test, "dilation", 1),
                              .groups = test.attr<Index>("groups", 1)}));
  };
  operations["conv1d"] = [](Case& test) {
    test.out("y", ch::conv1d(test.in<3>("x"), test.in<3>("weight"), optional_in<1>(test, "bias"),
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
    const auto x = test.in<3>("x"), weight = test.in<3>("weight");
    if (test.has("in.bias"))
      test.out("y", ch::conv_transpose1d(x, weight, test.in<1>("bias"), options));
    else
      test.out("y", ch::conv_transpose1d(x, weight, options));
  };
  operations["conv3d"] = [](Case& test) {
    test.out("y", ch::conv3d(test.in<5>("x"), test.in<5>("weight"), optional_in<1>(test, "bias"),
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
    const auto x = test.in<4>("x"), weight = test.in<4>("weight");
    if (test.has("in.bias"))
      test.out("y", ch::conv_transpose2d(x, weight, test.in<1>("bias"), options));
    else
      test.out("y", ch::conv_transpose2d(x, weight, options));
  };
  operations["max_pool2d"] = [](Case& test) {
    test.out("y", ch::max_pool2d(test.in<4>("x"), size2d(test, "kernel", 1),
                                 {.stride = size2d(test, "stride", 0), .padding = size2d(test, "padding", 0)}));
  };
  operations["avg_pool2d"] = [](Case& test) {
    test.out("y", ch::avg_pool2d(test.in<4>("x"), size2d(test, "kernel", 1),
                                 {.stride = size2d(test, "stride", 0),
                                  .padding = size2d(test, "padding", 0),
                                  .count_include_pad = test.attr("count_include_pad", true)}));
  };
  operations["adaptive_avg_pool2d"] = [](Case& test) {
    test.out("y", ch::adaptive_avg_pool2d(test.in<4>("x"), size2d(test, "output", 1)));
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
    with_rank<2>(test.rank("q"), [&]<int Rank>(std::integral_constant<int, Rank>) {
      const auto q = test.in<Rank>("q"), k = test.in<Rank>("k"), v = test.in<Rank>("v");
      if (test.has("in.mask"))
        test.out("y", ch::scaled_dot_product_attention(q, k, v, test.mask<2>("mask")));
      else
        test.out("y", ch::scaled_dot_product_attention(q, k, v, test.attr("causal", false)));
    });
  };
}

}  // namespace golden
