#pragma once
/// Parameters of which ranks hold pieces, for optimizers whose step depends on whole ones: sums over all pieces, and
/// owners that get a whole parameter for a moment.

#include <algorithm>
#include <array>
#include <chorus/core/tensor_group.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/optim/paired_ranks.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace chorus::optim::detail {

/// What each rank has of each parameter. Parameters are numbered in the given order; ranks know them by name, because
/// stages of a pipeline list their own first.
template <Device D>
class Pieces {
 public:
  /// `who`: the optimizer. Throws UsageError for pieces whose other ranks are unknown.
  Pieces(const char* who, std::vector<nn::NamedParameter<D>> parameters)
      : who_(who), parameters_(std::move(parameters)), pieces_(parameters_.size()), owner_(parameters_.size(), -1) {
    for (const auto& named : parameters_)
      if (is_piece(named) && !named.parameter->ranks()) refuse(named);
  }

  /// Called at the beginning of each step; in the first one, ranks tell each other what they have. `cost(i)`: of the
  /// work that an owner of parameter i has; 0 if it needs none. Throws UsageError if ranks have other parameters, or if
  /// one was cut since then.
  template <class Cost>
  void meet(const Cost& cost) {
    if (!std::exchange(met_, true)) {
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        const auto& ranks = parameters_[i].parameter->ranks();
        if (!ranks) continue;
        const auto same = [&](const Group& group) { return group.shared == ranks; };
        auto group = std::find_if(groups_.begin(), groups_.end(), same);
        if (group == groups_.end()) group = groups_.insert(groups_.end(), {ranks, &paired(parameters_[i]), {}});
        group->members.push_back(i);
      }
      for (Group& group : groups_) describe(group, cost);
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (!cut(i) && is_piece(parameters_[i])) refuse(parameters_[i]);
  }
  /// Whether any rank has a piece of any parameter.
  bool any() const { return any_; }
  /// Whether ranks have pieces of parameter i.
  bool cut(std::size_t i) const { return !pieces_[i].empty(); }
  std::size_t size() const { return parameters_.size(); }
  const std::vector<nn::NamedParameter<D>>& parameters() const { return parameters_; }
  const ParameterOn<D>& parameter(std::size_t i) const { return *parameters_[i].parameter; }

  /// For parameters in pieces, `numbers[i]` becomes its sum over the pieces; each rank gives that of its own. One
  /// message for all parameters; all ranks get the same bits.
  void sum(std::vector<std::array<double, 2>>& numbers) const {
    for (const Group& group : groups_) {
      std::vector<double> message;
      for (const std::size_t i : group.members)
        if (cut(i))
          for (const double number : numbers[i]) message.push_back(parameter(i).counts() ? number : 0);
      if (message.empty()) continue;
      group.ranks->sum(message);
      auto from = message.begin();
      for (const std::size_t i : group.members)
        if (cut(i))
          for (double& number : numbers[i]) number = *from++;
    }
  }

