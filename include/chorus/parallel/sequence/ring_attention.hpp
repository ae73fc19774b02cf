#pragma once
/// Attention of ranks that share the tokens of each sample: keys and values travel round a ring (Liu, Zaharia, Abbeel,
/// "Ring Attention with Blockwise Transformers", 2023), with zig-zag stretches. CPU only.

#include <algorithm>
#include <chorus/core/threads.hpp>
#include <chorus/kernels/cpu/attention.hpp>
#include <chorus/parallel/sequence/ring.hpp>
#include <chorus/parallel/sequence/stretches.hpp>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace chorus::sequence {

/// One pass of attention over `length` places. Forward sends (c-1)/c of all keys and values; backward sends them again,
/// and as many numbers of their gradients.
///
/// In step j a rank has the keys of the rank that is j before it, and sends them on meanwhile. The statistics of the
/// softmax stay between the steps. In backward the gradients of a rank's keys begin at the next rank, visit the others,
/// and come home after c-1 hops; the rank itself adds its own part last.
template <class T, class Communicator>
class RingAttention {
 public:
  /// `s`: the sizes of this rank's queries and keys.
  RingAttention(const Ring<Communicator>& ring, Index length, const kernels::AttentionShape& s)
      : ring_(ring), length_(length), s_(s), whole_(s) {
    whole_.queries = whole_.keys = length;
    block_ = whole_;
    block_.causal = false;
    runs_ = of(0);
  }

  /// See kernels::attention_forward. mask: [queries, keys] of all places.
  void forward(const T* q, const T* k, const T* v, const T* mask, T* y, T* log_sums) {
    const Index rows = s_.batch() * s_.queries;
    std::vector<T> largest(size(rows), -std::numeric_limits<T>::infinity()), total(size(rows));
    std::fill_n(y, rows * s_.values, T{0});
    visit(k, v, [&](int, const Runs& theirs, const T* keys, const T* values) {
      each_block_of_queries([&](Index matrix, const Range& query) {
        const kernels::Scratch<T> memory(Cpu{}, 2 * tile);
        T *scores = memory.data(), *factors = scores + tile;
        const Index row = matrix * s_.queries + query.own;
        each_block(theirs, [&](const Range& key) {
          if (!make_scores(matrix, query, key, theirs, q, keys, mask, scores, factors)) return;
          const Index column = matrix * places_in(theirs) + key.own;
          kernels::detail::attention_add(s_, query.count, key.count, scores, factors, values + column * s_.values,
                                         y + row * s_.values, &largest[size(row)], &total[size(row)]);
        });
      });
    });
    kernels::detail::attention_end(s_, rows, largest.data(), total.data(), y, log_sums);
  }

  /// See kernels::attention_backward.
  void backward(const T* q, const T* k, const T* v, const T* mask, const T* y, const T* log_sums, const T* dy, T* dq,
                T* dk, T* dv) {
    const Index rows = s_.batch() * s_.queries;
    std::vector<T> dots(size(rows));
    kernels::detail::attention_dots(rows, s_.values, y, dy, dots.data());
    const bool returns = dk != nullptr || dv != nullptr;
    std::vector<T> sums[2], arrived;
    typename Ring<Communicator>::Hop home;
    // The gradients of step j's keys, added to those that the ranks before have sent, go to the next rank.
    const auto send_on = [&](int j) {
      auto& mine = sums[j % 2];
      home.wait();
      if (j > 1)
        for (std::size_t i = 0; i < mine.size(); ++i) mine[i] += arrived[i];
      arrived.resize(numbers(of(j + 1)));
      home = ring_.template hop<T>(mine, arrived);
    };
    visit(k, v, [&](int j, const Runs& theirs, const T* keys, const T* values) {
      T *of_keys = dk, *of_values = dv;
      if (j > 0 && returns) {
        sums[j % 2].assign(numbers(theirs), T{0});
        of_keys = sums[j % 2].data();
        of_values = of_keys + s_.batch() * places_in(theirs) * s_.features;
      }
      parallel_for(s_.batch(), [&](Index matrix) {
        const kernels::Scratch<T> memory(Cpu{}, 3 * tile);
        T *weights = memory.data(), *gradients = weights + tile, *factors = gradients + tile;
        each_block(theirs, [&](const Range& key) {
          each_block(runs_, [&](const Range& query) {
            if (!make_scores(matrix, query, key, theirs, q, keys, mask, weights, factors)) return;
            const Index row = matrix * s_.queries + query.own, column = matrix * places_in(theirs) + key.own;
            kernels::detail::attention_block_backward<T>(
                s_, query.count, key.count, weights, gradients, factors,
                {q + row * s_.features, keys + column * s_.features, values + column * s_.values, dy + row * s_.values,
                 log_sums + row, &dots[size(row)], moved(dq, row * s_.features), moved(of_keys, column * s_.features),
                 moved(of_values, column * s_.values)});
          });
        });
      });
      if (j > 0 && returns) send_on(j);
    });
    if (!returns || ring_.size() == 1) return;
    home.wait();
    const auto add = [](const T* from, std::size_t count, T* to) {
      if (to != nullptr)
        for (std::size_t i = 0; i < count; ++i) to[i] += from[i];
    };
    const std::size_t keys = size(s_.batch() * s_.keys * s_.features);
    add(arrived.data(), keys, dk);
    add(arrived.data() + keys, arrived.size() - keys, dv);
  }

