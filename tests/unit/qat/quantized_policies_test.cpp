// QuantizationAware under the policies: ranges are the global batch's on any number of devices.
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/pipeline.hpp>
#include <chorus/parallel/tensor_parallel.hpp>
#include <limits>

#include <unit/fsdp/fsdp.hpp>

#include "models.hpp"

namespace quantized_policies_test {

using namespace test::names;
using qat::Cnn, qat::Mlp, qat::images, qat::make, qat::Quantized, qat::ranges_of;
namespace nn = chorus::nn;

/// Global batches whose shares on three ranks are even, uneven and empty.
constexpr Index batches[] = {12, 7, 2, 5, 1, 9};
constexpr std::uint32_t steps = 20;

/// Losses of 20 steps, or, with a rate of 0, all ranges after each step, to the bit.
template <class Net, class Share, class Mean>
std::string run(Net& net, double rate, const Share& share, const Mean& mean, std::uint32_t data = 0) {
  optim::Sgd optimizer{net.parameters(), {.lr = rate, .momentum = 0.9}};
  std::string text;
  for (std::uint32_t step = 0; step < steps; ++step) {
    if (step == 15) net.module().freeze_norms();
    if (step == 17) net.module().observe(false);
    const Index size = batches[step % std::size(batches)];
    optimizer.zero_grad();
    const auto mine = share(test::labels(size, 3, step + data));
    const auto loss = cross_entropy(net(share(images(size, step + data))), mine);
    loss.backward();
    optimizer.step();
    text += rate == 0 ? ranges_of(net.module()) + "\n" : cat(mean(static_cast<double>(loss.item()), mine.numel()), " ");
  }
  return text;
}
constexpr auto whole = [](const auto& x) { return x; };
constexpr auto own_mean = [](double value, Index) { return value; };

template <class Model>
std::string alone(double rate, std::uint32_t data = 0) {
  SingleDevice<Quantized<Model>> net{make<Model>(), 3};
  return run(net, rate, whole, own_mean, data);
}
template <class Model>
std::string on_ranks(int ranks, double rate, std::uint32_t data = 0) {
  return common_text(ranks, [=](const World& world) {
    Distributed<Quantized<Model>> rank(world, {}, make<Model>());
    return run(
        rank.net, rate, [&](const auto& x) { return test::share(x, world); },
        [&](double value, Index samples) { return rank.net.mean(value, samples); }, data);
  });
}
double distance_of(const std::string& a, const std::string& b) {
  return test::distance(test::numbers_in(a), test::numbers_in(b));
}

/// Whether `losses(data)` are one device's. A sum over samples rounded in another order may fall on the other side of
/// the middle between two levels, and a level affects the loss: in about one of eight runs.
template <class Losses>
void check_one_devices_steps(const Losses& losses) {
  int same = 0;
  for (std::uint32_t data = 0; data < 8'000; data += 1'000) {
    const auto off = distance_of(losses(data), alone<Cnn>(0.05, data));
    CHECK(off < 1e-2);
    same += off < 1e-5 ? 1 : 0;
  }
  CHECK(same >= 4);
}

TEST_CASE("qat: ddp's ranges are one device's to the bit") {
  const auto expected = alone<Mlp>(0);
  for (const int ranks : {1, 2, 3}) CHECK(on_ranks<Mlp>(ranks, 0) == expected);
}

TEST_CASE("qat: ddp takes one device's steps, batch norm synchronised, with even, uneven and empty shares") {
  const auto mlp = alone<Mlp>(0.05);
  for (const int ranks : {1, 2, 3}) {
    INFO(ranks << " ranks");
    check_one_devices_steps([&](std::uint32_t data) { return on_ranks<Cnn>(ranks, 0.05, data); });
    CHECK(distance_of(on_ranks<Mlp>(ranks, 0.05), mlp) < 1e-5);
  }
}

TEST_CASE("qat: dp takes one device's steps, its ranges to the bit") {
  const auto ranges = alone<Mlp>(0);
  for (const std::vector<int>& ids : {std::vector<int>{0, 1}, {0, 1, 2}}) {
    check_one_devices_steps([&](std::uint32_t data) {
      DataParallel<Quantized<Cnn>> net{make<Cnn>(), {.device_ids = ids}, 3};
      return run(net, 0.05, whole, own_mean, data);
    });
    DataParallel<Quantized<Mlp>> other{make<Mlp>(), {.device_ids = ids}, 3};
    CHECK(run(other, 0, whole, own_mean) == ranges);
  }
}

TEST_CASE("qat: fsdp takes one device's steps") {
  for (const int ranks : {2, 3})
    check_one_devices_steps([&](std::uint32_t data) {
      return common_text(ranks, [=](const World& world) {
        test::FullySharded<Quantized<Cnn>, test::EachLayer> rank(world, {}, make<Cnn>());
        return run(
            rank.net, 0.05, [&](const auto& x) { return test::share(x, world); },
            [&](double value, Index samples) { return rank.net.mean(value, samples); }, data);
      });
    });
}

TEST_CASE("qat: no_sync and micro-batches move the ranges as one device's passes do") {
  const auto passes = [](auto& net, const auto& share) {
    [[maybe_unused]] const auto quiet = net.no_sync();
    for (std::uint32_t step = 0; step < 3; ++step)
      cross_entropy(net(share(images(7, step))), share(test::labels(7, 3, step))).backward();
    return ranges_of(net.module());
  };
  SingleDevice<Quantized<Mlp>> single{make<Mlp>(), 3};
  const auto expected = passes(single, whole);
  CHECK(common_text(3, [&](const World& world) {
          Distributed<Quantized<Mlp>> rank(world, {}, make<Mlp>());
          return passes(rank.net, [&](const auto& x) { return test::share(x, world); });
        }) == expected);
}

TEST_CASE("qat: ranks whose phases differ all get an error") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Quantized<Mlp>> rank(world, {}, make<Mlp>());
    rank.net(images(3, 1));
    if (world.rank == 1) rank.net.module().observe(false);
    const auto message = message_of<UsageError>([&] { rank.net(images(3, 2)); });
    return message.substr(0, message.find(','));
  });
  CHECK(text == "QuantizationAware: expected the same phases on all ranks");
}

