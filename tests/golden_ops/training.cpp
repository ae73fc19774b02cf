// Whole training runs of two small models.
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/activations.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/pooling.hpp>
#include <chorus/ops/resize.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/optim/adam.hpp>
#include <chorus/optim/sgd.hpp>
#include <cstring>
#include <memory>

#include "case.hpp"

namespace golden {
namespace {

namespace nn = ch::nn;
namespace optim = ch::optim;

struct Toy : nn::Module {
  nn::Conv2d<Device> conv1{3, 6, {.kernel = 5}}, conv2{6, 16, {.kernel = 5}};
  nn::Linear<Device> fc1{400, 120}, fc2{120, 84}, fc3{84, 10};
  CHORUS_MODULE(Toy, conv1, conv2, fc1, fc2, fc3)

  auto forward(const auto& images) const {
    auto x = ch::max_pool2d(ch::relu(conv1(images)), 2);
    x = ch::max_pool2d(ch::relu(conv2(x)), 2);
    return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(x))))));
  }
};

/// One residual block.
struct BnNet : nn::Module {
  nn::Conv2d<Device> conv1{1, 8, {.kernel = 3, .padding = 1, .bias = false}},
      conv2{8, 8, {.kernel = 3, .padding = 1, .bias = false}};
  nn::BatchNorm2d<Device> bn1{8}, bn2{8};
  nn::Linear<Device> fc{8, 10};
  CHORUS_MODULE(BnNet, conv1, bn1, conv2, bn2, fc)

  auto forward(const auto& images) const {
    const auto x = ch::relu(bn1(conv1(images)));
    return fc(ch::global_avg_pool(ch::relu(bn2(conv2(x)) + x)));
  }
};

std::unique_ptr<optim::Optimizer<Device>> make_optimizer(const Case& test, nn::Module& model) {
  const auto name = test.attr<std::string>("optimizer");
  const double lr = test.attr<double>("lr");
  auto parameters = nn::named_parameters<Device>(model);
  if (name == "sgd")
    return std::make_unique<optim::Sgd<Device>>(std::move(parameters),
                                                optim::SgdOptions{.lr = lr, .momentum = test.attr("momentum", 0.0)});
  ch::check<ch::UsageError>(name == "adam", "unknown optimizer ", name);
  return std::make_unique<optim::Adam<Device>>(std::move(parameters), optim::AdamOptions{.lr = lr});
}

// Calls `f(name, data, dtype)` for each parameter and buffer.
template <class F>
void for_each_state(nn::Module& model, const F& f) {
  for (const auto& named : nn::named_parameters<Device>(model))
    f(named.name, named.parameter->value_data(), named.parameter->dtype(), named.parameter->count());
  for (const auto& named : nn::named_buffers<Device>(model))
    f(named.name, named.buffer->data(), named.buffer->dtype(), named.buffer->count());
}

template <class Model>
void train(Case& test) {
  Model model;
  for_each_state(model, [&](const std::string& name, void* data, ch::DType type, Index count) {
    const auto& init = test.file("init." + name);
    std::visit(
        [&](const auto& values) {
          const auto bytes = values.size() * sizeof(values[0]);
          ch::check<ch::ShapeError>(bytes == static_cast<std::size_t>(count) * ch::size_of(type), "init.", name,
                                    " has ", values.size(), " elements, the model's ", count);
          ch::copy_bytes(Device{}, data, ch::Cpu{}, values.data(), bytes);
        },
        init.values);
  });
  const auto optimizer = make_optimizer(test, model);

  const auto& images = test.file("batch.images");
  const auto& labels = test.file("batch.labels");
  const auto shape = as_shape<5>("batch.images", images.shape);
  const auto all_images = Tensor<5>::from(std::span<const float>(images.f32()), shape);
  const auto all_labels =
      ch::Tensor<std::int64_t, 2, Device>::from(std::span<const std::int64_t>(labels.i64()), {shape[0], shape[1]});
  std::vector<float> losses;
  for (Index step = 0; step < shape[0]; ++step) {
    optimizer->zero_grad();
    const auto loss = ch::cross_entropy(model(all_images[step]), all_labels[step]);
    loss.backward();
    optimizer->step();
    losses.push_back(loss.item());
  }
  test.compare_numbers("out.loss", losses);
  for_each_state(model, [&](const std::string& name, void* data, ch::DType type, Index count) {
    const auto size = static_cast<std::size_t>(count);
    const auto on_host = [&]<class T>(std::vector<T> numbers) {
      ch::copy_bytes(ch::Cpu{}, numbers.data(), Device{}, data, size * sizeof(T));
      return numbers;
    };
    if (type == ch::DType::f32)
      test.compare_numbers("final." + name, on_host(std::vector<float>(size)));
    else
      test.compare_integers("final." + name, on_host(std::vector<std::int64_t>(size)));
  });
}

}  // namespace

void add_training(Operations& operations) {
  operations["train.Toy"] = train<Toy>;
  operations["train.BnNet"] = train<BnNet>;
}

}  // namespace golden
