// Lab 2: its solution passes; wrong code is detected.
#define main main_of_2_ring
#define Mine Mine_of_2
#include "../../examples/lessons/labs/2_ring/ring.cpp"
#undef Mine
#undef main
#include "labs.hpp"

namespace labs_test {
namespace ring {

#include "solutions/2_ring.hpp"

using Ranks = ch::comm::AnyCommunicator;
using ch::trace::Traffic;

#include "lesson_6_ring.hpp"

/// The lesson's ring cuts and passes chunks in the same way as the lab's.
struct Lesson6 {
  static void all_reduce(Ranks& ranks, std::span<float> data) {
    if (ranks.size() > 1) ring_all_reduce(ranks, data);
  }
};
/// Other ranks complete the chunks: sums are added in another order.
struct AnotherOrder {
  static void all_reduce(Ranks& ranks, std::span<float> data) { go_around(ranks, data, 0); }
};
/// All numbers go around uncut: (N-1) K bytes.
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
/// All chunks have count / N numbers: the remainder is not summed.
struct EqualChunks {
  static void all_reduce(Ranks& ranks, std::span<float> data) {
    const auto n = static_cast<std::size_t>(ranks.size());
    go_around(ranks, data.first(data.size() / n * n), n - 1);
  }
};
/// All ranks send first.
struct SendsFirst {
  static void all_reduce(Ranks& ranks, std::span<float> data) {
    const auto n = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
    const auto chunk = [&](std::size_t i) {
      const auto begin = data.size() * (i % n) / n;
      return data.subspan(begin, data.size() * (i % n + 1) / n - begin);
    };
    std::vector<float> in(data.size() / n + 1);
    for (std::size_t s = 0; s + 1 < n; ++s) {
      ranks.send(chunk(me + 2 * n - 1 - s), static_cast<int>((me + 1) % n));
      const auto mine = chunk(me + 2 * n - 2 - s);
      ranks.recv(std::span(in).first(mine.size()), static_cast<int>((me + n - 1) % n));
      for (std::size_t i = 0; i < mine.size(); ++i) mine[i] += in[i];
    }
    for (std::size_t s = 0; s + 1 < n; ++s) {
      ranks.send(chunk(me + 2 * n - s), static_cast<int>((me + 1) % n));
      ranks.recv(chunk(me + 2 * n - 1 - s), static_cast<int>((me + n - 1) % n));
    }
  }
};

TEST_CASE("lab 2: the solution passes, and wrong ones do not") {
  const auto right = solved("2_ring");
  check_empty("2_ring", right);
  const auto passed = run(ring_lab::run<Solution>, right);
  INFO(passed);
  CHECK(passes(passed));
  CHECK(passes(run(ring_lab::run<Lesson6>, right)));
  check_guesses(ring_lab::run<Solution>, right,
                {{"bytes that a rank sends", 28'000'000}, {"messages that a rank sends", 7}});
  check_hole(ring_lab::run<Mine_of_2>, right, "all_reduce");
  const auto order =
      check_wrong(ring_lab::run<AnotherOrder>, right, "3 ranks: the bits of the library's ring: number ", 12);
  CHECK(order.find("is right but for its rounding") != std::string::npos);
  CHECK(is_wrong(run(ring_lab::run<Whole>, right), "4 ranks: the bytes of the library's ring: rank 0 has sent more"));
  CHECK(run(ring_lab::run<EqualChunks>, right)
            .find("WRONG   2 ranks: the bits of the library's ring: number 0 of 1 on "
                  "rank 0 is not the sum") != std::string::npos);
  const auto waits = check_wrong(ring_lab::run<SendsFirst>, right, "2 ranks, 1000000 numbers: rank ", 1);
  CHECK(waits.find("which waits for this rank") != std::string::npos);
}

}  // namespace ring
}  // namespace labs_test
