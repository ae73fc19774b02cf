// Matrix products, convolutions, pooling.
#include <chorus/kernels/convolution.hpp>
#include <chorus/kernels/gemm.hpp>
#include <chorus/kernels/pooling.hpp>

#include "compare.hpp"

namespace spatial_test {

using namespace chorus;
using kernels::Conv2dShape;
using kernels::Pool2dShape;
using kernels::Trans;

// Products in another order; no TF32.
template <class T>
constexpr double product = sizeof(T) == 8   ? 1e-11
                           : sizeof(T) == 4 ? 1e-4
                                            : 5e-2;

template <class T>
void products(Trans ta, Trans tb, Index m, Index n, Index k, Index gap, Index offset, bool accumulate, bool bias) {
  CAPTURE(static_cast<int>(ta), static_cast<int>(tb), m, n, k, gap, offset, accumulate, bias);
  const Index lda = (ta == Trans::no ? k : m) + gap, ldb = (tb == Trans::no ? n : k) + gap, ldc = n + gap;
  const auto body = [&](auto device, T* a, T* b, T* c, T* v) {
    kernels::gemm(device, ta, tb, m, n, k, static_cast<const T*>(a + offset), lda, static_cast<const T*>(b + offset),
                  ldb, c + offset, ldc, accumulate, bias ? static_cast<const T*>(v + offset) : nullptr);
  };
  compare(product<T>, body, numbers<T>((ta == Trans::no ? m : k) * lda + offset, 1),
          numbers<T>((tb == Trans::no ? k : n) * ldb + offset, 2), numbers<T>(m * ldc + offset, 3),
          numbers<T>(n + offset, 4));
}

template <class T>
void convolutions(const Conv2dShape& s, bool accumulate, Index offset = 0) {
  CAPTURE(s.batch, s.in_channels, s.height, s.width, s.out_channels, s.kernel_h, s.kernel_w, s.stride_h, s.padding_h,
          s.dilation_h, s.groups, accumulate, offset);
  const Index x = s.batch * s.in_channels * s.height * s.width,
              y = s.batch * s.out_channels * s.out_height() * s.out_width(),
              w = s.out_channels * (s.in_channels / s.groups) * s.kernel_h * s.kernel_w;
  const auto body = [&](auto device, T* in, T* weight, T* bias, T* dy, T* out, T* dx, T* dw, T* db) {
    kernels::conv2d_forward(device, s, in + offset, weight + offset, accumulate ? bias : static_cast<T*>(nullptr),
                            out + offset);
    kernels::conv2d_backward_input(device, s, weight + offset, dy + offset, dx + offset, accumulate);
    kernels::conv2d_backward_weight(device, s, in + offset, dy + offset, dw + offset, accumulate);
    kernels::conv2d_backward_bias(device, s, dy + offset, db + offset, accumulate);
  };
  compare(product<T>, body, numbers<T>(x + offset, 1), numbers<T>(w + offset, 2), numbers<T>(s.out_channels, 3),
          numbers<T>(y + offset, 4), numbers<T>(y + offset, 5), numbers<T>(x + offset, 6), numbers<T>(w + offset, 7),
          numbers<T>(s.out_channels + offset, 8));
}

template <class T>
void pools(const Pool2dShape& s, bool accumulate) {
  CAPTURE(s.planes, s.height, s.width, s.kernel_h, s.kernel_w, s.stride_h, s.stride_w, s.padding_h, accumulate);
  const Index in = s.planes * s.height * s.width, out = s.planes * s.out_height() * s.out_width();
  const auto body = [&](auto device, T* x, T* dy, T* y, std::int32_t* argmax, T* mean, T* dx, T* dm) {
    kernels::max_pool2d_forward(device, s, x, y, argmax);
    kernels::max_pool2d_backward(device, s, dy, argmax, dx, accumulate);
    if (s.dilation_h != 1 || s.dilation_w != 1) return;  // of the largest alone
    kernels::avg_pool2d_forward(device, s, x, mean);
    kernels::avg_pool2d_backward(device, s, dy, dm, accumulate);
  };
  auto x = numbers<T>(in, 1);
  if (x.size() > 20) x[7] = x[8] = x[20] = static_cast<T>(2);  // ties
  compare(near<T>, body, x, numbers<T>(out, 2), numbers<T>(out, 3),
          std::vector<std::int32_t>(static_cast<std::size_t>(out)), numbers<T>(out, 4), numbers<T>(in, 5),
          numbers<T>(in, 6));
}

TEST_CASE("matrix products") {
  if (!gpu_present()) return;
  for (const Trans ta : {Trans::no, Trans::yes})
    for (const Trans tb : {Trans::no, Trans::yes})
      for (const bool accumulate : {false, true}) {
        products<float>(ta, tb, 5, 7, 3, 0, 0, accumulate, true);
        products<float>(ta, tb, 64, 48, 100, 4, 0, accumulate, false);
        products<float>(ta, tb, 17, 33, 20, 1, 1, accumulate, true);
        products<float>(ta, tb, 4, 5, 0, 0, 0, accumulate, true);
        products<double>(ta, tb, 6, 9, 11, 0, 0, accumulate, true);
        products<bf16>(ta, tb, 16, 24, 32, 0, 0, accumulate, true);
      }
  products<float>(Trans::no, Trans::no, 0, 5, 3, 0, 0, false, true);
  products<chorus::half>(Trans::no, Trans::yes, 5, 7, 9, 0, 1, true, true);
}

TEST_CASE("convolutions, forward and both gradients") {
  if (!gpu_present()) return;
  for (const bool accumulate : {false, true}) {
    convolutions<float>({2, 3, 12, 11, 6, 5, 5}, accumulate);
    convolutions<float>({2, 4, 9, 8, 6, 3, 3, 2, 1, 1, 2}, accumulate);
    convolutions<float>({2, 4, 9, 8, 6, 3, 2, 1, 2, 0, 1, 2, 1, 2}, accumulate, 1);
    convolutions<float>({3, 8, 5, 5, 8, 3, 3, 1, 1, 1, 1, 1, 1, 8}, accumulate);
    convolutions<float>({2, 5, 4, 4, 7, 1, 1}, accumulate);
    convolutions<double>({2, 3, 7, 7, 4, 3, 3, 2, 2, 1, 1}, accumulate);
    convolutions<float>({0, 3, 7, 7, 4, 3, 3}, accumulate);
  }
  convolutions<bf16>({2, 8, 6, 6, 8, 3, 3, 1, 1, 1, 1}, false);
}

TEST_CASE("pooling, forward and back") {
  if (!gpu_present()) return;
  for (const bool accumulate : {false, true}) {
    pools<float>({6, 8, 10, 2, 2, 2, 2}, accumulate);
    pools<float>({3, 9, 7, 3, 3, 2, 1, 1, 1}, accumulate);
    pools<float>({2, 11, 11, 3, 2, 4, 3}, accumulate);
    pools<float>({2, 12, 10, 3, 2, 2, 3, 1, 1, 1, 1, true}, accumulate);
    pools<float>({2, 12, 11, 3, 2, 2, 1, 1, 1, 2, 3, true}, accumulate);
    pools<double>({2, 5, 5, 5, 5, 1, 1, 2, 2}, accumulate);
    pools<float>({70'000, 2, 2, 2, 2, 2, 2}, accumulate);
  }
}

}  // namespace spatial_test
