#pragma once
/// `RanksTogether`: all ranks of a program that differ only in how fast they compute, call by call, without messages.
///
/// In a ring over equal links every rank does the same with its neighbours. Of a call in which each sends J chunks, a
/// chunk taking S on a port in pieces of up to b, rank r ends when the slowest way to it does: from the start of the
/// rank i before it over i hops, which a piece takes alpha and b for, while all of a chunk would take S:
///
///   ends(r) = max(starts(r) + J S, max over 1 <= i <= J of starts(r - i) + J S + i alpha - (i - 1) (S - b))
///
/// So a call takes time by the number of ranks, not by its square. Chunks are as long as the longest one.
/// tests/unit/parallel/simulated_together_test.cpp holds it against the messages, to the femtosecond.

#include <algorithm>
#include <chorus/comm/world.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/simulate/simulate.hpp>
#include <chorus/simulate/simulated_transport.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

/// Whether ranks of these options can be computed together: over one kind of link, by rings.
inline bool run_together(const SimulationOptions& options) {
  constexpr int few = 16;  // for which other algorithms may be faster
  const auto& links = options.links;
  const bool one_kind = links.island <= 1 || links.island >= options.ranks;
  const bool rings = options.all_reduce == Algorithm::automatic || options.all_reduce == Algorithm::ring;
  return options.ranks > few && one_kind && rings && !links.shared && !options.keep_spans && !options.keep_steps;
}

/// As a SimulatedRank that is all of them.
class RanksTogether {
 public:
  struct Work {
    RanksTogether* ranks = nullptr;
    std::size_t call = 0;
    void wait() {
      if (ranks != nullptr) std::exchange(ranks, nullptr)->wait(call);
    }
  };

  explicit RanksTogether(const SimulationOptions& options)
      : options_(options),
        link_(options.links.island == 0 || options.links.island >= options.ranks ? options.links.inside
                                                                               : options.links.between),
        alpha_(link_.latency()),
        call_(time_of("call", options.links.call)),
        times_(static_cast<std::size_t>(options.ranks)),
        free_(times_.size()),
        under_way_(times_.size()) {}

  int rank() const { return 0; }
  int size() const { return options_.ranks; }
  Time clock() const { return times_.front().end; }
  /// The first `ranks` ranks.
  void compute(double usual, const char* what, int ranks) {
    const Time own = time_of(what, usual);
    for (int rank = 0; rank < ranks; ++rank) {
      Time& clock = times_[static_cast<std::size_t>(rank)].end;
      clock = later(clock, options_.computing.time(own, rank, step_));
    }
  }
  void compute(double usual, const char* what = "compute") { compute(usual, what, size()); }
  void next_step() {
    ++step_;
    if (calls_.size() < 2) return;
    gone_ += calls_.size() - 1;
    calls_.erase(calls_.begin(), calls_.end() - 1);
  }
  void mark(std::string_view, std::string_view, Time, std::size_t = 0, int = -1) {}
  void hold(trace::Memory, std::int64_t) {}

