// Collectives in which ranks read each other's memory directly, without copies.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <catch.hpp>
#include <chorus/comm/algorithms/in_place.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/comm/transport/shm_transport.hpp>
#include <fstream>
#include <thread>

#include "processes.hpp"

namespace in_place_test {

using namespace chorus;
using comm::ReduceOp;

/// Numbers of type T in memory that the communicator allocated, or that the program owns.
template <class T>
struct Lent {
  std::shared_ptr<std::byte> memory;
  std::vector<T> own;
  std::span<T> numbers;

  Lent(comm::AnyCommunicator& c, std::size_t count, bool lent = true, std::size_t skip = 0) : own(count) {
    if (lent) memory = c.allocate((count + skip) * sizeof(T));
    numbers = memory ? std::span(reinterpret_cast<T*>(memory.get()) + skip, count) : std::span(own);
  }
};

template <class T>
T made_up(int rank, std::size_t i) {
  auto state = static_cast<std::uint32_t>(i * 2654435761u) ^ static_cast<std::uint32_t>(rank + 1) * 40503u;
  state = state * 1664525 + 1013904223;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(state >> 20);
  return static_cast<T>(static_cast<float>(state >> 8) * 1e-7f - 0.8f);
}

template <class T>
void fill(std::span<T> numbers, int rank) {
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = made_up<T>(rank, i);
}

std::uint64_t hash(std::span<const float> numbers) {
  std::uint64_t hash = 14695981039346656037ull;
  for (const float x : numbers) hash = (hash ^ std::bit_cast<std::uint32_t>(x)) * 1099511628211ull;
  return hash;
}

/// All collectives, of numbers that are exact in T; returns "" or the first difference.
template <class T>
std::string exact(comm::AnyCommunicator& c, std::size_t count) {
  const int n = c.size(), r = c.rank();
  const auto ranks = static_cast<std::size_t>(n);
  const auto value = [](int rank, std::size_t i) { return static_cast<T>(static_cast<std::size_t>(rank) * 3 + i % 7); };
  Lent<T> data(c, count, true, static_cast<std::size_t>(r) * 64), whole(c, count * ranks);
  const auto sum = [&](std::size_t i) {
    auto all = value(0, i);
    for (int rank = 1; rank < n; ++rank) all = static_cast<T>(all + value(rank, i));
    return all;
  };
  for (const auto op : {ReduceOp::sum, ReduceOp::max}) {
    for (std::size_t i = 0; i < count; ++i) data.numbers[i] = value(r, i);
    c.all_reduce(data.numbers, op);
    for (std::size_t i = 0; i < count; ++i)
      if (data.numbers[i] != (op == ReduceOp::sum ? sum(i) : value(n - 1, i)))
        return cat("all_reduce ", op, " of ", count, " ", dtype<T>, ": at ", i, ": ", data.numbers[i]);
  }
  for (std::size_t i = 0; i < whole.numbers.size(); ++i) whole.numbers[i] = value(r, i);
  const auto part = whole.numbers.subspan(static_cast<std::size_t>(r) * count, count);
  c.reduce_scatter(whole.numbers, data.numbers);
  c.reduce_scatter(whole.numbers, part);  // in place
  for (std::size_t i = 0; i < count; ++i) {
    const auto expected = sum(static_cast<std::size_t>(r) * count + i);
    if (data.numbers[i] != expected || part[i] != expected) return cat("reduce_scatter of ", count, ": at ", i);
  }
  for (std::size_t i = 0; i < count; ++i) part[i] = value(r, i);
  c.all_gather(part, whole.numbers);
  for (std::size_t i = 0; i < whole.numbers.size(); ++i)
    if (whole.numbers[i] != value(static_cast<int>(i / count), i % count))
      return cat("all_gather of ", count, ": at ", i);
  return "";
}

int mappings() {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find("memfd:chorus") != std::string::npos;
  return found;
}

TEST_CASE("in place: all collectives, in memory of the communicator, of several lengths", "[comm]") {
  for (const int size : {2, 3, 4}) {
    test::Ranks ranks(size, [](const comm::World& world) -> std::string {
      auto c = comm::connect(world);
      if (!c.allocate(1)) return "no memory";
      for (const std::size_t count : {1'100u, 20'000u, 70'001u, 300'007u})
        if (auto wrong = exact<float>(c, count); !wrong.empty()) return wrong;
      for (const auto& wrong : {exact<double>(c, 20'001), exact<std::int64_t>(c, 20'001),
                                exact<std::uint8_t>(c, 100'001), exact<bf16>(c, 50'001)})
        if (!wrong.empty()) return wrong;
      return "";
    });
    for (const auto& text : ranks.texts()) CHECK(text == "");
  }
}

TEST_CASE("in place: weighted sums are the same bits on all ranks, and those of numbers that are sent", "[comm]") {
  for (const int size : {2, 3}) {
    constexpr std::size_t count = 60'001;
    const auto scale = [size](int rank) { return (rank + 1.0) / (size * (size + 1) / 2.0); };
    test::Ranks ranks(size, [&](const comm::World& world) {
      auto c = comm::connect(world);
      Lent<float> data(c, count);
      fill(data.numbers, world.rank);
      c.all_reduce(data.numbers, ReduceOp::sum, {.scale = scale(world.rank)});
      double worst = 0;
      for (std::size_t i = 0; i < count; ++i) {
        double sum = 0;
        for (int rank = 0; rank < size; ++rank) sum += scale(rank) * static_cast<double>(made_up<float>(rank, i));
        worst = std::max(worst, std::abs(sum - static_cast<double>(data.numbers[i])));
      }
      std::vector<float> sent(count);
      fill(std::span(sent), world.rank);
      c.all_reduce(std::span(sent), ReduceOp::sum, {.scale = scale(world.rank)});
      std::string others = hash(std::span(sent)) == hash(data.numbers) ? "" : " when sent others";
      // Each order of additions gives the same sum of two ranks' numbers.
      for (const bool lent : {true, false}) {
        if (size != 2) break;
        Lent<float> whole(c, count - 1, lent), part(c, count / 2, lent);
        fill(whole.numbers, world.rank);
        c.reduce_scatter(whole.numbers, part.numbers, ReduceOp::sum, {.scale = scale(world.rank)});
        const auto expected = data.numbers.subspan(static_cast<std::size_t>(world.rank) * part.numbers.size());
        if (!std::equal(part.numbers.begin(), part.numbers.end(), expected.begin())) others += " in parts others";
      }
      return cat(worst < 1e-6 ? "right " : "wrong ", hash(data.numbers), others);
    });
    const auto texts = ranks.texts();
    for (const auto& text : texts) CHECK(text == texts[0]);
    CHECK_THAT(texts[0], Catch::Matchers::StartsWith("right") && !Catch::Matchers::Contains("others"));
  }
}

TEST_CASE("in place: of two ranks, the one that has time to spare adds up", "[comm]") {
  using comm::detail::Offer, comm::detail::the_one_ahead, comm::detail::nobody;
  constexpr std::int64_t ms = 1'000'000;
  const Offer early{.came = 5 * ms}, late{.came = 6 * ms}, waits{.came = 7 * ms, .idle = 1};
  CHECK(the_one_ahead(early, late) == 0);
  CHECK(the_one_ahead(late, early) == 1);
  CHECK(the_one_ahead(early, early) == nobody);
  CHECK(the_one_ahead(early, waits) == 1);
  CHECK(the_one_ahead(waits, late) == 0);
  CHECK(the_one_ahead(waits, Offer{.came = 1 * ms, .idle = 1}) == nobody);
}

TEST_CASE("in place: whichever rank is ahead, the sums and the traffic are the same", "[comm]") {
  constexpr std::size_t count = 60'001;
  const auto reduce = [](comm::AnyCommunicator& c, int late) {
    Lent<float> data(c, count);
    fill(data.numbers, c.rank());
    if (late == comm::detail::nobody) {
      c.all_reduce(data.numbers, ReduceOp::sum, {.scale = 0.3 + c.rank()});
      return hash(data.numbers);
    }
    if (c.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    auto work = c.all_reduce_async(data.numbers, ReduceOp::sum, {.scale = 0.3 + c.rank()});
    // The program computes while the call runs.
    while (!work.done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    work.wait();
    return hash(data.numbers);
  };
  test::Ranks ranks(2, [&](const comm::World& world) -> std::string {
    auto c = comm::connect(world);
    const auto expected = reduce(c, comm::detail::nobody);
    for (const int late : {1, 0, 0, 1}) {
      const auto before = trace::bytes_sent(world.rank, trace::Traffic::control);
      if (reduce(c, late) != expected) return cat("others when rank ", late, " is late");
      const auto sent = trace::bytes_sent(world.rank, trace::Traffic::control) - before;
      if (sent != count * sizeof(float)) return cat(sent, " bytes when ", late, " is late");
    }
    return cat("as ", expected);
  });
  const auto texts = ranks.texts();
  CHECK_THAT(texts[0], Catch::Matchers::StartsWith("as "));
  CHECK(texts[1] == texts[0]);
}

TEST_CASE("in place: a rank whose data lies elsewhere makes all of them send", "[comm]") {
  test::Ranks ranks(3, [](const comm::World& world) {
    auto c = comm::connect(world);
    std::string log;
    for (const bool lent : {true, false, true}) {
      Lent<float> data(c, 100'000, lent || world.rank != 1);
      fill(data.numbers, world.rank);
      c.all_reduce(data.numbers);
      log += cat(hash(data.numbers), " ");
    }
    return log;
  });
  const auto texts = ranks.texts();
  for (const auto& text : texts) CHECK(text == texts[0]);
  CHECK(texts[0].size() > 20);
}

TEST_CASE("in place: memory that was given back is unmapped by the others, too", "[comm]") {
  test::Ranks ranks(2, [](const comm::World& world) {
    auto c = comm::connect(world);
    const int before = mappings();
    int most = 0;
    for (int turn = 0; turn < 20; ++turn) {
      Lent<float> data(c, 100'000);
      fill(data.numbers, turn);
      c.all_reduce(data.numbers);
      if (data.numbers[7] != 2 * made_up<float>(turn, 7)) return cat("turn ", turn, ": ", data.numbers[7]);
      most = std::max(most, mappings() - before);
      c.barrier();
    }
    return cat(most > 1 && most <= 3 ? "few" : cat(most));
  });
  for (const auto& text : ranks.texts()) CHECK(text == "few");
}

TEST_CASE("in place: what can't be mapped is sent", "[comm]") {
  // The second region stands for memory of a process that this one is not allowed to map.
  auto lent = comm::SharedMemory::allocate(1000);
  auto window = comm::SharedMemory::find(lent.get() + 10, 100);
  CHECK(window.key != 0);
  CHECK(comm::SharedMemory::find(lent.get() + 10, 1000).key == 0);
  comm::MappedWindows mapped;
  auto* const there = mapped.open(getpid(), window);
  REQUIRE(there != nullptr);
  lent.get()[10] = std::byte{42};
  CHECK(*there == std::byte{42});
  window.fd = 1'000'000;
  CHECK(mapped.open(getpid(), window) == there);  // mapped already
  ++window.key;
  CHECK(mapped.open(getpid(), window) == nullptr);
  lent.reset();
  CHECK(comm::SharedMemory::find(there, 1).key == 0);
}

TEST_CASE("in place: what was offered but not mapped at first, and then can't be, is sent", "[comm]") {
  test::Ranks ranks(3, [](const comm::World& world) {
    auto c = comm::connect(world);
    Lent<float> lent(c, 10'000), elsewhere(c, 10'000, false);
    std::string log;
    for (const int other : {1, 0, 2}) {  // the rank with memory of its own; in the last pass none
      auto* const data = world.rank == other && other != 2 ? &elsewhere : &lent;
      fill(data->numbers, world.rank);
      c.all_reduce(data->numbers);
      log += cat(hash(data->numbers), " ");
      // From here on no rank can map rank 0's memory.
      const int known_as = comm::SharedMemory::find(reinterpret_cast<std::byte*>(lent.numbers.data()), 1).fd;
      if (world.rank == 0 && other == 0) dup2(open("/dev/null", O_RDWR), known_as);
    }
    return log;
  });
  const auto texts = ranks.texts();
  for (const auto& text : texts) CHECK(text == texts[0]);
  CHECK(texts[0].size() > 20);
}

TEST_CASE("in place: a rank that is killed meanwhile is named by the others", "[comm]") {
  for (int turn = 0; turn < 5; ++turn) {
    test::Ranks ranks(3, [](const comm::World& world) -> std::string {
      auto c = comm::connect(world);
      Lent<float> data(c, 1'000'000);
      c.all_reduce(data.numbers);
      test::Ranks::give_sign();
      for (;;) c.all_reduce(data.numbers);
    });
    for (int rank = 0; rank < 3; ++rank) ranks.await_sign(rank);
    std::this_thread::sleep_for(std::chrono::milliseconds(3 + 2 * turn));
    kill(ranks.pid(1), SIGKILL);
    for (const int rank : {0, 2}) CHECK_THAT(ranks.outcome(rank).text, Catch::Matchers::Contains("rank 1 is lost"));
  }
}

/// Like combine_products, but it pauses in the middle.
std::atomic<int> adding{0}, aborted{0};
void add_slowly(void* out, const void* in, double, const void* mine, double, std::size_t count) {
  adding = 1;
  for (int waited = 0; aborted == 0 && waited < 1000; ++waited) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto x = static_cast<const float*>(in), y = static_cast<const float*>(mine);
  std::transform(x, x + count, y, static_cast<float*>(out), std::plus());
}

TEST_CASE("in place: once a call has failed, nobody writes to its data any more", "[comm]") {
  auto group = comm::thread_group(2);
  std::vector<float> data[2] = {std::vector<float>(2000, 1), std::vector<float>(2000, 2)};
  adding = aborted = 0;
  std::thread slow([&] {
    comm::Call call{comm::Op::all_reduce, comm::reduction<float>(ReduceOp::sum, 1)};
    call.reduction.combine_products = &add_slowly;
    call.count = data[0].size();
    call.in = call.out = data[0].data();
    try {
      group[0].engine().now(call);  // it adds up everything and returns, or half of it, and needs the peer's half
    } catch (const CommError&) {
    }
  });
  std::thread other([&] {
    try {
      group[1].all_reduce(std::span(data[1]));
    } catch (const CommError&) {
      data[1].assign(data[1].size(), 7);
    }
  });
  while (adding == 0) std::this_thread::yield();
  group[1].abort("no flour left");
  aborted = 1;
  slow.join();
  other.join();
  CHECK(std::count(data[1].begin(), data[1].end(), 7.0f) == 2000);
}

TEST_CASE("in place: ranks in different calls are both named", "[comm]") {
  test::Ranks ranks(2, [](const comm::World& world) {
    auto c = comm::connect(world);
    Lent<float> data(c, world.rank == 0 ? 100'000 : 100'001);
    c.all_reduce(data.numbers);
    return std::string("went through");
  });
  for (const auto& text : ranks.texts()) CHECK_THAT(text, Catch::Matchers::Contains("sum of 100000 F32"));
}

}  // namespace in_place_test
