/// Measurements of lab 4: memory of both devices by kind, with the loss outside of the model and inside. SPOILERS: read
/// this when your lab is right.

#include <array>
#include <cmath>
#include <mutex>

#include "device_0.hpp"

namespace device_0_lab {
namespace {


constexpr ch::Index features = 256, classes = 8192, batch = 128;

/// Logits for a batch: [batch, classes], much larger than all other data.
template <class D>
struct Logits : ch::nn::Module {
  ch::nn::Linear<D> fc{features, classes, {.bias = false}};
  CHORUS_MODULE(Logits, fc)
  auto forward(const auto& x) const { return fc(x); }
};

/// A model that returns its loss, as the code computes it.
template <class D>
struct WithLoss : ch::nn::Module {
  ch::nn::Linear<D> fc{features, classes, {.bias = false}};
  const Code* code;  // outlives the model
  explicit WithLoss(const Code& its_code) : code(&its_code) {}
  CHORUS_MODULE(WithLoss, fc)
  auto forward(const auto& inputs, const auto& labels) const { return code->forward(fc, inputs, labels); }
};
const Code code_of_lab{[](const Layer& fc, const Inputs& inputs, const Labels& labels) {
  return ch::cross_entropy(fc(inputs), labels);
}};

using ch::trace::Memory;
double held(int device, Memory kind) { return static_cast<double>(ch::trace::memory(device, kind)); }

/// A device's peak of activations while listening, above its level before.
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

/// The memory of both devices, in bytes.
struct Holding {
  std::array<double, 2> parameters, gradients, optimizer, activations;
};
/// Trains two steps on two devices; the loss is `loss_of(net, inputs, labels)`.
template <class Model, class Loss>
Holding train(Model model, const Loss& loss_of) {
  ch::DataParallel<Model> net{std::move(model), {.device_ids = {0, 1}}};
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.01, .momentum = 0.9}};
  const auto inputs = ch::Tensor<float, 2>::zeros({batch, features});
  const auto labels = ch::Tensor<std::int64_t, 1>::zeros({batch});
  static Peaks peaks;  // static: devices' threads may still call it later
  peaks.now_held = peaks.most = {};
  for (int step = 0; step < 2; ++step) {
    if (step == 1) ch::trace::listen(&peaks);
    optimizer.zero_grad();
    const auto loss = loss_of(net, inputs, labels);
    loss.backward();
    optimizer.step();
  }
  ch::trace::listen(nullptr);
  const auto both = [](Memory kind) { return std::array{held(0, kind), held(1, kind)}; };
  return {both(Memory::parameters),
          both(Memory::gradients),
          both(Memory::optimizer),
          {static_cast<double>(peaks.most[0]), static_cast<double>(peaks.most[1])}};
}
/// The same with the loss inside of the model.
template <class Model>
Holding train_with_loss(Model model) {
  return train(std::move(model), [](auto& net, const auto& x, const auto& y) { return net.mean_loss(net(x, y)); });
}

void compare(lab::Lab& lab, const std::string& name, const Holding& holding, const char* activations_hint) {
  for (const std::size_t device : {0u, 1u}) {
    const auto bytes = [&](const char* kind, const std::array<double, 2>& of, const char* hint) {
      lab.compare(ch::cat(name, ", device ", device, ": ", kind), of[device], 0.05 * of[device], hint);
    };
    bytes("parameters", holding.parameters, "What does a device need for its forward pass?");
    bytes("gradients", holding.gradients, "What does its backward pass leave?");
    bytes("optimizer", holding.optimizer, "Who makes the step?");
    bytes("activations, most", holding.activations, activations_hint);
  }
}

/// Compares the loss of the student's model for `samples` samples, with inputs and labels of all kinds, with the right
/// one.
template <class Net>
void judge_loss(lab::Lab& lab, const Net& net, ch::Index samples) {
  auto x = ch::Tensor<float, 2>::empty({samples, features});
  auto y = ch::Tensor<std::int64_t, 1>::empty({samples});
  for (ch::Index i = 0; i < x.numel(); ++i) x.data()[i] = 3 * std::sin(static_cast<float>(i));
  for (ch::Index i = 0; i < samples; ++i) y(i) = (i + 1) * 997 % classes;
  const auto logits = net.fc(x);
  const double right = ch::cross_entropy(logits, y).item(), got = net(x, y).item();
  const auto is = [got](double value) { return std::abs(got - value) <= 1e-3 * std::abs(value); };
  const auto of_all = static_cast<double>(samples);
  const char* const why = is(right * of_all)           ? "That is the sum over its samples."
                          : is(right * of_all / batch) ? "That divides by the batch of all devices."
                          : is(ch::mean(logits).item()) ? "That is the mean of the logits: who reads the labels?"
                                                        : "It is the mean of the cross entropy of its logits by the labels.";
  lab.expect(ch::cat("forward, ", samples, samples == 1 ? " sample" : " samples", ": the loss"), right, got,
             1e-3 * right, why);
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  compare(
      lab, "loss outside",
      train(Logits<ch::Cpu>{}, [](auto& net, const auto& x, const auto& y) { return ch::cross_entropy(net(x), y); }),
      "Count the logits that it made, the logits that it received, and the gradients without own memory.");
  const auto inside = train_with_loss(WithLoss<ch::Cpu>(code_of_lab));
  compare(lab, "loss inside", inside, "Count the logits that it made. Is anything of their size sent?");

  Holding mine{};
  const bool ran = lab.run("forward", [&] {
    const WithLoss<ch::Cpu> net(code);
    for (const ch::Index samples : {1, 6}) judge_loss(lab, net, samples);
    mine = train_with_loss(WithLoss<ch::Cpu>(code));
  });
  if (!ran) return;
  for (const std::size_t device : {0u, 1u})
    lab.require(ch::cat("forward: device ", device, " holds only the activations that it needs"),
                mine.activations[device] <= 1.05 * inside.activations[device],
                ch::cat("at most it holds ", mine.activations[device],
                        " bytes. Which other values are as large as the logits?"));
}

}  // namespace device_0_lab
