// What canonical shares refuse, with a message on every rank; and their memory.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/data/sampler.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/fused_optimizer.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/same_bits.hpp>

#include "ranks.hpp"

namespace canonical_errors_test {

using namespace test::names;
using Catch::Matchers::Contains;
using Model = test::Smooth<Cpu>;
using Cut = SameBits<Model>;
using Single = SingleDevice<Cut>;
using Parallel = DataParallel<Cut>;
using Ddp = DistributedDataParallel<Cut>;
using Server = ParameterServer<Cut>;
using namespace chorus::same_bits;

template <class M = Model>
SameBits<M> cut(int shares) {
  return {make<M>(), shares};
}
Single single(int shares) { return Single(cut(shares), 3); }
/// The error of all ranks of a job; "different" and all messages if the ranks' messages differ.
template <class Body>
std::string message_of_ranks(int size, const Body& body) {
  const auto texts = Ranks(size, [&](const World& world) -> std::string {
                       alarm(30);
                       auto communicator = comm::connect(world);
                       return message_of<UsageError>([&] { body(world, communicator); });
                     }).texts();
  for (const auto& text : texts)
    if (text != texts[0]) {
      std::string all = "different:";
      for (const auto& each : texts) all += "\n" + each;
      return all;
    }
  return texts[0];
}
/// A rank's samples of a batch of whole shares.
template <class T, int Rank>
Tensor<T, Rank> share(const Tensor<T, Rank>& batch, int shares, const World& world) {
  const auto of = static_cast<std::size_t>(shares);
  const auto run = shares_of_device(of, static_cast<std::size_t>(world.size), static_cast<std::size_t>(world.rank));
  return batch.slice(0, share_begin(batch.size(0), of, run.begin), share_begin(batch.size(0), of, run.end));
}

TEST_CASE("canonical errors: a number of shares is 1 to 64, and at least that of the devices") {
  const auto range = "SameBits: expected 1 to 64 shares, got ";
  for (const int shares : {-1, 0, 65}) {
    CHECK(message_of<UsageError>([&] { single(shares); }) == cat(range, shares));
    CHECK(message_of<UsageError>([&] {
            Parallel net(cut(shares), {.device_ids = {0, 1}}, 3);
          }) == cat(range, shares));
    CHECK(message_of_ranks(2, [&](const World&, auto& c) { Ddp net(cut(shares), c, {}, 3); }) ==
          cat(range, shares));
    CHECK(message_of_ranks(2, [&](const World&, auto& c) {
            Server net(cut(shares), c, {}, 3);
          }) == cat(range, shares));
  }
  CHECK(single(64).canonical_shares() == 64);
  const auto too_few = "SameBits: each of 3 devices needs at least one share: expected at least that many, got 2";
  CHECK(message_of<UsageError>([&] {
          Parallel net(cut(2), {.device_ids = {0, 1, 2}}, 3);
        }) == too_few);
  CHECK(message_of_ranks(3, [&](const World&, auto& c) { Ddp net(cut(2), c, {}, 3); }) == too_few);
  CHECK(message_of_ranks(3, [&](const World&, auto& c) { Server net(cut(2), c, {}, 3); }) ==
        too_few);
}

TEST_CASE("canonical errors: samples lie along the first axis") {
  const auto axis =
      "SameBits: a batch is cut along its first axis: expected dim = 0, got 1; for samples along another axis pass "
      "batch_axis<1>(input)";
  CHECK(message_of<UsageError>([&] { Single(cut(4), 3, {.dim = 1}); }) == axis);
  CHECK(message_of<UsageError>([&] {
          Parallel net(cut(4), {.device_ids = {0, 1}, .dim = 1}, 3);
        }) == axis);
  CHECK(message_of_ranks(2, [&](const World&, auto& c) { Ddp net(cut(4), c, {.dim = 1}, 3); }) == axis);
  CHECK(message_of_ranks(2, [&](const World&, auto& c) {
          Server net(cut(4), c, {.dim = 1}, 3);
        }) == axis);
}

TEST_CASE("canonical errors: under ddp no other hook, and no options that look at gradients on their way") {
  CHECK(message_of_ranks(2, [](const World&, auto& c) {
          DistributedDataParallel<Cut, Bf16Compress> net(cut(4), c, {}, 3, Bf16Compress{});
        }) == "DistributedDataParallel: SameBits adds gradients up itself: expected the default hook, AllReduce, or "
              "ReduceScatter");
  const auto refused = [](const auto& choose) {
    DistributedDataParallelOptions options;
    choose(options);
    return message_of_ranks(2, [&](const World&, auto& c) { Ddp net(cut(4), c, options, 3); });
  };
  const std::string start = "DistributedDataParallel: SameBits and ", end = " can't be combined";
  CHECK(refused([](auto& options) { options.static_graph = true; }) == start + "static_graph" + end);
  CHECK(refused([](auto& options) { options.non_finite = NonFinite::skip_step; }) ==
        start + "non_finite, which looks at one pass's gradients alone (a GradScaler looks at all)," + end);
  CHECK(refused([](auto& options) {
          options.parameters_and_buffers_to_ignore = {nn::named_parameters<Cpu>(*std::make_unique<Model>())[0].name};
        }) == start + "parameters_and_buffers_to_ignore" + end);
}

TEST_CASE("canonical errors: under ddp no optimizer steps in the middle of backward") {
  CHECK(
      message_of_ranks(2, [](const World&, auto& c) {
        Ddp net(cut(4), c, {}, 3);
        FusedOptimizer<optim::Sgd<Cpu>> optimizer(net, {.lr = 0.1});
      }) == "FusedOptimizer: under SameBits gradients are complete only after backward: expected the plain optimizer");
}

TEST_CASE("canonical errors: no join of ranks with different numbers of batches") {
  CHECK(message_of_ranks(2,
                         [&](const World&, auto& c) {
                           Ddp net(cut(4), c, {}, 3);
                           net.join([] {});
                         }) ==
        "DistributedDataParallel::join: canonical shares cut each batch for all ranks: expected equally many batches "
        "on each");
  CHECK(message_of_ranks(2,
                         [&](const World&, auto& c) {
                           Server net(cut(4), c, {}, 3);
                           net.join([] {}, {.step = [] {}});
                         }) ==
        "ParameterServer::join: canonical shares cut each batch for all ranks: expected equally many batches on each");
}

/// Returns a number that can't be computed from the shares' numbers.
template <class D>
struct Odd : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Odd, fc)
  auto forward(const auto& x) const { return sqrt(sum(square(fc(x)))); }
};
/// Returns its loss, or with `two` the sum of it and a mean over another count.
template <class D>
struct Losing : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 3};
  bool two = false;
  CHORUS_MODULE(Losing, fc1, fc2)
  auto forward(const auto& x, const auto& classes) const {
    const auto y = fc2(tanh(fc1(x)));
    const auto loss = cross_entropy(y, classes, {.ignore_index = 1});
    return two ? loss + mse_loss(y, Tensor<double, 2>::zeros(y.shape())) : loss;
  }
};
/// Returns a number that is not in a tensor.
template <class D>
struct Telling : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Telling, fc)
  auto forward(const auto& x) const { return std::pair(fc(x), value_of(x).size(0)); }
};

