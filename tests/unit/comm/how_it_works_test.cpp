// How an all-reduce works: three ranks, each a thread, add up six numbers around a ring.
//
// First by hand with `send` and `recv`, then with one call of the library, compared message by message. The algorithm
// is in include/chorus/comm/algorithms/ring.hpp, and has the same steps as `by_hand` below.
#include <array>
#include <catch.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/core/trace.hpp>
#include <thread>
#include <vector>

#include "watched_transport.hpp"

namespace how_it_works_test {

using namespace chorus;
using test::Diary;

constexpr int ranks = 3;
constexpr std::size_t count = 6, chunk = count / ranks;  // numbers of each rank, and of each of their three chunks

/// The numbers of all ranks, one row per rank.
using Table = std::array<std::array<float, count>, ranks>;

constexpr Table start{{{1, 2, 3, 4, 5, 6},        //
                       {10, 20, 30, 40, 50, 60},  //
                       {100, 200, 300, 400, 500, 600}}};
constexpr Table sums{{{111, 222, 333, 444, 555, 666},  //
                      {111, 222, 333, 444, 555, 666},  //
                      {111, 222, 333, 444, 555, 666}}};

/// The whole table after each of the four steps.
using Steps = std::array<Table, 4>;

/// One rank's part. It sends to the next rank and receives from the previous one.
void by_hand(comm::AnyCommunicator& c, Steps& after) {
  const int r = c.rank(), next = (r + 1) % ranks, previous = (r + 2) % ranks;
  auto mine = start[static_cast<std::size_t>(r)];
  const auto at = [&](int number) {  // the chunk of that index, modulo the number of ranks
    return std::span(mine).subspan(static_cast<std::size_t>((number + ranks) % ranks) * chunk, chunk);
  };
  std::array<float, chunk> received{};
  std::size_t step = 0;

  // Reduce-scatter. In the first step rank r sends chunk r - 1; in each later step it sends the chunk that it has just
  // added to. After two steps rank r has the complete chunk r.
  for (int s = 1; s < ranks; ++s) {
    c.send(at(r - s), next);
    c.recv(std::span(received), previous);
    for (std::size_t i = 0; i < chunk; ++i) at(r - s - 1)[i] += received[i];
    after[step++][static_cast<std::size_t>(r)] = mine;
  }
  // All-gather. In the first step a rank sends its complete chunk; in each later step it sends the chunk that it has
  // just received.
  for (int s = 0; s < ranks - 1; ++s) {
    c.send(at(r - s), next);
    c.recv(at(r - s - 1), previous);
    after[step++][static_cast<std::size_t>(r)] = mine;
  }
}

/// Runs `body(communicator)` on one thread per rank.
template <class Body>
void on_threads(const Body& body) {
  auto group = comm::thread_group(ranks);
  std::vector<std::thread> threads;
  for (auto& c : group) threads.emplace_back([&] { body(c); });
  for (auto& thread : threads) thread.join();
}

TEST_CASE("how it works: an all-reduce around a ring of three, step by step", "[comm]") {
  Steps after{};
  on_threads([&](comm::AnyCommunicator& c) { by_hand(c, after); });

  // Step 1: rank 0 sends chunk 2 (5, 6) to rank 1, rank 1 chunk 0 (10, 20) to rank 2, rank 2 chunk 1 (300, 400) to rank
  // 0. Each adds what it receives to its own numbers.
  CHECK(after[0] == Table{{{1, 2, 303, 404, 5, 6},    //
                           {10, 20, 30, 40, 55, 66},  //
                           {110, 220, 300, 400, 500, 600}}});
  // Step 2: each sends the chunk that it has just added up: chunk 1 to rank 1, chunk 2 to rank 2, chunk 0 to rank 0.
  // Now each rank has a third of the sums: the reduce-scatter is complete.
  CHECK(after[1] == Table{{{111, 222, 303, 404, 5, 6},  //
                           {10, 20, 333, 444, 55, 66},  //
                           {110, 220, 300, 400, 555, 666}}});
  // Step 3: each sends its complete chunk, and the receiver keeps it.
  CHECK(after[2] == Table{{{111, 222, 303, 404, 555, 666},  //
                           {111, 222, 333, 444, 55, 66},    //
                           {110, 220, 333, 444, 555, 666}}});
  // Step 4: each sends the chunk that it has just received.
  CHECK(after[3] == sums);
}

TEST_CASE("how it works: the library's all-reduce sends the same messages, 2 (N - 1) / N of the data over each link",
          "[comm]") {
  trace::reset_traffic();
  Table result = start;
  const auto sent = test::diaries(ranks, comm::Algorithm::ring, [&](comm::AnyCommunicator& c) {
    c.all_reduce(std::span(result[static_cast<std::size_t>(c.rank())]), comm::ReduceOp::sum,
                 {.traffic = trace::Traffic::gradients});
  });
  CHECK(result == sums);

  // Which rank sends which chunk, in order: each rank sends four messages, all to the next rank.
  CHECK(sent[0] == Diary{{1, {5, 6}}, {1, {303, 404}}, {1, {111, 222}}, {1, {555, 666}}});
  CHECK(sent[1] == Diary{{2, {10, 20}}, {2, {55, 66}}, {2, {333, 444}}, {2, {111, 222}}});
  CHECK(sent[2] == Diary{{0, {300, 400}}, {0, {110, 220}}, {0, {555, 666}}, {0, {333, 444}}});

  // The bytes over each link: less than twice the data for any number of ranks.
  constexpr std::size_t data = count * sizeof(float), over_each_link = 2 * (ranks - 1) * data / ranks;
  static_assert(over_each_link == 32);
  for (int rank = 0; rank < ranks; ++rank) {
    std::size_t bytes = 0;
    for (const auto& message : sent[static_cast<std::size_t>(rank)]) bytes += message.numbers.size() * sizeof(float);
    CHECK(bytes == over_each_link);
    CHECK(trace::bytes_sent(rank, trace::Traffic::gradients) == over_each_link);  // any program can count its bytes
  }
}

TEST_CASE("how it works: short messages go to all ranks in ceil(log2 N) rounds", "[comm]") {
  // Each of five ranks has one number. A ring sends one number a round and needs four rounds until each rank has all.
  // Bruck's algorithm needs three: rank 0 sends one number to the rank one place on, two numbers to the rank two places
  // on, and then the last missing number to the rank four places on.
  std::array<std::array<float, 5>, 5> all{};
  const auto sent = test::diaries(5, comm::Algorithm::automatic, [&](comm::AnyCommunicator& c) {
    const float mine = 10 + static_cast<float>(c.rank());
    c.all_gather(std::span(&mine, 1), std::span(all[static_cast<std::size_t>(c.rank())]));
  });
  for (const auto& row : all) CHECK(row == std::array<float, 5>{10, 11, 12, 13, 14});
  CHECK(sent[0] == Diary{{1, {10}}, {2, {10, 14}}, {4, {10}}});
  CHECK(sent[1] == Diary{{2, {11}}, {3, {11, 10}}, {0, {11}}});
}

}  // namespace how_it_works_test
