// DistributedDataParallel over NcclCommunicator, with a stand-in for NCCL: the steps of the ring, bucket by bucket.
#include <unit/comm/nccl_ranks.hpp>

#include <catch.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/hooks/compress.hpp>
#include <chorus/parallel/hooks/reduce_scatter.hpp>
#include <chorus/parallel/sharded_optimizer.hpp>
#include <cmath>

#include <unit/parallel/ranks.hpp>

namespace nccl_ranks_test {

using namespace test::names;
using Model = test::Normed<Cpu>;

const DistributedDataParallelOptions small_buckets{.first_bucket_cap_mb = 1e-4, .bucket_cap_mb = 5e-4};

template <class Net>
std::string steps(Net& net, const World& world) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
  std::string out;
  for (std::uint32_t i = 0; i < 6; ++i)
    out += cat(test::step(net, optimizer, i, 12, world), " ", io::parameters_sha256(net.module()), "\n");
  return out;
}

TEST_CASE("DDP over nccl takes the steps that it takes over the ring", "[parallel]") {
  const auto ring = common_text(3, [](const World& world) {
    Distributed<Model> rank(world, small_buckets);
    return steps(rank.net, world);
  });
  const auto texts = test::nccl_ranks(3, [](test::NcclRank& rank) {
    rank.device->host_computes = true;
    auto nccl = rank.nccl();
    DistributedDataParallel<Model> net(make<Model>(), nccl, small_buckets, 3);
    return steps(net, rank.data_world);
  });
  REQUIRE(!ring.empty());
  for (const auto& text : texts) CHECK(text == ring);
}

template <class Net>
std::string sharded_steps(Net& net, const World& world) {
  ShardedOptimizer<optim::Sgd<Cpu>> optimizer{net, {.lr = 0.3, .momentum = 0.9}};
  std::string out;
  for (std::uint32_t i = 0; i < 6; ++i) {
    optimizer.zero_grad();
    cross_entropy(net(test::share(numbers(12, 5, i), world)), test::share(labels(12, 3, i), world)).backward();
    optimizer.step();
    out += cat(io::parameters_sha256(net.module()), "\n");
  }
  return out;
}

TEST_CASE("DDP over nccl: in parts it takes the steps that it takes over the ring, a reduce-scatter a bucket") {
  const auto ring = common_text(3, [](const World& world) {
    Distributed<Model, ReduceScatter> rank(world, small_buckets);
    return sharded_steps(rank.net, world);
  });
  const auto texts = test::nccl_ranks(3, [](test::NcclRank& rank) {
    rank.device->host_computes = true;
    auto nccl = rank.nccl();
    DistributedDataParallel<Model, ReduceScatter> net(make<Model>(), nccl, small_buckets, 3);
    const auto text = sharded_steps(net, rank.data_world);
    const auto expected = 5 * detail::access_to(net).buckets().size();  // the first pass computes whole averages
    const auto count = static_cast<std::size_t>(rank.device->count("reduce_scatter"));
    return count == expected ? text : cat(count, " calls of reduce_scatter, expected ", expected);
  });
  REQUIRE(!ring.empty());
  for (const auto& text : texts) CHECK(text == ring);
}

TEST_CASE("DDP over nccl: one all-reduce a bucket, begun before backward has ended", "[parallel]") {
  const auto texts = test::nccl_ranks(2, [](test::NcclRank& rank) -> std::string {
    rank.device->host_computes = true;
    auto nccl = rank.nccl();
    DistributedDataParallel<Model> net(make<Model>(), nccl, small_buckets, 3);
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    test::step(net, optimizer, 0, 12, rank.data_world);  // learns the order
    const auto sizes = net.bucket_bytes();
    const auto before = rank.device->record().size();
    bool backward = true;
    int in_backward = 0;
    net.module().fc1.weight.register_hook([&] {
      if (std::exchange(backward, false)) in_backward = rank.device->count("all_reduce");
    });
    const int earlier = rank.device->count("all_reduce");
    test::step(net, optimizer, 1, 12, rank.data_world);
    const auto lines = rank.device->record();
    std::size_t next = 0;
    for (auto i = before; i < lines.size() && next < sizes.size(); ++i)
      if (lines[i] == cat("all_reduce ", sizes[next] / 8, " F64 on comm")) ++next;
    if (sizes.size() < 3) return cat(sizes.size(), " buckets");
    if (next != sizes.size()) return cat("bucket ", next, " of ", sizes.size(), " is missing");
    if (in_backward <= earlier) return "no bucket left before the last gradient was there";
    return "";
  });
  for (const auto& text : texts) CHECK(text == "");
}

