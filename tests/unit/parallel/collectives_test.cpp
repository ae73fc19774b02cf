// Collectives in a model and in a loss: losses over the rows of all ranks give one device's parameters.
#include <catch.hpp>
#include <chorus/nn/parallel_linear.hpp>
#include <chorus/ops/collectives.hpp>
#include <chorus/ops/creation.hpp>
#include <chorus/ops/masking.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/fully_sharded_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/mesh.hpp>
#include <chorus/parallel/pipeline.hpp>

#include "../pipeline/models.hpp"
#include "ranks.hpp"

namespace collectives_test {

using namespace test::names;

/// Global batches: the shares of three ranks are even, uneven, and empty.
constexpr Index batches[] = {12, 7, 2, 5, 9};
enum class Kind { contrast, contrast_sum, gathered, gathered_sum, correlation, scattered, sent, first };
constexpr Kind kinds[] = {Kind::contrast,    Kind::contrast_sum, Kind::gathered, Kind::gathered_sum,
                          Kind::correlation, Kind::scattered,    Kind::sent,     Kind::first};

/// z: [rows, 4], two views of two numbers. `of` calls a collective, `ranks` is their number.
template <class Z, class Of>
auto loss_of(Kind kind, const Z& z, Index ranks, const Of& of) {
  const auto a = slice(z, 1, 0, 2), b = slice(z, 1, 2, 4);
  const Index rows = value_of(z).size(0);
  const auto gather = [&](const auto& x) { return of([&](const auto&... net) { return all_gather(net..., x); }); };
  const Index first = of([&](const auto&... net) { return first_row(net..., z); });
  const auto contrast = [&](Reduction reduction) {
    return cross_entropy(matmul(a, transpose(gather(b), 0, 1)), arange(first, first + rows), {.reduction = reduction});
  };
  const auto square_of_all = [&] {
    const auto all = gather(a);
    return square(matmul(all, transpose(all, 0, 1)));
  };
  switch (kind) {
    case Kind::contrast:
      return contrast(Reduction::mean);
    case Kind::contrast_sum:
      return contrast(Reduction::sum) * 0.1;
    case Kind::gathered:
      return mean(square_of_all());
    case Kind::gathered_sum:
      return sum(square_of_all()) * 0.1;
    case Kind::correlation: {  // Barlow twins
      const auto c = of([&](const auto&... net) { return all_reduce(net..., matmul(transpose(a, 0, 1), b)); });
      return sum(square(c * 0.2 - eye<double>(2)));
    }
    case Kind::scattered: {  // each rank has a part of the sum for every row
      const Index all = value_of(gather(value_of(a))).size(0);
      auto place = Tensor<double, 2>::zeros({all, rows});
      for (Index i = 0; i < rows; ++i) place(first + i, i) = 1;
      const auto y = of([&](const auto&... net) { return reduce_scatter(net..., matmul(place, a), rows); });
      return mean(square(y - b));
    }
    case Kind::sent: {  // a rank that has several sends one to the next
      const auto one = Tensor<double, 1>::zeros({1});
      const Index me = of([&](const auto&... net) { return first_row(net..., one); });
      std::vector<Index> counts(static_cast<std::size_t>(ranks));
      counts[static_cast<std::size_t>((me + 1) % ranks)] = rows > 1 ? 1 : 0;
      counts[static_cast<std::size_t>(me)] += rows > 1 ? rows - 1 : rows;
      const auto y = of([&](const auto&... net) { return all_to_all(net..., a, counts); });
      return mean(square(y));
    }
    default: {
      const auto root = of([&](const auto&... net) { return broadcast(net..., a, 0); });
      return mean(square(b - slice(root, 0, 0, 1)));
    }
  }
}

template <class D>
struct Twins : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 4};
  CHORUS_MODULE(Twins, fc1, fc2)
  auto forward(const auto& x) const { return fc2(tanh(fc1(x))); }
};
/// Returns its loss.
template <class D, Kind kind>
struct WithLoss : Twins<D> {
  Index ranks = 1;
  auto forward(const auto& x) const {
    return loss_of(kind, Twins<D>::forward(x), ranks, [](const auto& call) { return call(); });
  }
  auto operator()(const auto& x) const { return forward(x); }
};