  Work start(Op op, std::size_t bytes, trace::Traffic = trace::Traffic::gradients, int peer = 0, bool = false, int = -1,
             int = -1) {
    auto& call = calls_.emplace_back();
    auto& at = call.ended;
    call.came.resize(times_.size());
    for (std::size_t rank = 0; rank < times_.size(); ++rank) {
      call.came[rank] = std::max(free_[rank], times_[rank].end);
      call.last = std::max(call.last, call.came[rank]);
    }
    at = call.came;
    for (auto& each : at) each += call_;
    const auto ranks = times_.size();
    if (op == Op::broadcast) {
      chain(at, bytes, static_cast<std::size_t>(peer));
    } else if (op == Op::all_gather && bytes * ranks <= most_bruck_bytes) {
      few_rounds(at, bytes);
    } else {
      const bool reduces = op == Op::all_reduce;
      auto chunk = reduces ? (bytes + ranks * 4 - 1) / (ranks * 4) * 4 : bytes;
      do {
        const auto segment = std::min(chunk, longest_chunk);
        ring(at, segment, static_cast<std::int64_t>((reduces ? 2 : 1) * (ranks - 1)));
        chunk -= segment;
      } while (chunk > 0);
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) free_[rank] = at[rank];
    last_collective_ = at[0];
    return {this, gone_ + calls_.size() - 1};
  }
  void call(Op op, std::size_t bytes, trace::Traffic traffic = trace::Traffic::gradients, int = 0, bool = false) {
    start(op, bytes, traffic).wait();
  }
  /// Rank 0 sends to all others, one after another.
  void from_server(std::size_t bytes) {
    const auto pieces = pieces_of(bytes);
    Time sends = begin_message(0);
    for (std::size_t rank = 1; rank < times_.size(); ++rank) {
      Time receives{};
      for (const auto length : pieces) {
        receives = std::max(receives, sends + alpha_) + length;
        sends = later(sends, length);
      }
      end_message(rank, std::max(begin_message(rank), receives));
    }
    end_message(0, sends);
  }
  /// And receives from each in turn.
  void to_server(std::size_t bytes) {
    const auto pieces = pieces_of(bytes);
    Time& receives = server_receives_ = std::max(server_receives_, last_collective_);
    Time clock = begin_message(0);
    for (std::size_t rank = 1; rank < times_.size(); ++rank) {
      Time sends = begin_message(rank);
      for (const auto length : pieces) {
        receives = std::max(receives, sends + alpha_) + length;
        sends = later(sends, length);
      }
      clock = std::max(clock, receives);
      end_message(rank, sends);
    }
    end_message(0, clock);
  }

  SimulatedTimes take() {
    if (has_messages_)
      for (auto& rank : times_) rank.late = {};
    return {std::move(times_)};
  }

 private:
  static constexpr std::size_t longest_chunk = Network::queue_pieces / 2 * Network::piece_bytes;

  struct Call {
    std::vector<Time> came, ended;  // by rank
    Time last{};                    // to come
  };

  /// How long each piece takes a port, into which `relay` cuts so many bytes.
  std::vector<Time> pieces_of(std::size_t bytes) const {
    const std::size_t element = bytes % 4 == 0 ? 4 : 1, count = bytes / element, parts = Network::queue_pieces / 2,
                      most = Network::piece_bytes / element,
                      each = std::clamp((count + parts - 1) / parts, std::min(most, 32 * 1024 / element), most);
    std::vector<Time> out;
    for (std::size_t left = count; left > 0; left -= std::min(left, each))
      out.push_back(link_.transfer(std::min(left, each) * element));
    return out;
  }

