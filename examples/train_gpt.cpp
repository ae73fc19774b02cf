/// Trains a small GPT (Radford et al. 2019) on the letters of any text, and generates text.

#include <chorus/nn/models/gpt.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/same_bits/pipeline.hpp>
#include <chorus/same_bits/tensor_parallel.hpp>

#include "text.hpp"
#include "training.hpp"

namespace ch = chorus;

namespace {

constexpr const char* description =
    R"(Trains a small GPT on the letters of a text, under any policy. At the end the model writes a text.

  train_gpt                                   sentences that the program makes up
  train_gpt --data FILE --epochs 3            any text file
  train_gpt --policy ddp --devices 2 --data FILE --width 192 --layers 6 --heads 6 --window 128 --checkpoint
  train_gpt --policy tp --devices 2           each process has a half of each layer
  train_gpt --policy pp --devices 2           each process has a half of the layers
  train_gpt --policy mesh:2x2x2               8 processes: pipeline x data x tensor parallelism)";

}  // namespace

int main(int argc, char** argv) {
  TrainingOptions options{.optimizer = "adam", .batch = 32, .epochs = 2, .lr = 2e-3, .clip = 1};
  ch::nn::GPTOptions size{.n_positions = 64, .n_embd = 96, .n_layer = 3, .n_head = 4, .tie_word_embeddings = false};
  std::string data = "generated", prompt = "the ";
  int letters = 300;
  double temperature = 0.8;
  CLI::App app{description, "train_gpt"};
  add_options(app, options, {"fsdp", "tp", "pp", "mesh:PxDxT"});
  const auto sizes = in_range(1, 1 << 16);
  app.add_option("--data", data, "a text file, or 'generated'")->capture_default_str();
  app.add_option("--window", size.n_positions, "letters in a sample")->transform(sizes)->capture_default_str();
  app.add_option("--width", size.n_embd, "features of a letter")->transform(sizes)->capture_default_str();
  app.add_option("--heads", size.n_head, "heads of the attention; they divide the width")
      ->transform(sizes)
      ->capture_default_str();
  app.add_option("--layers", size.n_layer, "number of blocks")->transform(sizes)->capture_default_str();
  app.add_option("--dropout", size.dropout, "probability of dropout, in [0, 1)")
      ->transform(in_range(0.0, 0.99))
      ->capture_default_str();
  app.add_flag("--checkpoint", size.checkpoint, "compute the blocks again in backward, to use less memory");
  app.add_option("--prompt", prompt, "beginning of the text")->capture_default_str();
  app.add_option("--letters", letters, "length of the text")->transform(in_range(0, 1 << 20))->capture_default_str();
  app.add_option("--temperature", temperature, "below 1: likely letters become likelier")
      ->transform(in_range(0.01, 100.0))
      ->capture_default_str();
  app.add_option("--save", options.save, "file for the trained weights (safetensors)");
  if (const auto status = parse(app, argc, argv, options)) return *status;

  using Model = ch::nn::GPT<ch::Cpu>;
  constexpr int dynamic = ch::mesh::dynamic;
  using Mesh = ch::Mesh<Model, ch::mesh::Pipe<dynamic>, ch::mesh::Data<dynamic>, ch::mesh::Tensor<dynamic>>;
  using Cut = ch::SameBits<Model>;  // --canonical-shares
  return launch<Model, ch::FullyShardedDataParallel<Model>, Mesh, ch::SingleDevice<Cut>, ch::DataParallel<Cut>,
                ch::FullyShardedDataParallel<Cut>, ch::DistributedDataParallel<Cut>, ch::TensorParallel<Cut>,
                ch::Pipeline<Cut>>(argc, argv, options, [&]<class Net>(ch::Run& run) {
    ch::check<ch::UsageError>(size.n_embd % size.n_head == 0, "--heads ", size.n_head, " do not divide --width ",
                              size.n_embd);
    const Text text = read_text(data, options.seed);
    auto own = size;
    own.vocab_size = text.letters();
    Net net = net_around<Net>(typename Net::model_type{own}, run, options);
    const auto windows = windows_of(text, size.n_positions, options.batch);
    ch::data::DataLoader batches{
        windows, net.sampler(windows), {.batch = options.batch, .workers = 1, .drop_last = true}};
    NamedOptimizer optimizer{net, options};
    Training training{run, net, optimizer, batches, options};
    for (const int epoch : training.epochs()) {
      for (auto& [tokens, next] : training.batches(epoch)) {
        optimizer.zero_grad();
        const auto loss = guess_loss(net, tokens, next);
        loss.backward();
        optimizer.step();
        training.note(loss.item(), tokens.size(0));
      }
      training.end_epoch();
    }
    save_weights(net, options);
    training.end();
    if (letters == 0) return;
    const auto written = continue_text(net, text, prompt, size.n_positions, letters, temperature, options.seed);
    if (run.is_main()) std::printf("%s\n", written.c_str());
  });
}
