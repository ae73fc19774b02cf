// What a loss on a GPU says that it is a mean over, and the scale that a policy sets on it.
#include <chorus/ops/class_losses.hpp>

#include "compare.hpp"

namespace mean_over_cuda_test {

namespace ch = chorus;
using ch::Cuda;

ch::Variable<float, 2, Cuda> scores() {
  return ch::Variable<float, 2, Cuda>(
      ch::Tensor<float, 2, Cuda>::from({0.1f, 0.7f, -0.3f, 0.5f, 0.2f, 0.4f, -0.6f, 0.3f}, {4, 2}), true);
}

TEST_CASE("a loss on a GPU says over how many labels it is a mean, wherever they lie") {
  if (!gpu_present()) return;
  const auto labels = ch::Tensor<std::int64_t, 1>::from({1, -100, 0, 1}, {4});
  const auto near = ch::to_device(labels, Cuda{});
  for (const auto& loss : {ch::cross_entropy(scores(), labels), ch::cross_entropy(scores(), near),
                           ch::nll_loss(scores(), labels), ch::nll_loss(scores(), near)}) {
    CHECK(loss.node()->is_loss());
    CHECK(loss.node()->mean_over() == 3);
  }
  const auto weight = ch::Tensor<float, 1, Cuda>::from({0.5f, 4}, {2});
  const auto loss = ch::cross_entropy(scores(), near, weight);
  loss.backward();
  CHECK(loss.node()->mean_over() == 8.5);  // backward may have run
  const auto ignored = ch::to_device(ch::Tensor<std::int64_t, 1>::full({4}, -100), Cuda{});
  const auto none = ch::cross_entropy(scores(), ignored, weight);
  CHECK(none.node()->is_loss());
  CHECK(none.node()->mean_over() == 0);
}

TEST_CASE("a scale multiplies the gradient of a loss on a GPU") {
  if (!gpu_present()) return;
  const auto labels = ch::Tensor<std::int64_t, 1>::from({1, -100, 0, 1}, {4});
  const auto gradient = [&](double scale) {
    const auto x = scores();
    const auto loss = ch::cross_entropy(x, labels);
    loss.node()->set_scale(scale);
    loss.backward();
    CHECK(loss.node()->scale() == 1);
    return x.grad().to_vector();
  };
  const auto plain = gradient(1), scaled = gradient(0.25);
  for (std::size_t i = 0; i < plain.size(); ++i) CHECK(scaled[i] == Approx(0.25f * plain[i]));
}

}  // namespace mean_over_cuda_test