// The total size of a step's averaged gradients. Ranks have weights of 1/3.
template <class Hook>
double size_of_gradients(const Hook& hook) {
  const auto texts = test::nccl_ranks(3, [&](test::NcclRank& rank) {
    rank.device->host_computes = true;
    auto nccl = rank.nccl();
    DistributedDataParallel<test::Wide<Cpu>, Hook> net(make<test::Wide<Cpu>>(), nccl, {}, 3, hook);
    const auto x = test::share(test::numbers(12, 20, 1), rank.data_world);
    net(x).backward(contiguous(test::share(test::numbers(12, 16, 2), rank.data_world)));
    double sum = 0;
    for (const double gradient : test::gradients(net.module())) sum += std::abs(gradient);
    return test::text_of({sum});
  });
  return test::numbers_in(texts.at(0)).at(0);
}

TEST_CASE("DDP over nccl: gradients in 2 bytes are weighed before they are rounded", "[parallel]") {
  const double exact = size_of_gradients(AllReduce{});
  // 1/3 in bf16 is 0.2 % too large, while rounding errors of single gradients almost cancel.
  CHECK(size_of_gradients(Bf16Compress{}) == Approx(exact).epsilon(7e-4));
  CHECK(size_of_gradients(Bf16Compress{.error_feedback = false}) == Approx(exact).epsilon(7e-4));
}

TEST_CASE("DDP over nccl: nobody knows what part of the communication was hidden", "[parallel]") {
  const auto texts = test::nccl_ranks(2, [](test::NcclRank& rank) -> std::string {
    rank.device->host_computes = true;
    auto nccl = rank.nccl();
    DistributedDataParallel<Model> net(make<Model>(), nccl, small_buckets, 3);
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    for (std::uint32_t i = 0; i < 2; ++i) test::step(net, optimizer, i, 12, rank.data_world);
    const auto& data = net.logging_data();
    return std::isnan(data.last.hidden()) && std::isnan(data.avg.hidden()) && data.last.exposed_comm_time > 0
               ? ""
               : cat(data.last.hidden(), " and ", data.avg.hidden());
  });
  for (const auto& text : texts) CHECK(text == "");
}

TEST_CASE("DDP over nccl: a failed bucket is named", "[parallel]") {
  const auto texts = test::nccl_ranks(2, [](test::NcclRank& rank) -> std::string {
    rank.device->host_computes = true;
    auto nccl = rank.nccl();
    DistributedDataParallel<Model> net(make<Model>(), nccl, small_buckets, 3);
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3}};
    test::step(net, optimizer, 0, 12, rank.data_world);
    if (rank.data_world.rank == 1) rank.device->refusals["all_reduce"] = 3;
    return message_of<CommError>([&] {
      // The host learns of a failure milliseconds later, time for many of these steps.
      const auto end = comm::Clock::now() + 10s;
      for (std::uint32_t i = 1; comm::Clock::now() < end; ++i) test::step(net, optimizer, i, 12, rank.data_world);
    });
  });
  CHECK_THAT(texts[1],
             Catch::Matchers::Contains("rank 1: all_reduce") && Catch::Matchers::Contains("gradient bucket 0"));
  CHECK_THAT(texts[0], Catch::Matchers::Contains("rank 0") && Catch::Matchers::Contains("nccl"));
}

}  // namespace nccl_ranks_test
