#pragma once
/// GPT-2 as Hugging Face's `transformers` keeps it: a folder with config.json, model.safetensors (or several files and
/// an index) and tokenizer.json.

#include <chorus/core/atomic_file.hpp>
#include <chorus/core/error.hpp>
#include <chorus/data/text.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/kernels/to_device.hpp>
#include <chorus/nn/models/gpt.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace chorus::io {

namespace detail {

inline nlohmann::json gpt2_config(const std::string& folder) {
  const auto path = folder + "/config.json";
  auto config = nlohmann::json::parse(data::read_text(path), nullptr, /*allow_exceptions=*/false);
  check<FileError>(config.is_object(), "loading ", printable(path, 4096),
                   ": expected a JSON object, as transformers writes it");
  return config;
}

/// Whether Hugging Face keeps a matrix as [in, out] (Conv1D): by its name, for square ones fit both ways.
inline bool is_conv1d(std::string_view name) {
  return name.ends_with(".c_attn.weight") || name.ends_with(".c_proj.weight") || name.ends_with(".c_fc.weight");
}

/// Tensors under names of their own, to be written.
class NamedTensors {
 public:
  template <int Rank>
  void add(std::string name, const Tensor<float, Rank>& tensor) {
    const auto dense = contiguous(tensor);
    const auto* const bytes = reinterpret_cast<const std::byte*>(dense.data());
    items_.push_back({std::move(name), {dense.shape().begin(), dense.shape().end()}, {bytes, bytes + dense.bytes()}});
  }
  void write(const std::string& path) const {
    std::vector<TensorView> views;
    for (const auto& item : items_) views.push_back({item.name, FileDType::f32, item.shape, item.bytes});
    write_safetensors(path, views, {{"format", "pt"}});
  }

