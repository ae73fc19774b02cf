/// A training that goes on when ranks are killed, and ends with the bits that one device gets. `survive.sh` calls it.
///   survive [--devices 4] [--epochs 4] [--images 2000] [--save model.safetensors] [--log events.txt]
/// The log has a line for each step of each rank: seconds of the machine's clock, process, rank, ranks, epoch, step.
#include <chorus/chorus.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/parallel/elastic.hpp>
#include <chorus/same_bits.hpp>
#include <unistd.h>

namespace ch = chorus;

struct ToyModel : ch::nn::Module {
  ch::nn::Conv2d<ch::Cpu> conv1{3, 6, {.kernel = 5}}, conv2{6, 16, {.kernel = 5}};
  ch::nn::Linear<ch::Cpu> fc1{400, 120}, fc2{120, 84}, fc3{84, 10};
  CHORUS_MODULE(ToyModel, conv1, conv2, fc1, fc2, fc3)

  auto forward(const auto& images) const {
    auto x = ch::max_pool2d(ch::relu(conv1(images)), 2);
    x = ch::max_pool2d(ch::relu(conv2(x)), 2);
    return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(x))))));
  }
};

using Net = ch::Elastic<ch::DistributedDataParallel<ch::SameBits<ToyModel, 8>>>;

int main(int argc, char** argv) {
  return ch::launch<Net>(argc, argv, [](ch::Run& run) {
    const ch::data::SyntheticImages train{run.option("images", ch::Index{2000}), run.seed()};
    const std::string file = run.option("save", ""), log = run.option("log", "");
    const int epochs = run.option("epochs", 4);
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> events(log.empty() ? nullptr : std::fopen(log.c_str(), "a"),
                                                                 [](std::FILE* f) { return f ? std::fclose(f) : 0; });
    Net net{ToyModel{}, run};
    ch::data::DataLoader loader{train, net.sampler(train), {.batch = 64, .workers = 0}};
    ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.01, .momentum = 0.9}};
    net.keep(optimizer);

    for (int epoch = 0; epoch < epochs; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [images, labels] : loader) {
        optimizer.zero_grad();
        const auto loss = ch::cross_entropy(net(images), labels);
        loss.backward();
        optimizer.step();
        if (!events || net.is_void()) continue;
        const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
        std::fprintf(events.get(), "%.6f %d %d %d %lld %lld\n", now.count(), getpid(), run.rank(), run.world_size(),
                     static_cast<long long>(net.epoch()), static_cast<long long>(net.steps()));
        std::fflush(events.get());
      }
      if (!file.empty()) ch::io::save_checkpoint(net, optimizer, {.epoch = epoch + 1, .step = net.steps()}, file);
    }
    if (run.is_main())
      std::printf("steps %lld\nparameters_sha256 %s\n", static_cast<long long>(net.steps()),
                  ch::io::parameters_sha256(net).c_str());
  });
}
