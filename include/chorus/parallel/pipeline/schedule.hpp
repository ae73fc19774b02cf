#pragma once
/// Schedule: a table of the actions of each rank of a pipeline, in order. GPipe, OneForwardOneBackward, Interleaved and
/// ZeroBubbleH1 make such tables; `check_schedule` checks them without running any rank.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace chorus {

/// The model is cut into consecutive stages: stage s is on rank s % ranks, so a rank of an interleaved pipeline has
/// several. Each micro-batch goes forward through all stages, then backward.
struct Schedule {
  enum class Kind : std::uint8_t {
    forward,
    backward,  ///< by the stage's input; also by its parameters if the table has no `weight`
    weight     ///< by its parameters; no other action waits for it
  };
  struct Action {
    Kind kind;
    int micro_batch, stage;
    friend bool operator==(const Action&, const Action&) = default;
  };

  int stages = 0, micro_batches = 0;
  std::vector<std::vector<Action>> ranks;  ///< each rank's actions, in order

  int size() const { return static_cast<int>(ranks.size()); }
  int rank_of(int stage) const { return stage % size(); }
  /// Whether gradients by parameters are separate actions.
  bool splits_backward() const {
    const auto splits = [](const std::vector<Action>& actions) {
      return std::any_of(actions.begin(), actions.end(), [](const Action& a) { return a.kind == Kind::weight; });
    };
    return std::any_of(ranks.begin(), ranks.end(), splits);
  }

  /// A table without actions. Throws UsageError unless there are at least one rank, stage per rank and micro-batch.
  static Schedule empty(std::string_view name, int p, int m, int stages_of_rank = 1) {
    check<UsageError>(p >= 1 && m >= 1 && stages_of_rank >= 1, name, ": expected ranks, micro-batches and stages on ",
                      "each rank, got ", p, ", ", m, " and ", stages_of_rank);
    return {p * stages_of_rank, m, std::vector<std::vector<Action>>(static_cast<std::size_t>(p))};
  }
};

constexpr std::string_view name(Schedule::Kind kind) {
  constexpr std::string_view names[] = {"forward", "backward", "weight"};
  return names[static_cast<std::size_t>(kind)];
}
inline void append(std::string& out, const Schedule::Action& action) {
  out += cat(name(action.kind), " of micro-batch ", action.micro_batch, " in stage ", action.stage);
}

/// All micro-batches forward, then all backward (Huang et al. 2019, arXiv 1811.06965). A rank keeps the inputs of all m
/// micro-batches; the idle fraction is (p - 1) / (m + p - 1).
struct GPipe {
  static constexpr const char* name = "gpipe";
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m);
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      for (int i = 0; i < m; ++i) actions.push_back({Schedule::Kind::forward, i, rank});
      for (int i = 0; i < m; ++i) actions.push_back({Schedule::Kind::backward, i, rank});
    }
    return table;
  }
};

/// 1F1B (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473): after p - 1 - rank forwards, each forward is
/// followed by a backward. The idle fraction is GPipe's, but a rank keeps at most p - rank inputs.
struct OneForwardOneBackward {
  static constexpr const char* name = "1f1b";
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m);
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      const int warm_up = std::min(p - 1 - rank, m);
      for (int i = 0; i < warm_up; ++i) actions.push_back({Schedule::Kind::forward, i, rank});
      for (int i = 0; i < m; ++i) {
        if (i + warm_up < m) actions.push_back({Schedule::Kind::forward, i + warm_up, rank});
        actions.push_back({Schedule::Kind::backward, i, rank});
      }
    }
    return table;
  }
};

/// 1F1B with V stages on each rank (Narayanan et al. 2021): a stage, and the time until the last rank can begin, is V
/// times shorter, with V times the messages. Micro-batches form nearly equal groups of at least p (or one group of m <
/// p); each group passes all of the rank's stages before the next one.
template <int V>
struct Interleaved {
  static_assert(V >= 1, "Interleaved<V>: a rank has at least one stage");
  static constexpr const char* name = "interleaved";
  static constexpr int stages_of_rank = V;
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m, V);
    // The order in which a rank's parts of the model process the micro-batches.
    struct Turn {
      int part, micro_batch;
    };
    std::vector<Turn> turns;
    const int groups = std::max(m / p, 1), first_group = (m + groups - 1) / groups;
    for (int begin = 0, group = 0; group < groups; ++group) {
      const int end = begin + m / groups + (group < m % groups ? 1 : 0);
      for (int part = 0; part < V; ++part)
        for (int i = begin; i < end; ++i) turns.push_back({part, i});
      begin = end;
    }
    const int count = static_cast<int>(turns.size());
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      const auto forward = [&](int i) {
        const Turn turn = turns[static_cast<std::size_t>(i)];
        actions.push_back({Schedule::Kind::forward, turn.micro_batch, turn.part * p + rank});
      };
      const int warm_up = std::min(V == 1 ? p - 1 - rank : 2 * (p - 1 - rank) + (V - 1) * first_group, count);
      for (int i = 0; i < warm_up; ++i) forward(i);
      for (int i = 0; i < count; ++i) {
        if (i + warm_up < count) forward(i + warm_up);
        const Turn turn = turns[static_cast<std::size_t>(i)];
        actions.push_back({Schedule::Kind::backward, turn.micro_batch, (V - 1 - turn.part) * p + rank});
      }
    }
    return table;
  }
};

/// ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B that defers gradients by parameters into idle time. A rank defers
/// those of at most `rank` micro-batches, so that it keeps p inputs, like 1F1B's first rank. For m >= p a pass takes 3
/// m + p - 1 units.
struct ZeroBubbleH1 {
  static constexpr const char* name = "zb-h1";
  static Schedule of(int p, int m) {
    auto table = Schedule::empty(name, p, m);
    for (int rank = 0; rank < p; ++rank) {
      auto& actions = table.ranks[static_cast<std::size_t>(rank)];
      const int warm_up = std::min(p - 1 - rank, m);
      int next_weight = 0;
      const auto weight = [&] { actions.push_back({Schedule::Kind::weight, next_weight++, rank}); };
      for (int i = 0; i < warm_up; ++i) actions.push_back({Schedule::Kind::forward, i, rank});
      for (int i = 0; i < m; ++i) {
        const bool goes_forward = i + warm_up < m;
        if (goes_forward) actions.push_back({Schedule::Kind::forward, i + warm_up, rank});
        actions.push_back({Schedule::Kind::backward, i, rank});
        // Without a forward to do, the rank would wait for the next gradient.
        if (!goes_forward || i + 1 - next_weight > rank) weight();
      }
      while (next_weight < m) weight();
    }
    return table;
  }
};

/// The number of stages that a schedule gives each rank.
template <class S>
inline constexpr int stages_of_rank = 1;
template <int V>
inline constexpr int stages_of_rank<Interleaved<V>> = V;

}  // namespace chorus