  /// Sends the pieces of each parameter i with `which[i]` to its owner, calls `use(i, whole)` there, and sends the
  /// result's pieces back; all in the host's memory. `mine[i]`: this rank's piece. All ranks with pieces of a parameter
  /// have the same `which`.
  template <class T, class Use>
  void by_owners(const std::vector<char>& which, std::vector<std::vector<T>>& mine, const Use& use) const {
    for (const Group& group : groups_) {
      const auto own = static_cast<std::size_t>(group.ranks->rank());
      const auto ranks = static_cast<std::size_t>(group.ranks->size());
      std::vector<std::size_t> chosen;
      for (const std::size_t i : group.members)
        if (cut(i) && which[i]) chosen.push_back(i);
      PairedRanks::Messages to(ranks), from(ranks);
      for (const std::size_t i : chosen) {
        const std::size_t owner = static_cast<std::size_t>(owner_[i]);
        if (owner != own && pieces_[i][own].counts) append(to[owner], mine[i]);
        for (std::size_t r = 0; r < ranks && owner == own; ++r)
          if (r != own && pieces_[i][r].counts) from[r].resize(from[r].size() + pieces_[i][r].count * sizeof(T));
      }
      group.ranks->exchange(to, from);

      PairedRanks::Messages results(ranks), back(ranks);
      std::vector<std::size_t> at(ranks);  // in the messages
      for (const std::size_t i : chosen) {
        const std::size_t owner = static_cast<std::size_t>(owner_[i]);
        if (owner != own) {
          back[owner].resize(back[owner].size() + pieces_[i][own].count * sizeof(T));
          continue;
        }
        std::vector<T> whole(static_cast<std::size_t>(numel(parameter(i).extents())));
        for (std::size_t r = 0; r < ranks; ++r) {
          if (!pieces_[i][r].counts) continue;
          std::vector<T> piece = r == own ? std::move(mine[i]) : std::vector<T>(pieces_[i][r].count);
          if (r != own) take(from[r], at[r], piece);
          for_runs(i, pieces_[i][r], [&](auto in_whole, auto in_piece, auto count) {
            std::copy_n(piece.begin() + in_piece, count, whole.begin() + in_whole);
          });
        }
        use(i, std::span(whole));
        for (std::size_t r = 0; r < ranks; ++r) {
          std::vector<T> piece(pieces_[i][r].count);
          for_runs(i, pieces_[i][r], [&](auto in_whole, auto in_piece, auto count) {
            std::copy_n(whole.begin() + in_whole, count, piece.begin() + in_piece);
          });
          if (r == own)
            mine[i] = std::move(piece);
          else
            append(results[r], piece);
        }
      }
      group.ranks->exchange(results, back);
      std::fill(at.begin(), at.end(), 0);
      for (const std::size_t i : chosen)
        if (const auto owner = static_cast<std::size_t>(owner_[i]); owner != own) {
          mine[i].resize(pieces_[i][own].count);
          take(back[owner], at[owner], mine[i]);
        }
    }
  }

 private:
  /// Numbers [begin, begin + count) of a parameter, or, if tensor parallelism splits it, of rank `part`'s part of it.
  struct Piece {
    std::size_t begin = 0, count = 0;
    int part = 0;
    bool counts = false;  // the one that counts, of those with the same numbers
  };
  struct Group {
    std::shared_ptr<ModelRanks> shared;
    PairedRanks* ranks;
    std::vector<std::size_t> members;  // by name
  };

  static bool is_piece(const nn::NamedParameter<D>& named) {
    const auto& parameter = *named.parameter;
    return parameter.in_pieces() && parameter.count() > 0 && parameter.count() < numel(parameter.extents());
  }
  [[gnu::cold]] void refuse(const nn::NamedParameter<D>& named) const {
    nn::check_whole(who_, named,
                    "it needs whole parameters, or those of a net that shares them out before the first step");
  }
  PairedRanks& paired(const nn::NamedParameter<D>& named) const {
    auto* const ranks = dynamic_cast<PairedRanks*>(named.parameter->ranks().get());
    check<UsageError>(ranks != nullptr, who_, ": expected ranks that exchange messages (PairedRanks), got others of '",
                      named.name, "'");
    return *ranks;
  }

