// Communication hooks: their averages, their traffic, and their residuals.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/post_local_sgd.hpp>
#include <chorus/parallel/hooks/power_sgd.hpp>
#include <chorus/parallel/hooks/quantize.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_hooks_test {

using namespace test::names;
using test::length;

constexpr std::size_t wide_numbers = 20 * 24 + 24 + 24 * 16 + 16;
using Model = test::Wide<Cpu>;

template <class Net>
void backward(Net& net, const World& world, Index batch, std::uint32_t number = 1) {
  net(test::share(numbers(batch, 20, number), world)).backward(test::share(numbers(batch, 16, number + 100), world));
}
/// The gradient of `backward`'s mean loss for a seed: the seed's share of the batch gives the weight.
std::vector<double> mean_gradient(Index batch, int ranks, std::uint32_t number = 1) {
  SingleDevice<Model> net{make<Model>(), 3};
  for (int rank = 0; rank < ranks; ++rank) {
    const World world{.rank = rank, .size = ranks};
    const auto x = test::share(numbers(batch, 20, number), world);
    const auto weight = static_cast<double>(x.size(0)) / static_cast<double>(batch);
    (net(x) * weight).backward(contiguous(test::share(numbers(batch, 16, number + 100), world)));
  }
  return test::gradients(net.module());
}

/// The gradients of `steps` passes over the same batch, and the bytes that the last one sent.
template <class Hook>
struct Outcome {
  std::vector<std::vector<double>> gradients;
  std::uint64_t bytes = 0;

  Outcome(int ranks, int steps, Index batch, const Hook& hook = {}) {
    const auto text = common_text(ranks, [=](const World& world) {
      Distributed<Model, Hook> rank(world, {}, make<Model>(), hook);
      std::string out;
      for (int step = 0; step < steps; ++step) {
        for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
        trace::reset_traffic();
        backward(rank.net, world, batch);
        out += test::text_of(test::gradients(rank.net.module()));
      }
      std::vector<double> sent{static_cast<double>(trace::bytes_sent(world.rank, trace::Traffic::gradients))};
      rank.net.sum(sent);
      return out + cat(sent[0]);
    });
    const auto all = test::numbers_in(text);
    REQUIRE(all.size() == static_cast<std::size_t>(steps) * wide_numbers + 1);
    for (int step = 0; step < steps; ++step)
      gradients.emplace_back(all.begin() + step * static_cast<std::ptrdiff_t>(wide_numbers),
                             all.begin() + (step + 1) * static_cast<std::ptrdiff_t>(wide_numbers));
    bytes = static_cast<std::uint64_t>(all.back());
  }

  /// The relative error of step `step`.
  double error(std::size_t step, const std::vector<double>& expected) const {
    auto rest = gradients[step];
    for (std::size_t i = 0; i < rest.size(); ++i) rest[i] -= expected[i];
    return length(rest) / length(expected);
  }
  /// The same for the mean over all steps: what one step leaves out follows in the next.
  double error_of_mean(const std::vector<double>& expected) const {
    std::vector<double> rest(expected.size());
    for (std::size_t i = 0; i < rest.size(); ++i) {
      for (const auto& one : gradients) rest[i] += one[i] / static_cast<double>(gradients.size());
      rest[i] -= expected[i];
    }
    return length(rest) / length(expected);
  }
};

TEST_CASE("hooks: an all-reduce sends 2(n-1)/n of the gradients' bytes, a compressed one a half or a quarter of that") {
  for (const int n : {2, 3}) {
    INFO(n << " ranks");
    const auto all = static_cast<std::uint64_t>(2 * (n - 1)) * wide_numbers;  // of all ranks together
    CHECK(Outcome<AllReduce>(n, 1, 7).bytes == all * 8);
    CHECK(Outcome<Bf16Compress>(n, 1, 7).bytes == all * 2);
    CHECK(Outcome<Fp16Compress>(n, 1, 7).bytes == all * 2);
    constexpr std::uint64_t blocks = (wide_numbers + 511) / 512;
    CHECK(Outcome<Quantize8Bit>(n, 1, 7).bytes ==
          static_cast<std::uint64_t>(n * (n - 1)) * (wide_numbers + 4 * blocks));
    CHECK(Outcome<NoCommunication>(1, 1, 7).bytes == 0);
  }
}

