// Attention and stacks of matrix products, as on the CPU; and how many calls a stream is given for them.
#include <chorus/nn/attention.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/attention_packed.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/shape.hpp>
#include <cmath>
#include <memory>
#include <span>
#include <tuple>

#include "../unit/message_of.hpp"
#include "compare.hpp"

namespace attention_gpu_test {

using namespace chorus;
using kernels::Trans;

// A stack whose matrices are apart by more than their sizes.
template <class T>
void stacks(Trans ta, Trans tb, Index count, Index gap, bool accumulate) {
  CAPTURE(static_cast<int>(ta), static_cast<int>(tb), count, gap, accumulate);
  constexpr Index m = 3, n = 4, k = 5;
  const kernels::GemmStack stack{count, m * k + gap, k * n + gap, m * n + gap};
  const auto body = [&](auto device, const T* a, const T* b, T* c) {
    kernels::gemm_stack(device, stack, ta, tb, m, n, k, a, ta == Trans::no ? k : m, b, tb == Trans::no ? n : k, c, n,
                  accumulate);
  };
  compare(near<T> * 10, body, numbers<T>(count * stack.a, 1), numbers<T>(count * stack.b, 2),
          numbers<T>(count * stack.c, 3));
}

TEST_CASE("stacks of matrix products on a GPU") {
  if (!gpu_present()) return;
  for (const auto& [ta, tb] : {std::pair(Trans::no, Trans::no), std::pair(Trans::no, Trans::yes),
                               std::pair(Trans::yes, Trans::no), std::pair(Trans::yes, Trans::yes)}) {
    stacks<float>(ta, tb, 6, 4, false);
    stacks<bf16>(ta, tb, 6, 1, true);
  }
  stacks<double>(Trans::no, Trans::yes, 6, 0, true);
  stacks<float>(Trans::yes, Trans::no, 6, 1, true);  // the first matrix alone is aligned
  stacks<float>(Trans::no, Trans::no, 70'001, 0, false);
}

// The result of `attention(q, k, v)`, and its gradients by the three.
template <class T, class D, class Attention>
auto results(D device, const Attention& attention) {
  const auto leaf = [&](const Shape<4>& shape, unsigned seed) {
    return Variable<T, 4, D>(Tensor<T, 4, D>::from(::numbers<T>(numel(shape), seed), shape, device), true);
  };
  const auto q = leaf({2, 3, 6, 8}, 1), k = leaf({2, 3, 7, 8}, 2), v = leaf({2, 3, 7, 4}, 3);
  const auto y = attention(q, k, v);
  y.backward(Tensor<T, 4, D>::from(::numbers<T>(y.value().numel(), 4), y.value().shape(), device));
  return std::array{y.value().to_vector(), q.grad().to_vector(), k.grad().to_vector(), v.grad().to_vector()};
}

template <class T, class Attention>
void as_on_the_cpu(const Attention& attention) {
  const auto expected = results<T>(Cpu{}, attention), actual = results<T>(Cuda{}, attention);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i);
    CHECK(error(actual[i], expected[i]) <= near<T> * (sizeof(T) == 2 ? 2 : 1));
  }
}

template <class T>
void attentions() {
  as_on_the_cpu<T>([](const auto&... in) { return scaled_dot_product_attention(in...); });
  as_on_the_cpu<T>([](const auto&... in) { return scaled_dot_product_attention(in..., true); });
}

// The most scores in memory while it lives: none, as blocks have it, or those of a few heads.
struct ScoresLimit {
  explicit ScoresLimit(std::size_t bytes) : before(kernels::attention_scores_limit().exchange(bytes)) {}
  ~ScoresLimit() { kernels::attention_scores_limit() = before; }
  std::size_t before;
};
constexpr std::size_t no_limit = std::size_t{1} << 30;

