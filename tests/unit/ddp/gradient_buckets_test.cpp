// Buckets: how they are cut, the order in which they are sent, and that their number affects rounding only.
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>
#include <thread>

#include <unit/parallel/ranks.hpp>

namespace gradient_buckets_test {

using namespace test::names;

constexpr double kib = 1.0 / 1024;  // in MiB

/// Listed in another order than used, with two dtypes.
template <class D>
struct Mixed : nn::Module {
  nn::Linear<D, double> out{6, 3};
  nn::Linear<D, float> side{4, 4};
  nn::Linear<D, double> in{5, 7}, hidden{7, 6};
  CHORUS_MODULE(Mixed, out, side, in, hidden)
  auto forward(const auto& x) const { return out(tanh(hidden(tanh(in(x))))); }
};

/// Two branches; either can come first.
template <class D>
struct Branches : nn::Module {
  nn::Linear<D, double> left{5, 3}, right{5, 3};
  CHORUS_MODULE(Branches, left, right)
  auto forward(const auto& x, bool left_first) const {
    if (left_first) {
      const auto y = left(x);
      return y + right(x);
    }
    const auto y = right(x);
    return y + left(x);
  }
};

/// Cuts buckets of all gradients that are wanted.
std::vector<ddp::Bucket> cut_all(const nn::FlatParameters<Cpu>& flat, const BucketOptions& options) {
  std::vector<char> sends;
  for (const auto& entry : flat.entries()) sends.push_back(entry.parameter().wants_grad());
  return ddp::cut_into_buckets(flat, options, sends);
}

std::vector<std::size_t> elements(const std::vector<ddp::Bucket>& buckets) {
  std::vector<std::size_t> out;
  for (const auto& bucket : buckets) out.push_back(bucket.count);
  return out;
}

/// Runs `body(rank, communicator)` in a thread for each rank.
template <class Body>
void in_threads(int ranks, const Body& body) {
  auto group = comm::thread_group(ranks, std::chrono::seconds(10));
  std::vector<std::thread> threads;
  for (auto& communicator : group) threads.emplace_back([&] { body(communicator.rank(), communicator); });
  for (auto& thread : threads) thread.join();
}

TEST_CASE("buckets are ranges of the flat gradients, cut before a cap is passed") {
  auto model = make<test::Smooth<Cpu>>();  // from the back: 3, 18, 6, 42, 7, 35 numbers of 8 bytes
  const nn::FlatParameters<Cpu> flat(model);
  const auto cut = [&](double first, double others) {
    return elements(cut_all(flat, {first * kib, others * kib}));
  };
  CHECK(cut(1024, 1024) == std::vector<std::size_t>{111});
  CHECK(cut(0.2, 1024) == std::vector<std::size_t>{21, 90});          // 204.8 bytes: 24 + 144 fit, 48 more don't
  CHECK(cut(0.2, 0.5) == std::vector<std::size_t>{21, 55, 35});       // 512 bytes hold 64 numbers
  CHECK(cut(0, 0) == std::vector<std::size_t>{3, 18, 6, 42, 7, 35});  // larger than the cap: a bucket each
  const auto buckets = cut_all(flat, {0.2 * kib, 0.5 * kib});
  CHECK(buckets[1].begin == 21);
  CHECK(buckets[1].parameters == std::vector<std::size_t>{2, 3, 4});
}

TEST_CASE("buckets hold one dtype each") {
  Mixed<Cpu> model;
  const nn::FlatParameters<Cpu> flat(model);
  const auto buckets = cut_all(flat, {});
  REQUIRE(buckets.size() == 2);
  for (const auto& bucket : buckets)
    for (const std::size_t i : bucket.parameters)
      CHECK(flat.entries()[i].parameter().dtype() == flat.groups()[bucket.group].dtype);
  CHECK(buckets[0].count + buckets[1].count == 21 + 20 + 42 + 48);
}

TEST_CASE("buckets leave out frozen parameters, wherever they lie") {
  auto model = make<test::Smooth<Cpu>>();
  const nn::FlatParameters<Cpu> flat(model);  // laid out before anything is frozen
  model.fc2.weight.set_requires_grad(false);
  const auto buckets = cut_all(flat, {});
  CHECK(elements(buckets) == std::vector<std::size_t>{27, 42});
  CHECK(buckets[1].begin == 69);
}

TEST_CASE("buckets are laid out in the order of the first backward, on all ranks") {
  const auto order = common_text(3, [](const World& world) {
    Distributed<test::Smooth<Cpu>> rank(world, {.first_bucket_cap_mb = 0.2 * kib, .bucket_cap_mb = 0.5 * kib});
    std::string text;
    const auto add = [&] {
      for (const std::size_t bytes : rank.net.bucket_bytes()) text += cat(bytes / sizeof(double), " ");
      for (const auto& name : rank.net.parameter_order()) text += name + " ";
      text += "\n";
    };
    add();
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1}};
    for (std::uint32_t number = 0; number < 2; ++number) {
      test::step(rank.net, optimizer, number, 7, world);
      add();
    }
    return text;
  });
  CHECK(order ==
        "21 55 35 fc3.bias fc3.weight fc2.bias fc2.weight fc1.bias fc1.weight \n"
        "21 48 42 fc3.weight fc3.bias fc2.weight fc2.bias fc1.weight fc1.bias \n"
        "21 48 42 fc3.weight fc3.bias fc2.weight fc2.bias fc1.weight fc1.bias \n");
}