 private:
  struct Item {
    std::string name;
    std::vector<Index> shape;
    std::vector<std::byte> bytes;
  };
  std::vector<Item> items_;
};

template <int Rank, Device D>
Tensor<float, Rank> on_host(const Parameter<float, Rank, D>& parameter) {
  return to_device(contiguous(value_of(parameter)), Cpu{});
}

inline void write_text(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

/// Calls `add(name, tensor, is_conv1d)` for all tensors of a GPT, with LoRA's changes in c_attn.
template <Device D>
void for_each_gpt2_tensor(nn::GPT<D>& model, const auto& add) {
  const NoGrad no_grad;
  const auto layer = [&](const std::string& name, const auto& of) {
    add(name + ".weight", on_host(of.weight));
    if constexpr (requires { of.bias; })
      if (of.bias) add(name + ".bias", on_host(of.bias));
  };
  const auto conv1d = [&](const std::string& name, const Tensor<float, 2>& weight, const auto& bias) {
    add(name + ".weight", transpose(weight, 0, 1));
    add(name + ".bias", on_host(bias));
  };
  layer("transformer.wte", model.wte);
  layer("transformer.wpe", model.wpe);
  for (std::size_t i = 0; i < model.h.size(); ++i) {
    auto& block = model.h[i];
    const auto name = cat("transformer.h.", i);
    auto c_attn = on_host(block.attn.c_attn.weight);
    if (const auto& lora = block.attn.c_attn.lora)
      c_attn = c_attn + matmul(on_host(lora->lora_B), on_host(lora->lora_A)) * lora->scale();
    layer(name + ".ln_1", block.ln_1);
    conv1d(name + ".attn.c_attn", c_attn, block.attn.c_attn.bias);
    conv1d(name + ".attn.c_proj", on_host(block.attn.c_proj.weight), block.attn.c_proj.bias);
    layer(name + ".ln_2", block.ln_2);
    conv1d(name + ".mlp.c_fc", on_host(block.mlp.c_fc.weight), block.mlp.c_fc.bias);
    conv1d(name + ".mlp.c_proj", on_host(block.mlp.c_proj.weight), block.mlp.c_proj.bias);
  }
  layer("transformer.ln_f", model.ln_f);
  if (model.lm_head.weight.shared() != model.wte.weight.shared()) layer("lm_head", model.lm_head);
}

}  // namespace detail

/// The sizes and settings in a folder's config.json; dropout is its resid_pdrop. Throws FileError if it can't be read,
/// and for another model than GPT-2 or a setting that nn::GPT does not have: the message names it.
inline nn::GPTOptions gpt2_options(const std::string& folder) {
  using json = nlohmann::json;
  const auto config = detail::gpt2_config(folder);
  const auto who = cat("loading ", printable(folder + "/config.json", 4096));
  const auto value = [&]<class T>(const char* name, T otherwise) -> T {
    const auto found = config.find(name);
    if (found == config.end() || found->is_null()) return otherwise;
    bool fits = false;
    if constexpr (std::is_same_v<T, bool>)
      fits = found->is_boolean();
    else if constexpr (std::is_same_v<T, std::string>)
      fits = found->is_string();
    else if constexpr (std::is_same_v<T, double>)
      fits = found->is_number() && found->template get<double>() >= 0;
    else
      fits = found->is_number_unsigned() && found->template get<std::uint64_t>() < (std::uint64_t{1} << 31);
    check<FileError>(fits, who, ": ", name, ": expected a value like ", json(otherwise).dump(), ", got ",
                     printable(found->dump()));
    return found->template get<T>();
  };
  const auto expect = [&]<class T>(const char* name, const T& expected) {
    const T got = value(name, expected);
    check<FileError>(got == expected, who, ": ", name, ": expected ", json(expected).dump(), ", got ",
                     printable(json(got).dump()));
  };
  expect("model_type", std::string("gpt2"));
  const auto activation = value("activation_function", std::string("gelu_new"));
  check<FileError>(activation == "gelu_new" || activation == "gelu_pytorch_tanh", who,
                   ": activation_function: expected gelu_new, got ", printable(activation));
  expect("scale_attn_weights", true);
  expect("scale_attn_by_inverse_layer_idx", false);
  expect("add_cross_attention", false);
  nn::GPTOptions options;
  for (const auto& [name, size] : {std::pair{"vocab_size", &options.vocab_size},
                                   {"n_positions", &options.n_positions},
                                   {"n_embd", &options.n_embd},
                                   {"n_layer", &options.n_layer},
                                   {"n_head", &options.n_head},
                                   {"n_inner", &options.n_inner}}) {
    *size = value(name, *size);
    check<FileError>(*size > 0 || name == std::string_view("n_inner"), who, ": ", name,
                     ": expected a positive number, got 0");
  }
  check<FileError>(options.n_embd % options.n_head == 0, who, ": n_head: expected a divisor of n_embd, ",
                   options.n_embd, ", got ", options.n_head);
  options.layer_norm_epsilon = value("layer_norm_epsilon", options.layer_norm_epsilon);
  options.initializer_range = value("initializer_range", options.initializer_range);
  options.tie_word_embeddings = value("tie_word_embeddings", true);
  options.dropout = value("resid_pdrop", 0.1);
  check<FileError>(options.dropout < 1, who, ": resid_pdrop: expected a probability below 1, got ", options.dropout);
  return options;
}

/// The tokens that end a text: config.json's eos_token_id, a number, a list or null; GPT-2's 50256 if it has none.
inline std::vector<std::int64_t> gpt2_end_tokens(const std::string& folder) {
  const auto config = detail::gpt2_config(folder);
  const auto found = config.find("eos_token_id");
  if (found == config.end()) return {50256};
  if (found->is_null()) return {};
  std::vector<std::int64_t> out;
  for (const auto& token : found->is_array() ? *found : nlohmann::json::array({*found})) {
    check<FileError>(token.is_number_unsigned(), "loading ", printable(folder + "/config.json", 4096),
                     ": eos_token_id: expected a token, got ", printable(token.dump()));
    out.push_back(token.get<std::int64_t>());
  }
  return out;
}

/// Fills a GPT, or a policy's net of one, from a folder: model.safetensors, or the files that
/// model.safetensors.index.json names. LoRA's matrices keep their values. Throws as `load` does.
template <class Model>
void load_gpt2(Model& model, const std::string& folder) {
  const auto index = folder + "/model.safetensors.index.json";
  const bool one = std::filesystem::exists(folder + "/model.safetensors");
  const auto path = one || !std::filesystem::exists(index) ? folder + "/model.safetensors" : index;
  const auto report = load(model, path,
                           {.strict = false,
                            .rename =
                                [](std::string_view name) {
                                  if (name.starts_with("transformer.")) name.remove_prefix(12);
                                  // Older files have the causal mask, too.
                                  const bool is_mask =
                                      name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
                                  return is_mask ? std::string() : std::string(name);
                                },
                            .transposed = detail::is_conv1d});
  auto rest = report;
  std::erase_if(rest.missing, [](const std::string& name) { return name.find(".lora_") != name.npos; });
  check<FileError>(rest.complete(), "loading ", printable(path, 4096), ": the file doesn't fit the model; ", rest);
}

/// Writes a GPT's weights to `to` in `transformers`' form, with LoRA's changes in them, beside copies of the
/// config.json, tokenizer.json and such of the folder `from`. If the model has LoRA, `to`/adapter has its matrices in
/// PEFT's form. One process calls it, with the whole model: `net.gathered([&](auto& model) { if (run.is_main()) ...
/// })`. Throws FileError.
template <Device D>
void save_gpt2(nn::GPT<D>& model, const std::string& from, const std::string& to) {
  auto config = detail::gpt2_config(from);
  std::error_code failed;
  std::filesystem::create_directories(to, failed);
  check<FileError>(!failed, "saving ", printable(to, 4096), ": making the folder failed: ", failed.message());
  detail::NamedTensors tensors;
  detail::for_each_gpt2_tensor(model, [&](const std::string& name, const auto& tensor) { tensors.add(name, tensor); });
  tensors.write(to + "/model.safetensors");
  config.erase("torch_dtype");
  config["dtype"] = "float32";
  detail::write_text(to + "/config.json", config.dump(2) + "\n");
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                           "special_tokens_map.json", "vocab.json", "merges.txt"})
    if (const auto path = from + "/" + name; std::filesystem::exists(path))
      detail::write_text(to + "/" + name, data::read_text(path));
  if (model.h.size() == 0 || !model.h[0].attn.c_attn.lora) return;
  std::filesystem::create_directories(to + "/adapter", failed);
  check<FileError>(!failed, "saving ", printable(to, 4096), "/adapter: making the folder failed: ", failed.message());
  detail::NamedTensors adapter;
  for (std::size_t i = 0; i < model.h.size(); ++i) {
    const auto& lora = *model.h[i].attn.c_attn.lora;
    const auto name = cat("base_model.model.transformer.h.", i, ".attn.c_attn.");
    adapter.add(name + "lora_A.weight", detail::on_host(lora.lora_A));
    adapter.add(name + "lora_B.weight", detail::on_host(lora.lora_B));
  }
  adapter.write(to + "/adapter/adapter_model.safetensors");
  const auto& lora = *model.h[0].attn.c_attn.lora;
  const auto rank = lora.lora_A.shape()[0];
  const nlohmann::json facts{{"peft_type", "LORA"},
                             {"task_type", "CAUSAL_LM"},
                             {"base_model_name_or_path", from},
                             {"r", rank},
                             {"lora_alpha", lora.scale() * static_cast<double>(rank)},
                             {"lora_dropout", 0.0},
                             {"bias", "none"},
                             {"fan_in_fan_out", true},
                             {"target_modules", {"c_attn"}}};
  detail::write_text(to + "/adapter/adapter_config.json", facts.dump(2) + "\n");
}

}  // namespace chorus::io