void all_attentions() {
  attentions<float>();
  attentions<double>();
  attentions<bf16>();
  as_on_the_cpu<float>([](const auto& q, const auto& k, const auto& v) {
    const auto device = q.device();
    using D = std::remove_const_t<decltype(device)>;
    std::vector<float> added(42);
    for (std::size_t i = 0; i < added.size(); ++i) added[i] = i < 7 || i % 5 == 0 ? -INFINITY : 1 / (1 + float(i));
    const auto mask = Tensor<float, 2, D>::from(added, {6, 7}, device);  // the first query sees nothing
    return scaled_dot_product_attention(q, k, v, mask, {.causal = true});
  });
  as_on_the_cpu<float>([](const auto& q, const auto& k, const auto& v) {
    const auto device = q.device();
    using D = std::remove_const_t<decltype(device)>;
    const bool seen[] = {true, false, false, true, true, false, true};
    return scaled_dot_product_attention(q, k, v, Tensor<bool, 2, D>::from(seen, {1, 7}, device));
  });
}

TEST_CASE("attention on a GPU") {
  if (!gpu_present()) return;
  all_attentions();
}

// Several tiles along every axis, none of them full.
template <class T>
void in_tiles(bool causal, double dropout, bool masked) {
  CAPTURE(sizeof(T), causal, dropout, masked);
  kernels::AttentionShape s{.samples = 2, .heads = 1, .queries = 70, .keys = 131, .features = 19, .values = 67,
                            .scale = 0.3, .causal = causal, .dropout = dropout};
  s.key = {.seed = 5, .step = 7, .operation = 3, .first_sample = 11};
  s.mask_pitch = s.queries * s.keys;
  const Index rows = s.batch() * s.queries, columns = s.batch() * s.keys;
  const auto body = [&](auto device, const T* q, const T* k, const T* v, const T* mask, T* y, T* log_sums, const T* dy,
                        T* dq, T* dk, T* dv) {
    if (!masked) mask = nullptr;
    kernels::attention_forward(device, s, q, k, v, mask, y, log_sums);
    kernels::attention_backward(device, s, q, k, v, mask, y, log_sums, dy, dq, dk, dv);
  };
  auto mask = numbers<T>(rows * s.keys, 4);
  std::fill_n(mask.begin(), s.keys, -std::numeric_limits<T>::infinity());  // the first query sees nothing
  compare(near<T> * 10, body, numbers<T>(rows * s.features, 1), numbers<T>(columns * s.features, 2),
          numbers<T>(columns * s.values, 3), mask, numbers<T>(rows * s.values, 5), numbers<T>(rows, 6),
          numbers<T>(rows * s.values, 7), numbers<T>(rows * s.features, 8), numbers<T>(columns * s.features, 9),
          numbers<T>(columns * s.values, 10));
}

TEST_CASE("attention by blocks on a GPU") {
  if (!gpu_present()) return;
  const ScoresLimit by_blocks(0);
  all_attentions();
  in_tiles<float>(true, 0, false);
  in_tiles<float>(false, 0.25, true);
  in_tiles<double>(true, 0.25, true);
  const kernels::AttentionShape no_keys{
      .samples = 1, .heads = 1, .queries = 70, .keys = 0, .features = 3, .values = 4, .scale = 1};
  const auto zeros = [&](auto device, const float* q, float* y, float* log_sums) {
    const float* const none = nullptr;
    kernels::attention_forward(device, no_keys, q, none, none, none, y, log_sums);
  };
  compare(0, zeros, numbers<float>(210, 1), numbers<float>(280, 2), std::vector<float>(70));
}

