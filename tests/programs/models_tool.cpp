/// The C++ side of tests/python/models_check.py: what the library's models compute with weights of others.
///   models_tool MODEL FILE IN OUT   MODEL: bert, bert_masked_lm, resnet18 or resnet50; FILE: its weights, .safetensors
///   or .pt; IN: the inputs, .npz; OUT: the output, .npy
#include <chorus/chorus.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/npz.hpp>
#include <chorus/io/pt.hpp>
#include <chorus/models.hpp>
#include <cstdio>
#include <string>

namespace {

using namespace chorus;

constexpr nn::BERTOptions small{.vocab_size = 50,
                                .hidden_size = 24,
                                .num_hidden_layers = 2,
                                .num_attention_heads = 3,
                                .intermediate_size = 40,
                                .max_position_embeddings = 16};

void load(auto& model, const std::string& path) {
  if (path.ends_with(".pt"))
    io::load_pt(model, path);
  else
    io::load(model, path);
  model.eval();
}

void run(const std::string& name, const std::string& weights, const std::string& in, const std::string& out) {
  const NoGrad no_grad;
  const io::NpzReader inputs(in);
  const auto guess = [&](auto model) {
    load(model, weights);
    io::save_npy(out, value_of(model(inputs.read<std::int64_t, 2>("tokens"), inputs.read<std::int64_t, 2>("types"),
                                     inputs.read<bool, 2>("mask"))));
  };
  const auto classify = [&](auto model) {
    load(model, weights);
    io::save_npy(out, value_of(model(inputs.read<float, 4>("images"))));
  };
  if (name == "bert") return guess(nn::BERT<Cpu>(small));
  if (name == "bert_masked_lm") return guess(nn::BERTForMaskedLM<Cpu>(small));
  if (name == "resnet18") return classify(nn::ResNet18<Cpu>{});
  if (name == "resnet50") return classify(nn::ResNet50<Cpu>{});
  fail<UsageError>("models_tool: unknown model ", name);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    check<UsageError>(argc == 5, "usage: models_tool MODEL FILE IN OUT");
    run(argv[1], argv[2], argv[3], argv[4]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
