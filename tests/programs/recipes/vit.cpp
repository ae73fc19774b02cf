/// A vision transformer (Dosovitskiy et al. 2021) with MixUp, smoothed labels, and a warm-up before a cosine.

#include <chorus/chorus.hpp>
#include <chorus/data/image_folder.hpp>
#include <chorus/nn/transformer.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/rearranging.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>

namespace ch = chorus;

namespace {

/// images: [samples, 1, 8, 8] -> logits: [samples, 10]
template <class Device>
struct VisionTransformer : ch::nn::Module {
  ch::nn::Conv2d<Device> patches{1, 16, {.kernel = 4, .stride = 4}};
  ch::Parameter<float, 3, Device> cls_token{ch::nn::init::normal<float, Device, 3>({1, 1, 16}, 0, 0.02)};
  ch::Parameter<float, 3, Device> positions{ch::nn::init::normal<float, Device, 3>({1, 5, 16}, 0, 0.02)};
  ch::nn::TransformerEncoderLayer<Device> block{16, {.heads = 2, .feed_forward = 32, .dropout = 0, .norm_first = true}};
  ch::nn::LayerNorm<Device> norm{16};
  ch::nn::Linear<Device> head{16, 10};
  CHORUS_MODULE(VisionTransformer, patches, cls_token, positions, block, norm, head)

  auto forward(const auto& images) const {
    const auto tokens = ch::transpose(ch::flatten<2>(patches(images)), 1, 2);  // [samples, patches, 16]
    const auto cls = ch::expand(cls_token, ch::Shape<3>{tokens.size(0), 1, 16});
    const auto y = block(ch::concat(1, cls, tokens) + positions);
    return head(norm(ch::squeeze(ch::slice(y, 1, 0, 1), 1)));
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = VisionTransformer<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    const ch::data::SyntheticImages images{320, 1, ch::data::Split::train, {1, 8, 8}};
    const ch::data::MixUp mixed{images, 10, {.alpha = 0.2F, .transforms = {images.normalization()}}};
    Net net{Model{}, run};
    ch::data::DataLoader loader{mixed, net.sampler(mixed), {.batch = 32}};
    ch::optim::AdamW optimizer{net.parameters(), {.lr = 0.005, .weight_decay = 0.05}};
    optimizer.no_decay_on_biases_and_norms();
    const int epochs = 24, steps = epochs * static_cast<int>(loader.size());
    ch::optim::Schedule schedule{optimizer, ch::optim::Warmup{{.t_max = steps - 5}, 5, 0.1}};
    for (int epoch = 0; epoch < epochs; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x, shares] : loader) {
        optimizer.zero_grad();
        const auto cost = ch::cross_entropy(net(x), 0.9 * shares + 0.01);
        cost.backward();
        net.clip_grad_norm(1);
        optimizer.step();
        schedule.step();
        const double loss = net.mean(static_cast<double>(cost.item()), x.size(0));
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
