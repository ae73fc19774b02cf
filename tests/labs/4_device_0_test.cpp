// Lab 4: its solution passes; what is wrong is noticed.
#define main main_of_4_device_0
#define Mine Mine_of_4
#include "../../examples/lessons/labs/4_device_0/device_0.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace device_0 {

struct Solution {
  template <class D>
  struct WithLoss : ch::nn::Module {
    ch::nn::Linear<D> fc{device_0_lab::features, device_0_lab::classes, {.bias = false}};
    CHORUS_MODULE(WithLoss, fc)
    auto forward(const auto& inputs, const auto& labels) const { return ch::cross_entropy(fc(inputs), labels); }
  };
};
/// Keeps the logits three times.
struct Wasteful {
  template <class D>
  struct WithLoss : ch::nn::Module {
    ch::nn::Linear<D> fc{device_0_lab::features, device_0_lab::classes, {.bias = false}};
    CHORUS_MODULE(WithLoss, fc)
    auto forward(const auto& inputs, const auto& labels) const {
      return ch::cross_entropy(ch::tanh(ch::tanh(fc(inputs))), labels);
    }
  };
};

TEST_CASE("lab 4: the solution passes, and wrong ones do not") {
  constexpr double k = 8192 * 256 * 4, logits = 128 * 8192 * 4;
  json solved;
  for (const char* name : {"loss outside, device ", "loss inside, device "})
    for (const int device : {0, 1}) {
      const auto key = [&](const char* kind) { return ch::cat(name, device, ": ", kind); };
      solved[key("parameters")] = k;
      solved[key("gradients")] = k;
      solved[key("optimizer")] = device == 0 ? k : 0;
      solved[key("activations, most")] = 0.5 * logits;  // its half of them, which becomes their gradient
    }
  solved["loss outside, device 0: activations, most"] = 1.5 * logits;  // and all of them, the same way
  solved["loss outside, device 1: activations, most"] = logits;        // and the gradient that device 0 sends
  check_empty("4_device_0", solved);
  const auto right = run(device_0_lab::run<Solution>, solved);
  INFO(right);
  CHECK(passes(right));
  auto guess = solved;
  guess["loss outside, device 0: activations, most"] = logits;
  guess["loss inside, device 1: optimizer"] = k;
  const auto guessed = run(device_0_lab::run<Solution>, guess);
  CHECK(is_wrong(guessed, "loss outside, device 0: activations, most"));
  CHECK(is_wrong(guessed, "loss inside, device 1: optimizer"));
  CHECK(is_wrong(run(device_0_lab::run<Wasteful>, solved), "loss inside, device 0: activations, most"));
  CHECK(run(device_0_lab::run<Mine_of_4>, solved).find("there is a hole: write WithLoss::forward") != std::string::npos);
}

}  // namespace device_0
}  // namespace labs_test
