#include <chorus/ops/cast.hpp>
#include <chorus/tensor/print.hpp>

#include "check_operator.hpp"

namespace cast_test {

using ch::bf16;
using ch::half;

TEST_CASE("conversion between scalar types") {
  const auto x = Tensor<1>::from({1, -2.75, 0.1, 70000}, {4});
  CHECK(ch::cat(ch::to<bf16>(x)) == "[1, -2.75, 0.100097656, 70144]");
  CHECK(ch::cat(ch::to<half>(x)) == "[1, -2.75, 0.099975586, inf]");
  CHECK(ch::cat(ch::to<std::int64_t>(x)) == "[1, -2, 0, 70000]");
  CHECK(ch::to<double>(ch::to<bf16>(x)).to_vector() == std::vector<double>{1, -2.75, 0.10009765625, 70144});
  CHECK(ch::to<half>(ch::to<bf16>(x.slice(0, 0, 2))).to_vector() == std::vector<half>{1.0f, -2.75f});
  CHECK(ch::to<double>(x).data() == x.data());
  const auto matrix = numbers<2>({3, 4}, 1);
  CHECK(ch::to<float>(matrix.permute({1, 0}))(3, 1) == static_cast<float>(matrix(1, 3)));
}

TEST_CASE("gradients pass through conversions, rounded as the type in between") {
  const Variable<1> x(Tensor<1>::from({1, 2}, {2}), true);
  const auto y = ch::to<bf16>(x);
  y.backward(ch::Tensor<bf16, 1>::from({0.1f, 3.0f}, {2}));
  CHECK(x.grad().to_vector() == std::vector<double>{0.10009765625, 3});
  ch::to<double>(ch::to<half>(x)).backward(Tensor<1>::ones({2}));
  CHECK(x.grad().to_vector() == std::vector<double>{1.10009765625, 4});
}

TEST_CASE("2-byte tensors are filled, copied, scaled and added to in float") {
  auto x = ch::Tensor<bf16, 2>::full({2, 3}, 1.5f);
  x(0, 1) = 2.0f;
  CHECK(ch::cat(x.permute({1, 0})) == "[[1.5, 1.5], [2, 1.5], [1.5, 1.5]]");
  CHECK(ch::cat(ch::contiguous(x.permute({1, 0}))) == "[[1.5, 1.5], [2, 1.5], [1.5, 1.5]]");
  ch::kernels::fill(ch::Cpu{}, 3, x.data(), bf16(4.0f));
  ch::kernels::scale(ch::Cpu{}, 6, bf16(0.5f), x.data());
  ch::kernels::axpy(ch::Cpu{}, 3, bf16(2.0f), x.data(), x.data() + 3);
  CHECK(ch::cat(x) == "[[2, 2, 2], [4.75, 4.75, 4.75]]");
  // 1000 ones: a sum in bf16 would stop at 256.
  const auto ones = ch::Tensor<bf16, 1>::full({1000}, 1.0f);
  auto sum = ch::Tensor<bf16, 1>::zeros({1});
  ch::kernels::scatter_strided(ch::Cpu{}, Shape<1>{1000}, ones.data(), sum.data(), Shape<1>{0}, true);
  CHECK(static_cast<float>(sum(0)) == 1000);
}

}  // namespace cast_test
