#pragma once
/// The reference models of the step benchmarks, and one training step of each.

#include <algorithm>
#include <chorus/chorus.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bench {

namespace ch = chorus;

struct Toy : ch::nn::Module {
  ch::nn::Conv2d<ch::Cpu> conv1{3, 6, {.kernel = 5}}, conv2{6, 16, {.kernel = 5}};
  ch::nn::Linear<ch::Cpu> fc1{400, 120}, fc2{120, 84}, fc3{84, 10};
  CHORUS_MODULE(Toy, conv1, conv2, fc1, fc2, fc3)
  auto forward(const auto& images) const {
    auto x = ch::max_pool2d(ch::relu(conv1(images)), 2);
    x = ch::max_pool2d(ch::relu(conv2(x)), 2);
    return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(x))))));
  }
};

struct Mlp : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> fc1{784, 512}, fc2{512, 512}, fc3{512, 10};
  CHORUS_MODULE(Mlp, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(ch::relu(fc2(ch::relu(fc1(x))))); }
};

struct Block : ch::nn::Module {
  ch::nn::Conv2d<ch::Cpu> conv1, conv2;
  ch::nn::BatchNorm2d<ch::Cpu> bn1, bn2;
  std::optional<ch::nn::Conv2d<ch::Cpu>> shortcut_conv;
  std::optional<ch::nn::BatchNorm2d<ch::Cpu>> shortcut_bn;
  CHORUS_MODULE(Block, conv1, bn1, conv2, bn2, shortcut_conv, shortcut_bn)
  Block(ch::Index in, ch::Index out, ch::Index stride)
      : conv1{in, out, {.kernel = 3, .stride = stride, .padding = 1, .bias = false}},
        conv2{out, out, {.kernel = 3, .padding = 1, .bias = false}},
        bn1{out},
        bn2{out} {
    if (stride == 1 && in == out) return;
    shortcut_conv.emplace(in, out, ch::nn::Conv2dOptions{.kernel = 1, .stride = stride, .bias = false});
    shortcut_bn.emplace(out);
  }
  auto forward(const auto& x) const {
    const auto y = bn2(conv2(ch::relu(bn1(conv1(x)))));
    return shortcut_conv ? ch::relu(y + (*shortcut_bn)((*shortcut_conv)(x))) : ch::relu(y + x);
  }
};

/// The CIFAR form: a 3 x 3 stem without pooling; 64, 128, 256, 512 channels, two basic blocks each.
struct ResNet18 : ch::nn::Module {
  ch::nn::Conv2d<ch::Cpu> stem{3, 64, {.kernel = 3, .padding = 1, .bias = false}};
  ch::nn::BatchNorm2d<ch::Cpu> bn{64};
  ch::nn::ModuleList<Block> blocks;
  ch::nn::Linear<ch::Cpu> head{512, 10};
  CHORUS_MODULE(ResNet18, stem, bn, blocks, head)
  ResNet18() {
    ch::Index in = 64;
    for (const ch::Index out : {64, 128, 256, 512}) {
      const ch::Index stride = out == 64 ? 1 : 2;
      blocks.push_back(Block(in, out, stride));
      blocks.push_back(Block(out, out, 1));
      in = out;
    }
  }
  auto forward(const auto& images) const {
    auto x = ch::relu(bn(stem(images)));
    for (const auto& block : blocks) x = block(x);
    const auto& shape = x.shape();
    return head(ch::mean(ch::reshape(x, ch::Shape<3>{shape[0], shape[1], shape[2] * shape[3]}), 2));
  }
};

struct GptBlock : ch::nn::Module {
  static constexpr ch::Index heads = 4;
  ch::nn::LayerNorm<ch::Cpu> norm1, norm2;
  ch::nn::Linear<ch::Cpu> qkv, proj, fc1, fc2;
  CHORUS_MODULE(GptBlock, norm1, qkv, proj, norm2, fc1, fc2)
  explicit GptBlock(ch::Index width)
      : norm1{width},
        norm2{width},
        qkv{width, 3 * width},
        proj{width, width},
        fc1{width, 4 * width},
        fc2{4 * width, width} {}
  auto forward(const auto& x) const {
    const auto [batch, context, width] = x.shape();
    const auto parts =
        ch::permute(ch::reshape(qkv(norm1(x)), ch::Shape<5>{batch, context, 3, heads, width / heads}), {2, 0, 3, 1, 4});
    const auto part = [&, b = batch, c = context, w = width](ch::Index i) {
      return ch::reshape(ch::slice(parts, 0, i, i + 1), ch::Shape<4>{b, heads, c, w / heads});
    };
    const auto seen = ch::scaled_dot_product_attention(part(0), part(1), part(2), true);
    const auto y = x + proj(ch::reshape(ch::permute(seen, {0, 2, 1, 3}), ch::Shape<3>{batch, context, width}));
    return y + fc2(ch::gelu(fc1(norm2(y))));
  }
};

