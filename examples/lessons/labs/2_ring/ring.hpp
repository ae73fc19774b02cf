#pragma once
/// The requirements of lab 2 on an all-reduce: the ring's bits, its bytes, and that it ends.

#include <atomic>
#include <cstring>

#include "../answers.hpp"

namespace ring_lab {

inline constexpr const char* title = "Lab 2: write the ring";

/// Rank r's number i: no sum of these is exact, so that the order of additions shows.
inline float number_of(int rank, std::size_t i) {
  return 1.0f / (1.0f + static_cast<float>((i * 31 + static_cast<std::size_t>(rank) * 17) % 1009));
}

/// The numbers of each rank after `all_reduce`, the ranks' bytes, and the number of rank 0's messages.
struct Outcome {
  std::vector<std::vector<float>> numbers;
  std::vector<double> bytes;
  int messages = 0;
};
/// The library's all-reduce, with which the student's is compared.
inline void library(ch::comm::AnyCommunicator& ranks, std::span<float> data) { ranks.all_reduce(data); }

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

template <class AllReduce>
Outcome outcome(int n, std::size_t count, const AllReduce& all_reduce,
                ch::comm::Algorithm algorithm = ch::comm::Algorithm::automatic) {
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
        auto& own = out.numbers[static_cast<std::size_t>(ranks.rank())];
        for (std::size_t i = 0; i < count; ++i) own.push_back(number_of(ranks.rank(), i));
        all_reduce(ranks, std::span(own));
      },
      std::chrono::seconds(3), algorithm);
  for (int rank = 0; rank < n; ++rank) out.bytes.push_back(static_cast<double>(ch::trace::bytes_sent(rank)));
  out.messages = messages.of_rank_0;
  return out;
}

/// Where and how the student's sums differ from the library's; empty if they don't.
inline std::string difference(const Outcome& student, const Outcome& library) {
  std::string rounded;
  for (std::size_t rank = 0; rank < student.numbers.size(); ++rank)
    for (std::size_t i = 0; i < student.numbers[rank].size(); ++i) {
      const float is = student.numbers[rank][i], right = library.numbers[rank][i];
      if (is == right) continue;
      const auto at = ch::cat("number ", i, " of ", student.numbers[rank].size(), " on rank ", rank);
      if (!(std::abs(is - right) <= 1e-5f * right)) return at + " is not the sum";
      if (rounded.empty())
        rounded = at + " is right but for its rounding: its chunk doesn't go the way that the text describes";
    }
  return rounded;
}

/// Checks the student's function on n ranks. Returns whether it ended.
template <class Student>
bool judge(lab::Lab& lab, int n) {
  std::string sums, bytes;
  // Chunks of the last count don't fit the queue between two ranks, which has room for 1 MiB: if all ranks send first,
  // they deadlock.
  for (const std::size_t count : {0u, 1u, 7u, 100u, 1001u, 1'000'000u}) {
    if (count > 1001 && n > 2) break;
    Outcome student;
    if (!lab.run(ch::cat(n, " ranks, ", count, " numbers"), [&] { student = outcome(n, count, Student::all_reduce); }))
      return false;
    const auto right = outcome(n, count, library, ch::comm::Algorithm::ring);
    if (const auto apart = difference(student, right); sums.empty()) sums = apart;
    for (std::size_t rank = 0; rank < right.bytes.size() && bytes.empty(); ++rank)
      if (student.bytes[rank] != right.bytes[rank])
        bytes = ch::cat("rank ", rank, " has sent ", student.bytes[rank] < right.bytes[rank] ? "less" : "more", ": ",
                        student.bytes[rank], " bytes, with ", count, " numbers of 4 bytes each");
  }
  lab.require(ch::cat(n, " ranks: the bits of the library's ring"), sums.empty(), sums);
  lab.require(ch::cat(n, " ranks: the bytes of the library's ring"), bytes.empty(), bytes);
  return true;
}

template <class Student>
void run(lab::Lab& lab) {
  constexpr int ranks = 8;
  constexpr std::size_t count = 1'000'000;
  const auto large = outcome(ranks, count, library, ch::comm::Algorithm::ring);
  lab.compare("bytes that a rank sends", large.bytes[0], 0, "How many chunks does it send, and how large is one?");
  lab.compare("messages that a rank sends", answers::ring_messages(ranks), 0,
              "How many rounds are there, in both halves?");
  for (int n = 1; n <= ranks; ++n)
    if (!judge<Student>(lab, n)) return;
  Outcome mine;
  if (!lab.run("8 ranks, a million numbers", [&] { mine = outcome(ranks, count, Student::all_reduce); })) return;
  lab.require("8 ranks: a rank sends once in each round", mine.messages == answers::ring_messages(ranks),
              ch::cat("rank 0 has sent ", mine.messages, " messages"));
}

}  // namespace ring_lab
