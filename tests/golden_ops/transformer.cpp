// Attention layers, layers of the transformer, activations beside the usual ones.
#include <chorus/nn/transformer.hpp>
#include <chorus/ops/more_activations.hpp>

#include "module_case.hpp"

namespace golden {
namespace {

namespace nn = ch::nn;

nn::TransformerOptions options_of(const Case& test) {
  return {.heads = test.attr<Index>("heads"),
          .feed_forward = test.attr<Index>("feed_forward"),
          .dropout = 0,
          .activation = test.attr("gelu", false) ? nn::FeedForwardActivation::gelu : nn::FeedForwardActivation::relu,
          .norm_first = test.attr("norm_first", false)};
}

}  // namespace

void add_transformer(Operations& operations) {
  operations["multihead_attention"] = [](Case& test) {
    const auto query = test.in<3>("query");
    nn::MultiheadAttention<Device> layer(query.size(2), test.attr<Index>("heads"),
                                          {.bias = test.has("in.in_proj_bias")});
    load_parameters(test, layer);
    test.out("y", layer(query, test.in<3>("key"), test.in<3>("value"), test.attr("causal", false)));
  };
  operations["transformer_encoder_layer"] = [](Case& test) {
    const auto x = test.in<3>("x");
    nn::TransformerEncoderLayer<Device> layer(x.size(2), options_of(test));
    load_parameters(test, layer);
    test.out("y", layer(x, test.attr("causal", false)));
  };
  operations["transformer_decoder_layer"] = [](Case& test) {
    const auto x = test.in<3>("x");
    nn::TransformerDecoderLayer<Device> layer(x.size(2), options_of(test));
    load_parameters(test, layer);
    test.out("y", layer(x, test.in<3>("memory")));
  };
  operations["selu"] = [](Case& test) { unary(test, [](const auto& x) { return ch::selu(x); }); };
  operations["celu"] = [](Case& test) {
    unary(test, [&](const auto& x) { return ch::celu(x, test.attr("alpha", 1.0)); });
  };
  operations["softsign"] = [](Case& test) { unary(test, [](const auto& x) { return ch::softsign(x); }); };
  operations["tanhshrink"] = [](Case& test) { unary(test, [](const auto& x) { return ch::tanhshrink(x); }); };
  operations["hardshrink"] = [](Case& test) {
    unary(test, [&](const auto& x) { return ch::hardshrink(x, test.attr("lambda", 0.5)); });
  };
  operations["softshrink"] = [](Case& test) {
    unary(test, [&](const auto& x) { return ch::softshrink(x, test.attr("lambda", 0.5)); });
  };
  operations["threshold"] = [](Case& test) {
    unary(test,
          [&](const auto& x) { return ch::threshold(x, test.attr<double>("threshold"), test.attr<double>("value")); });
  };
  operations["prelu"] = [](Case& test) {  // one weight, or one for each channel, which lie along axis 1
    const bool channels = test.numel("weight") > 1;
    const auto shape = channels ? test.around("x", 1) : Shape<3>{test.numel("x"), 1, 1};
    test.out_numbers("y", ch::prelu(test.in("x", shape), test.in("weight", Shape<1>{test.numel("weight")})));
  };
  operations["glu"] = [](Case& test) {
    test.out_numbers("y", ch::glu(test.in("x", test.around("x", test.attr<Index>("axis", -1))), 1));
  };
}

}  // namespace golden
