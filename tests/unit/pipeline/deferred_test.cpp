// Gradients by weights that are deferred until they are requested.
#include <catch.hpp>
#include <chorus/autograd/deferred_gradients.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/embedding.hpp>
#include <unit/parallel/policies.hpp>

namespace pipeline_deferred_test {

using namespace test::names;

/// The gradient that `loss()`'s backward leaves in `weight` at once, and later.
template <class Weight, class Loss>
void check_put_off(const Weight& weight, const Loss& loss) {
  loss().backward();
  const auto expected = weight.grad().to_vector();
  weight.zero_grad();
  const std::unordered_set<const Node*> weights{node_of(weight).get()};
  detail::DeferredGradients gradients{&weights, {}};
  {
    const detail::DeferralScope put_off(&gradients);
    loss().backward();
  }
  CHECK_FALSE(weight.grad().defined());
  CHECK(gradients.later.size() == 1);
  gradients.run();
  CHECK(weight.grad().to_vector() == expected);
  CHECK(gradients.later.empty());
  loss().backward();  // outside of the scope: at once
  CHECK(weight.grad().to_vector() != expected);
}

TEST_CASE("deferred gradients: by the weights of linear, conv2d and embedding") {
  const nn::Linear<Cpu, double> linear{5, 3};
  check_put_off(linear.weight, [&] { return mean(square(linear(numbers(4, 5, 1)))); });
  const nn::Conv2d<Cpu, double> conv{1, 2, {.kernel = 3}};
  const auto image = reshape(numbers(4, 25, 1), Shape<4>{4, 1, 5, 5});
  check_put_off(conv.weight, [&] { return mean(square(conv(image))); });
  const nn::Embedding<Cpu, double> embedding{7, 3};
  check_put_off(embedding.weight, [&] { return mean(square(embedding(labels(6, 7, 1)))); });
}

TEST_CASE("deferred gradients: what is no weight comes at once") {
  const Variable<double, 2> x(numbers(6, 3, 1), true), weight(numbers(2, 3, 2), true);
  const std::unordered_set<const Node*> weights{weight.node().get()};
  detail::DeferredGradients gradients{&weights, {}};
  const detail::DeferralScope put_off(&gradients);
  mean(square(index_select(x, 0, labels(4, 6, 1)))).backward();
  CHECK(x.grad().defined());
  mean(square(linear(x.value(), weight * 2.0))).backward();
  CHECK(weight.grad().defined());
  CHECK(gradients.later.empty());
}

}  // namespace pipeline_deferred_test
