// The tables of the pipeline's schedules, checked without ranks.
#include <catch.hpp>
#include <chorus/parallel/pipeline/check_schedule.hpp>
#include <unit/message_of.hpp>

namespace pipeline_schedule_test {

using namespace chorus;
using Catch::Matchers::Contains;
using Kind = Schedule::Kind;

/// Calls `f(p, m)` for pipelines of up to 64 ranks and 128 micro-batches.
template <class F>
void for_sizes(const F& f) {
  for (const int p : {1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 64})
    for (const int m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 63, 64, 65, 127, 128}) {
      INFO("p " << p << ", m " << m);
      f(p, m);
    }
}
double fill_and_drain(int p, int m) { return (p - 1.0) / (m + p - 1.0); }

TEST_CASE("pipeline schedules: GPipe's clock cycles") {
  for_sizes([](int p, int m) {
    const auto facts = check_schedule(GPipe::of(p, m));
    CHECK(facts.time == 3 * (m + p - 1));
    CHECK(facts.idle == Approx(fill_and_drain(p, m)).margin(1e-12));
    CHECK(facts.kept_inputs == std::vector<int>(static_cast<std::size_t>(p), m));
  });
}

TEST_CASE("pipeline schedules: 1F1B waits as long as GPipe, and keeps p - rank inputs") {
  for_sizes([](int p, int m) {
    const auto facts = check_schedule(OneForwardOneBackward::of(p, m));
    CHECK(facts.time == 3 * (m + p - 1));
    CHECK(facts.idle == Approx(fill_and_drain(p, m)).margin(1e-12));
    for (int rank = 0; rank < p; ++rank)
      CHECK(facts.kept_inputs[static_cast<std::size_t>(rank)] == std::min(p - rank, m));
  });
}

TEST_CASE("pipeline schedules: ZB-H1 takes 3 m + p - 1, and keeps what 1F1B's first rank keeps") {
  for_sizes([](int p, int m) {
    const auto facts = check_schedule(ZeroBubbleH1::of(p, m));
    if (m >= p) CHECK(facts.time == 3 * m + p - 1);
    CHECK(facts.time <= 3 * (m + p - 1));
    for (const int kept : facts.kept_inputs) CHECK(kept <= std::min(p, m));
  });
}

TEST_CASE("pipeline schedules: figures of small ones") {
  struct Case {
    int p, m, time, zero_bubble_time;
    double idle, zero_bubble_idle;
  };
  for (const auto& [p, m, time, zero_bubble_time, idle, zero_bubble_idle] :
       {Case{2, 8, 27, 25, .1111, .0400}, Case{4, 4, 21, 15, .4286, .2000}, Case{4, 8, 33, 27, .2727, .1111},
        Case{8, 16, 69, 55, .3043, .1273}}) {
    INFO("p " << p << ", m " << m);
    const auto plain = check_schedule(OneForwardOneBackward::of(p, m));
    const auto split = check_schedule(ZeroBubbleH1::of(p, m));
    CHECK(plain.time == time);
    CHECK(plain.idle == Approx(idle).margin(5e-5));
    CHECK(split.time == zero_bubble_time);
    CHECK(split.idle == Approx(zero_bubble_idle).margin(5e-5));
    CHECK(split.kept_inputs == std::vector<int>(static_cast<std::size_t>(p), p));
  }
}

template <int V>
void check_interleaved() {
  for_sizes([](int p, int m) {
    const auto table = Interleaved<V>::of(p, m);
    CHECK(table.stages == p * V);
    const auto facts = check_schedule(table);
    // Idle as GPipe with V times shorter stages: 3 (p - 1) units, if m is a multiple of p.
    if (m % p == 0) CHECK(facts.time == 3 * (m * V + p - 1));
    if (m % p == 0) CHECK(facts.idle == Approx((p - 1.0) / (V * m + p - 1.0)).margin(1e-12));
    CHECK(facts.kept_inputs[0] <= 2 * (p - 1) + (V - 1) * std::max(std::min(m, 2 * p), 1) + 1);
  });
}
TEST_CASE("pipeline schedules: interleaved stages, and micro-batches that p does not divide") {
  check_interleaved<1>();
  check_interleaved<2>();
  check_interleaved<3>();
}

TEST_CASE("pipeline schedules: Interleaved<1> is 1F1B") {
  CHECK(Interleaved<1>::of(5, 9).ranks == OneForwardOneBackward::of(5, 9).ranks);
}

TEST_CASE("pipeline schedules: a broken table is refused") {
  const auto message = [](const auto& change) {
    auto table = OneForwardOneBackward::of(2, 3);
    change(table);
    return message_of<UsageError>([&] { check_schedule(table); });
  };
  CHECK_THAT(message([](Schedule& table) { table.ranks[1].pop_back(); }),
             Contains("backward of micro-batch 2 in stage 1 occurs 0 times, expected once"));
  CHECK_THAT(message([](Schedule& table) {
               table.ranks[0].push_back({Kind::forward, 0, 0});
             }),
             Contains("forward of micro-batch 0 in stage 0 occurs 2 times, expected once"));
  CHECK_THAT(message([](Schedule& table) {
               table.ranks[0].push_back({Kind::forward, 3, 0});
             }),
             Contains("rank 0 has forward of micro-batch 3 in stage 0: there are 2 stages and 3 micro-batches"));
  CHECK_THAT(message([](Schedule& table) { table.ranks[0][0].stage = 1; }),
             Contains("rank 0 has forward of micro-batch 0 in stage 1, which belongs to rank 1"));
  CHECK_THAT(message([](Schedule& table) { std::swap(table.ranks[1][0], table.ranks[1][1]); }),
             Contains("no rank can continue: ") && Contains("rank 1's backward of micro-batch 0 in stage 1 waits for "
                                                            "forward of micro-batch 0 in stage 1"));
  // Rank 0 waits for a gradient before it has sent the activation.
  CHECK_THAT(message([](Schedule& table) { std::swap(table.ranks[0][0], table.ranks[0][2]); }),
             Contains("rank 0's backward of micro-batch 0 in stage 0 waits for"));
  CHECK_THAT(message([](Schedule& table) {
               table.ranks[0].push_back({Kind::weight, 0, 0});
             }),
             Contains("weight of micro-batch 1 in stage 0 occurs 0 times"));
  CHECK_THAT(message([](Schedule& table) { table.ranks.clear(); }), Contains("schedule: expected ranks"));
}

TEST_CASE("pipeline schedules: sizes that make no sense are refused") {
  CHECK_THAT(message_of<UsageError>([] { GPipe::of(0, 4); }), Contains("gpipe: expected ranks"));
  CHECK_THAT(message_of<UsageError>([] { Interleaved<2>::of(2, 0); }), Contains("got 2, 0 and 2"));
}

}  // namespace pipeline_schedule_test