TEST_CASE("qat: a NaN on one rank is an error on all") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Quantized<Mlp>> rank(world, {}, make<Mlp>());
    auto x = images(3, 1);
    if (world.rank == 1) x(0, 0) = std::numeric_limits<float>::quiet_NaN();
    return message_of<NonFiniteError>([&] { rank.net(x); });
  });
  CHECK_THAT(text, Catch::Matchers::Contains("'fc1.input': got a NaN or an infinity"));
}

TEST_CASE("qat: within join ranks that run out are refused, or end all") {
  const auto joined = [](bool ends) {
    return common_text(2, [ends](const World& world) {
      Distributed<Quantized<Mlp>> rank(world, {}, make<Mlp>());
      return message_of<UsageError>([&] {
        rank.net.join(
            [&] {
              for (std::uint32_t step = 0; step < 2 + static_cast<std::uint32_t>(world.rank); ++step)
                cross_entropy(rank.net(images(3, step)), test::labels(3, 3, step)).backward();
            },
            {.throw_on_early_termination = ends});
      });
    });
  };
  CHECK_THAT(joined(false), Catch::Matchers::Contains("a rank has run out of batches"));
  CHECK_THAT(joined(true), Catch::Matchers::Contains("rank 0 has run out of batches"));
}

/// Divides its layers.
struct Columns : nn::Module {
  nn::ColumnParallelLinear<Cpu> up{48, 4};
  nn::RowParallelLinear<Cpu> down{4, 3};
  CHORUS_MODULE(Columns, up, down)
  auto forward(const auto& x) const { return down(up(x)); }
};

TEST_CASE("qat: TensorParallel is refused") {
  const auto texts = Ranks(2, [](const World& world) {
                       auto all = comm::connect(world);
                       return message_of<UsageError>([&] {
                         TensorParallel<Quantized<Columns>> net{make<Columns>(), all, TensorParallelOptions{}, 3};
                         net(images(3, 1));
                       });
                     }).texts();  // the first exception ends the other rank
  CHECK_THAT(texts[0] + texts[1], Catch::Matchers::Contains("QuantizationAware: TensorParallel, which splits a"));
}

}  // namespace quantized_policies_test