TEST_CASE("canonical errors: a model returns its samples' numbers, or a mean over them") {
  SingleDevice<SameBits<Odd<Cpu>>> net(cut<Odd<Cpu>>(4), 3);
  const auto message = Contains("canonical shares: the loss goes through 'sqrt', which is not linear in a mean or a sum");
  CHECK_THAT(message_of<UsageError>([&] { net(numbers(8, 5, 1)); }), message);
  {
    const NoGrad no_grad;  // without recorded gradients the batch is not cut
    SingleDevice<Odd<Cpu>> plain(make<Odd<Cpu>>(), 3);
    CHECK(net(numbers(8, 5, 1)).item() == plain(numbers(8, 5, 1)).item());
  }
  CHECK_THAT(message_of_ranks(2,
                              [&](const World& world, auto& c) {
                                DistributedDataParallel<SameBits<Odd<Cpu>>> ddp(cut<Odd<Cpu>>(4), c, {}, 3);
                                ddp(share(numbers(8, 5, 1), 4, world));
                              }),
             message);
  for (const auto& named : net.parameters()) named.parameter->set_wants_grad(false);
  CHECK(message_of<UsageError>([&] { net(numbers(8, 5, 1)); }) ==
        "canonical shares: the model returns a scalar for each share, not for the batch: expected one value for each "
        "sample, [batch]");
  SingleDevice<SameBits<Telling<Cpu>>> telling(cut<Telling<Cpu>>(4), 3);
  CHECK(std::get<1>(telling(numbers(8, 5, 1))) == 2);
  CHECK(message_of<UsageError>([&] { telling(numbers(7, 5, 1)); }) ==
        "canonical shares: an output that is not a tensor differs between shares");
}

