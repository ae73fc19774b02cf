// Batch norm's running statistics where activations are computed again, and where weights are averaged.
#include "policies.hpp"

namespace cases {
namespace {

template <class D>
struct Normed : ch::nn::Module {
  ch::nn::Linear<D, double> fc{3, 4}, last{4, 1};
  ch::nn::SyncBatchNorm<D, double> norm{4};
  bool checkpointed = false;
  CHORUS_MODULE(Normed, fc, norm, last)
  auto part(const auto& x) const { return ch::tanh(norm(fc(x))); }
  auto forward(const auto& x) const {
    if (checkpointed) return last(ch::checkpoint([&](const auto& in) { return part(in); }, x));
    return last(part(x));
  }
};

std::string counted(const auto& make, const Share& share, bool checkpointed) {
  auto model = filled<Normed<ch::Cpu>>();
  model.checkpointed = checkpointed;
  const auto net = make(std::move(model));
  ch::optim::Sgd optimizer{net->parameters(), {.lr = 0.1}};
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    ch::mean(ch::square((*net)(share.rows(8)) - 1)).backward();
    optimizer.step();
  }
  const auto& norm = net->module().norm;
  return std::to_string(norm.num_batches_tracked.value().item()) + " batches, mean " +
         rounded(norm.running_mean.value()(0));
}

// pytorch#96136: batch norm within an activation checkpoint.
const Add checkpointed("batch_norm_in_a_checkpoint", R"(
single: 3 batches, mean -0.295; with a checkpoint 3 batches, mean -0.295
dp:     3 batches, mean -0.295; with a checkpoint 3 batches, mean -0.295
ddp:    3 batches, mean -0.295; with a checkpoint 3 batches, mean -0.295
)",
                       [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    return counted(make, share, false) + "; with a checkpoint " + counted(make, share, true);
  });
});

// Lightning#14866, pytorch's update_bn: averaged weights need statistics of their own, and give the others back.
const Add averaged("averaged_weights_and_batch_norm", R"(
single: averaged weights differ: yes, their statistics are the batches': yes, given back: yes
dp:     averaged weights differ: yes, their statistics are the batches': yes, given back: yes
ddp:    averaged weights differ: yes, their statistics are the batches': yes, given back: yes
)",
                   [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    const auto net = make(filled<Normed<ch::Cpu>>());
    ch::optim::Sgd optimizer{net->parameters(), {.lr = 0.1}};
    ch::optim::ParameterAverage average{net->parameters(), ch::optim::equal_weights()};
    const auto x = share.rows(16);
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      ch::mean(ch::square((*net)(x) - 1)).backward();
      optimizer.step();
      average.update();
    }
    const auto& norm = net->module().norm;
    const double trained = norm.running_mean.value()(0), weight = net->module().fc.weight.value()(0, 0);
    bool differ = false, own = false;
    {
      ch::optim::AveragedScope use{average, *net};
      differ = net->module().fc.weight.value()(0, 0) != weight;
      ch::optim::update_bn(*net, [&] { (*net)(x); });
      // What the whole batch gives: with one batch, cumulative means are that batch's.
      const auto h = ch::value_of(net->module().fc(rows(0, 16)));
      double mean = 0;
      for (ch::Index i = 0; i < 16; ++i) mean += h(i, 0) / 16;
      const double made = norm.running_mean.value()(0);
      own = std::abs(made - mean) < 1e-6;
    }
    const bool back = norm.running_mean.value()(0) == trained && net->module().fc.weight.value()(0, 0) == weight;
    return std::string("averaged weights differ: ") + (differ ? "yes" : "no") +
           ", their statistics are the batches': " + (own ? "yes" : "no") + ", given back: " + (back ? "yes" : "no");
  });
});

}  // namespace
}  // namespace cases
