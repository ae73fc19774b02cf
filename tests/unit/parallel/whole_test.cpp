// Arguments of a model that belong to no sample: `whole`, and `exact`, under the policies.
#include <algorithm>
#include <catch.hpp>
#include <chorus/nn/chain.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/ops/softmax.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <chorus/same_bits.hpp>
#include <tuple>

#include "ranks.hpp"

namespace whole_test {

using namespace test::names;

/// Weights [3] and a mask [time, time], as keyword arguments.
struct More {
  Whole<Tensor<double, 2>> mask;
  Whole<Variable<double, 1>> weights;
  auto fields() { return std::tie(mask, weights); }
};

/// x: [batch, time, 3].
template <class D>
struct Pairs : nn::Module {
  nn::Linear<D, double> fc{3, 3};
  CHORUS_MODULE(Pairs, fc)
  auto forward(const auto& x, const auto& mask, const auto& weights) const {
    const auto h = tanh(fc(x));
    return matmul(softmax(matmul(h, transpose(h, 1, 2)) + mask, 2), h) * weights;
  }
  auto forward(const auto& x, const More& more) const { return forward(x, more.mask, more.weights); }
  auto forward(const auto& x, const std::tuple<Whole<Tensor<double, 2>>, Whole<Variable<double, 1>>>& more) const {
    return forward(x, std::get<0>(more), std::get<1>(more));
  }
};

Tensor<double, 3> texts(Index batch, Index time, std::uint32_t key) {
  return contiguous(reshape(numbers(batch, time * 3, key), Shape<3>{batch, time, 3}));
}
/// Loss and gradients of parameters and weights, for each way to pass the arguments.
template <class Net>
std::vector<double> steps(Net& net, Index batch, Index time, const auto& share) {
  std::vector<double> out;
  const auto x = share(texts(batch, time, 1));
  const auto mask = numbers(time, time, 2);
  const auto step = [&](const auto& forward) {
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
    const Variable<double, 1> weights(numbers(1, 3, 3)[0], true);
    const auto loss = mean(square(forward(weights)));
    loss.backward();
    out.push_back(loss.item());
    for (const double v : weights.grad().to_vector()) out.push_back(v);
    for (const double v : test::gradients(net.module())) out.push_back(v);
  };
  step([&](const auto& w) { return net(x, whole(mask), whole(w)); });
  step([&](const auto& w) { return net(x, More{mask, w}); });
  step([&](const auto& w) { return net(x, std::tuple{whole(mask), whole(w)}); });
  return out;
}
const auto all = [](const auto& x) { return x; };

TEST_CASE("whole: every device and every share has all of a mask and of weights, whose gradients are added") {
  for (const Index batch : {2, 3, 4, 5})
    for (const Index time : {2, 3, 4}) {
      INFO(batch << " texts of " << time);
      SingleDevice<Pairs<Cpu>> one{make<Pairs<Cpu>>(), 3};
      const auto right = steps(one, batch, time, all);
      using Cut = SameBits<Pairs<Cpu>, 3>;
      for (const std::vector<int>& ids : {std::vector{0}, {0, 1}, {1, 0, 2}}) {
        DataParallel<Pairs<Cpu>> net{make<Pairs<Cpu>>(), {.device_ids = ids}, 3};
        CHECK(distance(steps(net, batch, time, all), right) < rounding);
        DataParallel<Cut> in_shares{make<Pairs<Cpu>>(), {.device_ids = ids}, 3};
        CHECK(distance(steps(in_shares, batch, time, all), right) < rounding);
      }
      SingleDevice<Cut> cut{make<Pairs<Cpu>>(), 3};
      CHECK(distance(steps(cut, batch, time, all), right) < rounding);
    }
}

TEST_CASE("whole: gradients of gradients go through it, too") {
  const auto run = [](auto& net) {
    const GraphVariable<double, 3> x(texts(3, 3, 1), true);
    const GraphVariable<double, 1> weights(numbers(1, 3, 3)[0], true);
    const auto slope = grad(sum(square(net(x, whole(numbers(3, 3, 2)), whole(weights)))), x, {.create_graph = true});
    sum(square(slope)).backward();
    auto out = test::gradients(net.module());
    for (const double v : weights.grad().to_vector()) out.push_back(v);
    return out;
  };
  SingleDevice<Pairs<Cpu>> one{make<Pairs<Cpu>>(), 3};
  DataParallel<Pairs<Cpu>> two{make<Pairs<Cpu>>(), {.device_ids = {0, 1}}, 3};
  CHECK(distance(run(two), run(one)) < rounding);
}

TEST_CASE("whole: ranks count the samples of the others, wherever it stands among the arguments") {
  SingleDevice<Pairs<Cpu>> one{make<Pairs<Cpu>>(), 3};
  const auto expected = [&] {
    mean(square(one(texts(5, 4, 1), numbers(4, 4, 2), numbers(1, 3, 3)[0]))).backward();
    return test::gradients(one.module());
  }();
  const auto text = common_text(2, [](const World& world) {
    Distributed<Pairs<Cpu>> rank(world);
    const auto x = world.rank == 0 ? texts(5, 4, 1).slice(0, 0, 4) : texts(5, 4, 1).slice(0, 4, 5);
    mean(square(rank.net(x, More{numbers(4, 4, 2), Variable(numbers(1, 3, 3)[0])}))).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), expected) < rounding);
  CHECK(detail::samples_of(0, whole(numbers(4, 4, 2)), numbers(7, 3, 1)) == 7);
  CHECK(detail::samples_of(0, numbers(4, 4, 2), batch_axis<1>(numbers(3, 7, 1))) == 7);
}

