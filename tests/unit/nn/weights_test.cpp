#include <catch.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/weights.hpp>
#include <string>
#include <vector>

namespace weights_test {

namespace nn = chorus::nn;
using chorus::Cpu;
using chorus::ShapeError;
using chorus::UsageError;

struct Two : nn::Module {
  nn::Linear<Cpu> a, b;
  CHORUS_MODULE(Two, a, b)
  explicit Two(chorus::Index out = 2) : a{2, 3}, b{3, out} {}
};

template <class Kind, class Action>
std::string weights_message(Action action) {
  try {
    action();
  } catch (const Kind& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_CASE("weights are copied, followed and frozen") {
  Two source, target;
  nn::copy_into(source, target);
  CHECK(target.b.weight.value().to_vector() == source.b.weight.value().to_vector());
  CHECK(target.b.weight.value().data() != source.b.weight.value().data());
  source.b.bias.assign(chorus::Tensor<float, 1>::full({2}, 1));
  target.b.bias.assign(chorus::Tensor<float, 1>::full({2}, 5));
  nn::soft_update(target, source, 0.25);
  CHECK(target.b.bias.value().to_vector() == std::vector<float>{4, 4});
  CHECK(target.a.weight.value().to_vector()[0] == Approx(source.a.weight.value().to_vector()[0]));

  nn::freeze(target.a);
  CHECK_FALSE(target.a.weight.requires_grad());
  CHECK(target.b.weight.requires_grad());
  nn::freeze(target);
  nn::unfreeze(target.a);
  CHECK(target.a.bias.requires_grad());
  CHECK_FALSE(target.b.bias.requires_grad());

  Two other{4};
  const auto before = other.a.weight.value().to_vector();
  CHECK(weights_message<ShapeError>([&] { nn::copy_into(source, other); }) ==
        "copy_into: expected 'b.weight' [4, 3] F32, got 'b.weight' [2, 3] F32");
  CHECK(other.a.weight.value().to_vector() == before);
  CHECK(weights_message<ShapeError>([&] { nn::soft_update(source, source.a, 1); })
            .starts_with("soft_update: expected 'a.weight' [3, 2] F32, got 'weight' [3, 2] F32"));
  CHECK(weights_message<UsageError>([&] { nn::soft_update(target, source, 1.5); }) ==
        "soft_update: expected tau in [0, 1], got 1.5");
}

}  // namespace weights_test
