// What a loss is a mean or a sum of: labels that don't count, sums, several terms, functions of means.
#include <chorus/ops/global_batch.hpp>

#include "policies.hpp"

namespace cases {
namespace {

using Labels = ch::Tensor<std::int64_t, 1>;

/// Rows [begin, end) of labels of which those that 3 divides don't count.
Labels labels(ch::Index begin, ch::Index end) {
  auto y = Labels::empty({end - begin});
  for (ch::Index i = begin; i < end; ++i) y.data()[i - begin] = i % 3 == 0 || i < 4 ? -100 : i % 2;
  return y;
}
double counted(const Labels& y) {
  double n = 0;
  for (ch::Index i = 0; i < y.numel(); ++i) n += y.data()[i] >= 0;
  return n;
}

/// The sum of a Line's parameters after three steps on `loss_of(net, rows, labels)`, or the refusal.
template <class LossOf>
std::string trained(const auto& make, const Share& share, const LossOf& loss_of) {
  const auto net = make(filled<Line<ch::Cpu>>());
  ch::optim::Sgd optimizer{net->parameters(), {.lr = 0.05}};
  const ch::Index batch = 9, begin = share.begin(batch), end = share.end(batch);
  const auto step = [&] {
    optimizer.zero_grad();
    loss_of(*net, share.rows(batch), labels(begin, end)).backward();
    optimizer.step();
  };
  try {
    for (int i = 0; i < 3; ++i) step();
  } catch (const ch::UsageError& error) {
    const std::string text = error.what();
    return text.substr(0, text.find_first_of(",:", text.find(':') + 1));
  }
  double sum = 0;
  for (const auto& named : net->parameters())
    for (ch::Index i = 0; i < named.parameter->count(); ++i)
      sum += static_cast<const double*>(std::as_const(*named.parameter).value_data())[i];
  return rounded(sum);
}

// A sum is a sum: its gradients are added, whatever the number of ranks.
const Add sums("a_loss_that_is_a_sum", R"(
single: sum 2.429, over 18 0.351, mse_loss 2.429
dp:     sum 2.429, over 18 0.351, mse_loss 2.429
ddp:    sum 2.429, over 18 0.351, mse_loss 2.429
)",
               [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    const auto squares = [](auto& net, const auto& x) { return ch::square(net(x) - 1); };
    return "sum " + trained(make, share, [&](auto& net, const auto& x, const auto&) { return ch::sum(squares(net, x)); }) +
           ", over 18 " +
           trained(make, share, [&](auto& net, const auto& x, const auto&) { return ch::sum(squares(net, x)) / 18.0; }) +
           ", mse_loss " + trained(make, share, [&](auto& net, const auto& x, const auto&) {
             const auto y = net(x);
             return ch::mse_loss(y, ch::Tensor<double, 2>::ones(y.shape()), ch::Reduction::sum);
           });
  });
});

// bergson#461, transformers#34242, verl#5625, miles#3231: tokens that count, of which a rank may have few or none.
const Add tokens("tokens_that_count_over_a_given_number", R"(
single: own mean 0.049, of the whole batch 0.049, of this rank 0.049
dp:     own mean 0.049, of the whole batch 0.049, of this rank 0.049
ddp:    own mean 0.049, of the whole batch 0.049, of this rank backward: mean_over is 0.5 on rank 0 and 4 on rank 1
)",
                 [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    const auto over = [](double number) {
      return [number](auto& net, const auto& x, const auto& y) {
        return ch::cross_entropy(net(x), y, {.mean_over = number});
      };
    };
    return "own mean " +
           trained(make, share, [](auto& net, const auto& x, const auto& y) { return ch::cross_entropy(net(x), y); }) +
           ", of the whole batch " + trained(make, share, over(counted(labels(0, 9)))) + ", of this rank " +
           trained(make, share, over(std::max(0.5, counted(labels(share.begin(9), share.end(9))))));
  });
});

// Automodel#1412 and #1408, megablocks#64 and #85, torchtitan#2061: a second term that is a mean of something else.
const Add terms("two_terms_of_a_loss", R"(
single: two means 0.067, and a sum 0.070
dp:     two means 0.067, and a sum 0.070
ddp:    two means 0.067, and a sum 0.070
)",
                [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    return "two means " + trained(make, share,
                                  [](auto& net, const auto& x, const auto& y) {
                                    const auto scores = net(x);
                                    return ch::cross_entropy(scores, y) + 0.5 * ch::mean(ch::square(scores));
                                  }) +
           ", and a sum " + trained(make, share, [](auto& net, const auto& x, const auto& y) {
             const auto scores = net(x);
             const auto& w = net.module().fc.weight;
             return ch::cross_entropy(scores, y) - ch::sum(ch::square(scores)) * 0.1 + ch::sum(ch::square(w)) * 0.2;
           });
  });
});

// The root of a mean is not the mean of roots.
const Add roots("a_root_of_a_mean", R"(
single: 0.229; of the global batch 0.229
dp:     0.229; of the global batch 0.229
ddp:    DistributedDataParallel: the loss goes through 'sqrt'; of the global batch 0.229
)",
                [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    const auto squares = [](auto& net, const auto& x) { return ch::mean(ch::square(net(x) - 1)); };
    return trained(make, share, [&](auto& net, const auto& x, const auto&) { return ch::sqrt(squares(net, x)); }) +
           "; of the global batch " + trained(make, share, [&](auto& net, const auto& x, const auto&) {
             return ch::sqrt(ch::of_global_batch(net, squares(net, x)));
           });
  });
});

}  // namespace
}  // namespace cases