TEST_CASE("hooks: averages are those of the all-reduce, to the precision of the wire") {
  const auto expected = mean_gradient(7, 3);
  CHECK(Outcome<AllReduce>(3, 1, 7).error(0, expected) < 1e-14);
  CHECK(Outcome<Bf16Compress>(3, 1, 7).error(0, expected) < 1e-2);
  CHECK(Outcome<Bf16Compress>(3, 1, 7).error(0, expected) > 1e-5);  // proves that it was compressed
  CHECK(Outcome<Fp16Compress>(3, 1, 7).error(0, expected) < 1e-3);
  CHECK(Outcome<Quantize8Bit>(3, 1, 7).error(0, expected) < 3e-2);
}

TEST_CASE("hooks: what rounding cuts off comes with the next steps") {
  const auto expected = mean_gradient(7, 2);
  const auto gain = [&]<class Hook>(const Hook& hook) {
    const Outcome<Hook> outcome(2, 16, 7, hook);
    return outcome.error_of_mean(expected) / outcome.error(0, expected);
  };
  CHECK(gain(Quantize8Bit{}) < 0.2);
  CHECK(gain(PowerSgd{}) < 0.5);
  // A part of a narrow float's error arises in the sums of ranks.
  CHECK(gain(Bf16Compress{.error_feedback = true}) < 0.9 * gain(Bf16Compress{.error_feedback = false}));
}

TEST_CASE("hooks: a gradient that is not finite is seen by all ranks, and not remembered") {
  const auto check_hook = [](const auto& hook) {
    using Hook = std::remove_cvref_t<decltype(hook)>;
    const auto text = common_text(2, [&](const World& world) {
      Distributed<Model, Hook> rank(world, {}, make<Model>(), hook);
      std::string finite;
      for (int step = 0; step < 4; ++step) {
        for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
        const double factor = step == 1 && world.rank == 1 ? INFINITY : step == 2 && world.rank == 0 ? NAN : 1;
        (rank.net(test::share(numbers(8, 20, 1), world)) * factor).backward(test::share(numbers(8, 16, 101), world));
        const double size = length(test::gradients(rank.net.module()));
        finite += std::isfinite(size) && size > 0.1 ? "finite " : std::isfinite(size) ? "0 " : "not ";
      }
      return finite;
    });
    CHECK(text == "finite not not finite ");
  };
  check_hook(Bf16Compress{});
  check_hook(Fp16Compress{});
  check_hook(Quantize8Bit{});
  check_hook(PowerSgd{});
}

TEST_CASE("hooks: powersgd is exact for gradients of its rank, and sends rank (n + m) numbers") {
  // For two samples, one on each rank, a layer's gradient has rank 2.
  const auto expected = mean_gradient(2, 2);
  const Outcome<PowerSgd> two(2, 2, 2, {.matrix_approximation_rank = 2});
  CHECK(two.error(0, expected) < 1e-9);
  CHECK(two.error(1, expected) < 1e-9);
  constexpr std::uint64_t sent = 2 * (20 + 24) + 24 + 2 * (24 + 16) + 16;
  CHECK(two.bytes == 2 * sent * 8);
  const Outcome<PowerSgd> one(2, 1, 2);
  CHECK(one.error(0, expected) > 0.05);
  CHECK(one.error(0, expected) < 1);
  // The first steps are sent in full.
  const Outcome<PowerSgd> later(2, 3, 7, {.start_powersgd_iter = 2});
  const auto full = mean_gradient(7, 2);
  CHECK(later.error(0, full) < 1e-14);
  CHECK(later.error(1, full) < 1e-14);
  CHECK(later.error(2, full) > 0.01);
}

