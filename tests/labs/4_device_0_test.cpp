// Lab 4: its solution passes; wrong code is detected.
#define main main_of_4_device_0
#define Mine Mine_of_4
#include "../../examples/lessons/labs/4_device_0/device_0.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace device_0 {

#include "solutions/4_device_0.hpp"

/// Keeps three copies of the logits.
struct Wasteful {
  template <class D>
  struct WithLoss : ch::nn::Module {
    ch::nn::Linear<D> fc{device_0_lab::features, device_0_lab::classes, {.bias = false}};
    CHORUS_MODULE(WithLoss, fc)
    auto forward(const auto& inputs, const auto& labels) const {
      const auto logits = fc(inputs);
      return ch::cross_entropy(logits + ch::relu(ch::tanh(logits)) * 0.0f, labels);
    }
  };
};
/// The given program without its hole.
struct WithoutLabels {
  template <class D>
  struct WithLoss : ch::nn::Module {
    ch::nn::Linear<D> fc{device_0_lab::features, device_0_lab::classes, {.bias = false}};
    CHORUS_MODULE(WithLoss, fc)
    auto forward(const auto& inputs, const auto&) const { return ch::mean(fc(inputs)); }
  };
};
/// A sum of losses.
struct Sum {
  template <class D>
  struct WithLoss : ch::nn::Module {
    ch::nn::Linear<D> fc{device_0_lab::features, device_0_lab::classes, {.bias = false}};
    CHORUS_MODULE(WithLoss, fc)
    auto forward(const auto& inputs, const auto& labels) const {
      return ch::cross_entropy(fc(inputs), labels, {.mean_over = 1.0});
    }
  };
};

TEST_CASE("lab 4: the solution passes, and wrong ones do not") {
  const auto right = solved("4_device_0");
  check_empty("4_device_0", right);
  const auto passed = run(device_0_lab::run<Solution>, right);
  INFO(passed);
  CHECK(passes(passed));
  check_guesses(device_0_lab::run<Solution>, right,
                {{"loss outside, device 0: activations, most", 128 * 8192 * 4},
                 {"loss inside, device 1: optimizer", 8192 * 256 * 4}});
  check_hole(device_0_lab::run<Mine_of_4>, right, "WithLoss::forward");
  check_wrong(device_0_lab::run<Wasteful>, right, "WithLoss: device 0 holds only the activations that it needs: at most",
              2);
  check_wrong(device_0_lab::run<WithoutLabels>, right, "WithLoss, 1 sample: the loss: expected ", 4);
  check_wrong(device_0_lab::run<Sum>, right, "WithLoss, 6 samples: the loss: expected ", 1);
}

}  // namespace device_0
}  // namespace labs_test
