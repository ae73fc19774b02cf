// Lab 2: its solution passes; what is wrong is noticed.
#define main main_of_2_ring
#define Mine Mine_of_2
#include "../../examples/lessons/labs/2_ring/ring.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace ring {

using Ranks = ch::comm::AnyCommunicator;

/// `first`: which chunk rank 0 sends first.
void go_around(Ranks& ranks, std::span<float> data, std::size_t first) {
  const auto n = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
  if (n == 1) return;
  const int next = static_cast<int>((me + 1) % n), previous = static_cast<int>((me + n - 1) % n);
  const auto chunk = [&](std::size_t i) {
    const auto begin = data.size() * (i % n) / n;
    return data.subspan(begin, data.size() * (i % n + 1) / n - begin);
  };
  std::vector<float> in(data.size() / n + 1);
  const auto pass_on = [&](std::span<float> out, std::span<float> into) {
    if (me % 2 == 0) ranks.send(out, next);
    ranks.recv(into, previous);
    if (me % 2 == 1) ranks.send(out, next);
  };
  for (std::size_t s = 0; s + 1 < n; ++s) {
    const auto mine = chunk(me + first + 2 * n - 1 - s);
    pass_on(chunk(me + first + 2 * n - s), std::span(in).first(mine.size()));
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] += in[i];
  }
  for (std::size_t s = 0; s + 1 < n; ++s)
    pass_on(chunk(me + first + 2 * n + 1 - s), chunk(me + first + 2 * n - s));
}
struct Solution {
  static void all_reduce(Ranks& ranks, std::span<float> data) {
    go_around(ranks, data, static_cast<std::size_t>(ranks.size()) - 1);
  }
};
/// Other ranks finish the chunks: sums are added in another order.
struct AnotherOrder {
  static void all_reduce(Ranks& ranks, std::span<float> data) { go_around(ranks, data, 0); }
};
/// All numbers go around whole: (N-1) K bytes.
struct Whole {
  static void all_reduce(Ranks& ranks, std::span<float> data) {
    const int n = ranks.size(), me = ranks.rank();
    std::vector<float> passed(data.begin(), data.end()), in(data.size());
    for (int s = 0; s + 1 < n; ++s) {
      if (me % 2 == 0) ranks.send(std::span(passed), (me + 1) % n);
      ranks.recv(std::span(in), (me + n - 1) % n);
      if (me % 2 == 1) ranks.send(std::span(passed), (me + 1) % n);
      passed = in;
      for (std::size_t i = 0; i < data.size(); ++i) data[i] += in[i];
    }
  }
};
/// All send first.
struct Hangs {
  static void all_reduce(Ranks& ranks, std::span<float> data) {
    std::vector<float> in(data.size());
    for (int s = 0; s + 1 < ranks.size(); ++s) {
      for (int again = 0; again < 200; ++again) ranks.send(data, (ranks.rank() + 1) % ranks.size());
      for (int again = 0; again < 200; ++again) ranks.recv(std::span(in), (ranks.rank() + ranks.size() - 1) % ranks.size());
    }
  }
};

TEST_CASE("lab 2: the solution passes, and wrong ones do not") {
  const json solved{{"bytes that a rank sends", 2 * 7 * 4'000'000 / 8}, {"messages that a rank sends", 14}};
  check_empty("2_ring", solved);
  const auto right = run(ring_lab::run<Solution>, solved);
  INFO(right);
  CHECK(passes(right));
  CHECK(is_wrong(run(ring_lab::run<AnotherOrder>, solved), "3 ranks: the bits of the library's ring"));
  const auto whole = run(ring_lab::run<Whole>, solved);
  CHECK(is_wrong(whole, "4 ranks: the bytes of the library's ring"));
  CHECK(is_wrong(whole, "bytes that a rank sends"));
  CHECK(run(ring_lab::run<Hangs>, solved).find("throws: rank ") != std::string::npos);
  CHECK(run(ring_lab::run<Mine_of_2>, solved).find("there is a hole: write all_reduce") != std::string::npos);
}

}  // namespace ring
}  // namespace labs_test
