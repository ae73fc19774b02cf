// The times that DistributedDataParallel records of its iterations, and gradients that ranks read in place.
#include <catch.hpp>
#include <thread>

#include <unit/parallel/ranks.hpp>

namespace ddp_times_test {

using namespace test::names;

/// Long enough that ranks read each other's gradients in place.
template <class D>
struct Wide : nn::Module {
  nn::Linear<D, double> fc1{5, 151}, fc2{151, 149}, fc3{149, 3};
  CHORUS_MODULE(Wide, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(tanh(fc2(tanh(fc1(x))))); }
};

/// Parameters after two steps on seven samples: shares are uneven.
template <class Net, class Step>
std::vector<double> after_steps(Net& net, const Step& step) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
  for (std::uint32_t number = 0; number < 2; ++number) step(optimizer, number);
  return test::values(net.module());
}

TEST_CASE("ddp: gradients that are read in place give the steps of one device, and the same bits on all ranks") {
  SingleDevice<Wide<Cpu>> single{make<Wide<Cpu>>(), 3};
  const auto expected = after_steps(single, [&](auto& optimizer, auto n) { test::step(single, optimizer, n, 7); });
  for (const int ranks : {2, 3, 4}) {
    INFO(ranks << " ranks");
    const auto text = common_text(ranks, [](const World& world) {
      Distributed<Wide<Cpu>> rank(world);
      return test::text_of(
          after_steps(rank.net, [&](auto& optimizer, auto n) { test::step(rank.net, optimizer, n, 7, world); }));
    });
    CHECK(distance(test::numbers_in(text), expected) < rounding);
  }
}

TEST_CASE("ddp: a rank that comes late shows in the others' exposed communication") {
  static constexpr double late = 0.05;
  Ranks ranks(2, [](const World& world) -> std::string {
    Distributed<Wide<Cpu>> rank(world);
    const auto step = [&] {
      const auto loss = sum(rank.net(test::share(numbers(8, 5, 1), world)));
      if (world.rank == 1) std::this_thread::sleep_for(std::chrono::duration<double>(late));
      loss.backward();
    };
    step();
    rank.net.reset_logging_data();
    if (rank.net.logging_data().iterations != 0) return "not forgotten";
    for (int i = 0; i < 3; ++i) step();
    {
      const auto quiet = rank.net.no_sync();
      step();
    }
    const auto& data = rank.net.logging_data();
    if (data.iterations != 3) return cat(data.iterations, " iterations");
    for (const auto& times : {data.last, data.avg}) {
      const bool waits = times.exposed_comm_time > 0.8 * late && times.bucket_comm_time > 0.8 * late &&
                         times.backward_comm_time > 0.8 * late && times.hidden() < 0.2;
      if (world.rank == 0 && !waits) return cat("exposed ", times.exposed_comm_time, " s");
      if (world.rank == 1 && times.backward_compute_time < 0.8 * late) return "backward";
      if (times.forward_compute_time <= 0) return "forward";
      if (times.backward_compute_comm_overlap_time > times.backward_comm_time) return "overlap";
    }
    return "right";
  });
  for (const auto& text : ranks.texts()) CHECK(text == "right");
}

TEST_CASE("ddp: buckets that leave early, while backward goes on, are hidden") {
  Ranks ranks(2, [](const World& world) -> std::string {
    Distributed<Wide<Cpu>> rank(world, {.first_bucket_cap_mb = 0, .bucket_cap_mb = 0});
    for (int i = 0; i < 2; ++i) sum(rank.net(test::share(numbers(8, 5, 1), world))).backward();
    const auto& times = rank.net.logging_data().last;
    if (times.backward_compute_comm_overlap_time <= 0) return "no overlap";
    if (times.backward_comm_time <= times.backward_compute_comm_overlap_time) return "all of it";
    return "right";
  });
  for (const auto& text : ranks.texts()) CHECK(text == "right");
}

}  // namespace ddp_times_test
