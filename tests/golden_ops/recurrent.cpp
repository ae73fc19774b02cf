// Recurrent layers.
#include <chorus/nn/recurrent.hpp>

#include "case.hpp"

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
  for (const auto& named : nn::named_parameters<ch::Cpu>(layer)) {
    const auto& values = test.file("in." + named.name).f32();
    const auto count = static_cast<std::size_t>(named.parameter->count());
    ch::check<ch::ShapeError>(values.size() == count, named.name, ": ", values.size(), " numbers");
    std::copy(values.begin(), values.end(), static_cast<float*>(named.parameter->value_data()));
    const auto grad = "grad." + named.name;
    if (test.has(grad))
      test.expect_gradient(grad, [handle = named.handle, parameter = named.parameter, count] {
        if (!parameter->grad_arrived()) return std::vector<float>();
        const auto* from = static_cast<const float*>(parameter->grad_data());
        return std::vector<float>(from, from + count);
      });
  }
  return layer;
}

void compare_states(Case& test, const char* name, const Variable<3>& states) {
  if (test.has(ch::cat("out.", name))) test.out(name, states);
}

}  // namespace

void add_recurrent(Operations& operations) {
  operations["lstm"] = [](Case& test) {
    const auto layer = layer_of<nn::LSTM<ch::Cpu>>(test);
    const auto x = test.in<3>("x");
    const auto made = test.has("in.h0") ? layer(x, test.in<3>("h0"), test.in<3>("c0")) : layer(x);
    test.out("y", made.output);
    compare_states(test, "h", made.hidden);
    compare_states(test, "c", made.cell);
  };
  operations["gru"] = [](Case& test) {
    const auto layer = layer_of<nn::GRU<ch::Cpu>>(test);
    const auto x = test.in<3>("x");
    const auto made = test.has("in.h0") ? layer(x, test.in<3>("h0")) : layer(x);
    test.out("y", made.output);
    compare_states(test, "h", made.hidden);
  };
}

}  // namespace golden
