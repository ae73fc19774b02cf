#pragma once
/// A small model on a GPU, and batches for it.

#include <chorus/nn/linear.hpp>
#include <cstdint>

namespace test {

namespace ch = chorus;

struct TwoLayers : ch::nn::Module {
  ch::nn::Linear<ch::Cuda> a{16, 16}, b{16, 4};
  CHORUS_MODULE(TwoLayers, a, b)
  auto forward(const auto& x) const { return b(a(x)); }
};

/// Other ones for each key.
inline ch::Tensor<float, 2> images(ch::Index key) {
  auto out = ch::Tensor<float, 2>::empty({4, 16});
  for (ch::Index i = 0; i < out.numel(); ++i) out.data()[i] = static_cast<float>((i * 7 + key * 5) % 13) / 13;
  return out;
}
inline const ch::Tensor<std::int64_t, 1>& labels() {
  static const auto out = ch::Tensor<std::int64_t, 1>::from({0, 1, 2, 3}, {4});
  return out;
}

}  // namespace test