TEST_CASE("buckets: a rule of one's own cuts them") {
  const auto sizes = common_text(2, [](const World& world) {
    const auto at_biases = [](const NextGradient& next) { return next.name.ends_with("bias"); };
    Distributed<test::Smooth<Cpu>> rank(world, {.buckets = at_biases});
    std::string text;
    for (const std::size_t bytes : rank.net.bucket_bytes()) text += cat(bytes / sizeof(double), " ");
    return text;
  });
  CHECK(sizes == "21 48 42 ");
}

TEST_CASE("buckets: rules that cut in different places on two ranks are refused") {
  Ranks ranks(2, [](const World& world) -> std::string {
    const bool cuts = world.rank == 1;
    return message_of<UsageError>([&] {
      Distributed<test::Smooth<Cpu>> rank(world, {.buckets = [=](const NextGradient& next) {
        return cuts && next.bucket_bytes > 0;
      }});
    });
  });
  for (const auto& text : ranks.texts()) {
    CAPTURE(text);
    CHECK(text.find("sizes of buckets") != std::string::npos);
  }
}

TEST_CASE("buckets: a backward order that is not the members' order is learned") {
  const auto text = common_text(2, [](const World& world) {
    auto model = make<test::Smooth<Cpu>>();
    Mixed<Cpu> mixed;
    for (const auto& named : nn::named_parameters<Cpu>(mixed.side)) named.parameter->set_wants_grad(false);
    Distributed<Mixed<Cpu>> rank(world, {}, mixed);
    sum(rank.net(test::share(numbers(4, 5, 1), world))).backward();
    std::string names;
    for (const auto& name : rank.net.parameter_order()) names += name + " ";
    return names;
  });
  CHECK(text.find("out.weight out.bias hidden.weight hidden.bias in.weight in.bias side.") == 0);
}

TEST_CASE("buckets: ranks whose gradients come in different orders follow rank 0's") {
  SingleDevice<Branches<Cpu>> single{make<Branches<Cpu>>(), 3};
  optim::Sgd reference{single.parameters(), {.lr = 0.1, .momentum = 0.9}};
  for (std::uint32_t number = 0; number < 3; ++number) {
    reference.zero_grad();
    cross_entropy(single(numbers(7, 5, number), true), labels(7, 3, number)).backward();
    reference.step();
  }
  const auto text = common_text(2, [](const World& world) {
    Distributed<Branches<Cpu>> rank(world, {.first_bucket_cap_mb = 0, .bucket_cap_mb = 0});
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.1, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      const auto x = test::share(numbers(7, 5, number), world);
      cross_entropy(rank.net(x, world.rank == 0), test::share(labels(7, 3, number), world)).backward();
      optimizer.step();
    }
    std::string names;
    for (const auto& name : rank.net.parameter_order()) names += name + " ";
    return test::text_of(test::values(rank.net.module())) + names;
  });
  CHECK_THAT(text, Contains("right.weight right.bias left.weight left.bias"));  // on rank 0 `left` comes first
  CHECK(distance(test::numbers_in(text), test::values(single.module())) < rounding);
}

TEST_CASE("buckets: their number changes nothing but rounding") {
  const auto expected = test::train_single<test::Smooth<Cpu>>();
  for (const double cap : {0.0, 0.1, 0.4}) {
    const auto text = common_text(3, [cap](const World& world) {
      return test::train<test::Smooth<Cpu>>(world, {.first_bucket_cap_mb = cap * kib, .bucket_cap_mb = cap * kib});
    });
    const auto got = test::numbers_in(text);
    REQUIRE(got.size() >= expected.losses.size());
    const auto border = got.begin() + static_cast<std::ptrdiff_t>(expected.losses.size());
    CHECK(distance({border, got.end()}, expected.parameters) < rounding);
  }
}

TEST_CASE("buckets: parameters frozen or thawed between steps, in the same way on all ranks") {
  const auto run = [](auto& net, const auto& take_step) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 4; ++number) {
      net.module().fc2.weight.set_requires_grad(number == 0 || number == 3);
      net.module().fc3.bias.set_requires_grad(number != 2);
      take_step(optimizer, number);
    }
    return test::values(net.module());
  };
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  const auto expected = run(single, [&](auto& optimizer, auto number) { test::step(single, optimizer, number, 7); });
  for (const double cap : {0.0, 25.0}) {
    const auto text = common_text(3, [&](const World& world) {
      Distributed<test::Smooth<Cpu>> rank(world, {.first_bucket_cap_mb = cap, .bucket_cap_mb = cap});
      return test::text_of(
          run(rank.net, [&](auto& optimizer, auto number) { test::step(rank.net, optimizer, number, 7, world); }));
    });
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

TEST_CASE("buckets: ranks may be threads, too") {
  const auto expected = test::train_single<test::Smooth<Cpu>>();
  std::vector<std::vector<double>> got(3);
  in_threads(3, [&](int rank, comm::AnyCommunicator& communicator) {
    DistributedDataParallel<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), communicator, {}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01}};
    const World world{.rank = rank, .size = 3};
    test::each_step([&](std::uint32_t number, Index size) { return test::step(net, optimizer, number, size, world); });
    got[static_cast<std::size_t>(rank)] = test::values(net.module());
  });
  CHECK(distance(got[0], expected.parameters) < rounding);
  CHECK(got[1] == got[0]);
  CHECK(got[2] == got[0]);
}

}  // namespace gradient_buckets_test
