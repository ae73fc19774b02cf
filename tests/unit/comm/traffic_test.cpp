// Bytes over the links: those that trace counts, compared with the textbook's formulas.
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>
#include <thread>
#include <vector>

namespace traffic_test {

using namespace chorus;
using trace::Traffic;

/// Payload bytes that each rank sends in one call of f.
template <class F>
std::vector<std::uint64_t> bytes(int size, F f) {
  trace::reset_traffic();
  auto group = comm::thread_group(size);
  std::vector<std::thread> threads;
  for (auto& c : group) threads.emplace_back([&] { f(c); });
  for (auto& thread : threads) thread.join();
  std::vector<std::uint64_t> sent;
  for (int rank = 0; rank < size; ++rank) {
    sent.push_back(trace::bytes_sent(rank, Traffic::gradients));
    CHECK(trace::bytes_sent(rank) == sent.back());  // no other kind of traffic
  }
  return sent;
}

TEST_CASE("all_reduce sends 2 (n - 1) / n of the data from every rank", "[comm]") {
  for (int size = 1; size <= 5; ++size) {
    const auto n = static_cast<std::uint64_t>(size);
    for (const std::uint64_t count : {n * 1000, n * 1'000'000}) {
      const auto sent = bytes(size, [&](comm::AnyCommunicator& c) {
        std::vector<float> data(count, 1);
        c.all_reduce(std::span(data), comm::ReduceOp::sum, {.scale = 0.5, .traffic = Traffic::gradients});
      });
      CHECK(sent == std::vector(n, 2 * (n - 1) * count / n * sizeof(float)));
    }
  }
}

TEST_CASE("chunks are rounded to whole numbers, so that a rank is at most 2 of them off", "[comm]") {
  const std::uint64_t count = 1'000'003;
  const auto sent = bytes(4, [&](comm::AnyCommunicator& c) {
    std::vector<double> data(count, 1);
    c.all_reduce(std::span(data), comm::ReduceOp::sum, {.traffic = Traffic::gradients});
  });
  std::uint64_t total = 0;
  for (const auto n : sent) {
    CHECK(std::abs(static_cast<double>(n) - 1.5 * static_cast<double>(count) * sizeof(double)) <= 2 * sizeof(double));
    total += n;
  }
  CHECK(total == 2 * 3 * count * sizeof(double));
}

TEST_CASE("bytes of the other collectives", "[comm]") {
  const auto sends = [](int size, auto f) {
    return bytes(size, [&](comm::AnyCommunicator& c) {
      std::vector<float> mine(50'000), all(mine.size() * static_cast<std::size_t>(size));
      f(c, std::span(mine), std::span(all));
    });
  };
  const comm::CollectiveOptions options{.traffic = Traffic::gradients};
  const std::uint64_t part = 50'000 * sizeof(float);
  CHECK(sends(4, [&](auto& c, auto mine, auto all) { c.all_gather(mine, all, options); }) == std::vector(4, 3 * part));
  CHECK(sends(4, [&](auto& c, auto mine, auto all) { c.reduce_scatter(all, mine, comm::ReduceOp::sum, options); }) ==
        std::vector(4, 3 * part));
  CHECK(sends(3, [&](auto& c, auto mine, auto) { c.broadcast(mine, 1, options); }) ==
        std::vector<std::uint64_t>{0, part, part});
  CHECK(sends(2, [&](auto& c, auto mine, auto) {
          c.rank() == 0 ? c.send(mine, 1, options) : c.recv(mine, 0, options);
        }) == std::vector<std::uint64_t>{part, 0});
  CHECK(sends(4, [&](auto& c, auto, auto) { c.barrier(); }) == std::vector<std::uint64_t>(4, 0));
}

}  // namespace traffic_test
