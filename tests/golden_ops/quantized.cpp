// Products of 8-bit integers.
#include "quantized.hpp"

namespace golden {

void add_quantized(Operations& operations) {
  operations["quantized_conv2d"] = [](Case& test) {
    const ch::Conv2dOptions options{.stride = size2d(test, "stride", 1), .padding = size2d(test, "padding", 0)};
    quantized_product<4>(test, [&](auto way, const auto&... all) {
      return ch::quantized_conv2d<decltype(way)>(all..., options);
    });
  };
  operations["quantized_linear"] = [](Case& test) {
    quantized_product<2>(test,
                         [](auto way, const auto&... all) { return ch::quantized_linear<decltype(way)>(all...); });
  };
}

}  // namespace golden