TEST_CASE("hooks: powersgd finds its way back from gradients that were 0, or of a lower rank") {
  const auto expected = mean_gradient(4, 2);
  for (const bool warm_start : {true, false}) {
    const PowerSgd hook{.matrix_approximation_rank = 4, .use_error_feedback = false, .warm_start = warm_start};
    const auto text = common_text(2, [&](const World& world) {
      Distributed<Model, PowerSgd> rank(world, {}, make<Model>(), hook);
      std::string out;
      const auto pass = [&](Index batch, double factor) {
        for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
        (rank.net(test::share(numbers(batch, 20, 1), world)) * factor)
            .backward(test::share(numbers(batch, 16, 101), world));
        return test::gradients(rank.net.module());
      };
      for (const Index before : {0, 2}) {  // samples, as many as the gradient's rank
        for (int step = 0; step < 2; ++step) pass(before == 0 ? 4 : before, before == 0 ? 0 : 1);
        pass(4, 1);
        auto off = pass(4, 1);
        for (std::size_t i = 0; i < off.size(); ++i) off[i] -= expected[i];
        out += cat(length(off) / length(expected), " ");
      }
      return out;
    });
    INFO(text);
    for (const double error : test::numbers_in(text)) CHECK(error < 1e-9);
    CHECK(test::numbers_in(text).size() == 2);
  }
}

struct Floats : nn::Module {
  nn::Linear<Cpu> fc{20, 16};
  CHORUS_MODULE(Floats, fc)
  auto forward(const auto& x) const { return fc(x); }
};

TEST_CASE("hooks: powersgd takes gradients whose squares are among the smallest floats") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Floats, PowerSgd> rank(world, {}, Floats{}, {.matrix_approximation_rank = 2});
    std::string out;
    for (int step = 0; step < 4; ++step) {
      for (const auto& named : rank.net.parameters()) named.parameter->set_grad_arrived(false);
      (rank.net(to<float>(test::share(numbers(8, 20, 1), world))) * 1e-20f)
          .backward(to<float>(test::share(numbers(8, 16, 101), world)));
      const double size = 1e20 * length(to<double>(rank.net.module().fc.weight.grad()).to_vector());
      out += size > 1 && size < 100 ? "fine " : cat(size, " ");
    }
    return out;
  });
  CHECK(text == "fine fine fine fine ");
}

TEST_CASE("hooks: powersgd leaves matrices whole that it would not make much smaller") {
  const auto expected = mean_gradient(7, 2);
  // 20 x 24 is 5.5 times 2 (20 + 24), and 24 x 16 is 4.8 times 2 (24 + 16).
  const Outcome<PowerSgd> one(2, 1, 7, {.matrix_approximation_rank = 2, .min_compression_rate = 5});
  CHECK(one.bytes == 2 * (2 * (20 + 24) + 24 + 24 * 16 + 16) * 8);
  CHECK(one.error(0, expected) > 0.01);
  const Outcome<PowerSgd> none(2, 1, 7, {.matrix_approximation_rank = 2, .min_compression_rate = 6});
  CHECK(none.bytes == 2 * (20 * 24 + 24 + 24 * 16 + 16) * 8);
  CHECK(none.error(0, expected) < 1e-14);
}

TEST_CASE("hooks: powersgd without error feedback, and without the last step's Q") {
  const auto expected = mean_gradient(7, 2);
  const Outcome<PowerSgd> forgetful(2, 8, 7, {.use_error_feedback = false}), usual(2, 8, 7);
  CHECK(forgetful.error(7, expected) < 0.95 * forgetful.error(0, expected));  // the same gradient: Q converges to it
  CHECK(usual.error_of_mean(expected) < 0.8 * forgetful.error_of_mean(expected));
  const Outcome<PowerSgd> cold(2, 8, 7, {.use_error_feedback = false, .warm_start = false});
  CHECK(cold.error(0, expected) == forgetful.error(0, expected));
  CHECK(cold.error(7, expected) > forgetful.error(7, expected));
  CHECK(cold.error(1, expected) != cold.error(0, expected));
  CHECK(cold.bytes == forgetful.bytes);
}

