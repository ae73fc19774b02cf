// Lab 4: a solution that replaces the student's `Mine`.

struct Solution {
  template <class D>
  struct WithLoss : ch::nn::Module {
    ch::nn::Linear<D> fc{device_0_lab::features, device_0_lab::classes, {.bias = false}};
    CHORUS_MODULE(WithLoss, fc)
    auto forward(const auto& inputs, const auto& labels) const { return ch::cross_entropy(fc(inputs), labels); }
  };
};
