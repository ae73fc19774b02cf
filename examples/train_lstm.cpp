/// Trains an LSTM language model (Graves 2013) on the letters of any text, and generates text.

#include <chorus/nn/recurrent.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>

#include "text.hpp"
#include "training.hpp"

namespace ch = chorus;

namespace {

struct LstmSize {
  ch::Index letters = 0, embedding = 32, hidden = 128, layers = 1;
  double dropout = 0.1;
};

/// tokens: [samples, time] -> predictions of the letter after each: [samples, time, letters].
template <class Device>
struct LanguageModel : ch::nn::Module {
  ch::nn::Embedding<Device> encoder;
  ch::nn::LSTM<Device> lstm;
  ch::nn::Dropout dropout;
  ch::nn::Linear<Device> decoder;
  CHORUS_MODULE(LanguageModel, encoder, lstm, dropout, decoder)

  explicit LanguageModel(const LstmSize& size)
      : encoder{size.letters, size.embedding},
        lstm{size.embedding,
             size.hidden,
             {.num_layers = size.layers, .batch_first = true, .dropout = size.layers > 1 ? size.dropout : 0}},
        dropout{size.dropout},
        decoder{size.hidden, size.letters} {}

  auto forward(const ch::Tensor<std::int64_t, 2, Device>& tokens) const {
    return decoder(dropout(lstm(encoder(tokens)).output));
  }
};

constexpr const char* description =
    R"(Trains an LSTM on the letters of a text, under any policy. At the end the model writes a text.

  train_lstm                                  sentences that the program makes up
  train_lstm --data FILE --epochs 3           any text file
  train_lstm --policy dp --devices 2 --data FILE --hidden 256 --layers 2)";

}  // namespace

int main(int argc, char** argv) {
  TrainingOptions options{.optimizer = "adam", .batch = 32, .epochs = 2, .lr = 4e-3, .clip = 1};
  LstmSize size;
  std::string data = "generated", prompt = "the ";
  ch::Index window = 48;
  int letters = 300;
  double temperature = 0.8;
  CLI::App app{description, "train_lstm"};
  add_options(app, options, {"fsdp"});
  const auto sizes = in_range(1, 1 << 16);
  app.add_option("--data", data, "a text file, or 'generated'")->capture_default_str();
  app.add_option("--window", window, "letters in a sample")->transform(sizes)->capture_default_str();
  app.add_option("--embedding", size.embedding, "features of a letter")->transform(sizes)->capture_default_str();
  app.add_option("--hidden", size.hidden, "features of the state")->transform(sizes)->capture_default_str();
  app.add_option("--layers", size.layers, "number of LSTM layers")->transform(in_range(1, 64))->capture_default_str();
  app.add_option("--dropout", size.dropout, "probability of dropout, in [0, 1)")
      ->transform(in_range(0.0, 0.99))
      ->capture_default_str();
  app.add_option("--prompt", prompt, "beginning of the text")->capture_default_str();
  app.add_option("--letters", letters, "length of the text")->transform(in_range(0, 1 << 20))->capture_default_str();
  app.add_option("--temperature", temperature, "below 1: likely letters become likelier")
      ->transform(in_range(0.01, 100.0))
      ->capture_default_str();
  app.add_option("--save", options.save, "file for the trained weights (safetensors)");
  if (const auto status = parse(app, argc, argv, options)) return *status;

  using Model = LanguageModel<ch::Cpu>;
  using Fsdp = ch::FullyShardedDataParallel<Model>;
  using Cut = ch::SameBits<Model>;  // --canonical-shares
  return launch<Model, Fsdp, ch::SingleDevice<Cut>, ch::DataParallel<Cut>,
                ch::FullyShardedDataParallel<Cut>,
                ch::DistributedDataParallel<Cut>>(argc, argv, options, [&]<class Net>(ch::Run& run) {
    const Text text = read_text(data, options.seed);
    auto own = size;
    own.letters = text.letters();
    Net net = net_around<Net>(typename Net::model_type{own}, run, options);
    const auto windows = windows_of(text, window, options.batch);
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
    const auto written = continue_text(net, text, prompt, window, letters, temperature, options.seed);
    if (run.is_main()) std::printf("%s\n", written.c_str());
  });
}