/// Parameters after a step for each batch, then the losses.
template <class Net, class Share>
std::string train(Net& net, const Share& share, const auto& loss_of_rows) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.2, .momentum = 0.9}};
  std::vector<double> losses;
  std::uint32_t number = 0;
  for (const Index size : batches) {
    optimizer.zero_grad();
    const auto loss = loss_of_rows(share(numbers(size, 5, number++)));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item());
  }
  std::string text;
  net.gathered([&](auto& model) { text = test::text_of(test::values(model)); });
  return text;
}
template <class Model = Twins<Cpu>>
std::vector<double> alone(Kind kind) {
  SingleDevice<Model> net{make<Model>(), 3};
  return test::numbers_in(train(net, [](const auto& x) { return x; }, [&](const auto& x) {
    return loss_of(kind, net(x), 1, [&](const auto& call) { return call(net); });
  }));
}
template <class Net>
std::vector<double> on_ranks(Kind kind, int ranks) {
  const auto texts = Ranks(ranks, [&](const World& world) {
    auto communicator = comm::connect(world);
    auto gathers = comm::connect(comm::split(communicator, world, 0));
    const auto net = [&] {
      if constexpr (std::is_constructible_v<Net, Twins<Cpu>, decltype(communicator)&, decltype(gathers)&>)
        return std::make_unique<Net>(make<Twins<Cpu>>(), communicator, gathers);
      else
        return std::make_unique<Net>(make<Twins<Cpu>>(), communicator);
    }();
    return train(*net, [&](const auto& x) { return test::share(x, world); }, [&](const auto& x) {
      return loss_of(kind, (*net)(x), ranks, [&](const auto& call) { return call(*net); });
    });
  }).texts();
  for (const auto& text : texts) UNSCOPED_INFO(text);
  return test::numbers_in(texts[0] == texts.back() ? texts[0] : "");
}

TEST_CASE("collectives: a loss outside of the model gives one device's parameters") {
  for (const Kind kind : kinds) {
    INFO("kind " << static_cast<int>(kind));
    const auto expected = alone(kind);
    for (const int ranks : {2, 3}) CHECK(distance(on_ranks<DistributedDataParallel<Twins<Cpu>>>(kind, ranks), expected) < rounding);
    CHECK(distance(on_ranks<FullyShardedDataParallel<Twins<Cpu>>>(kind, 2), expected) < rounding);
    DataParallel<Twins<Cpu>> several{make<Twins<Cpu>>(), {.device_ids = {0, 1}}, 3};
    CHECK(distance(test::numbers_in(train(several, [](const auto& x) { return x; }, [&](const auto& x) {
                     return loss_of(kind, several(x), 1, [&](const auto& call) { return call(several); });
                   })), expected) < rounding);
  }
}

template <Kind kind>
void check_in_model() {
  INFO("kind " << static_cast<int>(kind));
  const auto expected = alone(kind);
  using Model = WithLoss<Cpu, kind>;
  for (const int ranks : {2, 3}) {
    auto model = make<Model>();
    model.ranks = ranks;
    CHECK(distance(test::numbers_in(common_text(ranks, [&](const World& world) {
            Distributed<Model> rank(world, {}, std::move(model));
            return train(rank.net, [&](const auto& x) { return test::share(x, world); },
                         [&](const auto& x) { return rank.net.mean_loss(rank.net(x)); });
          })), expected) < rounding);
  }
  auto model = make<Model>();
  model.ranks = 2;
  DataParallel<Model> several{std::move(model), {.device_ids = {0, 1}}, 3};
  CHECK(distance(test::numbers_in(train(several, [](const auto& x) { return x; },
                                        [&](const auto& x) { return several.mean_loss(several(x)); })),
                 expected) < rounding);
}
TEST_CASE("collectives: a loss in the model gives one device's parameters") {
  check_in_model<Kind::contrast>();
  check_in_model<Kind::correlation>();
  check_in_model<Kind::sent>();
}

