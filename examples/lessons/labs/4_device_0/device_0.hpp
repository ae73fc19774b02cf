#pragma once
/// What lab 4 measures: memory of both devices by kind, with the loss outside of the model and inside.

#include "../lab.hpp"

namespace device_0_lab {

inline constexpr const char* title = "Lab 4: what device 0 holds under DataParallel";
constexpr ch::Index features = 256, classes = 8192, batch = 128;

/// Logits for a batch: [batch, classes], which are large beside everything else.
template <class D>
struct Logits : ch::nn::Module {
  ch::nn::Linear<D> fc{features, classes, {.bias = false}};
  CHORUS_MODULE(Logits, fc)
  auto forward(const auto& x) const { return fc(x); }
};

using ch::trace::Memory;
inline double held(int device, Memory kind) { return static_cast<double>(ch::trace::memory(device, kind)); }

/// The most activations that a device had while it listened, beside what it had before.
struct Peaks final : ch::trace::Listener {
  std::array<std::int64_t, 2> now_held{}, most{};
  std::mutex mutex;
  std::int64_t now() override { return 0; }
  void span(const ch::trace::Event&) override {}
  void instant(const ch::trace::Event&) override {}
  void sent(int, int, ch::trace::Traffic, std::size_t) override {}
  void allocated(int slot, Memory kind, std::int64_t bytes) override {
    if (kind != Memory::activations || slot > 1) return;
    const std::lock_guard lock(mutex);
    auto& held = now_held[static_cast<std::size_t>(slot)];
    held += bytes;
    most[static_cast<std::size_t>(slot)] = std::max(most[static_cast<std::size_t>(slot)], held);
  }
};

/// Trains two steps on two devices; `loss_of(net, inputs, labels)`. Then compares what devices hold with the
/// predictions that begin with `name`.
template <class Net, class Loss>
void train(lab::Lab& lab, const std::string& name, const Loss& loss_of) {
  Net net{typename Net::model_type{}, {.device_ids = {0, 1}}};
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.01, .momentum = 0.9}};
  const auto inputs = ch::Tensor<float, 2>::zeros({batch, features});
  const auto labels = ch::Tensor<std::int64_t, 1>::zeros({batch});
  static Peaks peaks;  // devices' threads may tell it late
  peaks.now_held = peaks.most = {};
  for (int step = 0; step < 2; ++step) {
    if (step == 1) ch::trace::listen(&peaks);
    optimizer.zero_grad();
    const auto loss = loss_of(net, inputs, labels);
    loss.backward();
    optimizer.step();
  }
  ch::trace::listen(nullptr);
  for (const int device : {0, 1}) {
    const auto key = [&](const char* kind) { return ch::cat(name, ", device ", device, ": ", kind); };
    lab.compare(key("parameters"), held(device, Memory::parameters), 0.05);
    lab.compare(key("gradients"), held(device, Memory::gradients), 0.05);
    lab.compare(key("optimizer"), held(device, Memory::optimizer), 0.05);
    lab.compare(key("activations, most"), static_cast<double>(peaks.most[static_cast<std::size_t>(device)]), 0.05);
  }
}

template <class Student>
void run(lab::Lab& lab) {
  train<ch::DataParallel<Logits<ch::Cpu>>>(lab, "loss outside", [](auto& net, const auto& x, const auto& y) {
    return ch::cross_entropy(net(x), y);
  });
  train<ch::DataParallel<typename Student::template WithLoss<ch::Cpu>>>(
      lab, "loss inside", [](auto& net, const auto& x, const auto& y) { return net.mean_loss(net(x, y)); });
}

}  // namespace device_0_lab
