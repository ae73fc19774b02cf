#include <chorus/kernels/random.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/convolution3d.hpp>
#include <chorus/ops/dropout_variants.hpp>
#include <chorus/ops/more_activations.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/transposed_convolution.hpp>

#include "check_operator.hpp"

namespace more_layers_test {

TEST_CASE("gradients of convolutions of volumes and sequences") {
  check_operator(
      [](const auto& x, const auto& w, const auto& b) {
        return ch::conv3d(x, w, b, {.stride = {2, 1, 1}, .padding = {1, 0, 1}, .groups = 2});
      },
      numbers<5>({1, 4, 3, 3, 2}, 1), numbers<5>({2, 2, 2, 2, 3}, 2), numbers<1>({2}, 3));
  check_operator(
      [](const auto& x, const auto& w, const auto& b) {
        return ch::conv_transpose1d(x, w, b, {.stride = 2, .padding = 1, .output_padding = 1});
      },
      numbers<3>({2, 3, 4}, 1), numbers<3>({3, 2, 3}, 2), numbers<1>({2}, 3));
  CHECK_THROWS_AS(ch::conv3d(Tensor<5>::zeros({1, 1, 1, 3, 3}), Tensor<5>::zeros({1, 1, 2, 1, 1}), Tensor<1>()),
                  ch::ShapeError);
  CHECK_THROWS_AS(ch::conv3d(Tensor<5>::zeros({1, 2, 2, 3, 3}), Tensor<5>::zeros({1, 1, 2, 1, 1}), Tensor<1>()),
                  ch::ShapeError);
}

TEST_CASE("gradients of normalisation of channels, with and without weights") {
  const auto x = numbers<3>({2, 3, 4}, 1);
  check_operator([](const auto& a, const auto& w, const auto& b) { return ch::instance_norm(a, w, b); }, x,
                 numbers<1>({3}, 2), numbers<1>({3}, 3));
  check_operator([](const auto& a) { return ch::group_norm(a, 3, Tensor<1>(), Tensor<1>()); }, x);
}

TEST_CASE("gradients of attention under a mask") {
  const auto mask = ch::Tensor<bool, 2>::from({true, false, true, true, true, false}, {2, 3});
  check_operator(
      [&](const auto& q, const auto& k, const auto& v) { return ch::scaled_dot_product_attention(q, k, v, mask); },
      numbers<3>({2, 2, 3}, 1), numbers<3>({2, 3, 3}, 2), numbers<3>({2, 3, 2}, 3));
}

TEST_CASE("gradients of more activations") {
  const auto x = numbers<2>({3, 8}, 1);
  check_operator([](const auto& a) { return ch::selu(a); }, x);
  check_operator([](const auto& a) { return ch::celu(a, 0.7); }, x);
  check_operator([](const auto& a) { return ch::softsign(a); }, x);
  check_operator([](const auto& a) { return ch::tanhshrink(a); }, x);
  check_operator([](const auto& a) { return ch::hardshrink(a); }, x);
  check_operator([](const auto& a) { return ch::softshrink(a); }, x);
  check_operator([](const auto& a) { return ch::threshold(a, 0.3, 2); }, x);
  check_operator([](const auto& a) { return ch::glu(a); }, x);
  check_operator([](const auto& a, const auto& w) { return ch::prelu(a, w); }, x, numbers<1>({8}, 2));
}

TEST_CASE("dropout of channels drops whole ones, and keeps the mean") {
  ch::manual_seed(5);
  const auto y = ch::dropout_channels(Tensor<3>::ones({200, 10, 3}), 0.3);
  Index dropped = 0;
  for (Index n = 0; n < 200; ++n)
    for (Index c = 0; c < 10; ++c) {
      CHECK((y(n, c, 0) == 0 || y(n, c, 0) == Approx(1 / 0.7)));
      CHECK((y(n, c, 1) == y(n, c, 0) && y(n, c, 2) == y(n, c, 0)));
      dropped += y(n, c, 0) == 0;
    }
  CHECK(dropped > 500);
  CHECK(dropped < 700);
  const auto x = numbers<3>({2, 3, 4}, 1);
  CHECK(values(ch::dropout_channels(x, 0.3, false)) == values(x));
}

TEST_CASE("alpha dropout keeps mean and variance") {
  ch::manual_seed(6);
  auto x = Tensor<2>::empty({100, 400});
  ch::kernels::fill_normal(ch::Cpu{}, 1, 2, 0, x.numel(), x.data(), 0.0, 1.0);
  const auto y = ch::alpha_dropout(x, 0.4);
  const double mean = ch::mean(y).item(), variance = ch::var(y).item();
  CHECK(std::abs(mean) < 0.03);
  CHECK(std::abs(variance - 1) < 0.05);
  CHECK(distance(values(ch::alpha_dropout(x, 0.4, false)), values(x)) < 1e-12);
}

}  // namespace more_layers_test
