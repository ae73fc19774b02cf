// Recurrent layers.
#include <chorus/nn/recurrent.hpp>

#include "module_case.hpp"

namespace golden {
namespace {

namespace nn = ch::nn;

// A layer with the case's parameters; gradients of all of them are compared where the case has them.
template <class Layer>
Layer layer_of(Case& test) {
  const auto& ih = test.file("in.weight_ih_l0").shape;
  const auto& hh = test.file("in.weight_hh_l0").shape;
  Layer layer(ih.at(1), hh.at(1),
              {.num_layers = test.attr<Index>("num_layers", 1),
               .bias = test.has("in.bias_ih_l0"),
               .batch_first = test.attr("batch_first", false),
               .bidirectional = test.attr("bidirectional", false)});
  load_parameters(test, layer);
  return layer;
}

void compare_states(Case& test, const char* name, const Variable<3>& states) {
  if (test.has(ch::cat("out.", name))) test.out(name, states);
}

}  // namespace

void add_recurrent(Operations& operations) {
  operations["lstm"] = [](Case& test) {
    const auto layer = layer_of<nn::LSTM<Device>>(test);
    const auto x = test.in<3>("x");
    const auto made = test.has("in.h0") ? layer(x, test.in<3>("h0"), test.in<3>("c0")) : layer(x);
    test.out("y", made.output);
    compare_states(test, "h", made.hidden);
    compare_states(test, "c", made.cell);
  };
  operations["gru"] = [](Case& test) {
    const auto layer = layer_of<nn::GRU<Device>>(test);
    const auto x = test.in<3>("x");
    const auto made = test.has("in.h0") ? layer(x, test.in<3>("h0")) : layer(x);
    test.out("y", made.output);
    compare_states(test, "h", made.hidden);
  };
}

}  // namespace golden
