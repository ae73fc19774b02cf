// Bytes that the policies send, counted at the trace points: by device 0 under DataParallel, and by each rank under
// DistributedDataParallel.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "ranks.hpp"

namespace traffic_test {

using namespace test::names;
using trace::Traffic;

std::uint64_t sent(int device, Traffic kind) { return trace::bytes_sent(device, kind); }

/// The sizes of its parameters are multiples of 12, so that chunks of 2, 3 and 4 ranks have equal sizes.
template <class D>
struct Even : nn::Module {
  nn::Linear<D, double> fc1{5, 12}, fc2{12, 24}, fc3{24, 12};
  CHORUS_MODULE(Even, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(tanh(fc2(tanh(fc1(x))))); }
};
constexpr std::size_t even_bytes = (60 + 12 + 288 + 24 + 288 + 12) * sizeof(double);

/// For one training step, by rank: bytes of gradients, and all bytes.
template <class Model>
std::vector<std::array<std::uint64_t, 2>> ddp_bytes(int ranks, const DistributedDataParallelOptions& options = {}) {
  const auto texts =
      Ranks(ranks, [&](const World& world) {
        Distributed<Model> rank(world, options);
        optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1}};
        const auto step = [&](std::uint32_t number) {
          optimizer.zero_grad();
          cross_entropy(rank.net(test::share(numbers(7, 5, number), world)), test::share(labels(7, 3, number), world))
              .backward();
          optimizer.step();
        };
        step(1);  // the first one learns the order
        trace::reset_traffic();
        step(2);
        return cat(sent(world.rank, Traffic::gradients), " ", trace::bytes_sent(world.rank));
      }).texts();
  std::vector<std::array<std::uint64_t, 2>> out;
  for (const auto& text : texts) {
    INFO(text);
    const auto got = test::numbers_in(text);
    REQUIRE(got.size() == 2);
    out.push_back({static_cast<std::uint64_t>(got[0]), static_cast<std::uint64_t>(got[1])});
  }
  return out;
}

TEST_CASE("traffic: under ddp each of N ranks sends exactly 2(N-1)/N of the gradient bytes per step") {
  for (const std::uint64_t n : {1u, 2u, 3u, 4u}) {
    INFO(n << " ranks");
    for (const double cap : {25.0, 1e-4}) {  // one bucket, or one for each parameter or two
      const auto bytes = ddp_bytes<Even<Cpu>>(static_cast<int>(n), {.first_bucket_cap_mb = cap, .bucket_cap_mb = cap});
      for (const auto& [gradients, all] : bytes) {
        CHECK(gradients * n == 2 * (n - 1) * even_bytes);
        CHECK(all - gradients == (n - 1) * 120);  // the loss's count, and the comparison of ranks: one message
      }
    }
  }
}

TEST_CASE("traffic: where N doesn't divide a bucket, a rank sends up to 2 numbers more or less, and all send as much") {
  constexpr std::uint64_t numbers_of_model = 35 + 7 + 42 + 6 + 18 + 3;  // 111
  for (const std::uint64_t n : {2u, 3u, 4u}) {
    INFO(n << " ranks");
    const auto bytes = ddp_bytes<test::Smooth<Cpu>>(static_cast<int>(n));
    std::uint64_t together = 0;
    for (const auto& [gradients, all] : bytes) {
      const double exact = 2.0 * static_cast<double>((n - 1) * numbers_of_model) / static_cast<double>(n);
      CHECK(std::abs(static_cast<double>(gradients) / sizeof(double) - exact) <= 2);
      together += gradients;
    }
    CHECK(together == 2 * (n - 1) * numbers_of_model * sizeof(double));
  }
}

TEST_CASE("traffic: under ddp rank 0's buffers go around once before each pass in training, and in eval") {
  const auto text = Ranks(3, [](const World& world) {
                      Distributed<test::Normed<Cpu>> rank(world);
                      trace::reset_traffic();
                      rank.net(numbers(2, 5, 1));
                      rank.net.eval();
                      rank.net(numbers(2, 5, 1));
                      return cat(sent(world.rank, Traffic::buffers), ";");
                    }).texts();
  constexpr std::size_t bytes = (3 + 3 + 1) * 8;
  CHECK(text == std::vector<std::string>{cat(2 * bytes, ";"), cat(2 * bytes, ";"), "0;"});  // a chain that ends at 2
}

TEST_CASE("traffic: under dp device 0 sends (N-1) times the parameter bytes per step") {
  for (const std::uint64_t n : {1u, 2u, 3u, 4u}) {
    INFO(n << " devices");
    std::vector<int> ids;
    for (int i = 0; i < static_cast<int>(n); ++i) ids.push_back(i);
    DataParallel<Even<Cpu>> net{make<Even<Cpu>>(), {.device_ids = ids}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    for (std::uint32_t number = 0; number < 3; ++number) {
      trace::reset_traffic();
      test::step(net, optimizer, number, 12);
      CHECK(sent(0, Traffic::parameters) == (n - 1) * even_bytes);
      CHECK(sent(0, Traffic::inputs) == (n - 1) * 12 / n * 5 * sizeof(double));
      CHECK(sent(0, Traffic::buffers) == 0);
      CHECK(sent(0, Traffic::gradients) == 0);
      CHECK(sent(0, Traffic::outputs) == (n - 1) * 12 / n * 12 * sizeof(double));  // their gradients
      for (int i = 1; i < static_cast<int>(n); ++i) {
        CHECK(sent(i, Traffic::gradients) == even_bytes);
        CHECK(sent(i, Traffic::outputs) == 12 / n * 12 * sizeof(double));
        CHECK(sent(i, Traffic::parameters) + sent(i, Traffic::buffers) + sent(i, Traffic::inputs) == 0);
      }
    }
  }
}

TEST_CASE("traffic: under dp only parameters that have changed travel, to the devices that work") {
  DataParallel<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const auto& model = net.module();
  const auto parameters_sent = [&](Index batch) {
    trace::reset_traffic();
    net(numbers(batch, 5, 1));
    return sent(0, Traffic::parameters);
  };
  const auto all = net.flat_parameters().bytes();
  CHECK(parameters_sent(6) == 2 * all);
  CHECK(parameters_sent(6) == 0);
  model.fc2.weight.assign(model.fc2.weight.value());
  CHECK(parameters_sent(6) == 2 * model.fc2.weight.value().bytes());
  CHECK(parameters_sent(6) == 0);
  // Frozen parameters are not sent back, nor those of layers without a gradient.
  model.fc1.weight.set_requires_grad(false);
  model.fc1.bias.set_requires_grad(false);
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  test::step(net, optimizer, 1, 6);
  CHECK(parameters_sent(6) == 2 * (all - 42 * sizeof(double)));
  // A batch of two uses two devices; the third one gets the parameters when a later batch needs it.
  test::step(net, optimizer, 2, 6);
  CHECK(parameters_sent(2) == all - 42 * sizeof(double));
  CHECK(parameters_sent(6) == all - 42 * sizeof(double));
  CHECK(parameters_sent(1) == 0);
}

TEST_CASE("traffic: under dp buffers travel before each pass") {
  DataParallel<test::Normed<Cpu>> net{make<test::Normed<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  for (int pass = 0; pass < 2; ++pass) {
    trace::reset_traffic();
    net(numbers(6, 5, 1));
    CHECK(sent(0, Traffic::buffers) == 2 * (3 + 3 + 1) * 8);
  }
}

}  // namespace traffic_test