TEST_CASE(
    "canonical errors: a model's own loss is the whole batch's, unless its parts are means over different numbers") {
  const auto run = [](auto& net, const auto& loss_of, const World& world) {
    std::string text;
    for (const Index size : {9, 3}) {
      const auto loss = loss_of(net(share(numbers(size, 5, 1), 4, world), share(labels(size, 3, 2), 4, world)));
      loss.backward();
      text += test::text_of({loss.item()}) + test::text_of(test::gradients(net.module()));
    }
    return text;
  };
  const auto itself = [](const auto& loss) { return loss; };
  using Own = Losing<Cpu>;
  SingleDevice<SameBits<Own>> net(cut<Own>(4), 3);
  SingleDevice<Own> plain(make<Own>(), 3);
  const auto expected = run(net, itself, {});
  CHECK(distance(test::numbers_in(expected), test::numbers_in(run(plain, itself, {}))) < 1e-5);
  for (const auto& ids : {std::vector{0}, std::vector{0, 1, 2}}) {
    DataParallel<SameBits<Own>> dp(cut<Own>(4), {.device_ids = ids}, 3);
    CHECK(run(dp, [&](const auto& losses) { return dp.mean_loss(losses); }, {}) == expected);
  }
  for (const int ranks : {1, 2, 3})
    CHECK(common_text(ranks, [&](const World& world) {
            auto communicator = comm::connect(world);
            DistributedDataParallel<SameBits<Own>> ddp(cut<Own>(4), communicator, {}, 3);
            return run(ddp, itself, world);
          }) == expected);

  auto two = make<Own>();
  two.two = true;
  SingleDevice<SameBits<Own>> refused(SameBits{std::move(two), 4}, 3);
  CHECK(message_of<UsageError>([&] { refused(numbers(9, 5, 1), labels(9, 3, 2)); }) ==
        "canonical shares: the model's loss adds means over different numbers of tokens, samples or elements, so its "
        "shares have no common weight: return each loss separately");
}

TEST_CASE("canonical errors: grad() and gradients of gradients don't go through shares") {
  auto net = single(4);
  const Variable<double, 2> x(numbers(8, 5, 1), true);
  const auto message = "canonical shares: grad() does not support a policy's forward pass: expected backward()";
  CHECK(message_of<UsageError>([&] { grad(mean(square(net(x))), x); }) == message);
  Parallel dp(cut(4), {.device_ids = {0, 1}}, 3);
  CHECK(message_of<UsageError>([&] { grad(mean(square(dp(x))), x); }) == message);
  const GraphVariable<double, 2> recorded(numbers(8, 5, 1), true);
  const auto no_graph = "canonical shares: GraphVariables, for gradients of gradients, are not cut into shares";
  CHECK(message_of<UsageError>([&] { net(recorded); }) == no_graph);
  CHECK(message_of<UsageError>([&] { dp(recorded); }) == no_graph);
}

