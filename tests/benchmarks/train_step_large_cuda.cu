/// Times one training step of models of a GPU's size, in bf16: train_step_large_cuda [hash] [CASE ...]
/// gpt2_124m_b8_bf16 and gpt2_124m_b64_bf16 (context 1,024) and resnet50_b128_bf16 (images of 224 x 224). Lines, steps
/// and times are train_step_cuda's. attention_1024 and such: attention alone, forward and backward, of 12 causal heads
/// with 64 features and that many tokens; mode=stacks by products of stacks, mode=blocks by blockwise kernels. A case
/// that fails, for want of memory say, is named; the others run all the same.

#include <chorus/nn/mixed_precision.hpp>
#include <chorus/nn/models/resnet.hpp>
#include <chorus/ops/attention.hpp>

#include "cases.hpp"
#include "cuda_step.hpp"
#include "gpt2.hpp"

namespace ch = chorus;
using ch::Cuda;

namespace {

void time_gpt2(const char* name, ch::Index batch) {
  const bench::Gpt2Sizes sizes;
  const ch::Index count = batch * sizes.context;
  const auto text = bench::labels(count, static_cast<int>(sizes.vocabulary)).view(ch::Shape<2>{batch, sizes.context});
  bench::time_eager_and_graphs(name, ch::nn::MixedPrecision<bench::Gpt2<Cuda>>{bench::Gpt2<Cuda>(sizes)}, text,
                               bench::labels(count, static_cast<int>(sizes.vocabulary)),
                               bench::Optimizing<ch::optim::AdamW<Cuda>>{{.lr = 1e-4, .weight_decay = 0.01}});
}

void time_resnet50(const char* name, ch::Index batch) {
  using Model = ch::nn::ResNet50<Cuda>;
  bench::time_eager_and_graphs(name, ch::nn::MixedPrecision<Model>{Model{}},
                               bench::normal<4>({batch, 3, 224, 224}), bench::labels(batch, 1000),
                               bench::Optimizing<ch::optim::Sgd<Cuda>>{{.lr = 0.01, .momentum = 0.9}});
}

void time_attention(const char* name, ch::Index tokens) {
  const ch::Index batch = 16384 / tokens;
  const auto make = [&] {
    const auto numbers = bench::normal<4>({batch, 12, tokens, 64});
    auto narrow = ch::Tensor<ch::bf16, 4>::empty(numbers.shape());
    std::copy_n(numbers.data(), numbers.numel(), narrow.data());
    return ch::Variable<ch::bf16, 4, Cuda>(ch::to_device(narrow, Cuda{}), true);
  };
  const auto q = make(), k = make(), v = make();
  const auto ones = ch::Tensor<ch::bf16, 4, Cuda>::ones(q.value().shape());
  auto& scores_limit = ch::kernels::attention_scores_limit();
  const std::size_t before = scores_limit;
  for (const auto& [mode, limit] : {std::pair("stacks", std::size_t{1} << 40), std::pair("blocks", std::size_t{0})}) {
    scores_limit = limit;
    bench::time_step(name, mode, batch, [&] {
      for (const auto* x : {&q, &k, &v}) x->zero_grad();
      ch::scaled_dot_product_attention(q, k, v, true).backward(ones);
    });
  }
  scores_limit = before;
}

struct Case {
  const char* name;
  void (*time)(const char* name, ch::Index size);
  ch::Index size;  // of a batch; for attention, tokens
};
constexpr Case cases[] = {
    {"gpt2_124m_b8_bf16", time_gpt2, 8},      {"resnet50_b128_bf16", time_resnet50, 128},
    {"gpt2_124m_b64_bf16", time_gpt2, 64},    {"attention_1024", time_attention, 1024},
    {"attention_2048", time_attention, 2048}, {"attention_4096", time_attention, 4096},
};

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string_view> wanted(argv + 1, argv + argc);
  bench::take_hash_word(wanted);
  for (const auto name : wanted)
    if (std::none_of(std::begin(cases), std::end(cases), [&](const Case& c) { return c.name == name; })) {
      std::string known;
      for (const Case& c : cases) known += ch::cat(" ", c.name);
      std::fprintf(stderr, "unknown case '%s'; known are:%s\n", std::string(name).c_str(), known.c_str());
      return 2;
    }
  if (ch::cuda::device_count() == 0) {
    std::fprintf(stderr, "train_step_large_cuda: this machine has no CUDA device\n");
    return 77;
  }
  int failed = 0;
  for (const Case& c : cases) {
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), c.name) == wanted.end()) continue;
    try {
      c.time(c.name, c.size);
    } catch (const std::exception& error) {
      ++failed;
      std::fprintf(stderr, "train_step_large_cuda: %s: %s\n", c.name, error.what());
    }
  }
  return failed == 0 ? 0 : 1;
}
