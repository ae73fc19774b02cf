// DistributedDataParallel's options: buckets, ignored, delayed and shared parameters, the comparison of ranks' options.
#include <catch.hpp>
#include <chorus/core/trace.hpp>

#include <unit/parallel/ranks.hpp>

namespace ddp_options_test {

using namespace test::names;

constexpr double kib = 1.0 / 1024;  // in MiB
template <class Net>
std::string bucket_sizes(const Net& net) {
  std::string text;
  for (const auto bytes : net.bucket_bytes()) text += cat(bytes / sizeof(double), " ");
  return text;
}

/// One step on rank `world.rank`'s share of batch `number`.
template <class Net>
void backward(Net& net, const World& world, std::uint32_t number = 1) {
  cross_entropy(net(test::share(numbers(7, 5, number), world)), test::share(labels(7, 3, number), world)).backward();
}

/// Uses one layer twice.
template <class D>
struct Tied : nn::Module {
  nn::Linear<D, double> in{5, 7}, hidden{7, 7}, out{7, 3};
  nn::Linear<D, double> again = hidden;
  CHORUS_MODULE(Tied, in, hidden, again, out)
  auto forward(const auto& x) const { return out(tanh(again(tanh(hidden(tanh(in(x))))))); }
};

/// A head that each rank owns, with a different width on each.
template <class D>
struct OwnHead : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, head, fc2{7, 3};
  nn::BatchNorm<D, double> norm{7};
  CHORUS_MODULE(OwnHead, fc1, head, fc2, norm)
  explicit OwnHead(Index width) : head{7, width} {}
  auto forward(const auto& x) const {
    const auto h = tanh(fc1(x));
    return std::pair(fc2(h), sum(tanh(head(norm(h)))));
  }
};

TEST_CASE("ddp options: the first step already has a small first bucket") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world, {.first_bucket_cap_mb = 8 * 21.0 / 1024 * kib});
    return bucket_sizes(rank.net);
  });
  CHECK(text == "21 90 ");
}

/// 1.5 MiB per layer.
template <class D>
struct Wide : nn::Module {
  nn::Linear<D> fc1{768, 512, {.bias = false}}, fc2{512, 768, {.bias = false}}, fc3{768, 512, {.bias = false}};
  CHORUS_MODULE(Wide, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(fc2(fc1(x))); }
};

/// A device other than the processor.
struct Elsewhere {
  int index = 0;
  static constexpr const char* kind = "elsewhere";
  friend bool operator==(const Elsewhere&, const Elsewhere&) = default;
};

TEST_CASE("ddp options: how large buckets are by default depends on the device, and what is given holds") {
  CHECK(DistributedDataParallelOptions{}.caps<Cpu>().cap_mb(1) == 2);
  CHECK(DistributedDataParallelOptions{}.caps<Elsewhere>().cap_mb(1) == 25);
  CHECK(DistributedDataParallelOptions{}.caps<Cpu>().cap_mb(0) == 3);
  CHECK(DistributedDataParallelOptions{}.caps<Elsewhere>().cap_mb(0) == 1);
  const DistributedDataParallelOptions given{.bucket_cap_mb = 25};
  CHECK(given.caps<Cpu>().cap_mb(1) == 25);
  CHECK(DistributedDataParallelOptions{.first_bucket_cap_mb = 0.5}.caps<Cpu>().cap_mb(0) == 0.5);
  CHECK(DistributedDataParallelOptions{.bucket_cap_mb = 0}.caps<Elsewhere>().cap_mb(1) == 0);
#if CHORUS_USE_CUDA
  CHECK(DistributedDataParallelOptions{}.caps<Cuda>().cap_mb(1) == 25);
#endif

  comm::AnyCommunicator alone;
  const auto bytes = [&](const DistributedDataParallelOptions& options) {
    return DistributedDataParallel<Wide<Cpu>>{Wide<Cpu>{}, alone, options}.bucket_bytes();
  };
  constexpr std::size_t layer = 3 << 19;
  CHECK(bytes({}) == std::vector{2 * layer, layer});
  CHECK(bytes({.first_bucket_cap_mb = 1}) == std::vector{layer, layer, layer});
  CHECK(bytes({.first_bucket_cap_mb = 1, .bucket_cap_mb = 3}) == std::vector{layer, 2 * layer});
}

