// Lab 2: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/2_ring/ring.hpp"

#include "labs.hpp"

namespace labs_test::ring {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/2_ring/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/2_ring.cpp"
#undef main
}  // namespace solution

using Ranks = ch::comm::AnyCommunicator;
using ch::trace::Traffic;

namespace lesson {
#include "lesson_6_ring.hpp"
}

/// The lesson's ring turns the other way.
void lesson_6(Ranks& ranks, std::span<float> data) {
  if (ranks.size() > 1) lesson::ring_all_reduce(ranks, data);
}
/// The ring, but rank r sends chunk r + `first` first. `parts`: the messages of a chunk.
void turn(Ranks& ranks, std::span<float> data, std::size_t first, std::size_t parts = 1, bool send_first = false,
          bool gather = true) {
  const auto n = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
  if (n == 1) return;
  const auto chunk = [&](std::size_t c) {
    const auto begin = data.size() * (c % n) / n;
    return data.subspan(begin, data.size() * (c % n + 1) / n - begin);
  };
  std::vector<float> in(data.size() / n + 1);
  const auto pass_on = [&](std::span<float> out, std::span<float> into) {
    for (std::size_t part = 0; part < parts; ++part) {
      const auto of = [&](std::span<float> whole) {
        const auto begin = whole.size() * part / parts;
        return whole.subspan(begin, whole.size() * (part + 1) / parts - begin);
      };
      if (send_first || me % 2 == 0) ranks.send(of(out), static_cast<int>((me + n - 1) % n));
      ranks.recv(of(into), static_cast<int>((me + 1) % n));
      if (!send_first && me % 2 == 1) ranks.send(of(out), static_cast<int>((me + n - 1) % n));
    }
  };
  for (std::size_t s = 0; s + 1 < n; ++s) {
    const auto mine = chunk(me + first + s + 1);
    pass_on(chunk(me + first + s), std::span(in).first(mine.size()));
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] += in[i];
  }
  for (std::size_t s = 0; gather && s + 1 < n; ++s) pass_on(chunk(me + first + n - 1 + s), chunk(me + first + n + s));
}
/// Other ranks complete the chunks: sums are added in another order.
void another_chunk(Ranks& ranks, std::span<float> data) { turn(ranks, data, 1); }
void halves_of_chunks(Ranks& ranks, std::span<float> data) { turn(ranks, data, 0, 2); }
void all_send_first(Ranks& ranks, std::span<float> data) { turn(ranks, data, 0, 1, true); }
void no_all_gather(Ranks& ranks, std::span<float> data) { turn(ranks, data, 0, 1, false, false); }
/// All chunks have count / N numbers: the remainder is not summed.
void equal_chunks(Ranks& ranks, std::span<float> data) {
  const auto n = static_cast<std::size_t>(ranks.size());
  turn(ranks, data.first(data.size() / n * n), 0);
}
/// All numbers go around uncut: (N-1) K bytes.
void uncut(Ranks& ranks, std::span<float> data) {
  const int n = ranks.size(), me = ranks.rank();
  std::vector<float> passed(data.begin(), data.end()), in(data.size());
  for (int s = 0; s + 1 < n; ++s) {
    if (me % 2 == 0) ranks.send(std::span(passed), (me + n - 1) % n);
    ranks.recv(std::span(in), (me + 1) % n);
    if (me % 2 == 1) ranks.send(std::span(passed), (me + n - 1) % n);
    passed = in;
    for (std::size_t i = 0; i < data.size(); ++i) data[i] += in[i];
  }
}

TEST_CASE("lab 2: the solution passes, and wrong answers are told apart") {
  const auto right = solved("2_ring");
  const auto with = [](auto* all_reduce) { return judged(ring_lab::check, {all_reduce}); };
  check_empty("2_ring", right);
  check_solution(with(solution::all_reduce), right);
  check_guesses(with(solution::all_reduce), right,
                {{"bytes that a rank sends", 28'000'000}, {"messages that a rank sends", 7}});
  check_hole(with(given::all_reduce), right, "all_reduce");
  check_told_apart(right, {{"lesson 6", with(lesson_6), "its chunk goes the way of lesson 6"},
                           {"uncut", with(uncut), "4 ranks: a rank sends no more than the ring does: rank 0 has sent more"},
                           {"equal chunks", with(equal_chunks), "no rank has the sum"},
                           {"all send first", with(all_send_first), "which waits for this rank"},
                           {"halves of chunks", with(halves_of_chunks), "rank 0 has sent 28 messages"},
                           {"no all-gather", with(no_all_gather), "do the sums go around?"}});
  CHECK(run(with(another_chunk), right).find("doesn't go the way that the text describes") != std::string::npos);
}

}  // namespace labs_test::ring
