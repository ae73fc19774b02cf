// Recurrent layers.
#include <chorus/ops/recurrent.hpp>

#include "case.hpp"

namespace golden {
namespace {

// `layer(x, weight_ih, weight_hh, bias_ih, bias_hh).output`, time in the axis that the case says.
template <class Layer>
void recurrent(Case& test, const Layer& layer) {
  const bool batch_first = test.attr("batch_first", false);
  auto x = test.in<3>("x");
  if (!batch_first) x = ch::transpose(x, 0, 1);
  const auto y = layer(x, test.in<2>("weight_ih_l0"), test.in<2>("weight_hh_l0"), test.in<1>("bias_ih_l0"),
                       test.in<1>("bias_hh_l0"))
                     .output;
  test.out("y", batch_first ? y : ch::transpose(y, 0, 1));
}

}  // namespace

void add_recurrent(Operations& operations) {
  operations["lstm"] = [](Case& test) {
    recurrent(test, [](const auto&... arguments) { return ch::lstm(arguments...); });
  };
  operations["gru"] = [](Case& test) {
    recurrent(test, [](const auto&... arguments) { return ch::gru(arguments...); });
  };
}

}  // namespace golden
