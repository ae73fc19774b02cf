/// Lesson 17: ranks that share the tokens of each sample. A sample is a picture, its rows are the tokens, and each row
/// is to be guessed from those before it. Every layer but attention treats a token by itself. For attention the keys and
/// values go round a ring: a rank meets each block once, and keeps for each query the largest score, the sum of the
/// exponentials and the sum of the values, so that no rank ever has all keys. Under a causal mask late tokens have more
/// work: a rank has a stretch from the front and one from the back.

#include <chorus/autograd/custom_function.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/parallel/sequence_parallel.hpp>

#include "toy.hpp"

constexpr ch::Index tokens = 24, width = 16;

struct Rows : ch::nn::Module {  // for the policy
  ch::nn::Linear<ch::Cpu> in{28, 3 * width}, out{width, 28};
  CHORUS_MODULE(Rows, in, out)
  auto forward(const auto& rows, const auto& next) const {
    const auto qkv = in(rows);
    const auto part = [&](ch::Index i) { return ch::slice(qkv, -1, i * width, (i + 1) * width); };
    return ch::mse_loss(out(ch::scaled_dot_product_attention(part(0), part(1), part(2), /*causal=*/true)), next);
  }
};
using Policy = ch::SequenceParallel<Rows>;

struct Ring {
  ch::comm::AnyCommunicator& ranks;
  std::vector<float> log_sums = {};

  std::vector<ch::Index> places(int rank) const {  // of 2n stretches the r-th and the r-th last
    const ch::Index stretch = tokens / (2 * ranks.size());
    std::vector<ch::Index> all;
    for (const ch::Index s : {ch::Index{rank}, 2 * ranks.size() - 1 - rank})
      for (ch::Index i = 0; i < stretch; ++i) all.push_back(s * stretch + i);
    return all;
  }
  ch::Tensor<float, 3> own(const ch::Tensor<float, 4>& images, ch::Index from) const {  // rows place + from
    const auto mine = places(ranks.rank());
    auto rows = ch::Tensor<float, 3>::empty({images.size(0), static_cast<ch::Index>(mine.size()), 28});
    for (ch::Index i = 0; i < rows.numel(); ++i)
      rows.data()[i] = images(i / 28 / rows.size(1), 0, mine[static_cast<std::size_t>(i / 28 % rows.size(1))] + from, i % 28);
    return rows;
  }
  void pass_on(std::vector<float>& block) const {  // to the next rank; gets the block of the one before
    const int n = ranks.size(), rank = ranks.rank(), next = (rank + 1) % n, before = (rank + n - 1) % n;
    if (n == 1) return;
    std::vector<float> arrives(block.size());
    const ch::comm::CollectiveOptions options{.traffic = Traffic::activations};
    if (rank % 2 == 0) ranks.send(std::span(block), next, options);  // if all sent first, all might wait for ever
    ranks.recv(std::span(arrives), before, options);
    if (rank % 2 == 1) ranks.send(std::span(block), next, options);
    block.swap(arrives);
  }
  /// f(b, i, j, score) for each query i and each key j that it sees, while the block of keys, values and their gradients
  /// goes round, [samples * tokens, 4 width]. After n hops it is home.
  std::vector<float> visit(const ch::Tensor<float, 3>& qkv, const auto& f) const {
    const ch::Index rows = qkv.size(0) * qkv.size(1), n = qkv.size(1);
    std::vector<float> block(static_cast<std::size_t>(rows * 4 * width));
    for (ch::Index r = 0; r < rows; ++r) std::copy_n(qkv.data() + (3 * r + 1) * width, 2 * width, &block[static_cast<std::size_t>(4 * r * width)]);
    const auto mine = places(ranks.rank());
    for (int hop = 0; hop < ranks.size(); ++hop, pass_on(block)) {
      const auto theirs = places((ranks.rank() - hop + ranks.size()) % ranks.size());
      for (ch::Index r = 0; r < rows; ++r)
        for (ch::Index j = 0; j < n; ++j) {
          if (theirs[static_cast<std::size_t>(j)] > mine[static_cast<std::size_t>(r % n)]) continue;
          float *key = &block[static_cast<std::size_t>((r / n * n + j) * 4 * width)], score = 0;
          for (ch::Index c = 0; c < width; ++c) score += qkv.data()[3 * r * width + c] * key[c] / std::sqrt(float{width});
          f(r, score, key);
        }
    }
    return block;
  }
  auto attention(const auto& qkv) {
    return ch::custom_function("ring_attention", [this](const auto& x) { return forward(x); },
                               [this](const auto& dy, const auto& x, const auto& y) { return backward(dy, x, y); }, qkv);
  }
  ch::Tensor<float, 3> forward(const ch::Tensor<float, 3>& qkv) {
    auto y = ch::Tensor<float, 3>::zeros({qkv.size(0), qkv.size(1), width});
    std::vector<float> most(static_cast<std::size_t>(y.numel() / width), -1e30f), total(most.size());
    visit(qkv, [&](ch::Index r, float score, const float* key) {
      const auto at = static_cast<std::size_t>(r);
      const float high = std::max(most[at], score), old = std::exp(most[at] - high), now = std::exp(score - high);
      total[at] = total[at] * old + now;
      for (ch::Index c = 0; c < width; ++c) y.data()[r * width + c] = y.data()[r * width + c] * old + now * key[width + c];
      most[at] = high;
    });
    for (ch::Index i = 0; i < y.numel(); ++i) y.data()[i] /= total[static_cast<std::size_t>(i / width)];
    log_sums.clear();
    for (std::size_t i = 0; i < most.size(); ++i) log_sums.push_back(most[i] + std::log(total[i]));
    return y;
  }
};
