/// One training under three policies, and a row of a table for each run. `demo.sh` calls it.
///   demo [--policy single|dp|ddp] [--devices 2] [--epochs 5] [--trace run.json]
/// Each batch is cut into four shares on any number of devices, so that all runs have to end with the same bits.
#include <chorus/chorus.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/parallel/launch_any_of.hpp>
#include <chorus/same_bits.hpp>
#include <chorus/trace.hpp>
#include <chrono>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ch = chorus;

template <class Device>
struct ToyModel : ch::nn::Module {
  ch::nn::Conv2d<Device> conv1{3, 6, {.kernel = 5}}, conv2{6, 16, {.kernel = 5}};
  ch::nn::Linear<Device> fc1{400, 120}, fc2{120, 84}, fc3{84, 10};
  CHORUS_MODULE(ToyModel, conv1, conv2, fc1, fc2, fc3)

  auto forward(const auto& images) const {
    auto x = ch::max_pool2d(ch::relu(conv1(images)), 2);
    x = ch::max_pool2d(ch::relu(conv2(x)), 2);
    return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(x))))));
  }
};

// Four shares are whole runs of one size on 1, 2 and 4 devices; on 3 one has two of them, and the others wait for it.
using Model = ch::SameBits<ToyModel<ch::Cpu>, 4>;
using Images = ch::data::SyntheticImages;

template <class Net>
Net net_of(ch::Run& run) {
  // The model's gradients would fit one bucket, which leaves when backward has ended: smaller ones show the overlap.
  if constexpr (std::string_view(Net::name) == "ddp")
    return Net{ToyModel<ch::Cpu>{}, run, {.first_bucket_cap_mb = 0.05, .bucket_cap_mb = 0.05}};
  else
    return Net{ToyModel<ch::Cpu>{}, run};
}

/// The fraction of images that the net classifies correctly, over all ranks.
template <class Net>
double accuracy(Net& net, const Images& images_and_labels) {
  const ch::NoGrad no_grad;
  double right = 0;
  ch::data::DataLoader loader{images_and_labels, net.sampler(images_and_labels, {.shuffle = false}), {.batch = 256}};
  for (auto& [images, labels] : loader) {
    const auto answers = ch::argmax(net(images), 1);
    for (ch::Index i = 0; i < labels.numel(); ++i) right += answers(i) == labels(i) ? 1 : 0;
  }
  net.sum(std::span(&right, 1));
  return right / static_cast<double>(images_and_labels.size());
}

/// `measure(i)` of each device i, which counts bytes, in MiB: "2.1 / 1.5".
template <class Net, class Measure>
std::string per_device(Net& net, const Measure& measure) {
  std::vector<double> bytes(static_cast<std::size_t>(net.devices()));
  const auto take = [&](int i) { bytes[static_cast<std::size_t>(i)] = static_cast<double>(measure(i)); };
  if constexpr (Net::distributed)
    take(net.communicator().rank());  // each rank has one device
  else
    for (int i = 0; i < net.devices(); ++i) take(i);
  net.sum(bytes);
  std::string text;
  char number[32];
  for (const double one : bytes) {
    std::snprintf(number, sizeof number, "%s%.1f", text.empty() ? "" : " / ", one / (1 << 20));
    text += number;
  }
  return text;
}

template <class Net>
void train(ch::Run& run) {
  const Images train_set{run.option("train-images", ch::Index{8000}), 1},
      test_set{run.option("test-images", ch::Index{2000}), 1, ch::data::Split::test};
  Net net = net_of<Net>(run);
  ch::data::DataLoader loader{train_set, net.sampler(train_set), {.batch = 64, .workers = 1}};
  ch::optim::Sgd optimizer{net.parameters(), {.lr = 0.02, .momentum = 0.9}};
  const int epochs = run.option("epochs", 5);
  double loss_sum = 0, seconds = 0;
  for (int epoch : ch::progress(run, epochs)) {
    const auto start = std::chrono::steady_clock::now();
    loss_sum = 0;
    loader.set_epoch(epoch);
    for (auto& [images, labels] : loader) {
      optimizer.zero_grad();
      auto loss = ch::cross_entropy(net(images), labels);
      loss.backward();
      optimizer.step();
      loss_sum += double{loss.item()} * static_cast<double>(labels.numel());
    }
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  net.sum(std::span(&loss_sum, 1));
  const auto images = static_cast<double>(train_set.size());
  const std::string sent = per_device(net, [&](int i) { return ch::trace::bytes_sent(ch::trace_place(net, i)); }),
                    peak = per_device(net, [&](int i) { return ch::trace::memory(ch::trace_slot(net, i)).peak; }),
                    hash = ch::io::Sha256::available ? ch::io::parameters_sha256(net) : "?";
  const double right = accuracy(net, test_set);  // after the peak of training has been read
  if (run.is_main())
    std::printf("%-7s %7d %11.4f %12.2f %% %10.0f %22s %24s %13.12s\n", Net::name, net.devices(), loss_sum / images,
                100 * right, images * epochs / seconds, sent.c_str(), peak.c_str(), hash.c_str());
}

int main(int argc, char** argv) {
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, []<class Net>(ch::Run& run) { train<Net>(run); });
}
