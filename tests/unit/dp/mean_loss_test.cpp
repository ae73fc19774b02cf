#include <catch.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/elementary.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/single_device.hpp>
#include <cmath>
#include <tuple>

#include "../message_of.hpp"

namespace mean_loss_test {

namespace ch = chorus;
using ch::Cpu;
using ch::Index;
using Inputs = ch::Tensor<double, 2>;
using Labels = ch::Tensor<std::int64_t, 2>;

constexpr Index batch = 5, time = 4;

// Samples of very different lengths: some devices have little weight, or none.
Labels tokens(std::vector<Index> lengths) {
  auto y = Labels::full({batch, time}, -100);
  for (Index b = 0; b < batch; ++b)
    for (Index t = 0; t < lengths[static_cast<std::size_t>(b)]; ++t) y(b, t) = (2 * b + t) % 3;
  return y;
}
Inputs inputs() {
  auto x = Inputs::empty({batch, time});
  for (Index i = 0; i < x.numel(); ++i) x.data()[i] = std::sin(1.7 * static_cast<double>(i));
  return x;
}

// Returns `loss_of(scores, labels, inputs)`; scores: [batch, classes, time].
template <class LossOf>
struct Net : ch::nn::Module {
  ch::nn::Linear<Cpu, double> fc{time, 3 * time};
  CHORUS_MODULE(Net, fc)
  auto forward(const auto& x, const Labels& y) const {
    return LossOf()(ch::reshape(fc(x), ch::Shape<3>{ch::value_of(x).size(0), 3, time}), y, fc.weight);
  }
};

template <class LossOf>
Net<LossOf> make() {
  Net<LossOf> net;
  for (const auto& named : ch::nn::named_parameters<Cpu>(net))
    for (Index i = 0; i < named.parameter->count(); ++i)
      static_cast<double*>(named.parameter->value_data())[i] = std::cos(0.9 * static_cast<double>(i));
  return net;
}

struct Tokens {
  auto operator()(const auto& scores, const Labels& y, const auto&) const { return ch::cross_entropy(scores, y) * 0.5; }
};
struct Weighted {
  auto operator()(const auto& scores, const Labels& y, const auto&) const {
    const auto weight = ch::Tensor<double, 1>::from({1, 5, 0.5}, {3});
    return ch::cross_entropy(scores, y, ch::to_device(weight, ch::value_of(scores).device()));
  }
};
struct ByHand {  // unknown to the library: weighted by samples
  auto operator()(const auto& scores, const Labels&, const auto&) const {
    return ch::sum(ch::square(scores)) / ch::value_of(scores).size(0);
  }
};
struct Alike {  // two means over proportional numbers, and one over none
  auto operator()(const auto& scores, const Labels& y, const auto&) const {
    const auto none = ch::cross_entropy(scores, Labels::full(y.shape(), -100, y.device()));
    const auto zeros = Labels::full(y.shape(), 0, y.device());
    return ch::cross_entropy(scores, zeros) + ch::mse_loss(scores, ch::value_of(scores) * 0.0) + none;
  }
};
struct Unlike {
  auto operator()(const auto& scores, const Labels& y, const auto&) const {
    return ch::cross_entropy(scores, y) + ch::mse_loss(scores, ch::value_of(scores) * 0.0);
  }
};
struct Sums {  // and a penalty, which counts once
  auto operator()(const auto& scores, const Labels& y, const auto& w) const {
    return ch::cross_entropy(scores, y) * 0.5 - ch::sum(ch::square(scores)) / 1000.0 + ch::sum(ch::square(w)) * 0.1;
  }
};
struct Root {
  auto operator()(const auto& scores, const Labels&, const auto&) const {
    return ch::sqrt(ch::mean(ch::square(scores)));
  }
};
struct Several {
  auto operator()(const auto& scores, const Labels& y, const auto&) const {
    return std::tuple{ch::cross_entropy(scores, y), ch::mse_loss(scores, ch::value_of(scores) * 0.0)};
  }
};

// The loss, then all gradients.
template <class Policy>
std::vector<double> step(Policy& net, const Labels& y) {
  const auto output = net(inputs(), y);
  const auto loss = [&] {
    if constexpr (requires { std::get<1>(output); })
      return net.mean_loss(std::get<0>(output)) + net.mean_loss(std::get<1>(output) * 2.0) * 0.5;
    else
      return net.mean_loss(output);
  }();
  loss.backward();
  std::vector<double> out{loss.item()};
  for (const auto& named : net.parameters())
    for (Index i = 0; i < named.parameter->count(); ++i)
      out.push_back(static_cast<const double*>(named.parameter->grad_data())[i]);
  return out;
}

template <class LossOf>
double distance_from_one_device(const Labels& y, std::vector<int> devices) {
  ch::SingleDevice<Net<LossOf>> single{make<LossOf>()};
  ch::DataParallel<Net<LossOf>> several{make<LossOf>(), {.device_ids = std::move(devices)}};
  const auto right = step(single, y), got = step(several, y);
  REQUIRE(right.size() == got.size());
  double most = 0;
  for (std::size_t i = 0; i < right.size(); ++i) most = std::max(most, std::abs(right[i] - got[i]));
  return most;
}

TEST_CASE("dp mean_loss: devices' losses count by tokens and weights of classes, as on one device") {
  for (const auto& y :
       {tokens({4, 3, 0, 1, 1}), tokens({4, 4, 4, 4, 4}), tokens({0, 0, 0, 0, 2}), tokens({0, 0, 0, 0, 0})})
    for (const std::vector<int>& devices : {std::vector{0}, {0, 1}, {0, 1, 2}}) {
      CAPTURE(devices.size());
      CHECK(distance_from_one_device<Tokens>(y, devices) < 1e-13);
      CHECK(distance_from_one_device<Weighted>(y, devices) < 1e-13);
      CHECK(distance_from_one_device<Several>(y, devices) < 1e-13);
    }
  CHECK(distance_from_one_device<ByHand>(tokens({4, 3, 0, 1, 1}), {0, 1}) < 1e-13);
  CHECK(distance_from_one_device<Alike>(tokens({4, 3, 0, 1, 1}), {0, 1}) < 1e-13);
}

TEST_CASE("dp mean_loss: each mean and each sum of a loss counts by itself") {
  const auto y = tokens({4, 3, 0, 1, 1});
  for (const std::vector<int>& devices : {std::vector{0, 1}, {0, 1, 2}}) {
    CHECK(distance_from_one_device<Unlike>(y, devices) < 1e-13);
    CHECK(distance_from_one_device<Sums>(y, devices) < 1e-13);
  }
  ch::DataParallel<Net<Root>> net{make<Root>(), {.device_ids = {0, 1}}};
  CHECK(message_of<ch::UsageError>([&] { net.mean_loss(net(inputs(), y)); })
            .starts_with("DataParallel::mean_loss: the loss goes through 'sqrt', which is not linear"));
  ch::DataParallel<Net<Tokens>> other{make<Tokens>(), {.device_ids = {0, 1}}};
  CHECK(message_of<ch::UsageError>([&] {
          other.mean_loss(ch::square(other(inputs(), y)));
        }).starts_with("DataParallel::mean_loss: 'square' of the net's output"));
}

}  // namespace mean_loss_test