 private:
  // Neighbouring places: their first place in the sequence and among this array's.
  struct Range {
    Index place, own, count;
  };
  static constexpr Index tile = kernels::detail::attention_block * kernels::detail::attention_block;

  static std::size_t size(Index count) { return static_cast<std::size_t>(count); }
  static T* moved(T* at, Index by) { return at == nullptr ? nullptr : at + by; }
  // The stretches of the rank that is `steps` before this one.
  Runs of(int steps) const { return stretches(length_, ring_.size(), ring_.before(steps)); }
  std::size_t numbers(const Runs& runs) const { return size(s_.batch() * places_in(runs) * (s_.features + s_.values)); }

  template <class F>
  static void each_block(const Runs& runs, const F& f) {
    Index before = 0;
    for (const AxisPart& run : runs) {
      const auto block = [&](Index first, Index count) { f(Range{run.begin + first, before + first, count}); };
      kernels::detail::for_attention_blocks(0, run.count, kernels::detail::attention_block, block);
      before += run.count;
    }
  }
  template <class F>
  void each_block_of_queries(const F& f) const {
    std::vector<Range> blocks;
    each_block(runs_, [&](const Range& range) { blocks.push_back(range); });
    const auto count = static_cast<Index>(blocks.size());
    parallel_for(s_.batch() * count, [&](Index task) { f(task / count, blocks[size(task % count)]); });
  }

  // Calls f(step, stretches, keys, values) for the keys of each rank, beginning with this one's.
  template <class F>
  void visit(const T* k, const T* v, const F& f) {
    if (ring_.size() == 1) return f(0, runs_, k, v);
    std::vector<T> here(k, k + s_.batch() * s_.keys * s_.features), next;
    here.insert(here.end(), v, v + s_.batch() * s_.keys * s_.values);
    for (int j = 0; j < ring_.size(); ++j) {
      typename Ring<Communicator>::Hop hop;
      if (j + 1 < ring_.size()) {
        next.resize(numbers(of(j + 1)));
        hop = ring_.template hop<T>(here, next);
      }
      f(j, of(j), here.data(), here.data() + s_.batch() * places_in(of(j)) * s_.features);
      hop.wait();
      std::swap(here, next);
    }
  }

  // The scores of a block, with mask, and the factors of dropout. False if no query of it sees a key.
  bool make_scores(Index matrix, const Range& query, const Range& key, const Runs& theirs, const T* q, const T* keys,
                   const T* mask, T* scores, T* factors) const {
    if (s_.causal && query.place + query.count <= key.place) return false;
    const T* added = mask == nullptr ? nullptr : mask + matrix * s_.mask_pitch + query.place * length_ + key.place;
    kernels::detail::attention_scores(block_, {0, 0, query.count, 0, key.count},
                                      q + (matrix * s_.queries + query.own) * s_.features,
                                      keys + (matrix * places_in(theirs) + key.own) * s_.features, added, scores);
    const kernels::detail::AttentionBlock of_whole{matrix, query.place, query.count, key.place, key.count};
    if (s_.causal)
      for (Index i = 0; i < query.count; ++i) {
        T* row = scores + i * kernels::detail::attention_block;
        std::fill(row + kernels::detail::seen_keys(whole_, of_whole, i), row + key.count,
                  -std::numeric_limits<T>::infinity());
      }
    if (s_.dropout > 0) kernels::detail::attention_dropout(whole_, of_whole, factors);
    return true;
  }

  const Ring<Communicator>& ring_;
  Index length_;
  kernels::AttentionShape s_, whole_, block_;  // of this rank's places, of all, and of all without causality
  Runs runs_;
};

}  // namespace chorus::sequence
