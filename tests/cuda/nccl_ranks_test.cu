// NCCL itself: one rank, and two processes that share the first GPU. All CUDA calls happen in children of the test.
#include <catch.hpp>
#include <chorus/comm/nccl.hpp>
#include <chorus/tensor/tensor.hpp>

#include "../unit/comm/processes.hpp"
#include "../unit/message_of.hpp"
#include "gpu.hpp"

namespace nccl_ranks_test {

using namespace chorus;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

/// A rank's communicators on the GPU that all share.
struct Rank {
  comm::AnyCommunicator control;
  comm::NcclCommunicator<> nccl;
  explicit Rank(const comm::World& world, std::chrono::milliseconds timeout = 60s)
      : control((share(world), comm::connect(world))), nccl(control, 0, timeout) {}
  static void share(const comm::World& world) {
    if (world.size > 1) comm::share_gpu(world.rank);
  }
};

Tensor<float, 1, Cuda> numbers(std::initializer_list<float> values) {
  return Tensor<float, 1, Cuda>::from(values, {static_cast<Index>(values.size())});
}
std::span<float> span_of(const Tensor<float, 1, Cuda>& x) { return {x.data(), static_cast<std::size_t>(x.numel())}; }

std::string collectives(const comm::World& world) {
  Rank rank(world);
  auto& c = rank.nccl;
  const auto n = static_cast<float>(world.size), r = static_cast<float>(world.rank);
  const auto wrong = [](const char* what, const std::vector<float>& got) { return cat(what, ": ", std::span(got)); };
  const float ranks = n * (n + 1) / 2;

  const auto sum = numbers({1 + r, 2 * (1 + r)});
  c.all_reduce(span_of(sum), comm::ReduceOp::sum, {.scale = 0.5});
  if (sum.to_vector() != std::vector<float>{ranks / 2, ranks}) return wrong("all_reduce", sum.to_vector());
  const auto largest = numbers({r, -r});
  c.all_reduce(span_of(largest), comm::ReduceOp::max);
  if (largest.to_vector() != std::vector<float>{n - 1, 0}) return wrong("max", largest.to_vector());
  const auto same = numbers({r + 5, r});
  c.broadcast(span_of(same), world.size - 1);
  if (same.to_vector() != std::vector<float>{n + 4, n - 1}) return wrong("broadcast", same.to_vector());

  const auto all = Tensor<float, 1, Cuda>::zeros({2 * Index{world.size}});
  const auto mine = numbers({r, r + 10});
  c.all_gather(span_of(mine), span_of(all));
  for (int i = 0; i < world.size; ++i)
    if (all.to_vector()[static_cast<std::size_t>(2 * i + 1)] != static_cast<float>(i + 10))
      return wrong("all_gather", all.to_vector());
  c.reduce_scatter(span_of(all), span_of(mine));
  if (mine.to_vector() != std::vector<float>{n * r, n * (r + 10)}) return wrong("reduce_scatter", mine.to_vector());

  if (world.size == 2) {
    const auto theirs = numbers({0, 0});
    c.group([&] {
      c.send(std::span<const float>(mine.data(), 2), 1 - world.rank);
      c.recv(span_of(theirs), 1 - world.rank);
    });
    if (theirs.to_vector() != std::vector<float>{n * (1 - r), n * (11 - r)})
      return wrong("send, recv", theirs.to_vector());
  }
  double on_host = r;
  c.all_reduce(std::span(&on_host, 1));
  if (on_host != n * (n - 1) / 2) return cat("host memory: ", on_host);
  c.barrier();

  // Work in the background, far ahead of the device.
  const auto many = Tensor<float, 1, Cuda>::full({1 << 20}, 1 / n);
  for (int i = 0; i < 50; ++i) auto work = c.all_reduce_async(span_of(many), comm::ReduceOp::sum, {.scale = 1 / n});
  c.synchronize();
  const auto got = many.to_vector();
  for (const float x : {got.front(), got[777], got.back()})
    if (std::abs(x - 1 / n) > 1e-6f) return cat("many: ", x);
  return "";
}

TEST_CASE("nccl on one GPU: one rank, and two", "[cuda]") {
  CHORUS_NEEDS_GPU;
  for (const int size : {1, 2}) {
    test::Ranks ranks(size, &collectives, 60s);
    for (const auto& text : ranks.texts()) CHECK(text == "");
  }
}

TEST_CASE("nccl on one GPU: a rank that is missing is waited for until the deadline", "[cuda]") {
  CHORUS_NEEDS_GPU;
  test::Ranks ranks(
      2,
      [](const comm::World& world) -> std::string {
        Rank rank(world, 3s);
        const auto x = numbers({1, 2});
        rank.nccl.all_reduce(span_of(x));
        rank.nccl.synchronize();
        if (world.rank == 1) {
          std::this_thread::sleep_for(15s);
          return "late";
        }
        const auto start = comm::Clock::now();
        auto work = rank.nccl.all_reduce_async(span_of(x), comm::ReduceOp::sum, {.bucket = 3});
        work.wait();
        std::string text = message_of<Error>([&] {
          x.to_vector();  // the wait for the device ends, since the watching thread aborts
          rank.nccl.synchronize();
        });
        return cat(text, comm::Clock::now() - start < 12s ? " in time" : " too late");
      },
      60s);
  CHECK_THAT(ranks.outcome(0).text,
             Contains("all_reduce #1") && Contains("bucket 3") && Contains("3000 ms") && Contains("in time"));
}

TEST_CASE("nccl on one GPU: one of two is killed and the other ends", "[cuda]") {
  CHORUS_NEEDS_GPU;
  test::Ranks ranks(
      2,
      [](const comm::World& world) -> std::string {
        Rank rank(world, 10s);
        const auto x = Tensor<float, 1, Cuda>::zeros({1 << 16});
        return message_of<Error>([&] {
          for (int step = 0;; ++step) {
            if (step == 20) test::Ranks::give_sign();
            rank.nccl.all_reduce(span_of(x));
            rank.nccl.synchronize();
          }
        });
      },
      60s);
  ranks.await_sign(1);
  kill(ranks.pid(1), SIGKILL);
  const auto outcome = ranks.outcome(0);
  CHECK_THAT(outcome.text, Contains("rank 0") && Contains("all_reduce"));
  CHECK(outcome.seconds < 120);
}

}  // namespace nccl_ranks_test