struct SplitTwins : nn::Module {
  nn::ColumnParallelLinear<Cpu, double> fc1{5, 8};
  nn::RowParallelLinear<Cpu, double> fc2{8, 4};
  CHORUS_MODULE(SplitTwins, fc1, fc2)
  auto forward(const auto& x) const { return fc2(tanh(fc1(x))); }
};
template <class Model, class... Axes>
void check_mesh(int ranks, int shares) {
  for (const Kind kind : {Kind::contrast, Kind::gathered_sum, Kind::scattered, Kind::sent}) {
    INFO("kind " << static_cast<int>(kind) << ", " << shares << " shares");
    const auto texts = Ranks(ranks, [&](const World& world) {
      auto communicator = comm::connect(world);
      Mesh<Model, Axes...> net{make<Model>(), communicator, world, {}, 3};
      World batch;  // the place of this rank on the batch
      batch.size = shares;
      batch.rank = net.place()[1] * net.sizes()[2] + net.place()[2];
      return train(net, [&](const auto& x) { return test::share(x, batch); }, [&](const auto& x) {
        return loss_of(kind, net(x), shares, [&](const auto& call) { return call(net); });
      });
    }).texts();
    INFO(texts[0]);
    for (const auto& text : texts) CHECK(distance(test::numbers_in(text), alone<Model>(kind)) < rounding);
  }
}
TEST_CASE("collectives: in a mesh they are over the shares of the batch") {
  check_mesh<Twins<Cpu>, mesh::Data<2>, mesh::Shard<2>>(4, 4);
  check_mesh<SplitTwins, mesh::Data<2>, mesh::Tensor<2>>(4, 2);
}

TEST_CASE("collectives: LocalSgd refuses them in a pass that records, for each rank steps by itself") {
  for (const auto& text : Ranks(2, [](const World& world) {
         auto communicator = comm::connect(world);
         using Model = WithLoss<Cpu, Kind::contrast>;
         LocalSgd<Model> inside{make<Model>(), communicator, {.period = 1}, 3};
         LocalSgd<Twins<Cpu>> net{make<Twins<Cpu>>(), communicator, {.period = 1}, 3};
         const auto x = numbers(2, 5, 1);
         const auto in_model = message_of<UsageError>([&] { inside(x); });
         const auto after = message_of<UsageError>([&] { all_reduce(net, sum(net(x), 0)); });
         const NoGrad none;
         return cat(in_model, '\n', after, '\n', all_gather(net, net(x)).shape());
       }).texts()) {
    CHECK_THAT(text, Contains("LocalSgd: each rank steps by itself, and a collective's gradients are for all ranks'"));
    CHECK_THAT(text, Contains("around the call\nLocalSgd: each rank steps by itself"));
    CHECK_THAT(text, Contains("\n[4, 4]"));
  }
}

TEST_CASE("collectives: without gradients, and of integers") {
  CHECK(common_text(3, [](const World& world) {
          Distributed<Twins<Cpu>> rank(world, {}, make<Twins<Cpu>>());
          const auto ids = Tensor<std::int64_t, 1>::full({world.rank}, 10 + world.rank);
          const auto all = all_gather(rank.net, ids).to_vector();
          const NoGrad none;
          const auto z = all_gather(rank.net, rank.net(test::share(numbers(4, 5, 1), world)));
          return cat(all[0], ' ', all[1], ' ', all[2], ' ', value_of(z).shape());
        }) == "11 12 12 [4, 4]");
}

/// What each of two ranks throws.
template <class Call>
std::vector<std::string> errors(const Call& call) {
  return Ranks(2, [&](const World& world) {
           const auto communicator = std::make_unique<comm::AnyCommunicator>(comm::connect(world));
           return message_of<Error>([&] {
             DistributedDataParallel<Twins<Cpu>> net{make<Twins<Cpu>>(), *communicator, {}, 3};
             call(net, world.rank);
           });
         }, 3s).texts();
}