TEST_CASE("canonical errors: a loss by hand is one device's, or all devices' of one process, and no rank's") {
  auto net = single(4);
  Parallel dp(cut(4), {.device_ids = {0, 1}}, 3);
  const auto by_hand = [](auto& of, const auto& x) { return sum(square(of(x))) / 24.0; };
  const auto x = numbers(8, 5, 1);
  by_hand(net, x).backward();
  by_hand(dp, x).backward();
  CHECK(test::gradients(net.module()) == test::gradients(dp.module()));
  CHECK(test::length(test::gradients(net.module())) > 0);
  const auto message =
      "canonical shares: backward does not begin at a mean over the batch: expected mean(), cross_entropy(), "
      "mse_loss() or another loss of the library, of the net's output for samples";
  CHECK(message_of_ranks(2, [&](const World& world, auto& c) {
          Ddp ddp(cut(4), c, {}, 3);
          by_hand(ddp, share(x, 4, world)).backward();
        }) == message);
  CHECK(message_of_ranks(2, [&](const World& world, auto& c) {
          Server server(cut(4), c, {}, 3);
          by_hand(server, share(x, 4, world)).backward();
        }) == message);
  // Nor next to a loss that is a mean.
  CHECK(message_of_ranks(2, [&](const World& world, auto& c) {
          Ddp ddp(cut(4), c, {}, 3);
          const auto y = ddp(share(x, 4, world));
          (mean(square(y)) + sum(y)).backward();
        }) == message);
}

TEST_CASE("canonical errors: a parameter that meets the samples outside of the model") {
  CHECK(
      message_of_ranks(2,
                       [&](const World& world, auto& c) {
                         Ddp ddp(cut(4), c, {}, 3);
                         mean(square(ddp(share(numbers(8, 5, 1), 4, world)) + ddp.module().fc3.bias)).backward();
                       }) ==
      "canonical shares: the loss uses the parameter fc3.bias outside of the net's forward pass: use it in the model");
}

TEST_CASE("canonical errors: a loss of outputs of batches that are cut in different ways") {
  auto net = single(4);
  CHECK_THAT(message_of<UsageError>([&] {
               const auto first = net(numbers(8, 5, 1)), second = net(numbers(4, 5, 2));
               mse_loss(slice(first, 0, 0, 4), second);
             }),
             Contains("canonical shares: a loss combines two outputs whose batches are cut in different ways: "));
}

TEST_CASE("canonical errors: ranks with other samples than their shares are all told of the first such share") {
  // With 9 samples in 4 shares the ranks have 5 and 4 samples.
  CHECK(message_of_ranks(2,
                         [&](const World& world, auto& c) {
                           Ddp net(cut(4), c, {}, 3);
                           const Index own = world.rank == 0 ? 4 : 5;
                           mean(square(net(numbers(own, 5, 1)))).backward();
                         }) ==
        "canonical shares: of 9 samples in 4 shares, share 0 has 2, expected 3: use the policy's sampler, which gives "
        "each process its shares");
  CHECK(message_of_ranks(3,
                         [&](const World& world, auto& c) {
                           Server net(cut(4), c, {}, 3);
                           const Index own[] = {4, 3, 2};
                           cross_entropy(net(numbers(own[world.rank], 5, 1)), labels(own[world.rank], 3, 1)).backward();
                         }) ==
        "canonical shares: of 9 samples in 4 shares, share 0 has 2, expected 3: use the policy's sampler, which gives "
        "each process its shares");
}

TEST_CASE("canonical errors: ranks have the same number of shares") {
  CHECK_THAT(message_of_ranks(2, [&](const World& world,
                                     auto& c) { Ddp net(cut(world.rank == 0 ? 4 : 8), c, {}, 3); }),
             Contains("SameBits of 4 shares"));
  CHECK_THAT(message_of_ranks(2,
                              [&](const World& world, auto& c) {
                                Server net(cut(world.rank == 0 ? 4 : 8), c, {}, 3);
                              }),
             Contains("SameBits of 4 shares"));
}

