/// Trains an image classifier under a parallel policy chosen at run time: the main example of chorus.

#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/same_bits/tensor_parallel.hpp>
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
  // Files are opened last: invalid options leave old files unchanged.
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
  training.save_with([&](const Position& at) { save(net, optimizer, options, at); }, options.save_every);

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
  dp      DataParallel: one process, several devices. Each batch is scattered to copies of the model.
          The first device gathers the outputs, sums the gradients and makes the step.
  ddp     DistributedDataParallel: one process per device. Gradients are averaged over all processes
          while backward runs. Every process makes the same step.
  fsdp    FullyShardedDataParallel: like ddp, but each process keeps a part of the parameters, the
          gradients and the optimizer's state. Layers are gathered when they are used.
  tp      Tensor parallelism: every process has the whole batch and a part of the large linear layers.
  mesh:2x2
          2 x 2 processes: ddp between two pairs, tp within each.
  parameter_server
          Process 0 receives the gradients and makes the step. The others fetch its parameters.
  local_sgd
          Each process steps by itself on its own share. Every 8 steps all processes average their
          parameters. That is an eighth of ddp's messages, and another training.

--batch is the batch of all devices together. With the same seed and the same --batch, all policies but
local_sgd take the same steps, up to rounding. With --canonical-shares they end with the same bits.

With --qat the model trains with the rounding of 8-bit integers. In the last of several epochs its ranges and
batch norm's statistics stay fixed. Under single, dp, ddp and fsdp the ranges are those of the whole batch. --int8
makes an integer model at the end, which computes the same integers. Its file has a quarter of the size, and on
processors with VNNI it is faster.

  train_classifier                                          one device, generated images
  train_classifier --policy ddp --devices 2                 starts two processes
  train_classifier --policy dp --devices 3 --data DIR       DIR: MNIST's or CIFAR-10's files
  train_classifier --policy dp --device 1,3                 on devices 1 and 3
  train_classifier --save m.st; train_classifier --load m.st --lr 0.002 --epochs 2 --qat --int8 --save q.st
                                                            a model of 8-bit integers: q.int8.st
  torchrun --nproc-per-node 2 --no-python train_classifier --policy ddp
  mpirun -np 2 train_classifier --policy ddp                joins processes that a launcher has started

Differences from YOLOv5's train.py:

  --device 0,1     chooses no policy. In YOLOv5 it means DataParallel; here --policy chooses, and single takes one
                   device. Under ddp the program starts its processes: no torch.distributed.run. If torchrun or
                   mpirun has started them, the option names one device for each process of the machine.
  --device cpu     can be combined with --devices: CPU devices are virtual, cpu:0, cpu:1, ...
  --batch          is the batch of all devices, as in YOLOv5. It need not be a multiple of their number; -1 is refused.
                   One batch makes one step. Only --accumulate N makes a step of N batches.
  --lr             is never scaled by the batch or by the number of devices.
  --resume         takes a file, or auto. No folder of runs is made. Without an option for a file nothing is written.)";

}  // namespace

int main(int argc, char** argv) {
  Options options;
  // At the full rate the first steps amplify rounding differences, and results of the policies would differ.
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
                 "MiB of a bucket: gradients that ddp sends together while backward runs (default: 3, then 2)")
      ->transform(in_range(1e-6, 1e6));
  app.add_option("--accumulate", options.accumulate,
                 "number of batches for one step; its gradient is the mean over all their samples")
      ->transform(in_range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--patience", options.patience,
                 "stop after this number of epochs without a better test accuracy, counted from the start or the "
                 "resumption of the run; 0: never")
      ->transform(in_range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--workers", options.workers, "threads that prepare batches; 0: none")
      ->transform(in_range(0, 64))
      ->capture_default_str();
  app.add_option("--save", options.save, "checkpoint file, written after each epoch");
  app.add_option("--save-every", options.save_every, "also write the checkpoint file after every N steps")
      ->transform(in_range(ch::Index{0}));
  app.add_option("--resume", options.resume,
                 "checkpoint file to continue from, saved under any policy; auto: the file of --save, if it exists");
  auto* const qat = app.add_flag("--qat", options.qat,
                                 "train with the rounding of 8-bit integers: toy, mlp or resnet18, under single, dp, "
                                 "ddp or fsdp");
  app.add_flag("--int8", options.int8,
               "at the end make an integer model and test it; with --save X.st, write it to X.int8.st")
      ->needs(qat);
  app.add_option("--load", options.load, "with --qat: begin with the float model in this file, which --save wrote")
      ->needs(qat);
  if (const auto status = parse(app, argc, argv, options)) return *status;
  if (options.qat) return train_quantized(argc, argv, options);
  using Mesh = ch::Mesh<Model, ch::mesh::Data<ch::mesh::dynamic>, ch::mesh::Tensor<ch::mesh::dynamic>>;
  using Cut = ch::SameBits<Model>;  // --canonical-shares
  return launch<Model, ch::FullyShardedDataParallel<Model>, ch::ParameterServer<Model>, ch::LocalSgd<Model>, Mesh,
                ch::SingleDevice<Cut>, ch::DataParallel<Cut>, ch::DistributedDataParallel<Cut>,
                ch::FullyShardedDataParallel<Cut>, ch::ParameterServer<Cut>, ch::TensorParallel<Cut>>(
      argc, argv, options, [&]<class Net>(ch::Run& run) { train<Net>(run, options); });
}
