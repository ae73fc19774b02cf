// Which ranks share a GPU, whatever numbers each process sees.
#include <catch.hpp>
#include <chorus/comm/nccl/gpu_seats.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace gpu_seats_test {

using namespace chorus;

/// For each rank: whether it shares its GPU, and whether all ranks are on one machine.
std::string found(const std::vector<comm::GpuSeat>& seats) {
  auto group = comm::thread_group(static_cast<int>(seats.size()), std::chrono::seconds(10));
  std::vector<std::string> texts(seats.size());
  std::vector<std::thread> threads;
  for (auto& ranks : group)
    threads.emplace_back([&, rank = static_cast<std::size_t>(ranks.rank())] {
      const auto sharing = comm::gpu_sharing(ranks, seats[rank]);
      texts[rank] = cat(sharing.shared ? "shared" : "own", sharing.one_machine ? " " : " (machines) ");
    });
  for (auto& thread : threads) thread.join();
  std::string all;
  for (const auto& text : texts) all += text;
  return all;
}

TEST_CASE("ranks share a GPU if they hold the same one, and only those", "[comm]") {
  const auto seat = [](std::uint64_t machine, std::uint8_t gpu) { return comm::GpuSeat{machine, {9, 9, gpu}}; };
  // Each process sees one GPU, number 0 for all, or sees all of them: their UUIDs differ.
  CHECK(found({seat(1, 0), seat(1, 1), seat(1, 2), seat(1, 3)}) == "own own own own ");
  CHECK(found({seat(1, 0), seat(1, 0)}) == "shared shared ");
  CHECK(found({seat(1, 0), seat(1, 1), seat(1, 0)}) == "shared own shared ");
  CHECK(found({seat(1, 0), seat(1, 1), seat(2, 0), seat(2, 1)}) ==
        "own (machines) own (machines) own (machines) own (machines) ");
  CHECK(found({seat(1, 0), seat(2, 5), seat(2, 5)}) == "own (machines) shared (machines) shared (machines) ");
}

}  // namespace gpu_seats_test
