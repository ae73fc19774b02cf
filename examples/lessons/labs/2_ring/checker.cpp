/// The requirements of lab 2 on an all-reduce: the order of its sums, its bytes, and that it ends. SPOILERS: read this
/// when your lab is right.

#include <atomic>
#include <chorus/core/trace.hpp>
#include <cmath>

#include "ring.hpp"

namespace ring_lab {
namespace {

using AllReduce = std::function<void(ch::comm::AnyCommunicator&, std::span<float>)>;

/// Rank r's number i: no sum of these is exact, so that the order of additions shows.
float number_of(std::size_t rank, std::size_t i) {
  return 1.0f / (1.0f + static_cast<float>((i * 31 + rank * 17) % 1009));
}

/// The sums of a ring on n ranks in which chunk c begins at rank c + `first` and goes to rank `step` further each round.
std::vector<float> sums(std::size_t n, std::size_t count, std::size_t first, std::size_t step) {
  std::vector<float> out(count);
  for (std::size_t chunk = 0; chunk < n; ++chunk)
    for (std::size_t i = count * chunk / n; i < count * (chunk + 1) / n; ++i)
      for (std::size_t round = 0; round < n; ++round) out[i] += number_of((chunk + first + round * step) % n, i);
  return out;
}

/// The numbers of each rank after an all-reduce, the ranks' bytes, and the number of rank 0's messages.
struct Outcome {
  std::vector<std::vector<float>> numbers;
  std::vector<double> bytes;
  int messages = 0;
};

/// Counts the messages of rank 0.
struct Messages final : ch::trace::Listener {
  std::atomic<int> of_rank_0{0};
  std::int64_t now() override { return 0; }
  void span(const ch::trace::Event& event) override {
    if (event.device == 0 && event.name.starts_with("message to")) ++of_rank_0;
  }
  void instant(const ch::trace::Event&) override {}
  void sent(int, int, ch::trace::Traffic, std::size_t) override {}
  void allocated(int, ch::trace::Memory, std::int64_t) override {}
};

Outcome outcome(int n, std::size_t count, const AllReduce& all_reduce) {
  Outcome out;
  out.numbers.resize(static_cast<std::size_t>(n));
  static Messages messages;  // static: the ranks' threads may still call it later
  messages.of_rank_0 = 0;
  ch::trace::reset_traffic();
  ch::trace::listen(&messages);
  const struct Quiet {
    ~Quiet() { ch::trace::listen(nullptr); }
  } quiet;
  lab::on_ranks(
      n,
      [&](ch::comm::AnyCommunicator& ranks) {
        const auto rank = static_cast<std::size_t>(ranks.rank());
        for (std::size_t i = 0; i < count; ++i) out.numbers[rank].push_back(number_of(rank, i));
        all_reduce(ranks, std::span(out.numbers[rank]));
      },
      std::chrono::seconds(3));
  for (int rank = 0; rank < n; ++rank) out.bytes.push_back(static_cast<double>(ch::trace::bytes_sent(rank)));
  out.messages = messages.of_rank_0;
  return out;
}

/// Sends as a ring does, and adds nothing: for its bytes and messages.
void as_the_ring(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
  const auto n = static_cast<std::size_t>(ranks.size()), me = static_cast<std::size_t>(ranks.rank());
  if (n == 1) return;
  const auto chunk = [&](std::size_t c) {
    return data.subspan(data.size() * (c % n) / n).first(data.size() * (c % n + 1) / n - data.size() * (c % n) / n);
  };
  for (int half = 0; half < 2; ++half)
    for (std::size_t round = 0; round + 1 < n; ++round) {
      const auto send = [&] {
        ranks.send(chunk(me + round + (half == 0 ? 0 : n - 1)), static_cast<int>((me + n - 1) % n));
      };
      if (me % 2 == 0) send();
      ranks.recv(chunk(me + round + (half == 0 ? 1 : n)), static_cast<int>((me + 1) % n));
      if (me % 2 == 1) send();
    }
}

/// Where and how the student's numbers differ from the right ones; empty if they don't.
std::string difference(const Outcome& student, const std::vector<float>& right) {
  const auto n = student.numbers.size();
  const auto lesson = sums(n, right.size(), 1, 1);
  std::string rounded;
  bool as_in_lesson = true;
  for (std::size_t rank = 0; rank < n; ++rank)
    for (std::size_t i = 0; i < right.size(); ++i) {
      const float is = student.numbers[rank][i];
      as_in_lesson = as_in_lesson && is == lesson[i];
      if (is == right[i]) continue;
      const auto at = ch::cat("number ", i, " of ", right.size(), " on rank ", rank);
      if (!(std::abs(is - right[i]) <= 1e-5f * right[i])) {
        for (std::size_t other = 0; other < n; ++other)
          if (student.numbers[other][i] == right[i])
            return ch::cat(at, " is not the sum, and rank ", other, " has it: do the sums go around?");
        return at + (is == number_of(rank, i) ? " is still the rank's own number, and no rank has the sum"
                                              : " is not the sum, and no rank has it");
      }
      if (rounded.empty()) rounded = at + " is right but for its rounding: its chunk ";
    }
  return rounded + (rounded.empty() ? ""
                    : as_in_lesson  ? "goes the way of lesson 6. This ring turns the other way"
                                    : "doesn't go the way that the text describes");
}

/// Checks the student's function on n ranks. Returns whether it ended.
bool judge(lab::Lab& lab, const Code& code, int n) {
  std::string wrong, bytes;
  // Chunks of the last count don't fit the queue between two ranks, which has room for 1 MiB: if all ranks send first,
  // they deadlock.
  for (const std::size_t count : {0u, 1u, 7u, 100u, 1001u, 1'000'000u}) {
    if (count > 1001 && n > 2) break;
    Outcome student;
    if (!lab.run(ch::cat(n, " ranks, ", count, " numbers"), [&] { student = outcome(n, count, code.all_reduce); }))
      return false;
    if (wrong.empty()) {
      // From rank to rank a chunk goes down: one down is n - 1 up.
      wrong = difference(student, sums(static_cast<std::size_t>(n), count, 0, static_cast<std::size_t>(n) - 1));
    }
    const auto reference = outcome(n, count, as_the_ring);
    for (std::size_t rank = 0; rank < reference.bytes.size() && bytes.empty(); ++rank)
      if (const double is = student.bytes[rank]; is != reference.bytes[rank])
        bytes = ch::cat("rank ", rank, " has sent ", is < reference.bytes[rank] ? "less" : "more", ": ", is,
                        " bytes, with ", count, " numbers of 4 bytes each");
  }
  const auto on = ch::cat(n, n == 1 ? " rank: " : " ranks: ");
  lab.require(on + "the sums, added in the ring's order", wrong.empty(), wrong);
  lab.require(ch::cat(on, "a rank sends no more than the ring does"), bytes.empty(), bytes);
  return true;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  constexpr int ranks = 8;
  constexpr std::size_t count = 1'000'000;
  const auto reference = outcome(ranks, count, as_the_ring);
  lab.compare("bytes that a rank sends", reference.bytes[0], 0, "How many chunks does it send, and how large is one?");
  lab.compare("messages that a rank sends", reference.messages, 0, "How many rounds are there, in both halves?");
  for (int n = 1; n <= ranks; ++n)
    if (!judge(lab, code, n)) return;
  Outcome mine;
  if (!lab.run("8 ranks, a million numbers", [&] { mine = outcome(ranks, count, code.all_reduce); })) return;
  lab.require("8 ranks: a rank sends once in each round", mine.messages == reference.messages,
              ch::cat("rank 0 has sent ", mine.messages, " messages"));
}

}  // namespace ring_lab