TEST_CASE("attention by stacks on a GPU") {
  if (!gpu_present()) return;
  {
    const ScoresLimit two_heads(400);  // of floats; one of doubles, four of bf16
    all_attentions();
  }
  for (const std::size_t limit : {std::size_t{100'000}, no_limit}) {  // one head, or both
    const ScoresLimit heads(limit);
    in_tiles<float>(true, 0, false);
    in_tiles<float>(false, 0.25, true);
    in_tiles<double>(true, 0.25, true);
  }
}

TEST_CASE("attention by stacks: its stacks are few, and even") {
  const auto stacks = [](Index samples, Index heads, Index queries, bool packed) {
    const kernels::AttentionShape s{.samples = samples, .heads = heads, .queries = queries, .keys = queries,
                                    .features = 64, .values = 64, .scale = 1};
    const auto at = packed ? kernels::AttentionPitches::heads_inside(s) : kernels::AttentionPitches::dense(s);
    const auto all = kernels::cuda::AttentionStacks::of<bf16>(s, at);
    std::vector<int> seen(static_cast<std::size_t>(s.batch()));
    Index count = 0;
    all([&](const kernels::cuda::AttentionStack& stack) {
      ++count;
      CHECK(stack.count <= all.each());
      for (Index i = 0; i < stack.count; ++i) ++seen[static_cast<std::size_t>(stack.matrix(heads, i))];
    });
    CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
    return std::pair(count, all.each());
  };
  using Stacks = std::pair<Index, Index>;
  CHECK(stacks(64, 12, 1024, true) == Stacks(64, 12));     // a sample each
  CHECK(stacks(1024, 12, 128, true) == Stacks(24, 512));   // half of the samples, a head each
  CHECK(stacks(4, 32, 1024, true) == Stacks(12, 11));      // a third of a sample's heads
  CHECK(stacks(4, 32, 1024, false) == Stacks(11, 12));
  CHECK(stacks(2, 3, 8192, true) == Stacks(6, 1));
}

TEST_CASE("attention's limit in the environment") {
  const auto limit = [](const char* text) {
    setenv("CHORUS_CUDA_ATTENTION_MIB", text, 1);
    return kernels::detail::scores_limit_at_first();
  };
  CHECK(limit("") == std::size_t{256} << 20);
  CHECK(limit("0") == 0);
  CHECK(limit("1000") == std::size_t{1000} << 20);
  for (const char* wrong : {"-1", "1g", "1048577", "99999999999999999999"})
    CHECK(message_of<UsageError>([&] { limit(wrong); }) ==
          cat("environment variable CHORUS_CUDA_ATTENTION_MIB: expected a number of MiB from 0 to 1048576, got '", wrong,
              "'"));
  unsetenv("CHORUS_CUDA_ATTENTION_MIB");
}

// The result of attention of packed queries, keys and values, in which gradients of another use lie already, or not.
template <class T, class D>
auto packed_results(D device, const AttentionOptions& options, bool used_before,
                    [[maybe_unused]] std::size_t* launches = nullptr) {
  manual_seed(8);
  const Shape<5> shape{2, 7, 3, 3, 5};
  const Variable<T, 5, D> leaf(Tensor<T, 5, D>::from(::numbers<T>(numel(shape), 1), shape, device), true);
  const auto qkv = leaf + leaf;
#ifndef __NVCC__
  const std::size_t before = emulation::counters().launches;
#endif
  const auto y = scaled_dot_product_attention_packed(qkv, options);
  const auto dy = Tensor<T, 4, D>::from(::numbers<T>(y.numel(), 2), y.shape(), device);
  const auto loss = used_before ? sum(y * dy) + sum(qkv * qkv) : sum(y * dy);
  loss.backward();
#ifndef __NVCC__
  if (launches != nullptr) *launches = emulation::counters().launches - before;
#endif
  return std::array{to<float>(contiguous(y.value())).to_vector(), to<float>(leaf.grad()).to_vector()};
}

TEST_CASE("attention of packed queries, keys and values") {
  if (!gpu_present()) return;
  // Blocks; stacks of one head, of a head of both samples, and of a sample's three; all at once.
  for (const std::size_t limit : {std::size_t{0}, std::size_t{250}, std::size_t{400}, std::size_t{600}, no_limit})
    for (const bool used_before : {false, true})
      for (const double dropout : {0.0, 0.3}) {
        const ScoresLimit limited(limit);
        CAPTURE(limit, used_before, dropout);
        const AttentionOptions options{.causal = dropout == 0, .dropout = dropout};
        const auto expected = packed_results<float>(Cpu{}, options, used_before),
                   actual = packed_results<float>(Cuda{}, options, used_before);
        for (std::size_t i = 0; i < 2; ++i) CHECK(error(actual[i], expected[i]) <= 1e-5);
        const auto narrow = packed_results<bf16>(Cuda{}, options, used_before);
        for (std::size_t i = 0; i < 2; ++i) CHECK(error(narrow[i], expected[i]) <= 1e-1);
      }
#ifndef __NVCC__
  const auto launches = [](std::size_t limit) {
    const ScoresLimit limited(limit);
    std::size_t count = 0;
    packed_results<float>(Cuda{}, {.causal = true}, false, &count);
    return count;
  };
  // Forward one, and back the dots and two kernels; the others are the loss's, and of the sum that gave qkv.
  CHECK(launches(0) <= 11);
  // Each of two stacks has a kernel and two products forward, and one and five back: nothing is copied.
  CHECK(launches(600) <= 26);
#endif
  const auto wrong = Tensor<float, 5, Cuda>::ones({1, 2, 2, 1, 4}, Cuda{});
  CHECK(message_of<ShapeError>([&] { scaled_dot_product_attention_packed(wrong); }) ==
        "scaled_dot_product_attention_packed: expected [batch, length, 3, heads, features], got [1, 2, 2, 1, 4]");
  const auto right = Tensor<float, 5, Cuda>::ones({1, 2, 3, 1, 4}, Cuda{});
  CHECK(message_of<UsageError>([&] { scaled_dot_product_attention_packed(right, {.dropout = 1}); }) ==
        "scaled_dot_product_attention_packed: expected a dropout probability in [0, 1), got 1");
}

// What `attend(layer, x, memory)` gives, and its gradients.
template <class D, class Attend>
auto layer_results(D device, bool cross, const Attend& attend, [[maybe_unused]] std::size_t* launches = nullptr) {
  manual_seed(3);
  nn::MultiheadAttention<D, float> layer(12, 3);
  layer.in_proj_bias.assign(Tensor<float, 1, D>::from(::numbers<float>(36, 1), {36}, device));
  const auto leaf = [&](const Shape<3>& shape, unsigned seed) {
    return Variable<float, 3, D>(Tensor<float, 3, D>::from(::numbers<float>(numel(shape), seed), shape, device), true);
  };
  const auto x = leaf({2, 7, 12}, 2), memory = leaf({2, 5, 12}, 3);
  const auto dy = Tensor<float, 3, D>::from(::numbers<float>(168, 4), {2, 7, 12}, device);
#ifndef __NVCC__
  const std::size_t before = emulation::counters().launches;
#endif
  const auto y = attend(layer, x, memory);
  y.backward(dy);
#ifndef __NVCC__
  if (launches != nullptr) *launches = emulation::counters().launches - before;
#endif
  std::vector all{y.value().to_vector(), x.grad().to_vector(), layer.in_proj_weight.grad().to_vector(),
                  layer.in_proj_bias.grad().to_vector()};
  if (cross) all.push_back(memory.grad().to_vector());
  return all;
}

template <class Attend>
void layer_as_on_the_cpu(bool cross, const Attend& attend) {
  for (const std::size_t limit : {std::size_t{0}, std::size_t{250}, std::size_t{400}, std::size_t{600}, no_limit}) {
    const ScoresLimit limited(limit);
    CAPTURE(cross, limit);
    const auto expected = layer_results(Cpu{}, cross, attend), actual = layer_results(Cuda{}, cross, attend);
    for (std::size_t i = 0; i < expected.size(); ++i) CHECK(error(actual[i], expected[i]) <= 1e-5);
  }
}

// True but for some keys of the third head.
template <class D>
Tensor<bool, 4, D> third_head_sees_less(D device, Index keys) {
  std::unique_ptr<bool[]> seen(new bool[static_cast<std::size_t>(21 * keys)]);
  for (Index i = 0; i < 21 * keys; ++i) seen[static_cast<std::size_t>(i)] = i < 14 * keys || i % keys == 0 || i % 3 == 0;
  return Tensor<bool, 4, D>::from(std::span<const bool>(seen.get(), static_cast<std::size_t>(21 * keys)),
                                  {1, 3, 7, keys}, device);
}

TEST_CASE("a layer of attention on a GPU") {
  if (!gpu_present()) return;
  const auto causal = [](const auto& layer, const auto& x, const auto&) { return layer(x, x, x, true); };
  layer_as_on_the_cpu(false, causal);
  layer_as_on_the_cpu(false, [](const auto& layer, const auto& x, const auto&) {
    return layer(x, x, x, third_head_sees_less(x.device(), 7));
  });
  layer_as_on_the_cpu(true, [](const auto& layer, const auto& x, const auto& m) { return layer(x, m, m); });
  layer_as_on_the_cpu(true, [](const auto& layer, const auto& x, const auto& m) {
    return layer(x, m, m, third_head_sees_less(x.device(), 5));
  });
#ifndef __NVCC__
  const ScoresLimit by_blocks(0);
  std::size_t launches = 0;
  layer_results(Cuda{}, false, causal, &launches);
  CHECK(launches <= 4);  // attention forward, and back the dots and two kernels: nothing is copied
#endif
}

TEST_CASE("attention has no memory for all scores") {
  if (!gpu_present()) return;
  constexpr Index samples = 4, length = 512;
  constexpr auto one = length * length * static_cast<std::int64_t>(sizeof(float));  // bytes of a head's scores
  const auto peak = [&](std::size_t limit) {
    const ScoresLimit limited(limit);
    const Cuda device{};
    const Variable<float, 3, Cuda> x(Tensor<float, 3, Cuda>::ones({samples, length, 4}, device), true);
    const auto dy = Tensor<float, 3, Cuda>::ones({samples, length, 4}, device);
    auto& memory = trace::detail::counters(trace_slot(device));
    const std::int64_t before = memory.total;
    memory.peak = before;
    scaled_dot_product_attention(x, x, x, true).backward(dy);
    return memory.peak - before;
  };
  CHECK(peak(0) < samples * one / 8);
  CHECK(peak(one) < 2 * one + samples * one / 8);  // scores and their gradients
}

TEST_CASE("what attention on a GPU hides has no say") {
  if (!gpu_present()) return;
  const Cuda device{};
  const auto q = Tensor<float, 2, Cuda>::ones({2, 1}, device);
  const auto k = Tensor<float, 2, Cuda>::from({1, NAN}, {2, 1}, device);
  const auto v = Tensor<float, 2, Cuda>::from({3, 4}, {2, 1}, device);
  CHECK(scaled_dot_product_attention(q, k, v, true).to_vector()[0] == 3);
}

TEST_CASE("attention's calls on a stream don't grow with batch and heads") {
  if (!gpu_present()) return;
#ifndef __NVCC__
  // As in tests/benchmarks/models.hpp's GptBlock; there are 4 of them.
  const auto calls = [](Index batch, Index heads) {
    constexpr Index context = 6, head = 4;
    const Cuda device{};
    const Variable<float, 3, Cuda> qkv(Tensor<float, 3, Cuda>::ones({batch, context, 3 * heads * head}, device), true);
    const auto dy = Tensor<float, 3, Cuda>::ones({batch, context, heads * head}, device);
    const auto stream = cuda::compute_stream(device);
    const auto step = [&] {
      const auto parts = permute(reshape(qkv, Shape<5>{batch, context, 3, heads, head}), {2, 0, 3, 1, 4});
      const auto part = [&](Index i) {
        return reshape(slice(parts, 0, i, i + 1), Shape<4>{batch, heads, context, head});
      };
      const auto seen = scaled_dot_product_attention(part(0), part(1), part(2), true);
      reshape(permute(seen, {0, 2, 1, 3}), Shape<3>{batch, context, heads * head}).backward(dy);
    };
    step();  // masks and the like are made once
    const std::size_t before = stream->given;
    step();
    return stream->given - before;
  };
  CHECK(calls(16, 4) <= 16);
  CHECK(calls(16, 4) == calls(2, 2));
#endif
}

}  // namespace attention_gpu_test
