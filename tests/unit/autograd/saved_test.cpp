// Backward needs saved values unchanged: each operator that saves values of a parameter or buffer reports a later
// write; operators that don't need the values accept it.
#include <chorus/autograd/custom_function.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/batch_norm.hpp>
#include <chorus/ops/convolution.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/cumulative.hpp>
#include <chorus/ops/embedding.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/normalization.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/ops/transposed_convolution.hpp>

#include <catch.hpp>
#include <initializer_list>

#include "../message_of.hpp"

namespace saved_test {

using namespace chorus;
using chorus::Tensor, chorus::Variable;  // other test files have their own
using Catch::Matchers::Contains;

template <int Rank>
Tensor<double, Rank> numbers(const Shape<Rank>& shape) {
  auto out = Tensor<double, Rank>::empty(shape);
  for (Index i = 0; i < out.numel(); ++i) out.data()[i] = 0.1 * static_cast<double>(i + 1);
  return out;
}
template <int Rank>
struct Written {
  Parameter<double, Rank> p;
  explicit Written(const Shape<Rank>& shape) : p(numbers<Rank>(shape)) {
    p.template on<Cpu>().set_name("the.parameter");
  }
};

/// Backward's error after the parameter was written; empty if it succeeds.
template <int Rank, class Function>
std::string after_write(const Shape<Rank>& shape, const Function& f) {
  const Written<Rank> written(shape);
  const auto y = sum(f(written.p));
  written.p.assign(numbers<Rank>(shape));
  try {
    y.backward();
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}
std::string refusal(const char* operation) { return cat("backward of '", operation, "': it needs 'the.parameter'"); }

TEST_CASE("saved: an operator that needs the old numbers of a parameter names it") {
  const Variable<double, 2> x(numbers<2>({3, 2}), true);
  const Variable<double, 4> image(numbers<4>({1, 2, 4, 4}), true);
  const Tensor<double, 1> none;
  CHECK_THAT(after_write<2>({4, 2}, [&](const auto& p) { return linear(x, p); }), Contains(refusal("linear")));
  CHECK_THAT(after_write<2>({2, 4}, [&](const auto& p) { return matmul(x, p); }), Contains(refusal("matmul")));
  CHECK_THAT(after_write<4>({3, 2, 2, 2}, [&](const auto& p) { return conv2d(image, p, none); }),
             Contains(refusal("conv2d")));
  CHECK_THAT(after_write<4>({2, 3, 2, 2}, [&](const auto& p) { return conv_transpose2d(image, p); }),
             Contains(refusal("conv_transpose2d")));
  CHECK_THAT(after_write<1>({2}, [&](const auto& p) { return layer_norm(x, p, none); }),
             Contains(refusal("layer_norm")));
  CHECK_THAT(after_write<1>({2}, [&](const auto& p) { return batch_norm(image, p, none, none, none, true); }),
             Contains(refusal("batch_norm")));
  CHECK_THAT(after_write<2>({3, 2}, [&](const auto& p) { return x * p; }), Contains(refusal("mul")));
  CHECK_THAT(after_write<2>({3, 2}, [&](const auto& p) { return x / p; }), Contains(refusal("div")));
  CHECK_THAT(after_write<1>({3}, [](const auto& p) { return exp(p); }), Contains(refusal("exp")));
  CHECK_THAT(after_write<2>({3, 2}, [](const auto& p) { return amax(p, 1); }), Contains(refusal("amax")));
  CHECK_THAT(after_write<1>({3}, [](const auto& p) { return cumprod(p, 0); }), Contains(refusal("cumprod")));
  CHECK_THAT(after_write<2>({3, 2}, [](const auto& p) { return logsumexp(p, 1); }), Contains(refusal("logsumexp")));
  CHECK_THAT(after_write<2>({3, 2}, [](const auto& p) {
               return cross_entropy(p, Tensor<std::int64_t, 1>::from({0, 1, 0}, {3}));
             }),
             Contains(refusal("cross_entropy")));
  CHECK_THAT(after_write<3>({1, 3, 2}, [](const auto& p) { return scaled_dot_product_attention(p, p, p); }),
             Contains(refusal("scaled_dot_product_attention")));
  const auto own = [](const auto& p) {
    return custom_function(
        "doubled", [](const auto& in) { return in * 2; },
        [](const auto& dy, const auto&, const auto&) { return dy * 2; }, p);
  };
  CHECK_THAT(after_write<1>({3}, own), Contains(refusal("doubled")));
}

TEST_CASE("saved: the message has both versions, and says what to do") {
  const Variable<double, 2> x(numbers<2>({3, 2}), true);
  CHECK(after_write<2>({4, 2}, [&](const auto& p) { return linear(x, p); }) ==
        "backward of 'linear': it needs 'the.parameter' of shape [4, 2] as it was in the forward pass, at version 1, "
        "but it has been written since, and is at version 2: call backward before an optimizer steps or numbers are "
        "assigned, or run the forward pass again");
}

TEST_CASE("saved: what needs no old numbers does not mind") {
  const Variable<double, 2> x(numbers<2>({3, 2}), true);
  const auto constant = numbers<2>({3, 2});
  const Tensor<double, 1> none;
  // A first layer: its input needs no gradient.
  CHECK(after_write<2>({4, 2}, [&](const auto& p) { return linear(constant, p); }).empty());
  CHECK(after_write<2>({2, 4}, [&](const auto& p) { return matmul(constant, p); }).empty());
  CHECK(after_write<4>({3, 2, 2, 2}, [&](const auto& p) { return conv2d(numbers<4>({1, 2, 4, 4}), p, none); }).empty());
  CHECK(after_write<2>({3, 2}, [&](const auto& p) { return constant * p; }).empty());
  CHECK(after_write<2>({3, 2}, [&](const auto& p) { return x + p; }).empty());
  CHECK(after_write<2>({3, 2}, [&](const auto& p) { return x - p * 2; }).empty());
  CHECK(after_write<1>({2}, [&](const auto& p) { return linear(x, numbers<2>({2, 2}), p); }).empty());
  CHECK(after_write<2>({5, 2}, [](const auto& p) {
          return embedding(p, Tensor<std::int64_t, 1>::from({1, 4}, {2}));
        }).empty());
  CHECK(after_write<2>({3, 2}, [](const auto& p) { return softmax(p, 1); }).empty());
  CHECK(after_write<2>({3, 2}, [](const auto& p) { return mean(reshape(p, Shape<1>{6})); }).empty());
}

TEST_CASE("saved: a frozen parameter and a buffer are looked at, too") {
  const Variable<double, 2> x(numbers<2>({3, 2}), true);
  const Written<2> frozen({4, 2});
  frozen.p.set_requires_grad(false);
  auto y = sum(linear(x, frozen.p));
  frozen.p.assign(numbers<2>({4, 2}));
  CHECK_THAT(message_of<UsageError>([&] { y.backward(); }), Contains(refusal("linear")));

  const Buffer<double, 2> table(numbers<2>({3, 2}));
  y = sum(x * table.value());
  table.value().data()[0] = 7;  // through a pointer
  CHECK_THAT(message_of<UsageError>([&] { y.backward(); }), Contains("'mul': it needs a parameter or buffer"));
  y = sum(x * table.value());
  table.assign(numbers<2>({3, 2}));
  CHECK_THAT(message_of<UsageError>([&] { y.backward(); }), Contains("'mul': it needs a parameter or buffer"));
}

TEST_CASE("saved: running statistics that move on leave the gradient of an earlier evaluation as it was") {
  const Tensor<double, 1> weight = numbers<1>({2});
  const auto gradient = [&](bool moves) {
    const Buffer<double, 1> mean(numbers<1>({2})), var(numbers<1>({2}));
    const Variable<double, 2> x(numbers<2>({3, 2}), true);
    const auto y = sum(square(batch_norm(x, weight, weight, value_of(mean), value_of(var), false)));
    if (moves) batch_norm(x.value(), weight, weight, value_of(mean), value_of(var), true);
    y.backward();
    return x.grad().to_vector();
  };
  CHECK(gradient(true) == gradient(false));
}

TEST_CASE("saved: gradients of gradients look at what they read, too") {
  const GraphVariable<double, 2> x(numbers<2>({3, 2}), true);
  const Written<2> weight({1, 2});
  const auto dx = grad(sum(square(linear(x, weight.p))), x, {.create_graph = true});
  const auto penalty = sum(square(dx));
  weight.p.assign(numbers<2>({1, 2}));
  CHECK_THAT(message_of<UsageError>([&] { penalty.backward(); }), Contains("it needs 'the.parameter'"));
  CHECK_THAT(message_of<UsageError>([&] {
               const auto y = sum(square(linear(x, weight.p)));
               weight.p.assign(numbers<2>({1, 2}));
               grad(y, x, {.create_graph = true});
             }),
             Contains(refusal("linear")));
}

}  // namespace saved_test