/// 65 tokens, width 128, 4 heads, 4 blocks, context 128.
struct Gpt : ch::nn::Module {
  ch::nn::Embedding<ch::Cpu> tokens{65, 128}, places{128, 128};
  ch::nn::ModuleList<GptBlock> blocks;
  ch::nn::LayerNorm<ch::Cpu> norm{128};
  ch::nn::Linear<ch::Cpu> head{128, 65};
  CHORUS_MODULE(Gpt, tokens, places, blocks, norm, head)
  Gpt() {
    for (int i = 0; i < 4; ++i) blocks.push_back(GptBlock(128));
  }
  auto forward(const ch::Tensor<std::int64_t, 2>& text) const {
    const auto [batch, context] = text.shape();
    auto place = ch::Tensor<std::int64_t, 1>::empty({context});
    for (ch::Index i = 0; i < place.numel(); ++i) place(i) = i;
    auto x = tokens(text) + places(place);
    for (const auto& block : blocks) x = block(x);
    return ch::reshape(head(norm(x)), ch::Shape<2>{batch * context, 65});
  }
};

/// N(0, 1) numbers.
template <int Rank>
ch::Tensor<float, Rank> normal(const ch::Shape<Rank>& shape) {
  auto out = ch::Tensor<float, Rank>::empty(shape);
  ch::kernels::fill_normal(ch::Cpu{}, 0, 1000, 0, out.numel(), out.data(), 0.0f, 1.0f);
  return out;
}

/// Uniform labels in [0, classes).
inline ch::Tensor<std::int64_t, 1> labels(ch::Index count, int classes) {
  auto out = ch::Tensor<std::int64_t, 1>::empty({count});
  for (ch::Index i = 0; i < count; ++i)
    out(i) = ch::philox(1, {static_cast<std::uint32_t>(i), 0, 0, 0})[0] % static_cast<std::uint32_t>(classes);
  return out;
}

/// Milliseconds of the median of up to `most` steps, within about `seconds`, after three to warm up.
template <class Step>
double median_ms(const Step& step, std::size_t most, double seconds) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 3; ++i) step();
  std::vector<double> times;
  const auto begin = Clock::now();
  while (times.size() < most && std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    const auto start = Clock::now();
    step();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// One training step on a fixed batch: zero_grad, forward, cross entropy, backward, optimizer step.
template <class Net, class Images>
auto make_step(Net& net, ch::optim::Optimizer<ch::Cpu>& optimizer, const Images& images,
               const ch::Tensor<std::int64_t, 1>& targets) {
  return [&net, &optimizer, images, targets] {
    optimizer.zero_grad();
    const auto loss = ch::cross_entropy(net(images), targets);
    loss.backward();
    optimizer.step();
  };
}

/// Calls `run(name, Model, images, targets, optimizer)` for the cases that were asked for; returns false for an unknown
/// one.
template <class Run>
bool for_each_case(std::span<const std::string_view> wanted, const Run& run) {
  const auto sgd = [](auto parameters) -> std::unique_ptr<ch::optim::Optimizer<ch::Cpu>> {
    return std::make_unique<ch::optim::Sgd<ch::Cpu>>(parameters, ch::optim::SgdOptions{.lr = 0.01, .momentum = 0.9});
  };
  const auto adam = [](auto parameters) -> std::unique_ptr<ch::optim::Optimizer<ch::Cpu>> {
    return std::make_unique<ch::optim::Adam<ch::Cpu>>(parameters, ch::optim::AdamOptions{.lr = 1e-3});
  };
  constexpr std::string_view known[] = {"toy_b16", "toy_b128", "mlp_b64", "resnet18_b32", "gpt_b16"};
  for (const auto name : wanted)
    if (std::find(std::begin(known), std::end(known), name) == std::end(known)) {
      std::fprintf(stderr, "unknown case '%.*s'; known are:", static_cast<int>(name.size()), name.data());
      for (const auto k : known) std::fprintf(stderr, " %.*s", static_cast<int>(k.size()), k.data());
      std::fprintf(stderr, "\n");
      return false;
    }
  const auto asked = [&](std::string_view name) {
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  if (asked("toy_b16"))
    run(
        "toy_b16", [] { return Toy{}; }, normal<4>({16, 3, 32, 32}), labels(16, 10), sgd);
  if (asked("toy_b128"))
    run(
        "toy_b128", [] { return Toy{}; }, normal<4>({128, 3, 32, 32}), labels(128, 10), sgd);
  if (asked("mlp_b64"))
    run(
        "mlp_b64", [] { return Mlp{}; }, normal<2>({64, 784}), labels(64, 10), adam);
  if (asked("resnet18_b32"))
    run(
        "resnet18_b32", [] { return ResNet18{}; }, normal<4>({32, 3, 32, 32}), labels(32, 10), sgd);
  if (asked("gpt_b16"))
    run(
        "gpt_b16", [] { return Gpt{}; }, labels(16 * 128, 65).view(ch::Shape<2>{16, 128}), labels(16 * 128, 65),
        [](auto parameters) -> std::unique_ptr<ch::optim::Optimizer<ch::Cpu>> {
          return std::make_unique<ch::optim::AdamW<ch::Cpu>>(parameters,
                                                             ch::optim::AdamOptions{.lr = 1e-3, .weight_decay = 0.01});
        });
  return true;
}

}  // namespace bench