TEST_CASE("collectives: ranks that call different ones, skip one or die end with an error that names it") {
  const auto x = numbers(2, 5, 1);
  for (const auto& text : errors([&](auto& net, int rank) {
         const auto z = net(x);
         all_gather(net, rank == 0 ? slice(z, 1, 0, 2) : slice(z, 1, 0, 3));
       })) {
    CHECK_THAT(text, Contains("all_gather: expected one call on all ranks, got 'all_gather of F64 and shape [-1, "));
    CHECK_THAT(text, Contains("on rank 1"));
  }
  for (const auto& text : errors([&](auto& net, int rank) {
         const auto z = net(x);
         rank == 0 ? all_gather(net, z) : all_reduce(net, z);
       }))
    CHECK_THAT(text, Contains("'all_reduce of F64 and shape [2, 4]'"));
  const auto skipped = errors([&](auto& net, int rank) {
    const auto z = net(x);
    const auto loss = mean(square(rank == 0 ? all_gather(net, z) : z));
    loss.backward();
  });
  CHECK_THAT(skipped[0], Contains("rank 0: all_gather #4 (8 U8): rank 1 is in a different call"));
  CHECK_THAT(skipped[1], Contains("all ranks must run a pass that records gradients"));
  const auto died = Ranks(2, [&](const World& world) {
                      auto communicator = comm::connect(world);
                      DistributedDataParallel<Twins<Cpu>> net{make<Twins<Cpu>>(), communicator, {}, 3};
                      const auto z = net(x);
                      if (world.rank == 1) _exit(7);
                      return message_of<CommError>([&] { all_gather(net, z); });
                    }, 3s).texts();
  CHECK_THAT(died[0], Contains("rank 1"));
}

struct GatheringHead : nn::Module {
  nn::Linear<Cpu, double> fc{6, 3};
  CHORUS_MODULE(GatheringHead, fc)
  auto forward(const auto& x) const { return all_gather(fc(x)); }
};
struct Gathering : nn::Module {
  nn::Linear<Cpu, double> fc{5, 6};
  GatheringHead head;
  CHORUS_MODULE(Gathering, fc, head)
  CHORUS_PIPELINE(fc, head)
};

TEST_CASE("collectives: what can't be one device's is refused by name") {
  // Rank 1 has rows that are negatives of rank 0's, but its own loss ignores all of them.
  const auto ignored = errors([&](auto& net, int rank) {
    const auto z = net(numbers(2, 5, 1));
    auto labels = arange(2 * rank, 2 * rank + 2);
    if (rank == 1) labels = Tensor<std::int64_t, 1>::full({2}, -100);
    cross_entropy(matmul(z, transpose(all_gather(net, z), 0, 1)), labels).backward();
  });
  CHECK_THAT(ignored[1], Contains("all_gather: this rank's loss counts no element"));
  const auto unsummed = errors([&](auto& net, int rank) {
    const auto z = net(numbers(2, 5, 1));
    const auto labels = rank == 0 ? arange(0, 2) : Tensor<std::int64_t, 1>::full({2}, -100);
    cross_entropy(z + all_reduce(net, sum(z, 0)), labels).backward();
  });
  CHECK_THAT(unsummed[1], Contains("all_reduce: this rank's loss counts no element"));
  // Rank 1 has no samples, but its sum is over the rows that rank 0 sends.
  const auto sent = errors([&](auto& net, int rank) {
    const auto z = net(numbers(rank == 0 ? 2 : 0, 5, 1));
    const std::vector<Index> counts = rank == 0 ? std::vector<Index>{1, 1} : std::vector<Index>{0, 0};
    sum(square(all_to_all(net, z, counts))).backward();
  });
  CHECK_THAT(sent[1], Contains("all_to_all: this rank has no samples"));
  for (const auto& text : Ranks(2, [](const World& world) {
         return message_of<Error>([&] { test::Piped<Gathering>(world).net(numbers(4, 5, 1)); });
       }).texts())
    CHECK_THAT(text, Contains("all_gather: expected the whole batch at once; Pipeline and SameBits"));
  for (const auto& text : errors([](auto& net, int) { reduce_scatter(net, net(numbers(3, 5, 1)), 1); }))
    CHECK_THAT(text, Contains("reduce_scatter: expected shares of 3 rows together, got 2"));
  for (const auto& text : errors([](auto& net, int) { broadcast(net, net(numbers(3, 5, 1)), 2); }))
    CHECK_THAT(text, Contains("broadcast: expected a root in [0, 2), got 2"));
  for (const auto& text : errors([](auto& net, int) { all_to_all(net, net(numbers(3, 5, 1)), std::vector<Index>{1, 1}); }))
    CHECK_THAT(text, Contains("expected 2 counts of at least 0 that add up to 3, got 2 with the sum 2"));
}

}  // namespace collectives_test