TEST_CASE("ddp options: a negative cap, and names that the model does not have, are refused") {
  comm::AnyCommunicator alone;
  const auto net = [&](const DistributedDataParallelOptions& options) {
    return message_of<UsageError>([&] {
      DistributedDataParallel<test::Smooth<Cpu>> made{make<test::Smooth<Cpu>>(), alone, options};
    });
  };
  CHECK_THAT(net({.first_bucket_cap_mb = -1}), Contains("at least 0 MiB, got -1"));
  CHECK_THAT(net({.bucket_cap_mb = -2}), Contains("-2"));
  CHECK(net({.parameters_and_buffers_to_ignore = {"fc9.weight"}}) ==
        "DistributedDataParallel: parameters_and_buffers_to_ignore names 'fc9.weight', which the model does not have");
  const auto normed = [&](const DistributedDataParallelOptions& options) {
    return message_of<UsageError>([&] {
      DistributedDataParallel<test::Normed<Cpu>> made{make<test::Normed<Cpu>>(), alone, options};
    });
  };
  CHECK(normed({.parameters_and_buffers_to_ignore = {"norm.running_mean"}}) == "nothing");
  std::vector<std::string> all;
  for (const auto& named : DistributedDataParallel<test::Smooth<Cpu>>{make<test::Smooth<Cpu>>(), alone}.parameters())
    all.push_back(named.name);
  CHECK(net({.parameters_and_buffers_to_ignore = all}) ==
        "DistributedDataParallel: the model has no parameter that requires a gradient and that ranks share");
}

TEST_CASE("ddp options: ranks with other options are named") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world, {.bucket_cap_mb = world.rank == 1 ? 5.0 : 25.0});
    return std::string("no error");
  });
  CHECK_THAT(text,
             Contains("rank 1 has options: bucket_cap_mb 3 5,") && Contains("rank 0 has options: bucket_cap_mb 3 25,"));
}

