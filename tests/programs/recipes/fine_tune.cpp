/// Fine-tuning: --weights FILE has PyTorch's names and another number of classes (safetensors.torch.save_file(
/// model.state_dict(), FILE) in Python). The encoder keeps its weights, a new head learns; --save FILE is for both.

#include <chorus/chorus.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/nn/weights.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <chorus/parallel/scores.hpp>
#include <cstdio>

namespace ch = chorus;

namespace {

/// [samples, 2] -> logits: [samples, 3]. In PyTorch: encoder = Sequential(Linear(2, 16), Tanh()), head = Linear(16, 3).
template <class Device>
struct Classifier : ch::nn::Module {
  ch::nn::Sequential<ch::nn::Linear<Device>, ch::nn::Tanh> encoder{ch::nn::Linear<Device>{2, 16}, ch::nn::Tanh{}};
  ch::nn::Linear<Device> head{16, 3};
  CHORUS_MODULE(Classifier, encoder, head)
  auto forward(const auto& x) const { return head(encoder(x)); }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Classifier<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const auto points = ch::randn<float, 2>({96, 2});
    const auto along = ch::sum(points, 1);
    const ch::data::TensorDataset all{points, ch::to<std::int64_t>(along > -0.7) + ch::to<std::int64_t>(along > 0.7)};

    Model model;
    const auto report = ch::io::load(model, run.option("weights"), {.strict = false});
    if (run.is_main()) std::printf("left %s\n", ch::cat(report).c_str());
    ch::nn::freeze(model.encoder);  // before the policy has it
    Net net{std::move(model), run};

    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.1}};
    ch::data::DataLoader loader{all, net.sampler(all), {.batch = 24}};
    for (int epoch = 0; epoch < 8; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x, label] : loader) {
        optimizer.zero_grad();
        const auto cost = ch::cross_entropy(net(x), label);
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), label.numel());
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
    ch::io::save(net, run.option("save"));

    net.eval();
    const ch::NoGrad no_grad;
    ch::scores::ConfusionMatrix matrix{3};
    for (auto& [x, label] : loader) matrix.add(net(x).value(), label);
    matrix.sum(net);
    if (run.is_main()) std::printf("accuracy %.7f\n", matrix.accuracy());
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
