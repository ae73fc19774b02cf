/// Trains a small GPT (Radford et al. 2019) on the letters of any text, and generates text.

#include <chorus/autograd/checkpoint.hpp>
#include <chorus/nn/attention.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/parallel/mesh.hpp>
#include <numeric>

#include "text.hpp"
#include "training.hpp"

namespace ch = chorus;

namespace {

struct GptSize {
  ch::Index letters = 0, window = 64, width = 96, heads = 4, layers = 3;
  double dropout = 0.1;
  bool checkpoint = false;
};

/// Tensor parallelism divides its layers; a pipeline's stage has at least one block.
template <class Device>
struct Block : ch::nn::Module {
  ch::nn::LayerNorm<Device> ln_1, ln_2;
  ch::nn::MultiheadAttention<Device> attn;
  ch::nn::ColumnParallelLinear<Device> c_fc;
  ch::nn::RowParallelLinear<Device> c_proj;
  ch::nn::Dropout dropout;
  bool checkpoint;
  CHORUS_MODULE(Block, ln_1, attn, ln_2, c_fc, c_proj, dropout)

  explicit Block(const GptSize& size)
      : ln_1{size.width},
        ln_2{size.width},
        attn{size.width, size.heads},
        c_fc{size.width, 4 * size.width},
        c_proj{4 * size.width, size.width},
        dropout{size.dropout},
        checkpoint{size.checkpoint} {}

  auto forward(const auto& x) const {
    const auto block = [&](const auto& in) {
      const auto normal = ln_1(in);
      const auto seen = in + dropout(attn(normal, normal, normal, /*causal=*/true));
      return seen + dropout(c_proj(ch::gelu(c_fc(ln_2(seen)))));
    };
    return checkpoint ? ch::checkpoint(block, x) : block(x);
  }
};

/// tokens: [samples, time] -> [samples, time, width].
template <class Device>
struct Letters : ch::nn::Module {
  ch::nn::Embedding<Device> wte, wpe;
  CHORUS_MODULE(Letters, wte, wpe)

  explicit Letters(const GptSize& size) : wte{size.letters, size.width}, wpe{size.window, size.width} {
    for (const auto* table : {&wte, &wpe})
      table->weight.assign(ch::nn::init::normal<float, Device, 2>(table->weight.shape(), 0, 0.02));
  }
  auto forward(const auto& tokens) const {
    std::vector<std::int64_t> places(static_cast<std::size_t>(tokens.size(1)));
    std::iota(places.begin(), places.end(), 0);
    const auto letters = wte(tokens);
    const auto row = ch::Tensor<std::int64_t, 1, Device>::from(places, {tokens.size(1)}, tokens.device());
    return letters + ch::type_as(wpe(row), letters);
  }
};

/// [samples, time, width] -> predictions of the letter after each: [samples, time, letters].
template <class Device>
struct Guesses : ch::nn::Module {
  ch::nn::LayerNorm<Device> ln_f;
  ch::nn::Linear<Device> lm_head;
  CHORUS_MODULE(Guesses, ln_f, lm_head)

  explicit Guesses(const GptSize& size) : ln_f{size.width}, lm_head{size.width, size.letters, {.bias = false}} {}
  auto forward(const auto& x) const { return lm_head(ln_f(x)); }
};

/// A chain that a pipeline may cut between any two links: letters, blocks, guesses.
template <class Device>
struct Gpt : ch::nn::Module {
  Letters<Device> letters;
  ch::nn::ModuleList<Block<Device>> h;
  Guesses<Device> guesses;
  CHORUS_MODULE(Gpt, letters, h, guesses)
  CHORUS_PIPELINE(letters, h, guesses)

  explicit Gpt(const GptSize& size) : letters{size}, guesses{size} {
    for (ch::Index i = 0; i < size.layers; ++i) h.push_back(Block<Device>(size));
  }
};

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
  GptSize size;
  std::string data = "generated", prompt = "the ";
  int letters = 300;
  double temperature = 0.8;
  CLI::App app{description, "train_gpt"};
  add_options(app, options, {"fsdp", "tp", "pp", "mesh:PxDxT"});
  const auto sizes = in_range(1, 1 << 16);
  app.add_option("--data", data, "a text file, or 'generated'")->capture_default_str();
  app.add_option("--window", size.window, "letters in a sample")->transform(sizes)->capture_default_str();
  app.add_option("--width", size.width, "features of a letter")->transform(sizes)->capture_default_str();
  app.add_option("--heads", size.heads, "heads of the attention; they divide the width")
      ->transform(sizes)
      ->capture_default_str();
  app.add_option("--layers", size.layers, "number of blocks")->transform(sizes)->capture_default_str();
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

  using Model = Gpt<ch::Cpu>;
  constexpr int dynamic = ch::mesh::dynamic;
  using Mesh = ch::Mesh<Model, ch::mesh::Pipe<dynamic>, ch::mesh::Data<dynamic>, ch::mesh::Tensor<dynamic>>;
  using Cut = ch::SameBits<Model>;  // --canonical-shares
  return launch<Model, ch::FullyShardedDataParallel<Model>, Mesh, ch::SingleDevice<Cut>, ch::DataParallel<Cut>,
                ch::DistributedDataParallel<Cut>>(argc, argv, options, [&]<class Net>(ch::Run& run) {
    ch::check<ch::UsageError>(size.width % size.heads == 0, "--heads ", size.heads, " do not divide --width ",
                              size.width);
    const Text text = read_text(data, options.seed);
    auto own = size;
    own.letters = text.letters();
    Net net = net_around<Net>(typename Net::model_type{own}, run, options);
    const auto windows = windows_of(text, size.window, options.batch);
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
    const auto written = continue_text(net, text, prompt, size.window, letters, temperature, options.seed);
    if (run.is_main()) std::printf("%s\n", written.c_str());
  });
}
