// Times the CPU kernels one by one, on one thread: matrix products against Eigen's, and the convolutions and poolings
// of the five reference models. Each line gives the best of many runs.
//
//   kernels [seconds per measurement, default 0.1]
//   kernels floor    the machine's peak and bandwidth, and the least time of a training step of each reference model
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 sees it in its own headers, under Eigen's products
#endif
#include <Eigen/Core>
#include <algorithm>
#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/cpu/tile.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/pooling.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string_view>
#include <vector>

#include "floor.hpp"

namespace {

using namespace chorus;
using kernels::Conv2dShape;
using kernels::Pool2dShape;
using kernels::Trans;

double budget = 0.1;

/// Processor time of one run, so that what else the machine does counts less; measured in batches of at least 0.2 ms.
template <class F>
double best_seconds(F run) {
  const auto batch = [&](int runs) {
    const std::clock_t begin = std::clock();
    for (int i = 0; i < runs; ++i) run();
    return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  int runs = 1;
  while (batch(runs) < 2e-4) runs *= 2;
  double best = 1e9, spent = 0;
  for (int repeat = 0; repeat < 5 || spent < budget; ++repeat) {
    const double seconds = batch(runs);
    best = std::min(best, seconds / runs);
    spent += seconds;
  }
  return best;
}

std::vector<float> normal(Index count) {
  static std::mt19937 random(1);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (auto& value : values) value = distribution(random);
  return values;
}

void matrix_product(Trans ta, Trans tb, Index m, Index n, Index k) {
  using Matrix = Eigen::Map<Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
  auto a = normal(m * k), b = normal(k * n), c = normal(m * n);
  const bool at = ta == Trans::yes, bt = tb == Trans::yes;
  const double ours = best_seconds(
      [&] { kernels::gemm(Cpu{}, ta, tb, m, n, k, a.data(), at ? m : k, b.data(), bt ? k : n, c.data(), n, false); });
  const Matrix x(a.data(), at ? k : m, at ? m : k), y(b.data(), bt ? n : k, bt ? k : n);
  Matrix z(c.data(), m, n);
  const double eigens = best_seconds([&] {
    if (at)
      z.noalias() = x.transpose() * y;
    else if (bt)
      z.noalias() = x * y.transpose();
    else
      z.noalias() = x * y;
  });
  const double work = 2e-9 * static_cast<double>(m * n * k);
  std::printf("gemm %c%c %4ld x %4ld x %4ld: %8.1f us, %6.1f GFLOP/s; Eigen %6.1f GFLOP/s\n", at ? 'T' : 'N',
              bt ? 'T' : 'N', static_cast<long>(m), static_cast<long>(n), static_cast<long>(k), ours * 1e6, work / ours,
              work / eigens);
}

void convolution(const char* name, const Conv2dShape& s) {
  const Index pixels = s.out_height() * s.out_width(), terms = s.in_channels / s.groups * s.kernel_h * s.kernel_w;
  const auto x = normal(s.batch * s.in_channels * s.height * s.width), w = normal(s.out_channels * terms);
  const auto dy = normal(s.batch * s.out_channels * pixels);
  auto y = dy, dx = x, dw = w;
  const double work = 2e-9 * static_cast<double>(dy.size()) * static_cast<double>(terms);
  const double forward =
      best_seconds([&] { kernels::conv2d_forward<float>(Cpu{}, s, x.data(), w.data(), nullptr, y.data()); });
  const double input =
      best_seconds([&] { kernels::conv2d_backward_input(Cpu{}, s, w.data(), dy.data(), dx.data(), false); });
  const double weight =
      best_seconds([&] { kernels::conv2d_backward_weight(Cpu{}, s, x.data(), dy.data(), dw.data(), false); });
  std::printf("conv2d %-22s forward %8.1f us, %6.1f GFLOP/s; input %8.1f us, %6.1f; weight %8.1f us, %6.1f\n", name,
              forward * 1e6, work / forward, input * 1e6, work / input, weight * 1e6, work / weight);
}

void pooling(const char* name, const Pool2dShape& s) {
  const auto x = normal(s.planes * s.height * s.width), dy = normal(s.planes * s.out_height() * s.out_width());
  auto y = dy, dx = x;
  std::vector<std::int32_t> argmax(dy.size());
  const double forward =
      best_seconds([&] { kernels::max_pool2d_forward(Cpu{}, s, x.data(), y.data(), argmax.data()); });
  const double backward =
      best_seconds([&] { kernels::max_pool2d_backward(Cpu{}, s, dy.data(), argmax.data(), dx.data(), false); });
  std::printf("max_pool2d %-18s forward %8.1f us; backward %8.1f us\n", name, forward * 1e6, backward * 1e6);
}

/// Multiplications and additions per second of the register tile, its operands in the first-level cache.
double peak_flops() {
  constexpr Index depth = 64, rows = kernels::detail::tile_rows, columns = kernels::detail::tile_columns<float>;
  const auto a = normal(rows * depth), b = normal(depth * columns), start = normal(columns);
  std::vector<float> c(static_cast<std::size_t>(rows * columns));
  Index offsets[depth];
  for (Index p = 0; p < depth; ++p) offsets[p] = p * columns;
  const double seconds = best_seconds([&] {
    for (int repeat = 0; repeat < 1000; ++repeat)
      kernels::detail::multiply_tile<rows>(depth, kernels::detail::Matrix<float>{a.data(), depth, 1}, b.data(), offsets,
                                           start.data(), c.data(), columns, false);
  });
  return 2e3 * static_cast<double>(depth * rows * columns) / seconds;
}

/// Bytes read and written per second by a copy of more than the caches hold.
double copy_bandwidth() {
  std::vector<char> from(std::size_t{256} << 20, 1), to(from.size());
  const double seconds = best_seconds([&] { std::memcpy(to.data(), from.data(), from.size()); });
  return 2 * static_cast<double>(from.size()) / seconds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "floor") {
    bench::print_floors(peak_flops(), copy_bandwidth());
    return 0;
  }
  if (argc > 1) budget = std::atof(argv[1]);
  constexpr Trans N = Trans::no, T = Trans::yes;
  matrix_product(N, N, 512, 512, 512);
  for (const Index batch : {16, 128}) {  // the CNN's first linear layer: forward, input, weight
    matrix_product(N, T, batch, 120, 400);
    matrix_product(N, N, batch, 400, 120);
    matrix_product(T, N, 120, 400, batch);
  }
  matrix_product(N, T, 64, 512, 784);
  matrix_product(N, N, 64, 784, 512);
  matrix_product(T, N, 512, 784, 64);
  matrix_product(N, T, 2048, 384, 128);
  matrix_product(N, N, 2048, 128, 384);
  matrix_product(T, N, 384, 128, 2048);
  matrix_product(N, T, 128, 128, 32);

  const auto toy = [](Index batch, Index in, Index out, Index size) {
    return Conv2dShape{.batch = batch,
                       .in_channels = in,
                       .height = size,
                       .width = size,
                       .out_channels = out,
                       .kernel_h = 5,
                       .kernel_w = 5};
  };
  convolution("toy_b16, first", toy(16, 3, 6, 32));
  convolution("toy_b16, second", toy(16, 6, 16, 14));
  convolution("toy_b128, first", toy(128, 3, 6, 32));
  convolution("toy_b128, second", toy(128, 6, 16, 14));
  using bench::residual;
  convolution("resnet18_b32, stem", residual(3, 64, 32, 3, 1));
  convolution("64 to 64, 32 x 32", residual(64, 64, 32, 3, 1));
  convolution("64 to 128, stride 2", residual(64, 128, 32, 3, 2));
  convolution("64 to 128, 1 x 1", residual(64, 128, 32, 1, 2));
  convolution("128 to 128, 16 x 16", residual(128, 128, 16, 3, 1));
  convolution("256 to 256, 8 x 8", residual(256, 256, 8, 3, 1));
  convolution("512 to 512, 4 x 4", residual(512, 512, 4, 3, 1));
  pooling("toy_b16, first",
          {.planes = 16 * 6, .height = 28, .width = 28, .kernel_h = 2, .kernel_w = 2, .stride_h = 2, .stride_w = 2});
  pooling("toy_b16, second",
          {.planes = 16 * 16, .height = 10, .width = 10, .kernel_h = 2, .kernel_w = 2, .stride_h = 2, .stride_w = 2});
}
