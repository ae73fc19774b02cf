#pragma once
/// What lab 2 asks of an all-reduce: the ring's bits, its bytes, and an end.

#include <atomic>
#include <cstring>

#include "../lab.hpp"

namespace ring_lab {

inline constexpr const char* title = "Lab 2: write the ring";

/// Rank r's number i: none of their sums is exact, so that the order of additions shows.
inline float number_of(int rank, std::size_t i) {
  return 1.0f / (1.0f + static_cast<float>((i * 31 + static_cast<std::size_t>(rank) * 17) % 1009));
}

/// What each rank has after `all_reduce`, the ranks' bytes, and how often rank 0 has sent.
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

template <class AllReduce>
Outcome outcome(int n, std::size_t count, const AllReduce& all_reduce,
                ch::comm::Algorithm algorithm = ch::comm::Algorithm::automatic) {
  Outcome out;
  out.numbers.resize(static_cast<std::size_t>(n));
  static Messages messages;  // the ranks' threads may tell it late
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

template <class Student>
void run(lab::Lab& lab) {
  for (int n = 1; n <= 8; ++n) {
    bool bits = true, bytes = true;
    for (const std::size_t count : {0u, 1u, 7u, 100u, 1001u}) {
      const auto student = outcome(n, count, Student::all_reduce);
      const auto library =
          outcome(n, count, [](auto& ranks, std::span<float> data) { ranks.all_reduce(data); }, ch::comm::Algorithm::ring);
      for (std::size_t rank = 0; rank < student.numbers.size(); ++rank) {
        const auto &a = student.numbers[rank], &b = library.numbers[rank];
        bits = bits && a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
        bytes = bytes && student.bytes[rank] == library.bytes[rank];
      }
    }
    lab.require(ch::cat(n, " ranks: the bits of the library's ring"), bits, "some sums differ");
    lab.require(ch::cat(n, " ranks: the bytes of the library's ring"), bytes, "ranks have sent more, or less");
  }
  constexpr std::size_t count = 1'000'000;
  const auto large = outcome(8, count, Student::all_reduce);
  lab.compare("bytes that a rank sends", large.bytes[0]);
  lab.compare("messages that a rank sends", large.messages);
}

}  // namespace ring_lab
