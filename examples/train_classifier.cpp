/// Trains an image classifier under a parallel policy that is chosen at run time: the main example of chorus.

#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "accumulation.hpp"
#include "train_classifier.hpp"

using Model = Classifier<ch::Cpu>;

namespace {

template <class Net>
void train(ch::Run& run, const Options& options) {
  const auto train_set = open_dataset(options, ch::data::Split::train),
             test_set = open_dataset(options, ch::data::Split::test);
  const auto [channels, height, width] = train_set.image_shape();
  Net net = make_net<Net>({options.model, ImageFacts{channels, height, width, train_set.classes()}}, run, options);
  NamedOptimizer optimizer{net, options};
  const Position start = resume(run, net, optimizer, options);
  ch::data::DataLoader loader{train_set, net.sampler(train_set), loading(options)};
  // Files are opened last: a mistake in the options leaves old files as they were.
  check_save(run, options);
  if (auto* const trace = ch::trace::step_counter()) {
    trace->note("classes", ch::cat(train_set.classes()));
    trace->note("sample_bytes", ch::cat(static_cast<std::size_t>(channels * height * width) * sizeof(float)));
  }
  const ch::Index share = samples_of_device(net, options, 0);  // the largest
  const ch::Shape<4> images_of_device{share, channels, height, width};
  Training training{run, net, optimizer, loader, options, start,
                    [&](auto& model) { return ch::nn::summary(model, images_of_device); }};
  Accumulation accumulation{net, train_set.size(), options.batch, options.accumulate, start.batch};
  training.save_with([&](const Position& at) { save(run, net, optimizer, options, at); }, options.save_every);

  for (const int epoch : training.epochs()) {
    for (auto& [images, labels] : training.batches(epoch)) {
      const auto part = accumulation.next(optimizer);  // zero_grad() where a step begins
      const auto loss = ch::cross_entropy(net(images), labels);
      part.backward(loss);
      if (part.ends_step()) optimizer.step();
      training.note(loss.item(), labels.numel(), part.ends_step());
    }
    training.end_epoch([&] { return accuracy(net, test_set, options, net); });
  }
  training.end();
}

constexpr const char* description =
    R"(Trains an image classifier. The same model and the same loop run under every policy:

  single  one device
  dp      DataParallel: one process, several devices. Each batch is scattered to copies of the model,
          outputs are gathered, gradients are summed to the first device, the step is made there.
  ddp     DistributedDataParallel: one process per device. Gradients are averaged over all processes
          while backward runs; every process makes the same step.
  fsdp    FullyShardedDataParallel: as ddp, but each process keeps a part of the parameters, of their
          gradients and of the optimizer's numbers; layers are gathered when they are used.
  tp      Tensor parallelism: every process has the whole batch, and a part of the large linear layers.
  mesh:2x2
          2 x 2 processes: ddp between two pairs, tp within each.
  parameter_server
          Gradients go to process 0, which makes the step; the others fetch its parameters.
  local_sgd
          Each process steps on its share by itself, and every 8 steps all take the mean of their
          parameters: an eighth of ddp's messages, and another training.

With the same seed and the same --batch, which is the whole batch of all devices together, all but
local_sgd take the same steps, up to rounding; with --canonical-shares they end with the same bits.

With --qat the model computes with the rounding that 8-bit integers bring, and learns to do with it; in the last of
several epochs the ranges of its numbers and batch norm's statistics stay. Under single, dp, ddp and fsdp the ranges are
those of the whole batch. --int8 makes a model of integers of it in the end, which computes the same integers: its file
has a quarter of the size, and where the processor has VNNI it is faster.

  train_classifier                                          one device, generated images
  train_classifier --policy ddp --devices 2                 starts two processes
  train_classifier --policy dp --devices 3 --data DIR       DIR: MNIST's or CIFAR-10's files
  train_classifier --policy dp --device 1,3                 on devices 1 and 3
  train_classifier --save m.st; train_classifier --load m.st --lr 0.002 --epochs 2 --qat --int8 --save q.st
                                                            a model of 8-bit integers: q.int8.st
  torchrun --nproc-per-node 2 --no-python train_classifier --policy ddp
  mpirun -np 2 train_classifier --policy ddp                joins processes that others have started

For those who know YOLOv5's train.py, where habits differ:

