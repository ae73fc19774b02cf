// Not a program, but what clang reads once for most of them: see CHORUS_PRECOMPILED. Whatever templates stand below are
// instantiated and compiled for all that link this file; nothing is ever called. It names what many tests need.

#if __has_include(<CLI/CLI.hpp>)
#include <CLI/CLI.hpp>
#endif
#include <catch.hpp>
#include <chorus/all.hpp>

namespace often_used {

namespace ch = chorus;

template <class T>
struct Layers : ch::nn::Module {
  ch::nn::Linear<ch::Cpu, T> first{4, 4}, last{4, 2};
  CHORUS_MODULE(Layers, first, last)
  auto forward(const auto& x) const { return last(ch::dropout(ch::tanh(ch::relu(first(x))), 0.5)); }
};

struct Images : ch::nn::Module {
  ch::nn::Conv2d<ch::Cpu> conv{3, 6, {.kernel = 5}};
  ch::nn::BatchNorm2d<ch::Cpu> norm{6};
  ch::nn::Linear<ch::Cpu> last{6, 2};
  CHORUS_MODULE(Images, conv, norm, last)
  auto forward(const auto& x) const { return last(ch::flatten(ch::max_pool2d(ch::relu(norm(conv(x))), 2))); }
};

template <class T, std::size_t Rank>
void operators(const ch::Shape<Rank>& shape) {
  const auto tensor = ch::clone(ch::Tensor<T, Rank>::zeros(shape));
  const ch::Variable<T, Rank> x(tensor, true), y(ch::Tensor<T, Rank>::from(tensor.to_vector(), shape), true);
  const auto z = ch::mean((x * y + x - y / 2) * T{2} + T{1}) + ch::sum(ch::square(ch::tanh(-x / y))) / 3 +
                 ch::sum(ch::sigmoid(ch::exp(x))) + ch::mse_loss(x, y.value());
  (z * 2).backward();
  y.backward(x.grad());
  CHECK(x.grad().to_vector() == y.value().to_vector());
  CHECK(x.value().shape() == shape);
  if constexpr (Rank > 0) {
    ch::sum(ch::reshape(x, ch::Shape<1>{-1})).backward();
    ch::sum(ch::reshape(x, ch::Shape<2>{1, -1})).backward();
    ch::mean(ch::softmax(x, -1)).backward();
  }
  if constexpr (Rank > 1) {
    ch::sum(ch::transpose(x + ch::Variable<T, 1>(ch::Tensor<T, 1>::zeros({2}), true), -1, -2)).backward();
  }
}

// Derivatives of derivatives.
template <std::size_t Rank>
void recorded(const ch::Shape<Rank>& shape) {
  const ch::GraphVariable<double, Rank> x(ch::Tensor<double, Rank>::zeros(shape), true);
  const auto y = ch::sum((x * x + x - x / 2) * 2 + 1) + ch::mean(ch::square(ch::tanh(-x)));
  const auto first = ch::grad(y, x, {.create_graph = true});
  ch::sum(first * x).backward();
}

template <class Net, class Optimizer>
void train(Net& net, Optimizer optimizer, const auto& x) {
  const auto labels = ch::Tensor<std::int64_t, 1>::zeros({x.size(0)});
  optimizer.zero_grad();
  const auto loss = ch::cross_entropy(net(x), labels);
  loss.backward();
  CHECK(ch::optim::clip_grad_norm(net.parameters(), 1) == Approx(1));
  optimizer.step();
  CHECK(loss.item() == Approx(1));
  for (const auto& parameter : net.parameters()) CHECK(parameter.name == "name");
}

template <class Model>
void policies(ch::Run& run, const auto& x) {
  ch::SingleDevice<Model> single{Model{}, run};
  train(single, ch::optim::Sgd{single.parameters(), {.lr = 0.1, .momentum = 0.9}}, x);
  ch::DataParallel<Model> dp{Model{}, run};
  train(dp, ch::optim::Adam{dp.parameters(), {.lr = 0.1}}, x);
  ch::DistributedDataParallel<Model> ddp{Model{}, run};
  train(ddp, ch::optim::AdamW{ddp.parameters(), {.lr = 0.1}}, x);
  ch::FullyShardedDataParallel<Model> fsdp{Model{}, run};
  train(fsdp, ch::optim::Sgd{fsdp.parameters(), {.lr = 0.1}}, x);
  ch::io::save(fsdp, "file");
  ch::io::load(fsdp, "file");
  ch::io::save(ddp, "file");
  ch::io::load(ddp, "file");
}

inline void all(ch::Run& run) {
  operators<float, 0>({});
  operators<float, 1>({2});
  operators<float, 2>({2, 2});
  operators<float, 3>({2, 2, 2});
  operators<float, 4>({2, 2, 2, 2});
  operators<double, 0>({});
  operators<double, 1>({2});
  operators<double, 2>({2, 2});
  operators<double, 3>({2, 2, 2});
  operators<double, 4>({2, 2, 2, 2});
  policies<Layers<float>>(run, ch::Tensor<float, 2>::zeros({2, 4}));
  policies<Layers<double>>(run, ch::Tensor<double, 2>::zeros({2, 4}));
  policies<Images>(run, ch::Tensor<float, 4>::zeros({2, 3, 6, 6}));
  recorded<0>({});
  recorded<1>({2});
  recorded<2>({2, 2});
  const ch::Variable<float, 4> heads(ch::Tensor<float, 4>::zeros({2, 2, 2, 2}), true);
  ch::sum(ch::scaled_dot_product_attention(heads, heads, heads, true)).backward();
  const std::string text;
  const std::size_t size = text.size();
  CHECK(size == 1);
  CHECK(size == text.size());
  CHECK(text == text);
  CHECK(text == "text");
  CHECK_FALSE(text.empty());
  CHECK_THROWS_WITH(run.seed(), Catch::Matchers::Contains("a") && Catch::Matchers::Contains("b"));
  CHECK_THAT(text, Catch::Matchers::Contains("a"));
}

}  // namespace often_used
