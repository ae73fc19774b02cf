// int8_inference [SIDE]: ResNet-18 in float and in 8-bit integers on one thread, images of SIDE x SIDE (default 32, the
// form for CIFAR), batches of 1 and 32. Both are timed in turns; the ratio is the median over pairs.
#include <algorithm>
#include <chorus/chorus.hpp>
#include <chorus/nn/models/resnet.hpp>
#include <chorus/quantization/quantized.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace ch = chorus;

namespace {

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

template <class F>
double milliseconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
  const ch::Index side = argc > 1 ? std::atol(argv[1]) : 32;
  using Model = ch::nn::ResNet18<ch::Cpu>;
  ch::nn::QuantizationAware<Model> net{Model({.classes = 10, .small_images = side <= 64})};
  const auto images = [&](ch::Index batch) {
    auto out = ch::Tensor<float, 4>::empty({batch, 3, side, side});
    for (ch::Index i = 0; i < out.numel(); ++i) out.data()[i] = static_cast<float>(i * 7919 % 1000) / 400 - 1.2f;
    return out;
  };
  const ch::NoGrad no_grad;
  net(images(4));  // ranges
  net.eval();
  const auto integers = ch::nn::quantized(net, images(1));
  const auto& model = net.model();
  std::printf("ResNet-18, %s\n", ch::kernels::int8::Best::name);
  for (const ch::Index batch : {1, 32}) {
    const auto x = images(batch);
    std::vector<double> in_float, in_int8, ratio;
    for (int i = 0; i < (batch == 1 ? 41 : 11); ++i) {
      in_float.push_back(milliseconds([&] { model(x); }));
      in_int8.push_back(milliseconds([&] { integers(x); }));
      ratio.push_back(in_float.back() / in_int8.back());
    }
    std::printf("batch %2d: float %8.2f ms, int8 %8.2f ms, %.2f times as fast\n", static_cast<int>(batch),
                median(in_float), median(in_int8), median(ratio));
  }
}
