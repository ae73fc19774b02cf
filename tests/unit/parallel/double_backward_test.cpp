// Second derivatives and recomputed activations under policies of several devices.
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "ranks.hpp"

namespace double_backward_test {

using namespace test::names;

/// A critic with a gradient penalty on its input: one loss per sample.
template <class D>
struct Penalised : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 1};
  CHORUS_MODULE(Penalised, fc1, fc2)

  auto score(const auto& x) const { return fc2(tanh(fc1(x))); }
  auto forward(const auto& x) const {
    const GraphVariable at(x, true);
    const auto slope = grad(sum(score(at)), at, {.create_graph = true});
    const auto length = sqrt(sum(square(slope), 1) + 1e-12);
    return (reshape(score(x), Shape<1>{-1}) + 10 * square(length - 1)).as_variable();
  }
};

/// Recomputes the activations of the first layer, and of the second, which is used twice.
template <class D>
struct Recomputed : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 7}, fc3{7, 3}, extra{7, 7};
  bool again = true, twice = true;
  CHORUS_MODULE(Recomputed, fc1, fc2, fc3, extra)

  auto forward(const auto& x) const {
    const auto part = [&](const auto& layer, const auto& in) {
      const auto run = [&layer](const auto& h) { return tanh(layer(h)); };
      return again ? checkpoint(run, in) : run(in);
    };
    const auto h = part(fc2, part(fc1, x));
    return fc3(twice ? part(fc2, h) : h);
  }
};

template <class Net>
std::vector<double> penalised_steps(Net& net, const std::function<Tensor<double, 2>(Tensor<double, 2>)>& share) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.05, .momentum = 0.9}};
  for (std::uint32_t number = 0; number < 4; ++number) {
    optimizer.zero_grad();
    mean(net(share(numbers(7, 5, number)))).backward();
    optimizer.step();
  }
  return test::values(net.module());
}

std::vector<double> recomputed_steps(int ranks, bool again, bool twice, const DistributedDataParallelOptions& options) {
  return test::numbers_in(common_text(ranks, [=](const World& world) {
    auto model = make<Recomputed<Cpu>>();
    model.again = again, model.twice = twice;
    Distributed<Recomputed<Cpu>> rank(world, options, model);
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 4; ++number) test::step(rank.net, optimizer, number, 7, world);
    return test::text_of(test::values(rank.net.module()));
  }));
}

TEST_CASE("double backward: a gradient penalty inside of the model, under dp and ddp, takes the steps of one device") {
  SingleDevice<Penalised<Cpu>> single{make<Penalised<Cpu>>(), 3};
  const auto whole = penalised_steps(single, [](const auto& x) { return x; });
  DataParallel<Penalised<Cpu>> net{make<Penalised<Cpu>>(), {.device_ids = {0, 1}}, 3};
  CHECK(distance(penalised_steps(net, [](const auto& x) { return x; }), whole) < rounding);
  for (const int ranks : {2, 3}) {
    const auto text = common_text(ranks, [](const World& world) {
      Distributed<Penalised<Cpu>> rank(world);
      return test::text_of(penalised_steps(rank.net, [&](const auto& x) { return test::share(x, world); }));
    });
    CHECK(distance(test::numbers_in(text), whole) < rounding);
  }
}

TEST_CASE("double backward: under dp on two devices the gradients of a penalty are the slopes of the loss") {
  DataParallel<Penalised<Cpu>> net{make<Penalised<Cpu>>(), {.device_ids = {0, 1}}, 3};
  test::check_slopes(net, [&] { return mean(net(numbers(5, 5, 1))); });
}

TEST_CASE("ddp: activations that are computed again, once and twice by one layer, change no step") {
  const DistributedDataParallelOptions small{
      .first_bucket_cap_mb = 0, .bucket_cap_mb = 0, .find_unused_parameters = true};
  for (const bool twice : {false, true}) {
    INFO("twice " << twice);
    const auto kept = recomputed_steps(2, false, twice, small);
    REQUIRE(!kept.empty());
    CHECK(recomputed_steps(2, true, twice, small) == kept);
    // `extra` is never used.
    CHECK(distance(recomputed_steps(2, true, twice, {.static_graph = true}), kept) < rounding);
    CHECK(distance(recomputed_steps(1, true, twice, small), kept) < rounding);
  }
}

}  // namespace double_backward_test
