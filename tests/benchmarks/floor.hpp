#pragma once
/// The least time that a training step of each reference model can take on one core: its arithmetic at the speed of the
/// best matrix product, or its memory traffic at the speed of a copy, whichever takes longer.

#include <algorithm>
#include <chorus/kernels/convolution_shape.hpp>
#include <cstdio>
#include <initializer_list>

namespace bench {

/// What a step has to compute and to move: multiplications and additions of the products in their direct form, and
/// bytes where every array is read or written once per operation that needs it, in float.
struct Work {
  double flop = 0, bytes = 0;

  void move(double numbers) { bytes += 4 * numbers; }

  /// Forward, by the weight, and (unless it is the first layer) by the input.
  void convolution(const chorus::kernels::Conv2dShape& s, bool first = false) {
    const double passes = first ? 2 : 3;
    const double x = static_cast<double>(s.batch * s.in_channels * s.height * s.width);
    const double y = static_cast<double>(s.batch * s.out_channels * s.out_height() * s.out_width());
    const double terms = static_cast<double>(s.in_channels * s.kernel_h * s.kernel_w);
    flop += passes * 2 * y * terms;
    move(passes * (x + y + terms * static_cast<double>(s.out_channels)));
  }
  void linear(double rows, double in, double out, bool first = false) {
    const double passes = first ? 2 : 3;
    flop += passes * 2 * rows * in * out;
    move(passes * (rows * in + rows * out + in * out));
  }
  /// An element-wise function of `inputs` arrays, forward and back.
  void pointwise(double count, double inputs = 1) { move(count * (3 * inputs + 2)); }
  /// Statistics and result forward; two sums and the result back.
  void normalisation(double count) { move(count * 8); }
  void sgd(double parameters) { move(5 * parameters); }
  void adam(double parameters) { move(7 * parameters); }
};

inline Work toy_work(chorus::Index batch) {
  Work w;
  const auto n = static_cast<double>(batch);
  w.convolution(
      {.batch = batch, .in_channels = 3, .height = 32, .width = 32, .out_channels = 6, .kernel_h = 5, .kernel_w = 5},
      true);
  w.pointwise(n * 6 * 28 * 28);
  w.move(n * 6 * 28 * 28 * 2.5);  // pooling
  w.convolution(
      {.batch = batch, .in_channels = 6, .height = 14, .width = 14, .out_channels = 16, .kernel_h = 5, .kernel_w = 5});
  w.pointwise(n * 16 * 10 * 10);
  w.move(n * 16 * 10 * 10 * 2.5);
  w.linear(n, 400, 120);
  w.linear(n, 120, 84);
  w.linear(n, 84, 10);
  w.sgd(62006);
  return w;
}

inline Work mlp_work() {
  Work w;
  w.linear(64, 784, 512, true);
  w.linear(64, 512, 512);
  w.linear(64, 512, 10);
  w.pointwise(2 * 64 * 512);
  w.adam(669706);
  return w;
}

/// A convolution of resnet18_b32 over images of size x size.
inline chorus::kernels::Conv2dShape residual(chorus::Index in, chorus::Index out, chorus::Index size,
                                             chorus::Index kernel, chorus::Index stride) {
  return {.batch = 32,
          .in_channels = in,
          .height = size,
          .width = size,
          .out_channels = out,
          .kernel_h = kernel,
          .kernel_w = kernel,
          .stride_h = stride,
          .stride_w = stride,
          .padding_h = kernel / 2,
          .padding_w = kernel / 2};
}

inline Work resnet18_work() {
  Work w;
  const auto layer = [&](chorus::Index in, chorus::Index out, chorus::Index size, chorus::Index kernel,
                         chorus::Index stride) {
    w.convolution(residual(in, out, size, kernel, stride), in == 3);
    w.normalisation(32.0 * static_cast<double>(out * (size / stride) * (size / stride)));
  };
  layer(3, 64, 32, 3, 1);
  chorus::Index in = 64, size = 32;
  for (const chorus::Index out : {64, 128, 256, 512}) {
    const chorus::Index stride = out == 64 ? 1 : 2;
    for (const bool first : {true, false}) {
      layer(first ? in : out, out, first ? size * (out == 64 ? 1 : stride) : size, 3, first ? stride : 1);
      if (first && stride == 2) layer(in, out, size * 2, 1, 2);
      layer(out, out, size, 3, 1);
      const double count = 32.0 * static_cast<double>(out * size * size);
      w.pointwise(count);     // ReLU
      w.pointwise(count, 2);  // the residual sum
      w.pointwise(count);
    }
    in = out;
    size /= 2;
  }
  w.linear(32, 512, 10);
  w.sgd(11173962);
  return w;
}

inline Work gpt_work() {
  Work w;
  const double rows = 16 * 128, width = 128, heads = 16 * 4;
  for (int block = 0; block < 4; ++block) {
    w.normalisation(2 * rows * width);
    w.linear(rows, width, 3 * width);
    for (int head = 0; head < heads; ++head) {  // scores and values: the whole square, without the mask's saving
      w.linear(128, 32, 128);
      w.linear(128, 128, 32);
    }
    w.linear(rows, width, width);
    w.linear(rows, width, 4 * width);
    w.pointwise(rows * 4 * width);
    w.linear(rows, 4 * width, width);
    w.pointwise(2 * rows * width, 2);
  }
  w.normalisation(rows * width);
  w.linear(rows, width, 65);
  w.adam(826433);
  return w;
}

/// One line a case, for a core of `peak` flop/s and `bandwidth` bytes/s.
inline void print_floors(double peak, double bandwidth) {
  std::printf("peak %.1f GFLOP/s, copy %.1f GB/s (read and written bytes counted)\n", peak * 1e-9, bandwidth * 1e-9);
  const struct {
    const char* name;
    Work work;
  } cases[] = {{"toy_b16", toy_work(16)},
               {"toy_b128", toy_work(128)},
               {"mlp_b64", mlp_work()},
               {"resnet18_b32", resnet18_work()},
               {"gpt_b16", gpt_work()}};
  for (const auto& [name, work] : cases) {
    const double arithmetic = work.flop / peak * 1e3, memory = work.bytes / bandwidth * 1e3;
    std::printf("%s floor_ms=%.3f gflop=%.3f arithmetic_ms=%.3f mbytes=%.1f memory_ms=%.3f\n", name,
                std::max(arithmetic, memory), work.flop * 1e-9, arithmetic, work.bytes * 1e-6, memory);
  }
}

}  // namespace bench