  --device 0,1     chooses no policy: there it means DataParallel, here --policy says it; single takes one device.
                   Under ddp it starts the processes itself: no torch.distributed.run. Where torchrun or mpirun has
                   started them, it names one device for each process of the machine.
  --device cpu     takes --devices, too: CPU devices are virtual ones, cpu:0, cpu:1, ...
  --batch          is over all devices, as there, but need not be a multiple of their number; -1 is refused.
                   A step learns from it alone; --accumulate N adds N of them up, and nothing does so unasked.
  --lr             is taken as it is given, whatever the batch and the number of devices.
  --resume         takes a file, or auto; no folder of runs is made, and nothing is written unless an option says so.)";

}  // namespace

int main(int argc, char** argv) {
  Options options;
  // At the full rate, the first steps amplify small differences: rounding would lead policies to different results.
  options.warmup = 300;
  CLI::App app{description, "train_classifier"};
  add_options(app, options, {"fsdp", "tp", "mesh:DxT", "parameter_server", "local_sgd"});
  app.add_option("--model", options.model, "toy (LeNet's form), mlp (with dropout), resnet18 or resnet50")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(Model::names), std::end(Model::names))))
      ->capture_default_str();
  app.add_option("--data", options.data,
                 "'synthetic', or a folder with MNIST's IDX files (also .gz) or CIFAR-10's binary batches")
      ->capture_default_str();
  app.add_flag("--augment", options.augment, "shift and mirror training images");
  app.add_option("--train-images", options.train_images, "generated images for training")
      ->transform(in_range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--test-images", options.test_images, "generated images for testing")
      ->transform(in_range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--bucket-cap-mb", options.bucket_cap_mb,
                 "MiB of gradients that ddp sends at a time, while backward computes the next (default: 3, then 2)")
      ->transform(in_range(1e-6, 1e6));
  app.add_option("--accumulate", options.accumulate,
                 "batches whose gradients are added up for a step, which learns from the mean over their samples")
      ->transform(in_range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--patience", options.patience,
                 "stop after so many epochs without a better test accuracy, counted from where a run begins or "
                 "goes on; 0: don't")
      ->transform(in_range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--workers", options.workers, "threads that prepare batches; 0: none")
      ->transform(in_range(0, 64))
      ->capture_default_str();
  app.add_option("--save", options.save, "checkpoint file, written after each epoch");
  app.add_option("--save-every", options.save_every, "write it every so many steps, too")
      ->transform(in_range(ch::Index{0}));
  app.add_option("--resume", options.resume,
                 "checkpoint file to go on from, saved under any policy; auto: that of --save, once it is there");
  auto* const qat = app.add_flag("--qat", options.qat,
                                 "train with the rounding of 8-bit integers: toy, mlp or resnet18, under single, dp, "
                                 "ddp or fsdp");
  app.add_flag("--int8", options.int8,
               "in the end make a model of integers, test it, and, with --save X.st, write it to X.int8.st")
      ->needs(qat);
  app.add_option("--load", options.load, "with --qat: file of a float model, as --save writes it, to begin with")
      ->needs(qat);
  if (const auto status = parse(app, argc, argv, options)) return *status;
  if (options.qat) return train_quantized(argc, argv, options);
  using Mesh = ch::Mesh<Model, ch::mesh::Data<ch::mesh::dynamic>, ch::mesh::Tensor<ch::mesh::dynamic>>;
  using Cut = ch::SameBits<Model>;  // --canonical-shares
  return launch<Model, ch::FullyShardedDataParallel<Model>, ch::ParameterServer<Model>, ch::LocalSgd<Model>, Mesh,
                ch::SingleDevice<Cut>, ch::DataParallel<Cut>, ch::DistributedDataParallel<Cut>,
                ch::ParameterServer<Cut>>(
      argc, argv, options, [&]<class Net>(ch::Run& run) { train<Net>(run, options); });
}