TEST_CASE("canonical errors: a sampler gives whole shares, and repeats no samples") {
  CHECK(message_of<UsageError>([] { data::Sampler(10, {.world_size = 2, .padding = true, .shares = 4}); }) ==
        "Sampler: padding is for shares by rank, and not supported for a batch that is cut into other shares");
  const auto few = "Sampler: expected 0 shares, or at least one for each of 3 ranks and at most 64, got ";
  for (const int shares : {-1, 2, 65})
    CHECK(message_of<UsageError>([&] { data::Sampler(10, {.world_size = 3, .shares = shares}); }) ==
          cat(few, shares));
  // In each batch the ranks' parts together are the batch, cut at the bounds of its shares.
  for (const int ranks : {1, 2, 3, 5})
    for (const Index size : {7, 12, 3}) {
      std::vector<data::Sampler> samplers;
      for (int rank = 0; rank < ranks; ++rank)
        samplers.emplace_back(
            40, data::SamplerOptions{.rank = rank, .world_size = ranks, .seed = 5, .shares = 6});
      const data::Sampler whole(40, {.seed = 5});
      for (Index b = 0; b < whole.global_batches(size, false); ++b) {
        std::vector<Index> all;
        const auto expected = whole.share(b, size);
        const auto count = static_cast<Index>(expected.size());
        for (int rank = 0; rank < ranks; ++rank) {
          const auto own = samplers[static_cast<std::size_t>(rank)].share(b, size);
          const auto run = shares_of_device(6, static_cast<std::size_t>(ranks), static_cast<std::size_t>(rank));
          CHECK(static_cast<Index>(own.size()) == share_begin(count, 6, run.end) - share_begin(count, 6, run.begin));
          all.insert(all.end(), own.begin(), own.end());
        }
        CHECK(all == std::vector<Index>(expected.begin(), expected.end()));
      }
    }
}

template <class Net>
void take_passes(Net& net) {
  for (std::uint32_t number = 0; number < 3; ++number) mean(square(net(numbers(64, 5, number)))).backward();
}
std::size_t held(int slot) { return trace::memory(slot, trace::Memory::gradients); }

TEST_CASE(
    "canonical memory: a device holds log2 of its shares more copies of the gradients, and none where it has one") {
  std::size_t model = 0;
  const auto kept_by = [&](int devices, int shares) {
    std::vector<int> ids;
    for (int i = 0; i < devices; ++i) ids.push_back(i);
    const auto before = held(0);
    if (shares == 0) {
      DataParallel<Model> net(make<Model>(), {.device_ids = ids}, 3);
      take_passes(net);
      return held(0) - before;
    }
    Parallel net(cut(shares), {.device_ids = ids}, 3);
    take_passes(net);
    return held(0) - before;
  };
  for (const int devices : {1, 2, 4}) {
    model = kept_by(devices, 0);
    REQUIRE(model > 0);
    CHECK(kept_by(devices, devices) <= model);
  }
  model = kept_by(1, 0);
  for (const int shares : {2, 4, 8, 16, 64}) {
    INFO(shares);
    const auto log2 = static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(shares)) - 1);
    CHECK(kept_by(1, shares) == model * (1 + log2));
    const auto before = held(0);
    auto net = single(shares);
    take_passes(net);
    CHECK(held(0) - before == model * (1 + log2));
  }
  CHECK(kept_by(4, 64) == model * (1 + 4));  // of 16 shares each
}

TEST_CASE("canonical memory: a rank that has one share holds no copies of its gradients, one of several log2 of them") {
  const auto kept_by = [](int ranks, int shares) {
    const auto text = Ranks(ranks, [=](const World& world) {
                        auto communicator = comm::connect(world);
                        const auto before = held(0);
                        const auto of = [&](auto model) {
                          DistributedDataParallel<decltype(model)> net(std::move(model), communicator, {}, 3);
                          for (std::uint32_t number = 0; number < 3; ++number)
                            mean(square(net(share(numbers(64, 5, number), std::max(shares, ranks), world)))).backward();
                          return cat(held(0) - before);
                        };
                        return shares == 0 ? of(make<Model>()) : of(cut(shares));
                      }).texts();
    for (const auto& each : text) CHECK(each == text[0]);
    return std::stoul(text[0]);
  };
  const auto plain = kept_by(2, 0);
  REQUIRE(plain > 0);
  CHECK(kept_by(2, 2) == plain);
  CHECK(kept_by(4, 4) == plain);
  const auto copies = [&](int shares) {  // each copy may end with padding
    return std::lround(static_cast<double>(kept_by(2, shares)) / static_cast<double>(plain));
  };
  CHECK(copies(8) == 3);   // of 4 shares each
  CHECK(copies(64) == 6);  // of 32
}

}  // namespace canonical_errors_test