struct Body : nn::Module {
  nn::Linear<Cpu, double> fc{4, 4};
  CHORUS_MODULE(Body, fc)
  auto forward(const auto& x) const { return tanh(fc(x)); }
};
struct Head : nn::Module {
  nn::Linear<Cpu, double> out{4, 4};
  CHORUS_MODULE(Head, out)
  auto forward(const auto& x, const auto& y, const auto& weights) const { return mean(square(out(x) - y) * weights); }
  auto forward(const auto& x, const std::tuple<Tensor<double, 2>, Whole<Tensor<double, 1>>>& more) const {
    return forward(x, std::get<0>(more), std::get<1>(more));
  }
};
struct Chain : nn::Module {
  Body body;
  Head head;
  CHORUS_MODULE(Chain, body, head)
  CHORUS_PIPELINE(body, head)
};
/// Losses and gradients of targets with weights of the features, in turn.
template <class Net>
std::vector<double> chain_steps(Net& net, const auto& share) {
  std::vector<double> out;
  const auto weights = numbers(1, 4, 3)[0];
  for (const Index batch : {4, 11, 3, 4}) {
    const auto x = share(numbers(batch, 4, 1)), y = share(numbers(batch, 4, 2));
    const auto step = [&](const auto& loss) {
      loss.backward();
      out.push_back(net.mean(loss.item(), x.size(0)));
    };
    step(net(x, y, whole(weights)));
    step(net(x, std::tuple{y, whole(weights)}));
    if (batch == 11) step(net(x, y, weights));
  }
  return out;
}

TEST_CASE("whole: every micro-batch has all of it, in pipelines and in meshes with one") {
  SingleDevice<Chain> one{make<Chain>(), 3};
  auto expected = chain_steps(one, all);
  for (const double v : test::gradients(one.module())) expected.push_back(v);
  std::sort(expected.begin() + 9, expected.end());
  for (const int micro_batches : {2, 4}) {
    const auto texts = Ranks(2, [&](const World& world) {
                         auto communicator = comm::connect(world);
                         Pipeline<Chain> net{make<Chain>(), communicator, world, {.micro_batches = micro_batches}, 3};
                         auto out = chain_steps(net, all);
                         for (const auto& named : net.parameters())
                           for (Index i = 0; i < named.parameter->count(); ++i)
                             out.push_back(static_cast<const double*>(named.parameter->grad_data())[i]);
                         return test::text_of(out);
                       }).texts();
    auto got = test::numbers_in(texts[0]), second = test::numbers_in(texts[1]);
    CHECK(std::equal(got.begin(), got.begin() + 9, second.begin()));
    got.insert(got.end(), second.begin() + 9, second.end());
    std::sort(got.begin() + 9, got.end());  // their order in memory differs
    CHECK(distance(got, expected) < rounding);
  }
  const auto texts =
      Ranks(4, [&](const World& world) {
        auto communicator = comm::connect(world);
        Mesh<Chain, mesh::Pipe<2>, mesh::Data<2>> net{make<Chain>(), communicator, world, {.micro_batches = 2}, 3};
        return test::text_of(chain_steps(net, [&](const auto& x) {
          const Index half = (x.size(0) + 1) / 2;
          return net.place()[1] == 0 ? x.slice(0, 0, half) : x.slice(0, half, x.size(0));
        }));
      }).texts();
  auto losses = expected;
  losses.resize(9);
  for (const auto& text : texts) {
    INFO(text);
    CHECK(distance(test::numbers_in(text), losses) < rounding);
  }
}

