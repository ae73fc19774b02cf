/// Fine-tunes GPT-2 from a folder of Hugging Face's `transformers`, and writes one.

#include <algorithm>
#include <chorus/data/tokenizer.hpp>
#include <chorus/io/gpt2_folder.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/generate.hpp>
#include <cstdio>

#include "text.hpp"
#include "training.hpp"

namespace ch = chorus;

namespace {

constexpr const char* description =
    R"(Fine-tunes GPT-2. FOLDER has config.json, model.safetensors (or several, with an index) and tokenizer.json.

  finetune_gpt2 FOLDER --prompt "Once upon"                     continues a text
  finetune_gpt2 FOLDER --data FILE --save NEW                   trains all weights; transformers opens NEW
  finetune_gpt2 FOLDER --data FILE --save NEW --lora 8 --policy ddp --devices 2
                                                                trains LoRA's matrices; NEW/adapter has them alone
  finetune_gpt2 FOLDER --data FILE --policy fsdp --devices 4    each process has a quarter of the weights)";

}  // namespace

int main(int argc, char** argv) {
  TrainingOptions options{.optimizer = "adam", .batch = 8, .epochs = 1, .lr = 5e-5, .clip = 1};
  std::string folder, data, prompt;
  ch::Index window = 0, lora = 0, length = 100;
  double alpha = 16, dropout = -1, temperature = 0;
  bool checkpoint = false, logits = false;
  CLI::App app{description, "finetune_gpt2"};
  add_options(app, options, {"fsdp"});
  app.add_option("folder", folder, "folder of the model")->required();
  app.add_option("--data", data, "a text file to train on; without it nothing is trained");
  app.add_option("--window", window, "tokens in a sample (default: the model's n_positions)")
      ->transform(in_range(1, 1 << 20));
  app.add_option("--dropout", dropout,
                 "probability of dropout of embeddings, attention and MLPs (default: config.json's resid_pdrop)")
      ->transform(in_range(0.0, 0.99));
  app.add_option("--lora", lora, "train only matrices of this rank that are added to attention's projections")
      ->transform(in_range(1, 1 << 16));
  app.add_option("--lora-alpha", alpha, "their results count alpha / rank")
      ->transform(in_range(0.0))
      ->capture_default_str();
  app.add_flag("--checkpoint", checkpoint, "compute the blocks again in backward, to use less memory");
  app.add_option("--prompt", prompt, "text to continue, at the end");
  app.add_option("--tokens", length, "tokens that continue it")->transform(in_range(0, 1 << 20))->capture_default_str();
  app.add_option("--temperature", temperature, "draw the tokens; 0: take the likeliest")
      ->transform(in_range(0.0, 100.0))
      ->capture_default_str();
  app.add_flag("--logits", logits,
               "print the numbers of the prompt's tokens, the scores after the last one, and the new tokens");
  app.add_option("--save", options.save, "folder for the trained model");
  if (const auto status = parse(app, argc, argv, options)) return *status;

  using Model = ch::nn::GPT<ch::Cpu>;
  return launch<Model, ch::FullyShardedDataParallel<Model>>(argc, argv, options, [&]<class Net>(ch::Run& run) {
    auto sizes = ch::io::gpt2_options(folder);
    sizes.lora_rank = lora;
    sizes.lora_alpha = alpha;
    sizes.checkpoint = checkpoint;
    if (dropout >= 0) sizes.dropout = dropout;
    const ch::data::Tokenizer tokenizer{folder + "/tokenizer.json"};
    ch::check<ch::UsageError>(tokenizer.vocab_size() <= sizes.vocab_size, folder, ": tokenizer.json has ",
                              tokenizer.vocab_size(), " tokens, config.json vocab_size ", sizes.vocab_size);
    Model model{sizes};
    if (lora > 0) ch::nn::train_only_lora(model);
    Net net = net_around<Net>(std::move(model), run, options);
    ch::io::load_gpt2(net, folder);

    if (!data.empty()) {
      const ch::data::TokenWindows windows{tokenizer.encode(ch::data::read_text(data)),
                                           window > 0 ? window : sizes.n_positions};
      ch::check<ch::UsageError>(windows.size() >= options.batch, data, ": expected text for at least one batch of ",
                                options.batch, " windows, got ", windows.size());
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
      training.end();
    }
    if (!options.save.empty())
      net.gathered([&](Model& whole) {
        if (run.is_main()) ch::io::save_gpt2(whole, folder, options.save);
      });

    const auto begin = tokenizer.encode(prompt);
    if (begin.empty()) return;
    net.eval();
    const auto tokens = ch::Tensor<std::int64_t, 2>::from(begin, {1, static_cast<ch::Index>(begin.size())});
    if (logits)
      net.gathered([&](Model& whole) {
        const ch::NoGrad no_grad;
        const auto scores = ch::contiguous(ch::value_of(whole(tokens)).select(1, tokens.size(1) - 1)).to_vector();
        if (!run.is_main()) return;
        std::printf("%s\n", ch::cat("prompt ", std::span(begin)).c_str());
        std::printf("%s\n", ch::cat("logits ", std::span(scores)).c_str());
      });
    ch::GenerateOptions how{.max_new_tokens = length, .seed = options.seed, .eos = ch::io::gpt2_end_tokens(folder)};
    if (temperature > 0) how.temperature = temperature;
    const auto written = ch::generate(net, tokens, how).to_vector();
    if (!run.is_main()) return;
    if (logits) std::printf("%s\n", ch::cat("tokens ", std::span(written)).c_str());
    std::printf("%s\n", tokenizer.decode(written).c_str());
  });
}