  template <class Cost>
  [[gnu::cold]] void describe(Group& group, const Cost& cost) {
    std::sort(group.members.begin(), group.members.end(),
              [this](std::size_t a, std::size_t b) { return parameters_[a].name < parameters_[b].name; });
    check_alike(group);
    const auto ranks = static_cast<std::size_t>(group.ranks->size());
    constexpr std::size_t numbers = 4;
    std::vector<double> table(group.members.size() * ranks * numbers);
    for (std::size_t m = 0; m < group.members.size(); ++m) {
      const auto& named = parameters_[group.members[m]];
      const auto& parameter = *named.parameter;
      if (!parameter.is_here()) continue;
      double* const own = &table[(m * ranks + static_cast<std::size_t>(group.ranks->rank())) * numbers];
      own[0] = static_cast<double>(parameter.part_begin());
      own[1] = static_cast<double>(parameter.count());
      own[2] = parameter.part() == nullptr ? 0 : parameter.part()->group->rank();
      own[3] = parameter.counts() && parameter.count() > 0 ? 1 : 0;
    }
    group.ranks->sum(table);
    for (std::size_t m = 0; m < group.members.size(); ++m) {
      const std::size_t i = group.members[m];
      std::vector<Piece> all;
      for (std::size_t r = 0; r < ranks; ++r) {
        const double* const of_rank = &table[(m * ranks + r) * numbers];
        all.push_back({static_cast<std::size_t>(of_rank[0]), static_cast<std::size_t>(of_rank[1]),
                       static_cast<int>(of_rank[2]), of_rank[3] != 0});
      }
      const auto whole = static_cast<std::size_t>(numel(parameter(i).extents()));
      if (std::any_of(all.begin(), all.end(), [&](const Piece& p) { return p.count > 0 && p.count < whole; }))
        pieces_[i] = std::move(all);
      any_ = any_ || cut(i);
    }
    choose_owners(group, cost);
  }
  // Ranks with other parameters would misread the table.
  void check_alike(const Group& group) const {
    std::size_t hash = group.members.size();
    for (const std::size_t i : group.members) {
      hash = hash * 31 + std::hash<std::string>()(parameters_[i].name);
      for (const Index extent : parameter(i).extents()) hash = hash * 31 + static_cast<std::size_t>(extent);
    }
    const auto number = static_cast<double>(hash >> 12);
    double largest[] = {number, -number};
    group.ranks->max(largest);
    check<UsageError>(largest[0] == -largest[1], who_,
                      ": expected the same parameters on all ranks, got others on some rank: give it net.parameters(), "
                      "or choose from these by name");
  }
  // The longest work first, each to the rank with the least so far, of those that have a piece; among equals to the one
  // with the largest piece.
  template <class Cost>
  void choose_owners(const Group& group, const Cost& cost) {
    std::vector<std::pair<double, std::size_t>> work;
    for (const std::size_t i : group.members)
      if (cut(i) && cost(i) > 0) work.emplace_back(cost(i), i);
    std::stable_sort(work.begin(), work.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<double> busy(static_cast<std::size_t>(group.ranks->size()));
    for (const auto& [each, i] : work) {
      std::size_t best = busy.size();
      for (std::size_t r = 0; r < busy.size(); ++r)
        if (const Piece& piece = pieces_[i][r]; piece.counts)
          if (best == busy.size() || std::pair(busy[r], pieces_[i][best].count) < std::pair(busy[best], piece.count))
            best = r;
      owner_[i] = static_cast<int>(best);
      busy[best] += each;
    }
  }

  // Calls f(in the whole, in the piece, count) for each contiguous run of a piece.
  template <class F>
  void for_runs(std::size_t i, const Piece& piece, const F& f) const {
    const auto begin = static_cast<Index>(piece.begin), end = begin + static_cast<Index>(piece.count);
    const auto& part = parameter(i).part();
    if (part == nullptr) return f(begin, Index{0}, end - begin);
    const auto layout = part->layout();
    const auto of_rank = axis_part(layout.width, part->split.unit, part->group->size(), piece.part);
    layout.for_runs(of_rank, [&](Index in_whole, Index in_part, Index count) {
      const Index from = std::max(in_part, begin), to = std::min(in_part + count, end);
      if (from < to) f(in_whole + from - in_part, from - begin, to - from);
    });
  }

  template <class T>
  static void append(std::vector<std::uint8_t>& message, const std::vector<T>& piece) {
    const std::size_t at = message.size(), bytes = piece.size() * sizeof(T);
    message.resize(at + bytes);
    if (bytes > 0) std::memcpy(message.data() + at, piece.data(), bytes);
  }
  template <class T>
  static void take(const std::vector<std::uint8_t>& message, std::size_t& at, std::vector<T>& piece) {
    const std::size_t bytes = piece.size() * sizeof(T);
    if (bytes > 0) std::memcpy(piece.data(), message.data() + at, bytes);
    at += bytes;
  }

  const char* who_;
  std::vector<nn::NamedParameter<D>> parameters_;
  std::vector<Group> groups_;
  std::vector<std::vector<Piece>> pieces_;  // by parameter, by rank; empty if nobody has a piece
  std::vector<int> owner_;                  // by parameter
  bool met_ = false, any_ = false;
};

}  // namespace chorus::optim::detail
