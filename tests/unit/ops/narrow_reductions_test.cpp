#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/softmax.hpp>

#include "narrow_operators.hpp"

namespace narrow_reductions_test {

TEST_CASE("reductions of 2-byte numbers are added up in float") {
  const auto x = numbers<3>({5, 700, 3}, 1, 0, 2);
  check_narrow_both(
      2, [](const auto& a) { return ch::sum(a, 1); }, x);
  check_narrow_both(
      2, [](const auto& a) { return ch::mean(a); }, x);
  check_narrow_both(
      2, [](const auto& a) { return ch::amax(a, 1); }, x);
  check_narrow_both(
      2, [](const auto& a) { return ch::var(a, 1); }, x);
  const auto narrow = ch::to<ch::bf16>(x);
  CHECK(ch::argmax(narrow, 1).to_vector() == ch::argmax(ch::to<float>(narrow), 1).to_vector());
}

TEST_CASE("softmax, normalisation and classification of 2-byte numbers") {
  const auto x = numbers<2>({6, 50}, 1);
  const auto weight = numbers<1>({50}, 2), bias = numbers<1>({50}, 3);
  check_narrow_both(
      3, [](const auto& a) { return ch::softmax(a, 1); }, x);
  check_narrow_both(
      6, [](const auto& a) { return ch::log_softmax(a, 0); }, x);
  check_narrow_both(
      6, [](const auto& a) { return ch::logsumexp(a, 1); }, x);
  check_narrow_both(
      3, [](const auto& a, const auto& w, const auto& b) { return ch::layer_norm(a, w, b); }, x, weight, bias);
  check_narrow_both(
      3, [](const auto& a, const auto& w, const auto& b) { return ch::group_norm(a, 5, w, b); }, x, weight, bias);
  check_narrow_both(
      3, [](const auto& a, const auto& w) { return ch::rms_norm(a, w); }, x, weight);
  const auto labels = ch::Tensor<std::int64_t, 1>::from({1, 49, 0, 7, 7, 3}, {6});
  check_narrow_both(
      3, [&](const auto& a) { return ch::cross_entropy(a, labels); }, x);
}

TEST_CASE("batch norm of bf16 has float statistics") {
  const auto x = ch::to<ch::bf16>(numbers<2>({30, 4}, 1));
  const auto weight = ch::Tensor<float, 1>::ones({4}), bias = ch::Tensor<float, 1>::zeros({4});
  const auto mean = ch::Tensor<float, 1>::zeros({4}), var = ch::Tensor<float, 1>::ones({4});
  const auto other_mean = ch::Tensor<float, 1>::zeros({4}), other_var = ch::Tensor<float, 1>::ones({4});
  const auto y = ch::batch_norm(x, weight, bias, mean, var, true);
  const auto expected = ch::batch_norm(ch::to<float>(x), weight, bias, other_mean, other_var, true);
  CHECK(y.to_vector() == ch::to<ch::bf16>(expected).to_vector());
  CHECK(mean.to_vector() == other_mean.to_vector());
  CHECK(var.to_vector() == other_var.to_vector());
}

TEST_CASE("rows of 2-byte numbers that are picked often add up in float") {
  const auto x = numbers<2>({3, 4}, 1);
  const auto index = ch::Tensor<std::int64_t, 1>::full({1000}, 1);
  check_narrow_both(
      4, [&](const auto& a) { return ch::index_select(a, 0, index); }, x);
}

}  // namespace narrow_reductions_test
