#include <chorus/ops/matmul.hpp>
#include <chorus/ops/reduction.hpp>
#include <cstdio>

int main() {
  const auto x = chorus::Tensor<float, 2>::ones({2, 3});
  const float sum = chorus::sum(chorus::matmul(x, chorus::Tensor<float, 2>::ones({3, 2}))).item();
  std::printf("%g\n", static_cast<double>(sum));
  return sum == 12 ? 0 : 1;
}