  // From when they start to when they end.
  void ring(std::vector<Time>& at, std::size_t chunk, std::int64_t sends) const {
    Time whole{}, longest{};
    for (const auto length : pieces_of(chunk)) whole = later(whole, length), longest = std::max(longest, length);
    const auto ranks = static_cast<std::int64_t>(at.size());
    const auto [first, last] = std::minmax_element(at.begin(), at.end());
    const Time begun = *first;
    check<UsageError>(seconds(*last - begun) + 3 * static_cast<double>(ranks) * seconds(whole + alpha_) < 9000,
                      "simulation: more than 9000 s of virtual time");
    for (auto& each : at) each -= begun;
    const Time hop = alpha_ - (whole - longest), all = sends * whole;
    // The largest start, less the hops to it, of the `sends` ranks before: they lie on a line that goes around twice.
    const auto before = [&](std::int64_t place) { return at[static_cast<std::size_t>(place % ranks)] - place * hop; };
    std::deque<std::int64_t> largest;  // places, of falling value
    std::vector<Time> ends(at.size());
    for (std::int64_t place = 0; place < 3 * ranks; ++place) {
      if (place >= 2 * ranks) {
        while (largest.front() < place - sends) largest.pop_front();
        const auto rank = static_cast<std::size_t>(place % ranks);
        ends[rank] = std::max(at[rank] + all, all + (whole - longest) + before(largest.front()) + place * hop);
      }
      while (!largest.empty() && before(largest.back()) <= before(place)) largest.pop_back();
      largest.push_back(place);
    }
    for (auto& each : ends) each = later(begun, each);
    at = std::move(ends);
  }
  // Bruck's.
  void few_rounds(std::vector<Time>& at, std::size_t bytes) const {
    const auto ranks = at.size();
    auto sends = at;
    std::vector<Time> heads(ranks);
    for (std::size_t distance = 1; distance < ranks; distance *= 2) {
      const Time length = link_.transfer(std::min(distance, ranks - distance) * bytes);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const Time leaves = std::max(at[rank], sends[rank]);
        sends[rank] = leaves + length;
        heads[(rank + distance) % ranks] = leaves + alpha_;
      }
      for (std::size_t rank = 0; rank < ranks; ++rank) at[rank] = std::max(at[rank], heads[rank] + length);
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) at[rank] = std::max(at[rank], sends[rank]);
  }
  // From `root` through all ranks behind it.
  void chain(std::vector<Time>& at, std::size_t bytes, std::size_t root) const {
    const auto pieces = pieces_of(bytes);
    std::vector<Time> heads(pieces.size(), Time::min());  // of the pieces that come to a rank
    for (std::size_t hop = 0; hop < at.size(); ++hop) {
      Time& clock = at[(root + hop) % at.size()];
      Time sends{}, receives = Time::min();
      for (std::size_t piece = 0; piece < pieces.size(); ++piece) {
        if (hop > 0) clock = std::max(clock, receives = std::max(receives, heads[piece]) + pieces[piece]);
        const Time leaves = std::max(clock, sends);
        sends = leaves + pieces[piece];
        heads[piece] = leaves + alpha_;
      }
      if (hop + 1 < at.size()) clock = std::max(clock, sends);
    }
  }

  Time begin_message(std::size_t rank) const { return std::max(free_[rank], times_[rank].end); }
  void end_message(std::size_t rank, Time ended) {
    has_messages_ = true;
    auto& own = times_[rank];
    own.waited += std::max(Time{}, ended - own.end);
    free_[rank] = own.end = later(std::max(own.end, ended), {});
  }
  // As Simulation counts it: how long, and of it until the last rank had come to the call under way.
  void wait(std::size_t call) {
    for (std::size_t rank = 0; rank < times_.size(); ++rank) {
      auto& own = times_[rank];
      const Time begun = own.end, ended = calls_[call - gone_].ended[rank];
      if (ended <= begun) continue;
      own.end = ended;
      own.waited += ended - begun;
      auto& first = under_way_[rank];
      first = std::max(first, gone_);
      while (first - gone_ + 1 < calls_.size() && calls_[first - gone_ + 1].came[rank] <= begun) ++first;
      for (std::size_t i = first - gone_; i < calls_.size() && calls_[i].came[rank] < ended; ++i)
        own.late += std::max(Time{}, std::min(ended, calls_[i].last) - std::max(begun, calls_[i].came[rank]));
    }
  }

  const SimulationOptions options_;
  const AlphaBeta link_;
  const Time alpha_, call_;
  std::vector<RankTimes> times_;
  std::vector<Time> free_;   // of each: when its calls have ended
  std::vector<Call> calls_;  // but for the first `gone_`
  std::size_t gone_ = 0;
  // Until when the server's port receives: pieces come to it before it asks for them.
  Time server_receives_{}, last_collective_{};
  std::vector<std::size_t> under_way_;  // of each: the last call to which it had come when it waited last
  std::uint32_t step_ = 0;
  bool has_messages_ = false;
};

}  // namespace chorus::comm::simulated