TEST_CASE("hooks: powersgd without columns, or with no rate, is refused on all ranks") {
  const auto refused = common_text(2, [](const World& world) {
    return message_of<UsageError>([&] {
      Distributed<Model, PowerSgd> one(world, {}, make<Model>(), {.min_compression_rate = 0});
      backward(one.net, world, 4);
    });
  });
  CHECK(refused == "PowerSgd: expected min_compression_rate above 0, got 0");
  for (const Index rank : {0, -1}) {
    const auto text = common_text(2, [rank](const World& world) {
      return message_of<UsageError>([&] {
        Distributed<Model, PowerSgd> one(world, {}, make<Model>(), {.matrix_approximation_rank = rank});
        backward(one.net, world, 4);
      });
    });
    CHECK(text == cat("PowerSgd: expected matrix_approximation_rank of at least 1, got ", rank));
  }
}

TEST_CASE("hooks: without communication each rank has its own gradients") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<Model, NoCommunication> rank(world);
                       trace::reset_traffic();
                       backward(rank.net, world, 8);
                       return cat(trace::bytes_sent(world.rank, trace::Traffic::gradients), " ") +
                              test::text_of(test::gradients(rank.net.module()));
                     }).texts();
  CHECK(texts[0] != texts[1]);
  CHECK(texts[0].substr(0, 2) == "0 ");
}

TEST_CASE("hooks: post-local sgd averages gradients first, then parameters, every few steps and in eval") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Model, PostLocalSgd> rank(world, {}, make<Model>(), {.start_local_sgd_iter = 2, .period = 2});
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1}};
    std::string log;
    for (std::uint32_t step = 0; step < 7; ++step) {
      optimizer.zero_grad();
      trace::reset_traffic();
      backward(rank.net, world, 8, step);
      log += cat(trace::bytes_sent(world.rank, trace::Traffic::gradients) / 8, "+",
                 trace::bytes_sent(world.rank, trace::Traffic::parameters) / 8, " ");
      optimizer.step();
    }
    log += rank.net.same_on_all_ranks(io::parameters_sha256(rank.net.module())) ? "same " : "apart ";
    rank.net.eval();
    return log + (rank.net.same_on_all_ranks(io::parameters_sha256(rank.net.module())) ? "same" : "apart");
  });
  CHECK(text == "904+0 904+0 0+0 0+0 0+904 0+0 0+904 apart same");
}

TEST_CASE("ddp: a parameter's hooks see this rank's gradient, whether they came before the policy or after") {
  for (const bool before : {true, false})
    for (const char* cap : {"0", "25"}) {
      const auto texts =
          Ranks(2, [=](const World& world) -> std::string {
            std::string seen, given;
            const auto add = [&](auto& model) {
              const auto add_to = [&](auto parameter) {
                parameter.register_hook([&seen, parameter] { seen += test::text_of(parameter.grad().to_vector()); });
                parameter.register_hook([&given](const auto& grad) { given += test::text_of(grad.to_vector()); });
              };
              add_to(model.fc1.weight);
              add_to(model.fc1.bias);
            };
            auto model = make<Model>();
            if (before) add(model);
            const double mb = std::atof(cap);
            Distributed<Model> rank(world, {.first_bucket_cap_mb = mb, .bucket_cap_mb = mb}, std::move(model));
            if (!before) add(rank.net.module());
            for (const std::uint32_t number : {7u, 8u}) {
              seen = given = "";
              backward(rank.net, world, 8, number);
            }
            return given == seen ? "own" : "averaged";
          }).texts();
      CHECK(texts == std::vector<std::string>{"own", "own"});
    }
}

}  // namespace ddp_hooks_test
