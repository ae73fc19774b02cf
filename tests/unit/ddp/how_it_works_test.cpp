// How DistributedDataParallel works, step by step. Read it with include/chorus/parallel/distributed_data_parallel.hpp.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <memory>

#include <unit/parallel/ranks.hpp>

namespace ddp_how_it_works_test {

using namespace test::names;
using Model = test::Smooth<Cpu>;
constexpr double kib = 1.0 / 1024;  // in MiB

/// This rank's gradients after a backward pass on its rows of a batch.
template <class Net>
std::string gradients_of(Net& net, const World& world, Index batch) {
  cross_entropy(net(test::share(numbers(batch, 5, 1), world)), test::share(labels(batch, 3, 1), world)).backward();
  return test::text_of(test::gradients(net.module()));
}
std::vector<double> gradients_of_one_device(Index batch) {
  SingleDevice<Model> net{make<Model>(), 3};
  cross_entropy(net(numbers(batch, 5, 1)), labels(batch, 3, 1)).backward();
  return test::gradients(net.module());
}

TEST_CASE("how ddp works, step 1: all ranks begin with rank 0's numbers") {
  const auto text = common_text(3, [](const World& world) {
    auto model = make<Model>();
    for (const auto& named : nn::named_parameters<Cpu>(model))
      static_cast<double*>(named.parameter->value_data())[0] += world.rank;  // each rank has different numbers
    Distributed<Model> rank(world, {}, std::move(model));
    return test::text_of(test::values(rank.net.module()));
  });
  auto first = make<Model>();
  CHECK(test::numbers_in(text) == test::values(first));
}

TEST_CASE("how ddp works, steps 2 to 6: every rank gets the gradient of the whole batch, with the same bits") {
  const auto text = common_text(3, [](const World& world) {
    Distributed<Model> rank(world);
    return gradients_of(rank.net, world, 7);  // shares of 2, 2 and 3 samples: the weights are 2/7, 2/7 and 3/7
  });
  CHECK(distance(test::numbers_in(text), gradients_of_one_device(7)) < rounding);
}

TEST_CASE("how ddp works, step 3: by what the loss is a mean of") {
  // One of rank 0's tokens counts, and four of rank 1's: the weights are 1/5 and 4/5, though both have two samples.
  const auto loss_of = [](auto& net, const World& world) {
    const auto tokens = Tensor<std::int64_t, 1>::from({2, -100, -100, -100, 0, 1, 2, 0}, {8});
    const auto rows = test::share(numbers(8, 5, 1), world);
    return cross_entropy(net(rows), test::share(tokens, world));
  };
  SingleDevice<Model> single{make<Model>(), 3};
  loss_of(single, World{.rank = 0, .size = 1}).backward();
  const auto text = common_text(2, [&](const World& world) {
    Distributed<Model> rank(world);
    loss_of(rank.net, world).backward();
    return test::text_of(test::gradients(rank.net.module()));
  });
  CHECK(distance(test::numbers_in(text), test::gradients(single.module())) < rounding);
}

/// Records the order of events: an extension is called at each moment of a pass.
class Diary final : public ddp::Extension<Cpu> {
 public:
  explicit Diary(std::string& text) : text_(text) {}
  void forward_begins(ddp::ForwardPass&) override { text_ += "forward "; }
  void forward_ended() override { text_ += "| "; }
  void weighed() override { text_ += "weighed "; }
  void backward_begins() override { text_ += "backward "; }
  void gradient_arrived(std::size_t i) override { text_ += cat("g", i, " "); }
  void bucket_is_full(const ddp::Bucket& bucket) override { text_ += cat("[bucket ", bucket.index, " leaves] "); }
  void backward_ended() override { text_ += "ended "; }
  void averaged() override { text_ += "averaged "; }
  void pass_ended() override { text_ += "."; }

 private:
  std::string& text_;
};

TEST_CASE("how ddp works, steps 4 and 5: buckets leave while backward goes on, and come back at its end") {
  const auto text = common_text(2, [](const World& world) {
    // From the back of the model: gradients of 3, 18, 6, 42, 7 and 35 numbers of 8 bytes.
    Distributed<Model> rank(world, {.first_bucket_cap_mb = 0.2 * kib, .bucket_cap_mb = 0.5 * kib});
    gradients_of(rank.net, world, 4);  // the first pass learns the order in which gradients arrive
    std::string diary;
    rank.net.extend(std::make_unique<Diary>(diary));
    gradients_of(rank.net, world, 4);
    return diary;
  });
  CHECK(text ==
        "forward | weighed backward g0 g1 [bucket 0 leaves] g2 g3 [bucket 1 leaves] g4 g5 [bucket 2 leaves] ended "
        "averaged .");
}

TEST_CASE("how ddp works, step 6: each of N ranks sends 2 (N - 1) / N of the gradients") {
  constexpr double bytes = 111 * 8;  // divisible by 3
  const auto text = common_text(3, [](const World& world) {
    Distributed<Model> rank(world);
    gradients_of(rank.net, world, 6);
    trace::reset_traffic();
    gradients_of(rank.net, world, 6);
    return cat(trace::bytes_sent(world.rank, trace::Traffic::gradients));
  });
  CHECK(test::numbers_in(text) == std::vector<double>{bytes * 2 * 2 / 3});
}

TEST_CASE("how ddp works: after the step all ranks have the same bits, so nobody sends parameters") {
  const auto text = common_text(2, [](const World& world) {
    Distributed<Model> rank(world);
    optim::Sgd optimizer{rank.net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    trace::reset_traffic();
    for (std::uint32_t number = 0; number < 3; ++number) test::step(rank.net, optimizer, number, 7, world);
    CHECK(trace::bytes_sent(world.rank, trace::Traffic::parameters) == 0);
    return test::text_of(test::values(rank.net.module()));
  });
  SingleDevice<Model> single{make<Model>(), 3};
  optim::Sgd optimizer{single.parameters(), {.lr = 0.3, .momentum = 0.9}};
  for (std::uint32_t number = 0; number < 3; ++number) test::step(single, optimizer, number, 7);
  CHECK(distance(test::numbers_in(text), test::values(single.module())) < rounding);
}

}  // namespace ddp_how_it_works_test