TEST_CASE("whole: an argument of another size is; one that is as long as the batch is what it was, or is refused") {
  const auto with = [](auto& net, Index batch, Index time) {
    const auto y = net(texts(batch, time, 1), numbers(time, time, 2), numbers(1, 3, 3)[0]);
    return contiguous(value_of(y)).to_vector();
  };
  SingleDevice<Pairs<Cpu>> one{make<Pairs<Cpu>>(), 3};
  DataParallel<Pairs<Cpu>> net{make<Pairs<Cpu>>(), {.device_ids = {0, 1}}, 3};
  CHECK(message_of<ShapeError>([&] { with(net, 4, 4); }) ==
        "DataParallel: an input of shape [4, 4] next to the first one of shape [4, 4, 3] may be 4 samples or not: pass "
        "whole(input) if not, as for a mask or weights, else batch_axis<0>(input), or another axis");
  DataParallel<Pairs<Cpu>> other{make<Pairs<Cpu>>(), {.device_ids = {0, 1}}, 3};
  CHECK_THAT(message_of<ShapeError>([&] { with(other, 3, 5); }), Contains("an input of shape [3] next to"));
  for (const auto& [batch, time] : {std::pair{5, 4}, {4, 4}, {2, 2}, {1, 4}, {6, 3}, {3, 3}})
    CHECK(distance(with(net, batch, time), with(one, batch, time)) < rounding);

  // A first argument that may be weights itself.
  CHECK_THAT(
      message_of<ShapeError>([&] { dp::InputRoles().split("A net", 2, 0, numbers(1, 4, 1)[0], texts(6, 4, 1)); }),
      Contains("shape [6, 4, 3] next to the first one of shape [4]"));
  // The time axis of states [time, batch].
  CHECK_THAT(message_of<ShapeError>([&] { dp::InputRoles().split("A net", 2, 0, texts(4, 2, 1), numbers(3, 4, 2)); }),
             Contains("an input of shape [3, 4] next to"));
}

/// x, and arguments that belong to its samples.
template <class D>
struct Targets : nn::Module {
  nn::Linear<D, double> fc{4, 4};
  CHORUS_MODULE(Targets, fc)
  auto forward(const auto& x, const auto&... more) const { return ((fc(x) * to<double>(sum(more))) + ...); }
};

TEST_CASE("whole: usual targets are no matter for a word") {
  const auto said = [](const auto& pass) {
    return test::Ranks(1,
                       [&](const World&) {
                         return test::with_stderr([&] {
                           DataParallel<Targets<Cpu>> net{make<Targets<Cpu>>(), {.device_ids = {0, 1}}, 3};
                           const NoGrad none;
                           pass(net);
                           return "";
                         });
                       })
        .texts()[0];
  };
  const auto row = [](Index size) { return numbers(1, size, 2)[0]; };
  CHECK(said([&](auto& net) {
          net(numbers(4, 4, 1), labels(4, 3, 1));   // as many labels as features
          net(numbers(4, 4, 1), numbers(4, 4, 2));  // like an autoencoder's
          net(numbers(4, 4, 1), numbers(4, 2, 2));
          net(numbers(8, 4, 1), row(8), labels(8, 3, 1));
          net(numbers(4, 4, 1), batch_axis<0>(row(4)), whole(row(4)));
          net(numbers(8, 4, 1), labels(8, 3, 1), row(3));
        }).empty());
  CHECK_THAT(said([&](auto& net) {
               net(numbers(4, 4, 1), row(4));
               net(numbers(4, 4, 1), row(4));
             }),
             Catch::Matchers::StartsWith(
                 "chorus: warning: DataParallel: an input of shape [4] next to the first one of shape [4, 4]") &&
                 Catch::Matchers::EndsWith("; it is split as samples\n"));
}

/// Returns the types of its arguments.
template <class D>
struct Types : nn::Module {
  nn::Linear<D> fc{4, 4};
  CHORUS_MODULE(Types, fc)
  auto forward(const auto& x, const auto& time, const auto& ids) const {
    using X = typename tensor_of<decltype(x)>::value_type;
    using Time = typename tensor_of<decltype(time)>::value_type;
    static_assert(std::is_same_v<X, bf16> && std::is_same_v<Time, float>);
    static_assert(std::is_same_v<typename tensor_of<decltype(ids)>::value_type, std::int64_t>);
    check<UsageError>(time.size(0) == x.size(0) || time.size(0) == 5, "time is cut in another way");
    return fc(x) * to<bf16>(sum(time));
  }
};

TEST_CASE("exact: an argument stays in its type, cut or whole") {
  using Net = nn::MixedPrecision<Types<Cpu>>;
  const auto x = Tensor<float, 2>::ones({6, 4});
  const auto ids = Tensor<std::int64_t, 1>::zeros({6});
  const Variable<float, 1> time(Tensor<float, 1>::full({6}, 1.0f), true);
  const auto run = [&](auto&& net) {
    time.zero_grad();
    const auto y = net(x, whole(exact(Tensor<float, 1>::ones({5}))), ids);
    sum(net(x, exact(time), ids)).backward();
    auto out = y.value().to_vector();
    for (const float g : time.grad().to_vector()) out.push_back(g);
    net(x, exact(whole(Tensor<float, 1>::ones({5}))), whole(ids));
    return out;
  };
  const auto make_net = [] {
    Net net;
    net.model().fc.weight.assign(Tensor<float, 2>::full({4, 4}, 0.5f));
    return net;
  };
  const auto one = run(SingleDevice<Net>{make_net(), 3});
  CHECK(one.size() == 30);
  DataParallel<Net> three{make_net(), {.device_ids = {0, 1, 2}}, 3};
  CHECK(run(three).size() == 30);
}

}  // namespace whole_test
