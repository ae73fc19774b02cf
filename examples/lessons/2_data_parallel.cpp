/// Lesson 2: several devices of one process (DataParallel). The batch is cut into shares (scatter); each device gets
/// the newest parameters (replicate) and computes on its share (parallel apply); the outputs are joined on device 0
/// (gather), which computes the loss. Backward takes the same way back. Device 0, which alone has an optimizer, adds up
/// the gradients (reduce). The loss is the whole batch's, so no share needs a weight. The price: in each step device 0
/// sends all parameters to all other devices, and holds all outputs.

#include <thread>

#include "toy.hpp"

using Policy = ch::DataParallel<Model>;

/// Calls `work(i)` for each device, each in its own thread.
void on_all(std::size_t devices, const auto& work) {
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < devices; ++i) threads.emplace_back([&work, i] { work(i); });
}

/// Share i of n of a batch. If the batch can't be divided evenly, the first shares have one more sample.
auto share(const auto& x, std::size_t i, std::size_t n) {
  const auto at = static_cast<ch::Index>(i), all = static_cast<ch::Index>(n), size = x.size(0) / all;
  const ch::Index begin = at * size + std::min(at, x.size(0) % all);
  return x.slice(0, begin, begin + size + (at < x.size(0) % all ? 1 : 0));
}

/// `x` on device `i`. Counts the bytes that are sent from one device to another.
auto send(const auto& x, std::size_t i, Traffic traffic) {
  const ch::Cpu device{static_cast<int>(i)};
  if (x.device() != device) ch::trace::sent(x.device().index, device.index, traffic, x.bytes());
  return ch::to_device(x, device);
}

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    Data data{run.seed()};
    std::vector<Model> models(1);
    for (int i = 1; i < run.devices(); ++i) models.push_back(ch::nn::copy_of(models[0], ch::Cpu{i}));
    Policy net{ch::nn::copy_of(models[0]), run};  // for the comparison at the end

    std::vector<std::vector<Parameter>> parameters;
    for (auto& model : models) parameters.push_back(ch::nn::named_parameters<ch::Cpu>(model));
    const std::size_t n = models.size(), tensors = parameters[0].size();
    ch::optim::Sgd optimizer{parameters[0], sgd};
    ch::trace::reset_traffic();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        std::vector<ch::Variable<float, 2>> outputs(n);
        on_all(n, [&, &x = images](std::size_t i) {
          const auto own = send(share(x, i, n), i, Traffic::inputs);  // 1. scatter
          for (std::size_t p = 0; i > 0 && p < tensors; ++p) {        // 2. replicate
            std::ranges::copy(numbers(parameters[0][p]), numbers(parameters[i][p]).begin());
            ch::trace::sent(0, static_cast<int>(i), Traffic::parameters, numbers(parameters[0][p]).size_bytes());
            parameters[i][p].parameter->set_grad_arrived(false);
          }
          outputs[i] = models[i](own);  // 3. apply
        });
        std::vector<ch::Tensor<float, 2>> parts;  // 4. gather
        for (const auto& output : outputs) parts.push_back(send(output.value(), 0, Traffic::outputs));
        const ch::Variable whole(ch::concat(0, std::span<const ch::Tensor<float, 2>>(parts)), /*requires_grad=*/true);
        const auto loss = ch::cross_entropy(whole, labels);
        optimizer.zero_grad();
        loss.backward();  // 5. on all devices
        on_all(n, [&](std::size_t i) { outputs[i].backward(send(share(whole.grad(), i, n), i, Traffic::outputs)); });
        for (std::size_t i = 1; i < n; ++i)  // 6. reduce
          for (std::size_t p = 0; p < tensors; ++p) {
            parameters[0][p].parameter->add_grad_of(*parameters[i][p].parameter);
            ch::trace::sent(static_cast<int>(i), 0, Traffic::gradients, gradient(parameters[i][p]).size_bytes());
          }
        optimizer.step();
        mean.add(loss.item(), static_cast<double>(labels.numel()));
      }
      mean.print(epoch);
    }
    for (int i = 0; i < run.devices(); ++i) print_sent("device", i, data);

    ch::optim::Sgd policy_optimizer{net.parameters(), sgd};
    return compare(run, data, models[0], net, policy_optimizer, /*allowed=*/0);
  });
}
