/// Lesson 17: ranks that share the tokens of each sample: the rows of a picture, each guessed from those before it.
/// Only attention mixes tokens: keys and values go round a ring, and a rank keeps for each query the largest score and
/// the sums of exponentials and values. Late tokens see more keys: a rank has a front and a back stretch.

#include <chorus/autograd/custom_function.hpp>
#include <chorus/ops/attention.hpp>
#include <chorus/ops/indexing.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/parallel/sequence_parallel.hpp>

#include "toy.hpp"

using Values = ch::Tensor<float, 3>;
constexpr ch::Index tokens = 24, width = 16;
auto part(const auto& x, ch::Index i) { return ch::slice(x, -1, i * width, (i + 1) * width); }

struct Rows : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> in{28, 3 * width}, out{width, 28};
  CHORUS_MODULE(Rows, in, out)
  auto forward(const auto& rows, const auto& next) const {  // for the policy
    const auto x = in(rows);
    return ch::mse_loss(out(ch::scaled_dot_product_attention(part(x, 0), part(x, 1), part(x, 2), true)), next);
  }
};
using Policy = ch::SequenceParallel<Rows>;

ch::Tensor<std::int64_t, 1> places(int rank, int ranks) {  // of 2n stretches the r-th and the r-th last
  const ch::Index stretch = tokens / (2 * ranks), last = 2 * ranks - 1 - rank;
  auto all = ch::Tensor<std::int64_t, 1>::empty({2 * stretch});
  for (ch::Index i = 0; i < 2 * stretch; ++i) all(i) = (i < stretch ? rank : last) * stretch + i % stretch;
  return all;
}

struct RingAttention {
  ch::comm::AnyCommunicator& ranks;
  const ch::Tensor<std::int64_t, 1> mine = places(ranks.rank(), ranks.size());

  Values shift(const Values& x, int by) const {  // sends x to the rank `by` further on, returns that of the one before
    const int n = ranks.size(), rank = ranks.rank(), to = (rank + n + by) % n, from = (rank + n - by) % n;
    auto arrives = Values::empty(x.shape());
    const std::span out(x.data(), static_cast<std::size_t>(x.numel())), in(arrives.data(), out.size());
    if (rank % 2 == 0) ranks.send(out, to, {.traffic = Traffic::activations});  // if all sent first, all might wait
    ranks.recv(in, from, {.traffic = Traffic::activations});
    if (rank % 2 == 1) ranks.send(out, to, {.traffic = Traffic::activations});
    return arrives;
  }
  auto pass_on(const auto& x) const {  // gradients go the other way
    return ch::custom_function(
        "pass_on", [this](const auto& value) { return shift(value, 1); },
        [this](const auto& dy, const auto&, const auto&) { return shift(dy, -1); }, x);
  }
  auto operator()(const auto& qkv) const {
    const ch::Index n = mine.numel();
    auto block = ch::concat(-1, part(qkv, 1), part(qkv, 2));  // keys and values
    auto sum = part(qkv, 0) * 0, total = ch::slice(sum, -1, 0, 1);
    auto most = Values::full({qkv.size(0), n, 1}, -1e20f);
    auto seen = ch::Tensor<bool, 2>::empty({n, n});
    for (int hop = 0; hop < ranks.size(); ++hop) {
      if (hop > 0) block = pass_on(block);  // the policy does not keep blocks for backward: there they come again
      const auto theirs = places((ranks.rank() - hop + ranks.size()) % ranks.size(), ranks.size());
      for (ch::Index i = 0; i < n * n; ++i) seen.data()[i] = theirs(i % n) <= mine(i / n);
      const auto products = ch::matmul(part(qkv, 0), ch::transpose(part(block, 0), 1, 2));
      const auto scores = ch::where(seen, products * (1 / std::sqrt(float{width})), -1e30f);
      const Values high = ch::maximum(most, ch::reshape(ch::amax(scores.value(), -1), most.shape()));
      const Values old = ch::exp(std::exchange(most, high) - high);
      const auto weights = ch::exp(scores - high);
      total = total * old + ch::reshape(ch::sum(weights, -1), most.shape());
      sum = sum * old + ch::matmul(weights, part(block, 1));
    }
    return sum / total;
  }
};

int main(int argc, char** argv) {
  return ch::launch<Policy>(argc, argv, [](ch::Run& run) {
    Data data{run.seed()};  // every rank loads whole batches
    Rows model;
    Policy net{ch::nn::copy_of(model), run};  // takes the same steps, for the comparison at the end
    const auto parameters = ch::nn::named_parameters<ch::Cpu>(model);
    ch::optim::Sgd optimizer{parameters, sgd}, policy_optimizer{net.parameters(), sgd};
    const RingAttention ring{run.communicator()};
    for (int epoch = 0; epoch < epochs; ++epoch) {
      MeanLoss mean;
      for (const auto& [images, labels] : data.epoch(epoch)) {
        const Values all = ch::reshape(images, ch::Shape<3>{images.size(0), 28, 28});
        const Values rows = ch::slice(all, 1, 0, tokens), next = ch::slice(all, 1, 1, tokens + 1);
        const auto y = model.out(ring(model.in(ch::index_select(rows, 1, ring.mine))));
        ch::mse_loss(y, ch::index_select(next, 1, ring.mine)).backward();
        for (const auto& p : parameters)  // a mean over ranks, which have equally many tokens
          ring.ranks.all_reduce(gradient(p), ch::comm::ReduceOp::sum, {.scale = 1.0 / ring.ranks.size()});
        const auto loss = net(rows, next);  // of all ranks' tokens
        loss.backward();
        for (auto* o : {&optimizer, &policy_optimizer}) o->step(), o->zero_grad();
        mean.add(double{loss.item()}, static_cast<double>(labels.numel()));
      }
      if (run.is_main()) mean.print(epoch);
    }
    return compare_parameters(run, Policy::name, parameters, ch::nn::named_parameters<ch::Cpu>(net.module()), 1e-5);
  });
}