TEST_CASE("ddp options: a parameter that the model uses at two places is one, and sent once") {
  SingleDevice<Tied<Cpu>> single{make<Tied<Cpu>>(), 3};
  cross_entropy(single(numbers(7, 5, 1)), labels(7, 3, 1)).backward();
  const auto text = common_text(3, [](const World& world) {
    Distributed<Tied<Cpu>> rank(world, {.first_bucket_cap_mb = 0, .bucket_cap_mb = 0});
    std::size_t bytes = 0;
    for (const auto bucket : rank.net.bucket_bytes()) bytes += bucket;
    if (bytes != (35 + 7 + 49 + 7 + 21 + 3) * sizeof(double)) return cat(bytes, " bytes");
    backward(rank.net, world);
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
}

TEST_CASE("ddp options: ignored parameters and buffers are each rank's own, of any size") {
  const auto texts =
      Ranks(2, [](const World& world) {
        const DistributedDataParallelOptions options{
            .parameters_and_buffers_to_ignore = {"head.weight", "head.bias", "norm.running_mean"}};
        OwnHead<Cpu> model(world.rank + 2);
        model.norm.running_mean.value()(0) = world.rank;
        model.norm.running_var.value()(0) = world.rank + 5;
        for (const auto& named : nn::named_parameters<Cpu>(model))
          for (Index i = 0; i < named.parameter->count(); ++i)
            static_cast<double*>(named.parameter->value_data())[i] = 0.1 * (world.rank + 1);
        Distributed<OwnHead<Cpu>> rank(world, options, model);
        const auto& m = rank.net.module();
        const auto start = cat(m.head.weight.value()(0, 0), " ", m.norm.running_mean.value()(0), " ",
                               m.norm.running_var.value()(0), " ", m.fc1.weight.value()(0, 0), " ");
        const auto [y, other] = rank.net(numbers(4, 5, static_cast<std::uint32_t>(world.rank)));
        (sum(y) + other).backward();
        return start + "; " + cat(m.head.weight.grad().numel(), "; ") + test::text_of(m.fc1.weight.grad().to_vector());
      }).texts();
  CHECK_THAT(texts[0], Contains("0.1 0 5 0.1 ; 14; "));
  CHECK_THAT(texts[1], Contains("0.2 1 5 0.1 ; 21; "));
  const auto shared = [](const std::string& text) { return text.substr(text.rfind(';')); };
  CHECK(shared(texts[0]) == shared(texts[1]));
}

TEST_CASE("ddp options: ignored parameters stay each rank's own in the order of a checkpoint that knew of none") {
  const auto texts = Ranks(2, [](const World& world) {
                       OwnHead<Cpu> model(3);
                       Distributed<OwnHead<Cpu>> rank(
                           world, {.parameters_and_buffers_to_ignore = {"head.weight", "head.bias"}}, model);
                       std::vector<std::string> order;
                       for (const auto& named : nn::named_parameters<Cpu>(model)) order.push_back(named.name);
                       detail::access_to(rank.net).set_parameter_order(order);
                       rank.net.module().head.bias.value()(0) = world.rank + 7;
                       rank.net.join([&] {  // its end sends the parameters before the ignored ones
                         for (int passes = world.rank; passes < 2; ++passes) {
                           const auto [y, other] = rank.net(numbers(4, 5, 1));
                           (sum(y) + other).backward();
                         }
                       });
                       return cat(rank.net.parameter_order().back(), " ", rank.net.module().head.bias.value()(0));
                     }).texts();
  CHECK(texts == std::vector<std::string>{"head.bias 7", "head.bias 8"});
}

TEST_CASE("ddp options: without init_sync each rank keeps its numbers, and nothing is sent") {
  const auto texts = Ranks(2, [](const World& world) {
                       const auto model = make<test::Smooth<Cpu>>(static_cast<std::uint32_t>(world.rank + 1));
                       trace::reset_traffic();
                       Distributed<test::Smooth<Cpu>> rank(world, {.init_sync = false}, model);
                       return cat(trace::bytes_sent(world.rank), " ", io::parameters_sha256(rank.net.module()));
                     }).texts();
  CHECK_THAT(texts[0], Catch::Matchers::StartsWith("0 "));
  CHECK_THAT(texts[1], Catch::Matchers::StartsWith("0 "));
  CHECK(texts[0] != texts[1]);
}

TEST_CASE("ddp options: without broadcast_buffers each rank keeps its own") {
  const auto texts = Ranks(2, [](const World& world) {
                       Distributed<test::Normed<Cpu>> rank(world, {.broadcast_buffers = false});
                       for (std::uint32_t number = 0; number < 2; ++number)
                         rank.net(test::share(numbers(8, 5, number), world)).backward(numbers(4, 3, 1));
                       return test::text_of(rank.net.module().norm.running_mean.value().to_vector());
                     }).texts();
  CHECK(texts[0] != texts[1]);
}

/// Before each pass that averages gradients, all ranks take the means of their buffers.
template <class Net>
struct AverageBuffers final : ddp::Extension<Cpu> {
  Net& net;
  explicit AverageBuffers(Net& of) : net(of) {}
  void forward_begins(ddp::ForwardPass& pass) override { averages = pass.sync && net.training(); }
  void ready_for_forward() override {
    if (averages) test::average_buffers(nn::named_buffers<Cpu>(net.module()), net.communicator());
  }
  bool averages = false;
};

TEST_CASE("ddp options: an extension that averages the ranks' buffers") {
  using Model = test::Normed<Cpu>;
  const auto set = [](auto& net, double value) {
    std::fill_n(net.module().norm.running_mean.value().data(), 3, value);
  };
  const auto run = [&](const World& world) {
    Distributed<Model> rank(world, {.broadcast_buffers = false});
    auto& net = rank.net;
    net.extend(std::make_unique<AverageBuffers<std::remove_reference_t<decltype(net)>>>(net));
    set(net, world.rank);
    net(numbers(4, 5, 1));  // the same batch on all ranks
    const auto averaged = net.module().norm.running_mean.value().to_vector();
    {
      const auto quiet = net.no_sync();
      net(numbers(4, 5, 1));
    }
    return test::text_of(averaged) + test::text_of(net.module().norm.running_mean.value().to_vector());
  };
  const auto got = test::numbers_in(common_text(3, run));
  SingleDevice<Model> single{make<Model>(), 3};
  set(single, 1.0);  // the mean of 0, 1 and 2
  std::vector<double> expected;
  for (int pass = 0; pass < 2; ++pass) {
    single(numbers(4, 5, 1));
    for (const double value : single.module().norm.running_mean.value().to_vector()) expected.push_back(value);
  }
  CHECK(distance(got, expected) < rounding);
}

}  // namespace ddp_options_test
