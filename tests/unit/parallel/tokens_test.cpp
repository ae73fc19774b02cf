// Models of tokens under the policies: an embedding, whose gradient is mostly zeros, and a recurrent net.
#include <catch.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/recurrent.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <map>

#include "ranks.hpp"

namespace tokens_test {

using namespace test::names;
using Extras = std::vector<Tensor<double, 2>>;
using Named = std::map<std::string, Tensor<double, 2>>;

template <class D>
struct Tokens : nn::Module {
  nn::Embedding<D, double> encoder{9, 5};
  nn::LSTM<D, double> lstm{5, 6, {.num_layers = 2, .batch_first = true}};
  nn::Linear<D, double> decoder{6, 3};
  CHORUS_MODULE(Tokens, encoder, lstm, decoder)

  /// tokens: [batch, time]
  auto forward(const auto& tokens, const auto& extras, const auto& named) const {
    check(extras.empty() && named.empty(), "nothing was given");
    return decoder(mean(lstm(encoder(tokens)).output, 1));
  }
};

Tensor<std::int64_t, 2> batch(std::uint32_t number) { return reshape(labels(7 * 4, 9, number), Shape<2>{7, 4}); }

template <class Net>
std::vector<double> steps(Net& net, const World& world) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
  for (std::uint32_t number = 0; number < 3; ++number) {
    optimizer.zero_grad();
    const auto y = net(test::share(batch(number), world), Extras{}, Named{});
    cross_entropy(y, test::share(labels(7, 3, number), world)).backward();
    optimizer.step();
  }
  return test::values(net.module());
}

TEST_CASE("tokens: embedding and lstm take the steps of one device, with empty lists beside them") {
  SingleDevice<Tokens<Cpu>> single{make<Tokens<Cpu>>(), 3};
  const auto whole = steps(single, {});
  for (const auto& ids : {std::vector<int>{0, 1}, std::vector<int>{2, 0, 1}}) {
    DataParallel<Tokens<Cpu>> net{make<Tokens<Cpu>>(), {.device_ids = ids}, 3};
    CHECK(distance(steps(net, {}), whole) < rounding);
  }
  const auto text = common_text(2, [](const World& world) {
    Distributed<Tokens<Cpu>> rank(world);
    return test::text_of(steps(rank.net, world));
  });
  CHECK(distance(test::numbers_in(text), whole) < rounding);
}

TEST_CASE("tokens: without gradients a recurrent net's outputs under dp are one device's, and nothing is recorded") {
  SingleDevice<Tokens<Cpu>> single{make<Tokens<Cpu>>(), 3};
  DataParallel<Tokens<Cpu>> net{make<Tokens<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const NoGrad no_grad;
  const auto y = net(batch(1), Extras{}, Named{}), expected = single(batch(1), Extras{}, Named{});
  CHECK(y.shape() == Shape<2>{7, 3});
  CHECK(distance(y.value().to_vector(), expected.value().to_vector()) < rounding);
  CHECK_FALSE(y.requires_grad());
}

}  // namespace tokens_test
