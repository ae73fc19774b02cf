/// Trains a convolutional autoencoder: images to a short code and back.

#include <chorus/data/open_images.hpp>
#include <chorus/core/atomic_file.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>

#include "models/image_facts.hpp"
#include "training.hpp"

namespace ch = chorus;

namespace {

/// images: [batch, channels, height, width] -> `code` numbers for each -> images of the same shape.
template <class Device>
struct Autoencoder : ch::nn::Module {
  ch::nn::Conv2d<Device> down1, down2, up1, up2;
  ch::nn::Linear<Device> encode, decode;
  ch::Index height, width;
  CHORUS_MODULE(Autoencoder, down1, down2, encode, decode, up1, up2)

  Autoencoder(const ImageFacts& image, ch::Index code)
      : down1{image.channels, 16, {.kernel = 3, .stride = 2, .padding = 1}},
        down2{16, 32, {.kernel = 3, .stride = 2, .padding = 1}},
        up1{32, 16, {.kernel = 3, .padding = 1}},
        up2{16, image.channels, {.kernel = 3, .padding = 1}},
        encode{32 * (image.height / 4) * (image.width / 4), code},
        decode{code, 32 * (image.height / 4) * (image.width / 4)},
        height{image.height / 4},
        width{image.width / 4} {
    ch::check<ch::ShapeError>(image.height % 4 == 0 && image.width % 4 == 0,
                              "autoencoder: expected sizes that are multiples of 4, got ", image.height, " x ",
                              image.width);
  }

  auto forward(const auto& images) const {
    const auto code = encode(ch::flatten(ch::relu(down2(ch::relu(down1(images))))));
    const auto small = ch::reshape(ch::relu(decode(code)), ch::Shape<4>{images.size(0), 32, height, width});
    return up2(ch::upsample_nearest2d(ch::relu(up1(ch::upsample_nearest2d(small, 2))), 2));
  }
};

/// Writes images and their reconstructions, a pair per row, as a portable greymap of their first channel.
void write_pairs(const std::string& path, const ch::Tensor<float, 4>& before, const ch::Tensor<float, 4>& after) {
  const ch::Index rows = before.size(0), height = before.size(2), width = before.size(3);
  std::string file = ch::cat("P5\n", 2 * width, " ", rows * height, "\n255\n");
  const auto line = [&](const ch::Tensor<float, 4>& images, ch::Index i, ch::Index y) {
    for (ch::Index x = 0; x < width; ++x) {
      // Normalised pixels are usually between -2 and 3.
      const float grey = std::clamp((images(i, 0, y, x) + 2.0f) / 5.0f, 0.0f, 1.0f);
      file += static_cast<char>(static_cast<unsigned char>(255.0f * grey));
    }
  };
  for (ch::Index i = 0; i < rows; ++i)
    for (ch::Index y = 0; y < height; ++y) {
      line(before, i, y);
      line(after, i, y);
    }
  ch::io::AtomicFile out(path);
  out.write(file);
  out.commit();
}

constexpr const char* description =
    R"(Trains a convolutional autoencoder under any policy: it encodes an image as --code numbers.

  train_autoencoder                           generated images
  train_autoencoder --data DIR --code 64      DIR: MNIST's or CIFAR-10's files
  train_autoencoder --images pairs.pgm        writes test images next to their reconstructions)";

}  // namespace

int main(int argc, char** argv) {
  TrainingOptions options{.optimizer = "adam", .batch = 64, .epochs = 3, .lr = 2e-3};
  std::string data = "synthetic", pairs;
  ch::Index code = 32, train_images = 4000;
  CLI::App app{description, "train_autoencoder"};
  add_options(app, options, {"fsdp"});
  app.add_option("--data", data, "'synthetic', or a folder with MNIST's IDX files or CIFAR-10's binary batches")
      ->capture_default_str();
  app.add_option("--train-images", train_images, "generated images")
      ->transform(in_range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--code", code, "numbers in the code of an image")
      ->transform(in_range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--images", pairs, "file for test images and their reconstructions (PGM)");
  app.add_option("--save", options.save, "file for the trained weights (safetensors)");
  if (const auto status = parse(app, argc, argv, options)) return *status;

  using Fsdp = ch::FullyShardedDataParallel<Autoencoder<ch::Cpu>>;
  using Cut = ch::SameBits<Autoencoder<ch::Cpu>>;  // --canonical-shares
  return launch<Autoencoder<ch::Cpu>, Fsdp, ch::SingleDevice<Cut>, ch::DataParallel<Cut>,
                ch::FullyShardedDataParallel<Cut>,
                ch::DistributedDataParallel<Cut>>(argc, argv, options, [&]<class Net>(ch::Run& run) {
    const auto dataset = [&](ch::data::Split split, ch::Index count) -> ch::data::ImageDataset {
      if (data != "synthetic") return ch::data::open_images(data, split);
      return ch::data::SyntheticImages{count, options.seed, split};
    };
    const auto train_set = dataset(ch::data::Split::train, train_images),
               test_set = dataset(ch::data::Split::test, 256);
    const auto [channels, height, width] = train_set.image_shape();
    Net net = net_around<Net>(
        typename Net::model_type{ImageFacts{channels, height, width, train_set.classes()}, code}, run, options);
    ch::data::DataLoader loader{train_set, net.sampler(train_set), {.batch = options.batch, .workers = 1}};
    NamedOptimizer optimizer{net, options};
    Training training{run, net, optimizer, loader, options};
    for (const int epoch : training.epochs()) {
      for (auto& [images, labels] : training.batches(epoch)) {
        optimizer.zero_grad();
        const auto loss = ch::mse_loss(net(images), images);
        loss.backward();
        optimizer.step();
        training.note(loss.item(), labels.numel());
      }
      training.end_epoch();
    }
    save_weights(net, options);
    training.end();

    net.gathered([&](auto& model) {
      if (!run.is_main()) return;
      const ch::NoGrad no_grad;
      ch::data::DataLoader test{
          test_set, ch::data::Sampler(test_set.size(), {.shuffle = false}), {.batch = 16, .workers = 0}};
      const auto before = (*test.begin()).images;
      const auto after = model.forward(before).value();
      // The variance is the error of a model that outputs the mean grey.
      std::printf("test images: squared error %.4f, variance %.4f\n",
                  static_cast<double>(ch::mse_loss(after, before).item()), static_cast<double>(ch::var(before).item()));
      if (!pairs.empty()) write_pairs(pairs, before, after);
    });
  });
}
