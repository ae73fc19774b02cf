/// Trains a small GPT (Radford et al. 2019) on the letters of any text, and lets it write.

#include <chorus/autograd/checkpoint.hpp>
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

template <class Device>
struct Attention : ch::nn::Module {
  ch::nn::Linear<Device> c_attn, c_proj;
  ch::Index heads;
  CHORUS_MODULE(Attention, c_attn, c_proj)

  explicit Attention(const GptSize& size)
      : c_attn{size.width, 3 * size.width}, c_proj{size.width, size.width}, heads{size.heads} {}

  auto forward(const auto& x) const {
    const auto& [samples, time, width] = x.shape();
    const auto all = c_attn(x);
    const auto part = [&, shape = ch::Shape<4>{samples, time, heads, width / heads}, w = width](ch::Index i) {
      return ch::transpose(ch::reshape(ch::slice(all, 2, i * w, (i + 1) * w), shape), 1, 2);
    };
    const auto seen = ch::scaled_dot_product_attention(part(0), part(1), part(2), /*causal=*/true);
    return c_proj(ch::reshape(ch::transpose(seen, 1, 2), x.shape()));
  }
};

template <class Device>
struct Block : ch::nn::Module {
  ch::nn::LayerNorm<Device> ln_1, ln_2;
  Attention<Device> attn;
  ch::nn::Linear<Device> c_fc, c_proj;
  ch::nn::Dropout dropout;
  CHORUS_MODULE(Block, ln_1, attn, ln_2, c_fc, c_proj, dropout)

  explicit Block(const GptSize& size)
      : ln_1{size.width},
        ln_2{size.width},
        attn{size},
        c_fc{size.width, 4 * size.width},
        c_proj{4 * size.width, size.width},
        dropout{size.dropout} {}

  auto forward(const auto& in) const {
    const auto x = in + dropout(attn(ln_1(in)));
    return x + dropout(c_proj(ch::gelu(c_fc(ln_2(x)))));
  }
};

/// tokens: [samples, time] -> guesses at the letter after each: [samples, time, letters].
template <class Device>
struct Gpt : ch::nn::Module {
  ch::nn::Embedding<Device> wte, wpe;
  ch::nn::ModuleList<Block<Device>> h;
  ch::nn::LayerNorm<Device> ln_f;
  ch::nn::Linear<Device> lm_head;
  bool checkpoint;
  CHORUS_MODULE(Gpt, wte, wpe, h, ln_f, lm_head)

  explicit Gpt(const GptSize& size)
      : wte{size.letters, size.width},
        wpe{size.window, size.width},
        ln_f{size.width},
        lm_head{size.width, size.letters, {.bias = false}},
        checkpoint{size.checkpoint} {
    for (const auto* table : {&wte, &wpe})
      table->weight.assign(ch::nn::init::normal<float, Device, 2>(table->weight.shape(), 0, 0.02));
    for (ch::Index i = 0; i < size.layers; ++i) h.push_back(Block<Device>(size));
  }

  auto forward(const ch::Tensor<std::int64_t, 2, Device>& tokens) const {
    std::vector<std::int64_t> places(static_cast<std::size_t>(tokens.size(1)));
    std::iota(places.begin(), places.end(), 0);
    auto x = wte(tokens) + wpe(ch::Tensor<std::int64_t, 1, Device>::from(places, {tokens.size(1)}, tokens.device()));
    for (const auto& block : h)
      x = checkpoint ? ch::checkpoint([&](const auto& in) { return block(in); }, x) : block(x);
    return lm_head(ln_f(x));
  }
};

constexpr const char* description =
    R"(Trains a small GPT on the letters of a text, under any policy, and lets it write at the end.

  train_gpt                                   sentences that the program makes up
  train_gpt --data FILE --epochs 3            any text file
  train_gpt --policy ddp --devices 2 --data FILE --width 192 --layers 6 --heads 6 --window 128 --checkpoint)";

}  // namespace

int main(int argc, char** argv) {
  TrainingOptions options{.optimizer = "adam", .batch = 32, .epochs = 2, .lr = 2e-3, .clip = 1};
  GptSize size;
  std::string data = "generated", prompt = "the ";
  int letters = 300;
  double temperature = 0.8;
  CLI::App app{description, "train_gpt"};
  add_options(app, options, {"fsdp"});
  const auto sizes = in_range(1, 1 << 16);
  app.add_option("--data", data, "a text file; or 'generated'")->capture_default_str();
  app.add_option("--window", size.window, "letters that the model sees")->check(sizes)->capture_default_str();
  app.add_option("--width", size.width, "features of a letter")->check(sizes)->capture_default_str();
  app.add_option("--heads", size.heads, "of the attention; they divide the width")->check(sizes)->capture_default_str();
  app.add_option("--layers", size.layers, "blocks")->check(sizes)->capture_default_str();
  app.add_option("--dropout", size.dropout, "in [0, 1)")->check(in_range(0.0, 0.99))->capture_default_str();
  app.add_flag("--checkpoint", size.checkpoint, "compute what is in the blocks again in backward, to hold less memory");
  app.add_option("--prompt", prompt, "what the text at the end begins with")->capture_default_str();
  app.add_option("--letters", letters, "of the text at the end")->check(in_range(0, 1 << 20))->capture_default_str();
  app.add_option("--temperature", temperature, "below 1: the likeliest letters more often")
      ->check(in_range(0.01, 100.0))
      ->capture_default_str();
  app.add_option("--save", options.save, "file for the trained weights (safetensors)");
  if (const auto status = parse(app, argc, argv, options)) return *status;

  using Fsdp = ch::FullyShardedDataParallel<Gpt<ch::Cpu>>;
  return launch<Gpt<ch::Cpu>, Fsdp>(argc, argv, options, [&]<class Net>(std::type_identity<Net>, ch::Run& run) {
    ch::check<ch::UsageError>(size.width % size.heads == 0, "--heads ", size.heads, " do not divide --width ",
                              size.width);
    const Text text = read_text(data, options.seed);
    auto own = size;
    own.letters = text.letters();
    Net net = net_around<Net>(typename Net::model_type{own}, run, options);
    TextBatches batches{text, size.window, net, options.batch};
    NamedOptimizer optimizer{net, options};
    Training training{run, net, optimizer, batches, options};
    for (const int epoch : training.epochs()) {
      for (const auto& batch : training.batches(epoch)) {
        optimizer.zero_grad();
        const auto loss = guess_loss(net, batch);
        loss.backward();
        optimizer.step();
        training.note(loss.item(), batch.tokens.size(0));
      }
      training.end_epoch();
    }
    save_weights(net, options);
    training.end();
    const auto whole = net.gathered();
    if (run.is_main() && letters > 0)
      std::printf("%s\n",
                  continue_text(net.module(), text, prompt, size.window, letters, temperature, options.seed).c_str());
  });
}
