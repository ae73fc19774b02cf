/// examples/quickstart.cpp as a user of libtorch writes it: the same network, loader, optimizer, loop and file.
/// libtorch has no DDP for C++, so this one runs on a single device, and it brings no reader of CIFAR-10, so one stands
/// here.
#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

struct Cifar10 : torch::data::datasets::Dataset<Cifar10> {
  static constexpr int64_t kPixels = 3 * 32 * 32;
  torch::Tensor records;  // [n, 1 + kPixels] bytes, the label first

  explicit Cifar10(const std::string& directory) {
    std::vector<torch::Tensor> batches;
    for (int i = 1; i <= 5; ++i) {
      const std::string path = directory + "/data_batch_" + std::to_string(i) + ".bin";
      std::ifstream file(path, std::ios::binary);
      batches.push_back(torch::empty({10000, 1 + kPixels}, torch::kUInt8));
      if (!file.read(reinterpret_cast<char*>(batches.back().data_ptr<uint8_t>()), batches.back().numel()))
        throw std::runtime_error("cannot read " + path);
    }
    records = torch::cat(batches);
  }
  torch::data::Example<> get(size_t index) override {
    auto record = records[static_cast<int64_t>(index)];
    return {record.slice(0, 1).view({3, 32, 32}).to(torch::kFloat32).div(255), record[0].to(torch::kInt64)};
  }
  torch::optional<size_t> size() const override { return records.size(0); }
};

struct ToyModelImpl : torch::nn::Module {
  torch::nn::Conv2d conv1{register_module("conv1", torch::nn::Conv2d(3, 6, 5))};
  torch::nn::Conv2d conv2{register_module("conv2", torch::nn::Conv2d(6, 16, 5))};
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(400, 120))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(120, 84))};
  torch::nn::Linear fc3{register_module("fc3", torch::nn::Linear(84, 10))};

  torch::Tensor forward(torch::Tensor images) {
    auto x = torch::max_pool2d(torch::relu(conv1(images)), 2);
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    return fc3(torch::relu(fc2(torch::relu(fc1(x.flatten(1))))));
  }
};
TORCH_MODULE(ToyModel);

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: libtorch_quickstart DIR [EPOCHS]\n"), 2;
  torch::manual_seed(1);
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      Cifar10(argv[1]).map(torch::data::transforms::Stack<>()), torch::data::DataLoaderOptions(64).workers(2));
  ToyModel model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  for (int epoch = 0, epochs = argc > 2 ? std::atoi(argv[2]) : 10; epoch < epochs; ++epoch) {
    float last = 0;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      auto loss = torch::nn::functional::cross_entropy(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      last = loss.item<float>();
    }
    std::printf("epoch %d loss %.4f\n", epoch, last);
    torch::save(model, "model.pt");
  }
}
