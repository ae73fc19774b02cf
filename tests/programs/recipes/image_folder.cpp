/// Images as people have them: --data FOLDER has folders train and val, each with a folder of PNG or JPEG files for
/// each class. Random parts, colours and mixtures for training; the middle of each picture for the score.

#include <chorus/chorus.hpp>
#include <chorus/data/image_folder.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <chorus/parallel/scores.hpp>
#include <cstdio>

namespace ch = chorus;

namespace {

/// [samples, 3, 16, 16] -> logits: [samples, classes]
template <class Device>
struct PictureCnn : ch::nn::Module {
  explicit PictureCnn(ch::Index classes) : head{256, classes} {}
  ch::nn::Conv2d<Device> conv1{3, 8, {.kernel = 3, .padding = 1}}, conv2{8, 16, {.kernel = 3, .padding = 1}};
  ch::nn::Linear<Device> head;
  CHORUS_MODULE(PictureCnn, conv1, conv2, head)
  auto forward(const auto& images) const {
    const auto x = ch::max_pool2d(ch::relu(conv1(images)), 2);
    return head(ch::flatten(ch::max_pool2d(ch::relu(conv2(x)), 2)));
  }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = PictureCnn<ch::Cpu>;
  const auto train = []<class Net>(ch::Run& run) {
    namespace data = ch::data;
    const data::Normalize normalize{{0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}};
    const data::ImageFolder images(
        run.option("data") + "/train",
        {.frame = data::RandomResizedCrop{16, 0.5f},
         .transforms = {data::RandomHorizontalFlip{}, data::ColorJitter{0.2f, 0.2f, 0.2f, 0.05f}, normalize}});
    const auto classes = static_cast<ch::Index>(images.classes().size());
    const data::MixUp mixed{images, classes, {.alpha = 0.2f}};

    Net net{Model{classes}, run};
    ch::optim::Adam optimizer{net.parameters(), {.lr = 0.01}};
    data::DataLoader loader{mixed, net.sampler(mixed), {.batch = 12}};
    for (int epoch = 0; epoch < 8; ++epoch) {
      loader.set_epoch(epoch);
      for (auto& [x, shares] : loader) {  // shares: the probability of each class
        optimizer.zero_grad();
        const auto cost = ch::cross_entropy(net(x), shares);
        cost.backward();
        optimizer.step();
        const double loss = net.mean(static_cast<double>(cost.item()), x.size(0));
        if (run.is_main()) std::printf("loss %.7f\n", loss);
      }
    }

    net.eval();
    const ch::NoGrad no_grad;
    const data::ImageFolder held_out(run.option("data") + "/val",
                                     {.frame = data::CenterCrop{16, 20}, .transforms = {normalize}});
    data::DataLoader test{held_out, net.sampler(held_out, {.shuffle = false}), {.batch = 12}};
    ch::scores::ConfusionMatrix matrix{classes};
    for (auto& [x, label] : test) matrix.add(net(x).value(), label);
    matrix.sum(net);
    if (run.is_main()) std::printf("accuracy %.7f\n", matrix.accuracy());
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, train);
}
